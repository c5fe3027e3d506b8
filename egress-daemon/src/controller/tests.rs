//! Tests of controllers on a real directory, with gateways that consist only of their leases.

mod drains;
mod failures;
mod networks;
mod numbers;
mod tenancy;

use super::apply::{Differences, Scope, apply, is_far, is_news_of_egress_ip, is_news_of_policy};
use super::*;
use crate::store::lease::{LEASE_NAMESPACE, LeaseKeeper, LeaseTerms, gateway_lease};
use crate::store::{Changes, Files, Key, Store};
use egress_core::{
    health::{Health, LeaseState, NodeHealth},
    plan::plan,
};
use egress_objects::api::Pod;
use egress_objects::api::{EgressGatewayPolicy, EgressIP, EgressIPPool, EgressIPStatus, EgressNode, EgressNodeSpec};
use egress_objects::snapshot::{ApiObjects, Desired, desired, previous, snapshot};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

const CLUSTER: &str = "
{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: v1, kind: Node, metadata: {name: gw1, labels: {egress: 'true'}}}
---
{apiVersion: v1, kind: Node, metadata: {name: gw2, labels: {egress: 'true'}}}
---
{apiVersion: v1, kind: Node, metadata: {name: w1}, spec: {podCIDRs: [10.0.0.0/16]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: a, namespace: shop, labels: {app: web}}, spec: {nodeName: w1, containers: []}, status: {podIP: 10.0.0.5}}
---
{apiVersion: v1, kind: Pod, metadata: {name: b, namespace: shop, labels: {app: web}}, spec: {nodeName: w1, containers: []}, status: {podIP: 10.0.0.6}}
";

const POOL: &str = "
apiVersion: spillway.io/v1beta1
kind: EgressIPPool
metadata: {name: public}
spec:
  ipRanges: [{start: 192.0.2.1, end: 192.0.2.4}]
  nodeSelector: {matchLabels: {egress: 'true'}}
  failback: {delay: 0s}
";

const POLICY: &str = "
apiVersion: spillway.io/v1beta1
kind: EgressGatewayPolicy
metadata: {name: web}
spec:
  selectors: [{podSelector: {matchLabels: {app: web}}}]
  destinationCIDRs: [0.0.0.0/0]
  egressIPPools: [{name: public, count: 2}]
  distribution: PerEndpoint
";

/// A directory with a store on it, as a user or an agent has it.
struct ControllerFixture {
    dir: TempDir,
    store: Store,
    changes: Changes,
}

impl ControllerFixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let world = |store: &Store| store.changes();
        fs::write(dir.path().join("cluster.yaml"), CLUSTER).unwrap();
        fs::write(dir.path().join("pool.yaml"), POOL).unwrap();
        fs::write(dir.path().join("policy.yaml"), POLICY).unwrap();
        let store = Files::open(dir.path()).unwrap();
        ControllerFixture { changes: world(&store), dir, store }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn gateway(&self, node: &str) -> LeaseKeeper {
        LeaseKeeper::start(
            self.store.clone(),
            LeaseTerms {
                key: Key::namespaced(LEASE_NAMESPACE, &gateway_lease(node)),
                identity: node.to_owned(),
                duration: Duration::from_secs(1),
                renew_every: Duration::from_millis(200),
            },
        )
    }

    /// Waits until the condition holds. Fails only after a long timeout.
    async fn until<R>(&mut self, mut condition: impl FnMut(&Store) -> Option<R>) -> R {
        let wait = async {
            loop {
                if let Some(result) = condition(&self.store) {
                    return result;
                }
                self.changes.next().await;
            }
        };
        match tokio::time::timeout(Duration::from_secs(30), wait).await {
            Ok(result) => result,
            Err(_) => {
                panic!("it never came true: {:#?} {:#?}", owners(&self.store), self.store.list::<EgressGatewayPolicy>())
            }
        }
    }
}

struct Running {
    report: watch::Receiver<ControllerReport>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

fn controller(dir: &Path, identity: &str) -> Running {
    controller_with(dir, identity, |_| {})
}

fn controller_with(dir: &Path, identity: &str, change: impl FnOnce(&mut ControllerConfig)) -> Running {
    controller_on(Files::open(dir).unwrap(), identity, change)
}

fn controller_on(store: Store, identity: &str, change: impl FnOnce(&mut ControllerConfig)) -> Running {
    let mut config = ControllerConfig::new(identity.to_owned());
    config.lease_duration = Duration::from_secs(1);
    config.renew_every = Duration::from_millis(200);
    config.gateways.duration = Duration::from_secs(1);
    change(&mut config);
    let (report, seen) = watch::channel(ControllerReport::default());
    let (stop, stopped) = oneshot::channel();
    let task = tokio::spawn(run(store, config, report, async move {
        stopped.await.ok();
    }));
    Running { report: seen, stop, task }
}

/// Returns the address, owner and epoch of each egress IP.
fn owners(store: &Store) -> Vec<(String, Option<String>, u64)> {
    let ips = store.list::<EgressIP>();
    let status = |ip: &EgressIP| ip.status.clone().unwrap_or_default();
    ips.iter().map(|ip| (ip.spec.address.clone(), status(ip).node, status(ip).epoch)).collect()
}

fn owned_by(store: &Store, nodes: &[&str]) -> Option<Vec<u64>> {
    let owners = owners(store);
    let mut found: Vec<&str> = owners.iter().filter_map(|(_, node, _)| node.as_deref()).collect();
    found.sort_unstable();
    (found == nodes).then(|| owners.iter().map(|(_, _, epoch)| *epoch).collect())
}

fn condition(store: &Store, kind: &str) -> Option<(String, String, String)> {
    let policy = store.get::<EgressGatewayPolicy>(&Key::cluster("web"))?;
    let status = policy.status.as_ref()?;
    let found = status.conditions.iter().find(|condition| condition.type_ == kind)?;
    Some((found.status.clone(), found.reason.clone(), found.message.clone()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_gets_its_egress_ips_and_a_dead_gateway_loses_its_own() {
    let mut world = ControllerFixture::new();
    let (_gw1, gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let _controller = controller(world.path(), "one");
    let before = world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    let spec = world
        .until(|store| {
            let node = store.get::<EgressNode>(&Key::cluster("w1"))?;
            (node.spec.assignments.len() == 2 && node.spec.blocks.len() == 2).then(|| node.spec.clone())
        })
        .await;
    assert!(spec.assignments.iter().all(|assignment| assignment.endpoints.len() == 1), "{spec:?}");
    world.until(|store| condition(store, "Ready").filter(|ready| ready.0 == "True")).await;
    let usage = |store: &Store| {
        let pool = store.get::<EgressIPPool>(&Key::cluster("public"))?;
        Some(pool.status.as_ref()?.usage.clone()).filter(|usage| usage.used == 2)
    };
    assert_eq!(world.until(usage).await.total, 4);

    drop(gw2);
    let moved = world.until(|store| owned_by(store, &["gw1", "gw1"])).await;
    assert_eq!(
        moved.iter().sum::<u64>(),
        before.iter().sum::<u64>() + 1,
        "only the dead gateway's address has a new epoch"
    );
    let _back = world.gateway("gw2");
    let returned = world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    assert_eq!(returned.iter().sum::<u64>(), before.iter().sum::<u64>() + 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_written_while_nothing_changes() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let mut controller = controller(world.path(), "one");
    world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    world.until(|store| condition(store, "Ready").filter(|ready| ready.0 == "True")).await;
    // An unrelated policy causes rounds, each of which settles.
    let other = POLICY.replace("name: web", "name: other").replace("count: 2", "count: 1");
    fs::write(world.path().join("other.yaml"), &other).unwrap();
    world.until(|store| (store.list::<EgressIP>().len() == 3).then_some(())).await;
    fs::remove_file(world.path().join("other.yaml")).unwrap();
    world.until(|store| (store.list::<EgressIP>().len() == 2).then_some(())).await;
    let mut report = controller.report.clone();
    let settled = loop {
        let before = report.borrow_and_update().clone();
        // If five renewals of both gateways pass without a write, the controller has settled.
        for _ in 0..10 {
            world.changes.next().await;
        }
        if report.borrow().writes == before.writes {
            break before;
        }
    };
    for _ in 0..10 {
        world.changes.next().await;
    }
    let report = controller.report.borrow_and_update().clone();
    assert_eq!(report.writes, settled.writes);
    // Each gateway whose failback delay passes meanwhile causes a round; renewals cause none.
    assert!(report.rounds <= settled.rounds + 2, "{} rounds", report.rounds - settled.rounds);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_policy_is_degraded_and_its_last_good_version_stays_in_force() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let _controller = controller(world.path(), "one");
    world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    fs::write(world.path().join("policy.yaml"), POLICY.replace("0.0.0.0/0", "203.0.113.7/24")).unwrap();
    let degraded = world.until(|store| condition(store, "Degraded").filter(|found| found.1 == "Invalid")).await;
    assert_eq!(degraded.0, "True");
    assert_eq!(
        degraded.2,
        "the last good version, if there is one, is in force: policy.yaml, document 1, EgressGatewayPolicy web, spec.destinationCIDRs[0]: \
         \"203.0.113.7/24\" has bits set beyond its prefix: write the network with zeroes there, such as 203.0.113.0/24, or /32 (IPv6: /128) for the single address"
    );
    assert_eq!(condition(&world.store, "Ready").unwrap().0, "True");
    fs::write(world.path().join("policy.yaml"), POLICY).unwrap();
    world.until(|store| condition(store, "Degraded").filter(|found| found.0 == "False")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn standby_takes_over_from_a_dead_leader_without_unnecessary_changes() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let mut one = controller(world.path(), "one");
    while one.report.borrow_and_update().epoch != Some(1) {
        one.report.changed().await.unwrap();
    }
    let mut two = controller(world.path(), "two");
    let epochs = world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    let owners_before = owners(&world.store);
    assert_eq!(two.report.borrow().epoch, None);
    one.task.abort();
    while two.report.borrow_and_update().epoch.is_none() {
        two.report.changed().await.unwrap();
    }
    fs::write(world.path().join("policy.yaml"), POLICY.replace("count: 2", "count: 3")).unwrap();
    world.until(|store| (owners(store).iter().filter(|(_, node, _)| node.is_some()).count() == 3).then_some(())).await;
    let after = owners(&world.store);
    assert!(owners_before.iter().all(|owner| after.contains(owner)), "{owners_before:?} {after:?} {epochs:?}");

    let mut three = controller(world.path(), "three");
    two.stop.send(()).unwrap();
    two.task.await.unwrap();
    while three.report.borrow_and_update().epoch != Some(3) {
        three.report.changed().await.unwrap();
    }
    three.stop.send(()).unwrap();
    three.task.await.unwrap();
    let _ = one.stop.send(());
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_a_policy_releases_its_egress_ips() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let _controller = controller(world.path(), "one");
    world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    fs::remove_file(world.path().join("policy.yaml")).unwrap();
    world.until(|store| store.list::<EgressIP>().is_empty().then_some(())).await;
}

/// Kills leaders in the middle of their writes while a standby is waiting.
#[tokio::test(flavor = "multi_thread")]
async fn leaders_that_die_during_a_change_lease_and_assign_nothing_twice() {
    let mut world = ControllerFixture::new();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let mut leader = controller(world.path(), "0");
    world.until(|store| owned_by(store, &["gw1", "gw2"])).await;
    for (round, count) in [3, 1, 4, 2].into_iter().enumerate() {
        let mut standby = controller(world.path(), &(round + 1).to_string());
        let before = world.store.list::<EgressIP>().len();
        fs::write(world.path().join("policy.yaml"), POLICY.replace("count: 2", &format!("count: {count}"))).unwrap();
        // The leader dies when the first egress IP has been added or removed, with the rest of its writes in flight.
        world.until(|store| (store.list::<EgressIP>().len() != before).then_some(())).await;
        leader.task.abort();
        while standby.report.borrow_and_update().epoch.is_none() {
            standby.report.changed().await.unwrap();
        }
        world
            .until(|store| {
                once_each(store);
                let owners = owners(store);
                (owners.len() == count && owners.iter().all(|(_, node, _)| node.is_some())).then_some(())
            })
            .await;
        leader = standby;
    }
}

/// Returns the existing objects, and those that a full round wants while both gateways renew their leases.
fn wanted(store: &Store) -> (ApiObjects, Desired) {
    let objects = ApiObjects {
        policies: store.list(),
        pools: store.list(),
        nodes: store.list(),
        namespaces: store.list(),
        pods: store.list(),
        egress_ips: store.list(),
        egress_nodes: store.list(),
        ..ApiObjects::default()
    };
    let (snapshot, problems) = snapshot(&objects);
    let fresh = NodeHealth {
        lease: LeaseState::Fresh { since: Duration::from_secs(100), returned: false, proven: true },
        gone: false,
    };
    let health = Health { nodes: ["gw1", "gw2"].into_iter().map(|name| (name.into(), fresh)).collect() };
    let plan = plan(&snapshot, &health, &previous(&objects));
    let wanted = desired(&objects, &snapshot, &plan, &problems, &Time(Timestamp::now()));
    (objects, wanted)
}

#[tokio::test]
async fn gateways_object_is_visible_to_agents_before_an_egress_ip_names_it() {
    let world = ControllerFixture::new();
    // One gateway has joined before it became a gateway, so that only its own agent follows its object.
    let mut joined = EgressNode::new("gw1", EgressNodeSpec::default());
    joined.set_followed_by(false);
    world.store.create(&joined).await.unwrap();
    let scope = Scope { which: Differences::All, waiting: &BTreeSet::new() };
    let applied = apply(&world.store, wanted(&world.store).1, scope, Vec::new()).await;
    assert!(applied.errors.is_empty(), "{:?}", applied.errors);
    let version = |meta: &ObjectMeta| meta.resource_version.as_ref().unwrap().parse::<u64>().unwrap();
    let ips: Vec<u64> = world.store.list::<EgressIP>().iter().map(|ip| version(&ip.metadata)).collect();
    let nodes = world.store.list::<EgressNode>();
    let [gw1, gw2, w1] = ["gw1", "gw2", "w1"]
        .map(|name| version(&nodes.iter().find(|node| node.metadata.name.as_deref() == Some(name)).unwrap().metadata));
    assert_eq!(ips.len(), 2);
    assert!(ips.iter().all(|ip| (gw1.max(gw2)..w1).contains(ip)), "{gw1} {gw2} {ips:?} {w1}");
}

/// Describes a change that a full round would make, ignoring numbers of pods; `None` if there is none.
fn left_to_do(store: &Store) -> Option<String> {
    let (objects, wanted) = wanted(store);
    let nodes: Vec<_> = objects.egress_nodes.iter().map(|node| node.spec.clone()).collect();
    if wanted.egress_nodes.values().map(|node| node.spec.clone()).ne(nodes.iter().cloned()) {
        return Some(format!("{:#?} instead of {nodes:#?}", wanted.egress_nodes));
    }
    let ips = &objects.egress_ips;
    let is_news = |(a, b): (&EgressIP, &Arc<EgressIP>)| match (&a.status, &b.status) {
        (Some(a), Some(b)) => is_news_of_egress_ip(a, b),
        (a, b) => a != b,
    };
    let specs = |ips: &mut dyn Iterator<Item = &EgressIP>| ips.map(|ip| ip.spec.clone()).collect::<Vec<_>>();
    if specs(&mut wanted.egress_ips.values()) != specs(&mut ips.iter().map(|ip| &**ip))
        || wanted.egress_ips.values().zip(ips).any(is_news)
    {
        return Some(format!("{:#?} instead of {ips:#?}", wanted.egress_ips));
    }
    let statuses: Vec<_> = objects.policies.iter().filter_map(|policy| policy.status.clone()).collect();
    let differ = wanted.policies.len() != statuses.len()
        || wanted.policies.values().zip(&statuses).any(|(a, b)| is_news_of_policy(a, b));
    differ.then(|| format!("{:#?} instead of {statuses:#?}", wanted.policies))
}

#[test]
fn block_share_is_news_if_scarce_and_far_if_changed_more_than_twofold() {
    let status =
        |block_share, blocks_scarce| EgressIPStatus { block_share, blocks_scarce, ..EgressIPStatus::default() };
    let spare = |old, new| is_far(&status(old, false), &status(new, false));
    assert!(!spare(25, 24) && !spare(24, 12) && !spare(12, 24) && spare(25, 12) && spare(12, 25) && spare(0, 1));
    assert!(!is_news_of_egress_ip(&status(25, false), &status(24, false)));
    assert!(is_news_of_egress_ip(&status(25, true), &status(24, true)));
    assert!(is_news_of_egress_ip(&status(25, false), &status(25, true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn partial_rounds_for_a_few_pods_have_the_same_result_as_a_full_round() {
    let mut world = ControllerFixture::new();
    fs::write(
        world.path().join("flows.yaml"),
        POLICY.replace("name: web", "name: flows").replace("app: web", "app: flows").replace("PerEndpoint", "PerFlow"),
    )
    .unwrap();
    let (_gw1, _gw2) = (world.gateway("gw1"), world.gateway("gw2"));
    let controller = controller(world.path(), "one");
    let settled = async |world: &mut ControllerFixture| {
        let mut last = None;
        let wait = async {
            loop {
                last = left_to_do(&world.store);
                if last.is_none() && world.store.list::<EgressIP>().len() == 4 {
                    break;
                }
                world.changes.next().await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(30), wait).await.is_err() {
            panic!("{}", last.unwrap_or_else(|| format!("{:#?}", world.store.list::<EgressIP>())));
        }
    };
    settled(&mut world).await;
    let pod = |name: &str, node: &str, app: &str| {
        let metadata = format!("{{name: {name}, namespace: shop, labels: {{app: {app}}}}}");
        format!(
            "{{apiVersion: v1, kind: Pod, metadata: {metadata}, spec: {{nodeName: {node}, containers: []}}, status: {{podIP: 10.0.1.1}}}}\n"
        )
    };
    // A pod is added, added on a node without pods, relabelled, moved, and removed.
    let steps = [
        vec![pod("c", "w1", "web")],
        vec![pod("c", "w1", "web"), pod("d", "gw1", "flows")],
        vec![pod("c", "w1", "flows"), pod("d", "gw1", "flows"), pod("e", "gw2", "web")],
        vec![pod("c", "gw2", "web"), pod("d", "gw1", "flows")],
        vec![pod("d", "gw1", "none")],
    ];
    let before = controller.report.borrow().clone();
    for pods in steps {
        let count = pods.len();
        fs::write(world.path().join("more.yaml"), pods.join("---\n")).unwrap();
        world.until(|store| (store.list::<Pod>().len() == count + 2).then_some(())).await;
        settled(&mut world).await;
        once_each(&world.store);
    }
    let after = controller.report.borrow().clone();
    assert!(after.partial >= before.partial + 5, "{before:?} {after:?}");
    // Each gateway that proves itself or whose failback delay passes meanwhile causes a full round, and so do the numbers of pods.
    let full = |report: &ControllerReport| report.rounds - report.partial;
    assert!(full(&after) <= full(&before) + 5, "{before:?} {after:?}");
    // The numbers of pods follow later, in one sweep.
    world
        .until(|store| {
            let policy = store.get::<EgressGatewayPolicy>(&Key::cluster("web"))?;
            (policy.status.as_ref()?.selected_endpoints == 2).then_some(())
        })
        .await;
}

/// Asserts that no port block has two holders, and that no pod is assigned twice for one policy.
fn once_each(store: &Store) {
    let (mut blocks, mut pods) = (BTreeSet::new(), BTreeSet::new());
    for node in store.list::<EgressNode>() {
        for leased in node.spec.blocks.iter().chain(&node.spec.quarantined) {
            for number in leased.ranges.iter().flat_map(|range| range.first..range.first + range.count) {
                assert!(blocks.insert((leased.egress_ip.clone(), number)), "{} block {number}", leased.egress_ip);
            }
        }
        for assignment in &node.spec.assignments {
            for pod in &assignment.endpoints {
                assert!(pods.insert((assignment.policy.clone(), pod.clone())), "{pod} of {}", assignment.policy);
            }
        }
    }
}
