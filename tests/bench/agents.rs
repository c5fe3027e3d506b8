//! Real agents on some nodes of a cluster whose kubelets KWOK simulates: each in its own network namespace, with an
//! interface for each pod of its node.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use lab::Process;
use lab::cluster::Cluster;
use lab::netns::NetNs;
use lab::scope::Scope;

use super::large::{is_gateway, memory};
use super::variant::CALM;

/// The first address of the nodes (`egress-daemon/examples/fill.rs`), and the control plane's address in their network.
const NODES: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 0);
const CONTROL_PLANE: &str = "172.16.255.1";

/// The file of the agents' configuration in the scope's folder.
const CONFIG: &str = "config.yaml";

/// The agents of a cluster, ended and removed when dropped.
pub struct Agents<'a> {
    cluster: &'a Cluster,
    program: PathBuf,
    /// Declared before the scope: the agents end before their namespaces are removed.
    running: BTreeMap<u32, (NetNs, Process)>,
    /// The far ends of the pods' interfaces.
    pods: NetNs,
    scope: Scope,
}

impl<'a> Agents<'a> {
    /// Prepares the network, without agents yet. `program` is the daemon that all agents run.
    pub fn new(cluster: &'a Cluster, program: &Path) -> Result<Self> {
        let mut scope = Scope::open()?;
        cluster.netns("cp")?.ip(&[format!("addr add {CONTROL_PLANE}/16 dev nodes")])?;
        let pods = scope.namespace("pods")?;
        fs::write(scope.dir().join(CONFIG), CALM).context("the agents' configuration")?;
        Ok(Self { cluster, program: program.to_owned(), running: BTreeMap::new(), pods, scope })
    }

    /// Returns the path of the agents' configuration.
    pub fn config(&self) -> PathBuf {
        self.scope.dir().join(CONFIG)
    }

    /// Creates a namespace in the nodes' network, with its `host`th address. Programs in it end if this program is interrupted.
    pub fn namespace(&mut self, host: u32) -> Result<NetNs> {
        let ns = self.scope.namespace(&format!("n{host}"))?;
        self.cluster.netns("cp")?.ip(&[
            format!("link add n{host} type veth peer name eth0 netns {}", ns.name()),
            format!("link set n{host} master nodes"),
            format!("link set n{host} up"),
        ])?;
        ns.ip(&[
            format!("addr add {}/16 dev eth0", Ipv4Addr::from(NODES.to_bits() + host)),
            "link set eth0 up".to_owned(),
            format!("route add default via {CONTROL_PLANE}"),
        ])?;
        Ok(ns)
    }

    /// Starts the agent of a node, with interfaces for the node's pods.
    pub fn start(&mut self, node: u32) -> Result<()> {
        let ns = self.namespace(node)?;
        let name = node_name(node);
        // In a real cluster, each agent has a node's processors. Here, it gets the time that the API server and the
        // controllers leave, but a gateway must renew its lease to stay alive.
        let mut command = ns.command("nice");
        command.args(["-n", if is_gateway(node) { "0" } else { "19" }]).arg(&self.program);
        command.args(["agent", "--log", "warn", "--node", &name]).arg("--bpffs").arg(self.scope.bpffs(&name));
        command.arg("--kubeconfig").arg(self.cluster.dir().join("kubeconfig"));
        command.arg("--config").arg(self.config());
        command.env("STATE_DIRECTORY", self.scope.dir().join(&name));
        self.running.insert(node, (ns, Process::start(&name, Some(&name), command, self.scope.dir())?));
        self.add_missing_interfaces(node)
    }

    /// Creates the missing interfaces of a node's pods. Does nothing if no agent runs on the node.
    pub fn add_missing_interfaces(&self, node: u32) -> Result<()> {
        let Some((ns, _)) = self.running.get(&node) else { return Ok(()) };
        let field = format!("--field-selector=spec.nodeName={}", node_name(node));
        let path = "jsonpath={range .items[*]}{.status.podIP}{'\\n'}{end}";
        let mut lines = [Vec::new(), Vec::new()];
        for ip in self.cluster.kubectl(&["get", "pods", "-A", &field, "-o", path])?.lines() {
            let host = ip.parse::<Ipv4Addr>()?.octets()[3];
            let (near, far) = (format!("p{host}"), format!("p{node}-{host}"));
            if !ns.run(|| Ok(nix::net::if_::if_nametoindex(&*near).is_ok()))? {
                lines[0].push(format!("link add {near} type veth peer name {far} netns {}", self.pods.name()));
                lines[0].extend([format!("link set {near} up"), format!("route add {ip} dev {near}")]);
                lines[1].push(format!("link set {far} up"));
            }
        }
        ns.ip(&lines[0])?;
        self.pods.ip(&lines[1])
    }

    /// Returns the number of running agents.
    pub fn count(&self) -> usize {
        self.running.len()
    }

    /// Returns the largest memory in bytes of an agent on the selected nodes, by a field of its status as in [`memory`].
    pub fn largest(&self, field: &str, is_one: impl Fn(u32) -> bool) -> Result<u64> {
        let some = self.running.iter().filter(|(node, _)| is_one(**node));
        let mut all = some.map(|(_, (_, agent))| memory(agent.pid(), field));
        all.try_fold(0, |most, one| Ok(most.max(one?)))
    }

    /// Returns the processor time of all agents so far.
    pub fn processor_time(&self) -> Result<Duration> {
        let ticks = |agent: &Process| {
            let stat = fs::read_to_string(format!("/proc/{}/stat", agent.pid())).context("an agent has ended")?;
            // The name, in parentheses, may contain spaces. utime and stime are fields 14 and 15 (proc_pid_stat(5)).
            let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
            Ok::<_, anyhow::Error>(fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>())
        };
        let all = self.running.values().map(|(_, agent)| ticks(agent)).sum::<Result<u64>>()?;
        let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.unwrap_or(100);
        Ok(Duration::from_secs_f64(all as f64 / per_second as f64))
    }
}

fn node_name(n: u32) -> String {
    format!("node-{n:05}")
}
