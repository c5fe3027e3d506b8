//! Decides when a new policy takes over destinations from another one. Pure.
//!
//! A policy is in force as soon as the agent reads it: traffic that only it matches is dropped until it has a slot. But if another policy
//! already serves the same destinations, that policy continues until the new one can serve them (add before delete), while the controller
//! finds addresses, owners and port blocks. A policy that was removed and recreated is a new policy.
//!
//! A policy is new to the agent, not to its pods: an old policy does not wait when the first of its pods comes to the node, because the
//! pod's packets would leave with another policy's egress IP. For the same reason, no policy is new that an agent finds when it starts.

use super::facts::Facts;
use crate::{
    encode::PolicyView,
    model::{Family, Policy, PolicyId},
    plan::classes,
};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

/// How long a policy without usable slots leaves its destinations to other policies. After that it takes them, and traffic is dropped while
/// the policy cannot be carried out.
pub const GRACE: Duration = Duration::from_secs(10);

/// The policies that do not take precedence yet. All others do where they match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effective {
    /// The uid of each policy that exists. Absent before the first update.
    known: Option<BTreeMap<PolicyId, String>>,
    /// The new policies that cannot serve yet, and since when they have been known.
    waiting: BTreeMap<PolicyId, Duration>,
}

impl Effective {
    /// Updates the state at `now`, on any clock that only goes forward, from all policies and from the views of those that select a pod of
    /// this node.
    pub fn update(
        &mut self,
        policies: &BTreeMap<PolicyId, Policy>,
        views: &BTreeMap<PolicyId, PolicyView>,
        now: Duration,
    ) {
        let uids = policies.iter().map(|(id, policy)| (id.clone(), policy.uid.clone())).collect();
        if let Some(known) = self.known.replace(uids) {
            let new = policies.iter().filter(|(id, policy)| known.get(*id) != Some(&policy.uid));
            self.waiting.extend(new.map(|(id, _)| (id.clone(), now)));
        }
        self.waiting.retain(|id, since| {
            let serves = |policy| views.get(id).is_some_and(|view| can_serve(policy, view));
            now.saturating_sub(*since) < GRACE && policies.get(id).is_some_and(|policy| !serves(policy))
        });
    }

    /// Returns whether a policy takes precedence where it matches.
    #[cfg(test)]
    pub fn comes_first(&self, id: &PolicyId) -> bool {
        !self.waiting.contains_key(id)
    }

    /// Returns the merged destinations of a class: those of the policies that take precedence and, where none of them matches, those of the
    /// others.
    pub fn merge(&self, facts: &Facts, class: &BTreeSet<PolicyId>) -> Vec<(IpNet, Option<PolicyId>)> {
        let (rest, first): (Vec<_>, Vec<_>) = class.iter().partition(|id| self.waiting.contains_key(*id));
        let first = classes::merge(&facts.objects.snapshot.policies, first);
        if rest.is_empty() {
            return first;
        }
        overlay(&first, &classes::merge(&facts.objects.snapshot.policies, rest))
    }
}

/// Returns whether a policy has a slot for new flows in every family that it steers.
pub(super) fn can_serve(policy: &Policy, view: &PolicyView) -> bool {
    let usable = |family| view.slots.iter().any(|s| s.usable && Family::of(s.address) == family);
    [Family::V4, Family::V6].into_iter().filter(|f| policy.serves(*f)).all(usable)
}

/// Returns a table that resolves like `first`, and like `rest` where `first` has no policy.
fn overlay(first: &[(IpNet, Option<PolicyId>)], rest: &[(IpNet, Option<PolicyId>)]) -> Vec<(IpNet, Option<PolicyId>)> {
    let tables = [first, rest].map(|t| t.iter().map(|(n, p)| (*n, p.clone())).collect::<BTreeMap<_, _>>());
    let nets: BTreeSet<IpNet> = tables.iter().flat_map(|t| t.keys().copied()).collect();
    nets.into_iter().map(|net| (net, look_up(&tables[0], net).or_else(|| look_up(&tables[1], net)))).collect()
}

/// Returns the policy of the longest prefix that covers `net`.
fn look_up(table: &BTreeMap<IpNet, Option<PolicyId>>, net: IpNet) -> Option<PolicyId> {
    std::iter::successors(Some(net), IpNet::supernet).find_map(|n| table.get(&n)).cloned().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::PolicyKind;

    fn id(name: &str) -> PolicyId {
        PolicyId::new(PolicyKind::Native, name)
    }

    fn table(entries: &[(&str, Option<&str>)]) -> Vec<(IpNet, Option<PolicyId>)> {
        entries.iter().map(|(n, p)| (n.parse().unwrap(), p.map(id))).collect()
    }

    #[test]
    fn an_overlay_prefers_the_first_table_where_it_has_a_policy() {
        let first = table(&[("0.0.0.0/0", Some("old")), ("10.0.0.0/8", None)]);
        let rest = table(&[("10.1.0.0/16", Some("new")), ("192.0.2.0/24", Some("new"))]);
        let merged: BTreeMap<_, _> = overlay(&first, &rest).into_iter().collect();
        let at = |net: &str| look_up(&merged, net.parse().unwrap());
        assert_eq!(at("192.0.2.7/32"), Some(id("old")), "the old policy continues");
        assert_eq!(at("10.1.2.3/32"), Some(id("new")), "the new policy immediately gets what no other policy matches");
        assert_eq!(at("10.2.2.3/32"), None);
    }
}
