//! Decides what is left out of the tables if not everything fits. Pure.
//!
//! Nothing that is left out leaks: a refused policy drops what leads to it, and a pod that is left out is an unknown source, which the
//! programs hold. Present entries share the tables with the entries that replace them. So one write may leave out something that the next
//! one has room for: it is dropped between the two.

use super::{
    Encoder, NodeView,
    tables::{Overflow, Table, Tables},
};
use crate::{
    model::{EndpointId, Family, PolicyId, Trouble, TroubleKind},
    plan::EgressIpPlan,
};
use egress_common::{
    config::{DatapathConfig, flags},
    endpoint::{NO_POLICY, Policy, RouteKey, policy_flags},
    limits::{self, MAGLEV_CHUNK},
    net,
};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    iter::successors,
    net::IpAddr,
};

/// What does not fit into the maps, and which map is too small.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// Policies.
    pub policies: BTreeMap<PolicyId, Overflow>,
    /// Egress IPs.
    pub egress_ips: BTreeMap<IpAddr, Overflow>,
    /// Pods, with the policies that select them.
    pub pods: BTreeMap<EndpointId, (BTreeSet<PolicyId>, Overflow)>,
    /// Destinations that no policy should touch.
    pub excepts: BTreeMap<IpNet, Overflow>,
}

impl Refused {
    /// Returns the troubles to report, for each policy concerned.
    pub fn troubles(&self, plan: &BTreeMap<IpAddr, EgressIpPlan>) -> Vec<Trouble> {
        let trouble = |policy: &PolicyId, message| Trouble {
            policy: policy.clone(),
            kind: TroubleKind::DoesNotFit,
            pod: None,
            message,
        };
        let policies = self.policies.iter().map(|(policy, overflow)| {
            let message = format!(
                "{overflow}: packets of its pods are dropped, even to some destinations of other policies; use fewer destinations or gateways"
            );
            trouble(policy, message)
        });
        let addresses = self.egress_ips.iter().flat_map(|(address, overflow)| {
            let users = plan.get(address).into_iter().flat_map(|e| e.users.keys());
            let message = format!("{overflow}: {address} is not used there; use fewer egress IPs");
            users.map(move |policy| trouble(policy, message.clone()))
        });
        let pods = self.pods.iter().flat_map(move |(pod, (class, overflow))| {
            let message =
                format!("{overflow}: everything that it sends to the outside is dropped; use fewer pods there");
            class.iter().map(move |policy| Trouble { pod: Some(pod.clone()), ..trouble(policy, message.clone()) })
        });
        policies.chain(addresses).chain(pods).collect()
    }

    /// Returns the error to report for the node as a whole.
    pub fn errors(&self) -> Option<String> {
        let overflow = self.excepts.values().next()?;
        Some(format!(
            "{overflow}: policies apply to {} networks that should be excepted, such as {}; name fewer and larger ones",
            self.excepts.len(),
            self.excepts.keys().next()?
        ))
    }

    /// Returns whether something is refused here that is not refused in `other`.
    pub fn has_more_than(&self, other: &Self) -> bool {
        self.policies.keys().any(|policy| !other.policies.contains_key(policy))
            || self.egress_ips.keys().any(|address| !other.egress_ips.contains_key(address))
            || self.pods.keys().any(|pod| !other.pods.contains_key(pod))
            || self.excepts.keys().any(|net| !other.excepts.contains_key(net))
    }
}

/// Something that is left out so that everything else fits.
enum Blamed {
    Policy(PolicyId),
    EgressIp(IpAddr),
    Pod(EndpointId),
    Except(IpNet),
}

/// Returns the policy that each route of a class exists for: the one that it leads to. A route that leads to no policy exists for the
/// policy that has the prefix around it and excludes this prefix.
fn owners<P: Copy>(routes: impl Iterator<Item = ((u32, IpNet), Option<P>)>) -> BTreeMap<(u32, IpNet), Option<P>> {
    let routes: BTreeMap<_, _> = routes.collect();
    let mut around: Vec<((u32, IpNet), Option<P>)> = Vec::new();
    let owner = |((class, net), policy): ((u32, IpNet), Option<P>)| {
        while around.pop_if(|((of, outer), _)| *of != class || !outer.contains(&net)).is_some() {}
        let owner = policy.or_else(|| around.last()?.1);
        around.push(((class, net), owner));
        ((class, net), owner)
    };
    routes.into_iter().map(owner).collect()
}

/// Returns the numbers of the policies that the routes of a family are due to.
fn route_owners<A: Copy>(
    routes: &BTreeMap<(RouteKey<A>, u32), u32>,
    ip: impl Fn(A) -> IpAddr,
) -> BTreeMap<(u32, IpNet), u32> {
    let route = |((key, len), policy): (&(RouteKey<A>, u32), &u32)| {
        let net = IpNet::new(ip(key.addr), (*len - 32) as u8).ok()?;
        Some(((key.class, net), (*policy != NO_POLICY).then_some(*policy)))
    };
    let owners = owners(routes.iter().filter_map(route)).into_iter();
    owners.map(|(key, owner)| (key, owner.unwrap_or(NO_POLICY))).collect()
}

fn routes_v4(tables: &Tables) -> BTreeMap<(u32, IpNet), u32> {
    route_owners(&tables.v4.routes, |a| net::from_v4(a).into())
}

fn routes_v6(tables: &Tables) -> BTreeMap<(u32, IpNet), u32> {
    route_owners(&tables.v6.routes, |a| net::from_v6(a).into())
}

fn chunks(tables: &Tables) -> BTreeMap<u32, u32> {
    let of = |p: &Policy| p.table..p.table + p.table_len.div_ceil(MAGLEV_CHUNK as u32);
    tables.policies.iter().flat_map(|(key, p)| of(p).map(|chunk| (chunk, key.policy))).collect()
}

/// Removes a policy's slots, and its record if the records overflow. Whatever it steers is dropped, with as few entries as possible: the
/// prefix around each of its destinations leads to it, or the whole family if there is no such prefix. So no other policy sends a packet
/// that it steers, and no other policy's exclusion lets one pass. What it excludes itself is dropped as well.
fn refuse(view: &mut NodeView, policy: &PolicyId, table: Table) {
    if let Some(view) = view.policies.get_mut(policy) {
        view.slots.clear();
        view.assignments.clear();
        view.flags &= !policy_flags::ON_NO_GATEWAY_NODE_IP;
        view.unrecorded |= table == Table::Policies;
    }
    for (_, table) in view.classes.iter_mut().filter(|(class, _)| class.contains(policy)) {
        let owners = owners(table.iter().map(|(net, winner)| ((0, *net), winner.as_ref())));
        let owner = |net: &IpNet| owners.get(&(0, *net)).copied().flatten();
        let its: Vec<IpNet> = table.iter().map(|(net, _)| *net).filter(|net| owner(net) == Some(policy)).collect();
        let others = table.iter().filter(|(net, _)| owner(net).is_some_and(|owner| owner != policy));
        let mut rest: BTreeMap<IpNet, Option<PolicyId>> = others.cloned().collect();
        for net in its {
            let around = successors(Some(net), IpNet::supernet).find(|outer| rest.contains_key(outer));
            rest.insert(around.unwrap_or(Family::of_net(&net).everything()), Some(policy.clone()));
        }
        *table = rest.into_iter().collect();
    }
}

impl Encoder {
    /// Encodes ([`encode`](Self::encode)) as much of the view as fits, and removes the rest from it. A refused policy drops what it steers
    /// and what is around that ([`refuse`]).
    ///
    /// Policies that grow are refused, the largest growth first, since the present entries fit.
    pub fn fit(&mut self, view: &mut NodeView, present: &Tables) -> Result<(Tables, Refused), Overflow> {
        let mut refused = Refused::default();
        loop {
            let (next, tables) = self.try_encode(view, present);
            let Err(overflow) = tables.check(present) else {
                *self = next;
                return Ok((tables, refused));
            };
            let blamed = next.blame(view, &tables, present, &overflow, &refused);
            if blamed.is_empty() {
                return Err(overflow);
            }
            for one in blamed {
                let overflow = overflow.clone();
                match one {
                    Blamed::Policy(policy) => {
                        refuse(view, &policy, overflow.table);
                        refused.policies.insert(policy, overflow);
                    }
                    Blamed::EgressIp(address) => {
                        view.egress_ips.remove(&address);
                        refused.egress_ips.insert(address, overflow);
                    }
                    Blamed::Pod(pod) => {
                        let class = view.endpoints.remove(&pod).map_or_else(BTreeSet::new, |pod| pod.class);
                        view.config = view.config.map(hold);
                        refused.pods.insert(pod, (class, overflow));
                    }
                    Blamed::Except(net) => {
                        view.excepts.remove(&net);
                        refused.excepts.insert(net, overflow);
                    }
                }
            }
            let left: BTreeSet<&BTreeSet<PolicyId>> = view.endpoints.values().map(|pod| &pod.class).collect();
            view.classes.retain(|class, _| left.contains(class));
        }
    }

    /// Returns what to leave out of a table that overflows, as much as it takes; empty if nothing in that table can be left out.
    fn blame(
        &self,
        view: &NodeView,
        tables: &Tables,
        present: &Tables,
        overflow: &Overflow,
        refused: &Refused,
    ) -> Vec<Blamed> {
        let missing = overflow.wanted - overflow.capacity;
        let holds_more = |id: &PolicyId| match overflow.table {
            Table::Policies => view.policies.get(id).is_some_and(|policy| !policy.unrecorded),
            _ => !refused.policies.contains_key(id),
        };
        let new_pods = |is_new: &dyn Fn(&IpAddr) -> bool| {
            let new = view.endpoints.iter().rev().filter(|(_, pod)| pod.ips.iter().any(is_new));
            new.take(missing).map(|(id, _)| Blamed::Pod(id.clone())).collect()
        };
        let new_egress_ips = |is_new: &dyn Fn(&IpAddr) -> bool| {
            view.egress_ips.keys().rev().filter(|ip| is_new(ip)).take(missing).map(|ip| Blamed::EgressIp(*ip)).collect()
        };
        let new_excepts = |is_new: &dyn Fn(&IpNet) -> bool| {
            view.excepts.iter().rev().filter(|net| is_new(net)).take(missing).map(|net| Blamed::Except(*net)).collect()
        };
        match overflow.table {
            Table::RoutesV4 => self.growing(&holds_more, &routes_v4(tables), &routes_v4(present), missing),
            Table::RoutesV6 => self.growing(&holds_more, &routes_v6(tables), &routes_v6(present), missing),
            Table::Policies => {
                let keys = |tables: &Tables| tables.policies.keys().map(|key| (*key, key.policy)).collect();
                self.growing(&holds_more, &keys(tables), &keys(present), missing)
            }
            Table::Members => {
                let keys = |tables: &Tables| tables.members.keys().map(|key| (*key, key.policy)).collect();
                self.growing(&holds_more, &keys(tables), &keys(present), missing)
            }
            Table::Assignments => {
                let keys = |tables: &Tables| tables.assignments.keys().map(|key| (*key, key.policy)).collect();
                self.growing(&holds_more, &keys(tables), &keys(present), missing)
            }
            Table::Maglev => self.growing(&holds_more, &chunks(tables), &chunks(present), missing),
            Table::EndpointsV4 => {
                new_pods(&|ip| matches!(ip, IpAddr::V4(a) if !present.v4.endpoints.contains_key(&net::v4(*a))))
            }
            Table::EndpointsV6 => {
                new_pods(&|ip| matches!(ip, IpAddr::V6(a) if !present.v6.endpoints.contains_key(&net::v6(*a))))
            }
            Table::Classes => {
                let behind =
                    |class| self.classes.0.get(class).is_some_and(|number| *number as usize >= limits::MAX_CLASSES);
                let pods = view.endpoints.iter().filter(|(_, pod)| behind(&pod.class));
                pods.map(|(id, _)| Blamed::Pod(id.clone())).collect()
            }
            Table::EgressIps => {
                let behind = |ip: &IpAddr| {
                    self.egress.0.get(ip).is_some_and(|number| *number as usize >= limits::MAX_EGRESS_IPS)
                };
                view.egress_ips.keys().filter(|ip| behind(ip)).map(|ip| Blamed::EgressIp(*ip)).collect()
            }
            Table::EgressIndexV4 => {
                new_egress_ips(&|ip| matches!(ip, IpAddr::V4(a) if !present.v4.egress_index.contains_key(&net::v4(*a))))
            }
            Table::EgressIndexV6 => {
                new_egress_ips(&|ip| matches!(ip, IpAddr::V6(a) if !present.v6.egress_index.contains_key(&net::v6(*a))))
            }
            Table::ExceptsV4 => new_excepts(
                &|n| matches!(n, IpNet::V4(n) if !present.v4.excepts.contains_key(&(net::v4(n.network()), n.prefix_len().into()))),
            ),
            Table::ExceptsV6 => new_excepts(
                &|n| matches!(n, IpNet::V6(n) if !present.v6.excepts.contains_key(&(net::v6(n.network()), n.prefix_len().into()))),
            ),
            // These follow the cluster's nodes and this node's interfaces. There are never more accounts than numbers for them.
            Table::Accounts | Table::NodeIndex | Table::MacIndex | Table::Uplinks | Table::Names | Table::Nodes => {
                Vec::new()
            }
        }
    }

    /// Returns the policies that want more entries of a table than they have, as many as it takes; if none does, those with entries that
    /// replace others. Entries come with the numbers of their policies. A policy without `holds_more` has given up all that it can.
    fn growing<K: Ord>(
        &self,
        holds_more: &dyn Fn(&PolicyId) -> bool,
        wanted: &BTreeMap<K, u32>,
        present: &BTreeMap<K, u32>,
        missing: usize,
    ) -> Vec<Blamed> {
        fn tally<'a>(policies: impl Iterator<Item = &'a u32>) -> BTreeMap<u32, usize> {
            let mut sums = BTreeMap::new();
            policies.for_each(|policy| *sums.entry(*policy).or_default() += 1);
            sums
        }
        // An entry that only passes from one policy to another takes no room: a refused policy has entries of others for a while.
        fn only<K: Ord>(these: &BTreeMap<K, u32>, those: &BTreeMap<K, u32>) -> BTreeMap<u32, usize> {
            tally(these.iter().filter(|(key, _)| !those.contains_key(key)).map(|(_, policy)| policy))
        }
        let most = |of: &BTreeMap<u32, usize>, had: &BTreeMap<u32, usize>| {
            let policies = self.policies.0.iter().filter(|(id, _)| holds_more(id));
            let growth = policies.filter_map(|(id, number)| {
                let more = of.get(number)?.saturating_sub(had.get(number).copied().unwrap_or(0));
                (more > 0).then_some((more, id))
            });
            let mut growth: Vec<(usize, &PolicyId)> = growth.collect();
            growth.sort_by(|a, b| b.cmp(a));
            let mut missing = missing;
            let enough = growth.into_iter().take_while(|(more, _)| {
                let takes = missing > 0;
                missing = missing.saturating_sub(*more);
                takes
            });
            enough.map(|(_, id)| Blamed::Policy(id.clone())).collect::<Vec<_>>()
        };
        let new = only(wanted, present);
        let growing = most(&new, &only(present, wanted));
        if growing.is_empty() { most(&new, &BTreeMap::new()) } else { growing }
    }
}

fn hold(config: DatapathConfig) -> DatapathConfig {
    DatapathConfig { flags: config.flags | flags::HOLD, ..config }
}

/// Returns the present tables, but with unknown sources held: these are new pods, since nothing else can be written.
pub fn held(present: &Tables) -> Tables {
    Tables { config: present.config.map(hold), ..present.clone() }
}

#[cfg(test)]
#[path = "fit_tests.rs"]
mod tests;
