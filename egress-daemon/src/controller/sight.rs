//! What a controller knows of gateways, and the part of it that a plan depends on. Pure.

use crate::config::LONGEST_LEASE;
use crate::store::lease::{GATEWAY_LEASE_PREFIX, stated_duration};
use egress_core::{
    health::{Health, LeaseTimes, LeaseTracker, Renewal},
    model::{Failback, NodeName, Snapshot},
};
use k8s_openapi::api::coordination::v1::Lease;
use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::time::Duration;

/// The gateways, by the leases that the store reports.
pub struct Sight {
    /// Their health.
    pub gateways: LeaseTracker,
    patience: Duration,
    /// The gateways whose leases somebody holds.
    known: BTreeSet<NodeName>,
    /// The store's number for news of leases when it last changed, and when that was.
    heard: (u64, Duration),
}

impl Sight {
    /// Nothing is known yet.
    pub fn new(times: LeaseTimes) -> Self {
        let (patience, known) = (times.duration / 2, BTreeSet::new());
        Self { gateways: LeaseTracker::new(times), patience, known, heard: (0, Duration::ZERO) }
    }

    /// Records all leases; `heard` changes whenever the store has received one.
    ///
    /// Some lease, if only the leader's own, is renewed all the time. If the store receives none, it is unreachable or this process did
    /// not run: the gateways have not all failed.
    pub fn observe(&mut self, leases: impl IntoIterator<Item = impl Borrow<Lease>>, heard: u64, now: Duration) {
        if now.saturating_sub(self.heard.1) >= self.patience {
            self.gateways.lost_sight(self.heard.1);
        }
        if heard != self.heard.0 {
            self.heard = (heard, now);
            self.gateways.regained_sight(now);
        }
        let mut known = BTreeSet::new();
        for lease in leases {
            let lease = lease.borrow();
            let name = lease.metadata.name.as_deref().unwrap_or_default();
            let Some(node) = name.strip_prefix(GATEWAY_LEASE_PREFIX).map(NodeName::from) else { continue };
            // A lease that was released is no heartbeat.
            let spec = lease.spec.as_ref();
            if spec.and_then(|spec| spec.holder_identity.as_deref()).is_none_or(str::is_empty) {
                continue;
            }
            let renewal = Renewal {
                renew_time: spec.and_then(|spec| spec.renew_time.as_ref()).map(|time| time.0.as_nanosecond()),
                resource_version: lease.metadata.resource_version.clone().unwrap_or_default(),
                duration: stated_duration(lease).unwrap_or_default().min(LONGEST_LEASE),
            };
            self.gateways.observe(&node, renewal, now);
            known.insert(node);
        }
        for gone in self.known.difference(&known) {
            self.gateways.given_up(gone);
        }
        self.gateways.looked();
        self.known = known;
    }
}

/// A gateway: whether it is unasked, fresh and proven, and whether its node is gone; and for how many of the delays it has been fresh.
pub type Judgement = (NodeName, [bool; 4], usize);

/// The part of the gateways' health that a plan depends on, in a form that is cheap to compare.
pub fn judged(health: &Health, delays: &BTreeSet<Duration>) -> Vec<Judgement> {
    let judge = |(node, health): (&NodeName, &egress_core::health::NodeHealth)| {
        let passed = delays.iter().filter(|delay| health.fresh_for(**delay)).count();
        let flags = [health.is_unasked(), health.is_fresh(), health.is_proven(), health.gone];
        (node.clone(), flags, passed)
    };
    health.nodes.iter().map(judge).collect()
}

/// After which delays an egress IP may go back to its preferred gateway.
pub fn delays(snapshot: &Snapshot) -> BTreeSet<Duration> {
    let of_pools = snapshot.pools.values().map(|pool| pool.failback);
    let delay = |failback| match failback {
        Failback::Preferred { delay } => Some(delay),
        Failback::Never => None,
    };
    of_pools.chain([Failback::default()]).filter_map(delay).collect()
}
