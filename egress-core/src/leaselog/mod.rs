//! Which node held which ports of which egress IP when: what is written down of leases, and what can be said from that.
//!
//! Times are microseconds since 1970, of the clock of whoever wrote. Nothing here reads one.

mod answer;
mod book;
#[cfg(test)]
mod tests;

pub use answer::{Doubt, Holder, LeaseAnswer, Question, answer};
pub use book::Book;

use std::net::IpAddr;

use crate::model::NodeName;

/// Consecutive ports of an egress IP that a node may use, or may have used a moment ago.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lease {
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
pub enum Event {
    /// Writing begins, and nobody wrote before. All leases follow as [`Event::Held`].
    Started,
    /// Writing goes on in another file. All leases follow as [`Event::Held`].
    Continued,
    /// A lease that is in force.
    Held(Lease),
    /// A node got a lease.
    Granted(Lease),
    /// A lease ended.
    Returned(Lease),
    /// Nothing happened.
    Alive,
    /// Writing ends.
    Stopped,
    /// So many events before this one were not written.
    Lost(u64),
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// When.
    pub at: i64,
    /// What.
    pub event: Event,
}
