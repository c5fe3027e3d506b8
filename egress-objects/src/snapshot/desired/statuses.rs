//! The statuses of policies and pools, whatever the kind of their object.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use kube::core::object::HasStatus;

use super::conditions::ConditionWriter;
use crate::api;
use crate::translate::{Problem, antrea, cilium, name, policy, pool};
use egress_core::{
    model::{PolicyId, PolicyKind, PoolId, PoolKind, Snapshot},
    plan::{OwnerReason, Plan, PolicyOutcome},
};

/// The inputs of statuses.
pub struct StatusInputs<'a> {
    /// The model.
    pub snapshot: &'a Snapshot,
    /// The plan.
    pub plan: &'a Plan,
    /// The problems of objects that could not be understood.
    pub problems: &'a [Problem],
    /// The time of conditions that change.
    pub now: &'a Time,
}

impl StatusInputs<'_> {
    /// Returns the status of a policy that shows its slots.
    pub fn policy<T>(&self, kind: PolicyKind, object: &T, per_endpoint: bool) -> api::EgressGatewayPolicyStatus
    where
        T: HasStatus<Status = api::EgressGatewayPolicyStatus> + kube::Resource,
    {
        let metadata = object.meta();
        let outcome = self.outcome(kind, metadata);
        let conditions = object.status().map(|status| &status.conditions);
        let mut writer = ConditionWriter::new(conditions, metadata.generation, self.now);
        writer.of_policy(outcome, &self.problems_of(kind_name(kind), metadata));
        let slots = slots(outcome, per_endpoint);
        api::EgressGatewayPolicyStatus {
            observed_generation: metadata.generation,
            conditions: writer.finish(),
            selected_endpoints: outcome.map_or(0, |outcome| outcome.endpoints),
            egress_ips: slots.iter().map(|slot| slot.egress_ip.clone()).collect::<Vec<_>>().join(", "),
            slots,
        }
    }

    /// Returns the status of an Egress, in Antrea's form.
    pub fn egress(&self, object: &api::Egress) -> api::EgressStatus {
        let outcome = self.outcome(PolicyKind::Antrea, &object.metadata);
        let conditions = object.status.as_ref().map(|status| &status.conditions);
        let mut writer = ConditionWriter::new(conditions, object.metadata.generation, self.now);
        let slots = slots(outcome, false);
        let assigned = slots.iter().find(|slot| slot.node.is_some());
        let problems = self.problems_of(antrea::EGRESS, &object.metadata);
        writer.of_egress(slots.len(), assigned);
        writer.of_policy(outcome, &problems);
        api::EgressStatus {
            egress_ip: assigned.map(|slot| slot.egress_ip.clone()),
            egress_node: assigned.and_then(|slot| slot.node.clone()),
            conditions: writer.finish(),
            slots,
        }
    }

    /// Returns usage and conditions of a pool that has these conditions now.
    pub fn pool(
        &self,
        kind: PoolKind,
        metadata: &ObjectMeta,
        conditions: Option<&Vec<Condition>>,
        used: &BTreeMap<&PoolId, Usage>,
    ) -> (api::PoolUsage, Vec<Condition>) {
        let id = PoolId::new(kind, &name(metadata));
        let total = self.snapshot.pools.get(&id).map_or(0, |pool| u64::try_from(pool.total()).unwrap_or(u64::MAX));
        let of_pool = used.get(&id);
        let usage = api::PoolUsage { total: total.min(i64::MAX as u64), used: of_pool.map_or(0, |of| of.used) };
        let mut writer = ConditionWriter::new(conditions, metadata.generation, self.now);
        let kind = match kind {
            PoolKind::Native => pool::KIND,
            PoolKind::Antrea => antrea::POOL,
        };
        writer.of_pool(&usage, &self.problems_of(kind, metadata));
        if let Some(draining) = of_pool.map(|of| &of.draining).filter(|draining| !draining.is_empty()) {
            writer.of_draining(draining, self.snapshot.drain_timeout);
        }
        (usage, writer.finish())
    }

    fn outcome(&self, kind: PolicyKind, metadata: &ObjectMeta) -> Option<&PolicyOutcome> {
        self.plan.outcomes.get(&PolicyId::new(kind, &name(metadata)))
    }

    fn problems_of(&self, kind: &str, metadata: &ObjectMeta) -> Vec<&Problem> {
        let name = name(metadata);
        self.problems.iter().filter(|problem| problem.kind == kind && problem.name == name).collect()
    }
}

/// The addresses of a pool that are in use.
#[derive(Default)]
pub struct Usage {
    /// How many of them are in its ranges.
    used: u64,
    /// The addresses that were removed from the pool.
    draining: Vec<IpAddr>,
}

/// Returns the addresses of each pool that are in use.
pub fn usage(plan: &Plan) -> BTreeMap<&PoolId, Usage> {
    let mut usage: BTreeMap<&PoolId, Usage> = BTreeMap::new();
    for (address, ip) in &plan.egress_ips {
        let Some(pool) = &ip.pool else { continue };
        let of_pool = usage.entry(pool).or_default();
        match ip.draining {
            true => of_pool.draining.push(*address),
            false => of_pool.used += 1,
        }
    }
    usage
}

fn kind_name(kind: PolicyKind) -> &'static str {
    match kind {
        PolicyKind::Native => policy::KIND,
        PolicyKind::Namespaced => policy::NAMESPACED,
        PolicyKind::Cilium => cilium::KIND,
        PolicyKind::Antrea => antrea::EGRESS,
    }
}

fn slots(outcome: Option<&PolicyOutcome>, per_endpoint: bool) -> Vec<api::SlotStatus> {
    let slots = outcome.map_or(&[][..], |outcome| outcome.slots.as_slice());
    slots
        .iter()
        .map(|slot| api::SlotStatus {
            egress_ip: slot.address.to_string(),
            node: slot.owner.as_ref().map(ToString::to_string),
            zone: slot.zone.clone(),
            epoch: slot.epoch,
            healthy: matches!(slot.reason, OwnerReason::Preferred | OwnerReason::Failover),
            weight: slot.weight,
            draining: slot.draining,
            endpoints: per_endpoint.then_some(slot.endpoints),
        })
        .collect()
}
