//! The cluster: processes, the network between them, and virtual time.

use super::{
    api::{Client, EGRESS_NODES, KINDS, LEASES, LISTING, Object, Reader, Server, SharedObjects},
    boss::{Boss, Squeeze},
    events::{Effect, Purpose, Response, Scheduled, SimEvent},
    faults::Planned,
    keeper::Keeper,
    machine::{Hands, Kernel, SimAgent, Times},
    rng::Rng,
};
use egress_core::{
    agent::gateways::{Answered, Request},
    model::NodeName,
};
use std::{
    collections::{BTreeMap, BinaryHeap},
    fmt::Arguments,
    rc::Rc,
    time::Duration,
};

pub struct SimHost {
    pub name: NodeName,
    pub is_gateway: bool,
    pub powered: bool,
    pub kernel: Kernel,
    pub agent: Option<SimAgent>,
    /// For each probing node, the highest revision up to which this machine has ever confirmed that node's leases.
    pub said: BTreeMap<NodeName, u64>,
    /// The number of faults that hold its uplink down.
    pub uplink_faults: u32,
}

/// The common state of agent and controller processes.
#[derive(Default)]
pub struct Process {
    pub incarnation: u32,
    pub frozen: u32,
    /// The number of faults that keep it from the API server.
    pub api_faults: u32,
    pub wake: Option<Duration>,
    /// The events that came while it was frozen.
    pub backlog: Vec<SimEvent>,
    /// Whether each kind's watch has a pending delivery.
    pub told: [bool; KINDS],
}

pub struct SimCluster {
    pub now: Duration,
    pub rng: Rng,
    pub times: Times,
    queue: BinaryHeap<Scheduled>,
    next_event: u64,
    pub server: Server,
    pub reader: Reader,
    pub machines: Vec<SimHost>,
    pub processes: Vec<Process>,
    pub bosses: Vec<Option<Boss>>,
    /// The number of faults that cut the underlay from one machine to another.
    pub cuts: BTreeMap<(usize, usize), u32>,
    /// The number of faults that keep all processes from the API server.
    pub api_faults: u32,
    /// The underlay's packet loss in 1/1,000, and its longest delay in ms.
    pub loss: u64,
    pub delay: u64,
    /// The longest delays of a request and of a watch in ms.
    pub request_delay: u64,
    pub watch_delay: u64,
    pub squeeze: Squeeze,
    /// Whether agents follow only the EgressNodes that they need, as in clusters whose pod networks are all named by other objects.
    pub selective: bool,
    pub faults: Vec<Planned>,
    pub trace: bool,
    end: Duration,
    /// The objects in the API server, as last read by `observer`.
    pub truth: Option<Rc<SharedObjects>>,
    observer: Client,
}

/// The timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(2);

impl SimCluster {
    /// Creates an empty cluster. `scenario` sets its faults and objects.
    pub fn new(rng: Rng, times: Times, machines: Vec<SimHost>, end: Duration) -> Self {
        let processes = (0..machines.len() + 2).map(|_| Process::default()).collect();
        Self {
            now: Duration::ZERO,
            rng,
            times,
            queue: BinaryHeap::new(),
            next_event: 0,
            server: Server::default(),
            reader: Reader::default(),
            machines,
            processes,
            bosses: vec![None, None],
            cuts: BTreeMap::new(),
            api_faults: 0,
            loss: 0,
            delay: 1,
            request_delay: 5,
            watch_delay: 20,
            squeeze: Squeeze::default(),
            selective: false,
            faults: Vec::new(),
            trace: false,
            end,
            truth: None,
            observer: Client::default(),
        }
    }

    /// Reads the current objects of the API server.
    pub fn refresh_truth(&mut self) {
        let ends = self.server.ends();
        let before = self.observer.versions_end();
        if before[..LEASES] != ends[..LEASES] || self.truth.is_none() {
            self.observer.follow_to(&self.server, ends);
            self.truth = Some(self.reader.read(&self.observer));
        }
    }

    pub fn say(&mut self, what: Arguments<'_>) {
        if self.trace {
            println!("{:>9.3} {what}", self.now.as_secs_f64());
        }
    }

    /// Schedules the faults, the start of the processes and the pods' connections.
    pub fn begin(&mut self) {
        for n in 0..self.faults.len() {
            let Planned { from, until, .. } = self.faults[n];
            self.at(from, SimEvent::Fault(n, true));
            self.at(until, SimEvent::Fault(n, false));
        }
        for process in 0..self.processes.len() {
            let at = self.rng.ms(0, 300);
            self.at(at, SimEvent::Start(process, 0));
        }
        for n in 0..self.machines.len() {
            let at = self.rng.ms(1000, 2000);
            self.at(at, SimEvent::Traffic(n));
        }
    }

    /// Processes the next event. Returns `false` at the end.
    pub fn step(&mut self) -> bool {
        let Some(Scheduled { at, event, .. }) = self.queue.pop().filter(|next| next.at <= self.end) else {
            return false;
        };
        (self.now, self.server.now) = (at, at);
        self.happen(event);
        true
    }

    pub fn at(&mut self, at: Duration, event: SimEvent) {
        self.next_event += 1;
        self.queue.push(Scheduled { at, number: self.next_event, event });
    }

    pub fn after(&mut self, delay: Duration, event: SimEvent) {
        self.at(self.now + delay, event);
    }

    fn happen(&mut self, event: SimEvent) {
        let process = match &event {
            SimEvent::Wake(p, i) | SimEvent::Start(p, i) | SimEvent::Watch(p, i, _) | SimEvent::Response(p, i, ..) => {
                if self.processes[*p].incarnation != *i {
                    return;
                }
                Some(*p)
            }
            SimEvent::Answer(p, _) => Some(*p),
            _ => None,
        };
        if let Some(process) = process.filter(|p| self.processes[*p].frozen > 0) {
            self.processes[process].backlog.push(event);
            return;
        }
        match event {
            SimEvent::Wake(p, _) => {
                if self.processes[p].wake == Some(self.now) {
                    self.processes[p].wake = None;
                    self.act(p, |agent, hands| agent.turn(hands));
                }
            }
            SimEvent::Start(p, _) => self.start(p),
            SimEvent::Watch(p, _, kind) => self.watch(p, kind),
            SimEvent::Request(p, i, what) => self.request(p, i, what),
            SimEvent::Response(p, _, purpose, response) => self.response(p, purpose, response),
            SimEvent::Probe(from, to, request) => self.probe(from, to, request),
            SimEvent::Answer(p, answer) => {
                if self.machines[p].agent.is_some() {
                    self.act(p, |agent, hands| agent.answer(&answer, hands));
                }
            }
            SimEvent::Fault(n, begins) => self.fault(n, begins),
            SimEvent::Traffic(n) => self.traffic(n),
        }
    }

    /// Returns whether a process reaches the API server.
    pub fn is_online(&self, process: usize) -> bool {
        self.api_faults == 0 && self.processes[process].api_faults == 0
    }

    /// Returns whether the underlay connects one machine to another in this direction.
    pub fn is_linked(&self, from: usize, to: usize) -> bool {
        self.cuts.get(&(from, to)).is_none_or(|faults| *faults == 0)
    }

    pub fn index(&self, name: &NodeName) -> Option<usize> {
        self.machines.iter().position(|machine| machine.name == *name)
    }

    /// Runs `what` in a process, carries out its effects, and schedules its next wake-up.
    pub fn act(&mut self, process: usize, what: impl FnOnce(&mut SimAgent, &mut Hands<'_>)) {
        let mut effects = Vec::new();
        let next = match self.machines.get_mut(process) {
            Some(machine) => {
                let SimHost { kernel, agent: Some(agent), uplink_faults, .. } = machine else { return };
                let connected = *uplink_faults == 0;
                let reader = &mut self.reader;
                what(agent, &mut Hands { now: self.now, kernel, connected, reader, effects: &mut effects });
                agent.next_wake()
            }
            None => {
                let number = process - self.machines.len();
                let Some(boss) = &mut self.bosses[number] else { return };
                boss.turn(self.now, &mut self.reader, self.squeeze, &mut effects);
                boss.next_wake()
            }
        };
        self.carry_out(process, effects);
        let next = next.max(self.now + Duration::from_micros(100));
        let incarnation = self.processes[process].incarnation;
        // One event for each time is enough.
        if self.processes[process].wake.replace(next) != Some(next) {
            self.at(next, SimEvent::Wake(process, incarnation));
        }
    }

    pub fn carry_out(&mut self, process: usize, effects: Vec<Effect>) {
        let incarnation = self.processes[process].incarnation;
        for effect in effects {
            match effect {
                Effect::Probe(name, request) => {
                    let Some(to) = self.index(&name) else { continue };
                    if self.passes(process, to) {
                        let delay = self.rng.ms(0, self.delay);
                        self.after(delay, SimEvent::Probe(process, to, request));
                    }
                }
                Effect::Write(purpose, object) => {
                    let delay = self.rng.ms(1, self.request_delay);
                    self.after(delay, SimEvent::Request(process, incarnation, Some((purpose, object))));
                }
                Effect::Refresh => {
                    let delay = self.rng.ms(1, self.request_delay);
                    self.after(delay, SimEvent::Request(process, incarnation, None));
                }
            }
        }
    }

    /// Returns whether a packet gets from one machine to another, with random loss.
    fn passes(&mut self, from: usize, to: usize) -> bool {
        self.is_linked(from, to) && self.machines[from].powered && !self.rng.chance(self.loss)
    }

    fn probe(&mut self, from: usize, to: usize, request: Request) {
        let knows = |kernel: &Kernel, name: &NodeName| {
            kernel.tables.as_ref().is_some_and(|tables| tables.observed.snapshot.nodes.contains_key(name))
        };
        let name = self.machines[from].name.clone();
        let machine = &mut self.machines[to];
        if !machine.powered || !knows(&machine.kernel, &name) {
            return;
        }
        machine.kernel.asked += 1;
        let (able, held) = (self.now < machine.kernel.able_until, self.now < machine.kernel.held_until);
        let leases =
            machine.kernel.tables.as_ref().and_then(|tables| tables.known_leases.get(&name)).copied().unwrap_or(0);
        let said = machine.said.entry(name).or_default();
        *said = leases.max(*said);
        let Request { node_id, seq, transport, .. } = request;
        let answer = Answered { seq, node_id, transport, back: transport, ipv6: false, able, held, leases };
        if self.passes(to, from) {
            let delay = self.rng.ms(0, self.delay);
            self.after(delay, SimEvent::Answer(from, answer));
        }
    }

    fn request(&mut self, process: usize, incarnation: u32, what: Option<(Purpose, Object)>) {
        let online = self.is_online(process);
        let (purpose, response) = match what {
            Some((purpose, object)) => {
                let response = match online.then(|| self.server.write(object)) {
                    None => Response::Lost,
                    Some(None) => Response::Conflict,
                    Some(Some(stored)) => {
                        self.notify_watches(stored.object.kind());
                        Response::Done(stored)
                    }
                };
                (Some(purpose), response)
            }
            None if online => (None, Response::Read(self.server.ends())),
            None => (None, Response::Lost),
        };
        let lost = matches!(response, Response::Lost);
        let delay = if lost { TIMEOUT } else { self.rng.ms(1, self.request_delay) };
        self.after(delay, SimEvent::Response(process, incarnation, purpose, response));
    }

    /// Notifies all watches of a kind of a new version, each at a random time.
    pub fn notify_watches(&mut self, kind: usize) {
        for process in 0..self.processes.len() {
            if !std::mem::replace(&mut self.processes[process].told[kind], true) {
                let (delay, incarnation) = (self.rng.ms(0, self.watch_delay), self.processes[process].incarnation);
                self.after(delay, SimEvent::Watch(process, incarnation, kind));
            }
        }
    }

    /// Restarts the watches of a process that reaches the API server again, each at a random time.
    pub fn resume_watches(&mut self, process: usize) {
        for kind in 0..KINDS {
            self.processes[process].told[kind] = true;
            let (delay, incarnation) = (self.rng.ms(50, 1000), self.processes[process].incarnation);
            self.after(delay, SimEvent::Watch(process, incarnation, kind));
        }
    }

    fn watch(&mut self, process: usize, kind: usize) {
        self.processes[process].told[kind] = false;
        if !self.is_online(process) {
            return;
        }
        let nodes = self.machines.len();
        let client = match self.machines.get_mut(process) {
            Some(machine) => machine.agent.as_mut().map(|agent| &mut agent.client),
            None => self.bosses[process - nodes].as_mut().map(|boss| &mut boss.client),
        };
        let Some(client) = client else { return };
        let (any, is_listing) = (client.follow(&self.server, kind), client.is_listing());
        if is_listing {
            let incarnation = self.processes[process].incarnation;
            self.after(LISTING, SimEvent::Watch(process, incarnation, EGRESS_NODES));
        }
        if any {
            match kind {
                LEASES => self.act(process, |agent, hands| agent.turn(hands)),
                _ => self.act(process, |agent, hands| agent.read(hands)),
            }
        }
    }

    fn response(&mut self, process: usize, purpose: Option<Purpose>, mut response: Response) {
        if !self.is_online(process) && !matches!(response, Response::Lost) {
            response = Response::Lost;
            let incarnation = self.processes[process].incarnation;
            self.after(TIMEOUT, SimEvent::Response(process, incarnation, purpose, response));
            return;
        }
        let (now, nodes) = (self.now, self.machines.len());
        let stored = match response {
            Response::Done(stored) => Some(stored),
            Response::Read(ends) => {
                if let Some(boss) = &mut self.bosses[process - nodes] {
                    boss.client.follow_to(&self.server, ends);
                    boss.refreshed();
                }
                None
            }
            Response::Lost if purpose.is_none() => return self.carry_out(process, vec![Effect::Refresh]),
            Response::Conflict | Response::Lost => None,
        };
        if process >= nodes {
            let mut effects = Vec::new();
            if let Some(boss) = &mut self.bosses[process - nodes] {
                stored.iter().for_each(|stored| boss.client.note(stored.clone()));
                match purpose {
                    Some(Purpose::Lease) => boss.kept(now, stored.as_ref()),
                    Some(Purpose::Plan(then)) => boss.wrote(stored, then, now, &mut effects),
                    _ => {}
                }
            }
            self.carry_out(process, effects);
            return self.act(process, |_, _| {});
        }
        let Some(purpose) = purpose else { return };
        self.act(process, |agent, hands| {
            stored.iter().for_each(|stored| agent.client.note(stored.clone()));
            if let (Purpose::Lease, Some(keeper)) = (&purpose, agent.keeper()) {
                Keeper::wrote(keeper, now, stored.as_ref());
            }
            agent.wrote(&purpose, stored.is_some(), hands);
        });
    }
}
