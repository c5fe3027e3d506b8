//! Tests previews against the planner's results for both clusters and against an examination of each pod and destination.

use std::collections::BTreeSet;
use std::net::IpAddr;

use proptest::prelude::*;

use super::classes::winner;
use crate::health::Health;
use crate::model::*;
use crate::plan::diff::Change;
use crate::plan::preview::{Fate, LiveFlow, PolicyChangeKind, Preview, Side, preview, settled};
use crate::plan::select::selecting;
use crate::plan::{ConditionKind, Plan};
use crate::testing::world::*;

fn compare(before: &Snapshot, after: &Snapshot, health: &Health, flows: &[LiveFlow]) -> Preview {
    let previous = settled(before, health, &Plan::default());
    let planned = settled(after, health, &previous);
    preview(Side { snapshot: before, plan: &previous }, Side { snapshot: after, plan: &planned }, flows)
}

fn web() -> (Snapshot, Health) {
    let (mut snapshot, health) = cluster(3, 2);
    add_policy(&mut snapshot, policy("web", Source::Pools(vec![request("public", 2)])));
    (snapshot, health)
}

fn flow(pod: &str, remote: &str, tcp: bool, egress: IpAddr) -> LiveFlow {
    LiveFlow { pod: EndpointId::new("default", pod, pod), remote: ip(remote), tcp, egress }
}

fn id(name: &str) -> PolicyId {
    PolicyId::new(PolicyKind::Native, name)
}

#[test]
fn a_new_policy_takes_its_destination_from_an_older_one() {
    let (before, health) = web();
    let mut after = before.clone();
    let narrow = policy("mail", Source::Pools(vec![request("public", 1)]));
    add_policy(&mut after, Policy { destinations: vec!["192.0.2.0/24".parse().unwrap()], created: 9, ..narrow });
    let flows = [
        flow("pod0", "192.0.2.7", true, v4(0, 0, 1)),
        flow("pod0", "192.0.2.7", false, v4(0, 0, 1)),
        flow("pod1", "203.0.113.7", true, v4(0, 0, 1)),
    ];
    let found = compare(&before, &after, &health, &flows);
    let [change] = &found.policies[..] else { panic!("{found:?}") };
    assert_eq!((&change.policy, change.kind, change.pods), (&id("mail"), PolicyChangeKind::Added, (0, 2)));
    assert_eq!(change.gained, BTreeSet::from([v4(0, 0, 3)]));
    let [steering] = &found.steering[..] else { panic!("{found:?}") };
    assert_eq!((steering.pods.len(), &steering.from, &steering.to), (2, &Some(id("web")), &Some(id("mail"))));
    assert_eq!(found.flows, [(0, Fate::Breaks), (1, Fate::Restarts(Some(id("mail"))))]);
    assert!(found.changes.iter().any(|change| matches!(change, Change::Added { address } if *address == v4(0, 0, 3))));
    assert!(found.conflicts.is_empty(), "{found:?}");
}

#[test]
fn a_policy_that_comes_second_is_a_conflict() {
    let (before, health) = web();
    let mut after = before.clone();
    add_policy(&mut after, Policy { created: 9, ..policy("late", Source::Pools(vec![request("public", 1)])) });
    let found = compare(&before, &after, &health, &[]);
    let [conflict] = &found.conflicts[..] else { panic!("{found:?}") };
    assert_eq!((&conflict.policy, &conflict.winner), (&id("late"), &id("web")));
    assert!(found.steering.is_empty(), "{found:?}");
    assert!(compare(&after, &after, &health, &[]).is_empty());
}

#[test]
fn flows_of_an_egress_ip_move_with_its_gateway_and_are_dropped_without_one() {
    let (before, health) = web();
    let planned = settled(&before, &health, &Plan::default());
    let owner = |plan: &Plan| plan.egress_ips[&v4(0, 0, 1)].owner.clone();
    let mut after = before.clone();
    let gateway = owner(&planned).unwrap();
    after.nodes.get_mut(&gateway).unwrap().draining = true;
    let flows = [flow("pod0", "192.0.2.7", true, v4(0, 0, 1))];
    let found = compare(&before, &after, &health, &flows);
    let [(0, Fate::Moves { from, to })] = &found.flows[..] else { panic!("{found:?}") };
    assert_eq!(from.as_ref(), Some(&gateway));
    assert_ne!(*to, gateway);

    // A selector that selects no node: the address stays, but its flows have no gateway.
    let mut after = before.clone();
    after.pools.values_mut().for_each(|pool| pool.nodes = Selector::label("no", "such"));
    let found = compare(&before, &after, &health, &flows);
    assert_eq!(found.flows, [(0, Fate::Dropped)]);
    let not_ready = |change: &Change| matches!(change, Change::Condition { kind: ConditionKind::Ready, condition, .. } if !condition.holds);
    assert!(found.changes.iter().any(not_ready), "{found:?}");
}

#[test]
fn a_removed_policy_breaks_connections_and_lets_the_rest_go() {
    let (before, health) = web();
    let after = Snapshot { policies: Default::default(), ..before.clone() };
    let flows = [true, false].map(|tcp| flow("pod0", "192.0.2.7", tcp, v4(0, 0, 1)));
    let found = compare(&before, &after, &health, &flows);
    assert_eq!(found.flows, [(0, Fate::Breaks), (1, Fate::Restarts(None))]);
    assert_eq!((found.steering[0].pods.len(), &found.steering[0].to), (2, &None));
    assert_eq!(found.policies[0].kind, PolicyChangeKind::Removed);
}

#[test]
fn unused_gateways_are_assumed_to_answer() {
    let (before, mut health) = cluster(2, 1);
    health.nodes.clear();
    let mut after = before.clone();
    add_policy(&mut after, policy("web", Source::Pools(vec![request("public", 2)])));
    let found = compare(&before, &after, &health, &[]);
    let owned = found.changes.iter().filter(|change| matches!(change, Change::Moved { to: Some(_), .. }));
    assert_eq!(owned.count(), 2, "{found:?}");
}

/// Returns the policy that steers a destination for a pod, by examining every policy.
fn steered(snapshot: &Snapshot, endpoint: &Endpoint, remote: IpAddr) -> Option<PolicyId> {
    let none = Labels::new();
    let namespace = snapshot.namespaces.get(&endpoint.id.namespace).unwrap_or(&none);
    let node = snapshot.nodes.get(&endpoint.node).map_or(&none, |node| &node.labels);
    let class = selecting(snapshot.policies.values(), &endpoint.labels, namespace, node);
    winner(&class.into_iter().map(|id| (id.clone(), snapshot.policies[&id].clone())).collect(), remote)
}

proptest! {
    #[test]
    fn each_pod_and_destination_that_changes_is_named_and_no_other(
        world in arbitrary_cluster(),
        other in arbitrary_cluster(),
        bits in proptest::collection::vec(any::<[u8; 4]>(), 8),
    ) {
        let after = Snapshot { policies: other.snapshot.policies, ..world.snapshot.clone() };
        let found = compare(&world.snapshot, &after, &world.health, &[]);
        let corners = ["10.1.0.1", "10.0.0.1", "10.200.0.1", "192.0.2.1", "192.0.2.200", "2001:db8::1", "2a00::1"];
        let remotes = corners.iter().map(|text| ip(text)).chain(bits.into_iter().map(IpAddr::from));
        for remote in remotes {
            for endpoint in world.snapshot.endpoints.values() {
                let was = steered(&world.snapshot, endpoint, remote);
                let is = steered(&after, endpoint, remote);
                let named = |part: &&crate::plan::preview::Steering| {
                    part.pods.contains(&endpoint.id)
                        && part.destination.contains(&remote)
                        && !part.but.iter().any(|net| net.contains(&remote))
                };
                let said: Vec<_> =
                    found.steering.iter().filter(named).map(|part| (part.from.clone(), part.to.clone())).collect();
                let expected = if was == is { vec![] } else { vec![(was, is)] };
                prop_assert_eq!(said, expected, "{} to {}", endpoint.id, remote);
            }
        }
    }

    #[test]
    fn a_preview_of_no_change_is_empty(world in arbitrary_cluster()) {
        let plan = settled(&world.snapshot, &world.health, &Plan::default());
        let side = Side { snapshot: &world.snapshot, plan: &plan };
        prop_assert!(preview(side, side, &[]).is_empty());
    }
}
