//! The demand for port blocks that a node reports. Pure.

use super::{blocks::Withheld, ports::Ports};
use crate::{
    model::{Demand, NodeName},
    plan::{BlockState, Plan},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Returns the demand to report for the egress IPs that the node has blocks of.
pub fn demand(node: &NodeName, plan: &Plan, ports: &Ports, withheld: &Withheld) -> BTreeMap<IpAddr, Demand> {
    let mut all = BTreeMap::new();
    for (address, blocks) in &plan.blocks {
        let own: Vec<_> = blocks.iter().filter(|(_, lease)| lease.node == *node).collect();
        if own.is_empty() {
            continue;
        }
        let given_back = withheld.released(*address);
        let is_released = |block: &u16| given_back.is_some_and(|released| released.contains_key(block));
        let held = own.iter().filter(|(b, l)| l.state == BlockState::Leased && !is_released(b)).count();
        let needed = ports.needed(*address);
        let released: BTreeSet<u16> = own.iter().map(|(b, _)| **b).filter(is_released).collect();
        let want = if usize::from(needed) > held { needed.into() } else { 0 };
        if want > 0 || !released.is_empty() {
            all.insert(*address, Demand { want, released });
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        agent::ports::{
            Used,
            tests::{count, egress, used},
        },
        plan::BlockLease,
    };

    fn plan() -> Plan {
        let lease = BlockLease { node: "n".into(), revision: 1, state: BlockState::Leased };
        Plan { blocks: [(egress(), [(0, lease)].into())].into(), ..Plan::default() }
    }

    #[test]
    fn more_is_wanted_when_half_the_ports_towards_one_remote_are_in_use() {
        let few = count((0..32).map(|i| used(1024 + i, 443)));
        assert_eq!(demand(&"n".into(), &plan(), &few, &Withheld::default()), [].into());
        let many = count((0..33).map(|i| used(1024 + i, 443)));
        assert_eq!(demand(&"n".into(), &plan(), &many, &Withheld::default())[&egress()].want, 2);
    }

    /// docs/failures.md: port-share.
    #[test]
    fn port_share_a_pod_is_given_blocks_for_a_quarter_of_the_ports_at_most() {
        let want = |pods: u32| {
            let of_pod = |pod: u32| {
                let pod = IpAddr::from([10, 0, 0, pod as u8]);
                (0..20_000).map(move |i| Used { pod, ..used(1024 + i, 443) })
            };
            demand(&"n".into(), &plan(), &count((0..pods).flat_map(of_pod)), &Withheld::default())[&egress()].want
        };
        assert_eq!([1, 2, 5].map(want), [252, 504, 1008]);
    }

    #[test]
    fn ports_are_counted_separately_for_each_remote() {
        let spread = count((0..60).map(|i| used(1024 + i, i)));
        assert_eq!(demand(&"n".into(), &plan(), &spread, &Withheld::default()), [].into());
    }
}
