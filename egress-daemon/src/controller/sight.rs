//! A controller's knowledge of gateways, and the part of it that a plan depends on. Pure.

use crate::config::LONGEST_LEASE;
use crate::store::lease::{GATEWAY_LEASE_PREFIX, stated_duration};
use egress_core::{
    health::{Health, LeaseTimes, LeaseTracker, Renewal},
    model::{Failback, NodeName, Snapshot},
};
use k8s_openapi::api::coordination::v1::Lease;
use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The gateways, according to the leases that the store reports.
pub struct Sight {
    /// The gateways' health.
    pub gateways: LeaseTracker,
    patience: Duration,
    /// The gateways that have a lease, and whether the lease is held.
    known: BTreeMap<NodeName, bool>,
    /// The last value of the store's counter of received leases, and the time of its last change.
    heard: (u64, Duration),
}

impl Sight {
    /// Returns a value without any known gateway.
    pub fn new(times: LeaseTimes) -> Self {
        let (patience, known) = (times.duration / 2, BTreeMap::new());
        Self { gateways: LeaseTracker::new(times), patience, known, heard: (0, Duration::ZERO) }
    }

    /// Records all leases. `heard` changes whenever the store has received one.
    ///
    /// At least the leader's own lease is renewed all the time. If the store receives no lease, it is unreachable or this process was
    /// suspended, rather than all gateways having failed.
    pub fn observe(&mut self, leases: impl IntoIterator<Item = impl Borrow<Lease>>, heard: u64, now: Duration) {
        if now.saturating_sub(self.heard.1) >= self.patience {
            self.gateways.lost_sight(self.heard.1);
        }
        if heard != self.heard.0 {
            self.heard = (heard, now);
            self.gateways.regained_sight(now);
        }
        let mut known = BTreeMap::new();
        for lease in leases {
            let lease = lease.borrow();
            let Some(node) = gateway_of(lease) else { continue };
            // A released lease is not a heartbeat.
            let spec = lease.spec.as_ref();
            if spec.and_then(|spec| spec.holder_identity.as_deref()).is_none_or(str::is_empty) {
                known.insert(node, false);
                continue;
            }
            let renewal = Renewal {
                renew_time: spec.and_then(|spec| spec.renew_time.as_ref()).map(|time| time.0.as_nanosecond()),
                resource_version: lease.metadata.resource_version.clone().unwrap_or_default(),
                duration: stated_duration(lease).unwrap_or_default().min(LONGEST_LEASE),
            };
            self.gateways.observe(&node, renewal, now);
            known.insert(node, true);
        }
        for (node, was_held) in &self.known {
            match known.get(node) {
                None => self.gateways.deleted(node),
                Some(false) if *was_held => self.gateways.given_up(node),
                Some(_) => {}
            }
        }
        self.gateways.looked();
        self.known = known;
    }
}

/// Returns the gateway whose heartbeat this lease is.
fn gateway_of(lease: &Lease) -> Option<NodeName> {
    lease.metadata.name.as_deref()?.strip_prefix(GATEWAY_LEASE_PREFIX).map(NodeName::from)
}

/// Returns the lapsed leases of gateways for which `is_there` is false: their nodes, and all that these held, are gone.
pub fn left_over(leases: Vec<Arc<Lease>>, is_there: impl Fn(&NodeName) -> bool, health: &Health) -> Vec<Arc<Lease>> {
    let is_left = |node: NodeName| !is_there(&node) && !health.of(&node).is_fresh();
    leases.into_iter().filter(|lease| gateway_of(lease).is_some_and(is_left)).collect()
}

/// A gateway's name; whether it is unasked, fresh and proven, and whether its node is gone; how many of the delays it has been fresh.
pub type Judgement = (NodeName, [bool; 4], usize);

/// Returns the part of the gateways' health that a plan depends on, in a form that is cheap to compare.
pub fn judged(health: &Health, delays: &BTreeSet<Duration>) -> Vec<Judgement> {
    let judge = |(node, health): (&NodeName, &egress_core::health::NodeHealth)| {
        let passed = delays.iter().filter(|delay| health.fresh_for(**delay)).count();
        let flags = [health.is_unasked(), health.is_fresh(), health.is_proven(), health.gone];
        (node.clone(), flags, passed)
    };
    health.nodes.iter().map(judge).collect()
}

/// Returns the delays after which egress IPs may return to their preferred gateways.
pub fn delays(snapshot: &Snapshot) -> BTreeSet<Duration> {
    let of_pools = snapshot.placements().map(|pool| pool.failback);
    let delay = |failback| match failback {
        Failback::Preferred { delay } => Some(delay),
        Failback::Never => None,
    };
    of_pools.chain([Failback::default()]).filter_map(delay).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lease(node: &str, holder: &str) -> Arc<Lease> {
        let metadata = json!({"name": format!("{GATEWAY_LEASE_PREFIX}{node}"), "resourceVersion": "1"});
        Arc::new(serde_json::from_value(json!({"metadata": metadata, "spec": {"holderIdentity": holder}})).unwrap())
    }

    #[test]
    fn gateway_is_forgotten_without_lease_and_lease_removed_without_node() {
        let mut sight = Sight::new(LeaseTimes::default());
        let leases = vec![lease("held", "held"), lease("given-up", ""), lease("there", "")];
        sight.observe(leases.clone(), 1, Duration::ZERO);
        let health = sight.gateways.health(Duration::ZERO);
        let gone = left_over(leases.clone(), |node| node.as_str() == "there", &health);
        assert_eq!(gone, [leases[1].clone()], "one is renewed, one has a node");
        sight.observe([lease("held", "")], 2, Duration::ZERO);
        assert!(sight.gateways.health(Duration::ZERO).of(&"held".into()).is_unasked());
        assert_eq!(sight.gateways.health(Duration::ZERO).nodes.len(), 1);
        sight.observe([] as [Arc<Lease>; 0], 3, Duration::ZERO);
        assert!(sight.gateways.health(Duration::ZERO).nodes.is_empty());
    }
}
