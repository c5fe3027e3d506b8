//! The directory of a log: the current journal and the earlier segments, bounded by age and size.
//!
//! A file's name is the time of its first record, in microseconds. A segment gets its name when it is complete, and a journal is removed
//! once its segment exists. So a crash leaves either or both, and loses only records that were not yet synced.
//! A journal that cannot be converted to a segment stays, and is retried before newer journals.

use super::{Limits, journal, micros, segment};
use egress_core::leaselog::LeaseRecord;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::marker::PhantomData;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

pub(super) const SEGMENT: &str = "parquet";
pub(super) const JOURNAL: &str = "journal";
/// The extension of an incomplete segment.
const PART: &str = "part";

/// An error in writing or reading a log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// I/O on a file or on the directory failed.
    #[error("{}: {source}{}", path.display(), remedy(source))]
    File {
        /// The file.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// A file is not a valid segment.
    #[error("{} is not a log segment: {source}: remove it", path.display())]
    Segment {
        /// The file.
        path: PathBuf,
        /// The defect.
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

/// An entry of a log: its format in a journal, and the conversion of a journal to a segment.
pub trait Entry: Sized {
    /// Encodes entries as lines to append.
    fn encode(entries: &[Self]) -> Vec<u8>;
    /// Converts the contents of a journal to a segment; `None` if the journal has no entries.
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

/// A log that is open for writing.
#[derive(Debug)]
pub struct Log<E> {
    limits: Limits,
    path: PathBuf,
    journal: File,
    /// The number in the journal's name.
    name: i64,
    /// The start of the journal. Differs from the name if the clock was set back.
    began: i64,
    records: usize,
    /// The number of bytes that were synced.
    length: u64,
    /// Whether part of a failed write may follow those bytes.
    torn: bool,
    entries: PhantomData<E>,
}

impl<E: Entry> Log<E> {
    /// Begins a journal at this time. [`Self::tidy`] handles the journals that an earlier process left.
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

    /// Appends records, and waits until they are on disk.
    pub fn append(&mut self, records: &[E]) -> Result<(), LogError> {
        if self.torn {
            self.journal.set_len(self.length).map_err(failed(&self.path))?;
            self.torn = false;
        }
        let lines = E::encode(records);
        let written = self.journal.write_all(&lines).and_then(|()| self.journal.sync_data());
        if let Err(error) = written {
            // An incomplete write only wastes space.
            self.torn = self.journal.set_len(self.length).is_err();
            return Err(failed(&self.path)(error));
        }
        self.length += lines.len() as u64;
        self.records += records.len();
        Ok(())
    }

    /// Makes each write fail as on a full disk, or lets writes succeed again.
    #[cfg(test)]
    pub(super) fn fill(&mut self, full: bool) -> io::Result<()> {
        let path = if full { Path::new("/dev/full") } else { &self.path };
        self.journal = OpenOptions::new().append(true).open(path)?;
        Ok(())
    }

    /// Returns the journal's number of records and its start.
    pub fn journal(&self) -> (usize, i64) {
        (self.records, self.began)
    }

    /// Begins another journal. [`Self::tidy`] converts the previous one.
    pub fn rotate(&mut self, at: i64) -> Result<(), LogError> {
        *self = Self::begin(self.limits.clone(), at.max(self.name + 1), at)?;
        Ok(())
    }

    /// Removes files that exceed the limits, and converts all journals before the current one to segments: the oldest first, since segments
    /// are exported in order of age.
    pub fn tidy(&self, at: i64) -> Result<(), LogError> {
        // Expired files go first, which may free the space that the segments need.
        let expired = expire(&self.limits, at, Some(&self.path));
        // Until the current journal has a record, the previous journal has the end of the log.
        if self.records == 0 {
            return expired;
        }
        for path in of_kind(&self.limits.directory, JOURNAL)?.iter().filter(|path| **path != self.path) {
            finish::<E>(path)?;
        }
        expired
    }
}

/// Removes files that are too old, then the oldest files while the total is too large. The last file is removed only for its age, and
/// `current`, the journal that is being written, never. `None` means that the log is not open: incomplete segments are removed, too.
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

/// Removes incomplete segments of earlier processes.
fn remove_parts(directory: &Path) -> Result<(), LogError> {
    for path in of_kind(directory, PART)?.iter().filter(|path| number(path).is_some()) {
        fs::remove_file(path).map_err(failed(path))?;
    }
    Ok(())
}

/// Converts a journal to a segment.
fn finish<E: Entry>(journal: &Path) -> Result<(), LogError> {
    let segment = journal.with_extension(SEGMENT);
    if !segment.exists() {
        let text = fs::read(journal).map_err(failed(journal))?;
        let content = E::segment(&text).map_err(|source| LogError::Segment { path: journal.to_owned(), source })?;
        if let Some(content) = content {
            let part = journal.with_extension(PART);
            let written = write(&part, &content).and_then(|()| fs::rename(&part, &segment));
            written.map_err(|error| {
                // If the removal fails, the next attempt overwrites the file.
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

/// Returns the number in a file's name.
fn number(path: &Path) -> Option<i64> {
    path.file_stem()?.to_str()?.parse().ok()
}

/// Returns the segments and journals with their start times, in order. Omits a journal whose segment exists.
pub(super) fn all(directory: &Path) -> Result<Vec<(i64, PathBuf)>, LogError> {
    let segments = of_kind(directory, SEGMENT)?;
    let journals = of_kind(directory, JOURNAL)?.into_iter().filter(|path| !path.with_extension(SEGMENT).exists());
    let named = segments.iter().cloned().chain(journals);
    let began = |path: PathBuf| Some((number(&path)?, path));
    let mut files: Vec<(i64, PathBuf)> = named.filter_map(began).collect();
    files.sort();
    Ok(files)
}

/// The two kinds of logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The log of leases.
    Leases,
    /// The log of flows.
    Flows,
}

/// Returns the kind of log in a directory, according to the first file that shows it; `None` if no file does. Fails if no file shows it
/// and a file cannot be read.
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

/// Returns the records of a log that `wanted` accepts, in order. Skips a file that disappears meanwhile.
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
