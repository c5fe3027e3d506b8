//! The order in which gateways carry each egress IP: its owner, then those that take its place, one after the other.
//!
//! The second is the one that would become the owner if the first died, so that the remaining gateways agree with the next plan: the
//! egress IPs of one gateway go to others evenly, and move once. The rest is chosen by rendezvous hashing (Thaler and Ravishankar,
//! "Using name-based mappings to increase hit rates", 1998), so that a gateway that comes or goes changes few orders.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::hash::hash;
use super::maglev;
use super::owners::{Decision, Floating, GatewayNode, Loads};

/// The number by which a node is chosen; see [`weight`].
pub fn node_key(name: &str) -> u64 {
    hash(5, name.as_bytes())
}

/// The carriers of all egress IPs, each owner first. One without an owner has those that are asked to show that they are alive.
pub fn orders(items: &[Floating<'_>], nodes: &[GatewayNode], decisions: &[Decision]) -> Vec<Vec<u32>> {
    let mut loads = Loads::new(items, nodes);
    let mut owned: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    let mut orders: Vec<Vec<u32>> = vec![Vec::new(); items.len()];
    for (at, decision) in decisions.iter().enumerate() {
        if let Some(owner) = decision.owner {
            loads.add(at, owner);
            owned.entry(owner).or_default().push(at);
            orders[at].push(owner);
        }
    }
    for (owner, own) in owned {
        own.iter().for_each(|at| loads.remove(*at, owner));
        for at in &own {
            if items[*at].count > 1
                && let Some(heir) = heir(&items[*at], *at, nodes, &loads, &decisions[*at])
            {
                loads.add(*at, heir);
                orders[*at].push(heir);
            }
        }
        for at in &own {
            if let Some(heir) = orders[*at].get(1) {
                loads.remove(*at, *heir);
            }
        }
        own.iter().for_each(|at| loads.add(*at, owner));
    }
    for (at, order) in orders.iter_mut().enumerate() {
        let rest = rest(&items[at], at, nodes, &loads, order);
        order.extend(rest);
    }
    orders
}

/// By how many egress IPs a previous next carrier may exceed the one that has the fewest. Without it, one egress IP more would make the next
/// carriers of all others move by one.
const SLACK: u32 = 1;

/// The node that gets an egress IP when its owner dies: the gateway that it goes back to anyway; else the previous next one, as long as
/// no other has many fewer ([`SLACK`]); else the one that has the fewest.
fn heir(item: &Floating<'_>, at: usize, nodes: &[GatewayNode], loads: &Loads<'_>, decision: &Decision) -> Option<u32> {
    let other = |node: &u32| decision.owner != Some(*node);
    let home = decision.preferred.filter(|node| other(node) && nodes[*node as usize].stands_by());
    if home.is_some_and(|node| loads.has_room(at, node, None)) {
        return home;
    }
    let zone = decision.owner.and_then(|owner| nodes[owner as usize].zone);
    let near = |node: u32| !item.zoned || nodes[node as usize].zone == zone;
    let takes = |node: u32| other(&node) && nodes[node as usize].takes();
    let best = loads
        .best(at, |node| takes(node) && near(node))
        .or_else(|| loads.best(at, takes))
        .or_else(|| loads.best(at, |node| other(&node) && nodes[node as usize].stands_by()))?;
    let before = item.carriers.iter().copied().find(other).filter(|node| {
        let proven = nodes[*node as usize].takes() == nodes[best as usize].takes();
        let same = proven && near(*node) == near(best);
        item.selects(*node) && nodes[*node as usize].stands_by() && same && loads.has_room(at, *node, None)
    });
    Some(before.filter(|node| !item.first && loads.total(*node) <= loads.total(best) + SLACK).unwrap_or(best))
}

/// The other carriers of an egress IP: where zones matter those of the owner's zone first, then by weight.
fn rest(item: &Floating<'_>, at: usize, nodes: &[GatewayNode], loads: &Loads<'_>, order: &[u32]) -> Vec<u32> {
    let zone = order.first().and_then(|owner| nodes[*owner as usize].zone);
    let address = hash(6, &maglev::key(item.address));
    let key = |node: u32| {
        let gateway = &nodes[node as usize];
        (item.zoned && gateway.zone != zone, Reverse(weight(gateway.key, address)), node)
    };
    let missing = item.count.saturating_sub(order.len());
    // Sorted, and never longer than what is missing: a pool may select every node of a large cluster.
    let mut chosen: Vec<u32> = Vec::new();
    let able = |node: &u32| nodes[*node as usize].stands_by() && !order.contains(node);
    for node in item.candidates.iter().copied().filter(able) {
        let full = chosen.len() == missing;
        if full && chosen.last().is_none_or(|last| key(*last) < key(node)) || !loads.has_room(at, node, None) {
            continue;
        }
        let place = chosen.partition_point(|other| key(*other) < key(node));
        chosen.insert(place, node);
        chosen.truncate(missing);
    }
    chosen
}

/// The weight of a node for an address: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014).
fn weight(node: u64, address: u64) -> u64 {
    let mut x = node ^ address;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
