//! The garbage collector of idle flows, in the kernel, over real tables.

use super::{BPF_MAP_UPDATE_ELEM, BpfDir, bpf, rig::now_tick, scenes};
use crate::datapath::{
    load::{Programs, Sizes},
    maps::Maps,
};
use aya::{Pod, maps::MapData};
use egress_common::{
    V4,
    config::DatapathConfig,
    flow::{Flow, FlowKey, Reverse, Ticket},
    limits::{COLLECT_BATCH, COLLECT_ROUND_SHIFT},
    net, tcp,
    verdict::Counter,
};
use std::{
    net::IpAddr,
    os::fd::{AsFd as _, AsRawFd as _},
    time::{Duration, Instant},
};

const BPF_MAP_LOOKUP_ELEM: i64 = 1;
const BPF_MAP_UPDATE_BATCH: i64 = 26;
/// Index of the only egress IP.
const EGRESS: u32 = 1;

struct Raw(MapData);

impl Raw {
    fn open(dir: &BpfDir, name: &str) -> Self {
        Self(MapData::from_pin(dir.pins.map(name)).unwrap())
    }
    fn fd(&self) -> u64 {
        self.0.fd().as_fd().as_raw_fd() as u64
    }
    /// Puts many entries into a hash map with one call.
    fn fill<K: Pod, V: Pod>(&self, keys: &[K], values: &[V]) {
        assert_eq!(keys.len(), values.len());
        // in_batch, out_batch, keys, values; then count and file descriptor.
        let count_and_fd = keys.len() as u64 | self.fd() << 32;
        bpf(BPF_MAP_UPDATE_BATCH, &[0, 0, keys.as_ptr() as u64, values.as_ptr() as u64, count_and_fd, 0]).unwrap();
    }
    /// Puts a value at the end of a queue.
    fn push<V: Pod>(&self, value: &V) {
        bpf(BPF_MAP_UPDATE_ELEM, &[self.fd(), 0, std::ptr::from_ref(value) as u64, 0]).unwrap();
    }
    /// Returns the number of the collector's runs: the last eight bytes of its element, after the timer.
    fn runs(&self) -> u64 {
        let (key, mut value) = (0u32, [0u64; 3]);
        bpf(BPF_MAP_LOOKUP_ELEM, &[self.fd(), std::ptr::from_ref(&key) as u64, value.as_mut_ptr() as u64, 0]).unwrap();
        value[2]
    }
}

struct Kernel {
    maps: Maps,
    flows: Raw,
    reverse: Raw,
    tickets: Raw,
    collector: Raw,
    now: u32,
    // Dropped last: the pins keep the maps.
    dir: BpfDir,
}

/// One flow, with the ticks since its last packet out and since its last packet back.
#[derive(Clone, Copy)]
struct Idle {
    proto: u32,
    number: u32,
    ended: u8,
    states: [u16; 2],
    out: u32,
    back: u32,
}

impl Kernel {
    fn new(test: &str, max_flows: u32) -> Option<(Self, Programs)> {
        let dir = BpfDir::new(test)?;
        let programs = Programs::load_lazily(&dir.pins, Sizes { max_flows, ..Sizes::default() }).unwrap();
        let mut maps = Maps::open(&dir.pins).unwrap();
        let record = egress_common::egress::EgressIp {
            addr: net::any(address()),
            generation: 1,
            ..egress_common::egress::EgressIp::EMPTY
        };
        maps.egress_ips.set(&EGRESS, &record).unwrap();
        let raw = |name| Raw::open(&dir, name);
        let (flows, reverse, tickets, collector) =
            (raw("FLOWS_V4"), raw("REVERSE_V4"), raw("TICKETS_V4"), raw("COLLECTOR"));
        Some((Self { maps, flows, reverse, tickets, collector, now: now_tick(), dir }, programs))
    }

    fn limits(&mut self, config: DatapathConfig) {
        self.maps.config.set(&0, &config).unwrap();
    }

    fn put(&self, all: &[Idle]) {
        let entries: Vec<_> = all.iter().map(|i| self.entry(i)).collect();
        let keys: Vec<_> = entries.iter().map(|e| e.0).collect();
        let others: Vec<_> = entries.iter().map(|e| e.2).collect();
        let values: Vec<_> = entries.iter().map(|e| e.1).collect();
        let backs: Vec<_> = entries.iter().map(|e| e.3).collect();
        self.reverse.fill(&others, &backs);
        self.flows.fill(&keys, &values);
        let checked = (self.now >> COLLECT_ROUND_SHIFT).wrapping_sub(1);
        for (key, flow) in keys.iter().zip(&values) {
            self.tickets.push(&Ticket { key: *key, ticket: flow.ticket, checked });
        }
    }

    fn entry(&self, i: &Idle) -> (FlowKey<V4>, Flow, FlowKey<V4>, Reverse<V4>) {
        let [_, a, b, c] = i.number.to_be_bytes();
        let (pod, server) = (net::v4([10, a, b, c].into()), net::v4([203, a, b, c].into()));
        let key = FlowKey { src: pod, dst: server, src_port: 1, dst_port: 2, proto: i.proto };
        let mut flow = Flow {
            policy: 1,
            egress: EGRESS,
            egress_generation: 1,
            ticket: i.number,
            last_seen: self.now.wrapping_sub(i.out),
            created: self.now.wrapping_sub(i.out),
            port: 3,
            state: i.states[0],
            back: i.ended,
            ..Flow::EMPTY
        };
        let IpAddr::V4(egress) = address() else { unreachable!("an IPv4 address") };
        let other = FlowKey { src: net::v4(egress), dst: server, src_port: 3, dst_port: 2, proto: i.proto };
        let mut back = Reverse {
            check: 0,
            pod,
            pod_port: 1,
            state: i.states[1],
            ifindex: 1,
            policy: 1,
            account: 0,
            egress: EGRESS,
            egress_generation: 1,
            endpoint: 0,
            last_seen: self.now.wrapping_sub(i.back),
            pod_mac: [0; 3],
            host_mac: [0; 3],
        };
        flow.seal(&key);
        back.seal(&other);
        (key, flow, other, back)
    }

    fn expired(&self) -> u64 {
        self.maps.counters().unwrap()[&Counter::FlowsExpired]
    }

    /// Waits until this many flows are expired. Returns the time at which it saw that.
    fn wait_for(&self, expired: u64, patience: Duration) -> Instant {
        let start = Instant::now();
        while self.expired() < expired {
            assert!(start.elapsed() < patience, "{} of {expired} flows after {patience:?}", self.expired());
            std::thread::yield_now();
        }
        Instant::now()
    }
}

fn address() -> IpAddr {
    [192, 0, 2, 10].into()
}

const MANY: u32 = 1_000_000;

#[test]
fn collector_expires_a_million_flows_in_bounded_runs_without_an_agent() {
    let Some((mut kernel, programs)) = Kernel::new("collector", MANY + 16) else { return };
    // Nothing is due until the settings say so.
    kernel.limits(DatapathConfig { udp: u32::MAX >> 1, ..scenes::settings() });
    let idle = |number| Idle { proto: 17, number, ended: 0, states: [0; 2], out: 1000, back: 1000 };
    for start in (0..MANY).step_by(50_000) {
        kernel.put(&(start..start + 50_000).map(idle).collect::<Vec<_>>());
    }
    let live = Idle { out: 0, back: 0, ..idle(MANY) };
    kernel.put(&[live]);
    // The agent dies; only the timer still holds its programs.
    drop(programs);
    assert_eq!(kernel.expired(), 0);
    let start = Instant::now();
    let mut before = (kernel.collector.runs(), 0);
    let first = before.0;
    kernel.limits(DatapathConfig { udp: 500, ..scenes::settings() });
    while before.1 < u64::from(MANY) {
        assert!(start.elapsed() < Duration::from_secs(300), "{} of {MANY} are gone", before.1);
        // Runs are counted when they begin: one may have been in progress at the beginning of the interval.
        let (earlier, expired, runs) = (kernel.collector.runs(), kernel.expired(), kernel.collector.runs());
        let most = (runs - before.0 + 1) * u64::from(COLLECT_BATCH);
        assert!(expired - before.1 <= most, "{} flows in {} runs", expired - before.1, runs - before.0);
        before = (earlier, expired);
        std::thread::yield_now();
    }
    let runs = before.0 - first;
    println!("collector: {MANY} flows in {runs} runs and {:?}", start.elapsed());
    assert!((runs + 1) * u64::from(COLLECT_BATCH) >= u64::from(MANY));
    let left: Vec<_> = kernel.maps.v4.flows.entries().unwrap().into_keys().collect();
    let back: Vec<_> = kernel.maps.v4.reverse.entries().unwrap().into_keys().collect();
    let (key, _, other, _) = kernel.entry(&live);
    assert_eq!((left, back), (vec![key], vec![other]), "only the live flow and its port are left");
    assert!(kernel.dir.pins.maps().exists());
}

#[test]
fn each_protocol_and_state_has_its_own_idle_timeout() {
    let Some((mut kernel, _programs)) = Kernel::new("limits", 1024) else { return };
    kernel.limits(DatapathConfig {
        udp: u32::MAX >> 1,
        icmp: u32::MAX >> 1,
        tcp_established: u32::MAX >> 1,
        tcp_transitory: u32::MAX >> 1,
        ..scenes::settings()
    });
    const OPEN: [u16; 2] = [tcp::seen::SYN | tcp::seen::ACK, tcp::seen::SYN | tcp::seen::ACK];
    const HALF: [u16; 2] = [tcp::seen::SYN, 0];
    const CLOSING: [u16; 2] = [tcp::seen::SYN | tcp::seen::ACK | tcp::seen::FIN, tcp::seen::SYN | tcp::seen::ACK];
    // Limits, in ticks: established 40,000, transitory 4,000, UDP 20,000, ICMP 2,000. Each is far from the next, so that
    // the ticks that pass meanwhile do not matter.
    let limits = [(6, OPEN, 40_000), (6, HALF, 4_000), (6, CLOSING, 4_000), (17, [0; 2], 20_000), (1, [0; 2], 2_000)];
    let (mut due, mut alive) = (Vec::new(), Vec::new());
    for (n, (proto, states, limit)) in limits.into_iter().enumerate() {
        let n = n as u32 * 10;
        let flow = |number, out, back| Idle { proto, number, ended: 0, states, out, back };
        due.push(flow(n, limit + 900, limit + 900));
        alive.push(flow(n + 1, limit - 900, limit - 900));
        // Packets of one direction keep the flow.
        alive.push(flow(n + 2, limit + 900, limit - 900));
        alive.push(flow(n + 3, limit - 900, limit + 900));
    }
    // An end that only the remote side claims changes nothing. An end that the pod has accepted ends the flow, even without the queue.
    let (half, reset) = (tcp::end::FIN | tcp::end::ACCEPTED, tcp::end::RST);
    let open = |number, ended, idle| Idle { proto: 6, number, ended, states: OPEN, out: idle, back: idle };
    alive.extend([open(100, half, 39_000), open(101, reset, 39_000), open(102, tcp::end::FIN, 39_000)]);
    due.extend([open(103, reset | tcp::end::ACCEPTED, 1_000), Idle { states: CLOSING, ..open(104, half, 1_000) }]);
    kernel.put(&due);
    kernel.put(&alive);
    kernel.limits(DatapathConfig {
        tcp_established: 40_000,
        tcp_transitory: 4_000,
        udp: 20_000,
        icmp: 2_000,
        ..scenes::settings()
    });
    kernel.wait_for(due.len() as u64, Duration::from_secs(60));
    // Every other flow was examined, too: when a flow queued after all of them is gone, the queue has gone round once more.
    let last = Idle { proto: 1, number: 200, ended: 0, states: [0; 2], out: 3_000, back: 3_000 };
    kernel.put(&[last]);
    kernel.wait_for(due.len() as u64 + 1, Duration::from_secs(60));
    let left: std::collections::BTreeSet<_> = kernel.maps.v4.flows.entries().unwrap().into_keys().collect();
    let expected = alive.iter().map(|i| kernel.entry(i).0).collect();
    assert_eq!(left, expected);
    let ports: std::collections::BTreeSet<_> = kernel.maps.v4.reverse.entries().unwrap().into_keys().collect();
    assert!(due.iter().all(|i| !ports.contains(&kernel.entry(i).2)), "a port did not come back");
    assert!(alive.iter().all(|i| ports.contains(&kernel.entry(i).2)));
}
