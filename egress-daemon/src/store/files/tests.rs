//! Tests of the store in a directory through its interface: real files, several stores on one directory, several processes.

mod versions;
mod writers;

use super::*;
use crate::store::{Changes, ObjectRef};
use egress_objects::api::Pod;
use egress_objects::api::{EgressGatewayPolicy, EgressIP, EgressIPSpec, EgressIPStatus};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::fs;
use tempfile::TempDir;

const POLICY: &str = "
apiVersion: spillway.io/v1beta1
kind: EgressGatewayPolicy
metadata: {name: web}
spec:
  selectors: [{podSelector: {}}]
  destinationCIDRs: [0.0.0.0/0]
  egressIPPools: [{name: public}]
";

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: shop, labels: {app: web}}
spec: {nodeName: w1, containers: []}
status: {podIP: 10.0.0.5}
";

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// Waits until the condition holds. Fails only on a hang.
async fn until<R>(changes: &mut Changes, mut condition: impl FnMut() -> Option<R>) -> R {
    let wait = async {
        loop {
            if let Some(result) = condition() {
                return result;
            }
            changes.next().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("the condition never came true")
}

#[tokio::test]
async fn a_replacement_that_changes_nothing_is_not_counted_as_a_write() {
    let dir = directory();
    let store = Files::open(dir.path()).unwrap();
    let created = store.create(&egress_ip("192.0.2.1")).await.unwrap();
    let status = EgressIPStatus { epoch: 3, ..EgressIPStatus::default() };
    let changed = EgressIP { status: Some(status), ..created };
    let written = store.replace_status(&changed).await.unwrap();
    let again = store.replace_status(&written).await.unwrap();
    assert_eq!(again.metadata.resource_version, written.metadata.resource_version);
    let counted: Vec<u64> = store.counts().all().into_values().collect();
    assert_eq!(counted, [1, 1], "one creation, one status: {:?}", store.counts());
}

fn policy(store: &Store) -> Option<Arc<EgressGatewayPolicy>> {
    store.get(&Key::cluster("web"))
}

fn destination(store: &Store) -> Option<String> {
    policy(store)?.spec.destination_cidrs.first().cloned()
}

fn egress_ip(address: &str) -> EgressIP {
    EgressIP::new(address, EgressIPSpec { address: address.to_owned(), ..Default::default() })
}

#[test]
fn the_first_list_has_everything_with_its_metadata_filled_in() {
    let dir = directory();
    fs::create_dir(dir.path().join("deep")).unwrap();
    fs::write(dir.path().join("deep/all.yaml"), format!("{POLICY}---\n{POD}---\n")).unwrap();
    let store = Files::open(dir.path()).unwrap();
    let web = policy(&store).unwrap();
    assert_eq!(web.metadata.generation, Some(1));
    assert!(web.metadata.creation_timestamp.is_some());
    let pods = store.list::<Pod>();
    assert_eq!(Key::of(pods[0].as_ref()), Key::namespaced("shop", "a"));
    assert!(pods[0].metadata.uid.as_ref().is_some_and(|uid| uid.len() == 36));
    assert_eq!(store.problems(), []);
    let other = Files::open(dir.path()).unwrap();
    assert_eq!(policy(&other).unwrap(), web, "a second process sees the same uid, creation time and version");
}

#[tokio::test]
async fn changes_of_files_become_visible() {
    let dir = directory();
    let store = Files::open(dir.path()).unwrap();
    let mut changes = store.changes();
    fs::write(dir.path().join("web.yaml"), POLICY).unwrap();
    let first = until(&mut changes, || policy(&store)).await;
    fs::write(dir.path().join("web.yaml"), POLICY.replace("0.0.0.0/0", "203.0.113.0/24")).unwrap();
    let second = until(&mut changes, || policy(&store).filter(|now| now.spec != first.spec)).await;
    assert_eq!(second.metadata.generation, Some(2));
    assert_eq!(second.metadata.creation_timestamp, first.metadata.creation_timestamp);
    assert_eq!(second.metadata.uid, first.metadata.uid);
    fs::rename(dir.path().join("web.yaml"), dir.path().join("renamed.yaml")).unwrap();
    fs::create_dir(dir.path().join("sub")).unwrap();
    fs::write(dir.path().join("sub/pod.yml"), POD).unwrap();
    until(&mut changes, || (!store.list::<Pod>().is_empty()).then_some(())).await;
    assert_eq!(policy(&store).unwrap().metadata.generation, Some(2), "moving the file changed nothing");
    fs::remove_file(dir.path().join("renamed.yaml")).unwrap();
    until(&mut changes, || policy(&store).is_none().then_some(())).await;
    let record = dir.path().join(".spillway/status/EgressGatewayPolicy/web.yaml");
    until(&mut changes, || (!record.exists()).then_some(())).await;
}

#[tokio::test]
async fn a_broken_file_names_itself_and_its_last_good_version_stays_also_for_a_new_process() {
    let dir = directory();
    let file = dir.path().join("web.yaml");
    fs::write(&file, format!("{POLICY}---\n{POD}")).unwrap();
    let store = Files::open(dir.path()).unwrap();
    let mut changes = store.changes();
    let wrong = POLICY.replace("destinationCIDRs", "destinationCidrs");
    fs::write(&file, format!("{wrong}---\n{}", POD.replace("10.0.0.5", "10.0.0.6"))).unwrap();
    let problems = until(&mut changes, || Some(store.problems()).filter(|problems| !problems.is_empty())).await;
    assert_eq!(
        problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["web.yaml, document 1, EgressGatewayPolicy web, spec.destinationCidrs: unknown field \"destinationCidrs\": \
          write destinationCIDRs"]
    );
    assert_eq!(destination(&store).as_deref(), Some("0.0.0.0/0"));
    let ip = |store: &Store| store.list::<Pod>()[0].status.as_ref().unwrap().pod_ip.clone().unwrap();
    assert_eq!(ip(&store), "10.0.0.6", "the good document of the file is in force");
    let restarted = Files::open(dir.path()).unwrap();
    assert_eq!(destination(&restarted).as_deref(), Some("0.0.0.0/0"));
    assert_eq!(restarted.problems(), problems);
    fs::write(&file, "a: [").unwrap();
    until(&mut changes, || store.problems()[0].message.starts_with("the file is not YAML").then_some(())).await;
    assert_eq!((destination(&store).as_deref(), ip(&store).as_str()), (Some("0.0.0.0/0"), "10.0.0.6"));
    fs::write(&file, POLICY).unwrap();
    until(&mut changes, || store.problems().is_empty().then_some(())).await;
    assert!(store.list::<Pod>().is_empty(), "a good version that leaves an object out removes it");
}

#[tokio::test]
async fn writes_compare_and_swap_and_are_visible_at_once() {
    let dir = directory();
    let (store, other) = (Files::open(dir.path()).unwrap(), Files::open(dir.path()).unwrap());
    let created = store.create(&egress_ip("192.0.2.1")).await.unwrap();
    assert_eq!(created.metadata.generation, Some(1));
    assert_eq!(store.list::<EgressIP>()[0].as_ref(), &created);
    assert!(matches!(store.create(&created).await, Err(StoreError::AlreadyExists(_))));
    let mut changes = other.changes();
    let theirs = until(&mut changes, || other.get::<EgressIP>(&Key::cluster("192.0.2.1"))).await;
    assert_eq!(theirs.as_ref(), &created);

    let mut mine = created.clone();
    mine.status = Some(EgressIPStatus { node: Some("gw1".into()), epoch: 1, ..Default::default() });
    mine.spec.pool = Some("ignored".into());
    let mine = store.replace_status(&mine).await.unwrap();
    assert_eq!((mine.spec.pool.as_deref(), mine.metadata.generation), (None, Some(1)), "only the status is written");
    let mut stale = theirs.as_ref().clone();
    stale.spec.pool = Some("public".into());
    assert!(matches!(other.replace(&stale).await, Err(StoreError::Conflict(_))));

    let mut next = mine.clone();
    next.spec.pool = Some("public".into());
    next.status = None;
    let next = store.replace(&next).await.unwrap();
    assert_eq!(next.status, mine.status, "the status is left alone");
    assert_eq!(next.metadata.generation, Some(2));
    let unchanged = store.replace(&next).await.unwrap();
    assert_eq!(unchanged.metadata.resource_version, next.metadata.resource_version, "nothing changed, nothing written");

    assert!(matches!(store.delete(&mine).await, Err(StoreError::Conflict(_))));
    store.delete(&next).await.unwrap();
    assert!(store.list::<EgressIP>().is_empty());
    assert!(matches!(store.replace(&next).await, Err(StoreError::NotFound(_))));
    let again = store.create(&egress_ip("192.0.2.1")).await.unwrap();
    let number = |ip: &EgressIP| ip.metadata.resource_version.as_ref().unwrap().parse::<u64>().unwrap();
    assert!(number(&again) > number(&next), "a version is never assigned twice");
}

#[tokio::test]
async fn the_status_of_a_users_object_is_kept_in_another_file() {
    let dir = directory();
    fs::write(dir.path().join("web.yaml"), POLICY).unwrap();
    let store = Files::open(dir.path()).unwrap();
    let mut web = policy(&store).unwrap().as_ref().clone();
    web.status = Some(egress_objects::api::EgressGatewayPolicyStatus { selected_endpoints: 7, ..Default::default() });
    let written = store.replace_status(&web).await.unwrap();
    assert_eq!(policy(&store).unwrap().as_ref(), &written);
    assert!(matches!(store.replace_status(&web).await, Err(StoreError::Conflict(_))));
    assert_eq!(fs::read_to_string(dir.path().join("web.yaml")).unwrap(), POLICY);
    let other = Files::open(dir.path()).unwrap();
    assert_eq!(policy(&other).unwrap().as_ref(), &written);
    let mut changes = other.changes();
    fs::write(dir.path().join("web.yaml"), POLICY.replace("0.0.0.0/0", "203.0.113.0/24")).unwrap();
    let changed = until(&mut changes, || policy(&other).filter(|now| now.metadata.generation == Some(2))).await;
    assert_eq!(changed.status, written.status);
    assert!(matches!(store.replace(&web).await, Err(StoreError::Refused { .. })));
}

#[tokio::test]
async fn objects_that_fail_validation_are_not_written() {
    let dir = directory();
    let store = Files::open(dir.path()).unwrap();
    let error = store.create(&egress_ip("192.0.2.300")).await.unwrap_err().to_string();
    assert_eq!(
        error,
        "EgressIP 192.0.2.300 is refused: spec.address: \"192.0.2.300\" is not an IP address: write it without a prefix \
         length, such as 192.0.2.10 or 2001:db8::10"
    );
    let error = store.create(&EgressIP::new("../x", egress_ip("192.0.2.1").spec)).await.unwrap_err();
    assert!(matches!(error, StoreError::Refused { .. }), "{error}");
}

#[tokio::test]
async fn a_broken_file_of_spillways_own_is_a_problem_and_its_last_good_version_stays() {
    let dir = directory();
    let store = Files::open(dir.path()).unwrap();
    let created = store.create(&egress_ip("192.0.2.1")).await.unwrap();
    let mut changes = store.changes();
    for name in ["192.0.2.1.yaml", "192.0.2.2.yaml"] {
        fs::write(dir.path().join(".spillway/EgressIP").join(name), "{").unwrap();
    }
    let problems = until(&mut changes, || Some(store.problems()).filter(|problems| problems.len() == 2)).await;
    assert_eq!(problems[0].file, Path::new(".spillway/EgressIP/192.0.2.1.yaml"));
    assert_eq!(store.list::<EgressIP>()[0].as_ref(), &created);
    let error = store.replace_status(&created).await.unwrap_err().to_string();
    assert!(error.contains("192.0.2.1.yaml is not YAML, remove it"), "{error}");
    for name in ["192.0.2.1.yaml", "192.0.2.2.yaml"] {
        fs::remove_file(dir.path().join(".spillway/EgressIP").join(name)).unwrap();
    }
    until(&mut changes, || (store.problems().is_empty() && store.list::<EgressIP>().is_empty()).then_some(())).await;
}

#[test]
fn an_unchanged_object_stays_the_same_allocation() {
    let dir = directory();
    fs::write(dir.path().join("all.yaml"), format!("{POLICY}---\n{POD}")).unwrap();
    let store = Files::open(dir.path()).unwrap();
    let (policy_before, pods) = (policy(&store).unwrap(), store.list::<Pod>());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut changes = store.changes();
        fs::write(
            dir.path().join("node.yaml"),
            "{apiVersion: v1, kind: Node, metadata: {name: w1, labels: {egress: \"true\"}}}",
        )
        .unwrap();
        until(&mut changes, || store.list::<Node>().into_iter().next()).await;
    });
    assert!(Arc::ptr_eq(&policy_before, &policy(&store).unwrap()));
    assert!(Arc::ptr_eq(&pods[0], &store.list::<Pod>()[0]));
}

#[test]
fn a_directory_that_is_not_there_says_what_to_do() {
    let dir = directory();
    let missing = dir.path().join("missing");
    let Err(error) = Files::open(&missing) else { panic!("it was opened") };
    assert_eq!(
        error.to_string(),
        format!("{} is not a directory: create it, or name another one with --manifests", missing.display())
    );
}

fn counter() -> Lease {
    Lease {
        metadata: ObjectMeta { name: Some("counter".into()), namespace: Some("spillway".into()), ..Default::default() },
        spec: Some(LeaseSpec { lease_transitions: Some(0), ..Default::default() }),
    }
}

/// Increments the counter `times` times by compare and swap.
async fn count(store: &Store, times: usize) {
    let key = Key::namespaced("spillway", "counter");
    let mut changes = store.changes();
    let mut done = 0;
    while done < times {
        let mut lease = until(&mut changes, || store.get::<Lease>(&key)).await.as_ref().clone();
        *lease.spec.as_mut().unwrap().lease_transitions.as_mut().unwrap() += 1;
        match store.replace(&lease).await {
            Ok(_) => done += 1,
            Err(StoreError::Conflict(_)) => changes.next().await,
            Err(error) => panic!("{error}"),
        }
    }
}

const COUNT_IN: &str = "SPILLWAY_TEST_COUNT_IN";

/// Not a test by itself: each process of the next test runs it.
#[tokio::test]
async fn count_in_a_process() {
    if let Some(dir) = std::env::var_os(COUNT_IN) {
        count(&Files::open(Path::new(&dir)).unwrap(), 20).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_update_is_lost_among_threads_and_processes() {
    let dir = directory();
    let store = Files::open(dir.path()).unwrap();
    store.create(&counter()).await.unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| {
            std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "store::files::tests::count_in_a_process"])
                .env(COUNT_IN, dir.path())
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { count(&store, 20).await })
        })
        .collect();
    for thread in threads {
        thread.await.unwrap();
    }
    for child in children {
        assert!(child.wait_with_output().unwrap().status.success());
    }
    let mut changes = store.changes();
    let key = Key::namespaced("spillway", "counter");
    until(&mut changes, || {
        let lease = store.get::<Lease>(&key)?;
        (lease.spec.as_ref()?.lease_transitions == Some(120)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_refreshed_store_shows_what_others_wrote_before() {
    let dir = directory();
    let (store, other) = (Files::open(dir.path()).unwrap(), Files::open(dir.path()).unwrap());
    for number in 1..30 {
        let before = other.revision::<EgressIP>();
        store.create(&egress_ip(&format!("192.0.2.{number}"))).await.unwrap();
        other.refresh().await;
        assert_eq!(other.list::<EgressIP>().len(), number);
        assert_ne!(other.revision::<EgressIP>(), before);
        assert_eq!(other.revision::<Lease>(), 0);
    }
}

/// Two objects are incremented in turn. A reader that sees the second object's number also sees the first object's.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_is_visible_only_with_all_writes_before_it() {
    const TIMES: usize = 600;
    let dir = directory();
    let (store, other) = (Files::open(dir.path()).unwrap(), Files::open(dir.path()).unwrap());
    let mut both =
        [store.create(&egress_ip("192.0.2.1")).await.unwrap(), store.create(&egress_ip("192.0.2.2")).await.unwrap()];
    other.refresh().await;
    let writer = tokio::spawn(async move {
        for number in 1..=TIMES {
            for ip in &mut both {
                ip.spec.pool = Some(number.to_string());
                *ip = store.replace(ip).await.unwrap();
            }
        }
    });
    let numbers = || other.list::<EgressIP>().iter().map(|ip| number(ip)).collect::<Vec<_>>();
    let mut changes = other.changes();
    loop {
        let seen = numbers();
        let [first, second] = seen[..] else { panic!("{seen:?}") };
        assert!(first == second || first == second + 1, "{first} and {second}");
        if second == TIMES {
            break;
        }
        changes.next().await;
    }
    writer.await.unwrap();
}

fn number(ip: &EgressIP) -> usize {
    ip.spec.pool.as_ref().map_or(0, |number| number.parse().unwrap())
}

/// One process reads a new version of a file and increments its generation before the other process does.
#[test]
fn an_object_is_never_mistaken_for_its_next_generation() {
    let dir = directory();
    let write = |destination: &str, age: u64| {
        let path = dir.path().join("web.yaml");
        fs::write(&path, POLICY.replace("0.0.0.0/0", destination)).unwrap();
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(std::time::SystemTime::now() - Duration::from_secs(age)).unwrap();
    };
    let seen = |files: &Arc<Files>| {
        let object = files.get(Kind::EgressGatewayPolicy, &Key::cluster("web")).unwrap();
        let web = object.downcast::<EgressGatewayPolicy>().unwrap();
        let version = web.metadata.resource_version.clone().unwrap();
        (web.spec.destination_cidrs[0].clone(), version.parse::<u64>().ok())
    };
    write("203.0.113.0/24", 100);
    let ((slow, _), (quick, _)) = (Files::prepare(dir.path()).unwrap(), Files::prepare(dir.path()).unwrap());
    let (mut slow_scanner, mut quick_scanner) = (Scanner::default(), Scanner::default());
    slow_scanner.scan(&slow, Look::Everywhere);
    quick_scanner.scan(&quick, Look::Everywhere);
    assert_eq!(seen(&slow), seen(&quick));
    write("198.51.100.0/24", 50);
    quick_scanner.scan(&quick, Look::Everywhere);
    slow_scanner.scan(&slow, Look::Noticed);
    assert_eq!(seen(&slow), ("203.0.113.0/24".to_owned(), None), "a write made from this would be refused");
    slow_scanner.scan(&slow, Look::Everywhere);
    assert_eq!(seen(&slow), seen(&quick));
    assert_eq!(seen(&slow).0, "198.51.100.0/24");
}

#[test]
fn a_file_that_vanished_while_nobody_looked_is_forgotten() {
    let dir = directory();
    fs::write(dir.path().join("web.yaml"), POLICY).unwrap();
    drop(Files::open(dir.path()).unwrap());
    fs::remove_file(dir.path().join("web.yaml")).unwrap();
    drop(Files::open(dir.path()).unwrap());
    fs::write(dir.path().join("web.yaml"), "{").unwrap();
    let store = Files::open(dir.path()).unwrap();
    assert!(policy(&store).is_none());
    assert_eq!(store.problems().len(), 1);
}

#[tokio::test]
async fn objects_of_a_directory_that_was_cut_off_are_not_forgotten() {
    let dir = directory();
    let link = dir.path().with_extension("link");
    std::os::unix::fs::symlink(dir.path(), &link).unwrap();
    let (store, other) = (Files::open(&link).unwrap(), Files::open(dir.path()).unwrap());
    let mut changes = store.changes();
    let created = other.create(&egress_ip("192.0.2.1")).await.unwrap();
    until(&mut changes, || (store.list::<EgressIP>().len() == 1).then_some(())).await;
    // Changes of other processes are still noticed, but cannot be read.
    fs::remove_file(&link).unwrap();
    other.delete(&created).await.unwrap();
    until(&mut changes, || (!store.problems().is_empty()).then_some(())).await;
    assert_eq!(store.list::<EgressIP>().len(), 1);
}

#[test]
fn problems_about_an_object_name_it() {
    let dir = directory();
    fs::write(dir.path().join("a.yaml"), POLICY).unwrap();
    fs::write(dir.path().join("b.yaml"), POLICY.replace("0.0.0.0/0", "203.0.113.0/24")).unwrap();
    let store = Files::open(dir.path()).unwrap();
    let problems = store.problems();
    assert_eq!(problems[0].object, Some(ObjectRef { kind: Kind::EgressGatewayPolicy, key: Key::cluster("web") }));
    assert_eq!(
        problems[0].to_string(),
        "b.yaml, document 1, EgressGatewayPolicy web: a.yaml defines this object too, and its version is in force: remove \
         the object from one of the files"
    );
    assert_eq!(destination(&store).as_deref(), Some("0.0.0.0/0"));
}
