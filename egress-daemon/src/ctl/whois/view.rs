//! The answer, how sure it is, and why not surer. Pure.

use super::time::text;
use super::{Living, Moment, SLACK, is_sure, seen_as};
use crate::ctl::print::Printable;
use crate::ctl::views::{FlowRow, row};
use egress_core::leaselog::{Doubt, LeaseAnswer};
use serde::Serialize;
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// A node that held the port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRow {
    /// The node.
    pub node: String,
    /// The first of the ports that it got together; null where only a flow shows that it has it.
    pub first_port: Option<u16>,
    /// The last of them.
    pub last_port: Option<u16>,
    /// When it got them; null: not known.
    pub from: Option<String>,
    /// When they were taken from it; null: not known, or not yet.
    pub until: Option<String>,
}

/// Who it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WhoisView {
    /// The egress IP and the port.
    pub seen: String,
    /// The earliest time that is meant.
    pub from: String,
    /// The latest.
    pub until: String,
    /// The nodes that may have been it.
    pub nodes: Vec<NodeRow>,
    /// The flows that may have been it, with pod and policy.
    pub flows: Vec<FlowRow>,
    /// Whether the node is certain, or it is certain that no node had the port.
    pub node_certain: bool,
    /// Whether the pod is certain.
    pub pod_certain: bool,
    /// Why it is not more certain, a sentence each.
    pub doubts: Vec<String>,
}

/// Puts together what leases and living flows say. Without leases there is no log.
pub(super) fn whois(
    seen: SocketAddr,
    at: Moment,
    to: Option<SocketAddr>,
    leases: Option<LeaseAnswer>,
    living: Option<&Living<'_>>,
) -> WhoisView {
    let mut doubts: Vec<String> = leases.iter().flat_map(|answer| &answer.doubts).map(doubt).collect();
    if leases.is_none() {
        doubts.push("there is no log of leases here: ask on a gateway, which has one".into());
    }
    let mut node_certain = leases.as_ref().is_some_and(is_sure);
    let mut nodes: Vec<NodeRow> = leases.into_iter().flat_map(|answer| answer.holders).map(NodeRow::of).collect();
    let flows = living.map(|living| seen_as(living, seen, to, at)).unwrap_or_default();
    let rows: Vec<FlowRow> =
        living.iter().flat_map(|living| flows.iter().map(|(flow, _)| row(living.dump, flow))).collect();
    let own = living.and_then(|living| living.dump.own_name());
    // What lives now and began long before has held its port all the time.
    let steady = flows.iter().filter(|(_, began)| *began + SLACK <= at.from).count();
    if let (Some(own), true) = (&own, steady > 0) {
        node_certain = true;
        doubts.clear();
        nodes.retain(|row| row.node == *own);
        if nodes.is_empty() {
            let (first_port, last_port, from, until) = (None, None, None, None);
            nodes.push(NodeRow { node: own.clone(), first_port, last_port, from, until });
        }
    }
    let pods: BTreeSet<(Option<&str>, _)> = rows.iter().map(|row| (row.pod.as_deref(), row.pod_address)).collect();
    let pod_certain = pods.len() == 1 && steady > 0 && to.is_some();
    doubts.extend(about_pod(pods.len(), steady, to.is_some(), own.as_deref(), &nodes));
    let (from, until) = (text(at.from), text(at.until));
    WhoisView { seen: seen.to_string(), from, until, nodes, flows: rows, node_certain, pod_certain, doubts }
}

impl NodeRow {
    fn of(holder: egress_core::leaselog::LeaseHolder) -> Self {
        Self {
            node: holder.node.to_string(),
            first_port: Some(holder.first_port),
            last_port: Some(holder.last_port),
            from: holder.from.map(text),
            until: holder.until.map(text),
        }
    }
}

fn doubt(doubt: &Doubt) -> String {
    match doubt {
        Doubt::Changed(at) => {
            format!("the lease changed at {}: the clocks of nodes may differ by two seconds", text(*at))
        }
        Doubt::Unwritten(None, Some(until)) => format!("the log begins at {}", text(*until)),
        Doubt::Unwritten(Some(from), None) => format!("the log ends at {}", text(*from)),
        Doubt::Unwritten(Some(from), Some(until)) => {
            format!("nobody wrote from {} to {}: ask on another gateway", text(*from), text(*until))
        }
        Doubt::Unwritten(None, None) => "the log is empty".into(),
        Doubt::Lost(count, at) => format!("{count} events before {} were not written", text(*at)),
    }
}

/// Why the pod is not certain.
fn about_pod(pods: usize, steady: usize, named: bool, own: Option<&str>, nodes: &[NodeRow]) -> Option<String> {
    let elsewhere: Vec<&str> = nodes.iter().map(|row| row.node.as_str()).filter(|node| Some(*node) != own).collect();
    if pods == 0 {
        return match (elsewhere.is_empty(), nodes.is_empty()) {
            (_, true) => None,
            (false, _) => Some(format!("its pods' flows are known on node {} only: ask there", elsewhere.join(", "))),
            (true, _) => Some("no flow that lives now had the port then: leases say nothing of pods".into()),
        };
    }
    if !named {
        return Some("a flow to another server may have had the same port: name the server with --to".into());
    }
    (steady == 0).then(|| "the flow began at about that time: another one may have ended just before".into())
}

impl Printable for WhoisView {
    fn text(&self) -> String {
        let when = if self.from == self.until { self.from.clone() } else { format!("{} to {}", self.from, self.until) };
        let mut text = format!("{} at {when}\n", self.seen);
        if self.nodes.is_empty() {
            text += if self.node_certain {
                "node    none: no node of the cluster had this port\n"
            } else {
                "node    not known\n"
            };
        }
        for node in &self.nodes {
            text += &format!("node    {}{}\n", node.node, lease_text(node));
        }
        for flow in &self.flows {
            let pod = flow.pod.clone().unwrap_or_else(|| format!("of {}, which is gone", flow.pod_address));
            let remote = SocketAddr::new(flow.remote_address, flow.remote_port);
            let (policy, age) = (flow.policy.clone().unwrap_or_else(|| "?".into()), flow.age_seconds);
            text += &format!("pod     {pod}, policy {policy}: {} to {remote}, open for {age} s\n", flow.protocol);
        }
        let word = |certain| if certain { "certain" } else { "not certain" };
        text += &format!("sure    the node is {}", word(self.node_certain));
        if !self.flows.is_empty() {
            text += &format!(", the pod is {}", word(self.pod_certain));
        }
        text += "\n";
        for doubt in &self.doubts {
            text += &format!("        {doubt}\n");
        }
        text
    }
}

fn lease_text(node: &NodeRow) -> String {
    let (Some(first), Some(last)) = (node.first_port, node.last_port) else { return String::new() };
    let mut text = format!(", which held the ports {first} to {last}");
    if let Some(from) = &node.from {
        text += &format!(" from {from}");
    }
    if let Some(until) = &node.until {
        text += &format!(" until {until}");
    }
    text
}
