//! The underlay's interface: tunnelled packets that bypass the tunnel device, and packets of
//! `direct`. All other packets are treated as at an uplink, because one interface is often both.

use crate::{
    gateway::{forward, tunnelled},
    headers::{
        context::Context,
        note,
        packet::{ETH_LEN, Mac, Packet},
    },
    source::deliver::{self, OTHER, only},
    tables::{
        egress,
        family::Family,
        maps::{CONFIG, NODES},
    },
    transports::{
        nodes, probe,
        vxlan::{self, Stripped},
    },
};
use egress_common::{
    config::{self, DatapathConfig},
    egress::{NodeEntry, flags},
    verdict::{Counter, Verdict},
};

/// Result of [`unwrap`] for a tunnelled packet that is left to the stack.
const LEFT: u64 = OTHER - 1;
/// Result of [`unwrap`] for a tunnelled packet from an address that is not a node's.
const STRANGER: u64 = OTHER - 2;

/// Handles a packet at the underlay's interface. A reply over `direct` is a packet for this node's own port block, as at an uplink.
///
/// The functions run in sequence, not nested: their variables do not fit on the stack together.
#[inline(always)]
pub fn receive<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    match if F::may_be_tunnelled(pkt, config) { unwrap::<F>(pkt) } else { OTHER } {
        OTHER => plain::<F>(pkt, config),
        LEFT => Verdict::Pass.to_bits(),
        STRANGER => Verdict::Drop(Counter::DropStranger).to_bits(),
        tunnelled => tunnelled::arrived(pkt, tunnelled as u32, (tunnelled >> 32) as u32),
    }
}

/// Handles a packet without outer headers. A node that carries nothing first looks for a flow of
/// one of its pods: this one lookup settles nearly all packets.
#[inline(always)]
fn plain<F: Family>(pkt: &Packet, config: &DatapathConfig) -> u64 {
    if config.flags & config::flags::CARRIES == 0 {
        let verdict = deliver::reply::<F>(pkt, only::KNOWN);
        if verdict != OTHER {
            return verdict;
        }
    }
    match once::outward::<F>(pkt) {
        OTHER => forward::reply::<F>(pkt),
        verdict => verdict,
    }
}

/// Removes the outer headers of a tunnelled packet. Returns its network identifier in the lower
/// half, and its source node in the upper half.
#[inline(never)]
fn unwrap<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return LEFT };
    match vxlan::strip::<F>(pkt, config) {
        Stripped::Not => OTHER,
        Stripped::Left => LEFT,
        Stripped::Done(vni, outer) => match nodes::sender(&outer) {
            Some(index) => (index as u64) << 32 | vni as u64,
            None => STRANGER,
        },
    }
}

/// Handles a translated packet that another node sent to this node's MAC address. Returns [`OTHER`] for anything else.
#[inline(always)]
pub fn outward<F: Family>(pkt: &Packet) -> u64 {
    sent_here::<F>(pkt).unwrap_or(OTHER)
}

#[inline(always)]
fn sent_here<F: Family>(pkt: &Packet) -> Option<u64> {
    // Nodes send no tagged frames: this one belongs to another network.
    if pkt.vlan() != 0 {
        return None;
    }
    let src = F::load(pkt, ETH_LEN + F::SRC)?;
    let (egress, e) = egress::find(src)?;
    let from = sender::<F>(pkt, egress)?;
    // The gateway sends the packet out with this node as its next hop: the exit lets it pass.
    if from == e.gateway && e.flags & flags::CARRIED == 0 {
        pkt.note(note::SENT);
        return None;
    }
    if e.flags & flags::CARRIED == 0 {
        let own = e.flags & flags::NODE_ADDRESS != 0;
        return if own { None } else { Some(Verdict::Drop(Counter::DropNotOwner).to_bits()) };
    }
    let verdict = match forward::leased::<F>(pkt, egress, e, from) {
        // No flow has a port that low.
        Verdict::Drop(Counter::DropNotLeased) if probe::is::<F>(pkt) => Verdict::probe(from),
        verdict => verdict,
    };
    Some(verdict.to_bits())
}

/// Returns the node that a translated packet comes from.
///
/// Usually it is the node that the port is leased to, if the port is at its usual offset: comparing
/// with that node is cheaper than looking up the MAC address.
#[inline(always)]
fn sender<F: Family>(pkt: &Packet, egress: u32) -> Option<u32> {
    let port = pkt.read::<u16>(ETH_LEN + F::HEADER).unwrap_or(0);
    let likely = forward::lessee(pkt, egress, port);
    if is_at(pkt, likely) { Some(likely) } else { nodes::link_node(pkt) }
}

/// Returns whether the frame comes from the MAC address of node number `index`. No two nodes share
/// an address: one that two nodes report is entered for neither.
#[inline(always)]
fn is_at(pkt: &Packet, index: u32) -> bool {
    NODES.get(index).is_some_and(|node| sends(pkt, node))
}

/// Returns whether the frame comes from the MAC address of the node.
#[inline(always)]
pub fn sends<C: Context>(pkt: &Packet<C>, node: &NodeEntry) -> bool {
    let Some(from) = pkt.read::<Mac>(6) else { return false };
    let [theirs, _] = node.macs;
    let differs = (from[0] ^ theirs[0]) | (from[1] ^ theirs[1]) | (from[2] ^ theirs[2]);
    // The address is zero for a node that shares no link with this one, and in an empty entry.
    differs == 0 && from[0] | from[1] | from[2] != 0
}

once! {
    outward(outward_v4, outward_v6) = outward();
}
