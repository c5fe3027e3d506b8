//! Who held a port at a time, how sure that is, and why not surer.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::{LeaseEvent, LeaseRecord, PortLease};
use crate::model::NodeName;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseQuestion {
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// The port.
    pub port: u16,
    /// The earliest time that is meant.
    pub from: i64,
    /// The latest time that is meant.
    pub until: i64,
    /// By how much clocks may differ, and writing may be late.
    pub slack: i64,
}

/// A node that held the port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseHolder {
    /// The node.
    pub node: NodeName,
    /// The first of the ports that it got together.
    pub first_port: u16,
    /// The last of them.
    pub last_port: u16,
    /// When it got them; none: before this log begins, or while nobody wrote.
    pub from: Option<i64>,
    /// When they were taken from it; none: not as far as this log goes, or while nobody wrote.
    pub until: Option<i64>,
}

/// Why an answer is not sure.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doubt {
    /// The lease changed at this time, which is so close that clocks decide.
    Changed(i64),
    /// Nobody wrote from the first time to the second; none: the log does not reach so far.
    Unwritten(Option<i64>, Option<i64>),
    /// So many events before this time were not written.
    Lost(u64, i64),
}

/// What can be said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseAnswer {
    /// The nodes that may have been it; one, or none, if there is no doubt.
    pub holders: BTreeSet<LeaseHolder>,
    /// Why it is not sure.
    pub doubts: BTreeSet<Doubt>,
}

/// Reads the records of one log in their order.
pub fn answer<'a>(records: impl IntoIterator<Item = &'a LeaseRecord>, question: LeaseQuestion) -> LeaseAnswer {
    let mut reading = Reading {
        question,
        open: Vec::new(),
        unconfirmed: Vec::new(),
        unwritten: (i64::MIN, i64::MIN),
        last: None,
        answer: LeaseAnswer::default(),
    };
    for record in records {
        reading.read(record);
    }
    reading.finish()
}

/// A holder, and when it may have become one at the earliest.
type Open = (LeaseHolder, i64);

struct Reading {
    question: LeaseQuestion,
    /// Who holds the port.
    open: Vec<Open>,
    /// Who held it before the list of all leases that is being read.
    unconfirmed: Vec<Open>,
    /// Since when nobody wrote before that list, and when it was made.
    unwritten: (i64, i64),
    /// The time of the last record.
    last: Option<i64>,
    answer: LeaseAnswer,
}

impl Reading {
    fn read(&mut self, record: &LeaseRecord) {
        let at = record.at;
        if !matches!(record.event, LeaseEvent::Held(_)) {
            self.settle();
        }
        if self.last.is_none() && !matches!(record.event, LeaseEvent::Started) {
            self.gap(None, Some(at));
        }
        match &record.event {
            LeaseEvent::Started => {
                self.gap(self.last, Some(at));
                self.unwritten = (self.last.unwrap_or(i64::MIN), at);
                self.unconfirmed = std::mem::take(&mut self.open);
            }
            LeaseEvent::Continued => {
                self.unwritten = (self.last.unwrap_or(i64::MIN), at);
                self.unconfirmed = std::mem::take(&mut self.open);
            }
            LeaseEvent::Held(lease) if self.is_meant(lease) => self.confirm(lease),
            LeaseEvent::Granted(lease) if self.is_meant(lease) => {
                self.change(at);
                self.open.push((holder(lease, Some(at)), at));
            }
            LeaseEvent::Returned(lease) if self.is_meant(lease) => {
                self.change(at);
                let (ended, open) =
                    std::mem::take(&mut self.open).into_iter().partition(|(held, _)| held.node == lease.node);
                self.open = open;
                self.close(ended, Some(at), at);
            }
            LeaseEvent::Lost(count) => {
                let since = self.last.unwrap_or(i64::MIN);
                if self.overlaps(since, at) {
                    self.answer.doubts.insert(Doubt::Lost(*count, at));
                }
            }
            LeaseEvent::Held(_)
            | LeaseEvent::Granted(_)
            | LeaseEvent::Returned(_)
            | LeaseEvent::Alive
            | LeaseEvent::Stopped => {}
        }
        self.last = Some(at);
    }

    fn finish(mut self) -> LeaseAnswer {
        self.settle();
        self.gap(self.last, None);
        let open = std::mem::take(&mut self.open);
        self.close(open, None, i64::MAX);
        self.answer
    }

    fn is_meant(&self, lease: &PortLease) -> bool {
        lease.egress_ip == self.question.egress_ip && (lease.first_port..=lease.last_port).contains(&self.question.port)
    }

    /// Whether something from one time to another concerns the time that is asked for.
    fn overlaps(&self, from: i64, until: i64) -> bool {
        from <= self.question.until.saturating_add(self.question.slack)
            && until >= self.question.from.saturating_sub(self.question.slack)
    }

    fn change(&mut self, at: i64) {
        if self.overlaps(at, at) {
            self.answer.doubts.insert(Doubt::Changed(at));
        }
    }

    fn gap(&mut self, from: Option<i64>, until: Option<i64>) {
        if self.overlaps(from.unwrap_or(i64::MIN), until.unwrap_or(i64::MAX)) {
            self.answer.doubts.insert(Doubt::Unwritten(from, until));
        }
    }

    /// A lease of the list of all is one that was there before, or that came while nobody wrote.
    fn confirm(&mut self, lease: &PortLease) {
        let before = self.unconfirmed.iter().position(|(held, _)| held.node == lease.node);
        let new = || (holder(lease, None), self.unwritten.0);
        let held = before.map_or_else(new, |place| self.unconfirmed.swap_remove(place));
        self.open.push(held);
    }

    /// The list of all leases is read: what was not in it ended while nobody wrote.
    fn settle(&mut self) {
        let ended = std::mem::take(&mut self.unconfirmed);
        self.close(ended, None, self.unwritten.1);
    }

    /// These were held until `end` at the latest.
    fn close(&mut self, holders: Vec<Open>, until: Option<i64>, end: i64) {
        for (held, earliest) in holders {
            if self.overlaps(earliest, end) {
                self.answer.holders.insert(LeaseHolder { until, ..held });
            }
        }
    }
}

fn holder(lease: &PortLease, from: Option<i64>) -> LeaseHolder {
    LeaseHolder {
        node: lease.node.clone(),
        first_port: lease.first_port,
        last_port: lease.last_port,
        from,
        until: None,
    }
}
