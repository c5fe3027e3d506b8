//! The controller's loop.

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

/// The delay before a failed round is retried.
const RETRY: Duration = Duration::from_millis(100);
/// The longest such delay, after many consecutive failures.
const RETRY_AT_MOST: Duration = Duration::from_secs(5);
/// The delay of numbers of pods after a round that left them out, if few objects have new ones.
const NUMBERS_WITHIN: Duration = Duration::from_secs(5);
/// The pause after each write that changed only numbers. It allows one such write a second on average, however many policies and pods there
/// are, because each is sent to every agent.
const PER_NUMBER: Duration = Duration::from_secs(1);
/// How long a round may still take when the controller stops: the timeout of a write.
const LAST_ROUND: Duration = Duration::from_secs(5);
/// The interval of rounds that nothing requires.
const RESYNC: Duration = Duration::from_secs(60);

/// Returns the delay before the retry after this many consecutive failed rounds.
pub fn retry(failures: u32) -> Duration {
    pause(RETRY, RETRY_AT_MOST, failures)
}

/// Returns how long no numbers of pods are written after this many writes that changed only numbers.
pub(super) fn rest(written: u64) -> Duration {
    PER_NUMBER.saturating_mul(u32::try_from(written).unwrap_or(u32::MAX)).max(NUMBERS_WITHIN)
}

/// Returns all objects that a plan is made from.
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

/// Runs a controller on a store until `stop` is ready, then releases its leadership. `report` always has the controller's current state.
///
/// A round that then takes too long is cut off. Its writes may still arrive, so the leadership is not released but lapses: the next leader
/// must see these writes before it plans.
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
        let next = {
            let mut wake = pin!(controller.wake(keeper.held()));
            tokio::select! {
                next = &mut wake => next,
                () = &mut stop => match tokio::time::timeout(LAST_ROUND, wake).await {
                    Ok(_) => break,
                    Err(_) => return,
                },
            }
        };
        tokio::select! {
            () = changes.next() => {}
            () = keeper.changed() => {}
            () = tokio::time::sleep_until(next.into()) => {}
            () = &mut stop => break,
        }
    }
    keeper.release().await;
}

/// The state that is kept between rounds. All of it can be rebuilt from the store.
struct Controller {
    store: Store,
    config: ControllerConfig,
    lease: Key,
    report: watch::Sender<ControllerReport>,
    start: Instant,
    sight: Sight,
    leading: Option<Leading>,
}

/// The state that is kept while this controller leads.
struct Leading {
    epoch: u64,
    store: Store,
    /// The inputs of the last round. `None` before the first round, and after the first of consecutive failures. That failure is retried at
    /// the next change, because a conflict is always followed by one.
    seen: Option<Inputs>,
    /// The state after the last round, if it succeeded. Its plan is `told`.
    known: Option<Known>,
    /// The number of consecutive failed rounds.
    failures: u32,
    /// The time of the next round if nothing changes.
    due: Duration,
    /// The time at which numbers of pods may be written again.
    numbers: Duration,
    /// The failed writes that do not fail a round.
    unwritten: Unwritten,
    /// The delays after which egress IPs may return to their preferred gateways.
    delays: BTreeSet<Duration>,
    /// The last plan that was reported to users.
    told: Option<Plan>,
    /// The policies that could not be carried out in that plan, with the reasons.
    refused: BTreeMap<PolicyId, String>,
    /// The problems in nodes' objects at that plan.
    doubts: Vec<Event>,
    /// The policies that are gone.
    departed: Departed,
}

impl Leading {
    /// Returns whether the changes require a round. After repeated failures, only gateways that appeared, died or proved themselves do; all
    /// other changes wait for the retry.
    fn is_news(&self, inputs: &Inputs) -> bool {
        match &self.seen {
            Some(seen) if self.failures > 0 => seen.gateways != inputs.gateways,
            seen => seen.as_ref() != Some(inputs),
        }
    }

    /// Records the result of a round. `due` is the time of the next round if there are no errors.
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

/// The inputs of a plan, in a form that is cheap to compare.
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

    /// Observes the gateways. Plans and writes if this controller leads and a round is due. Returns the time of the next wake-up.
    async fn wake(&mut self, epoch: Option<u64>) -> Instant {
        // A standby also observes the gateways, so that a new leader knows immediately which of them are dead.
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
        // Taken before the objects are read, so that changes during planning cause another round.
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

    /// Processes the changes since the last round if they are small. Returns whether they were.
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
        // Owners and the states of conditions have not changed, so there is nothing to report to users.
        let now = self.start.elapsed();
        leading.unwritten.failed(&applied.minor, now);
        self.report(leading, &applied, planning, true);
        leading.take_in(&applied, inputs.clone(), known, leading.due, now);
        true
    }

    /// Reads all objects, makes a plan and writes it.
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
            // Objects do not record outcomes, so a new leader has no previous ones to compare with. Changes of a failed
            // round are reported with the next successful one.
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

    /// Publishes the outcome of a round for metrics and health checks, and logs its errors.
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
