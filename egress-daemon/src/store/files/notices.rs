//! The kernel's notices of changes in the directory (inotify(7)). The kernel queues the notice of a rename before the rename returns, so
//! a process that reads the notices while it holds the lock misses no earlier write.

use super::own::{self, Own};
use crate::store::{Kind, ObjectRef};
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// Events that may mean a change of an object. Opening and reading are excluded, since every scan of the directory does both.
const USERS: AddWatchFlags = AddWatchFlags::IN_CREATE
    .union(AddWatchFlags::IN_MODIFY)
    .union(AddWatchFlags::IN_CLOSE_WRITE)
    .union(AddWatchFlags::IN_ATTRIB)
    .union(AddWatchFlags::IN_MOVE)
    .union(AddWatchFlags::IN_DELETE)
    .union(AddWatchFlags::IN_MOVE_SELF)
    .union(AddWatchFlags::IN_DELETE_SELF);
/// The same for Spillway's files, which are replaced by rename.
const OWN: AddWatchFlags =
    AddWatchFlags::IN_CLOSE_WRITE.union(AddWatchFlags::IN_MOVED_TO).union(AddWatchFlags::IN_DELETE);

/// The notices of one directory.
#[derive(Debug)]
pub(super) struct Notices {
    inotify: Inotify,
    places: BTreeMap<WatchDescriptor, WatchedDirectory>,
    /// The users' directories that were followed since the last scan began.
    met: BTreeSet<WatchDescriptor>,
}

#[derive(Debug)]
enum WatchedDirectory {
    Users,
    Own(Kind),
}

/// The changes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Noticed {
    /// Whether any of the users' files changed.
    pub(super) users: bool,
    /// The objects and records whose files below `.spillway` changed.
    pub(super) own: BTreeSet<ObjectRef>,
    /// Whether notices were lost, so that any file may have changed.
    pub(super) lost: bool,
}

impl Notices {
    pub(super) fn open() -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        Ok(Notices { inotify, places: BTreeMap::new(), met: BTreeSet::new() })
    }

    /// Follows Spillway's directories, including recreated ones.
    pub(super) fn follow_own(&mut self, own: &Own) -> io::Result<()> {
        for (kind, directory) in own.directories() {
            let watch = self.inotify.add_watch(&directory, OWN)?;
            self.places.insert(watch, WatchedDirectory::Own(kind));
        }
        Ok(())
    }

    /// Follows a users' directory. This must be called before its contents are listed.
    pub(super) fn follow(&mut self, directory: &Path) -> io::Result<()> {
        match self.inotify.add_watch(directory, USERS) {
            Ok(watch) => {
                self.places.insert(watch, WatchedDirectory::Users);
                self.met.insert(watch);
                Ok(())
            }
            // The directory no longer exists, and its removal causes a notice.
            Err(Errno::ENOENT | Errno::ENOTDIR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Stops following directories that were not followed again since the last call.
    pub(super) fn forget_others(&mut self) {
        let met = std::mem::take(&mut self.met);
        let inotify = &self.inotify;
        self.places.retain(|watch, place| {
            let stays = matches!(place, WatchedDirectory::Own(_)) || met.contains(watch);
            if !stays {
                // The kernel may have removed the watch already.
                inotify.rm_watch(*watch).ok();
            }
            stays
        });
    }

    /// Returns the changes since the last call.
    pub(super) fn take(&mut self) -> Noticed {
        let mut noticed = Noticed::default();
        loop {
            match self.inotify.read_events() {
                Ok(events) => events.iter().for_each(|event| self.sort(event, &mut noticed)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return noticed,
                Err(_) => {
                    noticed.lost = true;
                    return noticed;
                }
            }
        }
    }

    fn sort(&mut self, event: &InotifyEvent, noticed: &mut Noticed) {
        let name = event.name.as_deref();
        match self.places.get(&event.wd) {
            _ if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) => noticed.lost = true,
            _ if event.mask.contains(AddWatchFlags::IN_IGNORED) => {
                noticed.lost |= self.places.remove(&event.wd).is_some();
            }
            Some(WatchedDirectory::Own(kind)) => noticed.own.extend(name.and_then(|name| own::target(*kind, name))),
            Some(WatchedDirectory::Users) => noticed.users |= !name.is_some_and(is_temporary),
            None => {}
        }
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

/// Returns whether a file is temporary, and so about to be renamed.
fn is_temporary(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(b".") && name.ends_with(b".tmp")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Key;
    use std::fs;

    /// Returns a directory that is followed, with Spillway's own part.
    fn followed() -> (tempfile::TempDir, Own, Notices) {
        let dir = tempfile::tempdir().unwrap();
        let own = Own::open(dir.path().join(".spillway")).unwrap();
        let mut notices = Notices::open().unwrap();
        notices.follow_own(&own).unwrap();
        notices.follow(dir.path()).unwrap();
        (dir, own, notices)
    }

    #[test]
    fn reading_temporary_files_and_the_lock_are_not_noticed() {
        let (dir, own, mut notices) = followed();
        fs::write(dir.path().join("web.yaml"), "a").unwrap();
        assert_eq!(notices.take(), Noticed { users: true, ..Noticed::default() });
        fs::read(dir.path().join("web.yaml")).unwrap();
        fs::read_dir(dir.path()).unwrap().for_each(drop);
        own.listing().unwrap();
        fs::write(dir.path().join(".web.tmp"), "a").unwrap();
        fs::write(dir.path().join(".spillway/Lease/.12-3.tmp"), "a").unwrap();
        own.exclusive().unwrap().next_version(0).unwrap();
        assert_eq!(notices.take(), Noticed::default());
        fs::rename(dir.path().join(".web.tmp"), dir.path().join("web.yaml")).unwrap();
        assert!(notices.take().users);
    }

    #[test]
    fn writes_and_removals_of_own_files_are_noticed_by_name() {
        let (_dir, own, mut notices) = followed();
        let of = |kind, name: &str| ObjectRef { kind, key: Key::cluster(name) };
        let all = [of(Kind::EgressIP, "192.0.2.1"), of(Kind::EgressGatewayPolicy, "web")];
        for target in &all {
            own.replace(&own.path(target), b"a").unwrap();
        }
        assert_eq!(notices.take(), Noticed { own: all.clone().into(), ..Noticed::default() });
        fs::remove_file(own.path(&all[1])).unwrap();
        assert_eq!(notices.take().own, [all[1].clone()].into());
    }

    #[test]
    fn moved_user_directory_is_unfollowed_and_removed_own_directory_noticed() {
        let (dir, _own, mut notices) = followed();
        let (below, elsewhere) = (dir.path().join("below"), tempfile::tempdir().unwrap());
        fs::create_dir(&below).unwrap();
        notices.follow(&below).unwrap();
        notices.forget_others();
        notices.take();
        fs::write(below.join("web.yaml"), "a").unwrap();
        assert!(notices.take().users, "the last one is followed");
        fs::rename(&below, elsewhere.path().join("below")).unwrap();
        notices.follow(dir.path()).unwrap();
        notices.forget_others();
        notices.take();
        fs::write(elsewhere.path().join("below/web.yaml"), "b").unwrap();
        assert_eq!(notices.take(), Noticed::default());
        fs::remove_dir(dir.path().join(".spillway/Lease")).unwrap();
        assert!(notices.take().lost);
    }
}
