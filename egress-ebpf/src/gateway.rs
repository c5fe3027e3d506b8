//! The gateway: out for its egress IPs, and back to the source node. It keeps nothing of a flow.

use crate::{
    deliver, exit,
    family::Family,
    fragment,
    maps::{CONFIG, EGRESS_IPS, LEASES, NODES},
    neighbor,
    packet::Packet,
    parse::{self, Ip, Kind, Part, Transport},
    probe, stats, underlay, way,
};
use egress_common::{
    V6,
    abi::VNI_REPLY,
    egress::{EgressIp, flags},
    port_block,
    verdict::{Counter, Verdict},
};

/// The node that the block of `port` (network byte order) of an egress IP is leased to; 0 for nobody.
#[inline(always)]
fn lessee(pkt: &Packet, egress: u32, port: u16) -> u32 {
    let Some(table) = LEASES.get(egress) else { return 0 };
    let row = pkt.hide::<{ port_block::ROWS }>(port_block::row(u16::from_be(port)));
    // SAFETY: every port has a row.
    unsafe { *table.node.as_ptr().add(row) as u32 }
}

/// Who a packet comes from: the outer source address, or with `direct` the node whose MAC address it is.
pub enum Sender<'a> {
    Tunnel(&'a V6),
    Link(u32),
}

impl Sender<'_> {
    /// Whether it is node number `index`.
    #[inline(always)]
    fn is(&self, index: u32) -> bool {
        match self {
            Sender::Tunnel(outer) => matches!(NODES.get(index), Some(n) if n.present != 0 && n.addr == **outer),
            Sender::Link(node) => *node == index && index != 0,
        }
    }
}

/// A translated packet from a source node, on its way out.
#[inline(always)]
pub fn forward<F: Family>(pkt: &Packet, sender: &Sender<'_>) -> Verdict {
    match leased::<F>(pkt, sender) {
        // No port of a flow is that low.
        Verdict::Drop(Counter::DropNotLeased) => match sender {
            Sender::Link(index) if probe::is::<F>(pkt) => probe::receive::<F>(pkt, *index),
            _ => Verdict::Drop(Counter::DropNotLeased),
        },
        verdict => verdict,
    }
}

#[inline(always)]
fn leased<F: Family>(pkt: &Packet, sender: &Sender<'_>) -> Verdict {
    let Ok(ip) = F::parse(pkt) else { return Verdict::Drop(Counter::DropMalformed) };
    // SAFETY: read only.
    let Some(&egress) = (unsafe { F::egress_index().get(ip.src) }) else { return Verdict::Drop(Counter::DropNotOwner) };
    let Some(e) = EGRESS_IPS.get(egress) else { return Verdict::Drop(Counter::DropNotOwner) };
    if e.flags & flags::OWNED == 0 {
        return Verdict::Drop(Counter::DropNotOwner);
    }
    let t = parse::transport::<F>(pkt, &ip);
    let port = match t.kind {
        Kind::Tcp | Kind::Udp | Kind::Query => t.src_port,
        Kind::Error => match parse::embedded::<F>(pkt, ip.l4) {
            Some(inner) => inner.dst_port,
            None => return Verdict::Drop(Counter::DropMalformed),
        },
        Kind::Orphan => return Verdict::Drop(Counter::DropFragment),
        Kind::Answer | Kind::Other => return Verdict::Drop(Counter::DropProtocol),
        Kind::Broken => return Verdict::Drop(Counter::DropMalformed),
    };
    if !sender.is(lessee(pkt, egress, port)) {
        return Verdict::Drop(Counter::DropNotLeased);
    }
    if ip.part == Part::First {
        fragment::keep(&ip, &t);
    }
    stats::count(Counter::Forwarded);
    exit::leave(pkt, e)
}

/// A packet that arrived at an uplink: a reply for an egress IP, a question for it, or nothing of ours.
#[inline(always)]
pub fn reply<F: Family>(pkt: &Packet) -> Verdict {
    let Ok(ip) = F::parse(pkt) else { return Verdict::Pass };
    if neighbor::is_solicitation::<F>(pkt, &ip) {
        return neighbor::solicitation(pkt);
    }
    // SAFETY: read only.
    let Some(&egress) = (unsafe { F::egress_index().get(ip.dst) }) else { return Verdict::Pass };
    let (Some(e), Some(config)) = (EGRESS_IPS.get(egress), CONFIG.get(0)) else { return Verdict::Pass };
    let t = parse::transport::<F>(pkt, &ip);
    let node = match reply_port::<F>(pkt, &ip, &t) {
        Some(port) => lessee(pkt, egress, port),
        None => 0,
    };
    if node == 0 {
        return nobodys::<F>(pkt, e);
    }
    if ip.part == Part::First {
        fragment::keep(&ip, &t);
    }
    if node == config.node {
        return deliver::deliver::<F>(pkt, config, &ip, &t);
    }
    match NODES.get(node) {
        Some(n) if n.present != 0 => {
            stats::count(Counter::Replied);
            let entropy = way::entropy((t.src_port, t.dst_port), ip.src);
            way::to_node(pkt, node, way::wished(node, n), VNI_REPLY, entropy)
        }
        _ => Verdict::Drop(Counter::DropNoLease),
    }
}

/// A packet for an egress IP at a port that is in nobody's block: the answer to a probe, or nothing of ours.
#[inline(always)]
fn nobodys<F: Family>(pkt: &Packet, e: &EgressIp) -> Verdict {
    if probe::is::<F>(pkt)
        && let Some(index) = underlay::link_node(pkt)
    {
        return probe::receive::<F>(pkt, index);
    }
    // A node's own address has a stack behind it. A floating one has none: nothing may answer in its name.
    let own = e.flags & flags::NODE_ADDRESS != 0;
    if own { Verdict::Pass } else { Verdict::Drop(Counter::DropNoLease) }
}

/// The port of the egress IP that a packet from outside is for, network byte order.
#[inline(always)]
fn reply_port<F: Family>(pkt: &Packet, ip: &Ip<F>, t: &Transport) -> Option<u16> {
    match t.kind {
        Kind::Tcp | Kind::Udp => Some(t.dst_port),
        Kind::Answer => Some(t.src_port),
        // Later fragments of an answer only tell their protocol.
        Kind::Query if ip.part == Part::Later => Some(t.src_port),
        Kind::Error => parse::embedded::<F>(pkt, ip.l4).map(|inner| inner.src_port),
        Kind::Query | Kind::Orphan | Kind::Other | Kind::Broken => None,
    }
}
