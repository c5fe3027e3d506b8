//! `cargo xtask demo --cluster`: the same story on a real Kubernetes, with the output of kubectl.

mod questions;
mod scenes;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use lab::cluster::{Cluster, ClusterPod, SERVERS};
use lab::traffic::{ServerMode, TcpServer};
use lab::{Capture, NetNs, wait_until};

use super::claims::{Claim, Claims};
use super::screen::Screen;
use super::sightings::Sightings;
use super::streams::Streams;
use super::{Args, summary};
use xtask::{cluster, setup, workspace};

/// The ports where the server echoes, and where it streams.
const ECHO_PORT: u16 = 80;
const STREAM_PORT: u16 = 8080;
const PATIENCE: Duration = Duration::from_secs(60);

/// The state shared by the scenes.
struct Show {
    screen: Screen,
    claims: Claims,
    cluster: Cluster,
    /// The namespace of the servers.
    outside: NetNs,
    echo: TcpServer,
    /// The pods `app: web`.
    web: Vec<ClusterPod>,
    /// Their long-lived connections, once they are open.
    streams: Option<Streams>,
    /// Captures of the outside, once the policy is in force.
    captures: Vec<Capture>,
    /// The gateways of `web`'s egress IPs while all gateways were healthy.
    home: BTreeMap<IpAddr, String>,
}

/// Runs the demo on Kubernetes. Returns whether all claims hold.
pub fn demo(args: &Args) -> Result<bool> {
    if !args.quick {
        setup::ensure(setup::Scope::Demo)?;
    }
    let started = Instant::now();
    let screen = Screen::new(args.json);
    screen.lines(&introduction());
    let there = cluster::the_cluster()?;
    let was_up = there.is_up();
    let cluster = if was_up { there } else { cluster::start(false)? };
    if !cluster.get(&["egp,eipp"])?["items"].as_array().is_none_or(Vec::is_empty) {
        bail!(
            "the cluster has policies or pools already: delete them (kubectl delete egp,eipp --all), or `cargo xtask cluster down`"
        );
    }
    let mut show = open(screen, cluster)?;
    if let Err(error) = scenes::play(&mut show, args.quick) {
        show.claim("the demo runs to its end", false, "no error", format!("{error:#}"));
    }
    let Show { screen, claims, cluster, .. } = show;
    summary(&screen, &claims, started);
    if was_up || args.keep {
        cluster.kubectl(&["delete", "egp,eipp", "--all", "--wait=true"])?;
        cluster.kubectl(&["delete", "deployments,replicasets,pods", "--all", "--wait=true"])?;
        if !args.json {
            cluster.serve_outside()?;
            cluster::hints(&cluster)?;
        }
    } else {
        cluster.down()?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&claims)?);
    }
    Ok(claims.all_hold())
}

fn open(screen: Screen, cluster: Cluster) -> Result<Show> {
    let outside = cluster.netns("out")?;
    let echo = TcpServer::start(&outside, &[server(ECHO_PORT)?], ServerMode::Echo)?;
    let (claims, web, captures, home) = (Claims::default(), Vec::new(), Vec::new(), BTreeMap::new());
    Ok(Show { screen, claims, cluster, outside, echo, web, streams: None, captures, home })
}

/// Returns the address of the outside server with a port.
fn server(port: u16) -> Result<SocketAddr> {
    Ok(SocketAddr::new(SERVERS[0].parse()?, port))
}

impl Show {
    /// Runs a kubectl command, and shows it with its output.
    fn kubectl(&self, arguments: &[&str]) -> Result<()> {
        let output = self.cluster.kubectl(arguments)?;
        self.print(arguments, &output);
        Ok(())
    }

    fn print(&self, arguments: &[&str], output: &str) {
        // A newcomer's shell is in the repository: its path is left out.
        let shown = arguments.join(" ").replace(&format!("{}/", workspace::root().display()), "");
        let mut lines = vec![String::new(), format!("$ kubectl {shown}")];
        lines.extend(output.lines().map(ToOwned::to_owned));
        lines.push(String::new());
        self.screen.lines(&lines);
    }

    /// Shows and records a claim.
    fn claim(&mut self, name: &str, holds: bool, expected: impl Into<String>, measured: impl Into<String>) {
        self.add(Claim { name: name.to_owned(), holds, expected: expected.into(), measured: measured.into() });
    }

    fn add(&mut self, claim: Claim) {
        self.screen.claim(&claim);
        self.claims.add(claim);
    }

    /// Returns the current gateway of each IPv4 egress IP of a policy, or `-` if it has none.
    fn carriers(&self, policy: &str) -> Result<BTreeMap<IpAddr, String>> {
        let used = self.cluster.egress_ips()?.into_iter();
        let used = used.filter(|ip| ip.address.is_ipv4() && ip.policies.iter().any(|user| user == policy));
        Ok(used.map(|ip| (ip.address, ip.node.unwrap_or_else(|| "-".to_owned()))).collect())
    }

    /// Waits until the gateways of a policy's egress IPs satisfy `good`, and returns them.
    fn wait_carriers(
        &self,
        policy: &str,
        what: &str,
        good: impl Fn(&BTreeMap<IpAddr, String>) -> bool,
    ) -> Result<BTreeMap<IpAddr, String>> {
        let look = || self.carriers(policy);
        self.screen.wait(what, || wait_until(what, PATIENCE, look, |all| !all.is_empty() && good(all)))
    }

    /// Ends the captures and returns whether every packet in the outside came from an egress IP.
    fn sightings(&mut self) -> Result<Sightings> {
        let allowed: Vec<IpAddr> = self.cluster.egress_ips()?.into_iter().map(|ip| ip.address).collect();
        let mut seen = Sightings::default();
        for capture in self.captures.drain(..) {
            let (trace, lost) = capture.finish_lossy()?;
            seen.add(&Sightings::of(&trace.sources_towards(server(ECHO_PORT)?.ip()), &allowed, lost));
        }
        Ok(seen)
    }
}

fn introduction() -> Vec<String> {
    r#"
Spillway spreads the traffic that leaves a Kubernetes cluster over several gateways. Here is such a cluster on this
machine: a real control plane, and six nodes with kubelet, containerd, kube-proxy and a CNI that masquerades.

  worker1 ┐                     ┌ gateway1 ┐
  worker2 ├── nodes' network ───┼ gateway2 ┼── outside ── server 203.0.113.7
  worker3 ┘                     └ gateway3 ┘

Spillway is installed as a user would: `kubectl apply -k manifests/`."#
        .lines()
        .map(str::to_owned)
        .collect()
}
