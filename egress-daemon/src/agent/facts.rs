//! Reads the objects' fields that an agent needs, and detects whether any of them has changed.

use crate::store::Store;
use egress_core::{
    agent::facts::Objects,
    model::{NodeName, Policy, PolicyId, PolicyKind},
};
use egress_objects::{
    api::{
        CiliumEgressGatewayPolicy, Egress, EgressGatewayPolicy, EgressIP, EgressIPPool, EgressNode, EgressPolicy,
        ExternalIPPool, Pod, egress_ip_name,
    },
    snapshot::{self, PROGRAMMED},
    translate::{self, Problem, networks::CniObjects},
};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::{
    api::core::v1::{Namespace, Node},
    apimachinery::pkg::apis::meta::v1::Condition,
};
use kube::{
    Resource,
    core::object::{HasSpec, HasStatus},
};
use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    ops::Deref,
    sync::Arc,
};

/// The objects of the last read, and the model that was made from them.
#[derive(Default)]
pub struct ObservedObjects {
    objects: snapshot::ApiObjects,
    /// The index of each policy's object in the list of its kind.
    policies: BTreeMap<PolicyId, usize>,
    /// The index of each egress IP's object, by its name.
    egress_ips: HashMap<String, usize>,
    /// The model of the objects.
    pub meant: Arc<Objects>,
    /// The parts of the objects that could not be understood.
    pub problems: Vec<Problem>,
}

impl Deref for ObservedObjects {
    type Target = Objects;

    fn deref(&self) -> &Objects {
        &self.meant
    }
}

/// Returns the index of each policy in a list of objects of one kind.
fn places<T: Resource>(kind: PolicyKind, objects: &[Arc<T>]) -> impl Iterator<Item = (PolicyId, usize)> {
    objects.iter().enumerate().map(move |(at, object)| (PolicyId::new(kind, &translate::name(object.meta())), at))
}

fn same<T>(a: &[Arc<T>], b: &[Arc<T>]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b))
}

/// Returns whether two lists of users' objects agree in all fields that the agent reads. Of a status it reads at most the conditions,
/// because the controller also writes numbers there that change all the time.
fn alike<T>(a: &[Arc<T>], b: &[Arc<T>], conditions: impl Fn(&T::Status) -> &[Condition]) -> bool
where
    T: Resource + HasSpec<Spec: PartialEq> + HasStatus,
{
    let identity = |object: &T| {
        let meta = object.meta();
        (meta.name.clone(), meta.namespace.clone(), meta.uid.clone(), meta.generation, meta.creation_timestamp.clone())
    };
    let told = |object: &T| object.status().map(&conditions).unwrap_or_default().to_vec();
    let alike = |a: &T, b: &T| identity(a) == identity(b) && a.spec() == b.spec() && told(a) == told(b);
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b) || alike(a, b))
}

impl ObservedObjects {
    /// Reads the objects. Returns whether any has changed. Pods of other nodes are left out.
    pub fn read(&mut self, store: &Store, node: &NodeName) -> bool {
        // Read this first: the lists below are then at least as complete.
        let partial = !store.is_whole::<EgressNode>();
        let on_node = |p: &Arc<Pod>| p.spec.as_ref().is_some_and(|s| s.node_name.as_deref() == Some(node.as_str()));
        let objects = snapshot::ApiObjects {
            policies: store.list::<EgressGatewayPolicy>(),
            namespaced_policies: store.list::<EgressPolicy>(),
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
        self.take(objects, partial)
    }

    /// Replaces the objects. Returns whether any field that the agent reads has changed. `partial` says that EgressNodes are missing.
    pub fn take(&mut self, objects: snapshot::ApiObjects, partial: bool) -> bool {
        let old = &self.objects;
        if partial == self.meant.partial
            && alike(&objects.policies, &old.policies, |status| &status.conditions)
            && alike(&objects.namespaced_policies, &old.namespaced_policies, |status| &status.conditions)
            && alike(&objects.pools, &old.pools, |_| &[])
            && alike(&objects.cilium_policies, &old.cilium_policies, |status| &status.conditions)
            && alike(&objects.egresses, &old.egresses, |status| &status.conditions)
            && alike(&objects.external_ip_pools, &old.external_ip_pools, |_| &[])
            && same(&objects.nodes, &old.nodes)
            && same(&objects.namespaces, &old.namespaces)
            && same(&objects.pods, &old.pods)
            && same(&objects.service_cidrs, &old.service_cidrs)
            && same(&objects.egress_ips, &old.egress_ips)
            && same(&objects.egress_nodes, &old.egress_nodes)
        {
            return false;
        }
        let (snapshot, problems) = snapshot::snapshot(&objects);
        let plan = snapshot::previous(&objects);
        self.policies = places(PolicyKind::Native, &objects.policies)
            .chain(places(PolicyKind::Namespaced, &objects.namespaced_policies))
            .chain(places(PolicyKind::Cilium, &objects.cilium_policies))
            .chain(places(PolicyKind::Antrea, &objects.egresses))
            .collect();
        let names = objects.egress_ips.iter().enumerate();
        self.egress_ips = names.filter_map(|(at, object)| Some((object.metadata.name.clone()?, at))).collect();
        (self.objects, self.problems) = (objects, problems);
        let unplanned = snapshot.policies.values().filter(|policy| !self.is_planned(policy));
        let unplanned = unplanned.map(|policy| policy.id.clone()).collect();
        self.meant = Arc::new(Objects { snapshot, plan, partial, unplanned });
        true
    }

    /// Returns this node's own object.
    pub fn egress_node(&self, node: &NodeName) -> Option<&Arc<EgressNode>> {
        self.objects.egress_nodes.iter().find(|n| n.metadata.name.as_deref() == Some(node.as_str()))
    }

    /// Returns the conditions that the controller wrote for a policy.
    pub fn policy_conditions(&self, policy: &PolicyId) -> impl Iterator<Item = &Condition> {
        let at = self.policies.get(policy).copied();
        let objects = &self.objects;
        let conditions = at.and_then(|at| match policy.kind {
            PolicyKind::Native => objects.policies[at].status.as_ref().map(|status| &status.conditions),
            PolicyKind::Namespaced => objects.namespaced_policies[at].status.as_ref().map(|status| &status.conditions),
            PolicyKind::Cilium => objects.cilium_policies[at].status.as_ref().map(|status| &status.conditions),
            PolicyKind::Antrea => objects.egresses[at].status.as_ref().map(|status| &status.conditions),
        });
        conditions.into_iter().flatten()
    }

    /// Returns whether the controller has planned a policy's present generation: it writes conditions after the objects of the plan. Other
    /// systems' definitions may keep no conditions, or none of their generations. Then nothing tells, and the policy counts as planned.
    fn is_planned(&self, policy: &Policy) -> bool {
        let generations = || self.policy_conditions(&policy.id).filter_map(|condition| condition.observed_generation);
        let tells = match policy.id.kind {
            PolicyKind::Native | PolicyKind::Namespaced => true,
            PolicyKind::Cilium | PolicyKind::Antrea => generations().next().is_some(),
        };
        !tells || generations().any(|generation| generation == policy.generation)
    }

    /// Returns whether the controller awaits no report on a policy: the policy is gone, or every node has programmed this generation.
    pub fn is_settled(&self, policy: &PolicyId, generation: i64) -> bool {
        let had = |c: &Condition| (c.type_.as_str(), c.status.as_str()) == (PROGRAMMED, "True");
        let of_generation = |c: &Condition| c.observed_generation == Some(generation);
        !self.snapshot.policies.contains_key(policy)
            || self.policy_conditions(policy).any(|c| had(c) && of_generation(c))
    }

    /// Returns the conditions that the controller wrote for an egress IP.
    pub fn egress_ip_conditions(&self, address: IpAddr) -> impl Iterator<Item = &Condition> {
        let object = self.egress_ips.get(&egress_ip_name(address)).map(|at| &self.objects.egress_ips[*at]);
        object.and_then(|e| e.status.as_ref()).into_iter().flat_map(|s| &s.conditions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_objects::api::{EgressGatewayPolicyStatus, EgressIPPoolStatus};
    use serde_json::{Value, json};

    fn read<T: serde::de::DeserializeOwned>(value: Value) -> Arc<T> {
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn objects() -> snapshot::ApiObjects {
        let metadata = json!({"name": "web", "uid": "1", "generation": 1, "resourceVersion": "7"});
        let ready = json!({"type": "Ready", "status": "True", "reason": "AsExpected", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let slot = json!({"egressIP": "192.0.2.1", "epoch": 1, "healthy": true, "weight": 1, "endpoints": 3});
        let pool = json!({"ipRanges": [{"cidr": "192.0.2.0/28"}], "nodeSelector": {}});
        let policy = json!({
            "selectors": [{"podSelector": {}}], "destinationCIDRs": ["0.0.0.0/0"], "egressIPPools": [{"name": "web"}],
        });
        snapshot::ApiObjects {
            policies: vec![read(json!({
                "apiVersion": "spillway.io/v1beta1", "kind": "EgressGatewayPolicy", "metadata": metadata, "spec": policy,
                "status": {"selectedEndpoints": 3, "conditions": [ready], "slots": [slot], "egressIPs": "192.0.2.1"},
            }))],
            pools: vec![read(json!({
                "apiVersion": "spillway.io/v1beta1", "kind": "EgressIPPool", "metadata": metadata, "spec": pool,
            }))],
            ..snapshot::ApiObjects::default()
        }
    }

    #[test]
    fn counts_in_a_status_are_not_a_change_for_an_agent() {
        let mut observed = ObservedObjects::default();
        assert!(observed.take(objects(), false));
        let mut other = objects();
        let policy = Arc::make_mut(&mut other.policies[0]);
        policy.metadata.resource_version = Some("8".into());
        let status = policy.status.as_mut().unwrap();
        status.selected_endpoints = 4;
        status.slots[0].endpoints = Some(4);
        Arc::make_mut(&mut other.pools[0]).status = Some(EgressIPPoolStatus::default());
        assert!(!observed.take(other, false));

        type Change = fn(&mut EgressGatewayPolicy);
        let changes: [(&str, Change); 5] = [
            ("another object of this name", |policy| policy.metadata.uid = Some("2".into())),
            ("a new generation", |policy| policy.metadata.generation = Some(2)),
            ("a new spec, as files have it before their record", |policy| policy.spec.destination_cidrs.clear()),
            ("a condition", |policy| policy.status.as_mut().unwrap().conditions[0].status = "False".into()),
            ("no status", |policy| policy.status = None),
        ];
        for (why, change) in changes {
            let mut observed = ObservedObjects::default();
            observed.take(objects(), false);
            let mut other = objects();
            change(Arc::make_mut(&mut other.policies[0]));
            assert!(observed.take(other, false), "{why}");
        }
    }

    #[test]
    fn a_policy_is_planned_once_a_condition_has_its_generation() {
        let mut all = objects();
        let foreign = json!({
            "selectors": [{"podSelector": {}}], "destinationCIDRs": ["0.0.0.0/0"],
            "egressGateway": {"nodeSelector": {"matchLabels": {}}, "egressIP": "192.0.2.9"},
        });
        all.cilium_policies = vec![read(json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumEgressGatewayPolicy", "spec": foreign,
            "metadata": {"name": "web", "uid": "2", "generation": 1},
        }))];
        let conditions = all.policies[0].status.as_ref().unwrap().conditions.clone();
        let mut unplanned = |own: Option<i64>, of_cilium: Option<i64>| {
            let told = |generation| {
                conditions.iter().cloned().map(move |c| Condition { observed_generation: generation, ..c })
            };
            Arc::make_mut(&mut all.policies[0]).status.as_mut().unwrap().conditions = told(own).collect();
            let status = EgressGatewayPolicyStatus { conditions: told(of_cilium).collect(), ..Default::default() };
            Arc::make_mut(&mut all.cilium_policies[0]).status = Some(status);
            let mut observed = ObservedObjects::default();
            observed.take(all.clone(), false);
            assert_eq!(observed.snapshot.policies.len(), 2);
            observed.unplanned.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(unplanned(Some(1), Some(1)), [] as [&str; 0]);
        assert_eq!(unplanned(Some(0), Some(0)), ["web", "cegp/web"]);
        assert_eq!(unplanned(None, None), ["web"], "Cilium's own definition keeps no conditions");
    }
}
