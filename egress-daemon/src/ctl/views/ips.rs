//! `egressctl ips`.

use super::ViewSources;
use crate::ctl::print::{List, Row, joined, or_dash};
use egress_common::{egress::flags, port_block};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// An egress IP that this node uses, carries, or may carry later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IpRow {
    /// The address.
    pub egress_ip: IpAddr,
    /// The carrier to which this node sends packets; null for none.
    pub owner: Option<String>,
    /// Whether the owner is this node.
    pub owned_here: bool,
    /// Whether this node is one of its carriers.
    pub carried_here: bool,
    /// The epoch, which rises with each change of owner.
    pub epoch: u64,
    /// The policies of this node's pods that have a slot with the egress IP, sorted.
    pub policies: Vec<String>,
    /// The policies among them whose new flows may choose the egress IP.
    pub usable_for: Vec<String>,
    /// Whether it is a node's own address, which never moves.
    pub fixed: bool,
    /// Whether this node, as a carrier, answers ARP and NDP for it.
    pub announced: bool,
    /// The number of port blocks from which this node may take ports.
    pub blocks: usize,
    /// The number of ports in those blocks.
    pub ports: usize,
    /// The number of flows of this node.
    pub flows: usize,
    /// Its pool; null for an egress IP that a policy names directly, and if the agent does not answer.
    pub pool: Option<String>,
    /// The node to which it returns; null as above.
    pub preferred_owner: Option<String>,
}

impl Row for IpRow {
    const HEADER: &'static [&'static str] =
        &["EGRESS IP", "OWNER", "EPOCH", "POLICIES HERE", "NEW FLOWS", "PORTS HERE", "FLOWS", "KIND"];
    const NONE: &'static str = "this node knows no egress IP";
    fn cells(&self) -> Vec<String> {
        let kind = match (&self.pool, self.fixed) {
            (Some(pool), _) => format!("pool {pool}"),
            (None, true) => "node's own".into(),
            (None, false) => "floating".into(),
        };
        let owner = or_dash(self.owner.as_ref());
        let new = match (self.policies.len(), self.usable_for.len()) {
            (0, _) => "-".into(),
            (all, usable) if all == usable => "yes".into(),
            (_, 0) => "avoided".into(),
            _ => joined(&self.usable_for),
        };
        vec![
            self.egress_ip.to_string(),
            if self.owned_here { format!("{owner} (here)") } else { owner },
            self.epoch.to_string(),
            joined(&self.policies).replace(", ", "\n"),
            new,
            self.ports.to_string(),
            self.flows.to_string(),
            kind,
        ]
    }
}

/// Returns every egress IP, sorted by address.
pub fn ips(sources: ViewSources<'_>) -> List<IpRow> {
    let dump = sources.dump;
    let mut flows: BTreeMap<u32, usize> = BTreeMap::new();
    for flow in dump.flows.iter().filter(|flow| flow.translated()) {
        *flows.entry(flow.flow.egress).or_default() += 1;
    }
    let row = |(index, egress_ip, e): (u32, IpAddr, &egress_common::egress::EgressIp)| {
        let members = dump.tables.members.iter().filter(|(key, _)| key.egress == index);
        let mut policies = BTreeSet::new();
        let mut usable_for = BTreeSet::new();
        for (key, member) in members.filter(|(_, member)| member.generation == e.generation) {
            policies.insert(dump.policy_name(key.policy));
            if member.usable != 0 {
                usable_for.insert(dump.policy_name(key.policy));
            }
        }
        let blocks = dump.blocks(index).len();
        let told = sources.agent.and_then(|agent| agent.egress_ips.iter().find(|told| told.address == egress_ip));
        IpRow {
            egress_ip,
            owner: dump.node_name(e.gateway),
            owned_here: e.flags & flags::LOCAL != 0,
            carried_here: e.flags & flags::CARRIED != 0,
            epoch: epoch(e),
            policies: policies.into_iter().collect(),
            usable_for: usable_for.into_iter().collect(),
            fixed: e.flags & flags::NODE_ADDRESS != 0,
            announced: e.flags & (flags::CARRIED | flags::SILENT | flags::NODE_ADDRESS) == flags::CARRIED,
            blocks,
            ports: blocks * usize::from(port_block::SIZE),
            flows: flows.get(&index).copied().unwrap_or(0),
            pool: told.and_then(|told| told.pool.clone()),
            preferred_owner: told.and_then(|told| told.preferred.clone()),
        }
    };
    let mut rows: Vec<IpRow> = dump.egress_ips().map(row).collect();
    rows.sort_by_key(|row| row.egress_ip);
    sources.list(rows)
}

/// Returns the epoch of an egress IP's owner.
pub(crate) fn epoch(e: &egress_common::egress::EgressIp) -> u64 {
    u64::from(e.epoch_high) << 32 | u64::from(e.epoch_low)
}
