//! Gives policies addresses from pools.
//!
//! A policy keeps what it has. An allocated address belongs to one policy; several policies share an address only if all of them request
//! that very address. Addresses that drain belong to the policies that had them, unless these get them again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::rc::Rc;

use super::drain::Draining;
use super::outcome::Problems;
use super::types::{ConditionKind, Plan, Reason};
use crate::model::{Family, Labels, Node, Policy, PolicyId, PolicyKind, Pool, PoolId, PoolRequest, Snapshot, Source};

/// The addresses of each policy, with the pools that they came from.
pub type Allocation<'a> = BTreeMap<&'a PolicyId, BTreeMap<IpAddr, &'a PoolId>>;

/// Allocates for all policies. `by_precedence` holds all policies in order of precedence; `named` says which policies name which addresses
/// as gateways do. Returns the allocation. Removes from `named` what belongs to others, and from `draining` what policies request by name,
/// or get again.
pub fn allocate<'a>(
    snapshot: &'a Snapshot,
    by_precedence: &[&'a Policy],
    previous: &Plan,
    named: &mut BTreeMap<IpAddr, BTreeSet<&'a PolicyId>>,
    draining: &mut Draining<'_>,
    problems: &mut Problems,
) -> Allocation<'a> {
    let mut quotas = Quotas { snapshot, left: BTreeMap::new() };
    let (reserved, before) = (Reserved::new(snapshot), holdings(previous));
    let of_policy = |policy: &&'a Policy| requests(&mut quotas, &reserved, (previous, &before), policy, problems);
    let mut requests: Vec<Request> = by_precedence.iter().flat_map(of_policy).collect();
    let asked = grant((snapshot, previous), named, &mut quotas, &mut requests, problems);

    let mut owned: BTreeMap<IpAddr, &PolicyId> = BTreeMap::new();
    let mut allocation = Allocation::new();
    let mut missing: Vec<(&Request, &Pool, u32)> = Vec::new();
    for request in &requests {
        let mut wanted = request.count.saturating_sub(request.ips.len() as u32);
        for address in before.get(&(request.policy, request.id)).into_iter().flatten() {
            if wanted > 0 && request.may_keep(*address, (previous, &reserved), &asked, &owned) {
                owned.insert(*address, request.policy);
                allocation.entry(request.policy).or_default().insert(*address, request.id);
                wanted -= 1;
            }
        }
        if let Some(pool) = request.pool.filter(|_| wanted > 0) {
            missing.push((request, pool, wanted));
        }
    }
    for (address, policies) in &asked {
        for policy in policies.iter().filter(|_| owned.contains_key(address)) {
            let message = format!(
                "{address} was allocated to policy {} from a pool: request another address, or let that policy request this one too",
                owned[address]
            );
            problems.add(policy, ConditionKind::Conflicting, Reason::AddressInUse, message);
        }
    }
    named.retain(|address, _| !owned.contains_key(address));
    for request in &requests {
        for address in request.ips.iter().filter(|address| !owned.contains_key(address)) {
            allocation.entry(request.policy).or_default().entry(*address).or_insert(request.id);
        }
    }

    draining.retain(|address, _| !asked.contains_key(address) && !owned.contains_key(address));
    let taken = asked.into_keys().chain(owned.into_keys()).chain(draining.keys().copied());
    let mut free = Free::new(snapshot, reserved, taken.collect());
    for (request, pool, wanted) in missing {
        for got in 0..wanted {
            match free.take(pool, request.family) {
                Some(address) => {
                    allocation.entry(request.policy).or_default().insert(address, request.id);
                }
                None => {
                    let message = format!(
                        "pool {} has no free {} address: {} of {} given; enlarge its ipRanges or request fewer addresses",
                        request.id,
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
    id: &'a PoolId,
    /// Absent if the pool is unreadable: the request is then for what the policy has of it.
    pool: Option<&'a Pool>,
    family: Family,
    count: u32,
    ips: BTreeSet<IpAddr>,
}

impl Request<'_> {
    /// Returns whether an address that was allocated to the policy stays allocated to it.
    fn may_keep(
        &self,
        address: IpAddr,
        (previous, reserved): (&Plan, &Reserved),
        asked: &BTreeMap<IpAddr, BTreeSet<&PolicyId>>,
        owned: &BTreeMap<IpAddr, &PolicyId>,
    ) -> bool {
        let shared_before = |other: &&PolicyId| previous.egress_ips[&address].users.contains_key(*other);
        let is_in_pool = || match self.pool {
            Some(pool) => pool.contains(address),
            None => !previous.egress_ips[&address].draining,
        };
        Family::of(address) == self.family
            && is_in_pool()
            && !self.ips.contains(&address)
            && !reserved.withheld_from(self.policy).any(|(theirs, _)| theirs.contains(&address))
            && !owned.contains_key(&address)
            && !asked.get(&address).is_some_and(|policies| policies.iter().any(shared_before))
    }
}

/// Addresses that already belong to routers or nodes.
struct Reserved {
    /// The next hops of all pools' subnets.
    routers: BTreeSet<IpAddr>,
    /// The addresses of Node objects. What only a node itself claims to have is not among them: it could keep any address from others.
    nodes: BTreeSet<IpAddr>,
}

impl Reserved {
    fn new(snapshot: &Snapshot) -> Self {
        let routers = snapshot.pools.values().filter_map(|pool| Some(pool.subnet?.gateway)).collect();
        Self { routers, nodes: snapshot.nodes.values().flat_map(|node| node.addresses.iter().copied()).collect() }
    }

    /// Returns the addresses that a policy may not have, with what has them. A gateway would answer for an address in place of the router,
    /// and a team would leave with a node's address; an administrator may let a node's own address serve.
    fn withheld_from(&self, policy: &PolicyId) -> impl Iterator<Item = (&BTreeSet<IpAddr>, &'static str)> {
        let nodes = (policy.kind == PolicyKind::Namespaced).then_some((&self.nodes, "nodes"));
        std::iter::once((&self.routers, "routers (subnetInfo.gateway of a pool)")).chain(nodes)
    }

    /// Removes from `ips` what a policy requests by name and may not have.
    fn withhold(&self, policy: &PolicyId, ips: &mut BTreeSet<IpAddr>, problems: &mut Problems) {
        for (theirs, whose) in self.withheld_from(policy) {
            let withheld: Vec<IpAddr> = ips.intersection(theirs).copied().collect();
            if withheld.is_empty() {
                continue;
            }
            ips.retain(|ip| !theirs.contains(ip));
            let message = format!("egressIPs names addresses of {whose}: {}; ask for others", listed(&withheld));
            problems.add(policy, ConditionKind::Degraded, Reason::AddressInUse, message);
        }
    }
}

/// How many addresses or ranges a message lists.
const SHOWN: usize = 3;

/// Returns the first few items, and how many more there are.
fn listed<'i, T: fmt::Display + 'i>(items: impl IntoIterator<Item = &'i T>) -> String {
    let mut items = items.into_iter().map(ToString::to_string);
    let shown = items.by_ref().take(SHOWN).collect::<Vec<_>>().join(", ");
    match items.count() {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The addresses that each policy had from each pool, first those that do not drain.
type Holdings<'p> = BTreeMap<(&'p PolicyId, &'p PoolId), Vec<IpAddr>>;

fn requests<'a>(
    quotas: &mut Quotas<'a>,
    reserved: &Reserved,
    before: (&Plan, &Holdings<'_>),
    policy: &'a Policy,
    problems: &mut Problems,
) -> Vec<Request<'a>> {
    let Source::Pools(asked) = &policy.source else { return Vec::new() };
    let mut asked: Vec<&PoolRequest> = asked.iter().collect();
    asked.sort_by_key(|request| &request.pool);
    let mut requests = Vec::new();
    for PoolRequest { pool: id, count, ips } in asked {
        let Some(pool) = quotas.snapshot.pools.get(id) else {
            if quotas.snapshot.unreadable_pools.contains_key(id) {
                let message = format!(
                    "pool {id} is invalid: the policy keeps the addresses that it has, and gets no others; the pool's condition Ready says \
                     what to correct"
                );
                problems.add(&policy.id, ConditionKind::Degraded, Reason::Invalid, message);
                requests.extend(kept(before, policy, id, ips));
            } else {
                let message = format!("pool {id} does not exist: create it, or name another in egressIPPools");
                problems.add(&policy.id, ConditionKind::Degraded, Reason::PoolNotFound, message);
            }
            continue;
        };
        if !quotas.allow(policy, pool, problems) {
            continue;
        }
        let (mut named, foreign): (BTreeSet<IpAddr>, BTreeSet<IpAddr>) =
            ips.iter().copied().partition(|ip| pool.contains(*ip));
        reserved.withhold(&policy.id, &mut named, problems);
        for family in Family::ALL.into_iter().filter(|family| policy.serves(*family) && pool.serves(*family)) {
            let ips: BTreeSet<IpAddr> = named.iter().copied().filter(|ip| Family::of(*ip) == family).collect();
            let count = (*count).max(ips.len() as u32);
            requests.push(Request { policy: &policy.id, id, pool: Some(pool), family, count, ips });
        }
        if !foreign.is_empty() {
            let ranges: BTreeSet<_> = pool.ranges.iter().collect();
            let message = format!(
                "egressIPs names addresses that are in none of the ranges of pool {id}: {}; use some from {}",
                listed(&foreign),
                listed(ranges)
            );
            problems.add(&policy.id, ConditionKind::Degraded, Reason::AddressNotInPool, message);
        }
    }
    requests
}

/// Returns what a policy has of an unreadable pool, as requests for exactly that.
fn kept<'a>(
    (previous, before): (&Plan, &Holdings<'_>),
    policy: &'a Policy,
    id: &'a PoolId,
    named: &BTreeSet<IpAddr>,
) -> impl Iterator<Item = Request<'a>> {
    let has = before.get(&(&policy.id, id)).into_iter().flatten().copied();
    let has: BTreeSet<IpAddr> = has.filter(|address| !previous.egress_ips[address].draining).collect();
    Family::ALL.into_iter().map(move |family| {
        let has: BTreeSet<IpAddr> = has.iter().copied().filter(|address| Family::of(*address) == family).collect();
        let ips = has.intersection(named).copied().collect();
        Request { policy: &policy.id, id, pool: None, family, count: has.len() as u32, ips }
    })
}

/// How many addresses of each pool the policies of each namespace may still have.
struct Quotas<'a> {
    snapshot: &'a Snapshot,
    left: BTreeMap<(&'a PoolId, &'a str), Option<u32>>,
}

impl<'a> Quotas<'a> {
    /// Returns whether a policy may use a pool.
    fn allow(&mut self, policy: &'a Policy, pool: &'a Pool, problems: &mut Problems) -> bool {
        let Some(namespace) = policy.id.namespace() else { return true };
        let nothing = Labels::new();
        let labels = self.snapshot.namespaces.get(namespace).unwrap_or(&nothing);
        let left = self.left.entry((&pool.id, namespace)).or_insert_with(|| pool.quota(labels));
        if left.is_none() {
            let message = format!(
                "pool {} is not available to namespace {namespace}: name another in egressIPPools, or ask the pool's administrator to let its \
                 allowedNamespaces select the namespace",
                pool.id
            );
            problems.add(&policy.id, ConditionKind::Degraded, Reason::NotAllowed, message);
        }
        left.is_some()
    }

    /// Returns how many of `count` addresses a policy may have from a pool that it may use.
    fn take(&mut self, policy: &'a PolicyId, pool: &'a Pool, count: u32, problems: &mut Problems) -> u32 {
        let Some(namespace) = policy.namespace() else { return count };
        let Some(Some(left)) = self.left.get_mut(&(&pool.id, namespace)) else { return 0 };
        let granted = count.min(*left);
        *left -= granted;
        if granted < count {
            let message = format!(
                "{granted} of {count} addresses of pool {} given: the policies of namespace {namespace} already have as many as its quotas allow; \
                 request fewer, or ask the pool's administrator to raise maxEgressIPs",
                pool.id
            );
            problems.add(policy, ConditionKind::Degraded, Reason::QuotaExceeded, message);
        }
        granted
    }
}

/// Decides which of the addresses that policies request by name they may have, and then takes the quotas of namespaces: an address that is
/// refused takes no quota from other policies of the namespace. Returns which policies may have which addresses.
///
/// Such an address is shared only within one namespace, or among cluster-scoped policies, which come first: a team does not get the address
/// by which the outside knows another team, nor while it drains. It gets one only after a plan in which the other team does not have it.
fn grant<'a>(
    (snapshot, previous): (&Snapshot, &Plan),
    named: &BTreeMap<IpAddr, BTreeSet<&'a PolicyId>>,
    quotas: &mut Quotas<'a>,
    requests: &mut Vec<Request<'a>>,
    problems: &mut Problems,
) -> BTreeMap<IpAddr, BTreeSet<&'a PolicyId>> {
    let mut asked = named.clone();
    let (cluster_scoped, namespaced): (Vec<_>, Vec<_>) =
        requests.iter_mut().partition(|request| request.policy.namespace().is_none());
    for request in cluster_scoped {
        for address in &request.ips {
            asked.entry(*address).or_default().insert(request.policy);
        }
    }
    for request in namespaced {
        let policy = request.policy;
        let is_other = |user: &PolicyId| user.namespace() != policy.namespace();
        let is_refused = |address: &IpAddr| {
            let has = |user: &PolicyId| snapshot.policies.contains_key(user) && is_other(user);
            asked.get(address).is_some_and(|policies| policies.iter().any(|other| is_other(other)))
                || previous.egress_ips.get(address).is_some_and(|ip| ip.users.keys().any(has))
        };
        let refused: Vec<IpAddr> = request.ips.iter().copied().filter(is_refused).collect();
        for address in refused {
            request.ips.remove(&address);
            request.count -= 1;
            let message =
                format!("{address} is used outside the namespace: remove it from egressIPs, or request another one");
            problems.add(policy, ConditionKind::Conflicting, Reason::AddressInUse, message);
        }
        if let Some(pool) = request.pool {
            request.count = quotas.take(policy, pool, request.count, problems);
        }
        while request.ips.len() > request.count as usize {
            request.ips.pop_last();
        }
        for address in &request.ips {
            asked.entry(*address).or_default().insert(policy);
        }
    }
    requests.retain(|request| request.count > 0);
    asked
}

fn holdings(previous: &Plan) -> Holdings<'_> {
    let mut holdings = Holdings::new();
    for (address, plan) in &previous.egress_ips {
        for (policy, pool) in plan.users.keys().filter_map(|policy| Some((policy, plan.pool.as_ref()?))) {
            holdings.entry((policy, pool)).or_default().push(*address);
        }
    }
    // An address that was put back into its pool serves again if there is room for it, and drains on otherwise. No other one makes room.
    for addresses in holdings.values_mut() {
        addresses.sort_by_key(|address| previous.egress_ips[address].draining);
    }
    holdings
}

/// The free addresses of all pools, lowest first.
///
/// Addresses that only a node claims to have are allocated last: in ranges that hold gateways' addresses this keeps them out of use, and a
/// node that claims a whole range takes nothing away.
struct Free<'a> {
    taken: BTreeSet<IpAddr>,
    claimed: Rc<BTreeSet<IpAddr>>,
    remaining: BTreeMap<(&'a PoolId, Family), Box<dyn Iterator<Item = IpAddr>>>,
}

impl<'a> Free<'a> {
    fn new(snapshot: &'a Snapshot, reserved: Reserved, mut taken: BTreeSet<IpAddr>) -> Self {
        let reported = |node: &'a Node| node.report.iter().flat_map(|r| r.addresses.iter().map(|a| a.net.addr()));
        let claimed = Rc::new(snapshot.nodes.values().flat_map(reported).collect());
        taken.extend(reserved.routers.into_iter().chain(reserved.nodes));
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
