//! The folders of the clone, and how to run its cargo.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// Returns the workspace's root folder.
pub fn root() -> PathBuf {
    let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let manifest_dir = manifest_dir.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    manifest_dir.parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Returns cargo's target folder.
pub fn target_dir() -> PathBuf {
    // An absolute CARGO_TARGET_DIR is used as it is. A relative one is taken as relative to the workspace.
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// Returns the folder of xtask's own files (logs, generated copies). Creates it if necessary.
pub fn scratch_dir() -> Result<PathBuf> {
    let dir = target_dir().join("xtask");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

/// Cargo's arguments that select all packages for the host. Packages that are selected together share one set of features of each
/// dependency, so another selection would compile egress-daemon again.
pub const PACKAGES: [&str; 3] = ["--workspace", "--exclude", "egress-ebpf"];

/// Returns `cargo SUBCOMMAND` in the workspace, with the same cargo that runs xtask.
pub fn cargo(subcommand: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Build scripts that watch the variables that `cargo run` sets for xtask would see them as changed inputs.
    const ABOUT_XTASK: [&str; 4] = ["CARGO_BIN_", "CARGO_CRATE_", "CARGO_MANIFEST_", "CARGO_PKG_"];
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| ABOUT_XTASK.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(&name);
        }
    }
    command.arg(subcommand).current_dir(root());
    command
}

/// Returns whether this process runs in CI.
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false")
}
