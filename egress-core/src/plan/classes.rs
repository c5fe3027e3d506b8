//! Merges the destinations of all policies that select an endpoint into one table for longest-prefix lookup.
//!
//! At each destination the winner is, among the policies that steer it and do not exclude it, the one with the longest matching destination
//! prefix, then the older one, then the first by name. A destination that a winner excludes goes to the next policy: an exclusion takes it
//! out of its own policy only.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::successors;

use ipnet::IpNet;

use crate::model::{Family, OnNoGateway, Policy, PolicyId};

/// What the policies say about one prefix, as places in the list of policies.
#[derive(Debug, Default)]
struct Entry {
    destination_of: Vec<usize>,
    excluded_by: Vec<usize>,
}

/// A prefix in the order of a walk through the tree of prefixes: outer ones before inner ones.
type Key = (Family, u128, u8);

fn key(net: &IpNet) -> Key {
    (Family::of_net(net), Family::bits(net.network()), net.prefix_len())
}

fn covers(outer: Key, inner: Key) -> bool {
    let host_bits = outer.0.width() - u32::from(outer.2);
    let network = |bits: u128| bits.checked_shr(host_bits).unwrap_or(0);
    outer.0 == inner.0 && outer.2 <= inner.2 && network(outer.1) == network(inner.1)
}

/// Returns the table of an endpoint that these policies select, sorted by prefix. The longest prefix that contains a destination says which
/// policy steers it; with `None`, or without such a prefix, none does. No entry says the same as the next shorter prefix.
///
/// Policies that are not in `policies` are left out.
pub fn merge<'a>(
    policies: &BTreeMap<PolicyId, Policy>,
    class: impl IntoIterator<Item = &'a PolicyId>,
) -> Vec<(IpNet, Option<PolicyId>)> {
    let mut ranked: Vec<&Policy> = class.into_iter().filter_map(|id| policies.get(id)).collect();
    ranked.sort_by(|a, b| a.precedence(b));
    ranked.dedup_by(|a, b| a.id == b.id);

    let mut entries: BTreeMap<Key, (IpNet, Entry)> = BTreeMap::new();
    for (rank, policy) in ranked.iter().enumerate() {
        let mut entry = |net: &IpNet, add: fn(&mut Entry) -> &mut Vec<usize>| {
            let list = add(&mut entries.entry(key(net)).or_insert_with(|| (net.trunc(), Entry::default())).1);
            if list.last() != Some(&rank) {
                list.push(rank);
            }
        };
        policy.destinations.iter().for_each(|net| entry(net, |e| &mut e.destination_of));
        policy.excluded.iter().for_each(|net| entry(net, |e| &mut e.excluded_by));
    }

    let mut table = Vec::new();
    let mut around: Vec<(Key, &Entry, Option<usize>)> = Vec::new();
    let mut exclusions = vec![0u32; ranked.len()];
    for (at, (net, entry)) in &entries {
        while let Some((outer, left, _)) = around.last()
            && !covers(*outer, *at)
        {
            left.excluded_by.iter().for_each(|rank| exclusions[*rank] -= 1);
            around.pop();
        }
        entry.excluded_by.iter().for_each(|rank| exclusions[*rank] += 1);
        let inherited = around.last().and_then(|(_, _, winner)| *winner);
        let winner = std::iter::once(entry)
            .chain(around.iter().rev().map(|(_, entry, _)| *entry))
            .find_map(|e| e.destination_of.iter().copied().find(|rank| exclusions[*rank] == 0));
        around.push((*at, entry, winner));
        if winner != inherited {
            table.push((*net, winner.map(|rank| ranked[rank].id.clone())));
        }
    }
    table
}

/// Returns the policies whose traffic another policy takes: for each policy that does not come first at one of its own destination
/// prefixes, for some class, the policy that does. Policies that steer a shorter or a longer prefix do not conflict.
pub fn conflicts<'a>(
    policies: &BTreeMap<PolicyId, Policy>,
    classes: impl IntoIterator<Item = &'a Vec<&'a PolicyId>>,
) -> BTreeMap<PolicyId, BTreeMap<PolicyId, BTreeSet<IpNet>>> {
    let mut found: BTreeMap<PolicyId, BTreeMap<PolicyId, BTreeSet<IpNet>>> = BTreeMap::new();
    let mut steered: BTreeMap<&PolicyId, Vec<(Key, &IpNet)>> = BTreeMap::new();
    for class in classes {
        let mut ranked: Vec<&Policy> = class.iter().filter_map(|id| policies.get(*id)).collect();
        ranked.sort_by(|a, b| a.precedence(b));
        let mut first: BTreeMap<Key, &Policy> = BTreeMap::new();
        for policy in ranked {
            for (key, net) in steered.entry(&policy.id).or_insert_with(|| self::steered(policy)) {
                let winner = *first.entry(*key).or_insert(policy);
                if winner.id != policy.id {
                    let of_policy = found.entry(policy.id.clone()).or_default();
                    of_policy.entry(winner.id.clone()).or_default().insert(**net);
                }
            }
        }
    }
    found
}

/// Returns the destinations of a policy that it does not exclude.
fn steered(policy: &Policy) -> Vec<(Key, &IpNet)> {
    let excluded: BTreeSet<Key> = policy.excluded.iter().map(key).collect();
    let is_excluded =
        |net: &IpNet| successors(Some(*net), IpNet::supernet).any(|outer| excluded.contains(&key(&outer)));
    policy.destinations.iter().filter(|net| !is_excluded(net)).map(|net| (key(net), net)).collect()
}

/// Returns the policies of a class that would let packets leave with the node's address, but may not for this class.
pub fn overruled<'a>(
    policies: &BTreeMap<PolicyId, Policy>,
    class: &[&'a PolicyId],
) -> impl Iterator<Item = &'a PolicyId> {
    let is_overruled = |id: &&PolicyId| {
        let policy = policies.get(*id).filter(|policy| policy.on_no_gateway == OnNoGateway::NodeIp);
        policy.is_some_and(|policy| !policy.leaves_as_node(class.iter().copied()))
    };
    class.iter().copied().filter(is_overruled)
}
