//! Runs the checks other than tests: tidy, formatting, drift of generated files, lints, licences. Each counts as one test.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use super::tally::Tally;
use crate::setup::{self, CargoTool};
use crate::toolchain::Toolchain;
use crate::{codegen, progress, tidy, workspace};

/// A check's result: `None` if it passes, or why it cannot run here.
type Outcome = Result<Option<&'static str>>;

/// A check's name and function.
type Check = (&'static str, fn() -> Outcome);

/// The checks that compile nothing.
const QUICK: [Check; 2] = [("rules (cargo xtask tidy)", || tidy::rules().map(|()| None)), ("formatting", format)];

/// The checks that compile something.
const SLOW: [Check; 5] = [
    ("lints", lints),
    ("lints of the eBPF programs", ebpf_lints),
    ("generated manifests", || codegen::check().map(|()| None)),
    ("licences and dependencies", licences),
    ("dependencies that nothing uses", unused_dependencies),
];

/// Runs the checks that take a second.
pub fn quick(tally: &mut Tally) {
    run(&QUICK, tally);
}

/// Runs the checks that take minutes.
pub fn slow(tally: &mut Tally) {
    run(&SLOW, tally);
}

fn run(checks: &[Check], tally: &mut Tally) {
    for (name, check) in checks {
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
    command.args(workspace::PACKAGES).args(["--all-targets", "--", "-D", "warnings"]);
    progress::run("lints", &mut command).map(|()| None)
}

/// Lints the eBPF programs with the toolchain that compiles them, because they compile only for their own target.
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

/// Checks licences and dependencies once for each content of the two files on which the result depends. The checksums of contents that
/// passed are kept next to these files, because compiling the tool takes seven minutes of processor time.
fn licences() -> Outcome {
    const PASSED: &str = "deny.passed";
    let sums = |arguments: &[&str]| {
        let mut command = Command::new("sha256sum");
        command.args(arguments).current_dir(workspace::root());
        command
    };
    if succeeds(&mut sums(&["--check", "--status", PASSED])) {
        return Ok(None);
    }
    // Advisories need a database from the network.
    let outcome = with_tool(setup::CARGO_DENY, "licences and dependencies", &["check", "licenses", "bans", "sources"])?;
    if outcome.is_none() {
        let passed = lab::command::output(&mut sums(&["Cargo.lock", "deny.toml"]))?;
        fs::write(workspace::root().join(PASSED), passed).with_context(|| format!("cannot write {PASSED}"))?;
    }
    Ok(outcome)
}

fn unused_dependencies() -> Outcome {
    with_tool(setup::CARGO_MACHETE, "dependencies that nothing uses", &[])
}

/// Runs a tool that takes a minute to compile. Only CI, which runs it every time, installs it if it is missing.
fn with_tool(tool: CargoTool, title: &str, arguments: &[&str]) -> Outcome {
    let program = match tool.find() {
        Some(program) => program,
        None if workspace::in_ci() => tool.install()?,
        None => return Ok(Some(tool.remedy)),
    };
    progress::run(title, Command::new(program).args(arguments).current_dir(workspace::root())).map(|()| None)
}

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}
