//! The thread that reads the programs' reports of flows once a second, and logs them.

use super::interpret::{Event, Interpreter, Lookup, Numbered};
use super::{CLOCK, Line, MAX_BYTES, line};
use crate::flowlog::export::{self, Exporters, Record};
use crate::flowlog::files::{JOURNAL, of_kind};
use crate::flowlog::keeper::{Keeper, Longest};
use crate::flowlog::worker::Worker;
use crate::flowlog::{Counts, FlowLog, Instant, Limits, Mode, now};
use aya::maps::{Map, MapData, MapError, RingBuf};
use egress_common::{
    abi::{NameKey, name_kind},
    egress::EgressIp,
    flow::Flow,
    limits, net,
    verdict::Counter,
};
use egress_core::encode::name_text;
use egress_node::datapath::{
    Pins,
    load::EVENTS,
    maps::{Maps, MapsError},
    monotonic_ns,
};
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// The interval at which flows are read and written, and so the time span that a crash loses.
const INTERVAL: Duration = Duration::from_secs(1);
/// The silence after which a log records that nothing happened, in microseconds.
const ALIVE: Instant = 10_000_000;
/// The maximum length of a journal, since its flows are sorted in memory.
const LONGEST: Longest = Longest { records: 300_000, age: 3_600_000_000 };
/// The difference between two looks, in microseconds, by which the node's clock must have been set.
const CLOCK_SET: Instant = 2_000_000;
/// The maximum number of events that are taken at a time: as many of the shortest as the buffer holds.
const BATCH: usize = 150_000;

/// The settings of the flow log.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `flowLog`.
    pub config: FlowLog,
    /// The log's own directory.
    pub directory: PathBuf,
    /// The node.
    pub node: String,
    /// The agent's pins.
    pub pins: Pins,
    /// Whether the programs have reported all flows since an earlier agent read the reports.
    pub kept: bool,
    /// The exporters of records.
    pub exporters: Exporters,
}

/// A running flow log, which ends when this value is dropped.
#[derive(Debug)]
pub struct Follower {
    _worker: Option<Worker<()>>,
}

impl Follower {
    /// Starts the thread. If the log is switched off, the thread only removes old files.
    pub fn start(settings: Settings, counts: Arc<Counts>) -> Result<Self, MapsError> {
        let worker = match settings.config.mode {
            Mode::Flows => {
                let kernel = Kernel::open(&settings.pins)?;
                let watch = Watch::new(&settings, kernel, counts);
                Worker::start("flows", move |stopped| watch.run(&stopped))
            }
            Mode::Off | Mode::Leases => {
                let keeper = keeper(&settings);
                Worker::start("flows", move |stopped| keeper.idle(&stopped))
            }
        };
        let worker = worker.inspect_err(|error| tracing::error!("cannot start the thread that logs flows: {error}"));
        Ok(Self { _worker: worker.ok() })
    }
}

fn keeper(settings: &Settings) -> Keeper<Line> {
    let (directory, retention) = (settings.directory.clone(), settings.config.retention);
    Keeper::new(Limits { directory, retention, bytes: MAX_BYTES }, "flows", LONGEST)
}

/// The source of the starts and ends of flows.
pub(super) trait Source: Lookup {
    /// Takes up to `most` of the events that were reported since the last call.
    fn take(&mut self, most: usize) -> Vec<Event>;
    /// Returns the number of events that could not be reported since the maps were created; `None` if it cannot be read now.
    fn lost(&self) -> Option<u64>;
    /// Returns all objects that have a number.
    fn numbered(&self) -> Numbered;
    /// Returns the tick in which the oldest open flow began; `None` if no flow is open.
    fn oldest(&self) -> Option<u32>;
}

/// The programs' maps.
pub(super) struct Kernel {
    ring: RingBuf<MapData>,
    maps: Maps,
}

impl Kernel {
    pub(super) fn open(pins: &Pins) -> Result<Self, MapsError> {
        let path = pins.map(EVENTS);
        let open = || MapData::from_pin(&path).and_then(Map::from_map_data).and_then(RingBuf::try_from);
        let ring = open().map_err(|source: MapError| MapsError::Open { path: path.clone(), source })?;
        Ok(Self { ring, maps: Maps::open(pins)? })
    }

    fn egress(&self, index: u32) -> Option<EgressIp> {
        self.maps.egress_ips.get(index).ok().filter(|record| record.addr != [0; 4])
    }
}

impl Lookup for Kernel {
    fn egress_ip(&self, index: u32, generation: u32) -> Option<IpAddr> {
        let record = self.egress(index).filter(|record| record.generation == generation)?;
        Some(net::from_any(record.addr))
    }

    fn name(&self, kind: u32, id: u32) -> Option<String> {
        self.maps.names.get(&NameKey { kind, id }).ok()?.map(|name| name_text(&name))
    }
}

impl Source for Kernel {
    fn take(&mut self, most: usize) -> Vec<Event> {
        let mut events = Vec::new();
        while events.len() < most {
            let Some(item) = self.ring.next() else { break };
            events.extend(Event::read(&item));
        }
        events
    }

    fn lost(&self) -> Option<u64> {
        self.maps.counter(Counter::FlowLogLost).ok()
    }

    fn numbered(&self) -> Numbered {
        let used = (1..limits::MAX_EGRESS_IPS as u32).filter_map(|index| Some((index, self.egress(index)?)));
        let egress_ips = used.map(|(index, record)| ((index, record.generation), net::from_any(record.addr))).collect();
        let names = self.maps.names.iter().filter_map(Result::ok);
        let pods = names.filter(|(key, _)| key.kind == name_kind::ENDPOINT);
        Numbered { egress_ips, pods: pods.map(|(key, name)| (key.id, name_text(&name))).collect() }
    }

    fn oldest(&self) -> Option<u32> {
        // A flow that cannot be read may be of any age.
        let began = |flow: Result<Flow, MapsError>| flow.map_or(0, |flow| flow.created);
        let v4 = self.maps.v4.flows.iter().map(|entry| began(entry.map(|(_, flow)| flow)));
        let v6 = self.maps.v6.flows.iter().map(|entry| began(entry.map(|(_, flow)| flow)));
        v4.chain(v6).min()
    }
}

pub(super) struct Watch<S> {
    pub(super) keeper: Keeper<Line>,
    node: String,
    kept: bool,
    source: S,
    counts: Arc<Counts>,
    interpreter: Interpreter,
    exporters: Exporters,
    /// The first lines of the journal, until they are written.
    header: Vec<Line>,
    /// The number of events that could not be written since the last successful write.
    lost: u64,
    /// The number of events that the programs had lost, as last recorded.
    told: u64,
    last: Instant,
    /// The node's clock and the programs' clock at the last look, in microseconds.
    clocks: Option<(Instant, Instant)>,
    /// The times between which the node's clock was set, until they are written.
    set: Option<(Instant, Instant)>,
    /// A directory beside the maps. It exists while agents have taken events that the log neither has nor records as lost.
    unlogged: PathBuf,
}

impl<S: Source> Watch<S> {
    pub(super) fn new(settings: &Settings, source: S, counts: Arc<Counts>) -> Self {
        let Settings { config, node, kept, exporters, .. } = settings;
        let mut interpreter = Interpreter::new(config.destinations);
        interpreter.know(source.numbered());
        let told = source.lost().unwrap_or(0);
        let keeper = keeper(settings);
        Self {
            keeper,
            node: node.clone(),
            kept: *kept,
            source,
            counts,
            interpreter,
            exporters: exporters.clone(),
            header: Vec::new(),
            lost: 0,
            told,
            last: 0,
            clocks: None,
            set: None,
            unlogged: settings.pins.version().join("unlogged"),
        }
    }

    fn run(mut self, stopped: &Receiver<()>) {
        self.look(now(), monotonic_ns());
        while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
            self.look(now(), monotonic_ns());
        }
        self.look(now(), monotonic_ns());
        self.stop(now());
    }

    /// Writes the events up to now.
    pub(super) fn look(&mut self, now: Instant, monotonic_ns: u64) {
        self.watch_clock(now, (monotonic_ns / 1000) as Instant);
        self.interpreter.set_clock(now, monotonic_ns);
        // A clock that was set back does not reorder the log.
        let at = now.max(self.last);
        if self.keeper.is_open() || self.begin(at) {
            self.write(at);
        } else {
            self.pass();
        }
        self.keeper.tend(now);
    }

    /// Notices that the node's clock was set. Times from before and after do not fit together, so no time in between tells what was open.
    fn watch_clock(&mut self, now: Instant, monotonic: Instant) {
        let Some((last, before)) = self.clocks.replace((now, monotonic)) else { return };
        if ((now - last) - (monotonic - before)).abs() > CLOCK_SET {
            let (from, until) = self.set.unwrap_or((now, now));
            self.set = Some((from.min(now).min(last), until.max(now).max(last)));
        }
    }

    /// Exports events while the log cannot be opened, which loses them for the log. Without collectors they wait in the programs' buffer.
    fn pass(&mut self) {
        if self.exporters.is_empty() {
            return;
        }
        let events = self.source.take(BATCH);
        if events.is_empty() {
            return;
        }
        // The next agent learns of the loss even if this one never opens the log.
        fs::create_dir_all(&self.unlogged).ok();
        let (flows, unknown) = self.interpreter.flows(&events, &self.source);
        let missing = flows.len() as u64 + unknown;
        self.export(flows);
        self.counts.lost.fetch_add(missing, Ordering::Relaxed);
        self.lost += missing;
    }

    fn write(&mut self, at: Instant) {
        let events = self.source.take(BATCH);
        let total = self.source.lost().unwrap_or(self.told);
        let (flows, unknown) = self.interpreter.flows(&events, &self.source);
        let told_lines = flows.len() as u64;
        let mut lines = self.interpreter.lines(&flows);
        self.export(flows);
        let overflow = total.saturating_sub(self.told);
        self.counts.lost.fetch_add(overflow + unknown, Ordering::Relaxed);
        let missing = overflow + unknown + self.lost;
        if missing > 0 {
            lines.push(Line::Lost(self.last, at, missing));
        }
        if let Some((from, until)) = self.set {
            lines.push(Line::Lost(from, until, CLOCK));
        }
        if lines.is_empty() && self.header.is_empty() && at - self.last < ALIVE {
            return;
        }
        lines.push(Line::Alive(at, total));
        self.told = total;
        if !self.append(lines) {
            self.counts.lost.fetch_add(told_lines, Ordering::Relaxed);
            self.lost = missing + told_lines;
            if self.lost > 0 {
                // If this agent never writes, the log still ends as an earlier agent ended it, without a loss.
                fs::create_dir_all(&self.unlogged).ok();
            }
            return;
        }
        (self.lost, self.last, self.set) = (0, at, None);
        self.counts.written.fetch_add(told_lines, Ordering::Relaxed);
        if self.keeper.rotate(at) {
            self.header = self.first(Line::Continued(at, self.node.clone()));
            self.interpreter.forget_numbers();
            // Immediately: the journal must have the end of the log before the journal that had it becomes a segment.
            self.append(vec![Line::Alive(at, total)]);
        }
    }

    fn export(&self, flows: Vec<export::Flow>) {
        if !self.exporters.is_empty() {
            self.exporters.send(flows.into_iter().map(Record::Flow).collect());
        }
    }

    pub(super) fn stop(mut self, at: Instant) {
        if self.lost == 0 && self.header.is_empty() && self.set.is_none() {
            self.append(vec![Line::Stopped(at.max(self.last))]);
        }
    }

    /// Begins the log. Returns whether it did.
    fn begin(&mut self, at: Instant) -> bool {
        if !self.keeper.open(at) {
            return false;
        }
        self.last = at;
        match last_words(self.keeper.directory()).filter(|_| self.kept) {
            Some(left) => {
                self.last = left.until.min(at);
                self.told = left.lost;
                self.header = self.first(Line::Continued(self.last, self.node.clone()));
                let was_set = left.until - at > CLOCK_SET;
                let may_lack = !left.stopped || self.unlogged.is_dir();
                if may_lack || was_set {
                    self.header.push(Line::Lost(self.last, at.max(left.until), if may_lack { 0 } else { CLOCK }));
                }
            }
            None => {
                self.header = self.first(Line::Started(at, self.node.clone()));
                // The log does not cover the time before.
                self.lost = 0;
            }
        }
        true
    }

    /// Returns the first lines of a journal: `line`, and the start of the oldest open flow.
    fn first(&self, line: Line) -> Vec<Line> {
        let oldest = self.source.oldest().map(|tick| Line::Oldest(self.interpreter.time(tick)));
        std::iter::once(line).chain(oldest).collect()
    }

    fn append(&mut self, lines: Vec<Line>) -> bool {
        let lines: Vec<Line> = self.header.iter().cloned().chain(lines).collect();
        let written = self.keeper.append(&lines);
        if written {
            if self.lost > 0 || !self.header.is_empty() {
                // The lines have the loss now.
                fs::remove_dir(&self.unlogged).ok();
            }
            self.header.clear();
        } else {
            self.interpreter.forget_numbers();
        }
        written
    }
}

/// The end of an earlier log.
struct Left {
    until: Instant,
    /// The number of events that the programs had lost by then.
    lost: u64,
    /// Whether it ended cleanly.
    stopped: bool,
}

/// Returns the end of the log according to the last journal of an earlier agent that shows it; `None` if no journal does.
fn last_words(directory: &Path) -> Option<Left> {
    of_kind(directory, JOURNAL).ok()?.iter().rev().find_map(|journal| words(&fs::read(journal).ok()?))
}

fn words(text: &[u8]) -> Option<Left> {
    let is_of_flow = line::may_have(0);
    let mut left: Option<Left> = None;
    for line in line::decode(text, |line| is_of_flow(line)).flatten() {
        match (line, &mut left) {
            (Line::Alive(until, lost), left) => *left = Some(Left { until, lost, stopped: false }),
            (Line::Stopped(until), Some(left)) => (left.until, left.stopped) = (until, true),
            _ => {}
        }
    }
    left
}
