//! Derives what this node's datapath should do from the objects, the links and the probes. Pure.

use super::{
    blocks::{self, Withheld},
    carriers::{self, Carriers},
    effective::Effective,
    facts::{Classes, Facts, Objects},
    history::Histories,
    transports,
};
use crate::{
    encode::{EgressView, EndpointView, NodeView, PolicyView, SlotView},
    health::ProbeState,
    model::{
        AddressSource, Announce, Bandwidth, Distribution, EndpointId, Existing, Family, Node, NodeName, Policy,
        PolicyId, Snapshot, Source, SubnetInfo, ZoneMode,
    },
    network::{
        EgressLink,
        classify::Roles,
        links::{Link, LinkTable},
    },
    plan::{EgressIpPlan, Plan, select},
};
use egress_common::{config::DatapathConfig, endpoint::policy_flags};
use ipnet::IpNet;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// The decisions that precede a view.
#[derive(Default)]
pub struct Decided {
    /// Which carriers the packets of each egress IP go to, and which node answers for it.
    pub carriers: Carriers,
    /// Leased blocks that this node takes no new ports from.
    pub withheld: Withheld,
    /// How long pods may send on connections from before a policy selected them.
    pub histories: Histories,
}

/// Returns the policies that select each pod of a node that has an object.
pub fn classes_of(snapshot: &Snapshot, node: &NodeName) -> Classes {
    let nowhere = Default::default();
    let labels = snapshot.nodes.get(node).map_or(&nowhere, |n| &n.labels);
    let own = snapshot.endpoints.values().filter(|e| e.node == *node);
    own.map(|e| {
        let namespace = snapshot.namespaces.get(&e.id.namespace).unwrap_or(&nowhere);
        (e.id.clone(), select::selecting(snapshot.policies.values(), &e.labels, namespace, labels))
    })
    .collect()
}

/// Returns the interfaces of pods by the addresses behind them: where a route leads, or else where the kernel has `found` them. An address
/// behind several interfaces stays where it was `before`, or is behind none: a pod may have taken another pod's. Also returns those
/// addresses.
pub fn interfaces(
    links: &LinkTable,
    roles: &Roles,
    found: &BTreeMap<IpAddr, BTreeSet<u32>>,
    before: &BTreeMap<EndpointId, EndpointView>,
) -> (BTreeMap<IpAddr, u32>, BTreeMap<IpAddr, BTreeSet<u32>>) {
    let mut interfaces = BTreeMap::new();
    let mut claimed = BTreeMap::new();
    let routed = links.host_routes.iter().filter(|(_, index)| roles.pods.contains(index));
    let routed: BTreeMap<IpAddr, u32> = routed.map(|(ip, index)| (*ip, *index)).collect();
    for (ip, found) in found.iter().filter(|(ip, _)| !routed.contains_key(*ip)) {
        let pods: BTreeSet<u32> = found.intersection(&roles.pods).copied().collect();
        let one = match pods.len() {
            0 | 1 => pods.first().copied(),
            _ => {
                let had =
                    before.values().find_map(|pod| pod.interfaces.get(ip)).filter(|had| pods.contains(had)).copied();
                claimed.insert(*ip, pods);
                had
            }
        };
        interfaces.extend(one.map(|index| (*ip, index)));
    }
    interfaces.extend(routed);
    (interfaces, claimed)
}

/// Returns the egress IPs of the policies that select pods of this node.
pub fn used(plan: &Plan, classes: &Classes) -> BTreeSet<IpAddr> {
    let in_force: BTreeSet<&PolicyId> = classes.values().flatten().collect();
    let used = plan.egress_ips.iter().filter(|(_, e)| e.users.keys().any(|policy| in_force.contains(policy)));
    used.map(|(address, _)| *address).collect()
}

/// Makes the view, and records which policies have come into force. `config` is the complete configuration record.
pub fn view(facts: &Facts, decided: &Decided, config: DatapathConfig, effective: &mut Effective) -> NodeView {
    let selected = classes_of(&facts.objects.snapshot, &facts.node);
    let endpoints = selected.into_iter().filter_map(|(id, class)| {
        let ips = facts.objects.snapshot.endpoints.get(&id)?.ips.clone();
        let history_until = decided.histories.until(&id);
        let interfaces = ips.iter().filter_map(|ip| Some((*ip, *facts.interfaces.get(ip)?))).collect();
        Some((id, EndpointView { ips, class, history_until, interfaces }))
    });
    let endpoints: BTreeMap<_, _> = endpoints.chain(facts.gone.clone()).collect();
    let in_force: BTreeSet<&PolicyId> = endpoints.values().flat_map(|e| &e.class).collect();
    let all = &facts.objects.snapshot.policies;
    let policies = all.values().filter(|p| in_force.contains(&p.id));
    let policies: BTreeMap<_, _> = policies.map(|p| (p.id.clone(), policy(facts, decided, p, &endpoints))).collect();
    effective.update(all, &policies, facts.now);
    let classes: BTreeSet<&BTreeSet<PolicyId>> =
        endpoints.values().map(|e| &e.class).filter(|c| !c.is_empty()).collect();
    let classes = classes.into_iter().map(|c| (c.clone(), effective.merge(facts, c))).collect();
    NodeView {
        node: Some(facts.node.clone()),
        endpoints,
        policies,
        classes,
        excepts: excepts(&facts.node, &facts.objects.snapshot, &facts.left_alone),
        elsewhere: elsewhere(&facts.objects.snapshot, &facts.node),
        api_server: facts.api_server,
        egress_ips: facts.objects.plan.egress_ips.iter().map(|(ip, e)| (*ip, egress(facts, decided, *ip, e))).collect(),
        nodes: facts.objects.snapshot.nodes.values().map(|n| (n.name.clone(), tunnel_addresses(n))).collect(),
        known_leases: facts.objects.plan.highest_leases(),
        // The agent fills in the transports: they depend on routes, which are looked up for the nodes that the view names.
        transports: BTreeMap::new(),
        macs: macs(facts),
        uplinks: macs_of(&facts.links, facts.roles.gateway_interfaces()),
        config: Some(config),
    }
}

/// Returns the MAC addresses of interfaces on which packets of egress IPs arrive.
fn macs_of(links: &LinkTable, indices: impl Iterator<Item = u32>) -> BTreeMap<u32, [u8; 6]> {
    indices.filter_map(|index| Some((index, links.links.get(&index)?.mac?.0))).collect()
}

/// Returns where a node receives tunnelled packets: those of its Kubernetes addresses that its agent prefers, or else all of them.
pub fn tunnel_addresses(node: &Node) -> Vec<IpAddr> {
    let reported: Vec<IpAddr> = node.report.iter().flat_map(|r| r.tunnel_addresses.iter().copied()).collect();
    if reported.is_empty() { node.addresses.iter().copied().collect() } else { reported }
}

/// Returns the MAC addresses that other nodes send from.
fn macs(facts: &Facts) -> BTreeMap<[u8; 6], NodeName> {
    let others = facts.objects.snapshot.nodes.values().filter(|n| n.name != facts.node);
    transports::macs(others.flat_map(|n| {
        let report = n.report.as_ref();
        let addresses = report.into_iter().flat_map(|r| r.tunnel_addresses.iter().filter_map(|a| r.macs.get(a)));
        addresses.map(|mac| (&n.name, *mac)).collect::<Vec<_>>()
    }))
}

/// Returns the destinations that no policy touches: the addresses of every Node object, all addresses of this node, the pods of every node,
/// Services, and the administrator's networks. An address that only another node claims is not excepted: it could be any server.
pub fn excepts(node: &NodeName, snapshot: &Snapshot, except_cidrs: &[IpNet]) -> BTreeSet<IpNet> {
    let nodes = snapshot.nodes.values();
    let hosts = nodes.flat_map(|n| {
        let own = n.report.iter().filter(|_| n.name == *node).flat_map(|r| r.addresses.iter().map(|a| a.net.addr()));
        n.addresses.iter().copied().chain(own).map(IpNet::from).chain(n.pod_cidrs.iter().copied())
    });
    let pods = snapshot.endpoints.values().flat_map(|e| e.ips.iter().copied().map(IpNet::from));
    let told = snapshot.services.iter().chain(&snapshot.pod_networks).chain(except_cidrs).copied();
    hosts.chain(pods).chain(told).map(|n| n.trunc()).collect()
}

/// Returns what belongs to pods of other nodes: their addresses, if known, and their nodes' pod networks. The networks count only for
/// families in which this node's pods have addresses of its own network: with other address management, Node objects say nothing about
/// where a pod is.
fn elsewhere(snapshot: &Snapshot, node: &NodeName) -> BTreeSet<IpNet> {
    let own = snapshot.nodes.get(node).map(|n| &n.pod_cidrs);
    let (here, away): (Vec<_>, Vec<_>) = snapshot.endpoints.values().partition(|e| e.node == *node);
    let here: Vec<IpAddr> = here.iter().flat_map(|e| e.ips.iter().copied()).collect();
    let is_told = |ipv6: bool| {
        let mut here = here.iter().filter(|ip| ip.is_ipv6() == ipv6).peekable();
        here.peek().is_some() && here.all(|ip| own.is_some_and(|nets| nets.iter().any(|net| net.contains(ip))))
    };
    let told = [false, true].map(is_told);
    let others = snapshot.nodes.values().filter(|n| n.name != *node).flat_map(|n| n.pod_cidrs.iter());
    let networks = others.filter(|net| told[usize::from(net.addr().is_ipv6())]).map(IpNet::trunc);
    networks.chain(away.iter().flat_map(|e| e.ips.iter().copied().map(IpNet::from))).collect()
}

fn policy(
    facts: &Facts,
    decided: &Decided,
    policy: &Policy,
    endpoints: &BTreeMap<EndpointId, EndpointView>,
) -> PolicyView {
    // The datapath has one record of the policy for all its pods.
    let mut classes = endpoints.values().map(|e| &e.class).filter(|class| class.contains(&policy.id));
    let leaves_as_node = classes.all(|class| policy.leaves_as_node(class));
    let mut flags = 0;
    for (set, bit) in [
        (policy.distribution == Distribution::PerEndpoint, policy_flags::PER_ENDPOINT),
        (leaves_as_node, policy_flags::ON_NO_GATEWAY_NODE_IP),
        (policy.existing == Existing::Drop, policy_flags::EXISTING_DROP),
    ] {
        flags |= if set { bit } else { 0 };
    }
    let assigned = facts.objects.plan.assignments.get(&policy.id).into_iter().flatten();
    let assignments = assigned
        .filter(|(id, _)| endpoints.contains_key(id))
        .map(|(id, a)| (id.clone(), [Family::V4, Family::V6].iter().filter_map(|f| a.get(*f)).collect()))
        .collect();
    let (slots, waits) = slots(facts, decided, policy);
    PolicyView { flags, slots, waits, assignments, unrecorded: false }
}

/// Returns the slots of a policy, and the families in which carriers answer but this node has no blocks. The slots that new flows may
/// choose have a carrier that answers and blocks that it knows, and are the policy's preferred ones.
fn slots(facts: &Facts, decided: &Decided, policy: &Policy) -> (Vec<SlotView>, BTreeSet<Family>) {
    let zone_of = |n: &NodeName| facts.objects.snapshot.nodes.get(n).and_then(|n| n.zone.clone());
    let own_zone = zone_of(&facts.node);
    let near = |owner: Option<&NodeName>| own_zone.is_some() && owner.and_then(zone_of) == own_zone;
    let users = facts.objects.plan.egress_ips.iter().filter_map(|(ip, e)| Some((*ip, e, *e.users.get(&policy.id)?)));
    let mut waits = BTreeSet::new();
    let mut slots = Vec::new();
    for (address, e, weight) in users {
        let owner = decided.carriers.gateway(address);
        let answers = answers(facts, decided, address) && (policy.zone != ZoneMode::Require || near(owner));
        let usable = answers && usable(facts, decided, address).next().is_some();
        if answers && weight > 0 && !e.draining && owner.is_some_and(|owner| grants(facts, owner)) {
            waits.insert(Family::of(address));
        }
        slots.push((SlotView { address, weight, usable }, owner));
    }
    for (slot, _) in slots.iter().filter(|(slot, _)| slot.usable && slot.weight > 0) {
        waits.remove(&Family::of(slot.address));
    }
    if policy.zone == ZoneMode::Prefer {
        prefer(&mut slots, near);
    }
    if policy.prefer_local_node {
        prefer(&mut slots, |owner| owner == Some(&facts.node));
    }
    (slots.into_iter().map(|(slot, _)| slot).collect(), waits)
}

/// If `first` holds for any usable slot of a family, leaves only those slots of that family usable.
fn prefer(slots: &mut [(SlotView, Option<&NodeName>)], first: impl Fn(Option<&NodeName>) -> bool) {
    for v4 in [true, false] {
        let of_family = |s: &SlotView| s.usable && s.address.is_ipv4() == v4;
        if slots.iter().any(|(s, owner)| of_family(s) && first(*owner)) {
            slots.iter_mut().filter(|(s, owner)| of_family(s) && !first(*owner)).for_each(|(s, _)| s.usable = false);
        }
    }
}

fn usable<'a>(facts: &'a Facts, decided: &'a Decided, address: IpAddr) -> impl Iterator<Item = u16> + use<'a> {
    blocks::usable(facts, &decided.carriers, &decided.withheld, address)
}

/// Returns whether the egress IPs of a gateway that answers may still get blocks: it is there, and says that it is able.
fn grants(facts: &Facts, gateway: &NodeName) -> bool {
    facts.objects.snapshot.nodes.contains_key(gateway) && facts.probes.get(gateway) != Some(&ProbeState::Unable)
}

/// Returns whether an egress IP has a gateway that new flows may use.
fn answers(facts: &Facts, decided: &Decided, address: IpAddr) -> bool {
    match decided.carriers.gateway(address) {
        None => false,
        Some(gateway) if *gateway == facts.node => !facts.objects.partial,
        Some(gateway) => facts.probes.get(gateway) != Some(&ProbeState::Dead),
    }
}

fn egress(facts: &Facts, decided: &Decided, address: IpAddr, e: &EgressIpPlan) -> EgressView {
    let (forwards, used) = (decided.carriers.forwards(address), decided.carriers.used(address));
    let leases = facts.objects.plan.blocks.get(&address).into_iter().flatten();
    EgressView {
        gateway: used.first().cloned(),
        spread: if used.len() > 1 { used.to_vec() } else { Vec::new() },
        forwards,
        epoch: e.epoch,
        interface: if forwards { uplink(&facts.links, &facts.roles, address, e) } else { None },
        node_address: e.fixed,
        here: facts.links.by_address(address).is_some(),
        silent: facts.silent || !e.fixed && !decided.carriers.answers(address),
        subnet: if forwards { subnet(facts, address, e) } else { None },
        limit: if forwards {
            limit(&facts.objects.snapshot, &decided.carriers, address, e).map(|[out, _]| out)
        } else {
            None
        },
        blocks: usable(facts, decided, address).collect(),
        leases: leases.map(|(block, lease)| (*block, lease.node.clone())).collect(),
    }
}

/// Returns the dedicated subnet that an egress IP of a pool lives in, if any.
fn subnet(facts: &Facts, address: IpAddr, e: &EgressIpPlan) -> Option<SubnetInfo> {
    carriers::attachment(&facts.objects.snapshot, e)
        .subnet
        .filter(|subnet| subnet.gateway.is_ipv4() == address.is_ipv4())
}

/// Returns the limits of an egress IP, outbound and inbound: the lowest of all policies that use it. Each of several carriers limits what
/// it sends out to its part; inbound packets arrive at the carrier that answers for the address, or at all of them.
fn limit(snapshot: &Snapshot, carriers: &Carriers, address: IpAddr, e: &EgressIpPlan) -> Option<[Bandwidth; 2]> {
    let limits = e.users.keys().filter_map(|policy| snapshot.policies.get(policy)?.bandwidth);
    let whole = limits.min_by_key(|limit| (limit.rate_bps, limit.burst_bytes))?;
    let parts = carriers.used(address).len().max(1) as u64;
    let part = |all: u64| (all / parts).max(1);
    let out = Bandwidth { rate_bps: part(whole.rate_bps), burst_bytes: part(whole.burst_bytes) };
    Some([out, if carriers::announce(snapshot, e) == Announce::Route { out } else { whole }])
}

/// Returns the limits, outbound and inbound, of the egress IPs that this node sends to the outside.
pub fn limits(snapshot: &Snapshot, plan: &Plan, carriers: &Carriers) -> BTreeMap<IpAddr, [Bandwidth; 2]> {
    let carried = plan.egress_ips.iter().filter(|(ip, _)| carriers.forwards(**ip));
    carried.filter_map(|(ip, e)| Some((*ip, limit(snapshot, carriers, *ip, e)?))).collect()
}

/// Returns the interface on which packets of an egress IP leave this node: the configured one, the one that has the address, the one whose
/// network contains it, or that of the default route.
pub fn uplink(links: &LinkTable, roles: &Roles, address: IpAddr, e: &EgressIpPlan) -> Option<u32> {
    let usable = |i: &u32| roles.uplinks.contains(i);
    let named = e.interface.as_deref().and_then(|name| links.by_name(name)).map(|l| l.index);
    let holder = links.by_address(address).map(|l| l.index);
    let on_link = links.links.values().filter(|l| usable(&l.index) && l.up);
    let on_link = on_link.filter_map(|l| {
        let longest = l.addresses.iter().filter(|n| n.contains(&address)).map(IpNet::prefix_len).max()?;
        Some((longest, l.index))
    });
    let on_link = on_link.max_by_key(|(len, index)| (*len, std::cmp::Reverse(*index))).map(|(_, index)| index);
    let default = links.default_route(address.is_ipv6()).map(|r| r.oif);
    named.or(holder).or(on_link).or(default)
}

/// Returns the floating egress IPs that this node might carry and whose packets could not leave it now, with the reason.
pub fn cut_off(facts: &Facts) -> BTreeMap<IpAddr, String> {
    let Facts { node, objects, links, roles, .. } = facts;
    let Objects { snapshot, plan, .. } = &**objects;
    let nowhere = Default::default();
    let labels = snapshot.nodes.get(node).map_or(&nowhere, |n| &n.labels);
    // Of a policy's gateways, only those with this very address may carry it, and an address of `Configured` never floats.
    let by_policy = |ip: IpAddr, policy: &PolicyId| {
        snapshot.policies.get(policy).is_some_and(|p| match &p.source {
            Source::Gateways(gateways) => {
                gateways.iter().any(|g| g.address == AddressSource::Ip(ip) && g.nodes.matches(labels))
            }
            Source::Pools(_) => false,
        })
    };
    let candidate = |ip: IpAddr, e: &EgressIpPlan| match &e.pool {
        Some(pool) => snapshot.placement(pool).map_or(e.carriers.contains(node), |p| p.nodes.matches(labels)),
        None => e.users.keys().any(|policy| by_policy(ip, policy)),
    };
    let all = plan.egress_ips.iter().filter(|(ip, e)| !e.fixed && candidate(**ip, e));
    // A link whose network contains the address counts even while it is down.
    let home = |ip: IpAddr| {
        let uplinks = roles.uplinks.iter().filter_map(|index| links.links.get(index));
        let longest = |l: &Link| l.addresses.iter().filter(|n| n.contains(&ip)).map(IpNet::prefix_len).max();
        uplinks.filter_map(|l| Some((longest(l)?, l))).max_by_key(|(len, l)| (*len, l.up)).map(|(_, l)| l)
    };
    all.filter_map(|(ip, e)| {
        let link = home(*ip).or_else(|| links.links.get(&uplink(links, roles, *ip, e)?))?;
        match (link.up, link.carrier) {
            (false, _) => Some((*ip, format!("{} is down", link.name))),
            (_, false) => Some((*ip, format!("{} has no carrier", link.name))),
            _ => None,
        }
    })
    .collect()
}

/// Returns the egress IPs that this node answers for, and where each is announced.
pub fn announced(facts: &Facts, decided: &Decided) -> BTreeMap<IpAddr, EgressLink> {
    let answered = facts.objects.plan.egress_ips.iter().filter(|(ip, _)| decided.carriers.answers(**ip));
    answered
        .filter_map(|(ip, e)| {
            let index = uplink(&facts.links, &facts.roles, *ip, e)?;
            let mac = facts.links.links.get(&index)?.mac?;
            Some((*ip, EgressLink { interface: index, mac, subnet: subnet(facts, *ip, e) }))
        })
        .collect()
}
