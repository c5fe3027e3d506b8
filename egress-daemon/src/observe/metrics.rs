//! Metrics, read on request: counters and memory from the pinned maps, the rest from the published state of the agent and
//! the controller. Also their server, with `/healthz` and `/readyz`.
//!
//! The cost of a scrape does not depend on the number of flows.

use super::{
    admin::Published,
    family::{Family, Labels, counter, gauge, histogram, truth},
    http,
    state::{BlockCounts, ProbeResult},
    traffic,
};
use crate::{
    controller::ControllerReport,
    ctl::inventory,
    flowlog::{Counts, export::Sent},
    store::{WriteCounts, WriteResult},
};
use axum::{
    Router, body::Bytes, extract::State, http::StatusCode, http::header::CONTENT_TYPE, response::IntoResponse,
    routing::get,
};
use egress_common::{limits::MAX_ACCOUNTS, port_block};
use egress_core::agent::takeovers;
use egress_node::{
    datapath::{Pins, maps::Maps},
    host::firewall,
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, text},
    registry::Registry,
};
use std::{
    collections::BTreeMap,
    fmt, io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use thiserror::Error;
use tokio::{
    net::TcpListener,
    sync::{Mutex, watch},
    task::JoinSet,
};

/// The number of policies whose pods the controller counts separately, as many as an agent has accounts. Other policies share one count.
const MAX_POLICIES: usize = MAX_ACCOUNTS;

/// The sources of metrics and readiness. A process has only the sources of its own roles.
#[derive(Clone, Debug, Default)]
pub struct MetricSources {
    /// The agent's pins.
    pub pins: Option<Pins>,
    /// The agent's published state.
    pub agent: Option<Published>,
    /// The controller's report.
    pub controller: Option<watch::Receiver<ControllerReport>>,
    /// The counts of the lease log and the flow log.
    pub log: Option<[Arc<Counts>; 2]>,
    /// The exporters' counts of records and of segments.
    pub exported: [Vec<Arc<Sent>>; 2],
    /// The store's counts of writes.
    pub writes: Option<Arc<WriteCounts>>,
}

/// Returns the metrics of the maps. If the maps cannot be read, `spillway_maps_readable` is 0 and their counters are missing.
fn of_maps(pins: &Pins, flows: &BTreeMap<u32, u64>) -> Vec<Family> {
    let maps = Maps::open(pins);
    let accounts = maps.as_ref().map_or_else(|_| Vec::new(), |maps| traffic::read(maps).unwrap_or_default());
    let counters = maps.and_then(|maps| maps.counters());
    let mut families = vec![gauge(
        "spillway_maps_readable",
        "whether the pinned maps can be read",
        vec![(Labels::new(), truth(counters.is_ok()))],
    )];
    let mut dropped = Vec::new();
    for (counter_, value) in counters.unwrap_or_default() {
        match counter_.name().strip_prefix("drop_") {
            Some(reason) => dropped.push((vec![("reason", reason.to_owned())], value)),
            None => {
                let name = format!("spillway_{}", counter_.name());
                families.push(counter(name, counter_.help(), vec![(Labels::new(), value)]));
            }
        }
    }
    for rule in firewall::dropped() {
        let reason = rule.name.trim_start_matches("drop_");
        dropped.push((vec![("reason", reason.to_owned())], rule.packets));
    }
    families.push(counter("spillway_dropped_packets", "packets that were dropped, by reason", dropped));
    let maps = inventory::pinned_maps(pins.root());
    let by_map = |value: fn(&inventory::Map) -> Option<u64>| {
        let one = |map: &inventory::Map| Some((vec![("map", map.name.clone())], value(map)? as f64));
        maps.iter().filter_map(one).collect()
    };
    let memory = by_map(|map| map.memory_bytes);
    families.push(gauge(
        "spillway_map_memory_bytes",
        "current memory of a map; it grows with the number of entries",
        memory,
    ));
    let capacity = by_map(|map| Some(map.capacity.into()));
    families.push(gauge("spillway_map_capacity_entries", "maximum number of entries of a map", capacity));
    families.extend(traffic::families(&accounts, flows));
    families
}

/// Returns the metrics of the agent's published state.
fn of_agent(published: &Published) -> Vec<Family> {
    let state = published.borrow().clone();
    let by_gateway = |value: &dyn Fn(&super::state::GatewayState) -> Option<f64>| {
        let one =
            |gateway: &super::state::GatewayState| Some((vec![("gateway", gateway.name.clone())], value(gateway)?));
        state.gateways.iter().filter_map(one).collect()
    };
    let up = by_gateway(&|gateway| match gateway.probe {
        ProbeResult::Unknown => None,
        probe => Some(truth(probe == ProbeResult::Alive)),
    });
    let rtt = by_gateway(&|gateway| gateway.rtt_micros.map(|micros| micros as f64 / 1e6));
    let owned = state.egress_ips.iter().filter(|e| e.owner.as_deref() == Some(&state.node.name)).count();
    let plain = |value: f64| vec![(Labels::new(), value)];
    let ports = state.ports_used.iter().map(|(ip, used)| (traffic::of_egress_ip(ip), f64::from(*used)));
    let shares = state.ports_used.iter().map(|(ip, used)| {
        (traffic::of_egress_ip(ip), f64::from(*used) / f64::from(port_block::COUNT * port_block::SIZE))
    });
    let by_block = |value: fn(&BlockCounts) -> Option<usize>| {
        let one = |(ip, b): (&IpAddr, &BlockCounts)| Some((traffic::of_egress_ip(ip), value(b)? as f64));
        state.blocks.iter().filter_map(one).collect()
    };
    let mut families = vec![
        gauge(
            "spillway_egress_ip_ports_used",
            "ports of an egress IP that this node uses towards the busiest destination; all nodes together have 64512",
            ports.collect(),
        ),
        gauge("spillway_egress_ip_ports_used_ratio", "the same divided by 64512", shares.collect()),
        gauge(
            "spillway_egress_ip_blocks",
            "port blocks leased to this node, by egress IP",
            by_block(|b| Some(b.leased)),
        ),
        gauge(
            "spillway_egress_ip_blocks_used",
            "port blocks leased to this node that have a port in use, by egress IP",
            by_block(|b| Some(b.used)),
        ),
        gauge(
            "spillway_egress_ip_blocks_free",
            "port blocks of an egress IP that are leased to no node; the owner reports it",
            by_block(|b| b.free),
        ),
        gauge(
            "spillway_accounts_missing",
            "policies and namespaces, by egress IP, that are counted as _other because there are too many",
            plain(state.without_account as f64),
        ),
        gauge("spillway_gateway_up", "whether a gateway answers probes through the tunnel", up),
        gauge("spillway_gateway_rtt_seconds", "the last round trip of a probe through the tunnel", rtt),
        gauge("spillway_egress_ips", "egress IPs that this node uses or owns", plain(state.egress_ips.len() as f64)),
        gauge("spillway_egress_ips_owned", "egress IPs that this node owns", plain(owned as f64)),
        gauge("spillway_policies", "policies that this node knows", plain(state.policies.len() as f64)),
        gauge(
            "spillway_problems",
            "problems that the agent reports (egressctl state)",
            plain(state.problems.len() as f64),
        ),
        gauge(
            "spillway_unnamed_networks",
            "networks that may contain pods or Services but that no object names: no policy applies to them (egressctl state)",
            plain(state.unnamed_networks.len() as f64),
        ),
        gauge("spillway_store_connected", "whether the store answers", plain(truth(state.node.store_connected))),
        gauge(
            "spillway_uptime_seconds",
            "how long the agent has been running",
            plain(state.node.uptime_seconds as f64),
        ),
    ];
    let bounds = takeovers::BOUNDS_MS.iter().map(|ms| *ms as f64 / 1e3).chain([f64::INFINITY]);
    families.push(histogram(
        "spillway_takeover_duration_seconds",
        "how long no gateway answered for an egress IP that this node took over from a dead gateway",
        bounds.zip(state.takeovers.counts.iter().copied().chain(std::iter::repeat(0))).collect(),
        state.takeovers.sum_millis as f64 / 1e3,
    ));
    if let Some(held) = state.node.lease_held {
        let help = "whether this gateway holds its lease";
        families.push(gauge("spillway_lease_held", help, plain(truth(held))));
    }
    families
}

/// Returns the metrics of the controller's report.
fn of_controller(report: &ControllerReport) -> Vec<Family> {
    let plain = |value: f64| vec![(Labels::new(), value)];
    let partial = vec![(Labels::new(), report.partial)];
    let all = || report.endpoints.iter().map(|(policy, count)| (policy.to_string(), f64::from(*count)));
    let others = all().skip(MAX_POLICIES).map(|(_, count)| count).reduce(|sum, count| sum + count);
    let each = all().take(MAX_POLICIES).chain(others.map(|sum| (traffic::OTHERS.to_owned(), sum)));
    let endpoints = each.map(|(policy, count)| (vec![("policy", policy)], count)).collect();
    vec![
        gauge("spillway_controller_leader", "whether this controller leads", plain(truth(report.epoch.is_some()))),
        counter("spillway_controller_rounds", "rounds of planning", vec![(Labels::new(), report.rounds)]),
        counter("spillway_controller_partial_rounds", "rounds that processed only a few changes", partial),
        counter("spillway_controller_writes", "objects written", vec![(Labels::new(), report.writes)]),
        gauge(
            "spillway_controller_planning_seconds",
            "duration of the last planning",
            plain(report.planning.as_secs_f64()),
        ),
        gauge("spillway_controller_failing", "whether the last round failed", plain(truth(report.error.is_some()))),
        gauge(
            "spillway_controller_statuses_failing",
            "objects with an outdated status, because the new one cannot be written; the controller's log has the reason",
            plain(report.unwritten as f64),
        ),
        gauge("spillway_policy_endpoints", "pods that a policy selects; the leading controller reports it", endpoints),
    ]
}

/// Returns the metrics of the lease and flow logs.
fn of_logs([leases, flows]: &[Arc<Counts>; 2]) -> Vec<Family> {
    let both = |leases: &AtomicU64, flows: &AtomicU64| {
        let value = |log: &str, value: &AtomicU64| (vec![("log", log.to_owned())], value.load(Ordering::Relaxed));
        vec![value("leases", leases), value("flows", flows)]
    };
    let lost = "events that are missing in a log, because they came too fast or could not be written";
    vec![
        counter("spillway_log_records_written", "events in a log", both(&leases.written, &flows.written)),
        counter("spillway_log_records_lost", lost, both(&leases.lost, &flows.lost)),
    ]
}

/// Returns the metrics of the logs' exporters.
fn of_exports([records, segments]: &[Vec<Arc<Sent>>; 2]) -> Vec<Family> {
    let each = |counts: &[Arc<Sent>], value: fn(&Sent) -> &AtomicU64| -> Vec<(Labels, u64)> {
        let one = |sent: &Arc<Sent>| (vec![("collector", sent.collector.clone())], value(sent).load(Ordering::Relaxed));
        counts.iter().map(one).collect()
    };
    let lost = "events that were not sent to a collector, because it was unreachable or too slow";
    vec![
        counter(
            "spillway_log_export_records_sent",
            "events that were sent to a collector",
            each(records, |sent| &sent.sent),
        ),
        counter("spillway_log_export_records_lost", lost, each(records, |sent| &sent.lost)),
        counter(
            "spillway_log_export_segments_sent",
            "segments that an object store has accepted",
            each(segments, |sent| &sent.sent),
        ),
        counter(
            "spillway_log_export_segments_lost",
            "segments that were removed before an object store accepted them",
            each(segments, |sent| &sent.lost),
        ),
    ]
}

/// Returns the metrics of the store.
fn of_store(counts: &WriteCounts) -> Family {
    let labels = |(kind, verb, result): (&'static str, &'static str, WriteResult)| -> Labels {
        vec![("kind", kind.into()), ("verb", verb.into()), ("result", result.name().into())]
    };
    let writes = counts.all().into_iter().map(|(write, count)| (labels(write), count)).collect();
    let help = "writes of objects to the API server, or to the directory, by kind, verb and result";
    counter("spillway_store_writes", help, writes)
}

impl MetricSources {
    fn families(&self) -> Vec<Family> {
        let version = vec![(vec![("version", env!("CARGO_PKG_VERSION").to_owned())], 1.0)];
        let mut families = vec![gauge("spillway_build_info", "the running version, as a label", version)];
        let flows = self.agent.as_ref().map(|agent| agent.borrow().account_flows.clone()).unwrap_or_default();
        families.extend(self.pins.iter().flat_map(|pins| of_maps(pins, &flows)));
        families.extend(self.agent.iter().flat_map(of_agent));
        families.extend(self.controller.iter().flat_map(|report| of_controller(&report.borrow())));
        families.extend(self.log.iter().flat_map(of_logs));
        families.extend(of_exports(&self.exported));
        families.extend(self.writes.iter().map(|counts| of_store(counts)));
        families
    }

    /// Returns why the process is not ready, or `None` if it is.
    fn unready(&self) -> Option<String> {
        if let Some(published) = &self.agent {
            let state = published.borrow().clone();
            if state.node.name.is_empty() {
                return Some("the agent has not written its tables yet".into());
            }
            if let Some(c) = state.conditions.iter().find(|c| c.kind == "Ready" && c.status != "True") {
                return Some(format!("{}: {}", c.reason, c.message));
            }
        }
        let error = self.controller.as_ref().and_then(|report| report.borrow().error.clone());
        error.map(|error| format!("the controller's last round failed: {error}"))
    }
}

impl Collector for MetricSources {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        self.families().into_iter().try_for_each(|family| family.encode(&mut encoder))
    }
}

/// Why metrics cannot be served.
#[derive(Debug, Error)]
#[error("metrics cannot be served on {address}: {source}; name a free address with --metrics")]
pub struct ServeError {
    address: SocketAddr,
    source: io::Error,
}

/// The server of metrics, which serves until it is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    /// The address on which it listens, with the actual port even if port 0 was requested.
    pub address: SocketAddr,
    _task: JoinSet<()>,
}

impl MetricsServer {
    /// Starts to serve `/metrics`, `/healthz` (the process answers), `/readyz` (503 and the reason until it is ready) and the routes that
    /// `others` makes from the actual port.
    pub async fn start(
        address: SocketAddr,
        sources: MetricSources,
        others: impl FnOnce(u16) -> Router,
    ) -> Result<Self, ServeError> {
        let failed = |source| ServeError { address, source };
        let listener = match TcpListener::bind(address).await {
            Err(error) if is_without_ipv6(address, &error) => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
            }
            other => other,
        };
        let listener = listener.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let mut registry = Registry::default();
        registry.register_collector(Box::new(sources.clone()));
        let routes = Router::new()
            .route("/metrics", get(metrics))
            .with_state(Arc::new(Exposition { registry, ..Exposition::default() }))
            .route("/healthz", get(async || "ok\n"))
            .merge(Router::new().route("/readyz", get(ready)).with_state(sources))
            .merge(others(address.port()));
        let mut task = JoinSet::new();
        task.spawn(http::serve(listener, routes));
        tracing::info!("metrics are served on http://{address}/metrics");
        Ok(Self { address, _task: task })
    }
}

/// Returns whether `[::]`, which stands for all addresses of both families, cannot be listened on because IPv6 is disabled.
fn is_without_ipv6(address: SocketAddr, error: &io::Error) -> bool {
    let disabled = matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL));
    address.is_ipv6() && address.ip().is_unspecified() && disabled
}

/// All metrics. Each encoding reads the agent's tables, so only one runs at a time, for all clients whose requests came before it began.
#[derive(Debug, Default)]
struct Exposition {
    registry: Registry,
    /// The number of encodings that have begun.
    begun: AtomicU64,
    /// The result of the last encoding; `None` if it failed.
    last: Arc<Mutex<Option<Bytes>>>,
}

async fn metrics(State(exposition): State<Arc<Exposition>>) -> axum::response::Response {
    let before = exposition.begun.load(Ordering::Relaxed);
    let mut last = Arc::clone(&exposition.last).lock_owned().await;
    let body = if exposition.begun.load(Ordering::Relaxed) == before {
        let encode = move || {
            // If the client leaves, the encoding continues and keeps the lock.
            exposition.begun.fetch_add(1, Ordering::Relaxed);
            *last = None;
            let mut body = String::new();
            *last = text::encode(&mut body, &exposition.registry).ok().map(|()| body.into());
            last.clone()
        };
        tokio::task::spawn_blocking(encode).await.ok().flatten()
    } else {
        last.clone()
    };
    match body {
        Some(body) => {
            ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], body).into_response()
        }
        None => (StatusCode::INTERNAL_SERVER_ERROR, "the metrics cannot be encoded\n").into_response(),
    }
}

async fn ready(State(sources): State<MetricSources>) -> (StatusCode, String) {
    match sources.unready() {
        None => (StatusCode::OK, "ok\n".into()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
