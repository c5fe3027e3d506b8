//! UDP request and reply flows. The server answers every datagram with its own bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::wire::{RECORD, Record, bind, wait_readable};
use super::{next_id, tally};
use crate::background::{Background, Stop, lock};
use crate::netns::NetNs;
use crate::wait::wait_until;

/// The largest datagram that is received in full.
const MAX_DATAGRAM: usize = 65_535;

/// The state of one flow at the server.
#[derive(Clone, Debug, Default)]
pub struct UdpSeen {
    /// The source addresses of the flow: more than one means that it moved.
    pub peers: BTreeSet<SocketAddr>,
    /// Datagrams of this flow with the right content.
    pub received: u64,
    /// Datagrams with the wrong content.
    pub corrupted: u64,
}

#[derive(Debug, Default)]
struct ServerShared {
    flows: Mutex<BTreeMap<u64, UdpSeen>>,
    /// The number of unsolicited datagrams to send to every peer.
    pushes: AtomicU64,
}

/// A UDP echo server on one or several addresses.
#[derive(Debug)]
pub struct UdpServer {
    shared: Arc<ServerShared>,
    _thread: Background,
}

impl UdpServer {
    /// Starts a server on all `addresses`, which receives as soon as this returns.
    pub fn start(ns: &NetNs, addresses: &[SocketAddr]) -> Result<UdpServer> {
        let sockets = ns.run(|| {
            let open = |address: &SocketAddr| {
                let socket = bind(*address, UdpSocket::bind)?;
                socket.set_nonblocking(true)?;
                nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBuf, &(4 << 20))?;
                Ok(socket)
            };
            addresses.iter().map(open).collect::<Result<Vec<_>>>()
        })?;
        let shared = Arc::new(ServerShared::default());
        let for_thread = Arc::clone(&shared);
        let _thread = Background::start(ns, "udp-server", move |stop| serve(&sockets, &for_thread, stop))?;
        Ok(UdpServer { shared, _thread })
    }

    /// Returns the state of each flow, by the flow's id.
    pub fn flows(&self) -> BTreeMap<u64, UdpSeen> {
        lock(&self.shared.flows).clone()
    }

    /// Returns the number of flows from each source address (a flow that moved counts for each).
    pub fn sources(&self) -> BTreeMap<IpAddr, usize> {
        tally(self.flows().values().flat_map(|seen| &seen.peers).map(SocketAddr::ip))
    }

    /// Sends one unsolicited datagram to every source that was ever seen.
    pub fn push(&self) {
        self.shared.pushes.fetch_add(1, Ordering::Relaxed);
    }
}

fn serve(sockets: &[UdpSocket], shared: &ServerShared, stop: &Stop) -> Result<()> {
    let mut bytes = vec![0; MAX_DATAGRAM];
    let mut pushed = 0;
    while !stop.requested() {
        wait_readable(sockets)?;
        for socket in sockets {
            while let Some((size, peer)) = receive(socket, &mut bytes)? {
                let Some(record) = Record::decode(&bytes[..size]) else { continue };
                let mut flows = lock(&shared.flows);
                let seen = flows.entry(record.id).or_default();
                seen.peers.insert(peer);
                if bytes[..size] == record.padded(size) {
                    seen.received += 1;
                } else {
                    seen.corrupted += 1;
                }
                drop(flows);
                // An answer that cannot be sent now is lost, and the client counts it.
                socket.send_to(&bytes[..size], peer).ok();
            }
        }
        while pushed < shared.pushes.load(Ordering::Relaxed) {
            pushed += 1;
            for (id, seen) in lock(&shared.flows).iter() {
                for peer in &seen.peers {
                    let fits =
                        |socket: &&UdpSocket| socket.local_addr().is_ok_and(|local| local.is_ipv4() == peer.is_ipv4());
                    if let Some(socket) = sockets.iter().find(fits) {
                        socket.send_to(&Record { id: *id, sequence: PUSHED }.encode(), peer).ok();
                    }
                }
            }
        }
    }
    Ok(())
}

/// The sequence number of a server's unsolicited datagrams.
const PUSHED: u64 = u64::MAX;

/// Options of UDP clients.
#[derive(Clone, Debug)]
pub struct UdpOptions {
    /// The time between two requests of a flow. Default 20 ms.
    pub interval: Duration,
    /// The number of requests after which a flow stops sending. Default: never.
    pub requests: u64,
    /// The payload's size, at least 16. Default 64.
    pub size: usize,
}

impl Default for UdpOptions {
    fn default() -> UdpOptions {
        UdpOptions { interval: Duration::from_millis(20), requests: u64::MAX, size: 64 }
    }
}

impl UdpOptions {
    /// Returns the options of flows with one request.
    pub fn once() -> UdpOptions {
        UdpOptions { requests: 1, ..UdpOptions::default() }
    }
}

/// The state of one flow at the client.
#[derive(Clone, Debug)]
pub struct UdpFlowReport {
    /// The flow's id, as in [`UdpServer::flows`].
    pub id: u64,
    /// The client's own address.
    pub local: SocketAddr,
    /// Requests sent.
    pub sent: u64,
    /// Requests with a right reply.
    pub received: u64,
    /// Further right replies to the same requests.
    pub repeated: u64,
    /// The server's unsolicited datagrams.
    pub pushed: u64,
    /// Replies with the wrong content.
    pub corrupted: u64,
    /// Errors of the socket, including ICMP errors, with their counts.
    pub errors: BTreeMap<String, u64>,
    /// The longest time between two replies.
    pub longest_pause: Duration,
    /// The time when the last reply arrived.
    pub last_arrival: Instant,
}

/// The time after which a datagram or its answer counts as lost, even on a machine with much load.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct ClientShared {
    flows: Mutex<Vec<UdpFlowReport>>,
    sending: AtomicBool,
}

/// UDP flows from one namespace to one address, each from a socket of its own.
#[derive(Debug)]
pub struct UdpClients {
    shared: Arc<ClientShared>,
    _thread: Background,
}

impl UdpClients {
    /// Starts `count` flows.
    pub fn start(ns: &NetNs, target: SocketAddr, count: usize, options: UdpOptions) -> Result<UdpClients> {
        let sockets = ns.run(|| (0..count).map(|_| client_socket(target)).collect::<Result<Vec<_>>>())?;
        let report = |socket: &UdpSocket| {
            Ok(UdpFlowReport {
                id: next_id(),
                local: socket.local_addr()?,
                sent: 0,
                received: 0,
                repeated: 0,
                pushed: 0,
                corrupted: 0,
                errors: BTreeMap::new(),
                longest_pause: Duration::ZERO,
                last_arrival: Instant::now(),
            })
        };
        let flows = Mutex::new(sockets.iter().map(report).collect::<Result<Vec<_>>>()?);
        let shared = Arc::new(ClientShared { flows, sending: AtomicBool::new(true) });
        let for_thread = Arc::clone(&shared);
        let _thread = Background::start(ns, "udp-clients", move |stop| request(&sockets, &for_thread, &options, stop))?;
        Ok(UdpClients { shared, _thread })
    }

    /// Returns the state of each flow.
    pub fn flows(&self) -> Vec<UdpFlowReport> {
        lock(&self.shared.flows).clone()
    }

    /// Waits until the flows are `good`, and returns them.
    pub fn wait(
        &self,
        what: &str,
        timeout: Duration,
        good: impl Fn(&[UdpFlowReport]) -> bool,
    ) -> Result<Vec<UdpFlowReport>> {
        wait_until(what, timeout, || Ok(self.flows()), |flows| good(flows))
    }

    /// Waits until every flow has received `more` additional replies.
    pub fn wait_progress(&self, more: u64, timeout: Duration) -> Result<()> {
        let before: Vec<u64> = self.flows().iter().map(|flow| flow.received).collect();
        let moved = |(flow, before): (&UdpFlowReport, &u64)| flow.received >= before + more;
        self.wait(&format!("{more} more replies to every flow"), timeout, |flows| flows.iter().zip(&before).all(moved))
            .map(drop)
    }

    /// Starts or stops sending.
    pub fn set_sending(&self, sending: bool) {
        self.shared.sending.store(sending, Ordering::Relaxed);
    }

    /// Stops sending until each datagram has been answered, then continues. Returns the number of replies. Fails if one was lost,
    /// repeated or changed.
    pub fn all_answered(&self) -> Result<u64> {
        self.set_sending(false);
        let flows = self.wait("an answer to each datagram", ANSWER_TIMEOUT, |flows| {
            flows.iter().all(|flow| flow.received == flow.sent)
        })?;
        let wrong = |flow: &&UdpFlowReport| flow.repeated + flow.corrupted > 0 || !flow.errors.is_empty();
        if let Some(flow) = flows.iter().find(wrong) {
            bail!("not exactly one right answer to each datagram: {flow:?}");
        }
        self.set_sending(true);
        Ok(flows.iter().map(|flow| flow.received).sum())
    }

    /// Restarts the measurement of pauses.
    pub fn reset_pauses(&self) {
        let now = Instant::now();
        for flow in lock(&self.shared.flows).iter_mut() {
            (flow.longest_pause, flow.last_arrival) = (Duration::ZERO, now);
        }
    }
}

fn client_socket(target: SocketAddr) -> Result<UdpSocket> {
    let any: SocketAddr = if target.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect(target).with_context(|| format!("no route to {target}"))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn request(sockets: &[UdpSocket], shared: &ClientShared, options: &UdpOptions, stop: &Stop) -> Result<()> {
    let mut bytes = vec![0; MAX_DATAGRAM];
    let mut next_tick = Instant::now();
    // The requests of each flow that are not answered yet.
    let mut open: Vec<BTreeSet<u64>> = vec![BTreeSet::new(); sockets.len()];
    while !stop.requested() {
        wait_readable(sockets)?;
        let mut flows = lock(&shared.flows);
        for ((socket, flow), open) in sockets.iter().zip(flows.iter_mut()).zip(&mut open) {
            loop {
                match receive(socket, &mut bytes) {
                    Ok(Some((size, _))) => flow.take(&bytes[..size], options.size, open),
                    Ok(None) => break,
                    Err(error) => *flow.errors.entry(error.to_string()).or_default() += 1,
                }
            }
        }
        if Instant::now() >= next_tick && shared.sending.load(Ordering::Relaxed) {
            next_tick = Instant::now() + options.interval;
            let all = sockets.iter().zip(flows.iter_mut()).zip(&mut open);
            for ((socket, flow), open) in all.filter(|((_, flow), _)| flow.sent < options.requests) {
                match socket.send(&Record { id: flow.id, sequence: flow.sent }.padded(options.size)) {
                    Ok(_) => {
                        open.insert(flow.sent);
                        flow.sent += 1;
                    }
                    Err(error) => *flow.errors.entry(error.to_string()).or_default() += 1,
                }
            }
        }
    }
    Ok(())
}

impl UdpFlowReport {
    /// Returns the longest pause, including a current one.
    pub fn pause(&self) -> Duration {
        self.longest_pause.max(self.last_arrival.elapsed())
    }

    fn take(&mut self, bytes: &[u8], size: usize, open: &mut BTreeSet<u64>) {
        let now = Instant::now();
        self.longest_pause = self.longest_pause.max(now - self.last_arrival);
        self.last_arrival = now;
        match Record::decode(bytes) {
            Some(record) if record.id == self.id && record.sequence == PUSHED => self.pushed += 1,
            Some(record) if record.id == self.id && bytes == record.padded(size.max(RECORD)) => {
                let count = if open.remove(&record.sequence) { &mut self.received } else { &mut self.repeated };
                *count += 1;
            }
            _ => self.corrupted += 1,
        }
    }
}

/// Returns a datagram, or `None` if none is waiting.
fn receive(socket: &UdpSocket, bytes: &mut [u8]) -> std::io::Result<Option<(usize, SocketAddr)>> {
    match socket.recv_from(bytes) {
        Ok(received) => Ok(Some(received)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}
