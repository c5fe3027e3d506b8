//! Tests what a host has besides the tables: interfaces, the shaper, routes.

use super::*;

#[test]
fn address_that_two_pods_claim_stays_at_its_previous_interface() {
    let (mine, other, address) = (31, 32, ip("10.1.0.7"));
    let mut world = FactsFixture::new();
    for index in [mine, other] {
        let link = Link { kind: LinkKind::Veth, peer_netns: Some(1), ..link(index, &format!("veth{index}")) };
        world.links.links.insert(index, link);
    }
    world.add(pod("victim", &["10.1.0.7"]));
    let place = |left: &BTreeMap<EndpointId, EndpointView>| {
        let mut shell = Shell::after(&world, Left { endpoints: left.clone(), ..Left::default() });
        shell.machine.handle_interfaces([(address, [mine, other].into())].into());
        let machine = shell.machine;
        (machine.facts().interfaces.get(&address).copied(), machine.outcome().errors.clone())
    };
    let (interface, told) = place(&BTreeMap::new());
    assert_eq!(interface, None, "either may be the pod");
    assert!(told.iter().any(|error| error.contains("10.1.0.7 behind veth31 and veth32")), "{told:?}");
    let id = pod("victim", &[]).id;
    let left = |index: u32| EndpointView { interfaces: [(address, index)].into(), ..EndpointView::default() };
    for index in [mine, other] {
        assert_eq!(place(&[(id.clone(), left(index))].into()).0, Some(index));
    }
    assert_eq!(place(&[(id, left(POD))].into()).0, None);
}

#[test]
fn the_shaper_exists_for_as_long_as_the_tables_lead_packets_into_it() {
    let mut world = FactsFixture::new();
    let mut shell = Shell::new(&world);
    let steps = |shell: &Shell| -> Vec<String> {
        let step = |(_, action): &(String, Action)| match action {
            Action::MakeShaper(wanted) => Some(format!("make {wanted}")),
            Action::Attach { shaper, .. } => Some(format!("attach {}", shaper.unwrap_or(0))),
            Action::Write { view, .. } => Some(format!("write {}", view.config.unwrap().shaper_ifindex)),
            _ => None,
        };
        shell.done.iter().filter_map(step).collect()
    };
    shell.run();
    assert_eq!(steps(&shell), ["attach 0", "write 0", "make false"]);
    let limit = Bandwidth { rate_bps: 1_000_000, burst_bytes: 10_000 };
    let limited =
        |world: &mut FactsFixture, limit| world.snapshot.policies.values_mut().for_each(|p| p.bandwidth = limit);
    limited(&mut world, Some(limit));
    shell.round(&world);
    assert_eq!(steps(&shell), ["make true", "attach 21", "write 20"]);
    limited(&mut world, None);
    shell.fails.insert("Write");
    shell.round(&world);
    assert_eq!(steps(&shell), ["attach 21", "write 0"], "the tables still use it");
    shell.fails.clear();
    shell.round(&world);
    assert_eq!(steps(&shell), ["attach 21", "write 0", "make false"]);
}

#[test]
fn routes_are_withdrawn_even_if_the_tables_cannot_be_written() {
    let (mut world, own) = (FactsFixture::new(), 2);
    let route = |world: &mut FactsFixture| world.egress(own).attachment.announce = Announce::Route;
    route(&mut world);
    let mut shell = Shell::new(&world);
    let advertised = |shell: &Shell| {
        let mut sets = shell.done.iter().filter_map(|(_, action)| match action {
            Action::Advertise(wanted) => Some(wanted.clone()),
            _ => None,
        });
        sets.next_back()
    };
    shell.fails.insert("Write");
    shell.run();
    assert_eq!(advertised(&shell), None, "the routes that an earlier agent left may be right");
    shell.fails.clear();
    shell.round(&world);
    let mine = BTreeSet::from([ip(OWNED[own].0)]);
    assert_eq!(advertised(&shell), Some(mine.clone()));
    // The uplink fails, and the tables cannot be written.
    shell.fails.insert("Write");
    carried_by(&mut world, own, &["g1"]);
    carried_by(&mut world, 0, &["me"]);
    shell.round(&world);
    assert_eq!(advertised(&shell), Some(BTreeSet::new()), "neither the old one nor a new one");
}
