//! EgressPolicy: the egress IPs with which the pods of one namespace reach destinations. Written by the users of that namespace.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat their attribute's keys")]

use super::policy::{
    Bandwidth, Distribution, EgressGatewayPolicyStatus, ExistingConnections, NoGateway, PoolRequest, ZonePreference,
};
use super::schema;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// The pods of its namespace that a policy selects, the destinations of their packets, and the egress IPs with which they leave.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "spillway.io",
    version = "v1beta1",
    kind = "EgressPolicy",
    plural = "egresspolicies",
    singular = "egresspolicy",
    shortname = "egpol",
    category = "spillway",
    namespaced,
    status = "EgressGatewayPolicyStatus",
    derive = "PartialEq",
    cel,
    doc = "EgressPolicy sends the traffic of pods of its own namespace to the given destinations through gateways, so that it \
           leaves the cluster with egress IPs out of pools that allow the namespace.",
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].reason"),
    printcolumn(name = "Endpoints", type_ = "integer", json_path = ".status.selectedEndpoints"),
    printcolumn(name = "Egress IPs", type_ = "string", json_path = ".status.egressIPs"),
    printcolumn(name = "Distribution", type_ = "string", json_path = ".spec.distribution", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.selectors.size() > 0")
        .message("a policy without selectors selects no pod: write at least one, such as \
                  {podSelector: {matchLabels: {app: web}}}, or {podSelector: {}} for every pod of the namespace")
        .field_path(".selectors"),
    validation = Rule::new("self.destinationCIDRs.size() > 0")
        .message("a policy without destinations matches no packet: write at least one CIDR, such as 0.0.0.0/0 and ::/0 \
                  for everything outside the cluster")
        .field_path(".destinationCIDRs"),
    validation = Rule::new("self.egressIPPools.size() > 0")
        .message("a policy without a pool has no egress IP: write at least one, such as {name: public, count: 2}; the pool's \
                  allowedNamespaces must select this namespace")
        .field_path(".egressIPPools")
)]
pub struct EgressPolicySpec {
    /// The pods to which the policy applies. A pod is selected if any of these selectors matches it.
    #[schemars(length(max = 256))]
    pub selectors: Vec<OwnPods>,

    /// The destinations to which the policy applies, IPv4 and IPv6. Use 0.0.0.0/0 and ::/0 for everything outside the
    /// cluster. When several policies match a packet, the longest prefix wins, then the older policy, then the name.
    #[serde(rename = "destinationCIDRs")]
    #[schemars(schema_with = "schema::cidrs")]
    pub destination_cidrs: Vec<String>,

    /// Destinations within destinationCIDRs that this policy leaves alone; other policies may still apply to them.
    #[serde(default, rename = "excludedCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::cidrs")]
    pub excluded_cidrs: Vec<String>,

    /// The pools that the egress IPs come from. Their allowedNamespaces must select this namespace.
    #[serde(rename = "egressIPPools")]
    #[schemars(length(max = 64))]
    pub egress_ip_pools: Vec<PoolRequest>,

    /// How traffic is distributed over the egress IPs: PerFlow hashes every new flow, PerEndpoint
    /// assigns every pod one egress IP, balanced and sticky.
    #[serde(default)]
    pub distribution: Distribution,

    /// Whether a pod should use egress IPs of its own zone (topology.kubernetes.io/zone).
    #[serde(default)]
    pub zone: ZonePreference,

    /// What happens to new flows while no gateway answers: Drop, or NodeIP to send them out as if there were no
    /// policy, with the address of the pod's node. TCP connections that begin that way keep it until they end.
    /// NodeIP acts as Drop on each node where a cluster-scoped policy also selects one of the policy's pods.
    #[serde(default)]
    pub on_no_gateway: NoGateway,

    /// What happens to TCP connections that are older than the policy, or that began under onNoGateway
    /// NodeIP: Keep leaves them on their old path until they end, Drop cuts them once there is a gateway.
    #[serde(default)]
    pub existing_connections: ExistingConnections,

    /// The bandwidth of each egress IP of the policy, enforced at its gateway, in each direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Bandwidth")]
    pub bandwidth: Option<Bandwidth>,
}

/// Selects pods of the policy's namespace.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnPods {
    /// Labels of the pod. Empty selects every pod of the namespace.
    #[schemars(schema_with = "schema::label_selector")]
    pub pod_selector: LabelSelector,
}
