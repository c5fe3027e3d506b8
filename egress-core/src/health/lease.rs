//! Judges gateways by the renewals of their Lease objects, and nodes by the absence of their Node objects.
//!
//! Only the fact that a lease object *changed* counts, and when we saw the change: the clocks of other machines are never compared.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Health, LeaseState, NodeHealth, terms::all_quiet};
use crate::model::NodeName;

/// The durations by which leases and nodes are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    /// A lease that was not renewed for this long has lapsed, as long as other gateways renew theirs; if none does, it lapses after three
    /// times as long. A lease that states a longer duration lasts that long: its gateway renews it accordingly, and answers for that long.
    pub duration: Duration,
    /// After a node has been absent for this long, its port blocks may go to others.
    pub quarantine: Duration,
}

impl Default for LeaseTimes {
    fn default() -> Self {
        Self { duration: Duration::from_secs(15), quarantine: Duration::from_secs(60) }
    }
}

/// If no gateway renews, the server at which they renew is probably overloaded, for instance after a restart. Gateways count as dead only
/// after this many durations: without any gateway, nothing could be done for the egress IPs anyway.
const PATIENCE: u32 = 3;

/// Returns the time until which gateways need not renew. The leases have just changed, or become readable, for the first time in `quiet`.
fn excuse(now: Duration, quiet: Duration, duration: Duration) -> Duration {
    now + quiet.min(2 * duration)
}

/// What distinguishes one renewal of a lease from the next. Compared for equality only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renewal {
    /// `spec.renewTime` in ns.
    pub renew_time: Option<i128>,
    /// `metadata.resourceVersion`
    pub resource_version: String,
    /// `spec.leaseDurationSeconds`; zero if the lease does not state it.
    pub duration: Duration,
}

#[derive(Clone, Debug, Default)]
struct TrackedLease {
    /// Absent while the lease has no holder.
    renewal: Option<Renewal>,
    renewed: Duration,
    fresh_since: Option<Duration>,
    returned: bool,
    proven: bool,
}

impl TrackedLease {
    /// Returns how long it lasts without renewal. The controller's own duration is the minimum: a gateway that states less gains nothing.
    fn duration(&self, times: LeaseTimes) -> Duration {
        self.renewal.as_ref().map_or(Duration::ZERO, |renewal| renewal.duration).max(times.duration)
    }

    /// Returns when it lapses, if no gateway had to renew before `excused` and none that had to has renewed since `quiet`.
    fn lapse(&self, times: LeaseTimes, excused: Duration, quiet: Duration) -> Duration {
        let duration = self.duration(times);
        let alone = self.renewed.max(excused) + duration;
        if alone < quiet + all_quiet(duration) { alone } else { alone.max(quiet + PATIENCE * duration) }
    }
}

/// Follows the leases of all gateways, and which nodes exist.
#[derive(Clone, Debug)]
pub struct LeaseTracker {
    times: LeaseTimes,
    leases: BTreeMap<NodeName, TrackedLease>,
    /// When any lease was last seen renewed.
    renewed: Duration,
    /// Whether all leases were read once: a lease that appears afterwards has just been taken.
    looked: bool,
    absent_since: BTreeMap<NodeName, Duration>,
    blind_since: Option<Duration>,
    /// Every lease counts as renewed at this time or later: until then gateways could not renew.
    excused_until: Duration,
}

impl LeaseTracker {
    /// Creates a tracker that has seen nothing.
    pub fn new(times: LeaseTimes) -> Self {
        Self {
            times,
            leases: BTreeMap::new(),
            renewed: Duration::ZERO,
            looked: false,
            absent_since: BTreeMap::new(),
            blind_since: None,
            excused_until: Duration::ZERO,
        }
    }

    /// Records that the lease of a node was read. A lease that exists at the first read of all leases counts as a renewal, but does not
    /// prove that its gateway is alive: it lapses if no other renewal follows.
    pub fn observe(&mut self, node: &NodeName, renewal: Renewal, now: Duration) {
        self.poll(now);
        if self.leases.get(node).is_some_and(|lease| lease.renewal.as_ref() == Some(&renewal)) {
            return;
        }
        let quiet = now.saturating_sub(self.quiet_since());
        let is_followed = self.leases.values().any(|lease| lease.fresh_since.is_some());
        let lease = self.leases.entry(node.clone()).or_default();
        lease.proven = self.looked || lease.renewal.is_some();
        lease.renewal = Some(renewal);
        // A lease that need not be renewed for longer has not been quiet.
        let duration = lease.duration(self.times);
        if quiet >= all_quiet(duration) && is_followed {
            self.excused_until = excuse(now, quiet, duration);
        }
        self.renewed = now;
        lease.renewed = now;
        lease.fresh_since.get_or_insert(now);
    }

    /// Records that the lease of a node was given up and has no holder. Its gateway was not asked to hold it, or cannot carry anything.
    pub fn given_up(&mut self, node: &NodeName) {
        if let Some(lease) = self.leases.get_mut(node) {
            *lease = TrackedLease { returned: lease.returned, ..TrackedLease::default() };
        }
    }

    /// Records that the lease of a node was deleted: the gateway is as if it had never had one.
    pub fn deleted(&mut self, node: &NodeName) {
        self.leases.remove(node);
    }

    /// Records that all leases were read.
    pub fn looked(&mut self) {
        self.looked = true;
    }

    /// Records which node objects exist. Those of `holders` that do not exist are absent from now on, if they were not before.
    pub fn observe_nodes<'a>(
        &mut self,
        present: &BTreeSet<NodeName>,
        holders: impl IntoIterator<Item = &'a NodeName>,
        now: Duration,
    ) {
        let before = std::mem::take(&mut self.absent_since);
        for node in holders {
            if !present.contains(node) {
                self.absent_since.insert(node.clone(), before.get(node).copied().unwrap_or(now));
            }
        }
    }

    /// Records that the leases can no longer be read: none lapses for lack of renewals that could not be seen.
    pub fn lost_sight(&mut self, now: Duration) {
        self.poll(now);
        self.blind_since.get_or_insert(now);
    }

    /// Records that the leases can be read again. A gateway that was fresh has a whole duration to be seen renewing and, before that, as
    /// long as nothing was seen (at most two durations) to reconnect to a server that was unavailable or overloaded.
    pub fn regained_sight(&mut self, now: Duration) {
        if let Some(since) = self.blind_since.take() {
            self.excused_until = excuse(now, now.saturating_sub(since), self.times.duration);
        }
    }

    /// Lets leases lapse. Returns whether any did.
    pub fn poll(&mut self, now: Duration) -> bool {
        if self.blind_since.is_some() {
            return false;
        }
        let mut lapsed = false;
        let (times, excused, quiet) = (self.times, self.excused_until, self.quiet_since());
        for lease in self.leases.values_mut() {
            if lease.fresh_since.is_some() && now >= lease.lapse(times, excused, quiet) {
                lease.fresh_since = None;
                lease.returned = true;
                lapsed = true;
            }
        }
        lapsed
    }

    /// Returns since when no gateway that had to renew has renewed.
    fn quiet_since(&self) -> Duration {
        self.renewed.max(self.excused_until)
    }

    /// Returns when time alone next changes something: a lease lapses, a gateway has been fresh for one of `delays` (the failback delays of
    /// pools), or an absent node is gone for good.
    pub fn next_deadline(&self, delays: &BTreeSet<Duration>, now: Duration) -> Option<Duration> {
        let fresh = self.leases.values().filter_map(|lease| Some((lease, lease.fresh_since?)));
        let lapses = fresh
            .clone()
            .filter(|_| self.blind_since.is_none())
            .map(|(lease, _)| lease.lapse(self.times, self.excused_until, self.quiet_since()));
        let settles = fresh.flat_map(|(_, since)| delays.iter().map(move |delay| since + *delay));
        let gone = self.absent_since.values().map(|since| *since + self.times.quarantine);
        lapses.chain(settles.chain(gone).filter(|at| *at > now)).min()
    }

    /// Returns the health that the planner gets.
    pub fn health(&mut self, now: Duration) -> Health {
        self.poll(now);
        let mut nodes: BTreeMap<NodeName, NodeHealth> = BTreeMap::new();
        for (node, lease) in &self.leases {
            let state = match lease.fresh_since {
                None if lease.renewal.is_none() => LeaseState::Never,
                Some(since) => LeaseState::Fresh {
                    since: now.saturating_sub(since),
                    returned: lease.returned,
                    proven: lease.proven,
                },
                None => LeaseState::Lapsed,
            };
            nodes.insert(node.clone(), NodeHealth { lease: state, gone: false });
        }
        for (node, since) in &self.absent_since {
            nodes.entry(node.clone()).or_default().gone = now.saturating_sub(*since) >= self.times.quarantine;
        }
        Health { nodes }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn renewal(n: u64) -> Renewal {
        lasting(n, 2000)
    }

    /// Returns a renewal by a gateway whose leases last this many ms.
    fn lasting(n: u64, duration: u64) -> Renewal {
        Renewal { renew_time: Some(n.into()), resource_version: n.to_string(), duration: ms(duration) }
    }

    fn tracker() -> (LeaseTracker, NodeName) {
        (LeaseTracker::new(LeaseTimes { duration: ms(2000), quarantine: ms(5000) }), "gw1".into())
    }

    /// Renews the lease of another gateway at these times.
    fn another_renews(tracker: &mut LeaseTracker, times: &[u64]) {
        times.iter().for_each(|at| tracker.observe(&"gw2".into(), renewal(*at), ms(*at)));
    }

    #[test]
    fn a_lease_is_never_fresh_and_then_lapsed() {
        let (mut tracker, gw) = tracker();
        assert_eq!(tracker.health(ms(0)).of(&gw).lease, LeaseState::Never);
        tracker.observe(&gw, renewal(1), ms(100));
        another_renews(&mut tracker, &[700, 1500]);
        assert_eq!(tracker.next_deadline(&BTreeSet::new(), ms(100)), Some(ms(2100)));
        let health = tracker.health(ms(2099)).of(&gw);
        assert!(health.is_fresh() && !health.is_proven(), "it may have been dead for long");
        assert!(!tracker.poll(ms(2099)));
        assert!(tracker.poll(ms(2100)));
        assert!(!tracker.poll(ms(2101)), "it lapses once");
        assert_eq!(tracker.health(ms(2101)).of(&gw).lease, LeaseState::Lapsed);
    }

    #[test]
    fn only_a_changed_lease_counts_as_a_renewal() {
        let (mut tracker, gw) = tracker();
        tracker.observe(&gw, renewal(1), ms(0));
        another_renews(&mut tracker, &[700, 1500]);
        tracker.observe(&gw, renewal(1), ms(1900));
        assert_eq!(tracker.health(ms(2000)).of(&gw).lease, LeaseState::Lapsed);
        tracker.observe(&gw, renewal(1), ms(2100));
        assert_eq!(tracker.health(ms(2100)).of(&gw).lease, LeaseState::Lapsed, "an old lease seen again");
        tracker.observe(&gw, renewal(2), ms(2200));
        assert_eq!(
            tracker.health(ms(2300)).of(&gw).lease,
            LeaseState::Fresh { since: ms(100), returned: true, proven: true }
        );
        assert!(!tracker.health(ms(2300)).of(&gw).settled(ms(500)));
    }

    #[test]
    fn a_late_renewal_does_not_hide_that_the_lease_lapsed() {
        let (mut tracker, gw) = tracker();
        tracker.observe(&gw, renewal(1), ms(0));
        another_renews(&mut tracker, &[1000, 2000]);
        tracker.observe(&gw, renewal(2), ms(3000));
        assert_eq!(
            tracker.health(ms(3000)).of(&gw).lease,
            LeaseState::Fresh { since: ms(0), returned: true, proven: true }
        );
    }

    #[test]
    fn fresh_time_grows_over_renewals_and_is_settled_at_once_the_first_time() {
        let (mut tracker, gw) = tracker();
        for n in 0..20 {
            tracker.observe(&gw, renewal(n), ms(n * 500));
        }
        let health = tracker.health(ms(9500)).of(&gw);
        assert_eq!(health.lease, LeaseState::Fresh { since: ms(9500), returned: false, proven: true });
        assert!(health.settled(ms(10_000)) && !health.fresh_for(ms(10_000)));
        assert_eq!(tracker.next_deadline(&[ms(10_000)].into(), ms(9500)), Some(ms(10_000)));
    }

    #[test]
    fn a_gateway_that_released_its_lease_may_be_asked_to_take_it_again() {
        let (mut tracker, gw) = tracker();
        tracker.observe(&gw, renewal(1), ms(0));
        tracker.looked();
        another_renews(&mut tracker, &[700, 1500]);
        assert!(tracker.poll(ms(2000)));
        tracker.given_up(&gw);
        assert!(tracker.health(ms(2001)).of(&gw).is_unasked());
        tracker.observe(&gw, renewal(2), ms(3000));
        let returned = LeaseState::Fresh { since: ms(0), returned: true, proven: true };
        assert_eq!(tracker.health(ms(3000)).of(&gw).lease, returned, "it has just been taken, and had lapsed before");
    }

    #[test]
    fn nothing_is_remembered_of_a_gateway_whose_lease_was_deleted() {
        let (mut tracker, gw) = tracker();
        tracker.observe(&gw, renewal(1), ms(0));
        tracker.given_up(&gw);
        assert_eq!(tracker.health(ms(1)).nodes.len(), 1);
        tracker.deleted(&gw);
        assert!(tracker.health(ms(2)).nodes.is_empty());
    }

    #[test]
    fn no_lease_lapses_while_the_store_is_unreachable() {
        let (mut tracker, gw) = tracker();
        tracker.observe(&gw, renewal(1), ms(0));
        tracker.lost_sight(ms(1000));
        assert!(!tracker.poll(ms(60_000)));
        tracker.regained_sight(ms(60_000));
        another_renews(&mut tracker, &[65_000]);
        assert_eq!(tracker.next_deadline(&BTreeSet::new(), ms(65_000)), Some(ms(66_000)));
        assert_eq!(
            tracker.health(ms(65_999)).of(&gw).lease,
            LeaseState::Fresh { since: ms(65_999), returned: false, proven: false }
        );
        assert!(tracker.poll(ms(66_000)), "it had its chance");
    }

    #[test]
    fn a_short_store_outage_delays_a_lapse_no_longer_than_it_lasted() {
        let (mut tracker, gw) = tracker();
        tracker.observe(&gw, renewal(1), ms(0));
        tracker.lost_sight(ms(500));
        tracker.regained_sight(ms(1500));
        tracker.observe(&gw, renewal(2), ms(1600));
        another_renews(&mut tracker, &[3000, 4000]);
        assert!(!tracker.poll(ms(4499)) && tracker.poll(ms(4500)));
    }

    #[test]
    fn a_lease_that_lapsed_before_an_outage_is_still_lapsed_after_it() {
        let (mut tracker, gw) = tracker();
        tracker.observe(&gw, renewal(1), ms(0));
        another_renews(&mut tracker, &[700, 1500]);
        assert!(tracker.poll(ms(2000)));
        tracker.lost_sight(ms(3000));
        tracker.regained_sight(ms(60_000));
        assert_eq!(tracker.health(ms(60_001)).of(&gw).lease, LeaseState::Lapsed);
    }

    #[test]
    fn quiet_leases_do_not_lapse_while_no_gateway_renews_for_a_short_time() {
        let (mut tracker, gw) = tracker();
        tracker.observe(&gw, renewal(1), ms(0));
        another_renews(&mut tracker, &[600]);
        assert_eq!(tracker.next_deadline(&BTreeSet::new(), ms(600)), Some(ms(6600)));
        let mut all_dead = tracker.clone();
        assert!(!all_dead.poll(ms(6599)) && all_dead.poll(ms(6600)));
        assert_eq!(all_dead.health(ms(6600)).nodes.values().filter(|node| node.is_fresh()).count(), 0);
        // Once one renews, the others have as long as none renewed, at most two durations, before they must renew.
        another_renews(&mut tracker, &[3600, 5000, 6000, 7000, 8000]);
        assert!(!tracker.poll(ms(8599)) && tracker.poll(ms(8600)));
        assert!(!tracker.health(ms(8600)).of(&gw).is_fresh());
    }

    #[test]
    fn skewed_leases_each_last_as_stated_and_do_not_prolong_others() {
        let (mut tracker, gw) = tracker();
        // As after the leases of all nodes were made shorter: this agent has not been restarted yet, and renews at its old pace.
        for at in [0, 3000, 6000] {
            tracker.observe(&gw, lasting(at, 9000), ms(at));
            another_renews(&mut tracker, &[at + 10, at + 600, at + 1200, at + 1800, at + 2400]);
            assert!(tracker.health(ms(at + 2999)).nodes.values().all(NodeHealth::is_fresh), "{at}");
        }
        // In one case the other gateway dies, in the other case this one.
        for at in [9000, 12_000] {
            tracker.observe(&gw, lasting(at, 9000), ms(at));
        }
        let mut other_dead = tracker.clone();
        assert!(other_dead.poll(ms(12_000)) && other_dead.health(ms(12_000)).of(&gw).is_fresh());
        another_renews(&mut tracker, &(12_010..21_000).step_by(600).collect::<Vec<_>>());
        assert!(!tracker.poll(ms(20_999)) && tracker.poll(ms(21_000)));
        assert!(!tracker.health(ms(21_000)).of(&gw).is_fresh());
    }

    #[test]
    fn skewed_leases_a_lease_that_says_less_than_the_controller_expects_lasts_as_expected() {
        let (mut tracker, gw) = tracker();
        tracker.observe(&gw, lasting(0, 1), ms(0));
        another_renews(&mut tracker, &[700, 1500]);
        assert!(!tracker.poll(ms(1999)) && tracker.poll(ms(2000)));
    }

    proptest! {
        /// The API server is unavailable for any time; before and after that, the gateways renew in time, each after its own delay. No
        /// lease lapses, except that of a gateway that does not come back, which lapses in bounded time.
        #[test]
        fn a_store_outage_is_no_evidence_of_dead_gateways(
            away in 20u64..1800, phases in prop::collection::vec(0u64..10, 1..5), back in prop::collection::vec(0u64..20, 5),
            dies in any::<bool>(),
        ) {
            let (mut tracker, mortal) = tracker();
            let (gone, returns) = (100, 100 + away);
            let mut heard = ms(0);
            // In steps of 50 ms; each gateway renews every tenth step.
            for step in 0..returns + 200 {
                let now = ms(step * 50);
                let renews = |phase: u64, back: u64| step % 10 == phase && (step < gone || step >= returns + back);
                let others = phases.iter().zip(&back).enumerate().filter(|(_, (phase, back))| renews(**phase, **back));
                let mut renewing: Vec<NodeName> = others.map(|(n, _)| format!("other{n}").as_str().into()).collect();
                if renews(0, 0) && (step < gone || !dies) {
                    renewing.push(mortal.clone());
                }
                // As the controller does: it also hears of the leader's own lease.
                if now - heard >= ms(1000) {
                    tracker.lost_sight(heard);
                }
                if renews(5, 0) || !renewing.is_empty() {
                    heard = now;
                    tracker.regained_sight(now);
                }
                for node in &renewing {
                    tracker.observe(node, renewal(step), now);
                }
                for (node, health) in &tracker.health(now).nodes {
                    prop_assert!(health.is_fresh() || dies && *node == mortal, "{node} at {now:?}, back at {returns}");
                }
            }
            prop_assert_eq!(tracker.health(ms((returns + 199) * 50)).of(&mortal).is_fresh(), !dies);
        }
    }
}
