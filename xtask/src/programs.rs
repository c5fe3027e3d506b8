//! `cargo xtask demo`, `bench` and `soak`: programs of the package `tests` that use the lab. They are compiled on demand, and parse their
//! own arguments.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};

use crate::{build, progress, workspace};

#[derive(clap::Args)]
pub struct Args {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Builds the program and replaces this process with it.
pub fn run(name: &str, args: &Args) -> Result<()> {
    let mut command = workspace::cargo("build");
    command.args(workspace::PACKAGES).args(["--example", name]);
    progress::run(&format!("build the {name}"), &mut command)?;
    let program = build::folder(false).join("examples").join(name);
    Err(Command::new(&program).args(&args.arguments).exec())
        .with_context(|| format!("cannot run {}", program.display()))
}
