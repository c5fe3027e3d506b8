//! Pod networks that no Node names: with the address management of some CNIs and clouds, `podCIDRs` is empty or contains something else.
//! Some CNIs name their networks in their own objects; otherwise only the addresses of the pods are known.

use crate::model::{Endpoint, NodeName, Snapshot};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// The pod networks that objects name.
pub struct PodCidrs {
    /// Each with the node whose pods have the addresses, if known.
    named: BTreeMap<IpNet, Option<NodeName>>,
    /// The prefix lengths that occur: few, so that an address is looked up by each.
    lengths: BTreeSet<u8>,
}

impl PodCidrs {
    /// Collects the networks of all nodes, and those that a CNI names.
    pub fn of(snapshot: &Snapshot) -> Self {
        let cni = &snapshot.cni_networks;
        let by_cni = cni.nodes.iter().flat_map(|(node, nets)| nets.iter().map(|net| (net.trunc(), Some(node.clone()))));
        let nodes = snapshot.nodes.values();
        let by_node = nodes.flat_map(|node| node.pod_cidrs.iter().map(|net| (net.trunc(), Some(node.name.clone()))));
        let shared = cni.shared.iter().map(|net| (net.trunc(), None));
        let named: BTreeMap<IpNet, Option<NodeName>> = shared.chain(by_cni).chain(by_node).collect();
        let lengths = named.keys().map(IpNet::prefix_len).collect();
        Self { named, lengths }
    }

    fn with(&self, address: IpAddr) -> impl Iterator<Item = &Option<NodeName>> {
        let net = move |len: &u8| Some(IpNet::new(address, *len).ok()?.trunc());
        self.lengths.iter().rev().filter_map(net).filter_map(|net| self.named.get(&net))
    }

    /// Returns the node whose pods have addresses like this one.
    pub fn holder(&self, address: IpAddr) -> Option<&NodeName> {
        self.with(address).find_map(Option::as_ref)
    }

    /// Returns whether they contain an address.
    pub fn have(&self, address: IpAddr) -> bool {
        self.with(address).next().is_some()
    }

    /// Returns whether they contain all addresses of a pod, whichever node it is on.
    pub fn have_all(&self, pod: &Endpoint) -> bool {
        pod.ips.iter().all(|ip| self.have(*ip))
    }
}

/// Returns, by node, the networks that have exactly the addresses of its pods that no object names, and the networks that a CNI names for
/// it: as few as possible, in order.
pub fn pod_networks(snapshot: &Snapshot) -> BTreeMap<NodeName, Vec<IpNet>> {
    let cidrs = PodCidrs::of(snapshot);
    let mut networks: BTreeMap<NodeName, Vec<IpNet>> = BTreeMap::new();
    for (name, named) in &snapshot.cni_networks.nodes {
        let told = |net: &IpNet| snapshot.nodes.get(name).is_some_and(|n| n.pod_cidrs.iter().any(|c| c.contains(net)));
        networks.entry(name.clone()).or_default().extend(named.iter().filter(|net| !told(net)));
    }
    for pod in snapshot.endpoints.values() {
        for ip in pod.ips.iter().filter(|ip| !cidrs.have(**ip)) {
            networks.entry(pod.node.clone()).or_default().push(IpNet::from(*ip));
        }
    }
    networks.retain(|_, networks| !networks.is_empty());
    for networks in networks.values_mut() {
        *networks = fewest(networks);
    }
    networks
}

/// Returns the networks that a CNI names for pods of any node, as few as possible, in order.
pub fn shared_networks(snapshot: &Snapshot) -> Vec<IpNet> {
    fewest(&snapshot.cni_networks.shared.iter().copied().collect())
}

/// Returns the fewest networks with exactly these addresses.
fn fewest(networks: &Vec<IpNet>) -> Vec<IpNet> {
    let mut fewest = IpNet::aggregate(networks);
    fewest.sort_by_key(IpNet::network);
    fewest
}

#[cfg(test)]
#[path = "pods_tests.rs"]
mod tests;
