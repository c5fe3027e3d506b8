//! Converts what users and agents write (strings) to the model (types), once. A part that cannot be
//! understood is reported with the object, the field and the remedy, and never affects anything else.

pub mod antrea;
pub mod cilium;
pub mod networks;
mod node;
pub mod policy;
pub mod pool;
mod scalar;

use std::fmt;

pub use node::{node, pod_networks, report, service_cidr};
pub use policy::{namespaced as namespaced_policy, policy, read, read_namespaced};
pub use pool::pool;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

use crate::api::Pod;
use egress_core::model::{Endpoint, EndpointId, PolicyId, PolicyKind, Requirement, Selector};

/// The label that Kubernetes gives every namespace.
pub const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// Something in an object that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The object's kind.
    pub kind: &'static str,
    /// The object's name.
    pub name: String,
    /// Path of the field, such as `spec.destinationCIDRs[1]`.
    pub field: String,
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}, {}: {}: {}", self.kind, self.name, self.field, self.message, self.remedy)
    }
}

/// Returns the name of an object, with its namespace in front if it has one: `shop/web`.
pub fn name(metadata: &ObjectMeta) -> String {
    let name = metadata.name.clone().unwrap_or_default();
    match &metadata.namespace {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name,
    }
}

/// Returns the policies that cannot be carried out because of these problems, each with everything that is wrong with it.
pub fn refusals(problems: &[Problem]) -> BTreeMap<PolicyId, String> {
    let mut refusals: BTreeMap<PolicyId, String> = BTreeMap::new();
    for problem in problems {
        let kind = match problem.kind {
            policy::KIND => PolicyKind::Native,
            policy::NAMESPACED => PolicyKind::Namespaced,
            cilium::KIND => PolicyKind::Cilium,
            antrea::EGRESS => PolicyKind::Antrea,
            _ => continue,
        };
        let said = refusals.entry(PolicyId::new(kind, &problem.name)).or_default();
        let separator = if said.is_empty() { "" } else { "; " };
        *said += &format!("{separator}{}: {}: {}", problem.field, problem.message, problem.remedy);
    }
    refusals
}

/// Returns the value, if there was no problem.
fn sound<T>((value, problems): (T, Vec<Problem>)) -> Result<T, Vec<Problem>> {
    if problems.is_empty() { Ok(value) } else { Err(problems) }
}

/// Collects the problems of one object.
#[derive(Debug)]
struct Reader {
    kind: &'static str,
    name: String,
    problems: Vec<Problem>,
}

impl Reader {
    fn new(kind: &'static str, metadata: &ObjectMeta) -> Self {
        Self { kind, name: name(metadata), problems: Vec::new() }
    }

    fn problem(&mut self, field: impl Into<String>, message: impl Into<String>, remedy: impl Into<String>) {
        let (field, message, remedy) = (field.into(), message.into(), remedy.into());
        self.problems.push(Problem { kind: self.kind, name: self.name.clone(), field, message, remedy });
    }

    /// Parses one text; if it is not a `T`, that is a problem with this remedy.
    fn parse<T: std::str::FromStr>(&mut self, text: &str, field: impl Into<String>, remedy: &str) -> Option<T> {
        let parsed = text.parse().ok();
        if parsed.is_none() {
            self.problem(field, format!("{text:?} is not understood"), remedy);
        }
        parsed
    }

    /// Returns the value, if there was no problem.
    fn finish<T>(self, value: T) -> Result<T, Vec<Problem>> {
        sound((value, self.problems))
    }

    /// Reads a selector. An expression that lacks values, or whose operator is unknown, matches
    /// nothing, so that an invalid policy selects no pod that its author did not mean.
    fn selector(&mut self, selector: &LabelSelector, field: &str) -> Selector {
        let labels = selector.match_labels.iter().flatten();
        let mut requirements: Vec<(String, Requirement)> =
            labels.map(|(key, value)| (key.clone(), Requirement::In([value.clone()].into()))).collect();
        for (at, expression) in selector.match_expressions.iter().flatten().enumerate() {
            let values: BTreeSet<String> = expression.values.iter().flatten().cloned().collect();
            let field = |part: &str| format!("{field}.matchExpressions[{at}].{part}");
            match (expression.operator.as_str(), values.is_empty()) {
                (operator @ ("In" | "NotIn"), true) => {
                    self.problem(field("values"), format!("{operator} without values"), "write at least one value");
                }
                (operator @ ("Exists" | "DoesNotExist"), false) => {
                    self.problem(
                        field("values"),
                        format!("{operator} with values"),
                        "remove the values, or use In or NotIn",
                    );
                }
                _ => {}
            }
            let requirement = match expression.operator.as_str() {
                "In" => Requirement::In(values),
                "NotIn" if !values.is_empty() => Requirement::NotIn(values),
                "NotIn" => Requirement::In(values),
                "Exists" => Requirement::Exists,
                "DoesNotExist" => Requirement::DoesNotExist,
                operator => {
                    let message = format!("{operator:?} is not an operator");
                    self.problem(field("operator"), message, "use In, NotIn, Exists or DoesNotExist");
                    Requirement::In(BTreeSet::new())
                }
            };
            requirements.push((expression.key.clone(), requirement));
        }
        Selector::new(requirements)
    }
}

/// Returns the endpoint of a pod; `None` for a pod without a node, a pod that has finished, and a
/// pod in the host's network, which has no traffic of its own.
pub fn endpoint(pod: &Pod) -> Option<Endpoint> {
    let spec = pod.spec.as_ref()?;
    let status = pod.status.as_ref();
    let finished = matches!(status.and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"));
    if finished || spec.host_network == Some(true) {
        return None;
    }
    let of_list = status.iter().flat_map(|s| s.pod_ips.iter().flatten()).map(|ip| ip.ip.as_str());
    let ips = of_list.chain(status.and_then(|s| s.pod_ip.as_deref())).filter_map(|ip| ip.parse().ok()).collect();
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &pod.metadata;
    Some(Endpoint {
        id: EndpointId::new(&text(&metadata.namespace), &text(&metadata.name), &text(&metadata.uid)),
        node: spec.node_name.as_deref().filter(|node| !node.is_empty())?.into(),
        ips,
        labels: metadata.labels.clone().unwrap_or_default(),
    })
}

#[cfg(test)]
mod foreign_tests;
#[cfg(test)]
mod tests;
