//! What Spillway writes: one file for each object under `DIR/.spillway`, replaced by rename and compared and swapped
//! under one lock.
//!
//! - `<Kind>/<name>.yaml`: EgressIP, EgressNode, Lease.
//! - `status/<Kind>/<name>.yaml` (`<namespace>.<name>.yaml` where the kind has namespaces): the record of an object
//!   that a user writes: when it was first seen, its generation, a hash of the content that the generation stands for,
//!   and the status.
//! - `good/<hash>.yaml`: the last text without problems of each file that a user writes.
//! - `lock`: held exclusively while writing, and shared while reading without the kernel's notices; its content is the last
//!   resourceVersion assigned.

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

/// How long a writer waits for the lock. It is held for well under a millisecond at a time, so only a stopped process
/// makes others wait this long.
const LOCK_WAIT: Duration = Duration::from_secs(1);
/// How long a reader waits before it reads without the lock: each file is complete at any time, but different files may
/// then be of different moments.
const READ_WAIT: Duration = Duration::from_millis(200);

/// The directory `.spillway`.
#[derive(Clone, Debug)]
pub(super) struct Own {
    root: PathBuf,
}

/// The exclusive lock with the last resourceVersion assigned.
pub(super) struct Locked(Flock<File>);

impl Own {
    /// Makes what is missing below an existing directory. A directory that became unreachable is not made anew: in an empty
    /// one of its own, a process would hold every lease.
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

    /// The directories that hold objects and records, with the kind of those in them.
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
        // A process that may only read can still take part in the locking.
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

    /// The lock for reading; `None` if some process holds it for too long.
    pub(super) fn shared(&self) -> io::Result<Option<Flock<File>>> {
        self.flock(FlockArg::LockSharedNonblock, READ_WAIT)
    }

    /// The lock for writing.
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

    /// The file of an object that Spillway writes, or of the record of one that a user writes.
    pub(super) fn path(&self, target: &ObjectRef) -> PathBuf {
        let Key { namespace, name } = &target.key;
        // No namespace has a dot in its name.
        let prefix = if has_namespace(target.kind) { format!("{namespace}.") } else { String::new() };
        self.directory(target.kind).join(format!("{prefix}{name}.yaml"))
    }

    /// The object or record of a target as it is on disk.
    pub(super) fn load(&self, target: &ObjectRef) -> io::Result<Option<Value>> {
        self.read(target)?.map(|text| self.parse(target, &text)).transpose()
    }

    /// The text of its file.
    pub(super) fn read(&self, target: &ObjectRef) -> io::Result<Option<Vec<u8>>> {
        match fs::read(self.path(target)) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The object or record that such a text stands for.
    pub(super) fn parse(&self, target: &ObjectRef, text: &[u8]) -> io::Result<Value> {
        serde_saphyr::from_slice(text).map_err(|error| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} is not YAML, remove it: {error}", self.path(target).display()),
            )
        })
    }

    /// Every object and record on disk with the version of its file. Sorted.
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
            // The error of the write says more than that of the cleanup.
            fs::remove_file(&temporary).ok();
        }
        written
    }

    /// Forgets the last good texts of all files but these.
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
    /// A resourceVersion that is greater than `least` and than every one assigned before.
    pub(super) fn next_version(&mut self, least: u64) -> io::Result<u64> {
        let mut text = String::new();
        self.0.rewind()?;
        self.0.read_to_string(&mut text)?;
        let next = text.trim().parse::<u64>().unwrap_or(0).max(least) + 1;
        self.0.rewind()?;
        // Numbers only grow, so that the new text covers the old one.
        self.0.write_all(format!("{next}\n").as_bytes())?;
        Ok(next)
    }
}

/// The object or record that a file is for, in the directory of its kind.
pub(super) fn target(kind: Kind, file: &OsStr) -> Option<ObjectRef> {
    let name = file.to_str()?.strip_suffix(".yaml").filter(|name| !name.starts_with('.'))?;
    let key = match has_namespace(kind) {
        true => name.split_once('.').map(|(namespace, name)| Key::namespaced(namespace, name))?,
        false => Key::cluster(name),
    };
    Some(ObjectRef { kind, key })
}

/// Whether the names of a kind's files have the namespace in front. Among objects of a kind that Spillway writes itself, names are unique.
fn has_namespace(kind: Kind) -> bool {
    kind.is_users() && kind.is_namespaced()
}

/// The version of a file on disk.
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
    fn a_directory_that_was_cut_off_is_not_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        assert_eq!(Own::open(gone.join(".spillway")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!gone.exists());
        fs::create_dir(&gone).unwrap();
        Own::open(gone.join(".spillway")).unwrap();
        assert!(gone.join(".spillway/status/EgressGatewayPolicy").is_dir());
    }
}
