//! Runs short programs and returns their output, or an error that contains it.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};

/// The program that starts another in a network namespace ([`NetNs::command`](crate::netns::NetNs::command)).
pub(crate) const ENTER: &str = "nsenter";

/// Returns the program that `command` runs, even if in another network namespace.
pub(crate) fn program(command: &Command) -> &Path {
    let itself = command.get_program();
    let entered = if itself == ENTER { command.get_args().nth(1) } else { None };
    Path::new(entered.unwrap_or(itself))
}

/// Runs `command` to its end and returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| not_started(command))?;
    check(command, output)
}

/// Runs `command` with `input` as its standard input.
pub fn feed(command: &mut Command, input: &str) -> Result<()> {
    ask(command, input).map(drop)
}

/// Like [`feed`], but returns the standard output.
pub fn ask(command: &mut Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| not_started(command))?;
    if let Some(mut stdin) = child.stdin.take() {
        // The program may end before it has read everything; its exit status shows why.
        stdin.write_all(input.as_bytes()).ok();
    }
    check(command, child.wait_with_output()?)
}

fn check(command: &Command, output: Output) -> Result<String> {
    if !output.status.success() {
        bail!(
            "{} ended with {}: {}{}",
            program(command).display(),
            output.status,
            String::from_utf8_lossy(&output.stderr),
            String::from_utf8_lossy(&output.stdout),
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn not_started(command: &Command) -> String {
    format!("cannot start {} (is it installed?)", program(command).display())
}
