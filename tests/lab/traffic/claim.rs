//! Hosts that claim an address (gratuitous ARP, or an unsolicited Neighbor Advertisement) or request addresses.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use etherparse::{EtherType, Ethernet2Header, Icmpv6Header, Icmpv6Type, IpNumber, Ipv6Header, icmpv6};

use crate::background::Background;
use crate::netns::NetNs;

/// Sends one claim out of `interface` to all hosts of its segment.
pub fn send_claim(ns: &NetNs, interface: &str, address: IpAddr, mac: [u8; 6]) -> Result<()> {
    let frame = match address {
        IpAddr::V4(v4) => {
            // RFC 826: Ethernet, IPv4, lengths, reply; sender and target are the claimed address.
            let header = ethernet(mac, [0xff; 6], EtherType::ARP);
            let body = [&[0, 1, 8, 0, 6, 4, 0, 2][..], &mac, &v4.octets(), &[0xff; 6], &v4.octets()].concat();
            [&header[..], &body].concat()
        }
        IpAddr::V6(v6) => {
            let all_nodes = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
            // RFC 4861, section 4.4: the override flag, the target, its link-layer address.
            let body = [&v6.octets()[..], &[2, 1], &mac].concat();
            let kind = Icmpv6Type::Unknown {
                type_u8: icmpv6::TYPE_NEIGHBOR_ADVERTISEMENT,
                code_u8: 0,
                bytes5to8: [0x20, 0, 0, 0],
            };
            let icmp = Icmpv6Header::with_checksum(kind, v6.octets(), all_nodes, &body)?;
            let ip = Ipv6Header {
                payload_length: (icmp.header_len() + body.len()) as u16,
                next_header: IpNumber::IPV6_ICMP,
                hop_limit: 255,
                source: v6.octets(),
                destination: all_nodes,
                ..Ipv6Header::default()
            };
            let header = ethernet(mac, [0x33, 0x33, 0, 0, 0, 1], EtherType::IPV6);
            [&header[..], &ip.to_bytes(), &icmp.to_bytes(), &body].concat()
        }
    };
    let index = ns.ifindex(interface)?;
    ns.run(|| send_frame(index, &frame).with_context(|| format!("cannot claim {address}")))
}

/// A host that repeatedly sends ARP requests for some addresses, until it is dropped.
#[derive(Debug)]
pub struct Asker {
    _thread: Background,
}

impl Asker {
    /// Requests each of `addresses` every `interval` through `interface` of `ns`, with the sender address `own`.
    pub fn start(
        ns: &NetNs,
        interface: &str,
        own: Ipv4Addr,
        addresses: &[Ipv4Addr],
        interval: Duration,
    ) -> Result<Asker> {
        let index = ns.ifindex(interface)?;
        let mac = ns.mac(interface)?;
        let header = ethernet(mac, [0xff; 6], EtherType::ARP);
        let frame = |address: &Ipv4Addr| {
            // RFC 826: Ethernet, IPv4, lengths, request; the sender, and the requested address.
            let body = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &mac, &own.octets(), &[0; 6], &address.octets()].concat();
            [&header[..], &body].concat()
        };
        let frames: Vec<Vec<u8>> = addresses.iter().map(frame).collect();
        let _thread = Background::start(ns, "asker", move |stop| {
            while stop.rest(interval) {
                frames.iter().try_for_each(|frame| send_frame(index, frame)).context("cannot send an ARP request")?;
            }
            Ok(())
        })?;
        Ok(Asker { _thread })
    }
}

fn ethernet(source: [u8; 6], destination: [u8; 6], ether_type: EtherType) -> [u8; 14] {
    Ethernet2Header { source, destination, ether_type }.to_bytes()
}

/// Sends one frame out of the interface with this index.
pub(super) fn send_frame(index: u32, frame: &[u8]) -> io::Result<()> {
    // SAFETY: plain system call; the result is checked before it is owned.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fd is open, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all zeros is a valid sockaddr_ll.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_ifindex = index.cast_signed();
    // SAFETY: frame and address are valid for their lengths.
    let sent = unsafe {
        libc::sendto(
            fd.as_raw_fd(),
            frame.as_ptr().cast(),
            frame.len(),
            0,
            (&raw const to).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
