//! The transports between a source node and a gateway, numbered from the one that always works to the fastest.

/// The tunnel device.
pub const DEVICE: u32 = 0;
/// The tunnel device's wire format, written and stripped by the programs.
pub const VXLAN: u32 = 1;
/// No outer header: the frame goes to the other node's MAC address.
pub const DIRECT: u32 = 2;

/// Returns the bit of a transport in a set of transports.
#[inline(always)]
pub const fn bit(transport: u32) -> u32 {
    1 << (transport & 3)
}

/// Returns the best transport of the set `may` that is no better than `wanted`; the device is always in the set.
#[inline(always)]
pub const fn clamp(wanted: u32, may: u32) -> u32 {
    if wanted >= DIRECT && may & bit(DIRECT) != 0 {
        DIRECT
    } else if wanted >= VXLAN && may & bit(VXLAN) != 0 {
        VXLAN
    } else {
        DEVICE
    }
}

/// Bytes of IP, UDP, VXLAN and inner Ethernet headers around a packet, over IPv4.
pub const OVERHEAD_V4: u32 = 20 + 8 + 8 + 14;
/// The same over IPv6.
pub const OVERHEAD_V6: u32 = 40 + 8 + 8 + 14;

/// First word of the outer IPv4 header, without type of service and length; memory order.
pub const OUTER_V4: u32 = 0x4500_0000_u32.to_be();
/// Third word of the outer IPv4 header, without the checksum: hop limit 64 and UDP; memory order.
pub const OUTER_V4_TTL: u32 = (64_u32 << 24 | 17 << 16).to_be();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_transport_is_the_best_available_up_to_the_requested_one() {
        let all = bit(DEVICE) | bit(VXLAN) | bit(DIRECT);
        assert_eq!([DEVICE, VXLAN, DIRECT].map(|wanted| clamp(wanted, all)), [DEVICE, VXLAN, DIRECT]);
        assert_eq!(clamp(DIRECT, bit(DEVICE) | bit(VXLAN)), VXLAN);
        assert_eq!(clamp(VXLAN, bit(DEVICE) | bit(DIRECT)), DEVICE);
        assert_eq!([clamp(DIRECT, 0), clamp(u32::MAX, all)], [DEVICE, DIRECT]);
    }
}
