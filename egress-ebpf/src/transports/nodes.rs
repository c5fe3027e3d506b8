//! Finds the node that a packet comes from.

use crate::{
    headers::packet::{Mac, Packet},
    tables::maps::{CONFIG, MAC_INDEX, NODE_INDEX},
};
use egress_common::{V6, egress::MacKey};

/// Returns the node of an outer source address. This node sends itself nothing through the tunnel: its own address is a socket's.
#[inline(always)]
pub fn sender(outer: &V6) -> Option<u32> {
    let index = node_of(outer)?;
    if CONFIG.get(0)?.node == index { None } else { Some(index) }
}

/// Returns the node that an address belongs to.
#[inline(always)]
pub fn node_of(outer: &V6) -> Option<u32> {
    // SAFETY: read only.
    unsafe { NODE_INDEX.get(outer) }.copied()
}

/// Returns the node from whose MAC address the frame comes.
#[inline(always)]
pub fn link_node(pkt: &Packet) -> Option<u32> {
    let mac = pkt.read::<Mac>(6)?;
    // SAFETY: read only.
    unsafe { MAC_INDEX.get(MacKey { mac, reserved: 0 }) }.copied()
}
