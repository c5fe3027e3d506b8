//! Which node a packet comes from.

use crate::{
    headers::packet::{Mac, Packet},
    tables::maps::{CONFIG, MAC_INDEX, NODE_INDEX},
};
use egress_common::{V6, egress::MacKey};

/// The node that an outer source address belongs to. This node sends itself nothing by the tunnel: what says so is a socket's on it.
#[inline(always)]
pub fn sender(outer: &V6) -> Option<u32> {
    let index = node_of(outer)?;
    if CONFIG.get(0)?.node == index { None } else { Some(index) }
}

/// The node that an address belongs to.
#[inline(always)]
pub fn node_of(outer: &V6) -> Option<u32> {
    // SAFETY: read only.
    unsafe { NODE_INDEX.get(outer) }.copied()
}

/// The node whose MAC address the frame comes from.
#[inline(always)]
pub fn link_node(pkt: &Packet) -> Option<u32> {
    let mac = pkt.read::<Mac>(6)?;
    // SAFETY: read only.
    unsafe { MAC_INDEX.get(MacKey { mac, reserved: 0 }) }.copied()
}
