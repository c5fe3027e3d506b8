//! The loop.

use super::apply::{Applied, Differences, Scope, apply, apply_part};
use super::partial::{Known, Revisions};
use super::sight::{Judgement, Sight, delays, judged, left_over};
use super::unwritten::Unwritten;
use super::{ControllerConfig, ControllerReport, Event, drains, pause, remarks};
use crate::store::lease::{CONTROLLER_LEASE, LEASE_NAMESPACE, LeaseKeeper, LeaseTerms};
use crate::store::{Key, Store, StoreProblem};
use egress_core::{
    health::Health,
    model::{NodeName, PolicyId, Snapshot},
    plan::{Plan, departed::Departed, diff::diff, plan_and_remember},
};
use egress_objects::api::{
    CiliumEgressGatewayPolicy, Egress, EgressGatewayPolicy, EgressIP, EgressIPPool, EgressNode, EgressPolicy,
    ExternalIPPool, Pod,
};
use egress_objects::snapshot::{ApiObjects, desired, previous, snapshot};
use egress_objects::translate::{networks::CniObjects, refusals};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How soon a failed round is retried.
const RETRY: Duration = Duration::from_millis(100);
/// The same after many failures in a row.
const RETRY_AT_MOST: Duration = Duration::from_secs(5);
/// How soon objects have their numbers of pods, after a round that left them out, if few objects have new ones.
const NUMBERS_WITHIN: Duration = Duration::from_secs(5);
/// How long no numbers are written after each write of nothing else: one write a second on average, however many policies and pods there
/// are. Each is sent to every agent.
const PER_NUMBER: Duration = Duration::from_secs(1);
/// How often a round is made although nothing requires it.
const RESYNC: Duration = Duration::from_secs(60);

/// How soon a round is retried after that many failed ones in a row.
pub fn retry(failures: u32) -> Duration {
    pause(RETRY, RETRY_AT_MOST, failures)
}

/// How long no numbers of pods are written after so many writes of nothing else.
pub(super) fn rest(written: u64) -> Duration {
    PER_NUMBER.saturating_mul(u32::try_from(written).unwrap_or(u32::MAX)).max(NUMBERS_WITHIN)
}

/// Everything that a plan is made from.
pub(crate) fn objects(store: &Store) -> ApiObjects {
    ApiObjects {
        policies: store.list::<EgressGatewayPolicy>(),
        namespaced_policies: store.list::<EgressPolicy>(),
        pools: store.list::<EgressIPPool>(),
        cilium_policies: store.list::<CiliumEgressGatewayPolicy>(),
        egresses: store.list::<Egress>(),
        external_ip_pools: store.list::<ExternalIPPool>(),
        nodes: store.list::<Node>(),
        namespaces: store.list::<Namespace>(),
        pods: store.list::<Pod>(),
        service_cidrs: Vec::new(),
        cni: CniObjects {
            calico_pools: store.list(),
            cilium_nodes: store.list(),
            cilium_pools: store.list(),
            antrea_pools: store.list(),
            subnets: store.list(),
        },
        egress_ips: store.list::<EgressIP>(),
        egress_nodes: store.list::<EgressNode>(),
    }
}

/// Runs a controller on a store until `stop` is ready; then it releases its leadership. `report` always shows what it
/// does.
pub async fn run(
    store: Store,
    config: ControllerConfig,
    report: watch::Sender<ControllerReport>,
    stop: impl Future<Output = ()>,
) {
    let terms = LeaseTerms {
        key: Key::namespaced(LEASE_NAMESPACE, CONTROLLER_LEASE),
        identity: config.identity.clone(),
        duration: config.lease_duration,
        renew_every: config.renew_every,
    };
    let mut keeper = LeaseKeeper::start(store.clone(), terms.clone());
    let mut changes = store.changes();
    let mut controller = Controller::new(store, config, terms.key, report);
    let mut stop = pin!(stop);
    loop {
        let next = controller.wake(keeper.held()).await;
        tokio::select! {
            () = changes.next() => {}
            () = keeper.changed() => {}
            () = tokio::time::sleep_until(next.into()) => {}
            () = &mut stop => break,
        }
    }
    keeper.release().await;
}

/// What is remembered from one round to the next. All of it can be read from the store again.
struct Controller {
    store: Store,
    config: ControllerConfig,
    lease: Key,
    report: watch::Sender<ControllerReport>,
    start: Instant,
    sight: Sight,
    leading: Option<Leading>,
}

/// What is remembered while this controller leads.
struct Leading {
    epoch: u64,
    store: Store,
    /// What the last round was made from. `None` before the first one, and after the first of several that failed: its retry comes
    /// with the next change, because there is one after a conflict.
    seen: Option<Inputs>,
    /// What is known since then, if it succeeded; the plan is the one that was reported to users.
    known: Option<Known>,
    /// How many rounds in a row have failed.
    failures: u32,
    /// When to make a round although nothing changed.
    due: Duration,
    /// When numbers of pods may be written again.
    numbers: Duration,
    /// What could not be written, and fails no round.
    unwritten: Unwritten,
    /// After which delays an egress IP may go back to its preferred gateway.
    delays: BTreeSet<Duration>,
    /// The last plan that was reported to users.
    told: Option<Plan>,
    /// The policies that could not be carried out then, and why.
    refused: BTreeMap<PolicyId, String>,
    /// What nodes then reported of themselves that was not believed.
    doubts: Vec<Event>,
    /// The policies that are gone.
    departed: Departed,
}

impl Leading {
    /// Whether what has changed is a reason for a round. While rounds fail again and again, only gateways that came, died or proved
    /// themselves are: anything else waits for the retry.
    fn is_news(&self, inputs: &Inputs) -> bool {
        match &self.seen {
            Some(seen) if self.failures > 0 => seen.gateways != inputs.gateways,
            seen => seen.as_ref() != Some(inputs),
        }
    }

    /// Takes in how a round ended; `due` is when the next one is due if all is well.
    fn take_in(&mut self, applied: &Applied, inputs: Inputs, known: Known, due: Duration, now: Duration) {
        let failed = !applied.errors.is_empty();
        self.failures = if failed { self.failures + 1 } else { 0 };
        self.seen = (self.failures != 1).then_some(inputs);
        self.known = (!failed).then_some(known);
        let retry = failed.then(|| now + retry(self.failures));
        let numbers = applied.outdated.then(|| self.numbers.max(now + NUMBERS_WITHIN));
        self.due = [retry, numbers, self.unwritten.next()].into_iter().flatten().fold(due, Duration::min);
    }
}

/// What a plan depends on, in a form that is cheap to compare.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Inputs {
    revisions: Revisions,
    problems: Vec<StoreProblem>,
    gateways: Vec<Judgement>,
}

impl Controller {
    fn new(store: Store, config: ControllerConfig, lease: Key, report: watch::Sender<ControllerReport>) -> Self {
        let sight = Sight::new(config.gateways);
        Controller { store, config, lease, report, start: Instant::now(), sight, leading: None }
    }

    /// Reads what changed, plans and writes if this controller leads and has to, and returns when to wake it again.
    async fn wake(&mut self, epoch: Option<u64>) -> Instant {
        // Gateways are watched while standing by, too, so that a new leader knows at once which are dead.
        self.sight.observe(self.store.list::<Lease>(), self.store.heard::<Lease>(), self.start.elapsed());
        match epoch {
            None => self.leading = None,
            Some(epoch) if self.leading.as_ref().is_none_or(|leading| leading.epoch != epoch) => {
                tracing::info!(identity = %self.config.identity, epoch, "this controller is now the leader");
                // The previous leader's last writes must be known before anything is assigned.
                self.store.refresh().await;
                let store = self.store.guarded(self.lease.clone(), epoch);
                self.leading = Some(Leading {
                    epoch,
                    store,
                    seen: None,
                    known: None,
                    failures: 0,
                    due: Duration::ZERO,
                    numbers: Duration::ZERO,
                    unwritten: Unwritten::default(),
                    delays: BTreeSet::new(),
                    told: None,
                    refused: BTreeMap::new(),
                    doubts: Vec::new(),
                    departed: Departed::default(),
                });
            }
            Some(_) => {}
        }
        self.report.send_if_modified(|report| {
            if epoch.is_none() {
                (report.unwritten, report.endpoints) = (0, BTreeMap::new());
            }
            std::mem::replace(&mut report.epoch, epoch) != epoch
        });
        let now = self.start.elapsed();
        let health = self.sight.gateways.health(now);
        let soon = now + Duration::from_millis(1);
        let Some(mut leading) = self.leading.take() else {
            let next = self.sight.gateways.next_deadline(&BTreeSet::new(), now).unwrap_or(now + RESYNC);
            return self.start + next.max(soon);
        };
        // Taken before the objects are read: what changes while the plan is made is a reason for another round.
        let inputs = self.inputs(&health, &leading.delays);
        let due = now >= leading.due;
        if due || leading.is_news(&inputs) && !self.partial_round(&mut leading, &health, &inputs).await {
            self.round(&mut leading, &health, inputs).await;
        }
        let next = self.sight.gateways.next_deadline(&leading.delays, now).unwrap_or(leading.due).min(leading.due);
        self.leading = Some(leading);
        self.start + next.max(soon)
    }

    fn inputs(&self, health: &Health, delays: &BTreeSet<Duration>) -> Inputs {
        let store = &self.store;
        Inputs { revisions: Revisions::of(store), problems: store.problems(), gateways: judged(health, delays) }
    }

    /// Takes in what changed since the last round, if it is little. Returns whether it was.
    async fn partial_round(&mut self, leading: &mut Leading, health: &Health, inputs: &Inputs) -> bool {
        let (Some(seen), Some(known), Some(plan)) = (&leading.seen, leading.known.take(), &mut leading.told) else {
            return false;
        };
        if (&seen.problems, &seen.gateways) != (&inputs.problems, &inputs.gateways) {
            return false;
        }
        let started = Instant::now();
        let time = Time(Timestamp::now());
        let Some((known, wanted)) = known.take_in(&self.store, &seen.revisions, health, plan, &time) else {
            return false;
        };
        let planning = started.elapsed();
        let waiting = leading.unwritten.waiting(self.start.elapsed());
        let applied = apply_part(&leading.store, wanted, Scope { which: Differences::News, waiting: &waiting }).await;
        // Owners and the states of conditions have not changed: there is nothing to report to users.
        let now = self.start.elapsed();
        leading.unwritten.failed(&applied.minor, now);
        self.report(leading, &applied, planning, true);
        leading.take_in(&applied, inputs.clone(), known, leading.due, now);
        true
    }

    /// Plans for everything and writes.
    async fn round(&mut self, leading: &mut Leading, health: &Health, mut inputs: Inputs) {
        leading.known = None;
        let objects = objects(&self.store);
        let started = Instant::now();
        let (mut snapshot, problems) = snapshot(&objects);
        leading.departed.add_to(&mut snapshot.policies, self.start.elapsed());
        let (time, drain_timeout) = (Time(Timestamp::now()), self.config.drain_timeout);
        snapshot.max_egress_ips = self.config.max_egress_ips;
        snapshot.drain_timeout = drain_timeout;
        snapshot.drained = drains::over(&objects.egress_ips, drain_timeout, time.0);
        let before = previous(&objects);
        let (after, memo) = plan_and_remember(snapshot, health, &before);
        let mut wanted = desired(&objects, memo.snapshot(), &after, &problems, &time);
        remarks::add(&mut wanted, &objects, &self.store.problems(), &time);
        let refused = refusals(&problems);
        let doubts = problems.iter().filter_map(Event::of_node).collect();
        let known = Known::new(memo, problems, &wanted);
        let drained = drains::next(wanted.egress_ips.values(), drain_timeout, time.0);
        let is_there = |node: &NodeName| wanted.egress_nodes.contains_key(node.as_str());
        let leases = left_over(self.store.list::<Lease>(), is_there, health);
        let planning = started.elapsed();
        let now = self.start.elapsed();
        let which = if now < leading.numbers { Differences::News } else { Differences::All };
        let waiting = leading.unwritten.waiting(now);
        let applied = apply(&leading.store, wanted, Scope { which, waiting: &waiting }, leases).await;
        let now = self.start.elapsed();
        leading.unwritten.tried(&waiting, &applied.minor);
        leading.unwritten.failed(&applied.minor, now);
        if which == Differences::All {
            leading.numbers = now + rest(applied.numbers);
        }
        self.report_round(leading, before, after, (refused, doubts), &applied);
        self.report(leading, &applied, planning, false);
        self.observe_nodes(known.memo.snapshot(), &objects, now);
        leading.delays = delays(known.memo.snapshot());
        inputs.gateways = self.inputs(health, &leading.delays).gateways;
        let drained = drained.map(|left| now + left);
        let due = leading.departed.next_deadline().into_iter().chain(drained).fold(now + RESYNC, Duration::min);
        leading.take_in(&applied, inputs, known, due, now);
    }

    fn observe_nodes(&mut self, snapshot: &Snapshot, objects: &ApiObjects, now: Duration) {
        let present = snapshot.nodes.keys().cloned().collect();
        let names = objects.egress_nodes.iter().filter_map(|node| node.metadata.name.as_deref());
        let holders: Vec<NodeName> = names.map(NodeName::from).collect();
        self.sight.gateways.observe_nodes(&present, &holders, now);
    }

    /// Reports the outcome of a round to users.
    fn report_round(
        &self,
        leading: &mut Leading,
        before: Plan,
        after: Plan,
        (refused, doubts): (BTreeMap<PolicyId, String>, Vec<Event>),
        applied: &Applied,
    ) {
        if applied.errors.is_empty() {
            // Objects do not record outcomes: a leader that just took over has none to report. What a failed round did
            // in part is reported with the next one that succeeds.
            let last = leading.told.take().unwrap_or_else(|| Plan { outcomes: after.outcomes.clone(), ..before });
            let changes = diff(&last, &after);
            let is_new = |(policy, why): &(&PolicyId, &String)| leading.refused.get(*policy) != Some(*why);
            let refusals = refused.iter().filter(is_new).map(|(policy, why)| Event::refused(policy, why));
            let new_doubts = doubts.iter().filter(|doubt| !leading.doubts.contains(doubt)).cloned();
            for event in changes.iter().filter_map(Event::of).chain(refusals).chain(new_doubts) {
                if event.warning {
                    tracing::warn!(object = %event.object, reason = event.reason, "{}", event.message);
                } else {
                    tracing::info!(object = %event.object, reason = event.reason, "{}", event.message);
                }
                self.store.note(event.note());
            }
            (leading.told, leading.refused, leading.doubts) = (Some(after), refused, doubts);
        }
    }

    /// Reports the outcome of a round to programs, and its errors to everybody.
    fn report(&self, leading: &Leading, applied: &Applied, planning: Duration, partial: bool) {
        for error in &applied.errors {
            if error.is_conflict() || applied.is_fenced() {
                tracing::debug!(%error, "the round is retried");
            } else {
                tracing::warn!(%error, "the round is retried");
            }
        }
        self.report.send_modify(|report| {
            report.rounds += 1;
            report.partial += u64::from(partial);
            report.writes += applied.writes;
            report.planning = planning;
            report.error = applied.errors.first().map(ToString::to_string);
            report.unwritten = leading.unwritten.count();
            let outcomes = leading.told.iter().flat_map(|plan| &plan.outcomes);
            report.endpoints = outcomes.map(|(policy, outcome)| (policy.clone(), outcome.endpoints)).collect();
        });
    }
}
