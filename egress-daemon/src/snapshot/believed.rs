//! What is believed of what nodes say of themselves. Pure.
//!
//! A node's agent writes its EgressNode's status, and so does whoever has taken that node over. So another node or the controller
//! acts on it only where it can harm nobody but that node, or where the API server's Node object agrees:
//!
//! - a tunnel address is one of the Node's addresses, and of no other node that lives;
//! - an address of an interface is nobody else's: no other node's and no pod's of another node. Those that the Node object does not have
//!   may serve as egress IPs of that very node, by policies that choose it, and are an exception for nobody else (`plan::claims`,
//!   `agent::view`);
//! - a revision of leases is one that can have been given out.
//!
//! Demand, carried egress IPs and occupied blocks concern what is leased to the node, or assigned to it, by the controller.

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

/// What nodes may say of revisions: higher ones would leave none for later leases. Real ones count grants.
pub const MAX_REVISION: u64 = 1 << 62;

/// Takes out of the nodes what is not believed, and says what that was.
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
        "it is not believed; if the node has it, let its Node object say so (status.addresses); if not, find out who \
                  wrote this"
            .to_owned();
    Problem { kind, name, field, message, remedy }
}

/// Who has each address of a node. Where two Node objects have one, the node that lives has it: what is left of another one, which was
/// deleted or is dead, must not keep it from its successor. Among several that live it is the one that was there first.
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
            remedy: "it counts as that one's; delete the Node of a machine that is gone, or give one of both another address"
                .to_owned(),
        });
        if let Some(node) = snapshot.nodes.get_mut(&name) {
            node.addresses.remove(&address);
        }
    }
    holders
}

/// Smaller is more likely to have what several Node objects claim: whether the kubelet has not been heard lately, and since when
/// the object is there.
type Rank = (bool, Option<Timestamp>);

fn rank(object: &KubeNode) -> Rank {
    let mut conditions = object.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let heard = conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True");
    (!heard, object.metadata.creation_timestamp.as_ref().map(|time| time.0))
}
