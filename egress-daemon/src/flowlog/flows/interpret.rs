//! Translates the programs' reports to addresses, names and times for the log. Pure: lookups are passed in.

use super::{Entry, Line};
use crate::flowlog::{
    Instant,
    export::{Fate, Flow},
};
use egress_common::{
    V4, V6,
    abi::{TICK_SHIFT, name_kind},
    event::{FlowEvent, what},
    net,
};
use std::collections::HashMap;
use std::mem::size_of;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The maximum number of pod names that are kept, and of egress IPs.
const MAX_KEPT: usize = 65_536;
/// The clock adjustment, in microseconds, that recorded times ignore: constant differences make small files.
const STEADY: Instant = 100_000;

/// Lookups that are needed while events are read.
pub(super) trait Lookup {
    /// Returns the egress IP with this index and generation.
    fn egress_ip(&self, index: u32, generation: u32) -> Option<IpAddr>;
    /// Returns a name that the maps keep for tools.
    fn name(&self, kind: u32, id: u32) -> Option<String>;
}

/// The objects that have a number now, to which flows that began earlier refer.
#[derive(Clone, Debug, Default)]
pub(super) struct Numbered {
    /// Egress IPs by index and generation.
    pub(super) egress_ips: Vec<((u32, u32), IpAddr)>,
    /// Names of pods, with their uids.
    pub(super) pods: Vec<(u32, String)>,
}

/// The start or the end of a flow of either address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pod: IpAddr,
    remote: SocketAddr,
    event: FlowEvent<V6>,
}

impl Event {
    /// Reads an event from the buffer.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.len() == size_of::<FlowEvent<V4>>() {
            // SAFETY: the length is that of an event, and any bytes are a valid event.
            let e = unsafe { bytes.as_ptr().cast::<FlowEvent<V4>>().read_unaligned() };
            Some(Self::of(e, net::from_v4(e.key.src).into(), net::from_v4(e.key.dst).into()))
        } else if bytes.len() == size_of::<FlowEvent<V6>>() {
            // SAFETY: as above.
            let e = unsafe { bytes.as_ptr().cast::<FlowEvent<V6>>().read_unaligned() };
            Some(Self::of(e, net::from_v6(e.key.src).into(), net::from_v6(e.key.dst).into()))
        } else {
            None
        }
    }

    fn of<A: Copy>(e: FlowEvent<A>, pod: IpAddr, remote: IpAddr) -> Self {
        let key = egress_common::flow::FlowKey {
            src: [0; 4],
            dst: [0; 4],
            src_port: e.key.src_port,
            dst_port: e.key.dst_port,
            proto: e.key.proto,
        };
        let event = FlowEvent {
            key,
            egress: e.egress,
            egress_generation: e.egress_generation,
            policy: e.policy,
            endpoint: e.endpoint,
            ticket: e.ticket,
            created: e.created,
            last_seen: e.last_seen,
            port: e.port,
            what: e.what,
            family: e.family,
        };
        Self { pod, remote: SocketAddr::new(remote, u16::from_be(e.key.dst_port)), event }
    }
}

/// The state that is kept from one second to the next.
#[derive(Debug, Default)]
pub(super) struct Interpreter {
    destinations: bool,
    /// The offset to add to the programs' clock.
    offset: Instant,
    egress_ips: HashMap<(u32, u32), IpAddr>,
    pods: HashMap<u32, Arc<str>>,
    /// The numbers of names in this journal.
    numbers: HashMap<Arc<str>, u32>,
    /// The last number given; no number is given twice.
    number: u32,
}

impl Interpreter {
    pub(super) fn new(destinations: bool) -> Self {
        Self { destinations, ..Self::default() }
    }

    /// Records the numbered objects of flows that began earlier.
    pub(super) fn know(&mut self, numbered: Numbered) {
        self.egress_ips.extend(numbered.egress_ips);
        self.pods.extend(numbered.pods.into_iter().map(|(id, name)| (id, short(&name))));
    }

    /// Forgets the numbers of all names, since their lines are in another journal or were not written.
    pub(super) fn forget_numbers(&mut self) {
        self.numbers.clear();
    }

    /// Records the node's clock, and the programs' clock in ns, at the same moment.
    pub(super) fn set_clock(&mut self, now: Instant, monotonic_ns: u64) {
        let offset = now - (monotonic_ns / 1000) as Instant;
        if (offset - self.offset).abs() > STEADY {
            self.offset = offset;
        }
    }

    /// Returns the flows of events, and the number of events without a flow, because their egress IP is no longer known.
    pub(super) fn flows(&mut self, events: &[Event], lookup: &impl Lookup) -> (Vec<Flow>, u64) {
        let (mut flows, mut lost) = (Vec::with_capacity(events.len()), 0);
        // Not kept between calls, since numbers of policies are reused.
        let mut policies: HashMap<u32, Option<Arc<str>>> = HashMap::new();
        let mut pods: HashMap<u32, Option<Arc<str>>> = HashMap::new();
        for event in events {
            let e = &event.event;
            let Some(egress_ip) = self.egress_ip(e.egress, e.egress_generation, lookup) else {
                lost += 1;
                continue;
            };
            let policy = policies.entry(e.policy);
            let policy = policy.or_insert_with(|| lookup.name(name_kind::POLICY, e.policy).map(Arc::from)).clone();
            let pod = pods.entry(e.endpoint).or_insert_with(|| self.pod(e.endpoint, lookup)).clone();
            flows.push(Flow {
                fate: match e.what {
                    what::BEGAN => Fate::Began,
                    what::REFUSED => Fate::Refused(self.time(e.last_seen)),
                    _ => Fate::Ended(self.time(e.last_seen)),
                },
                egress_ip,
                port: u16::from_be(e.port),
                protocol: e.key.proto as u8,
                ticket: e.ticket,
                began: self.time(e.created),
                pod: pod.unwrap_or_else(|| event.pod.to_string().into()),
                policy,
                source: SocketAddr::new(event.pod, u16::from_be(e.key.src_port)),
                destination: self.destinations.then_some(event.remote),
            });
        }
        (flows, lost)
    }

    /// Returns the journal's lines for flows.
    pub(super) fn lines(&mut self, flows: &[Flow]) -> Vec<Line> {
        let mut lines = Vec::with_capacity(flows.len());
        for flow in flows {
            let entry = Entry {
                egress_ip: flow.egress_ip,
                port: flow.port,
                protocol: flow.protocol,
                ticket: flow.ticket,
                began: flow.began,
                pod: self.number(&flow.pod, &mut lines),
                policy: flow.policy.as_ref().map_or(0, |policy| self.number(policy, &mut lines)),
                destination: flow.destination,
            };
            lines.push(match flow.fate {
                Fate::Began => Line::Began(entry),
                Fate::Ended(last) => Line::Ended(entry, last),
                Fate::Refused(last) => Line::Refused(entry, last),
            });
        }
        lines
    }

    /// Returns the start of a tick.
    pub(super) fn time(&self, tick: u32) -> Instant {
        self.offset + ((u64::from(tick) << TICK_SHIFT) / 1000) as Instant
    }

    fn egress_ip(&mut self, index: u32, generation: u32, lookup: &impl Lookup) -> Option<IpAddr> {
        if let Some(address) = self.egress_ips.get(&(index, generation)) {
            return Some(*address);
        }
        let address = lookup.egress_ip(index, generation)?;
        if self.egress_ips.len() >= MAX_KEPT {
            self.egress_ips.clear();
        }
        self.egress_ips.insert((index, generation), address);
        Some(address)
    }

    /// Returns the name of the pod with this number: the present one, or else the last one. Numbers are hashes of 32 bits, so a pod may get
    /// the number of one that is gone.
    fn pod(&mut self, id: u32, lookup: &impl Lookup) -> Option<Arc<str>> {
        let Some(name) = lookup.name(name_kind::ENDPOINT, id) else { return self.pods.get(&id).cloned() };
        let name = short(&name);
        if self.pods.len() >= MAX_KEPT && !self.pods.contains_key(&id) {
            self.pods.clear();
        }
        self.pods.insert(id, Arc::clone(&name));
        Some(name)
    }

    fn number(&mut self, name: &Arc<str>, lines: &mut Vec<Line>) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        self.number += 1;
        let number = self.number;
        lines.push(Line::Name(number, name.to_string()));
        self.numbers.insert(Arc::clone(name), number);
        number
    }
}

/// Removes the uid from the name of a pod.
fn short(name: &str) -> Arc<str> {
    name.splitn(3, '/').take(2).collect::<Vec<_>>().join("/").into()
}
