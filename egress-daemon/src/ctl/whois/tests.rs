//! Answers out of leases and flows, and times that people write.

use super::*;
use crate::ctl::print::View as _;
use egress_core::leaselog::{Doubt, Holder};

const HOUR: i64 = 3_600_000_000;

fn at(text: &str) -> Moment {
    moment(text).unwrap()
}

#[test]
fn a_time_has_a_zone_and_means_what_it_leaves_open() {
    let exact = at("2026-11-25T14:03:07.5Z");
    assert_eq!(exact.from, exact.until);
    assert_eq!(at("2026-11-25T14:03:07Z").until - at("2026-11-25T14:03:07Z").from, 999_999);
    assert_eq!(at("2026-11-25 15:03+01:00").from, at("2026-11-25T14:03:00Z").from);
    assert_eq!(at("2026-11-25T14:03Z").until - at("2026-11-25T14:03Z").from, 59_999_999);
}

#[test]
fn a_time_that_may_be_several_is_asked_back() {
    for (text, part) in [
        ("2026-11-25T14:03:00", "in which zone was this: write 2026-11-25T14:03:00Z"),
        ("14:03", "on which day"),
        ("2026-10-25T02:30[Europe/Berlin]", "which of two hours"),
        ("yesterday", "this is no time"),
        ("2026-13-25T14:03:00Z", "write a date"),
    ] {
        let refused = moment(text).unwrap_err();
        assert!(refused.contains(part), "{text}: {refused}");
    }
}

fn seen() -> SocketAddr {
    "192.0.2.10:1100".parse().unwrap()
}

fn holder(node: &str) -> Holder {
    Holder { node: node.into(), first_port: 1088, last_port: 1151, from: Some(HOUR), until: None }
}

fn leases(answer: Answer) -> Known<'static> {
    Known { leases: Some(answer), ..Known::default() }
}

#[test]
fn leases_name_the_node_and_say_why_not_the_pod() {
    let answer = Answer { holders: [holder("w7")].into(), doubts: Default::default() };
    let view = whois(seen(), Moment { from: 2 * HOUR, until: 2 * HOUR }, None, leases(answer.clone()));
    assert!(view.node_certain && !view.pod_certain, "{view:?}");
    let text = view.text();
    assert!(text.contains("node    w7, which held the ports 1088 to 1151 from 1970-01-01T01:00:00Z"), "{text}");
    assert!(text.contains("ask there"), "{text}");

    let doubts = [Doubt::Unwritten(Some(HOUR), Some(3 * HOUR))].into();
    let view = whois(seen(), Moment { from: 2 * HOUR, until: 2 * HOUR }, None, leases(Answer { doubts, ..answer }));
    assert!(!view.node_certain && view.text().contains("nobody wrote from 1970-01-01T01:00:00Z"), "{}", view.text());
    let nobody = whois(seen(), Moment { from: 0, until: 0 }, None, leases(Answer::default()));
    assert!(nobody.text().contains("no node of the cluster had this port"), "{}", nobody.text());
}

#[test]
fn a_living_flow_names_its_pod_for_all_the_time_that_it_has_lived() {
    let dump = crate::ctl::views::testing::dump();
    let flow = dump.flows.iter().find(|flow| flow.translated() && flow.proto == 6).unwrap();
    let (egress, _) = dump.egress_ip(flow.flow.egress).unwrap();
    let seen = SocketAddr::new(egress, flow.port());
    let to = Some(SocketAddr::new(flow.remote, flow.remote_port));
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
    let about = ask(began, to);
    assert!(!about.pod_certain && about.text().contains("began or ended at about that time"), "{}", about.text());
    assert_eq!(ask(began - 10 * SLACK, to).flows, []);
}
