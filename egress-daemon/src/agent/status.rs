//! What the agent reports in its EgressNode. Pure.

use crate::{
    api::{self, CarriedIP, EgressNodeStatus, GatewayWay, MapUse, NodeAddress, ProgrammedPolicy},
    config::Firewall,
    datapath::attach::Mode,
    observe::state::GatewayState,
};
use egress_core::{
    agent::{
        blocks::Withheld,
        demand::{self, Ports},
        objects::Known,
        programmed::Programmed,
        transports,
        unnamed::Networks,
    },
    encode::tables::Tables,
    model::{Demand, NodeName, PolicyId, Snapshot, Transport, Trouble, Version},
    network::{classify::Roles, links::LinkTable, reported::reported},
    plan::Plan,
};
use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// What a status is made from.
pub struct Report<'a> {
    /// This node.
    pub node: &'a NodeName,
    /// The objects.
    pub snapshot: &'a Snapshot,
    /// What the controller has decided.
    pub plan: &'a Plan,
    /// Links and addresses.
    pub links: &'a LinkTable,
    /// What the links are for.
    pub roles: &'a Roles,
    /// Where this node receives tunnelled packets.
    pub tunnel_addresses: &'a [IpAddr],
    /// Whether new flows wait for the host's firewall.
    pub firewall: Firewall,
    /// The setting for the transports to other nodes.
    pub transport: Transport,
    /// The transports to gateways.
    pub gateways: &'a [GatewayWay],
    /// How programs are attached.
    pub attach: Mode,
    /// What is in the maps.
    pub tables: &'a Tables,
    /// Up to which revisions leases are in the maps.
    pub leases: Known,
    /// The egress IPs that this node carries by its maps.
    pub carries: &'a BTreeSet<IpAddr>,
    /// What the flows use.
    pub ports: &'a Ports,
    /// What is given back.
    pub withheld: &'a Withheld,
    /// Blocks in which the node's own sockets are.
    pub occupied_blocks: Vec<u16>,
    /// What cannot be done for policies.
    pub troubles: &'a BTreeSet<Trouble>,
    /// How far the node is with its policies.
    pub programmed: &'a Programmed,
    /// Networks that may be the cluster's although nobody names them.
    pub unnamed: &'a Networks,
    /// What does not work; empty when all does.
    pub errors: &'a [String],
}

/// Makes the status. `now` is for the time of a condition's change only.
pub fn status(report: &Report<'_>, old: Option<&EgressNodeStatus>, now: Timestamp) -> EgressNodeStatus {
    let usage = report.tables.usage().into_iter();
    EgressNodeStatus {
        tunnel_addresses: report.tunnel_addresses.iter().map(ToString::to_string).collect(),
        addresses: addresses(report),
        transport: Some(report.transport.to_string()),
        receives: transports::receives(report.transport),
        gateways: report.gateways.to_vec(),
        firewall: Some(report.firewall.to_string()),
        attach: Some(report.attach.to_string()),
        lease_revision: report.leases.all,
        own_lease_revision: report.leases.own,
        carries: report.carries.iter().map(|ip| CarriedIP { egress_ip: ip.to_string() }).collect(),
        demand: demands(demand::demand(report.node, report.plan, report.ports, report.withheld)),
        occupied_blocks: report.occupied_blocks.clone(),
        troubles: report.troubles.iter().map(trouble).collect(),
        programmed: report.programmed.versions().map(programmed).collect(),
        map_use: usage
            .map(|u| MapUse { map: u.map.into(), used: u.used as u64, capacity: u.capacity as u64 })
            .collect(),
        conditions: vec![ready(report.errors, old, now), networks(report.unnamed, old, now)],
    }
}

fn trouble(trouble: &Trouble) -> api::Trouble {
    api::Trouble {
        policy: trouble.policy.to_string(),
        pod: trouble.pod.as_ref().map(ToString::to_string),
        reason: trouble.kind.as_str().into(),
        message: trouble.message.clone(),
    }
}

fn programmed((policy, version): (&PolicyId, &Version)) -> ProgrammedPolicy {
    ProgrammedPolicy { policy: policy.to_string(), uid: version.uid.clone(), generation: version.generation }
}

/// The transport to a gateway, as the object tells it.
pub fn gateway(state: &GatewayState) -> GatewayWay {
    GatewayWay {
        node: state.name.clone(),
        transport: state.transport.clone(),
        reason: Some(state.why.clone()).filter(|why| !why.is_empty()),
    }
}

/// The addresses that other things on the network know this node by.
fn addresses(report: &Report<'_>) -> Vec<NodeAddress> {
    let told = reported(report.node, report.snapshot, report.links, report.roles).into_iter();
    told.map(|(link, address)| {
        let default_route = report.links.default_route(address.addr().is_ipv6()).is_some_and(|r| r.oif == link.index);
        let mac = link.mac.map(|mac| mac.to_string());
        NodeAddress { interface: link.name.clone(), cidr: address.to_string(), default_route, mac }
    })
    .collect()
}

/// Demands as objects write them.
pub fn demands(demands: BTreeMap<IpAddr, Demand>) -> Vec<api::Demand> {
    let demand = |(address, demand): (IpAddr, Demand)| api::Demand {
        egress_ip: address.to_string(),
        want_blocks: demand.want.try_into().unwrap_or(u16::MAX),
        release: demand.released.into_iter().collect(),
    };
    demands.into_iter().map(demand).collect()
}

fn ready(errors: &[String], old: Option<&EgressNodeStatus>, now: Timestamp) -> Condition {
    let told = match errors {
        [] => ("True", "AsExpected", "the datapath does what the objects say".to_owned()),
        all => ("False", "Degraded", all.join("; ")),
    };
    condition("Ready", told, old, now)
}

fn networks(unnamed: &Networks, old: Option<&EgressNodeStatus>, now: Timestamp) -> Condition {
    let sentence =
        |(net, why): (&ipnet::IpNet, &String)| format!("no policy is carried out for what is in {net}: {why}");
    let told = match unnamed.is_empty() {
        true => ("True", "AsExpected", "the networks of pods and Services are known".to_owned()),
        false => ("False", "NotNamed", unnamed.iter().map(sentence).collect::<Vec<_>>().join("; ")),
    };
    condition("NetworksKnown", told, old, now)
}

fn condition(
    kind: &str,
    (status, reason, message): (&str, &str, String),
    old: Option<&EgressNodeStatus>,
    now: Timestamp,
) -> Condition {
    let before = old.into_iter().flat_map(|s| &s.conditions).find(|c| c.type_ == kind);
    let since = before.filter(|c| c.status == status).map_or(Time(now), |c| c.last_transition_time.clone());
    Condition {
        type_: kind.into(),
        status: status.into(),
        reason: reason.into(),
        message,
        last_transition_time: since,
        observed_generation: None,
    }
}
