//! `egress-daemon cleanup`: removes everything that the agent made on this node, of any layout version, and reports what
//! it removed. It may be repeated: a missing thing is no error.

use crate::{
    ctl::{
        dump::Dump,
        inventory::{self, Inventory},
    },
    lock::{LockError, RunFiles},
};
use anyhow::{Context as _, Result, bail};
use aya::programs::loaded_programs;
use egress_common::endpoint::Endpoint;
use egress_node::{
    datapath::{
        Pins,
        attach::{self, Mode},
    },
    host::{cleanup as host, netlink::Netlink, sysctl::Sysctls},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::Path,
    time::{Duration, Instant},
};

/// How long the kernel may take to free programs that nothing holds any more.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often that is checked.
const LOOK: Duration = Duration::from_millis(50);

/// Errors for which the directory of the pins may stay: somebody else uses it too.
const KEPT: [io::ErrorKind; 3] =
    [io::ErrorKind::DirectoryNotEmpty, io::ErrorKind::ResourceBusy, io::ErrorKind::PermissionDenied];

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CleanupReport {
    /// What was removed, a line each.
    pub removed: Vec<String>,
    /// What could not be removed or put back, and why.
    pub failed: Vec<String>,
}

impl CleanupReport {
    /// Notes the removal of a thing, or why it failed. What was not there is not noted.
    fn note(&mut self, what: impl fmt::Display, result: io::Result<()>) {
        match result {
            Ok(()) => self.removed.push(what.to_string()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.failed.push(format!("{what}: {error}")),
        }
    }
}

impl fmt::Display for CleanupReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.removed {
            writeln!(f, "removed {line}")?;
        }
        for line in &self.failed {
            writeln!(f, "FAILED  {line}")?;
        }
        if self.removed.is_empty() && self.failed.is_empty() {
            writeln!(f, "there was nothing to remove")?;
        }
        Ok(())
    }
}

/// How to clean up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Goes ahead although an agent runs.
    pub force: bool,
    /// Goes ahead although pods that policies select run here: from then on they leave with the node's address.
    pub release: bool,
    /// Keeps the logs of leases and flows, which are queried later.
    pub keep_logs: bool,
}

/// Removes what the agent with these pins made. Refuses while it runs, unless forced, and while selected pods run here, unless they are
/// released.
pub async fn run(bpffs: &Path, Options { force, release, keep_logs }: Options) -> Result<CleanupReport> {
    let pins = Pins::new(bpffs);
    let files = RunFiles::of(bpffs);
    let lock = match files.acquire() {
        Ok(lock) => Some(lock),
        Err(LockError::Held { .. }) if force => None,
        Err(error @ LockError::Held { .. }) => bail!("{error}; --force removes all of it under the running agent"),
        Err(error) => return Err(error.into()),
    };
    let before = inventory::take(&pins).await?;
    if before.pins.iter().any(|path| path.exists()) && !inventory::on_bpffs(pins.root()) {
        bail!(
            "{} is not on a BPF file system, so no agent made what is in it; name its pins with --bpffs",
            bpffs.display()
        );
    }
    if !release {
        refuse_to_release(&pins, &before).await?;
    }
    let mut report = CleanupReport::default();
    detach_filters(&before, &mut report).await?;
    remove_pins(&before, &mut report);
    remove_from_host(&files, &mut report).await?;
    for file in [files.socket(), files.sysctls()] {
        report.note(file.display(), fs::remove_file(&file));
    }
    for log in [files.log(), files.flows()].into_iter().filter(|_| !keep_logs) {
        report.note(log.display(), fs::remove_dir_all(&log));
    }
    // It has nothing else in it.
    fs::remove_dir(files.logs()).ok();
    wait_for_programs(&before, &mut report).await;
    match lock {
        Some(lock) => lock.remove().with_context(|| files.lock().display().to_string())?,
        None => report.failed.push(format!("{}: an agent holds it", files.lock().display())),
    }
    Ok(report)
}

/// An error if the maps name selected pods whose interfaces are still there, or cannot be read.
async fn refuse_to_release(pins: &Pins, before: &Inventory) -> Result<()> {
    if before.maps.is_empty() {
        return Ok(());
    }
    let dump = Dump::read(pins, false).context(
        "the maps do not tell whether policies select pods on this node. With --release, such pods leave with the node's address from now on",
    )?;
    let netlink = Netlink::open().context("netlink")?;
    let links = inventory::interfaces(&netlink.handle).await?;
    let pods: Vec<String> = selected(&dump, |ifindex| links.contains_key(&ifindex)).collect();
    let Some(first) = pods.first() else { return Ok(()) };
    let others = match pods.len() {
        1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    bail!(
        "policies select pods on this node: {first}{others}. Without Spillway's programs they leave with the node's address. Move them to \
         other nodes (`kubectl drain`), or allow it with --release"
    )
}

/// The names of selected pods that are behind an interface that exists, or behind any.
fn selected(dump: &Dump, exists: impl Fn(u32) -> bool) -> impl Iterator<Item = String> {
    let present = move |endpoint: &Endpoint| endpoint.class != 0 && (endpoint.ifindex == 0 || exists(endpoint.ifindex));
    dump.endpoints()
        .into_iter()
        .filter(move |(_, (endpoint, _))| present(endpoint))
        .map(|(id, _)| dump.endpoint_name(id))
}

/// TCX links go with their pins; filters have none.
async fn detach_filters(before: &Inventory, report: &mut CleanupReport) -> Result<()> {
    for program in &before.programs {
        for hook in &program.attached {
            let Some(interface) = &hook.interface else { continue };
            if hook.pin.is_none() {
                attach::detach_filter(&program.name, interface);
            }
            report.removed.push(format!("{} at {interface} {} ({})", program.name, hook.direction, hook.mode));
        }
    }
    // Without CAP_SYS_ADMIN, programs cannot be listed. Filters have names.
    if attach::mode() == Mode::Clsact {
        let netlink = Netlink::open().context("netlink")?;
        for interface in inventory::interfaces(&netlink.handle).await?.values() {
            // One of each direction: all our filters of a direction are detached together.
            ["pod_egress", "pod_ingress"].into_iter().for_each(|program| attach::detach_filter(program, interface));
        }
    }
    Ok(())
}

fn remove_pins(before: &Inventory, report: &mut CleanupReport) {
    let mut pins: BTreeMap<&Path, usize> = BTreeMap::new();
    for path in &before.pins {
        let directory = path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
        if !directory {
            match fs::remove_file(path) {
                Ok(()) => *pins.entry(path.parent().unwrap_or(path)).or_default() += 1,
                error => report.note(format!("pin {}", path.display()), error),
            }
            continue;
        }
        if let Some(count) = pins.get(path.as_path()) {
            report.removed.push(format!("{count} pins in {}", path.display()));
        }
        let result = fs::remove_dir(path);
        // The directory that was named may be a mount point, or hold pins of others.
        let keep = Some(path) == before.pins.last() && result.as_ref().is_err_and(|error| KEPT.contains(&error.kind()));
        if !keep {
            report.note(format!("directory {}", path.display()), result);
        }
    }
}

/// The tunnel device and the changed settings.
async fn remove_from_host(files: &RunFiles, report: &mut CleanupReport) -> Result<()> {
    let netlink = Netlink::open().context("netlink")?;
    let mut sysctls = Sysctls::open(files.sysctls())?;
    let (artifacts, warnings) = host::remove(&netlink.handle, &mut sysctls).await?;
    report.removed.extend(artifacts.iter().map(ToString::to_string));
    report.failed.extend(warnings.iter().map(ToString::to_string));
    Ok(())
}

/// The kernel frees programs a little after the last thing that holds them is gone.
async fn wait_for_programs(before: &Inventory, report: &mut CleanupReport) {
    let ours: BTreeSet<u32> = before.programs.iter().map(|program| program.id).collect();
    let left = || -> BTreeSet<u32> {
        loaded_programs().filter_map(Result::ok).map(|program| program.id()).filter(|id| ours.contains(id)).collect()
    };
    let end = Instant::now() + PATIENCE;
    while !left().is_empty() && Instant::now() < end {
        tokio::time::sleep(LOOK).await;
    }
    let left = left();
    for program in &before.programs {
        let what = format!("program {} ({})", program.name, program.id);
        if left.contains(&program.id) {
            report.failed.push(format!("{what}: a process still holds it; it disappears when that process ends"));
        } else {
            report.removed.push(what);
        }
    }
}

#[cfg(test)]
#[path = "cleanup_tests.rs"]
mod tests;
