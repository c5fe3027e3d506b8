//! Tests of policies of namespaces.

use super::*;
use egress_objects::api::EgressPolicy;

const TEAM: &str = "
apiVersion: spillway.io/v1beta1
kind: EgressPolicy
metadata: {name: web, namespace: NAMESPACE}
spec:
  selectors: [{podSelector: {}}]
  destinationCIDRs: [198.51.100.0/24]
  egressIPPools: [{name: public}]
";

fn reason(store: &Store, namespace: &str, kind: &str) -> Option<(String, String)> {
    let policy = store.get::<EgressPolicy>(&Key::namespaced(namespace, "web"))?;
    let conditions = policy.status.clone()?.conditions;
    let found = conditions.into_iter().find(|condition| condition.type_ == kind)?;
    Some((found.reason, found.message))
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_a_policy_of_a_namespace_selects_its_own_pods_and_says_there_what_it_may_not() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let pool = format!("{POOL}  allowedNamespaces: {{matchLabels: {{kubernetes.io/metadata.name: shop}}}}\n");
    fs::write(world.path().join("pool.yaml"), pool).unwrap();
    for namespace in ["shop", "bank"] {
        let text = TEAM.replace("NAMESPACE", namespace);
        fs::write(world.path().join(format!("team-{namespace}.yaml")), text).unwrap();
    }
    let _controller = controller(world.path(), "one");
    world.until(|store| reason(store, "shop", "Ready").filter(|ready| ready.0 == "AsExpected")).await;
    let refused = world.until(|store| reason(store, "bank", "Degraded").filter(|found| found.0 == "NotAllowed")).await;
    assert!(refused.1.starts_with("pool public is not available to namespace bank"), "{refused:?}");
    let selected = |store: &Store, namespace: &str| {
        let policy = store.get::<EgressPolicy>(&Key::namespaced(namespace, "web"))?;
        Some(policy.status.as_ref()?.selected_endpoints)
    };
    assert_eq!(selected(&world.store, "shop"), Some(2), "the pods of its namespace");
    assert_eq!(selected(&world.store, "bank"), Some(0), "and no others");
    let users = world.store.list::<EgressIP>().into_iter().flat_map(|ip| ip.spec.policies.clone());
    assert!(
        users.clone().any(|user| user.policy == "ns/shop/web")
            && !users.clone().any(|user| user.policy == "ns/bank/web")
    );

    // Its events go to its namespace.
    let about = crate::controller::Event::of(&egress_core::plan::diff::Change::Condition {
        policy: "ns/bank/web".parse().unwrap(),
        kind: egress_core::plan::ConditionKind::Ready,
        condition: egress_core::plan::Condition {
            holds: false,
            reason: egress_core::plan::Reason::NoAddress,
            message: "none".to_owned(),
        },
    });
    let about = about.unwrap().about;
    assert_eq!((about.kind, about.key), (crate::store::Kind::EgressPolicy, Key::namespaced("bank", "web")));
    fs::remove_file(world.path().join("team-shop.yaml")).unwrap();
    world.until(|store| (store.list::<EgressIP>().len() == 2).then_some(())).await;
}
