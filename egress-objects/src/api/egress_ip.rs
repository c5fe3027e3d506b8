//! EgressIP: one address in use, the policies that use it and the gateways that carry it. Only the controller writes it.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat their attribute's keys")]

use super::pool::{Announce, Outbound, SubnetInfo};
use super::schema;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// An address and the policies that use it.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "spillway.io",
    version = "v1alpha1",
    kind = "EgressIP",
    plural = "egressips",
    singular = "egressip",
    shortname = "egip",
    category = "spillway",
    status = "EgressIPStatus",
    derive = "PartialEq",
    cel,
    doc = "EgressIP is one source address that the outside sees, and the gateways that carry it. Spillway writes it; \
           to change it, change the policies and pools.",
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.node"),
    printcolumn(name = "Epoch", type_ = "integer", json_path = ".status.epoch"),
    printcolumn(name = "Pool", type_ = "string", json_path = ".spec.pool"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Preferred", type_ = "string", json_path = ".status.preferredNode", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct EgressIPSpec {
    /// The source address that the outside sees.
    #[schemars(schema_with = "schema::ip")]
    pub address: String,

    /// The pool that the address comes from; absent for an address that a policy names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub pool: Option<String>,

    /// The gateway's interface that has the address; only if a policy selects the address by its gateway's interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub interface: Option<String>,

    /// Whether the address is a node's own: such an address does not move, its node's network stack
    /// answers ARP and NDP for it, and only some of its ports are used.
    #[serde(default)]
    pub fixed: bool,

    /// The subnet of the address, from its pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "SubnetInfo")]
    pub subnet_info: Option<SubnetInfo>,

    /// How the outside reaches the address, as set in its pool.
    #[serde(default)]
    pub announce: Announce,

    /// The gateways through which packets with the address leave, as set in its pool.
    #[serde(default)]
    pub outbound: Outbound,

    /// The policies that use the address, sorted by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<PolicyUse>,
}

impl EgressIP {
    /// Returns the nodes that carry it, as last planned. The controller of an earlier version reported only the owner.
    pub fn carriers(&self) -> impl Iterator<Item = &str> {
        let status = self.status.as_ref();
        let owner = status.filter(|status| status.carriers.is_empty()).and_then(|status| status.node.as_deref());
        status.into_iter().flat_map(|status| &status.carriers).map(String::as_str).chain(owner)
    }
}

/// A policy that uses an egress IP.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyUse {
    /// The policy: its name, with the prefix cegp/ for a CiliumEgressGatewayPolicy and egress/ for Antrea's Egress.
    pub policy: String,

    /// The share of the policy's new flows that use the address, relative to the policy's other egress IPs: 1 to 100.
    #[schemars(with = "i32", range(min = 1))]
    pub weight: u32,
}

/// The gateways that carry an egress IP.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressIPStatus {
    /// The generation of the EgressIP from which this status was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i64", range(min = 0))]
    pub observed_generation: Option<i64>,

    /// The gateway that answers for the address; absent while no gateway can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub node: Option<String>,

    /// The gateways that carry the address, in the order in which they answer for it, the one that answers now first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub carriers: Vec<String>,

    /// The zone of the gateway that answers for the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub zone: Option<String>,

    /// The gateway to which the address returns when it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub preferred_node: Option<String>,

    /// Increases with every change of the gateway.
    #[serde(default)]
    #[schemars(with = "i64", range(min = 0))]
    pub epoch: u64,

    /// The number of port blocks of the address that each source node may count on: exact where blocks
    /// are scarce, otherwise within a factor of two, so that not every new source node causes a write.
    #[serde(default)]
    #[schemars(with = "i32", range(min = 0, max = 1008))]
    pub block_share: u32,

    /// Whether a node that needs a port block cannot get one. Nodes with more than their share then give idle blocks back.
    #[serde(default)]
    pub blocks_scarce: bool,

    /// Whether a source node that should have a port block has none. Nodes with more than their share
    /// then take no new ports from the excess, and give back each excess block when its last flow ends.
    #[serde(default)]
    pub blocks_starved: bool,

    /// Ready, Draining (the address was removed from its pool while it was in use) and others, each with a reason and a message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

/// Returns the name of the EgressIP object of an address: the address itself for IPv4, all eight
/// groups of four digits joined by `-` for IPv6 (`2001-0db8-0000-0000-0000-0000-0000-0010`).
pub fn egress_ip_name(address: IpAddr) -> String {
    match address {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => v6.segments().map(|group| format!("{group:04x}")).join("-"),
    }
}
