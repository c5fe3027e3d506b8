//! Decides which reports of nodes about themselves are believed. Pure.
//!
//! A node's agent writes its EgressNode's status, and so can an attacker who controls that node. So the controller and
//! other nodes act on a report only if it can harm no node but that one, or if the API server's Node object agrees:
//!
//! - a tunnel address is one of the Node's addresses, and not an address of another live node;
//! - an address of an interface belongs to no other node, and to no pod of another node. Addresses that the Node object lacks may serve as
//!   egress IPs of that node, by policies that choose it, and are not an exception for other nodes (`plan::claims`, `agent::view`);
//! - a revision of leases is one that can have been assigned.
//!
//! Demand, carried egress IPs and occupied blocks affect only what the controller leases or assigns to the node.

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

/// The highest revision that nodes may report: a higher one would leave none for later leases. Real revisions count grants.
pub const MAX_REVISION: u64 = 1 << 62;

/// Removes the reports that are not believed from the nodes, and returns them as problems.
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

/// Returns the holder of each node address. If two Node objects have an address, the live node holds it: leftovers of another
/// node, which was deleted or is dead, must not keep it from its successor. Among several live nodes, the oldest one holds it.
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
            remedy: "it counts as that node's; delete the Node object of a machine that is gone, or give one node another address"
                .to_owned(),
        });
        if let Some(node) = snapshot.nodes.get_mut(&name) {
            node.addresses.remove(&address);
        }
    }
    holders
}

/// The rank of a Node object among those that claim an address, of which the smallest wins: whether
/// the kubelet has been silent lately, and when the object was created.
type Rank = (bool, Option<Timestamp>);

fn rank(object: &KubeNode) -> Rank {
    let mut conditions = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let heard = conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True");
    (!heard, object.metadata.creation_timestamp.as_ref().map(|time| time.0))
}
