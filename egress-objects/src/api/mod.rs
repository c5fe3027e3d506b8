//! The custom resources of the group `spillway.io`, written by users or by Spillway, with their rules and their
//! documentation, and those of other systems. Strings are as on the wire; `translate` converts them to the
//! domain's types once. May use serde, schemars and Kubernetes' object shapes; has no store, no clock and no I/O.

mod egress_ip;
mod egress_node;
mod egress_policy;
mod foreign;
mod pod;
mod policy;
mod pool;
mod rules;
mod schema;
#[cfg(test)]
mod tests;

pub use egress_ip::{EgressIP, EgressIPSpec, EgressIPStatus, PolicyUse, egress_ip_name};
pub use egress_node::{
    Assignment, BlockRange, CarriedIP, Demand, EgressNode, EgressNodeSpec, EgressNodeStatus, LeasedBlocks, NodeAddress,
    ProgrammedPolicy, Trouble,
};
pub use egress_policy::{EgressPolicy, EgressPolicySpec, OwnPods};
pub use foreign::networks;
pub use foreign::{
    AppliedTo, CiliumEgressGateway, CiliumEgressGatewayPolicy, CiliumEgressGatewayPolicySpec, CiliumSelector, Egress,
    EgressSpec, EgressStatus, ExternalIPPool, ExternalIPPoolSpec, ExternalIPPoolStatus,
};
pub use pod::{Pod, PodSpec, PodStatus};
pub use policy::{
    Bandwidth, Distribution, EgressGateway, EgressGatewayPolicy, EgressGatewayPolicySpec, EgressGatewayPolicyStatus,
    EndpointSelector, ExistingConnections, NoGateway, PoolRequest, SlotStatus, ZoneMode, ZonePreference,
};
pub use pool::{
    Announce, EgressIPPool, EgressIPPoolSpec, EgressIPPoolStatus, Failback, FailbackMode, IPRange, Outbound, PoolUsage,
    Quota, SubnetInfo,
};
pub use rules::{Rules, Violation};
pub use rules::{remove_nulls, unknown_field};
pub use schema::{SHORT_FORMS, shorten};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

/// API group of Spillway's own kinds.
pub const GROUP: &str = "spillway.io";
/// Version of the kinds that users write. The meaning of its fields does not change: docs/install.md states the promise.
pub const VERSION: &str = "v1beta1";
/// The previous version of those kinds, which clusters still serve, and the version of the kinds that Spillway itself writes.
pub const ALPHA: &str = "v1alpha1";
/// Node annotation that overrides `maxEgressIPsPerNode` of every pool and of the configuration; a number from 0 to 255.
pub const MAX_EGRESS_IPS_ANNOTATION: &str = "spillway.io/max-egress-ips";

/// The length of a label's value (`validation.LabelValueMaxLength` of Kubernetes). Names of nodes can be longer.
pub(crate) const LABEL_VALUE: usize = 63;

/// Label of an EgressIP: the node that carries it now, for tools that configure a cloud. Absent
/// while no node carries it, and for a node whose name is too long for a label.
pub const NODE_LABEL: &str = "spillway.io/node";

/// Label of an EgressNode: the agents that follow it. Either [`EVERY_NODE`], or the name of its own
/// node: then only that node's agent follows it, and those of gateways, which follow all.
pub const FOLLOWED_BY_LABEL: &str = "spillway.io/followed-by";
/// The value of [`FOLLOWED_BY_LABEL`] for gateways, and for nodes with networks of pods that no other object names.
pub const EVERY_NODE: &str = "every-node";

/// Returns every CustomResourceDefinition of Spillway with the name of its file, sorted by that name.
pub fn crds() -> Vec<(String, CustomResourceDefinition)> {
    let of_people = [EgressGatewayPolicy::crd(), EgressPolicy::crd(), EgressIPPool::crd()];
    files(of_people.into_iter().map(schema::with_alpha).chain([EgressIP::crd(), EgressNode::crd()]))
}

/// Returns the CustomResourceDefinitions of other systems' kinds, to be installed only where the
/// systems' own are absent; named and sorted like [`crds`].
pub fn foreign_crds() -> Vec<(String, CustomResourceDefinition)> {
    files([CiliumEgressGatewayPolicy::crd(), Egress::crd(), ExternalIPPool::crd()])
}

fn files(crds: impl IntoIterator<Item = CustomResourceDefinition>) -> Vec<(String, CustomResourceDefinition)> {
    let named = |crd: CustomResourceDefinition| (format!("{}.yaml", crd.spec.names.plural), schema::complete(crd));
    let mut files: Vec<_> = crds.into_iter().map(named).collect();
    files.sort_by(|a, b| a.0.cmp(&b.0));
    files
}
