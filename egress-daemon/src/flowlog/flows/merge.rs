//! Converts the lines of a journal to flows, by matching starts with ends. Pure.

use super::{Entry, Line, Recorded, Span};
use crate::flowlog::Instant;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

/// A flow, with numbers for names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) entry: Entry,
    pub(super) ended: Option<Instant>,
    pub(super) refused: bool,
    /// Whether it began in this journal.
    pub(super) began: bool,
}

impl Row {
    /// Returns the ticket, if another file may have the rest of the flow.
    pub(super) fn ticket(&self) -> Option<u32> {
        (!self.began || self.ended.is_none()).then_some(self.entry.ticket)
    }
}

/// The contents of a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Journal {
    pub(super) span: Span,
    pub(super) node: String,
    pub(super) names: BTreeMap<u32, String>,
    pub(super) rows: Vec<Row>,
}

/// The index of a flow's row, by the fields that the start and the end have in common.
type Begun = HashMap<(u32, u16, IpAddr), usize>;

impl Journal {
    /// Reads lines. A broken line counts as a lost event.
    pub(super) fn of(lines: impl Iterator<Item = Option<Line>>) -> Option<Self> {
        let mut journal = Self::default();
        let mut begun = Begun::new();
        let (mut broken, mut any) = (0, false);
        for line in lines {
            let Some(line) = line else {
                broken += 1;
                continue;
            };
            any = true;
            if let (Line::Alive(at, _), true) = (&line, broken > 0) {
                journal.span.lost.push((journal.span.until, *at, broken));
                broken = 0;
            }
            journal.take(line, &mut begun);
        }
        // A truncated last line was never synced.
        any.then_some(journal)
    }

    fn take(&mut self, line: Line, begun: &mut Begun) {
        match line {
            Line::Started(at, node) => {
                self.span = Span { from: at, until: at, started: true, ..Span::default() };
                self.node = node;
            }
            Line::Continued(at, node) => {
                self.span = Span { from: at, until: at, ..Span::default() };
                self.node = node;
            }
            Line::Oldest(began) => self.span.oldest = Some(began),
            Line::Alive(at, _) | Line::Stopped(at) => self.span.until = self.span.until.max(at),
            Line::Lost(from, until, count) => self.span.lost.push((from, until, count)),
            Line::Name(number, name) => drop(self.names.insert(number, name)),
            Line::Began(entry) => {
                begun.insert((entry.ticket, entry.port, entry.egress_ip), self.rows.len());
                self.rows.push(Row { entry, ended: None, refused: false, began: true });
            }
            Line::Ended(entry, last) => self.end(entry, last, false, begun),
            Line::Refused(entry, last) => self.end(entry, last, true, begun),
        }
    }

    fn end(&mut self, entry: Entry, last: Instant, refused: bool, begun: &mut Begun) {
        let known = self.span.until;
        let place = begun.remove(&(entry.ticket, entry.port, entry.egress_ip));
        match place.and_then(|place| self.rows.get_mut(place)) {
            // The first record counts, since the policy's number may have been reused by now.
            Some(row) => {
                // If the clock was set back in between, the flow was open at least until the last entry before the end.
                let ended = if last < row.entry.began { known.max(row.entry.began) } else { last };
                (row.ended, row.refused) = (Some(ended), refused);
            }
            None => {
                let ended = Some(last.max(entry.began));
                self.rows.push(Row { entry, ended, refused, began: false });
            }
        }
    }

    /// Returns a number's name, if it has one.
    pub(super) fn name(&self, number: u32) -> Option<&str> {
        self.names.get(&number).map(String::as_str)
    }

    /// Resolves the names of a row, for use outside the file.
    pub(super) fn recorded(&self, row: &Row) -> Recorded {
        let Row { entry, ended, refused, .. } = *row;
        Recorded {
            egress_ip: entry.egress_ip,
            port: entry.port,
            protocol: entry.protocol,
            pod: self.name(entry.pod).unwrap_or("?").to_owned(),
            node: self.node.clone(),
            policy: self.name(entry.policy).map(str::to_owned),
            destination: entry.destination,
            began: entry.began,
            ended,
            refused,
            ticket: row.ticket(),
        }
    }
}
