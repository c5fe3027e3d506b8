//! The gateway: sends packets of its egress IPs out, and replies back to the source node. It keeps no flow state.

use crate::{
    gateway::neighbor,
    headers::{
        context::Context,
        fields::{Ip, Kind, L4Header, Part},
        note,
        packet::{ETH_LEN, Packet},
        parse,
    },
    source::{
        deliver::{self, only},
        fragment, own,
    },
    tables::{
        datagram, egress,
        family::Family,
        maps::{CONFIG, LEASES, NODES},
        stats,
    },
    transports::{nodes, probe, send, shaper},
};
use egress_common::{
    config::DatapathConfig,
    egress::{EgressIp, flags},
    port_block,
    verdict::{Counter, Verdict, purpose},
};

/// Returns the node that the block of `port` (network byte order) of an egress IP is leased to; 0 for none.
#[inline(always)]
pub fn lessee<C: Context>(pkt: &Packet<C>, egress: u32, port: u16) -> u32 {
    let Some(table) = LEASES.get(egress) else { return 0 };
    let row = pkt.hide::<{ port_block::ROWS }>(port_block::row(u16::from_be(port)));
    // SAFETY: every port has a row.
    unsafe { *table.node.as_ptr().add(row) as u32 }
}

/// Forwards a translated packet that node number `from` sent through the tunnel. Returns a verdict's bits.
#[inline(always)]
pub fn forward<F: Family>(pkt: &Packet, from: u32) -> u64 {
    let Some(source) = F::load(pkt, ETH_LEN + F::SRC) else {
        return Verdict::Drop(Counter::DropMalformed).to_bits();
    };
    match egress::find(source) {
        Some((egress, e)) if e.flags & flags::CARRIED != 0 => leased::<F>(pkt, egress, e, from).to_bits(),
        _ => Verdict::Drop(Counter::DropNotOwner).to_bits(),
    }
}

/// Sends out a packet of an egress IP of this node that node number `from` translated, if the port is leased to that node.
#[inline(always)]
pub fn leased<F: Family>(pkt: &Packet, egress: u32, e: &EgressIp, from: u32) -> Verdict {
    let Ok(ip) = F::parse(pkt) else { return Verdict::Drop(Counter::DropMalformed) };
    let t = datagram::transport::<F>(pkt, &ip);
    let port = match own_port::<F, _>(pkt, &ip, &t) {
        Ok(port) => port,
        Err(counter) => return Verdict::Drop(counter),
    };
    if lessee(pkt, egress, port) != from {
        return Verdict::Drop(Counter::DropNotLeased);
    }
    if ip.part == Part::First {
        datagram::keep(&ip, &t);
    }
    stats::count(Counter::Forwarded);
    match shaper::limit(pkt, egress, e, shaper::OUT) {
        Some(verdict) => verdict,
        None => Verdict::leave(egress),
    }
}

/// Returns the port of the egress IP that a translated packet comes from, network byte order; or the reason to drop the packet.
#[inline(always)]
pub fn own_port<F: Family, C: Context>(pkt: &Packet<C>, ip: &Ip<F>, t: &L4Header) -> Result<u16, Counter> {
    match t.kind {
        Kind::Tcp | Kind::Udp | Kind::Query => Ok(t.src_port),
        // The error is about a packet sent to the egress IP. An echo reply has its identifier in place of a source port.
        Kind::Error => match parse::embedded::<F, _>(pkt, ip.l4) {
            Some(inner) if inner.dst == ip.src => {
                Ok(if inner.proto == F::ICMP { inner.src_port } else { inner.dst_port })
            }
            _ => Err(Counter::DropMalformed),
        },
        Kind::Orphan => Err(Counter::DropFragment),
        Kind::Answer | Kind::Other => Err(Counter::DropProtocol),
        Kind::Broken => Err(Counter::DropMalformed),
    }
}

/// Result of [`inward`] for a packet that may be the node's own: no verdict has these bits.
const ASK: u64 = u64::MAX;
/// Result of [`inward`] for a fragment.
const GATHER: u64 = u64::MAX - 1;
/// Result of [`inward`] and [`to_source`] for a packet to a pod of this node: no verdict has these bits.
const DELIVER: u64 = u64::MAX - 2;

/// Steps that a packet has already passed when [`inward`] looks at it.
pub mod done {
    /// If the packet is a fragment, it has been gathered with its first fragment.
    pub const GATHERED: u32 = 1;
    /// The packet is known not to be the node's own.
    pub const ASKED: u32 = 2;
}

/// Handles a packet at an uplink: a reply to an egress IP, a solicitation for it, or unrelated traffic. Returns a verdict's bits.
///
/// The functions run in sequence, not nested: their variables do not fit on the stack together.
#[inline(always)]
pub fn reply<F: Family>(pkt: &Packet) -> u64 {
    let mut verdict = once::inward::<F>(pkt, 0);
    if verdict == GATHER {
        verdict = fragment::once::gather::<F>(pkt);
        if verdict != fragment::GO_ON {
            return verdict;
        }
        verdict = once::inward::<F>(pkt, done::GATHERED);
    }
    if verdict == ASK {
        if own::is_copy(pkt) {
            return Verdict::Pass.to_bits();
        }
        match own::once::whose::<F>(pkt) {
            own::NODES => return Verdict::Pass.to_bits(),
            own::EITHER_SIDE => own::copy(pkt, note::COPY),
            own::MASQUERADED => own::copy(pkt, note::COPY_TO_FORWARD),
            _ => {}
        }
        verdict = once::inward::<F>(pkt, done::GATHERED | done::ASKED);
    }
    delivered::<F>(pkt, verdict)
}

/// Carries out the result of [`inward`] or [`to_source`]: delivers a packet for a pod of this node.
/// The delivery is not part of them, because the verifier would check it once more in each of them.
#[inline(always)]
pub fn delivered<F: Family>(pkt: &Packet, verdict: u64) -> u64 {
    if verdict == DELIVER { deliver::reply::<F>(pkt, only::NOTHING) } else { verdict }
}

/// Does one step of [`reply`]. Returns a verdict's bits, [`DELIVER`], or [`GATHER`] or [`ASK`] if that step must come first.
#[inline(always)]
pub fn inward<F: Family>(pkt: &Packet, done: u32) -> u64 {
    let Ok(ip) = F::parse(pkt) else { return unreadable::<F>(pkt).to_bits() };
    if neighbor::is_solicitation::<F>(pkt, &ip) {
        return neighbor::solicitation(pkt).to_bits();
    }
    let (Some((egress, e)), Some(config)) = (egress::find(ip.dst), CONFIG.get(0)) else {
        return Verdict::Pass.to_bits();
    };
    // Before the VLAN tag is removed: the fragment may enter again.
    if ip.part != Part::Whole && done & done::GATHERED == 0 {
        return GATHER;
    }
    if let Some(verdict) = vlan(pkt, e) {
        return verdict.to_bits();
    }
    if e.flags & flags::SUBNET != 0 && neighbor::learn_advertised::<F>(pkt, &ip, egress, e) {
        return Verdict::Drop(Counter::NextHopLearnt).to_bits();
    }
    let t = datagram::transport::<F>(pkt, &ip);
    let node = lessee_of_reply::<F, _>(pkt, &ip, &t, egress);
    if node != 0 && e.is_own_address() && done & done::ASKED == 0 {
        return ASK;
    }
    hand_on::<F>(pkt, config, &ip, &t, egress, e, node, false)
}

/// Handles a packet whose headers cannot be parsed up to the transport header. The stack must not
/// forward such a packet to a floating egress IP: with a route to this node it would come back.
#[inline(always)]
fn unreadable<F: Family>(pkt: &Packet) -> Verdict {
    let dst = F::load(pkt, ETH_LEN + F::SRC + size_of::<F>() as u32);
    match dst.and_then(egress::find) {
        Some((_, e)) if e.flags & flags::NODE_ADDRESS == 0 => {
            vlan(pkt, e).unwrap_or(Verdict::Drop(Counter::DropMalformed))
        }
        _ => Verdict::Pass,
    }
}

/// Removes the VLAN tag of a packet for an egress IP. A packet in another VLAN is left to the
/// stack, which may have a device for it. An untagged packet is dropped.
#[inline(always)]
pub fn vlan(pkt: &Packet, e: &EgressIp) -> Option<Verdict> {
    match pkt.vlan() {
        vlan if vlan != e.vlan && vlan != 0 => Some(Verdict::Pass),
        vlan if vlan != e.vlan => Some(Verdict::Drop(Counter::DropVlan)),
        0 => None,
        _ if pkt.pop_vlan().is_some() => None,
        _ => Some(Verdict::Drop(Counter::DropRedirect)),
    }
}

/// Sends a packet for an egress IP that has passed the shaper to the node that its port's block is
/// leased to. Returns a verdict's bits, or [`DELIVER`].
#[inline(always)]
pub fn to_source<F: Family>(pkt: &Packet, config: &DatapathConfig, ip: &Ip<F>, egress: u32, e: &EgressIp) -> u64 {
    let t = datagram::transport::<F>(pkt, ip);
    let node = lessee_of_reply::<F, _>(pkt, ip, &t, egress);
    hand_on::<F>(pkt, config, ip, &t, egress, e, node, true)
}

/// Returns the node that the destination port's block of a packet from outside is leased to; 0 for none.
#[inline(always)]
pub fn lessee_of_reply<F: Family, C: Context>(pkt: &Packet<C>, ip: &Ip<F>, t: &L4Header, egress: u32) -> u32 {
    match reply_port::<F, _>(pkt, ip, t) {
        Some(port) => lessee(pkt, egress, port),
        None => 0,
    }
}

/// Sends a packet for an egress IP to the lessee. `shaped`: it has passed the shaper. Returns a verdict's bits, or [`DELIVER`].
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a record of them would be copied to the stack")]
fn hand_on<F: Family>(
    pkt: &Packet,
    config: &DatapathConfig,
    ip: &Ip<F>,
    t: &L4Header,
    egress: u32,
    e: &EgressIp,
    node: u32,
    shaped: bool,
) -> u64 {
    if node == 0 {
        return nobodys::<F>(pkt, e, t.kind).to_bits();
    }
    if !shaped && let Some(verdict) = shaper::limit(pkt, egress, e, shaper::IN) {
        return verdict.to_bits();
    }
    if node == config.node {
        return DELIVER;
    }
    match NODES.get(node) {
        Some(n) if n.present != 0 => {
            stats::count(Counter::Replied);
            let entropy = send::entropy((t.src_port, t.dst_port), ip.src);
            Verdict::send(purpose::REPLY, node, entropy).to_bits()
        }
        _ => Verdict::Drop(Counter::DropNoLease).to_bits(),
    }
}

/// Handles a packet for an egress IP at a port in no leased block: the answer to a probe, or unrelated traffic.
#[inline(always)]
fn nobodys<F: Family>(pkt: &Packet, e: &EgressIp, kind: Kind) -> Verdict {
    if probe::is::<F>(pkt)
        && let Some(index) = nodes::link_node(pkt)
    {
        return Verdict::probe(index);
    }
    // A node's own address has a stack behind it. A floating address has none: nothing may answer for it.
    match kind {
        _ if e.flags & flags::NODE_ADDRESS != 0 => Verdict::Pass,
        Kind::Orphan => Verdict::Drop(Counter::DropFragment),
        _ => Verdict::Drop(Counter::DropNoLease),
    }
}

/// Returns the port of the egress IP that a packet from outside is sent to, network byte order.
#[inline(always)]
fn reply_port<F: Family, C: Context>(pkt: &Packet<C>, ip: &Ip<F>, t: &L4Header) -> Option<u16> {
    match t.kind {
        Kind::Tcp | Kind::Udp => Some(t.dst_port),
        Kind::Answer => Some(t.src_port),
        Kind::Error => parse::embedded::<F, _>(pkt, ip.l4).map(|inner| inner.src_port),
        Kind::Query | Kind::Orphan | Kind::Other | Kind::Broken => None,
    }
}

once! {
    forward(forward_v4, forward_v6) = forward(from: u32);
    inward(inward_v4, inward_v6) = inward(asked: u32);
}
