//! `cargo xtask bench --gateway`: the packets per second that one core of a gateway forwards: by plain routing, by Spillway's
//! programs at TC, by its program at the driver (XDP), and by an XDP program that only redirects, which is the limit.
//!
//! A generator at the switch's end of the gateway's link sends frames at full speed (XDP, no sockets), and a sink at
//! the other link's end counts and drops them. The cost of a packet is the CPU time of the gateway's own NAPI thread.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::frames::{Attached, Generator, Sink, redirect};
use lab::traffic::{Direction, bulk, on_cpu};
use lab::{Family, NetNs, wait_until};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::Value;

use super::figures::{self, Column, Figure, family_name, median, number};
use super::programs::{self, Protocol};
use super::variant::{BULK_PORT, BenchLab, CPU, Variant, patience};
use xtask::progress::Step;

/// The compared variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GatewayVariant {
    Plain,
    Tc,
    Xdp,
    Empty,
}

const GATEWAY_VARIANTS: [GatewayVariant; 4] =
    [GatewayVariant::Plain, GatewayVariant::Tc, GatewayVariant::Xdp, GatewayVariant::Empty];

impl Column for GatewayVariant {
    fn name(self) -> &'static str {
        match self {
            GatewayVariant::Plain => "plain",
            GatewayVariant::Tc => "tc",
            GatewayVariant::Xdp => "xdp",
            GatewayVariant::Empty => "empty",
        }
    }
}

/// Returns `{"name", "unit", "plain", "tc", "xdp", "empty"}` for each figure, with null for a variant that does not have it.
pub fn json(figures: &[Figure<GatewayVariant>]) -> Value {
    figures.iter().map(|figure| figure.json(&GATEWAY_VARIANTS, median)).collect()
}

/// Returns a Markdown table that also relates the program at the driver to the other variants.
pub fn table(figures: &[Figure<GatewayVariant>]) -> String {
    let ratios = |figure: &Figure<GatewayVariant>| {
        let to = |to| Some((to, figure.relative(to, "").values.remove(&GatewayVariant::Xdp)?));
        let others = GATEWAY_VARIANTS.into_iter().filter(|one| *one != GatewayVariant::Xdp);
        Figure::new("", "xdp relative to it", others.filter_map(to))
    };
    let lines: Vec<_> = figures.iter().flat_map(|figure| [figure.clone(), ratios(figure)]).collect();
    figures::table(&lines, &GATEWAY_VARIANTS, |spread| number(spread.p50))
}

/// The beginning of the payload of the generator's frames, which marks them.
const MARK: [u8; 4] = *b"mark";
/// The payload length of the smallest frame over IPv4: 64 bytes with the frame check sequence.
const PAYLOAD: usize = 18;
/// The lengths of the headers of Ethernet and UDP, and of the tunnel's headers over IPv4.
const PLAIN_HEADERS: i16 = 14 + 8;
const OUTER: i16 = 50;
/// The number of frames between two looks at the clock.
const BURST: u32 = 32_768;
/// The processor of generator and sink.
const OTHER_CPU: usize = 0;
/// At least one frame in this many must come through.
const LOST: u64 = 20;
/// The number of bytes transferred over TCP.
const BYTES: u64 = 256 << 20;

/// The transport, the direction of packets (out, or back to the pod's node), and the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    transport: Variant,
    out: bool,
    family: Family,
}

impl Case {
    fn all() -> Vec<Case> {
        let transports = [Variant::Direct, Variant::Vxlan].into_iter();
        let ways = transports.flat_map(|transport| [true, false].map(|out| (transport, out)));
        ways.flat_map(|(transport, out)| Family::BOTH.map(|family| Case { transport, out, family })).collect()
    }

    fn name(self) -> String {
        let way = if self.out { "out" } else { "back" };
        format!("64-byte packets {way}, {}, {}", self.transport.name(), family_name(self.family))
    }

    /// Returns the gateway's interfaces on which packets arrive and leave.
    fn interfaces(self) -> [&'static str; 2] {
        if self.out { ["eth0", "ext0"] } else { ["ext0", "eth0"] }
    }
}

/// A lab in which the gateway is measured.
struct Bench {
    way: GatewayVariant,
    transport: Variant,
    place: BenchLab,
    /// The gateway's receiving threads, by interface.
    threads: RefCell<BTreeMap<&'static str, u32>>,
}

/// Measures everything.
pub fn measure(binaries: &Path, rounds: usize, window: Duration) -> Result<Vec<Figure<GatewayVariant>>> {
    let mut benches = Vec::new();
    for (way, transport) in [
        (GatewayVariant::Plain, Variant::Plain),
        (GatewayVariant::Tc, Variant::Direct),
        (GatewayVariant::Xdp, Variant::Direct),
        (GatewayVariant::Tc, Variant::Vxlan),
        (GatewayVariant::Xdp, Variant::Vxlan),
        (GatewayVariant::Empty, Variant::Plain),
    ] {
        let step = Step::start(&format!("build a lab: {}, {}", way.name(), transport.name()));
        benches.push(Bench::open(way, transport, binaries)?);
        step.end("✓", "");
    }
    let mut lines = transfers(&benches, rounds)?;
    for case in Case::all() {
        let step = Step::start(&case.name());
        let measured = benches.iter().filter(|bench| bench.is_for(case));
        let mut runs = measured.map(|bench| Ok((bench.way, bench.prepare(case)?))).collect::<Result<Vec<_>>>()?;
        let mut values: BTreeMap<GatewayVariant, Vec<f64>> = BTreeMap::new();
        for _ in 0..rounds {
            for (way, run) in &runs {
                values.entry(*way).or_default().push(run.packets_per_second(window)? / 1e6);
            }
            runs.rotate_left(1);
        }
        let line = Figure::new(&case.name(), "million a second and core", values);
        let to = |way| line.ratio(GatewayVariant::Xdp, way).map_or(0.0, |ratio| ratio.p50);
        let ratios = format!(
            "{:.2} of plain, {:.2} of tc, {:.2} of empty",
            to(GatewayVariant::Plain),
            to(GatewayVariant::Tc),
            to(GatewayVariant::Empty)
        );
        step.end("✓", &ratios);
        lines.push(line);
    }
    Ok(lines)
}

/// Measures bulk transfers over TCP, out of the pod and into it.
fn transfers(benches: &[Bench], rounds: usize) -> Result<Vec<Figure<GatewayVariant>>> {
    let mut lines = Vec::new();
    for (direction, name) in [(Direction::Upload, "TCP out of the pod"), (Direction::Download, "TCP into the pod")] {
        let step = Step::start(name);
        let mut values: BTreeMap<GatewayVariant, Vec<f64>> = BTreeMap::new();
        for _ in 0..rounds {
            for bench in
                benches.iter().filter(|bench| bench.way != GatewayVariant::Empty && bench.transport != Variant::Vxlan)
            {
                let (pod, at) = (&bench.place.pod.ns, bench.place.server.ips.at(Family::V4, BULK_PORT));
                let report = on_cpu(CPU, || bulk(pod, at, direction, BYTES))?;
                values.entry(bench.way).or_default().push(report.bits_per_second() / 1e9);
            }
        }
        step.end("✓", "");
        lines.push(Figure::new(&format!("{name}, direct, IPv4, veth"), "Gbit/s", values));
    }
    Ok(lines)
}

impl Bench {
    fn open(way: GatewayVariant, transport: Variant, binaries: &Path) -> Result<Bench> {
        let (config, cards) = match way {
            GatewayVariant::Xdp => ("xdp: Native\n", true),
            _ => ("xdp: Off\n", false),
        };
        let place = BenchLab::open_with(transport, binaries, config, 1, cards)?;
        let gateway = &place.lab.node("gw1").ns;
        // Frames must arrive by NAPI, which a veth has only if it merges packets (GRO) or runs XDP.
        ["eth0", "ext0"].into_iter().try_for_each(|interface| gateway.accept_xdp_frames(interface))?;
        if way == GatewayVariant::Xdp {
            wait_until(
                "the programs are at the drivers",
                patience(&place.lab),
                || at_drivers(&place),
                |native| *native,
            )?;
        }
        Ok(Bench { way, transport, place, threads: RefCell::default() })
    }

    fn is_for(&self, case: Case) -> bool {
        matches!(self.way, GatewayVariant::Plain | GatewayVariant::Empty) || self.transport == case.transport
    }

    fn prepare(&self, case: Case) -> Result<Run> {
        let (lab, gateway) = (&self.place.lab, self.place.lab.node("gw1"));
        let segments = if case.out { [lab.underlay(), lab.external()] } else { [lab.external(), lab.underlay()] };
        let [from, to] = case.interfaces();
        let (flow, ends) = programs::open(&self.place, case.family, Protocol::Udp)?;
        drop(ends);
        // Plain routing has no outer headers. The empty program redirects as many bytes as ours.
        let wrapped = case.transport == Variant::Vxlan && self.way != GatewayVariant::Plain;
        let header = if case.family == Family::V4 { 20 } else { 40 };
        let mark = (PLAIN_HEADERS + header, MARK);
        let empty = match self.way {
            GatewayVariant::Empty => {
                let at = if wrapped && case.out { mark.0 + OUTER } else { mark.0 };
                Some(redirect(&gateway.ns, [from, to], (at, MARK))?)
            }
            _ => None,
        };
        let arrives = match self.way {
            GatewayVariant::Empty if case.out => wrapped,
            GatewayVariant::Empty => false,
            _ => wrapped && !case.out,
        };
        let sink = Sink::open(segments[1], &gateway.name, (if arrives { mark.0 + OUTER } else { mark.0 }, MARK))?;
        let generator = Generator::new(&self.frame(case, &flow, wrapped && case.out)?)?;
        threaded(segments[1], &gateway.name, OTHER_CPU)?;
        let thread = self.thread(from)?;
        Ok(Run {
            generator,
            sink,
            _empty: empty,
            thread,
            segment: segments[0].clone(),
            port: gateway.name.clone(),
            gateway: gateway.ns.clone(),
            interface: from,
        })
    }

    /// Returns the thread with which an interface of the gateway receives.
    fn thread(&self, interface: &'static str) -> Result<u32> {
        let mut known = self.threads.borrow_mut();
        if let Some(thread) = known.get(interface) {
            return Ok(*thread);
        }
        let thread = threaded(&self.place.lab.node("gw1").ns, interface, CPU)?;
        let thread = thread.with_context(|| format!("no NAPI thread receives for {interface} of the gateway"))?;
        known.insert(interface, thread);
        Ok(thread)
    }

    /// Returns a packet of the flow, as it arrives at the gateway.
    fn frame(&self, case: Case, flow: &programs::Flow, wrapped: bool) -> Result<Vec<u8>> {
        let lab = &self.place.lab;
        let (worker, gateway) = (lab.node(&self.place.pod.node), lab.node("gw1"));
        let payload = [&MARK[..], &[0x42; PAYLOAD - MARK.len()]].concat();
        let (macs, ends): (_, (SocketAddr, SocketAddr)) = if case.out {
            ([worker.underlay_mac(), gateway.underlay_mac()], (flow.egress, flow.server))
        } else {
            ([self.place.server.ns.mac("eth0")?, gateway.external_mac()], (flow.server, flow.egress))
        };
        let frame = programs::frame(Protocol::Udp, macs, ends.0, ends.1, &payload)?;
        if !wrapped {
            return Ok(frame);
        }
        programs::wrapped(macs, worker.underlay.v4, gateway.underlay.v4, programs::VNI_FORWARD, &frame)
    }
}

/// Returns whether the gateway reports that its program is at both drivers.
fn at_drivers(place: &BenchLab) -> Result<bool> {
    let rows = place.lab.egressctl("gw1", &["gateways"])?;
    let native = rows["items"].as_array().and_then(|rows| rows.iter().find_map(|row| row["native"].as_array()));
    Ok(native.is_some_and(|native| native.len() == 2))
}

/// One case in one lab, ready to run.
struct Run {
    generator: Generator,
    sink: Sink,
    _empty: Option<Attached>,
    /// The gateway's NAPI thread.
    thread: u32,
    /// The namespace in which the generator sends, and the port that leads to the gateway.
    segment: NetNs,
    port: String,
    /// The gateway, and the interface on which it receives.
    gateway: NetNs,
    interface: &'static str,
}

impl Run {
    fn packets_per_second(&self, window: Duration) -> Result<f64> {
        on_cpu(OTHER_CPU, || {
            // Fills the caches, and keeps the first packets out of the measurement.
            self.generator.send(&self.segment, &self.port, BURST)?;
            let received = || received(&self.gateway, self.interface);
            let (before, sunk, time, began) = (received()?, self.sink.count()?, cpu_time(self.thread)?, Instant::now());
            while began.elapsed() < window {
                self.generator.send(&self.segment, &self.port, BURST)?;
            }
            let time = cpu_time(self.thread)? - time;
            let (count, sunk) = (received()? - before, self.sink.count()? - sunk);
            // On a busy machine, the sink may not receive all of them.
            ensure!(sunk > count / LOST, "only {sunk} of {count} frames arrived");
            Ok(count as f64 / time.as_secs_f64())
        })
    }
}

/// Returns the number of frames that an interface has received.
fn received(ns: &NetNs, interface: &'static str) -> Result<u64> {
    ns.run(|| {
        let text = fs::read_to_string("/proc/thread-self/net/dev")?;
        // Bytes, then packets.
        let line = text.lines().find_map(|line| line.trim_start().strip_prefix(interface)?.strip_prefix(':'));
        let count = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        count.with_context(|| format!("no figures of {interface} in {}", ns.name()))
    })
}

/// Returns the kernel's threads that receive frames for interfaces of this name, in any namespace.
fn threads(interface: &str) -> Result<BTreeSet<u32>> {
    let named = format!("napi/{interface}-");
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // The process may have ended meanwhile.
        if fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.starts_with(&named)) {
            found.insert(pid);
        }
    }
    Ok(found)
}

/// Makes an interface receive in its own thread on this processor. Returns the thread's id if it is new.
fn threaded(ns: &NetNs, interface: &str, cpu: usize) -> Result<Option<u32>> {
    let before = threads(interface)?;
    // sysfs shows the network namespace in which it was mounted; `ip netns exec` mounts it again.
    let script = format!("echo 1 > /sys/class/net/{interface}/threaded");
    let done = Command::new("ip").args(["netns", "exec", ns.name(), "/bin/sh", "-euc", &script]).status()?;
    ensure!(done.success(), "cannot enable threaded NAPI for {interface} of {}", ns.name());
    let Some(thread) = (&threads(interface)? - &before).into_iter().next() else { return Ok(None) };
    let mut only = CpuSet::new();
    only.set(cpu)?;
    sched_setaffinity(Pid::from_raw(thread.cast_signed()), &only).context("a NAPI thread cannot be moved")?;
    Ok(Some(thread))
}

/// Returns the CPU time that a thread has used.
fn cpu_time(thread: u32) -> Result<Duration> {
    let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).context("the time of a NAPI thread")?;
    let nanoseconds = text.split_whitespace().next().and_then(|word| word.parse().ok());
    Ok(Duration::from_nanos(nanoseconds.context("a number in schedstat")?))
}
