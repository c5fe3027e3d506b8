//! The parts of a plan.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use crate::model::{EndpointId, Family, NetworkAttachment, NodeName, PolicyId, PoolId, TroubleKind};

named! {
    /// Why an egress IP has the owner that it has.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum OwnerReason {
        /// Its preferred gateway carries it.
        Preferred,
        /// Another gateway carries it until the preferred one is back.
        Failover,
        /// Its owner is not healthy, but no other gateway is eligible.
        OwnerUnhealthy,
        /// No node matches the node selectors.
        NoGatewaySelected,
        /// Its pool is gone or its nodeSelector cannot be understood, and none of its former gateways is left.
        SelectorUnknown,
        /// Nodes match the node selectors, but none of them is ready with a fresh lease.
        NoGatewayReady,
        /// Every eligible gateway owns as many egress IPs as it may.
        AtCapacity,
        /// The address is configured on a node that the node selectors do not select, or must be configured on a selected one and is not.
        AddressElsewhere,
    }
    /// Returns the name that conditions and tables show.
    as_str
}

/// One egress IP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressIpPlan {
    /// The pool that it was taken from.
    pub pool: Option<PoolId>,
    /// Whether the address is a node's own: it never floats, and only the ports of [`super::blocks::FIXED_BLOCKS`] are used.
    pub fixed: bool,
    /// The interface that has it, if `fixed`.
    pub interface: Option<String>,
    /// The carrier that answers for it.
    pub owner: Option<NodeName>,
    /// The gateways that carry it, the owner first, then in the order in which they take its place. Without an owner, those that are asked
    /// to show that they are alive.
    pub carriers: Vec<NodeName>,
    /// The gateway that it goes back to.
    pub preferred: Option<NodeName>,
    /// Grows by one with each change of owner; 0 if it never had one.
    pub epoch: u64,
    /// The policies that use it, with the weight of its slot.
    pub users: BTreeMap<PolicyId, u32>,
    /// Why it has this owner.
    pub reason: OwnerReason,
    /// How many blocks of it each source node may count on. If `scarce`, a node that holds more gives idle ones back.
    pub share: u32,
    /// Whether a node that needs a block of it cannot have one.
    pub scarce: bool,
    /// Whether a source node that should have a block has none. Then a node that holds more than the share takes no new ports from the rest
    /// of its blocks, however much it needs them, and gives each back when its last flow ends.
    pub starved: bool,
    /// How packets reach it and leave with it, from its pool; agents need it when the pool is gone.
    pub attachment: NetworkAttachment,
    /// Whether it was taken out of its pool: its connections continue, and it gets no new ones.
    pub draining: bool,
}

impl EgressIpPlan {
    /// Returns its carriers in order. The plan of an earlier version's controller names only the owner.
    pub fn order(&self) -> impl Iterator<Item = &NodeName> {
        let owner = self.owner.iter().filter(|_| self.carriers.is_empty());
        self.carriers.iter().chain(owner)
    }
}

/// The egress IPs of an endpoint under a `PerEndpoint` policy, one per family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Assigned {
    /// For IPv4 destinations.
    pub v4: Option<Ipv4Addr>,
    /// For IPv6 destinations.
    pub v6: Option<Ipv6Addr>,
}

impl Assigned {
    /// Returns the egress IP for destinations of this family.
    pub fn get(&self, family: Family) -> Option<IpAddr> {
        match family {
            Family::V4 => self.v4.map(IpAddr::V4),
            Family::V6 => self.v6.map(IpAddr::V6),
        }
    }

    /// Sets the egress IP of the address's family.
    pub fn set(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(v4) => self.v4 = Some(v4),
            IpAddr::V6(v6) => self.v6 = Some(v6),
        }
    }
}

/// Whether a block may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockState {
    /// By its holder, for new flows.
    Leased,
    /// By no node for new flows. It is free again when its holder releases it, or is gone.
    Quarantined,
}

/// One port block of one egress IP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLease {
    /// Its holder.
    pub node: NodeName,
    /// The revision that it was granted with: the block may be used once the carriers of the egress IP have programmed this revision.
    pub revision: u64,
    /// Whether it may be used.
    pub state: BlockState,
}

/// The blocks of one egress IP by number.
pub type Blocks = BTreeMap<u16, BlockLease>;

named! {
    /// The kinds of condition that a policy shows.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum ConditionKind {
        /// Matching traffic leaves as the policy says.
        Ready,
        /// Matching traffic leaves, but not everything that was requested is available.
        Degraded,
        /// Another policy takes precedence for some of its traffic or addresses.
        Conflicting,
    }
    /// Returns the `type` of the condition.
    as_str
}

named! {
    /// The reason of a condition, in one word.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Reason {
        /// Nothing is wrong.
        AsExpected,
        /// The policy names a pool that does not exist.
        PoolNotFound,
        /// The pool is not for the policy's namespace.
        NotAllowed,
        /// The policies of its namespace may not have as many addresses of a pool as they request.
        QuotaExceeded,
        /// A pool has no free address left.
        PoolExhausted,
        /// A wanted address is in none of the ranges of its pool.
        AddressNotInPool,
        /// An address was taken out of its pool while it was in use.
        Draining,
        /// A wanted address belongs to another policy, a node or a router.
        AddressInUse,
        /// Two policies let the same address float over nodes, and have no node in common.
        SelectorsDisagree,
        /// There is no egress IP of a family that the policy steers.
        NoAddress,
        /// An egress IP has no owner.
        NoGateway,
        /// An egress IP's owner does not renew its lease, and no other gateway is eligible.
        GatewayUnhealthy,
        /// Every eligible gateway owns as many egress IPs as it may.
        AtCapacity,
        /// The address is configured elsewhere than the policy says.
        AddressElsewhere,
        /// No gateway is in the zone of some selected pods.
        NoGatewayInZone,
        /// Another policy steers the same destinations of the same pods.
        SameDestination,
        /// A node has no room for it, or for an egress IP of it.
        DoesNotFit,
        /// A selected pod is behind no interface of its node.
        PodWithoutInterface,
        /// A selected pod has had no address for a long time.
        PodNotStarted,
        /// The object, or a pool that it names, cannot be carried out as it is written.
        Invalid,
    }
    /// Returns the `reason` of the condition.
    as_str
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Whether it holds.
    pub holds: bool,
    /// The reason, in one word.
    pub reason: Reason,
    /// The reason, in a sentence that names object, field and remedy.
    pub message: String,
}

/// One slot of a policy, as its status shows it. Slots are sorted by address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The egress IP.
    pub address: IpAddr,
    /// Its owner.
    pub owner: Option<NodeName>,
    /// The zone of its owner.
    pub zone: Option<String>,
    /// Its epoch.
    pub epoch: u64,
    /// Its share of new flows relative to the other slots of its family.
    pub weight: u32,
    /// Why it has this owner.
    pub reason: OwnerReason,
    /// How many endpoints are assigned to it (`PerEndpoint`).
    pub endpoints: u32,
    /// Whether it gets no new connections because it was taken out of its pool.
    pub draining: bool,
}

/// The outcome of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyOutcome {
    /// All of [`ConditionKind::ALL`].
    pub conditions: BTreeMap<ConditionKind, Condition>,
    /// Its table of egress IPs, both families.
    pub slots: Vec<Slot>,
    /// How many endpoints it selects.
    pub endpoints: u32,
    /// The nodes of its pods whose datapath does not have this version of it yet.
    pub behind: BTreeSet<NodeName>,
    /// Pods of it that a node cannot serve, and why.
    pub pods: BTreeMap<EndpointId, (TroubleKind, String)>,
    /// The policies that take precedence, and on which of its destination prefixes, for some of its pods.
    pub conflicts: BTreeMap<PolicyId, BTreeSet<IpNet>>,
}

/// Everything that the controller decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The egress IPs, by address.
    pub egress_ips: BTreeMap<IpAddr, EgressIpPlan>,
    /// The assignments of the `PerEndpoint` policies.
    pub assignments: BTreeMap<PolicyId, BTreeMap<EndpointId, Assigned>>,
    /// The blocks, by egress IP. A removed egress IP stays here until its last block has come back.
    pub blocks: BTreeMap<IpAddr, Blocks>,
    /// The revision of the latest grant of blocks.
    pub lease_revision: u64,
    /// The outcomes, by policy, for every policy of the snapshot.
    pub outcomes: BTreeMap<PolicyId, PolicyOutcome>,
}

impl Plan {
    /// Returns the highest revision of a lease of each node that has any.
    pub fn highest_leases(&self) -> BTreeMap<NodeName, u64> {
        // A hash map, because node names have long common prefixes, and a gateway for 5,000 nodes has 60,000 leases.
        let mut highest: HashMap<&NodeName, u64> = HashMap::new();
        for lease in self.blocks.values().flat_map(BTreeMap::values) {
            let revision = highest.entry(&lease.node).or_default();
            *revision = lease.revision.max(*revision);
        }
        highest.into_iter().map(|(node, revision)| (node.clone(), revision)).collect()
    }

    /// Returns the highest revision of a lease of one node; 0 if it has none.
    pub fn highest_lease_of(&self, node: &NodeName) -> u64 {
        let all = self.blocks.values().flat_map(BTreeMap::values);
        all.filter(|lease| lease.node == *node).map(|lease| lease.revision).max().unwrap_or(0)
    }
}
