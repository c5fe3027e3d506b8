//! A pool of floating egress IPs.

use std::net::IpAddr;
use std::time::Duration;

use super::policy::DEFAULT_FAILBACK_DELAY;
use super::{Family, IpRange, Labels, PoolId, Selector};

/// Whether an egress IP goes back to the gateway that it was taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failback {
    /// When that gateway has been back for this long.
    Preferred {
        /// how long
        delay: Duration,
    },
    /// It stays where it is for as long as possible.
    Never,
}

impl Default for Failback {
    fn default() -> Self {
        Failback::Preferred { delay: DEFAULT_FAILBACK_DELAY }
    }
}

/// The network that a pool's addresses live in, if it is not the node's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubnetInfo {
    /// The next hop.
    pub gateway: IpAddr,
    /// The length of the network's prefix.
    pub prefix_length: u8,
    /// The VLAN, 1 to 4094; absent: untagged.
    pub vlan: Option<u16>,
}

/// How packets reach an egress IP of a pool, and leave with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkAttachment {
    /// The network that it lives in, if that is not the node's own.
    pub subnet: Option<SubnetInfo>,
    /// How the outside reaches it.
    pub announce: Announce,
    /// Which of its carriers packets leave through.
    pub outbound: Outbound,
}

/// A pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Its kind and name.
    pub id: PoolId,
    /// The addresses that may be allocated; the first and last addresses of CIDRs are already removed.
    pub ranges: Vec<IpRange>,
    /// The nodes that may own its addresses.
    pub nodes: Selector,
    /// The network that its addresses live in.
    pub subnet: Option<SubnetInfo>,
    /// How many of its addresses a node may own. The annotation of a node, which counts addresses of all pools, replaces this limit.
    pub max_per_node: Option<u32>,
    /// What happens when a gateway comes back.
    pub failback: Failback,
    /// How the outside reaches its addresses.
    pub announce: Announce,
    /// How many gateways carry each address.
    pub carriers: usize,
    /// Which of them packets leave through.
    pub outbound: Outbound,
    /// The namespaces whose own policies may use it; absent: none.
    pub allowed: Option<Selector>,
    /// How many of its addresses the policies of a namespace may have.
    pub quotas: Vec<Quota>,
}

/// How many addresses of a pool the policies of one namespace may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The namespaces that it applies to, each on its own.
    pub namespaces: Selector,
    /// How many.
    pub max: u32,
}

/// How many gateways carry an egress IP if its pool does not set this.
pub const DEFAULT_CARRIERS: usize = 4;
/// The most gateways that carry an egress IP: as many as flows can be spread over.
pub const MAX_CARRIERS: usize = 64;

/// How the outside reaches an egress IP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Announce {
    /// The owner answers ARP and NDP.
    #[default]
    Arp,
    /// Every carrier has a route to it in a dedicated table, which a BGP speaker exports.
    Route,
    /// Something else sends its packets to a carrier.
    None,
}

/// Which carriers the packets of an egress IP leave through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outbound {
    /// All through the owner.
    #[default]
    Owner,
    /// Each flow through one of the carriers.
    Spread,
}

impl Pool {
    /// Returns how packets reach its addresses, and leave with them.
    pub fn attachment(&self) -> NetworkAttachment {
        NetworkAttachment { subnet: self.subnet, announce: self.announce, outbound: self.outbound }
    }

    /// Returns whether the address may be allocated from it.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(address))
    }

    /// Returns how many addresses the policies of a namespace with these labels may have; `None` if it may not use the pool.
    pub fn quota(&self, namespace: &Labels) -> Option<u32> {
        self.allowed.as_ref().filter(|allowed| allowed.matches(namespace))?;
        let quotas = self.quotas.iter().filter(|quota| quota.namespaces.matches(namespace));
        Some(quotas.map(|quota| quota.max).min().unwrap_or(u32::MAX))
    }

    /// Returns whether it has addresses of this family.
    pub fn serves(&self, family: Family) -> bool {
        self.ranges.iter().any(|range| range.family() == family)
    }

    /// Returns the number of addresses; those that lie in several ranges are counted once.
    pub fn total(&self) -> u128 {
        let mut ranges = self.ranges.clone();
        ranges.sort();
        let (mut total, mut end) = (0u128, None);
        for range in ranges {
            let start = match end {
                Some(end) if range.contains(end) && end != range.end() => Family::bits(end) + 1,
                Some(end) if Family::of(end) == range.family() && range.end() <= end => continue,
                _ => Family::bits(range.start()),
            };
            total = total.saturating_add((Family::bits(range.end()) - start).saturating_add(1));
            end = Some(range.end());
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::PoolKind;

    #[test]
    fn overlapping_ranges_count_once() {
        let range = |a: &str, b: &str| IpRange::new(a.parse().unwrap(), b.parse().unwrap()).unwrap();
        let mut pool = Pool {
            id: PoolId::new(PoolKind::Native, "p"),
            ranges: vec![range("10.0.0.5", "10.0.0.9"), range("10.0.0.1", "10.0.0.6"), range("10.0.0.2", "10.0.0.3")],
            nodes: Selector::everything(),
            subnet: None,
            max_per_node: None,
            failback: Failback::default(),
            announce: Announce::Arp,
            carriers: DEFAULT_CARRIERS,
            outbound: Outbound::Owner,
            allowed: None,
            quotas: Vec::new(),
        };
        assert_eq!(pool.total(), 9);
        pool.ranges.push(range("2001:db8::1", "2001:db8::2"));
        assert_eq!(pool.total(), 11);
    }
}
