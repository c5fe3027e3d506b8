//! Short connections that a pod keeps opening, with their start times. They show when new connections had trouble, and
//! from which address they left.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use lab::traffic::{ConnectionReport, ConnectionState, TcpClients, TcpOptions, TcpServer};
use lab::{NetNs, wait_until};

use super::table::{Table, bar};

/// The time between two connections.
const INTERVAL: Duration = Duration::from_millis(10);
/// TCP retransmits a lost SYN after a second. If connecting took less than this, the SYN was not lost.
const REPEATED: Duration = Duration::from_millis(700);
/// The time within which the first bytes of the last connections must be answered.
const ECHO: Duration = Duration::from_millis(500);
/// The time within which the server must know an open connection.
const KNOWN: Duration = Duration::from_secs(20);
/// The time after which a connection counts as failed.
const GIVE_UP: Duration = Duration::from_secs(8);

/// Opens one connection and waits until the server knows it. Returns the connection and its source as the server sees it.
pub fn seen(
    ns: &NetNs,
    target: SocketAddr,
    options: TcpOptions,
    server: &TcpServer,
) -> Result<(TcpClients, SocketAddr)> {
    let clients = TcpClients::establish(ns, target, 1, options)?;
    let id = clients.connections().first().context("a connection")?.id;
    let source = || Ok(server.source_of_flow().get(&id).copied());
    let source = wait_until("the server knows the flow", KNOWN, source, Option::is_some)?;
    Ok((clients, source.context("a source")?))
}

/// A pod that opens connections.
pub struct Trickle {
    clients: Arc<TcpClients>,
    stop: Arc<AtomicBool>,
    opener: Option<JoinHandle<Vec<Instant>>>,
}

/// One connection of a trickle.
#[derive(Clone, Debug, PartialEq)]
pub struct Flow {
    /// Its start time.
    pub started: Instant,
    /// Its outcome.
    pub outcome: Outcome,
    /// Its source address at the server, if it arrived there.
    pub source: Option<IpAddr>,
}

/// The outcome of opening a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Established immediately.
    Opened,
    /// Established after TCP retransmitted its first packet.
    Waited(Duration),
    /// Not established, or dead before its first bytes were answered.
    Failed,
}

impl Trickle {
    /// Starts opening connections from `ns` to `target`, a hundred per second. They stay open until the end.
    pub fn start(ns: &NetNs, target: SocketAddr) -> Result<Trickle> {
        let options = TcpOptions { connect_timeout: GIVE_UP, ..TcpOptions::once() };
        let clients = Arc::new(TcpClients::open(ns, target, 0, options)?);
        let stop = Arc::new(AtomicBool::new(false));
        let (for_thread, stopped) = (Arc::clone(&clients), Arc::clone(&stop));
        let opener = thread::Builder::new().name("trickle".to_owned()).spawn(move || {
            let mut started = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                started.push(Instant::now());
                for_thread.open_more(1);
                thread::sleep(INTERVAL);
            }
            started
        })?;
        Ok(Trickle { clients, stop, opener: Some(opener) })
    }

    /// Returns the number of established connections.
    pub fn opened(&self) -> usize {
        self.clients.connections().iter().filter(|one| one.state == ConnectionState::Open).count()
    }

    /// Stops opening connections, waits until all outcomes are known, and returns the connections in the order of their
    /// start, with their sources at `server`. They are closed when the trickle is dropped.
    pub fn finish(&mut self, server: &TcpServer) -> Result<Vec<Flow>> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(opener) = self.opener.take() else { return Ok(Vec::new()) };
        let started = opener.join().map_err(|_| anyhow!("a trickle panicked"))?;
        let decided = |all: &[ConnectionReport]| {
            all.len() == started.len() && all.iter().all(|one| one.state != ConnectionState::Connecting)
        };
        self.clients.wait("all connections are open or have failed", GIVE_UP * 2, decided)?;
        let echoed =
            |all: &[ConnectionReport]| all.iter().all(|one| one.state != ConnectionState::Open || one.received > 0);
        // A connection whose echo never comes has failed.
        self.clients.wait("all echoes", ECHO, echoed).ok();
        let all = self.clients.connections();
        let sources = server.source_of_flow();
        let source = |id: u64| sources.get(&id).map(SocketAddr::ip);
        let flow = |(started, one): (Instant, &ConnectionReport)| Flow {
            started,
            outcome: outcome(one),
            source: source(one.id),
        };
        Ok(started.iter().copied().zip(&all).map(flow).collect())
    }
}

impl Drop for Trickle {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn outcome(report: &ConnectionReport) -> Outcome {
    match report.state {
        ConnectionState::Failed(_) | ConnectionState::Connecting => Outcome::Failed,
        _ if report.received == 0 => Outcome::Failed,
        ConnectionState::Open | ConnectionState::Closed if report.connect_time >= REPEATED => {
            Outcome::Waited(report.connect_time)
        }
        ConnectionState::Open | ConnectionState::Closed => Outcome::Opened,
    }
}

/// Counts connections by outcome: opened immediately, waited, failed.
pub fn counts(flows: &[Flow]) -> (usize, usize, usize) {
    let count = |wanted: fn(&Outcome) -> bool| flows.iter().filter(|flow| wanted(&flow.outcome)).count();
    (
        count(|one| matches!(one, Outcome::Opened)),
        count(|one| matches!(one, Outcome::Waited(_))),
        count(|one| matches!(one, Outcome::Failed)),
    )
}

/// Returns the time from `event` to the start of the last connection that did not open immediately; `None` if all did.
fn trouble_after(flows: &[Flow], event: Instant) -> Option<Duration> {
    let troubled = flows.iter().filter(|flow| flow.outcome != Outcome::Opened && flow.started >= event);
    troubled.map(|flow| flow.started - event).max()
}

/// Returns the time from `event` to the start of the last connection that left with one of the `old` addresses, or did
/// not open immediately.
pub fn last_with(flows: &[Flow], event: Instant, old: &[IpAddr]) -> Option<Duration> {
    let with_old = flows
        .iter()
        .filter(|flow| flow.outcome != Outcome::Opened || flow.source.is_some_and(|source| old.contains(&source)));
    with_old.filter(|flow| flow.started >= event).map(|flow| flow.started - event).max()
}

/// Returns the outcomes of new connections in steps of half a second, from half a second before `event` until all have
/// gone well for a second.
pub fn timeline(flows: &[Flow], event: Instant) -> Table {
    const STEP: f64 = 0.5;
    let mut steps: BTreeMap<i64, Vec<&Flow>> = BTreeMap::new();
    for flow in flows {
        let since = flow.started.saturating_duration_since(event).as_secs_f64()
            - event.saturating_duration_since(flow.started).as_secs_f64();
        steps.entry((since / STEP).floor() as i64).or_default().push(flow);
    }
    let calm = trouble_after(flows, event).map_or(0, |time| (time.as_secs_f64() / STEP) as i64) + 2;
    let mut table = Table::new(&["seconds", ">new", ">at once", ">waited", ">failed", ""]);
    for (step, flows) in steps.into_iter().filter(|(step, _)| (-1..=calm).contains(step)) {
        let flows: Vec<Flow> = flows.into_iter().cloned().collect();
        let (opened, waited, failed) = counts(&flows);
        let from = step as f64 * STEP;
        table.row([
            format!("{from:+.1} to {:+.1}", from + STEP),
            flows.len().to_string(),
            opened.to_string(),
            waited.to_string(),
            failed.to_string(),
            format!(
                "{}{}",
                bar(opened, flows.len(), 30),
                "░".repeat(30 - bar(opened, flows.len(), 30).chars().count())
            ),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(started: Instant, outcome: Outcome, source: u8) -> Flow {
        Flow { started, outcome, source: Some([192, 0, 2, source].into()) }
    }

    #[test]
    fn trouble_lasts_until_the_start_of_the_last_affected_connection() {
        let event = Instant::now() + Duration::from_secs(10);
        let at = |milliseconds| event + Duration::from_millis(milliseconds);
        let flows = [
            flow(event - Duration::from_millis(100), Outcome::Failed, 10),
            flow(at(100), Outcome::Waited(Duration::from_secs(1)), 10),
            flow(at(300), Outcome::Failed, 11),
            flow(at(700), Outcome::Opened, 11),
            flow(at(900), Outcome::Opened, 12),
        ];
        assert_eq!(counts(&flows), (2, 1, 2));
        assert_eq!(trouble_after(&flows, event), Some(Duration::from_millis(300)));
        assert_eq!(trouble_after(&flows[3..], event), None);
        assert_eq!(last_with(&flows, event, &[[192, 0, 2, 11].into()]), Some(Duration::from_millis(700)));
        assert_eq!(last_with(&flows, event, &[[192, 0, 2, 13].into()]), Some(Duration::from_millis(300)));
        assert_eq!(last_with(&flows[3..], event, &[[192, 0, 2, 13].into()]), None);
        let lines = timeline(&flows, event).lines();
        let starts: Vec<_> = lines[2..].iter().map(|line| line.split("  ").next().unwrap().to_owned()).collect();
        assert_eq!(starts, ["-0.5 to +0.0", "+0.0 to +0.5", "+0.5 to +1.0"]);
        assert!(lines[3].contains(&"░".repeat(30)) && lines[4].contains(&"█".repeat(30)), "{lines:?}");
    }
}
