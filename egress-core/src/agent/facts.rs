//! What an agent knows about its node. Pure.

use super::ports::Ports;
use crate::{
    encode::EndpointView,
    health::ProbeState,
    model::{AddressSource, EndpointId, NodeName, NodeReport, PolicyId, Snapshot, Source},
    network::{
        classify::Roles,
        links::{Link, LinkTable},
        reported::reported,
    },
    plan::{EgressIpPlan, Plan},
};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

/// The policies that select each pod of a node.
pub type Classes = BTreeMap<EndpointId, BTreeSet<PolicyId>>;

/// The objects as last read.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    /// The model. Of the pods, those of this node suffice.
    pub snapshot: Snapshot,
    /// The controller's decisions.
    pub plan: Plan,
    /// Whether the leases of only some nodes have been read, perhaps not all that the plan needs. Meanwhile this node carries nothing.
    pub partial: bool,
    /// The policies whose present generation the controller has not planned yet: the plan is that of an earlier one, or of none.
    pub unplanned: BTreeSet<PolicyId>,
}

/// The carriers and blocks that flows of an egress IP use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftInUse {
    /// The carriers.
    pub carriers: Vec<NodeName>,
    /// The blocks, which the carriers know.
    pub blocks: BTreeSet<u16>,
}

/// Everything that decisions depend on.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// This node.
    pub node: NodeName,
    /// The time, since an arbitrary start.
    pub now: Duration,
    /// The objects.
    pub objects: Arc<Objects>,
    /// Links and addresses.
    pub links: Arc<LinkTable>,
    /// The roles of the links.
    pub roles: Roles,
    /// Index of the tunnel device.
    pub tunnel: u32,
    /// The interfaces with the program that translates first packets.
    pub exits: BTreeSet<u32>,
    /// Whether another party's program may deliver packets to pods without passing ours.
    pub bypass: bool,
    /// The policies that select each pod.
    pub classes: Classes,
    /// Pods whose objects are gone while their interfaces are not.
    pub gone: BTreeMap<EndpointId, EndpointView>,
    /// The interface that each pod address is behind.
    pub interfaces: BTreeMap<IpAddr, u32>,
    /// The egress IPs of the policies that select pods.
    pub used: BTreeSet<IpAddr>,
    /// The state of each gateway, according to its probes.
    pub probes: BTreeMap<NodeName, ProbeState>,
    /// By gateway that has answered: the revision up to which its tables have this node's leases.
    pub known: BTreeMap<NodeName, u64>,
    /// The carriers and blocks that an earlier agent has left in use. Forgotten once every gateway has answered or is dead.
    pub left: BTreeMap<IpAddr, LeftInUse>,
    /// Whether this node is able to carry egress IPs: their uplinks are up, and other nodes reach it.
    pub able: bool,
    /// Whether this node may be cut off, rather than the others dead. If so, it takes over from none.
    pub doubted: bool,
    /// The ports that flows use.
    pub ports: Ports,
    /// When the count of the flows began; absent before the first one.
    pub counted: Option<Duration>,
    /// Destinations that no policy touches, as configured by the administrator.
    pub except_cidrs: Vec<IpNet>,
    /// `except_cidrs`, networks that may be the cluster's although no object names them, and this node's addresses on dummy devices.
    pub left_alone: Vec<IpNet>,
    /// The Service of the API server, if it is known.
    pub api_server: Option<IpNet>,
    /// Whether ARP and NDP must not be answered at all.
    pub silent: bool,
}

impl Facts {
    /// Returns the last report of this node's agent, or of the one before it.
    pub fn reported(&self) -> Option<&NodeReport> {
        self.objects.snapshot.report(&self.node)
    }

    /// Returns the addresses that this node reports, each with its link.
    pub fn addresses(&self) -> Vec<(&Link, IpNet)> {
        reported(&self.node, &self.objects.snapshot, &self.links, &self.roles)
    }

    /// Returns whether the plan names this node as a carrier of an egress IP.
    pub fn is_named(&self) -> bool {
        self.objects.plan.egress_ips.values().flat_map(EgressIpPlan::order).any(|name| *name == self.node)
    }

    /// Returns the revision up to which this node's leases are in its tables after the next write. It never falls from one report to the
    /// next: otherwise released blocks would seem to be in use again.
    pub fn leases(&self) -> u64 {
        let reported = self.reported().map_or(0, |report| report.own_lease_revision);
        self.objects.plan.highest_lease_of(&self.node).max(reported)
    }

    /// Returns the revision up to which a carrier knows this node's leases of an egress IP: the one that it reported or, until it has
    /// answered, that of the blocks that were in use with it when this agent started.
    pub fn known_by(&self, carrier: &NodeName, address: IpAddr) -> u64 {
        let was_used = self.left.get(&address).is_some_and(|left| left.carriers.contains(carrier));
        if was_used { self.known_by_replying(carrier, address) } else { self.known.get(carrier).copied().unwrap_or(0) }
    }

    /// Does the same for a carrier that this node need not send to, but that routers may send replies to.
    pub fn known_by_replying(&self, carrier: &NodeName, address: IpAddr) -> u64 {
        self.known.get(carrier).copied().or_else(|| self.left_in_use(address)).unwrap_or(0)
    }

    /// Returns the highest lease revision of the blocks of an egress IP that were in use when this agent started.
    fn left_in_use(&self, address: IpAddr) -> Option<u64> {
        let (left, blocks) = (self.left.get(&address)?, self.objects.plan.blocks.get(&address)?);
        let own = left.blocks.iter().filter_map(|block| blocks.get(block)).filter(|lease| lease.node == self.node);
        own.map(|lease| lease.revision).max()
    }

    /// Returns whether any pool or policy would use this node as a gateway, or the plan does (its pool may be gone).
    pub fn may_be_gateway(&self) -> bool {
        let snapshot = &self.objects.snapshot;
        let Some(n) = snapshot.nodes.get(&self.node) else { return false };
        let by_pool = snapshot.placements().any(|p| p.nodes.matches(&n.labels));
        let by_policy = snapshot.policies.values().any(|p| match &p.source {
            Source::Gateways(gateways) => gateways.iter().any(|g| {
                let holds = !matches!(g.address, AddressSource::Configured(ip) if !n.has_address(ip));
                holds && g.nodes.matches(&n.labels)
            }),
            Source::Pools(_) => false,
        });
        by_pool || by_policy || self.is_named()
    }
}
