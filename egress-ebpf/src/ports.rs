//! Choosing a slot for a new flow, and a source port out of the blocks of its egress IP that are leased to this node.
//!
//! The ports of an egress IP are free per remote address, port and protocol: what must be unique is the reply's 5-tuple,
//! that is the key in `REVERSE_*`. So taking a port is inserting that key.

use crate::{
    classify,
    family::Family,
    flows,
    maps::{ASSIGNMENTS, BLOCKS, EGRESS_IPS, MAGLEV},
    packet::now_tick,
    stats,
};
use aya_ebpf::{bindings::BPF_NOEXIST, helpers::bpf_loop};
use core::ffi::c_void;
use egress_common::{
    endpoint::{AssignmentKey, Policy, policy_flags},
    flow::{FlowKey, Reverse},
    hash,
    limits::{MAGLEV_CHUNK, PORT_PROBES, SLOT_PROBES},
    port_block, tcp,
    verdict::Counter,
};

/// What inserting with `BPF_NOEXIST` says of a key that is there (`-EEXIST`).
pub const EEXIST: i32 = -17;
const E2BIG: i32 = -7;
/// Probes that look for a free port before a closed connection's port is good enough.
const FREE_PROBES: u32 = 8;

/// A search, in a map of its own for each CPU: loops in BPF keep their state best in memory that the verifier does not
/// follow.
#[repr(C)]
pub struct Search<F> {
    /// The reply's 5-tuple. Its source is the egress IP and port that are tried.
    pub key: FlowKey<F>,
    /// What is entered for it; `policy` and `pod` are given, the slot is filled in.
    pub value: Reverse<F>,
    /// The policy.
    pub policy: Policy,
    /// Number of the endpoint.
    pub endpoint: u32,
    /// Generation of the tables that the flow was classified by.
    pub generation: u32,
    /// The flow's hash: where both walks begin.
    pub hash: u32,
    /// How many blocks the egress IP has here.
    pub blocks: u32,
    /// [`SEARCHING`] or how it ended.
    pub outcome: u32,
}

const SEARCHING: u32 = 0;
const FOUND: u32 = 1;
const NO_PORT: u32 = 2;
const FULL: u32 = 3;

/// This CPU's search.
#[inline(always)]
fn search<F: Family>() -> Option<&'static mut Search<F>> {
    // SAFETY: the element is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU.
    F::search().get_ptr_mut(0).map(|s| unsafe { &mut *s })
}

/// Takes a slot and a port. They are in `search.value` and `search.key`, and the reverse half is in its table.
#[inline(always)]
pub fn take<F: Family>(search: &mut Search<F>) -> Result<(), Counter> {
    search.outcome = SEARCHING;
    // SAFETY: the callback takes no context.
    unsafe { bpf_loop(SLOT_PROBES, try_slot::<F> as *mut c_void, core::ptr::null_mut(), 0) };
    match search.outcome {
        FOUND => Ok(()),
        FULL => Err(Counter::DropTableFull),
        NO_PORT => Err(Counter::DropNoPort),
        _ => Err(Counter::DropNoGateway),
    }
}

/// The egress IP of one attempt: the endpoint's own one first, then by hash.
#[inline(always)]
fn slot<F: Family>(s: &Search<F>, attempt: u32) -> Option<u32> {
    let mut h = s.hash;
    if s.policy.flags & policy_flags::PER_ENDPOINT != 0 {
        let key = AssignmentKey { endpoint: s.endpoint, policy: s.value.policy, family: F::VERSION };
        // SAFETY: read only. An endpoint that is not assigned yet waits: it must not be seen with two egress IPs.
        let assigned = unsafe { ASSIGNMENTS.get(key) }?;
        if attempt == 0 {
            return Some(*assigned);
        }
        // While that one cannot be used, all of the endpoint's flows go to the same other one.
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

/// One attempt at a slot: 0 to go on, 1 to stop.
extern "C" fn try_slot<F: Family>(attempt: u32, _ctx: *mut c_void) -> i64 {
    let Some(s) = search::<F>() else { return 1 };
    let Some(egress) = slot(s, attempt) else { return 0 };
    // A table that is being replaced may name an egress IP of another policy: only members count.
    let Some(member) = classify::member(s.value.policy, egress) else { return 0 };
    let (Some(e), Some(list)) = (EGRESS_IPS.get(egress), BLOCKS.get(egress)) else { return 0 };
    if member.usable == 0 || member.generation != e.generation {
        return 0;
    }
    let blocks = list.count;
    s.outcome = NO_PORT;
    if blocks == 0 || blocks > port_block::COUNT as u32 {
        return 0;
    }
    s.key.src = F::from_any(&e.addr);
    s.value.egress = egress;
    s.value.egress_generation = e.generation;
    s.blocks = blocks;
    let ports = blocks * port_block::SIZE as u32;
    let probes = if ports < PORT_PROBES { ports } else { PORT_PROBES };
    // SAFETY: the callback takes no context.
    unsafe { bpf_loop(probes, try_port::<F> as *mut c_void, core::ptr::null_mut(), 0) };
    (s.outcome != NO_PORT) as i64
}

/// One attempt at a port: 0 to go on, 1 to stop.
extern "C" fn try_port<F: Family>(i: u32, _ctx: *mut c_void) -> i64 {
    let Some(s) = search::<F>() else { return 1 };
    if s.blocks == 0 {
        return 1;
    }
    let (at, offset) = port_block::probe(s.hash, i, s.blocks);
    let Some(list) = BLOCKS.get(s.value.egress) else { return 1 };
    if at >= port_block::COUNT as u32 {
        return 1;
    }
    // SAFETY: `at` is within the array.
    let block = unsafe { *list.blocks.as_ptr().add(at as usize) };
    s.key.src_port = (port_block::first_port(block) + offset).to_be();
    match F::reverses().insert(&s.key, &s.value, BPF_NOEXIST as u64) {
        Ok(()) => s.outcome = FOUND,
        Err(EEXIST) => {
            if i < FREE_PROBES || !evict_closed::<F>(&s.key) {
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

/// Ticks after which a reverse half without a forward one is nobody's: a new flow enters both within a packet's time.
const ORPHANED: u32 = 2;

/// Removes the flow that holds this port if both of its ends are done with it, or if only this half of it is left.
#[inline(always)]
fn evict_closed<F: Family>(key: &FlowKey<F>) -> bool {
    // SAFETY: read only; another CPU may remove the entry, which the caller's insertion then finds out.
    let Some(r) = (unsafe { F::reverses().get(key) }) else { return true };
    let forward = FlowKey { src: r.pod, dst: key.dst, src_port: r.pod_port, dst_port: key.dst_port, proto: key.proto };
    // SAFETY: as above.
    let out = match unsafe { F::flows().get(&forward) } {
        Some(f) if f.port == key.src_port && f.egress == r.egress => {
            // Nobody outside has seen a flow that the host's firewall did not let pass.
            let refused = f.pending != 0 && now_tick().wrapping_sub(f.last_seen) as i32 > ORPHANED as i32;
            Some(if refused { tcp::seen::RST } else { f.state })
        }
        _ => None,
    };
    match out {
        Some(out) if tcp::closed(out, r.state) => {
            flows::remove::<F>(&forward);
        }
        None if now_tick().wrapping_sub(r.last_seen) as i32 > ORPHANED as i32 => {}
        _ => return false,
    }
    let _ = F::reverses().remove(key);
    stats::count(Counter::FlowsReplaced);
    true
}
