//! ICMP errors: the packet that they quote is translated with them, so that whoever gets the error knows its own packet.

use crate::{
    carrier,
    classify::{self, Class},
    deliver,
    family::Family,
    flows,
    maps::{CONFIG, EGRESS_IPS},
    packet::Packet,
    parse::{self, Embedded, Ip, proto},
    steer,
    translate::{End, checksum_offset},
    way,
};
use egress_common::{
    config::{Config, flags},
    csum,
    flow::{FlowKey, kind},
    tcp,
    verdict::{Counter, Verdict},
};

/// An error from outside about a translated packet: it goes to the pod, if the flow is confirmed.
#[inline(always)]
pub fn incoming<F: Family>(pkt: &Packet, config: &Config, ip: &Ip<F>) -> Verdict {
    let Some(inner) = parse::embedded::<F>(pkt, ip.l4) else { return Verdict::Drop(Counter::DropMalformed) };
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
    let (pod, port, ifindex, macs) = (r.pod, r.pod_port, r.ifindex, [r.pod_mac, r.host_mac]);
    if inner.src != ip.dst || rewrite(pkt, config, ip, &inner, End::Destination, pod, port).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    if !flows::is_still(&key, &r.check) {
        return Verdict::Drop(Counter::DropNoReverse);
    }
    deliver::into_pod(pkt, ifindex, &macs)
}

/// An error of a pod about a packet that it got: translated if that belonged to a translated flow of this interface that is
/// confirmed. An error has room for anything: about a flow that the firewall has not let pass it would get past it.
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

/// Whether the error is about a packet of a flow that is not to be touched.
#[inline(always)]
pub fn is_untouched<F: Family>(pkt: &Packet, ip: &Ip<F>) -> bool {
    let Some(inner) = parse::embedded::<F>(pkt, ip.l4) else { return false };
    let key = quoted_key::<F>(&inner);
    F::flows().get_ptr(&key).is_none() && F::inbound().get_ptr(&key).is_some()
}

/// The flow of a packet that a pod has got, and quotes.
#[inline(always)]
fn quoted_key<F: Family>(inner: &Embedded<F>) -> FlowKey<F> {
    let query = inner.proto == F::ICMP;
    let (src_port, dst_port) = if query { (inner.src_port, 0) } else { (inner.dst_port, inner.src_port) };
    FlowKey { src: inner.dst, dst: inner.src, src_port, dst_port, proto: inner.proto }
}

#[inline(always)]
fn quoting<F: Family>(pkt: &Packet, config: &Config, ip: &Ip<F>) -> Verdict {
    match classify::classify(config, ip.src, ip.dst) {
        Class::Outside(_) => return Verdict::Pass,
        Class::Held => return Verdict::Drop(Counter::DropHeld),
        Class::Policy(..) => {}
    }
    let Some(inner) = parse::embedded::<F>(pkt, ip.l4) else { return Verdict::Drop(Counter::DropMalformed) };
    let key = quoted_key::<F>(&inner);
    // SAFETY: read only.
    let Some(flow) = (unsafe { F::flows().get(&key) }) else {
        let left_alone = F::inbound().get_ptr(&key).is_some();
        return if left_alone { Verdict::Pass } else { Verdict::Drop(Counter::DropUnknownFlow) };
    };
    let ifindex = flow.ifindex;
    let Some(taken) = flows::taken(&key, flow) else { return Verdict::Drop(Counter::DropUnknownFlow) };
    if taken.kind != kind::TRANSLATED {
        return Verdict::Drop(Counter::DropSevered);
    }
    if ifindex != pkt.ifindex() {
        return Verdict::Drop(Counter::DropSpoofed);
    }
    // What was classified by older tables is classified again with its next packet.
    if taken.pending != 0 || flow.config_generation != config.generation {
        return Verdict::Drop(Counter::DropNotConfirmed);
    }
    let (egress, port) = (taken.egress, taken.port);
    let Some(reverse) = flows::reverse_key::<F>(&key, flow) else { return Verdict::Drop(Counter::DropSevered) };
    // It goes to whoever sent what it quotes, and to nobody else (RFC 1122, section 3.2.2).
    if inner.dst != ip.src
        || inner.src != ip.dst
        || rewrite(pkt, config, ip, &inner, End::Source, reverse.src, port).is_none()
    {
        return Verdict::Drop(Counter::DropMalformed);
    }
    let Some(e) = EGRESS_IPS.get(egress) else { return Verdict::Drop(Counter::DropNoOwner) };
    let entropy = way::entropy((port, 0), ip.dst);
    steer::hand_over(pkt, egress, e, carrier::of(e, egress, entropy), entropy)
}

/// Rewrites `end` of the error itself and the opposite end of the packet that it quotes, which travelled the other way.
#[inline(always)]
fn rewrite<F: Family>(
    pkt: &Packet,
    config: &Config,
    ip: &Ip<F>,
    inner: &Embedded<F>,
    end: End,
    new: F,
    new_port: u16,
) -> Option<()> {
    let check = ip.l4 + checksum_offset(F::ICMP);
    let (quoted, old, old_port) = match end {
        End::Destination => (End::Source, inner.src, inner.src_port),
        End::Source if inner.proto == F::ICMP => (End::Destination, inner.dst, inner.src_port),
        End::Source => (End::Destination, inner.dst, inner.dst_port),
    };
    quoted_checksum::<F>(pkt, inner, check, old, new, old_port, new_port)?;
    pkt.l4_checksum(check, old_port as u64, new_port as u64, 2);
    pkt.store(inner.l4 + quoted.port(inner.proto), &new_port)?;
    F::quote_address(pkt, inner.l3, quoted.address::<F>(), check, old, new)?;
    if ip.proto != proto::ICMP {
        F::checksum_address(pkt, check, old, new, 0, config.flags & flags::CSUM_IPV6 != 0);
    }
    F::write_address(pkt, end.address::<F>(), old, new, end == End::Source)
}

/// Updates the quoted transport checksum, if it is quoted and in use, and the error's own checksum for that change.
#[inline(always)]
fn quoted_checksum<F: Family>(
    pkt: &Packet,
    inner: &Embedded<F>,
    check: u32,
    old: F,
    new: F,
    old_port: u16,
    new_port: u16,
) -> Option<()> {
    let at = inner.l4 + checksum_offset(inner.proto);
    let Some(before) = pkt.load::<u16>(at) else { return Some(()) };
    if inner.proto == proto::UDP && before == 0 {
        return Some(());
    }
    let mut after = csum::update16(before, old_port, new_port);
    if inner.proto != proto::ICMP {
        after = F::update_checksum(after, old, new);
    }
    pkt.l4_checksum(check, before as u64, after as u64, 2);
    pkt.store(at, &after)
}
