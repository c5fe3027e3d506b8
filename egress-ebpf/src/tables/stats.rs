//! Counting, without a lock: one value for each CPU.

use crate::tables::maps::COUNTERS;
use egress_common::verdict::Counter;

/// Adds one.
#[inline(always)]
pub fn count(counter: Counter) {
    count_index(counter as u32);
}

/// Adds one to the counter with this index.
#[inline(always)]
pub fn count_index(counter: u32) {
    if let Some(n) = COUNTERS.get_ptr_mut(counter) {
        // SAFETY: the slot is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU.
        unsafe { *n += 1 }
    }
}
