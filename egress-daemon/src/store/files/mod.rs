//! The store in a directory: people write YAML files into it, Spillway keeps what it writes in `DIR/.spillway`, and any
//! number of processes share it without a server.

#[cfg(test)]
mod damage_tests;
mod disk;
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
use super::view::View;
use super::{Backend, Key, Kind, Note, Problem, Store, StoreError, Write};
use futures::future::BoxFuture;
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher, event::AccessKind, event::AccessMode};
use own::Own;
use parse::Parser;
use scan::{Look, Scanner};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};

/// How often everything is looked at although nothing was notified.
const BACKSTOP: Duration = Duration::from_secs(2);
/// The same when the kernel cannot notify.
const POLL: Duration = Duration::from_millis(250);
/// How long notices are gathered before the directory is looked at.
const GATHER: Duration = Duration::from_millis(2);
/// How long opening waits for files that are being written.
const OPEN_WAIT: Duration = Duration::from_secs(2);

/// A store in a directory.
pub struct Files {
    directory: PathBuf,
    own: Own,
    parser: Parser,
    view: Mutex<View>,
    /// Held while the directory is looked at and while a write is put into the view, so that the view never goes back.
    order: Mutex<()>,
    changes: watch::Sender<u64>,
    wake: mpsc::Sender<Wake>,
}

/// Why the directory is looked at.
#[derive(Debug)]
enum Wake {
    /// Files of Spillway's changed.
    Own,
    /// Files of people changed, perhaps others too.
    Any,
    /// Somebody waits for a look at Spillway's files.
    Waiting(oneshot::Sender<()>),
    Stop,
}

/// Why a directory cannot be a store.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is not there, or not a directory.
    #[error("{0} is not a directory: create it, or name another one with --manifests")]
    NotADirectory(PathBuf),
    /// Spillway's own part of it cannot be created.
    #[error("{directory}/.spillway cannot be created: {error}: make the directory writable")]
    NotWritable {
        /// The directory.
        directory: PathBuf,
        /// What failed.
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
    /// Opens a directory and reads all of it. Blocks for the time that this takes, and for files that are just being
    /// written; what is broken is among [`Store::problems`]. Its cache follows the directory until the last clone of
    /// the store is dropped.
    pub fn open(directory: &Path) -> Result<Store, OpenError> {
        let (files, woken) = Self::prepare(directory)?;
        // Watching starts before the first look, so that no change falls between them.
        let watcher = files.watch();
        let mut scanner = Scanner::default();
        let start = Instant::now();
        let mut again = scanner.scan(&files, Look::Everywhere);
        while let Some(until) = again.filter(|_| start.elapsed() < OPEN_WAIT) {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            again = scanner.scan(&files, Look::Everywhere);
        }
        scanner.forget_good(&files);
        let weak = Arc::downgrade(&files);
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || follow(&weak, scanner, again, &woken, watcher))
            .map_err(OpenError::Thread)?;
        Ok(Store::new(Arc::new(files)))
    }

    /// Whether there is such a directory, without a look into it.
    pub fn check(directory: &Path) -> Result<(), OpenError> {
        directory.is_dir().then_some(()).ok_or_else(|| OpenError::NotADirectory(directory.to_owned()))
    }

    /// A store that has not looked yet, and where it will be woken.
    fn prepare(directory: &Path) -> Result<(Arc<Self>, mpsc::Receiver<Wake>), OpenError> {
        Self::check(directory)?;
        // Links in the path are followed each time: where they lead may change, or be cut.
        let absolute = std::path::absolute(directory).ok().filter(|path| path.is_dir());
        let directory = absolute.ok_or_else(|| OpenError::NotADirectory(directory.to_owned()))?;
        let own = Own::open(directory.join(".spillway"))
            .map_err(|error| OpenError::NotWritable { directory: directory.clone(), error })?;
        let (wake, woken) = mpsc::channel();
        let files = Files {
            parser: Parser::new()?,
            own,
            directory,
            view: Mutex::default(),
            order: Mutex::default(),
            changes: watch::Sender::new(0),
            wake,
        };
        Ok((Arc::new(files), woken))
    }

    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the view, and tells the readers if that made a difference.
    fn update(&self, change: impl FnOnce(&mut View) -> bool) {
        if change(&mut self.view()) {
            self.changes.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    fn watch(&self) -> Option<RecommendedWatcher> {
        let wake = self.wake.clone();
        let own = self.own.root().to_owned();
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            let reason = match event {
                Ok(event) if !matters(&event) => return,
                Ok(event) if !event.paths.is_empty() && event.paths.iter().all(|path| path.starts_with(&own)) => {
                    Wake::Own
                }
                _ => Wake::Any,
            };
            // Without a receiver the store is gone, and nobody needs the notice.
            wake.send(reason).ok();
        })
        .and_then(|mut watcher| {
            watcher.watch(&self.directory, RecursiveMode::Recursive)?;
            Ok(watcher)
        });
        match watcher {
            Ok(watcher) => Some(watcher),
            Err(error) => {
                tracing::warn!(
                    directory = %self.directory.display(), %error,
                    "no notices of changes (raise fs.inotify.max_user_watches?): looking every {POLL:?} instead"
                );
                None
            }
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        // Without a receiver the thread has ended already.
        self.wake.send(Wake::Stop).ok();
    }
}

/// Whether an event may stand for a change of an object. Opening and reading do not, nor do the lock and files that are
/// about to be renamed.
fn matters(event: &Event) -> bool {
    let kind = match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        _ => true,
    };
    let hidden = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        name.starts_with('.') && name.ends_with(".tmp")
            || name == "lock" && path.parent().is_some_and(|p| p.ends_with(".spillway"))
    };
    kind && (event.need_rescan() || event.paths.is_empty() || !event.paths.iter().all(hidden))
}

/// The thread that keeps the view up to date.
fn follow(
    files: &Weak<Files>,
    mut scanner: Scanner,
    mut again: Option<Instant>,
    woken: &mpsc::Receiver<Wake>,
    watcher: Option<RecommendedWatcher>,
) {
    let backstop = if watcher.is_some() { BACKSTOP } else { POLL };
    loop {
        let pause = again.map_or(backstop, |again| again.saturating_duration_since(Instant::now()).min(backstop));
        let first = match woken.recv_timeout(pause) {
            Ok(wake) => {
                std::thread::sleep(GATHER);
                wake
            }
            Err(RecvTimeoutError::Timeout) => Wake::Any,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let (mut all, mut waiting) = (again.is_some_and(|again| again <= Instant::now()), Vec::new());
        for wake in [first].into_iter().chain(woken.try_iter()) {
            match wake {
                Wake::Own => {}
                Wake::Any => all = true,
                Wake::Waiting(done) => waiting.push(done),
                Wake::Stop => return,
            }
        }
        let Some(files) = files.upgrade() else { return };
        again = scanner.scan(&files, if all { Look::Everywhere } else { Look::Own });
        for done in waiting {
            // Without a receiver nobody waits any more.
            done.send(()).ok();
        }
    }
}

/// A shared handle to the directory; writes need their own to outlive the caller.
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

    fn problems(&self) -> Vec<Problem> {
        self.view().problems.clone()
    }

    fn note(&self, _: Note) {}

    fn refresh(&self) -> BoxFuture<'static, ()> {
        let (done, waiting) = oneshot::channel();
        let sent = self.wake.send(Wake::Waiting(done)).is_ok();
        Box::pin(async move {
            if sent {
                // Without a sender the store is closing.
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
