//! The key of the flow that a packet belongs to.

use crate::{
    headers::fields::{Ip, Kind, L4Header},
    tables::family::Family,
};
use egress_common::flow::FlowKey;

/// Returns the 5-tuple of a pod's packet.
#[inline(always)]
pub fn of_pod<F: Family>(ip: &Ip<F>, t: &L4Header) -> FlowKey<F> {
    FlowKey { src: ip.src, dst: ip.dst, src_port: t.src_port, dst_port: t.dst_port, proto: ip.proto }
}

/// Returns the key of the flow whose source a packet is sent to: the 5-tuple of packets in the other direction.
#[inline(always)]
pub fn of_reply<F: Family>(ip: &Ip<F>, t: &L4Header) -> FlowKey<F> {
    match t.kind {
        Kind::Answer | Kind::Query => {
            FlowKey { src: ip.dst, dst: ip.src, src_port: t.src_port, dst_port: 0, proto: ip.proto }
        }
        _ => FlowKey { src: ip.dst, dst: ip.src, src_port: t.dst_port, dst_port: t.src_port, proto: ip.proto },
    }
}
