//! Judges whether Spillway works as configured in a cluster, by its workloads and its objects' conditions. Pure.

use crate::ctl::print::{Printable, Row, table};
use serde::Serialize;
use serde_json::Value;

/// A workload or an object, and whether it is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Its kind.
    pub kind: String,
    /// Its `NAMESPACE/NAME`, or its name if it has no namespace.
    pub name: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Why it is not ready, or a remark.
    pub message: String,
}

impl Row for Part {
    const HEADER: &'static [&'static str] = &["KIND", "NAME", "READY", "MESSAGE"];
    const NONE: &'static str = "Spillway is not installed in this cluster.";

    fn cells(&self) -> Vec<String> {
        let ready = if self.ready { "yes" } else { "NO" };
        vec![self.kind.clone(), self.name.clone(), ready.to_owned(), self.message.clone()]
    }
}

/// The state of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StatusView {
    /// Whether everything is ready.
    pub ready: bool,
    /// The parts, workloads first.
    pub parts: Vec<Part>,
}

impl Printable for StatusView {
    fn text(&self) -> String {
        table(&self.parts)
    }
}

impl StatusView {
    /// Judges lists of objects as the API server returns them: DaemonSets and Deployments, and Spillway's own objects.
    pub fn new(workloads: &Value, objects: &Value) -> Self {
        let items = |list: &Value| list["items"].as_array().cloned().unwrap_or_default();
        let workloads: Vec<Part> = items(workloads).iter().filter_map(workload).collect();
        let mut objects: Vec<Part> = items(objects).iter().filter_map(object).collect();
        objects.sort_by(|a, b| (&a.kind, &a.name).cmp(&(&b.kind, &b.name)));
        let ready = !workloads.is_empty() && workloads.iter().chain(&objects).all(|part| part.ready);
        Self { ready, parts: workloads.into_iter().chain(objects).collect() }
    }
}

fn name(object: &Value) -> String {
    let of = |field: &str| object["metadata"][field].as_str();
    let name = of("name").unwrap_or_default();
    of("namespace").map_or_else(|| name.to_owned(), |namespace| format!("{namespace}/{name}"))
}

/// Judges a DaemonSet or a Deployment. It is ready if all its pods are ready and run the current version.
fn workload(object: &Value) -> Option<Part> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let (wanted, ready, updated) = match object["kind"].as_str()? {
        "DaemonSet" => (&status["desiredNumberScheduled"], &status["numberReady"], &status["updatedNumberScheduled"]),
        "Deployment" => (&spec["replicas"], &status["readyReplicas"], &status["updatedReplicas"]),
        _ => return None,
    };
    let (wanted, ready, updated) = (number(wanted), number(ready), number(updated));
    let seen = status["observedGeneration"] == object["metadata"]["generation"];
    Some(Part {
        kind: object["kind"].as_str()?.to_owned(),
        name: name(object),
        ready: seen && ready == wanted && updated == wanted,
        message: format!("{ready} of {wanted} pods are ready, {updated} run the current version"),
    })
}

/// Judges an object of Spillway. It is ready if its condition Ready is true for its current generation. Omits an object without this
/// condition unless it is a policy.
fn object(object: &Value) -> Option<Part> {
    let kind = object["kind"].as_str()?;
    let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let condition = |wanted: &str| conditions.iter().find(|condition| condition["type"] == wanted);
    let message = |condition: &Value| condition["message"].as_str().unwrap_or_default().to_owned();
    let part = |ready, message| Part { kind: kind.to_owned(), name: name(object), ready, message };
    let Some(ready) = condition("Ready") else {
        let why = "no controller has processed it yet".to_owned();
        return kind.ends_with("Policy").then(|| part(false, why));
    };
    let generation = |value: &Value| value.as_i64();
    let seen = generation(&ready["observedGeneration"])
        .is_none_or(|seen| generation(&object["metadata"]["generation"]).is_none_or(|present| seen >= present));
    if !seen {
        return Some(part(false, "no controller has processed its last change yet".to_owned()));
    }
    let degraded = condition("Degraded").filter(|degraded| degraded["status"] == "True");
    let is_ready = ready["status"] == "True";
    let said = degraded.filter(|_| is_ready).unwrap_or(ready);
    Some(part(is_ready, message(said)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn daemon_set(ready: u64, updated: u64) -> Value {
        let status = json!({
            "desiredNumberScheduled": 3, "numberReady": ready, "updatedNumberScheduled": updated, "observedGeneration": 2
        });
        let metadata = json!({"name": "agent", "namespace": "s", "generation": 2});
        json!({"items": [{"kind": "DaemonSet", "metadata": metadata, "status": status}]})
    }

    fn policy(generation: u64, conditions: &Value) -> Value {
        let metadata = json!({"name": "web", "generation": generation});
        json!({"items": [{"kind": "EgressGatewayPolicy", "metadata": metadata, "status": {"conditions": conditions}}]})
    }

    fn ready(status: &str, seen: u64) -> Value {
        json!({"type": "Ready", "status": status, "message": "m", "observedGeneration": seen})
    }

    #[test]
    fn workload_is_ready_if_all_pods_are_ready_and_current() {
        let is_ready = |list: &Value| StatusView::new(list, &json!({})).ready;
        assert!(is_ready(&daemon_set(3, 3)));
        assert!(!is_ready(&daemon_set(2, 3)) && !is_ready(&daemon_set(3, 2)) && !is_ready(&json!({"items": []})));
    }

    #[test]
    fn policy_is_ready_once_its_last_change_is_in_force() {
        let judged = |list: &Value| StatusView::new(&daemon_set(3, 3), list).parts[1].clone();
        assert!(judged(&policy(2, &json!([ready("True", 2)]))).ready);
        assert!(!judged(&policy(3, &json!([ready("True", 2)]))).ready);
        assert!(!judged(&policy(2, &json!([ready("False", 2)]))).ready);
        assert!(!judged(&policy(1, &json!([]))).ready, "no controller has seen it");
        let degraded = json!({"type": "Degraded", "status": "True", "message": "one gateway is missing"});
        let part = judged(&policy(2, &json!([ready("True", 2), degraded])));
        assert_eq!((part.ready, part.message.as_str()), (true, "one gateway is missing"));
    }

    #[test]
    fn kinds_without_conditions_are_not_shown() {
        let object = json!({"kind": "EgressIP", "metadata": {"name": "192.0.2.10"}});
        assert_eq!(StatusView::new(&daemon_set(3, 3), &json!({"items": [object]})).parts.len(), 1);
    }
}
