//! Checks the merged prefix table against an examination of every policy.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use proptest::prelude::*;

use crate::model::*;
use crate::plan::classes::{conflicts, merge};
use crate::testing::world::*;

type Table = Vec<(IpNet, Option<PolicyId>)>;

/// Returns which policy steers a destination, by the definition of the design.
pub(super) fn winner(policies: &BTreeMap<PolicyId, Policy>, to: IpAddr) -> Option<PolicyId> {
    policies
        .values()
        .filter(|policy| !policy.excluded.iter().any(|net| net.contains(&to)))
        .filter_map(|policy| {
            let matching = policy.destinations.iter().filter(|net| net.contains(&to));
            Some((std::cmp::Reverse(matching.map(IpNet::prefix_len).max()?), policy))
        })
        .min_by(|(a, p), (b, q)| {
            a.cmp(b).then_with(|| p.created.cmp(&q.created)).then_with(|| p.id.name.cmp(&q.id.name))
        })
        .map(|(_, policy)| policy.id.clone())
}

fn look_up(table: &Table, to: IpAddr) -> Option<PolicyId> {
    let longest = table.iter().filter(|(net, _)| net.contains(&to)).max_by_key(|(net, _)| net.prefix_len());
    longest.and_then(|(_, policy)| policy.clone())
}

/// Returns both ends of each prefix, and their neighbours: where anything can change.
fn edges(policies: &BTreeMap<PolicyId, Policy>) -> Vec<IpAddr> {
    let nets = policies.values().flat_map(|policy| policy.destinations.iter().chain(&policy.excluded));
    nets.flat_map(|net| {
        let family = Family::of_net(net);
        let (first, last) = (Family::bits(net.network()), Family::bits(net.broadcast()));
        let around = [first.checked_sub(1), Some(first), Some(last), last.checked_add(1)];
        let end = if family == Family::V4 { u128::from(u32::MAX) } else { u128::MAX };
        around.into_iter().flatten().filter(move |bits| *bits <= end).map(move |bits| family.address(bits))
    })
    .collect()
}

fn check(policies: &BTreeMap<PolicyId, Policy>) -> Result<Table, TestCaseError> {
    let table = merge(policies, policies.keys());
    for to in edges(policies) {
        prop_assert_eq!(look_up(&table, to), winner(policies, to), "to {} by {:?}", to, table);
    }
    Ok(table)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_class_table_agrees_with_the_policies(policies in arbitrary_policies(5)) {
        check(&policies)?;
    }

    #[test]
    fn any_prefixes_merge(raw in prop::collection::vec((any::<u32>(), 0u8..=32, 0usize..4, any::<bool>()), 1..24)) {
        let mut policies = BTreeMap::new();
        for (bits, length, owner, excluded) in raw {
            // Few distinct networks, so that prefixes nest.
            let net = IpNet::new(Family::V4.address(u128::from(bits & 0xc0c0_c0c0)), length).unwrap().trunc();
            let name = format!("policy{owner}");
            let policy = policies.entry(PolicyId::new(PolicyKind::Native, &name))
                .or_insert_with(|| Policy { destinations: Vec::new(), ..policy(&name, Source::Pools(Vec::new())) });
            if excluded { policy.excluded.push(net) } else { policy.destinations.push(net) }
        }
        check(&policies)?;
    }

    #[test]
    fn no_entry_of_a_class_table_is_redundant(policies in arbitrary_policies(4)) {
        let table = check(&policies)?;
        let candidates = edges(&policies);
        for at in 0..table.len() {
            let mut without = table.clone();
            without.remove(at);
            prop_assert!(candidates.iter().any(|to| look_up(&without, *to) != look_up(&table, *to)),
                "{:?} is not needed in {:?}", table[at], table);
        }
    }

    #[test]
    fn the_order_of_policies_does_not_matter(policies in arbitrary_policies(4)) {
        let mut reversed = policies.clone();
        for policy in reversed.values_mut() {
            policy.destinations.reverse();
            policy.excluded.reverse();
        }
        let backwards: Vec<&PolicyId> = policies.keys().rev().collect();
        prop_assert_eq!(merge(&policies, policies.keys()), merge(&reversed, backwards));
    }
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

#[test]
fn an_exclusion_hands_over_to_the_next_policy_only() {
    let mut policies = BTreeMap::new();
    let old = Policy { excluded: vec![net("10.0.0.0/8")], ..policy("old", Source::Pools(Vec::new())) };
    let young = Policy { created: 5, ..policy("young", Source::Pools(Vec::new())) };
    policies.insert(old.id.clone(), old.clone());
    assert_eq!(
        merge(&policies, policies.keys()),
        [(net("0.0.0.0/0"), Some(old.id.clone())), (net("10.0.0.0/8"), None)]
    );
    policies.insert(young.id.clone(), young.clone());
    assert_eq!(
        merge(&policies, policies.keys()),
        [(net("0.0.0.0/0"), Some(old.id)), (net("10.0.0.0/8"), Some(young.id))]
    );
}

#[test]
fn the_younger_of_two_policies_with_one_prefix_conflicts_and_longer_prefixes_do_not() {
    let mut policies = BTreeMap::new();
    for (name, created, to) in [("a", 3, "0.0.0.0/0"), ("b", 1, "0.0.0.0/0"), ("c", 9, "10.0.0.0/8")] {
        let policy = Policy { created, destinations: vec![net(to)], ..policy(name, Source::Pools(Vec::new())) };
        policies.insert(policy.id.clone(), policy);
    }
    let ids: Vec<&PolicyId> = policies.keys().collect();
    let found = conflicts(&policies, [&ids]);
    let expected = [(ids[0].clone(), [(ids[1].clone(), [net("0.0.0.0/0")].into())].into())];
    assert_eq!(found, expected.into());
    assert!(conflicts(&policies, [&vec![ids[0], ids[2]]]).is_empty());
}
