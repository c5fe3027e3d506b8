//! The CPU time that a load causes: the calling thread's, and that of the threads that do the kernel's deferred work. Also
//! sets which processor a load runs on.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// The CPU time that the calling thread has used, with what interrupts charged to it.
pub fn this_thread() -> Result<Duration> {
    Ok(Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?))
}

/// Runs `work` on processor number `cpu`, with the threads and processes that it starts; on any if there is no such
/// processor.
pub fn on_cpu<T>(cpu: usize, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let this = Pid::from_raw(0);
    let before = sched_getaffinity(this).context("cannot read the processors of this thread")?;
    let mut only = CpuSet::new();
    only.set(cpu)?;
    match sched_setaffinity(this, &only) {
        Err(Errno::EINVAL) => return work(),
        moved => moved.with_context(|| format!("cannot move to processor {cpu}"))?,
    }
    let outcome = work();
    sched_setaffinity(this, &before).context("cannot move back to all processors")?;
    outcome
}

/// Runs `work`, and the threads and processes that it starts, with another priority: below 0 is higher than others.
pub fn with_nice<T>(nice: i32, work: impl FnOnce() -> Result<T>) -> Result<T> {
    set_nice(nice)?;
    let outcome = work();
    set_nice(0)?;
    outcome
}

/// Linux takes a thread's id here; 0 is the calling thread.
fn set_nice(nice: i32) -> Result<()> {
    // SAFETY: numbers only.
    let set = unsafe { nix::libc::setpriority(nix::libc::PRIO_PROCESS, 0, nice) };
    Errno::result(set).with_context(|| format!("cannot set the priority {nice}")).map(drop)
}

/// A stopwatch over all `ksoftirqd`.
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
