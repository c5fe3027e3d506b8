//! The users' files, and the version of each that is in force. Reads files through a trait, and takes the time as an argument.
//!
//! Invariants:
//! - a file is read only at rest, so that a version that is being written is never in force;
//! - a file that becomes invalid keeps all objects of its last good version in force, and so do a file that becomes empty (a shell empties
//!   the target of `>` before the command writes) and a file that vanishes briefly (editors replace files);
//! - an object that two files define is taken from the file that had it first.

use super::parse::{Parsed, Parser};
use crate::store::{ObjectRef, StoreProblem};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The time for which a file must be unchanged before it is read.
pub(super) const REST: Duration = Duration::from_millis(100);
/// The time for which a file must be gone before its objects are removed.
pub(super) const GRACE: Duration = Duration::from_millis(300);

/// The properties that distinguish versions of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) modified: SystemTime,
    pub(super) size: u64,
    pub(super) inode: u64,
}

/// The time: monotonic since an arbitrary start, and by the wall clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Now {
    pub(super) monotonic: Duration,
    pub(super) wall: SystemTime,
}

/// The source of the text of files, and the place where the last good text of each is kept across restarts.
pub(super) trait Texts {
    /// Reads the text of a file, and then its stamp.
    fn read(&self, file: &Path) -> io::Result<(Vec<u8>, Stamp)>;
    /// Returns the last text of a file that had no problem.
    fn last_good(&self, file: &Path) -> Option<Vec<u8>>;
    /// Keeps the text of a file that has no problem; `None` means that the file is gone.
    fn keep_good(&self, file: &Path, text: Option<&[u8]>);
}

#[derive(Debug, Default)]
struct UserFile {
    /// The version that was read last.
    read: Option<Stamp>,
    /// The version on disk, and the time since when it is known.
    seen: Option<(Stamp, Duration)>,
    gone_since: Option<Duration>,
    objects: BTreeMap<ObjectRef, Parsed>,
    problems: Vec<StoreProblem>,
}

/// All users' files.
#[derive(Debug, Default)]
pub(super) struct UserFiles {
    files: BTreeMap<PathBuf, UserFile>,
    /// The file whose version of an object is in force.
    owners: BTreeMap<ObjectRef, PathBuf>,
    problems: Vec<StoreProblem>,
}

/// The result of an update.
#[derive(Debug, Default)]
pub(super) struct Updated {
    /// Whether objects or problems may differ now.
    pub(super) changed: bool,
    /// The time to scan again in the absence of notices, on the monotonic clock.
    pub(super) again: Option<Duration>,
}

impl UserFiles {
    /// Updates the state from the files on disk.
    pub(super) fn update(
        &mut self,
        listing: &BTreeMap<PathBuf, Stamp>,
        now: Now,
        parser: &Parser,
        texts: &dyn Texts,
    ) -> Updated {
        let mut updated = Updated::default();
        for path in listing.keys() {
            self.files.entry(path.clone()).or_default();
        }
        let mut dropped = Vec::new();
        for (path, file) in &mut self.files {
            let wake = match listing.get(path) {
                Some(stamp) => file.present(path, *stamp, now, parser, texts, &mut updated.changed),
                None => {
                    let since = *file.gone_since.get_or_insert(now.monotonic);
                    if now.monotonic >= since + GRACE {
                        dropped.push(path.clone());
                    }
                    Some(since + GRACE)
                }
            };
            if let Some(wake) = wake.filter(|wake| *wake > now.monotonic) {
                updated.again = Some(updated.again.map_or(wake, |again| again.min(wake)));
            }
        }
        for path in dropped {
            texts.keep_good(&path, None);
            self.files.remove(&path);
            updated.changed = true;
        }
        // During its grace period, a file immediately gives way to another file with the same object.
        updated.changed |= self.files.values().any(|file| file.gone_since.is_some());
        if updated.changed {
            self.settle_owners();
        }
        updated
    }

    /// Returns the files that exist, or existed until recently.
    pub(super) fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.keys().map(PathBuf::as_path)
    }

    /// Returns the objects in force.
    pub(super) fn objects(&self) -> impl Iterator<Item = &Parsed> {
        self.owners.keys().filter_map(|target| self.object(target))
    }

    /// Returns an object in force.
    pub(super) fn object(&self, target: &ObjectRef) -> Option<&Parsed> {
        self.files.get(self.owners.get(target)?)?.objects.get(target)
    }

    /// Returns the problems of the files, sorted.
    pub(super) fn problems(&self) -> &[StoreProblem] {
        &self.problems
    }

    /// Returns the file of an object in force, with the version that was read.
    pub(super) fn source(&self, target: &ObjectRef) -> Option<(&Path, Stamp)> {
        let path = self.owners.get(target)?;
        Some((path, self.files.get(path)?.read?))
    }

    /// Returns whether the versions that were last read are the versions on disk, with all files at rest.
    pub(super) fn is_current(&self, listing: &BTreeMap<PathBuf, Stamp>) -> bool {
        listing.len() == self.files.len()
            && self.files.iter().all(|(path, file)| file.read.is_some() && listing.get(path) == file.read.as_ref())
    }

    fn settle_owners(&mut self) {
        let mut owners: BTreeMap<ObjectRef, PathBuf> = BTreeMap::new();
        let mut problems: Vec<StoreProblem> = self.files.values().flat_map(|file| file.problems.clone()).collect();
        for (path, file) in &self.files {
            for (target, object) in &file.objects {
                let Some(other) = owners.get(target) else {
                    owners.insert(target.clone(), path.clone());
                    continue;
                };
                let gone = |path: &Path| self.files.get(path).is_some_and(|file| file.gone_since.is_some());
                let had_it = self.owners.get(target) == Some(path);
                let (winner, loser) =
                    if !gone(path) && (had_it || gone(other)) { (path, other) } else { (other, path) };
                if !gone(loser) {
                    let document = self.files.get(loser).and_then(|file| file.objects.get(target));
                    problems.push(StoreProblem {
                        file: loser.clone(),
                        document: Some(document.unwrap_or(object).document),
                        object: Some(target.clone()),
                        field: None,
                        message: format!("{} defines this object too, and its version is in force", winner.display()),
                        remedy: "remove the object from one of the files".to_owned(),
                    });
                }
                let winner = winner.clone();
                owners.insert(target.clone(), winner);
            }
        }
        problems.sort();
        problems.dedup();
        self.owners = owners;
        self.problems = problems;
    }
}

impl UserFile {
    /// Takes the version on disk if it is at rest. Returns the time to check again.
    fn present(
        &mut self,
        path: &Path,
        stamp: Stamp,
        now: Now,
        parser: &Parser,
        texts: &dyn Texts,
        changed: &mut bool,
    ) -> Option<Duration> {
        *changed |= self.gone_since.take().is_some();
        if self.read == Some(stamp) {
            self.seen = None;
            return None;
        }
        let since = match self.seen {
            Some((seen, since)) if seen == stamp => since,
            _ => {
                self.seen = Some((stamp, now.monotonic));
                now.monotonic
            }
        };
        let age = now.wall.duration_since(stamp.modified).unwrap_or_default();
        if age < REST && now.monotonic < since + REST {
            return Some(since + REST);
        }
        match texts.read(path) {
            Ok((text, after)) if after == stamp => {
                self.read = Some(stamp);
                self.seen = None;
                self.take(path, &text, parser, texts);
                *changed = true;
                None
            }
            Ok((_, after)) => {
                self.seen = Some((after, now.monotonic));
                Some(now.monotonic + REST)
            }
            Err(error) => {
                let problem = StoreProblem {
                    file: path.to_owned(),
                    document: None,
                    object: None,
                    field: None,
                    message: format!("the file cannot be read: {error}"),
                    remedy: "make it readable; its last good version stays in force".to_owned(),
                };
                *changed |= self.problems != [problem.clone()];
                self.problems = vec![problem];
                Some(now.monotonic + 10 * REST)
            }
        }
    }

    fn take(&mut self, path: &Path, text: &[u8], parser: &Parser, texts: &dyn Texts) {
        let (objects, mut problems) = parser.parse(path, text);
        let mut new = BTreeMap::new();
        for object in objects {
            let (target, document) = (object.target.clone(), object.document);
            if let Some(first) = new.get(&target).map(|first: &Parsed| first.document) {
                problems.push(StoreProblem {
                    file: path.to_owned(),
                    document: Some(document),
                    object: Some(target),
                    field: None,
                    message: format!("document {first} of the same file defines this object too, and is in force"),
                    remedy: "remove one of them".to_owned(),
                });
            } else {
                new.insert(target, object);
            }
        }
        let had_objects = || {
            let before = || texts.last_good(path).is_some_and(|text| !parser.parse(path, &text).0.is_empty());
            !self.objects.is_empty() || before()
        };
        if new.is_empty() && problems.is_empty() && had_objects() {
            problems.push(StoreProblem {
                file: path.to_owned(),
                document: None,
                object: None,
                field: None,
                message: "the file no longer has objects".to_owned(),
                remedy: "remove it if its objects should go; until then its last good version stays in force"
                    .to_owned(),
            });
        }
        if problems.is_empty() {
            texts.keep_good(path, Some(text));
        } else {
            let mut last = std::mem::take(&mut self.objects);
            if last.is_empty()
                && let Some(text) = texts.last_good(path)
            {
                last.extend(parser.parse(path, &text).0.into_iter().map(|object| (object.target.clone(), object)));
            }
            for (target, object) in last {
                new.entry(target).or_insert(object);
            }
        }
        self.objects = new;
        self.problems = problems;
    }
}
