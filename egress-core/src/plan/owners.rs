//! Chooses the owner of each floating egress IP.
//!
//! A gateway keeps the egress IPs that it has, and gets its own back when it returns. An egress IP whose owner is dead goes to its next
//! carrier, which has already taken it, or else to the gateway with the fewest. Only then, if gateways still differ by more than one, as
//! few as possible are moved (see [`balance`]).

mod balance;
mod floating;
mod loads;

use balance::balance;
use floating::Placement;
pub use floating::{Floating, GatewayNode};
pub use loads::Loads;

use super::hash::hash;
use super::types::OwnerReason;

/// Returns where the search of the n-th egress IP of a policy begins: those of different policies begin at different nodes.
pub fn ring_start(policy: &str, n: usize) -> u64 {
    (hash(4, policy.as_bytes()) >> 32) + n as u64
}

/// The decision about one egress IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Its owner.
    pub owner: Option<u32>,
    /// The gateway that it goes back to.
    pub preferred: Option<u32>,
    /// The reason.
    pub reason: OwnerReason,
}

/// Decides the owners of all egress IPs (sorted by address).
pub fn decide(items: &[Floating<'_>], nodes: &[GatewayNode]) -> Vec<Decision> {
    let mut places = vec![Placement::default(); items.len()];
    let mut loads = Loads::new(items, nodes);
    keep(items, nodes, &mut places, &mut loads);
    loop {
        place_homeless(items, nodes, &mut places, &mut loads);
        let moved = balance(items, nodes, &mut places, &mut loads);
        if !moved || places.iter().all(|place| place.node.is_some()) {
            break;
        }
    }
    items.iter().zip(&places).map(|(item, place)| conclude(item, nodes, place.node)).collect()
}

/// Leaves each egress IP where it is, or returns it to its preferred gateway. Egress IPs that stay where they belong come first, so that a
/// lowered limit takes away the others.
fn keep(items: &[Floating<'_>], nodes: &[GatewayNode], places: &mut [Placement], loads: &mut Loads<'_>) {
    let choices: Vec<[Option<u32>; 2]> = items
        .iter()
        .map(|item| {
            let stay = item.owner.filter(|owner| nodes[*owner as usize].keeps() && item.selects(*owner));
            let able = item.preferred.filter(|node| nodes[*node as usize].takes() && item.selects(*node));
            let back = able.filter(|node| match item.delay() {
                Some(delay) => stay.is_none() || nodes[*node as usize].health.fresh_for(delay),
                None => stay.is_none(),
            });
            [back.or(stay), stay]
        })
        .collect();
    let rounds: [fn(&Floating, Option<u32>) -> bool; 3] = [
        |item, choice| choice == item.owner && item.owner == item.preferred,
        |item, choice| choice == item.owner && item.owner != item.preferred,
        |item, choice| choice != item.owner,
    ];
    for round in rounds {
        for at in 0..items.len() {
            if places[at].node.is_some() || !round(&items[at], choices[at][0]) {
                continue;
            }
            let node = choices[at].into_iter().flatten().find(|node| loads.has_room(at, *node, None));
            if let Some(node) = node {
                places[at] = Placement { node: Some(node), placed: choices[at][1].is_none() };
                loads.add(at, node);
            }
        }
    }
}

/// Gives every egress IP without an eligible owner to a gateway, as far as possible.
fn place_homeless(items: &[Floating<'_>], nodes: &[GatewayNode], places: &mut [Placement], loads: &mut Loads<'_>) {
    let takes = |node: u32| nodes[node as usize].takes();
    for (at, place) in places.iter_mut().enumerate().filter(|(_, place)| place.node.is_none()) {
        let item = &items[at];
        let able = |node: &u32| takes(*node) && item.selects(*node) && loads.has_room(at, *node, None);
        let next = item.carriers.iter().copied().filter(|_| !item.first).find(able);
        if let Some(node) = next.or_else(|| loads.best(at, takes)) {
            *place = Placement { node: Some(node), placed: true };
            loads.add(at, node);
        }
    }
}

/// Returns the owner, preferred gateway and reason of an egress IP, given the eligible gateway that has it, if any.
fn conclude(item: &Floating<'_>, nodes: &[GatewayNode], place: Option<u32>) -> Decision {
    let preferred = item.preferred.filter(|node| item.selects(*node));
    let Some(owner) = place else {
        let reason = match item.candidates {
            [] => OwnerReason::NoGatewaySelected,
            candidates if candidates.iter().any(|node| nodes[*node as usize].takes()) => OwnerReason::AtCapacity,
            _ => OwnerReason::NoGatewayReady,
        };
        // A healthy owner that did not keep it has more than its limit.
        let unwell = |owner: &u32| item.selects(*owner) && !nodes[*owner as usize].keeps();
        let kept = item.owner.filter(|owner| unwell(owner) && reason == OwnerReason::NoGatewayReady);
        let reason = kept.map_or(reason, |_| OwnerReason::OwnerUnhealthy);
        return Decision { owner: kept, preferred: preferred.or(kept), reason };
    };
    let dead = |node: &u32| item.delay().is_some() && !nodes[*node as usize].keeps();
    let waits = |node: &u32| dead(node) || item.returns_to(nodes) == Some(*node);
    let preferred = preferred.filter(|node| *node == owner || waits(node)).unwrap_or(owner);
    let reason = if preferred == owner { OwnerReason::Preferred } else { OwnerReason::Failover };
    Decision { owner: Some(owner), preferred: Some(preferred), reason }
}
