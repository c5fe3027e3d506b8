//! All access to a packet's bytes and fields: the only place with pointers into packets.

use crate::headers::{
    context::{Context, Skb, field},
    hidden::hidden,
};
use aya_ebpf::{
    EbpfContext,
    bindings::{
        __sk_buff, BPF_CSUM_LEVEL_DEC, BPF_F_INGRESS, BPF_F_RECOMPUTE_CSUM, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::{
        bpf_check_mtu, bpf_clone_redirect, bpf_csum_diff, bpf_csum_level, bpf_csum_update, bpf_jiffies64,
        bpf_ktime_get_coarse_ns, bpf_l4_csum_replace, bpf_redirect, bpf_redirect_neigh, bpf_skb_adjust_room,
        bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_pull_data, bpf_skb_store_bytes, bpf_skb_vlan_pop,
        bpf_skb_vlan_push,
    },
    programs::TcContext,
};
use core::mem::MaybeUninit;
use egress_common::{
    V6,
    abi::TICK_SHIFT,
    egress::NodeEntry,
    verdict::{Counter, Verdict},
};
use network_types::eth::{EthHdr, EtherType};

/// Length of an Ethernet header without tags, as veth, bridge ports and the tunnel device deliver it.
pub const ETH_LEN: u32 = EthHdr::LEN as u32;
/// EtherTypes as they lie in a frame.
pub const IPV4: u16 = EtherType::Ipv4 as u16;
pub const IPV6: u16 = EtherType::Ipv6 as u16;
pub const ARP: u16 = EtherType::Arp as u16;
/// EtherType of a VLAN tag, network byte order.
pub const VLAN: u16 = EtherType::Ieee8021q as u16;
/// EtherType of a provider's tag, in front of another one (IEEE 802.1ad).
pub const SERVICE_VLAN: u16 = EtherType::Ieee8021ad as u16;

/// `__sk_buff::pkt_type` of a frame for another host's MAC address (`PACKET_OTHERHOST`, linux/if_packet.h).
const OTHER_HOST: u32 = 3;

/// A MAC address as two-byte words.
pub type Mac = [u16; 3];

/// Joins two words of a MAC address, memory order, into one.
pub const fn pair(first: u16, second: u16) -> u32 {
    first as u32 | (second as u32) << 16
}

/// A packet; at a TC hook unless stated otherwise.
#[derive(Clone, Copy)]
pub struct Packet<C = Skb> {
    pub(super) context: C,
}

impl<C: Context> Packet<C> {
    #[inline(always)]
    fn data(&self) -> usize {
        self.context.data()
    }

    #[inline(always)]
    fn data_end(&self) -> usize {
        self.context.data_end()
    }

    /// Returns the length of the frame in bytes.
    #[inline(always)]
    pub fn len(&self) -> u32 {
        self.context.len()
    }

    /// Returns `index` [`hidden`], below `SIZE` (a power of two).
    ///
    /// Without CAP_PERFMON the verifier refuses an array access whose index has different bounds on different paths through the program.
    #[inline(always)]
    pub fn hide<const SIZE: usize>(&self, index: usize) -> usize {
        const { assert!(SIZE.is_power_of_two()) };
        hidden(index as u32, self.len()) as usize & (SIZE - 1)
    }

    /// Returns the index of the interface on which the packet arrived, or whose hook this is.
    #[inline(always)]
    pub fn ifindex(&self) -> u32 {
        self.context.ifindex()
    }

    /// Returns a pointer to `T` at `offset` (a constant) from the start of the frame, if it lies in the linear part.
    ///
    /// Helpers that change the packet invalidate it.
    #[inline(always)]
    pub fn at<T>(&self, offset: u32) -> Option<*mut T> {
        let start = self.data() + offset as usize;
        if start + size_of::<T>() > self.data_end() { None } else { Some(start as *mut T) }
    }

    /// Returns a copy of the `T` at `offset`.
    #[inline(always)]
    pub fn read<T: Copy>(&self, offset: u32) -> Option<T> {
        // SAFETY: `at` has checked the bounds. Packets may be unaligned; the kernel loads programs that read words from them only where the
        // machine can do that (`CONFIG_HAVE_EFFICIENT_UNALIGNED_ACCESS`), and reading words costs a fraction of reading bytes.
        self.at::<T>(offset).map(|p| unsafe { p.read() })
    }

    /// Returns a copy of the `T` at `offset`, after pulling it into the linear part if it is not
    /// there: for headers. Values that were read earlier stay valid, because they are copies.
    #[inline(always)]
    pub fn read_header<T: Copy>(&self, offset: u32) -> Option<T> {
        if let Some(value) = self.read(offset) {
            return Some(value);
        }
        if self.context.pull(offset + size_of::<T>() as u32) { self.read(offset) } else { None }
    }

    /// Overwrites the `T` at `offset`, which must not be covered by a checksum that is not updated as well.
    #[inline(always)]
    pub fn write<T: Copy>(&self, offset: u32, value: T) -> Option<()> {
        // SAFETY: as in `read`.
        self.at::<T>(offset).map(|p| unsafe { p.write(value) })
    }

    /// Returns a copy of an IPv6 address at `offset`, read as [`write_words`](Self::write_words) writes.
    #[inline(always)]
    pub fn read_v6(&self, offset: u32) -> Option<V6> {
        let from = self.at::<V6>(offset)?.cast::<u32>();
        // SAFETY: `at` has checked the bounds; for alignment see `read`.
        Some(unsafe {
            [
                from.read_volatile(),
                from.add(1).read_volatile(),
                from.add(2).read_volatile(),
                from.add(3).read_volatile(),
            ]
        })
    }

    /// Overwrites `N` words at `offset`. Word by word and volatile: otherwise LLVM calls memmove
    /// for longer runs, which compares pointers: the verifier refuses that without CAP_PERFMON.
    #[inline(always)]
    pub fn write_words<const N: usize>(&self, offset: u32, words: &[u32; N]) -> Option<()> {
        let to = self.at::<[u32; N]>(offset)?.cast::<u32>();
        for (i, word) in words.iter().enumerate() {
            // SAFETY: `at` has checked the bounds; for alignment see `read`.
            unsafe { to.add(i).write_volatile(*word) }
        }
        Some(())
    }

    /// Returns a copy of the `T` at `offset`, anywhere in the frame. Slower than [`read`](Self::read).
    #[inline(always)]
    pub fn load<T: Copy>(&self, offset: u32) -> Option<T> {
        let mut v = MaybeUninit::<T>::uninit();
        // SAFETY: the call fills all of `v`, or fails.
        unsafe {
            if self.context.load(offset, v.as_mut_ptr().cast(), size_of::<T>() as u32) {
                Some(v.assume_init())
            } else {
                None
            }
        }
    }

    /// Returns a copy of the `T` at `offset` in the transport header at `l4`.
    ///
    /// If the header follows a plain IP header of length `header`, the access is direct. Otherwise a helper does it:
    /// without CAP_PERFMON the verifier allows no pointer into the packet that is not a constant away from its start.
    #[inline(always)]
    pub fn read_l4<T: Copy>(&self, header: u32, l4: u32, offset: u32) -> Option<T> {
        if l4 == ETH_LEN + header { self.read_header(ETH_LEN + header + offset) } else { self.load(l4 + offset) }
    }

    /// Returns the length of the largest IP packet that interface `ifindex` carries; 0: the one on which the packet arrived.
    #[inline(always)]
    pub fn mtu_of(&self, ifindex: u32) -> u32 {
        let mut mtu = 0;
        // SAFETY: the helper writes one word, whether the packet fits or not.
        unsafe { bpf_check_mtu(self.context.raw(), ifindex, &raw mut mtu, 0, 0) };
        mtu
    }

    /// Returns the kernel's context of the packet.
    #[inline(always)]
    pub fn context(&self) -> C {
        self.context
    }
}

impl Packet {
    /// Returns the packet of a program's context.
    #[inline(always)]
    pub fn new(ctx: &TcContext) -> Self {
        Self::from_raw(ctx.as_ptr().cast())
    }

    /// Returns the packet behind the kernel's pointer.
    #[inline(always)]
    pub fn from_raw(skb: *mut __sk_buff) -> Self {
        Self { context: Skb(skb) }
    }

    /// Returns whether the frame is for another host, as the kernel judges by the MAC address: the interface
    /// is promiscuous, and a switch that does not know the location of that host has flooded the frame.
    #[inline(always)]
    pub fn is_for_other_host(&self) -> bool {
        field!(self.context.0, pkt_type) == OTHER_HOST
    }

    /// Returns the kernel's pointer, for helpers.
    #[inline(always)]
    pub fn raw(&self) -> *mut __sk_buff {
        self.context.0
    }

    /// Returns the payload size of each packet of a merged one; 0 for a single packet.
    #[inline(always)]
    pub fn gso_size(&self) -> u32 {
        field!(self.context.0, gso_size)
    }

    /// Returns the sum over `N` bytes at `offset`, not folded.
    #[inline(always)]
    pub fn sum<const N: u32>(&self, offset: u32) -> Option<u32> {
        // SAFETY: the helper checks the length.
        if unsafe { bpf_skb_pull_data(self.context.0, offset + N) } != 0 {
            return None;
        }
        let start = self.data() + offset as usize;
        if start + N as usize > self.data_end() {
            return None;
        }
        // SAFETY: the bounds are checked, and the helper only reads.
        Some(unsafe { bpf_csum_diff(core::ptr::null_mut(), 0, start as *mut u32, N, 0) } as u32)
    }

    /// Returns the EtherType, network byte order, as the kernel knows it.
    #[inline(always)]
    pub fn protocol(&self) -> u16 {
        field!(self.context.0, protocol) as u16
    }

    /// Returns the EtherType in the frame, network byte order, behind `tags` bytes of VLAN tags; 0 if the frame is too short.
    #[inline(always)]
    pub fn ethertype(&self, tags: u32) -> u16 {
        self.read_header::<u16>(ETH_LEN - 2 + tags).unwrap_or(0)
    }

    /// Overwrites the `T` at `offset`, anywhere in the frame, and leaves `skb->csum` alone.
    #[inline(always)]
    pub fn store<T: Copy>(&self, offset: u32, value: &T) -> Option<()> {
        // SAFETY: the helper copies the bytes or fails.
        let r = unsafe {
            bpf_skb_store_bytes(self.context.0, offset, core::ptr::from_ref(value).cast(), size_of::<T>() as u32, 0)
        };
        (r == 0).then_some(())
    }

    /// Updates a transport checksum (`bpf_l4_csum_replace`), whatever its state of offload. Returns `false` if the
    /// kernel refused. A caller that continues leaves a wrong checksum, for which the receiver drops the packet.
    #[inline(always)]
    pub fn l4_checksum(&self, offset: u32, from: u64, to: u64, flags: u64) -> bool {
        // SAFETY: the helper checks the offset.
        unsafe { bpf_l4_csum_replace(self.context.0, offset, from, to, flags) == 0 }
    }

    /// Adds `difference` to the sum over the packet, if the card has computed one.
    #[inline(always)]
    pub fn sum_changed(&self, difference: u32) {
        // SAFETY: the helper changes a field of the packet only.
        unsafe { bpf_csum_update(self.context.0, difference) };
    }

    /// Overwrites the `T` at `offset` in the transport header at `l4`, as [`read_l4`](Self::read_l4) reads it.
    #[inline(always)]
    pub fn write_l4<T: Copy>(&self, header: u32, l4: u32, offset: u32, value: T) -> Option<()> {
        if l4 == ETH_LEN + header {
            self.write(ETH_LEN + header + offset, value)
        } else {
            self.store(l4 + offset, &value)
        }
    }

    /// Copies the frame to a buffer if it fits, and returns the frame's length.
    #[inline(always)]
    pub fn copy_to<const SIZE: usize>(&self, buffer: &mut [u8; SIZE]) -> Option<u32> {
        let len = self.len();
        if len as usize > SIZE {
            return None;
        }
        // SAFETY: no more bytes than the buffer has.
        let r =
            unsafe { bpf_skb_load_bytes(self.context.0.cast(), 0, buffer.as_mut_ptr().cast(), within::<SIZE>(len)) };
        (r == 0).then_some(len)
    }

    /// Replaces the frame by the `len` bytes that [`copy_to`](Self::copy_to) has put into the buffer.
    #[inline(always)]
    pub fn replace<const SIZE: usize>(&self, buffer: &[u8; SIZE], len: u32) -> Option<()> {
        let bytes = within::<SIZE>(len);
        self.resize(bytes)?;
        // SAFETY: no more bytes than the buffer has.
        let r = unsafe {
            bpf_skb_store_bytes(self.context.0, 0, buffer.as_ptr().cast(), bytes, BPF_F_RECOMPUTE_CSUM as u64)
        };
        (r == 0).then_some(())
    }

    /// Gives a copy of the packet to its ingress interface, as if it had just arrived there.
    #[inline(always)]
    pub fn enter_again(&self) -> Option<()> {
        // SAFETY: the helper copies the packet or fails; then there is no copy.
        (unsafe { bpf_clone_redirect(self.context.0, self.ifindex(), BPF_F_INGRESS as u64) } == 0).then_some(())
    }

    /// Sends a copy of the frame out of `ifindex`.
    #[inline(always)]
    pub fn copy_out(&self, ifindex: u32) -> Option<()> {
        // SAFETY: the helper copies the packet or fails; then there is no copy.
        (unsafe { bpf_clone_redirect(self.context.0, ifindex, 0) } == 0).then_some(())
    }

    /// Changes the length of the frame.
    #[inline(always)]
    pub fn resize(&self, len: u32) -> Option<()> {
        // SAFETY: the helper checks the length.
        (unsafe { bpf_skb_change_tail(self.context.0, len, 0) } == 0).then_some(())
    }

    /// Makes room behind the Ethernet header, or removes bytes there (`bpf_skb_adjust_room`).
    /// Returns 0 or an error, after which the packet is unchanged.
    #[inline(always)]
    pub fn adjust_room(&self, bytes: i32, flags: u64) -> i64 {
        // SAFETY: the helper checks lengths and flags.
        unsafe { bpf_skb_adjust_room(self.context.0, bytes, BPF_ADJ_ROOM_MAC, flags) as i64 }
    }

    /// Adjusts the packet after an outer header was removed: the card's report on the outer checksum
    /// does not apply to the inner one, and the packet does not leave by the queue on which it arrived.
    #[inline(always)]
    pub fn forget_outer(&self) {
        // SAFETY: the helper changes fields of the packet only.
        unsafe { bpf_csum_level(self.context.0, BPF_CSUM_LEVEL_DEC as u64) };
        // SAFETY: the context pointer is valid while the program runs.
        unsafe { (&raw mut (*self.context.0).queue_mapping).write_volatile(0) }
    }

    /// Returns whether the frame has a VLAN tag, even if only a priority tag.
    #[inline(always)]
    pub fn is_tagged(&self) -> bool {
        field!(self.context.0, vlan_present) != 0
    }

    /// Returns the VLAN in which the frame arrived; 0: none, or a priority tag.
    #[inline(always)]
    pub fn vlan(&self) -> u32 {
        if field!(self.context.0, vlan_present) == 0 { 0 } else { field!(self.context.0, vlan_tci) & 0xfff }
    }

    /// Puts the frame into a VLAN.
    #[inline(always)]
    pub fn push_vlan(&self, vlan: u32) -> Option<()> {
        // SAFETY: the helper changes the packet or fails.
        (unsafe { bpf_skb_vlan_push(self.context.0, VLAN, vlan as u16) } == 0).then_some(())
    }

    /// Removes the frame's VLAN tag.
    #[inline(always)]
    pub fn pop_vlan(&self) -> Option<()> {
        // SAFETY: the helper changes the packet or fails.
        (unsafe { bpf_skb_vlan_pop(self.context.0) } == 0).then_some(())
    }

    /// Returns the packet's priority.
    #[inline(always)]
    pub fn priority(&self) -> u32 {
        field!(self.context.0, priority)
    }

    /// Sets the packet's priority; for a packet to an HTB qdisc, this is its class.
    #[inline(always)]
    pub fn set_priority(&self, class: u32) {
        // SAFETY: the context pointer is valid while the program runs.
        unsafe { (&raw mut (*self.context.0).priority).write_volatile(class) }
    }

    /// Clears mark and priority, which the stack may have set: the outer packet would inherit them.
    #[inline(always)]
    pub fn clear_marks(&self) {
        // SAFETY: the context pointer is valid while the program runs.
        unsafe { (&raw mut (*self.context.0).mark).write_volatile(0) };
        self.set_priority(0);
    }

    /// Returns the index of the interface on which the packet arrived; 0 for a packet that this host created.
    #[inline(always)]
    pub fn ingress_ifindex(&self) -> u32 {
        field!(self.context.0, ingress_ifindex)
    }

    /// Sends the frame out of `ifindex` as it is.
    #[inline(always)]
    pub fn redirect(&self, ifindex: u32) -> Verdict {
        // SAFETY: the helper only notes the index.
        Verdict::Taken(unsafe { bpf_redirect(ifindex, 0) } as i32)
    }

    /// Sends the packet to the next hop on the way to `node`.
    #[inline(always)]
    pub fn redirect_hop(&self, node: &NodeEntry) -> Verdict {
        // SAFETY: family and address are adjacent in the record.
        unsafe { self.redirect_neigh(node.ifindex, &raw const node.hop_family) }
    }

    /// Sends the packet out of `ifindex` to the next hop at `hop`.
    ///
    /// # Safety
    ///
    /// `hop` points to the family of an address, followed by the address, as in `struct bpf_redir_neigh`.
    #[inline(always)]
    pub unsafe fn redirect_neigh(&self, ifindex: u32, hop: *const u32) -> Verdict {
        let len = (size_of::<u32>() + size_of::<V6>()) as i32;
        // SAFETY: as above, and the helper only reads.
        Verdict::Taken(unsafe { bpf_redirect_neigh(ifindex, hop.cast_mut().cast(), len, 0) } as i32)
    }

    /// Sends the packet out of `ifindex` (0: there is none) to the next hop that the routing table gives for its addresses.
    #[inline(always)]
    pub fn redirect_routed(&self, ifindex: u32) -> Verdict {
        if ifindex == 0 {
            return Verdict::Drop(Counter::DropNoUplink);
        }
        // SAFETY: without parameters the helper only notes the index.
        Verdict::Taken(unsafe { bpf_redirect_neigh(ifindex, core::ptr::null_mut(), 0, 0) } as i32)
    }
}

/// Returns `len`, which is at least 1 and at most `SIZE`, in a form in which the verifier of every kernel sees these bounds.
#[inline(always)]
const fn within<const SIZE: usize>(len: u32) -> u32 {
    const { assert!(SIZE.is_power_of_two()) };
    (len.wrapping_sub(1) & (SIZE - 1) as u32) + 1
}

/// Returns `CLOCK_MONOTONIC` in ns, as of the last timer interrupt.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper has no arguments.
    unsafe { bpf_ktime_get_coarse_ns() }
}

/// Length of the kernel's own tick (a jiffy) in ns; the agent sets it before it loads the programs.
#[unsafe(no_mangle)]
static JIFFY_NS: u64 = 0;
/// The difference between `CLOCK_MONOTONIC` and the jiffies' time: jiffies do not start at 0, and some were lost at boot.
#[unsafe(no_mangle)]
static mut JIFFIES_BEGAN: u64 = 0;

/// Returns the time of the kernel's jiffies counter, in ns since it would have been 0: reading it is a load, reading a clock is a call.
#[inline(always)]
fn jiffies_ns() -> u64 {
    // SAFETY: a static is valid for reading. Volatile, because the compiler must not assume the initial value.
    let length = unsafe { (&raw const JIFFY_NS).read_volatile() };
    // SAFETY: the helper has no arguments.
    unsafe { bpf_jiffies64() }.wrapping_mul(length)
}

/// Sets the clock of [`now_tick`]: once, before any other program of this object runs.
#[inline(always)]
pub fn set_clock() {
    // Both advance with the same timer interrupt.
    let began = now_ns().wrapping_sub(jiffies_ns());
    // SAFETY: nothing else writes it.
    unsafe { (&raw mut JIFFIES_BEGAN).write_volatile(began) }
}

/// Returns a number that changes 15 times a second.
#[inline(always)]
pub fn moment() -> u32 {
    (jiffies_ns() >> 26) as u32
}

/// Returns `CLOCK_MONOTONIC` in ticks of 2^30 ns, as of the last timer interrupt.
#[inline(always)]
pub fn now_tick() -> u32 {
    // SAFETY: as in `jiffies_ns`; it is written once, as a whole.
    let began = unsafe { (&raw const JIFFIES_BEGAN).read_volatile() };
    (jiffies_ns().wrapping_add(began) >> TICK_SHIFT) as u32
}
