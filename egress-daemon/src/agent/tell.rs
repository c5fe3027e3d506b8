//! The state that the agent reports on its socket.

use super::{Agent, facts::ObservedObjects};
use crate::observe::state::{
    AgentState, BlockCounts, ConditionState, EgressIpState, GatewayState, NodeState, PolicyState, ProbeResult,
    ProblemState, TakeOverLengths,
};
use egress_common::{egress::EgressIp, net, port_block};
use egress_core::{
    agent::{
        gateways::Gateways,
        machine::Machine,
        transports::{self, TRANSPORTS, Transports},
    },
    encode::{NodeView, accounts},
    health::ProbeState,
    model::{Distribution, NodeName},
    network::xdp::Why,
    plan::{ConditionKind, Reason},
};
use egress_objects::translate::refusals;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use std::{collections::BTreeMap, net::IpAddr};

/// Returns an error of the agent as a problem of its node.
fn problem(node: &NodeName, message: &str) -> ProblemState {
    ProblemState { object: node.to_string(), message: message.to_owned(), ..ProblemState::default() }
}

/// Returns the state. `view` is the view that was written last.
pub fn state(agent: &Agent, view: &NodeView) -> AgentState {
    let (observed, machine, outcome) = (&agent.observed, &agent.machine, agent.machine.outcome());
    let own = outcome.errors.iter().chain(outcome.unnamed.values());
    let mut problems: Vec<ProblemState> = own.map(|e| problem(&agent.node, e)).collect();
    problems.extend(observed.problems.iter().map(|p| ProblemState {
        object: format!("{} {}", p.kind, p.name),
        field: Some(p.field.clone()),
        message: p.message.clone(),
        remedy: p.remedy.clone(),
    }));
    problems.extend(agent.store.problems().iter().map(|p| ProblemState {
        object: match &p.object {
            Some(object) => format!("{}, {object}", p.file.display()),
            None => p.file.display().to_string(),
        },
        field: p.field.clone(),
        message: p.message.clone(),
        remedy: p.remedy.clone(),
    }));
    AgentState {
        node: node(agent),
        policies: policies(observed, view),
        gateways: gateways(machine),
        egress_ips: observed.plan.egress_ips.iter().map(|(ip, e)| egress_ip(observed, *ip, e)).collect(),
        unnamed_networks: outcome.unnamed.iter().map(|(net, why)| (net.to_string(), why.clone())).collect(),
        ports_used: machine.facts().ports.peaks(),
        blocks: blocks(agent),
        account_flows: agent.account_flows.clone(),
        without_account: accounts::without_number(view, agent.writer.present()),
        takeovers: takeovers(machine),
        conditions: observed
            .egress_node(&agent.node)
            .and_then(|n| n.status.as_ref())
            .map_or(Vec::new(), |s| s.conditions.iter().map(condition).collect()),
        problems,
    }
}

/// Returns the port blocks of the egress IPs in the tables. Only the owner reports how many are free, on behalf of all carriers.
pub fn blocks(agent: &Agent) -> BTreeMap<IpAddr, BlockCounts> {
    let (tables, used) = (agent.writer.present(), agent.machine.facts().ports.blocks());
    let of = |(index, egress): (&u32, &EgressIp)| {
        let address = net::from_any(egress.addr);
        let owner = agent.observed.plan.egress_ips.get(&address)?.owner.as_ref();
        let taken = tables.leases.get(index).map_or(0, |table| table.node.iter().filter(|node| **node != 0).count());
        let counts = BlockCounts {
            leased: tables.blocks.get(index).map_or(0, |list| list.count as usize),
            used: used.get(&address).copied().unwrap_or(0),
            free: (owner == Some(&agent.node)).then(|| usize::from(port_block::COUNT).saturating_sub(taken)),
        };
        (counts != BlockCounts::default()).then_some((address, counts))
    };
    tables.egress_ips.iter().filter_map(of).collect()
}

fn takeovers(machine: &Machine) -> TakeOverLengths {
    let lengths = machine.takeovers();
    TakeOverLengths { counts: lengths.counts.into(), sum_millis: lengths.sum.as_millis() as u64 }
}

fn node(agent: &Agent) -> NodeState {
    NodeState {
        name: agent.node.to_string(),
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        uptime_seconds: agent.now().as_secs(),
        store: agent.source.clone(),
        store_connected: agent.store.is_connected(),
        transport: agent.settings.machine.transport.to_string(),
        firewall: agent.settings.firewall.to_string(),
        attach: agent.hooks.mode().to_string(),
        bypass: agent.hooks.bypass(),
        xdp: agent.settings.xdp.to_string(),
        drivers: agent.hooks.native().iter().map(|(name, verdict)| (name.clone(), driver(verdict))).collect(),
        tunnel_addresses: agent.machine.tunnel_addresses(),
        lease_held: agent.lease.as_ref().map(|_| agent.machine.is_lease_held(agent.now())),
        lease_revision: agent.machine.outcome().leases,
    }
}

/// Returns why the program is not at an interface's driver, or `None` if it is.
fn driver(verdict: &Result<(), Why>) -> Option<String> {
    verdict.as_ref().err().map(ToString::to_string)
}

fn condition(c: &Condition) -> ConditionState {
    ConditionState {
        kind: c.type_.clone(),
        status: c.status.clone(),
        reason: c.reason.clone(),
        message: c.message.clone(),
    }
}

fn policy(observed: &ObservedObjects, view: &NodeView, policy: &egress_core::model::Policy) -> PolicyState {
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
        conditions: observed.policy_conditions(&policy.id).map(condition).collect(),
    }
}

/// Returns all policies. One that cannot be carried out as written has the reason as its condition, even if its selectors are not known.
fn policies(observed: &ObservedObjects, view: &NodeView) -> Vec<PolicyState> {
    let mut refused = refusals(&observed.problems);
    let because = |message: String| {
        let (kind, reason) = (ConditionKind::Ready.as_str().into(), Reason::Invalid.as_str().into());
        vec![ConditionState { kind, status: "False".into(), reason, message }]
    };
    let mut states = Vec::new();
    for known in observed.snapshot.policies.values() {
        let state = policy(observed, view, known);
        let conditions = refused.remove(&known.id).map(because);
        states.push(PolicyState { conditions: conditions.unwrap_or(state.conditions), ..state });
    }
    states.extend(refused.into_iter().map(|(policy, message)| PolicyState {
        name: policy.to_string(),
        conditions: because(message),
        ..PolicyState::default()
    }));
    states
}

/// Returns the probed gateways and the transports to them.
pub fn gateways(machine: &Machine) -> Vec<GatewayState> {
    let (gateways, transports) = (machine.gateways(), &machine.outcome().transports);
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

/// Returns why no better transport to a gateway is in use; empty if the best one is.
fn why_not(gateways: &Gateways, name: &NodeName, transports: &Transports) -> String {
    let current = gateways.transport(name).unwrap_or_default();
    let better = TRANSPORTS.iter().filter(|transport| **transport > current);
    let reasons = better.filter_map(|transport| {
        let reason = match (transports.reasons.get(transport), gateways.of(name, *transport)) {
            (Some(reason), _) => reason.as_str(),
            (None, Some(ProbeState::Unknown)) => "not answered yet",
            (None, Some(ProbeState::Dead)) => "probes over it are not answered",
            (None, Some(ProbeState::Alive | ProbeState::Unable)) => "it works for only one address family",
            (None, None) => return None,
        };
        Some(format!("not {}: {reason}", transports::name(*transport)))
    });
    reasons.collect::<Vec<_>>().join("; ")
}

fn egress_ip(observed: &ObservedObjects, address: IpAddr, e: &egress_core::plan::EgressIpPlan) -> EgressIpState {
    EgressIpState {
        address,
        pool: e.pool.as_ref().map(ToString::to_string),
        owner: e.owner.as_ref().map(ToString::to_string),
        preferred: e.preferred.as_ref().filter(|p| Some(*p) != e.owner.as_ref()).map(ToString::to_string),
        epoch: e.epoch,
        fixed: e.fixed,
        conditions: observed.egress_ip_conditions(address).map(condition).collect(),
    }
}
