//! Notices, lists and answers in the orders in which a busy API server may send them.

use super::*;
use egress_core::model::OnNoGateway;
use egress_objects::api::{EgressGatewayPolicy, EgressIPPool, EgressPolicy};
use egress_objects::translate::{read, read_namespaced};

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
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 8)));
    assert!(is(&cache, &[]));
    cache.notice(Kind::EgressIP, Event::Apply(ip("a", "1", 10)));
    assert!(is(&cache, &[("a", "10")]));
}

/// The notice of a lost label has the version that the object has from then on, and the list of all objects shows this version.
#[test]
fn an_object_that_lost_its_label_is_there_once_all_are_followed() {
    let cache = Cache::default();
    cache.follow(Kind::EgressIP, true);
    listed(&cache, [ip("a", "1", 5), ip("b", "2", 6)]);
    cache.notice(Kind::EgressIP, Event::Delete(ip("a", "1", 9)));
    assert!(is(&cache, &[("b", "6")]));
    cache.follow(Kind::EgressIP, false);
    listed(&cache, [ip("a", "1", 9), ip("b", "2", 6)]);
    assert!(cache.is_whole(Kind::EgressIP) && is(&cache, &[("a", "9"), ("b", "6")]));
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
fn a_refused_watch_of_egress_nodes_is_no_connection() {
    let cache = Cache::default();
    for (kind, connected) in [(Kind::EgressIP, true), (Kind::EgressNode, false)] {
        cache.refuses(kind, true);
        assert_eq!(cache.is_connected(), connected, "{kind}");
        cache.refuses(kind, false);
        assert!(cache.is_connected(), "{kind}");
    }
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

#[test]
fn problem_of_an_object_that_was_deleted_unseen_ends_with_the_next_list() {
    let cache = Cache::default();
    let mut changes = cache.changes();
    let mut broken = ip("a", "1", 6);
    broken["spec"] = json!({"address": 7});
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "labels": 7}});
    let list_nodes = |nodes: Vec<Value>| {
        let all = nodes.into_iter().map(Event::InitApply);
        std::iter::once(Event::Init)
            .chain(all)
            .chain([Event::InitDone])
            .for_each(|event| cache.notice(Kind::Node, event));
    };
    listed(&cache, [broken]);
    list_nodes(vec![node]);
    assert_eq!(cache.problems().len(), 2);
    list_nodes(vec![]);
    assert_eq!(cache.problems().len(), 1, "the problems of other kinds stay");
    changes.mark_unchanged();
    listed(&cache, []);
    assert!(cache.problems().is_empty() && changes.has_changed().unwrap());
}

/// Its packets must not leave with their nodes' addresses after an agent is restarted.
#[test]
fn policy_that_was_never_understood_drops_what_it_covers() {
    let cache = Cache::default();
    let of = |kind: Kind, selector: Value, status: Value| {
        json!({"apiVersion": kind.api_version(), "kind": kind.name(),
            "metadata": {"name": "p", "namespace": "n", "uid": "1", "generation": 3, "resourceVersion": "5"},
            "spec": {"selectors": [{"podSelector": selector}], "destinationCIDRs": ["0.0.0.0/0"], "excludedCIDRs": ["10.0.0.0/8"],
                "egressIPPools": [{"name": "public"}], "distribution": "PerMoon"}, "status": status})
    };
    let key = Key::namespaced("n", "p");
    let good = of(Kind::EgressPolicy, json!({}), json!({"selectedEndpoints": 2}));
    cache.notice(Kind::EgressPolicy, Event::Apply(good));
    let found = cache.get(Kind::EgressPolicy, &key).unwrap().downcast::<EgressPolicy>().unwrap();
    assert_eq!(found.metadata.resource_version.as_deref(), Some("5"));
    assert_eq!(found.status.as_ref().map(|status| status.selected_endpoints), Some(2));
    let (policy, problems) = read_namespaced(&found);
    assert_eq!((policy.on_no_gateway, policy.generation, problems.len()), (OnNoGateway::Drop, 3, 1));
    assert_eq!((policy.selectors.len(), policy.destinations.len(), policy.excluded.len()), (1, 1, 1));
    cache.notice(Kind::EgressGatewayPolicy, Event::Apply(of(Kind::EgressGatewayPolicy, json!({}), json!({}))));
    let found = cache.get(Kind::EgressGatewayPolicy, &key).unwrap().downcast::<EgressGatewayPolicy>().unwrap();
    assert_eq!(read(&found).0.on_no_gateway, OnNoGateway::Drop);
    assert_eq!(cache.problems().len(), 2);
    // Nothing says which pods this one selects.
    let unclear = of(Kind::EgressPolicy, json!("all"), json!({}));
    let other = Cache::default();
    other.notice(Kind::EgressPolicy, Event::Apply(unclear));
    assert!(other.get(Kind::EgressPolicy, &key).is_none() && other.problems().len() == 1);
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
