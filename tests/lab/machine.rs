//! Shares the machine between tests: a test that makes load or is strict about time has it alone.
//!
//! The shares are locks of a file, so that test binaries that run in parallel also respect them.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

use crate::scope::LABS;

/// Set if every test must have the machine alone: when a failed one is retried.
const ALONE: &str = "SPILLWAY_TEST_ALONE";

/// A share of the machine, released when dropped.
#[derive(Debug)]
pub struct Share(#[expect(dead_code, reason = "it is held")] Flock<File>);

/// Waits for a share of the machine, or for all of it.
///
/// Waiters hold a second lock, so that nobody overtakes them and one that wants the machine alone gets it.
pub fn take(alone: bool) -> Result<Share> {
    fs::create_dir_all(LABS).with_context(|| format!("cannot make {LABS}"))?;
    take_in(Path::new(LABS), alone || std::env::var_os(ALONE).is_some())
}

fn take_in(folder: &Path, alone: bool) -> Result<Share> {
    let lock = |name: &str, how: FlockArg| {
        let path = folder.join(name);
        let file = File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
        Flock::lock(file, how).map_err(|(_, error)| error).with_context(|| format!("cannot lock {}", path.display()))
    };
    let _door = lock("door", FlockArg::LockExclusive)?;
    let how = if alone { FlockArg::LockExclusive } else { FlockArg::LockShared };
    lock("machine", how).map(Share)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, RecvTimeoutError};
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// Long enough for a thread to start, short enough to wait for what must not happen.
    const A_WHILE: Duration = Duration::from_millis(200);

    #[test]
    fn an_exclusive_lock_is_fair_and_exclusive() {
        let folder = std::env::temp_dir().join(format!("spillway-machine-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (events, seen) = mpsc::channel();
        let first = take_in(&folder, false).unwrap();
        let second = take_in(&folder, false).unwrap();
        thread::scope(|scope| {
            let (folder, alone, late) = (&folder, events.clone(), events);
            scope.spawn(move || {
                let share = take_in(folder, true).unwrap();
                alone.send("alone").unwrap();
                alone.send("alone no more").unwrap();
                drop(share);
            });
            drop(first);
            assert_eq!(seen.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout), "the second has its share");
            scope.spawn(move || {
                let _share = take_in(folder, false).unwrap();
                late.send("late").unwrap();
            });
            assert_eq!(seen.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout), "the door is held");
            drop(second);
            assert_eq!(seen.iter().collect::<Vec<_>>(), ["alone", "alone no more", "late"]);
        });
        fs::remove_dir_all(&folder).unwrap();
    }
}
