//! The parts of other writers' objects that are kept. A pod's status changes many times for each change that matters here. Fields that
//! are not kept take no memory, and their changes wake no reader.

use crate::store::Kind;
use egress_objects::api::MAX_EGRESS_IPS_ANNOTATION;
use serde_json::{Map, Value};
use siphasher::sip128::{Hasher128, SipHasher13};
use std::hash::Hasher;

/// The fields that are kept, by path; `[]` means each element of a list.
const POD: &[&str] = &[
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "metadata.labels",
    "spec.nodeName",
    "spec.hostNetwork",
    "status.phase",
    "status.podIP",
    "status.podIPs",
];
const NODE: &[&str] = &[
    "metadata.name",
    "metadata.uid",
    "metadata.creationTimestamp",
    "metadata.labels",
    "spec.podCIDR",
    "spec.podCIDRs",
    "spec.unschedulable",
    "status.addresses",
    "status.conditions[].type",
    "status.conditions[].status",
];
/// The annotations of a node that are kept: Spillway's and Antrea's limits on its egress IPs.
const NODE_ANNOTATIONS: [&str; 2] = [MAX_EGRESS_IPS_ANNOTATION, "node.antrea.io/max-egress-ips"];
const NAMESPACE: &[&str] = &["metadata.name", "metadata.uid", "metadata.labels"];
const CALICO_POOL: &[&str] = &["metadata.name", "metadata.uid", "spec.cidr", "spec.disabled", "spec.allowedUses"];
const CILIUM_NODE: &[&str] = &["metadata.name", "metadata.uid", "spec.ipam.podCIDRs"];
const CILIUM_POOL: &[&str] = &["metadata.name", "metadata.uid", "spec.ipv4.cidrs", "spec.ipv6.cidrs"];
const ANTREA_POOL: &[&str] = &["metadata.name", "metadata.uid", "spec.ipRanges"];
const SUBNET: &[&str] = &["metadata.name", "metadata.uid", "spec.cidrBlock", "spec.vpc", "spec.vlan"];

/// Returns the fields of a kind's objects that are kept; `None` for all fields.
fn kept(kind: Kind) -> Option<&'static [&'static str]> {
    match kind {
        Kind::Pod => Some(POD),
        Kind::Node => Some(NODE),
        Kind::Namespace => Some(NAMESPACE),
        Kind::CalicoIPPool => Some(CALICO_POOL),
        Kind::CiliumNode => Some(CILIUM_NODE),
        Kind::CiliumPodIPPool => Some(CILIUM_POOL),
        Kind::AntreaIPPool => Some(ANTREA_POOL),
        Kind::KubeOvnSubnet => Some(SUBNET),
        _ => None,
    }
}

/// Returns whether only part of each object is kept, as for kinds that Spillway never writes.
pub(super) fn is_trimmed(kind: Kind) -> bool {
    kept(kind).is_some()
}

/// Removes the fields that are not kept. Returns a text that distinguishes versions of the object.
pub(super) fn trim(kind: Kind, object: &mut Value) -> String {
    let Some(kept) = kept(kind) else {
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
        return version(object).to_owned();
    };
    let mut small = Map::new();
    for name in ["apiVersion", "kind"] {
        if let Some(value) = object.get(name) {
            small.insert(name.to_owned(), value.clone());
        }
    }
    let mut small = Value::Object(small);
    for path in kept {
        copy(object, &mut small, path);
    }
    if kind == Kind::Node
        && let Some(all) = object.pointer("/metadata/annotations")
    {
        let kept = NODE_ANNOTATIONS.into_iter().filter_map(|key| Some((key.to_owned(), all.get(key)?.clone())));
        let kept: Map<String, Value> = kept.collect();
        if !kept.is_empty() {
            small["metadata"]["annotations"] = Value::Object(kept);
        }
    }
    if kind.names_networks() && small.get("spec").is_none() {
        small["spec"] = Value::Object(Map::new());
    }
    if kind == Kind::Pod
        && let Some(spec) =
            small.as_object_mut().map(|pod| pod.entry("spec").or_insert_with(|| Value::Object(Map::new())))
    {
        // A pod must have this list.
        spec["containers"] = Value::Array(Vec::new());
    }
    *object = small;
    let mut hasher = SipHasher13::new();
    hasher.write(object.to_string().as_bytes());
    let digest = hasher.finish128();
    format!("{:016x}{:016x}", digest.h1, digest.h2)
}

/// Returns the resourceVersion of an object; empty if it has none.
pub(super) fn version(object: &Value) -> &str {
    object.pointer("/metadata/resourceVersion").and_then(Value::as_str).unwrap_or_default()
}

fn copy(from: &Value, to: &mut Value, path: &str) {
    let (head, rest) = path.split_once('.').map_or((path, None), |(head, rest)| (head, Some(rest)));
    let (name, each) = head.strip_suffix("[]").map_or((head, false), |name| (name, true));
    let Some(found) = from.get(name).filter(|found| !found.is_null()) else { return };
    match (rest, each) {
        (None, _) => to[name] = found.clone(),
        (Some(rest), false) => {
            if to.get(name).is_none() {
                to[name] = Value::Object(Map::new());
            }
            copy(found, &mut to[name], rest);
        }
        (Some(rest), true) => {
            let Some(items) = found.as_array() else { return };
            if to.get(name).is_none() {
                to[name] = Value::Array(vec![Value::Object(Map::new()); items.len()]);
            }
            for (item, place) in items.iter().zip(to[name].as_array_mut().into_iter().flatten()) {
                copy(item, place, rest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;

    #[test]
    fn heartbeat_fields_do_not_count_as_changes() {
        let node = |beat: &str, ready: &str| {
            json!({"apiVersion": "v1", "kind": "Node",
                "metadata": {"name": "n1", "resourceVersion": beat, "labels": {"a": "b"}, "managedFields": [1]},
                "spec": {"podCIDR": "10.0.0.0/24"},
                "status": {"images": ["x"], "conditions": [{"type": "Ready", "status": ready, "lastHeartbeatTime": beat}]}})
        };
        let (mut first, mut second, mut third) = (node("1", "True"), node("2", "True"), node("2", "False"));
        let version = trim(Kind::Node, &mut first);
        assert_eq!(version, trim(Kind::Node, &mut second));
        assert_ne!(version, trim(Kind::Node, &mut third));
        assert_eq!(
            first,
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": {"a": "b"}},
                "spec": {"podCIDR": "10.0.0.0/24"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
        );
        assert!(Kind::Node.decode(first).is_ok());
    }

    #[test]
    fn a_node_keeps_the_annotations_that_are_read_and_no_others() {
        let node = |annotations: Value| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "annotations": annotations}});
        let (mut plain, mut noisy) = (node(json!({})), node(json!({"operator.example/heartbeat": "17"})));
        assert_eq!(trim(Kind::Node, &mut plain), trim(Kind::Node, &mut noisy));
        for key in NODE_ANNOTATIONS {
            let mut limited = node(json!({key: "3", "operator.example/heartbeat": "17"}));
            trim(Kind::Node, &mut limited);
            assert_eq!(limited["metadata"]["annotations"], json!({key: "3"}));
            let limited: Node = serde_json::from_value(limited).unwrap();
            assert_eq!(egress_objects::translate::node(&limited, None).0.max_egress_ips, Some(3), "{key}");
        }
    }

    #[test]
    fn a_pod_keeps_what_an_endpoint_is_made_from() {
        let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"app": "web"}, "annotations": {"x": "y"}},
            "spec": {"nodeName": "w1", "containers": [{"name": "c", "image": "i"}]},
            "status": {"phase": "Running", "podIP": "10.0.0.5", "podIPs": [{"ip": "10.0.0.5"}], "qosClass": "BestEffort"}});
        let whole: egress_objects::api::Pod = serde_json::from_value(pod.clone()).unwrap();
        trim(Kind::Pod, &mut pod);
        let small: egress_objects::api::Pod = serde_json::from_value(pod.clone()).unwrap();
        assert_eq!(egress_objects::translate::endpoint(&whole), egress_objects::translate::endpoint(&small));
        assert!(egress_objects::translate::endpoint(&small).is_some_and(|endpoint| !endpoint.ips.is_empty()));
        assert!(!pod.to_string().contains("qosClass") && !pod.to_string().contains("annotations"));
    }

    #[test]
    fn our_own_objects_keep_their_resource_version() {
        let mut ip = json!({"metadata": {"name": "x", "resourceVersion": "17", "managedFields": []}});
        assert_eq!(trim(Kind::EgressIP, &mut ip), "17");
        assert_eq!(ip, json!({"metadata": {"name": "x", "resourceVersion": "17"}}));
    }
}
