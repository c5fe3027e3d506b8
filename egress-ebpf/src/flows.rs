//! The flow table: entering, mending and removing flows, both halves of them.

use crate::{
    family::Family,
    maps::EGRESS_IPS,
    packet::{Mac, Packet, now_tick},
    ports::EEXIST,
    share, stats,
};
use aya_ebpf::{bindings::BPF_NOEXIST, helpers::bpf_get_prandom_u32};
use egress_common::{
    flow::{Flow, FlowKey, Reverse, Ticket, kind},
    limits::COLLECT_ROUND_SHIFT,
    verdict::{Counter, Verdict},
};

/// The key of a flow's other half, or `None` if its egress IP is gone.
#[inline(always)]
pub fn reverse_key<F: Family>(key: &FlowKey<F>, flow: &Flow) -> Option<FlowKey<F>> {
    let e = EGRESS_IPS.get(flow.egress)?;
    if e.generation != flow.egress_generation {
        return None;
    }
    Some(FlowKey {
        src: F::from_any(&e.addr),
        dst: key.dst,
        src_port: flow.port,
        dst_port: key.dst_port,
        proto: key.proto,
    })
}

/// Removes both halves of a flow.
#[inline(always)]
pub fn forget<F: Family>(key: &FlowKey<F>, flow: &Flow) {
    if flow.kind != kind::UNTOUCHED
        && let Some(reverse) = reverse_key::<F>(key, flow)
    {
        let _ = F::reverses().remove(reverse);
    }
    remove::<F>(key);
}

/// Removes the forward half.
#[inline(always)]
pub fn remove<F: Family>(key: &FlowKey<F>) {
    if F::flows().remove(key).is_ok() {
        share::give_back::<F>(key.src);
    }
}

/// Builds the reverse half anew if it is missing. Called once a tick for a flow that sends.
#[inline(always)]
pub fn mend_reverse<F: Family>(pkt: &Packet, key: &FlowKey<F>, flow: &Flow, now: u32) {
    let Some(reverse) = reverse_key::<F>(key, flow) else { return };
    if F::reverses().get_ptr(reverse).is_some() {
        return;
    }
    let Some(mut value) = reverse_value(pkt, key, flow.policy, now) else { return };
    value.egress = flow.egress;
    value.egress_generation = flow.egress_generation;
    if F::reverses().insert(reverse, value, BPF_NOEXIST as u64).is_ok() {
        stats::count(Counter::FlowsRepaired);
    }
}

/// What a reply needs to find its way back to where this packet came from; the slot is filled in by the caller.
#[inline(always)]
pub fn reverse_value<F: Family>(pkt: &Packet, key: &FlowKey<F>, policy: u32, now: u32) -> Option<Reverse<F>> {
    let [host_mac, pod_mac] = pkt.read::<[Mac; 2]>(0)?;
    Some(Reverse {
        pod: key.src,
        pod_port: key.src_port,
        state: 0,
        ifindex: pkt.ifindex(),
        policy,
        egress: 0,
        egress_generation: 0,
        last_seen: now,
        pod_mac,
        host_mac,
    })
}

/// Notes a flow that is not to be touched, as the tables of this generation say.
#[inline(always)]
pub fn leave_alone<F: Family>(pkt: &Packet, generation: u32, key: &FlowKey<F>, state: u16) -> Verdict {
    let now = now_tick();
    let flow = Flow {
        policy: 0,
        egress: 0,
        egress_generation: 0,
        config_generation: generation,
        ticket: ticket(),
        last_seen: now,
        created: now,
        port: 0,
        state,
        kind: kind::UNTOUCHED,
        pending: 0,
        ifindex: pkt.ifindex(),
    };
    match enter::<F>(key, &flow) {
        Ok(()) => {
            stats::count(Counter::Untouched);
            Verdict::Pass
        }
        Err(EEXIST) => Verdict::Pass,
        Err(_) => Verdict::Drop(Counter::DropTableFull),
    }
}

#[inline(always)]
pub fn ticket() -> u32 {
    // SAFETY: the helper has no arguments.
    unsafe { bpf_get_prandom_u32() }
}

/// Puts a new flow into the table and into the collector's queue.
#[inline(always)]
pub fn enter<F: Family>(key: &FlowKey<F>, flow: &Flow) -> Result<(), i32> {
    F::flows().insert(key, flow, BPF_NOEXIST as u64)?;
    let ticket = Ticket { key: *key, ticket: flow.ticket, checked: flow.created >> COLLECT_ROUND_SHIFT };
    F::tickets().push(ticket, 0).inspect_err(|_| {
        let _ = F::flows().remove(key);
    })?;
    share::take::<F>(key.src);
    Ok(())
}
