//! The real controller and real agents with a real API server that has thousands of nodes, which `egress-daemon/examples/fill.rs`
//! creates and whose kubelets KWOK simulates. The API server's own metrics count the costs.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::ops::Sub;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::cluster::{Cluster, Kubernetes};
use lab::netns::NetNs;
use lab::scope::Watchdog;
use lab::{Process, wait_for, wait_until};

use super::agents::Agents;
use xtask::progress::Step;
use xtask::{cluster, setup, workspace};

/// The size of the cluster.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub nodes: u32,
    pub pods: u32,
    pub policies: u32,
    pub egress_ips: u32,
}

/// The work of the API server for Spillway.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Writes of Spillway's objects and of their statuses, by any client.
    pub writes: u64,
    /// Lists of any kind answered by the watch cache, and by etcd.
    pub lists: [u64; 2],
    /// Changes of EgressNodes that watchers were sent, and their bytes.
    pub told: [u64; 2],
}

impl Sub for Counts {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        let less = |a: [u64; 2], b: [u64; 2]| [a[0] - b[0], a[1] - b[1]];
        Self {
            writes: self.writes - before.writes,
            lists: less(self.lists, before.lists),
            told: less(self.told, before.told),
        }
    }
}

/// The memory of a controller and agents in a whole cluster, and their costs for the API server.
pub struct Measured {
    /// The peak memory of the controller, in bytes.
    pub resident: u64,
    /// The memory of an agent on a gateway, and on another node, in bytes, after all changes.
    pub agent: [u64; 2],
    /// The number of running agents.
    pub agents: usize,
    /// The processor time that an agent takes per second when nothing happens.
    pub idle: Duration,
    /// The costs of the controller's start, until everything is written.
    pub everything: Counts,
    /// The costs of changes, by description.
    pub changes: Vec<(&'static str, Counts)>,
}

/// The name of the cluster.
const NAME: &str = "large";
/// The time that a controller may take for everything.
const PATIENCE: Duration = Duration::from_secs(600);
/// The time without writes after which all is done: numbers of pods follow after 5 s, egress IPs that a gateway no
/// longer carries after 10 s, and agents report within 30 s what is not urgent.
const SETTLED: Duration = Duration::from_secs(35);
/// The time for which a cluster is observed in which nothing happens.
const AT_REST: Duration = Duration::from_secs(60);
/// The distance between the numbers of gateways. All gateways have agents, because sources probe them.
pub const GATEWAY_EVERY: u32 = 1_000;
/// The host number of an address in the nodes' network that no node has: KWOK and the controllers use it.
const NO_NODE: u32 = 0xfffe;
/// Nodes with agents that are not gateways. The nodes on which single pods start have agents as well.
const WORKERS: std::ops::RangeInclusive<u32> = 1..=3;

/// Returns whether a node is a gateway.
pub fn is_gateway(node: u32) -> bool {
    node.is_multiple_of(GATEWAY_EVERY)
}

/// Measures with the release build in `binaries`.
pub fn measure(binaries: &Path, size: Size) -> Result<Measured> {
    let Size { nodes, pods, policies, egress_ips } = size;
    setup::ensure(setup::Scope::Cluster)?;
    cluster::build(Kubernetes::default())?;
    let kwok = cluster::build_kwok()?;
    let step = Step::start(&format!("an API server with {nodes} nodes, {pods} pods, {policies} policies"));
    let cluster = Cluster::new(NAME, &cluster::binaries()?, 0, 0);
    let large = Large { _watchdog: Watchdog::start(NAME, cluster.dir())?, cluster, binaries: binaries.to_owned() };
    large.cluster.up_alone()?;
    large.cluster.kubectl(&["apply", "-f", &workspace::root().join("manifests/crds").display().to_string()])?;
    let began = Instant::now();
    let mut agents = Agents::new(&large.cluster, &binaries.join("egress-daemon"))?;
    let outside = agents.namespace(NO_NODE)?;
    let _kubelets = large.kubelets(&kwok, &outside)?;
    let mut filler = large.fill(size)?;
    large.wait_running()?;
    step.end("✓", &format!("{} s", began.elapsed().as_secs()));

    let step = Step::start("agents in front of it");
    let [fresh, other] = [nodes / 2 + 2, nodes / 2 + 3];
    for node in (0..nodes).filter(|node| is_gateway(*node)).chain(WORKERS).chain([fresh, other]) {
        step.at(&format!("node {node}"));
        agents.start(node)?;
    }
    let empty = large.settled()?;
    step.end("✓", &format!("{}", agents.count()));

    let step = Step::start("a controller in front of it");
    let first = large.controller("first", &outside, &agents.config())?;
    let created = || Ok([large.count("egressips")?, large.count("egressnodes")?]);
    let all = [u64::from(egress_ips), u64::from(nodes)];
    wait_until("every egress IP and node has its object", PATIENCE, created, |found| *found == all)?;
    let mut last = large.settled()?;
    let everything = last - empty;
    let resident = memory(first.pid(), "VmHWM")?;
    let mut changes = Vec::new();
    let busy = agents.processor_time()?;
    step.at("a minute at rest");
    std::thread::sleep(AT_REST);
    let idle = (agents.processor_time()? - busy).div_f64(AT_REST.as_secs_f64() * agents.count() as f64);
    let mut add = |what, now: Counts, own: u64| {
        let mut cost = now - std::mem::replace(&mut last, now);
        cost.writes -= own;
        changes.push((what, cost));
    };
    add("a minute in which nothing happens", large.counts()?, 0);
    // The filler's own writes of Spillway's objects do not count.
    let mut change = |what, line: String, node: Option<u32>, own: u64| -> Result<()> {
        step.at(what);
        filler.ask(&line)?;
        large.wait_running()?;
        node.map_or(Ok(()), |node| agents.add_missing_interfaces(node))?;
        add(what, large.settled()?, own);
        Ok(())
    };
    let pod = |number: u32, application: u32, node: u32| format!("pods 1 {} {application} {node}", pods + number);
    change("one more pod, on a node that has pods of its application", pod(0, 1, 1), Some(1), 0)?;
    change("one more pod, on a node that has none", pod(1, 1, fresh), Some(fresh), 0)?;
    change("the same, with `PerEndpoint`", pod(2, 4, other), Some(other), 0)?;
    let hundred = format!("pods 100 {} 2 {}", pods + 3, other + 1);
    change("a hundred pods at once, on nodes that have none", hundred, None, 0)?;
    change("one more policy, for an application's pods", format!("policy {policies} 7"), None, 1)?;
    step.at("a node that joins");
    filler.ask(&format!("node {}", nodes + 1))?;
    agents.start(nodes + 1)?;
    add("a node that joins, with its agent", large.settled()?, 0);
    drop(first);
    let second = large.controller("second", &outside, &agents.config())?;
    let leads =
        |holder: &Option<String>| holder.as_ref().is_some_and(|holder| holder.ends_with(&format!("-{}", second.pid())));
    wait_until("the second controller leads", PATIENCE, || large.cluster.leader(), leads)?;
    add("a controller that takes over", large.settled()?, 0);
    step.at("an API server that restarts");
    large.cluster.kill_api_server()?;
    large.cluster.start_api_server()?;
    // The counters of the new API server start at zero.
    changes.push(("an API server that restarts", large.settled()?));
    step.end("✓", &format!("{} MiB", resident >> 20));
    let agent = [agents.largest("VmRSS", is_gateway)?, agents.largest("VmRSS", |node| !is_gateway(node))?];
    Ok(Measured { resident, agent, agents: agents.count(), idle, everything, changes })
}

struct Large {
    cluster: Cluster,
    binaries: PathBuf,
    /// Removes the cluster if the benchmark is interrupted: all of it runs in the cluster's namespaces.
    _watchdog: Watchdog,
}

impl Drop for Large {
    fn drop(&mut self) {
        if let Err(error) = self.cluster.down() {
            eprintln!("the API server could not be removed: {error:#}");
        }
    }
}

impl Large {
    /// Starts KWOK, which simulates the kubelets of all nodes. It rarely renews their leases, which nothing reads here.
    fn kubelets(&self, kwok: &Path, ns: &NetNs) -> Result<Process> {
        let mut command = ns.command(kwok);
        command.arg("--kubeconfig").arg(self.cluster.dir().join("kubeconfig"));
        command.arg("--config").arg(workspace::root().join("tests/cluster/kwok/kwok.yaml"));
        command.args(["--manage-all-nodes", "--node-lease-duration-seconds", "3600"]);
        Process::start("kwok", None, command, self.cluster.dir())
    }

    /// Waits until all pods run.
    fn wait_running(&self) -> Result<()> {
        let path = "/api/v1/pods?limit=1&fieldSelector=status.phase!%3DRunning";
        wait_for("all pods run", PATIENCE, || {
            let page: serde_json::Value = serde_json::from_str(&self.cluster.kubectl(&["get", "--raw", path])?)?;
            Ok(page["items"].as_array().is_some_and(Vec::is_empty))
        })
    }

    /// Creates the objects, which takes minutes.
    fn fill(&self, size: Size) -> Result<Filler> {
        let mut command = self.cluster.netns("cp")?.command(self.binaries.join("examples/fill"));
        command.arg(self.cluster.dir().join("kubeconfig"));
        command.args([size.nodes, size.pods, size.policies, size.egress_ips, GATEWAY_EVERY].map(|n| n.to_string()));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("the filler")?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (input, output) = input.zip(output).context("the filler has no pipes")?;
        let mut filler = Filler { child, input, output: BufReader::new(output).lines() };
        filler.hear("ready")?;
        Ok(filler)
    }

    /// Starts a controller with the agents' configuration. Its log, which shows changes of owners, stays in xtask's folder.
    fn controller(&self, name: &str, ns: &NetNs, config: &Path) -> Result<Process> {
        let mut command = ns.command(self.binaries.join("egress-daemon"));
        command.args(["controller", "--kubeconfig"]).arg(self.cluster.dir().join("kubeconfig"));
        command.arg("--config").arg(config);
        Process::start(&format!("scale-controller-{name}"), None, command, &workspace::scratch_dir()?)
    }

    /// Returns the number of objects of one of Spillway's kinds.
    fn count(&self, resource: &str) -> Result<u64> {
        let path = format!("/apis/spillway.io/v1alpha1/{resource}?limit=1");
        let page: serde_json::Value = serde_json::from_str(&self.cluster.kubectl(&["get", "--raw", &path])?)?;
        let shown = page["items"].as_array().map_or(0, Vec::len) as u64;
        Ok(shown + page["metadata"]["remainingItemCount"].as_u64().unwrap_or(0))
    }

    fn counts(&self) -> Result<Counts> {
        let metrics = self.cluster.kubectl(&["get", "--raw", "/metrics"])?;
        let sum = |name: &str, labels: &[&str]| {
            let lines =
                metrics.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
            let chosen = lines.filter(|line| labels.iter().all(|label| line.contains(label)));
            let value = |line: &str| line.rsplit(' ').next().and_then(|number| number.parse::<f64>().ok());
            chosen.filter_map(value).sum::<f64>() as u64
        };
        let verbs = ["POST", "PUT", "PATCH", "APPLY", "DELETE"].map(|verb| format!("verb=\"{verb}\""));
        let own = "group=\"spillway.io\"";
        Ok(Counts {
            writes: verbs.iter().map(|verb| sum("apiserver_request_total", &[own, verb])).sum(),
            lists: ["watchcache", "etcd"]
                .map(|by| sum("apiserver_storage_list_total", &[&format!("storage=\"{by}\"")])),
            told: ["apiserver_watch_events_total", "apiserver_watch_events_sizes_sum"]
                .map(|name| sum(name, &["resource=\"egressnodes\""])),
        })
    }

    /// Waits until nothing has been written for a while, and returns the counts.
    fn settled(&self) -> Result<Counts> {
        let (mut counts, mut since) = (self.counts()?, Instant::now());
        wait_for("nothing is written any more", PATIENCE, || {
            let now = self.counts()?;
            if now.writes != counts.writes {
                since = Instant::now();
            }
            counts = now;
            Ok(since.elapsed() >= SETTLED)
        })?;
        Ok(counts)
    }
}

/// The process that fills the API server.
struct Filler {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Filler {
    fn ask(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}")?;
        self.hear("done")
    }

    fn hear(&mut self, word: &str) -> Result<()> {
        let said = self.output.next().context("the filler has ended")??;
        ensure!(said == word, "the filler printed {said} instead of {word}");
        Ok(())
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        // The process has ended, or is killed here.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Returns the memory of a process in bytes, by a field of its status: `VmRSS` is the current memory, `VmHWM` the peak.
pub fn memory(pid: u32, field: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).context("the process has ended")?;
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib: u64 = line.with_context(|| format!("no {field}"))?.trim().trim_end_matches(" kB").parse()?;
    Ok(kib << 10)
}
