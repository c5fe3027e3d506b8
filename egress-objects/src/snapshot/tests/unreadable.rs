//! Objects that cannot be understood.

use super::*;

#[test]
fn unreadable_policy_is_in_force_and_reports_its_problem() {
    let mut objects = objects();
    let spec = json!({"egressIPPool": {"name": "public"}, "bandwidth": {"rate": "100u"}});
    objects.policies = vec![policy("broken", spec)];
    let plan = round(&mut objects, &health(), 100);
    assert!(plan.egress_ips.is_empty() && plan.outcomes.len() == 1);
    let status = objects.policies[0].status.as_ref().unwrap();
    assert_eq!((status.selected_endpoints, status.slots.len()), (6, 0));
    let ready = &status.conditions[0];
    assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", "Invalid"));
    assert!(
        ready.message.starts_with("spec.bandwidth.rate: \"100u\" is not a quantity above zero"),
        "{}",
        ready.message
    );
    assert!(ready.message.ends_with("; until then, it drops packets of pods that it selects"), "{}", ready.message);
}

#[test]
fn unreadable_pool_keeps_addresses_in_use_and_reports_its_problem() {
    let mut objects = objects();
    let before = round(&mut objects, &health(), 100);
    let pool = Arc::make_mut(&mut objects.pools[0]);
    pool.spec.ip_ranges[1] = serde_json::from_value(json!({"start": "2001:db8::1f", "end": "2001:db8::10"})).unwrap();
    let (read, problems) = snapshot(&objects);
    assert!(read.pools.is_empty() && read.unreadable_pools.len() == 1 && problems.len() == 1, "{problems:?}");
    let after = round(&mut objects, &health(), 200);
    assert_eq!((&after.egress_ips, &after.blocks), (&before.egress_ips, &before.blocks));
    let status = objects.pools[0].status.as_ref().unwrap();
    let told =
        "spec.ipRanges[1]: 2001:db8::10 lies before 2001:db8::1f: swap them: write the first and the last address";
    assert_eq!((status.conditions[0].reason.as_str(), status.conditions[0].message.as_str()), ("Invalid", told));
    assert_eq!((status.conditions.len(), status.usage.used), (1, 10), "nothing drains");
    assert_eq!(condition(&objects, "Ready").0, "True");
    assert_eq!(condition(&objects, "Degraded").1, "Invalid");
}

#[test]
fn returning_gateway_carries_the_addresses_of_an_unreadable_pool_again() {
    let mut objects = objects();
    round(&mut objects, &health(), 100);
    let spec = &mut Arc::make_mut(&mut objects.pools[0]).spec;
    spec.ip_ranges[1] = serde_json::from_value(json!({"start": "2001:db8::1f", "end": "2001:db8::10"})).unwrap();
    let mut away = health();
    away.nodes.insert("gw1".into(), NodeHealth { lease: LeaseState::Lapsed, gone: false });
    let carried_by = |plan: &Plan, gateway: &str| {
        plan.egress_ips.values().filter(|ip| ip.carriers.iter().any(|carrier| carrier.as_str() == gateway)).count()
    };
    let without = round(&mut objects, &away, 200);
    assert_eq!([carried_by(&without, "gw0"), carried_by(&without, "gw1")], [10, 0]);
    let back = round(&mut objects, &health(), 300);
    assert_eq!([carried_by(&back, "gw0"), carried_by(&back, "gw1")], [10, 10]);

    // If the selector is not understood, nothing is known of other nodes.
    let selector = json!({"matchExpressions": [{"key": "egress", "operator": "Is", "values": ["true"]}]});
    Arc::make_mut(&mut objects.pools[0]).spec.node_selector = serde_json::from_value(selector).unwrap();
    let read = snapshot(&objects).0;
    assert!(read.unreadable_pools.into_values().all(|pool| pool.is_none()));
    let same = round(&mut objects, &health(), 400);
    assert_eq!(same.egress_ips, back.egress_ips);
}
