//! `pod_egress`: what happens to a packet that a pod sends.

use crate::{
    classify::{self, Class},
    family::Family,
    firewall,
    flows::{enter, forget, leave_alone, mend_reverse, reverse_key, reverse_value, ticket},
    fragment,
    maps::{CONFIG, EGRESS_IPS, NODES},
    mss, once,
    packet::{ETH_LEN, Packet, now_tick},
    parse::{self, Ip, Kind, Part, Transport, proto},
    ports::{self, EEXIST},
    shaper, share, stats,
    translate::{End, Rewrite, rewrite},
    way,
};
use egress_common::{
    config::{Config, flags},
    egress::flags as egress_flags,
    endpoint::{Endpoint, Policy, endpoint_flags, policy_flags},
    flow::{Flow, FlowKey, kind},
    hash, tcp,
    verdict::{Counter, Verdict, purpose},
};

/// What [`established`] returns when there is no flow: no verdict has these bits.
const UNKNOWN: u64 = u64::MAX;
/// What [`established`] returns for an ICMP error.
const QUOTES: u64 = u64::MAX - 1;
/// What [`first`] returns when there is a flow now.
const ENTERED: u64 = u64::MAX - 2;
/// What both return for a fragment that waits for its first one, or that is waited for.
const GATHER: u64 = u64::MAX - 3;

/// What the flow table says about a packet.
enum Known {
    /// Decided.
    Done(Verdict),
    /// There is no flow, or not any more.
    Unknown,
}

/// Classifies a pod's packet, finds or makes its flow, translates and sends it.
///
/// Functions one after the other, not one in the other: the variables of two do not fit the 512 bytes of stack that a chain
/// of calls may have, and the first packet of a flow can afford to be parsed again. It makes the flow only; what sends it is
/// what sends all others.
#[inline(always)]
pub fn steer<F: Family>(pkt: &Packet) -> u64 {
    let verdict = match once::established::<F>(pkt) {
        UNKNOWN => match once::first::<F>(pkt) {
            ENTERED => match once::established::<F>(pkt) {
                // The flow went, or may not be used any more, between its entry and its look-up.
                UNKNOWN | QUOTES => Verdict::Drop(Counter::DropSevered).to_bits(),
                verdict => verdict,
            },
            verdict => verdict,
        },
        QUOTES => once::outgoing::<F>(pkt),
        verdict => verdict,
    };
    if verdict != GATHER {
        return verdict;
    }
    match once::gather::<F>(pkt) {
        fragment::GO_ON => Verdict::Drop(Counter::DropFragment).to_bits(),
        verdict => verdict,
    }
}

/// The 5-tuple of a pod's packet.
#[inline(always)]
pub fn key_of<F: Family>(ip: &Ip<F>, t: &Transport) -> FlowKey<F> {
    FlowKey { src: ip.src, dst: ip.dst, src_port: t.src_port, dst_port: t.dst_port, proto: ip.proto }
}

/// A packet of a flow that is in the table.
#[inline(always)]
pub fn established<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    let Ok(ip) = F::parse(pkt) else { return malformed::<F>(pkt).to_bits() };
    let t = parse::transport::<F>(pkt, &ip);
    match t.kind {
        Kind::Tcp | Kind::Udp | Kind::Query | Kind::Answer => {}
        Kind::Error => return QUOTES,
        _ => return UNKNOWN,
    }
    let key = key_of(&ip, &t);
    let Some(flow) = F::flows().get_ptr_mut(&key) else { return UNKNOWN };
    // SAFETY: flows are changed in place only by single stores of fields that may be a packet late.
    match known::<F>(pkt, config, &ip, &t, &key, unsafe { &mut *flow }) {
        Known::Done(verdict) => verdict.to_bits(),
        Known::Unknown => UNKNOWN,
    }
}

/// A packet without a flow: makes one, or says what else becomes of the packet.
#[inline(always)]
pub fn first<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    let Ok(ip) = F::parse(pkt) else { return Verdict::Drop(Counter::DropMalformed).to_bits() };
    let t = parse::transport::<F>(pkt, &ip);
    match unknown::<F>(pkt, config, &ip, &t, &key_of(&ip, &t)) {
        // Whatever the flow says besides, the firewall is asked first.
        Ok(()) if respects(config) != 0 => firewall::ask(pkt, config).to_bits(),
        Ok(()) => ENTERED,
        Err(verdict) => verdict.to_bits(),
    }
}

/// A packet whose headers cannot be read is dropped where a policy selects its source.
#[inline(always)]
fn malformed<F: Family>(pkt: &Packet) -> Verdict {
    match pkt.read::<F>(ETH_LEN + F::SRC) {
        // SAFETY: entries are replaced, not changed in place.
        Some(src) => match unsafe { F::endpoints().get(src) } {
            Some(e) if e.class != 0 => Verdict::Drop(Counter::DropMalformed),
            _ => Verdict::Pass,
        },
        None => Verdict::Pass,
    }
}

/// The generation of the tables, to be read before anything is classified by them: what changes meanwhile makes the
/// flow be checked again.
#[inline(always)]
pub fn generation(config: &Config) -> u32 {
    // SAFETY: a reference is valid for reading.
    unsafe { (&raw const config.generation).read_volatile() }
}

/// Whether this segment opens a connection.
#[inline(always)]
fn opens(t: &Transport) -> bool {
    t.kind == Kind::Tcp && t.flags & (tcp::flag::SYN | tcp::flag::ACK) == tcp::flag::SYN
}

#[inline(always)]
fn known<F: Family>(
    pkt: &Packet,
    config: &Config,
    ip: &Ip<F>,
    t: &Transport,
    key: &FlowKey<F>,
    flow: &mut Flow,
) -> Known {
    if flow.ifindex != pkt.ifindex() {
        if classify::is_spoofed::<F>(pkt, key.src) {
            return Known::Done(Verdict::Drop(Counter::DropSpoofed));
        }
        // The pod is behind another interface now: what the old one remembers leads replies astray.
        forget::<F>(key, flow);
        return Known::Unknown;
    }
    let opening = opens(t);
    if flow.config_generation != config.generation || opening {
        match check::<F>(config, key, flow, opening) {
            Check::Keep => {}
            Check::Leave => {
                forget::<F>(key, flow);
                return Known::Done(Verdict::Pass);
            }
            Check::Anew => {
                forget::<F>(key, flow);
                return Known::Unknown;
            }
            Check::Drop(counter) => return Known::Done(Verdict::Drop(counter)),
        }
    }
    let now = now_tick();
    if flow.last_seen != now {
        flow.last_seen = now;
        if flow.kind == kind::TRANSLATED {
            mend_reverse::<F>(pkt, key, flow, now);
        }
    }
    if t.kind == Kind::Tcp {
        let state = tcp::advance(flow.state, t.flags);
        if state != flow.state {
            flow.state = state;
        }
    }
    Known::Done(match flow.kind {
        kind::TRANSLATED => go::<F>(pkt, config, ip, t, flow),
        kind::SEVERED => Verdict::Drop(Counter::DropSevered),
        _ => Verdict::Pass,
    })
}

/// What becomes of a flow that was classified under an older configuration, or whose connection opens again.
enum Check {
    Keep,
    /// Its packets are no longer ours.
    Leave,
    /// A new flow takes its place.
    Anew,
    Drop(Counter),
}

#[inline(always)]
fn check<F: Family>(config: &Config, key: &FlowKey<F>, flow: &mut Flow, opening: bool) -> Check {
    let generation = generation(config);
    // What opens again under the same tables is of the policy that it was of.
    let policy = if flow.kind == kind::TRANSLATED && flow.config_generation == generation {
        flow.policy
    } else {
        match classify::classify(config, key.src, key.dst) {
            Class::Held => return Check::Drop(Counter::DropHeld),
            Class::Outside if flow.kind == kind::UNTOUCHED => {
                flow.config_generation = generation;
                return Check::Keep;
            }
            // The other end knows the connection by an egress IP: what is left of it must not show it another address.
            Class::Outside if key.proto == proto::TCP && !opening => {
                flow.kind = kind::SEVERED;
                flow.config_generation = config.generation;
                return Check::Keep;
            }
            Class::Outside => return Check::Leave,
            Class::Policy(policy, _) => policy,
        }
    };
    if flow.kind == kind::UNTOUCHED {
        flow.config_generation = generation;
        // The pod opens a connection of its own with the ports of one that the outside had opened.
        return if opening { Check::Anew } else { Check::Keep };
    }
    match classify::member(policy, flow.egress) {
        Some(m) if m.generation == flow.egress_generation => {
            if flow.config_generation != generation {
                flow.state |= tcp::seen::CHANGED;
            }
            if opening && !reopen::<F>(config, key, flow, m.usable != 0) {
                return Check::Anew;
            }
            flow.policy = policy;
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

/// A SYN with the ports of a flow that is in the table: the flow begins with a clean state and keeps its slot, unless it may choose
/// another one (`false`). It may where nobody has answered yet or the connection before is closed, and does so where its slot is not to
/// be used; after a closed one also where the tables have changed, since what was added to the policy is to get its part.
#[inline(always)]
fn reopen<F: Family>(config: &Config, key: &FlowKey<F>, flow: &mut Flow, usable: bool) -> bool {
    let unanswered = flow.state & tcp::seen::ACK == 0;
    if unanswered && !usable {
        return false;
    }
    let changed = flow.state & tcp::seen::CHANGED;
    if flow.state & !tcp::seen::SYN == changed {
        return true;
    }
    let out = flow.state;
    let elsewhere = |back| tcp::closed(out, back) && (changed != 0 || !usable);
    // One look at whether it is there: old verifiers follow a second one on ways that no packet takes.
    match reverse_key::<F>(key, flow).and_then(|k| F::reverses().get_ptr_mut(k)) {
        // SAFETY: a pointer into the map, and a single store.
        Some(reverse) => unsafe {
            if elsewhere((&raw const (*reverse).state).read_volatile()) {
                return false;
            }
            (*reverse).state = 0;
        },
        None if elsewhere(0) => return false,
        None => {}
    }
    flow.state = changed;
    flow.pending = respects(config);
    true
}

/// `Ok` when the packet has a flow now.
#[inline(always)]
fn unknown<F: Family>(
    pkt: &Packet,
    config: &Config,
    ip: &Ip<F>,
    t: &Transport,
    key: &FlowKey<F>,
) -> Result<(), Verdict> {
    if classify::is_spoofed::<F>(pkt, ip.src) {
        return Err(Verdict::Drop(Counter::DropSpoofed));
    }
    let generation = generation(config);
    let (index, endpoint) = match classify::classify(config, ip.src, ip.dst) {
        Class::Outside => return Err(Verdict::Pass),
        Class::Held => return Err(Verdict::Drop(Counter::DropHeld)),
        Class::Policy(index, endpoint) => (index, endpoint),
    };
    let Some(policy) = classify::policy::<F>(index) else { return Err(Verdict::Drop(Counter::DropNoPolicy)) };
    match t.kind {
        Kind::Tcp if opens(t) => {}
        Kind::Tcp => return Err(stray::<F>(pkt, generation, t, key, policy, &endpoint)),
        // An answer to a query that came by a way that this node does not see (an inbound query is remembered).
        Kind::Answer => return Err(Verdict::Pass),
        Kind::Udp | Kind::Query => {}
        // The stack waits for the first fragment.
        Kind::Orphan if respects(config) != 0 => return Err(firewall::detour(pkt, config)),
        Kind::Orphan => return Err(Verdict::Later(GATHER)),
        Kind::Broken => return Err(Verdict::Drop(Counter::DropMalformed)),
        Kind::Other | Kind::Error => return Err(Verdict::Drop(Counter::DropProtocol)),
    }
    if policy.table_len == 0 {
        let node_ip = policy.flags & policy_flags::ON_NO_GATEWAY_NODE_IP != 0;
        return Err(if node_ip { Verdict::Pass } else { Verdict::Drop(Counter::DropNoGateway) });
    }
    if share::is_used_up::<F>(config, key.src) {
        return Err(Verdict::Drop(Counter::DropPodShare));
    }
    open::<F>(pkt, respects(config), generation, t, key, index, policy, &endpoint).map_err(Verdict::Drop)
}

/// A TCP segment of a connection that is not in the table.
#[inline(always)]
fn stray<F: Family>(
    pkt: &Packet,
    generation: u32,
    t: &Transport,
    key: &FlowKey<F>,
    policy: &Policy,
    endpoint: &Endpoint,
) -> Verdict {
    let answers = t.flags & (tcp::flag::SYN | tcp::flag::ACK) == tcp::flag::SYN | tcp::flag::ACK;
    // The pod accepts a connection whose SYN did not pass the interface's egress hook (a redirect into the pod).
    let old = endpoint.flags & endpoint_flags::HAS_HISTORY != 0 && policy.flags & policy_flags::EXISTING_DROP == 0;
    if !answers && !old {
        // A reset of what was refused tells the outside nothing about an egress IP and ends the matter.
        return Verdict::Drop(Counter::DropUnknownFlow);
    }
    leave_alone::<F>(pkt, generation, key, tcp::advance(0, t.flags))
}

/// Opens a flow: chooses a slot, takes a port and enters both halves.
#[expect(clippy::too_many_arguments, reason = "all of it is inlined into one program")]
#[inline(always)]
fn open<F: Family>(
    pkt: &Packet,
    pending: u16,
    generation: u32,
    t: &Transport,
    key: &FlowKey<F>,
    index: u32,
    policy: &Policy,
    endpoint: &Endpoint,
) -> Result<(), Counter> {
    let search = F::search().get_ptr_mut(0).ok_or(Counter::DropNoPort)?;
    // SAFETY: the element is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU.
    let search = unsafe { &mut *search };
    let now = now_tick();
    search.value = reverse_value(pkt, key, index, now).ok_or(Counter::DropMalformed)?;
    search.hash = hash::flow(key, policy.seed);
    search.key = FlowKey { src: key.src, dst: key.dst, src_port: 0, dst_port: key.dst_port, proto: key.proto };
    search.policy = *policy;
    search.endpoint = endpoint.id;
    search.generation = generation;
    ports::take::<F>(search)?;
    let flow = Flow {
        policy: index,
        egress: search.value.egress,
        egress_generation: search.value.egress_generation,
        config_generation: search.generation,
        ticket: ticket(),
        last_seen: now,
        created: now,
        port: search.key.src_port,
        state: if t.kind == Kind::Tcp { tcp::seen::SYN } else { 0 },
        kind: kind::TRANSLATED,
        pending,
        ifindex: pkt.ifindex(),
    };
    commit::<F>(key, &flow)
}

/// Enters the forward half, or takes the reverse half back where that fails.
#[inline(always)]
fn commit<F: Family>(key: &FlowKey<F>, flow: &Flow) -> Result<(), Counter> {
    let Err(error) = enter::<F>(key, flow) else {
        stats::count(Counter::FlowsCreated);
        return Ok(());
    };
    if let Some(reverse) = reverse_key::<F>(key, flow) {
        let _ = F::reverses().remove(reverse);
    }
    // Another CPU made the same flow first: its choice stands.
    if error == EEXIST { Ok(()) } else { Err(Counter::DropTableFull) }
}

/// Whether a new flow waits for the host's firewall, as [`Flow::pending`] has it.
#[inline(always)]
fn respects(config: &Config) -> u16 {
    (config.flags & flags::RESPECT_FIREWALL != 0) as u16
}

/// The short way for the packets of a confirmed flow, the long one until then.
#[inline(always)]
fn go<F: Family>(pkt: &Packet, config: &Config, ip: &Ip<F>, t: &Transport, flow: &Flow) -> Verdict {
    if respects(config) != 0 {
        if flow.pending != 0 {
            return firewall::ask(pkt, config);
        }
        if ip.part != Part::Whole {
            return firewall::detour(pkt, config);
        }
    } else if ip.part == Part::First {
        fragment::keep(ip, t);
        if fragment::is_awaited(ip) {
            return Verdict::Later(GATHER);
        }
    }
    send::<F>(pkt, config, ip, t, flow.egress, flow.port, true)
}

/// Translates the packet of a flow and sends it on its way; `hop`: it is routed here, so its hop limit falls.
#[inline(always)]
pub fn send<F: Family>(
    pkt: &Packet,
    config: &Config,
    ip: &Ip<F>,
    t: &Transport,
    egress: u32,
    port: u16,
    hop: bool,
) -> Verdict {
    // The stack answers "time exceeded"; such a packet does not leave the node.
    if hop && ip.hop_limit <= 1 {
        return Verdict::Pass;
    }
    let Some(e) = EGRESS_IPS.get(egress) else { return Verdict::Drop(Counter::DropNoOwner) };
    if e.owner == 0 {
        return Verdict::Drop(Counter::DropNoOwner);
    }
    if hop && e.flags & egress_flags::OWNED == 0 && firewall::too_large(pkt, config, ip, e.owner) {
        return firewall::detour(pkt, config);
    }
    if t.kind == Kind::Tcp && t.flags & tcp::flag::SYN != 0 {
        mss::clamp::<F>(pkt, config, e.owner, ip.l4);
    }
    let r =
        Rewrite { end: End::Source, old: ip.src, new: F::from_any(&e.addr), old_port: t.src_port, new_port: port, hop };
    if rewrite(pkt, ip, &r).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    hand_over(pkt, egress, way::entropy((port, t.dst_port), ip.dst))
}

/// Sends a translated packet to the owner of its egress IP, or out if that is this node.
#[inline(always)]
pub fn hand_over(pkt: &Packet, egress: u32, entropy: u32) -> Verdict {
    let Some(e) = EGRESS_IPS.get(egress) else { return Verdict::Drop(Counter::DropNoOwner) };
    if e.flags & egress_flags::OWNED != 0 {
        stats::count(Counter::SentLocal);
        return match shaper::limit(pkt, egress, e, shaper::OUT) {
            Some(verdict) => verdict,
            None => Verdict::leave(egress),
        };
    }
    match NODES.get(e.owner) {
        Some(node) if node.present != 0 => Verdict::send(purpose::FORWARD, e.owner, entropy),
        _ => Verdict::Drop(Counter::DropNoOwner),
    }
}
