//! Tests that a lease never has two holders, whatever the delays, and of a lease on a real store.

use super::*;
use crate::store::{Files, Key};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use proptest::prelude::*;
use std::collections::BinaryHeap;
use std::time::Duration;

const DURATION: Duration = Duration::from_secs(2);

fn terms(identity: &str) -> LeaseTerms {
    LeaseTerms {
        key: Key::namespaced(LEASE_NAMESPACE, CONTROLLER_LEASE),
        identity: identity.to_owned(),
        duration: DURATION,
        renew_every: Duration::from_millis(500),
    }
}

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn wall() -> Timestamp {
    Timestamp::UNIX_EPOCH
}

/// A store of one lease, with all its versions.
#[derive(Default)]
struct Register(Vec<Option<Lease>>);

impl Register {
    fn latest(&self) -> Option<&Lease> {
        self.0.last().and_then(Option::as_ref)
    }

    fn swap(&mut self, action: LeaseAction) -> Option<Lease> {
        let mut lease = match action {
            LeaseAction::Wait => return None,
            LeaseAction::Create(lease) if self.latest().is_none() => *lease,
            LeaseAction::Replace(lease)
                if self
                    .latest()
                    .is_some_and(|last| last.metadata.resource_version == lease.metadata.resource_version) =>
            {
                *lease
            }
            _ => return None,
        };
        lease.metadata.resource_version = Some((self.0.len() + 1).to_string());
        self.0.push(Some(lease.clone()));
        Some(lease)
    }
}

/// Runs the elector at `now` against the register, without delays.
fn step(elector: &mut Elector, register: &mut Register, now: Duration) -> Decision {
    elector.observe(now, register.latest());
    let decision = elector.decide(now, wall());
    if decision.action != LeaseAction::Wait {
        match register.swap(decision.action.clone()) {
            Some(lease) => elector.written(now, &lease),
            None => elector.failed(now),
        }
    }
    decision
}

#[test]
fn the_first_one_leads_and_renews_the_second_one_takes_over_after_the_duration() {
    let (mut a, mut b, mut register) = (Elector::new(terms("a")), Elector::new(terms("b")), Register::default());
    step(&mut a, &mut register, ms(0));
    assert_eq!(a.holds(ms(0)), Some(1));
    assert_eq!(step(&mut b, &mut register, ms(100)), Decision { action: LeaseAction::Wait, wake: ms(2100) });
    assert_eq!(step(&mut a, &mut register, ms(499)), Decision { action: LeaseAction::Wait, wake: ms(500) });
    step(&mut a, &mut register, ms(500));
    assert_eq!(step(&mut b, &mut register, ms(700)), Decision { action: LeaseAction::Wait, wake: ms(2700) });
    assert_eq!(a.holds(ms(2299)), Some(1));
    assert_eq!(a.holds(ms(2300)), None);
    assert_eq!(step(&mut b, &mut register, ms(2699)).action, LeaseAction::Wait);
    step(&mut b, &mut register, ms(2700));
    assert_eq!((a.holds(ms(2700)), b.holds(ms(2700))), (None, Some(2)));
}

#[test]
fn a_released_lease_is_taken_at_once_with_a_higher_epoch() {
    let (mut a, mut b, mut register) = (Elector::new(terms("a")), Elector::new(terms("b")), Register::default());
    step(&mut a, &mut register, ms(0));
    step(&mut b, &mut register, ms(100));
    let released = a.release().unwrap();
    assert_eq!(a.holds(ms(100)), None);
    register.swap(LeaseAction::Replace(released)).unwrap();
    step(&mut b, &mut register, ms(101));
    assert_eq!(b.holds(ms(101)), Some(2));
    assert_eq!(a.release(), None);
}

#[test]
fn a_restarted_holder_goes_on_at_once() {
    let (mut a, mut register) = (Elector::new(terms("a")), Register::default());
    step(&mut a, &mut register, ms(0));
    let mut restarted = Elector::new(terms("a"));
    step(&mut restarted, &mut register, ms(50));
    assert_eq!(restarted.holds(ms(50)), Some(1));
}

#[test]
fn a_lease_that_vanishes_is_not_created_while_its_holder_may_not_know() {
    let (mut a, mut b, mut register) = (Elector::new(terms("a")), Elector::new(terms("b")), Register::default());
    step(&mut a, &mut register, ms(0));
    step(&mut b, &mut register, ms(100));
    register.0.push(None);
    assert_eq!(step(&mut b, &mut register, ms(200)), Decision { action: LeaseAction::Wait, wake: ms(2200) });
    step(&mut a, &mut register, ms(600));
    assert_eq!(a.holds(ms(600)), Some(1));
}

#[test]
fn a_failed_write_is_repeated_soon() {
    let mut a = Elector::new(terms("a"));
    a.observe(ms(0), None);
    assert!(matches!(a.decide(ms(0), wall()).action, LeaseAction::Create(_)));
    a.failed(ms(0));
    assert_eq!(a.decide(ms(1), wall()), Decision { action: LeaseAction::Wait, wake: ms(125) });
    assert!(matches!(a.decide(ms(125), wall()).action, LeaseAction::Create(_)));
}

/// An event of a candidate in the simulation.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Look,
    Commit,
    Answer,
}

struct Candidate {
    elector: Elector,
    /// The offset of its clock from the simulation's clock.
    offset: Duration,
    /// The newest version that it has seen, since its cache never goes backwards.
    seen: usize,
    started: Duration,
    wanted: LeaseAction,
    answer: Option<Lease>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Each candidate reads old versions and may be stopped for any time between steps, and its writes and their answers arrive late.
    #[test]
    fn never_two_holders(
        offsets in prop::collection::vec(0..100_000u64, 3),
        delays in prop::collection::vec(prop_oneof![4 => 0..600u64, 1 => 0..6000u64], 60..200),
        lags in prop::collection::vec(0..3usize, 60..200),
        restarts in prop::collection::vec(prop::bool::weighted(0.03), 60..200),
    ) {
        let mut register = Register::default();
        let mut candidates: Vec<Candidate> = offsets.iter().enumerate().map(|(index, offset)| Candidate {
            elector: Elector::new(terms(&index.to_string())),
            offset: ms(*offset),
            seen: 0,
            started: Duration::ZERO,
            wanted: LeaseAction::Wait,
            answer: None,
        }).collect();
        let mut queue: BinaryHeap<std::cmp::Reverse<(Duration, usize, Event)>> =
            (0..candidates.len()).map(|index| std::cmp::Reverse((ms(index as u64), index, Event::Look))).collect();
        for ((delay, lag), restart) in delays.iter().zip(&lags).zip(&restarts) {
            let Some(std::cmp::Reverse((now, index, event))) = queue.pop() else { break };
            let candidate = &mut candidates[index];
            let local = now + candidate.offset;
            let next = match event {
                Event::Look if *restart => {
                    candidate.elector = Elector::new(terms(&format!("{index}-{}", now.as_millis())));
                    Event::Look
                }
                Event::Look => {
                    candidate.seen = candidate.seen.max(register.0.len().saturating_sub(*lag));
                    let lease = candidate.seen.checked_sub(1).and_then(|last| register.0[last].clone());
                    candidate.elector.observe(local, lease.as_ref());
                    candidate.wanted = candidate.elector.decide(local, wall()).action;
                    candidate.started = local;
                    if candidate.wanted == LeaseAction::Wait { Event::Look } else { Event::Commit }
                }
                Event::Commit => {
                    candidate.answer = register.swap(std::mem::replace(&mut candidate.wanted, LeaseAction::Wait));
                    Event::Answer
                }
                Event::Answer => {
                    match candidate.answer.take() {
                        Some(lease) => {
                            let own = register.0.iter().position(|version| version.as_ref() == Some(&lease));
                            candidate.seen = candidate.seen.max(own.unwrap() + 1);
                            candidate.elector.written(candidate.started, &lease);
                        }
                        None => candidate.elector.failed(local),
                    }
                    Event::Look
                }
            };
            queue.push(std::cmp::Reverse((now + ms(*delay), index, next)));
            let holders = candidates.iter().filter(|one| one.elector.holds(now + one.offset).is_some()).count();
            prop_assert!(holders <= 1, "{holders} holders at {now:?}");
        }
    }
}

#[tokio::test]
async fn a_standby_takes_over_when_the_leader_dies_or_releases() {
    let dir = tempfile::tempdir().unwrap();
    let short =
        |identity: &str| LeaseTerms { duration: Duration::from_secs(1), renew_every: ms(100), ..terms(identity) };
    let (one, two) = (Files::open(dir.path()).unwrap(), Files::open(dir.path()).unwrap());
    let mut first = LeaseKeeper::start(one.clone(), short("first"));
    let held = |keeper: &LeaseKeeper, epoch| matches!(keeper.state(), LeaseState::Held { epoch: e, .. } if e == epoch);
    while !held(&first, 1) {
        first.changed().await;
    }
    let mut second = LeaseKeeper::start(two.clone(), short("second"));
    assert_eq!(second.held(), None);
    drop(first);
    while !held(&second, 2) {
        second.changed().await;
    }
    let mut third = LeaseKeeper::start(one, short("third"));
    second.release().await;
    while !held(&third, 3) {
        third.changed().await;
    }
    assert_eq!(third.held(), Some(3));
}
