//! Tests of the metrics.

use super::*;
use crate::observe::state::{AgentState, ConditionState, EgressIpState, GatewayState, NodeState, TakeOverLengths};
use egress_common::verdict::Counter;
use egress_core::model::{PolicyId, PolicyKind};
use egress_node::{
    datapath::testing::rig::{Rig, scene},
    host::testing::in_netns,
};
use std::{
    collections::BTreeSet,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
    sync::mpsc,
    time::Duration,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[test]
fn every_drop_reason_is_documented_in_troubleshooting() {
    let page = include_str!("../../../docs/troubleshooting.md");
    let reasons = Counter::ALL.iter().map(|counter| counter.name()).filter(|name| name.starts_with("drop_"));
    for reason in reasons {
        assert!(page.contains(&format!("\n| `{reason}` |")), "docs/troubleshooting.md has no row for {reason}");
    }
}

#[test]
fn all_addresses_are_those_of_ipv4_where_ipv6_is_disabled() {
    let refused = |address: &str, code| is_without_ipv6(address.parse().unwrap(), &io::Error::from_raw_os_error(code));
    assert!(refused("[::]:9473", libc::EAFNOSUPPORT) && refused("[::]:9473", libc::EADDRNOTAVAIL));
    assert!(!refused("[::]:9473", libc::EADDRINUSE), "another process has the port");
    assert!(!refused("[2001:db8::1]:9473", libc::EADDRNOTAVAIL), "a node without its address");
}

fn agent() -> AgentState {
    let gateway = |name: &str, probe, rtt_micros| GatewayState {
        name: name.into(),
        probe,
        rtt_micros,
        ..GatewayState::default()
    };
    let egress = |address: &str, owner: &str| EgressIpState {
        address: address.parse().unwrap(),
        pool: None,
        owner: Some(owner.into()),
        preferred: None,
        epoch: 1,
        fixed: false,
        conditions: vec![],
    };
    AgentState {
        node: NodeState { name: "gw1".into(), lease_held: Some(true), store_connected: true, ..NodeState::default() },
        gateways: vec![
            gateway("gw\"2", ProbeResult::Alive, Some(1_500)),
            gateway("gw3", ProbeResult::Dead, None),
            gateway("gw4", ProbeResult::Unknown, None),
        ],
        egress_ips: vec![egress("192.0.2.10", "gw1"), egress("192.0.2.11", "gw3")],
        ports_used: [("192.0.2.10".parse().unwrap(), 51_610)].into(),
        blocks: [
            ("192.0.2.10".parse().unwrap(), BlockCounts { leased: 900, used: 807, free: Some(8) }),
            ("192.0.2.11".parse().unwrap(), BlockCounts { leased: 4, used: 0, free: None }),
        ]
        .into(),
        takeovers: TakeOverLengths { counts: vec![0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1], sum_millis: 20_500 },
        ..AgentState::default()
    }
}

fn text_of(sources: &MetricSources) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(sources.clone()));
    let mut text = String::new();
    super::text::encode(&mut text, &registry).unwrap();
    text
}

#[test]
fn drops_by_nftables_rules_become_metrics() {
    in_netns("drops_by_nftables_rules_become_metrics", async || {
        let script = "add table inet spillway; add counter inet spillway held { packets 5 bytes 300 }";
        assert!(std::process::Command::new("nft").arg(script).status().unwrap().success());
        let text =
            text_of(&MetricSources { pins: Some(Pins::new(Path::new("/nonexistent"))), ..MetricSources::default() });
        for line in [
            "spillway_dropped_packets_total{reason=\"not_seen\"} 5",
            "spillway_dropped_packets_total{reason=\"astray\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    });
}

#[test]
fn the_agents_state_becomes_metrics() {
    let (_publish, published) = watch::channel(Arc::new(agent()));
    let text = text_of(&MetricSources { agent: Some(published), ..MetricSources::default() });
    for line in [
        "# TYPE spillway_gateway_up gauge",
        "spillway_gateway_up{gateway=\"gw\\\"2\"} 1.0",
        "spillway_gateway_up{gateway=\"gw3\"} 0.0",
        "spillway_gateway_rtt_seconds{gateway=\"gw\\\"2\"} 0.0015",
        "spillway_egress_ips 2.0",
        "spillway_egress_ips_owned 1.0",
        "spillway_lease_held 1.0",
        "spillway_egress_ip_ports_used{egress_ip=\"192.0.2.10\"} 51610.0",
        "spillway_egress_ip_ports_used_ratio{egress_ip=\"192.0.2.10\"} 0.8000062003968254",
        "spillway_egress_ip_blocks{egress_ip=\"192.0.2.11\"} 4.0",
        "spillway_egress_ip_blocks_used{egress_ip=\"192.0.2.10\"} 807.0",
        "spillway_egress_ip_blocks_free{egress_ip=\"192.0.2.10\"} 8.0",
        "# TYPE spillway_takeover_duration_seconds histogram",
        "spillway_takeover_duration_seconds_bucket{le=\"0.2\"} 0",
        "spillway_takeover_duration_seconds_bucket{le=\"0.3\"} 2",
        "spillway_takeover_duration_seconds_bucket{le=\"15.0\"} 2",
        "spillway_takeover_duration_seconds_bucket{le=\"+Inf\"} 3",
        "spillway_takeover_duration_seconds_sum 20.5",
        concat!("spillway_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1.0"),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("gw4"), "nothing is known of it yet");
}

fn sent(collector: &str) -> Arc<Sent> {
    Arc::new(Sent { collector: collector.to_owned(), sent: AtomicU64::new(7), lost: AtomicU64::new(2) })
}

/// Returns the metrics of all sources together, for a node with programs and one flow.
fn everything(pins: &Pins) -> String {
    let (_publish, published) = watch::channel(Arc::new(agent()));
    let (_report, reports) = watch::channel(ControllerReport::default());
    let dir = tempfile::tempdir().unwrap();
    let store = crate::store::Files::open(dir.path()).unwrap();
    let object = egress_objects::api::EgressNode::new("n1", Default::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { (store.create(&object).await.unwrap(), store.create(&object).await.unwrap_err()) });
    text_of(&MetricSources {
        pins: Some(pins.clone()),
        agent: Some(published),
        controller: Some(reports),
        log: Some(Default::default()),
        exported: ["json://logs:5170", "s3://logs"].map(|name| vec![sent(name)]),
        writes: Some(store.counts()),
    })
}

#[test]
fn the_documented_metrics_are_served_and_promtool_accepts_them() {
    let Some(rig) = Rig::new("metrics", &scene()) else { return };
    let text = everything(rig.pins());
    let page = include_str!("../../../docs/metrics.md");
    let listed = |line: &str| Some(line.strip_prefix("| `spillway_")?.split('`').next()?.to_owned());
    let listed: BTreeSet<String> = page.lines().filter_map(listed).collect();
    let served = |line: &str| {
        let (name, kind) = line.strip_prefix("# TYPE spillway_")?.split_once(' ')?;
        Some(if kind == "counter" { format!("{name}_total") } else { name.to_owned() })
    };
    let programs = Counter::ALL.iter().map(|counter| format!("{}_total", counter.name())).collect();
    let served: BTreeSet<String> = text.lines().filter_map(served).collect();
    assert_eq!(&served - &programs, listed, "docs/metrics.md lists other metrics than are served");
    for line in [
        "spillway_store_writes_total{kind=\"EgressNode\",verb=\"create\",result=\"done\"} 1",
        "spillway_store_writes_total{kind=\"EgressNode\",verb=\"create\",result=\"conflict\"} 1",
        "spillway_log_export_records_lost_total{collector=\"json://logs:5170\"} 2",
        "spillway_log_export_segments_sent_total{collector=\"s3://logs\"} 7",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(text.lines().any(|l| l.starts_with("spillway_policy_bytes_total{policy=\"policy-0\",")), "{text}");
    judged_by_promtool(&text);
}

/// Runs `promtool check metrics`. It reads the older text format, in which a counter's name in `HELP` and `TYPE` has its suffix.
fn judged_by_promtool(text: &str) {
    let counters: BTreeSet<&str> =
        text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let older = |line: &str| match line.split(' ').nth(2) {
        Some(name) if line.starts_with("# ") && counters.contains(name) => {
            line.replacen(name, &format!("{name}_total"), 1)
        }
        _ => line.to_owned(),
    };
    let older: String = text.lines().filter(|line| *line != "# EOF").map(|line| older(line) + "\n").collect();
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut promtool) = promtool.spawn() else {
        return eprintln!("SKIP: promtool (Debian's package prometheus) is not in PATH");
    };
    promtool.stdin.take().unwrap().write_all(older.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_controllers_report_becomes_metrics() {
    let report = ControllerReport {
        epoch: Some(4),
        rounds: 7,
        partial: 3,
        writes: 9,
        planning: Duration::from_millis(2),
        error: None,
        unwritten: 2,
        endpoints: (0..MAX_POLICIES + 2)
            .map(|n| (PolicyId::new(PolicyKind::Namespaced, &format!("team/{n:05}")), 7))
            .collect(),
    };
    let (_report, reports) = watch::channel(report);
    let text = text_of(&MetricSources { controller: Some(reports), ..MetricSources::default() });
    for line in [
        "spillway_controller_leader 1.0",
        "# TYPE spillway_controller_rounds counter",
        "spillway_controller_rounds_total 7",
        "spillway_controller_writes_total 9",
        "spillway_controller_planning_seconds 0.002",
        "spillway_controller_failing 0.0",
        "spillway_controller_statuses_failing 2.0",
        "spillway_policy_endpoints{policy=\"ns/team/02047\"} 7.0",
        "spillway_policy_endpoints{policy=\"_other\"} 14.0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("ns/team/02048"), "{text}");
}

#[test]
fn unreadable_maps_are_reported() {
    let pins = Pins::new(Path::new("/nonexistent"));
    let text = text_of(&MetricSources { pins: Some(pins), ..MetricSources::default() });
    assert!(text.contains("spillway_maps_readable 0.0\n"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
}

#[test]
fn readiness_follows_the_agent_and_the_controller() {
    let (publish, published) = watch::channel(Arc::new(AgentState::default()));
    let (report, reports) = watch::channel(ControllerReport::default());
    let sources = MetricSources { agent: Some(published), controller: Some(reports), ..MetricSources::default() };
    assert!(sources.unready().unwrap().contains("not written"));
    publish.send(Arc::new(agent())).unwrap();
    assert_eq!(sources.unready(), None);
    let condition = ConditionState {
        kind: "Ready".into(),
        status: "False".into(),
        reason: "TablesFull".into(),
        message: "routes do not fit".into(),
    };
    publish.send(Arc::new(AgentState { conditions: vec![condition], ..agent() })).unwrap();
    assert_eq!(sources.unready().as_deref(), Some("TablesFull: routes do not fit"));
    publish.send(Arc::new(agent())).unwrap();
    report.send(ControllerReport { error: Some("disk full".into()), ..ControllerReport::default() }).unwrap();
    assert!(sources.unready().unwrap().contains("disk full"));
}

async fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn metrics_are_served_over_http() {
    let (publish, published) = watch::channel(Arc::new(AgentState::default()));
    let sources = MetricSources { agent: Some(published), ..MetricSources::default() };
    let server =
        MetricsServer::start("127.0.0.1:0".parse().unwrap(), sources.clone(), |_| Router::new()).await.unwrap();
    assert!(get(server.address, "/healthz").await.starts_with("HTTP/1.0 200"));
    assert!(get(server.address, "/readyz").await.starts_with("HTTP/1.0 503"));
    publish.send(Arc::new(agent())).unwrap();
    assert!(get(server.address, "/readyz").await.starts_with("HTTP/1.0 200"));
    let metrics = get(server.address, "/metrics").await;
    assert!(metrics.contains("openmetrics-text") && metrics.contains("spillway_egress_ips_owned 1.0\n"), "{metrics}");
    let error = MetricsServer::start(server.address, sources, |_| Router::new()).await.unwrap_err().to_string();
    assert!(error.contains(&server.address.to_string()) && error.contains("--metrics"), "{error}");
}

/// A collector of one metric, the number of the encoding. Each encoding lasts until the test ends it.
#[derive(Debug)]
struct Slow {
    begun: watch::Sender<u64>,
    end: std::sync::Mutex<mpsc::Receiver<()>>,
}

impl Collector for Slow {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        self.begun.send_modify(|begun| *begun += 1);
        let number = *self.begun.borrow() as f64;
        self.end.lock().unwrap().recv().unwrap_or_default();
        gauge("encoding", "its number", vec![(Labels::new(), number)]).encode(&mut encoder)
    }
}

#[tokio::test]
async fn one_encoding_serves_all_waiting_clients_even_if_some_leave() {
    let (begin, mut begun) = watch::channel(0);
    let (end, ends) = mpsc::channel();
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Slow { begun: begin, end: ends.into() }));
    let exposition = Arc::new(Exposition { registry, ..Exposition::default() });
    let ask = || Box::pin(metrics(State(Arc::clone(&exposition))));
    let mut first = ask();
    assert!(futures::poll!(&mut first).is_pending());
    begun.wait_for(|begun| *begun == 1).await.unwrap();
    let mut second = ask();
    let mut others: Vec<_> = (0..254).map(|_| ask()).collect();
    for client in [&mut second].into_iter().chain(&mut others) {
        assert!(futures::poll!(client).is_pending());
    }
    drop(first);
    end.send(()).unwrap();
    tokio::select! {
        _ = &mut second => panic!("the encoding for it has not ended"),
        result = begun.wait_for(|begun| *begun == 2) => assert!(result.is_ok()),
    }
    drop((second, end));
    for response in futures::future::join_all(others).await {
        let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
        assert!(String::from_utf8_lossy(&body).contains("\nencoding 2.0\n"), "{body:?}");
    }
    assert_eq!(*begun.borrow(), 2);
}
