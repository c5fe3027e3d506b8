//! Tests of the conversion from objects to a plan and back to objects.

mod unreadable;

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use proptest::prelude::*;

use super::*;
use crate::api::EVERY_NODE;
use egress_core::{
    health::{Health, LeaseState, NodeHealth},
    model::{Endpoint, EndpointId, NodeName},
    plan::{Changes, Plan, plan, plan_and_remember},
    testing::world::{TestCluster, arbitrary_cluster, arbitrary_labels},
};

fn time(seconds: i64) -> Time {
    Time(Timestamp::from_second(seconds).unwrap())
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> Arc<T> {
    Arc::new(serde_json::from_value(value).unwrap())
}

fn spillway(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "spillway.io/v1alpha1", "kind": kind, "metadata": {"name": name, "generation": 2}, "spec": spec})
}

fn policy(name: &str, spec: Value) -> Arc<EgressGatewayPolicy> {
    let mut whole = json!({"selectors": [{"podSelector": {}}], "destinationCIDRs": ["0.0.0.0/0", "::/0"]});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    read(spillway("EgressGatewayPolicy", name, whole))
}

/// Two gateways, two workers with three pods each, a pool, a policy of each distribution.
fn objects() -> ApiObjects {
    let node = |name: &str, zone: &str| {
        let egress = name.starts_with("gw").to_string();
        read(json!({"metadata": {"name": name, "labels": {"egress": egress, "topology.kubernetes.io/zone": zone}}}))
    };
    let pod = |n: usize| {
        let node = format!("w{}", n % 2);
        read(
            json!({"metadata": {"name": format!("p{n}"), "namespace": "ns", "uid": "u"}, "spec": {"nodeName": node, "containers": []}}),
        )
    };
    let pool = json!({
        "ipRanges": [{"cidr": "192.0.2.0/28"}, {"start": "2001:db8::10", "end": "2001:db8::1f"}],
        "nodeSelector": {"matchLabels": {"egress": "true"}},
        "subnetInfo": {"gateway": "192.0.2.1", "prefixLength": 24}
    });
    ApiObjects {
        policies: vec![
            policy("flows", json!({"egressIPPool": {"name": "public", "count": 3}})),
            policy("pods", json!({"egressIPPool": {"name": "public", "count": 2}, "distribution": "PerEndpoint"})),
        ],
        pools: vec![read(spillway("EgressIPPool", "public", pool))],
        nodes: vec![node("gw0", "x"), node("gw1", "y"), node("w0", "x"), node("w1", "y")],
        pods: (0..6).map(pod).collect(),
        ..Default::default()
    }
}

fn health() -> Health {
    let fresh = NodeHealth {
        lease: LeaseState::Fresh { since: Default::default(), returned: false, proven: true },
        gone: false,
    };
    Health { nodes: ["gw0", "gw1"].into_iter().map(|name| (name.into(), fresh)).collect() }
}

/// Plans, and writes the plan into the objects. Returns the plan.
fn round(objects: &mut ApiObjects, health: &Health, now: i64) -> Plan {
    let (snapshot, problems) = snapshot(objects);
    let plan = plan(&snapshot, health, &previous(objects));
    let wanted = desired(objects, &snapshot, &plan, &problems, &time(now));
    objects.egress_ips = wanted.egress_ips.into_values().map(Arc::new).collect();
    objects.egress_nodes = wanted.egress_nodes.into_values().map(Arc::new).collect();
    for policy in &mut objects.policies {
        let status = wanted.policies[policy.metadata.name.as_ref().unwrap()].clone();
        Arc::make_mut(policy).status = Some(status);
    }
    for pool in &mut objects.pools {
        let status = wanted.pools[pool.metadata.name.as_ref().unwrap()].clone();
        Arc::make_mut(pool).status = Some(status);
    }
    plan
}

#[test]
fn restarted_controller_writes_nothing() {
    let mut objects = objects();
    let first = round(&mut objects, &health(), 100);
    assert_eq!((first.egress_ips.len(), first.assignments.len(), first.lease_revision), (10, 1, 1));
    let written = objects.clone();
    let second = round(&mut objects, &health(), 200);
    assert_eq!(second.egress_ips, first.egress_ips);
    assert_eq!(second.blocks, first.blocks);
    assert_eq!(second.assignments, first.assignments);
    assert_eq!(second.outcomes, first.outcomes);
    for (before, after) in [
        (format!("{:?}", written.egress_ips), format!("{:?}", objects.egress_ips)),
        (format!("{:?}", written.egress_nodes), format!("{:?}", objects.egress_nodes)),
        (format!("{:?}", written.policies), format!("{:?}", objects.policies)),
        (format!("{:?}", written.pools), format!("{:?}", objects.pools)),
    ] {
        assert_eq!(before, after);
    }
}

#[test]
fn objects_contain_the_plan_and_its_statuses() {
    let mut objects = objects();
    round(&mut objects, &health(), 100);
    let six = objects.egress_ips.iter().find(|ip| ip.spec.address == "2001:db8::10").unwrap();
    assert_eq!(six.metadata.name.as_deref(), Some("2001-0db8-0000-0000-0000-0000-0000-0010"));
    let status = six.status.as_ref().unwrap();
    assert_eq!((status.epoch, status.node.clone()), (1, status.preferred_node.clone()));
    assert_eq!(status.zone.as_deref(), Some(if status.node.as_deref() == Some("gw0") { "x" } else { "y" }));
    assert_eq!(six.spec.subnet_info.as_ref().unwrap().gateway, "192.0.2.1");
    assert!(!objects.egress_ips.iter().any(|ip| ip.spec.address == "192.0.2.1"), "that is the router");
    let worker = &objects.egress_nodes.iter().find(|node| node.metadata.name.as_deref() == Some("w0")).unwrap().spec;
    assert_eq!(worker.blocks.len(), 10);
    assert!(worker.blocks.iter().all(|blocks| blocks.ranges.len() == 1 && blocks.ranges[0].count == 252));
    let assigned: usize = worker.assignments.iter().map(|assignment| assignment.endpoints.len()).sum();
    assert_eq!(assigned, 3 * 2, "three pods, two families");
    let policy = objects.policies[1].status.as_ref().unwrap();
    assert_eq!((policy.selected_endpoints, policy.slots.len()), (6, 4));
    assert!(policy.slots.iter().all(|slot| slot.healthy && slot.endpoints == Some(3)));
    assert_eq!(objects.policies[0].status.as_ref().unwrap().slots[0].endpoints, None);
    let usage = &objects.pools[0].status.as_ref().unwrap().usage;
    assert_eq!((usage.total, usage.used), (14 + 16, 10));
}

#[test]
fn every_agent_follows_gateways_and_nodes_with_networks_that_nothing_else_names() {
    let followed_by = |objects: &ApiObjects| -> Vec<(String, String)> {
        let of = |node: &EgressNode| Some((node.metadata.name.clone()?, node.followed_by()?.to_owned()));
        objects.egress_nodes.iter().filter_map(|node| of(node)).collect()
    };
    let is = |found: &[(String, String)], wanted: [(&str, &str); 4]| {
        assert_eq!(found, wanted.map(|(node, by)| (node.to_owned(), by.to_owned())));
    };
    let mut objects = objects();
    round(&mut objects, &health(), 100);
    is(&followed_by(&objects), [("gw0", EVERY_NODE), ("gw1", EVERY_NODE), ("w0", "w0"), ("w1", "w1")]);
    let on_w1 = objects.pods.iter_mut().find(|pod| pod.spec.as_ref().unwrap().node_name.as_deref() == Some("w1"));
    Arc::make_mut(on_w1.unwrap()).status = Some(serde_json::from_value(json!({"podIP": "10.200.0.7"})).unwrap());
    objects.policies.clear();
    round(&mut objects, &health(), 200);
    is(&followed_by(&objects), [("gw0", EVERY_NODE), ("gw1", EVERY_NODE), ("w0", "w0"), ("w1", EVERY_NODE)]);
    // The egress IPs' objects are gone by then.
    round(&mut objects, &health(), 300);
    is(&followed_by(&objects), [("gw0", "gw0"), ("gw1", "gw1"), ("w0", "w0"), ("w1", EVERY_NODE)]);
}

#[test]
fn times_of_conditions_change_only_with_their_status() {
    let mut objects = objects();
    round(&mut objects, &health(), 100);
    let ready = |objects: &ApiObjects, at: usize| {
        let conditions = &objects.egress_ips[at].status.as_ref().unwrap().conditions;
        (conditions[0].status.clone(), conditions[0].reason.clone(), conditions[0].last_transition_time.clone())
    };
    let mut health = health();
    health.nodes.insert("gw0".into(), NodeHealth { lease: LeaseState::Lapsed, gone: false });
    round(&mut objects, &health, 200);
    for at in 0..10 {
        let (status, reason, since) = ready(&objects, at);
        assert_eq!((status.as_str(), since), ("True", time(100)), "it is still carried");
        assert!(["Preferred", "Failover"].contains(&reason.as_str()));
    }
    health.nodes.insert("gw1".into(), NodeHealth { lease: LeaseState::Lapsed, gone: false });
    round(&mut objects, &health, 300);
    assert_eq!(ready(&objects, 0), ("False".into(), "OwnerUnhealthy".into(), time(300)));
}

/// Status, reason and time of a condition of the first policy.
fn condition(objects: &ApiObjects, kind: &str) -> (String, String, Time) {
    let conditions = &objects.policies[0].status.as_ref().unwrap().conditions;
    let found = conditions.iter().find(|condition| condition.type_ == kind).unwrap();
    (found.status.clone(), found.reason.clone(), found.last_transition_time.clone())
}

#[test]
fn not_yet_policy_becomes_ready_once_all_its_nodes_have_programmed_it() {
    let mut objects = objects();
    round(&mut objects, &health(), 100);
    let report = |objects: &mut ApiObjects, node: &str, generation: i64| {
        let programmed =
            Some(vec![crate::api::ProgrammedPolicy { policy: "flows".into(), uid: String::new(), generation }]);
        let object = objects.egress_nodes.iter_mut().find(|object| object.metadata.name.as_deref() == Some(node));
        let status = crate::api::EgressNodeStatus { programmed, ..Default::default() };
        Arc::make_mut(object.unwrap()).status = Some(status);
    };
    let state = |objects: &ApiObjects| {
        let (ready, programmed) = (condition(objects, "Ready"), condition(objects, "Programmed"));
        format!("{} {}, {} {}", ready.0, ready.1, programmed.0, programmed.1)
    };
    report(&mut objects, "w0", 2);
    report(&mut objects, "w1", 1);
    round(&mut objects, &health(), 200);
    // Policies do not wait for an agent that has not reported anything.
    assert_eq!(state(&objects), "True AsExpected, True AsExpected");

    Arc::make_mut(&mut objects.policies[0]).metadata.generation = Some(3);
    round(&mut objects, &health(), 300);
    assert_eq!(state(&objects), "False Programming, False Programming");
    let ready = &objects.policies[0].status.as_ref().unwrap().conditions[0];
    assert!(ready.message.starts_with("the datapath of w0, w1 does not have it yet"), "{}", ready.message);
    report(&mut objects, "w0", 3);
    round(&mut objects, &health(), 400);
    assert_eq!(state(&objects), "False Programming, False Programming");
    report(&mut objects, "w1", 3);
    round(&mut objects, &health(), 500);
    assert_eq!(state(&objects), "True AsExpected, True AsExpected");
    assert_eq!(condition(&objects, "Programmed").2, time(500));
    // A node that appears later holds its traffic until it has the policy.
    report(&mut objects, "w1", 2);
    round(&mut objects, &health(), 600);
    assert_eq!(state(&objects), "True AsExpected, True AsExpected");
}

#[test]
fn skew_policies_do_not_wait_for_older_agents_and_ignore_newer_fields() {
    let mut objects = objects();
    round(&mut objects, &health(), 100);
    // As written by agents of the previous version, of a later version, and of one whose new fields
    // an older definition of the kind has removed.
    for (node, status) in [
        ("w0", json!({"tunnelAddresses": ["10.0.0.1"], "ownLeaseRevision": 0, "carries": []})),
        (
            "w1",
            json!({"programmed": [{"policy": "flows", "uid": "", "generation": 2, "later": 1}], "later": {"a": [1]}}),
        ),
    ] {
        let object = objects.egress_nodes.iter_mut().find(|object| object.metadata.name.as_deref() == Some(node));
        Arc::make_mut(object.unwrap()).status = Some(serde_json::from_value(status).unwrap());
    }
    round(&mut objects, &health(), 200);
    assert_eq!(condition(&objects, "Ready").0, "True");
    Arc::make_mut(&mut objects.policies[0]).metadata.generation = Some(3);
    round(&mut objects, &health(), 300);
    let ready = &objects.policies[0].status.as_ref().unwrap().conditions[0];
    assert!(ready.message.starts_with("the datapath of w1 does not have it yet"), "{}", ready.message);
}

#[test]
fn invalid_policy_reports_its_problem_and_affects_no_other() {
    let mut objects = objects();
    let good = round(&mut objects, &health(), 100);
    objects
        .policies
        .push(policy("broken", json!({"egressIPPool": {"name": "public"}, "destinationCIDRs": ["10.0.0.0/99"]})));
    let with = round(&mut objects, &health(), 200);
    assert_eq!(with.egress_ips, good.egress_ips);
    let conditions = &objects.policies[2].status.as_ref().unwrap().conditions;
    assert_eq!((conditions[0].type_.as_str(), conditions[0].status.as_str()), ("Ready", "False"));
    assert_eq!(conditions[0].reason, "Invalid");
    assert!(conditions[0].message.starts_with("spec.destinationCIDRs[0]: \"10.0.0.0/99\" is not understood"));
    assert_eq!(conditions.len(), 4);
}

#[test]
fn a_gateway_whose_name_is_too_long_for_a_label_carries_egress_ips() {
    let mut objects = objects();
    let (long, fits) = ("g".repeat(64), "g".repeat(63));
    for (at, name) in [&long, &fits].into_iter().enumerate() {
        Arc::make_mut(&mut objects.nodes[at]).metadata.name = Some(name.clone());
    }
    let fresh = health().nodes.into_values().next().unwrap();
    let health = Health { nodes: [&long, &fits].map(|name| (name.as_str().into(), fresh)).into() };
    round(&mut objects, &health, 100);
    let label =
        |ip: &EgressIP| ip.metadata.labels.as_ref().and_then(|labels| labels.get(crate::api::NODE_LABEL).cloned());
    let owners: BTreeSet<(String, Option<String>)> =
        objects.egress_ips.iter().map(|ip| (ip.status.clone().unwrap().node.unwrap(), label(ip))).collect();
    assert_eq!(owners, [(long, None), (fits.clone(), Some(fits))].into());
}

#[test]
fn revisions_are_never_used_twice() {
    let mut objects = objects();
    round(&mut objects, &health(), 100);
    for node in &mut objects.egress_nodes {
        let status = crate::api::EgressNodeStatus { own_lease_revision: 9, ..Default::default() };
        Arc::make_mut(node).status = Some(status);
    }
    assert_eq!(previous(&objects).lease_revision, 10);
    objects.egress_nodes.clear();
    objects.egress_ips.clear();
    assert_eq!(previous(&objects), Plan::default());
}

#[test]
fn block_listed_by_two_nodes_belongs_to_the_later_lease() {
    let node = |name: &str, revision: u64| -> Arc<EgressNode> {
        let ranges = json!([{"first": 4, "count": 2, "revision": revision}]);
        read(spillway("EgressNode", name, json!({"blocks": [{"egressIP": "192.0.2.1", "ranges": ranges}]})))
    };
    for nodes in [[node("a", 7), node("b", 3)], [node("b", 7), node("a", 3)]] {
        let later = nodes[0].metadata.name.clone().unwrap();
        for egress_nodes in [nodes.to_vec(), nodes.iter().rev().cloned().collect()] {
            let plan = previous(&ApiObjects { egress_nodes, ..Default::default() });
            let leases = &plan.blocks[&"192.0.2.1".parse().unwrap()];
            assert!(leases.values().all(|lease| lease.node.as_str() == later && lease.revision == 7), "{leases:?}");
        }
    }
}

#[test]
fn block_shares_are_read_back_from_egress_ip_objects() {
    let mut objects = objects();
    round(&mut objects, &health(), 100);
    let name = objects.egress_ips[0].spec.address.parse().unwrap();
    assert_eq!(previous(&objects).egress_ips[&name].share, 252);
    let status = Arc::make_mut(&mut objects.egress_ips[0]).status.as_mut().unwrap();
    (status.blocks_scarce, status.blocks_starved) = (true, true);
    let ip = &previous(&objects).egress_ips[&name];
    assert!(ip.scarce && ip.starved);
}

fn any_pod() -> impl Strategy<Value = (EndpointId, Option<Endpoint>)> {
    let pod = (0usize..20, 0usize..3, 0usize..9, prop::option::weighted(0.7, arbitrary_labels()));
    pod.prop_map(|(name, namespace, node, labels)| {
        let id = EndpointId::new(&format!("ns{namespace}"), &format!("pod{name}"), "uid");
        let node = format!("n{node}").as_str().into();
        (id.clone(), labels.map(|labels| Endpoint { id, node, ips: Default::default(), labels }))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_partial_update_writes_the_same_objects_as_a_full_one(
        world in arbitrary_cluster(),
        rounds in prop::collection::vec(prop::collection::vec(any_pod(), 1..4), 1..8),
    ) {
        let TestCluster { snapshot, health } = world;
        let all = |snapshot: &Snapshot, plan: &Plan| desired(&ApiObjects::default(), snapshot, plan, &[], &time(1));
        let (mut plan, mut memo) = plan_and_remember(snapshot, &health, &Plan::default());
        let mut written = all(memo.snapshot(), &plan);
        for pods in rounds {
            let changes = Changes { pods: pods.into_iter().collect(), ..Default::default() };
            let Some((next, touched)) = memo.change(&health, &mut plan, changes) else { break };
            memo = next;
            let specs = written.egress_nodes.iter().map(|(name, node)| (name.clone(), node.spec.clone())).collect();
            let (objects, touched) = (ApiObjects::default(), (&touched, &specs));
            let part = desired_part(&objects, memo.snapshot(), &plan, &[], &time(1), touched);
            written.egress_ips.extend(part.egress_ips);
            written.egress_nodes.extend(part.egress_nodes);
            prop_assert_eq!(&written, &all(memo.snapshot(), &plan));
        }
    }
}

/// A Node with an address of each family, and its agent's report.
fn node_with(objects: &mut ApiObjects, name: &str, host: u8, ready: &str, created: &str, status: Value) {
    objects.nodes.push(read(json!({
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": {"podCIDRs": [format!("10.244.{host}.0/24"), format!("fd00:244:{host}::/64")]},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": format!("10.0.0.{host}")},
                {"type": "InternalIP", "address": format!("fd00::{host}")},
            ],
            "conditions": [{"type": "Ready", "status": ready}],
        },
    })));
    let mut object = spillway("EgressNode", name, json!({}));
    object["status"] = status;
    objects.egress_nodes.push(read(object));
}

/// docs/failures.md: claims.
#[test]
fn claims_of_a_node_are_believed_only_if_no_other_holds_the_address() {
    let mut objects = ApiObjects::default();
    let said = |tunnel: &[&str], addresses: &[&str]| {
        let addresses: Vec<Value> = addresses.iter().map(|a| json!({"interface": "eth1", "cidr": a})).collect();
        let revision = i64::MAX;
        json!({"tunnelAddresses": tunnel, "addresses": addresses, "ownLeaseRevision": revision})
    };
    // The pod's address is in no Node's podCIDRs.
    objects.pods.push(read(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"nodeName": "w1", "containers": []}, "status": {"podIP": "172.20.0.9"}})));
    let own = said(&["10.0.0.1", "fd00::1"], &["10.0.0.1/24", "198.51.100.1/24", "10.244.1.1/24"]);
    node_with(&mut objects, "w1", 1, "True", "2026-01-01T00:00:00Z", own);
    let forged = said(
        &["10.0.0.1", "fd00::2", "203.0.113.5"],
        &[
            "10.0.0.1/24",
            "fd00::1/64",
            "10.244.1.7/24",
            "fd00:244:1::7/64",
            "172.20.0.9/16",
            "203.0.113.5/24",
            "10.0.0.2/24",
        ],
    );
    node_with(&mut objects, "evil", 2, "True", "2026-01-01T00:00:00Z", forged);
    let (snapshot, problems) = snapshot(&objects);
    let report = |name: &str| snapshot.nodes[&NodeName::from(name)].report.as_ref().unwrap();
    let tunnel = |name: &str| report(name).tunnel_addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
    let addresses = |name: &str| report(name).addresses.iter().map(|a| a.net.addr().to_string()).collect::<Vec<_>>();
    assert_eq!(
        (tunnel("w1"), addresses("w1")),
        (
            vec!["10.0.0.1".to_owned(), "fd00::1".into()],
            vec!["10.0.0.1".to_owned(), "10.244.1.1".into(), "198.51.100.1".into()],
        )
    );
    assert_eq!(
        (tunnel("evil"), addresses("evil")),
        (vec!["fd00::2".into()], vec!["10.0.0.2".into(), "203.0.113.5".into()])
    );
    let told: BTreeSet<(&str, &str, &str)> =
        problems.iter().map(|p| (p.name.as_str(), p.field.as_str(), p.message.split(' ').next().unwrap())).collect();
    let expected = [
        ("status.addresses", "10.0.0.1"),
        ("status.addresses", "10.244.1.7"),
        ("status.addresses", "172.20.0.9"),
        ("status.addresses", "fd00:244:1::7"),
        ("status.addresses", "fd00::1"),
        ("status.tunnelAddresses", "10.0.0.1"),
        ("status.tunnelAddresses", "203.0.113.5"),
    ];
    assert_eq!(told, expected.into_iter().map(|(field, address)| ("evil", field, address)).collect());
    // Later leases have new revisions, which fit into the objects.
    assert!(i64::try_from(previous(&objects).lease_revision + (1 << 40)).is_ok());
}

/// docs/failures.md: stale-node.
#[test]
fn stale_node_loses_its_address_to_the_live_node() {
    let (old, new) = ("2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z");
    let said = || json!({"tunnelAddresses": ["10.0.0.1", "fd00::1"]});
    // (the successor's name, readiness of the old node, name of the node that has the address)
    for (name, ready, has) in [("a", "Unknown", "a"), ("z", "Unknown", "z"), ("z", "False", "z"), ("a", "True", "m")] {
        let mut objects = ApiObjects::default();
        node_with(&mut objects, "m", 1, ready, old, said());
        node_with(&mut objects, name, 1, "True", new, said());
        let (snapshot, problems) = snapshot(&objects);
        for node in ["m", name] {
            let node = &snapshot.nodes[&NodeName::from(node)];
            let count = if node.name.as_str() == has { 2 } else { 0 };
            let report = node.report.as_ref().unwrap();
            assert_eq!(
                (node.addresses.len(), report.tunnel_addresses.len()),
                (count, count),
                "{name} {ready}: {}",
                node.name
            );
        }
        let about = |p: &&Problem| p.kind == "Node" && p.field == "status.addresses" && p.name != has;
        assert_eq!(problems.iter().filter(about).count(), 2, "{problems:?}");
    }
    // The object of a removed node has no effect.
    let mut objects = ApiObjects::default();
    node_with(&mut objects, "m", 1, "True", old, said());
    objects.nodes.clear();
    assert!(snapshot(&objects).0.nodes.is_empty());
}
