//! UDP datagrams in hand-made fragments, so that a test can choose their order.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use etherparse::{IpFragOffset, IpNumber, Ipv4Header, Ipv6FragmentHeader, Ipv6Header, UdpHeader};
use nix::sys::socket::{MsgFlags, SockaddrStorage, sendto};

use super::next_id;
use super::wire::Record;
use crate::netns::NetNs;

/// The order in which the fragments of a datagram are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FragmentOrder {
    /// First to last.
    InOrder,
    /// Last to first: the fragments without ports come first.
    Reversed,
    /// All but the last.
    Incomplete,
}

/// Sends one UDP datagram of `size` payload bytes from `source` to `target` in fragments of at most `fragment` payload bytes
/// each. The payload is a record, so that a [`super::UdpServer`] counts and answers it. Returns the flow's id.
pub fn send_fragments(
    ns: &NetNs,
    source: SocketAddr,
    target: SocketAddr,
    size: usize,
    fragment: usize,
    order: FragmentOrder,
) -> Result<u64> {
    let id = next_id();
    let payload = Record { id, sequence: 0 }.padded(size);
    let mut packets = fragments(source, target, &payload, fragment & !7, id)?;
    match order {
        FragmentOrder::InOrder => {}
        FragmentOrder::Reversed => packets.reverse(),
        FragmentOrder::Incomplete => drop(packets.pop()),
    }
    ns.run(|| {
        let socket = packet_socket(target.ip())?;
        let address = SockaddrStorage::from(SocketAddr::new(target.ip(), 0));
        for packet in &packets {
            sendto(socket.as_raw_fd(), packet, &address, MsgFlags::empty()).context("cannot send a fragment")?;
        }
        Ok(id)
    })
}

/// Opens a raw socket that sends whole IP packets.
pub(super) fn packet_socket(target: IpAddr) -> Result<OwnedFd> {
    let family = if target.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: plain system call; the result is checked before it is owned.
    let fd = unsafe { libc::socket(family, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_RAW) };
    if fd < 0 {
        return Err(io::Error::last_os_error()).context("cannot open a raw socket");
    }
    // SAFETY: fd is open, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn fragments(source: SocketAddr, target: SocketAddr, payload: &[u8], fragment: usize, id: u64) -> Result<Vec<Vec<u8>>> {
    let (from, to) = (source.port(), target.port());
    let udp = match (source.ip(), target.ip()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => UdpHeader::with_ipv4_checksum(from, to, &header4(a, b, 0), payload)?,
        (IpAddr::V6(a), IpAddr::V6(b)) => UdpHeader::with_ipv6_checksum(from, to, &header6(a, b, 0), payload)?,
        _ => bail!("source and target are of different families"),
    };
    let datagram = [&udp.to_bytes()[..], payload].concat();
    let parts: Vec<&[u8]> = datagram.chunks(fragment.max(8)).collect();
    let mut packets = Vec::new();
    let mut offset = 0;
    for (index, part) in parts.iter().enumerate() {
        let more = index + 1 < parts.len();
        let place = IpFragOffset::try_new(u16::try_from(offset / 8)?)?;
        let mut packet = Vec::new();
        match (source.ip(), target.ip()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                let mut header = header4(a, b, u16::try_from(part.len())?);
                header.identification = id as u16;
                header.more_fragments = more;
                header.fragment_offset = place;
                header.header_checksum = header.calc_header_checksum();
                header.write(&mut packet)?;
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                let mut header = header6(a, b, u16::try_from(part.len() + Ipv6FragmentHeader::LEN)?);
                header.next_header = IpNumber::IPV6_FRAGMENTATION_HEADER;
                header.write(&mut packet)?;
                Ipv6FragmentHeader::new(IpNumber::UDP, place, more, id as u32).write(&mut packet)?;
            }
            _ => bail!("source and target are of different families"),
        }
        packet.extend_from_slice(part);
        packets.push(packet);
        offset += part.len();
    }
    Ok(packets)
}

fn header4(source: std::net::Ipv4Addr, target: std::net::Ipv4Addr, payload: u16) -> Ipv4Header {
    Ipv4Header {
        total_len: payload + Ipv4Header::MIN_LEN as u16,
        time_to_live: 64,
        protocol: IpNumber::UDP,
        source: source.octets(),
        destination: target.octets(),
        ..Ipv4Header::default()
    }
}

fn header6(source: std::net::Ipv6Addr, target: std::net::Ipv6Addr, payload: u16) -> Ipv6Header {
    Ipv6Header {
        payload_length: payload,
        next_header: IpNumber::UDP,
        hop_limit: 64,
        source: source.octets(),
        destination: target.octets(),
        ..Ipv6Header::default()
    }
}
