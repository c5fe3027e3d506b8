//! The record of a user's object, and the metadata of objects in general.

use super::Files;
use super::own::{self, Own};
use super::packed::Packed;
use super::parse::{Parsed, hash};
use super::user::Stamp;
use crate::store::ObjectRef;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};
use std::io;
use std::path::Path;

/// Annotation of a record: the hash of the content of its generation.
const CONTENT: &str = "spillway.io/content";

/// Returns the resourceVersion of an object or record.
pub(super) fn version(value: &Value) -> Option<u64> {
    value.pointer("/metadata/resourceVersion")?.as_str()?.parse().ok()
}

/// The stored data about a user's object.
#[derive(Clone, Debug)]
pub(super) struct Record {
    /// The hash of the content of its generation.
    pub(super) content: String,
    /// Its resourceVersion.
    pub(super) version: Option<u64>,
    whole: Packed,
}

impl Record {
    pub(super) fn new(value: &Value) -> Self {
        Record { content: content_hash(value).to_owned(), version: version(value), whole: Packed::new(value) }
    }
}

fn content_hash(record: &Value) -> &str {
    let annotations = record.pointer("/metadata/annotations").and_then(Value::as_object);
    annotations.and_then(|annotations| annotations.get(CONTENT)).and_then(Value::as_str).unwrap_or_default()
}

/// Returns a uid that is the same in every process at any time.
pub(super) fn uid(target: &ObjectRef) -> String {
    let hash = hash(&Value::from(target.to_string()).to_string());
    let part = |range| hash.get(range).unwrap_or_default();
    format!("{}-{}-{}-{}-{}", part(0..8), part(8..12), part(12..16), part(16..20), part(20..32))
}

/// Returns the current time in the format of Kubernetes metadata.
pub(super) fn time_now() -> Value {
    serde_json::to_value(Time(Timestamp::now())).unwrap_or_default()
}

/// Creates or renews the record of an object. If the file has changed since it was read, returns the present record, if any, because
/// another process may have a newer version.
pub(super) fn make_record(files: &Files, parsed: &Parsed, source: Option<(&Path, Stamp)>) -> io::Result<Option<Value>> {
    let Some((path, stamp)) = source else { return Ok(None) };
    let mut lock = files.own.exclusive()?;
    let target = &parsed.target;
    let last = files.own.load(target)?;
    if let Some(last) = &last
        && content_hash(last) == parsed.hash
    {
        return Ok(Some(last.clone()));
    }
    if own::stamp(&files.directory.join(path)).ok() != Some(stamp) {
        return Ok(last);
    }
    let field = |name: &str| last.as_ref().and_then(|last| last.pointer(&format!("/metadata/{name}")).cloned());
    let generation = field("generation").and_then(|generation| generation.as_i64()).unwrap_or(0) + 1;
    let version = lock.next_version(last.as_ref().and_then(version).unwrap_or(0))?;
    let mut record = json!({
        "apiVersion": target.kind.api_version(),
        "kind": target.kind.name(),
        "metadata": {
            "name": target.key.name,
            "uid": uid(target),
            "creationTimestamp": field("creationTimestamp").unwrap_or_else(time_now),
            "generation": generation,
            "resourceVersion": version.to_string(),
            "annotations": { CONTENT: parsed.hash },
        },
    });
    if let (Some(status), Some(fields)) = (last.and_then(|last| last.get("status").cloned()), record.as_object_mut()) {
        fields.insert("status".to_owned(), status);
    }
    store(&files.own, target, &record)?;
    Ok(Some(record))
}

/// Writes an object or record. The caller must hold the exclusive lock.
pub(super) fn store(own: &Own, target: &ObjectRef, value: &Value) -> io::Result<()> {
    let text = serde_saphyr::to_string(value).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    own.replace(&own.path(target), text.as_bytes())
}

/// Returns the object of a file with the fields that its record and Spillway add.
pub(super) fn merge(parsed: &Parsed, record: Option<&Record>, version: &str) -> Value {
    let mut value = parsed.object.value();
    let record = record.map(|record| record.whole.value());
    let target = &parsed.target;
    let recorded =
        |name: &str| record.as_ref().and_then(|record| record.pointer(&format!("/metadata/{name}")).cloned());
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        let mut fill = |name: &str, value: Option<Value>| {
            if let Some(value) = value
                && !metadata.contains_key(name)
            {
                metadata.insert(name.to_owned(), value);
            }
        };
        fill("uid", Some(Value::from(uid(target))));
        fill("creationTimestamp", recorded("creationTimestamp"));
        if target.kind.is_namespaced() {
            fill("namespace", Some(Value::from(target.key.namespace.clone())));
        }
        metadata.insert("generation".to_owned(), recorded("generation").unwrap_or(Value::from(1)));
        metadata.insert("resourceVersion".to_owned(), Value::from(version));
    }
    if let (Some(status), Some(fields)) =
        (record.as_ref().and_then(|record| record.get("status")), value.as_object_mut())
    {
        fields.insert("status".to_owned(), status.clone());
    }
    value
}

/// Returns the fields of an object other than its metadata and status. A change to them is a new generation.
pub(super) fn generation_content(value: &Value) -> Map<String, Value> {
    let fields = value.as_object().into_iter().flatten();
    fields
        .filter(|(name, _)| !matches!(name.as_str(), "metadata" | "status"))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}
