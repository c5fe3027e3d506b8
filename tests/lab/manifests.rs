//! The directory of YAML files that controller and agents read: the lab's nodes, namespaces and pods, and a test's own objects.
//!
//! Files are replaced atomically, by renaming a hidden file, so that a reader never sees a partial file.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::cluster::EgressIp;
use crate::topology::{LabNode, Pod, address};

/// A manifests directory.
#[derive(Clone, Debug)]
pub struct Manifests {
    dir: PathBuf,
}

impl Manifests {
    /// Creates the directory.
    pub fn create(dir: &Path) -> Result<Manifests> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Manifests { dir: dir.to_owned() })
    }

    /// Returns the directory, for `--manifests`.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes or replaces `<name>.yaml`.
    pub fn write(&self, name: &str, yaml: &str) -> Result<()> {
        let (hidden, file) = (self.dir.join(format!(".{name}.new")), self.path(name));
        fs::write(&hidden, yaml)
            .and_then(|()| fs::rename(&hidden, &file))
            .with_context(|| format!("cannot write {}", file.display()))
    }

    /// Removes `<name>.yaml`.
    pub fn remove(&self, name: &str) -> Result<()> {
        fs::remove_file(self.path(name)).with_context(|| format!("cannot remove {}", self.path(name).display()))
    }

    /// Returns the text of `<name>.yaml`.
    pub fn read(&self, name: &str) -> Result<String> {
        fs::read_to_string(self.path(name)).with_context(|| format!("cannot read {}", self.path(name).display()))
    }

    /// Returns the file `.spillway/<kind>/<name>.yaml` that Spillway wrote about an object, or `None` if it does not exist.
    pub fn written(&self, kind: &str, name: &str) -> Option<String> {
        fs::read_to_string(self.dir.join(".spillway").join(kind).join(format!("{name}.yaml"))).ok()
    }

    /// Like [`Self::written`], but parses the text.
    fn written_object(&self, kind: &str, name: &str) -> Result<Option<Value>> {
        let parse = |text: String| serde_saphyr::from_str(&text).with_context(|| format!("{kind} {name}"));
        self.written(kind, name).map(parse).transpose()
    }

    /// Returns all egress IPs, sorted by address, IPv4 first.
    pub fn egress_ips(&self) -> Result<Vec<EgressIp>> {
        let names = self.written_names("EgressIP");
        let objects = names.iter().filter_map(|name| self.written_object("EgressIP", name).transpose());
        EgressIp::all(&objects.collect::<Result<Vec<_>>>()?)
    }

    /// Returns the controller's reason why a policy is not in force yet, or `None` if it is.
    pub fn obstacle(&self, policy: &str) -> Result<Option<String>> {
        let Some(object) = self.written_object("status/EgressGatewayPolicy", policy)? else {
            return Ok(Some("the controller has not evaluated it yet".to_owned()));
        };
        let conditions = object["status"]["conditions"].as_array();
        Ok(match conditions.and_then(|all| all.iter().find(|one| one["type"] == "Ready")) {
            Some(ready) if ready["status"] == "True" => None,
            Some(ready) => Some(ready["message"].as_str().unwrap_or_default().to_owned()),
            None => Some("it has no Ready condition yet".to_owned()),
        })
    }

    /// Replaces a file that Spillway wrote about an object, as an attacker who controls a writer could.
    pub fn forge(&self, kind: &str, name: &str, text: &str) -> Result<()> {
        let directory = self.dir.join(".spillway").join(kind);
        let (hidden, file) = (directory.join(format!(".{name}.new")), directory.join(format!("{name}.yaml")));
        fs::write(&hidden, text)
            .and_then(|()| fs::rename(&hidden, &file))
            .with_context(|| format!("cannot write {}", file.display()))
    }

    /// Writes the EgressNode of a node that has none, as a controller does, so that the node's agent can report before a controller plans.
    pub(crate) fn join(&self, node: &str) -> Result<()> {
        if self.written("EgressNode", node).is_some() {
            return Ok(());
        }
        let directory = self.dir.join(".spillway/EgressNode");
        fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let metadata = json!({"name": node, "uid": format!("joined-{node}"), "generation": 1, "resourceVersion": "1"});
        let object =
            json!({"apiVersion": "spillway.io/v1alpha1", "kind": "EgressNode", "metadata": metadata, "spec": {}});
        // JSON is valid YAML.
        self.forge("EgressNode", node, &object.to_string())
    }

    /// Returns the sorted names of the nodes whose agents have reported.
    pub fn reporting(&self) -> Result<Vec<String>> {
        let mut names = self.written_names("EgressNode");
        for name in std::mem::take(&mut names) {
            if self.written_object("EgressNode", &name)?.is_some_and(|object| !object["status"].is_null()) {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Returns the sorted names of the objects of a kind that Spillway wrote.
    pub fn written_names(&self, kind: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.dir.join(".spillway").join(kind)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(".yaml").map(str::to_owned))
            .filter(|name| !name.starts_with('.'))
            .collect();
        names.sort();
        names
    }

    /// Writes the Node object of `node`.
    pub fn node(&self, node: &LabNode, ready: bool) -> Result<()> {
        let pods = address::pod_prefixes(node.index);
        let object = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node.name, "uid": format!("00000000-0000-4000-8000-0000000000{:02x}", node.index),
                "labels": node.labels},
            "spec": {"podCIDR": pods[0], "podCIDRs": pods},
            "status": {
                "addresses": [
                    {"type": "InternalIP", "address": node.underlay.v4.to_string()},
                    {"type": "InternalIP", "address": node.underlay.v6.to_string()},
                    {"type": "Hostname", "address": node.name},
                ],
                "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}],
            },
        });
        self.write(&format!("node-{}", node.name), &yaml(&object))
    }

    /// Writes the Namespace object `name`.
    pub fn namespace(&self, name: &str, labels: &[(&str, &str)]) -> Result<()> {
        let mut all = serde_json::Map::new();
        all.insert("kubernetes.io/metadata.name".to_owned(), json!(name));
        all.extend(labels.iter().map(|(key, value)| ((*key).to_owned(), json!(value))));
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": all}});
        self.write(&format!("namespace-{name}"), &yaml(&object))
    }

    /// Writes the Pod object of `pod`. If `addressed` is false, it has no addresses, as before the CNI has run.
    pub fn pod(&self, pod: &Pod, addressed: bool) -> Result<()> {
        let status = if addressed {
            json!({"phase": "Running", "podIP": pod.ips.v4.to_string(),
                "podIPs": [{"ip": pod.ips.v4.to_string()}, {"ip": pod.ips.v6.to_string()}]})
        } else {
            json!({"phase": "Pending"})
        };
        let object = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid, "labels": pod.labels},
            "spec": {"nodeName": pod.node, "containers": [{"name": "main", "image": "lab"}]},
            "status": status,
        });
        self.write(&pod_file(&pod.namespace, &pod.name), &yaml(&object))
    }

    /// Removes the Pod object of `pod`.
    pub fn remove_pod(&self, pod: &Pod) -> Result<()> {
        self.remove(&pod_file(&pod.namespace, &pod.name))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.yaml"))
    }
}

fn pod_file(namespace: &str, name: &str) -> String {
    format!("pod-{namespace}-{name}")
}

/// Formats plain data as block-style YAML, as a user would write it, for inspecting a lab that was kept.
fn yaml(value: &Value) -> String {
    let mut text = String::new();
    write_yaml(value, 0, &mut text);
    text
}

fn write_yaml(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                entry(&format!("{:indent$}{}:", "", scalar(&json!(key))), value, indent + 2, out);
            }
        }
        Value::Array(list) if !list.is_empty() => {
            for value in list {
                // Elements are small here, so they are in flow style.
                out.push_str(&format!("{:indent$}- {value}\n", ""));
            }
        }
        other => out.push_str(&format!("{:indent$}{}\n", "", scalar(other))),
    }
}

fn entry(head: &str, value: &Value, indent: usize, out: &mut String) {
    out.push_str(head);
    let nested = matches!(value, Value::Object(map) if !map.is_empty())
        || matches!(value, Value::Array(list) if !list.is_empty());
    if nested {
        out.push('\n');
        write_yaml(value, indent, out);
    } else {
        out.push_str(&format!(" {}\n", scalar(value)));
    }
}

/// Formats a scalar, quoted unless it can only be read as a string.
fn scalar(value: &Value) -> String {
    match value {
        Value::String(text)
            if text.starts_with(|first: char| first.is_ascii_alphabetic())
                && text.chars().all(|c| c.is_ascii_alphanumeric() || "./-".contains(c))
                && !["true", "false", "null", "yes", "no", "on", "off", "y", "n"]
                    .contains(&text.to_ascii_lowercase().as_str()) =>
        {
            text.clone()
        }
        other => other.to_string(),
    }
}
