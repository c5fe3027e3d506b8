//! Tests of the order of carriers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proptest::prelude::*;

use super::whole::candidates;
use crate::health::NodeHealth;
use crate::model::*;
use crate::plan::{Plan, plan};
use crate::testing::world::*;

fn pools(snapshot: &mut Snapshot, counts: &[u32]) {
    for (n, count) in counts.iter().enumerate() {
        add_policy(snapshot, policy(&format!("policy{n}"), Source::Pools(vec![request("public", *count)])));
    }
}

/// Lets every gateway report that it carries what the plan says.
fn report(snapshot: &mut Snapshot, plan: &Plan) {
    for node in snapshot.nodes.values_mut() {
        let carried = plan.egress_ips.iter().filter(|(_, ip)| ip.carriers.contains(&node.name));
        node.report.get_or_insert_default().carries = carried.map(|(address, _)| *address).collect();
    }
}

fn carriers(plan: &Plan) -> BTreeMap<IpAddr, Vec<NodeName>> {
    plan.egress_ips.iter().map(|(address, ip)| (*address, ip.carriers.clone())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn carriers_are_eligible_and_the_owner_is_the_first(world in arbitrary_cluster()) {
        let plan = plan(&world.snapshot, &world.health, &Plan::default());
        for (address, ip) in &plan.egress_ips {
            let unique: BTreeSet<&NodeName> = ip.carriers.iter().collect();
            prop_assert_eq!(unique.len(), ip.carriers.len(), "{}: {:?}", address, ip.carriers);
            prop_assert!(ip.owner.is_none() || ip.carriers.first() == ip.owner.as_ref());
            let most = if ip.fixed { 1 } else { DEFAULT_CARRIERS };
            prop_assert!(ip.carriers.len() <= most);
            let selected = |node: &Node| {
                ip.fixed || candidates(&world.snapshot, &plan, *address).iter().any(|one| one.name == node.name)
            };
            for name in ip.carriers.iter().skip(1) {
                let (node, health) = (&world.snapshot.nodes[name], world.health.of(name));
                let able = node.ready && !node.draining && (health.is_fresh() || health.is_unasked());
                prop_assert!(able && selected(node), "{address}: {name}");
            }
        }
    }

    #[test]
    fn after_a_gateways_death_the_next_carrier_in_order_owns_the_address(
        gateways in 2usize..8, counts in prop::collection::vec(1u32..6, 1..8), dead in 0usize..8, one_by_one: bool,
    ) {
        let (mut snapshot, mut health) = cluster(gateways, 1);
        let mut before = Plan::default();
        for n in 0..counts.len() {
            // All together, or one by one, each with the carriers so far.
            pools(&mut snapshot, if one_by_one { &counts[..=n] } else { &counts });
            before = plan(&snapshot, &health, &before);
            report(&mut snapshot, &before);
        }
        for ip in before.egress_ips.values() {
            prop_assert_eq!(ip.carriers.len(), gateways.min(DEFAULT_CARRIERS));
        }
        let dead: NodeName = format!("gw{}", dead % gateways).as_str().into();
        health.nodes.insert(dead.clone(), lapsed());
        let after = plan(&snapshot, &health, &before);
        for (address, ip) in &after.egress_ips {
            let order = &before.egress_ips[address].carriers;
            let next = order.iter().find(|name| **name != dead);
            prop_assert_eq!(ip.owner.as_ref(), next, "{}: {:?}, {} is dead", address, order, dead);
            prop_assert!(!ip.carriers.contains(&dead));
        }
    }

    #[test]
    fn a_gateway_more_changes_few_orders(gateways in 5usize..9, counts in prop::collection::vec(1u32..6, 1..8)) {
        let (mut snapshot, mut health) = cluster(gateways, 1);
        pools(&mut snapshot, &counts);
        let before = plan(&snapshot, &health, &Plan::default());
        report(&mut snapshot, &before);
        let added = node("new", labels(&[("gateway", "yes")]));
        health.nodes.insert(added.name.clone(), fresh());
        snapshot.nodes.insert(added.name.clone(), added);
        let after = plan(&snapshot, &health, &before);
        for (address, ip) in &after.egress_ips {
            let old: BTreeSet<&NodeName> = before.egress_ips[address].carriers.iter().collect();
            let new = ip.carriers.iter().filter(|name| !old.contains(name) && name.as_str() != "new").count();
            // An egress IP with another owner or next carrier has another rest as well.
            let same = ip.carriers[..2] == before.egress_ips[address].carriers[..2];
            prop_assert!(!same || new == 0, "{address}: {old:?}, {:?}", ip.carriers);
        }
    }
}

#[test]
fn the_addresses_of_a_gateway_have_their_next_carriers_spread_evenly() {
    let (mut snapshot, health) = cluster(5, 1);
    pools(&mut snapshot, &[4; 10]);
    let plan = plan(&snapshot, &health, &Plan::default());
    let mut heirs: BTreeMap<(NodeName, NodeName), usize> = BTreeMap::new();
    for ip in plan.egress_ips.values() {
        *heirs.entry((ip.carriers[0].clone(), ip.carriers[1].clone())).or_default() += 1;
    }
    assert!(heirs.len() == 20 && heirs.values().all(|count| *count == 2), "{heirs:?}");
}

#[test]
fn an_egress_ip_more_changes_few_other_orders() {
    let (mut snapshot, health) = cluster(5, 1);
    pools(&mut snapshot, &[1; 100]);
    let mut before = plan(&snapshot, &health, &Plan::default());
    for n in 100..200 {
        report(&mut snapshot, &before);
        add_policy(&mut snapshot, policy(&format!("policy{n}"), Source::Pools(vec![request("public", 1)])));
        let after = plan(&snapshot, &health, &before);
        let old = carriers(&before).into_iter().filter(|(address, old)| after.egress_ips[address].carriers != *old);
        // One for each other owner, if the last place of a level goes to another gateway.
        assert!(old.count() <= 4, "{n}");
        before = after;
    }
}

#[test]
fn with_zones_carriers_in_the_owners_zone_come_first() {
    let (mut snapshot, health) = cluster(6, 1);
    for (n, node) in snapshot.nodes.values_mut().enumerate() {
        node.zone = Some(if n % 2 == 0 { "x" } else { "y" }.to_owned());
    }
    let zoned = Policy { zone: ZoneMode::Prefer, ..policy("zoned", Source::Pools(vec![request("public", 4)])) };
    add_policy(&mut snapshot, zoned);
    for carriers in carriers(&plan(&snapshot, &health, &Plan::default())).into_values() {
        let zones: Vec<_> = carriers.iter().map(|name| snapshot.nodes[name].zone.clone()).collect();
        assert!(zones[0] == zones[1] && zones[1] == zones[2] && zones[2] != zones[3], "{zones:?}");
    }
}

#[test]
fn a_gateway_not_asked_for_a_lease_stands_by_and_owns_nothing() {
    let (mut snapshot, mut health) = cluster(3, 1);
    pools(&mut snapshot, &[1]);
    health.nodes.clear();
    let asked = plan(&snapshot, &health, &Plan::default());
    let ip = asked.egress_ips.values().next().unwrap();
    assert!(ip.owner.is_none() && ip.carriers.len() == 3, "{ip:?}");
    health.nodes.insert("gw1".into(), fresh());
    let first = plan(&snapshot, &health, &asked);
    let ip = first.egress_ips.values().next().unwrap();
    assert_eq!((ip.owner.clone(), ip.carriers.len()), (Some("gw1".into()), 3));
    health.nodes.insert("gw2".into(), lapsed());
    let second = plan(&snapshot, &health, &first);
    assert_eq!(second.egress_ips.values().next().unwrap().carriers, ["gw1".into(), "gw0".into()]);
    health.nodes.insert("gw2".into(), NodeHealth::default());
    assert_eq!(plan(&snapshot, &health, &second).egress_ips.values().next().unwrap().carriers.len(), 3);
}

#[test]
fn leaving_carrier_stays_until_its_successor_carries_the_address() {
    let (mut snapshot, health) = cluster(3, 1);
    pools(&mut snapshot, &[1]);
    snapshot.pools.values_mut().for_each(|pool| pool.carriers = 1);
    let before = plan(&snapshot, &health, &Plan::default());
    report(&mut snapshot, &before);
    let address = *before.egress_ips.keys().next().unwrap();
    let old = before.egress_ips[&address].owner.clone().unwrap();
    snapshot.nodes.get_mut(&old).unwrap().labels.clear();
    let between = plan(&snapshot, &health, &before);
    let new = between.egress_ips[&address].owner.clone().unwrap();
    assert_eq!(between.egress_ips[&address].carriers, [new.clone(), old.clone()]);
    assert_eq!(plan(&snapshot, &health, &between), between);
    snapshot.nodes.get_mut(&new).unwrap().report.as_mut().unwrap().carries.insert(address);
    assert_eq!(plan(&snapshot, &health, &between).egress_ips[&address].carriers, [new]);
}
