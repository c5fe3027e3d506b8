//! Merges the claims of all policies on one address into one egress IP.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::addresses::{Holders, Nodes};
use super::candidates::Candidates;
use super::outcome::Problems;
use super::types::{ConditionKind, Reason};
use crate::model::{Failback, NodeName, Policy, PoolId, Selector};

/// An egress IP that some policy uses.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The pool that it was taken from.
    pub pool: Option<&'a PoolId>,
    /// The policies that use it and the weight of its slot, in order of precedence.
    pub users: Vec<(&'a Policy, u32)>,
    /// The node whose own address it is, and the interface.
    pub fixed: Option<(u32, Option<String>)>,
    /// The nodes that may own it, ascending, as places in `Snapshot::nodes`; shared by number in [`Candidates`].
    pub candidates: usize,
    /// Whether no node may own it because the address is configured elsewhere, or nowhere.
    pub elsewhere: bool,
    /// What happens when a gateway comes back.
    pub failback: Failback,
    /// Whether it goes to its first candidate that can have it, whatever that one's load, and is not moved for balance.
    pub first: bool,
    /// Whether it was taken out of its pool while it was in use.
    pub draining: bool,
}

/// One policy's claim on one address.
pub struct Claim<'a> {
    /// the policy that makes the claim
    pub policy: &'a Policy,
    /// the weight of the slot
    pub weight: u32,
    /// the pool that it was allocated from
    pub pool: Option<&'a PoolId>,
    /// the nodes that may have it
    pub selectors: BTreeSet<&'a Selector>,
    /// the nodes that were named by their own address, rather than by selectors
    pub nodes: BTreeSet<u32>,
    /// whether it must be configured on a node
    pub configured: bool,
    /// whether it wants the first of the nodes, not the one with the fewest
    pub first: bool,
}

/// Merges all claims on an address into one egress IP. A claim that cannot be satisfied never affects those that can.
pub fn settle<'a>(
    address: IpAddr,
    mut claims: Vec<Claim<'a>>,
    nodes: &Nodes<'a, '_>,
    candidates: &mut Candidates<'a>,
    problems: &mut Problems,
) -> Wanted<'a> {
    let nobody = Holders::default();
    let Holders { nodes: holders, proven } = nodes.holders.get(&address).unwrap_or(&nobody);
    // An address that only a node itself claims comes after the addresses that people write.
    claims.sort_by_key(|claim| !claim.nodes.is_empty() && !proven);
    let failback_of = |pool: Option<&PoolId>| {
        let pool = pool.and_then(|id| nodes.snapshot.placement(id));
        pool.map_or_else(Failback::default, |pool| pool.failback)
    };
    let mut usable: Vec<(Claim, usize)> = Vec::new();
    let mut unusable: Vec<(Claim, bool)> = Vec::new();
    for claim in claims {
        let selected = match claim.nodes.is_empty() {
            true => candidates.selected(claim.selectors.clone(), &nodes.index),
            false => candidates.intern(claim.nodes.iter().copied().collect()),
        };
        let holding: Vec<u32> =
            candidates.get(selected).iter().copied().filter(|node| holders.contains_key(node)).collect();
        let set = match holding.is_empty() && !claim.configured && !proven {
            true => {
                if let Some(place) = holders.keys().next() {
                    let message = unproven(address, nodes.names[*place as usize]);
                    problems.add(&claim.policy.id, ConditionKind::Degraded, Reason::AddressElsewhere, message);
                }
                selected
            }
            false => candidates.intern(holding),
        };
        match candidates.get(set).is_empty() {
            true => {
                let none_selected = candidates.get(selected).is_empty();
                unusable.push((claim, none_selected));
            }
            false => usable.push((claim, set)),
        }
    }
    if usable.is_empty() {
        let pool = unusable.iter().find_map(|(claim, _)| claim.pool);
        return Wanted {
            pool,
            elsewhere: unusable.iter().any(|(_, none_selected)| !none_selected),
            users: unusable.into_iter().map(|(claim, _)| (claim.policy, claim.weight)).collect(),
            fixed: None,
            candidates: candidates.intern(Vec::new()),
            failback: failback_of(pool),
            first: false,
            draining: false,
        };
    }
    for (claim, none_selected) in unusable {
        let (reason, message) = match none_selected {
            true if claim.selectors.is_empty() => (
                Reason::NoGateway,
                format!(
                    "the former gateways of {address} are gone, and its pool does not say which nodes may carry it: correct or create the pool"
                ),
            ),
            true => (
                Reason::NoGateway,
                format!("the nodeSelector for {address} selects no node: correct it or label nodes"),
            ),
            false => (Reason::AddressElsewhere, elsewhere(address, holders, nodes)),
        };
        problems.add(&claim.policy.id, ConditionKind::Degraded, reason, message);
    }
    let mut set: Option<usize> = None;
    let mut users: Vec<(&Policy, u32)> = Vec::new();
    // Pools may overlap: the address belongs to the first pool among those of its users.
    let mut pool = None;
    let first = usable.iter().all(|(claim, _)| claim.first);
    for (claim, own) in usable {
        let both = set.map_or(own, |set| candidates.intersection(set, own));
        if candidates.get(both).is_empty() {
            let message = format!(
                "policy {} lets {address} float over other nodes: make the nodeSelectors select a node in common, or use another address",
                users[0].0.id
            );
            problems.add(&claim.policy.id, ConditionKind::Conflicting, Reason::SelectorsDisagree, message);
        } else {
            set = Some(both);
            pool = pool.or(claim.pool);
            users.push((claim.policy, claim.weight));
        }
    }
    let set = set.unwrap_or_default();
    let owner = nodes.previous.egress_ips.get(&address).and_then(|plan| plan.owner.as_ref());
    let holding = || candidates.get(set).iter().filter_map(|place| Some((*place, *holders.get(place)?)));
    let serving = holding().find(|(place, _)| Some(nodes.names[*place as usize]) == owner);
    let fixed = serving.or_else(|| holding().next()).map(|(place, interface)| (place, Some(interface.to_owned())));
    let failback = failback_of(pool);
    Wanted { pool, users, fixed, candidates: set, elsewhere: false, failback, first, draining: false }
}

/// Returns the message for an address that a node, and nothing else, claims to have.
fn unproven(address: IpAddr, node: &NodeName) -> String {
    format!(
        "node {node} reports {address} (EgressNode {node}, status.addresses), but its Node object does not have it and the \
         nodeSelector does not select the node: the report is ignored; remove the address from that node"
    )
}

/// Returns the message for an address that is configured where it should not be, or nowhere.
fn elsewhere(address: IpAddr, holders: &BTreeMap<u32, &str>, nodes: &Nodes<'_, '_>) -> String {
    match holders.keys().next().map(|place| nodes.names[*place as usize]) {
        Some(node) => format!(
            "{address} is configured on node {node}, which the nodeSelector does not select: select that node, or remove the address from it"
        ),
        None => format!("{address} is configured on no selected node: configure it on one, or use a pool"),
    }
}
