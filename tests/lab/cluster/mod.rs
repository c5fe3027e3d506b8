//! A real Kubernetes on this machine: control plane, kubelets, containerd, kube-proxy and a bridge CNI, each node in its own
//! network, mount, process and cgroup namespaces.
//!
//! | segment | IPv4 | addresses |
//! | --- | --- | --- |
//! | nodes | 10.77.0.0/24 | control plane .1, the n-th node at .(10+n): workers first, then gateways |
//! | external | 192.0.2.0/24 | the outside's router .1, gateway i at .(100+i); .10-.99 are for egress IPs |
//! | outside | 203.0.113.0/24, 198.51.100.0/24 | servers .7, .8 and .10; gateways reach them by `eth1`, workers by the control plane |
//! | pods of the n-th node | 10.244.n.0/24 | bridge .1 |
//! | services | 10.96.0.0/16 | |
//!
//! A cluster outlives the process that started it; [`Cluster::down`] removes it. All of its files are in one folder.

mod build;
mod egress;
mod network;
mod parts;
mod pods;
mod text;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::netns::NetNs;
use crate::wait::{wait_for, wait_until};

pub use build::{Component, Kubernetes, missing};
pub use egress::EgressIp;
pub use network::SERVERS;
pub use pods::{ClusterPod, processes_with};
pub use text::POD_IMAGE;

/// Where clusters keep their files: `CLUSTERS/<name>/`.
const CLUSTERS: &str = "/tmp/spillway-cluster";
/// The address and port of the API server.
const API_SERVER: &str = "10.77.0.1:6443";
/// The time that a cluster's parts may take to start on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// The role of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// Runs pods.
    Worker,
    /// Has an interface in the external segment and the label `egress=true`, and runs pods as well.
    Gateway,
}

/// A node of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterNode {
    /// `worker1`, `gateway1`, ...
    pub name: String,
    /// Its role.
    pub kind: NodeKind,
    /// Its number among all nodes, from 1 on.
    pub number: u8,
    /// Its number among the nodes of its kind, from 1 on.
    pub of_kind: u8,
}

/// A cluster, running or to be started.
#[derive(Debug)]
pub struct Cluster {
    name: String,
    dir: PathBuf,
    binaries: PathBuf,
    nodes: Vec<ClusterNode>,
    flannel: bool,
}

/// Returns the names of all clusters that any process has started and that have not been removed.
pub fn names() -> Result<Vec<String>> {
    let entries = match fs::read_dir(CLUSTERS) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot read {CLUSTERS}"))?,
    };
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

impl Cluster {
    /// Describes the cluster `name` (at most six letters and digits: interfaces and namespaces are named after it).
    /// [`Component::build`] must have put its programs into `binaries`.
    pub fn new(name: &str, binaries: &Path, workers: u8, gateways: u8) -> Self {
        let kinds = (1..=workers).map(|n| ("worker", NodeKind::Worker, n));
        let kinds = kinds.chain((1..=gateways).map(|n| ("gateway", NodeKind::Gateway, n)));
        let nodes = kinds.zip(1..).map(|((word, kind, of_kind), number)| ClusterNode {
            name: format!("{word}{of_kind}"),
            kind,
            number,
            of_kind,
        });
        let (name, dir) = (name.to_owned(), Path::new(CLUSTERS).join(name));
        Cluster { name, dir, binaries: binaries.to_owned(), nodes: nodes.collect(), flannel: false }
    }

    /// Connects the pods' networks with flannel (VXLAN, which also masquerades) instead of routes.
    #[must_use]
    pub fn with_flannel(mut self) -> Self {
        self.flannel = true;
        self
    }

    /// Starts everything and waits until all nodes are ready. Leftovers of the same name are removed first. `progress`
    /// receives the name of each step.
    pub fn up(&self, mut progress: impl FnMut(&str)) -> Result<()> {
        progress("networks");
        self.make_place()?;
        progress("API server");
        self.start_control_plane()?;
        for node in &self.nodes {
            progress(&node.name);
            self.start_node(node)?;
        }
        progress("all nodes ready");
        wait_until("all nodes are ready", PATIENCE, || self.ready_nodes(), |ready| *ready == self.nodes.len())?;
        Ok(())
    }

    /// Starts only an API server: nothing acts on its objects.
    pub fn up_alone(&self) -> Result<()> {
        self.make_place()?;
        self.start_first_api_server()
    }

    fn make_place(&self) -> Result<()> {
        self.down()?;
        fs::create_dir_all(&self.dir).with_context(|| format!("cannot make {}", self.dir.display()))?;
        self.make_networks()
    }

    /// Returns whether the cluster has been started and not been removed.
    pub fn is_up(&self) -> bool {
        self.dir.join("apiserver.pid").exists()
    }

    /// Returns its nodes.
    pub fn nodes(&self) -> &[ClusterNode] {
        &self.nodes
    }

    /// Returns the names of the nodes of a kind.
    pub fn names(&self, kind: NodeKind) -> Vec<&str> {
        self.nodes.iter().filter(|node| node.kind == kind).map(|node| node.name.as_str()).collect()
    }

    /// Opens the network namespace of a part: `cp` (control plane), `out` (the outside), or a node.
    pub fn netns(&self, part: &str) -> Result<NetNs> {
        NetNs::open(&self.netns_name(part))
    }

    fn netns_name(&self, part: &str) -> String {
        format!("{}-{part}", self.name)
    }

    /// Returns the folder with the cluster's programs.
    pub fn binaries(&self) -> &Path {
        &self.binaries
    }

    /// Returns the folder with its logs.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the number of nodes that Kubernetes reports as ready.
    pub fn ready_nodes(&self) -> Result<usize> {
        let path = "jsonpath={range .items[*]}{.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}";
        let output = self.kubectl(&["get", "nodes", "-o", path])?;
        Ok(output.lines().filter(|line| *line == "True").count())
    }

    /// Returns a `kubectl` command, ready for more arguments.
    pub fn kubectl_command(&self) -> Result<Command> {
        let mut command = self.netns("cp")?.command(self.binaries.join("kubectl"));
        command.arg("--kubeconfig").arg(self.dir.join("kubeconfig"));
        command.env("KUBECACHEDIR", self.dir.join("kubectl-cache"));
        Ok(command)
    }

    /// Runs kubectl and returns its standard output.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        crate::command::output(self.kubectl_command()?.args(arguments))
            .with_context(|| format!("kubectl {}", arguments.join(" ")))
    }

    /// Runs Helm and returns its standard output.
    pub fn helm(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.netns("cp")?.command(self.binaries.join("helm"));
        command.env("KUBECONFIG", self.dir.join("kubeconfig"));
        for (folder, name) in [("HELM_CACHE_HOME", "cache"), ("HELM_CONFIG_HOME", "config"), ("HELM_DATA_HOME", "data")]
        {
            command.env(folder, self.dir.join("helm").join(name));
        }
        crate::command::output(command.args(arguments)).with_context(|| format!("helm {}", arguments.join(" ")))
    }

    /// Runs kubectl and returns its result, even if it failed.
    pub fn try_kubectl(&self, arguments: &[&str]) -> Result<Output> {
        Ok(self.kubectl_command()?.args(arguments).output()?)
    }

    /// Applies a text with `kubectl apply`.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        let mut command = self.kubectl_command()?;
        // kubectl 1.32 takes text that begins with a brace for JSON.
        crate::command::feed(command.args(["apply", "-f", "-"]), &format!("---\n{yaml}"))
            .with_context(|| format!("kubectl apply: {yaml}"))
    }

    /// Returns an object, or a list of objects, as JSON.
    pub fn get(&self, arguments: &[&str]) -> Result<serde_json::Value> {
        let all: Vec<&str> = ["get"].into_iter().chain(arguments.iter().copied()).chain(["-o", "json"]).collect();
        Ok(serde_json::from_str(&self.kubectl(&all)?)?)
    }

    /// Waits until the output of kubectl is `good`, and returns it.
    pub fn wait(&self, what: &str, arguments: &[&str], good: impl Fn(&str) -> bool) -> Result<String> {
        wait_until(what, PATIENCE, || self.kubectl(arguments), |text| good(text))
    }

    /// Makes a folder with `kubectl` for this cluster and its plugins, given as file names and programs.
    pub fn kubectl_folder(&self, plugins: &[(&str, &Path)]) -> Result<PathBuf> {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = self.dir.join("bin");
        fs::create_dir_all(&folder)?;
        let kubectl = folder.join("kubectl");
        // Plugins call kubectl, and find the cluster in the same way.
        let text = format!(
            "#!/bin/sh\n# kubectl on the cluster {}, whose API server is reached from its own network namespace only\n\
             export PATH={}:$PATH KUBECONFIG={}\n\
             exec nsenter --net=/run/netns/{} {} \"$@\"\n",
            self.name,
            folder.display(),
            self.dir.join("kubeconfig").display(),
            self.netns_name("cp"),
            self.binaries.join("kubectl").display(),
        );
        fs::write(&kubectl, text)?;
        fs::set_permissions(&kubectl, fs::Permissions::from_mode(0o755))?;
        for (name, program) in plugins {
            let link = folder.join(name);
            if link.is_symlink() {
                fs::remove_file(&link)?;
            }
            symlink(program, link)?;
        }
        Ok(folder)
    }

    /// Installs Spillway as a user would, and waits until it runs everywhere.
    pub fn install(&self, manifests: &Path) -> Result<()> {
        self.kubectl(&["apply", "-k", &manifests.display().to_string()])?;
        self.wait_installed()
    }

    fn node(&self, name: &str) -> Result<&ClusterNode> {
        match self.nodes.iter().find(|node| node.name == name) {
            Some(node) => Ok(node),
            None => bail!("there is no node {name}"),
        }
    }

    /// Waits until no process with this id runs.
    fn wait_gone(pid: u32) -> Result<()> {
        wait_for(&format!("process {pid} ends"), Duration::from_secs(20), || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // Our own dead children stay as zombies until they are reaped.
            Ok(stat.is_empty() || stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
        })
    }
}
