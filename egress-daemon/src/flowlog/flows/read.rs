//! Finds the flows of one port of an egress IP in a log. Reads only the parts of files that may have such flows.

use super::merge::Journal;
use super::{Found, Recorded, Span, line, segment};
use crate::flowlog::Instant;
use crate::flowlog::files::{LogError, SEGMENT, all, failed};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::path::Path;

/// The criteria of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The egress IP.
    pub egress_ip: IpAddr,
    /// The port.
    pub port: u16,
    /// Flows that ended before this time are omitted.
    pub from: Instant,
    /// Flows that began after this time are omitted.
    pub until: Instant,
}

/// Searches a log. Skips a file that disappears meanwhile. After a file that is missing or cannot be read, the recording counts as started
/// anew.
pub fn read(directory: &Path, wanted: &Wanted) -> Result<Found, LogError> {
    let mut found = Found::default();
    // The flows that earlier files list as open.
    let mut open = HashSet::new();
    let mut is_broken = false;
    for (began, path) in all(directory)? {
        let number = found.spans.len();
        // The end of a flow that an earlier file lists as open counts, whatever its time.
        let wanted = &Wanted { from: if open.is_empty() { wanted.from } else { Instant::MIN }, ..*wanted };
        let (mut span, flows) = match of_file(&path, wanted) {
            Ok(Some(of_file)) => of_file,
            Ok(None) => continue,
            Err(error) => {
                found.unread.push((number, error.to_string()));
                found.spans.push(Span { from: began, until: began, started: true, ..Span::default() });
                is_broken = true;
                continue;
            }
        };
        // A file begins no later than the previous one ends. Otherwise a file between them is missing, as from an incomplete copy.
        let is_missing = found.spans.last().is_some_and(|last| last.until < span.from);
        // It is unknown which flows ended in the previous file.
        span.started |= std::mem::take(&mut is_broken) || is_missing;
        let is_meant = |flow: &Recorded| {
            flow.egress_ip == wanted.egress_ip
                && flow.port == wanted.port
                && flow.began <= wanted.until
                && flow.ended.is_none_or(|ended| wanted.from <= ended)
        };
        let flows: Vec<Recorded> = flows.into_iter().filter(is_meant).collect();
        for flow in &flows {
            if let (Some(ticket), true) = (flow.ticket, flow.ended.is_some()) {
                open.remove(&ticket);
            }
        }
        if span.started {
            open.clear();
        }
        open.extend(flows.iter().filter(|flow| flow.ended.is_none()).filter_map(|flow| flow.ticket));
        found.flows.extend(flows.into_iter().map(|flow| (number, flow)));
        found.spans.push(span);
    }
    Ok(found)
}

/// Returns a file's span, and its flows that may have the wanted port; `None` if the file is empty or gone.
fn of_file(path: &Path, wanted: &Wanted) -> Result<Option<(Span, Vec<Recorded>)>, LogError> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed(path))?,
    };
    if path.extension().is_some_and(|extension| extension == SEGMENT) {
        let read = segment::read(file, wanted);
        return read.map(Some).map_err(|source| LogError::Segment { path: path.to_owned(), source });
    }
    let text = fs::read(path).map_err(failed(path))?;
    let Some(journal) = Journal::of(line::decode(&text, line::may_have(wanted.port))) else { return Ok(None) };
    let flows = journal.rows.iter().map(|row| journal.recorded(row)).collect();
    Ok(Some((journal.span, flows)))
}
