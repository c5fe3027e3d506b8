//! The flow tables in the terms of the reference NAT.

use super::{
    nat::{Reply, Tuple},
    rig::now_tick,
};
use crate::datapath::{
    Pins,
    maps::{FamilyMaps, Maps, Slots},
};
use aya::{
    Pod,
    maps::{HashMap, Map, MapData, MapError, Queue},
};
use egress_common::{
    V4, V6,
    egress::EgressIp,
    endpoint::RouteKey,
    flow::{Flow, FlowKey, Fragment, FragmentKey, HeldKey, Reverse, Ticket, kind},
    limits::{COLLECT_ROUND_SHIFT, HELD_FRAME},
    net, tcp,
};
use std::{collections::BTreeMap, net::IpAddr};

/// A value of `HELD_*`.
type Held = [u8; HELD_FRAME + 8];

/// The forward half of a flow, from `FLOWS_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    pub reply: Reply,
    /// Whether it is translated, and not severed.
    pub translated: bool,
}

/// The reverse half of a flow, from `REVERSE_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backward {
    pub pod: IpAddr,
    pub pod_port: u16,
    pub confirmed: bool,
}

impl Backward {
    /// Returns the flow that `reply` belongs to.
    pub fn of(&self, reply: &Reply) -> Tuple {
        let (pod, pod_port) = (self.pod, self.pod_port);
        Tuple { pod, pod_port, server: reply.server, server_port: reply.server_port, proto: reply.proto }
    }
}

/// Conversion of addresses to and from the form in the maps.
trait Words: Pod + Ord {
    fn of(ip: IpAddr) -> Self;
    fn ip(self) -> IpAddr;
}

impl Words for V4 {
    fn of(ip: IpAddr) -> Self {
        let IpAddr::V4(ip) = ip else { panic!("not IPv4: {ip}") };
        net::v4(ip)
    }
    fn ip(self) -> IpAddr {
        net::from_v4(self).into()
    }
}

impl Words for V6 {
    fn of(ip: IpAddr) -> Self {
        let IpAddr::V6(ip) = ip else { panic!("not IPv6: {ip}") };
        net::v6(ip)
    }
    fn ip(self) -> IpAddr {
        net::from_v6(self).into()
    }
}

fn key<A: Words>(ip: IpAddr, port: u16, server: IpAddr, server_port: u16, proto: u8) -> FlowKey<A> {
    FlowKey {
        src: A::of(ip),
        dst: A::of(server),
        src_port: port.to_be(),
        dst_port: server_port.to_be(),
        proto: proto.into(),
    }
}

fn of_tuple<A: Words>(t: &Tuple) -> FlowKey<A> {
    key(t.pod, t.pod_port, t.server, t.server_port, t.proto)
}

fn of_reply<A: Words>(r: &Reply) -> FlowKey<A> {
    key(r.egress, r.port, r.server, r.server_port, r.proto)
}

fn tuple<A: Words>(key: &FlowKey<A>) -> Tuple {
    Tuple {
        pod: key.src.ip(),
        pod_port: u16::from_be(key.src_port),
        server: key.dst.ip(),
        server_port: u16::from_be(key.dst_port),
        proto: key.proto as u8,
    }
}

fn pinned<M: TryFrom<Map, Error = MapError>>(pins: &Pins, name: &str, suffix: &str) -> M {
    let data = MapData::from_pin(pins.map(&format!("{name}_{suffix}"))).unwrap();
    M::try_from(Map::from_map_data(data).unwrap()).unwrap()
}

fn empty<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>) {
    let keys: Vec<K> = map.keys().map(Result::unwrap).collect();
    keys.iter().for_each(|key| map.remove(key).unwrap());
}

/// The tables of one address family.
struct Side<A: Words>
where
    FlowKey<A>: Pod + Ord,
    Reverse<A>: Pod,
    RouteKey<A>: Pod,
    FragmentKey<A>: Pod,
    HeldKey<A>: Pod,
    Ticket<A>: Pod,
{
    maps: FamilyMaps<A>,
    fragments: HashMap<MapData, FragmentKey<A>, Fragment>,
    held: HashMap<MapData, HeldKey<A>, Held>,
    shares: HashMap<MapData, u32, u64>,
    tickets: Queue<MapData, Ticket<A>>,
}

impl<A: Words> Side<A>
where
    FlowKey<A>: Pod + Ord,
    Reverse<A>: Pod,
    RouteKey<A>: Pod,
    FragmentKey<A>: Pod,
    HeldKey<A>: Pod,
    Ticket<A>: Pod,
{
    fn open(pins: &Pins, maps: FamilyMaps<A>, suffix: &str) -> Self {
        Self {
            maps,
            fragments: pinned(pins, "FRAGMENTS", suffix),
            held: pinned(pins, "HELD", suffix),
            shares: pinned(pins, "SHARES", suffix),
            tickets: pinned(pins, "TICKETS", suffix),
        }
    }

    fn clear(&mut self) {
        self.maps.flows.entries().unwrap().keys().for_each(|key| self.maps.flows.remove(key).unwrap());
        self.maps.reverse.entries().unwrap().keys().for_each(|key| self.maps.reverse.remove(key).unwrap());
        empty(&mut self.fragments);
        empty(&mut self.held);
        empty(&mut self.shares);
    }

    fn forward(egress_ips: &Slots<EgressIp>, t: &Tuple, flow: &Flow) -> Forward {
        let egress = net::from_any(egress_ips.get(flow.egress).unwrap().addr);
        let (port, server, server_port, proto) = (u16::from_be(flow.port), t.server, t.server_port, t.proto);
        let reply = Reply { egress, port, server, server_port, proto };
        Forward { reply, translated: flow.kind == kind::TRANSLATED }
    }

    fn flow(&self, egress_ips: &Slots<EgressIp>, t: &Tuple) -> Option<Forward> {
        let flow = self.maps.flows.get(&of_tuple(t)).unwrap()?;
        Some(Self::forward(egress_ips, t, &flow))
    }

    fn flows(&self, egress_ips: &Slots<EgressIp>) -> impl Iterator<Item = (Tuple, Forward)> {
        let entries = self.maps.flows.entries().unwrap().into_iter();
        entries.map(|(key, flow)| (tuple(&key), Self::forward(egress_ips, &tuple(&key), &flow)))
    }

    fn backward(r: &Reverse<A>) -> Backward {
        let confirmed = r.state & tcp::seen::CONFIRMED != 0;
        Backward { pod: r.pod.ip(), pod_port: u16::from_be(r.pod_port), confirmed }
    }

    fn back(&self, reply: &Reply) -> Option<Backward> {
        self.maps.reverse.get(&of_reply(reply)).unwrap().as_ref().map(Self::backward)
    }

    fn backs(&self) -> impl Iterator<Item = (Reply, Backward)> {
        self.maps.reverse.entries().unwrap().into_iter().map(|(key, r)| {
            let Tuple { pod, pod_port, server, server_port, proto } = tuple(&key);
            (Reply { egress: pod, port: pod_port, server, server_port, proto }, Self::backward(&r))
        })
    }

    /// Makes both halves of a flow older by `ticks`.
    fn age(&mut self, t: &Tuple, reply: &Reply, ticks: u32) {
        let last_seen = now_tick().wrapping_sub(ticks);
        if let Some(flow) = self.maps.flows.get(&of_tuple(t)).unwrap() {
            self.maps.flows.set(&of_tuple(t), &Flow { last_seen, ..flow }).unwrap();
        }
        if let Some(value) = self.maps.reverse.get(&of_reply(reply)).unwrap() {
            self.maps.reverse.set(&of_reply(reply), &Reverse { last_seen, ..value }).unwrap();
        }
    }

    /// Marks every flow as not yet checked in the collector's current round.
    fn turn(&mut self) {
        let checked = (now_tick() >> COLLECT_ROUND_SHIFT).wrapping_sub(1);
        let tickets: Vec<_> = std::iter::from_fn(|| self.tickets.pop(0).ok()).collect();
        let live = |t: &Ticket<A>| self.maps.flows.get(&t.key).unwrap().is_some_and(|flow| flow.ticket == t.ticket);
        let live: Vec<_> = tickets.into_iter().filter(live).collect();
        live.into_iter().for_each(|t| self.tickets.push(Ticket { checked, ..t }, 0).unwrap());
    }
}

/// The tables of both families.
pub struct FlowTables {
    v4: Side<V4>,
    v6: Side<V6>,
    egress_ips: Slots<EgressIp>,
}

/// Calls a function of the tables of the address's family.
macro_rules! of {
    ($self:ident, $ip:expr, $($call:tt)*) => {
        if $ip.is_ipv4() { $self.v4.$($call)* } else { $self.v6.$($call)* }
    };
}

impl FlowTables {
    pub fn open(pins: &Pins) -> Self {
        let Maps { v4, v6, egress_ips, .. } = Maps::open(pins).unwrap();
        Self { v4: Side::open(pins, v4, "V4"), v6: Side::open(pins, v6, "V6"), egress_ips }
    }

    /// Removes all flows and datagrams.
    pub fn clear(&mut self) {
        self.v4.clear();
        self.v6.clear();
    }

    pub fn flow(&self, t: &Tuple) -> Option<Forward> {
        of!(self, t.pod, flow(&self.egress_ips, t))
    }

    pub fn flows(&self) -> BTreeMap<Tuple, Forward> {
        self.v4.flows(&self.egress_ips).chain(self.v6.flows(&self.egress_ips)).collect()
    }

    pub fn back(&self, reply: &Reply) -> Option<Backward> {
        of!(self, reply.egress, back(reply))
    }

    pub fn backs(&self) -> BTreeMap<Reply, Backward> {
        self.v4.backs().chain(self.v6.backs()).collect()
    }

    /// Removes the forward half of a flow.
    pub fn lose(&mut self, t: &Tuple) {
        of!(self, t.pod, maps.flows.remove(&of_tuple(t))).unwrap();
    }

    /// Removes the reverse half of a flow.
    pub fn lose_back(&mut self, reply: &Reply) {
        of!(self, reply.egress, maps.reverse.remove(&of_reply(reply))).unwrap();
    }

    /// Makes both halves of a flow older by `ticks`.
    pub fn age(&mut self, t: &Tuple, reply: &Reply, ticks: u32) {
        of!(self, t.pod, age(t, reply, ticks));
    }

    /// Marks every flow as not yet checked in the collector's current round.
    pub fn turn(&mut self) {
        self.v4.turn();
        self.v6.turn();
    }
}
