//! Packets of pods that are too large for the transport of their flow: the pod is told the size that fits, as by a router.

use crate::{
    headers::{
        fields::{Ip, Part, at, proto},
        note,
        packet::{ETH_LEN, Mac, Packet},
    },
    tables::{
        family::Family,
        maps::{CONFIG, NODES},
        stats,
    },
    transports::{carrier, send},
};
use egress_common::{
    config::DatapathConfig,
    csum,
    transport::DIRECT,
    verdict::{Counter, Verdict},
};

/// Upper half of the result of [`judge`], with the MTU in the lower half: no verdict has these bits.
pub const ANSWER: u64 = u32::MAX as u64 - 1;
/// How much of a packet is quoted: more than any receiver looks at. RFC 1812 (section 4.3.2.3) allows 548
/// bytes; RFC 4443 (section 3.2) asks for more over IPv6, but old kernels sum up at most 512 bytes in one call.
const QUOTED: u32 = 512;
/// ICMP "fragmentation needed" (RFC 1191, section 4) and ICMPv6 "packet too big" (RFC 4443, section 3.2): type and code.
const FRAGMENTATION_NEEDED: u32 = 0x0304 << 16;
const PACKET_TOO_BIG: u32 = 0x0200 << 16;
/// Length of the ICMP header.
const ICMP: u32 = at::ICMP_LEN;

/// Returns whether the packet may be too large for some transport.
#[inline(always)]
pub fn may_be(pkt: &Packet, config: &DatapathConfig) -> bool {
    config.room != 0 && send::segment(pkt) > config.room
}

/// Returns the verdict on a packet that is too large for the transport to the carrier `to`, and that must not be fragmented there
/// or, on an IPv6 underlay, cannot be: an answer. Over IPv4 the tunnel device takes packets that may be fragmented, and fragments.
#[inline(always)]
pub fn judge<F: Family>(pkt: &Packet, config: &DatapathConfig, ip: &Ip<F>, to: u32) -> Option<Verdict> {
    if !may_be(pkt, config) || to == carrier::LOCAL {
        return None;
    }
    let node = NODES.get(to)?;
    let fits = if node.forward == DIRECT && node.mtu > config.room { node.mtu } else { config.room };
    let whole = ip.whole_only && ip.part == Part::Whole || node.tunnel_v4 == 0;
    if send::segment(pkt) <= fits || !whole { None } else { Some(Verdict::Later(ANSWER << 32 | fits as u64)) }
}

/// Writes the answer over the packet and sends it back to the pod. Returns a verdict's bits.
#[inline(always)]
pub fn answer<F: Family>(pkt: &Packet, mtu: u32) -> u64 {
    let Ok(ip) = F::parse(pkt) else { return Verdict::Drop(Counter::DropMalformed).to_bits() };
    // Its fields are read before helpers change the packet.
    let done = pkt.read::<[Mac; 2]>(0).and_then(|[host, pod]| write::<F>(pkt, &ip, mtu, [pod, host]));
    match done {
        Some(()) => {
            stats::count(Counter::TooLargeAnswered);
            pkt.note(note::DELIVERED);
            pkt.redirect(pkt.ifindex()).to_bits()
        }
        None => Verdict::Drop(Counter::DropTooLarge).to_bits(),
    }
}

#[inline(always)]
fn write<F: Family>(pkt: &Packet, ip: &Ip<F>, mtu: u32, macs: [Mac; 2]) -> Option<()> {
    let own = F::own(CONFIG.get(0)?);
    // Receivers judge an error by what it quotes: a node without an address of this family uses the destination's.
    let from = if own.as_ref().iter().fold(0, |all, word| all | word) == 0 { ip.dst } else { own };
    pkt.resize(ETH_LEN + QUOTED)?;
    if pkt.adjust_room((F::HEADER + ICMP) as i32, 0) != 0 {
        return None;
    }
    let l4 = ETH_LEN + F::HEADER;
    let quoted = pkt.sum::<QUOTED>(l4 + ICMP)?;
    let (kind, pseudo) = if F::VERSION == 4 {
        (FRAGMENTATION_NEEDED, 0)
    } else {
        let ends = csum::sum_words(from.as_ref()) + csum::sum_words(ip.src.as_ref());
        (PACKET_TOO_BIG, ends + csum::sum_words(&[(ICMP + QUOTED).to_be(), proto::ICMPV6.to_be()]))
    };
    let sum = csum::sum_words(&[kind.to_be(), mtu.to_be()]) + pseudo;
    let check = !csum::fold(csum::fold(quoted) as u32 + csum::fold(sum) as u32);
    pkt.write(0, macs)?;
    pkt.write(l4, [kind.to_be() | (check as u32) << 16, mtu.to_be()])?;
    from.store(pkt, ETH_LEN + F::SRC)?;
    ip.src.store(pkt, ETH_LEN + F::SRC + size_of::<F>() as u32)?;
    if F::VERSION == 4 {
        // Precedence of an error: internetwork control (RFC 1812, section 4.3.2.5).
        let length = F::HEADER + ICMP + QUOTED;
        let header = [(0x45c0 << 16 | length).to_be(), 0, (64_u32 << 24 | proto::ICMP << 16).to_be()];
        let ends = csum::sum_words(from.as_ref()) + csum::sum_words(ip.src.as_ref());
        let check = !csum::fold(csum::sum_words(&header) + ends);
        pkt.write_words(ETH_LEN, &[header[0], header[1], header[2] | (check as u32) << 16])
    } else {
        pkt.write_words(ETH_LEN, &[(6_u32 << 28).to_be(), ((ICMP + QUOTED) << 16 | proto::ICMPV6 << 8 | 64).to_be()])
    }
}

once! {
    answer(answer_v4, answer_v6) = answer(mtu: u32);
}
