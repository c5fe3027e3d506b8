//! Sets of nodes that may own egress IPs, each stored once however many egress IPs it serves.

use std::collections::{BTreeMap, BTreeSet};

use super::index::LabelIndex;
use crate::model::Selector;

/// Sets of nodes, each stored once.
#[derive(Debug, Default)]
pub struct Candidates<'a> {
    sets: Vec<Vec<u32>>,
    by_content: BTreeMap<Vec<u32>, usize>,
    by_selectors: BTreeMap<BTreeSet<&'a Selector>, usize>,
}

impl<'a> Candidates<'a> {
    /// Returns the nodes of a set, ascending.
    pub fn get(&self, set: usize) -> &[u32] {
        &self.sets[set]
    }

    /// Stores a set, which must be ascending, and returns its number.
    pub fn intern(&mut self, nodes: Vec<u32>) -> usize {
        if let Some(set) = self.by_content.get(&nodes) {
            return *set;
        }
        self.sets.push(nodes.clone());
        self.by_content.insert(nodes, self.sets.len() - 1);
        self.sets.len() - 1
    }

    /// Returns the nodes that any of these selectors selects.
    pub fn selected(&mut self, selectors: BTreeSet<&'a Selector>, index: &LabelIndex<'_>) -> usize {
        if let Some(set) = self.by_selectors.get(&selectors) {
            return *set;
        }
        let mut nodes: Vec<u32> = selectors.iter().flat_map(|selector| index.matching(selector)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let set = self.intern(nodes);
        self.by_selectors.insert(selectors, set);
        set
    }

    /// Returns the nodes that are in both sets.
    pub fn intersection(&mut self, a: usize, b: usize) -> usize {
        if a == b {
            return a;
        }
        let other: BTreeSet<u32> = self.sets[b].iter().copied().collect();
        let both = self.sets[a].iter().copied().filter(|node| other.contains(node)).collect();
        self.intern(both)
    }
}
