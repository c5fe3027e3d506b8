//! Decides which carriers packets of each egress IP go to, and which egress IPs this node answers ARP and NDP for or has routes to. Pure.
//!
//! The plan lists the carriers of an egress IP in order. With `outbound: Owner`, packets go to the first carrier that answers probes;
//! otherwise flows are spread over all that do. The first able carrier answers for the address. When it stops answering probes, or its
//! answers say that it is not able, the next carrier takes over without coordination. Gateways keep no flow state, so the outside sees no
//! difference if packets change carriers or two carriers answer for a moment.

use super::facts::{Facts, LeftInUse};
use crate::{
    health::ProbeState,
    model::{Announce, NetworkAttachment, NodeName, NodeReport, Outbound, Pool, Snapshot},
    plan::{EgressIpPlan, Plan},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

/// How long a node keeps forwarding for an egress IP after it ceased to be a carrier and its own report ceased to list the address: the
/// time for every source node to read that.
pub const LINGER: Duration = Duration::from_secs(5);

/// The agent's decisions about carriers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carriers {
    used: BTreeMap<IpAddr, Vec<NodeName>>,
    turned_away: BTreeSet<IpAddr>,
    answered: BTreeSet<IpAddr>,
    advertised: BTreeSet<IpAddr>,
    replying: BTreeMap<IpAddr, Vec<NodeName>>,
    carried: BTreeSet<IpAddr>,
    lingers: BTreeMap<IpAddr, Duration>,
}

/// How good a carrier is, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    /// It does not answer probes, or its node is gone.
    Dead,
    /// It has not confirmed yet that it carries the address and knows this node's blocks of it.
    Unready,
    /// It forwards, but says that it is not able to answer for addresses.
    Unable,
    /// It carries the address.
    Good,
}

impl Carriers {
    /// Restores the state of an earlier agent, which left the kernel forwarding for the `carried` egress IPs, answering for those marked
    /// `true`, and sending to the `used` carriers.
    pub fn recover(carried: &BTreeMap<IpAddr, bool>, used: &BTreeMap<IpAddr, LeftInUse>) -> Self {
        let answered = carried.iter().filter(|(_, answers)| **answers).map(|(ip, _)| *ip).collect();
        let used = used.iter().map(|(ip, left)| (*ip, left.carriers.clone())).collect();
        Self { carried: carried.keys().copied().collect(), answered, used, ..Self::default() }
    }

    /// Updates the decisions from the plan, reports and probes.
    pub fn update(&mut self, c: &Facts) {
        let planned = |ip: &IpAddr| c.objects.plan.egress_ips.get(ip).is_some_and(|e| e.owner.is_some());
        self.used.retain(|ip, _| planned(ip));
        let before = std::mem::take(&mut self.answered);
        let carried = std::mem::take(&mut self.carried);
        self.turned_away.clear();
        self.advertised.clear();
        self.replying.clear();
        for (ip, e) in c.objects.plan.egress_ips.iter().filter(|(_, e)| e.owner.is_some()) {
            let needed = self.needed(c, *ip);
            let worth: Vec<_> = e.order().map(|name| (name, worth(c, (*ip, e), needed, name))).collect();
            let used = use_of(outbound(&c.objects.snapshot, e), &worth);
            if self.used(*ip).iter().any(|name| !used.contains(name)) {
                self.turned_away.insert(*ip);
            }
            self.used.insert(*ip, used);
            if announce(&c.objects.snapshot, e) == Announce::Route {
                self.replying.insert(*ip, replying(c, *ip, e));
            }
            let Some(place) = worth.iter().position(|(name, _)| **name == c.node) else { continue };
            // Without all leases, this node cannot tell which node a reply belongs to.
            if c.objects.partial {
                continue;
            }
            self.carried.insert(*ip);
            // A node that answers yields only to an earlier good carrier. Another takes over only if all earlier ones are dead or unable.
            let yields = if before.contains(ip) { Worth::Good } else { Worth::Unready };
            let taken = worth[..place].iter().any(|(name, worth)| {
                let known = before.contains(ip) && c.probes.get(*name) == Some(&ProbeState::Unknown);
                *worth >= yields && *worth != Worth::Unable && !known
            });
            match announce(&c.objects.snapshot, e) {
                _ if !c.able || e.fixed => {}
                Announce::Arp if !taken && (!c.doubted || before.contains(ip)) => {
                    self.answered.insert(*ip);
                }
                // Once this node has read back its own report, source nodes use no block that it does not know.
                Announce::Route if c.objects.snapshot.report(&c.node).is_some_and(|own| own.carries.contains(ip)) => {
                    self.advertised.insert(*ip);
                }
                _ => {}
            }
        }
        self.lingers.retain(|ip, until| c.now < *until && c.objects.plan.egress_ips.contains_key(ip));
        // While cut off from the API server, this node cannot withdraw its report, and the plan may make it a carrier again meanwhile.
        let reported = c.objects.snapshot.report(&c.node).into_iter().flat_map(|own| own.carries.iter().copied());
        let left = carried.into_iter().chain(reported).filter(planned);
        self.lingers.extend(left.map(|ip| (ip, c.now + LINGER)));
        self.lingers.retain(|ip, _| !self.carried.contains(ip));
    }

    /// Returns the carriers that this node sends packets of an egress IP to, in order.
    pub fn used(&self, ip: IpAddr) -> &[NodeName] {
        self.used.get(&ip).map_or(&[], Vec::as_slice)
    }

    /// Returns the first carrier in use for an egress IP.
    pub fn gateway(&self, ip: IpAddr) -> Option<&NodeName> {
        self.used(ip).first()
    }

    /// Returns whether this node sends packets with this egress IP to the outside and accepts replies from there.
    pub fn forwards(&self, ip: IpAddr) -> bool {
        self.carried.contains(&ip) || self.lingers.contains_key(&ip)
    }

    /// Returns the egress IPs that this node carries according to the plan.
    pub fn carried(&self) -> &BTreeSet<IpAddr> {
        &self.carried
    }

    /// Returns whether this node answers ARP and NDP for an egress IP.
    pub fn answers(&self, ip: IpAddr) -> bool {
        self.answered.contains(&ip)
    }

    /// Returns the egress IPs that this node answers ARP and NDP for.
    pub fn answered(&self) -> &BTreeSet<IpAddr> {
        &self.answered
    }

    /// Returns the egress IPs that this node did not answer for `before`, each with the dead first carrier that it replaces.
    pub fn taken_over<'a>(&self, c: &'a Facts, before: &BTreeSet<IpAddr>) -> Vec<(IpAddr, &'a NodeName)> {
        let of = |ip: &IpAddr| {
            let first = c.objects.plan.egress_ips.get(ip)?.order().find(|name| **name != c.node)?;
            (c.probes.get(first) == Some(&ProbeState::Dead)).then_some((*ip, first))
        };
        self.answered.difference(before).filter_map(of).collect()
    }

    /// Returns the egress IPs that stopped using a carrier in the last update. The carrier may have failed: a plan without it can arrive
    /// before its probes are missed.
    pub fn turned_away(&self) -> &BTreeSet<IpAddr> {
        &self.turned_away
    }

    /// Returns the egress IPs that this node keeps routes to for others. Every able carrier has them, whatever its place in the order.
    pub fn advertised(&self) -> &BTreeSet<IpAddr> {
        &self.advertised
    }

    /// Returns the carriers to which routers may send replies, even if this node sends them no packets.
    pub fn replying(&self, ip: IpAddr) -> &[NodeName] {
        self.replying.get(&ip).map_or(&[], Vec::as_slice)
    }

    /// Returns the other carriers of the egress IPs that this node carries.
    pub fn peers(&self, node: &NodeName, plan: &Plan) -> BTreeSet<NodeName> {
        let carried = plan.egress_ips.iter().filter(|(ip, _)| self.carried.contains(*ip));
        carried.flat_map(|(_, e)| e.order()).filter(|name| *name != node).cloned().collect()
    }

    /// Returns the gateways whose liveness matters to this node, each with an egress IP that it carries: the carriers of the egress IPs
    /// that this node's pods use or that it forwards for itself.
    pub fn watched<'a>(
        &self,
        node: &NodeName,
        plan: &'a Plan,
        used: &BTreeSet<IpAddr>,
    ) -> BTreeSet<(&'a NodeName, IpAddr)> {
        let concerns = |ip: &IpAddr| used.contains(ip) || self.forwards(*ip);
        let all = plan.egress_ips.iter().filter(|(ip, e)| e.owner.is_some() && concerns(ip));
        let carriers = all.flat_map(|(ip, e)| e.order().map(move |name| (name, *ip)));
        carriers.filter(|(name, _)| *name != node).collect()
    }

    /// Returns whether other carriers take over everything that this node answers for or has routes to as soon as it stops.
    pub fn are_replaceable(&self, node: &NodeName, plan: &Plan, probes: &BTreeMap<NodeName, ProbeState>) -> bool {
        let answered = plan.egress_ips.iter().filter(|(ip, _)| self.answers(**ip) || self.advertised().contains(*ip));
        let others =
            |e: &EgressIpPlan| e.order().any(|name| name != node && probes.get(name) == Some(&ProbeState::Alive));
        answered.map(|(_, e)| e).all(others)
    }

    /// Returns when [`update`](Self::update) will change something without new input.
    pub fn next(&self) -> Option<Duration> {
        self.lingers.values().min().copied()
    }

    /// Returns the revision up to which a carrier must know this node's leases of an egress IP: that of the newest block that a carrier in
    /// use knows. Dead carriers are not waited for.
    fn needed(&self, c: &Facts, ip: IpAddr) -> u64 {
        let used =
            self.used(ip).iter().filter(|used| **used != c.node && c.probes.get(*used) != Some(&ProbeState::Dead));
        let blocks = c.objects.plan.blocks.get(&ip).into_iter().flat_map(BTreeMap::values);
        let own = blocks.filter(|lease| lease.node == c.node).map(|lease| lease.revision);
        let known = used.map(|name| c.known_by(name, ip)).max();
        known.and_then(|known| own.filter(|revision| *revision <= known).max()).unwrap_or(0)
    }
}

/// Returns how good a carrier of an egress IP is. `needed` is the revision up to which it must know this node's leases.
fn worth(c: &Facts, (ip, e): (IpAddr, &EgressIpPlan), needed: u64, name: &NodeName) -> Worth {
    if *name == c.node {
        if c.objects.partial {
            return Worth::Unready;
        }
        // This node's own tables are written as a whole.
        return if c.able || e.fixed { Worth::Good } else { Worth::Unable };
    }
    let carries = |report: &NodeReport| report.carries.contains(&ip) && needed <= c.known_by(name, ip);
    match c.probes.get(name) {
        Some(ProbeState::Dead) => Worth::Dead,
        _ if !c.objects.snapshot.nodes.contains_key(name) => Worth::Dead,
        Some(ProbeState::Unable) => Worth::Unable,
        _ if e.fixed || c.objects.snapshot.report(name).is_some_and(carries) => Worth::Good,
        _ => Worth::Unready,
    }
}

/// Returns the carriers of a routed egress IP that have a route to it: those that report that they carry it and are not dead.
fn replying(c: &Facts, ip: IpAddr, e: &EgressIpPlan) -> Vec<NodeName> {
    let reports = |name: &&NodeName| c.objects.snapshot.report(name).is_some_and(|report| report.carries.contains(&ip));
    e.order().filter(reports).filter(|name| c.probes.get(*name) != Some(&ProbeState::Dead)).cloned().collect()
}

/// Returns which carriers the packets of an egress IP leave through.
pub fn outbound(snapshot: &Snapshot, e: &EgressIpPlan) -> Outbound {
    attachment(snapshot, e).outbound
}

/// Returns how the outside reaches an egress IP.
pub fn announce(snapshot: &Snapshot, e: &EgressIpPlan) -> Announce {
    attachment(snapshot, e).announce
}

/// Returns the attachment of a floating egress IP: that of its pool or, if the pool is gone, the one that the controller remembers.
pub fn attachment(snapshot: &Snapshot, e: &EgressIpPlan) -> NetworkAttachment {
    let pool = e.pool.as_ref().and_then(|pool| snapshot.pools.get(pool));
    if e.fixed { NetworkAttachment::default() } else { pool.map_or(e.attachment, Pool::attachment) }
}

/// Returns the carriers to use: all good ones if flows are spread, otherwise the first of the best ones.
fn use_of(outbound: Outbound, worth: &[(&NodeName, Worth)]) -> Vec<NodeName> {
    let best = worth.iter().map(|(_, worth)| *worth).max();
    let all = outbound == Outbound::Spread && best == Some(Worth::Good);
    let best = worth.iter().filter(|(_, worth)| Some(*worth) == best).map(|(name, _)| (*name).clone());
    best.take(if all { usize::MAX } else { 1 }).collect()
}
