//! The lab: nodes, servers and pods as network namespaces, joined by an underlay and an external segment.
//!
//! ```text
//! pod - worker1 -+                    +- gw1 -+
//! pod - worker2 -+- underlay bridge --+- gw2 -+- external bridge - server1
//!                |                    +- gw3 -+        |
//!                +------------ router ---------------- +
//!                                 |
//!                            far bridge - far1
//! ```
//!
//! Workers reach the outside through the router and masquerade to their underlay address; gateways reach it through `ext0`. The
//! bridges are in separate namespaces, in which each node's port has the node's name. Addresses: [`address`].

pub mod address;
mod build;
mod faults;
mod node;
mod pod;
mod settings;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

pub use self::address::{Dual, Family};
pub use self::build::Builder;
pub use self::faults::Segment;
pub use self::node::{LabNode, Role};
pub use self::pod::{Cni, Pod, PodSpec};
use self::settings::LabSettings;
pub(crate) use self::settings::XDP;
use crate::manifests::Manifests;
use crate::netns::NetNs;
use crate::process::Process;
use crate::scope::Scope;

/// The folder of the map layout of the programs under test (`LAYOUT_VERSION` of egress-common).
const LAYOUT: &str = "v3";

/// A host outside the cluster.
#[derive(Clone, Debug)]
pub struct Server {
    /// `server1`, `far1`.
    pub name: String,
    /// Its network namespace, in which its interface is `eth0`.
    pub ns: NetNs,
    /// Its addresses.
    pub ips: Dual,
}

/// A lab. Dropping it ends its processes and removes everything that it created.
#[derive(Debug)]
pub struct Lab {
    settings: LabSettings,
    /// Its processes by name. Declared before the scope: they end before the namespaces are removed.
    pub(crate) processes: BTreeMap<String, Process>,
    nodes: BTreeMap<String, LabNode>,
    servers: BTreeMap<String, Server>,
    pods: BTreeMap<String, Pod>,
    pods_made: u32,
    underlay: NetNs,
    external: NetNs,
    router: NetNs,
    manifests: Manifests,
    scope: Scope,
}

impl Lab {
    /// Starts the description of a lab; [`Builder::build`] builds it.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Returns the lab's unique name.
    pub fn id(&self) -> &str {
        self.scope.id()
    }

    /// Returns the lab's folder: `manifests/`, `logs/` and the configurations of processes.
    pub fn dir(&self) -> &Path {
        self.scope.dir()
    }

    /// Returns the manifests directory.
    pub fn manifests(&self) -> &Manifests {
        &self.manifests
    }

    /// Returns the directory where `node` pins its BPF objects.
    pub fn bpffs(&self, node: &str) -> PathBuf {
        self.scope.bpffs(node)
    }

    /// Returns the directory with the current layout's pins of `node`: `maps/NAME` and `links/PROGRAM-IFINDEX`.
    pub fn pins(&self, node: &str) -> PathBuf {
        self.bpffs(node).join(LAYOUT)
    }

    /// Returns a node by its name. Panics if it does not exist, which is a bug of the caller.
    pub fn node(&self, name: &str) -> &LabNode {
        self.nodes.get(name).unwrap_or_else(|| panic!("the lab has no node {name}, only {:?}", self.nodes.keys()))
    }

    /// Returns all nodes, sorted by name: `gw1..`, `worker1..`.
    pub fn nodes(&self) -> impl Iterator<Item = &LabNode> {
        self.nodes.values()
    }

    /// Returns the gateways, sorted by name.
    pub fn gateways(&self) -> impl Iterator<Item = &LabNode> {
        self.nodes().filter(|node| node.role == Role::Gateway)
    }

    /// Returns the workers, sorted by name.
    pub fn workers(&self) -> impl Iterator<Item = &LabNode> {
        self.nodes().filter(|node| node.role == Role::Worker)
    }

    /// Returns an outside server by its name: `server1..` on the external segment, `far1..` behind the router.
    pub fn server(&self, name: &str) -> &Server {
        self.servers.get(name).unwrap_or_else(|| panic!("the lab has no server {name}, only {:?}", self.servers.keys()))
    }

    /// Returns a pod by `name` (in the namespace `default`) or `namespace/name`.
    pub fn pod(&self, key: &str) -> &Pod {
        self.pods.get(&full_key(key)).unwrap_or_else(|| panic!("the lab has no pod {key}, only {:?}", self.pods.keys()))
    }

    /// Returns all pods, sorted by `namespace/name`.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.values()
    }

    /// Makes `server`, on the external segment, answer for `count` more addresses, which gateways then reach through it.
    pub fn crowd(&self, server: &Server, count: u16) -> Result<Vec<Dual>> {
        server.ns.ip(&address::CROWD.map(|network| format!("route add local {network} dev lo")))?;
        let [v4, v6] = address::CROWD;
        let routes = [format!("route add {v4} via {}", server.ips.v4), format!("route add {v6} via {}", server.ips.v6)];
        self.gateways().try_for_each(|gateway| gateway.ns.ip(&routes))?;
        Ok((1..=count).map(address::crowd).collect())
    }

    /// Returns the namespace of the underlay's bridge `br0`. Its ports are named after the nodes, and `router`.
    pub fn underlay(&self) -> &NetNs {
        &self.underlay
    }

    /// Returns the namespace of the external bridge `br0`. Its ports are named after gateways and servers, and `router`.
    pub fn external(&self) -> &NetNs {
        &self.external
    }

    /// Returns the router's namespace: `eth0` on the underlay, `ext0` on the external segment, the bridge `far`.
    pub fn router(&self) -> &NetNs {
        &self.router
    }

    /// Returns a namespace of the lab without links, created at the first call: for programs that need no network.
    pub fn role_namespace(&mut self, role: &str) -> Result<NetNs> {
        NetNs::open(&format!("{}-{role}", self.id())).or_else(|_| self.scope.namespace(role))
    }

    /// Gives a namespace of the lab a link to the underlay, `eth0`, with this address. `port` names the other end, at the bridge.
    pub fn join_underlay(&self, ns: &NetNs, port: &str, own: Dual) -> Result<()> {
        let segment = self.underlay.name();
        ns.ip(&[format!("link add eth0 type veth peer name {port} netns {segment}")])?;
        self.underlay.ip(&[format!("link set {port} master br0 up")])?;
        ns.ip(&[format!("addr add {}/24 dev eth0", own.v4), "link set eth0 up".to_owned()])?;
        ns.wait_running(&["eth0"])
    }

    /// Leaves the lab and its processes running when it is dropped, until [`crate::scope::remove_kept`] or a reboot.
    pub fn keep(mut self) -> Result<()> {
        for process in self.processes.values_mut() {
            process.leave();
        }
        self.scope.keep()
    }

    /// Writes a Namespace object.
    pub fn add_namespace(&self, name: &str, labels: &[(&str, &str)]) -> Result<()> {
        self.manifests.namespace(name, labels)
    }

    /// Adds a pod in the order of a cluster: the Pod object, the link, the addresses in the Pod object. The pod's namespace exists before
    /// its link: a test can call [`Lab::prepare_pod`] and [`Lab::start_pod`] separately to make a process wait in it.
    pub fn add_pod(&mut self, spec: PodSpec) -> Result<Pod> {
        let pod = self.prepare_pod(spec)?;
        self.start_pod(&pod.key())?;
        Ok(pod)
    }

    /// The first half of [`Lab::add_pod`]: the Pod object without addresses, and the namespace without an interface.
    pub fn prepare_pod(&mut self, spec: PodSpec) -> Result<Pod> {
        let node = self.nodes.get_mut(&spec.node).with_context(|| format!("the lab has no node {}", spec.node))?;
        let ips = spec.ips.unwrap_or_else(|| {
            node.next_pod += 1;
            address::pod(node.index, node.next_pod - 1)
        });
        self.pods_made += 1;
        let number = self.pods_made;
        let ns = self.scope.namespace(&format!("pod{number}-{}", spec.name))?;
        let cni = spec.cni.unwrap_or(self.settings.cni);
        let pod = Pod {
            uid: format!("00000000-0000-4000-9000-{number:012}"),
            host_interface: match cni {
                Cni::PointToPoint => format!("cali{number}"),
                Cni::Bridge => format!("veth{number}"),
            },
            name: spec.name,
            namespace: spec.namespace,
            node: spec.node,
            labels: spec.labels,
            cni,
            ips,
            ns,
        };
        self.manifests.pod(&pod, false)?;
        self.pods.insert(pod.key(), pod.clone());
        Ok(pod)
    }

    /// The second half of [`Lab::add_pod`]: the link, then the addresses in the Pod object.
    pub fn start_pod(&mut self, key: &str) -> Result<()> {
        let pod = self.pod(key).clone();
        let node = self.node(&pod.node).clone();
        if pod.cni == Cni::Bridge && node.ns.ifindex("cni0").is_err() {
            pod::make_bridge(&node, self.settings.pod_mtu)?;
        }
        pod.attach(&node, self.settings.pod_mtu).with_context(|| format!("pod {key}"))?;
        self.manifests.pod(&pod, true)
    }

    /// Removes a pod: its link, its namespace, its object. Sockets in it die with their processes and threads.
    pub fn remove_pod(&mut self, key: &str) -> Result<()> {
        let pod = self.pods.remove(&full_key(key)).with_context(|| format!("the lab has no pod {key}"))?;
        pod.detach(self.node(&pod.node))?;
        self.scope.remove_namespace(&pod.ns)?;
        self.manifests.remove_pod(&pod)
    }

    /// Replaces a pod's labels in its object.
    pub fn relabel_pod(&mut self, key: &str, labels: &[(&str, &str)]) -> Result<()> {
        let pod = self.pods.get_mut(&full_key(key)).with_context(|| format!("the lab has no pod {key}"))?;
        pod.labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.manifests.pod(pod, true)
    }

    /// Changes a pod's addresses on its existing link, in its namespace, on its node and in its object.
    pub fn readdress_pod(&mut self, key: &str, ips: Dual) -> Result<()> {
        let pod = self.pods.get_mut(&full_key(key)).with_context(|| format!("the lab has no pod {key}"))?;
        let node = self.nodes.get(&pod.node).with_context(|| format!("the lab has no node {}", pod.node))?;
        pod.readdress(node, ips)?;
        self.manifests.pod(pod, true)
    }

    /// Replaces a node's labels in its object. The zone's label is one of them.
    pub fn relabel_node(&mut self, name: &str, labels: &[(&str, &str)]) -> Result<()> {
        let node = self.nodes.get_mut(name).with_context(|| format!("the lab has no node {name}"))?;
        node.labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.manifests.node(node, true)
    }
}

fn full_key(key: &str) -> String {
    if key.contains('/') { key.to_owned() } else { format!("default/{key}") }
}
