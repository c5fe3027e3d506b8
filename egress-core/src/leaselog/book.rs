//! What the writer knows: the leases of each node, and what changed.

use std::collections::{BTreeMap, BTreeSet};

use super::{Event, Lease};
use crate::model::NodeName;

/// The leases as they were seen last.
#[derive(Clone, Debug, Default)]
pub struct Book {
    nodes: BTreeMap<NodeName, BTreeSet<Lease>>,
}

impl Book {
    /// Takes note of all leases of a node, and says what changed: ends first.
    pub fn take_in(&mut self, node: &NodeName, leases: BTreeSet<Lease>) -> Vec<Event> {
        let before =
            if leases.is_empty() { self.nodes.remove(node) } else { self.nodes.insert(node.clone(), leases.clone()) };
        let before = before.unwrap_or_default();
        let ended = before.difference(&leases).cloned().map(Event::Returned);
        let begun = leases.difference(&before).cloned().map(Event::Granted);
        ended.chain(begun).collect()
    }

    /// The nodes that have leases.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.nodes.keys()
    }

    /// All leases.
    pub fn held(&self) -> impl Iterator<Item = Event> {
        self.nodes.values().flatten().cloned().map(Event::Held)
    }
}
