//! The answer, its certainty, and the reasons for doubt. Pure.

use super::time::text;
use super::{Known, Moment, SLACK, Server, is_sure, seen_as};
use crate::ctl::dump::Dump;
use crate::ctl::print::Printable;
use crate::ctl::views::{FlowRow, protocol, row};
use crate::flowlog::flows::{self, Likely, TICK};
use egress_common::egress::flags;
use egress_core::leaselog::Doubt;
use serde::Serialize;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

/// A node that held the port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRow {
    /// The node.
    pub node: String,
    /// The first port of the lease; null if only a flow shows that the node had the port.
    pub first_port: Option<u16>,
    /// The last port of the lease.
    pub last_port: Option<u16>,
    /// The start of the lease; null if unknown.
    pub from: Option<String>,
    /// The end of the lease; null if unknown, or if the lease has not ended.
    pub until: Option<String>,
}

/// A recorded flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedRow {
    /// `namespace/name` of the pod, or its address if its name was no longer known.
    pub pod: String,
    /// Its node.
    pub node: String,
    /// The policy; null if it was no longer known.
    pub policy: Option<String>,
    /// `tcp`, `udp`, `icmp` or a number.
    pub protocol: String,
    /// The server; null if destinations are not recorded.
    pub to: Option<SocketAddr>,
    /// The time of its start, to within 1.1 s.
    pub began: String,
    /// The time of its last packet, to within 1.1 s; null if it was open at the end of the log.
    pub ended: Option<String>,
    /// Whether it certainly had the port at the time in question. If not, it began or ended at about that time, or its end may be missing.
    pub certain: bool,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WhoisView {
    /// The egress IP and the port.
    pub seen: String,
    /// The earliest time in question.
    pub from: String,
    /// The latest time in question.
    pub until: String,
    /// The nodes that may have had the port.
    pub nodes: Vec<NodeRow>,
    /// The live flows that may have had the port, with pod and policy.
    pub flows: Vec<FlowRow>,
    /// The recorded flows that may have had the port.
    pub recorded: Vec<RecordedRow>,
    /// Whether the node is certain. True also if certainly no node had the port.
    pub node_certain: bool,
    /// Whether the pod is certain.
    pub pod_certain: bool,
    /// The reasons for doubt, one sentence each.
    pub doubts: Vec<String>,
}

/// Combines leases, recorded flows and live flows.
pub(super) fn whois(seen: SocketAddr, at: Moment, to: Option<Server>, known: Known<'_>) -> WhoisView {
    let Known { leases, recorded, living } = known;
    let has_log = recorded.is_some();
    let recorded = recorded.unwrap_or_default();
    let mut doubts: Vec<String> = leases.iter().flat_map(|answer| &answer.doubts).map(doubt).collect();
    if leases.is_none() && !has_log {
        doubts.push("there is no log of leases here: ask on a gateway, which has one".into());
    }
    let shared = living.and_then(|living| node_with(living.dump, seen.ip().to_canonical()));
    // The leases of a node's own address say nothing about the node's sockets.
    let mut node_certain = leases.as_ref().is_some_and(is_sure) && shared.is_none();
    let mut nodes: Vec<NodeRow> = leases.into_iter().flat_map(|answer| answer.holders).map(NodeRow::of).collect();
    let flows = living.map(|living| seen_as(living, seen, to, at)).unwrap_or_default();
    let own = living.and_then(|living| living.dump.own_name());
    let likely = of_server(recorded.likely, to);
    // A live flow that began before the time in question has held its port since then.
    let steady = flows.iter().any(|(_, began)| *began + SLACK <= at.from);
    let is_known = |likely: &Likely| likely.surely && likely.flow.destination.is_some();
    // A port has at most one flow of a protocol to each server.
    let exact = to.is_some_and(Server::has_protocol) && (steady || likely.iter().any(is_known));
    let steady_nodes = likely.iter().filter(|likely| likely.surely).map(|likely| &likely.flow.node);
    let steady_nodes: BTreeSet<&String> = steady_nodes.chain(own.iter().filter(|_| steady)).collect();
    if !steady_nodes.is_empty() {
        node_certain = steady_nodes.len() == 1 && (exact || shared.is_none());
        doubts.clear();
        nodes.retain(|row| steady_nodes.contains(&row.node));
        let missing: Vec<&String> =
            steady_nodes.iter().copied().filter(|node| nodes.iter().all(|row| row.node != **node)).collect();
        nodes.extend(missing.into_iter().map(|node| NodeRow::without_lease(node)));
    }
    doubts.extend(shared.as_ref().filter(|_| !exact).map(|node| {
        format!(
            "{} is an address of {node}, whose sockets and pods without a policy also use its ports: only a flow to the server of --to \
             is certain",
            seen.ip()
        )
    }));
    let rows: Vec<FlowRow> =
        living.iter().flat_map(|living| flows.iter().map(|(flow, _)| row(living.dump, flow))).collect();
    let living_pods = rows.iter().map(|row| row.pod.clone().unwrap_or_else(|| row.pod_address.to_string()));
    let pods: BTreeSet<String> = living_pods.chain(likely.iter().map(|likely| likely.flow.pod.clone())).collect();
    let complete = has_log && recorded.doubts.is_empty() && shared.is_none();
    let lost: Vec<flows::Doubt> = likely.iter().filter_map(|likely| likely.lost.clone()).collect();
    let found = Found {
        pods: pods.len(),
        surely: !steady_nodes.is_empty(),
        is_lost: !lost.is_empty(),
        // If the log has no gaps, the port had no other flows.
        only: complete || exact,
        to,
        has_log,
    };
    doubts.extend(about_pod(&found, own.as_deref(), &nodes));
    if !found.is_certain() {
        let lost = lost.into_iter().filter(|_| !found.surely);
        let missing: BTreeSet<flows::Doubt> = recorded.doubts.into_iter().chain(lost).collect();
        doubts.extend(missing.iter().map(about_log));
    }
    WhoisView {
        seen: seen.to_string(),
        from: text(at.from),
        until: text(at.until),
        nodes,
        flows: rows,
        recorded: likely.into_iter().map(RecordedRow::of).collect(),
        node_certain,
        pod_certain: found.is_certain(),
        doubts,
    }
}

/// Returns the flows to a server, and the flows whose destination is unknown.
fn of_server(likely: Vec<Likely>, to: Option<Server>) -> Vec<Likely> {
    let is_of = |to: Server, flow: &flows::Recorded| {
        to.is_of(flow.protocol.into()) && flow.destination.is_none_or(|destination| destination == to.address())
    };
    likely.into_iter().filter(|likely| to.is_none_or(|to| is_of(to, &likely.flow))).collect()
}

/// Returns the node whose own address this is, as the maps show it. The node shares the ports of such an egress IP.
fn node_with(dump: &Dump, address: IpAddr) -> Option<String> {
    let mut all = dump.egress_ips();
    let (_, _, egress) = all.find(|(_, ip, egress)| *ip == address && egress.flags & flags::NODE_ADDRESS != 0)?;
    Some(dump.node_name(egress.gateway).map_or_else(|| "a node".to_owned(), |name| format!("node {name}")))
}

/// The findings about pods.
struct Found {
    /// The number of pods that may have had the port.
    pods: usize,
    /// Whether one of them had the port all the time.
    surely: bool,
    /// Whether missing events are why a flow may not have had it.
    is_lost: bool,
    /// Whether no flow of another pod can also have had the port.
    only: bool,
    /// The server that the question names.
    to: Option<Server>,
    /// Whether flows are recorded.
    has_log: bool,
}

impl Found {
    fn is_certain(&self) -> bool {
        self.pods == 1 && self.surely && self.only
    }
}

impl RecordedRow {
    fn of(Likely { flow, surely, .. }: Likely) -> Self {
        Self {
            pod: flow.pod,
            node: flow.node,
            policy: flow.policy,
            protocol: protocol(flow.protocol.into()),
            to: flow.destination,
            began: text(flow.began),
            ended: flow.ended.map(|ended| text(ended + TICK)),
            certain: surely,
        }
    }
}

/// Describes why the recorded flows may be incomplete.
fn about_log(doubt: &flows::Doubt) -> String {
    match doubt {
        flows::Doubt::Unwatched(None, Some(until)) => format!("the log of flows begins at {}", text(*until)),
        flows::Doubt::Unwatched(Some(from), None) => format!("the log of flows ends at {}", text(*from)),
        flows::Doubt::Unwatched(Some(from), Some(until)) => {
            format!("flows were not recorded from {} to {}", text(*from), text(*until))
        }
        flows::Doubt::Unwatched(None, None) => "the log of flows is empty".into(),
        flows::Doubt::Older(from) => {
            format!("a flow from before {}, when the log of flows begins, may be missing", text(*from))
        }
        flows::Doubt::Unread(why) => format!("a file of the log of flows cannot be read: {why}"),
        flows::Doubt::Lost(from, until, 0) => {
            format!(
                "starts and ends of flows between {} and {} may be missing: the agent was killed",
                text(*from),
                text(*until)
            )
        }
        flows::Doubt::Lost(from, until, flows::CLOCK) => {
            format!("the node's clock was set: times between {} and {} may be wrong", text(*from), text(*until))
        }
        flows::Doubt::Lost(from, until, count) => {
            format!("{count} starts and ends of flows between {} and {} are missing", text(*from), text(*until))
        }
    }
}

impl NodeRow {
    /// Returns the row of a node for which only a flow shows that it had the port.
    fn without_lease(node: &str) -> Self {
        Self { node: node.to_owned(), first_port: None, last_port: None, from: None, until: None }
    }

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
            format!("changes from {} to {} may be missing: ask on another gateway", text(*from), text(*until))
        }
        Doubt::Unwritten(None, None) => "the log is empty".into(),
        Doubt::Lost(count, at) => format!("{count} events before {} were not written", text(*at)),
        Doubt::Contradicted => "the logs of several gateways contradict each other".into(),
    }
}

/// Describes why the pod is not certain.
fn about_pod(found: &Found, own: Option<&str>, nodes: &[NodeRow]) -> Option<String> {
    let elsewhere: Vec<&str> = nodes.iter().map(|row| row.node.as_str()).filter(|node| Some(*node) != own).collect();
    match found.pods {
        0 if nodes.is_empty() => None,
        0 if !elsewhere.is_empty() => {
            Some(format!("only node {} knows the flows of its pods: ask there", elsewhere.join(", ")))
        }
        0 if found.has_log => Some("no live or recorded flow had the port then".into()),
        0 => Some("no live flow had the port then: leases do not name pods".into()),
        _ if !found.surely && found.is_lost => {
            Some("the log of flows does not show for certain that a flow was open then".into())
        }
        _ if !found.surely => {
            Some("a flow began or ended at about that time: the clocks of nodes may differ by two seconds".into())
        }
        1 if found.only => None,
        count => Some(match found.to {
            Some(to) if !to.has_protocol() => {
                let to = to.address();
                format!(
                    "flows of several protocols to the same server may have the same port: name the protocol, as in --to {to}/tcp"
                )
            }
            Some(_) => "a flow of another pod may have had the port: destinations are not recorded".into(),
            None if count == 1 => {
                "a flow to another server may have had the same port: name the server with --to ADDR:PORT/tcp".into()
            }
            None => {
                "flows of several pods had the port, each to a different server: name the server with --to ADDR:PORT/tcp".into()
            }
        }),
    }
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
        for flow in &self.recorded {
            let policy = flow.policy.as_deref().unwrap_or("?");
            let to = flow.to.map(|to| format!(" to {to}")).unwrap_or_default();
            let ended = flow.ended.as_ref().map_or_else(|| ", not ended".to_owned(), |ended| format!(" to {ended}"));
            text += &format!(
                "pod     {} on {}, policy {policy}: {}{to} from {}{ended}\n",
                flow.pod, flow.node, flow.protocol, flow.began
            );
        }
        let word = |certain| if certain { "certain" } else { "not certain" };
        text += &format!("sure    the node is {}", word(self.node_certain));
        if !self.flows.is_empty() || !self.recorded.is_empty() {
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
