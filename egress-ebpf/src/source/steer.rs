//! `pod_egress`: the path of a packet that a pod sends.

use crate::{
    flows::{
        collect, ended, firewall,
        inbound::{self, Known, Opener},
        key,
        ports::{self, EEXIST},
        recheck,
        table::{Taken, enter, mend_reverse, remove, reverse_key, reverse_value, taken, ticket},
    },
    headers::{
        fields::{Ip, Kind, L4Header, Part},
        packet::{IPV4, Packet, now_tick},
    },
    source::{fragment, icmp, service, translated},
    tables::{
        classify::{self, Class},
        datagram,
        family::Family,
        gate,
        maps::{CONFIG, EGRESS_IPS},
        share, stats,
        trace::{self, Step},
        traffic,
    },
    transports::{carrier, large},
};
use aya_ebpf::bindings::__sk_buff;
use egress_common::{
    V4, V6,
    config::{DatapathConfig, flags},
    endpoint::{Endpoint, Policy, policy_flags},
    flow::{Flow, FlowKey, kind},
    hash, tcp,
    traffic::REFUSED,
    udp,
    verdict::{Counter, Verdict},
};

/// Result of [`established`] if there is no flow: no verdict has these bits.
const UNKNOWN: u64 = u64::MAX;
/// Result of [`first`] for an ICMP error.
const QUOTES: u64 = u64::MAX - 1;
/// Result of [`first`] if the packet has a flow now.
const ENTERED: u64 = u64::MAX - 2;
/// Result of [`first`] if the packet has a flow now, and the host's firewall must decide.
const ASK: u64 = u64::MAX - 4;
/// Result of both for a fragment that waits for its first one, or that others wait for.
const GATHER: u64 = u64::MAX - 3;
/// Result of both for the first fragment of a datagram that is left alone: its later fragments need its ports.
const ALONE: u64 = u64::MAX - 9;
/// Result of [`established`] for a flow that must be checked first.
const CHECK: u64 = u64::MAX - 7;
/// Result of [`established`] for a packet that may be left alone, if its record must be renewed first.
const RENEW: u64 = u64::MAX - 8;

/// Knowledge about a packet's flow before the lookup: none.
const ANY: u32 = 0;
/// This packet has created the flow: its SYN does not open it again.
const MADE: u32 = 1;
/// The flow, or the record of a connection that is left alone, was just checked; later changes of the tables are for the next packet.
const CHECKED: u32 = 2;

/// Classifies a pod's packet, finds or creates its flow, translates and sends it.
///
/// The functions run in sequence, not nested: the variables of two do not fit the 512 bytes of stack that a chain of calls may have, and
/// the first packet of a flow can afford another parse. It only creates the flow, and is then sent like all others.
#[inline(always)]
pub fn steer<F: Family>(pkt: &Packet) -> u64 {
    let verdict = match checked::<F>(pkt, ANY) {
        UNKNOWN => match opening::<F>(pkt) {
            ENTERED => match checked::<F>(pkt, MADE) {
                // The flow was removed, or became unusable, between its entry and its lookup.
                UNKNOWN => Verdict::Drop(Counter::DropSevered).to_bits(),
                verdict => verdict,
            },
            QUOTES => {
                trace::note(Step::Quotes, 0, 0);
                icmp::once::outgoing::<F>(pkt)
            }
            verdict => verdict,
        },
        verdict => verdict,
    };
    if verdict == GATHER || verdict == ALONE {
        if verdict == GATHER {
            trace::note(Step::Fragment, 0, 0);
        }
        return match fragment::once::gather::<F>(pkt) {
            fragment::GO_ON if verdict == ALONE => Verdict::Pass.to_bits(),
            fragment::GO_ON => Verdict::Drop(Counter::DropFragment).to_bits(),
            verdict => verdict,
        };
    }
    match verdict >> 32 {
        large::ANSWER => {
            trace::note(Step::TooLarge, verdict as u32, 0);
            large::once::answer::<F>(pkt, verdict as u32)
        }
        service::LOOK => service::once::unless_own::<F>(pkt, verdict as u32),
        _ => verdict,
    }
}

/// Handles a packet of a flow in the table, or of a connection that is left alone, if necessary after a check of its record.
#[inline(always)]
fn checked<F: Family>(pkt: &Packet, known: u32) -> u64 {
    let verdict = match once::established::<F>(pkt, known) {
        CHECK => match recheck::once::recheck::<F>(pkt, 0) {
            recheck::KEPT => once::established::<F>(pkt, CHECKED),
            recheck::GONE => UNKNOWN,
            dropped => dropped,
        },
        RENEW => match inbound::once::renew::<F>(pkt) {
            recheck::KEPT => once::established::<F>(pkt, CHECKED),
            recheck::GONE => UNKNOWN,
            dropped => dropped,
        },
        verdict => verdict,
    };
    // Meanwhile another interface's flow or record has taken its place.
    if verdict == CHECK || verdict == RENEW { Verdict::Drop(Counter::DropSevered).to_bits() } else { verdict }
}

/// Handles the first packet of a flow. Removes ended flows before it refuses the packet for lack of room.
#[inline(always)]
fn opening<F: Family>(pkt: &Packet) -> u64 {
    const SHARE: u64 = Verdict::Drop(Counter::DropPodShare).to_bits();
    const TABLE: u64 = Verdict::Drop(Counter::DropTableFull).to_bits();
    let verdict = match once::first::<F>(pkt) {
        refused @ (SHARE | TABLE) if ended::once::reclaim::<F>(pkt) == 0 => refused,
        SHARE | TABLE => once::first::<F>(pkt),
        verdict => verdict,
    };
    if verdict == ASK || verdict == ENTERED {
        collect::check_first_tickets::<F>();
    }
    if verdict == ASK { firewall::ask(pkt).to_bits() } else { verdict }
}

/// Counts the first packet of a refused flow. A global function: `pod_egress` has no stack left for it.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn count_refused(skb: *mut __sk_buff, counter: u32) -> u64 {
    let pkt = Packet::from_raw(skb);
    if traffic::is_refusal(counter) {
        if pkt.protocol() == IPV4 { refused::<V4>(&pkt, counter) } else { refused::<V6>(&pkt, counter) }
    }
    0
}

#[inline(always)]
fn refused<F: Family>(pkt: &Packet, counter: u32) {
    if let (Some(config), Ok(ip)) = (CONFIG.get(0), F::parse(pkt))
        && let Class::Policy(policy, endpoint) = classify::classify(config, ip.src, ip.dst)
    {
        traffic::refused(traffic::account(endpoint.namespace, policy, REFUSED), counter);
    }
}

/// Handles a packet of a flow in the table; `known` is [`ANY`], [`MADE`] or [`CHECKED`].
#[inline(always)]
pub fn established<F: Family>(pkt: &Packet, known: u32) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    let Ok(ip) = F::parse(pkt) else { return UNKNOWN };
    let t = datagram::transport::<F>(pkt, &ip).hidden(pkt.len());
    // Otherwise a path on which the verifier knows a later fragment would remain, and with it another path through all that follows.
    let ip = ip.hidden(pkt.len());
    if !t.has_ports() {
        return UNKNOWN;
    }
    let key = key::of_pod(&ip, &t);
    // An answer belongs to a query from outside, never to the pod's own query with the same identifier.
    let flow = if t.kind == Kind::Answer { None } else { F::flows().get_ptr_mut(&key) };
    let Some(flow) = flow else {
        return match inbound::look::<F>(pkt, config, &t, &key, known == CHECKED) {
            Known::No => UNKNOWN,
            Known::Perhaps => RENEW,
            Known::LeftAlone => {
                trace::note(Step::LeftAlone, 0, 0);
                alone(&ip).to_bits()
            }
        };
    };
    // SAFETY: flows are changed in place only by single stores to fields that may lag by a packet.
    let flow = unsafe { &mut *flow };
    let is_stale = known != CHECKED && !recheck::is_current(config, flow) || known == ANY && t.opens();
    if flow.ifindex != pkt.ifindex() || is_stale {
        return CHECK;
    }
    proceed::<F>(pkt, config, &ip, &t, &key, flow).map_or(UNKNOWN, Verdict::to_bits)
}

/// Handles a packet without a flow, if it passes the gate: creates a flow, or returns another result.
#[inline(always)]
pub fn first<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    let (ip, t) = match gate::packet::<F>(pkt, config) {
        Ok(headers) => headers,
        Err(counter) => return Verdict::Drop(counter).to_bits(),
    };
    if t.kind == Kind::Error {
        return QUOTES;
    }
    match unknown::<F>(pkt, config, &ip, &t, &key::of_pod(&ip, &t)) {
        // Whatever else the flow says, the firewall decides first, unless the packet may be too large.
        Ok(()) if firewall::is_asked(config) != 0 && !large::may_be(pkt, config) => ASK,
        Ok(()) => ENTERED,
        Err(verdict) => verdict.to_bits(),
    }
}

/// Returns the verdict on a packet of this flow, or `None` if the flow is gone.
#[inline(always)]
fn proceed<F: Family>(
    pkt: &Packet,
    config: &DatapathConfig,
    ip: &Ip<F>,
    t: &L4Header,
    key: &FlowKey<F>,
    flow: &mut Flow,
) -> Option<Verdict> {
    let taken = taken(key, flow)?;
    trace::note(Step::Flow, flow.policy as u32, 0);
    let now = now_tick();
    if flow.last_seen != now {
        flow.last_seen = now;
        if !mend_reverse::<F>(pkt, key, flow, now) {
            remove::<F>(key, flow, now);
            return None;
        }
    }
    if t.kind == Kind::Tcp {
        let state = tcp::advance(flow.state, t.flags);
        if state != flow.state {
            flow.state = state;
        }
        if t.flags & tcp::flag::ACK != 0 {
            flow.ack = t.ack;
        }
        if flow.back != 0 || t.flags & (tcp::flag::FIN | tcp::flag::RST) != 0 {
            ended::by_pod::<F>(key, flow, t);
        }
    } else if t.kind == Kind::Udp && udp::is_question(flow.state) {
        flow.state = udp::sent(flow.state);
    }
    Some(match taken.kind {
        kind::TRANSLATED => go::<F>(pkt, config, ip, t, &taken),
        _ => Verdict::Drop(Counter::DropSevered),
    })
}

/// Returns the verdict on a packet that is left alone.
#[inline(always)]
fn alone<F: Family>(ip: &Ip<F>) -> Verdict {
    if ip.part == Part::First { Verdict::Later(ALONE) } else { Verdict::Pass }
}

/// Decides on a packet without a flow. Returns `Ok` if the packet has a flow now.
#[inline(always)]
fn unknown<F: Family>(
    pkt: &Packet,
    config: &DatapathConfig,
    ip: &Ip<F>,
    t: &L4Header,
    key: &FlowKey<F>,
) -> Result<(), Verdict> {
    let generation = recheck::generation(config);
    let (index, endpoint) = match classify::classify(config, ip.src, ip.dst) {
        Class::Outside(class, exception) => {
            trace::note(if class == 0 { Step::Unselected } else { Step::Elsewhere }, 0, 0);
            return Err(service::left(pkt, t, class, exception));
        }
        Class::Held => return Err(Verdict::Drop(Counter::DropHeld)),
        Class::Policy(index, endpoint) => (index, endpoint),
    };
    trace::note(Step::Policy, index, 0);
    let Some(policy) = classify::policy::<F>(index) else { return Err(Verdict::Drop(Counter::DropNoPolicy)) };
    match t.kind {
        Kind::Tcp if t.opens() || policy.leaves_as_node() => {}
        Kind::Tcp => return Err(stray::<F>(pkt, config, generation, ip, t, key, &policy, &endpoint)),
        // Queries from outside are recorded, except those that bypass the interface's egress hook.
        Kind::Answer if policy.leaves_as_node() || config.flags & flags::UNSEEN_INBOUND != 0 => return Err(alone(ip)),
        Kind::Answer => return Err(Verdict::Drop(Counter::DropUnknownFlow)),
        Kind::Udp | Kind::Query => {}
        // The stack waits for the first fragment.
        Kind::Orphan if firewall::is_asked(config) != 0 => return Err(firewall::detour(pkt)),
        Kind::Orphan => return Err(Verdict::Later(GATHER)),
        Kind::Broken => return Err(Verdict::Drop(Counter::DropMalformed)),
        Kind::Other | Kind::Error => return Err(Verdict::Drop(Counter::DropProtocol)),
    }
    if policy.table_len == 0 {
        if policy.leaves_as_node() {
            trace::note(Step::AsNode, 0, 0);
            if t.kind == Kind::Tcp && policy.flags & policy_flags::EXISTING_DROP == 0 {
                // The connection keeps its path when a gateway is back.
                let opener = if is_unseen_answer(config, t) { Opener::Outside } else { Opener::Pod };
                inbound::leave_alone::<F>(pkt, generation, key, &endpoint, opener, t.flags);
            }
            return Err(alone(ip));
        }
        return Err(Verdict::Drop(Counter::DropNoGateway));
    }
    if share::is_used_up::<F>(config, endpoint.id) {
        return Err(Verdict::Drop(Counter::DropPodShare));
    }
    open::<F>(pkt, firewall::is_asked(config), generation, t, key, index, &policy, &endpoint).map_err(Verdict::Drop)
}

/// Decides on a TCP segment of a connection that is not in the table.
#[expect(clippy::too_many_arguments, reason = "all of it is inlined into one program")]
#[inline(always)]
fn stray<F: Family>(
    pkt: &Packet,
    config: &DatapathConfig,
    generation: u32,
    ip: &Ip<F>,
    t: &L4Header,
    key: &FlowKey<F>,
    policy: &Policy,
    endpoint: &Endpoint,
) -> Verdict {
    let answers = is_unseen_answer(config, t);
    // A connection that the pod had open when the policy selected it.
    let old = now_tick() < endpoint.history_until && policy.flags & policy_flags::EXISTING_DROP == 0;
    if !answers && !old {
        // All such segments are dropped, including resets.
        return Verdict::Drop(Counter::DropUnknownFlow);
    }
    let opener = if answers { Opener::Outside } else { Opener::Pod };
    inbound::leave_alone::<F>(pkt, generation, key, endpoint, opener, t.flags);
    alone(ip)
}

/// Returns whether the pod accepts a connection whose SYN bypassed the interface's egress hook (a redirect
/// into the pod). If nothing on this node can deliver a SYN like that, the pod has invented the connection.
#[inline(always)]
fn is_unseen_answer(config: &DatapathConfig, t: &L4Header) -> bool {
    config.flags & flags::UNSEEN_INBOUND != 0
        && t.flags & (tcp::flag::SYN | tcp::flag::ACK) == tcp::flag::SYN | tcp::flag::ACK
}

/// Opens a flow: chooses a slot, takes a port and enters both halves.
#[expect(clippy::too_many_arguments, reason = "all of it is inlined into one program")]
#[inline(always)]
fn open<F: Family>(
    pkt: &Packet,
    pending: u8,
    generation: u32,
    t: &L4Header,
    key: &FlowKey<F>,
    index: u32,
    policy: &Policy,
    endpoint: &Endpoint,
) -> Result<(), Counter> {
    let search = ports::search::<F>().ok_or(Counter::DropNoPort)?;
    let now = now_tick();
    search.value = reverse_value(pkt, key, index, endpoint.id, pending, now).ok_or(Counter::DropMalformed)?;
    search.hash = hash::flow(key, policy.seed);
    search.key = FlowKey { src: key.src, dst: key.dst, src_port: 0, dst_port: key.dst_port, proto: key.proto };
    search.policy = *policy;
    search.endpoint = endpoint.id;
    search.namespace = endpoint.namespace;
    search.generation = generation;
    ports::take::<F>(search)?;
    let mut flow = Flow {
        check: 0,
        policy: index as u16,
        account: search.value.account,
        egress: search.value.egress,
        egress_generation: search.value.egress_generation,
        config_generation: search.generation,
        endpoint: endpoint.id,
        ticket: ticket(),
        last_seen: now,
        created: now,
        ack: 0,
        end: 0,
        ifindex: pkt.ifindex(),
        port: search.key.src_port,
        state: match t.kind {
            Kind::Tcp => tcp::seen::SYN,
            // With `firewall: bypass` this same packet is looked up once more.
            Kind::Udp if pending == 0 => udp::seen::NEW,
            _ => 0,
        },
        back: 0,
        queued: 0,
        kind: kind::TRANSLATED,
        pending,
    };
    flow.seal(key);
    trace::note(Step::Opened, flow.egress, u16::from_be(flow.port) as u32);
    commit::<F>(key, &flow)
}

/// Enters the forward half, or removes the reverse half if that fails.
#[inline(always)]
fn commit<F: Family>(key: &FlowKey<F>, flow: &Flow) -> Result<(), Counter> {
    let Err(error) = enter::<F>(key, flow) else {
        stats::count(Counter::FlowsCreated);
        traffic::opened(flow.account);
        return Ok(());
    };
    if let Some(reverse) = reverse_key::<F>(key, flow) {
        let _ = F::reverses().remove(reverse);
    }
    // Another CPU created the same flow first: its choice stands.
    if error == EEXIST { Ok(()) } else { Err(Counter::DropTableFull) }
}

/// Takes the fast path. If the host's firewall is asked, fragments and packets of unconfirmed flows take the host-stack path.
#[inline(always)]
fn go<F: Family>(pkt: &Packet, config: &DatapathConfig, ip: &Ip<F>, t: &L4Header, flow: &Taken) -> Verdict {
    if firewall::is_asked(config) != 0 {
        if flow.pending != 0 || ip.part != Part::Whole {
            if large::may_be(pkt, config)
                && let Some(e) = EGRESS_IPS.get(flow.egress)
                && let Some(answer) =
                    large::judge(pkt, config, ip, carrier::of_flow(e, flow.egress, (flow.port, t.dst_port), ip.dst))
            {
                return answer;
            }
            return if flow.pending != 0 { firewall::ask(pkt) } else { firewall::detour(pkt) };
        }
    } else if ip.part == Part::First {
        datagram::keep(ip, t);
        if datagram::is_awaited(ip) {
            return Verdict::Later(GATHER);
        }
    }
    translated::send::<F>(pkt, config, ip, t, flow, true)
}

once! {
    established(established_v4, established_v6) = established(known: u32);
    first(first_v4, first_v6) = first();
}
