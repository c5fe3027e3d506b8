//! Policies that were removed recently. Pure.
//!
//! An agent learns of a policy's removal and of the end of its slots from two messages, in any order. If the slots ended first, new flows
//! would find a policy without a gateway and be dropped, although another policy serves them as soon as the other message arrives. So a
//! policy stays in the plan a little longer than it exists.

use crate::model::{Policy, PolicyId};
use std::{collections::BTreeMap, time::Duration};

/// How long a removed policy stays in the plan: agents follow changes within a second.
pub const LINGER: Duration = Duration::from_secs(2);

/// The policies of the last round, and the removed ones with the time of their removal.
#[derive(Debug, Default)]
pub struct Departed {
    last: BTreeMap<PolicyId, Policy>,
    gone: BTreeMap<PolicyId, (Policy, Duration)>,
}

impl Departed {
    /// Adds the policies that were removed less than [`LINGER`] before `now` to those that exist.
    pub fn add_to(&mut self, policies: &mut BTreeMap<PolicyId, Policy>, now: Duration) {
        let last = std::mem::replace(&mut self.last, policies.clone());
        let went = last.into_iter().filter(|(id, _)| !policies.contains_key(id));
        self.gone.extend(went.map(|(id, policy)| (id, (policy, now))));
        self.gone.retain(|id, (_, since)| !policies.contains_key(id) && now.saturating_sub(*since) < LINGER);
        policies.extend(self.gone.iter().map(|(id, (policy, _))| (id.clone(), policy.clone())));
    }

    /// Returns when the next removed policy is forgotten.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.gone.values().map(|(_, since)| *since + LINGER).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Source;
    use crate::testing::world;

    #[test]
    fn a_policy_is_planned_for_until_agents_have_heard_that_it_is_gone() {
        let seconds = Duration::from_secs;
        let make = |names: &[&str]| -> BTreeMap<PolicyId, Policy> {
            let policies = names.iter().map(|name| world::policy(name, Source::Pools(Vec::new())));
            policies.map(|policy| (policy.id.clone(), policy)).collect()
        };
        let mut departed = Departed::default();
        let mut look = |names: &[&str], now: Duration| {
            let mut policies = make(names);
            departed.add_to(&mut policies, now);
            let names = policies.into_keys().map(|id| id.name.to_string()).collect::<Vec<_>>();
            (names.join(" "), departed.next_deadline())
        };
        assert_eq!(look(&["a", "b"], seconds(10)), ("a b".to_owned(), None));
        assert_eq!(look(&["a"], seconds(20)), ("a b".to_owned(), Some(seconds(20) + LINGER)));
        assert_eq!(look(&["b"], seconds(21)), ("a b".to_owned(), Some(seconds(21) + LINGER)), "b is back, a is gone");
        assert_eq!(look(&["b"], seconds(21) + LINGER), ("b".to_owned(), None));
    }
}
