//! The flow table: enters, repairs and removes both halves of flows. A half is accepted, rebuilt or removed
//! for the other only if the two refer to each other: another flow may have taken the other's place.

use crate::{
    flows::log,
    headers::packet::{Mac, Packet},
    tables::{family::Family, maps::EGRESS_IPS, share, stats},
};
use aya_ebpf::{bindings::BPF_NOEXIST, helpers::bpf_get_prandom_u32};
use egress_common::{
    flow::{Flow, FlowKey, Reverse, Target, Ticket, is_pair},
    limits::COLLECT_ROUND_SHIFT,
    tcp,
    verdict::Counter,
};

/// Returns the key of a flow's other half, or `None` if its egress IP is gone.
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

/// The data that is needed to send a flow's packets.
#[derive(Clone, Copy)]
pub struct Taken {
    /// Index of the egress IP.
    pub egress: u32,
    /// Translated source port, or ICMP identifier.
    pub port: u16,
    /// [`Flow::kind`].
    pub kind: u8,
    /// [`Flow::pending`].
    pub pending: u8,
    /// [`Flow::account`].
    pub account: u16,
}

/// Reads it from `flow`; `None` if the entry became another flow's since the lookup ([`checksum`](egress_common::hash::checksum)).
#[inline(always)]
pub fn taken<F: Family>(key: &FlowKey<F>, flow: &Flow) -> Option<Taken> {
    let taken = Taken {
        egress: peek(&flow.egress),
        port: peek(&flow.port),
        kind: peek(&flow.kind),
        pending: peek(&flow.pending),
        account: peek(&flow.account),
    };
    let check = Flow::checksum(key, taken.egress, taken.port, peek(&flow.ifindex));
    (check == peek(&flow.check)).then_some(taken)
}

/// Returns the destination of replies with this 5-tuple; `None` if the entry became another flow's since the lookup.
#[inline(always)]
pub fn target<F: Family>(key: &FlowKey<F>, r: &Reverse<F>) -> Option<Target<F>> {
    let macs = [peek(&r.pod_mac), peek(&r.host_mac)];
    let to = Target { pod: peek(&r.pod), port: peek(&r.pod_port), ifindex: peek(&r.ifindex), macs };
    (Reverse::checksum(key, &to) == peek(&r.check)).then_some(to)
}

/// Reads a field exactly once, so that the checked value is the one used.
#[inline(always)]
fn peek<T: Copy>(field: &T) -> T {
    // SAFETY: a reference is valid for reading.
    unsafe { (field as *const T).read_volatile() }
}

/// Removes both halves of a flow.
#[inline(always)]
pub fn forget<F: Family>(key: &FlowKey<F>, flow: &Flow) {
    let mut last = flow.last_seen;
    if let Some(reverse) = reverse_key::<F>(key, flow)
        // SAFETY: read only.
        && let Some(value) = unsafe { F::reverses().get(&reverse) }
        && is_pair(key, flow, &reverse, value)
    {
        last = later(last, value.last_seen);
        let _ = F::reverses().remove(&reverse);
    }
    remove::<F>(key, flow, last);
}

/// Removes the forward half of a flow whose last packet came in the tick `last`.
#[inline(always)]
pub fn remove<F: Family>(key: &FlowKey<F>, flow: &Flow, last: u32) {
    let endpoint = flow.endpoint;
    let removed = if log::is_kept() { log::remove::<F>(key, flow, last) != 0 } else { F::flows().remove(key).is_ok() };
    if removed {
        share::give_back::<F>(endpoint);
    }
}

/// Returns the later one of two ticks.
#[inline(always)]
pub fn later(one: u32, other: u32) -> u32 {
    if other.wrapping_sub(one) as i32 > 0 { other } else { one }
}

/// Confirms a flow after the host's firewall has let one of its packets pass: from now on its
/// packets take the fast path, and its replies are delivered.
#[inline(always)]
pub fn confirm<F: Family>(key: &FlowKey<F>, flow: &mut Flow) {
    flow.pending = 0;
    let Some(reverse) = reverse_key::<F>(key, flow) else { return };
    let Some(value) = F::reverses().get_ptr_mut(&reverse) else { return };
    // SAFETY: a pointer into the map.
    if is_pair(key, flow, &reverse, unsafe { &*value }) {
        set_confirmed(value);
    }
}

#[inline(always)]
fn set_confirmed<F: Family>(reverse: *mut Reverse<F>) {
    // SAFETY: a pointer into the map, and a single store to a field that may lag by a packet.
    unsafe {
        let state = (&raw const (*reverse).state).read_volatile();
        if state & tcp::seen::CONFIRMED == 0 {
            (&raw mut (*reverse).state).write_volatile(state | tcp::seen::CONFIRMED);
        }
    }
}

/// Returns the state of a new reverse half, which depends on whether its flow waits for the host's firewall ([`Flow::pending`]).
#[inline(always)]
pub fn reverse_state(pending: u8) -> u16 {
    if pending == 0 { tcp::seen::CONFIRMED } else { 0 }
}

/// Rebuilds the reverse half if it is missing. Called once a tick for a flow that sends. Returns `false` if another flow has its place.
#[inline(always)]
pub fn mend_reverse<F: Family>(pkt: &Packet, key: &FlowKey<F>, flow: &Flow, now: u32) -> bool {
    let Some(reverse) = reverse_key::<F>(key, flow) else { return true };
    if let Some(value) = F::reverses().get_ptr_mut(&reverse) {
        // SAFETY: a pointer into the map.
        let mine = is_pair(key, flow, &reverse, unsafe { &*value });
        if mine && flow.pending == 0 {
            set_confirmed(value);
        }
        return mine;
    }
    let Some(mut value) = reverse_value(pkt, key, flow.policy as u32, flow.endpoint, flow.pending, now) else {
        return true;
    };
    value.egress = flow.egress;
    value.egress_generation = flow.egress_generation;
    value.account = flow.account;
    value.seal(&reverse);
    if F::reverses().insert(&reverse, &value, BPF_NOEXIST as u64).is_ok() {
        stats::count(Counter::FlowsRepaired);
    }
    true
}

/// Returns the reverse half that leads replies back to this packet's origin. The caller fills in the slot, the account and the check.
#[inline(always)]
pub fn reverse_value<F: Family>(
    pkt: &Packet,
    key: &FlowKey<F>,
    policy: u32,
    endpoint: u32,
    pending: u8,
    now: u32,
) -> Option<Reverse<F>> {
    let [host_mac, pod_mac] = pkt.read::<[Mac; 2]>(0)?;
    Some(Reverse {
        check: 0,
        pod: key.src,
        pod_port: key.src_port,
        state: reverse_state(pending),
        ifindex: pkt.ifindex(),
        policy: policy as u16,
        account: 0,
        egress: 0,
        egress_generation: 0,
        endpoint,
        last_seen: now,
        pod_mac,
        host_mac,
    })
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
    share::take::<F>(flow.endpoint);
    if log::is_kept() {
        log::began::<F>(key, flow);
    }
    Ok(())
}

/// Returns the tick of the last packet in either direction, and the reverse half's state; 0 if that half is gone.
#[inline(always)]
pub fn last_seen<F: Family>(key: &FlowKey<F>, flow: &Flow) -> (u32, u16) {
    // SAFETY: read only.
    match reverse_key::<F>(key, flow).and_then(|reverse| unsafe { F::reverses().get(reverse) }) {
        Some(r) => (later(flow.last_seen, r.last_seen), r.state),
        None => (flow.last_seen, 0),
    }
}
