//! Scans the directory and updates the view. Only files that changed are read.

use super::disk::{Disk, listing};
use super::notices::{Noticed, Notices};
use super::own::{self, Own};
use super::parse::Parsed;
use super::record::{Record, make_record, merge, version};
use super::user::{Now, Stamp, UserFiles};
use super::{Files, POLL};
use crate::store::view::Item;
use crate::store::{Key, Kind, ObjectRef, StoreProblem};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

/// The age below which one of Spillway's files is read again at the next scan: it may have been replaced again within the resolution of
/// its timestamp.
const YOUNG: Duration = Duration::from_millis(50);
/// The number of rounds in which changes noticed during reading are also read, before writers must wait.
const ROUNDS: usize = 8;

/// The known state of the directory.
pub(super) struct Scanner {
    start: Instant,
    user: UserFiles,
    own: BTreeMap<ObjectRef, OwnFile>,
    /// The users' objects, as in the view, with the hash of their content.
    merged: BTreeMap<ObjectRef, (String, Item)>,
    /// The time since `start` at which to check again files that are not yet at rest.
    again: Option<Duration>,
    /// The problem with listing the users' files.
    unlisted: Option<StoreProblem>,
    /// The problem with joining an object with its record.
    unregistered: Option<StoreProblem>,
    /// The kernel's notices, if it sends any.
    notices: Option<Notices>,
}

/// The extent of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Files with notices; without notices, all of Spillway's files.
    Noticed,
    /// All files.
    Everywhere,
}

struct OwnFile {
    stamp: Option<Stamp>,
    /// Its contents, if it was young when it was read.
    young: Option<Vec<u8>>,
    /// The last good version.
    content: Option<Content>,
    /// The problem with the version on disk.
    problem: Option<StoreProblem>,
}

impl OwnFile {
    fn object(&self) -> Option<(&Key, &Item)> {
        match &self.content {
            Some(Content::Object(key, item)) => Some((key, item)),
            _ => None,
        }
    }

    fn record(&self) -> Option<&Record> {
        match &self.content {
            Some(Content::Record(record)) => Some(record),
            _ => None,
        }
    }

    /// Returns whether the file has the same version and contents as when it was last read.
    fn is(&self, stamp: Stamp, bytes: &[u8]) -> bool {
        self.stamp == Some(stamp) && self.young.as_deref() == Some(bytes)
    }
}

/// The text of one of Spillway's files.
struct Text {
    stamp: Stamp,
    bytes: Vec<u8>,
    is_young: bool,
}

impl Text {
    /// Reads a file; `None` if it does not exist. Fails if the whole directory is missing, since it may come back.
    fn read(own: &Own, target: &ObjectRef) -> io::Result<Option<Self>> {
        let read = || -> io::Result<Option<Self>> {
            let stamp = own::stamp(&own.path(target))?;
            let is_young = SystemTime::now().duration_since(stamp.modified).is_ok_and(|age| age < YOUNG);
            Ok(own.read(target)?.map(|bytes| Text { stamp, bytes, is_young }))
        };
        match read() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(Some(text)) => Ok(Some(text)),
            _ => own.root().metadata().map(|_| None),
        }
    }
}

/// The result of a scan of Spillway's files.
struct Scanned {
    /// Whether users' files have also changed.
    users: bool,
    /// The files that were read; absent if all files were.
    changed: Option<Vec<Changed>>,
}

/// One of Spillway's files that was read again.
struct Changed {
    target: ObjectRef,
    /// The object that it contained before.
    before: Option<Key>,
}

/// The changes to the view.
enum Changes {
    All(BTreeMap<Kind, BTreeMap<Key, Item>>),
    Some(Vec<(Kind, Key, Option<Item>)>),
}

/// The contents of one of Spillway's files.
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
            unregistered: None,
            notices: None,
        }
    }
}

impl Scanner {
    /// Returns a scanner that receives the kernel's notices of changes, if possible.
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

    /// Updates the view. Returns the time for a full scan in the absence of notices.
    pub(super) fn scan(&mut self, files: &Files, look: Look) -> Option<Instant> {
        let _order = files.order.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (scanned, unreadable_own) = match self.scan_own(files, look) {
            Ok(scanned) => (scanned, None),
            // The other notices are not known.
            Err(error) => (Scanned { users: true, changed: None }, Some(unreadable(Path::new(".spillway"), &error))),
        };
        let users = scanned.users || look == Look::Everywhere;
        if users {
            self.scan_users(files);
        }
        let changes = match scanned.changed {
            Some(changed) if !users => Changes::Some(self.changes(files, changed)),
            _ => Changes::All(self.everything(files)),
        };
        let own = self.own.values().filter_map(|file| file.problem.as_ref());
        let of_all = [&unreadable_own, &self.unlisted, &self.unregistered].into_iter().flatten();
        let mut problems: Vec<StoreProblem> = own.chain(of_all).chain(self.user.problems()).cloned().collect();
        problems.sort();
        files.update(|view| {
            let mut changed = view.problems != problems;
            view.problems = problems;
            match changes {
                Changes::All(items) => {
                    for (kind, items) in items {
                        changed |= view.set_all(kind, items);
                    }
                }
                Changes::Some(items) => {
                    for (kind, key, item) in items {
                        changed |= view.set(kind, key, item);
                    }
                }
            }
            changed
        });
        self.again.map(|again| self.start + again)
    }

    /// Returns all objects.
    fn everything(&mut self, files: &Files) -> BTreeMap<Kind, BTreeMap<Key, Item>> {
        let mut items: BTreeMap<Kind, BTreeMap<Key, Item>> = Kind::ALL.map(|kind| (kind, BTreeMap::new())).into();
        for (target, file) in &self.own {
            if let Some((key, item)) = file.object() {
                items.entry(target.kind).or_default().insert(key.clone(), item.clone());
            }
        }
        let there: BTreeSet<&ObjectRef> = self.user.objects().map(|parsed| &parsed.target).collect();
        self.merged.retain(|target, _| there.contains(target));
        self.unregistered = None;
        for parsed in self.user.objects() {
            match registered(files, &self.user, parsed, &mut self.own, &mut self.merged) {
                Ok(item) => {
                    items.entry(parsed.target.kind).or_default().insert(parsed.target.key.clone(), item);
                }
                Err(error) => self.unregistered = Some(unreadable(Path::new(".spillway/status"), &error)),
            }
        }
        items
    }

    /// Returns the objects whose file or record has changed.
    fn changes(&mut self, files: &Files, changed: Vec<Changed>) -> Vec<(Kind, Key, Option<Item>)> {
        let mut items = Vec::new();
        for Changed { target, before } in changed {
            if target.kind.is_users() {
                let Some(parsed) = self.user.object(&target) else { continue };
                match registered(files, &self.user, parsed, &mut self.own, &mut self.merged) {
                    Ok(item) => items.push((target.kind, target.key, Some(item))),
                    Err(error) => self.unregistered = Some(unreadable(Path::new(".spillway/status"), &error)),
                }
                continue;
            }
            let now = self.own.get(&target).and_then(OwnFile::object).map(|(key, item)| (key.clone(), item.clone()));
            if let Some(gone) = before.filter(|before| now.as_ref().is_none_or(|(key, _)| key != before)) {
                items.push((target.kind, gone, None));
            }
            items.extend(now.map(|(key, item)| (target.kind, key, Some(item))));
        }
        items
    }

    /// Reads the changes in the users' files.
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

    /// Continues without notices if the kernel does not follow all directories.
    fn go_on_without(&mut self, files: &Files, followed: io::Result<()>) {
        if let Err(error) = followed {
            not_noticed(&files.directory, &error);
            self.notices = None;
        }
    }

    /// Removes the last good versions of files that vanished while no process was running.
    pub(super) fn forget_good(&self, files: &Files) {
        if let Err(error) = files.own.keep_good_of(self.user.files()) {
            tracing::warn!(%error, "last good versions of files that are gone could not be removed");
        }
    }

    /// Reads the changes in Spillway's files.
    ///
    /// With notices, readers need no lock: if no notice is left after the last file was read, every write that returned before then has
    /// been read. So the known state never has a write without all earlier writes. Without notices, or if notices keep arriving, writers
    /// wait for the reading, but not for the parsing.
    fn scan_own(&mut self, files: &Files, look: Look) -> io::Result<Scanned> {
        let own = &files.own;
        let mut lock = if self.notices.is_none() { own.shared()? } else { None };
        let mut noticed = self.notices.as_mut().map(Notices::take).unwrap_or_default();
        let mut all = look == Look::Everywhere || self.notices.is_none();
        let mut users = false;
        let mut texts = BTreeMap::new();
        for round in 0.. {
            users |= noticed.users;
            let changed = if noticed.lost || round == 0 && all {
                all = true;
                self.changed_of_all(files)?
            } else {
                std::mem::take(&mut noticed.own)
            };
            for target in changed {
                let text = Text::read(own, &target);
                texts.insert(target, text);
            }
            noticed = self.notices.as_mut().map(Notices::take).unwrap_or_default();
            if noticed == Noticed::default() {
                break;
            }
            if round == ROUNDS {
                lock = own.shared()?;
            }
        }
        drop(lock);
        let changed = texts.into_iter().map(|(target, text)| self.take(files, target, text)).collect();
        Ok(Scanned { users, changed: (!all).then_some(changed) })
    }

    /// Parses the text of a file.
    fn take(&mut self, files: &Files, target: ObjectRef, text: io::Result<Option<Text>>) -> Changed {
        let own = &files.own;
        let mut before = self.own.remove(&target);
        let key = before.as_ref().and_then(OwnFile::object).map(|(key, _)| key.clone());
        let changed = Changed { target: target.clone(), before: key };
        let (stamp, young, content) = match text {
            Ok(None) => return changed,
            Ok(Some(Text { stamp, bytes, is_young })) => {
                if let Some(same) = before.as_mut().filter(|file| file.is(stamp, &bytes)) {
                    same.young = same.young.take().filter(|_| is_young);
                    self.own.extend(before.map(|same| (target, same)));
                    return changed;
                }
                let content = own.parse(&target, &bytes).and_then(|value| content(&target, value));
                (Some(stamp), is_young.then_some(bytes), content)
            }
            Err(error) => (None, None, Err(error)),
        };
        let file = match content {
            Ok(content) => OwnFile { stamp, young, content: Some(content), problem: None },
            Err(error) => {
                let path = own.path(&target);
                let path = path.strip_prefix(own.root().parent().unwrap_or(own.root())).unwrap_or(&path);
                let shown = || files.view().named(&target).map(|(key, item)| Content::Object(key, item));
                let last = before.and_then(|file| file.content).or_else(shown);
                OwnFile { stamp, young, content: last, problem: Some(unreadable(path, &error)) }
            }
        };
        self.own.insert(target, file);
        changed
    }

    /// Lists all of Spillway's files, and forgets removed files. Returns the files whose version differs from the version that was read.
    fn changed_of_all(&mut self, files: &Files) -> io::Result<BTreeSet<ObjectRef>> {
        let own = &files.own;
        let mut followed = self.notices.as_mut().map_or(Ok(()), |notices| notices.follow_own(own));
        let listing = match own.listing() {
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
        let changed = listing.into_iter().filter(|(target, stamp)| {
            self.own.get(target).is_none_or(|file| file.stamp != Some(*stamp) || file.young.is_some())
        });
        Ok(changed.map(|(target, _)| target).collect())
    }

    /// Removes the records of objects that no longer exist.
    fn forget(&mut self, files: &Files) {
        let there: BTreeSet<&ObjectRef> = self.user.objects().map(|object| &object.target).collect();
        let gone: Vec<ObjectRef> = self
            .own
            .iter()
            .filter(|(target, file)| file.record().is_some() && !there.contains(target))
            .map(|(target, _)| target.clone())
            .collect();
        for target in gone {
            let Ok(_lock) = files.own.exclusive() else { return };
            // If the files have changed by now, another process may know an object that this process does not know yet.
            if !listing(&files.directory, &mut |_| {}).is_ok_and(|listing| self.user.is_current(&listing)) {
                return;
            }
            if fs::remove_file(files.own.path(&target)).is_ok() {
                self.own.remove(&target);
            }
        }
    }
}

/// Returns a user's object joined with its record. Creates the record if it is missing or outdated.
fn registered(
    files: &Files,
    user: &UserFiles,
    parsed: &Parsed,
    own: &mut BTreeMap<ObjectRef, OwnFile>,
    merged: &mut BTreeMap<ObjectRef, (String, Item)>,
) -> io::Result<Item> {
    let target = &parsed.target;
    let is_current = own.get(target).and_then(OwnFile::record).is_some_and(|record| record.content == parsed.hash);
    if target.kind.has_our_status()
        && !is_current
        && let Some(made) = make_record(files, parsed, user.source(target))?
    {
        let content = Some(Content::Record(Record::new(&made)));
        own.insert(target.clone(), OwnFile { stamp: None, young: None, content, problem: None });
    }
    let record = own.get(target).and_then(OwnFile::record);
    let version = match record.and_then(|record| record.version) {
        Some(version) if record.is_some_and(|record| record.content == parsed.hash) => version.to_string(),
        // The record is for other content, which another process has read. The version is not a number, so that no write based on this
        // content is accepted, and the view later accepts the other content.
        version => format!("{}.{}", parsed.hash, version.unwrap_or(0)),
    };
    if let Some((_, item)) = merged.get(target).filter(|(hash, item)| *hash == parsed.hash && item.version == version) {
        return Ok(item.clone());
    }
    let does_not_fit =
        |error| io::Error::new(io::ErrorKind::InvalidData, format!("the record of {target} does not fit: {error}"));
    let object = target.kind.decode(merge(parsed, record, &version)).map_err(does_not_fit)?;
    let item = Item { version, object };
    merged.insert(target.clone(), (parsed.hash.clone(), item.clone()));
    Ok(item)
}

fn not_noticed(directory: &Path, error: &io::Error) {
    tracing::warn!(
        directory = %directory.display(), %error,
        "inotify is not available (raise fs.inotify.max_user_watches and max_user_instances?): reading the directory every {POLL:?} instead"
    );
}

fn unreadable(file: &Path, error: &io::Error) -> StoreProblem {
    StoreProblem {
        file: file.to_owned(),
        document: None,
        object: None,
        field: None,
        message: format!("it cannot be used: {error}"),
        remedy: "the last good state stays in force; make it readable and writable for Spillway".to_owned(),
    }
}

fn content(target: &ObjectRef, mut value: Value) -> io::Result<Content> {
    if target.kind.is_users() {
        return Ok(Content::Record(Record::new(&value)));
    }
    let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
    let version = version(&value).ok_or_else(|| invalid("metadata.resourceVersion is not a number".to_owned()))?;
    egress_objects::api::remove_nulls(&mut value);
    let key = Key::namespaced(
        value.pointer("/metadata/namespace").and_then(Value::as_str).unwrap_or_default(),
        &target.key.name,
    );
    let object = target.kind.decode(value).map_err(|error| invalid(error.to_string()))?;
    Ok(Content::Object(key, Item { version: version.to_string(), object }))
}
