//! Tests of explanations from maps that the encoder wrote.

use super::*;
use crate::ctl::{
    print::{Output, print},
    views::testing::{dump, dump_of, egress_index, flow, ip, policy_index, view},
};
use egress_common::{endpoint::MemberKey, hash, limits::SLOT_PROBES, net, port_block};
use egress_core::encode::NodeView;

fn ask(dump: &Dump, pod: &str, to: &str, from: Option<u16>) -> Explanation {
    let question = Question::new(pod, to.parse().unwrap(), from);
    explain(ViewSources { dump, agent: None }, &question).unwrap_or_else(|error| panic!("{error}"))
}

fn action(dump: &Dump, pod: &str, to: &str, from: Option<u16>) -> (PacketAction, Option<&'static str>) {
    let answer = ask(dump, pod, to, from);
    (answer.outcome.action, answer.outcome.counter)
}

fn changed(change: impl FnOnce(&mut NodeView)) -> Dump {
    let mut view = view();
    change(&mut view);
    dump_of(&view)
}

#[test]
fn new_flow_gets_the_egress_ip_that_its_hash_selects() {
    let dump = dump();
    let record = *dump.policy(policy_index(&dump, "web"), false).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for port in 41_000u16..41_040 {
        let key = egress_common::flow::FlowKey {
            src: net::v4("10.10.0.5".parse().unwrap()),
            dst: net::v4("203.0.113.7".parse().unwrap()),
            src_port: port.to_be(),
            dst_port: 443u16.to_be(),
            proto: 6,
        };
        let egress = dump.maglev(&record, hash::flow(&key, record.seed) % record.table_len).unwrap();
        let expected = dump.egress_ip(egress).unwrap().0;
        let answer = ask(&dump, "prod/web-0", "203.0.113.7:443/tcp", Some(port));
        assert_eq!((answer.outcome.action, answer.outcome.egress_ip), (PacketAction::Sent, Some(expected)));
        let gateway = if expected == ip("192.0.2.10") { "gw1" } else { "gw2" };
        assert_eq!(answer.outcome.gateway.as_deref(), Some(gateway));
        assert_eq!(answer.outcome.policy.as_deref(), Some("web"));
        seen.insert(expected);
    }
    assert_eq!(seen.len(), 2, "both slots are used");
}

#[test]
fn explain_follows_the_steps_of_the_datapath() {
    let answer = ask(&dump(), "prod/web-0", "203.0.113.7:443/tcp", Some(41_000));
    let steps: Vec<_> = answer.steps.iter().map(|step| step.step).collect();
    assert_eq!(steps, ["flow", "endpoint", "excepts", "route", "policy", "hash", "ports", "gateway", "transport"]);
    let text = print(&answer, Output::Table).unwrap();
    assert!(text.contains(" 4. route      The longest match in the class is 0.0.0.0/0, of policy web.\n"), "{text}");
    assert!(text.contains("\nSENT with source 192.0.2.1"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&print(&answer, Output::Json).unwrap()).unwrap();
    assert_eq!(json["outcome"]["action"], "sent");
    assert_eq!((json["flow"].is_null(), &json["steps"][0]["step"]), (true, &"flow".into()));
}

#[test]
fn an_existing_flow_keeps_its_slot() {
    let dump = dump();
    let answer = ask(&dump, "10.10.0.5", "203.0.113.7:443/tcp", Some(40_000));
    assert_eq!(answer.flow.as_ref().and_then(|flow| flow.egress_port), Some(1024));
    assert_eq!(answer.outcome.egress_ip, Some(ip("192.0.2.10")));
    assert_eq!(answer.pod.as_deref(), Some("prod/web-0"));
    let left_alone = ask(&dump, "10.10.0.5", "198.51.100.9:55555/tcp", Some(8080));
    assert_eq!(left_alone.outcome.action, PacketAction::Passed);
    assert_eq!(left_alone.flow.map(|flow| flow.kind).as_deref(), Some("untouched"));
}

#[test]
fn flows_that_lost_their_egress_ip_are_dropped() {
    let mut dump = dump();
    let mut severed = flow(&dump, ("10.10.0.5", 5), ("203.0.113.7", 443), "web", ("192.0.2.10", 1025));
    severed.flow.kind = kind::SEVERED;
    let ownerless = flow(&dump, ("10.10.0.5", 6), ("203.0.113.7", 443), "web", ("192.0.2.12", 1600));
    dump.flows = vec![severed, ownerless];
    let to = "203.0.113.7:443/tcp";
    assert_eq!(action(&dump, "10.10.0.5", to, Some(5)), (PacketAction::Dropped, Some("drop_severed")));
    assert_eq!(action(&dump, "10.10.0.5", to, Some(6)), (PacketAction::Dropped, Some("drop_no_owner")));
}

#[test]
fn explain_without_a_source_port_shows_the_shares_of_slots() {
    let answer = ask(&dump(), "prod/web-0", "203.0.113.7:443/tcp", None);
    assert_eq!(answer.outcome.action, PacketAction::Depends);
    assert!(answer.steps[0].text.starts_with("This pod has 2 open flows"), "{:?}", answer.steps[0]);
    let shares: Vec<_> = answer.steps.iter().filter(|step| step.step == "hash").map(|s| s.text.as_str()).collect();
    assert_eq!(shares.len(), 2);
    assert!(shares[0].contains("192.0.2.10, by gateway gw1") && shares[0].starts_with("50 %"), "{shares:?}");
}

#[test]
fn an_assigned_pod_needs_no_source_port() {
    let answer = ask(&dump(), "prod/pin-0", "203.0.113.7:443/tcp", None);
    assert_eq!((answer.outcome.action, answer.outcome.egress_ip), (PacketAction::Sent, Some(ip("192.0.2.20"))));
    assert!(answer.outcome.text.contains("straight out of this node"), "{}", answer.outcome.text);
    assert!(answer.steps.iter().any(|step| step.text.contains("dropped") && step.step == "protocol"), "history");
}

#[test]
fn packets_without_a_policy_pass() {
    let dump = dump();
    for (pod, to, step) in [
        ("prod/web-0", "10.96.0.1:53/udp", "excepts"),
        ("prod/web-0", "198.51.100.1:80/tcp", "route"),
        ("prod/pin-0", "192.0.2.99:80/tcp", "route"),
        ("prod/free-0", "203.0.113.7:443/tcp", "endpoint"),
        ("prod/web-0", "224.0.0.1:5353/udp", "destination"),
        ("prod/web-0", "169.254.169.254:80/tcp", "destination"),
        ("10.10.0.99", "203.0.113.7:443/tcp", "endpoint"),
    ] {
        let answer = ask(&dump, pod, to, Some(1));
        assert_eq!(answer.outcome.action, PacketAction::Passed, "{pod} {to}");
        assert_eq!(answer.steps.last().map(|step| step.step), Some(step), "{pod} {to}");
    }
}

#[test]
fn explain_names_the_counter_of_a_dropped_packet() {
    let to = "203.0.113.7:443/tcp";
    let base = dump();
    assert_eq!(action(&base, "prod/web-0", "203.0.113.7/50", None), (PacketAction::Dropped, Some("drop_protocol")));
    // The policy has no slot for IPv6.
    let v6 = action(&base, "prod/web-0", "[2001:db8::7]:443/tcp", Some(1));
    assert_eq!(v6, (PacketAction::Dropped, Some("drop_no_gateway")));

    let none = changed(|view| view.policies.values_mut().flat_map(|p| &mut p.slots).for_each(|s| s.usable = false));
    assert_eq!(action(&none, "prod/web-0", to, Some(1)), (PacketAction::Dropped, Some("drop_no_gateway")));
    assert_eq!(action(&none, "prod/pin-0", to, Some(1)).0, PacketAction::Passed, "onNoGateway: NodeIP");

    let unleased = changed(|view| view.egress_ips.values_mut().for_each(|e| e.blocks.clear()));
    assert_eq!(action(&unleased, "prod/web-0", to, Some(1)), (PacketAction::Dropped, Some("drop_no_port")));

    let mut leaving = dump();
    leaving.tables.policies.clear();
    assert_eq!(action(&leaving, "prod/web-0", to, Some(1)), (PacketAction::Dropped, Some("drop_no_policy")));

    let held = changed(|view| view.config.iter_mut().for_each(|config| config.flags = flags::HOLD));
    assert_eq!(action(&held, "10.10.0.99", to, Some(1)), (PacketAction::Dropped, Some("drop_held")));
    assert_eq!(
        action(&held, "10.10.0.99", "10.0.0.1:1/tcp", Some(1)).0,
        PacketAction::Passed,
        "an excepted destination"
    );
}

#[test]
fn unusable_slot_leads_to_the_next_attempt() {
    let mut dump = dump();
    let (policy, egress) = (policy_index(&dump, "web"), egress_index(&dump, "192.0.2.10"));
    dump.tables.members.get_mut(&MemberKey { policy, egress }).unwrap().usable = 0;
    let (mut retried, mut gave_up) = (0, 0);
    for port in 1..200 {
        let answer = ask(&dump, "prod/web-0", "203.0.113.7:443/tcp", Some(port));
        let attempts = answer.steps.iter().filter(|step| step.step == "hash").count();
        assert!(attempts <= SLOT_PROBES as usize);
        match answer.outcome.action {
            PacketAction::Sent => assert_eq!(answer.outcome.egress_ip, Some(ip("192.0.2.11"))),
            _ => {
                assert_eq!((attempts, answer.outcome.counter), (SLOT_PROBES as usize, Some("drop_no_gateway")));
                gave_up += 1;
            }
        }
        retried += usize::from(attempts > 1);
    }
    assert!(retried > 50 && gave_up < 50, "{retried} {gave_up}");
}

#[test]
fn explain_reports_exhausted_ports() {
    let mut dump = changed(|view| drop(view.egress_ips.remove(&ip("192.0.2.11"))));
    let base = flow(&dump, ("10.10.0.5", 0), ("203.0.113.7", 443), "web", ("192.0.2.10", 1024));
    let blocks = dump.blocks(egress_index(&dump, "192.0.2.10")).to_vec();
    let ports = blocks.iter().flat_map(|block| (0..port_block::SIZE).map(|i| port_block::first_port(*block) + i));
    dump.flows = ports
        .enumerate()
        .map(|(i, port)| {
            let mut flow = base;
            flow.pod_port = 2000 + i as u16;
            flow.flow.port = port.to_be();
            flow
        })
        .collect();
    let to = "203.0.113.7:443/tcp";
    assert_eq!(action(&dump, "prod/web-0", to, Some(1)), (PacketAction::Dropped, Some("drop_no_port")));
    assert_eq!(
        action(&dump, "prod/web-0", "203.0.113.8:443/tcp", Some(1)).0,
        PacketAction::Sent,
        "another destination"
    );
    // A connection that both ends have closed releases its port.
    dump.flows[7].flow.back = egress_common::tcp::end::RST | egress_common::tcp::end::ACCEPTED;
    assert_eq!(action(&dump, "prod/web-0", to, Some(1)).0, PacketAction::Sent);
}

#[test]
fn explain_refuses_unknown_pods_and_mixed_families() {
    let dump = dump();
    let error = |pod: &str, to: &str| {
        let question = Question::new(pod, to.parse().unwrap(), None);
        explain(ViewSources { dump: &dump, agent: None }, &question).unwrap_err().to_string()
    };
    let text = error("prod/nobody", "203.0.113.7:443/tcp");
    assert!(text.contains("prod/free-0, prod/pin-0, prod/web-0"), "{text}");
    assert!(error("prod/pin-0", "[2001:db8::1]:1/tcp").contains("no address of the family"));
    assert!(error("10.10.0.5", "[2001:db8::1]:1/tcp").contains("different families"));
}

#[test]
fn destinations_are_parsed() {
    for (text, address, port, protocol) in [
        ("203.0.113.7:443/tcp", "203.0.113.7", 443, Protocol::Tcp),
        ("[2001:db8::7]:53/UDP", "2001:db8::7", 53, Protocol::Udp),
        ("203.0.113.7/icmp", "203.0.113.7", 0, Protocol::Icmp),
        ("2001:db8::7/icmpv6", "2001:db8::7", 0, Protocol::Icmp),
        ("[2001:db8::7]/132", "2001:db8::7", 0, Protocol::Other(132)),
    ] {
        assert_eq!(text.parse(), Ok(Destination { address: ip(address), port, protocol }), "{text}");
    }
    for text in
        ["", "203.0.113.7", "203.0.113.7:443", "203.0.113.7/tcp", "203.0.113.7:99999/tcp", "x/icmp", "1.2.3.4/256"]
    {
        let error = text.parse::<Destination>().unwrap_err().to_string();
        assert!(error.contains("203.0.113.7:443/tcp"), "{error}");
    }
}
