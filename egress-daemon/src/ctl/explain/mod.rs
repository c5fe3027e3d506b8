//! `egressctl explain`: why a flow takes its path. Repeats the decisions of the programs (`pod_egress` in egress-ebpf: `steer`,
//! `classify`, `ports`) on the contents of the maps, and describes each decision in a sentence. Pure.

#[cfg(test)]
mod programs_tests;
mod question;
mod slots;
#[cfg(test)]
mod tests;

pub(super) use question::addresses;
pub use question::{Destination, Protocol, Question, QuestionError};

use super::{
    dump::{Dump, FlowEntry},
    print::Printable,
    views::{self, FlowRow, ViewSources},
};
use crate::observe::state::AgentState;
use egress_common::{
    config::flags,
    endpoint::{Endpoint, NO_POLICY, policy_flags},
    flow::kind,
    verdict::Counter,
};
use serde::Serialize;
use std::net::IpAddr;

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The node's name.
    pub node: Option<String>,
    /// `namespace/name` of the pod; null if no known pod has the address.
    pub pod: Option<String>,
    /// The packet's source address.
    pub source: IpAddr,
    /// The packet's destination address.
    pub destination: IpAddr,
    /// The destination's port; 0 for ICMP.
    pub port: u16,
    /// `tcp`, `udp`, `icmp` or a number.
    pub protocol: String,
    /// The existing flow; null if there is none, or if no source port was given.
    pub flow: Option<FlowRow>,
    /// The decisions, in the order of the datapath.
    pub steps: Vec<Step>,
    /// The fate of a packet of the existing flow, or of the first packet of a new flow.
    pub outcome: PacketOutcome,
}

/// One decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    /// The subject of the decision: `flow`, `destination`, `endpoint`, `excepts`, `route`, `policy`, `protocol`, `hash`, `slot`, `ports`,
    /// `gateway`, `transport`.
    pub step: &'static str,
    /// The decision and its reason.
    pub text: String,
}

/// The fate of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum PacketAction {
    /// It leaves with an egress IP.
    Sent,
    /// Spillway leaves it alone.
    Passed,
    /// It is dropped.
    Dropped,
    /// The fate depends on the source port, which was not given.
    Depends,
}

/// The outcome of the walk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PacketOutcome {
    /// The fate of the packet.
    pub action: PacketAction,
    /// The counter that counts the packet, if it is dropped.
    pub counter: Option<&'static str>,
    /// The policy that applies to it.
    pub policy: Option<String>,
    /// Its source address after translation.
    pub egress_ip: Option<IpAddr>,
    /// The node through which it leaves.
    pub gateway: Option<String>,
    /// The outcome as a sentence.
    pub text: String,
}

impl Printable for Explanation {
    fn text(&self) -> String {
        let width = self.steps.iter().map(|step| step.step.len()).max().unwrap_or(0);
        let mut text = String::new();
        for (number, step) in self.steps.iter().enumerate() {
            text += &format!("{:>2}. {:<width$}  {}\n", number + 1, step.step, step.text);
        }
        text + &format!("\n{}\n", self.outcome.text)
    }
}

/// The steps so far; each decision ends the walk or continues it.
struct Walk<'a> {
    dump: &'a Dump,
    agent: Option<&'a AgentState>,
    steps: Vec<Step>,
    policy: Option<String>,
}

impl Walk<'_> {
    fn say(&mut self, step: &'static str, text: impl Into<String>) {
        self.steps.push(Step { step, text: text.into() });
    }

    fn end(&self, action: PacketAction, text: impl Into<String>) -> PacketOutcome {
        let text = text.into();
        PacketOutcome { action, counter: None, policy: self.policy.clone(), egress_ip: None, gateway: None, text }
    }

    fn passed(&self, why: &str) -> PacketOutcome {
        self.end(PacketAction::Passed, format!("PASSED: Spillway leaves the packet to the node's own routing: {why}."))
    }

    fn dropped(&self, counter: Counter) -> PacketOutcome {
        let text = format!("DROPPED, counted as {}: {}.", counter.name(), counter.help());
        PacketOutcome { counter: Some(counter.name()), ..self.end(PacketAction::Dropped, text) }
    }
}

/// Explains the path of a packet.
pub fn explain(sources: ViewSources<'_>, question: &Question) -> Result<Explanation, QuestionError> {
    let dump = sources.dump;
    let source = question.source(dump)?;
    let flow = question.from_port.and_then(|port| find(dump, source, question, port));
    let mut walk = Walk { dump, agent: sources.agent, steps: Vec::new(), policy: None };
    let outcome = match flow {
        Some(flow) => existing(&mut walk, flow),
        None => {
            if question.from_port.is_some() {
                walk.say("flow", "There is no flow with these addresses and ports: this would be its first packet.");
            } else {
                let open = dump.flows.iter().filter(|f| matches(f, source, question)).count();
                walk.say(
                    "flow",
                    format!("This pod has {open} open flows there; the following steps are for a new flow."),
                );
            }
            new_flow(&mut walk, source, question)
        }
    };
    Ok(Explanation {
        node: sources.node(),
        pod: dump.pod_name(source),
        source,
        destination: question.to,
        port: question.port,
        protocol: question.protocol.to_string(),
        flow: flow.map(|flow| views::row(dump, flow)),
        steps: walk.steps,
        outcome,
    })
}

fn matches(flow: &FlowEntry, source: IpAddr, question: &Question) -> bool {
    (flow.pod, flow.remote, flow.remote_port) == (source, question.to, question.port)
        && flow.proto == question.protocol.number(question.to.is_ipv6())
}

/// Finds the existing flow. Skips untouched records that the programs remove: a previous pod's, or one that the pod's policy now cuts.
fn find<'a>(dump: &'a Dump, source: IpAddr, question: &Question, port: u16) -> Option<&'a FlowEntry> {
    let endpoint = dump.endpoint(source);
    let is_anothers = |id: u32| endpoint.is_some_and(|endpoint| endpoint.id != id);
    let cuts = || {
        let class = endpoint.filter(|_| dump.except(question.to).is_none())?.class;
        let (_, policy) = dump.route(class, question.to)?;
        dump.policy(policy, question.to.is_ipv6()).map(|policy| policy.flags & policy_flags::EXISTING_DROP != 0)
    };
    let is_removed = |flow: &FlowEntry| is_anothers(flow.flow.endpoint) || flow.own && cuts() == Some(true);
    let mut flows = dump.flows.iter().filter(|flow| flow.pod_port == port && matches(flow, source, question));
    flows.find(|flow| !flow.untouched || !is_removed(flow))
}

/// Explains a packet of an existing flow.
fn existing(walk: &mut Walk<'_>, flow: &FlowEntry) -> PacketOutcome {
    let dump = walk.dump;
    let row = views::row(dump, flow);
    let age = format!("{} s old, idle for {} s", row.age_seconds, row.idle_seconds);
    let stale = dump.tables.config.is_some_and(|config| config.generation != flow.flow.config_generation);
    if flow.untouched {
        walk.say(
            "flow",
            format!(
                "There is an untouched flow: the outside opened it, or it began before the policy or while there was no gateway ({age})."
            ),
        );
        return walk.passed("the flow is left alone");
    }
    match flow.flow.kind {
        kind::TRANSLATED => {
            walk.policy = row.policy.clone();
            let state = row.tcp_state.as_ref().map(|state| format!(", {state}")).unwrap_or_default();
            let policy = row.policy.as_deref().unwrap_or("-");
            walk.say(
                "flow",
                format!("There is a flow of policy {policy}{state}, {age}. It keeps its slot while it lives."),
            );
            if stale {
                walk.say("flow", "The tables changed since its last packet: the next one checks whether its policy still has the slot.");
            }
            match dump.egress_ip(flow.flow.egress).filter(|(_, e)| e.generation == flow.flow.egress_generation) {
                Some((egress, _)) => {
                    walk.say("slot", format!("It leaves as {egress}, port {}.", flow.port()));
                    slots::hand_over(walk, flow.flow.egress)
                }
                None => walk.dropped(Counter::DropNoOwner),
            }
        }
        _ => {
            walk.say("flow", format!("There is a connection whose egress IP was taken from its policy ({age})."));
            walk.dropped(Counter::DropSevered)
        }
    }
}

/// Explains the first packet of a flow, in the order of `classify` and `steer`.
fn new_flow(walk: &mut Walk<'_>, source: IpAddr, question: &Question) -> PacketOutcome {
    let (dump, to) = (walk.dump, question.to);
    if never_leaves(to) {
        walk.say("destination", format!("{to} is a loopback, link-local, multicast or reserved address."));
        return walk.passed("such addresses are never touched");
    }
    let except = dump.except(to);
    let Some(endpoint) = dump.endpoint(source) else {
        walk.say("endpoint", format!("{source} is not the address of any pod in this node's maps."));
        let hold = dump.tables.config.is_some_and(|config| config.flags & flags::HOLD != 0);
        if hold && except.is_none() && !never_leaves(source) {
            walk.say("endpoint", "A pod that a policy selects is starting on this node, so unknown sources are held.");
            return walk.dropped(Counter::DropHeld);
        }
        return walk.passed("no policy can select an address that belongs to no pod");
    };
    let Some(policy) = classify(walk, source, endpoint, except, to) else {
        return walk.passed("no policy applies");
    };
    walk.policy = Some(dump.policy_name(policy));
    let name = dump.policy_name(policy);
    let Some(record) = dump.policy(policy, to.is_ipv6()) else {
        walk.say(
            "policy",
            format!("Policy {name} has no tables for this address family: it is being removed, or does not fit."),
        );
        return walk.dropped(Counter::DropNoPolicy);
    };
    let endpoint_wise = record.flags & policy_flags::PER_ENDPOINT != 0;
    let distribution =
        if endpoint_wise { "assigns each pod to one egress IP" } else { "hashes each flow to one egress IP" };
    walk.say("policy", format!("Policy {name} applies. It {distribution}."));
    if !question.protocol.translatable() {
        walk.say("protocol", format!("Protocol {} cannot be translated.", question.protocol));
        return walk.dropped(Counter::DropProtocol);
    }
    let left = dump.seconds_until(endpoint.history_until);
    if question.protocol == Protocol::Tcp && left > 0 {
        let what = if record.flags & policy_flags::EXISTING_DROP != 0 {
            "dropped".to_owned()
        } else {
            format!("left on their old path if they are used within {left} s")
        };
        walk.say("protocol", format!("TCP connections from before the policy are {what}; a SYN opens a new flow."));
    }
    if record.table_len == 0 {
        walk.say(
            "slot",
            "No slot of the policy can take new flows: its egress IPs have no gateway that answers, or no port blocks for this node, or there \
             are none of this address family.",
        );
        return if record.flags & policy_flags::ON_NO_GATEWAY_NODE_IP != 0 {
            walk.passed("onNoGateway is NodeIP, so it leaves with the node's address")
        } else {
            walk.dropped(Counter::DropNoGateway)
        };
    }
    slots::choose(walk, source, question, endpoint, policy, *record)
}

/// Returns the policy's index, or `None` if no policy applies to the packet.
fn classify(
    walk: &mut Walk<'_>,
    source: IpAddr,
    endpoint: Endpoint,
    except: Option<ipnet::IpNet>,
    to: IpAddr,
) -> Option<u32> {
    let dump = walk.dump;
    let pod = dump.endpoint_name(endpoint.id);
    if endpoint.class == 0 {
        walk.say("endpoint", format!("{source} is pod {pod}, which no policy selects."));
        return None;
    }
    walk.say("endpoint", format!("{source} is pod {pod}, of class {}.", endpoint.class));
    if let Some(net) = except {
        walk.say(
            "excepts",
            format!(
                "{to} lies in {net}, which no policy touches (pods, nodes, services, exceptCIDRs). Where a Service \
                 leads from there to a destination of a policy, the exit drops it (drop_service), except TCP to the API \
                 server's Service."
            ),
        );
        return None;
    }
    walk.say("excepts", format!("{to} is in no prefix that is excepted from all policies."));
    match dump.route(endpoint.class, to) {
        Some((net, NO_POLICY)) => {
            walk.say("route", format!("The longest match in the class is {net}, which excludedCIDRs excludes."));
            None
        }
        Some((net, policy)) => {
            walk.say(
                "route",
                format!("The longest match in the class is {net}, of policy {}.", dump.policy_name(policy)),
            );
            Some(policy)
        }
        None => {
            walk.say("route", "No policy of the class has this destination.");
            None
        }
    }
}

/// Returns whether `Family::never_leaves` holds for the address.
fn never_leaves(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(a) => a.octets()[0] >= 0xe0 || a.is_link_local() || a.is_loopback() || a.octets()[0] == 0,
        IpAddr::V6(a) => a.is_multicast() || a.is_unicast_link_local() || a.is_loopback() || a.is_unspecified(),
    }
}
