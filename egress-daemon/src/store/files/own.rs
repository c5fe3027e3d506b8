//! Spillway's own files: one file for each object under `DIR/.spillway`, replaced by rename, with compare-and-swap under one lock.
//!
//! - `<Kind>/<name>.yaml`: EgressIP, EgressNode, Lease.
//! - `status/<Kind>/<name>.yaml` (`<namespace>.<name>.yaml` if the kind has namespaces): the record of a user's object: the time when it
//!   was first seen, its generation, a hash of the content of that generation, and the status.
//! - `good/<hash>.yaml`: the last text without problems of each user's file.
//! - `lock`: held exclusively for writing, and shared for reading without the kernel's notices. It contains the last assigned
//!   resourceVersion.

use crate::store::{Key, Kind, ObjectRef};
use nix::fcntl::{Flock, FlockArg};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use super::user::Stamp;

/// The time for which a writer waits for the lock. A process holds it for well under a millisecond, so only a stopped process makes others
/// wait this long.
const LOCK_WAIT: Duration = Duration::from_secs(1);
/// The time for which a reader waits before it reads without the lock. Each file is complete at any time, but files read without the lock
/// may be from different moments.
const READ_WAIT: Duration = Duration::from_millis(200);

/// The directory `.spillway`.
#[derive(Clone, Debug)]
pub(super) struct Own {
    root: PathBuf,
}

/// The exclusive lock, whose file contains the last assigned resourceVersion.
pub(super) struct Locked(Flock<File>);

impl Own {
    /// Creates the missing directories below an existing one, but never the directory itself: if it has become unreachable, a process with
    /// an empty directory of its own would hold every lease.
    pub(super) fn open(root: PathBuf) -> io::Result<Self> {
        let own = Own { root };
        let above = [own.root.clone(), own.root.join("good"), own.root.join("status")];
        for directory in above.into_iter().chain(own.directories().map(|(_, directory)| directory)) {
            match fs::create_dir(&directory) {
                Err(error) if !directory.is_dir() => return Err(error),
                _ => {}
            }
        }
        drop(own.lock_file()?);
        Ok(own)
    }

    /// Returns the directories of objects and records, each with its kind.
    pub(super) fn directories(&self) -> impl Iterator<Item = (Kind, PathBuf)> {
        let kinds = Kind::ALL.into_iter().filter(|kind| !kind.is_users() || kind.has_our_status());
        kinds.map(|kind| (kind, self.directory(kind)))
    }

    fn directory(&self, kind: Kind) -> PathBuf {
        if kind.is_users() { self.root.join("status").join(kind.name()) } else { self.root.join(kind.name()) }
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    fn lock_file(&self) -> io::Result<File> {
        let path = self.root.join("lock");
        let writable = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        // A process with only read permission can still take the lock.
        writable.or_else(|error| File::open(path).map_err(|_| error))
    }

    fn flock(&self, argument: FlockArg, wait: Duration) -> io::Result<Option<Flock<File>>> {
        let deadline = Instant::now() + wait;
        let mut file = self.lock_file()?;
        loop {
            match Flock::lock(file, argument) {
                Ok(lock) => return Ok(Some(lock)),
                Err((_, error)) if error != nix::errno::Errno::EWOULDBLOCK => return Err(error.into()),
                Err(_) if Instant::now() >= deadline => return Ok(None),
                Err((again, _)) => file = again,
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Takes the lock for reading; `None` if a process holds it for too long.
    pub(super) fn shared(&self) -> io::Result<Option<Flock<File>>> {
        self.flock(FlockArg::LockSharedNonblock, READ_WAIT)
    }

    /// Takes the lock for writing.
    pub(super) fn exclusive(&self) -> io::Result<Locked> {
        let held = || {
            io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "another process has held {} for a second: is one of Spillway's processes stopped?",
                    self.root.join("lock").display()
                ),
            )
        };
        self.flock(FlockArg::LockExclusiveNonblock, LOCK_WAIT)?.map(Locked).ok_or_else(held)
    }

    /// Returns the path of one of Spillway's objects, or of the record of a user's object.
    pub(super) fn path(&self, target: &ObjectRef) -> PathBuf {
        let Key { namespace, name } = &target.key;
        // The name of a namespace contains no dot.
        let prefix = if has_namespace(target.kind) { format!("{namespace}.") } else { String::new() };
        self.directory(target.kind).join(format!("{prefix}{name}.yaml"))
    }

    /// Loads the object or record of a target from disk.
    pub(super) fn load(&self, target: &ObjectRef) -> io::Result<Option<Value>> {
        self.read(target)?.map(|text| self.parse(target, &text)).transpose()
    }

    /// Reads the file of a target.
    pub(super) fn read(&self, target: &ObjectRef) -> io::Result<Option<Vec<u8>>> {
        match fs::read(self.path(target)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Parses the text of the file of a target.
    pub(super) fn parse(&self, target: &ObjectRef, text: &[u8]) -> io::Result<Value> {
        serde_saphyr::from_slice(text).map_err(|error| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} is not YAML, remove it: {error}", self.path(target).display()),
            )
        })
    }

    /// Returns every object and record on disk with the version of its file, sorted.
    pub(super) fn listing(&self) -> io::Result<Vec<(ObjectRef, Stamp)>> {
        let mut found = Vec::new();
        for (kind, directory) in self.directories() {
            for entry in fs::read_dir(directory)? {
                let entry = entry?;
                if let (Some(target), Ok(stamp)) = (target(kind, &entry.file_name()), stamp(&entry.path())) {
                    found.push((target, stamp));
                }
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    /// Replaces a file as a whole.
    pub(super) fn replace(&self, path: &Path, text: &[u8]) -> io::Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!(".{}-{}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let temporary = path.with_file_name(name);
        let written = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, path));
        if written.is_err() {
            // The error of the write is more useful than an error of the cleanup.
            fs::remove_file(&temporary).ok();
        }
        written
    }

    /// Removes the last good texts of all files except these.
    pub(super) fn keep_good_of<'a>(&self, files: impl Iterator<Item = &'a Path>) -> io::Result<()> {
        let keep: BTreeSet<PathBuf> = files.map(|file| self.good_path(file)).collect();
        for entry in fs::read_dir(self.root.join("good"))? {
            let path = entry?.path();
            if !keep.contains(&path) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    pub(super) fn good_path(&self, file: &Path) -> PathBuf {
        let name = super::parse::hash(&Value::from(file.to_string_lossy()).to_string());
        self.root.join("good").join(format!("{name}.yaml"))
    }
}

impl Locked {
    /// Assigns a resourceVersion that is greater than `least` and than every version assigned before.
    pub(super) fn next_version(&mut self, least: u64) -> io::Result<u64> {
        let mut text = String::new();
        self.0.rewind()?;
        self.0.read_to_string(&mut text)?;
        let next = text.trim().parse::<u64>().unwrap_or(0).max(least) + 1;
        self.0.rewind()?;
        // Numbers only grow, so the new text is never shorter than the old text.
        self.0.write_all(format!("{next}\n").as_bytes())?;
        Ok(next)
    }
}

/// Returns the target of a file in the directory of its kind.
pub(super) fn target(kind: Kind, file: &OsStr) -> Option<ObjectRef> {
    let name = file.to_str()?.strip_suffix(".yaml").filter(|name| !name.starts_with('.'))?;
    let key = match has_namespace(kind) {
        true => name.split_once('.').map(|(namespace, name)| Key::namespaced(namespace, name))?,
        false => Key::cluster(name),
    };
    Some(ObjectRef { kind, key })
}

/// Returns whether a kind's file names begin with the namespace. Names are unique among the objects of a kind that Spillway writes.
fn has_namespace(kind: Kind) -> bool {
    kind.is_users() && kind.is_namespaced()
}

/// Returns the version of a file on disk.
pub(super) fn stamp(path: &Path) -> io::Result<Stamp> {
    let metadata = fs::metadata(path)?;
    Ok(Stamp {
        modified: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
        size: metadata.len(),
        inode: metadata.ino(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_store_directory_is_not_recreated() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        assert_eq!(Own::open(gone.join(".spillway")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!gone.exists());
        fs::create_dir(&gone).unwrap();
        Own::open(gone.join(".spillway")).unwrap();
        assert!(gone.join(".spillway/status/EgressGatewayPolicy").is_dir());
    }
}
