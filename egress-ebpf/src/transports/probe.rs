//! Probes: each travels exactly as a translated packet does, so that an answer proves that the transport works.

use crate::{
    headers::{
        fields::{Ip, Part, at, proto},
        packet::{ETH_LEN, IPV4, IPV6, Mac, Packet},
    },
    tables::{
        deadline::is_before,
        family::Family,
        maps::{KNOWN_LEASES, NODES, PROBES, REPLY_TRANSPORT},
        stats,
    },
    transports::{device, nodes},
};
use core::mem::offset_of;
use egress_common::{
    V4, V6, csum,
    egress::deadline,
    hash,
    probe::{MAGIC, PORT, Probe, ProbeAnswer, REPLY, REQUEST, SRC_MAC, VERSION, state},
    transport::clamp,
    verdict::{Counter, Verdict, purpose},
};

/// Source and destination port as they lie in a probe.
const PORTS: u32 = ((PORT as u32) << 16 | PORT as u32).to_be();
/// The source MAC address by which the agent marks a probe that is to be sent.
const MARK: Mac = device::words(SRC_MAC);

/// Handles a packet at the tunnel device's egress: sends a probe of the agent on, and lets any other packet pass. Returns a
/// verdict's bits, built at each end: the verifiers of old kernels also follow paths on which an enum's payload was never set.
#[inline(always)]
pub fn send<F: Family>(pkt: &Packet, ip: &Ip<F>) -> u64 {
    let Some(mac) = pkt.read::<Mac>(6) else { return Verdict::Pass.to_bits() };
    if (mac[0] ^ MARK[0]) | (mac[1] ^ MARK[1]) | (mac[2] ^ MARK[2]) != 0 {
        return Verdict::Pass.to_bits();
    }
    // The mark is not secret, and a packet that is not a probe would leave by the transport that it names.
    if ip.part != Part::Whole || ip.l4 != ETH_LEN + F::HEADER || !is::<F>(pkt) {
        return Verdict::Drop(Counter::DropForged).to_bits();
    }
    // Copied to the stack in one read: of several reads in the packet, LLVM keeps values that failed reads left unset.
    let Some(probe) = pkt.load::<Probe>(ETH_LEN + F::HEADER + at::UDP_LEN) else {
        return Verdict::Drop(Counter::DropMalformed).to_bits();
    };
    // SAFETY: sixteen bytes either way.
    let remote: V6 = unsafe { core::mem::transmute(probe.remote) };
    let Some(index) = nodes::node_of(&remote) else {
        return Verdict::Drop(Counter::DropNoOwner).to_bits();
    };
    // Each probe takes another of the paths that a flow may take.
    let [.., a, b, c, d] = probe.seq;
    let entropy = hash::scatter(u32::from_be_bytes([a, b, c, d]));
    Verdict::send(purpose::PROBE + (probe.transport & 3) as u32, index, entropy).to_bits()
}

/// Returns whether the packet is a probe: no flow has its ports.
#[inline(always)]
pub fn is<F: Family>(pkt: &Packet) -> bool {
    let ports = ETH_LEN + F::HEADER;
    // Ports, length and checksum, then the beginning of a probe.
    let Some([both, _, magic]) = pkt.read_header::<[u32; 3]>(ports) else { return false };
    let udp = pkt.read::<u8>(ETH_LEN + F::PROTOCOL) == Some(proto::UDP as u8);
    let version = pkt.read::<u8>(ports + 12) == Some(VERSION);
    udp && both == PORTS && magic == u32::from_ne_bytes(MAGIC) && version
}

/// Handles a probe from node number `index`: returns a request, passes a reply to the agent. The result is a verdict's bits.
#[inline(never)]
pub fn receive(pkt: &Packet, index: u32) -> u64 {
    match pkt.protocol() {
        IPV4 => received::<V4>(pkt, index).to_bits(),
        IPV6 => received::<V6>(pkt, index).to_bits(),
        _ => Verdict::Drop(Counter::DropStranger).to_bits(),
    }
}

#[inline(always)]
fn received<F: Family>(pkt: &Packet, index: u32) -> Verdict {
    let payload = ETH_LEN + F::HEADER + at::UDP_LEN;
    if !is::<F>(pkt) {
        return Verdict::Drop(Counter::DropStranger);
    }
    match pkt.read::<u8>(payload + offset_of!(Probe, kind) as u32) {
        Some(REQUEST) => answer::<F>(pkt, index),
        Some(REPLY) => pass_to_agent::<F>(pkt, index),
        _ => Verdict::Drop(Counter::DropStranger),
    }
}

#[inline(always)]
fn answer<F: Family>(pkt: &Packet, index: u32) -> Verdict {
    let payload = ETH_LEN + F::HEADER + at::UDP_LEN;
    let Some(node) = NODES.get(index) else { return Verdict::Drop(Counter::DropStranger) };
    let Some([kind, transport, reply_transport]) = pkt.read::<[u8; 3]>(payload + offset_of!(Probe, kind) as u32) else {
        return Verdict::Drop(Counter::DropMalformed);
    };
    if let Some(noted) = REPLY_TRANSPORT.get_ptr_mut(index)
        // SAFETY: a word that is read and written as a whole.
        && unsafe { *noted } != reply_transport as u32
    {
        // SAFETY: as above.
        unsafe { *noted = reply_transport as u32 };
    }
    let by = clamp(transport as u32, node.may);
    let leases = KNOWN_LEASES.get(index).copied().unwrap_or(0);
    if turn_around::<F>(pkt, payload, kind, [transport, reply_transport], (by as u8, leases)).is_none() {
        return Verdict::Drop(Counter::DropMalformed);
    }
    stats::count(Counter::ProbeAnswered);
    Verdict::send(purpose::PROBE + by, index, 0)
}

/// Swaps the addresses, which leaves all checksums valid (the ports are the same), and turns the request into a reply.
#[inline(always)]
fn turn_around<F: Family>(
    pkt: &Packet,
    payload: u32,
    kind: u8,
    [transport, reply_transport]: [u8; 2],
    (by, leases): (u8, u64),
) -> Option<()> {
    let (at, size) = (ETH_LEN + F::SRC, size_of::<F>() as u32);
    let (src, dst) = (F::load(pkt, at)?, F::load(pkt, at + size)?);
    dst.store(pkt, at)?;
    src.store(pkt, at + size)?;
    let check = pkt.read::<u16>(payload - 2)?;
    let pair = |a: u8, b: u8| u16::from_ne_bytes([a, b]);
    let check = csum::update16(check, pair(VERSION, kind), pair(VERSION, REPLY));
    let check = csum::update16(check, pair(transport, reply_transport), pair(transport, by));
    let held = if is_before(deadline::LEASE) { state::HELD } else { 0 };
    let state = if is_before(deadline::ABLE) { held } else { held | state::UNABLE };
    let check = csum::update16(check, pair(0, 0), pair(state, 0));
    let leases = [(leases >> 32) as u32, leases as u32].map(u32::to_be);
    let check = csum::update32(csum::update32(check, 0, leases[0]), 0, leases[1]);
    pkt.write(payload - 2, if check == 0 { 0xffff } else { check })?;
    pkt.write(payload + offset_of!(Probe, kind) as u32, REPLY)?;
    pkt.write(payload + offset_of!(Probe, state) as u32, state)?;
    pkt.write(payload + offset_of!(Probe, leases) as u32, leases)?;
    pkt.write(payload + offset_of!(Probe, reply_transport) as u32, by)
}

#[inline(always)]
fn pass_to_agent<F: Family>(pkt: &Packet, index: u32) -> Verdict {
    let Some(probe) = pkt.load::<Probe>(ETH_LEN + F::HEADER + at::UDP_LEN) else {
        return Verdict::Drop(Counter::DropMalformed);
    };
    let answer = ProbeAnswer { probe, node: index, family: F::VERSION };
    // A full buffer means that no agent reads it: the probe counts as lost.
    let _ = PROBES.output(&answer, 0);
    Verdict::Drop(Counter::ProbeReturned)
}
