//! The lifetime of a lab: its unique name, its folder, and the guarantee that everything is removed when it ends.
//!
//! Every lab has a watchdog, a shell that waits for the end of a pipe. However the lab's process ends (a panic, Ctrl-C, `kill
//! -9`), the pipe ends too, and the watchdog kills the processes in the lab's namespaces and removes the namespaces, the pins and
//! the folder. An orderly end removes these itself, after the owners of processes have ended them, and dismisses the watchdog.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

use crate::netns::{self, NETNS_DIR, NetNs};

/// The directory where BPF objects are pinned: `BPFFS/<lab>/<node>`.
pub const BPFFS: &str = "/sys/fs/bpf";
/// The folder where labs keep their manifests and logs: `LABS/<lab>/`.
pub const LABS: &str = "/tmp/spillway-lab";

const PREFIX: &str = "sw-";
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// Kills the processes in the namespaces of the lab or cluster $LAB, and removes the namespaces, the pins and $FOLDER.
const REMOVE: &str = r#"
for ns in /run/netns/"$LAB"-*; do
  [ -e "$ns" ] || continue
  for pid in $(ip netns pids "${ns##*/}" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
done
for ns in /run/netns/"$LAB"-*; do
  [ -e "$ns" ] || continue
  umount -l "$ns" 2>/dev/null; rm -f "$ns"
done
rm -rf "/sys/fs/bpf/$LAB" "$FOLDER"
exit 0
"#;

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// One lab's name, folder and namespaces. Dropping it removes them.
#[derive(Debug)]
pub struct Scope {
    id: String,
    dir: PathBuf,
    namespaces: Vec<String>,
    keep: bool,
    /// Dropped, and so dismissed, last.
    _watchdog: Watchdog,
}

impl Scope {
    /// Opens a scope with a name that is unique on this machine. First removes the leftovers of dead processes.
    pub fn open() -> Result<Scope> {
        fs::create_dir_all(LABS).with_context(|| format!("cannot make {LABS}"))?;
        let _one_at_a_time = lock()?;
        remove_stale()?;
        mount_bpffs()?;
        raise_file_limit()?;
        let id = format!("{PREFIX}{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let dir = Path::new(LABS).join(&id);
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let watchdog = Watchdog::start(&id, &dir)?;
        Ok(Scope { id, dir, namespaces: Vec::new(), keep: false, _watchdog: watchdog })
    }

    /// Returns the unique name. All namespaces start with it and a dash.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the lab's own folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the folder for the pins of one node, which the agent creates.
    pub fn bpffs(&self, node: &str) -> PathBuf {
        Path::new(BPFFS).join(&self.id).join(node)
    }

    /// Creates a namespace `<lab>-<role>`, which is removed with the scope.
    pub fn namespace(&mut self, role: &str) -> Result<NetNs> {
        let name = format!("{}-{role}", self.id);
        let ns = NetNs::create(&name)?;
        self.namespaces.push(name);
        Ok(ns)
    }

    /// Removes one of this scope's namespaces early.
    pub fn remove_namespace(&mut self, ns: &NetNs) -> Result<()> {
        self.namespaces.retain(|name| name != ns.name());
        netns::remove(ns.name())
    }

    /// Leaves everything in place at the end, until [`remove_kept`].
    pub fn keep(&mut self) -> Result<()> {
        fs::write(self.dir.join("keep"), "").context("cannot mark the lab as kept")?;
        self.keep = true;
        Ok(())
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        if !self.keep {
            for name in &self.namespaces {
                netns::remove(name).ok();
            }
            fs::remove_dir_all(Path::new(BPFFS).join(&self.id)).ok();
            if std::thread::panicking() {
                eprintln!("lab: logs and manifests of the failed lab are kept in {}", failed_dir(&self.id).display());
                fs::rename(&self.dir, failed_dir(&self.id)).ok();
            } else {
                fs::remove_dir_all(&self.dir).ok();
            }
        }
    }
}

/// Kills the processes in the namespaces of a lab or a cluster when this process ends for any reason, and removes the
/// namespaces and the folder, unless it is dropped before.
#[derive(Debug)]
pub struct Watchdog(Child);

impl Watchdog {
    /// Starts the watchdog. The namespaces' names begin with `id` and a dash.
    pub fn start(id: &str, folder: &Path) -> Result<Watchdog> {
        let script = format!("trap '' INT TERM HUP\nread -r word\n[ \"$word\" = done ] && exit 0\n{REMOVE}");
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &script]).env("LAB", id).env("FOLDER", folder);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // A Ctrl-C at the terminal must not reach it.
        command.process_group(0);
        command.spawn().map(Watchdog).with_context(|| format!("cannot start the watchdog of {id}"))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        if let Some(mut stdin) = self.0.stdin.take() {
            stdin.write_all(b"done\n").ok();
        }
        self.0.wait().ok();
    }
}

/// Removes the labs that were kept on purpose, and returns their names.
pub fn remove_kept() -> Result<Vec<String>> {
    let _one_at_a_time = lock()?;
    let mut removed = Vec::new();
    for id in labs()? {
        if Path::new(LABS).join(&id).join("keep").exists() {
            remove_lab(&id)?;
            removed.push(id);
        }
    }
    Ok(removed)
}

fn failed_dir(id: &str) -> PathBuf {
    Path::new(LABS).join(format!("failed-{id}"))
}

fn lock() -> Result<Flock<fs::File>> {
    let path = Path::new(LABS).join("lock");
    let file = fs::File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error).context("cannot lock the labs")
}

/// Returns the names of all labs that have a namespace, pins or a folder on this machine.
fn labs() -> Result<Vec<String>> {
    let mut ids = std::collections::BTreeSet::new();
    for folder in [NETNS_DIR, LABS, BPFFS] {
        let Ok(entries) = fs::read_dir(folder) else { continue };
        for entry in entries {
            let name = entry?.file_name();
            let mut parts = name.to_str().unwrap_or_default().splitn(4, '-');
            if let (Some("sw"), Some(pid), Some(number)) = (parts.next(), parts.next(), parts.next())
                && pid.parse::<u32>().is_ok()
                && number.parse::<u32>().is_ok()
            {
                ids.insert(format!("{PREFIX}{pid}-{number}"));
            }
        }
    }
    Ok(ids.into_iter().collect())
}

fn remove_stale() -> Result<()> {
    for id in labs()? {
        let pid = id.split('-').nth(1).unwrap_or_default();
        let alive = Path::new("/proc").join(pid).exists();
        if !alive && !Path::new(LABS).join(&id).join("keep").exists() {
            remove_lab(&id)?;
        }
    }
    Ok(())
}

fn remove_lab(id: &str) -> Result<()> {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", REMOVE]).env("LAB", id).env("FOLDER", Path::new(LABS).join(id));
    crate::command::output(&mut command).map(drop).with_context(|| format!("cannot remove lab {id}"))
}

fn mount_bpffs() -> Result<()> {
    let mounted = || nix::sys::statfs::statfs(BPFFS).is_ok_and(|fs| fs.filesystem_type().0 == BPF_FS_MAGIC);
    if mounted() {
        return Ok(());
    }
    nix::mount::mount(Some("bpf"), BPFFS, Some("bpf"), nix::mount::MsFlags::empty(), None::<&str>)
        .with_context(|| format!("cannot mount the BPF file system on {BPFFS}"))
}

/// The number of files to allow: more sockets than the largest load needs.
const FILES: u64 = 200_000;

/// Raises the limit of open files: as root, even beyond the hard limit of a login or a container.
fn raise_file_limit() -> Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let wanted = hard.max(FILES);
    if soft < wanted && setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).is_err() && soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("cannot raise the limit of open files")?;
    }
    Ok(())
}
