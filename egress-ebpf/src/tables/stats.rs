//! Counters without a lock: one value for each CPU.

use crate::tables::maps::COUNTERS;
use egress_common::verdict::Counter;

/// Adds one to a counter.
#[inline(always)]
pub fn count(counter: Counter) {
    count_index(counter as u32);
}

/// Adds one to the counter with this index. Returns the earlier value on this CPU.
#[inline(always)]
pub fn count_index(counter: u32) -> u64 {
    let Some(n) = COUNTERS.get_ptr_mut(counter) else { return 0 };
    // SAFETY: the slot is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU.
    unsafe {
        let before = *n;
        *n = before + 1;
        before
    }
}
