//! The reported state of each policy: conditions, slots, conflicts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::types::{Condition, ConditionKind, EgressIpPlan, OwnerReason, Reason, Slot};
use crate::model::{
    Distribution, EndpointId, Family, NodeName, OnNoGateway, Policy, PolicyId, Snapshot, Trouble, TroubleKind,
};

/// A reason why a condition of a policy is not as the user wishes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Problem {
    kind: ConditionKind,
    reason: Reason,
    message: String,
}

/// Everything that was found wrong, by policy. The order in which it was found does not matter.
#[derive(Debug, Default)]
pub struct Problems(BTreeMap<PolicyId, BTreeSet<Problem>>);

impl Problems {
    /// Adds a problem.
    pub fn add(&mut self, policy: &PolicyId, kind: ConditionKind, reason: Reason, message: String) {
        self.0.entry(policy.clone()).or_default().insert(Problem { kind, reason, message });
    }

    /// Adds the problems of a policy's slots. `overruled`: it selects pods to which its `onNoGateway: NodeIP` does not apply.
    pub fn judge(&mut self, policy: &Policy, slots: &[Slot], unserved_zones: &BTreeSet<String>, overruled: bool) {
        let serving = || slots.iter().filter(|slot| !slot.draining);
        for slot in serving() {
            if let Some((reason, message)) = slot_problem(slot) {
                self.add(&policy.id, ConditionKind::Degraded, reason, message);
            }
        }
        let fate = match policy.on_no_gateway {
            OnNoGateway::Drop => "is dropped",
            OnNoGateway::NodeIp if overruled => {
                "is dropped, despite onNoGateway, for pods that a cluster-scoped policy also selects"
            }
            OnNoGateway::NodeIp => "leaves with the node's address",
        };
        for family in Family::ALL.into_iter().filter(|family| policy.serves(*family)) {
            let of_family = || serving().filter(|slot| Family::of(slot.address) == family);
            let (reason, message) = if of_family().next().is_none() {
                let message = format!(
                    "there is no {family} egress IP: traffic to {family} destinations {fate}; add an {family} address or pool, or remove {family} from destinationCIDRs"
                );
                (Reason::NoAddress, message)
            } else if of_family().all(|slot| slot.owner.is_none()) {
                let message = format!(
                    "no {family} egress IP has a gateway: traffic to {family} destinations {fate} until one does"
                );
                (Reason::NoGateway, message)
            } else {
                continue;
            };
            self.add(&policy.id, ConditionKind::Ready, reason, message);
        }
        if !unserved_zones.is_empty() {
            let zones = unserved_zones.iter().cloned().collect::<Vec<_>>().join(", ");
            let message = format!(
                "no gateway owns an egress IP in zone {zones}: traffic from there {fate}; add a gateway there, or set zone.mode to Prefer"
            );
            self.add(&policy.id, ConditionKind::Degraded, Reason::NoGatewayInZone, message);
        }
    }

    /// Adds what nodes cannot do for a policy: one trouble of each kind, and how many more there are.
    pub fn troubled(&mut self, policy: &PolicyId, troubles: &[(&NodeName, &Trouble)]) {
        for kind in TroubleKind::ALL {
            let mut of_kind = troubles.iter().filter(|(_, trouble)| trouble.kind == kind);
            let unreported: usize = of_kind.clone().map(|(_, trouble)| trouble.counted().1).sum();
            let Some((node, first)) = of_kind.next() else { continue };
            let about =
                first.pod.as_ref().map(|pod| format!("pod {}/{}: ", pod.namespace, pod.name)).unwrap_or_default();
            let more = match of_kind.count() + unreported {
                0 => String::new(),
                more => format!(" (and {more} more)"),
            };
            let reason = match kind {
                TroubleKind::DoesNotFit => Reason::DoesNotFit,
                TroubleKind::PodWithoutInterface => Reason::PodWithoutInterface,
                TroubleKind::PodNotStarted => Reason::PodNotStarted,
            };
            let message = format!("on node {node}: {about}{}{more}", first.counted().0);
            self.add(policy, ConditionKind::Degraded, reason, message);
        }
    }

    /// Adds which policies take precedence, and where.
    pub fn conflicts(&mut self, policy: &PolicyId, conflicts: &BTreeMap<PolicyId, BTreeSet<IpNet>>) {
        for (winner, nets) in conflicts {
            let shown = nets.iter().take(3).map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let more = if nets.len() > 3 { format!(" and {} more", nets.len() - 3) } else { String::new() };
            let message = format!(
                "policy {winner} takes precedence for some of the same pods' traffic to {shown}{more}: narrow the selectors or destinationCIDRs of one of them"
            );
            self.add(policy, ConditionKind::Conflicting, Reason::SameDestination, message);
        }
    }

    /// Returns the conditions of a policy: all kinds, each with the first reason and all messages.
    pub fn conditions(&self, policy: &Policy) -> BTreeMap<ConditionKind, Condition> {
        ConditionKind::ALL
            .into_iter()
            .map(|kind| {
                let mut of_kind = self.0.get(&policy.id).into_iter().flatten().filter(|problem| problem.kind == kind);
                let bad = of_kind.next().map(|first| {
                    let messages: Vec<&str> =
                        std::iter::once(first).chain(of_kind).map(|problem| problem.message.as_str()).collect();
                    (first.reason, messages.join("; "))
                });
                let (reason, message) =
                    bad.clone().unwrap_or_else(|| (Reason::AsExpected, fine(kind, policy.distribution).into()));
                (kind, Condition { holds: bad.is_some() != (kind == ConditionKind::Ready), reason, message })
            })
            .collect()
    }
}

/// Returns the message if nothing is wrong. It has no number of pods, because each pod would cost a write of the status.
fn fine(kind: ConditionKind, distribution: Distribution) -> &'static str {
    match (kind, distribution) {
        (ConditionKind::Ready, Distribution::PerFlow) => "flows are spread over its egress IPs",
        (ConditionKind::Ready, Distribution::PerEndpoint) => "each pod is assigned one of its egress IPs",
        (ConditionKind::Degraded, _) => "everything that was requested is available",
        (ConditionKind::Conflicting, _) => "no other policy takes precedence",
    }
}

fn slot_problem(slot: &Slot) -> Option<(Reason, String)> {
    let address = slot.address;
    let owner = slot.owner.as_ref().map(ToString::to_string).unwrap_or_default();
    Some(match slot.reason {
        OwnerReason::Preferred | OwnerReason::Failover => return None,
        OwnerReason::OwnerUnhealthy => (
            Reason::GatewayUnhealthy,
            format!(
                "gateway {owner} of {address} is not healthy and no other is eligible: repair it, or let the nodeSelector select another node"
            ),
        ),
        OwnerReason::NoGatewaySelected => (
            Reason::NoGateway,
            format!("{address} has no gateway, because the nodeSelector selects no node: correct it or label nodes"),
        ),
        OwnerReason::SelectorUnknown => (
            Reason::NoGateway,
            format!(
                "{address} has no gateway: its former gateways are gone, and its pool does not say which nodes may carry it: correct or create the pool"
            ),
        ),
        OwnerReason::NoGatewayReady => (
            Reason::NoGateway,
            format!(
                "{address} has no gateway, because no selected node is ready with an agent that renews its lease: check these nodes"
            ),
        ),
        OwnerReason::AtCapacity => (
            Reason::AtCapacity,
            format!(
                "{address} waits for a gateway, because all have their maximum number of egress IPs: raise maxEgressIPsPerNode or the annotation spillway.io/max-egress-ips, or add a gateway"
            ),
        ),
        OwnerReason::AddressElsewhere => (
            Reason::AddressElsewhere,
            format!(
                "{address} is configured on an unselected node, or must be configured on a selected node and is not: select that node, or configure it there"
            ),
        ),
    })
}

/// Returns what nodes report that they cannot do, by policy, sorted by node. Reports about other nodes' pods are ignored.
pub fn troubles(snapshot: &Snapshot) -> BTreeMap<&PolicyId, Vec<(&NodeName, &Trouble)>> {
    let mut all: BTreeMap<&PolicyId, Vec<(&NodeName, &Trouble)>> = BTreeMap::new();
    for node in snapshot.nodes.values() {
        let own = |pod: &EndpointId| snapshot.endpoints.get(pod).is_some_and(|e| e.node == node.name);
        let told = node.report.iter().flat_map(|report| &report.troubles);
        for trouble in told.filter(|trouble| trouble.pod.as_ref().is_none_or(own)) {
            all.entry(&trouble.policy).or_default().push((&node.name, trouble));
        }
    }
    all
}

/// Returns which of a policy's nodes do not have this version of it in their datapath. Leaves out nodes that are down, which have no
/// traffic; nodes without an agent, which carry out nothing at all; and agents of a version that does not report it.
pub fn behind<'a>(
    snapshot: &Snapshot,
    policy: &Policy,
    sources: impl Iterator<Item = &'a NodeName>,
) -> BTreeSet<NodeName> {
    let is_behind = |name: &&NodeName| {
        let node = snapshot.nodes.get(*name).filter(|node| node.ready);
        let programmed = node.and_then(|node| node.report.as_ref()?.programmed.as_ref());
        programmed.is_some_and(|versions| !versions.get(&policy.id).is_some_and(|version| policy.is(version)))
    };
    sources.filter(is_behind).cloned().collect()
}

/// Returns the slots of a policy, sorted by address.
pub fn slots(
    policy: &Policy,
    egress_ips: &BTreeMap<IpAddr, &EgressIpPlan>,
    zone_of: impl Fn(&EgressIpPlan) -> Option<String>,
    endpoints: &BTreeMap<IpAddr, u32>,
) -> Vec<Slot> {
    egress_ips
        .iter()
        .map(|(address, plan)| Slot {
            address: *address,
            owner: plan.owner.clone(),
            zone: zone_of(plan),
            epoch: plan.epoch,
            weight: plan.users.get(&policy.id).copied().unwrap_or(1),
            reason: plan.reason,
            endpoints: endpoints.get(address).copied().unwrap_or(0),
            draining: plan.draining,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::troubles::shown;
    use crate::model::PolicyKind;

    #[test]
    fn a_condition_counts_the_pods_that_a_node_does_not_report_one_by_one() {
        let web = PolicyId::new(PolicyKind::Native, "web");
        let trouble = |pod: usize| Trouble {
            policy: web.clone(),
            kind: TroubleKind::PodNotStarted,
            pod: Some(EndpointId::new("shop", &format!("pod-{pod:04}"), "uid")),
            message: "it does not start".into(),
        };
        let (many, two) = (shown((0..500).map(trouble).collect()), shown((500..502).map(trouble).collect()));
        let (a, b) = ("a".into(), "b".into());
        let told = |troubles: &[(&NodeName, &Trouble)]| {
            let mut problems = Problems::default();
            problems.troubled(&web, troubles);
            problems.0.into_values().flatten().map(|problem| problem.message).collect::<Vec<_>>()
        };
        let of_many: Vec<_> = many.iter().map(|trouble| (&a, trouble)).collect();
        assert_eq!(told(&of_many), ["on node a: pod shop/pod-0000: it does not start (and 499 more)"]);
        let all: Vec<_> = of_many.into_iter().chain(two.iter().map(|trouble| (&b, trouble))).collect();
        assert_eq!(told(&all), ["on node a: pod shop/pod-0000: it does not start (and 501 more)"]);
        // With very many policies, a node reports one pod for each.
        let mut one = trouble(0);
        one.and_more(499);
        assert_eq!(told(&[(&a, &one)]), ["on node a: pod shop/pod-0000: it does not start (and 499 more)"]);
    }
}
