//! Tests that each check one sentence of the design.

use crate::model::*;
use crate::plan::diff::{Change, diff};
use crate::plan::{ConditionKind, Plan, Reason, plan};
use crate::testing::world::*;

#[test]
fn a_policy_that_cannot_be_carried_out_disturbs_no_other() {
    let (mut snapshot, health) = cluster(3, 3);
    for n in 0..3 {
        add_policy(&mut snapshot, policy(&format!("good{n}"), Source::Pools(vec![request("public", 2)])));
    }
    let without = plan(&snapshot, &health, &Plan::default());
    let nobody = || Selector::label("no", "such");
    let used = v4(0, 0, 1);
    let bad = [
        policy("bad0", Source::Pools(vec![request("nowhere", 1)])),
        policy("bad1", Source::Gateways(vec![gateway(nobody(), AddressSource::DefaultRoute)])),
        policy("bad2", Source::Gateways(vec![gateway(nobody(), AddressSource::Ip(used))])),
        Policy { created: -1, ..policy("bad3", Source::Gateways(vec![gateway(nobody(), AddressSource::Ip(used))])) },
        Policy { destinations: Vec::new(), ..policy("bad4", Source::Pools(vec![request("public", 1)])) },
    ];
    for policy in bad {
        add_policy(&mut snapshot, policy);
    }
    let with = plan(&snapshot, &health, &without);
    assert_eq!(with.egress_ips, without.egress_ips);
    assert_eq!(with.blocks, without.blocks);
    for (policy, outcome) in &without.outcomes {
        assert_eq!(with.outcomes[policy].slots, outcome.slots);
        assert_eq!(with.outcomes[policy].conditions[&ConditionKind::Ready], outcome.conditions[&ConditionKind::Ready]);
    }
    for n in 0..4 {
        let bad = &with.outcomes[&format!("bad{n}").parse().unwrap()];
        assert!(!bad.conditions[&ConditionKind::Ready].holds, "bad{n}");
    }
}

#[test]
fn two_policies_share_an_address_that_floats_over_what_both_select() {
    let (mut snapshot, health) = cluster(3, 1);
    snapshot.nodes.get_mut(&"gw2".into()).unwrap().labels.insert("rack".into(), "2".into());
    let floating =
        |name: &str, nodes| policy(name, Source::Gateways(vec![gateway(nodes, AddressSource::Ip(v4(7, 0, 1)))]));
    add_policy(&mut snapshot, floating("a", Selector::label("gateway", "yes")));
    add_policy(&mut snapshot, floating("b", Selector::label("rack", "2")));
    add_policy(&mut snapshot, floating("c", Selector::new([("gateway".to_owned(), Requirement::DoesNotExist)])));
    let plan = plan(&snapshot, &health, &Plan::default());
    let shared = &plan.egress_ips[&v4(7, 0, 1)];
    assert_eq!(shared.owner, Some("gw2".into()));
    assert_eq!(shared.users.len(), 2);
    let c = &plan.outcomes[&"c".parse().unwrap()].conditions[&ConditionKind::Conflicting];
    assert_eq!((c.holds, c.reason), (true, Reason::SelectorsDisagree));
}

#[test]
fn zones_that_are_required_hold_the_owner() {
    let (mut snapshot, mut health) = cluster(4, 2);
    for (name, zone) in [("gw0", "x"), ("gw1", "x"), ("gw2", "y"), ("gw3", "y"), ("w0", "y"), ("w1", "y")] {
        snapshot.nodes.get_mut(&name.into()).unwrap().zone = Some(zone.into());
    }
    let web = Policy { zone: ZoneMode::Require, ..policy("web", Source::Pools(vec![request("public", 4)])) };
    add_policy(&mut snapshot, web.clone());
    let first = plan(&snapshot, &health, &Plan::default());
    assert!(first.outcomes[&web.id].slots.iter().all(|slot| slot.zone.as_deref() == Some("y")));
    for gone in ["gw2", "gw3"] {
        health.nodes.insert(gone.into(), lapsed());
    }
    let kept = plan(&snapshot, &health, &first);
    assert!(kept.outcomes[&web.id].slots.iter().all(|slot| slot.zone.as_deref() == Some("y")), "others are of no use");

    snapshot.nodes.get_mut(&"w1".into()).unwrap().zone = Some("z".into());
    let unserved = plan(&snapshot, &health, &first);
    let degraded = &unserved.outcomes[&web.id].conditions[&ConditionKind::Degraded];
    assert!(degraded.holds && degraded.message.contains("zone z"), "{}", degraded.message);
}

#[test]
fn conflicts_and_missing_families_are_said() {
    let (mut snapshot, health) = cluster(2, 1);
    let both = vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()];
    add_policy(&mut snapshot, Policy { destinations: both, ..policy("a", Source::Pools(vec![request("public", 1)])) });
    add_policy(&mut snapshot, Policy { created: 1, ..policy("b", Source::Pools(vec![request("public", 1)])) });
    let plan = plan(&snapshot, &health, &Plan::default());
    let condition = |policy: &str, kind| plan.outcomes[&policy.parse().unwrap()].conditions[&kind].clone();
    let ready = condition("a", ConditionKind::Ready);
    assert_eq!((ready.holds, ready.reason), (false, Reason::NoAddress));
    assert!(ready.message.contains("IPv6 egress IP: traffic to IPv6 destinations is dropped"), "{}", ready.message);
    let conflicting = condition("b", ConditionKind::Conflicting);
    assert_eq!((conflicting.holds, conflicting.reason), (true, Reason::SameDestination));
    assert!(!condition("a", ConditionKind::Conflicting).holds);
    assert_eq!(condition("b", ConditionKind::Ready).message, "flows are spread over its egress IPs");
}

#[test]
fn the_first_of_several_nodes_serves_and_stays() {
    let (mut snapshot, mut health) = cluster(2, 1);
    for (n, name) in ["gw0", "gw1"].into_iter().enumerate() {
        let net = ipnet::IpNet::new(v4(8, 0, n as u8), 24).unwrap();
        let address = InterfaceAddress { interface: "eth0".into(), net, default_route: true };
        snapshot.nodes.get_mut(&name.into()).unwrap().report =
            Some(NodeReport { addresses: [address].into(), ..Default::default() });
    }
    let first_match = Gateway {
        choice: NodeChoice::First,
        ..gateway(Selector::label("gateway", "yes"), AddressSource::DefaultRoute)
    };
    let cegp = policy("web", Source::Gateways(vec![first_match]));
    add_policy(&mut snapshot, cegp);
    let addresses = |plan: &Plan| plan.egress_ips.keys().copied().collect::<Vec<_>>();
    let first = plan(&snapshot, &health, &Plan::default());
    assert_eq!(addresses(&first), [v4(8, 0, 0)]);
    health.nodes.insert("gw0".into(), lapsed());
    let second = plan(&snapshot, &health, &first);
    assert_eq!(addresses(&second), [v4(8, 0, 1)]);
    health.nodes.insert("gw0".into(), fresh());
    assert_eq!(addresses(&plan(&snapshot, &health, &second)), [v4(8, 0, 1)], "no flow moves for a return");
}

#[test]
fn the_differences_of_two_plans_are_listed() {
    let (mut snapshot, mut health) = cluster(2, 1);
    let web =
        Policy { distribution: Distribution::PerEndpoint, ..policy("web", Source::Pools(vec![request("public", 1)])) };
    add_policy(&mut snapshot, web);
    let first = plan(&snapshot, &health, &Plan::default());
    let told = diff(&Plan::default(), &first);
    assert_eq!(told[0], Change::Added { address: v4(0, 0, 1) });
    assert!(matches!(&told[1], Change::Moved { from: None, to: Some(_), epoch: 1, .. }));
    assert_eq!(told[2], Change::Leased { address: v4(0, 0, 1), node: "w0".into(), blocks: 504 });
    assert!(
        matches!(&told[3..], [Change::Condition { kind: ConditionKind::Ready, .. }]),
        "only what has changed: {told:?}"
    );
    assert_eq!(diff(&first, &first), []);
    let owner = first.egress_ips[&v4(0, 0, 1)].owner.clone();
    health.nodes.insert(owner.clone().unwrap(), lapsed());
    let second = plan(&snapshot, &health, &first);
    let told = diff(&first, &second);
    assert!(matches!(&told[..], [Change::Moved { from, epoch: 2, .. }] if *from == owner), "{told:?}");
}
