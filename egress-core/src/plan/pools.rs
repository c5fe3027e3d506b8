//! Gives policies addresses out of pools.
//!
//! What a policy has it keeps. An address that was allocated belongs to one policy; several policies share one only by all
//! asking for that very address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;

use super::drain::Draining;
use super::outcome::Problems;
use super::types::{ConditionKind, Plan, Reason};
use crate::model::{Family, Node, Policy, PolicyId, Pool, PoolId, PoolRequest, Snapshot, Source};

/// The addresses of each policy, with the pools that they came from.
pub type Allocation<'a> = BTreeMap<&'a PolicyId, BTreeMap<IpAddr, &'a PoolId>>;

/// Allocates for all policies. `by_precedence` holds all policies, first who comes first; `named` which policies name which
/// addresses as gateways do. Returns the allocation, and takes out of `named` what belongs to others, and out of `draining` what policies
/// ask for by itself.
pub fn allocate<'a>(
    snapshot: &'a Snapshot,
    by_precedence: &[&'a Policy],
    previous: &Plan,
    named: &mut BTreeMap<IpAddr, BTreeSet<&'a PolicyId>>,
    draining: &mut Draining<'_>,
    problems: &mut Problems,
) -> Allocation<'a> {
    let requests: Vec<Request> = by_precedence.iter().flat_map(|policy| requests(snapshot, policy, problems)).collect();
    let mut asked = named.clone();
    for request in &requests {
        for address in &request.ips {
            asked.entry(*address).or_default().insert(request.policy);
        }
    }

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
                "{address} was allocated to policy {} out of a pool: ask for another address, or let that policy ask for this one too",
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

/// What a policy wants of a pool in one family.
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

fn requests<'a>(snapshot: &'a Snapshot, policy: &'a Policy, problems: &mut Problems) -> Vec<Request<'a>> {
    let Source::Pools(asked) = &policy.source else { return Vec::new() };
    let mut asked: Vec<&PoolRequest> = asked.iter().collect();
    asked.sort_by_key(|request| &request.pool);
    let mut requests = Vec::new();
    for PoolRequest { pool: id, count, ips } in asked {
        let Some(pool) = snapshot.pools.get(id) else {
            let message = format!("pool {id} does not exist: create it, or name another in egressIPPools");
            problems.add(&policy.id, ConditionKind::Degraded, Reason::PoolNotFound, message);
            continue;
        };
        for address in ips.iter().filter(|address| !pool.contains(**address)) {
            let message = format!(
                "egressIPs: {address} is in none of the ranges of pool {id}: take one out of {}",
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
            let ips: BTreeSet<IpAddr> =
                ips.iter().copied().filter(|ip| Family::of(*ip) == family && pool.contains(*ip)).collect();
            requests.push(Request { policy: &policy.id, pool, family, count: (*count).max(ips.len() as u32), ips });
        }
    }
    requests
}

/// What each policy had out of each pool.
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
/// What only a node says that it has is given out last: in ranges that hold addresses of gateways it keeps them out of use, and
/// a node that claims a whole range takes nothing away.
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
