//! `cargo xtask image`: builds the container image, FROM scratch, as an OCI archive and without Docker, and its SBOM.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use lab::oci::Image;
use serde_json::{Value, json};

use crate::{build, progress, setup, workspace};

/// The name of the image in the manifests.
pub const NAME: &str = "ghcr.io/spillway/spillway";

/// The programs in the image.
const PROGRAMS: [&str; 2] = ["egress-daemon", "egressctl"];

/// The tag of the image that tests upgrade to.
pub const NEXT: &str = "next";

/// Build the container image as an OCI archive, and the list of its contents
#[derive(clap::Args)]
pub struct Args {
    /// Build for amd64 or arm64 [default: this machine's architecture]
    #[arg(long, value_name = "ARCH")]
    arch: Option<String>,
}

/// Builds the image and prints its path and the SBOM's.
pub fn run(args: &Args) -> Result<()> {
    let architecture = match &args.arch {
        Some(named) => named.as_str(),
        None => architecture()?,
    };
    setup::ensure(setup::Scope::Build)?;
    let archive = pack(&cross_built(target(architecture)?)?, architecture, version(), architecture)?;
    println!("{}\n{}", archive.display(), sbom_of(&archive).display());
    Ok(())
}

/// Builds an unoptimized image for this machine's architecture, with the version as its tag.
pub fn for_tests() -> Result<PathBuf> {
    of_binaries(&build::binaries(false)?, version())
}

/// Makes an image for this machine's architecture from unoptimized programs that are built already.
pub fn of_binaries(binaries: &Path, tag: &str) -> Result<PathBuf> {
    let (architecture, small) = (architecture()?, workspace::scratch_dir()?.join("image"));
    fs::create_dir_all(&small).with_context(|| format!("cannot make {}", small.display()))?;
    // Debug information would take most of the space in each node's image store.
    for program in PROGRAMS {
        build::stripped(&binaries.join(program), &small)?;
    }
    pack(&small, architecture, tag, &format!("{architecture}-debug"))
}

/// Returns the workspace's version.
pub fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Returns the name of this machine's architecture in images.
pub fn architecture() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("amd64"),
        "aarch64" => Ok("arm64"),
        other => bail!("there is no image for {other}: amd64 and arm64 are supported"),
    }
}

/// Returns Rust's target for an architecture: glibc, which is linked statically, so that a program needs no other file.
fn target(architecture: &str) -> Result<&'static str> {
    match architecture {
        "amd64" => Ok("x86_64-unknown-linux-gnu"),
        "arm64" => Ok("aarch64-unknown-linux-gnu"),
        other => bail!("there is no image for {other}: write amd64 or arm64"),
    }
}

/// Writes the image, and next to it the list of its contents.
fn pack(binaries: &Path, architecture: &str, tag: &str, suffix: &str) -> Result<PathBuf> {
    let folder = workspace::target_dir().join("image");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let archive = folder.join(format!("spillway-{tag}-{suffix}.tar"));
    let sbom = sbom_of(&archive);
    fs::write(&sbom, serde_json::to_vec_pretty(&contents(target(architecture)?, tag)?)?)?;
    let [daemon, ctl] = PROGRAMS.map(|name| (format!("/usr/bin/{name}"), binaries.join(name), true));
    let image = Image {
        name: format!("{NAME}:{tag}"),
        architecture: architecture.to_owned(),
        files: vec![
            daemon,
            ctl,
            ("/usr/share/spillway/sbom.cdx.json".to_owned(), sbom, false),
            ("/usr/share/spillway/LICENSE".to_owned(), workspace::root().join("LICENSE-APACHE"), false),
        ],
        entrypoint: vec!["/usr/bin/egress-daemon".to_owned()],
        labels: vec![
            ("org.opencontainers.image.title".to_owned(), "spillway".to_owned()),
            ("org.opencontainers.image.version".to_owned(), tag.to_owned()),
            ("org.opencontainers.image.licenses".to_owned(), "Apache-2.0".to_owned()),
        ],
    };
    image.write(&archive)?;
    Ok(archive)
}

fn sbom_of(archive: &Path) -> PathBuf {
    archive.with_extension("cdx.json")
}

/// Builds both programs for a target, and returns their folder.
fn cross_built(target: &str) -> Result<PathBuf> {
    let mut command = workspace::cargo("build");
    command.args(build::BINARIES).args(["--release", "--target", target]);
    if !target.starts_with(std::env::consts::ARCH) {
        let compiler = format!("{}-gcc", target.replace("-unknown", ""));
        if Command::new(&compiler).arg("--version").output().is_err() {
            bail!("{target} needs a linker: apt-get install gcc-aarch64-linux-gnu, and rustup target add {target}");
        }
        command.env(format!("CARGO_TARGET_{}_LINKER", target.to_uppercase().replace('-', "_")), compiler);
    }
    progress::run(&format!("build the programs for {target} (minutes, the first time)"), &mut command)?;
    Ok(build::folder_of(target, true))
}

/// Returns the crates in the programs, as CycloneDX.
fn contents(target: &str, tag: &str) -> Result<Value> {
    let mut command = workspace::cargo("tree");
    command.args(["--package", "egress-daemon", "--edges", "normal", "--target", target, "--prefix", "none"]);
    command.args(["--format", "{p}|{l}", "--locked"]);
    let text = lab::command::output(&mut command)?;
    let mut lines: Vec<&str> = text.lines().map(|line| line.trim_end_matches(" (*)")).collect();
    lines.sort_unstable();
    lines.dedup();
    let component = |line: &&str| {
        let (package, license) = line.split_once('|')?;
        let mut words = package.split_whitespace();
        let (name, version) = (words.next()?, words.next()?.trim_start_matches('v'));
        let license = license.trim_end_matches(" (*)");
        Some(json!({
            "type": "library",
            "name": name,
            "version": version,
            "purl": format!("pkg:cargo/{name}@{version}"),
            "licenses": if license.is_empty() { json!([]) } else { json!([{"expression": license}]) },
        }))
    };
    let components: Vec<Value> = lines.iter().filter_map(component).collect();
    if components.is_empty() {
        bail!("cargo tree named no crate");
    }
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": NAME, "version": tag}},
        "components": components,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sbom_lists_linked_crates_and_no_test_dependencies() {
        let contents = contents("x86_64-unknown-linux-gnu", "1").unwrap();
        let names: Vec<&str> =
            contents["components"].as_array().unwrap().iter().filter_map(|one| one["name"].as_str()).collect();
        assert!(names.contains(&"aya") && names.contains(&"kube-client"), "{names:?}");
        assert!(!names.contains(&"proptest") && !names.contains(&"lab"), "{names:?}");
        assert!(contents["components"].as_array().unwrap().iter().all(|one| one["version"] != ""));
    }
}
