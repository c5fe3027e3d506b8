//! Shares the machine between tests. A test that generates load or depends on timing gets the machine alone.
//!
//! All tests of a binary may start concurrently. Within a process, the tests that need the machine alone run first, sequentially, followed
//! by the others, a few at a time, so that tests do not wait for each other repeatedly. Processes share the machine by file locks.

use std::fs::{self, File};
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

use crate::scope::{LABS, Scope};
use crate::wait::wait_for;

/// Set if every test must have the machine alone: on the retry of a failed test.
const ALONE: &str = "SPILLWAY_TEST_ALONE";

/// The number of tests of a process that share the machine. They mostly wait, so the number may exceed that of processors.
const AT_ONCE: usize = 6;

/// The time that the kernel may take to remove the namespaces of earlier labs.
const REMOVALS: Duration = Duration::from_secs(60);

/// The turns of this process's tests.
static TURNS: Turns = Turns::new();

/// A share of the machine, released when dropped: first the lock, then the turn.
#[derive(Debug)]
pub struct Share(
    #[expect(dead_code, reason = "it is held")] Flock<File>,
    #[expect(dead_code, reason = "it is held")] Turn<'static>,
);

/// Waits for a share of the machine, or for all of it.
pub fn take(alone: bool) -> Result<Share> {
    let alone = alone || std::env::var_os(ALONE).is_some();
    let turn = TURNS.take(alone);
    fs::create_dir_all(LABS).with_context(|| format!("cannot make {LABS}"))?;
    let lock = lock(Path::new(LABS), alone)?;
    if alone {
        wait_for_removals()?;
    }
    Ok(Share(lock, turn))
}

/// Waits until the kernel has removed the namespaces of earlier labs. It does so later, in the background, which costs other labs packets.
///
/// The kernel removes namespaces in groups (`cleanup_net`): those that accumulated while it removed the previous group.
/// The first namespace removed here may share a group with those of earlier labs. The second one comes after them.
fn wait_for_removals() -> Result<()> {
    let mut scope = Scope::open()?;
    let outside = scope.namespace("outside")?;
    for _ in 0..2 {
        let last = scope.namespace("last")?;
        outside.ip(&[format!("link add peer type veth peer name peer netns {}", last.name())])?;
        scope.remove_namespace(&last)?;
        drop(last);
        wait_for("the kernel has removed the namespaces of earlier labs", REMOVALS, || {
            Ok(!outside.sh("ip link show")?.contains("peer"))
        })?;
    }
    Ok(())
}

/// Waits for the other processes. A waiter holds a second lock, so that none overtakes it and requests for exclusive use do not starve.
fn lock(folder: &Path, alone: bool) -> Result<Flock<File>> {
    let lock = |name: &str, how: FlockArg| {
        let path = folder.join(name);
        let file = File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
        Flock::lock(file, how).map_err(|(_, error)| error).with_context(|| format!("cannot lock {}", path.display()))
    };
    let _door = lock("door", FlockArg::LockExclusive)?;
    lock("machine", if alone { FlockArg::LockExclusive } else { FlockArg::LockShared })
}

/// Assigns turns to the tests of one process.
#[derive(Debug)]
struct Turns {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Debug)]
struct Counts {
    /// The number of tests that have the machine alone or wait for it.
    alone: usize,
    /// The number of tests that share it.
    sharing: usize,
}

/// A test's turn, which ends when dropped.
#[derive(Debug)]
struct Turn<'a> {
    turns: &'a Turns,
    alone: bool,
}

impl Turns {
    const fn new() -> Self {
        Self { counts: Mutex::new(Counts { alone: 0, sharing: 0 }), changed: Condvar::new() }
    }

    /// Waits for a turn. Tests that need the machine alone may have turns concurrently: the file lock puts them in sequence.
    fn take(&self, alone: bool) -> Turn<'_> {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.alone += usize::from(alone);
        let waits = |counts: &mut Counts| match alone {
            true => counts.sharing > 0,
            false => counts.alone > 0 || counts.sharing == AT_ONCE,
        };
        let mut counts = self.changed.wait_while(counts, waits).unwrap_or_else(PoisonError::into_inner);
        counts.sharing += usize::from(!alone);
        Turn { turns: self, alone }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut counts = self.turns.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.alone -= usize::from(self.alone);
        counts.sharing -= usize::from(!self.alone);
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, RecvTimeoutError};
    use std::thread;

    use super::*;

    /// Long enough for a thread to start, short enough to wait for an event that must not happen.
    const A_WHILE: Duration = Duration::from_millis(200);

    #[test]
    fn exclusive_lock_is_not_overtaken_by_later_shared_locks() {
        let folder = std::env::temp_dir().join(format!("spillway-machine-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (events, seen) = mpsc::channel();
        let first = lock(&folder, false).unwrap();
        let second = lock(&folder, false).unwrap();
        thread::scope(|scope| {
            let (folder, alone, late) = (&folder, events.clone(), events);
            scope.spawn(move || {
                let share = lock(folder, true).unwrap();
                alone.send("alone").unwrap();
                alone.send("alone no more").unwrap();
                drop(share);
            });
            drop(first);
            assert_eq!(seen.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout), "the second has its share");
            scope.spawn(move || {
                let _share = lock(folder, false).unwrap();
                late.send("late").unwrap();
            });
            assert_eq!(seen.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout), "the door is held");
            drop(second);
            assert_eq!(seen.iter().collect::<Vec<_>>(), ["alone", "alone no more", "late"]);
        });
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn exclusive_turns_precede_waiting_shared_turns() {
        let turns = Turns::new();
        let (events, seen) = mpsc::channel();
        let mut sharing: Vec<Turn<'_>> = (0..AT_ONCE).map(|_| turns.take(false)).collect();
        thread::scope(|scope| {
            let (turns, alone, late) = (&turns, events.clone(), events);
            scope.spawn(move || {
                let turn = turns.take(false);
                late.send("late").unwrap();
                drop(turn);
            });
            assert_eq!(seen.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout), "there are enough");
            scope.spawn(move || {
                let turn = turns.take(true);
                alone.send("alone").unwrap();
                alone.send("alone no more").unwrap();
                drop(turn);
            });
            assert_eq!(seen.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout), "the others have their shares");
            sharing.clear();
            assert_eq!(seen.iter().collect::<Vec<_>>(), ["alone", "alone no more", "late"]);
        });
    }
}
