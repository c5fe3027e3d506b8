//! Tests of numbers of pods in statuses.

use super::super::apply::is_news_of_egress;
use super::super::run::rest;
use super::*;
use egress_core::model::{PolicyId, PolicyKind};
use egress_objects::api::{EgressGatewayPolicyStatus, EgressStatus, SlotStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use std::time::Instant;

fn condition(reason: &str, message: &str) -> Condition {
    Condition {
        type_: "Ready".into(),
        status: "True".into(),
        reason: reason.into(),
        message: message.into(),
        observed_generation: Some(1),
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
    }
}

#[test]
fn number_of_pods_is_news_only_if_it_becomes_or_was_zero() {
    let status = |endpoints, reason: &str, message: &str| EgressGatewayPolicyStatus {
        selected_endpoints: endpoints,
        conditions: vec![condition(reason, message)],
        slots: vec![SlotStatus { endpoints: Some(endpoints), ..SlotStatus::default() }],
        ..EgressGatewayPolicyStatus::default()
    };
    let three = status(3, "AsExpected", "fine");
    assert!(!is_news_of_policy(&three, &status(900, "AsExpected", "fine")));
    assert!(is_news_of_policy(&three, &status(0, "AsExpected", "fine")));
    assert!(is_news_of_policy(&status(0, "AsExpected", "fine"), &three));
    // Messages may also contain numbers.
    for reason in ["Programming", "PodNotStarted"] {
        assert!(!is_news_of_policy(&status(3, reason, "n1 and 7 more"), &status(3, reason, "n1 and 6 more")));
    }
    assert!(
        is_news_of_policy(&status(3, "Invalid", "line 7"), &status(3, "Invalid", "line 8")),
        "a message without a number"
    );

    let egress =
        |message: &str| EgressStatus { conditions: vec![condition("Programming", message)], ..EgressStatus::default() };
    assert!(!is_news_of_egress(&egress("n1 and 7 more"), &egress("n1 and 6 more")));
    assert!(is_news_of_egress(&egress("n1"), &EgressStatus { egress_node: Some("n2".into()), ..egress("n1") }));
}

#[test]
fn pod_counts_are_written_once_a_second_on_average() {
    let seconds = |written| rest(written).as_secs();
    assert_eq!([0, 1, 5, 6, 1_000].map(seconds), [5, 5, 5, 6, 1_000]);
    assert!(rest(u64::MAX) > Duration::from_secs(1_000_000_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn full_round_for_another_reason_leaves_pod_counts_to_the_next_sweep() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let start = Instant::now();
    let controller = controller(world.path(), "one");
    let number = |store: &Store| {
        let policy = store.get::<EgressGatewayPolicy>(&Key::cluster("web"))?;
        policy.status.as_ref().map(|status| status.selected_endpoints)
    };
    world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    world.until(|store| number(store).filter(|number| *number == 2)).await;
    let pod = CLUSTER.replace("name: b,", "name: c,").replace("10.0.0.6", "10.0.0.7");
    fs::write(world.path().join("more.yaml"), pod.split("---").last().unwrap()).unwrap();
    let web = PolicyId::new(PolicyKind::Native, "web");
    // The metric is exact at any time.
    let mut report = controller.report.clone();
    let counted = report.wait_for(|report| report.endpoints.get(&web) == Some(&3));
    tokio::time::timeout(Duration::from_secs(30), counted).await.unwrap().unwrap();
    // This policy selects other pods, so `web` has no news.
    let other =
        POLICY.replace("name: web", "name: other").replace("count: 2", "count: 1").replace("app: web", "app: other");
    fs::write(world.path().join("other.yaml"), &other).unwrap();
    world.until(|store| store.get::<EgressGatewayPolicy>(&Key::cluster("other"))?.status.clone()).await;
    let seen = number(&world.store);
    // The first round wrote all numbers, so the next sweep comes after `rest(0)`.
    assert!(seen == Some(2) || start.elapsed() >= rest(0), "{seen:?}");
    world.until(|store| number(store).filter(|number| *number == 3)).await;
}
