//! Which node held which ports of which egress IP when: what is written down of leases, and what can be said from that.
//!
//! Times are microseconds since 1970, of the clock of whoever wrote. Nothing here reads one.

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

/// What is written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseEvent {
    /// Writing begins, and nobody wrote before. All leases follow as [`LeaseEvent::Held`].
    Started,
    /// Writing goes on in another file. All leases follow as [`LeaseEvent::Held`].
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
    /// So many events before this one were not written.
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
