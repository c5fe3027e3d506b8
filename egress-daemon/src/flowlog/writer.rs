//! The thread that follows leases and logs them, starting when its node becomes a gateway.

use super::export::{Change, Exporters, Ports, Record};
use super::keeper::{Keeper, Longest};
use super::worker::Worker;
use super::{FlowLog, Limits, MAX_BYTES, Mode, now};
use crate::store::{Key, Store};
use egress_common::port_block;
use egress_core::{
    leaselog::{Book, LeaseRecord, Moment, PortLease, Scribe},
    model::NodeName,
};
use egress_objects::api::{EgressIP, EgressNode, EgressNodeSpec};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The interval at which leases are read and written, and so the time span that a crash loses.
const INTERVAL: Duration = Duration::from_secs(1);
/// The maximum length of a journal.
const LONGEST: Longest = Longest { records: 100_000, age: 6 * 3600 * 1_000_000 };

/// The numbers of written and lost records, for metrics.
#[derive(Debug, Default)]
pub struct Counts {
    /// Records that are on disk.
    pub written: AtomicU64,
    /// Records that are not on disk, because a write failed.
    pub lost: AtomicU64,
}

/// A running log, which ends when this value is dropped.
#[derive(Debug)]
pub struct LogWriter {
    _worker: Worker<()>,
}

impl LogWriter {
    /// Starts the thread. If the log is switched off, the thread only removes old files. `directory` is the log's own directory.
    pub fn start(
        config: &FlowLog,
        directory: PathBuf,
        node: &str,
        store: Store,
        counts: Arc<Counts>,
        exporters: Exporters,
    ) -> Option<Self> {
        let limits = Limits { directory, retention: config.retention, bytes: MAX_BYTES };
        let follower = Follower::new(limits, node, store.clone(), counts);
        let telling = Telling::new(node, store, exporters);
        let mode = config.mode;
        let worker = Worker::start("flowlog", move |stopped| match mode {
            Mode::Off => follower.keeper.idle(&stopped),
            Mode::Leases | Mode::Flows => run(follower, telling, &stopped),
        });
        let worker = worker.inspect_err(|error| tracing::error!("cannot start the thread that logs leases: {error}"));
        worker.ok().map(|worker| Self { _worker: worker })
    }
}

fn run(mut follower: Follower, mut telling: Telling, stopped: &Receiver<()>) {
    let start = Instant::now();
    let moment = || Moment { at: now(), uptime: start.elapsed().as_micros() as i64 };
    telling.look(now());
    while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
        follower.look(moment(), follower.store.is_connected());
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
    keeper: Keeper<LeaseRecord>,
    node: String,
    store: Store,
    counts: Arc<Counts>,
    scribe: Scribe,
    seen: Option<u64>,
}

impl Follower {
    fn new(limits: Limits, node: &str, store: Store, counts: Arc<Counts>) -> Self {
        let keeper = Keeper::new(limits, "leases", LONGEST);
        Self { keeper, node: node.to_owned(), store, counts, scribe: Scribe::default(), seen: None }
    }

    fn stop(mut self, at: i64) {
        if let Some(last) = self.scribe.stop(at) {
            self.keeper.append(&[last]);
        }
    }

    /// Writes the changes up to now. `connected` is whether the store receives changes.
    fn look(&mut self, moment: Moment, connected: bool) {
        if !connected {
            self.scribe.miss();
        } else if self.keeper.is_open() || self.begin(moment) {
            self.read();
            let records = self.scribe.look(moment);
            if !records.is_empty() && self.write(&records) && self.keeper.rotate(moment.at) {
                let records = self.scribe.again();
                self.write(&records);
            }
        }
        self.keeper.tend(moment.at);
    }

    /// Begins the log if this node is a gateway. Returns whether it did.
    fn begin(&mut self, moment: Moment) -> bool {
        // A node that is not a gateway keeps nothing in memory.
        if !self.is_gateway() || !self.store.is_whole::<EgressNode>() {
            return false;
        }
        if !self.keeper.open(moment.at) {
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        self.read();
        self.scribe.begin(moment);
        true
    }

    fn is_gateway(&self) -> bool {
        self.store.list::<EgressIP>().iter().any(|object| object.carriers().any(|name| name == self.node))
    }

    /// Takes in the changes to the nodes' leases since the last call.
    fn read(&mut self) {
        let revision = self.store.revision::<EgressNode>();
        if self.seen == Some(revision) {
            return;
        }
        let changed = self.seen.and_then(|seen| self.store.changed::<EgressNode>(seen));
        self.seen = Some(revision);
        let keys: BTreeSet<Key> = match changed {
            Some(keys) => keys.into_iter().collect(),
            None => {
                let listed = self.store.list::<EgressNode>();
                let known = self.scribe.nodes().map(|node| Key::cluster(node.as_str()));
                listed.iter().map(|object| Key::of(object.as_ref())).chain(known).collect()
            }
        };
        for key in keys {
            let node = NodeName::from(key.name.as_str());
            let object = self.store.get::<EgressNode>(&key);
            let leases = object.map(|object| leases(&node, &object.spec)).unwrap_or_default();
            self.scribe.take_in(&node, leases);
        }
    }

    fn write(&mut self, records: &[LeaseRecord]) -> bool {
        let written = self.keeper.append(records);
        let lost = self.scribe.note(written);
        self.counts.lost.fetch_add(lost, Ordering::Relaxed);
        if written {
            self.counts.written.fetch_add(records.len() as u64, Ordering::Relaxed);
        }
        written
    }
}

/// Returns the blocks that a node may use, and the quarantined blocks, whose packets may still be in flight.
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
