//! The lines of a flow log's journal, each a JSON array or object. Pure.

use super::merge::Journal;
use super::segment;
use crate::flowlog::{Instant, files};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// The data of a flow's start, which its end repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Packed", into = "Packed")]
pub struct Entry {
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// The translated port.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    /// Distinguishes it from another flow that began at the same time.
    pub ticket: u32,
    /// The time of its start.
    pub began: Instant,
    /// The [`Line::Name`] of its pod.
    pub pod: u32,
    /// The [`Line::Name`] of its policy; 0 if unknown.
    pub policy: u32,
    /// The remote address and port.
    pub destination: Option<SocketAddr>,
}

type Packed = (IpAddr, u16, u8, u32, Instant, u32, u32, Option<SocketAddr>);

impl From<Packed> for Entry {
    fn from((egress_ip, port, protocol, ticket, began, pod, policy, destination): Packed) -> Self {
        Self { egress_ip, port, protocol, ticket, began, pod, policy, destination }
    }
}

impl From<Entry> for Packed {
    fn from(e: Entry) -> Self {
        (e.egress_ip, e.port, e.protocol, e.ticket, e.began, e.pod, e.policy, e.destination)
    }
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Line {
    /// The journal of this node begins, and flows before it were not recorded.
    Started(Instant, String),
    /// The journal of this node begins, and no event before it was missed.
    Continued(Instant, String),
    /// The start of the oldest flow that was open when the journal began; absent if no flow was open.
    Oldest(Instant),
    /// All events up to now are written. Has the number of events that the programs have lost since their maps were created.
    Alive(Instant, u64),
    /// Writing ends, and no event up to now is missing.
    Stopped(Instant),
    /// This many events between two times are missing; 0 means an unknown number.
    Lost(Instant, Instant, u64),
    /// The meaning of a number (not 0) in the lines after this one.
    Name(u32, String),
    /// A flow began.
    Began(Entry),
    /// A flow was removed; its last packet came at this time.
    Ended(Entry, Instant),
    /// A flow was removed before the host's firewall let any packet of it pass.
    Refused(Entry, Instant),
}

/// Encodes lines to append.
pub(super) fn encode(lines: &[Line]) -> Vec<u8> {
    let mut text = Vec::with_capacity(lines.len() * 96);
    for line in lines {
        // Every value of a line can be serialised, and writing to memory does not fail.
        if serde_json::to_writer(&mut text, line).is_ok() {
            text.push(b'\n');
        }
    }
    text
}

/// Returns whether a text begins like a journal of flows.
pub(in crate::flowlog) fn is_journal(text: &[u8]) -> bool {
    decode(text, |_| true).next().flatten().is_some()
}

/// Decodes the lines of a journal that `wanted` accepts; `None` for a broken line.
pub(super) fn decode(text: &[u8], wanted: impl Fn(&[u8]) -> bool) -> impl Iterator<Item = Option<Line>> {
    let lines = text.split(|byte| *byte == b'\n').filter(move |line| !line.is_empty() && wanted(line));
    lines.map(|line| serde_json::from_slice(line).ok())
}

/// Returns a filter for lines that may be about a flow with this port, or are not about a flow.
pub(super) fn may_have(port: u16) -> impl Fn(&[u8]) -> bool {
    let number = format!(",{port},");
    move |line| {
        let about_flow = [&b"{\"began\""[..], b"{\"ended\"", b"{\"refused\""].iter().any(|kind| line.starts_with(kind));
        !about_flow || line.windows(number.len()).any(|window| window == number.as_bytes())
    }
}

impl files::Entry for Line {
    fn encode(lines: &[Self]) -> Vec<u8> {
        encode(lines)
    }

    fn segment(journal: &[u8]) -> parquet::errors::Result<Option<Vec<u8>>> {
        let Some(mut journal) = Journal::of(decode(journal, |_| true)) else { return Ok(None) };
        let mut segment = Vec::new();
        segment::write(&mut journal, &mut segment)?;
        Ok(Some(segment))
    }
}
