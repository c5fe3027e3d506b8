//! Partial rounds, which process a few changes without reading everything: new, changed and deleted pods, agents' reports,
//! and this controller's own writes. All other changes need a full round.

use crate::store::{Key, Kind, Store, Stored};
use egress_core::{
    health::Health,
    model::{Endpoint, EndpointId, NodeName, NodeReport, Policy, PolicyId, PolicyKind, Pool, Snapshot},
    network::pods::PodCidrs,
    plan::{Changes, EgressIpPlan, Memo, Plan},
};
use egress_objects::api::{EVERY_NODE, Egress, EgressIP, EgressNode, EgressNodeSpec, Pod, egress_ip_name};
use egress_objects::snapshot::{ApiObjects, Desired, desired_part, egress_ip, namespace};
use egress_objects::translate::{self, Problem};
use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

/// The kinds of objects that a plan is made from, except those in which CNIs name networks.
const KINDS: [Kind; 11] = [
    Kind::EgressGatewayPolicy,
    Kind::EgressPolicy,
    Kind::EgressIPPool,
    Kind::CiliumEgressGatewayPolicy,
    Kind::Egress,
    Kind::ExternalIPPool,
    Kind::Node,
    Kind::Namespace,
    Kind::Pod,
    Kind::EgressIP,
    Kind::EgressNode,
];

/// The store's revision of each kind that a plan is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Revisions(BTreeMap<Kind, u64>);

impl Revisions {
    pub(super) fn of(store: &Store) -> Self {
        let kinds = KINDS.into_iter().chain(Kind::of_networks());
        Self(kinds.map(|kind| (kind, store.revision_of(kind))).collect())
    }

    /// Returns whether the objects in which CNIs name networks are unchanged.
    fn has_networks_of(&self, store: &Store) -> bool {
        Kind::of_networks().all(|kind| self.0.get(&kind) == Some(&store.revision_of(kind)))
    }

    /// Returns the current state of each object of a kind that has changed since these revisions, or `None` if the store no longer knows.
    fn changed<T: Stored>(&self, store: &Store) -> Option<BTreeMap<Key, Option<Arc<T>>>> {
        let keys = store.changed::<T>(*self.0.get(&T::KIND)?)?;
        Some(keys.into_iter().map(|key| (key.clone(), store.get::<T>(&key))).collect())
    }
}

/// The state after a successful round. Its parts belong together: if it cannot be updated, it is discarded, and a full round rebuilds it.
pub(super) struct Known {
    pub(super) memo: Memo,
    /// The problems in the objects.
    problems: Vec<Problem>,
    /// The spec of each EgressNode.
    nodes: BTreeMap<String, EgressNodeSpec>,
    /// The EgressNodes that every agent follows.
    public: BTreeSet<String>,
}

impl Known {
    /// Returns the state after `wanted` is written.
    pub(super) fn new(memo: Memo, problems: Vec<Problem>, wanted: &Desired) -> Self {
        Self { memo, problems, nodes: specs(wanted).collect(), public: public(wanted).collect() }
    }

    /// Updates this state and `plan` with the store's changes since these revisions. Returns the desired objects that may
    /// differ from the actual ones, or `None` if a full round is needed.
    pub(super) fn take_in(
        self,
        store: &Store,
        since: &Revisions,
        health: &Health,
        plan: &mut Plan,
        now: &Time,
    ) -> Option<(Self, Desired)> {
        let snapshot = self.memo.snapshot();
        let mut objects = ApiObjects::default();
        since.has_networks_of(store).then_some(())?;
        namespaces(store, since, snapshot)?;
        self.nodes(store, since)?;
        let pool = |pool: &Pool| snapshot.pools.get(&pool.id) == Some(pool);
        objects.pools = alike(store, since, translate::pool, pool)?;
        objects.external_ip_pools = alike(store, since, translate::antrea::pool, pool)?;
        let mut policies = policies(store, since, snapshot)?;
        let egress_ips = egress_ips(store, since, plan)?;
        let reports = self.reports(store, since)?;
        let changes = Changes { pods: pods(store, since, snapshot)?, reports };

        let Known { memo, problems, mut nodes, mut public } = self;
        let (memo, mut touched) = memo.change(health, plan, changes)?;
        policies.extend(touched.policies.iter().cloned());
        for policy in policies {
            let key = Key::parse(&policy.name);
            match policy.kind {
                PolicyKind::Native => objects.policies.extend(store.get(&key)),
                PolicyKind::Namespaced => objects.namespaced_policies.extend(store.get(&key)),
                PolicyKind::Cilium => objects.cilium_policies.extend(store.get(&key)),
                PolicyKind::Antrea => objects.egresses.extend(store.get(&key)),
            }
        }
        touched.egress_ips.extend(egress_ips);
        let names = touched.egress_ips.iter().map(|address| egress_ip_name(*address));
        objects.egress_ips = names.filter_map(|name| store.get(&Key::cluster(&name))).collect();
        let names = touched.nodes.iter().map(NodeName::as_str);
        objects.egress_nodes = names.filter_map(|name| store.get(&Key::cluster(name))).collect();
        let mut desired = desired_part(&objects, memo.snapshot(), plan, &problems, now, (&touched, &nodes));
        super::remarks::add(&mut desired, &objects, &store.problems(), now);
        nodes.extend(specs(&desired));
        public.extend(self::public(&desired));
        Some((Known { memo, problems, nodes, public }, desired))
    }

    /// Returns `Some` if the changed nodes translate to the same model as before.
    fn nodes(&self, store: &Store, since: &Revisions) -> Option<()> {
        let known = &self.memo.snapshot().nodes;
        for (_, object) in since.changed::<Node>(store)? {
            let (node, found) = translate::node(object?.as_ref(), None);
            let before = known.get(&node.name)?;
            let report = before.report.clone();
            let had_problems = self.problems.iter().any(|problem| problem.name == node.name.as_str());
            if had_problems || !found.is_empty() || (egress_core::model::Node { report, ..node }) != *before {
                return None;
            }
        }
        Some(())
    }

    /// Returns the changed reports of agents, or `None` if more than an EgressNode's report has changed.
    fn reports(&self, store: &Store, since: &Revisions) -> Option<BTreeMap<NodeName, NodeReport>> {
        let mut reports = BTreeMap::new();
        for (key, object) in since.changed::<EgressNode>(store)? {
            let object = object?;
            let by = if self.public.contains(&key.name) { EVERY_NODE } else { &key.name };
            if self.nodes.get(&key.name) != Some(&object.spec) || object.followed_by() != Some(by) {
                return None;
            }
            let name = NodeName::from(key.name.as_str());
            let Some(node) = self.memo.snapshot().nodes.get(&name) else { continue };
            let had_problems = self.problems.iter().any(|problem| problem.name == key.name);
            let (report, found) = translate::report(&object).unzip();
            if had_problems || found.is_some_and(|found| !found.is_empty()) {
                return None;
            }
            match report {
                Some(report) if node.report.as_ref() != Some(&report) => reports.insert(name, report),
                None if node.report.is_some() => return None,
                _ => None,
            };
        }
        Some(reports)
    }
}

fn public(desired: &Desired) -> impl Iterator<Item = String> {
    let public = desired.egress_nodes.iter().filter(|(_, object)| object.followed_by() == Some(EVERY_NODE));
    public.map(|(name, _)| name.clone())
}

fn specs(desired: &Desired) -> impl Iterator<Item = (String, EgressNodeSpec)> {
    desired.egress_nodes.iter().map(|(name, object)| (name.clone(), object.spec.clone()))
}

/// Returns the changed objects of a kind if all of them exist and translate to a known model.
fn alike<T: Stored, M>(
    store: &Store,
    since: &Revisions,
    read: impl Fn(&T) -> Result<M, Vec<Problem>>,
    is_known: impl Fn(&M) -> bool,
) -> Option<Vec<Arc<T>>> {
    let objects: Option<Vec<Arc<T>>> = since.changed(store)?.into_values().collect();
    objects.filter(|objects| objects.iter().all(|object| read(object).is_ok_and(|model| is_known(&model))))
}

/// Returns the policies whose objects changed if all of them still translate to the same model.
fn policies(store: &Store, since: &Revisions, snapshot: &Snapshot) -> Option<BTreeSet<PolicyId>> {
    let known = |policy: &Policy| snapshot.policies.get(&policy.id) == Some(policy);
    let own = alike(store, since, translate::policy, known)?;
    let namespaced = alike(store, since, translate::namespaced_policy, known)?;
    let cilium = alike(store, since, translate::cilium::policy, known)?;
    let read = |object: &Egress| translate::antrea::egress(object, &snapshot.pools, &snapshot.unreadable_pools);
    let antrea = alike(store, since, read, known)?;
    let mut policies = BTreeSet::new();
    policies.extend(ids(PolicyKind::Native, &own));
    policies.extend(ids(PolicyKind::Namespaced, &namespaced));
    policies.extend(ids(PolicyKind::Cilium, &cilium));
    policies.extend(ids(PolicyKind::Antrea, &antrea));
    Some(policies)
}

fn ids<T: Stored>(kind: PolicyKind, objects: &[Arc<T>]) -> impl Iterator<Item = PolicyId> {
    objects.iter().map(move |object| PolicyId::new(kind, &Key::of(object.as_ref()).to_string()))
}

/// Returns `Some` if the changed namespaces have the same labels as before.
fn namespaces(store: &Store, since: &Revisions, snapshot: &Snapshot) -> Option<()> {
    for (_, object) in since.changed::<Namespace>(store)? {
        let (name, labels) = namespace(object?.as_ref());
        if snapshot.namespaces.get(&name) != Some(&labels) {
            return None;
        }
    }
    Some(())
}

/// Returns the egress IPs whose objects changed if all of them match the plan.
fn egress_ips(store: &Store, since: &Revisions, plan: &Plan) -> Option<Vec<IpAddr>> {
    let mut addresses = Vec::new();
    for (_, object) in since.changed::<EgressIP>(store)? {
        let (address, said) = egress_ip(object?.as_ref())?;
        let planned = plan.egress_ips.get(&address)?;
        if (EgressIpPlan { reason: planned.reason, ..said }) != *planned {
            return None;
        }
        addresses.push(address);
    }
    Some(addresses)
}

/// Returns the changed pods, or `None` if a full round is needed.
fn pods(store: &Store, since: &Revisions, snapshot: &Snapshot) -> Option<BTreeMap<EndpointId, Option<Endpoint>>> {
    let mut changes = BTreeMap::new();
    let cidrs = LazyCell::new(|| PodCidrs::of(snapshot));
    for (key, pod) in since.changed::<Pod>(store)? {
        let first = EndpointId::new(&key.namespace, &key.name, "");
        let of_name = snapshot.endpoints.range(first.clone()..).map(|(id, _)| id);
        let of_name = of_name.take_while(|id| (&id.namespace, &id.name) == (&first.namespace, &first.name));
        let gone: Vec<EndpointId> = of_name.cloned().collect();
        // A pod outside the known networks changes its node's object, which only a full round rebuilds.
        if gone.iter().any(|id| snapshot.endpoints.get(id).is_some_and(|pod| !cidrs.have_all(pod))) {
            return None;
        }
        changes.extend(gone.into_iter().map(|id| (id, None)));
        if let Some(endpoint) = pod.and_then(|pod| translate::endpoint(&pod)) {
            if !cidrs.have_all(&endpoint) {
                return None;
            }
            // A namespace without an object gets default labels with its first pod.
            snapshot.namespaces.get(&endpoint.id.namespace)?;
            changes.insert(endpoint.id.clone(), Some(endpoint));
        }
    }
    Some(changes)
}
