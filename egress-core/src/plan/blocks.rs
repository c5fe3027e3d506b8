//! Leases port blocks of egress IPs to source nodes.
//!
//! A lease ends in only two ways: its holder gives it back, or its holder is gone and a quarantine has passed. Until then no other node
//! gets the block, whatever else changes.

mod ledger;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::net::IpAddr;

use ledger::Ledger;

use super::types::{BlockLease, BlockState, Blocks};
use crate::health::Health;
use crate::model::{Family, Node, NodeName};

/// The number of blocks of a node's own address: ports 1024 to 29951, below the kernel's own ephemeral ports (32768)
/// and Kubernetes' node ports (30000).
pub const FIXED_BLOCKS: u16 = 452;

/// An egress IP whose blocks are leased.
#[derive(Clone, Debug)]
pub struct Leasable<'a> {
    /// The node whose own address it is.
    pub fixed: Option<&'a Node>,
    /// The nodes that use it, ascending, as places in the list of nodes.
    pub sources: &'a [u32],
    /// The policies that use it, by number.
    pub policies: Vec<u32>,
}

/// The leases after a round.
#[derive(Debug, Default)]
pub struct Leases {
    /// The blocks, by egress IP.
    pub blocks: BTreeMap<IpAddr, Blocks>,
    /// The shares, by egress IP.
    pub shares: BTreeMap<IpAddr, Shares>,
    /// Whether any block was granted, with the new revision.
    pub granted: bool,
}

/// How the blocks of an egress IP are shared; see [`super::EgressIpPlan`].
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    /// How many blocks each source node may count on.
    pub share: u32,
    /// Whether some node needs more and cannot have it.
    pub scarce: bool,
    /// Whether some node that should have a block has none.
    pub starved: bool,
}

/// Returns which of these egress IPs have blocks that their holders did not give back.
pub fn held<'a>(
    nodes: &[&Node],
    health: &Health,
    previous: impl Iterator<Item = (IpAddr, &'a Blocks)>,
) -> BTreeSet<IpAddr> {
    let places: BTreeMap<&NodeName, u32> = nodes.iter().zip(0..).map(|(node, place)| (&node.name, place)).collect();
    let round = Round { nodes, places: &places, health, revision: 0 };
    previous
        .filter(|(address, blocks)| !round.retain(*address, blocks).is_empty())
        .map(|(address, _)| address)
        .collect()
}

/// Plans the leases of egress IPs. `nodes` are all nodes that use or hold blocks of them and have an object, ascending;
/// `sources_of` are the source nodes of each policy by its number; grants get `revision`.
///
/// An egress IP's leases depend on another one's only if a policy uses both, directly or through others between them.
pub fn lease(
    nodes: &[&Node],
    health: &Health,
    previous: &BTreeMap<IpAddr, Blocks>,
    leasable: &BTreeMap<IpAddr, Leasable<'_>>,
    sources_of: &[&[u32]],
    revision: u64,
) -> Leases {
    let places: BTreeMap<&NodeName, u32> = nodes.iter().zip(0..).map(|(node, place)| (&node.name, place)).collect();
    let round = Round { nodes, places: &places, health, revision };
    let mut leases = Leases::default();
    for (address, blocks) in previous.iter().filter(|(address, _)| !leasable.contains_key(address)) {
        let mut kept = round.retain(*address, blocks);
        kept.values_mut().for_each(|lease| lease.state = BlockState::Quarantined);
        if !kept.is_empty() {
            leases.blocks.insert(*address, kept);
        }
    }
    let none = Blocks::new();
    let mut ledgers: BTreeMap<IpAddr, Ledger> = leasable
        .iter()
        .map(|(address, ip)| {
            let kept = round.retain(*address, previous.get(address).unwrap_or(&none));
            (*address, Ledger::new(kept, ip, &round))
        })
        .collect();
    ahead(leasable, &mut ledgers, &round);
    for_those_without(leasable, &mut ledgers, sources_of, &round);
    for (address, ledger) in &mut ledgers {
        ledger.on_demand(*address, leasable[address].sources, &round);
    }
    for (address, ledger) in ledgers {
        leases.granted |= ledger.granted;
        let (scarce, starved) = (ledger.scarce || ledger.starved, ledger.starved);
        leases.shares.insert(address, Shares { share: ledger.share.max(1), scarce, starved });
        if !ledger.blocks.is_empty() {
            leases.blocks.insert(address, ledger.blocks);
        }
    }
    leases
}

/// Leases to each source node that has no block of an egress IP its fair share of half of the free blocks. In a cluster with more source
/// nodes than an egress IP has blocks, the egress IPs of a policy serve different parts of the ring of nodes.
fn ahead(leasable: &BTreeMap<IpAddr, Leasable<'_>>, ledgers: &mut BTreeMap<IpAddr, Ledger>, round: &Round<'_>) {
    let mut served: BTreeMap<(Option<u32>, Family), usize> = BTreeMap::new();
    for (address, ip) in leasable {
        let nth = served.entry((ip.policies.first().copied(), Family::of(*address))).or_default();
        let Some(ledger) = ledgers.get_mut(address) else { continue };
        let start = (*nth * ledger.half) % ip.sources.len().max(1);
        *nth += 1;
        let newcomers = ledger.without(ip.sources);
        if newcomers.is_empty() {
            continue;
        }
        let grant = match ledger.share {
            0 => 1,
            share => share.min((ledger.free.len() / 2 / newcomers.len()).max(1) as u32),
        };
        let split = newcomers.partition_point(|node| *node < ip.sources[start]);
        for node in newcomers[split..].iter().chain(&newcomers[..split]) {
            if ledger.share == 0 && ledger.leased() >= ledger.half {
                break;
            }
            ledger.grant(*node, grant, round);
        }
        ledger.starved |= ledger.share > 0 && !ledger.without(ip.sources).is_empty();
    }
}

/// Leases one block to each source node of a policy that has no block of any of the policy's egress IPs of a family.
fn for_those_without(
    leasable: &BTreeMap<IpAddr, Leasable<'_>>,
    ledgers: &mut BTreeMap<IpAddr, Ledger>,
    sources_of: &[&[u32]],
    round: &Round<'_>,
) {
    let mut of_policy: BTreeMap<(u32, Family), Vec<IpAddr>> = BTreeMap::new();
    for (address, ip) in leasable {
        for policy in &ip.policies {
            of_policy.entry((*policy, Family::of(*address))).or_default().push(*address);
        }
    }
    for ((policy, _), addresses) in of_policy {
        let mut has = vec![false; round.nodes.len()];
        for node in addresses.iter().flat_map(|address| ledgers[address].held.keys()) {
            has[*node as usize] = true;
        }
        let mut most_free: BinaryHeap<(usize, Reverse<IpAddr>)> =
            addresses.iter().map(|address| (ledgers[address].free.len(), Reverse(*address))).collect();
        let mut starved = false;
        for node in sources_of[policy as usize].iter().filter(|node| !has[**node as usize]) {
            let own = addresses.iter().copied().find(|address| ledgers[address].quarantined.contains_key(node));
            let address = own.or_else(|| most_free.pop().map(|(_, Reverse(address))| address));
            let Some(ledger) = address.and_then(|address| ledgers.get_mut(&address)) else { continue };
            let got = ledger.grant(*node, 1, round);
            if let (None, Some(address)) = (own, address) {
                most_free.push((ledger.free.len(), Reverse(address)));
            }
            starved |= got == 0;
        }
        for address in addresses {
            if let Some(ledger) = ledgers.get_mut(&address) {
                ledger.starved |= starved;
            }
        }
    }
}

/// The inputs that do not change while blocks are leased.
struct Round<'a> {
    nodes: &'a [&'a Node],
    places: &'a BTreeMap<&'a NodeName, u32>,
    health: &'a Health,
    revision: u64,
}

impl Round<'_> {
    /// Returns what remains leased of an egress IP's blocks.
    fn retain(&self, address: IpAddr, blocks: &Blocks) -> Blocks {
        let mut holder: Option<(&NodeName, Holder)> = None;
        blocks
            .iter()
            .filter_map(|(number, lease)| {
                let (_, known) = *match &mut holder {
                    Some(last) if *last.0 == lease.node => last,
                    other => other.insert((&lease.node, self.holder(address, &lease.node))),
                };
                match known {
                    Holder::Gone => None,
                    Holder::Absent => Some((*number, BlockLease { state: BlockState::Quarantined, ..lease.clone() })),
                    Holder::Present(released, known)
                        if lease.revision <= known && released.is_some_and(|r| r.contains(number)) =>
                    {
                        None
                    }
                    Holder::Present(..) => Some((*number, lease.clone())),
                }
            })
            .collect()
    }

    fn holder(&self, address: IpAddr, node: &NodeName) -> Holder<'_> {
        match self.places.get(node).map(|place| &self.nodes[*place as usize].report) {
            None if self.health.of(node).gone => Holder::Gone,
            None => Holder::Absent,
            Some(None) => Holder::Present(None, 0),
            Some(Some(report)) => {
                Holder::Present(report.demand.get(&address).map(|demand| &demand.released), report.own_lease_revision)
            }
        }
    }
}

/// The holder of a lease.
#[derive(Clone, Copy)]
enum Holder<'a> {
    /// Its node object is missing, and the quarantine is over.
    Gone,
    /// Its node object is missing.
    Absent,
    /// Its released blocks, and the revision up to which it then knew its leases: a newer lease of the same block is not released.
    Present(Option<&'a BTreeSet<u16>>, u64),
}
