//! The EgressNodes that an agent needs. A label selects the EgressNodes of gateways, the EgressNodes with networks of pods, and the agent's
//! own. If the agent's node is a gateway, it needs the EgressNodes of all nodes.

use super::cache::Cache;
use crate::store::{Key, Kind};
use egress_objects::api::{EgressIP, EgressNode};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::Instant;

/// The minimum and maximum time for which a needed object may be missing among the objects that the label selects, before the API server
/// is asked for it. A controller of an earlier version sets no labels, and a user may remove one.
const MISSING: Duration = Duration::from_secs(10);
const MISSING_AT_MOST: Duration = Duration::from_secs(20);
/// The minimum interval between checks while objects change.
const LOOK: Duration = Duration::from_millis(100);

/// The objects that an agent needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Needed {
    /// The objects that it follows.
    Selected,
    /// In addition, the objects with these names.
    Missing(BTreeSet<String>),
    /// All objects.
    All,
}

/// Returns the objects that the agent of a node needs, according to the cache.
pub(super) fn needed(node: &str, cache: &Cache) -> Needed {
    let get = |kind, name: &str| cache.get(kind, &Key::cluster(name));
    let own = get(Kind::EgressNode, node);
    let is_for_all = own.as_ref().and_then(|own| own.downcast_ref()).is_some_and(EgressNode::follows_all);
    let ips = cache.list(Kind::EgressIP);
    let ips = ips.iter().filter_map(|ip| ip.downcast_ref::<EgressIP>());
    let gateways: BTreeSet<&str> = ips.flat_map(EgressIP::carriers).collect();
    if is_for_all || gateways.contains(node) {
        return Needed::All;
    }
    // The EgressNode of a removed node may also be gone.
    let is_missing = |name: &&str| get(Kind::Node, name).is_some() && get(Kind::EgressNode, name).is_none();
    let own = own.is_none().then_some(node);
    let missing: BTreeSet<String> = gateways.into_iter().filter(is_missing).chain(own).map(str::to_owned).collect();
    if missing.is_empty() { Needed::Selected } else { Needed::Missing(missing) }
}

/// Returns the delay before the API server is asked for a missing object. `chance`, 0 to 1, spreads the requests of thousands of agents.
pub(super) fn patience(chance: f64) -> Duration {
    MISSING + (MISSING_AT_MOST - MISSING).mul_f64(chance)
}

/// Waits until the agent of a node needs more objects than it follows: all objects, or some that have been missing for `patience`.
pub(super) async fn more_needed(node: &str, cache: &Cache, patience: Duration) -> Needed {
    let mut changes = cache.changes();
    let mut since: Option<Instant> = None;
    loop {
        match needed(node, cache) {
            Needed::Selected => since = None,
            Needed::Missing(_) if since.get_or_insert_with(Instant::now).elapsed() < patience => {}
            more => return more,
        }
        tokio::time::sleep(LOOK).await;
        // The last change may have happened before this wait.
        let _ = tokio::time::timeout(patience, changes.changed()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::runtime::watcher::Event;
    use serde_json::{Value, json};

    fn egress_node(name: &str, followed_by: Option<&str>) -> Value {
        let labels = followed_by.map(|by| json!({"spillway.io/followed-by": by}));
        json!({"apiVersion": "spillway.io/v1alpha1", "kind": "EgressNode", "spec": {},
            "metadata": {"name": name, "uid": name, "resourceVersion": "1", "labels": labels}})
    }

    /// Returns a cluster with the nodes `me` and `gw`, and an egress IP that `carrier` carries.
    fn cluster(own: Option<Value>, gateway: Option<Value>, carrier: &str) -> Cache {
        let cache = Cache::default();
        let ip = json!({"apiVersion": "spillway.io/v1alpha1", "kind": "EgressIP", "spec": {"address": "192.0.2.1"},
            "metadata": {"name": "192.0.2.1", "uid": "ip", "resourceVersion": "1"}, "status": {"carriers": [carrier]}});
        cache.notice(Kind::EgressIP, Event::Apply(ip));
        for name in ["me", "gw"] {
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": name}});
            cache.notice(Kind::Node, Event::Apply(node));
        }
        own.into_iter().chain(gateway).for_each(|node| cache.notice(Kind::EgressNode, Event::Apply(node)));
        cache
    }

    #[test]
    fn an_agent_needs_all_objects_on_a_gateway_and_otherwise_those_that_are_selected() {
        let (own, gateway) = (|by| Some(egress_node("me", by)), || Some(egress_node("gw", Some("every-node"))));
        let missing = |name: &str| Needed::Missing([name.to_owned()].into());
        for (cache, wanted) in [
            (cluster(own(Some("me")), gateway(), "gw"), Needed::Selected),
            (cluster(own(Some("me")), gateway(), "me"), Needed::All),
            (cluster(own(Some("every-node")), gateway(), "gw"), Needed::All),
            (cluster(own(None), gateway(), "gw"), Needed::All),
            (cluster(None, gateway(), "gw"), missing("me")),
            (cluster(own(Some("me")), None, "gw"), missing("gw")),
            (cluster(own(Some("me")), None, "gone"), Needed::Selected),
        ] {
            assert_eq!(needed("me", &cache), wanted);
        }
    }

    #[tokio::test]
    async fn an_object_that_is_missing_is_asked_for_after_a_while() {
        let cache = cluster(Some(egress_node("me", Some("me"))), None, "gw");
        let (patience, begin) = (Duration::from_millis(300), Instant::now());
        assert_eq!(more_needed("me", &cache, patience).await, Needed::Missing(["gw".to_owned()].into()));
        assert!(begin.elapsed() >= patience);
        cache.notice(Kind::EgressNode, Event::Apply(egress_node("gw", Some("every-node"))));
        assert!(tokio::time::timeout(patience * 4, more_needed("me", &cache, patience)).await.is_err());
    }

    #[test]
    fn an_object_is_hidden_from_an_agent_unless_its_label_says_otherwise() {
        let object = |by| serde_json::from_value::<EgressNode>(egress_node("gw", by)).unwrap();
        let hidden = [None, Some("other"), Some("me"), Some("every-node")].map(|by| !object(by).is_followed_from("me"));
        assert_eq!(hidden, [true, true, false, false]);
    }
}
