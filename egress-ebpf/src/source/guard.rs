//! The exit, where packets leave the node: a flow's packets that the host let pass are translated here and
//! confirm the flow; packets that must not leave are dropped, whatever their origin and their path to here.
//!
//! Packets of our own programs have a note and do not get this far (`exit_egress`).

use crate::{
    flows::{key, recheck, table},
    headers::{
        fields::{Ip, Kind, L4Header, Part, proto},
        frame::TAG_LEN,
        note,
        packet::{ETH_LEN, IPV4, IPV6, Packet, SERVICE_VLAN, VLAN},
    },
    source::{icmp, masquerade, service, translated},
    tables::{
        classify::{self, Class},
        datagram, egress,
        family::Family,
        maps::{CONFIG, EGRESS_IPS, UPLINKS},
        stats,
        trace::{self, Step},
    },
    transports::probe,
};
use egress_common::{
    V4, V6,
    config::{self, DatapathConfig},
    egress::flags,
    flow::kind,
    tcp,
    verdict::{Counter, Verdict},
};

/// Result of [`caught`] for a flow that must be checked first: no verdict has these bits.
const CHECK: u64 = u64::MAX;

/// ICMPv6 types of neighbor discovery (RFC 4861, section 4).
const DISCOVERY: core::ops::RangeInclusive<u8> = 133..=137;

/// Handles a leaving packet that none of our programs has sent. Returns a verdict's bits.
///
/// A packet that this host itself created is not a pod's: it is checked only for a forged source and the tunnel's port.
#[inline(always)]
pub fn leaving<F: Family>(pkt: &Packet) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    let Ok(ip) = F::parse(pkt) else {
        // Unreadable headers may hide a UDP header with the tunnel's port. Traffic that this node routes for others may have such headers.
        let ours = !is_from_uplink(pkt) || once::selected::<F>(pkt) != 0 || once::has_egress_ip::<F>(pkt) != 0;
        return if ours { Verdict::Drop(Counter::DropMalformed) } else { Verdict::Pass }.to_bits();
    };
    let forwarded = pkt.ingress_ifindex() != 0;
    if forwarded && let Some(class) = pkt.noted_class() {
        let verdict = service::once::leaving::<F>(pkt, class);
        if verdict != Verdict::Pass.to_bits() {
            return verdict;
        }
    }
    if pkt.is_noted(note::ASKED) || forwarded && !pkt.is_noted(note::FREE) && once::selected::<F>(pkt) != 0 {
        // The tables may have changed since `pod_egress` checked the flow.
        let verdict = match once::caught::<F>(pkt, 0) {
            CHECK if recheck::once::recheck::<F>(pkt, 1) == recheck::KEPT => once::caught::<F>(pkt, 1),
            verdict => verdict,
        };
        if verdict == CHECK {
            return Verdict::Drop(Counter::DropSevered).to_bits();
        }
        if verdict != Verdict::Pass.to_bits() {
            return verdict;
        }
        if ip.part == Part::First {
            once::keep::<F>(pkt);
        }
    }
    if pkt.ifindex() == config.tunnel_ifindex {
        // The agent's probes are sent from here; the device drops packets without a tunnel key.
        return probe::send::<F>(pkt, &ip);
    }
    if is_tunnelled::<F>(pkt, config, &ip) {
        return Verdict::Drop(Counter::DropTunnelPort).to_bits();
    }
    // The lookup is not a subprogram: a call costs a third of the guard's cost for unrelated packets.
    match egress::find(ip.src) {
        Some((index, _)) => once::as_egress_ip::<F>(pkt, index),
        None => Verdict::Pass.to_bits(),
    }
}

/// Handles a leaving frame with one or two VLAN tags among its bytes. Packet sockets create such frames, and so do VLAN
/// devices without `reorder_hdr` over cards that do not tag: no flow's packet leaves like that. Returns a verdict's bits.
#[inline(always)]
pub fn tagged(pkt: &Packet) -> u64 {
    const TAG: u32 = TAG_LEN as u32;
    let (tags, protocol) = match pkt.ethertype(TAG) {
        VLAN | SERVICE_VLAN => (2 * TAG, pkt.ethertype(2 * TAG)),
        protocol => (TAG, protocol),
    };
    match protocol {
        IPV4 => once::behind_tags::<V4>(pkt, ETH_LEN + tags),
        IPV6 => once::behind_tags::<V6>(pkt, ETH_LEN + tags),
        _ => Verdict::Pass.to_bits(),
    }
}

/// Handles the IP packet at `l3` of such a frame. Returns a verdict's bits.
#[inline(always)]
pub fn behind_tags<F: Family>(pkt: &Packet, l3: u32) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    let Some(ip) = F::embedded(pkt, l3) else {
        return if is_from_uplink(pkt) { Verdict::Pass } else { Verdict::Drop(Counter::DropMalformed) }.to_bits();
    };
    let verdict = if pkt.is_noted(note::ASKED) {
        Verdict::Drop(Counter::DropUnguarded)
    } else if is_tunnelled::<F>(pkt, config, &ip) {
        Verdict::Drop(Counter::DropTunnelPort)
    } else if let Some((index, _)) = egress::find(ip.src)
        && is_forged(pkt, &ip, index, pkt.ingress_ifindex() != 0)
    {
        Verdict::Drop(Counter::DropForged)
    } else {
        Verdict::Pass
    };
    verdict.to_bits()
}

/// Returns 1 if policies select the pod with the packet's source address, else 0.
#[inline(always)]
pub fn selected<F: Family>(pkt: &Packet) -> u64 {
    F::load(pkt, ETH_LEN + F::SRC).is_some_and(classify::is_selected::<F>) as u64
}

/// Returns 1 if the packet's source address is an egress IP, else 0.
#[inline(always)]
pub fn has_egress_ip<F: Family>(pkt: &Packet) -> u64 {
    F::load(pkt, ETH_LEN + F::SRC).is_some_and(|src| egress::find(src).is_some()) as u64
}

/// Handles a packet from an egress IP, given by its index, that none of our programs has sent. Returns a verdict's bits.
#[inline(always)]
pub fn as_egress_ip<F: Family>(pkt: &Packet, index: u32) -> u64 {
    let Ok(ip) = F::parse(pkt) else { return Verdict::Drop(Counter::DropMalformed).to_bits() };
    let forwarded = pkt.ingress_ifindex() != 0;
    if is_forged(pkt, &ip, index, forwarded) {
        return Verdict::Drop(Counter::DropForged).to_bits();
    }
    if forwarded {
        masquerade::once::remember::<F>(pkt, index);
    }
    Verdict::Pass.to_bits()
}

/// Returns whether a packet with an egress IP as its source comes from a sender that may not use it.
#[inline(always)]
fn is_forged<F: Family>(pkt: &Packet, ip: &Ip<F>, egress: u32, forwarded: bool) -> bool {
    let flags = EGRESS_IPS.get(egress).map_or(0, |e| e.flags);
    // This node's sockets may use its own address; packets from another node's address may pass through this node as a router.
    let nodes = flags & flags::HERE != 0 || forwarded && flags & flags::NODE_ADDRESS != 0;
    // The agent and the programs announce an egress IP, and ask for its next hop: such packets are never routed.
    let discovery = F::VERSION == 6
        && ip.proto == proto::ICMPV6
        && ip.hop_limit == 255
        && pkt.read_l4::<u8>(F::HEADER, ip.l4, 0).is_some_and(|kind| DISCOVERY.contains(&kind));
    !nodes && !discovery
}

/// Returns whether this is UDP to the tunnel's port, except if it was forwarded from outside: that may be other nodes' traffic.
#[inline(always)]
fn is_tunnelled<F: Family>(pkt: &Packet, config: &DatapathConfig, ip: &Ip<F>) -> bool {
    if ip.proto != proto::UDP || ip.part == Part::Later || config.tunnel_port == 0 {
        return false;
    }
    let Some([_, to]) = pkt.read_l4::<[u16; 2]>(F::HEADER, ip.l4, 0) else { return false };
    u16::from_be(to) as u32 == config.tunnel_port && !is_from_uplink(pkt)
}

/// Returns whether the packet came from outside the node.
#[inline(always)]
fn is_from_uplink(pkt: &Packet) -> bool {
    // SAFETY: read only.
    unsafe { UPLINKS.get(pkt.ingress_ifindex()) }.is_some()
}

/// Handles a packet that may be a selected pod's: a packet of a translated flow is sent, whatever happened to its
/// marks on the path to here. Returns a verdict's bits, or [`CHECK`]. `checked` is 1 if the flow was just checked.
#[inline(always)]
pub fn caught<F: Family>(pkt: &Packet, checked: u32) -> u64 {
    let Some(config) = CONFIG.get(0) else { return Verdict::Pass.to_bits() };
    let Ok(ip) = F::parse(pkt) else { return Verdict::Drop(Counter::DropMalformed).to_bits() };
    let t = datagram::transport::<F>(pkt, &ip).hidden(pkt.len());
    let key = key::of_pod(&ip, &t);
    if matches!(t.kind, Kind::Tcp | Kind::Udp | Kind::Query)
        && let Some(flow) = F::flows().get_ptr_mut(&key)
    {
        // SAFETY: flows are changed in place only by single stores to fields that may lag by a packet.
        let flow = unsafe { &mut *flow };
        if checked == 0 && !recheck::is_current(config, flow) {
            return CHECK;
        }
        if flow.kind != kind::TRANSLATED {
            return Verdict::Drop(Counter::DropSevered).to_bits();
        }
        let Some(taken) = table::taken(&key, flow) else { return Verdict::Drop(Counter::DropUnknownFlow).to_bits() };
        if taken.pending != 0 {
            trace::note(Step::Confirmed, 0, 0);
            table::confirm::<F>(&key, flow);
            stats::count(Counter::FirewallPassed);
        }
        if ip.part == Part::First {
            datagram::keep(&ip, &t);
        }
        pkt.clear_marks();
        // Routing has already decremented the hop limit.
        return translated::send::<F>(pkt, config, &ip, &t, &taken, false).to_bits();
    }
    // A query of the pod's own never belongs to a record of an inbound one.
    let left_alone = t.kind != Kind::Query && F::inbound().get_ptr(&key).is_some();
    if left_alone { Verdict::Pass } else { unguarded::<F>(pkt, config, &ip, &t) }.to_bits()
}

/// Keeps the ports of a first fragment that is left alone. It is not in [`caught`], where the verifier would follow each path through it.
#[inline(always)]
pub fn keep<F: Family>(pkt: &Packet) -> u64 {
    let Ok(ip) = F::parse(pkt) else { return 0 };
    let t = datagram::transport::<F>(pkt, &ip).hidden(pkt.len());
    if t.has_ports() {
        datagram::keep(&ip, &t);
    }
    0
}

/// Handles a packet without a flow. Lets the same packets of a policy pass that `pod_egress` leaves alone.
#[inline(always)]
fn unguarded<F: Family>(pkt: &Packet, config: &DatapathConfig, ip: &Ip<F>, t: &L4Header) -> Verdict {
    if pkt.is_noted(note::ASKED) {
        let orphan = t.kind == Kind::Orphan;
        return Verdict::Drop(if orphan { Counter::DropFragment } else { Counter::DropNotAsked });
    }
    let Class::Policy(index, _) = classify::classify(config, ip.src, ip.dst) else { return Verdict::Pass };
    match t.kind {
        Kind::Answer if config.flags & config::flags::UNSEEN_INBOUND != 0 => Verdict::Pass,
        // The record of an inbound connection ends with the pod's reset.
        Kind::Tcp if t.flags & tcp::flag::RST != 0 && pkt.is_noted(note::POD) => Verdict::Pass,
        Kind::Error if icmp::is_untouched::<F>(pkt, ip) => Verdict::Pass,
        _ if classify::leaves_as_node::<F>(index) => Verdict::Pass,
        _ => Verdict::Drop(Counter::DropUnguarded),
    }
}

once! {
    selected(selected_v4, selected_v6) = selected();
    has_egress_ip(has_egress_ip_v4, has_egress_ip_v6) = has_egress_ip();
    as_egress_ip(as_egress_ip_v4, as_egress_ip_v6) = as_egress_ip(index: u32);
    caught(caught_v4, caught_v6) = caught(checked: u32);
    keep(keep_v4, keep_v6) = keep();
    behind_tags(behind_tags_v4, behind_tags_v6) = behind_tags(l3: u32);
}
