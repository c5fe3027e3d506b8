//! Addresses of pods that no Node names: with the address management of some CNIs and clouds `podCIDRs` say nothing, or something else.

use crate::model::{Endpoint, NodeName, Snapshot};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// The `podCIDRs` of nodes.
pub struct PodCidrs {
    nodes: BTreeMap<IpNet, NodeName>,
    /// The lengths of prefixes that occur: few, so that an address is looked up by each.
    lengths: BTreeSet<u8>,
}

impl PodCidrs {
    /// Those of all nodes.
    pub fn of(snapshot: &Snapshot) -> Self {
        let nodes = snapshot.nodes.values();
        let nodes: BTreeMap<IpNet, NodeName> =
            nodes.flat_map(|node| node.pod_cidrs.iter().map(|net| (net.trunc(), node.name.clone()))).collect();
        let lengths = nodes.keys().map(IpNet::prefix_len).collect();
        Self { nodes, lengths }
    }

    /// The node whose pods have addresses like this one.
    pub fn holder(&self, address: IpAddr) -> Option<&NodeName> {
        let net = |len: &u8| Some(IpNet::new(address, *len).ok()?.trunc());
        self.lengths.iter().rev().filter_map(net).find_map(|net| self.nodes.get(&net))
    }

    /// Whether they have all addresses of a pod, whichever node it is on.
    pub fn have(&self, pod: &Endpoint) -> bool {
        pod.ips.iter().all(|ip| self.holder(*ip).is_some())
    }
}

/// By node: the networks that have exactly the addresses of its pods that no Node's `podCIDRs` has, as few as possible, in order.
pub fn pod_networks(snapshot: &Snapshot) -> BTreeMap<NodeName, Vec<IpNet>> {
    let cidrs = PodCidrs::of(snapshot);
    let mut networks: BTreeMap<NodeName, Vec<IpNet>> = BTreeMap::new();
    for pod in snapshot.endpoints.values() {
        for ip in pod.ips.iter().filter(|ip| cidrs.holder(**ip).is_none()) {
            networks.entry(pod.node.clone()).or_default().push(IpNet::from(*ip));
        }
    }
    for networks in networks.values_mut() {
        *networks = IpNet::aggregate(networks);
        networks.sort_by_key(IpNet::network);
    }
    networks
}

#[cfg(test)]
#[path = "pods_tests.rs"]
mod tests;
