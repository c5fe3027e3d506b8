//! Notices, lists and answers in the orders in which a busy API server may send them.

use super::*;
use egress_objects::api::EgressIPPool;
use serde_json::json;

fn ip(name: &str, uid: &str, version: u64) -> Value {
    json!({"apiVersion": "spillway.io/v1alpha1", "kind": "EgressIP", "spec": {"address": "192.0.2.1"},
        "metadata": {"name": name, "uid": uid, "resourceVersion": version.to_string()}})
}

fn versions(cache: &Cache) -> Vec<(String, String)> {
    let state = cache.state();
    let of = |key: &Key| state.view.version(Kind::EgressIP, key).unwrap_or_default().to_owned();
    state.view.keys(Kind::EgressIP).iter().map(|key| (key.name.clone(), of(key))).collect()
}

fn is(cache: &Cache, wanted: &[(&str, &str)]) -> bool {
    versions(cache) == wanted.iter().map(|(name, version)| ((*name).into(), (*version).into())).collect::<Vec<_>>()
}

fn listed(cache: &Cache, objects: impl IntoIterator<Item = Value>) {
    cache.notice(Kind::EgressIP, Event::Init);
    for object in objects {
        cache.notice(Kind::EgressIP, Event::InitApply(object));
    }
    cache.notice(Kind::EgressIP, Event::InitDone);
}

#[test]
fn an_older_watch_event_does_not_undo_a_write() {
    let cache = Cache::default();
    listed(&cache, [ip("a", "1", 5)]);
    cache.wrote(Kind::EgressIP, ip("a", "1", 9));
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 7)));
    assert!(is(&cache, &[("a", "9")]));
    let revision = cache.revision(Kind::EgressIP);
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 9)));
    assert_eq!(cache.revision(Kind::EgressIP), revision, "the notice of our own write is no change");
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 10)));
    assert!(is(&cache, &[("a", "10")]));
}

#[test]
fn a_deleted_object_stays_deleted_and_its_name_can_be_reused() {
    let cache = Cache::default();
    listed(&cache, [ip("a", "1", 5)]);
    let target = ObjectRef { kind: Kind::EgressIP, key: Key::cluster("a") };
    cache.gone(&target, &ip("a", "1", 5));
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 4)));
    assert!(is(&cache, &[]));
    cache.wrote(Kind::EgressIP, ip("a", "2", 8));
    cache.notice(Kind::EgressIP, Event::Delete(ip("a", "1", 6)));
    assert!(is(&cache, &[("a", "8")]));
    cache.notice(Kind::EgressIP, Event::Delete(ip("a", "2", 11)));
    assert!(is(&cache, &[]));
}

#[test]
fn a_late_write_response_does_not_revive_a_deleted_object() {
    let cache = Cache::default();
    listed(&cache, [ip("a", "1", 5)]);
    cache.notice(Kind::EgressIP, Event::Delete(ip("a", "1", 9)));
    cache.wrote(Kind::EgressIP, ip("a", "1", 8));
    assert!(is(&cache, &[]), "it was written, and then deleted by somebody else");
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "2", 10)));
    assert!(is(&cache, &[("a", "10")]));
}

#[test]
fn an_object_that_is_selected_again_comes_back() {
    let cache = Cache::default();
    listed(&cache, [ip("a", "1", 5)]);
    cache.notice(Kind::EgressIP, Event::Delete(ip("a", "1", 9)));
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 9)));
    assert!(is(&cache, &[]));
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 10)));
    assert!(is(&cache, &[("a", "10")]));
}

#[test]
fn partial_list_neither_makes_a_kind_whole_nor_removes_objects() {
    let cache = Cache::default();
    let mut changes = cache.changes();
    cache.follow(Kind::EgressIP, true);
    listed(&cache, [ip("a", "1", 5)]);
    assert!(!cache.is_whole(Kind::EgressIP) && cache.missing(&[Kind::EgressIP]).is_empty());
    cache.follow(Kind::EgressIP, false);
    assert!(!cache.listed(Kind::EgressIP, vec![], true, "9"), "it was requested when only a part was followed");
    assert!(!cache.is_whole(Kind::EgressIP) && is(&cache, &[("a", "5")]));
    changes.mark_unchanged();
    listed(&cache, [ip("a", "1", 5)]);
    assert!(cache.is_whole(Kind::EgressIP) && changes.has_changed().unwrap());
}

#[test]
fn an_object_found_missing_on_write_is_removed_from_the_cache() {
    let cache = Cache::default();
    listed(&cache, [ip("a", "1", 5), ip("b", "2", 6)]);
    let target = ObjectRef { kind: Kind::EgressIP, key: Key::cluster("a") };
    cache.gone(&target, &ip("a", "1", 5));
    assert!(is(&cache, &[("b", "6")]));
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 4)));
    assert!(is(&cache, &[("b", "6")]));
}

#[test]
fn memory_of_deleted_objects_is_bounded() {
    let mut recent = Recent::default();
    (0..RECENT + 3).for_each(|n| recent.insert(&n.to_string(), 1));
    recent.insert("5", 1);
    assert_eq!((recent.order.len(), recent.all.len()), (RECENT, RECENT));
    let has = |n: usize| recent.all.contains_key(&n.to_string());
    assert!(!has(2) && has(3) && has(RECENT + 2));
}

#[test]
fn new_list_removes_missing_objects_and_keeps_concurrent_writes() {
    let cache = Cache::default();
    listed(&cache, [ip("gone", "1", 3), ip("kept", "2", 4)]);
    cache.notice(Kind::EgressIP, Event::Init);
    assert!(is(&cache, &[("gone", "3"), ("kept", "4")]), "as it was, until the list is whole");
    cache.wrote(Kind::EgressIP, ip("new", "3", 9));
    cache.notice(Kind::EgressIP, Event::InitApply(ip("kept", "2", 4)));
    cache.notice(Kind::EgressIP, Event::InitDone);
    assert!(is(&cache, &[("kept", "4"), ("new", "9")]));
}

#[test]
fn separate_list_does_not_remove_newer_objects() {
    let cache = Cache::default();
    listed(&cache, [ip("a", "1", 3), ip("b", "2", 4)]);
    cache.notice(Kind::EgressIP, Event::Apply(ip("late", "4", 12)));
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 13)));
    assert!(cache.listed(Kind::EgressIP, vec![ip("a", "1", 6)], false, "10"));
    assert!(is(&cache, &[("a", "13"), ("late", "12")]));
}

#[test]
fn a_watch_event_proves_that_the_api_server_answers_and_a_started_list_does_not() {
    let cache = Cache::default();
    let mut changes = cache.changes();
    listed(&cache, [ip("a", "1", 3)]);
    cache.answers(false);
    changes.mark_unchanged();
    cache.notice(Kind::EgressIP, Event::Init);
    assert!(!cache.is_connected() && !changes.has_changed().unwrap());
    // The only change is that the API server answers.
    cache.notice(Kind::EgressIP, Event::InitApply(ip("a", "1", 3)));
    assert!(cache.is_connected() && changes.has_changed().unwrap());
}

#[test]
fn undecodable_object_keeps_its_last_good_version_and_harms_no_other() {
    let cache = Cache::default();
    let mut broken = ip("a", "1", 6);
    broken["spec"] = json!({"address": 7});
    listed(&cache, [ip("a", "1", 5), ip("b", "2", 5)]);
    cache.notice(Kind::EgressIP, Event::Apply(broken));
    assert!(is(&cache, &[("a", "5"), ("b", "5")]));
    let problems: Vec<String> = cache.problems().iter().map(ToString::to_string).collect();
    assert!(problems.len() == 1 && problems[0].starts_with("EgressIP a: it cannot be decoded"), "{problems:?}");
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 7)));
    assert!(is(&cache, &[("a", "7"), ("b", "5")]) && cache.problems().is_empty());
}

/// The controller reports the problem in the status.
#[test]
fn the_status_of_a_pool_that_is_not_understood_can_be_written() {
    let cache = Cache::default();
    let pool = |version: u64, nodes: Value, status: Value| {
        json!({"apiVersion": "spillway.io/v1beta1", "kind": "EgressIPPool",
            "metadata": {"name": "p", "uid": "1", "generation": version, "resourceVersion": version.to_string()},
            "spec": {"ipRanges": [{"cidr": "192.0.2.0/28"}], "nodeSelector": nodes}, "status": status})
    };
    let used = |used: u64| json!({"usage": {"total": 14, "used": used}});
    let present = || cache.get(Kind::EgressIPPool, &Key::cluster("p")).unwrap().downcast::<EgressIPPool>().unwrap();
    cache.notice(Kind::EgressIPPool, Event::Apply(pool(5, json!({}), used(1))));
    let before = present();
    for (version, status, told) in [(6, used(2), Some(2)), (7, json!({"usage": "many"}), None)] {
        cache.notice(Kind::EgressIPPool, Event::Apply(pool(version, json!("all"), status)));
        let now = present();
        assert_eq!(now.metadata.resource_version, Some(version.to_string()), "a write of it meets no conflict");
        assert_eq!(now.status.as_ref().map(|status| status.usage.used), told);
        assert_eq!((&now.spec, now.metadata.generation), (&before.spec, Some(5)), "the last good version is in force");
        assert_eq!(cache.problems().len(), 1);
    }
    cache.notice(Kind::EgressIPPool, Event::Apply(pool(8, json!({}), used(3))));
    assert!(cache.problems().is_empty());
}

#[test]
fn only_relevant_fields_of_a_pod_count_as_a_change() {
    let cache = Cache::default();
    let pod = |version: &str, phase: &str, app: &str| {
        json!({"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [], "nodeName": "w"},
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": version, "labels": {"app": app}},
            "status": {"phase": phase, "startTime": version}})
    };
    let mut changes = cache.changes();
    for (version, phase, app, changed) in [
        ("1", "Pending", "a", true),
        ("2", "Pending", "a", false),
        ("3", "Running", "a", true),
        ("4", "Running", "b", true),
    ] {
        changes.borrow_and_update();
        cache.notice(Kind::Pod, Event::Apply(pod(version, phase, app)));
        assert_eq!(changes.has_changed().unwrap(), changed, "{version}");
    }
    assert_eq!(cache.heard(Kind::Pod), 4);
}

#[test]
fn pods_are_added_one_by_one_and_removed_at_the_end_of_a_new_list() {
    let cache = Cache::default();
    let pod = |name: &str| {
        json!({"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [], "nodeName": "w"},
            "metadata": {"name": name, "namespace": "n", "uid": name, "resourceVersion": "1"}})
    };
    let is = |names: &[&str]| {
        let there: Vec<Key> = names.iter().map(|name| Key::namespaced("n", name)).collect();
        cache.list(Kind::Pod).len() == there.len() && there.iter().all(|key| cache.get(Kind::Pod, key).is_some())
    };
    for (list, at_the_end) in [(["a", "b"], ["a", "b"]), (["b", "c"], ["b", "c"])] {
        let ready = cache.missing(&[Kind::Pod]).is_empty();
        cache.notice(Kind::Pod, Event::Init);
        for name in list {
            cache.notice(Kind::Pod, Event::InitApply(pod(name)));
        }
        assert_eq!(cache.missing(&[Kind::Pod]).is_empty(), ready, "a list without its end does not count");
        assert!(is(&["a", "b", "c"][..if ready { 3 } else { 2 }]), "nothing is missing meanwhile");
        cache.notice(Kind::Pod, Event::InitDone);
        assert!(is(&at_the_end) && cache.missing(&[Kind::Pod]).is_empty());
    }
}

#[test]
fn fields_missing_from_a_foreign_crd_are_not_written_again() {
    let cache = Cache::default();
    let kind = Kind::ExternalIPPool;
    assert_eq!(cache.missing(&[kind]), [kind]);
    cache.absent(kind);
    assert!(cache.missing(&[kind]).is_empty(), "nobody waits for kinds that the cluster does not know");
    let status = json!({"usage": {"total": 3, "used": 1}, "conditions": [{"type": "Ready"}]});
    assert_eq!(cache.writable(kind, status.clone()), Some(status.clone()));
    cache.lacks(kind, Some(vec!["conditions".to_owned()]));
    cache.lacks(kind, Some(Vec::new()));
    assert_eq!(cache.writable(kind, status.clone()), Some(json!({"usage": {"total": 3, "used": 1}})));
    assert_eq!(cache.writable(Kind::Egress, status.clone()), Some(status.clone()));
    cache.lacks(Kind::CiliumEgressGatewayPolicy, None);
    assert_eq!(cache.writable(Kind::CiliumEgressGatewayPolicy, status), None);
}
