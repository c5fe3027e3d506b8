//! Answers which node held a port at a time, how certain that is, and why it is not more certain.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::{ALIVE, BLIND, LeaseEvent, LeaseRecord, PortLease};
use crate::model::NodeName;

/// A question to the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseQuestion {
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// The port.
    pub port: u16,
    /// The earliest time in question.
    pub from: i64,
    /// The latest time in question.
    pub until: i64,
    /// How much clocks may differ, and how late writes may be.
    pub slack: i64,
}

/// A node that held the port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseHolder {
    /// The node.
    pub node: NodeName,
    /// The first port of the range that it got.
    pub first_port: u16,
    /// The last port of that range.
    pub last_port: u16,
    /// When it got the ports; none if that was before this log begins, or while nothing was written.
    pub from: Option<i64>,
    /// When the ports were taken from it; none if that was not within this log, or while nothing was written.
    pub until: Option<i64>,
}

/// Why an answer is not certain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doubt {
    /// The lease changed at this time, which is so close that differences between clocks decide.
    Changed(i64),
    /// Changes from the first time to the second may be missing or have a wrong time: nothing was written, the writer received no changes,
    /// or its clock was set. None: the log does not reach that far.
    Unwritten(Option<i64>, Option<i64>),
    /// This many events before this time were not written.
    Lost(u64, i64),
    /// Logs of several gateways contradict each other.
    Contradicted,
}

/// The log's answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseAnswer {
    /// The nodes that may have held the port; at most one if there is no doubt.
    pub holders: BTreeSet<LeaseHolder>,
    /// Why the answer is not certain.
    pub doubts: BTreeSet<Doubt>,
}

/// Answers a question from the records of one log, in their order.
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

/// Combines the answers of several logs: one without doubts is believed.
pub fn together(answers: Vec<LeaseAnswer>) -> Option<LeaseAnswer> {
    let nodes = |answer: &LeaseAnswer| -> BTreeSet<NodeName> {
        answer.holders.iter().map(|holder| holder.node.clone()).collect()
    };
    let sure: Vec<&LeaseAnswer> = answers.iter().filter(|answer| answer.doubts.is_empty()).collect();
    let agree = sure.windows(2).all(|two| matches!(two, [one, other] if nodes(one) == nodes(other)));
    if let (Some(first), true) = (sure.first(), agree) {
        return Some((*first).clone());
    }
    let doubt = (!agree).then_some(Doubt::Contradicted);
    let mut all = answers.into_iter().reduce(|mut all, one| {
        all.holders.extend(one.holders);
        all.doubts.extend(one.doubts);
        all
    })?;
    all.doubts.extend(doubt);
    Some(all)
}

/// A holder whose lease has not been seen to end.
struct Open {
    held: LeaseHolder,
    /// The earliest time at which it may have become a holder.
    earliest: i64,
    /// A time until which it was a holder, if the clock was set back from there.
    latest: i64,
}

struct Reading {
    question: LeaseQuestion,
    /// The nodes that hold the port.
    open: Vec<Open>,
    /// The nodes that held the port before the list of all leases that is being read.
    unconfirmed: Vec<Open>,
    /// The last period in which changes may be missing.
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
        self.doubt(record);
        match &record.event {
            LeaseEvent::Started | LeaseEvent::Continued => self.unconfirmed = std::mem::take(&mut self.open),
            LeaseEvent::Held(lease) if self.is_meant(lease) => self.confirm(lease),
            LeaseEvent::Granted(lease) if self.is_meant(lease) => {
                self.change(at);
                let (from, until) = self.unwritten;
                let earliest = if (from..=until).contains(&at) { from } else { at };
                self.open.push(Open { held: holder(lease, Some(at)), earliest, latest: at });
            }
            LeaseEvent::Returned(lease) if self.is_meant(lease) => {
                self.change(at);
                let (ended, open) =
                    std::mem::take(&mut self.open).into_iter().partition(|open| open.held.node == lease.node);
                self.open = open;
                self.close(ended, Some(at), at);
            }
            LeaseEvent::Held(_)
            | LeaseEvent::Granted(_)
            | LeaseEvent::Returned(_)
            | LeaseEvent::Lost(_)
            | LeaseEvent::Alive
            | LeaseEvent::Stopped => {}
        }
        self.last = Some(at);
    }

    /// Adds the doubts about the time between the last record and this one.
    fn doubt(&mut self, record: &LeaseRecord) {
        let at = record.at;
        let Some(last) = self.last else {
            self.gap(None, Some(at));
            self.unwritten = (i64::MIN, at);
            return;
        };
        let is_silent = at - last > ALIVE.saturating_add(self.question.slack);
        let is_blind = matches!(record.event, LeaseEvent::Started | LeaseEvent::Lost(0));
        let since = if is_blind { last.saturating_sub(BLIND) } else { last };
        let gap = match record.event {
            // The clock was set back, so these times occurred twice. That may have been at any time of a silence before.
            _ if at < last && self.unwritten.1 == last => (self.unwritten.0.saturating_sub(last - at), last),
            // The former writer may have continued for a while after its last record.
            _ if at < last && record.event == LeaseEvent::Started => (at.min(since), last.saturating_add(ALIVE)),
            _ if at < last => (at.min(since), last),
            _ if is_blind => (since, at),
            LeaseEvent::Lost(count) => {
                if self.overlaps(last, at) {
                    self.answer.doubts.insert(Doubt::Lost(count, at));
                }
                self.unwritten = (last, at);
                return;
            }
            _ if is_silent => (last, at),
            LeaseEvent::Continued if at > last => {
                self.unwritten = (last, at);
                return;
            }
            _ => return,
        };
        self.gap(Some(gap.0), Some(gap.1));
        self.unwritten = gap;
        if at < last {
            for open in &mut self.open {
                (open.earliest, open.latest) = (open.earliest.min(at), open.latest.max(last));
            }
        }
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

    /// Returns whether a period, from one time to another, concerns the time in question.
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

    /// Takes a lease in the list of all leases: it existed before, or began while nothing was written.
    fn confirm(&mut self, lease: &PortLease) {
        let before = self.unconfirmed.iter().position(|open| open.held.node == lease.node);
        let (earliest, latest) = self.unwritten;
        let new = || Open { held: holder(lease, None), earliest, latest };
        let open = before.map_or_else(new, |place| self.unconfirmed.swap_remove(place));
        self.open.push(open);
    }

    /// Ends the list of all leases: a lease that is not in it ended while nothing was written.
    fn settle(&mut self) {
        let ended = std::mem::take(&mut self.unconfirmed);
        self.close(ended, None, self.unwritten.1);
    }

    /// Closes leases that were held until `end` at the latest.
    fn close(&mut self, holders: Vec<Open>, until: Option<i64>, end: i64) {
        for Open { held, earliest, latest } in holders {
            if self.overlaps(earliest, end.max(latest)) {
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
