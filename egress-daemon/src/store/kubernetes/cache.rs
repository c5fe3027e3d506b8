//! What is known of a cluster's objects. Watches bring it up to date; our own writes are in it when they return.
//!
//! Invariant: an object never goes back to an older version, and one that is gone does not come back, in whatever order answers
//! and notices arrive. This needs resourceVersions that are ordered numbers, as Kubernetes has them.

use super::trim::{is_trimmed, trim, version};
use crate::store::kind::Erased;
use crate::store::view::{Item, StoreView};
use crate::store::{Key, Kind, ObjectRef, StoreProblem};
use kube::runtime::watcher::Event;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::watch;

/// The cache.
#[derive(Debug, Default)]
pub(super) struct Cache {
    state: Mutex<CacheState>,
    changes: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct CacheState {
    view: StoreView,
    kinds: BTreeMap<Kind, Progress>,
    /// Objects that are not understood. Their last good version is in force.
    problems: BTreeMap<ObjectRef, StoreProblem>,
    /// When the last renewal of each lease of our own that succeeded was sent.
    renewed: BTreeMap<Key, Instant>,
    /// The API server did not answer when it was asked last.
    unanswered: bool,
}

/// How far the watch of a kind is.
#[derive(Debug)]
struct Progress {
    /// Whether it has been listed.
    ready: bool,
    /// The fields of its status that its definition lacks, as another system's may; `None` if it has no status at all.
    lacking: Option<BTreeSet<String>>,
    /// How many answers and notices the API server has sent.
    heard: u64,
    /// What is being listed, of kinds whose objects may have been written here meanwhile.
    listing: BTreeMap<Key, Value>,
    /// What has been listed so far of the others: a whole list of them, as the API server sends it, may not fit memory.
    listed: BTreeSet<Key>,
    /// Objects that we wrote since the list began: it may not have them.
    written: BTreeSet<Key>,
    /// Objects (by uid) that are gone, of which older notices, and answers to our writes, may still come.
    gone: Recent,
}

/// How many objects that are gone are remembered, of each kind: more than can go while a write takes its few seconds.
const RECENT: usize = 4_096;

/// The last uids of many.
#[derive(Debug, Default)]
struct Recent {
    order: VecDeque<String>,
    all: BTreeSet<String>,
}

impl Recent {
    fn insert(&mut self, uid: &str) {
        if !uid.is_empty() && self.all.insert(uid.to_owned()) {
            self.order.push_back(uid.to_owned());
        }
        if self.order.len() > RECENT
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
    }
}

impl Default for Progress {
    fn default() -> Self {
        Progress {
            ready: false,
            lacking: Some(BTreeSet::new()),
            heard: 0,
            listing: BTreeMap::new(),
            listed: BTreeSet::new(),
            written: BTreeSet::new(),
            gone: Recent::default(),
        }
    }
}

/// A version as a number.
fn number(version: &str) -> u64 {
    version.parse().unwrap_or(0)
}

fn key_of(object: &Value) -> Key {
    let text = |path| object.pointer(path).and_then(Value::as_str).unwrap_or_default();
    Key::namespaced(text("/metadata/namespace"), text("/metadata/name"))
}

fn uid(object: &Value) -> &str {
    object.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default()
}

impl Cache {
    fn state(&self) -> MutexGuard<'_, CacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and tells the readers if that made a difference.
    fn update(&self, change: impl FnOnce(&mut CacheState) -> bool) {
        if change(&mut self.state()) {
            self.changes.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(super) fn list(&self, kind: Kind) -> Vec<Erased> {
        self.state().view.list(kind)
    }

    pub(super) fn get(&self, kind: Kind, key: &Key) -> Option<Erased> {
        self.state().view.get(kind, key)
    }

    pub(super) fn revision(&self, kind: Kind) -> u64 {
        self.state().view.revision(kind)
    }

    pub(super) fn changed(&self, kind: Kind, revision: u64) -> Option<Vec<Key>> {
        self.state().view.changed(kind, revision)
    }

    pub(super) fn heard(&self, kind: Kind) -> u64 {
        self.state().kinds.get(&kind).map_or(0, |progress| progress.heard)
    }

    pub(super) fn problems(&self) -> Vec<StoreProblem> {
        self.state().problems.values().cloned().collect()
    }

    /// Whether the API server answered when it was asked last.
    pub(super) fn is_connected(&self) -> bool {
        !self.state().unanswered
    }

    /// Takes in whether the API server answers.
    pub(super) fn answers(&self, answers: bool) {
        self.update(|state| std::mem::replace(&mut state.unanswered, !answers) == answers);
    }

    /// Which of the kinds have not been listed yet.
    pub(super) fn missing(&self, kinds: &[Kind]) -> Vec<Kind> {
        let state = self.state();
        kinds.iter().copied().filter(|kind| !state.kinds.get(kind).is_some_and(|progress| progress.ready)).collect()
    }

    /// Takes in that the cluster does not know a kind (yet): nobody need wait for its objects.
    pub(super) fn absent(&self, kind: Kind) {
        self.update(|state| !std::mem::replace(&mut state.kinds.entry(kind).or_default().ready, true));
    }

    /// Takes in which fields of a kind's status its definition does not have; `None` stands for all of it.
    pub(super) fn lacks(&self, kind: Kind, fields: Option<Vec<String>>) {
        let mut state = self.state();
        let lacking = &mut state.kinds.entry(kind).or_default().lacking;
        match (fields, lacking.as_mut()) {
            (None, _) => *lacking = None,
            (Some(fields), Some(known)) => known.extend(fields),
            (Some(_), None) => {}
        }
    }

    /// What of a status can be written at all, as far as is known by now.
    pub(super) fn writable(&self, kind: Kind, mut status: Value) -> Option<Value> {
        let state = self.state();
        let lacking = state.kinds.get(&kind).map(|progress| &progress.lacking);
        if let (Some(fields), Some(lacking)) = (status.as_object_mut(), lacking) {
            let lacking = lacking.as_ref()?;
            fields.retain(|field, _| !lacking.contains(field));
        }
        Some(status)
    }

    /// Takes in a notice of a watch.
    pub(super) fn notice(&self, kind: Kind, event: Event<Value>) {
        self.update(|state| {
            let progress = state.kinds.entry(kind).or_default();
            // A list that begins has not been answered yet.
            let answered = !matches!(event, Event::Init);
            progress.heard += u64::from(answered);
            let answers_again = answered && std::mem::take(&mut state.unanswered);
            let changed = match event {
                Event::Init => {
                    progress.listing.clear();
                    progress.listed.clear();
                    progress.written.clear();
                    false
                }
                Event::InitApply(object) if is_trimmed(kind) => {
                    let key = key_of(&object);
                    progress.listed.insert(key.clone());
                    state.set(kind, key, object)
                }
                Event::InitApply(object) => {
                    progress.listing.insert(key_of(&object), object);
                    false
                }
                Event::InitDone => {
                    let was_ready = std::mem::replace(&mut progress.ready, true);
                    let changed = if is_trimmed(kind) {
                        let listed = std::mem::take(&mut progress.listed);
                        state.keep(kind, &listed)
                    } else {
                        let objects = std::mem::take(&mut progress.listing);
                        let written = progress.written.clone();
                        state.replace(kind, objects, |key, _| !written.contains(key))
                    };
                    changed || !was_ready
                }
                Event::Apply(object) => state.set(kind, key_of(&object), object),
                Event::Delete(object) => {
                    if !is_trimmed(kind) {
                        progress.gone.insert(uid(&object));
                    }
                    state.remove(kind, &key_of(&object), |present| number(present) <= number(version(&object)))
                }
            };
            changed || answers_again
        });
    }

    /// Takes in a list that was asked for apart from the watch; `at` is its resourceVersion.
    pub(super) fn listed(&self, kind: Kind, objects: Vec<Value>, at: &str) {
        let objects = objects.into_iter().map(|object| (key_of(&object), object)).collect();
        self.update(|state| state.replace(kind, objects, |_, present| number(present) <= number(at)));
    }

    /// Takes in what one of our writes left.
    pub(super) fn wrote(&self, kind: Kind, object: Value) {
        self.update(|state| {
            let key = key_of(&object);
            state.kinds.entry(kind).or_default().written.insert(key.clone());
            state.set(kind, key, object)
        });
    }

    /// Takes in that an object is gone, by our own deletion or as the answer to a write says.
    pub(super) fn gone(&self, target: &ObjectRef, object: &Value) {
        self.update(|state| {
            state.kinds.entry(target.kind).or_default().gone.insert(uid(object));
            state.remove(target.kind, &target.key, |present| present == version(object))
        });
    }

    /// A renewal of a lease of our own succeeded that was sent at this time.
    pub(super) fn renewed(&self, lease: &Key, sent: Instant) {
        self.state().renewed.insert(lease.clone(), sent);
    }

    /// When the last renewal of a lease that succeeded was sent from here.
    pub(super) fn last_renewal(&self, lease: &Key) -> Option<Instant> {
        self.state().renewed.get(lease).copied()
    }
}

impl CacheState {
    /// Sets an object unless a newer version of it is known; says whether that made a difference.
    fn set(&mut self, kind: Kind, key: Key, mut object: Value) -> bool {
        if self.kinds.get(&kind).is_some_and(|progress| progress.gone.all.contains(uid(&object))) {
            return false;
        }
        // Of objects that we do not write, only the watch tells, and in order.
        let new = number(version(&object));
        let present = self.view.version(kind, &key).map(number);
        if !is_trimmed(kind) && present.is_some_and(|present| present >= new) {
            return false;
        }
        let version = trim(kind, &mut object);
        let target = ObjectRef { kind, key };
        match kind.decode(object) {
            Ok(object) => {
                let mended = self.problems.remove(&target).is_some();
                self.view.set(kind, target.key, Some(Item { version, object })) || mended
            }
            Err(error) => {
                let problem = StoreProblem {
                    file: PathBuf::new(),
                    document: None,
                    object: Some(target.clone()),
                    field: None,
                    message: format!("it is not understood: {error}"),
                    remedy: "install CustomResourceDefinitions and programs of the same version".to_owned(),
                };
                self.problems.insert(target, problem.clone()) != Some(problem)
            }
        }
    }

    /// Removes an object if its version is old enough; says whether that made a difference.
    fn remove(&mut self, kind: Kind, key: &Key, is_old: impl FnOnce(&str) -> bool) -> bool {
        let mended = self.problems.remove(&ObjectRef { kind, key: key.clone() }).is_some();
        let old = self.view.version(kind, key).is_some_and(|present| is_trimmed(kind) || is_old(present));
        (old && self.view.set(kind, key.clone(), None)) || mended
    }

    /// Removes the objects of a trimmed kind that are not in a list; says whether there were any.
    fn keep(&mut self, kind: Kind, listed: &BTreeSet<Key>) -> bool {
        let gone: Vec<Key> = self.view.keys(kind).into_iter().filter(|key| !listed.contains(key)).collect();
        for key in &gone {
            self.remove(kind, key, |_| true);
        }
        !gone.is_empty()
    }

    /// Makes the objects of a kind those of a list, but for what `is_old` says is newer than the list.
    fn replace(&mut self, kind: Kind, objects: BTreeMap<Key, Value>, is_old: impl Fn(&Key, &str) -> bool) -> bool {
        let mut changed = false;
        for key in self.view.keys(kind) {
            if !objects.contains_key(&key) {
                changed |= self.remove(kind, &key, |present| is_old(&key, present));
            }
        }
        for (key, object) in objects {
            changed |= self.set(kind, key, object);
        }
        changed
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
