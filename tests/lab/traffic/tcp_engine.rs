//! The event loop behind both ends of TCP traffic.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::next_id;
use super::tcp::{ConnectionReport, ConnectionState, ServerMode, TcpOptions};
use super::wire::{RECORD, Record, bind, reset_on_close, start_connect};
use crate::background::{Stop, lock};

/// The number of connections started in one turn: more would overflow the server's SYN queue.
const CONNECTS_PER_TURN: usize = 128;
/// Tokens of listeners are above those of connections.
const LISTENER: u64 = 1 << 32;

/// The state that the loop shares with its owner.
#[derive(Debug)]
pub(super) struct Shared {
    reports: Mutex<Vec<ConnectionReport>>,
    /// The number of connections still to be started.
    pub wanted: AtomicUsize,
    pub sending: AtomicBool,
    /// Whether to drop reports of connections that are no longer open.
    pub forgotten: AtomicBool,
}

impl Shared {
    pub fn new(sending: bool) -> Shared {
        Shared {
            reports: Mutex::default(),
            wanted: AtomicUsize::new(0),
            sending: AtomicBool::new(sending),
            forgotten: AtomicBool::new(false),
        }
    }

    pub fn reports(&self) -> Vec<ConnectionReport> {
        lock(&self.reports).clone()
    }

    pub fn reset_pauses(&self) {
        let now = Instant::now();
        for report in lock(&self.reports).iter_mut() {
            (report.longest_pause, report.last_arrival) = (Duration::ZERO, now);
        }
    }
}

/// A connection of the loop. Its report has the same index.
struct Connection {
    stream: Option<TcpStream>,
    started: Instant,
    mode: ServerMode,
    /// Bytes that the socket has not accepted yet.
    out: Vec<u8>,
    /// The received beginning of an incomplete record.
    partial: Vec<u8>,
    /// The sequence number that the next record must have.
    expected: u64,
    waits_for_room: bool,
}

/// The loop of one end.
pub(super) struct Engine {
    shared: Arc<Shared>,
    options: TcpOptions,
    epoll: Epoll,
    listeners: Vec<TcpListener>,
    mode: ServerMode,
    target: Option<SocketAddr>,
    connections: Vec<Connection>,
}

impl Engine {
    pub fn new(shared: Arc<Shared>, options: TcpOptions) -> Result<Engine> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let (listeners, connections) = (Vec::new(), Vec::new());
        Ok(Engine { shared, options, epoll, listeners, mode: ServerMode::Stream, target: None, connections })
    }

    pub fn listen(&mut self, addresses: &[SocketAddr], mode: ServerMode) -> Result<()> {
        self.mode = mode;
        for address in addresses {
            let listener = bind(*address, TcpListener::bind)?;
            listener.set_nonblocking(true)?;
            // Listening again only raises the backlog: std's is 128.
            nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(4096)?)?;
            let token = LISTENER + self.listeners.len() as u64;
            self.epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, token))?;
            self.listeners.push(listener);
        }
        Ok(())
    }

    pub fn connect_to(&mut self, target: SocketAddr) {
        self.target = Some(target);
    }

    /// Runs until `stop` is requested.
    pub fn run(mut self, stop: &Stop) -> Result<()> {
        let mut events = vec![EpollEvent::empty(); 512];
        let mut next_tick = Instant::now();
        while !stop.requested() {
            let shared = Arc::clone(&self.shared);
            let patience = next_tick.saturating_duration_since(Instant::now()).min(Duration::from_millis(10));
            let timeout = EpollTimeout::try_from(patience + Duration::from_micros(999))?;
            let ready = match self.epoll.wait(&mut events, timeout) {
                Ok(ready) => ready,
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => return Err(error).context("epoll"),
            };
            let mut reports = lock(&shared.reports);
            if shared.forgotten.swap(false, Ordering::Relaxed) {
                self.forget_closed(&mut reports)?;
                // The indices in `events` are no longer valid; level-triggered events are reported again.
                continue;
            }
            for event in &events[..ready] {
                if event.data() >= LISTENER {
                    self.accept((event.data() - LISTENER) as usize, &mut reports)?;
                } else {
                    self.ready(event.data() as usize, event.events(), &mut reports);
                }
            }
            self.start_wanted(&mut reports)?;
            if Instant::now() >= next_tick {
                next_tick = Instant::now() + self.options.interval;
                self.tick(&mut reports);
            }
        }
        if self.options.reset {
            for stream in self.connections.iter().filter_map(|one| one.stream.as_ref()) {
                reset_on_close(stream)?;
            }
        }
        Ok(())
    }

    fn accept(&mut self, listener: usize, reports: &mut Vec<ConnectionReport>) -> Result<()> {
        loop {
            match self.listeners[listener].accept() {
                Ok((stream, peer)) => {
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    let report = ConnectionReport::new(0, stream.local_addr()?, peer, ConnectionState::Open);
                    self.add(stream, report, EpollFlags::EPOLLIN, reports)?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // The client aborted the connection before it was accepted.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(error).context("accept"),
            }
        }
    }

    fn add(
        &mut self,
        stream: TcpStream,
        report: ConnectionReport,
        interest: EpollFlags,
        reports: &mut Vec<ConnectionReport>,
    ) -> Result<()> {
        self.epoll.add(&stream, EpollEvent::new(interest, self.connections.len() as u64))?;
        self.connections.push(Connection::new(Some(stream), self.mode));
        reports.push(report);
        Ok(())
    }

    fn start_wanted(&mut self, reports: &mut Vec<ConnectionReport>) -> Result<()> {
        let Some(target) = self.target else { return Ok(()) };
        let count = self.shared.wanted.load(Ordering::Relaxed).min(CONNECTS_PER_TURN);
        for _ in 0..count {
            self.shared.wanted.fetch_sub(1, Ordering::Relaxed);
            let id = next_id();
            match start_connect(target, self.options.source_port) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    let report = ConnectionReport::new(id, stream.local_addr()?, target, ConnectionState::Connecting);
                    self.add(stream, report, EpollFlags::EPOLLOUT, reports)?;
                }
                Err(error) => {
                    let unspecified = if target.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
                    let failed = ConnectionState::Failed(error.to_string());
                    reports.push(ConnectionReport::new(id, unspecified, target, failed));
                    self.connections.push(Connection::new(None, self.mode));
                }
            }
        }
        Ok(())
    }

    fn ready(&mut self, index: usize, flags: EpollFlags, reports: &mut [ConnectionReport]) {
        let (connection, report) = (&mut self.connections[index], &mut reports[index]);
        if report.state == ConnectionState::Connecting {
            connection.established(report, &self.epoll, index);
        }
        if flags.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP) {
            connection.receive(report, self.options.stall);
        }
        connection.flush(report, &self.epoll, index);
    }

    /// Sends a record on every open connection, and gives up on connections that take too long to be established.
    fn tick(&mut self, reports: &mut [ConnectionReport]) {
        let sending = self.shared.sending.load(Ordering::Relaxed) && self.mode == ServerMode::Stream;
        for (index, (connection, report)) in self.connections.iter_mut().zip(reports).enumerate() {
            match report.state {
                ConnectionState::Connecting if connection.started.elapsed() > self.options.connect_timeout => {
                    connection.stream = None;
                    report.state = ConnectionState::Failed("not established in time".to_owned());
                }
                ConnectionState::Open if sending && report.sent < self.options.records => {
                    let record = Record { id: report.id, sequence: report.sent };
                    connection.out.extend_from_slice(&record.encode());
                    report.sent += 1;
                    connection.flush(report, &self.epoll, index);
                }
                _ => {}
            }
        }
    }

    fn forget_closed(&mut self, reports: &mut Vec<ConnectionReport>) -> Result<()> {
        let open = |report: &ConnectionReport| report.state == ConnectionState::Open;
        let mut kept = reports.iter().map(open);
        self.connections.retain(|_| kept.next().unwrap_or(false));
        reports.retain(open);
        for (index, connection) in self.connections.iter_mut().enumerate() {
            connection.watch(&self.epoll, index)?;
        }
        Ok(())
    }
}

impl Connection {
    fn new(stream: Option<TcpStream>, mode: ServerMode) -> Connection {
        Connection {
            stream,
            started: Instant::now(),
            mode,
            out: Vec::new(),
            partial: Vec::new(),
            expected: 0,
            waits_for_room: false,
        }
    }

    fn established(&mut self, report: &mut ConnectionReport, epoll: &Epoll, index: usize) {
        let Some(stream) = &self.stream else { return };
        match stream.take_error() {
            Ok(None) => {
                report.state = ConnectionState::Open;
                report.connect_time = self.started.elapsed();
                report.last_arrival = Instant::now();
                if let Ok(local) = stream.local_addr() {
                    report.local = local;
                }
                if let Err(error) = self.watch(epoll, index) {
                    self.end(report, ConnectionState::Failed(error.to_string()));
                }
            }
            Ok(Some(error)) | Err(error) => self.end(report, ConnectionState::Failed(error.to_string())),
        }
    }

    fn receive(&mut self, report: &mut ConnectionReport, stall: Duration) {
        let mut bytes = [0; 4096];
        loop {
            let Some(stream) = &mut self.stream else { return };
            match stream.read(&mut bytes) {
                Ok(0) => return self.end(report, ConnectionState::Closed),
                Ok(count) => {
                    let now = Instant::now();
                    let pause = now - report.last_arrival;
                    report.stalls += u32::from(pause > stall);
                    report.longest_pause = report.longest_pause.max(pause);
                    report.last_arrival = now;
                    self.take(&bytes[..count], report);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.end(report, ConnectionState::Failed(error.to_string())),
            }
        }
    }

    fn take(&mut self, bytes: &[u8], report: &mut ConnectionReport) {
        if self.mode == ServerMode::Echo {
            self.out.extend_from_slice(bytes);
        }
        self.partial.extend_from_slice(bytes);
        let whole = self.partial.len() - self.partial.len() % RECORD;
        for record in self.partial[..whole].chunks(RECORD).filter_map(Record::decode) {
            if report.id == 0 {
                report.id = record.id;
            }
            // A server that sends first does not know the id yet.
            let own = record.id == report.id || record.id == 0;
            if own && record.sequence == self.expected {
                report.received += 1;
            } else {
                report.wrong += 1;
            }
            self.expected = record.sequence.wrapping_add(1);
        }
        self.partial.drain(..whole);
    }

    fn flush(&mut self, report: &mut ConnectionReport, epoll: &Epoll, index: usize) {
        while !self.out.is_empty() {
            let Some(stream) = &mut self.stream else { return };
            match stream.write(&self.out) {
                Ok(count) => drop(self.out.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.end(report, ConnectionState::Failed(error.to_string())),
            }
        }
        if self.waits_for_room == self.out.is_empty()
            && report.state == ConnectionState::Open
            && let Err(error) = self.watch(epoll, index)
        {
            self.end(report, ConnectionState::Failed(error.to_string()));
        }
    }

    /// Requests the events that matter now.
    fn watch(&mut self, epoll: &Epoll, index: usize) -> nix::Result<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        self.waits_for_room = !self.out.is_empty();
        let interest =
            if self.waits_for_room { EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
        epoll.modify(stream, &mut EpollEvent::new(interest, index as u64))
    }

    fn end(&mut self, report: &mut ConnectionReport, state: ConnectionState) {
        self.stream = None;
        report.state = state;
    }
}
