//! Later fragments carry no ports: the first fragment of a datagram records them here. Fragments that arrive earlier wait for it.

use crate::{
    headers::{
        fields::{Kind, Part},
        packet::{Packet, now_tick},
    },
    tables::{datagram, family::Family, maps::Holding, stats},
};
use aya_ebpf::bindings::BPF_NOEXIST;
use egress_common::{
    flow::HeldKey,
    limits::{HELD_PER_DATAGRAM, HELD_TICKS},
    verdict::{Counter, Verdict},
};

/// Result of [`gather`] for a packet that goes on: no verdict has these bits.
pub const GO_ON: u64 = u64::MAX;

/// Handles a fragment as it arrived on an interface: a later one waits for its first one; a first one
/// is recorded and releases the fragments that wait for it. Returns a verdict's bits, or [`GO_ON`].
#[inline(always)]
pub fn gather<F: Family>(pkt: &Packet) -> u64 {
    let Ok(ip) = F::parse(pkt) else { return GO_ON };
    let t = datagram::transport::<F>(pkt, &ip).hidden(pkt.len());
    let Some(holding) = F::holding().get_ptr_mut(0) else { return GO_ON };
    // SAFETY: this CPU's alone while the program runs.
    unsafe { (*holding).key = HeldKey { datagram: datagram::key(&ip), place: 0 } };
    match (ip.part, t.kind) {
        (Part::First, _) if t.has_ports() => {
            datagram::keep(&ip, &t);
            release_waiting::<F>(pkt)
        }
        (Part::Later, Kind::Orphan) => once::hold::<F>(pkt),
        _ => GO_ON,
    }
}

/// Holds the fragment of [`Holding`](crate::tables::maps::Holding) if there is room. Returns a verdict's bits, or [`GO_ON`].
#[inline(always)]
pub fn hold<F: Family>(pkt: &Packet) -> u64 {
    let Some(holding) = F::holding().get_ptr_mut(0) else { return GO_ON };
    // SAFETY: this CPU's alone while the program runs.
    let Holding { key, frame } = unsafe { &mut *holding };
    let Some(len) = pkt.copy_to(&mut frame.bytes) else { return GO_ON };
    (frame.since, frame.len) = (now_tick(), len);
    for place in 0..HELD_PER_DATAGRAM {
        key.place = place;
        if F::held().insert(&*key, &*frame, BPF_NOEXIST as u64).is_ok() {
            // The first fragment may just have missed it on another CPU: then this one goes on, unless it was taken along.
            if F::fragments().get_ptr(&key.datagram).is_some() && F::held().remove(&*key).is_ok() {
                break;
            }
            return Verdict::Drop(Counter::FragmentHeld).to_bits();
        }
    }
    GO_ON
}

/// Sends a first fragment into its ingress interface once more, followed by the fragments that wait for it. They are written into its own
/// buffer sequentially: a program cannot create packets, only copy one. Returns a verdict's bits, or [`GO_ON`] if none waits.
#[inline(always)]
fn release_waiting<F: Family>(pkt: &Packet) -> u64 {
    for place in 0..HELD_PER_DATAGRAM {
        if once::release::<F>(pkt, place) == GO_ON {
            if place == 0 {
                return GO_ON;
            }
            break;
        }
    }
    Verdict::Drop(Counter::DatagramOrdered).to_bits()
}

/// Releases one waiting fragment of the datagram of [`Holding`](crate::tables::maps::Holding); the
/// first fragment itself precedes the one in the first place. Returns [`GO_ON`] if there is none.
#[inline(always)]
pub fn release<F: Family>(pkt: &Packet, place: u32) -> u64 {
    let Some(holding) = F::holding().get_ptr_mut(0) else { return GO_ON };
    // SAFETY: this CPU's alone while the program runs.
    let key = unsafe { &mut (*holding).key };
    key.place = place;
    // SAFETY: an entry that is evicted meanwhile may be torn, which the checksum of its datagram reveals.
    let Some(frame) = (unsafe { F::held().get(&*key) }) else { return GO_ON };
    if place == 0 && pkt.enter_again().is_none() {
        stats::count(Counter::DropRedirect);
    }
    if now_tick().wrapping_sub(frame.since) > HELD_TICKS {
        stats::count(Counter::DropFragment);
    } else if pkt.replace(&frame.bytes, frame.len).is_some() && pkt.enter_again().is_some() {
        stats::count(Counter::FragmentReleased);
    } else {
        stats::count(Counter::DropRedirect);
    }
    let _ = F::held().remove(&*key);
    0
}

once! {
    gather(gather_v4, gather_v6) = gather();
    hold(hold_v4, hold_v6) = hold();
    release(release_v4, release_v6) = release(place: u32);
}
