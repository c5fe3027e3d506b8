//! The checks other than tests: tidy, formatting, drift of generated files, lints, licences. Each counts as one test.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use super::tally::Tally;
use crate::setup::{self, CargoTool};
use crate::toolchain::Toolchain;
use crate::{codegen, progress, tidy, workspace};

/// A check passes, or says why it cannot run here.
type Outcome = Result<Option<&'static str>>;

/// A check's name, and what runs it.
type Check = (&'static str, fn() -> Outcome);

/// Those that compile nothing.
const QUICK: [Check; 2] = [("rules (cargo xtask tidy)", || tidy::rules().map(|()| None)), ("formatting", format)];

/// Those that compile.
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

/// The result depends on two files only, so it is checked once for each content of theirs. The sums of what passed are kept next to them,
/// because the tool takes seven minutes of processor time to compile.
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

/// Runs a tool that takes a minute to compile: worth it where it runs every time, not on everybody's laptop.
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
