//! How to send to another node, and its record for the programs. Pure.

use egress_common::{
    abi::{AF_INET, AF_INET6},
    csum,
    egress::{MacKey, NodeEntry},
    net,
    transport::{self, OUTER_V4, OUTER_V4_TTL},
    verdict::Counter,
};
use std::net::IpAddr;

/// The transports to another node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransportView {
    /// The transport ([`egress_common::transport`]) of packets to it as a gateway.
    pub forward: u32,
    /// The transports that can reach it, as [`transport::bit`]s.
    pub may: u32,
    /// The counter for packets that take the device because nothing else is possible.
    pub why: Option<Counter>,
    /// The transport over the underlay; absent if only the device works.
    pub path: Option<Path>,
}

/// A transport over plain Ethernet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// Interface of the underlay.
    pub ifindex: u32,
    /// Largest IP packet, in bytes.
    pub mtu: u32,
    /// The next hop: the node itself if it is on the link.
    pub hop: IpAddr,
    /// This node's address.
    pub source: IpAddr,
    /// The node's MAC address and that of this node's interface, if the node is on the link.
    pub macs: Option<[[u8; 6]; 2]>,
}

/// Returns a MAC address as words in memory order.
pub fn mac(m: [u8; 6]) -> [u16; 3] {
    [0, 2, 4].map(|i| u16::from_ne_bytes([m[i], m[i + 1]]))
}

/// Returns the Ethernet address of these words in memory order: the inverse of [`mac`].
pub fn mac_bytes(words: [u16; 3]) -> [u8; 6] {
    let [[a, b], [c, d], [e, f]] = words.map(u16::to_ne_bytes);
    [a, b, c, d, e, f]
}

/// Returns the key of a MAC address.
pub fn mac_key(m: [u8; 6]) -> MacKey {
    MacKey { mac: mac(m), reserved: 0 }
}

/// Returns the record of a node with this tunnel address.
pub fn record(address: IpAddr, transport: Option<&TransportView>) -> NodeEntry {
    let tunnel_v4 = match address {
        IpAddr::V4(a) => u32::from(a),
        IpAddr::V6(_) => 0,
    };
    let node = NodeEntry { addr: net::any(address), present: 1, tunnel_v4, ..NodeEntry::EMPTY };
    let Some(transport) = transport else { return node };
    let why = transport.why.map_or(0, |counter| counter as u32);
    let Some(path) = &transport.path else { return NodeEntry { why, ..node } };
    let (hop_family, hop) = match path.hop {
        IpAddr::V4(a) => (AF_INET, [net::v4(a)[0], 0, 0, 0]),
        IpAddr::V6(a) => (AF_INET6, net::v6(a)),
    };
    let source = net::any(path.source);
    let sum = csum::sum_words(&[OUTER_V4, OUTER_V4_TTL, source[3], node.addr[3]]);
    NodeEntry {
        forward: transport.forward,
        may: transport.may | transport::bit(transport::DEVICE),
        why,
        ifindex: path.ifindex,
        mtu: path.mtu,
        csum: u32::from(csum::fold(sum)),
        hop_family,
        hop,
        source,
        macs: path.macs.map_or([[0; 3]; 2], |macs| macs.map(mac)),
        ..node
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_precomputed_part_of_the_outer_header_checksum_is_right() {
        let path = Path {
            ifindex: 7,
            mtu: 1500,
            hop: "10.0.0.9".parse().unwrap(),
            source: "10.0.0.1".parse().unwrap(),
            macs: None,
        };
        let transport = TransportView { forward: transport::VXLAN, may: 0, why: None, path: Some(path) };
        let node = record("10.0.0.2".parse().unwrap(), Some(&transport));
        // 4500 + 4011 + 0a00 + 0001 + 0a00 + 0002
        assert_eq!(u16::from_be(node.csum as u16), 0x4500 + 0x4011 + 0x0a00 + 1 + 0x0a00 + 2);
        assert_eq!((node.hop_family, node.hop[0]), (2, u32::from_ne_bytes([10, 0, 0, 9])));
        assert_eq!(node.may, 1);
    }
}
