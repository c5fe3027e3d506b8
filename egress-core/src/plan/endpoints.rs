//! Assigns the endpoints of a `PerEndpoint` policy to its egress IPs.
//!
//! Seats are awarded to the egress IPs in turn, by weight; with equal weights that is round-robin, and no two differ by more than one. An
//! endpoint keeps its egress IP as long as the egress IP has a seat for it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::net::IpAddr;

use super::types::{Assigned, EgressIpPlan, OwnerReason};
use crate::model::{EndpointId, Family, Node, NodeName, Policy, Snapshot, ZoneMode};

/// An egress IP that endpoints can be assigned to, with its weight.
pub type Seat = (IpAddr, u32);

/// Assigns sorted endpoints to `slots` (sorted by address). `previous` returns where an endpoint was.
pub fn assign<'a>(
    slots: &[Seat],
    endpoints: &[&'a EndpointId],
    previous: impl Fn(&EndpointId) -> Option<IpAddr>,
) -> BTreeMap<&'a EndpointId, IpAddr> {
    let place: BTreeMap<IpAddr, usize> = slots.iter().enumerate().map(|(at, (address, _))| (*address, at)).collect();
    let before: Vec<Option<usize>> =
        endpoints.iter().map(|id| previous(id).and_then(|address| place.get(&address).copied())).collect();
    let mut held = vec![0u64; slots.len()];
    before.iter().flatten().for_each(|at| held[*at] += 1);

    let seats = award(slots, &held, endpoints.len());
    let mut left = vec![0u64; slots.len()];
    seats.iter().for_each(|at| left[*at] += 1);
    let quota = left.clone();
    let mut assigned = BTreeMap::new();
    let mut homeless = Vec::new();
    let mut take = |at: usize, id: &'a EndpointId, left: &mut [u64]| {
        left[at] -= 1;
        assigned.insert(id, slots[at].0);
    };
    for (n, (id, before)) in endpoints.iter().zip(before).enumerate() {
        match before {
            Some(at) if left[at] > 0 => take(at, id, &mut left),
            _ => homeless.push((n, *id)),
        }
    }
    // An endpoint takes the seat of its own turn if vacant, so that a first assignment that is written in pieces ends up as one.
    let turns = award(slots, &vec![0; slots.len()], if homeless.is_empty() { 0 } else { endpoints.len() });
    let out_of_turn: Vec<&EndpointId> = homeless
        .into_iter()
        .filter_map(|(n, id)| match turns.get(n) {
            Some(at) if left[*at] > 0 => {
                take(*at, id, &mut left);
                None
            }
            _ => Some(id),
        })
        .collect();
    let mut kept: Vec<u64> = quota.iter().zip(&left).map(|(quota, left)| quota - left).collect();
    let vacant = seats.into_iter().filter(|at| match kept[*at] {
        0 => true,
        _ => {
            kept[*at] -= 1;
            false
        }
    });
    assigned.extend(out_of_turn.into_iter().zip(vacant).map(|(id, at)| (id, slots[at].0)));
    assigned
}

/// Awards `count` seats one by one to the slot that has the fewest for its weight; among equals, to one that still has a previous endpoint
/// to seat, then to the first.
fn award(slots: &[Seat], held: &[u64], count: usize) -> Vec<usize> {
    let order = |at: usize, taken: u64| {
        let share = ((taken + 1) << 32) / u64::from(slots[at].1.max(1));
        Reverse((share, held[at] <= taken, at, taken))
    };
    let mut next: BinaryHeap<_> = (0..slots.len()).map(|at| order(at, 0)).collect();
    let mut seats = Vec::with_capacity(count);
    while seats.len() < count {
        let Some(Reverse((_, _, at, taken))) = next.pop() else { break };
        seats.push(at);
        next.push(order(at, taken + 1));
    }
    seats
}

/// Returns the assignments of one policy to its endpoints, sorted and each with its node. `slots` are its egress IPs.
///
/// Endpoints that may use the same egress IPs (by zone, and by their node if it comes first) are balanced among themselves. An egress IP
/// whose owner is missing or unhealthy is used only if all are.
pub fn of_policy<'a>(
    snapshot: &Snapshot,
    policy: &Policy,
    endpoints: impl Iterator<Item = (&'a EndpointId, &'a NodeName)> + Clone,
    slots: &BTreeMap<IpAddr, &EgressIpPlan>,
    previous: Option<&BTreeMap<EndpointId, Assigned>>,
) -> BTreeMap<EndpointId, Assigned> {
    let mut assignments: BTreeMap<EndpointId, Assigned> = BTreeMap::new();
    for family in Family::ALL {
        let choice = Choice::new(snapshot, policy, family, slots);
        let mut alike: BTreeMap<Vec<Seat>, Vec<&EndpointId>> = BTreeMap::new();
        let mut allowed: BTreeMap<&NodeName, Vec<Seat>> = BTreeMap::new();
        for (id, node) in endpoints.clone() {
            let seats = allowed.entry(node).or_insert_with(|| choice.seats(node));
            match alike.get_mut(seats) {
                Some(ids) => ids.push(id),
                None => {
                    alike.insert(seats.clone(), vec![id]);
                }
            }
        }
        for (seats, ids) in &alike {
            let before = |id: &EndpointId| previous?.get(id)?.get(family);
            for (id, address) in assign(seats, ids, before) {
                assignments.entry(id.clone()).or_default().set(address);
            }
        }
    }
    assignments
}

/// Which egress IPs of one family the pods of a node may use.
struct Choice<'a> {
    snapshot: &'a Snapshot,
    policy: &'a Policy,
    seats: Vec<(Seat, Option<&'a Node>)>,
}

impl<'a> Choice<'a> {
    fn new(
        snapshot: &'a Snapshot,
        policy: &'a Policy,
        family: Family,
        slots: &BTreeMap<IpAddr, &'a EgressIpPlan>,
    ) -> Self {
        let of_family = || slots.iter().filter(|(address, slot)| Family::of(**address) == family && !slot.draining);
        let carried = |slot: &EgressIpPlan| slot.owner.is_some() && slot.reason != OwnerReason::OwnerUnhealthy;
        let any_carried = of_family().any(|(_, slot)| carried(slot));
        let seats = of_family()
            .filter(|(_, slot)| !any_carried || carried(slot))
            .map(|(address, slot)| {
                let weight = slot.users.get(&policy.id).copied().unwrap_or(1);
                ((*address, weight), slot.owner.as_ref().and_then(|owner| snapshot.nodes.get(owner)))
            })
            .collect();
        Self { snapshot, policy, seats }
    }

    fn seats(&self, node: &NodeName) -> Vec<Seat> {
        let owned = |by: &dyn Fn(&Node) -> bool| -> Vec<Seat> {
            self.seats.iter().filter(|(_, owner)| owner.is_some_and(by)).map(|(seat, _)| *seat).collect()
        };
        let zone = self.snapshot.nodes.get(node).and_then(|n| n.zone.as_ref());
        let local = owned(&|owner| owner.name == *node);
        let same_zone = owned(&|owner| zone.is_some() && owner.zone.as_ref() == zone);
        match self.policy.zone {
            _ if self.policy.prefer_local_node && !local.is_empty() => local,
            ZoneMode::Require => same_zone,
            ZoneMode::Prefer if !same_zone.is_empty() => same_zone,
            ZoneMode::Prefer | ZoneMode::Any => self.seats.iter().map(|(seat, _)| *seat).collect(),
        }
    }
}

/// Returns how many endpoints are assigned to each egress IP.
pub fn count(assignments: &BTreeMap<EndpointId, Assigned>) -> BTreeMap<IpAddr, u32> {
    let mut counts = BTreeMap::new();
    for assigned in assignments.values() {
        for address in Family::ALL.into_iter().filter_map(|family| assigned.get(family)) {
            *counts.entry(address).or_default() += 1;
        }
    }
    counts
}

/// Returns the zones with selected pods for which a policy that requires their zone has no egress IP of a family that it steers.
pub fn unserved_zones<'a>(
    snapshot: &Snapshot,
    policy: &Policy,
    sources: impl Iterator<Item = &'a NodeName> + Clone,
    slots: &BTreeMap<IpAddr, &EgressIpPlan>,
) -> BTreeSet<String> {
    let mut zones = BTreeSet::new();
    if policy.zone != ZoneMode::Require {
        return zones;
    }
    for family in Family::ALL.into_iter().filter(|family| policy.serves(*family)) {
        let choice = Choice::new(snapshot, policy, family, slots);
        for node in sources.clone().filter(|node| choice.seats(node).is_empty()) {
            let zone = snapshot.nodes.get(node).and_then(|n| n.zone.clone());
            zones.insert(zone.unwrap_or_else(|| format!("none (node {node} has no zone label)")));
        }
    }
    zones
}
