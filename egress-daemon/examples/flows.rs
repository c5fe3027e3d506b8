//! Measures the flow log. Writes a week of one busy node's flows as its agent would, and prints their size and the
//! time to find the flows of one port.
//!
//!     cargo run --release -p egress-daemon --example flows -- FLOWS DIRECTORY [destinations]
//!
//! The node has 110 pods of 20 policies, and a few pods open most flows. It has four egress IPs with 32 port blocks each.
//! Two of five flows are DNS queries. Most other flows are connections of less than a second; some last minutes.
//! Destinations are a few thousand servers, of which the first receive most flows.

use anyhow::{Context as _, bail};
use egress_core::leaselog::LeaseQuestion;
use egress_daemon::flowlog::{
    Limits, Log,
    flows::{Entry, Line, Wanted, answer, read},
};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

/// The period in which all flows begin, in seconds.
const WEEK: i64 = 7 * 24 * 3600;
const SECOND: i64 = 1_000_000;
/// The time at which the first flow begins, in microseconds.
const EPOCH: i64 = 1_760_000_000 * SECOND;
/// The journal's limits, as in an agent.
const JOURNAL_LINES: usize = 300_000;
const JOURNAL_AGE: i64 = 3600 * SECOND;
/// A tick, the programs' unit of time, is 2^`TICK_SHIFT` nanoseconds.
const TICK_SHIFT: u32 = 30;
const PODS: u32 = 110;
const POLICIES: u32 = 20;
const SERVERS: u32 = 4_000;
const PORTS: u64 = 32 * 64;
/// The number of ports to look up.
const QUESTIONS: usize = 50;
const SLACK: i64 = 2 * SECOND;

/// Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) as u128 * u128::from(n)) >> 64) as u64
    }

    fn unit(&mut self) -> f64 {
        self.below(1 << 53) as f64 / (1u64 << 53) as f64
    }

    /// Returns an index below `n`; its probability is proportional to 1/rank.
    fn rank(&mut self, n: u32) -> u32 {
        ((f64::from(n) + 1.0).powf(self.unit()) - 1.0) as u32
    }
}

/// Rounds a time down to its tick.
fn tick(time: i64) -> i64 {
    let number = (((time as i128) * 1000) >> TICK_SHIFT) as i64;
    ((number as i128) * (1 << TICK_SHIFT) / 1000) as i64
}

struct Traffic {
    random: Random,
    destinations: bool,
}

impl Traffic {
    /// Returns a flow that begins at `time`, and the time of its last packet.
    fn flow(&mut self, time: i64) -> (Entry, i64) {
        let random = &mut self.random;
        let pod = random.rank(PODS);
        let question = random.below(5) < 2;
        let server = if question { random.rank(3) } else { 10 + random.rank(SERVERS) };
        let port = if question { 53 } else { [443, 443, 443, 443, 80, 5432, 9092][random.below(7) as usize] };
        let address = Ipv4Addr::from(0xcb00_7100 + server.wrapping_mul(0x0101_0007) % 0x0800_0000);
        let lasts = match (question, random.below(10)) {
            (true, _) => random.unit() * 0.1,
            (_, 0..7) => random.unit() * 0.8,
            (_, 7..9) => -random.unit().max(1e-9).ln() * 15.0,
            _ => -random.unit().max(1e-9).ln() * 300.0,
        };
        let destination = SocketAddr::new(address.into(), port);
        let entry = Entry {
            egress_ip: IpAddr::from([192, 0, 2, 10 + (pod % 4) as u8]),
            port: 20_032 + random.below(PORTS) as u16,
            protocol: if question { 17 } else { 6 },
            ticket: random.below(1 << 32) as u32,
            began: tick(time),
            pod: 1 + pod,
            policy: 1 + PODS + pod % POLICIES,
            destination: self.destinations.then_some(destination),
        };
        (entry, tick(time + (lasts * SECOND as f64) as i64))
    }
}

fn names() -> Vec<Line> {
    let pod = |n| format!("team-{}/service-{:02}-7c9f8d6b5-{:05x}", n % 12, n / 3, n * 7919);
    let pods = (0..PODS).map(|n| Line::Name(1 + n, pod(n)));
    pods.chain((0..POLICIES).map(|n| Line::Name(1 + PODS + n, format!("egress-policy-{n}")))).collect()
}

/// Writes all flows. Returns a sample of them with the times of their last packets.
fn write(limits: &Limits, count: u64, destinations: bool) -> anyhow::Result<Vec<(Entry, i64)>> {
    let mut traffic = Traffic { random: Random(1), destinations };
    let mut log: Log<Line> = Log::open(limits.clone(), EPOCH)?;
    log.append(&[&[Line::Started(EPOCH, "worker-17".into())][..], &names()].concat())?;
    let mut open: std::collections::BTreeMap<(i64, u64), Entry> = Default::default();
    let (mut asked, mut lines, mut written) = (Vec::new(), Vec::new(), EPOCH);
    for number in 0..count {
        let time = EPOCH + (i128::from(number) * i128::from(WEEK * SECOND) / i128::from(count)) as i64;
        while let Some(((end, _), _)) = open.first_key_value().filter(|((end, _), _)| *end < time) {
            let end = *end;
            let Some((_, entry)) = open.pop_first() else { break };
            lines.push(Line::Ended(entry, end));
        }
        if time - written >= SECOND {
            lines.push(Line::Alive(time, 0));
            log.append(&lines)?;
            lines.clear();
            written = time;
            let (records, began) = log.journal();
            if records >= JOURNAL_LINES || time - began >= JOURNAL_AGE {
                log.rotate(time)?;
                log.append(&[&[Line::Continued(time, "worker-17".into())][..], &names()].concat())?;
                log.tidy(time)?;
            }
        }
        let (entry, end) = traffic.flow(time);
        if number % (count / QUESTIONS as u64).max(2) == 1 && time > EPOCH + 10 * SECOND {
            asked.push((entry, end));
        }
        lines.push(Line::Began(entry));
        open.insert((end, number), entry);
    }
    lines.push(Line::Alive(EPOCH + WEEK * SECOND, 0));
    log.append(&lines)?;
    Ok(asked)
}

/// Returns the total size in bytes and the number of finished files.
fn size(directory: &Path) -> anyhow::Result<(u64, usize)> {
    let mut sizes = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "parquet") {
            sizes.push(path.metadata()?.len());
        }
    }
    Ok((sizes.iter().sum(), sizes.len()))
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (count, directory, destinations) = match &arguments[..] {
        [count, directory] => (count, directory, false),
        [count, directory, word] if word == "destinations" => (count, directory, true),
        _ => bail!("usage: flows FLOWS DIRECTORY [destinations]"),
    };
    let count: u64 = count.parse().with_context(|| format!("{count} is not a number"))?;
    let limits = Limits { directory: directory.into(), retention: Duration::MAX, bytes: u64::MAX };
    let start = Instant::now();
    let asked = write(&limits, count, destinations)?;
    let writing = start.elapsed();
    let (bytes, files) = size(&limits.directory)?;
    println!(
        "{count} flows: {bytes} bytes in {files} files, {:.2} bytes a flow; {:.0} flows written a second",
        bytes as f64 / count as f64,
        count as f64 / writing.as_secs_f64()
    );
    let mut times = Vec::new();
    for (entry, end) in &asked {
        let (from, until) = (entry.began, entry.began);
        let wanted = Wanted { egress_ip: entry.egress_ip, port: entry.port, from: from - SLACK, until: until + SLACK };
        let start = Instant::now();
        let found = read(&limits.directory, &wanted)?;
        let question = LeaseQuestion { egress_ip: entry.egress_ip, port: entry.port, from, until, slack: SLACK };
        let (likely, doubts) = answer(found, question, false);
        times.push(start.elapsed());
        let it = likely.iter().any(|likely| likely.flow.began == entry.began && likely.flow.ended == Some(*end));
        if !it || !doubts.is_empty() {
            bail!("{entry:?} until {end}: found {likely:?}, {doubts:?}");
        }
    }
    times.sort();
    let millis = |time: Option<&Duration>| time.map_or(0.0, |time| time.as_secs_f64() * 1e3);
    println!(
        "{} ports found: median {:.1} ms, maximum {:.1} ms",
        times.len(),
        millis(times.get(times.len() / 2)),
        millis(times.last())
    );
    Ok(())
}
