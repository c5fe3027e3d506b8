//! Decides whether other nodes reach this node as a gateway, and whether what it carries was given to others. Pure.
//!
//! A gateway whose underlay is dead would still answer for its egress IPs on the outside, and attract replies that it cannot deliver. It is
//! cut off if no other carrier answers its probes and no node's probe has arrived for as long as it takes to call a gateway dead. Until it
//! knows that, it takes over from no other gateway: the others appear dead to it one by one, and would lose what it claims. Another gateway
//! is known to be dead once anything else, an answer or a probe, arrives later than its last answer.
//!
//! A gateway that cannot renew its lease continues as long as no other can renew either: then the store is unavailable, and nothing is
//! planned. If another carrier says that it holds its lease, the controller plans without this gateway, and gives others blocks that it
//! does not know. While the store is unavailable, leases lapse one by one: a carrier says that it holds its lease only as long as that is
//! evidence ([`terms::says_held_until`]). When the store is back, some gateways have their leases earlier than others: the controller gives
//! each a whole lease duration for that, and so does this module. The controller also plans without a gateway that was cut off: what it
//! knows is outdated until its watches are back, which takes longer than its lease.

use crate::{
    health::{ProbeState, ProbeTimes, terms},
    model::NodeName,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// How long a gateway that was replaced holds its lease before it answers again: the time to read what was planned meanwhile.
pub const READ: Duration = Duration::from_secs(5);

/// What is known about this node's reachability.
#[derive(Debug)]
pub struct Reach {
    patience: Duration,
    /// Anything that arrives this long after a gateway's last answer is later than that, whatever was in flight.
    later: Duration,
    /// Others need at least this long to find this node dead.
    quiet: Duration,
    peers: BTreeSet<NodeName>,
    asked: u64,
    /// When the counter of answered probes was last read.
    looked: Duration,
    /// The earliest time at which the last probe of others can have arrived.
    heard: Duration,
    /// When anything last arrived: an answer of another carrier, or any node's probe.
    last: Duration,
    /// Whether some other carrier answers.
    company: bool,
    /// When the lease was last held.
    held: Option<Duration>,
    /// Since when the lease has been held.
    since: Option<Duration>,
    /// Since when some other carrier has said that it holds its lease, and when one last said so.
    others: Option<(Duration, Duration)>,
    reached: bool,
    /// Whether this node may be cut off, rather than others dead.
    doubted: bool,
    replaced: bool,
}

/// What is known about this node's own lease.
#[derive(Clone, Copy, Debug)]
pub struct LeaseWord {
    /// Whether the plan uses the node as a gateway.
    pub wanted: bool,
    /// Whether the node holds the lease.
    pub held: bool,
    /// How long the lease lasts.
    pub duration: Duration,
}

impl Reach {
    /// Creates the initial state: no other node carries what this node carries, so it does not matter whether others reach it.
    pub fn new(times: ProbeTimes) -> Self {
        Self {
            patience: times.interval * times.misses,
            later: times.interval * 3 / 2,
            quiet: times.quick() * times.misses,
            peers: BTreeSet::new(),
            asked: 0,
            looked: Duration::ZERO,
            heard: Duration::ZERO,
            last: Duration::ZERO,
            company: false,
            held: None,
            since: None,
            others: None,
            reached: true,
            doubted: false,
            replaced: false,
        }
    }

    /// Sets the other carriers of what this node carries.
    pub fn set_peers(&mut self, peers: BTreeSet<NodeName>) {
        self.peers = peers;
    }

    /// Records how many probes of others this node has answered in total.
    pub fn note_asked(&mut self, asked: u64, now: Duration) {
        if asked != self.asked {
            (self.asked, self.heard) = (asked, self.looked);
        }
        self.looked = now;
    }

    /// Records the probes' results; `heard` returns when a gateway last answered. Returns whether the conclusion has changed.
    pub fn look(
        &mut self,
        probes: &BTreeMap<NodeName, ProbeState>,
        heard: impl Fn(&NodeName) -> Option<Duration>,
        now: Duration,
    ) -> bool {
        let dead = |name: &NodeName| probes.get(name) == Some(&ProbeState::Dead);
        let alone = !self.peers.is_empty() && self.peers.iter().all(dead);
        let alive = |name: &NodeName| matches!(probes.get(name), Some(ProbeState::Alive | ProbeState::Unable));
        self.company = self.peers.iter().any(alive);
        let reached = !alone || now.saturating_sub(self.heard) < self.patience;
        self.last = self.peers.iter().filter_map(&heard).fold(self.heard, Duration::max);
        let recently = |name: &NodeName| heard(name).is_some_and(|answered| self.last < answered + self.later);
        let doubted = self.peers.iter().any(|name| dead(name) && recently(name));
        let before = (std::mem::replace(&mut self.reached, reached), std::mem::replace(&mut self.doubted, doubted));
        if before.0 != reached {
            self.log();
        }
        before != (reached, doubted)
    }

    /// Records this node's lease and the gateways that hold theirs. Returns whether the conclusion has changed. A starting agent has one
    /// lease duration to get its lease: its predecessor may have held it a moment ago.
    pub fn compare(&mut self, lease: LeaseWord, holding: &BTreeSet<NodeName>, now: Duration) -> bool {
        if lease.held || !lease.wanted {
            self.held = Some(now);
        }
        self.since = self.since.filter(|_| lease.held).or(lease.held.then_some(now));
        let others = self.peers.iter().any(|peer| holding.contains(peer));
        // If no carrier has said so for this long, the controller excuses all.
        let excused = terms::until_all_quiet(lease.duration) + self.patience;
        self.others = self.others.filter(|(_, last)| now <= *last + excused);
        if others {
            self.others = Some((self.others.map_or(now, |(since, _)| since), now));
        }
        let lost = now > self.held.map_or(lease.duration, |held| held + self.patience);
        // If a carrier has said so only since after this time, the store was unavailable, and is back for some before others.
        let quiet = self.held.unwrap_or(lease.duration).saturating_sub(terms::quiet_before_end(lease.duration));
        let long = self.others.is_some_and(|(since, _)| since <= quiet || now > since + lease.duration);
        let passed_by = others && long;
        let replaced = match self.since {
            _ if !lease.wanted => false,
            _ if lost && (!self.reached || passed_by) => true,
            Some(since) => self.replaced && now < since + READ,
            // If no carrier holds a lease, nothing was planned. While none answers, that is not known.
            None => self.replaced && (self.others.is_some() || !(lost && self.company)),
        };
        let changed = std::mem::replace(&mut self.replaced, replaced) != replaced;
        if changed {
            self.log();
        }
        changed
    }

    /// Returns whether this node may answer for egress IPs.
    pub fn is_reached(&self) -> bool {
        self.reached && !self.replaced
    }

    /// Returns whether this node may be cut off, rather than the others dead.
    pub fn is_doubted(&self) -> bool {
        self.doubted
    }

    /// Returns whether anything has arrived recently. If not, this node may be cut off without knowing it yet, and another carrier may have
    /// taken over what it claims. If no node has probed it yet, an announcement waits for the next probe.
    pub fn hears(&self, now: Duration) -> bool {
        self.peers.is_empty() || now < self.last + self.quiet
    }

    /// Logs why this node may not answer.
    fn log(&self) {
        let why = match (self.reached, self.replaced) {
            (false, _) => "no other gateway answers, and no node probes this one",
            (_, true) => "it cannot renew its lease, and other gateways can",
            _ => return,
        };
        tracing::warn!("this node answers for no egress IP: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets the node have been probed this often, the last time now.
    fn note_asked(reach: &mut Reach, asked: u64, now: Duration) {
        reach.note_asked(reach.asked, now);
        reach.note_asked(asked, now);
    }

    fn update(reach: &mut Reach, probes: &BTreeMap<NodeName, ProbeState>, asked: u64, now: Duration) -> bool {
        note_asked(reach, asked, now);
        let before = reach.reached;
        reach.look(probes, |_| None, now);
        reach.reached != before
    }

    #[test]
    fn gateway_takes_over_once_something_arrives_after_the_dead_peers_last_answer() {
        let ms = Duration::from_millis;
        let mut reach = Reach::new(ProbeTimes::default());
        reach.set_peers(["a".into(), "b".into()].into());
        let probes = |a, b| BTreeMap::from([("a".into(), a), ("b".into(), b)]);
        let (alive, dead) = (ProbeState::Alive, ProbeState::Dead);
        let heard = |a, b| move |name: &NodeName| Some(ms(if *name == "a".into() { a } else { b }));
        note_asked(&mut reach, 1, ms(1_010));
        assert!(!reach.look(&probes(alive, alive), heard(900, 1_000), ms(1_150)) && !reach.is_doubted());
        assert!(reach.hears(ms(1_084)) && !reach.hears(ms(1_085)), "it no longer announces what it has");
        // Cut off at 1,000: the others appear dead one by one.
        assert!(reach.look(&probes(dead, alive), heard(900, 1_000), ms(1_200)) && reach.is_doubted());
        assert!(!reach.look(&probes(dead, dead), heard(900, 1_000), ms(1_300)) && reach.is_doubted());
        assert!(reach.look(&probes(dead, dead), heard(900, 1_000), ms(1_310)) && !reach.is_reached());
        // In this case, a died.
        assert!(
            reach.look(&probes(dead, alive), heard(900, 1_100), ms(1_400)) && !reach.is_doubted() && reach.is_reached()
        );
        // Both died, and a source node probes.
        assert!(reach.look(&probes(dead, dead), heard(900, 1_100), ms(1_400)) && reach.is_doubted());
        note_asked(&mut reach, 2, ms(1_249));
        reach.look(&probes(dead, dead), heard(900, 1_100), ms(1_400));
        assert!(reach.is_doubted(), "it was in flight");
        note_asked(&mut reach, 3, ms(1_410));
        assert!(reach.look(&probes(dead, dead), heard(900, 1_100), ms(1_410)) && !reach.is_doubted());
    }

    #[test]
    fn probe_counted_between_two_reads_may_be_as_old_as_the_first_read() {
        let ms = Duration::from_millis;
        let mut reach = Reach::new(ProbeTimes::default());
        reach.set_peers(["a".into()].into());
        let dead = BTreeMap::from([("a".into(), ProbeState::Dead)]);
        let mut look = |asked, now| {
            reach.note_asked(asked, ms(now));
            reach.look(&dead, |_| Some(ms(900)), ms(now));
            reach.is_doubted()
        };
        assert!(look(0, 1_040) && look(1, 1_090), "it may have come at 1,040");
        assert!(!look(2, 1_100));
    }

    #[test]
    fn gateway_is_cut_off_when_no_carrier_answers_and_no_probe_arrives() {
        let ms = Duration::from_millis;
        let mut reach = Reach::new(ProbeTimes::default());
        let probes = |a, b| BTreeMap::from([("a".into(), a), ("b".into(), b)]);
        let (alive, dead) = (ProbeState::Alive, ProbeState::Dead);
        assert!(
            !update(&mut reach, &probes(dead, dead), 0, ms(5000)) && reach.is_reached(),
            "no other node carries anything"
        );
        reach.set_peers(["a".into(), "b".into()].into());
        assert!(!update(&mut reach, &probes(alive, dead), 0, ms(6000)) && reach.is_reached());
        assert!(!update(&mut reach, &probes(dead, dead), 1, ms(7000)) && reach.is_reached(), "a source node probes");
        assert!(!update(&mut reach, &probes(dead, dead), 1, ms(7299)));
        assert!(update(&mut reach, &probes(dead, dead), 1, ms(7300)) && !reach.is_reached());
        assert!(update(&mut reach, &probes(dead, ProbeState::Unable), 1, ms(7400)) && reach.is_reached());
    }

    #[test]
    fn gateway_that_cannot_renew_continues_unless_others_renew() {
        let ms = Duration::from_millis;
        let mut reach = Reach::new(ProbeTimes::default());
        reach.set_peers(["a".into()].into());
        update(&mut reach, &BTreeMap::from([("a".into(), ProbeState::Alive)]), 0, ms(0));
        let (all, none) = (BTreeSet::from(["a".into()]), BTreeSet::new());
        let lease = |held| LeaseWord { wanted: true, held, duration: ms(15_000) };
        assert!(!reach.compare(lease(false), &all, ms(100)), "it has just started");
        for later in (1_000..=15_000).step_by(1_000) {
            assert!(!reach.compare(lease(false), &all, ms(later)));
        }
        assert!(reach.compare(lease(false), &all, ms(15_001)) && !reach.is_reached());
        assert!(!reach.compare(lease(true), &all, ms(16_000)), "it does not know yet what was planned");
        assert!(!reach.compare(lease(true), &all, ms(20_999)));
        assert!(reach.compare(lease(true), &all, ms(21_000)) && reach.is_reached());
        assert!(!reach.compare(lease(false), &none, ms(60_000)), "nobody can");
        assert!(
            !reach.compare(lease(false), &all, ms(60_001)),
            "one can again: this node has a lease's time to follow"
        );
        for later in (61_001..=75_001).step_by(1_000) {
            assert!(!reach.compare(lease(false), &all, ms(later)));
        }
        assert!(reach.compare(lease(false), &all, ms(75_002)), "it does not");
        assert!(!reach.compare(lease(false), &none, ms(76_802)), "the other one is late with its renewal");
        assert!(reach.compare(lease(false), &none, ms(76_803)) && reach.is_reached(), "it no longer can");
        let given_up = LeaseWord { wanted: false, ..lease(false) };
        for later in (76_804..=91_804).step_by(1_000) {
            assert!(!reach.compare(lease(false), &all, ms(later)));
        }
        assert!(reach.compare(lease(false), &all, ms(91_805)) && !reach.is_reached());
        assert!(reach.compare(given_up, &all, ms(92_000)) && reach.is_reached(), "the plan does not use it");
    }

    /// Simulates two gateways that renew every 5 s, or try again every 1.2 s until they can. The first one begins at `phase`. Returns the
    /// times at which it did not answer, in ms.
    fn silent(phase: u64, end: u64, first_can: impl Fn(u64) -> bool, other_can: impl Fn(u64) -> bool) -> Vec<u64> {
        let ms = Duration::from_millis;
        let duration = ms(15_000);
        let mut reach = Reach::new(ProbeTimes::default());
        reach.set_peers(["a".into()].into());
        update(&mut reach, &BTreeMap::from([("a".into(), ProbeState::Alive)]), 0, ms(0));
        let holds = terms::counted(duration);
        let ([mut own, mut others], mut next) = ([holds; 2], [phase, 0]);
        let mut silent = Vec::new();
        for now in (0..end).step_by(100) {
            let renew = |next: &mut u64, until: &mut Duration, can: bool| {
                if now >= *next {
                    *next = now + if can { 5_000 } else { 1_200 };
                    *until = if can { ms(now) + holds } else { *until };
                }
            };
            renew(&mut next[0], &mut own, first_can(now));
            renew(&mut next[1], &mut others, other_can(now));
            let at = ms(now);
            let holding = (at < terms::says_held_until(others, duration)).then(|| "a".into()).into_iter().collect();
            reach.compare(LeaseWord { wanted: true, held: at < own, duration }, &holding, at);
            silent.extend((!reach.is_reached()).then_some(now));
        }
        silent
    }

    #[test]
    fn lapse_order_gateway_that_lapses_first_continues_while_none_can_renew() {
        for phase in (0..5_000).step_by(700) {
            for away in (5_000..40_000).step_by(1_900) {
                for begin in (60_000..65_000).step_by(1_100) {
                    let can = |now| !(begin..begin + away).contains(&now);
                    assert_eq!(silent(phase, 180_000, can, can), [] as [u64; 0], "{phase} {begin} {away}");
                }
            }
            let silent = silent(phase, 120_000, |now| now < 60_000, |_| true);
            assert!((68_500..=73_800).contains(&silent[0]), "the store is away for this one only: {}", silent[0]);
            assert_eq!(silent.last(), Some(&119_900));
        }
    }

    #[test]
    fn a_gateway_cut_off_for_longer_than_its_lease_reads_the_plan_before_it_answers() {
        let ms = Duration::from_millis;
        let mut reach = Reach::new(ProbeTimes::default());
        reach.set_peers(["a".into()].into());
        let probes = |state| BTreeMap::from([("a".into(), state)]);
        let (all, none) = (BTreeSet::from(["a".into()]), BTreeSet::new());
        let lease = |held| LeaseWord { wanted: true, held, duration: ms(15_000) };
        update(&mut reach, &probes(ProbeState::Alive), 1, ms(1_000));
        reach.compare(lease(true), &all, ms(1_000));
        assert!(update(&mut reach, &probes(ProbeState::Dead), 1, ms(2_000)) && !reach.is_reached());
        assert!(reach.compare(lease(false), &none, ms(20_000)));
        // A source node probes again before another carrier has answered.
        assert!(update(&mut reach, &probes(ProbeState::Dead), 2, ms(30_000)) && !reach.is_reached());
        reach.compare(lease(false), &none, ms(30_000));
        assert!(!reach.is_reached());
        update(&mut reach, &probes(ProbeState::Alive), 3, ms(30_200));
        reach.compare(lease(false), &all, ms(30_200));
        assert!(!reach.is_reached(), "others have held theirs all the time");
        reach.compare(lease(true), &all, ms(30_300));
        assert!(!reach.is_reached());
        reach.compare(lease(true), &all, ms(35_300));
        assert!(reach.is_reached());
        // The store is unavailable, and the others die: a node that is probed continues.
        reach.compare(lease(false), &none, ms(60_000));
        update(&mut reach, &probes(ProbeState::Dead), 4, ms(61_000));
        reach.compare(lease(false), &none, ms(61_000));
        assert!(reach.is_reached());
    }
}
