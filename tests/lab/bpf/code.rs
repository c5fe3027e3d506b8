//! Encodes programs instruction by instruction, and makes the raw bpf(2) call.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use anyhow::{Context, Result};

const PROG_LOAD: u32 = 5;
const PROG_TYPE_SCHED_CLS: u32 = 3;
/// The name of all programs of the lab.
const NAME: &[u8] = b"somebody_else";
pub(crate) const PSEUDO_MAP_FD: u8 = 1;

/// Encodes one instruction.
pub(crate) const fn instruction(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> u64 {
    code as u64
        | ((src << 4 | dst) as u64) << 8
        | (off.cast_unsigned() as u64) << 16
        | (imm.cast_unsigned() as u64) << 32
}

pub(crate) const fn mov(dst: u8, imm: i32) -> u64 {
    instruction(0xb7, dst, 0, 0, imm)
}

pub(crate) const fn copy(dst: u8, src: u8) -> u64 {
    instruction(0xbf, dst, src, 0, 0)
}

pub(crate) const fn call(helper: i32) -> u64 {
    instruction(0x85, 0, 0, 0, helper)
}

pub(crate) const EXIT: u64 = 0x95;
pub(crate) const ADD: u8 = 0x07;
/// Moves an immediate to the lower 32 bits of a register, and clears the upper ones.
pub(crate) const MOVE_WORD: u8 = 0xb4;
pub(crate) const JUMP_IF_GREATER: u8 = 0x2d;
pub(crate) const JUMP_IF_NOT: u8 = 0x55;
/// [`JUMP_IF_NOT`] for 32 bits.
pub(crate) const JUMP_IF_NOT_WORD: u8 = 0x56;
/// Adds a register to 64 bits in memory.
pub(crate) const ADD_IN_MEMORY: u8 = 0xdb;
/// The first half of an instruction that loads 64 bits, or, with [`PSEUDO_MAP_FD`], a map's address.
pub(crate) const LOAD_LONG: u8 = 0x18;
pub(crate) const STORE_WORD: u8 = 0x62;
pub(crate) const STORE_BYTE: u8 = 0x72;
/// The registers that hold the frame pointer, the context and the packet.
pub(crate) const FP: u8 = 10;
pub(crate) const CONTEXT: u8 = 6;
pub(crate) const DATA: u8 = 2;

pub(crate) fn load_word(dst: u8, src: u8, at: i16) -> u64 {
    instruction(0x61, dst, src, at, 0)
}

/// Returns instructions that write `bytes` at the offset `off` from the address in `register`.
pub(crate) fn store(register: u8, off: i16, bytes: &[u8]) -> impl Iterator<Item = u64> {
    let mut at = off;
    bytes.chunks(4).flat_map(move |chunk| {
        let place = at;
        at += chunk.len() as i16;
        match *chunk {
            [a, b, c, d] => vec![instruction(STORE_WORD, register, 0, place, i32::from_ne_bytes([a, b, c, d]))],
            _ => (place..)
                .zip(chunk)
                .map(|(at, byte)| instruction(STORE_BYTE, register, 0, at, (*byte).into()))
                .collect(),
        }
    })
}

/// Loads a program for TC.
pub(crate) fn load(code: &[u64]) -> Result<OwnedFd> {
    load_as(PROG_TYPE_SCHED_CLS, code)
}

/// Loads a program of the type `kind`.
pub(crate) fn load_as(kind: u32, code: &[u64]) -> Result<OwnedFd> {
    let mut attr = Attr::default();
    attr.u32(0, kind);
    attr.u32(4, code.len() as u32);
    attr.u64(8, code.as_ptr() as u64);
    attr.u64(16, c"GPL".as_ptr() as u64);
    attr.0[48..][..NAME.len()].copy_from_slice(NAME);
    attr.call_fd(PROG_LOAD).context("cannot load a program of the lab")
}

/// `union bpf_attr`.
pub(crate) struct Attr([u8; 144]);

impl Default for Attr {
    fn default() -> Attr {
        Attr([0; 144])
    }
}

impl Attr {
    pub(crate) fn u32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }

    pub(crate) fn u64(&mut self, at: usize, value: u64) {
        self.0[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }

    pub(crate) fn read(&self, at: usize) -> u32 {
        u32::from_ne_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    pub(crate) fn call(&mut self, command: u32) -> io::Result<i32> {
        // SAFETY: the callers' pointers point to live memory of the sizes that the callers give.
        let result = unsafe { libc::syscall(libc::SYS_bpf, command, self.0.as_mut_ptr(), self.0.len()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
    }

    pub(crate) fn call_fd(&mut self, command: u32) -> io::Result<OwnedFd> {
        // SAFETY: the kernel has just made this descriptor for us.
        self.call(command).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
    }
}
