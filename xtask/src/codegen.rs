//! `cargo xtask codegen`: writes the manifests that come from the code, or checks that they are what the code says.
//!
//! egress-daemon's example `codegen` writes them all below the folder that it is given; this command picks the folder and
//! compares.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::{progress, setup, workspace};

#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail when a generated file differs from what the code says
    #[arg(long)]
    check: bool,
}

/// Generates, or compares.
pub fn run(args: &Args) -> Result<()> {
    setup::ensure(setup::Scope::Build)?;
    if args.check { check() } else { generate(&workspace::root().join("manifests")) }
}

/// Compares `manifests/` with what the code generates now.
pub fn check() -> Result<()> {
    let fresh = workspace::scratch_dir()?.join("codegen");
    if fresh.exists() {
        fs::remove_dir_all(&fresh).with_context(|| format!("cannot empty {}", fresh.display()))?;
    }
    generate(&fresh)?;
    let differences = compare(&fresh, &workspace::root().join("manifests"))?;
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

/// Says what differs. A folder that the code writes into belongs to it: a file there that it did not write is stale.
fn compare(fresh: &Path, kept: &Path) -> Result<Vec<String>> {
    let generated = files(fresh)?;
    if generated.is_empty() {
        bail!("the example `codegen` wrote nothing below {}", fresh.display());
    }
    let mut differences = Vec::new();
    for file in &generated {
        match fs::read(kept.join(file)) {
            Ok(content) if content == fs::read(fresh.join(file))? => {}
            Ok(_) => differences.push(format!("manifests/{} differs", file.display())),
            Err(_) => differences.push(format!("manifests/{} is missing", file.display())),
        }
    }
    let folders: BTreeSet<_> =
        generated.iter().filter_map(|file| file.parent()).filter(|dir| *dir != Path::new("")).collect();
    for folder in folders.into_iter().filter(|folder| kept.join(folder).exists()) {
        for file in files(&kept.join(folder))?.into_iter().map(|file| folder.join(file)) {
            if !generated.contains(&file) {
                differences.push(format!("manifests/{} is not generated any more", file.display()));
            }
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
        for file in ["fresh/crds/same.yaml", "kept/crds/same.yaml", "fresh/crds/new.yaml", "kept/crds/old.yaml"] {
            write(file, "a");
        }
        write("fresh/rbac.yaml", "a");
        write("kept/rbac.yaml", "b");
        write("kept/examples/by-hand.yaml", "a");
        let differences = compare(&base.join("fresh"), &base.join("kept")).unwrap();
        fs::remove_dir_all(&base).unwrap();
        assert_eq!(
            differences,
            [
                "manifests/crds/new.yaml is missing",
                "manifests/rbac.yaml differs",
                "manifests/crds/old.yaml is not generated any more"
            ]
        );
    }
}
