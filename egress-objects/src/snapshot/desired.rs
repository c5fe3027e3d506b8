//! From a plan to the desired objects and statuses.
//!
//! An existing object keeps its metadata and the times of its conditions, so that comparing a
//! wanted object with the existing one tells whether a write is necessary.

mod conditions;
mod part;
mod statuses;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use conditions::ConditionWriter;
pub use conditions::{DRAINING, PROGRAMMED};
pub use part::desired_part;
use statuses::{StatusInputs, usage};

use super::ApiObjects;
use super::previous::holders;
use crate::api;
use crate::translate::{Problem, name};
use egress_core::{
    model::{EndpointId, Family, NodeName, PolicyId, PolicyKind, PoolKind, Snapshot},
    network::pods::{pod_networks, shared_networks},
    plan::{Assigned, BlockState, Blocks, EgressIpPlan, Plan},
};

/// The desired objects and statuses, by object name. EgressIP and EgressNode objects that exist and are not named here should be deleted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// EgressIP objects, spec and status.
    pub egress_ips: BTreeMap<String, api::EgressIP>,
    /// EgressNode objects; the status is the agent's, and is left as it is.
    pub egress_nodes: BTreeMap<String, api::EgressNode>,
    /// Status of each EgressGatewayPolicy.
    pub policies: BTreeMap<String, api::EgressGatewayPolicyStatus>,
    /// Status of each EgressPolicy, by `NAMESPACE/NAME`.
    pub namespaced_policies: BTreeMap<String, api::EgressGatewayPolicyStatus>,
    /// Status of each EgressIPPool.
    pub pools: BTreeMap<String, api::EgressIPPoolStatus>,
    /// Status of each CiliumEgressGatewayPolicy.
    pub cilium_policies: BTreeMap<String, api::EgressGatewayPolicyStatus>,
    /// Status of each Egress.
    pub egresses: BTreeMap<String, api::EgressStatus>,
    /// Status of each ExternalIPPool.
    pub external_ip_pools: BTreeMap<String, api::ExternalIPPoolStatus>,
}

/// Returns the objects of a plan. `problems` are those with which the snapshot was made; `now` is the time of conditions that change.
pub fn desired(objects: &ApiObjects, snapshot: &Snapshot, plan: &Plan, problems: &[Problem], now: &Time) -> Desired {
    let inputs = StatusInputs { snapshot, plan, problems, now };
    Desired {
        egress_ips: egress_ips(objects, &inputs, plan.egress_ips.keys()),
        egress_nodes: egress_nodes(objects, snapshot, plan),
        ..statuses(objects, &inputs)
    }
}

/// Returns the statuses of all objects that users write.
fn statuses(objects: &ApiObjects, inputs: &StatusInputs<'_>) -> Desired {
    let mut desired = Desired::default();
    for object in &objects.policies {
        let per_endpoint = object.spec.distribution == api::Distribution::PerEndpoint;
        let status = inputs.policy(PolicyKind::Native, object.as_ref(), per_endpoint);
        desired.policies.insert(name(&object.metadata), status);
    }
    for object in &objects.namespaced_policies {
        let per_endpoint = object.spec.distribution == api::Distribution::PerEndpoint;
        let status = inputs.policy(PolicyKind::Namespaced, object.as_ref(), per_endpoint);
        desired.namespaced_policies.insert(name(&object.metadata), status);
    }
    for object in &objects.cilium_policies {
        desired
            .cilium_policies
            .insert(name(&object.metadata), inputs.policy(PolicyKind::Cilium, object.as_ref(), true));
    }
    for object in &objects.egresses {
        desired.egresses.insert(name(&object.metadata), inputs.egress(object));
    }
    let used = if objects.pools.is_empty() && objects.external_ip_pools.is_empty() {
        BTreeMap::new()
    } else {
        usage(inputs.plan)
    };
    for object in &objects.pools {
        let conditions = object.status.as_ref().map(|status| &status.conditions);
        let (usage, conditions) = inputs.pool(PoolKind::Native, &object.metadata, conditions, &used);
        let status = api::EgressIPPoolStatus { observed_generation: object.metadata.generation, usage, conditions };
        desired.pools.insert(name(&object.metadata), status);
    }
    for object in &objects.external_ip_pools {
        let conditions = object.status.as_ref().map(|status| &status.conditions);
        let (usage, conditions) = inputs.pool(PoolKind::Antrea, &object.metadata, conditions, &used);
        desired.external_ip_pools.insert(name(&object.metadata), api::ExternalIPPoolStatus { usage, conditions });
    }
    desired
}

/// Returns the objects of these egress IPs, if the plan has them.
fn egress_ips<'a>(
    objects: &ApiObjects,
    inputs: &StatusInputs<'_>,
    addresses: impl Iterator<Item = &'a IpAddr>,
) -> BTreeMap<String, api::EgressIP> {
    let StatusInputs { snapshot, plan, now, .. } = inputs;
    let existing: BTreeMap<&str, &api::EgressIP> =
        objects.egress_ips.iter().filter_map(|ip| Some((ip.metadata.name.as_deref()?, &**ip))).collect();
    let mut wanted = BTreeMap::new();
    for (address, ip) in addresses.filter_map(|address| Some((address, plan.egress_ips.get(address)?))) {
        let name = api::egress_ip_name(*address);
        let before = existing.get(name.as_str());
        let status = before.and_then(|before| before.status.as_ref());
        let mut metadata = before.map_or_else(|| named(&name), |before| before.metadata.clone());
        let labels = metadata.labels.get_or_insert_default();
        match ip.owner.as_ref().filter(|owner| owner.as_str().len() <= api::LABEL_VALUE) {
            Some(owner) => labels.insert(api::NODE_LABEL.to_owned(), owner.to_string()),
            None => labels.remove(api::NODE_LABEL),
        };
        let mut writer = ConditionWriter::new(status.map(|status| &status.conditions), metadata.generation, now);
        writer.of_egress_ip(*address, ip, snapshot.drain_timeout);
        let node = ip.owner.as_ref();
        let observed_generation = metadata.generation;
        let object = api::EgressIP {
            metadata,
            spec: egress_ip_spec(*address, ip),
            status: Some(api::EgressIPStatus {
                observed_generation,
                node: node.map(ToString::to_string),
                zone: node.and_then(|node| snapshot.nodes.get(node)).and_then(|node| node.zone.clone()),
                carriers: ip.carriers.iter().map(ToString::to_string).collect(),
                preferred_node: ip.preferred.as_ref().map(ToString::to_string),
                epoch: ip.epoch,
                block_share: ip.share,
                blocks_scarce: ip.scarce,
                blocks_starved: ip.starved,
                conditions: writer.finish(),
            }),
        };
        wanted.insert(name, object);
    }
    wanted
}

fn egress_ip_spec(address: IpAddr, ip: &EgressIpPlan) -> api::EgressIPSpec {
    let mut policies: Vec<api::PolicyUse> = ip
        .users
        .iter()
        .map(|(policy, weight)| api::PolicyUse { policy: policy.to_string(), weight: *weight })
        .collect();
    policies.sort_by(|a, b| a.policy.cmp(&b.policy));
    api::EgressIPSpec {
        address: address.to_string(),
        pool: ip.pool.as_ref().map(ToString::to_string),
        interface: ip.interface.clone(),
        fixed: ip.fixed,
        subnet_info: ip.attachment.subnet.map(|subnet| api::SubnetInfo {
            gateway: subnet.gateway.to_string(),
            prefix_length: subnet.prefix_length.into(),
            vlan: subnet.vlan.map(i32::from),
        }),
        announce: ip.attachment.announce.into(),
        outbound: ip.attachment.outbound.into(),
        policies,
    }
}

/// Returns one object for each node that exists, and for each that still holds blocks.
fn egress_nodes(objects: &ApiObjects, snapshot: &Snapshot, plan: &Plan) -> BTreeMap<String, api::EgressNode> {
    let existing: BTreeMap<&str, &api::EgressNode> =
        objects.egress_nodes.iter().filter_map(|node| Some((node.metadata.name.as_deref()?, &**node))).collect();
    let names: BTreeSet<&NodeName> = snapshot.nodes.keys().chain(holders(&plan.blocks)).collect();
    let mut specs: BTreeMap<&NodeName, api::EgressNodeSpec> =
        names.into_iter().map(|name| (name, api::EgressNodeSpec::default())).collect();
    fill(&mut specs, snapshot, plan.blocks.iter(), plan.assignments.iter());
    for (node, networks) in pod_networks(snapshot) {
        if let Some(spec) = specs.get_mut(&node) {
            spec.pod_networks = networks.iter().map(ToString::to_string).collect();
        }
    }
    // The networks stay where they are, so that some object has them at any moment: an object to be removed is deleted last.
    let has_them =
        |name: &&NodeName| existing.get(name.as_str()).is_some_and(|before| !before.spec.cluster_networks.is_empty());
    let keeper = specs.keys().copied().find(has_them).or_else(|| specs.keys().next().copied());
    if let Some(spec) = keeper.and_then(|name| specs.get_mut(name)) {
        spec.cluster_networks = shared_networks(snapshot).iter().map(ToString::to_string).collect();
    }
    objects_of(specs, &gateways(objects, plan), &existing)
}

/// Returns the nodes that carry egress IPs according to the plan, or to objects that do not show the plan yet.
fn gateways<'a>(objects: &'a ApiObjects, plan: &'a Plan) -> BTreeSet<&'a str> {
    let planned = plan.egress_ips.values().flat_map(EgressIpPlan::order).map(NodeName::as_str);
    planned.chain(objects.egress_ips.iter().flat_map(|ip| ip.carriers())).collect()
}

/// Returns the objects of nodes. Every agent follows those of gateways, to which it may have to send, and those with networks of pods.
fn objects_of(
    specs: BTreeMap<&NodeName, api::EgressNodeSpec>,
    gateways: &BTreeSet<&str>,
    existing: &BTreeMap<&str, &api::EgressNode>,
) -> BTreeMap<String, api::EgressNode> {
    let object = |(name, spec): (&NodeName, api::EgressNodeSpec)| {
        let names_networks = !spec.pod_networks.is_empty() || !spec.cluster_networks.is_empty();
        let mut object = egress_node(name, spec, existing.get(name.as_str()));
        object.set_followed_by(names_networks || gateways.contains(name.as_str()));
        (name.to_string(), object)
    };
    specs.into_iter().map(object).collect()
}

fn egress_node(name: &NodeName, spec: api::EgressNodeSpec, existing: Option<&&api::EgressNode>) -> api::EgressNode {
    let metadata = existing.map_or_else(|| named(name.as_str()), |before| before.metadata.clone());
    api::EgressNode { metadata, spec, status: existing.and_then(|before| before.status.clone()) }
}

/// Writes blocks and assignments into the objects of those nodes that have one.
fn fill<'a>(
    specs: &mut BTreeMap<&NodeName, api::EgressNodeSpec>,
    snapshot: &Snapshot,
    blocks: impl Iterator<Item = (&'a IpAddr, &'a Blocks)>,
    assignments: impl Iterator<Item = (&'a PolicyId, &'a BTreeMap<EndpointId, Assigned>)>,
) {
    for (address, blocks) in blocks {
        for ((node, state), ranges) in ranges(blocks) {
            let Some(spec) = specs.get_mut(node) else { continue };
            let list = match state {
                BlockState::Leased => &mut spec.blocks,
                BlockState::Quarantined => &mut spec.quarantined,
            };
            list.push(api::LeasedBlocks { egress_ip: address.to_string(), ranges });
        }
    }
    for (policy, endpoints) in assignments {
        let mut of_node: BTreeMap<(&NodeName, IpAddr), Vec<String>> = BTreeMap::new();
        for (id, assigned) in endpoints {
            let Some(endpoint) = snapshot.endpoints.get(id) else { continue };
            for address in Family::ALL.into_iter().filter_map(|family| assigned.get(family)) {
                of_node.entry((&endpoint.node, address)).or_default().push(id.to_string());
            }
        }
        for ((node, address), endpoints) in of_node {
            if let Some(spec) = specs.get_mut(node) {
                let (policy, egress_ip) = (policy.to_string(), address.to_string());
                spec.assignments.push(api::Assignment { policy, egress_ip, endpoints });
            }
        }
    }
}

/// Returns the blocks of one egress IP by holder, with consecutive blocks of the same revision joined.
fn ranges(blocks: &Blocks) -> BTreeMap<(&NodeName, BlockState), Vec<api::BlockRange>> {
    let mut ranges: BTreeMap<(&NodeName, BlockState), Vec<api::BlockRange>> = BTreeMap::new();
    for (number, lease) in blocks {
        let of_holder = ranges.entry((&lease.node, lease.state)).or_default();
        match of_holder.last_mut() {
            Some(last) if last.revision == lease.revision && last.first + last.count == *number => last.count += 1,
            _ => of_holder.push(api::BlockRange { first: *number, count: 1, revision: lease.revision }),
        }
    }
    ranges
}

fn named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..Default::default() }
}
