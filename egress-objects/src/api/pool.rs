//! EgressIPPool: addresses from which policies take egress IPs, and the nodes that may carry them.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat their attribute's keys")]

use super::schema;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The addresses of a pool, the nodes that may carry them, and how they move.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "spillway.io",
    version = "v1beta1",
    kind = "EgressIPPool",
    plural = "egressippools",
    singular = "egressippool",
    shortname = "eipp",
    category = "spillway",
    status = "EgressIPPoolStatus",
    derive = "PartialEq",
    cel,
    doc = "EgressIPPool holds addresses that policies take their egress IPs from. Each is carried by one of the \
           selected nodes and moves to another one when that node fails.",
    printcolumn(name = "Total", type_ = "integer", json_path = ".status.usage.total"),
    printcolumn(name = "Used", type_ = "integer", json_path = ".status.usage.used"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.ipRanges.size() > 0")
    .message("a pool without ranges has no address: write at least one, such as {cidr: 192.0.2.0/28} or \
              {start: 192.0.2.32, end: 192.0.2.40}")
    .field_path(".ipRanges"),
    validation = Rule::new("!(has(self.announce) && self.announce == 'Route' && has(self.outbound) && self.outbound == 'Owner')")
    .message("with announce: Route every carrier attracts connections, so one of them cannot send all packets: remove \
              outbound, or write outbound: Spread")
    .field_path(".outbound"),
    validation = Rule::new("!(has(self.quotas) && self.quotas.size() > 0) || has(self.allowedNamespaces)")
    .message("quotas are for the namespaces that may use the pool: write allowedNamespaces, too, such as {matchLabels: {egress: \
              allowed}}, or {} for all")
    .field_path(".quotas"))]
pub struct EgressIPPoolSpec {
    /// The addresses of the pool. The first address of a CIDR is never assigned, nor is the last
    /// one of an IPv4 CIDR; of a range from start to end, all are.
    #[schemars(length(max = 256))]
    pub ip_ranges: Vec<IPRange>,

    /// The nodes that may carry the addresses. Empty selects every node.
    #[schemars(schema_with = "schema::label_selector")]
    pub node_selector: LabelSelector,

    /// The subnet of the addresses, if it differs from that of the node's default route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "SubnetInfo")]
    pub subnet_info: Option<SubnetInfo>,

    /// The number of addresses of this pool that one node may carry: 1 to 255. The node annotation spillway.io/max-egress-ips overrides it.
    #[serde(default, rename = "maxEgressIPsPerNode", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i32", range(min = 1, max = 255))]
    pub max_egress_ips_per_node: Option<i32>,

    /// Whether an address returns to its preferred node after that node has recovered.
    #[serde(default)]
    pub failback: Failback,

    /// How the outside reaches the addresses. ARP: one gateway answers ARP and NDP for each address. Route: every node that
    /// the pool selects keeps a route to each address in table 83, with protocol number 83, which a BGP speaker on the node
    /// exports; outbound is then Spread, and all gateways are carriers. None: another system sends their packets to a node.
    #[serde(default)]
    pub announce: Announce,

    /// The number of gateways that carry each address: 1 to 64. One of them answers for it; the others take over when it fails.
    #[serde(default = "carriers")]
    #[schemars(range(min = 1, max = 64))]
    pub carriers: i32,

    /// Owner (default) sends all packets through the gateway that answers for their address; Spread sends each connection
    /// through one of the carriers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Outbound")]
    pub outbound: Option<Outbound>,

    /// The namespaces whose EgressPolicies may use the pool; empty selects all. If absent, only cluster-scoped policies may use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub allowed_namespaces: Option<LabelSelector>,

    /// The number of addresses of the pool that the EgressPolicies of one namespace may have together.
    /// If several quotas select a namespace, the lowest applies; without a quota there is no limit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub quotas: Vec<Quota>,

    /// The number of source ports that are leased to a node at a time.
    #[serde(default = "port_block_size")]
    #[schemars(range(min = 64, max = 64))]
    pub port_block_size: i32,
}

/// How the outside reaches an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Announce {
    /// One gateway answers ARP and NDP for it.
    #[default]
    #[serde(rename = "ARP")]
    Arp,
    /// Every carrier has a route to it, which a BGP speaker exports.
    Route,
    /// Another system sends its packets to a node.
    None,
}

/// The gateways through which packets with an address leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Outbound {
    /// The gateway that answers for the address.
    #[default]
    Owner,
    /// All carriers, each connection through one of them.
    Spread,
}

/// The number of addresses of a pool that the EgressPolicies of one namespace may have.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quota {
    /// The namespaces to which the quota applies, each separately. Empty selects all.
    #[schemars(schema_with = "schema::label_selector")]
    pub namespace_selector: LabelSelector,

    /// The number of addresses, of both families together: 0 to 1024.
    #[serde(rename = "maxEgressIPs")]
    #[schemars(range(min = 0, max = 1024))]
    pub max_egress_ips: i32,
}

/// Consecutive addresses: a CIDR, or a first and a last address.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.cidr) ? !has(self.start) && !has(self.end) : has(self.start) && has(self.end)")
        .message("a range is either a cidr, or a start and an end: write {cidr: 192.0.2.0/28} or \
                  {start: 192.0.2.32, end: 192.0.2.40}"),
    validation = Rule::new(
        "!(has(self.start) && has(self.end) && isIP(self.start) && isIP(self.end)) || \
         ip(self.start).family() == ip(self.end).family()")
        .message("start and end are of different families: write two IPv4 or two IPv6 addresses"),
    // CEL cannot compare IPv6 addresses: `translate::pool` refuses a pool with such a range.
    validation = Rule::new(
        "!(has(self.start) && has(self.end) && isIP(self.start) && isIP(self.end)) || ip(self.start).family() != 4 || \
         ip(self.end).family() != 4 || \
         int(self.start.split('.')[0]) * 16777216 + int(self.start.split('.')[1]) * 65536 + \
         int(self.start.split('.')[2]) * 256 + int(self.start.split('.')[3]) <= \
         int(self.end.split('.')[0]) * 16777216 + int(self.end.split('.')[1]) * 65536 + \
         int(self.end.split('.')[2]) * 256 + int(self.end.split('.')[3])")
        .message("end lies before start: write the first and the last address")
)]
pub struct IPRange {
    /// A network; its first address (and its last one with IPv4) is not assigned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::cidr")]
    pub cidr: Option<String>,

    /// The first address of a range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::ip")]
    pub start: Option<String>,

    /// The last address of a range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::ip")]
    pub end: Option<String>,
}

/// The subnet that the addresses of a pool belong to.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "!isIP(self.gateway) || self.prefixLength <= (ip(self.gateway).family() == 4 ? 32 : 128)")
    .message("prefixLength is longer than an address of the gateway's family: write at most 32 for IPv4 and 128 for IPv6"))]
pub struct SubnetInfo {
    /// The next hop for packets that leave with an address of the pool.
    #[schemars(schema_with = "schema::ip")]
    pub gateway: String,

    /// The length of the subnet's prefix.
    #[schemars(range(min = 1, max = 128))]
    pub prefix_length: i32,

    /// The VLAN through which the subnet is reached: 1 to 4094; 0 or absent for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i32", range(min = 0, max = 4094))]
    pub vlan: Option<i32>,
}

/// What happens when the preferred node of an address has recovered.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failback {
    /// Preferred moves the address back, Never leaves it where it is.
    #[serde(default)]
    pub mode: FailbackMode,

    /// How long the preferred node must be healthy before the address moves back.
    #[serde(default = "failback_delay")]
    #[schemars(schema_with = "schema::duration")]
    pub delay: String,
}

impl Default for Failback {
    fn default() -> Self {
        Failback { mode: FailbackMode::default(), delay: failback_delay() }
    }
}

/// Whether addresses return to their preferred node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FailbackMode {
    /// They return after the delay.
    #[default]
    Preferred,
    /// They stay where they are.
    Never,
}

/// How much of a pool is in use.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressIPPoolStatus {
    /// The generation of the pool from which this status was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i64", range(min = 0))]
    pub observed_generation: Option<i64>,

    /// The number of addresses, and the number in use.
    #[serde(default)]
    pub usage: PoolUsage,

    /// Ready, Draining (addresses that are no longer in the ranges are in use) and others, each with a reason and a message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// Counts of addresses.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolUsage {
    /// Addresses that can be assigned.
    #[serde(default)]
    #[schemars(with = "i64", range(min = 0))]
    pub total: u64,

    /// Addresses of the ranges that are in use.
    #[serde(default)]
    #[schemars(with = "i64", range(min = 0))]
    pub used: u64,
}

fn carriers() -> i32 {
    4
}

fn port_block_size() -> i32 {
    64
}

fn failback_delay() -> String {
    "10s".to_owned()
}
