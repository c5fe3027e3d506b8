//! Decides what a writer writes and when: changes, signs of life, and where changes may be missing or have a wrong time. Pure.

use std::collections::BTreeSet;

use super::{ALIVE, Book, LeaseEvent, LeaseRecord, PortLease};
use crate::model::NodeName;

/// How late a change may be seen before its time is in doubt, and how much the clock may be adjusted in between: as much as answers allow
/// for anyway.
const LATE: i64 = 2_000_000;

/// When a writer looks for changes, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// Since 1970, by a clock that may be set.
    pub at: i64,
    /// Since some moment, by a clock that is never set.
    pub uptime: i64,
}

/// Decides what is written.
#[derive(Clone, Debug, Default)]
pub struct Scribe {
    book: Book,
    /// What changed since the last look.
    changes: Vec<LeaseEvent>,
    /// How many of the events of the last look are changes.
    unsaved: u64,
    /// The event that a list of all leases must follow, until both are written.
    whole: Option<LeaseEvent>,
    /// Whether changes may have been missed, or seen late, since the last record.
    missed: bool,
    /// How many events since the last record were not written.
    lost: u64,
    /// The time of the last record.
    last: i64,
    looked: Moment,
}

impl Scribe {
    /// Begins writing: all leases that were taken in are listed first.
    pub fn begin(&mut self, moment: Moment) {
        let book = std::mem::take(&mut self.book);
        *self = Self { book, whole: Some(LeaseEvent::Started), last: moment.at, looked: moment, ..Self::default() };
    }

    /// Takes all leases of a node.
    pub fn take_in(&mut self, node: &NodeName, leases: BTreeSet<PortLease>) {
        self.changes.extend(self.book.take_in(node, leases));
    }

    /// Returns the nodes that have leases.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.book.nodes()
    }

    /// Notes that the writer does not receive changes now.
    pub fn miss(&mut self) {
        self.missed = true;
    }

    /// Returns the records to write; all that the writer has received must be taken in. If there are any, [`Self::note`] must follow.
    pub fn look(&mut self, moment: Moment) -> Vec<LeaseRecord> {
        let at = moment.at;
        let elapsed = moment.uptime - self.looked.uptime;
        // The time that the clock shows unless it was set.
        let expected = self.looked.at + elapsed;
        let is_set_back = at < expected - LATE;
        let is_late = elapsed.max(at - self.looked.at) > LATE;
        self.looked = moment;
        let mut events = std::mem::take(&mut self.changes);
        // A block that one node returns may be granted to another.
        events.sort_by_key(|event| matches!(event, LeaseEvent::Granted(_)));
        self.unsaved = events.len() as u64;
        self.missed |= is_late && !events.is_empty();
        let mut records = Vec::new();
        let mut write = |at, event| records.push(LeaseRecord { at, event });
        let before = if is_set_back { expected } else { at };
        // [`LeaseEvent::Started`] says the same.
        let begins = self.whole == Some(LeaseEvent::Started);
        if self.missed && !begins {
            write(before, LeaseEvent::Lost(0));
        } else if is_set_back {
            // This record's time and the next one's tell a reader how far.
            write(before, LeaseEvent::Alive);
        }
        if self.lost > 0 && !begins {
            write(at, LeaseEvent::Lost(self.lost + self.unsaved));
        }
        if let Some(first) = &self.whole {
            events = std::iter::once(first.clone()).chain(self.book.held()).collect();
        } else if events.is_empty() && (!records.is_empty() || at - self.last >= ALIVE) {
            events.push(LeaseEvent::Alive);
        }
        records.extend(events.into_iter().map(|event| LeaseRecord { at, event }));
        records
    }

    /// Notes whether the records of the last look, or of [`Self::again`], were written. Returns how many events that loses.
    pub fn note(&mut self, written: bool) -> u64 {
        let unsaved = std::mem::take(&mut self.unsaved);
        if written {
            (self.whole, self.missed, self.lost, self.last) = (None, false, 0, self.looked.at);
            return 0;
        }
        // A lost sign of life leaves doubt, too.
        let lost = unsaved.max(u64::from(self.lost == 0));
        self.lost += lost;
        self.whole.get_or_insert(LeaseEvent::Continued);
        lost
    }

    /// Returns the records that another file begins with.
    pub fn again(&self) -> Vec<LeaseRecord> {
        let events = std::iter::once(LeaseEvent::Continued).chain(self.book.held());
        events.map(|event| LeaseRecord { at: self.looked.at, event }).collect()
    }

    /// Returns the last record, if everything before it is written.
    pub fn stop(&self, at: i64) -> Option<LeaseRecord> {
        let is_written = self.whole.is_none() && self.changes.is_empty() && !self.missed && self.lost == 0;
        is_written.then_some(LeaseRecord { at, event: LeaseEvent::Stopped })
    }
}
