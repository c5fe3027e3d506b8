//! The underlay's interface: tunnelled packets past the tunnel device, and packets of `direct`. What is neither is looked
//! at as at an uplink, since one interface is often both.

use crate::{
    family::Family,
    gateway::{self, Sender},
    maps::{CONFIG, EGRESS_IPS, MAC_INDEX},
    packet::{ETH_LEN, Mac, Packet},
    tunnel,
    vxlan::{self, Stripped},
};
use egress_common::{
    egress::{MacKey, flags},
    verdict::{Counter, Verdict},
};

/// A packet at the underlay's interface.
#[inline(always)]
pub fn receive<F: Family>(pkt: &Packet) -> u64 {
    match unwrap::<F>(pkt) {
        UNTUNNELLED => plain::<F>(pkt),
        verdict => verdict,
    }
}

/// What [`unwrap`] returns for a packet that is not tunnelled: no verdict has these bits.
const UNTUNNELLED: u64 = u64::MAX;

#[inline(never)]
fn unwrap<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    match vxlan::strip::<F>(pkt, config) {
        Stripped::Not => UNTUNNELLED,
        Stripped::Left => Verdict::Pass.to_bits(),
        Stripped::Done(vni, outer) => tunnel::arrived(pkt, vni, &outer).to_bits(),
    }
}

/// A packet of `direct` on its way out, or what arrives at an uplink. A reply by `direct` is one that is for this node's
/// own port block.
#[inline(never)]
fn plain<F: Family>(pkt: &Packet) -> u64 {
    match outward::<F>(pkt) {
        Some(verdict) => verdict.to_bits(),
        None => gateway::reply::<F>(pkt).to_bits(),
    }
}

/// A translated packet that another node sent to this one's MAC address; `None` if it is no such packet.
#[inline(always)]
fn outward<F: Family>(pkt: &Packet) -> Option<Verdict> {
    let src = F::load(pkt, ETH_LEN + F::SRC)?;
    // SAFETY: read only.
    let &egress = unsafe { F::egress_index().get(src) }?;
    let e = EGRESS_IPS.get(egress)?;
    let index = link_node(pkt)?;
    // The owner itself sends it out, and this node is its next hop.
    if index == e.owner || !pkt.to_host() {
        return None;
    }
    if e.flags & flags::OWNED == 0 {
        return if e.flags & flags::NODE_ADDRESS != 0 { None } else { Some(Verdict::Drop(Counter::DropNotOwner)) };
    }
    Some(gateway::forward::<F>(pkt, &Sender::Link(index)))
}

/// The node whose MAC address the frame comes from.
#[inline(always)]
pub fn link_node(pkt: &Packet) -> Option<u32> {
    let mac = pkt.read::<Mac>(6)?;
    // SAFETY: read only.
    unsafe { MAC_INDEX.get(MacKey { mac, reserved: 0 }) }.copied()
}
