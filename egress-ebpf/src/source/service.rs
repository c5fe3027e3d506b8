//! Services: behind `pod_egress`, the host translates a destination that no policy touches to one that may be under a policy of the pod.
//! The exit knows the packet's sender only by a note, since the host may have masqueraded it as well.
//!
//! Such a packet is dropped, not translated, since its answers would not find back through the host's NAT. Packets that may open
//! something have the note; a connection that is not opened needs no further check.

use crate::{
    headers::{
        fields::{Kind, L4Header},
        note,
        packet::{ETH_LEN, Packet},
    },
    tables::{classify, family::Family},
    transports::exit,
};
use egress_common::{
    endpoint::except,
    verdict::{Counter, Verdict},
};

/// Upper half of what [`left`] returns for a packet that [`unless_own`] is to look at, with the class in the lower one: no verdict has
/// these bits.
pub const LOOK: u64 = u32::MAX as u64 - 2;

/// `pod_egress` leaves the packet of a pod of this class to the stack, because no policy matches its destination, which has this exception.
#[inline(always)]
pub fn left(pkt: &Packet, t: &L4Header, class: u32, exception: u32) -> Verdict {
    match t.kind {
        _ if class == 0 => Verdict::Pass,
        // Where nothing masquerades, each of its packets arrives at the exit as the pod's, for a destination of its policy.
        Kind::Tcp if exception == except::SERVICE => {
            pkt.note(note::FREE);
            Verdict::Pass
        }
        Kind::Tcp if t.opens() => {
            pkt.note(note::of_class(class));
            Verdict::Pass
        }
        Kind::Udp | Kind::Query | Kind::Other => Verdict::Later(LOOK << 32 | class as u64),
        Kind::Tcp | Kind::Answer | Kind::Error | Kind::Orphan | Kind::Broken => Verdict::Pass,
    }
}

/// A packet of a protocol in which an opening cannot be told from an answer: it gets the note unless it is for this node itself. Such a
/// packet may be an answer to what the node has masqueraded, a request at a node port, and leaves with another destination.
#[inline(always)]
pub fn unless_own<F: Family>(pkt: &Packet, class: u32) -> u64 {
    if let Some([src, dst]) = pkt.read::<[F; 2]>(ETH_LEN + F::SRC)
        && !exit::is_own::<F>(pkt, &src, &dst)
    {
        pkt.note(note::of_class(class));
    }
    Verdict::Pass.to_bits()
}

/// A packet with the note leaves: it is dropped if its destination is under a policy by now, unless that policy currently lets its
/// pods leave with the node's address. A verdict's bits.
#[inline(always)]
pub fn leaving<F: Family>(pkt: &Packet, class: u32) -> u64 {
    let Some(dst) = F::load(pkt, ETH_LEN + F::SRC + size_of::<F>() as u32) else {
        return Verdict::Drop(Counter::DropMalformed).to_bits();
    };
    let verdict = match classify::route(class, dst) {
        Ok(policy) if !classify::leaves_as_node::<F>(policy) => Verdict::Drop(Counter::DropService),
        _ => Verdict::Pass,
    };
    verdict.to_bits()
}

once! {
    unless_own(unless_own_v4, unless_own_v6) = unless_own(class: u32);
    leaving(leaving_v4, leaving_v6) = leaving(class: u32);
}
