//! The thread that follows leases and logs them, from the moment when its node becomes a gateway.

use super::export::{Change, Exporters, Ports, Record};
use super::worker::Worker;
use super::{FlowLog, Limits, Log, LogError, MAX_BYTES, Mode, now};
use crate::store::{Key, Store};
use egress_common::port_block;
use egress_core::{
    leaselog::{Book, LeaseEvent, LeaseRecord, PortLease},
    model::NodeName,
};
use egress_objects::api::{EgressIP, EgressNode, EgressNodeSpec};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// How often leases are read and written, which is also what a crash loses.
const INTERVAL: Duration = Duration::from_secs(1);
/// After how much silence a log records that nothing happened, in microseconds.
const ALIVE: i64 = 10_000_000;
/// The greatest length of a journal, in records besides those that it begins with, and in microseconds.
const JOURNAL_RECORDS: usize = 100_000;
const JOURNAL_AGE: i64 = 6 * 3600 * 1_000_000;
/// How soon a failed rotation is retried, in microseconds.
const ROTATION_PAUSE: i64 = 60_000_000;

/// What was written, for metrics.
#[derive(Debug, Default)]
pub struct Counts {
    /// Records that are on the disk.
    pub written: AtomicU64,
    /// Records that are not, because writing failed.
    pub lost: AtomicU64,
}

/// A running log. It ends when this is dropped.
#[derive(Debug)]
pub struct LogWriter {
    _worker: Worker<()>,
}

impl LogWriter {
    /// Starts the thread, unless nothing is to be written. `directory` is the log's own.
    pub fn start(
        config: &FlowLog,
        directory: PathBuf,
        node: &str,
        store: Store,
        counts: Arc<Counts>,
        exporters: Exporters,
    ) -> Option<Self> {
        if config.mode == Mode::Off {
            return None;
        }
        let limits = Limits { directory, retention: config.retention, bytes: MAX_BYTES };
        let follower = Follower::new(limits, node, store.clone(), counts);
        let telling = Telling::new(node, store, exporters);
        let worker = Worker::start("flowlog", move |stopped| run(follower, telling, &stopped));
        let worker = worker.inspect_err(|error| tracing::error!("cannot start the thread that logs leases: {error}"));
        worker.ok().map(|worker| Self { _worker: worker })
    }
}

fn run(mut follower: Follower, mut telling: Telling, stopped: &Receiver<()>) {
    telling.look(now());
    while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
        follower.look(now());
        telling.look(now());
    }
    follower.stop(now());
}

/// Exports this node's own leases, whether it is a gateway or not: each lease is exported by one node.
struct Telling {
    node: NodeName,
    store: Store,
    exporters: Exporters,
    book: Book,
    seen: Option<u64>,
}

impl Telling {
    fn new(node: &str, store: Store, exporters: Exporters) -> Self {
        Self { node: node.into(), store, exporters, book: Book::default(), seen: None }
    }

    fn look(&mut self, at: i64) {
        if !self.exporters.is_empty() {
            let changes = self.changes(at);
            self.exporters.send(changes);
        }
    }

    fn changes(&mut self, at: i64) -> Vec<Record> {
        let revision = self.store.revision::<EgressNode>();
        if self.seen == Some(revision) {
            return Vec::new();
        }
        let Some(object) = self.store.get::<EgressNode>(&Key::cluster(self.node.as_str())) else { return Vec::new() };
        let is_first = self.seen.replace(revision).is_none();
        let addresses = object.status.iter().flat_map(|status| &status.tunnel_addresses);
        let addresses: Vec<IpAddr> = addresses.filter_map(|address| address.parse().ok()).collect();
        let events = self.book.take_in(&self.node, leases(&self.node, &object.spec));
        let ports = events.into_iter().filter_map(|event| Ports::of(at, event, &addresses));
        let told = ports.map(|ports| if is_first { Ports { change: Change::Held, ..ports } } else { ports });
        told.map(Record::Ports).collect()
    }
}

struct Follower {
    limits: Limits,
    node: String,
    store: Store,
    counts: Arc<Counts>,
    book: Book,
    seen: Option<u64>,
    log: Option<Log<LeaseRecord>>,
    /// Events that were not written since the last that were.
    lost: u64,
    last: i64,
    /// The earliest time at which a journal may become a segment, after that has failed.
    rotation: i64,
}

impl Follower {
    fn new(limits: Limits, node: &str, store: Store, counts: Arc<Counts>) -> Self {
        let (book, node) = (Book::default(), node.to_owned());
        Self { limits, node, store, counts, book, seen: None, log: None, lost: 0, last: 0, rotation: 0 }
    }

    fn stop(mut self, at: i64) {
        if let Some(log) = &mut self.log {
            report(log.append(&[LeaseRecord { at, event: LeaseEvent::Stopped }]));
        }
    }

    /// Writes what changed until now.
    fn look(&mut self, at: i64) {
        // A clock that was set back does not reorder the log.
        let at = at.max(self.last);
        let Some(log) = &self.log else {
            // Other nodes keep nothing in memory.
            if self.is_gateway() && self.store.is_whole::<EgressNode>() {
                self.changes();
                self.begin(at);
                self.last = at;
            }
            return;
        };
        let is_long = is_long(log, at);
        let events = self.changes();
        if self.lost > 0 {
            self.recover(at, events.len());
        } else if at >= self.rotation && is_long {
            self.append(at, events, 0);
            self.rotate(at);
        } else if !events.is_empty() {
            self.append(at, events, 0);
        } else if at - self.last >= ALIVE {
            self.append(at, vec![LeaseEvent::Alive], 0);
        } else {
            return;
        }
        self.last = at;
    }

    fn is_gateway(&self) -> bool {
        self.store.list::<EgressIP>().iter().any(|object| object.carriers().any(|name| name == self.node))
    }

    /// What changed in the leases of nodes since the last read.
    fn changes(&mut self) -> Vec<LeaseEvent> {
        let revision = self.store.revision::<EgressNode>();
        if self.seen == Some(revision) {
            return Vec::new();
        }
        let changed = self.seen.and_then(|seen| self.store.changed::<EgressNode>(seen));
        self.seen = Some(revision);
        let keys: BTreeSet<Key> = match changed {
            Some(keys) => keys.into_iter().collect(),
            None => {
                let listed = self.store.list::<EgressNode>();
                let known = self.book.nodes().map(|node| Key::cluster(node.as_str()));
                listed.iter().map(|object| Key::of(object.as_ref())).chain(known).collect()
            }
        };
        let mut events = Vec::new();
        for key in keys {
            let node = NodeName::from(key.name.as_str());
            let object = self.store.get::<EgressNode>(&key);
            let leases = object.map(|object| leases(&node, &object.spec)).unwrap_or_default();
            events.extend(self.book.take_in(&node, leases));
        }
        // A block that one node returns may be granted to another.
        events.sort_by_key(|event| matches!(event, LeaseEvent::Granted(_)));
        events
    }

    fn begin(&mut self, at: i64) {
        match Log::open(self.limits.clone(), at) {
            Ok(log) => {
                self.log = Some(log);
                self.whole(at, LeaseEvent::Started);
                self.expire(at);
            }
            Err(error) => self.fail(&error, 1),
        }
    }

    /// After a failure: records what was lost, and everything that is held.
    fn recover(&mut self, at: i64, more: usize) {
        let lost = self.lost + more as u64;
        self.counts.lost.fetch_add(more as u64, Ordering::Relaxed);
        self.lost = lost;
        let first = vec![LeaseEvent::Lost(lost), LeaseEvent::Continued];
        let events = first.into_iter().chain(self.book.held()).collect();
        self.append(at, events, lost);
    }

    fn rotate(&mut self, at: i64) {
        let Some(log) = &mut self.log else { return };
        let before = log.journal().1;
        let rotated = log.rotate(at);
        if log.journal().1 == before {
            self.rotation = at + ROTATION_PAUSE;
        } else {
            self.whole(at, LeaseEvent::Continued);
        }
        report(rotated);
        self.expire(at);
    }

    fn whole(&mut self, at: i64, first: LeaseEvent) {
        let events = std::iter::once(first).chain(self.book.held()).collect();
        self.append(at, events, 0);
    }

    fn expire(&self, at: i64) {
        report(self.log.as_ref().map_or(Ok(()), |log| log.expire(at)));
    }

    /// Writes events, which report `recovered` lost ones.
    fn append(&mut self, at: i64, events: Vec<LeaseEvent>, recovered: u64) {
        let records: Vec<LeaseRecord> = events.into_iter().map(|event| LeaseRecord { at, event }).collect();
        let count = records.len() as u64;
        match self.log.as_mut().map(|log| log.append(&records)) {
            Some(Err(error)) if recovered == 0 => self.fail(&error, count),
            Some(Err(error)) => tracing::debug!("the lease log is still not written: {error}"),
            _ => {
                self.counts.written.fetch_add(count, Ordering::Relaxed);
                self.lost -= recovered;
            }
        }
    }

    fn fail(&mut self, error: &LogError, count: u64) {
        if self.lost == 0 {
            tracing::error!("cannot log leases: {error}");
        }
        self.lost += count;
        self.counts.lost.fetch_add(count, Ordering::Relaxed);
    }
}

fn is_long(log: &Log<LeaseRecord>, at: i64) -> bool {
    let (records, began) = log.journal();
    records >= JOURNAL_RECORDS || at - began >= JOURNAL_AGE
}

fn report(result: Result<(), LogError>) {
    if let Err(error) = result {
        tracing::error!("the lease log: {error}");
    }
}

/// The blocks that a node may use, and those of which packets may still be in flight.
fn leases(node: &NodeName, spec: &EgressNodeSpec) -> BTreeSet<PortLease> {
    let mut leases = BTreeSet::new();
    for leased in spec.blocks.iter().chain(&spec.quarantined) {
        let Ok(egress_ip) = leased.egress_ip.parse::<IpAddr>() else { continue };
        let blocks = leased.ranges.iter().flat_map(|range| range.first..range.first.saturating_add(range.count));
        leases.extend(blocks.filter(|block| *block < port_block::COUNT).map(|block| {
            let first_port = port_block::first_port(block);
            let last_port = first_port + (port_block::SIZE - 1);
            PortLease { egress_ip, first_port, last_port, node: node.clone() }
        }));
    }
    leases
}

#[cfg(test)]
#[path = "writer_tests.rs"]
mod tests;
