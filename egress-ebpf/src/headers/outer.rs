//! The outer headers of tunnelled packets.

use crate::headers::{
    context::Context,
    fields::proto,
    ip::Header,
    packet::{ETH_LEN, Packet},
};
use egress_common::{V4, V6, config::DatapathConfig, csum, mapped};

/// The headers around a tunnelled packet; implemented by the address type of their family.
pub trait Outer: Header {
    /// Returns whether this is UDP for this node's own address, as tunnelled packets are.
    fn may_be_tunnelled<C: Context>(pkt: &Packet<C>, config: &DatapathConfig) -> bool;
    /// If such a packet is tunnelled, returns its outer source address in the common form, and
    /// whether its outer headers can be removed as they are.
    fn outer<C: Context>(pkt: &Packet<C>, config: &DatapathConfig) -> Option<(V6, bool)>;
}

impl Outer for V4 {
    #[inline(always)]
    fn may_be_tunnelled<C: Context>(pkt: &Packet<C>, config: &DatapathConfig) -> bool {
        match pkt.read_header::<[u32; 5]>(ETH_LEN) {
            Some(h) => u32::from_be(h[2]) >> 16 & 0xff == proto::UDP && h[4] == config.own_v4[0],
            None => false,
        }
    }

    #[inline(always)]
    fn outer<C: Context>(pkt: &Packet<C>, config: &DatapathConfig) -> Option<(V6, bool)> {
        let h = pkt.read_header::<[u32; 5]>(ETH_LEN)?;
        let first = u32::from_be(h[0]);
        let udp = pkt.read_header::<[u32; 2]>(ETH_LEN + V4::HEADER)?;
        let whole = u32::from_be(h[1]) & 0x3fff == 0;
        let plain = first >> 24 == 0x45;
        // With options or in a later fragment, these bytes are not the ports.
        if plain && whole && u32::from_be(udp[0]) & 0xffff != config.tunnel_port {
            return None;
        }
        let length = first & 0xffff;
        let exact = length == pkt.len() - ETH_LEN && datagram(udp, length - V4::HEADER);
        let intact = csum::fold(csum::sum_words(&h)) == 0xffff;
        Some((mapped([h[3]]), plain && whole && exact && intact && first >> 16 & 3 != 3))
    }
}

impl Outer for V6 {
    #[inline(always)]
    fn may_be_tunnelled<C: Context>(pkt: &Packet<C>, config: &DatapathConfig) -> bool {
        let own = &config.own_v6;
        match pkt.read_header::<[u32; 10]>(ETH_LEN) {
            Some([_, second, _, _, _, _, a, b, c, d]) => {
                u32::from_be(second) >> 8 & 0xff == proto::UDP
                    && (a ^ own[0]) | (b ^ own[1]) | (c ^ own[2]) | (d ^ own[3]) == 0
            }
            None => false,
        }
    }

    #[inline(always)]
    fn outer<C: Context>(pkt: &Packet<C>, config: &DatapathConfig) -> Option<(V6, bool)> {
        let h = pkt.read_header::<[u32; 2]>(ETH_LEN)?;
        let udp = pkt.read_header::<[u32; 2]>(ETH_LEN + V6::HEADER)?;
        if u32::from_be(udp[0]) & 0xffff != config.tunnel_port {
            return None;
        }
        let source = pkt.read_v6(ETH_LEN + V6::SRC)?;
        let length = u32::from_be(h[1]) >> 16;
        let exact = length + V6::HEADER == pkt.len() - ETH_LEN && datagram(udp, length);
        Some((source, exact && u32::from_be(h[0]) >> 20 & 3 != 3))
    }
}

/// Returns whether a UDP header has this length and no checksum, which would need verification.
#[inline(always)]
fn datagram(udp: [u32; 2], length: u32) -> bool {
    u32::from_be(udp[1]) == length << 16
}
