//! EgressGatewayPolicy: the egress IPs with which pods reach destinations.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat their attribute's keys")]

use super::schema;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The pods that a policy selects, the destinations of their packets, and the egress IPs with which they leave.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "spillway.io",
    version = "v1beta1",
    kind = "EgressGatewayPolicy",
    plural = "egressgatewaypolicies",
    singular = "egressgatewaypolicy",
    shortname = "egp",
    category = "spillway",
    status = "EgressGatewayPolicyStatus",
    derive = "PartialEq",
    cel,
    doc = "EgressGatewayPolicy sends the traffic of the selected pods to the given destinations through gateways, so \
           that it leaves the cluster with the policy's egress IPs.",
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
                  {podSelector: {matchLabels: {app: web}}}, or {podSelector: {}} for every pod")
        .field_path(".selectors"),
    validation = Rule::new("self.destinationCIDRs.size() > 0")
        .message("a policy without destinations matches no packet: write at least one CIDR, such as 0.0.0.0/0 and ::/0 \
                  for everything outside the cluster")
        .field_path(".destinationCIDRs"),
    validation = Rule::new(
    "[has(self.egressGateway), has(self.egressGateways) && self.egressGateways.size() > 0, has(self.egressIPPool), \
     has(self.egressIPPools) && self.egressIPPools.size() > 0].filter(given, given).size() == 1")
    .message("a policy takes its egress IPs from one place: write exactly one of egressGateways and egressIPPools")
)]
pub struct EgressGatewayPolicySpec {
    /// The pods to which the policy applies. A pod is selected if any of these selectors matches it.
    #[schemars(length(max = 256))]
    pub selectors: Vec<EndpointSelector>,

    /// The destinations to which the policy applies, IPv4 and IPv6. Use 0.0.0.0/0 and ::/0 for everything outside the
    /// cluster. When several policies match a packet, the longest prefix wins, then the older policy, then the name.
    #[serde(rename = "destinationCIDRs")]
    #[schemars(schema_with = "schema::cidrs")]
    pub destination_cidrs: Vec<String>,

    /// Destinations within destinationCIDRs that this policy leaves alone; other policies may still apply to them.
    #[serde(default, rename = "excludedCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::cidrs")]
    pub excluded_cidrs: Vec<String>,

    /// Deprecated, of v1alpha1: a single gateway. Write egressGateways with one entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "EgressGateway")]
    pub egress_gateway: Option<EgressGateway>,

    /// The gateways over which the traffic is distributed, each with its egress IP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<EgressGateway>", length(max = 1024))]
    pub egress_gateways: Option<Vec<EgressGateway>>,

    /// Deprecated, of v1alpha1: a single pool. Write egressIPPools with one entry.
    #[serde(default, rename = "egressIPPool", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "PoolRequest")]
    pub egress_ip_pool: Option<PoolRequest>,

    /// The pools that the egress IPs come from (for example one for each zone). Spillway places
    /// each egress IP on a gateway, and moves it when that gateway fails.
    #[serde(default, rename = "egressIPPools", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<PoolRequest>", length(max = 64))]
    pub egress_ip_pools: Option<Vec<PoolRequest>>,

    /// How traffic is distributed over the egress IPs: PerFlow hashes every new flow, PerEndpoint
    /// assigns every pod one egress IP, balanced and sticky.
    #[serde(default)]
    pub distribution: Distribution,

    /// Whether a pod should use egress IPs of its own zone (topology.kubernetes.io/zone).
    #[serde(default)]
    pub zone: ZonePreference,

    /// What happens to new flows while no gateway answers: Drop, or NodeIP to send them out as if there were no
    /// policy, with the address of the pod's node. TCP connections that begin that way keep it until they end.
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

/// Selects pods by their own labels, their namespace's and their node's. All given selectors must match.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.podSelector) || has(self.namespaceSelector)")
    .message("a selector needs podSelector or namespaceSelector: write podSelector: {} to select every pod"))]
pub struct EndpointSelector {
    /// Labels of the pod. Empty selects every pod; so does an absent selector, if there is a namespaceSelector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub pod_selector: Option<LabelSelector>,

    /// Labels of the pod's namespace. Empty or absent selects every namespace. Each namespace has the label
    /// kubernetes.io/metadata.name with its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub namespace_selector: Option<LabelSelector>,

    /// Labels of the node that the pod runs on. Empty or absent selects every node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub node_selector: Option<LabelSelector>,
}

/// A gateway of a policy and its egress IP.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!(has(self.egressIP) && has(self.interface))")
    .message("a gateway has either an egressIP or an interface: remove one of them (neither means the address of the \
              default route's interface)"))]
pub struct EgressGateway {
    /// The nodes that may be this gateway. One of them is chosen; another takes over when it fails. Empty selects every node.
    #[schemars(schema_with = "schema::label_selector")]
    pub node_selector: LabelSelector,

    /// The source address that the outside sees. If no node has it configured, it floats: the gateway answers ARP and NDP for it.
    #[serde(default, rename = "egressIP", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::ip")]
    pub egress_ip: Option<String>,

    /// Use the address of this network interface of the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::interface")]
    pub interface: Option<String>,

    /// The share of new flows that this gateway gets, relative to the weights of the other gateways: 1 to 100.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 100))]
    pub weight: i32,
}

/// Egress IPs wanted from a pool.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.count) || !has(self.egressIPs) || self.count >= self.egressIPs.size()")
    .message("count is less than the number of egressIPs: raise count, or leave it out to get just the egressIPs"))]
pub struct PoolRequest {
    /// The name of the EgressIPPool.
    #[schemars(schema_with = "schema::pool_name")]
    pub name: String,

    /// The number of egress IPs: 1 to 1024. By default as many as egressIPs lists, at least 1.
    /// Entries of one pool count together, up to 1024.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i32", range(min = 1, max = 1024))]
    pub count: Option<i32>,

    /// Particular addresses of the pool that must be among the policy's egress IPs.
    #[serde(default, rename = "egressIPs", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::ips")]
    pub egress_ips: Option<Vec<String>>,
}

/// How traffic is distributed over the egress IPs of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Distribution {
    /// Every new flow is hashed to one of the egress IPs.
    #[default]
    PerFlow,
    /// Every pod is assigned one of the egress IPs.
    PerEndpoint,
}

/// Preference for egress IPs near the pod.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ZonePreference {
    /// Any ignores zones; Prefer uses the pod's own zone while a gateway is alive there, otherwise
    /// the other zones; Require uses only the pod's own zone.
    #[serde(default)]
    pub mode: ZoneMode,

    /// Use an egress IP that is on the pod's own node, if there is one.
    #[serde(default)]
    pub prefer_local_node: bool,
}

/// How much the zone of an egress IP matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ZoneMode {
    /// Zones do not matter.
    #[default]
    Any,
    /// The pod's zone first, then the others.
    Prefer,
    /// The pod's zone only.
    Require,
}

/// What happens to new flows while no gateway can take them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NoGateway {
    /// They are dropped and counted.
    #[default]
    Drop,
    /// They leave with the address of the pod's node.
    NodeIP,
}

/// What happens to TCP connections that are older than the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ExistingConnections {
    /// They stay on their old path.
    #[default]
    Keep,
    /// They are cut.
    Drop,
}

/// A limit on the traffic of an egress IP.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bandwidth {
    /// Bits per second, as a quantity: 800M.
    #[schemars(schema_with = "schema::quantity")]
    pub rate: String,

    /// Bits that may pass in one burst after a pause, as a quantity: 2G. By default as much as the rate lets pass in 100 ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::quantity")]
    pub burst: Option<String>,
}

/// The status of a policy.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressGatewayPolicyStatus {
    /// The generation of the policy from which this status was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i64", range(min = 0))]
    pub observed_generation: Option<i64>,

    /// Ready (new connections of the selected pods leave as the policy says), Programmed (the datapath of the pods' nodes has this
    /// generation), Degraded and Conflicting, each with a reason and a message.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,

    /// The number of pods that the policy selects.
    #[serde(default)]
    #[schemars(with = "i32", range(min = 0))]
    pub selected_endpoints: u32,

    /// The egress IPs in one line, for display.
    #[serde(default, rename = "egressIPs", skip_serializing_if = "String::is_empty")]
    pub egress_ips: String,

    /// The egress IPs of the policy, sorted by address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slots: Vec<SlotStatus>,
}

/// One egress IP of a policy.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlotStatus {
    /// The address.
    #[serde(rename = "egressIP")]
    pub egress_ip: String,

    /// The gateway that carries it now; absent while no gateway does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub node: Option<String>,

    /// The zone of that gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    pub zone: Option<String>,

    /// Increases with every change of the gateway.
    #[serde(default)]
    #[schemars(with = "i64", range(min = 0))]
    pub epoch: u64,

    /// Whether the gateway is alive.
    #[serde(default)]
    pub healthy: bool,

    /// The share of new flows, relative to the other slots.
    #[serde(default)]
    #[schemars(with = "i32", range(min = 0))]
    pub weight: u32,

    /// Whether the address was removed from its pool: its connections continue, but it gets no new ones.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,

    /// The number of pods that are assigned to it; absent with PerFlow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "i32", range(min = 0))]
    pub endpoints: Option<u32>,
}

fn one() -> i32 {
    1
}
