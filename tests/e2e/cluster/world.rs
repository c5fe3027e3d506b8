//! The cluster that the tests share, and their common operations on it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use lab::cluster::{Cluster, ClusterPod, EgressIp, SERVERS};
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{NetNs, wait_for, wait_until};
use serde_json::Value;

/// A time limit that only a hang exceeds.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The time limit for echoes. A connection that began just before its policy changed is severed; then others are tried.
const ANSWER: Duration = Duration::from_secs(3);

/// The cluster with Spillway.
pub struct InstalledCluster {
    pub cluster: Cluster,
    pub manifests: PathBuf,
    pub image: PathBuf,
    /// The same programs with another version number, for upgrades.
    pub next_image: PathBuf,
    /// Whether the cluster is kept running at the end.
    kept: bool,
}

impl InstalledCluster {
    /// Starts the cluster and installs Spillway, or returns why these tests are skipped.
    pub fn open() -> Result<Result<InstalledCluster, String>> {
        if let Some(obstacle) = lab::skip::obstacle() {
            return Ok(Err(obstacle));
        }
        if let Ok(lacks) = std::env::var("SPILLWAY_CLUSTER_LACKS") {
            return Ok(Err(lacks));
        }
        let set = std::env::var_os;
        let (Some(binaries), Some(image), Some(next_image)) =
            (set("SPILLWAY_CLUSTER_BIN"), set("SPILLWAY_IMAGE"), set("SPILLWAY_NEXT_IMAGE"))
        else {
            return Ok(Err("no cluster was built: run `cargo xtask test cluster`".to_owned()));
        };
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
        let cluster = Cluster::new("swtest", Path::new(&binaries), 3, 3);
        let world = InstalledCluster {
            cluster,
            manifests: root.join("manifests"),
            image: image.into(),
            next_image: next_image.into(),
            kept: keep(),
        };
        if !(world.kept && world.cluster.is_up()) {
            world.cluster.up(|what| eprintln!("cluster: {what}"))?;
        }
        eprintln!("cluster: image and manifests");
        world.cluster.load_image(&world.image)?;
        world.cluster.install(&world.manifests)?;
        Ok(Ok(world))
    }

    /// Starts a separate small cluster with another CNI, and installs Spillway in it.
    pub fn beside_flannel(&self) -> Result<InstalledCluster> {
        let (manifests, image, next_image) = (self.manifests.clone(), self.image.clone(), self.next_image.clone());
        let cluster = Cluster::new("swfl", self.cluster.binaries(), 2, 2).with_flannel();
        let world = InstalledCluster { cluster, manifests, image, next_image, kept: false };
        world.cluster.up(|_| {})?;
        world.cluster.load_image(&world.image)?;
        world.cluster.install(&world.manifests)?;
        Ok(world)
    }

    /// Removes what the previous test left.
    pub fn fresh(&self) -> Result<()> {
        let kubectl = |arguments: &[&str]| self.cluster.kubectl(arguments);
        kubectl(&["delete", "egp,eipp", "--all", "--wait=true"])?;
        kubectl(&["delete", "egpol", "--all", "-A", "--wait=true"])?;
        // Clusters need not have these kinds.
        for foreign in ["ciliumegressgatewaypolicies.cilium.io", "egresses.crd.antrea.io,externalippools.crd.antrea.io"]
        {
            self.cluster.try_kubectl(&["delete", foreign, "--all", "--wait=true"])?;
        }
        // After an outage of the API server, Kubernetes' garbage collection takes minutes to come back, and controllers
        // whose watches are late recreate ReplicaSets and pods.
        let workloads = "deployments,replicasets,pods";
        wait_for("no workload is left", PATIENCE, || {
            kubectl(&["delete", workloads, "--all", "--wait=true", "--grace-period=1"])?;
            Ok(self.cluster.get(&[workloads])?["items"] == Value::Array(Vec::new()))
        })?;
        self.until("no egress IP is left", &["egressips"], |list| list["items"] == Value::Array(Vec::new())).map(drop)
    }

    /// Returns what a developer would inspect after a failed test.
    pub fn picture(&self) -> String {
        let mut picture = String::new();
        let agents = self.cluster.get(&["pods", "-n", "spillway", "-l", "app.kubernetes.io/component=agent"]);
        let agents = agents.map_or_else(|_| Vec::new(), |list| list["items"].as_array().cloned().unwrap_or_default());
        let names = agents.iter().filter_map(|pod| pod["metadata"]["name"].as_str());
        let counters = names.map(|name| ["exec", "-n", "spillway", name, "--", "egressctl", "stats"]);
        let counters: Vec<_> = counters.collect();
        let objects = [
            &["get", "egp,egpol,eipp,egip,egn", "-o", "wide"][..],
            &["get", "pods", "-A", "-o", "wide"],
            &["logs", "-n", "spillway", "-l", "app.kubernetes.io/name=spillway", "--prefix", "--tail=12"],
        ];
        for arguments in objects.into_iter().chain(counters.iter().map(|arguments| &arguments[..])) {
            let output = self.cluster.try_kubectl(arguments);
            picture +=
                &output.map_or_else(|error| error.to_string(), |o| String::from_utf8_lossy(&o.stdout).into_owned());
            picture.push('\n');
        }
        picture
    }

    /// Replaces the pods of a workload, and waits until all of them run: `daemonset/spillway-agent`, `deployment/spillway-controller`.
    pub fn roll_out(&self, workload: &str) -> Result<()> {
        self.cluster.kubectl(&["rollout", "restart", "-n", "spillway", workload])?;
        self.cluster.kubectl(&["rollout", "status", "-n", "spillway", workload, "--timeout=180s"]).map(drop)
    }

    /// Waits until the objects that kubectl returns are `good`, and returns them.
    pub fn until(&self, what: &str, arguments: &[&str], good: impl Fn(&Value) -> bool) -> Result<Value> {
        // Not `wait_until`, whose message would contain a whole list of objects.
        let mut last = Value::Null;
        wait_for(what, PATIENCE, || {
            last = self.cluster.get(arguments)?;
            Ok(good(&last))
        })?;
        Ok(last)
    }

    /// Applies a pool of addresses `192.0.2.FIRST` to `192.0.2.LAST` on the gateways.
    pub fn pool(&self, name: &str, first: u8, last: u8) -> Result<()> {
        self.cluster.apply(&format!(
            "{{apiVersion: spillway.io/v1beta1, kind: EgressIPPool, metadata: {{name: {name}}}, spec: {{
               ipRanges: [{{start: 192.0.2.{first}, end: 192.0.2.{last}}}],
               nodeSelector: {{matchLabels: {{egress: 'true'}}}}, failback: {{delay: 1s}}}}}}"
        ))
    }

    /// Applies a policy for pods `app: APP` towards `destinations` with `count` addresses of the pool `public`.
    pub fn policy(&self, name: &str, app: &str, destinations: &str, count: usize) -> Result<()> {
        self.cluster.apply(&format!(
            "{{apiVersion: spillway.io/v1beta1, kind: EgressGatewayPolicy, metadata: {{name: {name}}}, spec: {{
               selectors: [{{podSelector: {{matchLabels: {{app: {app}}}}}}}], destinationCIDRs: [{destinations}],
               egressIPPools: [{{name: public, count: {count}}}]}}}}"
        ))
    }

    /// Applies a namespace, with or without the label `egress: allowed`, and an EgressPolicy in it for all of its pods
    /// towards `198.51.100.0/24`, with an address of the pool `teams`, which allows only namespaces with that label.
    pub fn team(&self, namespace: &str, allowed: bool) -> Result<()> {
        let labels = if allowed { "{egress: allowed}" } else { "{}" };
        let metadata = format!("{{name: {namespace}, labels: {labels}}}");
        self.cluster.apply(&format!("{{apiVersion: v1, kind: Namespace, metadata: {metadata}}}"))?;
        self.cluster.apply(
            "{apiVersion: spillway.io/v1beta1, kind: EgressIPPool, metadata: {name: teams}, spec: {
               ipRanges: [{start: 192.0.2.60, end: 192.0.2.61}], nodeSelector: {matchLabels: {egress: 'true'}},
               allowedNamespaces: {matchLabels: {egress: allowed}}, quotas: [{namespaceSelector: {}, maxEgressIPs: 1}]}}",
        )?;
        self.cluster.apply(&format!(
            "{{apiVersion: spillway.io/v1beta1, kind: EgressPolicy, metadata: {{name: team, namespace: {namespace}}}, spec: {{
               selectors: [{{podSelector: {{}}}}], destinationCIDRs: [198.51.100.0/24],
               egressIPPools: [{{name: teams}}]}}}}"
        ))
    }

    /// Waits until a policy has a condition with this status. Returns the condition's reason and message.
    pub fn condition(&self, policy: &str, kind: &str, status: &str) -> Result<(String, String)> {
        let find = |value: &Value| {
            let conditions = value["status"]["conditions"].as_array()?;
            conditions.iter().find(|condition| condition["type"] == kind && condition["status"] == status).cloned()
        };
        let what = format!("{policy} has {kind}={status}");
        let object = self.until(&what, &["egp", policy], |value| find(value).is_some())?;
        let found = find(&object).unwrap_or_default();
        let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
        Ok((text("reason"), text("message")))
    }

    /// Returns the running pods of a Deployment on the workers.
    pub fn deploy(&self, app: &str, replicas: usize) -> Result<Vec<ClusterPod>> {
        self.cluster.deploy(app, replicas)
    }

    /// Returns the network namespace of the servers.
    pub fn outside(&self) -> Result<NetNs> {
        self.cluster.netns("out")
    }

    /// Returns how many of `count` new connections of a pod to a port of a server come from each address.
    pub fn sources(&self, pod: &ClusterPod, server: usize, port: u16, count: usize) -> Result<BTreeMap<IpAddr, usize>> {
        let address = SocketAddr::new(SERVERS[server].parse()?, port);
        let echo = TcpServer::start(&self.outside()?, &[address], ServerMode::Echo)?;
        let options = TcpOptions { connect_timeout: Duration::from_secs(2), ..TcpOptions::once() };
        let clients = TcpClients::establish(&pod.ns, address, count, options)?;
        clients.wait("echoes", ANSWER, |all| all.iter().all(|one| one.received == 1))?;
        let sources = echo.sources();
        clients.close()?;
        Ok(sources)
    }

    /// Waits until new connections of a pod to a server come from exactly these addresses.
    pub fn wait_sources(&self, pod: &ClusterPod, server: usize, wanted: &[IpAddr]) -> Result<()> {
        let wanted: BTreeSet<IpAddr> = wanted.iter().copied().collect();
        let look = || {
            let sources = self.sources(pod, server, 7000, 12 * wanted.len())?;
            Ok(sources.into_keys().collect())
        };
        let what = format!("{} on {} is seen as {wanted:?}", pod.name, pod.node);
        wait_until(&what, PATIENCE, look, |sources: &BTreeSet<IpAddr>| *sources == wanted).map(drop)
    }

    /// Returns the cluster IP of a Service.
    pub fn cluster_ip(&self, service: &str) -> Result<IpAddr> {
        let object = self.cluster.get(&["service", service])?;
        Ok(object["spec"]["clusterIP"].as_str().context("a cluster IP")?.parse()?)
    }

    /// Connects a pod to the API server through its Service.
    pub fn reaches_the_api_server(&self, pod: &ClusterPod) -> Result<()> {
        let service = SocketAddr::new(self.cluster_ip("kubernetes")?, 443);
        let connected = pod.ns.run(|| Ok(TcpStream::connect_timeout(&service, PATIENCE)?));
        connected.map(drop).with_context(|| format!("{} does not reach the API server", pod.name))
    }

    /// Returns the source address that the pods of a node have outside without a policy.
    pub fn plain(&self, node: &str) -> IpAddr {
        let number = self.cluster.nodes().iter().find(|one| one.name == node).map_or(0, |one| one.number);
        IpAddr::from([10, 77, 0, 10 + number])
    }

    /// Returns the owner and epoch of each egress IP that has an owner.
    pub fn owners(&self) -> Result<BTreeMap<IpAddr, (String, u64)>> {
        let owned = |ip: EgressIp| Some((ip.address, (ip.node?, ip.epoch)));
        Ok(self.cluster.egress_ips()?.into_iter().filter_map(owned).collect())
    }

    /// Waits until this many egress IPs have an owner, and none is owned by `not`.
    pub fn wait_owners(&self, count: usize, not: &str) -> Result<BTreeMap<IpAddr, (String, u64)>> {
        let good = |owners: &BTreeMap<IpAddr, (String, u64)>| {
            owners.len() == count && owners.values().all(|(node, _)| node != not)
        };
        wait_until(&format!("{count} egress IPs have an owner other than {not:?}"), PATIENCE, || self.owners(), good)
    }

    /// Returns the leading controller.
    pub fn leader(&self) -> Result<String> {
        self.cluster.leader()?.ok_or_else(|| anyhow!("no controller leads"))
    }

    /// Waits until all parts of Spillway run.
    pub fn wait_installed(&self) -> Result<()> {
        self.cluster.wait_installed()
    }
}

impl Drop for InstalledCluster {
    fn drop(&mut self) {
        if self.kept {
            eprintln!("the cluster is kept running: {}", self.cluster.dir().display());
        } else if let Err(error) = self.cluster.down() {
            eprintln!("the cluster could not be removed: {error:#}");
        }
    }
}

/// Returns whether the cluster is kept running, and a kept one reused, which helps when writing tests.
fn keep() -> bool {
    std::env::var_os("SPILLWAY_KEEP_CLUSTER").is_some()
}

/// `192.0.2.HOST` for each host.
pub fn egress(hosts: impl IntoIterator<Item = u8>) -> Vec<IpAddr> {
    hosts.into_iter().map(|host| IpAddr::from([192, 0, 2, host])).collect()
}
