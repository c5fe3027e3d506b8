//! How many port blocks this node needs, by counting what its flows use, and what it says of them. Pure.

use super::blocks::Withheld;
use crate::{
    api::Demand,
    model::NodeName,
    plan::{BlockState, Plan},
};
use egress_common::port_block;
use std::{collections::BTreeMap, net::IpAddr};

/// The other end of a flow: address, port in host byte order, protocol.
pub type Remote = (IpAddr, u16, u32);

/// One translated flow, as far as ports go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Used {
    /// The pod.
    pub pod: IpAddr,
    /// The egress IP.
    pub egress: IpAddr,
    /// The other end.
    pub remote: Remote,
    /// The translated port, host byte order.
    pub port: u16,
}

/// What the flows of one egress IP use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Use {
    /// Flows by block.
    blocks: BTreeMap<u16, u32>,
    /// The most ports towards one remote address, port and protocol, of each pod [`POD_PORTS`] at most: what the blocks must have room for.
    peak: u32,
}

/// Ports in use, by egress IP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(BTreeMap<IpAddr, Use>);

impl Ports {
    /// Counts.
    pub fn count(flows: impl IntoIterator<Item = Used>) -> Self {
        let mut per_pod: BTreeMap<(IpAddr, Remote), BTreeMap<IpAddr, u32>> = BTreeMap::new();
        let mut ports = Self::default();
        for flow in flows {
            *per_pod.entry((flow.egress, flow.remote)).or_default().entry(flow.pod).or_default() += 1;
            if let Some(block) = port_block::of_port(flow.port) {
                *ports.0.entry(flow.egress).or_default().blocks.entry(block).or_default() += 1;
            }
        }
        for ((egress, _), pods) in per_pod {
            let use_ = ports.0.entry(egress).or_default();
            use_.peak = use_.peak.max(pods.into_values().map(|n| n.min(POD_PORTS)).sum());
        }
        ports
    }

    /// How many flows use a block of an egress IP.
    pub fn flows(&self, egress: IpAddr, block: u16) -> u32 {
        self.0.get(&egress).and_then(|u| u.blocks.get(&block)).copied().unwrap_or(0)
    }

    /// How many blocks of an egress IP the flows need, with room for as many again; at most all that there are.
    pub fn needed(&self, egress: IpAddr) -> u16 {
        let peak = self.0.get(&egress).map_or(0, |u| u.peak);
        let needed = (peak * LOW_WATER).div_ceil(u32::from(port_block::SIZE));
        needed.min(u32::from(port_block::COUNT)) as u16
    }
}

/// Share of its ports towards one remote that a node may use before it asks for more blocks: a half.
const LOW_WATER: u32 = 2;

/// How many ports of an egress IP towards one remote a pod is given blocks for: with as many again, a quarter of all. No pod takes the
/// cluster's.
const POD_PORTS: u32 = port_block::COUNT as u32 * port_block::SIZE as u32 / 4 / LOW_WATER;

/// What the node reports for every egress IP that it has blocks of.
pub fn demand(node: &NodeName, plan: &Plan, ports: &Ports, withheld: &Withheld) -> Vec<Demand> {
    let mut all = Vec::new();
    for (address, blocks) in &plan.blocks {
        let own = || blocks.iter().filter(|(_, lease)| lease.node == *node);
        if own().next().is_none() {
            continue;
        }
        let released = |block: &u16| withheld.is_released(*address, *block);
        let held = own().filter(|(b, l)| l.state == BlockState::Leased && !released(b)).count();
        let needed = ports.needed(*address);
        let release: Vec<u16> = own().map(|(b, _)| *b).filter(released).collect();
        let want_blocks = if usize::from(needed) > held { needed } else { 0 };
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
        let (pod, egress) = ([10, 0, 0, 1].into(), [192, 0, 2, 1].into());
        Used { pod, egress, remote: ([203, 0, 113, 1].into(), remote, 6), port }
    }

    fn plan() -> Plan {
        let lease = BlockLease { node: "n".into(), revision: 1, state: BlockState::Leased };
        Plan { blocks: [([192, 0, 2, 1].into(), [(0, lease)].into())].into(), ..Plan::default() }
    }

    #[test]
    fn more_is_wanted_when_half_the_ports_towards_one_remote_are_in_use() {
        let few = Ports::count((0..32).map(|i| used(1024 + i, 443)));
        assert_eq!(demand(&"n".into(), &plan(), &few, &Withheld::default()), []);
        let many = Ports::count((0..33).map(|i| used(1024 + i, 443)));
        assert_eq!(demand(&"n".into(), &plan(), &many, &Withheld::default())[0].want_blocks, 2);
    }

    /// docs/failures.md: port-share.
    #[test]
    fn port_share_a_pod_is_given_blocks_for_a_quarter_of_the_ports_at_most() {
        let want = |pods: u32| {
            let of_pod = |pod: u32| {
                let pod = IpAddr::from([10, 0, 0, pod as u8]);
                (0..20_000).map(move |i| Used { pod, ..used(1024 + i, 443) })
            };
            demand(&"n".into(), &plan(), &Ports::count((0..pods).flat_map(of_pod)), &Withheld::default())[0].want_blocks
        };
        assert_eq!([1, 2, 5].map(want), [252, 504, 1008]);
    }

    #[test]
    fn ports_are_counted_for_each_remote_apart() {
        let spread = Ports::count((0..60).map(|i| used(1024 + i, i)));
        assert_eq!(demand(&"n".into(), &plan(), &spread, &Withheld::default()), []);
    }

    #[test]
    fn flows_are_counted_for_each_block() {
        let egress = IpAddr::from([192, 0, 2, 1]);
        let ports = Ports::count([used(1024, 443), used(1087, 80), used(1088, 443)]);
        assert_eq!([0, 1, 2].map(|block| ports.flows(egress, block)), [2, 1, 0]);
    }
}
