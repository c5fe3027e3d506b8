//! `egressctl blocks`.

use super::ViewSources;
use crate::ctl::print::{List, Row, joined};
use egress_common::port_block;
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// The port blocks of one egress IP that are leased to one node, as this node knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockRow {
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// The node that may use the ports.
    pub node: String,
    /// Whether that is this node.
    pub here: bool,
    /// The number of blocks.
    pub blocks: usize,
    /// The number of ports.
    pub ports: usize,
    /// The ports, as ranges `first-last`, sorted.
    pub port_ranges: Vec<String>,
    /// The number of distinct ports that this node's flows use; null for another node, whose flows are not known here. Flows to different
    /// destinations can share a port, so there may be more flows.
    pub used_ports: Option<usize>,
    /// The number of this node's flows that use the ports; null as above.
    pub flows: Option<usize>,
}

/// The maximum number of ranges in a table cell.
const RANGES: usize = 4;

impl Row for BlockRow {
    const HEADER: &'static [&'static str] =
        &["EGRESS IP", "LEASED TO", "BLOCKS", "PORTS", "USED PORTS", "FLOWS", "PORT RANGES"];
    const NONE: &'static str = "no port blocks are leased to this node, and it owns no egress IP with leased blocks";
    fn cells(&self) -> Vec<String> {
        let more = self.port_ranges.len().saturating_sub(RANGES);
        let mut ranges = joined(&self.port_ranges[..self.port_ranges.len().min(RANGES)]);
        if more > 0 {
            ranges += &format!(" and {more} more");
        }
        let unknown = || "-".to_owned();
        vec![
            self.egress_ip.to_string(),
            if self.here { format!("{} (here)", self.node) } else { self.node.clone() },
            self.blocks.to_string(),
            self.ports.to_string(),
            self.used_ports.map_or_else(unknown, |n| n.to_string()),
            self.flows.map_or_else(unknown, |n| n.to_string()),
            ranges,
        ]
    }
}

/// Returns every lease that this node knows: its own leases, and for egress IPs that it owns or may own, the leases of all nodes.
pub fn blocks(sources: ViewSources<'_>) -> List<BlockRow> {
    let dump = sources.dump;
    let own = dump.tables.config.map_or(0, |config| config.node);
    let mut ports: BTreeMap<u32, (BTreeSet<u16>, usize)> = BTreeMap::new();
    for flow in dump.flows.iter().filter(|flow| flow.translated()) {
        let of = ports.entry(flow.flow.egress).or_default();
        of.0.insert(flow.port());
        of.1 += 1;
    }
    let mut rows = Vec::new();
    for (index, egress_ip, _) in dump.egress_ips() {
        let mut leased: BTreeMap<u32, BTreeSet<u16>> = BTreeMap::new();
        for row in 0..port_block::ROWS {
            let Some(node) = dump.tables.leases.get(&index).map(|table| table.node[row]).filter(|n| *n != 0) else {
                continue;
            };
            let block = port_block::of_port((row * usize::from(port_block::SIZE)) as u16);
            leased.entry(u32::from(node)).or_default().extend(block);
        }
        // For this node, the blocks that its programs use count, not the table for owners.
        let here: BTreeSet<u16> = dump.blocks(index).iter().copied().collect();
        leased.remove(&own);
        if !here.is_empty() {
            leased.insert(own, here);
        }
        for (node, blocks) in leased {
            let here = node == own;
            let used = ports.get(&index).filter(|_| here);
            rows.push(BlockRow {
                egress_ip,
                node: dump.node_name(node).unwrap_or_else(|| "this node".into()),
                here,
                blocks: blocks.len(),
                ports: blocks.len() * usize::from(port_block::SIZE),
                port_ranges: ranges(&blocks),
                used_ports: here.then(|| used.map_or(0, |(ports, _)| ports.len())),
                flows: here.then(|| used.map_or(0, |(_, flows)| *flows)),
            });
        }
    }
    rows.sort_by(|a, b| (a.egress_ip, !a.here, &a.node).cmp(&(b.egress_ip, !b.here, &b.node)));
    sources.list(rows)
}

/// Formats the ports of blocks as ranges, and joins adjacent blocks. Ignores map entries that are not valid blocks.
fn ranges(blocks: &BTreeSet<u16>) -> Vec<String> {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for block in blocks.range(..port_block::COUNT) {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *block => *last = *block,
            _ => ranges.push((*block, *block)),
        }
    }
    let text = |(first, last): (u16, u16)| {
        format!("{}-{}", port_block::first_port(first), port_block::first_port(last) + (port_block::SIZE - 1))
    };
    ranges.into_iter().map(text).collect()
}
