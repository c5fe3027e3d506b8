//! Generates arbitrary views over a small world, so that everything comes, goes and comes back.

use egress_common::{
    abi::TUNNEL_PORT,
    config::{self, DatapathConfig},
};
use egress_core::{
    encode::{EgressView, EndpointView, NodeView, PolicyView, SlotView},
    model::{EndpointId, NodeName, Policy, PolicyId, PolicyKind, Source},
    testing::world,
};
use ipnet::IpNet;
use proptest::{collection::vec, option, prelude::*};
use std::{collections::BTreeSet, net::IpAddr};

pub const SELF: &str = "self";
const NODES: [&str; 4] = [SELF, "n1", "n2", "n3"];
const EGRESS: [&str; 6] = ["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "2001:db8::1", "2001:db8::2"];
const NETS: [&str; 6] =
    ["0.0.0.0/0", "198.51.100.0/24", "198.51.100.128/25", "::/0", "2001:db8:f::/48", "203.0.113.7/32"];

pub fn egress_ip(n: usize) -> IpAddr {
    EGRESS[n].parse().unwrap()
}

pub fn policy_id(n: usize) -> PolicyId {
    PolicyId::new(PolicyKind::Native, &format!("policy-{n}"))
}

pub fn endpoint_id(n: usize) -> EndpointId {
    // Names of the maximum length: the assigned numbers must survive them, too.
    EndpointId::new(&"n".repeat(63), &format!("{}{n}", "p".repeat(252)), &"u".repeat(36))
}

pub fn node(n: usize) -> NodeName {
    NODES[n].into()
}

pub fn settings() -> DatapathConfig {
    DatapathConfig {
        tunnel_ifindex: 7,
        tunnel_port: TUNNEL_PORT.into(),
        tcp_established: 10,
        tcp_transitory: 10,
        udp: 10,
        icmp: 10,
        ..config::UNSET
    }
}

/// Returns a policy that selects every pod, steers nothing and has no egress IPs.
pub fn policy(name: &str) -> Policy {
    Policy { destinations: Vec::new(), ..world::policy(name, Source::Pools(Vec::new())) }
}

fn egress_view() -> impl Strategy<Value = EgressView> {
    let leases = vec((0u16..6, 0usize..4), 0..6);
    (option::of(0usize..4), 0u64..3, any::<bool>(), leases).prop_map(|(owner, epoch, fixed, leases)| {
        let leases: std::collections::BTreeMap<u16, NodeName> = leases.into_iter().map(|(b, n)| (b, node(n))).collect();
        let blocks = leases.iter().filter(|(_, n)| n.as_str() == SELF).map(|(b, _)| *b).collect();
        let interface = (owner == Some(0)).then_some(3);
        EgressView {
            gateway: owner.map(node),
            spread: Vec::new(),
            forwards: owner == Some(0),
            epoch,
            interface,
            node_address: fixed,
            here: fixed && owner == Some(0),
            silent: false,
            subnet: None,
            limit: None,
            blocks,
            leases,
        }
    })
}

/// Weight of each egress IP in a policy (0: no slot), whether it is usable, the egress IP of each endpoint, and the policy's flags.
type PolicySeed = (Vec<u32>, Vec<bool>, Vec<usize>, u32);

fn policy_seed() -> impl Strategy<Value = PolicySeed> {
    (vec(0u32..3, 6), vec(any::<bool>(), 6), vec(0usize..6, 5), 0u32..8)
}

/// Generates a view in which every named object exists.
pub fn view() -> impl Strategy<Value = NodeView> {
    let egress = vec(option::of(egress_view()), 6);
    let policies = vec(option::of(policy_seed()), 4);
    let endpoints = vec(option::of((vec(any::<bool>(), 4), any::<bool>(), any::<u32>())), 5);
    let routes = vec(vec((0usize..6, option::of(0usize..4)), 0..4), 16);
    let other_nodes = vec(any::<bool>(), 4);
    (egress, policies, endpoints, routes, other_nodes).prop_map(|(egress, policies, endpoints, routes, others)| {
        let mut view = NodeView { node: Some(node(0)), config: Some(settings()), ..NodeView::default() };
        for (n, e) in egress.into_iter().enumerate() {
            view.egress_ips.extend(e.map(|e| (egress_ip(n), e)));
        }
        for (n, seed) in policies.into_iter().enumerate() {
            let Some((weights, usable, assigned, flags)) = seed else { continue };
            let slots: Vec<SlotView> = (0..6)
                .filter(|i| weights[*i] > 0 && view.egress_ips.contains_key(&egress_ip(*i)))
                .map(|i| SlotView { address: egress_ip(i), weight: weights[i], usable: usable[i] })
                .collect();
            let assignments = assigned.iter().enumerate().filter(|(endpoint, ip)| {
                endpoints[*endpoint].is_some() && slots.iter().any(|s| s.address == egress_ip(**ip))
            });
            let assignments = assignments.map(|(e, ip)| (endpoint_id(e), [egress_ip(*ip)].into())).collect();
            view.policies.insert(policy_id(n), PolicyView { flags, slots, assignments, ..PolicyView::default() });
        }
        for (n, seed) in endpoints.into_iter().enumerate() {
            let Some((selected, v6, history_until)) = seed else { continue };
            let class =
                (0..4).filter(|p| selected[*p]).map(policy_id).filter(|p| view.policies.contains_key(p)).collect();
            let mut ips: BTreeSet<IpAddr> = [IpAddr::from([10, 1, 0, n as u8])].into();
            if v6 {
                ips.insert(format!("fd00::{n}").parse().unwrap());
            }
            view.endpoints
                .insert(endpoint_id(n), EndpointView { ips, class, history_until, interfaces: Default::default() });
        }
        let classes: BTreeSet<BTreeSet<PolicyId>> =
            view.endpoints.values().map(|e| e.class.clone()).filter(|c| !c.is_empty()).collect();
        for (class, routes) in classes.into_iter().zip(routes) {
            let table = routes.into_iter().map(|(net, winner)| {
                let winner = winner.map(policy_id).filter(|p| class.contains(p));
                (NETS[net].parse::<IpNet>().unwrap(), winner)
            });
            let table = table.collect();
            view.classes.insert(class, table);
        }
        view.excepts = [format!("10.0.0.{}/32", others.len()).parse().unwrap(), "fd00::/64".parse().unwrap()].into();
        for (n, there) in others.iter().enumerate() {
            let named = |name: &NodeName| {
                view.egress_ips
                    .values()
                    .any(|e| e.gateway.as_ref() == Some(name) || e.leases.values().any(|l| l == name))
            };
            if n == 0 || *there || named(&node(n)) {
                let addresses = vec![IpAddr::from([10, 0, 0, n as u8]), format!("fd01::{n}").parse().unwrap()];
                view.nodes.insert(node(n), addresses);
            }
        }
        view.uplinks.insert(3, [2, 0, 0, 0, 0, 3]);
        view
    })
}

/// Generates several consecutive views, each with whether the agent is restarted before it.
pub fn history() -> impl Strategy<Value = Vec<(NodeView, bool)>> {
    vec((view(), any::<bool>()), 2..6)
}
