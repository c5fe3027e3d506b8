//! `egressctl flows`.

use super::ViewSources;
use crate::ctl::{
    dump::{Dump, FlowEntry},
    print::{Printable, Row, or_dash, table},
};
use egress_common::{flow::kind, tcp};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// Selects the flows to show. An absent field selects all flows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowFilter {
    /// The pod: `namespace/name` or an address.
    pub pod: Option<String>,
    /// The remote addresses.
    pub to: Option<IpNet>,
    /// The remote port.
    pub to_port: Option<u16>,
    /// The egress IP.
    pub egress_ip: Option<IpAddr>,
    /// The maximum number of flows to show; the others are only counted.
    pub limit: Option<usize>,
}

/// The requested flows, and their number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowsView {
    /// The node's name.
    pub node: Option<String>,
    /// Flows in the table.
    pub total: usize,
    /// Flows that match the filters.
    pub matched: usize,
    /// The matching flows within the limit, sorted by pod and remote address.
    pub items: Vec<FlowRow>,
}

/// One flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowRow {
    /// `namespace/name` of the pod; null if the pod is gone, even if another pod has its address.
    pub pod: Option<String>,
    /// The pod's address.
    pub pod_address: IpAddr,
    /// The pod's port, or the identifier of an ICMP query.
    pub pod_port: u16,
    /// The remote address.
    pub remote_address: IpAddr,
    /// The remote port; 0 for ICMP.
    pub remote_port: u16,
    /// `tcp`, `udp`, `icmp` or a number.
    pub protocol: String,
    /// The egress IP; null for a flow that is left alone, and if the egress IP is gone.
    pub egress_ip: Option<IpAddr>,
    /// The translated port or identifier; null for a flow that is left alone.
    pub egress_port: Option<u16>,
    /// The policy; null for a flow that is left alone.
    pub policy: Option<String>,
    /// The node that carries the flow: the egress IP's owner; null if the egress IP is null or has no owner.
    pub gateway: Option<String>,
    /// Seconds since its first packet, to within 1.1 s.
    pub age_seconds: u64,
    /// Seconds since its last packet in either direction, to within 1.1 s.
    pub idle_seconds: u64,
    /// `translated`, `untouched` (the outside opened it, or it began before the policy or while there was no gateway) or `severed` (its
    /// egress IP was removed from its policy).
    pub kind: String,
    /// `opening`, `established`, `closing` or `closed`; null unless it is TCP.
    pub tcp_state: Option<String>,
}

impl Row for FlowRow {
    const HEADER: &'static [&'static str] =
        &["POD", "REMOTE", "PROTO", "EGRESS IP", "GATEWAY", "AGE (s)", "IDLE (s)", "STATE"];
    const NONE: &'static str = "no flows";
    fn cells(&self) -> Vec<String> {
        let pod = match &self.pod {
            Some(pod) => format!("{pod}:{}", self.pod_port),
            None => SocketAddr::new(self.pod_address, self.pod_port).to_string(),
        };
        let remote = match self.remote_port {
            0 => self.remote_address.to_string(),
            port => SocketAddr::new(self.remote_address, port).to_string(),
        };
        let state = match &self.tcp_state {
            Some(state) if self.kind == TRANSLATED => state,
            _ => &self.kind,
        };
        vec![
            pod,
            remote,
            self.protocol.clone(),
            or_dash(self.egress_ip.zip(self.egress_port).map(|(ip, port)| SocketAddr::new(ip, port))),
            or_dash(self.gateway.as_ref()),
            self.age_seconds.to_string(),
            self.idle_seconds.to_string(),
            state.clone(),
        ]
    }
}

impl Printable for FlowsView {
    fn text(&self) -> String {
        let mut text = table(&self.items);
        let shown = self.items.len();
        text += &match (shown == self.matched, self.matched == self.total) {
            (true, true) => format!("{} flows\n", self.total),
            (true, false) => format!("{} of {} flows\n", self.matched, self.total),
            (false, true) => format!("{shown} of {} flows (--limit)\n", self.total),
            (false, false) => format!("{shown} of {} (--limit) of {} flows\n", self.matched, self.total),
        };
        text
    }
}

/// The [`FlowRow::kind`] of a flow that keeps an egress IP.
pub(crate) const TRANSLATED: &str = "translated";

/// Returns a protocol's name.
pub(crate) fn protocol(number: u32) -> String {
    match number {
        1 | 58 => "icmp".into(),
        6 => "tcp".into(),
        17 => "udp".into(),
        other => other.to_string(),
    }
}

fn tcp_state(flow: &FlowEntry) -> &'static str {
    let (out, back) = (flow.flow.state, flow.back.map_or(0, |back| back.state));
    if tcp::closed(out, flow.flow.back) {
        "closed"
    } else if tcp::established(out, back) {
        "established"
    } else if out & tcp::seen::FIN != 0 {
        "closing"
    } else {
        "opening"
    }
}

/// Converts a flow to a row.
pub(crate) fn row(dump: &Dump, flow: &FlowEntry) -> FlowRow {
    let ours = !flow.untouched;
    let egress = dump.egress_ip(flow.flow.egress).filter(|(_, e)| ours && e.generation == flow.flow.egress_generation);
    let kind = match flow.flow.kind {
        _ if flow.untouched => "untouched",
        kind::TRANSLATED => TRANSLATED,
        _ => "severed",
    };
    FlowRow {
        pod: dump.pod_of(flow),
        pod_address: flow.pod,
        pod_port: flow.pod_port,
        remote_address: flow.remote,
        remote_port: flow.remote_port,
        protocol: protocol(flow.proto),
        egress_ip: egress.map(|(ip, _)| ip),
        egress_port: ours.then(|| flow.port()),
        policy: ours.then(|| dump.policy_name(flow.flow.policy.into())),
        gateway: egress.and_then(|(_, e)| dump.node_name(e.gateway)),
        age_seconds: dump.seconds_since(flow.flow.created),
        idle_seconds: dump.seconds_since(flow.last_seen()),
        kind: kind.into(),
        tcp_state: (flow.proto == 6).then(|| tcp_state(flow).into()),
    }
}

/// Returns the flows that match the filter.
pub fn flows(sources: ViewSources<'_>, filter: &FlowFilter) -> FlowsView {
    let dump = sources.dump;
    let of_pod = |flow: &FlowEntry| match &filter.pod {
        None => true,
        Some(pod) => match pod.parse::<IpAddr>() {
            Ok(ip) => ip == flow.pod,
            Err(_) => dump.pod_of(flow).as_ref() == Some(pod),
        },
    };
    let with_egress = |flow: &FlowEntry| {
        filter
            .egress_ip
            .is_none_or(|ip| !flow.untouched && dump.egress_ip(flow.flow.egress).is_some_and(|(e, _)| e == ip))
    };
    let matched: Vec<&FlowEntry> = dump
        .flows
        .iter()
        .filter(|flow| filter.to.is_none_or(|net| net.contains(&flow.remote)))
        .filter(|flow| filter.to_port.is_none_or(|port| port == flow.remote_port))
        .filter(|flow| with_egress(flow) && of_pod(flow))
        .collect();
    let shown = matched.iter().take(filter.limit.unwrap_or(usize::MAX));
    FlowsView {
        node: sources.node(),
        total: dump.flows.len(),
        matched: matched.len(),
        items: shown.map(|flow| row(dump, flow)).collect(),
    }
}
