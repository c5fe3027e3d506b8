//! The desired objects of the parts of a plan that a small change touched.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::statuses::StatusInputs;
use super::{ApiObjects, Desired, egress_ips, fill, gateways, objects_of, statuses};
use crate::api::{EgressNode, EgressNodeSpec};
use crate::translate::Problem;
use egress_core::{
    model::{NodeName, PolicyId, Snapshot},
    plan::{Plan, Touched},
};

/// Returns the same as [`super::desired`], for the objects in `objects` and for the egress IPs and nodes that were touched. `specs`
/// are the specs that all EgressNode objects should have had before; the nodes that exist, and those that hold blocks, are the same.
pub fn desired_part(
    objects: &ApiObjects,
    snapshot: &Snapshot,
    plan: &Plan,
    problems: &[Problem],
    now: &Time,
    (touched, specs): (&Touched, &BTreeMap<String, EgressNodeSpec>),
) -> Desired {
    let inputs = StatusInputs { snapshot, plan, problems, now };
    let names = touched.nodes.iter();
    let mut nodes: BTreeMap<&NodeName, EgressNodeSpec> =
        names.filter_map(|name| Some((name, untouched(specs.get(name.as_str())?, touched)))).collect();
    let blocks = touched.egress_ips.iter().filter_map(|address| plan.blocks.get_key_value(address));
    let assignments = touched.policies.iter().filter_map(|policy| plan.assignments.get_key_value(policy));
    fill(&mut nodes, snapshot, blocks, assignments);
    nodes.values_mut().for_each(sort);
    let existing: BTreeMap<&str, &EgressNode> =
        objects.egress_nodes.iter().filter_map(|node| Some((node.metadata.name.as_deref()?, &**node))).collect();
    // Only a full round knows all egress IPs that name a node.
    let mut gateways = gateways(objects, plan);
    gateways.extend(existing.values().filter(|node| node.follows_all()).filter_map(|n| n.metadata.name.as_deref()));
    Desired {
        egress_ips: egress_ips(objects, &inputs, touched.egress_ips.iter()),
        egress_nodes: objects_of(nodes, &gateways, &existing),
        ..statuses(objects, &inputs)
    }
}

/// Returns the part of a node's spec that was not touched.
fn untouched(spec: &EgressNodeSpec, touched: &Touched) -> EgressNodeSpec {
    let mut spec = spec.clone();
    let egress_ip = |text: &str| text.parse().is_ok_and(|address: IpAddr| touched.egress_ips.contains(&address));
    let policy = |text: &str| text.parse().is_ok_and(|policy: PolicyId| touched.policies.contains(&policy));
    spec.blocks.retain(|leased| !egress_ip(&leased.egress_ip));
    spec.quarantined.retain(|leased| !egress_ip(&leased.egress_ip));
    spec.assignments.retain(|assignment| !policy(&assignment.policy));
    spec
}

/// Puts all lists into the order of a plan.
fn sort(spec: &mut EgressNodeSpec) {
    let address = |text: &str| text.parse::<IpAddr>().ok();
    spec.blocks.sort_by_cached_key(|leased| address(&leased.egress_ip));
    spec.quarantined.sort_by_cached_key(|leased| address(&leased.egress_ip));
    spec.assignments
        .sort_by_cached_key(|assignment| (assignment.policy.parse::<PolicyId>().ok(), address(&assignment.egress_ip)));
}
