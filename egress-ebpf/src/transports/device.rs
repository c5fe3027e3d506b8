//! The tunnel device: sending to a node, receiving from one.

use crate::headers::packet::{Mac, Packet};
use aya_ebpf::{
    bindings::{BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX, bpf_tunnel_key},
    helpers::{bpf_skb_get_tunnel_key, bpf_skb_set_tunnel_key},
};
use core::mem::MaybeUninit;
use egress_common::{
    V6,
    abi::{INNER_DST_MAC, INNER_SRC_MAC},
    config::DatapathConfig,
    egress::NodeEntry,
    mapped,
    verdict::{Counter, Verdict},
};

const KEY_LEN: u32 = size_of::<bpf_tunnel_key>() as u32;
/// Hop limit of the outer header.
const OUTER_TTL: u8 = 64;
/// Destination and source MAC address of tunnelled frames.
pub const INNER_MACS: [Mac; 2] = [words(INNER_DST_MAC), words(INNER_SRC_MAC)];

/// Returns a MAC address as words in memory order.
pub const fn words(m: [u8; 6]) -> Mac {
    [u16::from_ne_bytes([m[0], m[1]]), u16::from_ne_bytes([m[2], m[3]]), u16::from_ne_bytes([m[4], m[5]])]
}

/// Sends the packet through the tunnel to `node`.
#[inline(always)]
pub fn send(pkt: &Packet, config: &DatapathConfig, node: &NodeEntry, vni: u32) -> Verdict {
    // The next node's programs redirect by IP address; the inner MAC addresses must only pass the device.
    if pkt.write(0, INNER_MACS).is_none() || set_key(pkt, &node.addr, node.tunnel_v4, vni) != 0 {
        return Verdict::Drop(Counter::DropRedirect);
    }
    pkt.redirect(config.tunnel_ifindex)
}

/// Sets the outer destination; `v4` is the IPv4 address in host byte order, or 0 to use `addr` as IPv6.
#[inline(always)]
fn set_key(pkt: &Packet, addr: &V6, v4: u32, vni: u32) -> i64 {
    let (remote, flags) = if v4 != 0 {
        ([v4, 0, 0, 0], BPF_F_ZERO_CSUM_TX as u64)
    } else {
        (*addr, BPF_F_ZERO_CSUM_TX as u64 | BPF_F_TUNINFO_IPV6 as u64)
    };
    // struct bpf_tunnel_key: identifier, remote address, then type of service, hop limit and flags, flow label, local
    // address. Volatile: otherwise LLVM calls memset for the zeros, whose loop the verifier refuses without CAP_PERFMON.
    let mut key = MaybeUninit::<[u32; KEY_LEN as usize / 4]>::uninit();
    let word = key.as_mut_ptr().cast::<u32>();
    // SAFETY: all words are within the array, and all are written.
    unsafe {
        word.write_volatile(vni);
        for (i, part) in remote.into_iter().enumerate() {
            word.add(1 + i).write_volatile(part);
            word.add(7 + i).write_volatile(0);
        }
        word.add(5).write_volatile(u32::from_ne_bytes([0, OUTER_TTL, 0, 0]));
        word.add(6).write_volatile(0);
        bpf_skb_set_tunnel_key(pkt.raw(), word.cast(), KEY_LEN, flags) as i64
    }
}

/// Returns the outer source address and network identifier of a packet that the tunnel device received.
#[inline(always)]
pub fn get_key(pkt: &Packet) -> Option<(V6, u32)> {
    let mut key = MaybeUninit::<bpf_tunnel_key>::uninit();
    // SAFETY: the helper fills all of `key`, or clears it and fails.
    unsafe {
        if bpf_skb_get_tunnel_key(pkt.raw(), key.as_mut_ptr(), KEY_LEN, 0) == 0 {
            let key = key.assume_init();
            return Some((mapped([key.__bindgen_anon_1.remote_ipv4.to_be()]), key.tunnel_id));
        }
        if bpf_skb_get_tunnel_key(pkt.raw(), key.as_mut_ptr(), KEY_LEN, BPF_F_TUNINFO_IPV6 as u64) == 0 {
            let key = key.assume_init();
            return Some((key.__bindgen_anon_1.remote_ipv6, key.tunnel_id));
        }
    }
    None
}
