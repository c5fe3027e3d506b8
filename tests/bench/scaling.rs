//! The change of packet rate and connection rate as a cluster grows: flows, policies, CIDRs, gateways. Each point is a
//! separate lab, measured in turns with a lab that has one of everything.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, ensure};
use lab::traffic::{Blaster, on_cpu};
use lab::{Family, wait_until};

use super::chart::thousands;
use super::figures::{Column, Figure};
use super::load::{self, Windows};
use super::routes::{TARGETS, targets};
use super::variant::{BenchLab, CPU, EGRESS, Variant, patience, policy};
use xtask::progress::Step;

const FAMILY: Family = Family::V4;
/// Room for the flows of the largest point and for concurrent connections.
const MANY_FLOWS: &str = "maxFlows: 1200000\nmaxFlowsPerPod: 1200000\n";
/// The number of sockets, each with a flow to every target, for axes other than the number of flows.
const SOCKETS: usize = 16;
/// The number of rounds of each point.
const ROUNDS: usize = 7;
const QUICK_ROUNDS: usize = 3;

/// The number that grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    Flows,
    Policies,
    Cidrs,
    Gateways,
}

impl Axis {
    /// All axes, in the order of the tables.
    pub const ALL: [Axis; 4] = [Axis::Flows, Axis::Policies, Axis::Cidrs, Axis::Gateways];

    /// Returns the name in tables and charts.
    pub fn title(self) -> &'static str {
        match self {
            Axis::Flows => "live flows",
            Axis::Policies => "policies of one pod",
            Axis::Cidrs => "CIDRs of one pod",
            Axis::Gateways => "gateways of one policy",
        }
    }

    /// Returns the points beyond the first, which has a count of one.
    fn points(self, quick: bool) -> &'static [u32] {
        match (self, quick) {
            (Axis::Flows, false) => &[1_000, 100_000, 1_000_000],
            (Axis::Flows, true) => &[100_000],
            (Axis::Policies, false) => &[10, 100, 1_000],
            (Axis::Policies, true) => &[100],
            (Axis::Cidrs, false) => &[100, 1_000, 10_000],
            (Axis::Cidrs, true) => &[1_000],
            (Axis::Gateways, false) => &[4, 16, 64],
            (Axis::Gateways, true) => &[4],
        }
    }
}

/// One series of a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Series {
    /// 64-byte UDP through all flows in turn.
    AllFlows,
    /// The same by plain routing through as many gateways: the loss of the lab itself, due to the memory of the
    /// generator and of that many namespaces.
    PlainFlows,
    /// 64-byte UDP through one flow.
    OneFlow,
    /// New TCP connections.
    Connections,
    /// New TCP connections, by plain routing through as many gateways.
    PlainConnections,
}

/// All series in the order of the tables, with their names in tables and charts, and their colours.
pub const SERIES: [(Series, &str, &str); 5] = [
    (Series::AllFlows, "packets, all flows in turn", "#174ea6"),
    (Series::PlainFlows, "packets, plain routing", "#9aa0a6"),
    (Series::OneFlow, "packets, one flow", "#4285f4"),
    (Series::Connections, "new connections", "#d9a441"),
    (Series::PlainConnections, "connections, plain routing", "#d0c8b8"),
];

impl Column for Series {
    fn name(self) -> &'static str {
        SERIES[self as usize].1
    }
}

/// One point, compared with one of everything.
#[derive(Clone, Debug)]
pub struct Point {
    pub axis: Axis,
    pub count: u32,
    /// The measurements relative to the lab with one of everything, round by round.
    pub relative: Figure<Series>,
}

/// Measures all curves with one transport. `points` receives the measured points, even on an error.
pub fn measure(
    variant: Variant,
    binaries: &Path,
    windows: &Windows,
    quick: bool,
    points: &mut Vec<Point>,
) -> Result<()> {
    let rounds = if quick { QUICK_ROUNDS } else { ROUNDS };
    for axis in Axis::ALL {
        let config = if axis == Axis::Flows { MANY_FLOWS } else { "" };
        let base = BenchLab::open(variant, binaries, config, 1)?;
        for &count in axis.points(quick) {
            let step = Step::start(&format!("{count} {}", axis.title()));
            step.at("building");
            let gateways = if axis == Axis::Gateways { u8::try_from(count)? } else { 1 };
            let place = BenchLab::open(variant, binaries, config, gateways)?;
            grow(&place, axis, count)?;
            let measured = || match axis {
                Axis::Flows => flows(&base, &place, binaries, count, rounds, windows),
                _ => others(&base, &place, binaries, axis, count, rounds, windows),
            };
            let point = base.lab.while_frozen(|| place.lab.while_frozen(|| on_cpu(CPU, measured)))?;
            let shown = SERIES
                .into_iter()
                .filter_map(|(series, title, _)| Some(format!("{title} {:.2}", point.relative.spread(series)?.p50)));
            step.end("✓", &shown.collect::<Vec<_>>().join(", "));
            points.push(point);
        }
    }
    Ok(())
}

/// The number of CIDRs of a policy, somewhat less than the CRD allows (`maxItems`).
const CIDRS_OF_A_POLICY: usize = 1000;

/// Changes the policies of a lab so that it has `count` of the axis's kind, and waits until they are in force.
fn grow(place: &BenchLab, axis: Axis, count: u32) -> Result<()> {
    // The server's own prefix comes last: it is in force once everything before it is.
    let near = format!("{}/32", place.server.ips.v4);
    let elsewhere = |n: u32| format!("100.{}.{}.{}/32", 64 + (n >> 16), n >> 8 & 0xff, n & 0xff);
    let manifests = place.lab.manifests();
    let egress = [(EGRESS, "gw1")];
    match axis {
        Axis::Flows => {}
        Axis::Policies => {
            for n in 1..count {
                let text = policy(&format!("bench-{n:04}"), &[&elsewhere(n)], &egress);
                manifests.write(&format!("policy-{n:04}"), &text)?;
            }
        }
        Axis::Cidrs => {
            let nets: Vec<String> = (1..count).map(elsewhere).collect();
            for (n, nets) in nets.chunks(CIDRS_OF_A_POLICY).enumerate() {
                let nets: Vec<&str> = nets.iter().map(String::as_str).collect();
                manifests.write(&format!("policy-{n:04}"), &policy(&format!("bench-{n:04}"), &nets, &egress))?;
            }
            manifests.write("policy", &policy("bench", &[&near, "203.0.113.0/24", "::/0"], &egress))?;
        }
        Axis::Gateways => {
            let names: Vec<(u8, String)> = (1..=count as u8).map(|n| (EGRESS + n - 1, format!("gw{n}"))).collect();
            let egress: Vec<(u8, &str)> = names.iter().map(|(host, name)| (*host, name.as_str())).collect();
            manifests.write("policy", &policy("bench", &["0.0.0.0/0", "::/0"], &egress))?;
        }
    }
    in_force(place, axis, count)
}

/// Waits until the pod's node has programmed everything.
fn in_force(place: &BenchLab, axis: Axis, count: u32) -> Result<()> {
    let maps = place.lab.pins(&place.pod.node).join("maps");
    let (map, entries) = match axis {
        Axis::Flows => return Ok(()),
        Axis::Policies => ("POLICIES", count),
        Axis::Cidrs => ("ROUTES_V4", count),
        Axis::Gateways => ("MEMBERS", 2 * count),
    };
    let what = format!("{map} has {entries} entries");
    let map = maps.join(map);
    wait_until(&what, patience(&place.lab), || lab::bpf::map_entries(&map), |found| *found >= entries as usize)?;
    if axis == Axis::Gateways {
        // Flows use all gateways, each of which must know its leases.
        let all = || Ok(place.sources(FAMILY, 16 * count as usize)?.len());
        wait_until("connections leave through every gateway", patience(&place.lab), all, |seen| {
            *seen == count as usize
        })?;
    }
    Ok(())
}

fn flows(
    base: &BenchLab,
    place: &BenchLab,
    binaries: &Path,
    count: u32,
    rounds: usize,
    windows: &Windows,
) -> Result<Point> {
    let plain = BenchLab::open(Variant::Plain, binaries, "", 1)?;
    let sockets = (count as usize).div_ceil(usize::from(TARGETS));
    let one = |place: &BenchLab| Blaster::open(&place.pod.ns, 1, &[targets(FAMILY)[0]], 64);
    let many = |place: &BenchLab| Blaster::open(&place.pod.ns, sockets, &targets(FAMILY), 64);
    let few = |place: &BenchLab| Blaster::open(&place.pod.ns, 1, &[targets(FAMILY)[0]; 64], 64);
    let (mut all, mut all_plain) = (many(place)?, many(&plain)?);
    let (mut single, mut single_base) = (one(place)?, one(base)?);
    let (mut few_base, mut few_plain) = (few(base)?, few(&plain)?);
    all.run_once(&place.sink)?;
    let live = lab::bpf::map_entries(&place.lab.pins(&place.pod.node).join("maps/FLOWS_V4"))?;
    ensure!(live >= all.flows() * 99 / 100, "only {live} of {} flows are in the table", all.flows());
    let mut rates = Rates::default();
    for _ in 0..rounds {
        let blast = |blaster: &mut Blaster, place: &BenchLab| {
            Ok::<_, anyhow::Error>(blaster.run(&place.sink, windows.warm_up, windows.window)?.per_second())
        };
        rates.add(Series::AllFlows, blast(&mut all, place)?, blast(&mut few_base, base)?);
        rates.add(Series::PlainFlows, blast(&mut all_plain, &plain)?, blast(&mut few_plain, &plain)?);
        rates.add(Series::OneFlow, blast(&mut single, place)?, blast(&mut single_base, base)?);
        rates.connections(Series::Connections, place, base, windows)?;
    }
    Ok(rates.point(Axis::Flows, count))
}

fn others(
    base: &BenchLab,
    place: &BenchLab,
    binaries: &Path,
    axis: Axis,
    count: u32,
    rounds: usize,
    windows: &Windows,
) -> Result<Point> {
    let mut pairs = vec![Pair::open(place, base, [Series::AllFlows, Series::Connections])?];
    let plain;
    if let Axis::Gateways = axis {
        let routed = |gateways| BenchLab::open(Variant::Plain, binaries, "", gateways);
        plain = (routed(u8::try_from(count)?)?, routed(1)?);
        pairs.push(Pair::open(&plain.0, &plain.1, [Series::PlainFlows, Series::PlainConnections])?);
    }
    let mut rates = Rates::default();
    for _ in 0..rounds {
        for pair in &mut pairs {
            pair.measure(&mut rates, windows)?;
        }
    }
    Ok(rates.point(axis, count))
}

/// Two labs to compare, with loads of many flows.
struct Pair<'a> {
    places: [&'a BenchLab; 2],
    blasters: [Blaster; 2],
    series: [Series; 2],
}

impl<'a> Pair<'a> {
    fn open(place: &'a BenchLab, base: &'a BenchLab, series: [Series; 2]) -> Result<Self> {
        let open = |place: &BenchLab| Blaster::open(&place.pod.ns, SOCKETS, &targets(FAMILY), 64);
        Ok(Pair { places: [place, base], blasters: [open(place)?, open(base)?], series })
    }

    fn measure(&mut self, rates: &mut Rates, windows: &Windows) -> Result<()> {
        let Pair { places: [place, base], blasters: [here, there], series: [packets, connections] } = self;
        let ours = here.run(&place.sink, windows.warm_up, windows.window)?.per_second();
        let theirs = there.run(&base.sink, windows.warm_up, windows.window)?.per_second();
        rates.add(*packets, ours, theirs);
        rates.connections(*connections, place, base, windows)
    }
}

/// The ratios of each series, round by round.
#[derive(Default)]
struct Rates(BTreeMap<Series, Vec<f64>>);

impl Rates {
    fn add(&mut self, series: Series, ours: f64, theirs: f64) {
        self.0.entry(series).or_default().push(ours / theirs.max(1.0));
    }

    fn connections(&mut self, series: Series, place: &BenchLab, base: &BenchLab, windows: &Windows) -> Result<()> {
        let ours = load::connect(place, FAMILY, windows)?.0;
        let theirs = load::connect(base, FAMILY, windows)?.0;
        self.add(series, ours, theirs);
        Ok(())
    }

    fn point(self, axis: Axis, count: u32) -> Point {
        Point { axis, count, relative: Figure::new(axis.title(), &thousands(count), self.0) }
    }
}
