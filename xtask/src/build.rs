//! `cargo xtask build`: the daemon and egressctl, with the eBPF programs embedded.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::{progress, setup, workspace};

#[derive(clap::Args)]
pub struct Args {
    /// Optimize, as for an image
    #[arg(long)]
    release: bool,
}

/// Builds as cargo does, warnings and all, and says where the binaries are.
pub fn run(args: &Args) -> Result<()> {
    setup::ensure(setup::Scope::Build)?;
    if !command(args.release).status()?.success() {
        bail!("egress-daemon does not build");
    }
    let dir = folder(args.release);
    println!("{}\n{}", dir.join("egress-daemon").display(), dir.join("egressctl").display());
    Ok(())
}

/// Builds both binaries for a command that needs them, and returns the folder that holds them.
pub fn binaries(release: bool) -> Result<PathBuf> {
    progress::run("build egress-daemon and egressctl", &mut command(release))?;
    Ok(folder(release))
}

fn command(release: bool) -> Command {
    let mut command = workspace::cargo("build");
    command.args(["--package", "egress-daemon", "--bins"]).args(release.then_some("--release"));
    command
}

fn folder(release: bool) -> PathBuf {
    workspace::target_dir().join(if release { "release" } else { "debug" })
}
