//! The journal: records as lines of JSON, appended until the journal becomes a segment. A line truncated by a crash is not a record. Pure.

use egress_core::leaselog::{LeaseEvent, LeaseRecord, PortLease};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// The names of events, in segments and journals.
pub(super) mod name {
    pub(in super::super) const STARTED: &str = "started";
    pub(in super::super) const CONTINUED: &str = "continued";
    pub(in super::super) const HELD: &str = "held";
    pub(in super::super) const GRANTED: &str = "granted";
    pub(in super::super) const RETURNED: &str = "returned";
    pub(in super::super) const ALIVE: &str = "alive";
    pub(in super::super) const STOPPED: &str = "stopped";
    pub(in super::super) const LOST: &str = "lost";
}

/// A record as one row. Fields that the event does not have are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Row {
    pub(super) at: i64,
    pub(super) event: String,
    #[serde(rename = "egressIP", skip_serializing_if = "Option::is_none")]
    pub(super) egress_ip: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first_port: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) last_port: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) node: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lost: Option<i64>,
}

impl Row {
    pub(super) fn of(record: &LeaseRecord) -> Self {
        let plain = |event: &str| Self { at: record.at, event: event.to_owned(), ..Self::default() };
        let leased = |event, lease: &PortLease| Self {
            egress_ip: Some(lease.egress_ip.to_string()),
            first_port: Some(lease.first_port.into()),
            last_port: Some(lease.last_port.into()),
            node: Some(lease.node.to_string()),
            ..plain(event)
        };
        match &record.event {
            LeaseEvent::Started => plain(name::STARTED),
            LeaseEvent::Continued => plain(name::CONTINUED),
            LeaseEvent::Held(lease) => leased(name::HELD, lease),
            LeaseEvent::Granted(lease) => leased(name::GRANTED, lease),
            LeaseEvent::Returned(lease) => leased(name::RETURNED, lease),
            LeaseEvent::Alive => plain(name::ALIVE),
            LeaseEvent::Stopped => plain(name::STOPPED),
            LeaseEvent::Lost(count) => Self { lost: i64::try_from(*count).ok(), ..plain(name::LOST) },
        }
    }

    /// Converts the row to a record; `None` if it is not a valid record.
    pub(super) fn record(&self) -> Option<LeaseRecord> {
        let lease = || {
            Some(PortLease {
                egress_ip: self.egress_ip.as_ref()?.parse::<IpAddr>().ok()?,
                first_port: u16::try_from(self.first_port?).ok()?,
                last_port: u16::try_from(self.last_port?).ok()?,
                node: self.node.as_deref()?.into(),
            })
        };
        let event = match self.event.as_str() {
            name::STARTED => LeaseEvent::Started,
            name::CONTINUED => LeaseEvent::Continued,
            name::HELD => LeaseEvent::Held(lease()?),
            name::GRANTED => LeaseEvent::Granted(lease()?),
            name::RETURNED => LeaseEvent::Returned(lease()?),
            name::ALIVE => LeaseEvent::Alive,
            name::STOPPED => LeaseEvent::Stopped,
            name::LOST => LeaseEvent::Lost(u64::try_from(self.lost?).ok()?),
            _ => return None,
        };
        Some(LeaseRecord { at: self.at, event })
    }
}

/// Encodes records as lines to append.
pub(super) fn encode(records: &[LeaseRecord]) -> Vec<u8> {
    let line = |record| serde_json::to_string(&Row::of(record)).map(|line| line + "\n").unwrap_or_default();
    records.iter().map(line).collect::<String>().into_bytes()
}

/// Returns whether a text begins like a journal of leases.
pub(super) fn is_one(text: &[u8]) -> bool {
    let first = text.split(|byte| *byte == b'\n').next().unwrap_or_default();
    serde_json::from_slice::<Row>(first).is_ok_and(|row| row.record().is_some())
}

/// Decodes the records of a journal. Broken lines before a record become a `Lost` record with their number.
pub(super) fn decode(text: &[u8]) -> Vec<LeaseRecord> {
    let mut records: Vec<LeaseRecord> = Vec::new();
    let mut broken = 0;
    for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let row: Option<Row> = serde_json::from_slice(line).ok();
        match row.and_then(|row| row.record()) {
            Some(record) => {
                if broken > 0 {
                    records.push(LeaseRecord { at: record.at, event: LeaseEvent::Lost(broken) });
                    broken = 0;
                }
                records.push(record);
            }
            None => broken += 1,
        }
    }
    records
}
