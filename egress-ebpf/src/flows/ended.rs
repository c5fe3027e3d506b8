//! Ended flows: connections that both ends have finished, and UDP exchanges of one question. They wait in a
//! queue, in the order in which they ended, to allow for retransmissions. The collector removes them seconds
//! later; a new flow that finds no room takes their place earlier. No other flow is ever removed to make room.

use crate::{
    flows::{
        key, ports,
        table::{forget, last_seen},
    },
    headers::{
        fields::{Ip, Kind, L4Header, Part, at, checksum_offset, proto},
        packet::{ETH_LEN, Packet, now_tick},
    },
    tables::{datagram, family::Family, maps::CONFIG, share, stats},
};
use aya_ebpf::helpers::bpf_loop;
use core::ffi::c_void;
use egress_common::{
    flow::{
        Ended, Flow, FlowKey,
        queued::{QUEUED, UNANSWERED},
    },
    limits::{ENDED_TICKS, RECLAIM_BATCH, RECLAIM_LOOKS, WELL_KNOWN_PORTS},
    tcp, udp,
    verdict::{Counter, Verdict},
};

/// Returns whether the flow is no longer needed, except for an answer that may still arrive.
#[inline(always)]
fn has_ended<F: Family>(key: &FlowKey<F>, flow: &Flow) -> bool {
    match key.proto {
        proto::TCP => tcp::closed(flow.state, flow.back),
        proto::UDP => udp::is_question(flow.state),
        _ => false,
    }
}

/// Queues the flow, once.
#[inline(always)]
fn queue<F: Family>(key: &FlowKey<F>, flow: &mut Flow) {
    if flow.queued == 0 {
        let record = Ended { key: *key, ticket: flow.ticket, due: now_tick().wrapping_add(ENDED_TICKS) };
        // If the queue is full, the flow waits for the collector's round.
        if F::ended().push(record, 0).is_ok() {
            flow.queued = QUEUED;
        }
    }
}

/// Handles a segment of the pod that ends its side, or that follows an end of the other side.
#[inline(always)]
pub fn by_pod<F: Family>(key: &FlowKey<F>, flow: &mut Flow, t: &L4Header) {
    if flow.back != 0 && t.flags & tcp::flag::ACK != 0 {
        let back = tcp::acknowledges(flow.back, flow.end, u32::from_be(t.ack));
        if back != flow.back {
            flow.back = back;
        }
    }
    if tcp::closed(flow.state, flow.back) {
        queue::<F>(key, flow);
    }
}

/// Handles a packet of the remote side that is the first answer to a question, accepts a connection, or claims
/// to end one. `seen` is the reverse half's state. Returns `false` for a reset that only the pod can judge.
#[inline(always)]
pub fn by_remote<F: Family>(
    pkt: &Packet,
    ip: &Ip<F>,
    t: &L4Header,
    key: &FlowKey<F>,
    flow: &mut Flow,
    seen: u16,
) -> bool {
    let mut judged = true;
    if t.flags & (tcp::flag::FIN | tcp::flag::RST) != 0 {
        let Some(end) = end_of::<F>(pkt, ip, t) else { return true };
        // Until a SYN+ACK, only a host that has seen the SYN can refuse it, and the pod has nothing to acknowledge.
        let accepted = seen & tcp::seen::SYN == 0 || end == u32::from_be(flow.ack);
        // A closed connection needs no question.
        judged = accepted || t.flags & tcp::flag::RST == 0 || tcp::closed(flow.state, flow.back);
        let back = tcp::ends(flow.back, t.flags, accepted);
        if back != flow.back {
            flow.back = back;
        }
        flow.end = end;
    }
    // The host accepts the connection: an earlier refusal was forged, or answered an earlier SYN.
    // Once the pod has acknowledged, no host answers its SYN.
    if t.flags & tcp::flag::SYN != 0 && flow.state & tcp::seen::ACK == 0 {
        flow.back = 0;
    }
    if has_ended::<F>(key, flow) {
        match flow.queued {
            UNANSWERED => flow.queued = QUEUED,
            // The remote side sends for longer than an answer takes.
            QUEUED if key.proto == proto::UDP => flow.state |= udp::seen::MORE,
            _ => queue::<F>(key, flow),
        }
    }
    judged
}

/// Sends the pod a reset that only the pod can judge, followed by a question whether the connection is alive: a segment
/// without data, just before the pod's last acknowledgment. A pod that has the connection acknowledges again and drops
/// the segment (RFC 9293, section 3.10.7.4); a pod that no longer has it answers with its own reset, which counts.
/// `verdict` is the verdict on the reset, which is already translated; it is returned where no question follows.
///
/// The question has a sequence number that a forger does not know, so it must not carry the forger's data to the pod,
/// neither after its header nor in later fragments.
#[inline(always)]
pub fn question<F: Family>(pkt: &Packet, verdict: u64) -> u64 {
    let Ok(ip) = F::parse(pkt) else { return verdict };
    let t = datagram::transport::<F>(pkt, &ip);
    if ip.part != Part::Whole || t.kind != Kind::Tcp || t.flags & tcp::flag::RST == 0 {
        return verdict;
    }
    let Some(flow) = F::flows().get_ptr(key::of_reply(&ip, &t)) else { return verdict };
    // SAFETY: a pointer into the map.
    let (ifindex, ack) = unsafe { ((*flow).ifindex, (*flow).ack) };
    if is_bare::<F>(pkt, &ip) != Some(true) || pkt.copy_out(ifindex).is_none() {
        return verdict;
    }
    let before = u32::from_be(ack).wrapping_sub(1).to_be();
    if ask::<F>(pkt, &ip, before).is_none() {
        return Verdict::Drop(Counter::DropMalformed).to_bits();
    }
    // Programs that ran on the copy may have set another target.
    pkt.redirect(ifindex).to_bits()
}

/// Returns whether a TCP segment has no data.
#[inline(always)]
fn is_bare<F: Family>(pkt: &Packet, ip: &Ip<F>) -> Option<bool> {
    Some(F::total_len(pkt)? == ip.l4 - ETH_LEN + header_len(pkt, ip)?)
}

/// Returns the length of the TCP header in bytes.
#[inline(always)]
fn header_len<F: Family>(pkt: &Packet, ip: &Ip<F>) -> Option<u32> {
    Some((pkt.load::<u8>(ip.l4 + at::TCP_LENGTH)? >> 4) as u32 * 4)
}

/// Turns a reset into a segment with ACK and this sequence number, network byte order.
#[inline(always)]
fn ask<F: Family>(pkt: &Packet, ip: &Ip<F>, sequence: u32) -> Option<()> {
    let check = ip.l4 + checksum_offset(proto::TCP);
    let old = pkt.load::<u32>(ip.l4 + at::TCP_SEQ)?;
    let [offset, flags] = pkt.load::<[u8; 2]>(ip.l4 + at::TCP_LENGTH)?;
    let word = |flags: u8| u16::from_ne_bytes([offset, flags]) as u64;
    let right = pkt.l4_checksum(check, old as u64, sequence as u64, size_of::<u32>() as u64)
        && pkt.l4_checksum(check, word(flags), word(tcp::flag::ACK), size_of::<u16>() as u64);
    pkt.store(ip.l4 + at::TCP_SEQ, &sequence)?;
    pkt.store(ip.l4 + at::TCP_FLAGS, &tcp::flag::ACK)?;
    right.then_some(())
}

/// Returns the acknowledgment number that accepts this segment, which has FIN or RST.
#[inline(always)]
fn end_of<F: Family>(pkt: &Packet, ip: &Ip<F>, t: &L4Header) -> Option<u32> {
    let seq = u32::from_be(pkt.load::<u32>(ip.l4 + at::TCP_SEQ)?);
    if t.flags & tcp::flag::RST != 0 {
        return Some(seq);
    }
    let payload = F::total_len(pkt)?.checked_sub(ip.l4 - ETH_LEN + header_len(pkt, ip)?)?;
    Some(seq.wrapping_add(payload + 1))
}

/// Looks at the oldest record of an ended flow if it is due. Returns 0 to continue, 1 when nothing is left to do in this run.
#[inline(always)]
pub fn drain<F: Family>() -> i64 {
    let now = now_tick();
    let Ok(Some(Ended { due, .. })) = F::ended().peek() else { return 1 };
    if due.wrapping_sub(now) as i32 > 0 {
        return 1;
    }
    let Ok(Some(record)) = F::ended().pop() else { return 1 };
    let Some(flow) = queued::<F>(&record) else { return 0 };
    let (last, back) = last_seen::<F>(&record.key, flow);
    let answered = back & udp::seen::ANSWER != 0;
    let idle = now.wrapping_sub(last) as i32 >= ENDED_TICKS as i32;
    let short = record.key.proto == proto::TCP || answered && u16::from_be(record.key.dst_port) < WELL_KNOWN_PORTS;
    if idle && short {
        forget::<F>(&record.key, flow);
        stats::count(Counter::FlowsEnded);
        return 0;
    }
    // Age alone does not allow its removal; it is queued again, for a new flow that needs its place.
    flow.queued = 0;
    if record.key.proto == proto::UDP && !answered {
        queue_unanswered::<F>(&record.key, flow);
    } else {
        queue::<F>(&record.key, flow);
    }
    0
}

/// Returns the flow of this record, if it is still the same flow and has ended.
#[inline(always)]
fn queued<F: Family>(record: &Ended<F>) -> Option<&'static mut Flow> {
    let flow = F::flows().get_ptr_mut(&record.key)?;
    // SAFETY: as in `by_remote`.
    let flow = unsafe { &mut *flow };
    if flow.ticket != record.ticket {
        return None;
    }
    if has_ended::<F>(&record.key, flow) {
        return Some(flow);
    }
    flow.queued = 0;
    None
}

/// Queues an unanswered UDP exchange of one question that the collector found idle.
#[inline(always)]
pub fn unanswered<F: Family>(key: &FlowKey<F>, flow: &mut Flow, now: u32) {
    let idle = now.wrapping_sub(flow.last_seen) as i32;
    if key.proto == proto::UDP && udp::is_question(flow.state) && idle >= ENDED_TICKS as i32 {
        queue_unanswered::<F>(key, flow);
    }
}

/// Queues a question that has no answer yet.
#[inline(always)]
fn queue_unanswered<F: Family>(key: &FlowKey<F>, flow: &mut Flow) {
    if flow.queued == 0 {
        queue::<F>(key, flow);
        if flow.queued == QUEUED {
            flow.queued = UNANSWERED;
        }
    }
}

/// Makes room for a flow that this packet would open: removes a batch of ended flows, those that
/// ended first, and more until the pod is within its quota. Returns their number.
#[inline(always)]
pub fn reclaim<F: Family>(pkt: &Packet) -> u64 {
    let Some(pod) = F::load(pkt, ETH_LEN + F::SRC) else { return 0 };
    // SAFETY: entries are replaced, not changed in place.
    let Some(endpoint) = (unsafe { F::endpoints().get(pod) }) else { return 0 };
    let Some(search) = F::search().get_ptr_mut(0) else { return 0 };
    // SAFETY: the element is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU. The callback takes no
    // context.
    unsafe {
        (*search).endpoint = endpoint.id;
        (*search).outcome = 0;
        bpf_loop(RECLAIM_LOOKS, take_one::<F> as *mut c_void, core::ptr::null_mut(), 0);
        (*search).outcome as u64
    }
}

/// Removes the oldest ended flow. Returns 0 to continue, 1 to stop.
extern "C" fn take_one<F: Family>(_i: u32, _ctx: *mut c_void) -> i64 {
    let (Some(config), Some(search)) = (CONFIG.get(0), ports::search::<F>()) else { return 1 };
    let Ok(Some(record)) = F::ended().pop() else { return 1 };
    let Some(flow) = queued::<F>(&record) else { return 0 };
    forget::<F>(&record.key, flow);
    stats::count(Counter::FlowsReclaimed);
    search.outcome += 1;
    (search.outcome as u64 >= RECLAIM_BATCH && !share::is_used_up::<F>(config, search.endpoint)) as i64
}

once! {
    question(question_v4, question_v6) = question(verdict: u64);
    reclaim(reclaim_v4, reclaim_v6) = reclaim();
}
