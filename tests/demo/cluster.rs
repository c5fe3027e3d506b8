//! The demo's small cluster: two workers with pods, three gateways, two outside servers, and Spillway.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use lab::traffic::{ServerMode, TcpOptions, TcpServer};
use lab::{Cni, Family, Lab, PodSpec, Server, StartOptions, wait_until};

use super::claims::{Claim, Claims};
use super::flows;
use super::screen::Screen;
use super::sightings::Sightings;
use super::streams::Streams;
use xtask::workspace;

/// Pods by name, node and label `app`. worker1 connects its pods as Calico does, worker2 by a bridge as flannel does.
const PODS: [(&str, &str, &str); 11] = [
    ("web-1", "worker1", "web"),
    ("web-2", "worker1", "web"),
    ("web-3", "worker2", "web"),
    ("web-4", "worker2", "web"),
    ("ledger-1", "worker1", "ledger"),
    ("ledger-2", "worker1", "ledger"),
    ("ledger-3", "worker1", "ledger"),
    ("ledger-4", "worker2", "ledger"),
    ("ledger-5", "worker2", "ledger"),
    ("ledger-6", "worker2", "ledger"),
    ("mail-1", "worker1", "mail"),
];

/// The manifest of the pools, which is applied first: pools tell nodes that they may be gateways.
pub const POOLS: &str = "pools";
/// The manifests of policies to apply, by file name without `.yaml`, each with its policy.
pub const MANIFESTS: [(&str, &str); 3] =
    [("web-per-flow", "web"), ("ledger-per-endpoint", "ledger"), ("mail-weighted", "mail")];

/// The manifest that is applied while connections are being opened, and its policy.
pub const EXCEPTION: (&str, &str) = ("web-to-partner", "partner");

/// The name of the controller among the lab's processes.
pub const CONTROLLER: &str = "controller";
/// The ports where the servers echo, and where they stream.
pub const ECHO_PORT: u16 = 80;
pub const STREAM_PORT: u16 = 8080;
/// The port where agents serve their metrics, each in its node's namespace.
pub const METRICS_PORT: u16 = 9473;
const PATIENCE: Duration = Duration::from_secs(20);

/// The state shared by the scenes.
pub struct Show {
    /// The narration.
    pub screen: Screen,
    /// The claims.
    pub claims: Claims,
    /// Long-lived connections, once they are open.
    pub streams: Option<Streams>,
    /// Echo on `server1`, which is next to the gateways.
    pub near: TcpServer,
    /// Echo on `far1`, which is behind a router.
    pub far: TcpServer,
    /// The gateways of `web`'s egress IPs while all gateways were healthy.
    pub home: BTreeMap<IpAddr, String>,
    /// Packets that `server1` has seen in all scenes.
    pub sightings: Sightings,
    /// The cluster.
    pub lab: Lab,
    /// The options with which agents are started.
    pub agents: StartOptions,
    /// The options with which the controller is started.
    pub controller: StartOptions,
}

impl Show {
    /// Builds the cluster and starts Spillway in it, with pools but without policies.
    pub fn open(screen: Screen, binaries: &Path) -> Result<Show> {
        let mut lab = screen.wait("build a cluster of network namespaces", || {
            let mut lab = Lab::builder().workers(2).gateways(3).build()?;
            for (name, node, app) in PODS {
                let cni = if node == "worker1" { Cni::PointToPoint } else { Cni::Bridge };
                lab.add_pod(PodSpec::new(name, node).label("app", app).cni(cni))?;
            }
            Ok(lab)
        })?;
        lab.manifests().write(POOLS, &example(POOLS)?)?;
        let controller = StartOptions::new().binary(&binaries.join("egress-daemon"));
        let agents = controller.clone().config(&format!("metrics: 0.0.0.0:{METRICS_PORT}\n"));
        lab.start_controller(CONTROLLER, &controller)?;
        lab.start_agents(&agents)?;
        let (near, far) = (lab.server("server1"), lab.server("far1"));
        let near = TcpServer::start(&near.ns, &near.ips.both(ECHO_PORT), ServerMode::Echo)?;
        let far = TcpServer::start(&far.ns, &far.ips.both(ECHO_PORT), ServerMode::Echo)?;
        let (claims, sightings) = (Claims::default(), Sightings::default());
        let home = BTreeMap::new();
        Ok(Show { screen, claims, streams: None, near, far, home, sightings, lab, agents, controller })
    }

    /// Waits until every node's agent reports. Gateways take their leases when the plan names them.
    pub fn wait_agents(&self) -> Result<()> {
        let nodes = self.lab.nodes().count();
        let reporting = || Ok(self.lab.manifests().reporting()?.len());
        wait_until("every agent reports", PATIENCE, reporting, |count| *count == nodes).map(drop)
    }

    /// Applies the policies and waits until all are in force: first as the controller reports, then as every pod sees it.
    pub fn apply(&self) -> Result<()> {
        for (file, _) in MANIFESTS {
            self.lab.manifests().write(file, &example(file)?)?;
        }
        for (_, policy) in MANIFESTS {
            let obstacle = || self.lab.manifests().obstacle(policy);
            wait_until(&format!("policy {policy} is in force"), PATIENCE, obstacle, Option::is_none)?;
        }
        for (pod, _, app) in PODS {
            for family in Family::BOTH.into_iter().filter(|family| *family == Family::V4 || app != "mail") {
                let source = || {
                    let source = self.source_of_a_flow(pod, family)?;
                    Ok((source, self.egress_addresses()?.contains(&source)))
                };
                wait_until(&format!("pod {pod} leaves with an egress IP"), PATIENCE, source, |(_, right)| *right)?;
            }
        }
        Ok(())
    }

    /// Opens one connection from a pod to the near server and returns the source address that the server sees.
    fn source_of_a_flow(&self, pod: &str, family: Family) -> Result<IpAddr> {
        let options = TcpOptions { connect_timeout: Duration::from_millis(300), ..TcpOptions::once() };
        let target = self.server().ips.at(family, ECHO_PORT);
        let (_clients, source) = flows::seen(&self.lab.pod(pod).ns, target, options, &self.near)?;
        Ok(source.ip())
    }

    /// Opens the long-lived connections of the pods `web-1` to `web-4`, in both families.
    pub fn open_streams(&mut self, per_pod: usize) -> Result<()> {
        let pods = [("web-1", Family::V4), ("web-2", Family::V6), ("web-3", Family::V4), ("web-4", Family::V6)];
        let ips = self.server().ips;
        let clients = pods.map(|(pod, family)| (self.lab.pod(pod).ns.clone(), ips.at(family, STREAM_PORT)));
        self.streams = Some(Streams::open(&self.server().ns, &clients, per_pod)?);
        Ok(())
    }

    /// Returns the long-lived connections.
    pub fn streams(&self) -> Result<&Streams> {
        self.streams.as_ref().context("the long-lived connections are not open")
    }

    /// Returns the server next to the gateways.
    pub fn server(&self) -> &Server {
        self.lab.server("server1")
    }

    /// Returns the addresses of all egress IPs.
    pub fn egress_addresses(&self) -> Result<Vec<IpAddr>> {
        Ok(self.lab.manifests().egress_ips()?.iter().map(|one| one.address).collect())
    }

    /// Shows and records a claim.
    pub fn claim(&mut self, name: &str, holds: bool, expected: impl Into<String>, measured: impl Into<String>) {
        self.add(Claim { name: name.to_owned(), holds, expected: expected.into(), measured: measured.into() });
    }

    /// Shows and records a claim.
    pub fn add(&mut self, claim: Claim) {
        self.screen.claim(&claim);
        self.claims.add(claim);
    }

    /// Returns the ends of the logs of all processes that have ended on their own.
    pub fn logs_of_ended_processes(&mut self) -> Vec<String> {
        let nodes: Vec<String> = self.lab.nodes().map(|node| node.name.clone()).collect();
        let mut found = Vec::new();
        let mut look = |process: &mut lab::Process| {
            if !process.alive().unwrap_or(true) {
                let log = process.log();
                let lines: Vec<&str> = log.lines().collect();
                let tail = lines[lines.len().saturating_sub(12)..].join("\n      ");
                found.push(format!("{} has ended:\n      {tail}", process.name()));
            }
        };
        look(self.lab.controller(CONTROLLER));
        nodes.iter().for_each(|node| look(self.lab.agent(node)));
        found
    }
}

/// Returns the text of `manifests/examples/NAME.yaml`.
pub fn example(name: &str) -> Result<String> {
    let path = workspace::root().join("manifests/examples").join(format!("{name}.yaml"));
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if text.is_empty() {
        bail!("{} is empty", path.display());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_applied() {
        let folder = workspace::root().join("manifests/examples");
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        names.sort();
        let mut applied: Vec<&str> =
            MANIFESTS.iter().chain([&EXCEPTION]).map(|(file, _)| *file).chain([POOLS]).collect();
        // This example is for a namespace that the demo does not have.
        applied.push("team");
        applied.sort_unstable();
        assert_eq!(names, applied);
    }

    #[test]
    fn every_pod_belongs_to_a_policy() {
        for (pod, _, app) in PODS {
            assert!(MANIFESTS.iter().any(|(_, policy)| *policy == app) && pod.starts_with(app), "{pod}");
        }
    }
}
