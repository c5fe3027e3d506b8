//! The agent as a state machine: `handle_*` takes events, and [`Machine::poll_action`] returns actions in the order in which they must be
//! carried out. Pure; times are since the agent's start.
//!
//! Each action is carried out before the next is polled. If an action asks for an answer, the answer is also passed in before the next
//! poll. A change leads to a round ([`round`]), in which everything is decided again.

mod action;
mod config;
mod peers;
mod round;
#[cfg(test)]
mod tests;

pub use action::{Action, Counted, Left, MachineSettings, ShaperEnds};

use super::{
    carriers::Carriers,
    demand,
    effective::Effective,
    facts::{Facts, Objects},
    gateways::{Answered, Gateways},
    heartbeat::Heartbeats,
    history::Histories,
    late::Late,
    ports::Past,
    programmed::Programmed,
    reach::{LeaseWord, Reach},
    takeovers::{Lengths, TakeOvers},
    transports::Transports,
    unnamed::{Networks, Unnamed},
    view::Decided,
};
use crate::{
    encode::{EndpointView, fit::Refused},
    health::terms,
    model::{Demand, EndpointId, NodeName, Trouble},
    network::{EgressLink, classify::InterfaceRules, links::LinkTable},
};
use round::Round;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

/// How often everything is decided again even if nothing seems to have changed.
const RESYNC: Duration = Duration::from_secs(5);
/// Such rounds may take one part in this many of the time, but are at most [`RESYNC_PAUSE_AT_MOST`] apart: a round that took long may have been
/// stopped in the middle.
const RESYNC_SHARE: u32 = 20;
const RESYNC_PAUSE_AT_MOST: Duration = Duration::from_secs(30);
/// The shortest time between two writes of the status.
const STATUS_EVERY: Duration = Duration::from_millis(100);
/// The longest time between attempts while the status cannot be written: the time doubles with each attempt, up to this.
const STATUS_PAUSE_AT_MOST: Duration = Duration::from_secs(5);
/// How often changes of routes alone are processed: a BGP speaker may make thousands a second, and few concern the node.
const ROUTES_EVERY: Duration = Duration::from_secs(1);
/// How often the programs' counters are read.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The same while a gateway may be dying: probes that reach this node tell whether this node is the one that is cut off.
const LOOK_CLOSELY_EVERY: Duration = Duration::from_millis(10);
/// The shortest time between two counts of the ports in use.
const COUNT_EVERY: Duration = Duration::from_secs(2);
/// A count may take one part in this many of the time.
const COUNT_SHARE: u32 = 20;
/// [`COUNT_EVERY`] when ports are getting scarce.
const AT_ONCE_EVERY: Duration = Duration::from_millis(100);
/// [`COUNT_SHARE`] when ports are getting scarce.
const AT_ONCE_SHARE: u32 = 4;
/// The longest pause between two counts: a count that took long may have been stopped in the middle.
const COUNT_PAUSE_AT_MOST: Duration = Duration::from_secs(60);

/// The results of the last rounds.
#[derive(Default)]
pub struct RoundOutcome {
    /// The revision up to which the node's leases are in its tables.
    pub leases: u64,
    /// The egress IPs that this node carries according to its tables.
    pub carries: BTreeSet<IpAddr>,
    /// The carried egress IPs that are announced.
    pub announced: BTreeMap<IpAddr, EgressLink>,
    /// The transports to other nodes.
    pub transports: BTreeMap<NodeName, Transports>,
    /// Networks that may be the cluster's although no object names them.
    pub unnamed: Networks,
    /// Which versions of the policies are in the tables.
    pub programmed: Programmed,
    /// The problems that keep policies from being carried out.
    pub troubles: BTreeSet<Trouble>,
    /// The errors of the last round.
    pub errors: Vec<String>,
}

/// When each periodic task is due.
#[derive(Default)]
struct Timers {
    resync: Duration,
    look: Duration,
    count: Duration,
    /// The next count, if ports are getting scarce.
    count_at_once: Duration,
    status: Duration,
    routes: Duration,
}

/// An agent: everything that it knows and has decided.
pub struct Machine {
    settings: MachineSettings,
    facts: Facts,
    decided: Decided,
    outcome: RoundOutcome,
    shaper: Option<ShaperEnds>,
    /// The flags in the configuration record that the programs have.
    flags: u32,
    /// The egress IPs that were last advertised.
    advertised: Option<BTreeSet<IpAddr>>,
    /// What was last left out of the tables.
    refused: Refused,
    effective: Effective,
    endpoints: BTreeMap<EndpointId, EndpointView>,
    late: Late,
    unnamed: Unnamed,
    reach: Reach,
    gateways: Gateways,
    heartbeats: Heartbeats,
    past: Past,
    takeovers: TakeOvers,
    /// Egress IPs whose packets go to other gateways as soon as the tables are written.
    turned_away: BTreeSet<IpAddr>,
    /// How often the programs have found ports taken.
    tight: u64,
    /// The time until which the lease is held.
    lease_until: Duration,
    /// The time until which the programs tell others that the lease is held.
    told_until: Duration,
    timers: Timers,
    counting: bool,
    /// Whether some route has changed.
    routes_due: bool,
    status_due: bool,
    writing_status: bool,
    status_pause: Duration,
    /// Whether the first round has been carried out.
    started: bool,
    /// Whether something has changed.
    dirty: bool,
    round: Option<Round>,
    actions: VecDeque<Action>,
}

impl Machine {
    /// Creates an agent from these `facts` and from what an earlier one has `left`. Its first round must be carried out immediately.
    pub fn new(settings: MachineSettings, left: Left, facts: Facts) -> Self {
        let carriers = Carriers::recover(&left.carried, &left.used);
        let histories = Histories::recover(&left.endpoints);
        let mut machine = Self {
            facts: Facts { left: left.used, ..facts },
            decided: Decided { carriers, histories, ..Decided::default() },
            outcome: RoundOutcome::default(),
            shaper: None,
            flags: left.flags,
            advertised: None,
            refused: Refused::default(),
            effective: Effective::default(),
            endpoints: left.endpoints,
            late: Late::default(),
            unnamed: Unnamed::default(),
            reach: Reach::new(settings.probe),
            gateways: Gateways::new(settings.probe),
            heartbeats: Heartbeats::new(settings.deadline, Duration::ZERO),
            past: Past::default(),
            takeovers: TakeOvers::default(),
            turned_away: BTreeSet::new(),
            tight: 0,
            lease_until: Duration::ZERO,
            told_until: Duration::ZERO,
            timers: Timers::default(),
            counting: false,
            routes_due: false,
            status_due: true,
            writing_status: false,
            status_pause: STATUS_EVERY,
            started: false,
            dirty: true,
            round: None,
            actions: VecDeque::new(),
            settings,
        };
        machine.look_around();
        machine
    }

    /// Takes the current objects.
    pub fn handle_objects(&mut self, objects: Arc<Objects>) {
        self.facts.objects = objects;
        self.dirty = true;
    }

    /// Takes the current links.
    pub fn handle_links(&mut self, links: Arc<LinkTable>) {
        match links.differs_in_routes_only(&self.facts.links) {
            true => self.routes_due = true,
            false => self.dirty |= !Arc::ptr_eq(&self.facts.links, &links),
        }
        self.facts.links = links;
    }

    /// Takes the interfaces with exit programs. `bypass`: another party's program may deliver packets to pods without passing ours.
    pub fn handle_hooks(&mut self, exits: BTreeSet<u32>, bypass: bool) {
        self.dirty |= self.holds() || exits != self.facts.exits || bypass != self.facts.bypass;
        (self.facts.exits, self.facts.bypass) = (exits, bypass);
    }

    /// Takes the current index of the tunnel device.
    pub fn handle_tunnel(&mut self, index: u32) {
        self.dirty |= index != self.facts.tunnel;
        self.facts.tunnel = index;
    }

    /// Notes that the first round has been carried out.
    pub fn handle_start(&mut self, now: Duration) {
        self.started = true;
        self.heartbeats = Heartbeats::new(self.settings.deadline, now);
    }

    /// Takes an answer to a probe.
    pub fn handle_probe(&mut self, answer: &Answered, now: Duration) {
        self.dirty |= self.gateways.reply(answer, now);
    }

    /// Takes the time until which the lease is held; zero if it is not held.
    pub fn handle_lease(&mut self, until: Duration) {
        self.lease_until = until;
    }

    /// Notes that the lease was given back.
    pub fn handle_released(&mut self) {
        self.dirty = true;
    }

    /// Takes how many probes the programs have answered, and how often they have found ports taken, in total.
    pub fn handle_counters(&mut self, answered: u64, tight: u64, now: Duration) {
        let lease = LeaseWord {
            wanted: self.facts.is_named(),
            held: self.is_lease_held(now),
            duration: self.settings.lease_duration,
        };
        self.reach.note_asked(answered, now);
        self.dirty |= self.reach.look(&self.gateways.states(), |name| self.gateways.heard(name), now)
            | self.reach.compare(lease, &self.gateways.holding(), now);
        if std::mem::replace(&mut self.tight, tight) != tight {
            self.timers.count = self.timers.count.min(self.timers.count_at_once);
        }
    }

    /// Takes a count of the ports in use, or its failure.
    pub fn handle_ports(&mut self, Counted { ports, began, took }: Counted, now: Duration) {
        self.counting = false;
        let next = |every: Duration, share| {
            let pause = took.saturating_mul(share - 1).min(COUNT_PAUSE_AT_MOST);
            began + every.max(took + pause)
        };
        self.timers.count = next(COUNT_EVERY, COUNT_SHARE);
        self.timers.count_at_once = next(AT_ONCE_EVERY, AT_ONCE_SHARE);
        let Some(ports) = ports else { return };
        self.status_due |= ports != self.facts.ports;
        self.past.note(began, &ports);
        (self.facts.ports, self.facts.counted, self.facts.now) = (ports, Some(began), now);
        self.dirty |= self.decided.withheld.update(&self.facts);
    }

    /// Notes that the status has something to report that does not come from the machine.
    pub fn handle_news(&mut self) {
        self.status_due = true;
    }

    /// Notes that the status was written or need not be (`done`), or that it must be written again.
    pub fn handle_status(&mut self, done: bool) {
        self.writing_status = false;
        self.status_due |= !done;
        if done {
            self.status_pause = STATUS_EVERY;
        }
    }

    /// Notes that the status could not be written and must not be tried again immediately.
    pub fn handle_status_failed(&mut self, now: Duration) {
        self.handle_status(false);
        self.status_pause = (2 * self.status_pause).min(STATUS_PAUSE_AT_MOST);
        self.timers.status = now + self.status_pause;
    }

    /// Notes an error, to be published.
    pub fn handle_error(&mut self, error: impl ToString) {
        self.outcome.errors.push(error.to_string());
    }

    /// Advances the time to `now`. Must be called when [`next_wake`](Self::next_wake) says so, and after every other event.
    pub fn handle_timeout(&mut self, now: Duration) {
        let actions = &mut self.actions;
        let send = |name: &NodeName, request: &_| actions.push_back(Action::Probe(name.clone(), *request));
        self.dirty |= self.gateways.tick(now, send);
        // Other gateways may wait for this node to hold its lease again.
        let regained = now >= self.told_until && now < self.says_held_until() && self.heartbeats.may_announce(now);
        if self.heartbeats.look(now) || regained {
            self.send_heartbeat(now);
        }
        self.dirty |= self.decided.carriers.next().is_some_and(|next| now >= next);
        if now >= self.timers.look {
            let closely = self.gateways.are_in_doubt(now) || self.reach.is_doubted();
            self.timers.look = now + if closely { LOOK_CLOSELY_EVERY } else { LOOK_EVERY };
            self.actions.push_back(Action::ReadCounters);
        }
        if now >= self.timers.count && !self.counting {
            self.counting = true;
            self.actions.push_back(Action::CountPorts(self.past.growth(now)));
        }
        if self.routes_due && now >= self.timers.routes {
            (self.routes_due, self.timers.routes, self.dirty) = (false, now + ROUTES_EVERY, true);
        }
        if now >= self.timers.resync {
            self.timers.resync = now + RESYNC;
            self.actions.push_back(Action::LookAgain);
            self.dirty = true;
        }
    }

    /// Returns the latest time at which to call [`handle_timeout`](Self::handle_timeout).
    pub fn next_wake(&self) -> Duration {
        // While a count or a status write is in progress, its end wakes the agent.
        let status = (self.status_due && !self.writing_status).then_some(self.timers.status);
        let count = (!self.counting).then_some(self.timers.count);
        let routes = self.routes_due.then_some(self.timers.routes);
        let sometimes =
            [status, count, routes, self.gateways.next(), self.decided.carriers.next()].into_iter().flatten();
        sometimes.fold(self.timers.resync.min(self.timers.look).min(self.heartbeats.next()), Duration::min)
    }

    /// Prepares for the agent's stop: the other carriers take over where they can. Returns whether they can; if so, all of them know it a
    /// moment after the actions are carried out.
    pub fn handle_stop(&mut self, now: Duration) -> bool {
        let (node, plan) = (&self.facts.node, &self.facts.objects.plan);
        let replaceable = self.decided.carriers.are_replaceable(node, plan, &self.gateways.states());
        if !self.facts.able || !self.facts.is_named() || !replaceable {
            return false;
        }
        self.facts.able = false;
        self.outcome.errors.clear();
        self.send_heartbeat(now);
        self.actions.push_back(Action::Advertise(BTreeSet::new()));
        true
    }

    /// Returns the next action.
    pub fn poll_action(&mut self, now: Duration) -> Option<Action> {
        while self.actions.is_empty() && (self.round.is_some() || self.dirty) {
            self.advance(now);
        }
        let action = self.actions.pop_front();
        if action.is_some() || !self.status_due || self.writing_status || now < self.timers.status {
            return action;
        }
        (self.status_due, self.writing_status, self.timers.status) = (false, true, now + STATUS_EVERY);
        Some(Action::WriteStatus)
    }

    /// Returns what a status says about leases if an earlier status has `reported` this revision: the revision up to which they are in the
    /// tables, and the demand for blocks. Until the first write, the tables are those that an earlier agent has reported.
    pub fn report(&mut self, reported: u64) -> (u64, BTreeMap<IpAddr, Demand>) {
        let (node, plan, withheld) = (&self.facts.node, &self.facts.objects.plan, &mut self.decided.withheld);
        let leases = reported.max(self.outcome.leases);
        withheld.publish(node, plan, leases);
        (leases, demand::demand(node, plan, &self.facts.ports, withheld))
    }

    /// Returns whether egress IPs may be announced, and since when or from when on.
    pub fn may_announce(&self, now: Duration) -> (bool, Duration) {
        let hears = self.reach.hears(now);
        let silent_until = if hears { Duration::ZERO } else { now + LOOK_CLOSELY_EVERY };
        (hears && self.heartbeats.may_announce(now), silent_until.max(self.heartbeats.silent_until()))
    }

    fn send_heartbeat(&mut self, now: Duration) {
        self.heartbeats.sent(now);
        let able = if self.facts.able { self.settings.deadline } else { Duration::ZERO };
        self.told_until = self.says_held_until();
        self.actions.push_back(Action::Heartbeat { able, held: self.told_until.saturating_sub(now) });
    }

    fn says_held_until(&self) -> Duration {
        terms::says_held_until(self.lease_until, self.settings.lease_duration)
    }

    /// Returns whether the lease is held.
    pub fn is_lease_held(&self, now: Duration) -> bool {
        now < self.lease_until
    }

    /// Returns what is known about the node.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns the results of the last rounds.
    pub fn outcome(&self) -> &RoundOutcome {
        &self.outcome
    }

    /// Returns the gateways that are probed.
    pub fn gateways(&self) -> &Gateways {
        &self.gateways
    }

    /// Returns how long it took to take over egress IPs of gateways that died.
    pub fn takeovers(&self) -> Lengths {
        self.takeovers.lengths()
    }

    /// Returns the rules that classify the node's interfaces.
    pub fn rules(&self) -> InterfaceRules {
        let node = self.facts.objects.snapshot.nodes.get(&self.facts.node);
        let node_addresses = node.into_iter().flat_map(|n| n.addresses.iter().copied()).collect();
        InterfaceRules { node_addresses, ..self.settings.rules.clone() }
    }
}
