//! The store in a directory: users write YAML files into it, Spillway keeps its own files in `DIR/.spillway`, and any number of processes
//! share it without a server.

#[cfg(test)]
mod damage_tests;
mod disk;
mod notices;
mod own;
mod packed;
mod parse;
mod record;
mod scan;
#[cfg(test)]
mod tests;
mod user;
#[cfg(test)]
mod user_tests;
mod write;

use super::kind::Erased;
use super::view::StoreView;
use super::{Backend, Key, Kind, Note, ObjectRef, Store, StoreError, StoreProblem, Write};
use futures::future::BoxFuture;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use own::Own;
use parse::Parser;
use scan::{Look, Scanner};
use serde_json::Value;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// The interval of full scans in the absence of notices.
const BACKSTOP: Duration = Duration::from_secs(2);
/// The interval of full scans if the kernel cannot send notices.
const POLL: Duration = Duration::from_millis(250);
/// The time for which notices are gathered before a scan.
const GATHER: Duration = Duration::from_millis(2);
/// The time for which opening waits for files that are being written.
const OPEN_WAIT: Duration = Duration::from_secs(2);

/// A store in a directory.
pub struct Files {
    directory: PathBuf,
    own: Own,
    parser: Parser,
    view: Mutex<StoreView>,
    /// Held while the directory is scanned and while a write is added to the view, so that the view never goes backwards.
    order: Mutex<()>,
    changes: watch::Sender<u64>,
    /// The queue of callers that wait for a scan of Spillway's files, and the event that wakes the scanning thread.
    waiting: mpsc::Sender<oneshot::Sender<()>>,
    bell: Arc<EventFd>,
}

/// The reason why a directory cannot be a store.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It does not exist, or is not a directory.
    #[error("{0} is not a directory: create it, or name another one with --manifests")]
    NotADirectory(PathBuf),
    /// Spillway's own subdirectory cannot be created.
    #[error("{directory}/.spillway cannot be created: {error}: make the directory writable")]
    NotWritable {
        /// The directory.
        directory: PathBuf,
        /// The I/O error.
        error: std::io::Error,
    },
    /// A rule of Spillway's own CRDs does not compile.
    #[error("the rules of Spillway's own kinds do not compile: {0}")]
    Rules(#[from] serde_json::Error),
    /// No thread could be started.
    #[error("cannot start a thread to follow the directory: {0}")]
    Thread(std::io::Error),
}

impl Files {
    /// Opens a directory and reads all of it. Blocks until files that are being written are complete, for a limited time. Broken files are
    /// among [`Store::problems`]. The cache follows the directory until the last clone of the store is dropped.
    pub fn open(directory: &Path) -> Result<Store, OpenError> {
        let (files, waiting) = Self::prepare(directory)?;
        let mut scanner = Scanner::with_notices(&files.directory);
        let start = Instant::now();
        let mut again = scanner.scan(&files, Look::Everywhere);
        while let Some(until) = again.filter(|_| start.elapsed() < OPEN_WAIT) {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            again = scanner.scan(&files, Look::Everywhere);
        }
        scanner.forget_good(&files);
        let (weak, bell) = (Arc::downgrade(&files), files.bell.clone());
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || follow(&weak, scanner, again, &bell, &waiting))
            .map_err(OpenError::Thread)?;
        Ok(Store::new(Arc::new(files)))
    }

    /// Checks that the directory exists, without reading it.
    pub fn check(directory: &Path) -> Result<(), OpenError> {
        directory.is_dir().then_some(()).ok_or_else(|| OpenError::NotADirectory(directory.to_owned()))
    }

    /// Returns a store that has not been scanned yet, and the receiving end of its queue.
    fn prepare(directory: &Path) -> Result<(Arc<Self>, mpsc::Receiver<oneshot::Sender<()>>), OpenError> {
        Self::check(directory)?;
        // Symbolic links in the path are followed each time, since their targets may change or disappear.
        let absolute = std::path::absolute(directory).ok().filter(|path| path.is_dir());
        let directory = absolute.ok_or_else(|| OpenError::NotADirectory(directory.to_owned()))?;
        let own = Own::open(directory.join(".spillway"))
            .map_err(|error| OpenError::NotWritable { directory: directory.clone(), error })?;
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let bell = Arc::new(bell.map_err(|error| OpenError::Thread(error.into()))?);
        let (waiting, receiver) = mpsc::channel();
        let files = Files {
            parser: Parser::new()?,
            own,
            directory,
            view: Mutex::default(),
            order: Mutex::default(),
            changes: watch::Sender::new(0),
            waiting,
            bell,
        };
        Ok((Arc::new(files), receiver))
    }

    fn view(&self) -> MutexGuard<'_, StoreView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread that scans the directory.
    fn ring(&self) {
        // The write fails only if the counter is at its maximum, so the bell has already rung.
        self.bell.write(1).ok();
    }

    /// Changes the view, and notifies the readers if `change` returns true.
    fn update(&self, change: impl FnOnce(&mut StoreView) -> bool) {
        if change(&mut self.view()) {
            self.changes.send_modify(|count| *count = count.wrapping_add(1));
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.ring();
    }
}

/// Runs in the thread that keeps the view up to date.
fn follow(
    files: &Weak<Files>,
    mut scanner: Scanner,
    mut again: Option<Instant>,
    bell: &EventFd,
    waiting: &mpsc::Receiver<oneshot::Sender<()>>,
) {
    let mut whole = Instant::now();
    loop {
        let backstop = whole + if scanner.notices().is_some() { BACKSTOP } else { POLL };
        let until = again.map_or(backstop, |again| again.min(backstop));
        if wait(bell, scanner.notices(), until) {
            std::thread::sleep(GATHER);
        }
        let everywhere = Instant::now() >= until;
        let waiting: Vec<_> = waiting.try_iter().collect();
        let Some(files) = files.upgrade() else { return };
        again = scanner.scan(&files, if everywhere { Look::Everywhere } else { Look::Noticed });
        if everywhere {
            whole = Instant::now();
        }
        for done in waiting {
            // Without a receiver, no caller waits any longer.
            done.send(()).ok();
        }
    }
}

/// Waits until the bell rings, a notice arrives, or `until`. Returns whether one of the first two happened.
fn wait(bell: &EventFd, notices: Option<&notices::Notices>, until: Instant) -> bool {
    let mut fds = vec![PollFd::new(bell.as_fd(), PollFlags::POLLIN)];
    fds.extend(notices.map(|notices| PollFd::new(notices.as_fd(), PollFlags::POLLIN)));
    let left = until.saturating_duration_since(Instant::now());
    // Rounded up, or the last part of a millisecond would be spent in a busy loop.
    let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
    let woken = poll(&mut fds, timeout).is_ok_and(|ready| ready > 0);
    // The read fails if the bell has not rung.
    bell.read().ok();
    woken
}

/// The objects of a file, and the problems of the rest.
pub type Read = (Vec<(ObjectRef, Value)>, Vec<StoreProblem>);

/// Returns the objects in a user's text, and its problems.
pub fn parse(file: &Path, text: &[u8]) -> Result<Read, OpenError> {
    let (objects, problems) = Parser::new()?.parse(file, text);
    Ok((objects.into_iter().map(|parsed| (parsed.target, parsed.object.value())).collect(), problems))
}

/// A shared handle to the directory, since a write needs its own handle to outlive the caller.
impl Backend for Arc<Files> {
    fn list(&self, kind: Kind) -> Vec<Erased> {
        self.view().list(kind)
    }

    fn get(&self, kind: Kind, key: &Key) -> Option<Erased> {
        self.view().get(kind, key)
    }

    fn revision(&self, kind: Kind) -> u64 {
        self.view().revision(kind)
    }

    fn changed(&self, kind: Kind, revision: u64) -> Option<Vec<Key>> {
        self.view().changed(kind, revision)
    }

    fn heard(&self, kind: Kind) -> u64 {
        self.revision(kind)
    }

    fn is_whole(&self, _: Kind) -> bool {
        true
    }

    fn problems(&self) -> Vec<StoreProblem> {
        self.view().problems.clone()
    }

    fn is_connected(&self) -> bool {
        std::fs::read_dir(self.own.root()).is_ok()
    }

    fn note(&self, _: Note) {}

    fn refresh(&self) -> BoxFuture<'static, ()> {
        let (done, waiting) = oneshot::channel();
        let sent = self.waiting.send(done).is_ok();
        self.ring();
        Box::pin(async move {
            if sent {
                // Without a sender, the store is closing.
                waiting.await.ok();
            }
        })
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn write(&self, write: Write) -> BoxFuture<'static, Result<Value, StoreError>> {
        let files = Arc::clone(self);
        Box::pin(async move {
            let object = write.target.clone();
            tokio::task::spawn_blocking(move || files.write_blocking(write))
                .await
                .unwrap_or_else(|error| Err(StoreError::Unavailable { object, message: error.to_string() }))
        })
    }
}
