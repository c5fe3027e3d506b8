//! A node: what its kernel has, which outlives the agent, and the agent.
//!
//! The agent here is `agent::node` and `agent::reconcile` without links, hooks, shapers and sysctls: the same pure parts, fed with the same
//! things in the same order.

use super::{
    super::{able, status},
    api::{Client, Object, Reader, View},
    cluster::{Effect, Purpose},
    keeper::Keeper,
};
use crate::{
    api::{CarriedIP, EgressNode, EgressNodeStatus},
    store::lease::gateway_lease,
};
use egress_common::transport::DEVICE;
use egress_core::{
    agent::{
        blocks::{self, Circumstances as OfBlocks, Holdings, Withheld},
        carriers::{Carriers, Circumstances},
        demand::{self, Past, Ports, Used},
        gateways::{Answered, Gateways, Target},
        objects::Known,
        pulse::Pulse,
        reach::{LeaseWord, Reach},
        view,
    },
    health::ProbeTimes,
    model::NodeName,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

/// As in `agent::node` and `agent::count`.
const RESYNC: Duration = Duration::from_secs(5);
const STATUS_EVERY: Duration = Duration::from_millis(100);
const LOOK_EVERY: Duration = Duration::from_millis(50);
const COUNT_EVERY: Duration = Duration::from_secs(2);

/// How long things last in this cluster.
#[derive(Clone, Copy)]
pub struct Times {
    pub lease: Duration,
    pub renew: Duration,
    pub deadline: Duration,
}

/// What the tables say of an egress IP.
#[derive(Clone, Default, PartialEq)]
pub struct Entry {
    pub forwards: bool,
    pub answers: bool,
    pub used: Vec<NodeName>,
    pub blocks: BTreeSet<u16>,
}

/// The maps as they were written.
pub struct Tables {
    pub world: Rc<View>,
    pub egress: BTreeMap<IpAddr, Entry>,
}

/// What outlives the agent, but not the machine.
#[derive(Default)]
pub struct Kernel {
    pub tables: Option<Tables>,
    /// Until when the node is able to carry egress IPs, and holds its lease.
    pub able_until: Duration,
    pub held_until: Duration,
    /// Probes answered.
    pub asked: u64,
    pub flows: Vec<Used>,
    /// Grows with each change of the tables.
    pub writes: u64,
}

impl Kernel {
    /// Whether it answers ARP.
    pub fn answers(&self, ip: IpAddr, now: Duration) -> bool {
        let entry = self.tables.as_ref().and_then(|tables| tables.egress.get(&ip));
        now < self.able_until && entry.is_some_and(|entry| entry.answers && entry.forwards)
    }
}

pub struct Agent {
    pub node: NodeName,
    times: Times,
    pub start: Duration,
    pub client: Client,
    pub world: Rc<View>,
    carriers: Carriers,
    pub reach: Reach,
    gateways: Gateways,
    withheld: Withheld,
    pub able: bool,
    /// Its uplink was up when it looked last.
    connected: bool,
    keeper: Option<Keeper>,
    releasing: bool,
    lease_held: bool,
    leases: Known,
    carries: BTreeSet<IpAddr>,
    used: BTreeSet<IpAddr>,
    ports: Ports,
    past: Past,
    counted: Option<Duration>,
    pulse: Pulse,
    next_look: Duration,
    next_count: Duration,
    next_resync: Duration,
    next_keeper: Duration,
    status_due: bool,
    next_status: Duration,
    writing: bool,
}

/// What a turn of an agent may touch.
pub struct Hands<'a> {
    pub now: Duration,
    pub kernel: &'a mut Kernel,
    /// The uplink is up.
    pub connected: bool,
    pub reader: &'a mut Reader,
    pub effects: &'a mut Vec<Effect>,
}

impl Agent {
    /// An agent that has read the objects, and makes its first view.
    pub fn start(node: NodeName, times: Times, client: Client, hands: &mut Hands<'_>) -> Self {
        let now = hands.now;
        let tables = hands.kernel.tables.iter().flat_map(|tables| &tables.egress);
        let left = tables.filter(|(_, e)| e.forwards).map(|(ip, e)| (*ip, e.answers)).collect();
        let mut agent = Self {
            node,
            times,
            start: now,
            world: hands.reader.read(&client),
            client,
            carriers: Carriers::recover(&left),
            reach: Reach::new(ProbeTimes::default()),
            gateways: Gateways::new(ProbeTimes::default()),
            withheld: Withheld::default(),
            able: false,
            connected: hands.connected,
            keeper: None,
            releasing: false,
            lease_held: false,
            leases: Known::default(),
            carries: BTreeSet::new(),
            used: BTreeSet::new(),
            ports: Ports::default(),
            past: Past::default(),
            counted: None,
            pulse: Pulse::new(times.deadline, Duration::ZERO),
            next_look: now,
            next_count: now,
            next_resync: now,
            next_keeper: now,
            status_due: true,
            next_status: now,
            writing: false,
        };
        agent.reconcile(hands);
        agent.turn(false, hands);
        agent
    }

    fn elapsed(&self, now: Duration) -> Duration {
        now - self.start
    }

    /// The objects have changed.
    pub fn read(&mut self, hands: &mut Hands<'_>) {
        let world = hands.reader.read(&self.client);
        let dirty = !Rc::ptr_eq(&world, &self.world);
        self.world = world;
        self.turn(dirty, hands);
    }

    /// A probe was answered.
    pub fn answer(&mut self, answer: Answered, hands: &mut Hands<'_>) {
        if self.gateways.reply(&answer, self.elapsed(hands.now)) {
            self.turn(true, hands);
        }
    }

    /// A write was answered.
    pub fn wrote(&mut self, purpose: &Purpose, done: bool, hands: &mut Hands<'_>) {
        match purpose {
            Purpose::Status => {
                self.writing = false;
                self.status_due |= !done;
            }
            Purpose::Release => self.releasing = false,
            _ => {}
        }
        self.next_keeper = hands.now;
        self.read(hands);
        if matches!(purpose, Purpose::Release) {
            self.turn(true, hands);
        }
    }

    /// Whether it holds its lease.
    pub fn holds(&self, now: Duration) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| keeper.held(now).is_some())
    }

    /// The keeper of the lease, which is a task of its own.
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

    /// What the loop does after each of its events.
    pub fn turn(&mut self, mut dirty: bool, hands: &mut Hands<'_>) {
        let (now, elapsed) = (hands.now, self.elapsed(hands.now));
        dirty |= std::mem::replace(&mut self.connected, hands.connected) != hands.connected;
        self.keep(hands);
        let effects = &mut *hands.effects;
        dirty |= self.gateways.tick(elapsed, |name, request| effects.push(Effect::Probe(name.clone(), *request)));
        let due = self.pulse.look(elapsed);
        self.lease_held = self.holds(now);
        if due {
            self.sign_of_life(hands);
        }
        dirty |= self.carriers.next().is_some_and(|next| elapsed >= next);
        if now >= self.next_look {
            self.next_look = now + LOOK_EVERY;
            dirty |= self.check_reach(hands);
        }
        if now >= self.next_count {
            self.next_count = now + COUNT_EVERY;
            let growth = self.past.growth(self.elapsed(now));
            self.ports = Ports::count(hands.kernel.flows.iter().copied(), &growth);
            self.past.note(self.elapsed(now), &self.ports);
            self.counted = Some(self.elapsed(now));
            self.status_due = true;
            dirty |= self.decide_blocks(now);
        }
        if now >= self.next_resync {
            self.next_resync = now + RESYNC;
            dirty = true;
        }
        if dirty {
            self.reconcile(hands);
        }
        self.write_status(hands);
    }

    pub fn next_wake(&self) -> Duration {
        let status = (self.status_due && !self.writing).then_some(self.next_status);
        let gateways = self.gateways.next().map(|next| self.start + next);
        let keeper = self.keeper.is_some().then_some(self.next_keeper);
        let all = [status, gateways, keeper].into_iter().flatten();
        let all = all.chain([self.next_look, self.next_count, self.next_resync, self.start + self.pulse.next()]);
        all.min().unwrap_or(self.next_look)
    }

    /// It is stopped, not killed.
    pub fn stop(&mut self, hands: &mut Hands<'_>) {
        let replaceable = self.carriers.are_replaceable(&self.node, &self.world.plan, &self.gateways.states());
        if self.able && self.world.is_named(&self.node) && replaceable {
            self.able = false;
            self.sign_of_life(hands);
        }
    }

    fn sign_of_life(&mut self, hands: &mut Hands<'_>) {
        self.pulse.said(self.elapsed(hands.now));
        hands.kernel.able_until = if self.able { hands.now + self.times.deadline } else { Duration::ZERO };
        let held = self.keeper.as_ref().filter(|keeper| keeper.held(hands.now).is_some());
        hands.kernel.held_until = held.and_then(Keeper::until).unwrap_or_default();
    }

    fn check_reach(&mut self, hands: &Hands<'_>) -> bool {
        let lease =
            LeaseWord { wanted: self.world.is_named(&self.node), held: self.lease_held, duration: self.times.lease };
        let now = self.elapsed(hands.now);
        self.reach.update(&self.gateways.states(), hands.kernel.asked, now)
            | self.reach.compare(lease, &self.gateways.holding(), now)
    }

    fn decide_blocks(&mut self, now: Duration) -> bool {
        let elapsed = self.elapsed(now);
        self.withheld.update(&OfBlocks {
            node: &self.node,
            plan: &self.world.plan,
            used: &self.used,
            reported: self.world.snapshot.report(&self.node),
            ports: &self.ports,
            counted: self.counted,
            now: elapsed,
        })
    }

    fn reconcile(&mut self, hands: &mut Hands<'_>) {
        let (now, world) = (hands.now, self.world.clone());
        self.used = view::used(&world.plan, &view::classes_of(&world.snapshot, &self.node));
        self.decide_blocks(now);
        let probes = self.gateways.states();
        let able = hands.connected && self.reach.is_reached();
        let turned = std::mem::replace(&mut self.able, able) != able;
        self.carriers.update(&Circumstances {
            node: &self.node,
            snapshot: &world.snapshot,
            plan: &world.plan,
            probes: &probes,
            able: self.able,
            now: self.elapsed(now),
        });
        let leases = world.leases(&self.node).max(self.leases);
        let watched = self.carriers.watched(&self.node, &world.plan, &self.used);
        self.gateways.set(targets(&world, &watched));
        let (carriers, withheld) = (&self.carriers, &self.withheld);
        let holdings = Holdings { node: &self.node, snapshot: &world.snapshot, plan: &world.plan, carriers, withheld };
        let entry = |ip: &IpAddr| Entry {
            forwards: carriers.forwards(*ip),
            answers: carriers.answers(*ip),
            used: carriers.used(*ip).to_vec(),
            blocks: blocks::usable(&holdings, *ip),
        };
        let egress: BTreeMap<IpAddr, Entry> = world.plan.egress_ips.keys().map(|ip| (*ip, entry(ip))).collect();
        let present = hands.kernel.tables.as_ref();
        if present.is_none_or(|tables| tables.world.leases != world.leases || tables.egress != egress) {
            hands.kernel.writes += 1;
        }
        hands.kernel.tables = Some(Tables { world: world.clone(), egress });
        self.leases = leases;
        self.carries = self.carriers.carried().clone();
        self.withheld.written(self.elapsed(now));
        if turned {
            self.sign_of_life(hands);
        }
        self.reach.set_peers(self.carriers.peers(&self.node, &world.plan));
        self.keep_lease(hands);
        self.status_due = true;
    }

    fn keep_lease(&mut self, hands: &mut Hands<'_>) {
        let wanted = hands.connected && self.world.is_named(&self.node);
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
        if !self.status_due || hands.now < self.next_status || self.writing {
            return;
        }
        self.next_status = hands.now + STATUS_EVERY;
        let world = self.world.clone();
        let Some(present) = world.egress_node(&self.node) else {
            self.writing = true;
            let object = EgressNode::new(self.node.as_str(), Default::default());
            hands.effects.push(Effect::Write(Purpose::Status, Object::EgressNode(Arc::new(object))));
            return;
        };
        let reported = |s: &EgressNodeStatus| Known { all: s.lease_revision, own: s.own_lease_revision };
        let leases = present.status.as_ref().map_or(Known::default(), reported).max(self.leases);
        self.withheld.publish(&self.node, &world.plan, leases.own);
        let status = EgressNodeStatus {
            lease_revision: leases.all,
            own_lease_revision: leases.own,
            carries: self.carries.iter().map(|ip| CarriedIP { egress_ip: ip.to_string() }).collect(),
            demand: status::demands(demand::demand(&self.node, &world.plan, &self.ports, &self.withheld)),
            ..EgressNodeStatus::default()
        };
        self.status_due = false;
        if present.status.as_ref() != Some(&status) {
            self.writing = true;
            let object = EgressNode { status: Some(status), ..EgressNode::clone(present) };
            hands.effects.push(Effect::Write(Purpose::Status, Object::EgressNode(Arc::new(object))));
        }
    }
}

/// The gateways to probe.
fn targets(world: &View, watched: &BTreeSet<(&NodeName, IpAddr)>) -> BTreeMap<NodeName, Target> {
    let mut targets = BTreeMap::new();
    for (name, ip) in watched {
        let Some(address) = world.snapshot.nodes.get(*name).and_then(|n| view::tunnel_addresses(n).first().copied())
        else {
            continue;
        };
        let new = || Target { address, egress: BTreeMap::new(), transports: [DEVICE].into() };
        let target: &mut Target = targets.entry((*name).clone()).or_insert_with(new);
        target.egress.entry(ip.is_ipv6()).or_insert(*ip);
    }
    targets
}

/// An agent that cannot read the objects yet says again what an earlier one said.
pub fn while_waiting(kernel: &mut Kernel, now: Duration, length: Duration) {
    let ns = |d: Duration| d.as_nanos() as u64;
    if let Some(until) = able::renewed(ns(kernel.able_until), ns(now), length) {
        kernel.able_until = Duration::from_nanos(until);
    }
}
