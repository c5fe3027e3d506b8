//! Chooses a slot for a new flow, and a source port from the blocks of its egress IP that are leased to this node.
//!
//! A port of an egress IP can be used once for each remote address, port and protocol: the reply's
//! 5-tuple, which is the key in `REVERSE_*`, must be unique. So a flow takes a port by inserting that key.

use crate::{
    flows::table,
    headers::{fields::proto, packet::now_tick},
    tables::{
        classify,
        family::Family,
        maps::{ASSIGNMENTS, BLOCKS, EGRESS_IPS, MAGLEV, Search},
        share, stats, traffic,
    },
};
use aya_ebpf::{bindings::BPF_NOEXIST, helpers::bpf_loop};
use core::ffi::c_void;
use egress_common::{
    endpoint::{AssignmentKey, policy_flags},
    flow::{FlowKey, Reverse, is_pair, pending},
    hash,
    limits::{MAGLEV_CHUNK, PORT_PROBES, SHARE_LIMIT, SHARE_PROBES, SLOT_PROBES, TIGHT_PROBES},
    port_block, tcp,
    verdict::Counter,
};

/// Result of an insertion with `BPF_NOEXIST` if the key exists (`-EEXIST`).
pub const EEXIST: i32 = -17;
const E2BIG: i32 = -7;
/// Probes for a free port before the port of a closed connection is taken.
const FREE_PROBES: u32 = 8;

const SEARCHING: u32 = 0;
const FOUND: u32 = 1;
const NO_PORT: u32 = 2;
const FULL: u32 = 3;
const SHARE: u32 = 4;

/// Returns this CPU's search.
#[inline(always)]
pub fn search<F: Family>() -> Option<&'static mut Search<F>> {
    // SAFETY: the element is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU.
    F::search().get_ptr_mut(0).map(|s| unsafe { &mut *s })
}

/// Takes a slot and a port. On success they are in `search.value` and `search.key`, and the reverse half is in its table.
#[inline(always)]
pub fn take<F: Family>(search: &mut Search<F>) -> Result<(), Counter> {
    search.outcome = SEARCHING;
    // SAFETY: the callback takes no context.
    unsafe { bpf_loop(SLOT_PROBES, try_slot::<F> as *mut c_void, core::ptr::null_mut(), 0) };
    match search.outcome {
        FOUND => Ok(()),
        FULL => Err(Counter::DropTableFull),
        // Not the flow quota: removing ended flows of other pods would free no port.
        SHARE => Err(Counter::DropPortShare),
        NO_PORT => Err(Counter::DropNoPort),
        _ => Err(Counter::DropNoGateway),
    }
}

/// Returns the egress IP of one attempt: first the one assigned to the endpoint, then one chosen by hash.
#[inline(always)]
fn slot<F: Family>(s: &Search<F>, attempt: u32) -> Option<u32> {
    let mut h = s.hash;
    if s.policy.flags & policy_flags::PER_ENDPOINT != 0 {
        let key = AssignmentKey { endpoint: s.endpoint, policy: s.value.policy as u32, family: F::VERSION };
        // SAFETY: read only. An endpoint that is not assigned yet waits: it must not be seen with two egress IPs.
        let assigned = unsafe { ASSIGNMENTS.get(key) }?;
        if attempt == 0 {
            return Some(*assigned);
        }
        // While the assigned egress IP is unusable, all of the endpoint's flows go to the same other one.
        h = hash::endpoint(s.value.pod, s.policy.seed);
    }
    if s.policy.table_len == 0 {
        return None;
    }
    let at = hash::attempt(h, attempt) % s.policy.table_len;
    let chunk = MAGLEV.get(s.policy.table + at / MAGLEV_CHUNK as u32)?;
    // SAFETY: the remainder is below the chunk's length.
    Some(unsafe { *chunk.egress.as_ptr().add((at % MAGLEV_CHUNK as u32) as usize) } as u32)
}

/// Returns 1 if the pod's flows have no slot but the usable one that is assigned to it: without a port there, a flow has none.
#[inline(always)]
fn is_only<F: Family>(s: &Search<F>) -> i64 {
    (s.policy.flags & policy_flags::PER_ENDPOINT != 0) as i64
}

/// Attempts one slot. Returns 0 to continue, 1 to stop.
extern "C" fn try_slot<F: Family>(attempt: u32, _ctx: *mut c_void) -> i64 {
    let Some(s) = search::<F>() else { return 1 };
    let Some(egress) = slot(s, attempt) else { return 0 };
    // A table that is being replaced may name an egress IP of another policy: only members count.
    let Some(member) = classify::member(s.value.policy as u32, egress) else { return 0 };
    let (Some(e), Some(list)) = (EGRESS_IPS.get(egress), BLOCKS.get(egress)) else { return 0 };
    if member.usable == 0 || member.generation != e.generation {
        return 0;
    }
    let blocks = list.count;
    s.outcome = NO_PORT;
    if blocks == 0 || blocks > port_block::COUNT as u32 {
        return is_only(s);
    }
    s.key.src = F::from_any(&e.addr);
    s.value.egress = egress;
    s.value.egress_generation = e.generation;
    s.value.account = traffic::account(s.namespace, s.value.policy as u32, egress);
    s.blocks = blocks;
    let ports = blocks * port_block::SIZE as u32;
    let probes = if ports < PORT_PROBES { ports } else { PORT_PROBES };
    // A pod with fewer flows cannot hold most of the ports towards one destination.
    if share::flows::<F>(s.endpoint) > (ports / 2) as u64 {
        s.own = 0;
        // SAFETY: the callback takes no context.
        unsafe { bpf_loop(SHARE_PROBES, look_at::<F> as *mut c_void, core::ptr::null_mut(), 0) };
        if s.own >= SHARE_LIMIT {
            s.outcome = SHARE;
            return is_only(s);
        }
    }
    // SAFETY: the callback takes no context.
    unsafe { bpf_loop(probes, try_port::<F> as *mut c_void, core::ptr::null_mut(), 0) };
    if s.outcome == NO_PORT { is_only(s) } else { 1 }
}

/// Puts the port of one attempt into the key.
#[inline(always)]
fn aim<F: Family>(s: &mut Search<F>, i: u32) -> Option<()> {
    if s.blocks == 0 {
        return None;
    }
    let (at, offset) = port_block::probe(s.hash, i, s.blocks);
    let list = BLOCKS.get(s.value.egress)?;
    if at >= port_block::COUNT as u32 {
        return None;
    }
    // SAFETY: `at` is within the array.
    let block = unsafe { *list.blocks.as_ptr().add(at as usize) };
    s.key.src_port = (port_block::first_port(block) + offset).to_be();
    Some(())
}

/// Counts a port that a live flow of this pod holds. Returns 0 to continue, 1 to stop once enough ports are not the pod's.
extern "C" fn look_at<F: Family>(i: u32, _ctx: *mut c_void) -> i64 {
    let Some(s) = search::<F>() else { return 1 };
    if aim(s, i).is_none() {
        return 1;
    }
    // SAFETY: read only.
    let r = unsafe { F::reverses().get(&s.key) };
    if r.is_some_and(|r| r.endpoint == s.endpoint && matches!(holder(s, r), Holder::Flow)) {
        s.own += 1;
    }
    (i + SHARE_LIMIT >= SHARE_PROBES + s.own) as i64
}

/// Attempts one port. Returns 0 to continue, 1 to stop.
extern "C" fn try_port<F: Family>(i: u32, _ctx: *mut c_void) -> i64 {
    let Some(s) = search::<F>() else { return 1 };
    if aim(s, i).is_none() {
        return 1;
    }
    s.value.seal(&s.key);
    if i == TIGHT_PROBES {
        stats::count(Counter::PortsTight);
    }
    match F::reverses().insert(&s.key, &s.value, BPF_NOEXIST as u64) {
        Ok(()) => s.outcome = FOUND,
        Err(EEXIST) => {
            if i < FREE_PROBES || !evict_closed(s) {
                return 0;
            }
            match F::reverses().insert(&s.key, &s.value, BPF_NOEXIST as u64) {
                Ok(()) => s.outcome = FOUND,
                Err(_) => return 0,
            }
        }
        Err(E2BIG) => s.outcome = FULL,
        Err(_) => return 0,
    }
    1
}

/// Ticks after which a reverse half without a forward one is orphaned: a new flow enters both within a packet's time.
const ORPHANED: u32 = 2;

/// The holder of a port.
enum Holder {
    /// A flow.
    Flow,
    /// A flow that both ends are done with, or that the host's firewall refused.
    Over,
    /// A reverse half without a forward one.
    Nobody,
}

/// Returns the holder of the port that is tried, given its reverse half. Writes the forward half's
/// key to `search.holder`, because it is too large for the stack.
#[inline(always)]
fn holder<F: Family>(s: &mut Search<F>, r: &Reverse<F>) -> Holder {
    let key = &s.key;
    s.holder = FlowKey { src: r.pod, dst: key.dst, src_port: r.pod_port, dst_port: key.dst_port, proto: key.proto };
    // SAFETY: read only.
    let over = match unsafe { F::flows().get(&s.holder) } {
        Some(f) if is_pair(&s.holder, f, key, r) => {
            // A flow that the host's firewall did not let pass is unknown outside.
            let refused = f.pending == pending::NEW && now_tick().wrapping_sub(f.last_seen) as i32 > ORPHANED as i32;
            Some(refused || key.proto == proto::TCP && tcp::closed(f.state, f.back))
        }
        _ => None,
    };
    match over {
        Some(true) => Holder::Over,
        None if now_tick().wrapping_sub(r.last_seen) as i32 > ORPHANED as i32 => Holder::Nobody,
        _ => Holder::Flow,
    }
}

/// Removes the flow that holds this port if both of its ends are done with it, or if only this half of it is left.
#[inline(always)]
fn evict_closed<F: Family>(s: &mut Search<F>) -> bool {
    // SAFETY: read only; if another CPU removes the entry, the caller's insertion detects it.
    let Some(r) = (unsafe { F::reverses().get(&s.key) }) else { return true };
    match holder(s, r) {
        Holder::Flow => return false,
        Holder::Over => {
            if let Some(flow) = F::flows().get_ptr(&s.holder) {
                // SAFETY: a pointer into the map.
                let flow = unsafe { &*flow };
                table::remove(&s.holder, flow, table::later(flow.last_seen, r.last_seen));
            }
        }
        Holder::Nobody => {}
    }
    let _ = F::reverses().remove(&s.key);
    stats::count(Counter::FlowsReplaced);
    true
}
