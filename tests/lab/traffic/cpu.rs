//! Measures the CPU time of a load: that of the calling thread, and that of the threads that do the kernel's deferred
//! work. Also chooses the processor that a load runs on.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// Returns the CPU time of the calling thread, including interrupts charged to it.
pub fn this_thread() -> Result<Duration> {
    Ok(Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?))
}

/// Runs `work`, and the threads and processes that it starts, on processor `cpu`, or on any processor if `cpu` does not exist.
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

/// Runs `work`, and the threads and processes that it starts, with a nice value: below 0 is a higher priority.
pub fn with_nice<T>(nice: i32, work: impl FnOnce() -> Result<T>) -> Result<T> {
    set_nice(nice)?;
    let outcome = work();
    set_nice(0)?;
    outcome
}

/// Sets the nice value of the calling thread: Linux takes a thread's id here, and 0 is the caller.
fn set_nice(nice: i32) -> Result<()> {
    // SAFETY: numbers only.
    let set = unsafe { nix::libc::setpriority(nix::libc::PRIO_PROCESS, 0, nice) };
    Errno::result(set).with_context(|| format!("cannot set the priority {nice}")).map(drop)
}

/// A stopwatch for the CPU time of all `ksoftirqd` threads.
#[derive(Debug)]
pub struct SoftirqClock {
    files: Vec<PathBuf>,
    start: Duration,
}

impl SoftirqClock {
    /// Starts the stopwatch.
    pub fn start() -> Result<SoftirqClock> {
        let mut files = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let path = entry?.path();
            // The name of a process that has ended meanwhile cannot be read.
            let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
            if name.starts_with("ksoftirqd/") {
                files.push(path.join("schedstat"));
            }
        }
        let mut clock = SoftirqClock { files, start: Duration::ZERO };
        clock.start = clock.total()?;
        Ok(clock)
    }

    /// Returns the CPU time that they have used since the start.
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
