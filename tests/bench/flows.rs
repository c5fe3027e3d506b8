//! The one-time costs of a flow: the extra time of its first packet, and the memory that it occupies.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::Family;
use lab::stats::Percentiles;
use lab::traffic::Blaster;

use super::routes::{TARGETS, targets};
use super::variant::{BenchLab, Variant};

/// The number of sockets in one measurement, each with a flow to every target.
const SOCKETS: usize = 64;
const TURNS: usize = 7;

/// Returns the CPU time in microseconds that a flow's first packet takes beyond a later one.
pub fn set_up_time(place: &BenchLab, family: Family) -> Result<f64> {
    let turn = |_| {
        let mut blaster = Blaster::open(&place.pod.ns, SOCKETS, &targets(family), 64)?;
        let first = blaster.run_once(&place.sink)?;
        ensure!(first.received > 0, "no first packet has arrived");
        // The second run still does the set-up that the first packets on each CPU have left undone.
        blaster.run_once(&place.sink)?;
        let later = blaster.run(&place.sink, Duration::ZERO, Duration::from_millis(100))?;
        Ok((first.cpu_per_packet() - later.cpu_per_packet()).max(0.0) * 1e6)
    };
    Ok(Percentiles::of((0..TURNS).map(turn).collect::<Result<Vec<_>>>()?).p50)
}

/// Returns the bytes that a flow occupies on all nodes together: entries of maps, or of the kernel's connection
/// tracking (without its extensions).
pub fn memory(place: &BenchLab, family: Family) -> Result<Option<f64>> {
    let flows = (SOCKETS * usize::from(TARGETS)) as f64;
    let mut blaster = Blaster::open(&place.pod.ns, SOCKETS, &targets(family), 64)?;
    let before = held(place, family)?;
    blaster.run_once(&place.sink)?;
    let after = held(place, family)?;
    Ok(before.zip(after).map(|(before, after)| (after - before).max(0.0) / flows))
}

fn held(place: &BenchLab, family: Family) -> Result<Option<f64>> {
    match place.variant {
        Variant::Plain => Ok(None),
        Variant::Stock => tracked(place).map(Some),
        _ => map_memory(place, family, &["FLOWS", "REVERSE"]).map(Some),
    }
}

/// Returns the bytes of a family's maps on the pod's node.
pub fn map_memory(place: &BenchLab, family: Family, names: &[&str]) -> Result<f64> {
    let digit = if family == Family::V4 { 4 } else { 6 };
    let maps = place.lab.pins(&place.pod.node).join("maps");
    let of = |name: &&str| lab::bpf::map_bytes(&maps.join(format!("{name}_V{digit}")));
    Ok(names.iter().map(of).sum::<Result<u64>>()? as f64)
}

/// Returns the bytes of the connections that the kernel tracks on all nodes.
pub fn tracked(place: &BenchLab) -> Result<f64> {
    let slabs = fs::read_to_string("/proc/slabinfo").context("cannot read /proc/slabinfo")?;
    let line = slabs.lines().find(|line| line.starts_with("nf_conntrack ")).context("no slab of connections")?;
    let size: f64 = line.split_whitespace().nth(3).context("no size of a connection")?.parse()?;
    let mut count = 0.0;
    for node in place.lab.nodes() {
        count += node.ns.sh("cat /proc/sys/net/netfilter/nf_conntrack_count")?.trim().parse::<f64>()?;
    }
    Ok(count * size)
}
