//! The flow log (`flowLog.mode: Flows`), on each node for its own pods: when each flow began and ended, and for which pod.
//!
//! `follow` is the thread that reads what the programs report and writes it; `interpret` finds names and times for it;
//! `line` is a line of a journal, `merge` makes flows of lines, `segment` is a finished file; `read` finds the flows of
//! one port, `answer` draws conclusions from them.

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
pub(super) use line::is_journal;
pub use line::{Entry, Line};
pub use read::{Wanted, read};

use super::Instant;
use std::net::{IpAddr, SocketAddr};

/// Microseconds of a tick of the programs: a flow began and ended at most this long after the recorded time.
pub const TICK: Instant = 1_073_742;

/// The greatest size of a flow log in bytes: about 250 million flows.
pub const MAX_BYTES: u64 = 2 << 30;

/// A flow, as recorded in a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// The translated port, or identifier of an ICMP query.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// `namespace/name` of the pod, or its address if its name was no longer known.
    pub pod: String,
    /// The pod's node.
    pub node: String,
    /// The policy; absent if it was no longer known.
    pub policy: Option<String>,
    /// The remote address and port, if destinations are logged.
    pub destination: Option<SocketAddr>,
    /// When it began.
    pub began: Instant,
    /// When its last packet came; absent for a flow that was open at the end of the file.
    pub ended: Option<Instant>,
    /// Whether the host's firewall let no packet of it pass: the outside has not seen it.
    pub refused: bool,
    /// Tells a flow from others of the port, if another file may have its beginning or its end.
    pub ticket: Option<u32>,
}

/// What a file of a log covers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// When it begins.
    pub from: Instant,
    /// When something was last written.
    pub until: Instant,
    /// Whether nobody has recorded flows before; otherwise it continues the file before it, or the programs have kept what happened.
    pub started: bool,
    /// When the oldest flow began that was open at the beginning; absent if none was.
    pub oldest: Option<Instant>,
    /// Beginnings and ends that are missing: after the first time and before the second one, and how many.
    pub lost: Vec<(Instant, Instant, u64)>,
}

/// What was found, each flow with the number of the file's span.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// One for each file, in order.
    pub spans: Vec<Span>,
    /// The flows.
    pub flows: Vec<(usize, Recorded)>,
    /// The files that cannot be read, by the numbers of their spans, and why.
    pub unread: Vec<(usize, String)>,
}
