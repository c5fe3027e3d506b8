//! Small eBPF programs at an interface's hooks, like those that other software on a node attaches. TCX needs Linux 6.6.
//!
//! They are written as instructions and loaded by raw system calls, so that the lab needs no compiler and no library.

use std::ffi::CString;
use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

use crate::bpf::code::{
    ADD, Attr, CONTEXT, EXIT, FP, JUMP_IF_NOT, JUMP_IF_NOT_WORD, MOVE_WORD, call, copy, instruction, load, load_as,
    load_word, mov, store,
};
use crate::netns::NetNs;

/// The direction of an interface's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Incoming packets.
    Ingress,
    /// Outgoing packets.
    Egress,
}

/// The action of a program on every packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookAction {
    /// Leaves it to the next program (`TCX_NEXT`).
    Next,
    /// Ends the chain: the packet passes, and no later program sees it (`TCX_PASS`).
    End,
    /// Delivers it to the namespace at the other end of the veth with this index (`bpf_redirect_peer`).
    ToPeer(u32),
    /// Sends IP packets for global addresses out of the interface with this index, by the routing table
    /// (`bpf_redirect_neigh`), like a CNI that routes by itself; leaves other packets to the next program.
    ToNeighbour(u32),
    /// Drops it (`TCX_DROP`).
    Drop,
    /// Replaces the source of IPv4 packets from the first address with the second one, and leaves all packets to the next program.
    Masquerade(Ipv4Addr, Ipv4Addr),
}

/// A position among the programs at a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainPosition {
    /// Before all existing programs.
    First,
    /// After all existing programs.
    Last,
}

/// The mechanism by which a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// A TCX link.
    Tcx,
    /// A filter of a clsact qdisc. The qdisc is created if it does not exist, and stays. TCX programs see packets before every filter.
    Clsact,
}

impl Means {
    /// Both mechanisms.
    pub const BOTH: [Means; 2] = [Means::Tcx, Means::Clsact];
}

/// An attached program, detached when this is dropped.
#[derive(Debug)]
pub enum Hooked {
    /// A link.
    Link(OwnedFd),
    /// A filter.
    Filter(Filter),
}

/// A filter of a clsact qdisc, removed when this is dropped.
#[derive(Debug)]
pub struct Filter {
    ns: NetNs,
    /// Its name for `tc filter`: interface, side, priority and handle.
    name: String,
}

impl Drop for Filter {
    fn drop(&mut self) {
        // The interface, or its namespace, may be gone.
        self.ns.sh(&format!("tc filter del {} bpf", self.name)).ok();
    }
}

const IF_EQUAL: u8 = 0x15;
const LOAD_BYTE: u8 = 0x71;
/// Numbers of BPF helpers.
const STORE_BYTES: i32 = 9;
const L3_CHECKSUM: i32 = 10;
const L4_CHECKSUM: i32 = 11;
const LOAD_BYTES: i32 = 26;
const REDIRECT_NEIGHBOUR: i32 = 152;
const REDIRECT_PEER: i32 = 155;
/// The offset of `protocol` in `struct __sk_buff`, and its values.
const PROTOCOL: i16 = 16;
const IPV4: i32 = 0x0800_u16.to_be() as i32;
const IPV6: i32 = 0x86dd_u16.to_be() as i32;
/// `BPF_F_PSEUDO_HDR`.
const PSEUDO_HEADER: i32 = 1 << 4;
/// Commands of bpf(2).
const OBJ_PIN: u32 = 6;
const LINK_CREATE: u32 = 28;
/// Attach types, and the type of an XDP program.
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
const XDP: u32 = 37;
const XDP_PROGRAM: u32 = 6;
/// `XDP_PASS`.
const XDP_PASS: i32 = 2;
/// `XDP_FLAGS_SKB_MODE`, which every device supports.
const GENERIC: u32 = 1 << 1;
const BEFORE: u32 = 1 << 3;
const AFTER: u32 = 1 << 4;

/// Attaches a program that performs `action`, before all existing programs.
pub fn hook(ns: &NetNs, interface: &str, side: Side, action: HookAction) -> Result<Hooked> {
    hook_at(ns, interface, side, action, ChainPosition::First)
}

/// Attaches a program that performs `action`, by this mechanism.
pub fn hook_by(
    means: Means,
    ns: &NetNs,
    interface: &str,
    side: Side,
    action: HookAction,
    position: ChainPosition,
) -> Result<Hooked> {
    match means {
        Means::Tcx => hook_at(ns, interface, side, action, position),
        Means::Clsact => Ok(Hooked::Filter(filter_at(ns, interface, side, action, position)?)),
    }
}

/// Attaches a program that performs `action` as a filter. The newest filter of priority 1 runs first.
fn filter_at(ns: &NetNs, interface: &str, side: Side, action: HookAction, position: ChainPosition) -> Result<Filter> {
    static HANDLE: AtomicU32 = AtomicU32::new(1);
    let program = program(action)?;
    let handle = HANDLE.fetch_add(1, Ordering::Relaxed);
    let side = if side == Side::Ingress { "ingress" } else { "egress" };
    let priority = if position == ChainPosition::First { 1 } else { 50_000 };
    let name = format!("dev {interface} {side} prio {priority} handle {handle:#x} protocol all");
    // `tc` takes a program by the path of its pin.
    let pin = format!("{}/lab-hook-{}-{handle}", crate::scope::BPFFS, std::process::id());
    let path = CString::new(pin.clone())?;
    let mut attr = Attr::default();
    attr.u64(0, path.as_ptr() as u64);
    attr.u32(8, program.as_raw_fd().cast_unsigned());
    attr.call(OBJ_PIN).with_context(|| format!("cannot pin {pin}"))?;
    let added = ns.sh(&format!(
        "tc qdisc show dev {interface} | grep -q clsact || tc qdisc add dev {interface} clsact
         tc filter add {name} bpf direct-action object-pinned {pin}"
    ));
    fs::remove_file(&pin).with_context(|| format!("cannot remove {pin}"))?;
    added.with_context(|| format!("cannot add a filter to {interface}"))?;
    Ok(Filter { ns: ns.clone(), name })
}

/// Attaches a program that performs `action`, by a TCX link.
pub fn hook_at(ns: &NetNs, interface: &str, side: Side, action: HookAction, position: ChainPosition) -> Result<Hooked> {
    let attach = if side == Side::Ingress { TCX_INGRESS } else { TCX_EGRESS };
    link(ns, interface, &program(action)?, attach, if position == ChainPosition::First { BEFORE } else { AFTER })
}

/// Attaches an XDP program that passes every packet.
pub fn hook_xdp(ns: &NetNs, interface: &str) -> Result<Hooked> {
    link(ns, interface, &load_as(XDP_PROGRAM, &[mov(0, XDP_PASS), EXIT])?, XDP, GENERIC)
}

fn link(ns: &NetNs, interface: &str, program: &OwnedFd, attach: u32, flags: u32) -> Result<Hooked> {
    let words = [program.as_raw_fd().cast_unsigned(), ns.ifindex(interface)?, attach, flags];
    let mut attr = Attr::default();
    words.into_iter().zip((0..).step_by(4)).for_each(|(word, at)| attr.u32(at, word));
    ns.run(|| Ok(Hooked::Link(attr.call_fd(LINK_CREATE)?))).with_context(|| format!("cannot hook {interface}"))
}

fn program(action: HookAction) -> Result<OwnedFd> {
    load(&match action {
        HookAction::Next => NEXT.to_vec(),
        HookAction::End => vec![mov(0, 0), EXIT],
        HookAction::ToPeer(index) => vec![mov(1, index.cast_signed()), mov(2, 0), call(REDIRECT_PEER), EXIT],
        HookAction::ToNeighbour(index) => to_neighbour(index),
        HookAction::Drop => vec![mov(0, 2), EXIT],
        HookAction::Masquerade(from, to) => masquerade(from, to),
    })
}

/// Returns code that loads bytes of the frame to the top of the stack; expects the context in [`CONTEXT`].
fn load_bytes(offset: i32, length: i32) -> Vec<u64> {
    let to = [copy(3, FP), instruction(ADD, 3, 0, 0, -8)];
    [&[copy(1, CONTEXT), mov(2, offset)], &to[..], &[mov(4, length), call(LOAD_BYTES)]].concat()
}

/// Returns code that puts the context into [`CONTEXT`] and the EtherType into register 2.
fn prologue() -> Vec<u64> {
    vec![copy(CONTEXT, 1), load_word(2, 1, PROTOCOL)]
}

const NEXT: [u64; 2] = [mov(0, -1), EXIT];

fn to_neighbour(index: u32) -> Vec<u64> {
    let redirect = [mov(1, index.cast_signed()), mov(2, 0), mov(3, 0), mov(4, 0), call(REDIRECT_NEIGHBOUR), EXIT];
    // The first byte of an IPv6 destination. The lab's global addresses begin with 2001.
    let mut global = load_bytes(38, 1);
    global.push(instruction(LOAD_BYTE, 2, FP, -8, 0));
    global.push(instruction(JUMP_IF_NOT, 2, 0, redirect.len() as i16, 0x20));
    let mut code = prologue();
    code.push(instruction(IF_EQUAL, 2, 0, 1 + global.len() as i16, IPV4));
    code.push(instruction(JUMP_IF_NOT, 2, 0, (global.len() + redirect.len()) as i16, IPV6));
    code.extend(global.into_iter().chain(redirect).chain(NEXT));
    code
}

fn masquerade(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u64> {
    // The addresses in the frame's byte order.
    let word = |address: Ipv4Addr| i32::from_ne_bytes(address.octets());
    let checksum = |helper, offset, flags| {
        let addresses =
            [(3, from), (4, to)].map(|(register, address)| instruction(MOVE_WORD, register, 0, 0, word(address)));
        [copy(1, CONTEXT), mov(2, offset)].into_iter().chain(addresses).chain([mov(5, flags), call(helper)])
    };
    // Headers without options: TCP checksum, IP checksum, source address.
    let mut rewrite: Vec<u64> = checksum(L4_CHECKSUM, 50, PSEUDO_HEADER | 4).collect();
    rewrite.extend(checksum(L3_CHECKSUM, 24, 4));
    rewrite.extend(store(FP, -8, &to.octets()));
    rewrite.extend([copy(1, CONTEXT), mov(2, 26), copy(3, FP), instruction(ADD, 3, 0, 0, -8)]);
    rewrite.extend([mov(4, 4), mov(5, 0), call(STORE_BYTES)]);
    let mut source = load_bytes(26, 4);
    source.push(load_word(2, FP, -8));
    source.push(instruction(JUMP_IF_NOT_WORD, 2, 0, rewrite.len() as i16, word(from)));
    let mut code = prologue();
    code.push(instruction(JUMP_IF_NOT, 2, 0, (source.len() + rewrite.len()) as i16, IPV4));
    code.extend(source.into_iter().chain(rewrite).chain(NEXT));
    code
}
