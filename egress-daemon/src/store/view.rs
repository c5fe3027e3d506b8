//! The cache that the store's readers see.

use crate::store::kind::Erased;
use crate::store::{Key, Kind, ObjectRef, Problem};
use std::collections::BTreeMap;

/// An object and its resourceVersion.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) version: String,
    pub(super) object: Erased,
}

/// All objects and problems.
#[derive(Debug, Default)]
pub(super) struct View {
    kinds: BTreeMap<Kind, BTreeMap<Key, Item>>,
    revisions: BTreeMap<Kind, u64>,
    pub(super) problems: Vec<Problem>,
}

impl View {
    pub(super) fn list(&self, kind: Kind) -> Vec<Erased> {
        self.kinds.get(&kind).into_iter().flat_map(BTreeMap::values).map(|item| item.object.clone()).collect()
    }

    pub(super) fn get(&self, kind: Kind, key: &Key) -> Option<Erased> {
        Some(self.kinds.get(&kind)?.get(key)?.object.clone())
    }

    /// The version of an object.
    pub(super) fn version(&self, kind: Kind, key: &Key) -> Option<&str> {
        Some(&self.kinds.get(&kind)?.get(key)?.version)
    }

    /// The keys of all objects of a kind.
    pub(super) fn keys(&self, kind: Kind) -> Vec<Key> {
        self.kinds.get(&kind).into_iter().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// A number that changes with each change of a kind's objects.
    pub(super) fn revision(&self, kind: Kind) -> u64 {
        self.revisions.get(&kind).copied().unwrap_or(0)
    }

    /// The object that a file of Spillway's stands for: its kind has one object of a name, in whatever namespace.
    pub(super) fn named(&self, target: &ObjectRef) -> Option<(Key, Item)> {
        let mut objects = self.kinds.get(&target.kind).filter(|_| !target.kind.is_users())?.iter();
        objects.find(|(key, _)| key.name == target.key.name).map(|(key, item)| (key.clone(), item.clone()))
    }

    /// Sets or removes one object; says whether that made a difference.
    pub(super) fn set(&mut self, kind: Kind, key: Key, item: Option<Item>) -> bool {
        let objects = self.kinds.entry(kind).or_default();
        let changed = match item {
            Some(item) if objects.get(&key).is_some_and(|old| old.version == item.version) => false,
            Some(item) => {
                objects.insert(key, item);
                true
            }
            None => objects.remove(&key).is_some(),
        };
        *self.revisions.entry(kind).or_default() += u64::from(changed);
        changed
    }

    /// Replaces all objects of a kind, keeping those whose version is the same; says whether that made a difference.
    pub(super) fn set_all(&mut self, kind: Kind, mut items: BTreeMap<Key, Item>) -> bool {
        let objects = self.kinds.entry(kind).or_default();
        let mut same = objects.len() == items.len();
        for (key, item) in &mut items {
            match objects.get(key) {
                Some(old) if old.version == item.version => *item = old.clone(),
                _ => same = false,
            }
        }
        *objects = items;
        *self.revisions.entry(kind).or_default() += u64::from(!same);
        !same
    }
}
