//! Detects whether the agents are being removed from the cluster. In that case, this agent cleans up its node when it ends.
//!
//! The only signs that count are the deletions of the agents' DaemonSet and of its namespace. A namespace's pods may be deleted before its
//! DaemonSets. An unreachable API server or missing permissions do not count: after a mistaken cleanup, pods' packets would leave with
//! their node's address.

use futures::StreamExt as _;
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Namespace};
use kube::{
    Api, Client, Resource,
    runtime::watcher::{self, Event, watcher},
};
use serde::de::DeserializeOwned;
use std::{
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::task::JoinSet;

/// The name of the agents' DaemonSet, which is in their own namespace.
const NAME: &str = "spillway-agent";

/// Watches the agents' DaemonSet and its namespace until this value is dropped.
#[derive(Debug)]
pub struct Uninstall {
    daemon: Arc<AtomicBool>,
    namespace: Arc<AtomicBool>,
    _tasks: JoinSet<()>,
}

impl Uninstall {
    /// Starts to watch the client's own namespace and the DaemonSet in it.
    pub fn follow(client: Client) -> Self {
        let (daemon, namespace) = (Arc::default(), Arc::default());
        let own = client.default_namespace().to_owned();
        let mut tasks = JoinSet::new();
        tasks.spawn(watch(Api::<DaemonSet>::default_namespaced(client.clone()), NAME.to_owned(), Arc::clone(&daemon)));
        tasks.spawn(watch(Api::<Namespace>::all(client), own, Arc::clone(&namespace)));
        Self { daemon, namespace, _tasks: tasks }
    }

    /// Returns whether the DaemonSet or its namespace is being deleted.
    pub fn is_under_way(&self) -> bool {
        [&self.daemon, &self.namespace].into_iter().any(|told| told.load(Ordering::Relaxed))
    }
}

/// Watches one object and stores whether it is deleted.
async fn watch<K>(api: Api<K>, name: String, told: Arc<AtomicBool>)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let events = watcher(api, watcher::Config::default().fields(&format!("metadata.name={name}")));
    let mut events = std::pin::pin!(kube::runtime::WatchStreamExt::default_backoff(events));
    while let Some(event) = events.next().await {
        if let Some(deleted) = event.as_ref().ok().and_then(deleted) {
            told.store(deleted, Ordering::Relaxed);
        }
    }
}

/// Returns whether the object is deleted after this event, or `None` if the event does not tell. A recreated object is not deleted.
fn deleted<K: Resource>(event: &Event<K>) -> Option<bool> {
    match event {
        Event::Apply(object) | Event::InitApply(object) => Some(object.meta().deletion_timestamp.is_some()),
        Event::Delete(_) => Some(true),
        // A list without the object proves nothing: it may never have been seen.
        Event::Init | Event::InitDone => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{Router, routing::get};
    use serde_json::json;
    use std::time::Duration;

    #[test]
    fn only_a_deletion_counts_until_the_daemonset_is_recreated() {
        let daemon = DaemonSet::default;
        let mut going = DaemonSet::default();
        going.metadata.deletion_timestamp = serde_json::from_value("2026-11-25T14:03:00Z".into()).unwrap();
        let told = |events: Vec<Event<DaemonSet>>| events.iter().filter_map(deleted).next_back().unwrap_or(false);
        assert!(!told(vec![Event::Init, Event::InitDone]));
        assert!(!told(vec![Event::Init, Event::InitApply(daemon()), Event::InitDone, Event::Apply(daemon())]));
        assert!(told(vec![Event::InitApply(daemon()), Event::Apply(going)]));
        assert!(told(vec![Event::InitApply(daemon()), Event::Delete(daemon()), Event::Init, Event::InitDone]));
        assert!(!told(vec![Event::Delete(daemon()), Event::Apply(daemon())]));
    }

    /// `kubectl delete namespace spillway` may stop the agents before it deletes their DaemonSet.
    #[tokio::test]
    async fn deletion_of_the_own_namespace_counts() {
        let going = json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": "spillway", "resourceVersion": "2", "deletionTimestamp": "2026-11-25T14:03:00Z"}});
        let list = json!({"kind": "NamespaceList", "apiVersion": "v1", "metadata": {"resourceVersion": "2"}, "items": [going]});
        let server = Router::new().route("/api/v1/namespaces", get(move || std::future::ready(list.to_string())));
        let uninstall = Uninstall::follow(Client::new(server, "spillway"));
        let wait = async {
            while !uninstall.is_under_way() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), wait).await.unwrap();
    }
}
