//! Schemas of the pieces that several kinds share, with their CEL rules. Every list and string that a rule looks at is
//! bounded, because the API server refuses a CRD whose rules could cost too much.

use super::{ALPHA, GROUP, LABEL_VALUE, VERSION};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion, JSONSchemaProps, JSONSchemaPropsOrArray, ValidationRule,
};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Short forms of a list with one entry: [`ALPHA`] accepts the field or the list, [`VERSION`] only the list.
pub const SHORT_FORMS: [(&str, &str); 2] = [("egressGateway", "egressGateways"), ("egressIPPool", "egressIPPools")];

/// The longest message of a condition that an API server accepts.
const LONGEST_MESSAGE: usize = 32_768;

/// Returns the message of a condition, truncated if it is too long.
pub fn shorten(mut message: String) -> String {
    if message.len() > LONGEST_MESSAGE {
        message.truncate(message.floor_char_boundary(LONGEST_MESSAGE - 4));
        message.push_str(" ...");
    }
    message
}

/// Adds [`ALPHA`] to a CRD. Both versions have the same fields, so that an API server converts between them without loss. If an object of
/// the older version has a short form, the newer version shows it, and rejects it only when somebody writes it.
pub(super) fn with_alpha(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    let Some(version) = crd.spec.versions.first_mut() else { return crd };
    let alpha = CustomResourceDefinitionVersion {
        name: ALPHA.to_owned(),
        deprecated: Some(true),
        deprecation_warning: Some(format!(
            "{GROUP}/{ALPHA} {} is deprecated: write {GROUP}/{VERSION}",
            crd.spec.names.kind
        )),
        storage: false,
        ..version.clone()
    };
    let root = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut());
    if let Some(spec) = root.and_then(|root| root.properties.as_mut()?.get_mut("spec")) {
        refuse_short_forms(spec);
    }
    crd.spec.versions.push(alpha);
    crd
}

fn refuse_short_forms(spec: &mut JSONSchemaProps) {
    let fields = spec.properties.iter().flat_map(BTreeMap::keys);
    let short = SHORT_FORMS.into_iter().filter(|(short, _)| fields.clone().any(|field| field == short));
    let rules = short.map(|(short, list)| ValidationRule {
        rule: format!("!has(self.{short})"),
        message: Some(format!("{VERSION} has no {short}: write {list} with one entry")),
        field_path: Some(format!(".{short}")),
        ..ValidationRule::default()
    });
    spec.x_kubernetes_validations.get_or_insert_default().extend(rules.collect::<Vec<_>>());
}

/// Completes a CRD: joins the lines of descriptions, which `kubectl explain` wraps, and makes lists without another type atomic.
pub(super) fn complete(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for version in &mut crd.spec.versions {
        if let Some(root) = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut()) {
            complete_schema(root);
        }
    }
    crd
}

fn complete_schema(schema: &mut JSONSchemaProps) {
    if let Some(description) = &mut schema.description {
        *description = description.replace('\n', " ");
    }
    schema.properties.iter_mut().flat_map(BTreeMap::values_mut).for_each(complete_schema);
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        schema.x_kubernetes_list_type.get_or_insert_with(|| "atomic".to_owned());
        complete_schema(items);
    }
}

/// Longest list of CIDRs or addresses in one field.
const MAX_LIST: u32 = 1024;
/// Most labels, expressions, and values of an expression, in one label selector: a plan evaluates each for many pods.
const MAX_REQUIREMENTS: u32 = 64;
/// Length of a label's key: a prefix (a DNS subdomain), a slash and a name.
const LABEL_KEY: u32 = 253 + 1 + 63;
/// Length of the name of a cluster-scoped object, a DNS subdomain.
const NAME: u32 = 253;

/// Returns a rule of a CRD; `message` is a CEL expression, so that it can name the offending value.
fn rule(rule: &str, message: &str) -> Value {
    json!({ "rule": rule, "messageExpression": message })
}

fn cidr_schema() -> Value {
    json!({
        "type": "string",
        "maxLength": 64,
        "x-kubernetes-validations": [
            rule(
                "isCIDR(self)",
                "'\"' + self + '\" is not a CIDR: write an address and a prefix length, such as 203.0.113.0/24 or \
                 2001:db8::/32 (a single address is 203.0.113.7/32 or 2001:db8::7/128)'",
            ),
            rule(
                "!isCIDR(self) || cidr(self).ip() == cidr(self).masked().ip()",
                "'\"' + self + '\" has bits set beyond its prefix: write the network with zeroes there, such as \
                 203.0.113.0/24, or /32 (IPv6: /128) for the single address'",
            ),
        ],
    })
}

fn ip_schema() -> Value {
    json!({
        "type": "string",
        "maxLength": 64,
        "x-kubernetes-validations": [rule(
            "isIP(self)",
            "'\"' + self + '\" is not an IP address: write it without a prefix length, such as 192.0.2.10 or 2001:db8::10'",
        )],
    })
}

fn into_schema(value: Value) -> Schema {
    match value {
        Value::Object(map) => map.into(),
        _ => Schema::default(),
    }
}

/// Returns the schema of one CIDR.
pub(super) fn cidr(_: &mut SchemaGenerator) -> Schema {
    into_schema(cidr_schema())
}

/// Returns the schema of a list of CIDRs.
pub(super) fn cidrs(_: &mut SchemaGenerator) -> Schema {
    into_schema(json!({ "type": "array", "maxItems": MAX_LIST, "items": cidr_schema() }))
}

/// Returns the schema of a list of numbers of port blocks.
pub(super) fn blocks(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "type": "integer", "format": "int32", "minimum": 0, "maximum": 1007 } })
}

/// Returns the schema of one IP address.
pub(super) fn ip(_: &mut SchemaGenerator) -> Schema {
    into_schema(ip_schema())
}

/// Returns the schema of a list of IP addresses.
pub(super) fn ips(_: &mut SchemaGenerator) -> Schema {
    into_schema(json!({ "type": "array", "maxItems": MAX_LIST, "items": ip_schema() }))
}

/// Returns the schema of a Kubernetes quantity above zero, as a string: `800M`, `2Gi`, `1500000`.
pub(super) fn quantity(_: &mut SchemaGenerator) -> Schema {
    into_schema(json!({
        "type": "string",
        "maxLength": 32,
        "x-kubernetes-validations": [rule(
            // Kubernetes also accepts signs, and suffixes below `m`; `translate::scalar::quantity`
            // does not. The pattern comes first, because kube-cel overflows at a large exponent.
            "self.matches('^([0-9]{1,9}[.]?[0-9]{0,9}|[.][0-9]{1,9})(m|[kMGTPE]|[KMGTPE]i|[eE][+-]?(0?[0-9]|1[0-8]))?$') && \
             isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))",
            "'\"' + self + '\" is not a quantity above zero: write bits per second for a rate and bits for a burst, \
             such as 800M or 2G'",
        )],
    }))
}

/// Returns the schema of a duration: a whole number and a unit.
pub(super) fn duration(_: &mut SchemaGenerator) -> Schema {
    into_schema(json!({
        "type": "string",
        "maxLength": 16,
        "x-kubernetes-validations": [rule(
            "self.matches('^[0-9]{1,9}(ms|s|m|h)$')",
            "'\"' + self + '\" is not a duration: write a whole number and a unit (ms, s, m or h), such as 10s'",
        )],
    }))
}

/// Returns the schema of the name of a Linux network interface.
pub(super) fn interface(_: &mut SchemaGenerator) -> Schema {
    into_schema(json!({
        "type": "string",
        "maxLength": 64,
        "x-kubernetes-validations": [rule(
            "self.matches('^[!-.0-9;-~]{1,15}$')",
            "'\"' + self + '\" is not the name of a network interface: write 1 to 15 characters of ASCII without space, \
             slash or colon, such as eth1'",
        )],
    }))
}

/// Returns the schema of the name of an EgressIPPool.
pub(super) fn pool_name(_: &mut SchemaGenerator) -> Schema {
    into_schema(json!({
        "type": "string",
        "maxLength": NAME,
        "x-kubernetes-validations": [rule(
            "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",
            "'\"' + self + '\" is not the name of an object: write that of an EgressIPPool (lower-case letters, digits, - and .)'",
        )],
    }))
}

/// Returns the schema of a Kubernetes label selector. An empty one selects everything.
pub(super) fn label_selector(_: &mut SchemaGenerator) -> Schema {
    let mut schema = selector_schema();
    let [labels, expressions] = ["matchLabels", "matchExpressions"].map(|field| format!("/properties/{field}"));
    let mut bound = |path: &str, limits: Value| {
        if let (Some(Value::Object(part)), Value::Object(limits)) = (schema.pointer_mut(path), limits) {
            part.extend(limits);
        }
    };
    bound(&labels, json!({ "maxProperties": MAX_REQUIREMENTS }));
    bound(&format!("{labels}/additionalProperties"), json!({ "maxLength": LABEL_VALUE }));
    bound(&expressions, json!({ "maxItems": MAX_REQUIREMENTS }));
    bound(
        &format!("{expressions}/items"),
        json!({
            "x-kubernetes-validations": [
                {
                    "rule": "!(self.operator == 'In' || self.operator == 'NotIn') || has(self.values) && self.values.size() > 0",
                    "message": "In and NotIn need values: write at least one, such as values: [web]",
                },
                {
                    "rule": "!(self.operator == 'Exists' || self.operator == 'DoesNotExist') || !has(self.values) || \
                             self.values.size() == 0",
                    "message": "Exists and DoesNotExist take no values: remove values, or write In or NotIn",
                },
            ],
        }),
    );
    bound(&format!("{expressions}/items/properties/key"), json!({ "maxLength": LABEL_KEY }));
    let values = format!("{expressions}/items/properties/values");
    bound(&values, json!({ "maxItems": MAX_REQUIREMENTS }));
    bound(&format!("{values}/items"), json!({ "maxLength": LABEL_VALUE }));
    into_schema(schema)
}

/// Returns the schema of a label selector in another system's kind, whose definition has neither limits nor rules.
pub(super) fn foreign_label_selector(_: &mut SchemaGenerator) -> Schema {
    into_schema(selector_schema())
}

fn selector_schema() -> Value {
    json!({
        "type": "object",
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {
                "description": "Labels that must all be present with exactly these values.",
                "type": "object",
                "additionalProperties": { "type": "string" },
            },
            "matchExpressions": {
                "description": "Conditions on labels that must all hold.",
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": { "description": "The label's key.", "type": "string" },
                        "operator": {
                            "description": "In, NotIn, Exists or DoesNotExist.",
                            "type": "string",
                            "enum": ["In", "NotIn", "Exists", "DoesNotExist"],
                        },
                        "values": {
                            "description": "The values for In and NotIn; absent for Exists and DoesNotExist.",
                            "type": "array",
                            "items": { "type": "string" },
                        },
                    },
                },
            },
        },
    })
}

/// Returns the schema of conditions as Kubernetes defines them, one of each type.
pub(super) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": { "description": "The type of the condition.", "type": "string", "maxLength": 316 },
                "status": { "description": "True, False or Unknown.", "type": "string", "enum": ["True", "False", "Unknown"] },
                "reason": { "description": "One word that a program can act on.", "type": "string", "maxLength": 1024 },
                "message": { "description": "A message for users.", "type": "string", "maxLength": LONGEST_MESSAGE },
                "lastTransitionTime": {
                    "description": "When the status last changed.", "type": "string", "format": "date-time",
                },
                "observedGeneration": {
                    "description": "The generation of the object from which the condition was computed.",
                    "type": "integer", "format": "int64", "minimum": 0,
                },
            },
        },
    })
}
