//! Queries on captured packets.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::decode::{Checksum, Content, Ip, Packet, TcpFlags, TransportLayer};

/// Captured packets in order of arrival.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    packets: Vec<Packet>,
}

impl Packet {
    /// Returns the IP packet inside, if there is one.
    pub fn ip(&self) -> Option<&Ip> {
        match &self.content {
            Content::Ip(ip) => Some(ip),
            Content::Arp(_) | Content::Other => None,
        }
    }

    /// Returns source and destination with ports, for TCP and UDP (not for later fragments).
    pub fn ports(&self) -> Option<(SocketAddr, SocketAddr)> {
        let ip = self.ip()?;
        match ip.transport {
            TransportLayer::Tcp { source, target, .. } | TransportLayer::Udp { source, target, .. } => {
                Some((SocketAddr::new(ip.source, source), SocketAddr::new(ip.target, target)))
            }
            _ => None,
        }
    }

    /// Returns the flags of a TCP segment.
    pub fn tcp_flags(&self) -> Option<TcpFlags> {
        match self.ip()?.transport {
            TransportLayer::Tcp { flags, .. } => Some(flags),
            _ => None,
        }
    }

    /// Returns whether it is a TCP reset.
    pub fn is_reset(&self) -> bool {
        self.tcp_flags().is_some_and(|flags| flags.rst)
    }

    /// Returns the IP address and the MAC address that the packet claims to belong together, for ARP (replies and
    /// gratuitous requests) and neighbour advertisements.
    pub fn claim(&self) -> Option<(IpAddr, [u8; 6])> {
        match &self.content {
            Content::Arp(arp) if arp.reply || arp.sender == arp.target => Some((arp.sender.into(), arp.sender_mac)),
            Content::Ip(Ip { transport: TransportLayer::NeighborAdvertisement { target, mac, .. }, .. }) => {
                Some((*target, *mac))
            }
            _ => None,
        }
    }
}

impl Trace {
    pub(super) fn new(packets: Vec<Packet>) -> Trace {
        Trace { packets }
    }

    /// Returns all packets.
    pub fn packets(&self) -> &[Packet] {
        &self.packets
    }

    /// Returns the `wanted` packets.
    pub fn filter(&self, wanted: impl Fn(&Packet) -> bool) -> Trace {
        Trace { packets: self.packets.iter().filter(|packet| wanted(packet)).cloned().collect() }
    }

    /// Returns the packets captured at or after a moment.
    pub fn since(&self, moment: Instant) -> Trace {
        self.filter(|packet| packet.at >= moment)
    }

    /// Returns the number of `wanted` packets.
    pub fn count(&self, wanted: impl Fn(&Packet) -> bool) -> usize {
        self.packets.iter().filter(|packet| wanted(packet)).count()
    }

    /// Counts received TCP, UDP, echo request and fragment packets towards `target` by source address. Neighbour
    /// discovery and ICMP errors do not count: hosts send these on their own behalf.
    pub fn sources_towards(&self, target: IpAddr) -> BTreeMap<IpAddr, usize> {
        let mut sources = BTreeMap::new();
        for ip in self.packets.iter().filter(|packet| !packet.outgoing).filter_map(Packet::ip) {
            let counts = match ip.transport {
                TransportLayer::Tcp { .. }
                | TransportLayer::Udp { .. }
                | TransportLayer::Echo { request: true, .. } => true,
                _ => ip.fragment.is_some(),
            };
            if counts && ip.target == target {
                *sources.entry(ip.source).or_default() += 1;
            }
        }
        sources
    }

    /// Returns the source addresses towards `target` that are not among `allowed`, each with its packet count and first packet.
    pub fn unexpected_sources_towards(&self, target: IpAddr, allowed: &[IpAddr]) -> BTreeMap<IpAddr, (usize, Packet)> {
        let mut strangers = BTreeMap::new();
        for (source, count) in self.sources_towards(target) {
            if allowed.contains(&source) {
                continue;
            }
            let from = |packet: &&Packet| packet.ip().is_some_and(|ip| (ip.source, ip.target) == (source, target));
            if let Some(first) = self.packets.iter().find(from) {
                strangers.insert(source, (count, first.clone()));
            }
        }
        strangers
    }

    /// Returns the MAC addresses that claim `address` (ARP replies, gratuitous ARP, neighbour advertisements), with the
    /// times of their claims.
    pub fn claims_of(&self, address: IpAddr) -> BTreeMap<[u8; 6], Vec<Instant>> {
        let mut claims: BTreeMap<[u8; 6], Vec<Instant>> = BTreeMap::new();
        for packet in &self.packets {
            if let Some((claimed, mac)) = packet.claim()
                && claimed == address
            {
                claims.entry(mac).or_default().push(packet.at);
            }
        }
        claims
    }

    /// Returns the TCP resets.
    pub fn resets(&self) -> Trace {
        self.filter(Packet::is_reset)
    }

    /// Returns the packets with a checksum that is known to be wrong.
    pub fn wrong_checksums(&self) -> Trace {
        self.filter(|packet| packet.ip().is_some_and(|ip| ip.checksum == Checksum::Wrong))
    }
}
