use super::*;
use crate::{
    agent::{
        demand::{Used, demand},
        view,
    },
    health::Health,
    model::{Demand, EndpointId, Labels, NodeReport, Snapshot, Source},
    plan::{Plan, plan, tests::world as cluster},
};
use egress_common::port_block;
use proptest::prelude::*;

const TICK: Duration = Duration::from_secs(2);

/// An agent without a kernel: its tables are the blocks that new flows may use.
#[derive(Default)]
struct Agent {
    /// The plan as far as it has heard of it.
    seen: Plan,
    tables: BTreeMap<IpAddr, BTreeSet<u16>>,
    flows: Vec<Used>,
    scan: (Ports, Option<Duration>),
    withheld: Withheld,
    lease_revision: u64,
    status: EgressNodeStatus,
}

impl Agent {
    fn scan(&mut self, now: Duration) {
        self.scan = (Ports::count(self.flows.iter().copied()), Some(now));
    }

    /// One turn of its loop. Without `writes`, the tables cannot be written.
    fn act(&mut self, node: &NodeName, snapshot: &Snapshot, now: Duration, writes: bool) {
        self.withheld.update(&Circumstances {
            node,
            plan: &self.seen,
            used: &view::used(&self.seen, &view::classes_of(snapshot, node)),
            reported: Some(&self.status),
            ports: &self.scan.0,
            counted: self.scan.1,
            now,
        });
        if writes {
            self.tables.clear();
            let mut highest = self.status.lease_revision;
            for (address, blocks) in &self.seen.blocks {
                highest = blocks.values().map(|lease| lease.revision).fold(highest, u64::max);
                let own = blocks.iter().filter(|(_, l)| l.node == *node && l.state == BlockState::Leased);
                let usable = own.map(|(b, _)| *b).filter(|b| !self.withheld.contains(*address, *b)).collect();
                self.tables.insert(*address, usable);
            }
            self.withheld.written(now);
            self.lease_revision = self.lease_revision.max(highest);
        }
        self.status.lease_revision = self.lease_revision.max(self.status.lease_revision);
        self.withheld.publish(node, &self.seen, self.status.lease_revision);
        self.status.demand = demand(node, &self.seen, &self.scan.0, &self.withheld);
    }

    /// Hears of the plan, but of its own leases later.
    fn hear_of_others(&mut self, node: &NodeName, latest: &Plan) {
        let seen = std::mem::replace(&mut self.seen, latest.clone());
        for blocks in self.seen.blocks.values_mut() {
            blocks.retain(|_, lease| lease.node != *node);
        }
        for (address, blocks) in seen.blocks {
            let own = blocks.into_iter().filter(|(_, lease)| lease.node == *node);
            self.seen.blocks.entry(address).or_default().extend(own);
        }
    }

    fn restart(&mut self) {
        (self.scan, self.withheld, self.lease_revision) = Default::default();
    }

    /// A new flow takes a port, if there is one; `n` picks the block, the port and the remote.
    fn connect(&mut self, egress: IpAddr, n: u16) {
        let usable: Vec<u16> = self.tables.get(&egress).into_iter().flatten().copied().collect();
        if usable.is_empty() {
            return;
        }
        let block = usable[usize::from(n) % usable.len()];
        let port = port_block::first_port(block) + n % port_block::SIZE;
        self.flows.push(Used { egress, remote: ([203, 0, 113, 1].into(), n % 4, 6), port });
    }

    fn usable(&self, egress: IpAddr) -> usize {
        self.tables.get(&egress).map_or(0, BTreeSet::len)
    }
}

struct World {
    snapshot: Snapshot,
    health: Health,
    plan: Plan,
    agents: BTreeMap<NodeName, Agent>,
    now: Duration,
}

impl World {
    /// A gateway, one egress IP for each of `ips`, and no worker yet.
    fn new(ips: u32) -> Self {
        let (mut snapshot, health) = cluster::cluster(1, 0);
        cluster::add_policy(
            &mut snapshot,
            cluster::policy("web", Source::Pools(vec![cluster::request("public", ips)])),
        );
        Self { snapshot, health, plan: Plan::default(), agents: BTreeMap::new(), now: Duration::ZERO }
    }

    fn join(&mut self, n: usize) -> NodeName {
        let node = cluster::node(&format!("w{n}"), Labels::new());
        let name = node.name.clone();
        self.snapshot.nodes.insert(name.clone(), node);
        self.agents.insert(name.clone(), Agent::default());
        self.pod(n);
        name
    }

    fn pod(&mut self, n: usize) {
        cluster::add_pod(&mut self.snapshot, &format!("pod{n}"), &format!("w{n}"), Labels::new());
    }

    fn remove_pod(&mut self, n: usize) {
        self.snapshot.endpoints.remove(&EndpointId::new("default", &format!("pod{n}"), &format!("pod{n}")));
    }

    /// The controller reads what an agent has written.
    fn deliver(&mut self, name: &NodeName) {
        let status = &self.agents[name].status;
        let told = status.demand.iter().map(|d| {
            let released = d.release.iter().copied().collect();
            (d.egress_ip.parse().unwrap(), Demand { want: d.want_blocks.into(), released })
        });
        let (demand, lease_revision) = (told.collect(), status.lease_revision);
        self.snapshot.nodes.get_mut(name).unwrap().report =
            Some(NodeReport { demand, lease_revision, ..NodeReport::default() });
    }

    fn replan(&mut self) {
        self.plan = plan(&self.snapshot, &self.health, &self.plan);
    }

    /// A count, a turn of every agent and a plan.
    fn round(&mut self) {
        self.now += TICK;
        let names: Vec<NodeName> = self.agents.keys().cloned().collect();
        for name in &names {
            let agent = self.agents.get_mut(name).unwrap();
            agent.seen.clone_from(&self.plan);
            agent.scan(self.now);
            agent.act(name, &self.snapshot, self.now, true);
            self.deliver(name);
        }
        self.replan();
    }

    fn ips(&self) -> Vec<IpAddr> {
        self.plan.egress_ips.keys().copied().collect()
    }

    /// What must hold at any time: what a node uses or may use is leased to it, whatever the others have heard of.
    fn check(&self) -> Result<(), TestCaseError> {
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn no_block_changes_hands_while_it_is_used_or_usable(
        steps in prop::collection::vec((0usize..14, 0usize..3, any::<u16>()), 1..120)
    ) {
        let mut world = World::new(1);
        let names: Vec<NodeName> = (0..3).map(|n| world.join(n)).collect();
        world.replan();
        let address = world.ips()[0];
        for (what, n, value) in steps {
            world.now += Duration::from_millis(u64::from(value % 8) * 30);
            let (name, now) = (&names[n], world.now);
            let agent = world.agents.get_mut(name).unwrap();
            match what {
                0 | 1 => agent.seen.clone_from(&world.plan),
                2 => agent.hear_of_others(name, &world.plan),
                3 => agent.scan(now),
                4 | 5 => agent.act(name, &world.snapshot, now, true),
                6 => agent.act(name, &world.snapshot, now, value % 2 == 0),
                7 => (0..value % 100).for_each(|i| agent.connect(address, value.wrapping_mul(i + 1))),
                8 => agent.flows.retain(|flow| flow.port % 3 != value % 3),
                9 => agent.restart(),
                10 => world.now += UNUSED_AFTER,
                11 => match value % 4 {
                    0 => world.remove_pod(n),
                    1 => world.snapshot.policies.clear(),
                    2 => cluster::add_policy(
                        &mut world.snapshot,
                        cluster::policy("web", Source::Pools(vec![cluster::request("public", 1)])),
                    ),
                    _ => world.pod(n),
                },
                12 => world.deliver(name),
                _ => {
                    world.replan();
                    // Agents are right whatever they are told of the shares.
                    if let Some(e) = world.plan.egress_ips.get_mut(&address) {
                        (e.share, e.scarce, e.starved) = (u32::from(value % 50), value % 2 == 0, value % 3 == 0);
                    }
                }
            }
            world.check()?;
        }
    }
}

/// Lets nodes join one by one. Returns after how many rounds the slowest of them had usable blocks of all egress IPs.
fn join_one_by_one(world: &mut World, nodes: usize, mut meanwhile: impl FnMut(&mut World)) -> usize {
    let mut slowest = 0;
    for n in 0..nodes {
        let name = world.join(n);
        world.replan();
        let mut rounds = 0;
        while world.ips().iter().any(|ip| world.agents[&name].usable(*ip) == 0) {
            assert!(rounds < 40, "{name} has no blocks");
            world.round();
            meanwhile(world);
            world.check().unwrap();
            rounds += 1;
        }
        slowest = slowest.max(rounds);
    }
    slowest
}

#[test]
fn forty_nodes_that_join_one_by_one_all_get_blocks() {
    let mut world = World::new(2);
    // Retire, count, lease, and write it.
    assert!(join_one_by_one(&mut world, 40, |_| ()) <= 4);
    for ip in world.ips() {
        assert!(world.agents.values().all(|agent| agent.usable(ip) > 0), "and keep some");
        assert!(!world.plan.egress_ips[&ip].starved);
    }
}

#[test]
fn a_busy_node_makes_room_as_its_flows_end() {
    let mut world = World::new(1);
    let mut n = 0u16;
    // The first node has two flows a block, and each lasts for a few rounds.
    join_one_by_one(&mut world, 40, |world| {
        let ip = world.ips()[0];
        let agent = world.agents.get_mut(&"w0".into()).unwrap();
        n = n.wrapping_add(1);
        agent.flows.retain(|flow| flow.port % 3 != n % 3);
        while agent.flows.len() < 1000 && agent.usable(ip) > 0 {
            n = n.wrapping_add(7919);
            agent.connect(ip, n);
        }
    });
    assert!(world.agents[&"w0".into()].flows.len() >= 1000, "it was never without a port");
}

#[test]
fn a_node_that_needs_many_blocks_shares_them_with_one_that_has_none() {
    let mut world = World::new(1);
    world.join(0);
    (0..3).for_each(|_| world.round());
    let ip = world.ips()[0];
    let remote = ([203, 0, 113, 1].into(), 443, 6);
    let ports = |count: u16| (0..count).map(move |i| Used { egress: ip, remote, port: 1024 + i });
    // It wants all, and has all but the last sixteenth.
    world.agents.get_mut(&"w0".into()).unwrap().flows = ports(60_000).collect();
    (0..5).for_each(|_| world.round());
    assert_eq!(world.agents[&"w0".into()].usable(ip), 945);
    world.agents.get_mut(&"w0".into()).unwrap().flows = ports(30_000).collect();
    join_one_by_one(&mut world, 20, |_| ());
    assert!(world.agents.values().all(|agent| agent.usable(ip) > 0));
}

#[test]
fn a_node_without_pods_gives_all_back_except_what_flows_use() {
    let mut world = World::new(1);
    world.join(0);
    (0..3).for_each(|_| world.round());
    let ip = world.ips()[0];
    world.agents.get_mut(&"w0".into()).unwrap().connect(ip, 7);
    world.remove_pod(0);
    world.round();
    assert_eq!(world.agents[&"w0".into()].usable(ip), 504, "it may have a pod again soon");
    (0..20).for_each(|_| world.round());
    assert_eq!(world.plan.blocks[&ip].len(), 1, "the flow's block stays");
    world.agents.get_mut(&"w0".into()).unwrap().flows.clear();
    (0..3).for_each(|_| world.round());
    assert!(world.plan.blocks.is_empty());
    world.pod(0);
    (0..3).for_each(|_| world.round());
    assert_eq!(world.agents[&"w0".into()].usable(ip), 504);
}

#[test]
fn a_retired_block_is_used_again_when_a_pod_comes_back() {
    let mut world = World::new(1);
    world.join(0);
    (0..3).for_each(|_| world.round());
    let ip = world.ips()[0];
    (0..504).for_each(|n| world.agents.get_mut(&"w0".into()).unwrap().connect(ip, n));
    world.remove_pod(0);
    (0..20).for_each(|_| world.round());
    assert_eq!(world.agents[&"w0".into()].usable(ip), 0);
    world.pod(0);
    world.round();
    assert_eq!(world.agents[&"w0".into()].usable(ip), 504);
}
