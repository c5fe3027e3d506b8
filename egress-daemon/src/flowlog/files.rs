//! The directory of a log: one journal that is appended to, and the segments before it, bounded by age and size.
//!
//! Files are named after the time of their first record, in microseconds. A segment is complete before it gets its name, and a
//! journal is removed once its segment exists. So a crash leaves either or both, and loses only what was not yet synced.
//! A journal that cannot become a segment stays, and is tried again before newer ones.

use super::{Limits, journal, micros, segment};
use egress_core::leaselog::LeaseRecord;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::marker::PhantomData;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

pub(super) const SEGMENT: &str = "parquet";
pub(super) const JOURNAL: &str = "journal";
/// The name of a segment until it is complete.
const PART: &str = "part";

/// A log that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A file or the directory.
    #[error("{}: {source}{}", path.display(), remedy(source))]
    File {
        /// The file.
        path: PathBuf,
        /// What failed.
        source: io::Error,
    },
    /// A segment.
    #[error("{} is not a log segment: {source}: remove it", path.display())]
    Segment {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: parquet::errors::ParquetError,
    },
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ": make room, or set flowLog.mode to Off",
        _ => "",
    }
}

pub(super) fn failed(path: &Path) -> impl Fn(io::Error) -> LogError + '_ {
    move |source| LogError::File { path: path.to_owned(), source }
}

/// An entry of a log: how it is written to a journal, and how a journal becomes a segment.
pub trait Entry: Sized {
    /// Lines to append.
    fn encode(entries: &[Self]) -> Vec<u8>;
    /// The contents of a journal as a segment; `None` if there are none.
    fn segment(journal: &[u8]) -> parquet::errors::Result<Option<Vec<u8>>>;
}

impl Entry for LeaseRecord {
    fn encode(entries: &[Self]) -> Vec<u8> {
        journal::encode(entries)
    }

    fn segment(journal: &[u8]) -> parquet::errors::Result<Option<Vec<u8>>> {
        let records = journal::decode(journal);
        if records.is_empty() {
            return Ok(None);
        }
        let mut segment = Vec::new();
        segment::write(&records, &mut segment)?;
        Ok(Some(segment))
    }
}

/// A log that is being written.
#[derive(Debug)]
pub struct Log<E> {
    limits: Limits,
    path: PathBuf,
    journal: File,
    /// The number that is the journal's name.
    name: i64,
    /// When the journal began. Differs from the name if the clock was set back.
    began: i64,
    records: usize,
    /// The bytes that were acknowledged.
    length: u64,
    /// Whether a part of a failed write may be behind them.
    torn: bool,
    entries: PhantomData<E>,
}

impl<E: Entry> Log<E> {
    /// Begins a journal at this time. What an earlier process left is for [`Self::tidy`].
    pub fn open(limits: Limits, at: i64) -> Result<Self, LogError> {
        let directory = &limits.directory;
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed(directory))?;
        remove_parts(directory)?;
        // Files keep their order even if the clock was set back.
        let name = all(directory)?.last().map_or(at, |(last, _)| at.max(last + 1));
        Self::begin(limits, name, at)
    }

    fn begin(limits: Limits, name: i64, at: i64) -> Result<Self, LogError> {
        let path = limits.directory.join(format!("{name:020}.{JOURNAL}"));
        let mut options = OpenOptions::new();
        let journal = options.create_new(true).append(true).mode(0o600).open(&path).map_err(failed(&path))?;
        sync(&limits.directory)?;
        Ok(Self { limits, path, journal, name, began: at, records: 0, length: 0, torn: false, entries: PhantomData })
    }

    /// Appends records, and waits until they are on the disk.
    pub fn append(&mut self, records: &[E]) -> Result<(), LogError> {
        if self.torn {
            self.journal.set_len(self.length).map_err(failed(&self.path))?;
            self.torn = false;
        }
        let lines = E::encode(records);
        let written = self.journal.write_all(&lines).and_then(|()| self.journal.sync_data());
        if let Err(error) = written {
            // Half of it would take up room for nothing.
            self.torn = self.journal.set_len(self.length).is_err();
            return Err(failed(&self.path)(error));
        }
        self.length += lines.len() as u64;
        self.records += records.len();
        Ok(())
    }

    /// Makes each write fail, as a disk without room does, or lets them succeed again.
    #[cfg(test)]
    pub(super) fn fill(&mut self, full: bool) -> io::Result<()> {
        let path = if full { Path::new("/dev/full") } else { &self.path };
        self.journal = OpenOptions::new().append(true).open(path)?;
        Ok(())
    }

    /// How many records the journal has, and when it began.
    pub fn journal(&self) -> (usize, i64) {
        (self.records, self.began)
    }

    /// Begins another journal. The one before is for [`Self::tidy`].
    pub fn rotate(&mut self, at: i64) -> Result<(), LogError> {
        *self = Self::begin(self.limits.clone(), at.max(self.name + 1), at)?;
        Ok(())
    }

    /// Removes what is too old or too large, and makes all journals before the current one segments: the oldest first, since newer
    /// segments are exported after older ones.
    pub fn tidy(&self, at: i64) -> Result<(), LogError> {
        // First: that may make the room that the rest needs.
        let expired = expire(&self.limits, at, Some(&self.path));
        // How the log ends is in the journal before, until this one says it.
        if self.records == 0 {
            return expired;
        }
        for path in of_kind(&self.limits.directory, JOURNAL)?.iter().filter(|path| **path != self.path) {
            finish::<E>(path)?;
        }
        expired
    }
}

/// Removes files that are too old, and the oldest while all together are too large. The last one goes only by its age, and `current`,
/// which is being written, never. Without it the log is not open, and what is left of incomplete segments goes, too.
pub(super) fn expire(limits: &Limits, now: i64, current: Option<&Path>) -> Result<(), LogError> {
    let directory = &limits.directory;
    if !directory.exists() {
        return Ok(());
    }
    let retention = i64::try_from(limits.retention.as_micros()).unwrap_or(i64::MAX);
    let is_old = |end: i64| now.saturating_sub(end) > retention;
    let files = all(directory)?;
    let sizes: Vec<u64> = files.iter().map(|(_, path)| path.metadata().map_or(0, |data| data.len())).collect();
    let mut total: u64 = sizes.iter().sum();
    for (place, (_, path)) in files.iter().enumerate() {
        let goes = match files.get(place + 1) {
            // A file ends where the next one begins.
            Some((end, _)) => is_old(*end) || total > limits.bytes,
            None => path.metadata().and_then(|data| data.modified()).is_ok_and(|written| is_old(micros(written))),
        };
        if !goes || current == Some(path.as_path()) {
            break;
        }
        fs::remove_file(path).map_err(failed(path))?;
        total -= sizes[place];
    }
    if current.is_none() {
        remove_parts(directory)?;
    }
    Ok(())
}

/// Removes segments that a process did not complete before it ended.
fn remove_parts(directory: &Path) -> Result<(), LogError> {
    for path in of_kind(directory, PART)?.iter().filter(|path| number(path).is_some()) {
        fs::remove_file(path).map_err(failed(path))?;
    }
    Ok(())
}

/// Makes a journal a segment.
fn finish<E: Entry>(journal: &Path) -> Result<(), LogError> {
    let segment = journal.with_extension(SEGMENT);
    if !segment.exists() {
        let text = fs::read(journal).map_err(failed(journal))?;
        let content = E::segment(&text).map_err(|source| LogError::Segment { path: journal.to_owned(), source })?;
        if let Some(content) = content {
            let part = journal.with_extension(PART);
            let written = write(&part, &content).and_then(|()| fs::rename(&part, &segment));
            written.map_err(|error| {
                // If it stays, the next attempt overwrites it.
                fs::remove_file(&part).ok();
                failed(&part)(error)
            })?;
        }
    }
    if let Some(directory) = journal.parent() {
        sync(directory)?;
    }
    fs::remove_file(journal).map_err(failed(journal))
}

fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

fn sync(directory: &Path) -> Result<(), LogError> {
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed(directory))
}

pub(super) fn of_kind(directory: &Path, kind: &str) -> Result<Vec<PathBuf>, LogError> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed(directory))? {
        let path = entry.map_err(failed(directory))?.path();
        if path.extension().is_some_and(|extension| extension == kind) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The number that is a file's name.
fn number(path: &Path) -> Option<i64> {
    path.file_stem()?.to_str()?.parse().ok()
}

/// Segments and journals with the times of their beginnings, in order. A journal whose segment exists is left out.
pub(super) fn all(directory: &Path) -> Result<Vec<(i64, PathBuf)>, LogError> {
    let segments = of_kind(directory, SEGMENT)?;
    let journals = of_kind(directory, JOURNAL)?.into_iter().filter(|path| !path.with_extension(SEGMENT).exists());
    let named = segments.iter().cloned().chain(journals);
    let began = |path: PathBuf| Some((number(&path)?, path));
    let mut files: Vec<(i64, PathBuf)> = named.filter_map(began).collect();
    files.sort();
    Ok(files)
}

/// Which of the two logs a directory has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// That of leases.
    Leases,
    /// That of flows.
    Flows,
}

/// Which log a directory has, according to the first file that tells; `None` if it has none. An error if no file tells and one cannot
/// be read.
pub fn kind(directory: &Path) -> Result<Option<Kind>, LogError> {
    let mut unread = Ok(None);
    for (_, path) in all(directory)? {
        match kind_of(&path) {
            Ok(None) => {}
            Ok(found) => return Ok(found),
            error => unread = error,
        }
    }
    unread
}

fn kind_of(path: &Path) -> Result<Option<Kind>, LogError> {
    if path.extension().is_some_and(|extension| extension == SEGMENT) {
        let file = File::open(path).map_err(failed(path))?;
        let name = segment::schema_name(file).map_err(|source| LogError::Segment { path: path.to_owned(), source })?;
        return Ok(kinds(name == "leases", name == "flows"));
    }
    let text = fs::read(path).map_err(failed(path))?;
    Ok(kinds(journal::is_one(&text), super::flows::is_journal(&text)))
}

fn kinds(leases: bool, flows: bool) -> Option<Kind> {
    if leases { Some(Kind::Leases) } else { flows.then_some(Kind::Flows) }
}

/// All records of a log, in order, that `wanted` accepts. A file that disappears meanwhile is left out.
pub fn read(directory: &Path, wanted: impl Fn(&LeaseRecord) -> bool) -> Result<Vec<LeaseRecord>, LogError> {
    let mut records = Vec::new();
    for (_, path) in all(directory)? {
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file.map_err(failed(&path))?,
        };
        let of_file = if path.extension().is_some_and(|extension| extension == SEGMENT) {
            segment::read(file).map_err(|source| LogError::Segment { path: path.clone(), source })?
        } else {
            journal::decode(&fs::read(&path).map_err(failed(&path))?)
        };
        records.extend(of_file.into_iter().filter(&wanted));
    }
    Ok(records)
}
