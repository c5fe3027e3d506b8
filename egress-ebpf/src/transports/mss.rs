//! Keeps TCP segments small enough for the tunnel, by the maximum segment size option of SYN and SYN+ACK.

use crate::{
    headers::{
        fields::{at, checksum_offset, proto},
        hidden::hidden,
        packet::{IPV4, Packet},
    },
    tables::{family::Family, maps::NODES},
};
use aya_ebpf::bindings::__sk_buff;
use egress_common::{V4, V6, config::DatapathConfig, transport::DIRECT};

/// Options examined before the search is given up; Linux sends this option first.
const MAX_OPTIONS: u32 = 10;

/// Length of a TCP header without options.
const TCP_HEADER: u32 = at::TCP_LEN;
/// Kind and length of the option (RFC 9293, section 3.2).
const KIND: u8 = 2;
const LENGTH: u8 = 4;

/// Lowers the option in the TCP header at `l4` to the size that fits the transport to the carrier `to` of the egress IP.
#[inline(always)]
pub fn clamp<F: Family>(pkt: &Packet, config: &DatapathConfig, to: u32, l4: u32) {
    let limit = match NODES.get(to) {
        // A tunnel over IPv6 carries no larger segments when the transport changes, because nothing fragments them.
        Some(node) if node.forward == DIRECT && node.tunnel_v4 != 0 => node.mtu.saturating_sub(F::HEADER + TCP_HEADER),
        _ if F::VERSION == 4 => config.mss_v4,
        _ => config.mss_v6,
    };
    clamp_mss(pkt.raw(), l4, limit);
}

/// A global function, which the verifier checks once instead of on each path that leads to it.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn clamp_mss(skb: *mut __sk_buff, l4: u32, limit: u32) -> i32 {
    let pkt = Packet::from_raw(skb);
    let usual = if pkt.protocol() == IPV4 { usual::<V4>(&pkt, l4, limit) } else { usual::<V6>(&pkt, l4, limit) };
    if usual.is_some() {
        return 1;
    }
    let Some(words) = pkt.load::<u8>(l4 + at::TCP_LENGTH) else { return 0 };
    let end = (words >> 4) as u32 * 4;
    let mut at = TCP_HEADER;
    for _ in 0..MAX_OPTIONS {
        // Otherwise the options before this one would each be a separate path. The verifier knows no argument of a global function.
        at = hidden(at, limit);
        if limit == 0 || at + 4 > end {
            return 0;
        }
        let Some([kind, len]) = pkt.load::<[u8; 2]>(l4 + at) else { return 0 };
        match (kind, len) {
            (0, _) => return 0,
            (1, _) => at += 1,
            (KIND, LENGTH) => {
                let Some(old) = pkt.load::<u16>(l4 + at + 2) else { return 0 };
                if let Some(new) = lowered(&pkt, l4, at, limit, old) {
                    // The size of the packet was checked when the old value was read.
                    let _ = pkt.store(l4 + at + 2, &new);
                }
                return 1;
            }
            (_, 0 | 1) => return 0,
            (_, len) => at += len as u32,
        }
    }
    0
}

/// Handles the option right after a plain header, as Linux sends it, without a call for each byte. `None`: it is not there.
#[inline(always)]
fn usual<F: Family>(pkt: &Packet, l4: u32, limit: u32) -> Option<()> {
    let h = pkt.read_l4::<[u32; 3]>(F::HEADER, l4, at::TCP_LENGTH)?;
    let [words, ..] = h[0].to_ne_bytes();
    let [KIND, LENGTH, high, low] = h[2].to_ne_bytes() else { return None };
    if words >> 4 < 6 {
        return None;
    }
    match lowered(pkt, l4, TCP_HEADER, limit, u16::from_ne_bytes([high, low])) {
        Some(new) => pkt.write_l4(F::HEADER, l4, TCP_HEADER + 2, new),
        None => Some(()),
    }
}

/// Returns the new value of the option with the value `old` at `at`, if it changes, and updates the checksum.
#[inline(always)]
fn lowered(pkt: &Packet, l4: u32, at: u32, limit: u32, old: u16) -> Option<u16> {
    if limit == 0 || u16::from_be(old) as u32 <= limit {
        return None;
    }
    let new = (limit as u16).to_be();
    // An option may begin at an odd offset, where its value straddles two words of the checksum; each half then counts
    // with its bytes swapped.
    let (from, to) = if at & 1 == 0 { (old, new) } else { (old.swap_bytes(), new.swap_bytes()) };
    pkt.l4_checksum(l4 + checksum_offset(proto::TCP), from as u64, to as u64, 2);
    Some(new)
}
