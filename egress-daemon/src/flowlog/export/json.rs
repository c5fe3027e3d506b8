//! Records as lines of JSON, with the names of a segment's columns. Pure.

use super::{Change, Fate, Flow, Ports, Record};
use crate::flowlog::{Instant, pod_parts};
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use std::net::IpAddr;

#[derive(Debug, Default, Serialize)]
struct Line<'a> {
    time: String,
    event: &'static str,
    node: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    egress_ip: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    egress_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    began: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    destination_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<u64>,
}

/// Formats microseconds since 1970 according to RFC 3339, in UTC.
fn time(at: Instant) -> String {
    Timestamp::from_microsecond(at).map_or_else(|_| at.to_string(), |time| format!("{time:.6}"))
}

impl<'a> Line<'a> {
    fn of(record: &'a Record, node: &'a str) -> Self {
        match record {
            Record::Flow(flow) => Self::of_flow(flow, node),
            Record::Ports(ports) => Self::of_ports(ports, node),
        }
    }

    fn of_flow(flow: &'a Flow, node: &'a str) -> Self {
        let (event, ended) = match flow.fate {
            Fate::Began => ("flow_began", false),
            Fate::Ended(_) => ("flow_ended", true),
            Fate::Refused(_) => ("flow_refused", true),
        };
        let (namespace, pod) = pod_parts(&flow.pod);
        Self {
            time: time(flow.at()),
            event,
            node,
            egress_ip: Some(flow.egress_ip),
            egress_port: Some(flow.port),
            protocol: Some(flow.protocol),
            began: ended.then(|| time(flow.began)),
            namespace,
            pod: Some(pod),
            policy: flow.policy.as_deref(),
            source: Some(flow.source.ip()),
            source_port: Some(flow.source.port()),
            destination: flow.destination.map(|to| to.ip()),
            destination_port: flow.destination.map(|to| to.port()),
            ..Self::default()
        }
    }

    fn of_ports(ports: &Ports, node: &'a str) -> Self {
        let event = match ports.change {
            Change::Held => "ports_held",
            Change::Granted => "ports_granted",
            Change::Returned => "ports_returned",
        };
        Self {
            time: time(ports.at),
            event,
            node,
            egress_ip: Some(ports.lease.egress_ip),
            first_port: Some(ports.lease.first_port),
            last_port: Some(ports.lease.last_port),
            ..Self::default()
        }
    }
}

/// Encodes lines to send. If records were lost before them, the first line has their number.
pub(super) fn encode(records: &[Record], node: &str, lost: u64, now: Instant) -> Vec<u8> {
    let first = Line { time: time(now), event: "lost", node, lost: Some(lost), ..Line::default() };
    let lines = (lost > 0).then_some(first).into_iter().chain(records.iter().map(|record| Line::of(record, node)));
    let mut text = Vec::with_capacity(records.len() * 320);
    for line in lines {
        // Every value of a line can be serialised, and writing to memory does not fail.
        if serde_json::to_writer(&mut text, &line).is_ok() {
            text.push(b'\n');
        }
    }
    text
}
