//! Moves egress IPs between gateways until no gateway has two more than another that could take one of its egress IPs.
//!
//! A move may take several steps: one gateway gives to a second, which gives another egress IP to a third. Each round follows the shortest
//! such path, so few egress IPs are moved, and it ends because each round makes the loads more equal.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::floating::{Floating, GatewayNode, Placement};
use super::loads::Loads;

/// Egress IPs that can go to the same gateways.
type Kind = (usize, Option<u32>, Option<Duration>);

/// The cost of a last step: the load of the gateway, how many more of the same policies and family it has than the one that gives the
/// egress IP, how its zone is served, and its place in the ring.
type Score = (u32, (i64, u32), u64);

/// One step of a path: an egress IP goes from one node to another.
#[derive(Clone, Copy, Debug)]
struct Step {
    item: usize,
    from: u32,
    to: u32,
}

/// Balances the loads. Returns whether it moved anything.
pub fn balance(items: &[Floating<'_>], nodes: &[GatewayNode], places: &mut [Placement], loads: &mut Loads<'_>) -> bool {
    let mut able = vec![false; nodes.len()];
    let sets: BTreeMap<usize, &[u32]> = items.iter().map(|item| (item.set, item.candidates)).collect();
    for node in sets.into_values().flatten() {
        able[*node as usize] = nodes[*node as usize].keeps();
    }
    let able: Vec<u32> = (0..nodes.len() as u32).filter(|node| able[*node as usize]).collect();
    let mut moved = false;
    loop {
        let mut again = false;
        let mut stuck = BTreeSet::new();
        while let Some(from) = heaviest(&able, nodes, loads, &stuck) {
            let Some(way) = (Search { items, nodes, places, loads }).way(from) else {
                stuck.insert(from);
                continue;
            };
            for step in way {
                loads.remove(step.item, step.from);
                loads.add(step.item, step.to);
                places[step.item].node = Some(step.to);
            }
            again = true;
        }
        if !again {
            return moved;
        }
        moved = true;
    }
}

/// Returns the gateway with the most egress IPs that is not `stuck`, if another that may be given one has at least two fewer.
fn heaviest(able: &[u32], nodes: &[GatewayNode], loads: &Loads<'_>, stuck: &BTreeSet<u32>) -> Option<u32> {
    let takers = able.iter().filter(|node| nodes[**node as usize].takes());
    let fewest = takers.map(|node| loads.load(*node)).min()?;
    let heavy = able.iter().copied().filter(|node| loads.load(*node) >= fewest + 2 && !stuck.contains(node));
    heavy.min_by_key(|node| (Reverse(loads.load(*node)), *node))
}

struct Search<'s, 'a> {
    items: &'s [Floating<'a>],
    nodes: &'s [GatewayNode],
    places: &'s [Placement],
    loads: &'s Loads<'a>,
}

impl Search<'_, '_> {
    /// Returns the steps of a shortest path from a gateway to one that has at least two fewer, the last step first.
    fn way(&self, from: u32) -> Option<Vec<Step>> {
        let mut reached: BTreeMap<u32, Step> = BTreeMap::new();
        let mut scanned: BTreeSet<Kind> = BTreeSet::new();
        let mut level = vec![from];
        while !level.is_empty() {
            let mut next = Vec::new();
            let mut best: Option<(Score, Step)> = None;
            for node in level {
                for (kind, item) in self.offers(node, reached.get(&node)) {
                    if !scanned.insert(kind) {
                        continue;
                    }
                    let taste = self.loads.taste(item);
                    for (at, to) in self.items[item].candidates.iter().copied().enumerate() {
                        if to == from || to == node || !self.may_go(item, to) {
                            continue;
                        }
                        let step = Step { item, from: node, to };
                        // Several steps may lead to the same last gateway: the best one is taken.
                        if self.loads.load(to) + 2 <= self.loads.load(from) && self.loads.has_room(item, to, None) {
                            let (alike, zone) = taste.of(to);
                            let more = i64::from(alike) - i64::from(self.loads.alike(item, node));
                            let score = (self.loads.load(to), (more, zone), self.distance(item, at));
                            if best.as_ref().is_none_or(|(least, _)| score < *least) {
                                best = Some((score, step));
                            }
                        }
                        if let Entry::Vacant(unreached) = reached.entry(to) {
                            unreached.insert(step);
                            next.push(to);
                        }
                    }
                }
            }
            if let Some((_, last)) = best {
                let mut way = vec![last];
                let mut at = last.from;
                while let Some(step) = reached.get(&at) {
                    way.push(*step);
                    at = step.from;
                }
                return Some(way);
            }
            level = next;
        }
        None
    }

    /// Returns what a node could give away: one egress IP of each kind whose departure makes room for the arriving one.
    fn offers(&self, node: u32, arriving: Option<&Step>) -> BTreeMap<Kind, usize> {
        let mut offers: BTreeMap<Kind, usize> = BTreeMap::new();
        let movable = |item: &usize| !self.items[*item].first && !self.loads.returns(*item);
        for item in self.loads.on(node).iter().copied().filter(movable) {
            let floating = &self.items[item];
            let fits = arriving.is_none_or(|step| self.loads.has_room(step.item, node, Some(item)));
            if !fits || !self.places[item].placed && floating.delay().is_none() {
                continue;
            }
            let delay = floating.delay().filter(|_| !self.places[item].placed);
            let kind = (floating.set, floating.pool.map(|(number, _)| number), delay);
            let attachment = |item: usize| self.loads.attachment(item, node, self.places[item].placed);
            let kept = *offers.entry(kind).or_insert(item);
            if attachment(item) < attachment(kept) {
                offers.insert(kind, item);
            }
        }
        offers
    }

    fn may_go(&self, item: usize, to: u32) -> bool {
        let node = &self.nodes[to as usize];
        let settled = self.places[item].placed || self.items[item].delay().is_some_and(|d| node.health.settled(d));
        node.takes() && settled
    }

    fn distance(&self, item: usize, at: usize) -> u64 {
        let around = self.items[item].candidates.len() as u64;
        (at as u64 + around - self.items[item].start % around) % around
    }
}
