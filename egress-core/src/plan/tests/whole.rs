//! Checks what holds for every plan, with arbitrary clusters that change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proptest::prelude::*;

use super::blocks::{check_grants, check_holders};
use crate::health::Health;
use crate::model::*;
use crate::plan::select::{Selection, selecting};
use crate::plan::{ConditionKind, OwnerReason, Plan, plan};
use crate::testing::world::*;

static NONE: Labels = Labels::new();

fn selects(snapshot: &Snapshot, policy: &Policy, endpoint: &Endpoint) -> bool {
    let node = snapshot.nodes.get(&endpoint.node).map_or(&NONE, |node| &node.labels);
    let namespace = snapshot.namespaces.get(&endpoint.id.namespace).unwrap_or(&NONE);
    policy.selects(&endpoint.labels, namespace, node)
}

fn sources<'a>(snapshot: &'a Snapshot, policy: &'a Policy) -> impl Iterator<Item = &'a Node> {
    let endpoints = snapshot.endpoints.values().filter(|endpoint| selects(snapshot, policy, endpoint));
    endpoints.filter_map(|endpoint| snapshot.nodes.get(&endpoint.node))
}

/// Returns the nodes that may own a floating egress IP, whether they are healthy or not.
pub(super) fn candidates<'a>(snapshot: &'a Snapshot, plan: &Plan, address: IpAddr) -> Vec<&'a Node> {
    let ip = &plan.egress_ips[&address];
    let asked = |requests: &[PoolRequest]| {
        let named = requests.iter().filter(|r| r.ips.contains(&address)).map(|r| r.pool.clone());
        let containing = named.filter(|pool| snapshot.pools.get(pool).is_some_and(|pool| pool.contains(address)));
        containing.min().unwrap_or_else(|| ip.pool.clone().unwrap())
    };
    let selected = |user: &PolicyId, node: &Node| match &snapshot.policies[user].source {
        // Whatever its policies request now.
        _ if ip.draining => snapshot.pools[ip.pool.as_ref().unwrap()].nodes.matches(&node.labels),
        Source::Pools(requests) => snapshot.pools[&asked(requests)].nodes.matches(&node.labels),
        Source::Gateways(gateways) => gateways.iter().any(|gateway| {
            matches!(gateway.address, AddressSource::Ip(a) | AddressSource::Configured(a) if a == address)
                && gateway.nodes.matches(&node.labels)
        }),
    };
    let nodes = || snapshot.nodes.values().filter(|node| ip.users.keys().all(|user| selected(user, node)));
    let users = || ip.users.keys().map(|user| &snapshot.policies[user]);
    if users().all(|policy| policy.zone == ZoneMode::Require) {
        let zones: BTreeSet<_> =
            users().flat_map(|p| sources(snapshot, p)).filter_map(|node| node.zone.as_ref()).collect();
        let in_zone = || nodes().filter(|node| node.zone.as_ref().is_some_and(|zone| zones.contains(zone)));
        if in_zone().next().is_some() {
            return in_zone().collect();
        }
    }
    nodes().collect()
}

/// Returns whether all gateways that name a floating egress IP want the first of their nodes for it.
fn wants_first(snapshot: &Snapshot, ip: &crate::plan::EgressIpPlan, address: IpAddr) -> bool {
    !ip.draining
        && ip.users.keys().all(|user| match &snapshot.policies[user].source {
            Source::Pools(_) => false,
            Source::Gateways(gateways) => gateways
                .iter()
                .filter(|g| matches!(g.address, AddressSource::Ip(a) | AddressSource::Configured(a) if a == address))
                .all(|g| g.choice == NodeChoice::First),
        })
}

fn well(node: &Node, health: &Health) -> bool {
    node.ready && !node.draining && health.of(&node.name).is_fresh()
}

fn takes(node: &Node, health: &Health) -> bool {
    well(node, health) && health.of(&node.name).is_proven()
}

fn floating_on<'a>(
    plan: &'a Plan,
    node: &'a Node,
) -> impl Iterator<Item = (&'a IpAddr, &'a crate::plan::EgressIpPlan)> {
    plan.egress_ips.iter().filter(move |(_, ip)| !ip.fixed && ip.owner.as_ref() == Some(&node.name))
}

fn has_room(snapshot: &Snapshot, plan: &Plan, node: &Node, pool: Option<&PoolId>) -> bool {
    let below = |limit: Option<u32>| limit.is_none_or(|limit| floating_on(plan, node).count() < limit as usize);
    if node.max_egress_ips.is_some() {
        return below(node.max_egress_ips);
    }
    let of_pool = floating_on(plan, node).filter(|(_, ip)| ip.pool.as_ref() == pool).count();
    let per_node = pool.and_then(|pool| snapshot.pools[pool].max_per_node);
    below(snapshot.max_egress_ips) && per_node.is_none_or(|limit| of_pool < limit as usize)
}

fn check_owners(world: &TestCluster, before: &Plan, after: &Plan) -> Result<(), TestCaseError> {
    let (snapshot, health) = (&world.snapshot, &world.health);
    for (address, ip) in &after.egress_ips {
        let (old_owner, old_epoch) =
            before.egress_ips.get(address).map_or((None, 0), |old| (old.owner.clone(), old.epoch));
        prop_assert_eq!(ip.epoch, old_epoch + u64::from(old_owner != ip.owner), "epoch of {}", address);
        if ip.fixed || ip.reason == OwnerReason::AddressElsewhere {
            continue;
        }
        let candidates = candidates(snapshot, after, *address);
        let mut able = candidates.iter().filter(|node| takes(node, health));
        match &ip.owner {
            None if candidates.is_empty() => prop_assert_eq!(ip.reason, OwnerReason::NoGatewaySelected),
            None if able.clone().next().is_none() => prop_assert_eq!(ip.reason, OwnerReason::NoGatewayReady),
            None => {
                prop_assert_eq!(ip.reason, OwnerReason::AtCapacity);
                prop_assert!(
                    able.all(|node| !has_room(snapshot, after, node, ip.pool.as_ref())),
                    "{} has no owner",
                    address
                );
            }
            Some(owner) => {
                prop_assert!(candidates.iter().any(|node| node.name == *owner), "{} on {}", address, owner);
                let node = &snapshot.nodes[owner];
                let well = well(node, health);
                prop_assert!(
                    takes(node, health) || old_owner.as_ref() == Some(owner),
                    "{} was given to {}",
                    address,
                    owner
                );
                prop_assert!(
                    well || able.next().is_none() && old_owner.as_ref() == Some(owner),
                    "{} on {}",
                    address,
                    owner
                );
                prop_assert_eq!(well, ip.reason != OwnerReason::OwnerUnhealthy);
            }
        }
    }
    for node in snapshot.nodes.values().filter(|node| well(node, health)) {
        let mut of_pool: BTreeMap<&PoolId, u32> = BTreeMap::new();
        for (_, ip) in floating_on(after, node) {
            ip.pool.iter().for_each(|pool| *of_pool.entry(pool).or_default() += 1);
        }
        if let Some(limit) = node.max_egress_ips.or(snapshot.max_egress_ips) {
            prop_assert!(floating_on(after, node).count() <= limit as usize);
        }
        if node.max_egress_ips.is_none() {
            let kept =
                of_pool.iter().all(|(pool, count)| snapshot.pools[*pool].max_per_node.is_none_or(|max| *count <= max));
            prop_assert!(kept, "{:?} on {}", of_pool, node.name);
        }
    }
    Ok(())
}

/// Checks that no gateway has two more than another that may take one of its directly; without limits, nor through others.
fn check_balance(world: &TestCluster, plan: &Plan) -> Result<(), TestCaseError> {
    let (snapshot, health) = (&world.snapshot, &world.health);
    let limited = snapshot.max_egress_ips.is_some()
        || snapshot.nodes.values().any(|n| n.max_egress_ips.is_some())
        || snapshot.pools.values().any(|p| p.max_per_node.is_some());
    // An egress IP that waits for its gateway counts there, and stays where it is until then.
    let returns_to = |ip: &crate::plan::EgressIpPlan| {
        let owner = ip.owner.as_ref().filter(|node| well(&snapshot.nodes[*node], health))?;
        ip.preferred.as_ref().filter(|node| *node != owner && well(&snapshot.nodes[*node], health)).cloned()
    };
    let load = |node: &Node| {
        let floating = plan.egress_ips.values().filter(|ip| !ip.fixed);
        floating.filter(|ip| returns_to(ip).or_else(|| ip.owner.clone()).as_ref() == Some(&node.name)).count()
    };
    let takers = |node: &Node| -> Vec<&Node> {
        let of_ip = |(address, ip): (&IpAddr, &crate::plan::EgressIpPlan)| -> Vec<&Node> {
            let failback = ip.pool.as_ref().map_or(Failback::default(), |pool| snapshot.pools[pool].failback);
            let Failback::Preferred { delay } = failback else { return Vec::new() };
            if wants_first(snapshot, ip, *address) || returns_to(ip).is_some() {
                return Vec::new();
            }
            let candidates = candidates(snapshot, plan, *address).into_iter();
            candidates
                .filter(|to| well(to, health) && health.of(&to.name).settled(delay))
                .filter(|to| !limited || has_room(snapshot, plan, to, ip.pool.as_ref()))
                .collect()
        };
        floating_on(plan, node).flat_map(of_ip).collect()
    };
    for node in snapshot.nodes.values().filter(|node| well(node, health)) {
        let (mut seen, mut next) = (BTreeSet::new(), vec![node]);
        while let Some(at) = next.pop() {
            for taker in takers(at) {
                if seen.insert(&taker.name) {
                    prop_assert!(
                        load(taker) + 2 > load(node),
                        "{} has {}, {} has {}",
                        node.name,
                        load(node),
                        taker.name,
                        load(taker)
                    );
                    if !limited {
                        next.push(taker);
                    }
                }
            }
        }
    }
    Ok(())
}

fn check_addresses(world: &TestCluster, plan: &Plan) -> Result<(), TestCaseError> {
    for (address, ip) in plan.egress_ips.iter().filter(|(_, ip)| ip.users.len() > 1 && !ip.draining) {
        for user in ip.users.keys() {
            let asked = match &world.snapshot.policies[user].source {
                Source::Pools(requests) => requests.iter().any(|request| request.ips.contains(address)),
                Source::Gateways(_) => true,
            };
            prop_assert!(asked, "{} was given to {} and others", address, user);
        }
    }
    Ok(())
}

fn check_assignments(world: &TestCluster, plan: &Plan) -> Result<(), TestCaseError> {
    for (id, policy) in &world.snapshot.policies {
        let selected = world.snapshot.endpoints.values().filter(|endpoint| selects(&world.snapshot, policy, endpoint));
        prop_assert_eq!(plan.outcomes[id].endpoints as usize, selected.count());
        prop_assert!(ConditionKind::ALL.iter().all(|kind| plan.outcomes[id].conditions.contains_key(kind)));
        if policy.distribution != Distribution::PerEndpoint {
            prop_assert!(!plan.assignments.contains_key(id));
            continue;
        }
        for slot in &plan.outcomes[id].slots {
            let assigned =
                plan.assignments[id].values().filter(|a| a.get(Family::of(slot.address)) == Some(slot.address));
            prop_assert_eq!(assigned.count(), slot.endpoints as usize);
        }
    }
    prop_assert_eq!(plan.outcomes.len(), world.snapshot.policies.len());
    Ok(())
}

/// Returns whether a policy has a gateway that wants the first of its nodes, and others. A plan does not say which of a policy's gateways
/// chose an address, so that gateway may move, once, to an address that another gateway of its policy chose.
fn chooses_beside_others(snapshot: &Snapshot) -> bool {
    snapshot.policies.values().any(|policy| match &policy.source {
        Source::Gateways(gateways) => gateways.len() > 1 && gateways.iter().any(|g| g.choice == NodeChoice::First),
        Source::Pools(_) => false,
    })
}

fn check(world: &TestCluster, before: &Plan) -> Result<Plan, TestCaseError> {
    let after = plan(&world.snapshot, &world.health, before);
    check_owners(world, before, &after)?;
    check_balance(world, &after)?;
    check_addresses(world, &after)?;
    check_assignments(world, &after)?;
    check_holders(&world.snapshot, &world.health, before, &after)?;
    check_grants(&world.snapshot, before, &after)?;
    let again = plan(&world.snapshot, &world.health, &after);
    prop_assert_eq!(&plan(&world.snapshot, &world.health, &again), &again, "planning twice again changes nothing");
    if !chooses_beside_others(&world.snapshot) {
        prop_assert_eq!(&again, &after, "planning again changes nothing");
    }
    Ok(after)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_plan_keeps_its_promises(worlds in prop::collection::vec(arbitrary_cluster(), 1..4)) {
        let mut previous = Plan::default();
        for world in worlds {
            previous = check(&world, &previous)?;
        }
    }

    #[test]
    fn selection_is_what_each_selector_says(world in arbitrary_cluster()) {
        let selection = Selection::new(&world.snapshot);
        for (id, policy) in &world.snapshot.policies {
            let found: Vec<&EndpointId> = selection.endpoints(id).into_keys().collect();
            let expected: Vec<&EndpointId> =
                world.snapshot.endpoints.values().filter(|e| selects(&world.snapshot, policy, e)).map(|e| &e.id).collect();
            prop_assert_eq!(found, expected);
        }
        let mut classes = BTreeSet::new();
        for endpoint in world.snapshot.endpoints.values() {
            let node = world.snapshot.nodes.get(&endpoint.node).map_or(&NONE, |node| &node.labels);
            let namespace = world.snapshot.namespaces.get(&endpoint.id.namespace).unwrap_or(&NONE);
            classes.insert(selecting(world.snapshot.policies.values(), &endpoint.labels, namespace, node));
        }
        classes.remove(&BTreeSet::new());
        let interned: BTreeSet<BTreeSet<PolicyId>> =
            selection.classes().into_keys().map(|class| class.into_iter().cloned().collect()).collect();
        prop_assert_eq!(interned, classes);
    }

    #[test]
    fn the_order_of_the_input_does_not_matter(world in arbitrary_cluster(), later in arbitrary_cluster()) {
        let shuffled = |world: &TestCluster| {
            let mut world = world.clone();
            for policy in world.snapshot.policies.values_mut() {
                policy.selectors.reverse();
                policy.destinations.reverse();
                policy.excluded.reverse();
                match &mut policy.source {
                    Source::Gateways(gateways) => gateways.reverse(),
                    Source::Pools(requests) => requests.reverse(),
                }
            }
            world.snapshot.pools.values_mut().for_each(|pool| pool.ranges.reverse());
            world
        };
        let both = |world: &TestCluster, previous: &Plan| {
            let other = shuffled(world);
            [plan(&world.snapshot, &world.health, previous), plan(&other.snapshot, &other.health, previous)]
        };
        let [first, other] = both(&world, &Plan::default());
        prop_assert_eq!(&first, &other);
        let [second, other] = both(&later, &first);
        prop_assert_eq!(second, other);
    }
}
