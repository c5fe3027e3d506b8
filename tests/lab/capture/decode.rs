//! Decodes captured bytes into packets.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

use etherparse::icmpv4::DestUnreachableHeader;
use etherparse::icmpv6::Icmpv6PayloadSlice;
use etherparse::{
    ArpOperation, ArpPacketSlice, IcmpEchoHeader, Icmpv4Slice, Icmpv4Type, Icmpv6Slice, Icmpv6Type, Ipv6ExtensionSlice,
    LaxIpSlice, LaxNetSlice, LaxSlicedPacket, LinkSlice, TransportSlice,
};

use super::socket::Frame;

/// One captured packet.
#[derive(Clone, Debug, PartialEq)]
pub struct Packet {
    /// The time at which the kernel saw it.
    pub at: Instant,
    /// The index of the interface in its namespace.
    pub interface: u32,
    /// Whether this host sent the packet (forwarded packets included).
    pub outgoing: bool,
    /// Its Ethernet source.
    pub source_mac: [u8; 6],
    /// Its Ethernet destination.
    pub target_mac: [u8; 6],
    /// Its size in bytes, with the Ethernet header.
    pub length: usize,
    /// The decoded content.
    pub content: Content,
}

/// The content of a frame.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// IPv4 or IPv6.
    Ip(Ip),
    /// ARP for IPv4.
    Arp(Arp),
    /// Another protocol, or a packet that could not be decoded.
    Other,
}

/// An ARP packet.
#[derive(Clone, Debug, PartialEq)]
pub struct Arp {
    /// Whether it is a reply, not a request.
    pub reply: bool,
    /// The MAC address that the sender claims.
    pub sender_mac: [u8; 6],
    /// The IP address that the sender claims.
    pub sender: Ipv4Addr,
    /// The requested address; in a reply, the requester's address.
    pub target: Ipv4Addr,
}

/// An IP packet or a fragment of one.
#[derive(Clone, Debug, PartialEq)]
pub struct Ip {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub target: IpAddr,
    /// TTL or hop limit.
    pub ttl: u8,
    /// The transport's protocol number.
    pub protocol: u8,
    /// For fragments: the offset in bytes, and whether more fragments follow.
    pub fragment: Option<(usize, bool)>,
    /// The "don't fragment" flag (always set for IPv6).
    pub dont_fragment: bool,
    /// The transport layer. Fragments after the first one have [`TransportLayer::Other`].
    pub transport: TransportLayer,
    /// The state of the transport's checksum.
    pub checksum: Checksum,
}

/// The state of a transport's checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// Correct, or absent where the protocol allows that (UDP over IPv4).
    Right,
    /// Incorrect.
    Wrong,
    /// Unknown: a network card would fill it in.
    Pending,
    /// Not checked: a fragment, a truncated packet, or a protocol without a checksum.
    None,
}

/// The flags of a TCP segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpFlags {
    /// SYN.
    pub syn: bool,
    /// ACK.
    pub ack: bool,
    /// FIN.
    pub fin: bool,
    /// RST.
    pub rst: bool,
}

/// The transport layer of an IP packet.
#[derive(Clone, Debug, PartialEq)]
pub enum TransportLayer {
    /// A TCP segment.
    Tcp {
        /// Source port.
        source: u16,
        /// Destination port.
        target: u16,
        /// Flags.
        flags: TcpFlags,
        /// Sequence number.
        sequence: u32,
        /// The MSS option, in SYNs.
        mss: Option<u16>,
        /// Bytes of payload.
        payload: usize,
    },
    /// A UDP datagram.
    Udp {
        /// Source port.
        source: u16,
        /// Destination port.
        target: u16,
        /// Bytes of payload that are in this packet.
        payload: usize,
    },
    /// An ICMP or ICMPv6 echo.
    Echo {
        /// Whether it is a request, not a reply.
        request: bool,
        /// Identifier.
        identifier: u16,
        /// Sequence number.
        sequence: u16,
    },
    /// An ICMP or ICMPv6 error.
    IcmpError {
        /// The type's number.
        kind: u8,
        /// The code's number.
        code: u8,
        /// The MTU that it reports.
        mtu: Option<u32>,
        /// The packet that caused the error.
        inner: Option<Inner>,
    },
    /// A request for the MAC address of `target`.
    NeighborSolicitation {
        /// The requested address.
        target: IpAddr,
    },
    /// A claim that `target` is at the MAC address of the option, or of the frame.
    NeighborAdvertisement {
        /// The address in question.
        target: IpAddr,
        /// Whether it answers a solicitation.
        solicited: bool,
        /// Whether it overrides an existing neighbour entry.
        overrides: bool,
        /// The claimed MAC address.
        mac: [u8; 6],
    },
    /// Anything else.
    Other,
}

/// The packet that caused an ICMP error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inner {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub target: IpAddr,
    /// The transport's protocol number.
    pub protocol: u8,
    /// The first four bytes of the transport's header: the ports of TCP and UDP. In an echo they are type, code and
    /// checksum; see `identifier`.
    pub ports: (u16, u16),
    /// The identifier, for echos.
    pub identifier: u16,
}

pub(super) fn packet(bytes: &[u8], frame: &Frame) -> Packet {
    let mut packet = Packet {
        at: frame.at,
        interface: frame.interface,
        outgoing: frame.outgoing,
        source_mac: [0; 6],
        target_mac: [0; 6],
        length: frame.captured,
        content: Content::Other,
    };
    let Ok(sliced) = LaxSlicedPacket::from_ethernet(bytes) else { return packet };
    if let Some(LinkSlice::Ethernet2(ethernet)) = &sliced.link {
        (packet.source_mac, packet.target_mac) = (ethernet.source(), ethernet.destination());
    }
    packet.content = match &sliced.net {
        Some(LaxNetSlice::Arp(arp)) => read_arp(arp).map_or(Content::Other, Content::Arp),
        Some(net) => read_ip(net, sliced.transport.as_ref(), frame.checksum_pending, packet.source_mac),
        None => Content::Other,
    };
    packet
}

fn read_arp(arp: &ArpPacketSlice<'_>) -> Option<Arp> {
    Some(Arp {
        reply: arp.operation() == ArpOperation::REPLY,
        sender_mac: arp.sender_hw_addr().try_into().ok()?,
        sender: Ipv4Addr::from(<[u8; 4]>::try_from(arp.sender_protocol_addr()).ok()?),
        target: Ipv4Addr::from(<[u8; 4]>::try_from(arp.target_protocol_addr()).ok()?),
    })
}

fn read_ip(net: &LaxNetSlice<'_>, transport: Option<&TransportSlice<'_>>, pending: bool, mac: [u8; 6]) -> Content {
    let mut ip = match net {
        LaxNetSlice::Ipv4(v4) => {
            let header = v4.header();
            let offset = usize::from(header.fragments_offset().value()) * 8;
            let fragment = header.is_fragmenting_payload().then_some((offset, header.more_fragments()));
            Ip {
                source: header.source_addr().into(),
                target: header.destination_addr().into(),
                ttl: header.ttl(),
                protocol: v4.payload().ip_number.0,
                fragment,
                dont_fragment: header.dont_fragment(),
                transport: TransportLayer::Other,
                checksum: Checksum::None,
            }
        }
        LaxNetSlice::Ipv6(v6) => {
            let header = v6.header();
            let fragment = v6.extensions().clone().into_iter().find_map(|extension| match extension {
                Ipv6ExtensionSlice::Fragment(one) if one.is_fragmenting_payload() => {
                    Some((usize::from(one.fragment_offset().value()) * 8, one.more_fragments()))
                }
                _ => None,
            });
            Ip {
                source: header.source_addr().into(),
                target: header.destination_addr().into(),
                ttl: header.hop_limit(),
                protocol: v6.payload().ip_number.0,
                fragment,
                dont_fragment: true,
                transport: TransportLayer::Other,
                checksum: Checksum::None,
            }
        }
        LaxNetSlice::Arp(_) => return Content::Other,
    };
    if let Some(payload) = net.ip_payload_ref() {
        ip.transport = read_transport(transport, payload.payload, &ip, mac);
        ip.checksum = checksum(&ip, payload.payload, payload.incomplete, pending);
    }
    Content::Ip(ip)
}

fn read_transport(transport: Option<&TransportSlice<'_>>, payload: &[u8], ip: &Ip, mac: [u8; 6]) -> TransportLayer {
    match transport {
        Some(TransportSlice::Tcp(tcp)) => TransportLayer::Tcp {
            source: tcp.source_port(),
            target: tcp.destination_port(),
            flags: TcpFlags { syn: tcp.syn(), ack: tcp.ack(), fin: tcp.fin(), rst: tcp.rst() },
            sequence: tcp.sequence_number(),
            mss: tcp.options_iterator().find_map(|option| match option {
                Ok(etherparse::TcpOptionElement::MaximumSegmentSize(mss)) => Some(mss),
                _ => None,
            }),
            payload: tcp.payload().len(),
        },
        Some(TransportSlice::Udp(udp)) => TransportLayer::Udp {
            source: udp.source_port(),
            target: udp.destination_port(),
            payload: udp.payload().len(),
        },
        Some(TransportSlice::Icmpv4(icmp)) => read_icmpv4(icmp),
        Some(TransportSlice::Icmpv6(icmp)) => read_icmpv6(icmp, mac),
        // The first fragment of a datagram contains the UDP header, which etherparse does not parse in fragments.
        _ => match (ip.fragment, ip.protocol, payload) {
            (Some((0, _)), 17, &[a, b, c, d, _, _, _, _, ref data @ ..]) => TransportLayer::Udp {
                source: u16::from_be_bytes([a, b]),
                target: u16::from_be_bytes([c, d]),
                payload: data.len(),
            },
            _ => TransportLayer::Other,
        },
    }
}

fn read_icmpv4(icmp: &Icmpv4Slice<'_>) -> TransportLayer {
    match icmp.icmp_type() {
        Icmpv4Type::EchoRequest(header) => echo(true, header),
        Icmpv4Type::EchoReply(header) => echo(false, header),
        kind @ (Icmpv4Type::DestinationUnreachable(_)
        | Icmpv4Type::TimeExceeded(_)
        | Icmpv4Type::ParameterProblem(_)) => {
            let mtu = match kind {
                Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::FragmentationNeeded { next_hop_mtu }) => {
                    Some(u32::from(next_hop_mtu))
                }
                _ => None,
            };
            error(icmp.type_u8(), icmp.code_u8(), mtu, icmp.payload())
        }
        _ => TransportLayer::Other,
    }
}

fn read_icmpv6(icmp: &Icmpv6Slice<'_>, mac: [u8; 6]) -> TransportLayer {
    match (icmp.icmp_type(), icmp.payload_slice()) {
        (Icmpv6Type::EchoRequest(header), _) => echo(true, header),
        (Icmpv6Type::EchoReply(header), _) => echo(false, header),
        (_, Ok(Icmpv6PayloadSlice::NeighborSolicitation(one))) => {
            TransportLayer::NeighborSolicitation { target: one.target_address().into() }
        }
        (Icmpv6Type::NeighborAdvertisement(header), Ok(Icmpv6PayloadSlice::NeighborAdvertisement(one))) => {
            // Option 2, one unit long: the target's link-layer address.
            let option = match one.options() {
                [2, 1, address @ ..] => address.first_chunk::<6>().copied(),
                _ => None,
            };
            TransportLayer::NeighborAdvertisement {
                target: one.target_address().into(),
                solicited: header.solicited,
                overrides: header.r#override,
                mac: option.unwrap_or(mac),
            }
        }
        // Errors have types below 128.
        (kind, _) if icmp.type_u8() < 128 => {
            let mtu = if let Icmpv6Type::PacketTooBig { mtu } = kind { Some(mtu) } else { None };
            error(icmp.type_u8(), icmp.code_u8(), mtu, icmp.payload())
        }
        _ => TransportLayer::Other,
    }
}

fn echo(request: bool, header: IcmpEchoHeader) -> TransportLayer {
    TransportLayer::Echo { request, identifier: header.id, sequence: header.seq }
}

fn error(kind: u8, code: u8, mtu: Option<u32>, payload: &[u8]) -> TransportLayer {
    TransportLayer::IcmpError { kind, code, mtu, inner: read_inner(payload) }
}

/// Reads the beginning of a packet inside an ICMP error, which is usually truncated.
fn read_inner(bytes: &[u8]) -> Option<Inner> {
    let (ip, _) = LaxIpSlice::from_slice(bytes).ok()?;
    let (source, target): (IpAddr, IpAddr) = match &ip {
        LaxIpSlice::Ipv4(v4) => (v4.header().source_addr().into(), v4.header().destination_addr().into()),
        LaxIpSlice::Ipv6(v6) => (v6.header().source_addr().into(), v6.header().destination_addr().into()),
    };
    let payload = ip.payload();
    let word = |at: usize| payload.payload.get(at..at + 2).map(|two| u16::from_be_bytes([two[0], two[1]]));
    Some(Inner {
        source,
        target,
        protocol: payload.ip_number.0,
        ports: (word(0)?, word(2)?),
        identifier: word(4).unwrap_or(0),
    })
}

fn checksum(ip: &Ip, transport: &[u8], incomplete: bool, pending: bool) -> Checksum {
    // The offset of each protocol's checksum. ICMP's does not cover a pseudo-header.
    let (has_pseudo_header, place) = match ip.protocol {
        6 => (true, 16),
        17 => (true, 6),
        58 => (true, 2),
        1 => (false, 2),
        _ => return Checksum::None,
    };
    if pending {
        return Checksum::Pending;
    }
    if incomplete || ip.fragment.is_some() || transport.len() < place + 2 {
        return Checksum::None;
    }
    if ip.protocol == 17 && transport[place..place + 2] == [0, 0] {
        return if ip.source.is_ipv4() { Checksum::Right } else { Checksum::Wrong };
    }
    let mut sum = 0u64;
    let mut add = |bytes: &[u8]| {
        for pair in bytes.chunks(2) {
            sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        }
    };
    add(transport);
    if has_pseudo_header {
        for address in [ip.source, ip.target] {
            match address {
                IpAddr::V4(v4) => add(&v4.octets()),
                IpAddr::V6(v6) => add(&v6.octets()),
            }
        }
        add(&(transport.len() as u32).to_be_bytes());
        add(&[0, ip.protocol]);
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    if sum == 0xffff { Checksum::Right } else { Checksum::Wrong }
}
