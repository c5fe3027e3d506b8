//! Packets that came through the tunnel, with or without its device.

use crate::{
    gateway::forward,
    headers::packet::{IPV4, IPV6, Packet},
    source::deliver::{self, only},
    transports::{device::get_key, nodes::sender},
};
use egress_common::{
    V4, V6,
    abi::{VNI_FORWARD, VNI_PROBE, VNI_REPLY},
    verdict::{Counter, Verdict},
};

/// Handles a packet that came out of the tunnel device. Returns a verdict's bits.
#[inline(always)]
pub fn receive(pkt: &Packet) -> u64 {
    let Some((outer, vni)) = get_key(pkt) else { return Verdict::Drop(Counter::DropStranger).to_bits() };
    match sender(&outer) {
        Some(index) => arrived(pkt, vni, index),
        None => Verdict::Drop(Counter::DropStranger).to_bits(),
    }
}

/// Handles a packet that node number `from` sent through the tunnel, without its outer header. Returns a verdict's bits.
#[inline(always)]
pub fn arrived(pkt: &Packet, vni: u32, from: u32) -> u64 {
    match (vni, pkt.protocol()) {
        (VNI_FORWARD, IPV4) => forward::once::forward::<V4>(pkt, from),
        (VNI_FORWARD, IPV6) => forward::once::forward::<V6>(pkt, from),
        (VNI_REPLY, IPV4) => deliver::reply::<V4>(pkt, only::NOTHING),
        (VNI_REPLY, IPV6) => deliver::reply::<V6>(pkt, only::NOTHING),
        (VNI_PROBE, _) => Verdict::probe(from).to_bits(),
        _ => Verdict::Drop(Counter::DropStranger).to_bits(),
    }
}
