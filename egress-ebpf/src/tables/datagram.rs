//! The transport header of a packet that may be a fragment: later fragments have no ports, so the first one of a datagram records them.

use crate::{
    headers::{
        fields::{Ip, Kind, L4Header, Part, proto},
        packet::Packet,
        parse::transport_header,
    },
    tables::family::Family,
};
use egress_common::flow::{Fragment, FragmentKey, HeldKey};

/// [`Fragment::dst_port`] of an ICMP answer; that of a query is 0.
const ANSWER: u16 = 1;

/// Returns the key of a datagram.
#[inline(always)]
pub fn key<F: Family>(ip: &Ip<F>) -> FragmentKey<F> {
    FragmentKey { src: ip.src, dst: ip.dst, id: ip.id, proto: ip.proto }
}

/// Keeps the ports of a first fragment.
#[inline(always)]
pub fn keep<F: Family>(ip: &Ip<F>, t: &L4Header) {
    let dst_port = if t.kind == Kind::Answer { ANSWER } else { t.dst_port };
    let value = Fragment { src_port: t.src_port, dst_port };
    // A full table evicts the oldest datagram, so this does not fail for lack of room.
    let _ = F::fragments().insert(key::<F>(ip), value, 0);
}

/// Returns the ports of the datagram that a later fragment belongs to.
#[inline(always)]
fn recall<F: Family>(ip: &Ip<F>) -> Option<Fragment> {
    // SAFETY: the entry is never changed in place.
    unsafe { F::fragments().get(key::<F>(ip)) }.copied()
}

/// Returns whether other fragments wait for this first one.
#[inline(always)]
pub fn is_awaited<F: Family>(ip: &Ip<F>) -> bool {
    F::held().get_ptr(&HeldKey { datagram: key(ip), place: 0 }).is_some()
}

/// Reads the transport header of `ip`; for a later fragment, returns the ports of the first one.
#[inline(always)]
pub fn transport<F: Family>(pkt: &Packet, ip: &Ip<F>) -> L4Header {
    if ip.part == Part::Later {
        if !matches!(ip.proto, proto::TCP | proto::UDP) && ip.proto != F::ICMP {
            return L4Header::of(Kind::Other);
        }
        let Some(Fragment { src_port, dst_port }) = recall::<F>(ip) else { return L4Header::of(Kind::Orphan) };
        let (kind, dst_port) = match ip.proto {
            proto::TCP => (Kind::Tcp, dst_port),
            proto::UDP => (Kind::Udp, dst_port),
            _ if dst_port == ANSWER => (Kind::Answer, 0),
            _ => (Kind::Query, 0),
        };
        return L4Header { kind, src_port, dst_port, flags: 0, ack: 0 };
    }
    transport_header::<F, _>(pkt, ip.l4, ip.proto)
}
