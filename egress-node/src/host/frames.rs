//! Builds and reads the frames that announce the holder of an address (gratuitous ARP and unsolicited Neighbor Advertisements), and the
//! requests for an address. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use egress_common::csum;
use etherparse::icmpv6::{Icmpv6PayloadSlice, NdpOptionSlice};
use etherparse::{
    ArpEthIpv4Packet, ArpOperation, EtherType, Icmpv6Type, IpNumber, NetSlice, PacketBuilder, SlicedPacket,
    TransportSlice,
};

use egress_core::network::MacAddress;

/// The Ethernet and ARP headers with padding up to the shortest frame, in bytes.
pub const ARP_FRAME: usize = 60;
/// The Ethernet, IPv6 and ICMPv6 headers, the target and one option, in bytes.
pub const ADVERTISEMENT_FRAME: usize = 14 + 40 + ADVERTISEMENT;

const ADVERTISEMENT: usize = 8 + 16 + 8;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
/// Neighbor discovery is accepted only from the same link, where no router has decremented the hop limit.
const HOP_LIMIT: u8 = 255;
/// The hop limit of a segment to a pod of this node.
const SEGMENT_HOP_LIMIT: u8 = 64;
const OVERRIDE: u8 = 0x20;
const TARGET_LINK_LAYER_ADDRESS: u8 = 2;
const SOURCE_LINK_LAYER_ADDRESS: u8 = 1;

/// The two forms of gratuitous ARP. Some stacks listen to only one of them, so both are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArpForm {
    /// A request for the address itself, as `arping -U` sends it.
    Request,
    /// An unsolicited reply, as `arping -A` sends it.
    Reply,
}

/// Returns all frames that announce the address at the MAC address, in the order in which to send them.
pub fn announcements(address: IpAddr, mac: MacAddress) -> Vec<Vec<u8>> {
    match address {
        IpAddr::V4(address) => {
            [ArpForm::Request, ArpForm::Reply].map(|form| arp_announcement(address, mac, form).to_vec()).to_vec()
        }
        IpAddr::V6(address) => vec![neighbor_advertisement(address, mac).to_vec()],
    }
}

/// Returns a broadcast frame that says that the address is at the MAC address.
pub fn arp_announcement(address: Ipv4Addr, mac: MacAddress, form: ArpForm) -> [u8; ARP_FRAME] {
    let (operation, target) = match form {
        ArpForm::Request => (ArpOperation::REQUEST, MacAddress::BROADCAST),
        ArpForm::Reply => (ArpOperation::REPLY, mac),
    };
    let arp = ArpEthIpv4Packet {
        operation,
        sender_mac: mac.0,
        sender_ipv4: address.octets(),
        target_mac: target.0,
        target_ipv4: address.octets(),
    };
    let mut frame = [0; ARP_FRAME];
    frame[..6].copy_from_slice(&MacAddress::BROADCAST.0);
    frame[6..12].copy_from_slice(&mac.0);
    frame[12..14].copy_from_slice(&EtherType::ARP.0.to_be_bytes());
    frame[14..14 + ArpEthIpv4Packet::LEN].copy_from_slice(&arp.to_bytes());
    frame
}

/// Returns a frame to all nodes of the link that says that the address is at the MAC address, and overrides their neighbour entries.
pub fn neighbor_advertisement(address: Ipv6Addr, mac: MacAddress) -> [u8; ADVERTISEMENT_FRAME] {
    let mut frame = [0; ADVERTISEMENT_FRAME];
    frame[..6].copy_from_slice(&ALL_NODES_MAC);
    frame[6..12].copy_from_slice(&mac.0);
    frame[12..14].copy_from_slice(&EtherType::IPV6.0.to_be_bytes());
    let (ip, icmp) = frame[14..].split_at_mut(40);
    ip[0] = 6 << 4;
    ip[4..6].copy_from_slice(&(ADVERTISEMENT as u16).to_be_bytes());
    ip[6] = IpNumber::IPV6_ICMP.0;
    ip[7] = HOP_LIMIT;
    ip[8..24].copy_from_slice(&address.octets());
    ip[24..40].copy_from_slice(&ALL_NODES.octets());
    icmp[0] = etherparse::icmpv6::TYPE_NEIGHBOR_ADVERTISEMENT;
    icmp[4] = OVERRIDE;
    icmp[8..24].copy_from_slice(&address.octets());
    icmp[24..26].copy_from_slice(&[TARGET_LINK_LAYER_ADDRESS, 1]);
    icmp[26..32].copy_from_slice(&mac.0);
    // The pseudo-header: both addresses, which are adjacent, the length and the protocol.
    let sum = sum(&ip[8..40]) + sum(icmp) + ADVERTISEMENT as u32 + u32::from(IpNumber::IPV6_ICMP.0);
    icmp[2..4].copy_from_slice(&(!csum::fold(sum)).to_be_bytes());
    frame
}

/// Returns a request for the MAC address of `target`, with `address` as the sender; `None` if the families differ.
pub fn question(address: IpAddr, mac: MacAddress, target: IpAddr) -> Option<Vec<u8>> {
    match (address, target) {
        (IpAddr::V4(address), IpAddr::V4(target)) => {
            let mut frame = arp_announcement(address, mac, ArpForm::Request);
            // The differences from an announcement: the unknown hardware address, and the requested address.
            frame[14 + 18..14 + 24].fill(0);
            frame[14 + 24..14 + 28].copy_from_slice(&target.octets());
            Some(frame.to_vec())
        }
        (IpAddr::V6(address), IpAddr::V6(target)) => Some(neighbor_solicitation(address, mac, target).to_vec()),
        _ => None,
    }
}

/// Returns a request to the target's solicited-node group (RFC 4861, section 7.2.2).
fn neighbor_solicitation(address: Ipv6Addr, mac: MacAddress, target: Ipv6Addr) -> [u8; ADVERTISEMENT_FRAME] {
    let mut frame = neighbor_advertisement(target, mac);
    let [.., a, b, c] = target.octets();
    frame[..6].copy_from_slice(&[0x33, 0x33, 0xff, a, b, c]);
    let (ip, icmp) = frame[14..].split_at_mut(40);
    ip[8..24].copy_from_slice(&address.octets());
    ip[24..40].copy_from_slice(&[0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]);
    icmp[0] = etherparse::icmpv6::TYPE_NEIGHBOR_SOLICITATION;
    icmp[2..4].fill(0);
    icmp[4] = 0;
    icmp[24] = SOURCE_LINK_LAYER_ADDRESS;
    let sum = sum(&ip[8..40]) + sum(icmp) + ADVERTISEMENT as u32 + u32::from(IpNumber::IPV6_ICMP.0);
    icmp[2..4].copy_from_slice(&(!csum::fold(sum)).to_be_bytes());
    frame
}

/// Returns a TCP RST that acknowledges nothing, and so ends no connection; `None` if the families differ.
pub fn useless_reset(from: SocketAddr, to: SocketAddr, mac: MacAddress, to_mac: MacAddress) -> Option<Vec<u8>> {
    let ethernet = PacketBuilder::ethernet2(mac.0, to_mac.0);
    let ip = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), SEGMENT_HOP_LIMIT),
        (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), SEGMENT_HOP_LIMIT),
        _ => return None,
    };
    let segment = ip.tcp(from.port(), to.port(), 0, 0).rst().ack(0);
    let mut frame = Vec::with_capacity(segment.size(0));
    segment.write(&mut frame, &[]).ok()?;
    Some(frame)
}

/// Adds a tag for the VLAN to the frame, if one is given.
pub fn tagged(mut frame: Vec<u8>, vlan: Option<u16>) -> Vec<u8> {
    if let Some(vlan) = vlan {
        let [a, b] = EtherType::VLAN_TAGGED_FRAME.0.to_be_bytes();
        let [c, d] = vlan.to_be_bytes();
        frame.splice(12..12, [a, b, c, d]);
    }
    frame
}

/// Returns the sum of 16-bit words in network byte order; the length must be even.
fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum()
}

/// A host's claim that an address is at a MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The address.
    pub address: IpAddr,
    /// The claimed MAC address.
    pub mac: MacAddress,
}

/// Returns the claim that an Ethernet frame makes: an ARP packet makes one for its sender, a Neighbor Advertisement for its target. `None`
/// for other frames, malformed ones, and those from another link.
pub fn claim(frame: &[u8]) -> Option<Claim> {
    let packet = SlicedPacket::from_ethernet(frame).ok()?;
    match packet.net? {
        NetSlice::Arp(arp) => {
            let arp = arp.to_packet().try_eth_ipv4().ok()?;
            // A sender without an address probes whether another host has the address.
            let address = Some(arp.sender_ipv4_addr()).filter(|address| !address.is_unspecified())?;
            Some(Claim { address: IpAddr::V4(address), mac: MacAddress(arp.sender_mac) })
        }
        NetSlice::Ipv6(ip) => {
            let TransportSlice::Icmpv6(icmp) = packet.transport? else { return None };
            let Icmpv6Type::NeighborAdvertisement(_) = icmp.icmp_type() else { return None };
            let Icmpv6PayloadSlice::NeighborAdvertisement(advertisement) = icmp.payload_slice().ok()? else {
                return None;
            };
            let named = advertisement.options_iterator().find_map(|option| match option {
                Ok(NdpOptionSlice::TargetLinkLayerAddress(option)) => option.link_layer_address().try_into().ok(),
                _ => None,
            });
            let mac = MacAddress(named.or_else(|| frame.get(6..12)?.try_into().ok())?);
            let address = IpAddr::V6(advertisement.target_address());
            (ip.header().hop_limit() == HOP_LIMIT).then_some(Claim { address, mac })
        }
        NetSlice::Ipv4(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::LinkSlice;
    use proptest::prelude::*;

    fn unicast_mac() -> impl Strategy<Value = MacAddress> {
        any::<[u8; 6]>().prop_map(|mut mac| {
            mac[0] &= !1;
            MacAddress(mac)
        })
    }

    fn ethernet<'a>(packet: &SlicedPacket<'a>) -> etherparse::Ethernet2Slice<'a> {
        match &packet.link {
            Some(LinkSlice::Ethernet2(ethernet)) => ethernet.clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_useless_reset_acknowledges_nothing_and_has_a_right_checksum() {
        let (mac, to_mac) = (MacAddress([2; 6]), MacAddress([4; 6]));
        for (from, to) in [("192.0.2.1:80", "10.0.0.1:40000"), ("[2001:db8::1]:80", "[fd00::1]:40000")] {
            let frame = useless_reset(from.parse().unwrap(), to.parse().unwrap(), mac, to_mac).unwrap();
            let packet = SlicedPacket::from_ethernet(&frame).unwrap();
            assert_eq!((ethernet(&packet).source(), ethernet(&packet).destination()), (mac.0, to_mac.0));
            let Some(TransportSlice::Tcp(tcp)) = packet.transport else { panic!() };
            assert_eq!((tcp.source_port(), tcp.destination_port()), (80, 40_000));
            assert_eq!((tcp.rst(), tcp.ack(), tcp.syn(), tcp.acknowledgment_number()), (true, true, false, 0));
            let sum = match packet.net {
                Some(NetSlice::Ipv4(ip)) => tcp.calc_checksum_ipv4(ip.header().source(), ip.header().destination()),
                Some(NetSlice::Ipv6(ip)) => tcp.calc_checksum_ipv6(ip.header().source(), ip.header().destination()),
                other => panic!("{other:?}"),
            };
            assert_eq!(sum, Ok(tcp.checksum()));
        }
        let (ipv4, ipv6) = ("192.0.2.1:80".parse().unwrap(), "[fd00::1]:40000".parse().unwrap());
        assert_eq!(useless_reset(ipv4, ipv6, mac, to_mac), None);
    }

    proptest! {
        #[test]
        fn gratuitous_arp(address: Ipv4Addr, mac in unicast_mac(), reply: bool) {
            let form = if reply { ArpForm::Reply } else { ArpForm::Request };
            let frame = arp_announcement(address, mac, form);
            let packet = SlicedPacket::from_ethernet(&frame).unwrap();
            prop_assert_eq!(ethernet(&packet).source(), mac.0);
            prop_assert_eq!(ethernet(&packet).destination(), [0xff; 6]);
            let Some(NetSlice::Arp(arp)) = packet.net else { panic!() };
            let arp = arp.to_packet().try_eth_ipv4().unwrap();
            prop_assert_eq!(arp.operation.0, if reply { 2 } else { 1 });
            prop_assert_eq!((arp.sender_mac, arp.sender_ipv4_addr()), (mac.0, address));
            prop_assert_eq!(arp.target_ipv4_addr(), address);
            prop_assert_eq!(arp.target_mac, if reply { mac.0 } else { [0xff; 6] });
            let expected = (!address.is_unspecified()).then_some(Claim { address: address.into(), mac });
            prop_assert_eq!(claim(&frame), expected);
        }

        #[test]
        fn unsolicited_advertisement(address: Ipv6Addr, mac in unicast_mac()) {
            let frame = neighbor_advertisement(address, mac);
            let packet = SlicedPacket::from_ethernet(&frame).unwrap();
            prop_assert_eq!(ethernet(&packet).source(), mac.0);
            prop_assert_eq!(ethernet(&packet).destination(), [0x33, 0x33, 0, 0, 0, 1]);
            let Some(NetSlice::Ipv6(ip)) = packet.net else { panic!() };
            let header = ip.header();
            prop_assert_eq!((header.source_addr(), header.destination_addr()), (address, "ff02::1".parse().unwrap()));
            prop_assert_eq!(header.hop_limit(), 255);
            let Some(TransportSlice::Icmpv6(icmp)) = packet.transport else { panic!() };
            prop_assert!(icmp.is_checksum_valid(header.source(), header.destination()));
            let Icmpv6Type::NeighborAdvertisement(flags) = icmp.icmp_type() else { panic!() };
            prop_assert!(flags.r#override && !flags.solicited && !flags.router);
            let Ok(Icmpv6PayloadSlice::NeighborAdvertisement(advertisement)) = icmp.payload_slice() else { panic!() };
            prop_assert_eq!(advertisement.target_address(), address);
            let options: Vec<_> = advertisement.options_iterator().collect();
            prop_assert_eq!(options.len(), 1);
            let Ok(NdpOptionSlice::TargetLinkLayerAddress(option)) = &options[0] else { panic!() };
            prop_assert_eq!(option.link_layer_address(), mac.0);
            prop_assert_eq!(claim(&frame), Some(Claim { address: address.into(), mac }));
        }

        #[test]
        fn arbitrary_frames_never_panic(frame in proptest::collection::vec(any::<u8>(), 0..200)) {
            claim(&frame);
        }

        #[test]
        fn cut_frames_make_no_claim(mac in unicast_mac(), arp in 0usize..42, nd in 0usize..ADVERTISEMENT_FRAME) {
            prop_assert_eq!(claim(&arp_announcement([192, 0, 2, 1].into(), mac, ArpForm::Reply)[..arp]), None);
            let frame = neighbor_advertisement("2001:db8::1".parse().unwrap(), mac);
            prop_assert_eq!(claim(&frame[..nd]), None);
        }
    }

    #[test]
    fn an_advertisement_from_another_link_is_no_claim() {
        let mut frame = neighbor_advertisement("2001:db8::1".parse().unwrap(), MacAddress([2; 6]));
        frame[14 + 7] = 64;
        assert_eq!(claim(&frame), None);
    }

    #[test]
    fn an_advertisement_without_option_speaks_for_the_frames_source() {
        let mut frame = neighbor_advertisement("2001:db8::1".parse().unwrap(), MacAddress([2; 6])).to_vec();
        frame.truncate(ADVERTISEMENT_FRAME - 8);
        frame[14 + 5] -= 8;
        frame[6..12].copy_from_slice(&[4; 6]);
        assert_eq!(claim(&frame).map(|claim| claim.mac), Some(MacAddress([4; 6])));
    }
}
