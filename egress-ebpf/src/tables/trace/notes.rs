//! Notes decisions.

use super::{Step, tell};
use crate::{
    headers::packet::{IPV4, IPV6, Packet, moment},
    tables::{datagram, family::Family},
};
use aya_ebpf::{bindings::__sk_buff, btf_maps::PerCpuArray, helpers::bpf_get_smp_processor_id, macros::btf_map};
use egress_common::{
    V6,
    flow::FlowKey,
    limits::{TRACE_PACKETS, TRACE_STEPS},
    trace::{TraceFilter, hook},
};

/// The packets to report; the agent sets it before it loads the programs.
#[unsafe(no_mangle)]
static TRACE_FILTER: TraceFilter = TraceFilter::NONE;

#[inline(always)]
fn filter() -> TraceFilter {
    // SAFETY: a static is valid for reading. Volatile, because the compiler must not assume the initial value.
    unsafe { (&raw const TRACE_FILTER).read_volatile() }
}

/// The state of the packet in progress on this CPU.
#[repr(C)]
pub struct Notes {
    /// Where it is observed.
    pub hook: u32,
    /// 4 or 6; 0 if its headers cannot be read.
    pub family: u32,
    /// Addresses, IPv4 in the mapped form.
    pub src: V6,
    pub dst: V6,
    /// Ports, network byte order.
    pub ports: [u32; 2],
    pub proto: u32,
    /// Length of the frame.
    pub len: u32,
    /// TCP flags.
    pub flags: u32,
    /// Whether it is to be reported.
    pub shown: u32,
    /// How many of the steps are in use.
    pub count: u32,
    /// The last moment in which packets were reported, and their number.
    pub moment: u32,
    pub told: u32,
    /// Number of the packet, for this CPU.
    pub number: u32,
    pub steps: [[u32; 3]; TRACE_STEPS],
}

#[btf_map]
static TRACE_NOTES: PerCpuArray<Notes, 1> = PerCpuArray::new();
/// How many packets matched, whether they were reported or not.
#[btf_map]
static TRACE_SEEN: PerCpuArray<u64, 1> = PerCpuArray::new();

#[inline(always)]
fn notes() -> Option<&'static mut Notes> {
    // SAFETY: the element is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU.
    TRACE_NOTES.get_ptr_mut(0).map(|notes| unsafe { &mut *notes })
}

/// Begins the trace of a packet at a hook.
#[inline(always)]
pub fn begin(pkt: &Packet, hook: u32) {
    trace_begin(pkt.raw(), hook);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn trace_begin(skb: *mut __sk_buff, hook: u32) -> u64 {
    let pkt = Packet::from_raw(skb);
    let Some(n) = notes() else { return 0 };
    (n.hook, n.family, n.count, n.shown) = (hook, 0, 0, 0);
    n.len = pkt.len();
    match pkt.protocol() {
        IPV4 => head::<egress_common::V4>(&pkt, n),
        IPV6 => head::<egress_common::V6>(&pkt, n),
        _ => {}
    }
    0
}

#[inline(always)]
fn head<F: Family>(pkt: &Packet, n: &mut Notes) {
    let filter = filter();
    let Ok(ip) = F::parse(pkt) else {
        n.shown = (n.hook == hook::FROM_POD && filter.ifindex != 0) as u32;
        return;
    };
    let t = datagram::transport::<F>(pkt, &ip);
    (n.family, n.proto, n.flags) = (F::VERSION, ip.proto, t.flags as u32);
    n.src = any(ip.src);
    n.dst = any(ip.dst);
    n.ports = [t.src_port as u32, t.dst_port as u32];
    let (sent, gets) = (is_pod(&filter, ip.src), is_pod(&filter, ip.dst));
    let wanted = match n.hook {
        // If the interface is known, every packet that comes out of it.
        hook::FROM_POD if sent || filter.ifindex != 0 => filter.is_of(&n.dst, t.dst_port),
        hook::TO_POD if gets || filter.ifindex != 0 => filter.is_of(&n.src, t.src_port),
        hook::EXIT => sent && filter.is_of(&n.dst, t.dst_port),
        _ => false,
    };
    n.shown = wanted as u32;
}

/// Returns whether the address is the pod's. Without an address the filter has zero, which no pod has.
#[inline(always)]
fn is_pod<F: Family>(filter: &TraceFilter, address: F) -> bool {
    let words = address.as_ref();
    if F::never_leaves(address) {
        false
    } else if F::VERSION == 4 {
        words[0] == filter.v4[0]
    } else {
        words[0] == filter.v6[0] && words[1] == filter.v6[1] && words[2] == filter.v6[2] && words[3] == filter.v6[3]
    }
}

/// Returns an address in the form of either family.
#[inline(always)]
fn any<F: Family>(address: F) -> V6 {
    let words = address.as_ref();
    if F::VERSION == 4 { egress_common::mapped([words[0]]) } else { [words[0], words[1], words[2], words[3]] }
}

/// Notes a decision about the packet in progress. Decisions that find no room are omitted.
#[inline(always)]
pub fn note(step: Step, a: u32, b: u32) {
    trace_note(step as u32, a, b);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn trace_note(step: u32, a: u32, b: u32) -> u64 {
    if let Some(n) = notes()
        && let Some(to) = n.steps.get_mut(n.count as usize)
    {
        *to = [step, a, b];
        n.count += 1;
    }
    0
}

/// Notes that the packet in progress answers the flow of this pod with this key.
#[inline(always)]
pub fn answer<F: Family>(key: &FlowKey<F>, pod: &F) {
    let filter = filter();
    if !is_pod(&filter, F::copied(pod)) {
        return;
    }
    let Some(n) = notes() else { return };
    // In the form of the packet without outer headers.
    n.src = any(F::copied(&key.dst));
    n.dst = any(F::copied(&key.src));
    n.ports = [key.dst_port as u32, key.src_port as u32];
    (n.family, n.proto) = (F::VERSION, key.proto);
    n.shown = filter.is_of(&n.src, key.dst_port) as u32;
}

/// Ends the trace of a packet with a verdict's bits.
#[inline(always)]
pub fn end(_: &Packet, verdict: u64) {
    trace_end((verdict >> 32) as u32, verdict as u32);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn trace_end(verdict: u32, of: u32) -> u64 {
    let Some(n) = notes() else { return 0 };
    if n.shown == 0 {
        return 0;
    }
    n.shown = 0;
    if let Some(seen) = TRACE_SEEN.get_ptr_mut(0) {
        // SAFETY: as in `notes`.
        unsafe { *seen += 1 }
    }
    let now = moment();
    if n.moment != now {
        (n.moment, n.told) = (now, 0);
    }
    if n.told >= TRACE_PACKETS {
        return 0;
    }
    n.told += 1;
    n.number = n.number.wrapping_add(1);
    // SAFETY: the helper has no arguments.
    let number = unsafe { bpf_get_smp_processor_id() } << 24 | n.number & 0xff_ffff;
    if n.family == 4 {
        tell::trace_frame_v4(number);
    } else {
        tell::trace_frame_v6(number);
    }
    for i in 0..TRACE_STEPS {
        if i >= n.count as usize {
            break;
        }
        let [step, a, b] = n.steps[i];
        tell::trace_step(number, step, a, b);
    }
    tell::trace_verdict(number, verdict, of);
    0
}

/// Returns the packet in progress, for reporting.
#[inline(always)]
pub fn under_way() -> Option<&'static Notes> {
    notes().map(|notes| &*notes)
}
