//! The way out of a gateway, to the outside.

use crate::{
    IPV6,
    maps::{NEXT_HOPS, UPLINKS},
    packet::{ETH_LEN, Packet},
};
use aya_ebpf::{
    bindings::{BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup},
    helpers::bpf_fib_lookup as fib_lookup,
};
use core::mem::MaybeUninit;
use egress_common::{
    V4, V6,
    egress::{EgressIp, flags},
    verdict::{Counter, Verdict},
};

/// Length of the kernel's `struct bpf_fib_lookup`. (The binding is of an older layout, of the same length.)
const LOOKUP_LEN: usize = 64;
/// Words of [`LOOKUP_LEN`]: family, protocol and source port; ports and length; the interface, in and out; then from
/// [`SRC`] and [`DST`] on four words for each address.
const FAMILY: usize = 0;
const IFINDEX: usize = 2;
const SRC: usize = 4;
const DST: usize = 8;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// Sends a translated packet to the outside.
///
/// A floating egress IP is at home at one uplink. A node's own address is not: as with the node's own sockets, the interface
/// that has it need not be the one by which the destination is reached.
#[inline(always)]
pub fn leave(pkt: &Packet, egress: u32, e: &EgressIp) -> Verdict {
    if e.flags & flags::SUBNET != 0 {
        return into_subnet(pkt, egress, e);
    }
    let routed = if e.flags & flags::NODE_ADDRESS != 0 { output(pkt) } else { 0 };
    pkt.redirect_routed(if routed != 0 { routed } else { e.ifindex })
}

/// Sends a packet to the next hop of its egress IP's own subnet, which no routing table knows: the agent asks for its MAC
/// address, and the answers are read at the uplink (`neighbor`).
#[inline(always)]
fn into_subnet(pkt: &Packet, egress: u32, e: &EgressIp) -> Verdict {
    let hop = match NEXT_HOPS.get(egress) {
        Some(hop) if hop.known != 0 && hop.generation == e.generation => hop.mac,
        _ => return Verdict::Drop(Counter::DropNoNextHop),
    };
    // SAFETY: entries are replaced, not changed in place.
    let Some(uplink) = (unsafe { UPLINKS.get(e.ifindex) }) else { return Verdict::Drop(Counter::DropNoUplink) };
    if pkt.write(0, [hop, uplink.mac]).is_none() || e.vlan != 0 && pkt.push_vlan(e.vlan).is_none() {
        return Verdict::Drop(Counter::DropRedirect);
    }
    pkt.redirect(e.ifindex)
}

/// The interface that the routing table sends the packet to, by its source and destination; 0 where it does not say.
#[inline(never)]
fn output(pkt: &Packet) -> u32 {
    let mut lookup = MaybeUninit::<[u32; LOOKUP_LEN / 4]>::uninit();
    let word = lookup.as_mut_ptr().cast::<u32>();
    // Volatile, or LLVM makes a call to memset of the zeros, whose loop the verifier refuses without CAP_PERFMON.
    let put = |index: usize, value: u32| {
        // SAFETY: every index is below LOOKUP_LEN / 4.
        unsafe { word.add(index).write_volatile(value) }
    };
    for index in 0..LOOKUP_LEN / 4 {
        put(index, 0);
    }
    put(IFINDEX, pkt.ifindex());
    if pkt.protocol() == IPV6 {
        let Some([src, dst]) = pkt.read::<[V6; 2]>(ETH_LEN + 8) else { return 0 };
        put(FAMILY, u32::from_ne_bytes([AF_INET6, 0, 0, 0]));
        for index in 0..4 {
            put(SRC + index, src[index]);
            put(DST + index, dst[index]);
        }
    } else {
        let Some([src, dst]) = pkt.read::<[V4; 2]>(ETH_LEN + 12) else { return 0 };
        put(FAMILY, u32::from_ne_bytes([AF_INET, 0, 0, 0]));
        put(SRC, src[0]);
        put(DST, dst[0]);
    }
    // SAFETY: all words are filled, and the length is that of the array.
    let found = unsafe { fib_lookup(pkt.raw().cast(), word.cast::<bpf_fib_lookup>(), LOOKUP_LEN as i32, 0) } as u32;
    match found {
        // SAFETY: as above.
        BPF_FIB_LKUP_RET_SUCCESS | BPF_FIB_LKUP_RET_NO_NEIGH | BPF_FIB_LKUP_RET_FRAG_NEEDED => unsafe {
            word.add(IFINDEX).read_volatile()
        },
        _ => 0,
    }
}
