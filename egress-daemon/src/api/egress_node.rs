//! EgressNode: what the controller gives to a node (port blocks, assignments) and what the node's agent reports back.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat their attribute's keys")]

use super::schema;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// What the controller gives to a node.
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

    /// Port blocks that the node held and that nobody may use yet, because packets of its flows may still be in flight.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<LeasedBlocks>,

    /// Which of the node's pods use which egress IP, for policies with distribution PerEndpoint, sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assignments: Vec<Assignment>,

    /// Networks of the node's pods that are in no Node's podCIDRs, sorted: those that its CNI names (CiliumNode), and single addresses
    /// of pods that no object covers. No policy touches traffic to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pod_networks: Vec<String>,

    /// Networks of pods of any node that a CNI names (Calico's and Antrea's IPPool, CiliumPodIPPool, Kube-OVN's Subnet), sorted; in the
    /// object of one node, for all of them. No policy touches traffic to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cluster_networks: Vec<String>,
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

    /// How many blocks: 1 to 1008.
    #[schemars(with = "i32", range(min = 1, max = 1008))]
    pub count: u16,

    /// The revision at which they were leased. The node uses them with gateways whose answers to its probes confirm its leases up to
    /// this revision.
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

/// What the node's agent reports.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressNodeStatus {
    /// The addresses at which the node receives tunnelled packets; the first one is preferred.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tunnel_addresses: Vec<String>,

    /// The addresses of the node's interfaces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<NodeAddress>,

    /// The node's setting for how packets travel between nodes: Auto, device, vxlan or direct.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub transport: Option<String>,

    /// The transports by which the node accepts packets: device, vxlan, direct.
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

    /// The revision up to which the node's own leases are in its tables. What it gives back refers to leases up to it.
    #[serde(default)]
    #[schemars(with = "i64", range(min = 0))]
    pub own_lease_revision: u64,

    /// The egress IPs that the node's tables carry, sorted by address: other nodes may use it for them from then on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carries: Vec<CarriedIP>,

    /// What the node wants beyond what it has, and what it gives back, one entry for each egress IP, sorted by address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub demand: Vec<Demand>,

    /// Port blocks in which the node's own sockets listen; they are not leased for the node's own addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::blocks")]
    pub occupied_blocks: Vec<u16>,

    /// What the node cannot do for policies, sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<Trouble>,

    /// The policies that the node's datapath carries out for its pods, sorted. Absent if the agent does not report them; then nobody waits
    /// for it.
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

    /// Its metadata.uid, which tells it from one of the same name before it.
    pub uid: String,

    /// The metadata.generation that the datapath has.
    #[schemars(range(min = 0))]
    pub generation: i64,
}

/// Something that the node cannot do for a policy.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trouble {
    /// The policy: its name, with the prefix cegp/ for a CiliumEgressGatewayPolicy and egress/ for Antrea's Egress.
    pub policy: String,

    /// The pod that it is about, as namespace/name/uid; absent where it is about the policy as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub pod: Option<String>,

    /// What it is, in one word: DoesNotFit, PodWithoutInterface or PodNotStarted.
    pub reason: String,

    /// What it is, and what to do about it.
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

    /// How many blocks the node wants in all; more than it has when it runs low.
    #[serde(default)]
    #[schemars(with = "i32", range(min = 0, max = 1008))]
    pub want_blocks: u16,

    /// Numbers of blocks that the node holds, that no flow of it uses, and that it will not use again; sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::blocks")]
    pub release: Vec<u16>,
}
