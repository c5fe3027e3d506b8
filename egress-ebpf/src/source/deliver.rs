//! The source node's half of a reply: undoes the translation and hands the packet to the pod.

use crate::{
    flows::{ended, key, table},
    headers::{
        fields::{Ip, Kind, L4Header, Part},
        packet::{Packet, now_tick},
    },
    source::{icmp, translated},
    tables::{
        classify, datagram,
        family::Family,
        maps::{CONFIG, EGRESS_IPS},
        stats,
        trace::{self, Step},
        traffic,
    },
    translation::rewrite::{End, Rewrite, rewrite},
    transports::{carrier, mss},
};
use egress_common::{
    config::DatapathConfig,
    flow::{Flow, FlowKey, Reverse, is_pair, kind},
    tcp, udp,
    verdict::{Counter, Verdict},
};

/// The modes of [`from_node`].
pub mod only {
    /// The packet is a reply for a pod of this node.
    pub const NOTHING: u32 = 0;
    /// It may be one. Anything except a whole packet of a known flow is [`OTHER`](super::OTHER).
    pub const KNOWN: u32 = 1;
    /// Added to either: [`tend`](super::tend) has been called.
    pub const TENDED: u32 = 2;
}
/// Result of [`from_node`] and of the steps of [`underlay`](crate::gateway::underlay) for a packet
/// that they are not for: no verdict and no tunnelled packet has these bits.
pub const OTHER: u64 = u64::MAX;

/// Result of [`from_node`] for a packet that [`tend`] must look at first.
const TEND: u64 = OTHER - 1;
/// Result of [`tend`] for a reset that only the pod can judge.
const DOUBTFUL: u64 = 1;

/// Handles a reply for a pod of this node. Returns a verdict's bits, or [`OTHER`].
///
/// The functions run in sequence, not nested: their variables do not fit on the stack together.
#[inline(always)]
pub fn reply<F: Family>(pkt: &Packet, only: u32) -> u64 {
    match once::from_node::<F>(pkt, only) {
        TEND => {
            let doubtful = once::tend::<F>(pkt) == DOUBTFUL;
            let verdict = once::from_node::<F>(pkt, only | only::TENDED);
            if doubtful { ended::once::question::<F>(pkt, verdict) } else { verdict }
        }
        verdict => verdict,
    }
}

/// Does the work of [`reply`], or returns [`TEND`].
#[inline(always)]
pub fn from_node<F: Family>(pkt: &Packet, only: u32) -> u64 {
    let known = only & only::KNOWN != 0;
    let Ok(ip) = F::parse(pkt) else {
        return if known { OTHER } else { Verdict::Drop(Counter::DropMalformed).to_bits() };
    };
    let Some(config) = CONFIG.get(0) else { return Verdict::Drop(Counter::DropNoReverse).to_bits() };
    let t = datagram::transport::<F>(pkt, &ip);
    if known && (ip.part != Part::Whole || pkt.vlan() != 0 || !matches!(t.kind, Kind::Tcp | Kind::Udp | Kind::Answer)) {
        return OTHER;
    }
    if ip.part == Part::First {
        datagram::keep(&ip, &t);
    }
    let verdict = deliver::<F>(pkt, config, &ip, &t, only & only::TENDED != 0).to_bits();
    if known && verdict == Verdict::Drop(Counter::DropNoReverse).to_bits() { OTHER } else { verdict }
}

/// Undoes the translation of a reply and sends it into the pod's interface.
#[inline(always)]
fn deliver<F: Family>(pkt: &Packet, config: &DatapathConfig, ip: &Ip<F>, t: &L4Header, tended: bool) -> Verdict {
    let key = match t.kind {
        Kind::Tcp | Kind::Udp | Kind::Answer => key::of_reply(ip, t),
        Kind::Error => return icmp::incoming::<F>(pkt, config, ip),
        Kind::Orphan => return Verdict::Drop(Counter::DropFragment),
        Kind::Query | Kind::Other => return Verdict::Drop(Counter::DropProtocol),
        Kind::Broken => return Verdict::Drop(Counter::DropMalformed),
    };
    let Some(reverse) = F::reverses().get_ptr_mut(&key) else { return Verdict::Drop(Counter::DropNoReverse) };
    // SAFETY: changed in place only by single stores.
    let r = unsafe { &mut *reverse };
    trace::answer::<F>(&key, &r.pod);
    if r.state & tcp::seen::CONFIRMED == 0 {
        return Verdict::Drop(Counter::DropNotConfirmed);
    }
    let now = now_tick();
    let mut tends = r.last_seen != now;
    if tends {
        r.last_seen = now;
    }
    if t.kind == Kind::Tcp {
        if t.flags & (tcp::flag::SYN | tcp::flag::FIN | tcp::flag::RST) != 0 {
            tends = true;
        }
        if t.flags & (tcp::flag::FIN | tcp::flag::RST) == 0 {
            let state = tcp::advance(r.state, t.flags);
            if state != r.state {
                r.state = state;
            }
        }
        if t.flags & tcp::flag::SYN != 0 {
            let ports = (t.dst_port, t.src_port);
            let to = EGRESS_IPS.get(r.egress).map_or(0, |e| carrier::of_flow(e, r.egress, ports, ip.src));
            mss::clamp::<F>(pkt, config, to, ip.l4);
        }
    } else if t.kind == Kind::Udp && r.state & udp::seen::ANSWER == 0 {
        r.state |= udp::seen::ANSWER;
        tends = true;
    }
    if tends && !tended {
        return Verdict::Later(TEND);
    }
    let Some(to) = table::target(&key, r) else { return Verdict::Drop(Counter::DropNoReverse) };
    let rewriting = Rewrite {
        end: End::Destination,
        old: ip.dst,
        new: to.pod,
        old_port: key.src_port,
        new_port: to.port,
        hop: false,
    };
    if rewrite(pkt, ip, &rewriting).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    trace::note(Step::Answer, r.egress, u16::from_be(r.pod_port) as u32);
    traffic::received(r.account, pkt);
    translated::into_pod(pkt, to.ifindex, &to.macs)
}

/// Updates the forward half of a known flow from a reply: once a tick, at a SYN, at the first answer to a question, and
/// at a packet that claims to be the remote side's end. Removes an orphaned reverse half. Returns [`DOUBTFUL`], or 0.
#[inline(always)]
pub fn tend<F: Family>(pkt: &Packet) -> u64 {
    let (Some(config), Ok(ip)) = (CONFIG.get(0), F::parse(pkt)) else { return 0 };
    let t = datagram::transport::<F>(pkt, &ip).hidden(pkt.len());
    let key = key::of_reply(&ip, &t);
    let Some(r) = F::reverses().get_ptr_mut(&key) else { return 0 };
    // SAFETY: changed in place only by single stores.
    let r = unsafe { &mut *r };
    let forward = FlowKey {
        src: F::copied(&r.pod),
        dst: key.dst,
        src_port: r.pod_port,
        dst_port: key.dst_port,
        proto: key.proto,
    };
    let inherited = classify::is_another(F::copied(&r.pod), r.endpoint);
    match F::flows().get_ptr_mut(&forward) {
        Some(flow) => {
            // SAFETY: flows are changed in place only by single stores to fields that may lag by a packet.
            let flow = unsafe { &mut *flow };
            if !inherited && is_pair(&forward, flow, &key, r) {
                return if ended::by_remote::<F>(pkt, &ip, &t, &forward, flow, r.state) { 0 } else { DOUBTFUL };
            }
        }
        None if !inherited => {
            mend_forward::<F>(config, &forward, &key, r);
            return 0;
        }
        None => {}
    }
    // The forward half's place belongs to another flow of the pod, or the pod's address to another pod.
    let _ = F::reverses().remove(&key);
    0
}

/// Rebuilds a missing forward half.
#[inline(always)]
fn mend_forward<F: Family>(config: &DatapathConfig, forward: &FlowKey<F>, key: &FlowKey<F>, r: &Reverse<F>) {
    let now = now_tick();
    let mut flow = Flow {
        check: 0,
        policy: r.policy,
        account: r.account,
        egress: r.egress,
        egress_generation: r.egress_generation,
        config_generation: config.generation.wrapping_sub(1),
        endpoint: r.endpoint,
        ticket: table::ticket(),
        last_seen: now,
        created: now,
        ack: 0,
        end: 0,
        ifindex: r.ifindex,
        port: key.src_port,
        // For UDP these bits say that there was more than a question.
        state: tcp::seen::SYN | tcp::seen::ACK,
        back: 0,
        queued: 0,
        kind: kind::TRANSLATED,
        pending: 0,
    };
    flow.seal(forward);
    if table::enter::<F>(forward, &flow).is_ok() {
        stats::count(Counter::FlowsRepaired);
    }
}

once! {
    tend(tend_v4, tend_v6) = tend();
    from_node(from_node_v4, from_node_v6) = from_node(only: u32);
}
