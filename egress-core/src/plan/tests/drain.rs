//! Tests of addresses that are taken out of their pool while they are in use.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use crate::health::Health;
use crate::model::*;
use crate::plan::{BlockState, Changes, ConditionKind, OwnerReason, Plan, Reason, plan, plan_and_remember};
use crate::testing::world::*;

const FIRST: fn() -> IpAddr = || v4(0, 0, 1);
const SECOND: fn() -> IpAddr = || v4(0, 0, 2);

/// Returns a cluster with a policy with two addresses from a pool, of both of which its pods' node has blocks.
fn in_use(distribution: Distribution) -> (Snapshot, Health, Plan) {
    let (mut snapshot, health) = cluster(2, 1);
    snapshot.drain_timeout = Duration::from_secs(3600);
    let source = Source::Pools(vec![request("public", 2)]);
    add_policy(&mut snapshot, Policy { distribution, ..policy("web", source) });
    let before = plan(&snapshot, &health, &Plan::default());
    assert_eq!(before.egress_ips.keys().copied().collect::<Vec<_>>(), [FIRST(), SECOND()]);
    (snapshot, health, before)
}

fn pool_of(snapshot: &mut Snapshot) -> &mut Pool {
    snapshot.pools.get_mut(&PoolId::new(PoolKind::Native, "public")).unwrap()
}

fn shrink(snapshot: &mut Snapshot) {
    pool_of(snapshot).ranges = vec![IpRange::new(SECOND(), v4(0, 0, 9)).unwrap()];
}

fn condition(plan: &Plan, kind: ConditionKind) -> (bool, Reason, &str) {
    let condition = &plan.outcomes[&"web".parse().unwrap()].conditions[&kind];
    (condition.holds, condition.reason, &condition.message)
}

/// Lets the node of the pods give back all blocks of an address.
fn give_back(snapshot: &mut Snapshot, plan: &Plan, address: IpAddr) -> NodeReport {
    let released: BTreeSet<u16> = plan.blocks[&address].keys().copied().collect();
    let report = snapshot.nodes.get_mut(&"w0".into()).unwrap().report.as_mut().unwrap();
    report.own_lease_revision = plan.lease_revision;
    report.demand.insert(address, Demand { want: 0, released });
    report.clone()
}

#[test]
fn pool_gone_an_address_outside_the_new_ranges_keeps_its_connections_and_gets_no_new_ones() {
    for distribution in [Distribution::PerFlow, Distribution::PerEndpoint] {
        let (mut snapshot, health, before) = in_use(distribution);
        shrink(&mut snapshot);
        let after = plan(&snapshot, &health, &before);
        let (ip, old) = (&after.egress_ips[&FIRST()], &before.egress_ips[&FIRST()]);
        assert!(ip.draining);
        assert_eq!((&ip.owner, &ip.carriers, &ip.users), (&old.owner, &old.carriers, &old.users));
        assert!(after.blocks[&FIRST()].values().all(|lease| lease.state == BlockState::Quarantined));
        assert!(!after.egress_ips[&v4(0, 0, 3)].draining, "the policy gets another one instead");
        let assigned = after.assignments.values().flat_map(|of| of.values());
        assert!(assigned.clone().all(|assigned| assigned.v4.map(IpAddr::V4) != Some(FIRST())));
        assert_eq!(
            condition(&after, ConditionKind::Ready),
            (
                true,
                Reason::AsExpected,
                match distribution {
                    Distribution::PerFlow => "flows are spread over its egress IPs",
                    Distribution::PerEndpoint => "each pod is assigned one of its egress IPs",
                }
            )
        );
        let (holds, reason, message) = condition(&after, ConditionKind::Degraded);
        assert_eq!((holds, reason), (true, Reason::Draining));
        assert_eq!(
            message,
            "10.0.0.1 (no longer in the ranges of pool public): no new connections; released when the last one ends, after \
             3600 s (drainTimeout) at the latest; put it back into ipRanges and raise count to keep the addresses that are in use"
        );
        assert_eq!(plan(&snapshot, &health, &after), after, "planning again changes nothing");
    }
}

#[test]
fn a_drained_address_is_released_with_its_last_block() {
    let (mut snapshot, health, before) = in_use(Distribution::PerFlow);
    shrink(&mut snapshot);
    let (mut draining, memo) = plan_and_remember(snapshot.clone(), &health, &before);
    let report = give_back(&mut snapshot, &draining, FIRST());
    let reports = [("w0".into(), report)].into();
    assert!(memo.change(&health, &mut draining, Changes { reports, ..Changes::default() }).is_none(), "a full plan");
    let after = plan(&snapshot, &health, &draining);
    assert!(!after.egress_ips.contains_key(&FIRST()) && !after.blocks.contains_key(&FIRST()));
    assert_eq!(condition(&after, ConditionKind::Degraded).1, Reason::AsExpected);
}

#[test]
fn pool_gone_the_addresses_of_a_deleted_pool_drain_where_they_are() {
    let (mut snapshot, health, _) = in_use(Distribution::PerFlow);
    pool_of(&mut snapshot).announce = Announce::Route;
    pool_of(&mut snapshot).carriers = MAX_CARRIERS;
    let before = plan(&snapshot, &health, &Plan::default());
    snapshot.pools.clear();
    let after = plan(&snapshot, &health, &before);
    for address in [FIRST(), SECOND()] {
        let (ip, old) = (&after.egress_ips[&address], &before.egress_ips[&address]);
        assert!(ip.draining);
        assert_eq!((&ip.owner, &ip.attachment), (&old.owner, &old.attachment));
        assert_eq!(ip.attachment.announce, Announce::Route);
        let sorted = |carriers: &[NodeName]| carriers.iter().cloned().collect::<BTreeSet<_>>();
        assert_eq!(sorted(&ip.carriers), sorted(&old.carriers));
    }
    assert_eq!(condition(&after, ConditionKind::Ready).1, Reason::NoAddress, "new connections have none");
    let (_, reason, message) = condition(&after, ConditionKind::Degraded);
    assert_eq!(reason, Reason::PoolNotFound);
    assert!(message.contains("10.0.0.1, 10.0.0.2 (of the deleted pool public): no new connections"), "{message}");
    assert_eq!(plan(&snapshot, &health, &after), after, "planning again changes nothing");
}

/// Makes the pools and their nodeSelectors unreadable, as after an upgrade that understands them differently.
fn garble(snapshot: &mut Snapshot) {
    snapshot.unreadable_pools = std::mem::take(&mut snapshot.pools).into_keys().map(|pool| (pool, None)).collect();
}

#[test]
fn the_addresses_of_an_unreadable_pool_stay_as_they_are_and_it_gives_no_others() {
    let (mut snapshot, health, _) = in_use(Distribution::PerFlow);
    pool_of(&mut snapshot).announce = Announce::Route;
    pool_of(&mut snapshot).carriers = MAX_CARRIERS;
    let named = PoolRequest { ips: [v4(0, 0, 9)].into(), ..request("public", 2) };
    add_policy(&mut snapshot, policy("named", Source::Pools(vec![named])));
    let before = plan(&snapshot, &health, &Plan::default());
    let pools = snapshot.pools.clone();
    garble(&mut snapshot);
    let overlapping = pool("overlapping", FIRST(), v4(0, 0, 9));
    snapshot.pools.insert(overlapping.id.clone(), overlapping);
    add_policy(&mut snapshot, policy("late", Source::Pools(vec![request("public", 1)])));
    add_policy(
        &mut snapshot,
        Policy { created: -1, ..policy("other", Source::Pools(vec![request("overlapping", 1)])) },
    );
    add_policy(&mut snapshot, policy("web", Source::Pools(vec![request("public", 3)])));
    let after = plan(&snapshot, &health, &before);
    for (address, old) in &before.egress_ips {
        let ip = &after.egress_ips[address];
        assert_eq!((&ip.owner, &ip.users, &ip.attachment), (&old.owner, &old.users, &old.attachment), "{address}");
        assert!(!ip.draining && ip.pool == old.pool && ip.carriers.len() == old.carriers.len(), "{address}: {ip:?}");
    }
    assert_eq!(after.egress_ips.len(), before.egress_ips.len() + 1, "one for the policy of the other pool");
    assert_eq!(condition(&after, ConditionKind::Ready).1, Reason::AsExpected);
    let (holds, reason, message) = condition(&after, ConditionKind::Degraded);
    assert_eq!((holds, reason), (true, Reason::Invalid));
    assert!(message.starts_with("pool public is invalid: the policy keeps the addresses that it has"), "{message}");
    assert_eq!(after.outcomes[&"late".parse().unwrap()].conditions[&ConditionKind::Ready].reason, Reason::NoAddress);
    assert_eq!(plan(&snapshot, &health, &after), after, "planning again changes nothing");
    snapshot.pools = pools;
    snapshot.unreadable_pools.clear();
    let repaired = plan(&snapshot, &health, &after);
    assert!(before.egress_ips.iter().all(|(address, old)| repaired.egress_ips[address].owner == old.owner));
}

#[test]
fn an_address_of_a_pool_whose_selector_is_unknown_does_not_blame_the_selector() {
    let (mut snapshot, health, before) = in_use(Distribution::PerFlow);
    garble(&mut snapshot);
    snapshot.nodes.retain(|name, _| name.as_str() == "w0");
    let after = plan(&snapshot, &health, &before);
    assert_eq!(
        (&after.egress_ips[&FIRST()].owner, after.egress_ips[&FIRST()].reason),
        (&None, OwnerReason::SelectorUnknown)
    );
    let message = condition(&after, ConditionKind::Degraded).2;
    assert!(message.contains("10.0.0.1 has no gateway: its former gateways are gone, and its pool"), "{message}");
}

#[test]
fn draining_address_keeps_draining_while_its_pool_is_unreadable() {
    let (mut snapshot, health, before) = in_use(Distribution::PerFlow);
    shrink(&mut snapshot);
    let draining = plan(&snapshot, &health, &before);
    garble(&mut snapshot);
    let after = plan(&snapshot, &health, &draining);
    let drains = |plan: &Plan| plan.egress_ips.iter().map(|(ip, planned)| (*ip, planned.draining)).collect::<Vec<_>>();
    assert_eq!(drains(&after), drains(&draining));
    let message = condition(&after, ConditionKind::Degraded).2;
    assert!(message.contains("10.0.0.1 (no longer in the ranges of pool public)"), "{message}");
    snapshot.policies.clear();
    assert!(plan(&snapshot, &health, &after).egress_ips.is_empty(), "no policy requests them any more");
}

#[test]
fn an_address_returned_to_its_pool_in_time_serves_again() {
    let (mut snapshot, health, before) = in_use(Distribution::PerFlow);
    let pools = std::mem::take(&mut snapshot.pools);
    let draining = plan(&snapshot, &health, &before);
    snapshot.pools = pools;
    let after = plan(&snapshot, &health, &draining);
    assert_eq!(after.egress_ips, before.egress_ips);
    let leased = after.blocks[&FIRST()].values().filter(|lease| lease.state == BlockState::Leased).count();
    assert!(leased > 0);
}

/// docs/failures.md: pool-gone.
#[test]
fn pool_gone_an_address_returned_when_another_serves_in_its_place_drains_on_until_count_has_room() {
    let (mut snapshot, health, before) = in_use(Distribution::PerFlow);
    let ranges = pool_of(&mut snapshot).ranges.clone();
    shrink(&mut snapshot);
    let draining = plan(&snapshot, &health, &before);
    pool_of(&mut snapshot).ranges = ranges;
    let back = plan(&snapshot, &health, &draining);
    let drains = |plan: &Plan| plan.egress_ips.iter().map(|(ip, planned)| (*ip, planned.draining)).collect::<Vec<_>>();
    let third = v4(0, 0, 3);
    assert_eq!(drains(&back), [(FIRST(), true), (SECOND(), false), (third, false)], "neither is severed");
    assert!(!back.blocks[&FIRST()].is_empty());
    let message = condition(&back, ConditionKind::Degraded).2;
    assert!(
        message.contains("10.0.0.1 (taken out of the ranges and put back, beyond what the policy requests"),
        "{message}"
    );
    assert!(message.contains("raise count to keep the addresses that are in use"), "{message}");
    assert_eq!(plan(&snapshot, &health, &back), back, "planning again changes nothing");
    let late = Snapshot { drained: [FIRST()].into(), ..snapshot.clone() };
    assert_eq!(drains(&plan(&late, &health, &back)), [(SECOND(), false), (third, false)]);
    add_policy(&mut snapshot, policy("web", Source::Pools(vec![request("public", 3)])));
    let all = plan(&snapshot, &health, &back);
    assert_eq!(drains(&all), [FIRST(), SECOND(), third].map(|address| (address, false)));
}

#[test]
fn a_drain_ends_with_its_policy_or_at_its_timeout() {
    let (mut snapshot, health, before) = in_use(Distribution::PerFlow);
    shrink(&mut snapshot);
    let draining = plan(&snapshot, &health, &before);
    let late = Snapshot { drained: [FIRST()].into(), ..snapshot.clone() };
    assert!(!plan(&late, &health, &draining).egress_ips.contains_key(&FIRST()));
    let mut other = snapshot.clone();
    add_policy(&mut other, policy("web", Source::Pools(vec![request("another", 1)])));
    assert!(plan(&other, &health, &draining).egress_ips[&FIRST()].draining, "it keeps draining under a changed policy");
    snapshot.policies.clear();
    assert!(plan(&snapshot, &health, &draining).egress_ips.is_empty());
}

#[test]
fn a_draining_address_is_given_to_nobody_else() {
    let (mut snapshot, health, before) = in_use(Distribution::PerFlow);
    shrink(&mut snapshot);
    let other = pool("other", FIRST(), FIRST());
    snapshot.pools.insert(other.id.clone(), other);
    add_policy(&mut snapshot, policy("late", Source::Pools(vec![request("other", 1)])));
    let after = plan(&snapshot, &health, &before);
    assert!(after.egress_ips[&FIRST()].draining);
    assert!(after.egress_ips[&FIRST()].users.keys().all(|user| *user.name == *"web"));
}
