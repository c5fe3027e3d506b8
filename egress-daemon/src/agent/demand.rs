//! How many port blocks this node needs, and which it can give back, by counting what its flows use. Pure.

use crate::{
    api::Demand,
    model::NodeName,
    plan::{BlockState, Plan},
};
use egress_common::port_block;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// One translated flow, as far as ports go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Used {
    /// The egress IP.
    pub egress: IpAddr,
    /// The other end.
    pub remote: (IpAddr, u16, u32),
    /// The translated port, host byte order.
    pub port: u16,
}

/// What the flows of one egress IP use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Use {
    blocks: BTreeSet<u16>,
    /// The most ports towards one remote address, port and protocol: what the blocks must have room for.
    peak: u32,
}

/// Ports in use, by egress IP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(BTreeMap<IpAddr, Use>);

impl Ports {
    /// Counts.
    pub fn count(flows: impl IntoIterator<Item = Used>) -> Self {
        let mut per_remote: BTreeMap<(IpAddr, (IpAddr, u16, u32)), u32> = BTreeMap::new();
        let mut ports = Self::default();
        for flow in flows {
            *per_remote.entry((flow.egress, flow.remote)).or_default() += 1;
            ports.0.entry(flow.egress).or_default().blocks.extend(port_block::of_port(flow.port));
        }
        for ((egress, _), n) in per_remote {
            let use_ = ports.0.entry(egress).or_default();
            use_.peak = use_.peak.max(n);
        }
        ports
    }
}

/// Share of its ports towards one remote that a node may use before it asks for more blocks: a half.
const LOW_WATER: u32 = 2;

/// What the node reports for every egress IP that it has blocks of.
pub fn demand(node: &NodeName, plan: &Plan, ports: &Ports) -> Vec<Demand> {
    let mut all = Vec::new();
    for (address, blocks) in &plan.blocks {
        let own: BTreeMap<u16, BlockState> =
            blocks.iter().filter(|(_, l)| l.node == *node).map(|(b, l)| (*b, l.state)).collect();
        if own.is_empty() {
            continue;
        }
        let none = Use::default();
        let used = ports.0.get(address).unwrap_or(&none);
        let held = own.values().filter(|s| **s == BlockState::Leased).count() as u32;
        let needed = (used.peak * LOW_WATER).div_ceil(u32::from(port_block::SIZE));
        let idle =
            |(b, s): (&u16, &BlockState)| (*s == BlockState::Quarantined && !used.blocks.contains(b)).then_some(*b);
        let release: Vec<u16> = own.iter().filter_map(idle).collect();
        let want_blocks = if needed > held { needed.min(u32::from(port_block::COUNT)) as u16 } else { 0 };
        if want_blocks > 0 || !release.is_empty() {
            all.push(Demand { egress_ip: address.to_string(), want_blocks, release });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::BlockLease;

    fn used(port: u16, remote: u16) -> Used {
        Used { egress: [192, 0, 2, 1].into(), remote: ([203, 0, 113, 1].into(), remote, 6), port }
    }

    fn plan(states: &[(u16, BlockState)]) -> Plan {
        let lease = |state| BlockLease { node: "n".into(), revision: 1, state };
        let blocks = states.iter().map(|(b, s)| (*b, lease(*s))).collect();
        Plan { blocks: [([192, 0, 2, 1].into(), blocks)].into(), ..Plan::default() }
    }

    #[test]
    fn more_is_wanted_when_half_the_ports_towards_one_remote_are_in_use() {
        let plan = plan(&[(0, BlockState::Leased)]);
        let few = Ports::count((0..32).map(|i| used(1024 + i, 443)));
        assert_eq!(demand(&"n".into(), &plan, &few), []);
        let many = Ports::count((0..33).map(|i| used(1024 + i, 443)));
        assert_eq!(demand(&"n".into(), &plan, &many)[0].want_blocks, 2);
    }

    #[test]
    fn ports_are_counted_for_each_remote_apart() {
        let plan = plan(&[(0, BlockState::Leased)]);
        let spread = Ports::count((0..60).map(|i| used(1024 + i, i)));
        assert_eq!(demand(&"n".into(), &plan, &spread), []);
    }

    #[test]
    fn a_quarantined_block_is_given_back_when_no_flow_uses_it() {
        let plan = plan(&[(0, BlockState::Quarantined), (1, BlockState::Quarantined)]);
        let ports = Ports::count([used(1024, 443)]);
        assert_eq!(demand(&"n".into(), &plan, &ports)[0].release, [1]);
    }
}
