//! The files of one agent below /run/spillway, which do not survive a reboot, the lock that it holds while it runs, and the location of
//! its logs.
//!
//! An agent is identified by its pins (`--bpffs`). Several agents may share one kernel, each with its own pins and files.

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use siphasher::sip::SipHasher13;
use std::{
    fs::{self, File, OpenOptions},
    hash::Hasher,
    io::{self, Read, Seek, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::{Component, Path, PathBuf},
};

/// The directory of all agents' files.
pub const DIRECTORY: &str = "/run/spillway";
/// The directory of all agents' logs, which survive a reboot, unless [`STATE_DIRECTORY`] is set.
pub const LOGS: &str = "/var/lib/spillway";
/// The environment variable in which systemd passes a unit's state directory.
const STATE_DIRECTORY: &str = "STATE_DIRECTORY";
/// The number of characters of the pin directory's name in a file name. A socket's path is limited to 107 bytes.
const READABLE: usize = 32;

/// The files of the agent whose pins are in one directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFiles {
    directory: PathBuf,
    stem: String,
}

impl RunFiles {
    /// Returns the files of the agent with these pins.
    pub fn of(bpffs: &Path) -> Self {
        Self::below(Path::new(DIRECTORY), bpffs)
    }

    /// Like [`Self::of`], but in `directory` instead of [`DIRECTORY`].
    pub fn below(directory: &Path, bpffs: &Path) -> Self {
        let path = std::path::absolute(bpffs).unwrap_or_else(|_| bpffs.to_path_buf());
        let path: PathBuf = path.components().filter(|c| *c != Component::CurDir).collect();
        let last = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let readable = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '.' { c } else { '-' };
        let name: String = last.chars().map(readable).take(READABLE).collect();
        let mut hasher = SipHasher13::new();
        hasher.write(path.as_os_str().as_bytes());
        Self { directory: directory.to_path_buf(), stem: format!("{name}-{:016x}", hasher.finish()) }
    }

    fn file(&self, ending: &str) -> PathBuf {
        self.directory.join(format!("{}.{ending}", self.stem))
    }

    /// The lock that a running agent holds.
    pub fn lock(&self) -> PathBuf {
        self.file("lock")
    }

    /// The socket on which a running agent reports its state.
    pub fn socket(&self) -> PathBuf {
        self.file("sock")
    }

    /// The journal of changed kernel settings (`host::sysctl::Sysctls::open`).
    pub fn sysctls(&self) -> PathBuf {
        self.file("sysctl.json")
    }

    /// The directory of the lease log (`flowlog`).
    pub fn log(&self) -> PathBuf {
        self.logs().join("leases")
    }

    /// The directory of the flow log.
    pub fn flows(&self) -> PathBuf {
        self.logs().join("flows")
    }

    /// The directory of both logs.
    pub fn logs(&self) -> PathBuf {
        let place = std::env::var_os(STATE_DIRECTORY).unwrap_or_else(|| LOGS.into());
        Path::new(&place).join(&self.stem)
    }

    /// Creates the directory of the run files.
    pub fn make_directory(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.directory)
    }

    /// Takes the lock for this process, until the result is dropped.
    pub fn acquire(&self) -> Result<AgentLock, LockError> {
        let path = self.lock();
        let failed = |source: io::Error| LockError::File { path: path.clone(), source };
        self.make_directory().map_err(failed)?;
        loop {
            let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o644).clone();
            let file = options.open(&path).map_err(failed)?;
            let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((mut file, Errno::EWOULDBLOCK)) => {
                    return Err(LockError::Held { path, holder: holder(&mut file) });
                }
                Err((_, errno)) => return Err(failed(errno.into())),
            };
            // A cleanup may have removed the file between open and lock. The lock would then be on an unlinked file.
            if !same_file(&lock, &path) {
                continue;
            }
            lock.set_len(0).map_err(failed)?;
            writeln!(lock, "{}", std::process::id()).map_err(failed)?;
            return Ok(AgentLock { _lock: lock, path });
        }
    }
}

/// Returns the process ID recorded in a lock file.
fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Proof that this process is the agent of its pins. Dropping it releases the lock; the file stays.
#[derive(Debug)]
pub struct AgentLock {
    _lock: Flock<File>,
    path: PathBuf,
}

impl AgentLock {
    /// Removes the file, then releases the lock.
    pub fn remove(self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }
}

/// Why the lock could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds it.
    #[error(
        "an agent is running with these pins{}: stop it first, or name another directory with --bpffs",
        holder.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    )]
    Held {
        /// The lock file.
        path: PathBuf,
        /// The ID of the process that holds it, if known.
        holder: Option<u32>,
    },
    /// The file cannot be created or locked.
    #[error("the lock {} cannot be taken: {source}; /run/spillway must be writable for the agent", path.display())]
    File {
        /// The lock file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_directory_of_pins_has_files_of_its_own() {
        let of = |path: &str| RunFiles::of(Path::new(path));
        assert_eq!(of("/sys/fs/bpf/spillway"), of("/sys/fs/bpf/spillway/"));
        assert_eq!(of("/sys/fs/bpf/spillway"), of("/sys/fs/./bpf//spillway"));
        assert_ne!(of("/sys/fs/bpf/a-b"), of("/sys/fs/bpf/a/b"));
        assert_ne!(of("/sys/fs/bpf/lab/gw1"), of("/sys/fs/bpf/other/gw1"));
        let socket = of("/sys/fs/bpf/lab/gw 1/é").socket();
        assert!(socket.starts_with(DIRECTORY) && socket.extension().unwrap() == "sock", "{}", socket.display());
        let long = of(&format!("/sys/fs/bpf/{}", "x".repeat(200))).sysctls();
        assert!(long.as_os_str().len() < 100, "{}", long.display());
    }

    #[test]
    fn a_second_agent_is_refused_and_the_first_one_named() {
        let dir = tempfile::tempdir().unwrap();
        let files = RunFiles::below(&dir.path().join("run"), Path::new("/sys/fs/bpf/spillway"));
        let lock = files.acquire().unwrap();
        let error = files.acquire().unwrap_err();
        assert!(matches!(error, LockError::Held { holder: Some(pid), .. } if pid == std::process::id()), "{error}");
        assert!(error.to_string().contains("--bpffs"), "{error}");
        drop(lock);
        files.acquire().unwrap().remove().unwrap();
        assert!(!files.lock().exists());
        files.acquire().unwrap();
    }
}
