//! Forged packets, one at a time: with chosen ports, without sockets behind them, or inside a tunnel's headers.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use etherparse::{Icmpv4Type, Icmpv6Type, PacketBuilder, icmpv4, icmpv6};
use nix::sys::socket::{MsgFlags, SockaddrStorage, sendto};

use super::claim::send_frame;
use super::fragment::packet_socket;
use crate::netns::NetNs;

/// The tunnel's UDP port, as in ARCHITECTURE.md.
pub const TUNNEL_PORT: u16 = 8473;
/// The tunnel's network identifier for packets to the outside.
pub const FORWARD: u32 = 0x53_5001;
/// The tunnel's network identifier for replies.
pub const REPLY: u32 = 0x53_5002;

/// The kind of a forged packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// A UDP datagram.
    Udp,
    /// The first segment of a TCP connection.
    Syn,
    /// The answer to a SYN.
    SynAck,
    /// A segment with data.
    Segment,
    /// A reset without data.
    Reset,
}

/// Builds the bytes of one IP packet.
fn packet(protocol: Protocol, source: SocketAddr, target: SocketAddr) -> Result<Vec<u8>> {
    const TTL: u8 = 64;
    let (from, to) = (source.port(), target.port());
    let ip = match (source.ip(), target.ip()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => PacketBuilder::ipv4(a.octets(), b.octets(), TTL),
        (IpAddr::V6(a), IpAddr::V6(b)) => PacketBuilder::ipv6(a.octets(), b.octets(), TTL),
        _ => bail!("source and target are of different families"),
    };
    let mut bytes = Vec::new();
    match protocol {
        Protocol::Udp => ip.udp(from, to).write(&mut bytes, b"forged")?,
        Protocol::Syn => ip.tcp(from, to, 1, 1024).syn().write(&mut bytes, &[])?,
        Protocol::SynAck => ip.tcp(from, to, 1, 1024).syn().ack(1).write(&mut bytes, &[])?,
        Protocol::Reset => ip.tcp(from, to, 2, 1024).rst().write(&mut bytes, &[])?,
        Protocol::Segment => ip.tcp(from, to, 2, 1024).ack(1).write(&mut bytes, b"forged")?,
    }
    Ok(bytes)
}

/// Sends one packet from each of `ports` of `source` to `target`, as fast as possible. Does not wait for answers.
pub fn spray(
    ns: &NetNs,
    protocol: Protocol,
    source: IpAddr,
    ports: impl IntoIterator<Item = u16, IntoIter: Send>,
    target: SocketAddr,
) -> Result<()> {
    send_raw(ns, target.ip(), ports.into_iter().map(|port| packet(protocol, SocketAddr::new(source, port), target)))
}

/// Sends packets with any source to `target` through one raw socket.
fn send_raw(ns: &NetNs, target: IpAddr, packets: impl Iterator<Item = Result<Vec<u8>>> + Send) -> Result<()> {
    ns.run(|| {
        let socket = packet_socket(target)?;
        // The port of a raw socket's address must be 0 for IPv6.
        let address = SockaddrStorage::from(SocketAddr::new(target, 0));
        for bytes in packets {
            sendto(socket.as_raw_fd(), &bytes?, &address, MsgFlags::empty()).context("cannot send a forged packet")?;
        }
        Ok(())
    })
}

/// Sends a pod's or host's ICMP error "port unreachable" about a datagram from `about.0` to `about.1`. The error quotes
/// the whole datagram, including its payload.
pub fn send_error(ns: &NetNs, source: IpAddr, target: IpAddr, about: (SocketAddr, SocketAddr)) -> Result<()> {
    const TTL: u8 = 64;
    let quote = packet(Protocol::Udp, about.0, about.1)?;
    let mut bytes = Vec::new();
    match (source, target) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let kind = Icmpv4Type::DestinationUnreachable(icmpv4::DestUnreachableHeader::Port);
            PacketBuilder::ipv4(a.octets(), b.octets(), TTL).icmpv4(kind).write(&mut bytes, &quote)?;
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let kind = Icmpv6Type::DestinationUnreachable(icmpv6::DestUnreachableCode::Port);
            PacketBuilder::ipv6(a.octets(), b.octets(), TTL).icmpv6(kind).write(&mut bytes, &quote)?;
        }
        _ => bail!("source and target are of different families"),
    }
    send_raw(ns, target, [Ok(bytes)].into_iter())
}

/// Sends one UDP datagram out of `interface` to the MAC address `to`, in a frame with this VLAN's tag.
pub fn send_tagged(
    ns: &NetNs,
    interface: &str,
    to: [u8; 6],
    vlan: u16,
    source: SocketAddr,
    target: SocketAddr,
) -> Result<()> {
    let ether_type: [u8; 2] = if source.is_ipv4() { [0x08, 0x00] } else { [0x86, 0xdd] };
    let bytes = packet(Protocol::Udp, source, target)?;
    let frame = [&to[..], &ns.mac(interface)?, &[0x81, 0x00], &vlan.to_be_bytes(), &ether_type, &bytes].concat();
    let index = ns.ifindex(interface)?;
    ns.run(|| send_frame(index, &frame).context("cannot send a tagged frame"))
}

/// Sends one packet with any source address.
pub fn send_packet(ns: &NetNs, protocol: Protocol, source: SocketAddr, target: SocketAddr) -> Result<()> {
    spray(ns, protocol, source.ip(), [source.port()], target)
}

/// Sends a packet inside VXLAN to the tunnel device at `device`, from the namespace's own address.
pub fn send_vxlan(
    ns: &NetNs,
    device: SocketAddr,
    network: u32,
    protocol: Protocol,
    source: SocketAddr,
    target: SocketAddr,
) -> Result<()> {
    let datagram = encapsulated(network, protocol, source, target)?;
    ns.run(|| {
        let any: SocketAddr = if device.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
        UdpSocket::bind(any)?.send_to(&datagram, device).context("cannot send a forged datagram")?;
        Ok(())
    })
}

/// Like [`send_vxlan`], but through a raw socket, from any address and port.
pub fn send_vxlan_from(
    ns: &NetNs,
    from: SocketAddr,
    device: SocketAddr,
    network: u32,
    protocol: Protocol,
    source: SocketAddr,
    target: SocketAddr,
) -> Result<()> {
    let (IpAddr::V4(a), IpAddr::V4(b)) = (from.ip(), device.ip()) else { bail!("only over IPv4") };
    let mut bytes = Vec::new();
    let payload = encapsulated(network, protocol, source, target)?;
    PacketBuilder::ipv4(a.octets(), b.octets(), 64).udp(from.port(), device.port()).write(&mut bytes, &payload)?;
    send_raw(ns, device.ip(), [Ok(bytes)].into_iter())
}

/// Builds a packet in VXLAN and inner Ethernet headers.
fn encapsulated(network: u32, protocol: Protocol, source: SocketAddr, target: SocketAddr) -> Result<Vec<u8>> {
    // RFC 7348, section 5: the flag "network identifier is valid", 24 bits reserved, the identifier, 8 bits reserved.
    let header = [&[0x08, 0, 0, 0][..], &(network << 8).to_be_bytes()].concat();
    let ether_type: [u8; 2] = if source.is_ipv4() { [0x08, 0x00] } else { [0x86, 0xdd] };
    // Any MAC addresses will do, but the source must not be the receiving device's own.
    let macs = [0x02, 0x53, 0x57, 0, 0, 2, 0x02, 0x53, 0x57, 0, 0, 1];
    Ok([&header, &macs[..], &ether_type, &packet(protocol, source, target)?].concat())
}
