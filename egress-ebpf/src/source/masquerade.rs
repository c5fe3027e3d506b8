//! Connections of pods that no policy selects, which this node masquerades with one of its own addresses that is also an egress
//! IP: masquerading knows nothing about leased ports. The exit records them, so that their replies reach the node.
//!
//! A lessee may use the same 5-tuple concurrently. For TCP the server's answers decide: the connection belongs to the side whose
//! SYN it answered last. So sending from another's port neither gets its segments nor resets its connection. Datagrams go to both.

use crate::{
    flows::{collect, key},
    headers::{
        fields::{Kind, L4Header, Part, proto},
        packet::{Packet, now_tick},
    },
    source::own,
    tables::{
        datagram,
        family::Family,
        maps::{CONFIG, EGRESS_IPS},
    },
};
use egress_common::{
    flow::{FlowKey, Masqueraded},
    tcp::flag,
};

/// The most data that a SYN carries (RFC 7413): its answer acknowledges it.
const SYN_DATA: u32 = 1_460;
/// The flags of an answer to a SYN.
const OPENED: u8 = flag::SYN | flag::ACK;

/// Records the connection of a packet that leaves with this egress IP as its source and that none of our programs has sent. Returns 0.
///
/// A port that is not leased counts, too: it may be leased before the connection ends.
#[inline(always)]
pub fn remember<F: Family>(pkt: &Packet, egress: u32) -> u64 {
    let Ok(ip) = F::parse(pkt) else { return 0 };
    match EGRESS_IPS.get(egress) {
        Some(e) if e.is_own_address() && ip.part != Part::Later => {}
        _ => return 0,
    }
    let t = datagram::transport::<F>(pkt, &ip);
    let opened = match t.kind {
        Kind::Udp => 0,
        Kind::Tcp => u32::from_be(pkt.read_l4::<u32>(F::HEADER, ip.l4, 4).unwrap_or(0)),
        _ => return 0,
    };
    let opens = t.kind == Kind::Udp || t.opens();
    let (key, now) = (key::of_pod(&ip, &t), now_tick());
    if let Some(record) = F::masqueraded().get_ptr_mut(&key) {
        // SAFETY: single stores to fields that may lag by a packet.
        let record = unsafe { &mut *record };
        if !opens || record.opened == opened {
            if record.last_seen != now {
                record.last_seen = now;
            }
            return 0;
        }
    }
    if opens {
        let record = Masqueraded { last_seen: now, opened, answered: 0 };
        // An LRU map always has room.
        let _ = F::masqueraded().insert(&key, record, 0);
    }
    0
}

/// Returns the recipient of a packet from outside for which the node has no socket: [`own::FLOWS`], [`own::NODES`] or
/// [`own::MASQUERADED`]. `key`: the 5-tuple with which the connection leaves; `t`: the packet's own transport header.
#[inline(always)]
pub fn whose<F: Family>(key: &FlowKey<F>, t: &L4Header) -> u64 {
    let Some(config) = CONFIG.get(0) else { return own::FLOWS };
    let Some(record) = F::masqueraded().get_ptr_mut(key) else { return own::FLOWS };
    // SAFETY: as in `remember`.
    let record = unsafe { &mut *record };
    let [long, _, udp, _] = collect::idle_times(config);
    let is_tcp = key.proto == proto::TCP;
    let limit = if is_tcp { long } else { udp };
    let idle = now_tick().wrapping_sub(record.last_seen) as i32;
    // A packet may have left after the time was read.
    if idle > 0 && idle as u32 > limit {
        return own::FLOWS;
    }
    if !is_tcp {
        return own::MASQUERADED;
    }
    let answers = u32::from_be(t.ack).wrapping_sub(record.opened).wrapping_sub(1) <= SYN_DATA;
    match t.flags & (flag::SYN | flag::ACK | flag::RST) {
        OPENED => {
            record.answered = answers as u32;
            of(answers)
        }
        // A forged reset ends nothing here; the host that has the connection recognises it by its sequence number.
        flags if flags & flag::RST != 0 && record.answered != 0 => own::MASQUERADED,
        flags if flags & flag::RST != 0 => of(answers),
        flags if flags & flag::SYN != 0 => own::FLOWS,
        _ => of(record.answered != 0),
    }
}

#[inline(always)]
fn of(is_nodes: bool) -> u64 {
    if is_nodes { own::NODES } else { own::FLOWS }
}

once! {
    remember(remember_v4, remember_v6) = remember(egress: u32);
}
