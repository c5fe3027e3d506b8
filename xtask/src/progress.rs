//! Shows the progress of long steps: a spinner with the program's latest line on a terminal, plain lines elsewhere.

use std::cell::Cell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use crate::{process, workspace};

/// Without a terminal, a step that takes no longer than this is shown only when it has ended.
const SHORT: Duration = Duration::from_secs(2);

/// The number of last lines that are shown of a failed step's log.
const TAIL_LINES: usize = 60;

/// The concurrent steps, each with its own line.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// A step that is being shown.
pub struct Step {
    title: String,
    started: Instant,
    bar: ProgressBar,
    /// Without a terminal, whether a line has announced the step.
    announced: Cell<bool>,
}

impl Step {
    /// Starts to show a step.
    pub fn start(title: &str) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            let bar = BARS.add(ProgressBar::new_spinner().with_prefix(title.to_owned()));
            if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix} [{elapsed}] {wide_msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        } else {
            ProgressBar::hidden()
        };
        Self { title: title.to_owned(), started: Instant::now(), bar, announced: Cell::new(false) }
    }

    /// Shows what the step is doing.
    pub fn at(&self, message: &str) {
        if self.bar.is_hidden() && self.started.elapsed() > SHORT && !self.announced.replace(true) {
            eprintln!("  {} ...", self.title);
        }
        self.bar.set_message(message.trim().to_owned());
    }

    /// Ends a step that had nothing to do.
    pub fn drop_silently(self) {
        self.bar.finish_and_clear();
    }

    /// Ends the step with one line: a mark, the title, `detail` and the duration.
    pub fn end(self, mark: &str, detail: &str) {
        self.bar.finish_and_clear();
        let separator = if detail.is_empty() { "" } else { ": " };
        let took = seconds(self.started.elapsed());
        BARS.suspend(|| eprintln!("{mark} {}{separator}{detail} ({took})", self.title));
    }
}

/// Runs a program as a step. Its output goes to a log, whose end is shown if the program fails.
pub fn run(title: &str, command: &mut Command) -> Result<()> {
    let step = Step::start(title);
    let log = log_file(title)?;
    match process::run(command, &log, None, |_, line| step.at(line)) {
        Ok(Some(status)) if status.success() => {
            step.end("✓", "");
            Ok(())
        }
        outcome => {
            step.end("✗", "failed");
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            for line in lines.iter().skip(lines.len().saturating_sub(TAIL_LINES)) {
                eprintln!("    {line}");
            }
            outcome?;
            bail!("{title} failed; the whole output is in {}", log.display())
        }
    }
}

/// Runs a function as a step.
pub fn run_with<T>(title: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let step = Step::start(title);
    step.at(title);
    let result = work();
    match &result {
        Ok(_) => step.end("✓", ""),
        Err(_) => step.end("✗", "failed"),
    }
    result
}

/// Returns the log file of a step, which is named after the start of its title.
pub fn log_file(title: &str) -> Result<PathBuf> {
    let title = title.split(" (").next().unwrap_or_default();
    let name: String =
        title.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).take(60).collect();
    Ok(workspace::scratch_dir()?.join(format!("{name}.log")))
}

fn seconds(time: Duration) -> String {
    match time.as_secs() {
        0 => format!("{} ms", time.as_millis()),
        seconds @ 1..60 => format!("{seconds} s"),
        seconds => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}
