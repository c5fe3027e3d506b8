//! Writes what should be where it differs from what is.

use crate::api::{
    CiliumEgressGatewayPolicy, Egress, EgressGatewayPolicy, EgressIP, EgressIPPool, EgressNode, EgressPolicy,
    ExternalIPPool,
};
use crate::snapshot::Desired;
use crate::store::{Key, Store, StoreError, Stored};
use egress_core::model::NodeName;
use futures::stream::{self, StreamExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::object::HasStatus;
use std::collections::{BTreeMap, BTreeSet};

/// So many writes are under way at once.
const CONCURRENT: usize = 16;

/// What came of writing.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) writes: u64,
    pub(super) errors: Vec<StoreError>,
}

impl Applied {
    /// Whether another process leads by now.
    pub(super) fn is_fenced(&self) -> bool {
        self.errors.iter().any(|error| matches!(error, StoreError::Fenced(_)))
    }

    fn add(&mut self, result: Result<u64, StoreError>) {
        match result {
            Ok(writes) => self.writes += writes,
            Err(error) => self.errors.push(error),
        }
    }
}

/// Writes all differences. What fails does not keep the rest from being written, except that nothing is deleted, and no
/// gateway told that it can know of all leases, after an error: egress IPs and their gateways come first, then what source
/// nodes may use, then that `gateways` have seen it all, then what people read, then what is not needed any more. An object
/// that somebody else wrote since `desired` was made is left as it is.
pub(super) async fn apply(store: &Store, desired: Desired, gateways: &BTreeSet<NodeName>) -> Applied {
    let Desired { egress_ips, egress_nodes, .. } = &desired;
    let wanted = |name: &Option<String>, is_wanted: &dyn Fn(&str) -> bool| name.as_deref().is_some_and(is_wanted);
    let mut unwanted_ips = store.list::<EgressIP>();
    unwanted_ips.retain(|object| !wanted(&object.metadata.name, &|name| egress_ips.contains_key(name)));
    let mut unwanted_nodes = store.list::<EgressNode>();
    unwanted_nodes.retain(|object| !wanted(&object.metadata.name, &|name| egress_nodes.contains_key(name)));

    let mut applied = apply_part(store, desired, gateways).await;
    if applied.errors.is_empty() {
        for object in unwanted_ips {
            applied.add(store.delete(object.as_ref()).await.map(|()| 1));
        }
        for object in unwanted_nodes {
            applied.add(store.delete(object.as_ref()).await.map(|()| 1));
        }
    }
    applied
}

/// The same for some objects: nothing is deleted.
pub(super) async fn apply_part(store: &Store, desired: Desired, gateways: &BTreeSet<NodeName>) -> Applied {
    let mut applied = Applied::default();
    let Desired { egress_ips, egress_nodes, lease_revision, policies, namespaced_policies, pools, .. } = desired;
    let Desired { cilium_policies, egresses, external_ip_pools, .. } = desired;
    let writes = egress_ips.into_values().map(|object| egress_ip(store, object));
    gather(&mut applied, stream::iter(writes).buffer_unordered(CONCURRENT)).await;
    let writes = egress_nodes.into_values().map(|object| egress_node(store, object));
    gather(&mut applied, stream::iter(writes).buffer_unordered(CONCURRENT)).await;
    if applied.errors.is_empty() {
        let writes = gateways.iter().cloned().map(|node| leases_up_to(store, node, lease_revision));
        gather(&mut applied, stream::iter(writes).buffer_unordered(CONCURRENT)).await;
    }
    statuses::<EgressGatewayPolicy>(store, &mut applied, policies).await;
    statuses::<EgressPolicy>(store, &mut applied, namespaced_policies).await;
    statuses::<CiliumEgressGatewayPolicy>(store, &mut applied, cilium_policies).await;
    statuses::<Egress>(store, &mut applied, egresses).await;
    statuses::<EgressIPPool>(store, &mut applied, pools).await;
    statuses::<ExternalIPPool>(store, &mut applied, external_ip_pools).await;
    applied
}

async fn statuses<T>(store: &Store, applied: &mut Applied, wanted: BTreeMap<String, T::Status>)
where
    T: Stored + HasStatus<Status: PartialEq>,
{
    let writes = wanted.into_iter().map(|(name, wanted)| status::<T>(store, name, wanted));
    gather(applied, stream::iter(writes).buffer_unordered(CONCURRENT)).await;
}

async fn gather(applied: &mut Applied, mut results: impl StreamExt<Item = Result<u64, StoreError>> + Unpin) {
    while let Some(result) = results.next().await {
        applied.add(result);
    }
}

async fn egress_ip(store: &Store, wanted: EgressIP) -> Result<u64, StoreError> {
    let (written, writes) = match store.get::<EgressIP>(&Key::of(&wanted)) {
        None => (store.create(&wanted).await?, 1),
        Some(current) if current.spec != wanted.spec || !same_labels(&current.metadata, &wanted.metadata) => {
            (store.replace(&wanted).await?, 1)
        }
        Some(current) if current.status != wanted.status => {
            let metadata = wanted.metadata.clone();
            (EgressIP { metadata, ..current.as_ref().clone() }, 0)
        }
        Some(_) => return Ok(0),
    };
    if written.status == wanted.status {
        return Ok(writes);
    }
    store.replace_status(&EgressIP { status: wanted.status, ..written }).await?;
    Ok(writes + 1)
}

/// Whether two objects have the same labels; none at all are as good as an empty list.
fn same_labels(a: &ObjectMeta, b: &ObjectMeta) -> bool {
    a.labels.iter().flatten().eq(b.labels.iter().flatten())
}

async fn egress_node(store: &Store, wanted: EgressNode) -> Result<u64, StoreError> {
    match store.get::<EgressNode>(&Key::of(&wanted)) {
        None => store.create(&wanted).await.map(|_| 1),
        Some(current) if current.spec != wanted.spec => store.replace(&wanted).await.map(|_| 1),
        Some(_) => Ok(0),
    }
}

/// Tells a gateway that all leases up to this revision are written.
async fn leases_up_to(store: &Store, node: NodeName, revision: u64) -> Result<u64, StoreError> {
    match store.get::<EgressNode>(&Key::cluster(node.as_str())) {
        Some(current) if current.spec.leases_up_to < revision => {
            let mut object = current.as_ref().clone();
            object.spec.leases_up_to = revision;
            store.replace(&object).await.map(|_| 1)
        }
        _ => Ok(0),
    }
}

async fn status<T>(store: &Store, name: String, status: T::Status) -> Result<u64, StoreError>
where
    T: Stored + HasStatus<Status: PartialEq>,
{
    match store.get::<T>(&Key::parse(&name)) {
        Some(current) if current.status() != Some(&status) => {
            let mut object = current.as_ref().clone();
            *object.status_mut() = Some(status);
            store.replace_status(&object).await.map(|_| 1)
        }
        _ => Ok(0),
    }
}
