//! CiliumEgressGatewayPolicy (cilium.io/v2).

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat their attribute's keys")]

use crate::api::{EgressGatewayPolicyStatus, schema};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// The pods of a policy, the destinations that they reach, and the gateways.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "cilium.io",
    version = "v2",
    kind = "CiliumEgressGatewayPolicy",
    plural = "ciliumegressgatewaypolicies",
    singular = "ciliumegressgatewaypolicy",
    shortname = "cegp",
    category = "cilium",
    category = "ciliumpolicy",
    status = "EgressGatewayPolicyStatus",
    derive = "PartialEq",
    doc = "CiliumEgressGatewayPolicy as Cilium defines it, carried out by Spillway. Where Cilium's own definition is \
           installed, keep that one: it has no status, and Spillway says with Events what it thinks of an object.",
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].reason"),
    printcolumn(name = "Egress IPs", type_ = "string", json_path = ".status.egressIPs"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct CiliumEgressGatewayPolicySpec {
    /// The pods to which the policy applies: those that any of these selectors matches.
    #[serde(default)]
    pub selectors: Vec<CiliumSelector>,

    /// The destinations to which the policy applies.
    #[serde(default, rename = "destinationCIDRs")]
    pub destination_cidrs: Vec<String>,

    /// Destinations within destinationCIDRs that the policy leaves alone.
    #[serde(default, rename = "excludedCIDRs", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<String>")]
    pub excluded_cidrs: Option<Vec<String>>,

    /// The gateway; ignored if egressGateways has an entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "CiliumEgressGateway")]
    pub egress_gateway: Option<CiliumEgressGateway>,

    /// Several gateways; pods are assigned to them in turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<CiliumEgressGateway>", length(max = 64))]
    pub egress_gateways: Option<Vec<CiliumEgressGateway>>,
}

/// Selects pods; all given parts must match.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CiliumSelector {
    /// Labels of the pod, and Cilium's labels for its surroundings, such as io.kubernetes.pod.namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::foreign_label_selector")]
    pub pod_selector: Option<LabelSelector>,

    /// Labels of the pod's namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::foreign_label_selector")]
    pub namespace_selector: Option<LabelSelector>,

    /// Labels of the pod's node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::foreign_label_selector")]
    pub node_selector: Option<LabelSelector>,
}

/// A gateway.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CiliumEgressGateway {
    /// The nodes that may be this gateway. The first available one by name is chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::foreign_label_selector")]
    pub node_selector: Option<LabelSelector>,

    /// The interface with whose first address packets leave. Without interface and egressIP, that of the default route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub interface: Option<String>,

    /// The address with which packets leave.
    #[serde(default, rename = "egressIP", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub egress_ip: Option<String>,
}
