//! The contents of all maps that the agent writes, as one value: what is wanted, and what is there. Pure.

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
    /// Prefixes that no policy touches; the value is 1.
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

/// The tables of both families. Arrays are maps from the index to what is not zero.
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
    /// Egress IPs by index. One that is retired stays here without an owner until its index is needed: flows that still
    /// use it name it.
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
    /// Settings; the generation is set when it is written.
    pub config: Option<DatapathConfig>,
}

/// A table that is too small for what is wanted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("table {map} holds {capacity} entries and {wanted} are needed")]
pub struct Overflow {
    /// The map.
    pub map: &'static str,
    /// Entries that are wanted.
    pub wanted: usize,
    /// Entries that fit.
    pub capacity: usize,
}

/// How full a table is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The map.
    pub map: &'static str,
    /// Entries in use.
    pub used: usize,
    /// Entries that fit.
    pub capacity: usize,
}

impl Tables {
    /// How full each table is.
    pub fn usage(&self) -> Vec<Use> {
        let highest = |used: Option<&u32>| used.map_or(0, |i| *i as usize + 1);
        let classes = self.v4.endpoints.values().chain(self.v6.endpoints.values()).map(|e| e.class);
        [
            ("ENDPOINTS_V4", self.v4.endpoints.len(), limits::MAX_ENDPOINTS),
            ("ENDPOINTS_V6", self.v6.endpoints.len(), limits::MAX_ENDPOINTS),
            ("ROUTES_V4", self.v4.routes.len(), limits::MAX_ROUTES),
            ("ROUTES_V6", self.v6.routes.len(), limits::MAX_ROUTES),
            ("EXCEPTS_V4", self.v4.excepts.len(), limits::MAX_EXCEPTS),
            ("EXCEPTS_V6", self.v6.excepts.len(), limits::MAX_EXCEPTS),
            ("POLICIES", self.policies.len(), limits::MAX_POLICIES),
            ("CLASSES", highest(classes.max().as_ref()), limits::MAX_CLASSES),
            ("MEMBERS", self.members.len(), limits::MAX_MEMBERS),
            ("ASSIGNMENTS", self.assignments.len(), limits::MAX_ASSIGNMENTS),
            ("ACCOUNTS", self.accounts.len(), limits::MAX_ACCOUNTS),
            ("MAGLEV", highest(self.maglev.keys().next_back()), limits::MAX_MAGLEV_CHUNKS),
            ("EGRESS_IPS", highest(self.egress_ips.keys().next_back()), limits::MAX_EGRESS_IPS),
            ("NODES", highest(self.nodes.keys().next_back()), limits::MAX_NODES),
            ("NODE_INDEX", self.node_index.len(), limits::MAX_NODE_ADDRESSES),
            ("MAC_INDEX", self.mac_index.len(), limits::MAX_MACS),
            ("UPLINKS", self.uplinks.len(), limits::MAX_UPLINKS),
            ("NAMES", self.names.len(), limits::MAX_NAMES),
        ]
        .into_iter()
        .map(|(map, used, capacity)| Use { map, used, capacity })
        .collect()
    }

    /// Refuses what does not fit, before anything is written. Present and wanted entries share the tables while one
    /// replaces the other, so both must fit together.
    pub fn check(&self, present: &Tables) -> Result<(), Overflow> {
        fn union<K: Ord, V>(a: &BTreeMap<K, V>, b: &BTreeMap<K, V>) -> usize {
            a.len() + b.keys().filter(|k| !a.contains_key(*k)).count()
        }
        let together = [
            ("ENDPOINTS_V4", union(&self.v4.endpoints, &present.v4.endpoints), limits::MAX_ENDPOINTS),
            ("ENDPOINTS_V6", union(&self.v6.endpoints, &present.v6.endpoints), limits::MAX_ENDPOINTS),
            ("ROUTES_V4", union(&self.v4.routes, &present.v4.routes), limits::MAX_ROUTES),
            ("ROUTES_V6", union(&self.v6.routes, &present.v6.routes), limits::MAX_ROUTES),
            ("EXCEPTS_V4", union(&self.v4.excepts, &present.v4.excepts), limits::MAX_EXCEPTS),
            ("EXCEPTS_V6", union(&self.v6.excepts, &present.v6.excepts), limits::MAX_EXCEPTS),
            ("POLICIES", union(&self.policies, &present.policies), limits::MAX_POLICIES),
            ("MEMBERS", union(&self.members, &present.members), limits::MAX_MEMBERS),
            ("ASSIGNMENTS", union(&self.assignments, &present.assignments), limits::MAX_ASSIGNMENTS),
            ("ACCOUNTS", union(&self.accounts, &present.accounts), limits::MAX_ACCOUNTS),
            ("EGRESS_INDEX_V4", union(&self.v4.egress_index, &present.v4.egress_index), limits::MAX_EGRESS_IPS),
            ("EGRESS_INDEX_V6", union(&self.v6.egress_index, &present.v6.egress_index), limits::MAX_EGRESS_IPS),
            ("NODE_INDEX", union(&self.node_index, &present.node_index), limits::MAX_NODE_ADDRESSES),
            ("MAC_INDEX", union(&self.mac_index, &present.mac_index), limits::MAX_MACS),
            ("UPLINKS", union(&self.uplinks, &present.uplinks), limits::MAX_UPLINKS),
            ("NAMES", union(&self.names, &present.names), limits::MAX_NAMES),
        ];
        let arrays =
            self.usage().into_iter().filter(|u| matches!(u.map, "CLASSES" | "MAGLEV" | "EGRESS_IPS" | "NODES"));
        let all = together.into_iter().chain(arrays.map(|u| (u.map, u.used, u.capacity)));
        match all.into_iter().find(|(_, wanted, capacity)| wanted > capacity) {
            Some((map, wanted, capacity)) => Err(Overflow { map, wanted, capacity }),
            None => Ok(()),
        }
    }
}
