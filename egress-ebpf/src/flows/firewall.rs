//! The host-stack path of a flow's first packet: through the node's routes and filters to an exit.
//!
//! `pod_egress` enters the flow as pending and leaves its packets to the host, with a note. Packets that the
//! host lets pass reach the program at the exit ([`guard`](crate::source::guard)), which translates them and
//! confirms the flow. Otherwise the flow stays pending, and its next packet takes this path again.
//!
//! On this path the stack also reassembles fragments, in whatever order they arrive, and sends them on in order.

use crate::{
    headers::packet::Packet,
    tables::{
        stats,
        trace::{self, Step},
    },
};
use egress_common::{
    config::{DatapathConfig, flags},
    verdict::{Counter, Verdict},
};

/// Returns whether a new flow waits for the host's firewall, in the form of `Flow::pending`.
#[inline(always)]
pub fn is_asked(config: &DatapathConfig) -> u8 {
    (config.flags & flags::RESPECT_FIREWALL != 0) as u8
}

/// Leaves a pod's packet to the host, on the path that leads to [`guard::caught`](crate::source::guard::caught).
#[inline(always)]
pub fn detour(pkt: &Packet) -> Verdict {
    trace::note(Step::Asked, 0, 0);
    pkt.ask();
    Verdict::Pass
}

/// Counts a packet of an unconfirmed flow and sends it on the same path.
#[inline(always)]
pub fn ask(pkt: &Packet) -> Verdict {
    stats::count(Counter::FirewallAsked);
    detour(pkt)
}
