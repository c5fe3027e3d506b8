//! Test support, also for the crates above: what happens to a test that cannot run here.
#![allow(clippy::unwrap_used, reason = "only tests use it")]

use std::{fs::OpenOptions, io::Write as _};

/// Reports to the user and to `cargo xtask test` that `test` is skipped because this machine or process does not meet its needs.
pub fn skip(test: &str, needs: &str) {
    let line = format!("SKIP {test}: needs {needs}\n");
    eprint!("{line}");
    if let Some(path) = std::env::var_os("SPILLWAY_SKIPS") {
        OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(line.as_bytes()).unwrap();
    }
}
