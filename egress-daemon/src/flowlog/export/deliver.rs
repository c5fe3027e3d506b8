//! One thread for each collector, which takes batches of records from a queue and sends them.

use super::ipfix::Encoder;
use super::{Collector, Format, Record, Sent, json};
use crate::flowlog::{now, worker::Worker};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs as _, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// The maximum number of records that wait for one collector. Further records are lost for this collector.
pub const MAX_QUEUED: usize = 200_000;
/// The number of records that are encoded together.
const CHUNK: usize = 1_000;
/// The timeout for opening a connection, and for writing to one.
const PATIENCE: Duration = Duration::from_secs(3);
/// The time for which the agent's exit waits for queued records. Records not sent by then are lost, since the whole exit has 10 s.
const LAST: Duration = Duration::from_secs(3);
/// The interval of templates: RFC 7011, section 8.4 lets collectors forget templates received by UDP, after 30 minutes by default.
const TEMPLATES_EVERY: Duration = Duration::from_secs(60);

/// The running exporters, shared by clones. Dropping the last clone ends them, after sending queued records if collectors take them soon.
#[derive(Clone, Debug, Default)]
pub struct Exporters(Arc<Running>);

#[derive(Debug, Default)]
struct Running(Vec<Exporter>);

impl Drop for Running {
    fn drop(&mut self) {
        let end = Instant::now() + LAST;
        let mut workers: Vec<_> = self.0.iter_mut().filter_map(|exporter| exporter.worker.as_mut()).collect();
        workers.iter_mut().for_each(|worker| worker.close());
        workers.iter_mut().for_each(|worker| worker.leave(end));
    }
}

#[derive(Debug)]
struct Exporter {
    counts: Arc<Sent>,
    queued: Arc<AtomicUsize>,
    worker: Option<Worker<Arc<[Record]>>>,
}

impl Exporters {
    /// Starts a thread for each collector of records.
    pub fn start(collectors: &[Collector], node: &str) -> Self {
        Self(Arc::new(Running(collectors.iter().filter_map(|one| Exporter::start(one, node)).collect())))
    }

    /// Returns whether there are no collectors.
    pub fn is_empty(&self) -> bool {
        self.0.0.is_empty()
    }

    /// Queues records for all collectors. Never waits.
    pub fn send(&self, records: Vec<Record>) {
        if self.is_empty() || records.is_empty() {
            return;
        }
        let records: Arc<[Record]> = records.into();
        for exporter in self.0.0.iter() {
            exporter.send(&records);
        }
    }

    /// Returns the numbers of sent and lost records, for each collector.
    pub fn counts(&self) -> Vec<Arc<Sent>> {
        self.0.0.iter().map(|exporter| Arc::clone(&exporter.counts)).collect()
    }
}

impl Exporter {
    fn start(collector: &Collector, node: &str) -> Option<Self> {
        let (counts, queued) = (Arc::new(Sent::new(collector)), Arc::default());
        let way: Box<dyn Way> = match collector.format {
            Format::Ipfix => Box::new(Ipfix::new(&collector.address, node)),
            Format::Json => Box::new(Json::new(&collector.address, node)),
            Format::S3 => return None,
        };
        let (sent, waiting) = (Arc::clone(&counts), Arc::clone(&queued));
        let worker = Worker::start("export", move |batches| {
            Delivery { way, batches, counts: sent, queued: waiting, is_away: false, untold: 0 }.run();
        });
        let worker = worker.inspect_err(|error| {
            tracing::error!("cannot start the export thread, so no records are sent to {collector}: {error}")
        });
        Some(Self { counts, queued, worker: worker.ok() })
    }

    fn send(&self, records: &Arc<[Record]>) {
        let waiting = self.queued.fetch_add(records.len(), Ordering::Relaxed);
        let taken = waiting < MAX_QUEUED && self.worker.as_ref().is_some_and(|worker| worker.send(Arc::clone(records)));
        if !taken {
            self.queued.fetch_sub(records.len(), Ordering::Relaxed);
            self.counts.lost.fetch_add(records.len() as u64, Ordering::Relaxed);
        }
    }
}

/// A way to send records to a collector.
trait Way: Send {
    /// Sends the first of these records, and returns their number. `lost` is the number of records lost since the last call that succeeded.
    /// After an error, it is unknown how many arrived, and the next call starts afresh.
    fn send(&mut self, records: &[Record], lost: u64) -> io::Result<usize>;
}

struct Delivery {
    way: Box<dyn Way>,
    batches: Receiver<Arc<[Record]>>,
    counts: Arc<Sent>,
    queued: Arc<AtomicUsize>,
    is_away: bool,
    /// The value of `counts.lost` that was last sent to the collector.
    untold: u64,
}

impl Delivery {
    fn run(mut self) {
        while let Ok(batch) = self.batches.recv() {
            self.deliver(&batch);
            self.queued.fetch_sub(batch.len(), Ordering::Relaxed);
        }
    }

    fn deliver(&mut self, batch: &[Record]) {
        let mut rest = batch;
        while !rest.is_empty() {
            let lost = self.counts.lost.load(Ordering::Relaxed);
            match self.way.send(rest, lost - self.untold) {
                Ok(count) => {
                    self.untold = lost;
                    self.counts.sent.fetch_add(count as u64, Ordering::Relaxed);
                    rest = rest.get(count..).unwrap_or_default();
                    if std::mem::take(&mut self.is_away) {
                        tracing::info!("{} accepts records again", self.counts.collector);
                    }
                }
                Err(error) => return self.give_up(rest.len(), &error),
            }
        }
    }

    /// Drops all queued records for an unreachable collector, so that nothing waits for it any longer, in particular not the agent's exit.
    fn give_up(&mut self, rest: usize, error: &io::Error) {
        if !std::mem::replace(&mut self.is_away, true) {
            tracing::warn!("{} does not accept records, so they are lost: {error}", self.counts.collector);
        }
        let waiting: usize = self.batches.try_iter().map(|batch| batch.len()).sum();
        self.queued.fetch_sub(waiting, Ordering::Relaxed);
        self.counts.lost.fetch_add((rest + waiting) as u64, Ordering::Relaxed);
    }
}

struct Ipfix {
    address: String,
    node: String,
    socket: Option<UdpSocket>,
    encoder: Encoder,
    told: Option<Instant>,
}

impl Ipfix {
    fn new(address: &str, node: &str) -> Self {
        Self { address: address.into(), node: node.into(), socket: None, encoder: Encoder::default(), told: None }
    }

    fn send_with(&mut self, socket: &UdpSocket, records: &[Record]) -> io::Result<usize> {
        let seconds = u32::try_from(now() / 1_000_000).unwrap_or(0);
        if self.told.is_none_or(|told| told.elapsed() >= TEMPLATES_EVERY) {
            socket.send(&self.encoder.templates(seconds))?;
            self.told = Some(Instant::now());
        }
        let (message, count) = self.encoder.records(records, &self.node, seconds);
        socket.send(&message)?;
        Ok(count)
    }
}

impl Way for Ipfix {
    fn send(&mut self, records: &[Record], lost: u64) -> io::Result<usize> {
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => connect_udp(&self.address)?,
        };
        let before = self.encoder.sequence;
        // A collector computes the number of lost records from the sequence number.
        self.encoder.sequence = before.wrapping_add(lost as u32);
        let sent = self.send_with(&socket, records);
        if sent.is_ok() {
            self.socket = Some(socket);
        } else {
            // The next listener at this address has received no template.
            (self.encoder.sequence, self.told) = (before, None);
        }
        sent
    }
}

struct Json {
    address: String,
    node: String,
    stream: Option<TcpStream>,
}

impl Json {
    fn new(address: &str, node: &str) -> Self {
        Self { address: address.into(), node: node.into(), stream: None }
    }
}

impl Way for Json {
    fn send(&mut self, records: &[Record], lost: u64) -> io::Result<usize> {
        let mut stream = match self.stream.take().filter(is_open) {
            Some(stream) => stream,
            None => connect_tcp(&self.address)?,
        };
        let count = records.len().min(CHUNK);
        stream.write_all(&json::encode(&records[..count], &self.node, lost, now()))?;
        self.stream = Some(stream);
        Ok(count)
    }
}

/// Returns whether the peer has not closed the connection. Ignores data from the peer.
fn is_open(stream: &TcpStream) -> bool {
    let mut heard = [0; 256];
    let mut stream = stream;
    let answer = stream.set_nonblocking(true).and_then(|()| stream.read(&mut heard));
    let is_open = match answer {
        Ok(count) => count > 0,
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    };
    is_open && stream.set_nonblocking(false).is_ok()
}

/// Connects to the first address that accepts. Resolves the name each time, since collectors move.
fn each<T>(address: &str, connect: impl Fn(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    let mut last = io::Error::new(ErrorKind::NotFound, format!("{address} has no address"));
    for address in address.to_socket_addrs()? {
        match connect(address) {
            Ok(connected) => return Ok(connected),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn connect_udp(address: &str) -> io::Result<UdpSocket> {
    each(address, |to| {
        let any =
            if to.is_ipv4() { SocketAddr::from(([0; 4], 0)) } else { SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)) };
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        Ok(socket)
    })
}

fn connect_tcp(address: &str) -> io::Result<TcpStream> {
    each(address, |to| {
        let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    })
}
