//! Each pod's quota of the flow table, so that a pod that opens flows without end takes no room from
//! others. Flows are counted by endpoint: a pod that inherits an address does not inherit its usage.

use crate::tables::family::Family;
use aya_ebpf::bindings::BPF_NOEXIST;
use core::arch::asm;
use egress_common::config::DatapathConfig;

/// Returns whether the pod may open no more flows.
#[inline(always)]
pub fn is_used_up<F: Family>(config: &DatapathConfig, endpoint: u32) -> bool {
    let Some(flows) = F::shares().get_ptr(endpoint) else { return false };
    // SAFETY: a pointer into the map.
    let used = unsafe { flows.read_volatile() } as i64;
    // It may be negative for a while: see `take`.
    config.pod_flows != 0 && used >= config.pod_flows as i64
}

/// Returns the number of the pod's flows.
#[inline(always)]
pub fn flows<F: Family>(endpoint: u32) -> u64 {
    // SAFETY: a pointer into the map.
    F::shares().get_ptr(endpoint).map_or(0, |flows| unsafe { flows.read_volatile() })
}

/// Counts one more flow of the pod.
#[inline(always)]
pub fn take<F: Family>(endpoint: u32) {
    match F::shares().get_ptr_mut(endpoint) {
        Some(flows) => add(flows, 1),
        // Another CPU may be first: then the pod has one flow more than the count.
        None => drop(F::shares().insert(endpoint, 1, BPF_NOEXIST as u64)),
    }
}

/// Counts one flow fewer. A flow that was not counted is not subtracted.
#[inline(always)]
pub fn give_back<F: Family>(endpoint: u32) {
    let Some(flows) = F::shares().get_ptr_mut(endpoint) else { return };
    // SAFETY: a pointer into the map.
    if unsafe { flows.read_volatile() } as i64 > 1 {
        add(flows, u64::MAX);
    } else {
        let _ = F::shares().remove(endpoint);
    }
}

/// Adds atomically.
#[inline(always)]
fn add(flows: *mut u64, n: u64) {
    // SAFETY: a pointer into the map, whose values are aligned.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) flows, in(reg) n) };
}
