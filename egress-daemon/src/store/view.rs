//! The cache that the store's readers see.

use crate::store::kind::Erased;
use crate::store::{Key, Kind, ObjectRef, StoreProblem};
use std::collections::{BTreeMap, VecDeque};

/// The number of changes of a kind that are remembered.
const REMEMBERED: usize = 4096;

/// An object and its resourceVersion.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) version: String,
    pub(super) object: Erased,
}

/// All objects and problems.
#[derive(Debug, Default)]
pub(super) struct StoreView {
    kinds: BTreeMap<Kind, BTreeMap<Key, Item>>,
    history: BTreeMap<Kind, History>,
    pub(super) problems: Vec<StoreProblem>,
}

/// The last changes of a kind's objects.
#[derive(Debug, Default)]
struct History {
    /// The number of changes.
    revision: u64,
    /// The keys of the last changes, each with the number of its change.
    last: VecDeque<(u64, Key)>,
    /// The number of the last forgotten change.
    forgotten: u64,
}

impl History {
    fn add(&mut self, keys: impl IntoIterator<Item = Key>) {
        self.revision += 1;
        for key in keys {
            self.last.push_back((self.revision, key));
            if self.last.len() > REMEMBERED
                && let Some((revision, _)) = self.last.pop_front()
            {
                self.forgotten = revision;
            }
        }
    }

    /// Returns the keys that changed after a revision; `None` if the revision is too old.
    fn since(&self, revision: u64) -> Option<Vec<Key>> {
        let known = (self.forgotten..=self.revision).contains(&revision);
        let begin = self.last.partition_point(|(at, _)| *at <= revision);
        known.then(|| self.last.range(begin..).map(|(_, key)| key.clone()).collect())
    }
}

impl StoreView {
    pub(super) fn list(&self, kind: Kind) -> Vec<Erased> {
        self.kinds.get(&kind).into_iter().flat_map(BTreeMap::values).map(|item| item.object.clone()).collect()
    }

    pub(super) fn get(&self, kind: Kind, key: &Key) -> Option<Erased> {
        Some(self.kinds.get(&kind)?.get(key)?.object.clone())
    }

    /// Returns the version of an object.
    pub(super) fn version(&self, kind: Kind, key: &Key) -> Option<&str> {
        Some(&self.kinds.get(&kind)?.get(key)?.version)
    }

    /// Returns the keys of all objects of a kind.
    pub(super) fn keys(&self, kind: Kind) -> Vec<Key> {
        self.kinds.get(&kind).into_iter().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// Returns a number that changes with each change of a kind's objects.
    pub(super) fn revision(&self, kind: Kind) -> u64 {
        self.history.get(&kind).map_or(0, |history| history.revision)
    }

    /// Returns the objects of a kind that were added, removed or changed after a revision; `None` if the revision is too old.
    /// An object that changed twice may be listed twice.
    pub(super) fn changed(&self, kind: Kind, since: u64) -> Option<Vec<Key>> {
        self.history.get(&kind).map_or(Some(Vec::new()), |history| history.since(since))
    }

    /// Returns the object of one of Spillway's files. A name is unique within its kind, whatever the namespace.
    pub(super) fn named(&self, target: &ObjectRef) -> Option<(Key, Item)> {
        let mut objects = self.kinds.get(&target.kind).filter(|_| !target.kind.is_users())?.iter();
        objects.find(|(key, _)| key.name == target.key.name).map(|(key, item)| (key.clone(), item.clone()))
    }

    /// Sets or removes one object. Returns whether the view changed.
    pub(super) fn set(&mut self, kind: Kind, key: Key, item: Option<Item>) -> bool {
        let objects = self.kinds.entry(kind).or_default();
        let changed = match item {
            Some(item) if objects.get(&key).is_some_and(|old| old.version == item.version) => false,
            Some(item) => {
                objects.insert(key.clone(), item);
                true
            }
            None => objects.remove(&key).is_some(),
        };
        if changed {
            self.history.entry(kind).or_default().add([key]);
        }
        changed
    }

    /// Replaces all objects of a kind, but keeps objects of the same version. Returns whether the view changed.
    pub(super) fn set_all(&mut self, kind: Kind, mut items: BTreeMap<Key, Item>) -> bool {
        let objects = self.kinds.entry(kind).or_default();
        let mut changed: Vec<Key> = objects.keys().filter(|key| !items.contains_key(key)).cloned().collect();
        for (key, item) in &mut items {
            match objects.get(key) {
                Some(old) if old.version == item.version => *item = old.clone(),
                _ => changed.push(key.clone()),
            }
        }
        *objects = items;
        let differs = !changed.is_empty();
        if differs {
            self.history.entry(kind).or_default().add(changed);
        }
        differs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn item(version: u32) -> Item {
        Item { version: version.to_string(), object: Arc::new(version) }
    }

    fn names(view: &StoreView, since: u64) -> Option<Vec<String>> {
        view.changed(Kind::Pod, since).map(|keys| keys.into_iter().map(|key| key.name).collect())
    }

    #[test]
    fn changes_since_a_revision_are_listed_while_history_lasts() {
        let mut view = StoreView::default();
        assert_eq!(names(&view, 0), Some(vec![]));
        view.set(Kind::Pod, Key::cluster("a"), Some(item(1)));
        view.set(Kind::Pod, Key::cluster("a"), Some(item(1)));
        let before = view.revision(Kind::Pod);
        view.set_all(Kind::Pod, [("b", 1), ("c", 1)].map(|(name, version)| (Key::cluster(name), item(version))).into());
        assert_eq!(names(&view, before).unwrap(), ["a", "b", "c"]);
        assert_eq!(names(&view, 0).unwrap(), ["a", "a", "b", "c"]);
        assert_eq!(names(&view, view.revision(Kind::Pod)), Some(vec![]));
        assert_eq!(names(&view, 100), None, "it is in the future");
        view.set(Kind::Pod, Key::cluster("b"), None);
        let before = view.revision(Kind::Pod);
        for version in 2..2 + REMEMBERED as u32 {
            view.set(Kind::Pod, Key::cluster("c"), Some(item(version)));
        }
        assert_eq!(names(&view, before).unwrap().len(), REMEMBERED);
        view.set(Kind::Pod, Key::cluster("b"), Some(item(1)));
        assert_eq!(names(&view, before), None);
        assert_eq!(names(&view, before + 1).unwrap().last().unwrap(), "b");
        // If a part of a change is forgotten, the whole change is unknown.
        let all = (0..2 * REMEMBERED as u32).map(|n| (Key::cluster(&n.to_string()), item(n)));
        let before = view.revision(Kind::Pod);
        view.set_all(Kind::Pod, all.collect());
        assert_eq!(names(&view, before), None);
        assert_eq!(names(&view, before + 1), Some(vec![]));
    }
}
