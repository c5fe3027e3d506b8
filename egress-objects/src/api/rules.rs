//! The rules of a CustomResourceDefinition, applied without an API server: its structure (unknown and missing fields,
//! types, limits) and its CEL rules, with the messages that an API server would return.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinitionVersion;
use kube::core::cel::{CompiledSchema, Validator, compile_schema};
use serde_json::{Map, Value};
use std::fmt;

/// A rule that an object breaks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Path of the field, such as `spec.destinationCIDRs[1]`; empty for the object itself.
    pub field: String,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub remedy: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}", self.message)?;
        if self.remedy.is_empty() { Ok(()) } else { write!(f, ": {}", self.remedy) }
    }
}

/// The rules of a version of a kind, compiled once.
pub struct Rules {
    schema: Value,
    compiled: CompiledSchema,
    validator: Validator,
}

impl Rules {
    /// Compiles the rules of a version of a CRD.
    pub fn new(version: &CustomResourceDefinitionVersion) -> Result<Self, serde_json::Error> {
        let schema = version.schema.as_ref();
        let schema = serde_json::to_value(schema.and_then(|schema| schema.open_api_v3_schema.as_ref()))?;
        Ok(Rules { compiled: compile_schema(&schema), schema, validator: Validator::new() })
    }

    /// Returns every rule that `object` breaks, sorted by field. Fields with the value null count as absent and
    /// are removed from it first. The CEL rules are evaluated only if the structure is valid, as in an API server.
    pub fn check(&self, object: &mut Value) -> Vec<Violation> {
        remove_nulls(object);
        let mut found = Vec::new();
        check_root(&self.schema, object, &mut found);
        if found.is_empty()
            && let Err(errors) = self.validator.validate_compiled(&self.compiled, object, None)
        {
            found.extend(errors.into_iter().map(|error| sentence(error.field_path, &error.message)));
        }
        found.sort();
        found
    }
}

/// Splits the message of a rule, `what is wrong: what to write instead`.
fn sentence(field: String, text: &str) -> Violation {
    let (message, remedy) = text.split_once(": ").unwrap_or((text, ""));
    Violation { field, message: message.to_owned(), remedy: remedy.to_owned() }
}

/// Removes the fields with the value null, which count as absent.
pub fn remove_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(remove_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        _ => {}
    }
}

/// Checks an object from its root: a CRD's schema does not describe the fields that every object has.
fn check_root(schema: &Value, object: &Value, found: &mut Vec<Violation>) {
    let Value::Object(fields) = object else {
        found.push(wrong_type("", "a map of fields", object));
        return;
    };
    let own: Map<String, Value> = fields
        .iter()
        .filter(|(name, _)| !matches!(name.as_str(), "apiVersion" | "kind" | "metadata"))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    check(schema, &Value::Object(own), "", found);
}

fn check(schema: &Value, value: &Value, path: &str, found: &mut Vec<Violation>) {
    let limit = |name: &str| schema.get(name).and_then(Value::as_f64);
    match (schema.get("type").and_then(Value::as_str), value) {
        (Some("object"), Value::Object(fields)) => check_fields(schema, fields, path, found),
        (Some("object"), _) => found.push(wrong_type(path, "a map of fields", value)),
        (Some("array"), Value::Array(items)) => {
            if limit("maxItems").is_some_and(|max| items.len() as f64 > max) {
                found.push(too_much(path, "entries", limit("maxItems")));
            }
            if let Some(schema) = schema.get("items") {
                for (index, item) in items.iter().enumerate() {
                    check(schema, item, &format!("{path}[{index}]"), found);
                }
            }
        }
        (Some("array"), _) => found.push(wrong_type(path, "a list", value)),
        (Some("string"), Value::String(text)) => {
            if limit("maxLength").is_some_and(|max| text.chars().count() as f64 > max) {
                found.push(too_much(path, "characters", limit("maxLength")));
            }
            check_enum(schema, text, path, found);
        }
        (Some("string"), Value::Number(_) | Value::Bool(_)) => found.push(Violation {
            field: path.to_owned(),
            message: format!("{value} is not a string in YAML"),
            remedy: format!("write \"{value}\" in quotes"),
        }),
        (Some("string"), _) => found.push(wrong_type(path, "a string", value)),
        (Some("integer"), Value::Number(number)) => {
            let range = if schema.get("format").and_then(Value::as_str) == Some("int32") {
                i32::MIN as i64..=i32::MAX as i64
            } else {
                i64::MIN..=i64::MAX
            };
            match number.as_i64().filter(|number| range.contains(number)) {
                None => found.push(wrong_type(path, "a whole number", value)),
                Some(number) => {
                    let number = number as f64;
                    if limit("minimum").is_some_and(|min| number < min)
                        || limit("maximum").is_some_and(|max| number > max)
                    {
                        found.push(out_of_range(path, value, limit("minimum"), limit("maximum")));
                    }
                }
            }
        }
        (Some("integer"), _) => found.push(wrong_type(path, "a whole number", value)),
        (Some("boolean"), Value::Bool(_)) => {}
        (Some("boolean"), _) => found.push(wrong_type(path, "true or false", value)),
        _ => {}
    }
}

/// Returns whether a field is deprecated: its description begins with that word.
fn is_deprecated(schema: &Value) -> bool {
    schema["description"].as_str().is_some_and(|description| description.starts_with("Deprecated"))
}

fn check_fields(schema: &Value, fields: &Map<String, Value>, path: &str, found: &mut Vec<Violation>) {
    let limit = schema.get("maxProperties").and_then(Value::as_f64);
    if limit.is_some_and(|max| fields.len() as f64 > max) {
        found.push(too_much(path, "fields", limit));
    }
    let known = schema.get("properties").and_then(Value::as_object);
    let other = schema.get("additionalProperties").filter(|schema| schema.is_object());
    for (name, value) in fields {
        let field = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        match (known.and_then(|known| known.get(name)).or(other), known) {
            (Some(schema), _) => check(schema, value, &field, found),
            (None, Some(known)) => {
                let offered = known.iter().filter(|(_, schema)| !is_deprecated(schema)).map(|(name, _)| name);
                found.push(unknown_field(field, name, offered));
            }
            (None, None) => {}
        }
    }
    for name in schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
        // A field with wrong capitalisation is unknown, and was reported as such.
        if !fields.keys().any(|field| field.eq_ignore_ascii_case(name)) {
            let schema = known.and_then(|known| known.get(name));
            let about = schema.and_then(|schema| schema.get("description")).and_then(Value::as_str).unwrap_or_default();
            let example = match schema.and_then(|schema| schema.get("type")).and_then(Value::as_str) {
                Some("object") => "{}",
                Some("array") => "[...]",
                _ => "...",
            };
            found.push(Violation {
                field: if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") },
                message: "this field is required".to_owned(),
                remedy: format!("add {name}: {example}. {}", about.replace('\n', " ")),
            });
        }
    }
}

fn check_enum(schema: &Value, text: &str, path: &str, found: &mut Vec<Violation>) {
    let Some(values) = schema.get("enum").and_then(Value::as_array) else { return };
    if !values.iter().any(|value| value.as_str() == Some(text)) {
        let values: Vec<_> = values.iter().filter_map(Value::as_str).collect();
        found.push(Violation {
            field: path.to_owned(),
            message: format!("\"{text}\" is not known here"),
            remedy: format!("write {}", values.join(" or ")),
        });
    }
}

/// Returns the violation of an unknown field, with the fields that are allowed there.
pub fn unknown_field<'a>(path: String, name: &str, known: impl Iterator<Item = &'a String>) -> Violation {
    let known: Vec<&str> = known.map(String::as_str).collect();
    let meant = known.iter().find(|candidate| {
        let (a, b) = (candidate.to_lowercase(), name.to_lowercase());
        a == b || a.strip_suffix('s') == Some(&b) || b.strip_suffix('s') == Some(&a)
    });
    let remedy = match meant {
        Some(meant) => format!("write {meant}"),
        None => format!("the fields here are {}", known.join(", ")),
    };
    Violation { field: path, message: format!("unknown field \"{name}\""), remedy }
}

fn wrong_type(path: &str, expected: &str, value: &Value) -> Violation {
    let shown = match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a map of fields".to_owned(),
        scalar => scalar.to_string(),
    };
    Violation {
        field: path.to_owned(),
        message: format!("expected {expected}, found {shown}"),
        remedy: format!("write {expected}"),
    }
}

fn too_much(path: &str, what: &str, limit: Option<f64>) -> Violation {
    let limit = limit.unwrap_or_default();
    Violation {
        field: path.to_owned(),
        message: format!("more than {limit} {what}"),
        remedy: format!("write at most {limit}, and put the rest into another object"),
    }
}

fn out_of_range(path: &str, value: &Value, min: Option<f64>, max: Option<f64>) -> Violation {
    let remedy = match (min, max) {
        (Some(min), Some(max)) => format!("write a number from {min} to {max}"),
        (Some(min), None) => format!("write a number of at least {min}"),
        (None, Some(max)) => format!("write a number of at most {max}"),
        (None, None) => String::new(),
    };
    Violation { field: path.to_owned(), message: format!("{value} is out of range"), remedy }
}
