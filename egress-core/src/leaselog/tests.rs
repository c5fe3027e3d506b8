//! The answers about random histories, against the histories themselves.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const SLACK: i64 = 2;

/// What happens in one second.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Nothing.
    Rest,
    /// The lease is this node's from now on; none: no node's.
    Holder(Option<u8>),
    /// The writer begins, dies silently, ends, continues in another file, or reports that it is alive.
    Start,
    Die,
    Stop,
    Rotate,
    Alive,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        20 => Just(Step::Rest),
        4 => prop::option::of(0u8..3).prop_map(Step::Holder),
        2 => Just(Step::Start),
        1 => Just(Step::Die),
        1 => Just(Step::Stop),
        1 => Just(Step::Rotate),
        6 => Just(Step::Alive),
    ];
    prop::collection::vec(step, 1..120)
}

fn lease(node: u8) -> PortLease {
    let node = format!("n{node}").as_str().into();
    PortLease { egress_ip: "192.0.2.1".parse().unwrap(), first_port: 1088, last_port: 1151, node }
}

fn ask(records: &[LeaseRecord], at: i64) -> LeaseAnswer {
    let egress_ip = "192.0.2.1".parse().unwrap();
    answer(records, LeaseQuestion { egress_ip, port: 1100, from: at, until: at, slack: SLACK })
}

/// Which node held the port in each second, whether anything wrote in it, and what was written.
fn history(steps: &[Step]) -> (Vec<Option<u8>>, Vec<bool>, Vec<LeaseRecord>) {
    let (mut holders, mut written, mut records) = (Vec::new(), Vec::new(), Vec::new());
    let (mut holder, mut writes, mut book) = (None, false, Book::default());
    for (second, step) in steps.iter().enumerate() {
        let at = second as i64;
        match step {
            Step::Holder(node) => holder = *node,
            Step::Start | Step::Rotate => {
                let marker =
                    if matches!(step, Step::Rotate) && writes { LeaseEvent::Continued } else { LeaseEvent::Started };
                if matches!(step, Step::Start) || writes {
                    book = Book::default();
                    note(&mut book, holder);
                    records.push(LeaseRecord { at, event: marker });
                    records.extend(book.held().map(|event| LeaseRecord { at, event }));
                    writes = true;
                }
            }
            Step::Stop if writes => {
                records.push(LeaseRecord { at, event: LeaseEvent::Stopped });
                writes = false;
            }
            Step::Die => writes = false,
            Step::Alive if writes => records.push(LeaseRecord { at, event: LeaseEvent::Alive }),
            _ => {}
        }
        if writes {
            records.extend(note(&mut book, holder).into_iter().map(|event| LeaseRecord { at, event }));
        }
        holders.push(holder);
        written.push(writes);
    }
    (holders, written, records)
}

fn note(book: &mut Book, holder: Option<u8>) -> Vec<LeaseEvent> {
    let mut events = Vec::new();
    let nodes =
        (0..3).map(|node| (node, if holder == Some(node) { BTreeSet::from([lease(node)]) } else { BTreeSet::new() }));
    for (node, leases) in nodes {
        events.extend(book.take_in(&lease(node).node, leases));
    }
    events.sort_by_key(|event| matches!(event, LeaseEvent::Granted(_)));
    events
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn certain_answers_are_true_and_true_holders_are_named(steps in steps()) {
        let (holders, written, records) = history(&steps);
        for (second, holder) in holders.iter().enumerate() {
            let said = ask(&records, second as i64);
            let names: BTreeSet<&NodeName> = said.holders.iter().map(|held| &held.node).collect();
            let truth = holder.map(|node| lease(node).node);
            if said.doubts.is_empty() {
                prop_assert_eq!(names, truth.iter().collect::<BTreeSet<_>>(), "second {} of {:?}", second, records);
            } else if written[second] && !said.doubts.iter().any(|doubt| matches!(doubt, Doubt::Unwritten(..))) {
                prop_assert!(truth.iter().all(|node| names.contains(node)), "second {} of {:?}", second, records);
            }
        }
    }

    #[test]
    fn an_answer_far_from_any_change_is_certain(steps in steps()) {
        let (holders, written, records) = history(&steps);
        for second in 0..holders.len() {
            let around = second.saturating_sub(SLACK as usize)..(second + SLACK as usize + 1).min(holders.len());
            let calm = second >= SLACK as usize
                && around.clone().all(|near| holders[near] == holders[second] && written[near])
                && !around.clone().any(|near| matches!(steps[near], Step::Start | Step::Stop | Step::Holder(_)))
                // A later record shows that writing continued.
                && records.iter().find(|record| record.at > second as i64 + SLACK).is_some_and(|next| next.event != LeaseEvent::Started);
            if calm {
                let said = ask(&records, second as i64);
                prop_assert_eq!(said.doubts, BTreeSet::new(), "second {} of {:?}", second, records);
            }
        }
    }
}

#[test]
fn a_node_that_is_long_gone_is_named_with_its_times() {
    let mut book = Book::default();
    let mut records = vec![LeaseRecord { at: 0, event: LeaseEvent::Started }];
    let mut at = |second, book: &mut Book, holder| {
        records.extend(note(book, holder).into_iter().map(|event| LeaseRecord { at: second, event }));
    };
    at(10, &mut book, Some(1));
    at(100, &mut book, None);
    at(200, &mut book, Some(2));
    records.push(LeaseRecord { at: 300, event: LeaseEvent::Alive });
    let said = ask(&records, 50);
    let holder = LeaseHolder { node: "n1".into(), first_port: 1088, last_port: 1151, from: Some(10), until: Some(100) };
    assert_eq!(said, LeaseAnswer { holders: [holder].into(), doubts: BTreeSet::new() });
    assert_eq!(ask(&records, 150), LeaseAnswer::default());
    assert_eq!(ask(&records, 99).doubts, BTreeSet::from([Doubt::Changed(100)]));
    assert_eq!(ask(&records, 290).doubts, BTreeSet::new());
    assert_eq!(ask(&records, 310).doubts, BTreeSet::from([Doubt::Unwritten(Some(300), None)]));
    let other =
        LeaseQuestion { egress_ip: "192.0.2.1".parse().unwrap(), port: 1152, from: 50, until: 50, slack: SLACK };
    assert_eq!(answer(&records, other), LeaseAnswer::default());
}

#[test]
fn lost_events_make_an_answer_doubtful() {
    let mut records =
        vec![LeaseRecord { at: 0, event: LeaseEvent::Started }, LeaseRecord { at: 10, event: LeaseEvent::Alive }];
    records.push(LeaseRecord { at: 20, event: LeaseEvent::Lost(3) });
    records.push(LeaseRecord { at: 20, event: LeaseEvent::Continued });
    records.push(LeaseRecord { at: 40, event: LeaseEvent::Alive });
    assert_eq!(ask(&records, 15).doubts, BTreeSet::from([Doubt::Lost(3, 20)]));
    assert_eq!(ask(&records, 30).doubts, BTreeSet::new());
}

#[test]
fn ports_that_follow_each_other_are_one_line() {
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
    // A part of what was one line ends, and the rest stays.
    assert_eq!(ports(book.take_in(&block(0).node, [1024, 1216].map(block).into())), [(1088, 1151)]);
}

#[test]
fn after_a_gap_in_the_log_the_next_holder_may_have_held_the_port_before() {
    let record = |at, event| LeaseRecord { at, event };
    let records = [
        record(0, LeaseEvent::Started),
        record(10, LeaseEvent::Alive),
        record(100, LeaseEvent::Started),
        record(100, LeaseEvent::Held(lease(1))),
        record(110, LeaseEvent::Alive),
    ];
    let holder = LeaseHolder { node: "n1".into(), first_port: 1088, last_port: 1151, from: None, until: None };
    let said = LeaseAnswer { holders: [holder].into(), doubts: [Doubt::Unwritten(Some(10), Some(100))].into() };
    assert_eq!(ask(&records, 50), said);
    assert_eq!(ask(&records, 5), LeaseAnswer::default());
}
