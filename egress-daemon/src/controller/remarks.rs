//! Mistakes in the source of objects, as conditions of the objects that they are about. The last good version of such an
//! object is in force: that is not what its author wants, so that it counts as degraded. Pure.

use crate::api::{EgressGatewayPolicy, EgressIPPool};
use crate::plan::{ConditionKind, Reason};
use crate::snapshot::{Desired, Objects};
use crate::store::{Kind, Problem};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use std::collections::BTreeMap;

/// Adds what is wrong with the source of policies and pools to their conditions.
pub(super) fn add(desired: &mut Desired, objects: &Objects, problems: &[Problem], now: &Time) {
    let mut of_object: BTreeMap<(Kind, &str), Vec<String>> = BTreeMap::new();
    for problem in problems {
        if let Some(object) = &problem.object {
            let sentence = format!("the last good version is in force: {problem}");
            of_object.entry((object.kind, &object.key.name)).or_default().push(sentence);
        }
    }
    for ((kind, name), sentences) in of_object {
        let (conditions, before) = match kind {
            Kind::EgressGatewayPolicy => {
                let named =
                    |object: &&std::sync::Arc<EgressGatewayPolicy>| object.metadata.name.as_deref() == Some(name);
                let status = objects.policies.iter().find(named).and_then(|object| object.status.as_ref());
                let desired = desired.policies.get_mut(name).map(|status| &mut status.conditions);
                (desired, status.map(|status| status.conditions.as_slice()))
            }
            Kind::EgressIPPool => {
                let named = |object: &&std::sync::Arc<EgressIPPool>| object.metadata.name.as_deref() == Some(name);
                let status = objects.pools.iter().find(named).and_then(|object| object.status.as_ref());
                let desired = desired.pools.get_mut(name).map(|status| &mut status.conditions);
                (desired, status.map(|status| status.conditions.as_slice()))
            }
            _ => continue,
        };
        if let Some(conditions) = conditions {
            degrade(conditions, before.unwrap_or_default(), &sentences, now);
        }
    }
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
