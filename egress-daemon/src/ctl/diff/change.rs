//! The objects after a change, and the health of gateways at one moment. No I/O.

use crate::store::lease::GATEWAY_LEASE_PREFIX;
use crate::store::{Key, Kind, ObjectRef, Stored};
use anyhow::{Context as _, Result, bail};
use egress_core::{
    health::{Health, LeaseState, NodeHealth},
    model::NodeName,
};
use egress_objects::snapshot::ApiObjects;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// The change to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Edit {
    /// It is created.
    Created,
    /// It is changed.
    Changed,
    /// It is deleted.
    Deleted,
}

/// Creates or changes an object, or deletes it if `value` is `None`. Returns `None` if nothing changes.
pub(super) fn apply(objects: &mut ApiObjects, object: &ObjectRef, value: Option<Value>) -> Result<Option<Edit>> {
    let key = &object.key;
    let edit = match object.kind {
        Kind::EgressGatewayPolicy => put(&mut objects.policies, key, value),
        Kind::EgressIPPool => put(&mut objects.pools, key, value),
        Kind::CiliumEgressGatewayPolicy => put(&mut objects.cilium_policies, key, value),
        Kind::Egress => put(&mut objects.egresses, key, value),
        Kind::ExternalIPPool => put(&mut objects.external_ip_pools, key, value),
        Kind::Namespace => put(&mut objects.namespaces, key, value),
        Kind::Node => put(&mut objects.nodes, key, value),
        _ => bail!("{object} cannot be compared: name policies, pools, Namespaces and Nodes only"),
    };
    edit.with_context(|| format!("{object} cannot be decoded"))
}

fn put<T: Stored>(list: &mut Vec<Arc<T>>, key: &Key, value: Option<Value>) -> Result<Option<Edit>> {
    let place = list.iter().position(|object| Key::of(object.as_ref()) == *key);
    match (place, value) {
        (None, None) => Ok(None),
        (Some(place), None) => {
            list.remove(place);
            Ok(Some(Edit::Deleted))
        }
        (None, Some(mut value)) => {
            value["metadata"]["creationTimestamp"] = json!(Timestamp::now());
            list.push(Arc::new(serde_json::from_value(value)?));
            Ok(Some(Edit::Created))
        }
        (Some(place), Some(value)) => {
            let old = serde_json::to_value(list[place].as_ref())?;
            let new = applied(T::KIND, &old, value);
            let changed: T = serde_json::from_value(new)?;
            if serde_json::to_value(&changed)? == old {
                return Ok(None);
            }
            list[place] = Arc::new(changed);
            Ok(Some(Edit::Changed))
        }
    }
}

/// Returns an object after `kubectl apply`: fields of other writers stay, labels are added, and the spec is replaced. A file rarely
/// describes Namespaces and Nodes in full, so their fields that it omits stay.
fn applied(kind: Kind, old: &Value, new: Value) -> Value {
    let mut whole = old.clone();
    if kind.has_our_status() {
        whole["spec"] = Value::Null;
    }
    merge(&mut whole, new);
    whole
}

fn merge(old: &mut Value, new: Value) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (field, value) in new {
                merge(old.entry(field).or_insert(Value::Null), value);
            }
        }
        (old, new) => *old = new,
    }
}

/// Returns the health of gateways, judged by their leases at one moment. The age of a lease is relative to the newest lease, so only the
/// gateways' clocks count, and while no agent runs, no gateway's health changes.
pub(super) fn health<'a>(leases: impl Iterator<Item = &'a Lease> + Clone, duration: Duration) -> Health {
    let renewed = |lease: &Lease| lease.spec.as_ref()?.renew_time.as_ref().map(|time| time.0);
    let held = |lease: &&Lease| {
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref());
        holder.is_some_and(|holder| !holder.is_empty())
    };
    let newest = leases.clone().filter_map(renewed).max();
    let gateway = |lease: &Lease| {
        let node = lease.metadata.name.as_deref()?.strip_prefix(GATEWAY_LEASE_PREFIX).map(NodeName::from)?;
        let age = newest?.duration_since(renewed(lease)?).unsigned_abs();
        let fresh = LeaseState::Fresh { since: Duration::MAX, returned: false, proven: true };
        let lease = if age > duration { LeaseState::Lapsed } else { fresh };
        Some((node, NodeHealth { lease, gone: false }))
    };
    Health { nodes: leases.filter(held).filter_map(gateway).collect() }
}
