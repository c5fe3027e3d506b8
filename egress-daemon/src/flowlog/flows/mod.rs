//! The flow log (`flowLog.mode: Flows`), on each node for its own pods: the start, the end and the pod of each flow.
//!
//! `follow` is the thread that reads and logs the programs' reports; `interpret` adds names and times; `line` is a line of a journal,
//! `merge` converts lines to flows, and `segment` is the format of a finished file; `read` finds the flows of one port, and `answer`
//! draws conclusions from them.

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

/// The length of a tick of the programs, in microseconds. A flow began and ended at most one tick after the recorded time.
pub const TICK: Instant = 1_073_742;

/// The number in a [`Line::Lost`] that says only that the node's clock was set: no event is missing. It fits a signed column.
pub const CLOCK: u64 = i64::MAX as u64;

/// The maximum size of a flow log in bytes: about 250 million flows.
pub const MAX_BYTES: u64 = 2 << 30;

/// A flow, as recorded in a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// The translated port, or the identifier of an ICMP query.
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
    /// The time of its start.
    pub began: Instant,
    /// The time of its last packet; absent for a flow that was open at the end of the file.
    pub ended: Option<Instant>,
    /// Whether the host's firewall dropped all its packets, so that the outside has not seen it.
    pub refused: bool,
    /// Distinguishes the flow from others of the port, if another file may have its start or its end.
    pub ticket: Option<u32>,
}

/// The coverage of a file of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The start of the file.
    pub from: Instant,
    /// The time of the last entry.
    pub until: Instant,
    /// Whether flows before the start were not recorded. If `false`, the file continues its predecessor, or the programs kept the events.
    pub started: bool,
    /// The start of the oldest flow that was open when the file began; absent if no flow was open.
    pub oldest: Option<Instant>,
    /// Missing events: the times between which they happened, and their number.
    pub lost: Vec<(Instant, Instant, u64)>,
}

/// The flows that were found, and the coverage of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The spans of the files, in order.
    pub spans: Vec<Span>,
    /// The flows, each with the number of its file's span.
    pub flows: Vec<(usize, Recorded)>,
    /// The files that cannot be read: the numbers of their spans, and the reasons.
    pub unread: Vec<(usize, String)>,
}
