//! A node, as Kubernetes and its own agent describe it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::{EndpointId, Family, Labels, NodeName, PolicyId, Version};

/// An address that a node has configured on an interface.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InterfaceAddress {
    /// The interface's name.
    pub interface: String,
    /// The address with the length of its network's prefix.
    pub net: IpNet,
    /// Whether the default route of this family leaves by this interface.
    pub default_route: bool,
}

/// What an agent reports about its leases of one egress IP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// How many blocks it wants to hold in all; 0 if it needs no more.
    pub want: u32,
    /// Blocks that it has given back: no flow uses them, and the node uses none of them until it gets a lease of a higher revision.
    pub released: BTreeSet<u16>,
}

/// What the agent of a node reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeReport {
    /// Where other nodes reach its tunnel; the first one is preferred.
    pub tunnel_addresses: Vec<IpAddr>,
    /// The node's own addresses.
    pub addresses: BTreeSet<InterfaceAddress>,
    /// The Ethernet addresses of the interfaces that have its addresses.
    pub macs: BTreeMap<IpAddr, [u8; 6]>,
    /// The names of the transports over which it receives packets.
    pub receives: BTreeSet<String>,
    /// Port blocks in which its own sockets listen.
    pub occupied_blocks: BTreeSet<u16>,
    /// The demand for blocks, by egress IP.
    pub demand: BTreeMap<IpAddr, Demand>,
    /// The egress IPs that its tables carry.
    pub carries: BTreeSet<IpAddr>,
    /// What it cannot do for policies.
    pub troubles: BTreeSet<Trouble>,
    /// The policies that its tables carry out, and in which version; absent if the agent's version does not report it.
    pub programmed: Option<BTreeMap<PolicyId, Version>>,
    /// The revision up to which everything that is leased to this node is in its tables.
    pub own_lease_revision: u64,
}

/// Something that a node cannot do for a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trouble {
    /// The policy.
    pub policy: PolicyId,
    /// Its kind.
    pub kind: TroubleKind,
    /// The pod concerned; none if it concerns the policy as a whole.
    pub pod: Option<EndpointId>,
    /// The problem and its remedy.
    pub message: String,
}

impl Trouble {
    /// Adds to the message how many more troubles of this kind the node has and does not report one by one.
    pub fn and_more(&mut self, more: usize) {
        self.message.push_str(&format!(" (and {more} more)"));
    }

    /// Returns the message without that addition, and how many more there are. The number is in the message so that older agents and
    /// controllers, whose objects have no field for it, report it as well.
    pub fn counted(&self) -> (&str, usize) {
        let end = self.message.strip_suffix(" more)").and_then(|rest| rest.rsplit_once(" (and "));
        end.and_then(|(message, more)| Some((message, more.parse().ok()?))).unwrap_or((&self.message, 0))
    }
}

named! {
    /// What a node cannot do for a policy.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum TroubleKind {
        /// The policy, or an egress IP of it, does not fit into the node's tables.
        DoesNotFit,
        /// A selected pod is behind no interface of the node.
        PodWithoutInterface,
        /// A selected pod has had no address for so long that nothing is held for it any longer.
        PodNotStarted,
    }
    /// Returns its name in objects.
    as_str
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: NodeName,
    /// Its labels.
    pub labels: Labels,
    /// `topology.kubernetes.io/zone`
    pub zone: Option<String>,
    /// Its addresses in Kubernetes.
    pub addresses: BTreeSet<IpAddr>,
    /// The prefixes that its pods' addresses come from, as far as Kubernetes knows them.
    pub pod_cidrs: BTreeSet<IpNet>,
    /// False if the node reports itself as not ready. If nothing was heard from it (the condition is absent or `Unknown`, as for all nodes
    /// while the API server is unavailable), its lease as a gateway is better evidence.
    pub ready: bool,
    /// Whether it is cordoned: what it owns goes to others.
    pub draining: bool,
    /// How many floating egress IPs it may own in all (annotation).
    pub max_egress_ips: Option<u32>,
    /// What its agent reports; absent until the agent has started once.
    pub report: Option<NodeReport>,
}

impl Node {
    /// Returns whether this address is one of the node's own.
    pub fn has_address(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address)
            || self.report.iter().flat_map(|report| &report.addresses).any(|a| a.net.addr() == address)
    }

    /// Returns the first address of a family among those that its agent reports and `wanted` accepts. Addresses that are valid only on a
    /// link or on the node itself are never used.
    pub fn first_address(
        &self,
        family: Family,
        wanted: impl Fn(&InterfaceAddress) -> bool,
    ) -> Option<&InterfaceAddress> {
        let local = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local(),
        };
        self.report
            .iter()
            .flat_map(|report| &report.addresses)
            .filter(|a| Family::of(a.net.addr()) == family && !local(a.net.addr()) && wanted(a))
            .min_by_key(|a| a.net.addr())
    }
}
