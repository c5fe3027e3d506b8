//! How a gateway sends packets to the outside.

use crate::{
    headers::{
        context::{Context, Frame},
        fields::at,
        ip::Header,
        note,
        packet::{ETH_LEN, IPV6, Packet, moment, pair},
    },
    tables::{
        family::Family,
        maps::{CONFIRMED, EGRESS_IPS, Hop, NEXT_HOPS, UPLINKS},
    },
};
use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_FWD_DISABLED, BPF_FIB_LKUP_RET_NO_NEIGH,
        BPF_FIB_LKUP_RET_NOT_FWDED, BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LOOKUP_OUTPUT, bpf_fib_lookup,
    },
    helpers::bpf_fib_lookup as fib_lookup,
};
use core::mem::MaybeUninit;
use egress_common::{
    V4, V6,
    egress::{EgressIp, Uplink, flags},
    hash::GOLDEN,
    limits::MAX_HOPS,
    verdict::{Counter, Verdict},
};

/// The least MTU of a link that carries IPv6 (RFC 8200, section 5).
const IPV6_MIN_MTU: u32 = 1_280;
/// Length of the kernel's `struct bpf_fib_lookup`. (The binding is of an older layout, of the same length.)
const LOOKUP_LEN: usize = 64;
type Lookup = MaybeUninit<[u32; LOOKUP_LEN / 4]>;
/// Words of [`LOOKUP_LEN`]: family, protocol and source port; ports and length; the interface, in and out; then four
/// words for each address, from [`SRC`] and [`DST`] on. The next hop replaces the destination.
const FAMILY: usize = 0;
const IFINDEX: usize = 2;
const SRC: usize = 4;
const DST: usize = 8;
/// MAC addresses, three words.
const MACS: usize = 13;

/// No interface: only one packet has been seen so far, and the next one may be of another pair in
/// the same place. A lookup does not pay yet.
const ONCE: u32 = 0;
/// No interface: the routing table has no route that a program can follow (it encapsulates, or forwarding is switched off).
const NONE: u32 = u32::MAX;

/// The inputs of a route lookup besides the addresses.
#[derive(Clone, Copy)]
struct RouteQuery {
    /// The home interface of a floating egress IP. For a node's own address, the interface on which
    /// the packet arrived, with a bit that no index has.
    from: u32,
    /// The interface by which packets leave if the routing table gives none.
    home: u32,
}

impl RouteQuery {
    const ROUTED: u32 = 1 << 31;

    /// Returns the query for a packet of an egress IP. A floating egress IP has one uplink as its home. A node's own address
    /// has none: as with the node's sockets, the interface that has it need not be the one that leads to the destination.
    #[inline(always)]
    fn of<C: Context>(pkt: &Packet<C>, e: &EgressIp) -> Self {
        let routed = e.flags & flags::NODE_ADDRESS != 0;
        Self { from: if routed { pkt.ifindex() | Self::ROUTED } else { e.ifindex }, home: e.ifindex }
    }

    #[inline(always)]
    fn is_routed(self) -> bool {
        self.from & Self::ROUTED != 0
    }
}

/// Sends a translated packet of an egress IP to the outside. Returns a verdict's bits.
///
/// A global function, which the verifier checks once instead of on each path that leads to it.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn leave(skb: *mut __sk_buff, egress: u32) -> u64 {
    let pkt = Packet::from_raw(skb);
    pkt.note(note::SENT);
    let verdict = match EGRESS_IPS.get(egress) {
        None => Verdict::Drop(Counter::DropNotOwner),
        Some(e) if e.flags & flags::SUBNET != 0 => into_subnet(&pkt, egress, e),
        Some(e) if pkt.protocol() == IPV6 => by_route::<V6>(&pkt, RouteQuery::of(&pkt, e)),
        Some(e) => by_route::<V4>(&pkt, RouteQuery::of(&pkt, e)),
    };
    verdict.to_bits()
}

/// Sends a packet to the next hop of its egress IP's own subnet, which is in no routing table: the
/// agent asks for its MAC address, and the answers are read at the uplink (`neighbor`).
#[inline(always)]
fn into_subnet(pkt: &Packet, egress: u32, e: &EgressIp) -> Verdict {
    let macs = match in_subnet(egress, e) {
        Ok(macs) => macs,
        Err(counter) => return Verdict::Drop(counter),
    };
    if is_too_large(pkt, || pkt.mtu_of(e.ifindex)) {
        return Verdict::Drop(Counter::DropTooLarge);
    }
    if pkt.write_words(0, &macs).is_none() || e.vlan != 0 && pkt.push_vlan(e.vlan).is_none() {
        return Verdict::Drop(Counter::DropRedirect);
    }
    pkt.redirect(e.ifindex)
}

/// Returns the MAC addresses for a packet of an egress IP into its own subnet, as words in memory
/// order: the next hop's and the uplink's; or the reason to drop the packet.
#[inline(always)]
pub fn in_subnet(egress: u32, e: &EgressIp) -> Result<[u32; 3], Counter> {
    let hop = match NEXT_HOPS.get(egress) {
        Some(hop) if hop.known != 0 && hop.generation == e.generation => hop.mac,
        _ => return Err(Counter::DropNoNextHop),
    };
    // SAFETY: entries are replaced, not changed in place.
    match unsafe { UPLINKS.get(e.ifindex) } {
        Some(Uplink { mac, .. }) => Ok([pair(hop[0], hop[1]), pair(hop[2], mac[0]), pair(mac[1], mac[2])]),
        None => Err(Counter::DropNoUplink),
    }
}

/// Sends a packet along its route in the routing table.
#[inline(always)]
fn by_route<F: Family>(pkt: &Packet, way: RouteQuery) -> Verdict {
    let Some(src) = F::load(pkt, ETH_LEN + F::SRC) else { return Verdict::Drop(Counter::DropMalformed) };
    let Some(dst) = F::load(pkt, ETH_LEN + F::SRC + size_of::<F>() as u32) else {
        return Verdict::Drop(Counter::DropMalformed);
    };
    let Some((hop, _)) = kept(pkt, way, &src, &dst, way.is_routed()) else { return pkt.redirect_routed(way.home) };
    let mtu = || match hop.ifindex {
        ONCE | NONE => pkt.mtu_of(way.home),
        _ => hop.mtu,
    };
    if is_too_large(pkt, mtu) {
        return Verdict::Drop(Counter::DropTooLarge);
    }
    match hop.ifindex {
        // The kernel looks the route up.
        ONCE | NONE => pkt.redirect_routed(way.home),
        // SAFETY: `find` has written it.
        ifindex => unsafe { pkt.redirect_neigh(ifindex, (&raw const hop.neigh).cast()) },
    }
}

/// Returns whether the packet, or each part of a merged one, is certainly larger than `mtu` (0: not known). Nothing fragments a redirected
/// packet, and most drivers silently drop one that is too large. The MTU is not looked up for packets that fit every link with IPv6.
#[inline(always)]
fn is_too_large(pkt: &Packet, mtu: impl FnOnce() -> u32) -> bool {
    let length = match pkt.gso_size() {
        0 => pkt.len() - ETH_LEN,
        size => size + V4::HEADER + at::UDP_LEN,
    };
    length > IPV6_MIN_MTU && {
        let mtu = mtu();
        mtu != 0 && length > mtu
    }
}

/// Returns the record of a pair's next hop at this moment, and whether it was renewed just now.
/// `first`: look the next hop up even for the first packet of a pair.
#[inline(always)]
fn kept<F: Family, C: Context>(
    pkt: &Packet<C>,
    way: RouteQuery,
    src: &F,
    dst: &F,
    first: bool,
) -> Option<(&'static Hop<F>, bool)> {
    let hop = F::hops().get_ptr_mut(place(way, src, dst))?;
    // SAFETY: the element is this CPU's own, and programs that receive do not interrupt each other on one CPU, nor those that send.
    let hop = unsafe { &mut *hop };
    let now = moment();
    let same = hop.from == way.from && equal(&hop.src, src) && equal(&hop.dst, dst);
    let stale = !same || hop.moment != now || hop.ifindex == ONCE;
    if stale {
        hop.ifindex = if same || first { find(pkt, way, hop, src, dst) } else { ONCE };
        hop.src = F::copied(src);
        hop.dst = F::copied(dst);
        hop.from = way.from;
        hop.moment = now;
    }
    Some((hop, stale))
}

/// The way out for a frame without a socket buffer.
pub struct Out<'a> {
    /// The interface.
    pub ifindex: u32,
    /// MAC addresses of the next hop and of the interface, as words in memory order.
    pub macs: &'a [u32; 3],
    /// Largest IP packet.
    pub mtu: u32,
}

/// Returns the way out for a frame of an egress IP without its own subnet, if the routing table knows the next hop.
#[inline(always)]
pub fn way_out<F: Family>(pkt: &Packet<Frame>, e: &EgressIp, src: &F, dst: &F) -> Option<Out<'static>> {
    by_hop(kept(pkt, RouteQuery::of(pkt, e), src, dst, true)?)
}

/// Returns the way out for a frame to a neighbour on the link of an interface.
#[inline(always)]
pub fn on_link<F: Family>(pkt: &Packet<Frame>, ifindex: u32, src: &F, neighbour: &F) -> Option<Out<'static>> {
    by_hop(kept(pkt, RouteQuery { from: ifindex, home: ifindex }, src, neighbour, true)?)
}

/// Returns the way out by a next hop. The kernel must see a packet for it now and then, or it neither confirms the neighbour
/// nor learns its new MAC address: the first packet of each moment is left to the kernel, after its next hop was looked up.
#[inline(always)]
fn by_hop<F: Family>((hop, stale): (&'static Hop<F>, bool)) -> Option<Out<'static>> {
    if stale {
        let confirmed = CONFIRMED.get_ptr_mut(0)?;
        // SAFETY: as in `kept`.
        if unsafe { core::mem::replace(&mut *confirmed, hop.moment) } != hop.moment {
            return None;
        }
    }
    let known = hop.macs[0] | hop.macs[1] & 0xffff != 0;
    (hop.ifindex != NONE && known).then_some(Out { ifindex: hop.ifindex, macs: &hop.macs, mtu: hop.mtu })
}

/// Returns the place of a pair's next hop. Pairs that share a place evict each other, which costs only time, so a
/// cheap hash suffices (multiplication by the golden ratio: Knuth, The Art of Computer Programming, section 6.4).
#[inline(always)]
fn place<F: Family>(way: RouteQuery, src: &F, dst: &F) -> u32 {
    let fold = |address: &F| address.as_ref().iter().fold(0, |folded, word| folded ^ word);
    let h = ((fold(src) ^ way.from) as u64).wrapping_mul(GOLDEN).wrapping_add(fold(dst) as u64).wrapping_mul(GOLDEN);
    (h >> 32) as u32 % MAX_HOPS as u32
}

/// Compares two addresses. Word by word: otherwise LLVM calls memcmp.
#[inline(always)]
fn equal<F: Family>(a: &F, b: &F) -> bool {
    a.as_ref().iter().zip(b.as_ref()).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// Looks up the next hop in the routing table. Returns the interface that leads to it, or [`NONE`].
#[inline(always)]
fn find<F: Family, C: Context>(pkt: &Packet<C>, way: RouteQuery, hop: &mut Hop<F>, src: &F, dst: &F) -> u32 {
    let mut lookup = Lookup::uninit();
    let how = if way.is_routed() { 0 } else { BPF_FIB_LOOKUP_OUTPUT };
    let found = look_up(pkt, &mut lookup, how, way.from & !RouteQuery::ROUTED, src, dst);
    // SAFETY: all words are filled, and the index is below LOOKUP_LEN / 4.
    let get = |index: usize| unsafe { lookup.as_ptr().cast::<u32>().add(index).read_volatile() };
    let ifindex = get(IFINDEX);
    let usable = matches!(found, BPF_FIB_LKUP_RET_SUCCESS | BPF_FIB_LKUP_RET_NO_NEIGH | BPF_FIB_LKUP_RET_FRAG_NEEDED);
    if !usable || !way.is_routed() && ifindex != way.home {
        return NONE;
    }
    let [family, ..] = get(FAMILY).to_ne_bytes();
    hop.neigh = [family as u32, get(DST), get(DST + 1), get(DST + 2), get(DST + 3)];
    // Source before destination, and zeroes if the neighbour is not known; a frame has them in the opposite order.
    let (a, b, c) = (get(MACS), get(MACS + 1), get(MACS + 2));
    hop.macs = [b >> 16 | c << 16, c >> 16 | a << 16, a >> 16 | b << 16];
    hop.mtu = pkt.mtu_of(ifindex);
    ifindex
}

/// Returns whether the stack would treat a packet that arrives here as one for this node itself. Also
/// returns `true` if no route leads to `dst`, or if the stack does not forward from this interface.
#[inline(always)]
pub fn is_own<F: Family>(pkt: &Packet, src: &F, dst: &F) -> bool {
    let found = look_up(pkt, &mut Lookup::uninit(), 0, pkt.ifindex(), src, dst);
    matches!(found, BPF_FIB_LKUP_RET_NOT_FWDED | BPF_FIB_LKUP_RET_FWD_DISABLED)
}

/// Queries the routing table: fills in the lookup, and returns one of `BPF_FIB_LKUP_RET_*`.
#[inline(always)]
fn look_up<F: Family, C: Context>(
    pkt: &Packet<C>,
    lookup: &mut Lookup,
    how: u32,
    ifindex: u32,
    src: &F,
    dst: &F,
) -> u32 {
    let word = lookup.as_mut_ptr().cast::<u32>();
    // Volatile: otherwise LLVM calls memset for the zeros, whose loop the verifier refuses without CAP_PERFMON.
    let put = |index: usize, value: u32| {
        // SAFETY: every index is below LOOKUP_LEN / 4.
        unsafe { word.add(index).write_volatile(value) }
    };
    for index in 0..LOOKUP_LEN / 4 {
        put(index, 0);
    }
    put(FAMILY, u32::from_ne_bytes([F::AF as u8, 0, 0, 0]));
    put(IFINDEX, ifindex);
    src.as_ref().iter().enumerate().for_each(|(i, part)| put(SRC + i, *part));
    dst.as_ref().iter().enumerate().for_each(|(i, part)| put(DST + i, *part));
    // SAFETY: all words are filled, and the length is that of the array.
    unsafe { fib_lookup(pkt.context().raw(), word.cast::<bpf_fib_lookup>(), LOOKUP_LEN as i32, how) as u32 }
}
