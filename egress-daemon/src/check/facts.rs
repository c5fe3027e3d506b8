//! Gathers the facts of the node without judging them. Reports facts that cannot be read.

use crate::{config::Config, ctl::inventory, lock::RunFiles, observe::admin};
use egress_core::network::{
    classify::{InterfaceRules, Roles, classify},
    links::LinkTable,
    xdp::{Driver, cards},
};
use egress_node::{
    datapath::{
        Pins,
        attach::{self, Mode},
        drivers, native,
        strangers::{self, Stranger},
    },
    host::{
        links::{Links, LinksOptions},
        netlink::Netlink,
        ports::parse_sockets,
        sysctl, tunnel,
    },
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The facts of a node.
#[derive(Clone, Debug, Default)]
pub(super) struct HostFacts {
    /// The kernel's release (`uname -r`).
    pub release: String,
    /// Whether the kernel provides its BTF.
    pub btf: bool,
    /// The directory of the pins.
    pub bpffs: PathBuf,
    /// Whether that directory is, or would be, on a BPF file system.
    pub on_bpffs: bool,
    /// Its directories of other layout versions.
    pub other_versions: Vec<PathBuf>,
    /// The effective capabilities of this process; `None` if they cannot be read.
    pub capabilities: Option<u64>,
    /// Whether the kernel has TCX.
    pub tcx: bool,
    /// Foreign programs.
    pub strangers: Vec<Stranger>,
    /// The tunnel devices that Spillway made.
    pub tunnels: Vec<String>,
    /// The kind of a foreign device that has the tunnel's name.
    pub name_taken: Option<String>,
    /// Whether a socket has the tunnel's port.
    pub port_used: bool,
    /// The kernel settings that exist, by key.
    pub sysctls: BTreeMap<String, String>,
    /// Whether the kernel has connection tracking.
    pub conntrack: bool,
    /// Whether the kernel has nf_tables.
    pub nftables: bool,
    /// The iptables tables that are in use.
    pub iptables: Vec<String>,
    /// The links; `None` if they cannot be read.
    pub links: Option<LinkTable>,
    /// The roles of the links.
    pub roles: Roles,
    /// The networks that no object names, as the agent reports them; `None` if no agent answers.
    pub unnamed: Option<BTreeMap<String, String>>,
    /// The drivers at which a gateway's packets arrive, by interface index; `None` if they cannot be read.
    pub drivers: Option<BTreeMap<u32, Driver>>,
    /// The indices of the interfaces whose driver has our program.
    pub native: BTreeSet<u32>,
    /// The facts that could not be read, with the reasons.
    pub unread: Vec<String>,
}

/// Gathers the facts.
pub(super) async fn gather(config: &Config, bpffs: &Path) -> HostFacts {
    let mut facts = HostFacts {
        release: nix::sys::utsname::uname()
            .map(|name| name.release().to_string_lossy().into_owned())
            .unwrap_or_default(),
        btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
        bpffs: bpffs.to_path_buf(),
        on_bpffs: inventory::on_bpffs(bpffs),
        capabilities: fs::read_to_string("/proc/self/status").ok().and_then(|text| capabilities(&text)),
        tcx: attach::mode() == Mode::Tcx,
        conntrack: Path::new("/proc/sys/net/netfilter/nf_conntrack_max").exists(),
        nftables: Path::new("/sys/module/nf_tables").exists(),
        ..HostFacts::default()
    };
    let own = Pins::new(bpffs).version();
    let versions = inventory::pins(bpffs).unwrap_or_default();
    let other = |path: &PathBuf| path.parent() == Some(bpffs) && inventory::is_version(path) && *path != own;
    facts.other_versions = versions.into_iter().filter(other).collect();
    for file in ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"] {
        facts.iptables.extend(fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned));
    }
    facts.iptables.sort();
    facts.iptables.dedup();
    facts.port_used = ["udp", "udp6"].iter().any(|table| {
        let path = format!("/proc/thread-self/net/{table}");
        let sockets = fs::read_to_string(&path).ok().and_then(|text| parse_sockets(&path, &text).ok());
        sockets.is_some_and(|sockets| sockets.iter().any(|socket| socket.port == config.tunnel_port))
    });
    let socket = RunFiles::of(bpffs).socket();
    let agent = tokio::task::spawn_blocking(move || admin::ask(&socket)).await;
    facts.unnamed = agent.ok().and_then(Result::ok).map(|state| state.unnamed_networks);
    links(config, &mut facts).await;
    settings(config, &mut facts);
    if let Err(error) = drivers(bpffs, &mut facts) {
        facts.unread.push(format!("drivers: {error}"));
    }
    if let Err(error) = strangers(bpffs, &mut facts).await {
        facts.unread.push(format!("programs at the interfaces: {error:#}"));
    }
    facts
}

/// Parses the mask of effective capabilities in /proc/self/status.
fn capabilities(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

async fn links(config: &Config, facts: &mut HostFacts) {
    let table = match Links::follow(LinksOptions::default()).await {
        Ok(links) => LinkTable::clone(&links.current()),
        Err(error) => return facts.unread.push(error.to_string()),
    };
    match Netlink::open() {
        Ok(netlink) => match tunnel::ours(&netlink.handle).await {
            Ok(ours) => facts.tunnels = ours.into_iter().map(|(_, name)| name).collect(),
            Err(error) => facts.unread.push(error.to_string()),
        },
        Err(error) => facts.unread.push(format!("netlink: {error}")),
    }
    let named = table.by_name(&config.tunnel_name);
    facts.name_taken = named.filter(|link| !facts.tunnels.contains(&link.name)).map(|link| link.kind.to_string());
    let rules = InterfaceRules {
        uplinks: config.uplinks.clone(),
        pod_interfaces: config.pod_interfaces.clone(),
        tunnel: config.tunnel_name.clone(),
        node_addresses: Vec::new(),
    };
    facts.roles = classify(&table, &rules);
    facts.links = Some(table);
}

fn settings(config: &Config, facts: &mut HostFacts) {
    let mut keys = vec![
        "net/ipv4/ip_forward".to_owned(),
        "net/ipv6/conf/all/forwarding".to_owned(),
        "net/ipv4/conf/all/rp_filter".to_owned(),
        format!("net/ipv4/conf/{}/rp_filter", config.tunnel_name),
    ];
    let name = |index: &u32| facts.links.as_ref()?.links.get(index).map(|link| link.name.clone());
    let names: BTreeSet<String> = facts.roles.gateway_interfaces().filter_map(|index| name(&index)).collect();
    keys.extend(names.iter().map(|name| format!("net/ipv4/conf/{name}/rp_filter")));
    for key in keys {
        if let Ok(Some(value)) = sysctl::read(&key) {
            facts.sysctls.insert(key, value);
        }
    }
}

/// Reads the drivers at which the frames of uplinks and of the underlay's interfaces arrive.
fn drivers(bpffs: &Path, facts: &mut HostFacts) -> std::io::Result<()> {
    let Some(table) = &facts.links else { return Ok(()) };
    let ours = native::pinned(&Pins::new(bpffs));
    let cards = cards(table, facts.roles.gateway_interfaces());
    facts.drivers = Some(drivers::look(cards.into_values(), &ours.values().copied().collect())?);
    facts.native = ours.into_keys().collect();
    Ok(())
}

/// Finds programs that do not belong to the agent with these pins, at the ingress of all links and at both hooks of the
/// links at which the agent has programs.
async fn strangers(bpffs: &Path, facts: &mut HostFacts) -> anyhow::Result<()> {
    let inventory = inventory::take(&Pins::new(bpffs)).await?;
    let ours: BTreeSet<u32> = inventory.programs.iter().map(|program| program.id).collect();
    let Some(table) = &facts.links else { return Ok(()) };
    for link in table.links.values() {
        let used = facts.roles.pods.contains(&link.index)
            || facts.roles.uplinks.contains(&link.index)
            || facts.tunnels.contains(&link.name);
        for egress in [false, true].into_iter().filter(|egress| used || !egress) {
            facts.strangers.extend(strangers::at(link.index, &link.name, egress, &ours)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read() {
        assert_eq!(capabilities("Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n"), Some(0x1ff_ffff_ffff));
        assert_eq!(capabilities("Name:\tx\n"), None);
    }
}
