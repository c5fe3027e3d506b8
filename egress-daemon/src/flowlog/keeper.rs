//! Handling of failures and growth for both logs: a log begins as soon as the disk permits, long journals become segments, and old files
//! are removed even while writes fail or no log is open.

use super::files::{Entry, expire};
use super::{Instant, Limits, Log, LogError, now};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

/// The delay before a failed operation other than a write is retried, in microseconds.
const PAUSE: Instant = 60_000_000;

/// The maximum length of a journal.
#[derive(Clone, Copy, Debug)]
pub(super) struct Longest {
    /// In records, besides its first records.
    pub(super) records: usize,
    /// In microseconds.
    pub(super) age: Instant,
}

/// A log that may not be open yet.
#[derive(Debug)]
pub(super) struct Keeper<E> {
    limits: Limits,
    /// The subject of the log, for messages.
    what: &'static str,
    longest: Longest,
    log: Option<Log<E>>,
    /// The number of records with which the journal begins.
    header: usize,
    /// The time of the last attempt to begin a journal, if it failed.
    refused: Option<Instant>,
    /// Whether the last write failed.
    is_unwritten: bool,
    /// Whether a new journal has begun since the log was tidied.
    is_new: bool,
    /// The last time at which the log was tidied or old files were removed, and whether that failed.
    tidied: (Instant, bool),
}

impl<E: Entry> Keeper<E> {
    pub(super) fn new(limits: Limits, what: &'static str, longest: Longest) -> Self {
        let (log, refused, tidied) = (None, None, (0, false));
        Self { limits, what, longest, log, header: 0, refused, is_unwritten: false, is_new: false, tidied }
    }

    /// Returns the log's directory.
    pub(super) fn directory(&self) -> &Path {
        &self.limits.directory
    }

    /// Returns whether the log is open.
    pub(super) fn is_open(&self) -> bool {
        self.log.is_some()
    }

    /// Opens the log, unless an attempt failed within the last minute. Returns whether it is open.
    pub(super) fn open(&mut self, at: Instant) -> bool {
        if self.log.is_none() && self.may_begin(at) {
            // Expired files go first, which may free the space that the log needs.
            self.expire(at);
            let opened = Log::open(self.limits.clone(), at);
            self.log = self.begun(at, opened);
        }
        self.log.is_some()
    }

    /// Writes records. Returns whether they are on disk.
    pub(super) fn append(&mut self, records: &[E]) -> bool {
        let Some(log) = &mut self.log else { return false };
        let is_first = log.journal().0 == 0;
        let result = log.append(records);
        if is_first && result.is_ok() {
            self.header = records.len();
        }
        let is_known = std::mem::replace(&mut self.is_unwritten, result.is_err());
        self.report(result, is_known).is_some()
    }

    /// Begins another journal if the current one is too long. Returns whether it did.
    pub(super) fn rotate(&mut self, at: Instant) -> bool {
        let (most, may_begin) = (self.longest, self.may_begin(at));
        let Some(log) = &mut self.log else { return false };
        let (records, began) = log.journal();
        // The clock may have been set back.
        let is_long = records.saturating_sub(self.header) >= most.records || (at - began).abs() >= most.age;
        if !is_long || !may_begin {
            return false;
        }
        let rotated = log.rotate(at);
        self.begun(at, rotated).is_some()
    }

    /// Converts earlier journals to segments and removes old files: once a new journal has its first records, and every minute while any
    /// operation fails. While no log is open, only removes old files: a node that is no longer a gateway may never open its log again.
    pub(super) fn tend(&mut self, at: Instant) {
        let Some(log) = &self.log else { return self.expire(at) };
        let (tidied, is_untidy) = self.tidied;
        let is_next = self.is_new && log.journal().0 > 0;
        if is_next || (self.is_unwritten || is_untidy) && (at - tidied).abs() >= PAUSE {
            let result = log.tidy(at);
            self.tidied = (at, result.is_err());
            self.is_new &= !is_next;
            self.report(result, is_untidy);
        }
    }

    /// Serves a log that the mode switches off: only removes old files, until the directory is gone or the thread is stopped.
    pub(super) fn idle(mut self, stopped: &Receiver<()>) {
        while self.directory().exists() {
            self.tend(now());
            if stopped.recv_timeout(Duration::from_micros(PAUSE as u64)) != Err(RecvTimeoutError::Timeout) {
                break;
            }
        }
    }

    /// Removes old files of a log that is not open, at most once a minute.
    fn expire(&mut self, at: Instant) {
        let (tidied, is_untidy) = self.tidied;
        if (at - tidied).abs() >= PAUSE {
            let result = expire(&self.limits, at, None);
            self.tidied = (at, result.is_err());
            self.report(result, is_untidy);
        }
    }

    /// Makes each write fail, as a disk without room does, or lets them succeed again.
    #[cfg(test)]
    pub(super) fn fill(&mut self, full: bool) -> std::io::Result<()> {
        self.log.as_mut().map_or(Ok(()), |log| log.fill(full))
    }

    fn may_begin(&self, at: Instant) -> bool {
        self.refused.is_none_or(|refused| (at - refused).abs() >= PAUSE)
    }

    /// Records whether a journal could be begun.
    fn begun<T>(&mut self, at: Instant, result: Result<T, LogError>) -> Option<T> {
        let is_known = self.refused.is_some();
        self.refused = result.is_err().then_some(at);
        self.is_new |= result.is_ok();
        self.report(result, is_known)
    }

    /// Logs an error: the first of a series of failures at level error, the others at level debug.
    fn report<T>(&self, result: Result<T, LogError>, is_known: bool) -> Option<T> {
        match result {
            Ok(done) => return Some(done),
            Err(error) if is_known => tracing::debug!("the log of {} still fails: {error}", self.what),
            Err(error) => tracing::error!("the log of {}: {error}", self.what),
        }
        None
    }
}
