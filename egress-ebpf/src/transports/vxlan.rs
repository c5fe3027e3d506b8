//! VXLAN without the tunnel device: the programs write and strip the outer headers, with the same
//! bytes on the wire. Packets that the device would not treat in the usual way are left to it.

use crate::{
    headers::{
        context::Context,
        fields::{Kind, at, proto},
        ip::Header,
        packet::{ETH_LEN, IPV4, IPV6, Packet, pair},
    },
    tables::{datagram, family::Family, stats},
    transports::{device::INNER_MACS, send},
};
use aya_ebpf::bindings::{
    BPF_ADJ_ROOM_ENCAP_L2_SHIFT, BPF_F_ADJ_ROOM_DECAP_L3_IPV4, BPF_F_ADJ_ROOM_DECAP_L3_IPV6,
    BPF_F_ADJ_ROOM_ENCAP_L2_ETH, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6,
    BPF_F_ADJ_ROOM_ENCAP_L4_UDP, BPF_F_ADJ_ROOM_FIXED_GSO, BPF_F_ADJ_ROOM_NO_CSUM_RESET,
};
use egress_common::{
    V4, V6,
    config::{DatapathConfig, flags},
    csum,
    egress::NodeEntry,
    transport::{OUTER_V4, OUTER_V4_TTL, OVERHEAD_V4, OVERHEAD_V6},
    verdict::{Counter, Verdict},
};

/// The longest frame that still has a length in an outer header.
const LONGEST: u32 = 65_535 - OVERHEAD_V6;
/// First word of a VXLAN header that has a network identifier and nothing else (RFC 7348, section 5).
const VNI_VALID: u32 = 0x0800_0000_u32.to_be();
/// `BPF_F_ADJ_ROOM_DECAP_L4_UDP`, which the bindings do not know yet.
pub const DECAP_L4_UDP: u64 = 1 << 10;
/// The type of IPv6's fragment header (RFC 8200, section 4.5).
const FRAGMENT: u8 = 44;
/// `EALREADY`: the packet already has inner headers.
const ALREADY: i64 = -114;

/// For both families: metadata of an inner Ethernet header, UDP; lengths of merged packets and checksums stay as they are.
const ENCAP: u64 = BPF_F_ADJ_ROOM_FIXED_GSO as u64
    | BPF_F_ADJ_ROOM_ENCAP_L4_UDP as u64
    | BPF_F_ADJ_ROOM_ENCAP_L2_ETH as u64
    | BPF_F_ADJ_ROOM_NO_CSUM_RESET as u64
    | (ETH_LEN as u64) << BPF_ADJ_ROOM_ENCAP_L2_SHIFT;

/// Writes the outer headers and sends the packet to the next hop. An error is the index of the counter for the reason;
/// the packet is then unchanged.
#[inline(always)]
pub fn send(pkt: &Packet, config: &DatapathConfig, node: &NodeEntry, vni: u32, entropy: u32) -> Result<Verdict, u32> {
    let ipv4 = node.tunnel_v4 != 0;
    let (overhead, family) =
        if ipv4 { (OVERHEAD_V4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4) } else { (OVERHEAD_V6, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6) };
    let len = pkt.len();
    if send::largest(pkt, send::is_fragment(pkt)) + overhead > node.mtu || len > LONGEST {
        return Err(Counter::DeviceMtu as u32);
    }
    let protocol = pkt.protocol();
    let ecn = outer_ecn(pkt, protocol);
    match pkt.adjust_room(overhead as i32, ENCAP | family as u64) {
        0 => {}
        ALREADY => return Err(Counter::DeviceEncapsulated as u32),
        _ => return Err(Counter::DeviceRefused as u32),
    }
    let outer = Outer { config, node, vni, entropy, len, ecn, protocol };
    if outer.write(pkt, ipv4).is_none() {
        return Ok(Verdict::Drop(Counter::DropRedirect));
    }
    Ok(pkt.redirect_hop(node))
}

/// Returns the congestion bits of the outer header (RFC 6040, section 4.1, compatibility with a decapsulator that knows them).
#[inline(always)]
pub fn outer_ecn<C: Context>(pkt: &Packet<C>, protocol: u16) -> u32 {
    let first = u32::from_be(pkt.read::<u32>(ETH_LEN).unwrap_or(0));
    let inner = if protocol == IPV4 { first >> 16 & 3 } else { first >> 20 & 3 };
    // "Experienced" in the outer header would count as congestion in the tunnel.
    if inner == 3 { 2 } else { inner }
}

/// The inputs of the outer headers.
pub struct Outer<'a> {
    pub config: &'a DatapathConfig,
    pub node: &'a NodeEntry,
    pub vni: u32,
    /// Makes flows take different paths.
    pub entropy: u32,
    /// Length of the inner frame.
    pub len: u32,
    /// Congestion bits.
    pub ecn: u32,
    /// EtherType of the inner frame, network byte order.
    pub protocol: u16,
}

impl Outer<'_> {
    /// Returns the UDP, VXLAN and inner Ethernet header up to the EtherType, as words in memory order.
    #[inline(always)]
    fn payload(&self) -> [u32; 7] {
        // A dynamic port (RFC 6335), chosen by the flow's hash.
        let ports = (0xc000 | self.entropy & 0x3fff) << 16 | self.config.tunnel_port & 0xffff;
        [
            ports.to_be(),
            ((self.len + 16) << 16).to_be(),
            VNI_VALID,
            (self.vni << 8).to_be(),
            pair(INNER_MACS[0][0], INNER_MACS[0][1]),
            pair(INNER_MACS[0][2], INNER_MACS[1][0]),
            pair(INNER_MACS[1][1], INNER_MACS[1][2]),
        ]
    }

    /// Writes the headers, over IPv4 or IPv6, and counts the packet.
    #[inline(always)]
    pub fn write<C: Context>(&self, pkt: &Packet<C>, ipv4: bool) -> Option<()> {
        let sent = stats::count_index(Counter::SentVxlan as u32) as u32;
        if ipv4 { self.write_v4(pkt, sent) } else { self.write_v6(pkt) }
    }

    /// `sent` is the number of packets that this CPU has sent before.
    #[inline(always)]
    fn write_v4<C: Context>(&self, pkt: &Packet<C>, sent: u32) -> Option<()> {
        let (source, to) = (self.node.source[3], self.node.addr[3]);
        let length = (self.ecn << 16 | (self.len + OVERHEAD_V4 - ETH_LEN)).to_be();
        // A fresh number for each packet (RFC 6864, section 4.1), because it may be fragmented. A random number costs two calls.
        let id = (sent ^ self.entropy) & 0xffff;
        let check = !csum::fold(self.node.csum + csum::sum_words(&[length, id]));
        pkt.write_words(ETH_LEN, &[OUTER_V4 | length, id, OUTER_V4_TTL | (check as u32) << 16, source, to])?;
        pkt.write_words(ETH_LEN + V4::HEADER, &self.payload())?;
        pkt.write(ETH_LEN + OVERHEAD_V4 - 2, self.protocol)
    }

    #[inline(always)]
    fn write_v6<C: Context>(&self, pkt: &Packet<C>) -> Option<()> {
        let first = (6 << 28 | self.ecn << 20).to_be();
        let second = ((self.len + 16) << 16 | proto::UDP << 8 | 64).to_be();
        pkt.write_words(ETH_LEN, &[first, second])?;
        pkt.write_words(ETH_LEN + V6::SRC, &self.node.source)?;
        pkt.write_words(ETH_LEN + V6::SRC + 16, &self.node.addr)?;
        pkt.write_words(ETH_LEN + V6::HEADER, &self.payload())?;
        pkt.write(ETH_LEN + OVERHEAD_V6 - 2, self.protocol)
    }
}

/// The kind of a packet for this node, by its outer headers.
pub enum Wrapped {
    /// It does not belong to the tunnel.
    Not,
    /// It belongs to the tunnel, and is left to the device for this reason.
    Unusual(Counter),
    /// It belongs to the tunnel: network identifier, outer source address (IPv4 in its mapped form), and EtherType of the packet in it.
    Usual(u32, V6, u16),
}

/// Returns the length of all headers in front of the packet in the tunnel: outer IP, UDP, VXLAN and inner Ethernet.
#[inline(always)]
pub const fn overhead<F: Header>() -> u32 {
    F::HEADER + at::UDP_LEN + at::VXLAN_LEN + ETH_LEN
}

/// Reads the outer headers of a packet.
#[inline(always)]
pub fn wrapped<F: Family, C: Context>(pkt: &Packet<C>, config: &DatapathConfig) -> Wrapped {
    let Some((source, usual)) = F::outer(pkt, config) else { return Wrapped::Not };
    // The VXLAN header, and the EtherType after the inner MAC addresses. They are read
    // sequentially, because old verifiers follow the path on which only the second is there.
    let Some([VNI_VALID, vni]) = pkt.read_header::<[u32; 2]>(ETH_LEN + F::HEADER + at::UDP_LEN) else {
        return Wrapped::Unusual(Counter::DeviceOuter);
    };
    let Some(inner) = pkt.read_header::<u16>(ETH_LEN + overhead::<F>() - 2) else {
        return Wrapped::Unusual(Counter::DeviceOuter);
    };
    if !usual || !matches!(inner, IPV4 | IPV6) {
        return Wrapped::Unusual(Counter::DeviceOuter);
    }
    if is_inner_fragment(pkt, ETH_LEN + overhead::<F>(), inner) {
        return Wrapped::Unusual(Counter::DeviceFragment);
    }
    Wrapped::Usual(u32::from_be(vni) >> 8, source, inner)
}

/// The result of [`strip`].
pub enum Stripped {
    /// It does not belong to the tunnel.
    Not,
    /// It belongs to the tunnel, and the stack brings it to the device.
    Left,
    /// The outer header was removed: network identifier, and outer source address (IPv4 in its mapped form).
    Done(u32, V6),
}

/// Removes the outer headers, if they are those of a tunnelled packet for this node and nothing about them is unusual.
#[inline(always)]
pub fn strip<F: Family>(pkt: &Packet, config: &DatapathConfig) -> Stripped {
    let (vni, source, inner) = match wrapped::<F, _>(pkt, config) {
        Wrapped::Not => return Stripped::Not,
        Wrapped::Unusual(_) if is_elsewhere::<F>(pkt, config) => return Stripped::Not,
        Wrapped::Unusual(why) => return left(why),
        Wrapped::Usual(..) if pkt.vlan() != 0 => return left(Counter::DeviceOuter),
        Wrapped::Usual(vni, source, inner) => (vni, source, inner),
    };
    let mut how = BPF_F_ADJ_ROOM_FIXED_GSO as u64 | BPF_F_ADJ_ROOM_NO_CSUM_RESET as u64;
    if pkt.gso_size() != 0 {
        if config.flags & flags::DECAP_UDP == 0 {
            return left(Counter::DeviceMerged);
        }
        how |= DECAP_L4_UDP;
    }
    how |= match (F::VERSION, inner) {
        (4, IPV6) => BPF_F_ADJ_ROOM_DECAP_L3_IPV6 as u64,
        (6, IPV4) => BPF_F_ADJ_ROOM_DECAP_L3_IPV4 as u64,
        _ => 0,
    };
    if pkt.adjust_room(-(overhead::<F>() as i32), how) != 0 {
        return left(Counter::DeviceRefused);
    }
    pkt.forget_outer();
    if pkt.write(ETH_LEN - 2, inner).is_none() {
        return left(Counter::DeviceRefused);
    }
    Stripped::Done(vni, source)
}

/// Returns whether a datagram with IPv4 options, or a fragment, is for a port other than the tunnel's: a reply, where
/// the tunnel's address is an egress IP. A later fragment whose first fragment was not seen may be the tunnel's.
#[inline(always)]
fn is_elsewhere<F: Family>(pkt: &Packet, config: &DatapathConfig) -> bool {
    // Over IPv6 the port is at its usual place; otherwise the packet does not count as tunnelled.
    if F::VERSION != 4 {
        return false;
    }
    let Ok(ip) = F::parse(pkt) else { return false };
    let t = datagram::transport::<F>(pkt, &ip);
    t.kind == Kind::Udp && u16::from_be(t.dst_port) as u32 != config.tunnel_port
}

/// Returns whether the packet in the tunnel is a fragment. Larger fragments of its datagram arrive in fragments of the
/// outer packet, which the stack reassembles: if stripped here, a small last fragment would overtake the first one.
#[inline(always)]
fn is_inner_fragment<C: Context>(pkt: &Packet<C>, l3: u32, protocol: u16) -> bool {
    if protocol == IPV4 {
        // "More fragments", and the offset.
        pkt.read_header::<u16>(l3 + 6).is_some_and(|flags| u16::from_be(flags) & 0x3fff != 0)
    } else {
        pkt.read_header::<u8>(l3 + V6::PROTOCOL) == Some(FRAGMENT)
    }
}

#[inline(always)]
fn left(why: Counter) -> Stripped {
    stats::count(why);
    Stripped::Left
}
