//! Writes of one object, with compare-and-swap under the lock.

use super::Files;
use super::parse::is_name;
use super::record::{generation_content, store, time_now, uid, version};
use crate::store::kind::Kind;
use crate::store::view::Item;
use crate::store::{Guard, ObjectRef, StoreError, Verb, Write};
use egress_objects::api::Violation;
use serde_json::{Map, Value};
use std::fs;
use std::io;

/// The metadata that the store sets instead of the writer.
const OURS: [&str; 4] = ["uid", "creationTimestamp", "generation", "resourceVersion"];

impl Files {
    pub(super) fn write_blocking(&self, write: Write) -> Result<Value, StoreError> {
        let Write { verb, target, object: mut value, guard } = write;
        self.admit(verb, &target, &mut value)?;
        let written = self.swap(verb, &target, &value, guard.as_ref())?;
        let _order = self.order.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.show(verb, &target, written)
    }

    /// Rejects writes that would break rules.
    fn admit(&self, verb: Verb, target: &ObjectRef, value: &mut Value) -> Result<(), StoreError> {
        let refuse = |violations| Err(StoreError::Refused { object: target.clone(), violations });
        let one = |field: &str, message: &str, remedy: &str| {
            vec![Violation { field: field.to_owned(), message: message.to_owned(), remedy: remedy.to_owned() }]
        };
        if !is_name(&target.key.name) {
            return refuse(one("metadata.name", "this is not a name", "write lower-case letters, digits, - and ."));
        }
        if target.kind.is_users() && !(verb == Verb::ReplaceStatus && target.kind.has_our_status()) {
            return refuse(one("", "users write objects of this kind", "write it into a file of the directory"));
        }
        let mut violations = if verb == Verb::Delete { Vec::new() } else { self.parser.check(value) };
        if target.kind.is_users() {
            // Only the status is stored. The rest is the user's, and was checked against its own API version when the file was read.
            violations.retain(|violation| violation.field.starts_with("status"));
        }
        if violations.is_empty() { Ok(()) } else { refuse(violations) }
    }

    /// Writes if no other writer did since the read. Returns the stored or deleted object or record.
    fn swap(&self, verb: Verb, target: &ObjectRef, wanted: &Value, guard: Option<&Guard>) -> Result<Value, StoreError> {
        let unavailable =
            |error: io::Error| StoreError::Unavailable { object: target.clone(), message: error.to_string() };
        let mut lock = self.own.exclusive().map_err(unavailable)?;
        if let Some(guard) = guard {
            let lease = ObjectRef { kind: Kind::Lease, key: guard.lease.clone() };
            if !self.own.load(&lease).map_err(unavailable)?.is_some_and(|lease| is_held(&lease, guard.epoch)) {
                return Err(StoreError::Fenced(target.clone()));
            }
        }
        let same_namespace = |value: &Value| {
            let namespace = value.pointer("/metadata/namespace").and_then(Value::as_str).unwrap_or_default();
            target.kind.is_users() || namespace == target.key.namespace
        };
        let current = self.own.load(target).map_err(unavailable)?;
        let current = match (verb, current) {
            (Verb::Create, Some(_)) => return Err(StoreError::AlreadyExists(target.clone())),
            (Verb::Create, None) => None,
            (_, None) => return Err(StoreError::NotFound(target.clone())),
            (_, Some(current)) if !same_namespace(&current) => return Err(StoreError::NotFound(target.clone())),
            (_, Some(current)) if version(&current).is_none() || version(&current) != version(wanted) => {
                return Err(StoreError::Conflict(target.clone()));
            }
            (_, current) => current,
        };
        let mut next = match (&current, verb) {
            (Some(current), Verb::Delete) => {
                fs::remove_file(self.own.path(target)).map_err(unavailable)?;
                return Ok(current.clone());
            }
            (Some(current), Verb::ReplaceStatus) => with_status(current.clone(), wanted.get("status")),
            (current, _) => {
                let status = current.as_ref().and_then(|current| current.get("status"));
                with_metadata(with_status(wanted.clone(), status), current.as_ref(), target)
            }
        };
        if current.as_ref() == Some(&next) {
            return Ok(next);
        }
        let number = lock.next_version(current.as_ref().and_then(version).unwrap_or(0)).map_err(unavailable)?;
        if let Some(metadata) = next.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.insert("resourceVersion".to_owned(), Value::from(number.to_string()));
        }
        store(&self.own, target, &next).map_err(unavailable)?;
        Ok(next)
    }

    /// Adds a write to the view, unless the view is ahead of it. Returns the whole object.
    fn show(&self, verb: Verb, target: &ObjectRef, written: Value) -> Result<Value, StoreError> {
        let mut whole = written;
        let seen = self.view().get(target.kind, &target.key).and_then(|object| target.kind.encode(&object));
        if target.kind.is_users() {
            let record = whole;
            whole = seen.clone().ok_or_else(|| StoreError::NotFound(target.clone()))?;
            whole = with_status(whole, record.get("status"));
            let number = record.pointer("/metadata/resourceVersion").cloned().unwrap_or_default();
            if let Some(metadata) = whole.get_mut("metadata").and_then(Value::as_object_mut) {
                metadata.insert("resourceVersion".to_owned(), number);
            }
        }
        let ahead = seen.as_ref().and_then(version) > version(&whole);
        if !ahead {
            let item = if verb == Verb::Delete {
                None
            } else {
                let object = target
                    .kind
                    .decode(whole.clone())
                    .map_err(|error| StoreError::Unavailable { object: target.clone(), message: error.to_string() })?;
                Some(Item { version: version(&whole).unwrap_or(0).to_string(), object })
            };
            self.update(|view| view.set(target.kind, target.key.clone(), item));
        }
        Ok(whole)
    }
}

/// Returns whether the lease has a holder and this epoch.
fn is_held(lease: &Value, epoch: u64) -> bool {
    lease.pointer("/spec/leaseTransitions").and_then(Value::as_u64) == Some(epoch)
        && lease.pointer("/spec/holderIdentity").and_then(Value::as_str).is_some_and(|holder| !holder.is_empty())
}

fn with_status(mut value: Value, status: Option<&Value>) -> Value {
    if let Some(fields) = value.as_object_mut() {
        match status {
            Some(status) => fields.insert("status".to_owned(), status.clone()),
            None => fields.remove("status"),
        };
    }
    value
}

/// Sets the metadata that the store controls, from the current object or new.
fn with_metadata(mut value: Value, current: Option<&Value>, target: &ObjectRef) -> Value {
    let old: Map<String, Value> =
        current.and_then(|current| current.get("metadata")).and_then(Value::as_object).cloned().unwrap_or_default();
    let changed = current.is_none_or(|current| generation_content(current) != generation_content(&value));
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        for name in OURS {
            match old.get(name) {
                Some(value) => metadata.insert(name.to_owned(), value.clone()),
                None => metadata.remove(name),
            };
        }
        if current.is_none() {
            metadata.insert("creationTimestamp".to_owned(), time_now());
            metadata.insert("uid".to_owned(), Value::from(uid(target)));
        }
        if target.kind != Kind::Lease && changed {
            let generation = old.get("generation").and_then(Value::as_i64).unwrap_or(0);
            metadata.insert("generation".to_owned(), Value::from(generation + 1));
        }
    }
    value
}
