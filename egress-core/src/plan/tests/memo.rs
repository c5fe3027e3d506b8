//! Tests of small changes. The oracle is a full plan.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use crate::model::*;
use crate::plan::{Changes, Memo, Plan, Touched, plan, plan_and_remember};
use crate::testing::world::*;

/// What happens to one pod or node.
#[derive(Clone, Debug)]
enum Step {
    Pod { name: usize, namespace: usize, there: bool, node: usize, labels: Labels },
    Report { node: usize, revision: u64, demands: BTreeMap<u8, Demand>, other_address: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let pod = (0usize..20, 0usize..3, prop::bool::weighted(0.7), 0usize..9, arbitrary_labels());
    let pod = pod.prop_map(|(name, namespace, there, node, labels)| Step::Pod { name, namespace, there, node, labels });
    let demand = (0u32..600, prop::collection::btree_set(0u16..1008, 0..30));
    let demand = demand.prop_map(|(want, released)| Demand { want, released });
    let report = (0usize..8, 0u64..8, prop::collection::btree_map(0u8..14, demand, 0..3), prop::bool::weighted(0.05));
    let report = report.prop_map(|(node, revision, demands, other_address)| Step::Report {
        node,
        revision,
        demands,
        other_address,
    });
    prop_oneof![4 => pod, 1 => report]
}

/// Applies a step; leases up to `granted` are known.
fn apply(snapshot: &mut Snapshot, step: &Step, granted: u64, changes: &mut Changes) {
    match step {
        Step::Pod { name, namespace, there, node, labels } => {
            let id = EndpointId::new(&format!("ns{namespace}"), &format!("pod{name}"), "uid");
            let node = format!("n{node}").as_str().into();
            let endpoint = Endpoint { id: id.clone(), node, ips: BTreeSet::new(), labels: labels.clone() };
            match there {
                true => snapshot.endpoints.insert(id.clone(), endpoint.clone()),
                false => snapshot.endpoints.remove(&id),
            };
            changes.pods.insert(id, there.then_some(endpoint));
        }
        Step::Report { node, revision, demands, other_address } => {
            let Some(node) = snapshot.nodes.get_mut(&NodeName::from(format!("n{node}").as_str())) else { return };
            let Some(report) = &mut node.report else { return };
            report.own_lease_revision = granted.min(*revision);
            report.demand = demands.iter().map(|(last, demand)| (v4(1, 0, *last), demand.clone())).collect();
            if *other_address {
                report.occupied_blocks.insert(*revision as u16);
            }
            changes.reports.insert(node.name.clone(), report.clone());
        }
    }
}

/// Returns what a node's own object contains of a plan.
fn of_node<'a>(snapshot: &Snapshot, plan: &'a Plan, node: &NodeName) -> impl PartialEq + 'a {
    let blocks = plan.blocks.iter().flat_map(|(address, blocks)| blocks.iter().map(move |block| (address, block)));
    let blocks: Vec<_> = blocks.filter(|(_, (_, lease))| lease.node == *node).collect();
    let on_node = |id: &EndpointId| snapshot.endpoints.get(id).is_some_and(|endpoint| endpoint.node == *node);
    let assigned = plan.assignments.iter().flat_map(|(policy, of)| of.iter().map(move |(id, to)| (policy, id, to)));
    (blocks, assigned.filter(|(_, id, _)| on_node(id)).collect::<Vec<_>>())
}

/// Checks that everything that differs is among what was touched.
fn check_touched(
    (old, before): (&Snapshot, &Plan),
    (new, after): (&Snapshot, &Plan),
    touched: &Touched,
) -> Result<(), TestCaseError> {
    for (policy, outcome) in &after.outcomes {
        prop_assert!(touched.policies.contains(policy) || before.outcomes[policy] == *outcome, "{}", policy);
    }
    for (address, ip) in &after.egress_ips {
        let same = before.egress_ips[address] == *ip && before.blocks.get(address) == after.blocks.get(address);
        prop_assert!(touched.egress_ips.contains(address) || same, "{}", address);
    }
    for node in new.nodes.keys() {
        let same = of_node(old, before, node) == of_node(new, after, node);
        prop_assert!(touched.nodes.contains(node) || same, "{}", node);
    }
    Ok(())
}

fn remember(world: &TestCluster, previous: &Plan) -> (Plan, Memo) {
    plan_and_remember(world.snapshot.clone(), &world.health, previous)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_partial_plan_equals_a_full_plan(
        earlier in arbitrary_cluster(),
        mut world in arbitrary_cluster(),
        rounds in prop::collection::vec(prop::collection::vec(step(), 1..4), 1..12),
    ) {
        let earlier = plan(&earlier.snapshot, &earlier.health, &Plan::default());
        let (mut current, mut memo) = remember(&world, &earlier);
        prop_assert_eq!(&current, &plan(&world.snapshot, &world.health, &earlier));
        for steps in rounds {
            let (old, mut changes) = (world.snapshot.clone(), Changes::default());
            steps.iter().for_each(|step| apply(&mut world.snapshot, step, current.lease_revision, &mut changes));
            let before = current.clone();
            let expected = plan(&world.snapshot, &world.health, &before);
            memo = match memo.change(&world.health, &mut current, changes) {
                Some((memo, touched)) => {
                    prop_assert_eq!(&current.egress_ips, &expected.egress_ips);
                    prop_assert_eq!(&current.blocks, &expected.blocks);
                    prop_assert_eq!(&current.assignments, &expected.assignments);
                    prop_assert_eq!(&current.outcomes, &expected.outcomes);
                    prop_assert_eq!(&current, &expected);
                    prop_assert_eq!(memo.snapshot(), &world.snapshot);
                    check_touched((&old, &before), (&world.snapshot, &current), &touched)?;
                    memo
                }
                None => {
                    prop_assert_eq!(&current, &before, "it is left as it was");
                    let (full, memo) = remember(&world, &before);
                    current = full;
                    memo
                }
            };
        }
    }
}

fn changed(memo: Memo, world: &TestCluster, current: &mut Plan, steps: &[Step]) -> Option<Memo> {
    let (mut snapshot, mut changes) = (memo.snapshot().clone(), Changes::default());
    steps.iter().for_each(|step| apply(&mut snapshot, step, current.lease_revision, &mut changes));
    let expected = plan(&snapshot, &world.health, current);
    let (memo, _) = memo.change(&world.health, current, changes)?;
    assert_eq!(*current, expected);
    Some(memo)
}

/// Returns nodes n0 to n7, the first two of them gateways, and four policies: a shares its only egress IP with b.
fn plain() -> TestCluster {
    let (mut snapshot, mut health) = cluster(0, 0);
    for n in 0..8 {
        let labels = if n < 2 { labels(&[("gateway", "yes")]) } else { Labels::new() };
        let node = node(&format!("n{n}"), labels);
        health.nodes.insert(node.name.clone(), if n < 2 { fresh() } else { Default::default() });
        snapshot.nodes.insert(node.name.clone(), node);
    }
    let public = pool("public", v4(1, 0, 1), v4(1, 0, 13));
    snapshot.pools.insert(public.id.clone(), public);
    let named = || Source::Pools(vec![PoolRequest { ips: [v4(1, 0, 9)].into(), ..request("public", 1) }]);
    let of_pool = |count| Source::Pools(vec![request("public", count)]);
    for (name, net, source) in [
        ("a", "192.0.2.0/24", named()),
        ("b", "198.51.100.0/24", named()),
        ("c", "203.0.113.0/24", of_pool(3)),
        ("d", "0.0.0.0/0", of_pool(2)),
    ] {
        let selector = Selector::label("app", name);
        add_policy(
            &mut snapshot,
            Policy {
                selectors: vec![EndpointSelector { pod: Some(selector), ..Default::default() }],
                destinations: vec![net.parse().unwrap()],
                distribution: if name == "c" { Distribution::PerEndpoint } else { Distribution::PerFlow },
                zone: if name == "d" { ZoneMode::Require } else { ZoneMode::Any },
                ..policy(name, source)
            },
        );
    }
    TestCluster { snapshot, health }
}

fn pod(name: usize, there: bool, node: usize, app: &str) -> Step {
    Step::Pod { name, namespace: 0, there, node, labels: labels(&[("app", app)]) }
}

#[test]
fn everyday_changes_of_pods_need_no_full_plan() {
    let world = plain();
    let (mut current, mut memo) = remember(&world, &Plan::default());
    for steps in [
        vec![pod(0, true, 2, "a")],
        vec![pod(1, true, 3, "b"), pod(2, true, 4, "b")],
        vec![pod(0, true, 2, "c")],
        vec![pod(3, true, 5, "c"), pod(0, true, 6, "c")],
        vec![pod(0, false, 6, "c")],
        vec![pod(1, true, 7, "none")],
        vec![pod(2, true, 4, "a"), pod(4, true, 4, "b"), pod(5, true, 4, "b")],
    ] {
        memo = changed(memo, &world, &mut current, &steps).expect("it is a small change");
    }
    let ip = &v4(1, 0, 9);
    let holders: BTreeSet<&str> = current.blocks[ip].values().map(|lease| lease.node.as_str()).collect();
    assert_eq!(holders, ["n2", "n3", "n4"].into(), "a node keeps its blocks until it gives them back");

    let demands = [(9, Demand { want: 0, released: current.blocks[ip].keys().copied().collect() })].into();
    let report = Step::Report { node: 2, revision: current.lease_revision, demands, other_address: false };
    memo = changed(memo, &world, &mut current, &[report]).expect("it is a small change");
    assert!(current.blocks[ip].values().all(|lease| lease.node.as_str() != "n2"));
    let demands = [(9, Demand { want: 500, released: BTreeSet::new() })].into();
    let report = Step::Report { node: 4, revision: 0, demands, other_address: false };
    changed(memo, &world, &mut current, &[report]).expect("it is a small change");
    let held = current.blocks[ip].values().filter(|lease| lease.node.as_str() == "n4").count();
    assert_eq!(held, 500);
}

#[test]
fn changes_that_may_move_owners_or_make_conflicts_need_a_full_plan() {
    let mut world = plain();
    let everything = policy("e", Source::Pools(vec![request("public", 1)]));
    add_policy(&mut world.snapshot, Policy { destinations: vec!["192.0.2.0/24".parse().unwrap()], ..everything });
    let (mut current, memo) = remember(&world, &Plan::default());
    assert!(changed(memo, &world, &mut current, &[pod(0, true, 2, "a")]).is_none(), "a and e steer the same");
    let (mut current, memo) = remember(&world, &current);
    assert!(changed(memo, &world, &mut current, &[pod(0, true, 2, "d")]).is_none(), "the zones of d's sources");
    let (mut current, memo) = remember(&world, &current);
    let report = Step::Report { node: 0, revision: 3, demands: BTreeMap::new(), other_address: true };
    assert!(changed(memo, &world, &mut current, &[report]).is_none());
}
