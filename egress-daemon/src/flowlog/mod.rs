//! The logs of who used which ports of egress IPs (`flowLog`): the lease log on each gateway, since a gateway knows the leases of all
//! nodes, and the flow log ([`flows`]) on each node, for its own pods.
//!
//! A thread of its own follows the objects and writes; it never keeps the agent waiting. `segment` is a finished file
//! (Parquet), `journal` the lines of the one that is being written, `files` the directory of both, `keeper` what becomes of it when
//! something fails, `writer` the thread, `worker` what all threads here have in common. [`export`] sends to collectors.

pub mod export;
mod files;
pub mod flows;
mod journal;
mod keeper;
#[cfg(test)]
mod programs_tests;
mod segment;
#[cfg(test)]
mod tests;
mod worker;
mod writer;

pub use files::{Kind, Log, LogError, kind, read};
pub use writer::{Counts, LogWriter};

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Nothing.
    Off,
    /// Which node held which ports of which egress IP when.
    Leases,
    /// That, and when each flow began and ended, and for which pod.
    Flows,
}

/// `flowLog` of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLog {
    /// `mode`.
    pub mode: Mode,
    /// `destinations`: whether the flow log has remote addresses.
    pub destinations: bool,
    /// `retention`: how long a segment is kept after its last event.
    pub retention: Duration,
    /// `export`: where logs are exported to.
    pub export: Vec<export::Collector>,
}

impl Default for FlowLog {
    fn default() -> Self {
        let retention = Duration::from_secs(7 * 24 * 3600);
        Self { mode: Mode::Leases, destinations: false, retention, export: Vec::new() }
    }
}

/// The limits of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Where it is.
    pub directory: PathBuf,
    /// How long a segment is kept after its last event.
    pub retention: Duration,
    /// How many bytes all files may have; the oldest segments are removed first.
    pub bytes: u64,
}

/// How many bytes a log may have.
pub const MAX_BYTES: u64 = 1 << 30;

/// Namespace and name of a pod; a text without a namespace is an address.
fn pod_parts(pod: &str) -> (Option<&str>, &str) {
    pod.split_once('/').map_or((None, pod), |(namespace, name)| (Some(namespace), name))
}

/// Microseconds since 1970.
pub type Instant = i64;

/// The current time.
pub fn now() -> Instant {
    micros(SystemTime::now())
}

fn micros(time: SystemTime) -> Instant {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as Instant)
}
