//! An inventory of everything that an agent created on this node. It is read from the kernel, starting at the pins, whether or not the
//! agent is alive.
//!
//! A program belongs to an agent if it uses a map that is pinned in the agent's directory, so several agents can share a kernel.

use crate::lock::RunFiles;
use anyhow::{Context as _, Result};
use aya::{
    maps::MapInfo,
    programs::{
        links::{FdLink, PinnedLink},
        loaded_programs,
    },
};
use egress_node::{
    datapath::Pins,
    host::{
        cleanup::{self, Artifact},
        netlink::Netlink,
        shaper,
        sysctl::Sysctls,
    },
};
use futures::TryStreamExt;
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use rtnetlink::{
    Handle,
    packet_route::tc::{TcAttribute, TcFilterBpfOption, TcOption},
};
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
};

/// Everything that the agent created.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Inventory {
    /// Programs in the kernel, sorted by name and id.
    pub programs: Vec<Program>,
    /// Pinned maps, sorted by name.
    pub maps: Vec<Map>,
    /// All pins, including directories, deepest first.
    pub pins: Vec<PathBuf>,
    /// Devices of this network namespace: the tunnel, and both ends of the shaper.
    pub tunnels: Vec<TunnelDevice>,
    /// Changed kernel settings, with their previous values.
    pub sysctls: Vec<SysctlChange>,
    /// Routing and nftables rules, one line each.
    pub rules: Vec<String>,
    /// The agent's lock, socket, journal of kernel settings and logs, as far as they exist.
    pub files: Vec<PathBuf>,
}

/// A program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Program {
    /// Its name, as far as the kernel keeps it (15 bytes).
    pub name: String,
    /// Its id in the kernel.
    pub id: u32,
    /// The number of instructions that the verifier processed; null on kernels before 5.16.
    pub verified_instructions: Option<u32>,
    /// The memory of its code in bytes; null if unknown.
    pub memory_bytes: Option<u32>,
    /// Its hooks, sorted; empty for a program that runs only on demand or from a timer.
    pub attached: Vec<Attachment>,
}

/// A hook with a program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// The interface's name; null if it is gone.
    pub interface: Option<String>,
    /// The interface's index.
    pub ifindex: u32,
    /// `ingress` or `egress`.
    pub direction: String,
    /// `tcx` or `clsact`.
    pub mode: String,
    /// The pin of the link; null for clsact.
    pub pin: Option<PathBuf>,
}

/// A pinned map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Map {
    /// The name of its pin.
    pub name: String,
    /// Its id in the kernel.
    pub id: u32,
    /// Its kind: `Hash`, `Array`...
    pub kind: String,
    /// The maximum number of entries.
    pub capacity: u32,
    /// The size of a key in bytes.
    pub key_bytes: u32,
    /// The size of a value in bytes.
    pub value_bytes: u32,
    /// The memory that it takes now, in bytes; null if unknown.
    pub memory_bytes: Option<u64>,
}

/// A tunnel device, or one end of the shaper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TunnelDevice {
    /// Its name.
    pub name: String,
    /// Its index.
    pub ifindex: u32,
}

/// A changed setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SysctlChange {
    /// The path below /proc/sys.
    pub key: String,
    /// The value that the agent set.
    pub value: String,
    /// The value before the change.
    pub previous: String,
}

/// Lists everything that the agent with these pins created.
pub async fn take(pins: &Pins) -> Result<Inventory> {
    let netlink = Netlink::open().context("netlink")?;
    let files = RunFiles::of(pins.root());
    let paths = self::pins(pins.root()).with_context(|| format!("{} cannot be read", pins.root().display()))?;
    let maps = maps(&paths);
    let map_ids: BTreeSet<u32> = maps.iter().map(|map| map.id).collect();
    let mut programs = programs(&map_ids);
    let names = interfaces(&netlink.handle).await.context("the interfaces cannot be read")?;
    for link in links(&paths, &names) {
        if let Some(program) = programs.get_mut(&link.0) {
            program.attached.push(link.1);
        }
    }
    for (id, attachment) in filters(&netlink.handle, &names).await.context("the filters cannot be read")? {
        if let Some(program) = programs.get_mut(&id) {
            program.attached.push(attachment);
        }
    }
    programs.values_mut().for_each(|program| program.attached.sort());
    let mut programs: Vec<Program> = programs.into_values().collect();
    programs.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
    let mut inventory = Inventory { programs, maps, pins: paths, ..Inventory::default() };
    let sysctls = Sysctls::open(files.sysctls())?;
    for artifact in cleanup::inventory(&netlink.handle, &sysctls).await? {
        match artifact {
            Artifact::TunnelDevice { name, index } => inventory.tunnels.push(TunnelDevice { name, ifindex: index }),
            Artifact::Shaper { ends } => {
                let ends = [(shaper::NEAR, ends.near), (shaper::FAR, ends.far)];
                let device = |(name, ifindex): (&str, u32)| TunnelDevice { name: name.to_owned(), ifindex };
                inventory.tunnels.extend(ends.map(device));
            }
            Artifact::Rule(rule) => inventory.rules.push(rule),
            Artifact::Sysctl { key, changed } => {
                inventory.sysctls.push(SysctlChange { key, value: changed.set, previous: changed.previous });
            }
        }
    }
    let files = [files.lock(), files.socket(), files.sysctls(), files.log(), files.flows()];
    inventory.files = files.into_iter().filter(|file| file.symlink_metadata().is_ok()).collect();
    Ok(inventory)
}

/// Returns whether a path, or its nearest existing ancestor, is on a BPF file system.
pub(crate) fn on_bpffs(path: &Path) -> bool {
    let existing = path.ancestors().find(|path| path.exists());
    existing.and_then(|path| statfs(path).ok()).is_some_and(|fs| fs.filesystem_type() == BPF_FS_MAGIC)
}

/// Returns the pins of agents of any layout version (`v` and a number), then `root` itself. Empty if `root` does not exist.
/// Other entries of the directory do not belong to an agent.
pub(crate) fn pins(root: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let versions = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<BTreeSet<_>>>()?;
    let mut all = Vec::new();
    for version in versions.iter().filter(|path| is_version(path)) {
        all.extend(tree(version)?);
    }
    all.push(root.to_path_buf());
    Ok(all)
}

/// Returns whether a directory's name is that of a layout version.
pub(crate) fn is_version(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.strip_prefix('v').is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

/// Returns everything below a path, then the path itself. The contents of a directory precede the directory.
fn tree(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    if root.symlink_metadata()?.is_dir() {
        let entries = fs::read_dir(root)?.map(|entry| Ok(entry?.path())).collect::<io::Result<BTreeSet<_>>>()?;
        for entry in entries {
            all.extend(tree(&entry)?);
        }
    }
    all.push(root.to_path_buf());
    Ok(all)
}

/// Returns the maps that are pinned in an agent's directory; none if the directory cannot be read.
pub(crate) fn pinned_maps(root: &Path) -> Vec<Map> {
    maps(&pins(root).unwrap_or_default())
}

/// Returns the maps among the pins: the pins in directories named `maps`, of any layout version.
fn maps(pins: &[PathBuf]) -> Vec<Map> {
    let mut maps: Vec<Map> = in_directory(pins, "maps").filter_map(map).collect();
    maps.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
    maps
}

fn in_directory<'a>(pins: &'a [PathBuf], name: &'static str) -> impl Iterator<Item = &'a Path> {
    let inside = move |path: &&PathBuf| path.parent().and_then(Path::file_name).is_some_and(|parent| parent == name);
    pins.iter().filter(inside).map(PathBuf::as_path)
}

fn map(path: &Path) -> Option<Map> {
    let info = MapInfo::from_pin(path).ok()?;
    Some(Map {
        name: path.file_name()?.to_string_lossy().into_owned(),
        id: info.id(),
        kind: info.map_type().map_or_else(|_| "unknown".into(), |kind| format!("{kind:?}")),
        capacity: info.max_entries(),
        key_bytes: info.key_size(),
        value_bytes: info.value_size(),
        memory_bytes: info.fd().ok().and_then(|fd| memory(&fd)),
    })
}

/// Returns the memory in bytes that the kernel charges to an object.
fn memory(fd: &impl AsFd) -> Option<u64> {
    let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix("memlock:")?.trim().parse().ok())
}

/// Returns the programs that use one of the maps, by id. Skips programs that are unloaded meanwhile.
fn programs(maps: &BTreeSet<u32>) -> BTreeMap<u32, Program> {
    let ours = loaded_programs().filter_map(Result::ok).filter(|program| {
        let used = program.map_ids().ok().flatten().unwrap_or_default();
        used.iter().any(|id| maps.contains(id))
    });
    ours.map(|program| {
        let found = Program {
            name: program.name_as_str().unwrap_or_default().to_owned(),
            id: program.id(),
            verified_instructions: program.verified_instruction_count(),
            memory_bytes: program.memory_locked().ok(),
            attached: Vec::new(),
        };
        (program.id(), found)
    })
    .collect()
}

/// Returns the pinned links, each with its program's id. The name of a pin is `PROGRAM-IFINDEX`.
fn links(pins: &[PathBuf], names: &BTreeMap<u32, String>) -> Vec<(u32, Attachment)> {
    let link = |path: &Path| {
        let info = FdLink::from(PinnedLink::from_pin(path).ok()?).info().ok()?;
        let (program, ifindex) = path.file_name()?.to_str()?.rsplit_once('-')?;
        let ifindex = ifindex.parse().ok()?;
        let attachment = Attachment {
            interface: names.get(&ifindex).cloned(),
            ifindex,
            direction: direction(program).to_owned(),
            mode: "tcx".into(),
            pin: Some(path.to_path_buf()),
        };
        Some((info.program_id(), attachment))
    };
    in_directory(pins, "links").filter_map(link).collect()
}

fn direction(program: &str) -> &'static str {
    match egress_node::datapath::attach::direction(program) {
        aya::programs::TcAttachType::Egress => "egress",
        _ => "ingress",
    }
}

/// Returns the interfaces of this network namespace.
pub(crate) async fn interfaces(handle: &Handle) -> Result<BTreeMap<u32, String>, rtnetlink::Error> {
    use rtnetlink::packet_route::link::LinkAttribute;
    let links: Vec<_> = handle.link().get().execute().try_collect().await?;
    let name = |attribute: &LinkAttribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    };
    Ok(links.iter().filter_map(|link| Some((link.header.index, link.attributes.iter().find_map(name)?))).collect())
}

/// Returns the BPF filters of all interfaces, each with its program's id.
pub(crate) async fn filters(
    handle: &Handle,
    names: &BTreeMap<u32, String>,
) -> Result<Vec<(u32, Attachment)>, rtnetlink::Error> {
    let mut found = Vec::new();
    for (index, name) in names {
        for direction in ["ingress", "egress"] {
            let request = handle.traffic_filter(index.cast_signed()).get();
            let request = if direction == "ingress" { request.ingress() } else { request.egress() };
            // The kernel returns an error for an interface without such a qdisc: it has no filters.
            let filters: Vec<_> = request.execute().try_collect().await.unwrap_or_default();
            let program = |attribute: &TcAttribute| match attribute {
                TcAttribute::Options(options) => options.iter().find_map(|option| match option {
                    TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => Some(*id),
                    _ => None,
                }),
                _ => None,
            };
            for id in filters.iter().filter_map(|filter| filter.attributes.iter().find_map(program)) {
                let attachment = Attachment {
                    interface: Some(name.clone()),
                    ifindex: *index,
                    direction: direction.into(),
                    mode: "clsact".into(),
                    pin: None,
                };
                found.push((id, attachment));
            }
        }
    }
    Ok(found)
}
