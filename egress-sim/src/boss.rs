//! A simulated controller: `controller::run` and `controller::apply` without partial rounds, events and the statuses that users read.

use super::{
    api::{Client, Object, Reader, Stored},
    events::{Effect, Purpose},
    keeper::Keeper,
    machine::Times,
};
use egress_core::{
    health::{Health, LeaseTimes},
    model::NodeName,
    plan::{Plan, plan},
};
use egress_daemon::{
    controller::{
        ControllerConfig, retry,
        sight::{Judgement, Sight, delays, judged},
    },
    store::lease::CONTROLLER_LEASE,
};
use egress_objects::{
    api::{EgressIP, EgressNode},
    snapshot::{Desired, desired},
};
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

/// As in `controller::run`.
const RESYNC: Duration = Duration::from_secs(60);

/// The time for which an absent node keeps its blocks.
const QUARANTINE: Duration = Duration::from_secs(20);

/// A forced share of blocks, so that blocks change hands in a small cluster as in a full one.
#[derive(Clone, Copy, Default)]
pub struct Squeeze(pub Option<u32>);

impl Squeeze {
    fn apply(self, plan: &mut Plan) {
        let Some(share) = self.0 else { return };
        for e in plan.egress_ips.values_mut() {
            (e.share, e.scarce, e.starved) = (share, true, true);
        }
    }
}

pub struct Boss {
    pub client: Client,
    keeper: Keeper,
    sight: Sight,
    leading: Option<Leading>,
    next_keeper: Duration,
    next: Duration,
}

struct Leading {
    epoch: u64,
    /// Whether it has read everything that its predecessor may have written.
    fresh: bool,
    seen: Option<Inputs>,
    failures: u32,
    due: Duration,
    delays: BTreeSet<Duration>,
    applying: Option<Applying>,
}

#[derive(Clone, PartialEq)]
struct Inputs {
    versions: Vec<u64>,
    gateways: Vec<Judgement>,
    squeeze: Option<u32>,
}

/// A round's writes, in stages. Each stage begins when the previous one is over.
struct Applying {
    inputs: Inputs,
    stages: VecDeque<Vec<Effect>>,
    under_way: usize,
    failed: bool,
}

impl Boss {
    /// Starts a controller.
    pub fn start(identity: String, client: Client, times: Times, now: Duration) -> Self {
        let config = ControllerConfig::new(identity.clone());
        let (duration, renew) = (config.lease_duration, config.renew_every);
        let keeper = Keeper::new(CONTROLLER_LEASE.into(), identity, duration, renew);
        let sight = Sight::new(LeaseTimes { duration: times.lease_of_controllers, quarantine: QUARANTINE });
        Self { client, keeper, sight, leading: None, next_keeper: now, next: now }
    }

    pub fn next_wake(&self) -> Duration {
        self.next.min(self.next_keeper)
    }

    /// Handles the answer to a write of the lease.
    pub fn kept(&mut self, now: Duration, stored: Option<&Stored>) {
        self.keeper.wrote(now, stored);
    }

    /// Handles the end of a refresh, in which everything was read.
    pub fn refreshed(&mut self) {
        if let Some(leading) = &mut self.leading {
            leading.fresh = true;
        }
    }

    /// Handles the answer to a write of a round. For an EgressIP's spec, `then` has the status to write next.
    pub fn wrote(&mut self, stored: Option<Stored>, then: Option<Box<EgressIP>>, now: Duration, out: &mut Vec<Effect>) {
        let Some(leading) = &mut self.leading else { return };
        let Some(applying) = &mut leading.applying else { return };
        applying.under_way -= 1;
        match (stored.map(|stored| stored.object), then) {
            (None, _) => applying.failed = true,
            (Some(Object::EgressIp(written)), Some(wanted)) if written.status != wanted.status => {
                if self.keeper.held(now) != Some(leading.epoch) {
                    applying.failed = true;
                    return;
                }
                let object = EgressIP { status: wanted.status, ..EgressIP::clone(&written) };
                applying.under_way += 1;
                out.push(Effect::Write(Purpose::Plan(None), Object::EgressIp(Arc::new(object))));
            }
            _ => {}
        }
    }

    /// Runs the steps of the controller's loop that follow each event.
    pub fn turn(&mut self, now: Duration, reader: &mut Reader, squeeze: Squeeze, out: &mut Vec<Effect>) {
        let (write, wake) = self.keeper.turn(now, &self.client);
        self.next_keeper = wake;
        out.extend(write.map(|lease| Effect::Write(Purpose::Lease, lease)));
        self.go_on(now, out);
        if self.leading.as_ref().is_some_and(|leading| leading.applying.is_some() || !leading.fresh) {
            // The controller's loop would be waiting for the store.
            self.next = now + RESYNC;
            return;
        }
        self.sight.observe(self.client.leases(), self.client.heard(), now);
        let epoch = self.keeper.held(now);
        match epoch {
            None => self.leading = None,
            Some(epoch) if self.leading.as_ref().is_none_or(|leading| leading.epoch != epoch) => {
                let (due, delays) = (Duration::ZERO, BTreeSet::new());
                let (fresh, seen, failures) = (false, None, 0);
                self.leading = Some(Leading { epoch, fresh, seen, failures, due, delays, applying: None });
                out.push(Effect::Refresh);
                return;
            }
            Some(_) => {}
        }
        let health = self.sight.gateways.health(now);
        let soon = now + Duration::from_millis(1);
        let Some(mut leading) = self.leading.take() else {
            self.next = self.sight.gateways.next_deadline(&BTreeSet::new(), now).unwrap_or(now + RESYNC).max(soon);
            return;
        };
        let inputs = self.inputs(&health, &leading.delays, squeeze);
        let is_news = match &leading.seen {
            Some(seen) if leading.failures > 0 => seen.gateways != inputs.gateways,
            seen => seen.as_ref() != Some(&inputs),
        };
        if now >= leading.due || is_news {
            self.round(&mut leading, &health, inputs, (now, squeeze), reader);
        }
        self.next = self.sight.gateways.next_deadline(&leading.delays, now).unwrap_or(leading.due).min(leading.due);
        self.next = self.next.max(soon);
        self.leading = Some(leading);
        self.go_on(now, out);
    }

    fn inputs(&self, health: &Health, delays: &BTreeSet<Duration>, squeeze: Squeeze) -> Inputs {
        Inputs { versions: self.client.versions(), gateways: judged(health, delays), squeeze: squeeze.0 }
    }

    fn round(
        &mut self,
        leading: &mut Leading,
        health: &Health,
        mut inputs: Inputs,
        (now, squeeze): (Duration, Squeeze),
        reader: &mut Reader,
    ) {
        let observed = reader.read(&self.client);
        let objects = self.client.objects(&reader.fixed);
        let mut after = plan(&observed.snapshot, health, &observed.plan);
        squeeze.apply(&mut after);
        let wanted = desired(&objects, &observed.snapshot, &after, &[], &Time(Timestamp::UNIX_EPOCH));
        let present: BTreeSet<NodeName> = observed.snapshot.nodes.keys().cloned().collect();
        let holders: Vec<NodeName> =
            objects.egress_nodes.iter().filter_map(|n| Some(n.metadata.name.as_deref()?.into())).collect();
        self.sight.gateways.observe_nodes(&present, &holders, now);
        leading.delays = delays(&observed.snapshot);
        inputs.gateways = judged(health, &leading.delays);
        let stages = self.stages(wanted);
        leading.applying = Some(Applying { inputs, stages, under_way: 0, failed: false });
    }

    /// Returns the writes in order: EgressNodes that every agent will follow, EgressIPs, and other EgressNodes.
    fn stages(&self, wanted: Desired) -> VecDeque<Vec<Effect>> {
        let present = self.client.objects(&Default::default());
        let ip = |wanted: EgressIP| {
            let current = present.egress_ips.iter().find(|ip| ip.metadata.name == wanted.metadata.name);
            let object = match current {
                None => EgressIP { status: None, ..wanted.clone() },
                Some(current) if current.spec != wanted.spec || current.metadata.labels != wanted.metadata.labels => {
                    EgressIP { status: current.status.clone(), ..wanted.clone() }
                }
                Some(current) if current.status != wanted.status => {
                    return Some(Effect::Write(Purpose::Plan(None), Object::EgressIp(Arc::new(wanted))));
                }
                Some(_) => return None,
            };
            Some(Effect::Write(Purpose::Plan(Some(Box::new(wanted))), Object::EgressIp(Arc::new(object))))
        };
        let ips = wanted.egress_ips.into_values().filter_map(ip).collect();
        let current = |wanted: &EgressNode| -> Option<&EgressNode> {
            present.egress_nodes.iter().find(|n| n.metadata.name == wanted.metadata.name).map(|n| &**n)
        };
        let changed = wanted.egress_nodes.into_values().filter(|wanted| {
            current(wanted).is_none_or(|current| {
                (&current.spec, &current.metadata.labels) != (&wanted.spec, &wanted.metadata.labels)
            })
        });
        let (shown, others): (Vec<_>, Vec<_>) = changed.partition(|wanted| wanted.is_shown(current(wanted)));
        let write = |n| Effect::Write(Purpose::Plan(None), Object::EgressNode(Arc::new(n)));
        let [shown, others] = [shown, others].map(|nodes| nodes.into_iter().map(write).collect());
        [shown, ips, others].into()
    }

    /// Begins the next stage of a round when the previous one is over, and ends the round after the last.
    fn go_on(&mut self, now: Duration, out: &mut Vec<Effect>) {
        let Some(mut leading) = self.leading.take() else { return };
        while let Some(applying) = leading.applying.as_mut().filter(|applying| applying.under_way == 0) {
            let next = match applying.stages.pop_front() {
                Some(stage) => stage,
                None => {
                    let failed = applying.failed;
                    leading.failures = if failed { leading.failures + 1 } else { 0 };
                    leading.seen = (leading.failures != 1).then(|| applying.inputs.clone());
                    leading.due = now + if failed { retry(leading.failures) } else { RESYNC };
                    leading.applying = None;
                    self.next = if failed { leading.due } else { now };
                    break;
                }
            };
            if self.keeper.held(now) == Some(leading.epoch) {
                applying.under_way = next.len();
                out.extend(next);
            } else {
                applying.failed |= !next.is_empty();
            }
        }
        self.leading = Some(leading);
    }
}
