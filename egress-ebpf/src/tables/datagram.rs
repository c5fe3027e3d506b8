//! The transport header of a packet that may be a fragment: later fragments carry no ports, and the first one of a datagram leaves them here.

use crate::{
    headers::{
        fields::{Ip, Kind, L4Header, Part, proto},
        packet::Packet,
        parse::transport_header,
    },
    tables::family::Family,
};
use egress_common::flow::{Fragment, FragmentKey, HeldKey};

/// The key of a datagram.
#[inline(always)]
pub fn key<F: Family>(ip: &Ip<F>) -> FragmentKey<F> {
    FragmentKey { src: ip.src, dst: ip.dst, id: ip.id, proto: ip.proto }
}

/// Keeps the ports of a first fragment.
#[inline(always)]
pub fn keep<F: Family>(ip: &Ip<F>, t: &L4Header) {
    let value = Fragment { src_port: t.src_port, dst_port: t.dst_port };
    // A full table evicts the oldest datagram, so this does not fail for want of room.
    let _ = F::fragments().insert(key::<F>(ip), value, 0);
}

/// The ports of the datagram that a later fragment belongs to.
#[inline(always)]
pub fn recall<F: Family>(ip: &Ip<F>) -> Option<Fragment> {
    // SAFETY: the entry is never changed in place.
    unsafe { F::fragments().get(key::<F>(ip)) }.copied()
}

/// Whether other fragments wait for this first one.
#[inline(always)]
pub fn is_awaited<F: Family>(ip: &Ip<F>) -> bool {
    F::held().get_ptr(&HeldKey { datagram: key(ip), place: 0 }).is_some()
}

/// Reads the transport header of `ip`, or takes what the first fragment contained.
#[inline(always)]
pub fn transport<F: Family>(pkt: &Packet, ip: &Ip<F>) -> L4Header {
    if ip.part == Part::Later {
        let kind = match ip.proto {
            proto::TCP => Kind::Tcp,
            proto::UDP => Kind::Udp,
            p if p == F::ICMP => Kind::Query,
            _ => return L4Header::of(Kind::Other),
        };
        return match recall::<F>(ip) {
            Some(f) => L4Header { kind, src_port: f.src_port, dst_port: f.dst_port, flags: 0, ack: 0 },
            None => L4Header::of(Kind::Orphan),
        };
    }
    transport_header::<F, _>(pkt, ip.l4, ip.proto)
}
