//! `egressctl gateways`.

use super::ViewSources;
use crate::{
    ctl::print::{List, Row, joined, or_dash},
    observe::state::{NodeState, ProbeResult},
};
use egress_common::egress::flags;
use egress_core::network::xdp::Xdp;
use serde::Serialize;
use std::{collections::BTreeMap, net::IpAddr};

/// A node that owns egress IPs that this node uses, or that this node's agent probes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayRow {
    /// The address to which packets for it are sent; null for this node itself.
    pub address: Option<IpAddr>,
    /// Its name.
    pub name: String,
    /// Whether it is this node.
    pub local: bool,
    /// The egress IPs that it owns, sorted.
    pub egress_ips: Vec<IpAddr>,
    /// Whether new flows of some policy may choose one of its egress IPs; null if no policy of this node's pods has one of them.
    pub used_for_new_flows: Option<bool>,
    /// Flows of this node that it carries.
    pub flows: usize,
    /// The result of probes; null if the agent does not answer.
    pub probe: Option<ProbeResult>,
    /// The last round-trip time in microseconds; null if unknown.
    pub rtt_micros: Option<u64>,
    /// The transport to it; null if the agent does not answer.
    pub transport: Option<String>,
    /// The reply transport that it uses; null if unknown.
    pub replies: Option<String>,
    /// For this node: the interfaces at whose drivers (XDP) packets are forwarded, sorted; null for another node, or if the agent does not
    /// answer.
    pub native: Option<Vec<String>>,
    /// The reason why no better transport is in use, or for this node, why packets are not forwarded at a driver; null if the best
    /// transport is in use, or if the agent does not answer.
    pub why_not_better: Option<String>,
}

impl Row for GatewayRow {
    const HEADER: &'static [&'static str] =
        &["ADDRESS", "GATEWAY", "EGRESS IPS", "NEW FLOWS", "FLOWS", "PROBE", "RTT (µs)", "TRANSPORT", "REPLIES", "XDP"];
    const NONE: &'static str = "this node uses no gateway";
    fn cells(&self) -> Vec<String> {
        vec![
            if self.local { "(this node)".into() } else { or_dash(self.address) },
            self.name.clone(),
            joined(&self.egress_ips).replace(", ", "\n"),
            or_dash(self.used_for_new_flows.map(|used| if used { "yes" } else { "avoided" })),
            self.flows.to_string(),
            or_dash(self.probe.map(|probe| format!("{probe:?}"))),
            or_dash(self.rtt_micros),
            or_dash(self.transport.as_ref()),
            or_dash(self.replies.as_ref()),
            or_dash(self.native.as_ref().map(|native| if native.is_empty() { "no".into() } else { joined(native) })),
        ]
    }
    fn note(&self) -> Option<(&str, &str)> {
        Some((&self.name, self.why_not_better.as_deref()?))
    }
}

/// Returns every gateway, sorted by name.
pub fn gateways(sources: ViewSources<'_>) -> List<GatewayRow> {
    let dump = sources.dump;
    let own = dump.tables.config.map_or(0, |config| config.node);
    let mut usable: BTreeMap<u32, bool> = BTreeMap::new();
    for (key, member) in &dump.tables.members {
        *usable.entry(key.egress).or_default() |= member.usable != 0;
    }
    let mut flows: BTreeMap<u32, usize> = BTreeMap::new();
    for flow in dump.flows.iter().filter(|flow| flow.translated()) {
        *flows.entry(flow.flow.egress).or_default() += 1;
    }
    let mut rows: BTreeMap<String, GatewayRow> = BTreeMap::new();
    for (index, address, e) in dump.egress_ips() {
        let Some(name) = dump.node_name(e.gateway) else { continue };
        let local = e.flags & flags::LOCAL != 0;
        let row = rows.entry(name.clone()).or_insert_with(|| GatewayRow {
            name,
            local,
            address: dump.node_address(e.gateway).filter(|_| e.gateway != own),
            ..GatewayRow::default()
        });
        row.egress_ips.push(address);
        row.used_for_new_flows = row.used_for_new_flows.max(usable.get(&index).copied());
        row.flows += flows.get(&index).copied().unwrap_or(0);
    }
    for told in sources.agent.iter().flat_map(|agent| &agent.gateways) {
        let new = || GatewayRow { name: told.name.clone(), ..GatewayRow::default() };
        let row = rows.entry(told.name.clone()).or_insert_with(new);
        row.probe = Some(told.probe);
        row.rtt_micros = told.rtt_micros;
        let told_text = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        row.transport = told_text(&told.transport);
        row.replies = told_text(&told.replies);
        row.why_not_better = told_text(&told.why);
        row.address = row.address.or(told.address.filter(|_| !row.local));
    }
    for node in sources.agent.iter().map(|agent| &agent.node) {
        rows.get_mut(&node.name).into_iter().for_each(|row| at_drivers(row, node));
    }
    rows.values_mut().for_each(|row| row.egress_ips.sort());
    sources.list(rows.into_values().collect())
}

/// Adds the state of XDP at this node's own interfaces.
fn at_drivers(row: &mut GatewayRow, node: &NodeState) {
    row.native = Some(node.drivers.iter().filter(|(_, why)| why.is_none()).map(|(name, _)| name.clone()).collect());
    let why_not = node.drivers.iter().filter_map(|(name, why)| Some(format!("not XDP at {name}: {}", why.as_ref()?)));
    let mut reasons: Vec<String> = row.why_not_better.take().into_iter().chain(why_not).collect();
    if node.xdp == Xdp::Off.to_string() {
        reasons.push("not XDP: disabled by `xdp`".to_owned());
    }
    row.why_not_better = (!reasons.is_empty()).then(|| reasons.join("; "));
}
