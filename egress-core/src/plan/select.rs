//! Determines which policies select which endpoints.
//!
//! Endpoints that no selector can distinguish form a group, so that the cost grows with groups and not with policies x endpoints.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::index::{LabelIndex, mentioned_keys};
use crate::model::{Endpoint, EndpointId, EndpointSelector, Labels, NodeName, Policy, PolicyId, Selector, Snapshot};

/// Endpoints that the same policies select.
#[derive(Debug)]
struct Group<'a> {
    namespace: u32,
    node_class: u32,
    labels: &'a Labels,
    members: Vec<&'a Endpoint>,
    /// The nodes of its members that have an object, ascending, as places in `Snapshot::nodes`, and how many run on each.
    nodes: Vec<(u32, u32)>,
}

/// Which policies select which endpoints.
#[derive(Debug)]
pub struct Selection<'a> {
    groups: Vec<Group<'a>>,
    by_policy: BTreeMap<&'a PolicyId, Vec<u32>>,
}

impl<'a> Selection<'a> {
    /// Applies all selectors of a snapshot.
    pub fn new(snapshot: &'a Snapshot) -> Self {
        let selectors: Vec<&EndpointSelector> = snapshot.policies.values().flat_map(|p| &p.selectors).collect();
        let nodes = NodeClasses::new(snapshot, &selectors);
        let namespaces = Namespaces::new(snapshot, &selectors);
        let groups = group(snapshot, &selectors, &nodes, &namespaces);

        let pod_keys = mentioned_keys(selectors.iter().filter_map(|s| s.pod.as_ref()));
        let index = LabelIndex::new(groups.iter().map(|g| g.labels), &pod_keys);
        let mut in_namespace: Vec<Vec<u32>> = vec![Vec::new(); namespaces.names.len()];
        for (at, group) in groups.iter().enumerate() {
            in_namespace[group.namespace as usize].push(at as u32);
        }
        let select = |selector: &EndpointSelector| -> Vec<u32> {
            let namespace = selector.namespace.as_ref().map(|s| &namespaces.matching[s]);
            let node = selector.node.as_ref().map(|s| nodes.bit[s]);
            let pod = selector.pod.as_ref().filter(|s| !s.is_everything());
            let within = namespace.map(|namespaces| namespaces.iter().map(|n| &in_namespace[*n as usize]));
            let size = within.clone().map(|lists| lists.map(Vec::len).sum::<usize>());
            let candidates: Vec<u32> = match (pod, within) {
                // A selector of one namespace does not examine the pods of all others, whatever it requires.
                (Some(pod), Some(lists)) if size < Some(index.reach(pod)) => {
                    lists.flatten().copied().filter(|at| pod.matches(groups[*at as usize].labels)).collect()
                }
                (Some(pod), _) => index.matching(pod),
                (None, Some(lists)) => lists.flatten().copied().collect(),
                (None, None) => (0..groups.len() as u32).collect(),
            };
            let holds = |at: &u32| {
                let group = &groups[*at as usize];
                namespace.is_none_or(|namespaces| namespaces.contains(&group.namespace))
                    && node.is_none_or(|bit| nodes.classes[group.node_class as usize].contains(&bit))
            };
            candidates.into_iter().filter(holds).collect()
        };
        let by_policy = snapshot
            .policies
            .values()
            .map(|policy| {
                let mut selected: Vec<u32> = policy.selectors.iter().flat_map(select).collect();
                selected.sort_unstable();
                selected.dedup();
                (&policy.id, selected)
            })
            .collect();
        Self { groups, by_policy }
    }

    fn groups_of(&self, policy: &PolicyId) -> impl Iterator<Item = &Group<'a>> {
        self.by_policy.get(policy).into_iter().flatten().map(|at| &self.groups[*at as usize])
    }

    /// Returns how many endpoints a policy selects.
    pub fn count(&self, policy: &PolicyId) -> usize {
        self.groups_of(policy).map(|group| group.members.len()).sum()
    }

    /// Returns the endpoints that a policy selects, sorted.
    pub fn endpoints(&self, policy: &PolicyId) -> BTreeMap<&'a EndpointId, &'a Endpoint> {
        self.groups_of(policy).flat_map(|group| group.members.iter().map(|e| (&e.id, *e))).collect()
    }

    /// Returns the nodes on which a policy's endpoints run, ascending, each as its place in `Snapshot::nodes`, of which there are `nodes`.
    /// Nodes without an object are left out.
    pub fn source_nodes(&self, policy: &PolicyId, nodes: usize) -> Vec<u32> {
        let mut seen = vec![false; nodes];
        for (node, _) in self.groups_of(policy).flat_map(|group| &group.nodes) {
            seen[*node as usize] = true;
        }
        (0..nodes as u32).filter(|node| seen[*node as usize]).collect()
    }

    /// Returns how many of a policy's endpoints run on each of its source nodes.
    pub fn on_nodes(&self, policy: &PolicyId) -> BTreeMap<u32, u32> {
        let mut groups = self.groups_of(policy);
        let mut counts: BTreeMap<u32, u32> =
            groups.next().into_iter().flat_map(|group| &group.nodes).copied().collect();
        for (node, count) in groups.flat_map(|group| &group.nodes) {
            *counts.entry(*node).or_default() += count;
        }
        counts
    }

    /// Returns the different sets of policies that select some endpoint together, and how many endpoints each selects.
    pub fn classes(&self) -> BTreeMap<Vec<&'a PolicyId>, u32> {
        let mut of_group: Vec<Vec<&'a PolicyId>> = vec![Vec::new(); self.groups.len()];
        for (policy, groups) in &self.by_policy {
            for at in groups {
                of_group[*at as usize].push(policy);
            }
        }
        let mut classes: BTreeMap<Vec<&'a PolicyId>, u32> = BTreeMap::new();
        for (policies, group) in of_group.into_iter().zip(&self.groups).filter(|(policies, _)| !policies.is_empty()) {
            *classes.entry(policies).or_default() += group.members.len() as u32;
        }
        classes
    }
}

/// Returns the policies that select one pod, for an agent that knows only its own node's pods.
pub fn selecting<'a>(
    policies: impl IntoIterator<Item = &'a Policy>,
    pod: &Labels,
    namespace: &Labels,
    node: &Labels,
) -> BTreeSet<PolicyId> {
    policies.into_iter().filter(|p| p.selects(pod, namespace, node)).map(|p| p.id.clone()).collect()
}

/// The labels of anything without an object.
pub static NO_LABELS: Labels = Labels::new();

/// Nodes by the set of node selectors that they match.
struct NodeClasses<'a> {
    bit: BTreeMap<&'a Selector, u32>,
    classes: Vec<BTreeSet<u32>>,
    /// The place in `Snapshot::nodes` and the class of each node.
    of_node: BTreeMap<&'a NodeName, (u32, u32)>,
    /// The class of pods on nodes without an object, which have no labels at all.
    unknown: u32,
}

impl<'a> NodeClasses<'a> {
    fn new(snapshot: &'a Snapshot, selectors: &[&'a EndpointSelector]) -> Self {
        let distinct: BTreeSet<&Selector> = selectors.iter().filter_map(|s| s.node.as_ref()).collect();
        let keys = mentioned_keys(distinct.iter().copied());
        let index = LabelIndex::new(snapshot.nodes.values().map(|n| &n.labels), &keys);
        let mut bits: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); snapshot.nodes.len()];
        let mut bit = BTreeMap::new();
        let mut unknown = BTreeSet::new();
        for (at, selector) in distinct.into_iter().enumerate() {
            for node in index.matching(selector) {
                bits[node as usize].insert(at as u32);
            }
            if selector.matches(&NO_LABELS) {
                unknown.insert(at as u32);
            }
            bit.insert(selector, at as u32);
        }
        let mut interned: BTreeMap<BTreeSet<u32>, u32> = BTreeMap::new();
        let mut intern = |class: BTreeSet<u32>| {
            let next = interned.len() as u32;
            *interned.entry(class).or_insert(next)
        };
        let numbered = snapshot.nodes.keys().zip(0..).zip(bits);
        let of_node = numbered.map(|((node, place), class)| (node, (place, intern(class)))).collect();
        let unknown = intern(unknown);
        let mut classes = vec![BTreeSet::new(); interned.len()];
        for (class, at) in interned {
            classes[at as usize] = class;
        }
        Self { bit, classes, of_node, unknown }
    }
}

/// Namespaces that have an object or a pod, and which of them each namespace selector matches.
struct Namespaces<'a> {
    names: BTreeMap<&'a str, u32>,
    matching: BTreeMap<&'a Selector, BTreeSet<u32>>,
}

impl<'a> Namespaces<'a> {
    fn new(snapshot: &'a Snapshot, selectors: &[&'a EndpointSelector]) -> Self {
        let mut names: BTreeSet<&Arc<str>> = snapshot.namespaces.keys().collect();
        let mut last: Option<&Arc<str>> = None;
        for id in snapshot.endpoints.keys() {
            if last != Some(&id.namespace) {
                names.insert(&id.namespace);
                last = Some(&id.namespace);
            }
        }
        let distinct: BTreeSet<&Selector> = selectors.iter().filter_map(|s| s.namespace.as_ref()).collect();
        let keys = mentioned_keys(distinct.iter().copied());
        let labels = names.iter().map(|name| snapshot.namespaces.get(*name).unwrap_or(&NO_LABELS));
        let index = LabelIndex::new(labels, &keys);
        let matching =
            distinct.into_iter().map(|selector| (selector, index.matching(selector).into_iter().collect())).collect();
        Self { names: names.into_iter().enumerate().map(|(at, name)| (&**name, at as u32)).collect(), matching }
    }
}

/// Namespace, class of the node, and the values of all labels that selectors mention.
type GroupKey<'a> = (u32, u32, Vec<(u32, &'a str)>);

fn group<'a>(
    snapshot: &'a Snapshot,
    selectors: &[&'a EndpointSelector],
    nodes: &NodeClasses<'a>,
    namespaces: &Namespaces<'a>,
) -> Vec<Group<'a>> {
    let keys = mentioned_keys(selectors.iter().filter_map(|s| s.pod.as_ref()));
    let numbers: BTreeMap<&str, u32> = keys.into_iter().zip(0..).collect();
    let mut places: BTreeMap<GroupKey<'a>, usize> = BTreeMap::new();
    let mut groups: Vec<Group<'a>> = Vec::new();
    for endpoint in snapshot.endpoints.values() {
        let namespace = namespaces.names[&*endpoint.id.namespace];
        let (node, node_class) = match nodes.of_node.get(&endpoint.node) {
            Some((place, class)) => (Some(*place), *class),
            None => (None, nodes.unknown),
        };
        let labels = endpoint.labels.iter();
        let seen = labels.filter_map(|(key, value)| Some((*numbers.get(key.as_str())?, value.as_str())));
        let place = *places.entry((namespace, node_class, seen.collect())).or_insert_with(|| {
            groups.push(Group {
                namespace,
                node_class,
                labels: &endpoint.labels,
                members: Vec::new(),
                nodes: Vec::new(),
            });
            groups.len() - 1
        });
        groups[place].members.push(endpoint);
        groups[place].nodes.extend(node.map(|node| (node, 1)));
    }
    for group in &mut groups {
        group.nodes.sort_unstable();
        group.nodes.dedup_by(|next, first| {
            let same = next.0 == first.0;
            first.1 += u32::from(same);
            same
        });
    }
    groups
}
