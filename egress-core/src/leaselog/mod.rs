//! The log of which node held which ports of which egress IP when, and the answers that it gives.
//!
//! Times are microseconds since 1970, of the writer's clock. Nothing here reads a clock.

mod answer;
mod book;
mod scribe;
#[cfg(test)]
mod tests;

pub use answer::{Doubt, LeaseAnswer, LeaseHolder, LeaseQuestion, answer, together};
pub use book::Book;
pub use scribe::{Moment, Scribe};

use std::net::IpAddr;

use crate::model::NodeName;

/// The silence after which a writer records that nothing happened, in microseconds. A longer silence leaves doubt.
pub const ALIVE: i64 = 10_000_000;

/// How long a writer may not notice that it receives no changes, in microseconds: an API server that is cut off is asked every 20 s, and
/// has 10 s to answer.
const BLIND: i64 = 40_000_000;

/// Consecutive ports of an egress IP that a node may use, or may have used a moment ago.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortLease {
    /// The address.
    pub egress_ip: IpAddr,
    /// The first port.
    pub first_port: u16,
    /// The last port.
    pub last_port: u16,
    /// The node.
    pub node: NodeName,
}

/// An event of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseEvent {
    /// Writing begins after a gap. All leases follow as [`LeaseEvent::Held`].
    Started,
    /// Writing continues in another file. All leases follow as [`LeaseEvent::Held`].
    Continued,
    /// A lease that is in force.
    Held(PortLease),
    /// A node got a lease.
    Granted(PortLease),
    /// A lease ended.
    Returned(PortLease),
    /// Nothing happened.
    Alive,
    /// Writing ends.
    Stopped,
    /// This many events before this one were not written; 0: an unknown number, or the writer received them late.
    Lost(u64),
}

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// When the event happened.
    pub at: i64,
    /// The event.
    pub event: LeaseEvent,
}
