//! Reports flows for the flow log (`flowLog.mode: Flows`): their beginnings and ends, through a ring buffer that delays no packet.
//! Records that find no room are counted.

use crate::tables::{family::Family, maps::FLOW_EVENTS, stats};
use aya_ebpf::{bindings::BPF_RB_NO_WAKEUP, maps::ring_buf::RingBufEntry};
use egress_common::{
    event::{FlowEvent, what},
    flow::{Flow, FlowKey, pending},
    verdict::Counter,
};

/// Whether flows are logged, 0 or 1. The agent sets it before it loads the programs, so that the verifier omits the rest where it is 0.
#[unsafe(no_mangle)]
static LOG_FLOWS: u32 = 0;

#[inline(always)]
pub fn is_kept() -> bool {
    // SAFETY: as of any static.
    unsafe { (&raw const LOG_FLOWS).read_volatile() != 0 }
}

/// Reports that the flow has been entered.
#[inline(never)]
pub fn began<F: Family>(key: &FlowKey<F>, flow: &Flow) {
    match record(key, flow, flow.created, what::BEGAN) {
        // The agent polls once a second: no wake-up.
        Some(record) => record.submit(BPF_RB_NO_WAKEUP as u64),
        None => stats::count(Counter::FlowLogLost),
    }
}

/// Removes the forward half of a flow and reports its end. Returns 1 if it was there. `last` is the tick of the flow's last packet.
///
/// Every field is read before the removal: afterwards the entry's memory may belong to another flow.
#[inline(never)]
pub fn remove<F: Family>(key: &FlowKey<F>, flow: &Flow, last: u32) -> u64 {
    let what = if flow.pending == pending::NEW { what::REFUSED } else { what::ENDED };
    let record = record(key, flow, last, what);
    let removed = F::flows().remove(key).is_ok();
    match record {
        Some(record) if removed => record.submit(BPF_RB_NO_WAKEUP as u64),
        Some(record) => record.discard(BPF_RB_NO_WAKEUP as u64),
        None if removed => stats::count(Counter::FlowLogLost),
        None => {}
    }
    removed as u64
}

#[inline(always)]
fn record<F: Family>(key: &FlowKey<F>, flow: &Flow, last_seen: u32, what: u8) -> Option<RingBufEntry<FlowEvent<F>>> {
    let mut record = FLOW_EVENTS.reserve_untyped::<FlowEvent<F>>(0)?;
    let to = record.as_mut_ptr();
    // Written field by field: the stack has no room for a copy.
    // SAFETY: the record is this program's own until it is submitted.
    unsafe {
        (&raw mut (*to).key.src).write(key.src);
        (&raw mut (*to).key.dst).write(key.dst);
        (&raw mut (*to).key.src_port).write(key.src_port);
        (&raw mut (*to).key.dst_port).write(key.dst_port);
        (&raw mut (*to).key.proto).write(key.proto);
        (&raw mut (*to).egress).write(flow.egress);
        (&raw mut (*to).egress_generation).write(flow.egress_generation);
        (&raw mut (*to).policy).write(flow.policy as u32);
        (&raw mut (*to).endpoint).write(flow.endpoint);
        (&raw mut (*to).ticket).write(flow.ticket);
        (&raw mut (*to).created).write(flow.created);
        (&raw mut (*to).last_seen).write(last_seen);
        (&raw mut (*to).port).write(flow.port);
        (&raw mut (*to).what).write(what);
        (&raw mut (*to).family).write(F::VERSION as u8);
    }
    Some(record)
}
