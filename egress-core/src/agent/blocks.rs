//! Decides which port blocks a node uses for new flows and which it gives back. Pure.
//!
//! A block is given back in two steps. First it is retired: the tables are written without it, so no new flow takes a port from it. Once a
//! count of flows that began after that write finds no flow in the block, it is released: the node's status lists it, the controller may
//! lease it to another node, and this node does not use it again until a lease of a higher revision arrives. A retired block can be taken
//! back into use at any time; a released one cannot.

use super::{carriers::Carriers, facts::Facts};
use crate::{
    model::{NodeName, NodeReport},
    plan::{BlockState, Plan},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

/// An egress IP's blocks are given back once no policy of this node's pods has used the address for this long.
pub const UNUSED_AFTER: Duration = Duration::from_secs(30);
/// Blocks that were needed recently are kept for at least this long, and for at most twice as long.
pub const LATELY: Duration = Duration::from_secs(15);
/// The delay between a write of the tables and a count that may find a block idle. A packet in flight during the write has entered its flow
/// by then.
pub const SETTLE: Duration = Duration::from_millis(100);

/// Leased blocks that this node does not use.
#[derive(Clone, Debug, Default)]
pub struct Withheld(BTreeMap<IpAddr, OfAddress>);

/// The withheld blocks of one egress IP.
#[derive(Clone, Debug, Default)]
struct OfAddress {
    /// When policies stopped using the egress IP; absent while a policy uses it.
    unused: Option<Duration>,
    /// When the tables were first written without the block; absent until then.
    retired: BTreeMap<u16, Option<Duration>>,
    /// The highest lease revision of each block that its release covers.
    released: BTreeMap<u16, u64>,
    /// The start of the current interval of [`LATELY`], and the peak need in it and in the interval before.
    needed: (Duration, [usize; 2]),
}

/// How much of an egress IP a node keeps.
struct Keep {
    blocks: usize,
    /// Whether to retire surplus blocks even if flows use them: these flows keep their ports, but no new flow gets one.
    drain: bool,
}

/// Returns the blocks of an egress IP that the node may take ports from: leased to it, known to the carriers of its packets and of its
/// replies, and not being given back.
pub fn usable<'a>(
    is: &'a Facts,
    carriers: &Carriers,
    withheld: &'a Withheld,
    address: IpAddr,
) -> impl Iterator<Item = u16> + use<'a> {
    let fixed = is.objects.plan.egress_ips.get(&address).is_some_and(|e| e.fixed);
    // A carrier's tables have leases only of egress IPs that its agent has read. This node's own tables have the leases before the blocks.
    let known = |name: &NodeName, says: u64| match is.objects.snapshot.report(name) {
        _ if *name == is.node && is.objects.partial => 0,
        _ if *name == is.node => u64::MAX,
        Some(report) if fixed || report.carries.contains(&address) => says,
        _ => 0,
    };
    let used = carriers.used(address).iter().map(|name| known(name, is.known_by(name, address)));
    let replying = carriers.replying(address).iter().map(|name| known(name, is.known_by_replying(name, address)));
    let known = used.chain(replying).min();
    let is_known = move |revision: u64| known.is_some_and(|known| revision <= known);
    let (blocks, withheld) = (is.objects.plan.blocks.get(&address).into_iter().flatten(), withheld.0.get(&address));
    blocks
        .filter(move |(_, l)| l.state == BlockState::Leased && is_known(l.revision) && l.node == is.node)
        .map(|(block, _)| *block)
        .filter(move |block| withheld.is_none_or(|of| !of.contains(*block)))
}

impl Withheld {
    /// Returns whether a block is withheld from new flows.
    pub fn contains(&self, address: IpAddr, block: u16) -> bool {
        self.0.get(&address).is_some_and(|of| of.contains(block))
    }

    /// Returns the released blocks of an egress IP, each with the highest lease revision that the release covers.
    pub fn released(&self, address: IpAddr) -> Option<&BTreeMap<u16, u64>> {
        self.0.get(&address).map(|of| &of.released)
    }

    /// Updates the decisions. Returns whether the tables must be rewritten.
    pub fn update(&mut self, now: &Facts) -> bool {
        self.recover(now.reported());
        self.0.retain(|address, _| now.objects.plan.blocks.contains_key(address));
        let mut changed = false;
        for (address, blocks) in &now.objects.plan.blocks {
            let mut own = blocks.iter().filter(|(_, lease)| lease.node == now.node).peekable();
            if own.peek().is_none() {
                if let Some(of) = self.0.get_mut(address) {
                    of.retired.clear();
                    of.unused = None;
                }
                continue;
            }
            let of = self.0.entry(*address).or_default();
            let before = of.clone();
            let (mut leased, mut quarantined) = (Vec::new(), Vec::new());
            for (block, lease) in own {
                if of.released.get(block).is_some_and(|covered| lease.revision > *covered) {
                    of.released.remove(block);
                }
                match lease.state {
                    _ if of.released.contains_key(block) => continue,
                    BlockState::Leased => leased.push(*block),
                    BlockState::Quarantined => quarantined.push(*block),
                };
            }
            let mut retire = of.surplus(*address, &leased, now);
            retire.extend(quarantined);
            of.retired.retain(|block, _| retire.contains(block));
            for block in retire {
                of.retired.entry(block).or_default();
            }
            of.release(*address, blocks, now);
            let withheld =
                |of: &OfAddress| -> BTreeSet<u16> { of.retired.keys().chain(of.released.keys()).copied().collect() };
            changed |= withheld(&before) != withheld(of);
        }
        changed
    }

    /// Records that the tables were written according to the last [`update`](Self::update).
    pub fn written(&mut self, now: Duration) {
        for written in self.0.values_mut().flat_map(|of| of.retired.values_mut()) {
            written.get_or_insert(now);
        }
    }

    /// Records that a status with this revision is about to be written: it gives back the blocks that it lists, in all leases up to it.
    pub fn publish(&mut self, node: &NodeName, plan: &Plan, lease_revision: u64) {
        for (address, of) in &mut self.0 {
            for (block, covered) in &mut of.released {
                let lease = plan.blocks.get(address).and_then(|blocks| blocks.get(block));
                if lease.is_some_and(|lease| lease.node == *node && lease.revision <= *covered) {
                    *covered = lease_revision.max(*covered);
                }
            }
        }
    }

    /// Recovers the releases that a status lists, whichever agent wrote it.
    fn recover(&mut self, reported: Option<&NodeReport>) {
        let Some(report) = reported else { return };
        for (address, demand) in &report.demand {
            for block in &demand.released {
                let covered = self.0.entry(*address).or_default().released.entry(*block).or_default();
                *covered = report.own_lease_revision.max(*covered);
            }
        }
    }
}

impl OfAddress {
    fn contains(&self, block: u16) -> bool {
        self.retired.contains_key(&block) || self.released.contains_key(&block)
    }

    /// Returns the surplus of leased blocks: first idle ones, then those already retired, then those with the fewest flows.
    fn surplus(&mut self, address: IpAddr, leased: &[u16], now: &Facts) -> BTreeSet<u16> {
        self.unused = match now.used.contains(&address) {
            true => None,
            false => self.unused.or(Some(now.now)),
        };
        self.note_need(address, now);
        let Some(keep) = self.keep(address, now) else { return BTreeSet::new() };
        let too_many = leased.len().saturating_sub(keep.blocks);
        if too_many == 0 {
            return BTreeSet::new();
        }
        let flows = |block: u16| now.ports.flows(address, block);
        let mut candidates: Vec<u16> = leased.iter().copied().filter(|b| keep.drain || flows(*b) == 0).collect();
        candidates.sort_by_cached_key(|b| (flows(*b) > 0, !self.retired.contains_key(b), flows(*b), *b));
        candidates.truncate(too_many);
        candidates.into_iter().collect()
    }

    fn note_need(&mut self, address: IpAddr, now: &Facts) {
        let (since, [last, before]) = &mut self.needed;
        if now.now.saturating_sub(*since) >= LATELY {
            (*since, *before, *last) = (now.now, *last, 0);
        }
        *last = (*last).max(now.ports.needed(address).into());
    }

    /// Returns how much of an egress IP this node keeps; `None` means all that it has. While no other node needs blocks, the node keeps at
    /// least twice its share, so that joining nodes do not make all others give a block back.
    fn keep(&self, address: IpAddr, now: &Facts) -> Option<Keep> {
        if self.unused.is_some_and(|since| now.now.saturating_sub(since) >= UNUSED_AFTER) {
            return Some(Keep { blocks: 0, drain: true });
        }
        // Before the first count, every block seems idle.
        now.counted?;
        let plan = now.objects.plan.egress_ips.get(&address)?;
        // A share of 0 means unknown.
        let share = plan.share.max(1) as usize;
        match (plan.starved, plan.scarce) {
            (true, _) => Some(Keep { blocks: share, drain: true }),
            (false, true) => Some(Keep { blocks: share.max(usize::from(now.ports.needed(address))), drain: false }),
            (false, false) => {
                let [last, before] = self.needed.1;
                Some(Keep { blocks: (2 * share).max(last).max(before), drain: false })
            }
        }
    }

    /// Releases retired blocks that are idle by a count that saw all their flows.
    fn release(&mut self, address: IpAddr, blocks: &crate::plan::Blocks, now: &Facts) {
        let Some(counted) = now.counted else { return };
        let done = |block: u16, written: Option<Duration>| {
            written.is_some_and(|at| counted >= at + SETTLE) && now.ports.flows(address, block) == 0
        };
        let released = &mut self.released;
        self.retired.retain(|block, written| {
            let lease = blocks.get(block).filter(|_| done(*block, *written));
            if let Some(lease) = lease {
                released.insert(*block, lease.revision);
            }
            lease.is_none()
        });
    }
}

#[cfg(test)]
#[path = "blocks_sim.rs"]
mod sim;
#[cfg(test)]
#[path = "blocks_tests.rs"]
mod tests;
