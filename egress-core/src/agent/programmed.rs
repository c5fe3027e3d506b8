//! Which policies this node's datapath has, and in which version. The controller needs this to report that a policy is in force. Pure.
//!
//! A version counts once the tables have been written for it, with an egress IP that new connections can use in every family that the
//! policy steers. If none can be used for a while, that is final on this node, and the version counts as well.

use super::effective::{GRACE, can_serve};
use crate::{
    encode::PolicyView,
    model::{Policy, PolicyId, Version},
};
use std::{collections::BTreeMap, time::Duration};

/// A node's progress with one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Progress {
    /// The version that was last written, and since when the tables have it.
    written: (Version, Duration),
    /// The latest version that counts.
    done: Option<Version>,
}

/// A node's progress with its policies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Programmed(BTreeMap<PolicyId, Progress>);

impl Programmed {
    /// Records that the tables were written with these policies.
    pub fn written(
        &mut self,
        policies: &BTreeMap<PolicyId, Policy>,
        views: &BTreeMap<PolicyId, PolicyView>,
        now: Duration,
    ) {
        self.0.retain(|id, _| views.contains_key(id));
        for (policy, view) in views.iter().filter_map(|(id, view)| Some((policies.get(id)?, view))) {
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
    use crate::{encode::SlotView, model::Source, testing::world};

    fn look(programmed: &mut Programmed, generation: i64, usable: bool, seconds: u64) -> Vec<i64> {
        let policy = Policy { generation, ..world::policy("web", Source::Pools(Vec::new())) };
        let slot = SlotView { address: [192, 0, 2, 1].into(), weight: 1, usable };
        let view = PolicyView { slots: vec![slot], ..PolicyView::default() };
        let views = [(policy.id.clone(), view)].into();
        programmed.written(&[(policy.id.clone(), policy)].into(), &views, Duration::from_secs(seconds));
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
    fn an_unusable_version_counts_after_the_grace_time_and_a_deleted_policys_does_not() {
        let mut programmed = Programmed::default();
        look(&mut programmed, 1, false, 5);
        assert_eq!(look(&mut programmed, 1, false, 5 + GRACE.as_secs() - 1), []);
        assert_eq!(look(&mut programmed, 1, false, 5 + GRACE.as_secs()), [1]);
        programmed.written(&BTreeMap::new(), &BTreeMap::new(), Duration::from_secs(60));
        assert_eq!(programmed.versions().count(), 0);
    }
}
