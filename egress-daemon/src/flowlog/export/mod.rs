//! Exports the logs (`flowLog.export`): record by record to collectors, as IPFIX by UDP or as lines of JSON by TCP, and segment by
//! segment to object stores.
//!
//! Each collector has its own thread and queue ([`MAX_QUEUED`]). A collector that is unreachable or too slow loses only its own records,
//! which are counted. Segments for an object store wait in the log's directory. `record` has the events, `ipfix` and `json` their
//! encodings, `deliver` the thread, and `upload` the task that copies segments.

mod deliver;
mod ipfix;
mod json;
mod record;
#[cfg(test)]
pub(super) mod tests;
mod upload;
#[cfg(test)]
mod upload_tests;

pub use deliver::{Exporters, MAX_QUEUED};
pub use record::{Change, Fate, Flow, Ports, Record};
pub use upload::Uploads;

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::AtomicU64;

/// The maximum number of collectors, since each has a thread and a queue.
pub const MAX_COLLECTORS: usize = 8;

/// A collector, as in `flowLog.export`: `ipfix://HOST:PORT`, `json://HOST:PORT` or `s3://BUCKET/PREFIX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// The encoding and the protocol.
    pub format: Format,
    /// A host name or an address, and a port: `collector.example:4739`, `[2001:db8::7]:4739`. For [`Format::S3`] a bucket and a prefix in
    /// it: `logs/egress`.
    pub address: String,
}

/// The encoding of records, and the protocol that carries them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// IPFIX messages (RFC 7011) with the NAT events of RFC 8158, in UDP datagrams.
    Ipfix,
    /// One JSON object per line, in a TCP connection.
    Json,
    /// Parquet segments, in a bucket of an object store with the S3 protocol.
    S3,
}

/// The numbers of sent and lost records for one collector, or of segments for [`Format::S3`], for metrics.
#[derive(Debug)]
pub struct Sent {
    /// The collector, as in the configuration.
    pub collector: String,
    /// The number sent. With UDP, their arrival is not confirmed.
    pub sent: AtomicU64,
    /// The number lost: the collector was unreachable or too slow, or a segment was removed before the store accepted it.
    pub lost: AtomicU64,
}

impl Sent {
    fn new(collector: &Collector) -> Self {
        Self { collector: collector.to_string(), sent: AtomicU64::new(0), lost: AtomicU64::new(0) }
    }
}

impl Format {
    const ALL: [(&'static str, Self); 3] = [("ipfix", Self::Ipfix), ("json", Self::Json), ("s3", Self::S3)];
}

impl FromStr for Collector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, address) = text.split_once("://").ok_or("it has no scheme")?;
        let format = Format::ALL.iter().find(|(name, _)| *name == scheme);
        let (_, format) = format.ok_or_else(|| format!("{scheme} is not a collector's scheme"))?;
        if *format == Format::S3 {
            check_bucket(address)?;
        } else {
            check_socket(address)?;
        }
        Ok(Self { format: *format, address: address.to_owned() })
    }
}

/// Splits the address of [`Format::S3`] into bucket and prefix.
fn bucket_and_prefix(address: &str) -> (&str, &str) {
    address.split_once('/').unwrap_or((address, ""))
}

/// Checks S3's rules for bucket names, and that the prefix has only characters that need no quoting in keys.
fn check_bucket(address: &str) -> Result<(), String> {
    let (bucket, prefix) = bucket_and_prefix(address);
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ".-".contains(c);
    if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(fits) {
        return Err(format!("{bucket:?} is not a bucket name"));
    }
    let fits = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if prefix.chars().all(fits) { Ok(()) } else { Err(format!("{prefix:?} is not a key prefix")) }
}

fn check_socket(address: &str) -> Result<(), String> {
    let (host, port) = address.rsplit_once(':').ok_or("it has no port")?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = match bare {
        Some(host) => host.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c)),
    };
    if !is_host {
        return Err(format!("{host:?} is not a host"));
    }
    if port.parse::<u16>().is_ok_and(|port| port > 0) { Ok(()) } else { Err(format!("{port:?} is not a port")) }
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Format::ALL.iter().find(|(_, format)| *format == self.format).map_or("", |(name, _)| *name);
        write!(f, "{name}://{}", self.address)
    }
}
