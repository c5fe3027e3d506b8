//! The order in which gateways carry each egress IP: its owner, then the gateways that take its place, in turn.
//!
//! The second carrier is the one that would become the owner if the first died, so that the remaining gateways agree with the next plan:
//! the egress IPs of one gateway go to others evenly, and move once. The rest is chosen by rendezvous hashing (Thaler and Ravishankar,
//! "Using name-based mappings to increase hit rates", 1998), so that a gateway that comes or goes changes few orders.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::hash::hash;
use super::maglev;
use super::owners::{Decision, Floating, GatewayNode, Loads};

/// Returns the number by which a node is chosen; see [`weight`].
pub fn node_key(name: &str) -> u64 {
    hash(5, name.as_bytes())
}

/// Returns the carriers of all egress IPs, each owner first. Without an owner, they are those asked to show that they are alive.
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
        for (at, heir) in heirs(items, nodes, &mut loads, decisions, &own) {
            loads.remove(at, heir);
            orders[at].push(heir);
        }
        own.iter().for_each(|at| loads.add(*at, owner));
    }
    for (at, order) in orders.iter_mut().enumerate() {
        let rest = rest(&items[at], at, nodes, &loads, order);
        order.extend(rest);
    }
    orders
}

/// Returns the nodes that get the egress IPs of one owner when it dies, and adds these to `loads`. An egress IP goes to the gateway that it
/// goes back to anyway; else to the previous next one, as long as all end with equally many; else to the one that has the fewest.
///
/// Previous ones come first, for all egress IPs: if each was compared with the smallest load at its turn, one egress IP more anywhere would
/// shift the next carriers of all others by one.
fn heirs(
    items: &[Floating<'_>],
    nodes: &[GatewayNode],
    loads: &mut Loads<'_>,
    decisions: &[Decision],
    own: &[usize],
) -> BTreeMap<usize, u32> {
    let mut heirs = BTreeMap::new();
    let mut give = |loads: &mut Loads<'_>, at: usize, node: u32| {
        loads.add(at, node);
        heirs.insert(at, node);
    };
    let mut rest: Vec<usize> = own.iter().copied().filter(|at| items[*at].count > 1).collect();
    rest.retain(|at| {
        let other = |node: &u32| decisions[*at].owner != Some(*node) && nodes[*node as usize].stands_by();
        let home = decisions[*at].preferred.filter(|node| other(node) && loads.has_room(*at, *node, None));
        home.inspect(|home| give(loads, *at, *home)).is_none()
    });
    let (level, mut above) = level(items, nodes, loads, decisions, &rest);
    for full in [false, true] {
        rest.retain(|at| {
            let item = &items[*at];
            let before = previous(item, *at, nodes, loads, &decisions[*at]);
            let usual = before.filter(|node| !item.first && !item.zoned && nodes[*node as usize].takes());
            let before = usual.filter(|node| match full {
                false => loads.load(*node) < level,
                true => loads.load(*node) == level && above > 0,
            });
            above -= u32::from(full && before.is_some());
            before.inspect(|node| give(loads, *at, *node)).is_none()
        });
    }
    // As in the passes above, egress IPs that never keep their previous next carrier come last: otherwise the next plan would differ.
    rest.sort_by_key(|at| items[*at].first || items[*at].zoned);
    for at in rest {
        if let Some(heir) = heir(&items[at], at, nodes, loads, &decisions[at]) {
            give(loads, at, heir);
        }
    }
    heirs
}

/// Returns how many egress IPs each node has at least when those that are left are spread evenly, and how many nodes have one more.
fn level(
    items: &[Floating<'_>],
    nodes: &[GatewayNode],
    loads: &Loads<'_>,
    decisions: &[Decision],
    left: &[usize],
) -> (u32, u32) {
    let able = |at: usize| {
        let other = move |node: &u32| decisions[at].owner != Some(*node) && nodes[*node as usize].takes();
        items[at].candidates.iter().copied().filter(other)
    };
    let sets: BTreeMap<usize, usize> = left.iter().map(|at| (items[*at].set, *at)).collect();
    // Already sorted if there is one set, which may have every node of a large cluster.
    let mut all: Vec<u32> = sets.into_values().flat_map(able).collect();
    all.sort_unstable();
    all.dedup();
    let loaded: Vec<u32> = all.into_iter().map(|node| loads.load(node)).collect();
    let missing = |level: u32| loaded.iter().map(|load| level.saturating_sub(*load)).sum::<u32>();
    let count = left.len() as u32;
    let Some(mut level) = loaded.iter().copied().min() else { return (0, 0) };
    while missing(level + 1) <= count {
        level += 1;
    }
    (level, count - missing(level))
}

/// Returns the previous next carrier of an egress IP, if it can still be that.
fn previous(
    item: &Floating<'_>,
    at: usize,
    nodes: &[GatewayNode],
    loads: &Loads<'_>,
    decision: &Decision,
) -> Option<u32> {
    let before = item.carriers.iter().copied().find(|node| decision.owner != Some(*node))?;
    let able = item.selects(before) && nodes[before as usize].stands_by() && loads.has_room(at, before, None);
    able.then_some(before)
}

/// Returns the node with the fewest egress IPs, and among equals the previous next carrier.
fn heir(item: &Floating<'_>, at: usize, nodes: &[GatewayNode], loads: &Loads<'_>, decision: &Decision) -> Option<u32> {
    let other = |node: &u32| decision.owner != Some(*node);
    let zone = decision.owner.and_then(|owner| nodes[owner as usize].zone);
    let near = |node: u32| !item.zoned || nodes[node as usize].zone == zone;
    let takes = |node: u32| other(&node) && nodes[node as usize].takes();
    let best = loads
        .best(at, |node| takes(node) && near(node))
        .or_else(|| loads.best(at, takes))
        .or_else(|| loads.best(at, |node| other(&node) && nodes[node as usize].stands_by()))?;
    let before = previous(item, at, nodes, loads, decision).filter(|node| {
        let proven = nodes[*node as usize].takes() == nodes[best as usize].takes();
        proven && near(*node) == near(best)
    });
    Some(before.filter(|node| !item.first && loads.load(*node) <= loads.load(best)).unwrap_or(best))
}

/// Returns the other carriers of an egress IP: if zones matter, those of the owner's zone first, then by weight.
fn rest(item: &Floating<'_>, at: usize, nodes: &[GatewayNode], loads: &Loads<'_>, order: &[u32]) -> Vec<u32> {
    let zone = order.first().and_then(|owner| nodes[*owner as usize].zone);
    let address = hash(6, &maglev::key(item.address));
    let key = |node: u32| {
        let gateway = &nodes[node as usize];
        (item.zoned && gateway.zone != zone, Reverse(weight(gateway.key, address)), node)
    };
    let missing = item.count.saturating_sub(order.len());
    // Sorted, and never longer than the missing count: a pool may select every node of a large cluster.
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

/// Returns the weight of a node for an address: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014).
fn weight(node: u64, address: u64) -> u64 {
    let mut x = node ^ address;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
