//! What the writer knows: the leases of each node, and what has changed.

use std::collections::{BTreeMap, BTreeSet};

use super::{LeaseEvent, PortLease};
use crate::model::NodeName;

/// The leases as last seen.
#[derive(Clone, Debug, Default)]
pub struct Book {
    nodes: BTreeMap<NodeName, BTreeSet<PortLease>>,
}

impl Book {
    /// Takes all leases of a node, and returns what changed: ends first.
    pub fn take_in(&mut self, node: &NodeName, leases: BTreeSet<PortLease>) -> Vec<LeaseEvent> {
        let before =
            if leases.is_empty() { self.nodes.remove(node) } else { self.nodes.insert(node.clone(), leases.clone()) };
        let before = before.unwrap_or_default();
        let ended = together(before.difference(&leases)).into_iter().map(LeaseEvent::Returned);
        let begun = together(leases.difference(&before)).into_iter().map(LeaseEvent::Granted);
        ended.chain(begun).collect()
    }

    /// Returns the nodes that have leases.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.nodes.keys()
    }

    /// Returns all leases.
    pub fn held(&self) -> impl Iterator<Item = LeaseEvent> {
        self.nodes.values().flat_map(|leases| together(leases.iter())).map(LeaseEvent::Held)
    }
}

/// Returns the leases of one node in order, with adjacent ranges of ports merged.
fn together<'a>(leases: impl Iterator<Item = &'a PortLease>) -> Vec<PortLease> {
    let mut all: Vec<PortLease> = Vec::new();
    for lease in leases {
        match all.last_mut() {
            Some(last)
                if last.egress_ip == lease.egress_ip && last.last_port.checked_add(1) == Some(lease.first_port) =>
            {
                last.last_port = lease.last_port;
            }
            _ => all.push(lease.clone()),
        }
    }
    all
}
