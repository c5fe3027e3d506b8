//! Opens and closes TCP connections as fast as possible, or at a given rate.

use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::wire::{reset_on_close, start_connect};
use crate::background::{Background, Stop};
use crate::netns::NetNs;
use crate::stats::Percentiles;

/// A generator of connections, which it opens, counts and closes.
#[derive(Clone, Debug)]
pub struct ConnectRate {
    /// Connections per second; 0 means as many as possible. Default 0.
    pub per_second: u32,
    /// The number of connections that may be in progress concurrently. Default 64.
    pub concurrency: usize,
    /// The number of connections after which it ends. Default: never.
    pub total: u64,
    /// The time after which a connection that is not established counts as failed. Default 1 s.
    pub timeout: Duration,
    /// How long an established connection stays open. Default: it is closed immediately.
    pub hold: Duration,
    /// Whether to close with RST instead of FIN. Default true.
    pub reset: bool,
}

impl Default for ConnectRate {
    fn default() -> ConnectRate {
        ConnectRate {
            per_second: 0,
            concurrency: 64,
            total: u64::MAX,
            timeout: Duration::from_secs(1),
            hold: Duration::ZERO,
            reset: true,
        }
    }
}

/// The results of a generator.
#[derive(Clone, Debug, Default)]
pub struct RateReport {
    /// Connections that were established.
    pub opened: u64,
    /// Connections that failed, by the system's error message.
    pub failed: BTreeMap<String, u64>,
    /// The duration of its run.
    pub elapsed: Duration,
    /// The longest time in which no connection was established.
    pub longest_gap: Duration,
    /// The times that connections took to be established, for up to a million connections.
    pub latencies: Vec<Duration>,
}

const LATENCIES_KEPT: usize = 1_000_000;
/// The interval at which connections are checked for taking too long.
const LOOK_EVERY: Duration = Duration::from_millis(20);

impl RateReport {
    /// Returns connections per second.
    pub fn per_second(&self) -> f64 {
        self.opened as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Returns the number of failed connections.
    pub fn failures(&self) -> u64 {
        self.failed.values().sum()
    }

    /// Returns the distribution of the time that connections took to be established.
    pub fn latency(&self) -> Percentiles {
        Percentiles::of(self.latencies.iter().map(Duration::as_secs_f64))
    }
}

/// A running generator.
#[derive(Debug)]
pub struct RunningRate {
    thread: Background<RateReport>,
}

impl RunningRate {
    /// Ends it and the connections that it holds, and returns its results.
    pub fn finish(self) -> Result<RateReport> {
        self.thread.finish()
    }

    /// Waits until it has made and closed its `total`, and returns its results.
    pub fn wait(self) -> Result<RateReport> {
        self.thread.wait()
    }
}

impl ConnectRate {
    /// Starts opening connections from `ns` to `target`.
    pub fn start(&self, ns: &NetNs, target: SocketAddr) -> Result<RunningRate> {
        self.start_all(ns, vec![target])
    }

    /// Starts opening connections from `ns` to the `targets`, cycling through them.
    pub fn start_all(&self, ns: &NetNs, targets: Vec<SocketAddr>) -> Result<RunningRate> {
        let options = self.clone();
        let thread = Background::start(ns, "connect-rate", move |stop| generate(&targets, &options, stop))?;
        Ok(RunningRate { thread })
    }
}

/// Returns the number of SYNs and SYN-ACKs that the kernel has retransmitted in a namespace because they were not answered in time.
pub fn syns_retransmitted(ns: &NetNs) -> Result<u64> {
    let text = ns.sh("cat /proc/net/netstat")?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, values) = lines.next().zip(lines.next()).context("no statistics of TCP")?;
    let mut pairs = names.split(' ').zip(values.split(' '));
    let (_, value) = pairs.find(|(name, _)| *name == "TCPSynRetrans").context("no count of retransmitted SYNs")?;
    value.parse().with_context(|| format!("repeated SYNs: {value}"))
}

fn generate(targets: &[SocketAddr], options: &ConnectRate, stop: &Stop) -> Result<RateReport> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let mut slots: Vec<Option<(TcpStream, Instant)>> = (0..options.concurrency).map(|_| None).collect();
    let mut free: Vec<usize> = (0..options.concurrency).collect();
    let mut events = vec![EpollEvent::empty(); options.concurrency.max(1)];
    let mut held: VecDeque<(Instant, TcpStream)> = VecDeque::new();
    let mut report = RateReport::default();
    let (start, mut started) = (Instant::now(), 0u64);
    let (mut last_opened, mut next_look) = (start, start + LOOK_EVERY);
    while !stop.requested() && (started < options.total || free.len() < slots.len() || !held.is_empty()) {
        while held.pop_front_if(|(until, _)| *until <= Instant::now()).is_some() {}
        let due = match options.per_second {
            0 => u64::MAX,
            rate => (start.elapsed().as_secs_f64() * f64::from(rate)) as u64 + 1,
        };
        while started < due.min(options.total) {
            let Some(slot) = free.pop() else { break };
            let target = targets[started as usize % targets.len()];
            started += 1;
            match start_connect(target, 0) {
                Ok(stream) => {
                    if options.reset {
                        reset_on_close(&stream)?;
                    }
                    epoll.add(&stream, EpollEvent::new(EpollFlags::EPOLLOUT, slot as u64))?;
                    slots[slot] = Some((stream, Instant::now()));
                }
                Err(error) => {
                    *report.failed.entry(error.to_string()).or_default() += 1;
                    free.push(slot);
                }
            }
        }
        let ready = match epoll.wait(&mut events, EpollTimeout::from(1u8)) {
            Ok(ready) => ready,
            Err(nix::errno::Errno::EINTR) => 0,
            Err(error) => return Err(error).context("epoll"),
        };
        for event in &events[..ready] {
            let slot = event.data() as usize;
            let Some((stream, since)) = slots[slot].take() else { continue };
            free.push(slot);
            match stream.take_error() {
                Ok(None) => {
                    report.opened += 1;
                    report.longest_gap = report.longest_gap.max(last_opened.elapsed());
                    last_opened = Instant::now();
                    if report.latencies.len() < LATENCIES_KEPT {
                        report.latencies.push(since.elapsed());
                    }
                    if !options.hold.is_zero() {
                        epoll.delete(&stream).context("epoll")?;
                        held.push_back((Instant::now() + options.hold, stream));
                    }
                }
                Ok(Some(error)) | Err(error) => *report.failed.entry(error.to_string()).or_default() += 1,
            }
        }
        if Instant::now() < next_look {
            continue;
        }
        next_look += LOOK_EVERY;
        for (index, slot) in slots.iter_mut().enumerate() {
            if slot.as_ref().is_some_and(|(_, since)| since.elapsed() > options.timeout) {
                *slot = None;
                free.push(index);
                *report.failed.entry("not established in time".to_owned()).or_default() += 1;
            }
        }
    }
    report.longest_gap = report.longest_gap.max(last_opened.elapsed());
    report.elapsed = start.elapsed();
    Ok(report)
}
