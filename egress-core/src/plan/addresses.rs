//! Gathers the egress IPs that all policies use, and the nodes that may own each.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::candidates::Candidates;
use super::claims::{Claim, Wanted, settle};
use super::drain::{self, Draining};
use super::index::{LabelIndex, mentioned_keys};
use super::outcome::Problems;
use super::pools;
use super::types::{EgressIpPlan, Plan};
use crate::health::Health;
use crate::model::{AddressSource, Family, Gateway, NodeChoice, NodeName, Policy, PolicyId, PoolId, Snapshot, Source};

/// Returns all egress IPs that policies use.
pub fn gather<'a>(
    snapshot: &'a Snapshot,
    health: &Health,
    previous: &'a Plan,
    candidates: &mut Candidates<'a>,
    problems: &mut Problems,
) -> BTreeMap<IpAddr, Wanted<'a>> {
    let mut by_precedence: Vec<&Policy> = snapshot.policies.values().collect();
    by_precedence.sort_by(|a, b| a.precedence(b));
    let names = snapshot.nodes.keys().collect();
    let holders = holders(snapshot);
    let nodes = Nodes { snapshot, health, previous, names, index: node_index(snapshot), holders };

    let mut named: BTreeMap<IpAddr, BTreeSet<&PolicyId>> = BTreeMap::new();
    let mut of_policy: Vec<BTreeMap<IpAddr, Claim>> = Vec::new();
    for policy in &by_precedence {
        let mut claims = BTreeMap::new();
        if let Source::Gateways(gateways) = &policy.source {
            gateways.iter().for_each(|gateway| nodes.claim(policy, gateway, &mut claims));
        }
        claims.keys().for_each(|address| {
            named.entry(*address).or_default().insert(&policy.id);
        });
        of_policy.push(claims);
    }
    let mut draining = drain::draining(snapshot, health, previous);
    let allocation = pools::allocate(snapshot, &by_precedence, previous, &mut named, &mut draining, problems);
    let mut claims: BTreeMap<IpAddr, Vec<Claim>> = BTreeMap::new();
    for (policy, gateways) in by_precedence.into_iter().zip(of_policy) {
        let own = gateways.into_iter().filter(|(address, _)| named.contains_key(address));
        let leaving = nodes.leaving(policy, &draining);
        let allocated = allocation.get(&policy.id).into_iter().flatten();
        let allocated = allocated.map(|(ip, pool)| (*ip, nodes.out_of_pool(policy, 1, *ip, Some(pool))));
        for (address, claim) in own.chain(allocated).chain(leaving) {
            claims.entry(address).or_default().push(claim);
        }
    }

    claims
        .into_iter()
        .map(|(address, claims)| {
            let draining = draining.contains_key(&address);
            (address, Wanted { draining, ..settle(address, claims, &nodes, candidates, problems) })
        })
        .collect()
}

fn node_index(snapshot: &Snapshot) -> LabelIndex<'_> {
    let of_policies = snapshot.policies.values().flat_map(|policy| match &policy.source {
        Source::Gateways(gateways) => gateways.iter().map(|g| &g.nodes).collect(),
        Source::Pools(_) => Vec::new(),
    });
    let pools = snapshot.pools.values().chain(snapshot.unreadable_pools.values().flatten());
    let keys = mentioned_keys(of_policies.chain(pools.map(|pool| &pool.nodes)));
    LabelIndex::new(snapshot.nodes.values().map(|node| &node.labels), &keys)
}

/// The nodes that have an address as their own.
#[derive(Debug, Default)]
pub struct Holders<'a> {
    /// The nodes, with the interface.
    pub nodes: BTreeMap<u32, &'a str>,
    /// Whether their Node objects confirm it; then nodes that only claim the address do not count.
    pub proven: bool,
}

fn holders(snapshot: &Snapshot) -> BTreeMap<IpAddr, Holders<'_>> {
    let mut all: BTreeMap<IpAddr, Holders<'_>> = BTreeMap::new();
    for (place, node) in snapshot.nodes.values().enumerate() {
        for address in node.report.iter().flat_map(|report| &report.addresses) {
            let holders = all.entry(address.net.addr()).or_default();
            let proven = node.addresses.contains(&address.net.addr());
            if proven && !holders.proven {
                *holders = Holders { nodes: BTreeMap::new(), proven };
            }
            if proven == holders.proven {
                holders.nodes.entry(place as u32).or_insert(&address.interface);
            }
        }
    }
    all
}

/// The nodes that addresses may be on, and what is known of them.
pub struct Nodes<'a, 'p> {
    /// all objects
    pub snapshot: &'a Snapshot,
    /// which nodes are alive
    pub health: &'p Health,
    /// the plan so far
    pub previous: &'p Plan,
    /// the names of `Snapshot::nodes` by place
    pub names: Vec<&'a NodeName>,
    /// their labels
    pub index: LabelIndex<'a>,
    /// the nodes that have an address as their own
    pub holders: BTreeMap<IpAddr, Holders<'a>>,
}

impl<'a> Nodes<'a, '_> {
    fn claim(&self, policy: &'a Policy, gateway: &'a Gateway, claims: &mut BTreeMap<IpAddr, Claim<'a>>) {
        let mut add = |address, configured, node: Option<u32>| {
            let claim = claims.entry(address).or_insert_with(|| Claim {
                policy,
                weight: 0,
                pool: None,
                selectors: BTreeSet::new(),
                nodes: BTreeSet::new(),
                configured: true,
                first: true,
            });
            claim.first &= gateway.choice == NodeChoice::First;
            claim.weight = claim.weight.saturating_add(gateway.weight);
            claim.configured &= configured;
            match node {
                Some(node) => claim.nodes.insert(node),
                None => claim.selectors.insert(&gateway.nodes),
            };
        };
        let wanted: Option<&String> = match &gateway.address {
            AddressSource::Ip(address) => return add(*address, false, None),
            AddressSource::Configured(address) => return add(*address, true, None),
            AddressSource::Interface(interface) => Some(interface),
            AddressSource::DefaultRoute => None,
        };
        for family in Family::ALL.into_iter().filter(|family| policy.serves(*family)) {
            let mut own: Vec<(u32, IpAddr)> = Vec::new();
            for place in self.index.matching(&gateway.nodes) {
                let node = &self.snapshot.nodes[self.names[place as usize]];
                let address = node.first_address(family, |a| match wanted {
                    Some(interface) => a.interface == *interface,
                    None => a.default_route,
                });
                own.extend(address.map(|a| (place, a.net.addr())));
            }
            if gateway.choice == NodeChoice::First {
                own = self.first(&policy.id, own).into_iter().collect();
            }
            own.into_iter().for_each(|(node, address)| add(address, true, Some(node)));
        }
    }

    /// Returns a policy's claim on an address from a pool. If the pool's selector is not known, the carriers so far remain.
    fn out_of_pool(&self, policy: &'a Policy, weight: u32, address: IpAddr, pool: Option<&'a PoolId>) -> Claim<'a> {
        let known = pool.and_then(|id| self.snapshot.placement(id));
        let before = self.previous.egress_ips.get(&address).filter(|_| known.is_none());
        let place = |name: &NodeName| self.names.binary_search(&name).ok().map(|place| place as u32);
        let nodes = before.into_iter().flat_map(EgressIpPlan::order).filter_map(place).collect();
        let selectors = known.map(|pool| &pool.nodes).into_iter().collect();
        Claim { policy, weight, pool, selectors, nodes, configured: false, first: false }
    }

    /// Returns a policy's claims on its addresses while they drain.
    fn leaving(&self, policy: &'a Policy, draining: &Draining<'a>) -> Vec<(IpAddr, Claim<'a>)> {
        let of_policy = draining.iter().filter_map(|(address, ip)| Some((*address, *ip, *ip.users.get(&policy.id)?)));
        let claim = |(address, ip, weight): (IpAddr, &'a EgressIpPlan, u32)| {
            (address, self.out_of_pool(policy, weight, address, ip.pool.as_ref()))
        };
        of_policy.map(claim).collect()
    }

    /// Returns, in this order: the node that serves, if it is able; the first able node; the node that serves; the first node.
    fn first(&self, policy: &PolicyId, own: Vec<(u32, IpAddr)>) -> Option<(u32, IpAddr)> {
        let able = |(place, _): &&(u32, IpAddr)| {
            let name = self.names[*place as usize];
            let node = &self.snapshot.nodes[name];
            let health = self.health.of(name);
            node.ready && !node.draining && (health.is_fresh() || health.is_unasked())
        };
        let serves = |(place, address): &&(u32, IpAddr)| {
            let before = self.previous.egress_ips.get(address).filter(|plan| plan.users.contains_key(policy));
            before.is_some_and(|plan| plan.owner.as_ref() == Some(self.names[*place as usize]))
        };
        let able_ones = || own.iter().filter(able);
        able_ones().find(serves).or(able_ones().next()).or(own.iter().find(serves)).or(own.first()).copied()
    }
}
