//! The cache of a cluster's objects. Watches update it, and a write of this process is in it when the write returns.
//!
//! Invariant: an object never goes back to an older version, and a removed object does not come back, whatever the order of answers
//! and notices. This requires resourceVersions that are ordered numbers, as in Kubernetes.

use super::trim::{is_trimmed, trim, version};
use crate::store::kind::Erased;
use crate::store::view::{Item, StoreView};
use crate::store::{Key, Kind, ObjectRef, StoreProblem};
use kube::runtime::watcher::Event;
use serde_json::{Value, json};
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
    /// Objects that cannot be decoded. Their last good version is in force, or [`CacheState::replacement`].
    problems: BTreeMap<ObjectRef, StoreProblem>,
    /// The time when the last successful renewal of each lease of this process was sent.
    renewed: BTreeMap<Key, Instant>,
    /// Whether the API server has not answered the last request.
    unanswered: bool,
    /// Whether it has refused to continue the watch of EgressNodes, which have all leases.
    refused: bool,
}

/// The progress of the watch of a kind.
#[derive(Debug)]
struct Progress {
    /// Whether it has been listed.
    ready: bool,
    /// Whether only part of its objects is followed.
    part: bool,
    /// Whether all of its objects have been listed.
    whole: bool,
    /// The fields of its status that its definition, perhaps another system's, lacks; `None` if the definition has no status at all.
    lacking: Option<BTreeSet<String>>,
    /// The number of answers and notices from the API server.
    heard: u64,
    /// The objects of a list that is in progress, for kinds whose objects this process may write meanwhile.
    listing: BTreeMap<Key, Value>,
    /// The keys of a list that is in progress, for the other kinds: a whole list as the API server sends it may not fit into memory.
    listed: BTreeSet<Key>,
    /// Objects that this process has written since the list began, which may lack them.
    written: BTreeSet<Key>,
    /// Removed objects, about which older notices and answers to writes may still arrive.
    gone: Recent,
}

/// The number of removed objects of each kind that are remembered: more than can be removed during the few seconds of a write.
const RECENT: usize = 4_096;

/// The uids of recently removed objects, each with the version in the notice of its removal. A deletion has a version of its own, which no
/// object has. An object that has only lost the label that selected it has this version from then on, and may be followed again.
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

/// Parses a version as a number.
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

    /// Changes the state, and notifies the readers if `change` returns true.
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

    /// Records whether only part of a kind's objects is followed from now on.
    pub(super) fn follow(&self, kind: Kind, part: bool) {
        self.state().kinds.entry(kind).or_default().part = part;
    }

    /// Returns whether only part of a kind's objects is followed.
    pub(super) fn is_part(&self, kind: Kind) -> bool {
        self.state().kinds.get(&kind).is_some_and(|progress| progress.part)
    }

    /// Returns whether all objects of a kind are known.
    pub(super) fn is_whole(&self, kind: Kind) -> bool {
        self.state().kinds.get(&kind).is_some_and(|progress| progress.whole)
    }

    pub(super) fn problems(&self) -> Vec<StoreProblem> {
        self.state().problems.values().cloned().collect()
    }

    /// Returns whether the API server answered the last request, and lets this process follow EgressNodes.
    pub(super) fn is_connected(&self) -> bool {
        let state = self.state();
        !state.unanswered && !state.refused
    }

    /// Records whether the API server refuses the watch of a kind.
    pub(super) fn refuses(&self, kind: Kind, refused: bool) {
        self.update(|state| kind == Kind::EgressNode && std::mem::replace(&mut state.refused, refused) != refused);
    }

    /// Records whether the API server answers.
    pub(super) fn answers(&self, answers: bool) {
        self.update(|state| std::mem::replace(&mut state.unanswered, !answers) == answers);
    }

    /// Returns the kinds that have not been listed yet.
    pub(super) fn missing(&self, kinds: &[Kind]) -> Vec<Kind> {
        let state = self.state();
        kinds.iter().copied().filter(|kind| !state.kinds.get(kind).is_some_and(|progress| progress.ready)).collect()
    }

    /// Records that the cluster does not (yet) know a kind, so that no caller waits for its objects.
    pub(super) fn absent(&self, kind: Kind) {
        self.update(|state| !std::mem::replace(&mut state.kinds.entry(kind).or_default().ready, true));
    }

    /// Records the fields of a kind's status that its definition does not have; `None` means the whole status.
    pub(super) fn lacks(&self, kind: Kind, fields: Option<Vec<String>>) {
        let mut state = self.state();
        let lacking = &mut state.kinds.entry(kind).or_default().lacking;
        match (fields, lacking.as_mut()) {
            (None, _) => *lacking = None,
            (Some(fields), Some(known)) => known.extend(fields),
            (Some(_), None) => {}
        }
    }

    /// Returns the part of a status that can be written, as far as is known.
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
            // The API server has not yet answered a list that begins.
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
                        let forgotten = state.forget_problems(kind, |key| objects.contains_key(key));
                        state.replace(kind, objects, |key, _| !written.contains(key)) || forgotten
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

    /// Takes in a list that was requested apart from the watch. `at` is its resourceVersion, and `part` whether it lists only part of the
    /// kind's objects. Returns false if the followed part has changed meanwhile.
    pub(super) fn listed(&self, kind: Kind, objects: Vec<Value>, part: bool, at: &str) -> bool {
        let objects = objects.into_iter().map(|object| (key_of(&object), object)).collect();
        let mut lists_enough = true;
        self.update(|state| {
            lists_enough = part == state.kinds.entry(kind).or_default().part;
            lists_enough && state.replace(kind, objects, |_, present| number(present) <= number(at))
        });
        lists_enough
    }

    /// Takes in the result of a write of this process, or an object that was read because of a write.
    pub(super) fn wrote(&self, kind: Kind, object: Value) {
        self.update(|state| {
            let key = key_of(&object);
            state.kinds.entry(kind).or_default().written.insert(key.clone());
            state.set(kind, key, object)
        });
    }

    /// Records that an object is gone, because this process deleted it or according to the answer to a write.
    pub(super) fn gone(&self, target: &ObjectRef, object: &Value) {
        self.update(|state| {
            state.kinds.entry(target.kind).or_default().gone.insert(uid(object), u64::MAX);
            state.remove(target.kind, &target.key, |present| present == version(object))
        });
    }

    /// Records that the renewal of a lease of this process, sent at this time, succeeded.
    pub(super) fn renewed(&self, lease: &Key, sent: Instant) {
        self.state().renewed.insert(lease.clone(), sent);
    }

    /// Returns the time when this process sent the last successful renewal of a lease.
    pub(super) fn last_renewal(&self, lease: &Key) -> Option<Instant> {
        self.state().renewed.get(lease).copied()
    }
}

impl CacheState {
    /// Sets an object unless a newer version of it is known. Returns whether anything changed.
    fn set(&mut self, kind: Kind, key: Key, mut object: Value) -> bool {
        // Objects of kinds that Spillway does not write come only from the watch, in order.
        let new = number(version(&object));
        let gone = self.kinds.get(&kind).and_then(|progress| progress.gone.all.get(uid(&object)));
        if gone.is_some_and(|at| new < *at) {
            return false;
        }
        let present = self.view.version(kind, &key).map(number);
        if !is_trimmed(kind) && present.is_some_and(|present| present >= new) {
            return false;
        }
        let version = trim(kind, &mut object);
        let target = ObjectRef { kind, key };
        let whole = kind.has_our_status().then(|| object.clone());
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
                    message: format!("it cannot be decoded: {error}"),
                    remedy: "install CustomResourceDefinitions and programs of the same version".to_owned(),
                };
                let told = self.problems.insert(target.clone(), problem.clone()) != Some(problem);
                let item = whole.and_then(|whole| self.replacement(&target, version, &whole));
                item.is_some_and(|item| self.view.set(kind, target.key, Some(item))) || told
            }
        }
    }

    /// Returns what is in force in place of an object that cannot be decoded: the last good version, or a policy [`without_egress_ips`]. It
    /// has the version and the status of the object: otherwise a write of the status would conflict, and the user would not learn of the
    /// problem. A status that cannot be decoded either is dropped, so that it is written anew.
    fn replacement(&self, target: &ObjectRef, version: String, whole: &Value) -> Option<Item> {
        let present = self.view.get(target.kind, &target.key).and_then(|present| target.kind.encode(&present));
        // A policy without egress IPs is itself a replacement, and covers what the object covered then.
        let good = present.filter(|value| value.pointer("/spec/egressIPPools") != Some(&json!([])));
        let mut value = good.map_or_else(|| without_egress_ips(target.kind, whole), Some)?;
        value["metadata"]["resourceVersion"] = version.clone().into();
        let status = whole.get("status").cloned().unwrap_or_default();
        let object = [status, Value::Null].into_iter().find_map(|status| {
            value["status"] = status;
            target.kind.decode(value.clone()).ok()
        });
        Some(Item { version, object: object? })
    }

    /// Removes an object if its version is old enough. Returns whether anything changed.
    fn remove(&mut self, kind: Kind, key: &Key, is_old: impl FnOnce(&str) -> bool) -> bool {
        let mended = self.problems.remove(&ObjectRef { kind, key: key.clone() }).is_some();
        let old = self.view.version(kind, key).is_some_and(|present| is_trimmed(kind) || is_old(present));
        (old && self.view.set(kind, key.clone(), None)) || mended
    }

    /// Removes the objects of a trimmed kind that are not in a list. Returns whether there were any.
    fn keep(&mut self, kind: Kind, listed: &BTreeSet<Key>) -> bool {
        let gone: Vec<Key> = self.view.keys(kind).into_iter().filter(|key| !listed.contains(key)).collect();
        for key in &gone {
            self.remove(kind, key, |_| true);
        }
        self.forget_problems(kind, |key| listed.contains(key)) || !gone.is_empty()
    }

    /// Forgets the problems of objects that a list of the kind lacks: no notice tells of objects that were deleted while the watch was
    /// interrupted. Returns whether there were any.
    fn forget_problems(&mut self, kind: Kind, is_listed: impl Fn(&Key) -> bool) -> bool {
        let before = self.problems.len();
        self.problems.retain(|target, _| target.kind != kind || is_listed(&target.key));
        self.problems.len() < before
    }

    /// Replaces the objects of a kind with the objects of a list, except objects that are newer than the list (`is_old` is false).
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

/// Returns a policy with only the fields that say which packets it covers; `None` for another kind. A policy without egress IPs is invalid,
/// so these packets are dropped. Without any policy, they would leave with their nodes' addresses.
fn without_egress_ips(kind: Kind, policy: &Value) -> Option<Value> {
    if !matches!(kind, Kind::EgressGatewayPolicy | Kind::EgressPolicy) {
        return None;
    }
    let mut spec = json!({"egressIPPools": []});
    for field in ["selectors", "destinationCIDRs", "excludedCIDRs"] {
        if let Some(covered) = policy.get("spec")?.get(field) {
            spec[field] = covered.clone();
        }
    }
    let metadata = policy.get("metadata");
    Some(json!({"apiVersion": kind.api_version(), "kind": kind.name(), "metadata": metadata, "spec": spec}))
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
