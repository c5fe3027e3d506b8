//! Floating egress IPs, and nodes as their gateways.

use std::net::IpAddr;
use std::time::Duration;

use crate::health::NodeHealth;
use crate::model::{Failback, Family};

/// A node as a gateway.
#[derive(Clone, Copy, Debug, Default)]
pub struct GatewayNode {
    /// It does not report that it is not ready, and is not being drained.
    pub ready: bool,
    /// Its lease.
    pub health: NodeHealth,
    /// How many floating egress IPs it may own in all.
    pub limit: Option<u32>,
    /// The limit is its own, so the pools' limits do not apply to it.
    pub own_limit: bool,
    /// Its zone, by number.
    pub zone: Option<u32>,
    /// An agent of it has reported.
    pub reports: bool,
    /// What it is chosen by as a carrier ([`node_key`](crate::plan::carriers::node_key)).
    pub key: u64,
}

impl GatewayNode {
    /// Whether it keeps the egress IPs that it has.
    pub fn keeps(&self) -> bool {
        self.ready && self.health.is_fresh()
    }

    /// Whether it may be given an egress IP.
    pub fn takes(&self) -> bool {
        self.ready && self.health.is_proven()
    }

    /// Whether it may be a carrier besides the owner. A node without a lease because it was not asked for one is asked by
    /// that.
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
    /// Where in the ring of candidates its search begins.
    pub start: u64,
    /// Its policies depend on zones.
    pub zoned: bool,
    /// Its pool by number, and how many of that pool's a node may own.
    pub pool: Option<(u32, Option<u32>)>,
    /// What happens when a gateway comes back.
    pub failback: Failback,
    /// It goes to the first candidate that can have it, and is not moved for balance.
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
    /// Whether the node is among those that may own it.
    pub fn selects(&self, node: u32) -> bool {
        self.candidates.binary_search(&node).is_ok()
    }

    /// The policies that use it, each with the family whose flows it serves.
    pub fn uses(&self) -> impl Iterator<Item = (u32, Family)> {
        let family = Family::of(self.address);
        self.policies.iter().map(move |policy| (*policy, family))
    }

    /// How long a gateway that lapsed must have been back; `None`: it does not matter how long.
    pub fn delay(&self) -> Option<Duration> {
        match self.failback {
            Failback::Preferred { delay } => Some(delay),
            Failback::Never => None,
        }
    }

    /// The gateway that it goes back to as soon as that has been back for the delay.
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
    /// It had no eligible owner before.
    pub placed: bool,
}
