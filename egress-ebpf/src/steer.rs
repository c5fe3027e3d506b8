//! `pod_egress`: what happens to a packet that a pod sends.

use crate::{
    classify::{self, Class},
    exit,
    family::Family,
    fragment, icmp,
    maps::{CONFIG, EGRESS_IPS, NODES},
    mss,
    packet::{ETH_LEN, Mac, Packet, now_tick},
    parse::{self, Ip, Kind, Part, Transport, proto},
    ports::{self, EEXIST},
    stats,
    translate::{End, Rewrite, rewrite},
    way,
};
use aya_ebpf::{bindings::BPF_NOEXIST, helpers::bpf_get_prandom_u32};
use egress_common::{
    config::{Config, flags},
    egress::flags as egress_flags,
    endpoint::{Endpoint, Policy, endpoint_flags, policy_flags},
    flow::{Flow, FlowKey, Reverse, Ticket, kind},
    hash, tcp,
    verdict::{Counter, Verdict, purpose},
};

/// What [`established`] returns when there is no flow: no verdict has these bits.
const UNKNOWN: u64 = u64::MAX;
/// What [`established`] returns for an ICMP error.
const QUOTES: u64 = u64::MAX - 1;

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
/// of calls may have, and the first packet of a flow can afford to be parsed twice.
#[inline(always)]
pub fn steer<F: Family>(pkt: &Packet) -> u64 {
    match established::<F>(pkt) {
        UNKNOWN => first::<F>(pkt),
        QUOTES => icmp::outgoing::<F>(pkt),
        verdict => verdict,
    }
}

/// The 5-tuple of a pod's packet.
#[inline(always)]
fn key_of<F: Family>(ip: &Ip<F>, t: &Transport) -> FlowKey<F> {
    FlowKey { src: ip.src, dst: ip.dst, src_port: t.src_port, dst_port: t.dst_port, proto: ip.proto }
}

/// A packet of a flow that is in the table.
#[inline(never)]
fn established<F: Family>(pkt: &Packet) -> u64 {
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

/// A packet without a flow.
#[inline(never)]
fn first<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    let Ok(ip) = F::parse(pkt) else { return Verdict::Drop(Counter::DropMalformed).to_bits() };
    let t = parse::transport::<F>(pkt, &ip);
    unknown::<F>(pkt, config, &ip, &t, &key_of(&ip, &t)).to_bits()
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
        kind::TRANSLATED => send::<F>(pkt, config, ip, t, flow.egress, flow.port),
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
    let (policy, _) = match classify::classify(config, key.src, key.dst) {
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
        Class::Policy(policy, endpoint) => (policy, endpoint),
    };
    if flow.kind == kind::UNTOUCHED {
        flow.config_generation = generation;
        // The pod opens a connection of its own with the ports of one that the outside had opened.
        return if opening { Check::Anew } else { Check::Keep };
    }
    match classify::member(policy, flow.egress) {
        Some(m) if m.generation == flow.egress_generation => {
            // A SYN that nobody answered may go another way.
            if opening && m.usable == 0 && flow.state & tcp::seen::ACK == 0 {
                return Check::Anew;
            }
            flow.policy = policy;
            flow.kind = kind::TRANSLATED;
            flow.config_generation = generation;
            if opening {
                reopen::<F>(key, flow);
            }
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

/// A connection that opens again with the ports of one that was closed begins with a clean state.
#[inline(always)]
fn reopen<F: Family>(key: &FlowKey<F>, flow: &mut Flow) {
    if flow.state & !tcp::seen::SYN == 0 {
        return;
    }
    flow.state = 0;
    if let Some(reverse) = reverse_key::<F>(key, flow).and_then(|k| F::reverses().get_ptr_mut(k)) {
        // SAFETY: a single store.
        unsafe { (*reverse).state = 0 };
    }
}

/// The key of a flow's other half, or `None` if its egress IP is gone.
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

/// Removes both halves of a flow.
#[inline(always)]
pub fn forget<F: Family>(key: &FlowKey<F>, flow: &Flow) {
    if flow.kind != kind::UNTOUCHED
        && let Some(reverse) = reverse_key::<F>(key, flow)
    {
        let _ = F::reverses().remove(reverse);
    }
    let _ = F::flows().remove(key);
}

/// Builds the reverse half anew if it is missing. Called once a tick for a flow that sends.
#[inline(always)]
fn mend_reverse<F: Family>(pkt: &Packet, key: &FlowKey<F>, flow: &Flow, now: u32) {
    let Some(reverse) = reverse_key::<F>(key, flow) else { return };
    if F::reverses().get_ptr(reverse).is_some() {
        return;
    }
    let Some(mut value) = reverse_value(pkt, key, flow.policy, now) else { return };
    value.egress = flow.egress;
    value.egress_generation = flow.egress_generation;
    if F::reverses().insert(reverse, value, BPF_NOEXIST as u64).is_ok() {
        stats::count(Counter::FlowsRepaired);
    }
}

/// What a reply needs to find its way back to where this packet came from; the slot is filled in by the caller.
#[inline(always)]
fn reverse_value<F: Family>(pkt: &Packet, key: &FlowKey<F>, policy: u32, now: u32) -> Option<Reverse<F>> {
    let [host_mac, pod_mac] = pkt.read::<[Mac; 2]>(0)?;
    Some(Reverse {
        pod: key.src,
        pod_port: key.src_port,
        state: 0,
        ifindex: pkt.ifindex(),
        policy,
        egress: 0,
        egress_generation: 0,
        last_seen: now,
        pod_mac,
        host_mac,
    })
}

#[inline(always)]
fn unknown<F: Family>(pkt: &Packet, config: &Config, ip: &Ip<F>, t: &Transport, key: &FlowKey<F>) -> Verdict {
    let generation = generation(config);
    let (index, endpoint) = match classify::classify(config, ip.src, ip.dst) {
        Class::Outside => return Verdict::Pass,
        Class::Held => return Verdict::Drop(Counter::DropHeld),
        Class::Policy(index, endpoint) => (index, endpoint),
    };
    let Some(policy) = classify::policy::<F>(index) else { return Verdict::Drop(Counter::DropNoPolicy) };
    match t.kind {
        Kind::Tcp if opens(t) => {}
        Kind::Tcp => return stray::<F>(generation, t, key, policy, &endpoint),
        // An answer to a query that came by a way that this node does not see (an inbound query is remembered).
        Kind::Answer => return Verdict::Pass,
        Kind::Udp | Kind::Query => {}
        Kind::Orphan => return Verdict::Drop(Counter::DropFragment),
        Kind::Broken => return Verdict::Drop(Counter::DropMalformed),
        Kind::Other | Kind::Error => return Verdict::Drop(Counter::DropProtocol),
    }
    if policy.table_len == 0 {
        let node_ip = policy.flags & policy_flags::ON_NO_GATEWAY_NODE_IP != 0;
        return if node_ip { Verdict::Pass } else { Verdict::Drop(Counter::DropNoGateway) };
    }
    open::<F>(pkt, config, generation, ip, t, key, index, policy, &endpoint)
}

/// A TCP segment of a connection that is not in the table.
#[inline(always)]
fn stray<F: Family>(generation: u32, t: &Transport, key: &FlowKey<F>, policy: &Policy, endpoint: &Endpoint) -> Verdict {
    let answers = t.flags & (tcp::flag::SYN | tcp::flag::ACK) == tcp::flag::SYN | tcp::flag::ACK;
    // The pod accepts a connection whose SYN did not pass the interface's egress hook (a redirect into the pod).
    let old = endpoint.flags & endpoint_flags::HAS_HISTORY != 0 && policy.flags & policy_flags::EXISTING_DROP == 0;
    if !answers && !old {
        // A reset of what was refused tells the outside nothing about an egress IP and ends the matter.
        return Verdict::Drop(Counter::DropUnknownFlow);
    }
    leave_alone::<F>(generation, key, tcp::advance(0, t.flags))
}

/// Notes a flow that is not to be touched, as the tables of this generation say.
#[inline(always)]
pub fn leave_alone<F: Family>(generation: u32, key: &FlowKey<F>, state: u16) -> Verdict {
    let now = now_tick();
    let flow = Flow {
        policy: 0,
        egress: 0,
        egress_generation: 0,
        config_generation: generation,
        ticket: ticket(),
        last_seen: now,
        created: now,
        port: 0,
        state,
        kind: kind::UNTOUCHED,
        reserved: 0,
    };
    match enter::<F>(key, &flow) {
        Ok(()) => {
            stats::count(Counter::Untouched);
            Verdict::Pass
        }
        Err(EEXIST) => Verdict::Pass,
        Err(_) => Verdict::Drop(Counter::DropTableFull),
    }
}

#[inline(always)]
fn ticket() -> u32 {
    // SAFETY: the helper has no arguments.
    unsafe { bpf_get_prandom_u32() }
}

/// Puts a new flow into the table and into the collector's queue.
#[inline(always)]
pub fn enter<F: Family>(key: &FlowKey<F>, flow: &Flow) -> Result<(), i32> {
    F::flows().insert(key, flow, BPF_NOEXIST as u64)?;
    let ticket = Ticket { key: *key, ticket: flow.ticket, checked: flow.created };
    F::tickets().push(ticket, 0).inspect_err(|_| {
        let _ = F::flows().remove(key);
    })
}

/// Opens a flow: chooses a slot, takes a port, enters both halves and sends the packet.
#[expect(clippy::too_many_arguments, reason = "all of it is inlined into one program")]
#[inline(always)]
fn open<F: Family>(
    pkt: &Packet,
    config: &Config,
    generation: u32,
    ip: &Ip<F>,
    t: &Transport,
    key: &FlowKey<F>,
    index: u32,
    policy: &Policy,
    endpoint: &Endpoint,
) -> Verdict {
    let Some(search) = F::search().get_ptr_mut(0) else { return Verdict::Drop(Counter::DropNoPort) };
    // SAFETY: the element is this CPU's own, and programs at TC hooks do not interrupt each other on one CPU.
    let search = unsafe { &mut *search };
    let now = now_tick();
    let Some(value) = reverse_value(pkt, key, index, now) else { return Verdict::Drop(Counter::DropMalformed) };
    search.value = value;
    search.hash = hash::flow(key, policy.seed);
    search.key = FlowKey { src: key.src, dst: key.dst, src_port: 0, dst_port: key.dst_port, proto: key.proto };
    search.policy = *policy;
    search.endpoint = endpoint.id;
    search.generation = generation;
    if let Err(counter) = ports::take::<F>(search) {
        return Verdict::Drop(counter);
    }
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
        reserved: 0,
    };
    commit::<F>(pkt, config, ip, t, key, &flow)
}

/// Enters the forward half, or takes the reverse half back where that fails.
#[inline(always)]
fn commit<F: Family>(
    pkt: &Packet,
    config: &Config,
    ip: &Ip<F>,
    t: &Transport,
    key: &FlowKey<F>,
    flow: &Flow,
) -> Verdict {
    match enter::<F>(key, flow) {
        Ok(()) => {
            stats::count(Counter::FlowsCreated);
            send::<F>(pkt, config, ip, t, flow.egress, flow.port)
        }
        Err(error) => {
            if let Some(reverse) = reverse_key::<F>(key, flow) {
                let _ = F::reverses().remove(reverse);
            }
            if error != EEXIST {
                return Verdict::Drop(Counter::DropTableFull);
            }
            // Another CPU made the same flow first: its choice stands.
            // SAFETY: read only.
            match unsafe { F::flows().get(key) } {
                Some(f) if f.kind == kind::TRANSLATED => send::<F>(pkt, config, ip, t, f.egress, f.port),
                _ => Verdict::Drop(Counter::DropSevered),
            }
        }
    }
}

/// Translates the packet of a flow and sends it on its way.
#[inline(always)]
fn send<F: Family>(pkt: &Packet, config: &Config, ip: &Ip<F>, t: &Transport, egress: u32, port: u16) -> Verdict {
    // The stack answers "time exceeded"; such a packet does not leave the node.
    if ip.hop_limit <= 1 {
        return Verdict::Pass;
    }
    let Some(e) = EGRESS_IPS.get(egress) else { return Verdict::Drop(Counter::DropNoOwner) };
    if e.owner == 0 {
        return Verdict::Drop(Counter::DropNoOwner);
    }
    if ip.part == Part::First {
        fragment::keep(ip, t);
    }
    if t.kind == Kind::Tcp && t.flags & tcp::flag::SYN != 0 {
        mss::clamp::<F>(pkt, config, e.owner, ip.l4);
    }
    let r = Rewrite {
        end: End::Source,
        old: ip.src,
        new: F::from_any(&e.addr),
        old_port: t.src_port,
        new_port: port,
        hop: true,
        csum_ipv6: config.flags & flags::CSUM_IPV6 != 0,
    };
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
        return exit::leave(pkt, e);
    }
    match NODES.get(e.owner) {
        Some(node) if node.present != 0 => {
            Verdict::send(purpose::FORWARD, e.owner, entropy)
        }
        _ => Verdict::Drop(Counter::DropNoOwner),
    }
}
