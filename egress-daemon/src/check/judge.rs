//! Judges the facts of a node for an agent. Pure.

use super::{CheckLine, CheckStatus, facts::HostFacts};
use crate::config::{Config, Firewall};
use egress_core::network::{
    links::Link,
    xdp::{self, Xdp},
};
use egress_node::datapath::{load::remedy, strangers::Stranger};

/// The first kernel with `bpf_loop`, which the programs use.
const POSSIBLE: (u32, u32) = (5, 17);
/// The oldest kernel that is fully tested.
pub(super) const TESTED: (u32, u32) = (6, 1);
/// The first kernel with TCX.
const TCX: (u32, u32) = (6, 6);
/// The ports of other tunnels, with their users.
const TAKEN_PORTS: [(u16, &str); 3] =
    [(4789, "VXLAN of most systems"), (8472, "VXLAN of Linux and many CNIs"), (6081, "Geneve")];
/// Capabilities by number (linux/capability.h).
const CAPABILITIES: [(u32, &str); 4] =
    [(39, "CAP_BPF"), (38, "CAP_PERFMON"), (12, "CAP_NET_ADMIN"), (13, "CAP_NET_RAW")];
/// The capability that includes CAP_BPF and CAP_PERFMON.
const CAP_SYS_ADMIN: u32 = 21;

pub(super) fn ok(check: &'static str, found: impl Into<String>) -> CheckLine {
    CheckLine { check, status: CheckStatus::Ok, found: found.into(), remedy: None }
}

pub(super) fn bad(
    check: &'static str,
    status: CheckStatus,
    found: impl Into<String>,
    remedy: impl Into<String>,
) -> CheckLine {
    CheckLine { check, status, found: found.into(), remedy: Some(remedy.into()) }
}

/// Returns the lines of all checks, in the order in which the agent needs the features that they check.
pub(super) fn judge(facts: &HostFacts, config: &Config) -> Vec<CheckLine> {
    let mut lines = vec![kernel(facts), btf(facts), bpffs(facts), capabilities(facts), hooks(facts)];
    lines.extend(facts.strangers.iter().map(stranger));
    lines.extend(tunnel(facts, config));
    lines.extend(forwarding(facts));
    lines.push(reverse_path(facts, config));
    lines.push(firewall(facts, config));
    lines.extend(interfaces(facts, config));
    lines.extend(drivers(facts, config));
    lines.extend(networks(facts));
    lines.extend(facts.unread.iter().map(|unread| {
        bad(
            "access",
            CheckStatus::Warn,
            format!("not everything could be checked: {unread}"),
            "run the check as root on the node itself",
        )
    }));
    lines
}

pub(super) fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Returns the status of a kernel release.
pub(super) fn of_kernel(release: &str) -> CheckStatus {
    match version(release) {
        Some(found) if found >= TESTED => CheckStatus::Ok,
        Some(found) if found < POSSIBLE => CheckStatus::Fail,
        _ => CheckStatus::Warn,
    }
}

fn kernel(facts: &HostFacts) -> CheckLine {
    let release = &facts.release;
    let remedy = format!("boot Linux {}.{} or later", TESTED.0, TESTED.1);
    match of_kernel(release) {
        CheckStatus::Ok => ok("kernel", format!("Linux {release}")),
        status @ CheckStatus::Fail => {
            bad("kernel", status, format!("Linux {release} cannot run the programs (no bpf_loop)"), remedy)
        }
        status => bad("kernel", status, format!("Spillway is not tested with Linux {release}"), remedy),
    }
}

fn btf(facts: &HostFacts) -> CheckLine {
    if facts.btf {
        return ok("btf", "the kernel provides BTF");
    }
    let remedy = "boot a kernel with CONFIG_DEBUG_INFO_BTF, or start the agent to see whether it works without BTF";
    bad("btf", CheckStatus::Warn, "/sys/kernel/btf/vmlinux is missing", remedy)
}

fn bpffs(facts: &HostFacts) -> CheckLine {
    let path = facts.bpffs.display();
    if !facts.on_bpffs {
        let remedy = "mount one (`mount -t bpf bpf /sys/fs/bpf`), or name a directory on one with --bpffs";
        return bad("bpffs", CheckStatus::Fail, format!("{path} is not on a BPF file system"), remedy);
    }
    match facts.other_versions.first() {
        None => ok("bpffs", format!("{path} is on a BPF file system")),
        Some(other) => bad(
            "bpffs",
            CheckStatus::Fail,
            format!("{} holds maps of another version of Spillway", other.display()),
            format!("stop that agent, {}", remedy(&facts.bpffs)),
        ),
    }
}

fn capabilities(facts: &HostFacts) -> CheckLine {
    let Some(mask) = facts.capabilities else {
        return bad("capabilities", CheckStatus::Warn, "they cannot be read", "mount /proc");
    };
    let has = |bit: u32| mask >> bit & 1 == 1;
    let by_admin = |name: &str| has(CAP_SYS_ADMIN) && matches!(name, "CAP_BPF" | "CAP_PERFMON");
    let names = |list: &[(u32, &'static str)]| list.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(", ");
    let missing: Vec<_> = CAPABILITIES.into_iter().filter(|(bit, name)| !has(*bit) && !by_admin(name)).collect();
    if missing.is_empty() {
        return ok("capabilities", names(&CAPABILITIES));
    }
    let found = format!("this process lacks {}", names(&missing));
    bad("capabilities", CheckStatus::Fail, found, "run it as root, or add them to the container's securityContext")
}

fn hooks(facts: &HostFacts) -> CheckLine {
    if facts.tcx {
        return ok("hooks", "tcx");
    }
    bad(
        "hooks",
        CheckStatus::Warn,
        "no TCX: programs are attached to clsact qdiscs, which other software can replace",
        format!("boot Linux {}.{} or later for links that other software cannot remove", TCX.0, TCX.1),
    )
}

fn stranger(stranger: &Stranger) -> CheckLine {
    let found =
        format!("the foreign program {} is attached at {} {}", stranger.program(), stranger.interface, stranger.hook());
    let remedy = match stranger.egress {
        true => {
            "Spillway's programs run before it, and packets that match a policy bypass it: check that this is intended"
        }
        false => {
            "unless it is XDP, Spillway's programs run before it, and packets that match a policy bypass it; since it may bring packets into \
             pods unseen, a SYN+ACK of a selected pod is not checked on this node: check that this is intended (SECURITY.md)"
        }
    };
    bad("hooks", CheckStatus::Warn, found, remedy)
}

fn tunnel(facts: &HostFacts, config: &Config) -> Vec<CheckLine> {
    let (name, port) = (&config.tunnel_name, config.tunnel_port);
    let mut lines = Vec::new();
    if let Some(kind) = &facts.name_taken {
        lines.push(bad(
            "tunnel",
            CheckStatus::Fail,
            format!("the name {name} is taken by a {kind} device that Spillway did not make"),
            format!("remove it (`ip link del {name}`), or set another `tunnelName`"),
        ));
    }
    if facts.port_used && facts.tunnels.is_empty() {
        lines.push(bad(
            "tunnel",
            CheckStatus::Fail,
            format!("UDP port {port} is in use"),
            format!(
                "find its owner with `ss -ulpn 'sport = :{port}'`, or set another `tunnelPort`, the same on all nodes"
            ),
        ));
    }
    if let Some((_, user)) = TAKEN_PORTS.iter().find(|(taken, _)| *taken == port) {
        lines.push(bad(
            "tunnel",
            CheckStatus::Warn,
            format!("UDP port {port} is the usual port of {user}"),
            "set a `tunnelPort` that no CNI uses, the same on all nodes",
        ));
    }
    if lines.is_empty() {
        let found = match facts.tunnels.is_empty() {
            true => format!("the name {name} and UDP port {port} are free"),
            false => format!("{} exists", facts.tunnels.join(", ")),
        };
        lines.push(ok("tunnel", found));
    }
    lines
}

/// Checks whether forwarding is on. The agent turns it on where necessary, unless it may not write the setting.
fn forwarding(facts: &HostFacts) -> Vec<CheckLine> {
    let off = |key: &str| facts.sysctls.get(key).is_some_and(|value| value == "0");
    let off: Vec<&str> =
        ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"].into_iter().filter(|key| off(key)).collect();
    if off.is_empty() {
        return vec![ok("forwarding", "on")];
    }
    let found = off.iter().map(|key| format!("{key} is 0")).collect::<Vec<_>>().join(", ");
    let remedy = "nothing, if the agent may write /proc/sys: it turns forwarding on where the node needs it";
    vec![bad("forwarding", CheckStatus::Warn, found, remedy)]
}

fn reverse_path(facts: &HostFacts, config: &Config) -> CheckLine {
    let value = |name: &str| facts.sysctls.get(&format!("net/ipv4/conf/{name}/rp_filter")).map(String::as_str);
    let tunnel = value(&config.tunnel_name).filter(|_| facts.tunnels.contains(&config.tunnel_name));
    // The kernel uses the larger of both values: 0 is off, 1 strict, 2 loose.
    if tunnel.max(tunnel.and(value("all"))) == Some("1") {
        let name = &config.tunnel_name;
        return bad(
            "rp_filter",
            CheckStatus::Warn,
            format!("reverse-path filtering is strict on {name}"),
            format!("run `sysctl -w net/ipv4/conf/{name}/rp_filter=2`, or let the agent write /proc/sys"),
        );
    }
    ok("rp_filter", "does not affect policy traffic: the tunnel device is set to 2 (loose)")
}

fn firewall(facts: &HostFacts, config: &Config) -> CheckLine {
    let mut found = Vec::new();
    found.extend(facts.nftables.then_some("nf_tables".to_owned()));
    if !facts.iptables.is_empty() {
        found.push(format!("iptables ({})", facts.iptables.join(", ")));
    }
    if config.firewall == Firewall::Respect {
        return ok(
            "firewall",
            "first packets of flows pass the host's firewall, or the programs of a CNI that routes by itself"
                .to_owned(),
        );
    }
    let tracking = if facts.conntrack { "connection tracking" } else { "no connection tracking" };
    if found.is_empty() {
        return ok("firewall", format!("no nf_tables or iptables rules can be in force; {tracking}"));
    }
    bad(
        "firewall",
        CheckStatus::Warn,
        format!("there is {}; {tracking}", found.join(" and ")),
        "set `firewall: respect`, or make sure that no NetworkPolicy depends on the FORWARD chain",
    )
}

fn interfaces(facts: &HostFacts, config: &Config) -> Vec<CheckLine> {
    let Some(table) = &facts.links else { return Vec::new() };
    let names = |indices: &mut dyn Iterator<Item = &u32>| {
        let names: Vec<&str> =
            indices.filter_map(|index| table.links.get(index)).map(|link| link.name.as_str()).collect();
        names.join(", ")
    };
    let roles = &facts.roles;
    let (pods, uplinks) = (names(&mut roles.pods.iter()), names(&mut roles.uplinks.iter()));
    let underlays = names(&mut roles.underlays.keys());
    let mut lines = Vec::new();
    lines.push(match roles.pods.is_empty() {
        false => ok("interfaces", format!("pods: {pods}")),
        true => bad(
            "interfaces",
            CheckStatus::Warn,
            "no pod's interface is recognised",
            "nothing, if no pod runs here; otherwise name them in `podInterfaces`, such as [\"cali*\"]",
        ),
    });
    lines.push(match roles.uplinks.is_empty() {
        false => ok("interfaces", format!("uplinks: {uplinks}")),
        true => bad(
            "interfaces",
            CheckStatus::Warn,
            "no interface leads out of the node",
            "nothing, if this is no gateway; otherwise name them in `uplinks`",
        ),
    });
    lines.push(match roles.underlays.is_empty() {
        false => ok("interfaces", format!("underlay: {underlays}")),
        true => bad(
            "interfaces",
            CheckStatus::Warn,
            "no default route shows which interface leads to other nodes",
            "nothing, if the Node object has an InternalIP that this node carries; otherwise add a default route",
        ),
    });
    for pattern in config.pod_interfaces.iter().chain(&config.uplinks) {
        if !table.links.values().any(|link| pattern.matches(&link.name)) {
            let remedy = "nothing, if such interfaces appear later; otherwise correct the pattern in the configuration";
            lines.push(bad(
                "interfaces",
                CheckStatus::Warn,
                format!("the pattern {pattern} matches no interface"),
                remedy,
            ));
        }
    }
    lines
}

/// Reports the interfaces at whose driver a gateway forwards packets.
fn drivers(facts: &HostFacts, config: &Config) -> Vec<CheckLine> {
    let (Some(table), Some(drivers)) = (&facts.links, &facts.drivers) else { return Vec::new() };
    let line = |link: &Link| match (&link.name, xdp::place(config.xdp, table, link.index, drivers)) {
        (name, Ok(card)) => {
            let (sends, when) = match facts.native.contains(&card.index) {
                true => ("sends", ""),
                false => ("can send", ", once this is a gateway"),
            };
            ok("xdp", format!("{name}: the driver of {} {sends} packets of egress IPs on{when}", card.name))
        }
        (name, Err(why)) if config.xdp == Xdp::Native => {
            let remedy = why.remedy.unwrap_or_else(|| "nothing; or set `xdp: Auto`".to_owned());
            bad("xdp", CheckStatus::Warn, format!("{name}: by TC, as without XDP: {}", why.reason), remedy)
        }
        (name, Err(why)) => ok("xdp", format!("{name}: by TC: {why}")),
    };
    facts.roles.gateway_interfaces().filter_map(|index| table.links.get(&index)).map(line).collect()
}

/// Checks whether the cluster's networks are known, according to the agent, which reads the objects.
fn networks(facts: &HostFacts) -> Vec<CheckLine> {
    let Some(unnamed) = &facts.unnamed else {
        return vec![ok("networks", "no agent runs on this node to report the cluster's networks")];
    };
    if unnamed.is_empty() {
        return vec![ok("networks", "the networks of pods and Services are known")];
    }
    let line = |(net, why): (&String, &String)| {
        bad("networks", CheckStatus::Warn, format!("no policy is applied to destinations in {net}"), why)
    };
    unnamed.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use egress_core::{
        network::{
            classify::Roles,
            links::{LinkKind, LinkTable},
            xdp::Driver,
        },
        testing::link,
    };
    use egress_node::datapath::strangers::How;
    use std::{collections::BTreeMap, path::PathBuf};

    fn good() -> HostFacts {
        HostFacts {
            release: "6.18.1-cloud".into(),
            btf: true,
            bpffs: "/sys/fs/bpf/spillway".into(),
            on_bpffs: true,
            capabilities: Some(u64::MAX),
            tcx: true,
            ..HostFacts::default()
        }
    }

    /// Returns the facts of a node with these uplinks, of which the first has `driver`.
    fn with_uplinks(links: Vec<Link>, driver: &Driver) -> HostFacts {
        let links: BTreeMap<u32, Link> = links.into_iter().map(|link| (link.index, link)).collect();
        let drivers = links.keys().next().map(|index| (*index, driver.clone())).into_iter().collect();
        let roles = Roles { uplinks: links.keys().copied().collect(), ..Roles::default() };
        let links = Some(LinkTable { links, ..LinkTable::default() });
        HostFacts { links, roles, drivers: Some(drivers), ..good() }
    }

    fn all(facts: &HostFacts) -> Vec<CheckLine> {
        judge(facts, &Config::default())
    }

    /// Returns the worst line of a check.
    fn of(facts: &HostFacts, check: &str) -> CheckLine {
        all(facts).into_iter().filter(|line| line.check == check).max_by_key(|line| line.status).unwrap()
    }

    #[test]
    fn a_healthy_node_has_no_findings() {
        assert!(
            all(&good()).iter().all(|line| line.status == CheckStatus::Ok && line.remedy.is_none()),
            "{:?}",
            all(&good())
        );
    }

    #[test]
    fn kernels_are_compared_as_numbers() {
        let status = |release: &str| of(&HostFacts { release: release.into(), ..good() }, "kernel").status;
        assert_eq!(status("5.17.0"), CheckStatus::Warn);
        assert_eq!(status("5.9.12-300.fc33"), CheckStatus::Fail);
        assert_eq!(status("6.1.0-18-amd64"), CheckStatus::Ok);
        assert_eq!(status("10.0-rc1"), CheckStatus::Ok);
        assert_eq!(status("next"), CheckStatus::Warn);
    }

    #[test]
    fn a_missing_requirement_is_a_failure() {
        let line = of(&HostFacts { on_bpffs: false, ..good() }, "bpffs");
        assert_eq!(line.status, CheckStatus::Fail);
        assert!(line.remedy.unwrap().contains("mount -t bpf"));
        let line = of(&HostFacts { other_versions: vec![PathBuf::from("/sys/fs/bpf/spillway/v9")], ..good() }, "bpffs");
        assert!(
            line.found.contains("v9")
                && line.remedy.unwrap().contains("cleanup --release --bpffs /sys/fs/bpf/spillway`")
        );
        let line = of(&HostFacts { capabilities: Some(1 << 21 | 1 << 12), ..good() }, "capabilities");
        assert_eq!((line.status, line.found.as_str()), (CheckStatus::Fail, "this process lacks CAP_NET_RAW"));
        let line = of(&HostFacts { name_taken: Some("bridge".into()), ..good() }, "tunnel");
        assert!(line.status == CheckStatus::Fail && line.found.contains("bridge") && line.found.contains("spillway0"));
        let line = of(&HostFacts { port_used: true, ..good() }, "tunnel");
        assert!(line.status == CheckStatus::Fail && line.remedy.unwrap().contains("ss -ulpn"));
        let ours = HostFacts { port_used: true, tunnels: vec!["spillway0".into()], ..good() };
        assert_eq!(of(&ours, "tunnel").status, CheckStatus::Ok);
    }

    #[test]
    fn possible_obstacles_are_warnings() {
        let stranger = Stranger {
            interface: "lxc1".into(),
            egress: false,
            how: How::Tcx,
            program: None,
            name: Some("cil_from_container".into()),
        };
        let line = of(&HostFacts { strangers: vec![stranger], ..good() }, "hooks");
        assert!(
            line.status == CheckStatus::Warn
                && line.found.contains("cil_from_container")
                && line.found.contains("lxc1")
        );
        assert_eq!(of(&HostFacts { tcx: false, ..good() }, "hooks").status, CheckStatus::Warn);
        let ruled = HostFacts { nftables: true, ..good() };
        assert_eq!(of(&ruled, "firewall").status, CheckStatus::Ok);
        let bypass = Config::parse("c", b"firewall: bypass").unwrap();
        assert!(judge(&ruled, &bypass).iter().any(|line| line.check == "firewall" && line.status == CheckStatus::Warn));
        let off = [("net/ipv4/ip_forward".to_owned(), "0".to_owned())].into();
        assert!(of(&HostFacts { sysctls: off, ..good() }, "forwarding").found.contains("net/ipv4/ip_forward is 0"));
        let port = Config::parse("c", b"tunnelPort: 4789").unwrap();
        let lines = judge(&good(), &port);
        assert!(lines.iter().any(|line| line.check == "tunnel" && line.status == CheckStatus::Warn));
    }

    #[test]
    fn a_driver_without_the_requested_program_is_a_warning() {
        let hides = Driver { kind: LinkKind::Physical, acts: Some(7), hides_tags: true, stranger: None };
        let facts = with_uplinks(vec![link(2, "eth0")], &hides);
        let line = of(&facts, "xdp");
        assert!(line.status == CheckStatus::Ok && line.found.contains("ethtool -K eth0 rxvlan off"), "{}", line.found);
        let native = Config::parse("c", b"xdp: Native").unwrap();
        let line = judge(&facts, &native).into_iter().find(|line| line.check == "xdp").unwrap();
        assert_eq!((line.status, line.remedy.as_deref()), (CheckStatus::Warn, Some("`ethtool -K eth0 rxvlan off`")));
    }

    #[test]
    fn vlan_device_is_reported_with_its_cards_driver() {
        let device = Link { kind: LinkKind::Vlan(100), peer: Some(2), ..link(5, "eth0.100") };
        let driver = Driver { kind: LinkKind::Physical, acts: Some(7), hides_tags: false, stranger: None };
        let facts = with_uplinks(vec![link(2, "eth0"), device], &driver);
        for (native, part) in [(&[][..], "can send"), (&[2], "sends")] {
            let lines = all(&HostFacts { native: native.iter().copied().collect(), ..facts.clone() });
            let found: Vec<&str> = lines.iter().filter(|l| l.check == "xdp").map(|l| l.found.as_str()).collect();
            assert_eq!(found.len(), 2);
            for (found, name) in found.into_iter().zip(["eth0:", "eth0.100:"]) {
                assert!(found.starts_with(name) && found.contains(&format!("the driver of eth0 {part}")), "{found}");
            }
        }
    }

    #[test]
    fn unnamed_networks_are_warnings() {
        assert_eq!(of(&good(), "networks").status, CheckStatus::Ok);
        assert_eq!(of(&HostFacts { unnamed: Some(Default::default()), ..good() }, "networks").status, CheckStatus::Ok);
        let unnamed = Some([("10.96.0.0/12".to_owned(), "add it to exceptCIDRs".to_owned())].into());
        let line = of(&HostFacts { unnamed, ..good() }, "networks");
        assert_eq!((line.status, line.remedy.as_deref()), (CheckStatus::Warn, Some("add it to exceptCIDRs")));
        assert!(line.found.contains("10.96.0.0/12"), "{}", line.found);
    }

    #[test]
    fn the_larger_value_of_reverse_path_filtering_counts() {
        let status = |all: &str, tunnel: &str| {
            let sysctls = [("all", all), ("spillway0", tunnel)]
                .map(|(name, value)| (format!("net/ipv4/conf/{name}/rp_filter"), value.to_owned()));
            let facts = HostFacts { sysctls: sysctls.into(), tunnels: vec!["spillway0".into()], ..good() };
            of(&facts, "rp_filter").status
        };
        assert_eq!(
            (status("0", "2"), status("1", "2"), status("2", "1")),
            (CheckStatus::Ok, CheckStatus::Ok, CheckStatus::Ok)
        );
        assert_eq!((status("1", "0"), status("0", "1")), (CheckStatus::Warn, CheckStatus::Warn));
    }

    #[test]
    fn patterns_that_match_nothing_are_named() {
        let config = Config::parse("c", b"podInterfaces: [\"cali*\"]").unwrap();
        let facts = HostFacts { links: Some(Default::default()), ..good() };
        assert!(judge(&facts, &config).iter().any(|line| line.found.contains("cali*")));
    }
}
