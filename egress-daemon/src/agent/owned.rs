//! The floating egress IPs that this node owns: announcing them, defending them, and falling silent when another owner
//! shows while this one may have lost them.

use crate::host::{
    MacAddress,
    announce::{Announcer, ClaimListener, is_rival},
    groups::{self, Groups},
    links::LinkTable,
    schedule::Schedule,
};
use crate::model::SubnetInfo;
use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    io,
    net::IpAddr,
    time::{Duration, Instant},
};

/// How often everything is announced although nothing has changed: two owners that a partition made hear of each other,
/// and neighbours forget a stranger's claim.
const REMIND: Duration = Duration::from_secs(10);
/// For how long the objects may still tell that an address has another owner now, before a claim for it is answered.
const HEAR: Duration = Duration::from_millis(300);
/// The least time between two answers to claims of others (RFC 5227, section 2.4, lets hosts defend their address).
const DEFEND: Duration = Duration::from_secs(1);

/// Where an egress IP is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The interface.
    pub interface: u32,
    /// Its MAC address.
    pub mac: MacAddress,
    /// The subnet of its own, whose next hop is asked for its MAC address.
    pub subnet: Option<SubnetInfo>,
}

/// The egress IPs, and who else claims them.
pub struct Owned {
    announcer: Announcer,
    schedule: Schedule,
    start: Instant,
    places: BTreeMap<IpAddr, (Place, u64)>,
    listeners: BTreeMap<u32, ClaimListener>,
    groups: Groups,
    /// Addresses that another node has claimed while this one could not renew its lease, with the epoch then.
    withdrawn: BTreeMap<IpAddr, u64>,
    /// When everything is announced again.
    reminder: Duration,
    /// When each address was defended last.
    defended: BTreeMap<IpAddr, Duration>,
}

impl Owned {
    /// Nothing is owned yet.
    pub fn open(start: Instant) -> io::Result<Self> {
        Ok(Self {
            announcer: Announcer::open()?,
            schedule: Schedule::default(),
            start,
            places: BTreeMap::new(),
            listeners: BTreeMap::new(),
            groups: Groups::default(),
            withdrawn: BTreeMap::new(),
            reminder: REMIND,
            defended: BTreeMap::new(),
        })
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Owns these from now on, each with its epoch: what is new, or has moved to another interface, is announced.
    pub fn set(&mut self, wanted: &BTreeMap<IpAddr, (Place, u64)>) {
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
        let places = wanted.iter().map(|(address, (place, _))| (*address, place.interface));
        for ((interface, group), error) in self.groups.set(&groups::wanted(places)) {
            tracing::warn!(
                "{group} is not joined on interface {interface}, neighbours may not find its egress IPs: {error}"
            );
        }
        self.defended.retain(|a, _| wanted.contains_key(a));
        self.withdrawn.retain(|a, epoch| wanted.get(a).is_some_and(|(_, e)| e == epoch));
        let interfaces: BTreeSet<u32> = wanted.values().map(|(place, _)| place.interface).collect();
        self.listeners.retain(|i, _| interfaces.contains(i));
        for interface in interfaces {
            if let Entry::Vacant(place) = self.listeners.entry(interface) {
                match ClaimListener::open(interface) {
                    Ok(listener) => drop(place.insert(listener)),
                    Err(e) => tracing::warn!("claims of others on interface {interface} are not heard: {e}"),
                }
            }
        }
    }

    /// Addresses that this node does not answer for although it is their owner.
    pub fn withdrawn(&self) -> BTreeSet<IpAddr> {
        self.withdrawn.keys().copied().collect()
    }

    /// The lease is renewed again: what is owned is answered for and announced again. Whether anything was withdrawn.
    pub fn lease_regained(&mut self) -> bool {
        let now = self.now();
        for address in self.places.keys() {
            self.schedule.start(*address, now);
        }
        !std::mem::take(&mut self.withdrawn).is_empty()
    }

    /// When [`tick`](Self::tick) wants to be called next.
    pub fn next(&self) -> Option<Instant> {
        let reminder = (!self.places.is_empty()).then_some(self.reminder);
        [self.schedule.next(), reminder].into_iter().flatten().min().map(|d| self.start + d)
    }

    /// Announces what is due.
    pub fn tick(&mut self) {
        let now = self.now();
        let mut due: BTreeSet<IpAddr> = self.schedule.due(now).into_iter().collect();
        if now >= self.reminder {
            self.reminder = now + REMIND;
            due.extend(self.places.keys());
        }
        for address in due {
            if self.withdrawn.contains_key(&address) {
                continue;
            }
            let Some((place, _)) = self.places.get(&address) else { continue };
            let vlan = place.subnet.and_then(|subnet| subnet.vlan);
            if let Err(e) = self.announcer.announce(place.interface, place.mac, address, vlan) {
                tracing::warn!("announcing {address} on interface {}: {e}", place.interface);
            }
            self.ask(address);
        }
    }

    /// Asks the next hops of all subnets where they are. The programs read the answers.
    pub fn ask_all(&self) {
        self.places.keys().for_each(|address| self.ask(*address));
    }

    fn ask(&self, address: IpAddr) {
        if let Some((place, _)) = self.places.get(&address)
            && let Some(subnet) = place.subnet
            && let Err(e) = self.announcer.ask(place.interface, place.mac, address, subnet.gateway, subnet.vlan)
        {
            tracing::warn!("asking for {} on interface {}: {e}", subnet.gateway, place.interface);
        }
    }

    /// Waits for a claim of another node for one of our addresses. Cancel safe.
    pub async fn rival(&self, own: &LinkTable) -> IpAddr {
        let held: BTreeSet<IpAddr> = self.places.keys().copied().collect();
        if self.listeners.is_empty() {
            return std::future::pending().await;
        }
        let all = self.listeners.values().map(|listener| Box::pin(claimed(listener, &held, own)));
        futures::future::select_all(all).await.0
    }

    /// Answers another host's claim for an address that this node still owns a moment later: the claim of a new owner may be
    /// faster than the news of it. Whether it does.
    pub fn defend(&mut self, address: IpAddr) -> bool {
        let now = self.now();
        if self.withdrawn.contains_key(&address) || self.defended.get(&address).is_some_and(|last| now < *last + DEFEND)
        {
            return false;
        }
        self.defended.insert(address, now);
        self.schedule.start(address, now + HEAR);
        true
    }

    /// Falls silent for an address that another node claims.
    pub fn withdraw(&mut self, address: IpAddr) {
        if let Some((_, epoch)) = self.places.get(&address) {
            self.withdrawn.insert(address, *epoch);
        }
    }
}

/// Waits for a claim of another node for one of the addresses that are held.
async fn claimed(listener: &ClaimListener, held: &BTreeSet<IpAddr>, own: &LinkTable) -> IpAddr {
    loop {
        match listener.receive().await {
            Ok(claim) if is_rival(&claim, held, own) => return claim.address,
            Ok(_) => {}
            // The interface is gone; the next view opens another listener.
            Err(_) => std::future::pending().await,
        }
    }
}
