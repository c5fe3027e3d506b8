//! EgressNode: what the controller assigns to a node (port blocks, egress IPs of pods) and what the node's agent reports.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat their attribute's keys")]

use super::{EVERY_NODE, FOLLOWED_BY_LABEL, LABEL_VALUE, schema};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// What the controller assigns to a node.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "spillway.io",
    version = "v1alpha1",
    kind = "EgressNode",
    plural = "egressnodes",
    singular = "egressnode",
    shortname = "egn",
    category = "spillway",
    status = "EgressNodeStatus",
    derive = "PartialEq",
    cel,
    doc = "EgressNode is Spillway's view of a node. The controller writes the spec (leased port blocks, assignments), \
           the node's agent writes the status.",
    printcolumn(name = "Tunnel", type_ = "string", json_path = ".status.tunnelAddresses[0]"),
    printcolumn(name = "Transport", type_ = "string", json_path = ".status.transport"),
    printcolumn(name = "Firewall", type_ = "string", json_path = ".status.firewall"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct EgressNodeSpec {
    /// The port blocks that are leased to the node, one entry for each egress IP, sorted by address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<LeasedBlocks>,

    /// Port blocks that the node held and that no node may use yet, because packets of its flows may still be in flight.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<LeasedBlocks>,

    /// The egress IPs that the node's pods use, for policies with distribution PerEndpoint, sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assignments: Vec<Assignment>,

    /// Networks of the node's pods that are in no Node's podCIDRs, sorted: networks that its CNI names
    /// (CiliumNode), and single addresses of pods that no object covers. No policy applies to traffic to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod_networks: Vec<String>,

    /// Networks of pods of any node that a CNI names (Calico's and Antrea's IPPool, CiliumPodIPPool, Kube-OVN's
    /// Subnet), sorted. One node's object lists them for all nodes. No policy applies to traffic to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cluster_networks: Vec<String>,
}

impl EgressNode {
    /// Returns the node whose agent follows the object, or [`EVERY_NODE`], if a controller has set it.
    pub fn followed_by(&self) -> Option<&str> {
        self.metadata.labels.as_ref()?.get(FOLLOWED_BY_LABEL).map(String::as_str)
    }

    /// Sets which agents follow the object of a node: those of every node, or only the node's own.
    pub fn set_followed_by(&mut self, every_node: bool) {
        let own = self.metadata.name.as_deref().filter(|name| !every_node && name.len() <= LABEL_VALUE);
        let by = own.unwrap_or(EVERY_NODE).to_owned();
        self.metadata.labels.get_or_insert_default().insert(FOLLOWED_BY_LABEL.to_owned(), by);
    }

    /// Returns whether every agent follows this version of the object, but not `current`, the existing version.
    pub fn is_shown(&self, current: Option<&Self>) -> bool {
        let is_public = |object: &Self| object.followed_by() == Some(EVERY_NODE);
        is_public(self) && !current.is_some_and(is_public)
    }

    /// Returns whether the agent of the node with this object must follow all EgressNodes. An
    /// object without the label was written by a controller of an earlier version.
    pub fn follows_all(&self) -> bool {
        self.followed_by().is_none_or(|by| by == EVERY_NODE)
    }

    /// Returns whether the agent of a node follows the object even if it need not follow all: whether [`Self::followed_from`] selects it.
    pub fn is_followed_from(&self, node: &str) -> bool {
        self.followed_by().is_some_and(|by| by == EVERY_NODE || by == node)
    }

    /// Returns the label selector of the EgressNodes that the agent of a node follows unless it must follow all.
    pub fn followed_from(node: &str) -> String {
        let own = Some(node).filter(|node| node.len() <= LABEL_VALUE);
        let values: Vec<&str> = std::iter::once(EVERY_NODE).chain(own).collect();
        format!("{FOLLOWED_BY_LABEL} in ({})", values.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the object of a node that is no gateway.
    fn of_node(name: &str) -> EgressNode {
        let mut object = EgressNode::new(name, EgressNodeSpec::default());
        object.set_followed_by(false);
        object
    }

    #[test]
    fn an_agent_follows_its_own_object_and_those_for_every_node() {
        let joined = of_node("w1");
        assert_eq!((joined.followed_by(), joined.follows_all()), (Some("w1"), false));
        assert_eq!(EgressNode::followed_from("w1"), "spillway.io/followed-by in (every-node,w1)");
        assert!(EgressNode::new("w1", EgressNodeSpec::default()).follows_all(), "an earlier version's");
    }

    #[test]
    fn object_with_name_too_long_for_a_label_is_followed_by_every_node() {
        let name = "w".repeat(LABEL_VALUE + 1);
        assert_eq!(of_node(&name).followed_by(), Some(EVERY_NODE));
        assert_eq!(EgressNode::followed_from(&name), "spillway.io/followed-by in (every-node)");
    }
}

/// Port blocks of one egress IP.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeasedBlocks {
    /// The address.
    #[serde(rename = "egressIP")]
    pub egress_ip: String,

    /// Consecutive blocks, sorted, without overlap.
    #[serde(default)]
    pub ranges: Vec<BlockRange>,
}

/// Consecutive port blocks that were leased together. Block b covers the ports 1024 + 64 b to 1024 + 64 b + 63.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockRange {
    /// The first block's number: 0 to 1007.
    #[schemars(with = "i32", range(min = 0, max = 1007))]
    pub first: u16,

    /// The number of blocks: 1 to 1008.
    #[schemars(with = "i32", range(min = 1, max = 1008))]
    pub count: u16,

    /// The revision at which the blocks were leased. The node uses them with gateways whose answers
    /// to its probes confirm its leases up to this revision.
    #[schemars(with = "i64", range(min = 0))]
    pub revision: u64,
}

/// Pods of the node that use an egress IP.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Assignment {
    /// The policy: its name, with the prefix cegp/ for a CiliumEgressGatewayPolicy and egress/ for Antrea's Egress.
    pub policy: String,

    /// The address.
    #[serde(rename = "egressIP")]
    pub egress_ip: String,

    /// The pods as namespace/name/uid, sorted.
    #[serde(default)]
    pub endpoints: Vec<String>,
}

/// The report of the node's agent.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressNodeStatus {
    /// The addresses at which the node receives tunnelled packets; the first one is preferred.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tunnel_addresses: Vec<String>,

    /// The addresses of the node's interfaces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<NodeAddress>,

    /// The node's setting for the transport of packets between nodes: Auto, device, vxlan or direct.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub transport: Option<String>,

    /// The transports over which the node accepts packets: device, vxlan, direct.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub receives: Vec<String>,

    /// The firewall mode in force: respect or bypass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub firewall: Option<String>,

    /// How the programs are attached: tcx or clsact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub attach: Option<String>,

    /// The revision up to which the node's tables hold its own leases. Blocks that the node gives back refer to leases up to it.
    #[serde(default)]
    #[schemars(with = "i64", range(min = 0))]
    pub own_lease_revision: u64,

    /// The egress IPs that the node's tables carry, sorted by address: from then on, other nodes may use this node for them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carries: Vec<CarriedIP>,

    /// Port blocks that the node wants or gives back, one entry for each egress IP, sorted by address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub demand: Vec<Demand>,

    /// Port blocks in which the node's own sockets listen; they are not leased from the node's own addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::blocks")]
    pub occupied_blocks: Vec<u16>,

    /// Problems that keep the node from carrying out policies, sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<Trouble>,

    /// The policies that the node's datapath carries out for its pods, sorted. Absent if the agent
    /// does not report them; then policies do not wait for the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<ProgrammedPolicy>")]
    pub programmed: Option<Vec<ProgrammedPolicy>>,

    /// Ready and others, each with a reason and a message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// A policy that a node's datapath carries out.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProgrammedPolicy {
    /// The policy: its name, with the prefix cegp/ for a CiliumEgressGatewayPolicy and egress/ for Antrea's Egress.
    pub policy: String,

    /// Its metadata.uid, which distinguishes it from an earlier policy of the same name.
    pub uid: String,

    /// The metadata.generation that the datapath carries out.
    #[schemars(range(min = 0))]
    pub generation: i64,
}

/// A problem that keeps the node from carrying out a policy.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trouble {
    /// The policy: its name, with the prefix cegp/ for a CiliumEgressGatewayPolicy and egress/ for Antrea's Egress.
    pub policy: String,

    /// The pod concerned, as namespace/name/uid; absent if the problem concerns the policy as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub pod: Option<String>,

    /// The kind of problem, in one word: DoesNotFit, PodWithoutInterface or PodNotStarted.
    pub reason: String,

    /// The problem, and what to do about it.
    pub message: String,
}

/// An egress IP that a gateway carries.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CarriedIP {
    /// The address.
    #[serde(rename = "egressIP")]
    pub egress_ip: String,
}

/// An address of one of the node's interfaces.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeAddress {
    /// The interface's name.
    pub interface: String,

    /// The address with its prefix length.
    pub cidr: String,

    /// Whether a default route of this family leaves through the interface.
    #[serde(default)]
    pub default_route: bool,

    /// The interface's Ethernet address, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub mac: Option<String>,
}

/// Port blocks of an egress IP that a node wants or gives back.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Demand {
    /// The address.
    #[serde(rename = "egressIP")]
    pub egress_ip: String,

    /// The number of blocks that the node wants in all; more than it has when it runs low.
    #[serde(default)]
    #[schemars(with = "i32", range(min = 0, max = 1008))]
    pub want_blocks: u16,

    /// Numbers of blocks that the node holds, that none of its flows uses, and that it will not use again; sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::blocks")]
    pub release: Vec<u16>,
}
