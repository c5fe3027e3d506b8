//! Where things are in the clone, and how to run its cargo.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// The workspace's root folder.
pub fn root() -> PathBuf {
    let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let manifest_dir = manifest_dir.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    manifest_dir.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Cargo's target folder.
pub fn target_dir() -> PathBuf {
    // An absolute CARGO_TARGET_DIR stays as it is; a relative one is relative to the workspace here.
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// The folder of xtask's own files (logs, generated copies); made if it is not there.
pub fn scratch_dir() -> Result<PathBuf> {
    let dir = target_dir().join("xtask");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

/// Cargo's arguments that select all packages for the host. Packages that are selected together have one set of features of each dependency:
/// with another selection egress-daemon is compiled again.
pub const PACKAGES: [&str; 3] = ["--workspace", "--exclude", "egress-ebpf"];

/// `cargo SUBCOMMAND` in the workspace, with the same cargo that runs xtask.
pub fn cargo(subcommand: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What `cargo run` tells xtask about itself would look like a changed input to build scripts that watch it.
    const ABOUT_XTASK: [&str; 4] = ["CARGO_BIN_", "CARGO_CRATE_", "CARGO_MANIFEST_", "CARGO_PKG_"];
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| ABOUT_XTASK.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(&name);
        }
    }
    command.arg(subcommand).current_dir(root());
    command
}

/// Whether we run in a continuous integration.
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false")
}
