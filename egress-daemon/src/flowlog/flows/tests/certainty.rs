//! A flow is certain only where the log shows that it was open: not after a loss that may include its end, nor while the clock was set, and
//! a missing file or an agent that could not write is a doubt.

use super::*;
use crate::flowlog::export::{Collector, Format, tests::wait};
use std::net::TcpListener;

#[test]
fn a_flow_without_an_end_is_certain_only_until_events_are_lost() {
    let mut world = World::new();
    world.report([event(what::BEGAN, 1100, 10, 10), event(what::BEGAN, 1101, 10, 10)]);
    world.look(11);
    world.look(100);
    world.script.0.borrow_mut().lost = 5;
    world.look(110);
    world.report([event(what::ENDED, 1101, 10, 180), event(what::BEGAN, 1102, 180, 180)]);
    world.look(190);
    world.look(300);
    let loss = Doubt::Lost(time(100), time(110), 5);
    // The same after the journal has become a segment.
    for _ in 0..2 {
        assert_eq!((world.pods(1100, 50), world.pods(1100, 150)), (web(true), web(false)));
        let lost = |tick| world.ask(1100, tick).0[0].lost.clone();
        assert_eq!((lost(50), lost(150)), (None, Some(loss.clone())));
        // The end of this flow is known, and the next flow began after the loss.
        assert_eq!((world.pods(1101, 150), world.pods(1102, 250)), (web(true), web(true)));
        world.look(4000);
    }
    // After a reboot the flow is over, but it may have ended long before.
    world.restart(false, false);
    world.look(4010);
    assert_eq!((world.pods(1100, 50), world.pods(1100, 150)), (web(true), web(false)));
}

#[test]
fn a_clock_that_is_set_is_a_doubt_and_no_flow_is_certain_meanwhile() {
    for (by, meanwhile) in [(500, 1200), (-500, 700)] {
        let mut world = World::new();
        world.report([event(what::BEGAN, 1100, 10, 10), event(what::BEGAN, 1101, 10, 10)]);
        world.look(11);
        world.look(1000);
        let mut look = |tick: u32| world.watch.look(time(tick) + by * SECOND, u64::from(tick) << 30);
        look(1001);
        look(1002);
        world.report([event(what::ENDED, 1101, 10, 1900)]);
        let mut look = |tick: u32| world.watch.look(time(tick) + by * SECOND, u64::from(tick) << 30);
        look(1901);
        look(2000);
        let (before, after) = (time(1000), time(1001) + by * SECOND);
        let doubt = Doubt::Lost(before.min(after), before.max(after), CLOCK);
        assert_eq!(world.ask(1100, meanwhile).1, [doubt], "{by}");
        assert_eq!((world.pods(1100, meanwhile), world.pods(1101, meanwhile)), (web(false), web(false)), "{by}");
        let later = (1900 + by) as u32;
        for calm in [300, later] {
            assert_eq!((world.pods(1100, calm), world.ask(1100, calm).1), (web(true), vec![]), "{by}");
        }
    }
}

#[test]
fn a_clock_that_was_set_back_between_two_agents_is_a_doubt() {
    let mut world = World::new();
    world.look(1000);
    world.restart(true, true);
    world.watch.look(time(600), 1010 << 30);
    world.watch.look(time(2000), 2410 << 30);
    assert_eq!(world.ask(1100, 800).1, [Doubt::Lost(time(600), time(1000), CLOCK)]);
}

#[test]
fn a_file_that_is_missing_from_a_copy_is_a_doubt() {
    let mut world = World::new();
    world.report([event(what::BEGAN, 1100, 10, 10)]);
    world.look(11);
    world.look(3600);
    world.report([event(what::ENDED, 1100, 10, 6000)]);
    world.look(6001);
    world.look(7200);
    world.restart(true, true);
    world.look(7300);
    world.look(7400);
    // Each file begins where the previous one ends.
    assert_eq!((world.pods(1100, 5000), world.ask(1100, 5000).1), (web(true), vec![]));
    assert_eq!(world.ask(1101, 7250).1, []);
    let files = super::super::super::files::all(&world.directory.path().join("flows")).unwrap();
    assert_eq!(files.len(), 4);
    fs::remove_file(&files[1].1).unwrap();
    assert_eq!(world.ask(1100, 5000), (vec![], vec![Doubt::Unwatched(Some(time(3600)), Some(time(7200)))]));
}

#[test]
fn collectors_get_the_flows_of_a_log_that_cannot_be_opened_and_the_next_agent_records_the_loss() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let exporters = Exporters::start(&[Collector { format: Format::Json, address }], "w1");
    let mut world = World::new();
    world.look(20);
    let settings = Settings { exporters: exporters.clone(), ..settings(world.directory.path(), true) };
    let watch = Watch::new(&settings, world.script.clone(), Arc::clone(&world.counts));
    std::mem::replace(&mut world.watch, watch).stop(time(20));
    // A file is in the place of the directory.
    let [log, aside] = ["flows", "aside"].map(|name| world.directory.path().join(name));
    fs::rename(&log, &aside).unwrap();
    fs::write(&log, "").unwrap();
    world.report([event(what::BEGAN, 1100, 30, 30)]);
    world.look(31);
    wait("a collector hears of the flow", || exporters.counts()[0].sent.load(Ordering::Relaxed) > 0);
    assert_eq!(world.counts.lost.load(Ordering::Relaxed), 1);

    world.restart(true, true);
    fs::remove_file(&log).unwrap();
    fs::rename(&aside, &log).unwrap();
    world.look(100);
    world.look(120);
    assert_eq!(world.ask(1100, 60).1, [Doubt::Lost(time(20), time(100), 0)]);
    // The loss is recorded once.
    world.restart(true, true);
    world.look(140);
    world.look(160);
    assert_eq!(world.ask(1100, 130).1, []);
}

#[test]
fn events_that_an_agent_took_and_never_wrote_are_a_doubt() {
    let mut world = World::new();
    world.look(20);
    world.restart(true, true);
    // The disk is full as long as this agent runs.
    world.watch.keeper.open(time(21));
    world.watch.keeper.fill(true).unwrap();
    world.report([event(what::BEGAN, 1100, 30, 30)]);
    world.look(31);
    world.restart(true, true);
    world.look(100);
    world.look(120);
    assert_eq!(world.ask(1100, 60).1, [Doubt::Lost(time(20), time(100), 0)]);
}

#[test]
fn a_pod_with_the_number_of_an_earlier_pod_has_its_own_name() {
    let mut world = World::new();
    world.report([event(what::BEGAN, 1100, 10, 10)]);
    world.look(11);
    world.script.0.borrow_mut().names = vec![((name_kind::ENDPOINT, 5), "prod/db-0/uid".into())];
    world.report([event(what::BEGAN, 1101, 20, 20)]);
    world.look(21);
    world.look(100);
    assert_eq!((world.pods(1100, 50), world.pods(1101, 50)), (web(true), vec![("prod/db-0".to_owned(), true)]));
}
