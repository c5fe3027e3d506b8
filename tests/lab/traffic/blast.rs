//! UDP at the highest rate of one processor: `sendmmsg` from one thread, counted at the receiver.
//!
//! A filter of the receiver's socket drops every datagram and counts the drops, so that the count costs only the path
//! to the socket. Between network namespaces the whole path of a packet runs on the sender's processor, in the sender's
//! system call or in `ksoftirqd`; [`BlastReport::cpu`] includes both.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::socket::{SockaddrLike as _, SockaddrStorage, setsockopt, sockopt};

use super::cpu::SoftirqClock;
use super::wire::bind;
use crate::netns::NetNs;

/// The number of datagrams in one system call.
const BATCH: usize = 64;
/// The index of the drop counter in `SO_MEMINFO` (linux/sock_diag.h).
const SK_MEMINFO_DROPS: usize = 8;
const SK_MEMINFO_VARS: usize = 9;

/// A receiver that counts datagrams.
#[derive(Debug)]
pub struct UdpSink {
    socket: UdpSocket,
}

impl UdpSink {
    /// Opens a receiver at `address`; an unspecified address stands for all addresses of the namespace.
    pub fn start(ns: &NetNs, address: SocketAddr) -> Result<UdpSink> {
        let socket = ns.run(|| bind(address, UdpSocket::bind))?;
        let mut nothing = libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
        let program = libc::sock_fprog { len: 1, filter: &raw mut nothing };
        // SAFETY: the pointer points to a live program of one instruction, and its size is right.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const program).cast(),
                size_of_val(&program) as libc::socklen_t,
            )
        };
        if result < 0 {
            return Err(std::io::Error::last_os_error()).context("cannot attach a filter to the receiver");
        }
        Ok(UdpSink { socket })
    }

    /// Returns the number of datagrams that have arrived, modulo 2^32.
    pub fn count(&self) -> Result<u32> {
        let mut words = [0u32; SK_MEMINFO_VARS];
        let mut size = size_of_val(&words) as libc::socklen_t;
        // SAFETY: the pointers point to live variables, and `size` is the size of `words`.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MEMINFO,
                words.as_mut_ptr().cast(),
                &raw mut size,
            )
        };
        if result < 0 {
            return Err(std::io::Error::last_os_error()).context("cannot read the receiver's count");
        }
        Ok(words[SK_MEMINFO_DROPS])
    }
}

/// The results of one run.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlastReport {
    /// Datagrams that were sent.
    pub sent: u64,
    /// Datagrams that arrived.
    pub received: u64,
    /// The duration of the run.
    pub elapsed: Duration,
    /// The CPU time of the sender's thread and of the threads that do the kernel's deferred work.
    pub cpu: Duration,
}

impl BlastReport {
    /// Returns datagrams per second at the receiver.
    pub fn per_second(&self) -> f64 {
        self.received as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Returns the CPU time per received datagram, in seconds.
    pub fn cpu_per_packet(&self) -> f64 {
        self.cpu.as_secs_f64() / (self.received as f64).max(1.0)
    }
}

/// A set of sockets, each of which sends to every target: each pair is a flow.
#[derive(Debug)]
pub struct Blaster {
    sockets: Vec<UdpSocket>,
    targets: Vec<SockaddrStorage>,
    payload: Vec<u8>,
    /// The position of the next batch.
    next: usize,
}

impl Blaster {
    /// Opens `sockets` sockets in `ns`; each datagram has `size` bytes of payload.
    pub fn open(ns: &NetNs, sockets: usize, targets: &[SocketAddr], size: usize) -> Result<Blaster> {
        let Some(first) = targets.first() else { bail!("nowhere to send to") };
        let any: SocketAddr = if first.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
        let sockets = ns.run(|| {
            let open = |_| {
                let socket = UdpSocket::bind(any).context("cannot open a socket to send from")?;
                setsockopt(&socket.as_fd(), sockopt::SndBuf, &(1 << 20))?;
                if targets.len() == 1 {
                    socket.connect(first).with_context(|| format!("no route to {first}"))?;
                }
                Ok(socket)
            };
            (0..sockets.max(1)).map(open).collect::<Result<Vec<_>>>()
        })?;
        let targets = targets.iter().copied().map(SockaddrStorage::from).collect();
        Ok(Blaster { sockets, targets, payload: vec![0x42; size], next: 0 })
    }

    /// Returns the number of flows.
    pub fn flows(&self) -> usize {
        self.sockets.len() * self.targets.len()
    }

    /// Returns the address of the first socket.
    pub fn local(&self) -> Result<SocketAddr> {
        self.sockets[0].local_addr().context("a socket without an address")
    }

    /// Sends for `warm_up` without counting, then for `window`, through all flows in turn.
    pub fn run(&mut self, sink: &UdpSink, warm_up: Duration, window: Duration) -> Result<BlastReport> {
        let start = Instant::now();
        while start.elapsed() < warm_up {
            self.step()?;
        }
        self.count(sink, |start, _| start.elapsed() < window)
    }

    /// Sends one datagram on each flow, or a few more if there are fewer flows than a batch.
    pub fn run_once(&mut self, sink: &UdpSink) -> Result<BlastReport> {
        self.next = 0;
        let flows = self.flows() as u64;
        self.count(sink, |_, sent| sent < flows)
    }

    fn count(&mut self, sink: &UdpSink, mut go_on: impl FnMut(Instant, u64) -> bool) -> Result<BlastReport> {
        let softirqs = SoftirqClock::start()?;
        let before = (sink.count()?, super::cpu::this_thread()?);
        let start = Instant::now();
        let mut sent = 0;
        while go_on(start, sent) {
            sent += self.step()?;
        }
        let elapsed = start.elapsed();
        let cpu = super::cpu::this_thread()? - before.1 + softirqs.elapsed()?;
        Ok(BlastReport { sent, received: u64::from(sink.count()?.wrapping_sub(before.0)), elapsed, cpu })
    }

    /// Sends one batch with one system call, and returns how many datagrams it sent.
    fn step(&mut self) -> Result<u64> {
        let chunks = self.targets.len().div_ceil(BATCH);
        let at = self.next % (self.sockets.len() * chunks);
        self.next = at + 1;
        let socket = self.sockets[at / chunks].as_raw_fd();
        let targets = &self.targets[at % chunks * BATCH..];
        let connected = self.targets.len() == 1;
        let count = if connected { BATCH } else { targets.len().min(BATCH) };
        let mut body = libc::iovec { iov_base: self.payload.as_mut_ptr().cast(), iov_len: self.payload.len() };
        // SAFETY: all zero bytes are valid headers.
        let mut messages: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
        for (i, message) in messages[..count].iter_mut().enumerate() {
            message.msg_hdr.msg_iov = &raw mut body;
            message.msg_hdr.msg_iovlen = 1;
            if !connected {
                message.msg_hdr.msg_name = targets[i].as_ptr().cast_mut().cast();
                message.msg_hdr.msg_namelen = targets[i].len();
            }
        }
        // SAFETY: every header points to live addresses and bytes, and `count` of them are filled in.
        let sent = unsafe { libc::sendmmsg(socket, messages.as_mut_ptr(), count as u32, 0) };
        match sent {
            0.. => Ok(sent as u64),
            _ => {
                let error = std::io::Error::last_os_error();
                match error.raw_os_error() {
                    // An ICMP error in answer to an earlier datagram is reported here.
                    Some(libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENOBUFS | libc::EAGAIN | libc::EINTR) => Ok(0),
                    _ => Err(error).context("sendmmsg"),
                }
            }
        }
    }
}
