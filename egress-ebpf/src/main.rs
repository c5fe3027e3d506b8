//! Spillway's eBPF programs: the entry points, and the only place that knows the kernel's verdict codes.
//!
//! docs/design.md, "Packet paths", and ARCHITECTURE.md describe a packet's path. Each entry point parses nothing itself: it picks the
//! address family and turns a [`Verdict`] into a code and a counter.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]
#![expect(missing_docs, reason = "the classifier macro makes public functions without docs")]
#![allow(
    clippy::needless_borrows_for_generic_args,
    reason = "a key passed by value is copied to the stack once more, of which there are 512 bytes"
)]

#[macro_use]
mod once;
// Layers from the lowest up: headers, tables, flows, translation, transports, source, gateway.
mod flows;
mod gateway;
mod headers;
mod source;
mod tables;
mod translation;
mod transports;

use crate::{
    flows::{collect, inbound},
    gateway::{forward, native, neighbor, shaped, tunnelled, underlay},
    headers::{
        note,
        packet::{ARP, IPV4, IPV6, Packet, SERVICE_VLAN, VLAN},
    },
    source::{guard, steer},
    tables::{
        gate, maps, stats,
        trace::{self, Step},
    },
    transports::{exit, probe, send, vxlan},
};
use aya_ebpf::{
    bindings::xdp_action,
    macros::{classifier, xdp},
    programs::{TcContext, XdpContext},
};
use egress_common::{
    V4, V6,
    config::flags,
    trace::hook,
    verdict::{Counter, Verdict, bits},
};

/// Go on with the next program at the hook, then with the stack (`TCX_NEXT`, `TC_ACT_UNSPEC`).
const NEXT: i32 = -1;
/// Drop (`TC_ACT_SHOT`).
const SHOT: i32 = 2;
/// A redirect was prepared (`TC_ACT_REDIRECT`).
const REDIRECT: i32 = 7;

#[inline(always)]
fn finish(pkt: &Packet, verdict: Verdict) -> i32 {
    settle(pkt, verdict.to_bits())
}

/// Carries out a verdict, given in bits, and returns the kernel's code for it.
#[inline(always)]
fn settle(pkt: &Packet, verdict: u64) -> i32 {
    let verdict = match verdict >> 32 {
        bits::PROBE => probe::receive(pkt, verdict as u32),
        _ => verdict,
    };
    let verdict = match verdict >> 32 {
        bits::LEAVE => {
            trace::note(Step::Leaves, verdict as u32, 0);
            exit::leave(pkt.raw(), verdict as u32)
        }
        tag @ bits::SEND.. => {
            let purpose = (tag - bits::SEND) as u32;
            trace::note(Step::ToNode, verdict as u32 & 0xffff, purpose);
            send::send_to_node(pkt.raw(), verdict as u32, purpose)
        }
        _ => verdict,
    };
    trace::end(pkt, verdict);
    code(verdict)
}

#[inline(always)]
fn code(verdict: u64) -> i32 {
    match (verdict >> 32, verdict as u32 as i32) {
        (bits::PASS, _) => NEXT,
        (bits::DROP, counter) => {
            stats::count_index(counter as u32);
            SHOT
        }
        (_, REDIRECT) => REDIRECT,
        _ => {
            stats::count(Counter::DropRedirect);
            SHOT
        }
    }
}

/// Ingress of a pod's host-side interface: classify, find or create the flow, translate, send.
#[classifier]
pub fn pod_egress(ctx: TcContext) -> i32 {
    let pkt = Packet::new(&ctx);
    trace::begin(&pkt, hook::FROM_POD);
    let verdict = match (gate::frame(&pkt), pkt.protocol()) {
        (Err(counter), _) => Verdict::Drop(counter).to_bits(),
        (_, IPV4) => steer::steer::<V4>(&pkt),
        (_, IPV6) => steer::steer::<V6>(&pkt),
        _ => Verdict::Pass.to_bits(),
    };
    if verdict >> 32 == bits::DROP {
        steer::count_refused(pkt.raw(), verdict as u32);
    }
    let code = settle(&pkt, verdict);
    if code == NEXT && matches!(maps::CONFIG.get(0), Some(config) if config.flags & flags::HOLD != 0) {
        pkt.note_seen();
    }
    code
}

/// Egress of a pod's host-side interface: records what the outside opened, so that the pod's replies are left alone.
#[classifier]
pub fn pod_ingress(ctx: TcContext) -> i32 {
    let pkt = Packet::new(&ctx);
    trace::begin(&pkt, hook::TO_POD);
    let verdict = match pkt.protocol() {
        IPV4 => inbound::remember::<V4>(&pkt),
        IPV6 => inbound::remember::<V6>(&pkt),
        _ => Verdict::Pass,
    };
    finish(&pkt, verdict)
}

/// Ingress of the tunnel device: a gateway forwards, a source node delivers, probes are answered.
#[classifier]
pub fn tunnel_ingress(ctx: TcContext) -> i32 {
    let pkt = Packet::new(&ctx);
    trace::begin(&pkt, hook::TUNNEL);
    pkt.came_in();
    settle(&pkt, tunnelled::receive(&pkt))
}

/// Egress of every Ethernet interface that leads out of the node, and of the tunnel device: translates the packets that the
/// host's routes and filters let pass, and is the last guard.
#[classifier]
pub fn exit_egress(ctx: TcContext) -> i32 {
    let pkt = Packet::new(&ctx);
    if pkt.is_noted(note::SENT) {
        return NEXT;
    }
    trace::begin(&pkt, hook::EXIT);
    // `skb->protocol` is whatever the frame's sender claimed.
    let verdict = match pkt.ethertype(0) {
        IPV4 => guard::leaving::<V4>(&pkt),
        IPV6 => guard::leaving::<V6>(&pkt),
        VLAN | SERVICE_VLAN => guard::tagged(&pkt),
        _ => return NEXT,
    };
    settle(&pkt, verdict)
}

/// Ingress of the interfaces that carry egress IPs: replies, ARP and NDP.
#[classifier]
pub fn uplink_ingress(ctx: TcContext) -> i32 {
    let pkt = Packet::new(&ctx);
    pkt.came_in();
    if pkt.is_for_other_host() {
        return NEXT;
    }
    trace::begin(&pkt, hook::UPLINK);
    let verdict = match pkt.protocol() {
        IPV4 => forward::reply::<V4>(&pkt),
        IPV6 => forward::reply::<V6>(&pkt),
        ARP => neighbor::arp(&pkt),
        _ => Verdict::Pass.to_bits(),
    };
    settle(&pkt, verdict)
}

/// Ingress of the underlay's interfaces, which may be uplinks as well: does the work of
/// `tunnel_ingress`, without the device, and of `uplink_ingress`.
#[classifier]
pub fn underlay_ingress(ctx: TcContext) -> i32 {
    let pkt = Packet::new(&ctx);
    pkt.came_in();
    if pkt.is_for_other_host() {
        return NEXT;
    }
    trace::begin(&pkt, hook::UNDERLAY);
    let verdict = match pkt.protocol() {
        IPV4 => underlay::receive::<V4>(&pkt),
        IPV6 => underlay::receive::<V6>(&pkt),
        ARP => neighbor::arp(&pkt),
        _ => Verdict::Pass.to_bits(),
    };
    settle(&pkt, verdict)
}

/// At the driver of a gateway's underlay: the common case of `underlay_ingress`. Frames in several pieces are passed on.
///
/// Inlined: otherwise LLVM makes the program a call to a function that is too large for it to inline.
#[xdp(frags)]
#[inline(always)]
pub fn underlay_xdp(ctx: XdpContext) -> u32 {
    let pkt = Packet::of_frame(&ctx);
    action(native::from_nodes(&pkt))
}

/// At the driver of a gateway's uplinks: the common case of `uplink_ingress`. Inlined like [`underlay_xdp`].
#[xdp(frags)]
#[inline(always)]
pub fn uplink_xdp(ctx: XdpContext) -> u32 {
    let pkt = Packet::of_frame(&ctx);
    action(native::from_outside(&pkt))
}

#[inline(always)]
fn action(verdict: Verdict) -> u32 {
    match verdict {
        Verdict::Taken(action) => action as u32,
        Verdict::Drop(counter) => {
            stats::count(counter);
            xdp_action::XDP_DROP
        }
        _ => xdp_action::XDP_PASS,
    }
}

/// The agent runs it once (`BPF_PROG_TEST_RUN`) with a frame of zeros, to learn whether the kernel
/// accepts the flag that removes the outer header of merged packets.
#[classifier]
pub fn try_decapsulation(ctx: TcContext) -> i32 {
    Packet::new(&ctx).adjust_room(-4, vxlan::DECAP_L4_UDP) as i32
}

/// Ingress of the shaper's far end: sends packets of limited egress IPs on.
#[classifier]
pub fn shaper_ingress(ctx: TcContext) -> i32 {
    let pkt = Packet::new(&ctx);
    trace::begin(&pkt, hook::SHAPER);
    settle(&pkt, shaped::receive(&pkt))
}

/// The agent runs it once (`BPF_PROG_TEST_RUN`) before any other program: it sets their clock and
/// arms the collector's timer, which needs no agent from then on.
#[classifier]
pub fn start_collector(_ctx: TcContext) -> i32 {
    collect::start()
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    // SAFETY: never reached; the verifier would refuse a program in which it could be.
    unsafe { core::hint::unreachable_unchecked() }
}

/// The kernel gives GPL-only helpers to programs that declare this licence.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
