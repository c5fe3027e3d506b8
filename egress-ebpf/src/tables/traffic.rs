//! Traffic counters for a policy's flows from a namespace: one value for each CPU, indexed by the flow's account.

use crate::{
    headers::packet::{ETH_LEN, Packet},
    tables::maps::{ACCOUNTS, TRAFFIC},
};
use egress_common::{
    traffic::{AccountKey, OTHER, REFUSALS, Traffic},
    verdict::Counter,
};

/// Returns the account of flows of this namespace, policy and egress IP.
#[inline(always)]
pub fn account(namespace: u32, policy: u32, egress: u32) -> u16 {
    account_number(namespace, policy, egress) as u16
}

/// A global function: its callers have no stack left for the key.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn account_number(namespace: u32, policy: u32, egress: u32) -> u64 {
    // SAFETY: read only.
    unsafe { ACCOUNTS.get(AccountKey { namespace, policy, egress }) }.map_or(OTHER as u64, |account| *account as u64)
}

#[inline(always)]
fn of(account: u16) -> Option<&'static mut Traffic> {
    // SAFETY: the element is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU.
    TRAFFIC.get_ptr_mut(account as u32).map(|traffic| unsafe { &mut *traffic })
}

/// Counts a pod's packet that is sent.
#[inline(always)]
pub fn sent(account: u16, pkt: &Packet) {
    if let Some(traffic) = of(account) {
        traffic.sent_packets += pkt.context().segments() as u64;
        traffic.sent_bytes += (pkt.len() - ETH_LEN) as u64;
    }
}

/// Counts a reply delivered to its pod.
#[inline(always)]
pub fn received(account: u16, pkt: &Packet) {
    if let Some(traffic) = of(account) {
        traffic.received_packets += pkt.context().segments() as u64;
        traffic.received_bytes += (pkt.len() - ETH_LEN) as u64;
    }
}

/// Counts a new flow.
#[inline(always)]
pub fn opened(account: u16) {
    if let Some(traffic) = of(account) {
        traffic.opened += 1;
    }
}

/// Counts the first packet of a refused flow, if the counter is that of a refusal.
#[inline(always)]
pub fn refused(account: u16, counter: u32) {
    let Some(traffic) = of(account) else { return };
    for (count, reason) in traffic.refused.iter_mut().zip(REFUSALS) {
        if reason as u32 == counter {
            *count += 1;
        }
    }
}

/// Returns whether this counter is one of refused flows.
#[inline(always)]
pub fn is_refusal(counter: u32) -> bool {
    REFUSALS.iter().any(|reason: &Counter| *reason as u32 == counter)
}
