//! `pod_ingress`: flows that the outside opens towards a pod are remembered, so that their replies are left alone.

use crate::{
    classify::{self, Class},
    family::Family,
    flows,
    maps::CONFIG,
    packet::{Packet, note, now_tick},
    parse::{self, Kind, Part},
    steer,
};
use egress_common::{
    flow::{FlowKey, kind},
    tcp,
    verdict::Verdict,
};

/// Looks at a packet on its way into a pod. Never changes or drops it.
#[inline(always)]
pub fn remember<F: Family>(pkt: &Packet) -> Verdict {
    // What `deliver` sends here is no opening of the outside, whatever the flow table says.
    if pkt.take_note(note::DELIVERED) {
        return Verdict::Pass;
    }
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass };
    let Ok(ip) = F::parse(pkt) else { return Verdict::Pass };
    let generation = steer::generation(config);
    if ip.part == Part::Later {
        return Verdict::Pass;
    }
    let t = parse::transport::<F>(pkt, &ip);
    let (src_port, dst_port) = match t.kind {
        Kind::Tcp if t.flags & (tcp::flag::SYN | tcp::flag::ACK) == tcp::flag::SYN => (t.dst_port, t.src_port),
        Kind::Udp => (t.dst_port, t.src_port),
        Kind::Query => (t.src_port, 0),
        _ => return Verdict::Pass,
    };
    let key = FlowKey { src: ip.dst, dst: ip.src, src_port, dst_port, proto: ip.proto };
    if let Some(flow) = F::flows().get_ptr_mut(&key) {
        // SAFETY: single stores of fields that may be a packet late.
        let flow = unsafe { &mut *flow };
        if flow.kind == kind::UNTOUCHED {
            let now = now_tick();
            if flow.last_seen != now {
                flow.last_seen = now;
            }
        }
        return Verdict::Pass;
    }
    // Only where a reply could be taken for a flow of a policy: nothing is kept for the cluster's own traffic.
    if let Class::Policy(..) = classify::classify(config, key.src, key.dst) {
        flows::leave_alone::<F>(pkt, generation, &key, 0);
    }
    Verdict::Pass
}
