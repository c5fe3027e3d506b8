//! Announces the egress IPs that this node answers for, and defends them against other hosts' claims.

use egress_core::network::{EgressLink, links::LinkTable, schedule::Schedule};
use egress_node::host::{
    announce::{Announcer, ClaimListener, is_rival},
    groups::{self, Groups},
};
use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    io,
    net::IpAddr,
    time::{Duration, Instant},
};

/// The interval at which all egress IPs are announced without a change, so that neighbours forget a foreign host's claim.
const REMIND: Duration = Duration::from_secs(10);
/// The minimum time between two requests for the next hop of an egress IP, unless it is announced.
const ASK: Duration = Duration::from_secs(1);
/// The delay before a claim is answered. Meanwhile probes and objects may show that another carrier has taken over.
const HEAR: Duration = Duration::from_millis(300);
/// The minimum time between two answers to other hosts' claims (RFC 5227, section 2.4, lets hosts defend their address).
const DEFEND: Duration = Duration::from_secs(1);

/// The egress IPs that this node answers for, and the sockets that announce and defend them.
pub struct Owned {
    announcer: Announcer,
    schedule: Schedule,
    start: Instant,
    places: BTreeMap<IpAddr, EgressLink>,
    listeners: BTreeMap<u32, ClaimListener>,
    groups: Groups,
    /// The time at which all egress IPs are announced again.
    reminder: Duration,
    /// The time at which each address was last defended.
    defended: BTreeMap<IpAddr, Duration>,
    /// The time of the last request for each address's next hop.
    asked: BTreeMap<IpAddr, Duration>,
}

impl Owned {
    /// Opens the sockets, without any egress IP yet.
    pub fn open(start: Instant) -> io::Result<Self> {
        Ok(Self {
            announcer: Announcer::open()?,
            schedule: Schedule::default(),
            start,
            places: BTreeMap::new(),
            listeners: BTreeMap::new(),
            groups: Groups::default(),
            reminder: REMIND,
            defended: BTreeMap::new(),
            asked: BTreeMap::new(),
        })
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Sets the egress IPs to answer for. Schedules announcements of those that are new or have moved to another interface.
    pub fn set(&mut self, wanted: &BTreeMap<IpAddr, EgressLink>) {
        let now = self.now();
        for address in self.places.keys().filter(|a| !wanted.contains_key(*a)) {
            self.schedule.stop(*address);
        }
        for (address, place) in wanted {
            if self.places.get(address) != Some(place) {
                self.schedule.start(*address, now);
            }
        }
        self.places = wanted.clone();
        let places = wanted.iter().map(|(address, place)| (*address, place.interface));
        for ((interface, group), error) in self.groups.set(&groups::wanted(places)) {
            tracing::warn!(
                "cannot join {group} on interface {interface}, so neighbours may not find its egress IPs: {error}"
            );
        }
        self.defended.retain(|a, _| wanted.contains_key(a));
        self.asked.retain(|a, _| wanted.contains_key(a));
        let interfaces: BTreeSet<u32> = wanted.values().map(|place| place.interface).collect();
        self.listeners.retain(|i, _| interfaces.contains(i));
        for interface in interfaces {
            if let Entry::Vacant(place) = self.listeners.entry(interface) {
                match ClaimListener::open(interface) {
                    Ok(listener) => drop(place.insert(listener)),
                    Err(e) => {
                        tracing::warn!("cannot listen for announcements of other hosts on interface {interface}: {e}")
                    }
                }
            }
        }
    }

    /// Returns the time of the next call of [`tick`](Self::tick).
    pub fn next(&self) -> Option<Instant> {
        let reminder = (!self.places.is_empty()).then_some(self.reminder);
        [self.schedule.next(), reminder].into_iter().flatten().min().map(|d| self.start + d)
    }

    /// Announces the egress IPs that are due.
    pub fn tick(&mut self) {
        let now = self.now();
        let mut due: BTreeSet<IpAddr> = self.schedule.due(now).into_iter().collect();
        if now >= self.reminder {
            self.reminder = now + REMIND;
            due.extend(self.places.keys());
        }
        for address in due {
            let Some(place) = self.places.get(&address) else { continue };
            let vlan = place.subnet.and_then(|subnet| subnet.vlan);
            if let Err(e) = self.announcer.announce(place.interface, place.mac, address, vlan) {
                tracing::warn!("the announcement of {address} on interface {} failed: {e}", place.interface);
            }
            self.ask(address);
        }
    }

    /// Sends neighbour requests for the next hops of all subnets, except recently requested ones. The programs read the answers.
    pub fn ask_all(&mut self) {
        let now = self.now();
        let is_due = |address: &IpAddr| self.asked.get(address).is_none_or(|last| now >= *last + ASK);
        let due: Vec<IpAddr> = self.places.keys().copied().filter(is_due).collect();
        due.into_iter().for_each(|address| self.ask(address));
    }

    fn ask(&mut self, address: IpAddr) {
        self.asked.insert(address, self.now());
        if let Some(place) = self.places.get(&address)
            && let Some(subnet) = place.subnet
            && let Err(e) = self.announcer.ask(place.interface, place.mac, address, subnet.gateway, subnet.vlan)
        {
            tracing::warn!("the neighbour request for {} on interface {} failed: {e}", subnet.gateway, place.interface);
        }
    }

    /// Waits for another host's claim for one of our addresses. Cancel safe.
    pub async fn rival(&self, own: &LinkTable) -> IpAddr {
        let held: BTreeSet<IpAddr> = self.places.keys().copied().collect();
        if self.listeners.is_empty() {
            return std::future::pending().await;
        }
        let all = self.listeners.values().map(|listener| Box::pin(claimed(listener, &held, own)));
        futures::future::select_all(all).await.0
    }

    /// Schedules the answer to another host's claim. The answer is delayed, because another carrier's claim may arrive before the agent
    /// learns of its takeover. The claim alone does not silence this node, since any host can forge it. Returns whether it is answered.
    pub fn defend(&mut self, address: IpAddr) -> bool {
        let now = self.now();
        if self.defended.get(&address).is_some_and(|last| now < *last + DEFEND) {
            return false;
        }
        self.defended.insert(address, now);
        self.schedule.start(address, now + HEAR);
        true
    }
}

/// Waits for another host's claim for one of the addresses in `held`.
async fn claimed(listener: &ClaimListener, held: &BTreeSet<IpAddr>, own: &LinkTable) -> IpAddr {
    loop {
        match listener.receive().await {
            Ok(claim) if is_rival(&claim, held, own) => return claim.address,
            Ok(_) => {}
            // The interface is gone. The next view opens another listener.
            Err(_) => std::future::pending().await,
        }
    }
}
