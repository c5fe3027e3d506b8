//! A round decides everything again and carries out the differences. The order of its actions keeps these rules:
//!
//! - The hold rules match what the programs note: they are added after the programs hold, and removed before the programs stop holding.
//! - Writes to the tables add before they delete. Egress IPs are announced, advertised and reported after the write, and never without it.
//! - The shaper exists before the tables lead packets into it, and is removed after they have stopped.
//! - Errors are reported at the end, so that none is missed.

use super::{Action, Machine, RESYNC_PAUSE_AT_MOST, RESYNC_SHARE, RoundOutcome, ShaperEnds, peers};
use crate::{
    agent::{
        kept,
        transports::{self, Peer},
        troubles, view,
    },
    encode::{NodeView, fit::Refused},
    health::ProbeState,
    model::{Bandwidth, NodeName},
    network::{Route, classify::classify, reported::on_dummies},
};
use egress_common::{abi::TICK_SHIFT, config::flags};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

/// The progress of a round, and its decisions and answers so far.
#[derive(Default)]
pub(super) struct Round {
    step: Step,
    began: Duration,
    /// Whether some policy selects a pod.
    selects: bool,
    /// Whether the programs were holding when the round began.
    held: bool,
    /// Whether a selected pod is starting.
    starting: bool,
    /// Whether all interfaces of pods have their programs.
    covered: bool,
    path_made: bool,
    /// Whether the programs must hold.
    hold: bool,
    /// Whether the uplinks of the egress IPs that this node might carry are up.
    connected: bool,
    /// Whether the node's ability to carry egress IPs has changed.
    turned: bool,
    limits: BTreeMap<IpAddr, [Bandwidth; 2]>,
    /// Whether there are any limits.
    limited: bool,
    view: Box<NodeView>,
    peers: BTreeMap<NodeName, Peer>,
    routes: BTreeMap<IpAddr, Result<Route, String>>,
    written: bool,
}

/// The next step of a round.
#[derive(Clone, Copy, Default)]
enum Step {
    #[default]
    LookAround,
    SeeWhoIsLate,
    MakeStackPath,
    Decide,
    Describe,
    Write,
    End,
}

impl Machine {
    /// Begins a round, or continues the current one.
    pub(super) fn advance(&mut self, now: Duration) {
        self.dirty &= self.round.is_some();
        self.facts.now = now;
        let mut round = self.round.take().unwrap_or_default();
        let step = match round.step {
            Step::LookAround => self.begin(&mut round),
            Step::SeeWhoIsLate => self.see_who_is_late(&mut round),
            Step::MakeStackPath => self.make_stack_path(&mut round),
            Step::Decide => self.decide(&mut round),
            Step::Describe => self.describe(&mut round),
            Step::Write => self.write(&mut round),
            Step::End => return self.end(round),
        };
        self.round = Some(Round { step, ..round });
    }

    /// Updates what follows from objects and links alone.
    pub(super) fn look_around(&mut self) {
        self.facts.roles = classify(&self.facts.links, &self.rules());
        self.outcome.unnamed = self.unnamed.update(&self.facts);
        let told = self.facts.except_cidrs.iter().chain(self.outcome.unnamed.keys()).copied();
        // The node reports few of the addresses on dummy devices.
        self.facts.left_alone = told.chain(on_dummies(&self.facts.links)).collect();
    }

    fn begin(&mut self, round: &mut Round) -> Step {
        round.began = self.facts.now;
        self.outcome.errors.clear();
        self.look_around();
        let facts = &mut self.facts;
        let snapshot = &facts.objects.snapshot;
        facts.gone = kept::gone(&self.endpoints, snapshot, &facts.node, &facts.links);
        facts.classes = view::classes_of(snapshot, &facts.node);
        facts.classes.extend(facts.gone.iter().map(|(id, pod)| (id.clone(), pod.class.clone())));
        round.selects = facts.classes.values().any(|class| !class.is_empty());
        // While a pod is overdue, the pod behind each new interface must be known.
        let all = self.late.is_any_overdue(self.settings.start_limit, facts.now);
        let pods = facts.classes.iter().filter(|(_, class)| all || !class.is_empty());
        let ips = pods.filter_map(|(id, _)| Some(&snapshot.endpoints.get(id)?.ips)).flatten().copied();
        let routed = |ip: &IpAddr| facts.links.host_routes.get(ip).is_some_and(|i| facts.roles.pods.contains(i));
        self.actions.push_back(Action::FindInterfaces(ips.filter(|ip| !routed(ip)).collect()));
        round.held = self.holds();
        Step::SeeWhoIsLate
    }

    /// Takes the interfaces at which the kernel has found addresses of pods.
    pub fn handle_interfaces(&mut self, found: BTreeMap<IpAddr, BTreeSet<u32>>) {
        let facts = &mut self.facts;
        let (interfaces, mut claimed) = view::interfaces(&facts.links, &facts.roles, &found, &self.endpoints);
        facts.interfaces = interfaces;
        let pods = facts.objects.snapshot.endpoints.values().filter(|pod| pod.node == facts.node);
        let known: BTreeSet<&IpAddr> = pods.flat_map(|pod| &pod.ips).collect();
        claimed.retain(|ip, _| known.contains(ip));
        if let Some((ip, several)) = claimed.first_key_value() {
            let names = several.iter().filter_map(|index| Some(facts.links.links.get(index)?.name.as_str()));
            self.outcome.errors.push(format!(
                "{} pod addresses are behind several interfaces, e.g. {ip} behind {}: find the pod that has given itself the address of another \
                 one, and remove CAP_NET_ADMIN from it; meanwhile only the interface that an address was behind before counts",
                claimed.len(),
                names.collect::<Vec<_>>().join(" and ")
            ));
        }
    }

    fn see_who_is_late(&mut self, round: &mut Round) -> Step {
        let (limit, now) = (self.settings.start_limit, self.facts.now);
        self.late.update(&self.facts);
        self.outcome.troubles = self.late.troubles(&self.facts.classes, limit, now);
        round.starting = self.late.holds(limit, now);
        if round.held && !round.starting {
            self.actions.push_back(Action::SeeIfCovered);
        }
        Step::MakeStackPath
    }

    /// Notes that every interface of a pod has its programs.
    pub fn handle_covered(&mut self) {
        if let Some(round) = &mut self.round {
            round.covered = true;
        }
    }

    fn make_stack_path(&mut self, round: &mut Round) -> Step {
        round.hold = round.starting || round.held && !round.covered;
        let hold = self.held().filter(|_| round.hold);
        self.actions.push_back(Action::MakeStackPath { selects: round.selects, hold });
        Step::Decide
    }

    /// Notes that the host-stack path is set up as requested.
    pub fn handle_stack_path(&mut self) {
        if let Some(round) = &mut self.round {
            round.path_made = true;
        }
    }

    fn decide(&mut self, round: &mut Round) -> Step {
        // The rules may still hold.
        round.hold |= round.held && !round.path_made;
        let (facts, decided) = (&mut self.facts, &mut self.decided);
        let (snapshot, plan) = (&facts.objects.snapshot, &facts.objects.plan);
        facts.used = view::used(plan, &facts.classes);
        facts.probes = self.gateways.states();
        facts.known = self.gateways.leases();
        if self.started && !facts.probes.values().any(|state| *state == ProbeState::Unknown) {
            facts.left.clear();
        }
        // The tick of the programs' clock at which a connection that is silent from now on is over.
        let tick = ((self.settings.clock + facts.now).as_nanos() >> TICK_SHIFT) as u32;
        let over = tick.saturating_add(self.settings.config.tcp_established);
        decided.histories.update(snapshot, &facts.classes, over);
        let cut_off = view::cut_off(facts);
        self.outcome.errors.extend(cut_off.iter().map(|(ip, why)| format!("egress IP {ip} cannot be carried: {why}")));
        round.connected = cut_off.is_empty();
        self.reach.look(&facts.probes, |name| self.gateways.heard(name), facts.now);
        facts.doubted = self.reach.is_doubted();
        let able = round.connected && !facts.objects.partial && self.reach.is_reached();
        round.turned = std::mem::replace(&mut facts.able, able) != able;
        decided.withheld.update(facts);
        let answered = decided.carriers.answered().clone();
        decided.carriers.update(facts);
        self.turned_away.extend(decided.carriers.turned_away());
        self.takeovers.retain(|ip| decided.carriers.answers(ip));
        for (ip, dead) in decided.carriers.taken_over(facts, &answered) {
            self.gateways.heard(dead).into_iter().for_each(|heard| self.takeovers.begin(ip, heard));
        }
        round.limits = view::limits(snapshot, plan, &decided.carriers);
        round.limited = !round.limits.is_empty();
        if round.limited {
            self.actions.push_back(Action::MakeShaper(true));
        }
        Step::Describe
    }

    /// Takes the ends of the device that limits bandwidth, or its absence.
    pub fn handle_shaper(&mut self, ends: Option<ShaperEnds>) {
        self.shaper = ends;
    }

    fn describe(&mut self, round: &mut Round) -> Step {
        let config = self.config(round.hold, round.limited);
        *round.view = view::view(&self.facts, &self.decided, config, &mut self.effective);
        self.endpoints.clone_from(&round.view.endpoints);
        round.peers = peers::peers(&self.facts, &round.view, &self.watched());
        let gateway = !self.decided.carriers.carried().is_empty();
        self.actions.push_back(Action::Attach { shaper: self.shaper.map(|ends| ends.far), gateway });
        self.actions.push_back(Action::FindRoutes(round.peers.values().map(|peer| peer.address).collect()));
        Step::Write
    }

    /// Takes the routes to other nodes, or why there is none.
    pub fn handle_routes(&mut self, routes: BTreeMap<IpAddr, Result<Route, String>>) {
        if let Some(round) = &mut self.round {
            round.routes = routes;
        }
    }

    fn write(&mut self, round: &mut Round) -> Step {
        let (setting, own) = (self.settings.transport, self.tunnel_addresses());
        let unknown = Err("no route was requested".to_owned());
        let to = |peer: &Peer| {
            let route = round.routes.get(&peer.address).unwrap_or(&unknown);
            transports::to(setting, peer, route, &self.facts.links, &own)
        };
        self.outcome.transports = round.peers.iter().map(|(name, peer)| (name.clone(), to(peer))).collect();
        let targets = peers::targets(&self.watched(), &round.view, &self.outcome.transports, setting);
        self.gateways.set(targets);
        let chosen = |name: &NodeName| self.gateways.transport(name).unwrap_or_default();
        round.view.transports =
            self.outcome.transports.iter().map(|(name, t)| (name.clone(), t.view(chosen(name), setting))).collect();
        let (view, limits) = (std::mem::take(&mut round.view), std::mem::take(&mut round.limits));
        self.actions.push_back(Action::Write { view, limits });
        Step::End
    }

    /// Notes that the tables match `view`, which is as much as fits. The decisions are in force from now on, and may be reported.
    pub fn handle_written(&mut self, view: &NodeView, refused: &Refused, now: Duration) {
        let Some(round) = &mut self.round else { return };
        round.written = true;
        self.flags = view.config.map_or(0, |config| config.flags);
        let outcome = &mut self.outcome;
        outcome.troubles.extend(refused.troubles(&self.facts.objects.plan.egress_ips));
        outcome.errors.extend(refused.errors());
        // What was removed may have made room.
        self.dirty |= refused.has_more_than(&self.refused);
        self.refused.clone_from(refused);
        outcome.programmed.written(&self.facts.objects, &view.policies, now);
        outcome.leases = self.facts.leases().max(outcome.leases);
        outcome.carries = self.decided.carriers.carried().clone();
        outcome.carries.retain(|ip| view.egress_ips.contains_key(ip));
        self.decided.withheld.written(now);
        self.takeovers.written(now);
        let turned_away = std::mem::take(&mut self.turned_away);
        if !turned_away.is_empty() {
            self.actions.push_back(Action::OpenAgain(turned_away));
        }
    }

    /// Notes that the tables could not be written, and which flags are in the configuration record.
    pub fn handle_not_written(&mut self, error: impl ToString, flags: u32) {
        self.flags = flags;
        self.handle_error(error);
    }

    fn end(&mut self, round: Round) {
        self.announce(round.written);
        if round.written && !round.limited {
            self.actions.push_back(Action::MakeShaper(false));
        }
        let facts = &self.facts;
        // A gateway forwards, and so does a node whose network stack sees the first packets of flows.
        if facts.may_be_gateway() || self.settings.config.flags & flags::RESPECT_FIREWALL != 0 {
            let uplinks = facts.roles.uplinks.iter().filter_map(|i| Some(facts.links.links.get(i)?.name.clone()));
            self.actions.push_back(Action::Forward(uplinks.collect()));
        }
        if !round.held && self.holds() {
            self.actions.push_back(Action::MakeStackPath { selects: round.selects, hold: self.held() });
        }
        if round.turned {
            self.send_heartbeat(self.facts.now);
        }
        self.actions.push_back(Action::Announce(self.outcome.announced.clone()));
        let (node, plan) = (&self.facts.node, &self.facts.objects.plan);
        self.reach.set_peers(self.decided.carriers.peers(node, plan));
        self.actions.push_back(Action::KeepLease(round.connected && self.facts.is_named()));
        self.outcome.troubles = troubles::shown(std::mem::take(&mut self.outcome.troubles));
        self.outcome.errors.extend(self.outcome.troubles.iter().map(|trouble| {
            let pod = trouble.pod.as_ref().map(|pod| format!(", pod {}/{}", pod.namespace, pod.name));
            format!("policy {}{}: {}", trouble.policy, pod.unwrap_or_default(), trouble.message)
        }));
        self.actions.push_back(Action::Publish);
        self.status_due = true;
        let pause = self.facts.now.saturating_sub(round.began).saturating_mul(RESYNC_SHARE).min(RESYNC_PAUSE_AT_MOST);
        self.timers.resync = self.timers.resync.max(self.facts.now + pause);
    }

    /// Decides what to announce and advertise. If nothing was written, the tables carry what they did before, and answer for nothing more.
    fn announce(&mut self, written: bool) {
        let mut wanted = view::announced(&self.facts, &self.decided);
        let RoundOutcome { carries, announced, .. } = &mut self.outcome;
        wanted.retain(|ip, _| carries.contains(ip) && (written || announced.contains_key(ip)));
        *announced = if self.facts.silent { BTreeMap::new() } else { wanted };
        let now = self.decided.carriers.advertised() & &*carries;
        // Until the first write, the routes are those that an earlier agent left.
        if let Some(routes) = if written { Some(now) } else { self.advertised.take().map(|before| &before & &now) } {
            self.advertised = Some(routes.clone());
            self.actions.push_back(Action::Advertise(routes));
        }
    }

    fn watched(&self) -> BTreeSet<(&NodeName, IpAddr)> {
        self.decided.carriers.watched(&self.facts.node, &self.facts.objects.plan, &self.facts.used)
    }

    /// Returns whether the programs hold unknown sources.
    pub(super) fn holds(&self) -> bool {
        self.flags & flags::HOLD != 0
    }

    /// Returns the networks that the hold rules must exempt, if the programs hold.
    pub fn held(&self) -> Option<BTreeSet<IpNet>> {
        self.holds().then(|| view::excepts(&self.facts.node, &self.facts.objects.snapshot, &self.facts.left_alone))
    }
}
