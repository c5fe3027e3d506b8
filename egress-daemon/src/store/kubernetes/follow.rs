//! Watches: one task for each kind, which retries forever.

use super::cache::Cache;
use super::namespace_of;
use super::needed::{Needed, more_needed, patience};
use crate::store::Kind;
use egress_objects::api::{EgressNode, FOLLOWED_BY_LABEL};
use futures::StreamExt;
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::{ApiResource, ObjectList};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Error};
use serde_json::Value;
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

/// The timeout of a request.
const REQUEST: Duration = Duration::from_secs(10);
/// The first and the maximum delay before a failed watch is retried. Half of the delay is random, so that thousands of agents do not query
/// a returning API server at the same moment.
const RETRY: Duration = Duration::from_millis(100);
const RETRY_AT_MOST: Duration = Duration::from_secs(10);
/// The time without an error after which a watch that had failed counts as resumed.
const QUIET: Duration = Duration::from_secs(5);
/// The interval at which the API server is checked for an answer. An idle agent sends no other requests.
const ASK: Duration = Duration::from_secs(20);
/// The interval at which the cluster is checked for an optional kind that it lacked.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// The objects that are watched.
#[derive(Clone, Debug)]
pub(super) struct Watched {
    pub(super) kind: Kind,
    which: Which,
}

/// The selection among the objects of a kind.
#[derive(Clone, Debug)]
enum Which {
    /// All objects that this process may read.
    All,
    /// The objects with these field values.
    Fields(String),
    /// The EgressNodes that the agent of this node needs.
    NeededBy(String),
}

impl Watched {
    /// Selects all objects of a kind that this process may read.
    pub(super) fn all(kind: Kind) -> Self {
        Watched { kind, which: Which::All }
    }

    /// Selects the objects with these field values.
    pub(super) fn fields(kind: Kind, selector: String) -> Self {
        Watched { kind, which: Which::Fields(selector) }
    }

    /// Selects the EgressNodes that the agent of a node needs.
    pub(super) fn needed_by(node: &str) -> Self {
        Watched { kind: Kind::EgressNode, which: Which::NeededBy(node.to_owned()) }
    }

    /// Returns the configuration of the watch.
    fn config(&self, part: bool) -> watcher::Config {
        let params = self.params(part);
        watcher::Config {
            label_selector: params.label_selector,
            field_selector: params.field_selector,
            ..Default::default()
        }
    }

    /// Returns the parameters of a list request.
    fn params(&self, part: bool) -> ListParams {
        match &self.which {
            Which::NeededBy(node) if part => ListParams::default().labels(&EgressNode::followed_from(node)),
            Which::Fields(selector) => ListParams::default().fields(selector),
            Which::All | Which::NeededBy(_) => ListParams::default(),
        }
    }

    /// Returns the node whose agent needs only some objects, if that is the selection.
    fn node(&self) -> Option<&str> {
        match &self.which {
            Which::NeededBy(node) => Some(node),
            Which::All | Which::Fields(_) => None,
        }
    }
}

/// Returns the API of a kind.
fn api(client: Client, kind: Kind) -> Api<DynamicObject> {
    of_kind(client, kind, &kind.resource())
}

/// Returns the API of a kind in one of its versions.
pub(super) fn of_kind(client: Client, kind: Kind, version: &ApiResource) -> Api<DynamicObject> {
    match namespace_of(kind) {
        Some(namespace) => Api::namespaced_with(client, namespace, version),
        None => Api::all_with(client, version),
    }
}

/// Returns the JSON of an object, with the apiVersion and kind that objects in lists lack.
pub(super) fn value(kind: Kind, object: &DynamicObject) -> Value {
    // Serialising numbers, texts and maps with texts as keys cannot fail.
    let mut value = serde_json::to_value(object).unwrap_or_default();
    value["apiVersion"] = Value::from(kind.api_version());
    value["kind"] = Value::from(kind.name());
    value
}

/// Follows the objects of a kind. An agent that once needs all EgressNodes follows all until it exits: its node may forward for a while
/// after it has ceased to be a gateway, and may become a gateway again.
pub(super) async fn follow(client: Client, watched: Watched, cache: Arc<Cache>) {
    let kind = watched.kind;
    if let Some(node) = watched.node() {
        let api = api(client.clone(), kind);
        if let Some(own) = named(&api, kind, node).await {
            cache.notice(kind, Event::Apply(own));
        }
        cache.follow(kind, true);
        tokio::select! {
            biased;
            () = all_needed(&api, kind, node, &cache) => {}
            () = take_in(&client, &watched, true, &cache) => {}
        }
        cache.follow(kind, false);
    }
    take_in(&client, &watched, false, &cache).await;
}

/// Waits until the agent of a node must follow all EgressNodes: it needs all, or one that exists but is not selected by its label.
async fn all_needed(api: &Api<DynamicObject>, kind: Kind, node: &str, cache: &Cache) {
    let patience = patience(chance());
    while let Needed::Missing(names) = more_needed(node, cache, patience).await {
        for name in names {
            let found = named(api, kind, &name).await.and_then(|found| serde_json::from_value(found).ok());
            if found.is_some_and(|object: EgressNode| !object.is_followed_from(node)) {
                tracing::warn!(
                    "EgressNode {name} is needed, but its label {FOLLOWED_BY_LABEL} does not select it: following all EgressNodes from now on"
                );
                return;
            }
        }
    }
}

/// Takes in the events of a watch.
async fn take_in(client: &Client, watched: &Watched, part: bool, cache: &Cache) {
    let kind = watched.kind;
    let mut events = pin!(watcher(api(client.clone(), kind), watched.config(part)));
    let mut retry = Retry::default();
    // A watch that was dropped may have left it so.
    let mut is_refused = true;
    let mut is_listing = true;
    loop {
        // A resumed watch is silent until an object changes, and a refused one fails immediately. A list may hang before it fails.
        let event = if is_refused && !is_listing {
            let Ok(event) = tokio::time::timeout(QUIET, events.next()).await else {
                is_refused = false;
                cache.refuses(kind, false);
                continue;
            };
            event
        } else {
            events.next().await
        };
        let Some(event) = event else { return };
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                is_refused = true;
                cache.refuses(kind, true);
                tracing::debug!(%kind, %error, "the watch failed");
                if kind.names_networks() && is_closed(of_api(&error)) {
                    cache.absent(kind);
                    cache.answers(true);
                    tokio::time::sleep(LOOK_AGAIN).await;
                    continue;
                }
                if kind.may_be_absent() && is_unknown(of_api(&error)) {
                    cache.absent(kind);
                }
                cache.answers(of_api(&error).is_some_and(is_answer));
                retry.wait(|| format!("{kind} objects are not followed: {}", reason(kind, &error))).await;
                // A resumed watch does not report that it resumed.
                if !cache.is_connected() {
                    cache.answers(answers(client).await);
                }
                continue;
            }
        };
        match event {
            Event::Init => is_listing = true,
            Event::InitDone => is_listing = false,
            _ => {}
        }
        if proves_success(&event) {
            if retry.is_over() {
                tracing::info!("{kind} objects are watched again");
            }
            if std::mem::take(&mut is_refused) {
                cache.refuses(kind, false);
            }
        }
        cache.notice(
            kind,
            match event {
                Event::Apply(object) => Event::Apply(value(kind, &object)),
                Event::Delete(object) => Event::Delete(value(kind, &object)),
                Event::Init => Event::Init,
                Event::InitApply(object) => Event::InitApply(value(kind, &object)),
                Event::InitDone => Event::InitDone,
            },
        );
    }
}

/// Returns whether an event proves that the watch works. Objects of a list do not: a later page of the list may fail again and again, and
/// each new attempt begins with the first page.
fn proves_success<T>(event: &Event<T>) -> bool {
    !matches!(event, Event::Init | Event::InitApply(_))
}

/// Checks periodically whether the API server answers. A frozen server keeps its connections, and its watches are silent as if no object
/// changed.
pub(super) async fn ask(client: Client, cache: Arc<Cache>) {
    loop {
        tokio::time::sleep(ASK).await;
        cache.answers(answers(&client).await);
    }
}

/// Lists the objects again, apart from the watch. Retries until a list succeeds.
pub(super) async fn list_again(client: Client, watched: Watched, cache: Arc<Cache>) {
    let kind = watched.kind;
    let api = api(client, kind);
    loop {
        let part = cache.is_part(kind);
        let Some(list) = list(&api, kind, &watched.params(part)).await else { return };
        let objects = list.items.iter().map(|object| value(kind, object)).collect();
        if cache.listed(kind, objects, part, list.metadata.resource_version.as_deref().unwrap_or_default()) {
            return;
        }
    }
}

/// Selects one object in a list, since a role that may list may lack the right to `get`.
pub(super) fn by_name(name: &str) -> ListParams {
    ListParams::default().fields(&format!("metadata.name={name}"))
}

/// Returns the JSON of the object with this name, if there is one. Retries until the API server answers.
async fn named(api: &Api<DynamicObject>, kind: Kind, name: &str) -> Option<Value> {
    let found = list(api, kind, &by_name(name)).await?;
    found.items.first().map(|object| value(kind, object))
}

/// Lists objects, with retries until a list succeeds; `None` if the cluster has no such kind.
async fn list(api: &Api<DynamicObject>, kind: Kind, params: &ListParams) -> Option<ObjectList<DynamicObject>> {
    let mut retry = Retry::default();
    loop {
        let why = match tokio::time::timeout(REQUEST, api.list(params)).await {
            Ok(Ok(list)) => return Some(list),
            Ok(Err(error)) if kind.may_be_absent() && is_unknown(Some(&error)) => return None,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the API server does not answer".to_owned(),
        };
        retry.wait(|| format!("{kind} objects cannot be listed: {why}")).await;
    }
}

/// Returns the error of a request to the API server, if that is why a watch failed.
fn of_api(error: &watcher::Error) -> Option<&Error> {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => Some(error),
        _ => None,
    }
}

/// Returns whether the API server itself has answered, with any result. An answer of a load balancer in front of it, or an error of its
/// database, does not count.
fn is_answer(error: &Error) -> bool {
    matches!(error, Error::Api(status) if status.code < 500)
}

/// Returns whether the API server answers now.
async fn answers(client: &Client) -> bool {
    match tokio::time::timeout(REQUEST, client.apiserver_version()).await {
        Ok(answer) => answer.err().is_none_or(|error| is_answer(&error)),
        Err(_) => false,
    }
}

/// Returns whether the cluster has no such kind.
fn is_unknown(error: Option<&Error>) -> bool {
    matches!(error, Some(Error::Api(status)) if status.code == 404)
}

/// Returns whether the cluster has no such kind, or denies access to it.
fn is_closed(error: Option<&Error>) -> bool {
    matches!(error, Some(Error::Api(status)) if matches!(status.code, 403 | 404))
}

/// Describes why a watch fails, and the remedy.
fn reason(kind: Kind, error: &watcher::Error) -> String {
    let folder =
        if kind.is_foreign() { "kubectl apply -f manifests/crds/foreign/" } else { "kubectl apply -k manifests/" };
    match of_api(error) {
        None => error.to_string(),
        error if is_unknown(error) => {
            format!("the cluster does not know the kind: install its CustomResourceDefinition ({folder})")
        }
        Some(Error::Api(status)) if matches!(status.code, 401 | 403) => {
            format!("{}: install the roles of this version ({})", status.message, roles_of(kind))
        }
        Some(other) => other.to_string(),
    }
}

/// Returns the place where the rights to a kind are defined.
fn roles_of(kind: Kind) -> &'static str {
    match kind {
        Kind::CiliumEgressGatewayPolicy => "the component manifests/components/cilium",
        Kind::Egress | Kind::ExternalIPPool => "the component manifests/components/antrea",
        _ => "kubectl apply -k manifests/",
    }
}

/// Returns a random number from 0 to 1.
fn chance() -> f64 {
    // Each hasher state has its own keys.
    f64::from(RandomState::new().hash_one(0) as u32) / f64::from(u32::MAX)
}

/// Backs off with each failure, and logs the first failure.
#[derive(Default)]
struct Retry {
    failures: u32,
}

impl Retry {
    async fn wait(&mut self, message: impl FnOnce() -> String) {
        if self.failures == 0 {
            tracing::warn!("{}; trying again", message());
        }
        let pause = RETRY_AT_MOST.min(RETRY * 2_u32.pow(self.failures.min(8)));
        self.failures += 1;
        tokio::time::sleep(pause / 2 + (pause / 2).mul_f64(chance())).await;
    }

    /// Records a success. Returns whether it follows a failure.
    fn is_over(&mut self) -> bool {
        std::mem::take(&mut self.failures) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_of_a_list_resets_the_backoff() {
        let events = [Event::Init, Event::InitApply(()), Event::InitDone, Event::Apply(()), Event::Delete(())];
        assert_eq!(events.each_ref().map(proves_success), [false, false, true, true, true]);
    }
}
