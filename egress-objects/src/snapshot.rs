//! Converts between objects and plans, without any I/O: all objects to a [`Snapshot`], the controller's own objects
//! back to the plan that they were made from, and a plan to the objects that should exist.
//!
//! The objects are the only memory: a controller that starts reads the previous plan from them.

mod believed;
mod desired;
mod previous;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::networking::v1::ServiceCIDR;

pub use desired::{Desired, PROGRAMMED, desired, desired_part};
pub use previous::{draining_since, egress_ip, previous};

use crate::api::{
    CiliumEgressGatewayPolicy, Egress, EgressGatewayPolicy, EgressIP, EgressIPPool, EgressNode, EgressPolicy,
    ExternalIPPool, Pod,
};
use crate::translate::{self, Problem, networks::CniObjects};
use egress_core::model::{Labels, Snapshot};

/// All objects that a plan is made from, in any order.
#[derive(Clone, Debug, Default)]
pub struct ApiObjects {
    /// EgressGatewayPolicy
    pub policies: Vec<Arc<EgressGatewayPolicy>>,
    /// EgressPolicy
    pub namespaced_policies: Vec<Arc<EgressPolicy>>,
    /// EgressIPPool
    pub pools: Vec<Arc<EgressIPPool>>,
    /// CiliumEgressGatewayPolicy
    pub cilium_policies: Vec<Arc<CiliumEgressGatewayPolicy>>,
    /// Egress
    pub egresses: Vec<Arc<Egress>>,
    /// ExternalIPPool
    pub external_ip_pools: Vec<Arc<ExternalIPPool>>,
    /// Node
    pub nodes: Vec<Arc<Node>>,
    /// Namespace
    pub namespaces: Vec<Arc<Namespace>>,
    /// Pod
    pub pods: Vec<Arc<Pod>>,
    /// ServiceCIDR; a controller has none.
    pub service_cidrs: Vec<Arc<ServiceCIDR>>,
    /// Objects in which CNIs name the networks of pods; an agent has none.
    pub cni: CniObjects,
    /// EgressIP
    pub egress_ips: Vec<Arc<EgressIP>>,
    /// EgressNode
    pub egress_nodes: Vec<Arc<EgressNode>>,
}

/// Returns the model of all objects, and the problems in them. Of a pool with a problem, only the nodes with its
/// addresses are known (`translate::pool::known`); of a policy, what it selects (`translate::policy::read`); a
/// policy of another system is omitted. A node is read without the part that has the problem.
pub fn snapshot(objects: &ApiObjects) -> (Snapshot, Vec<Problem>) {
    let (mut snapshot, mut problems) = (Snapshot::default(), Vec::new());
    let own = objects.pools.iter().map(|object| translate::pool::read(object));
    for (pool, found) in own.chain(objects.external_ip_pools.iter().map(|o| translate::antrea::read_pool(o))) {
        if found.is_empty() {
            snapshot.pools.insert(pool.id.clone(), pool);
        } else {
            snapshot.unreadable_pools.insert(pool.id.clone(), translate::pool::known(pool, &found));
            problems.extend(found);
        }
    }
    let own = objects.policies.iter().map(|object| translate::read(object));
    for (policy, found) in own.chain(objects.namespaced_policies.iter().map(|o| translate::read_namespaced(o))) {
        snapshot.policies.insert(policy.id.clone(), policy);
        problems.extend(found);
    }
    let cilium = objects.cilium_policies.iter().map(|object| translate::cilium::policy(object));
    let (pools, unreadable) = (&snapshot.pools, &snapshot.unreadable_pools);
    let antrea = objects.egresses.iter().map(|object| translate::antrea::egress(object, pools, unreadable));
    for read in cilium.chain(antrea) {
        match read {
            Ok(policy) => {
                snapshot.policies.insert(policy.id.clone(), policy);
            }
            Err(found) => problems.extend(found),
        }
    }
    let egress_nodes: BTreeMap<&str, &EgressNode> =
        objects.egress_nodes.iter().filter_map(|node| Some((node.metadata.name.as_deref()?, &**node))).collect();
    for object in &objects.nodes {
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let (node, found) = translate::node(object, egress_nodes.get(name).copied());
        snapshot.nodes.insert(node.name.clone(), node);
        problems.extend(found);
    }
    for object in &objects.service_cidrs {
        let (networks, found) = translate::service_cidr(object);
        snapshot.services.extend(networks);
        problems.extend(found);
    }
    for object in &objects.egress_nodes {
        let (networks, found) = translate::pod_networks(object);
        snapshot.pod_networks.extend(networks);
        problems.extend(found);
    }
    let (networks, found) = translate::networks::networks(&objects.cni);
    snapshot.cni_networks = networks;
    problems.extend(found);
    snapshot.namespaces.extend(objects.namespaces.iter().map(|object| namespace(object)));
    for endpoint in objects.pods.iter().filter_map(|pod| translate::endpoint(pod)) {
        if !snapshot.namespaces.contains_key(&endpoint.id.namespace) {
            let labels = [("kubernetes.io/metadata.name".to_owned(), endpoint.id.namespace.to_string())];
            snapshot.namespaces.insert(endpoint.id.namespace.clone(), labels.into());
        }
        snapshot.endpoints.insert(endpoint.id.clone(), endpoint);
    }
    problems.extend(believed::believed(&objects.nodes, &mut snapshot));
    problems.sort();
    (snapshot, problems)
}

/// Returns the name and the labels of a namespace.
pub fn namespace(object: &Namespace) -> (Arc<str>, Labels) {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let mut labels = object.metadata.labels.clone().unwrap_or_default();
    labels.entry("kubernetes.io/metadata.name".into()).or_insert_with(|| name.into());
    (name.into(), labels)
}

#[cfg(test)]
mod tests;
