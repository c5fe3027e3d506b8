//! Bandwidth of egress IPs: their packets pass the shaper, a pair of veth devices on the owner. The near end has
//! an HTB class for each limited egress IP and direction; `shaper_ingress` at the far end sends the packets on.
//!
//! HTB makes the packets wait; the limit on waiting packets is applied before it, so that the excess is dropped
//! and counted here, whatever queue the class has.

use crate::{
    headers::{
        note,
        packet::{Mac, Packet, now_ns},
    },
    tables::maps::{CONFIG, METERS},
};
use egress_common::{
    abi,
    egress::EgressIp,
    verdict::{Counter, Verdict},
};

/// Traffic of the pods, on its way out.
pub const OUT: u32 = 0;
/// Replies, on their way to the pods.
pub const IN: u32 = 1;

/// Destination addresses of frames in the shaper, by direction.
pub const MACS: [Mac; 2] = [[0x5302, 0x0050, 0x0000], [0x5302, 0x0050, 0x0100]];

/// Result of [`enter`] for a packet in excess.
const TOO_MUCH: u64 = u64::MAX;

/// This long after the last packet came out, packets still counted as waiting are considered lost.
const LOST_NS: u64 = 2_000_000_000;

/// Sends a packet of an egress IP with limited bandwidth through the shaper, if there is one.
#[inline(always)]
pub fn limit(pkt: &Packet, egress: u32, e: &EgressIp, direction: u32) -> Option<Verdict> {
    if e.queue == 0 {
        return None;
    }
    match enter(pkt, egress, e.queue, direction) {
        0 => None,
        TOO_MUCH => Some(Verdict::Drop(Counter::DropBandwidth)),
        taken => Some(Verdict::Taken(taken as i32)),
    }
}

#[inline(never)]
fn enter(pkt: &Packet, egress: u32, queue: u32, direction: u32) -> u64 {
    let ifindex = match CONFIG.get(0) {
        Some(config) => config.shaper_ifindex,
        None => 0,
    };
    let Some(meter) = METERS.get_ptr_mut(2 * egress + direction) else { return 0 };
    if ifindex == 0 {
        return 0;
    }
    // SAFETY: the fields are only added to or set by whole stores.
    unsafe {
        let (sent, passed) = ((&raw const (*meter).sent).read_volatile(), (&raw const (*meter).passed).read_volatile());
        let waiting = sent.wrapping_sub(passed) as i64;
        if waiting < 0 || waiting > queue as i64 {
            if waiting > 0 && now_ns().wrapping_sub((&raw const (*meter).last).read_volatile()) < LOST_NS {
                return TOO_MUCH;
            }
            (&raw mut (*meter).passed).write_volatile(sent);
            (&raw mut (*meter).last).write_volatile(now_ns());
        }
        add(&raw mut (*meter).sent, pkt.len() as u64);
    }
    let mac = if direction == OUT { MACS[0] } else { MACS[1] };
    if pkt.write(0, mac).is_none() {
        return TOO_MUCH;
    }
    pkt.note(note::SENT);
    pkt.set_priority((abi::SHAPER_HANDLE as u32) << 16 | (2 * egress + direction + 1));
    match pkt.redirect(ifindex) {
        Verdict::Taken(result) => result as u32 as u64,
        _ => TOO_MUCH,
    }
}

/// # Safety
///
/// `to` points into a map.
#[inline(always)]
unsafe fn add(to: *mut u64, amount: u64) {
    // The target has the instruction, but Rust offers no method for it.
    // SAFETY: as above, and aligned.
    unsafe { core::arch::asm!("lock *(u64 *)({to} + 0x0) += {amount}", to = in(reg) to, amount = in(reg) amount) }
}

/// Records that a packet of this egress IP and direction has come out of the shaper.
#[inline(always)]
pub fn passed(pkt: &Packet, egress: u32, direction: u32) {
    if let Some(meter) = METERS.get_ptr_mut(2 * egress + direction) {
        // SAFETY: as in `enter`.
        unsafe {
            add(&raw mut (*meter).passed, pkt.len() as u64);
            (&raw mut (*meter).last).write_volatile(now_ns());
        }
    }
}
