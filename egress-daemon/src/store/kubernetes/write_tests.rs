//! Writes to a minimal API server.

use super::*;
use crate::store::Key;
use crate::store::lease::{LEASE_NAMESPACE, gateway_lease};
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, put};
use std::sync::Mutex;

fn lease(version: u64) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {
            "name": gateway_lease("a"), "namespace": LEASE_NAMESPACE, "uid": "1", "resourceVersion": version.to_string(),
        },
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15},
    })
}

/// Returns the path at which leases are listed.
fn leases() -> String {
    format!("/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases")
}

fn target() -> ObjectRef {
    ObjectRef { kind: Kind::Lease, key: Key::namespaced(LEASE_NAMESPACE, &gateway_lease("a")) }
}

/// The version of the API server's only lease.
type Stored = State<Arc<Mutex<u64>>>;

async fn replace(State(stored): Stored, sent: String) -> (StatusCode, String) {
    let mut stored = stored.lock().unwrap();
    let sent: Value = serde_json::from_str(&sent).unwrap();
    if version(&sent) != stored.to_string() {
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "reason": "Conflict", "code": 409, "message": "it has been modified"});
        return (StatusCode::CONFLICT, status.to_string());
    }
    *stored += 1;
    (StatusCode::OK, lease(*stored).to_string())
}

async fn list(State(stored): Stored) -> String {
    json!({"kind": "LeaseList", "apiVersion": "v1", "metadata": {}, "items": [lease(*stored.lock().unwrap())]})
        .to_string()
}

/// The answer to a renewal is lost, and the watch is late: only the first of the next renewals conflicts.
#[tokio::test]
async fn a_lease_is_read_again_when_its_renewal_conflicts() {
    let leases = leases();
    let server = Router::new().route(&leases, get(list)).route(&format!("{leases}/{{name}}"), put(replace));
    let client = Client::new(server.with_state(Arc::new(Mutex::new(7))), "default");
    let cache = Arc::new(Cache::default());
    cache.wrote(Kind::Lease, lease(6));
    let target = target();
    let renew = || {
        let present = cache.get(target.kind, &target.key).unwrap();
        let object = target.kind.encode(&present).unwrap();
        let renewal = Write { verb: Verb::Replace, target: target.clone(), object, guard: None };
        write(client.clone(), "spillway-agent", cache.clone(), renewal)
    };
    assert!(matches!(renew().await, Err(StoreError::Conflict(_))));
    assert_eq!(version(&renew().await.unwrap()), "8");
}

fn node(version: u64) -> Value {
    json!({"apiVersion": "spillway.io/v1alpha1", "kind": "EgressNode", "spec": {},
        "metadata": {"name": "a", "uid": "1", "resourceVersion": version.to_string()}})
}

async fn replace_node(State(stored): Stored, sent: String) -> (StatusCode, String) {
    let (status, answer) = replace(State(stored.clone()), sent).await;
    let written = || node(*stored.lock().unwrap()).to_string();
    (status, if status == StatusCode::OK { written() } else { answer })
}

async fn list_nodes(State(stored): Stored) -> String {
    let items = [node(*stored.lock().unwrap())];
    json!({"kind": "EgressNodeList", "apiVersion": "spillway.io/v1alpha1", "metadata": {}, "items": items}).to_string()
}

/// The controller writes a node's object while the watch of its agent is late: only the first write of the status conflicts.
#[tokio::test]
async fn a_node_is_read_again_when_a_write_of_its_status_conflicts() {
    let nodes = "/apis/spillway.io/v1alpha1/egressnodes";
    let server =
        Router::new().route(nodes, get(list_nodes)).route(&format!("{nodes}/{{name}}/status"), put(replace_node));
    let client = Client::new(server.with_state(Arc::new(Mutex::new(7))), "default");
    let cache = Arc::new(Cache::default());
    cache.wrote(Kind::EgressNode, node(6));
    let target = ObjectRef { kind: Kind::EgressNode, key: Key::cluster("a") };
    let write_status = || {
        let object = target.kind.encode(&cache.get(target.kind, &target.key).unwrap()).unwrap();
        let status = Write { verb: Verb::ReplaceStatus, target: target.clone(), object, guard: None };
        write(client.clone(), "spillway-agent", cache.clone(), status)
    };
    assert!(matches!(write_status().await, Err(StoreError::Conflict(_))));
    assert_eq!(version(&write_status().await.unwrap()), "8");
}
