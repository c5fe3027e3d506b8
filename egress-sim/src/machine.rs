//! A node: its kernel's state, which outlives the agent, and the agent, which has a real agent's state machine. The simulation carries
//! out only actions that others can observe: tables, probes, heartbeats, the lease and the status.

use super::{
    api::{Client, Object, Reader, SharedObjects},
    events::{Effect, Purpose},
    keeper::Keeper,
};
use egress_common::config;
use egress_core::{
    agent::{
        facts::{Facts, LeftInUse},
        gateways::Answered,
        machine::{Action, Counted, Left, Machine, MachineSettings},
        ports::{Ports, Used},
    },
    encode::{EgressView, NodeView, fit::Refused},
    health::ProbeTimes,
    model::{NodeName, Transport},
    network::{
        Route,
        classify::InterfaceRules,
        links::{Link, LinkKind, LinkTable},
    },
    testing::{default_route, link},
};
use egress_daemon::{
    agent::{able, status},
    store::lease::gateway_lease,
};
use egress_objects::api::EgressNode;
use std::{collections::BTreeMap, net::IpAddr, rc::Rc, sync::Arc, time::Duration};

/// The indices of each node's uplink and of its pod's interface.
const UPLINK: u32 = 2;
const POD: u32 = 3;
/// The maximum number of machines of a cluster.
const MACHINES: u8 = 8;

/// The time settings of a cluster.
#[derive(Clone, Copy)]
pub struct Times {
    pub lease: Duration,
    /// The controllers' own setting, which is shorter if they have a new configuration that the agents do not have yet.
    pub lease_of_controllers: Duration,
    pub renew: Duration,
    pub deadline: Duration,
}

/// The tables' entry of an egress IP.
#[derive(Clone, Default, PartialEq)]
pub struct Entry {
    pub forwards: bool,
    pub answers: bool,
    pub used: Vec<NodeName>,
    /// The usable blocks, in order.
    pub blocks: Vec<u16>,
}

/// The maps as they were last written.
pub struct SimTables {
    pub observed: Rc<SharedObjects>,
    pub egress: BTreeMap<IpAddr, Entry>,
    /// The revision up to which the tables have each node's leases.
    pub known_leases: BTreeMap<NodeName, u64>,
}

/// The state that outlives the agent, but not the machine's power.
#[derive(Default)]
pub struct Kernel {
    pub tables: Option<SimTables>,
    /// Until when the node is able to carry egress IPs, and until when it holds its lease.
    pub able_until: Duration,
    pub held_until: Duration,
    /// The number of answered probes.
    pub asked: u64,
    pub flows: Vec<Used>,
    /// Grows with each change of the tables.
    pub writes: u64,
}

impl Kernel {
    /// Returns whether it answers ARP for an egress IP.
    pub fn answers(&self, ip: IpAddr, now: Duration) -> bool {
        let entry = self.tables.as_ref().and_then(|tables| tables.egress.get(&ip));
        now < self.able_until && entry.is_some_and(|entry| entry.answers && entry.forwards)
    }
}

pub struct SimAgent {
    node: NodeName,
    times: Times,
    pub start: Duration,
    pub client: Client,
    pub observed: Rc<SharedObjects>,
    machine: Machine,
    /// The links while the uplink is down, and while it is up.
    links: [Arc<LinkTable>; 2],
    keeper: Option<Keeper>,
    releasing: bool,
    next_keeper: Duration,
}

/// The parts of the simulation that a turn of an agent may use.
pub struct Hands<'a> {
    pub now: Duration,
    pub kernel: &'a mut Kernel,
    /// Whether the uplink is up.
    pub connected: bool,
    pub reader: &'a mut Reader,
    pub effects: &'a mut Vec<Effect>,
}

impl SimAgent {
    /// Starts an agent: reads the objects and carries out the first round.
    pub fn start(node: NodeName, times: Times, client: Client, hands: &mut Hands<'_>) -> Self {
        let now = hands.now;
        let tables = || hands.kernel.tables.iter().flat_map(|tables| &tables.egress);
        let carried = tables().filter(|(_, e)| e.forwards).map(|(ip, e)| (*ip, e.answers)).collect();
        let in_use = |e: &Entry| LeftInUse { carriers: e.used.clone(), blocks: e.blocks.iter().copied().collect() };
        let used = tables().map(|(ip, e)| (*ip, in_use(e))).collect();
        let left = Left { carried, used, ..Left::default() };
        let observed = hands.reader.read(&client);
        let links = [false, true].map(|up| Arc::new(links(up)));
        let (objects, present) = (observed.meant.clone(), links[usize::from(hands.connected)].clone());
        let facts = Facts { node: node.clone(), objects, links: present, ..Facts::default() };
        let mut agent = Self {
            machine: Machine::new(settings(times), left, facts),
            node,
            times,
            start: now,
            observed,
            client,
            links,
            keeper: None,
            releasing: false,
            next_keeper: now,
        };
        agent.carry_all_out(hands);
        agent.machine.handle_start(Duration::ZERO);
        agent.turn(hands);
        agent
    }

    /// Handles a change of the objects.
    pub fn read(&mut self, hands: &mut Hands<'_>) {
        let observed = hands.reader.read(&self.client);
        if !Rc::ptr_eq(&observed, &self.observed) {
            self.observed = observed;
            self.machine.handle_objects(self.observed.meant.clone());
        }
        self.turn(hands);
    }

    /// Handles the answer to a probe.
    pub fn answer(&mut self, answer: &Answered, hands: &mut Hands<'_>) {
        self.machine.handle_probe(answer, hands.now - self.start);
        self.turn(hands);
    }

    /// Handles the answer to a write.
    pub fn wrote(&mut self, purpose: &Purpose, done: bool, hands: &mut Hands<'_>) {
        match purpose {
            Purpose::Status => self.machine.handle_status(done),
            Purpose::Release => {
                self.releasing = false;
                self.machine.handle_released();
            }
            _ => {}
        }
        self.next_keeper = hands.now;
        self.read(hands);
    }

    /// Returns whether it holds its lease.
    pub fn holds(&self, now: Duration) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| keeper.held(now).is_some())
    }

    /// Returns the keeper of the lease, which is a separate task in a real agent.
    pub fn keeper(&mut self) -> Option<&mut Keeper> {
        self.keeper.as_mut()
    }

    fn keep(&mut self, hands: &mut Hands<'_>) {
        if let Some(keeper) = &mut self.keeper {
            let (write, wake) = keeper.turn(hands.now, &self.client);
            self.next_keeper = wake;
            hands.effects.extend(write.map(|lease| Effect::Write(Purpose::Lease, lease)));
        }
    }

    /// Runs the steps of the agent's loop that follow each event.
    pub fn turn(&mut self, hands: &mut Hands<'_>) {
        self.keep(hands);
        self.machine.handle_links(self.links[usize::from(hands.connected)].clone());
        let held = self.keeper.as_ref().filter(|keeper| keeper.held(hands.now).is_some());
        let until = held.and_then(Keeper::until).unwrap_or_default();
        self.machine.handle_lease(until.saturating_sub(self.start));
        self.machine.handle_timeout(hands.now - self.start);
        self.carry_all_out(hands);
    }

    pub fn next_wake(&self) -> Duration {
        let machine = self.start + self.machine.next_wake();
        if self.keeper.is_some() { machine.min(self.next_keeper) } else { machine }
    }

    /// Stops the agent in an orderly way, in contrast to killing it.
    pub fn stop(&mut self, hands: &mut Hands<'_>) {
        if self.machine.handle_stop(hands.now - self.start) {
            self.carry_all_out(hands);
        }
    }

    fn carry_all_out(&mut self, hands: &mut Hands<'_>) {
        while let Some(action) = self.machine.poll_action(hands.now - self.start) {
            self.carry_out(action, hands);
        }
    }

    fn carry_out(&mut self, action: Action, hands: &mut Hands<'_>) {
        let now = hands.now - self.start;
        match action {
            Action::Probe(name, request) => hands.effects.push(Effect::Probe(name, request)),
            Action::Heartbeat { able, held } => {
                let until = |length: Duration| (!length.is_zero()).then_some(hands.now + length);
                hands.kernel.able_until = until(able).unwrap_or_default();
                hands.kernel.held_until = until(held).unwrap_or(hands.kernel.held_until);
            }
            Action::ReadCounters => self.machine.handle_counters(hands.kernel.asked, 0, now),
            Action::CountPorts(growth) => {
                let ports = Some(Ports::count(hands.kernel.flows.iter().copied(), &growth));
                self.machine.handle_ports(Counted { ports, began: now, took: Duration::ZERO }, now);
            }
            Action::FindInterfaces(_) => self.machine.handle_interfaces(BTreeMap::new()),
            Action::SeeIfCovered => self.machine.handle_covered(),
            Action::MakeStackPath { .. } => self.machine.handle_stack_path(),
            Action::MakeShaper(_) => self.machine.handle_shaper(None),
            Action::FindRoutes(addresses) => {
                let route = Route { oif: UPLINK, gateway: None, mtu: None, encapsulated: false };
                self.machine.handle_routes(addresses.into_iter().map(|address| (address, Ok(route.clone()))).collect());
            }
            Action::Write { view, .. } => {
                self.write(&view, hands);
                self.machine.handle_written(&view, &Refused::default(), now);
            }
            Action::KeepLease(wanted) => self.keep_lease(wanted, hands),
            Action::WriteStatus => self.write_status(hands),
            Action::LookAgain
            | Action::Attach { .. }
            | Action::OpenAgain(_)
            | Action::Advertise(_)
            | Action::Forward(_)
            | Action::Announce(_)
            | Action::Publish => {}
        }
    }

    fn write(&mut self, view: &NodeView, hands: &mut Hands<'_>) {
        let entry = |e: &EgressView| Entry {
            forwards: e.forwards,
            answers: !e.silent,
            used: if e.spread.is_empty() { e.gateway.iter().cloned().collect() } else { e.spread.clone() },
            blocks: e.blocks.iter().copied().collect(),
        };
        let egress: BTreeMap<IpAddr, Entry> = view.egress_ips.iter().map(|(ip, e)| (*ip, entry(e))).collect();
        let present = hands.kernel.tables.as_ref();
        if present.is_none_or(|tables| tables.observed.leases != self.observed.leases || tables.egress != egress) {
            hands.kernel.writes += 1;
        }
        hands.kernel.tables =
            Some(SimTables { observed: self.observed.clone(), egress, known_leases: view.known_leases.clone() });
    }

    fn keep_lease(&mut self, wanted: bool, hands: &mut Hands<'_>) {
        if self.releasing {
            return;
        }
        let (name, identity) = (gateway_lease(self.node.as_str()), self.node.to_string());
        let holds = |client: &Client| client.lease(&name).is_some_and(|lease| Keeper::is_holder(lease, &identity));
        if self.keeper.is_none() && (wanted || holds(&self.client)) {
            self.keeper = Some(Keeper::new(name, identity, self.times.lease, self.times.renew));
            self.next_keeper = hands.now;
        }
        if !wanted
            && let Some(keeper) = self.keeper.take()
            && let Some(lease) = keeper.release()
        {
            self.releasing = true;
            hands.effects.push(Effect::Write(Purpose::Release, lease));
        }
    }

    fn write_status(&mut self, hands: &mut Hands<'_>) {
        // A controller creates the object.
        let Some(present) = self.observed.egress_node(&self.node) else { return self.machine.handle_status(true) };
        let status = status::of_leases(&mut self.machine, present.status.as_ref());
        if present.status.as_ref() == Some(&status) {
            return self.machine.handle_status(true);
        }
        let object = EgressNode { status: Some(status), ..EgressNode::clone(present) };
        hands.effects.push(Effect::Write(Purpose::Status, Object::EgressNode(Arc::new(object))));
    }
}

fn settings(times: Times) -> MachineSettings {
    MachineSettings {
        rules: InterfaceRules::default(),
        probe: ProbeTimes::default(),
        lease_duration: times.lease,
        deadline: times.deadline,
        start_limit: Duration::from_secs(60),
        transport: Transport::Device,
        tunnel_mtu: 1500,
        config: config::UNSET,
        clock: Duration::ZERO,
    }
}

/// Returns the links of a node. `up` says whether its uplink is up.
fn links(up: bool) -> LinkTable {
    let addresses = vec!["192.0.2.254/24".parse().unwrap()];
    let uplink = Link { carrier: up, addresses, ..link(UPLINK, "eth0") };
    let pod = Link { kind: LinkKind::Veth, peer_netns: Some(1), ..link(POD, "veth0") };
    LinkTable {
        links: [(UPLINK, uplink), (POD, pod)].into(),
        default_routes: [default_route(UPLINK, "192.0.2.253")].into(),
        host_routes: (0..MACHINES).map(|n| ([10, 1, n, 1].into(), POD)).collect(),
        route_changes: 0,
    }
}

/// Extends an earlier agent's deadline while an agent cannot read the objects yet.
pub fn while_waiting(kernel: &mut Kernel, now: Duration, length: Duration) {
    let ns = |d: Duration| d.as_nanos() as u64;
    if let Some(until) = able::renewed(ns(kernel.able_until), ns(now), length) {
        kernel.able_until = Duration::from_nanos(until);
    }
}
