//! Tests of the views over maps that the encoder wrote.

use super::testing::{START, dump, dump_of, flow, ip, view};
use super::*;
use crate::{
    ctl::print::{Output, Printable, print},
    observe::state::{EgressIpState, GatewayState, NodeState, PolicyState, ProbeResult},
};
use serde_json::Value;

fn maps_only(dump: &Dump) -> ViewSources<'_> {
    ViewSources { dump, agent: None }
}

fn agent() -> AgentState {
    let not_ready = ConditionState {
        kind: "Ready".into(),
        status: "False".into(),
        reason: "NoGateway".into(),
        message: "no node matches".into(),
    };
    AgentState {
        node: NodeState { name: "worker1".into(), ..NodeState::default() },
        policies: vec![
            PolicyState {
                name: "web".into(),
                conditions: ["Ready", "Programmed"]
                    .map(|kind| ConditionState { kind: kind.into(), status: "True".into(), ..not_ready.clone() })
                    .into(),
                ..PolicyState::default()
            },
            PolicyState { name: "far".into(), conditions: vec![not_ready], ..PolicyState::default() },
        ],
        gateways: vec![
            GatewayState { name: "gw1".into(), probe: ProbeResult::Alive, rtt_micros: Some(99), ..Default::default() },
            GatewayState { name: "gw2".into(), probe: ProbeResult::Dead, ..Default::default() },
        ],
        egress_ips: vec![EgressIpState {
            address: ip("192.0.2.10"),
            pool: Some("public".into()),
            owner: Some("gw1".into()),
            preferred: Some("gw2".into()),
            epoch: 3,
            fixed: false,
            conditions: vec![],
        }],
        ..AgentState::default()
    }
}

/// Prints a view as a table, which must fit 100 columns, and as JSON.
fn check_prints<V: Printable>(view: &V) -> (String, Value) {
    let text = print(view, Output::Table).unwrap();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let json: Value = serde_json::from_str(&print(view, Output::Json).unwrap()).unwrap();
    (text, json)
}

#[test]
fn policies_show_slots_shares_and_owners() {
    let dump = dump();
    let list = policies(maps_only(&dump));
    assert_eq!(list.node.as_deref(), Some("worker1"));
    let names: Vec<&str> = list.items.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["pin", "web"]);
    let web = &list.items[1];
    assert_eq!((web.distribution.as_deref(), web.endpoints, web.prefixes), (Some("PerFlow"), 1, 2));
    assert_eq!((web.on_no_gateway.as_deref(), web.existing_connections.as_deref()), (Some("Drop"), Some("Keep")));
    assert_eq!(web.ready, None);
    let slots: Vec<_> =
        web.slots.iter().map(|s| (s.egress_ip, s.owner.as_deref(), s.usable, s.share_percent)).collect();
    assert_eq!(
        slots,
        [
            (ip("192.0.2.10"), Some("gw1"), true, 50),
            (ip("192.0.2.11"), Some("gw2"), true, 50),
            (ip("192.0.2.12"), None, false, 0)
        ]
    );
    let pin = &list.items[0];
    assert_eq!(pin.distribution.as_deref(), Some("PerEndpoint"));
    assert_eq!((pin.on_no_gateway.as_deref(), pin.existing_connections.as_deref()), (Some("NodeIP"), Some("Drop")));
    let (text, json) = check_prints(&list);
    assert!(text.contains("192.0.2.10 (50 %, gw1)") && text.contains("not for new flows"), "{text}");
    assert_eq!(json["items"][1]["slots"][0]["egressIp"], "192.0.2.10");
    assert_eq!(json["agentAnswered"], false);
}

#[test]
fn views_include_information_from_the_agent() {
    let (dump, agent) = (dump(), agent());
    let sources = ViewSources { dump: &dump, agent: Some(&agent) };
    let list = policies(sources);
    let ready: Vec<_> = list.items.iter().map(|row| (row.name.as_str(), row.ready.as_deref())).collect();
    assert_eq!(ready, [("far", Some("False (NoGateway)")), ("pin", None), ("web", Some("True"))]);
    assert_eq!((list.items[0].endpoints, list.items[0].slots.len()), (0, 0));
    let problems: Vec<_> = list.items.iter().map(|row| row.problems.clone()).collect();
    assert_eq!(problems, [vec!["no node matches".to_owned()], vec![], vec![]], "a good condition is no problem");

    let list = gateways(sources);
    let rows: Vec<_> = list.items.iter().map(|row| (row.name.as_str(), row.probe, row.rtt_micros)).collect();
    let (alive, dead) = (Some(ProbeResult::Alive), Some(ProbeResult::Dead));
    assert_eq!(rows, [("gw1", alive, Some(99)), ("gw2", dead, None), ("worker1", None, None)]);

    let first = &ips(sources).items[0];
    assert_eq!((first.pool.as_deref(), first.preferred_owner.as_deref()), (Some("public"), Some("gw2")));
}

#[test]
fn gateway_shows_interfaces_with_xdp_and_why_others_lack_it() {
    let (dump, mut agent) = (dump(), agent());
    agent.node.drivers = [("eth0".to_owned(), None), ("ext0".to_owned(), Some("it is a veth".to_owned()))].into();
    let list = gateways(ViewSources { dump: &dump, agent: Some(&agent) });
    let own = list.items.iter().find(|row| row.name == agent.node.name).unwrap();
    assert_eq!(own.native.as_deref(), Some(&["eth0".to_owned()][..]));
    assert_eq!(own.why_not_better.as_deref(), Some("not XDP at ext0: it is a veth"));
    assert!(list.items.iter().all(|row| row.name == agent.node.name || row.native.is_none()));
    let (text, _) = check_prints(&list);
    assert!(text.contains("not XDP at ext0: it is a veth"), "{text}");
}

#[test]
fn gateways_count_the_flows_that_they_carry() {
    let dump = dump();
    let list = gateways(maps_only(&dump));
    let rows: Vec<_> = list.items.iter().map(|r| (r.name.as_str(), r.address, r.local, r.flows)).collect();
    assert_eq!(
        rows,
        [
            ("gw1", Some(ip("172.16.0.11")), false, 1),
            ("gw2", Some(ip("172.16.0.12")), false, 1),
            ("worker1", None, true, 0)
        ]
    );
    let (text, json) = check_prints(&list);
    assert!(text.starts_with("ADDRESS") && text.contains("(this node)"), "{text}");
    assert_eq!(json["items"][0]["usedForNewFlows"], true);
    assert_eq!(json["items"][0]["rttMicros"], Value::Null);
}

#[test]
fn egress_ips_show_owner_epoch_and_ports() {
    let dump = dump();
    let list = ips(maps_only(&dump));
    let rows: Vec<_> =
        list.items.iter().map(|r| (r.egress_ip, r.owner.as_deref(), r.epoch, r.ports, r.flows)).collect();
    assert_eq!(
        rows,
        [
            (ip("192.0.2.10"), Some("gw1"), 3, 192, 1),
            (ip("192.0.2.11"), Some("gw2"), 3, 64, 1),
            (ip("192.0.2.12"), None, 3, 64, 0),
            (ip("192.0.2.20"), Some("worker1"), 1 << 33, 64, 0),
        ]
    );
    let own = &list.items[3];
    assert!(own.owned_here && own.fixed && !own.announced);
    assert_eq!(list.items[2].policies, ["web"]);
    assert_eq!(list.items[2].usable_for, Vec::<String>::new());
    let (text, _) = check_prints(&list);
    assert!(text.contains("worker1 (here)") && text.contains("avoided") && text.contains("node's own"), "{text}");
}

#[test]
fn endpoints_show_policies_and_assignments() {
    let dump = dump();
    let list = endpoints(maps_only(&dump));
    let rows: Vec<_> =
        list.items.iter().map(|r| (r.pod.as_str(), r.addresses.len(), r.policies.join(","), r.flows)).collect();
    assert_eq!(
        rows,
        [("prod/free-0", 1, String::new(), 0), ("prod/pin-0", 1, "pin".into(), 0), ("prod/web-0", 2, "web".into(), 2)]
    );
    assert_eq!(list.items[1].assigned["pin"], [ip("192.0.2.20")]);
    // 100 ticks of 1.074 s.
    assert_eq!((list.items[1].history_seconds, list.items[2].history_seconds), (107, 0));
    let (text, _) = check_prints(&list);
    assert!(text.starts_with("POD IP"), "{text}");
}

#[test]
fn flows_show_state_age_and_gateway() {
    let dump = dump();
    let view = flows(maps_only(&dump), &FlowFilter::default());
    assert_eq!((view.total, view.matched, view.items.len()), (3, 3, 3));
    let [untouched, open, closed] = &view.items[..] else { panic!("{view:?}") };
    assert_eq!((untouched.kind.as_str(), untouched.egress_ip, untouched.gateway.as_deref()), ("untouched", None, None));
    assert_eq!(open.pod.as_deref(), Some("prod/web-0"));
    assert_eq!((open.egress_ip, open.egress_port), (Some(ip("192.0.2.10")), Some(1024)));
    assert_eq!((open.gateway.as_deref(), open.policy.as_deref()), (Some("gw1"), Some("web")));
    // 100 and 5 ticks of 1.074 s.
    assert_eq!((open.age_seconds, open.idle_seconds), (107, 5));
    assert_eq!(open.tcp_state.as_deref(), Some("established"));
    assert_eq!((closed.tcp_state.as_deref(), closed.idle_seconds), (Some("closed"), 10));
    let (text, json) = check_prints(&view);
    assert!(text.contains("prod/web-0:40000") && text.contains("192.0.2.10:1024"), "{text}");
    assert!(text.ends_with("3 flows\n"), "{text}");
    assert_eq!(json["items"][1]["remotePort"], 443);
}

#[test]
fn flows_are_filtered_and_counted() {
    let dump = dump();
    let ask = |filter: FlowFilter| {
        let view = flows(maps_only(&dump), &filter);
        (view.matched, view.items.len(), check_prints(&view).0.lines().last().unwrap_or_default().to_owned())
    };
    let all = FlowFilter::default;
    assert_eq!(ask(FlowFilter { pod: Some("prod/web-0".into()), ..all() }).0, 3);
    assert_eq!(ask(FlowFilter { pod: Some("10.10.0.5".into()), ..all() }).0, 3);
    assert_eq!(ask(FlowFilter { pod: Some("prod/other".into()), ..all() }), (0, 0, "0 of 3 flows".into()));
    assert_eq!(ask(FlowFilter { egress_ip: Some(ip("192.0.2.11")), ..all() }).0, 1);
    assert_eq!(ask(FlowFilter { to: "203.0.113.0/24".parse().ok(), ..all() }).0, 2);
    assert_eq!(ask(FlowFilter { to_port: Some(55_555), ..all() }).0, 1);
    assert_eq!(ask(FlowFilter { limit: Some(1), ..all() }), (3, 1, "1 of 3 flows (--limit)".into()));
    let both = FlowFilter { to: "203.0.113.7/32".parse().ok(), limit: Some(1), ..all() };
    assert_eq!(ask(both).2, "1 of 2 (--limit) of 3 flows");
}

#[test]
fn a_flow_of_a_reused_index_names_no_egress_ip() {
    let mut dump = dump();
    let mut stale = flow(&dump, ("10.10.0.9", 1), ("203.0.113.7", 443), "web", ("192.0.2.10", 1030));
    stale.flow.egress_generation += 1;
    dump.flows = vec![stale];
    let row = &flows(maps_only(&dump), &FlowFilter::default()).items[0];
    assert_eq!((row.pod.as_deref(), row.egress_ip, row.gateway.as_deref()), (None, None, None));
}

#[test]
fn a_flow_of_a_pod_that_is_gone_does_not_get_the_name_of_the_next_pod_with_its_address() {
    let mut dump = dump();
    let mut left = flow(&dump, ("10.10.0.5", 1), ("203.0.113.7", 443), "web", ("192.0.2.10", 1030));
    left.flow.endpoint ^= 1;
    dump.flows = vec![left];
    let of = |pod: &str| flows(maps_only(&dump), &FlowFilter { pod: Some(pod.into()), ..FlowFilter::default() }).items;
    assert_eq!(of("prod/web-0"), []);
    assert_eq!((of("10.10.0.5").len(), of("10.10.0.5")[0].pod.as_deref()), (1, None));
    let sample = Sample { dump: dump.clone(), rules: Vec::new() };
    assert_eq!(top(&sample, &sample, By::Pod, 1).items[0].name, "10.10.0.5");
    // Without names, a flow of a present pod is recognised by the pod's number.
    let own = flow(&dump, ("10.10.0.6", 1), ("203.0.113.7", 443), "web", ("192.0.2.10", 1031));
    dump.flows.push(own);
    dump.tables.names.clear();
    let pods: Vec<_> = dump.flows.iter().map(|flow| dump.pod_of(flow)).collect();
    assert!(pods[0].is_none() && pods[1].as_ref().is_some_and(|pod| pod.starts_with('#')), "{pods:?}");
}

#[test]
fn blocks_show_leased_and_used_ports() {
    let dump = dump();
    let list = blocks(maps_only(&dump));
    let rows: Vec<_> = list
        .items
        .iter()
        .map(|r| (r.egress_ip, r.node.as_str(), r.here, r.port_ranges.join(","), r.used_ports, r.flows))
        .collect();
    assert_eq!(
        rows,
        [
            (ip("192.0.2.10"), "worker1", true, "1024-1151,1344-1407".into(), Some(1), Some(1)),
            (ip("192.0.2.11"), "worker1", true, "1472-1535".into(), Some(1), Some(1)),
            (ip("192.0.2.12"), "worker1", true, "1600-1663".into(), Some(0), Some(0)),
            (ip("192.0.2.20"), "worker1", true, "1152-1215".into(), Some(0), Some(0)),
            (ip("192.0.2.20"), "gw1", false, "1216-1343".into(), None, None),
        ]
    );
    check_prints(&list);
}

#[test]
fn counters_are_grouped() {
    let dump = dump();
    let rules = [egress_node::host::firewall::Dropped { name: "drop_not_seen", help: "by a rule", packets: 7 }];
    let view = stats(maps_only(&dump), &rules);
    assert_eq!(view.items.len(), egress_common::verdict::Counter::ALL.len() + 1);
    assert!(view.items.iter().any(|row| (row.name.as_str(), row.value, row.dropped) == ("drop_not_seen", 7, true)));
    assert!(view.items.windows(2).all(|pair| pair[0].dropped <= pair[1].dropped));
    let (text, json) = check_prints(&view);
    let (done, dropped) = text.split_once("\nDROPPED\n").unwrap();
    assert!(done.contains("flows_created") && !done.contains("drop_held"), "{text}");
    assert!(dropped.contains("drop_held") && !dropped.contains("flows_created"), "{text}");
    assert!(json["items"][0].get("help").is_some());
}

#[test]
fn views_of_an_empty_node_say_that_they_are_empty() {
    let dump = dump_of(&egress_core::encode::NodeView::default());
    let sources = maps_only(&dump);
    assert_eq!(sources.node(), None);
    let texts = [
        policies(sources).text(),
        gateways(sources).text(),
        ips(sources).text(),
        endpoints(sources).text(),
        blocks(sources).text(),
        flows(sources, &FlowFilter::default()).text(),
    ];
    assert!(texts.iter().all(|text| text.starts_with("no ") || text.starts_with("this node ")), "{texts:?}");
}

#[test]
fn lost_names_are_shown_as_numbers() {
    let mut dump = dump_of(&view());
    dump.tables.names.clear();
    let list = policies(maps_only(&dump));
    assert!(list.items.iter().all(|row| row.name.starts_with('#')), "{list:?}");
    assert_eq!(dump.seconds_since(START + 200), 0);
}
