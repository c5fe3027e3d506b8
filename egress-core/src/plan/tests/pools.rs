//! Tests of allocation from pools.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::model::*;
use crate::plan::{ConditionKind, Plan, Reason, plan};
use crate::testing::world::*;

fn of(plan: &Plan, policy: &str) -> Vec<IpAddr> {
    plan.outcomes[&policy.parse().unwrap()].slots.iter().map(|slot| slot.address).collect()
}

fn reason(plan: &Plan, policy: &str, kind: ConditionKind) -> Reason {
    plan.outcomes[&policy.parse().unwrap()].conditions[&kind].reason
}

fn pools(name: &str, count: u32, ips: &[&str]) -> Policy {
    let ips = ips.iter().map(|a| ip(a)).collect();
    policy(name, Source::Pools(vec![PoolRequest { ips, ..request("public", count) }]))
}

#[test]
fn the_lowest_free_addresses_are_given_and_kept() {
    let (mut snapshot, health) = cluster(3, 1);
    add_policy(&mut snapshot, pools("b", 2, &[]));
    let first = plan(&snapshot, &health, &Plan::default());
    assert_eq!(of(&first, "b"), [v4(0, 0, 1), v4(0, 0, 2)]);
    add_policy(&mut snapshot, pools("a", 2, &[]));
    let second = plan(&snapshot, &health, &first);
    assert_eq!(of(&second, "b"), of(&first, "b"));
    assert_eq!(of(&second, "a"), [v4(0, 0, 3), v4(0, 0, 4)]);
    add_policy(&mut snapshot, pools("b", 1, &[]));
    let third = plan(&snapshot, &health, &second);
    assert_eq!(of(&third, "b"), [v4(0, 0, 1)]);
    assert!(!third.egress_ips.contains_key(&v4(0, 0, 2)));
}

#[test]
fn wanted_addresses_come_first_and_may_be_shared() {
    let (mut snapshot, health) = cluster(3, 1);
    add_policy(&mut snapshot, pools("a", 2, &[]));
    add_policy(&mut snapshot, pools("b", 2, &["10.0.0.1"]));
    add_policy(&mut snapshot, pools("c", 1, &["10.0.0.1"]));
    let plan = plan(&snapshot, &health, &Plan::default());
    assert_eq!(of(&plan, "a"), [v4(0, 0, 2), v4(0, 0, 3)]);
    assert_eq!(of(&plan, "b"), [v4(0, 0, 1), v4(0, 0, 4)]);
    assert_eq!(of(&plan, "c"), [v4(0, 0, 1)]);
}

#[test]
fn an_address_that_nobody_asks_for_any_more_stays_with_one_of_its_users() {
    let (mut snapshot, health) = cluster(3, 1);
    for name in ["a", "b"] {
        add_policy(&mut snapshot, pools(name, 1, &["10.0.0.1"]));
    }
    let shared = plan(&snapshot, &health, &Plan::default());
    for name in ["a", "b"] {
        add_policy(&mut snapshot, pools(name, 1, &[]));
    }
    let apart = plan(&snapshot, &health, &shared);
    assert_eq!((of(&apart, "a"), of(&apart, "b")), (vec![v4(0, 0, 1)], vec![v4(0, 0, 2)]));
}

#[test]
fn allocated_address_is_not_lost_to_a_later_request_by_name() {
    let (mut snapshot, health) = cluster(3, 1);
    add_policy(&mut snapshot, pools("a", 1, &[]));
    let first = plan(&snapshot, &health, &Plan::default());
    add_policy(&mut snapshot, pools("b", 1, &["10.0.0.1"]));
    let named = vec![gateway(Selector::everything(), AddressSource::Ip(v4(0, 0, 1)))];
    add_policy(&mut snapshot, policy("c", Source::Gateways(named)));
    let second = plan(&snapshot, &health, &first);
    assert_eq!(of(&second, "a"), [v4(0, 0, 1)]);
    for late in ["b", "c"] {
        assert_eq!(of(&second, late), Vec::<IpAddr>::new());
        assert_eq!(reason(&second, late, ConditionKind::Conflicting), Reason::AddressInUse);
        assert!(!second.outcomes[&late.parse().unwrap()].conditions[&ConditionKind::Ready].holds);
    }
}

#[test]
fn an_exhausted_pool_sets_a_condition_until_addresses_are_free() {
    let (mut snapshot, health) = cluster(3, 1);
    let small = pool("public", v4(0, 0, 1), v4(0, 0, 3));
    snapshot.pools.insert(small.id.clone(), small);
    add_policy(&mut snapshot, pools("a", 2, &[]));
    add_policy(&mut snapshot, pools("b", 2, &[]));
    let first = plan(&snapshot, &health, &Plan::default());
    assert_eq!(of(&first, "b"), [v4(0, 0, 3)]);
    assert_eq!(reason(&first, "a", ConditionKind::Degraded), Reason::AsExpected);
    let degraded = &first.outcomes[&"b".parse().unwrap()].conditions[&ConditionKind::Degraded];
    assert!(degraded.holds && degraded.reason == Reason::PoolExhausted);
    assert!(degraded.message.contains("pool public has no free IPv4 address: 1 of 2 given"), "{}", degraded.message);
    snapshot.policies.remove(&"a".parse().unwrap());
    let second = plan(&snapshot, &health, &first);
    assert_eq!(of(&second, "b"), [v4(0, 0, 1), v4(0, 0, 3)]);
    assert_eq!(reason(&second, "b", ConditionKind::Degraded), Reason::AsExpected);
}

#[test]
fn addresses_of_nodes_and_routers_are_never_given() {
    let (mut snapshot, health) = cluster(3, 1);
    let subnet = Some(SubnetInfo { gateway: v4(0, 0, 1), prefix_length: 24, vlan: None });
    for pool in snapshot.pools.values_mut() {
        pool.subnet = subnet;
    }
    let worker = snapshot.nodes.get_mut(&"w0".into()).unwrap();
    worker.addresses = [v4(0, 0, 2)].into();
    let addresses: BTreeSet<InterfaceAddress> =
        [InterfaceAddress { interface: "eth0".into(), net: "10.0.0.3/24".parse().unwrap(), default_route: true }]
            .into();
    worker.report = Some(NodeReport { addresses, ..Default::default() });
    add_policy(&mut snapshot, pools("a", 1, &[]));
    assert_eq!(of(&plan(&snapshot, &health, &Plan::default()), "a"), [v4(0, 0, 4)]);
}

#[test]
fn router_address_is_never_given_and_node_address_only_to_an_administrator() {
    let (mut snapshot, health) = cluster(3, 1);
    let mut other = pool("other", v4(8, 0, 1), v4(8, 0, 9));
    other.subnet = Some(SubnetInfo { gateway: v4(0, 0, 254), prefix_length: 24, vlan: None });
    snapshot.pools.insert(other.id.clone(), other);
    let own = v4(0, 0, 5);
    let gateway = snapshot.nodes.get_mut(&"gw1".into()).unwrap();
    gateway.addresses = [own].into();
    let addresses = [InterfaceAddress { interface: "eth0".into(), net: own.into(), default_route: true }].into();
    gateway.report = Some(NodeReport { addresses, ..Default::default() });
    add_policy(&mut snapshot, pools("a", 2, &["10.0.0.254", "10.0.0.5"]));
    let after = plan(&snapshot, &health, &Plan::default());
    assert_eq!(of(&after, "a"), [v4(0, 0, 1), own]);
    assert!(after.egress_ips[&own].fixed && after.egress_ips[&own].owner == Some("gw1".into()));
    let degraded = &after.outcomes[&"a".parse().unwrap()].conditions[&ConditionKind::Degraded];
    assert_eq!(degraded.reason, Reason::AddressInUse);
    assert_eq!(
        degraded.message,
        "egressIPs names addresses of routers (subnetInfo.gateway of a pool): 10.0.0.254; ask for others"
    );
}

#[test]
fn missing_pools_and_strange_addresses_are_said() {
    let (mut snapshot, health) = cluster(3, 1);
    add_policy(&mut snapshot, policy("a", Source::Pools(vec![request("nowhere", 1)])));
    add_policy(&mut snapshot, pools("b", 1, &["203.0.113.1"]));
    let plan = plan(&snapshot, &health, &Plan::default());
    assert_eq!(reason(&plan, "a", ConditionKind::Degraded), Reason::PoolNotFound);
    assert_eq!(reason(&plan, "a", ConditionKind::Ready), Reason::NoAddress);
    assert_eq!(reason(&plan, "b", ConditionKind::Degraded), Reason::AddressNotInPool);
    assert_eq!(of(&plan, "b"), [v4(0, 0, 1)]);
}

/// docs/failures.md: claims.
#[test]
fn claims_of_a_node_take_no_addresses_out_of_a_pool() {
    let (mut snapshot, health) = cluster(1, 1);
    let addresses =
        (1..=8).map(|n| InterfaceAddress { interface: "eth1".into(), net: v4(0, 0, n).into(), default_route: false });
    let free = pool("public", v4(0, 0, 1), v4(0, 0, 10));
    snapshot.pools.insert(free.id.clone(), free);
    let report = NodeReport { addresses: addresses.collect(), ..NodeReport::default() };
    snapshot.nodes.get_mut(&"w0".into()).unwrap().report = Some(report);
    add_policy(&mut snapshot, pools("b", 4, &[]));
    let plan = plan(&snapshot, &health, &Plan::default());
    assert_eq!(
        of(&plan, "b"),
        [9, 10, 1, 2].map(|n| v4(0, 0, n)).into_iter().collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    );
    assert!(plan.egress_ips.values().all(|ip| ip.owner.is_some()));
}

#[test]
fn an_address_of_two_pools_belongs_to_the_one_that_has_gateways() {
    let (mut snapshot, health) = cluster(2, 1);
    let mut deserted = pool("deserted", v4(0, 0, 1), v4(0, 0, 9));
    deserted.nodes = Selector::label("gateway", "no");
    snapshot.pools.insert(deserted.id.clone(), deserted);
    let address = v4(0, 0, 1);
    for pool in ["deserted", "public"] {
        let mut asking = request(pool, 1);
        asking.ips.insert(address);
        add_policy(&mut snapshot, policy(&format!("asks-{pool}"), Source::Pools(vec![asking])));
    }
    let plan = plan(&snapshot, &health, &Plan::default());
    assert_eq!(plan.egress_ips[&address].pool, Some(PoolId::new(PoolKind::Native, "public")));
    assert!(plan.egress_ips[&address].owner.is_some());
}
