//! Writes an archive with all information for a support request.

use super::{
    at_once, egressctl_on,
    kubectl::{Kubectl, KubectlError, Pod, SELECTOR},
};
use std::{
    fs, io,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    process::Command,
};
use thiserror::Error;

/// The option that limits each log to its last lines.
const LINES: &str = "--tail=20000";

/// The requests to the API server. They include no Secret and no pod's specification.
const OBJECTS: [(&str, &[&str]); 7] = [
    ("version.yaml", &["version", "-o", "yaml"]),
    ("objects.yaml", &["get", "spillway", "-A", "-o", "yaml"]),
    ("nodes.yaml", &["get", "nodes", "-o", "yaml"]),
    ("pods.txt", &["get", "pods", "-A", "-o", "wide"]),
    ("events.txt", &["get", "events", "-A", "--sort-by=.metadata.creationTimestamp"]),
    ("workloads.yaml", &["get", "daemonsets,deployments", "-l", SELECTOR, "-o", "yaml"]),
    ("config.yaml", &["get", "configmaps", "-l", SELECTOR, "-o", "yaml"]),
];

/// The commands of `egressctl` that are run on each node.
const OF_NODE: [&str; 7] = ["state", "stats", "policies", "gateways", "ips", "endpoints", "blocks"];

/// Why the archive cannot be written.
#[derive(Debug, Error)]
pub enum SysdumpError {
    /// A file cannot be written.
    #[error("{} cannot be written: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// `tar` failed.
    #[error("{} cannot be packed: tar: {error}", path.display())]
    Pack {
        /// The archive.
        path: PathBuf,
        /// The error of `tar`.
        error: String,
    },
    /// The pods of Spillway cannot be listed.
    #[error(transparent)]
    Kubectl(#[from] KubectlError),
}

/// A temporary directory, which is removed when this value is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, SysdumpError> {
        let path = std::env::temp_dir().join(format!("spillway-sysdump-{}", std::process::id()));
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        made.map_err(|error| SysdumpError::Write { path: path.clone(), error })?;
        Ok(Self(path))
    }

    /// Writes an answer, or the error to a file `NAME.error`. Returns whether there was an answer.
    fn note(&self, name: &str, answer: Result<String, KubectlError>) -> Result<bool, SysdumpError> {
        let (name, text, found) = match answer {
            Ok(text) => (name.to_owned(), text, true),
            Err(error) => (format!("{name}.error"), format!("{error}\n"), false),
        };
        let path = self.0.join(name);
        let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
        folder.and_then(|()| fs::write(&path, text)).map_err(|error| SysdumpError::Write { path, error })?;
        Ok(found)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Leftovers in the directory for temporary files are harmless.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes the archive, a `.tar.gz`, with the state of these agents' nodes. Returns the numbers of answers in it and of missing answers.
pub fn write(
    kubectl: &Kubectl,
    agents: &[Pod],
    file: &Path,
    progress: impl Fn(&str) + Sync,
) -> Result<(usize, usize), SysdumpError> {
    let folder = Folder::new()?;
    let mut found = Vec::new();
    progress("the cluster's objects");
    for (name, arguments) in OBJECTS {
        found.push(folder.note(name, kubectl.text(arguments))?);
    }
    for pod in kubectl.pods("controller")? {
        progress(&pod.name);
        found.push(logs(kubectl, &folder, &pod)?);
    }
    let of_nodes = at_once(agents, |pod| {
        progress(&pod.node);
        of_node(kubectl, &folder, pod)
    });
    for of_node in of_nodes {
        found.extend(of_node?);
    }
    let failed = |error| SysdumpError::Pack { path: file.to_owned(), error };
    let packed = Command::new("tar").arg("-czf").arg(file).arg("-C").arg(&folder.0).arg(".").output();
    let packed = packed.map_err(|error| failed(error.to_string()))?;
    if !packed.status.success() {
        return Err(failed(String::from_utf8_lossy(&packed.stderr).trim().to_owned()));
    }
    let missing = found.iter().filter(|found| !**found).count();
    Ok((found.len() - missing, missing))
}

/// Writes the logs of an agent and the state of its node. Returns for each whether there was an answer.
fn of_node(kubectl: &Kubectl, folder: &Folder, agent: &Pod) -> Result<Vec<bool>, SysdumpError> {
    let mut found = vec![logs(kubectl, folder, agent)?];
    for what in OF_NODE {
        let answer = egressctl_on(kubectl, agent, &[what.into(), "-o".into(), "json".into()]);
        found.push(folder.note(&format!("nodes/{}/{what}.json", agent.node), answer)?);
    }
    Ok(found)
}

/// Writes the logs of a pod. Only a restarted container has a previous log.
fn logs(kubectl: &Kubectl, folder: &Folder, pod: &Pod) -> Result<bool, SysdumpError> {
    if let Ok(earlier) = kubectl.text(&["logs", &pod.name, LINES, "--previous"]) {
        folder.note(&format!("logs/{}.previous.log", pod.name), Ok(earlier))?;
    }
    let log = kubectl.text(&["logs", &pod.name, LINES]);
    folder.note(&format!("logs/{}.log", pod.name), log)
}
