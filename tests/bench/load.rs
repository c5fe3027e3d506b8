//! The loads, and the figures of each. One call is one window of one variant.

use std::time::Duration;

use anyhow::{Result, ensure};
use lab::Family;
use lab::traffic::{Blaster, ConnectRate, Direction, bulk, on_cpu, round_trips};

use super::variant::{BULK_PORT, BenchLab, CPU, ECHO_PORT, HOLD_PORT, UDP_PORT};

/// A measured property of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    UdpSmall,
    UdpLarge,
    Cpu,
    TcpOut,
    TcpIn,
    Connections,
    ConnectP50,
    ConnectP99,
    TripP50,
    TripP99,
}

impl Metric {
    /// Returns the name and the unit.
    pub fn title(self) -> (&'static str, &'static str) {
        let (_, name, unit, _) = METRICS[self as usize];
        (name, unit)
    }

    /// Returns whether a larger value is better.
    pub fn more_is_better(self) -> bool {
        METRICS[self as usize].3
    }
}

/// All metrics in the order of the tables, with their names and units, and whether a larger value is better.
pub const METRICS: [(Metric, &str, &str, bool); 10] = [
    (Metric::UdpSmall, "UDP, 64 bytes", "kpps", true),
    (Metric::UdpLarge, "UDP, 1,400 bytes", "kpps", true),
    (Metric::Cpu, "CPU time per packet, whole path, UDP 64 bytes", "µs", false),
    (Metric::TcpOut, "TCP out of the pod", "Gbit/s", true),
    (Metric::TcpIn, "TCP into the pod", "Gbit/s", true),
    (Metric::Connections, "new TCP connections", "1/s", true),
    (Metric::ConnectP50, "time to connect, p50", "µs", false),
    (Metric::ConnectP99, "time to connect, p99", "µs", false),
    (Metric::TripP50, "request and response, p50", "µs", false),
    (Metric::TripP99, "request and response, p99", "µs", false),
];

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Load {
    /// UDP of 64 bytes
    UdpSmall,
    /// UDP of 1,400 bytes
    UdpLarge,
    /// TCP out of the pod
    TcpOut,
    /// TCP into the pod
    TcpIn,
    /// New TCP connections
    Connect,
    /// Sequential requests and responses
    Turns,
}

impl Load {
    /// All loads.
    pub const ALL: [Load; 6] = [Load::UdpSmall, Load::UdpLarge, Load::TcpOut, Load::TcpIn, Load::Connect, Load::Turns];
}

/// The durations and sizes of loads.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// The time before anything is counted.
    pub warm_up: Duration,
    /// The time during which it is counted.
    pub window: Duration,
    /// The number of bytes of a transfer.
    pub bytes: u64,
    /// The number of windows whose mean is one value.
    pub turns: usize,
}

impl Windows {
    /// Merges all windows into one of the same total duration.
    pub fn in_one(self) -> Windows {
        Windows { window: self.window * self.turns as u32, bytes: self.bytes * self.turns as u64, turns: 1, ..self }
    }
}

/// The payload sizes of UDP packets.
const SMALL: usize = 64;
const LARGE: usize = 1400;

/// Runs a load once.
pub fn run(place: &BenchLab, load: Load, family: Family, windows: &Windows) -> Result<Vec<(Metric, f64)>> {
    on_cpu(CPU, || on_this_cpu(place, load, family, windows))
}

fn on_this_cpu(place: &BenchLab, load: Load, family: Family, windows: &Windows) -> Result<Vec<(Metric, f64)>> {
    let ns = &place.pod.ns;
    let at = |port| place.server.ips.at(family, port);
    let blast = |size| {
        let mut blaster = Blaster::open(ns, 1, &[at(UDP_PORT)], size)?;
        let report = blaster.run(&place.sink, windows.warm_up, windows.window)?;
        ensure!(report.received > 0, "no datagram has arrived");
        Ok(report)
    };
    let transfer =
        |direction| bulk(ns, at(BULK_PORT), direction, windows.bytes).map(|report| report.bits_per_second() / 1e9);
    Ok(match load {
        Load::UdpSmall => {
            let report = blast(SMALL)?;
            vec![(Metric::UdpSmall, report.per_second() / 1e3), (Metric::Cpu, report.cpu_per_packet() * 1e6)]
        }
        Load::UdpLarge => vec![(Metric::UdpLarge, blast(LARGE)?.per_second() / 1e3)],
        Load::TcpOut => vec![(Metric::TcpOut, transfer(Direction::Upload)?)],
        Load::TcpIn => vec![(Metric::TcpIn, transfer(Direction::Download)?)],
        Load::Connect => {
            let (rate, latency) = connect(place, family, windows)?;
            let micros = |seconds: f64| seconds * 1e6;
            vec![
                (Metric::Connections, rate),
                (Metric::ConnectP50, micros(latency.p50)),
                (Metric::ConnectP99, micros(latency.p99)),
            ]
        }
        Load::Turns => {
            let times = round_trips(ns, at(ECHO_PORT), windows.warm_up, windows.window)?;
            vec![(Metric::TripP50, times.p50 * 1e6), (Metric::TripP99, times.p99 * 1e6)]
        }
    })
}

/// Returns connections per second, and the distribution of connect times in seconds.
pub fn connect(place: &BenchLab, family: Family, windows: &Windows) -> Result<(f64, lab::stats::Percentiles)> {
    let target = place.server.ips.at(family, HOLD_PORT);
    let running = ConnectRate::default().start(&place.pod.ns, target)?;
    std::thread::sleep(windows.warm_up + windows.window);
    let report = running.finish()?;
    ensure!(report.opened > 0, "no connection was established: {:?}", report.failed);
    Ok((report.per_second(), report.latency()))
}
