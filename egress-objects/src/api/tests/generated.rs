//! Objects that proptest generates.

use super::*;

fn arbitrary_json() -> impl Strategy<Value = Value> {
    let field = prop::sample::select(vec![
        "selectors",
        "podSelector",
        "destinationCIDRs",
        "egressGateways",
        "egressIPPool",
        "name",
        "count",
        "egressIPs",
        "ipRanges",
        "cidr",
        "start",
        "end",
        "zone",
        "mode",
        "bandwidth",
        "rate",
        "failback",
        "delay",
        "x",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[0-9a-f:./]{0,20}".prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(field.clone(), inner, 0..5)
                .prop_map(|map| map.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn validation_accepts_only_objects_that_deserialize(spec in arbitrary_json()) {
        for kind in ["EgressGatewayPolicy", "EgressIPPool"] {
            let object = json!({ "apiVersion": "spillway.io/v1beta1", "kind": kind, "metadata": {}, "spec": spec });
            if check(object.clone()).is_empty() {
                match kind {
                    "EgressIPPool" => drop(serde_json::from_value::<EgressIPPool>(object).unwrap()),
                    _ => drop(serde_json::from_value::<EgressGatewayPolicy>(object).unwrap()),
                }
            }
        }
    }
}

/// Mostly `right`, sometimes `wrong`.
fn mostly<T: std::fmt::Debug>(
    right: impl Strategy<Value = T> + 'static,
    wrong: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = T> {
    prop_oneof![6 => right, 1 => wrong]
}

fn one_of(texts: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop::sample::select(texts).prop_map(str::to_owned)
}

fn any_selector() -> impl Strategy<Value = Value> {
    let expression = |operators, values| {
        let values = prop::option::of(prop::collection::vec(one_of(&["a", ""]), values));
        (one_of(operators), values).prop_map(|(operator, values)| match values {
            Some(values) => json!({ "key": "k", "operator": operator, "values": values }),
            None => json!({ "key": "k", "operator": operator }),
        })
    };
    let compared = (one_of(&["In", "NotIn"]), one_of(&["a", "b"]))
        .prop_map(|(operator, value)| json!({ "key": "k", "operator": operator, "values": [value] }));
    let any = expression(&["In", "NotIn", "Exists", "DoesNotExist", "Is"], 0..3);
    let expressions = prop::collection::vec(mostly(compared, any), 0..3);
    expressions.prop_map(|expressions| json!({ "matchLabels": { "a": "b" }, "matchExpressions": expressions }))
}

fn any_source() -> impl Strategy<Value = (&'static str, Value)> {
    let address =
        || mostly(one_of(&["192.0.2.1", "2001:db8::1"]), one_of(&["192.0.2.01", "::ffff:192.0.2.1", "fe80::1%a"]));
    let pool =
        (mostly("[a-z][a-z0-9]{0,3}", ".{0,3}"), prop::option::of(1..1026), prop::collection::vec(address(), 0..2));
    let pool = pool.prop_map(|(name, count, ips)| match count {
        Some(count) => json!({ "name": name, "count": count, "egressIPs": ips }),
        None => json!({ "name": name, "egressIPs": ips }),
    });
    let interface = mostly("[a-z0-9.@-]{1,15}", ".{0,16}");
    let gateway = (any_selector(), 0..102, prop::option::of(address()), prop::option::of(interface));
    let gateway = gateway.prop_map(|(nodes, weight, ip, interface)| match (ip, interface) {
        (Some(ip), _) => json!({ "nodeSelector": nodes, "weight": weight, "egressIP": ip }),
        (None, Some(interface)) => json!({ "nodeSelector": nodes, "interface": interface }),
        (None, None) => json!({ "nodeSelector": nodes }),
    });
    prop_oneof![
        prop::collection::vec(pool, 1..3).prop_map(|pools| ("egressIPPools", Value::from(pools))),
        prop::collection::vec(gateway, 1..3).prop_map(|gateways| ("egressGateways", Value::from(gateways))),
    ]
}

/// Generates specs of policies that are valid or almost valid.
fn any_policy() -> impl Strategy<Value = Value> {
    let right = one_of(&["0.0.0.0/0", "10.0.0.0/8", "::/0", "2001:db8::/33", "192.0.2.1/32"]);
    let wrong = one_of(&["10.0.0.1/8", "010.0.0.0/8", "10.0.0.0/33", "10.0.0.0/08", "::ffff:10.0.0.0/104", "1.2.3.4"]);
    let cidrs = prop::collection::vec(mostly(right, wrong), 1..3);
    let rate = mostly(
        "[1-9][0-9]{0,2}(|[.][0-9]{1,2})(|m|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9])",
        "[+-]?[0-9]{0,20}[.]?[0-9]{0,2}(|[numkKMGTPE]i?|[eE][+-]?[0-9]{0,2})",
    );
    (any_selector(), cidrs, any_source(), rate).prop_map(|(pods, cidrs, (field, source), rate)| {
        json!({
            "selectors": [{ "podSelector": pods }], "destinationCIDRs": cidrs, field: source, "bandwidth": { "rate": rate },
        })
    })
}

/// Generates specs of pools that are valid or almost valid. IPv6 ranges are in order, because CEL cannot compare IPv6 addresses.
fn any_pool() -> impl Strategy<Value = Value> {
    let v4 = || any::<[u8; 2]>().prop_map(|[a, b]| format!("10.0.{a}.{b}"));
    let v6 =
        any::<[u16; 2]>().prop_map(|[a, b]| (format!("2001:db8::{:x}", a.min(b)), format!("2001:db8::{:x}", a.max(b))));
    let ends = prop_oneof![4 => (v4(), v4()), 2 => v6, 1 => (v4(), Just("2001:db8::1".to_owned()))];
    let range = prop_oneof![
        ends.prop_map(|(start, end)| json!({ "start": start, "end": end })),
        one_of(&["192.0.2.0/28", "192.0.2.1/32", "2001:db8::/64", "192.0.2.1/28"])
            .prop_map(|cidr| json!({ "cidr": cidr })),
    ];
    let delay = mostly("[0-9]{1,9}(ms|s|m|h)", "[+-]?[0-9]{0,20}(ms|s|m|h|d|)");
    let subnet = (one_of(&["192.0.2.1", "2001:db8::1", "192.0.2"]), mostly(1..33, 0..130), mostly(0..4095, -1..5000));
    let words = (any_selector(), delay, subnet, mostly(1..65, 0..70), mostly(1..256, 0..300));
    (prop::collection::vec(range, 1..3), words).prop_map(|(ranges, (nodes, delay, subnet, carriers, most))| {
        json!({
            "ipRanges": ranges, "nodeSelector": nodes, "failback": { "delay": delay }, "carriers": carriers,
            "maxEgressIPsPerNode": most,
            "subnetInfo": { "gateway": subnet.0, "prefixLength": subnet.1, "vlan": subnet.2 },
        })
    })
}

/// The rules in CEL and in Rust must agree: an object that an API server accepts and a controller refuses is not carried out.
mod accepted_objects_are_carried_out {
    use super::*;
    use crate::translate;

    fn read<T: serde::de::DeserializeOwned>(kind: &str, spec: Value) -> Option<T> {
        let object =
            json!({ "apiVersion": "spillway.io/v1beta1", "kind": kind, "metadata": { "name": "web" }, "spec": spec });
        check(object.clone()).is_empty().then(|| serde_json::from_value(object).unwrap())
    }

    proptest! {
        // Fails the test if too few objects are accepted.
        #![proptest_config(ProptestConfig { cases: 128, max_global_rejects: 8192, ..ProptestConfig::default() })]

        #[test]
        fn policies(spec in any_policy()) {
            let object = read::<EgressGatewayPolicy>("EgressGatewayPolicy", spec);
            prop_assume!(object.is_some());
            prop_assert_eq!(translate::read(&object.unwrap()).1, []);
        }

        #[test]
        fn policies_of_namespaces(spec in any_policy()) {
            let object = read::<EgressPolicy>("EgressPolicy", spec);
            prop_assume!(object.is_some());
            prop_assert_eq!(translate::read_namespaced(&object.unwrap()).1, []);
        }

        #[test]
        fn pools(spec in any_pool()) {
            let object = read::<EgressIPPool>("EgressIPPool", spec);
            prop_assume!(object.is_some());
            let read = translate::pool(&object.unwrap());
            prop_assert!(read.is_ok(), "{:?}", read);
        }
    }
}
