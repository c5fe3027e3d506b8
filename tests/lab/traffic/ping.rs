//! Echo requests from a raw socket, for IPv4 and IPv6, and the ICMP errors that arrive instead of replies.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use etherparse::{
    IcmpEchoHeader, Icmpv4Header, Icmpv4Slice, Icmpv4Type, Icmpv6Header, Icmpv6Slice, Icmpv6Type, Ipv4Slice,
};
use nix::sys::socket::{SockaddrStorage, sendto, setsockopt, sockopt};

use crate::netns::NetNs;

/// The options of a ping.
#[derive(Clone, Debug)]
pub struct Ping {
    /// The number of requests, sent sequentially.
    pub count: u16,
    /// The time to wait for each reply.
    pub timeout: Duration,
    /// The number of bytes after the ICMP header.
    pub size: usize,
    /// Whether packets must not be fragmented: by routers over IPv4, by the sender over IPv6, whose routers never do.
    pub dont_fragment: bool,
    /// The time to live, or hop limit.
    pub ttl: u8,
    /// The identifier of the requests; 0 chooses one.
    pub identifier: u16,
}

impl Default for Ping {
    fn default() -> Ping {
        Ping { count: 1, timeout: Duration::from_secs(1), size: 56, dont_fragment: false, ttl: 64, identifier: 0 }
    }
}

/// The results of a ping.
#[derive(Clone, Debug, Default)]
pub struct PingReport {
    /// Requests sent.
    pub sent: u16,
    /// Replies with the right content, with their senders and round-trip times.
    pub replies: Vec<(IpAddr, Duration)>,
    /// ICMP errors, as etherparse names them, with their senders.
    pub errors: Vec<(IpAddr, String)>,
    /// The MTU that an error reported, if any.
    pub mtu: Option<u32>,
    /// Errors of the socket: for example EMSGSIZE if the packet exceeds the MTU of its interface.
    pub refused: Vec<String>,
}

/// Pings `target` from `ns`, waiting for each reply before the next request.
pub fn ping(ns: &NetNs, target: IpAddr, ping: &Ping) -> Result<PingReport> {
    let mut ping = ping.clone();
    if ping.identifier == 0 {
        ping.identifier = (super::next_id() % 65_535 + 1) as u16;
    }
    ns.run(|| {
        let socket = raw_socket(target, &ping)?;
        let mut report = PingReport::default();
        let payload: Vec<u8> = (0..ping.size).map(|at| at.to_le_bytes()[0]).collect();
        for sequence in 0..ping.count {
            let echo = IcmpEchoHeader { id: ping.identifier, seq: sequence };
            let address = SockaddrStorage::from(SocketAddr::new(target, 0));
            let sent = sendto(
                socket.as_raw_fd(),
                &request(target, echo, &payload)?,
                &address,
                nix::sys::socket::MsgFlags::empty(),
            );
            match sent {
                Ok(_) => report.sent += 1,
                Err(error) => {
                    report.refused.push(error.to_string());
                    continue;
                }
            }
            await_answer(&socket, target, echo, &payload, ping.timeout, &mut report)?;
        }
        Ok(report)
    })
}

fn raw_socket(target: IpAddr, ping: &Ping) -> Result<OwnedFd> {
    let (family, protocol) = match target {
        IpAddr::V4(_) => (libc::AF_INET, libc::IPPROTO_ICMP),
        IpAddr::V6(_) => (libc::AF_INET6, libc::IPPROTO_ICMPV6),
    };
    // SAFETY: plain system call; the result is checked before it is owned.
    let fd = unsafe { libc::socket(family, libc::SOCK_RAW | libc::SOCK_CLOEXEC, protocol) };
    if fd < 0 {
        return Err(io::Error::last_os_error()).context("cannot open a raw socket");
    }
    // SAFETY: fd is open, and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    setsockopt(&socket, sockopt::ReceiveTimeout, &nix::sys::time::TimeVal::new(0, 20_000))?;
    match target {
        IpAddr::V4(_) => {
            setsockopt(&socket, sockopt::Ipv4Ttl, &i32::from(ping.ttl))?;
            let discover = if ping.dont_fragment { libc::IP_PMTUDISC_PROBE } else { libc::IP_PMTUDISC_DONT };
            set_int(&socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, discover)?;
        }
        IpAddr::V6(_) => {
            set_int(&socket, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, i32::from(ping.ttl))?;
            let discover = if ping.dont_fragment { libc::IPV6_PMTUDISC_PROBE } else { libc::IPV6_PMTUDISC_DONT };
            set_int(&socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, discover)?;
        }
    }
    Ok(socket)
}

/// Sets an integer option that nix does not name.
pub(crate) fn set_int(socket: &impl AsRawFd, level: i32, option: i32, value: i32) -> Result<()> {
    // SAFETY: the pointer and the size describe `value`, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("socket option {level}/{option} = {value}"));
    }
    Ok(())
}

fn request(target: IpAddr, echo: IcmpEchoHeader, payload: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = match target {
        IpAddr::V4(_) => Icmpv4Header::with_checksum(Icmpv4Type::EchoRequest(echo), payload).to_bytes().to_vec(),
        // The kernel fills in the checksum of raw ICMPv6.
        IpAddr::V6(_) => Icmpv6Header::new(Icmpv6Type::EchoRequest(echo)).to_bytes().to_vec(),
    };
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

/// The meaning of a received packet for the pending request.
enum PingAnswer {
    Reply,
    Error { text: String, mtu: Option<u32> },
    Foreign,
}

fn await_answer(
    socket: &OwnedFd,
    target: IpAddr,
    echo: IcmpEchoHeader,
    payload: &[u8],
    timeout: Duration,
    report: &mut PingReport,
) -> Result<()> {
    let start = Instant::now();
    let mut bytes = vec![0; 65_535];
    while start.elapsed() < timeout {
        let (size, from) = match nix::sys::socket::recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut bytes) {
            Ok((size, from)) => (size, from.and_then(|from| ip_of(&from))),
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => continue,
            Err(error) => return Err(error).context("receiving ICMP"),
        };
        let Some(from) = from else { continue };
        let answer = match target {
            IpAddr::V4(_) => read_v4(&bytes[..size], echo, payload),
            IpAddr::V6(_) => read_v6(&bytes[..size], echo, payload),
        };
        match answer {
            PingAnswer::Reply => {
                report.replies.push((from, start.elapsed()));
                return Ok(());
            }
            PingAnswer::Error { text, mtu } => {
                report.errors.push((from, text));
                report.mtu = mtu.or(report.mtu);
                return Ok(());
            }
            PingAnswer::Foreign => {}
        }
    }
    Ok(())
}

fn ip_of(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

/// Reads an IPv4 packet, as raw sockets return it.
fn read_v4(packet: &[u8], echo: IcmpEchoHeader, payload: &[u8]) -> PingAnswer {
    let Ok(ip) = Ipv4Slice::from_slice(packet) else { return PingAnswer::Foreign };
    let Ok(icmp) = Icmpv4Slice::from_slice(ip.payload().payload) else { return PingAnswer::Foreign };
    match icmp.icmp_type() {
        Icmpv4Type::EchoReply(reply) if reply == echo && icmp.payload() == payload => PingAnswer::Reply,
        kind @ (Icmpv4Type::DestinationUnreachable(_) | Icmpv4Type::TimeExceeded(_)) => {
            // The embedded packet may be truncated, so only fixed offsets are read.
            let inner = icmp.payload();
            let header = usize::from(inner.first().copied().unwrap_or(0) & 15) * 4;
            if !is_request(inner.get(header..), 8, echo) {
                return PingAnswer::Foreign;
            }
            let mtu = match &kind {
                Icmpv4Type::DestinationUnreachable(
                    etherparse::icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu },
                ) => Some(u32::from(*next_hop_mtu)),
                _ => None,
            };
            PingAnswer::Error { text: format!("{kind:?}"), mtu }
        }
        _ => PingAnswer::Foreign,
    }
}

/// Reads an ICMPv6 message, as raw sockets return it.
fn read_v6(message: &[u8], echo: IcmpEchoHeader, payload: &[u8]) -> PingAnswer {
    let Ok(icmp) = Icmpv6Slice::from_slice(message) else { return PingAnswer::Foreign };
    match icmp.icmp_type() {
        Icmpv6Type::EchoReply(reply) if reply == echo && icmp.payload() == payload => PingAnswer::Reply,
        kind @ (Icmpv6Type::DestinationUnreachable(_)
        | Icmpv6Type::TimeExceeded(_)
        | Icmpv6Type::PacketTooBig { .. }) => {
            if !is_request(icmp.payload().get(40..), 128, echo) {
                return PingAnswer::Foreign;
            }
            let mtu = if let Icmpv6Type::PacketTooBig { mtu } = kind { Some(mtu) } else { None };
            PingAnswer::Error { text: format!("{kind:?}"), mtu }
        }
        _ => PingAnswer::Foreign,
    }
}

/// Returns whether an embedded ICMP header is that of our request.
fn is_request(icmp: Option<&[u8]>, kind: u8, echo: IcmpEchoHeader) -> bool {
    icmp.is_some_and(|icmp| icmp.len() >= 8 && icmp[0] == kind && icmp[4..8] == echo.to_bytes())
}
