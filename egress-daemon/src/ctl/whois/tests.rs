//! Answers from leases and flows, and times as users write them.

use super::*;
use crate::ctl::print::Printable as _;
use egress_core::leaselog::{Doubt, LeaseHolder, PortLease};
use flows::Recorded as Flow;

const HOUR: i64 = 3_600_000_000;

fn at(text: &str) -> Moment {
    moment(text).unwrap()
}

#[test]
fn a_time_covers_the_interval_of_its_precision() {
    let exact = at("2026-11-25T14:03:07.5Z");
    assert_eq!(exact.from, exact.until);
    assert_eq!(at("2026-11-25T14:03:07Z").until - at("2026-11-25T14:03:07Z").from, 999_999);
    assert_eq!(at("2026-11-25 15:03+01:00").from, at("2026-11-25T14:03:00Z").from);
    assert_eq!(at("2026-11-25T14:03Z").until - at("2026-11-25T14:03Z").from, 59_999_999);
}

#[test]
fn an_ambiguous_time_is_refused_with_the_candidates() {
    for (text, part) in [
        ("2026-11-25T14:03:00", "the time zone is missing: write 2026-11-25T14:03:00Z"),
        ("14:03", "on which day"),
        ("2026-10-25T02:30[Europe/Berlin]", "is ambiguous in the hour"),
        ("yesterday", "this is not a time"),
        ("2026-13-25T14:03:00Z", "write a date"),
    ] {
        let refused = moment(text).unwrap_err();
        assert!(refused.contains(part), "{text}: {refused}");
    }
}

fn seen() -> SocketAddr {
    "192.0.2.10:1100".parse().unwrap()
}

fn holder(node: &str) -> LeaseHolder {
    LeaseHolder { node: node.into(), first_port: 1088, last_port: 1151, from: Some(HOUR), until: None }
}

fn leases(answer: LeaseAnswer) -> Known<'static> {
    Known { leases: Some(answer), ..Known::default() }
}

#[test]
fn leases_identify_the_node_but_not_the_pod() {
    let answer = LeaseAnswer { holders: [holder("w7")].into(), doubts: Default::default() };
    let view = whois(seen(), Moment { from: 2 * HOUR, until: 2 * HOUR }, None, leases(answer.clone()));
    assert!(view.node_certain && !view.pod_certain, "{view:?}");
    let text = view.text();
    assert!(text.contains("node    w7, which held the ports 1088 to 1151 from 1970-01-01T01:00:00Z"), "{text}");
    assert!(text.contains("ask there"), "{text}");

    let doubts = [Doubt::Unwritten(Some(HOUR), Some(3 * HOUR))].into();
    let view =
        whois(seen(), Moment { from: 2 * HOUR, until: 2 * HOUR }, None, leases(LeaseAnswer { doubts, ..answer }));
    assert!(!view.node_certain && view.text().contains("changes from 1970-01-01T01:00:00Z"), "{}", view.text());
    let nobody = whois(seen(), Moment { from: 0, until: 0 }, None, leases(LeaseAnswer::default()));
    assert!(nobody.text().contains("no node of the cluster had this port"), "{}", nobody.text());
}

#[test]
fn live_flow_identifies_its_pod_since_its_start() {
    let dump = crate::ctl::views::testing::dump();
    let flow = dump.flows.iter().find(|flow| flow.translated() && flow.proto == 6).unwrap();
    let (egress, _) = dump.egress_ip(flow.flow.egress).unwrap();
    let seen = SocketAddr::new(egress, flow.port());
    let bare = SocketAddr::new(flow.remote, flow.remote_port).to_string();
    let to: Option<Server> = format!("{bare}/tcp").parse().ok();
    let now = 24 * HOUR;
    let began = now - dump.seconds_since(flow.flow.created) as i64 * 1_000_000;
    let living = Living { dump: &dump, now };
    let ask = |at: i64, to| {
        whois(seen, Moment { from: at, until: at }, to, Known { living: Some(&living), ..Known::default() })
    };
    let view = ask(now, to);
    assert!(view.node_certain && view.pod_certain, "{view:?}");
    assert_eq!(view.doubts, Vec::<String>::new());
    assert_eq!(view.nodes[0].node, "worker1");
    assert!(view.text().contains("pod     prod/"), "{}", view.text());
    let unnamed = ask(now, None);
    assert!(!unnamed.pod_certain && unnamed.text().contains("--to"), "{}", unnamed.text());
    // Another flow may have another protocol.
    let unnamed = ask(now, bare.parse().ok());
    assert!(!unnamed.pod_certain && unnamed.flows.len() == 1, "{unnamed:?}");
    assert!(unnamed.text().contains(&format!("name the protocol, as in --to {bare}/tcp")), "{}", unnamed.text());
    assert_eq!(ask(now, format!("{bare}/udp").parse().ok()).flows, []);
    let about = ask(began, to);
    assert!(!about.pod_certain && about.text().contains("began or ended at about that time"), "{}", about.text());
    assert_eq!(ask(began - 10 * SLACK, to).flows, []);
}

fn flow(pod: &str, node: &str, to: Option<&str>) -> Likely {
    let flow = Flow {
        egress_ip: seen().ip(),
        port: seen().port(),
        protocol: 6,
        pod: pod.into(),
        node: node.into(),
        policy: Some("web".into()),
        destination: to.map(|to| to.trim_end_matches("/tcp").parse().unwrap()),
        began: HOUR,
        ended: Some(3 * HOUR),
        refused: false,
        ticket: None,
    };
    Likely { flow, surely: true, lost: None }
}

/// Returns the answer for these flows of the port. `doubts` are the gaps in the log.
fn of_flows(likely: Vec<Likely>, doubts: Vec<flows::Doubt>, to: Option<&str>) -> WhoisView {
    let recorded = Some(Recorded { likely, doubts });
    let known = Known {
        recorded,
        leases: Some(LeaseAnswer { holders: [holder("w7")].into(), ..LeaseAnswer::default() }),
        living: None,
    };
    whois(seen(), Moment { from: 2 * HOUR, until: 2 * HOUR }, to.map(|to| to.parse().unwrap()), known)
}

#[test]
fn recorded_flows_identify_the_pod_and_explain_doubts() {
    const TO: Option<&str> = Some("203.0.113.7:443/tcp");
    const OTHER: Option<&str> = Some("203.0.113.8:443/tcp");
    let lost = || vec![flows::Doubt::Lost(HOUR, 2 * HOUR, 7)];
    let certain = |view: &WhoisView| (view.node_certain, view.pod_certain);

    // One flow, and no gaps: no other pod had the port.
    let view = of_flows(vec![flow("prod/web", "w7", None)], vec![], None);
    assert_eq!((certain(&view), view.doubts.len(), view.nodes.len()), ((true, true), 0, 1), "{view:?}");
    let text = view.text();
    assert!(
        text.contains("pod     prod/web on w7, policy web: tcp from 1970-01-01T01:00:00Z to 1970-01-01T03:00"),
        "{text}"
    );
    assert!(text.contains("the node is certain, the pod is certain"), "{text}");

    // With gaps, the answer is certain only if the question names the server and the log has destinations.
    let view = of_flows(vec![flow("prod/web", "w7", TO)], lost(), None);
    assert_eq!(certain(&view), (true, false));
    assert!(view.text().contains("7 starts and ends of flows between 1970-01-01T01:00:00Z"), "{}", view.text());
    assert!(view.text().contains("name the server with --to"), "{}", view.text());
    assert_eq!(certain(&of_flows(vec![flow("prod/web", "w7", TO)], lost(), TO)), (true, true));
    let view = of_flows(vec![flow("prod/web", "w7", None)], lost(), TO);
    assert!(!view.pod_certain && view.text().contains("destinations are not recorded"), "{}", view.text());

    // Two pods had the port, each to a different server.
    let two = || vec![flow("prod/web", "w7", TO), flow("prod/db", "w7", OTHER)];
    let view = of_flows(two(), vec![], None);
    assert!(!view.pod_certain && view.text().contains("flows of several pods"), "{}", view.text());
    let view = of_flows(two(), vec![], OTHER);
    assert_eq!((view.pod_certain, view.recorded[0].pod.as_str(), view.recorded.len()), (true, "prod/db", 1));

    // The flow began or ended at about that time, within the clocks' tolerance; or there was no flow.
    let near = Likely { surely: false, ..flow("prod/web", "w7", TO) };
    let view = of_flows(vec![near.clone()], vec![], TO);
    assert!(!view.pod_certain && view.text().contains("at about that time"), "{}", view.text());
    let cut = Likely { lost: Some(flows::Doubt::Lost(HOUR, HOUR, 7)), ..near };
    let text = of_flows(vec![cut], vec![], TO).text();
    assert!(text.contains("does not show for certain that a flow was open") && text.contains("7 starts and"), "{text}");
    let view = of_flows(vec![], vec![], None);
    assert!(!view.pod_certain && view.text().contains("ask there"), "{}", view.text());
}

#[test]
fn a_recorded_flow_is_certain_only_if_the_question_names_its_protocol_or_the_log_has_no_gaps() {
    const BARE: Option<&str> = Some("203.0.113.7:443");
    let lost = || vec![flows::Doubt::Lost(HOUR, 2 * HOUR, 7)];
    let tcp = || flow("prod/web", "w7", BARE);
    assert!(of_flows(vec![tcp()], vec![], BARE).pod_certain);
    let view = of_flows(vec![tcp()], lost(), BARE);
    assert!(!view.pod_certain && view.text().contains("--to 203.0.113.7:443/tcp"), "{}", view.text());
    assert!(of_flows(vec![tcp()], lost(), Some("203.0.113.7:443/tcp")).pod_certain);
    // A flow of another pod has the same port and the same server.
    let other = flow("prod/dns", "w7", BARE);
    let udp = || Likely { flow: Flow { protocol: 17, ..other.flow.clone() }, ..other.clone() };
    let view = of_flows(vec![tcp(), udp()], vec![], BARE);
    assert!(!view.pod_certain && view.recorded.len() == 2, "{view:?}");
    let view = of_flows(vec![tcp(), udp()], vec![], Some("203.0.113.7:443/udp"));
    assert_eq!((view.pod_certain, view.recorded[0].pod.as_str(), view.recorded.len()), (true, "prod/dns", 1));
    let icmp: Server = "203.0.113.7/icmp".parse().unwrap();
    assert!(icmp.is_of(1) && !icmp.is_of(6) && icmp.address().port() == 0);
}

#[test]
fn a_nodes_own_address_is_certain_only_with_a_flow_to_the_named_server() {
    use crate::ctl::views::testing;
    let mut dump = testing::dump();
    let pin = testing::flow(&dump, ("10.10.0.6", 40_000), ("203.0.113.7", 443), "pin", ("192.0.2.20", 1152));
    dump.flows = vec![pin];
    let living = Living { dump: &dump, now: 24 * HOUR };
    let ask = |port, to: &str, holders: &[&str]| {
        let holders = holders.iter().map(|node| holder(node)).collect();
        let leases = Some(LeaseAnswer { holders, ..LeaseAnswer::default() });
        // The log of flows has no gaps.
        let recorded = Some(Recorded::default());
        let at = Moment { from: living.now, until: living.now };
        let seen = SocketAddr::new("192.0.2.20".parse().unwrap(), port);
        whois(seen, at, to.parse().ok(), Known { leases, recorded, living: Some(&living) })
    };
    let named = "is an address of node worker1";
    let free = ask(40_000, "", &[]);
    assert!(!free.node_certain && free.text().contains(named) && free.text().contains("not known"), "{}", free.text());
    let leased = ask(1300, "", &["gw1"]);
    assert!(!leased.node_certain && leased.text().contains(named), "{}", leased.text());
    let open = ask(1152, "", &["worker1"]);
    assert!(!open.node_certain && !open.pod_certain && open.text().contains(named), "{}", open.text());
    let named = ask(1152, "203.0.113.7:443/tcp", &["worker1"]);
    assert!(named.node_certain && named.pod_certain && named.doubts.is_empty(), "{}", named.text());
    assert_eq!(named.flows[0].pod.as_deref(), Some("prod/pin-0"));
}

#[test]
fn another_node_than_the_named_one_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let access = NodeAccess { node: Some("w7".into()), ..access(directory.path()) };
    let error = ask(&WhoisOptions { seen: seen(), at: None, to: None, log: None, access }).unwrap_err().to_string();
    assert!(error.contains("nothing shows that this is node w7"), "{error}");
}

/// Returns the access to a node whose agent has never run.
fn access(directory: &std::path::Path) -> NodeAccess {
    NodeAccess { bpffs: directory.join("none"), socket: directory.join("none.sock"), node: None }
}

#[test]
fn log_copies_are_found_below_the_named_directory() {
    let directory = tempfile::tempdir().unwrap();
    let make = |path: &str| std::fs::create_dir_all(directory.path().join(path)).unwrap();
    ["w1/flows", "w1/leases", "w2/flows", "w2/leases"].into_iter().for_each(make);
    let below = |path: &str| Logs::below(&directory.path().join(path));
    let relative = |paths: Vec<PathBuf>| -> Vec<PathBuf> {
        paths.iter().map(|path| path.strip_prefix(directory.path()).unwrap().to_owned()).collect()
    };
    let found = |path: &str| below(path).map(|logs| (relative(logs.leases), relative(logs.flows))).unwrap();
    let paths = |paths: &[&str]| -> Vec<PathBuf> { paths.iter().map(PathBuf::from).collect() };
    assert_eq!(found(""), (paths(&["w1/leases", "w2/leases"]), paths(&["w1/flows", "w2/flows"])));
    assert_eq!(found("w1"), (paths(&["w1/leases"]), paths(&["w1/flows"])));
    assert_eq!(found("w2/flows"), (vec![], paths(&["w2/flows"])));
    assert_eq!(found("w1/leases"), (paths(&["w1/leases"]), vec![]));
    make("empty");
    assert!(below("empty").unwrap_err().to_string().contains("has no logs"));
    assert!(below("none").is_err());
}

#[test]
fn log_copy_is_recognized_by_its_files() {
    use flowlog::{Limits, Log, MAX_BYTES};
    use flows::Line;
    let directory = tempfile::tempdir().unwrap();
    let limits = |name: &str| Limits {
        directory: directory.path().join(name),
        retention: std::time::Duration::from_secs(3600),
        bytes: MAX_BYTES,
    };
    let alive = |at| LeaseRecord { at, event: LeaseEvent::Alive };
    let mut leases = Log::open(limits("copy-of-leases"), HOUR).unwrap();
    let mut flows: Log<Line> = Log::open(limits("copy-of-flows"), HOUR).unwrap();
    for at in [HOUR, HOUR + 1] {
        leases.append(&[alive(at)]).unwrap();
        flows.append(&[Line::Started(at, "w1".into()), Line::Alive(at, 0)]).unwrap();
        // At first, both logs have only journals; later, they also have segments.
        let logs = Logs::below(directory.path()).unwrap();
        assert_eq!(logs.leases, [directory.path().join("copy-of-leases")]);
        assert_eq!(logs.flows, [directory.path().join("copy-of-flows")]);
        leases.rotate(at).unwrap();
        flows.rotate(at).unwrap();
        leases.append(&[alive(at)]).unwrap();
        flows.append(&[Line::Started(at, "w1".into())]).unwrap();
        leases.tidy(at).unwrap();
        flows.tidy(at).unwrap();
    }
    // A segment of the other log is an error, not a panic.
    let wanted = flows::Wanted { egress_ip: seen().ip(), port: 1, from: 0, until: 0 };
    let unread = flows::read(&directory.path().join("copy-of-leases"), &wanted).unwrap().unread;
    assert!(unread[0].1.contains("other columns than a log of flows"), "{unread:?}");
    let error = flowlog::read(&directory.path().join("copy-of-flows"), |_| true).unwrap_err().to_string();
    assert!(error.contains("other columns than a log of leases"), "{error}");
    let options = WhoisOptions {
        seen: seen(),
        at: Some(Moment { from: HOUR, until: HOUR }),
        to: None,
        log: Some(directory.path().join("copy-of-flows")),
        access: access(directory.path()),
    };
    assert!(ask(&options).is_ok());
}

#[test]
fn unreadable_flow_log_does_not_hide_the_answer_from_leases() {
    use flowlog::{Limits, Log, MAX_BYTES};
    let directory = tempfile::tempdir().unwrap();
    let (leases, flows) = (directory.path().join("leases"), directory.path().join("flows"));
    let retention = std::time::Duration::from_secs(3600);
    let mut log = Log::open(Limits { directory: leases, retention, bytes: MAX_BYTES }, HOUR).unwrap();
    let lease = PortLease { egress_ip: seen().ip(), first_port: 1088, last_port: 1151, node: "w7".into() };
    let events = [(-5, LeaseEvent::Started), (-5, LeaseEvent::Held(lease)), (5, LeaseEvent::Alive)];
    log.append(&events.map(|(second, event)| LeaseRecord { at: 2 * HOUR + second * 1_000_000, event })).unwrap();
    std::fs::create_dir(&flows).unwrap();
    std::fs::write(flows.join("00000000000000000001.parquet"), "PAR1").unwrap();
    let at = Some(Moment { from: 2 * HOUR, until: 2 * HOUR });
    let log = Some(directory.path().to_owned());
    let access = access(directory.path());
    let view = ask(&WhoisOptions { seen: seen(), at, to: None, log, access }).unwrap();
    assert!(view.node_certain && view.nodes[0].node == "w7", "{view:?}");
    assert!(view.text().contains("a file of the log of flows cannot be read: "), "{}", view.text());
}
