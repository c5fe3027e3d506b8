//! Chooses the transport to one gateway by what probes of each transport say.
//!
//! Each round has one number. The transport in force is probed in every round, the others now and then, and all of them as soon as anything
//! is in doubt. The gateway is alive as long as any transport answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{ProbeState, ProbeTimes, ProbeTracker, ProbeTransition};

/// The form of a probe: a transport (numbered from the one that always works to the best), and the packet's family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Form {
    /// The transport.
    pub transport: u32,
    /// Whether the packet is IPv6.
    pub ipv6: bool,
}

/// Transports that are not in force are probed in one of this many rounds.
const REST: u64 = 10;

/// The probes of one gateway.
#[derive(Clone, Debug)]
pub struct TransportChooser {
    times: ProbeTimes,
    forms: BTreeMap<Form, ProbeTracker>,
    overall: ProbeTracker,
    current: u32,
    rounds: u64,
}

impl TransportChooser {
    /// Creates a chooser that knows nothing yet: the first of the transports is in force.
    pub fn new(times: ProbeTimes, forms: &BTreeSet<Form>) -> Self {
        let overall = ProbeTracker::new(times);
        let mut new = Self { times, forms: BTreeMap::new(), overall, current: 0, rounds: 0 };
        new.set(forms);
        new
    }

    /// Uses these forms from now on, and keeps what is known about those that stay. Returns whether the transport in force has changed.
    pub fn set(&mut self, forms: &BTreeSet<Form>) -> bool {
        self.forms.retain(|form, _| forms.contains(form));
        for form in forms {
            self.forms.entry(*form).or_insert_with(|| ProbeTracker::new(self.times));
        }
        self.choose()
    }

    /// Returns the state of the gateway, over any transport.
    pub fn state(&self) -> ProbeState {
        self.overall.state()
    }

    /// Returns how long until the next round.
    pub fn interval(&self) -> Duration {
        self.overall.interval()
    }

    /// Returns whether a probe by any transport was missed since the last answer by any.
    pub fn in_doubt(&self) -> bool {
        self.overall.in_doubt()
    }

    /// Returns when the next probe will be missed, if no reply comes by any transport.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.overall.next_deadline()
    }

    /// Returns the last round trip, over any transport.
    pub fn round_trip(&self) -> Option<Duration> {
        self.overall.round_trip()
    }

    /// Returns the transport in force.
    pub fn current(&self) -> u32 {
        self.current
    }

    /// Returns the state of a transport: the worst of its forms. `None` if it is not probed.
    pub fn of(&self, transport: u32) -> Option<ProbeState> {
        let worst = |state: ProbeState| match state {
            ProbeState::Dead => 0,
            ProbeState::Unknown => 1,
            ProbeState::Alive | ProbeState::Unable => 2,
        };
        self.trackers(transport).map(ProbeTracker::state).min_by_key(|state| worst(*state))
    }

    /// Begins a round with this number, which was never used before. Returns the forms to send in it.
    pub fn round(&mut self, seq: u64, now: Duration) -> Vec<Form> {
        self.rounds += 1;
        let unknown = self.forms.values().any(|tracker| tracker.state() == ProbeState::Unknown);
        let doubtful = self.trackers(self.current).any(ProbeTracker::in_doubt);
        let all = unknown || doubtful || self.rounds.is_multiple_of(REST);
        self.overall.on_sent(seq, now);
        let due: Vec<Form> = self.forms.keys().filter(|form| all || form.transport == self.current).copied().collect();
        for form in &due {
            if let Some(tracker) = self.forms.get_mut(form) {
                tracker.on_sent(seq, now);
            }
        }
        due
    }

    /// Processes a reply. Returns whether the gateway is alive again, and whether the transport in force has changed.
    pub fn on_reply(&mut self, form: Form, seq: u64, now: Duration) -> (Option<ProbeTransition>, bool) {
        let Some(tracker) = self.forms.get_mut(&form) else { return (None, false) };
        tracker.on_reply(seq, now);
        (self.overall.on_reply(seq, now), self.choose())
    }

    /// Counts the probes that were not answered in time. Returns whether the gateway is dead, and whether the transport in force has
    /// changed.
    pub fn poll(&mut self, now: Duration) -> (Option<ProbeTransition>, bool) {
        for tracker in self.forms.values_mut() {
            tracker.poll(now);
        }
        (self.overall.poll(now), self.choose())
    }

    fn trackers(&self, transport: u32) -> impl Iterator<Item = &ProbeTracker> {
        self.forms.iter().filter(move |(form, _)| form.transport == transport).map(|(_, tracker)| tracker)
    }

    /// Chooses the transport in force: it stays until it fails or a better one is shown to work. If none works, the first one is in force,
    /// which needs the least. Returns whether it has changed.
    fn choose(&mut self) -> bool {
        let before = self.current;
        let mut transports = self.forms.keys().map(|form| form.transport);
        let first = transports.clone().next();
        // The forms are in the order of their transports: the last one that works has the best.
        let best = transports.rfind(|transport| self.of(*transport) == Some(ProbeState::Alive));
        let failed = matches!(self.of(before), None | Some(ProbeState::Dead));
        self.current = match best {
            Some(best) if failed || best > before => best,
            None if failed => first.unwrap_or(0),
            _ => before,
        };
        self.current != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMS: [Form; 4] = [
        Form { transport: 0, ipv6: false },
        Form { transport: 1, ipv6: false },
        Form { transport: 2, ipv6: false },
        Form { transport: 2, ipv6: true },
    ];

    /// Runs rounds of 100 ms in which the forms that satisfy `works` answer. Returns the transport in force after each.
    fn rounds(transports: &mut TransportChooser, from: u64, count: u64, works: impl Fn(Form) -> bool) -> Vec<u32> {
        (from..from + count)
            .map(|seq| {
                let now = Duration::from_millis(100 * seq);
                transports.poll(now);
                for form in transports.round(seq, now).into_iter().filter(|form| works(*form)) {
                    transports.on_reply(form, seq, now + Duration::from_millis(1));
                }
                transports.current()
            })
            .collect()
    }

    fn chooser() -> TransportChooser {
        TransportChooser::new(ProbeTimes::default(), &FORMS.into())
    }

    #[test]
    fn the_best_transport_that_answers_is_used_at_once() {
        let mut transports = chooser();
        assert_eq!(transports.current(), 0);
        assert_eq!(rounds(&mut transports, 1, 3, |_| true), [2, 2, 2]);
        let mut transports = chooser();
        assert_eq!(rounds(&mut transports, 1, 5, |form| form.transport < 2), [1; 5]);
        assert_eq!(transports.of(2), Some(ProbeState::Dead));
    }

    #[test]
    fn a_transport_that_carries_only_one_family_is_not_used() {
        let mut transports = chooser();
        assert_eq!(rounds(&mut transports, 1, 5, |form| !(form.transport == 2 && form.ipv6)), [1; 5]);
    }

    #[test]
    fn a_transport_is_left_after_three_missed_probes_and_used_again_when_it_works() {
        let mut transports = chooser();
        rounds(&mut transports, 1, 20, |_| true);
        let after = rounds(&mut transports, 21, 10, |form| form.transport != 2);
        assert_eq!(after[..3], [2, 2, 2], "{after:?}");
        assert_eq!(after[3..], [1; 7], "{after:?}");
        assert_eq!(transports.state(), ProbeState::Alive, "the gateway itself answered all the time");
        let back = rounds(&mut transports, 31, 60, |_| true);
        assert!(back.ends_with(&[2]) && back[..10] == [1; 10], "not at the first answer: {back:?}");
    }

    #[test]
    fn several_transports_do_not_delay_the_detection_of_a_dead_gateway() {
        let mut transports = chooser();
        rounds(&mut transports, 1, 10, |_| true);
        rounds(&mut transports, 11, 3, |_| false);
        assert_eq!(transports.poll(Duration::from_millis(1400)).0, Some(ProbeTransition::Dead));
        assert_eq!(transports.state(), ProbeState::Dead);
    }

    #[test]
    fn idle_transports_are_probed_rarely() {
        let mut transports = chooser();
        rounds(&mut transports, 1, 5, |_| true);
        let sent: usize = (6..26)
            .map(|seq| {
                let now = Duration::from_millis(100 * seq);
                let due = transports.round(seq, now);
                for form in &due {
                    transports.on_reply(*form, seq, now);
                }
                due.len()
            })
            .sum();
        assert_eq!(sent, 20 * 2 + 2 * 2, "both forms in force each time, the two others in two rounds");
    }

    #[test]
    fn a_transport_that_becomes_forbidden_is_left_at_once() {
        let mut transports = chooser();
        rounds(&mut transports, 1, 3, |_| true);
        assert!(transports.set(&FORMS[..2].iter().copied().collect()));
        assert_eq!(transports.current(), 1);
        assert!(!transports.set(&FORMS.into()), "it has to answer first");
    }
}
