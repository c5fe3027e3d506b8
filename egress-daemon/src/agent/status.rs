//! The status that the agent reports in its EgressNode.

use super::Agent;
use egress_core::{
    agent::{facts::Facts, machine::Machine, transports, unnamed::Networks},
    model::{Demand, PolicyId, Trouble, Version},
};
use egress_objects::api::{self, CarriedIP, EgressNodeStatus, NodeAddress, ProgrammedPolicy};
use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use std::{collections::BTreeMap, net::IpAddr};

/// Returns the part of the status that reports leases and egress IPs, as the successor of `old`.
pub fn of_leases(machine: &mut Machine, old: Option<&EgressNodeStatus>) -> EgressNodeStatus {
    let (own_lease_revision, demand) = machine.report(old.map_or(0, |status| status.own_lease_revision));
    EgressNodeStatus {
        own_lease_revision,
        carries: machine.outcome().carries.iter().map(|ip| CarriedIP { egress_ip: ip.to_string() }).collect(),
        demand: demands(demand),
        ..EgressNodeStatus::default()
    }
}

/// Returns the status. `now` is used only as the time of a condition's change.
pub fn status(agent: &mut Agent, old: Option<&EgressNodeStatus>, now: Timestamp) -> EgressNodeStatus {
    let of_leases = of_leases(&mut agent.machine, old);
    let (settings, machine, outcome) = (&agent.settings, &agent.machine, agent.machine.outcome());
    EgressNodeStatus {
        tunnel_addresses: machine.tunnel_addresses().iter().map(ToString::to_string).collect(),
        addresses: addresses(machine.facts()),
        transport: Some(settings.machine.transport.to_string()),
        receives: transports::receives(settings.machine.transport),
        firewall: Some(settings.firewall.to_string()),
        attach: Some(agent.hooks.mode().to_string()),
        occupied_blocks: agent.occupied_blocks(),
        troubles: outcome.troubles.iter().map(trouble).collect(),
        programmed: Some(outcome.programmed.versions().map(programmed).collect()),
        conditions: vec![ready(&outcome.errors, old, now), networks(&outcome.unnamed, old, now)],
        ..of_leases
    }
}

/// Returns whether others must act on a difference between `old` and `new`. The lease revision of the tables and the programmed policies
/// that are settled (`is_settled`) change with every pod, so they do not count and are written with the next relevant change.
pub fn is_news(old: &EgressNodeStatus, new: &EgressNodeStatus, is_settled: impl Fn(&ProgrammedPolicy) -> bool) -> bool {
    let gives_back = new.demand.iter().any(|demand| !demand.release.is_empty());
    let waited_for = |status: &EgressNodeStatus, other: &EgressNodeStatus| {
        let has = |policy: &ProgrammedPolicy| other.programmed.iter().flatten().any(|other| other == policy);
        let programmed = status.programmed.iter().flatten().filter(|policy| !has(policy) && !is_settled(policy));
        EgressNodeStatus {
            own_lease_revision: if gives_back { status.own_lease_revision } else { 0 },
            programmed: status.programmed.is_some().then(|| programmed.cloned().collect()),
            ..status.clone()
        }
    };
    waited_for(old, new) != waited_for(new, old)
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

/// Returns the addresses by which other hosts on the network know this node.
fn addresses(facts: &Facts) -> Vec<NodeAddress> {
    let told = facts.addresses().into_iter();
    told.map(|(link, address)| {
        let default_route = facts.links.default_route(address.addr().is_ipv6()).is_some_and(|r| r.oif == link.index);
        let mac = link.mac.map(|mac| mac.to_string());
        NodeAddress { interface: link.name.clone(), cidr: address.to_string(), default_route, mac }
    })
    .collect()
}

/// Converts demands to the form of the API.
fn demands(demands: BTreeMap<IpAddr, Demand>) -> Vec<api::Demand> {
    let demand = |(address, demand): (IpAddr, Demand)| api::Demand {
        egress_ip: address.to_string(),
        want_blocks: demand.want.try_into().unwrap_or(u16::MAX),
        release: demand.released.into_iter().collect(),
    };
    demands.into_iter().map(demand).collect()
}

fn ready(errors: &[String], old: Option<&EgressNodeStatus>, now: Timestamp) -> Condition {
    let told = match errors {
        [] => ("True", "AsExpected", "the datapath matches the objects".to_owned()),
        all => ("False", "Degraded", all.join("; ")),
    };
    condition("Ready", told, old, now)
}

fn networks(unnamed: &Networks, old: Option<&EgressNodeStatus>, now: Timestamp) -> Condition {
    let sentence =
        |(net, why): (&ipnet::IpNet, &String)| format!("no policy is applied to destinations in {net}: {why}");
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
        message: api::shorten(message),
        last_transition_time: since,
        observed_generation: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_policy(generation: i64) -> ProgrammedPolicy {
        ProgrammedPolicy { policy: "web".into(), uid: "1".into(), generation }
    }

    #[test]
    fn status_with_any_number_of_errors_is_accepted() {
        let errors: Vec<String> =
            (0..2_000).map(|n| format!("policy {n}: it has an error of some length — é")).collect();
        let unnamed = (0..=255).map(|n| (ipnet::IpNet::from(IpAddr::from([10, 0, 0, n])), "x".repeat(400))).collect();
        let now = Timestamp::UNIX_EPOCH;
        let mut object = api::EgressNode::new("worker1", api::EgressNodeSpec::default());
        let conditions = vec![ready(&errors, None, now), networks(&unnamed, None, now)];
        object.status = Some(EgressNodeStatus { conditions, ..Default::default() });
        let crds = api::crds();
        let (_, crd) = crds.iter().find(|(_, crd)| crd.spec.names.kind == "EgressNode").unwrap();
        let rules = api::Rules::new(&crd.spec.versions[0]).unwrap();
        let broken = rules.check(&mut serde_json::to_value(&object).unwrap());
        assert!(broken.is_empty(), "{}", broken[0]);
    }

    #[test]
    fn status_is_written_only_if_others_must_act_on_the_change() {
        let old = EgressNodeStatus { own_lease_revision: 3, programmed: Some(vec![]), ..Default::default() };
        // Not all nodes have programmed the second generation of the policy yet.
        let is_news = |new: &EgressNodeStatus| is_news(&old, new, |policy| policy.generation == 1);
        assert!(!is_news(&old));
        let leased = EgressNodeStatus { own_lease_revision: 4, ..old.clone() };
        assert!(!is_news(&leased), "gateways learn of leases from the lease itself");
        let release = api::Demand { egress_ip: "192.0.2.1".into(), want_blocks: 0, release: vec![7] };
        assert!(is_news(&EgressNodeStatus { demand: vec![release], ..leased }), "the controller frees the block");
        let [settled, unsettled] =
            [1, 2].map(|generation| EgressNodeStatus { programmed: Some(vec![of_policy(generation)]), ..old.clone() });
        assert!(!is_news(&settled));
        assert!(is_news(&unsettled), "the policy waits for this node");
        let carries = vec![CarriedIP { egress_ip: "192.0.2.1".into() }];
        assert!(is_news(&EgressNodeStatus { carries, ..old.clone() }), "sources wait for it");
    }
}
