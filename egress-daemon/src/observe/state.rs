//! What a running agent reports on its socket: what is not in the maps. The agent fills it in, `egressctl` shows it.
//!
//! Every list is sorted, field names on the wire are camelCase, and a reader ignores fields that it does not know.

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
    /// The ports that flows of this node use towards the busiest destination, by egress IP, as last counted.
    pub ports_used: BTreeMap<IpAddr, u32>,
    /// The port blocks of each egress IP that this node uses or carries.
    pub blocks: BTreeMap<IpAddr, BlockCounts>,
    /// The flows of this node by the number of the account that their packets are counted under, as last counted.
    pub account_flows: BTreeMap<u32, u64>,
    /// How many pairs of a policy and a namespace, with an egress IP or without, have no account of their own.
    pub without_account: usize,
    /// How long it took to take over egress IPs of dead gateways.
    pub takeovers: TakeOverLengths,
    /// Networks that may be the cluster's although no object names them, each with a remedy: no policy applies to what is in them.
    pub unnamed_networks: BTreeMap<String, String>,
    /// The conditions of the node as a whole.
    pub conditions: Vec<ConditionState>,
    /// What is wrong: broken objects, limits that were reached, settings that the host refused.
    pub problems: Vec<ProblemState>,
}

/// The port blocks of an egress IP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BlockCounts {
    /// Leased to this node.
    pub leased: usize,
    /// Of these, those used by flows, as last counted.
    pub used: usize,
    /// Leased to nobody; known only to the owner.
    pub free: Option<usize>,
}

/// How long takeovers took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TakeOverLengths {
    /// How many were in each range, with the upper bounds [`egress_core::agent::takeovers::BOUNDS_MS`], and how many above
    /// them.
    pub counts: Vec<u64>,
    /// All of them together, in milliseconds.
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
    /// The agent's process.
    pub pid: u32,
    /// How long the agent has been running.
    pub uptime_seconds: u64,
    /// Where the objects come from: for example `directory /etc/spillway`.
    pub store: String,
    /// Whether the store answers now.
    pub store_connected: bool,
    /// The setting for the transport.
    pub transport: String,
    /// The firewall mode in force.
    pub firewall: String,
    /// How programs are attached: `tcx` or `clsact`.
    pub attach: String,
    /// The foreign program that may bring packets into a pod past ours, and where it is: while there is one, a selected pod's SYN+ACK
    /// is taken for an answer to a packet that it brought in.
    pub bypass: Option<String>,
    /// The setting for drivers: `Auto`, `Native` or `Off`.
    pub xdp: String,
    /// For a gateway, the interfaces at which its packets arrive: why they are not forwarded at the driver; null if they are.
    pub drivers: BTreeMap<String, Option<String>>,
    /// The addresses that other nodes send tunnelled packets to.
    pub tunnel_addresses: Vec<IpAddr>,
    /// Whether the node is a gateway and holds its Lease; absent for a node that is no gateway.
    pub lease_held: Option<bool>,
    /// The highest revision of the node's own port blocks that it has programmed.
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
    /// Endpoints of this node that it selects, as `namespace/name`, sorted.
    pub endpoints: Vec<String>,
    /// Its conditions.
    pub conditions: Vec<ConditionState>,
}

/// The result of probing a gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbeResult {
    /// Nothing yet; new flows may use it.
    #[default]
    Unknown,
    /// It answers.
    Alive,
    /// It does not answer; new flows avoid it.
    Dead,
    /// It answers, but is not able to carry egress IPs: packets avoid it if there is another one.
    Unable,
}

/// A gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GatewayState {
    /// Its name.
    pub name: String,
    /// The address that it is probed at.
    pub address: Option<IpAddr>,
    /// The result of probes. This node itself counts as alive.
    pub probe: ProbeResult,
    /// The last round trip, in microseconds.
    pub rtt_micros: Option<u64>,
    /// The transport to it.
    pub transport: String,
    /// The transport that it answers by; empty if it is not known.
    pub replies: String,
    /// Why no better transport is in force; empty if the best one is.
    pub why: String,
}

/// An egress IP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressIpState {
    /// The address.
    pub address: IpAddr,
    /// The pool that it comes from; absent for one that a policy names.
    #[serde(default)]
    pub pool: Option<String>,
    /// Its owner.
    #[serde(default)]
    pub owner: Option<String>,
    /// The node that it goes back to, if that is another one.
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
    /// What it is about.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// One word.
    pub reason: String,
    /// A sentence.
    pub message: String,
}

/// Something that is wrong, and what to do about it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProblemState {
    /// The object, file, interface or setting.
    pub object: String,
    /// The field in it, if one is to blame.
    pub field: Option<String>,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub remedy: String,
}
