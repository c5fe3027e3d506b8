//! Finds the egress IP with an address.

use crate::tables::{
    family::Family,
    maps::{EGRESS_HINTS, EGRESS_IPS},
};
use egress_common::egress::{self, EgressIp, flags};

/// Returns the index and the entry of the egress IP with this address.
///
/// An index is valid only if its entry has the address. One that was read while its record's memory went to another address leads
/// elsewhere, and is looked up again. The last index found is tried first: a lookup in a hash table is several calls, in an array none.
#[inline(always)]
pub fn find<F: Family>(addr: F) -> Option<(u32, &'static EgressIp)> {
    let hint = EGRESS_HINTS.get_ptr_mut(egress::hint(addr.last_word()))?;
    // SAFETY: a pointer into the map. All CPUs write whole words.
    let likely = unsafe { hint.read_volatile() };
    if let Some(entry) = EGRESS_IPS.get(likely)
        && entry.flags & flags::LISTED != 0
        && addr.is(&entry.addr)
    {
        return Some((likely, entry));
    }
    for _ in 0..2 {
        // SAFETY: read only.
        let &index = unsafe { F::egress_index().get(addr) }?;
        let entry = EGRESS_IPS.get(index)?;
        if addr.is(&entry.addr) {
            // SAFETY: as above.
            unsafe { hint.write_volatile(index) };
            return Some((index, entry));
        }
    }
    None
}
