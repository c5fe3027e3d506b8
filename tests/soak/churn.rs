//! The changes while connections run: pods come and go, policies change, gateways die, leave and return, agents and the
//! controller are killed, restarted and frozen. One change begins at a time; its effects may last into the next ones.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use lab::traffic::{TcpClients, TcpOptions};
use lab::{Cni, Family, PodSpec, wait_for};

use super::world::{self, CONTROLLER, NEW_MAIL_PORT, NEW_WEB_PORT, PASSING, SoakLab, WEB};

/// The maximum number of pods in addition to the steady ones.
const MOST_PODS: usize = 6;
/// Connections of each new pod and family.
const CONNECTIONS: usize = 5;
/// The time for which a gateway stays dead, or an agent frozen: longer than its lease.
const OUTAGE: Duration = Duration::from_secs(6);

/// The time limit for a newly started agent to know about a pod.
const PATIENCE: Duration = Duration::from_secs(30);

/// A kind of change.
type Change = (&'static str, fn(&mut Churn, &mut SoakLab) -> Result<()>);

/// The possible changes; each entry is equally likely.
const CHANGES: [Change; 11] = [
    ("pods added", Churn::add_pod),
    ("pods added", Churn::add_pod),
    ("pods removed", Churn::remove_pod),
    ("policy changes", Churn::change_policy),
    ("agents killed", Churn::kill_agent),
    ("agents restarted", Churn::restart_agent),
    ("agents frozen", Churn::freeze_gateway),
    ("gateways dead", Churn::kill_gateway),
    ("gateways unlabelled", Churn::unlabel_gateway),
    ("controllers killed", Churn::kill_controller),
    ("weights changed", Churn::change_weights),
];

/// A fault that lasts for a while, and the node that it affects.
enum Outage {
    Dead(String),
    Frozen(String),
    Unlabelled(String),
}

/// The state of the changes.
pub struct Churn {
    random: u64,
    pods: Vec<(String, Vec<TcpClients>)>,
    pods_made: u32,
    passing: bool,
    outage: Option<(Outage, Instant)>,
    /// How often each change was made.
    pub done: BTreeMap<&'static str, u64>,
    /// Connections of removed pods: opened, and answered.
    pub connections: [u64; 2],
}

impl Churn {
    /// Creates the changes; their order follows from `seed`.
    pub fn new(seed: u64) -> Churn {
        let (done, pods) = (BTreeMap::new(), Vec::new());
        // The state must not be zero, which the sequence would never leave.
        Churn { random: seed | 1, pods, pods_made: 0, passing: false, outage: None, done, connections: [0; 2] }
    }

    /// Makes one change, and ends an outage that has lasted long enough.
    pub fn step(&mut self, world: &mut SoakLab) -> Result<()> {
        if self.outage.as_ref().is_some_and(|(_, since)| since.elapsed() > OUTAGE) {
            self.mend(world)?;
        }
        let (name, change) = CHANGES[self.below(CHANGES.len())];
        *self.done.entry(name).or_default() += 1;
        change(self, world)
    }

    /// Returns a random duration in a range.
    pub fn between(&mut self, [least, most]: [Duration; 2]) -> Duration {
        let span = (most - least).as_millis() as usize;
        least + Duration::from_millis(self.below(span) as u64)
    }

    /// Repairs what is broken, and removes the pods that were added.
    pub fn calm_down(&mut self, world: &mut SoakLab) -> Result<()> {
        self.mend(world)?;
        while !self.pods.is_empty() {
            self.remove_pod(world)?;
        }
        Ok(())
    }

    /// Returns a random number below `limit`, by xorshift64.
    fn below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as usize % limit.max(1)
    }

    fn one_of(&mut self, mut names: Vec<String>) -> String {
        let at = self.below(names.len());
        names.swap_remove(at)
    }

    fn gateway(&mut self) -> String {
        format!("gw{}", 1 + self.below(3))
    }

    /// Adds a pod whose first act is to connect.
    fn add_pod(&mut self, world: &mut SoakLab) -> Result<()> {
        if self.pods.len() >= MOST_PODS {
            return self.remove_pod(world);
        }
        self.pods_made += 1;
        let (name, node) = (format!("new-{}", self.pods_made), format!("worker{}", 1 + self.below(2)));
        let cni = if node == "worker1" { Cni::PointToPoint } else { Cni::Bridge };
        let (app, port) = if self.below(2) == 0 { ("web", NEW_WEB_PORT) } else { ("mail", NEW_MAIL_PORT) };
        let pod = world.lab.prepare_pod(PodSpec::new(&name, &node).label("app", app).cni(cni))?;
        // As in a cluster, a pod is bound to its node, and the node's agent knows it, long before the pod has a network.
        wait_for(&format!("{node} holds unknown sources"), PATIENCE, || {
            let state = world.lab.egressctl(&node, &["state"])?;
            Ok(state["rules"].to_string().contains("a selected pod is starting"))
        })?;
        world.lab.start_pod(&name)?;
        let mut clients = Vec::new();
        for family in Family::BOTH {
            let options = TcpOptions { interval: Duration::from_millis(500), records: 20, ..TcpOptions::default() };
            clients.push(TcpClients::open(&pod.ns, world.server().ips.at(family, port), CONNECTIONS, options)?);
        }
        self.pods.push((name, clients));
        Ok(())
    }

    fn remove_pod(&mut self, world: &mut SoakLab) -> Result<()> {
        if self.pods.is_empty() {
            return Ok(());
        }
        let at = self.below(self.pods.len());
        let (name, clients) = self.pods.swap_remove(at);
        for all in clients {
            let reports = all.close()?;
            self.connections[0] += reports.len() as u64;
            self.connections[1] += reports.iter().filter(|one| one.received > 0).count() as u64;
        }
        world.lab.remove_pod(&name)
    }

    /// Adds an egress IP to a policy, or removes it.
    fn change_policy(&mut self, world: &mut SoakLab) -> Result<()> {
        self.passing = !self.passing;
        let passing = self.passing.then_some(PASSING);
        let hosts: Vec<u8> = WEB.into_iter().chain(passing).collect();
        world.lab.manifests().write("web", &world::web(&hosts))
    }

    fn change_weights(&mut self, world: &mut SoakLab) -> Result<()> {
        let text = world.lab.manifests().read("web")?;
        let weight = 1 + self.below(3);
        let lines = text.lines().map(|line| match line.split_once(", weight") {
            _ if !line.contains("egressIP:") => line.to_owned(),
            Some((start, _)) => format!("{start}, weight: {weight}}}"),
            // One brace ends the line, after the address.
            None => format!("{}, weight: {weight}}}", line.trim_end_matches('}')),
        });
        let text: Vec<String> = lines.collect();
        world.lab.manifests().write("web", &(text.join("\n") + "\n"))
    }

    fn kill_agent(&mut self, world: &mut SoakLab) -> Result<()> {
        let node = self.healthy_node(world);
        world.lab.agent(&node).kill()?;
        world.lab.start_agent(&node, &world.options)
    }

    fn restart_agent(&mut self, world: &mut SoakLab) -> Result<()> {
        let node = self.healthy_node(world);
        world.lab.agent(&node).terminate()?;
        world.lab.start_agent(&node, &world.options)
    }

    fn kill_controller(&mut self, world: &mut SoakLab) -> Result<()> {
        world.lab.controller(CONTROLLER).kill()?;
        world.lab.start_controller(CONTROLLER, &world.options)
    }

    fn freeze_gateway(&mut self, world: &mut SoakLab) -> Result<()> {
        self.mend(world)?;
        let node = self.gateway();
        world.lab.agent(&node).freeze()?;
        self.outage = Some((Outage::Frozen(node), Instant::now()));
        Ok(())
    }

    fn kill_gateway(&mut self, world: &mut SoakLab) -> Result<()> {
        self.mend(world)?;
        let node = self.gateway();
        world.lab.kill_node(&node)?;
        self.outage = Some((Outage::Dead(node), Instant::now()));
        Ok(())
    }

    fn unlabel_gateway(&mut self, world: &mut SoakLab) -> Result<()> {
        self.mend(world)?;
        let node = self.gateway();
        world.lab.relabel_node(&node, &[("kubernetes.io/hostname", &node)])?;
        self.outage = Some((Outage::Unlabelled(node), Instant::now()));
        Ok(())
    }

    fn mend(&mut self, world: &mut SoakLab) -> Result<()> {
        match self.outage.take() {
            Some((Outage::Dead(node), _)) => {
                world.lab.revive_node(&node)?;
                world.lab.start_agent(&node, &world.options)
            }
            Some((Outage::Frozen(node), _)) => world.lab.agent(&node).thaw(),
            Some((Outage::Unlabelled(node), _)) => {
                world.lab.relabel_node(&node, &[("kubernetes.io/hostname", &node), ("egress", "true")])
            }
            None => Ok(()),
        }
    }

    /// Returns a node whose agent runs and is not affected by the outage.
    fn healthy_node(&mut self, world: &SoakLab) -> String {
        let broken = self.outage.as_ref().map(|(outage, _)| match outage {
            Outage::Dead(node) | Outage::Frozen(node) | Outage::Unlabelled(node) => node.clone(),
        });
        self.one_of(world.nodes().into_iter().filter(|node| Some(node) != broken.as_ref()).collect())
    }
}
