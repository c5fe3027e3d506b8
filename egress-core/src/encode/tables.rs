//! The contents of all maps that the agent writes, as one value, both wanted and present. Pure.

use egress_common::{
    V4, V6,
    abi::{Name, NameKey},
    config::DatapathConfig,
    egress::{BlockList, CarrierTable, EgressIp, LeaseTable, MacKey, NodeEntry, Uplink},
    endpoint::{AssignmentKey, Endpoint, MaglevChunk, Member, MemberKey, Policy, PolicyKey, RouteKey},
    limits,
    traffic::AccountKey,
};
use std::collections::BTreeMap;

/// The tables of one address family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilyTables<A: Ord> {
    /// Pods of this node by address.
    pub endpoints: BTreeMap<A, Endpoint>,
    /// Policy by (class and destination, prefix length with the 32 bits of the class).
    pub routes: BTreeMap<(RouteKey<A>, u32), u32>,
    /// Prefixes that no policy touches, each with its kind ([`egress_common::endpoint::except`]).
    pub excepts: BTreeMap<(A, u32), u32>,
    /// Index by address of the egress IP.
    pub egress_index: BTreeMap<A, u32>,
}

impl<A: Ord> Default for FamilyTables<A> {
    fn default() -> Self {
        Self {
            endpoints: BTreeMap::new(),
            routes: BTreeMap::new(),
            excepts: BTreeMap::new(),
            egress_index: BTreeMap::new(),
        }
    }
}

/// The tables of both families. Arrays are maps from the index to the elements that are not zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// IPv4.
    pub v4: FamilyTables<V4>,
    /// IPv6.
    pub v6: FamilyTables<V6>,
    /// Policies.
    pub policies: BTreeMap<PolicyKey, Policy>,
    /// Slots.
    pub members: BTreeMap<MemberKey, Member>,
    /// `PerEndpoint` assignments.
    pub assignments: BTreeMap<AssignmentKey, u32>,
    /// The accounts of packets, by namespace, policy and egress IP.
    pub accounts: BTreeMap<AccountKey, u32>,
    /// Maglev tables by chunk.
    pub maglev: BTreeMap<u32, MaglevChunk>,
    /// Egress IPs by index. A retired one stays here without an owner until its index is needed: flows that still use it refer to it.
    pub egress_ips: BTreeMap<u32, EgressIp>,
    /// This node's blocks by egress IP.
    pub blocks: BTreeMap<u32, BlockList>,
    /// Which carriers flows go to, by egress IP.
    pub carriers: BTreeMap<u32, CarrierTable>,
    /// All nodes' blocks by egress IP.
    pub leases: BTreeMap<u32, LeaseTable>,
    /// By node: the revision up to which its leases are in `leases`.
    pub known_leases: BTreeMap<u32, u64>,
    /// Nodes.
    pub nodes: BTreeMap<u32, NodeEntry>,
    /// Index by tunnel address.
    pub node_index: BTreeMap<V6, u32>,
    /// Index by MAC address.
    pub mac_index: BTreeMap<MacKey, u32>,
    /// Interfaces that answer for egress IPs.
    pub uplinks: BTreeMap<u32, Uplink>,
    /// Names.
    pub names: BTreeMap<NameKey, Name>,
    /// The configuration record; the generation is set when it is written.
    pub config: Option<DatapathConfig>,
}

macro_rules! bounded {
    ($($table:ident = $name:literal: $limit:ident,)*) => {
        /// The tables that may overflow.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Table { $( #[doc = concat!("`", $name, "`.")] $table, )* }

        impl Table {
            /// All tables, in the order in which they are checked.
            const ALL: &'static [Self] = &[$(Self::$table),*];

            /// Returns its name as a map of the programs.
            pub const fn name(self) -> &'static str { match self { $(Self::$table => $name),* } }

            const fn capacity(self) -> usize { match self { $(Self::$table => limits::$limit),* } }
        }
    };
}

bounded! {
    EndpointsV4 = "ENDPOINTS_V4": MAX_ENDPOINTS,
    EndpointsV6 = "ENDPOINTS_V6": MAX_ENDPOINTS,
    RoutesV4 = "ROUTES_V4": MAX_ROUTES,
    RoutesV6 = "ROUTES_V6": MAX_ROUTES,
    ExceptsV4 = "EXCEPTS_V4": MAX_EXCEPTS,
    ExceptsV6 = "EXCEPTS_V6": MAX_EXCEPTS,
    Policies = "POLICIES": MAX_POLICIES,
    Members = "MEMBERS": MAX_MEMBERS,
    Assignments = "ASSIGNMENTS": MAX_ASSIGNMENTS,
    Accounts = "ACCOUNTS": MAX_ACCOUNTS,
    EgressIndexV4 = "EGRESS_INDEX_V4": MAX_EGRESS_IPS,
    EgressIndexV6 = "EGRESS_INDEX_V6": MAX_EGRESS_IPS,
    NodeIndex = "NODE_INDEX": MAX_NODE_ADDRESSES,
    MacIndex = "MAC_INDEX": MAX_MACS,
    Uplinks = "UPLINKS": MAX_UPLINKS,
    Names = "NAMES": MAX_NAMES,
    Classes = "CLASSES": MAX_CLASSES,
    Maglev = "MAGLEV": MAX_MAGLEV_CHUNKS,
    EgressIps = "EGRESS_IPS": MAX_EGRESS_IPS,
    Nodes = "NODES": MAX_NODES,
}

/// A table that is too small for what is wanted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("table {} holds {capacity} entries and {wanted} are needed", table.name())]
pub struct Overflow {
    /// The table.
    pub table: Table,
    /// Entries that are wanted.
    pub wanted: usize,
    /// Entries that fit.
    pub capacity: usize,
}

impl Tables {
    /// Checks that everything fits, before anything is written. Present and wanted entries share the tables while one replaces the other,
    /// so both must fit together.
    pub fn check(&self, present: &Tables) -> Result<(), Overflow> {
        let used = |table: &Table| (*table, self.with(present, *table), table.capacity());
        match Table::ALL.iter().map(used).find(|(_, wanted, capacity)| wanted > capacity) {
            Some((table, wanted, capacity)) => Err(Overflow { table, wanted, capacity }),
            None => Ok(()),
        }
    }

    /// Returns how many entries of a table are in use while these tables replace the present ones. In arrays, present entries have their
    /// places.
    fn with(&self, present: &Tables, table: Table) -> usize {
        fn union<K: Ord, V>(a: &BTreeMap<K, V>, b: &BTreeMap<K, V>) -> usize {
            a.len() + b.keys().filter(|k| !a.contains_key(*k)).count()
        }
        let end = |last: Option<u32>| last.map_or(0, |i| i as usize + 1);
        match table {
            Table::EndpointsV4 => union(&self.v4.endpoints, &present.v4.endpoints),
            Table::EndpointsV6 => union(&self.v6.endpoints, &present.v6.endpoints),
            Table::RoutesV4 => union(&self.v4.routes, &present.v4.routes),
            Table::RoutesV6 => union(&self.v6.routes, &present.v6.routes),
            Table::ExceptsV4 => union(&self.v4.excepts, &present.v4.excepts),
            Table::ExceptsV6 => union(&self.v6.excepts, &present.v6.excepts),
            Table::Policies => union(&self.policies, &present.policies),
            Table::Members => union(&self.members, &present.members),
            Table::Assignments => union(&self.assignments, &present.assignments),
            Table::Accounts => union(&self.accounts, &present.accounts),
            Table::EgressIndexV4 => union(&self.v4.egress_index, &present.v4.egress_index),
            Table::EgressIndexV6 => union(&self.v6.egress_index, &present.v6.egress_index),
            Table::NodeIndex => union(&self.node_index, &present.node_index),
            Table::MacIndex => union(&self.mac_index, &present.mac_index),
            Table::Uplinks => union(&self.uplinks, &present.uplinks),
            Table::Names => union(&self.names, &present.names),
            Table::Classes => end(self.v4.endpoints.values().chain(self.v6.endpoints.values()).map(|e| e.class).max()),
            Table::Maglev => end(self.maglev.keys().next_back().copied()),
            Table::EgressIps => end(self.egress_ips.keys().next_back().copied()),
            Table::Nodes => end(self.nodes.keys().next_back().copied()),
        }
    }
}
