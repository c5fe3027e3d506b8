//! Tests the answers about random histories against the histories themselves.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const SECOND: i64 = 1_000_000;
const SLACK: i64 = 2 * SECOND;
/// The longest time for which the simulated writer does not notice that it is cut off, in seconds.
const UNNOTICED: u8 = 30;

/// One step of a history.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Nothing for some seconds.
    Rest(u8),
    /// The lease belongs to this node from now on; none: to no node.
    Holder(Option<u8>),
    /// The writer begins, dies silently, ends, or continues in another file.
    Start,
    Die,
    Stop,
    Rotate,
    /// The disk is full, or has room.
    Full(bool),
    /// The writer receives no changes: for some seconds without noticing it, and then for more.
    Cut(u8, u8),
    /// The writer does not run for some seconds.
    Pause(u8),
    /// The writer's clock is set by some seconds.
    Clock(i64),
}

fn steps(clock: u32) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (1u8..40).prop_map(Step::Rest),
        10 => prop::option::of(0u8..3).prop_map(Step::Holder),
        3 => Just(Step::Start),
        1 => Just(Step::Die),
        1 => Just(Step::Stop),
        2 => Just(Step::Rotate),
        2 => any::<bool>().prop_map(Step::Full),
        2 => (0..UNNOTICED, 1u8..60).prop_map(|(unnoticed, more)| Step::Cut(unnoticed, more)),
        2 => (1u8..40).prop_map(Step::Pause),
        // Smaller changes are within the slack.
        clock => (3..60i64, any::<bool>()).prop_map(|(by, back)| Step::Clock(if back { -by } else { by })),
    ];
    prop::collection::vec(step, 1..40)
}

fn lease(node: u8) -> PortLease {
    let node = format!("n{node}").as_str().into();
    PortLease { egress_ip: "192.0.2.1".parse().unwrap(), first_port: 1088, last_port: 1151, node }
}

fn ask(records: &[LeaseRecord], at: i64) -> LeaseAnswer {
    let egress_ip = "192.0.2.1".parse().unwrap();
    answer(records, LeaseQuestion { egress_ip, port: 1100, from: at, until: at, slack: SLACK })
}

/// One second of a history.
#[derive(Clone, Copy, Debug)]
struct Second {
    /// What the writer's clock shows.
    clock: i64,
    holder: Option<u8>,
    /// Whether a writer would notice that its clock is set, and whether it runs, receives changes and writes them.
    watched: bool,
    /// Whether the writer ran.
    ran: bool,
    written: bool,
    started: bool,
}

/// A lease, and the writer of its log.
#[derive(Default)]
struct World {
    seconds: Vec<Second>,
    records: Vec<LeaseRecord>,
    holder: Option<u8>,
    scribe: Option<Scribe>,
    /// By how much the clock is off.
    offset: i64,
    is_full: bool,
    rotates: bool,
    /// For how many more seconds the writer does not notice that it is cut off, is cut off, or does not run.
    unnoticed: u8,
    cut: u8,
    paused: u8,
    /// Whether the holder has changed while the writer did not look.
    changed_unseen: bool,
    /// Whether the clock has been set while the writer does not run. No record shows whether it was set back and forth.
    is_set: bool,
}

impl World {
    fn of(steps: &[Step]) -> Self {
        let mut world = Self::default();
        for step in steps {
            world.step(*step);
        }
        // Everything that was missed comes to light.
        world.is_full = false;
        while world.cut > 0 || world.paused > 0 {
            world.second(false);
        }
        world.step(Step::Start);
        world
    }

    fn moment(&self) -> Moment {
        let uptime = self.seconds.len() as i64 * SECOND;
        Moment { at: uptime + self.offset, uptime }
    }

    fn step(&mut self, step: Step) {
        let mut started = false;
        match step {
            Step::Rest(seconds) => (1..seconds).for_each(|_| self.second(false)),
            // A holder that comes and goes in between is not seen. Real holders stay longer.
            Step::Holder(node) if !self.changed_unseen => {
                self.changed_unseen = self.paused > 0 || self.unnoticed > 0;
                self.holder = node;
            }
            Step::Start if self.cut == 0 && self.paused == 0 => {
                self.forget_pause();
                let mut scribe = Scribe::default();
                note(&mut scribe, self.holder);
                scribe.begin(self.moment());
                (self.scribe, started) = (Some(scribe), true);
            }
            Step::Stop if self.paused == 0 => {
                self.forget_pause();
                let end = self.scribe.take().and_then(|scribe| scribe.stop(self.moment().at));
                self.records.extend(end.filter(|_| !self.is_full));
            }
            Step::Die => {
                self.forget_pause();
                self.scribe = None;
            }
            Step::Rotate => self.rotates = true,
            Step::Full(full) => self.is_full = full,
            Step::Cut(unnoticed, more) if self.cut == 0 => (self.unnoticed, self.cut) = (unnoticed, unnoticed + more),
            Step::Pause(seconds) => self.paused = seconds,
            // How long a cut goes unnoticed is measured by the clock that is never set.
            Step::Clock(by) if self.cut == 0 && !self.is_set => {
                self.offset += by * SECOND;
                self.is_set = self.paused > 0;
            }
            Step::Holder(_) | Step::Clock(_) | Step::Start | Step::Stop | Step::Cut(..) => {}
        }
        self.second(started);
    }

    /// Ends a writer: it never notices that the clock was set since it last ran.
    fn forget_pause(&mut self) {
        let unseen = self.seconds.iter_mut().rev().take_while(|second| !second.ran);
        unseen.for_each(|second| second.watched = false);
    }

    fn second(&mut self, started: bool) {
        let moment = self.moment();
        let runs = self.paused == 0 && self.scribe.is_some();
        if let (true, Some(scribe)) = (runs, &mut self.scribe) {
            if self.cut == 0 {
                note(scribe, self.holder);
            }
            if self.cut > 0 && self.unnoticed == 0 {
                scribe.miss();
            } else {
                let records = scribe.look(moment);
                if !records.is_empty() {
                    scribe.note(!self.is_full);
                    self.records.extend(records.into_iter().filter(|_| !self.is_full));
                    if !self.is_full && std::mem::take(&mut self.rotates) {
                        self.records.extend(scribe.again());
                    }
                }
            }
        }
        let written = runs && self.cut == 0 && !self.is_full;
        let is_cut_off = self.cut > 0 && self.unnoticed == 0;
        let watched = self.scribe.is_some() && !self.is_full && !is_cut_off;
        self.seconds.push(Second { clock: moment.at, holder: self.holder, watched, ran: runs, written, started });
        for left in [&mut self.unnoticed, &mut self.cut, &mut self.paused] {
            *left = left.saturating_sub(1);
        }
        self.changed_unseen &= self.paused > 0 || self.unnoticed > 0;
        self.is_set &= self.paused > 0;
    }
}

fn note(scribe: &mut Scribe, holder: Option<u8>) {
    for node in 0..3 {
        let leases = if holder == Some(node) { BTreeSet::from([lease(node)]) } else { BTreeSet::new() };
        scribe.take_in(&lease(node).node, leases);
    }
}

fn named(said: &LeaseAnswer) -> BTreeSet<&NodeName> {
    said.holders.iter().map(|held| &held.node).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn certain_answers_are_true_and_true_holders_are_named(steps in steps(2)) {
        let world = World::of(&steps);
        for (number, second) in world.seconds.iter().enumerate() {
            let said = ask(&world.records, second.clock);
            let truth = second.holder.map(|node| lease(node).node);
            // No log shows that a clock was set back while nothing was written.
            let is_repeated = world.seconds[..number].iter().any(|earlier| earlier.clock >= second.clock)
                || world.seconds[number + 1..].iter().any(|later| later.clock <= second.clock);
            if !second.watched && is_repeated {
                continue;
            }
            if said.doubts.is_empty() {
                // A time that the clock showed twice counts twice.
                prop_assert_eq!(named(&said), truth.iter().collect(), "second {} of {:?}", number, world.records);
            } else if second.written && !said.doubts.iter().any(|doubt| matches!(doubt, Doubt::Unwritten(..))) {
                let known = truth.iter().all(|node| named(&said).contains(node));
                prop_assert!(known, "second {} of {:?}", number, world.records);
            }
        }
    }

    #[test]
    fn an_answer_far_from_any_change_is_certain(steps in steps(0)) {
        let world = World::of(&steps);
        // Far: a gap begins before it is noticed, and a later record shows that writing continued.
        let later = ((BLIND + ALIVE + 2 * SLACK) / SECOND) as usize;
        for number in 4..world.seconds.len().saturating_sub(later) {
            let around = &world.seconds[number - 4..number + later];
            let calm = around.iter().all(|near| near.written && !near.started)
                && around[..8].iter().all(|near| near.holder == world.seconds[number].holder);
            if calm {
                let said = ask(&world.records, world.seconds[number].clock);
                prop_assert_eq!(said.doubts, BTreeSet::new(), "second {} of {:?}", number, world.records);
            }
        }
    }
}

fn record(second: i64, event: LeaseEvent) -> LeaseRecord {
    LeaseRecord { at: second * SECOND, event }
}

/// Returns the holders and doubts that follow from these records about a second.
fn said(records: &[LeaseRecord], second: i64) -> (Vec<&'static str>, BTreeSet<Doubt>) {
    let answer = ask(records, second * SECOND);
    let names = ["n0", "n1", "n2"].into_iter().filter(|name| named(&answer).contains(&NodeName::from(*name)));
    (names.collect(), answer.doubts)
}

fn unwritten(from: i64, until: i64) -> BTreeSet<Doubt> {
    [Doubt::Unwritten(Some(from * SECOND), Some(until * SECOND))].into()
}

/// Returns a writer that has run from the second 0 on while the first node held the lease, and has written nothing for 10 s.
fn writer() -> (Scribe, Vec<LeaseRecord>) {
    let mut scribe = Scribe::default();
    let mut records = Vec::new();
    note(&mut scribe, Some(0));
    scribe.begin(Moment::default());
    for second in (0..=90).step_by(10) {
        look(&mut scribe, &mut records, second, second);
        // The writer looks once a second.
        (second + 1..second + 10).for_each(|second| look(&mut scribe, &mut records, second, second));
    }
    (scribe, records)
}

fn look(scribe: &mut Scribe, records: &mut Vec<LeaseRecord>, second: i64, uptime: i64) {
    let due = scribe.look(Moment { at: second * SECOND, uptime: uptime * SECOND });
    if !due.is_empty() {
        scribe.note(true);
        records.extend(due);
    }
}

#[test]
fn a_node_that_is_long_gone_is_named_with_its_times() {
    let (mut scribe, mut records) = writer();
    for (second, holder) in [(100, 0), (101, 1), (102, 1)] {
        note(&mut scribe, Some(holder));
        look(&mut scribe, &mut records, second, second);
    }
    records.push(record(110, LeaseEvent::Alive));
    let holder =
        LeaseHolder { node: "n0".into(), first_port: 1088, last_port: 1151, from: None, until: Some(101 * SECOND) };
    assert_eq!(ask(&records, 50 * SECOND), LeaseAnswer { holders: [holder].into(), doubts: BTreeSet::new() });
    assert_eq!(said(&records, 100), (vec!["n0", "n1"], BTreeSet::from([Doubt::Changed(101 * SECOND)])));
    assert_eq!(said(&records, 105), (vec!["n1"], BTreeSet::new()));
    assert_eq!(said(&records, 115).1, BTreeSet::from([Doubt::Unwritten(Some(110 * SECOND), None)]));
    let egress_ip = "192.0.2.1".parse().unwrap();
    let (from, until) = (50 * SECOND, 50 * SECOND);
    assert_eq!(
        answer(&records, LeaseQuestion { egress_ip, port: 1152, from, until, slack: SLACK }),
        LeaseAnswer::default()
    );
}

#[test]
fn lost_events_make_an_answer_doubtful() {
    let records = [
        record(0, LeaseEvent::Started),
        record(10, LeaseEvent::Alive),
        record(20, LeaseEvent::Lost(3)),
        record(20, LeaseEvent::Continued),
        record(30, LeaseEvent::Alive),
        record(40, LeaseEvent::Alive),
    ];
    assert_eq!(said(&records, 15).1, BTreeSet::from([Doubt::Lost(3, 20 * SECOND)]));
    assert_eq!(said(&records, 30).1, BTreeSet::new());
}

#[test]
fn a_writer_that_is_cut_off_does_not_vouch_for_that_time() {
    let (mut scribe, mut records) = writer();
    look(&mut scribe, &mut records, 100, 100);
    scribe.miss();
    note(&mut scribe, Some(1));
    look(&mut scribe, &mut records, 160, 160);
    look(&mut scribe, &mut records, 170, 170);
    // The writer did not notice immediately.
    assert_eq!(said(&records, 130), (vec!["n0", "n1"], unwritten(60, 160)));
    assert_eq!(said(&records, 80).1, unwritten(60, 160));
    assert_eq!(said(&records, 50), (vec!["n0"], BTreeSet::new()));
    assert_eq!(said(&records, 165), (vec!["n1"], BTreeSet::new()));
}

#[test]
fn a_pause_and_a_clock_that_is_set_are_gaps() {
    // The writer does not run for a minute. Then nothing has changed.
    let (mut scribe, mut records) = writer();
    for second in [100, 160, 170] {
        look(&mut scribe, &mut records, second, second);
    }
    assert_eq!(said(&records, 130), (vec!["n0"], unwritten(100, 160)));
    assert_eq!(said(&records, 90).1, BTreeSet::new());

    // The clock is set back by 50 s, and the lease changes afterwards.
    let (mut scribe, mut records) = writer();
    look(&mut scribe, &mut records, 100, 100);
    look(&mut scribe, &mut records, 51, 101);
    note(&mut scribe, Some(1));
    for second in [52, 62, 72, 82, 92, 102, 112] {
        look(&mut scribe, &mut records, second, second + 50);
    }
    assert_eq!(said(&records, 80), (vec!["n0", "n1"], unwritten(51, 101)));
    assert_eq!(said(&records, 45), (vec!["n0"], BTreeSet::new()));
    assert_eq!(said(&records, 108), (vec!["n1"], BTreeSet::new()));
}

#[test]
fn log_without_doubts_is_believed_unless_another_contradicts_it() {
    let of = |node: u8, doubts: &[Doubt]| {
        let holder = LeaseHolder { node: lease(node).node, first_port: 1, last_port: 2, from: None, until: None };
        LeaseAnswer { holders: [holder].into(), doubts: doubts.iter().cloned().collect() }
    };
    let (sure, unsure) = (of(1, &[]), of(2, &[Doubt::Changed(7)]));
    assert_eq!(together(vec![unsure.clone(), sure.clone(), sure.clone()]), Some(sure.clone()));
    let both = together(vec![unsure.clone(), of(0, &[Doubt::Lost(1, 2)])]).unwrap();
    assert_eq!((both.holders.len(), both.doubts), (2, [Doubt::Changed(7), Doubt::Lost(1, 2)].into()));
    let against = together(vec![sure, of(2, &[])]).unwrap();
    assert_eq!((against.holders.len(), against.doubts), (2, [Doubt::Contradicted].into()));
    assert_eq!(together(Vec::new()), None);
}

#[test]
fn adjacent_port_ranges_are_merged() {
    let block = |first_port| PortLease { first_port, last_port: first_port + 63, ..lease(1) };
    let all: BTreeSet<PortLease> = [1024, 1088, 1216].map(block).into();
    let mut book = Book::default();
    let ports = |events: Vec<LeaseEvent>| -> Vec<(u16, u16)> {
        let leases = events.into_iter().filter_map(|event| match event {
            LeaseEvent::Held(lease) | LeaseEvent::Granted(lease) | LeaseEvent::Returned(lease) => Some(lease),
            _ => None,
        });
        leases.map(|lease| (lease.first_port, lease.last_port)).collect()
    };
    assert_eq!(ports(book.take_in(&block(0).node, all)), [(1024, 1151), (1216, 1279)]);
    assert_eq!(ports(book.held().collect()), [(1024, 1151), (1216, 1279)]);
    // A part of a merged range ends, and the rest stays.
    assert_eq!(ports(book.take_in(&block(0).node, [1024, 1216].map(block).into())), [(1088, 1151)]);
}

#[test]
fn after_a_gap_in_the_log_the_next_holder_may_have_held_the_port_before() {
    let records = [
        record(0, LeaseEvent::Started),
        record(10, LeaseEvent::Alive),
        record(100, LeaseEvent::Started),
        record(100, LeaseEvent::Held(lease(1))),
        record(110, LeaseEvent::Alive),
    ];
    let holder = LeaseHolder { node: "n1".into(), first_port: 1088, last_port: 1151, from: None, until: None };
    let answer = LeaseAnswer { holders: [holder].into(), doubts: unwritten(-30, 100) };
    assert_eq!(ask(&records, 50 * SECOND), answer);
    assert_eq!(said(&records, 105), (vec!["n1"], BTreeSet::new()));
}
