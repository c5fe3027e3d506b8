//! The plan from which the controller's own objects were made.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::jiff::Timestamp;

use super::ApiObjects;
use super::believed::MAX_REVISION;
use super::desired::DRAINING;
use crate::api;
use egress_core::{
    model::{NetworkAttachment, NodeName, SubnetInfo},
    plan::{BlockLease, BlockState, Blocks, EgressIpPlan, OwnerReason, Plan},
};

/// Reads the plan back. Parts that cannot be understood are omitted, as if they had never been
/// decided. Reasons and outcomes are not included: each plan computes them anew.
///
/// The revision of leases is one more than the highest that an object mentions, so that no grant
/// reuses a revision that some agent has already confirmed.
pub fn previous(objects: &ApiObjects) -> Plan {
    let egress_ips = objects.egress_ips.iter().filter_map(|object| egress_ip(object)).collect();
    let mut plan = Plan { egress_ips, ..Plan::default() };
    let mut leased: BTreeMap<IpAddr, Vec<LeasedRange<'_>>> = BTreeMap::new();
    let mut revision = 0;
    for object in &objects.egress_nodes {
        let Some(name) = object.metadata.name.as_deref() else { continue };
        let node = NodeName::from(name);
        for (list, state) in
            [(&object.spec.blocks, BlockState::Leased), (&object.spec.quarantined, BlockState::Quarantined)]
        {
            for of_address in list {
                let Ok(address) = of_address.egress_ip.parse::<IpAddr>() else { continue };
                let ranges = of_address.ranges.iter().inspect(|range| revision = revision.max(range.revision));
                let ranges = ranges.map(|range| LeasedRange { range, node: node.clone(), state });
                leased.entry(address).or_default().extend(ranges);
            }
        }
        let confirmed = object.status.as_ref().map_or(0, |status| status.own_lease_revision);
        revision = revision.max(confirmed.min(MAX_REVISION));
        assignments(object, &mut plan);
    }
    plan.blocks = leased.into_iter().map(|(address, ranges)| (address, newest(&ranges))).collect();
    plan.lease_revision = if revision == 0 { 0 } else { revision + 1 };
    plan
}

/// A range of blocks of one node. The single blocks of all nodes and addresses may be a million.
struct LeasedRange<'a> {
    range: &'a api::BlockRange,
    node: NodeName,
    state: BlockState,
}

/// Returns the newest lease of each block. A controller that died may have leased a block anew before it removed the old lease.
fn newest(ranges: &[LeasedRange<'_>]) -> Blocks {
    let blocks = |leased: &LeasedRange<'_>| {
        let lease = BlockLease { node: leased.node.clone(), revision: leased.range.revision, state: leased.state };
        let numbers = leased.range.first..leased.range.first.saturating_add(leased.range.count);
        numbers.map(move |number| (number, lease.clone()))
    };
    let mut leases: Vec<(u16, BlockLease)> = ranges.iter().flat_map(blocks).collect();
    leases.sort_by_key(|(number, lease)| (*number, Reverse(lease.revision)));
    leases.dedup_by_key(|(number, _)| *number);
    leases.into_iter().collect()
}

/// Returns what an object says about its egress IP, except the reason.
pub fn egress_ip(object: &api::EgressIP) -> Option<(IpAddr, EgressIpPlan)> {
    let address = object.spec.address.parse().ok()?;
    let status = object.status.clone().unwrap_or_default();
    let users = object.spec.policies.iter().filter_map(|user| Some((user.policy.parse().ok()?, user.weight)));
    let plan = EgressIpPlan {
        pool: object.spec.pool.as_ref().and_then(|pool| pool.parse().ok()),
        fixed: object.spec.fixed,
        interface: object.spec.interface.clone(),
        owner: status.node.as_deref().map(NodeName::from),
        carriers: status.carriers.iter().map(|name| NodeName::from(name.as_str())).collect(),
        preferred: status.preferred_node.as_deref().map(NodeName::from),
        epoch: status.epoch,
        users: users.collect(),
        reason: OwnerReason::Preferred,
        share: status.block_share,
        scarce: status.blocks_scarce,
        starved: status.blocks_starved,
        attachment: attachment(&object.spec),
        draining: draining_since(object).is_some(),
    };
    Some((address, plan))
}

/// Returns how packets reach the address and leave with it.
fn attachment(spec: &api::EgressIPSpec) -> NetworkAttachment {
    let subnet = |info: &api::SubnetInfo| {
        let (gateway, prefix_length) = (info.gateway.parse().ok()?, info.prefix_length.try_into().ok()?);
        Some(SubnetInfo { gateway, prefix_length, vlan: info.vlan.and_then(|vlan| vlan.try_into().ok()) })
    };
    let subnet = spec.subnet_info.as_ref().and_then(subnet);
    NetworkAttachment { subnet, announce: spec.announce.into(), outbound: spec.outbound.into() }
}

/// Returns the time since when an egress IP drains, if it does.
pub fn draining_since(object: &api::EgressIP) -> Option<Timestamp> {
    let mut conditions = object.status.iter().flat_map(|status| &status.conditions);
    let draining = conditions.find(|condition| condition.type_ == DRAINING && condition.status == "True")?;
    Some(draining.last_transition_time.0)
}

fn assignments(object: &api::EgressNode, plan: &mut Plan) {
    for assignment in &object.spec.assignments {
        let (Ok(policy), Ok(address)) = (assignment.policy.parse(), assignment.egress_ip.parse::<IpAddr>()) else {
            continue;
        };
        let of_policy = plan.assignments.entry(policy).or_default();
        for endpoint in assignment.endpoints.iter().filter_map(|text| text.parse().ok()) {
            of_policy.entry(endpoint).or_default().set(address);
        }
    }
}

/// Returns the nodes that hold blocks of some egress IP.
pub fn holders(blocks: &BTreeMap<IpAddr, egress_core::plan::Blocks>) -> BTreeSet<&NodeName> {
    let mut holders = BTreeSet::new();
    let mut last: Option<&NodeName> = None;
    for lease in blocks.values().flat_map(BTreeMap::values) {
        if last != Some(&lease.node) {
            holders.insert(&lease.node);
            last = Some(&lease.node);
        }
    }
    holders
}
