//! The number of egress IPs of each gateway while owners are chosen, and the best gateway for one more.
//!
//! An egress IP that waits for its gateway to be back for the delay counts there already, except against limits. Otherwise egress IPs with
//! another delay would be moved to fill its place, and back when it returns.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::floating::{Floating, GatewayNode};
use crate::model::Family;

/// The egress IPs that each gateway has so far.
#[derive(Debug)]
pub struct Loads<'a> {
    items: &'a [Floating<'a>],
    nodes: &'a [GatewayNode],
    /// The gateway that each egress IP goes back to ([`Floating::returns_to`]).
    returns: Vec<Option<u32>>,
    load: Vec<u32>,
    of_pool: BTreeMap<u32, BTreeMap<u32, u32>>,
    /// Flows of one family see only the egress IPs of that family, so each family is spread separately.
    of_policy: BTreeMap<(u32, Family), BTreeMap<u32, u32>>,
    on_node: Vec<BTreeSet<usize>>,
}

impl<'a> Loads<'a> {
    /// Creates loads in which no gateway has anything.
    pub fn new(items: &'a [Floating<'a>], nodes: &'a [GatewayNode]) -> Self {
        Self {
            items,
            nodes,
            returns: items.iter().map(|item| item.returns_to(nodes)).collect(),
            load: vec![0; nodes.len()],
            of_pool: BTreeMap::new(),
            of_policy: BTreeMap::new(),
            on_node: vec![BTreeSet::new(); nodes.len()],
        }
    }

    /// Returns how many egress IPs a node has when all have gone back.
    pub fn load(&self, node: u32) -> u32 {
        self.load[node as usize]
    }

    /// Returns whether the egress IP will go back to a gateway, wherever it is until then.
    pub fn returns(&self, item: usize) -> bool {
        self.returns[item].is_some()
    }

    /// Returns the egress IPs that a node has.
    pub fn on(&self, node: u32) -> &BTreeSet<usize> {
        &self.on_node[node as usize]
    }

    /// Gives an egress IP to a node.
    pub fn add(&mut self, item: usize, node: u32) {
        self.on_node[node as usize].insert(item);
        let home = self.returns[item].unwrap_or(node);
        self.load[home as usize] += 1;
        if let Some((pool, _)) = self.items[item].pool {
            *self.of_pool.entry(pool).or_default().entry(node).or_default() += 1;
        }
        for policy in self.items[item].uses() {
            *self.of_policy.entry(policy).or_default().entry(home).or_default() += 1;
        }
    }

    /// Takes an egress IP from a node.
    pub fn remove(&mut self, item: usize, node: u32) {
        self.on_node[node as usize].remove(&item);
        let home = self.returns[item].unwrap_or(node);
        self.load[home as usize] -= 1;
        if let Some((pool, _)) = self.items[item].pool {
            decrease(self.of_pool.entry(pool).or_default(), node);
        }
        for policy in self.items[item].uses() {
            decrease(self.of_policy.entry(policy).or_default(), home);
        }
    }

    /// Returns whether a node may have one more egress IP if `leaving` goes elsewhere at the same time.
    pub fn has_room(&self, item: usize, node: u32, leaving: Option<usize>) -> bool {
        let pool = |item: usize| self.items[item].pool;
        let gateway = &self.nodes[node as usize];
        if leaving.is_none() && gateway.limit.is_some_and(|limit| self.on(node).len() >= limit as usize) {
            return false;
        }
        match pool(item) {
            Some((number, Some(limit))) if !gateway.own_limit => {
                let left = leaving.is_some_and(|leaving| pool(leaving).is_some_and(|(of, _)| of == number));
                let has = self.of_pool.get(&number).and_then(|of| of.get(&node)).copied().unwrap_or(0);
                has - u32::from(left) < limit
            }
            _ => true,
        }
    }

    /// Returns how many egress IPs of the same policies and family a node has.
    pub fn alike(&self, item: usize, node: u32) -> u32 {
        let of = |policy| self.of_policy.get(&policy).and_then(|of: &BTreeMap<u32, u32>| of.get(&node)).copied();
        self.items[item].uses().filter_map(of).sum()
    }

    /// Returns the best `able` candidate with room: the one with the least load, then with the fewest of the same policies and family, then
    /// (if zones matter) in the zone with the fewest of these, then next in the ring; or the very first, if the egress IP wants that.
    pub fn best(&self, item: usize, able: impl Fn(u32) -> bool) -> Option<u32> {
        let able = |node: &u32| able(*node) && self.has_room(item, *node, None);
        let candidates = self.items[item].candidates;
        if self.items[item].first {
            return candidates.iter().copied().find(able);
        }
        let fewest = candidates.iter().filter(|node| able(node)).map(|node| self.load(*node)).min()?;
        let taste = Taste::new(self, item);
        let start = (self.items[item].start % candidates.len() as u64) as usize;
        (start..candidates.len())
            .chain(0..start)
            .map(|at| candidates[at])
            .filter(|node| self.load(*node) == fewest && able(node))
            .min_by_key(|node| taste.of(*node))
    }

    /// Returns how an egress IP ranks nodes with equal loads.
    pub fn taste(&self, item: usize) -> Taste<'_> {
        Taste::new(self, item)
    }

    /// Returns the cost of taking an egress IP from a node; the egress IP with the least cost is taken first.
    pub fn attachment(&self, item: usize, node: u32, placed: bool) -> impl Ord + use<> {
        let away = self.items[item].preferred != Some(node);
        (!placed, !away, Reverse(self.alike(item, node)), Reverse(item))
    }
}

fn decrease(counts: &mut BTreeMap<u32, u32>, node: u32) {
    if let Some(count) = counts.get_mut(&node) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&node);
        }
    }
}

/// How one egress IP ranks nodes with equal loads.
#[derive(Debug)]
pub struct Taste<'a> {
    nodes: &'a [GatewayNode],
    alike: BTreeMap<u32, u32>,
    in_zone: Option<BTreeMap<Option<u32>, u32>>,
}

impl<'a> Taste<'a> {
    fn new(loads: &Loads<'a>, item: usize) -> Self {
        let mut alike: BTreeMap<u32, u32> = BTreeMap::new();
        for (node, count) in loads.items[item].uses().filter_map(|p| loads.of_policy.get(&p)).flatten() {
            *alike.entry(*node).or_default() += count;
        }
        let in_zone = loads.items[item].zoned.then(|| {
            let mut zones: BTreeMap<Option<u32>, u32> = BTreeMap::new();
            for (node, count) in &alike {
                *zones.entry(loads.nodes[*node as usize].zone).or_default() += count;
            }
            zones
        });
        Self { nodes: loads.nodes, alike, in_zone }
    }

    /// Returns the rank of a node; less is better.
    pub fn of(&self, node: u32) -> (u32, u32) {
        let count = |counts: &BTreeMap<Option<u32>, u32>| counts.get(&self.nodes[node as usize].zone).copied();
        let zone = self.in_zone.as_ref().and_then(count).unwrap_or(0);
        (self.alike.get(&node).copied().unwrap_or(0), zone)
    }
}
