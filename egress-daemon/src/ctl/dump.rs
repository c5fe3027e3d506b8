//! The contents of the pinned maps, read once, with the lookups that views and `explain` share. [`Dump::read`] does the I/O; the rest is
//! pure.

use aya::Pod;
use egress_common::{
    V4, V6,
    abi::{NameKey, TICK_SHIFT, name_kind},
    egress::EgressIp,
    endpoint::{Endpoint, Policy, PolicyKey, RouteKey},
    flow::{Flow, FlowKey, Inbound, Reverse, kind},
    limits::MAGLEV_CHUNK,
    net,
    verdict::Counter,
};
use egress_core::encode::{name_text, tables::Tables};
use egress_node::datapath::{
    Pins,
    maps::{FamilyMaps, Maps, MapsError},
    monotonic_ns,
    write::MapWriter,
};
use ipnet::IpNet;
use std::{collections::BTreeMap, net::IpAddr};

/// A flow of either address family. Ports are in host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowEntry {
    /// The pod's address.
    pub pod: IpAddr,
    /// The pod's port, or the identifier of an ICMP query.
    pub pod_port: u16,
    /// The remote address.
    pub remote: IpAddr,
    /// The remote port; 0 for ICMP.
    pub remote_port: u16,
    /// IP protocol number.
    pub proto: u32,
    /// Whether the datapath leaves its packets alone. If so, only the ticks and the TCP state of [`flow`](Self::flow) are meaningful.
    pub untouched: bool,
    /// For an untouched flow: whether the pod opened it, so that `existingConnections: Drop` cuts it.
    pub own: bool,
    /// The state for outgoing packets.
    pub flow: Flow,
    /// The state for replies; absent for an untouched flow.
    pub back: Option<Back>,
}

/// The state that the datapath keeps for the replies of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Back {
    /// TCP flags seen from the remote side.
    pub state: u16,
    /// Tick of the last reply.
    pub last_seen: u32,
}

impl FlowEntry {
    /// Returns the 5-tuple, the sort key of dumps.
    pub fn key(&self) -> (IpAddr, IpAddr, u32, u16, u16) {
        (self.pod, self.remote, self.proto, self.remote_port, self.pod_port)
    }
    /// Returns the translated port, in host byte order.
    pub fn port(&self) -> u16 {
        u16::from_be(self.flow.port)
    }
    /// Returns the tick of the last packet in either direction.
    pub fn last_seen(&self) -> u32 {
        self.flow.last_seen.max(self.back.map_or(0, |back| back.last_seen))
    }
    /// Returns whether the datapath translates its packets.
    pub fn translated(&self) -> bool {
        !self.untouched && self.flow.kind == kind::TRANSLATED
    }
}

/// The contents of the maps.
#[derive(Clone, Debug, Default)]
pub struct Dump {
    /// The tables that the agent wrote.
    pub tables: Tables,
    /// Flows of both families, sorted; empty if not requested.
    pub flows: Vec<FlowEntry>,
    /// The counters.
    pub counters: BTreeMap<Counter, u64>,
    /// `CLOCK_MONOTONIC` time in ns until which this node answers ARP and NDP.
    pub deadline: u64,
    /// `CLOCK_MONOTONIC` time in ns at which the maps were read.
    pub now: u64,
}

impl Dump {
    /// Reads the maps; the flows only on demand, since there may be a million of them.
    pub fn read(pins: &Pins, flows: bool) -> Result<Self, MapsError> {
        let maps = Maps::open(pins)?;
        let counters = maps.counters()?;
        let deadline = maps.deadline.get(egress_common::egress::deadline::ABLE)?;
        let writer = MapWriter::open(maps)?;
        let mut dump = Self { tables: writer.present().clone(), counters, deadline, ..Self::default() };
        if flows {
            read_flows(&writer.maps().v4, |a| net::from_v4(a).into(), &mut dump.flows)?;
            read_flows(&writer.maps().v6, |a| net::from_v6(a).into(), &mut dump.flows)?;
        }
        // Read after the flows, so that no flow appears to be from the future.
        dump.now = monotonic_ns();
        Ok(dump)
    }

    /// Returns the seconds since a tick, to within one tick (1.07 s).
    pub fn seconds_since(&self, tick: u32) -> u64 {
        let now = (self.now >> TICK_SHIFT) as u32;
        (u64::from(now.saturating_sub(tick)) << TICK_SHIFT) / 1_000_000_000
    }

    /// Returns the seconds until a tick, to within one tick; 0 for a past tick.
    pub fn seconds_until(&self, tick: u32) -> u64 {
        let now = (self.now >> TICK_SHIFT) as u32;
        (u64::from(tick.saturating_sub(now)) << TICK_SHIFT) / 1_000_000_000
    }

    fn name(&self, kind: u32, id: u32) -> Option<String> {
        self.tables.names.get(&NameKey { kind, id }).map(name_text)
    }

    /// Returns a policy's name, or its number if the maps hold no name.
    pub fn policy_name(&self, index: u32) -> String {
        self.name(name_kind::POLICY, index).unwrap_or_else(|| format!("#{index}"))
    }

    /// Returns a node's name, or its number if the maps hold no name; `None` for node 0.
    pub fn node_name(&self, index: u32) -> Option<String> {
        (index != 0).then(|| self.name(name_kind::NODE, index).unwrap_or_else(|| format!("#{index}")))
    }

    /// Returns this node's name.
    pub fn own_name(&self) -> Option<String> {
        self.node_name(self.tables.config?.node)
    }

    /// Returns an endpoint's `namespace/name`, or its number if the maps hold no name.
    pub fn endpoint_name(&self, id: u32) -> String {
        match self.name(name_kind::ENDPOINT, id) {
            Some(name) => name.splitn(3, '/').take(2).collect::<Vec<_>>().join("/"),
            None => format!("#{id}"),
        }
    }

    /// Returns the endpoint with this address.
    pub fn endpoint(&self, ip: IpAddr) -> Option<Endpoint> {
        match ip {
            IpAddr::V4(a) => self.tables.v4.endpoints.get(&net::v4(a)),
            IpAddr::V6(a) => self.tables.v6.endpoints.get(&net::v6(a)),
        }
        .copied()
    }

    /// Returns every endpoint with its addresses, by number.
    pub fn endpoints(&self) -> BTreeMap<u32, (Endpoint, Vec<IpAddr>)> {
        let v4 = self.tables.v4.endpoints.iter().map(|(a, e)| (IpAddr::from(net::from_v4(*a)), *e));
        let v6 = self.tables.v6.endpoints.iter().map(|(a, e)| (IpAddr::from(net::from_v6(*a)), *e));
        let mut all: BTreeMap<u32, (Endpoint, Vec<IpAddr>)> = BTreeMap::new();
        for (ip, endpoint) in v4.chain(v6) {
            all.entry(endpoint.id).or_insert((endpoint, Vec::new())).1.push(ip);
        }
        all.values_mut().for_each(|(_, ips)| ips.sort());
        all
    }

    /// Returns the name of the pod with this address.
    pub fn pod_name(&self, ip: IpAddr) -> Option<String> {
        self.endpoint(ip).map(|endpoint| self.endpoint_name(endpoint.id))
    }

    /// Returns the name of a flow's pod; `None` if the pod is gone. A flow can outlive its pod, whose address another pod may have by then.
    pub fn pod_of(&self, flow: &FlowEntry) -> Option<String> {
        let id = flow.flow.endpoint;
        let is_named = self.tables.names.contains_key(&NameKey { kind: name_kind::ENDPOINT, id });
        let is_known = is_named || self.endpoint(flow.pod).is_some_and(|endpoint| endpoint.id == id);
        is_known.then(|| self.endpoint_name(id))
    }

    /// Returns the egress IPs in use, by index.
    pub fn egress_ips(&self) -> impl Iterator<Item = (u32, IpAddr, &EgressIp)> {
        let used = self.tables.egress_ips.iter().filter(|(_, e)| e.addr != [0; 4]);
        used.map(|(index, e)| (*index, net::from_any(e.addr), e))
    }

    /// Returns the egress IP with this index, if it is in use.
    pub fn egress_ip(&self, index: u32) -> Option<(IpAddr, &EgressIp)> {
        let e = self.tables.egress_ips.get(&index).filter(|e| e.addr != [0; 4])?;
        Some((net::from_any(e.addr), e))
    }

    /// Returns the tunnel address of a node.
    pub fn node_address(&self, index: u32) -> Option<IpAddr> {
        self.tables.nodes.get(&index).filter(|node| node.present != 0).map(|node| net::from_any(node.addr))
    }

    /// Returns the blocks of an egress IP from which this node may take ports.
    pub fn blocks(&self, egress: u32) -> &[u16] {
        match self.tables.blocks.get(&egress) {
            Some(list) => &list.blocks[..(list.count as usize).min(list.blocks.len())],
            None => &[],
        }
    }

    /// Returns the longest excepted prefix that covers the address.
    pub fn except(&self, ip: IpAddr) -> Option<IpNet> {
        self.excepts().filter(|net| net.contains(&ip)).max_by_key(IpNet::prefix_len)
    }

    fn excepts(&self) -> impl Iterator<Item = IpNet> {
        let v4 = self.tables.v4.excepts.keys().map(|(a, len)| net_of(net::from_v4(*a).into(), *len));
        let v6 = self.tables.v6.excepts.keys().map(|(a, len)| net_of(net::from_v6(*a).into(), *len));
        v4.chain(v6).flatten()
    }

    /// Returns all routes, as (class, destination, policy); policy 0 excludes the destination from all policies.
    pub fn routes(&self) -> impl Iterator<Item = (u32, IpNet, u32)> {
        fn routes<A: Copy + Ord>(
            table: &BTreeMap<(RouteKey<A>, u32), u32>,
            ip: impl Fn(A) -> IpAddr,
        ) -> impl Iterator<Item = (u32, IpNet, u32)> {
            table.iter().filter_map(move |((key, len), policy)| {
                Some((key.class, net_of(ip(key.addr), len.checked_sub(32)?)?, *policy))
            })
        }
        let v4 = routes(&self.tables.v4.routes, |a| net::from_v4(a).into());
        v4.chain(routes(&self.tables.v6.routes, |a| net::from_v6(a).into()))
    }

    /// Returns the route that the datapath finds for a class and a destination.
    pub fn route(&self, class: u32, ip: IpAddr) -> Option<(IpNet, u32)> {
        let fits = self.routes().filter(|(c, net, _)| *c == class && net.contains(&ip));
        fits.map(|(_, net, policy)| (net, policy)).max_by_key(|(net, _)| net.prefix_len())
    }

    /// Returns the part of a policy for one address family.
    pub fn policy(&self, policy: u32, ipv6: bool) -> Option<&Policy> {
        self.tables.policies.get(&PolicyKey { policy, family: if ipv6 { 6 } else { 4 } })
    }

    /// Returns entry `at` of a policy's Maglev table: the index of an egress IP.
    pub fn maglev(&self, policy: &Policy, at: u32) -> Option<u32> {
        let chunk = self.tables.maglev.get(&(policy.table + at / MAGLEV_CHUNK as u32))?;
        Some(u32::from(chunk.egress[at as usize % MAGLEV_CHUNK]))
    }
}

fn net_of(ip: IpAddr, len: u32) -> Option<IpNet> {
    IpNet::new(ip, u8::try_from(len).ok()?).ok()
}

fn read_flows<A: Pod + Ord>(
    maps: &FamilyMaps<A>,
    ip: impl Fn(A) -> IpAddr,
    all: &mut Vec<FlowEntry>,
) -> Result<(), MapsError>
where
    FlowKey<A>: Pod + Ord,
    Reverse<A>: Pod,
    RouteKey<A>: Pod + Ord,
{
    let reverse = maps.reverse.entries()?;
    // Keyed by the pod's 5-tuple, to find the reply half of each flow below.
    let back: BTreeMap<FlowKey<A>, Back> = reverse
        .into_iter()
        .map(|(k, r)| {
            let key = FlowKey { src: r.pod, dst: k.dst, src_port: r.pod_port, dst_port: k.dst_port, proto: k.proto };
            (key, Back { state: r.state, last_seen: r.last_seen })
        })
        .collect();
    let start = all.len();
    all.extend(maps.flows.entries()?.into_iter().map(|(k, flow)| FlowEntry {
        pod: ip(k.src),
        pod_port: u16::from_be(k.src_port),
        remote: ip(k.dst),
        remote_port: u16::from_be(k.dst_port),
        proto: k.proto,
        untouched: false,
        own: false,
        flow,
        back: back.get(&k).copied(),
    }));
    all.extend(maps.inbound.entries()?.into_iter().map(|(k, record)| FlowEntry {
        pod: ip(k.src),
        pod_port: u16::from_be(k.src_port),
        remote: ip(k.dst),
        remote_port: u16::from_be(k.dst_port),
        proto: k.proto,
        untouched: true,
        own: record.own != 0,
        flow: left_alone(&record),
        back: None,
    }));
    all[start..].sort_by_key(FlowEntry::key);
    Ok(())
}

/// Returns the fields of an untouched record that tools show, as a flow.
fn left_alone(record: &Inbound) -> Flow {
    Flow {
        config_generation: record.generation,
        endpoint: record.endpoint,
        last_seen: record.last_seen,
        created: record.created,
        state: record.state,
        ..Flow::EMPTY
    }
}

/// Returns the datapath's hash of the 5-tuple; `None` if the addresses are of different families.
pub fn flow_hash(flow: &FlowEntry, seed: u32) -> Option<u32> {
    fn hash<A: egress_common::hash::Words>(src: A, dst: A, flow: &FlowEntry, seed: u32) -> u32 {
        let (src_port, dst_port) = (flow.pod_port.to_be(), flow.remote_port.to_be());
        egress_common::hash::flow(&FlowKey { src, dst, src_port, dst_port, proto: flow.proto }, seed)
    }
    match (flow.pod, flow.remote) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => Some(hash::<V4>(net::v4(src), net::v4(dst), flow, seed)),
        (IpAddr::V6(src), IpAddr::V6(dst)) => Some(hash::<V6>(net::v6(src), net::v6(dst), flow, seed)),
        _ => None,
    }
}
