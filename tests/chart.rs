//! Tests the chart as Helm renders it and the alerts as Prometheus evaluates them. The tools (`promtool`, `helm`,
//! `kubectl`) come from PATH or from the programs of a cluster; a test is skipped if one is missing.

#![allow(clippy::unwrap_used, reason = "nothing here is anything but a test")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use lab::command::output;
use serde_json::{Value, json};

use xtask::{cluster, workspace};

/// Finds a tool in PATH, or else among the programs of the Kubernetes tests. If it is missing, records the test as skipped.
fn tool(test: &str, name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .chain(cluster::binaries())
        .map(|folder| folder.join(name))
        .find(|file| file.is_file());
    if found.is_none() {
        lab::skip::record(
            test,
            &format!("{name} is neither in PATH nor built for a cluster (cargo xtask test cluster)"),
        );
    }
    found
}

/// Runs `helm template` with values in the form that `--set` takes.
fn rendered(helm: &Path, values: &[&str]) -> Result<String> {
    let chart = workspace::root().join("manifests/chart");
    let mut command = Command::new(helm);
    command.args(["template", "spillway", "--namespace", "spillway"]).arg(chart);
    output(command.args(values.iter().flat_map(|value| ["--set", value])))
}

/// Runs `kubectl kustomize` on the base with these components.
fn kustomized(kubectl: &Path, components: &[&str]) -> String {
    let copy = std::env::temp_dir().join(format!("xtask-kustomize-{}-{}", std::process::id(), components.join("-")));
    let manifests = workspace::root().join("manifests");
    output(Command::new("cp").arg("-r").arg(manifests).arg(&copy)).unwrap();
    let file = copy.join("kustomization.yaml");
    let listed: String = components.iter().map(|name| format!("- components/{name}\n")).collect();
    let text = std::fs::read_to_string(&file).unwrap();
    let components = if listed.is_empty() { listed } else { format!("components:\n{listed}") };
    std::fs::write(&file, text + &components).unwrap();
    let objects = output(Command::new(kubectl).arg("kustomize").arg(&copy)).unwrap();
    std::fs::remove_dir_all(&copy).unwrap();
    objects
}

/// Returns the objects by kind, namespace and name, without the parts that only the chart has: the annotation that
/// keeps definitions, the checksum of the settings, and `foreignKinds`.
fn objects(text: &str) -> BTreeMap<String, Value> {
    let documents = text.split("\n---\n").filter(|document| document.lines().any(|line| line.starts_with("kind:")));
    let mut found = BTreeMap::new();
    for document in documents {
        let mut object: Value = serde_saphyr::from_str(document).unwrap();
        numbers_as_kustomize_writes_them(&mut object);
        without(&mut object, "/metadata", "helm.sh/resource-policy");
        without(&mut object, "/spec/template/metadata", "checksum/config");
        if let Some(Value::String(text)) = object.pointer_mut("/data/config.yaml") {
            let mut settings: Value = serde_saphyr::from_str(text).unwrap();
            settings.as_object_mut().unwrap().remove("foreignKinds");
            *text = settings.to_string();
        }
        // The chart passes the foreign kinds in the settings, the components as an argument.
        if let Some(Value::Array(arguments)) = object.pointer_mut("/spec/template/spec/containers/0/args") {
            arguments.retain(|argument| !argument.as_str().unwrap().starts_with("--foreign="));
        }
        let part = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let name = [part("/kind"), part("/metadata/namespace"), part("/metadata/name")].join(" ");
        assert!(found.insert(name.clone(), object).is_none(), "{name} is defined twice");
    }
    found
}

/// Turns floats without a fraction into integers: 1.0 becomes 1.
fn numbers_as_kustomize_writes_them(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(numbers_as_kustomize_writes_them),
        Value::Object(fields) => fields.values_mut().for_each(numbers_as_kustomize_writes_them),
        Value::Number(number) => {
            if let Some(whole) = number.as_f64().filter(|number| number.fract() == 0.0) {
                *value = json!(whole as i64);
            }
        }
        _ => {}
    }
}

/// Removes an annotation, and the map of annotations if it was the only one.
fn without(object: &mut Value, metadata: &str, annotation: &str) {
    let Some(metadata) = object.pointer_mut(metadata) else { return };
    if let Some(Value::Object(annotations)) = metadata.get_mut("annotations") {
        annotations.remove(annotation);
        if annotations.is_empty() {
            metadata.as_object_mut().unwrap().remove("annotations");
        }
    }
}

#[test]
fn helm_and_kustomize_make_the_same_objects() {
    let (Some(helm), Some(kubectl)) = (tool(lab::test_name!(), "helm"), tool(lab::test_name!(), "kubectl")) else {
        return;
    };
    let everything = ["config.foreignKinds={cilium,antrea}", "monitoring.serviceMonitor=true", "monitoring.rules=true"];
    let with = ["cilium", "antrea", "monitoring"];
    for (values, components) in [(&[][..], &[][..]), (&everything[..], &with[..])] {
        let (chart, base) = (objects(&rendered(&helm, values).unwrap()), objects(&kustomized(&kubectl, components)));
        let mut expected = base;
        // Helm creates the namespace before it installs a chart, so the chart has none.
        assert!(expected.remove("Namespace  spillway").is_some());
        let names = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&chart), names(&expected), "with {values:?}");
        for (name, object) in &expected {
            assert_eq!(&chart[name], object, "{name} with {values:?}");
        }
    }
}

#[test]
fn values_of_the_chart_take_effect_and_wrong_ones_are_refused() {
    let Some(helm) = tool(lab::test_name!(), "helm") else { return };
    let values = [
        "image.tag=1.2.3",
        "image.pullSecrets[0].name=registry",
        "log.level=warn\\,egress_daemon=debug",
        "agent.nodeSelector.pool=a",
    ];
    let made = objects(&rendered(&helm, &values).unwrap());
    let pod = made["DaemonSet spillway spillway-agent"].pointer("/spec/template/spec").unwrap();
    assert_eq!(pod["imagePullSecrets"], json!([{"name": "registry"}]));
    assert_eq!(pod["nodeSelector"], json!({"kubernetes.io/os": "linux", "pool": "a"}));
    assert_eq!(pod["containers"][0]["image"], "ghcr.io/spillway/spillway:1.2.3");
    assert!(pod["containers"][0]["args"].as_array().unwrap().contains(&json!("--log=warn,egress_daemon=debug")));
    let checksum = |values: &[&str]| {
        let text = rendered(&helm, values).unwrap();
        text.lines().find(|line| line.contains("checksum/config")).map(str::to_owned)
    };
    assert!(checksum(&[]).is_some() && checksum(&[]) != checksum(&["config.maxFlows=4096"]));
    for wrong in [
        "agnet.replicas=1",
        "image.pullPolicy=Sometimes",
        "controller.replicas=0",
        "config.foreignKinds={calico}",
        "config.maxFlow=4096",
        "config.lease.renewal=5s",
    ] {
        assert!(rendered(&helm, &[wrong]).is_err(), "{wrong} is accepted");
    }
}

/// An agent that could create or replace an EgressNode would lease itself port blocks, and name networks for all nodes.
#[test]
fn agents_may_write_no_spec() {
    let text = std::fs::read_to_string(workspace::root().join("manifests/base/agent-rbac.yaml")).unwrap();
    let objects = objects(&text);
    let rules = objects["ClusterRole  spillway-agent"]["rules"].as_array().unwrap();
    let has = |rule: &Value, field: &str, wanted: &[&str]| {
        rule[field].as_array().unwrap().iter().any(|one| wanted.contains(&one.as_str().unwrap()))
    };
    for rule in rules {
        let of_ours = has(rule, "apiGroups", &["spillway.io", "*"]);
        let writes = has(rule, "verbs", &["create", "update", "patch", "delete", "deletecollection", "*"]);
        assert!(!of_ours || !writes || rule["resources"] == json!(["egressnodes/status"]), "{rule}");
    }
}

#[test]
fn alerts_fire_when_they_should() {
    let Some(promtool) = tool(lab::test_name!(), "promtool") else { return };
    let rules = std::fs::read_to_string(workspace::root().join("manifests/components/monitoring/rules.yaml")).unwrap();
    let (_, spec) = rules.split_once("\nspec:\n").unwrap();
    let folder = std::env::temp_dir().join(format!("xtask-rules-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("alerts.yaml"), spec.replace("\n  ", "\n").trim_start()).unwrap();
    std::fs::copy(workspace::root().join("tests/monitoring/rules.yaml"), folder.join("rules.yaml")).unwrap();
    let judged = output(Command::new(promtool).args(["test", "rules", "rules.yaml"]).current_dir(&folder));
    std::fs::remove_dir_all(&folder).unwrap();
    judged.unwrap();
}

/// Alerts and the dashboard query only metrics that exist in the code.
#[test]
fn alerts_and_dashboard_name_metrics_that_exist() {
    let root = workspace::root();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let code = read("egress-daemon/src/observe/metrics.rs");
    let counters = read("egress-common/src/verdict.rs");
    for file in ["manifests/components/monitoring/rules.yaml", "manifests/dashboard.json"] {
        let text = read(file);
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let metrics: Vec<&str> = words.filter(|word| word.starts_with("spillway_")).collect();
        assert!(metrics.len() > 5, "{file}: {metrics:?}");
        for metric in metrics {
            let name = metric.trim_end_matches("_total");
            let counter = format!("\"{}\"", name.trim_start_matches("spillway_"));
            let exists = code.contains(&format!("\"{name}\"")) || counters.contains(&counter);
            assert!(exists, "{file} asks for {metric}");
        }
        let reasons =
            text.split("reason=~").skip(1).filter_map(|rest| rest.split('"').nth(1).map(|r| r.trim_end_matches('\\')));
        for reason in reasons.flat_map(|reasons| reasons.split('|')) {
            assert!(counters.contains(&format!("\"drop_{reason}\"")), "{file} asks for the reason {reason}");
        }
    }
}
