//! Addresses of pods that no Node names: with the address management of some CNIs and clouds `podCIDRs` say nothing, or something else.

use crate::model::{Endpoint, Node, NodeName, Snapshot};
use ipnet::IpNet;
use std::{collections::BTreeMap, net::IpAddr};

/// The `podCIDRs` of all nodes: disjoint, in order.
pub struct PodCidrs(Vec<IpNet>);

impl PodCidrs {
    /// Those of these nodes.
    pub fn of<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> Self {
        let all = nodes.into_iter().flat_map(|node| node.pod_cidrs.iter().map(IpNet::trunc)).collect();
        let mut networks = IpNet::aggregate(&all);
        networks.sort_by_key(IpNet::network);
        Self(networks)
    }

    fn contain(&self, ip: IpAddr) -> bool {
        let after = self.0.partition_point(|net| net.network() <= ip);
        after > 0 && self.0[after - 1].contains(&ip)
    }

    /// Whether they have all addresses of a pod, whichever node it is on.
    pub fn have(&self, pod: &Endpoint) -> bool {
        pod.ips.iter().all(|ip| self.contain(*ip))
    }
}

/// By node: the networks that have exactly the addresses of its pods that no Node's `podCIDRs` has, as few as possible, in order.
pub fn pod_networks(snapshot: &Snapshot) -> BTreeMap<NodeName, Vec<IpNet>> {
    let cidrs = PodCidrs::of(snapshot.nodes.values());
    let mut networks: BTreeMap<NodeName, Vec<IpNet>> = BTreeMap::new();
    for pod in snapshot.endpoints.values() {
        for ip in pod.ips.iter().filter(|ip| !cidrs.contain(**ip)) {
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
