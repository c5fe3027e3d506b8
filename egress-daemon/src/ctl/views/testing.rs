//! For tests: a node with maps from the encoder, and some flows.

use crate::ctl::dump::{Back, Dump, FlowEntry};
use egress_common::{
    abi::TICK_SHIFT,
    config::{DatapathConfig, UNSET},
    endpoint::policy_flags,
    flow::Flow,
    tcp::{end, seen},
    verdict::Counter,
};
use egress_core::{
    encode::{EgressView, Encoder, EndpointView, NodeView, PolicyView, SlotView, tables::Tables},
    model::{EndpointId, PolicyId},
};
use std::{collections::BTreeSet, net::IpAddr};

/// The tick of the first event.
pub const START: u32 = 1000;

/// Parses an address.
pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn policy(name: &str) -> PolicyId {
    name.parse().unwrap()
}

/// Returns the view of worker1: policy `web` sends pod prod/web-0 over gw1 and gw2, policy `pin` assigns prod/pin-0 to 192.0.2.20 of
/// worker1 itself, and no policy selects prod/free-0. 192.0.2.12 has no owner and takes no new flows.
pub fn view() -> NodeView {
    let mut view = NodeView { node: Some("worker1".into()), ..NodeView::default() };
    for (name, address) in [("worker1", "172.16.0.1"), ("gw1", "172.16.0.11"), ("gw2", "172.16.0.12")] {
        view.nodes.insert(name.into(), vec![ip(address)]);
    }
    for (pod, ips, class) in [
        ("web-0", vec!["10.10.0.5", "fd00::5"], vec!["web"]),
        ("pin-0", vec!["10.10.0.6"], vec!["pin"]),
        ("free-0", vec!["10.10.0.7"], vec![]),
    ] {
        let endpoint = EndpointView {
            ips: ips.into_iter().map(ip).collect(),
            class: class.into_iter().map(policy).collect(),
            history_until: if pod == "pin-0" { START + 200 } else { 0 },
            interfaces: Default::default(),
        };
        view.endpoints.insert(EndpointId::new("prod", pod, "uid"), endpoint);
    }
    let slot = |address, usable| SlotView { address: ip(address), weight: 1, usable };
    let web = PolicyView {
        flags: 0,
        slots: vec![slot("192.0.2.10", true), slot("192.0.2.11", true), slot("192.0.2.12", false)],
        ..PolicyView::default()
    };
    view.policies.insert(policy("web"), web);
    let pinned = [ip("192.0.2.20")].into();
    let pin = PolicyView {
        flags: policy_flags::PER_ENDPOINT | policy_flags::ON_NO_GATEWAY_NODE_IP | policy_flags::EXISTING_DROP,
        slots: vec![slot("192.0.2.20", true)],
        assignments: [(EndpointId::new("prod", "pin-0", "uid"), pinned)].into(),
        ..PolicyView::default()
    };
    view.policies.insert(policy("pin"), pin);
    let net = |text: &str| text.parse().unwrap();
    view.classes.insert(
        [policy("web")].into(),
        vec![
            (net("0.0.0.0/0"), Some(policy("web"))),
            (net("198.51.100.0/24"), None),
            (net("::/0"), Some(policy("web"))),
        ],
    );
    view.classes.insert([policy("pin")].into(), vec![(net("203.0.113.0/24"), Some(policy("pin")))]);
    view.excepts = [net("10.0.0.0/8"), net("172.16.0.0/24")].into();
    let blocks = |list: &[u16]| list.iter().copied().collect::<BTreeSet<u16>>();
    for (address, owner, mine) in [
        ("192.0.2.10", Some("gw1"), blocks(&[0, 1, 5])),
        ("192.0.2.11", Some("gw2"), blocks(&[7])),
        ("192.0.2.12", None, blocks(&[9])),
    ] {
        let e = EgressView { gateway: owner.map(Into::into), epoch: 3, blocks: mine, ..EgressView::default() };
        view.egress_ips.insert(ip(address), e);
    }
    let own = EgressView {
        gateway: Some("worker1".into()),
        forwards: true,
        epoch: 1 << 33,
        interface: Some(4),
        node_address: true,
        blocks: blocks(&[2]),
        leases: [(2, "worker1".into()), (3, "gw1".into()), (4, "gw1".into())].into(),
        ..EgressView::default()
    };
    view.egress_ips.insert(ip("192.0.2.20"), own);
    view.config = Some(DatapathConfig { tunnel_ifindex: 9, generation: 0, ..UNSET });
    view
}

/// Returns the maps that the encoder makes from a view.
pub fn dump_of(view: &NodeView) -> Dump {
    let empty = Tables::default();
    let tables = Encoder::recover(&empty).encode(view, &empty).unwrap();
    let mut dump = Dump { tables, now: u64::from(START + 100) << TICK_SHIFT, ..Dump::default() };
    dump.counters = Counter::ALL.iter().map(|counter| (*counter, *counter as u64)).collect();
    dump
}

/// Returns the index of an egress IP.
pub fn egress_index(dump: &Dump, address: &str) -> u32 {
    dump.egress_ips().find(|(_, a, _)| *a == ip(address)).unwrap().0
}

/// Returns the index of a policy.
pub fn policy_index(dump: &Dump, name: &str) -> u32 {
    dump.tables.policies.keys().map(|key| key.policy).find(|index| dump.policy_name(*index) == name).unwrap()
}

/// Returns a translated, established TCP flow.
pub fn flow(dump: &Dump, pod: (&str, u16), remote: (&str, u16), policy: &str, egress: (&str, u16)) -> FlowEntry {
    let index = egress_index(dump, egress.0);
    let flow = Flow {
        policy: policy_index(dump, policy) as u16,
        endpoint: dump.endpoint(ip(pod.0)).map_or(0, |endpoint| endpoint.id),
        egress: index,
        egress_generation: dump.tables.egress_ips[&index].generation,
        last_seen: START + 90,
        created: START,
        port: egress.1.to_be(),
        state: seen::SYN | seen::ACK,
        ifindex: 7,
        ..Flow::EMPTY
    };
    FlowEntry {
        pod: ip(pod.0),
        pod_port: pod.1,
        remote: ip(remote.0),
        remote_port: remote.1,
        proto: 6,
        untouched: false,
        own: false,
        flow,
        back: Some(Back { state: seen::SYN | seen::ACK, last_seen: START + 95 }),
    }
}

/// Returns worker1 with three flows: two of prod/web-0 (one closed), and one that is left alone.
pub fn dump() -> Dump {
    let mut dump = dump_of(&view());
    let first = flow(&dump, ("10.10.0.5", 40_000), ("203.0.113.7", 443), "web", ("192.0.2.10", 1024));
    let mut second = flow(&dump, ("10.10.0.5", 40_001), ("203.0.113.7", 443), "web", ("192.0.2.11", 1472));
    second.flow.state |= seen::FIN;
    second.flow.back = end::FIN | end::ACCEPTED;
    second.back = Some(Back { state: seen::SYN | seen::ACK, last_seen: START + 20 });
    let untouched = FlowEntry {
        pod_port: 8080,
        remote: ip("198.51.100.9"),
        remote_port: 55_555,
        back: None,
        untouched: true,
        own: false,
        flow: Flow { policy: 0, egress: 0, port: 0, ..first.flow },
        ..first
    };
    dump.flows = vec![untouched, first, second];
    dump
}
