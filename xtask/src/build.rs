//! `cargo xtask build`: the daemon and egressctl, with the eBPF programs embedded.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::{setup, workspace};

#[derive(clap::Args)]
pub struct Args {
    /// Optimize, as for an image
    #[arg(long)]
    release: bool,
}

/// Builds and says where the binaries are.
pub fn run(args: &Args) -> Result<()> {
    setup::ensure(setup::Scope::Build)?;
    let dir = binaries(args.release)?;
    println!("{}\n{}", dir.join("egress-daemon").display(), dir.join("egressctl").display());
    Ok(())
}

/// Builds both binaries and returns the folder that holds them. Cargo shows its progress itself.
pub fn binaries(release: bool) -> Result<PathBuf> {
    let mut command = workspace::cargo("build");
    command.args(["--package", "egress-daemon", "--bins"]);
    if release {
        command.arg("--release");
    }
    if !command.status()?.success() {
        bail!("egress-daemon does not build");
    }
    Ok(workspace::target_dir().join(if release { "release" } else { "debug" }))
}
