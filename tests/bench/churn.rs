//! The load of crawlers and resolvers, for minutes: new connections to many servers, each used once, and single-packet queries.
//!
//! It does not measure speed, but whether packets are refused and how much memory is used: with Spillway's default
//! settings, and with the stock kernel's default table of connections.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lab::Family;
use lab::traffic::{AnswerServer, ConnectRate, LoadServer, Queries, ServerAnswer, on_cpu};

use super::figures::{Column, Figure};
use super::flows::{map_memory, tracked};
use super::variant::{BenchLab, CPU, Variant};
use xtask::progress::Step;

/// The number of servers that the pod connects to.
const SERVERS: u16 = 25_000;
const CONNECT_PORT: u16 = 9006;
const QUERY_PORT: u16 = 9007;
const CONNECTIONS: ConnectRate = ConnectRate {
    per_second: 5_000,
    concurrency: 20_000,
    total: u64::MAX,
    timeout: Duration::from_secs(1),
    hold: Duration::ZERO,
    reset: false,
};
const QUERIES: Queries = Queries { per_second: 20_000, sockets: 64 };
/// The maps in which a node keeps flows, whose memory includes preallocated entries.
const FLOW_MAPS: [&str; 5] = ["FLOWS", "REVERSE", "TICKETS", "ENDED", "INBOUND"];
const VARIANTS: [Variant; 2] = [Variant::Stock, Variant::Direct];

/// The results of one variant.
struct Churned {
    opened: f64,
    not_opened: f64,
    asked: f64,
    unanswered: f64,
    refused: f64,
    /// The peak in bytes.
    memory: f64,
}

/// Runs both loads for `window` each with all variants, sequentially, each in its own lab.
pub fn measure(binaries: &Path, window: Duration) -> Result<Vec<Figure>> {
    let mut all = Vec::new();
    for variant in VARIANTS {
        let place = BenchLab::open(variant, binaries, "", 1)?;
        let step = Step::start(&format!("churn, {}", variant.title()));
        all.push((variant, churn(&place, window)?));
        step.end("✓", "");
    }
    type Of = fn(&Churned) -> f64;
    let figures: [(&str, &str, Of); 6] = [
        ("TCP connections opened", "1/s", |c| c.opened),
        ("TCP connections not opened", "connections", |c| c.not_opened),
        ("UDP queries sent", "1/s", |c| c.asked),
        ("UDP queries not answered", "queries", |c| c.unanswered),
        ("packets refused for lack of room", "packets", |c| c.refused),
        ("peak memory of flows", "MiB", |c| c.memory / f64::from(1 << 20)),
    ];
    let figure = |(name, unit, of): (&str, &str, Of)| {
        Figure::single(name, unit, all.iter().map(|(variant, churned)| (*variant, of(churned))))
    };
    Ok(figures.into_iter().map(figure).collect())
}

fn churn(place: &BenchLab, window: Duration) -> Result<Churned> {
    let server = &place.server;
    let crowd = place.lab.crowd(server, SERVERS)?;
    let at = |port: u16| -> Vec<SocketAddr> { crowd.iter().map(|one| one.at(Family::V4, port)).collect() };
    let any = |port| SocketAddr::new([0u16; 8].into(), port);
    let _connections = LoadServer::start(&server.ns, &[any(CONNECT_PORT)], ServerAnswer::Hold)?;
    let _answers = AnswerServer::start(&server.ns, QUERY_PORT)?;
    let before = refused(place)?;
    let mut memory = 0f64;
    let mut look = || -> Result<()> {
        memory = memory.max(held(place)?);
        Ok(())
    };
    let (opened, asked) = on_cpu(CPU, || {
        let running = CONNECTIONS.start_all(&place.pod.ns, at(CONNECT_PORT))?;
        let began = Instant::now();
        while began.elapsed() < window {
            std::thread::sleep(Duration::from_secs(1).min(window));
            look()?;
        }
        let opened = running.finish()?;
        Ok((opened, QUERIES.run(&place.pod.ns, &at(QUERY_PORT), window, look)?))
    })?;
    Ok(Churned {
        opened: opened.per_second(),
        not_opened: opened.failures() as f64,
        asked: asked.sent as f64 / window.as_secs_f64(),
        unanswered: (asked.sent - asked.answered) as f64,
        refused: refused(place)? - before,
        memory,
    })
}

/// Returns the packets refused for lack of room on all nodes: in Spillway's shares, ports and tables, or the kernel's connection table.
fn refused(place: &BenchLab) -> Result<f64> {
    let mut sum = 0.0;
    for node in place.lab.nodes() {
        sum += match place.variant {
            Variant::Plain => 0.0,
            Variant::Stock => not_tracked(&node.ns.sh("cat /proc/net/stat/nf_conntrack")?)?,
            _ => {
                let names = ["drop_pod_share", "drop_port_share", "drop_no_port", "drop_table_full"];
                let counters = place.lab.counters(&node.name)?;
                names.iter().filter_map(|name| Some(*counters.get(*name)? as f64)).sum()
            }
        };
    }
    Ok(sum)
}

/// Sums the packets that the kernel did not track for lack of room, and the connections that it dropped early to make
/// room. The text has hexadecimal columns by name, with one line per processor.
fn not_tracked(text: &str) -> Result<f64> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().context("no statistics of tracked connections")?.split_whitespace().collect();
    let mut sum = 0;
    for line in lines {
        for (name, value) in names.iter().zip(line.split_whitespace()) {
            if ["drop", "early_drop"].contains(name) {
                sum += u64::from_str_radix(value, 16).context("a count that is not hexadecimal")?;
            }
        }
    }
    Ok(sum as f64)
}

/// Returns the bytes that flows occupy on all nodes.
fn held(place: &BenchLab) -> Result<f64> {
    match place.variant {
        Variant::Plain => Ok(0.0),
        Variant::Stock => tracked(place),
        _ => map_memory(place, Family::V4, &FLOW_MAPS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untracked_packets_are_summed_over_processors() {
        let text = "entries  drop early_drop other\n000000ff 0000000a 00000001 00000007\n000000ff 00000001 00000000 00000007\n";
        assert_eq!(not_tracked(text).expect("statistics"), 12.0);
    }
}
