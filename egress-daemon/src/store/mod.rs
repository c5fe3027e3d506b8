//! Objects in and out: one small store with a local cache that is read without waiting, and writes that compare and
//! swap. A directory implements it (`files`), and the Kubernetes API (`kubernetes`). May know object shapes and I/O; knows
//! nothing of plans, the kernel or the host's network.

mod counts;
mod files;
mod kind;
mod kubernetes;
pub mod lease;
mod problem;
#[cfg(test)]
pub(crate) mod testing;
mod view;

pub use counts::{WriteCounts, WriteResult};
pub use files::{Files, OpenError, parse};
pub use kind::{Key, Kind, ObjectRef, Stored};
pub use kubernetes::{ConnectError, Kubernetes, Reader};
pub use problem::StoreProblem;

use egress_objects::api::Violation;
use futures::future::BoxFuture;
use kind::Erased;
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::watch;

/// How often [`Store::update_status`] tries.
const UPDATE_ATTEMPTS: usize = 8;

/// What implements a store. Objects are JSON values on their way in, and `Arc`s of their kind's Rust type on their way
/// out of the cache.
pub(crate) trait Backend: Send + Sync {
    /// The objects of a kind, sorted by key.
    fn list(&self, kind: Kind) -> Vec<Erased>;
    /// One object.
    fn get(&self, kind: Kind, key: &Key) -> Option<Erased>;
    /// A number that changes whenever what `list` returns for the kind does.
    fn revision(&self, kind: Kind) -> u64;
    /// The objects of the kind that were added, removed or changed since `revision` was this number; `None` if that is
    /// no longer known.
    fn changed(&self, kind: Kind, revision: u64) -> Option<Vec<Key>>;
    /// A number that changes whenever the source itself reports objects of the kind, not by our own writes alone.
    fn heard(&self, kind: Kind) -> u64;
    /// Whether `list` returns all objects of the kind, and not only those that the reader follows.
    fn is_whole(&self, kind: Kind) -> bool;
    /// What is wrong with the source of the objects, sorted.
    fn problems(&self) -> Vec<StoreProblem>;
    /// Whether the source of the objects answered the last request.
    fn is_connected(&self) -> bool;
    /// Its value changes after each change of what `list`, `problems` or `is_connected` return.
    fn changes(&self) -> watch::Receiver<u64>;
    /// Waits until `list` shows everything that Spillway's processes wrote before the call.
    fn refresh(&self) -> BoxFuture<'static, ()>;
    /// Whether the source has an object, which `get` may not show yet. Afterwards it does.
    fn has(&self, target: ObjectRef) -> BoxFuture<'static, bool>;
    /// Writes, and returns the resulting object. When it returns, `list` shows the write.
    fn write(&self, write: Write) -> BoxFuture<'static, Result<Value, StoreError>>;
    /// Notes what happened to an object for users, if there is a place for it. Does not wait.
    fn note(&self, note: Note);
}

/// What happened to an object, for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The object.
    pub about: ObjectRef,
    /// Whether somebody should look at it.
    pub warning: bool,
    /// What happened, in one word.
    pub reason: &'static str,
    /// What happened, in a sentence.
    pub message: String,
}

/// A requested write.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) verb: Verb,
    pub(crate) target: ObjectRef,
    pub(crate) object: Value,
    pub(crate) guard: Option<Guard>,
}

/// The lease under which a writer writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Guard {
    pub(crate) lease: Key,
    pub(crate) epoch: u64,
}

/// The kinds of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Create,
    Replace,
    ReplaceStatus,
    Delete,
}

impl Verb {
    /// Its name in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Verb::Create => "create",
            Verb::Replace => "replace",
            Verb::ReplaceStatus => "replace_status",
            Verb::Delete => "delete",
        }
    }
}

/// Why a write was not done.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The object is gone, or was never there.
    #[error("{0} does not exist: read it again and create it")]
    NotFound(ObjectRef),
    /// Somebody else created it.
    #[error("{0} exists already: read it again and replace it")]
    AlreadyExists(ObjectRef),
    /// Somebody else wrote it since it was read.
    #[error("{0} was changed since it was read: read it again and repeat the change")]
    Conflict(ObjectRef),
    /// The lease under which the writer writes now has another holder.
    #[error("{0} was not written: this process is no longer the leader")]
    Fenced(ObjectRef),
    /// The object breaks rules of its kind.
    #[error("{object} is refused: {}", violations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Refused {
        /// The object.
        object: ObjectRef,
        /// The rules that it breaks.
        violations: Vec<Violation>,
    },
    /// The place where objects are stored failed.
    #[error("{object} cannot be written: {message}")]
    Unavailable {
        /// The object.
        object: ObjectRef,
        /// What failed, and what to do about it.
        message: String,
    },
}

impl StoreError {
    /// The object that was not written.
    pub fn object(&self) -> &ObjectRef {
        match self {
            StoreError::NotFound(object)
            | StoreError::AlreadyExists(object)
            | StoreError::Conflict(object)
            | StoreError::Fenced(object)
            | StoreError::Refused { object, .. }
            | StoreError::Unavailable { object, .. } => object,
        }
    }

    /// Whether reading the object again and repeating the change may help at once.
    pub fn is_conflict(&self) -> bool {
        matches!(self, StoreError::NotFound(_) | StoreError::AlreadyExists(_) | StoreError::Conflict(_))
    }
}

/// The objects of a cluster. Cheap to clone.
///
/// Reads come from a local cache and never wait. The cache is level-triggered: after a change, [`Changes::next`]
/// returns, and the lists show the latest state, not each step towards it. Writes compare and swap on
/// `metadata.resourceVersion`; the status is written apart from the rest, as in Kubernetes.
#[derive(Clone)]
pub struct Store {
    backend: Arc<dyn Backend>,
    guard: Option<Guard>,
    counts: Arc<WriteCounts>,
}

impl Store {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        Store { backend, guard: None, counts: Arc::default() }
    }

    /// The same store for the holder of a lease: once the lease has another holder or epoch, every write fails with
    /// [`StoreError::Fenced`], even one that was in flight for long.
    pub fn guarded(&self, lease: Key, epoch: u64) -> Self {
        Store { guard: Some(Guard { lease, epoch }), ..self.clone() }
    }

    /// The objects of a kind, sorted by namespace and name. An object that did not change since an earlier call is the
    /// same `Arc`.
    pub fn list<T: Stored>(&self) -> Vec<Arc<T>> {
        self.backend.list(T::KIND).into_iter().filter_map(|object| object.downcast::<T>().ok()).collect()
    }

    /// One object.
    pub fn get<T: Stored>(&self, key: &Key) -> Option<Arc<T>> {
        self.backend.get(T::KIND, key).and_then(|object| object.downcast::<T>().ok())
    }

    /// A number that changes whenever [`Store::list`] of the kind does: while it is the same, the list need not be read
    /// again.
    pub fn revision<T: Stored>(&self) -> u64 {
        self.revision_of(T::KIND)
    }

    /// The same by the kind's name.
    pub fn revision_of(&self, kind: Kind) -> u64 {
        self.backend.revision(kind)
    }

    /// Which objects of a kind were added, removed or changed since [`Store::revision`] of the kind was `revision`,
    /// some of them perhaps more than once; `None` if that is no longer known. A caller that keeps something for each
    /// object can update that without reading all of them: [`Store::get`] returns what they are now.
    pub fn changed<T: Stored>(&self, revision: u64) -> Option<Vec<Key>> {
        self.backend.changed(T::KIND, revision)
    }

    /// A number that changes whenever the source itself reports objects of the kind. What this process writes shows in
    /// [`Store::revision`] at once, but here only once the source reports it: as long as this number grows, nothing that
    /// others write is missed.
    pub fn heard<T: Stored>(&self) -> u64 {
        self.backend.heard(T::KIND)
    }

    /// Whether [`Store::list`] has all objects of a kind. An agent follows the EgressNodes of all nodes only if its own node is a
    /// gateway.
    pub fn is_whole<T: Stored>(&self) -> bool {
        self.backend.is_whole(T::KIND)
    }

    /// Waits until the cache shows everything that any of Spillway's processes wrote before the call. Needed if a
    /// decision must not be based on an old state, although no write would conflict with a newer one.
    pub async fn refresh(&self) {
        self.backend.refresh().await;
    }

    /// Whether the source has an object, which [`Store::get`] may not show yet. Afterwards it does. `false` if the source does not answer.
    pub async fn has<T: Stored>(&self, key: &Key) -> bool {
        self.backend.has(ObjectRef { kind: T::KIND, key: key.clone() }).await
    }

    /// What is wrong with the source of the objects: for example broken files. The last good version of an object with
    /// a problem stays in force.
    pub fn problems(&self) -> Vec<StoreProblem> {
        self.backend.problems()
    }

    /// Whether the source of the objects answers: the API server, since the last failure of a watch; for a directory, whether it
    /// can be read.
    pub fn is_connected(&self) -> bool {
        self.backend.is_connected()
    }

    /// How often this process has written, and with what result.
    pub fn counts(&self) -> Arc<WriteCounts> {
        Arc::clone(&self.counts)
    }

    /// Notices of changes from now on; the first one is immediate, so that a loop starts by reading the state.
    pub fn changes(&self) -> Changes {
        let mut changes = self.backend.changes();
        changes.mark_changed();
        Changes(changes)
    }

    /// Creates an object (without its status) and returns it with its metadata filled in.
    pub async fn create<T: Stored>(&self, object: &T) -> Result<T, StoreError> {
        self.write(Verb::Create, object).await
    }

    /// Replaces an object (all but its status), if `metadata.resourceVersion` is still that of `object`. If nothing
    /// differs, nothing is written.
    pub async fn replace<T: Stored>(&self, object: &T) -> Result<T, StoreError> {
        self.write(Verb::Replace, object).await
    }

    /// Replaces the status of an object, and nothing else, if `metadata.resourceVersion` is still that of `object`. If
    /// nothing differs, nothing is written.
    pub async fn replace_status<T: Stored>(&self, object: &T) -> Result<T, StoreError> {
        self.write(Verb::ReplaceStatus, object).await
    }

    /// Deletes an object, if `metadata.resourceVersion` is still that of `object`.
    pub async fn delete<T: Stored>(&self, object: &T) -> Result<(), StoreError> {
        self.write(Verb::Delete, object).await.map(|_: T| ())
    }

    /// Reads an object, changes its status and replaces that; retries with the newest version if somebody else was
    /// faster. For writers that own a status while others write the rest of the object.
    pub async fn update_status<T: Stored>(&self, key: &Key, change: impl Fn(&mut T)) -> Result<T, StoreError> {
        let target = ObjectRef { kind: T::KIND, key: key.clone() };
        let mut error = StoreError::NotFound(target);
        for _ in 0..UPDATE_ATTEMPTS {
            if let Some(object) = self.get::<T>(key) {
                let mut object = object.as_ref().clone();
                change(&mut object);
                match self.replace_status(&object).await {
                    Err(conflict) if conflict.is_conflict() => error = conflict,
                    done => return done,
                }
            }
            self.refresh().await;
        }
        Err(error)
    }

    /// Notes what happened to an object for users, as an Event in a cluster. A directory has no place for it.
    pub fn note(&self, note: Note) {
        self.backend.note(note);
    }

    async fn write<T: Stored>(&self, verb: Verb, object: &T) -> Result<T, StoreError> {
        let target = ObjectRef { kind: T::KIND, key: Key::of(object) };
        let unavailable =
            |error: serde_json::Error| StoreError::Unavailable { object: target.clone(), message: error.to_string() };
        let value = serde_json::to_value(object).map_err(unavailable)?;
        let written =
            self.backend.write(Write { verb, target: target.clone(), object: value, guard: self.guard.clone() }).await;
        // A replacement that makes no new version was none: nothing differed, or the kind has no field for what did.
        let version = |written: &Value| written.pointer("/metadata/resourceVersion").cloned();
        let old = object.meta().resource_version.clone().map(Value::from);
        let is_none = matches!(verb, Verb::Replace | Verb::ReplaceStatus)
            && written.as_ref().is_ok_and(|written| version(written) == old);
        if !is_none {
            self.counts.note(T::KIND, verb, &written);
        }
        serde_json::from_value(written?).map_err(unavailable)
    }
}

/// Notices of changes of a store.
pub struct Changes(watch::Receiver<u64>);

impl Changes {
    /// Waits for a change since the last call; many changes are one notice. When the store is gone, waits forever.
    /// Cancel safe.
    pub async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
