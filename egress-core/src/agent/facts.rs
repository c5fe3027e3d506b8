//! What an agent knows of its node. Pure.

use super::{demand::Ports, objects::Objects, view::Classes};
use crate::{
    encode::EndpointView,
    health::ProbeState,
    model::{EndpointId, NodeName, NodeReport},
    network::{
        classify::Roles,
        links::{Link, LinkTable},
        reported::reported,
    },
};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

/// Everything that is decided by.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// This node.
    pub node: NodeName,
    /// The time, since any start.
    pub now: Duration,
    /// The objects.
    pub objects: Arc<Objects>,
    /// Links and addresses.
    pub links: Arc<LinkTable>,
    /// What the links are for.
    pub roles: Roles,
    /// The policies that select each pod.
    pub classes: Classes,
    /// Pods whose objects are gone while their interfaces are not.
    pub gone: BTreeMap<EndpointId, EndpointView>,
    /// The interfaces of pods by the addresses behind them.
    pub interfaces: BTreeMap<IpAddr, u32>,
    /// The egress IPs of the policies that select pods.
    pub used: BTreeSet<IpAddr>,
    /// What the probes say of the gateways.
    pub probes: BTreeMap<NodeName, ProbeState>,
    /// Whether this node is able to carry egress IPs: their ways out are up, and somebody reaches it.
    pub able: bool,
    /// What the flows use.
    pub ports: Ports,
    /// When the count of the flows began; absent before the first one.
    pub counted: Option<Duration>,
    /// Destinations that no policy touches, as the administrator says.
    pub except_cidrs: Vec<IpNet>,
    /// They, networks that may be the cluster's although nobody names them, and what this node has on dummy devices.
    pub left_alone: Vec<IpNet>,
    /// The Service of the API server, if it is known.
    pub api_server: Option<IpNet>,
    /// ARP and NDP are not to be answered at all.
    pub silent: bool,
}

impl Facts {
    /// What this node's agent, or the one before it, has reported last.
    pub fn reported(&self) -> Option<&NodeReport> {
        self.objects.snapshot.report(&self.node)
    }

    /// The addresses that it tells of itself, each with its link.
    pub fn addresses(&self) -> Vec<(&Link, IpNet)> {
        reported(&self.node, &self.objects.snapshot, &self.links, &self.roles)
    }

    /// Whether the plan counts on this node as a gateway.
    pub fn is_named(&self) -> bool {
        self.objects.is_named(&self.node)
    }
}
