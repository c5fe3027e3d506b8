//! What the agent tells on its socket. Pure.

use super::facts::World;
use crate::{
    config::Firewall,
    datapath::attach::Mode,
    observe::state::{
        AgentState, ConditionState, EgressIpState, GatewayState, NodeState, PolicyState, ProbeResult, ProblemState,
    },
    store,
    translate::refusals,
};
use egress_core::{
    agent::{
        demand::Ports,
        gateways::Gateways,
        transports::{self, TRANSPORTS, Transports},
        unnamed::Networks,
        view::Facts,
    },
    encode::NodeView,
    health::ProbeState,
    model::{Distribution, NodeName, Transport},
    plan::{ConditionKind, Reason},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use std::{collections::BTreeMap, net::IpAddr, time::Duration};

/// What the agent knows besides objects and the view.
pub struct Running<'a> {
    /// How long it has run.
    pub uptime: Duration,
    /// Where the objects come from.
    pub store: &'a str,
    /// Whether new flows wait for the host's firewall.
    pub firewall: Firewall,
    /// How programs are attached.
    pub attach: Mode,
    /// The program of somebody else that may bring packets into a pod past `pod_ingress`, and where it is.
    pub bypass: Option<String>,
    /// Where this node receives tunnelled packets.
    pub tunnel_addresses: Vec<IpAddr>,
    /// Whether the lease is held; absent without a lease.
    pub lease_held: Option<bool>,
    /// All leases up to this revision are in the maps.
    pub lease_revision: u64,
    /// The setting for the transports to other nodes.
    pub transport: Transport,
    /// The gateways that this node uses, as [`gateways`] tells them.
    pub gateways: Vec<GatewayState>,
    /// The ports in use, as they were counted last.
    pub ports: &'a Ports,
    /// Whether the source of the objects answers.
    pub store_connected: bool,
    /// What is wrong with the source of the objects.
    pub store_problems: Vec<store::Problem>,
    /// Networks that may be the cluster's although nobody names them.
    pub unnamed: &'a Networks,
    /// What the agent could not do.
    pub errors: &'a [String],
}

/// An error of the agent, as a problem of its node.
pub fn problem(node: &NodeName, message: &str) -> ProblemState {
    ProblemState { object: node.to_string(), message: message.to_owned(), ..ProblemState::default() }
}

/// Makes the state.
pub fn state(world: &World, facts: &Facts<'_>, view: &NodeView, running: &Running<'_>) -> AgentState {
    let mut problems: Vec<ProblemState> = running.errors.iter().map(|e| problem(facts.node, e)).collect();
    problems.extend(running.unnamed.values().map(|message| problem(facts.node, message)));
    problems.extend(world.problems.iter().map(|p| ProblemState {
        object: format!("{} {}", p.kind, p.name),
        field: Some(p.field.clone()),
        message: p.message.clone(),
        remedy: p.remedy.clone(),
    }));
    problems.extend(running.store_problems.iter().map(|p| ProblemState {
        object: match &p.object {
            Some(object) => format!("{}, {object}", p.file.display()),
            None => p.file.display().to_string(),
        },
        field: p.field.clone(),
        message: p.message.clone(),
        remedy: p.remedy.clone(),
    }));
    AgentState {
        node: node(facts.node, running),
        policies: facts.snapshot.policies.values().map(|p| policy(world, view, p)).chain(refused(world)).collect(),
        gateways: running.gateways.clone(),
        egress_ips: facts.plan.egress_ips.iter().map(|(ip, e)| egress_ip(world, *ip, e)).collect(),
        unnamed_networks: running.unnamed.iter().map(|(net, why)| (net.to_string(), why.clone())).collect(),
        ports_used: running.ports.peaks(),
        conditions: world
            .egress_node(facts.node)
            .and_then(|n| n.status.as_ref())
            .map_or(Vec::new(), |s| s.conditions.iter().map(condition).collect()),
        problems,
    }
}

fn node(name: &NodeName, running: &Running<'_>) -> NodeState {
    NodeState {
        name: name.to_string(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        uptime_seconds: running.uptime.as_secs(),
        store: running.store.into(),
        store_connected: running.store_connected,
        transport: running.transport.to_string(),
        firewall: running.firewall.to_string(),
        attach: running.attach.to_string(),
        bypass: running.bypass.clone(),
        tunnel_addresses: running.tunnel_addresses.clone(),
        lease_held: running.lease_held,
        lease_revision: running.lease_revision,
    }
}

fn condition(c: &Condition) -> ConditionState {
    ConditionState {
        kind: c.type_.clone(),
        status: c.status.clone(),
        reason: c.reason.clone(),
        message: c.message.clone(),
    }
}

fn policy(world: &World, view: &NodeView, policy: &egress_core::model::Policy) -> PolicyState {
    let slots = view.policies.get(&policy.id).map_or(Vec::new(), |p| p.slots.iter().map(|s| s.address).collect());
    let selected = view.endpoints.iter().filter(|(_, e)| e.class.contains(&policy.id));
    let mut endpoints: Vec<String> = selected.map(|(id, _)| format!("{}/{}", id.namespace, id.name)).collect();
    endpoints.sort();
    PolicyState {
        name: policy.id.to_string(),
        distribution: match policy.distribution {
            Distribution::PerFlow => "PerFlow".into(),
            Distribution::PerEndpoint => "PerEndpoint".into(),
        },
        egress_ips: slots,
        endpoints,
        conditions: world.policy_conditions(&policy.id).map(condition).collect(),
    }
}

/// The policies that cannot be carried out as they are written.
fn refused(world: &World) -> impl Iterator<Item = PolicyState> {
    refusals(&world.problems).into_iter().map(|(policy, message)| {
        let (kind, reason) = (ConditionKind::Ready.as_str().into(), Reason::Invalid.as_str().into());
        let condition = ConditionState { kind, status: "False".into(), reason, message };
        PolicyState { name: policy.to_string(), conditions: vec![condition], ..PolicyState::default() }
    })
}

/// The gateways that are probed, and the transports to them.
pub fn gateways(gateways: &Gateways, transports: &BTreeMap<NodeName, Transports>) -> Vec<GatewayState> {
    let states = gateways.states().into_iter();
    states
        .map(|(name, state)| GatewayState {
            address: gateways.address(&name),
            probe: match state {
                ProbeState::Unknown => ProbeResult::Unknown,
                ProbeState::Alive => ProbeResult::Alive,
                ProbeState::Dead => ProbeResult::Dead,
                ProbeState::Unable => ProbeResult::Unable,
            },
            rtt_micros: gateways.round_trip(&name).map(|d| d.as_micros() as u64),
            transport: gateways.transport(&name).map_or(String::new(), |transport| transports::name(transport).into()),
            replies: gateways.back(&name).map_or(String::new(), |transport| transports::name(transport).into()),
            why: transports.get(&name).map_or(String::new(), |transports| why_not(gateways, &name, transports)),
            name: name.to_string(),
        })
        .collect()
}

/// Why no better transport to a gateway is in force; empty if the best one is.
fn why_not(gateways: &Gateways, name: &NodeName, transports: &Transports) -> String {
    let current = gateways.transport(name).unwrap_or_default();
    let better = TRANSPORTS.iter().filter(|transport| **transport > current);
    let reasons = better.filter_map(|transport| {
        let reason = match (transports.reasons.get(transport), gateways.of(name, *transport)) {
            (Some(reason), _) => reason.as_str(),
            (None, Some(ProbeState::Unknown)) => "not answered yet",
            (None, Some(ProbeState::Dead)) => "probes by it are not answered",
            (None, Some(ProbeState::Alive | ProbeState::Unable)) => "one address family only",
            (None, None) => return None,
        };
        Some(format!("not {}: {reason}", transports::name(*transport)))
    });
    reasons.collect::<Vec<_>>().join("; ")
}

fn egress_ip(world: &World, address: IpAddr, e: &egress_core::plan::EgressIpPlan) -> EgressIpState {
    EgressIpState {
        address,
        pool: e.pool.as_ref().map(ToString::to_string),
        owner: e.owner.as_ref().map(ToString::to_string),
        preferred: e.preferred.as_ref().filter(|p| Some(*p) != e.owner.as_ref()).map(ToString::to_string),
        epoch: e.epoch,
        fixed: e.fixed,
        conditions: world.egress_ip_conditions(address).map(condition).collect(),
    }
}
