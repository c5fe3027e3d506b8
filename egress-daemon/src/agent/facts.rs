//! Reading the objects: everything an agent wants to know of them, and whether any of it has changed.

use super::carriers;
use crate::{
    api::{
        CiliumEgressGatewayPolicy, Egress, EgressGatewayPolicy, EgressIP, EgressIPPool, EgressNode, ExternalIPPool,
        Pod, egress_ip_name,
    },
    datapath::encode::EndpointView,
    model::{AddressSource, EndpointId, NodeName, PolicyId, PolicyKind, Snapshot, Source},
    plan::Plan,
    snapshot::{self, Objects},
    store::Store,
    translate::Problem,
};
use k8s_openapi::{
    api::core::v1::{Namespace, Node},
    apimachinery::pkg::apis::meta::v1::Condition,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

/// The objects as they were read last, and what they mean.
#[derive(Default)]
pub struct World {
    objects: Objects,
    /// The model.
    pub snapshot: Snapshot,
    /// What the controller has decided.
    pub plan: Plan,
    /// What could not be understood.
    pub problems: Vec<Problem>,
}

/// Up to which revisions a node knows of leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Of those of every node: as a gateway it lets them pass.
    pub all: u64,
    /// Of its own: what it gives back is meant up to it.
    pub own: u64,
}

impl Known {
    /// The higher one of each.
    #[must_use]
    pub fn max(self, other: Known) -> Known {
        Known { all: self.all.max(other.all), own: self.own.max(other.own) }
    }
}

fn same<T>(a: &[Arc<T>], b: &[Arc<T>]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
}

impl World {
    /// Reads the objects; whether any has changed. Pods of other nodes are left out.
    pub fn read(&mut self, store: &Store, node: &NodeName) -> bool {
        let on_node = |p: &Arc<Pod>| p.spec.as_ref().is_some_and(|s| s.node_name.as_deref() == Some(node.as_str()));
        let objects = Objects {
            policies: store.list::<EgressGatewayPolicy>(),
            pools: store.list::<EgressIPPool>(),
            cilium_policies: store.list::<CiliumEgressGatewayPolicy>(),
            egresses: store.list::<Egress>(),
            external_ip_pools: store.list::<ExternalIPPool>(),
            nodes: store.list::<Node>(),
            namespaces: store.list::<Namespace>(),
            pods: store.list::<Pod>().into_iter().filter(on_node).collect(),
            egress_ips: store.list::<EgressIP>(),
            egress_nodes: store.list::<EgressNode>(),
        };
        self.take(objects)
    }

    /// The objects are these now; whether any is another one than before.
    pub fn take(&mut self, objects: Objects) -> bool {
        let old = &self.objects;
        if same(&objects.policies, &old.policies)
            && same(&objects.pools, &old.pools)
            && same(&objects.cilium_policies, &old.cilium_policies)
            && same(&objects.egresses, &old.egresses)
            && same(&objects.external_ip_pools, &old.external_ip_pools)
            && same(&objects.nodes, &old.nodes)
            && same(&objects.namespaces, &old.namespaces)
            && same(&objects.pods, &old.pods)
            && same(&objects.egress_ips, &old.egress_ips)
            && same(&objects.egress_nodes, &old.egress_nodes)
        {
            return false;
        }
        (self.snapshot, self.problems) = snapshot::snapshot(&objects);
        self.plan = snapshot::previous(&objects);
        self.objects = objects;
        true
    }

    /// This node's own object.
    pub fn egress_node(&self, node: &NodeName) -> Option<&Arc<EgressNode>> {
        self.objects.egress_nodes.iter().find(|n| n.metadata.name.as_deref() == Some(node.as_str()))
    }

    /// The conditions of a policy, as the controller wrote them.
    pub fn policy_conditions(&self, policy: &PolicyId) -> impl Iterator<Item = &Condition> {
        fn named<'a, T: kube::Resource>(objects: &'a [Arc<T>], policy: &PolicyId) -> Option<&'a T> {
            objects.iter().find(|object| object.meta().name.as_deref() == Some(&*policy.name)).map(Arc::as_ref)
        }
        let objects = &self.objects;
        let conditions = match policy.kind {
            PolicyKind::Native => named(&objects.policies, policy).and_then(|p| Some(&p.status.as_ref()?.conditions)),
            PolicyKind::Cilium => {
                named(&objects.cilium_policies, policy).and_then(|p| Some(&p.status.as_ref()?.conditions))
            }
            PolicyKind::Antrea => named(&objects.egresses, policy).and_then(|p| Some(&p.status.as_ref()?.conditions)),
        };
        conditions.into_iter().flatten()
    }

    /// The policies whose status the controller has not written yet.
    pub fn unanswered(&self) -> BTreeSet<PolicyId> {
        let all = self.snapshot.policies.keys();
        all.filter(|id| self.policy_conditions(id).next().is_none()).cloned().collect()
    }

    /// The conditions of an egress IP, as the controller wrote them.
    pub fn egress_ip_conditions(&self, address: IpAddr) -> impl Iterator<Item = &Condition> {
        let name = egress_ip_name(address);
        let object = self.objects.egress_ips.iter().find(|e| e.metadata.name.as_deref() == Some(&name));
        object.and_then(|e| e.status.as_ref()).into_iter().flat_map(|s| &s.conditions)
    }

    /// Whether the plan counts on a node as a gateway, be it that it asks whether it lives.
    pub fn is_named(&self, node: &NodeName) -> bool {
        self.plan.egress_ips.values().flat_map(carriers::order).any(|name| name == node)
    }

    /// Up to which revisions all leases are in the maps after the next write. A report never falls, or a lease that was
    /// confirmed would seem not to be.
    pub fn leases(&self, node: &NodeName) -> Known {
        let reported = self.snapshot.report(node);
        Known {
            all: self.egress_node(node).map_or(0, |object| object.spec.leases_up_to),
            own: self.plan.highest_lease_of(node),
        }
        .max(reported.map_or(Known::default(), |r| Known { all: r.lease_revision, own: r.own_lease_revision }))
    }

    /// Whether any pool or policy would have this node as a gateway.
    pub fn may_be_gateway(&self, node: &NodeName) -> bool {
        let Some(n) = self.snapshot.nodes.get(node) else { return false };
        let by_pool = self.snapshot.pools.values().any(|p| p.nodes.matches(&n.labels));
        let by_policy = self.snapshot.policies.values().any(|p| match &p.source {
            Source::Gateways(gateways) => gateways.iter().any(|g| {
                let holds = !matches!(g.address, AddressSource::Configured(ip) if !n.has_address(ip));
                holds && g.nodes.matches(&n.labels)
            }),
            Source::Pools(_) => false,
        });
        by_pool || by_policy
    }
}

/// Until when each pod may send on TCP connections from before a policy selected it.
///
/// A pod that was selected when this node first heard of it has none. One that was seen with an address while nothing selected it, or
/// that was there before the first agent, may have some. What it sends on is recorded; what has been silent for as long as an
/// established connection may be is over.
#[derive(Default)]
pub struct Histories {
    known: BTreeMap<EndpointId, History>,
    past_first: bool,
}

/// What a pod may have from before a policy selected it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum History {
    /// Nothing.
    None,
    /// No policy has selected it yet.
    Unselected,
    /// Connections that may be silent until this tick.
    Until(u32),
}

impl Histories {
    /// What an earlier agent knew.
    pub fn recover(endpoints: &BTreeMap<EndpointId, EndpointView>) -> Self {
        let history = |pod: &EndpointView| match pod.history_until {
            _ if pod.class.is_empty() => History::Unselected,
            0 => History::None,
            until => History::Until(until),
        };
        let known: BTreeMap<_, _> = endpoints.iter().map(|(id, pod)| (id.clone(), history(pod))).collect();
        Self { past_first: !known.is_empty(), known }
    }

    /// Takes note of the pods as they are now. A connection that is silent from now on is over at the tick `until`.
    pub fn update(&mut self, snapshot: &Snapshot, classes: &BTreeMap<EndpointId, BTreeSet<PolicyId>>, until: u32) {
        self.known.retain(|id, _| classes.contains_key(id));
        for (id, class) in classes {
            let has_address = snapshot.endpoints.get(id).is_some_and(|e| !e.ips.is_empty());
            let first = if !self.past_first && has_address { History::Unselected } else { History::None };
            let history = self.known.entry(id.clone()).or_insert(first);
            if class.is_empty() {
                *history = if has_address { History::Unselected } else { *history };
            } else if *history == History::Unselected {
                *history = History::Until(until);
            }
        }
        self.past_first = true;
    }

    /// The tick from which on a pod has no older connections; 0 for one that no policy selects, or that never had any.
    pub fn until(&self, pod: &EndpointId) -> u32 {
        match self.known.get(pod) {
            Some(History::Until(tick)) => *tick,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Endpoint;

    fn id(name: &str) -> EndpointId {
        EndpointId::new("default", name, name)
    }

    /// One pod with an address, and the policies that select it.
    fn pod(name: &str, policies: &[&str]) -> (Snapshot, BTreeMap<EndpointId, BTreeSet<PolicyId>>) {
        let ips = [IpAddr::from([10, 0, 0, 7])].into();
        let endpoint = Endpoint { id: id(name), node: "me".into(), ips, labels: Default::default() };
        let snapshot = Snapshot { endpoints: [(id(name), endpoint)].into(), ..Snapshot::default() };
        let class = policies.iter().map(|policy| PolicyId::new(PolicyKind::Native, policy)).collect();
        (snapshot, [(id(name), class)].into())
    }

    /// The pod as it is in the maps.
    fn written(histories: &Histories, classes: &BTreeMap<EndpointId, BTreeSet<PolicyId>>) -> Histories {
        let view = |(pod, class): (&EndpointId, &BTreeSet<PolicyId>)| {
            let history_until = histories.until(pod);
            (pod.clone(), EndpointView { class: class.clone(), history_until, ..EndpointView::default() })
        };
        Histories::recover(&classes.iter().map(view).collect())
    }

    #[test]
    fn history_ends_at_the_tick_that_was_set_when_a_policy_first_selected_the_pod() {
        let (mut histories, web) = (Histories::default(), id("web"));
        for (policies, now, until) in [
            (&[][..], 100, 0),
            (&["one"], 200, 200),
            (&["one"], 300, 200),
            (&["one", "two"], 400, 200),
            (&["two"], 500, 200),
            // It has opened connections since.
            (&[], 600, 0),
            (&["two"], 700, 700),
        ] {
            let (snapshot, classes) = pod("web", policies);
            histories.update(&snapshot, &classes, now);
            assert_eq!(histories.until(&web), until, "{policies:?} at {now}");
            // The agent starts anew after each step.
            histories = written(&histories, &classes);
            histories.update(&snapshot, &classes, now + 50);
            assert_eq!(histories.until(&web), until, "{policies:?} at {now}, by another agent");
        }
        // Selected from its start.
        let (snapshot, classes) = pod("new", &["one"]);
        histories.update(&snapshot, &classes, 800);
        assert_eq!(written(&histories, &classes).until(&id("new")), 0);
        // There before the first agent.
        let mut first = Histories::default();
        first.update(&snapshot, &classes, 900);
        assert_eq!(first.until(&id("new")), 900);
    }
}
