//! Runs `kubectl`, which knows the cluster and the user's credentials.

use serde_json::Value;
use std::{
    ffi::OsStr,
    io::{self, Write as _},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    string::FromUtf8Error,
};
use thiserror::Error;

/// The timeout of a request to the API server.
const TIMEOUT: &str = "--request-timeout=30s";

/// Why `kubectl` gave no answer.
#[derive(Debug, Error)]
pub enum KubectlError {
    /// It cannot be started.
    #[error("kubectl cannot be started: {0}: install it, or add its directory to PATH")]
    NotStarted(#[from] io::Error),
    /// It failed.
    #[error("kubectl {0}: {1}")]
    Failed(String, String),
    /// Its output is not UTF-8.
    #[error("kubectl printed no text: {0}")]
    NoText(#[from] FromUtf8Error),
    /// Its output is not the expected JSON.
    #[error("kubectl printed no JSON: {0}")]
    NoJson(#[from] serde_json::Error),
}

/// The settings with which `kubectl` reaches the cluster and Spillway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kubectl {
    /// The option `--context`.
    pub context: Option<String>,
    /// The option `--kubeconfig`.
    pub kubeconfig: Option<PathBuf>,
    /// The namespace of Spillway's pods.
    pub namespace: String,
}

impl Kubectl {
    /// Runs `kubectl` and returns its output.
    pub fn text<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Result<String, KubectlError> {
        let mut command = self.command();
        result(command.arg(TIMEOUT).args(["--namespace", &self.namespace]).args(arguments).output()?, arguments)
    }

    /// Starts `kubectl` with this command line. Its output can be read while it runs; its errors go to `errors`.
    pub fn stream<S: AsRef<OsStr>>(&self, arguments: &[S], errors: Stdio) -> Result<Child, KubectlError> {
        let mut command = self.command();
        command.args(["--namespace", &self.namespace]).args(arguments);
        Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors).spawn()?)
    }

    /// Applies an object. A namespaced object must name its namespace.
    pub fn apply(&self, object: &Value) -> Result<(), KubectlError> {
        const ARGUMENTS: [&str; 3] = ["apply", "-f", "-"];
        let mut command = self.command();
        command.arg(TIMEOUT).args(ARGUMENTS).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let written = child.stdin.take().map(|mut stdin| stdin.write_all(object.to_string().as_bytes()));
        result(child.wait_with_output()?, &ARGUMENTS)?;
        if let Some(written) = written {
            written?;
        }
        Ok(())
    }

    fn command(&self) -> Command {
        let mut command = Command::new("kubectl");
        if let Some(context) = &self.context {
            command.arg("--context").arg(context);
        }
        if let Some(kubeconfig) = &self.kubeconfig {
            command.arg("--kubeconfig").arg(kubeconfig);
        }
        command
    }

    /// Runs `kubectl` and parses its output as JSON.
    pub fn json(&self, arguments: &[&str]) -> Result<Value, KubectlError> {
        Ok(serde_json::from_str(&self.text(&[arguments, &["-o", "json"]].concat())?)?)
    }

    /// Returns the pods of one of Spillway's components.
    pub fn pods(&self, component: &str) -> Result<Vec<Pod>, KubectlError> {
        let selector = format!("{SELECTOR},app.kubernetes.io/component={component}");
        Ok(pods(&self.json(&["get", "pods", "-l", &selector])?))
    }

    /// Returns the node of a pod, which is given as `NAMESPACE/NAME` or as an address.
    pub fn node_of(&self, pod: &str) -> Result<Option<String>, KubectlError> {
        let list = match pod.split_once('/') {
            Some((namespace, name)) => {
                let name = format!("metadata.name={name}");
                self.json(&["get", "pods", "-n", namespace, "--field-selector", &name])?
            }
            None => self.json(&["get", "pods", "-A", "--field-selector", &format!("status.podIP={pod}")])?,
        };
        Ok(pods(&list).into_iter().next().map(|pod| pod.node))
    }
}

fn result<S: AsRef<OsStr>>(output: Output, arguments: &[S]) -> Result<String, KubectlError> {
    if !output.status.success() {
        let words: Vec<_> = arguments.iter().map(|word| word.as_ref().to_string_lossy()).collect();
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(KubectlError::Failed(words.join(" "), why));
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// The label selector of Spillway's own objects.
pub const SELECTOR: &str = "app.kubernetes.io/name=spillway";

/// A pod that has a node assigned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its name.
    pub name: String,
    /// Its node.
    pub node: String,
}

/// Returns the pods of a list that have a node, sorted by node.
fn pods(list: &Value) -> Vec<Pod> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let one = |pod: &Value| Some(Pod { name: text(&pod["metadata"]["name"])?, node: text(&pod["spec"]["nodeName"])? });
    let mut pods: Vec<Pod> = list["items"].as_array().into_iter().flatten().filter_map(one).collect();
    pods.sort_by(|a, b| a.node.cmp(&b.node));
    pods
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pods_without_a_node_are_omitted() {
        let pod = |name: &str, node: Value| json!({"metadata": {"name": name}, "spec": {"nodeName": node}});
        let list = json!({"items": [pod("c", json!("n2")), pod("b", Value::Null), pod("a", json!("n1"))]});
        let named = |name: &str, node: &str| Pod { name: name.into(), node: node.into() };
        assert_eq!(pods(&list), [named("a", "n1"), named("c", "n2")]);
        assert_eq!(pods(&json!({})), []);
    }
}
