//! Sends translated packets: out, to a carrier of the egress IP, or into the pod.

use crate::{
    flows::table::Taken,
    headers::{
        fields::{Ip, Kind, L4Header},
        note,
        packet::{Mac, Packet},
    },
    tables::{
        family::Family,
        maps::{EGRESS_IPS, NODES},
        stats,
        trace::{self, Step},
        traffic,
    },
    translation::rewrite::{End, Rewrite, rewrite},
    transports::{carrier, large, mss, send, shaper},
};
use egress_common::{
    config::DatapathConfig,
    egress::EgressIp,
    tcp,
    verdict::{Counter, Verdict, purpose},
};

/// Translates a flow's packet and sends it on; `hop`: it is routed here, so its hop limit is decremented.
#[inline(always)]
pub fn send<F: Family>(
    pkt: &Packet,
    config: &DatapathConfig,
    ip: &Ip<F>,
    t: &L4Header,
    flow: &Taken,
    hop: bool,
) -> Verdict {
    let (egress, port) = (flow.egress, flow.port);
    // The stack answers "time exceeded"; such a packet does not leave the node.
    if hop && ip.hop_limit <= 1 {
        trace::note(Step::Expires, 0, 0);
        return Verdict::Pass;
    }
    let Some(e) = EGRESS_IPS.get(egress) else { return Verdict::Drop(Counter::DropNoOwner) };
    let entropy = send::entropy((port, t.dst_port), ip.dst);
    let to = carrier::of(e, egress, entropy);
    if to == 0 {
        return Verdict::Drop(Counter::DropNoOwner);
    }
    if hop && let Some(answer) = large::judge(pkt, config, ip, to) {
        return answer;
    }
    traffic::sent(flow.account, pkt);
    if t.kind == Kind::Tcp && t.flags & tcp::flag::SYN != 0 {
        mss::clamp::<F>(pkt, config, to, ip.l4);
    }
    let r =
        Rewrite { end: End::Source, old: ip.src, new: F::from_any(&e.addr), old_port: t.src_port, new_port: port, hop };
    if rewrite(pkt, ip, &r).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    trace::note(Step::Translated, egress, u16::from_be(port) as u32);
    hand_over(pkt, egress, e, to, entropy)
}

/// Sends a translated packet to a carrier of its egress IP, or out if this node is that carrier.
#[inline(always)]
pub fn hand_over(pkt: &Packet, egress: u32, e: &EgressIp, to: u32, entropy: u32) -> Verdict {
    if to == carrier::LOCAL {
        stats::count(Counter::SentLocal);
        return match shaper::limit(pkt, egress, e, shaper::OUT) {
            Some(verdict) => verdict,
            None => Verdict::leave(egress),
        };
    }
    match NODES.get(to) {
        Some(node) if node.present != 0 => Verdict::send(purpose::FORWARD, to, entropy),
        _ => Verdict::Drop(Counter::DropNoOwner),
    }
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
