//! The store of objects: a local cache for reads without waiting, and compare-and-swap writes. It is implemented by a directory
//! (`files`) and by the Kubernetes API (`kubernetes`). It may know the shape of objects and do I/O, but knows nothing of plans, the kernel
//! or the host's network.

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

/// The implementation of a store. Writes take objects as JSON values. Reads from the cache return `Arc`s of the kind's Rust type.
pub(crate) trait Backend: Send + Sync {
    /// Returns the objects of a kind, sorted by key.
    fn list(&self, kind: Kind) -> Vec<Erased>;
    /// Returns one object.
    fn get(&self, kind: Kind, key: &Key) -> Option<Erased>;
    /// Returns a number that changes whenever the result of `list` for the kind changes.
    fn revision(&self, kind: Kind) -> u64;
    /// Returns the objects of the kind that were added, removed or changed since `revision` returned this number; `None` if they are no
    /// longer known.
    fn changed(&self, kind: Kind, revision: u64) -> Option<Vec<Key>>;
    /// Returns a number that changes whenever the source reports objects of the kind, but not by this process's writes alone.
    fn heard(&self, kind: Kind) -> u64;
    /// Returns whether `list` returns all objects of the kind, and not only the objects that the reader follows.
    fn is_whole(&self, kind: Kind) -> bool;
    /// Returns the problems of the source of the objects, sorted.
    fn problems(&self) -> Vec<StoreProblem>;
    /// Returns whether the source of the objects answered the last request.
    fn is_connected(&self) -> bool;
    /// Returns a receiver whose value changes after each change to the results of `list`, `problems` or `is_connected`.
    fn changes(&self) -> watch::Receiver<u64>;
    /// Waits until `list` shows all writes of Spillway's processes before the call.
    fn refresh(&self) -> BoxFuture<'static, ()>;
    /// Writes an object, and returns the result. By then, `list` shows the write.
    fn write(&self, write: Write) -> BoxFuture<'static, Result<Value, StoreError>>;
    /// Notes an event about an object for users, if the backend has a place for it. Does not wait.
    fn note(&self, note: Note);
}

/// An event about an object, for users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The object.
    pub about: ObjectRef,
    /// Whether a user should look at it.
    pub warning: bool,
    /// The event, in one word.
    pub reason: &'static str,
    /// The event, in a sentence.
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

/// The lease under which a process writes.
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
    /// Returns its name in metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Verb::Create => "create",
            Verb::Replace => "replace",
            Verb::ReplaceStatus => "replace_status",
            Verb::Delete => "delete",
        }
    }
}

/// The reason why a write failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The object is gone, or never existed.
    #[error("{0} does not exist: read it again and create it")]
    NotFound(ObjectRef),
    /// Another writer created it.
    #[error("{0} exists already: read it again and replace it")]
    AlreadyExists(ObjectRef),
    /// Another writer changed it since it was read.
    #[error("{0} was changed since it was read: read it again and repeat the change")]
    Conflict(ObjectRef),
    /// The lease of the writer's guard now has another holder.
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
    /// The storage of objects failed.
    #[error("{object} cannot be written: {message}")]
    Unavailable {
        /// The object.
        object: ObjectRef,
        /// The failure and its remedy.
        message: String,
    },
}

impl StoreError {
    /// Returns the object that was not written.
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

    /// Returns whether reading the object again and repeating the change immediately may help.
    pub fn is_conflict(&self) -> bool {
        matches!(self, StoreError::NotFound(_) | StoreError::AlreadyExists(_) | StoreError::Conflict(_))
    }
}

/// The store of a cluster's objects. Cheap to clone.
///
/// Reads come from a local cache and never wait. The cache is level-triggered: after a change, [`Changes::next`] returns, and the lists
/// show the latest state, not each step towards it. Writes compare and swap on `metadata.resourceVersion`. The status is written
/// separately from the rest, as in Kubernetes.
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

    /// Returns the same store for the holder of a lease. Once the lease has another holder or epoch, every write fails with
    /// [`StoreError::Fenced`], even a write that was in flight for a long time.
    pub fn guarded(&self, lease: Key, epoch: u64) -> Self {
        Store { guard: Some(Guard { lease, epoch }), ..self.clone() }
    }

    /// Returns the objects of a kind, sorted by namespace and name. An object that has not changed since an earlier call is the same `Arc`.
    pub fn list<T: Stored>(&self) -> Vec<Arc<T>> {
        self.backend.list(T::KIND).into_iter().filter_map(|object| object.downcast::<T>().ok()).collect()
    }

    /// Returns one object.
    pub fn get<T: Stored>(&self, key: &Key) -> Option<Arc<T>> {
        self.backend.get(T::KIND, key).and_then(|object| object.downcast::<T>().ok())
    }

    /// Returns a number that changes whenever [`Store::list`] of the kind changes. While it is the same, the list need not be read again.
    pub fn revision<T: Stored>(&self) -> u64 {
        self.revision_of(T::KIND)
    }

    /// Like [`Store::revision`], for a kind that is not known at compile time.
    pub fn revision_of(&self, kind: Kind) -> u64 {
        self.backend.revision(kind)
    }

    /// Returns the objects of a kind that were added, removed or changed since [`Store::revision`] of the kind was `revision`, some perhaps
    /// more than once; `None` if they are no longer known. A caller with data for each object can update the data without reading all
    /// objects: [`Store::get`] returns their present state.
    pub fn changed<T: Stored>(&self, revision: u64) -> Option<Vec<Key>> {
        self.backend.changed(T::KIND, revision)
    }

    /// Returns a number that changes whenever the source reports objects of the kind. A write of this process shows immediately in
    /// [`Store::revision`], but here only once the source reports it. As long as this number grows, no write of another process is missed.
    pub fn heard<T: Stored>(&self) -> u64 {
        self.backend.heard(T::KIND)
    }

    /// Returns whether [`Store::list`] has all objects of a kind. An agent follows the EgressNodes of all nodes only if its own node is a
    /// gateway.
    pub fn is_whole<T: Stored>(&self) -> bool {
        self.backend.is_whole(T::KIND)
    }

    /// Waits until the cache shows all writes of Spillway's processes before the call. Needed for a decision that must not be based on an
    /// old state, if no write would detect the conflict with a newer state.
    pub async fn refresh(&self) {
        self.backend.refresh().await;
    }

    /// Returns the problems of the source of the objects, such as broken files. The last good version of an object with a problem stays in
    /// force.
    pub fn problems(&self) -> Vec<StoreProblem> {
        self.backend.problems()
    }

    /// Returns whether the source of the objects answers: the API server has answered since the last failure of a watch, or the directory
    /// can be read.
    pub fn is_connected(&self) -> bool {
        self.backend.is_connected()
    }

    /// Returns the counts of this process's writes, by result.
    pub fn counts(&self) -> Arc<WriteCounts> {
        Arc::clone(&self.counts)
    }

    /// Returns notices of changes from now on. The first notice is immediate, so that a loop starts by reading the state.
    pub fn changes(&self) -> Changes {
        let mut changes = self.backend.changes();
        changes.mark_changed();
        Changes(changes)
    }

    /// Creates an object (without its status) and returns it with its metadata filled in.
    pub async fn create<T: Stored>(&self, object: &T) -> Result<T, StoreError> {
        self.write(Verb::Create, object).await
    }

    /// Replaces an object (except its status), if `metadata.resourceVersion` is still that of `object`. Writes nothing if nothing differs.
    pub async fn replace<T: Stored>(&self, object: &T) -> Result<T, StoreError> {
        self.write(Verb::Replace, object).await
    }

    /// Replaces only the status of an object, if `metadata.resourceVersion` is still that of `object`. Writes nothing if nothing differs.
    pub async fn replace_status<T: Stored>(&self, object: &T) -> Result<T, StoreError> {
        self.write(Verb::ReplaceStatus, object).await
    }

    /// Deletes an object, if `metadata.resourceVersion` is still that of `object`.
    pub async fn delete<T: Stored>(&self, object: &T) -> Result<(), StoreError> {
        self.write(Verb::Delete, object).await.map(|_: T| ())
    }

    /// Notes an event about an object for users: as an Event in a cluster. A directory ignores it.
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
        // A replacement without a new version is not a write: nothing differed, or the kind does not have the fields that differed.
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
    /// Waits for a change since the last call. Many changes cause one notice. Waits forever when the store is gone. Cancel safe.
    pub async fn next(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
