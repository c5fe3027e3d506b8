//! Rechecks flows after the tables have changed, and connections that open again. Few packets come here, so it
//! is a separate function: if it were inlined, the verifier would follow each path of its callers through it.

use crate::{
    flows::{
        firewall, key,
        table::{forget, reverse_key, reverse_state},
    },
    headers::{fields::proto, packet::Packet},
    tables::{
        classify::{self, Class},
        datagram,
        family::Family,
        maps::CONFIG,
        trace::{self, Step},
    },
};
use egress_common::{
    config::DatapathConfig,
    flow::{Flow, FlowKey, is_pair, kind, pending},
    tcp,
    traffic::OTHER,
    verdict::{Counter, Verdict},
};

/// Result of [`recheck`] for a flow that stays, perhaps severed: no verdict has these bits.
pub const KEPT: u64 = u64::MAX - 5;
/// Result of [`recheck`] if there is no flow, or no longer one.
pub const GONE: u64 = u64::MAX - 6;

/// Returns the generation of the tables, which must be read before they classify anything: a change
/// in between then makes the flow be checked again.
#[inline(always)]
pub fn generation(config: &DatapathConfig) -> u32 {
    // SAFETY: a reference is valid for reading.
    unsafe { (&raw const config.generation).read_volatile() }
}

/// The outcome for a flow that was classified under an older configuration, or whose connection opens again.
enum Check {
    /// The flow is as good as new, or severed.
    Keep,
    /// A new flow takes its place, if a policy still matches its packets.
    Anew,
    /// Its packets are dropped.
    Drop(Counter),
}

/// Returns whether a flow was checked against the present tables.
#[inline(always)]
pub fn is_current(config: &DatapathConfig, flow: &Flow) -> bool {
    flow.config_generation == generation(config)
}

/// Checks the flow of a pod's packet against the present tables. Returns [`KEPT`], [`GONE`], or a verdict's
/// bits. `at_exit` is 1 where the pod's interface is no longer known and no new flow can replace this one.
#[inline(always)]
pub fn recheck<F: Family>(pkt: &Packet, at_exit: u32) -> u64 {
    let Some(config) = CONFIG.get(0) else { return GONE };
    let Ok(ip) = F::parse(pkt) else { return GONE };
    let t = datagram::transport::<F>(pkt, &ip).hidden(pkt.len());
    let key = key::of_pod(&ip, &t);
    let Some(flow) = F::flows().get_ptr_mut(&key) else { return GONE };
    // SAFETY: flows are changed in place only by single stores to fields that may lag by a packet.
    let flow = unsafe { &mut *flow };
    if at_exit != 0 {
        return match check::<F>(config, &key, flow, false) {
            Check::Keep => KEPT,
            Check::Anew | Check::Drop(_) => GONE,
        };
    }
    let check = if flow.ifindex == pkt.ifindex() {
        check::<F>(config, &key, flow, t.opens())
    } else if classify::is_spoofed::<F>(pkt, key.src) {
        Check::Drop(Counter::DropSpoofed)
    } else {
        // The pod is now behind another interface: the old record would misdirect replies.
        Check::Anew
    };
    match check {
        Check::Keep => KEPT,
        Check::Anew => {
            trace::note(Step::Anew, 0, 0);
            forget::<F>(&key, flow);
            GONE
        }
        Check::Drop(counter) => Verdict::Drop(counter).to_bits(),
    }
}

/// Checks a flow against the present tables. A flow that stays gets their generation.
#[inline(always)]
fn check<F: Family>(config: &DatapathConfig, key: &FlowKey<F>, flow: &mut Flow, opening: bool) -> Check {
    let generation = generation(config);
    // A connection that opens again under the same tables keeps its policy.
    let policy = if flow.kind == kind::TRANSLATED && flow.config_generation == generation {
        Some(flow.policy as u32)
    } else {
        match classify::classify(config, key.src, key.dst) {
            Class::Held => return Check::Drop(Counter::DropHeld),
            Class::Outside(..) => None,
            // The address now belongs to another pod.
            Class::Policy(_, endpoint) if endpoint.id != flow.endpoint => return Check::Anew,
            Class::Policy(policy, _) => Some(policy),
        }
    };
    if let Some(policy) = policy
        && let Some(m) = classify::member(policy, flow.egress)
        && m.generation == flow.egress_generation
    {
        if flow.config_generation != generation {
            flow.state |= tcp::seen::CHANGED;
        }
        if opening && !reopen::<F>(config, key, flow, m.usable != 0) {
            return Check::Anew;
        }
        if flow.policy as u32 != policy {
            flow.policy = policy as u16;
            flow.account = OTHER;
        }
        flow.kind = kind::TRANSLATED;
    } else if key.proto == proto::TCP && !opening {
        // The other end knows the connection by an egress IP: the rest of it must not show another address.
        flow.kind = kind::SEVERED;
    } else {
        return Check::Anew;
    }
    flow.config_generation = generation;
    Check::Keep
}

/// Handles a SYN with the ports of an existing flow: the flow starts with a clean state and keeps its slot, unless it may choose
/// another one (returns `false`). It may if no host has answered yet or the previous connection is closed. It does so if its slot
/// is unusable; after a closed connection also if the tables have changed, so that slots added to the policy get their share.
#[inline(always)]
fn reopen<F: Family>(config: &DatapathConfig, key: &FlowKey<F>, flow: &mut Flow, usable: bool) -> bool {
    let unanswered = flow.state & tcp::seen::ACK == 0;
    if unanswered && !usable {
        return false;
    }
    let changed = flow.state & tcp::seen::CHANGED;
    if flow.state & !tcp::seen::SYN == changed {
        return true;
    }
    if tcp::closed(flow.state, flow.back) && (changed != 0 || !usable) {
        return false;
    }
    let asked = firewall::is_asked(config);
    if let Some(reverse) = reverse_key::<F>(key, flow)
        && let Some(value) = F::reverses().get_ptr_mut(&reverse)
        // SAFETY: a pointer into the map.
        && is_pair(key, flow, &reverse, unsafe { &*value })
    {
        // SAFETY: as above, and a single store.
        unsafe { (*value).state = reverse_state(asked) };
    }
    flow.state = changed;
    flow.back = 0;
    if asked == 0 || flow.pending == 0 {
        flow.pending = asked * pending::AGAIN;
    }
    true
}

once! {
    recheck(recheck_v4, recheck_v6) = recheck(at_exit: u32);
}
