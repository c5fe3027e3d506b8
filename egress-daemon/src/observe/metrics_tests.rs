//! Tests of the metrics.

use super::*;
use crate::{
    host::testing::in_netns,
    observe::state::{AgentState, ConditionState, EgressIpState, GatewayState, NodeState},
};
use egress_common::verdict::Counter;
use std::{path::Path, time::Duration};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[test]
fn every_drop_reason_is_explained_to_whoever_meets_it() {
    let page = include_str!("../../../docs/troubleshooting.md");
    let reasons = Counter::ALL.iter().map(|counter| counter.name()).filter(|name| name.starts_with("drop_"));
    for reason in reasons {
        assert!(page.contains(&format!("\n| `{reason}` |")), "docs/troubleshooting.md has no row for {reason}");
    }
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
        concat!("spillway_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1.0"),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert!(!text.contains("gw4"), "nothing is known of it yet");
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
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

#[test]
fn maps_that_cannot_be_read_are_told() {
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
    let server = MetricsServer::start("127.0.0.1:0".parse().unwrap(), sources.clone()).await.unwrap();
    assert!(get(server.address, "/healthz").await.starts_with("HTTP/1.0 200"));
    assert!(get(server.address, "/readyz").await.starts_with("HTTP/1.0 503"));
    publish.send(Arc::new(agent())).unwrap();
    assert!(get(server.address, "/readyz").await.starts_with("HTTP/1.0 200"));
    let metrics = get(server.address, "/metrics").await;
    assert!(metrics.contains("openmetrics-text") && metrics.contains("spillway_egress_ips_owned 1.0\n"), "{metrics}");
    let error = MetricsServer::start(server.address, sources).await.unwrap_err().to_string();
    assert!(error.contains(&server.address.to_string()) && error.contains("--metrics"), "{error}");
}
