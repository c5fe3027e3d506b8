//! Reported flows are found again after rotations and crashes, in journals and segments.

mod certainty;

use super::follow::{Source, Watch};
use super::interpret::{Event, Lookup, Numbered};
use super::merge::Journal;
use super::*;
use crate::flowlog::{Counts, FlowLog, Mode, export::Exporters};
use egress_common::{
    V4,
    abi::name_kind,
    event::{FlowEvent, what},
    flow::FlowKey,
    net,
};
use egress_core::leaselog::LeaseQuestion;
use egress_node::datapath::Pins;
use proptest::prelude::*;
use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SECOND: Instant = 1_000_000;
/// The time of tick 0.
const EPOCH: Instant = 1_000_000 * SECOND;

fn address(number: u8) -> IpAddr {
    IpAddr::from([192, 0, 2, number])
}

fn entry() -> impl Strategy<Value = Entry> {
    let ip = prop_oneof![(0u8..3).prop_map(address), any::<[u8; 16]>().prop_map(IpAddr::from)];
    let destination = prop::option::of((any::<[u8; 4]>(), any::<u16>()).prop_map(SocketAddr::from));
    (ip, 1000u16..1020, any::<u8>(), any::<u32>(), 0..1000i64, 1u32..4, 0u32..4, destination).prop_map(
        |(egress_ip, port, protocol, ticket, began, pod, policy, destination)| Entry {
            egress_ip,
            port,
            protocol,
            ticket,
            began: EPOCH + began * SECOND,
            pod,
            policy,
            destination,
        },
    )
}

/// Generates a journal of flows, each with a fate (none, an end or a refusal), and with or without its start.
fn lines() -> impl Strategy<Value = Vec<Line>> {
    let flow = (entry(), 0i64..500, 0u8..4).prop_map(|(entry, lasts, fate)| {
        let last = entry.began + lasts * SECOND;
        match fate {
            0 => vec![Line::Began(entry)],
            1 => vec![Line::Began(entry), Line::Ended(entry, last)],
            2 => vec![Line::Began(entry), Line::Refused(entry, last)],
            _ => vec![Line::Ended(entry, last)],
        }
    });
    prop::collection::vec(flow, 0..200).prop_map(|flows| {
        let names = ["prod/web", "10.1.0.9", "policy"].map(str::to_owned);
        let first = [Line::Continued(EPOCH, "w1".into()), Line::Oldest(EPOCH - SECOND)];
        let names = names.into_iter().zip(1..).map(|(name, number)| Line::Name(number, name));
        let last = [Line::Lost(EPOCH, EPOCH + SECOND, 7), Line::Alive(EPOCH + 2 * SECOND, 7)];
        first.into_iter().chain(names).chain(flows.into_iter().flatten()).chain(last).collect()
    })
}

fn sorted(mut flows: Vec<Recorded>) -> Vec<String> {
    flows.sort_by_key(|flow| (flow.began, flow.ended));
    let mut all: Vec<String> = flows.iter().map(|flow| format!("{flow:?}")).collect();
    all.sort();
    all
}

proptest! {
    #[test]
    fn a_segment_gives_back_each_ports_flows_and_what_was_lost(lines in lines(), ip in 0u8..3, port in 1000u16..1020) {
        let mut journal = Journal::of(lines.iter().cloned().map(Some)).unwrap();
        let all = journal.rows.iter().map(|row| journal.recorded(row));
        let wanted = Wanted { egress_ip: address(ip), port, from: Instant::MIN, until: Instant::MAX };
        let expected = all.filter(|flow| (flow.egress_ip, flow.port) == (wanted.egress_ip, port)).collect();
        let file = tempfile::tempfile().unwrap();
        segment::write(&mut journal, &file).unwrap();
        let (span, flows) = segment::read(file, &wanted).unwrap();
        prop_assert_eq!(sorted(flows), sorted(expected));
        prop_assert_eq!(span, journal.span);
    }

    #[test]
    fn a_journal_gives_back_its_lines_up_to_where_it_was_cut(lines in lines(), cut in any::<prop::sample::Index>()) {
        let text = line::encode(&lines);
        let read: Vec<Line> = line::decode(&text, |_| true).flatten().collect();
        prop_assert_eq!(&read, &lines);
        let cut = cut.index(text.len());
        let whole = text[..cut].iter().filter(|byte| **byte == b'\n').count();
        let read: Vec<Line> = line::decode(&text[..cut], |_| true).flatten().collect();
        prop_assert_eq!(&read[..whole], &lines[..whole]);
        let of_port = |line: &Line| match line {
            Line::Began(entry) | Line::Ended(entry, _) | Line::Refused(entry, _) => entry.port == 1001,
            _ => true,
        };
        let may: Vec<Line> = line::decode(&text, line::may_have(1001)).flatten().filter(of_port).collect();
        prop_assert_eq!(may, lines.into_iter().filter(of_port).collect::<Vec<_>>());
    }
}

/// The data that a test reports in place of the programs.
#[derive(Default)]
struct Told {
    events: Vec<Event>,
    lost: u64,
    egress_ips: Vec<((u32, u32), IpAddr)>,
    names: Vec<((u32, u32), String)>,
    oldest: Option<u32>,
}

#[derive(Clone, Default)]
struct Script(Rc<RefCell<Told>>);

impl Lookup for Script {
    fn egress_ip(&self, index: u32, generation: u32) -> Option<IpAddr> {
        let told = self.0.borrow();
        told.egress_ips.iter().find(|(key, _)| *key == (index, generation)).map(|(_, address)| *address)
    }
    fn name(&self, kind: u32, id: u32) -> Option<String> {
        let told = self.0.borrow();
        told.names.iter().find(|(key, _)| *key == (kind, id)).map(|(_, name)| name.clone())
    }
}

impl Source for Script {
    fn take(&mut self, most: usize) -> Vec<Event> {
        let mut told = self.0.borrow_mut();
        let count = most.min(told.events.len());
        told.events.drain(..count).collect()
    }
    fn lost(&self) -> Option<u64> {
        Some(self.0.borrow().lost)
    }
    fn numbered(&self) -> Numbered {
        Numbered { egress_ips: self.0.borrow().egress_ips.clone(), pods: Vec::new() }
    }
    fn oldest(&self) -> Option<u32> {
        self.0.borrow().oldest
    }
}

/// Returns an event of a flow of the first pod with a port. Ticks are roughly seconds since [`EPOCH`].
fn event(what: u8, port: u16, created: u32, last_seen: u32) -> Event {
    let key = FlowKey::<V4> {
        src: net::v4([10, 1, 0, 9].into()),
        dst: net::v4([203, 0, 113, 7].into()),
        src_port: 1,
        dst_port: 443u16.to_be(),
        proto: 6,
    };
    let (egress, egress_generation, policy, endpoint) = (1, 1, 4, 5);
    let (ticket, port, family) = (u32::from(port) + created, port.to_be(), 4);
    let event =
        FlowEvent { key, egress, egress_generation, policy, endpoint, ticket, created, last_seen, port, what, family };
    // SAFETY: the event outlives the slice, and has no padding.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const event).cast::<u8>(), size_of_val(&event)) };
    Event::read(bytes).unwrap()
}

struct World {
    directory: tempfile::TempDir,
    script: Script,
    counts: Arc<Counts>,
    watch: Watch<Script>,
    /// Ticks since [`EPOCH`].
    now: u32,
}

fn settings(directory: &Path, kept: bool) -> Settings {
    Settings {
        config: FlowLog { mode: Mode::Flows, destinations: true, ..FlowLog::default() },
        directory: directory.join("flows"),
        node: "w1".into(),
        pins: Pins::new(directory),
        kept,
        exporters: Exporters::default(),
    }
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let script = Script::default();
        script.0.borrow_mut().egress_ips = vec![((1, 1), address(10))];
        script.0.borrow_mut().names =
            vec![((name_kind::POLICY, 4), "web".into()), ((name_kind::ENDPOINT, 5), "prod/web-0/uid".into())];
        let counts = Arc::new(Counts::default());
        let watch = Watch::new(&settings(directory.path(), false), script.clone(), Arc::clone(&counts));
        let mut world = Self { directory, script, counts, watch, now: 0 };
        world.look(0);
        world
    }

    fn report(&self, events: impl IntoIterator<Item = Event>) {
        self.script.0.borrow_mut().events.extend(events);
    }

    fn look(&mut self, tick: u32) {
        self.now = tick;
        self.watch.look(time(tick), u64::from(tick) << 30);
    }

    /// Replaces the agent, cleanly or after it was killed, and with the same maps or after a reboot of the node.
    fn restart(&mut self, in_order: bool, kept: bool) {
        let watch = Watch::new(&settings(self.directory.path(), kept), self.script.clone(), Arc::clone(&self.counts));
        let before = std::mem::replace(&mut self.watch, watch);
        if in_order {
            before.stop(time(self.now));
        }
    }

    fn ask(&self, port: u16, tick: u32) -> (Vec<Likely>, Vec<Doubt>) {
        self.answer(port, tick, true)
    }

    fn answer(&self, port: u16, tick: u32, living: bool) -> (Vec<Likely>, Vec<Doubt>) {
        let (from, until, slack) = (time(tick), time(tick), 2 * SECOND);
        let wanted = Wanted { egress_ip: address(10), port, from: from - slack - TICK, until: until + slack };
        let found = read(&self.directory.path().join("flows"), &wanted).unwrap();
        answer(found, LeaseQuestion { egress_ip: address(10), port, from, until, slack }, living)
    }

    fn pods(&self, port: u16, tick: u32) -> Vec<(String, bool)> {
        self.ask(port, tick).0.into_iter().map(|likely| (likely.flow.pod, likely.surely)).collect()
    }

    /// Replaces a file with one of an earlier build, which had no tickets.
    fn outdate(&self, number: usize) {
        let (_, path) = super::super::files::all(&self.directory.path().join("flows")).unwrap().remove(number);
        let columns = segment::SCHEMA.replace("  OPTIONAL INT32 ticket;\n", "");
        let schema = Arc::new(parquet::schema::parser::parse_message_type(&columns).unwrap());
        let file = fs::File::create(path).unwrap();
        parquet::file::writer::SerializedFileWriter::new(file, schema, Arc::default()).unwrap().close().unwrap();
    }

    fn files(&self, kind: &str) -> usize {
        let entries = fs::read_dir(self.directory.path().join("flows")).unwrap();
        entries.filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|e| e == kind)).count()
    }
}

fn time(tick: u32) -> Instant {
    EPOCH + ((u64::from(tick) << 30) / 1000) as Instant
}

fn web(surely: bool) -> Vec<(String, bool)> {
    vec![("prod/web-0".to_owned(), surely)]
}

#[test]
fn a_flow_is_found_while_it_lives_and_after_its_end_with_pod_policy_and_server() {
    let mut world = World::new();
    world.report([event(what::BEGAN, 1100, 10, 10)]);
    world.look(11);
    world.look(100);
    assert_eq!(world.pods(1100, 50), web(true));
    // The pod, its policy and its egress IP are removed; then the flow.
    *world.script.0.borrow_mut() = Told::default();
    world.report([event(what::ENDED, 1100, 10, 120), event(what::REFUSED, 1101, 10, 30)]);
    world.look(125);
    world.look(200);
    let (likely, doubts) = world.ask(1100, 50);
    assert_eq!(doubts, []);
    let flow = &likely[0].flow;
    assert_eq!((flow.pod.as_str(), flow.node.as_str(), flow.policy.as_deref()), ("prod/web-0", "w1", Some("web")));
    assert_eq!((flow.began, flow.ended, flow.protocol), (time(10), Some(time(120)), 6));
    assert_eq!(flow.destination, Some("203.0.113.7:443".parse().unwrap()));
    assert_eq!(world.pods(1100, 119), web(false));
    assert_eq!(world.ask(1100, 150), (vec![], vec![]));
    assert_eq!(world.ask(1100, 5), (vec![], vec![]));
    // The firewall dropped every packet of this flow.
    assert_eq!(world.ask(1101, 20), (vec![], vec![]));
    assert_eq!(world.counts.written.load(Ordering::Relaxed), 3);
}

#[test]
fn a_flow_that_lives_through_files_is_one_and_ends_when_it_ends() {
    let mut world = World::new();
    world.report([event(what::BEGAN, 1100, 10, 10)]);
    world.look(11);
    for hour in 1..4 {
        world.look(hour * 3400);
    }
    assert_eq!(world.files("parquet"), 3);
    assert_eq!(world.pods(1100, 9000), web(true));
    world.script.0.borrow_mut().names.clear();
    world.report([event(what::ENDED, 1100, 10, 10_200)]);
    world.look(10_201);
    world.look(20_000);
    assert_eq!(world.pods(1100, 5000), web(true));
    assert_eq!(world.ask(1100, 5000).0[0].flow.policy.as_deref(), Some("web"));
    assert_eq!(world.ask(1100, 12_000), (vec![], vec![]));
}

#[test]
fn flow_log_continues_after_an_agent_restart_but_not_after_a_reboot() {
    let mut world = World::new();
    world.report([event(what::BEGAN, 1100, 10, 10)]);
    world.look(11);
    world.restart(true, true);
    // These events are reported while no agent runs.
    world.report([event(what::ENDED, 1100, 10, 60), event(what::BEGAN, 1101, 70, 70)]);
    world.look(80);
    assert_eq!(world.ask(1100, 40).1, []);
    assert_eq!((world.pods(1100, 40), world.ask(1100, 70)), (web(true), (vec![], vec![])));
    // The agent is killed, and the events that it had taken may be missing.
    world.look(100);
    world.restart(false, true);
    world.look(120);
    assert_eq!(world.ask(1101, 110).1, [Doubt::Lost(time(100), time(120), 0)]);
    assert_eq!(world.ask(1101, 90).1, []);
    // The node reboots: no flow survives, and flows are not recorded meanwhile.
    world.look(150);
    world.restart(false, false);
    world.look(200);
    world.look(300);
    // The end of the flow may be among the missing events.
    assert_eq!((world.pods(1101, 90), world.pods(1101, 140)), (web(true), web(false)));
    assert_eq!(world.ask(1101, 170).1, [Doubt::Unwatched(Some(time(150)), Some(time(200)))]);
    assert_eq!(world.ask(1101, 250), (vec![], vec![]));
    assert_eq!(world.ask(1101, 400).1, [Doubt::Unwatched(Some(time(300)), None)]);
}

#[test]
fn lost_flow_events_are_counted_and_logged() {
    let mut world = World::new();
    world.look(20);
    // The buffer was full, and one flow's egress IP is no longer known.
    world.script.0.borrow_mut().lost = 5;
    world.script.0.borrow_mut().egress_ips.clear();
    world.restart(true, true);
    world.report([event(what::ENDED, 1100, 10, 20)]);
    world.look(40);
    world.look(60);
    let lost = |at| world.ask(1100, at).1;
    assert_eq!(lost(30), [Doubt::Lost(time(20), time(40), 6)]);
    assert_eq!((lost(10), lost(55)), (vec![], vec![]));
    assert_eq!(world.counts.lost.load(Ordering::Relaxed), 6);
    // The loss is recorded only once, even across agents.
    world.restart(true, true);
    world.look(80);
    world.look(100);
    assert_eq!(world.ask(1100, 70).1, []);
    // The answer is the same after the journal has become a segment.
    world.look(4000);
    assert_eq!(world.files("parquet"), 3);
    assert_eq!(world.ask(1100, 30).1, [Doubt::Lost(time(20), time(40), 6)]);
}

#[test]
fn a_flow_ends_in_a_later_file_even_if_the_clock_was_set_or_its_pods_name_is_gone() {
    for by in [-7200, 7200] {
        let mut world = World::new();
        world.report([event(what::BEGAN, 1100, 10, 10), event(what::BEGAN, 1101, 10, 10)]);
        world.look(11);
        world.look(3600);
        world.look(3700);
        assert_eq!(world.files("parquet"), 1);
        // The agent is replaced and the clock set, so an end repeats a different start time, and the pod's address in place of its name.
        world.restart(true, true);
        world.script.0.borrow_mut().names.clear();
        world.report([event(what::ENDED, 1100, 10, 3710), event(what::REFUSED, 1101, 10, 3710)]);
        world.watch.look(time(3711) + by * SECOND, 3711 << 30);
        world.watch.look(time(30_000) + by * SECOND, 30_000 << 30);
        assert_eq!(world.ask(1100, 20_000), (vec![], vec![]), "{by}");
        let flow = &world.ask(1100, 2000).0[0].flow;
        assert_eq!((flow.pod.as_str(), flow.policy.as_deref(), flow.began), ("prod/web-0", Some("web"), time(10)));
        assert_eq!(world.ask(1101, 20_000).0, vec![], "{by}");
    }
}

#[test]
fn many_flows_of_one_port_are_settled_at_once() {
    let flow = |number: u32, ended: Option<Instant>| Recorded {
        egress_ip: address(10),
        port: 1100,
        protocol: 17,
        pod: "prod/web-0".into(),
        node: "w1".into(),
        policy: None,
        destination: None,
        began: EPOCH + Instant::from(number),
        ended,
        refused: false,
        ticket: Some(number),
    };
    let count = 100_000;
    let open = (0..count).map(|number| (0, flow(number, None)));
    let flows = open.chain((0..count).map(|number| (1, flow(number, Some(EPOCH + SECOND))))).collect();
    let span = |from| Span { from, until: from + 10 * SECOND, ..Span::default() };
    let found = Found { spans: vec![span(EPOCH), span(EPOCH + 10 * SECOND)], flows, ..Found::default() };
    let (from, until) = (EPOCH, EPOCH + SECOND);
    let began = std::time::Instant::now();
    let (likely, _) = answer(found, LeaseQuestion { egress_ip: address(10), port: 1100, from, until, slack: 0 }, true);
    assert_eq!(likely.len(), count as usize);
    // With a linear search for each flow, it would take minutes.
    assert!(began.elapsed() < std::time::Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn a_file_that_cannot_be_read_is_a_doubt_and_the_others_still_answer() {
    let mut world = World::new();
    world.report([event(what::BEGAN, 1100, 10, 10)]);
    world.look(11);
    world.look(3600);
    world.report([event(what::ENDED, 1100, 10, 4000), event(what::BEGAN, 1101, 4000, 4000)]);
    world.look(4001);
    world.script.0.borrow_mut().oldest = Some(4000);
    world.look(7200);
    world.report([event(what::BEGAN, 1102, 7300, 7300)]);
    world.look(7301);
    world.look(7400);
    world.outdate(1);

    assert_eq!((world.pods(1100, 2000), world.ask(1100, 2000).1), (web(true), vec![]));
    assert_eq!((world.pods(1102, 7350), world.ask(1102, 7350).1), (web(true), vec![]));
    let is_unread =
        |doubt: &Doubt| matches!(doubt, Doubt::Unread(why) if why.contains("other columns than a log of flows"));
    // It is unknown whether the flow of the first file was still open.
    let (likely, doubts) = world.ask(1100, 5000);
    assert_eq!((likely, &doubts[0]), (vec![], &Doubt::Unwatched(Some(time(3600)), Some(time(7200)))));
    assert!(doubts.len() == 2 && is_unread(&doubts[1]), "{doubts:?}");
    // A copy of the log does not show that the flow of the second file is still open.
    let (likely, doubts) = world.answer(1101, 7350, false);
    assert_eq!((likely, &doubts[0]), (vec![], &Doubt::Older(time(7200))));
    assert!(doubts.len() == 2 && is_unread(&doubts[1]), "{doubts:?}");
}

#[test]
fn a_file_that_cannot_be_read_is_a_doubt_for_the_time_that_it_covers() {
    let mut world = World::new();
    world.look(3600);
    world.script.0.borrow_mut().oldest = Some(10);
    world.look(7200);
    world.look(9000);
    world.outdate(0);
    world.outdate(1);
    let unread = |(_, doubts): (Vec<Likely>, Vec<Doubt>)| {
        [0, 3600].map(|tick| {
            let name = format!("{:020}.parquet", time(tick));
            doubts.iter().any(|doubt| matches!(doubt, Doubt::Unread(why) if why.contains(&name)))
        })
    };
    assert_eq!(unread(world.ask(1100, 1000)), [true, false]);
    assert_eq!(unread(world.ask(1100, 5000)), [false, true]);
    // The clocks of nodes may differ.
    assert_eq!(unread(world.ask(1100, 3601)), [true, true]);
    assert_eq!(unread(world.ask(1100, 7201)), [false, true]);
    // The unread files cause no doubt about the present.
    assert_eq!(world.ask(1100, 9100).1, [Doubt::Unwatched(Some(time(9000)), None)]);
    // A flow that was open when the third file began may be in the second file.
    assert_eq!(unread(world.answer(1100, 8000, false)), [false, true]);
}

#[test]
fn log_copy_gives_no_certainty_about_flows_older_than_its_first_file() {
    let mut world = World::new();
    world.report([event(what::BEGAN, 1100, 10, 10)]);
    world.look(11);
    world.script.0.borrow_mut().oldest = Some(10);
    world.look(3600);
    world.look(3700);
    assert_eq!((world.answer(1100, 3650, false).1, world.answer(1100, 3650, false).0.len()), (vec![], 1));
    // The file in which the flow began is removed, because it is too old.
    let first = super::super::files::all(&world.directory.path().join("flows")).unwrap().remove(0).1;
    fs::remove_file(first).unwrap();
    assert_eq!(world.answer(1100, 3650, false), (vec![], vec![Doubt::Older(time(3600))]));
    // On the node itself, open flows are known.
    assert_eq!(world.ask(1100, 3650).1, vec![]);
    // The flow ends, and a later file shows that all other flows are younger.
    world.report([event(what::ENDED, 1100, 10, 3800)]);
    world.look(3801);
    assert_eq!(world.answer(1101, 3650, false).1, vec![Doubt::Older(time(3600))]);
    world.script.0.borrow_mut().oldest = Some(3700);
    world.look(7300);
    world.look(7400);
    let (likely, doubts) = world.answer(1100, 3650, false);
    assert_eq!((likely.len(), doubts), (1, vec![]));
}
