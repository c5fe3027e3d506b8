//! Which carriers the flows of an egress IP go to, if they are spread over several. Pure.

use egress_common::egress::{CARRIER_ENTRIES, CarrierTable};
use std::{cmp::Reverse, collections::BTreeMap};

/// The table without carriers.
pub const NONE: CarrierTable = CarrierTable { node: [0; CARRIER_ENTRIES + 1] };

/// Returns the table that follows `before`: `members` share the entries as evenly as possible. A carrier that leaves gives its entries to
/// the others, and one that joins takes some of each; no other flow changes its carrier. Tables of different nodes need not agree.
pub fn table(mut before: CarrierTable, members: &[u16]) -> CarrierTable {
    let entries = &mut before.node[..CARRIER_ENTRIES];
    let mut counts: BTreeMap<u16, usize> = members.iter().map(|member| (*member, 0)).collect();
    for entry in entries.iter() {
        counts.entry(*entry).and_modify(|count| *count += 1);
    }
    if counts.is_empty() {
        return NONE;
    }
    // If they cannot all have the same number, the carriers with the most entries have one more.
    let mut by_count: Vec<u16> = counts.keys().copied().collect();
    by_count.sort_by_key(|member| Reverse(counts[member]));
    let (share, more) = (CARRIER_ENTRIES / by_count.len(), CARRIER_ENTRIES % by_count.len());
    let mut wants: BTreeMap<u16, usize> = BTreeMap::new();
    for (place, member) in by_count.iter().enumerate() {
        wants.insert(*member, share + usize::from(place < more));
    }
    for entry in entries {
        if counts.get(entry).is_some_and(|count| *count <= wants[entry]) {
            continue;
        }
        let Some(taker) = by_count.iter().copied().find(|member| counts[member] < wants[member]) else { break };
        counts.entry(*entry).and_modify(|count| *count -= 1);
        counts.entry(taker).and_modify(|count| *count += 1);
        *entry = taker;
    }
    before
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn counts(table: &CarrierTable, members: &BTreeSet<u16>) -> Vec<usize> {
        let entries = &table.node[..CARRIER_ENTRIES];
        members.iter().map(|member| entries.iter().filter(|entry| *entry == member).count()).collect()
    }

    proptest! {
        #[test]
        fn carriers_share_evenly_and_only_joining_or_leaving_ones_move_flows(
            first in prop::collection::btree_set(1u16..12, 1..8), steps in prop::collection::vec(1u16..12, 1..10),
        ) {
            let of = |before, set: &BTreeSet<u16>| table(before, &set.iter().copied().collect::<Vec<_>>());
            let (mut set, mut before) = (first.clone(), of(NONE, &first));
            for step in steps {
                let comes = !set.remove(&step);
                if comes {
                    set.insert(step);
                }
                if set.is_empty() {
                    break;
                }
                let after = of(before, &set);
                let counts = counts(&after, &set);
                prop_assert_eq!(counts.iter().sum::<usize>(), CARRIER_ENTRIES);
                prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{:?}", counts);
                for (old, new) in before.node.iter().zip(&after.node).filter(|(old, new)| old != new) {
                    prop_assert_eq!(if comes { *new } else { *old }, step);
                }
                prop_assert_eq!(of(after, &set), after);
                before = after;
            }
        }
    }
}
