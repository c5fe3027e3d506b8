//! What is left out of the tables if not everything fits. Pure.

use super::{
    Encoder, NodeView, PolicyView, egress_numbers, maglev_len,
    tables::{Overflow, Tables},
};
use crate::{
    model::{PolicyId, Trouble, TroubleKind},
    plan::EgressIpPlan,
};
use egress_common::{
    limits::{self, MAGLEV_CHUNK},
    net,
};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// What does not fit into the maps, and what it does not fit into.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// Policies.
    pub policies: BTreeMap<PolicyId, Overflow>,
    /// Egress IPs.
    pub egress_ips: BTreeMap<IpAddr, Overflow>,
}

impl Refused {
    /// What to report, for each policy concerned.
    pub fn troubles(&self, plan: &BTreeMap<IpAddr, EgressIpPlan>) -> Vec<Trouble> {
        let trouble = |policy: &PolicyId, message| Trouble {
            policy: policy.clone(),
            kind: TroubleKind::DoesNotFit,
            pod: None,
            message,
        };
        let policies = self.policies.iter().map(|(policy, overflow)| {
            let message =
                format!("{overflow}: everything that its pods send is dropped; use fewer destinations or gateways");
            trouble(policy, message)
        });
        let addresses = self.egress_ips.iter().flat_map(|(address, overflow)| {
            let users = plan.get(address).into_iter().flat_map(|e| e.users.keys());
            let message = format!("{overflow}: {address} is not used there; use fewer egress IPs");
            users.map(move |policy| trouble(policy, message.clone()))
        });
        policies.chain(addresses).collect()
    }
}

/// Removes a policy's slots, and leads to it whatever no other policy of its pods matches, in the families that it steers.
fn refuse(view: &mut NodeView, policy: &PolicyId) {
    if let Some(view) = view.policies.get_mut(policy) {
        view.slots.clear();
        view.assignments.clear();
    }
    for (_, table) in view.classes.iter_mut().filter(|(class, _)| class.contains(policy)) {
        let is_its = |(_, winner): &(IpNet, Option<PolicyId>)| winner.as_ref() == Some(policy);
        let families: BTreeSet<bool> =
            table.iter().filter(|e| is_its(e)).map(|(net, _)| net.addr().is_ipv4()).collect();
        table.retain(|entry| !is_its(entry));
        for v4 in families {
            let all = if v4 { IpNet::V4(Default::default()) } else { IpNet::V6(Default::default()) };
            if !table.iter().any(|(net, winner)| *net == all && winner.is_some()) {
                table.retain(|(net, _)| *net != all);
                table.push((all, Some(policy.clone())));
            }
        }
    }
}

/// The egress IPs for which a table of them has no place, if it is one of those that overflows.
fn new_egress_ips(view: &NodeView, present: &Tables, overflow: &Overflow) -> Vec<IpAddr> {
    let new = |address: &&IpAddr| match (overflow.map, address) {
        ("EGRESS_IPS", _) => true,
        ("EGRESS_INDEX_V4", IpAddr::V4(a)) => !present.v4.egress_index.contains_key(&net::v4(*a)),
        ("EGRESS_INDEX_V6", IpAddr::V6(a)) => !present.v6.egress_index.contains_key(&net::v6(*a)),
        _ => false,
    };
    let new = view.egress_ips.keys().filter(new).copied();
    if overflow.map == "EGRESS_IPS" {
        let numbers = egress_numbers(view, present);
        let behind = |a: &IpAddr| numbers.0.get(a).is_some_and(|n| *n as usize >= limits::MAX_EGRESS_IPS);
        return new.filter(behind).collect();
    }
    new.rev().take(overflow.wanted - overflow.capacity).collect()
}

impl Encoder {
    /// [`encode`](Self::encode) of as much of the view as fits; the rest is removed from it. A policy that is refused drops what it
    /// selects: it keeps no slot, and its destinations, or anything that no other policy of the same pods matches, lead to it.
    ///
    /// Policies that grow are refused, the largest growth first, since what was there has fitted.
    pub fn fit(&mut self, view: &mut NodeView, present: &Tables) -> Result<(Tables, Refused), Overflow> {
        let mut refused = Refused::default();
        loop {
            let overflow = match self.encode(view, present) {
                Ok(tables) => return Ok((tables, refused)),
                Err(overflow) => overflow,
            };
            let addresses = new_egress_ips(view, present, &overflow);
            let mut policies = self.growing(view, present, &overflow);
            policies.retain(|policy| !refused.policies.contains_key(policy));
            if addresses.is_empty() && policies.is_empty() {
                return Err(overflow);
            }
            for address in addresses {
                view.egress_ips.remove(&address);
                refused.egress_ips.insert(address, overflow.clone());
            }
            for policy in policies {
                refuse(view, &policy);
                refused.policies.insert(policy, overflow.clone());
            }
        }
    }

    /// The policies that want more entries of a table than they have, as many of them as it takes.
    fn growing(&self, view: &NodeView, present: &Tables, overflow: &Overflow) -> Vec<PolicyId> {
        fn tally<K: Ord>(items: impl IntoIterator<Item = (K, usize)>) -> BTreeMap<K, usize> {
            let mut sums = BTreeMap::new();
            items.into_iter().for_each(|(key, n)| *sums.entry(key).or_default() += n);
            sums
        }
        let routes = |v4: bool| {
            let all = view.classes.values().flatten().filter(move |(net, _)| net.addr().is_ipv4() == v4);
            tally(all.filter_map(|(_, winner)| Some((winner.as_ref()?, 1))))
        };
        let of = |count: &dyn Fn(&PolicyView) -> usize| view.policies.iter().map(|(p, v)| (p, count(v))).collect();
        let (wanted, has): (BTreeMap<&PolicyId, usize>, BTreeMap<u32, usize>) = match overflow.map {
            "ROUTES_V4" => (routes(true), tally(present.v4.routes.values().map(|p| (*p, 1)))),
            "ROUTES_V6" => (routes(false), tally(present.v6.routes.values().map(|p| (*p, 1)))),
            "MEMBERS" => (of(&|p| p.slots.len()), tally(present.members.keys().map(|k| (k.policy, 1)))),
            "ASSIGNMENTS" => {
                let count = |p: &PolicyView| p.assignments.values().map(BTreeSet::len).sum();
                (of(&count), tally(present.assignments.keys().map(|k| (k.policy, 1))))
            }
            "MAGLEV" => {
                let chunks = |len: u32| (len as usize).div_ceil(MAGLEV_CHUNK);
                let count = |p: &PolicyView| [4, 6].iter().map(|f| chunks(maglev_len(p, *f))).sum();
                (of(&count), tally(present.policies.iter().map(|(k, p)| (k.policy, chunks(p.table_len)))))
            }
            _ => return Vec::new(),
        };
        let had = |p: &PolicyId| self.policies.0.get(p).and_then(|number| has.get(number)).copied().unwrap_or(0);
        let mut growth: Vec<(usize, &PolicyId)> =
            wanted.into_iter().map(|(p, n)| (n.saturating_sub(had(p)), p)).filter(|(n, _)| *n > 0).collect();
        growth.sort_by(|a, b| b.0.cmp(&a.0).then(b.1.cmp(a.1)));
        let mut missing = overflow.wanted - overflow.capacity;
        let enough = growth.into_iter().take_while(|(n, _)| {
            let takes = missing > 0;
            missing = missing.saturating_sub(*n);
            takes
        });
        enough.map(|(_, p)| p.clone()).collect()
    }
}
