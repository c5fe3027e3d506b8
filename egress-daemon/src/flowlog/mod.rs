//! The logs of the users of egress IPs' ports (`flowLog`): the lease log on each gateway, since a gateway knows the leases of all nodes,
//! and the flow log ([`flows`]) on each node, for its own pods.
//!
//! A separate thread follows the objects and writes, so the agent never waits. `segment` is the format of finished files (Parquet),
//! `journal` the format of the file that is being written, `files` the directory of both, `keeper` the handling of failures, `writer`
//! the thread, and `worker` the common part of all threads here. [`export`] sends to collectors.

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

/// The contents of the logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Nothing.
    Off,
    /// For each egress IP, the nodes that held its ports, with times.
    Leases,
    /// In addition, the start, the end and the pod of each flow.
    Flows,
}

/// `flowLog` of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLog {
    /// `mode`.
    pub mode: Mode,
    /// `destinations`: whether the flow log has remote addresses.
    pub destinations: bool,
    /// `retention`: the time for which a segment is kept after its last event.
    pub retention: Duration,
    /// `export`: the collectors to which logs are exported.
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
    /// The log's directory.
    pub directory: PathBuf,
    /// The time for which a segment is kept after its last event.
    pub retention: Duration,
    /// The maximum total size of the files in bytes; the oldest are removed first.
    pub bytes: u64,
}

/// The maximum size of a log in bytes.
pub const MAX_BYTES: u64 = 1 << 30;

/// Splits a pod into namespace and name; a text without a namespace is an address.
fn pod_parts(pod: &str) -> (Option<&str>, &str) {
    pod.split_once('/').map_or((None, pod), |(namespace, name)| (Some(namespace), name))
}

/// Microseconds since 1970.
pub type Instant = i64;

/// Returns the current time.
pub fn now() -> Instant {
    micros(SystemTime::now())
}

fn micros(time: SystemTime) -> Instant {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as Instant)
}
