//! A store that refuses some writes and remembers all requests.

use super::kind::Erased;
use super::{Backend, Key, Kind, Note, ObjectRef, Store, StoreError, StoreProblem, Verb, Write};
use futures::future::BoxFuture;
use serde_json::Value;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// Makes the error of a refused write.
pub(crate) type Refuse = fn(ObjectRef) -> StoreError;

/// The writes to refuse, and the requests so far.
#[derive(Default)]
pub(crate) struct Script {
    /// The writes to refuse, and their errors.
    pub(crate) refused: Mutex<Vec<(Verb, ObjectRef, Refuse)>>,
    /// The object whose writes never end.
    pub(crate) stuck: Mutex<Option<ObjectRef>>,
    /// All writes that were requested.
    pub(crate) writes: Mutex<Vec<(Verb, ObjectRef)>>,
    /// All notes for users.
    pub(crate) notes: Mutex<Vec<Note>>,
}

impl Script {
    /// Refuses a write from now on.
    pub(crate) fn refuse(&self, verb: Verb, target: ObjectRef, why: Refuse) {
        self.refused.lock().unwrap().push((verb, target, why));
    }

    /// Returns the number of requests for a write.
    pub(crate) fn requests(&self, verb: Verb, target: &ObjectRef) -> usize {
        self.writes.lock().unwrap().iter().filter(|(v, t)| (*v, t) == (verb, target)).count()
    }
}

/// Returns the same store, except for the writes that the script refuses.
pub(crate) fn scripted(store: &Store, script: Arc<Script>) -> Store {
    Store::new(Arc::new(Scripted { inner: store.backend.clone(), script }))
}

struct Scripted {
    inner: Arc<dyn Backend>,
    script: Arc<Script>,
}

impl Backend for Scripted {
    fn list(&self, kind: Kind) -> Vec<Erased> {
        self.inner.list(kind)
    }

    fn get(&self, kind: Kind, key: &Key) -> Option<Erased> {
        self.inner.get(kind, key)
    }

    fn revision(&self, kind: Kind) -> u64 {
        self.inner.revision(kind)
    }

    fn changed(&self, kind: Kind, revision: u64) -> Option<Vec<Key>> {
        self.inner.changed(kind, revision)
    }

    fn heard(&self, kind: Kind) -> u64 {
        self.inner.heard(kind)
    }

    fn is_whole(&self, kind: Kind) -> bool {
        self.inner.is_whole(kind)
    }

    fn problems(&self) -> Vec<StoreProblem> {
        self.inner.problems()
    }

    fn is_connected(&self) -> bool {
        self.inner.is_connected()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changes()
    }

    fn refresh(&self) -> BoxFuture<'static, ()> {
        self.inner.refresh()
    }

    fn write(&self, write: Write) -> BoxFuture<'static, Result<Value, StoreError>> {
        self.script.writes.lock().unwrap().push((write.verb, write.target.clone()));
        if self.script.stuck.lock().unwrap().as_ref() == Some(&write.target) {
            return Box::pin(std::future::pending());
        }
        let refused = self.script.refused.lock().unwrap();
        match refused.iter().find(|(verb, target, _)| (*verb, target) == (write.verb, &write.target)) {
            Some((_, target, why)) => {
                let error = why(target.clone());
                Box::pin(async move { Err(error) })
            }
            None => self.inner.write(write),
        }
    }

    fn note(&self, note: Note) {
        self.script.notes.lock().unwrap().push(note);
    }
}
