//! Tests that each rule rejects invalid objects, with its message, at its field.

mod generated;
mod versions;

use super::*;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinitionVersion;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn policy(spec: &str) -> Value {
    object("EgressGatewayPolicy", spec)
}

fn pool(spec: &str) -> Value {
    object("EgressIPPool", spec)
}

fn object(kind: &str, spec: &str) -> Value {
    let spec: Value = serde_saphyr::from_str(spec).expect("the test's YAML");
    json!({ "apiVersion": "spillway.io/v1beta1", "kind": kind, "metadata": { "name": "web" }, "spec": spec })
}

thread_local! {
    /// By apiVersion and kind.
    static RULES: BTreeMap<[String; 2], Rules> = crds().into_iter().flat_map(|(_, crd)| {
        let (group, kind) = (crd.spec.group, crd.spec.names.kind);
        let rules = move |version: CustomResourceDefinitionVersion| {
            ([format!("{group}/{}", version.name), kind.clone()], Rules::new(&version).unwrap())
        };
        crd.spec.versions.into_iter().map(rules)
    }).collect();
}

fn check(mut object: Value) -> Vec<String> {
    let of = ["apiVersion", "kind"].map(|field| object[field].as_str().unwrap().to_owned());
    RULES.with(|rules| rules[&of].check(&mut object).iter().map(ToString::to_string).collect())
}

/// Returns the object in the previous version.
fn alpha(mut object: Value) -> Value {
    object["apiVersion"] = "spillway.io/v1alpha1".into();
    object
}

#[track_caller]
fn refused(object: Value, expected: &[&str]) {
    assert_eq!(check(object), expected);
}

#[track_caller]
fn accepted(object: Value) {
    assert_eq!(check(object), Vec::<String>::new());
}

const REST: &str = "selectors: [{podSelector: {}}], destinationCIDRs: [0.0.0.0/0]";

fn gateway(gateway: &str) -> Value {
    policy(&format!("{{{REST}, egressGateways: [{gateway}]}}"))
}

fn destination(cidr: &str) -> Value {
    policy(&format!(
        "{{selectors: [{{podSelector: {{}}}}], destinationCIDRs: [{cidr}], egressIPPools: [{{name: public}}]}}"
    ))
}

fn range(range: &str) -> Value {
    pool(&format!("{{ipRanges: [{range}], nodeSelector: {{}}}}"))
}

#[test]
fn the_documented_objects_are_accepted() {
    accepted(policy(
        r#"
selectors:
- podSelector: {matchLabels: {app: web}}
  namespaceSelector: {matchLabels: {env: prod}}
  nodeSelector: {}
destinationCIDRs: [0.0.0.0/0, "::/0"]
excludedCIDRs: [10.0.0.0/8]
egressGateways:
- nodeSelector: {matchLabels: {egress: "true"}}
  egressIP: 192.0.2.10
  weight: 1
distribution: PerFlow
zone: {mode: Any}
onNoGateway: Drop
existingConnections: Keep
bandwidth: {rate: 800M, burst: 2G}
"#,
    ));
    accepted(policy(&format!("{{{REST}, egressIPPools: [{{name: public, count: 3}}]}}")));
    accepted(pool(
        r#"
ipRanges: [{cidr: 192.0.2.0/28}, {start: 192.0.2.32, end: 192.0.2.40}]
nodeSelector: {matchLabels: {egress: "true"}}
subnetInfo: {gateway: 192.0.2.1, prefixLength: 24, vlan: 10}
maxEgressIPsPerNode: 10
failback: {mode: Preferred, delay: 10s}
portBlockSize: 64
"#,
    ));
}

#[test]
fn null_counts_as_absent() {
    accepted(policy(&format!("{{{REST}, egressGateway: null, egressIPPools: [{{name: public, count: null}}]}}")));
}

#[test]
fn schema_requires_the_fields_that_every_object_needs() {
    let required = |kind: &str, object: Value, fields: &[&str]| {
        let said = check(object);
        let missing: Vec<String> =
            fields.iter().map(|field| format!("spec.{field}: this field is required: add")).collect();
        assert_eq!(said.len(), fields.len(), "{kind}: {said:?}");
        assert!(said.iter().zip(&missing).all(|(said, missing)| said.starts_with(missing)), "{kind}: {said:?}");
    };
    required("EgressGatewayPolicy", policy("{egressIPPools: [{name: public}]}"), &["destinationCIDRs", "selectors"]);
    required("EgressPolicy", object("EgressPolicy", "{}"), &["destinationCIDRs", "egressIPPools", "selectors"]);
    required("EgressIPPool", pool("{}"), &["ipRanges", "nodeSelector"]);
}

#[test]
fn a_policy_needs_selectors_and_destinations() {
    refused(
        policy("{selectors: [], destinationCIDRs: [], egressIPPools: [{name: public}]}"),
        &[
            "spec.destinationCIDRs: a policy without destinations matches no packet: write at least one CIDR, such as \
             0.0.0.0/0 and ::/0 for everything outside the cluster",
            "spec.selectors: a policy without selectors selects no pod: write at least one, such as {podSelector: \
             {matchLabels: {app: web}}}, or {podSelector: {}} for every pod",
        ],
    );
    refused(
        policy("{selectors: [{nodeSelector: {}}], destinationCIDRs: [0.0.0.0/0], egressIPPools: [{name: public}]}"),
        &[
            "spec.selectors[0]: a selector needs podSelector or namespaceSelector: write podSelector: {} to select every pod",
        ],
    );
}

#[test]
fn egress_ips_come_from_exactly_one_place() {
    let sentence =
        "spec: a policy takes its egress IPs from one place: write exactly one of egressGateways and egressIPPools";
    for source in [
        "",
        "egressGateways: []",
        "egressGateway: {nodeSelector: {}}, egressIPPools: [{name: public}]",
        "egressGateways: [{nodeSelector: {}}], egressIPPools: [{name: public}]",
        "egressGateway: {nodeSelector: {}}, egressGateways: [{nodeSelector: {}}]",
        "egressIPPool: {name: a}, egressIPPools: [{name: b}]",
    ] {
        refused(alpha(policy(&format!("{{{REST}, {source}}}"))), &[sentence]);
    }
    accepted(policy(&format!("{{{REST}, egressGateways: [], egressIPPools: [{{name: a}}]}}")));
}

#[test]
fn gateways() {
    accepted(gateway("{nodeSelector: {}}"));
    accepted(gateway("{nodeSelector: {}, interface: eth1.10}"));
    refused(
        gateway("{nodeSelector: {}, egressIP: 192.0.2.1, interface: eth1}"),
        &[
            "spec.egressGateways[0]: a gateway has either an egressIP or an interface: remove one of them (neither means \
           the address of the default route's interface)",
        ],
    );
    for weight in [0, -1, 101, 300] {
        refused(
            gateway(&format!("{{nodeSelector: {{}}, weight: {weight}}}")),
            &[&format!("spec.egressGateways[0].weight: {weight} is out of range: write a number from 1 to 100")],
        );
    }
    refused(
        gateway("{nodeSelector: {}, egressIP: 192.0.2.1/24}"),
        &["spec.egressGateways[0].egressIP: \"192.0.2.1/24\" is not an IP address: write it without a prefix length, \
           such as 192.0.2.10 or 2001:db8::10"],
    );
    for interface in ["\"\"", "\"eth 1\"", "a/b", "abcdefghijklmnop", "\"a\\u001b[31m\"", "\"a\\u009b31m\""] {
        let found = check(gateway(&format!("{{nodeSelector: {{}}, interface: {interface}}}")));
        assert_eq!(found.len(), 1, "{interface}: {found:?}");
        assert!(found[0].contains("is not the name of a network interface: write 1 to 15 characters"), "{found:?}");
    }
    refused(
        gateway("{egressIP: 192.0.2.1}"),
        &[
            "spec.egressGateways[0].nodeSelector: this field is required: add nodeSelector: {}. The nodes that may be this \
           gateway. One of them is chosen; another takes over when it fails. Empty selects every node.",
        ],
    );
}

#[test]
fn cidrs() {
    accepted(destination("203.0.113.7/32, 2001:db8::/32"));
    refused(
        destination("0.0.0.0/0, 203.0.113.7"),
        &["spec.destinationCIDRs[1]: \"203.0.113.7\" is not a CIDR: write an address and a prefix length, such as \
           203.0.113.0/24 or 2001:db8::/32 (a single address is 203.0.113.7/32 or 2001:db8::7/128)"],
    );
    refused(
        destination("203.0.113.7/24"),
        &[
            "spec.destinationCIDRs[0]: \"203.0.113.7/24\" has bits set beyond its prefix: write the network with zeroes there, such as 203.0.113.0/24, or /32 (IPv6: /128) for the single address",
        ],
    );
    for wrong in ["300.0.0.0/8", "10.0.0.0/33", "2001:db8::/129", "example.org", "\"\"", "::ffff:10.0.0.0/104"] {
        let found = check(destination(wrong));
        assert!(found.len() == 1 && found[0].contains("is not a CIDR: write"), "{wrong}: {found:?}");
    }
}

#[test]
fn label_selectors() {
    let selects = |selector: &str| {
        policy(&format!(
            "{{selectors: [{{podSelector: {selector}}}], destinationCIDRs: [0.0.0.0/0], egressIPPools: [{{name: a}}]}}"
        ))
    };
    let expression = |expression: &str| selects(&format!("{{matchExpressions: [{{key: app, {expression}}}]}}"));
    for fine in ["operator: In, values: [web]", "operator: Exists", "operator: DoesNotExist, values: []"] {
        accepted(expression(fine));
    }
    let at = "spec.selectors[0].podSelector.matchExpressions[0]";
    for wrong in ["operator: In", "operator: In, values: []", "operator: NotIn, values: []"] {
        let told = format!("{at}: In and NotIn need values: write at least one, such as values: [web]");
        refused(expression(wrong), &[&told]);
    }
    let told = format!("{at}: Exists and DoesNotExist take no values: remove values, or write In or NotIn");
    refused(expression("operator: Exists, values: [web]"), &[&told]);

    let many = |n: usize| (0..n).map(|n| format!("k{n}: v")).collect::<Vec<_>>().join(", ");
    accepted(selects(&format!("{{matchLabels: {{{}}}}}", many(64))));
    let found = check(selects(&format!("{{matchLabels: {{{}}}}}", many(65))));
    assert!(found.len() == 1 && found[0].contains("podSelector.matchLabels: more than 64 fields"), "{found:?}");
    let long = "v".repeat(64);
    let found = check(expression(&format!("operator: In, values: [{long}]")));
    assert!(found.len() == 1 && found[0].contains("values[0]: more than 63 characters"), "{found:?}");
    let many = vec!["v"; 65].join(", ");
    let found = check(expression(&format!("operator: In, values: [{many}]")));
    assert!(found.len() == 1 && found[0].contains("values: more than 64 entries"), "{found:?}");
}

#[test]
fn pool_requests() {
    let request = |request: &str| policy(&format!("{{{REST}, egressIPPools: [{request}]}}"));
    accepted(request("{name: a, egressIPs: [192.0.2.1, 192.0.2.2]}"));
    refused(
        request("{name: a, count: 1, egressIPs: [192.0.2.1, 192.0.2.2]}"),
        &[
            "spec.egressIPPools[0]: count is less than the number of egressIPs: raise count, or leave it out to get just \
           the egressIPs",
        ],
    );
    for count in [0, 1025, -3] {
        refused(
            request(&format!("{{name: a, count: {count}}}")),
            &[&format!("spec.egressIPPools[0].count: {count} is out of range: write a number from 1 to 1024")],
        );
    }
    for name in ["", "Public", "a/b", "-a", "a..b", "a\\u001b[31m"] {
        let found = check(request(&format!("{{name: \"{name}\"}}")));
        let told = "is not the name of an object: write that of an EgressIPPool (lower-case letters, digits, - and .)";
        assert!(
            found.len() == 1 && found[0].starts_with("spec.egressIPPools[0].name: ") && found[0].ends_with(told),
            "{found:?}"
        );
    }
    accepted(request("{name: a.b-c.0}"));
}

#[test]
fn bandwidth() {
    let bandwidth =
        |rate: &str| policy(&format!("{{{REST}, egressIPPools: [{{name: a}}], bandwidth: {{rate: {rate}}}}}"));
    accepted(bandwidth("800M"));
    accepted(bandwidth("\"1500000\""));
    for rate in ["fast", "\"0\"", "-5M", "800 M", "100u", "5n", "+800M", "\"1e19\"", "\"1234567890123456789\""] {
        let found = check(bandwidth(rate));
        assert!(found.len() == 1 && found[0].contains("is not a quantity above zero: write"), "{rate}: {found:?}");
    }
    refused(bandwidth("800"), &["spec.bandwidth.rate: 800 is not a string in YAML: write \"800\" in quotes"]);
}

#[test]
fn pool_ranges() {
    accepted(range("{start: \"2001:db8::1\", end: \"2001:db8::9\"}"));
    for wrong in ["{}", "{start: 192.0.2.1}", "{end: 192.0.2.1}", "{cidr: 192.0.2.0/28, start: 192.0.2.1}"] {
        refused(
            range(wrong),
            &[
                "spec.ipRanges[0]: a range is either a cidr, or a start and an end: write {cidr: 192.0.2.0/28} or {start: \
               192.0.2.32, end: 192.0.2.40}",
            ],
        );
    }
    accepted(range("{start: 192.0.2.200, end: 192.0.3.1}"));
    accepted(range("{start: 192.0.2.1, end: 192.0.2.1}"));
    for reversed in ["{start: 192.0.2.40, end: 192.0.2.32}", "{start: 192.0.3.1, end: 192.0.2.200}"] {
        refused(range(reversed), &["spec.ipRanges[0]: end lies before start: write the first and the last address"]);
    }
    refused(
        range("{start: 192.0.2.1, end: \"2001:db8::1\"}"),
        &["spec.ipRanges[0]: start and end are of different families: write two IPv4 or two IPv6 addresses"],
    );
    refused(
        pool("{ipRanges: [], nodeSelector: {}}"),
        &["spec.ipRanges: a pool without ranges has no address: write at least one, such as {cidr: 192.0.2.0/28} or \
           {start: 192.0.2.32, end: 192.0.2.40}"],
    );
}

#[test]
fn pool_announcements() {
    let with = |rest: &str| pool(&format!("{{ipRanges: [{{cidr: 192.0.2.0/28}}], nodeSelector: {{}}, {rest}}}"));
    for rest in
        ["announce: Route", "announce: Route, outbound: Spread", "announce: None, outbound: Owner", "announce: ARP"]
    {
        accepted(with(rest));
    }
    refused(
        with("announce: Route, outbound: Owner"),
        &["spec.outbound: with announce: Route every carrier attracts connections, so one of them cannot send all \
           packets: remove outbound, or write outbound: Spread"],
    );
}

#[test]
fn pool_limits() {
    let with = |rest: &str| pool(&format!("{{ipRanges: [{{cidr: 192.0.2.0/28}}], nodeSelector: {{}}, {rest}}}"));
    for (rest, sentence) in [
        ("maxEgressIPsPerNode: 0", "spec.maxEgressIPsPerNode: 0 is out of range: write a number from 1 to 255"),
        ("maxEgressIPsPerNode: 256", "spec.maxEgressIPsPerNode: 256 is out of range: write a number from 1 to 255"),
        ("portBlockSize: 128", "spec.portBlockSize: 128 is out of range: write a number from 64 to 64"),
        (
            "failback: {delay: soon}",
            "spec.failback.delay: \"soon\" is not a duration: write a whole number and a unit (ms, s, m or h), such as 10s",
        ),
        (
            "subnetInfo: {gateway: 192.0.2.1, prefixLength: 33}",
            "spec.subnetInfo: prefixLength is longer than an address of the gateway's family: write at most 32 for IPv4 \
             and 128 for IPv6",
        ),
        (
            "subnetInfo: {gateway: 192.0.2.1, prefixLength: 24, vlan: 4095}",
            "spec.subnetInfo.vlan: 4095 is out of range: write a number from 0 to 4094",
        ),
    ] {
        refused(with(rest), &[sentence]);
    }
}

#[test]
fn tenant_rules_of_namespaces() {
    let team = |pools: &str| object("EgressPolicy", &format!("{{{REST}{pools}}}"));
    accepted(team(", egressIPPools: [{name: public, count: 2}]"));
    refused(
        team(", egressIPPools: []"),
        &[
            "spec.egressIPPools: a policy without a pool has no egress IP: write at least one, such as {name: public, count: 2}; the \
           pool's allowedNamespaces must select this namespace",
        ],
    );
    let with = |rest: &str| pool(&format!("{{ipRanges: [{{cidr: 192.0.2.0/28}}], nodeSelector: {{}}, {rest}}}"));
    accepted(with("allowedNamespaces: {}, quotas: [{namespaceSelector: {}, maxEgressIPs: 0}]"));
    refused(
        with("quotas: [{namespaceSelector: {}, maxEgressIPs: 1}]"),
        &[
            "spec.quotas: quotas are for the namespaces that may use the pool: write allowedNamespaces, too, such as {matchLabels: \
           {egress: allowed}}, or {} for all",
        ],
    );
    refused(
        with("allowedNamespaces: {}, quotas: [{namespaceSelector: {}, maxEgressIPs: -1}]"),
        &["spec.quotas[0].maxEgressIPs: -1 is out of range: write a number from 0 to 1024"],
    );
}

#[test]
fn errors_of_structure_name_the_known_fields() {
    refused(
        policy(&format!("{{{REST}, egressIPPools: [{{name: a}}], distributon: PerFlow}}")),
        &["spec.distributon: unknown field \"distributon\": the fields here are bandwidth, destinationCIDRs, \
           distribution, egressGateways, egressIPPools, excludedCIDRs, existingConnections, onNoGateway, selectors, zone"],
    );
    refused(
        policy(&format!("{{{REST}, egressIpPool: {{name: a}}}}")),
        &["spec.egressIpPool: unknown field \"egressIpPool\": write egressIPPools"],
    );
    refused(
        policy(&format!("{{{REST}, egressIPPools: [{{name: a}}], distribution: Random}}")),
        &["spec.distribution: \"Random\" is not known here: write PerFlow or PerEndpoint"],
    );
    refused(
        policy("{selectors: {podSelector: {}}, destinationCIDRs: [0.0.0.0/0], egressIPPools: [{name: a}]}"),
        &["spec.selectors: expected a list, found a map of fields: write a list"],
    );
}

#[test]
fn typed_cel_validation_reports_the_same_messages() {
    for object in [policy(&format!("{{{REST}}}")), destination("1.2.3.4")] {
        let typed: EgressGatewayPolicy = serde_json::from_value(object.clone()).unwrap();
        let theirs: Vec<_> = typed.validate_cel().unwrap_err().iter().map(ToString::to_string).collect();
        assert_eq!(check(object), theirs);
    }
    let object = range("{start: 192.0.2.1}");
    let typed: EgressIPPool = serde_json::from_value(object.clone()).unwrap();
    let theirs: Vec<_> = typed.validate_cel().unwrap_err().iter().map(ToString::to_string).collect();
    assert_eq!(check(object), theirs);
}

#[test]
fn accepted_objects_survive_a_round_trip() {
    let object = gateway("{nodeSelector: {matchLabels: {a: b}}, egressIP: 192.0.2.10}");
    let typed: EgressGatewayPolicy = serde_json::from_value(object).unwrap();
    assert_eq!(typed.spec.egress_gateways.as_ref().unwrap()[0].weight, 1);
    let again: EgressGatewayPolicy = serde_json::from_value(serde_json::to_value(&typed).unwrap()).unwrap();
    assert_eq!(typed, again);
    accepted(serde_json::to_value(&typed).unwrap());
}

#[test]
fn objects_that_the_controller_writes_pass_validation() {
    let address: std::net::IpAddr = "2001:db8::10".parse().unwrap();
    let mut ip = EgressIP::new(
        &egress_ip_name(address),
        EgressIPSpec {
            address: address.to_string(),
            policies: vec![PolicyUse { policy: "web".into(), weight: 2 }],
            ..Default::default()
        },
    );
    ip.status = Some(EgressIPStatus { node: Some("gw1".into()), epoch: 3, ..Default::default() });
    assert_eq!(ip.metadata.name.as_deref(), Some("2001-0db8-0000-0000-0000-0000-0000-0010"));
    accepted(serde_json::to_value(&ip).unwrap());
    let mut node = EgressNode::new("w1", EgressNodeSpec::default());
    node.status = Some(EgressNodeStatus { occupied_blocks: vec![3], ..Default::default() });
    accepted(serde_json::to_value(&node).unwrap());
}

#[test]
fn crds_have_no_unknown_formats_and_no_nullable_fields() {
    for (name, crd) in crds() {
        let root = crd.spec.versions[0].schema.clone().unwrap().open_api_v3_schema.unwrap();
        let text = serde_json::to_string(&root.properties.unwrap()["spec"]).unwrap();
        assert!(!text.contains("\"uint"), "{name}");
        assert!(!text.contains("\"nullable\""), "{name}: null would count as given in the rules' has()");
    }
}

/// Lists the declarations that each of our APIs must have and that a schema lacks, by the field's path.
fn lacks(schema: &Value, path: &str) -> Vec<String> {
    let mut found = Vec::new();
    let has = |key: &str| schema.get(key).is_some();
    match schema["type"].as_str() {
        Some("array") if !has("x-kubernetes-list-type") => found.push(format!("{path}: no list type")),
        Some("integer") if !has("minimum") => found.push(format!("{path}: no minimum")),
        _ => {}
    }
    found.extend(lacks_of(schema.get("items"), &format!("{path}[]")));
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        found.extend(lacks(property, &format!("{path}.{name}")));
    }
    found
}

fn lacks_of(schema: Option<&Value>, path: &str) -> Vec<String> {
    schema.map(|schema| lacks(schema, path)).unwrap_or_default()
}

#[test]
fn crds_declare_list_types_and_minimums_of_all_fields() {
    for (name, crd) in crds() {
        let root = serde_json::to_value(&crd.spec.versions[0].schema).unwrap()["openAPIV3Schema"].clone();
        assert_eq!(lacks(&root, ""), Vec::<String>::new(), "{name}");
        // An EgressNode's status is a report of its agent, not an answer to its specification.
        let observes = root["properties"]["status"]["properties"].get("observedGeneration").is_some();
        assert_eq!(observes, name != "egressnodes.yaml", "{name}");
    }
}
