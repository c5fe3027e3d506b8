//! Tests which carriers packets go to and which nodes answer, in small clusters.

use super::{
    carriers::{Carriers, LINGER},
    view_tests::{FactsFixture, OWNED, carried_by, ip, report},
};
use crate::{health::ProbeState, model::*};
use std::{collections::BTreeMap, time::Duration};

#[test]
fn new_owner_is_used_once_it_knows_this_nodes_blocks() {
    let (mut world, mut carriers, moving) = (FactsFixture::new(), Carriers::default(), ip(OWNED[0].0));
    let mut used = |world: &FactsFixture, now: u64| {
        world.decide(&mut carriers, Duration::from_secs(now));
        world.view_with(&carriers).egress_ips[&moving].gateway.clone()
    };
    assert_eq!(used(&world, 0), Some("g1".into()));
    carried_by(&mut world, 0, &["g2", "g1"]);
    assert_eq!(used(&world, 1), Some("g1".into()), "g2 has not reported anything");
    report(&mut world, "g2").carries.insert(moving);
    world.known.insert("g2".into(), 4);
    assert_eq!(used(&world, 1), Some("g1".into()), "g2 does not know this node's block");
    world.known.insert("g2".into(), 5);
    assert_eq!(used(&world, 1), Some("g2".into()));
    world.known.insert("g2".into(), 4);
    world.probes.insert("g1".into(), ProbeState::Dead);
    assert_eq!(used(&world, 2), Some("g2".into()), "carriers that are dead are not waited for");
    carried_by(&mut world, 0, &["me", "g2"]);
    assert_eq!(used(&world, 3), Some("me".into()), "this node's tables are written as a whole");
    carried_by(&mut world, 0, &[]);
    assert_eq!(used(&world, 4), None, "no node is planned to carry it");
}

#[test]
fn packets_go_to_the_first_carrier_that_answers_and_is_able() {
    let (mut world, moving) = (FactsFixture::new(), ip(OWNED[0].0));
    carried_by(&mut world, 0, &["g1", "g2", "me"]);
    report(&mut world, "g2").carries.insert(moving);
    let used = |world: &FactsFixture| world.view().egress_ips[&moving].gateway.clone().unwrap();
    for (g1, g2, able, expected) in [
        (ProbeState::Unknown, ProbeState::Alive, true, "g1"),
        (ProbeState::Alive, ProbeState::Alive, true, "g1"),
        (ProbeState::Unable, ProbeState::Alive, true, "g2"),
        (ProbeState::Dead, ProbeState::Alive, true, "g2"),
        (ProbeState::Dead, ProbeState::Dead, true, "me"),
        (ProbeState::Dead, ProbeState::Unable, false, "g2"),
        (ProbeState::Dead, ProbeState::Dead, false, "me"),
    ] {
        world.probes = [("g1".into(), g1), ("g2".into(), g2)].into();
        world.able = able;
        assert_eq!(used(&world), expected.into(), "{g1:?} {g2:?} {able}");
    }
}

#[test]
fn the_first_able_carrier_answers_until_an_earlier_one_recovers() {
    let (mut world, mut carriers, moving) = (FactsFixture::new(), Carriers::default(), ip(OWNED[0].0));
    carried_by(&mut world, 0, &["g1", "me", "g2"]);
    report(&mut world, "g2").carries.insert(moving);
    let mut answers = |world: &FactsFixture| {
        world.decide(&mut carriers, Duration::ZERO);
        let view = world.view_with(&carriers);
        let e = &view.egress_ips[&moving];
        assert!(e.forwards && e.interface.is_some(), "all carriers forward");
        assert_eq!(e.silent, !carriers.answers(moving));
        !e.silent
    };
    let g1 = |world: &mut FactsFixture, state| {
        world.probes.insert("g1".into(), state);
    };
    assert!(!answers(&world), "nothing is known of g1");
    g1(&mut world, ProbeState::Dead);
    assert!(answers(&world));
    world.probes.remove(&NodeName::from("g1"));
    g1(&mut world, ProbeState::Unknown);
    assert!(answers(&world), "g1 has to answer before this node yields");
    g1(&mut world, ProbeState::Alive);
    report(&mut world, "g1").carries.clear();
    assert!(answers(&world), "it has restarted, and its tables are empty");
    report(&mut world, "g1").carries.insert(moving);
    assert!(!answers(&world));
    g1(&mut world, ProbeState::Unable);
    assert!(answers(&world));
    world.able = false;
    assert!(!answers(&world));
    // The plan puts this node first, and then last.
    (world.able, world.probes) =
        (true, BTreeMap::from([("g1".into(), ProbeState::Alive), ("g2".into(), ProbeState::Alive)]));
    carried_by(&mut world, 0, &["me", "g1", "g2"]);
    assert!(answers(&world));
    carried_by(&mut world, 0, &["g2", "me"]);
    report(&mut world, "g2").carries.clear();
    assert!(answers(&world), "g2 does not carry it yet");
    report(&mut world, "g2").carries.insert(moving);
    assert!(!answers(&world));
}

#[test]
fn restarted_agent_keeps_answering_until_an_earlier_carrier_is_heard() {
    let (mut world, moving) = (FactsFixture::new(), ip(OWNED[0].0));
    carried_by(&mut world, 0, &["g1", "me"]);
    world.probes.insert("g1".into(), ProbeState::Unknown);
    let mut carriers = Carriers::recover(&[(moving, true)].into(), &[].into());
    world.decide(&mut carriers, Duration::ZERO);
    assert!(carriers.answers(moving));
    world.probes.insert("g1".into(), ProbeState::Alive);
    world.decide(&mut carriers, Duration::ZERO);
    assert!(!carriers.answers(moving));
}

#[test]
fn former_carrier_is_silent_and_forwards_until_source_nodes_know() {
    let (mut world, mut carriers, moving) = (FactsFixture::new(), Carriers::default(), ip(OWNED[2].0));
    let mut own = |world: &FactsFixture, now: Duration| {
        world.decide(&mut carriers, now);
        let view = world.view_with(&carriers);
        let e = &view.egress_ips[&moving];
        (e.forwards, e.silent, e.interface.is_some())
    };
    assert_eq!(own(&world, Duration::ZERO), (true, false, true));
    carried_by(&mut world, 2, &["g2"]);
    report(&mut world, "me").carries.clear();
    assert_eq!(own(&world, Duration::ZERO), (true, true, true));
    assert_eq!(own(&world, LINGER - Duration::from_millis(1)), (true, true, true));
    assert_eq!(own(&world, LINGER), (false, true, false));
    carried_by(&mut world, 2, &["g2", "me"]);
    assert_eq!(own(&world, LINGER), (true, true, true));
}

#[test]
fn former_carrier_keeps_forwarding_when_no_carrier_is_left() {
    let (mut world, mut carriers, left) = (FactsFixture::new(), Carriers::default(), ip(OWNED[2].0));
    world.decide(&mut carriers, Duration::ZERO);
    for next in [&["g2"][..], &[]] {
        carried_by(&mut world, 2, next);
        world.decide(&mut carriers, Duration::ZERO);
        assert!(carriers.forwards(left), "source nodes may not have read that {next:?} carry it");
    }
}

#[test]
fn restarted_agent_forwards_carried_ips_until_source_nodes_know() {
    let (mut world, left) = (FactsFixture::new(), ip(OWNED[2].0));
    carried_by(&mut world, 2, &["g2"]);
    report(&mut world, "me").carries.clear();
    let mut carriers = Carriers::recover(&[(left, false)].into(), &[].into());
    world.decide(&mut carriers, Duration::ZERO);
    assert!(carriers.forwards(left) && !carriers.answers(left), "source nodes may not have read the change");
    world.decide(&mut carriers, LINGER);
    assert!(!carriers.forwards(left));
}

/// A node that is cut off from the API server cannot withdraw its report. When it returns, the plan may have it carry the address again,
/// and source nodes use it immediately.
#[test]
fn node_forwards_while_its_own_report_lists_the_egress_ip() {
    let (mut world, mut carriers, left) = (FactsFixture::new(), Carriers::default(), ip(OWNED[2].0));
    let mut forwards = |world: &FactsFixture, now: Duration| {
        world.decide(&mut carriers, now);
        carriers.forwards(left)
    };
    report(&mut world, "me").carries.insert(left);
    carried_by(&mut world, 2, &["g2"]);
    assert!(forwards(&world, Duration::ZERO), "also after a start of the machine");
    assert!(forwards(&world, 3 * LINGER));
    report(&mut world, "me").carries.clear();
    assert!(forwards(&world, 4 * LINGER - Duration::from_millis(1)), "source nodes may not have read it");
    assert!(!forwards(&world, 4 * LINGER));
}

#[test]
fn spread_flows_use_all_answering_carriers_and_blocks_that_all_of_them_know() {
    let (mut world, address) = (FactsFixture::new(), ip(OWNED[0].0));
    let id = PoolId::new(PoolKind::Native, "public");
    let mut pool = crate::testing::world::pool("public", address, address);
    pool.outbound = Outbound::Spread;
    world.snapshot.pools.insert(id.clone(), pool);
    carried_by(&mut world, 0, &["g1", "me", "g2"]);
    world.egress(0).pool = Some(id);
    world.policy().bandwidth = Some(Bandwidth { rate_bps: 300, burst_bytes: 30 });
    let spread = |world: &FactsFixture| {
        let e = world.view().egress_ips.remove(&address).unwrap();
        let names = e.spread.iter().map(|name| name.to_string()).collect::<Vec<_>>().join(" ");
        (names, e.limit.map(|limit| limit.rate_bps), e.blocks.len())
    };
    assert_eq!(spread(&world), ("g1 me".into(), Some(150), 1), "g2 does not carry it yet");
    report(&mut world, "g2").carries.insert(address);
    assert_eq!(spread(&world), ("g1 me g2".into(), Some(100), 1));
    world.known.insert("g2".into(), 4);
    assert_eq!(spread(&world).2, 0, "g2 would drop packets with a port of the block");
    world.probes.insert("g2".into(), ProbeState::Dead);
    assert_eq!(spread(&world), ("g1 me".into(), Some(150), 1));
    world.probes.insert("g1".into(), ProbeState::Dead);
    assert_eq!(spread(&world), (String::new(), Some(300), 1), "one is left");
}

#[test]
fn a_routed_egress_ip_has_routes_to_all_able_carriers_and_no_arp_answers() {
    let (mut world, address) = (FactsFixture::new(), ip(OWNED[0].0));
    let id = PoolId::new(PoolKind::Native, "public");
    carried_by(&mut world, 0, &["g1", "me"]);
    world.egress(0).pool = Some(id.clone());
    let mut look = |announce: Announce, able: bool, reported: bool| {
        let own = world.snapshot.nodes.get_mut(&NodeName::from("me")).unwrap().report.get_or_insert_default();
        own.carries = reported.then_some(address).into_iter().collect();
        let mut pool = crate::testing::world::pool("public", address, address);
        pool.announce = announce;
        world.snapshot.pools.insert(id.clone(), pool);
        world.able = able;
        // The first carrier is dead.
        world.probes.insert("g1".into(), ProbeState::Dead);
        let mut carriers = Carriers::default();
        world.decide(&mut carriers, Duration::ZERO);
        (carriers.answers(address), carriers.advertised().contains(&address), carriers.forwards(address))
    };
    assert_eq!(look(Announce::Arp, true, true), (true, false, true));
    assert_eq!(look(Announce::Route, true, true), (false, true, true));
    assert_eq!(look(Announce::Route, true, false), (false, false, true), "no node knows that it carries the address");
    assert_eq!(look(Announce::Route, false, true), (false, false, true));
    assert_eq!(look(Announce::None, true, true), (false, false, true));
}

#[test]
fn a_node_carries_nothing_until_it_knows_the_leases_of_all_nodes() {
    let (mut world, address) = (FactsFixture::new(), ip(OWNED[0].0));
    carried_by(&mut world, 0, &["me", "g1"]);
    for (partial, carries) in [(true, false), (false, true)] {
        world.partial = partial;
        let mut carriers = Carriers::default();
        world.decide(&mut carriers, Duration::ZERO);
        assert_eq!((carriers.carried().contains(&address), carriers.forwards(address)), (carries, carries));
        assert_eq!(carriers.answers(address), carries);
        let used = if carries { "me" } else { "g1" };
        assert_eq!(carriers.gateway(address), Some(&used.into()), "nor does it send through itself");
    }
    carried_by(&mut world, 0, &["me"]);
    for (partial, blocks) in [(true, 0), (false, 1)] {
        world.partial = partial;
        assert_eq!(world.view().egress_ips[&address].blocks.len(), blocks, "no other node carries it");
    }
}

#[test]
fn routed_egress_ip_uses_only_blocks_known_to_all_reply_carriers() {
    let (mut world, address) = (FactsFixture::new(), ip(OWNED[0].0));
    let id = PoolId::new(PoolKind::Native, "public");
    let pool = Pool { announce: Announce::Route, ..crate::testing::world::pool("public", address, address) };
    world.snapshot.pools.insert(id.clone(), pool);
    world.egress(0).pool = Some(id);
    carried_by(&mut world, 0, &["me", "g1"]);
    let blocks = |world: &FactsFixture| world.view().egress_ips[&address].blocks.len();
    // g1 is alive but lags behind. This node sends it nothing.
    report(&mut world, "g1").carries = [address].into();
    world.known.insert("g1".into(), 0);
    assert_eq!(blocks(&world), 0, "a node that has a route does not know the block");
    world.probes.insert("g1".into(), ProbeState::Dead);
    assert_eq!(blocks(&world), 1, "carriers that are dead are not waited for");
    world.probes.clear();
    world.snapshot.pools.values_mut().for_each(|pool| pool.announce = Announce::Arp);
    assert_eq!(blocks(&world), 1, "replies come through the carriers that answer");
    world.snapshot.pools.clear();
    world.egress(0).attachment.announce = Announce::Route;
    assert_eq!(blocks(&world), 0, "the egress IP's own setting counts if the pool is gone");
}
