//! `egressctl endpoints`.

use super::{ViewSources, policies_by_class};
use crate::ctl::print::{List, Row, joined};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// A pod of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointRow {
    /// Its addresses, sorted.
    pub addresses: Vec<IpAddr>,
    /// `namespace/name`.
    pub pod: String,
    /// The policies that select it, sorted.
    pub policies: Vec<String>,
    /// The egress IPs that it is assigned to, by policy (`PerEndpoint` policies only).
    pub assigned: BTreeMap<String, Vec<IpAddr>>,
    /// Number of its class on this node; 0 for a pod that no policy selects.
    pub class: u32,
    /// The seconds that remain for an idle TCP connection from before a policy selected the pod to send again. Connections that have sent
    /// since then are left alone as long as they are used.
    pub history_seconds: u64,
    /// Its translated flows.
    pub flows: usize,
}

impl Row for EndpointRow {
    const HEADER: &'static [&'static str] = &["POD IP", "POD", "POLICIES", "ASSIGNED TO", "FLOWS"];
    const NONE: &'static str = "no pod of this node is known";
    fn cells(&self) -> Vec<String> {
        let assigned: Vec<IpAddr> = self.assigned.values().flatten().copied().collect();
        vec![
            joined(&self.addresses).replace(", ", "\n"),
            self.pod.clone(),
            joined(&self.policies).replace(", ", "\n"),
            joined(&assigned).replace(", ", "\n"),
            self.flows.to_string(),
        ]
    }
}

/// Returns every pod, sorted by name.
pub fn endpoints(sources: ViewSources<'_>) -> List<EndpointRow> {
    let dump = sources.dump;
    let by_class = policies_by_class(dump);
    let mut flows: BTreeMap<IpAddr, usize> = BTreeMap::new();
    for flow in dump.flows.iter().filter(|flow| flow.translated()) {
        *flows.entry(flow.pod).or_default() += 1;
    }
    let mut assigned: BTreeMap<u32, BTreeMap<String, Vec<IpAddr>>> = BTreeMap::new();
    for (key, egress) in &dump.tables.assignments {
        let Some((address, _)) = dump.egress_ip(*egress) else { continue };
        let of = assigned.entry(key.endpoint).or_default().entry(dump.policy_name(key.policy)).or_default();
        of.push(address);
        of.sort();
    }
    let row = |(id, (endpoint, addresses)): (u32, (egress_common::endpoint::Endpoint, Vec<IpAddr>))| {
        let policies: BTreeSet<String> =
            by_class.get(&endpoint.class).into_iter().flatten().map(|policy| dump.policy_name(*policy)).collect();
        EndpointRow {
            pod: dump.endpoint_name(id),
            policies: policies.into_iter().collect(),
            assigned: assigned.get(&id).cloned().unwrap_or_default(),
            class: endpoint.class,
            history_seconds: dump.seconds_until(endpoint.history_until),
            flows: addresses.iter().filter_map(|ip| flows.get(ip)).sum(),
            addresses,
        }
    };
    let mut rows: Vec<EndpointRow> = dump.endpoints().into_iter().map(row).collect();
    rows.sort_by(|a, b| (&a.pod, &a.addresses).cmp(&(&b.pod, &b.addresses)));
    sources.list(rows)
}
