//! The blocks of one egress IP while they are leased.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::IpAddr;

use egress_common::port_block;

use super::{FIXED_BLOCKS, Leasable, Round};
use crate::plan::types::{BlockLease, BlockState, Blocks};

/// The blocks of one egress IP: which nodes hold them, and which are free.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) blocks: Blocks,
    /// Highest first.
    pub(super) free: Vec<u16>,
    pub(super) held: BTreeMap<u32, u32>,
    pub(super) quarantined: BTreeMap<u32, Vec<u16>>,
    /// Half of the blocks that can be leased at all.
    pub(super) half: usize,
    /// A source node's part of that half; one block if that is less, and 0 if there are fewer blocks than source nodes.
    pub(super) share: u32,
    pub(super) scarce: bool,
    pub(super) starved: bool,
    pub(super) granted: bool,
}

impl Ledger {
    /// Creates the ledger of blocks that remain leased. A block that the address's own node uses now, or may use, must come back: its
    /// holder takes no new ports from it.
    pub(super) fn new(mut blocks: Blocks, ip: &Leasable<'_>, round: &Round<'_>) -> Self {
        let count = if ip.fixed.is_some() { FIXED_BLOCKS } else { port_block::COUNT };
        let mut usable = vec![true; usize::from(count)];
        // These were leased before any node reported that it has the address.
        blocks.range_mut(count..).for_each(|(_, lease)| lease.state = BlockState::Quarantined);
        let occupied = ip.fixed.and_then(|node| node.report.as_ref()).map(|report| &report.occupied_blocks);
        for block in occupied.into_iter().flatten() {
            if let Some(usable) = usable.get_mut(usize::from(*block)) {
                *usable = false;
            }
            if let Some(lease) = blocks.get_mut(block) {
                lease.state = BlockState::Quarantined;
            }
        }
        let all = usable.iter().filter(|usable| **usable).count();
        let half = all / 2;
        let (mut held, mut quarantined) = (BTreeMap::new(), BTreeMap::<u32, Vec<u16>>::new());
        for (number, lease) in &blocks {
            let usable = usable.get_mut(usize::from(*number)).is_some_and(std::mem::take);
            match (round.places.get(&lease.node), lease.state) {
                (Some(node), BlockState::Leased) => *held.entry(*node).or_default() += 1,
                (Some(node), BlockState::Quarantined) if usable => quarantined.entry(*node).or_default().push(*number),
                (_, BlockState::Quarantined) | (None, BlockState::Leased) => {}
            }
        }
        let free = (0..count).rev().filter(|number| usable[usize::from(*number)]).collect();
        let nodes = ip.sources.len().max(1);
        let share = (half / nodes).max(usize::from(all >= nodes)) as u32;
        Self { blocks, free, held, quarantined, half, share, scarce: false, starved: false, granted: false }
    }

    pub(super) fn leased(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the nodes of a sorted list that hold no block.
    pub(super) fn without(&self, sources: &[u32]) -> Vec<u32> {
        let mut held = self.held.keys().copied().peekable();
        let mut holds = |node: &u32| {
            while held.next_if(|holder| holder < node).is_some() {}
            held.peek() == Some(node)
        };
        sources.iter().copied().filter(|node| !holds(node)).collect()
    }

    /// Leases up to `count` blocks to a node, starting with those that it had and never gave back. Returns how many it got.
    pub(super) fn grant(&mut self, node: u32, count: u32, round: &Round<'_>) -> u32 {
        let mut got = 0;
        while got < count {
            let own = self.quarantined.get_mut(&node).and_then(Vec::pop);
            let Some(number) = own.or_else(|| self.free.pop()) else { break };
            let name = round.nodes[node as usize].name.clone();
            self.blocks.insert(number, BlockLease { node: name, revision: round.revision, state: BlockState::Leased });
            got += 1;
        }
        if got > 0 {
            *self.held.entry(node).or_default() += got;
            self.granted = true;
        }
        got
    }

    /// Leases more to the source nodes that want more, block by block to the node with the fewest, but leaves a sixteenth for nodes that
    /// have none yet.
    pub(super) fn on_demand(&mut self, address: IpAddr, sources: &[u32], round: &Round<'_>) {
        let want = |node: u32| {
            let report = round.nodes[node as usize].report.as_ref()?;
            report.demand.get(&address).map(|demand| demand.want)
        };
        let wanting = |held: u32, node: u32| want(node).is_some_and(|want| want > held);
        let mut next: BinaryHeap<Reverse<(u32, u32)>> = sources
            .iter()
            .map(|node| (self.held.get(node).copied().unwrap_or(0), *node))
            .filter(|(held, node)| wanting(*held, *node))
            .map(Reverse)
            .collect();
        while let Some(Reverse((held, node))) = next.pop() {
            let own = self.quarantined.get(&node).is_some_and(|own| !own.is_empty());
            if !own && self.free.len() <= self.half / 8 || self.grant(node, 1, round) == 0 {
                self.scarce = true;
                continue;
            }
            if wanting(held + 1, node) {
                next.push(Reverse((held + 1, node)));
            }
        }
    }
}
