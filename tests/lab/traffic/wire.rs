//! The record that most traffic consists of, and non-blocking sockets.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrStorage, sockopt};

use crate::netns::NetNs;
use crate::wait::wait_until;

/// The size of a record.
pub const RECORD: usize = 16;

/// A record: its flow, and its sequence number in its direction, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub id: u64,
    pub sequence: u64,
}

impl Record {
    pub fn encode(self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..8].copy_from_slice(&self.id.to_be_bytes());
        bytes[8..].copy_from_slice(&self.sequence.to_be_bytes());
        bytes
    }

    /// Decodes a record from the beginning of `bytes`, if they suffice.
    pub fn decode(bytes: &[u8]) -> Option<Record> {
        let (id, rest) = bytes.split_first_chunk::<8>()?;
        let (sequence, _) = rest.split_first_chunk::<8>()?;
        Some(Record { id: u64::from_be_bytes(*id), sequence: u64::from_be_bytes(*sequence) })
    }

    /// Returns `size` bytes: the record, followed by a pattern that depends on it.
    pub fn padded(self, size: usize) -> Vec<u8> {
        let mut bytes = self.encode().to_vec();
        let seed = self.id.wrapping_mul(31).wrapping_add(self.sequence);
        bytes.extend((RECORD..size).map(|at| seed.wrapping_add(at as u64).to_le_bytes()[0]));
        bytes
    }
}

/// Starts a TCP connection without waiting for it, from the port `bind_port` unless that is 0.
pub fn start_connect(target: SocketAddr, bind_port: u16) -> io::Result<TcpStream> {
    let fd = tcp_socket(target)?;
    if bind_port != 0 {
        socket::setsockopt(&fd, sockopt::ReuseAddr, &true)?;
        let any: SocketAddr = match target {
            SocketAddr::V4(_) => ([0, 0, 0, 0], bind_port).into(),
            SocketAddr::V6(_) => ([0u16; 8], bind_port).into(),
        };
        socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(any))?;
    }
    match socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(target)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(TcpStream::from(fd)),
        Err(error) => Err(error.into()),
    }
}

fn tcp_socket(target: SocketAddr) -> nix::Result<OwnedFd> {
    let family = if target.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    socket::socket(family, SockType::Stream, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC, None)
}

/// Makes the connection end with a reset instead of FIN when it is closed.
pub fn reset_on_close(stream: &TcpStream) -> nix::Result<()> {
    socket::setsockopt(stream, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 0 })
}

/// Binds a socket. Waits until a previous socket releases the address: while another thread of this process starts a
/// program, copies of closed sockets live for a moment in the child.
pub fn bind<T: std::fmt::Debug>(address: SocketAddr, bind: impl Fn(SocketAddr) -> io::Result<T>) -> Result<T> {
    let what = format!("{address} is free to listen on");
    let in_use = |bound: &io::Result<T>| matches!(bound, Err(error) if error.kind() == io::ErrorKind::AddrInUse);
    let bound = wait_until(&what, Duration::from_secs(2), || Ok(bind(address)), |bound| !in_use(bound))?;
    bound.with_context(|| format!("cannot listen on {address}"))
}

/// Opens non-blocking listeners on all `addresses` of this namespace.
pub fn listen(ns: &NetNs, addresses: &[SocketAddr]) -> Result<Vec<TcpListener>> {
    ns.run(|| {
        let open = |address: &SocketAddr| {
            let listener = bind(*address, TcpListener::bind)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        addresses.iter().map(open).collect::<Result<Vec<_>>>()
    })
}

/// Waits up to 10 ms until one of the sockets is readable.
pub fn wait_readable<'a, S: AsFd + 'a>(sockets: impl IntoIterator<Item = &'a S>) -> Result<()> {
    let fds = sockets.into_iter().map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN));
    match poll(&mut fds.collect::<Vec<_>>(), PollTimeout::from(10u8)) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error).context("poll"),
    }
}
