//! Which egress IP an address is.

use crate::tables::{family::Family, maps::EGRESS_IPS};
use egress_common::egress::EgressIp;

/// The egress IP with this address: its index and what this node knows of it.
///
/// The index is valid only if its entry has the address. One that was read while the memory of an entry went to another address leads elsewhere,
/// and is looked up again.
#[inline(always)]
pub fn find<F: Family>(addr: F) -> Option<(u32, &'static EgressIp)> {
    for _ in 0..2 {
        // SAFETY: read only.
        let &index = unsafe { F::egress_index().get(addr) }?;
        let entry = EGRESS_IPS.get(index)?;
        if addr.is(&entry.addr) {
            return Some((index, entry));
        }
    }
    None
}
