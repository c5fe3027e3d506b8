//! `cargo xtask codegen`: writes the manifests that come from the code, or checks that they are what the code says.
//!
//! egress-daemon's example `codegen` writes them all into the folder that it is given; this command picks the folder and
//! compares.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::{progress, setup, workspace};

/// The folder that belongs to the code: a file there that it did not write is stale.
const GENERATED: &str = "manifests/crds";

#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail when a generated file differs from what the code says
    #[arg(long)]
    check: bool,
}

/// Generates, or compares.
pub fn run(args: &Args) -> Result<()> {
    setup::ensure(setup::Scope::Build)?;
    if args.check { check() } else { generate(&workspace::root().join(GENERATED)) }
}

/// Compares the kept files with what the code generates now.
pub fn check() -> Result<()> {
    let fresh = workspace::scratch_dir()?.join("codegen");
    if fresh.exists() {
        fs::remove_dir_all(&fresh).with_context(|| format!("cannot empty {}", fresh.display()))?;
    }
    generate(&fresh)?;
    let differences = compare(&fresh, &workspace::root().join(GENERATED))?;
    if !differences.is_empty() {
        bail!("generated manifests are out of date; run `cargo xtask codegen`:\n  {}", differences.join("\n  "));
    }
    Ok(())
}

fn generate(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    progress::run(
        "generate manifests",
        workspace::cargo("run").args(["--package", "egress-daemon", "--example", "codegen", "--"]).arg(folder),
    )
}

/// Says what differs.
fn compare(fresh: &Path, kept: &Path) -> Result<Vec<String>> {
    let generated = files(fresh)?;
    if generated.is_empty() {
        bail!("the example `codegen` wrote nothing into {}", fresh.display());
    }
    let mut differences = Vec::new();
    for file in &generated {
        match fs::read(kept.join(file)) {
            Ok(content) if content == fs::read(fresh.join(file))? => {}
            Ok(_) => differences.push(format!("{GENERATED}/{} differs", file.display())),
            Err(_) => differences.push(format!("{GENERATED}/{} is missing", file.display())),
        }
    }
    if kept.exists() {
        for file in files(kept)?.difference(&generated) {
            differences.push(format!("{GENERATED}/{} is not generated any more", file.display()));
        }
    }
    Ok(differences)
}

/// All files below `folder`, relative to it.
fn files(folder: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().map(PathBuf::from).unwrap_or_default();
        if path.is_dir() {
            found.extend(files(&path)?.into_iter().map(|file| name.join(file)));
        } else {
            found.insert(name);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_missing_and_stale_files_are_named() {
        let base = std::env::temp_dir().join(format!("xtask-codegen-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = base.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for file in ["fresh/same.yaml", "kept/same.yaml", "fresh/new.yaml", "kept/old/gone.yaml"] {
            write(file, "a");
        }
        write("fresh/changed.yaml", "a");
        write("kept/changed.yaml", "b");
        let differences = compare(&base.join("fresh"), &base.join("kept")).unwrap();
        fs::remove_dir_all(&base).unwrap();
        assert_eq!(
            differences,
            [
                "manifests/crds/changed.yaml differs",
                "manifests/crds/new.yaml is missing",
                "manifests/crds/old/gone.yaml is not generated any more"
            ]
        );
    }
}
