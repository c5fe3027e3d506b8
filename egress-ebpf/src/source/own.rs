//! Decides whether a packet for an address of the node itself, at a port in a leased block, belongs to a flow or to a socket
//! of the node. A listener may appear in a block that is already leased. The kernel's socket table decides; no state is kept.

use crate::{
    headers::{
        fields::{Kind, L4Header, Part, proto},
        note,
        packet::Packet,
        parse,
    },
    source::masquerade,
    tables::{datagram, family::Family},
};
use aya_ebpf::{
    bindings::bpf_sock,
    helpers::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
};
use egress_common::{abi::COPY_PRIORITY, flow::FlowKey, tcp::flag};

/// Not for the node, but for the lessee.
pub const FLOWS: u64 = 0;
/// A connection of the node.
pub const NODES: u64 = 1;
/// It may be for either: both get it, and the side that does not know it ignores it.
pub const EITHER_SIDE: u64 = 2;
/// It may be a datagram of a connection that the node masquerades: both get it, and a copy that
/// conntrack does not know does not reach the node's sockets.
pub const MASQUERADED: u64 = 3;

/// `BPF_F_CURRENT_NETNS`: the network namespace of the packet's interface.
const HERE: u64 = u64::MAX;
/// `TCP_ESTABLISHED` and `TCP_LISTEN` (include/net/tcp_states.h); a datagram socket with a peer is in the former.
const ESTABLISHED: u32 = 1;
const LISTEN: u32 = 10;

/// `struct bpf_sock_tuple`, in the packet's direction; ports in network byte order.
#[repr(C)]
struct Tuple<F> {
    src: F,
    dst: F,
    src_port: u16,
    dst_port: u16,
}

/// Returns the recipient of a packet: [`FLOWS`], [`NODES`], [`EITHER_SIDE`] or [`MASQUERADED`].
#[inline(always)]
pub fn whose<F: Family>(pkt: &Packet) -> u64 {
    let Ok(ip) = F::parse(pkt) else { return FLOWS };
    let t = datagram::transport::<F>(pkt, &ip);
    match t.kind {
        Kind::Tcp | Kind::Udp => {
            let tuple = Tuple { src: ip.src, dst: ip.dst, src_port: t.src_port, dst_port: t.dst_port };
            let opens = ip.part != Part::Later && t.flags & (flag::SYN | flag::ACK) == flag::SYN;
            of_node(pkt, tuple, ip.proto, opens, &t)
        }
        Kind::Error => match parse::embedded::<F, _>(pkt, ip.l4) {
            Some(inner) if inner.proto != F::ICMP => {
                let tuple =
                    Tuple { src: inner.dst, dst: inner.src, src_port: inner.dst_port, dst_port: inner.src_port };
                of_node(pkt, tuple, inner.proto, false, &t)
            }
            _ => EITHER_SIDE,
        },
        // The node's own echo requests may have any identifier.
        _ => EITHER_SIDE,
    }
}

/// Looks for the packet in the node's sockets, then in its masqueraded connections. `t`: the packet's own transport header.
#[inline(always)]
fn of_node<F: Family>(pkt: &Packet, tuple: Tuple<F>, protocol: u32, opens: bool, t: &L4Header) -> u64 {
    let key =
        FlowKey { src: tuple.dst, dst: tuple.src, src_port: tuple.dst_port, dst_port: tuple.src_port, proto: protocol };
    match of_socket(pkt, tuple, protocol, opens) {
        FLOWS => masquerade::whose::<F>(&key, t),
        whose => whose,
    }
}

/// Looks up the packet's socket. `opens`: the packet opens a connection, so it may be for a listener.
#[inline(always)]
fn of_socket<F: Family>(pkt: &Packet, tuple: Tuple<F>, protocol: u32, opens: bool) -> u64 {
    let mut tuple = tuple;
    let (tuple, len) = ((&raw mut tuple).cast(), size_of::<Tuple<F>>() as u32);
    if protocol == proto::TCP {
        // SAFETY: the tuple has the family's length, and a socket that is found is released.
        return match unsafe { state(bpf_skc_lookup_tcp(pkt.raw().cast(), tuple, len, HERE, 0)) } {
            None => FLOWS,
            Some(LISTEN) if !opens => FLOWS,
            Some(_) => NODES,
        };
    }
    // SAFETY: as above.
    match unsafe { state(bpf_sk_lookup_udp(pkt.raw().cast(), tuple, len, HERE, 0)) } {
        None => FLOWS,
        Some(ESTABLISHED) => NODES,
        Some(_) => EITHER_SIDE,
    }
}

/// Returns the state of a socket that a lookup found, and releases the socket.
///
/// # Safety
///
/// `sock` comes from a lookup and is not used afterwards.
#[inline(always)]
unsafe fn state(sock: *mut bpf_sock) -> Option<u32> {
    if sock.is_null() {
        return None;
    }
    // SAFETY: the lookup found it.
    let state = unsafe { (&raw const (*sock).state).read_volatile() };
    // SAFETY: the caller's promise.
    unsafe { bpf_sk_release(sock.cast()) };
    Some(state)
}

/// Gives a copy of the packet to the node's stack, on the interface where the packet arrived. The copy
/// reaches the same program again, which recognises it by `kind`, one of [`note::COPIES`], and lets it pass.
#[inline(always)]
pub fn copy(pkt: &Packet, kind: u32) {
    pkt.note(kind);
    pkt.enter_again();
    pkt.note(note::NONE);
}

/// Returns whether the packet is such a copy for the stack. Sets its priority, which the kernel clears when a packet enters again.
#[inline(always)]
pub fn is_copy(pkt: &Packet) -> bool {
    if pkt.take_note(note::COPY_TO_FORWARD) {
        pkt.set_priority(COPY_PRIORITY);
        return true;
    }
    pkt.take_note(note::COPY)
}

once! {
    whose(whose_v4, whose_v6) = whose();
}
