//! The domain types: what the planner and the agents reason about once the text of objects has been parsed.
//!
//! They contain only addresses, labels and ids. This module imports no API type, no I/O and no clock, so everything built on it can be
//! tested with plain values.

mod endpoint;
mod family;
mod id;
mod node;
mod policy;
mod pool;
mod range;
mod selector;
mod transport;

use ipnet::IpNet;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

pub use endpoint::Endpoint;
pub use family::Family;
pub use id::{EndpointId, IdError, NodeName, PolicyId, PolicyKind, PoolId, PoolKind};
pub use node::{Demand, InterfaceAddress, Node, NodeReport, Trouble, TroubleKind};
pub use policy::{
    AddressSource, Bandwidth, DEFAULT_FAILBACK_DELAY, Distribution, EndpointSelector, Existing, Gateway, NodeChoice,
    OnNoGateway, Policy, PoolRequest, Source, Version, ZoneMode,
};
pub use pool::{
    Announce, DEFAULT_CARRIERS, Failback, MAX_CARRIERS, NetworkAttachment, Outbound, Pool, Quota, SubnetInfo,
};
pub use range::{IpRange, RangeError};
pub use selector::{Requirement, Selector};
pub use transport::Transport;

/// Labels of a Kubernetes object.
pub type Labels = BTreeMap<String, String>;

/// Everything that a plan is made from, except health and the previous plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Policies of every kind. Those of Spillway's own kinds that could not be understood have no egress IP, and drop.
    pub policies: BTreeMap<PolicyId, Policy>,
    /// Pools of every kind that could be understood.
    pub pools: BTreeMap<PoolId, Pool>,
    /// Pools that exist but could not be understood, each without its invalid fields; `None` if its nodeSelector is one of them. What
    /// policies have of these pools stays as it is.
    pub unreadable_pools: BTreeMap<PoolId, Option<Pool>>,
    /// All nodes of the cluster.
    pub nodes: BTreeMap<NodeName, Node>,
    /// Labels of each namespace. A namespace that is missing here has no labels.
    pub namespaces: BTreeMap<Arc<str>, Labels>,
    /// All pods that could be selected: neither finished nor in the host's network.
    pub endpoints: BTreeMap<EndpointId, Endpoint>,
    /// The networks of Services.
    pub services: BTreeSet<IpNet>,
    /// Pod networks that no Node's `podCIDRs` contains, as the controller reports them to agents.
    pub pod_networks: BTreeSet<IpNet>,
    /// Pod networks that the objects of a CNI name; only a controller reads those.
    pub cni_networks: CniNetworks,
    /// How many floating egress IPs a node without its own limit may own, over all pools.
    pub max_egress_ips: Option<u32>,
    /// How long an egress IP that was removed from its pool keeps its connections.
    pub drain_timeout: Duration,
    /// The egress IPs whose drain timeout is over.
    pub drained: BTreeSet<IpAddr>,
}

/// Pod networks that the objects of a CNI name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CniNetworks {
    /// Networks of pods of any node.
    pub shared: BTreeSet<IpNet>,
    /// Networks of the pods of one node.
    pub nodes: BTreeMap<NodeName, BTreeSet<IpNet>>,
}

impl Snapshot {
    /// Returns a pool as far as it says which nodes own its addresses, and how many, even if something else in it could not be understood.
    pub fn placement(&self, pool: &PoolId) -> Option<&Pool> {
        self.pools.get(pool).or_else(|| self.unreadable_pools.get(pool)?.as_ref())
    }

    /// Does the same for all pools.
    pub fn placements(&self) -> impl Iterator<Item = &Pool> {
        self.pools.values().chain(self.unreadable_pools.values().flatten())
    }

    /// Returns the report of a node's agent, if the node exists and has reported anything.
    pub fn report(&self, node: &NodeName) -> Option<&NodeReport> {
        self.nodes.get(node)?.report.as_ref()
    }
}
