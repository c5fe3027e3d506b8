//! Services: after `pod_egress`, the host may translate a destination to which no policy applies into one under a policy of
//! the pod. The exit knows the packet's sender only by a note, because the host may have masqueraded the packet as well.
//!
//! Such a packet is dropped, not translated, because its answers would not get back through the host's NAT. Packets that
//! may open a flow have the note; a connection that is not opened needs no further check.

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

/// Upper half of the result of [`left`] for a packet that [`unless_own`] must look at, with the
/// class in the lower half: no verdict has these bits.
pub const LOOK: u64 = u32::MAX as u64 - 2;

/// Leaves the packet of a pod of this class to the stack, because no policy matches its destination, which has this exception.
#[inline(always)]
pub fn left(pkt: &Packet, t: &L4Header, class: u32, exception: u32) -> Verdict {
    match t.kind {
        _ if class == 0 => Verdict::Pass,
        // If nothing masquerades, each of its packets arrives at the exit as the pod's, for a destination of its policy.
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

/// Handles a packet of a protocol in which an opening looks like an answer: it gets the note unless it is for this node itself. A
/// packet for the node may answer a request at a node port, which the node has masqueraded; it then leaves with another destination.
#[inline(always)]
pub fn unless_own<F: Family>(pkt: &Packet, class: u32) -> u64 {
    if let Some([src, dst]) = pkt.read::<[F; 2]>(ETH_LEN + F::SRC)
        && !exit::is_own::<F>(pkt, &src, &dst)
    {
        pkt.note(note::of_class(class));
    }
    Verdict::Pass.to_bits()
}

/// Handles a leaving packet that has the note: drops it if its present destination is under a policy,
/// unless that policy currently lets its pods leave with the node's address. Returns a verdict's bits.
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
