//! Which policies this node's datapath has, and in which version. The controller needs this to report that a policy is in force. Pure.
//!
//! A version counts once the tables have been written for it, with an egress IP that new connections can use in every family that the
//! policy steers. If none can be used for a while, that is final on this node, and the version counts as well. Both hold only for the
//! controller's plan for this version: until there is one, the egress IPs are still those of an earlier version.

use super::{
    effective::{GRACE, can_serve},
    facts::Objects,
};
use crate::{
    encode::PolicyView,
    model::{PolicyId, Version},
};
use std::{collections::BTreeMap, time::Duration};

/// A node's progress with one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Progress {
    /// The planned version that was last written, and since when the tables have it.
    written: (Version, Duration),
    /// The latest version that counts.
    done: Option<Version>,
}

/// A node's progress with its policies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Programmed(BTreeMap<PolicyId, Progress>);

impl Programmed {
    /// Records that the tables were written with these views of the objects' policies.
    pub fn written(&mut self, objects: &Objects, views: &BTreeMap<PolicyId, PolicyView>, now: Duration) {
        self.0.retain(|id, _| views.contains_key(id));
        let planned = views.iter().filter(|(id, _)| !objects.unplanned.contains(*id));
        for (policy, view) in planned.filter_map(|(id, view)| Some((objects.snapshot.policies.get(id)?, view))) {
            let version = policy.version();
            let new = || Progress { written: (version.clone(), now), done: None };
            let progress = self.0.entry(policy.id.clone()).or_insert_with(new);
            if progress.written.0 != version {
                progress.written = (version.clone(), now);
            }
            if can_serve(policy, view) || now.saturating_sub(progress.written.1) >= GRACE {
                progress.done = Some(version);
            }
        }
    }

    /// Returns the versions that count.
    pub fn versions(&self) -> impl Iterator<Item = (&PolicyId, &Version)> {
        self.0.iter().filter_map(|(id, progress)| Some((id, progress.done.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        encode::SlotView,
        model::{Policy, Source},
        testing::world,
    };

    fn look(programmed: &mut Programmed, generation: i64, usable: bool, seconds: u64) -> Vec<i64> {
        look_at(programmed, generation, true, usable, seconds)
    }

    fn look_at(programmed: &mut Programmed, generation: i64, planned: bool, usable: bool, seconds: u64) -> Vec<i64> {
        let policy = Policy { generation, ..world::policy("web", Source::Pools(Vec::new())) };
        let slot = SlotView { address: [192, 0, 2, 1].into(), weight: 1, usable };
        let view = PolicyView { slots: vec![slot], ..PolicyView::default() };
        let views = [(policy.id.clone(), view)].into();
        let mut objects = Objects::default();
        objects.unplanned.extend((!planned).then(|| policy.id.clone()));
        world::add_policy(&mut objects.snapshot, policy);
        programmed.written(&objects, &views, Duration::from_secs(seconds));
        programmed.versions().map(|(_, version)| version.generation).collect()
    }

    #[test]
    fn a_version_counts_when_new_connections_can_use_it() {
        let mut programmed = Programmed::default();
        assert_eq!(look(&mut programmed, 1, false, 0), []);
        assert_eq!(look(&mut programmed, 1, true, 1), [1]);
        assert_eq!(look(&mut programmed, 1, false, 100), [1], "later events do not change the version");
        assert_eq!(look(&mut programmed, 2, false, 101), [1]);
        assert_eq!(look(&mut programmed, 2, true, 102), [2]);
    }

    #[test]
    fn an_edited_version_counts_only_with_a_plan_for_it() {
        let mut programmed = Programmed::default();
        assert_eq!(look(&mut programmed, 1, true, 0), [1]);
        assert_eq!(look_at(&mut programmed, 2, false, true, 1), [1], "the slots are those of the version before");
        assert_eq!(look_at(&mut programmed, 2, false, false, 100), [1], "however long that takes");
        assert_eq!(look(&mut programmed, 2, false, 101), [1], "the time of grace begins with the plan");
        assert_eq!(look(&mut programmed, 2, true, 102), [2]);
    }

    #[test]
    fn an_unusable_version_counts_after_the_grace_time_and_a_deleted_policys_does_not() {
        let mut programmed = Programmed::default();
        look(&mut programmed, 1, false, 5);
        assert_eq!(look(&mut programmed, 1, false, 5 + GRACE.as_secs() - 1), []);
        assert_eq!(look(&mut programmed, 1, false, 5 + GRACE.as_secs()), [1]);
        programmed.written(&Objects::default(), &BTreeMap::new(), Duration::from_secs(60));
        assert_eq!(programmed.versions().count(), 0);
    }
}
