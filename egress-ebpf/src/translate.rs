//! Rewriting one address and one port of a packet, with every checksum that covers them.

use crate::{
    family::Family,
    packet::Packet,
    parse::{Ip, Part, proto},
};
use aya_ebpf::bindings::BPF_F_MARK_MANGLED_0;

/// Which end of the packet is rewritten.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Source,
    Destination,
}

impl End {
    /// Offset of the address in the IP header.
    #[inline(always)]
    pub fn address<F: Family>(self) -> u32 {
        match self {
            End::Source => F::SRC,
            End::Destination => F::SRC + size_of::<F>() as u32,
        }
    }

    /// Offset of the port, or of an ICMP query's identifier, in the transport header.
    #[inline(always)]
    pub fn port(self, protocol: u32) -> u32 {
        match (protocol, self) {
            (proto::TCP | proto::UDP, End::Source) => 0,
            (proto::TCP | proto::UDP, End::Destination) => 2,
            _ => 4,
        }
    }
}

/// Offset of the checksum in the transport header.
#[inline(always)]
pub fn checksum_offset(protocol: u32) -> u32 {
    match protocol {
        proto::TCP => 16,
        proto::UDP => 6,
        _ => 2,
    }
}

/// An address and port, and what they become.
#[derive(Clone, Copy)]
pub struct Rewrite<F> {
    pub end: End,
    pub old: F,
    pub new: F,
    pub old_port: u16,
    pub new_port: u16,
    /// Take one from the hop limit, as a router does.
    pub hop: bool,
    /// The kernel knows `BPF_F_IPV6`.
    pub csum_ipv6: bool,
}

/// Rewrites the packet. `None` when it is too short, which parsing has ruled out.
#[inline(always)]
pub fn rewrite<F: Family>(pkt: &Packet, ip: &Ip<F>, r: &Rewrite<F>) -> Option<()> {
    // Later fragments have no transport header: the checksum in the first one covers the pseudo-header for all.
    let whole = ip.part != Part::Later;
    if whole {
        let at = ip.l4 + checksum_offset(ip.proto);
        // A UDP checksum of zero means "none" and stays zero (RFC 768).
        let mangled = if ip.proto == proto::UDP { BPF_F_MARK_MANGLED_0 as u64 } else { 0 };
        if ip.proto != proto::ICMP {
            F::checksum_address(pkt, at, r.old, r.new, mangled, r.csum_ipv6);
        }
        if r.old_port != r.new_port {
            pkt.l4_checksum(at, r.old_port as u64, r.new_port as u64, 2 | mangled);
        }
    }
    F::write_address(pkt, r.end.address::<F>(), r.old, r.new, r.hop)?;
    if whole { write_port::<F>(pkt, ip, r) } else { Some(()) }
}

/// Writes the port, at an offset that is a constant in each case (see [`Packet::read_l4`]).
#[inline(always)]
fn write_port<F: Family>(pkt: &Packet, ip: &Ip<F>, r: &Rewrite<F>) -> Option<()> {
    match r.end.port(ip.proto) {
        0 => pkt.write_l4(F::HEADER, ip.l4, 0, r.new_port),
        2 => pkt.write_l4(F::HEADER, ip.l4, 2, r.new_port),
        _ => pkt.write_l4(F::HEADER, ip.l4, 4, r.new_port),
    }
}
