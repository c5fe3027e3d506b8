//! The second half of the walk: slot, port, owner and transport, as in `flows::ports` and `source::steer` of egress-ebpf.

use super::{PacketAction, PacketOutcome, Question, Walk};
use crate::{
    ctl::dump::{Dump, FlowEntry, flow_hash},
    observe::state::ProbeResult,
};
use egress_common::{
    egress::flags,
    endpoint::{AssignmentKey, Endpoint, MemberKey, Policy, policy_flags},
    flow::Flow,
    hash,
    limits::{PORT_PROBES, SLOT_PROBES},
    net, port_block, tcp, transport,
    verdict::Counter,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// Chooses a slot by the pod's assignment or by the hash. Each failed attempt adds a step with the reason.
pub(super) fn choose(
    walk: &mut Walk<'_>,
    source: IpAddr,
    question: &Question,
    endpoint: Endpoint,
    policy: u32,
    record: Policy,
) -> PacketOutcome {
    let dump = walk.dump;
    let per_endpoint = record.flags & policy_flags::PER_ENDPOINT != 0;
    let family = if question.to.is_ipv6() { 6 } else { 4 };
    let assigned = dump.tables.assignments.get(&AssignmentKey { endpoint: endpoint.id, policy, family }).copied();
    let hash = match (per_endpoint, question.from_port) {
        (true, _) => match source {
            IpAddr::V4(a) => hash::endpoint(net::v4(a), record.seed),
            IpAddr::V6(a) => hash::endpoint(net::v6(a), record.seed),
        },
        (false, Some(port)) => match flow_hash(&probe(source, question, port), record.seed) {
            Some(hash) => hash,
            None => return walk.dropped(Counter::DropMalformed),
        },
        (false, None) => return undecided(walk, policy, record),
    };
    if per_endpoint && assigned.is_none() {
        walk.say(
            "slot",
            "The pod has no assigned egress IP yet. It waits, because the outside must not see it with two egress IPs.",
        );
        return walk.dropped(Counter::DropNoGateway);
    }
    let mut no_port = false;
    for attempt in 0..SLOT_PROBES {
        let egress = if per_endpoint && attempt == 0 {
            if let Some(egress) = assigned {
                walk.say("slot", format!("The pod is assigned to {}.", address(dump, egress)));
            }
            assigned
        } else {
            let at = hash::attempt(hash, attempt) % record.table_len;
            let egress = dump.maglev(&record, at);
            let (len, name) = (record.table_len, egress.map_or("nothing".into(), |e| address(dump, e)));
            let of = if per_endpoint { "the pod's address" } else { "the addresses and ports" };
            walk.say("hash", format!("The hash of {of} leads to entry {at} of {len} of the policy's table: {name}."));
            egress
        };
        let Some(egress) = egress else { continue };
        match try_slot(walk, question, policy, egress, per_endpoint) {
            Slot::Unusable => {}
            Slot::NoPort if per_endpoint => return walk.dropped(Counter::DropNoPort),
            Slot::NoPort => no_port = true,
            Slot::Taken => return hand_over(walk, egress),
        }
    }
    walk.say("slot", format!("That was the last of a packet's {SLOT_PROBES} attempts."));
    walk.dropped(if no_port { Counter::DropNoPort } else { Counter::DropNoGateway })
}

/// Returns the flow that this packet would open, with the fields that the hash needs.
fn probe(source: IpAddr, question: &Question, port: u16) -> FlowEntry {
    FlowEntry {
        pod: source,
        pod_port: port,
        remote: question.to,
        remote_port: question.port,
        proto: question.protocol.number(question.to.is_ipv6()),
        untouched: false,
        own: false,
        flow: Flow::EMPTY,
        back: None,
    }
}

fn address(dump: &Dump, egress: u32) -> String {
    dump.egress_ip(egress).map_or_else(|| format!("the egress IP #{egress}, which is gone"), |(ip, _)| ip.to_string())
}

/// Describes the share of each egress IP in the table, since the slot is unknown without a source port.
fn undecided(walk: &mut Walk<'_>, policy: u32, record: Policy) -> PacketOutcome {
    let dump = walk.dump;
    let mut shares: BTreeMap<u32, u32> = BTreeMap::new();
    for egress in (0..record.table_len).filter_map(|at| dump.maglev(&record, at)) {
        *shares.entry(egress).or_default() += 1;
    }
    for (egress, entries) in shares {
        let Some((ip, e)) = dump.egress_ip(egress) else { continue };
        let gateway = dump.node_name(e.gateway).map_or("nobody".to_owned(), |name| format!("gateway {name}"));
        let percent = (entries * 100 + record.table_len / 2) / record.table_len;
        let blocks = dump.blocks(egress).len();
        let member = dump.tables.members.get(&MemberKey { policy, egress });
        let usable = match member {
            Some(m) if m.usable != 0 && m.generation == e.generation && blocks > 0 => "",
            Some(m) if m.usable != 0 && blocks == 0 => "; no port block of it is leased to this node",
            _ => "; new flows avoid it",
        };
        walk.say("hash", format!("{percent} % of new flows are hashed to {ip}, by {gateway}{usable}."));
    }
    walk.end(
        PacketAction::Depends,
        "DEPENDS on the source port: give one with --from-port to see which slot it is hashed to.",
    )
}

enum Slot {
    Unusable,
    NoPort,
    Taken,
}

fn try_slot(walk: &mut Walk<'_>, question: &Question, policy: u32, egress: u32, per_endpoint: bool) -> Slot {
    let dump = walk.dump;
    let then = if per_endpoint { "the pod has no other one" } else { "another slot is tried" };
    let Some((ip, e)) = dump.egress_ip(egress) else {
        walk.say("slot", "That egress IP is gone; another slot is tried.");
        return Slot::Unusable;
    };
    match dump.tables.members.get(&MemberKey { policy, egress }) {
        Some(member) if member.generation == e.generation && member.usable != 0 => {}
        Some(_) => {
            walk.say(
                "slot",
                format!(
                    "New flows avoid {ip}, since its gateway does not answer or it has no owner; another slot is tried."
                ),
            );
            return Slot::Unusable;
        }
        None => {
            walk.say("slot", format!("{ip} is no longer a slot of the policy; another slot is tried."));
            return Slot::Unusable;
        }
    }
    let ports = dump.blocks(egress).len() * usize::from(port_block::SIZE);
    if ports == 0 {
        walk.say("ports", format!("No port block of {ip} is leased to this node; {then}."));
        return Slot::NoPort;
    }
    let used = used_ports(dump, question, egress);
    let to = question.to;
    if used >= ports {
        walk.say("ports", format!("All {ports} ports of {ip} here are in use towards {to}; {then}."));
        return Slot::NoPort;
    }
    let mut text = format!("{used} of the {ports} ports of {ip} here are in use towards {to}: one is free.");
    if ports - used < ports / 16 && ports > PORT_PROBES as usize {
        text += &format!(" Few are left: a packet tries {PORT_PROBES} of them, and may find none.");
    }
    walk.say("ports", text);
    Slot::Taken
}

/// Counts the ports of an egress IP that a new flow to this destination may not take: the ports of connections that are not closed yet.
fn used_ports(dump: &Dump, question: &Question, egress: u32) -> usize {
    let proto = question.protocol.number(question.to.is_ipv6());
    let blocks: BTreeSet<u16> = dump.blocks(egress).iter().copied().collect();
    let closed = |flow: &FlowEntry| flow.proto == 6 && tcp::closed(flow.flow.state, flow.flow.back);
    let taken = dump.flows.iter().filter(|flow| {
        flow.translated()
            && (flow.flow.egress, flow.remote, flow.remote_port, flow.proto)
                == (egress, question.to, question.port, proto)
            && !closed(flow)
    });
    let ports: BTreeSet<u16> = taken.map(FlowEntry::port).collect();
    ports.into_iter().filter(|port| port_block::of_port(*port).is_some_and(|block| blocks.contains(&block))).count()
}

/// Describes the result of the agent's probes of a gateway.
fn probed(walk: &Walk<'_>, name: &str) -> &'static str {
    let told = walk.agent.and_then(|agent| agent.gateways.iter().find(|gateway| gateway.name == name));
    match told.map(|gateway| gateway.probe) {
        Some(ProbeResult::Alive) => " and answers probes",
        Some(ProbeResult::Dead) => " and does NOT answer probes",
        Some(ProbeResult::Unable) => " and says that it is NOT able to carry egress IPs",
        Some(ProbeResult::Unknown) | None => "",
    }
}

/// Explains the path from an egress IP to the wire.
pub(super) fn hand_over(walk: &mut Walk<'_>, egress: u32) -> PacketOutcome {
    let dump = walk.dump;
    let Some((ip, e)) = dump.egress_ip(egress) else { return walk.dropped(Counter::DropNoOwner) };
    let Some(gateway) = dump.node_name(e.gateway) else {
        walk.say("gateway", format!("{ip} has no carrier at the moment."));
        return walk.dropped(Counter::DropNoOwner);
    };
    let epoch = crate::ctl::views::epoch(e);
    let sent = |walk: &Walk<'_>, text: String| PacketOutcome {
        egress_ip: Some(ip),
        gateway: Some(gateway.clone()),
        ..walk.end(PacketAction::Sent, text)
    };
    if e.flags & flags::SPREAD != 0 {
        walk.say(
            "gateway",
            format!("Flows of {ip} are spread over all carriers that answer (epoch {epoch}); {gateway} is the first."),
        );
    } else if e.flags & flags::LOCAL != 0 {
        walk.say("gateway", format!("This node carries {ip} (epoch {epoch})."));
    } else {
        walk.say("gateway", format!("Gateway {gateway} carries {ip} (epoch {epoch}){}.", probed(walk, &gateway)));
    }
    if e.flags & flags::LOCAL != 0 {
        walk.say(
            "transport",
            format!("None: it leaves this node directly, through the interface with index {}.", e.ifindex),
        );
        return sent(walk, format!("SENT with source {ip} straight out of this node, {gateway}."));
    }
    match dump.node_address(e.gateway) {
        Some(address) => {
            let transport = dump.tables.nodes.get(&e.gateway).map_or(0, |node| node.forward);
            let how = match transport {
                transport::DIRECT => "direct: without a tunnel to the MAC address of",
                transport::VXLAN => "vxlan: through the tunnel, bypassing its device, to",
                _ => "device: through the tunnel to",
            };
            walk.say("transport", format!("{how} {address}."));
            sent(walk, format!("SENT with source {ip} through gateway {gateway}."))
        }
        None => {
            walk.say("transport", format!("The tunnel address of {gateway} is not known here."));
            walk.dropped(Counter::DropNoOwner)
        }
    }
}
