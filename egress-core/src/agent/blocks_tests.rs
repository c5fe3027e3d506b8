//! Tests of the two-step release of blocks, over a simulation of planner and agents.

use super::{sim::PortLeaseSim, *};
use crate::{
    agent::{facts::Objects, ports::Used},
    model::Source,
    plan::{BlockLease, Plan},
    testing::world as cluster,
};
use proptest::prelude::*;
use std::sync::Arc;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_block_keeps_its_holder_while_it_is_in_use_or_usable(
        steps in prop::collection::vec((0usize..20, 0usize..2, any::<u16>()), 1..250)
    ) {
        let mut world = PortLeaseSim::new(1);
        let names: Vec<NodeName> = (0..2).map(|n| world.join(n)).collect();
        world.replan();
        let address = world.ips()[0];
        for (what, n, value) in steps {
            world.now += Duration::from_millis(u64::from(value % 8) * 30);
            let (name, now) = (&names[n], world.now);
            let agent = world.agents.get_mut(name).unwrap();
            match what {
                0..4 => {
                    agent.seen.clone_from(&world.plan);
                    agent.act(name, &world.snapshot, now, true);
                    world.deliver(name);
                }
                4 => agent.hear_of_others(name, &world.plan),
                5 | 6 => agent.scan(now),
                7 => agent.act(name, &world.snapshot, now, true),
                8 => agent.act(name, &world.snapshot, now, false),
                9 => world.deliver(name),
                10 | 11 => (0..value % 100).for_each(|i| agent.connect(address, value.wrapping_mul(i + 1))),
                12 => agent.flows.retain(|flow| flow.port % 3 != value % 3),
                13 => agent.restart(),
                14 => world.now += UNUSED_AFTER,
                15 => match value % 6 {
                    0 => world.remove_pod(n),
                    1 => world.snapshot.policies.clear(),
                    2 | 3 => cluster::add_policy(
                        &mut world.snapshot,
                        cluster::policy("web", Source::Pools(vec![cluster::request("public", 1)])),
                    ),
                    _ => world.pod(n),
                },
                _ => {
                    world.replan();
                    // Agents must behave correctly whatever shares they are told.
                    if let Some(e) = world.plan.egress_ips.get_mut(&address) {
                        (e.share, e.scarce, e.starved) = (u32::from(value % 50), value % 2 == 0, value % 3 == 0);
                    }
                }
            }
            world.check()?;
        }
    }
}

/// Lets nodes join one by one. Returns how many rounds the slowest of them took to get usable blocks of all egress IPs.
fn join_one_by_one(world: &mut PortLeaseSim, nodes: usize, mut meanwhile: impl FnMut(&mut PortLeaseSim)) -> usize {
    let mut slowest = 0;
    for n in 0..nodes {
        let name = world.join(n);
        world.replan();
        let mut rounds = 0;
        while world.ips().iter().any(|ip| world.agents[&name].usable(*ip) == 0) {
            assert!(rounds < 40, "{name} has no blocks");
            world.round();
            meanwhile(world);
            world.check().unwrap();
            rounds += 1;
        }
        slowest = slowest.max(rounds);
    }
    slowest
}

#[test]
fn forty_nodes_that_join_one_by_one_all_get_blocks() {
    let mut world = PortLeaseSim::new(2);
    // Retire, count, lease, write.
    assert!(join_one_by_one(&mut world, 40, |_| ()) <= 4);
    for ip in world.ips() {
        assert!(world.agents.values().all(|agent| agent.usable(ip) > 0), "every node keeps some");
        assert!(!world.plan.egress_ips[&ip].starved);
    }
}

#[test]
fn a_busy_node_makes_room_as_its_flows_end() {
    let mut world = PortLeaseSim::new(1);
    let mut n = 0u16;
    // The first node has two flows a block, and each lasts for a few rounds.
    join_one_by_one(&mut world, 40, |world| {
        let ip = world.ips()[0];
        let agent = world.agents.get_mut(&"w0".into()).unwrap();
        n = n.wrapping_add(1);
        agent.flows.retain(|flow| flow.port % 3 != n % 3);
        while agent.flows.len() < 1000 && agent.usable(ip) > 0 {
            n = n.wrapping_add(7919);
            agent.connect(ip, n);
        }
    });
    assert!(world.agents[&"w0".into()].flows.len() >= 1000, "it was never without a port");
}

#[test]
fn a_node_that_needs_many_blocks_shares_them_with_one_that_has_none() {
    let mut world = PortLeaseSim::new(1);
    world.join(0);
    (0..3).for_each(|_| world.round());
    let ip = world.ips()[0];
    let remote = ([203, 0, 113, 1].into(), 443, 6);
    let pod = |i: u16| IpAddr::from([10, 0, 0, (i % 8) as u8]);
    let ports = |count: u16| (0..count).map(move |i| Used { pod: pod(i), egress: ip, remote, port: 1024 + i });
    // The node wants all blocks, and has all except the last sixteenth.
    world.agents.get_mut(&"w0".into()).unwrap().flows = ports(60_000).collect();
    (0..5).for_each(|_| world.round());
    assert_eq!(world.agents[&"w0".into()].usable(ip), 945);
    world.agents.get_mut(&"w0".into()).unwrap().flows = ports(30_000).collect();
    join_one_by_one(&mut world, 20, |_| ());
    assert!(world.agents.values().all(|agent| agent.usable(ip) > 0));
}

#[test]
fn node_without_pods_gives_back_all_blocks_except_those_in_use() {
    let mut world = PortLeaseSim::new(1);
    world.join(0);
    (0..3).for_each(|_| world.round());
    let ip = world.ips()[0];
    world.agents.get_mut(&"w0".into()).unwrap().connect(ip, 7);
    world.remove_pod(0);
    world.round();
    assert_eq!(world.agents[&"w0".into()].usable(ip), 504, "it may have a pod again soon");
    (0..20).for_each(|_| world.round());
    assert_eq!(world.plan.blocks[&ip].len(), 1, "the flow's block stays");
    world.agents.get_mut(&"w0".into()).unwrap().flows.clear();
    (0..3).for_each(|_| world.round());
    assert!(world.plan.blocks.is_empty());
    world.pod(0);
    (0..3).for_each(|_| world.round());
    assert_eq!(world.agents[&"w0".into()].usable(ip), 504);
}

#[test]
fn a_retired_block_is_used_again_when_a_pod_comes_back() {
    let mut world = PortLeaseSim::new(1);
    world.join(0);
    (0..3).for_each(|_| world.round());
    let ip = world.ips()[0];
    (0..504).for_each(|n| world.agents.get_mut(&"w0".into()).unwrap().connect(ip, n));
    world.remove_pod(0);
    (0..20).for_each(|_| world.round());
    assert_eq!(world.agents[&"w0".into()].usable(ip), 0);
    world.pod(0);
    world.round();
    assert_eq!(world.agents[&"w0".into()].usable(ip), 504);
}

#[test]
fn release_covers_leases_up_to_the_reported_revision_only() {
    let (node, address) = (NodeName::from("n"), IpAddr::from([192, 0, 2, 1]));
    let lease = |revision| {
        let lease = BlockLease { node: node.clone(), revision, state: BlockState::Leased };
        Plan { blocks: [(address, [(0, lease)].into())].into(), ..Plan::default() }
    };
    let update = |withheld: &mut Withheld, revision, seconds| {
        let now = Duration::from_secs(seconds);
        let objects = Arc::new(Objects { plan: lease(revision), ..Objects::default() });
        withheld.update(&Facts { node: node.clone(), objects, counted: Some(now), now, ..Facts::default() });
    };
    let is_released = |withheld: &Withheld| withheld.released(address).is_some_and(|blocks| blocks.contains_key(&0));
    let mut withheld = Withheld::default();
    update(&mut withheld, 1, 0);
    update(&mut withheld, 1, UNUSED_AFTER.as_secs());
    assert!(withheld.contains(address, 0) && !is_released(&withheld), "not written yet");
    withheld.written(UNUSED_AFTER);
    update(&mut withheld, 1, UNUSED_AFTER.as_secs());
    assert!(!is_released(&withheld), "the count began too early");
    update(&mut withheld, 1, UNUSED_AFTER.as_secs() + 1);
    assert!(is_released(&withheld));
    withheld.publish(&node, &lease(1), 8);
    update(&mut withheld, 8, UNUSED_AFTER.as_secs() + 2);
    assert!(is_released(&withheld), "the controller takes the status to cover this lease, too");
    update(&mut withheld, 9, UNUSED_AFTER.as_secs() + 3);
    assert!(!is_released(&withheld));
}

/// Checks the requirements of port-ramp: the ramping node loses less than one in a hundred connections, its neighbours keep their blocks,
/// and a minute after the ramp ends the blocks are back. Ten source nodes share three egress IPs. One pod of one node goes from zero to
/// `rate` connections a second to one server, each port is in use for `hold`, and leases arrive `late`.
fn ramp(rate: u16, hold: Duration, late: Duration) {
    const STEP: Duration = Duration::from_millis(100);
    const SIZE: usize = egress_common::port_block::SIZE as usize;
    let steps = |time: Duration| (time.as_millis() / STEP.as_millis()) as usize;
    let mut world = PortLeaseSim::new(3);
    let names: Vec<NodeName> = (0..10).map(|n| world.join(n)).collect();
    (0..20).for_each(|_| world.round());
    world.late = steps(late);
    let ips = world.ips();
    let held =
        |world: &PortLeaseSim, node: &NodeName| ips.iter().map(|ip| world.agents[node].usable(*ip)).collect::<Vec<_>>();
    let before: Vec<Vec<usize>> = names.iter().map(|node| held(&world, node)).collect();
    let remote = ([203, 0, 113, 1].into(), 443, 6);
    let each = usize::from(rate) / steps(Duration::from_secs(1)) / ips.len();
    let (mut lost, mut opened, mut batches) = (0, 0, std::collections::VecDeque::new());
    for _ in 0..steps(3 * hold + Duration::from_secs(5)) {
        let agent = world.agents.get_mut(&names[0]).unwrap();
        let before = agent.flows.len();
        for ip in &ips {
            let taken: BTreeSet<u16> = agent.flows.iter().filter(|f| f.egress == *ip).map(|f| f.port).collect();
            // A pod has at most three quarters of the ports.
            let room = (agent.usable(*ip) * SIZE * 3 / 4).saturating_sub(taken.len());
            let ports = agent.tables[ip].iter().map(|block| egress_common::port_block::first_port(*block));
            let ports = ports.flat_map(|first| first..=first + (SIZE as u16 - 1));
            let free = ports.filter(|port| !taken.contains(port)).take(room.min(each));
            let pod = [10, 0, 0, 1].into();
            let new: Vec<Used> = free.map(|port| Used { pod, egress: *ip, remote, port }).collect();
            lost += each - new.len();
            opened += each;
            agent.flows.extend(new);
        }
        batches.push_back(agent.flows.len() - before);
        if batches.len() > steps(hold) {
            let over = batches.pop_front().unwrap_or(0);
            agent.flows.drain(..over);
        }
        world.round_after(STEP);
        world.check().unwrap();
    }
    assert!(lost * 100 < opened, "{lost} of {opened} connections found no port");
    for (node, before) in names.iter().zip(&before).skip(1) {
        assert_eq!(held(&world, node), *before, "its neighbours notice nothing");
    }
    world.agents.get_mut(&names[0]).unwrap().flows.clear();
    world.late = 1;
    (0..30).for_each(|_| world.round());
    for (ip, held) in ips.iter().zip(held(&world, &names[0])) {
        assert!(held <= 2 * world.plan.egress_ips[ip].share as usize, "{held} blocks of {ip} a minute later");
    }
    world.check().unwrap();
}

/// docs/failures.md: port-ramp.
#[test]
fn port_ramp_a_node_gets_ports_before_it_needs_them_and_gives_them_back() {
    ramp(10_000, Duration::from_secs(2), Duration::from_millis(300));
}

/// docs/failures.md: port-ramp, on a machine so busy that leases take a second.
#[test]
fn port_ramp_delayed_leases_arrive_in_time() {
    ramp(3_500, Duration::from_secs(4), Duration::from_secs(1));
}
