//! The planner: makes the next plan from a snapshot of all objects, the health of gateways and the plan so far.
//!
//! It does no I/O, reads no clock and uses no randomness. The same input in any order gives the same plan, and planning again without a
//! change gives the same plan again. A policy that cannot be carried out never disturbs another.

mod addresses;
pub mod blocks;
mod candidates;
pub mod carriers;
mod claims;
pub mod classes;
pub mod departed;
pub mod diff;
mod drain;
mod endpoints;
mod hash;
mod index;
pub mod maglev;
mod memo;
mod outcome;
mod owners;
mod pools;
pub mod preview;
pub mod select;
mod types;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use candidates::Candidates;
use claims::Wanted;
use outcome::Problems;
use owners::{Decision, Floating, GatewayNode};
use select::Selection;

pub use memo::{Changes, Memo, Touched};
pub use types::{
    Assigned, BlockLease, BlockState, Blocks, Condition, ConditionKind, EgressIpPlan, OwnerReason, Plan, PolicyOutcome,
    Reason, Slot,
};

use crate::health::Health;
use crate::model::{
    DEFAULT_CARRIERS, Distribution, MAX_CARRIERS, NetworkAttachment, Node, NodeName, PolicyId, Pool, PoolId, Snapshot,
    Trouble, ZoneMode,
};

/// Makes the next plan.
pub fn plan(snapshot: &Snapshot, health: &Health, previous: &Plan) -> Plan {
    let selection = Selection::new(snapshot);
    plan_for(snapshot, &selection, health, previous)
}

/// Makes the next plan, and a memo that finds the consequences of small changes of the snapshot.
pub fn plan_and_remember(snapshot: Snapshot, health: &Health, previous: &Plan) -> (Plan, Memo) {
    let selection = Selection::new(&snapshot);
    let plan = plan_for(&snapshot, &selection, health, previous);
    let index = memo::Index::new(&snapshot, &selection);
    (plan, Memo::new(snapshot, index))
}

fn plan_for(snapshot: &Snapshot, selection: &Selection<'_>, health: &Health, previous: &Plan) -> Plan {
    let mut problems = Problems::default();
    let cluster = Cluster::new(snapshot, health, selection);

    let mut candidates = Candidates::default();
    let mut wanted = addresses::gather(snapshot, health, previous, &mut candidates, &mut problems);
    for wanted in wanted.values_mut() {
        cluster.restrict_to_zones(wanted, &mut candidates);
    }
    let mut egress_ips = cluster.owners(&wanted, &candidates, previous);

    let shared: Vec<Option<Vec<u32>>> = wanted.values().map(|wanted| cluster.shared_sources(wanted)).collect();
    let leasable = wanted
        .iter()
        .zip(&shared)
        .filter(|((_, wanted), _)| !wanted.draining)
        .map(|((address, wanted), shared)| (*address, cluster.leasable(wanted, shared.as_deref())))
        .collect();
    let sources: Vec<&[u32]> = cluster.sources.iter().map(Vec::as_slice).collect();
    let revision = previous.lease_revision + 1;
    let nodes: Vec<&Node> = snapshot.nodes.values().collect();
    let leases = blocks::lease(&nodes, health, &previous.blocks, &leasable, &sources, revision);
    for (address, shares) in leases.shares {
        if let Some(plan) = egress_ips.get_mut(&address) {
            (plan.share, plan.scarce, plan.starved) = (shares.share, shares.scarce, shares.starved);
        }
    }

    let together = selection.classes();
    let conflicts = classes::conflicts(&snapshot.policies, together.keys());
    let overruled: BTreeSet<&PolicyId> =
        together.keys().flat_map(|class| classes::overruled(&snapshot.policies, class)).collect();
    let mut of_policy: BTreeMap<&PolicyId, BTreeMap<IpAddr, &EgressIpPlan>> = BTreeMap::new();
    for (address, plan) in &egress_ips {
        plan.users.keys().for_each(|policy| {
            of_policy.entry(policy).or_default().insert(*address, plan);
        });
    }
    let (mut assignments, mut outcomes) = (BTreeMap::new(), BTreeMap::new());
    let mut troubles = outcome::troubles(snapshot);
    for (id, policy) in &snapshot.policies {
        let slots = of_policy.remove(id).unwrap_or_default();
        let mut counts = BTreeMap::new();
        if policy.distribution == Distribution::PerEndpoint {
            let before = previous.assignments.get(id);
            let selected = selection.endpoints(id);
            let nodes = selected.iter().map(|(id, endpoint)| (*id, &endpoint.node));
            let assigned = endpoints::of_policy(snapshot, policy, nodes, &slots, before);
            counts = endpoints::count(&assigned);
            assignments.insert(id.clone(), assigned);
        }
        let zone_of = |plan: &EgressIpPlan| snapshot.nodes.get(plan.owner.as_ref()?)?.zone.clone();
        let unserved = endpoints::unserved_zones(snapshot, policy, cluster.source_names(id), &slots);
        let slots = outcome::slots(policy, &slots, zone_of, &counts);
        let conflicts = conflicts.get(id).cloned().unwrap_or_default();
        problems.judge(policy, &slots, &unserved, overruled.contains(id));
        drain::note(snapshot, policy, &slots, &egress_ips, &mut problems);
        problems.conflicts(id, &conflicts);
        let troubles = troubles.remove(id).unwrap_or_default();
        problems.troubled(id, &troubles);
        let of_pod = |t: &Trouble| Some((t.pod.clone()?, (t.kind, t.message.clone())));
        let pods = troubles.iter().filter_map(|(_, trouble)| of_pod(trouble)).collect();
        let selected = selection.count(id);
        let conditions = problems.conditions(policy);
        let (behind, endpoints) = (outcome::behind(snapshot, policy, cluster.source_names(id)), selected as u32);
        outcomes.insert(id.clone(), PolicyOutcome { conditions, slots, endpoints, behind, pods, conflicts });
    }
    let lease_revision = if leases.granted { revision } else { previous.lease_revision };
    Plan { egress_ips, assignments, blocks: leases.blocks, lease_revision, outcomes }
}

/// Nodes, zones, pools and policies by number.
struct Cluster<'a> {
    snapshot: &'a Snapshot,
    names: Vec<&'a NodeName>,
    places: BTreeMap<&'a NodeName, u32>,
    gateways: Vec<GatewayNode>,
    policies: BTreeMap<&'a PolicyId, u32>,
    pools: BTreeMap<&'a PoolId, u32>,
    /// The source nodes of each policy.
    sources: Vec<Vec<u32>>,
}

impl<'a> Cluster<'a> {
    fn new(snapshot: &'a Snapshot, health: &Health, selection: &Selection<'_>) -> Self {
        let zones: BTreeSet<&String> = snapshot.nodes.values().filter_map(|node| node.zone.as_ref()).collect();
        let zones: BTreeMap<&String, u32> = zones.into_iter().zip(0..).collect();
        let places: BTreeMap<&NodeName, u32> = snapshot.nodes.keys().zip(0..).collect();
        let gateways = snapshot
            .nodes
            .values()
            .map(|node| GatewayNode {
                ready: node.ready && !node.draining,
                health: health.of(&node.name),
                limit: node.max_egress_ips.or(snapshot.max_egress_ips),
                own_limit: node.max_egress_ips.is_some(),
                zone: node.zone.as_ref().map(|zone| zones[zone]),
                reports: node.report.is_some(),
                key: carriers::node_key(node.name.as_str()),
            })
            .collect();
        let sources = snapshot.policies.keys().map(|policy| selection.source_nodes(policy, places.len())).collect();
        Self {
            snapshot,
            names: snapshot.nodes.keys().collect(),
            places,
            gateways,
            policies: snapshot.policies.keys().zip(0..).collect(),
            pools: snapshot.pools.keys().chain(snapshot.unreadable_pools.keys()).zip(0..).collect(),
            sources,
        }
    }

    fn source_names(&self, policy: &PolicyId) -> impl Iterator<Item = &'a NodeName> + Clone {
        self.sources[self.policies[policy] as usize].iter().map(|node| self.names[*node as usize])
    }

    /// Restricts an egress IP that is used only by policies that require the zone of the source node to owners in a zone that has source
    /// nodes, if such a zone has any candidate.
    fn restrict_to_zones(&self, wanted: &mut Wanted<'_>, candidates: &mut Candidates<'_>) {
        if wanted.fixed.is_some() || wanted.users.iter().any(|(policy, _)| policy.zone != ZoneMode::Require) {
            return;
        }
        let sources = wanted.users.iter().flat_map(|(policy, _)| &self.sources[self.policies[&policy.id] as usize]);
        let zones: BTreeSet<u32> = sources.filter_map(|node| self.gateways[*node as usize].zone).collect();
        let in_zone = |node: &u32| self.gateways[*node as usize].zone.is_some_and(|zone| zones.contains(&zone));
        let restricted: Vec<u32> = candidates.get(wanted.candidates).iter().copied().filter(in_zone).collect();
        if !restricted.is_empty() {
            wanted.candidates = candidates.intern(restricted);
        }
    }

    fn owners(
        &self,
        wanted: &BTreeMap<IpAddr, Wanted<'_>>,
        candidates: &Candidates<'_>,
        previous: &Plan,
    ) -> BTreeMap<IpAddr, EgressIpPlan> {
        let floating = self.floating(wanted, candidates, previous);
        let decisions = owners::decide(&floating, &self.gateways);
        let orders = carriers::orders(&floating, &self.gateways, &decisions);
        let decisions = decisions.into_iter().zip(orders);
        let mut decided: BTreeMap<IpAddr, _> = floating.iter().map(|item| item.address).zip(decisions).collect();
        wanted
            .iter()
            .map(|(address, wanted)| {
                let before = previous.egress_ips.get(address);
                let (decision, order) = match (&wanted.fixed, decided.remove(address)) {
                    (Some((node, _)), _) => {
                        let healthy = self.gateways[*node as usize].keeps();
                        let reason = if healthy { OwnerReason::Preferred } else { OwnerReason::OwnerUnhealthy };
                        (Decision { owner: Some(*node), preferred: Some(*node), reason }, vec![*node])
                    }
                    (None, Some((decision, order))) => {
                        let unknown = wanted.pool.is_some_and(|pool| self.snapshot.placement(pool).is_none());
                        let reason = match decision.reason {
                            OwnerReason::NoGatewaySelected if unknown => OwnerReason::SelectorUnknown,
                            reason => reason,
                        };
                        (Decision { reason, ..decision }, order)
                    }
                    (None, None) => {
                        (Decision { owner: None, preferred: None, reason: OwnerReason::AddressElsewhere }, Vec::new())
                    }
                };
                let name = |node: Option<u32>| node.map(|node| self.names[node as usize].clone());
                let owner = name(decision.owner);
                let mut carriers: Vec<NodeName> = order.into_iter().filter_map(|node| name(Some(node))).collect();
                if wanted.fixed.is_none() {
                    carriers.extend(self.leaving(*address, &carriers, before));
                }
                let (old_owner, old_epoch) = before.map_or((None, 0), |plan| (plan.owner.clone(), plan.epoch));
                let plan = EgressIpPlan {
                    pool: wanted.pool.cloned(),
                    fixed: wanted.fixed.is_some(),
                    interface: wanted.fixed.as_ref().and_then(|(_, interface)| interface.clone()),
                    epoch: old_epoch + u64::from(owner != old_owner),
                    owner,
                    carriers,
                    preferred: name(decision.preferred),
                    users: wanted.users.iter().map(|(policy, weight)| (policy.id.clone(), *weight)).collect(),
                    reason: decision.reason,
                    share: 0,
                    scarce: false,
                    starved: false,
                    attachment: self.attachment(wanted, before),
                    draining: wanted.draining,
                };
                (*address, plan)
            })
            .collect()
    }

    /// Returns how an egress IP is reached: as its pool says, or said while the pool was known.
    fn attachment(&self, wanted: &Wanted<'_>, before: Option<&EgressIpPlan>) -> NetworkAttachment {
        let pool = wanted.pool.and_then(|pool| self.snapshot.pools.get(pool));
        let before = before.filter(|_| wanted.pool.is_some()).map(|before| before.attachment);
        pool.map(Pool::attachment).or(before).unwrap_or_default()
    }

    /// Returns the previous carriers that must leave, but stay until the owner reports that it carries the address; no dead ones.
    fn leaving(&self, address: IpAddr, carriers: &[NodeName], before: Option<&EgressIpPlan>) -> Vec<NodeName> {
        let Some(owner) = carriers.first() else { return Vec::new() };
        if self.snapshot.report(owner).is_some_and(|report| report.carries.contains(&address)) {
            return Vec::new();
        }
        let lives = |name: &&NodeName| {
            self.places.get(name).is_some_and(|place| self.gateways[*place as usize].health.is_fresh())
        };
        let before = before.filter(|before| !before.fixed).into_iter().flat_map(|before| &before.carriers);
        before.filter(|name| !carriers.contains(name)).filter(lives).cloned().collect()
    }

    fn floating<'c>(
        &self,
        wanted: &BTreeMap<IpAddr, Wanted<'_>>,
        candidates: &'c Candidates<'_>,
        previous: &Plan,
    ) -> Vec<Floating<'c>> {
        let mut nth: BTreeMap<&PolicyId, usize> = BTreeMap::new();
        let mut floating = Vec::new();
        for (address, wanted) in wanted.iter().filter(|(_, wanted)| wanted.fixed.is_none() && !wanted.elsewhere) {
            let before = previous.egress_ips.get(address);
            let place = |name: &NodeName| self.places.get(name).copied();
            let first = &wanted.users[0].0.id;
            let n = nth.entry(first).or_default();
            let pool = wanted.pool.and_then(|pool| self.snapshot.placement(pool));
            floating.push(Floating {
                address: *address,
                candidates: candidates.get(wanted.candidates),
                set: wanted.candidates,
                policies: wanted.users.iter().map(|(policy, _)| self.policies[&policy.id]).collect(),
                start: owners::ring_start(&first.to_string(), *n),
                zoned: wanted.users.iter().any(|(policy, _)| policy.zone != ZoneMode::Any),
                pool: pool.map(|pool| (self.pools[&pool.id], pool.max_per_node)),
                failback: wanted.failback,
                first: wanted.first,
                owner: before.and_then(|plan| plan.owner.as_ref()).and_then(place),
                preferred: before.and_then(|plan| plan.preferred.as_ref()).and_then(place),
                count: match pool {
                    Some(pool) => pool.carriers,
                    None if wanted.pool.is_some() => MAX_CARRIERS, // Its selector is unknown: all that carried it continue.
                    None => DEFAULT_CARRIERS,
                },
                carriers: before.iter().flat_map(|plan| &plan.carriers).filter_map(place).collect(),
            });
            *n += 1;
        }
        floating
    }

    /// Returns the source nodes of an egress IP that several policies use.
    fn shared_sources(&self, wanted: &Wanted<'_>) -> Option<Vec<u32>> {
        (wanted.users.len() > 1).then(|| {
            let of = |(policy, _): &(&crate::model::Policy, u32)| &self.sources[self.policies[&policy.id] as usize];
            let nodes: BTreeSet<u32> = wanted.users.iter().flat_map(of).copied().collect();
            nodes.into_iter().collect()
        })
    }

    fn leasable<'b>(&'b self, wanted: &Wanted<'_>, shared: Option<&'b [u32]>) -> blocks::Leasable<'b> {
        let policies: Vec<u32> = wanted.users.iter().map(|(policy, _)| self.policies[&policy.id]).collect();
        blocks::Leasable {
            fixed: wanted.fixed.as_ref().map(|(node, _)| &self.snapshot.nodes[self.names[*node as usize]]),
            sources: shared.unwrap_or(&self.sources[policies[0] as usize]),
            policies,
        }
    }
}
