//! Looks at the directory and brings the view up to date. Only files that changed are read.

use super::disk::{Disk, listing};
use super::notices::Notices;
use super::own::{self, Own};
use super::record::{Record, make_record, merge, version};
use super::user::{Now, Stamp, UserFiles};
use super::{Files, POLL};
use crate::store::view::Item;
use crate::store::{Key, Kind, ObjectRef, Problem};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

/// A file of Spillway's that is younger than this when it is read may be replaced once more within the resolution of
/// its time stamp, so that it is read again at the next look.
const YOUNG: Duration = Duration::from_millis(50);

/// What is known of the directory.
pub(super) struct Scanner {
    start: Instant,
    user: UserFiles,
    own: BTreeMap<ObjectRef, OwnFile>,
    /// The objects of people as they are in the view, with the hash of their content.
    merged: BTreeMap<ObjectRef, (String, Item)>,
    /// When to look again at files that do not rest yet, since `start`.
    again: Option<Duration>,
    /// Why the files of people cannot be listed.
    unlisted: Option<Problem>,
    /// What the kernel tells, if it does.
    notices: Option<Notices>,
}

/// Where to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// At what was noticed; without notices, at all that Spillway writes.
    Noticed,
    /// At everything.
    Everywhere,
}

struct OwnFile {
    stamp: Option<Stamp>,
    /// What was in it when it was read, if it was young then.
    young: Option<Vec<u8>>,
    /// The last good version.
    content: Option<Content>,
    /// What is wrong with the version on disk.
    problem: Option<Problem>,
}

/// What a file of Spillway's holds.
enum Content {
    Object(Key, Item),
    Record(Record),
}

impl Default for Scanner {
    fn default() -> Self {
        Scanner {
            start: Instant::now(),
            user: UserFiles::default(),
            own: BTreeMap::new(),
            merged: BTreeMap::new(),
            again: None,
            unlisted: None,
            notices: None,
        }
    }
}

impl Scanner {
    /// One that the kernel tells of changes, if it can.
    pub(super) fn with_notices(directory: &Path) -> Self {
        let mut scanner = Scanner::default();
        match Notices::open() {
            Ok(notices) => scanner.notices = Some(notices),
            Err(error) => not_noticed(directory, &error),
        }
        scanner
    }

    pub(super) fn notices(&self) -> Option<&Notices> {
        self.notices.as_ref()
    }

    /// Brings the view up to date; returns when to look everywhere although nothing is noticed.
    pub(super) fn scan(&mut self, files: &Files, look: Look) -> Option<Instant> {
        let _order = files.order.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut problems = Vec::new();
        let users = self.scan_own(files, look).unwrap_or_else(|error| {
            problems.push(unreadable(Path::new(".spillway"), &error));
            true
        });
        if users || look == Look::Everywhere {
            self.scan_users(files);
        }
        problems.extend(self.unlisted.clone());
        let mut items: BTreeMap<Kind, BTreeMap<Key, Item>> = Kind::ALL.map(|kind| (kind, BTreeMap::new())).into();
        for (target, file) in &self.own {
            if let Some(Content::Object(key, item)) = &file.content {
                items.entry(target.kind).or_default().insert(key.clone(), item.clone());
            }
            problems.extend(file.problem.clone());
        }
        if let Err(error) = self.register(files, &mut items) {
            problems.push(unreadable(Path::new(".spillway/status"), &error));
        }
        problems.extend(self.user.problems().iter().cloned());
        problems.sort();
        files.update(|view| {
            let mut changed = view.problems != problems;
            view.problems = problems;
            for (kind, items) in items {
                changed |= view.set_all(kind, items);
            }
            changed
        });
        self.again.map(|again| self.start + again)
    }

    /// Reads what changed of what people write.
    fn scan_users(&mut self, files: &Files) {
        let mut followed = Ok(());
        let mut follow = |directory: &Path| {
            if let (Some(notices), true) = (&mut self.notices, followed.is_ok()) {
                followed = notices.follow(directory);
            }
        };
        let listing = listing(&files.directory, &mut follow);
        self.go_on_without(files, followed);
        match listing {
            Ok(listing) => {
                if let Some(notices) = &mut self.notices {
                    notices.forget_others();
                }
                let now = Now { monotonic: self.start.elapsed(), wall: SystemTime::now() };
                self.again = self.user.update(&listing, now, &files.parser, &Disk(files)).again;
                self.unlisted = None;
                if self.user.is_current(&listing) {
                    self.forget(files);
                }
            }
            Err(error) => self.unlisted = Some(unreadable(Path::new(""), &error)),
        }
    }

    /// Goes on without notices where the kernel does not follow all directories.
    fn go_on_without(&mut self, files: &Files, followed: io::Result<()>) {
        if let Err(error) = followed {
            not_noticed(&files.directory, &error);
            self.notices = None;
        }
    }

    /// Forgets the last good versions of files that vanished while no process looked.
    pub(super) fn forget_good(&self, files: &Files) {
        if let Err(error) = files.own.keep_good_of(self.user.files()) {
            tracing::warn!(%error, "last good versions of files that are gone could not be removed");
        }
    }

    /// Reads what changed of what Spillway writes; whether files of people have changed, too. Writers wait for the reading,
    /// not until it is understood.
    fn scan_own(&mut self, files: &Files, look: Look) -> io::Result<bool> {
        let own = &files.own;
        let lock = own.shared()?;
        let noticed = self.notices.as_mut().map(Notices::take);
        let users = noticed.as_ref().is_some_and(|noticed| noticed.users || noticed.lost);
        let changed: Vec<(ObjectRef, Stamp)> = match noticed {
            Some(noticed) if look == Look::Noticed && !noticed.lost => {
                let on_disk = |target: &ObjectRef| own::stamp(&own.path(target));
                let (there, gone): (Vec<_>, Vec<_>) =
                    noticed.own.into_iter().map(|target| (on_disk(&target), target)).partition(|(s, _)| s.is_ok());
                gone.iter().for_each(|(_, target)| drop(self.own.remove(target)));
                there.into_iter().filter_map(|(stamp, target)| Some((target, stamp.ok()?))).collect()
            }
            _ => self.changed_of_all(files)?,
        };
        let age = |stamp: &Stamp| SystemTime::now().duration_since(stamp.modified);
        let read: Vec<_> = changed
            .into_iter()
            .map(|(target, stamp)| (own.read(&target), target, stamp, age(&stamp).is_ok_and(|age| age < YOUNG)))
            .collect();
        drop(lock);
        for (text, target, stamp, is_young) in read {
            let young = text.as_ref().ok().cloned().flatten().filter(|_| is_young);
            if let (Some(file), Ok(Some(text))) = (self.own.get_mut(&target), &text)
                && file.stamp == Some(stamp)
                && file.young.as_ref() == Some(text)
            {
                file.young = young;
                continue;
            }
            let value = text.and_then(|text| text.map(|text| own.parse(&target, &text)).transpose());
            let file = match value.and_then(|value| content(&target, value)) {
                Ok(Some(content)) => OwnFile { stamp: Some(stamp), young, content: Some(content), problem: None },
                Ok(None) => {
                    self.own.remove(&target);
                    continue;
                }
                Err(error) => {
                    let path = own.path(&target);
                    let path = path.strip_prefix(own.root().parent().unwrap_or(own.root())).unwrap_or(&path);
                    let shown = || files.view().named(&target).map(|(key, item)| Content::Object(key, item));
                    let last = self.own.remove(&target).and_then(|file| file.content).or_else(shown);
                    OwnFile { stamp: Some(stamp), young, content: last, problem: Some(unreadable(path, &error)) }
                }
            };
            self.own.insert(target, file);
        }
        Ok(users)
    }

    /// Forgets what is gone of all that Spillway writes; returns what has another version than the one that was read.
    fn changed_of_all(&mut self, files: &Files) -> io::Result<Vec<(ObjectRef, Stamp)>> {
        let own = &files.own;
        let mut followed = self.notices.as_mut().map_or(Ok(()), |notices| notices.follow_own(own));
        let mut listing = match own.listing() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Own::open(own.root().to_owned())?;
                followed = self.notices.as_mut().map_or(Ok(()), |notices| notices.follow_own(own));
                own.listing()?
            }
            listing => listing?,
        };
        self.go_on_without(files, followed);
        let there: BTreeSet<&ObjectRef> = listing.iter().map(|(target, _)| target).collect();
        self.own.retain(|target, _| there.contains(target));
        listing.retain(|(target, stamp)| {
            self.own.get(target).is_none_or(|file| file.stamp != Some(*stamp) || file.young.is_some())
        });
        Ok(listing)
    }

    /// Joins the objects that people write with their records, and makes the records that are missing.
    fn register(&mut self, files: &Files, items: &mut BTreeMap<Kind, BTreeMap<Key, Item>>) -> io::Result<()> {
        let mut failed = Ok(());
        let mut merged = BTreeMap::new();
        for parsed in self.user.objects() {
            let target = &parsed.target;
            let mut record = match self.own.get(target).map(|file| &file.content) {
                Some(Some(Content::Record(record))) => Some(record.clone()),
                _ => None,
            };
            if target.kind.has_our_status() && record.as_ref().is_none_or(|record| record.content != parsed.hash) {
                match make_record(files, parsed, self.user.source(target)) {
                    Ok(Some(made)) => {
                        let made = Record::new(&made);
                        let content = Some(Content::Record(made.clone()));
                        self.own.insert(target.clone(), OwnFile { stamp: None, young: None, content, problem: None });
                        record = Some(made);
                    }
                    Ok(None) => {}
                    Err(error) => failed = Err(error),
                }
            }
            let of_this = record.as_ref().is_some_and(|record| record.content == parsed.hash);
            let version = match record.as_ref().and_then(|record| record.version) {
                Some(version) if of_this => version.to_string(),
                // The record is about another content, which another process has read: no number, so that no write made
                // from this content is accepted, and that the view takes the other content later for what it is.
                version => format!("{}.{}", parsed.hash, version.unwrap_or(0)),
            };
            let item = match self.merged.get(target) {
                Some((hash, item)) if *hash == parsed.hash && item.version == version => item.clone(),
                _ => match target.kind.decode(merge(parsed, record.as_ref(), &version)) {
                    Ok(object) => Item { version, object },
                    Err(error) => {
                        failed = Err(io::Error::new(
                            io::ErrorKind::InvalidData,
                            format!("the record of {target} does not fit: {error}"),
                        ));
                        continue;
                    }
                },
            };
            items.entry(target.kind).or_default().insert(target.key.clone(), item.clone());
            merged.insert(target.clone(), (parsed.hash.clone(), item));
        }
        self.merged = merged;
        failed
    }

    /// Removes the records of objects that are gone.
    fn forget(&mut self, files: &Files) {
        let there: BTreeSet<&ObjectRef> = self.user.objects().map(|object| &object.target).collect();
        let gone: Vec<ObjectRef> = self
            .own
            .iter()
            .filter(|(target, file)| matches!(file.content, Some(Content::Record(_))) && !there.contains(target))
            .map(|(target, _)| target.clone())
            .collect();
        for target in gone {
            let Ok(_lock) = files.own.exclusive() else { return };
            // Another process knows of an object that this one does not know yet, if the files differ by now.
            if !listing(&files.directory, &mut |_| {}).is_ok_and(|listing| self.user.is_current(&listing)) {
                return;
            }
            if fs::remove_file(files.own.path(&target)).is_ok() {
                self.own.remove(&target);
            }
        }
    }
}

fn not_noticed(directory: &Path, error: &io::Error) {
    tracing::warn!(
        directory = %directory.display(), %error,
        "no notices of changes (raise fs.inotify.max_user_watches and max_user_instances?): looking every {POLL:?} instead"
    );
}

fn unreadable(file: &Path, error: &io::Error) -> Problem {
    Problem {
        file: file.to_owned(),
        document: None,
        object: None,
        field: None,
        message: format!("it cannot be used: {error}"),
        remedy: "the last good state stays in force; make it readable and writable for Spillway".to_owned(),
    }
}

fn content(target: &ObjectRef, value: Option<Value>) -> io::Result<Option<Content>> {
    let Some(mut value) = value else { return Ok(None) };
    if target.kind.is_users() {
        return Ok(Some(Content::Record(Record::new(&value))));
    }
    let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
    let version = version(&value).ok_or_else(|| invalid("metadata.resourceVersion is not a number".to_owned()))?;
    crate::api::remove_nulls(&mut value);
    let key = Key::namespaced(
        value.pointer("/metadata/namespace").and_then(Value::as_str).unwrap_or_default(),
        &target.key.name,
    );
    let object = target.kind.decode(value).map_err(|error| invalid(error.to_string()))?;
    Ok(Some(Content::Object(key, Item { version: version.to_string(), object })))
}
