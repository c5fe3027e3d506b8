//! What can be read and written only at an XDP hook: where a frame begins, and its VLAN tag, which is among its bytes there.

use crate::headers::{
    context::Frame,
    packet::{ETH_LEN, Packet, VLAN},
};
use aya_ebpf::{helpers::bpf_xdp_adjust_head, programs::XdpContext};

/// Length of a VLAN tag.
pub const TAG_LEN: i32 = 4;

impl Packet<Frame> {
    /// The frame of a program's context.
    #[inline(always)]
    pub fn of_frame(ctx: &XdpContext) -> Self {
        Self { context: Frame(ctx.ctx) }
    }

    /// EtherType, network byte order.
    #[inline(always)]
    pub fn protocol(&self) -> u16 {
        self.read::<u16>(ETH_LEN - 2).unwrap_or(0)
    }

    /// Moves the beginning of the frame: towards its end (positive) or its front. Bytes that were in front are still there when it
    /// moves back.
    #[inline(always)]
    pub fn adjust_head(&self, bytes: i32) -> bool {
        // SAFETY: the helper checks that there is room.
        unsafe { bpf_xdp_adjust_head(self.context.0, bytes) == 0 }
    }

    /// The VLAN of a frame whose EtherType says that it has a tag, and the EtherType inside.
    #[inline(always)]
    pub fn tag(&self) -> Option<(u32, u16)> {
        let [tag, protocol] = self.read::<[u16; 2]>(ETH_LEN)?;
        Some(((u16::from_be(tag) & 0xfff) as u32, protocol))
    }

    /// Writes the tag of a VLAN after the MAC addresses, where there is room for it: the EtherType after it stays.
    #[inline(always)]
    pub fn write_tag(&self, vlan: u32) -> Option<()> {
        self.write(ETH_LEN - 2, [VLAN, (vlan as u16).to_be()])
    }
}
