//! The events of the model: the random steps of an episode, and the possible tables.

use super::{
    Random,
    datagrams::Part,
    frames::{ICMP, ICMPV6, TCP, UDP},
    nat::{ACK, FIN, RST, SYN, Tuple},
    races::{Race, race},
    rig::*,
    scenes,
};
use egress_common::{config::flags, port_block};
use egress_core::encode::{EndpointView, NodeView, PolicyView, SlotView};
use std::{collections::BTreeSet, net::IpAddr};

pub const PODS: [[&str; 2]; 3] = [["10.1.0.2", "fd00:1::2"], ["10.1.0.4", "fd00:1::4"], ["10.1.0.3", "fd00:1::3"]];
/// Addresses that belong to no pod on this node.
pub const NOBODYS: [&str; 2] = ["10.1.0.99", "fd00:1::99"];
pub const EGRESS: [[&str; 2]; 2] = [["192.0.2.10", "2001:db8::10"], ["192.0.2.11", "2001:db8::11"]];
pub const SERVERS: [[&str; 2]; 2] = [["203.0.113.5", "2001:db8:f::5"], ["203.0.113.6", "2001:db8:f::6"]];
pub const SERVER_PORTS: [u16; 2] = [443, 53];
/// The number of ports of a pod: the ports of two pods do not fit into the block of one egress IP.
pub const PORTS: u16 = 40;
pub const BLOCK: u16 = 3;

#[derive(Clone, Debug)]
pub enum Op {
    /// A packet through the interface of pod number `by`.
    Pod { by: usize, tuple: Tuple, flags: u8 },
    /// Its error about an answer to `about`.
    Complain { by: usize, about: Tuple },
    /// A packet like [`Op::Pod`] that the firewall lets pass.
    Let { tuple: Tuple, flags: u8 },
    /// A packet, or a datagram in parts, that the firewall lets pass, of one of the flows that it was asked about.
    LetAsked { nth: usize, flags: u8, pieces: Option<u16> },
    /// An answer to the flow that is known by this number, or an error about the flow.
    Outside { nth: usize, flags: u8, error: bool },
    /// A packet for any port.
    Guess { egress: IpAddr, port: u16, from: usize, tcp: bool },
    /// Parts of a datagram, sent like [`Op::Pod`].
    PodPieces { by: usize, tuple: Tuple, flags: u8, id: u16, parts: Vec<Part> },
    /// Parts of an answer to the flow that is known by this number.
    OutsidePieces { nth: usize, flags: u8, id: u16, parts: Vec<Part> },
    /// The loss of the forward half of a known flow, whose other half was used a while ago; or of both.
    Lose { nth: usize, both: bool },
    /// A change to one of [`views`].
    Tables(usize),
    /// Two concurrent packets of pods.
    Together(Tuple, Tuple),
    /// Many packets on two CPUs.
    Race(Race),
}

impl Op {
    /// Returns the number of its packets, or 1 if it has none.
    pub fn packets(&self) -> usize {
        match self {
            Op::PodPieces { parts, .. } | Op::OutsidePieces { parts, .. } => parts.len(),
            Op::LetAsked { pieces: Some(_), .. } => Part::ORDERED.len(),
            Op::Together(..) => 2,
            Op::Race(race) => race.batches.iter().map(Vec::len).sum(),
            _ => 1,
        }
    }
}

pub fn tuple(random: &mut Random) -> Tuple {
    let (pod, family) = (random.below(3), random.below(2));
    let proto = random.of(&[TCP, TCP, UDP, if family == 0 { ICMP } else { ICMPV6 }]);
    let server_port = if proto == TCP || proto == UDP { random.of(&SERVER_PORTS) } else { 0 };
    let pod_port = 30_000 + random.below(usize::from(PORTS)) as u16;
    let server = SERVERS[random.below(2)][family];
    Tuple { pod: addr(PODS[pod][family]), pod_port, server: addr(server), server_port, proto }
}

/// Returns one of few numbers, so that fragments are taken for parts of other datagrams.
fn id(random: &mut Random) -> u16 {
    random.below(3) as u16
}

/// Returns some parts of a datagram in any order, possibly repeated.
fn parts(random: &mut Random) -> Vec<Part> {
    (0..2 + random.below(4)).map(|_| random.of(&Part::ALL)).collect()
}

/// Returns the pod that has an address.
pub fn owner(ip: IpAddr) -> usize {
    PODS.iter().position(|pod| pod.iter().any(|a| addr(a) == ip)).unwrap()
}

pub fn op(random: &mut Random) -> Op {
    let mut tuple = tuple(random);
    let by = owner(tuple.pod);
    let flags = random.of(&[SYN, SYN, ACK, ACK, ACK, SYN | ACK, FIN | ACK, RST]);
    match random.below(100) {
        0..=34 => Op::Pod { by, tuple, flags },
        35..=40 => Op::PodPieces { by, tuple, flags, id: id(random), parts: parts(random) },
        41..=52 => {
            let pieces = (random.below(3) == 0).then(|| id(random));
            Op::LetAsked { nth: random.below(1 << 16), flags: random.of(&[SYN, SYN, ACK]), pieces }
        }
        53..=54 => Op::Let { tuple, flags: SYN },
        55..=58 => {
            let family = usize::from(tuple.pod.is_ipv6());
            let sources = [PODS[0], PODS[1], EGRESS[0], NOBODYS];
            tuple.pod = addr(random.of(&sources)[family]);
            match random.below(3) {
                0 => Op::PodPieces { by: random.below(3), tuple, flags, id: id(random), parts: parts(random) },
                _ => Op::Pod { by: random.below(3), tuple, flags },
            }
        }
        59..=61 => Op::Complain { by: if random.below(2) == 0 { by } else { random.below(3) }, about: tuple },
        62..=67 => Op::OutsidePieces {
            nth: random.below(1 << 16),
            flags: random.of(&[SYN | ACK, ACK, RST]),
            id: id(random),
            parts: parts(random),
        },
        68..=84 => Op::Outside {
            nth: random.below(1 << 16),
            flags: random.of(&[SYN | ACK, ACK, ACK, FIN | ACK, RST]),
            error: random.below(5) == 0,
        },
        85..=88 => {
            let egress = addr(random.of(&EGRESS)[usize::from(tuple.pod.is_ipv6())]);
            let port = port_block::first_port(BLOCK) + random.below(64) as u16;
            Op::Guess { egress, port, from: random.below(2), tcp: random.below(2) == 0 }
        }
        89..=93 => Op::Lose { nth: random.below(1 << 16), both: random.below(5) < 2 },
        94 => Op::Tables(random.below(views().len())),
        95 if random.below(3) == 0 => Op::Race(race(random, views().len())),
        95..=97 => Op::Pod { by, tuple, flags },
        _ => {
            let other = if random.below(2) == 0 { tuple } else { self::tuple(random) };
            Op::Together(tuple, other)
        }
    }
}

/// Returns the possible tables: the egress IPs of the policy, and the pods that it selects.
pub fn views() -> Vec<(Vec<usize>, Vec<usize>)> {
    vec![
        (vec![0, 1], vec![0, 1]),
        (vec![0], vec![0, 1]),
        (vec![1], vec![0, 1]),
        (vec![0, 1], vec![0]),
        (vec![], vec![0, 1]),
    ]
}

pub fn view(number: usize, firewall: bool, interfaces: &[u32]) -> NodeView {
    let (slots, selected) = &views()[number];
    let mut view = scene();
    let egress = view.egress_ips.values().next().unwrap().clone();
    view.egress_ips = EGRESS.iter().flatten().map(|ip| (addr(ip), egress.clone())).collect();
    view.egress_ips.values_mut().for_each(|e| {
        e.blocks = [BLOCK].into();
        e.leases = [(BLOCK, scenes::node(0))].into();
    });
    let slot = |ip: &&str| SlotView { address: addr(ip), weight: 1, usable: true };
    let slots = slots.iter().flat_map(|n| &EGRESS[*n]).map(slot).collect();
    view.policies = [(scenes::policy_id(0), PolicyView { slots, ..PolicyView::default() })].into();
    let class = BTreeSet::from([scenes::policy_id(0)]);
    let pod = |n: usize| {
        let ips: BTreeSet<IpAddr> = PODS[n].iter().map(|ip| addr(ip)).collect();
        let class = if selected.contains(&n) { class.clone() } else { BTreeSet::new() };
        let interfaces = ips.iter().map(|ip| (*ip, interfaces[n])).collect();
        (scenes::endpoint_id(n), EndpointView { ips, class, history_until: 0, interfaces })
    };
    view.endpoints = (0..PODS.len()).map(pod).collect();
    let config = view.config.as_mut().unwrap();
    config.flags = if firewall { flags::RESPECT_FIREWALL } else { 0 };
    // Nothing expires by itself within a tick.
    (config.tcp_established, config.tcp_transitory, config.udp, config.icmp) = (10_000, 10_000, 10_000, 10_000);
    view
}
