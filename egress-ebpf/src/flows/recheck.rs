//! Flows under tables that have changed since they were checked, and connections that open again.

use crate::{
    flows::{
        firewall,
        table::{reverse_key, reverse_state},
    },
    headers::fields::proto,
    tables::{
        classify::{self, Class},
        family::Family,
    },
};
use egress_common::{
    config::DatapathConfig,
    flow::{Flow, FlowKey, is_pair, kind},
    tcp,
    traffic::OTHER,
    verdict::Counter,
};

/// The generation of the tables, to be read before anything is classified by them: a change in between makes the flow
/// be checked again.
#[inline(always)]
pub fn generation(config: &DatapathConfig) -> u32 {
    // SAFETY: a reference is valid for reading.
    unsafe { (&raw const config.generation).read_volatile() }
}

/// What becomes of a flow that was classified under an older configuration, or whose connection opens again.
pub enum Check {
    /// The flow is as good as new, or severed.
    Keep,
    /// A new flow takes its place, if a policy still matches its packets.
    Anew,
    /// Its packets are dropped.
    Drop(Counter),
}

/// Checks a flow against the present tables. A flow that stays gets their generation.
#[inline(always)]
pub fn check<F: Family>(config: &DatapathConfig, key: &FlowKey<F>, flow: &mut Flow, opening: bool) -> Check {
    let generation = generation(config);
    // A connection that opens again under the same tables keeps its policy.
    let policy = if flow.kind == kind::TRANSLATED && flow.config_generation == generation {
        flow.policy as u32
    } else {
        match classify::classify(config, key.src, key.dst) {
            Class::Held => return Check::Drop(Counter::DropHeld),
            // The other end knows the connection by an egress IP: what is left of it must not show it another address.
            Class::Outside(_) if key.proto == proto::TCP && !opening => {
                flow.kind = kind::SEVERED;
                flow.config_generation = config.generation;
                return Check::Keep;
            }
            Class::Outside(_) => return Check::Anew,
            // The address is another pod's now.
            Class::Policy(_, endpoint) if endpoint.id != flow.endpoint => return Check::Anew,
            Class::Policy(policy, _) => policy,
        }
    };
    match classify::member(policy, flow.egress) {
        Some(m) if m.generation == flow.egress_generation => {
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
            flow.config_generation = generation;
            Check::Keep
        }
        _ if key.proto == proto::TCP && !opening => {
            flow.kind = kind::SEVERED;
            flow.config_generation = generation;
            Check::Keep
        }
        _ => Check::Anew,
    }
}

/// Whether a packet of this flow may leave as the flow says: under the present tables, even if it was checked under older ones.
#[inline(always)]
pub fn is_in_force<F: Family>(config: &DatapathConfig, key: &FlowKey<F>, flow: &mut Flow) -> bool {
    let checked =
        flow.config_generation == generation(config) || matches!(check::<F>(config, key, flow, false), Check::Keep);
    checked && flow.kind == kind::TRANSLATED
}

/// A SYN with the ports of a flow in the table: the flow starts with a clean state and keeps its slot, unless it may choose another one
/// (`false`). It may if nobody has answered yet or the previous connection is closed. It does so if its slot is unusable; after a
/// closed connection also if the tables have changed, so that slots added to the policy get their part.
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
    let pending = firewall::is_asked(config);
    if let Some(reverse) = reverse_key::<F>(key, flow)
        && let Some(value) = F::reverses().get_ptr_mut(&reverse)
        // SAFETY: a pointer into the map.
        && is_pair(key, flow, &reverse, unsafe { &*value })
    {
        // SAFETY: as above, and a single store.
        unsafe { (*value).state = reverse_state(pending) };
    }
    flow.state = changed;
    flow.back = 0;
    flow.pending = pending;
    true
}
