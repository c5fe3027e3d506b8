//! Header contents: protocols, offsets, and the fields that the programs use.

use crate::headers::hidden::hidden;
use egress_common::tcp;

/// IP protocol numbers.
pub mod proto {
    use network_types::ip::IpProto;

    pub const ICMP: u32 = IpProto::Icmp as u32;
    pub const TCP: u32 = IpProto::Tcp as u32;
    pub const UDP: u32 = IpProto::Udp as u32;
    pub const ICMPV6: u32 = IpProto::Ipv6Icmp as u32;
}

/// Offsets and lengths in transport headers.
pub mod at {
    use core::mem::offset_of;
    use network_types::{icmp::Icmpv4Hdr, tcp::TcpHdr, udp::UdpHdr, vxlan::VxlanHdr};

    /// Ports, of TCP and of UDP.
    pub const SRC_PORT: u32 = offset_of!(TcpHdr, source) as u32;
    pub const DST_PORT: u32 = offset_of!(TcpHdr, dest) as u32;
    pub const TCP_SEQ: u32 = offset_of!(TcpHdr, seq) as u32;
    /// The byte whose upper half is the header's length in words; the flags follow it (RFC 9293, section 3.1).
    pub const TCP_LENGTH: u32 = offset_of!(TcpHdr, window) as u32 - 2;
    pub const TCP_FLAGS: u32 = TCP_LENGTH + 1;
    pub const TCP_CHECK: u32 = offset_of!(TcpHdr, check) as u32;
    pub const TCP_LEN: u32 = TcpHdr::LEN as u32;
    pub const UDP_CHECK: u32 = offset_of!(UdpHdr, check) as u32;
    pub const UDP_LEN: u32 = UdpHdr::LEN as u32;
    pub const ICMP_CHECK: u32 = offset_of!(Icmpv4Hdr, check) as u32;
    /// The identifier of a query.
    pub const ICMP_ID: u32 = offset_of!(Icmpv4Hdr, data) as u32;
    pub const ICMP_LEN: u32 = Icmpv4Hdr::LEN as u32;
    pub const VXLAN_LEN: u32 = size_of::<VxlanHdr>() as u32;

    const _: () = assert!(SRC_PORT == offset_of!(UdpHdr, src) as u32 && DST_PORT == offset_of!(UdpHdr, dst) as u32);
}

/// The position of a packet in a fragmented datagram.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Part {
    Whole,
    First,
    Later,
}

/// The fields of an IP header.
#[derive(Clone, Copy)]
pub struct Ip<A> {
    pub src: A,
    pub dst: A,
    pub proto: u32,
    /// Offset of the transport header from the start of the frame.
    pub l4: u32,
    pub part: Part,
    /// Identification of the datagram, network byte order.
    pub id: u32,
    pub hop_limit: u32,
    /// The packet must not be fragmented on the path.
    pub whole_only: bool,
}

impl<A> Ip<A> {
    /// Returns the same fields, with those that depend on the kind of packet [`hidden`].
    #[inline(always)]
    pub fn hidden(self, unknown: u32) -> Self {
        Self {
            proto: hidden(self.proto, unknown),
            l4: hidden(self.l4, unknown),
            part: hidden(self.part, unknown),
            ..self
        }
    }
}

/// The kind of a packet according to its transport header.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    Tcp,
    Udp,
    /// An ICMP query that waits for an answer: echo request.
    Query,
    /// The answer: echo reply.
    Answer,
    /// An ICMP error about another packet.
    Error,
    /// A fragment whose first fragment was not seen.
    Orphan,
    /// A protocol that has no ports, or whose checksum or ports cannot be translated.
    Other,
    /// A header that is cut short.
    Broken,
}

/// The fields of a transport header.
#[derive(Clone, Copy)]
pub struct L4Header {
    pub kind: Kind,
    /// Source port, or identifier of an ICMP query; network byte order.
    pub src_port: u16,
    /// Destination port; 0 for ICMP.
    pub dst_port: u16,
    /// TCP flags, else 0.
    pub flags: u8,
    /// TCP acknowledgment number, network byte order; else 0.
    pub ack: u32,
}

impl L4Header {
    /// Returns the same fields, with those that depend on the kind of packet [`hidden`].
    #[inline(always)]
    pub fn hidden(self, unknown: u32) -> Self {
        Self {
            kind: hidden(self.kind, unknown),
            src_port: hidden(self.src_port as u32, unknown) as u16,
            dst_port: hidden(self.dst_port as u32, unknown) as u16,
            ..self
        }
    }

    /// Returns a header of this kind, without ports.
    #[inline(always)]
    pub const fn of(kind: Kind) -> Self {
        Self { kind, src_port: 0, dst_port: 0, flags: 0, ack: 0 }
    }

    /// Returns whether it has ports, or an identifier in their place.
    #[inline(always)]
    pub fn has_ports(&self) -> bool {
        matches!(self.kind, Kind::Tcp | Kind::Udp | Kind::Query | Kind::Answer)
    }

    /// Returns whether this segment opens a connection.
    #[inline(always)]
    pub fn opens(&self) -> bool {
        self.kind == Kind::Tcp && self.flags & (tcp::flag::SYN | tcp::flag::ACK) == tcp::flag::SYN
    }
}

/// The packet that an ICMP error quotes, as far as it is quoted.
#[derive(Clone, Copy)]
pub struct Embedded<A> {
    pub src: A,
    pub dst: A,
    pub proto: u32,
    pub src_port: u16,
    pub dst_port: u16,
    /// Offset of the embedded IP header from the start of the frame.
    pub l3: u32,
    /// Offset of the embedded transport header.
    pub l4: u32,
}

/// Returns the offset of the checksum in the transport header.
#[inline(always)]
pub fn checksum_offset(protocol: u32) -> u32 {
    match protocol {
        proto::TCP => at::TCP_CHECK,
        proto::UDP => at::UDP_CHECK,
        _ => at::ICMP_CHECK,
    }
}
