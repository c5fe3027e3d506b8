//! Detects whether the agents are being removed from the cluster. In that case, this agent cleans up its node when it ends.
//!
//! The only sign that counts is the deletion of the agents' DaemonSet. An unreachable API server or missing permissions do not count: after
//! a mistaken cleanup, pods' packets would leave with their node's address.

use futures::StreamExt as _;
use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{
    Api, Client,
    runtime::watcher::{self, Event, watcher},
};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};
use tokio::task::JoinHandle;

/// The name of the agents' DaemonSet, which is in their own namespace.
const NAME: &str = "spillway-agent";

/// Watches the agents' DaemonSet until this value is dropped.
#[derive(Debug)]
pub struct Uninstall {
    is_under_way: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Uninstall {
    /// Starts to watch the DaemonSet in the client's own namespace.
    pub fn follow(client: Client) -> Self {
        let api = Api::<DaemonSet>::default_namespaced(client);
        let is_under_way = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&is_under_way);
        let task = tokio::spawn(async move {
            let events = watcher(api, watcher::Config::default().fields(&format!("metadata.name={NAME}")));
            let mut events = std::pin::pin!(kube::runtime::WatchStreamExt::default_backoff(events));
            while let Some(event) = events.next().await {
                if let Some(deleted) = event.as_ref().ok().and_then(deleted) {
                    told.store(deleted, Ordering::Relaxed);
                }
            }
        });
        Self { is_under_way, task }
    }

    /// Returns whether the DaemonSet is being deleted.
    pub fn is_under_way(&self) -> bool {
        self.is_under_way.load(Ordering::Relaxed)
    }
}

impl Drop for Uninstall {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns whether the DaemonSet is deleted after this event, or `None` if the event does not tell. A recreated DaemonSet is not deleted.
fn deleted(event: &Event<DaemonSet>) -> Option<bool> {
    match event {
        Event::Apply(daemon) | Event::InitApply(daemon) => Some(daemon.metadata.deletion_timestamp.is_some()),
        Event::Delete(_) => Some(true),
        // A list without the DaemonSet proves nothing: it may never have been seen.
        Event::Init | Event::InitDone => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
