//! Gives policies addresses out of pools.
//!
//! A policy keeps what it has. An address that was allocated belongs to one policy; several policies share one only if all
//! of them ask for that very address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;

use super::drain::Draining;
use super::outcome::Problems;
use super::types::{ConditionKind, Plan, Reason};
use crate::model::{Family, Labels, Node, Policy, PolicyId, Pool, PoolId, PoolRequest, Snapshot, Source};

/// The addresses of each policy, with the pools that they came from.
pub type Allocation<'a> = BTreeMap<&'a PolicyId, BTreeMap<IpAddr, &'a PoolId>>;

/// Allocates for all policies. `by_precedence` holds all policies in order of precedence; `named` says which policies name which
/// addresses as gateways do. Returns the allocation, and removes from `named` what belongs to others, and from `draining` what policies
/// ask for by name.
pub fn allocate<'a>(
    snapshot: &'a Snapshot,
    by_precedence: &[&'a Policy],
    previous: &Plan,
    named: &mut BTreeMap<IpAddr, BTreeSet<&'a PolicyId>>,
    draining: &mut Draining<'_>,
    problems: &mut Problems,
) -> Allocation<'a> {
    let mut quotas = Quotas { snapshot, left: BTreeMap::new() };
    let of_policy = |policy: &&'a Policy| requests(&mut quotas, policy, problems);
    let mut requests: Vec<Request> = by_precedence.iter().flat_map(of_policy).collect();
    let mut asked = named.clone();
    for request in &requests {
        for address in &request.ips {
            asked.entry(*address).or_default().insert(request.policy);
        }
    }

    keep_apart(by_precedence, previous, &mut asked, &mut requests, problems);

    let mut owned: BTreeMap<IpAddr, &PolicyId> = BTreeMap::new();
    let mut allocation = Allocation::new();
    let mut missing: Vec<(&Request, u32)> = Vec::new();
    let before = holdings(previous);
    for request in &requests {
        let mut wanted = request.count.saturating_sub(request.ips.len() as u32);
        for address in before.get(&(request.policy, &request.pool.id)).into_iter().flatten() {
            if wanted > 0 && request.may_keep(*address, previous, &asked, &owned) {
                owned.insert(*address, request.policy);
                allocation.entry(request.policy).or_default().insert(*address, &request.pool.id);
                wanted -= 1;
            }
        }
        if wanted > 0 {
            missing.push((request, wanted));
        }
    }
    for (address, policies) in &asked {
        for policy in policies.iter().filter(|_| owned.contains_key(address)) {
            let message = format!(
                "{address} was allocated to policy {} from a pool: ask for another address, or let that policy ask for this one too",
                owned[address]
            );
            problems.add(policy, ConditionKind::Conflicting, Reason::AddressInUse, message);
        }
    }
    named.retain(|address, _| !owned.contains_key(address));
    for request in &requests {
        for address in request.ips.iter().filter(|address| !owned.contains_key(address)) {
            allocation.entry(request.policy).or_default().entry(*address).or_insert(&request.pool.id);
        }
    }

    draining.retain(|address, _| !asked.contains_key(address));
    let taken = asked.into_keys().chain(owned.into_keys()).chain(draining.keys().copied());
    let mut free = Free::new(snapshot, taken.collect());
    for (request, wanted) in missing {
        for got in 0..wanted {
            match free.take(request.pool, request.family) {
                Some(address) => {
                    allocation.entry(request.policy).or_default().insert(address, &request.pool.id);
                }
                None => {
                    let message = format!(
                        "pool {} has no free {} address: {} of {} given; enlarge its ipRanges or ask for fewer addresses",
                        request.pool.id,
                        request.family,
                        request.count - (wanted - got),
                        request.count
                    );
                    problems.add(request.policy, ConditionKind::Degraded, Reason::PoolExhausted, message);
                    break;
                }
            }
        }
    }
    allocation
}

/// What a policy wants from a pool in one family.
struct Request<'a> {
    policy: &'a PolicyId,
    pool: &'a Pool,
    family: Family,
    count: u32,
    ips: BTreeSet<IpAddr>,
}

impl Request<'_> {
    /// Whether an address that was allocated to the policy remains its own.
    fn may_keep(
        &self,
        address: IpAddr,
        previous: &Plan,
        asked: &BTreeMap<IpAddr, BTreeSet<&PolicyId>>,
        owned: &BTreeMap<IpAddr, &PolicyId>,
    ) -> bool {
        let shared_before = |other: &&PolicyId| previous.egress_ips[&address].users.contains_key(*other);
        Family::of(address) == self.family
            && self.pool.contains(address)
            && !self.ips.contains(&address)
            && !owned.contains_key(&address)
            && !asked.get(&address).is_some_and(|policies| policies.iter().any(shared_before))
    }
}

fn requests<'a>(quotas: &mut Quotas<'a>, policy: &'a Policy, problems: &mut Problems) -> Vec<Request<'a>> {
    let Source::Pools(asked) = &policy.source else { return Vec::new() };
    let mut asked: Vec<&PoolRequest> = asked.iter().collect();
    asked.sort_by_key(|request| &request.pool);
    let mut requests = Vec::new();
    for PoolRequest { pool: id, count, ips } in asked {
        let Some(pool) = quotas.snapshot.pools.get(id) else {
            let message = format!("pool {id} does not exist: create it, or name another in egressIPPools");
            problems.add(&policy.id, ConditionKind::Degraded, Reason::PoolNotFound, message);
            continue;
        };
        for address in ips.iter().filter(|address| !pool.contains(**address)) {
            let message = format!(
                "egressIPs: {address} is in none of the ranges of pool {id}: use one from {}",
                pool.ranges
                    .iter()
                    .collect::<BTreeSet<_>>()
                    .into_iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(", ")
            );
            problems.add(&policy.id, ConditionKind::Degraded, Reason::AddressNotInPool, message);
        }
        for family in Family::ALL.into_iter().filter(|family| policy.serves(*family) && pool.serves(*family)) {
            let mut ips: BTreeSet<IpAddr> =
                ips.iter().copied().filter(|ip| Family::of(*ip) == family && pool.contains(*ip)).collect();
            let count = quotas.take(policy, pool, (*count).max(ips.len() as u32), problems);
            while ips.len() > count as usize {
                ips.pop_last();
            }
            if count > 0 {
                requests.push(Request { policy: &policy.id, pool, family, count, ips });
            }
        }
    }
    requests
}

/// How many addresses of each pool the policies of each namespace may still have.
struct Quotas<'a> {
    snapshot: &'a Snapshot,
    left: BTreeMap<(&'a PoolId, &'a str), Option<u32>>,
}

impl<'a> Quotas<'a> {
    /// How many of `count` addresses a policy may have.
    fn take(&mut self, policy: &'a Policy, pool: &'a Pool, count: u32, problems: &mut Problems) -> u32 {
        let Some(namespace) = policy.id.namespace() else { return count };
        let nothing = Labels::new();
        let labels = self.snapshot.namespaces.get(namespace).unwrap_or(&nothing);
        let left = self.left.entry((&pool.id, namespace)).or_insert_with(|| pool.quota(labels));
        let Some(left) = left else {
            let message = format!(
                "pool {} is not for namespace {namespace}: name another in egressIPPools, or ask who runs the pool to let its \
                 allowedNamespaces select the namespace",
                pool.id
            );
            problems.add(&policy.id, ConditionKind::Degraded, Reason::NotAllowed, message);
            return 0;
        };
        let granted = count.min(*left);
        *left -= granted;
        if granted < count {
            let message = format!(
                "{granted} of {count} addresses of pool {} given: the policies of namespace {namespace} have as many as its quotas allow; \
                 ask for fewer, or ask who runs the pool to raise maxEgressIPs",
                pool.id
            );
            problems.add(&policy.id, ConditionKind::Degraded, Reason::QuotaExceeded, message);
        }
        granted
    }
}

/// Lets an address that policies ask for by name be shared within one namespace only, or among cluster-scoped policies, which come first:
/// a team does not get the address by which the outside knows another team. Of several namespaces the one that has it keeps it.
fn keep_apart<'a>(
    by_precedence: &[&'a Policy],
    previous: &Plan,
    asked: &mut BTreeMap<IpAddr, BTreeSet<&'a PolicyId>>,
    requests: &mut [Request<'a>],
    problems: &mut Problems,
) {
    for (address, policies) in asked.iter_mut() {
        if policies.iter().all(|policy| policy.namespace() == policies.first().and_then(|first| first.namespace())) {
            continue;
        }
        let has =
            |policy: &&&PolicyId| previous.egress_ips.get(address).is_some_and(|ip| ip.users.contains_key(**policy));
        let first = by_precedence.iter().map(|policy| &policy.id).find(|policy| policies.contains(policy));
        let holder = policies.iter().find(|policy| policy.namespace().is_none()).or(policies.iter().find(has));
        let Some(keeper) = holder.copied().or(first).map(|policy| policy.namespace()) else { continue };
        policies.retain(|policy| {
            let keeps = policy.namespace() == keeper;
            if !keeps {
                let message = format!(
                    "{address} is used outside the namespace: remove it from egressIPs, or ask for another one"
                );
                problems.add(policy, ConditionKind::Conflicting, Reason::AddressInUse, message);
            }
            keeps
        });
        for request in requests.iter_mut().filter(|request| request.policy.namespace() != keeper) {
            request.count -= u32::from(request.ips.remove(address));
        }
    }
}

/// What each policy had from each pool.
fn holdings(previous: &Plan) -> BTreeMap<(&PolicyId, &PoolId), Vec<IpAddr>> {
    let mut holdings: BTreeMap<_, Vec<IpAddr>> = BTreeMap::new();
    for (address, plan) in &previous.egress_ips {
        for (policy, pool) in plan.users.keys().filter_map(|policy| Some((policy, plan.pool.as_ref()?))) {
            holdings.entry((policy, pool)).or_default().push(*address);
        }
    }
    holdings
}

/// The free addresses of all pools, lowest first.
///
/// Addresses that only a node claims to have are allocated last: in ranges that hold addresses of gateways this keeps them out
/// of use, and a node that claims a whole range takes nothing away.
struct Free<'a> {
    taken: BTreeSet<IpAddr>,
    claimed: Rc<BTreeSet<IpAddr>>,
    remaining: BTreeMap<(&'a PoolId, Family), Box<dyn Iterator<Item = IpAddr>>>,
}

impl<'a> Free<'a> {
    fn new(snapshot: &'a Snapshot, mut taken: BTreeSet<IpAddr>) -> Self {
        let reported = |node: &'a Node| node.report.iter().flat_map(|r| r.addresses.iter().map(|a| a.net.addr()));
        taken.extend(snapshot.nodes.values().flat_map(|node| node.addresses.iter().copied()));
        let claimed = Rc::new(snapshot.nodes.values().flat_map(reported).collect());
        taken.extend(snapshot.pools.values().filter_map(|pool| Some(pool.subnet?.gateway)));
        Self { taken, claimed, remaining: BTreeMap::new() }
    }

    fn take(&mut self, pool: &'a Pool, family: Family) -> Option<IpAddr> {
        let remaining = self.remaining.entry((&pool.id, family)).or_insert_with(|| {
            let mut ranges = pool.ranges.clone();
            ranges.sort();
            ranges.retain(|range| range.family() == family);
            let last: Vec<IpAddr> =
                self.claimed.iter().copied().filter(|a| ranges.iter().any(|r| r.contains(*a))).collect();
            let claimed = Rc::clone(&self.claimed);
            let unclaimed =
                ranges.into_iter().flat_map(|range| range.addresses()).filter(move |a| !claimed.contains(a));
            Box::new(unclaimed.chain(last))
        });
        let address = remaining.find(|address| !self.taken.contains(address))?;
        self.taken.insert(address);
        Some(address)
    }
}
