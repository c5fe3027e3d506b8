//! `cargo xtask build`: builds the daemon and egressctl, with the eBPF programs embedded.
//!
//! `.cargo/config.toml` names this machine's target and links statically, so that an image can use every build of the same profile.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{progress, setup, workspace};

/// Cargo's arguments that select only both binaries.
pub const BINARIES: [&str; 3] = ["--package", "egress-daemon", "--bins"];

/// Build egress-daemon and egressctl, with the eBPF programs embedded
#[derive(clap::Args)]
pub struct Args {
    /// Optimize, as for an image
    #[arg(long)]
    release: bool,
}

/// Builds with cargo's usual output, and prints the paths of the binaries.
pub fn run(args: &Args) -> Result<()> {
    setup::ensure(setup::Scope::Build)?;
    if !command(args.release).status()?.success() {
        bail!("egress-daemon does not build");
    }
    let dir = folder(args.release);
    println!("{}\n{}", dir.join("egress-daemon").display(), dir.join("egressctl").display());
    Ok(())
}

/// Builds both binaries for a command that needs them, and returns their folder.
pub fn binaries(release: bool) -> Result<PathBuf> {
    progress::run("build egress-daemon and egressctl", &mut command(release))?;
    Ok(folder(release))
}

/// Returns the command that builds both binaries.
fn command(release: bool) -> Command {
    let mut command = workspace::cargo("build");
    match release {
        true => command.args(BINARIES).arg("--release"),
        // Build with the features of the tests' build. The example, which codegen runs, pulls in dev-dependencies.
        false => command.args(workspace::PACKAGES).args(["--bins", "--example", "codegen"]),
    };
    command
}

/// Returns the folder of this machine's binaries.
pub fn folder(release: bool) -> PathBuf {
    folder_of(&format!("{}-unknown-linux-gnu", std::env::consts::ARCH), release)
}

/// Returns the folder of a target's binaries.
pub fn folder_of(target: &str, release: bool) -> PathBuf {
    workspace::target_dir().join(target).join(if release { "release" } else { "debug" })
}

/// Copies a program into another folder without its symbols, which are most of its size.
pub fn stripped(program: &Path, folder: &Path) -> Result<PathBuf> {
    let path = folder.join(program.file_name().context("a program has a name")?);
    lab::command::output(Command::new("strip").arg("-o").arg(&path).arg(program))?;
    Ok(path)
}
