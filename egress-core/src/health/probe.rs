//! Judges one gateway by the answers to probes through the tunnel.

use std::collections::BTreeMap;
use std::time::Duration;

/// How often to probe, and how many results decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeTimes {
    /// The time between two probes to a gateway that answers.
    pub interval: Duration,
    /// How many missed probes in a row mean dead.
    pub misses: u32,
    /// How many answered probes in a row mean alive again.
    pub replies: u32,
}

impl Default for ProbeTimes {
    fn default() -> Self {
        Self { interval: Duration::from_millis(100), misses: 3, replies: 3 }
    }
}

impl ProbeTimes {
    /// Returns the pace of doubt: the time between probes of a gateway that has missed one, until it answers or is dead. By default it is
    /// dead 75 ms after the first missed probe, so that the first retransmission of TCP (200 ms, `TCP_RTO_MIN`) finds another carrier.
    pub fn quick(&self) -> Duration {
        self.interval / 4
    }
}

/// The conclusion from the probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeState {
    /// Nothing yet. New flows may use the gateway.
    Unknown,
    /// It answers.
    Alive,
    /// It does not answer. New flows avoid it.
    Dead,
    /// It answers, and says that it is not able to carry egress IPs. Packets avoid it where there is another one.
    Unable,
}

/// A change of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeTransition {
    /// It answers.
    Alive,
    /// It stopped answering.
    Dead,
}

/// The probes of one gateway.
#[derive(Clone, Debug)]
pub struct ProbeTracker {
    times: ProbeTimes,
    state: ProbeState,
    /// Probes sent and not answered: when, and whether each counts as missed already. Bounded by [`ProbeTracker::REMEMBERED`].
    pending: BTreeMap<u64, (Duration, bool)>,
    missed: u32,
    answered: u32,
    round_trip: Option<Duration>,
}

impl ProbeTracker {
    /// How many unanswered probes are remembered: answers to older ones are ignored.
    pub const REMEMBERED: usize = 16;
    /// An answer counts as missed after this many times the last round trip.
    const ROUND_TRIPS: u32 = 3;

    /// Creates a tracker of probes of which none was sent yet.
    pub fn new(times: ProbeTimes) -> Self {
        Self { times, state: ProbeState::Unknown, pending: BTreeMap::new(), missed: 0, answered: 0, round_trip: None }
    }

    /// Returns the conclusion from the probes.
    pub fn state(&self) -> ProbeState {
        self.state
    }

    /// Returns whether a probe was missed since the last answer.
    pub fn in_doubt(&self) -> bool {
        self.missed > 0
    }

    /// Returns how long until the next probe.
    pub fn interval(&self) -> Duration {
        if self.in_doubt() { self.patience() } else { self.times.interval }
    }

    /// Returns how long until a probe counts as missed. A gateway that has never answered, or is dead, has the whole interval.
    fn patience(&self) -> Duration {
        match self.round_trip {
            Some(last) if self.state == ProbeState::Alive => {
                (last * Self::ROUND_TRIPS).clamp(self.times.quick(), self.times.interval)
            }
            _ => self.times.interval,
        }
    }

    /// Returns the last round trip.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    /// Records that a probe was sent. Sequence numbers are never used twice.
    pub fn on_sent(&mut self, seq: u64, now: Duration) {
        self.pending.insert(seq, (now, false));
        while self.pending.len() > Self::REMEMBERED {
            self.pending.pop_first();
        }
    }

    /// Records a reply. A late reply shows that the gateway is alive, but does not count towards its return. Replies to probes that were
    /// not sent, or were answered already, are ignored.
    pub fn on_reply(&mut self, seq: u64, now: Duration) -> Option<ProbeTransition> {
        let (sent, missed) = self.pending.remove(&seq)?;
        self.round_trip = Some(now.saturating_sub(sent));
        self.missed = 0;
        if !missed {
            self.answered = self.answered.saturating_add(1);
        }
        let alive = match self.state {
            ProbeState::Unknown => true,
            // The tracker only knows whether probes are answered.
            ProbeState::Alive | ProbeState::Unable => false,
            ProbeState::Dead => self.answered >= self.times.replies,
        };
        alive.then(|| {
            self.state = ProbeState::Alive;
            ProbeTransition::Alive
        })
    }

    /// Counts the probes that were not answered in time.
    pub fn poll(&mut self, now: Duration) -> Option<ProbeTransition> {
        let patience = self.patience();
        for (sent, missed) in self.pending.values_mut() {
            if !*missed && now.saturating_sub(*sent) >= patience {
                *missed = true;
                self.missed = self.missed.saturating_add(1);
                self.answered = 0;
            }
        }
        (self.missed >= self.times.misses && self.state != ProbeState::Dead).then(|| {
            self.state = ProbeState::Dead;
            ProbeTransition::Dead
        })
    }

    /// Returns when the next probe will be missed, if no reply comes.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.pending.values().filter(|(_, missed)| !missed).map(|(sent, _)| *sent + self.patience()).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Sends probe `n` at n x 100 ms; if `answered` holds for it, the reply comes 1 ms later. Returns all transitions.
    fn run(
        tracker: &mut ProbeTracker,
        probes: std::ops::Range<u64>,
        answered: impl Fn(u64) -> bool,
    ) -> Vec<(u64, ProbeTransition)> {
        let mut seen = Vec::new();
        for n in probes {
            seen.extend(tracker.poll(ms(n * 100)).map(|t| (n * 100, t)));
            tracker.on_sent(n, ms(n * 100));
            if answered(n) {
                seen.extend(tracker.on_reply(n, ms(n * 100 + 1)).map(|t| (n * 100 + 1, t)));
            }
        }
        seen
    }

    #[test]
    fn three_missed_probes_mean_dead_and_three_replies_mean_alive() {
        let mut tracker = ProbeTracker::new(ProbeTimes::default());
        assert_eq!(tracker.state(), ProbeState::Unknown);
        let seen = run(&mut tracker, 0..30, |n| !(5..20).contains(&n));
        let expected = [(1, ProbeTransition::Alive), (800, ProbeTransition::Dead), (2201, ProbeTransition::Alive)];
        assert_eq!(seen, expected);
        assert_eq!(tracker.round_trip(), Some(ms(1)));
    }

    /// Lets answers take `rtt` until 500 ms, and then stop. Returns when the gateway is dead.
    fn dies(rtt: Duration) -> Duration {
        let mut tracker = ProbeTracker::new(ProbeTimes::default());
        let (mut seq, mut sent) = (0, ms(0));
        loop {
            tracker.on_sent(seq, sent);
            if sent < ms(500) {
                tracker.on_reply(seq, sent + rtt);
            }
            if let Some(deadline) = tracker.next_deadline()
                && tracker.poll(deadline) == Some(ProbeTransition::Dead)
            {
                return deadline;
            }
            (seq, sent) = (seq + 1, sent + tracker.interval());
        }
    }

    #[test]
    fn a_gateway_in_doubt_is_asked_at_four_times_the_pace() {
        assert_eq!(dies(ms(1)), ms(575), "the first answer is missing at 500, known 25 ms later, as is each after it");
    }

    #[test]
    fn a_gateway_that_is_far_away_has_longer_to_answer() {
        assert_eq!((dies(ms(20)), dies(ms(50))), (ms(680), ms(800)));
    }

    #[test]
    fn a_gateway_that_never_answers_dies_once() {
        let mut tracker = ProbeTracker::new(ProbeTimes::default());
        assert_eq!(run(&mut tracker, 0..100, |_| false), [(300, ProbeTransition::Dead)]);
    }

    #[test]
    fn two_missed_probes_of_three_cause_no_flapping() {
        let mut tracker = ProbeTracker::new(ProbeTimes::default());
        assert_eq!(run(&mut tracker, 0..99, |n| n % 3 == 0), [(1, ProbeTransition::Alive)]);
        let mut tracker = ProbeTracker::new(ProbeTimes::default());
        run(&mut tracker, 0..10, |_| false);
        assert_eq!(run(&mut tracker, 10..99, |n| n % 3 != 0), [], "it has to answer three in a row");
    }

    #[test]
    fn late_replies_keep_alive_but_do_not_revive() {
        let mut tracker = ProbeTracker::new(ProbeTimes::default());
        for n in 0..20 {
            assert_eq!(tracker.poll(ms(n * 100)), None);
            tracker.on_sent(n, ms(n * 100));
            if n >= 2 {
                tracker.on_reply(n - 2, ms(n * 100 + 50));
            }
        }
        assert_eq!(tracker.state(), ProbeState::Alive);
        assert_eq!(tracker.round_trip(), Some(ms(250)));
    }

    #[test]
    fn unknown_replies_are_ignored_and_memory_is_bounded() {
        let mut tracker = ProbeTracker::new(ProbeTimes::default());
        assert_eq!(tracker.on_reply(7, ms(0)), None);
        for n in 0..1000 {
            tracker.on_sent(n, ms(n));
        }
        assert_eq!(tracker.pending.len(), ProbeTracker::REMEMBERED);
        assert_eq!(tracker.on_reply(1, ms(1000)), None);
        assert_eq!(tracker.on_reply(999, ms(1000)), Some(ProbeTransition::Alive));
        assert_eq!(tracker.on_reply(999, ms(1001)), None, "once");
        assert_eq!(tracker.round_trip(), Some(ms(1)));
    }
}
