//! The changes from one plan to the next, in the terms of events.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::types::{Assigned, BlockState, Condition, ConditionKind, OwnerReason, Plan};
use crate::model::{EndpointId, NodeName, PolicyId, TroubleKind};

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// An egress IP came into use.
    Added {
        /// the egress IP
        address: IpAddr,
    },
    /// An egress IP is no longer used.
    Removed {
        /// the egress IP
        address: IpAddr,
    },
    /// An egress IP has another owner.
    Moved {
        /// the egress IP
        address: IpAddr,
        /// its owner before
        from: Option<NodeName>,
        /// its owner now
        to: Option<NodeName>,
        /// of the new owner
        epoch: u64,
        /// why it is there
        reason: OwnerReason,
    },
    /// Blocks were leased.
    Leased {
        /// the egress IP
        address: IpAddr,
        /// the holder
        node: NodeName,
        /// how many
        blocks: usize,
    },
    /// Blocks came back.
    Returned {
        /// the egress IP
        address: IpAddr,
        /// the previous holder
        node: NodeName,
        /// how many
        blocks: usize,
    },
    /// An endpoint is assigned to other egress IPs than before.
    Reassigned {
        /// the policy
        policy: PolicyId,
        /// the endpoint
        endpoint: EndpointId,
        /// before
        from: Assigned,
        /// now
        to: Assigned,
    },
    /// A node cannot serve a pod.
    Unserved {
        /// the pod
        pod: EndpointId,
        /// what is wrong
        kind: TroubleKind,
        /// what to do about it
        message: String,
    },
    /// A condition of a policy changed its state or its reason.
    Condition {
        /// the policy
        policy: PolicyId,
        /// which condition
        kind: ConditionKind,
        /// what it is now
        condition: Condition,
    },
}

/// Returns all changes, sorted by kind and then by name.
pub fn diff(before: &Plan, after: &Plan) -> Vec<Change> {
    let mut changes = Vec::new();
    for (address, (old, new)) in join(&before.egress_ips, &after.egress_ips) {
        let owner = |plan: Option<&super::EgressIpPlan>| plan.and_then(|p| p.owner.clone());
        let (from, to) = (owner(old), owner(new));
        match (old, new) {
            (None, Some(_)) => changes.push(Change::Added { address: *address }),
            (Some(_), None) => changes.push(Change::Removed { address: *address }),
            _ => {}
        }
        if let Some(new) = new.filter(|_| from != to) {
            changes.push(Change::Moved { address: *address, from, to, epoch: new.epoch, reason: new.reason });
        }
    }
    leases(before, after, &mut changes);
    let nothing = BTreeMap::new();
    for (policy, (old, new)) in join(&before.assignments, &after.assignments) {
        for (endpoint, (from, to)) in join(old.unwrap_or(&nothing), new.unwrap_or(&nothing)) {
            if let (Some(from), Some(to)) = (from, to)
                && from != to
            {
                let (policy, endpoint) = (policy.clone(), endpoint.clone());
                changes.push(Change::Reassigned { policy, endpoint, from: *from, to: *to });
            }
        }
    }
    for (policy, (old, new)) in join(&before.outcomes, &after.outcomes) {
        for (pod, (kind, message)) in new.into_iter().flat_map(|new| &new.pods) {
            if old.and_then(|old| old.pods.get(pod)).is_none_or(|(before, _)| before != kind) {
                let (pod, message) = (pod.clone(), message.clone());
                changes.push(Change::Unserved { pod, kind: *kind, message });
            }
        }
        for (kind, condition) in new.into_iter().flat_map(|new| &new.conditions) {
            let was = old.and_then(|old| old.conditions.get(kind));
            let is_news = match was {
                Some(was) => (was.holds, was.reason) != (condition.holds, condition.reason),
                // A new policy without problems is not worth an event.
                None => condition.holds || *kind == ConditionKind::Ready,
            };
            if is_news {
                let (policy, condition) = (policy.clone(), condition.clone());
                changes.push(Change::Condition { policy, kind: *kind, condition });
            }
        }
    }
    changes
}

fn leases(before: &Plan, after: &Plan, changes: &mut Vec<Change>) {
    let nothing = BTreeMap::new();
    for (address, (old, new)) in join(&before.blocks, &after.blocks) {
        let mut leased: BTreeMap<&NodeName, usize> = BTreeMap::new();
        let mut returned: BTreeMap<&NodeName, usize> = BTreeMap::new();
        for (_, (old, new)) in join(old.unwrap_or(&nothing), new.unwrap_or(&nothing)) {
            let same_holder = old.map(|lease| &lease.node) == new.map(|lease| &lease.node);
            let usable = |lease: &&super::BlockLease| lease.state == BlockState::Leased;
            if let Some(new) = new.filter(usable)
                && old.filter(usable).is_none_or(|old| old.revision != new.revision || !same_holder)
            {
                *leased.entry(&new.node).or_default() += 1;
            }
            if let Some(old) = old.filter(|_| !same_holder) {
                *returned.entry(&old.node).or_default() += 1;
            }
        }
        changes.extend(returned.into_iter().map(|(node, blocks)| Change::Returned {
            address: *address,
            node: node.clone(),
            blocks,
        }));
        changes.extend(leased.into_iter().map(|(node, blocks)| Change::Leased {
            address: *address,
            node: node.clone(),
            blocks,
        }));
    }
}

/// Returns both maps side by side.
pub(super) fn join<'a, K: Ord, V>(
    left: &'a BTreeMap<K, V>,
    right: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = (&'a K, (Option<&'a V>, Option<&'a V>))> {
    let (mut left, mut right) = (left.iter().peekable(), right.iter().peekable());
    std::iter::from_fn(move || {
        let first = match (left.peek(), right.peek()) {
            (Some((a, _)), Some((b, _))) => std::cmp::min(*a, *b),
            (Some((key, _)), None) | (None, Some((key, _))) => *key,
            (None, None) => return None,
        };
        let old = left.next_if(|(key, _)| *key == first).map(|(_, value)| value);
        let new = right.next_if(|(key, _)| *key == first).map(|(_, value)| value);
        Some((first, (old, new)))
    })
}
