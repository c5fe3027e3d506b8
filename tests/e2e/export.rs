//! The records that collectors receive about the users of ports.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use lab::nfdump::{self, Nfcapd};
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Family, Lab, NetNs, StartOptions, wait_until};
use serde_json::Value;

use crate::support::{CALM, PATIENCE, web_pod_with};

/// The address at which lines of JSON are received.
const LINES: &str = "127.0.0.1:5170";
const METRICS: &str = "127.0.0.1:9473";

/// Receives lines until the tests end.
fn take_lines(ns: &NetNs) -> Result<Arc<Mutex<Vec<Value>>>> {
    let listener = ns.run(|| Ok(TcpListener::bind(LINES)?))?;
    let lines = Arc::new(Mutex::new(Vec::new()));
    let taken = Arc::clone(&lines);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                let line = serde_json::from_str(&line).unwrap_or_else(|error| Value::from(format!("{error}: {line}")));
                taken.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        }
    });
    Ok(lines)
}

/// Returns whether a line of nfcapd's log sums up the records of one exporter.
fn is_sum(line: &str) -> bool {
    line.contains("Ident: ") && line.contains("Flows: ")
}

#[test]
fn collectors_of_ipfix_and_json_receive_the_user_of_each_port() {
    lab::require_root!();
    lab::require!(nfdump::obstacle().is_none(), "{}", nfdump::obstacle().unwrap_or_default());
    let export = format!("[\"ipfix://{}\", \"json://{LINES}\"]", Nfcapd::LISTENS);
    let config = format!("{CALM}metrics: {METRICS}\nflowLog: {{mode: Flows, destinations: true, export: {export}}}\n");
    Lab::builder().workers(1).run(|lab| {
        let worker = lab.node("worker1").ns.clone();
        let nfcapd = Nfcapd::start(lab, &worker)?;
        let lines = take_lines(&worker)?;
        let (pod, server) = web_pod_with(lab, &[10], &StartOptions::new().config(&config))?;
        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let mut clients = Vec::new();
        for family in Family::BOTH {
            clients.push(TcpClients::establish(&pod.ns, server.ips.at(family, 80), 1, TcpOptions::default())?);
        }
        let both = |flows: &BTreeMap<u64, SocketAddr>| flows.len() == 2;
        let flows = wait_until("the server sees both flows", PATIENCE, || Ok(streams.source_of_flow()), both)?;
        // The lines have everything that is known about a flow.
        let of_flow = |event: &str, seen: &SocketAddr| {
            let lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
            let is_it = |line: &&Value| line["event"] == event && line["egress_port"] == seen.port();
            lines.iter().find(is_it).cloned().unwrap_or_default()
        };
        for seen in flows.values() {
            wait_until("a beginning", PATIENCE, || Ok(of_flow("flow_began", seen)), Value::is_object)?;
        }
        drop(clients);
        // The flows of a removed pod end before their timeout.
        lab.remove_pod("default/web")?;

        for seen in flows.values() {
            let family = if seen.is_ipv4() { Family::V4 } else { Family::V6 };
            let target = server.ips.at(family, 80);
            for event in ["flow_began", "flow_ended"] {
                let line = wait_until(event, PATIENCE, || Ok(of_flow(event, seen)), Value::is_object)?;
                let text = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
                ensure!([text("namespace"), text("pod")] == ["default", "web"], "{line}");
                // The policy had no pod on this node any more when the flow ended.
                ensure!(event == "flow_ended" || text("policy") == "web", "{line}");
                ensure!(text("egress_ip") == seen.ip().to_string() && text("node") == "worker1", "{line}");
                ensure!(text("source") == pod.ips.ip(family).to_string(), "{line}");
                ensure!(text("destination") == target.ip().to_string() && line["destination_port"] == 80, "{line}");
            }
            let lines = lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let holds = |line: &&Value| {
                let number = |name: &str| line[name].as_u64().unwrap_or_default();
                ["ports_held", "ports_granted"].iter().any(|event| line["event"] == *event)
                    && line["egress_ip"] == seen.ip().to_string()
                    && (number("first_port")..=number("last_port")).contains(&u64::from(seen.port()))
            };
            ensure!(lines.iter().any(|line| holds(&line)), "no node was granted {seen}: {lines:?}");

            // nfdump prints the same; this version does not support translated IPv6 addresses.
            let (began, ended) = if family == Family::V4 { ("4", "5") } else { ("1", "2") };
            let port = seen.port().to_string();
            let record = |records: &[Value], event: &str| {
                let is_it = |record: &&Value| record["nat_event_id"] == event && record["src_xlt_port"] == port;
                records.iter().find(is_it).cloned()
            };
            let both = |records: &Vec<Value>| record(records, began).is_some() && record(records, ended).is_some();
            let records = wait_until("nfdump prints both", PATIENCE, || nfcapd.records(), both)?;
            for event in [began, ended] {
                let record = record(&records, event).context("no record")?;
                let address = |of: &str| record[format!("{of}{}_addr", if seen.is_ipv4() { 4 } else { 6 })].clone();
                ensure!(address("src") == pod.ips.ip(family).to_string(), "{record}");
                ensure!(address("dst") == target.ip().to_string() && record["dst_port"] == 80, "{record}");
                ensure!(family == Family::V6 || record["src4_xlt_ip"] == seen.ip().to_string(), "{record}");
            }
            let is_block = |record: &&Value| record["nat_event_id"] == "16" && record["src4_xlt_ip"] == "192.0.2.10";
            ensure!(records.iter().any(|record| is_block(&record)), "no port block: {records:?}");
        }
        // nfcapd sums up each file in its log once it is finished.
        let log = wait_until("a sum", PATIENCE, || Ok(nfcapd.log()), |log| log.lines().any(is_sum))?;
        ensure!(
            log.lines().filter(|line| is_sum(line)).all(|sum| sum.contains("Sequence Errors: 0, Bad Packets: 0")),
            "{log}"
        );
        let metrics = worker.sh(&format!("curl -sS http://{METRICS}/metrics | grep log_export_records"))?;
        for collector in [format!("ipfix://{}", Nfcapd::LISTENS), format!("json://{LINES}")] {
            let value = |name: &str| {
                let start = format!("spillway_log_export_records_{name}_total{{collector=\"{collector}\"}} ");
                metrics.lines().find_map(|line| line.strip_prefix(&start)?.parse::<u64>().ok())
            };
            ensure!(value("sent").is_some_and(|sent| sent > 4) && value("lost") == Some(0), "{metrics}");
        }
        Ok(())
    });
}
