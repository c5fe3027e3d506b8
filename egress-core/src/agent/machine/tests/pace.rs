//! Tests how often actions run, and how soon they run again.

use super::*;

#[test]
fn periodic_actions_run_when_they_are_due() {
    let ms = Duration::from_millis;
    let mut shell = Shell::new(&FactsFixture::new());
    let mut seen: Vec<(u128, String)> = Vec::new();
    shell.run();
    shell.machine.handle_start(shell.now);
    while shell.now <= ms(5000) {
        shell.machine.handle_timeout(shell.now);
        let at = shell.now.as_millis();
        seen.extend(shell.run().into_iter().map(|name| (at, name)));
        shell.now = shell.machine.next_wake().max(shell.now + ms(1));
    }
    let when = |name: &str| seen.iter().filter(|(_, n)| n == name).map(|(at, _)| *at).collect::<Vec<_>>();
    assert_eq!(when("CountPorts"), [0, 2000, 4000]);
    assert_eq!(when("LookAgain"), [0, 5000]);
    assert_eq!(when("ReadCounters"), (0..=100).map(|n| n * 50).collect::<Vec<_>>());
    assert_eq!(when("Heartbeat"), [0, 1250, 2500, 3750, 5000]);
}

/// Returns the times between the first starts of an action, in milliseconds.
fn pauses_of(mut shell: Shell, action: &str, count: usize) -> Vec<u128> {
    let mut begins = Vec::new();
    while begins.len() < count {
        shell.machine.handle_timeout(shell.now);
        let now = shell.now.as_millis();
        begins.extend(shell.run().iter().any(|name| name == action).then_some(now));
        shell.now = shell.machine.next_wake().max(shell.now + Duration::from_millis(1));
    }
    begins.windows(2).map(|two| two[1] - two[0]).collect()
}

#[test]
fn a_round_that_takes_long_is_not_soon_repeated_without_a_reason() {
    let pauses = |takes: u64| {
        let mut shell = Shell::new(&FactsFixture::new());
        shell.takes = Duration::from_millis(takes);
        // The first writes have other reasons, and show how long a round takes.
        pauses_of(shell, "Write", 5).split_off(2)
    };
    assert_eq!(pauses(0), [5_000; 2]);
    assert_eq!(pauses(500), [10_500; 2], "a twentieth of the time");
    assert_eq!(pauses(60_000), [90_000; 2], "it was stopped in the middle");
}

#[test]
fn counts_that_take_long_are_far_apart() {
    let pauses = |takes: u64| {
        let mut shell = Shell::new(&FactsFixture::new());
        shell.count_takes = Duration::from_millis(takes);
        pauses_of(shell, "CountPorts", 3)
    };
    assert_eq!(pauses(0), [2_000; 2]);
    assert_eq!(pauses(500), [10_000; 2], "a twentieth of the time");
    assert_eq!(pauses(60_000), [120_000; 2], "it was stopped in the middle");
}

#[test]
fn failed_status_write_is_retried_less_and_less_often() {
    let ms = Duration::from_millis;
    let mut shell = Shell::new(&FactsFixture::new());
    shell.fails.insert("WriteStatus");
    shell.machine.handle_start(shell.now);
    let mut attempts = |until: u64, fails: bool| {
        let mut attempts = Vec::new();
        while shell.now < ms(until) {
            shell.machine.handle_timeout(shell.now);
            if shell.run().iter().any(|name| name == "WriteStatus") {
                attempts.push(shell.now.as_millis());
                match fails {
                    true => shell.machine.handle_status_failed(shell.now),
                    false => shell.machine.handle_status(true),
                }
            }
            shell.now = shell.machine.next_wake().max(shell.now + ms(1));
        }
        attempts
    };
    assert_eq!(attempts(20_000, true), [0, 200, 600, 1_400, 3_000, 6_200, 11_200, 16_200]);
    attempts(22_000, false);
    let pauses = attempts(23_000, true);
    assert!(pauses.windows(2).all(|two| two[1] - two[0] <= 400), "{pauses:?}");
}

#[test]
fn route_changes_alone_cause_at_most_one_round_a_second() {
    let ms = Duration::from_millis;
    let mut shell = Shell::new(&FactsFixture::new());
    let mut writes = Vec::new();
    let mut links = (*shell.machine.facts().links).clone();
    while shell.now < ms(4_000) {
        // From then on, nothing else happens.
        links.route_changes += u64::from(shell.now >= ms(1_000));
        if shell.now == ms(2_500) {
            links.host_routes.insert(ip("10.1.0.9"), POD);
        }
        shell.machine.handle_links(Arc::new(links.clone()));
        shell.machine.handle_timeout(shell.now);
        writes.extend(shell.run().contains(&"Write".to_owned()).then_some(shell.now.as_millis()));
        shell.now += ms(100);
    }
    writes.retain(|at| *at >= 1_000);
    assert_eq!(writes, [1_000, 2_000, 2_500, 3_000]);
    assert_eq!(shell.machine.facts().links.route_changes, 30, "they are known immediately");
}

#[test]
fn entries_left_out_of_the_tables_are_retried_once_immediately() {
    let mut shell = Shell::new(&FactsFixture::new());
    let overflow = Overflow { table: Table::Policies, wanted: 2, capacity: 1 };
    let mut writes = |names: &[&str]| {
        let policies = names.iter().map(|name| (PolicyId::new(PolicyKind::Native, name), overflow.clone())).collect();
        let refused = Refused { policies, ..Refused::default() };
        let (mut writes, now) = (0, shell.now);
        shell.machine.handle_objects(objects(&FactsFixture::new()));
        while let Some(action) = shell.machine.poll_action(now) {
            match action {
                Action::Write { view, .. } => {
                    writes += 1;
                    shell.machine.handle_written(&view, &refused, now);
                }
                other => shell.answer(other),
            }
        }
        writes
    };
    let web = &["web"][..];
    assert_eq!([writes(web), writes(web)], [2, 1], "what it replaces may be gone then, but need not be");
    assert_eq!(writes(&["db", "web"]), 2, "one that never fits takes no other's second try");
    assert_eq!([writes(web), writes(&["db"])], [1, 2], "one that fitted meanwhile has a second try again");
}
