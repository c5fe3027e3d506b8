//! A simulated cluster of planner and agents, without a kernel. Messages may be late.

use crate::{
    agent::{
        blocks::Withheld,
        demand::demand,
        facts::{Facts, Objects},
        ports::{Past, Ports, Used},
        view,
    },
    health::Health,
    model::{EndpointId, Labels, NodeName, NodeReport, Snapshot, Source},
    plan::{BlockState, Plan, plan},
    testing::world as cluster,
};
use egress_common::port_block;
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

/// The time between two counts.
pub const TICK: Duration = Duration::from_secs(2);

/// An agent without a kernel: its tables are the blocks that new flows may use.
#[derive(Default)]
pub struct PortLeaseAgent {
    /// The plan as far as this agent has read it.
    pub seen: Plan,
    pub tables: BTreeMap<IpAddr, BTreeSet<u16>>,
    pub flows: Vec<Used>,
    scan: (Ports, Option<Duration>),
    past: Past,
    withheld: Withheld,
    lease_revision: u64,
    report: NodeReport,
}

impl PortLeaseAgent {
    pub fn scan(&mut self, now: Duration) {
        let ports = Ports::count(self.flows.iter().copied(), &self.past.growth(now));
        self.past.note(now, &ports);
        self.scan = (ports, Some(now));
    }

    /// Counts the flows if a count is due: every [`TICK`], and immediately when the programs find ports taken.
    fn scan_if_due(&mut self, now: Duration) {
        let tight = self.tables.iter().any(|(egress, blocks)| {
            let used = self.flows.iter().filter(|flow| flow.egress == *egress).count();
            used * 10 > blocks.len() * usize::from(port_block::SIZE) * 3
        });
        if tight || self.scan.1.is_none_or(|last| now >= last + TICK) {
            self.scan(now);
        }
    }

    /// Runs one turn of the agent's loop. Without `writes`, the tables cannot be written.
    pub fn act(&mut self, node: &NodeName, snapshot: &Snapshot, now: Duration, writes: bool) {
        let mut own = cluster::node(node.as_str(), Labels::new());
        own.report = Some(self.report.clone());
        let heard = Snapshot { nodes: [(node.clone(), own)].into(), ..Snapshot::default() };
        let objects = Arc::new(Objects { snapshot: heard, plan: self.seen.clone(), ..Objects::default() });
        self.withheld.update(&Facts {
            node: node.clone(),
            objects,
            used: view::used(&self.seen, &view::classes_of(snapshot, node)),
            ports: self.scan.0.clone(),
            counted: self.scan.1,
            now,
            ..Facts::default()
        });
        if writes {
            self.tables.clear();
            for (address, blocks) in &self.seen.blocks {
                let own = blocks.iter().filter(|(_, l)| l.node == *node && l.state == BlockState::Leased);
                let usable = own.map(|(b, _)| *b).filter(|b| !self.withheld.contains(*address, *b)).collect();
                self.tables.insert(*address, usable);
            }
            self.withheld.written(now);
            self.lease_revision = self.lease_revision.max(self.seen.highest_lease_of(node));
        }
        self.report.own_lease_revision = self.lease_revision.max(self.report.own_lease_revision);
        self.withheld.publish(node, &self.seen, self.report.own_lease_revision);
        self.report.demand = demand(node, &self.seen, &self.scan.0, &self.withheld);
    }

    /// Reads the latest plan, except this node's own leases, which arrive later.
    pub fn hear_of_others(&mut self, node: &NodeName, latest: &Plan) {
        let seen = std::mem::replace(&mut self.seen, latest.clone());
        for blocks in self.seen.blocks.values_mut() {
            blocks.retain(|_, lease| lease.node != *node);
        }
        for (address, blocks) in seen.blocks {
            let own = blocks.into_iter().filter(|(_, lease)| lease.node == *node);
            self.seen.blocks.entry(address).or_default().extend(own);
        }
    }

    pub fn restart(&mut self) {
        (self.scan, self.past, self.withheld, self.lease_revision) = Default::default();
    }

    /// Opens a new flow if a port is available; `n` picks the block, the port and the remote.
    pub fn connect(&mut self, egress: IpAddr, n: u16) {
        let usable: Vec<u16> = self.tables.get(&egress).into_iter().flatten().copied().collect();
        if usable.is_empty() {
            return;
        }
        let block = usable[usize::from(n) % usable.len()];
        let port = port_block::first_port(block) + n % port_block::SIZE;
        let pod = [10, 0, 0, 1].into();
        self.flows.push(Used { pod, egress, remote: ([203, 0, 113, 1].into(), n % 4, 6), port });
    }

    pub fn usable(&self, egress: IpAddr) -> usize {
        self.tables.get(&egress).map_or(0, BTreeSet::len)
    }
}

pub struct PortLeaseSim {
    pub snapshot: Snapshot,
    pub health: Health,
    pub plan: Plan,
    pub agents: BTreeMap<NodeName, PortLeaseAgent>,
    pub now: Duration,
    /// How many rounds a lease takes to be written, known to the carriers and reported.
    pub late: usize,
    /// The plans of these rounds, oldest first. Agents see the oldest.
    on_the_way: VecDeque<Plan>,
}

impl PortLeaseSim {
    /// Creates a cluster with one gateway, `ips` egress IPs and no worker.
    pub fn new(ips: u32) -> Self {
        let (mut snapshot, health) = cluster::cluster(1, 0);
        cluster::add_policy(
            &mut snapshot,
            cluster::policy("web", Source::Pools(vec![cluster::request("public", ips)])),
        );
        let (plan, agents, on_the_way) = Default::default();
        Self { snapshot, health, plan, agents, now: Duration::ZERO, late: 0, on_the_way }
    }

    pub fn join(&mut self, n: usize) -> NodeName {
        let node = cluster::node(&format!("w{n}"), Labels::new());
        let name = node.name.clone();
        self.snapshot.nodes.insert(name.clone(), node);
        self.agents.insert(name.clone(), PortLeaseAgent::default());
        self.pod(n);
        name
    }

    pub fn pod(&mut self, n: usize) {
        cluster::add_pod(&mut self.snapshot, &format!("pod{n}"), &format!("w{n}"), Labels::new());
    }

    pub fn remove_pod(&mut self, n: usize) {
        self.snapshot.endpoints.remove(&EndpointId::new("default", &format!("pod{n}"), &format!("pod{n}")));
    }

    /// Lets the controller read what an agent has written.
    pub fn deliver(&mut self, name: &NodeName) {
        self.snapshot.nodes.get_mut(name).unwrap().report = Some(self.agents[name].report.clone());
    }

    pub fn replan(&mut self) {
        self.plan = plan(&self.snapshot, &self.health, &self.plan);
    }

    /// Runs a count, a turn of every agent and a plan.
    pub fn round(&mut self) {
        self.round_after(TICK);
    }

    /// Runs a [`round`](Self::round) with another tick.
    pub fn round_after(&mut self, tick: Duration) {
        self.now += tick;
        self.on_the_way.push_back(self.plan.clone());
        self.on_the_way.drain(..self.on_the_way.len().saturating_sub(self.late + 1));
        let names: Vec<NodeName> = self.agents.keys().cloned().collect();
        for name in &names {
            let agent = self.agents.get_mut(name).unwrap();
            agent.seen.clone_from(&self.on_the_way[0]);
            agent.scan_if_due(self.now);
            agent.act(name, &self.snapshot, self.now, true);
            self.deliver(name);
        }
        self.replan();
    }

    pub fn ips(&self) -> Vec<IpAddr> {
        self.plan.egress_ips.keys().copied().collect()
    }

    /// Checks the invariant: a block that a node uses or may use is leased to it, whatever the others have read.
    pub fn check(&self) -> Result<(), TestCaseError> {
        for (name, agent) in &self.agents {
            let holder = |address: &IpAddr, block: u16| Some(&self.plan.blocks.get(address)?.get(&block)?.node);
            for flow in &agent.flows {
                let block = port_block::of_port(flow.port).unwrap();
                prop_assert_eq!(holder(&flow.egress, block), Some(name), "block {} under a flow", block);
            }
            for (address, blocks) in &agent.tables {
                for block in blocks {
                    prop_assert_eq!(holder(address, *block), Some(name), "block {} is still usable", block);
                }
            }
        }
        Ok(())
    }
}
