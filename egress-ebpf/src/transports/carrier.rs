//! Chooses the carrier that a flow goes to.

use crate::{
    tables::{family::Family, maps::CARRIERS},
    transports::send,
};
use egress_common::egress::{CARRIER_ENTRIES, EgressIp, LOCAL_CARRIER, flags};

/// The carrier that is this node itself: not an index in `NODES`.
pub const LOCAL: u32 = LOCAL_CARRIER as u32;

/// Returns the carrier, of those that answer, to which packets of an egress IP go: an index in `NODES`,
/// [`LOCAL`], or 0 for none. `entropy` is the same for all packets of a flow ([`send::entropy`]).
#[inline(always)]
pub fn of(e: &EgressIp, egress: u32, entropy: u32) -> u32 {
    if e.flags & flags::SPREAD != 0
        && let Some(table) = CARRIERS.get(egress)
    {
        let at = (entropy as u64 * CARRIER_ENTRIES as u64) >> 32;
        // SAFETY: the product's upper half is below the number of entries.
        return unsafe { *table.node.as_ptr().add(at as usize) as u32 };
    }
    if e.flags & flags::LOCAL != 0 { LOCAL } else { e.gateway }
}

/// Returns the carrier of a flow with these translated source and destination ports.
#[inline(always)]
pub fn of_flow<F: Family>(e: &EgressIp, egress: u32, ports: (u16, u16), dst: F) -> u32 {
    of(e, egress, send::entropy(ports, dst))
}
