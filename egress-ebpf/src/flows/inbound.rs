//! Connections that keep their path: the outside opened them to a pod, the pod had them open before a
//! policy selected it, or they began while there was no gateway. A separate table records them, so that
//! their packets are left alone. It never refuses a record: it evicts the least recently used one.

use crate::{
    flows::{
        collect, key,
        recheck::{self, GONE, KEPT},
    },
    headers::{
        fields::{Kind, L4Header, Part, proto},
        note,
        packet::{Packet, now_tick},
    },
    tables::{
        classify::{self, Class},
        datagram,
        family::Family,
        gate,
        maps::CONFIG,
        stats,
        trace::{self, Step},
    },
};
use egress_common::{
    config::DatapathConfig,
    endpoint::{Endpoint, policy_flags},
    flow::{FlowKey, Inbound},
    tcp,
    verdict::{Counter, Verdict},
};

/// `pod_ingress`: looks at a packet on its way into a pod. Never changes or drops it.
#[inline(always)]
pub fn remember<F: Family>(pkt: &Packet) -> Verdict {
    // A packet from `deliver` opens no connection from outside, whatever the flow table says.
    if pkt.take_note(note::DELIVERED) {
        trace::note(Step::Delivered, 0, 0);
        return Verdict::Pass;
    }
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass };
    let Ok(ip) = F::parse(pkt) else { return Verdict::Pass };
    let generation = recheck::generation(config);
    if ip.part == Part::Later {
        return Verdict::Pass;
    }
    let t = datagram::transport::<F>(pkt, &ip);
    match t.kind {
        Kind::Tcp if t.opens() => {}
        Kind::Udp if !is_from_tunnel(config, &t) => {}
        Kind::Query => {}
        _ => return Verdict::Pass,
    }
    // A local pod that sends with a spoofed address does not count as the outside, nor does a socket of the host. A pod
    // with its own address, which the gate has checked, opens a connection like any other host. A host's SYN counts: it
    // may come from a proxy that keeps its client's address, and the pod's own connections never use its record.
    let hosts = t.kind != Kind::Tcp && pkt.is_hosts();
    if (hosts || pkt.is_pods()) && F::endpoints().get_ptr(ip.src).is_none() {
        return Verdict::Pass;
    }
    let key = key::of_reply(&ip, &t);
    // A query and the pod's own query with the same identifier are independent of each other.
    if t.kind != Kind::Query && F::flows().get_ptr(&key).is_some() {
        return Verdict::Pass;
    }
    // A SYN makes a new record: the previous connection is over.
    if t.kind != Kind::Tcp
        && let Some(record) = F::inbound().get_ptr_mut(&key)
    {
        // SAFETY: single stores to fields that may lag by a packet.
        let record = unsafe { &mut *record };
        if record.generation == generation {
            touch(record);
            return Verdict::Pass;
        }
    }
    // Only if a reply could be mistaken for a policy's flow: the cluster's own traffic gets no records.
    if let Class::Policy(_, endpoint) = classify::classify(config, key.src, key.dst) {
        leave_alone::<F>(pkt, generation, &key, &endpoint, Opener::Outside, 0);
    }
    Verdict::Pass
}

/// The side that opened a connection that is left alone, as in [`Inbound::own`].
#[derive(Clone, Copy)]
#[repr(u16)]
pub enum Opener {
    Outside,
    Pod,
}

/// Records a connection that is left alone according to the tables of this generation. `flags` are
/// those of the pod's TCP segment, if the packet is one.
#[inline(always)]
pub fn leave_alone<F: Family>(
    pkt: &Packet,
    generation: u32,
    key: &FlowKey<F>,
    endpoint: &Endpoint,
    opener: Opener,
    flags: u8,
) {
    let now = now_tick();
    let (state, own) = (tcp::advance(0, flags), opener as u16);
    let record =
        Inbound { last_seen: now, created: now, generation, endpoint: endpoint.id, ifindex: pkt.ifindex(), state, own };
    trace::note(Step::Remembered, 0, 0);
    if F::inbound().insert(key, record, 0).is_ok() {
        stats::count(Counter::Untouched);
    }
}

#[inline(always)]
fn touch(record: &mut Inbound) {
    let now = now_tick();
    if record.last_seen != now {
        record.last_seen = now;
    }
}

/// The result of the search for the record of a pod's packet without a flow.
pub enum Known {
    /// There is no record.
    No,
    /// A record exists, made under other tables or at another interface: [`renew`] must check it first.
    Perhaps,
    /// A record was made or renewed under the present tables, at the interface that the gate has verified.
    LeftAlone,
}

/// Looks up the record of a pod's packet. `renewed`: [`renew`] has just checked the record,
/// whatever has become of the tables since. Removes a record that the packet does not continue.
#[inline(always)]
pub fn look<F: Family>(pkt: &Packet, config: &DatapathConfig, t: &L4Header, key: &FlowKey<F>, renewed: bool) -> Known {
    if t.kind == Kind::Query {
        return Known::No;
    }
    let Some(record) = F::inbound().get_ptr_mut(key) else { return Known::No };
    // SAFETY: as in `remember`.
    let record = unsafe { &mut *record };
    if !renewed && record.generation != config.generation || record.ifindex != pkt.ifindex() {
        return Known::Perhaps;
    }
    if goes_on::<F>(config, t, key, record) {
        return Known::LeftAlone;
    }
    let _ = F::inbound().remove(key);
    Known::No
}

/// Checks a packet whose record was made under other tables. Returns [`KEPT`] if the record belongs to the pod that now has the address
/// and the packet's present policy does not cut the connection (`existingConnections: Drop`); otherwise [`GONE`] or a verdict's bits.
///
/// Few packets come here, so it is a separate function, like [`recheck`].
#[inline(always)]
pub fn renew<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return GONE };
    let (ip, t) = match gate::packet::<F>(pkt, config) {
        Ok(headers) => headers,
        Err(counter) => return Verdict::Drop(counter).to_bits(),
    };
    let generation = recheck::generation(config);
    let Class::Policy(policy, endpoint) = classify::classify(config, ip.src, ip.dst) else { return GONE };
    let cuts = classify::policy::<F>(policy).is_some_and(|policy| policy.flags & policy_flags::EXISTING_DROP != 0);
    let key = key::of_pod(&ip, &t);
    let Some(record) = F::inbound().get_ptr_mut(&key) else { return GONE };
    // SAFETY: as in `remember`.
    let record = unsafe { &mut *record };
    if record.endpoint == endpoint.id && !(cuts && record.own != Opener::Outside as u16) {
        record.generation = generation;
        record.ifindex = pkt.ifindex();
        return KEPT;
    }
    let _ = F::inbound().remove(&key);
    GONE
}

/// Returns whether the packet continues the record's connection: it opens no connection of the pod's own, and the record
/// has not been idle for too long. Only the pod's segments are tracked; the other side is assumed to have sent an ACK.
#[inline(always)]
fn goes_on<F: Family>(config: &DatapathConfig, t: &L4Header, key: &FlowKey<F>, record: &mut Inbound) -> bool {
    if t.opens() {
        return false;
    }
    let [long, short, udp, icmp] = collect::idle_times(config);
    let limit = match key.proto {
        proto::TCP if tcp::established(record.state, tcp::seen::ACK) => long,
        proto::TCP => short,
        proto::UDP => udp,
        _ => icmp,
    };
    let idle = now_tick().wrapping_sub(record.last_seen) as i32;
    if idle > 0 && idle as u32 > limit {
        return false;
    }
    touch(record);
    if t.kind == Kind::Tcp {
        let state = tcp::advance(record.state, t.flags);
        if state & tcp::seen::RST != 0 {
            let _ = F::inbound().remove(key);
        } else if state != record.state {
            record.state = state;
        }
    }
    true
}

/// Returns whether the answer to a packet from outside would go to the tunnel's port. Unlike
/// answers to other inbound packets, it may not pass unchecked.
#[inline(always)]
fn is_from_tunnel(config: &DatapathConfig, t: &L4Header) -> bool {
    t.kind == Kind::Udp && u16::from_be(t.src_port) as u32 == config.tunnel_port
}

once! {
    renew(renew_v4, renew_v6) = renew();
}
