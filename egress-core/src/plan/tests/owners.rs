//! Tests of owners: balance, stability, failback.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;

use crate::health::Health;
use crate::model::*;
use crate::plan::{OwnerReason, Plan, plan};
use crate::testing::world::*;

type Owners = BTreeMap<IpAddr, NodeName>;

fn owners(plan: &Plan) -> Owners {
    plan.egress_ips.iter().filter_map(|(address, ip)| Some((*address, ip.owner.clone()?))).collect()
}

fn loads(plan: &Plan, snapshot: &Snapshot, health: &Health) -> Vec<usize> {
    let owners = owners(plan);
    let gateways =
        snapshot.nodes.values().filter(|n| n.labels.contains_key("gateway") && health.of(&n.name).is_fresh());
    gateways.map(|node| owners.values().filter(|owner| **owner == node.name).count()).collect()
}

fn is_balanced(plan: &Plan, snapshot: &Snapshot, health: &Health) -> bool {
    let loads = loads(plan, snapshot, health);
    loads.iter().max() <= loads.iter().min().map(|min| min + 1).as_ref()
}

fn moved(before: &Plan, after: &Plan) -> Vec<IpAddr> {
    let (before, after) = (owners(before), owners(after));
    before
        .iter()
        .filter(|(address, owner)| after.get(*address).is_some_and(|now| now != *owner))
        .map(|(a, _)| *a)
        .collect()
}

fn add_pools(snapshot: &mut Snapshot, counts: &[u32]) {
    for (n, count) in counts.iter().enumerate() {
        add_policy(snapshot, policy(&format!("policy{n}"), Source::Pools(vec![request("public", *count)])));
    }
}

fn settle(snapshot: &Snapshot, health: &Health, previous: &Plan) -> Plan {
    let next = plan(snapshot, health, previous);
    assert_eq!(plan(snapshot, health, &next), next, "planning again changes nothing");
    next
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_dead_gateway_moves_its_own_and_gets_them_back(
        gateways in 2usize..8, counts in prop::collection::vec(1u32..6, 1..8), dead in 0usize..8,
    ) {
        let (mut snapshot, mut health) = cluster(gateways, 1);
        add_pools(&mut snapshot, &counts);
        let before = settle(&snapshot, &health, &Plan::default());
        prop_assert!(is_balanced(&before, &snapshot, &health));
        let dead: NodeName = format!("gw{}", dead % gateways).as_str().into();
        let own: Vec<IpAddr> = owners(&before).into_iter().filter(|(_, owner)| *owner == dead).map(|(a, _)| a).collect();

        health.nodes.insert(dead.clone(), lapsed());
        let without = settle(&snapshot, &health, &before);
        prop_assert_eq!(moved(&before, &without), own.clone());
        prop_assert!(is_balanced(&without, &snapshot, &health));
        for address in &own {
            prop_assert_eq!(without.egress_ips[address].epoch, before.egress_ips[address].epoch + 1);
            prop_assert_eq!(without.egress_ips[address].reason, OwnerReason::Failover);
        }

        health.nodes.insert(dead.clone(), returned(3));
        prop_assert_eq!(owners(&settle(&snapshot, &health, &without)), owners(&without), "before the delay nothing moves");
        health.nodes.insert(dead.clone(), returned(10));
        let after = settle(&snapshot, &health, &without);
        prop_assert_eq!(owners(&after), owners(&before));
    }

    #[test]
    fn return_in_parts_egress_ips_with_different_delays_move_no_others(
        gateways in 2usize..6, public in prop::collection::vec(1u32..6, 1..6), quick in prop::collection::vec(1u32..6, 1..6),
        dead in 0usize..6,
    ) {
        let (mut snapshot, mut health) = cluster(gateways, 1);
        add_pools(&mut snapshot, &public);
        let delay = std::time::Duration::from_secs(3);
        let pool = Pool { failback: Failback::Preferred { delay }, ..pool("quick", v4(1, 0, 1), v4(1, 3, 255)) };
        snapshot.pools.insert(pool.id.clone(), pool);
        for (n, count) in quick.iter().enumerate() {
            add_policy(&mut snapshot, policy(&format!("quick{n}"), Source::Pools(vec![request("quick", *count)])));
        }
        let before = settle(&snapshot, &health, &Plan::default());
        let dead: NodeName = format!("gw{}", dead % gateways).as_str().into();
        let own: Vec<IpAddr> = owners(&before).into_iter().filter(|(_, owner)| *owner == dead).map(|(a, _)| a).collect();
        health.nodes.insert(dead.clone(), lapsed());
        let mut now = settle(&snapshot, &health, &before);
        for seconds in [1, 3, 9, 10] {
            health.nodes.insert(dead.clone(), returned(seconds));
            let next = settle(&snapshot, &health, &now);
            let others: Vec<IpAddr> = moved(&now, &next).into_iter().filter(|address| !own.contains(address)).collect();
            prop_assert_eq!(others, Vec::<IpAddr>::new(), "{} s after the return", seconds);
            now = next;
        }
        prop_assert_eq!(owners(&now), owners(&before));
    }

    #[test]
    fn a_new_gateway_takes_the_fewest_that_balance(gateways in 1usize..6, counts in prop::collection::vec(1u32..6, 1..8)) {
        let (mut snapshot, mut health) = cluster(gateways, 0);
        add_pools(&mut snapshot, &counts);
        let before = settle(&snapshot, &health, &Plan::default());
        let added = node("new", labels(&[("gateway", "yes")]));
        health.nodes.insert(added.name.clone(), fresh());
        snapshot.nodes.insert(added.name.clone(), added);
        let after = settle(&snapshot, &health, &before);
        prop_assert!(is_balanced(&after, &snapshot, &health));
        let new: NodeName = "new".into();
        let gained = owners(&after).values().filter(|owner| **owner == new).count();
        prop_assert_eq!(moved(&before, &after).len(), gained);
        prop_assert_eq!(gained, before.egress_ips.len() / (gateways + 1));
        prop_assert!(after.egress_ips.values().all(|ip| ip.reason == OwnerReason::Preferred));
    }

    #[test]
    fn policies_that_come_and_go_keep_the_balance(
        gateways in 1usize..6, steps in prop::collection::vec((0usize..6, 0u32..5), 1..8),
    ) {
        let (mut snapshot, health) = cluster(gateways, 0);
        let mut previous = Plan::default();
        for (n, count) in steps {
            let changed = policy(&format!("policy{n}"), Source::Pools(vec![request("public", count)]));
            match count {
                0 => { snapshot.policies.remove(&changed.id); }
                _ => add_policy(&mut snapshot, changed),
            }
            let next = settle(&snapshot, &health, &previous);
            prop_assert!(is_balanced(&next, &snapshot, &health), "{:?}", loads(&next, &snapshot, &health));
            if next.egress_ips.len() >= previous.egress_ips.len() && previous.egress_ips.keys().all(|a| next.egress_ips.contains_key(a)) {
                prop_assert_eq!(moved(&previous, &next), Vec::<IpAddr>::new(), "nothing moves for new addresses");
            }
            previous = next;
        }
    }

    #[test]
    fn a_policy_has_its_addresses_on_different_gateways(gateways in 1usize..8, counts in prop::collection::vec(1u32..8, 1..8)) {
        let (mut snapshot, health) = cluster(gateways, 0);
        add_pools(&mut snapshot, &counts);
        let plan = settle(&snapshot, &health, &Plan::default());
        for outcome in plan.outcomes.values() {
            let owners: std::collections::BTreeSet<_> = outcome.slots.iter().map(|slot| slot.owner.clone()).collect();
            prop_assert_eq!(owners.len(), outcome.slots.len().min(gateways));
        }
    }
}

#[test]
fn fifty_policies_of_one_address_give_five_gateways_ten_each() {
    let (mut snapshot, health) = cluster(5, 0);
    add_pools(&mut snapshot, &[1; 50]);
    assert_eq!(loads(&settle(&snapshot, &health, &Plan::default()), &snapshot, &health), [10; 5]);
}

#[test]
fn first_vip_the_first_addresses_of_policies_do_not_pile_up() {
    let (mut snapshot, health) = cluster(5, 0);
    add_pools(&mut snapshot, &[5; 50]);
    let plan = settle(&snapshot, &health, &Plan::default());
    let mut first: BTreeMap<NodeName, usize> = BTreeMap::new();
    for outcome in plan.outcomes.values() {
        *first.entry(outcome.slots[0].owner.clone().unwrap()).or_default() += 1;
    }
    assert!(first.len() == 5 && first.values().all(|count| *count <= 20), "{first:?}");
}

#[test]
fn failback_never_leaves_addresses_where_they_are() {
    let (mut snapshot, mut health) = cluster(3, 0);
    add_pools(&mut snapshot, &[6]);
    snapshot.pools.values_mut().for_each(|pool| pool.failback = Failback::Never);
    let before = settle(&snapshot, &health, &Plan::default());
    health.nodes.insert("gw1".into(), lapsed());
    let without = settle(&snapshot, &health, &before);
    health.nodes.insert("gw1".into(), returned(1000));
    assert_eq!(owners(&settle(&snapshot, &health, &without)), owners(&without));
    assert_eq!(loads(&without, &snapshot, &health), [3, 0, 3]);
}

#[test]
fn drained_and_unselected_gateways_are_left_and_the_last_one_is_kept() {
    let (mut snapshot, mut health) = cluster(2, 0);
    add_pools(&mut snapshot, &[4]);
    let before = settle(&snapshot, &health, &Plan::default());
    snapshot.nodes.get_mut(&"gw0".into()).unwrap().draining = true;
    let drained = settle(&snapshot, &health, &before);
    assert_eq!(loads(&drained, &snapshot, &health), [0, 4]);
    health.nodes.insert("gw1".into(), lapsed());
    let kept = settle(&snapshot, &health, &drained);
    assert_eq!(owners(&kept), owners(&drained), "no other gateway is eligible");
    assert!(kept.egress_ips.values().all(|ip| ip.reason == OwnerReason::OwnerUnhealthy));
    snapshot.nodes.get_mut(&"gw1".into()).unwrap().labels.clear();
    let unselected = settle(&snapshot, &health, &kept);
    assert!(owners(&unselected).is_empty());
    assert!(
        unselected
            .egress_ips
            .values()
            .all(|ip| ip.reason == OwnerReason::NoGatewayReady && (ip.epoch == 3 || ip.epoch == 2))
    );
}

#[test]
fn at_capacity_no_address_moves_and_new_room_is_used() {
    let (mut snapshot, health) = cluster(2, 0);
    snapshot.pools.values_mut().for_each(|pool| pool.max_per_node = Some(1));
    snapshot.nodes.get_mut(&"gw1".into()).unwrap().max_egress_ips = Some(2);
    add_pools(&mut snapshot, &[3]);
    let full = settle(&snapshot, &health, &Plan::default());
    assert_eq!(loads(&full, &snapshot, &health), [1, 2]);
    add_pools(&mut snapshot, &[3, 1]);
    let waiting = settle(&snapshot, &health, &full);
    assert_eq!(moved(&full, &waiting), Vec::<IpAddr>::new());
    assert_eq!(waiting.egress_ips[&v4(0, 0, 4)].reason, OwnerReason::AtCapacity);
    snapshot.nodes.get_mut(&"gw0".into()).unwrap().max_egress_ips = Some(5);
    let served = settle(&snapshot, &health, &waiting);
    assert_eq!(served.egress_ips[&v4(0, 0, 4)].owner, Some("gw0".into()));
    assert_eq!(moved(&waiting, &served), Vec::<IpAddr>::new());
}

#[test]
fn the_default_limit_per_node_counts_over_all_pools() {
    let (mut snapshot, health) = cluster(2, 0);
    snapshot.max_egress_ips = Some(2);
    add_pools(&mut snapshot, &[2, 2, 2]);
    let full = settle(&snapshot, &health, &Plan::default());
    assert_eq!(loads(&full, &snapshot, &health), [2, 2]);
    snapshot.nodes.get_mut(&"gw1".into()).unwrap().max_egress_ips = Some(3);
    let more = settle(&snapshot, &health, &full);
    assert_eq!((loads(&more, &snapshot, &health), moved(&full, &more)), (vec![2, 3], Vec::new()));
    // A pool may set a lower limit, but not a higher one.
    snapshot.pools.values_mut().for_each(|pool| pool.max_per_node = Some(9));
    assert_eq!(settle(&snapshot, &health, &more), more);
    snapshot.max_egress_ips = None;
    let served = settle(&snapshot, &health, &more);
    assert_eq!(loads(&served, &snapshot, &health), [3, 3]);
}

#[test]
fn an_address_of_a_node_stays_on_it() {
    let (mut snapshot, mut health) = cluster(3, 1);
    let gw1 = snapshot.nodes.get_mut(&"gw1".into()).unwrap();
    let net = "198.51.100.7/24".parse().unwrap();
    let addresses = [InterfaceAddress { interface: "eth1".into(), net, default_route: true }];
    gw1.report = Some(NodeReport { addresses: addresses.into(), ..Default::default() });
    let all = || Selector::label("gateway", "yes");
    for (name, address) in [
        ("ip", AddressSource::Ip(net.addr())),
        ("if", AddressSource::Interface("eth1".into())),
        ("default", AddressSource::DefaultRoute),
        ("configured", AddressSource::Configured(net.addr())),
    ] {
        add_policy(&mut snapshot, policy(name, Source::Gateways(vec![gateway(all(), address)])));
    }
    health.nodes.insert("gw1".into(), lapsed());
    let plan = settle(&snapshot, &health, &Plan::default());
    let ip = &plan.egress_ips[&net.addr()];
    assert_eq!(plan.egress_ips.len(), 1);
    assert_eq!((ip.fixed, ip.interface.as_deref(), ip.owner.clone()), (true, Some("eth1"), Some("gw1".into())));
    assert_eq!((ip.users.len(), ip.reason), (4, OwnerReason::OwnerUnhealthy));
}

#[test]
fn a_configured_address_is_followed_and_never_floats() {
    let (mut snapshot, health) = cluster(2, 1);
    let net = "198.51.100.7/24".parse().unwrap();
    let with = || NodeReport {
        addresses: [InterfaceAddress { interface: "eth1".into(), net, default_route: false }].into(),
        ..Default::default()
    };
    let source = Source::Gateways(vec![gateway(Selector::everything(), AddressSource::Configured(net.addr()))]);
    add_policy(&mut snapshot, policy("a", source));
    snapshot.nodes.get_mut(&"gw0".into()).unwrap().report = Some(with());
    let first = settle(&snapshot, &health, &Plan::default());
    assert_eq!(owners(&first)[&net.addr()], "gw0".into());
    snapshot.nodes.get_mut(&"gw0".into()).unwrap().report = None;
    snapshot.nodes.get_mut(&"gw1".into()).unwrap().report = Some(with());
    let second = settle(&snapshot, &health, &first);
    assert_eq!((owners(&second)[&net.addr()].clone(), second.egress_ips[&net.addr()].epoch), ("gw1".into(), 2));
    snapshot.nodes.get_mut(&"gw1".into()).unwrap().report = None;
    let third = settle(&snapshot, &health, &second);
    assert_eq!(third.egress_ips[&net.addr()].reason, OwnerReason::AddressElsewhere);
    assert!(owners(&third).is_empty());
}

#[test]
fn gateways_that_come_one_by_one_share_each_family_of_a_policy() {
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let (mut snapshot, mut health) = cluster(3, 1);
        let six = pool("six", ip("fd00::1"), ip("fd00::ff"));
        snapshot.pools.insert(six.id.clone(), six);
        let mut dual = policy("web", Source::Pools(vec![request("public", 3), request("six", 3)]));
        dual.destinations.push("::/0".parse().unwrap());
        add_policy(&mut snapshot, dual);
        health.nodes.clear();
        let mut last = Plan::default();
        for gateway in order {
            health.nodes.insert(format!("gw{gateway}").as_str().into(), fresh());
            last = settle(&snapshot, &health, &last);
        }
        for family in Family::ALL {
            let of_family = owners(&last).into_iter().filter(|(address, _)| Family::of(*address) == family);
            let nodes: std::collections::BTreeSet<NodeName> = of_family.map(|(_, owner)| owner).collect();
            assert_eq!(nodes.len(), 3, "{family} leaves through {nodes:?} only");
        }
    }
}

#[test]
fn a_starting_controller_assigns_nothing_to_gateways_that_may_be_dead() {
    let (mut snapshot, mut health) = cluster(3, 0);
    add_pools(&mut snapshot, &[6]);
    let before = settle(&snapshot, &health, &Plan::default());
    health.nodes.insert("gw1".into(), lapsed());
    let without = settle(&snapshot, &health, &before);
    for gateway in ["gw0", "gw1", "gw2"] {
        health.nodes.insert(gateway.into(), unproven());
    }
    let started = settle(&snapshot, &health, &without);
    assert_eq!(owners(&started), owners(&without));
    health.nodes.insert("gw0".into(), fresh());
    assert_eq!(owners(&settle(&snapshot, &health, &started)), owners(&without), "the slower one keeps its own");
}

/// Returns the report of a node that has `address` on an interface.
fn with_address(address: IpAddr) -> Option<NodeReport> {
    let addresses = [InterfaceAddress { interface: "eth1".into(), net: address.into(), default_route: false }];
    Some(NodeReport { addresses: addresses.into(), ..Default::default() })
}

/// docs/failures.md: claims.
#[test]
fn claims_of_a_node_take_no_egress_ip_from_others() {
    let (mut snapshot, health) = cluster(2, 2);
    add_policy(&mut snapshot, policy("pool", Source::Pools(vec![request("public", 2)])));
    let floating = v4(7, 0, 1);
    let gateways = || Selector::label("gateway", "yes");
    add_policy(
        &mut snapshot,
        policy("named", Source::Gateways(vec![gateway(gateways(), AddressSource::Ip(floating))])),
    );
    let honest = settle(&snapshot, &health, &Plan::default());
    // A node that is not a gateway of these policies, and becomes a gateway of an older one by claiming addresses.
    for claimed in owners(&honest).into_keys() {
        let (mut snapshot, node) = (snapshot.clone(), NodeName::from("w0"));
        let own = gateway(Selector::label("rack", "evil"), AddressSource::Interface("eth1".into()));
        for selected in [false, true] {
            let w0 = snapshot.nodes.get_mut(&node).unwrap();
            w0.report = with_address(claimed);
            if selected {
                w0.labels.insert("rack".into(), "evil".into());
                add_policy(
                    &mut snapshot,
                    Policy { created: -1, ..policy("evil", Source::Gateways(vec![own.clone()])) },
                );
            }
            // An address that was not allocated yet could be another address of the pool.
            let fresh = Plan::default();
            for before in [&honest].into_iter().chain((claimed == floating).then_some(&fresh)) {
                let plan = settle(&snapshot, &health, before);
                let ip = &plan.egress_ips[&claimed];
                assert!(!ip.fixed && ip.owner.as_ref().is_some_and(|owner| owner.as_str().starts_with("gw")), "{ip:?}");
                let told = plan.outcomes.values().flat_map(|o| o.conditions.values()).map(|c| &c.message);
                assert!(told.filter(|m| m.contains("w0") && m.contains("status.addresses")).count() >= 1);
            }
        }
        // If its Node object agrees, the address is configured elsewhere, as before.
        snapshot.policies.remove(&"evil".parse().unwrap());
        snapshot.nodes.get_mut(&node).unwrap().addresses.insert(claimed);
        let plan = settle(&snapshot, &health, &honest);
        assert_eq!(plan.egress_ips.get(&claimed).and_then(|ip| ip.owner.clone()), None);
    }
}

/// docs/failures.md: claims. Of two nodes that claim an address, the one whose Node object agrees has it.
#[test]
fn claims_of_a_node_do_not_count_against_a_node_object() {
    let (mut snapshot, health) = cluster(2, 1);
    let address = v4(7, 0, 1);
    let any = gateway(Selector::label("gateway", "yes"), AddressSource::Interface("eth1".into()));
    add_policy(&mut snapshot, policy("own", Source::Gateways(vec![any])));
    for node in ["gw0", "gw1"] {
        snapshot.nodes.get_mut(&node.into()).unwrap().report = with_address(address);
    }
    snapshot.nodes.get_mut(&"gw1".into()).unwrap().addresses.insert(address);
    assert_eq!(owners(&settle(&snapshot, &health, &Plan::default()))[&address], "gw1".into());
}

#[test]
fn an_owner_over_its_limit_gives_up_what_nobody_else_can_take() {
    let (mut snapshot, mut health) = cluster(2, 1);
    add_pools(&mut snapshot, &[4]);
    let before = settle(&snapshot, &health, &Plan::default());
    health.nodes.insert("gw0".into(), unproven());
    health.nodes.insert("gw1".into(), unproven());
    snapshot.max_egress_ips = Some(1);
    let after = settle(&snapshot, &health, &before);
    let homeless: Vec<OwnerReason> =
        after.egress_ips.values().filter(|ip| ip.owner.is_none()).map(|ip| ip.reason).collect();
    assert_eq!(homeless, [OwnerReason::NoGatewayReady; 2]);
}
