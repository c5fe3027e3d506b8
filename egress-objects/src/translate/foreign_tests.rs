//! Objects of other systems.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;
use crate::api;
use egress_core::model::*;

fn object<T: serde::de::DeserializeOwned>(api_version: &str, kind: &str, spec: Value) -> T {
    let metadata = json!({"name": "web", "uid": "u1", "creationTimestamp": "2026-01-01T00:00:10Z"});
    serde_json::from_value(json!({"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}))
        .unwrap()
}

fn cegp(spec: Value) -> Result<Policy, Vec<Problem>> {
    cilium::policy(&object::<api::CiliumEgressGatewayPolicy>("cilium.io/v2", "CiliumEgressGatewayPolicy", spec))
}

fn pools(ranges: &[(&str, &[&str])]) -> BTreeMap<PoolId, Pool> {
    let pool = |(name, cidrs): &(&str, &[&str])| {
        let ranges: Vec<Value> = cidrs.iter().map(|cidr| json!({"cidr": cidr})).collect();
        let mut object: api::ExternalIPPool =
            object("crd.antrea.io/v1beta1", "ExternalIPPool", json!({"ipRanges": ranges, "nodeSelector": {}}));
        object.metadata.name = Some((*name).to_owned());
        let pool = antrea::pool(&object).unwrap();
        (pool.id.clone(), pool)
    };
    ranges.iter().map(pool).collect()
}

fn egress(spec: Value, pools: &BTreeMap<PoolId, Pool>) -> Result<Policy, Vec<Problem>> {
    antrea::egress(&object::<api::Egress>("crd.antrea.io/v1beta1", "Egress", spec), pools, &BTreeMap::new())
}

#[test]
fn ciliums_labels_for_the_namespace_become_conditions_on_it() {
    let policy = cegp(json!({
        "selectors": [
            {"podSelector": {"matchLabels": {"org": "empire", "io.kubernetes.pod.namespace": "default"}}},
            {"podSelector": {"matchExpressions": [
                {"key": "k8s:io.cilium.k8s.namespace.labels.env", "operator": "In", "values": ["a", "b"]}
            ]}, "nodeSelector": {"matchLabels": {"n": "1"}}},
            {"namespaceSelector": {}}
        ],
        "destinationCIDRs": ["0.0.0.0/0"],
        "egressGateway": {"nodeSelector": {"matchLabels": {"egress": "true"}}, "interface": "eth1"},
        "egressGateways": []
    }))
    .unwrap();
    assert_eq!(policy.id.to_string(), "cegp/web");
    assert_eq!(policy.distribution, Distribution::PerEndpoint);
    let namespace = Some(Selector::label("kubernetes.io/metadata.name", "default"));
    let first = EndpointSelector { pod: Some(Selector::label("org", "empire")), namespace, node: None };
    let env = ("env".to_owned(), Requirement::In(["a".to_owned(), "b".to_owned()].into()));
    let second = EndpointSelector {
        pod: Some(Selector::everything()),
        namespace: Some(Selector::new([env])),
        node: Some(Selector::label("n", "1")),
    };
    let third = EndpointSelector { pod: None, namespace: Some(Selector::everything()), node: None };
    assert_eq!(policy.selectors, [first, second, third]);
    let Source::Gateways(gateways) = &policy.source else { panic!("{:?}", policy.source) };
    assert_eq!(gateways.len(), 1);
    assert_eq!(
        (&gateways[0].address, gateways[0].choice),
        (&AddressSource::Interface("eth1".into()), NodeChoice::First)
    );
}

#[test]
fn policies_that_cilium_silently_ignores_are_reported() {
    let whole = json!({
        "selectors": [{"podSelector": {}}],
        "destinationCIDRs": ["0.0.0.0/0"],
        "egressGateway": {"nodeSelector": {}},
    });
    assert!(cegp(whole.clone()).is_ok());
    for (field, value, told) in [
        ("egressGateway", json!({"nodeSelector": {}, "interface": "a", "egressIP": "192.0.2.1"}), "spec.egressGateway"),
        ("egressGateway", json!({"interface": "a"}), "spec.egressGateway"),
        ("egressGateway", json!({"nodeSelector": {}, "egressIP": "192.0.2"}), "spec.egressGateway.egressIP"),
        ("egressGateway", Value::Null, "spec.egressGateway"),
        ("selectors", json!([{}]), "spec.selectors[0]"),
        ("selectors", json!([]), "spec.selectors"),
        ("destinationCIDRs", json!([]), "spec.destinationCIDRs"),
        ("destinationCIDRs", json!(["10.0.0.0/33"]), "spec.destinationCIDRs[0]"),
        ("excludedCIDRs", json!(["x"]), "spec.excludedCIDRs[0]"),
        (
            "selectors",
            json!([{"podSelector": {"matchLabels": {"io.cilium.k8s.policy.serviceaccount": "x"}}}]),
            "spec.selectors[0].podSelector",
        ),
    ] {
        let mut spec = whole.clone();
        spec[field] = value;
        let problems = cegp(spec).unwrap_err();
        assert_eq!(problems.iter().map(|p| p.field.as_str()).collect::<Vec<_>>(), [told], "{problems:?}");
        let refusals = refusals(&problems);
        let (policy, why) = refusals.first_key_value().unwrap();
        assert!(policy.to_string() == "cegp/web" && why.starts_with(told), "{refusals:?}");
    }
}

#[test]
fn an_egress_takes_its_addresses_from_nodes_pools_or_both() {
    let pools =
        pools(&[("a", &["192.0.2.0/28"]), ("b", &["198.51.100.0/28", "2001:db8::/124"]), ("none", &["192.0.2.32/31"])]);
    let applied = json!({"podSelector": {"matchLabels": {"role": "web"}}});
    let read = |more: Value| {
        let mut spec = json!({"appliedTo": applied});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let policy = egress(spec, &pools).unwrap();
        let destinations: Vec<String> = policy.destinations.iter().map(ToString::to_string).collect();
        (policy.source, destinations.join(" "))
    };
    let of_pool = |name: &str, count: u32, ips: &[&str]| PoolRequest {
        pool: PoolId::new(PoolKind::Antrea, name),
        count,
        ips: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
    };
    let (source, destinations) = read(json!({"egressIP": "192.0.2.9"}));
    let Source::Gateways(gateways) = source else { panic!("{source:?}") };
    assert_eq!(gateways[0].address, AddressSource::Configured("192.0.2.9".parse().unwrap()));
    assert!(gateways[0].nodes.is_everything() && destinations == "0.0.0.0/0");
    for (more, requests, destinations) in [
        (json!({"externalIPPool": "a", "egressIP": ""}), vec![of_pool("a", 1, &[])], "0.0.0.0/0"),
        (json!({"externalIPPool": "b"}), vec![of_pool("b", 1, &[])], "0.0.0.0/0 ::/0"),
        (json!({"externalIPPool": "missing"}), vec![of_pool("missing", 1, &[])], "0.0.0.0/0 ::/0"),
        (
            json!({"externalIPPools": ["a", "missing"]}),
            vec![of_pool("a", 1, &[]), of_pool("missing", 1, &[])],
            "0.0.0.0/0 ::/0",
        ),
        (json!({"externalIPPool": "b", "egressIP": "2001:db8::5"}), vec![of_pool("b", 1, &["2001:db8::5"])], "::/0"),
        (json!({"externalIPPools": ["b", "a"]}), vec![of_pool("a", 1, &[]), of_pool("b", 1, &[])], "0.0.0.0/0 ::/0"),
        (
            json!({"externalIPPools": ["a", "b"], "egressIPs": ["198.51.100.1", "192.0.2.3", "198.51.100.2"]}),
            vec![of_pool("a", 1, &["192.0.2.3"]), of_pool("b", 2, &["198.51.100.1", "198.51.100.2"])],
            "0.0.0.0/0",
        ),
    ] {
        assert_eq!(read(more.clone()), (Source::Pools(requests), destinations.to_owned()), "{more}");
    }
    assert_eq!(pools[&PoolId::new(PoolKind::Antrea, "a")].total(), 14);
    assert_eq!(pools[&PoolId::new(PoolKind::Antrea, "none")].total(), 0);
}

#[test]
fn address_in_no_known_range_belongs_to_an_unreadable_pool() {
    let readable = pools(&[("a", &["192.0.2.0/28"])]);
    let known = pools(&[("c", &["203.0.113.0/28"])]).into_iter().map(|(id, pool)| (id, Some(pool)));
    let unreadable = known.chain([(PoolId::new(PoolKind::Antrea, "b"), None)]).collect();
    let pool_of = |address: &str| {
        let spec = json!({"appliedTo": {"podSelector": {}}, "externalIPPools": ["a", "b", "c"], "egressIP": address});
        let object = object::<api::Egress>("crd.antrea.io/v1beta1", "Egress", spec);
        let Source::Pools(requests) = antrea::egress(&object, &readable, &unreadable).unwrap().source else { panic!() };
        requests.into_iter().map(|request| request.pool.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(pool_of("192.0.2.3"), ["a"]);
    assert_eq!(pool_of("203.0.113.3"), ["c"], "its other fields may be what is wrong");
    assert_eq!(pool_of("198.51.100.3"), ["b"]);
}

#[test]
fn an_egress_with_contradictory_or_missing_fields_is_reported() {
    let pools = pools(&[]);
    assert!(egress(json!({"appliedTo": {}, "egressIP": "192.0.2.1"}), &pools).unwrap().selectors.is_empty());
    for (spec, field) in [
        (json!({"appliedTo": {"podSelector": {}}}), "spec"),
        (json!({"egressIP": "192.0.2"}), "spec.egressIP"),
        (json!({"egressIP": "192.0.2.1", "egressIPs": ["192.0.2.2"]}), "spec.egressIP"),
        (json!({"externalIPPool": "a", "externalIPPools": ["b"]}), "spec.externalIPPool"),
        (json!({"egressIP": "192.0.2.1", "bandwidth": {"rate": "fast"}}), "spec.bandwidth.rate"),
    ] {
        let problems = egress(spec, &pools).unwrap_err();
        assert_eq!(problems.iter().map(|p| p.field.as_str()).collect::<Vec<_>>(), [field], "{problems:?}");
    }
}
