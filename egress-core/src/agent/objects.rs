//! What an agent takes from the objects. Pure.

use super::carriers;
use crate::{
    model::{AddressSource, NodeName, PolicyId, Snapshot, Source},
    plan::Plan,
};
use std::collections::{BTreeMap, BTreeSet};

/// The objects as they were read last.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    /// The model; of pods, one node's are enough.
    pub snapshot: Snapshot,
    /// What the controller has decided.
    pub plan: Plan,
    /// The policies that it has not looked at yet.
    pub unanswered: BTreeSet<PolicyId>,
    /// By node: up to which revision all leases are in the objects.
    pub leases_up_to: BTreeMap<NodeName, u64>,
}

/// Up to which revisions a node knows of leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Of those of every node: as a gateway it lets them pass.
    pub all: u64,
    /// Of its own: what it gives back is meant up to it.
    pub own: u64,
}

impl Known {
    /// The higher one of each.
    #[must_use]
    pub fn max(self, other: Known) -> Known {
        Known { all: self.all.max(other.all), own: self.own.max(other.own) }
    }
}

impl Objects {
    /// Whether the plan counts on a node as a gateway, be it that it asks whether it lives.
    pub fn is_named(&self, node: &NodeName) -> bool {
        self.plan.egress_ips.values().flat_map(carriers::order).any(|name| name == node)
    }

    /// What a node has reported of leases.
    pub fn reported(&self, node: &NodeName) -> Known {
        let report = self.snapshot.report(node);
        report.map_or(Known::default(), |r| Known { all: r.lease_revision, own: r.own_lease_revision })
    }

    /// Up to which revisions all leases are in a node's tables after the next write. A report never falls, or a lease that was
    /// confirmed would seem not to be.
    pub fn leases(&self, node: &NodeName) -> Known {
        let all = self.leases_up_to.get(node).copied().unwrap_or(0);
        Known { all, own: self.plan.highest_lease_of(node) }.max(self.reported(node))
    }

    /// Whether any pool or policy would have this node as a gateway, or the plan has it as one: its pool may be gone.
    pub fn may_be_gateway(&self, node: &NodeName) -> bool {
        let Some(n) = self.snapshot.nodes.get(node) else { return false };
        let by_pool = self.snapshot.pools.values().any(|p| p.nodes.matches(&n.labels));
        let by_policy = self.snapshot.policies.values().any(|p| match &p.source {
            Source::Gateways(gateways) => gateways.iter().any(|g| {
                let holds = !matches!(g.address, AddressSource::Configured(ip) if !n.has_address(ip));
                holds && g.nodes.matches(&n.labels)
            }),
            Source::Pools(_) => false,
        });
        by_pool || by_policy || self.is_named(node)
    }
}
