//! Selects which of a node's troubles are reported: the status has a bounded size, and each trouble is logged. Pure.

use crate::model::{PolicyId, Trouble, TroubleKind};
use std::collections::{BTreeMap, BTreeSet};

/// How many troubles of one kind are reported for a policy.
const SHOWN_OF_KIND: usize = 10;
/// How many troubles are reported for all policies: some 300 KiB of a status. The first ones of each policy precede further ones of any.
const SHOWN: usize = 1_000;

/// Returns as many of the troubles as are reported. The last one of a kind says how many more there are.
pub fn shown(all: BTreeSet<Trouble>) -> BTreeSet<Trouble> {
    let mut kinds: BTreeMap<(PolicyId, TroubleKind), Vec<Trouble>> = BTreeMap::new();
    for trouble in all {
        kinds.entry((trouble.policy.clone(), trouble.kind)).or_default().push(trouble);
    }
    // As many of each kind as there is room for, but at least one.
    let of_each = (SHOWN / kinds.len().max(1)).clamp(1, SHOWN_OF_KIND);
    let shown = kinds.into_values().take(SHOWN).flat_map(|mut troubles| {
        let more = troubles.len().saturating_sub(of_each);
        troubles.truncate(of_each);
        if let Some(last) = troubles.last_mut()
            && more > 0
        {
            last.and_more(more);
        }
        troubles
    });
    shown.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{EndpointId, PolicyKind};

    fn troubles(policies: usize, pods: usize) -> BTreeSet<Trouble> {
        let trouble = |policy: usize, pod: usize| Trouble {
            policy: PolicyId::new(PolicyKind::Native, &format!("policy-{policy}")),
            kind: TroubleKind::PodNotStarted,
            pod: Some(EndpointId::new("default", &format!("pod-{pod:04}"), "uid")),
            message: "it does not start".into(),
        };
        (0..policies).flat_map(|policy| (0..pods).map(move |pod| trouble(policy, pod))).collect()
    }

    #[test]
    fn few_troubles_are_reported_as_they_are() {
        assert_eq!(shown(troubles(3, SHOWN_OF_KIND)), troubles(3, SHOWN_OF_KIND));
    }

    #[test]
    fn a_policy_reports_some_and_how_many_more_there_are() {
        let told = shown(troubles(1, 500));
        assert_eq!(told.len(), SHOWN_OF_KIND);
        let last = told.last().unwrap();
        assert_eq!(last.message, "it does not start (and 490 more)");
        assert_eq!(last.counted(), ("it does not start", 490));
        assert!(told.iter().filter(|trouble| trouble.message.contains("more")).count() == 1);
    }

    #[test]
    fn many_policies_report_at_least_one_each_as_long_as_there_is_room() {
        let told = shown(troubles(900, 500));
        let policies: BTreeSet<_> = told.iter().map(|trouble| &trouble.policy).collect();
        assert_eq!((told.len(), policies.len()), (900, 900));
        assert_eq!(shown(troubles(3_000, 3)).len(), SHOWN);
    }
}
