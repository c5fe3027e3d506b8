//! The log of flows (`flowLog.mode: Flows`), on each node for its own pods: when each flow began and ended, and for which pod.
//!
//! `follow` is the thread that reads what the programs tell and writes; `interpret` finds names and times for it; `line` is what stands in a
//! journal, `merge` makes flows of it, `segment` is a finished file; `read` finds the flows of one port, `answer` says what follows from them.

mod answer;
mod follow;
mod interpret;
mod line;
mod merge;
mod read;
mod segment;
#[cfg(test)]
mod tests;

pub use answer::{Doubt, Likely, answer};
pub use follow::{Follower, Settings};
pub use line::{Entry, Line};
pub use read::{Wanted, read};

use super::Instant;
use std::net::{IpAddr, SocketAddr};

/// Microseconds of a tick of the programs: a flow began and ended no more than that after the time that is written.
pub const TICK: Instant = 1_073_742;

/// How many bytes a log of flows may have: 250 million flows, more or less.
pub const MAX_BYTES: u64 = 2 << 30;

/// A flow as it stands in a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// The translated port, or identifier of an ICMP query.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// `namespace/name` of the pod, or its address where its name was not known any more.
    pub pod: String,
    /// The pod's node.
    pub node: String,
    /// The policy; absent where it was not known any more.
    pub policy: Option<String>,
    /// The remote address and port, where destinations are logged.
    pub destination: Option<SocketAddr>,
    /// When it began.
    pub began: Instant,
    /// When its last packet came; absent for a flow that had not ended when the file did.
    pub ended: Option<Instant>,
    /// Whether the host's firewall let no packet of it pass: the outside has not seen it.
    pub refused: bool,
}

/// What a file of a log covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// When it begins.
    pub from: Instant,
    /// When something was written last.
    pub until: Instant,
    /// Whether nobody has watched flows before; otherwise the file before this one is continued, or the programs have kept what happened.
    pub started: bool,
    /// Beginnings and ends that are missing: after the first time, and before the second one, so many.
    pub lost: Vec<(Instant, Instant, u64)>,
}

/// What was found, each flow with the number of the file's span.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// One for each file, in order.
    pub spans: Vec<Span>,
    /// The flows.
    pub flows: Vec<(usize, Recorded)>,
}
