//! Kubernetes events about changes that concern users.

use crate::store::{Key, Kind, Note, ObjectRef};
use egress_core::{
    model::{PolicyId, PolicyKind},
    plan::{ConditionKind, OwnerReason, Reason, diff::Change},
};
use egress_objects::api::egress_ip_name;
use egress_objects::translate::Problem;
use std::fmt;

/// Something that happened to an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The object's kind and name, such as `EgressIP 192.0.2.10`.
    pub object: String,
    /// The object in the store.
    pub about: ObjectRef,
    /// Whether it is a warning.
    pub warning: bool,
    /// The reason, in one word.
    pub reason: &'static str,
    /// The message, in a sentence.
    pub message: String,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.object, self.reason, self.message)
    }
}

impl Event {
    /// Returns the event of a policy that cannot be carried out as written.
    pub(super) fn refused(policy: &PolicyId, message: &str) -> Event {
        let (object, reason) = (format!("policy {policy}"), Reason::Invalid.as_str());
        Event { object, about: object_of(policy), warning: true, reason, message: message.to_owned() }
    }

    /// Returns the event of a problem in a node's objects; `None` for other objects.
    pub(super) fn of_node(problem: &Problem) -> Option<Event> {
        let kind = match problem.kind {
            "Node" => Kind::Node,
            "EgressNode" => Kind::EgressNode,
            _ => return None,
        };
        let about = ObjectRef { kind, key: Key::cluster(&problem.name) };
        let (object, reason) = (format!("{} {}", problem.kind, problem.name), Reason::Invalid.as_str());
        let message = format!("{}: {}: {}", problem.field, problem.message, problem.remedy);
        Some(Event { object, about, warning: true, reason, message })
    }

    /// Returns the event of a change; `None` for routine changes.
    pub(super) fn of(change: &Change) -> Option<Event> {
        let egress_ip = |address: &std::net::IpAddr| {
            let about = ObjectRef { kind: Kind::EgressIP, key: Key::cluster(&egress_ip_name(*address)) };
            (format!("EgressIP {address}"), about)
        };
        let event = |(object, about), warning, reason, message| Some(Event { object, about, warning, reason, message });
        match change {
            Change::Added { address } => {
                event(egress_ip(address), false, "Allocated", format!("{address} is now in use"))
            }
            Change::Removed { address } => {
                event(egress_ip(address), false, "Released", format!("no policy uses {address} any more"))
            }
            Change::Moved { address, from, to: Some(to), epoch, reason } => {
                let from = from.as_ref().map(|from| format!(" instead of {from}")).unwrap_or_default();
                let message = format!("{to} carries {address}{from} since epoch {epoch}");
                event(egress_ip(address), *reason == OwnerReason::Failover, "Moved", message)
            }
            Change::Moved { address, from, to: None, reason, .. } => {
                let from = from.as_ref().map(|from| format!(" after {from}")).unwrap_or_default();
                event(egress_ip(address), true, reason.as_str(), format!("no gateway carries {address}{from}"))
            }
            Change::Condition { policy, kind, condition } => {
                let good = condition.holds == (*kind == ConditionKind::Ready);
                let reason = match (kind, condition.holds) {
                    (ConditionKind::Ready, true) => "Ready",
                    (ConditionKind::Ready, false) => "NotReady",
                    (ConditionKind::Degraded, true) => "Degraded",
                    (ConditionKind::Degraded, false) => "NotDegraded",
                    (ConditionKind::Conflicting, true) => "Conflicting",
                    (ConditionKind::Conflicting, false) => "NotConflicting",
                };
                let message = format!("{}: {}", condition.reason, condition.message);
                event((format!("policy {policy}"), object_of(policy)), !good, reason, message)
            }
            Change::Unserved { pod, kind, message } => {
                let key = Key { namespace: pod.namespace.to_string(), name: pod.name.to_string() };
                let about = ObjectRef { kind: Kind::Pod, key };
                event((format!("pod {}/{}", pod.namespace, pod.name), about), true, kind.as_str(), message.clone())
            }
            Change::Leased { .. } | Change::Returned { .. } | Change::Reassigned { .. } => None,
        }
    }

    /// Converts the event to the store's form.
    pub(super) fn note(self) -> Note {
        let Event { about, warning, reason, message, .. } = self;
        Note { about, warning, reason, message }
    }
}

/// Returns the object of a policy.
fn object_of(policy: &PolicyId) -> ObjectRef {
    let kind = match policy.kind {
        PolicyKind::Native => Kind::EgressGatewayPolicy,
        PolicyKind::Namespaced => Kind::EgressPolicy,
        PolicyKind::Cilium => Kind::CiliumEgressGatewayPolicy,
        PolicyKind::Antrea => Kind::Egress,
    };
    ObjectRef { kind, key: Key::parse(&policy.name) }
}
