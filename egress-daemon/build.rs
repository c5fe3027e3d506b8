//! Builds the eBPF programs from source and names the object for the daemon to embed:
//! `aya::include_bytes_aligned!(env!("SPILLWAY_EBPF_OBJECT"))`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io};

#[allow(dead_code, reason = "shared with xtask, which uses the rest")]
#[path = "../xtask/src/toolchain.rs"]
mod toolchain;

use toolchain::{BPF_TARGET, Toolchain};

const PACKAGE: &str = "egress-ebpf";
const BINARY: &str = "spillway";

fn main() -> ExitCode {
    match build() {
        Ok(object) => {
            println!("cargo::rustc-env=SPILLWAY_EBPF_OBJECT={}", object.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("cargo::error={}", error.lines().next().unwrap_or_default());
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<PathBuf, String> {
    let manifest_dir = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let workspace = manifest_dir.parent().ok_or("egress-daemon is not in a workspace")?;
    for input in ["egress-ebpf", "egress-common", "Cargo.toml", "xtask/src/toolchain.rs"] {
        println!("cargo::rerun-if-changed={}", workspace.join(input).display());
    }
    let toolchain = Toolchain::find().map_err(|missing| missing.to_string())?;
    println!("cargo::rerun-if-changed={}", toolchain.linker.display());

    let out_dir = PathBuf::from(variable("OUT_DIR")?);
    let target_dir = target_dir(&out_dir);
    let output = toolchain
        .cargo("build")
        .args(["--quiet", "--release", "--package", PACKAGE, "--bin", BINARY, "--manifest-path"])
        .arg(workspace.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target_dir)
        .output()
        .map_err(|error| format!("{} cannot be run: {error}", toolchain.rust.cargo.display()))?;
    let messages = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!(
            "{PACKAGE} does not build with {} and {}:\n{messages}",
            toolchain.rust.rustc.display(),
            toolchain.linker.display()
        ));
    }
    for line in messages.lines().skip_while(|line| !line.starts_with("warning")) {
        println!("cargo::warning={line}");
    }
    let built = target_dir.join(BPF_TARGET).join("release").join(BINARY);
    copy_if_changed(&built, &out_dir.join("spillway.bpf.o"))
        .map_err(|error| format!("the object {} cannot be copied: {error}", built.display()))
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}; build.rs runs under cargo only"))
}

/// One folder for all profiles of the daemon, so that they share one build of the programs: `ebpf` in cargo's target
/// folder, which is the ancestor of OUT_DIR that cargo tags as a cache.
fn target_dir(out_dir: &Path) -> PathBuf {
    let target = out_dir.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists());
    target.unwrap_or(out_dir).join("ebpf")
}

/// Keeps the time stamp of an equal object, so that the daemon is not compiled again for nothing.
fn copy_if_changed(from: &Path, to: &Path) -> io::Result<PathBuf> {
    let object = fs::read(from)?;
    if fs::read(to).ok().as_ref() != Some(&object) {
        fs::write(to, object)?;
    }
    Ok(to.to_owned())
}
