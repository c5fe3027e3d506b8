//! Connections that pods opened before a policy selected them.

use crate::{
    encode::EndpointView,
    model::{EndpointId, PolicyId, Snapshot},
};
use std::collections::{BTreeMap, BTreeSet};

/// How long each pod may send on TCP connections from before a policy selected it.
///
/// A pod that was already selected when this node first saw it has no such connections. A pod that was seen with an address while
/// unselected, or that existed before the first agent, may have some. Those that it sends on are recorded; a connection that has been
/// silent for as long as an established connection may be is over.
#[derive(Default)]
pub struct Histories {
    known: BTreeMap<EndpointId, History>,
    past_first: bool,
}

/// The connections that a pod may have from before a policy selected it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum History {
    /// Nothing.
    None,
    /// No policy has selected it yet.
    Unselected,
    /// Connections that may be silent until this tick.
    Until(u32),
}

impl Histories {
    /// Restores what an earlier agent knew.
    pub fn recover(endpoints: &BTreeMap<EndpointId, EndpointView>) -> Self {
        let history = |pod: &EndpointView| match pod.history_until {
            _ if pod.class.is_empty() => History::Unselected,
            0 => History::None,
            until => History::Until(until),
        };
        let known: BTreeMap<_, _> = endpoints.iter().map(|(id, pod)| (id.clone(), history(pod))).collect();
        Self { past_first: !known.is_empty(), known }
    }

    /// Updates the state from the current pods. A connection that is silent from now on is over at the tick `until`.
    pub fn update(&mut self, snapshot: &Snapshot, classes: &BTreeMap<EndpointId, BTreeSet<PolicyId>>, until: u32) {
        self.known.retain(|id, _| classes.contains_key(id));
        for (id, class) in classes {
            let has_address = snapshot.endpoints.get(id).is_some_and(|e| !e.ips.is_empty());
            let first = if !self.past_first && has_address { History::Unselected } else { History::None };
            let history = self.known.entry(id.clone()).or_insert(first);
            if class.is_empty() {
                *history = if has_address { History::Unselected } else { *history };
            } else if *history == History::Unselected {
                *history = History::Until(until);
            }
        }
        self.past_first = true;
    }

    /// Returns the tick from which on a pod has no older connections; 0 for a pod that no policy selects or that never had any.
    pub fn until(&self, pod: &EndpointId) -> u32 {
        match self.known.get(pod) {
            Some(History::Until(tick)) => *tick,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Endpoint, PolicyKind};
    use std::net::IpAddr;

    fn id(name: &str) -> EndpointId {
        EndpointId::new("default", name, name)
    }

    /// Returns one pod with an address, and the policies that select it.
    fn pod(name: &str, policies: &[&str]) -> (Snapshot, BTreeMap<EndpointId, BTreeSet<PolicyId>>) {
        let ips = [IpAddr::from([10, 0, 0, 7])].into();
        let endpoint = Endpoint { id: id(name), node: "me".into(), ips, labels: Default::default() };
        let snapshot = Snapshot { endpoints: [(id(name), endpoint)].into(), ..Snapshot::default() };
        let class = policies.iter().map(|policy| PolicyId::new(PolicyKind::Native, policy)).collect();
        (snapshot, [(id(name), class)].into())
    }

    /// Returns the histories that another agent recovers from the maps.
    fn written(histories: &Histories, classes: &BTreeMap<EndpointId, BTreeSet<PolicyId>>) -> Histories {
        let view = |(pod, class): (&EndpointId, &BTreeSet<PolicyId>)| {
            let history_until = histories.until(pod);
            (pod.clone(), EndpointView { class: class.clone(), history_until, ..EndpointView::default() })
        };
        Histories::recover(&classes.iter().map(view).collect())
    }

    #[test]
    fn history_ends_at_the_tick_that_was_set_when_a_policy_first_selected_the_pod() {
        let (mut histories, web) = (Histories::default(), id("web"));
        for (policies, now, until) in [
            (&[][..], 100, 0),
            (&["one"], 200, 200),
            (&["one"], 300, 200),
            (&["one", "two"], 400, 200),
            (&["two"], 500, 200),
            // The pod has opened connections since.
            (&[], 600, 0),
            (&["two"], 700, 700),
        ] {
            let (snapshot, classes) = pod("web", policies);
            histories.update(&snapshot, &classes, now);
            assert_eq!(histories.until(&web), until, "{policies:?} at {now}");
            // The agent restarts after each step.
            histories = written(&histories, &classes);
            histories.update(&snapshot, &classes, now + 50);
            assert_eq!(histories.until(&web), until, "{policies:?} at {now}, by another agent");
        }
        // A pod selected from its start.
        let (snapshot, classes) = pod("new", &["one"]);
        histories.update(&snapshot, &classes, 800);
        assert_eq!(written(&histories, &classes).until(&id("new")), 0);
        // A pod that existed before the first agent.
        let mut first = Histories::default();
        first.update(&snapshot, &classes, 900);
        assert_eq!(first.until(&id("new")), 900);
    }
}
