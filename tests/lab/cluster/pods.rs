//! The network namespaces of a cluster's pods, for the lab's traffic.

use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::{Cluster, PATIENCE, POD_IMAGE};
use crate::netns::NetNs;
use crate::wait::wait_until;

/// A running pod.
#[derive(Clone, Debug)]
pub struct ClusterPod {
    /// Its name.
    pub name: String,
    /// The node that it runs on.
    pub node: String,
    /// Its address.
    pub ip: Ipv4Addr,
    /// Its network namespace.
    pub ns: NetNs,
}

impl Cluster {
    /// Returns the running pods of a namespace that match a label selector, sorted by name.
    pub fn pods(&self, namespace: &str, selector: &str) -> Result<Vec<ClusterPod>> {
        let list = self.get(&["pods", "-n", namespace, "-l", selector, "--field-selector", "status.phase=Running"])?;
        let mut pods = Vec::new();
        for pod in list["items"].as_array().into_iter().flatten() {
            if !pod["metadata"]["deletionTimestamp"].is_null() {
                continue;
            }
            let text =
                |path: &str| pod.pointer(path).and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
            let (name, node) = (text("/metadata/name"), text("/spec/nodeName"));
            let ip = text("/status/podIP").parse().with_context(|| format!("{name} has no IPv4 address"))?;
            let ns = pod_namespace(&name)?;
            pods.push(ClusterPod { name, node, ip, ns });
        }
        pods.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(pods)
    }

    /// Creates a Deployment of pods `app: APP` on the workers and returns its pods once they run.
    pub fn deploy(&self, app: &str, replicas: usize) -> Result<Vec<ClusterPod>> {
        self.apply(&format!(
            "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: {app}}}, spec: {{replicas: {replicas},
               selector: {{matchLabels: {{deployment: {app}}}}}, template: {{metadata: {{labels: {{deployment: {app}, app: {app}}}}},
               spec: {{terminationGracePeriodSeconds: 1,
                 affinity: {{nodeAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: {{nodeSelectorTerms: [
                   {{matchExpressions: [{{key: egress, operator: DoesNotExist}}]}}]}}}}}},
                 topologySpreadConstraints: [{{maxSkew: 1, topologyKey: kubernetes.io/hostname,
                   whenUnsatisfiable: ScheduleAnyway, labelSelector: {{matchLabels: {{deployment: {app}}}}}}}],
                 containers: [{{name: pod, image: '{POD_IMAGE}', imagePullPolicy: Never}}]}}}}}}}}"
        ))?;
        self.kubectl(&["rollout", "status", &format!("deployment/{app}"), "--timeout=90s"])?;
        self.deployed(app, replicas)
    }

    /// Returns the pods of a Deployment once there are `count`.
    pub fn deployed(&self, app: &str, count: usize) -> Result<Vec<ClusterPod>> {
        let selector = format!("deployment={app}");
        let pods = || self.pods("default", &selector);
        wait_until(&format!("{count} pods of {app} run"), PATIENCE, pods, |pods| pods.len() == count)
    }
}

/// Opens the network namespace of a pod, found by a process with the pod's host name.
fn pod_namespace(pod: &str) -> Result<NetNs> {
    match processes_with(&format!("HOSTNAME={pod}"))?.first() {
        Some(process) => NetNs::open_file(pod, &process.join("ns/net")),
        None => bail!("found no process of pod {pod}"),
    }
}

/// Returns the folders in /proc of all processes whose environment contains `variable`, in the form `NAME=value`.
pub fn processes_with(variable: &str) -> Result<Vec<PathBuf>> {
    let has = |path: &PathBuf| {
        let environment = fs::read(path.join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|one| one == variable.as_bytes())
    };
    Ok(fs::read_dir("/proc")?.flatten().map(|entry| entry.path()).filter(has).collect())
}
