//! Which node held which ports of which egress IP when: the log of leases, and the answers that it gives.
//!
//! Times are microseconds since 1970, of the writer's clock. Nothing here reads a clock.

mod answer;
mod book;
#[cfg(test)]
mod tests;

pub use answer::{Doubt, LeaseAnswer, LeaseHolder, LeaseQuestion, answer};
pub use book::Book;

use std::net::IpAddr;

use crate::model::NodeName;

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
    /// This many events before this one were not written.
    Lost(u64),
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRecord {
    /// When.
    pub at: i64,
    /// What.
    pub event: LeaseEvent,
}
