//! Which reports of nodes about themselves are believed. Pure.
//!
//! A node's agent writes its EgressNode's status, and so can an attacker who controls that node. So another node or the
//! controller acts on it only if it can harm nobody but that node, or if the API server's Node object agrees:
//!
//! - a tunnel address is one of the Node's addresses, and of no other live node;
//! - an address of an interface belongs to no other node, and to no pod of another node. Those that the Node object does not have may
//!   serve as egress IPs of that node, by policies that choose it, and are no exception for others (`plan::claims`, `agent::view`);
//! - a revision of leases is one that can have been assigned.
//!
//! Demand, carried egress IPs and occupied blocks concern only what the controller leases or assigns to the node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node as KubeNode;
use k8s_openapi::jiff::Timestamp;

use crate::translate::Problem;
use egress_core::{
    model::{NodeName, Snapshot},
    network::pods::PodCidrs,
};

/// The highest revision that nodes may report: higher ones would leave none for later leases. Real ones count grants.
pub const MAX_REVISION: u64 = 1 << 62;

/// Removes from the nodes what is not believed, and returns what that was.
pub(super) fn believed(objects: &[Arc<KubeNode>], snapshot: &mut Snapshot) -> Vec<Problem> {
    let mut problems = Vec::new();
    let holders = holders(objects, snapshot, &mut problems);
    let networks = PodCidrs::of(snapshot);
    let mut unproven: BTreeSet<IpAddr> = BTreeSet::new();
    for node in snapshot.nodes.values_mut() {
        let Some(report) = &mut node.report else { continue };
        let name = &node.name;
        report.tunnel_addresses.retain(|address| {
            let agreed = node.addresses.contains(address);
            if !agreed {
                let message = format!("{address} is not an address of Node {name}");
                problems.push(problem(name, "status.tunnelAddresses", message));
            }
            agreed
        });
        report.addresses.retain(|claimed| {
            let address = claimed.net.addr();
            let other = holders.get(&address).or_else(|| networks.holder(address)).filter(|other| *other != name);
            match other {
                Some(other) => {
                    problems.push(problem(name, "status.addresses", format!("{address} belongs to node {other}")))
                }
                None if node.addresses.contains(&address) => {}
                None => drop(unproven.insert(address)),
            }
            other.is_none()
        });
        report.own_lease_revision = report.own_lease_revision.min(MAX_REVISION);
    }
    let pods = snapshot.endpoints.values().flat_map(|e| e.ips.iter().map(move |ip| (*ip, e)));
    for (address, pod) in pods.filter(|(ip, _)| unproven.contains(ip)) {
        for node in snapshot.nodes.values_mut().filter(|node| node.name != pod.node) {
            let Some(report) = &mut node.report else { continue };
            let before = report.addresses.len();
            report.addresses.retain(|claimed| claimed.net.addr() != address);
            if report.addresses.len() < before {
                let message = format!("{address} belongs to pod {}/{}", pod.id.namespace, pod.id.name);
                problems.push(problem(&node.name, "status.addresses", message));
            }
        }
    }
    problems
}

fn problem(node: &NodeName, field: &str, message: String) -> Problem {
    let (kind, name, field) = ("EgressNode", node.to_string(), field.to_owned());
    let remedy =
        "it is ignored; if the node has it, add it to its Node object (status.addresses); if not, find out who \
                  wrote this"
            .to_owned();
    Problem { kind, name, field, message, remedy }
}

/// Who has each address of a node. If two Node objects have one, the live node has it: leftovers of another one, which was deleted or
/// is dead, must not keep it from its successor. Among several live ones it is the oldest.
fn holders(
    objects: &[Arc<KubeNode>],
    snapshot: &mut Snapshot,
    problems: &mut Vec<Problem>,
) -> BTreeMap<IpAddr, NodeName> {
    let ranks: BTreeMap<&str, Rank> =
        objects.iter().map(|object| (object.metadata.name.as_deref().unwrap_or_default(), rank(object))).collect();
    let rank = |node: &NodeName| (ranks.get(node.as_str()), node.clone());
    let mut holders: BTreeMap<IpAddr, NodeName> = BTreeMap::new();
    let mut lost: Vec<(NodeName, IpAddr)> = Vec::new();
    for node in snapshot.nodes.values() {
        for address in &node.addresses {
            match holders.get_mut(address) {
                None => drop(holders.insert(*address, node.name.clone())),
                Some(holder) if rank(&node.name) < rank(holder) => {
                    lost.push((std::mem::replace(holder, node.name.clone()), *address));
                }
                Some(_) => lost.push((node.name.clone(), *address)),
            }
        }
    }
    for (name, address) in lost {
        let holder = &holders[&address];
        problems.push(Problem {
            kind: "Node",
            name: name.to_string(),
            field: "status.addresses".to_owned(),
            message: format!("{address} is the address of node {holder} as well"),
            remedy: "it counts as that one's; delete the Node of a machine that is gone, or give one of them another address"
                .to_owned(),
        });
        if let Some(node) = snapshot.nodes.get_mut(&name) {
            node.addresses.remove(&address);
        }
    }
    holders
}

/// The smallest wins what several Node objects claim: whether the kubelet has been silent lately, and when the object was
/// created.
type Rank = (bool, Option<Timestamp>);

fn rank(object: &KubeNode) -> Rank {
    let mut conditions = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let heard = conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True");
    (!heard, object.metadata.creation_timestamp.as_ref().map(|time| time.0))
}
