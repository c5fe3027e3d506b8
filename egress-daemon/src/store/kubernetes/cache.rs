//! What is known of a cluster's objects. Watches update it; our own writes are in it when they return.
//!
//! Invariant: an object never goes back to an older version, and one that is gone does not come back, in whatever order answers
//! and notices arrive. This needs resourceVersions that are ordered numbers, as in Kubernetes.

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
    /// Objects that cannot be understood. Their last good version is in force; where we write the status, with the version and the status of
    /// what is not understood.
    problems: BTreeMap<ObjectRef, StoreProblem>,
    /// When the last successful renewal of each of our own leases was sent.
    renewed: BTreeMap<Key, Instant>,
    /// Whether the API server did not answer the last request.
    unanswered: bool,
}

/// The progress of the watch of a kind.
#[derive(Debug)]
struct Progress {
    /// Whether it has been listed.
    ready: bool,
    /// Whether only a part of its objects is followed.
    part: bool,
    /// Whether all of its objects have been listed.
    whole: bool,
    /// The fields of its status that its definition lacks, which may be another system's; `None` if it has no status at
    /// all.
    lacking: Option<BTreeSet<String>>,
    /// How many answers and notices the API server has sent.
    heard: u64,
    /// What is being listed, for kinds whose objects may have been written here meanwhile.
    listing: BTreeMap<Key, Value>,
    /// What has been listed so far of the other kinds: a whole list of them, as the API server sends it, may not fit
    /// into memory.
    listed: BTreeSet<Key>,
    /// Objects that we wrote since the list began: it may not have them.
    written: BTreeSet<Key>,
    /// Objects that are gone, about which older notices and answers to our writes may still arrive.
    gone: Recent,
}

/// How many removed objects of each kind are remembered: more than can be removed during the few seconds of a write.
const RECENT: usize = 4_096;

/// The last uids of many, each with the version at which its object went. A later one is of an object that is followed again: one goes, too,
/// if it loses the label by which it was selected.
#[derive(Debug, Default)]
struct Recent {
    order: VecDeque<String>,
    all: BTreeMap<String, u64>,
}

impl Recent {
    fn insert(&mut self, uid: &str, version: u64) {
        if !uid.is_empty() && self.all.insert(uid.to_owned(), version).is_none() {
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
            part: false,
            whole: false,
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

    /// Records whether only a part of a kind's objects is followed from now on.
    pub(super) fn follow(&self, kind: Kind, part: bool) {
        self.state().kinds.entry(kind).or_default().part = part;
    }

    /// Whether only a part of a kind's objects is followed.
    pub(super) fn is_part(&self, kind: Kind) -> bool {
        self.state().kinds.get(&kind).is_some_and(|progress| progress.part)
    }

    /// Whether all objects of a kind are known.
    pub(super) fn is_whole(&self, kind: Kind) -> bool {
        self.state().kinds.get(&kind).is_some_and(|progress| progress.whole)
    }

    pub(super) fn problems(&self) -> Vec<StoreProblem> {
        self.state().problems.values().cloned().collect()
    }

    /// Whether the API server answered the last request.
    pub(super) fn is_connected(&self) -> bool {
        !self.state().unanswered
    }

    /// Records whether the API server answers.
    pub(super) fn answers(&self, answers: bool) {
        self.update(|state| std::mem::replace(&mut state.unanswered, !answers) == answers);
    }

    /// Which of the kinds have not been listed yet.
    pub(super) fn missing(&self, kinds: &[Kind]) -> Vec<Kind> {
        let state = self.state();
        kinds.iter().copied().filter(|kind| !state.kinds.get(kind).is_some_and(|progress| progress.ready)).collect()
    }

    /// Records that the cluster does not know a kind (yet): nobody need wait for its objects.
    pub(super) fn absent(&self, kind: Kind) {
        self.update(|state| !std::mem::replace(&mut state.kinds.entry(kind).or_default().ready, true));
    }

    /// Records which fields of a kind's status its definition does not have; `None` stands for the whole status.
    pub(super) fn lacks(&self, kind: Kind, fields: Option<Vec<String>>) {
        let mut state = self.state();
        let lacking = &mut state.kinds.entry(kind).or_default().lacking;
        match (fields, lacking.as_mut()) {
            (None, _) => *lacking = None,
            (Some(fields), Some(known)) => known.extend(fields),
            (Some(_), None) => {}
        }
    }

    /// The part of a status that can be written, as far as is known.
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
                    let before = (progress.ready, progress.whole);
                    (progress.ready, progress.whole) = (true, !progress.part);
                    let followed_more = before != (progress.ready, progress.whole);
                    let changed = if is_trimmed(kind) {
                        let listed = std::mem::take(&mut progress.listed);
                        state.keep(kind, &listed)
                    } else {
                        let objects = std::mem::take(&mut progress.listing);
                        let written = progress.written.clone();
                        state.replace(kind, objects, |key, _| !written.contains(key))
                    };
                    changed || followed_more
                }
                Event::Apply(object) => state.set(kind, key_of(&object), object),
                Event::Delete(object) => {
                    if !is_trimmed(kind) {
                        progress.gone.insert(uid(&object), number(version(&object)));
                    }
                    state.remove(kind, &key_of(&object), |present| number(present) <= number(version(&object)))
                }
            };
            changed || answers_again
        });
    }

    /// Takes in a list that was requested apart from the watch; `at` is its resourceVersion, and `part` whether it lists only a part of the
    /// kind's objects. Returns false if more is followed meanwhile.
    pub(super) fn listed(&self, kind: Kind, objects: Vec<Value>, part: bool, at: &str) -> bool {
        let objects = objects.into_iter().map(|object| (key_of(&object), object)).collect();
        let mut lists_enough = true;
        self.update(|state| {
            lists_enough = part == state.kinds.entry(kind).or_default().part;
            lists_enough && state.replace(kind, objects, |_, present| number(present) <= number(at))
        });
        lists_enough
    }

    /// Takes in the result of one of our writes, or an object that was read because of one.
    pub(super) fn wrote(&self, kind: Kind, object: Value) {
        self.update(|state| {
            let key = key_of(&object);
            state.kinds.entry(kind).or_default().written.insert(key.clone());
            state.set(kind, key, object)
        });
    }

    /// Records that an object is gone, by our own deletion or according to the answer to a write.
    pub(super) fn gone(&self, target: &ObjectRef, object: &Value) {
        self.update(|state| {
            state.kinds.entry(target.kind).or_default().gone.insert(uid(object), u64::MAX);
            state.remove(target.kind, &target.key, |present| present == version(object))
        });
    }

    /// Records that a renewal of one of our own leases, sent at this time, succeeded.
    pub(super) fn renewed(&self, lease: &Key, sent: Instant) {
        self.state().renewed.insert(lease.clone(), sent);
    }

    /// When the last successful renewal of a lease was sent from here.
    pub(super) fn last_renewal(&self, lease: &Key) -> Option<Instant> {
        self.state().renewed.get(lease).copied()
    }
}

impl CacheState {
    /// Sets an object unless a newer version of it is known; returns whether that made a difference.
    fn set(&mut self, kind: Kind, key: Key, mut object: Value) -> bool {
        // Objects that we do not write come only from the watch, and in order.
        let new = number(version(&object));
        let gone = self.kinds.get(&kind).and_then(|progress| progress.gone.all.get(uid(&object)));
        if gone.is_some_and(|at| new <= *at) {
            return false;
        }
        let present = self.view.version(kind, &key).map(number);
        if !is_trimmed(kind) && present.is_some_and(|present| present >= new) {
            return false;
        }
        let version = trim(kind, &mut object);
        let target = ObjectRef { kind, key };
        let status = kind.has_our_status().then(|| object.get("status").cloned().unwrap_or_default());
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
                let told = self.problems.insert(target.clone(), problem.clone()) != Some(problem);
                let item = status.and_then(|status| self.with_status(&target, version, status));
                item.is_some_and(|item| self.view.set(kind, target.key, Some(item))) || told
            }
        }
    }

    /// The present object with the version and the status of a newer one. A write of its status would meet a conflict otherwise, and its
    /// author would not be told what is wrong. A status that is not understood either is to be written anew.
    fn with_status(&self, target: &ObjectRef, version: String, status: Value) -> Option<Item> {
        let mut value = target.kind.encode(&self.view.get(target.kind, &target.key)?)?;
        value["metadata"]["resourceVersion"] = version.clone().into();
        let object = [status, Value::Null].into_iter().find_map(|status| {
            value["status"] = status;
            target.kind.decode(value.clone()).ok()
        });
        Some(Item { version, object: object? })
    }

    /// Removes an object if its version is old enough; returns whether that made a difference.
    fn remove(&mut self, kind: Kind, key: &Key, is_old: impl FnOnce(&str) -> bool) -> bool {
        let mended = self.problems.remove(&ObjectRef { kind, key: key.clone() }).is_some();
        let old = self.view.version(kind, key).is_some_and(|present| is_trimmed(kind) || is_old(present));
        (old && self.view.set(kind, key.clone(), None)) || mended
    }

    /// Removes the objects of a trimmed kind that are not in a list; returns whether there were any.
    fn keep(&mut self, kind: Kind, listed: &BTreeSet<Key>) -> bool {
        let gone: Vec<Key> = self.view.keys(kind).into_iter().filter(|key| !listed.contains(key)).collect();
        for key in &gone {
            self.remove(kind, key, |_| true);
        }
        !gone.is_empty()
    }

    /// Replaces the objects of a kind with those of a list, except those that are newer than the list (`is_old`).
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
