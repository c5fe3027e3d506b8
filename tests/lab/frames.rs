//! XDP programs at drivers: a generator that sends frames at full speed, a sink that counts and drops them, and a
//! program that only redirects them. They measure the cost of a gateway's path without sockets at either end.

use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result};

use crate::bpf::{
    self,
    code::{
        ADD, ADD_IN_MEMORY, Attr, DATA, EXIT, FP, JUMP_IF_GREATER, JUMP_IF_NOT, JUMP_IF_NOT_WORD, LOAD_LONG,
        PSEUDO_MAP_FD, STORE_WORD, call, copy, instruction, load_as, load_word, mov, store,
    },
};
use crate::netns::NetNs;

/// Commands of bpf(2), and types of maps and programs.
const MAP_CREATE: u32 = 0;
const LINK_CREATE: u32 = 28;
const MAP_TYPE_ARRAY: u32 = 2;
const PROG_TYPE_XDP: u32 = 6;
/// `BPF_XDP`, `XDP_FLAGS_DRV_MODE`, `BPF_F_TEST_XDP_LIVE_FRAMES`.
const ATTACH_XDP: u32 = 37;
const DRIVER_MODE: u32 = 1 << 2;
const LIVE_FRAMES: u32 = 1 << 1;
/// The number of frames that the generator makes in one batch.
const BATCH: u32 = 64;

/// XDP verdicts and numbers of BPF helpers.
const DROP: i32 = 1;
const PASS: i32 = 2;
const TX: i32 = 3;
const MAP_LOOKUP_ELEMENT: i32 = 1;
const REDIRECT: i32 = 23;
/// Offsets in `struct xdp_md`, and its length.
const XDP_DATA: i16 = 0;
const XDP_DATA_END: i16 = 4;
const CONTEXT_LEN: usize = 24;
const CONTEXT_DATA_END: usize = 4;
const CONTEXT_IFINDEX: usize = 12;

/// A program attached to a driver; detached when dropped.
#[derive(Debug)]
pub struct Attached(#[expect(dead_code, reason = "the link goes with its descriptor")] OwnedFd);

/// Attaches a program to an interface's driver.
fn attach(ns: &NetNs, interface: &str, program: &OwnedFd) -> Result<Attached> {
    let index = ns.ifindex(interface)?;
    let mut attr = Attr::default();
    attr.u32(0, program.as_raw_fd().cast_unsigned());
    attr.u32(4, index);
    attr.u32(8, ATTACH_XDP);
    attr.u32(12, DRIVER_MODE);
    let link = ns.run(|| Ok(attr.call_fd(LINK_CREATE)?));
    link.map(Attached).with_context(|| format!("no XDP program at {interface} of {}", ns.name()))
}

/// Returns code that runs `body` on frames with these bytes at this offset, and passes all others.
fn for_frames((at, bytes): (i16, [u8; 4]), body: &[u64]) -> Vec<u64> {
    let end = i32::from(at) + 4;
    let mut code = vec![load_word(DATA, 1, XDP_DATA), load_word(3, 1, XDP_DATA_END), copy(4, DATA)];
    code.push(instruction(ADD, 4, 0, 0, end));
    let left = body.len() as i16;
    code.push(instruction(JUMP_IF_GREATER, 4, 3, left + 2, 0));
    code.push(load_word(5, DATA, at));
    code.push(instruction(JUMP_IF_NOT_WORD, 5, 0, left, i32::from_ne_bytes(bytes)));
    code.extend(body);
    code.extend([mov(0, PASS), EXIT]);
    code
}

/// Redirects frames with these bytes at an offset from one interface to another one of the same namespace.
pub fn redirect(ns: &NetNs, [from, to]: [&str; 2], mark: (i16, [u8; 4])) -> Result<Attached> {
    let body = [mov(1, ns.ifindex(to)?.cast_signed()), mov(2, 0), call(REDIRECT), EXIT];
    attach(ns, from, &load_as(PROG_TYPE_XDP, &for_frames(mark, &body))?)
}

/// Counts and drops received frames with these bytes at an offset.
#[derive(Debug)]
pub struct Sink {
    _attached: Attached,
    counter: OwnedFd,
}

impl Sink {
    /// Attaches the sink to `interface`.
    pub fn open(ns: &NetNs, interface: &str, mark: (i16, [u8; 4])) -> Result<Sink> {
        let mut attr = Attr::default();
        [(0, MAP_TYPE_ARRAY), (4, 4), (8, 8), (12, 1)].into_iter().for_each(|(at, value)| attr.u32(at, value));
        let counter = attr.call_fd(MAP_CREATE).context("cannot create a counter map")?;
        let body = [
            instruction(STORE_WORD, FP, 0, -4, 0),
            instruction(LOAD_LONG, 1, PSEUDO_MAP_FD, 0, counter.as_raw_fd()),
            0,
            copy(2, FP),
            instruction(ADD, 2, 0, 0, -4),
            call(MAP_LOOKUP_ELEMENT),
            instruction(JUMP_IF_NOT, 0, 0, 2, 0),
            mov(0, PASS),
            EXIT,
            mov(1, 1),
            instruction(ADD_IN_MEMORY, 0, 1, 0, 0),
            mov(0, DROP),
            EXIT,
        ];
        let _attached = attach(ns, interface, &load_as(PROG_TYPE_XDP, &for_frames(mark, &body))?)?;
        Ok(Sink { _attached, counter })
    }

    /// Returns the number of frames dropped so far.
    pub fn count(&self) -> Result<u64> {
        bpf::number(&self.counter)
    }
}

/// Sends one frame repeatedly.
#[derive(Debug)]
pub struct Generator {
    program: OwnedFd,
    frame: Vec<u8>,
}

impl Generator {
    /// Creates a generator for this frame. The program rewrites the frame on every run, since the kernel reuses modified buffers.
    pub fn new(frame: &[u8]) -> Result<Generator> {
        let bytes: Vec<u64> = store(DATA, 0, frame).collect();
        let mut code = vec![load_word(DATA, 1, XDP_DATA), load_word(3, 1, XDP_DATA_END), copy(4, DATA)];
        code.push(instruction(ADD, 4, 0, 0, i32::try_from(frame.len())?));
        code.push(instruction(JUMP_IF_GREATER, 4, 3, bytes.len() as i16 + 2, 0));
        code.extend(bytes);
        code.extend([mov(0, TX), EXIT, mov(0, DROP), EXIT]);
        Ok(Generator { program: load_as(PROG_TYPE_XDP, &code)?, frame: frame.to_vec() })
    }

    /// Sends the frame `count` times out of an interface: the other end receives them.
    pub fn send(&self, ns: &NetNs, interface: &str, count: u32) -> Result<()> {
        let mut context = [0u8; CONTEXT_LEN];
        let length = (self.frame.len() as u32).to_ne_bytes();
        context[CONTEXT_DATA_END..CONTEXT_DATA_END + 4].copy_from_slice(&length);
        context[CONTEXT_IFINDEX..CONTEXT_IFINDEX + 4].copy_from_slice(&ns.ifindex(interface)?.to_ne_bytes());
        let mut attr = Attr::default();
        attr.u32(0, self.program.as_raw_fd().cast_unsigned());
        attr.u32(8, self.frame.len() as u32);
        attr.u64(16, self.frame.as_ptr() as u64);
        attr.u32(32, count);
        attr.u32(40, CONTEXT_LEN as u32);
        attr.u64(48, context.as_ptr() as u64);
        attr.u32(64, LIVE_FRAMES);
        attr.u32(72, BATCH);
        ns.run(|| attr.call(bpf::PROG_TEST_RUN).map(drop).context("cannot send frames"))
    }
}
