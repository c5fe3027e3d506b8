//! Small eBPF programs at an interface's hooks, as other software on a node puts them there. Needs Linux 6.6 (TCX).
//!
//! They are written as instructions and loaded by plain system calls, so that the lab needs no compiler and no library.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};

use crate::netns::NetNs;

/// Which packets of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Those that come in.
    Ingress,
    /// Those that go out.
    Egress,
}

/// What a program does with every packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Leaves it to the next program (`TCX_NEXT`).
    Next,
    /// Ends the chain: the packet passes, and no later program sees it (`TCX_PASS`).
    End,
    /// Puts it into the namespace at the other end of this veth (`bpf_redirect_peer`), by its index.
    ToPeer(u32),
}

/// An attached program. It goes when this is dropped.
#[derive(Debug)]
pub struct Hooked {
    _link: OwnedFd,
}

/// One instruction (`struct bpf_insn`): operation, registers, offset, immediate.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction(u8, u8, i16, i32);

const MOVE: u8 = 0xb7;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const REDIRECT_PEER: i32 = 155;
const PROG_LOAD: i64 = 5;
const LINK_CREATE: i64 = 28;
const SCHED_CLS: u32 = 3;
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
const BEFORE: u32 = 1 << 3;

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

/// The beginning of `union bpf_attr` for a TCX link.
#[repr(C)]
struct Link {
    program: u32,
    ifindex: u32,
    attach: u32,
    flags: u32,
    relative: u64,
    revision: u64,
}

/// Attaches a program that does `action`, before all that are there.
pub fn hook(ns: &NetNs, interface: &str, side: Side, action: Action) -> Result<Hooked> {
    let program = load(side, action).context("cannot load a program")?;
    let ifindex = ns.ifindex(interface)?;
    let link = Link {
        program: program.as_raw_fd().cast_unsigned(),
        ifindex,
        attach: attach_type(side),
        flags: BEFORE,
        relative: 0,
        revision: 0,
    };
    let link = ns.run(|| Ok(bpf(LINK_CREATE, &link)?)).with_context(|| format!("cannot hook {interface}"))?;
    Ok(Hooked { _link: link })
}

fn attach_type(side: Side) -> u32 {
    match side {
        Side::Ingress => TCX_INGRESS,
        Side::Egress => TCX_EGRESS,
    }
}

fn load(side: Side, action: Action) -> io::Result<OwnedFd> {
    let exit = Instruction(EXIT, 0, 0, 0);
    let code = match action {
        Action::Next => vec![Instruction(MOVE, 0, 0, -1), exit],
        Action::End => vec![Instruction(MOVE, 0, 0, 0), exit],
        Action::ToPeer(index) => vec![
            Instruction(MOVE, 1, 0, index.cast_signed()),
            Instruction(MOVE, 2, 0, 0),
            Instruction(CALL, 0, 0, REDIRECT_PEER),
            exit,
        ],
    };
    let load = Load {
        kind: SCHED_CLS,
        count: code.len() as u32,
        instructions: code.as_ptr() as u64,
        licence: c"GPL".as_ptr() as u64,
        log: [0; 3],
        name: *b"somebody_else\0\0\0",
        ifindex: 0,
        attach: attach_type(side),
    };
    bpf(PROG_LOAD, &load)
}

fn bpf<T>(command: i64, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the attributes have the layout that the command wants, and what they point to lives until it returns.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fd is open and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
