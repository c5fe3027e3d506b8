//! Changes that a user might make, and the output for them.

use super::*;
use crate::ctl::print::Printable as _;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

const CLUSTER: &str = "
{apiVersion: v1, kind: Node, metadata: {name: gw1, labels: {egress: 'true'}}, status: {conditions: [{type: Ready, status: 'True'}]}}
---
{apiVersion: v1, kind: Node, metadata: {name: gw2, labels: {egress: 'true'}}, status: {conditions: [{type: Ready, status: 'True'}]}}
---
{apiVersion: v1, kind: Node, metadata: {name: w1}}
---
apiVersion: spillway.io/v1beta1
kind: EgressIPPool
metadata: {name: public}
spec: {ipRanges: [{start: 192.0.2.1, end: 192.0.2.4}], nodeSelector: {matchLabels: {egress: 'true'}}}
---
apiVersion: spillway.io/v1beta1
kind: EgressGatewayPolicy
metadata: {name: web}
spec: {selectors: [{podSelector: {}}], destinationCIDRs: [0.0.0.0/0], egressIPPools: [{name: public, count: 2}]}
";

const MAIL: &str = "
apiVersion: spillway.io/v1beta1
kind: EgressGatewayPolicy
metadata: {name: mail}
spec: {selectors: [{podSelector: {}}], destinationCIDRs: [198.51.100.0/24], egressIPPools: [{name: public, count: 1}]}
";

fn parsed(text: &str) -> Vec<(ObjectRef, Value)> {
    let (objects, problems) = parse(Path::new("test.yaml"), text.as_bytes()).unwrap();
    assert_eq!(problems, []);
    objects
}

/// Returns the cluster with a pod, and with agents that have reported.
fn cluster() -> ApiObjects {
    let mut objects = ApiObjects::default();
    for (object, value) in parsed(CLUSTER) {
        change::apply(&mut objects, &object, Some(value)).unwrap();
    }
    let pod = json!({"metadata": {"name": "a", "namespace": "shop", "uid": "u"}, "spec": {"nodeName": "w1", "containers": []}, "status": {"podIPs": [{"ip": "10.0.0.5"}]}});
    objects.pods.push(Arc::new(egress_objects::api::Pod::from(
        serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(pod).unwrap(),
    )));
    for node in ["gw1", "gw2", "w1"] {
        let object = json!({"metadata": {"name": node}, "spec": {}, "status": {}});
        objects.egress_nodes.push(Arc::new(serde_json::from_value(object).unwrap()));
    }
    objects
}

fn compared(text: &str, delete: bool) -> Result<DiffView> {
    compared_with(text, delete, &[])
}

fn compared_with(text: &str, delete: bool, flows: &[FlowsView]) -> Result<DiffView> {
    compare(cluster(), parsed(text), delete, (&Health::default(), &Config::default()), flows)
}

/// Returns the output of `egressctl flows -o json` on a node with these flows of the pod.
fn flows_of(node: &str, flows: &[(u16, &str, &str)]) -> FlowsView {
    let row = |(port, kind, egress): &(u16, &str, &str)| {
        json!({
            "pod": "shop/a", "podAddress": "10.0.0.5", "podPort": port, "remoteAddress": "198.51.100.7", "remotePort": 443,
            "protocol": "tcp", "egressIp": egress, "egressPort": 5000, "policy": "web", "gateway": "gw1", "ageSeconds": 1,
            "idleSeconds": 1, "kind": kind, "tcpState": "established",
        })
    };
    let items: Vec<Value> = flows.iter().map(row).collect();
    serde_json::from_value(json!({"node": node, "total": 3, "matched": 3, "items": items})).unwrap()
}

#[test]
fn diff_of_unchanged_objects_is_empty() {
    let view = compared(CLUSTER, false).unwrap();
    assert!(view.is_empty(), "{view:?}");
    assert_eq!(view.text(), "nothing would change\n");
    // The fields of a Node that a file omits stay.
    let view = compared("{apiVersion: v1, kind: Node, metadata: {name: gw1}}", false).unwrap();
    assert!(view.is_empty(), "{view:?}");
}

#[test]
fn diff_of_a_new_policy_shows_its_pods_and_addresses() {
    let text = compared(MAIL, false).unwrap().text();
    for part in [
        "EgressGatewayPolicy mail",
        "select 1 pods; get 192.0.2.3",
        "reach 198.51.100.0/24 by policy mail, not by policy web",
        "come into use, at gateway gw",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
}

#[test]
fn diff_lists_the_flows_of_all_nodes_that_would_not_continue() {
    let web = "{apiVersion: spillway.io/v1beta1, kind: EgressGatewayPolicy, metadata: {name: web}, spec: {selectors: [{podSelector: {}}], destinationCIDRs: [0.0.0.0/0], egressIPPools: [{name: public, count: 2}]}}";
    let nodes = [
        flows_of("w1", &[(4001, "translated", "192.0.2.1"), (4002, "untouched", "192.0.2.1")]),
        flows_of("w2", &[(4003, "translated", "192.0.2.2")]),
    ];
    let view = compared_with(web, true, &nodes).unwrap();
    let told: Vec<(u16, &str)> = view
        .items
        .iter()
        .filter_map(|row| match row {
            DiffRow::Flow { flow, becomes, .. } => Some((flow.pod_port, *becomes)),
            _ => None,
        })
        .collect();
    assert_eq!(told, [(4001, "breaks"), (4003, "breaks")], "{}", view.text());
    assert!(view.text().ends_with("2 of 2 flows of 2 nodes would not continue unchanged\n"), "{}", view.text());
}

#[test]
fn diff_applies_deletions() {
    let pool = "{apiVersion: spillway.io/v1beta1, kind: EgressIPPool, metadata: {name: public}, spec: {ipRanges: [{cidr: 192.0.2.0/28}], nodeSelector: {}}}";
    let view = compared(pool, true).unwrap();
    assert!(
        view.items.contains(&DiffRow::Object { object: "EgressIPPool public".into(), edit: change::Edit::Deleted })
    );
    assert!(view.text().contains("have Degraded True (PoolNotFound)"), "{}", view.text());
}

#[test]
fn diff_refuses_invalid_and_unsupported_objects() {
    let wrong = CLUSTER.replace("[0.0.0.0/0]", "[anywhere]");
    let (_, problems) = parse(Path::new("test.yaml"), wrong.as_bytes()).unwrap();
    let refused =
        if problems.is_empty() { compared(&wrong, false).unwrap_err().to_string() } else { problems[0].to_string() };
    assert!(refused.contains("destinationCIDRs"), "{refused}");
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: []}}";
    assert!(compared(pod, false).unwrap_err().to_string().contains("cannot be compared"));
}

#[test]
fn diff_on_a_machine_that_is_not_the_named_node_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let here = |node: Option<&str>| {
        let (bpffs, socket) = (directory.path().join("none"), directory.path().join("none.sock"));
        flows_here(&NodeAccess { bpffs, socket, node: node.map(str::to_owned) }).map_err(|error| error.to_string())
    };
    assert_eq!(here(None), Ok(None));
    let refused = here(Some("w1")).unwrap_err();
    assert!(refused.contains("this is node w1") && refused.contains("run egressctl on w1"), "{refused}");
}

#[test]
fn gateway_health_is_relative_to_the_newest_lease() {
    let lease = |node: &str, holder: &str, second: i64| -> Lease {
        let time = k8s_openapi::jiff::Timestamp::from_second(second).unwrap();
        serde_json::from_value(json!({
            "metadata": {"name": format!("spillway-gateway-{node}")},
            "spec": {"holderIdentity": holder, "renewTime": format!("{time:.6}")},
        }))
        .unwrap()
    };
    let leases =
        [lease("gw1", "gw1", 1000), lease("gw2", "gw2", 1010), lease("gw3", "gw3", 900), lease("gw4", "", 1010)];
    let health = change::health(leases.iter(), Duration::from_secs(15));
    let states = ["gw1", "gw2", "gw3", "gw4"]
        .map(|node| (health.of(&node.into()).is_proven(), health.of(&node.into()).is_unasked()));
    assert_eq!(states, [(true, false), (true, false), (false, false), (false, true)]);
}
