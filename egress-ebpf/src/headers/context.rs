//! The kernel's packet contexts at different hooks, and the different ways to read through them.

use aya_ebpf::{
    bindings::{__sk_buff, xdp_md},
    helpers::{bpf_skb_load_bytes, bpf_skb_pull_data},
};
use core::ffi::c_void;

/// Reads a field of a context. The read is volatile: otherwise LLVM merges reads of two fields into
/// one through a computed address, which the verifier refuses.
macro_rules! field {
    ($context:expr, $field:ident) => {
        // SAFETY: the context pointer is valid while the program runs.
        unsafe { (&raw const (*$context).$field).read_volatile() }
    };
}
pub(super) use field;

/// The kernel's context of a packet at one kind of hook. All code that serves every hook is generic over it
/// ([`Packet`](super::packet::Packet)).
pub trait Context: Copy {
    /// Whether so much code follows the parsing of a packet that the result should be hidden from the verifier ([`hidden`](super::hidden)).
    const MANY_PATHS: bool;

    /// Returns the start of the bytes that can be read directly.
    fn data(self) -> usize;
    /// Returns the end of those bytes.
    fn data_end(self) -> usize;
    /// Returns the length of the frame.
    fn len(self) -> u32;
    /// Returns the index of the interface whose hook this is; for a frame whose VLAN tag was removed, that of the VLAN device.
    fn ifindex(self) -> u32;
    /// Returns the kernel's pointer, for helpers that take any context.
    fn raw(self) -> *mut c_void;
    /// Ensures that the first `len` bytes can be read directly.
    fn pull(self, len: u32) -> bool;
    /// Copies `len` bytes, wherever they lie.
    ///
    /// # Safety
    ///
    /// `to` has room for `len` bytes.
    unsafe fn load(self, offset: u32, to: *mut c_void, len: u32) -> bool;
    /// Returns the packet at a TC hook, for functions that read bytes at any position.
    fn skb(self) -> Option<*mut __sk_buff>;
}

/// A packet at a TC hook.
#[derive(Clone, Copy)]
pub struct Skb(pub(super) *mut __sk_buff);

impl Skb {
    /// Returns how many packets a merged packet stands for; 1 for a single packet.
    #[inline(always)]
    pub fn segments(self) -> u32 {
        field!(self.0, gso_segs).max(1)
    }
}

impl Context for Skb {
    const MANY_PATHS: bool = true;

    #[inline(always)]
    fn data(self) -> usize {
        field!(self.0, data) as usize
    }

    #[inline(always)]
    fn data_end(self) -> usize {
        field!(self.0, data_end) as usize
    }

    #[inline(always)]
    fn len(self) -> u32 {
        field!(self.0, len)
    }

    #[inline(always)]
    fn ifindex(self) -> u32 {
        field!(self.0, ifindex)
    }

    #[inline(always)]
    fn raw(self) -> *mut c_void {
        self.0.cast()
    }

    #[inline(always)]
    fn pull(self, len: u32) -> bool {
        // SAFETY: the helper checks the length.
        unsafe { bpf_skb_pull_data(self.0, len) == 0 }
    }

    #[inline(always)]
    unsafe fn load(self, offset: u32, to: *mut c_void, len: u32) -> bool {
        // SAFETY: the helper fills all of it or fails.
        unsafe { bpf_skb_load_bytes(self.0.cast(), offset, to, len) == 0 }
    }

    #[inline(always)]
    fn skb(self) -> Option<*mut __sk_buff> {
        Some(self.0)
    }
}

/// A frame at an XDP hook. Only headers at their usual offsets are read; any other frame is left to the TC programs.
#[derive(Clone, Copy)]
pub struct Frame {
    pub(super) raw: *mut xdp_md,
    pub(super) ifindex: u32,
}

impl Context for Frame {
    const MANY_PATHS: bool = false;

    #[inline(always)]
    fn data(self) -> usize {
        field!(self.raw, data) as usize
    }

    #[inline(always)]
    fn data_end(self) -> usize {
        field!(self.raw, data_end) as usize
    }

    #[inline(always)]
    fn len(self) -> u32 {
        (self.data_end() - self.data()) as u32
    }

    #[inline(always)]
    fn ifindex(self) -> u32 {
        self.ifindex
    }

    #[inline(always)]
    fn raw(self) -> *mut c_void {
        self.raw.cast()
    }

    #[inline(always)]
    fn pull(self, _len: u32) -> bool {
        false
    }

    #[inline(always)]
    unsafe fn load(self, _offset: u32, _to: *mut c_void, _len: u32) -> bool {
        false
    }

    #[inline(always)]
    fn skb(self) -> Option<*mut __sk_buff> {
        None
    }
}
