//! Rewriting an ICMP error and the packet that it quotes, so that its receiver recognises its own packet.

use crate::{
    headers::{
        fields::{Embedded, Ip, checksum_offset, proto},
        packet::Packet,
    },
    tables::family::Family,
    translation::rewrite::End,
};
use egress_common::{
    config::{DatapathConfig, flags},
    csum,
};

/// Rewrites `end` of the error itself and the opposite end of the packet that it quotes, which travelled the other way.
#[inline(always)]
pub fn rewrite<F: Family>(
    pkt: &Packet,
    config: &DatapathConfig,
    ip: &Ip<F>,
    inner: &Embedded<F>,
    end: End,
    new: F,
    new_port: u16,
) -> Option<()> {
    let check = ip.l4 + checksum_offset(F::ICMP);
    let (quoted, old, old_port) = match end {
        End::Destination => (End::Source, inner.src, inner.src_port),
        End::Source if inner.proto == F::ICMP => (End::Destination, inner.dst, inner.src_port),
        End::Source => (End::Destination, inner.dst, inner.dst_port),
    };
    quoted_checksum::<F>(pkt, inner, check, old, new, old_port, new_port)?;
    pkt.l4_checksum(check, old_port as u64, new_port as u64, 2);
    pkt.store(inner.l4 + quoted.port(inner.proto), &new_port)?;
    F::quote_address(pkt, inner.l3, quoted.address::<F>(), check, old, new)?;
    if ip.proto != proto::ICMP {
        F::checksum_address(pkt, check, old, new, 0, config.flags & flags::CSUM_IPV6 != 0);
    }
    F::write_address(pkt, end.address::<F>(), old, new, end == End::Source)
}

/// Updates the quoted transport checksum, if it is quoted and in use, and the error's own checksum for that change.
#[inline(always)]
fn quoted_checksum<F: Family>(
    pkt: &Packet,
    inner: &Embedded<F>,
    check: u32,
    old: F,
    new: F,
    old_port: u16,
    new_port: u16,
) -> Option<()> {
    let at = inner.l4 + checksum_offset(inner.proto);
    let Some(before) = pkt.load::<u16>(at) else { return Some(()) };
    if inner.proto == proto::UDP && before == 0 {
        return Some(());
    }
    let mut after = csum::update16(before, old_port, new_port);
    if inner.proto != proto::ICMP {
        after = F::update_checksum(after, old, new);
    }
    pkt.l4_checksum(check, before as u64, after as u64, 2);
    pkt.store(at, &after)
}
