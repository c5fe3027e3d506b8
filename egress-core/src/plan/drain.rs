//! Addresses that were taken out of their pool while they are in use: the pool is gone, or its ranges are smaller.
//!
//! Such an address drains. Its connections continue through carriers as before, and it gets no new ones: no more ports are taken from its
//! blocks. It is released when the last block has come back, when no policy that had it is left, or when the drain timeout is over. An
//! address that is put back into the pool in time serves again if its policy's count has room for it, and drains on otherwise.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::blocks;
use super::outcome::Problems;
use super::types::{ConditionKind, EgressIpPlan, Plan, Reason, Slot};
use crate::health::Health;
use crate::model::{Node, Policy, PolicyId, PoolId, Snapshot, Source};

/// The addresses that drain, as they were planned before.
pub type Draining<'a> = BTreeMap<IpAddr, &'a EgressIpPlan>;

/// Returns the addresses that drain, provided that no policy requests them by name and none of their policies gets them again.
pub fn draining<'a>(snapshot: &Snapshot, health: &Health, previous: &'a Plan) -> Draining<'a> {
    let mut draining: Draining<'a> = previous.egress_ips.iter().map(|(address, ip)| (*address, ip)).collect();
    draining.retain(|address, ip| drains(snapshot, *address, ip));
    if draining.is_empty() {
        return draining;
    }
    let nodes: Vec<&Node> = snapshot.nodes.values().collect();
    let blocks = draining.keys().filter_map(|address| Some((*address, previous.blocks.get(address)?)));
    let held: BTreeSet<IpAddr> = blocks::held(&nodes, health, blocks);
    draining.retain(|address, _| held.contains(address));
    draining
}

/// Returns whether an address was taken out of its pool, and not out of the policies that have it.
fn drains(snapshot: &Snapshot, address: IpAddr, ip: &EgressIpPlan) -> bool {
    let Some(pool) = &ip.pool else { return false };
    // What was put back drains on, because its policy may have got another address in its place.
    let taken_out = ip.draining
        || match snapshot.pools.get(pool) {
            Some(pool) => !pool.contains(address),
            None => !snapshot.unreadable_pools.contains_key(pool),
        };
    let wanted = |user: &PolicyId| match snapshot.policies.get(user) {
        Some(policy) => ip.draining || asks(policy, pool),
        None => false,
    };
    taken_out && !snapshot.drained.contains(&address) && ip.users.keys().any(wanted)
}

fn asks(policy: &Policy, pool: &PoolId) -> bool {
    match &policy.source {
        Source::Pools(requests) => requests.iter().any(|request| request.pool == *pool),
        Source::Gateways(_) => false,
    }
}

/// Adds which addresses of a policy drain, and what to do about it.
pub fn note(
    snapshot: &Snapshot,
    policy: &Policy,
    slots: &[Slot],
    egress_ips: &BTreeMap<IpAddr, EgressIpPlan>,
    problems: &mut Problems,
) {
    let mut of_pool: BTreeMap<(&PoolId, bool), Vec<String>> = BTreeMap::new();
    for slot in slots.iter().filter(|slot| slot.draining) {
        if let Some(pool) = egress_ips.get(&slot.address).and_then(|ip| ip.pool.as_ref()) {
            let is_back = snapshot.pools.get(pool).is_some_and(|pool| pool.contains(slot.address));
            of_pool.entry((pool, is_back)).or_default().push(slot.address.to_string());
        }
    }
    for ((pool, is_back), addresses) in of_pool {
        let kept = snapshot.pools.contains_key(pool) || snapshot.unreadable_pools.contains_key(pool);
        let seconds = snapshot.drain_timeout.as_secs();
        // The policy may have got other addresses meanwhile, which stay.
        let (why, remedy) = match (kept, is_back) {
            (_, true) => ("taken out of the ranges and put back, beyond what the policy requests of", "raise count"),
            (true, false) => ("no longer in the ranges of", "put it back into ipRanges and raise count"),
            (false, false) => ("of the deleted", "create the pool again"),
        };
        let addresses = addresses.join(", ");
        let message = format!(
            "{addresses} ({why} pool {pool}): no new connections; released when the last one ends, after {seconds} s (drainTimeout) at the \
             latest; {remedy} to keep the addresses that are in use"
        );
        problems.add(&policy.id, ConditionKind::Degraded, Reason::Draining, message);
    }
}
