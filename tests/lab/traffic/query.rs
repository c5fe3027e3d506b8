//! UDP queries, each in a flow of its own, and a server that answers them, like the load of a resolver.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt, sockopt,
};

use super::wire::bind;
use crate::background::{Background, Stop};
use crate::netns::NetNs;

const SIZE: usize = 64;
const BUFFER: usize = 4 << 20;
/// The time that the generator waits for the last answers.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// A server that answers every datagram from the address that it was sent to.
#[derive(Debug)]
pub struct AnswerServer {
    _thread: Background,
}

impl AnswerServer {
    /// Listens on `port` of all addresses of the namespace, in both families.
    pub fn start(ns: &NetNs, port: u16) -> Result<AnswerServer> {
        let socket = ns.run(|| bind(SocketAddr::new([0u16; 8].into(), port), UdpSocket::bind))?;
        socket.set_nonblocking(true)?;
        setsockopt(&socket.as_fd(), sockopt::Ipv6RecvPacketInfo, &true)?;
        setsockopt(&socket.as_fd(), sockopt::RcvBufForce, &BUFFER)?;
        let _thread = Background::start(ns, "answer-server", move |stop| answer(&socket, stop))?;
        Ok(AnswerServer { _thread })
    }
}

fn answer(socket: &UdpSocket, stop: &Stop) -> Result<()> {
    while !stop.requested() {
        poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], PollTimeout::from(10u8)).context("poll")?;
        while answer_one(socket)? {}
    }
    Ok(())
}

/// Answers one query. Returns whether there was one.
fn answer_one(socket: &UdpSocket) -> Result<bool> {
    let mut bytes = [0; SIZE];
    let mut control = nix::cmsg_space!(nix::libc::in6_pktinfo);
    let mut buffers = [IoSliceMut::new(&mut bytes)];
    let message =
        match recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut buffers, Some(&mut control), MsgFlags::empty()) {
            Ok(message) => message,
            Err(Errno::EAGAIN) => return Ok(false),
            Err(error) => return Err(error).context("receiving a query"),
        };
    let (length, peer) = (message.bytes, message.address.context("a query without a sender")?);
    let here = message.cmsgs()?.find_map(|one| match one {
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(info),
        _ => None,
    });
    let mut here = here.context("a query without its destination")?;
    here.ipi6_ifindex = 0;
    let reply = [IoSlice::new(&bytes[..length])];
    match sendmsg(socket.as_raw_fd(), &reply, &[ControlMessage::Ipv6PacketInfo(&here)], MsgFlags::empty(), Some(&peer))
    {
        // An answer for which the buffer has no room is lost, as on any network.
        Ok(_) | Err(Errno::EAGAIN | Errno::ENOBUFS) => Ok(true),
        Err(error) => Err(error).context("sending an answer"),
    }
}

/// A generator of queries.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// Queries per second.
    pub per_second: u32,
    /// The number of source ports. A flow is reused after as many queries as there are pairs of a port and a target.
    pub sockets: usize,
}

/// The results of the queries.
#[derive(Clone, Copy, Debug, Default)]
pub struct QueryReport {
    /// Queries that were sent.
    pub sent: u64,
    /// Queries that were answered.
    pub answered: u64,
}

impl Queries {
    /// Queries the `targets` in turn, from `ns`, for `window`. Calls `watch` once a second.
    pub fn run(
        &self,
        ns: &NetNs,
        targets: &[SocketAddr],
        window: Duration,
        mut watch: impl FnMut() -> Result<()>,
    ) -> Result<QueryReport> {
        let any: SocketAddr = if targets[0].is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
        let open = || -> Result<UdpSocket> {
            let socket = UdpSocket::bind(any).context("cannot open a socket for queries")?;
            socket.set_nonblocking(true)?;
            setsockopt(&socket.as_fd(), sockopt::RcvBufForce, &BUFFER)?;
            Ok(socket)
        };
        let sockets = ns.run(|| (0..self.sockets).map(|_| open()).collect::<Result<Vec<_>>>())?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (index, socket) in sockets.iter().enumerate() {
            epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, index as u64))?;
        }
        let mut report = QueryReport::default();
        let (start, mut next_look) = (Instant::now(), Duration::from_secs(1));
        let mut events = vec![EpollEvent::empty(); self.sockets];
        while start.elapsed() < window + LAST_ANSWERS {
            let asked = start.elapsed().min(window);
            let due = (asked.as_secs_f64() * f64::from(self.per_second)) as u64;
            while report.sent < due {
                let turn = report.sent as usize;
                let socket = &sockets[turn / targets.len() % sockets.len()];
                match socket.send_to(&[0x51; SIZE], targets[turn % targets.len()]) {
                    Ok(_) => report.sent += 1,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error).context("sending a query"),
                }
            }
            let ready = epoll.wait(&mut events, EpollTimeout::from(1u8)).context("epoll")?;
            for event in &events[..ready] {
                while sockets[event.data() as usize].recv(&mut [0; SIZE]).is_ok() {
                    report.answered += 1;
                }
            }
            if start.elapsed() >= next_look {
                next_look += Duration::from_secs(1);
                watch()?;
            }
        }
        Ok(report)
    }
}
