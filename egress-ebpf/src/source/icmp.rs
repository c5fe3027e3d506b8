//! ICMP errors: the quoted packet is translated with the error, so that the receiver recognises its own packet.

use crate::{
    flows::table,
    headers::{
        fields::{Embedded, Ip},
        packet::Packet,
        parse,
    },
    source::translated,
    tables::{
        classify::{self, Class},
        family::Family,
        maps::{CONFIG, EGRESS_IPS},
    },
    translation::{quote, rewrite::End},
    transports::{carrier, send},
};
use egress_common::{
    config::DatapathConfig,
    flow::{FlowKey, kind},
    tcp,
    verdict::{Counter, Verdict},
};

/// Delivers an error from outside about a translated packet to the pod, if the flow is confirmed.
#[inline(always)]
pub fn incoming<F: Family>(pkt: &Packet, config: &DatapathConfig, ip: &Ip<F>) -> Verdict {
    let Some(inner) = parse::embedded::<F, _>(pkt, ip.l4) else { return Verdict::Drop(Counter::DropMalformed) };
    let key = FlowKey {
        src: inner.src,
        dst: inner.dst,
        src_port: inner.src_port,
        dst_port: inner.dst_port,
        proto: inner.proto,
    };
    // SAFETY: read only.
    let Some(r) = (unsafe { F::reverses().get(&key) }) else { return Verdict::Drop(Counter::DropNoReverse) };
    if r.state & tcp::seen::CONFIRMED == 0 {
        return Verdict::Drop(Counter::DropNotConfirmed);
    }
    let Some(to) = table::target(&key, r) else { return Verdict::Drop(Counter::DropNoReverse) };
    if inner.src != ip.dst || quote::rewrite(pkt, config, ip, &inner, End::Destination, to.pod, to.port).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    translated::into_pod(pkt, to.ifindex, &to.macs)
}

/// Handles a pod's error about a packet that it received: translates it if that packet belonged to a confirmed translated
/// flow of this interface. An error can carry any data: for an unconfirmed flow, it would bypass the firewall.
#[inline(always)]
pub fn outgoing<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else {
        return Verdict::Drop(Counter::DropMalformed).to_bits();
    };
    let Ok(ip) = F::parse(pkt) else {
        return Verdict::Drop(Counter::DropMalformed).to_bits();
    };
    quoting::<F>(pkt, config, &ip).to_bits()
}

/// Returns whether the error is about a packet of a connection that is left alone.
#[inline(always)]
pub fn is_untouched<F: Family>(pkt: &Packet, ip: &Ip<F>) -> bool {
    let Some(inner) = parse::embedded::<F, _>(pkt, ip.l4) else { return false };
    let key = quoted_key::<F>(&inner);
    F::flows().get_ptr(&key).is_none() && F::inbound().get_ptr(&key).is_some()
}

/// Returns the flow of a packet that a pod received and quotes.
#[inline(always)]
fn quoted_key<F: Family>(inner: &Embedded<F>) -> FlowKey<F> {
    let query = inner.proto == F::ICMP;
    let (src_port, dst_port) = if query { (inner.src_port, 0) } else { (inner.dst_port, inner.src_port) };
    FlowKey { src: inner.dst, dst: inner.src, src_port, dst_port, proto: inner.proto }
}

#[inline(always)]
fn quoting<F: Family>(pkt: &Packet, config: &DatapathConfig, ip: &Ip<F>) -> Verdict {
    match classify::classify(config, ip.src, ip.dst) {
        Class::Outside(..) => return Verdict::Pass,
        Class::Held => return Verdict::Drop(Counter::DropHeld),
        Class::Policy(..) => {}
    }
    let Some(inner) = parse::embedded::<F, _>(pkt, ip.l4) else { return Verdict::Drop(Counter::DropMalformed) };
    let key = quoted_key::<F>(&inner);
    // SAFETY: read only.
    let Some(flow) = (unsafe { F::flows().get(&key) }) else {
        let left_alone = F::inbound().get_ptr(&key).is_some();
        return if left_alone { Verdict::Pass } else { Verdict::Drop(Counter::DropUnknownFlow) };
    };
    let ifindex = flow.ifindex;
    let Some(taken) = table::taken(&key, flow) else { return Verdict::Drop(Counter::DropUnknownFlow) };
    if taken.kind != kind::TRANSLATED {
        return Verdict::Drop(Counter::DropSevered);
    }
    if ifindex != pkt.ifindex() {
        return Verdict::Drop(Counter::DropSpoofed);
    }
    // A flow that older tables classified is reclassified at its next packet.
    if taken.pending != 0 || flow.config_generation != config.generation {
        return Verdict::Drop(Counter::DropNotConfirmed);
    }
    // The error is routed here; if it expires, it does not leave the node.
    if ip.hop_limit <= 1 {
        return Verdict::Pass;
    }
    let (egress, port) = (taken.egress, taken.port);
    let Some(reverse) = table::reverse_key::<F>(&key, flow) else { return Verdict::Drop(Counter::DropSevered) };
    // An error goes only to the sender of the packet that it quotes (RFC 1122, section 3.2.2).
    if inner.dst != ip.src
        || inner.src != ip.dst
        || quote::rewrite(pkt, config, ip, &inner, End::Source, reverse.src, port).is_none()
    {
        return Verdict::Drop(Counter::DropMalformed);
    }
    let Some(e) = EGRESS_IPS.get(egress) else { return Verdict::Drop(Counter::DropNoOwner) };
    let entropy = send::entropy((port, 0), ip.dst);
    translated::hand_over(pkt, egress, e, carrier::of(e, egress, entropy), entropy)
}

once! {
    outgoing(outgoing_v4, outgoing_v6) = outgoing();
}
