//! Reading the objects: everything an agent wants to know of them, and whether any of it has changed.

use crate::{
    api::{
        CiliumEgressGatewayPolicy, Egress, EgressGatewayPolicy, EgressIP, EgressIPPool, EgressNode, ExternalIPPool,
        Pod, egress_ip_name,
    },
    snapshot::{self, Objects},
    store::Store,
    translate::{Problem, networks::CniObjects},
};
use egress_core::{
    agent::carriers,
    model::{AddressSource, NodeName, PolicyId, PolicyKind, Snapshot, Source},
    plan::Plan,
};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::{
    api::core::v1::{Namespace, Node},
    apimachinery::pkg::apis::meta::v1::Condition,
};
use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

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
            service_cidrs: store.list::<ServiceCIDR>(),
            cni: CniObjects::default(),
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
            && same(&objects.service_cidrs, &old.service_cidrs)
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

    /// Whether any pool or policy would have this node as a gateway, or the plan has it as one: its pool may be gone.
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
        by_pool || by_policy || self.is_named(node)
    }
}
