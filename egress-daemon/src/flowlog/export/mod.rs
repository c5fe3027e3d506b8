//! Exports what is logged (`flowLog.export`): to collectors as it is logged, as IPFIX by UDP or as lines of JSON by TCP, and to object
//! stores once a segment is finished.
//!
//! Each collector has a thread and a queue of its own ([`MAX_QUEUED`]). One that is unreachable or too slow only loses its records, which
//! are counted. For an object store, segments wait where they are. `record` is what is sent, `ipfix` and `json` how it is encoded,
//! `deliver` the thread, `upload` the task that copies segments.

mod deliver;
mod ipfix;
mod json;
mod record;
#[cfg(test)]
mod tests;
mod upload;
#[cfg(test)]
mod upload_tests;

pub use deliver::{Exporters, MAX_QUEUED};
pub use record::{Change, Fate, Flow, Ports, Record};
pub use upload::Uploads;

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::AtomicU64;

/// How many collectors may be named: each has a thread and a queue.
pub const MAX_COLLECTORS: usize = 8;

/// A collector, as in `flowLog.export`: `ipfix://HOST:PORT`, `json://HOST:PORT` or `s3://BUCKET/PREFIX`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collector {
    /// How records are encoded.
    pub format: Format,
    /// A host name or an address, and a port: `collector.example:4739`, `[2001:db8::7]:4739`. For [`Format::S3`] a bucket and a prefix in
    /// it: `logs/egress`.
    pub address: String,
}

/// How records are encoded and sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// IPFIX messages (RFC 7011) with the NAT events of RFC 8158, in UDP datagrams.
    Ipfix,
    /// One JSON object per line, in a TCP connection.
    Json,
    /// Parquet segments, in a bucket of an object store with the S3 protocol.
    S3,
}

/// What became of the records for one collector, or segments for [`Format::S3`], for metrics.
#[derive(Debug)]
pub struct Sent {
    /// The collector, as in the configuration.
    pub collector: String,
    /// Those that were sent. With UDP their arrival is not confirmed.
    pub sent: AtomicU64,
    /// Those that were not: the collector was unreachable or too slow, or a segment was removed before the store
    /// accepted it.
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

/// The two parts of the address of [`Format::S3`].
fn bucket_and_prefix(address: &str) -> (&str, &str) {
    address.split_once('/').unwrap_or((address, ""))
}

/// S3's rules for names of buckets, and characters that need no quotes in keys.
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
