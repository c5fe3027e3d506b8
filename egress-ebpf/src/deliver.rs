//! The source node's half of a reply: undo the translation and hand the packet to the pod.

use crate::{
    family::Family,
    flows, fragment, icmp,
    maps::{CONFIG, EGRESS_IPS},
    mss,
    packet::{Mac, Packet, note, now_tick},
    parse::{self, Ip, Kind, Part, Transport},
    stats,
    translate::{End, Rewrite, rewrite},
};
use aya_ebpf::helpers::bpf_get_prandom_u32;
use egress_common::{
    config::Config,
    flow::{Flow, FlowKey, Reverse, kind},
    tcp,
    verdict::{Counter, Verdict},
};

/// What [`from_node`] is asked with.
pub mod only {
    /// The packet is a reply for a pod of this node.
    pub const NOTHING: u32 = 0;
    /// It may be one. What is not the whole packet of a known flow is [`OTHER`](super::OTHER).
    pub const KNOWN: u32 = 1;
}
/// What [`from_node`] and the steps of [`underlay`](crate::underlay) return for a packet that they are not for: no verdict and no
/// tunnelled packet has these bits.
pub const OTHER: u64 = u64::MAX;

/// A reply for a pod of this node. A verdict's bits, or [`OTHER`].
#[inline(always)]
pub fn from_node<F: Family>(pkt: &Packet, only: u32) -> u64 {
    let known = only == only::KNOWN;
    let Ok(ip) = F::parse(pkt) else {
        return if known { OTHER } else { Verdict::Drop(Counter::DropMalformed).to_bits() };
    };
    let Some(config) = CONFIG.get(0) else { return Verdict::Drop(Counter::DropNoReverse).to_bits() };
    let t = parse::transport::<F>(pkt, &ip);
    if known && (ip.part != Part::Whole || pkt.vlan() != 0 || !matches!(t.kind, Kind::Tcp | Kind::Udp | Kind::Answer)) {
        return OTHER;
    }
    if ip.part == Part::First {
        fragment::keep(&ip, &t);
    }
    let verdict = deliver::<F>(pkt, config, &ip, &t).to_bits();
    if known && verdict == Verdict::Drop(Counter::DropNoReverse).to_bits() { OTHER } else { verdict }
}

/// Undoes the translation of a reply and sends it into the pod's interface.
#[inline(always)]
pub fn deliver<F: Family>(pkt: &Packet, config: &Config, ip: &Ip<F>, t: &Transport) -> Verdict {
    let key = match t.kind {
        Kind::Tcp | Kind::Udp => {
            FlowKey { src: ip.dst, dst: ip.src, src_port: t.dst_port, dst_port: t.src_port, proto: ip.proto }
        }
        Kind::Answer | Kind::Query => {
            FlowKey { src: ip.dst, dst: ip.src, src_port: t.src_port, dst_port: 0, proto: ip.proto }
        }
        Kind::Error => return icmp::incoming::<F>(pkt, config, ip),
        Kind::Orphan => return Verdict::Drop(Counter::DropFragment),
        Kind::Other => return Verdict::Drop(Counter::DropProtocol),
        Kind::Broken => return Verdict::Drop(Counter::DropMalformed),
    };
    let Some(reverse) = F::reverses().get_ptr_mut(&key) else { return Verdict::Drop(Counter::DropNoReverse) };
    // SAFETY: changed in place only by single stores.
    let r = unsafe { &mut *reverse };
    let now = now_tick();
    if r.last_seen != now {
        r.last_seen = now;
        mend_forward::<F>(config, &key, r, now);
    }
    if t.kind == Kind::Tcp {
        let state = tcp::advance(r.state, t.flags);
        if state != r.state {
            r.state = state;
        }
        if t.flags & tcp::flag::SYN != 0 {
            let owner = EGRESS_IPS.get(r.egress).map_or(0, |e| e.owner);
            mss::clamp::<F>(pkt, config, owner, ip.l4);
        }
    }
    let (ifindex, macs) = (r.ifindex, [r.pod_mac, r.host_mac]);
    let rewriting = Rewrite {
        end: End::Destination,
        old: ip.dst,
        new: r.pod,
        old_port: key.src_port,
        new_port: r.pod_port,
        hop: false,
    };
    if rewrite(pkt, ip, &rewriting).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    into_pod(pkt, ifindex, &macs)
}

/// Sends a packet into a pod's interface; `macs` are the destination and the source address of the frame.
#[inline(always)]
pub fn into_pod(pkt: &Packet, ifindex: u32, macs: &[Mac; 2]) -> Verdict {
    if pkt.write(0, *macs).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    stats::count(Counter::Delivered);
    pkt.note(note::DELIVERED);
    pkt.redirect(ifindex)
}

/// Builds the forward half anew if it is missing. Called once a tick for a flow that receives.
#[inline(always)]
fn mend_forward<F: Family>(config: &Config, key: &FlowKey<F>, r: &Reverse<F>, now: u32) {
    let forward = FlowKey { src: r.pod, dst: key.dst, src_port: r.pod_port, dst_port: key.dst_port, proto: key.proto };
    if F::flows().get_ptr(&forward).is_some() {
        return;
    }
    let flow = Flow {
        policy: r.policy,
        egress: r.egress,
        egress_generation: r.egress_generation,
        config_generation: config.generation.wrapping_sub(1),
        // SAFETY: the helper has no arguments.
        ticket: unsafe { bpf_get_prandom_u32() },
        last_seen: now,
        created: now,
        port: key.src_port,
        state: tcp::seen::SYN | tcp::seen::ACK,
        kind: kind::TRANSLATED,
        pending: 0,
        ifindex: r.ifindex,
    };
    if flows::enter::<F>(&forward, &flow).is_ok() {
        stats::count(Counter::FlowsRepaired);
    }
}
