//! Runs a program to its end or until a timeout. Every line of its output goes to a log file and to the caller.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// The output stream of a line.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// The interval at which a silent program is checked.
const TICK: Duration = Duration::from_millis(100);

/// Gives this thread, and the programs that it starts from now on, idle priority (`SCHED_IDLE`).
pub fn idle() -> Result<()> {
    let mut command = Command::new("chrt");
    command.args(["--idle", "--pid", "0"]).arg(nix::unistd::gettid().to_string());
    lab::command::output(&mut command).map(drop)
}

/// Returns a command with the same program, directory and environment, but without arguments.
pub fn without_arguments(command: &Command) -> Command {
    let mut alike = Command::new(command.get_program());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => alike.env(name, value),
            None => alike.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        alike.current_dir(directory);
    }
    alike
}

/// Runs `command` without input. Returns `None` if it was killed because `timeout` had passed.
pub fn run(
    command: &mut Command,
    log: &Path,
    timeout: Option<Duration>,
    mut on_line: impl FnMut(Stream, &str),
) -> Result<Option<ExitStatus>> {
    let mut log_file = File::create(log).with_context(|| format!("cannot write the log {}", log.display()))?;
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    let (sender, lines) = mpsc::channel();
    forward(child.stdout.take(), Stream::Out, sender.clone());
    forward(child.stderr.take(), Stream::Err, sender);

    let started = Instant::now();
    let mut ended = None;
    loop {
        match lines.recv_timeout(TICK) {
            Ok((stream, line)) => {
                writeln!(log_file, "{line}").with_context(|| format!("cannot write the log {}", log.display()))?;
                on_line(stream, &line);
            }
            Err(RecvTimeoutError::Disconnected) => {
                return child.wait().map(Some).with_context(|| format!("cannot wait for {program}"));
            }
            // A grandchild that outlives the program may hold its output open. So a silent interval after the program's end ends the run.
            Err(RecvTimeoutError::Timeout) if ended.is_some() => return Ok(ended),
            Err(RecvTimeoutError::Timeout) => {}
        }
        ended = child.try_wait().with_context(|| format!("cannot wait for {program}"))?;
        if ended.is_none() && timeout.is_some_and(|timeout| started.elapsed() > timeout) {
            child.kill().and_then(|()| child.wait()).with_context(|| format!("cannot end {program}"))?;
            return Ok(None);
        }
    }
}

fn forward(pipe: Option<impl Read + Send + 'static>, stream: Stream, sender: Sender<(Stream, String)>) {
    let Some(pipe) = pipe else { return };
    std::thread::spawn(move || {
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            let text = String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned();
            if sender.send((stream, text)).is_err() {
                return;
            }
            line.clear();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, timeout: Option<Duration>) -> (Option<ExitStatus>, Vec<String>, String) {
        let log = std::env::temp_dir().join(format!("xtask-process-{}-{}", std::process::id(), script.len()));
        let mut lines = Vec::new();
        let status = run(Command::new("sh").args(["-c", script]), &log, timeout, |_, line| lines.push(line.to_owned()));
        let text = std::fs::read_to_string(&log).unwrap();
        std::fs::remove_file(&log).unwrap();
        (status.unwrap(), lines, text)
    }

    #[test]
    fn every_output_line_reaches_the_log_and_the_caller() {
        let (status, lines, log) = sh("echo a; echo b; printf c", None);
        assert!(status.unwrap().success());
        assert_eq!(lines, ["a", "b", "c"]);
        assert_eq!(log, "a\nb\nc\n");
    }

    #[test]
    fn a_deadline_ends_a_program_that_hangs() {
        let (status, lines, _) = sh("echo started; exec tail -f /dev/null", Some(Duration::from_millis(300)));
        assert!(status.is_none());
        assert_eq!(lines, ["started"]);
    }

    #[test]
    fn run_does_not_wait_for_a_grandchild_that_keeps_the_output_open() {
        let (status, lines, _) = sh("tail -f /dev/null & echo $!; exit 3", None);
        assert_eq!(status.unwrap().code(), Some(3));
        let pid = lines[0].parse().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}
