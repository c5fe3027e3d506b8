//! Tests of writes that fail repeatedly.

use super::*;
use crate::store::lease::CONTROLLER_LEASE;
use crate::store::testing::{Script, scripted};
use crate::store::{ObjectRef, StoreError, Stored, Verb};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};

/// The number of store changes that a test waits for. Two gateways that renew their leases five times a second make ten a second.
const WATCHED: usize = 40;
/// The maximum number of requests for a write that always fails during this time.
const FEW: usize = 16;

fn target<T: Stored>(name: &str) -> ObjectRef {
    ObjectRef { kind: T::KIND, key: Key::cluster(name) }
}

fn too_large(object: ObjectRef) -> StoreError {
    StoreError::Unavailable { object, message: "etcdserver: request is too large".into() }
}

fn on_script(world: &ControllerFixture) -> (Running, Arc<Script>) {
    let script = Arc::new(Script::default());
    let store = scripted(&Files::open(world.path()).unwrap(), script.clone());
    (controller_on(store, "one", |_| {}), script)
}

/// docs/failures.md: stuck-status.
#[tokio::test(flavor = "multi_thread")]
async fn stuck_status_that_always_fails_delays_nothing_else() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let (running, script) = on_script(&world);
    let status = target::<EgressGatewayPolicy>("web");
    script.refuse(Verb::ReplaceStatus, status.clone(), too_large);
    world.until(|store| owned_by(store, &["gw1", "gw2"])).await;

    let other = POLICY.replace("name: web", "name: other").replace("count: 2", "count: 1");
    fs::write(world.path().join("other.yaml"), &other).unwrap();
    world.until(|store| (store.list::<EgressIP>().len() == 3).then_some(())).await;
    world.until(|store| store.get::<EgressGatewayPolicy>(&Key::cluster("other"))?.status.clone()).await;
    fs::remove_file(world.path().join("other.yaml")).unwrap();
    world.until(|store| (store.list::<EgressIP>().len() == 2).then_some(())).await;
    let released = || script.notes.lock().unwrap().iter().any(|note| note.reason == "Released");
    world.until(|_| released().then_some(())).await;

    for _ in 0..WATCHED {
        world.changes.next().await;
    }
    let report = running.report.borrow().clone();
    assert_eq!((report.error, report.unwritten), (None, 1));
    assert!(report.partial > 0, "small changes are still taken in alone");
    let requests = script.requests(Verb::ReplaceStatus, &status);
    assert!((1..=FEW).contains(&requests), "{requests} requests");
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_failures_slow_rounds_but_not_the_failover_of_gateways() {
    let mut world = ControllerFixture::new();
    let (_gw1, gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let (running, script) = on_script(&world);
    let node = target::<EgressNode>("w1");
    script.refuse(Verb::Create, node.clone(), too_large);
    world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    world.until(|store| condition(store, "Ready").filter(|ready| ready.0 == "True")).await;
    for _ in 0..WATCHED {
        world.changes.next().await;
    }
    assert!(running.report.borrow().error.as_ref().is_some_and(|error| error.contains("too large")));
    let requests = script.requests(Verb::Create, &node);
    assert!((2..=FEW).contains(&requests), "{requests} requests");
    drop(gw2);
    world.until(|store| owned_by(store, &["gw1", "gw1"])).await;
    script.refused.lock().unwrap().clear();
    world.until(|store| store.get::<EgressNode>(&Key::cluster("w1"))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_of_a_gateway_is_deleted_when_its_node_is_gone() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let key = Key::namespaced(LEASE_NAMESPACE, &gateway_lease("old"));
    let metadata =
        ObjectMeta { name: Some(key.name.clone()), namespace: Some(key.namespace.clone()), ..ObjectMeta::default() };
    // This lease is never renewed.
    let spec = LeaseSpec { holder_identity: Some("old".into()), ..LeaseSpec::default() };
    world.store.create(&Lease { metadata, spec: Some(spec) }).await.unwrap();
    let (running, script) = on_script(&world);
    let target = ObjectRef { kind: Lease::KIND, key: key.clone() };
    script.refuse(Verb::Delete, target, too_large);
    // The failed deletion delays nothing.
    world.until(|_| (running.report.borrow().unwritten == 1).then_some(())).await;
    world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    script.refused.lock().unwrap().clear();
    world.until(|store| store.get::<Lease>(&key).is_none().then_some(())).await;
    assert!(world.store.get::<Lease>(&Key::namespaced(LEASE_NAMESPACE, &gateway_lease("gw1"))).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_cuts_off_a_round_that_hangs_and_lets_the_leadership_lapse() {
    let mut world = ControllerFixture::new();
    let script = Arc::new(Script::default());
    let node = target::<EgressNode>("w1");
    *script.stuck.lock().unwrap() = Some(node.clone());
    let running = controller_on(scripted(&Files::open(world.path()).unwrap(), script.clone()), "one", |_| {});
    world.until(|_| (script.requests(Verb::Create, &node) > 0).then_some(())).await;
    running.stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(30), running.task).await.unwrap().unwrap();
    // The write may still arrive, so no other controller may lead yet.
    let lease = world.store.get::<Lease>(&Key::namespaced(LEASE_NAMESPACE, CONTROLLER_LEASE)).unwrap();
    assert_eq!(lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()), Some("one"));
}
