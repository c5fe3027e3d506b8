//! Writes the desired objects that differ from the actual ones.

use crate::store::{Key, Store, StoreError, Stored};
use egress_objects::api::{
    CiliumEgressGatewayPolicy, Egress, EgressGatewayPolicy, EgressGatewayPolicyStatus, EgressIP, EgressIPPool,
    EgressIPStatus, EgressNode, EgressPolicy, ExternalIPPool,
};
use egress_objects::snapshot::Desired;
use futures::stream::{self, StreamExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::object::HasStatus;
use std::collections::BTreeMap;

/// Writes in flight at once.
const CONCURRENT: usize = 16;

/// Which differences are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Differences {
    /// All.
    All,
    /// Not those that are only numbers of pods, and shares of blocks that follow from them: otherwise each pod would cost a write for each
    /// of its egress IPs and policies.
    News,
}

/// The result of writing.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) writes: u64,
    /// Whether a difference that is no news was not written.
    pub(super) outdated: bool,
    pub(super) errors: Vec<StoreError>,
}

impl Applied {
    /// Whether another process leads now.
    pub(super) fn is_fenced(&self) -> bool {
        self.errors.iter().any(|error| matches!(error, StoreError::Fenced(_)))
    }

    fn add(&mut self, result: Result<Written, StoreError>) {
        match result {
            Ok(Written::Times(writes)) => self.writes += writes,
            Ok(Written::Later) => self.outdated = true,
            Err(error) => self.errors.push(error),
        }
    }
}

/// What was done with an object.
enum Written {
    /// It was written, in this many writes.
    Times(u64),
    /// It differs, but not in news.
    Later,
}

/// Writes all differences: egress IPs and their gateways first, then what source nodes may use, then what users read; then deletes what is
/// no longer needed. An egress IP never names a carrier whose object most agents do not see yet: while its object is missing they would
/// begin to follow all nodes (`store::kubernetes::needed`). A failure does not stop the rest, except that nothing is deleted after an
/// error. An object that somebody else has written since `desired` was made is left as it is.
pub(super) async fn apply(store: &Store, desired: Desired) -> Applied {
    let Desired { egress_ips, egress_nodes, .. } = &desired;
    let wanted = |name: &Option<String>, is_wanted: &dyn Fn(&str) -> bool| name.as_deref().is_some_and(is_wanted);
    let mut unwanted_ips = store.list::<EgressIP>();
    unwanted_ips.retain(|object| !wanted(&object.metadata.name, &|name| egress_ips.contains_key(name)));
    let mut unwanted_nodes = store.list::<EgressNode>();
    unwanted_nodes.retain(|object| !wanted(&object.metadata.name, &|name| egress_nodes.contains_key(name)));

    let mut applied = apply_part(store, desired, Differences::All).await;
    if applied.errors.is_empty() {
        for object in unwanted_ips {
            applied.add(store.delete(object.as_ref()).await.map(|()| Written::Times(1)));
        }
        for object in unwanted_nodes {
            applied.add(store.delete(object.as_ref()).await.map(|()| Written::Times(1)));
        }
    }
    applied
}

/// The same for some objects: nothing is deleted.
pub(super) async fn apply_part(store: &Store, desired: Desired, which: Differences) -> Applied {
    let mut applied = Applied::default();
    let Desired { egress_ips, egress_nodes, policies, namespaced_policies, pools, .. } = desired;
    let Desired { cilium_policies, egresses, external_ip_pools, .. } = desired;
    let (shown, others): (Vec<_>, Vec<_>) = egress_nodes
        .into_values()
        .partition(|object| object.is_shown(store.get::<EgressNode>(&Key::of(object)).as_deref()));
    write_nodes(store, &mut applied, shown).await;
    let writes = egress_ips.into_values().map(|object| egress_ip(store, object, which));
    gather(&mut applied, stream::iter(writes).buffer_unordered(CONCURRENT)).await;
    write_nodes(store, &mut applied, others).await;
    let is_news = |old: &_, new: &_| which == Differences::All || is_news_of_policy(old, new);
    statuses::<EgressGatewayPolicy>(store, &mut applied, policies, is_news).await;
    statuses::<EgressPolicy>(store, &mut applied, namespaced_policies, is_news).await;
    statuses::<CiliumEgressGatewayPolicy>(store, &mut applied, cilium_policies, is_news).await;
    statuses::<Egress>(store, &mut applied, egresses, |_, _| true).await;
    statuses::<EgressIPPool>(store, &mut applied, pools, |_, _| true).await;
    statuses::<ExternalIPPool>(store, &mut applied, external_ip_pools, |_, _| true).await;
    applied
}

/// Whether two statuses of a policy differ in more than the numbers of its pods, which messages contain, too.
pub(super) fn is_news_of_policy(old: &EgressGatewayPolicyStatus, new: &EgressGatewayPolicyStatus) -> bool {
    let uncounted = |status: &EgressGatewayPolicyStatus| {
        let mut status = EgressGatewayPolicyStatus { selected_endpoints: 0, ..status.clone() };
        status.slots.iter_mut().for_each(|slot| slot.endpoints = None);
        status.conditions.iter_mut().for_each(|condition| condition.message.clear());
        status
    };
    uncounted(old) != uncounted(new)
}

/// Whether two statuses of an egress IP differ in more than the share of each node, which counts where blocks are scarce.
pub(super) fn is_news_of_egress_ip(old: &EgressIPStatus, new: &EgressIPStatus) -> bool {
    old.blocks_scarce || old.blocks_starved || EgressIPStatus { block_share: new.block_share, ..old.clone() } != *new
}

/// Whether the shares of each node differ so much that nodes would keep too many blocks, or too few.
pub(super) fn is_far(old: &EgressIPStatus, new: &EgressIPStatus) -> bool {
    let (less, more) = (old.block_share.min(new.block_share), old.block_share.max(new.block_share));
    more > 2 * less
}

async fn statuses<T>(
    store: &Store,
    applied: &mut Applied,
    wanted: BTreeMap<String, T::Status>,
    is_news: impl Fn(&T::Status, &T::Status) -> bool,
) where
    T: Stored + HasStatus<Status: PartialEq>,
{
    let is_news = &is_news;
    let writes = wanted.into_iter().map(|(name, wanted)| status::<T>(store, name, wanted, is_news));
    gather(applied, stream::iter(writes).buffer_unordered(CONCURRENT)).await;
}

async fn gather(applied: &mut Applied, mut results: impl StreamExt<Item = Result<Written, StoreError>> + Unpin) {
    while let Some(result) = results.next().await {
        applied.add(result);
    }
}

async fn egress_ip(store: &Store, wanted: EgressIP, which: Differences) -> Result<Written, StoreError> {
    let (written, writes) = match store.get::<EgressIP>(&Key::of(&wanted)) {
        None => (store.create(&wanted).await?, 1),
        Some(current) if current.spec != wanted.spec || !same_labels(&current.metadata, &wanted.metadata) => {
            (store.replace(&wanted).await?, 1)
        }
        Some(current) if current.status != wanted.status => {
            if let Some((old, new)) = current.status.as_ref().zip(wanted.status.as_ref())
                && !is_news_of_egress_ip(old, new)
            {
                match (is_far(old, new), which) {
                    (false, _) => return Ok(Written::Times(0)),
                    (true, Differences::News) => return Ok(Written::Later),
                    (true, Differences::All) => {}
                }
            }
            let metadata = wanted.metadata.clone();
            (EgressIP { metadata, ..current.as_ref().clone() }, 0)
        }
        Some(_) => return Ok(Written::Times(0)),
    };
    if written.status == wanted.status {
        return Ok(Written::Times(writes));
    }
    store.replace_status(&EgressIP { status: wanted.status, ..written }).await?;
    Ok(Written::Times(writes + 1))
}

/// Whether two objects have the same labels; absent labels equal an empty list.
fn same_labels(a: &ObjectMeta, b: &ObjectMeta) -> bool {
    a.labels.iter().flatten().eq(b.labels.iter().flatten())
}

async fn write_nodes(store: &Store, applied: &mut Applied, objects: Vec<EgressNode>) {
    let writes = objects.into_iter().map(|object| egress_node(store, object));
    gather(applied, stream::iter(writes).buffer_unordered(CONCURRENT)).await;
}

async fn egress_node(store: &Store, wanted: EgressNode) -> Result<Written, StoreError> {
    match store.get::<EgressNode>(&Key::of(&wanted)) {
        None => store.create(&wanted).await.map(|_| Written::Times(1)),
        Some(current) if current.spec != wanted.spec || !same_labels(&current.metadata, &wanted.metadata) => {
            store.replace(&wanted).await.map(|_| Written::Times(1))
        }
        Some(_) => Ok(Written::Times(0)),
    }
}

async fn status<T>(
    store: &Store,
    name: String,
    status: T::Status,
    is_news: impl Fn(&T::Status, &T::Status) -> bool,
) -> Result<Written, StoreError>
where
    T: Stored + HasStatus<Status: PartialEq>,
{
    match store.get::<T>(&Key::parse(&name)) {
        Some(current) if current.status() != Some(&status) => {
            if !current.status().is_none_or(|old| is_news(old, &status)) {
                return Ok(Written::Later);
            }
            let mut object = current.as_ref().clone();
            *object.status_mut() = Some(status);
            store.replace_status(&object).await.map(|_| Written::Times(1))
        }
        _ => Ok(Written::Times(0)),
    }
}
