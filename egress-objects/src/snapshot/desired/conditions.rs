//! Conditions as in Kubernetes: a condition's time is that of the last change of its status.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::api::{PoolUsage, SlotStatus, shorten};
use crate::translate::Problem;
use egress_core::{
    model::NodeName,
    plan::{ConditionKind, EgressIpPlan, OwnerReason, PolicyOutcome, Reason},
};

/// The condition of an egress IP that was removed from its pool while it was in use; its time is when that began.
pub const DRAINING: &str = "Draining";

/// The condition of a policy that is in the datapath of its pods' nodes.
pub const PROGRAMMED: &str = "Programmed";
/// The reason of a policy that some nodes have not programmed yet.
const PROGRAMMING: &str = "Programming";
/// How many nodes a message names.
const SHOWN_NODES: usize = 3;

/// Builds the conditions of one object.
pub struct ConditionWriter<'a> {
    existing: &'a [Condition],
    generation: Option<i64>,
    now: &'a Time,
    made: Vec<Condition>,
}

impl<'a> ConditionWriter<'a> {
    /// Creates a writer for an object that has these conditions now.
    pub fn new(existing: Option<&'a Vec<Condition>>, generation: Option<i64>, now: &'a Time) -> Self {
        Self { existing: existing.map_or(&[], Vec::as_slice), generation, now, made: Vec::new() }
    }

    fn add(&mut self, kind: &str, holds: bool, reason: &str, message: String) {
        let status = if holds { "True" } else { "False" };
        let before = self.existing.iter().find(|condition| condition.type_ == kind && condition.status == status);
        self.made.push(Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: shorten(message),
            observed_generation: self.generation,
            last_transition_time: before.map_or_else(|| self.now.clone(), |before| before.last_transition_time.clone()),
        });
    }

    /// Adds the conditions of a policy: the plan's outcome, or that the object could not be
    /// understood. With both, the policy is in force without egress IPs.
    pub fn of_policy(&mut self, outcome: Option<&PolicyOutcome>, problems: &[&Problem]) {
        match outcome.filter(|_| problems.is_empty()) {
            Some(outcome) => {
                let waits = Some(&outcome.behind).filter(|behind| !behind.is_empty() && !self.was_programmed());
                for (kind, condition) in &outcome.conditions {
                    let (reason, message) = (condition.reason.as_str(), condition.message.clone());
                    match waits.filter(|_| *kind == ConditionKind::Ready && condition.holds) {
                        Some(behind) => self.add(kind.as_str(), false, PROGRAMMING, waiting(behind)),
                        None => self.add(kind.as_str(), condition.holds, reason, message),
                    }
                }
                match waits {
                    Some(behind) => self.add(PROGRAMMED, false, PROGRAMMING, waiting(behind)),
                    None => {
                        let message = "every node that runs its pods and reports its policies has programmed it".into();
                        self.add(PROGRAMMED, true, Reason::AsExpected.as_str(), message);
                    }
                }
            }
            None => {
                let invalid = Reason::Invalid.as_str();
                let dropped = outcome.map_or("", |_| "; until then, it drops packets of pods that it selects");
                self.add(ConditionKind::Ready.as_str(), false, invalid, sentences(problems) + dropped);
                let others = [ConditionKind::Degraded.as_str(), ConditionKind::Conflicting.as_str(), PROGRAMMED];
                for kind in others {
                    self.add(kind, false, invalid, "the policy is not carried out".into());
                }
            }
        }
    }

    /// Returns whether the datapath of all nodes had this generation at some time. Nodes and pods that appear later hold
    /// their traffic until they have it, and so change nothing here: a joining node does not cost a write for each policy.
    fn was_programmed(&self) -> bool {
        let had =
            |c: &&Condition| c.type_ == PROGRAMMED && c.status == "True" && c.observed_generation == self.generation;
        self.existing.iter().any(|condition| had(&condition))
    }

    /// Adds Antrea's own conditions of an Egress with this many addresses, of which `assigned` is on a node.
    pub fn of_egress(&mut self, addresses: usize, assigned: Option<&SlotStatus>) {
        match addresses {
            0 => self.add("IPAllocated", false, "NotAllocated", "it has no address".into()),
            1 => self.add("IPAllocated", true, "Allocated", "it has an address".into()),
            _ => self.add("IPAllocated", true, "Allocated", format!("it has {addresses} addresses")),
        }
        match assigned.and_then(|slot| Some((&slot.egress_ip, slot.node.as_ref()?))) {
            Some((ip, node)) => self.add("IPAssigned", true, "Assigned", format!("node {node} carries {ip}")),
            None => self.add("IPAssigned", false, "NotAssigned", "no node carries any of its addresses".into()),
        }
    }

    /// Adds the conditions of a pool.
    pub fn of_pool(&mut self, usage: &PoolUsage, problems: &[&Problem]) {
        let ready = ConditionKind::Ready.as_str();
        if !problems.is_empty() {
            self.add(ready, false, Reason::Invalid.as_str(), sentences(problems));
        } else if usage.total == 0 {
            let message = "its ranges contain no address that can be assigned: a CIDR's first address, and an IPv4 CIDR's last, never are; write start and end".into();
            self.add(ready, false, Reason::NoAddress.as_str(), message);
        } else {
            let message = format!("{} of {} addresses are in use", usage.used, usage.total);
            self.add(ready, true, Reason::AsExpected.as_str(), message);
        }
    }

    /// Adds the conditions of an egress IP.
    pub fn of_egress_ip(&mut self, address: IpAddr, ip: &EgressIpPlan, drain_timeout: Duration) {
        let node = |node: &Option<NodeName>| node.as_ref().map(ToString::to_string).unwrap_or_default();
        let (owner, preferred) = (node(&ip.owner), node(&ip.preferred));
        let message = match ip.reason {
            OwnerReason::Preferred => format!("gateway {owner} carries it"),
            OwnerReason::Failover => format!("gateway {owner} carries it until {preferred} is back"),
            OwnerReason::OwnerUnhealthy => {
                format!("gateway {owner} is not healthy and no other is eligible: repair it, or let another node be selected")
            }
            OwnerReason::NoGatewaySelected => "no node is selected: correct the nodeSelector or label nodes".into(),
            OwnerReason::SelectorUnknown => {
                "its former gateways are gone, and its pool does not say which nodes may carry it: correct or create the pool".into()
            }
            OwnerReason::NoGatewayReady => {
                "no selected node is ready with an agent that renews its lease: check these nodes".into()
            }
            OwnerReason::AtCapacity => {
                "all gateways have their maximum number of egress IPs: raise maxEgressIPsPerNode or the annotation spillway.io/max-egress-ips, or add a gateway".into()
            }
            OwnerReason::AddressElsewhere => {
                format!("{address} is configured on a node that is not selected, or is not configured on a selected node where it must be")
            }
        };
        let carried = matches!(ip.reason, OwnerReason::Preferred | OwnerReason::Failover);
        self.add(ConditionKind::Ready.as_str(), carried, ip.reason.as_str(), message);
        if ip.draining {
            let pool = ip.pool.as_ref().map(ToString::to_string).unwrap_or_default();
            let message = format!("it was removed from pool {pool}: {}", until(drain_timeout));
            self.add(DRAINING, true, Reason::Draining.as_str(), message);
        }
    }

    /// Adds the condition of a pool with these draining addresses.
    pub fn of_draining(&mut self, addresses: &[IpAddr], drain_timeout: Duration) {
        let addresses = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let message = format!(
            "in use and taken out of ipRanges: {addresses}: {}; restore the ranges of addresses that must stay, and raise their policies' count",
            until(drain_timeout)
        );
        self.add(DRAINING, true, Reason::Draining.as_str(), message);
    }

    /// Returns all conditions, in the order in which they were added.
    pub fn finish(self) -> Vec<Condition> {
        self.made
    }
}

/// Describes what happens to an address that drains.
fn until(drain_timeout: Duration) -> String {
    let seconds = drain_timeout.as_secs();
    format!("no new connections; released when the last one ends, after {seconds} s (drainTimeout) at the latest")
}

fn waiting(behind: &BTreeSet<NodeName>) -> String {
    let shown = behind.iter().take(SHOWN_NODES).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let more = match behind.len().saturating_sub(SHOWN_NODES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("the datapath of {shown}{more} does not have it yet; if that lasts, check the agents there")
}

fn sentences(problems: &[&Problem]) -> String {
    let sentence = |problem: &&Problem| format!("{}: {}: {}", problem.field, problem.message, problem.remedy);
    problems.iter().map(sentence).collect::<Vec<_>>().join("; ")
}
