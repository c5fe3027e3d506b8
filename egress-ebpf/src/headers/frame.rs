//! Access that only an XDP hook offers: to the beginning of a frame, and to its VLAN tag, which is among its bytes there.

use crate::headers::{
    context::{Frame, field},
    packet::{ETH_LEN, Packet, VLAN},
};
use aya_ebpf::{helpers::bpf_xdp_adjust_head, programs::XdpContext};

/// Length of a VLAN tag.
pub const TAG_LEN: i32 = 4;
/// The bits of a tag that are the VLAN. The others are a priority.
pub const VLAN_BITS: u32 = 0xfff;

impl Packet<Frame> {
    /// Returns the frame of a program's context.
    #[inline(always)]
    pub fn of_frame(ctx: &XdpContext) -> Self {
        Self { context: Frame { raw: ctx.ctx, ifindex: field!(ctx.ctx, ingress_ifindex) } }
    }

    /// Returns the EtherType, network byte order.
    #[inline(always)]
    pub fn protocol(&self) -> u16 {
        self.read::<u16>(ETH_LEN - 2).unwrap_or(0)
    }

    /// Moves the beginning of the frame: towards its end (positive) or its front (negative). Bytes
    /// in front of the frame survive until it moves back.
    #[inline(always)]
    pub fn adjust_head(&self, bytes: i32) -> bool {
        // SAFETY: the helper checks that there is room.
        unsafe { bpf_xdp_adjust_head(self.context.raw, bytes) == 0 }
    }

    /// Returns the tag of a frame whose EtherType announces one, and the EtherType inside.
    #[inline(always)]
    pub fn tag(&self) -> Option<(u32, u16)> {
        let [tag, protocol] = self.read::<[u16; 2]>(ETH_LEN)?;
        Some((u16::from_be(tag) as u32, protocol))
    }

    /// Writes a tag after the MAC addresses, where there is room for it: the EtherType after it stays.
    #[inline(always)]
    pub fn write_tag(&self, tag: u32) -> Option<()> {
        self.write(ETH_LEN - 2, [VLAN, (tag as u16).to_be()])
    }

    /// Removes the tag from the frame, which then belongs to a VLAN device.
    #[inline(always)]
    pub fn enter(&self, device: u32) -> Option<Self> {
        let macs = self.read::<[u32; 3]>(0)?;
        if !self.adjust_head(TAG_LEN) {
            return None;
        }
        self.write_words(0, &macs)?;
        Some(Self { context: Frame { ifindex: device, ..self.context } })
    }

    /// Undoes [`enter`](Self::enter), once the frame begins where it did before.
    #[inline(always)]
    pub fn put_back(&self, tag: u32) -> Option<()> {
        let macs = self.read::<[u32; 3]>(TAG_LEN as u32)?;
        self.write_words(0, &macs)?;
        self.write_tag(tag)
    }
}
