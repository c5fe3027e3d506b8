//! Finds what a change of objects would do: the cluster before and after it, each with its plan, and the live flows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::diff::{Change, diff, join};
use super::types::{ConditionKind, Plan};
use super::{classes, plan, select::Selection};
use crate::health::{Health, LeaseState, NodeHealth};
use crate::model::{EndpointId, Family, NodeName, PolicyId, Snapshot};

/// Enough rounds of planning for gateways that were never used before: one round asks them, the next uses them.
const ROUNDS: usize = 8;
/// How long a gateway that takes its lease when asked is assumed to have been healthy.
const LONG: std::time::Duration = std::time::Duration::from_secs(24 * 3600);

/// A cluster with its plan.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// Its objects.
    pub snapshot: &'a Snapshot,
    /// The plan for them.
    pub plan: &'a Plan,
}

/// A live flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveFlow {
    /// Its pod.
    pub pod: EndpointId,
    /// The remote address.
    pub remote: IpAddr,
    /// Whether it is TCP: a connection cannot change its address.
    pub tcp: bool,
    /// Its egress IP.
    pub egress: IpAddr,
}

/// What happens to a flow that does not continue unchanged.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// It continues, through another gateway.
    Moves {
        /// the gateway now
        from: Option<NodeName>,
        /// the gateway then
        to: NodeName,
    },
    /// Its next packet starts a new flow, under this policy or none.
    Restarts(Option<PolicyId>),
    /// The connection is severed: to continue, it would have to show the other end another address.
    Breaks,
    /// Its packets are dropped, for lack of a gateway.
    Dropped,
}

/// How a policy changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyChangeKind {
    /// It is new.
    Added,
    /// It is gone.
    Removed,
    /// Its specification, its pods or its egress IPs differ.
    Changed,
}

/// A policy that changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyChange {
    /// The policy.
    pub policy: PolicyId,
    /// How it changes.
    pub kind: PolicyChangeKind,
    /// How many pods it selects, before and after.
    pub pods: (usize, usize),
    /// Egress IPs that it gets.
    pub gained: BTreeSet<IpAddr>,
    /// Egress IPs that it loses.
    pub lost: BTreeSet<IpAddr>,
}

/// A destination that is steered by other policies than before, for some pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steering {
    /// The pods, sorted.
    pub pods: Vec<EndpointId>,
    /// The destination.
    pub destination: IpNet,
    /// The parts of the destination to which this does not apply.
    pub but: BTreeSet<IpNet>,
    /// The policy before; none if the packets were left alone.
    pub from: Option<PolicyId>,
    /// The policy after.
    pub to: Option<PolicyId>,
}

/// A policy over which another one takes precedence, and did not before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The policy that comes second.
    pub policy: PolicyId,
    /// The one that comes first.
    pub winner: PolicyId,
    /// On these destinations.
    pub destinations: BTreeSet<IpNet>,
}

/// The consequences of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preview {
    /// Policies.
    pub policies: Vec<PolicyChange>,
    /// Pods.
    pub steering: Vec<Steering>,
    /// Egress IPs, assignments and conditions.
    pub changes: Vec<Change>,
    /// New conflicts.
    pub conflicts: Vec<Conflict>,
    /// The flows that do not continue unchanged, by their place among the flows in question.
    pub flows: Vec<(usize, Fate)>,
}

impl Preview {
    /// Returns whether nothing would change.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Returns the plan that a cluster settles on: gateways that a plan asks for the first time are assumed to answer.
pub fn settled(snapshot: &Snapshot, health: &Health, previous: &Plan) -> Plan {
    let (mut health, mut last) = (health.clone(), plan(snapshot, health, previous));
    for _ in 0..ROUNDS {
        let named = last.egress_ips.values().flat_map(|planned| &planned.carriers);
        let asked: BTreeSet<NodeName> = named.filter(|node| health.of(node).is_unasked()).cloned().collect();
        let answers = LeaseState::Fresh { since: LONG, returned: false, proven: true };
        health.nodes.extend(asked.into_iter().map(|node| (node, NodeHealth { lease: answers, gone: false })));
        let next = plan(snapshot, &health, &last);
        if next == last {
            break;
        }
        last = next;
    }
    last
}

/// Compares two clusters, and returns what happens to the flows of the first.
pub fn preview(before: Side<'_>, after: Side<'_>, flows: &[LiveFlow]) -> Preview {
    let selections = (Selection::new(before.snapshot), Selection::new(after.snapshot));
    let classes = (of_endpoints(before.snapshot, &selections.0), of_endpoints(after.snapshot, &selections.1));
    let changes = diff(before.plan, after.plan).into_iter().filter(is_shown).collect();
    Preview {
        policies: policies(before, after, (&selections.0, &selections.1)),
        steering: steering(before.snapshot, after.snapshot, &classes.0, &classes.1),
        changes,
        conflicts: conflicts(before.plan, after.plan),
        flows: fates(before, after, &classes.1, flows),
    }
}

/// Returns whether a change is shown. Blocks come and go all the time, and conflicts have their own list.
fn is_shown(change: &Change) -> bool {
    !matches!(
        change,
        Change::Leased { .. }
            | Change::Returned { .. }
            | Change::Unserved { .. }
            | Change::Condition { kind: ConditionKind::Conflicting, .. }
    )
}

fn slots(plan: &Plan, policy: &PolicyId) -> BTreeSet<IpAddr> {
    plan.outcomes.get(policy).into_iter().flat_map(|outcome| outcome.slots.iter().map(|slot| slot.address)).collect()
}

fn policies(before: Side<'_>, after: Side<'_>, selections: (&Selection<'_>, &Selection<'_>)) -> Vec<PolicyChange> {
    let compare = |(id, (old, new)): (&PolicyId, (Option<&_>, Option<&_>))| {
        let (had, has) = (slots(before.plan, id), slots(after.plan, id));
        let pods = (selections.0.count(id), selections.1.count(id));
        let kind = match (old, new) {
            (None, _) => PolicyChangeKind::Added,
            (_, None) => PolicyChangeKind::Removed,
            _ if old != new || had != has || pods.0 != pods.1 => PolicyChangeKind::Changed,
            _ => return None,
        };
        let (gained, lost) = (&has - &had, &had - &has);
        Some(PolicyChange { policy: id.clone(), kind, pods, gained, lost })
    };
    join(&before.snapshot.policies, &after.snapshot.policies).filter_map(compare).collect()
}

/// The policies that select an endpoint, ascending.
type Class<'a> = Vec<&'a PolicyId>;

fn of_endpoints<'a>(snapshot: &'a Snapshot, selection: &Selection<'a>) -> BTreeMap<&'a EndpointId, Class<'a>> {
    let mut classes: BTreeMap<&EndpointId, Class<'_>> = BTreeMap::new();
    for id in snapshot.policies.keys() {
        for endpoint in selection.endpoints(id).into_keys() {
            classes.entry(endpoint).or_default().push(id);
        }
    }
    classes
}

/// Returns the policy that a table gives for a destination, or for all of a prefix that no entry divides.
fn steers(table: &Table, destination: IpNet) -> Option<&PolicyId> {
    let covering = table.iter().filter(|(net, _)| net.contains(&destination));
    covering.max_by_key(|(net, _)| net.prefix_len()).and_then(|(_, policy)| policy.as_ref())
}

fn steering<'a>(
    before: &Snapshot,
    after: &Snapshot,
    had: &BTreeMap<&'a EndpointId, Class<'a>>,
    has: &BTreeMap<&'a EndpointId, Class<'a>>,
) -> Vec<Steering> {
    let nobody = Class::new();
    let mut together: BTreeMap<(&Class<'_>, &Class<'_>), Vec<EndpointId>> = BTreeMap::new();
    for (endpoint, (old, new)) in join(had, has) {
        let key = (old.unwrap_or(&nobody), new.unwrap_or(&nobody));
        together.entry(key).or_default().push((*endpoint).clone());
    }
    let mut all = Vec::new();
    for ((old, new), pods) in together {
        let old = classes::merge(&before.policies, old.iter().copied());
        let new = classes::merge(&after.policies, new.iter().copied());
        let differences = Tables::new(&old, &new).differences();
        all.extend(differences.into_iter().map(|part| Steering { pods: pods.clone(), ..part }));
    }
    all
}

/// Which policy steers which destination: the longest prefix that contains a destination decides.
type Table = [(IpNet, Option<PolicyId>)];

/// Two tables side by side.
struct Tables<'a> {
    /// All prefixes of both tables, with what each table says about them.
    said: BTreeMap<IpNet, (Option<&'a PolicyId>, Option<&'a PolicyId>)>,
}

impl<'a> Tables<'a> {
    fn new(old: &'a Table, new: &'a Table) -> Self {
        let nets = old.iter().chain(new).map(|(net, _)| *net);
        Self { said: nets.map(|net| (net, (steers(old, net), steers(new, net)))).collect() }
    }

    /// Returns where the tables differ; for no pods yet.
    fn differences(&self) -> Vec<Steering> {
        let differs = self.said.iter().filter(|(net, said)| said.0 != said.1 && **said != self.around(**net));
        differs
            .map(|(net, (from, to))| Steering {
                pods: Vec::new(),
                destination: *net,
                but: self.exceptions(*net),
                from: from.cloned(),
                to: to.cloned(),
            })
            .filter(|part| !part.but.contains(&part.destination))
            .collect()
    }

    /// Returns what the tables say about the next shorter prefix.
    fn around(&self, net: IpNet) -> (Option<&'a PolicyId>, Option<&'a PolicyId>) {
        let outer = self.said.iter().filter(|(outer, _)| **outer != net && outer.contains(&net));
        outer.max_by_key(|(outer, _)| outer.prefix_len()).map_or((None, None), |(_, said)| *said)
    }

    /// Returns the parts of a prefix about which the tables say something else, each once.
    fn exceptions(&self, net: IpNet) -> BTreeSet<IpNet> {
        let inner = self.said.iter().filter(|(inner, said)| net.contains(*inner) && **said != self.said[&net]);
        IpNet::aggregate(&inner.map(|(inner, _)| *inner).collect()).into_iter().collect()
    }
}

fn conflicts(before: &Plan, after: &Plan) -> Vec<Conflict> {
    let mut found = Vec::new();
    for (policy, outcome) in &after.outcomes {
        for (winner, nets) in &outcome.conflicts {
            let had = before.outcomes.get(policy).and_then(|old| old.conflicts.get(winner));
            let destinations: BTreeSet<IpNet> =
                nets.iter().filter(|net| had.is_none_or(|had| !had.contains(net))).copied().collect();
            if !destinations.is_empty() {
                found.push(Conflict { policy: policy.clone(), winner: winner.clone(), destinations });
            }
        }
    }
    found
}

fn fates(
    before: Side<'_>,
    after: Side<'_>,
    classes: &BTreeMap<&EndpointId, Class<'_>>,
    flows: &[LiveFlow],
) -> Vec<(usize, Fate)> {
    let mut tables: BTreeMap<&Class<'_>, Vec<(IpNet, Option<PolicyId>)>> = BTreeMap::new();
    let nobody = Class::new();
    let mut fates = Vec::new();
    for (place, flow) in flows.iter().enumerate() {
        let class = classes.get(&flow.pod).unwrap_or(&nobody);
        let merge = || classes::merge(&after.snapshot.policies, class.iter().copied());
        let table = tables.entry(class).or_insert_with(merge);
        let policy = steers(table, flow.remote.into());
        let drops = |policy: &PolicyId| is_without_gateway(after, policy, class, flow.remote);
        fates.extend(fate(before.plan, after, flow, policy, drops).map(|fate| (place, fate)));
    }
    fates
}

fn fate(
    before: &Plan,
    after: Side<'_>,
    flow: &LiveFlow,
    policy: Option<&PolicyId>,
    drops: impl Fn(&PolicyId) -> bool,
) -> Option<Fate> {
    let slot = after.plan.egress_ips.get(&flow.egress);
    let kept = slot.filter(|slot| policy.is_some_and(|policy| slot.users.contains_key(policy)));
    let from = before.egress_ips.get(&flow.egress).and_then(|slot| slot.owner.clone());
    match kept.map(|slot| &slot.owner) {
        Some(Some(to)) if from.as_ref() != Some(to) => Some(Fate::Moves { from, to: to.clone() }),
        Some(Some(_)) => None,
        // It had no gateway before either.
        Some(None) if from.is_none() => None,
        Some(None) => Some(Fate::Dropped),
        None if flow.tcp => Some(Fate::Breaks),
        None if policy.is_some_and(drops) => Some(Fate::Dropped),
        None => Some(Fate::Restarts(policy.cloned())),
    }
}

fn is_without_gateway(after: Side<'_>, policy: &PolicyId, class: &Class<'_>, remote: IpAddr) -> bool {
    let found = after.snapshot.policies.get(policy);
    let drops = found.is_some_and(|policy| !policy.leaves_as_node(class.iter().copied()));
    let slots = after.plan.outcomes.get(policy).into_iter().flat_map(|outcome| &outcome.slots);
    let mut usable = slots.filter(|slot| slot.owner.is_some() && Family::of(slot.address) == Family::of(remote));
    drops && usable.next().is_none()
}
