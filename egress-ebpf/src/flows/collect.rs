//! The garbage collector: removes flows that have been idle for too long. A kernel timer runs it, so it works without the agent.
//!
//! Every flow has a ticket in a queue. A run takes a bounded number of tickets, removes the flows that are due and puts
//! the other tickets back at the end; it drops a ticket whose flow is gone or was replaced. So a run takes a
//! millisecond or two whatever the size of the table, and a million flows are checked in under half a minute. A smaller
//! table is checked once per round of several seconds. Each new flow also triggers a look at the first tickets, so the
//! queue has room however fast flows come and go: between two rounds, removed flows leave their tickets behind.

use crate::{
    flows::{
        ended,
        table::{forget, last_seen},
    },
    headers::{
        fields::proto,
        packet::{now_tick, set_clock},
    },
    tables::{
        classify::{self, Class},
        family::Family,
        maps::{COLLECTOR, CONFIG, Collector},
        stats,
    },
};
use aya_ebpf::helpers::{bpf_loop, bpf_timer_init, bpf_timer_set_callback, bpf_timer_start};
use core::ffi::c_void;
use egress_common::{
    V4, V6,
    config::DatapathConfig,
    flow::{Flow, FlowKey, Ticket, kind, pending},
    limits::{COLLECT_ALONG, COLLECT_BATCH, COLLECT_INTERVAL_NS, COLLECT_ROUND_SHIFT, ENDED_TICKS, PENDING_TICKS},
    tcp,
    verdict::Counter,
};

const CLOCK_MONOTONIC: u64 = 1;
/// `EBUSY`: the timer is initialised already.
const BUSY: i64 = -16;

/// Sets the clock of these programs and, except in a trace's build, arms the timer, even if it runs. Returns 0 or a negative errno.
#[inline(always)]
pub fn start() -> i32 {
    set_clock();
    // The usual programs keep collecting while those of a trace are attached.
    if cfg!(feature = "trace") {
        return 0;
    }
    let Some(c) = COLLECTOR.get_ptr_mut(0) else { return -1 };
    // SAFETY: the timer lies in an element of the map that is passed.
    unsafe {
        let timer = &raw mut (*c).timer;
        let r = bpf_timer_init(timer, (&raw const COLLECTOR).cast_mut().cast(), CLOCK_MONOTONIC);
        if r != 0 && r != BUSY {
            return r as i32;
        }
        let r = bpf_timer_set_callback(timer, run as *mut c_void);
        if r != 0 {
            return r as i32;
        }
        bpf_timer_start(timer, COLLECT_INTERVAL_NS, 0) as i32
    }
}

/// Runs the collector once.
extern "C" fn run(_map: *mut c_void, _key: *mut u32, collector: *mut Collector) -> i64 {
    let mut unused = 0u64;
    // SAFETY: the kernel passes the map's element; the callbacks ignore their context.
    unsafe {
        (*collector).runs += 1;
        bpf_loop(COLLECT_BATCH, look::<V4> as *mut c_void, (&raw mut unused).cast(), 0);
        bpf_loop(COLLECT_BATCH, look::<V6> as *mut c_void, (&raw mut unused).cast(), 0);
        bpf_loop(COLLECT_BATCH, drain::<V4> as *mut c_void, (&raw mut unused).cast(), 0);
        bpf_loop(COLLECT_BATCH, drain::<V6> as *mut c_void, (&raw mut unused).cast(), 0);
        bpf_timer_start(&raw mut (*collector).timer, COLLECT_INTERVAL_NS, 0);
    }
    0
}

/// Looks at the first tickets after a new flow has added one. Stops at a ticket that was already checked in this round.
#[inline(always)]
pub fn check_first_tickets<F: Family>() {
    // SAFETY: the callback takes no context.
    unsafe { bpf_loop(COLLECT_ALONG, look::<F> as *mut c_void, core::ptr::null_mut(), 0) };
}

/// Looks at one ended flow. Returns 0 to continue, 1 when nothing is left to do in this run.
extern "C" fn drain<F: Family>(_i: u32, _ctx: *mut c_void) -> i64 {
    ended::drain::<F>()
}

/// Looks at one ticket. Returns 0 to continue, 1 when nothing is left to do in this run.
extern "C" fn look<F: Family>(_i: u32, _ctx: *mut c_void) -> i64 {
    let Some(config) = CONFIG.get(0) else { return 1 };
    let Ok(Some(ticket)) = F::tickets().pop() else { return 1 };
    let now = now_tick();
    let round = now >> COLLECT_ROUND_SHIFT;
    let Some(flow) = F::flows().get_ptr_mut(&ticket.key) else { return 0 };
    // SAFETY: flows are changed in place only by single stores to fields that may lag by a packet.
    let flow = unsafe { &mut *flow };
    if flow.ticket != ticket.ticket {
        return 0;
    }
    if ticket.checked != round && is_due(config, &ticket.key, flow, now) {
        let refused = flow.pending == pending::NEW;
        forget::<F>(&ticket.key, flow);
        stats::count(if refused { Counter::FlowsRefused } else { Counter::FlowsExpired });
        return 0;
    }
    ended::unanswered::<F>(&ticket.key, flow, now);
    let stop = ticket.checked == round;
    // The queue is twice as long as the table, so there is room.
    let _ = F::tickets().push(Ticket { key: ticket.key, ticket: ticket.ticket, checked: round }, 0);
    stop as i64
}

/// Returns the idle times in ticks: of an established connection, of one that opens or closes, of UDP, of ICMP.
#[inline(always)]
pub fn idle_times(config: &DatapathConfig) -> [u32; 4] {
    // Reads each field separately: otherwise LLVM reads one through a computed address, which the verifier refuses without CAP_PERFMON.
    // SAFETY: references are valid for reading.
    unsafe {
        [
            (&raw const config.tcp_established).read_volatile(),
            (&raw const config.tcp_transitory).read_volatile(),
            (&raw const config.udp).read_volatile(),
            (&raw const config.icmp).read_volatile(),
        ]
    }
}

/// Returns whether a flow has been idle for too long, or no longer belongs to a policy.
#[inline(always)]
fn is_due<F: Family>(config: &DatapathConfig, key: &FlowKey<F>, flow: &Flow, now: u32) -> bool {
    if flow.config_generation != config.generation
        && let Class::Outside(..) = classify::classify(config, key.src, key.dst)
        // While its pod exists, the rest of a TCP connection is severed, not let out.
        && (key.proto != proto::TCP || F::endpoints().get_ptr(key.src).is_none())
    {
        return true;
    }
    let (last, back) = last_seen::<F>(key, flow);
    let [long, short, udp, icmp] = idle_times(config);
    let limit = match key.proto {
        _ if flow.pending != 0 => PENDING_TICKS,
        proto::TCP if tcp::closed(flow.state, flow.back) => ENDED_TICKS,
        proto::TCP if flow.kind != kind::SEVERED && tcp::established(flow.state, back) => long,
        proto::TCP => short,
        proto::UDP => udp,
        _ => icmp,
    };
    // A packet may have arrived after `now` was read.
    let idle = now.wrapping_sub(last) as i32;
    idle > 0 && idle as u32 > limit
}
