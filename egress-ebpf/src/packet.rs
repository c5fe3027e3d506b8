//! All access to a packet's bytes and fields: the only place with pointers into packets.

use aya_ebpf::{
    EbpfContext,
    bindings::__sk_buff,
    helpers::{
        bpf_ktime_get_coarse_ns, bpf_l4_csum_replace, bpf_redirect, bpf_redirect_neigh, bpf_skb_change_tail,
        bpf_skb_load_bytes, bpf_skb_pull_data, bpf_skb_store_bytes,
    },
    programs::TcContext,
};
use core::mem::MaybeUninit;
use egress_common::{abi::TICK_SHIFT, verdict::Verdict};

/// Length of an Ethernet header without tags, which is what veth, bridge ports and the tunnel device hand over.
pub const ETH_LEN: u32 = 14;
/// Bytes that must lie in the linear part: Ethernet, IPv4 with all options or IPv6, and a TCP header.
const LINEAR: u32 = 128;

/// Reads a field of the context. Volatile, or LLVM merges reads of two fields into one through a computed address, which
/// the verifier refuses.
macro_rules! field {
    ($pkt:expr, $field:ident) => {
        // SAFETY: the context pointer is valid while the program runs.
        unsafe { (&raw const (*$pkt.skb).$field).read_volatile() }
    };
}

/// A MAC address as two-byte words.
pub type Mac = [u16; 3];

/// A packet at a TC hook.
#[derive(Clone, Copy)]
pub struct Packet {
    skb: *mut __sk_buff,
}

impl Packet {
    /// The packet of a program's context, with its headers pulled into the linear part.
    #[inline(always)]
    pub fn new(ctx: &TcContext) -> Self {
        let pkt = Self { skb: ctx.as_ptr().cast() };
        let len = pkt.len();
        let linear = (pkt.data_end() - pkt.data()) as u32;
        if linear < LINEAR && linear < len {
            pkt.pull(if len < LINEAR { len } else { LINEAR });
        }
        pkt
    }

    #[inline(always)]
    fn pull(&self, len: u32) {
        // SAFETY: the context pointer is valid while the program runs. A failure shows as a header that cannot be read.
        unsafe { bpf_skb_pull_data(self.skb, len) };
    }

    /// The kernel's pointer, for helpers.
    #[inline(always)]
    pub fn raw(&self) -> *mut __sk_buff {
        self.skb
    }

    #[inline(always)]
    fn data(&self) -> usize {
        field!(self, data) as usize
    }

    #[inline(always)]
    fn data_end(&self) -> usize {
        field!(self, data_end) as usize
    }

    /// Length of the frame in bytes.
    #[inline(always)]
    pub fn len(&self) -> u32 {
        field!(self, len)
    }

    /// EtherType, network byte order.
    #[inline(always)]
    pub fn protocol(&self) -> u16 {
        field!(self, protocol) as u16
    }

    /// Index of the interface whose hook this is.
    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        field!(self, ifindex)
    }

    /// A pointer to `T` at `offset` from the start of the frame, if it lies in the linear part.
    ///
    /// Helpers that change the packet invalidate it.
    #[inline(always)]
    pub fn at<T>(&self, offset: u32) -> Option<*mut T> {
        let start = self.data() + offset as usize;
        if start + size_of::<T>() > self.data_end() { None } else { Some(start as *mut T) }
    }

    /// A copy of the `T` at `offset`.
    #[inline(always)]
    pub fn read<T: Copy>(&self, offset: u32) -> Option<T> {
        // SAFETY: `at` has checked the bounds. Packets may lie unaligned; the kernel loads programs that read words from
        // them only where the machine can do that (`CONFIG_HAVE_EFFICIENT_UNALIGNED_ACCESS`), and whole words cost a
        // fraction of single bytes.
        self.at::<T>(offset).map(|p| unsafe { p.read() })
    }

    /// Overwrites the `T` at `offset`, which must not be covered by a checksum that is not updated as well.
    #[inline(always)]
    pub fn write<T: Copy>(&self, offset: u32, value: T) -> Option<()> {
        // SAFETY: as in `read`.
        self.at::<T>(offset).map(|p| unsafe { p.write(value) })
    }

    /// A copy of the `T` at `offset`, wherever it lies. Slower than [`read`](Self::read).
    #[inline(always)]
    pub fn load<T: Copy>(&self, offset: u32) -> Option<T> {
        let mut v = MaybeUninit::<T>::uninit();
        // SAFETY: the helper fills all of `v` or fails.
        unsafe {
            match bpf_skb_load_bytes(self.skb.cast(), offset, v.as_mut_ptr().cast(), size_of::<T>() as u32) {
                0 => Some(v.assume_init()),
                _ => None,
            }
        }
    }

    /// Overwrites the `T` at `offset`, wherever it lies, and leaves `skb->csum` alone.
    #[inline(always)]
    pub fn store<T: Copy>(&self, offset: u32, value: &T) -> Option<()> {
        // SAFETY: the helper copies the bytes or fails.
        let r = unsafe {
            bpf_skb_store_bytes(self.skb, offset, core::ptr::from_ref(value).cast(), size_of::<T>() as u32, 0)
        };
        (r == 0).then_some(())
    }

    /// Updates a transport checksum (`bpf_l4_csum_replace`), whatever state of offload it is in.
    #[inline(always)]
    pub fn l4_checksum(&self, offset: u32, from: u64, to: u64, flags: u64) {
        // SAFETY: the helper checks the offset. A failure leaves a wrong checksum, and the receiver drops the packet.
        unsafe { bpf_l4_csum_replace(self.skb, offset, from, to, flags) };
    }

    /// Changes the length of the frame.
    #[inline(always)]
    pub fn resize(&self, len: u32) -> Option<()> {
        // SAFETY: the helper checks the length.
        (unsafe { bpf_skb_change_tail(self.skb, len, 0) } == 0).then_some(())
    }

    /// Sends the frame out of `ifindex` as it is.
    #[inline(always)]
    pub fn redirect(&self, ifindex: u32) -> Verdict {
        // SAFETY: the helper only notes the index.
        Verdict::Taken(unsafe { bpf_redirect(ifindex, 0) } as i32)
    }

    /// Sends the packet out of `ifindex` to the next hop that the routing table gives for its addresses.
    #[inline(always)]
    pub fn redirect_routed(&self, ifindex: u32) -> Verdict {
        // SAFETY: without parameters the helper only notes the index.
        Verdict::Taken(unsafe { bpf_redirect_neigh(ifindex, core::ptr::null_mut(), 0, 0) } as i32)
    }
}

/// `CLOCK_MONOTONIC` in ns, as of the last timer interrupt.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper has no arguments.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// `CLOCK_MONOTONIC` in ticks of 2^30 ns.
#[inline(always)]
pub fn now_tick() -> u32 {
    (now_ns() >> TICK_SHIFT) as u32
}
