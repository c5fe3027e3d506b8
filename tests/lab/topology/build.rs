//! Builds a lab: creates all links in one batch, then sets up all namespaces concurrently.

use std::collections::BTreeMap;
use std::io;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, anyhow};

use super::address::{self, Dual};
use super::settings::LabSettings;
use super::{Cni, Lab, LabNode, Role, Server};
use crate::machine;
use crate::manifests::Manifests;
use crate::netns::NetNs;
use crate::scope::Scope;
use crate::skip;

/// The network card of a gateway whose interfaces are VLAN devices.
const CARD: &str = "card0";

/// Describes a lab. The default: two workers, three gateways, one server on the external segment and one behind the
/// router, point-to-point pods, MTU 1500 everywhere, no reverse-path filter, masquerading on every node.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    settings: LabSettings,
}

impl Builder {
    /// Sets the number of workers (`worker1..`), at most 89.
    pub fn workers(mut self, count: u8) -> Builder {
        self.settings.workers = count;
        self
    }

    /// Sets the number of gateways (`gw1..`), at most 99.
    pub fn gateways(mut self, count: u8) -> Builder {
        self.settings.gateways = count;
        self
    }

    /// Sets the number of servers on the external segment (`server1..`).
    pub fn servers(mut self, count: u8) -> Builder {
        self.settings.servers = count;
        self
    }

    /// Sets the number of servers behind the router (`far1..`).
    pub fn far_servers(mut self, count: u8) -> Builder {
        self.settings.far_servers = count;
        self
    }

    /// Sets how pods are connected, unless their spec says otherwise.
    pub fn cni(mut self, cni: Cni) -> Builder {
        self.settings.cni = cni;
        self
    }

    /// Sets the MTU of the underlay.
    pub fn underlay_mtu(mut self, mtu: u32) -> Builder {
        self.settings.underlay_mtu = mtu;
        self
    }

    /// Sets the MTU of the external segment.
    pub fn external_mtu(mut self, mtu: u32) -> Builder {
        self.settings.external_mtu = mtu;
        self
    }

    /// Sets the MTU behind the router: if it is smaller than the external segment's, the router sends "packet too big".
    pub fn far_mtu(mut self, mtu: u32) -> Builder {
        self.settings.far_mtu = mtu;
        self
    }

    /// Sets the MTU of the pods' links.
    pub fn pod_mtu(mut self, mtu: u32) -> Builder {
        self.settings.pod_mtu = mtu;
        self
    }

    /// Sets the nodes' `rp_filter`: 0 off, 1 strict, 2 loose.
    pub fn rp_filter(mut self, mode: u8) -> Builder {
        self.settings.rp_filter = mode;
        self
    }

    /// Sets whether nodes masquerade their pods (default). Without it, leaked packets show the pod's own address.
    pub fn masquerade(mut self, on: bool) -> Builder {
        self.settings.masquerade = on;
        self
    }

    /// Sets whether nodes also masquerade packets from their pods to other nodes, as the bridge CNI does with `ipMasq`. Off by default.
    pub fn masquerade_underlay(mut self, on: bool) -> Builder {
        self.settings.masquerade_underlay = on;
        self
    }

    /// Sets the zones that the nodes get in turn, as the label `topology.kubernetes.io/zone`.
    pub fn zones(mut self, zones: &[&str]) -> Builder {
        self.settings.zones = zones.iter().map(|&zone| zone.to_owned()).collect();
        self
    }

    /// Makes links resemble those between network cards, as far as veths can: frames have their checksums, one segment
    /// each and their VLAN tags, and gateways' interfaces send frames that XDP programs redirect to them.
    pub fn cards(mut self) -> Builder {
        self.settings.cards = true;
        self
    }

    /// Makes the interfaces of gateways VLAN devices of one card. The other end of its link leads each VLAN to its segment.
    pub fn vlan_devices(mut self) -> Builder {
        self.settings.vlan_devices = true;
        self
    }

    /// Runs no other test in parallel: this one generates so much load, or depends so much on timing, that they would disturb each other.
    pub fn alone(mut self) -> Builder {
        self.settings.alone = true;
        self
    }

    /// Builds the lab and runs a test in it, or records the test as skipped where no lab can run. If the test fails, prints the error, the
    /// ends of the processes' logs and the path of the folder with everything else while the lab still exists, and panics.
    pub fn run(self, test: impl FnOnce(&mut Lab) -> Result<()>) {
        if let Some(reason) = skip::obstacle() {
            // Each test has its own thread, which has the test's name.
            return skip::record(thread::current().name().unwrap_or("a test"), &reason);
        }
        let _share = machine::take(self.settings.alone).unwrap_or_else(|error| panic!("{error:?}"));
        let mut lab = self.build().unwrap_or_else(|error| panic!("cannot build the lab: {error:?}"));
        // A panic, unlike a returned error, lets the lab know that it is dropped because of a failure.
        test(&mut lab).unwrap_or_else(|error| panic!("{error:?}"));
    }

    /// Builds the lab.
    pub fn build(self) -> Result<Lab> {
        let settings = self.settings;
        let mut scope = Scope::open()?;
        let manifests = Manifests::create(&scope.dir().join("manifests"))?;
        let underlay = scope.namespace("underlay")?;
        let external = scope.namespace("external")?;
        let router = scope.namespace("router")?;
        let nodes = make_nodes(&mut scope, &settings)?;
        let servers = make_servers(&mut scope, &settings)?;

        make_bridges(&underlay, &external, &router, &settings)?;
        let ports = make_links(&nodes, &servers, &underlay, &external, &router, &settings)?;
        let mut jobs: Vec<Box<dyn FnOnce() -> Result<()> + Send + '_>> = Vec::new();
        for node in nodes.values() {
            jobs.push(Box::new(|| node.set_up(&nodes, &settings)));
        }
        for server in servers.values() {
            jobs.push(Box::new(|| set_up_server(server)));
        }
        jobs.push(Box::new(|| set_up_router(&router, &nodes, !ports[2].is_empty())));
        all(jobs)?;
        if settings.cards {
            resemble_cards([&underlay, &external, &router], &nodes, &servers, &ports, settings.vlan_devices)?;
        }
        for (segment, ports) in [(&underlay, &ports[0]), (&external, &ports[1]), (&router, &ports[2])] {
            segment.wait_running(ports)?;
        }

        for node in nodes.values() {
            manifests.node(node, true)?;
        }
        manifests.namespace("default", &[])?;
        Ok(Lab {
            settings,
            processes: BTreeMap::new(),
            nodes,
            servers,
            pods: BTreeMap::new(),
            pods_made: 0,
            underlay,
            external,
            router,
            manifests,
            scope,
        })
    }
}

fn make_nodes(scope: &mut Scope, settings: &LabSettings) -> Result<BTreeMap<String, LabNode>> {
    let workers = (1..=settings.workers).map(|i| (format!("worker{i}"), Role::Worker, 10 + i));
    let gateways = (1..=settings.gateways).map(|i| (format!("gw{i}"), Role::Gateway, 100 + i));
    let rp_filter = settings.rp_filter.to_string();
    let mut nodes = BTreeMap::new();
    for (position, (name, role, number)) in workers.chain(gateways).enumerate() {
        let mut labels = BTreeMap::from([("kubernetes.io/hostname".to_owned(), name.clone())]);
        if role == Role::Gateway {
            labels.insert("egress".to_owned(), "true".to_owned());
        }
        if !settings.zones.is_empty() {
            let zone = &settings.zones[position % settings.zones.len()];
            labels.insert("topology.kubernetes.io/zone".to_owned(), zone.clone());
        }
        let ns = scope.namespace(&name)?;
        forward(&ns)?;
        ns.sysctls(&[("net.ipv4.conf.all.rp_filter", &rp_filter), ("net.ipv4.conf.default.rp_filter", &rp_filter)])?;
        let external = (role == Role::Gateway).then(|| address::external(number));
        let index = u8::try_from(position + 1).context("too many nodes")?;
        let underlay = address::underlay(number);
        nodes.insert(name.clone(), LabNode { name, role, index, ns, underlay, external, labels, next_pod: 10 });
    }
    Ok(nodes)
}

fn make_servers(scope: &mut Scope, settings: &LabSettings) -> Result<BTreeMap<String, Server>> {
    let near = (1..=settings.servers).map(|i| (format!("server{i}"), address::external(199 + i)));
    let far = (1..=settings.far_servers).map(|i| (format!("far{i}"), address::far(9 + i)));
    let mut servers = BTreeMap::new();
    for (name, ips) in near.chain(far) {
        let ns = scope.namespace(&name)?;
        servers.insert(name.clone(), Server { name, ns, ips });
    }
    Ok(servers)
}

fn forward(ns: &NetNs) -> Result<()> {
    ns.sysctls(&[
        ("net.ipv4.conf.all.forwarding", "1"),
        ("net.ipv4.conf.default.forwarding", "1"),
        ("net.ipv6.conf.all.forwarding", "1"),
        ("net.ipv6.conf.default.forwarding", "1"),
    ])
}

fn make_bridges(underlay: &NetNs, external: &NetNs, router: &NetNs, settings: &LabSettings) -> Result<()> {
    let bridge = |name: &str, mtu: u32| {
        vec![
            format!("link add {name} mtu {mtu} type bridge forward_delay 0 stp_state 0 mcast_snooping 0"),
            format!("link set {name} up"),
        ]
    };
    // These bridges are switches without netfilter, whatever the nodes' own bridges do.
    for switch in [underlay, external] {
        for table in ["arptables", "iptables", "ip6tables"] {
            let sysctl = format!("net.bridge.bridge-nf-call-{table}");
            match switch.sysctls(&[(&sysctl, "0")]) {
                Err(error) if !is_missing(&error) => return Err(error),
                // A kernel without br_netfilter.
                _ => {}
            }
        }
    }
    underlay.ip(&bridge("br0", settings.underlay_mtu))?;
    external.ip(&bridge("br0", settings.external_mtu))?;
    forward(router)?;
    router.ip(&bridge("far", settings.far_mtu))
}

fn is_missing(error: &anyhow::Error) -> bool {
    error.root_cause().downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Returns the `ip` line for a veth `interface` in `ns`, with its port in the bridge of `segment`.
fn plug(ns: &NetNs, interface: &str, mac: &str, segment: &NetNs, port: &str, mtu: u32) -> String {
    let (ns, segment) = (ns.name(), segment.name());
    let mac = if mac.is_empty() { String::new() } else { format!("address {mac} ") };
    format!("link add {interface} mtu {mtu} {mac}netns {ns} type veth peer name {port} mtu {mtu} netns {segment}")
}

/// Returns the name of the other end of a gateway's card, in the underlay's namespace.
fn trunk(node: &LabNode) -> String {
    format!("{}-{CARD}", node.name)
}

/// Creates a card with the VLAN devices `eth0` and `ext0`, and the matching devices at its other end, one in each segment's namespace.
fn plug_vlans(node: &LabNode, [underlay, external]: [&NetNs; 2], settings: &LabSettings) -> Result<()> {
    let (trunk, mtu) = (trunk(node), settings.underlay_mtu.max(settings.external_mtu));
    underlay.ip(&[plug(&node.ns, CARD, "", underlay, &trunk, mtu), format!("link set {trunk} up")])?;
    node.ns.ip(&[format!("link set {CARD} up")])?;
    // Both ports have the same name. The port for the other namespace is created first, before the name is taken in this one.
    for (vlan, interface, address, segment, mtu) in [
        (200, "ext0", node.external_mac(), external, settings.external_mtu),
        (100, "eth0", node.underlay_mac(), underlay, settings.underlay_mtu),
    ] {
        let address = mac(address);
        node.ns
            .ip(&[format!("link add link {CARD} name {interface} mtu {mtu} address {address} type vlan id {vlan}")])?;
        let (name, segment) = (&node.name, segment.name());
        underlay.ip(&[format!("link add link {trunk} name {name} mtu {mtu} netns {segment} type vlan id {vlan}")])?;
    }
    Ok(())
}

/// Creates the links. Returns the ports of the underlay's, the external and the far bridge.
fn make_links(
    nodes: &BTreeMap<String, LabNode>,
    servers: &BTreeMap<String, Server>,
    underlay: &NetNs,
    external: &NetNs,
    router: &NetNs,
    settings: &LabSettings,
) -> Result<[Vec<String>; 3]> {
    let mut links = Vec::new();
    let mut ports: [(&NetNs, &str, Vec<String>); 3] =
        [(underlay, "br0", Vec::new()), (external, "br0", Vec::new()), (router, "far", Vec::new())];
    let mut add = |which: usize, ns: &NetNs, interface: &str, mac: &str, port: &str, mtu: u32| {
        links.push(plug(ns, interface, mac, ports[which].0, port, mtu));
        ports[which].2.push(port.to_owned());
    };
    let (on_vlans, on_links): (Vec<_>, Vec<_>) =
        nodes.values().partition(|node| settings.vlan_devices && node.external.is_some());
    for node in on_links {
        add(0, &node.ns, "eth0", &mac(node.underlay_mac()), &node.name, settings.underlay_mtu);
        if node.external.is_some() {
            add(1, &node.ns, "ext0", &mac(node.external_mac()), &node.name, settings.external_mtu);
        }
    }
    add(0, router, "eth0", "02:57:00:00:00:01", "router", settings.underlay_mtu);
    add(1, router, "ext0", "02:57:00:00:01:01", "router", settings.external_mtu);
    for server in servers.values() {
        if server.name.starts_with("far") {
            add(2, &server.ns, "eth0", "", &server.name, settings.far_mtu);
        } else {
            add(1, &server.ns, "eth0", "", &server.name, settings.external_mtu);
        }
    }
    crate::command::feed(Command::new("ip").args(["-batch", "-"]), &(links.join("\n") + "\n"))
        .with_context(|| format!("ip -batch of\n{}", links.join("\n")))?;
    for node in on_vlans {
        plug_vlans(node, [underlay, external], settings)?;
        ports[..2].iter_mut().for_each(|(_, _, ports)| ports.push(node.name.clone()));
    }
    for (segment, bridge, ports) in &ports {
        let lines: Vec<String> = ports.iter().map(|port| format!("link set {port} master {bridge} up")).collect();
        segment.ip(&lines)?;
    }
    Ok(ports.map(|(_, _, ports)| ports))
}

/// Implements [`Builder::cards`].
fn resemble_cards(
    segments: [&NetNs; 3],
    nodes: &BTreeMap<String, LabNode>,
    servers: &BTreeMap<String, Server>,
    ports: &[Vec<String>; 3],
    vlan_devices: bool,
) -> Result<()> {
    for (segment, ports) in segments.into_iter().zip(ports) {
        ports.iter().try_for_each(|port| segment.set_offload(port, false))?;
    }
    servers.values().try_for_each(|server| server.ns.set_offload("eth0", false))?;
    ["eth0", "ext0"].into_iter().try_for_each(|interface| segments[2].set_offload(interface, false))?;
    for node in nodes.values() {
        let gateway = node.external.is_some();
        let links = match vlan_devices && gateway {
            true => vec![(CARD, segments[0], trunk(node))],
            false => [("eth0", segments[0]), ("ext0", segments[1])][..1 + usize::from(gateway)]
                .iter()
                .map(|(interface, segment)| (*interface, *segment, node.name.clone()))
                .collect(),
        };
        for (interface, segment, port) in links {
            node.ns.set_offload(interface, false)?;
            segment.set_offload(&port, false)?;
            node.ns.keep_tags_in_frames(interface)?;
            segment.keep_tags_in_frames(&port)?;
            if gateway {
                segment.accept_xdp_frames(&port)?;
            }
        }
    }
    Ok(())
}

fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

fn set_up_server(server: &Server) -> Result<()> {
    let gateway = if server.name.starts_with("far") { address::far(1) } else { address::external(1) };
    server.ns.ip(&[
        format!("addr add {}/24 dev eth0", server.ips.v4),
        format!("addr add {}/64 dev eth0", server.ips.v6),
        "link set eth0 up".to_owned(),
        format!("route add default via {} dev eth0", gateway.v4),
        format!("route add default via {} dev eth0", gateway.v6),
    ])?;
    server.ns.wait_addressed(&["eth0"])
}

/// Sets up the router. The bridge `far` runs only if there is a server behind it.
fn set_up_router(router: &NetNs, nodes: &BTreeMap<String, LabNode>, far_runs: bool) -> Result<()> {
    let mut lines = Vec::new();
    for (interface, Dual { v4, v6 }) in
        [("eth0", address::underlay(1)), ("ext0", address::external(1)), ("far", address::far(1))]
    {
        lines.push(format!("addr add {v4}/24 dev {interface}"));
        lines.push(format!("addr add {v6}/64 dev {interface}"));
        lines.push(format!("link set {interface} up"));
    }
    // The outside can reach the pods, so that tests can open connections towards them.
    for node in nodes.values() {
        let [v4, v6] = address::pod_prefixes(node.index);
        lines.push(format!("route add {v4} via {} dev eth0", node.underlay.v4));
        lines.push(format!("route add {v6} via {} dev eth0", node.underlay.v6));
    }
    router.ip(&lines)?;
    router.wait_addressed(&["eth0", "ext0", "far"][..if far_runs { 3 } else { 2 }])
}

/// Runs all jobs concurrently and returns the first error.
fn all(jobs: Vec<Box<dyn FnOnce() -> Result<()> + Send + '_>>) -> Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = jobs.into_iter().map(|job| scope.spawn(job)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow!("a set-up thread panicked"))?)
    })
}
