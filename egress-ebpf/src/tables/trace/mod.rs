//! The programs' decisions about the packets of one pod, reported in sentences: `egressctl trace`.
//!
//! It exists only in a separate build (feature `trace`), which replaces the usual programs while a
//! trace runs. In the usual build all of this compiles to nothing. The programs note their decisions in
//! per-CPU memory, which takes no room on their stacks, and the end of the entry point reports them.

#[cfg(feature = "trace")]
mod notes;
#[cfg(feature = "trace")]
mod tell;

#[cfg(feature = "trace")]
pub use notes::{answer, begin, end, note};
#[cfg(not(feature = "trace"))]
pub use usual::{answer, begin, end, note};

/// A decision, reported with two numbers.
#[cfg_attr(not(feature = "trace"), allow(dead_code, reason = "nobody reads them in the usual build"))]
#[derive(Clone, Copy)]
#[repr(u32)]
pub enum Step {
    /// The packet belongs to a flow in the table. Number: its policy.
    Flow = 1,
    /// The tables have changed, and its flow cannot be continued.
    Anew,
    /// No policy selects its sender.
    Unselected,
    /// No policy of its sender matches the destination.
    Elsewhere,
    /// There is no flow yet. Number: the policy.
    Policy,
    /// A flow is opened. Numbers: the index of its egress IP, and its port.
    Opened,
    /// The host's firewall and routes must decide.
    Asked,
    /// They have let it pass.
    Confirmed,
    /// Its source changes. Numbers: the index of the egress IP, and the port.
    Translated,
    /// It belongs to a connection that the outside opened, or that is older than the policy.
    LeftAlone,
    /// Answers to it will be left alone.
    Remembered,
    /// Its hop limit expires here.
    Expires,
    /// The policy lets its pods leave with the node's address while it has no gateway.
    AsNode,
    /// It is a fragment that arrived before the first one.
    Fragment,
    /// It is an ICMP error.
    Quotes,
    /// It is too large. Number: the size that fits.
    TooLarge,
    /// It answers a flow of the pod. Numbers: the index of the egress IP, and the pod's port.
    Answer,
    /// It has been translated on its way here.
    Delivered,
    /// It goes to another node. Numbers: its index, and the purpose ([`purpose`](egress_common::verdict::purpose)).
    ToNode,
    /// It leaves from this node. Number: the index of the egress IP.
    Leaves,
}

#[cfg(not(feature = "trace"))]
mod usual {
    use super::Step;
    use crate::{headers::packet::Packet, tables::family::Family};
    use egress_common::flow::FlowKey;

    #[inline(always)]
    pub fn begin(_: &Packet, _: u32) {}

    #[inline(always)]
    pub fn note(_: Step, _: u32, _: u32) {}

    #[inline(always)]
    pub fn answer<F: Family>(_: &FlowKey<F>, _: &F) {}

    #[inline(always)]
    pub fn end(_: &Packet, _: u64) {}
}
