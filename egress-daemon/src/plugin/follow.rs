//! `kubectl spillway trace`: the output of `egressctl` on the pod's node, live.

use super::{EGRESSCTL, Kubectl, agents, node_of};
use crate::ctl::print::{harmless, has_seen_enough};
use anyhow::{Context as _, Result};
use std::{
    ffi::OsString,
    io::{self, BufRead as _, BufReader, Read, Write},
    process::{Child, ExitCode, Stdio},
    thread,
};

/// The number of bytes after which a line is shown in parts.
const LONGEST: u64 = 64 << 10;

/// Shows the output until it ends. Ctrl-C stops this process and `kubectl`.
pub(super) fn follow(kubectl: &Kubectl, node: Option<String>, pod: &str, words: &[OsString]) -> Result<ExitCode> {
    let node = node.map_or_else(|| node_of(kubectl, pod), Ok)?;
    let agent = agents(kubectl, Some(node))?.into_iter().next().context("no agent")?;
    let exec = ["exec", &agent.name, "-c", "agent", "--", EGRESSCTL].map(OsString::from);
    let child = kubectl.stream(&[&exec, words].concat(), Stdio::piped())?;
    let succeeded = pass_on(child, io::stdout(), io::stderr()).context("the output of kubectl")?;
    Ok(if succeeded { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Copies both outputs of a process while it runs. Returns whether it succeeded, or stopped because nobody reads its output.
fn pass_on(mut child: Child, out: impl Write, err: impl Write + Send) -> io::Result<bool> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let copied = thread::scope(|scope| {
        scope.spawn(move || stderr.map(|from| copy(from, err)));
        let copied = stdout.map_or(Ok(()), |from| copy(from, out));
        if copied.is_err() {
            child.kill().ok();
        }
        copied
    });
    let ended = child.wait()?;
    match copied {
        Err(error) if has_seen_enough(&error) => Ok(true),
        copied => copied.map(|()| ended.success()),
    }
}

/// Copies text line by line. Replaces control characters, since a node may send any bytes.
fn copy(from: impl Read, mut to: impl Write) -> io::Result<()> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.by_ref().take(LONGEST).read_until(b'\n', &mut line)? > 0 {
        to.write_all(harmless(&String::from_utf8_lossy(&line)).as_bytes())?;
        to.flush()?;
        line.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn a_traced_node_cannot_control_the_terminal() {
        let child = shell(r"printf 'A\033]0;x\007\n\233[2J\302\2332J'; printf 'B\033[2J\n' >&2; exit 3");
        let (mut out, mut err) = (Vec::new(), Vec::new());
        assert!(!pass_on(child, &mut out, &mut err).unwrap(), "its exit code is 3");
        let [out, err] = [out, err].map(|shown| String::from_utf8(shown).unwrap());
        assert_eq!(out, "A\u{fffd}]0;x\u{fffd}\n\u{fffd}[2J\u{fffd}2J");
        assert_eq!(err, "B\u{fffd}[2J\n");
    }

    #[test]
    fn a_trace_whose_reader_has_seen_enough_succeeds() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert!(pass_on(shell("yes"), Closed, io::sink()).unwrap());
    }
}
