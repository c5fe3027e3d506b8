//! Sending to another node: the transport that a packet takes, and packets that a transport cannot carry.

use crate::{
    headers::{
        fields::{at, proto},
        ip::Header,
        note,
        packet::{ETH_LEN, IPV4, Packet},
    },
    tables::{
        family::Family,
        maps::{CONFIG, NODES, REPLY_TRANSPORT},
        stats,
    },
    transports::{device, vxlan},
};
use aya_ebpf::bindings::__sk_buff;
use egress_common::{
    V4, V6,
    abi::{VNI_FORWARD, VNI_PROBE, VNI_REPLY},
    egress::NodeEntry,
    hash,
    transport::{DIRECT, VXLAN, clamp},
    verdict::{Counter, Verdict, purpose},
};

/// Assumed length of headers that are not at their usual offsets: more than they can have.
const LONGEST_HEADERS: u32 = 40 + 64 + 60;

/// Sends the packet for `purpose` to the node whose index in `NODES` is in the lower half of `to`. A packet that the node's transport
/// cannot carry takes the tunnel device. The upper half of `to` distinguishes flows on the path. Returns a verdict's bits.
///
/// A global function, which the verifier checks once instead of on each path that leads to it.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn send_to_node(skb: *mut __sk_buff, to: u32, purpose: u32) -> u64 {
    let pkt = Packet::from_raw(skb);
    pkt.note(note::SENT);
    let index = to & 0xffff;
    let (Some(config), Some(node)) = (CONFIG.get(0), NODES.get(index)) else {
        return Verdict::Drop(Counter::DropNoOwner).to_bits();
    };
    let (transport, vni) = match purpose {
        purpose::FORWARD => (node.forward, VNI_FORWARD),
        purpose::REPLY => (reply_transport(index, node), VNI_REPLY),
        probe => (probe - purpose::PROBE, VNI_PROBE),
    };
    let short = match transport {
        DIRECT => direct(&pkt, node),
        VXLAN => vxlan::send(&pkt, config, node, vni, to >> 16),
        _ => Err(node.why),
    };
    match short {
        Ok(verdict) => verdict.to_bits(),
        Err(why) => {
            if why != 0 {
                stats::count_index(why);
            }
            // Only over IPv4 does the device send packets that are too large, in fragments.
            if node.tunnel_v4 == 0 && config.room != 0 && segment(&pkt) > config.room {
                return Verdict::Drop(Counter::DropTooLarge).to_bits();
            }
            stats::count(Counter::SentTunnel);
            device::send(&pkt, config, node, vni).to_bits()
        }
    }
}

/// Returns a number that distinguishes a packet from those of other flows, by ports and an address.
#[inline(always)]
pub fn entropy<F: Family>(ports: (u16, u16), address: F) -> u32 {
    let mut h = ports.0 as u32 | (ports.1 as u32) << 16;
    h ^= address.last_word();
    hash::scatter(h)
}

/// Returns the reply transport of node number `index`, as far as this node allows it.
#[inline(always)]
pub fn reply_transport(index: u32, node: &NodeEntry) -> u32 {
    match REPLY_TRANSPORT.get(index) {
        Some(&reply_transport) => clamp(reply_transport, node.may),
        None => 0,
    }
}

/// Sends the packet unchanged to the node's MAC address. An error is the index of the counter for the reason.
#[inline(always)]
fn direct(pkt: &Packet, node: &NodeEntry) -> Result<Verdict, u32> {
    if largest(pkt, is_fragment(pkt)) > node.mtu {
        return Err(Counter::DeviceMtu as u32);
    }
    if pkt.write_words(0, &macs(node)).is_none() {
        return Err(Counter::DeviceRefused as u32);
    }
    stats::count(Counter::SentDirect);
    Ok(pkt.redirect(node.ifindex))
}

/// Returns the node's MAC address and that of our interface, as words in memory order.
#[inline(always)]
pub fn macs(node: &NodeEntry) -> [u32; 3] {
    // Read one by one: otherwise LLVM calls memmove (see `Packet::write_words`).
    let macs = (&raw const node.macs).cast::<u32>();
    // SAFETY: three words, and the record is aligned for words.
    unsafe { [macs.read_volatile(), macs.add(1).read_volatile(), macs.add(2).read_volatile()] }
}

/// Returns the length by which a packet's transport is chosen. A fragment counts as the largest packet that its ingress
/// interface carries: all fragments of a datagram must take the same transport. Through the device, some of them are fragmented
/// again and reassembled by the other node's stack; a small last fragment over another transport would arrive first.
#[inline(always)]
pub fn largest(pkt: &Packet, fragment: bool) -> u32 {
    let len = segment(pkt);
    if fragment { len.max(pkt.mtu_of(0)) } else { len }
}

/// Returns whether a packet is a fragment, or may be one because it has an IPv6 extension header.
#[inline(always)]
pub fn is_fragment(pkt: &Packet) -> bool {
    if pkt.protocol() == IPV4 {
        // "More fragments", and the offset.
        pkt.read::<u16>(ETH_LEN + 6).is_some_and(|flags| u16::from_be(flags) & 0x3fff != 0)
    } else {
        let next = pkt.read::<u8>(ETH_LEN + V6::PROTOCOL).map(u32::from);
        !matches!(next, Some(proto::TCP | proto::UDP | proto::ICMPV6))
    }
}

/// Returns the length of the longest IP packet that this one becomes on the wire: for a merged packet, of a part with its headers.
#[inline(always)]
pub fn segment(pkt: &Packet) -> u32 {
    match pkt.gso_size() {
        0 => pkt.len() - ETH_LEN,
        size => size + headers(pkt),
    }
}

/// Returns the length of the IP and transport headers of a merged packet.
#[inline(always)]
fn headers(pkt: &Packet) -> u32 {
    let (header, next) = if pkt.protocol() == IPV4 {
        if pkt.read::<u8>(ETH_LEN) != Some(0x45) {
            return LONGEST_HEADERS;
        }
        (V4::HEADER, pkt.read::<u8>(ETH_LEN + V4::PROTOCOL))
    } else {
        (V6::HEADER, pkt.read::<u8>(ETH_LEN + V6::PROTOCOL))
    };
    match next.map(u32::from) {
        // The offset of the data, in the upper half of byte 12 (RFC 9293, section 3.1).
        Some(proto::TCP) => match pkt.load::<u8>(ETH_LEN + header + at::TCP_LENGTH) {
            Some(offset) => header + (offset >> 4) as u32 * 4,
            None => LONGEST_HEADERS,
        },
        Some(proto::UDP) => header + at::UDP_LEN,
        _ => LONGEST_HEADERS,
    }
}
