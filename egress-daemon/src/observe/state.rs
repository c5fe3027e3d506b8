//! The state that a running agent reports on its socket, in addition to the maps. The agent fills it in, and `egressctl` shows it.
//!
//! Every list is sorted, field names on the wire are camelCase, and a reader ignores unknown fields.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, net::IpAddr};

/// Everything that the agent reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AgentState {
    /// The node and the state of its agent.
    pub node: NodeState,
    /// Policies that the agent knows, sorted by name, including those that select no pod here.
    pub policies: Vec<PolicyState>,
    /// Gateways that this node uses, sorted by name.
    pub gateways: Vec<GatewayState>,
    /// Egress IPs that this node uses or owns, sorted by address.
    pub egress_ips: Vec<EgressIpState>,
    /// The number of ports that flows of this node use towards the busiest destination, by egress IP, as last counted.
    pub ports_used: BTreeMap<IpAddr, u32>,
    /// The port blocks of each egress IP that this node uses or carries.
    pub blocks: BTreeMap<IpAddr, BlockCounts>,
    /// The number of this node's flows by the number of their account, as last counted.
    pub account_flows: BTreeMap<u32, u64>,
    /// The number of pairs of a policy and a namespace, with or without an egress IP, that have no account.
    pub without_account: usize,
    /// The durations of takeovers of dead gateways' egress IPs.
    pub takeovers: TakeOverLengths,
    /// The networks that may be the cluster's although no object names them, each with a remedy. No policy applies to destinations in them.
    pub unnamed_networks: BTreeMap<String, String>,
    /// The conditions of the node as a whole.
    pub conditions: Vec<ConditionState>,
    /// The problems: broken objects, limits that were reached, settings that the host refused.
    pub problems: Vec<ProblemState>,
}

/// The port blocks of an egress IP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BlockCounts {
    /// The blocks leased to this node.
    pub leased: usize,
    /// The leased blocks that flows use, as last counted.
    pub used: usize,
    /// The blocks leased to no node; only the owner reports them.
    pub free: Option<usize>,
}

/// The durations of takeovers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TakeOverLengths {
    /// The number of takeovers in each range with the upper bounds [`egress_core::agent::takeovers::BOUNDS_MS`], and above all of them.
    pub counts: Vec<u64>,
    /// The sum of their durations, in milliseconds.
    pub sum_millis: u64,
}

/// The node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeState {
    /// Its name.
    pub name: String,
    /// The agent's version.
    pub version: String,
    /// The agent's process ID.
    pub pid: u32,
    /// The time since the agent's start.
    pub uptime_seconds: u64,
    /// The source of the objects: for example `directory /etc/spillway`.
    pub store: String,
    /// Whether the store answers now.
    pub store_connected: bool,
    /// The setting for the transport.
    pub transport: String,
    /// The firewall mode in force.
    pub firewall: String,
    /// How programs are attached: `tcx` or `clsact`.
    pub attach: String,
    /// The foreign program that may deliver packets to a pod past ours, and its location. While there is one, a selected pod's SYN+ACK
    /// counts as an answer to a packet that this program delivered.
    pub bypass: Option<String>,
    /// The setting for drivers: `Auto`, `Native` or `Off`.
    pub xdp: String,
    /// For each interface at which a gateway's packets arrive, why they are not forwarded at the driver; null if they are.
    pub drivers: BTreeMap<String, Option<String>>,
    /// The addresses to which other nodes send tunnelled packets.
    pub tunnel_addresses: Vec<IpAddr>,
    /// Whether a gateway holds its Lease; absent for a node that is not a gateway.
    pub lease_held: Option<bool>,
    /// The highest programmed revision of the node's own port blocks.
    pub lease_revision: u64,
}

/// A policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyState {
    /// Its name: `web`, `cegp/web`.
    pub name: String,
    /// `PerFlow` or `PerEndpoint`.
    pub distribution: String,
    /// Its egress IPs in the order of its slots.
    pub egress_ips: Vec<IpAddr>,
    /// The endpoints of this node that it selects, as `namespace/name`, sorted.
    pub endpoints: Vec<String>,
    /// Its conditions.
    pub conditions: Vec<ConditionState>,
}

/// The result of probing a gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbeResult {
    /// There is no result yet; new flows may use the gateway.
    #[default]
    Unknown,
    /// The gateway answers.
    Alive,
    /// The gateway does not answer; new flows avoid it.
    Dead,
    /// The gateway answers, but is not able to carry egress IPs. Packets avoid it if there is another gateway.
    Unable,
}

/// A gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GatewayState {
    /// Its name.
    pub name: String,
    /// The address at which it is probed.
    pub address: Option<IpAddr>,
    /// The result of probes. This node itself counts as alive.
    pub probe: ProbeResult,
    /// The last round-trip time, in microseconds.
    pub rtt_micros: Option<u64>,
    /// The transport to it.
    pub transport: String,
    /// Its reply transport; empty if it is not known.
    pub replies: String,
    /// Why no better transport is in use; empty if the best one is.
    pub why: String,
}

/// An egress IP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressIpState {
    /// The address.
    pub address: IpAddr,
    /// The pool that it comes from; absent for an egress IP that a policy names.
    #[serde(default)]
    pub pool: Option<String>,
    /// Its owner.
    #[serde(default)]
    pub owner: Option<String>,
    /// The preferred node to which it returns, unless that is the owner.
    #[serde(default)]
    pub preferred: Option<String>,
    /// The owner's epoch.
    #[serde(default)]
    pub epoch: u64,
    /// Whether it is a node's own address.
    #[serde(default)]
    pub fixed: bool,
    /// Its conditions.
    #[serde(default)]
    pub conditions: Vec<ConditionState>,
}

/// A condition, as in Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConditionState {
    /// The condition's type.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The reason, in one word.
    pub reason: String,
    /// The message, in a sentence.
    pub message: String,
}

/// A problem and its remedy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProblemState {
    /// The object, file, interface or setting.
    pub object: String,
    /// The faulty field, if there is one.
    pub field: Option<String>,
    /// The problem.
    pub message: String,
    /// The remedy.
    pub remedy: String,
}
