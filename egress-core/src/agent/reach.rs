//! Whether anybody reaches this node as a gateway, and whether others were given what it has. Pure.
//!
//! A gateway whose underlay is dead would go on answering for its egress IPs where the outside is, and lead replies into nowhere. It is cut
//! off where no other carrier answers its probes and no node's probe has come in for as long as it takes to call a gateway dead. Before it
//! knows that, it takes over from nobody: the others are dead to it one by one, and would be without what it claims. That another one is
//! dead shows what comes in later than its last answer, be it somebody's answer or probe.
//!
//! One that cannot renew its lease goes on, as long as nobody else can either: then the store is away, and nobody plans. Where another
//! carrier says that it holds its own, the controller plans without this one, and gives others blocks that it does not know. When the store
//! is back, some have their leases earlier than others: the controller gives each a whole duration for it, and so does this. It also plans
//! without one that was cut off: what that one knows is old until its watches are back, which takes longer than its lease.

use crate::{
    health::{ProbeState, ProbeTimes},
    model::NodeName,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// For how long a gateway that was replaced holds its lease before it answers again: it reads what was planned meanwhile.
pub const READ: Duration = Duration::from_secs(5);

/// What is known of it.
#[derive(Debug)]
pub struct Reach {
    patience: Duration,
    /// What comes in so long after a gateway's last answer is later than that, whatever was under way.
    later: Duration,
    /// Others need at least so long to find this node dead.
    quiet: Duration,
    peers: BTreeSet<NodeName>,
    asked: u64,
    /// When the counter of answered probes was read last.
    looked: Duration,
    /// The earliest time at which the last probe of others can have come in.
    heard: Duration,
    /// When anything came in last: an answer of another carrier, or anybody's probe.
    last: Duration,
    /// Some other carrier answers.
    company: bool,
    /// When the lease was held last.
    held: Option<Duration>,
    /// Since when it is held.
    since: Option<Duration>,
    /// Since when some other carrier holds its own.
    others: Option<Duration>,
    reached: bool,
    /// It may be cut off, and not others dead.
    doubted: bool,
    replaced: bool,
}

/// What is known of this node's own lease.
#[derive(Clone, Copy, Debug)]
pub struct LeaseWord {
    /// The plan counts on the node as a gateway.
    pub wanted: bool,
    /// The node holds it.
    pub held: bool,
    /// How long it lasts.
    pub duration: Duration,
}

impl Reach {
    /// Nobody else carries what this node carries: it does not matter who reaches it.
    pub fn new(times: ProbeTimes) -> Self {
        let (patience, later, quiet) =
            (times.interval * times.misses, times.interval * 3 / 2, times.quick() * times.misses);
        let (peers, asked) = (BTreeSet::new(), 0);
        let [looked, heard, last] = [Duration::ZERO; 3];
        let (company, held, since, others) = (false, None, None, None);
        let (reached, doubted, replaced) = (true, false, false);
        Self {
            patience,
            later,
            quiet,
            peers,
            asked,
            looked,
            heard,
            last,
            company,
            held,
            since,
            others,
            reached,
            doubted,
            replaced,
        }
    }

    /// These are the other carriers of what this node carries.
    pub fn set_peers(&mut self, peers: BTreeSet<NodeName>) {
        self.peers = peers;
    }

    /// Takes note of how many probes of others this node has answered in all.
    pub fn note_asked(&mut self, asked: u64, now: Duration) {
        if asked != self.asked {
            (self.asked, self.heard) = (asked, self.looked);
        }
        self.looked = now;
    }

    /// Takes note of what the probes say; `heard` says when a gateway answered last. Whether it is another answer now.
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
            self.tell();
        }
        before != (reached, doubted)
    }

    /// Takes note of this node's lease, and of the gateways that hold theirs. Whether it is another answer now. An agent that starts has as
    /// long as a lease lasts to get it: its predecessor may have held it a moment ago.
    pub fn compare(&mut self, lease: LeaseWord, holding: &BTreeSet<NodeName>, now: Duration) -> bool {
        if lease.held || !lease.wanted {
            self.held = Some(now);
        }
        self.since = self.since.filter(|_| lease.held).or(lease.held.then_some(now));
        let others = self.peers.iter().any(|peer| holding.contains(peer));
        self.others = self.others.filter(|_| others).or(others.then_some(now));
        let end = self.held.map_or(lease.duration, |held| held + self.patience);
        let lost = now > end;
        // Who holds a lease that it took later than that was without one as well: the store was away, and is back for some before others.
        let passed_by = self.others.is_some_and(|since| since <= end || now > since + lease.duration);
        let replaced = match self.since {
            _ if !lease.wanted => false,
            _ if lost && (!self.reached || passed_by) => true,
            Some(since) => self.replaced && now < since + READ,
            // Nobody holds any: nothing was planned. As long as nobody answers, that is not known.
            None => self.replaced && (others || !(lost && self.company)),
        };
        let changed = std::mem::replace(&mut self.replaced, replaced) != replaced;
        if changed {
            self.tell();
        }
        changed
    }

    /// Whether this node may answer for egress IPs.
    pub fn is_reached(&self) -> bool {
        self.reached && !self.replaced
    }

    /// Whether it may be this node that is cut off, and not the others that are dead.
    pub fn is_doubted(&self) -> bool {
        self.doubted
    }

    /// Whether anything came in of late. Where nothing did, this node may be the one that is cut off, though it does not know that yet: what it
    /// claims, another carrier may have taken over. If nobody has asked yet, an announcement waits for the next probe.
    pub fn hears(&self, now: Duration) -> bool {
        self.peers.is_empty() || now < self.last + self.quiet
    }

    /// Why it may not, in the log.
    fn tell(&self) {
        let why = match (self.reached, self.replaced) {
            (false, _) => "no other gateway answers, and no node asks this one",
            (_, true) => "it cannot renew its lease, and other gateways can",
            _ => return,
        };
        tracing::warn!("this node answers for no egress IP: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It was asked so often, the last time now.
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
    fn a_gateway_takes_over_once_something_came_in_that_is_later_than_the_last_answer_of_the_dead() {
        let ms = Duration::from_millis;
        let mut reach = Reach::new(ProbeTimes::default());
        reach.set_peers(["a".into(), "b".into()].into());
        let probes = |a, b| BTreeMap::from([("a".into(), a), ("b".into(), b)]);
        let (alive, dead) = (ProbeState::Alive, ProbeState::Dead);
        let heard = |a, b| move |name: &NodeName| Some(ms(if *name == "a".into() { a } else { b }));
        note_asked(&mut reach, 1, ms(1_010));
        assert!(!reach.look(&probes(alive, alive), heard(900, 1_000), ms(1_150)) && !reach.is_doubted());
        assert!(reach.hears(ms(1_084)) && !reach.hears(ms(1_085)), "it reminds nobody of what it has");
        // Cut off at 1,000: one after the other is dead to it.
        assert!(reach.look(&probes(dead, alive), heard(900, 1_000), ms(1_200)) && reach.is_doubted());
        assert!(!reach.look(&probes(dead, dead), heard(900, 1_000), ms(1_300)) && reach.is_doubted());
        assert!(reach.look(&probes(dead, dead), heard(900, 1_000), ms(1_310)) && !reach.is_reached());
        // It is a that died.
        assert!(
            reach.look(&probes(dead, alive), heard(900, 1_100), ms(1_400)) && !reach.is_doubted() && reach.is_reached()
        );
        // Both died, and a source node asks.
        assert!(reach.look(&probes(dead, dead), heard(900, 1_100), ms(1_400)) && reach.is_doubted());
        note_asked(&mut reach, 2, ms(1_249));
        reach.look(&probes(dead, dead), heard(900, 1_100), ms(1_400));
        assert!(reach.is_doubted(), "it was under way");
        note_asked(&mut reach, 3, ms(1_410));
        assert!(reach.look(&probes(dead, dead), heard(900, 1_100), ms(1_410)) && !reach.is_doubted());
    }

    #[test]
    fn a_probe_that_came_in_between_two_looks_may_be_as_old_as_the_first() {
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
    fn a_gateway_is_cut_off_when_no_carrier_answers_and_nobody_asks() {
        let ms = Duration::from_millis;
        let mut reach = Reach::new(ProbeTimes::default());
        let probes = |a, b| BTreeMap::from([("a".into(), a), ("b".into(), b)]);
        let (alive, dead) = (ProbeState::Alive, ProbeState::Dead);
        assert!(
            !update(&mut reach, &probes(dead, dead), 0, ms(5000)) && reach.is_reached(),
            "nobody else carries anything"
        );
        reach.set_peers(["a".into(), "b".into()].into());
        assert!(!update(&mut reach, &probes(alive, dead), 0, ms(6000)) && reach.is_reached());
        assert!(!update(&mut reach, &probes(dead, dead), 1, ms(7000)) && reach.is_reached(), "a source node asks");
        assert!(!update(&mut reach, &probes(dead, dead), 1, ms(7299)));
        assert!(update(&mut reach, &probes(dead, dead), 1, ms(7300)) && !reach.is_reached());
        assert!(update(&mut reach, &probes(dead, ProbeState::Unable), 1, ms(7400)) && reach.is_reached());
    }

    #[test]
    fn a_gateway_that_cannot_renew_its_lease_goes_on_unless_others_renew_theirs() {
        let ms = Duration::from_millis;
        let mut reach = Reach::new(ProbeTimes::default());
        reach.set_peers(["a".into()].into());
        update(&mut reach, &BTreeMap::from([("a".into(), ProbeState::Alive)]), 0, ms(0));
        let (all, none) = (BTreeSet::from(["a".into()]), BTreeSet::new());
        let lease = |held| LeaseWord { wanted: true, held, duration: ms(15_000) };
        assert!(!reach.compare(lease(false), &all, ms(15_000)), "it has just started");
        assert!(reach.compare(lease(false), &all, ms(15_001)) && !reach.is_reached());
        assert!(!reach.compare(lease(true), &all, ms(16_000)), "it does not know yet what was planned");
        assert!(!reach.compare(lease(true), &all, ms(20_999)));
        assert!(reach.compare(lease(true), &all, ms(21_000)) && reach.is_reached());
        assert!(!reach.compare(lease(false), &none, ms(60_000)), "nobody can");
        assert!(
            !reach.compare(lease(false), &all, ms(60_001)),
            "one can again: this node has a lease's time to follow"
        );
        assert!(!reach.compare(lease(false), &all, ms(75_001)));
        assert!(reach.compare(lease(false), &all, ms(75_002)), "it does not");
        assert!(reach.compare(lease(false), &none, ms(75_003)) && reach.is_reached(), "and cannot any more");
        let given_up = LeaseWord { wanted: false, ..lease(false) };
        reach.compare(lease(false), &all, ms(75_004));
        assert!(reach.compare(lease(false), &all, ms(90_005)) && !reach.is_reached());
        assert!(reach.compare(given_up, &all, ms(91_000)) && reach.is_reached(), "nobody asks for it");
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
        // A source node asks again before another carrier has answered.
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
        // The store is away, and the others die: who is asked goes on.
        reach.compare(lease(false), &none, ms(60_000));
        update(&mut reach, &probes(ProbeState::Dead), 4, ms(61_000));
        reach.compare(lease(false), &none, ms(61_000));
        assert!(reach.is_reached());
    }
}
