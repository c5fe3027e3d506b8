//! Tests which nodes have a policy in their datapath.

use std::collections::BTreeSet;

use crate::health::Health;
use crate::model::*;
use crate::plan::{Changes, Plan, plan, plan_and_remember};
use crate::testing::world::*;

fn web() -> PolicyId {
    PolicyId::new(PolicyKind::Native, "web")
}

fn cluster_with_policy() -> (Snapshot, Health) {
    let (mut snapshot, health) = cluster(2, 3);
    add_policy(&mut snapshot, policy("web", Source::Pools(vec![request("public", 1)])));
    (snapshot, health)
}

fn behind(plan: &Plan) -> Vec<&str> {
    plan.outcomes[&web()].behind.iter().map(NodeName::as_str).collect()
}

fn report(snapshot: &Snapshot, node: &str, generation: i64) -> NodeReport {
    let uid = snapshot.policies[&web()].uid.clone();
    let report = snapshot.nodes[&node.into()].report.clone().unwrap_or_default();
    NodeReport { programmed: Some([(web(), Version { uid, generation })].into()), ..report }
}

#[test]
fn not_yet_nodes_of_the_pods_that_have_another_version_are_behind() {
    let (mut snapshot, health) = cluster_with_policy();
    let mut of = |change: &dyn Fn(&mut Snapshot)| {
        change(&mut snapshot);
        let plan = plan(&snapshot, &health, &Plan::default());
        behind(&plan).join(" ")
    };
    let set = |node: &'static str, generation: i64| {
        move |snapshot: &mut Snapshot| {
            let report = report(snapshot, node, generation);
            snapshot.nodes.get_mut(&node.into()).unwrap().report = Some(report);
        }
    };
    assert_eq!(of(&|_| {}), "w0 w1 w2", "gateways without pods are not asked");
    assert_eq!(of(&set("w0", 1)), "w1 w2");
    let of_old_agent = |s: &mut Snapshot| {
        s.nodes.get_mut(&"w1".into()).unwrap().report = Some(NodeReport::default());
    };
    assert_eq!(of(&of_old_agent), "w2", "an agent that does not report is not waited for");
    assert_eq!(of(&set("w1", 0)), "w1 w2");
    assert_eq!(
        of(&|s| s.nodes.get_mut(&"w1".into()).unwrap().ready = false),
        "w2",
        "a node that is down has no traffic"
    );
    assert_eq!(of(&|s| s.nodes.get_mut(&"w2".into()).unwrap().report = None), "", "a node without an agent");
    assert_eq!(of(&|s| s.policies.get_mut(&web()).unwrap().generation = 2), "w0");
    assert_eq!(of(&set("w0", 2)), "");
    assert_eq!(of(&|s| s.policies.get_mut(&web()).unwrap().uid = "another".into()), "w0", "one of the same name");
}

#[test]
fn agent_that_starts_reporting_versions_requires_a_full_plan() {
    let (mut snapshot, health) = cluster_with_policy();
    let tells = report(&snapshot, "w1", 0);
    for (before, after) in [(NodeReport::default(), tells.clone()), (tells, NodeReport::default())] {
        snapshot.nodes.get_mut(&"w1".into()).unwrap().report = Some(before);
        let (mut plan, memo) = plan_and_remember(snapshot.clone(), &health, &Plan::default());
        let changes = Changes { reports: [("w1".into(), after)].into(), ..Changes::default() };
        assert!(memo.change(&health, &mut plan, changes).is_none());
    }
}

#[test]
fn a_report_of_programmed_policies_needs_no_full_plan() {
    let (mut snapshot, health) = cluster_with_policy();
    let (mut plan_now, mut memo) = plan_and_remember(snapshot.clone(), &health, &Plan::default());
    for node in ["w2", "w0", "w1"] {
        let changed = report(&snapshot, node, 1);
        snapshot.nodes.get_mut(&node.into()).unwrap().report = Some(changed.clone());
        let changes = Changes { reports: [(node.into(), changed)].into(), ..Changes::default() };
        let (next, touched) = memo.change(&health, &mut plan_now, changes).unwrap();
        memo = next;
        assert_eq!(touched.policies, BTreeSet::from([web()]));
        assert_eq!(plan_now, plan(&snapshot, &health, &plan_now));
    }
    assert_eq!(behind(&plan_now), Vec::<&str>::new());
}
