//! Looks at the directory and brings the view up to date. Only files that changed are read.

use super::Files;
use super::own::{self, Own};
use super::parse::{Parsed, hash};
use super::user::{Now, Stamp, Texts, UserFiles};
use super::view::Item;
use crate::store::{Key, Kind, ObjectRef, Problem};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

/// Annotation of a record: the hash of the content that its generation stands for.
const CONTENT: &str = "spillway.io/content";
/// A file of Spillway's that is younger than this when it is read may be replaced once more within the resolution of
/// its time stamp, so that it is read again at the next look.
const YOUNG: Duration = Duration::from_millis(50);
/// How deep the directory is followed.
const MAX_DEPTH: usize = 16;

/// What is known of the directory.
pub(super) struct Scanner {
    start: Instant,
    user: UserFiles,
    own: BTreeMap<ObjectRef, OwnFile>,
    merged: BTreeMap<ObjectRef, (String, Item)>,
}

struct OwnFile {
    stamp: Option<Stamp>,
    young: bool,
    content: Content,
}

/// What a file of Spillway's holds.
enum Content {
    Object(Key, Item),
    Record(Value),
    Broken(Problem),
}

impl Default for Scanner {
    fn default() -> Self {
        Scanner { start: Instant::now(), user: UserFiles::default(), own: BTreeMap::new(), merged: BTreeMap::new() }
    }
}

impl Scanner {
    /// Looks at everything; returns when to look again although nothing is notified.
    pub(super) fn scan(&mut self, files: &Files) -> Option<Instant> {
        let _order = files.order.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut problems = Vec::new();
        if let Err(error) = self.scan_own(&files.own) {
            problems.push(unreadable(Path::new(".spillway"), &error));
        }
        let listing = match listing(&files.directory) {
            Ok(listing) => Some(listing),
            Err(error) => {
                problems.push(unreadable(Path::new(""), &error));
                None
            }
        };
        let mut again = None;
        if let Some(listing) = &listing {
            let now = Now { monotonic: self.start.elapsed(), wall: SystemTime::now() };
            again = self.user.update(listing, now, &files.parser, &Disk(files)).again;
        }
        let mut items: BTreeMap<Kind, BTreeMap<Key, Item>> = Kind::ALL.map(|kind| (kind, BTreeMap::new())).into();
        for (target, file) in &self.own {
            match &file.content {
                Content::Object(key, item) => {
                    items.entry(target.kind).or_default().insert(key.clone(), item.clone());
                }
                Content::Broken(problem) => problems.push(problem.clone()),
                Content::Record(_) => {}
            }
        }
        if let Err(error) = self.register(files, &mut items) {
            problems.push(unreadable(Path::new(".spillway/status"), &error));
        }
        if listing.as_ref().is_some_and(|listing| self.user.is_current(listing)) {
            self.forget(files);
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
        again.map(|again| self.start + again)
    }

    /// Reads what changed of what Spillway writes.
    fn scan_own(&mut self, own: &Own) -> io::Result<()> {
        let lock = own.shared()?;
        let listing: BTreeMap<ObjectRef, Stamp> = match own.listing() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Own::open(own.root().to_owned())?;
                own.listing()?
            }
            listing => listing?,
        }
        .into_iter()
        .collect();
        self.own.retain(|target, _| listing.contains_key(target));
        for (target, stamp) in listing {
            if self.own.get(&target).is_some_and(|file| file.stamp == Some(stamp) && !file.young) {
                continue;
            }
            let young = SystemTime::now().duration_since(stamp.modified).is_ok_and(|age| age < YOUNG);
            let content = match own.load(&target).and_then(|value| content(&target, value)) {
                Ok(Some(content)) => content,
                Ok(None) => {
                    self.own.remove(&target);
                    continue;
                }
                Err(error) => {
                    let path = own.path(&target);
                    let path = path.strip_prefix(own.root().parent().unwrap_or(own.root())).unwrap_or(&path);
                    Content::Broken(unreadable(path, &error))
                }
            };
            self.own.insert(target, OwnFile { stamp: Some(stamp), young, content });
        }
        drop(lock);
        Ok(())
    }

    /// Joins the objects that people write with their records, and makes the records that are missing.
    fn register(&mut self, files: &Files, items: &mut BTreeMap<Kind, BTreeMap<Key, Item>>) -> io::Result<()> {
        let mut failed = Ok(());
        let mut merged = BTreeMap::new();
        for parsed in self.user.objects() {
            let target = &parsed.target;
            let mut record = match self.own.get(target).map(|file| &file.content) {
                Some(Content::Record(record)) => Some(record.clone()),
                _ => None,
            };
            if target.kind.has_our_status() && record.as_ref().is_none_or(|record| content_hash(record) != parsed.hash)
            {
                match make_record(files, parsed, self.user.source(target)) {
                    Ok(Some(made)) => {
                        let content = Content::Record(made.clone());
                        self.own.insert(target.clone(), OwnFile { stamp: None, young: true, content });
                        record = Some(made);
                    }
                    Ok(None) => {}
                    Err(error) => failed = Err(error),
                }
            }
            let version = record.as_ref().and_then(version).map_or_else(|| parsed.hash.clone(), |v| v.to_string());
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
        let gone: Vec<ObjectRef> = self
            .own
            .iter()
            .filter(|(target, file)| matches!(file.content, Content::Record(_)) && !self.merged.contains_key(target))
            .map(|(target, _)| target.clone())
            .collect();
        for target in gone {
            let Ok(_lock) = files.own.exclusive() else { return };
            // Another process knows of an object that this one does not know yet, if the files differ by now.
            if !listing(&files.directory).is_ok_and(|listing| self.user.is_current(&listing)) {
                return;
            }
            if fs::remove_file(files.own.path(&target)).is_ok() {
                self.own.remove(&target);
            }
        }
    }
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
        return Ok(Some(Content::Record(value)));
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

/// The resourceVersion of an object or record.
pub(super) fn version(value: &Value) -> Option<u64> {
    value.pointer("/metadata/resourceVersion")?.as_str()?.parse().ok()
}

fn content_hash(record: &Value) -> &str {
    let annotations = record.pointer("/metadata/annotations").and_then(Value::as_object);
    annotations.and_then(|annotations| annotations.get(CONTENT)).and_then(Value::as_str).unwrap_or_default()
}

/// A uid that is the same wherever and whenever it is made.
pub(super) fn uid(target: &ObjectRef) -> String {
    let hash = hash(&Value::from(target.to_string()));
    let part = |range| hash.get(range).unwrap_or_default();
    format!("{}-{}-{}-{}-{}", part(0..8), part(8..12), part(12..16), part(16..20), part(20..32))
}

/// The time of now as Kubernetes writes it into metadata.
pub(super) fn time_now() -> Value {
    serde_json::to_value(Time(Timestamp::now())).unwrap_or_default()
}

/// Makes or renews the record of an object; nothing when the file has changed since it was read, because another
/// process may know better.
fn make_record(files: &Files, parsed: &Parsed, source: Option<(&Path, Stamp)>) -> io::Result<Option<Value>> {
    let Some((path, stamp)) = source else { return Ok(None) };
    let mut lock = files.own.exclusive()?;
    let target = &parsed.target;
    let last = files.own.load(target)?;
    if let Some(last) = &last
        && content_hash(last) == parsed.hash
    {
        return Ok(Some(last.clone()));
    }
    if own::stamp(&files.directory.join(path)).ok() != Some(stamp) {
        return Ok(last);
    }
    let field = |name: &str| last.as_ref().and_then(|last| last.pointer(&format!("/metadata/{name}")).cloned());
    let generation = field("generation").and_then(|generation| generation.as_i64()).unwrap_or(0) + 1;
    let version = lock.next_version(last.as_ref().and_then(version).unwrap_or(0))?;
    let mut record = json!({
        "apiVersion": target.kind.api_version(),
        "kind": target.kind.name(),
        "metadata": {
            "name": target.key.name,
            "uid": uid(target),
            "creationTimestamp": field("creationTimestamp").unwrap_or_else(time_now),
            "generation": generation,
            "resourceVersion": version.to_string(),
            "annotations": { CONTENT: parsed.hash },
        },
    });
    if let (Some(status), Some(fields)) = (last.and_then(|last| last.get("status").cloned()), record.as_object_mut()) {
        fields.insert("status".to_owned(), status);
    }
    store(&files.own, target, &record)?;
    Ok(Some(record))
}

/// Writes an object or record; the exclusive lock must be held.
pub(super) fn store(own: &Own, target: &ObjectRef, value: &Value) -> io::Result<()> {
    let text = serde_saphyr::to_string(value).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    own.replace(&own.path(target), text.as_bytes())
}

/// The object of a file with what its record and Spillway add.
fn merge(parsed: &Parsed, record: Option<&Value>, version: &str) -> Value {
    let mut value = parsed.value.clone();
    let target = &parsed.target;
    let recorded = |name: &str| record.and_then(|record| record.pointer(&format!("/metadata/{name}")).cloned());
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        let mut fill = |name: &str, value: Option<Value>| {
            if let Some(value) = value
                && !metadata.contains_key(name)
            {
                metadata.insert(name.to_owned(), value);
            }
        };
        fill("uid", Some(Value::from(uid(target))));
        fill("creationTimestamp", recorded("creationTimestamp"));
        if target.kind.is_namespaced() {
            fill("namespace", Some(Value::from(target.key.namespace.clone())));
        }
        metadata.insert("generation".to_owned(), recorded("generation").unwrap_or(Value::from(1)));
        metadata.insert("resourceVersion".to_owned(), Value::from(version));
    }
    if let (Some(status), Some(fields)) = (record.and_then(|record| record.get("status")), value.as_object_mut()) {
        fields.insert("status".to_owned(), status.clone());
    }
    value
}

/// All files that people write, relative to the directory. Hidden ones are left out.
fn listing(directory: &Path) -> io::Result<BTreeMap<PathBuf, Stamp>> {
    fn walk(root: &Path, directory: &Path, depth: usize, found: &mut BTreeMap<PathBuf, Stamp>) -> io::Result<()> {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_name().to_string_lossy().starts_with('.') {
                continue;
            }
            // What vanishes while it is looked at is not there.
            let Ok(metadata) = fs::metadata(&path) else { continue };
            if metadata.is_dir() && depth < MAX_DEPTH {
                match walk(root, &path, depth + 1, found) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    walked => walked?,
                }
            } else if metadata.is_file()
                && path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
                && let Ok(stamp) = own::stamp(&path)
            {
                found.insert(path.strip_prefix(root).unwrap_or(&path).to_owned(), stamp);
            }
        }
        Ok(())
    }
    let mut found = BTreeMap::new();
    walk(directory, directory, 0, &mut found)?;
    Ok(found)
}

/// The files on disk.
struct Disk<'a>(&'a Files);

impl Texts for Disk<'_> {
    fn read(&self, file: &Path) -> io::Result<(Vec<u8>, Stamp)> {
        let path = self.0.directory.join(file);
        let text = fs::read(&path)?;
        Ok((text, own::stamp(&path)?))
    }

    fn last_good(&self, file: &Path) -> Option<Vec<u8>> {
        fs::read(self.0.own.good_path(file)).ok()
    }

    fn keep_good(&self, file: &Path, text: Option<&[u8]>) {
        let path = self.0.own.good_path(file);
        let kept = match text {
            Some(text) if fs::read(&path).is_ok_and(|kept| kept == text) => Ok(()),
            Some(text) => self.0.own.replace(&path, text),
            None => fs::remove_file(&path),
        };
        if let Err(error) = kept.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) }) {
            tracing::warn!(file = %file.display(), %error, "the last good version is not kept across restarts");
        }
    }
}

/// The fields of an object other than its metadata and status: a change of them is a new generation.
pub(super) fn generation_content(value: &Value) -> Map<String, Value> {
    let fields = value.as_object().into_iter().flatten();
    fields
        .filter(|(name, _)| !matches!(name.as_str(), "metadata" | "status"))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}
