//! Tests with several writers, one of which is stopped or was replaced.

use super::*;

#[tokio::test]
async fn a_leader_that_was_replaced_cannot_write() {
    let dir = directory();
    let store = Files::open(dir.path()).unwrap();
    let mut lease = counter();
    let guarded = store.guarded(Key::of(&lease), 1);
    assert!(matches!(guarded.create(&egress_ip("192.0.2.1")).await, Err(StoreError::Fenced(_))), "nobody leads yet");
    lease.spec =
        Some(LeaseSpec { holder_identity: Some("a".into()), lease_transitions: Some(1), ..Default::default() });
    let mut lease = store.create(&lease).await.unwrap();
    guarded.create(&egress_ip("192.0.2.1")).await.unwrap();
    lease.spec.as_mut().unwrap().lease_transitions = Some(2);
    store.replace(&lease).await.unwrap();
    assert!(matches!(guarded.create(&egress_ip("192.0.2.2")).await, Err(StoreError::Fenced(_))));
    store.guarded(Key::of(&lease), 2).create(&egress_ip("192.0.2.2")).await.unwrap();
}

#[tokio::test]
async fn a_stopped_process_that_holds_the_lock_keeps_others_from_writing_but_not_from_reading() {
    let dir = directory();
    let store = Files::open(dir.path()).unwrap();
    let created = store.create(&egress_ip("192.0.2.1")).await.unwrap();
    let lock = Own::open(dir.path().canonicalize().unwrap().join(".spillway")).unwrap().exclusive().unwrap();
    fs::write(dir.path().join("pod.yaml"), POD).unwrap();
    let mut changes = store.changes();
    until(&mut changes, || (!store.list::<Pod>().is_empty()).then_some(())).await;
    let error = store.delete(&created).await.unwrap_err().to_string();
    assert!(error.contains("is one of Spillway's processes stopped?"), "{error}");
    drop(lock);
    store.delete(&created).await.unwrap();
}
