//! Counts which policies select which endpoints, so that the effect of a single endpoint is found directly.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Distribution, Endpoint, EndpointId, EndpointSelector, NodeName, PolicyId, Requirement, Snapshot};
use crate::plan::select::{NO_LABELS, Selection};

/// The counts of a snapshot.
#[derive(Debug)]
pub struct Index {
    /// The nodes of the snapshot, ascending.
    names: Vec<NodeName>,
    /// The policies of the snapshot, ascending.
    policies: Vec<Selected>,
    /// Policies by a pod label that one of their selectors requires.
    by_label: BTreeMap<String, BTreeMap<String, Vec<u32>>>,
    /// Policies with a selector that requires no value of a pod label.
    by_none: Vec<u32>,
    /// How many endpoints are selected by exactly these policies.
    classes: BTreeMap<Vec<u32>, u32>,
}

/// The endpoints of a policy.
#[derive(Debug)]
struct Selected {
    id: PolicyId,
    count: usize,
    /// How many run on each source node that has an object.
    sources: BTreeMap<u32, u32>,
    /// Each of them and its node, if that matters (`PerEndpoint`).
    members: Option<BTreeMap<EndpointId, NodeName>>,
}

/// What changes while pods are updated.
#[derive(Debug, Default)]
pub struct News {
    /// Policies with more or fewer endpoints than before.
    pub policies: BTreeSet<u32>,
    /// Policies for which a node has another version than before.
    pub programmed: BTreeSet<u32>,
    /// The nodes of such endpoints, if policies have members.
    pub nodes: BTreeSet<NodeName>,
    /// How many endpoints a policy had on a node before.
    sources: BTreeMap<(u32, u32), u32>,
    /// How many endpoints a class had before.
    classes: BTreeMap<Vec<u32>, u32>,
}

impl Index {
    /// Counts a snapshot.
    pub fn new(snapshot: &Snapshot, selection: &Selection<'_>) -> Self {
        let selected = |policy: &crate::model::Policy| Selected {
            id: policy.id.clone(),
            count: selection.count(&policy.id),
            sources: selection.on_nodes(&policy.id),
            members: (policy.distribution == Distribution::PerEndpoint).then(|| {
                let members = selection.endpoints(&policy.id).into_iter();
                members.map(|(id, endpoint)| (id.clone(), endpoint.node.clone())).collect()
            }),
        };
        let mut index = Self {
            names: snapshot.nodes.keys().cloned().collect(),
            policies: snapshot.policies.values().map(selected).collect(),
            by_label: BTreeMap::new(),
            by_none: Vec::new(),
            classes: BTreeMap::new(),
        };
        let classes = selection.classes().into_iter();
        let number = |policy: &PolicyId| index.number(policy);
        index.classes = classes.map(|(class, count)| (class.into_iter().filter_map(number).collect(), count)).collect();
        for (policy, number) in snapshot.policies.values().zip(0..) {
            policy.selectors.iter().for_each(|selector| index.file(selector, number));
        }
        index
    }

    fn file(&mut self, selector: &EndpointSelector, policy: u32) {
        let mut requirements = selector.pod.iter().flat_map(|pod| pod.requirements());
        let values = requirements.find_map(|(key, requirement)| match requirement {
            Requirement::In(values) => Some((key, values)),
            _ => None,
        });
        let Some((key, values)) = values else { return self.by_none.push(policy) };
        let of_key = self.by_label.entry(key.to_owned()).or_default();
        values.iter().for_each(|value| of_key.entry(value.clone()).or_default().push(policy));
    }

    /// Returns a policy by its number.
    pub fn id(&self, policy: u32) -> &PolicyId {
        &self.policies[policy as usize].id
    }

    /// Returns the number of a policy.
    pub fn number(&self, policy: &PolicyId) -> Option<u32> {
        self.policies.binary_search_by(|selected| selected.id.cmp(policy)).ok().map(|number| number as u32)
    }

    /// Returns a node by its place in the snapshot.
    pub fn name(&self, place: u32) -> &NodeName {
        &self.names[place as usize]
    }

    /// Returns the place of a node in the snapshot.
    pub fn place(&self, node: &NodeName) -> Option<u32> {
        self.names.binary_search(node).ok().map(|place| place as u32)
    }

    /// Returns the source nodes of a policy, ascending.
    pub fn sources(&self, policy: u32) -> impl Iterator<Item = u32> {
        self.policies[policy as usize].sources.keys().copied()
    }

    /// Returns how many endpoints a policy selects.
    pub fn endpoints(&self, policy: u32) -> usize {
        self.policies[policy as usize].count
    }

    /// Returns the endpoints of a policy with their nodes, if it is `PerEndpoint`.
    pub fn members(&self, policy: u32) -> Option<&BTreeMap<EndpointId, NodeName>> {
        self.policies[policy as usize].members.as_ref()
    }

    /// Returns the policies that have become, or ceased to be, policies of some node.
    pub fn resourced(&self, news: &News) -> impl Iterator<Item = u32> {
        let now = |policy: u32, node: u32| self.policies[policy as usize].sources.contains_key(&node);
        let differing =
            news.sources.iter().filter(move |((policy, node), before)| (**before > 0) != now(*policy, *node));
        differing.map(|((policy, _), _)| *policy)
    }

    /// Returns the sets of policies that have begun, or ceased, to select some endpoint together.
    pub fn reshaped<'n>(&self, news: &'n News) -> impl Iterator<Item = &'n [u32]> {
        let differs = |(class, before): &(&Vec<u32>, &u32)| (**before > 0) != self.classes.contains_key(*class);
        news.classes.iter().filter(differs).map(|(class, _)| class.as_slice())
    }

    /// Updates a pod to its present state.
    pub fn pod(&mut self, snapshot: &mut Snapshot, id: EndpointId, now: Option<Endpoint>, news: &mut News) {
        let old = match now {
            Some(endpoint) => snapshot.endpoints.insert(id.clone(), endpoint),
            None => snapshot.endpoints.remove(&id),
        };
        let new = snapshot.endpoints.get(&id);
        let class = |endpoint: &Endpoint| self.class(snapshot, endpoint);
        let (left, joined) = (old.as_ref().map(class), new.map(class));
        if left == joined && old.as_ref().map(|old| &old.node) == new.map(|new| &new.node) {
            return;
        }
        if let (Some(old), Some(class)) = (&old, left) {
            self.count(old, class, false, news);
        }
        if let (Some(new), Some(class)) = (new, joined) {
            self.count(new, class, true, news);
        }
    }

    /// Returns the policies that select an endpoint, ascending.
    fn class(&self, snapshot: &Snapshot, endpoint: &Endpoint) -> Vec<u32> {
        let namespace = snapshot.namespaces.get(&endpoint.id.namespace).unwrap_or(&NO_LABELS);
        let node = snapshot.nodes.get(&endpoint.node).map_or(&NO_LABELS, |node| &node.labels);
        let labelled = endpoint.labels.iter().filter_map(|(key, value)| self.by_label.get(key)?.get(value)).flatten();
        let mut class: Vec<u32> = labelled.chain(&self.by_none).copied().collect();
        class.sort_unstable();
        class.dedup();
        class.retain(|policy| snapshot.policies[self.id(*policy)].selects(&endpoint.labels, namespace, node));
        class
    }

    /// Counts an endpoint in or out.
    fn count(&mut self, endpoint: &Endpoint, class: Vec<u32>, joins: bool, news: &mut News) {
        let place = self.place(&endpoint.node);
        for policy in &class {
            let selected = &mut self.policies[*policy as usize];
            selected.count = if joins { selected.count + 1 } else { selected.count.saturating_sub(1) };
            if let Some(place) = place {
                let before = change(&mut selected.sources, place, joins);
                news.sources.entry((*policy, place)).or_insert(before);
            }
            if let Some(members) = &mut selected.members {
                match joins {
                    true => members.insert(endpoint.id.clone(), endpoint.node.clone()),
                    false => members.remove(&endpoint.id),
                };
                news.nodes.insert(endpoint.node.clone());
            }
            news.policies.insert(*policy);
        }
        if !class.is_empty() {
            let before = change(&mut self.classes, class.clone(), joins);
            news.classes.entry(class).or_insert(before);
        }
    }
}

/// Counts one more or one less of something. Returns how many there were before.
fn change<K: Ord + Clone>(counts: &mut BTreeMap<K, u32>, key: K, more: bool) -> u32 {
    let before = counts.get(&key).copied().unwrap_or(0);
    match if more { before + 1 } else { before.saturating_sub(1) } {
        0 => counts.remove(&key),
        count => counts.insert(key, count),
    };
    before
}
