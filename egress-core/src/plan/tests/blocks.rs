//! Tests of leases of port blocks.

use std::collections::BTreeMap;
use std::net::IpAddr;

use egress_common::port_block::COUNT as BLOCKS;
use proptest::prelude::*;

use crate::health::{Health, NodeHealth};
use crate::model::*;
use crate::plan::blocks::FIXED_BLOCKS;
use crate::plan::{BlockState, Plan, plan};
use crate::testing::world::*;

fn leased(plan: &Plan, address: IpAddr) -> BTreeMap<NodeName, usize> {
    let mut counts = BTreeMap::new();
    for lease in plan.blocks.get(&address).into_iter().flat_map(BTreeMap::values) {
        *counts.entry(lease.node.clone()).or_default() += usize::from(lease.state == BlockState::Leased);
    }
    counts
}

fn report<'a>(snapshot: &'a mut Snapshot, node: &str) -> &'a mut NodeReport {
    snapshot.nodes.get_mut(&node.into()).unwrap().report.get_or_insert_default()
}

fn public(count: u32, workers: usize) -> (Snapshot, Health) {
    let (mut snapshot, health) = cluster(2, workers);
    add_policy(&mut snapshot, policy("web", Source::Pools(vec![request("public", count)])));
    (snapshot, health)
}

const IP: [u8; 3] = [0, 0, 1];

fn first_ip() -> IpAddr {
    v4(IP[0], IP[1], IP[2])
}

/// Checks that no block changes its holder unless the holder gave it back or is gone.
pub fn check_holders(snapshot: &Snapshot, health: &Health, before: &Plan, after: &Plan) -> Result<(), TestCaseError> {
    for (address, blocks) in &before.blocks {
        for (number, old) in blocks {
            let new = after.blocks.get(address).and_then(|blocks| blocks.get(number));
            if new.is_some_and(|new| new.node == old.node) {
                continue;
            }
            let holder = snapshot.nodes.get(&old.node);
            let report = holder.and_then(|node| node.report.as_ref());
            let gave_back = report.is_some_and(|r| {
                r.own_lease_revision >= old.revision
                    && r.demand.get(address).is_some_and(|d| d.released.contains(number))
            });
            let gone = holder.is_none() && health.of(&old.node).gone;
            prop_assert!(gave_back || gone, "block {} of {} was taken from {}", number, address, old.node);
        }
    }
    Ok(())
}

/// Checks that grants of this round carry its revision, which is higher than all before, and go to nodes with selected pods.
pub fn check_grants(snapshot: &Snapshot, before: &Plan, after: &Plan) -> Result<(), TestCaseError> {
    let mut granted = false;
    for (address, blocks) in &after.blocks {
        for (number, new) in blocks {
            let old = before.blocks.get(address).and_then(|blocks| blocks.get(number));
            if old.is_some_and(|old| (&old.node, old.revision) == (&new.node, new.revision)) {
                continue;
            }
            granted = true;
            prop_assert_eq!(new.revision, before.lease_revision + 1);
            let ip = &after.egress_ips[address];
            let is_source = snapshot.endpoints.values().any(|endpoint| {
                let none = Labels::new();
                let node = snapshot.nodes.get(&endpoint.node).map_or(&none, |node| &node.labels);
                let namespace = snapshot.namespaces.get(&endpoint.id.namespace).unwrap_or(&none);
                endpoint.node == new.node
                    && ip.users.keys().any(|user| snapshot.policies[user].selects(&endpoint.labels, namespace, node))
            });
            prop_assert!(is_source, "{} has no endpoint that uses {}", new.node, address);
            if ip.fixed {
                let owner = &snapshot.nodes[ip.owner.as_ref().unwrap()];
                let occupied = &owner.report.as_ref().unwrap().occupied_blocks;
                prop_assert!(*number < FIXED_BLOCKS && !occupied.contains(number));
            }
            prop_assert!(*number < BLOCKS);
        }
    }
    prop_assert_eq!(after.lease_revision, before.lease_revision + u64::from(granted));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn nodes_that_arrive_together_get_equal_shares_of_half_the_blocks(workers in 1usize..60, count in 1u32..4) {
        let (snapshot, health) = public(count, workers);
        let plan = plan(&snapshot, &health, &Plan::default());
        for address in plan.egress_ips.keys() {
            let leased = leased(&plan, *address);
            prop_assert_eq!(leased.len(), workers);
            prop_assert!(leased.values().all(|blocks| *blocks == usize::from(BLOCKS) / 2 / workers));
        }
    }

    #[test]
    fn leases_change_holders_only_after_a_release_or_loss(steps in prop::collection::vec((0usize..6, 0usize..7, 0u16..1008), 1..12)) {
        let (mut snapshot, mut health) = public(2, 4);
        let mut before = Plan::default();
        for (n, what, block) in steps {
            let (name, pod) = (format!("w{n}"), EndpointId::new("default", &format!("pod{n}"), &format!("pod{n}")));
            let is_there = snapshot.nodes.contains_key(&name.as_str().into());
            match what {
                0 => add_pod(&mut snapshot, &format!("pod{n}"), &name, Labels::new()),
                1 => { snapshot.endpoints.remove(&pod); }
                2 => { snapshot.nodes.remove(&name.as_str().into()); }
                3 if !is_there => { health.nodes.insert(name.as_str().into(), NodeHealth { gone: true, ..Default::default() }); }
                3 | 4 if !is_there => {
                    let node = node(&name, Labels::new());
                    snapshot.nodes.insert(node.name.clone(), node);
                    health.nodes.remove(&name.as_str().into());
                }
                3 | 4 => {
                    let known = before.lease_revision;
                    let report = report(&mut snapshot, &name);
                    report.own_lease_revision = known;
                    let demand = report.demand.entry(first_ip()).or_default();
                    demand.want = u32::from(block) / 2;
                    demand.released.insert(block);
                }
                5 => add_policy(&mut snapshot, policy("web", Source::Pools(vec![request("public", u32::from(block) % 3 + 1)]))),
                _ => { snapshot.policies.clear(); }
            }
            let after = plan(&snapshot, &health, &before);
            prop_assert_eq!(&plan(&snapshot, &health, &after), &after, "again");
            check_holders(&snapshot, &health, &before, &after)?;
            check_grants(&snapshot, &before, &after)?;
            before = after;
        }
    }

    #[test]
    fn blocks_that_the_node_comes_to_use_itself_are_drained_and_come_back(steps in prop::collection::vec((0u8..3, 0u16..24), 1..16)) {
        let (mut snapshot, health) = own_address();
        let mut before = plan(&snapshot, &health, &Plan::default());
        for (what, block) in steps {
            let known = before.lease_revision;
            let occupied = &mut report(&mut snapshot, "gw0").occupied_blocks;
            match what {
                0 => { occupied.insert(block); }
                1 => { occupied.remove(&block); }
                _ => {
                    let report = report(&mut snapshot, "w0");
                    report.own_lease_revision = known;
                    let demand = report.demand.entry(ip(OWN_ADDRESS)).or_default();
                    demand.released = [block].into();
                    demand.want = u32::from(block);
                }
            }
            let after = plan(&snapshot, &health, &before);
            prop_assert_eq!(&plan(&snapshot, &health, &after), &after, "again");
            check_holders(&snapshot, &health, &before, &after)?;
            check_grants(&snapshot, &before, &after)?;
            let occupied = &report(&mut snapshot, "gw0").occupied_blocks;
            for (number, lease) in &after.blocks[&ip(OWN_ADDRESS)] {
                prop_assert!(lease.state != BlockState::Leased || !occupied.contains(number), "{number} is in use by the node");
            }
            before = after;
        }
    }
}

const OWN_ADDRESS: &str = "198.51.100.7";

/// Returns a cluster with a policy by the address of gw0, used by w0.
fn own_address() -> (Snapshot, Health) {
    let (mut snapshot, health) = cluster(1, 1);
    let address =
        InterfaceAddress { interface: "eth0".into(), net: "198.51.100.7/24".parse().unwrap(), default_route: true };
    *report(&mut snapshot, "gw0") = NodeReport { addresses: [address].into(), ..Default::default() };
    let all = Selector::label("gateway", "yes");
    add_policy(&mut snapshot, policy("web", Source::Gateways(vec![gateway(all, AddressSource::DefaultRoute)])));
    (snapshot, health)
}

#[test]
fn a_block_that_the_node_came_to_use_is_leased_again_when_it_no_longer_does() {
    let (mut snapshot, health) = own_address();
    let first = plan(&snapshot, &health, &Plan::default());
    let state = |plan: &Plan| plan.blocks[&ip(OWN_ADDRESS)].get(&5).map(|lease| (lease.state, lease.revision));
    assert_eq!(state(&first), Some((BlockState::Leased, 1)));
    report(&mut snapshot, "gw0").occupied_blocks.insert(5);
    let second = plan(&snapshot, &health, &first);
    assert_eq!(state(&second), Some((BlockState::Quarantined, 1)), "its flows continue");
    // Once the block is idle.
    report(&mut snapshot, "w0").own_lease_revision = 1;
    let demand = Demand { want: 400, released: [5].into() };
    report(&mut snapshot, "w0").demand.insert(ip(OWN_ADDRESS), demand);
    let third = plan(&snapshot, &health, &second);
    assert_eq!((state(&third), third.lease_revision), (None, 2), "others are leased");
    report(&mut snapshot, "gw0").occupied_blocks.clear();
    let demand = Demand { want: 423, ..Default::default() };
    report(&mut snapshot, "w0").demand.insert(ip(OWN_ADDRESS), demand);
    assert_eq!(state(&plan(&snapshot, &health, &third)), Some((BlockState::Leased, 3)));
}

#[test]
fn a_newcomer_gets_its_share_of_what_is_left() {
    let (mut snapshot, health) = public(1, 1);
    let mut previous = Plan::default();
    let mut seen = Vec::new();
    for n in 1..=6 {
        previous = plan(&snapshot, &health, &previous);
        seen.push(leased(&previous, first_ip())[&format!("w{}", n - 1).as_str().into()]);
        let node = node(&format!("w{n}"), Labels::new());
        snapshot.nodes.insert(node.name.clone(), node);
        add_pod(&mut snapshot, &format!("pod{n}"), &format!("w{n}"), Labels::new());
    }
    assert_eq!(seen, [504, 252, 126, 63, 31, 16]);
}

#[test]
fn in_a_large_cluster_every_node_has_a_block_of_some_egress_ip() {
    let (snapshot, health) = public(4, 1500);
    let plan = plan(&snapshot, &health, &Plan::default());
    let mut of_node: BTreeMap<NodeName, usize> = BTreeMap::new();
    for address in plan.egress_ips.keys() {
        let leased = leased(&plan, *address);
        assert!(leased.values().sum::<usize>() <= usize::from(BLOCKS) / 2, "half is kept");
        leased.into_iter().for_each(|(node, blocks)| *of_node.entry(node).or_default() += blocks);
    }
    assert_eq!(of_node.len(), 1500);
    assert!(of_node.values().all(|blocks| (1..=2).contains(blocks)), "{of_node:?}");
}

#[test]
fn as_many_nodes_as_blocks_get_one_each() {
    for workers in [504, 505, 1008] {
        let (snapshot, health) = public(2, workers);
        let plan = plan(&snapshot, &health, &Plan::default());
        for (address, ip) in &plan.egress_ips {
            assert_eq!(leased(&plan, *address).len(), workers);
            assert!(ip.share == 1 && !ip.starved);
        }
    }
}

#[test]
fn a_node_that_arrives_when_all_is_leased_waits_until_blocks_are_returned() {
    let (mut snapshot, health) = public(1, 1);
    report(&mut snapshot, "w0").demand.insert(first_ip(), Demand { want: 1000, ..Default::default() });
    let mut previous = plan(&snapshot, &health, &Plan::default());
    for n in 1..9 {
        let node = node(&format!("w{n}"), Labels::new());
        snapshot.nodes.insert(node.name.clone(), node);
        add_pod(&mut snapshot, &format!("pod{n}"), &format!("w{n}"), Labels::new());
        previous = plan(&snapshot, &health, &previous);
    }
    let ip = &previous.egress_ips[&first_ip()];
    assert_eq!((ip.share, ip.scarce, ip.starved), (56, true, true));
    let report = report(&mut snapshot, "w0");
    report.own_lease_revision = previous.lease_revision;
    let one = *previous.blocks[&first_ip()].iter().find(|(_, lease)| lease.node == "w0".into()).unwrap().0;
    report.demand.get_mut(&first_ip()).unwrap().released.insert(one);
    let after = plan(&snapshot, &health, &previous);
    assert_eq!(after.blocks[&first_ip()][&one].node, "w8".into());
    let ip = &after.egress_ips[&first_ip()];
    assert_eq!((ip.scarce, ip.starved), (true, false), "w0 wants more, but has some");
}

#[test]
fn demand_is_served_fairly_and_a_reserve_remains() {
    let (mut snapshot, health) = public(1, 2);
    let first = plan(&snapshot, &health, &Plan::default());
    report(&mut snapshot, "w0").demand.insert(first_ip(), Demand { want: 300, ..Default::default() });
    let second = plan(&snapshot, &health, &first);
    assert_eq!(leased(&second, first_ip()), [("w0".into(), 300), ("w1".into(), 252)].into());
    assert!(!second.egress_ips[&first_ip()].scarce);
    report(&mut snapshot, "w0").demand.insert(first_ip(), Demand { want: 1000, ..Default::default() });
    report(&mut snapshot, "w1").demand.insert(first_ip(), Demand { want: 1000, ..Default::default() });
    let third = plan(&snapshot, &health, &second);
    let now = leased(&third, first_ip());
    assert_eq!(now.values().sum::<usize>(), usize::from(BLOCKS) - usize::from(BLOCKS) / 16);
    assert!(now.values().max().unwrap() - now.values().min().unwrap() <= 1, "{now:?}");
    assert!(third.egress_ips[&first_ip()].scarce);
}

#[test]
fn a_stale_release_does_not_end_a_newer_lease() {
    let (mut snapshot, health) = public(1, 1);
    let first = plan(&snapshot, &health, &Plan::default());
    let mine: Vec<u16> = first.blocks[&first_ip()].keys().copied().collect();
    let report = report(&mut snapshot, "w0");
    report.own_lease_revision = first.lease_revision;
    report.demand.insert(first_ip(), Demand { want: 0, released: mine.iter().copied().collect() });
    let second = plan(&snapshot, &health, &first);
    assert_eq!(second.lease_revision, 2, "it has pods, so it gets blocks again");
    assert_eq!(plan(&snapshot, &health, &second), second, "which the old report does not give back");
}

#[test]
fn blocks_of_a_vanished_node_are_quarantined_and_then_free() {
    let (mut snapshot, mut health) = public(1, 2);
    let first = plan(&snapshot, &health, &Plan::default());
    let old = snapshot.nodes.remove(&"w0".into()).unwrap();
    let second = plan(&snapshot, &health, &first);
    assert_eq!(leased(&second, first_ip())[&"w0".into()], 0);
    assert_eq!(second.blocks[&first_ip()].len(), first.blocks[&first_ip()].len());
    let mut back = snapshot.clone();
    back.nodes.insert(old.name.clone(), old);
    let third = plan(&back, &health, &second);
    assert_eq!(leased(&third, first_ip())[&"w0".into()], 252);
    assert!(
        third.blocks[&first_ip()].values().filter(|l| l.node == "w0".into()).all(|l| l.revision == 2),
        "leased anew"
    );
    health.nodes.insert("w0".into(), NodeHealth { gone: true, ..Default::default() });
    assert!(!leased(&plan(&snapshot, &health, &second), first_ip()).contains_key(&"w0".into()));
}

#[test]
fn blocks_of_a_dropped_egress_ip_are_not_leased_to_others() {
    let (mut snapshot, health) = public(1, 2);
    let first = plan(&snapshot, &health, &Plan::default());
    snapshot.policies.clear();
    let second = plan(&snapshot, &health, &first);
    assert!(second.egress_ips.is_empty());
    assert!(second.blocks[&first_ip()].values().all(|lease| lease.state == BlockState::Quarantined));
    let given_back: Vec<u16> =
        second.blocks[&first_ip()].iter().filter(|(_, l)| l.node == "w0".into()).map(|(number, _)| *number).collect();
    let report = report(&mut snapshot, "w0");
    report.own_lease_revision = 1;
    report.demand.insert(first_ip(), Demand { want: 0, released: given_back.into_iter().collect() });
    let third = plan(&snapshot, &health, &second);
    assert_eq!(leased(&third, first_ip()).len(), 1);
}

#[test]
fn a_nodes_own_address_keeps_clear_of_the_nodes_ports() {
    let (mut snapshot, health) = own_address();
    report(&mut snapshot, "gw0").occupied_blocks = [0, 451, 700].into();
    report(&mut snapshot, "w0").demand.insert(ip(OWN_ADDRESS), Demand { want: 1000, ..Default::default() });
    let plan = plan(&snapshot, &health, &Plan::default());
    let blocks = &plan.blocks[&ip(OWN_ADDRESS)];
    assert!(!blocks.contains_key(&0) && !blocks.contains_key(&451));
    assert_eq!(blocks.keys().next_back(), Some(&422), "the last ones are kept for newcomers");
}
