//! The changes as rows. Pure.

use super::change::Edit;
use crate::ctl::print::{Printable, Row, first_of, joined, or_dash, table};
use crate::ctl::views::FlowRow;
use crate::store::ObjectRef;
use egress_core::plan::{
    diff::Change,
    preview::{Fate, PolicyChangeKind, Preview},
};
use serde::Serialize;
use std::net::{IpAddr, SocketAddr};

/// The number of flows, and of pods in one row, that a table names. JSON names all.
const NAMED_FLOWS: usize = 20;
const NAMED_PODS: usize = 3;

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum DiffRow {
    /// An object.
    Object {
        /// Kind and name.
        object: String,
        /// The change to it.
        edit: Edit,
    },
    /// A policy.
    Policy {
        /// The policy.
        policy: String,
        /// `added`, `removed` or `changed`.
        change: &'static str,
        /// Pods that it selects now.
        pods_before: usize,
        /// Pods that it would select.
        pods_after: usize,
        /// Egress IPs that it would get.
        gained: Vec<IpAddr>,
        /// Egress IPs that it would lose.
        lost: Vec<IpAddr>,
    },
    /// A destination of pods.
    Pods {
        /// The pods.
        pods: Vec<String>,
        /// The destination.
        destination: String,
        /// The parts of the destination that are not affected.
        but: Vec<String>,
        /// The policy before; null: Spillway leaves the packets alone.
        from: Option<String>,
        /// The policy after.
        to: Option<String>,
    },
    /// An egress IP.
    EgressIp {
        /// The address.
        address: IpAddr,
        /// `added`, `removed` or `moved`.
        change: &'static str,
        /// Its gateway before.
        from: Option<String>,
        /// Its gateway after.
        to: Option<String>,
    },
    /// A pod gets other egress IPs for new flows.
    Assignment {
        /// The pod.
        pod: String,
        /// The policy.
        policy: String,
        /// The addresses before.
        from: Vec<IpAddr>,
        /// The addresses after.
        to: Vec<IpAddr>,
    },
    /// A condition of a policy.
    Condition {
        /// The policy.
        policy: String,
        /// The condition.
        condition: &'static str,
        /// Whether the condition would be true.
        holds: bool,
        /// The reason, as one word.
        reason: String,
        /// The reason, as a sentence.
        message: String,
    },
    /// Another policy takes precedence.
    Conflict {
        /// The policy that loses precedence.
        policy: String,
        /// The policy that takes precedence.
        winner: String,
        /// The destinations that both policies have.
        destinations: Vec<String>,
    },
    /// A flow.
    Flow {
        /// The flow.
        flow: Box<FlowRow>,
        /// `moves`, `restarts`, `breaks` or `dropped`.
        becomes: &'static str,
        /// The gateway or the policy that has the flow after the change.
        by: Option<String>,
    },
}

impl Row for DiffRow {
    const HEADER: &'static [&'static str] = &["WHAT", "WHICH", "WOULD"];
    const NONE: &'static str = "nothing would change";
    fn cells(&self) -> Vec<String> {
        let (what, which, would) = match self {
            DiffRow::Object { object, edit } => ("object", object.clone(), edit_text(*edit).to_owned()),
            DiffRow::Policy { policy, change, pods_before, pods_after, gained, lost } => {
                ("policy", policy.clone(), policy_text(change, (*pods_before, *pods_after), gained, lost))
            }
            DiffRow::Pods { pods, destination, but, from, to } => {
                let but = if but.is_empty() { String::new() } else { format!(" (but not {})", but.join(", ")) };
                let by = |policy: &Option<String>| match policy {
                    Some(policy) => format!("by policy {policy}"),
                    None => "by no policy".to_owned(),
                };
                ("pods", first_of(pods, NAMED_PODS), format!("reach {destination}{but} {}, not {}", by(to), by(from)))
            }
            DiffRow::EgressIp { address, change, from, to } => {
                let text = match *change {
                    "removed" => "no longer be used".to_owned(),
                    "added" => format!("come into use, at gateway {}", or_dash(to.as_ref())),
                    _ => format!("move from gateway {} to {}", or_dash(from.as_ref()), or_dash(to.as_ref())),
                };
                ("egress IP", address.to_string(), text)
            }
            DiffRow::Assignment { pod, policy, from, to } => {
                let text = format!("use {} for new flows of policy {policy}, not {}", joined(to), joined(from));
                ("pod", pod.clone(), text)
            }
            DiffRow::Condition { policy, condition, holds, reason, message } => {
                let state = if *holds { "True" } else { "False" };
                ("policy", policy.clone(), format!("have {condition} {state} ({reason}): {message}"))
            }
            DiffRow::Conflict { policy, winner, destinations } => {
                let text = format!("lose precedence for {} to policy {winner}", destinations.join(", "));
                ("conflict", policy.clone(), text)
            }
            DiffRow::Flow { flow, becomes, by } => ("flow", flow_text(flow), fate_text(becomes, by.as_ref())),
        };
        vec![what.to_owned(), which, would]
    }
}

fn edit_text(edit: Edit) -> &'static str {
    match edit {
        Edit::Created => "be created",
        Edit::Changed => "be changed",
        Edit::Deleted => "be deleted",
    }
}

fn policy_text(change: &str, (before, after): (usize, usize), gained: &[IpAddr], lost: &[IpAddr]) -> String {
    let mut text = match change {
        "added" => format!("select {after} pods"),
        "removed" => format!("no longer select any of its {before} pods"),
        _ if before == after => format!("select {after} pods, as now"),
        _ => format!("select {after} pods, not {before}"),
    };
    if !gained.is_empty() {
        text += &format!("; get {}", joined(gained));
    }
    if !lost.is_empty() {
        text += &format!("; lose {}", joined(lost));
    }
    text
}

fn flow_text(flow: &FlowRow) -> String {
    let pod = match &flow.pod {
        Some(pod) => format!("{pod}:{}", flow.pod_port),
        None => SocketAddr::new(flow.pod_address, flow.pod_port).to_string(),
    };
    format!("{pod} to {}/{}", SocketAddr::new(flow.remote_address, flow.remote_port), flow.protocol)
}

fn fate_text(becomes: &str, by: Option<&String>) -> String {
    match (becomes, by) {
        ("moves", Some(gateway)) => format!("continue, through gateway {gateway}"),
        ("restarts", Some(policy)) => format!("restart with an egress IP of policy {policy}"),
        ("restarts", None) => "restart, by no policy".to_owned(),
        ("breaks", _) => "break: its egress IP is taken away".to_owned(),
        _ => "be dropped: no gateway carries its egress IP".to_owned(),
    }
}

/// All differences.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DiffView {
    /// The nodes whose flows were examined.
    pub nodes: Vec<String>,
    /// The number of flows that were examined.
    pub flows: usize,
    /// The differences.
    pub items: Vec<DiffRow>,
}

impl DiffView {
    /// Builds the view. `fates` are the flows that do not continue unchanged.
    pub(super) fn new(
        nodes: Vec<String>,
        flows: usize,
        edits: &[(ObjectRef, Edit)],
        fates: Vec<(FlowRow, Fate)>,
        found: &Preview,
    ) -> Self {
        let mut items: Vec<DiffRow> =
            edits.iter().map(|(object, edit)| DiffRow::Object { object: object.to_string(), edit: *edit }).collect();
        items.extend(found.policies.iter().map(|change| DiffRow::Policy {
            policy: change.policy.to_string(),
            change: match change.kind {
                PolicyChangeKind::Added => "added",
                PolicyChangeKind::Removed => "removed",
                PolicyChangeKind::Changed => "changed",
            },
            pods_before: change.pods.0,
            pods_after: change.pods.1,
            gained: change.gained.iter().copied().collect(),
            lost: change.lost.iter().copied().collect(),
        }));
        items.extend(found.conflicts.iter().map(|conflict| DiffRow::Conflict {
            policy: conflict.policy.to_string(),
            winner: conflict.winner.to_string(),
            destinations: texts(&conflict.destinations),
        }));
        items.extend(found.steering.iter().map(|part| DiffRow::Pods {
            pods: part.pods.iter().map(|pod| format!("{}/{}", pod.namespace, pod.name)).collect(),
            destination: part.destination.to_string(),
            but: texts(&part.but),
            from: part.from.as_ref().map(ToString::to_string),
            to: part.to.as_ref().map(ToString::to_string),
        }));
        items.extend(found.changes.iter().filter_map(|change| of_plan(change, &found.changes)));
        items.extend(fates.into_iter().map(|(flow, fate)| of_flow(flow, fate)));
        Self { nodes, flows, items }
    }

    /// Returns whether nothing would change.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}

impl Printable for DiffView {
    fn text(&self) -> String {
        let is_flow = |row: &&DiffRow| matches!(row, DiffRow::Flow { .. });
        let (flows, others): (Vec<&DiffRow>, Vec<&DiffRow>) = self.items.iter().partition(is_flow);
        let mut text = table(others.into_iter().chain(flows.iter().take(NAMED_FLOWS).copied()));
        let nodes = match &self.nodes[..] {
            [] => return text,
            [node] => format!("node {node}"),
            nodes => format!("{} nodes", nodes.len()),
        };
        let named = if flows.len() > NAMED_FLOWS { format!(" ({NAMED_FLOWS} are shown)") } else { String::new() };
        text += &format!("{} of {} flows of {nodes} would not continue unchanged{named}\n", flows.len(), self.flows);
        text
    }
}

fn texts<'a, T: ToString + 'a>(values: impl IntoIterator<Item = &'a T>) -> Vec<String> {
    values.into_iter().map(ToString::to_string).collect()
}

fn of_plan(change: &Change, all: &[Change]) -> Option<DiffRow> {
    let is_new = |address: &IpAddr| all.contains(&Change::Added { address: *address });
    Some(match change {
        // A new egress IP that has a gateway is reported together with the gateway.
        Change::Added { address } => {
            let owner = all.iter().find_map(|other| match other {
                Change::Moved { address: moved, to, .. } if moved == address => to.as_ref(),
                _ => None,
            });
            DiffRow::EgressIp { address: *address, change: "added", from: None, to: owner.map(ToString::to_string) }
        }
        Change::Moved { address, .. } if is_new(address) => return None,
        Change::Removed { address } => DiffRow::EgressIp { address: *address, change: "removed", from: None, to: None },
        Change::Moved { address, from, to, .. } => DiffRow::EgressIp {
            address: *address,
            change: "moved",
            from: from.as_ref().map(ToString::to_string),
            to: to.as_ref().map(ToString::to_string),
        },
        Change::Reassigned { policy, endpoint, from, to } => {
            let list = |assigned: &egress_core::plan::Assigned| {
                let v4 = assigned.v4.map(IpAddr::V4);
                v4.into_iter().chain(assigned.v6.map(IpAddr::V6)).collect()
            };
            DiffRow::Assignment {
                pod: format!("{}/{}", endpoint.namespace, endpoint.name),
                policy: policy.to_string(),
                from: list(from),
                to: list(to),
            }
        }
        Change::Condition { policy, kind, condition } => DiffRow::Condition {
            policy: policy.to_string(),
            condition: kind.as_str(),
            holds: condition.holds,
            reason: condition.reason.to_string(),
            message: condition.message.clone(),
        },
        Change::Leased { .. } | Change::Returned { .. } | Change::Unserved { .. } => return None,
    })
}

fn of_flow(flow: FlowRow, fate: Fate) -> DiffRow {
    let (becomes, by) = match fate {
        Fate::Moves { to, .. } => ("moves", Some(to.to_string())),
        Fate::Restarts(policy) => ("restarts", policy.map(|policy| policy.to_string())),
        Fate::Breaks => ("breaks", None),
        Fate::Dropped => ("dropped", None),
    };
    DiffRow::Flow { flow: Box::new(flow), becomes, by }
}
