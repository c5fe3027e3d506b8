//! The underlay's interface: tunnelled packets past the tunnel device, and packets of `direct`. What is neither is looked
//! at as at an uplink, since one interface is often both.

use crate::{
    family::Family,
    gateway,
    maps::{CONFIG, EGRESS_IPS, MAC_INDEX},
    packet::{ETH_LEN, Mac, Packet},
    tunnel,
    vxlan::{self, Stripped},
};
use egress_common::{
    V6,
    egress::{MacKey, flags},
    verdict::{Counter, Verdict},
};

/// What [`unwrap`] and [`outward`] return for a packet that they are not for: no verdict has these bits.
const OTHER: u64 = u64::MAX;

/// Outer source address of a packet without an outer header.
static NOWHERE: V6 = [0; 4];

/// A packet at the underlay's interface. A reply by `direct` is one that is for this node's own port block, as at an uplink.
///
/// Functions one after the other, not one in the other: their variables do not fit the stack together.
#[inline(always)]
pub fn receive<F: Family>(pkt: &Packet) -> u64 {
    match unwrap::<F>(pkt) {
        OTHER => match outward::<F>(pkt) {
            OTHER => gateway::reply::<F>(pkt),
            verdict => verdict,
        },
        verdict => verdict,
    }
}

/// A tunnelled packet, past the tunnel device.
#[inline(never)]
fn unwrap<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    match vxlan::strip::<F>(pkt, config) {
        Stripped::Not => OTHER,
        Stripped::Left => Verdict::Pass.to_bits(),
        Stripped::Done(vni, outer) => tunnel::arrived(pkt, vni, &outer),
    }
}

/// A translated packet that another node sent to this one's MAC address.
#[inline(never)]
fn outward<F: Family>(pkt: &Packet) -> u64 {
    sent_here::<F>(pkt).unwrap_or(OTHER)
}

#[inline(always)]
fn sent_here<F: Family>(pkt: &Packet) -> Option<u64> {
    let src = F::load(pkt, ETH_LEN + F::SRC)?;
    // SAFETY: read only.
    let &egress = unsafe { F::egress_index().get(src) }?;
    let e = EGRESS_IPS.get(egress)?;
    let index = link_node(pkt)?;
    // The owner itself sends it out, and this node is its next hop.
    if index == e.owner || !pkt.is_for_host() {
        return None;
    }
    if e.flags & flags::OWNED == 0 {
        let own = e.flags & flags::NODE_ADDRESS != 0;
        return if own { None } else { Some(Verdict::Drop(Counter::DropNotOwner).to_bits()) };
    }
    Some(gateway::forward::<F>(pkt, &NOWHERE, index))
}

/// The node whose MAC address the frame comes from.
#[inline(always)]
pub fn link_node(pkt: &Packet) -> Option<u32> {
    let mac = pkt.read::<Mac>(6)?;
    // SAFETY: read only.
    unsafe { MAC_INDEX.get(MacKey { mac, reserved: 0 }) }.copied()
}
