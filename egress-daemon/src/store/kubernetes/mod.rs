//! The store on the Kubernetes API: one watch for each kind that the reader needs, and writes that compare and swap on
//! `metadata.resourceVersion`.
//!
//! While the API server does not answer, the cache stays as it is, and watches and leases are retried. In Kubernetes, a lease cannot fence
//! a write of another object, so a leader checks before each write that it has renewed its lease recently. A write that arrives later
//! conflicts with a write of the next leader, or the next leader sees it and plans anew.

mod cache;
mod client;
mod follow;
mod needed;
mod notes;
mod trim;
mod write;

pub use client::ConnectError;

use super::kind::Erased;
use super::lease::{LEASE_NAMESPACE, gateway_lease};
use super::{Backend, Key, Kind, Note, Store, StoreError, StoreProblem, Write};
use cache::Cache;
use follow::Watched;
use futures::future::{BoxFuture, join_all};
use kube::Client;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// The interval of log messages while waiting for the API server.
const COMPLAIN: Duration = Duration::from_secs(10);
/// The maximum number of notes that wait to be sent. Further notes are dropped.
const NOTES: usize = 256;

/// The reader of a store. An agent must not follow objects that only the controller needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reader {
    /// The agent of this node: all objects except CNIs' kinds, other nodes' pods and Leases, and, if not a gateway, most EgressNodes.
    Agent(String),
    /// A controller: all objects except ServiceCIDRs.
    Controller,
}

impl Reader {
    /// Returns the name of its writes in `metadata.managedFields`, and of the source of its Events.
    fn name(&self) -> &'static str {
        match self {
            Reader::Agent(_) => "spillway-agent",
            Reader::Controller => "spillway-controller",
        }
    }

    fn watched(&self, foreign: &[Kind]) -> Vec<Watched> {
        let watched = |kind| match (self, kind) {
            (Reader::Agent(node), Kind::Pod) => Some(Watched::fields(kind, format!("spec.nodeName={node}"))),
            (Reader::Agent(node), Kind::Lease) => {
                Some(Watched::fields(kind, format!("metadata.name={}", gateway_lease(node))))
            }
            (Reader::Agent(node), Kind::EgressNode) => Some(Watched::needed_by(node)),
            (Reader::Controller, Kind::ServiceCIDR) => None,
            _ => Some(Watched::all(kind)),
        };
        // The controller passes the networks that CNIs name to agents.
        let networks = Kind::of_networks().filter(|_| *self == Reader::Controller);
        Kind::native().chain(foreign.iter().copied()).chain(networks).filter_map(watched).collect()
    }
}

/// A store on a cluster.
pub struct Kubernetes {
    client: Client,
    writer: &'static str,
    cache: Arc<Cache>,
    notes: mpsc::Sender<Note>,
    /// The objects that are followed.
    watched: Vec<Watched>,
    /// The tasks, which end with the store.
    _tasks: JoinSet<()>,
}

impl Kubernetes {
    /// Returns a client for the cluster of a kubeconfig, or for the cluster in which this pod runs. Connects on first use.
    pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
        client::connect(kubeconfig).await
    }

    /// Returns a client for the cluster that `kubectl` would use with these options: from the kubeconfig, from the files that `$KUBECONFIG`
    /// names, or from `~/.kube/config`. In a pod without a kubeconfig, that is the pod's cluster.
    pub async fn client_as_kubectl(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Client, ConnectError> {
        client::connect_as_kubectl(kubeconfig, context).await
    }

    /// Opens a store. Waits, without a time limit, until all kinds that the reader needs have been listed, and the `foreign` kinds that
    /// the cluster knows. The store's cache follows the cluster until its last clone is dropped.
    pub async fn open(client: Client, reader: &Reader, foreign: &[Kind]) -> Store {
        let cache = Arc::new(Cache::default());
        let mut tasks = JoinSet::new();
        let watched = reader.watched(foreign);
        let kinds: Vec<Kind> = watched.iter().map(|watched| watched.kind).collect();
        for watched in watched.iter().cloned() {
            tasks.spawn(follow::follow(client.clone(), watched, Arc::clone(&cache)));
        }
        tasks.spawn(follow::ask(client.clone(), Arc::clone(&cache)));
        let (notes, waiting) = mpsc::channel(NOTES);
        tasks.spawn(notes::send(client.clone(), Arc::clone(&cache), reader.name(), waiting));
        let mut changes = cache.changes();
        loop {
            let missing = cache.missing(&kinds);
            if missing.is_empty() {
                break;
            }
            if tokio::time::timeout(COMPLAIN, changes.changed()).await.is_err() {
                let missing: Vec<&str> = missing.into_iter().map(Kind::name).collect();
                tracing::warn!("still waiting for the API server to list {}", missing.join(", "));
            }
        }
        Store::new(Arc::new(Kubernetes { client, writer: reader.name(), cache, notes, watched, _tasks: tasks }))
    }
}

impl Backend for Kubernetes {
    fn list(&self, kind: Kind) -> Vec<Erased> {
        self.cache.list(kind)
    }

    fn get(&self, kind: Kind, key: &Key) -> Option<Erased> {
        self.cache.get(kind, key)
    }

    fn revision(&self, kind: Kind) -> u64 {
        self.cache.revision(kind)
    }

    fn changed(&self, kind: Kind, revision: u64) -> Option<Vec<Key>> {
        self.cache.changed(kind, revision)
    }

    fn heard(&self, kind: Kind) -> u64 {
        self.cache.heard(kind)
    }

    fn is_whole(&self, kind: Kind) -> bool {
        self.cache.is_whole(kind)
    }

    fn problems(&self) -> Vec<StoreProblem> {
        self.cache.problems()
    }

    fn is_connected(&self) -> bool {
        self.cache.is_connected()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.cache.changes()
    }

    fn refresh(&self) -> BoxFuture<'static, ()> {
        let ours = self.watched.iter().filter(|w| !w.kind.is_users() || w.kind.has_our_status());
        let lists =
            ours.map(|watched| follow::list_again(self.client.clone(), watched.clone(), Arc::clone(&self.cache)));
        let lists = join_all(lists);
        Box::pin(async move {
            lists.await;
        })
    }

    fn write(&self, write: Write) -> BoxFuture<'static, Result<Value, StoreError>> {
        Box::pin(write::write(self.client.clone(), self.writer, Arc::clone(&self.cache), write))
    }

    fn note(&self, note: Note) {
        if self.notes.try_send(note).is_err() {
            tracing::debug!("cannot record an event: too many are queued");
        }
    }
}

/// Returns the namespace of all objects of a kind that Spillway writes.
fn namespace_of(kind: Kind) -> Option<&'static str> {
    (kind == Kind::Lease).then_some(LEASE_NAMESPACE)
}
