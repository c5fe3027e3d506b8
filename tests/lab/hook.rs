//! Small eBPF programs at an interface's hooks, like those that other software on a node attaches. TCX needs Linux 6.6.
//!
//! They are written as instructions and loaded by raw system calls, so that the lab needs no compiler and no library.

use std::ffi::CString;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, io};

use anyhow::{Context, Result};

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

/// One instruction (`struct bpf_insn`): operation, registers, offset, immediate.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction(u8, u8, i16, i32);

const MOVE: u8 = 0xb7;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// Conditional jumps by comparison with an immediate: 64 bits if equal or not equal, 32 bits if not equal.
const IF_EQUAL: u8 = 0x15;
const UNLESS_EQUAL: u8 = 0x55;
const UNLESS_EQUAL_32: u8 = 0x56;
const COPY: u8 = 0xbf;
const MOVE_32: u8 = 0xb4;
const ADD: u8 = 0x07;
const LOAD_BYTE: u8 = 0x71;
const LOAD_WORD: u8 = 0x61;
const STORE_WORD: u8 = 0x62;
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
const PROG_LOAD: i64 = 5;
const OBJ_PIN: i64 = 6;
const LINK_CREATE: i64 = 28;
const SCHED_CLS: u32 = 3;
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
const XDP_PROGRAM: u32 = 6;
const XDP: u32 = 37;
/// `XDP_PASS`.
const XDP_PASS: i32 = 2;
/// `XDP_FLAGS_SKB_MODE`, which every device supports.
const GENERIC: u32 = 1 << 1;
const BEFORE: u32 = 1 << 3;
const AFTER: u32 = 1 << 4;

/// The beginning of `union bpf_attr` for loading a program.
#[repr(C)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    licence: u64,
    log: [u64; 3],
    name: [u8; 16],
    ifindex: u32,
    attach: u32,
}

/// The beginning of `union bpf_attr` for a TCX or XDP link.
#[repr(C)]
struct Link {
    program: u32,
    ifindex: u32,
    attach: u32,
    flags: u32,
    relative: u64,
    revision: u64,
}

/// The beginning of `union bpf_attr` for pinning an object.
#[repr(C)]
struct Pin {
    path: u64,
    fd: u32,
    flags: u32,
}

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
    let program = load(side, action).context("cannot load a program")?;
    let handle = HANDLE.fetch_add(1, Ordering::Relaxed);
    let side = if side == Side::Ingress { "ingress" } else { "egress" };
    let priority = if position == ChainPosition::First { 1 } else { 50_000 };
    let name = format!("dev {interface} {side} prio {priority} handle {handle:#x} protocol all");
    // `tc` takes a program by the path of its pin.
    let pin = format!("{}/lab-hook-{}-{handle}", crate::scope::BPFFS, std::process::id());
    let path = CString::new(pin.clone())?;
    let pinned = Pin { path: path.as_ptr() as u64, fd: program.as_raw_fd().cast_unsigned(), flags: 0 };
    call(OBJ_PIN, &pinned).with_context(|| format!("cannot pin {pin}"))?;
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
    let program = load(side, action).context("cannot load a program")?;
    let ifindex = ns.ifindex(interface)?;
    let link = Link {
        program: program.as_raw_fd().cast_unsigned(),
        ifindex,
        attach: attach_type(side),
        flags: if position == ChainPosition::First { BEFORE } else { AFTER },
        relative: 0,
        revision: 0,
    };
    let link = ns.run(|| Ok(bpf(LINK_CREATE, &link)?)).with_context(|| format!("cannot hook {interface}"))?;
    Ok(Hooked::Link(link))
}

/// Attaches an XDP program that passes every packet.
pub fn hook_xdp(ns: &NetNs, interface: &str) -> Result<Hooked> {
    let code = [Instruction(MOVE, 0, 0, XDP_PASS), Instruction(EXIT, 0, 0, 0)];
    let program = load_code(XDP_PROGRAM, XDP, &code).context("cannot load an XDP program")?;
    let (program, ifindex) = (program.as_raw_fd().cast_unsigned(), ns.ifindex(interface)?);
    let link = Link { program, ifindex, attach: XDP, flags: GENERIC, relative: 0, revision: 0 };
    let link = ns.run(|| Ok(bpf(LINK_CREATE, &link)?)).with_context(|| format!("cannot hook {interface}"))?;
    Ok(Hooked::Link(link))
}

fn attach_type(side: Side) -> u32 {
    match side {
        Side::Ingress => TCX_INGRESS,
        Side::Egress => TCX_EGRESS,
    }
}

fn load(side: Side, action: HookAction) -> io::Result<OwnedFd> {
    let exit = Instruction(EXIT, 0, 0, 0);
    let code = match action {
        HookAction::Next => vec![Instruction(MOVE, 0, 0, -1), exit],
        HookAction::End => vec![Instruction(MOVE, 0, 0, 0), exit],
        HookAction::ToPeer(index) => vec![
            Instruction(MOVE, 1, 0, index.cast_signed()),
            Instruction(MOVE, 2, 0, 0),
            Instruction(CALL, 0, 0, REDIRECT_PEER),
            exit,
        ],
        HookAction::ToNeighbour(index) => to_neighbour(index),
        HookAction::Drop => vec![Instruction(MOVE, 0, 0, 2), exit],
        HookAction::Masquerade(from, to) => masquerade(from, to),
    };
    load_code(SCHED_CLS, attach_type(side), &code)
}

fn load_code(kind: u32, attach: u32, code: &[Instruction]) -> io::Result<OwnedFd> {
    let load = Load {
        kind,
        count: code.len() as u32,
        instructions: code.as_ptr() as u64,
        licence: c"GPL".as_ptr() as u64,
        log: [0; 3],
        name: *b"somebody_else\0\0\0",
        ifindex: 0,
        attach,
    };
    bpf(PROG_LOAD, &load)
}

/// Encodes the registers of an instruction: destination in the lower half of the byte, source in the upper half.
const fn both(dst: u8, src: u8) -> u8 {
    src << 4 | dst
}

/// Returns code that loads bytes of the frame to the top of the stack; expects the context in register 6.
fn load_bytes(offset: i32, length: i32) -> Vec<Instruction> {
    vec![
        Instruction(COPY, both(1, 6), 0, 0),
        Instruction(MOVE, 2, 0, offset),
        Instruction(COPY, both(3, 10), 0, 0),
        Instruction(ADD, 3, 0, -8),
        Instruction(MOVE, 4, 0, length),
        Instruction(CALL, 0, 0, LOAD_BYTES),
    ]
}

/// Returns code that puts the context into register 6 and the EtherType into register 2.
fn prologue() -> Vec<Instruction> {
    vec![Instruction(COPY, both(6, 1), 0, 0), Instruction(LOAD_WORD, both(2, 1), PROTOCOL, 0)]
}

const NEXT: [Instruction; 2] = [Instruction(MOVE, 0, 0, -1), Instruction(EXIT, 0, 0, 0)];

fn to_neighbour(index: u32) -> Vec<Instruction> {
    let redirect = [
        Instruction(MOVE, 1, 0, index.cast_signed()),
        Instruction(MOVE, 2, 0, 0),
        Instruction(MOVE, 3, 0, 0),
        Instruction(MOVE, 4, 0, 0),
        Instruction(CALL, 0, 0, REDIRECT_NEIGHBOUR),
        Instruction(EXIT, 0, 0, 0),
    ];
    // The first byte of an IPv6 destination. The lab's global addresses begin with 2001.
    let mut global = load_bytes(38, 1);
    global.push(Instruction(LOAD_BYTE, both(2, 10), -8, 0));
    global.push(Instruction(UNLESS_EQUAL, 2, redirect.len() as i16, 0x20));
    let mut code = prologue();
    code.push(Instruction(IF_EQUAL, 2, 1 + global.len() as i16, IPV4));
    code.push(Instruction(UNLESS_EQUAL, 2, (global.len() + redirect.len()) as i16, IPV6));
    code.extend(global.into_iter().chain(redirect).chain(NEXT));
    code
}

fn masquerade(from: Ipv4Addr, to: Ipv4Addr) -> Vec<Instruction> {
    // The addresses in the frame's byte order.
    let [from, to] = [from, to].map(|address| i32::from_ne_bytes(address.octets()));
    let checksum = |helper, offset, flags| {
        [
            Instruction(COPY, both(1, 6), 0, 0),
            Instruction(MOVE, 2, 0, offset),
            Instruction(MOVE_32, 3, 0, from),
            Instruction(MOVE_32, 4, 0, to),
            Instruction(MOVE, 5, 0, flags),
            Instruction(CALL, 0, 0, helper),
        ]
    };
    // Headers without options: IP checksum, TCP checksum, source address.
    let mut rewrite = vec![];
    rewrite.extend(checksum(L4_CHECKSUM, 50, PSEUDO_HEADER | 4));
    rewrite.extend(checksum(L3_CHECKSUM, 24, 4));
    rewrite.extend([
        Instruction(STORE_WORD, 10, -8, to),
        Instruction(COPY, both(1, 6), 0, 0),
        Instruction(MOVE, 2, 0, 26),
        Instruction(COPY, both(3, 10), 0, 0),
        Instruction(ADD, 3, 0, -8),
        Instruction(MOVE, 4, 0, 4),
        Instruction(MOVE, 5, 0, 0),
        Instruction(CALL, 0, 0, STORE_BYTES),
    ]);
    let mut source = load_bytes(26, 4);
    source.push(Instruction(LOAD_WORD, both(2, 10), -8, 0));
    source.push(Instruction(UNLESS_EQUAL_32, 2, rewrite.len() as i16, from));
    let mut code = prologue();
    code.push(Instruction(UNLESS_EQUAL, 2, (source.len() + rewrite.len()) as i16, IPV4));
    code.extend(source.into_iter().chain(rewrite).chain(NEXT));
    code
}

fn bpf<T>(command: i64, attributes: &T) -> io::Result<OwnedFd> {
    let fd = call(command, attributes)?;
    // SAFETY: fd is open, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn call<T>(command: i64, attributes: &T) -> io::Result<i32> {
    // SAFETY: the attributes have the layout that the command expects, and their pointers stay valid until it returns.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}
