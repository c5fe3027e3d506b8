//! TCP servers and clients: thousands of connections on one thread for each end, every record of which is checked.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::tally;
use super::tcp_engine::{Engine, Shared};
use crate::background::Background;
use crate::netns::NetNs;
use crate::wait::wait_until;

/// The behaviour of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerMode {
    /// Sends back the received bytes.
    Echo,
    /// Sends its own records at the interval of its options, beginning when it accepts (the server sends first), and
    /// checks the records that arrive.
    Stream,
}

/// Options of one end of TCP connections.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// The time between two records of a connection. Default 20 ms.
    pub interval: Duration,
    /// The number of records after which a connection stops sending (and stays open). Default: never.
    pub records: u64,
    /// Whether the end sends from the beginning; see [`End::set_sending`]. Default true.
    pub sending: bool,
    /// The time after which a connection that is not established counts as failed. Default 5 s.
    pub connect_timeout: Duration,
    /// The source port of a single connection; 0 (default) leaves it to the kernel.
    pub source_port: u16,
    /// The time without an arrival that counts as a stall. Default 200 ms.
    pub stall: Duration,
    /// Whether to close with RST instead of FIN. Default false.
    pub reset: bool,
}

impl Default for TcpOptions {
    fn default() -> TcpOptions {
        TcpOptions {
            interval: Duration::from_millis(20),
            records: u64::MAX,
            sending: true,
            connect_timeout: Duration::from_secs(5),
            source_port: 0,
            stall: Duration::from_millis(200),
            reset: false,
        }
    }
}

impl TcpOptions {
    /// Returns the options of connections that send one record and stay open.
    pub fn once() -> TcpOptions {
        TcpOptions { records: 1, ..TcpOptions::default() }
    }

    /// Returns the options of connections that send nothing until [`End::set_sending`] starts them.
    pub fn silent() -> TcpOptions {
        TcpOptions { sending: false, ..TcpOptions::default() }
    }
}

/// The state of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// The SYN was sent.
    Connecting,
    /// Established.
    Open,
    /// The other end sent FIN.
    Closed,
    /// Reset, refused, timed out or unreachable: the system's error message.
    Failed(String),
}

/// The state of one connection at one end.
#[derive(Clone, Debug)]
pub struct ConnectionReport {
    /// The flow's id, chosen by the client. At a server, it is 0 before the first record.
    pub id: u64,
    /// This end's address.
    pub local: SocketAddr,
    /// The other end's address as this end sees it: at a server, the translated source.
    pub peer: SocketAddr,
    /// Its state.
    pub state: ConnectionState,
    /// The time from the SYN until the connection was established (clients only).
    pub connect_time: Duration,
    /// Records sent.
    pub sent: u64,
    /// Records received in sequence.
    pub received: u64,
    /// Records received that were not the next one of this flow: lost, repeated or foreign bytes.
    pub wrong: u64,
    /// The number of gaps between two arrivals that exceeded [`TcpOptions::stall`].
    pub stalls: u32,
    /// The longest time between two arrivals since the beginning or [`End::reset_pauses`].
    pub longest_pause: Duration,
    /// The time when the last bytes arrived, or the measurement of pauses began.
    pub last_arrival: Instant,
}

impl ConnectionReport {
    pub(super) fn new(id: u64, local: SocketAddr, peer: SocketAddr, state: ConnectionState) -> ConnectionReport {
        ConnectionReport {
            id,
            local,
            peer,
            state,
            connect_time: Duration::ZERO,
            sent: 0,
            received: 0,
            wrong: 0,
            stalls: 0,
            longest_pause: Duration::ZERO,
            last_arrival: Instant::now(),
        }
    }

    /// Returns whether it is established now and every record was right.
    pub fn intact(&self) -> bool {
        self.state == ConnectionState::Open && self.wrong == 0
    }

    /// Returns the longest pause, including a current one.
    pub fn pause(&self) -> Duration {
        self.longest_pause.max(self.last_arrival.elapsed())
    }
}

/// Returns the source that a connection from `client` to `target` has at `server`. `own` is the server's address, which
/// differs from `target` if a device translates it. Connecting and answering may each take as long as `patience`.
pub fn source_at(
    client: &NetNs,
    target: SocketAddr,
    server: &NetNs,
    own: SocketAddr,
    patience: Duration,
) -> Result<IpAddr> {
    let listening = TcpServer::start(server, &[own], ServerMode::Echo)?;
    let options = TcpOptions { connect_timeout: patience, ..TcpOptions::once() };
    let clients = TcpClients::establish(client, target, 1, options)?;
    clients.wait("an echo", patience, |all| all.iter().all(|one| one.received == 1))?;
    Ok(listening.connections().first().context("a connection")?.peer.ip())
}

/// Returns the number of stream records that were sent but not received, at the two ends of the same connections, which both send on their
/// own (as in [`ServerMode::Stream`]), once both are quiet. All records count as missing on connections that only one end knows.
pub fn undelivered(clients: &[ConnectionReport], servers: &[ConnectionReport]) -> u64 {
    let missing = |senders: &[ConnectionReport], receivers: &[ConnectionReport]| -> u64 {
        let received: BTreeMap<u64, u64> = receivers.iter().map(|one| (one.id, one.received)).collect();
        senders.iter().map(|one| one.sent.saturating_sub(received.get(&one.id).copied().unwrap_or(0))).sum()
    };
    missing(clients, servers) + missing(servers, clients)
}

/// A TCP server on one or several addresses. Its sockets close when it is dropped.
#[derive(Debug)]
pub struct TcpServer {
    end: End,
}

/// Connections from one namespace to one address. They close when this is dropped.
#[derive(Debug)]
pub struct TcpClients {
    end: End,
}

/// One end of connections: its thread and the state shared with its owner.
#[derive(Debug)]
pub struct End {
    shared: Arc<Shared>,
    thread: Background,
}

impl Deref for TcpServer {
    type Target = End;

    fn deref(&self) -> &End {
        &self.end
    }
}

impl Deref for TcpClients {
    type Target = End;

    fn deref(&self) -> &End {
        &self.end
    }
}

impl TcpServer {
    /// Listens on all `addresses`. The server accepts connections as soon as this returns.
    pub fn start(ns: &NetNs, addresses: &[SocketAddr], mode: ServerMode) -> Result<TcpServer> {
        TcpServer::start_with(ns, addresses, mode, TcpOptions::default())
    }

    /// Like [`TcpServer::start`], but with other options.
    pub fn start_with(
        ns: &NetNs,
        addresses: &[SocketAddr],
        mode: ServerMode,
        options: TcpOptions,
    ) -> Result<TcpServer> {
        let addresses = addresses.to_vec();
        End::start(ns, "tcp-server", options, move |engine| engine.listen(&addresses, mode))
            .map(|end| TcpServer { end })
    }

    /// Returns the number of connections from each source address.
    pub fn sources(&self) -> BTreeMap<IpAddr, usize> {
        tally(self.connections().iter().map(|connection| connection.peer.ip()))
    }

    /// Returns each flow's source as seen here, by the flow's id. Flows that have not sent a record yet are missing.
    pub fn source_of_flow(&self) -> BTreeMap<u64, SocketAddr> {
        self.connections().iter().filter(|one| one.id != 0).map(|one| (one.id, one.peer)).collect()
    }

    /// Forgets connections that are no longer open, so that later queries cover only new ones.
    pub fn forget_closed(&self) {
        self.end.shared.forgotten.store(true, Ordering::Relaxed);
    }
}

impl TcpClients {
    /// Starts `count` connections concurrently. Returns without waiting for them.
    pub fn open(ns: &NetNs, target: SocketAddr, count: usize, options: TcpOptions) -> Result<TcpClients> {
        let end = End::start(ns, "tcp-clients", options, move |engine| {
            engine.connect_to(target);
            Ok(())
        })?;
        let clients = TcpClients { end };
        clients.open_more(count);
        Ok(clients)
    }

    /// Like [`TcpClients::open`], but waits until every connection is established. Fails if one is not.
    pub fn establish(ns: &NetNs, target: SocketAddr, count: usize, options: TcpOptions) -> Result<TcpClients> {
        let patience = options.connect_timeout * 2;
        let clients = TcpClients::open(ns, target, count, options)?;
        clients.wait(&format!("{count} connections to {target} are open"), patience, |all| {
            all.len() == count && all.iter().all(|one| one.state == ConnectionState::Open)
        })?;
        Ok(clients)
    }

    /// Starts more connections to the same target.
    pub fn open_more(&self, count: usize) {
        self.end.shared.wanted.fetch_add(count, Ordering::Relaxed);
    }

    /// Closes all connections and returns the final reports.
    pub fn close(self) -> Result<Vec<ConnectionReport>> {
        let End { shared, thread } = self.end;
        thread.finish()?;
        Ok(shared.reports())
    }
}

/// Reports for the error of a wait, shown as a summary instead of thousands of reports.
struct Seen(Vec<ConnectionReport>);

impl std::fmt::Debug for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut states: BTreeMap<String, usize> = BTreeMap::new();
        for one in &self.0 {
            *states.entry(format!("{:?}", one.state)).or_default() += 1;
        }
        let wrong = self.0.iter().filter(|one| one.wrong > 0).count();
        let least = self.0.iter().map(|one| one.received).min().unwrap_or(0);
        write!(
            f,
            "{} connections {states:?}, {wrong} with wrong records, at least {least} received on each",
            self.0.len()
        )
    }
}

impl End {
    fn start(
        ns: &NetNs,
        name: &str,
        options: TcpOptions,
        prepare: impl FnOnce(&mut Engine) -> Result<()> + Send + 'static,
    ) -> Result<End> {
        let shared = Arc::new(Shared::new(options.sending));
        let (ready, is_ready) = std::sync::mpsc::channel();
        let for_thread = Arc::clone(&shared);
        let thread = Background::start(ns, name, move |stop| {
            let mut engine = Engine::new(for_thread, options)?;
            prepare(&mut engine)?;
            ready.send(()).ok();
            engine.run(stop)
        })?;
        match is_ready.recv() {
            Ok(()) => Ok(End { shared, thread }),
            Err(never) => Err(thread.finish().err().unwrap_or(never.into())),
        }
    }

    /// Returns all connections that were ever accepted or started, in that order.
    pub fn connections(&self) -> Vec<ConnectionReport> {
        self.shared.reports()
    }

    /// Waits until all connections have been started and are `good`, and returns them. A client sees its connection
    /// established before the server has accepted it.
    pub fn wait(
        &self,
        what: &str,
        timeout: Duration,
        good: impl Fn(&[ConnectionReport]) -> bool,
    ) -> Result<Vec<ConnectionReport>> {
        let seen = || {
            let begun = self.shared.wanted.load(Ordering::Relaxed) == 0;
            ensure!(begun, "connections have not been started");
            Ok(Seen(self.shared.reports()))
        };
        wait_until(what, timeout, seen, |Seen(all)| good(all)).map(|Seen(all)| all)
    }

    /// Waits until every open connection has received `more` additional records. Fails if one of them ends, or if none is open.
    pub fn wait_progress(&self, more: u64, timeout: Duration) -> Result<()> {
        let open = |one: &ConnectionReport| one.state == ConnectionState::Open;
        // A client sees its connection established before the server has accepted it.
        let before = self.wait("an open connection", timeout, |all| all.iter().any(open))?;
        let what = format!("{more} more records on every open connection");
        let moved = |(before, now): (&ConnectionReport, &ConnectionReport)| {
            !open(before) || !open(now) || now.received >= before.received + more
        };
        let all = self.wait(&what, timeout, |all| before.iter().zip(all).all(moved))?;
        let ended = before.iter().zip(&all).find(|(before, now)| open(before) && !open(now));
        ensure!(ended.is_none(), "{what}: a connection has ended: {ended:?}");
        Ok(())
    }

    /// Starts or stops sending (for a server, in [`ServerMode::Stream`]).
    pub fn set_sending(&self, sending: bool) {
        self.shared.sending.store(sending, Ordering::Relaxed);
    }

    /// Restarts the measurement of pauses.
    pub fn reset_pauses(&self) {
        self.shared.reset_pauses();
    }
}
