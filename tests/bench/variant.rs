//! The compared variants: one topology, and the paths that its packets may take.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::traffic::{
    BulkServer, LoadServer, ServerAnswer, ServerMode, TcpClients, TcpOptions, TcpServer, UdpSink, on_cpu,
};
use lab::{Family, Lab, NetNs, Pod, PodSpec, Server, StartOptions, address, wait_until};

use super::figures::Column;
use super::routes;

/// The ports of the servers.
pub const UDP_PORT: u16 = 9000;
pub const BULK_PORT: u16 = 9001;
pub const HOLD_PORT: u16 = 9002;
pub const ECHO_PORT: u16 = 9003;
const LOOK_PORT: u16 = 9004;
/// The host number of the egress IPs.
pub const EGRESS: u8 = 10;
/// The processor of the sender, and of the echo that it waits for: a round trip thus includes no wake-up of another
/// processor, which takes longer than the trip and varies.
pub const CPU: usize = 1;
/// The processor of the receivers.
const OTHER_CPU: usize = 0;
const PATIENCE: Duration = Duration::from_secs(60);

/// A configuration in which neither a machine that is busy with a load nor an agent that is stopped while its programs
/// are measured looks like a dead gateway.
pub const CALM: &str = "probe: {interval: 500ms, count: 10}\nlease: {renew: 10s, duration: 120s}\ndeadline: 100s\n";
/// The number of nodes that start within [`PATIENCE`]: each loads its programs, and all are on one machine.
const NODES_AT_ONCE: u32 = 8;

/// One variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Variant {
    /// Routed by the kernel through the same gateway, without translation: the limit.
    Plain,
    /// A gateway made of iptables rules: nft mark, policy route, VXLAN, SNAT.
    Stock,
    /// Spillway, over the tunnel device.
    Device,
    /// Spillway, writing the tunnel's headers itself.
    Vxlan,
    /// Spillway, without outer headers.
    Direct,
    /// `Direct` without the host's firewall (`firewall: bypass`), which all other variants pass.
    Bypass,
    /// `Direct` with each flow logged (`flowLog.mode: Flows`): measured only if it is named.
    Logged,
}

/// All variants with their keys in the JSON output, the titles and colours of their columns, and the agents'
/// configurations (`None` without agents).
const VARIANTS: [(Variant, &str, &str, &str, Option<&str>); 7] = [
    (Variant::Plain, "plain", "plain routing", "#9aa0a6", None),
    (Variant::Stock, "stock", "stock kernel", "#d9a441", None),
    (Variant::Device, "device", "Spillway, device", "#8ab4f8", Some("transport: device\n")),
    (Variant::Vxlan, "vxlan", "Spillway, vxlan", "#4285f4", Some("transport: vxlan\n")),
    (Variant::Direct, "direct", "Spillway, direct", "#174ea6", Some("transport: direct\n")),
    (
        Variant::Bypass,
        "bypass",
        "Spillway, direct, firewall bypassed",
        "#0b2350",
        Some("transport: direct\nfirewall: bypass\n"),
    ),
    (
        Variant::Logged,
        "logged",
        "Spillway, direct, flows logged",
        "#5f6368",
        Some("transport: direct\nflowLog: {mode: Flows, destinations: true}\n"),
    ),
];

impl Variant {
    /// All variants in the order of the tables.
    pub const ALL: [Variant; 6] =
        [Variant::Plain, Variant::Stock, Variant::Device, Variant::Vxlan, Variant::Direct, Variant::Bypass];

    /// Returns those, and the variants that are measured only if named.
    pub fn every() -> impl Iterator<Item = Variant> {
        VARIANTS.into_iter().map(|(variant, ..)| variant)
    }

    /// Returns the colour of its bars.
    pub fn color(self) -> &'static str {
        VARIANTS[self as usize].3
    }

    /// Returns the agents' configuration; `None` if there are no agents.
    fn config(self) -> Option<&'static str> {
        VARIANTS[self as usize].4
    }

    /// Returns whether it is a variant of Spillway.
    pub fn is_spillway(self) -> bool {
        self.config().is_some()
    }
}

impl Column for Variant {
    fn name(self) -> &'static str {
        VARIANTS[self as usize].1
    }

    fn title(self) -> &'static str {
        VARIANTS[self as usize].2
    }
}

/// A variant ready for measurement: a lab with one pod, one gateway or more, and one server.
pub struct BenchLab {
    pub variant: Variant,
    pub pod: Pod,
    pub server: Server,
    /// Counts UDP packets of both families.
    pub sink: UdpSink,
    _servers: (BulkServer, LoadServer, LoadServer),
    pub lab: Lab,
}

impl BenchLab {
    /// Builds the lab of a variant. `config` is added to the agents' configuration; `gateways` is the number of gateways.
    pub fn open(variant: Variant, binaries: &Path, config: &str, gateways: u8) -> Result<BenchLab> {
        Self::open_with(variant, binaries, config, gateways, false)
    }

    /// Like [`Self::open`]; with `cards`, links resemble those between network cards.
    pub fn open_with(variant: Variant, binaries: &Path, config: &str, gateways: u8, cards: bool) -> Result<BenchLab> {
        let masquerade = variant != Variant::Plain;
        let builder = Lab::builder().workers(1).gateways(gateways).far_servers(0).masquerade(masquerade);
        let builder = if cards { builder.cards() } else { builder };
        let mut lab = builder.build()?;
        let pod = lab.add_pod(PodSpec::new("client", "worker1").label("app", "bench"))?;
        let server = lab.server("server1").clone();
        routes::towards_targets(&lab, &server)?;
        match variant {
            Variant::Plain => routes::plain(&lab)?,
            Variant::Stock => routes::stock(&lab)?,
            _ => start(&mut lab, variant, binaries, config)?,
        }
        // An unspecified IPv6 address takes IPv4 datagrams as well.
        let sink = UdpSink::start(&server.ns, SocketAddr::new([0u16; 8].into(), UDP_PORT))?;
        let (bulk, hold) = on_cpu(OTHER_CPU, || {
            let bulk = BulkServer::start(&server.ns, &server.ips.both(BULK_PORT))?;
            Ok((bulk, LoadServer::start(&server.ns, &server.ips.both(HOLD_PORT), ServerAnswer::Hold)?))
        })?;
        let echo = on_cpu(CPU, || LoadServer::start(&server.ns, &server.ips.both(ECHO_PORT), ServerAnswer::Echo))?;
        let servers = (bulk, hold, echo);
        let place = BenchLab { variant, pod, server, sink, _servers: servers, lab };
        place.check()?;
        Ok(place)
    }

    /// Waits until the server sees the source address that this variant gives to the pod's connections.
    pub fn check(&self) -> Result<()> {
        for family in Family::BOTH {
            let expected = match self.variant {
                Variant::Plain => self.pod.ips.ip(family),
                _ => address::external(EGRESS).ip(family),
            };
            let what = format!("{}: the pod shows {expected} to the server", self.variant.name());
            let expected = BTreeSet::from([expected]);
            wait_until(&what, patience(&self.lab), || self.sources(family, 1), |sources| *sources == expected)?;
        }
        Ok(())
    }

    /// Returns the [`sources`] of the pod.
    pub fn sources(&self, family: Family, count: usize) -> Result<BTreeSet<IpAddr>> {
        sources(&self.pod.ns, &self.server, family, count)
    }
}

/// Opens `count` new connections and returns their source addresses at the server.
pub fn sources(from: &NetNs, server: &Server, family: Family, count: usize) -> Result<BTreeSet<IpAddr>> {
    let listening = TcpServer::start(&server.ns, &server.ips.both(LOOK_PORT), ServerMode::Echo)?;
    let options = TcpOptions { connect_timeout: Duration::from_millis(500), reset: true, ..TcpOptions::once() };
    let clients = TcpClients::open(from, server.ips.at(family, LOOK_PORT), count, options)?;
    let began = Instant::now();
    clients.wait("answers", PATIENCE, |all| {
        all.iter().filter(|one| one.received > 0).count() == count || began.elapsed() > Duration::from_secs(1)
    })?;
    Ok(listening.source_of_flow().values().map(|peer| peer.ip()).collect())
}

/// Returns the time that an operation on the whole lab may take.
pub fn patience(lab: &Lab) -> Duration {
    PATIENCE * (lab.nodes().count() as u32).div_ceil(NODES_AT_ONCE)
}

/// Starts Spillway in a lab, with one policy for everything.
fn start(lab: &mut Lab, variant: Variant, binaries: &Path, config: &str) -> Result<()> {
    lab.manifests().write("policy", &policy("bench", &["0.0.0.0/0", "::/0"], &[(EGRESS, "gw1")]))?;
    let text = format!("{CALM}{}{config}", variant.config().unwrap_or_default());
    let options = StartOptions::new().config(&text).binary(&binaries.join("egress-daemon"));
    lab.start_agents_before_controller(&options)?;
    let nodes: Vec<String> = lab.nodes().map(|node| node.name.clone()).collect();
    let began = Instant::now();
    while lab.manifests().reporting()? != nodes {
        for node in &nodes {
            let agent = lab.agent(node);
            ensure!(agent.alive()?, "the agent of {node} has ended:\n{}", agent.tail());
        }
        if began.elapsed() > patience(lab) {
            bail!("not every agent has reported within {:?}", patience(lab));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let options = StartOptions::new().config(CALM).binary(&binaries.join("egress-daemon"));
    lab.start_controller("controller", &options).context("the controller")
}

/// Returns a policy for the bench's pod, with these destinations and the host numbers of its egress IPs, each with its gateway.
pub fn policy(name: &str, destinations: &[&str], egress: &[(u8, &str)]) -> String {
    let quoted: Vec<String> = destinations.iter().map(|net| format!("\"{net}\"")).collect();
    let mut text = format!(
        "apiVersion: spillway.io/v1beta1\nkind: EgressGatewayPolicy\nmetadata: {{name: {name}}}\nspec:\n  selectors: \
         [{{podSelector: {{matchLabels: {{app: bench}}}}}}]\n  destinationCIDRs: [{}]\n  egressGateways:\n",
        quoted.join(", ")
    );
    for (host, gateway) in egress {
        for family in Family::BOTH.into_iter().filter(|family| serves(destinations, *family)) {
            text += &format!(
                "  - {{nodeSelector: {{matchLabels: {{kubernetes.io/hostname: {gateway}}}}}, egressIP: \"{}\"}}\n",
                address::external(*host).ip(family)
            );
        }
    }
    text
}

fn serves(destinations: &[&str], family: Family) -> bool {
    destinations.iter().any(|net| net.contains(':') == (family == Family::V6))
}
