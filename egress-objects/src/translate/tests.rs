//! Tests of what is read, and of the problems that are reported.

use serde_json::{Value, json};

use super::*;
use crate::api;
use egress_core::model::*;

fn object<T: serde::de::DeserializeOwned>(kind: &str, spec: Value) -> T {
    let api_version = if kind.starts_with("Egress") { "spillway.io/v1beta1" } else { "v1" };
    let metadata = json!({"name": "web", "uid": "u1", "generation": 3, "creationTimestamp": "2026-01-01T00:00:10Z"});
    serde_json::from_value(json!({"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}))
        .unwrap()
}

fn problems<T: std::fmt::Debug>(result: Result<T, Vec<Problem>>) -> Vec<String> {
    result.unwrap_err().iter().map(ToString::to_string).collect()
}

#[test]
fn a_policy_with_every_field_is_translated() {
    let policy = policy(&object("EgressGatewayPolicy", json!({
        "selectors": [{
            "podSelector": {"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["x"]}]},
            "nodeSelector": {}
        }],
        "destinationCIDRs": ["0.0.0.0/0", "2001:db8::/32"],
        "excludedCIDRs": ["10.0.0.0/8"],
        "egressGateways": [
            {"nodeSelector": {"matchLabels": {"egress": "true"}}, "egressIP": "192.0.2.10", "weight": 3},
            {"nodeSelector": {}, "interface": "eth1"},
            {"nodeSelector": {}}
        ],
        "distribution": "PerEndpoint",
        "zone": {"mode": "Prefer", "preferLocalNode": true},
        "onNoGateway": "NodeIP",
        "existingConnections": "Drop",
        "bandwidth": {"rate": "800M", "burst": "2G"}
    }))).unwrap();
    assert_eq!((policy.id.to_string().as_str(), policy.uid.as_str(), policy.created), ("web", "u1", 1_767_225_610));
    let not_x = ("tier".to_owned(), Requirement::NotIn(["x".to_owned()].into()));
    let web = ("app".to_owned(), Requirement::In(["web".to_owned()].into()));
    let expected = EndpointSelector {
        pod: Some(Selector::new([web, not_x])),
        namespace: None,
        node: Some(Selector::everything()),
    };
    assert_eq!(policy.selectors, [expected]);
    assert_eq!(policy.destinations.len(), 2);
    let Source::Gateways(gateways) = &policy.source else { panic!("{:?}", policy.source) };
    let addresses: Vec<&AddressSource> = gateways.iter().map(|gateway| &gateway.address).collect();
    let eth1 = AddressSource::Interface("eth1".into());
    assert_eq!(addresses, [&AddressSource::Ip("192.0.2.10".parse().unwrap()), &eth1, &AddressSource::DefaultRoute]);
    assert_eq!((gateways[0].weight, gateways[1].weight), (3, 1));
    assert_eq!(
        (policy.distribution, policy.zone, policy.prefer_local_node),
        (Distribution::PerEndpoint, ZoneMode::Prefer, true)
    );
    assert_eq!((policy.on_no_gateway, policy.existing), (OnNoGateway::NodeIp, Existing::Drop));
    assert_eq!(policy.bandwidth, Some(Bandwidth { rate_bps: 800_000_000, burst_bytes: 250_000_000 }));
}

#[test]
fn entries_for_one_pool_become_one_request() {
    let policy = policy(&object("EgressGatewayPolicy", json!({
        "selectors": [{"namespaceSelector": {}}],
        "destinationCIDRs": ["0.0.0.0/0"],
        "egressIPPools": [{"name": "b", "count": 2}, {"name": "a", "egressIPs": ["192.0.2.5", "192.0.2.6"]}, {"name": "b"}]
    }))).unwrap();
    let Source::Pools(requests) = &policy.source else { panic!("{:?}", policy.source) };
    let seen: Vec<(String, u32, usize)> = requests.iter().map(|r| (r.pool.to_string(), r.count, r.ips.len())).collect();
    assert_eq!(seen, [("a".into(), 2, 2), ("b".into(), 3, 0)]);
}

#[test]
fn entries_for_one_pool_add_up_to_at_most_the_maximum() {
    let ips = |n: u32| (0..700).map(|i| format!("10.{n}.{}.{}", i / 250, i % 250)).collect::<Vec<_>>();
    let policy = policy(&object("EgressGatewayPolicy", json!({
        "selectors": [{"namespaceSelector": {}}],
        "destinationCIDRs": ["0.0.0.0/0"],
        "egressIPPools": [{"name": "a", "count": 1024}, {"name": "a", "count": 1}, {"name": "b", "egressIPs": ips(1)}, {"name": "b", "egressIPs": ips(2)}]
    }))).unwrap();
    let Source::Pools(requests) = &policy.source else { panic!("{:?}", policy.source) };
    assert_eq!(requests.iter().map(|r| (r.count, r.ips.len())).collect::<Vec<_>>(), [(1024, 0), (1024, 1024)]);
}

#[test]
fn unreadable_policy_drops_packets_of_the_pods_it_is_known_to_select() {
    let web = json!({"podSelector": {"matchLabels": {"app": "web"}}});
    let nothing = json!({"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": []}]}});
    let unknown = json!({"podSelector": {"matchExpressions": [{"key": "app", "operator": "Is", "values": ["a"]}]}});
    let not_nothing = json!({"podSelector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": []}]}});
    let spec = json!({
        "selectors": [web, nothing, unknown, not_nothing, {"nodeSelector": {}}],
        "destinationCIDRs": ["0.0.0.0/0"],
        "egressIPPools": [{"name": "public"}],
        "onNoGateway": "NodeIP",
        "bandwidth": {"rate": "100u"},
    });
    let (policy, problems) = read(&object("EgressGatewayPolicy", spec.clone()));
    assert_eq!(problems.len(), 5, "{problems:?}");
    assert_eq!((&policy.source, policy.on_no_gateway), (&Source::Pools(Vec::new()), OnNoGateway::Drop));
    assert_eq!(policy.destinations.len(), 1);
    let labels = |app: &str| [("app".to_owned(), app.to_owned())].into();
    let selects = |app: &str| policy.selects(&labels(app), &Labels::new(), &Labels::new());
    assert_eq!([selects("web"), selects("a"), selects("db")], [true, false, false]);

    let mut spec = spec;
    spec["selectors"].as_array_mut().unwrap().truncate(1);
    let object: api::EgressPolicy = object("EgressPolicy", spec);
    let (policy, problems) = read_namespaced(&object);
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert_eq!((policy.source, policy.on_no_gateway), (Source::Pools(Vec::new()), OnNoGateway::Drop));
    assert_eq!(namespaced_policy(&object), Err(problems));
}

#[test]
fn policy_with_unreadable_destination_drops_all_but_its_exclusions() {
    let spec = json!({
        "selectors": [{"podSelector": {}}],
        "destinationCIDRs": ["203.0.113.0/24", "198.51.100.0/33"],
        "excludedCIDRs": ["10.0.0.0/8"],
        "egressIPPools": [{"name": "public"}],
    });
    let all = ["0.0.0.0/0", "::/0"].map(|net| net.parse().unwrap());
    let (policy, problems) = read(&object("EgressGatewayPolicy", spec.clone()));
    assert_eq!((policy.destinations, policy.excluded.len(), problems.len()), (all.to_vec(), 1, 1));
    assert_eq!(read_namespaced(&object("EgressPolicy", spec)).0.destinations, all);
}

#[test]
fn invalid_pool_name_is_reported_without_control_characters() {
    let told = problems(policy(&object(
        "EgressGatewayPolicy",
        json!({
            "selectors": [{"podSelector": {}}], "destinationCIDRs": ["0.0.0.0/0"], "egressIPPools": [{"name": "a\u{1b}[31m"}],
        }),
    )));
    let expected = "EgressGatewayPolicy web, spec.egressIPPools[0].name: \"a\\u{1b}[31m\" is not the name of an object: write that of \
                    an EgressIPPool";
    assert_eq!(told, [expected]);
}

#[test]
fn every_problem_of_a_policy_is_reported_with_its_field() {
    let told = problems(policy(&object(
        "EgressGatewayPolicy",
        json!({
            "selectors": [{"nodeSelector": {}}, {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}, {"key": "b", "operator": "In"}]}}],
            "destinationCIDRs": ["10.0.0.0/33"],
            "egressGateway": {"nodeSelector": {}, "egressIP": "192.0.2", "weight": 0},
            "egressIPPool": {"name": "x", "count": 0},
            "bandwidth": {"rate": "fast"}
        }),
    )));
    let fields: Vec<&str> = told.iter().map(|text| text.split(": ").next().unwrap()).collect();
    assert_eq!(
        fields,
        [
            "EgressGatewayPolicy web, spec.selectors[0]",
            "EgressGatewayPolicy web, spec.selectors[1].podSelector.matchExpressions[0].operator",
            "EgressGatewayPolicy web, spec.selectors[1].podSelector.matchExpressions[1].values",
            "EgressGatewayPolicy web, spec.destinationCIDRs[0]",
            "EgressGatewayPolicy web, spec",
            "EgressGatewayPolicy web, spec.egressIPPool.count",
            "EgressGatewayPolicy web, spec.bandwidth.rate",
        ]
    );
    assert_eq!(
        told[3],
        "EgressGatewayPolicy web, spec.destinationCIDRs[0]: \"10.0.0.0/33\" is not understood: write a network such as 203.0.113.0/24 or 2001:db8::/32"
    );
    let told = problems(policy(&object(
        "EgressGatewayPolicy",
        json!({
            "selectors": [], "destinationCIDRs": [],
            "egressGateway": {"nodeSelector": {}, "egressIP": "192.0.2", "weight": 101},
        }),
    )));
    assert_eq!(told.len(), 4, "{told:?}");
}

#[test]
fn a_routed_pool_has_all_carriers_and_spreads_outbound_traffic() {
    let read = |announce: &str| {
        let spec = json!({"ipRanges": [{"cidr": "203.0.113.0/28"}], "nodeSelector": {}, "announce": announce});
        let read = pool(&object("EgressIPPool", spec)).unwrap();
        (read.announce, read.outbound, read.carriers)
    };
    assert_eq!(read("ARP"), (Announce::Arp, Outbound::Owner, DEFAULT_CARRIERS));
    assert_eq!(read("Route"), (Announce::Route, Outbound::Spread, MAX_CARRIERS));
    assert_eq!(read("None"), (Announce::None, Outbound::Owner, DEFAULT_CARRIERS));
}

#[test]
fn pool_with_every_field_is_translated_and_an_invalid_one_refused() {
    let read = pool(&object("EgressIPPool", json!({
        "ipRanges": [{"cidr": "192.0.2.0/28"}, {"start": "192.0.2.32", "end": "192.0.2.40"}, {"cidr": "198.51.100.1/32"}],
        "nodeSelector": {"matchLabels": {"egress": "true"}},
        "subnetInfo": {"gateway": "192.0.2.1", "prefixLength": 24, "vlan": 10},
        "maxEgressIPsPerNode": 10,
        "failback": {"mode": "Preferred", "delay": "500ms"},
        "portBlockSize": 64
    }))).unwrap();
    assert_eq!((read.total(), read.max_per_node), (14 + 9, Some(10)));
    assert_eq!(read.failback, Failback::Preferred { delay: std::time::Duration::from_millis(500) });
    assert_eq!(
        read.subnet,
        Some(SubnetInfo { gateway: "192.0.2.1".parse().unwrap(), prefix_length: 24, vlan: Some(10) })
    );
    let told = problems(pool(&object(
        "EgressIPPool",
        json!({
            "ipRanges": [{"cidr": "x"}, {"start": "192.0.2.9", "end": "192.0.2.1"}, {"start": "192.0.2.9"}],
            "nodeSelector": {},
            "subnetInfo": {"gateway": "192.0.2.1", "prefixLength": 64, "vlan": 5000},
            "maxEgressIPsPerNode": 0,
            "failback": {"delay": "soon"},
            "portBlockSize": 32,
            "quotas": [{"namespaceSelector": {}, "maxEgressIPs": 1024}, {"namespaceSelector": {}, "maxEgressIPs": 1025}]
        }),
    )));
    assert_eq!(told.len(), 9, "{told:#?}");
    assert!(told.iter().any(|text| text.contains("spec.quotas[1].maxEgressIPs")), "{told:#?}");
    assert!(told.iter().any(|text| text.contains("spec.ipRanges[1]: 192.0.2.1 lies before 192.0.2.9")), "{told:#?}");
}

#[test]
fn nodes_are_read_with_the_reports_of_their_agents() {
    let kube: k8s_openapi::api::core::v1::Node = serde_json::from_value(json!({
        "metadata": {"name": "w0", "labels": {"topology.kubernetes.io/zone": "x"}, "annotations": {"spillway.io/max-egress-ips": "many", "node.antrea.io/max-egress-ips": "7"}},
        "spec": {"unschedulable": true},
        "status": {
            "conditions": [{"type": "Ready", "status": "Unknown"}, {"type": "MemoryPressure", "status": "False"}],
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "w0"}]
        }
    })).unwrap();
    let said: api::EgressNode = serde_json::from_value(json!({
        "apiVersion": "spillway.io/v1alpha1", "kind": "EgressNode", "metadata": {"name": "w0"}, "spec": {},
        "status": {
            "tunnelAddresses": ["fd00::1", "10.0.0.1"],
            "addresses": [{"interface": "eth0", "cidr": "10.0.0.1/24", "defaultRoute": true}, {"interface": "eth1", "cidr": "?"}],
            "ownLeaseRevision": 6, "occupiedBlocks": [3],
            "demand": [{"egressIP": "192.0.2.10", "wantBlocks": 5, "release": [7, 8]}]
        }
    })).unwrap();
    let (node, problems) = node(&kube, Some(&said));
    assert!(node.ready, "there is no report: its lease decides");
    assert!(node.draining);
    assert_eq!((node.zone.as_deref(), node.max_egress_ips, node.addresses.len()), (Some("x"), Some(7), 1));
    let report = node.report.unwrap();
    assert_eq!(report.tunnel_addresses[0].to_string(), "fd00::1");
    assert_eq!((report.addresses.len(), report.occupied_blocks.len()), (1, 1));
    assert_eq!(report.own_lease_revision, 6);
    assert_eq!(report.demand[&"192.0.2.10".parse().unwrap()], Demand { want: 5, released: [7, 8].into() });
    let fields: Vec<&str> = problems.iter().map(|problem| problem.field.as_str()).collect();
    assert_eq!(fields, ["metadata.annotations[spillway.io/max-egress-ips]", "status.addresses"]);
    for (status, ready) in [("True", true), ("False", false)] {
        let mut kube = kube.clone();
        kube.status.as_mut().unwrap().conditions.as_mut().unwrap()[0].status = status.to_owned();
        assert_eq!(super::node(&kube, None).0.ready, ready, "{status}");
    }
}

#[test]
fn only_pods_with_traffic_of_their_own_are_endpoints() {
    let pod = |spec: Value, status: Value| -> Pod {
        let metadata = json!({"name": "p", "namespace": "ns", "uid": "u", "labels": {"app": "web"}});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).unwrap()
    };
    let running = pod(
        json!({"nodeName": "w0", "containers": []}),
        json!({"podIP": "10.1.0.1", "podIPs": [{"ip": "10.1.0.1"}, {"ip": "fd00::1"}]}),
    );
    let read = endpoint(&running).unwrap();
    assert_eq!((read.id.to_string().as_str(), read.node.as_str(), read.ips.len()), ("ns/p/u", "w0", 2));
    assert!(
        endpoint(&pod(json!({"nodeName": "w0", "containers": []}), json!({}))).unwrap().ips.is_empty(),
        "it is starting"
    );
    for (spec, status) in [
        (json!({"containers": []}), json!({})),
        (json!({"nodeName": "w0", "hostNetwork": true, "containers": []}), json!({})),
        (json!({"nodeName": "w0", "containers": []}), json!({"phase": "Succeeded"})),
    ] {
        assert_eq!(endpoint(&pod(spec, status)), None);
    }
}
