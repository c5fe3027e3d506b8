//! `kubectl spillway connectivity test`: starts pods that policies select, and compares the source addresses that a server outside the
//! cluster sees with the policies' promises.

use super::kubectl::{Kubectl, KubectlError};
use crate::{
    connectivity::{
        Asked,
        trial::{Case, Home, Known, Rule, Slot, Trial, cases, judge, sources},
    },
    ctl::print::{Printable, Row, table},
};
use anyhow::{Context as _, Result, bail};
use egress_core::model::{Labels, Requirement, Selector};
use egress_objects::{
    api::{EgressGatewayPolicy, EgressGatewayPolicyStatus, EgressPolicy},
    translate,
};
use serde::Serialize;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    net::SocketAddr,
    process, thread,
    time::{Duration, Instant},
};

/// The label of all objects that a test creates.
const LABEL: &str = "spillway.io/connectivity-test";
/// The interval at which pods are checked.
const LOOK: Duration = Duration::from_secs(1);
/// The user ID of the pods: nobody.
const USER: u32 = 65_534;
/// The exit code of a process that Ctrl-C ends.
const INTERRUPTED: i32 = 130;

/// The options of a test.
#[derive(Clone, Debug)]
pub struct Options {
    /// The servers outside the cluster.
    pub servers: Vec<SocketAddr>,
    /// The only policy to test: its name, or `NAMESPACE/NAME`.
    pub policy: Option<String>,
    /// The image of the pods. Absent: the agents' image.
    pub image: Option<String>,
    /// The time for the pods to start and to query.
    pub timeout: Duration,
}

/// The result for one policy, or for the pod that no policy selects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// The policy; absent for the pod that no policy selects.
    pub policy: Option<String>,
    /// `ok`, `FAILED`, `NOT RUN` (the pod never started, which says nothing about promises) or `skipped`.
    pub result: &'static str,
    /// The source addresses that were promised.
    pub promised: String,
    /// The source addresses that servers saw.
    pub seen: String,
    /// The broken promises, or why there is no other result.
    pub message: String,
}

impl Row for Outcome {
    const HEADER: &'static [&'static str] = &["POLICY", "RESULT", "PROMISED", "SEEN", "MESSAGE"];
    const NONE: &'static str = "There is no policy to test.";

    fn cells(&self) -> Vec<String> {
        let policy = self.policy.clone().unwrap_or_else(|| "(no policy)".to_owned());
        vec![policy, self.result.to_owned(), self.promised.clone(), self.seen.clone(), self.message.clone()]
    }
}

/// The results of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConnectivityView {
    /// Whether all promises were tested and kept, except those of skipped policies.
    pub ok: bool,
    /// The results, one for each policy and one for the pod that no policy selects.
    pub items: Vec<Outcome>,
}

impl Printable for ConnectivityView {
    fn text(&self) -> String {
        table(&self.items)
    }
}

/// Runs the test and removes the objects that it created, even if it is interrupted. Calls `progress` with each step.
pub fn test(kubectl: &Kubectl, options: &Options, progress: impl Fn(&str)) -> Result<ConnectivityView> {
    if options.servers.is_empty() {
        bail!("name a server outside the cluster with --server; on a machine there run: egressctl connectivity serve");
    }
    let known = policies(kubectl)?;
    let mut cases = cases(&known, &namespaces(kubectl)?, &options.servers);
    if let Some(wanted) = &options.policy {
        // Names of EgressPolicies are accepted as kubectl and as egressctl (`ns/`) write them.
        cases.retain(|case| policy_of(case).is_none_or(|name| name.strip_prefix("ns/").unwrap_or(name) == wanted));
        if !cases.iter().any(|case| policy_of(case).is_some()) {
            bail!(
                "there is no policy {wanted}: the names are those of kubectl get spillway -A, NAMESPACE/NAME for an EgressPolicy"
            );
        }
    }
    let image = options.image.clone().map_or_else(|| image(kubectl), Ok)?;
    // Removes the leftovers of an earlier test that could not clean up.
    clean(kubectl)?;
    let cleaner = kubectl.clone();
    let _on_interrupt = on_interrupt(move || {
        if let Err(error) = clean(&cleaner) {
            eprintln!("kubectl spillway: {error}");
        }
    })?;
    let asked = run(kubectl, options, &cases, &image, progress);
    let cleaned = clean(kubectl);
    let asked = asked?;
    cleaned?;
    let items: Vec<Outcome> = cases.iter().map(|case| outcome(case, &asked)).collect();
    Ok(ConnectivityView { ok: items.iter().all(|item| matches!(item.result, "ok" | "skipped")), items })
}

fn policy_of(case: &Case) -> Option<&str> {
    match case {
        Case::Tried(trial) => trial.policy.as_deref(),
        Case::Skipped { policy, .. } => policy.as_deref(),
    }
}

fn items(list: Value) -> Vec<Value> {
    match list {
        Value::Object(mut list) => list.remove("items").and_then(|items| items.as_array().cloned()).unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// Returns Spillway's own policies with their egress IPs. Omits invalid policies, which promise nothing and have a
/// condition with the reason.
fn policies(kubectl: &Kubectl) -> Result<Vec<Known>> {
    let list = kubectl.json(&["get", "egressgatewaypolicies.spillway.io,egresspolicies.spillway.io", "-A"])?;
    let mut known = Vec::new();
    for object in items(list) {
        let (policy, status) = if object["kind"] == "EgressPolicy" {
            let object: EgressPolicy = serde_json::from_value(object).context("an EgressPolicy of the API server")?;
            (translate::namespaced_policy(&object), object.status)
        } else {
            let object: EgressGatewayPolicy =
                serde_json::from_value(object).context("an EgressGatewayPolicy of the API server")?;
            (translate::policy(&object), object.status)
        };
        if let Ok(policy) = policy {
            known.push(Known { policy, slots: slots(status.unwrap_or_default()) });
        }
    }
    Ok(known)
}

fn slots(status: EgressGatewayPolicyStatus) -> Vec<Slot> {
    let slots = status.slots.into_iter().filter(|slot| !slot.draining);
    let slot = |slot: egress_objects::api::SlotStatus| {
        Some(Slot { address: slot.egress_ip.parse().ok()?, weight: slot.weight, healthy: slot.healthy })
    };
    slots.filter_map(slot).collect()
}

fn namespaces(kubectl: &Kubectl) -> Result<Vec<(String, Labels)>, KubectlError> {
    let list = kubectl.json(&["get", "namespaces"])?;
    let labels = |value: &Value| serde_json::from_value(value.clone()).unwrap_or_default();
    let one = |object: &Value| {
        let metadata = &object["metadata"];
        metadata["deletionTimestamp"]
            .is_null()
            .then(|| Some((metadata["name"].as_str()?.to_owned(), labels(&metadata["labels"]))))?
    };
    Ok(items(list).iter().filter_map(one).collect())
}

/// Returns the agents' image.
fn image(kubectl: &Kubectl) -> Result<String> {
    let list =
        kubectl.json(&["get", "pods", "-l", "app.kubernetes.io/name=spillway,app.kubernetes.io/component=agent"])?;
    let image = list.pointer("/items/0/spec/containers/0/image").and_then(Value::as_str);
    let namespace = &kubectl.namespace;
    image.map(str::to_owned).with_context(|| {
        format!("no agent runs in namespace {namespace}: name it with --namespace, or an image with --image")
    })
}

/// Why a pod has no answers: the result of its test, and the message.
type Unanswered = (&'static str, String);

/// The answers to each pod, or why there are none, by the pod's name.
type Answers = BTreeMap<String, Result<Vec<Asked>, Unanswered>>;

/// Starts the pods and waits for their answers.
fn run(kubectl: &Kubectl, options: &Options, cases: &[Case], image: &str, progress: impl Fn(&str)) -> Result<Answers> {
    let trials: Vec<&Trial> =
        cases.iter().filter_map(|case| if let Case::Tried(trial) = case { Some(trial) } else { None }).collect();
    let end = Instant::now() + options.timeout;
    let made: Vec<Value> = trials.iter().filter_map(|trial| namespace(trial)).collect();
    if !made.is_empty() {
        kubectl.apply(&json!({"apiVersion": "v1", "kind": "List", "items": made}))?;
    }
    progress(&format!("starting {} pods of {image}", trials.len()));
    for trial in &trials {
        start(kubectl, &pod(trial, image, options.timeout), end)?;
    }
    let mut before = usize::MAX;
    let pods = loop {
        let pods = items(kubectl.json(&["get", "pods", "-A", "-l", LABEL])?);
        let left = pods.iter().filter(|pod| !is_over(pod)).count();
        if left == 0 || Instant::now() >= end {
            break pods;
        }
        if left != before {
            progress(&format!("waiting for {left} of {} pods", pods.len()));
            before = left;
        }
        thread::sleep(LOOK);
    };
    Ok(pods.iter().filter_map(|pod| Some((pod["metadata"]["name"].as_str()?.to_owned(), told(kubectl, pod)))).collect())
}

/// Starts a pod. Retries while a new namespace has no service account yet.
fn start(kubectl: &Kubectl, pod: &Value, end: Instant) -> Result<(), KubectlError> {
    loop {
        match kubectl.apply(pod) {
            Err(KubectlError::Failed(_, why)) if why.contains("serviceaccount") && Instant::now() < end => {
                thread::sleep(LOOK)
            }
            other => return other,
        }
    }
}

fn is_over(pod: &Value) -> bool {
    matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"))
}

fn told(kubectl: &Kubectl, pod: &Value) -> Result<Vec<Asked>, Unanswered> {
    if pod["status"]["phase"] != "Succeeded" {
        return Err(unfinished(pod));
    }
    let [namespace, name] = ["namespace", "name"].map(|field| pod["metadata"][field].as_str().unwrap_or_default());
    let log = kubectl.text(&["logs", "-n", namespace, name]).map_err(|error| ("FAILED", error.to_string()))?;
    serde_json::from_str(&log)
        .map_err(|error| ("FAILED", format!("the pod's answer cannot be parsed: {error}: {log:?}")))
}

/// Returns why a pod has no result: the state of its container, or the pod's own.
fn unfinished(pod: &Value) -> Unanswered {
    let state = &pod["status"]["containerStatuses"][0]["state"];
    let parts = ["waiting", "terminated"].map(|state_name| &state[state_name]);
    let container = parts.iter().find_map(|part| part["message"].as_str().or(part["reason"].as_str()));
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let condition = conditions.iter().find_map(|condition| condition["message"].as_str());
    let phase = pod["status"]["phase"].as_str().unwrap_or("unknown");
    let why = container.or(condition).or(pod["status"]["message"].as_str()).unwrap_or("it took too long");
    let message = format!("the pod is {phase}: {why}");
    if !state["running"].is_null() || !state["terminated"]["startedAt"].is_null() {
        return ("FAILED", message);
    }
    // The agents' image may need pull secrets, which the namespace of the pod does not have.
    match state["waiting"]["reason"].as_str().filter(|reason| reason.contains("Image")) {
        Some(reason) => {
            ("NOT RUN", format!("{message} ({reason}): name an image that its namespace can pull with --image"))
        }
        None => ("NOT RUN", message),
    }
}

/// Returns the namespace of a trial's pod if it must be created.
fn namespace(trial: &Trial) -> Option<Value> {
    let Home::New(name, labels) = &trial.home else { return None };
    let mut labels = labels.clone();
    labels.insert(LABEL.to_owned(), String::new());
    Some(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}))
}

/// Returns the pod of a trial. The strictest of Kubernetes' Pod Security Standards (`restricted`) admits it.
fn pod(trial: &Trial, image: &str, timeout: Duration) -> Value {
    let mut labels = trial.labels.clone();
    labels.insert(LABEL.to_owned(), String::new());
    let connections = trial.connections.to_string();
    let mut command = vec!["/usr/bin/egressctl", "connectivity", "ask", "-o", "json", "--connections", &connections];
    let servers: Vec<String> = trial.promises.iter().map(|promise| promise.server.to_string()).collect();
    command.extend(servers.iter().map(String::as_str));
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": trial.pod, "namespace": trial.home.name(), "labels": labels},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": timeout.as_secs().max(1),
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "affinity": affinity(&trial.nodes),
            "securityContext": {"runAsNonRoot": true, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "ask",
                "image": image,
                "command": command,
                "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    })
}

/// Converts a node selector to a pod's affinity; null if it selects every node.
fn affinity(nodes: &Selector) -> Value {
    if nodes.is_everything() {
        return Value::Null;
    }
    let expression = |(key, requirement): (&str, &Requirement)| match requirement {
        Requirement::In(values) => json!({"key": key, "operator": "In", "values": values}),
        Requirement::NotIn(values) => json!({"key": key, "operator": "NotIn", "values": values}),
        Requirement::Exists => json!({"key": key, "operator": "Exists"}),
        Requirement::DoesNotExist => json!({"key": key, "operator": "DoesNotExist"}),
    };
    let expressions: Vec<Value> = nodes.requirements().map(expression).collect();
    let terms = json!([{"matchExpressions": expressions}]);
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}})
}

/// Removes all objects with the test's label: pods in all namespaces, then namespaces with their contents.
fn clean(kubectl: &Kubectl) -> Result<(), KubectlError> {
    let delete = ["delete", "--ignore-not-found", "--wait=true"];
    for pod in items(kubectl.json(&["get", "pods", "-A", "-l", LABEL])?) {
        let [namespace, name] = ["namespace", "name"].map(|field| pod["metadata"][field].as_str().unwrap_or_default());
        kubectl.text(&[&delete[..], &["pod", name, "-n", namespace, "--grace-period=1"]].concat())?;
    }
    kubectl.text(&[&delete[..], &["namespaces", "-l", LABEL]].concat()).map(drop)
}

/// On Ctrl-C, runs `clean` and ends the process.
fn on_interrupt(clean: impl FnOnce() + Send + 'static) -> Result<thread::JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(thread::spawn(move || {
        if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
            eprintln!("kubectl spillway: interrupted: removing the test's objects");
            clean();
            process::exit(INTERRUPTED);
        }
    }))
}

fn outcome(case: &Case, answers: &Answers) -> Outcome {
    match case {
        Case::Skipped { policy, reason } => Outcome {
            policy: policy.clone(),
            result: "skipped",
            promised: String::new(),
            seen: String::new(),
            message: reason.clone(),
        },
        Case::Tried(trial) => {
            let (result, seen, message) = match answers.get(&trial.pod) {
                Some(Ok(asked)) => {
                    let problems = judge(trial, asked);
                    (if problems.is_empty() { "ok" } else { "FAILED" }, seen(asked), problems.join("; "))
                }
                Some(Err((result, why))) => (*result, String::new(), why.clone()),
                None => ("FAILED", String::new(), "the pod is gone: it was deleted".to_owned()),
            };
            Outcome { policy: trial.policy.clone(), result, promised: promised(trial), seen, message }
        }
    }
}

fn promised(trial: &Trial) -> String {
    let one = |promise: &crate::connectivity::trial::Promise| {
        let addresses: Vec<String> = promise.addresses.iter().map(ToString::to_string).collect();
        let rule = match promise.rule {
            Rule::All => "each of ",
            Rule::Any => "any of ",
            Rule::One => "one of ",
            Rule::NoneOf => "none of ",
        };
        format!("{rule}{}", addresses.join(", "))
    };
    let mut all: Vec<String> = trial.promises.iter().map(one).collect();
    all.dedup();
    all.join("; ")
}

fn seen(asked: &[Asked]) -> String {
    let all = asked.iter().flat_map(sources);
    let all: Vec<String> = all.map(|(source, count)| format!("{source} ({count})")).collect();
    all.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_never_started_breaks_no_promise() {
        let result = |phase: &str, state: Value| {
            unfinished(&json!({"status": {"phase": phase, "containerStatuses": [{"state": state}]}}))
        };
        let (what, why) =
            result("Pending", json!({"waiting": {"reason": "ErrImagePull", "message": "401 Unauthorized"}}));
        assert!(
            what == "NOT RUN" && why.contains("401 Unauthorized (ErrImagePull)") && why.contains("--image"),
            "{what} {why}"
        );
        let (what, why) = result("Pending", json!({"waiting": {"reason": "ContainerCreating"}}));
        assert!(what == "NOT RUN" && !why.contains("--image"), "{what} {why}");
        assert_eq!(result("Running", json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}})).0, "FAILED");
        let ended = json!({"terminated": {"reason": "Error", "startedAt": "2026-01-01T00:00:00Z"}});
        assert_eq!(result("Failed", ended).0, "FAILED");
    }
}
