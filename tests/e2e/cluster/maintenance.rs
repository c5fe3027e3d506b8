//! What an operator does to living gateways, without effect on traffic.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::cluster::{ClusterPod, SERVERS};
use lab::traffic::{ConnectRate, ServerMode, TcpServer, UdpClients, UdpOptions, UdpServer, syns_retransmitted};
use lab::{wait_for, wait_until};

use crate::Test;
use crate::world::{InstalledCluster, PATIENCE, egress};

pub const TESTS: &[Test] = &[("maintenance::gateways_are_maintained_and_nothing_is_lost", gateways_are_maintained)];

const HOSTS: std::ops::RangeInclusive<u8> = 10..=12;
/// A lost SYN is retransmitted after one second, which is beyond this timeout.
const BEFORE_SECOND_SYN: Duration = Duration::from_millis(900);

/// Continuous queries, and new connections during each step.
struct Load {
    pods: Vec<ClusterPod>,
    questions: Vec<UdpClients>,
    target: SocketAddr,
    _servers: (TcpServer, UdpServer),
}

impl Load {
    fn start(world: &InstalledCluster, pods: Vec<ClusterPod>) -> Result<Load> {
        let outside = world.outside()?;
        let at = |port| Ok::<_, anyhow::Error>(SocketAddr::new(SERVERS[0].parse()?, port));
        let (target, asked) = (at(81)?, at(82)?);
        let servers = (TcpServer::start(&outside, &[target], ServerMode::Echo)?, UdpServer::start(&outside, &[asked])?);
        let options = || UdpOptions { interval: Duration::from_millis(5), ..UdpOptions::default() };
        let questions =
            pods.iter().map(|pod| UdpClients::start(&pod.ns, asked, 4, options())).collect::<Result<_>>()?;
        Ok(Load { pods, questions, target, _servers: servers })
    }

    /// Runs a step, and checks that no packet was lost from its beginning to its end.
    fn during(&self, what: &str, step: impl FnOnce() -> Result<()>) -> Result<()> {
        let rate = ConnectRate { per_second: 100, timeout: BEFORE_SECOND_SYN, ..ConnectRate::default() };
        let syns_retransmitted = || self.pods.iter().map(|pod| syns_retransmitted(&pod.ns)).sum::<Result<u64>>();
        let before = syns_retransmitted()?;
        let rates = self.pods.iter().map(|pod| rate.start(&pod.ns, self.target)).collect::<Result<Vec<_>>>()?;
        step().with_context(|| what.to_owned())?;
        let mut opened = 0;
        for rate in rates {
            let report = rate.finish()?;
            ensure!(report.failures() == 0, "{what}: of {} new connections: {:?}", report.opened, report.failed);
            opened += report.opened;
        }
        let again = syns_retransmitted()? - before;
        ensure!(again == 0, "{what}: {again} SYNs were retransmitted");
        let answered: Result<Vec<u64>> = self.questions.iter().map(UdpClients::all_answered).collect();
        let answered =
            answered.with_context(|| format!("{what} lost packets of established flows"))?.iter().sum::<u64>();
        eprintln!("{what}: {opened} connections opened, {answered} datagrams answered since the start");
        Ok(())
    }
}

fn gateways_are_maintained(world: &InstalledCluster) -> Result<()> {
    let pods = world.deploy("web", 3)?;
    world.pool("public", *HOSTS.start(), *HOSTS.end())?;
    world.policy("web", "web", "203.0.113.0/24", HOSTS.count())?;
    for pod in &pods {
        world.wait_sources(pod, 0, &egress(HOSTS))?;
    }
    settled(world)?;
    let load = Load::start(world, pods)?;
    let kubectl = |arguments: &[&str]| world.cluster.kubectl(arguments).map(drop);
    let gateway = "gateway1";
    let empty = || world.wait_owners(HOSTS.count(), gateway).map(drop);
    load.during("cordon", || kubectl(&["cordon", gateway]).and_then(|()| empty()))?;
    load.during("uncordon", || kubectl(&["uncordon", gateway]).and_then(|()| settled(world)))?;
    let drain = ["drain", gateway, "--ignore-daemonsets", "--delete-emptydir-data", "--force"];
    load.during("drain", || kubectl(&drain).and_then(|()| empty()))?;
    load.during("the end of the drain", || kubectl(&["uncordon", gateway]).and_then(|()| settled(world)))?;
    let before = world.owners()?;
    for taint in ["maintenance=now:NoSchedule", "maintenance=now:NoExecute"] {
        load.during(taint, || kubectl(&["taint", "node", gateway, taint]).and_then(|()| one_agent_a_node(world)))?;
        load.during("no taint", || kubectl(&["taint", "node", gateway, &format!("{taint}-")]))?;
    }
    ensure!(world.owners()? == before, "agents tolerate every taint: nothing moves");
    load.during("no label", || kubectl(&["label", "node", gateway, "egress-"]).and_then(|()| empty()))?;
    load.during("the label again", || {
        kubectl(&["label", "node", gateway, "egress=true"]).and_then(|()| settled(world))
    })?;
    load.during("an agent that is asked to stop", || {
        let field = format!("spec.nodeName={gateway}");
        let agents = ["-n", "spillway", "-l", "app.kubernetes.io/component=agent", "--field-selector", &field];
        kubectl(&[&["delete", "pod", "--wait=true"], &agents[..]].concat())?;
        one_agent_a_node(world)?;
        settled(world)
    })?;
    load.during("a roll-out of the agents", || {
        world.roll_out("daemonset/spillway-agent")?;
        settled(world)
    })?;
    load.during("a roll-out of the controllers", || {
        world.roll_out("deployment/spillway-controller")?;
        world.leader().map(drop)
    })
}

/// Waits until each gateway has one egress IP.
fn settled(world: &InstalledCluster) -> Result<()> {
    let spread = |owners: &BTreeMap<IpAddr, (String, u64)>| {
        owners.len() == HOSTS.count()
            && owners.values().map(|(node, _)| node).collect::<BTreeSet<_>>().len() == HOSTS.count()
    };
    wait_until("each gateway has one egress IP", PATIENCE, || world.owners(), spread).map(drop)
}

/// Waits until one agent is ready on each node.
fn one_agent_a_node(world: &InstalledCluster) -> Result<()> {
    wait_for("an agent is ready on each node", PATIENCE, || {
        let set = world.cluster.get(&["daemonset", "-n", "spillway", "spillway-agent"])?;
        let of = |field: &str| set["status"][field].as_u64();
        Ok(of("numberReady").is_some() && of("numberReady") == of("desiredNumberScheduled"))
    })
}
