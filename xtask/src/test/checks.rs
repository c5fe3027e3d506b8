//! The checks beside the tests: tidy, formatting, drift of generated files, lints, licences. Each counts as one test.

use std::process::Command;

use anyhow::Result;

use super::tally::Tally;
use crate::toolchain::Toolchain;
use crate::{codegen, progress, setup, tidy, workspace};

/// A check passes, or says why it cannot run here.
type Outcome = Result<Option<&'static str>>;

/// A check's name, and what runs it.
type Check = (&'static str, fn() -> Outcome);

/// How many of the checks, from the first, compile nothing.
const QUICK: usize = 2;

/// Runs all checks, or those that compile nothing.
pub fn run(quick: bool, tally: &mut Tally) {
    let checks: [Check; 7] = [
        ("rules (cargo xtask tidy)", || tidy::rules().map(|()| None)),
        ("formatting", format),
        ("lints", lints),
        ("lints of the eBPF programs", ebpf_lints),
        ("generated manifests", || codegen::check().map(|()| None)),
        ("licences and dependencies", licences),
        ("dependencies that nothing uses", unused_dependencies),
    ];
    for (name, check) in checks.into_iter().take(if quick { QUICK } else { checks.len() }) {
        match check() {
            Ok(None) => tally.pass(1),
            Ok(Some(reason)) => tally.skip(name, reason),
            Err(error) => tally.fail(name, &format!("{error:#}")),
        }
    }
}

fn format() -> Outcome {
    if !succeeds(workspace::cargo("fmt").arg("--version")) {
        return Ok(Some("rustfmt is not installed: rustup component add rustfmt"));
    }
    tidy::format().map(|()| None)
}

fn lints() -> Outcome {
    if !succeeds(workspace::cargo("clippy").arg("--version")) {
        return Ok(Some("clippy is not installed: rustup component add clippy"));
    }
    let mut command = workspace::cargo("clippy");
    command.args(["--workspace", "--exclude", "egress-ebpf", "--all-targets", "--", "-D", "warnings"]);
    progress::run("lints", &mut command).map(|()| None)
}

/// The programs compile for their own target only, so they are linted with the toolchain that compiles them.
fn ebpf_lints() -> Outcome {
    let toolchain = Toolchain::find()?;
    if !toolchain.rust.bin_dir().join("cargo-clippy").exists() {
        return Ok(Some("the toolchain that compiles the eBPF programs has no clippy (Debian: rust-web-clippy)"));
    }
    for features in [&[][..], &["--features", "trace"]] {
        let mut command = toolchain.cargo("clippy");
        command.args(["--release", "--package", "egress-ebpf"]).args(features).arg("--target-dir");
        command.arg(workspace::target_dir().join("ebpf"));
        command.args(["--", "-D", "warnings"]).current_dir(workspace::root());
        progress::run("lints of the eBPF programs", &mut command)?;
    }
    Ok(None)
}

fn licences() -> Outcome {
    let Some(cargo_deny) = setup::CARGO_DENY.find() else {
        return Ok(Some("cargo-deny is not installed: cargo install cargo-deny --locked (some minutes)"));
    };
    let mut command = Command::new(cargo_deny);
    // Advisories need a database from the network.
    command.args(["check", "licenses", "bans", "sources"]).current_dir(workspace::root());
    progress::run("licences and dependencies", &mut command).map(|()| None)
}

fn unused_dependencies() -> Outcome {
    let Some(cargo_machete) = setup::CARGO_MACHETE.find() else {
        return Ok(Some("cargo-machete is not installed: cargo install cargo-machete --locked (a minute)"));
    };
    let mut command = Command::new(cargo_machete);
    command.current_dir(workspace::root());
    progress::run("dependencies that nothing uses", &mut command).map(|()| None)
}

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}
