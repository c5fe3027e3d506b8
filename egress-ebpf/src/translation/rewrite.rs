//! Rewriting one address and one port of a packet, with every checksum that covers them.

use crate::{
    headers::{
        fields::{Ip, Part, at, checksum_offset, proto},
        packet::Packet,
    },
    tables::family::Family,
};
use egress_common::csum;

/// The end of the packet that is rewritten.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum End {
    Source,
    Destination,
}

impl End {
    /// Returns the offset of the address in the IP header.
    #[inline(always)]
    pub fn address<F: Family>(self) -> u32 {
        match self {
            End::Source => F::SRC,
            End::Destination => F::SRC + size_of::<F>() as u32,
        }
    }

    /// Returns the offset of the port, or of an ICMP query's identifier, in the transport header.
    #[inline(always)]
    pub fn port(self, protocol: u32) -> u32 {
        match (protocol, self) {
            (proto::TCP | proto::UDP, End::Source) => at::SRC_PORT,
            (proto::TCP | proto::UDP, End::Destination) => at::DST_PORT,
            _ => at::ICMP_ID,
        }
    }
}

/// An address and a port, before and after.
#[derive(Clone, Copy)]
pub struct Rewrite<F> {
    pub end: End,
    pub old: F,
    pub new: F,
    pub old_port: u16,
    pub new_port: u16,
    /// Whether to decrement the hop limit, as a router does.
    pub hop: bool,
}

/// Rewrites the packet. Returns `None` if it is too short, which parsing has ruled out, or if the kernel refuses to change it.
#[inline(always)]
pub fn rewrite<F: Family>(pkt: &Packet, ip: &Ip<F>, r: &Rewrite<F>) -> Option<()> {
    // Later fragments have no transport header: the checksum in the first one covers the pseudo-header for all.
    let whole = ip.part != Part::Later;
    if whole {
        // At an offset that is a constant in each case, as in `write_port`.
        match checksum_offset(ip.proto) {
            at::TCP_CHECK => checksum::<F, { at::TCP_CHECK }>(pkt, ip, r)?,
            at::UDP_CHECK => checksum::<F, { at::UDP_CHECK }>(pkt, ip, r)?,
            _ => checksum::<F, { at::ICMP_CHECK }>(pkt, ip, r)?,
        }
    }
    F::write_address(pkt, r.end.address::<F>(), r.old, r.new, r.hop)?;
    if whole { write_port::<F>(pkt, ip, r) } else { Some(()) }
}

/// Updates the transport checksum at `AT` in its header with one call of `bpf_l4_csum_replace`, instead of one for
/// the address and one for the port.
///
/// If the checksum is left to the card (`CHECKSUM_PARTIAL`), the field holds only the sum of the pseudo-header,
/// otherwise the complete checksum. No field of the context tells which, but the former does not change with a word
/// outside the pseudo-header. So one such change is requested, and whether it was made shows which value to write.
#[inline(always)]
fn checksum<F: Family, const AT: u32>(pkt: &Packet, ip: &Ip<F>, r: &Rewrite<F>) -> Option<()> {
    let check = pkt.read_l4::<u16>(F::HEADER, ip.l4, AT)?;
    let udp = ip.proto == proto::UDP;
    // A UDP checksum of zero means "none" and stays zero (RFC 768).
    if udp && check == 0 {
        return Some(());
    }
    if !pkt.l4_checksum(ip.l4 + AT, 0, 1, 0) {
        return None;
    }
    let changed = pkt.read_l4::<u16>(F::HEADER, ip.l4, AT)? != check;
    let pseudo = if ip.proto == proto::ICMP { 0 } else { csum::difference(r.old.as_ref(), r.new.as_ref()) };
    let check = if changed {
        if F::VERSION == 4 && ip.proto != proto::ICMP {
            // A sum that the card has computed (`CHECKSUM_COMPLETE`) covers this checksum. A changed address itself
            // cancels out with the change of the IPv4 header's own checksum.
            pkt.sum_changed(csum::negative(pseudo));
        }
        !csum::fold((!check) as u32 + pseudo + (!r.old_port) as u32 + r.new_port as u32)
    } else {
        csum::fold(check as u32 + pseudo)
    };
    pkt.write_l4(F::HEADER, ip.l4, AT, if udp && check == 0 { 0xffff } else { check })
}

/// Writes the port, at an offset that is a constant in each case (see [`Packet::read_l4`]).
#[inline(always)]
fn write_port<F: Family>(pkt: &Packet, ip: &Ip<F>, r: &Rewrite<F>) -> Option<()> {
    match r.end.port(ip.proto) {
        at::SRC_PORT => pkt.write_l4(F::HEADER, ip.l4, at::SRC_PORT, r.new_port),
        at::DST_PORT => pkt.write_l4(F::HEADER, ip.l4, at::DST_PORT, r.new_port),
        _ => pkt.write_l4(F::HEADER, ip.l4, at::ICMP_ID, r.new_port),
    }
}
