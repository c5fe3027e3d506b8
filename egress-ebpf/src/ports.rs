//! Taking a source port for a new flow out of the blocks that are leased to this node.
//!
//! The ports of an egress IP are free per remote address, port and protocol: what must be unique is the reply's 5-tuple,
//! that is the key in `REVERSE_*`. So taking a port is inserting that key.

use crate::{family::Family, maps::BLOCKS, stats};
use aya_ebpf::{bindings::BPF_NOEXIST, helpers::bpf_loop};
use core::ffi::c_void;
use egress_common::{
    flow::{FlowKey, Reverse},
    limits::PORT_PROBES,
    port_block, tcp,
    verdict::Counter,
};

const EEXIST: i32 = -17;
const E2BIG: i32 = -7;
/// Probes that look for a free port before a closed connection's port is good enough.
const FREE_PROBES: u32 = 8;

/// What a search for a port came to.
pub enum Port {
    /// The port, network byte order; the reverse entry is in the table.
    Taken(u16),
    /// Every port that was tried is in use.
    None,
    /// The table has no room.
    TableFull,
}

/// A search, in a map of its own for each CPU.
#[repr(C)]
pub struct Search<F> {
    /// The reply's 5-tuple; its source port is the candidate.
    pub key: FlowKey<F>,
    /// What is entered for it.
    pub value: Reverse<F>,
    /// Index of the egress IP.
    pub egress: u32,
    /// The flow's hash, where the walk begins.
    pub hash: u32,
    /// How many blocks there are.
    pub blocks: u32,
    /// [`SEARCHING`] or how it ended.
    pub outcome: u32,
}

const SEARCHING: u32 = 0;
const FOUND: u32 = 1;
const FULL: u32 = 2;

/// Takes a port of the egress IP with index `egress` for the search that has its `key` (but the port), `value` and `hash`.
#[inline(always)]
pub fn take<F: Family>(search: &mut Search<F>, egress: u32) -> Port {
    let Some(list) = BLOCKS.get(egress) else { return Port::None };
    let blocks = list.count;
    if blocks == 0 || blocks > port_block::COUNT as u32 {
        return Port::None;
    }
    search.egress = egress;
    search.blocks = blocks;
    search.outcome = SEARCHING;
    let ports = blocks * port_block::SIZE as u32;
    let probes = if ports < PORT_PROBES { ports } else { PORT_PROBES };
    // SAFETY: the callback takes no context.
    unsafe { bpf_loop(probes, probe::<F> as *mut c_void, core::ptr::null_mut(), 0) };
    match search.outcome {
        FOUND => Port::Taken(search.key.src_port),
        FULL => Port::TableFull,
        _ => Port::None,
    }
}

/// One probe: 0 to go on, 1 to stop.
extern "C" fn probe<F: Family>(i: u32, _ctx: *mut c_void) -> i64 {
    let Some(search) = F::search().get_ptr_mut(0) else { return 1 };
    // SAFETY: the element is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU.
    let s = unsafe { &mut *search };
    if s.blocks == 0 {
        return 1;
    }
    let (at, offset) = port_block::probe(s.hash, i, s.blocks);
    let Some(list) = BLOCKS.get(s.egress) else { return 1 };
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

/// Removes the flow that holds this port if both of its ends are done with it.
#[inline(always)]
fn evict_closed<F: Family>(key: &FlowKey<F>) -> bool {
    // SAFETY: read only; another CPU may remove the entry, which the caller's insertion then finds out.
    let Some(r) = (unsafe { F::reverses().get(key) }) else { return true };
    let forward = FlowKey { src: r.pod, dst: key.dst, src_port: r.pod_port, dst_port: key.dst_port, proto: key.proto };
    // SAFETY: as above.
    let out = match unsafe { F::flows().get(&forward) } {
        Some(f) if f.port == key.src_port => f.state,
        _ => 0,
    };
    if !tcp::closed(out, r.state) {
        return false;
    }
    let _ = F::flows().remove(&forward);
    let _ = F::reverses().remove(key);
    stats::count(Counter::FlowsReplaced);
    true
}
