//! Which gateway each egress IP is used by while it moves from one to another. Pure.
//!
//! An egress IP that moves between two gateways that live is made before it is broken: the old owner falls silent (ARP, NDP)
//! as soon as it reads of the new one, but both forward what comes out of the tunnel, and every source node goes on with
//! the old one until the new one reports that its tables carry the address ([`carries`](crate::api::EgressNodeStatus)).
//! A gateway keeps nothing of a flow, and the blocks of the source nodes stay theirs: which of the two a packet takes
//! makes no difference to the outside.

use crate::{
    health::ProbeState,
    model::{NodeName, Snapshot},
    plan::{EgressIpPlan, Plan},
};
use std::{collections::BTreeMap, net::IpAddr, time::Duration};

/// For how long the old owner is used when the new one does not report.
pub const GRACE: Duration = Duration::from_secs(10);
/// For how long the old owner forwards after it has seen that report: the time for every source node to see it too.
pub const LINGER: Duration = Duration::from_secs(5);

/// What a node knows when it decides.
pub struct Circumstances<'a> {
    /// This node.
    pub node: &'a NodeName,
    /// The objects.
    pub snapshot: &'a Snapshot,
    /// What the controller has decided.
    pub plan: &'a Plan,
    /// What the probes say of the gateways.
    pub probes: &'a BTreeMap<NodeName, ProbeState>,
    /// The time, since any start.
    pub now: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Used {
    gateway: NodeName,
    /// Since when another one is the owner.
    waiting: Option<Duration>,
}

/// The gateways in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Handover {
    used: BTreeMap<IpAddr, Used>,
    lingers: BTreeMap<IpAddr, Duration>,
}

impl Handover {
    /// Takes note of owners, reports and probes.
    pub fn update(&mut self, c: &Circumstances<'_>) {
        self.used.retain(|ip, _| c.plan.egress_ips.get(ip).is_some_and(|e| e.owner.is_some()));
        self.lingers.retain(|ip, until| c.plan.egress_ips.contains_key(ip) && c.now < *until);
        for (ip, e) in &c.plan.egress_ips {
            let Some(owner) = &e.owner else { continue };
            if owner == c.node {
                self.lingers.remove(ip);
            }
            let used = self.used.entry(*ip).or_insert_with(|| Used { gateway: owner.clone(), waiting: None });
            if used.gateway == *owner {
                used.waiting = None;
                continue;
            }
            let since = *used.waiting.get_or_insert(c.now);
            if c.now.saturating_sub(since) < GRACE && !may_change(c, &used.gateway, *ip, owner, e) {
                continue;
            }
            if used.gateway == *c.node {
                self.lingers.insert(*ip, c.now + LINGER);
            }
            *used = Used { gateway: owner.clone(), waiting: None };
        }
    }

    /// The gateway that this node's packets of an egress IP go to.
    pub fn gateway(&self, ip: IpAddr) -> Option<&NodeName> {
        self.used.get(&ip).map(|used| &used.gateway)
    }

    /// Whether `node`, this one, sends packets with this egress IP to the outside.
    pub fn forwards(&self, ip: IpAddr, node: &NodeName) -> bool {
        self.gateway(ip) == Some(node) || self.lingers.contains_key(&ip)
    }
}

/// Whether the new owner is to be used instead of `old`.
fn may_change(c: &Circumstances<'_>, old: &NodeName, ip: IpAddr, owner: &NodeName, e: &EgressIpPlan) -> bool {
    // A node's own address is where the node is. This node's tables carry what it owns. The dead carry nothing.
    let gone = c.probes.get(old) == Some(&ProbeState::Dead) || !c.snapshot.nodes.contains_key(old);
    e.fixed || owner == c.node || gone || carries(c, ip, owner, e.epoch)
}

/// Whether the owner has reported that its tables carry the address, and this node's blocks of it.
fn carries(c: &Circumstances<'_>, ip: IpAddr, owner: &NodeName, epoch: u64) -> bool {
    let Some(report) = c.snapshot.nodes.get(owner).and_then(|n| n.report.as_ref()) else { return false };
    let blocks = c.plan.blocks.get(&ip).into_iter().flat_map(BTreeMap::values);
    let own = blocks.filter(|lease| lease.node == *c.node).map(|lease| lease.revision).max();
    report.carries.get(&ip).is_some_and(|reported| *reported >= epoch) && own.unwrap_or(0) <= report.lease_revision
}
