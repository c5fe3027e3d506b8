//! Egress and ExternalIPPool (crd.antrea.io/v1beta1).

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat their attribute's keys")]

use crate::api::{Bandwidth, IPRange, PoolUsage, SlotStatus, SubnetInfo, schema};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// The pods of an Egress, and the address with which they leave the cluster.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "crd.antrea.io",
    version = "v1beta1",
    kind = "Egress",
    plural = "egresses",
    singular = "egress",
    shortname = "eg",
    status = "EgressStatus",
    derive = "PartialEq",
    doc = "Egress as Antrea defines it, carried out by Spillway.",
    printcolumn(name = "EgressIP", type_ = "string", json_path = ".status.egressIP"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.egressNode")
)]
#[serde(rename_all = "camelCase")]
pub struct EgressSpec {
    /// The pods to which the Egress applies. Empty selects no pod.
    #[serde(default)]
    pub applied_to: AppliedTo,

    /// The address with which they leave. Without a pool, the node that has it configured is the gateway.
    #[serde(default, rename = "egressIP", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub egress_ip: Option<String>,

    /// Several such addresses.
    #[serde(default, rename = "egressIPs", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<String>")]
    pub egress_ips: Option<Vec<String>>,

    /// The pool that the address comes from; its nodes may carry the address.
    #[serde(default, rename = "externalIPPool", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub external_ip_pool: Option<String>,

    /// Several pools: one address from each, or the addresses in egressIPs.
    #[serde(default, rename = "externalIPPools", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<String>")]
    pub external_ip_pools: Option<Vec<String>>,

    /// The bandwidth of each address, in each direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Bandwidth")]
    pub bandwidth: Option<Bandwidth>,
}

/// Selects pods by their own labels and their namespace's.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AppliedTo {
    /// Labels of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::foreign_label_selector")]
    pub pod_selector: Option<LabelSelector>,

    /// Labels of the pod's namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::foreign_label_selector")]
    pub namespace_selector: Option<LabelSelector>,
}

/// The status of an Egress.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressStatus {
    /// The address in use: the first one that a node carries; absent while no node carries one.
    #[serde(default, rename = "egressIP", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub egress_ip: Option<String>,

    /// The node that carries the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub egress_node: Option<String>,

    /// Antrea's IPAllocated and IPAssigned, and Spillway's Ready, Degraded and Conflicting.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,

    /// All addresses, sorted. Antrea's own definition does not have this field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<SlotStatus>,
}

/// Addresses, and the nodes that may carry them.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "crd.antrea.io",
    version = "v1beta1",
    kind = "ExternalIPPool",
    plural = "externalippools",
    singular = "externalippool",
    shortname = "eip",
    status = "ExternalIPPoolStatus",
    derive = "PartialEq",
    doc = "ExternalIPPool as Antrea defines it, carried out by Spillway.",
    printcolumn(name = "Total", type_ = "integer", json_path = ".status.usage.total"),
    printcolumn(name = "Used", type_ = "integer", json_path = ".status.usage.used"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ExternalIPPoolSpec {
    /// The addresses. The first address of a CIDR is never assigned, nor is the last one of an IPv4 CIDR.
    #[serde(default)]
    #[schemars(length(max = 256))]
    pub ip_ranges: Vec<IPRange>,

    /// The subnet of the addresses, if it differs from that of the node's default route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "SubnetInfo")]
    pub subnet_info: Option<SubnetInfo>,

    /// The nodes that may carry the addresses. Empty selects every node.
    #[serde(default)]
    #[schemars(schema_with = "schema::foreign_label_selector")]
    pub node_selector: LabelSelector,
}

/// How much of a pool is in use.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExternalIPPoolStatus {
    /// The number of addresses, and the number in use.
    #[serde(default)]
    pub usage: PoolUsage,

    /// Ready, with a reason and a message. Antrea's own definition does not have this field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}
