//! Writes the desired objects that differ from the actual ones.

use crate::store::{Key, ObjectRef, Store, StoreError, Stored};
use egress_core::plan::Reason;
use egress_objects::api::{
    CiliumEgressGatewayPolicy, Egress, EgressGatewayPolicy, EgressGatewayPolicyStatus, EgressIP, EgressIPPool,
    EgressIPStatus, EgressNode, EgressPolicy, EgressStatus, ExternalIPPool,
};
use egress_objects::snapshot::Desired;
use futures::stream::{self, StreamExt};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use kube::core::object::HasStatus;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The number of concurrent writes.
const CONCURRENT: usize = 16;
/// The reason in the conditions of a policy that some nodes have not programmed yet. Their messages count these nodes.
const PROGRAMMING: &str = "Programming";

/// Which differences are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Differences {
    /// All, except small ones in the block shares of egress IPs.
    All,
    /// All except numbers of pods, and block shares that follow from them. Otherwise each pod would cost a write for each of its egress IPs
    /// and policies.
    News,
}

/// The scope of writing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope<'a> {
    /// The differences that are written.
    pub(super) which: Differences,
    /// The objects that are left alone, because the last write of their status failed recently.
    pub(super) waiting: &'a BTreeSet<ObjectRef>,
}

/// The result of writing.
#[derive(Debug, Default)]
pub(super) struct Applied {
    pub(super) writes: u64,
    /// The number of these writes that changed only numbers of pods and their consequences.
    pub(super) numbers: u64,
    /// Whether a difference was not written because it is not news.
    pub(super) outdated: bool,
    /// Errors of Spillway's own objects, after which the plan is not in force.
    pub(super) errors: Vec<StoreError>,
    /// Errors of objects that no node waits for: statuses of users' objects, and leases of nodes that are gone. Conflicts do not count,
    /// because the store shows the newer version soon, which causes another round.
    pub(super) minor: Vec<StoreError>,
}

impl Applied {
    /// Returns whether another process leads now.
    pub(super) fn is_fenced(&self) -> bool {
        self.errors.iter().any(|error| matches!(error, StoreError::Fenced(_)))
    }

    fn add(&mut self, result: Result<Written, StoreError>) {
        match result {
            Ok(written) => self.count(written),
            Err(error) => self.errors.push(error),
        }
    }

    fn add_minor(&mut self, result: Result<Written, StoreError>) {
        match result {
            Ok(written) => self.count(written),
            Err(error) if error.is_conflict() => tracing::debug!(%error, "there is a newer version"),
            Err(error) => self.minor.push(error),
        }
    }

    fn count(&mut self, written: Written) {
        match written {
            Written::Times(writes) => self.writes += writes,
            Written::Numbers(writes) => {
                self.writes += writes;
                self.numbers += writes;
            }
            Written::Later => self.outdated = true,
        }
    }
}

/// The outcome for one object.
enum Written {
    /// The object was written, in this many writes.
    Times(u64),
    /// Like [`Self::Times`], but only numbers of pods differed.
    Numbers(u64),
    /// The object differs, but not in news, and was not written.
    Later,
}

/// Returns 1 if a write made a new version, and 0 if the store cannot hold any of the fields that differ.
fn times<T: Stored>(before: &T, after: &T) -> u64 {
    u64::from(before.meta().resource_version != after.meta().resource_version)
}

/// Writes the differences in the order of [`apply_part`]. Then deletes objects that are no longer needed, and last `leases`. A failure does
/// not stop the other writes, but nothing is deleted after an error of Spillway's own objects. An object that another process has written
/// since `desired` was made stays as it is.
pub(super) async fn apply(store: &Store, desired: Desired, scope: Scope<'_>, leases: Vec<Arc<Lease>>) -> Applied {
    let Desired { egress_ips, egress_nodes, .. } = &desired;
    let wanted = |name: &Option<String>, is_wanted: &dyn Fn(&str) -> bool| name.as_deref().is_some_and(is_wanted);
    let mut unwanted_ips = store.list::<EgressIP>();
    unwanted_ips.retain(|object| !wanted(&object.metadata.name, &|name| egress_ips.contains_key(name)));
    let mut unwanted_nodes = store.list::<EgressNode>();
    unwanted_nodes.retain(|object| !wanted(&object.metadata.name, &|name| egress_nodes.contains_key(name)));

    let mut applied = apply_part(store, desired, scope).await;
    if applied.errors.is_empty() {
        for object in unwanted_ips {
            applied.add(store.delete(object.as_ref()).await.map(|()| Written::Times(1)));
        }
        for object in unwanted_nodes {
            applied.add(store.delete(object.as_ref()).await.map(|()| Written::Times(1)));
        }
        for object in leases.into_iter().filter(|object| !scope.is_waiting::<Lease>(&Key::of(object.as_ref()))) {
            applied.add_minor(store.delete(object.as_ref()).await.map(|()| Written::Times(1)));
        }
    }
    applied
}

impl Scope<'_> {
    fn is_waiting<T: Stored>(&self, key: &Key) -> bool {
        !self.waiting.is_empty() && self.waiting.contains(&ObjectRef { kind: T::KIND, key: key.clone() })
    }
}

/// Writes the differences of these objects and deletes nothing: first EgressNodes that every agent will follow, then EgressIPs, other
/// EgressNodes, and statuses for users. An EgressIP must not name a carrier whose EgressNode most agents do not see yet, because they would
/// start to follow all nodes (`store::kubernetes::needed`).
pub(super) async fn apply_part(store: &Store, desired: Desired, scope: Scope<'_>) -> Applied {
    let mut applied = Applied::default();
    let Desired { egress_ips, egress_nodes, policies, namespaced_policies, pools, .. } = desired;
    let Desired { cilium_policies, egresses, external_ip_pools, .. } = desired;
    let (shown, others): (Vec<_>, Vec<_>) = egress_nodes
        .into_values()
        .partition(|object| object.is_shown(store.get::<EgressNode>(&Key::of(object)).as_deref()));
    write_nodes(store, &mut applied, shown).await;
    let writes = egress_ips.into_values().map(|object| egress_ip(store, object, scope.which));
    gather(stream::iter(writes).buffer_unordered(CONCURRENT), |result| applied.add(result)).await;
    write_nodes(store, &mut applied, others).await;
    statuses::<EgressGatewayPolicy>(store, &mut applied, policies, scope, is_news_of_policy).await;
    statuses::<EgressPolicy>(store, &mut applied, namespaced_policies, scope, is_news_of_policy).await;
    statuses::<CiliumEgressGatewayPolicy>(store, &mut applied, cilium_policies, scope, is_news_of_policy).await;
    statuses::<Egress>(store, &mut applied, egresses, scope, is_news_of_egress).await;
    statuses::<EgressIPPool>(store, &mut applied, pools, scope, |_, _| true).await;
    statuses::<ExternalIPPool>(store, &mut applied, external_ip_pools, scope, |_, _| true).await;
    applied
}

/// Returns whether two statuses of a policy differ in more than numbers of pods. The difference between none and some pods is news, because
/// a policy's author looks at it right after writing the policy.
pub(super) fn is_news_of_policy(old: &EgressGatewayPolicyStatus, new: &EgressGatewayPolicyStatus) -> bool {
    let uncounted = |status: &EgressGatewayPolicyStatus| {
        let mut status = status.clone();
        status.selected_endpoints = status.selected_endpoints.min(1);
        status.slots.iter_mut().for_each(|slot| slot.endpoints = None);
        uncount(&mut status.conditions);
        status
    };
    uncounted(old) != uncounted(new)
}

/// Like [`is_news_of_policy`] for an Egress, where only messages have numbers.
pub(super) fn is_news_of_egress(old: &EgressStatus, new: &EgressStatus) -> bool {
    let uncounted = |status: &EgressStatus| {
        let mut status = status.clone();
        uncount(&mut status.conditions);
        status
    };
    uncounted(old) != uncounted(new)
}

/// Removes messages that count pods, or nodes that have not programmed a policy yet.
fn uncount(conditions: &mut [Condition]) {
    let counts = |condition: &&mut Condition| {
        let reasons = [Reason::DoesNotFit, Reason::PodWithoutInterface, Reason::PodNotStarted];
        let waits = condition.reason == PROGRAMMING;
        waits || reasons.iter().any(|reason| reason.as_str() == condition.reason)
    };
    conditions.iter_mut().filter(counts).for_each(|condition| condition.message.clear());
}

/// Returns whether two different statuses of an egress IP differ in more than each node's share of blocks, or blocks are scarce.
pub(super) fn is_news_of_egress_ip(old: &EgressIPStatus, new: &EgressIPStatus) -> bool {
    old.blocks_scarce || old.blocks_starved || EgressIPStatus { block_share: new.block_share, ..old.clone() } != *new
}

/// Returns whether each node's share of blocks has changed so much that nodes would keep too many or too few blocks.
pub(super) fn is_far(old: &EgressIPStatus, new: &EgressIPStatus) -> bool {
    let (less, more) = (old.block_share.min(new.block_share), old.block_share.max(new.block_share));
    more > 2 * less
}

async fn statuses<T>(
    store: &Store,
    applied: &mut Applied,
    wanted: BTreeMap<String, T::Status>,
    scope: Scope<'_>,
    is_news: impl Fn(&T::Status, &T::Status) -> bool,
) where
    T: Stored + HasStatus<Status: PartialEq>,
{
    let is_news = &is_news;
    let tried = wanted.into_iter().map(|(name, wanted)| (Key::parse(&name), wanted));
    let tried = tried.filter(|(key, _)| !scope.is_waiting::<T>(key));
    let writes = tried.map(|(key, wanted)| status::<T>(store, key, wanted, scope.which, is_news));
    gather(stream::iter(writes).buffer_unordered(CONCURRENT), |result| applied.add_minor(result)).await;
}

async fn gather(
    mut results: impl StreamExt<Item = Result<Written, StoreError>> + Unpin,
    mut add: impl FnMut(Result<Written, StoreError>),
) {
    while let Some(result) = results.next().await {
        add(result);
    }
}

async fn egress_ip(store: &Store, wanted: EgressIP, which: Differences) -> Result<Written, StoreError> {
    let mut news = true;
    let (written, writes) = match store.get::<EgressIP>(&Key::of(&wanted)) {
        None => (store.create(&wanted).await?, 1),
        Some(current) if current.spec != wanted.spec || !same_labels(&current.metadata, &wanted.metadata) => {
            (store.replace(&wanted).await?, 1)
        }
        Some(current) if current.status != wanted.status => {
            if let Some((old, new)) = current.status.as_ref().zip(wanted.status.as_ref()) {
                news = is_news_of_egress_ip(old, new);
                match (news || is_far(old, new), news || which == Differences::All) {
                    (false, _) => return Ok(Written::Times(0)),
                    (true, false) => return Ok(Written::Later),
                    (true, true) => {}
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
    Ok(if news { Written::Times(writes + 1) } else { Written::Numbers(1) })
}

/// Returns whether two objects have the same labels. Absent labels equal an empty map.
fn same_labels(a: &ObjectMeta, b: &ObjectMeta) -> bool {
    a.labels.iter().flatten().eq(b.labels.iter().flatten())
}

async fn write_nodes(store: &Store, applied: &mut Applied, objects: Vec<EgressNode>) {
    let writes = objects.into_iter().map(|object| egress_node(store, object));
    gather(stream::iter(writes).buffer_unordered(CONCURRENT), |result| applied.add(result)).await;
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
    key: Key,
    status: T::Status,
    which: Differences,
    is_news: impl Fn(&T::Status, &T::Status) -> bool,
) -> Result<Written, StoreError>
where
    T: Stored + HasStatus<Status: PartialEq>,
{
    match store.get::<T>(&key) {
        Some(current) if current.status() != Some(&status) => {
            let news = current.status().is_none_or(|old| is_news(old, &status));
            if !news && which == Differences::News {
                return Ok(Written::Later);
            }
            let mut object = current.as_ref().clone();
            *object.status_mut() = Some(status);
            let writes = times(&object, &store.replace_status(&object).await?);
            Ok(if news { Written::Times(writes) } else { Written::Numbers(writes) })
        }
        _ => Ok(Written::Times(0)),
    }
}
