//! Parses the text of a user's file into objects and problems. Pure.

use super::packed::Packed;
use crate::store::{Key, Kind, ObjectRef, StoreProblem};
use egress_objects::api::{Rules, Violation, crds, unknown_field};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value};
use siphasher::sip128::{Hasher128, SipHasher13};
use std::collections::BTreeMap;
use std::hash::Hasher;
use std::path::Path;

/// An object of a file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Parsed {
    pub(super) target: ObjectRef,
    /// The number of its document in the file, from 1.
    pub(super) document: usize,
    /// The object without nulls, and without the status if Spillway writes it.
    pub(super) object: Packed,
    /// A hash of `object` that is the same on every machine.
    pub(super) hash: String,
}

/// The rules of every kind that has any, by apiVersion and kind.
pub(super) struct Parser {
    rules: BTreeMap<(String, String), Rules>,
}

impl Parser {
    pub(super) fn new() -> Result<Self, serde_json::Error> {
        let mut rules = BTreeMap::new();
        for (_, crd) in crds() {
            for version in &crd.spec.versions {
                let api_version = format!("{}/{}", crd.spec.group, version.name);
                rules.insert((api_version, crd.spec.names.kind.clone()), Rules::new(version)?);
            }
        }
        Ok(Parser { rules })
    }

    /// Returns the rules that an object breaks, for kinds that have rules. Removes nulls from the object.
    pub(super) fn check(&self, value: &mut Value) -> Vec<Violation> {
        let text = |field: &str| value[field].as_str().unwrap_or_default().to_owned();
        if let Some(rules) = self.rules.get(&(text("apiVersion"), text("kind"))) {
            return rules.check(value);
        }
        egress_objects::api::remove_nulls(value);
        Vec::new()
    }

    /// Returns every good object of a file, and the problems of the rest. Returns no objects if the file is not YAML.
    pub(super) fn parse(&self, file: &Path, text: &[u8]) -> (Vec<Parsed>, Vec<StoreProblem>) {
        let problem = |document, violation: Violation| StoreProblem {
            file: file.to_owned(),
            document,
            object: None,
            field: Some(violation.field).filter(|field| !field.is_empty()),
            message: violation.message,
            remedy: violation.remedy,
        };
        let documents: Vec<Value> = match serde_saphyr::from_slice_multiple(text) {
            Ok(documents) => documents,
            Err(error) => return (Vec::new(), vec![problem(None, not_yaml(&error))]),
        };
        let (mut objects, mut problems) = (Vec::new(), Vec::new());
        for (index, document) in documents.into_iter().enumerate() {
            let document_number = index + 1;
            for object in items(document) {
                let target = target(&object);
                let found = match &target {
                    Ok(target) => self.object(target.clone(), document_number, object, &mut objects),
                    Err(violation) => vec![violation.clone()],
                };
                problems.extend(found.into_iter().map(|violation| StoreProblem {
                    object: target.as_ref().ok().cloned(),
                    ..problem(Some(document_number), violation)
                }));
            }
        }
        (objects, problems)
    }

    /// Adds the object unless it breaks a rule. Returns its problems, which for an added object are only ignored fields.
    fn object(
        &self,
        target: ObjectRef,
        document: usize,
        mut value: Value,
        objects: &mut Vec<Parsed>,
    ) -> Vec<Violation> {
        let kind = target.kind;
        if kind.has_our_status()
            && let Some(fields) = value.as_object_mut()
        {
            fields.remove("status");
        }
        let mut found = self.check(&mut value);
        found.extend(unknown_metadata(&value));
        if !found.is_empty() {
            return found;
        }
        let ignored = match kind.understood(value.clone()) {
            Ok(understood) => ignored_fields(&value, &understood),
            Err(error) => return vec![wrong_shape(&error)],
        };
        let object = Packed::new(&value);
        objects.push(Parsed { hash: hash(object.text()), target, document, object });
        ignored
    }
}

/// Returns a hash of a text as 32 hexadecimal digits, the same on every machine.
pub(super) fn hash(text: &str) -> String {
    let mut hasher = SipHasher13::new();
    hasher.write(text.as_bytes());
    let hash = hasher.finish128();
    format!("{:016x}{:016x}", hash.h1, hash.h2)
}

fn violation(field: &str, message: String, remedy: impl Into<String>) -> Violation {
    Violation { field: field.to_owned(), message, remedy: remedy.into() }
}

fn not_yaml(error: &serde_saphyr::Error) -> Violation {
    let text = error.to_string();
    let first = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it cannot be read");
    let first = first.strip_prefix("error: ").unwrap_or(first);
    violation("", format!("the file is not YAML: {first}"), "correct the file; its last good version stays in force")
}

/// Returns the objects of a document: the document itself, or the items of a List as `kubectl get -o yaml` writes it.
fn items(document: Value) -> Vec<Value> {
    match document {
        Value::Object(mut fields)
            if fields.get("kind").and_then(Value::as_str) == Some("List")
                && fields.get("items").is_some_and(Value::is_array) =>
        {
            match fields.remove("items") {
                Some(Value::Array(items)) => items,
                _ => Vec::new(),
            }
        }
        document => vec![document],
    }
}

fn target(object: &Value) -> Result<ObjectRef, Violation> {
    let Some(fields) = object.as_object() else {
        return Err(violation(
            "",
            "this is not an object".to_owned(),
            "write a map with apiVersion, kind, metadata and spec",
        ));
    };
    let text = |name: &str| fields.get(name).and_then(Value::as_str).unwrap_or_default();
    let users: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| kind.is_users()).collect();
    // Kinds of different systems may have the same name.
    let named = || Kind::ALL.into_iter().filter(|kind| kind.name() == text("kind"));
    let Some(kind) = named().find(|kind| kind.api_version() == text("apiVersion")).or_else(|| named().next()) else {
        let mut known: Vec<_> = users.iter().map(|kind| kind.name()).collect();
        known.sort_unstable();
        known.dedup();
        return Err(violation(
            "kind",
            format!("unknown kind \"{}\"", text("kind")),
            format!("the kinds here are {}; keep other objects in another directory", known.join(", ")),
        ));
    };
    if !kind.is_users() {
        return Err(violation(
            "kind",
            format!("Spillway writes objects of the kind {kind} itself"),
            "remove it from the file",
        ));
    }
    if !kind.reads(text("apiVersion")) {
        return Err(violation(
            "apiVersion",
            format!("{kind} has no version \"{}\"", text("apiVersion")),
            format!("write apiVersion: {}", kind.api_version()),
        ));
    }
    let metadata = fields.get("metadata").and_then(Value::as_object);
    let meta = |name: &str| metadata.and_then(|metadata| metadata.get(name)).and_then(Value::as_str);
    let name = meta("name").unwrap_or_default();
    if !is_name(name) {
        return Err(violation(
            "metadata.name",
            format!("\"{name}\" is not a name"),
            "write 1 to 253 lower-case letters, digits, - and ., with a letter or digit at both ends",
        ));
    }
    let namespace = match (kind.is_namespaced(), meta("namespace")) {
        (true, namespace) => namespace.unwrap_or("default"),
        (false, None) => "",
        (false, Some(_)) => {
            return Err(violation(
                "metadata.namespace",
                format!("objects of the kind {kind} have no namespace"),
                "remove the field",
            ));
        }
    };
    if !namespace.is_empty() && (!is_name(namespace) || namespace.contains('.') || namespace.len() > 63) {
        return Err(violation(
            "metadata.namespace",
            format!("\"{namespace}\" is not a name"),
            "write 1 to 63 lower-case letters, digits and -, with a letter or digit at both ends",
        ));
    }
    Ok(ObjectRef { kind, key: Key::namespaced(namespace, name) })
}

/// Returns whether Kubernetes accepts the name (a DNS subdomain). Such a name is also a safe file name.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    (1..=253).contains(&name.len())
        && name.split('.').all(|label| {
            let bytes = label.as_bytes();
            bytes.first().is_some_and(|c| plain(*c))
                && bytes.last().is_some_and(|c| plain(*c))
                && bytes.iter().all(|c| plain(*c) || *c == b'-')
        })
}

/// Returns the fields of the metadata that Kubernetes does not know, and errors in its shape.
fn unknown_metadata(value: &Value) -> Vec<Violation> {
    const KNOWN: [&str; 15] = [
        "name",
        "namespace",
        "labels",
        "annotations",
        "uid",
        "creationTimestamp",
        "generation",
        "resourceVersion",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "finalizers",
        "generateName",
        "managedFields",
        "ownerReferences",
        "selfLink",
    ];
    let Some(metadata) = value.get("metadata") else { return Vec::new() };
    let known: Vec<String> = KNOWN.iter().map(ToString::to_string).collect();
    let mut found: Vec<_> = metadata
        .as_object()
        .into_iter()
        .flat_map(Map::keys)
        .filter(|name| !known.contains(name))
        .map(|name| unknown_field(format!("metadata.{name}"), name, known.iter()))
        .collect();
    if let Err(error) = serde_json::from_value::<ObjectMeta>(metadata.clone()) {
        found.push(Violation { field: "metadata".to_owned(), ..wrong_shape(&error) });
    }
    found
}

fn wrong_shape(error: &serde_json::Error) -> Violation {
    violation("", format!("a field has the wrong shape: {error}"), "correct the field")
}

/// Returns the fields of a Kubernetes object that the kind's Rust type does not have. Such an object is still used, since a newer
/// Kubernetes may have written it.
fn ignored_fields(value: &Value, understood: &Value) -> Vec<Violation> {
    fn lost(written: &Value, kept: &Value, path: &str, found: &mut Vec<Violation>) {
        match (written, kept) {
            (Value::Object(written), Value::Object(kept)) => {
                for (name, value) in written {
                    let field = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                    match kept.get(name) {
                        Some(kept) => lost(value, kept, &field, found),
                        None => found.push(violation(
                            &field,
                            format!("unknown field \"{name}\" is ignored"),
                            "correct its spelling or remove it",
                        )),
                    }
                }
            }
            (Value::Array(written), Value::Array(kept)) => {
                for (index, (written, kept)) in written.iter().zip(kept).enumerate() {
                    lost(written, kept, &format!("{path}[{index}]"), found);
                }
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    lost(value, understood, "", &mut found);
    found
}
