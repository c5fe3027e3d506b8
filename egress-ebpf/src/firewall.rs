//! The long way of a flow's first packet: through the host's stack, and so past its firewall, to the tunnel device.
//!
//! `pod_egress` enters the flow as pending and leaves its packets to the stack, marked. A policy route leads them to the
//! tunnel device, whose egress program sees only what the firewall let pass: it translates the packet and confirms the
//! flow. What is not let pass stays pending: the next packet asks again.
//!
//! The stack does more on this way: it puts fragments together, whatever order they come in, and into order; and it answers
//! a packet that is too large for the tunnel and must not be fragmented, since the route there says how large it may be.

use crate::{
    family::Family,
    fragment,
    maps::{CONFIG, NODES},
    packet::Packet,
    parse::{self, Ip, Kind, Part},
    stats,
    steer::{key_of, send},
    way,
};
use egress_common::{
    config::Config,
    flow::kind,
    transport::DIRECT,
    verdict::{Counter, Verdict},
};

/// Leaves a pod's packet to the host's stack, on the way that leads to [`passed`].
#[inline(always)]
pub fn detour(pkt: &Packet, config: &Config) -> Verdict {
    pkt.set_mark(config.mark);
    Verdict::Pass
}

/// The same for a packet of a flow that is not confirmed.
#[inline(always)]
pub fn ask(pkt: &Packet, config: &Config) -> Verdict {
    stats::count(Counter::FirewallAsked);
    detour(pkt, config)
}

/// Whether the packet is too large for the way to `owner` and nobody may, or on an IPv6 underlay can, fragment it there.
///
/// A fragment counts as the largest that the pod's interface carries: where the stack puts datagrams together, it waits for
/// all fragments of those that it gets one of.
#[inline(always)]
pub fn too_large<F: Family>(pkt: &Packet, config: &Config, ip: &Ip<F>, owner: u32) -> bool {
    if config.room == 0 || config.mark == 0 {
        return false;
    }
    let mut len = way::segment(pkt);
    if ip.part != Part::Whole {
        len = len.max(pkt.interface_mtu());
    }
    if len <= config.room {
        return false;
    }
    match NODES.get(owner) {
        Some(node) if node.forward == DIRECT && len <= node.mtu => false,
        Some(node) => ip.whole_only || node.tunnel_v4 == 0,
        None => false,
    }
}

/// Whether a packet at the tunnel device came the long way.
#[inline(always)]
pub fn take_mark(pkt: &Packet) -> bool {
    matches!(CONFIG.get(0), Some(config) if pkt.take_mark(config.mark))
}

/// A packet that came the long way.
#[inline(always)]
pub fn passed<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Drop(Counter::DropNotAsked).to_bits() };
    let Ok(ip) = F::parse(pkt) else { return Verdict::Drop(Counter::DropMalformed).to_bits() };
    let t = parse::transport::<F>(pkt, &ip);
    match t.kind {
        Kind::Tcp | Kind::Udp | Kind::Query => {}
        Kind::Orphan => return Verdict::Drop(Counter::DropFragment).to_bits(),
        _ => return Verdict::Drop(Counter::DropNotAsked).to_bits(),
    }
    let Some(flow) = F::flows().get_ptr_mut(&key_of(&ip, &t)) else {
        return Verdict::Drop(Counter::DropNotAsked).to_bits();
    };
    // SAFETY: flows are changed in place only by single stores of fields that may be a packet late.
    let flow = unsafe { &mut *flow };
    if flow.kind != kind::TRANSLATED {
        return Verdict::Drop(Counter::DropSevered).to_bits();
    }
    if flow.pending != 0 {
        flow.pending = 0;
        stats::count(Counter::FirewallPassed);
    }
    if ip.part == Part::First {
        fragment::keep(&ip, &t);
    }
    // The stack has taken one from the hop limit.
    send::<F>(pkt, config, &ip, &t, flow.egress, flow.port, false).to_bits()
}
