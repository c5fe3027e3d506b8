//! Writes, with compare-and-swap on the resourceVersion that the writer read.
//!
//! Spillway's own objects are replaced. The status of a user's object is applied (server-side apply) with Spillway's field manager, so
//! that `kubectl` shows the owner of each field.

use super::cache::Cache;
use super::follow::{by_name, of_kind, value};
use super::trim::version;
use crate::store::lease::stated_duration;
use crate::store::{Guard, Kind, ObjectRef, StoreError, Verb, Write};
use egress_core::health::terms;
use egress_objects::api::Violation;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{ApiResource, Status};
use kube::{Client, Error};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The timeout of a write.
const REQUEST: Duration = Duration::from_secs(5);

/// Writes an object, and returns it as the API server has stored it.
pub(super) async fn write(
    client: Client,
    writer: &'static str,
    cache: Arc<Cache>,
    write: Write,
) -> Result<Value, StoreError> {
    let Write { verb, target, object, guard } = write;
    if guard.is_some_and(|guard| !is_held(&cache, &guard)) {
        return Err(StoreError::Fenced(target));
    }
    if verb == Verb::ReplaceStatus && target.kind.is_foreign() && !differs(&cache, &target, &object) {
        return Ok(object);
    }
    // The writer saw no object, but one now exists. The API server would reject an update as invalid, and would delete unconditionally.
    if verb != Verb::Create && version(&object).is_empty() {
        return Err(StoreError::Conflict(target));
    }
    let sent = Instant::now();
    let version = match verb {
        Verb::ReplaceStatus => target.kind.resource_for_status(&object),
        _ => target.kind.resource(),
    };
    let api = match target.kind.is_users() && target.kind.is_namespaced() {
        true => Api::namespaced_with(client, &target.key.namespace, &version),
        false => of_kind(client, target.kind, &version),
    };
    let result = tokio::time::timeout(REQUEST, send(&api, writer, verb, &target, &version, &object)).await;
    let written = match result {
        Ok(Ok(written)) => written,
        Ok(Err(Error::Api(status)))
            if verb == Verb::ReplaceStatus && target.kind.is_foreign() && status.code == 404 =>
        {
            // The answer is the same for a removed object and for a definition without a status.
            match tokio::time::timeout(REQUEST, api.list_metadata(&by_name(&target.key.name))).await {
                Ok(Ok(list)) if !list.items.is_empty() => {}
                _ => return Err(StoreError::NotFound(target)),
            }
            cache.lacks(target.kind, None);
            return Ok(object);
        }
        Ok(Err(error)) => {
            let refused = refusal(verb, target, error);
            match &refused {
                StoreError::NotFound(target) => cache.gone(target, &object),
                // The answer to the last renewal may be lost. A late watch must not make the next renewals fail, nor an agent's next writes
                // of its status after the controller has written the rest of the object.
                StoreError::Conflict(target) | StoreError::AlreadyExists(target)
                    if target.kind == Kind::Lease || target.kind == Kind::EgressNode && verb == Verb::ReplaceStatus =>
                {
                    read(&api, &cache, target).await;
                }
                _ => {}
            }
            return Err(refused);
        }
        Err(_) => {
            let message = format!("the API server did not answer within {REQUEST:?}");
            return Err(StoreError::Unavailable { object: target, message });
        }
    };
    if verb == Verb::Delete {
        cache.gone(&target, &object);
        return Ok(object);
    }
    if target.kind == Kind::Lease {
        cache.renewed(&target.key, sent);
    }
    let written = value(target.kind, &written);
    if verb == Verb::ReplaceStatus && target.kind.is_foreign() {
        let of = |object: &Value| object.get("status").and_then(Value::as_object).cloned().unwrap_or_default();
        let kept = of(&written);
        let lost = of(&object).into_iter().map(|(field, _)| field).filter(|field| !kept.contains_key(field));
        cache.lacks(target.kind, Some(lost.collect()));
    }
    cache.wrote(target.kind, written.clone());
    Ok(written)
}

/// Asks the API server for an object, which the cache then shows if it exists.
async fn read(api: &Api<DynamicObject>, cache: &Cache, target: &ObjectRef) {
    let Ok(Ok(list)) = tokio::time::timeout(REQUEST, api.list(&by_name(&target.key.name))).await else { return };
    if let Some(object) = list.items.first() {
        cache.wrote(target.kind, value(target.kind, object));
    }
}

async fn send(
    api: &Api<DynamicObject>,
    writer: &'static str,
    verb: Verb,
    target: &ObjectRef,
    version: &ApiResource,
    object: &Value,
) -> kube::Result<DynamicObject> {
    let name = &target.key.name;
    let posted = PostParams { dry_run: false, field_manager: Some(writer.to_owned()) };
    let typed = |value: &Value| serde_json::from_value::<DynamicObject>(value.clone()).map_err(Error::SerdeError);
    let text = |path| object.pointer(path).and_then(Value::as_str).map(ToOwned::to_owned);
    match verb {
        Verb::Create => api.create(&posted, &typed(object)?).await,
        Verb::Replace => api.replace(name, &posted, &typed(object)?).await,
        Verb::ReplaceStatus if target.kind.is_users() => {
            let fields = json!({
                "apiVersion": version.api_version,
                "kind": target.kind.name(),
                "metadata": {"name": name, "resourceVersion": text("/metadata/resourceVersion")},
                "status": object.get("status"),
            });
            api.patch_status(name, &PatchParams::apply(writer).force(), &Patch::Apply(&fields)).await
        }
        Verb::ReplaceStatus => api.replace_status(name, &posted, &typed(object)?).await,
        Verb::Delete => {
            let preconditions =
                Preconditions { resource_version: text("/metadata/resourceVersion"), uid: text("/metadata/uid") };
            let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            api.delete(name, &parameters).await?;
            typed(object)
        }
    }
}

/// Returns whether a lease has this epoch, and this process renewed it so recently that no other process can have taken it over.
fn is_held(cache: &Cache, guard: &Guard) -> bool {
    let Some(lease) = cache.get(Kind::Lease, &guard.lease).and_then(|lease| lease.downcast::<Lease>().ok()) else {
        return false;
    };
    let Some(spec) = lease.spec.as_ref() else { return false };
    let held = spec.holder_identity.as_deref().is_some_and(|holder| !holder.is_empty());
    let same = spec.lease_transitions.and_then(|epoch| u64::try_from(epoch).ok()) == Some(guard.epoch);
    let duration = terms::counted(stated_duration(&lease).unwrap_or_default());
    held && same && cache.last_renewal(&guard.lease).is_some_and(|sent| sent.elapsed() < duration)
}

/// Returns whether the status of another system's object differs from the present status in a field that can be written. Cilium's own
/// definition has no status (Events replace it), and Antrea's definitions have fewer fields than Spillway's.
fn differs(cache: &Cache, target: &ObjectRef, object: &Value) -> bool {
    let writable = |object: &Value| cache.writable(target.kind, object.get("status").cloned().unwrap_or_default());
    let present = cache.get(target.kind, &target.key).and_then(|present| target.kind.encode(&present));
    match writable(object) {
        None => false,
        Some(wanted) => present.as_ref().and_then(writable) != Some(wanted),
    }
}

fn refusal(verb: Verb, target: ObjectRef, error: Error) -> StoreError {
    let Error::Api(status) = error else {
        return StoreError::Unavailable { object: target, message: error.to_string() };
    };
    let Status { code, reason, message, details, .. } = *status;
    let causes = details.as_ref().map(|details| details.causes.as_slice()).unwrap_or_default();
    let names_object = details.as_ref().is_some_and(|details| details.name == target.key.name);
    match (code, reason.as_str()) {
        (404, _) if verb == Verb::Create || !names_object => {
            let remedy = "install the namespace and the CustomResourceDefinitions (kubectl apply -k manifests/)";
            StoreError::Unavailable { object: target, message: format!("{message}: {remedy}") }
        }
        (404, _) => StoreError::NotFound(target),
        (409, "AlreadyExists") => StoreError::AlreadyExists(target),
        (409, _) => StoreError::Conflict(target),
        (400 | 422, _) => {
            let violation = |field: &str, message: &str| Violation {
                field: field.to_owned(),
                message: message.to_owned(),
                remedy: "install CustomResourceDefinitions and programs of the same version".to_owned(),
            };
            let mut violations: Vec<Violation> =
                causes.iter().map(|cause| violation(&cause.field, &cause.message)).collect();
            if violations.is_empty() {
                violations.push(violation("", &message));
            }
            StoreError::Refused { object: target, violations }
        }
        (401 | 403, _) => {
            let remedy = "install the roles of this version (kubectl apply -k manifests/)";
            StoreError::Unavailable { object: target, message: format!("{message}: {remedy}") }
        }
        _ => StoreError::Unavailable { object: target, message },
    }
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
