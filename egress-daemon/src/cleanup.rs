//! `egress-daemon cleanup`: removes everything that agents of any layout version made on this node, and reports what it
//! removed. It may be repeated, since a missing object is not an error.

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

/// The longest wait for the kernel to free unreferenced programs.
const PATIENCE: Duration = Duration::from_secs(5);
/// The interval of the checks during this wait.
const LOOK: Duration = Duration::from_millis(50);

/// The errors on which the pin directory stays, because others use it too.
const KEPT: [io::ErrorKind; 3] =
    [io::ErrorKind::DirectoryNotEmpty, io::ErrorKind::ResourceBusy, io::ErrorKind::PermissionDenied];

/// The result of a cleanup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CleanupReport {
    /// The removed objects, one line each.
    pub removed: Vec<String>,
    /// The objects that could not be removed or restored, with the reasons.
    pub failed: Vec<String>,
}

impl CleanupReport {
    /// Records the removal of an object, or why it failed. Ignores an object that did not exist.
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

/// The options of a cleanup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Proceeds even if an agent is running.
    pub force: bool,
    /// Proceeds even if selected pods run on this node. From then on, their packets leave with the node's address.
    pub release: bool,
    /// Keeps the logs of leases and flows, which are queried later.
    pub keep_logs: bool,
}

/// Removes everything that the agent with these pins made. Fails while that agent is running, unless `force` is set, and while selected
/// pods run on this node, unless `release` is set.
pub async fn run(bpffs: &Path, Options { force, release, keep_logs }: Options) -> Result<CleanupReport> {
    let pins = Pins::new(bpffs);
    let files = RunFiles::of(bpffs);
    let lock = match files.acquire() {
        Ok(lock) => Some(lock),
        Err(LockError::Held { .. }) if force => None,
        Err(error @ LockError::Held { .. }) => bail!("{error}; --force removes everything under the running agent"),
        Err(error) => return Err(error.into()),
    };
    let before = inventory::take(&pins).await?;
    if before.pins.iter().any(|path| path.exists()) && !inventory::on_bpffs(pins.root()) {
        bail!(
            "{} is not on a BPF file system, so no agent made its contents; name the agent's pin directory with --bpffs",
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
    // The journal of sysctls is removed once it is empty. A setting that could not be restored stays in it, for the next cleanup.
    report.note(files.socket().display(), fs::remove_file(files.socket()));
    for log in [files.log(), files.flows()].into_iter().filter(|_| !keep_logs) {
        report.note(log.display(), fs::remove_dir_all(&log));
    }
    // The directory contains only these two logs.
    fs::remove_dir(files.logs()).ok();
    wait_for_programs(&before, &mut report).await;
    match lock {
        Some(lock) => lock.remove().with_context(|| files.lock().display().to_string())?,
        None => report.failed.push(format!("{}: an agent holds it", files.lock().display())),
    }
    Ok(report)
}

/// Fails if the maps name selected pods whose interfaces still exist, or if the maps cannot be read.
async fn refuse_to_release(pins: &Pins, before: &Inventory) -> Result<()> {
    if before.maps.is_empty() {
        return Ok(());
    }
    let dump = Dump::read(pins, false).context(
        "the maps do not show whether policies select pods on this node. With --release, packets of such pods leave with the node's address from now on",
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
        "policies select pods on this node: {first}{others}. Without Spillway's programs, their packets leave with the node's address. Move them to \
         other nodes (`kubectl drain`), or allow it with --release"
    )
}

/// Returns the names of selected pods whose interface exists or is not known.
fn selected(dump: &Dump, exists: impl Fn(u32) -> bool) -> impl Iterator<Item = String> {
    let present = move |endpoint: &Endpoint| endpoint.class != 0 && (endpoint.ifindex == 0 || exists(endpoint.ifindex));
    dump.endpoints()
        .into_iter()
        .filter(move |(_, (endpoint, _))| present(endpoint))
        .map(|(id, _)| dump.endpoint_name(id))
}

/// Detaches filters, which have no pins. TCX links are detached when their pins are removed.
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
    // Without CAP_SYS_ADMIN, programs cannot be listed. Filters are found by their names.
    if attach::mode() == Mode::Clsact {
        let netlink = Netlink::open().context("netlink")?;
        for interface in inventory::interfaces(&netlink.handle).await?.values() {
            // One program for each direction: all our filters of a direction are detached together.
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
        // The root directory may be a mount point or contain other pins.
        let keep = Some(path) == before.pins.last() && result.as_ref().is_err_and(|error| KEPT.contains(&error.kind()));
        if !keep {
            report.note(format!("directory {}", path.display()), result);
        }
    }
}

/// Removes the tunnel device and restores the changed kernel settings.
async fn remove_from_host(files: &RunFiles, report: &mut CleanupReport) -> Result<()> {
    let netlink = Netlink::open().context("netlink")?;
    let mut sysctls = Sysctls::open(files.sysctls())?;
    let (artifacts, warnings) = host::remove(&netlink.handle, &mut sysctls).await?;
    report.removed.extend(artifacts.iter().map(ToString::to_string));
    report.failed.extend(warnings.iter().map(ToString::to_string));
    Ok(())
}

/// Waits for the kernel, which frees programs shortly after their last reference is gone.
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
            report.failed.push(format!("{what}: a process still holds it; the kernel frees it when that process ends"));
        } else {
            report.removed.push(what);
        }
    }
}

#[cfg(test)]
#[path = "cleanup_tests.rs"]
mod tests;
