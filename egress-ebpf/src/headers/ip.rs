//! The differences between the headers of IPv4 and IPv6. Everything else is written once, over this trait.

use crate::headers::{
    context::Context,
    fields::{Ip, Part, proto},
    packet::{ETH_LEN, Packet},
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_PSEUDO_HDR},
    helpers::bpf_csum_diff,
};
use core::mem::offset_of;
use egress_common::{V4, V6, config::DatapathConfig, csum, hash::Words, limits::MAX_EXTENSION_HEADERS, mapped};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

/// `BPF_F_IPV6` of `bpf_l4_csum_replace` (Linux 6.16): the address change cancels out in `skb->csum`.
const BPF_F_IPV6: u64 = 1 << 7;

/// At most this many bytes of extension headers are walked; all ones, so that it serves as a mask.
const MAX_EXTENSIONS_LEN: u32 = 0x3ff;

/// Offset of the checksum in an IPv4 header.
const CHECK: u32 = offset_of!(Ipv4Hdr, check) as u32;

/// A header that cannot be read.
pub struct Malformed;

/// The headers of an address family; implemented by its address type.
pub trait Header: Copy + PartialEq + AsRef<[u32]> + Words + 'static {
    /// Its number for sockets and routes (`AF_INET`, `AF_INET6`).
    const AF: u32;
    /// Protocol number of its ICMP.
    const ICMP: u32;
    /// 4 or 6.
    const VERSION: u32;
    /// Bits of an address.
    const BITS: u32;
    /// Length of its header without options or extensions.
    const HEADER: u32;
    /// Offset of the source address in its header; the destination follows.
    const SRC: u32;
    /// Offset in its header of the protocol, or of the next header's type.
    const PROTOCOL: u32;

    /// Copies an address from a map. Word by word: otherwise LLVM calls memmove (see [`from_any`](Self::from_any)).
    fn copied(from: &Self) -> Self;
    /// Returns the length of the IP packet according to its header.
    fn total_len<C: Context>(pkt: &Packet<C>) -> Option<u32>;
    /// Returns the address at an offset of the packet.
    fn load<C: Context>(pkt: &Packet<C>, at: u32) -> Option<Self>;
    /// Overwrites the address at an offset of the packet.
    fn store(self, pkt: &Packet, at: u32) -> Option<()>;
    /// Returns the last four bytes of an address.
    fn last_word(self) -> u32;
    /// Returns the address held in the common form of `EGRESS_IPS`.
    fn from_any(words: &V6) -> Self;
    /// Returns whether this is the address held in that form.
    fn is(self, words: &V6) -> bool;
    /// Returns the address by which other nodes know this node; zeroes for none.
    fn own(config: &DatapathConfig) -> Self;
    /// Returns whether no policy ever applies to a destination: multicast, broadcast, link-local, loopback, unspecified.
    fn never_leaves(dst: Self) -> bool;
    /// Reads the header of the packet.
    fn parse<C: Context>(pkt: &Packet<C>) -> Result<Ip<Self>, Malformed>;
    /// Reads the header at `l3` of the packet embedded in an ICMP error.
    fn embedded<C: Context>(pkt: &Packet<C>, l3: u32) -> Option<Ip<Self>>;
    /// Updates a transport checksum at `offset` for a changed address; `flags` are added to the pseudo-header flag.
    fn checksum_address(pkt: &Packet, offset: u32, old: Self, new: Self, flags: u64, csum_ipv6: bool);
    /// Overwrites the address at `at` (an offset in the packet's IP header), keeps the header's checksum right, and
    /// decrements the hop limit if `hop`.
    fn write_address(pkt: &Packet, at: u32, old: Self, new: Self, hop: bool) -> Option<()>;
    /// Overwrites the address at `at` in the quoted header at `l3`, and updates the quoting ICMP checksum at `check`.
    fn quote_address(pkt: &Packet, l3: u32, at: u32, check: u32, old: Self, new: Self) -> Option<()>;
    /// Returns the transport checksum `check` after an address of its pseudo-header changed.
    fn update_checksum(check: u16, old: Self, new: Self) -> u16;
}

impl Header for V4 {
    const AF: u32 = 2;
    const ICMP: u32 = proto::ICMP;
    const VERSION: u32 = 4;
    const BITS: u32 = 32;
    const HEADER: u32 = Ipv4Hdr::LEN as u32;
    const SRC: u32 = offset_of!(Ipv4Hdr, src_addr) as u32;
    const PROTOCOL: u32 = offset_of!(Ipv4Hdr, proto) as u32;

    #[inline(always)]
    fn copied(from: &V4) -> V4 {
        *from
    }

    #[inline(always)]
    fn total_len<C: Context>(pkt: &Packet<C>) -> Option<u32> {
        pkt.read::<u16>(ETH_LEN + offset_of!(Ipv4Hdr, tot_len) as u32).map(|len| u16::from_be(len) as u32)
    }

    #[inline(always)]
    fn load<C: Context>(pkt: &Packet<C>, at: u32) -> Option<V4> {
        pkt.read(at)
    }

    #[inline(always)]
    fn store(self, pkt: &Packet, at: u32) -> Option<()> {
        pkt.write(at, self)
    }

    #[inline(always)]
    fn last_word(self) -> u32 {
        self[0]
    }

    #[inline(always)]
    fn from_any(words: &V6) -> V4 {
        [words[3]]
    }

    #[inline(always)]
    fn is(self, words: &V6) -> bool {
        mapped(self).is(words)
    }

    #[inline(always)]
    fn own(config: &DatapathConfig) -> V4 {
        config.own_v4
    }

    #[inline(always)]
    fn never_leaves(dst: V4) -> bool {
        let a = u32::from_be(dst[0]);
        a >> 28 >= 0xe || a >> 16 == 0xa9fe || a >> 24 == 127 || a >> 24 == 0
    }

    #[inline(always)]
    fn parse<C: Context>(pkt: &Packet<C>) -> Result<Ip<V4>, Malformed> {
        let h = pkt.read_header::<[u32; 5]>(ETH_LEN).ok_or(Malformed)?;
        v4_header(h, ETH_LEN).map(|ip| joined(pkt, ip))
    }

    #[inline(always)]
    fn embedded<C: Context>(pkt: &Packet<C>, l3: u32) -> Option<Ip<V4>> {
        v4_header(pkt.load::<[u32; 5]>(l3)?, l3).ok()
    }

    #[inline(always)]
    fn checksum_address(pkt: &Packet, offset: u32, old: V4, new: V4, flags: u64, _csum_ipv6: bool) {
        pkt.l4_checksum(offset, old[0] as u64, new[0] as u64, BPF_F_PSEUDO_HDR as u64 | 4 | flags);
    }

    #[inline(always)]
    fn write_address(pkt: &Packet, at: u32, old: V4, new: V4, hop: bool) -> Option<()> {
        let h = pkt.at::<[u16; 10]>(ETH_LEN)?;
        // SAFETY: `at` has checked the bounds; for alignment see `Packet::read`.
        unsafe {
            let word = |i: usize| h.cast::<u16>().add(i);
            let mut check = csum::update32(word(5).read(), old[0], new[0]);
            if hop {
                // Word 4 holds the time to live in its first byte in memory.
                let before = word(4).read();
                let after = u16::from_be(before).wrapping_sub(0x0100).to_be();
                check = csum::update16(check, before, after);
                word(4).write(after);
            }
            word(5).write(check);
        }
        pkt.write(ETH_LEN + at, new)
    }

    #[inline(always)]
    fn quote_address(pkt: &Packet, l3: u32, at: u32, _check: u32, old: V4, new: V4) -> Option<()> {
        // The change of the address and that of the header's checksum cancel out in the quoting checksum.
        let check = csum::update32(pkt.load::<u16>(l3 + CHECK)?, old[0], new[0]);
        pkt.store(l3 + CHECK, &check)?;
        pkt.store(l3 + at, &new)
    }

    #[inline(always)]
    fn update_checksum(check: u16, old: V4, new: V4) -> u16 {
        csum::update32(check, old[0], new[0])
    }
}

/// Returns the fields of a packet's header, on one path for the verifier where that pays.
#[inline(always)]
fn joined<A, C: Context>(pkt: &Packet<C>, ip: Ip<A>) -> Ip<A> {
    if C::MANY_PATHS { ip.hidden(pkt.len()) } else { ip }
}

/// Returns the fields of an IPv4 header that starts at `l3`.
#[inline(always)]
fn v4_header(h: [u32; 5], l3: u32) -> Result<Ip<V4>, Malformed> {
    let first = u32::from_be(h[0]);
    let header = (first >> 24 & 0xf) * 4;
    if first >> 28 != 4 || header < V4::HEADER {
        return Err(Malformed);
    }
    let second = u32::from_be(h[1]);
    let third = u32::from_be(h[2]);
    let part = match (second & 0x1fff, second & 0x2000) {
        (0, 0) => Part::Whole,
        (0, _) => Part::First,
        _ => Part::Later,
    };
    Ok(Ip {
        src: [h[3]],
        dst: [h[4]],
        proto: third >> 16 & 0xff,
        l4: l3 + header,
        part,
        id: second >> 16,
        hop_limit: third >> 24,
        whole_only: second & 0x4000 != 0,
    })
}

impl Header for V6 {
    const AF: u32 = 10;
    const ICMP: u32 = proto::ICMPV6;
    const VERSION: u32 = 6;
    const BITS: u32 = 128;
    const HEADER: u32 = Ipv6Hdr::LEN as u32;
    const SRC: u32 = offset_of!(Ipv6Hdr, src_addr) as u32;
    const PROTOCOL: u32 = offset_of!(Ipv6Hdr, next_hdr) as u32;

    #[inline(always)]
    fn copied(from: &V6) -> V6 {
        V6::from_any(from)
    }

    #[inline(always)]
    fn total_len<C: Context>(pkt: &Packet<C>) -> Option<u32> {
        pkt.read::<u16>(ETH_LEN + offset_of!(Ipv6Hdr, payload_len) as u32)
            .map(|len| u16::from_be(len) as u32 + Self::HEADER)
    }

    #[inline(always)]
    fn load<C: Context>(pkt: &Packet<C>, at: u32) -> Option<V6> {
        pkt.read_v6(at)
    }

    #[inline(always)]
    fn store(self, pkt: &Packet, at: u32) -> Option<()> {
        pkt.write_words(at, &self)
    }

    #[inline(always)]
    fn last_word(self) -> u32 {
        self[3]
    }

    #[inline(always)]
    fn from_any(words: &V6) -> V6 {
        // Word by word: otherwise LLVM calls memmove, which compares pointers: the verifier refuses that without CAP_PERFMON.
        // SAFETY: a reference is valid for reading.
        unsafe {
            [
                (&raw const words[0]).read_volatile(),
                (&raw const words[1]).read_volatile(),
                (&raw const words[2]).read_volatile(),
                (&raw const words[3]).read_volatile(),
            ]
        }
    }

    #[inline(always)]
    fn is(self, words: &V6) -> bool {
        (self[0] ^ words[0] | self[1] ^ words[1] | self[2] ^ words[2] | self[3] ^ words[3]) == 0
    }

    #[inline(always)]
    fn own(config: &DatapathConfig) -> V6 {
        Self::from_any(&config.own_v6)
    }

    #[inline(always)]
    fn never_leaves(dst: V6) -> bool {
        let first = u32::from_be(dst[0]);
        first >> 24 == 0xff
            || first >> 22 == 0xfe80 >> 6
            || (dst[0] | dst[1] | dst[2]) == 0 && u32::from_be(dst[3]) <= 1
    }

    #[inline(always)]
    fn parse<C: Context>(pkt: &Packet<C>) -> Result<Ip<V6>, Malformed> {
        let h = pkt.read_header::<[u32; 10]>(ETH_LEN).ok_or(Malformed)?;
        v6_header(pkt, h, ETH_LEN).map(|ip| joined(pkt, ip))
    }

    #[inline(always)]
    fn embedded<C: Context>(pkt: &Packet<C>, l3: u32) -> Option<Ip<V6>> {
        v6_header(pkt, pkt.load::<[u32; 10]>(l3)?, l3).ok()
    }

    #[inline(always)]
    fn checksum_address(pkt: &Packet, offset: u32, old: V6, new: V6, flags: u64, csum_ipv6: bool) {
        let (mut old, mut new) = (old, new);
        // SAFETY: both point to 16 bytes.
        let diff = unsafe { bpf_csum_diff(old.as_mut_ptr(), 16, new.as_mut_ptr(), 16, 0) };
        let family = if csum_ipv6 { BPF_F_IPV6 } else { 0 };
        pkt.l4_checksum(offset, 0, diff as u64, BPF_F_PSEUDO_HDR as u64 | flags | family);
    }

    #[inline(always)]
    fn write_address(pkt: &Packet, at: u32, _old: V6, new: V6, hop: bool) -> Option<()> {
        if hop {
            let at = ETH_LEN + offset_of!(Ipv6Hdr, hop_limit) as u32;
            let limit = pkt.read::<u8>(at)?;
            pkt.write(at, limit.wrapping_sub(1))?;
        }
        pkt.write_words(ETH_LEN + at, &new)
    }

    #[inline(always)]
    fn quote_address(pkt: &Packet, l3: u32, at: u32, check: u32, old: V6, new: V6) -> Option<()> {
        let (mut from, mut to) = (old, new);
        // SAFETY: both point to 16 bytes.
        let diff = unsafe { bpf_csum_diff(from.as_mut_ptr(), 16, to.as_mut_ptr(), 16, 0) };
        pkt.l4_checksum(check, 0, diff as u64, 0);
        pkt.store(l3 + at, &new)
    }

    #[inline(always)]
    fn update_checksum(check: u16, old: V6, new: V6) -> u16 {
        let mut check = check;
        for i in 0..4 {
            check = csum::update32(check, old[i], new[i]);
        }
        check
    }
}

/// Returns the fields of an IPv6 header that starts at `l3`, with its extension headers walked (RFC 8200, section 4).
#[inline(always)]
fn v6_header<C: Context>(pkt: &Packet<C>, h: [u32; 10], l3: u32) -> Result<Ip<V6>, Malformed> {
    if u32::from_be(h[0]) >> 28 != 6 {
        return Err(Malformed);
    }
    let second = u32::from_be(h[1]);
    let mut ip = Ip {
        src: [h[2], h[3], h[4], h[5]],
        dst: [h[6], h[7], h[8], h[9]],
        proto: second >> 8 & 0xff,
        l4: l3 + V6::HEADER,
        part: Part::Whole,
        id: 0,
        hop_limit: second & 0xff,
        whole_only: true,
    };
    if is_transport(ip.proto) {
        return Ok(ip);
    }
    walk_extensions(pkt, &mut ip)?;
    Ok(ip)
}

#[inline(always)]
fn is_transport(next: u32) -> bool {
    matches!(next, proto::TCP | proto::UDP | proto::ICMPV6)
}

#[inline(always)]
fn walk_extensions<C: Context>(pkt: &Packet<C>, ip: &mut Ip<V6>) -> Result<(), Malformed> {
    let skb = pkt.context().skb().ok_or(Malformed)?;
    let walked = walk_ipv6_extensions(skb, ip.l4, ip.proto);
    let offset = (walked >> 48) as u32;
    if offset == 0 {
        return Err(Malformed);
    }
    ip.l4 += (offset - 8) & MAX_EXTENSIONS_LEN;
    ip.proto = walked as u32 & 0xff;
    ip.id = (walked >> 16) as u32;
    ip.part = match walked >> 8 & 3 {
        0 => Part::Whole,
        1 => Part::First,
        _ => Part::Later,
    };
    Ok(())
}

/// Walks hop-by-hop (0), routing (43), fragment (44) and destination options (60) headers from `l4` on, where a header
/// of type `next` lies. Returns the result in one register: bits 48 up hold 8 plus the length of the walked headers, 16
/// up the identification, 8 up the part (0 whole, 1 first, 2 later), 0 up the protocol; 0 if the headers are malformed.
///
/// A global function, which the verifier checks once instead of on each path that leads to it.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn walk_ipv6_extensions(skb: *mut __sk_buff, l4: u32, next: u32) -> u64 {
    let pkt = Packet::from_raw(skb);
    let (mut proto, mut offset, mut id, mut part) = (next, 0u32, 0u32, 0u64);
    for _ in 0..MAX_EXTENSION_HEADERS {
        match proto {
            0 | 43 | 60 => {
                let Some([next, len]) = pkt.load::<[u8; 2]>(l4 + offset) else { return 0 };
                proto = next as u32;
                offset += (len as u32 + 1) * 8;
            }
            44 => {
                let Some([first, identification]) = pkt.load::<[u32; 2]>(l4 + offset) else { return 0 };
                let first = u32::from_be(first);
                proto = first >> 24;
                offset += 8;
                id = identification;
                part = match (first & 0xfff8, first & 1) {
                    (0, 0) => 0,
                    (0, _) => 1,
                    _ => 2,
                };
            }
            _ => break,
        }
        if part == 2 {
            break;
        }
    }
    // A remaining extension header means that the walk did not reach the end.
    if part != 2 && matches!(proto, 0 | 43 | 44 | 60) || offset > MAX_EXTENSIONS_LEN {
        return 0;
    }
    ((offset + 8) as u64) << 48 | (id as u64) << 16 | part << 8 | proto as u64 & 0xff
}
