//! From bytes to fields: addresses, ports and the kind of packet. Reads, never writes.

use crate::headers::{
    context::Context,
    fields::{Embedded, Kind, L4Header, Part, at, proto},
    ip::Header,
    packet::Packet,
};

/// Reads the transport header at `l4`.
#[inline(always)]
pub fn transport_header<F: Header, C: Context>(pkt: &Packet<C>, l4: u32, protocol: u32) -> L4Header {
    match protocol {
        // Ports and, in the fourth word, offset and flags (RFC 9293, section 3.1); the whole header is needed later.
        proto::TCP => match pkt.read_l4::<[u32; 5]>(F::HEADER, l4, 0) {
            Some(h) => {
                let [p0, p1, p2, p3] = h[0].to_ne_bytes();
                let [_, flags, _, _] = h[3].to_ne_bytes();
                let (src_port, dst_port) = (u16::from_ne_bytes([p0, p1]), u16::from_ne_bytes([p2, p3]));
                L4Header { kind: Kind::Tcp, src_port, dst_port, flags, ack: h[2] }
            }
            None => L4Header::of(Kind::Broken),
        },
        proto::UDP => match pkt.read_l4::<[u16; 4]>(F::HEADER, l4, 0) {
            Some([src_port, dst_port, _, _]) => L4Header { kind: Kind::Udp, src_port, dst_port, flags: 0, ack: 0 },
            None => L4Header::of(Kind::Broken),
        },
        p if p == F::ICMP => {
            let Some([first, _, id, _]) = pkt.read_l4::<[u16; 4]>(F::HEADER, l4, 0) else {
                return L4Header::of(Kind::Broken);
            };
            let kind = icmp_kind(F::ICMP, first.to_ne_bytes()[0]);
            match kind {
                Kind::Query | Kind::Answer => L4Header { kind, src_port: id, dst_port: 0, flags: 0, ack: 0 },
                _ => L4Header::of(kind),
            }
        }
        _ => L4Header::of(Kind::Other),
    }
}

/// Returns the kind of an ICMP type: RFC 792 for IPv4, RFC 4443 for IPv6 (errors are the types below 128).
#[inline(always)]
fn icmp_kind(icmp: u32, icmp_type: u8) -> Kind {
    if icmp == proto::ICMP {
        match icmp_type {
            8 => Kind::Query,
            0 => Kind::Answer,
            3 | 4 | 11 | 12 => Kind::Error,
            _ => Kind::Other,
        }
    } else {
        match icmp_type {
            128 => Kind::Query,
            129 => Kind::Answer,
            1..=4 => Kind::Error,
            _ => Kind::Other,
        }
    }
}

/// Reads the packet embedded in the ICMP error whose header starts at `l4`. At least 8 bytes of its
/// transport header are present (RFC 792; in RFC 4443 as many as fit).
#[inline(always)]
pub fn embedded<F: Header, C: Context>(pkt: &Packet<C>, l4: u32) -> Option<Embedded<F>> {
    let l3 = l4 + at::ICMP_LEN;
    let inner = F::embedded(pkt, l3)?;
    if inner.part == Part::Later {
        return None;
    }
    let (src_port, dst_port) = match inner.proto {
        proto::TCP | proto::UDP => {
            let [s, d] = pkt.load::<[u16; 2]>(inner.l4)?;
            (s, d)
        }
        p if p == F::ICMP => {
            let [first, _, id, _] = pkt.load::<[u16; 4]>(inner.l4)?;
            match icmp_kind(F::ICMP, first.to_ne_bytes()[0]) {
                Kind::Query | Kind::Answer => (id, 0),
                _ => return None,
            }
        }
        _ => return None,
    };
    Some(Embedded { src: inner.src, dst: inner.dst, proto: inner.proto, src_port, dst_port, l3, l4: inner.l4 })
}
