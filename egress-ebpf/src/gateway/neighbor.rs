//! ARP and NDP for floating egress IPs: the datapath of the carrier that is to answer does so while its agent is alive.

use crate::{
    headers::{
        fields::{Ip, proto},
        ip::Header,
        packet::{ETH_LEN, Mac, Packet},
    },
    tables::{
        deadline::is_before,
        egress,
        family::Family,
        maps::{NEXT_HOPS, UPLINKS},
        stats,
    },
};
use egress_common::{
    V4, V6, csum,
    egress::{EgressIp, deadline, flags},
    mapped,
    verdict::{Counter, Verdict},
};

/// ICMPv6 type of a neighbor solicitation (RFC 4861, section 4.3).
const SOLICITATION: u8 = 135;
/// ICMPv6 type of a neighbor advertisement.
const ADVERTISEMENT_TYPE: u8 = 136;
/// The same, in the first byte of its first word.
const ADVERTISEMENT: u32 = 136 << 24;
/// Solicited and override flags of an advertisement (RFC 4861, section 4.4).
const SOLICITED: u32 = 1 << 30;
const OVERRIDE: u32 = 1 << 29;
/// Target link-layer address option: type 2, one unit of 8 bytes.
const TARGET_LINK_LAYER: u16 = 0x0201_u16.to_be();
/// Offset of the ICMPv6 header; a neighbor's stack sends no extension headers.
const L4: u32 = ETH_LEN + V6::HEADER;
/// Length of an advertisement with that option.
const ADVERTISEMENT_LEN: u32 = 32;

/// The MAC address of ff02::1 (RFC 2464, section 7), as words in memory order.
const ALL_NODES_MAC: Mac = [0x3333, 0, 0x0001_u16.to_be()];

/// How the node treats a request for an address.
enum NeighborAnswer {
    /// The address is not ours: the stack decides.
    NotOurs,
    /// Ours, but this node does not answer for it.
    Silence,
    /// Answer with this interface's MAC address.
    With(Mac),
}

#[inline(always)]
fn answer(e: &EgressIp, pkt: &Packet) -> NeighborAnswer {
    let ifindex = pkt.ifindex();
    if e.flags & flags::NODE_ADDRESS != 0 || pkt.vlan() != e.vlan && pkt.vlan() != 0 {
        return NeighborAnswer::NotOurs;
    }
    if pkt.vlan() != e.vlan {
        return NeighborAnswer::Silence;
    }
    if !is_before(deadline::ABLE)
        || e.flags & flags::CARRIED == 0
        || e.flags & flags::SILENT != 0
        || e.ifindex != ifindex
    {
        return NeighborAnswer::Silence;
    }
    // SAFETY: entries are replaced, not changed in place.
    match unsafe { UPLINKS.get(ifindex) } {
        Some(uplink) => NeighborAnswer::With(uplink.mac),
        None => NeighborAnswer::Silence,
    }
}

/// The body of an ARP packet for IPv4 over Ethernet (RFC 826) as words: hardware type, protocol type, lengths, operation,
/// then MAC address (3 words) and address (2 words) of sender and target.
type Arp = [u16; 14];

/// Handles an ARP packet at an uplink. Returns a verdict's bits. It is a separate function, so that
/// its variables take no stack from the functions for other packets.
#[inline(never)]
pub fn arp(pkt: &Packet) -> u64 {
    asked(pkt).to_bits()
}

#[inline(always)]
fn asked(pkt: &Packet) -> Verdict {
    let Some(q) = pkt.read_header::<Arp>(ETH_LEN) else { return Verdict::Pass };
    let [hardware, protocol, lengths, operation, m0, m1, m2, s0, s1, _, _, _, t0, t1] = q;
    // A gratuitous request (sender = target) is an announcement, not a question.
    if (s0, s1) == (t0, t1) {
        return Verdict::Pass;
    }
    let target: V4 = [t0 as u32 | (t1 as u32) << 16];
    let Some((egress, e)) = egress::find(target) else { return Verdict::Pass };
    learn(pkt, egress, e, &mapped([s0 as u32 | (s1 as u32) << 16]), [m0, m1, m2]);
    if operation != 1_u16.to_be() {
        return Verdict::Pass;
    }
    let mac = match answer(e, pkt) {
        NeighborAnswer::NotOurs => return Verdict::Pass,
        NeighborAnswer::Silence => return Verdict::Drop(Counter::DropNotOwner),
        NeighborAnswer::With(mac) => mac,
    };
    let reply: Arp = [hardware, protocol, lengths, 2_u16.to_be(), mac[0], mac[1], mac[2], t0, t1, m0, m1, m2, s0, s1];
    if pkt.write(ETH_LEN, reply).and_then(|()| pkt.write(0, [[m0, m1, m2], mac])).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    stats::count(Counter::NeighborAnswered);
    pkt.redirect(pkt.ifindex())
}

/// Records the MAC address of the next hop of an egress IP's subnet, if the next hop itself announces it, in the right VLAN.
#[inline(always)]
fn learn(pkt: &Packet, egress: u32, e: &EgressIp, who: &V6, mac: Mac) {
    let Some(hop) = NEXT_HOPS.get_ptr_mut(egress) else { return };
    if e.flags & flags::SUBNET == 0 || !who.is(&e.via) || pkt.vlan() != e.vlan {
        return;
    }
    // SAFETY: whole stores; a reader that sees half of a change sends one packet to the wrong place.
    unsafe {
        (&raw mut (*hop).mac).write_volatile(mac);
        (&raw mut (*hop).generation).write_volatile(e.generation);
        (&raw mut (*hop).known).write_volatile(1);
    }
}

/// Records the next hop of an egress IP's subnet from a neighbor advertisement. Returns whether the
/// packet was an advertisement. Its VLAN tag has already been removed.
#[inline(always)]
pub fn learn_advertised<F: Family>(pkt: &Packet, ip: &Ip<F>, egress: u32, e: &EgressIp) -> bool {
    if F::VERSION != 6 || ip.proto != proto::ICMPV6 || ip.hop_limit != 255 || ip.l4 != L4 {
        return false;
    }
    if pkt.load::<u8>(L4) != Some(ADVERTISEMENT_TYPE) {
        return false;
    }
    let Some(target) = pkt.load::<V6>(L4 + 8) else { return false };
    let Some(mac) = pkt.load::<Mac>(6) else { return false };
    if target.is(&e.via)
        && let Some(hop) = NEXT_HOPS.get_ptr_mut(egress)
    {
        // SAFETY: as in `learn`.
        unsafe {
            (&raw mut (*hop).mac).write_volatile(mac);
            (&raw mut (*hop).generation).write_volatile(e.generation);
            (&raw mut (*hop).known).write_volatile(1);
        }
    }
    true
}

/// Returns whether the packet is a neighbor solicitation (RFC 4861, section 7.1.1).
#[inline(always)]
pub fn is_solicitation<F: Family>(pkt: &Packet, ip: &Ip<F>) -> bool {
    F::VERSION == 6
        && ip.proto == proto::ICMPV6
        && ip.hop_limit == 255
        && ip.l4 == L4
        && pkt.load::<u8>(L4) == Some(SOLICITATION)
}

/// Handles a neighbor solicitation at an uplink.
#[inline(always)]
pub fn solicitation(pkt: &Packet) -> Verdict {
    let Some(target) = pkt.read_v6(L4 + 8) else { return Verdict::Pass };
    let Some((_, e)) = egress::find(target) else { return Verdict::Pass };
    let mac = match answer(e, pkt) {
        NeighborAnswer::NotOurs => return Verdict::Pass,
        NeighborAnswer::Silence => return Verdict::Drop(Counter::DropNotOwner),
        NeighborAnswer::With(mac) => mac,
    };
    let Some(asker) = pkt.read_v6(ETH_LEN + V6::SRC) else {
        return Verdict::Drop(Counter::DropMalformed);
    };
    let Some(asker_mac) = pkt.read::<Mac>(6) else {
        return Verdict::Drop(Counter::DropMalformed);
    };
    if pkt.resize(L4 + ADVERTISEMENT_LEN).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    match advertise(pkt, &target, &asker, &asker_mac, &mac) {
        Some(()) => {
            stats::count(Counter::NeighborAnswered);
            pkt.redirect(pkt.ifindex())
        }
        None => Verdict::Drop(Counter::DropMalformed),
    }
}

/// Writes an advertisement over the solicitation.
#[inline(always)]
fn advertise(pkt: &Packet, target: &V6, asker: &V6, asker_mac: &Mac, mac: &Mac) -> Option<()> {
    // Duplicate address detection asks from the unspecified address and is answered to all nodes (RFC 4861, 7.2.4).
    let unspecified = asker[0] | asker[1] | asker[2] | asker[3] == 0;
    // Chosen word by word, see `Packet::write_words`.
    let choose = |all_nodes: u32, i: usize| if unspecified { all_nodes.to_be() } else { asker[i] };
    let to = [choose(0xff02_0000, 0), choose(0, 1), choose(0, 2), choose(1, 3)];
    let (to_mac, flags) = if unspecified { (ALL_NODES_MAC, OVERRIDE) } else { (*asker_mac, OVERRIDE | SOLICITED) };
    let option = [TARGET_LINK_LAYER as u32 | (mac[0] as u32) << 16, mac[1] as u32 | (mac[2] as u32) << 16];
    let sum = csum::sum_words(target) * 2
        + csum::sum_words(&to)
        + csum::sum_words(&option)
        + csum::sum_words(&[ADVERTISEMENT.to_be(), flags.to_be(), ADVERTISEMENT_LEN.to_be(), proto::ICMPV6.to_be()]);
    let check = !csum::fold(sum);
    // The checksum is the second half of the first word as it lies in memory.
    let first = ADVERTISEMENT.to_be() | (check as u32) << 16;

    pkt.write(0, [to_mac, *mac])?;
    // Version, traffic class and flow label; payload length, next header and hop limit (RFC 8200, section 3).
    pkt.write(ETH_LEN, [0x6000_0000_u32.to_be(), (ADVERTISEMENT_LEN << 16 | proto::ICMPV6 << 8 | 255).to_be()])?;
    pkt.write_words(ETH_LEN + V6::SRC, target)?;
    pkt.write_words(ETH_LEN + V6::SRC + 16, &to)?;
    pkt.write(L4, [first, flags.to_be()])?;
    pkt.write_words(L4 + 8, target)?;
    pkt.write(L4 + 24, option)
}
