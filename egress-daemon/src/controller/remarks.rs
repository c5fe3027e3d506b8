//! Reports mistakes in the source of objects as conditions of these objects. The last good version of such an object is in
//! force, which is not its author's intention, so it counts as degraded. Pure.

use crate::store::{Kind, StoreProblem};
use egress_core::plan::{ConditionKind, Reason};
use egress_objects::snapshot::{ApiObjects, Desired};
use egress_objects::translate;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::core::object::HasStatus;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Adds the problems in the source of policies and pools to their conditions.
pub(super) fn add(desired: &mut Desired, objects: &ApiObjects, problems: &[StoreProblem], now: &Time) {
    let mut of_object: BTreeMap<(Kind, String), Vec<String>> = BTreeMap::new();
    for problem in problems {
        if let Some(object) = &problem.object {
            let sentence = match object.kind {
                // Objects of these kinds are not rejected at this point; their unknown fields are ignored.
                Kind::CiliumEgressGatewayPolicy | Kind::Egress | Kind::ExternalIPPool => problem.to_string(),
                _ => format!("the last good version, if there is one, is in force: {problem}"),
            };
            of_object.entry((object.kind, object.key.to_string())).or_default().push(sentence);
        }
    }
    for ((kind, name), sentences) in of_object {
        let name = name.as_str();
        let conditions = match kind {
            Kind::EgressGatewayPolicy => pair(&objects.policies, &mut desired.policies, name, |s| &mut s.conditions),
            Kind::EgressPolicy => {
                pair(&objects.namespaced_policies, &mut desired.namespaced_policies, name, |s| &mut s.conditions)
            }
            Kind::EgressIPPool => pair(&objects.pools, &mut desired.pools, name, |s| &mut s.conditions),
            Kind::CiliumEgressGatewayPolicy => {
                pair(&objects.cilium_policies, &mut desired.cilium_policies, name, |s| &mut s.conditions)
            }
            Kind::Egress => pair(&objects.egresses, &mut desired.egresses, name, |s| &mut s.conditions),
            Kind::ExternalIPPool => {
                pair(&objects.external_ip_pools, &mut desired.external_ip_pools, name, |s| &mut s.conditions)
            }
            _ => None,
        };
        if let Some((conditions, before)) = conditions {
            degrade(conditions, &before, &sentences, now);
        }
    }
}

/// Returns the conditions that an object should have, and those that it has.
fn pair<'a, T>(
    objects: &[Arc<T>],
    desired: &'a mut BTreeMap<String, T::Status>,
    name: &str,
    conditions: impl Fn(&mut T::Status) -> &mut Vec<Condition>,
) -> Option<(&'a mut Vec<Condition>, Vec<Condition>)>
where
    T: kube::Resource + HasStatus<Status: Clone>,
{
    let object = objects.iter().find(|object| translate::name(object.meta()) == name);
    let before = object.and_then(|object| object.status().cloned());
    let before = before.map(|mut status| std::mem::take(conditions(&mut status))).unwrap_or_default();
    Some((conditions(desired.get_mut(name)?), before))
}

fn degrade(conditions: &mut Vec<Condition>, before: &[Condition], sentences: &[String], now: &Time) {
    let kind = ConditionKind::Degraded.as_str();
    let degraded = |condition: &&Condition| condition.type_ == kind && condition.status == "True";
    let planned = conditions.iter().find(degraded).cloned();
    let since = before.iter().find(degraded).map_or(now, |before| &before.last_transition_time);
    let first = planned.as_ref().map(|planned| planned.message.clone());
    let generation = conditions.first().and_then(|condition| condition.observed_generation);
    let condition = Condition {
        type_: kind.to_owned(),
        status: "True".to_owned(),
        reason: planned.map_or_else(|| Reason::Invalid.as_str().to_owned(), |planned| planned.reason),
        message: first.into_iter().chain(sentences.iter().cloned()).collect::<Vec<_>>().join("; "),
        last_transition_time: since.clone(),
        observed_generation: generation,
    };
    match conditions.iter_mut().find(|condition| condition.type_ == kind) {
        Some(old) => *old = condition,
        None => conditions.push(condition),
    }
}
