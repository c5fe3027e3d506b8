//! Floating egress IPs, and nodes as their gateways.

use std::net::IpAddr;
use std::time::Duration;

use crate::health::NodeHealth;
use crate::model::{Failback, Family};

/// A node as a gateway.
#[derive(Clone, Copy, Debug, Default)]
pub struct GatewayNode {
    /// False if it reports that it is not ready, or is being drained.
    pub ready: bool,
    /// Its lease.
    pub health: NodeHealth,
    /// How many floating egress IPs it may own in all.
    pub limit: Option<u32>,
    /// Whether the limit is the node's own, so that the pools' limits do not apply to it.
    pub own_limit: bool,
    /// Its zone, by number.
    pub zone: Option<u32>,
    /// Whether its agent has reported.
    pub reports: bool,
    /// The key by which it is chosen as a carrier ([`node_key`](crate::plan::carriers::node_key)).
    pub key: u64,
}

impl GatewayNode {
    /// Returns whether it keeps the egress IPs that it has.
    pub fn keeps(&self) -> bool {
        self.ready && self.health.is_fresh()
    }

    /// Returns whether it may be given an egress IP.
    pub fn takes(&self) -> bool {
        self.ready && self.health.is_proven()
    }

    /// Returns whether it may be a carrier besides the owner. A node that has no lease because it was not asked for one is asked by
    /// becoming a carrier.
    pub fn stands_by(&self) -> bool {
        self.ready && (self.health.is_fresh() || self.reports && self.health.is_unasked())
    }
}

/// A floating egress IP.
#[derive(Clone, Debug)]
pub struct Floating<'a> {
    /// The address.
    pub address: IpAddr,
    /// The nodes that may own it, ascending.
    pub candidates: &'a [u32],
    /// The number of that set.
    pub set: usize,
    /// The policies that use it, by number, in order of precedence.
    pub policies: Vec<u32>,
    /// Where its search in the ring of candidates begins.
    pub start: u64,
    /// Whether its policies depend on zones.
    pub zoned: bool,
    /// Its pool by number, and how many egress IPs of that pool a node may own.
    pub pool: Option<(u32, Option<u32>)>,
    /// What happens when a gateway comes back.
    pub failback: Failback,
    /// Whether it goes to the first candidate that can have it, and is not moved for balance.
    pub first: bool,
    /// Its owner so far, if that node exists.
    pub owner: Option<u32>,
    /// The gateway that it goes back to, if that node exists.
    pub preferred: Option<u32>,
    /// How many gateways carry it.
    pub count: usize,
    /// Its carriers so far, in order, as far as those nodes exist.
    pub carriers: Vec<u32>,
}

impl Floating<'_> {
    /// Returns whether the node is among those that may own it.
    pub fn selects(&self, node: u32) -> bool {
        self.candidates.binary_search(&node).is_ok()
    }

    /// Returns the policies that use it, each with the family whose flows it serves.
    pub fn uses(&self) -> impl Iterator<Item = (u32, Family)> {
        let family = Family::of(self.address);
        self.policies.iter().map(move |policy| (*policy, family))
    }

    /// Returns how long a gateway that lapsed must have been back; `None` if it does not matter how long.
    pub fn delay(&self) -> Option<Duration> {
        match self.failback {
            Failback::Preferred { delay } => Some(delay),
            Failback::Never => None,
        }
    }

    /// Returns the gateway that it goes back to as soon as that gateway has been back for the delay.
    pub fn returns_to(&self, nodes: &[GatewayNode]) -> Option<u32> {
        let delay = self.delay()?;
        self.preferred.filter(|preferred| {
            let node = &nodes[*preferred as usize];
            let comes_back = node.keeps() && !node.health.fresh_for(delay);
            comes_back && self.owner != Some(*preferred) && self.selects(*preferred)
        })
    }
}

/// Where an egress IP is while the plan is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Placement {
    /// The eligible gateway that has it.
    pub node: Option<u32>,
    /// Whether it had no eligible owner before.
    pub placed: bool,
}
