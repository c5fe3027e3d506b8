//! Encodes what a node should do as the contents of its maps. Pure.
//!
//! Named things (policies, egress IPs, nodes, endpoints, classes) get small numbers here. A number keeps its meaning as long as the thing
//! exists, even across restarts of the agent: the numbers are read back from the maps themselves.

pub mod accounts;
mod chunks;
pub mod fit;
mod names;
pub mod spread;
pub mod tables;
pub mod transport;

use names::{class_name, hash_of};
pub use names::{name_record, name_text};

use crate::{
    model::{Bandwidth, EndpointId, Family, NodeName, PolicyId, SubnetInfo},
    plan::maglev,
};
use chunks::Chunks;
use egress_common::{
    abi::{NameKey, name_kind},
    config::{self, DatapathConfig},
    egress::{BlockList, EgressIp, LOCAL_CARRIER, LeaseTable, Uplink, flags},
    endpoint::{
        AssignmentKey, Checked, Endpoint, Member, MemberKey, NO_POLICY, Policy, PolicyKey, RouteKey, except,
        policy_flags,
    },
    limits, net, port_block,
};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    str::FromStr,
    sync::Arc,
};
use tables::{Overflow, Tables};
use transport::TransportView;

/// A pod of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointView {
    /// Its addresses.
    pub ips: BTreeSet<IpAddr>,
    /// The policies that select it; empty if none does.
    pub class: BTreeSet<PolicyId>,
    /// The tick until which it may send on connections from before a policy selected it; 0 if it has none.
    pub history_until: u32,
    /// The interfaces that its addresses are behind, where that is known.
    pub interfaces: BTreeMap<IpAddr, u32>,
}

/// A slot of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotView {
    /// The egress IP.
    pub address: IpAddr,
    /// Its share of new flows.
    pub weight: u32,
    /// Whether new flows may choose it.
    pub usable: bool,
}

/// A policy in force on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyView {
    /// [`egress_common::endpoint::policy_flags`].
    pub flags: u32,
    /// Its slots, sorted by address.
    pub slots: Vec<SlotView>,
    /// The families in which gateways answer, but this node has no blocks of its slots: `onNoGateway: NodeIP` does not apply.
    pub waits: BTreeSet<Family>,
    /// The egress IPs that its endpoints are assigned to, under `PerEndpoint`.
    pub assignments: BTreeMap<EndpointId, BTreeSet<IpAddr>>,
    /// Whether the tables have no record of it, for lack of room ([`fit`]), so that the programs drop what leads to it.
    pub unrecorded: bool,
}

/// An egress IP that this node uses, carries, or may come to carry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EgressView {
    /// The carrier that packets go to.
    pub gateway: Option<NodeName>,
    /// The carriers that flows are spread over; empty if all flows go to `gateway`.
    pub spread: Vec<NodeName>,
    /// Whether this node sends packets with it to the outside.
    pub forwards: bool,
    /// Its epoch.
    pub epoch: u64,
    /// The interface on which this node sends its packets, if it forwards them.
    pub interface: Option<u32>,
    /// Whether the address is a node's own.
    pub node_address: bool,
    /// Whether an interface of this node has the address.
    pub here: bool,
    /// Whether ARP and NDP are not answered for it.
    pub silent: bool,
    /// The dedicated subnet that its packets go into, if this node carries it.
    pub subnet: Option<SubnetInfo>,
    /// The bandwidth limit of what this node sends with it, if this node carries it.
    pub limit: Option<Bandwidth>,
    /// Blocks that this node may take ports from.
    pub blocks: BTreeSet<u16>,
    /// The lessee of every leased block.
    pub leases: BTreeMap<u16, NodeName>,
}

/// Everything that a node's datapath should do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// This node.
    pub node: Option<NodeName>,
    /// Pods of this node.
    pub endpoints: BTreeMap<EndpointId, EndpointView>,
    /// Policies that select any of them.
    pub policies: BTreeMap<PolicyId, PolicyView>,
    /// The merged destinations of each class that occurs.
    pub classes: BTreeMap<BTreeSet<PolicyId>, Vec<(IpNet, Option<PolicyId>)>>,
    /// Destinations that no policy touches.
    pub excepts: BTreeSet<IpNet>,
    /// The excepted destinations in which no pod of this node has an address.
    pub elsewhere: BTreeSet<IpNet>,
    /// The excepted destination that is the Service of the API server, if it is known.
    pub api_server: Option<IpNet>,
    /// Egress IPs.
    pub egress_ips: BTreeMap<IpAddr, EgressView>,
    /// Tunnel addresses of all nodes; packets are sent to the first one.
    pub nodes: BTreeMap<NodeName, Vec<IpAddr>>,
    /// How to send to other nodes; those that are not named are reached through the tunnel device.
    pub transports: BTreeMap<NodeName, TransportView>,
    /// The MAC addresses that nodes on a common link send from.
    pub macs: BTreeMap<[u8; 6], NodeName>,
    /// Interfaces on which packets of egress IPs arrive, with their MAC addresses: those that answer for egress IPs, and those of the
    /// underlay.
    pub uplinks: BTreeMap<u32, [u8; 6]>,
    /// By node with leases: the revision up to which its leases are among those of `egress_ips`.
    pub known_leases: BTreeMap<NodeName, u64>,
    /// The configuration record; the encoder fills in the node, and the writer the generation.
    pub config: Option<DatapathConfig>,
}

/// The numbers of named things.
#[derive(Clone, Debug)]
pub(super) struct Numbers<T: Ord + Clone>(pub(super) BTreeMap<T, u32>);

impl<T: Ord + Clone> Numbers<T> {
    /// Assigns a number to everything that is `wanted`: the old number if there is one, otherwise a free one from 1 up. Numbers in `taken`
    /// are not free.
    fn assign(&self, wanted: impl IntoIterator<Item = T>, taken: impl IntoIterator<Item = u32>) -> Self {
        let taken: BTreeSet<u32> = taken.into_iter().chain(self.0.values().copied()).collect();
        let mut free = (1..).filter(|n| !taken.contains(n));
        let number = |t: T| {
            let n = self.0.get(&t).copied().or_else(|| free.next());
            n.map(|n| (t, n))
        };
        Self(wanted.into_iter().filter_map(number).collect())
    }
}

/// Turns views into tables. Remembers which numbers are assigned.
pub struct Encoder {
    pub(super) policies: Numbers<PolicyId>,
    egress: Numbers<IpAddr>,
    nodes: Numbers<NodeName>,
    endpoints: Numbers<EndpointId>,
    namespaces: Numbers<Arc<str>>,
    classes: Numbers<BTreeSet<PolicyId>>,
    /// The numbers of an earlier agent's classes, by [`class_name`], until tables are made for the first time.
    left_classes: BTreeMap<String, u32>,
}

fn named<T: FromStr>(tables: &Tables, kind: u32) -> impl Iterator<Item = (T, u32)> {
    tables
        .names
        .iter()
        .filter(move |(k, _)| k.kind == kind)
        .filter_map(|(k, v)| Some((name_text(v).parse().ok()?, k.id)))
}

/// Returns how many bytes may wait for a limited egress IP: what its rate lets pass in 50 ms, with room for a few of the largest packets.
fn queue(limit: Bandwidth) -> u32 {
    u32::try_from(limit.rate_bps / 8 / 20).unwrap_or(u32::MAX).clamp(limits::MIN_SHAPER_QUEUE, limits::MAX_SHAPER_QUEUE)
}

impl Encoder {
    /// Recovers the numbers that are in use in the maps of an earlier agent, if any.
    pub fn recover(present: &Tables) -> Self {
        let nodes = present.names.iter().filter(|(k, _)| k.kind == name_kind::NODE);
        Self {
            policies: Numbers(named(present, name_kind::POLICY).collect()),
            egress: Numbers(present.egress_ips.iter().map(|(i, e)| (net::from_any(e.addr), *i)).collect()),
            nodes: Numbers(nodes.map(|(k, v)| (NodeName::from(name_text(v).as_str()), k.id)).collect()),
            endpoints: Numbers(named(present, name_kind::ENDPOINT).collect()),
            namespaces: accounts::recover(present),
            classes: Numbers(BTreeMap::new()),
            left_classes: named(present, name_kind::CLASS).collect(),
        }
    }

    /// Returns the tables that carry out `view`, given what is in the maps now.
    pub fn encode(&mut self, view: &NodeView, present: &Tables) -> Result<Tables, Overflow> {
        let (next, tables) = self.try_encode(view, present);
        tables.check(present)?;
        *self = next;
        Ok(tables)
    }

    /// Does the same whether the tables fit or not. Also returns the numbers in them.
    fn try_encode(&self, view: &NodeView, present: &Tables) -> (Self, Tables) {
        let next = Self {
            policies: self.policies.assign(view.policies.keys().cloned(), named_ids(present, name_kind::POLICY)),
            egress: egress_numbers(view, present),
            nodes: self.nodes.assign(view.nodes.keys().cloned(), named_ids(present, name_kind::NODE)),
            endpoints: endpoint_numbers(&self.endpoints, view, present),
            namespaces: self.namespaces.assign(accounts::namespaces(view), named_ids(present, name_kind::NAMESPACE)),
            classes: self
                .known_classes(view)
                .assign(view.classes.keys().filter(|c| !c.is_empty()).cloned(), present_classes(present)),
            left_classes: BTreeMap::new(),
        };
        let mut tables = Tables::default();
        next.nodes(view, &mut tables);
        next.egress_ips(view, present, &mut tables);
        next.policies(view, present, &mut tables);
        next.endpoints(view, &mut tables);
        next.accounts(view, present, &mut tables);
        next.names(&mut tables);
        for (index, mac) in &view.uplinks {
            tables.uplinks.insert(*index, Uplink { mac: transport::mac(*mac), reserved: 0 });
        }
        let own = view.node.as_ref().and_then(|n| next.nodes.0.get(n)).copied().unwrap_or(0);
        let carries = if view.egress_ips.values().any(|e| e.forwards) { config::flags::CARRIES } else { 0 };
        tables.config = view.config.map(|c| DatapathConfig { node: own, flags: c.flags | carries, ..c });
        (next, tables)
    }

    fn known_classes(&self, view: &NodeView) -> Numbers<BTreeSet<PolicyId>> {
        let (mut known, mut left) = (self.classes.clone(), self.left_classes.clone());
        for class in view.classes.keys().filter(|_| !self.left_classes.is_empty()) {
            // Each number is used once: anyone can choose policy names whose hashes are the same.
            known.0.extend(left.remove(&class_name(class)).map(|number| (class.clone(), number)));
        }
        known
    }

    fn nodes(&self, view: &NodeView, tables: &mut Tables) {
        for (name, addresses) in &view.nodes {
            let (Some(&index), Some(first)) = (self.nodes.0.get(name), addresses.first()) else { continue };
            tables.nodes.insert(index, transport::record(*first, view.transports.get(name)));
            tables.node_index.extend(addresses.iter().map(|a| (net::any(*a), index)));
        }
        let known =
            view.macs.iter().filter_map(|(mac, name)| Some((transport::mac_key(*mac), *self.nodes.0.get(name)?)));
        tables.mac_index = known.collect();
        let leases = view.known_leases.iter().filter_map(|(name, up_to)| Some((*self.nodes.0.get(name)?, *up_to)));
        tables.known_leases = leases.collect();
    }

    fn egress_ips(&self, view: &NodeView, present: &Tables, tables: &mut Tables) {
        // An entry that is no longer wanted is retired: the collector needs it to find the other halves of its flows, and the next address
        // to get its index has a higher generation.
        let retired = |e: &EgressIp| EgressIp { addr: e.addr, generation: e.generation, ..EgressIp::EMPTY };
        tables.egress_ips = present.egress_ips.iter().map(|(i, e)| (*i, retired(e))).collect();
        // A hash map, because each lease names a node, and a gateway has many leases.
        let nodes: HashMap<&NodeName, u16> = self.nodes.0.iter().map(|(name, number)| (name, *number as u16)).collect();
        for (address, e) in &view.egress_ips {
            let Some(&index) = self.egress.0.get(address) else { continue };
            let addr = net::any(*address);
            let generation = match present.egress_ips.get(&index) {
                Some(old) if old.addr == addr => old.generation,
                Some(old) => old.generation.wrapping_add(1),
                None => 1,
            };
            let gateway = e.gateway.as_ref().and_then(|n| self.nodes.0.get(n)).copied().unwrap_or(0);
            let is_spread = !e.spread.is_empty();
            if is_spread {
                let number = |name: &NodeName| match self.nodes.0.get(name) {
                    _ if view.node.as_ref() == Some(name) => Some(LOCAL_CARRIER),
                    number => number.and_then(|number| u16::try_from(*number).ok()),
                };
                let before = present.carriers.get(&index).copied().unwrap_or(spread::NONE);
                let members: Vec<u16> = e.spread.iter().filter_map(number).collect();
                tables.carriers.insert(index, spread::table(before, &members));
            }
            let mut bits = flags::LISTED;
            for (set, bit) in [
                (e.forwards, flags::CARRIED),
                (e.forwards && e.gateway == view.node, flags::LOCAL),
                (is_spread, flags::SPREAD),
                (e.node_address, flags::NODE_ADDRESS),
                (e.silent, flags::SILENT),
                (e.subnet.is_some(), flags::SUBNET),
                (e.here, flags::HERE),
            ] {
                bits |= if set { bit } else { 0 };
            }
            let record = EgressIp {
                addr,
                generation,
                gateway,
                flags: bits,
                ifindex: e.interface.unwrap_or(0),
                epoch_low: e.epoch as u32,
                epoch_high: (e.epoch >> 32) as u32,
                queue: e.limit.map_or(0, queue),
                via: e.subnet.map_or([0; 4], |subnet| net::any(subnet.gateway)),
                vlan: e.subnet.and_then(|subnet| subnet.vlan).unwrap_or(0).into(),
            };
            tables.egress_ips.insert(index, record);
            match address {
                IpAddr::V4(a) => drop(tables.v4.egress_index.insert(net::v4(*a), index)),
                IpAddr::V6(a) => drop(tables.v6.egress_index.insert(net::v6(*a), index)),
            }
            if !e.blocks.is_empty() {
                let mut list = BlockList { count: e.blocks.len() as u32, blocks: [0; port_block::COUNT as usize] };
                // The kernel copies a list that programs are reading. Places beyond its end also hold this node's blocks, so that an old
                // length with new blocks, or a new length with old blocks, yields no other node's ports.
                for (place, block) in list.blocks.iter_mut().zip(e.blocks.iter().cycle()) {
                    *place = *block;
                }
                tables.blocks.insert(index, list);
            }
            let mut table = LeaseTable { node: [0; port_block::ROWS] };
            for (block, node) in &e.leases {
                let row = port_block::row(port_block::first_port(*block));
                table.node[row] = nodes.get(node).copied().unwrap_or(0);
            }
            if table.node.iter().any(|n| *n != 0) {
                tables.leases.insert(index, table);
            }
        }
    }

    fn policies(&self, view: &NodeView, present: &Tables, tables: &mut Tables) {
        let mut allocator = Chunks::new(present);
        for (id, policy) in view.policies.iter().filter(|(_, policy)| !policy.unrecorded) {
            let Some(&index) = self.policies.0.get(id) else { continue };
            let mut number = 0;
            for slot in &policy.slots {
                let Some(&egress) = self.egress.0.get(&slot.address) else { continue };
                let Some(generation) = tables.egress_ips.get(&egress).map(|e| e.generation) else { continue };
                let usable = slot.usable as u32;
                let member = Member { generation, slot: number, weight: slot.weight, usable, check: 0 };
                enter(&mut tables.members, MemberKey { policy: index, egress }, member);
                number += 1;
            }
            for (of, family) in Family::ALL.into_iter().zip([4, 6]) {
                let key = PolicyKey { policy: index, family };
                let table = self.maglev(policy, family);
                let start = allocator.place(present, &key, &table, tables);
                let (seed, table_len) = (seed(id), table.len() as u32);
                let not_now = if policy.waits.contains(&of) { policy_flags::ON_NO_GATEWAY_NODE_IP } else { 0 };
                let record = Policy { flags: policy.flags & !not_now, table: start, table_len, seed, check: 0 };
                enter(&mut tables.policies, key, record);
            }
            for (endpoint, addresses) in &policy.assignments {
                let Some(&endpoint) = self.endpoints.0.get(endpoint) else { continue };
                for address in addresses {
                    let Some(&egress) = self.egress.0.get(address) else { continue };
                    let family = if address.is_ipv4() { 4 } else { 6 };
                    tables.assignments.insert(AssignmentKey { endpoint, policy: index, family }, egress);
                }
            }
        }
    }

    /// Returns the Maglev table of a policy's usable slots of one family, as indices of egress IPs.
    fn maglev(&self, policy: &PolicyView, family: u32) -> Vec<u16> {
        let wanted = |s: &&SlotView| s.usable && s.weight > 0 && s.address.is_ipv4() == (family == 4);
        let usable = policy.slots.iter().filter(wanted);
        let slots: Vec<(u16, ([u8; 16], u32))> = usable
            .filter_map(|s| Some((*self.egress.0.get(&s.address)? as u16, (maglev::key(s.address), s.weight))))
            .collect();
        if slots.is_empty() {
            return Vec::new();
        }
        let keys: Vec<_> = slots.iter().map(|(_, k)| *k).collect();
        maglev::table(&keys, maglev_len(policy, family)).into_iter().map(|i| slots[i as usize].0).collect()
    }

    fn endpoints(&self, view: &NodeView, tables: &mut Tables) {
        for (class, table) in &view.classes {
            let Some(&class) = self.classes.0.get(class) else { continue };
            for (destination, winner) in table {
                let policy = winner.as_ref().and_then(|p| self.policies.0.get(p)).copied().unwrap_or(NO_POLICY);
                let len = 32 + u32::from(destination.prefix_len());
                match destination {
                    IpNet::V4(n) => {
                        let key = RouteKey { class, addr: net::v4(n.network()) };
                        tables.v4.routes.insert((key, len), policy);
                    }
                    IpNet::V6(n) => {
                        let key = RouteKey { class, addr: net::v6(n.network()) };
                        tables.v6.routes.insert((key, len), policy);
                    }
                }
            }
        }
        for net_ in &view.excepts {
            let len = u32::from(net_.prefix_len());
            let value = match net_ {
                _ if view.api_server == Some(*net_) => except::SERVICE,
                _ if view.elsewhere.contains(net_) => except::ELSEWHERE,
                _ => except::ANYWHERE,
            };
            match net_ {
                IpNet::V4(n) => drop(tables.v4.excepts.insert((net::v4(n.network()), len), value)),
                IpNet::V6(n) => drop(tables.v6.excepts.insert((net::v6(n.network()), len), value)),
            }
        }
        for (id, endpoint) in &view.endpoints {
            let namespace = self.namespaces.0.get(&id.namespace).filter(|_| !endpoint.class.is_empty());
            let namespace = namespace.copied().unwrap_or(0);
            let Some(&id) = self.endpoints.0.get(id) else { continue };
            let class = self.classes.0.get(&endpoint.class).copied().unwrap_or(0);
            for ip in &endpoint.ips {
                let ifindex = endpoint.interfaces.get(ip).copied().unwrap_or(0);
                let history_until = endpoint.history_until;
                let record = Endpoint { id, class, history_until, ifindex, namespace, check: 0 };
                match ip {
                    IpAddr::V4(a) => enter(&mut tables.v4.endpoints, net::v4(*a), record),
                    IpAddr::V6(a) => enter(&mut tables.v6.endpoints, net::v6(*a), record),
                }
            }
        }
    }

    fn names(&self, tables: &mut Tables) {
        let mut add = |kind, id, text: String| {
            tables.names.insert(NameKey { kind, id }, name_record(&text));
        };
        self.policies.0.iter().for_each(|(p, n)| add(name_kind::POLICY, *n, p.to_string()));
        self.nodes.0.iter().for_each(|(p, n)| add(name_kind::NODE, *n, p.to_string()));
        self.endpoints.0.iter().for_each(|(p, n)| add(name_kind::ENDPOINT, *n, p.to_string()));
        self.namespaces.0.iter().for_each(|(p, n)| add(name_kind::NAMESPACE, *n, p.to_string()));
        self.classes.0.iter().for_each(|(p, n)| add(name_kind::CLASS, *n, class_name(p)));
    }
}

/// Returns the ids that a kind of thing has in the maps. Names are written before anything that uses their ids, and removed after it: no
/// other id is in use.
fn named_ids(present: &Tables, kind: u32) -> impl Iterator<Item = u32> {
    present.names.keys().filter(move |k| k.kind == kind).map(|k| k.id)
}

/// Returns the classes that any entry in the maps names. A class whose policies steer nothing has endpoints and no routes.
fn present_classes(present: &Tables) -> impl Iterator<Item = u32> {
    let routes = present.v4.routes.keys().map(|(k, _)| k.class).chain(present.v6.routes.keys().map(|(k, _)| k.class));
    let endpoints = present.v4.endpoints.values().chain(present.v6.endpoints.values()).map(|e| e.class);
    routes.chain(endpoints).chain(named_ids(present, name_kind::CLASS))
}

/// Returns the indices of egress IPs. An address keeps the index that it has in the maps, even if it was retired and comes back. Other
/// addresses get an index that was never used or, if none is left, that of a retired address.
fn egress_numbers(view: &NodeView, present: &Tables) -> Numbers<IpAddr> {
    let known: BTreeMap<IpAddr, u32> = present.egress_ips.iter().map(|(i, e)| (net::from_any(e.addr), *i)).collect();
    let live: BTreeSet<u32> =
        present.v4.egress_index.values().chain(present.v6.egress_index.values()).copied().collect();
    let fresh = (1..limits::MAX_EGRESS_IPS as u32).filter(|i| !present.egress_ips.contains_key(i));
    let retired = known.iter().filter(|(a, i)| !view.egress_ips.contains_key(*a) && !live.contains(i)).map(|(_, i)| *i);
    // An index beyond the end of the table makes the whole table be refused.
    let mut free = fresh.chain(retired).chain(limits::MAX_EGRESS_IPS as u32..);
    let number = |a: &IpAddr| known.get(a).copied().or_else(|| free.next()).map(|n| (*a, n));
    Numbers(view.egress_ips.keys().filter_map(number).collect())
}

/// Returns the length of a policy's Maglev table of one family, if that table is not empty. It depends on all slots of the family, usable
/// or not, so the failure of a gateway does not change it.
fn maglev_len(policy: &PolicyView, family: u32) -> u32 {
    maglev::size(policy.slots.iter().filter(|s| s.address.is_ipv4() == (family == 4)).count())
}

/// Returns the numbers of endpoints, derived from their names. A pod that follows another one, perhaps with its address, has another
/// number. All state of a pod refers to it by this number.
fn endpoint_numbers(known: &Numbers<EndpointId>, view: &NodeView, present: &Tables) -> Numbers<EndpointId> {
    let mut taken: BTreeSet<u32> =
        named_ids(present, name_kind::ENDPOINT).chain(known.0.values().copied()).chain([0]).collect();
    let mut number = |id: &EndpointId| {
        known.0.get(id).copied().unwrap_or_else(|| {
            let first = hash_of(&id.to_string());
            let free = (0..=u32::MAX).map(|i| first.wrapping_add(i)).find(|n| !taken.contains(n)).unwrap_or(first);
            taken.insert(free);
            free
        })
    };
    Numbers(view.endpoints.keys().map(|id| (id.clone(), number(id))).collect())
}

/// Puts a record into its table, with its checksum.
fn enter<K: Ord, V: Checked<K>>(table: &mut BTreeMap<K, V>, key: K, record: V) {
    let record = record.sealed(&key);
    table.insert(key, record);
}

/// Returns the seed of a policy's hashes: the same on every node, different between policies.
pub fn seed(policy: &PolicyId) -> u32 {
    hash_of(&policy.to_string())
}
