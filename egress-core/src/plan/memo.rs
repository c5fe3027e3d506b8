//! Applies a small change to a plan, with its consequences, without looking at everything.
//!
//! A pod that comes, goes or is relabelled, and a node that reports another demand, concern few policies, egress IPs and nodes.
//! [`Memo::change`] brings a plan up to date with them, or says that only a full plan can. The result is what a full plan would be: the
//! same functions decide, but about a part:
//!
//! - endpoints are counted, and assigned anew under the `PerEndpoint` policies that they join or leave;
//! - blocks are leased anew for the egress IPs of policies whose source nodes have changed, and for those that share policies with them,
//!   directly or through others: such groups do not depend on each other;
//! - owners depend on source nodes only where a policy requires their zone, and conflicts on the sets of policies that select a pod
//!   together: if those change so that it could matter, a full plan is needed.

mod index;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

pub(super) use index::Index;
use index::News;

use super::types::{Assigned, BlockLease, Blocks, EgressIpPlan, Plan};
use super::{blocks, classes, diff, endpoints, outcome};
use crate::health::Health;
use crate::model::{Endpoint, EndpointId, Node, NodeName, NodeReport, PolicyId, Snapshot, ZoneMode};

/// The snapshot that a plan was made for, and an index of it.
#[derive(Debug)]
pub struct Memo {
    snapshot: Snapshot,
    index: Index,
}

/// The changes of a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// Pods as they are now; `None` for pods that are gone.
    pub pods: BTreeMap<EndpointId, Option<Endpoint>>,
    /// The reports of nodes' agents as they are now.
    pub reports: BTreeMap<NodeName, NodeReport>,
}

/// The parts of a plan that may have changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Policies whose outcome may differ.
    pub policies: BTreeSet<PolicyId>,
    /// Egress IPs whose blocks or shares may differ.
    pub egress_ips: BTreeSet<IpAddr>,
    /// Nodes whose blocks or endpoints' egress IPs may differ.
    pub nodes: BTreeSet<NodeName>,
}

impl Memo {
    pub(super) fn new(snapshot: Snapshot, index: Index) -> Self {
        Self { snapshot, index }
    }

    /// Returns the snapshot as it is after all changes so far.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Brings `plan` up to date with changes. It must be the plan that this memo was made with, plus all changes so far, and the health of
    /// gateways must be the same as far as a plan depends on it.
    ///
    /// Returns `None` if a full plan is needed; `plan` is then unchanged.
    pub fn change(mut self, health: &Health, plan: &mut Plan, changes: Changes) -> Option<(Self, Touched)> {
        let mut news = News::default();
        for (id, endpoint) in changes.pods {
            self.index.pod(&mut self.snapshot, id, endpoint, &mut news);
        }
        let mut demanded = BTreeSet::new();
        for (node, report) in changes.reports {
            news.programmed.extend(self.reported(&node, &report)?);
            demanded.extend(self.report(&node, report, plan)?);
        }
        if self.index.reshaped(&news).any(|class| self.disagree(class)) {
            return None;
        }
        let resourced: BTreeSet<u32> = self.index.resourced(&news).collect();
        if resourced.iter().any(|policy| self.snapshot.policies[self.index.id(*policy)].zone == ZoneMode::Require) {
            return None;
        }
        let mut touched = Touched { nodes: news.nodes, ..Touched::default() };
        self.lease(health, plan, resourced, demanded, &mut touched);
        for policy in &news.policies {
            self.conclude(plan, *policy, &mut touched);
        }
        for policy in news.programmed.difference(&news.policies) {
            self.follow(plan, *policy, &mut touched);
        }
        Some((self, touched))
    }

    /// Returns the policies of which a node now reports another version; `None` if its agent begins or ceases to report them.
    fn reported(&self, node: &NodeName, report: &NodeReport) -> Option<Vec<u32>> {
        let before = self.snapshot.nodes.get(node).and_then(|node| node.report.as_ref());
        if before.is_some_and(|before| before.programmed.is_some() != report.programmed.is_some()) {
            return None;
        }
        let none = BTreeMap::new();
        let before = before.and_then(|before| before.programmed.as_ref()).unwrap_or(&none);
        let after = report.programmed.as_ref().unwrap_or(&none);
        let other = diff::join(before, after).filter(|(_, (old, new))| old != new);
        Some(other.filter_map(|(policy, _)| self.index.number(policy)).collect())
    }

    /// Updates which nodes of a policy do not have its version in their datapath.
    fn follow(&self, plan: &mut Plan, number: u32, touched: &mut Touched) {
        let id = self.index.id(number);
        let Some(outcome) = plan.outcomes.get_mut(id) else { return };
        let sources = self.index.sources(number).map(|place| self.index.name(place));
        outcome.behind = outcome::behind(&self.snapshot, &self.snapshot.policies[id], sources);
        touched.policies.insert(id.clone());
    }

    /// Takes a node's report, and returns the egress IPs whose leases may depend on the difference; `None`: a full plan is needed.
    fn report(&mut self, node: &NodeName, report: NodeReport, plan: &Plan) -> Option<BTreeSet<IpAddr>> {
        let before = self.snapshot.nodes.get_mut(node)?.report.as_mut()?;
        // A carrier leaves when its successor reports that it carries the address.
        let same =
            (&before.addresses, &before.tunnel_addresses, &before.occupied_blocks, &before.troubles, &before.carries)
                == (
                    &report.addresses,
                    &report.tunnel_addresses,
                    &report.occupied_blocks,
                    &report.troubles,
                    &report.carries,
                );
        if !same || report.own_lease_revision > plan.lease_revision {
            return None;
        }
        let confirmed = before.own_lease_revision != report.own_lease_revision;
        let about = before.demand.keys().chain(report.demand.keys()).copied().filter(|address| {
            let (old, new) = (before.demand.get(address), report.demand.get(address));
            old != new || confirmed && new.is_some_and(|demand| !demand.released.is_empty())
        });
        let (used, others): (BTreeSet<_>, BTreeSet<_>) =
            about.partition(|address| plan.egress_ips.get(address).is_some_and(|ip| !ip.draining));
        *before = report;
        // A draining egress IP ends with its last block.
        others.iter().all(|address| !plan.blocks.contains_key(address)).then_some(used)
    }

    /// Returns whether policies that select a pod together conflict, or one overrules another.
    fn disagree(&self, class: &[u32]) -> bool {
        let class: Vec<&PolicyId> = class.iter().map(|policy| self.index.id(*policy)).collect();
        let policies = &self.snapshot.policies;
        let overruled = || classes::overruled(policies, &class).next().is_some();
        class.len() > 1 && (overruled() || !classes::conflicts(policies, [&class]).is_empty())
    }

    /// Leases the blocks of the egress IPs of these policies, of these egress IPs, and of all that depend on them.
    fn lease(
        &self,
        health: &Health,
        plan: &mut Plan,
        mut policies: BTreeSet<u32>,
        mut addresses: BTreeSet<IpAddr>,
        touched: &mut Touched,
    ) {
        let mut new_addresses: Vec<IpAddr> = addresses.iter().copied().collect();
        let mut new_policies: Vec<u32> = policies.iter().copied().collect();
        loop {
            if let Some(address) = new_addresses.pop() {
                let users = plan.egress_ips[&address].users.keys().filter_map(|user| self.index.number(user));
                new_policies.extend(users.filter(|user| policies.insert(*user)));
            } else if let Some(policy) = new_policies.pop() {
                let slots = plan.outcomes[self.index.id(policy)].slots.iter().filter(|slot| !slot.draining);
                let slots = slots.map(|slot| slot.address);
                new_addresses.extend(slots.filter(|address| addresses.insert(*address)));
            } else {
                break;
            }
        }
        if addresses.is_empty() {
            return;
        }
        let before: BTreeMap<IpAddr, Blocks> =
            addresses.iter().filter_map(|address| plan.blocks.remove_entry(address)).collect();
        let group = Group::new(self, &policies, &before);
        let shared: Vec<Vec<u32>> = addresses.iter().map(|address| group.sources(&plan.egress_ips[address])).collect();
        let leasable = addresses
            .iter()
            .zip(&shared)
            .map(|(address, sources)| (*address, group.leasable(&plan.egress_ips[address], sources)))
            .collect();
        let sources: Vec<&[u32]> = group.policies.values().map(|(_, sources)| sources.as_slice()).collect();
        let revision = plan.lease_revision + 1;
        let leases = blocks::lease(&group.nodes, health, &before, &leasable, &sources, revision);
        for (address, shares) in leases.shares {
            let Some(ip) = plan.egress_ips.get_mut(&address) else { continue };
            (ip.share, ip.scarce, ip.starved) = (shares.share, shares.scarce, shares.starved);
        }
        if leases.granted {
            plan.lease_revision = revision;
        }
        let none = Blocks::new();
        for (_, (old, new)) in diff::join(&before, &leases.blocks) {
            let differing = diff::join(old.unwrap_or(&none), new.unwrap_or(&none)).filter(|(_, (old, new))| old != new);
            let holders = differing.flat_map(|(_, (old, new))| old.into_iter().chain(new));
            for BlockLease { node, .. } in holders {
                if !touched.nodes.contains(node) {
                    touched.nodes.insert(node.clone());
                }
            }
        }
        plan.blocks.extend(leases.blocks);
        touched.egress_ips = addresses;
    }

    /// Assigns and counts the endpoints of a policy.
    fn conclude(&self, plan: &mut Plan, number: u32, touched: &mut Touched) {
        let (id, endpoints) = (self.index.id(number), self.index.endpoints(number));
        let policy = &self.snapshot.policies[id];
        let Some(outcome) = plan.outcomes.get_mut(id) else { return };
        if let Some(members) = self.index.members(number) {
            let slots: BTreeMap<IpAddr, &EgressIpPlan> =
                outcome.slots.iter().map(|slot| (slot.address, &plan.egress_ips[&slot.address])).collect();
            let before = plan.assignments.remove(id).unwrap_or_default();
            let assigned = endpoints::of_policy(&self.snapshot, policy, members.iter(), &slots, Some(&before));
            let moved = |(_, (old, new)): &(_, (Option<&Assigned>, Option<&Assigned>))| old != new;
            let moved = diff::join(&before, &assigned).filter(moved).filter_map(|(id, _)| members.get(id));
            touched.nodes.extend(moved.cloned());
            let counts = endpoints::count(&assigned);
            for slot in &mut outcome.slots {
                slot.endpoints = counts.get(&slot.address).copied().unwrap_or(0);
            }
            plan.assignments.insert(id.clone(), assigned);
        }
        outcome.endpoints = endpoints as u32;
        self.follow(plan, number, touched);
    }
}

/// Policies and egress IPs that depend on no others, with the nodes that use or hold blocks of them.
struct Group<'a> {
    memo: &'a Memo,
    nodes: Vec<&'a Node>,
    /// Its number in this group, and its source nodes as places in `nodes`.
    policies: BTreeMap<&'a PolicyId, (u32, Vec<u32>)>,
}

impl<'a> Group<'a> {
    fn new(memo: &'a Memo, policies: &BTreeSet<u32>, blocks: &BTreeMap<IpAddr, Blocks>) -> Self {
        let index = &memo.index;
        let mut places: BTreeSet<u32> = policies.iter().flat_map(|policy| index.sources(*policy)).collect();
        let mut last: Option<&NodeName> = None;
        for lease in blocks.values().flat_map(BTreeMap::values) {
            if last != Some(&lease.node) {
                places.extend(index.place(&lease.node));
                last = Some(&lease.node);
            }
        }
        let places: Vec<u32> = places.into_iter().collect();
        let sources = |policy: u32| -> Vec<u32> {
            let mut places = places.iter().zip(0..);
            index.sources(policy).filter_map(|node| Some(places.find(|(place, _)| **place == node)?.1)).collect()
        };
        let of_policy = |(policy, number): (&u32, u32)| (index.id(*policy), (number, sources(*policy)));
        Self {
            memo,
            nodes: places.iter().map(|place| &memo.snapshot.nodes[index.name(*place)]).collect(),
            policies: policies.iter().zip(0..).map(of_policy).collect(),
        }
    }

    /// Returns the nodes that use an egress IP.
    fn sources(&self, ip: &EgressIpPlan) -> Vec<u32> {
        let nodes: BTreeSet<u32> = ip.users.keys().flat_map(|user| &self.policies[user].1).copied().collect();
        nodes.into_iter().collect()
    }

    fn leasable<'b>(&'b self, ip: &EgressIpPlan, sources: &'b [u32]) -> blocks::Leasable<'b> {
        let mut users: Vec<_> = ip.users.keys().map(|user| &self.memo.snapshot.policies[user]).collect();
        users.sort_by(|a, b| a.precedence(b));
        let owner = ip.owner.as_ref().filter(|_| ip.fixed);
        blocks::Leasable {
            fixed: owner.and_then(|owner| self.memo.snapshot.nodes.get(owner)),
            sources,
            policies: users.into_iter().map(|user| self.policies[&user.id].0).collect(),
        }
    }
}
