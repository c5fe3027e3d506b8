//! Events for the flow log, which the programs write to the ring buffer `FLOW_EVENTS`.

use crate::{flow::FlowKey, layout::map_type};

/// Values of [`FlowEvent::what`].
pub mod what {
    /// The flow began.
    pub const BEGAN: u8 = 1;
    /// The flow was removed.
    pub const ENDED: u8 = 2;
    /// The flow was removed before the host's firewall let one of its packets pass: nothing of it was visible outside.
    pub const REFUSED: u8 = 3;
}

map_type! {
    /// The beginning or the end of a flow. An end is complete without the beginning, which may have been lost.
    pub struct FlowEvent<A> {
        /// The flow.
        pub key: FlowKey<A>,
        /// [`Flow::egress`](crate::flow::Flow::egress).
        pub egress: u32,
        /// [`Flow::egress_generation`](crate::flow::Flow::egress_generation).
        pub egress_generation: u32,
        /// Index of the policy at that moment.
        pub policy: u32,
        /// [`Flow::endpoint`](crate::flow::Flow::endpoint).
        pub endpoint: u32,
        /// [`Flow::ticket`](crate::flow::Flow::ticket): the same at the beginning and at the end.
        pub ticket: u32,
        /// Tick of the flow's creation.
        pub created: u32,
        /// Tick of its last packet in either direction.
        pub last_seen: u32,
        /// Translated source port, or ICMP identifier.
        pub port: u16,
        /// [`what`].
        pub what: u8,
        /// 4 or 6.
        pub family: u8,
    } sizes 48, 72
}
