//! CPU time of what a load causes: the calling thread's, and that of the threads that do the kernel's deferred work.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};

/// The CPU time that the calling thread has used, with what interrupts did in its name.
pub fn this_thread() -> Result<Duration> {
    Ok(Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?))
}

/// A stop-watch over all `ksoftirqd`.
#[derive(Debug)]
pub struct SoftirqClock {
    files: Vec<PathBuf>,
    start: Duration,
}

impl SoftirqClock {
    /// Starts the watch.
    pub fn start() -> Result<SoftirqClock> {
        let mut files = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let path = entry?.path();
            // A process that has ended meanwhile has no name.
            let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
            if name.starts_with("ksoftirqd/") {
                files.push(path.join("schedstat"));
            }
        }
        let mut clock = SoftirqClock { files, start: Duration::ZERO };
        clock.start = clock.total()?;
        Ok(clock)
    }

    /// What they have used since the start.
    pub fn elapsed(&self) -> Result<Duration> {
        Ok(self.total()?.saturating_sub(self.start))
    }

    fn total(&self) -> Result<Duration> {
        let mut total = Duration::ZERO;
        for file in &self.files {
            let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            let nanoseconds = text.split_whitespace().next().and_then(|word| word.parse().ok());
            total +=
                Duration::from_nanos(nanoseconds.with_context(|| format!("{} is not understood", file.display()))?);
        }
        Ok(total)
    }
}
