//! Tests of `PerEndpoint`: balance and movement.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;

use crate::model::*;
use crate::plan::endpoints::{Seat, assign};
use crate::plan::plan;
use crate::testing::world::*;

fn seats(slots: &[bool]) -> Vec<Seat> {
    slots.iter().enumerate().filter(|(_, there)| **there).map(|(n, _)| (v4(0, 0, n as u8), 1)).collect()
}

fn ids(pods: &[bool]) -> Vec<EndpointId> {
    let there = pods.iter().enumerate().filter(|(_, there)| **there);
    there.map(|(n, _)| EndpointId::new("ns", &format!("pod{n:03}"), "uid")).collect()
}

type Assignment = BTreeMap<EndpointId, IpAddr>;

fn run(slots: &[Seat], ids: &[EndpointId], previous: &Assignment) -> Assignment {
    let ids: Vec<&EndpointId> = ids.iter().collect();
    let assigned = assign(slots, &ids, |id| previous.get(id).copied());
    assigned.into_iter().map(|(id, address)| (id.clone(), address)).collect()
}

fn counts(slots: &[Seat], assigned: &Assignment) -> Vec<usize> {
    slots.iter().map(|(address, _)| assigned.values().filter(|a| *a == address).count()).collect()
}

/// Returns the fewest moves that lead to counts that differ by at most one.
fn fewest_moves(slots: &[Seat], ids: &[EndpointId], previous: &Assignment) -> usize {
    let remaining: Assignment =
        previous.iter().filter(|(id, _)| ids.contains(id)).map(|(id, address)| (id.clone(), *address)).collect();
    let mut held = counts(slots, &remaining);
    held.sort_by(|a, b| b.cmp(a));
    let (low, extra) = (ids.len() / slots.len(), ids.len() % slots.len());
    let kept: usize = held.iter().enumerate().map(|(n, held)| (*held).min(low + usize::from(n < extra))).sum();
    remaining.len() - kept
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn balanced_with_the_fewest_moves(
        steps in prop::collection::vec((prop::collection::vec(any::<bool>(), 8), prop::collection::vec(prop::bool::weighted(0.7), 40)), 1..6),
    ) {
        let mut previous = Assignment::new();
        for (slots, pods) in steps {
            let (slots, ids) = (seats(&slots), ids(&pods));
            prop_assume!(!slots.is_empty());
            let now = run(&slots, &ids, &previous);
            prop_assert_eq!(now.len(), ids.len());
            let counts = counts(&slots, &now);
            prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{:?}", counts);
            let moved = ids.iter().filter(|id| previous.get(*id).is_some_and(|before| before != &now[*id])).count();
            prop_assert_eq!(moved, fewest_moves(&slots, &ids, &previous));
            prop_assert_eq!(&run(&slots, &ids, &now), &now, "again");
            previous = now;
        }
    }

    /// A controller whose first assignment was only partly written starts again from that part.
    #[test]
    fn a_first_assignment_that_was_written_in_part_is_completed_as_it_was(
        slots in 1u8..6, written in prop::collection::vec(any::<bool>(), 30),
    ) {
        let (slots, ids) = (seats(&vec![true; slots.into()]), ids(&[true; 30]));
        let whole = run(&slots, &ids, &Assignment::new());
        let in_turn = ids.iter().zip(slots.iter().cycle()).all(|(id, (address, _))| whole[id] == *address);
        prop_assert!(in_turn, "{:?}", whole);
        let part = whole.clone().into_iter().zip(&written).filter(|(_, written)| **written).map(|(one, _)| one).collect();
        prop_assert_eq!(run(&slots, &ids, &part), whole);
    }

    #[test]
    fn weights_are_respected_and_stable(
        weights in prop::collection::vec(1u32..6, 1..6),
        pods in prop::collection::vec(any::<bool>(), 60),
        later in prop::collection::vec(any::<bool>(), 60),
    ) {
        let slots: Vec<Seat> = weights.iter().enumerate().map(|(n, w)| (v4(0, 0, n as u8), *w)).collect();
        let first = run(&slots, &ids(&pods), &Assignment::new());
        let second = run(&slots, &ids(&later), &first);
        prop_assert_eq!(&run(&slots, &ids(&later), &second), &second, "again");
        let all: u32 = weights.iter().sum();
        for (count, weight) in counts(&slots, &second).iter().zip(&weights) {
            let exact = second.len() as f64 * f64::from(*weight) / f64::from(all);
            prop_assert!((*count as f64 - exact).abs() <= weights.len() as f64, "{} instead of {}", count, exact);
        }
    }
}

#[test]
fn the_first_assignment_is_the_sorted_round_robin() {
    let slots = seats(&[true; 3]);
    let ids = ids(&[true; 8]);
    let assigned = run(&slots, &ids, &Assignment::new());
    for (n, id) in ids.iter().enumerate() {
        assert_eq!(assigned[id], slots[n % 3].0, "{id}");
    }
}

#[test]
fn zones_and_local_nodes_restrict_the_choice() {
    let (mut snapshot, health) = cluster(4, 4);
    for (name, node) in &mut snapshot.nodes {
        let n: usize = name.as_str().trim_start_matches(char::is_alphabetic).parse().unwrap();
        node.zone = Some(["x", "y"][n % 2].to_owned());
    }
    add_pod(&mut snapshot, "on-gw0", "gw0", Labels::new());
    let source = Source::Pools(vec![request("public", 4)]);
    let wanted = Policy {
        distribution: Distribution::PerEndpoint,
        zone: ZoneMode::Require,
        prefer_local_node: true,
        ..policy("web", source)
    };
    add_policy(&mut snapshot, wanted.clone());
    let first = plan(&snapshot, &health, &Default::default());
    let owner = |address: IpAddr| first.egress_ips[&address].owner.clone().unwrap();
    for (id, assigned) in &first.assignments[&wanted.id] {
        let owner = owner(assigned.get(Family::V4).unwrap());
        let node = &snapshot.endpoints[id].node;
        assert_eq!(snapshot.nodes[&owner].zone, snapshot.nodes[node].zone, "{id}");
        assert!(node.as_str() != "gw0" || owner == *node, "{id} prefers its own node");
    }
}

#[test]
fn pods_leave_an_address_that_died_with_its_node() {
    let (mut snapshot, mut health) = cluster(2, 6);
    for (n, name) in ["gw0", "gw1"].into_iter().enumerate() {
        let net = ipnet::IpNet::new(v4(8, 0, n as u8), 24).unwrap();
        let addresses = [InterfaceAddress { interface: "eth0".into(), net, default_route: true }].into();
        snapshot.nodes.get_mut(&name.into()).unwrap().report = Some(NodeReport { addresses, ..Default::default() });
    }
    let own = gateway(Selector::label("gateway", "yes"), AddressSource::DefaultRoute);
    let web = Policy { distribution: Distribution::PerEndpoint, ..policy("web", Source::Gateways(vec![own])) };
    add_policy(&mut snapshot, web.clone());
    let counts =
        |plan: &crate::plan::Plan| plan.outcomes[&web.id].slots.iter().map(|s| s.endpoints).collect::<Vec<_>>();
    let first = plan(&snapshot, &health, &Default::default());
    assert_eq!(counts(&first), [3, 3]);
    health.nodes.insert("gw0".into(), lapsed());
    let second = plan(&snapshot, &health, &first);
    assert_eq!(counts(&second), [0, 6]);
    health.nodes.insert("gw1".into(), lapsed());
    assert_eq!(counts(&plan(&snapshot, &health, &second)), [3, 3], "none is better than the other");
}
