//! The cluster of the soak, and the traffic that runs in it from beginning to end.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use lab::traffic::{
    ConnectRate, RunningRate, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer,
};
use lab::{Capture, Cni, Family, Lab, PodSpec, Server, StartOptions, address, wait_until};

/// Host numbers of the egress IPs of the policies `web` (by flow) and `mail` (by endpoint).
pub const WEB: [u8; 3] = [10, 11, 12];
pub const MAIL: [u8; 2] = [20, 21];
/// An address that is added to the policy `web` and removed again.
pub const PASSING: u8 = 13;

/// Ports of the server: streams of web and mail pods, connections of new pods of either kind, connections at a rate,
/// and pods without a policy.
pub const WEB_PORT: u16 = 80;
pub const MAIL_PORT: u16 = 81;
pub const NEW_WEB_PORT: u16 = 82;
pub const NEW_MAIL_PORT: u16 = 83;
pub const RATE_PORT: u16 = 84;
pub const PLAIN_PORT: u16 = 90;
pub const UDP_PORT: u16 = 53;
/// The port to which pods connect until their policies are in force. Its last packets may be in flight when the soak begins.
pub const LOOK_PORT: u16 = 9_007;
/// A port of pods, to which the outside and other pods connect.
pub const POD_PORT: u16 = 8080;

pub const CONTROLLER: &str = "controller";
const PATIENCE: Duration = Duration::from_secs(60);
/// Slower than the defaults, so that a busy machine does not look dead, but fast enough to fail over often.
const CONFIG: &str = "probe: {interval: 200ms, count: 5}\nlease: {renew: 500ms, duration: 4s}\ndeadline: 2s\n";
const INTERVAL: Duration = Duration::from_millis(500);
const RATE: u32 = 20;

/// Everything that runs.
pub struct SoakLab {
    /// The traffic. Declared before the lab, so that it is dropped first.
    pub traffic: Option<Traffic>,
    /// The packets that `server1` sees.
    pub capture: Capture,
    /// The cluster.
    pub lab: Lab,
    /// The options of the agents and the controller.
    pub options: StartOptions,
}

/// Connections that last from beginning to end.
pub struct Traffic {
    /// The servers' ends of the streams.
    pub streams: TcpServer,
    /// The pods' ends.
    pub clients: Vec<TcpClients>,
    /// The server's view of the datagrams.
    pub datagrams: UdpServer,
    /// The pods' ends.
    pub senders: Vec<UdpClients>,
    /// Connections that the outside has opened to pods, or pods to each other.
    pub inbound: Vec<TcpClients>,
    /// The pods' ends of these connections.
    pub pods: Vec<TcpServer>,
    /// Connections at a rate.
    pub rate: RunningRate,
    /// Servers that only answer.
    pub echo: TcpServer,
}

impl SoakLab {
    /// Creates the cluster, with Spillway in it and no traffic yet.
    pub fn build(binaries: &Path) -> Result<SoakLab> {
        let mut lab = Lab::builder().workers(2).gateways(3).build()?;
        for (name, node, app) in [
            ("web-1", "worker1", "web"),
            ("web-2", "worker2", "web"),
            ("mail-1", "worker1", "mail"),
            ("mail-2", "worker2", "mail"),
            ("plain", "worker1", "plain"),
        ] {
            let cni = if node == "worker1" { Cni::PointToPoint } else { Cni::Bridge };
            lab.add_pod(PodSpec::new(name, node).label("app", app).cni(cni))?;
        }
        lab.manifests().write("web", &web(&WEB))?;
        lab.manifests().write("mail", &policy("mail", "PerEndpoint", &MAIL))?;
        let options = StartOptions::new().binary(&binaries.join("egress-daemon")).config(CONFIG);
        lab.start_agents(&options)?;
        lab.start_controller(CONTROLLER, &options)?;
        let capture = Capture::start(&lab.server("server1").ns, "eth0")?;
        Ok(SoakLab { traffic: None, capture, lab, options })
    }

    /// Returns the server outside.
    pub fn server(&self) -> &Server {
        self.lab.server("server1")
    }

    /// Waits until the policies are in force, discards the packets seen until then, and starts the traffic.
    pub fn start(&mut self) -> Result<()> {
        for (pod, hosts) in [("web-1", &WEB[..]), ("web-2", &WEB), ("mail-1", &MAIL), ("mail-2", &MAIL)] {
            let allowed = addresses(hosts);
            for family in Family::BOTH {
                wait_until(
                    &format!("{pod} leaves with its policy's addresses"),
                    PATIENCE,
                    || self.source(pod, family),
                    |seen| seen.is_some_and(|seen| allowed.contains(&seen)),
                )?;
            }
        }
        self.capture.clear();
        let server = self.server().clone();
        let both = |port: u16| server.ips.both(port);
        let streams = TcpServer::start_with(
            &server.ns,
            &[both(WEB_PORT), both(MAIL_PORT), both(PLAIN_PORT)].concat(),
            ServerMode::Stream,
            TcpOptions { interval: INTERVAL, ..TcpOptions::default() },
        )?;
        let ports = [NEW_WEB_PORT, NEW_MAIL_PORT, RATE_PORT].map(both).concat();
        let echo = TcpServer::start(&server.ns, &ports, ServerMode::Echo)?;
        let datagrams = UdpServer::start(&server.ns, &both(UDP_PORT))?;
        let options = TcpOptions { interval: INTERVAL, connect_timeout: PATIENCE, ..TcpOptions::default() };
        let (mut clients, mut senders, mut inbound, mut pods) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for family in Family::BOTH {
            for (pod, port, count) in [
                ("web-1", WEB_PORT, 20),
                ("web-2", WEB_PORT, 20),
                ("mail-1", MAIL_PORT, 10),
                ("mail-2", MAIL_PORT, 10),
                ("plain", PLAIN_PORT, 2),
            ] {
                let ns = &self.lab.pod(pod).ns;
                clients.push(TcpClients::establish(ns, server.ips.at(family, port), count, options.clone())?);
            }
            for pod in ["web-1", "web-2"] {
                let options = UdpOptions { interval: INTERVAL, ..UdpOptions::default() };
                senders.push(UdpClients::start(&self.lab.pod(pod).ns, server.ips.at(family, UDP_PORT), 10, options)?);
            }
        }
        for pod in ["web-1", "web-2"] {
            let pod = self.lab.pod(pod);
            pods.push(TcpServer::start(&pod.ns, &pod.ips.both(POD_PORT), ServerMode::Echo)?);
        }
        for family in Family::BOTH {
            let web = ["web-1", "web-2"].map(|pod| self.lab.pod(pod));
            inbound.push(TcpClients::establish(&server.ns, web[0].ips.at(family, POD_PORT), 4, options.clone())?);
            inbound.push(TcpClients::establish(&web[0].ns, web[1].ips.at(family, POD_PORT), 4, options.clone())?);
        }
        let rate = ConnectRate { per_second: RATE, timeout: Duration::from_secs(2), ..ConnectRate::default() };
        let rate = rate.start(&self.lab.pod("web-1").ns, server.ips.at(Family::V4, RATE_PORT))?;
        self.traffic = Some(Traffic { streams, clients, datagrams, senders, inbound, pods, rate, echo });
        Ok(())
    }

    /// Returns the source of a new connection of a pod, or none if it was not answered in time.
    fn source(&self, pod: &str, family: Family) -> Result<Option<IpAddr>> {
        let server = self.server();
        let listening = TcpServer::start(&server.ns, &server.ips.both(LOOK_PORT), ServerMode::Echo)?;
        let options = TcpOptions { connect_timeout: Duration::from_secs(1), reset: true, ..TcpOptions::once() };
        let target = server.ips.at(family, LOOK_PORT);
        let clients = TcpClients::open(&self.lab.pod(pod).ns, target, 1, options)?;
        let answered = clients.wait("an answer", Duration::from_secs(2), |all| all.iter().any(|one| one.received == 1));
        Ok(answered.ok().and_then(|_| Some(listening.connections().first()?.peer.ip())))
    }

    /// Returns the names of the agents' nodes.
    pub fn nodes(&self) -> Vec<String> {
        self.lab.nodes().map(|node| node.name.clone()).collect()
    }
}

/// Returns the policy `web` over these egress IPs.
pub fn web(hosts: &[u8]) -> String {
    policy("web", "PerFlow", hosts)
}

fn policy(app: &str, distribution: &str, hosts: &[u8]) -> String {
    let gateway =
        |address| format!("\n  - {{nodeSelector: {{matchLabels: {{egress: \"true\"}}}}, egressIP: \"{address}\"}}");
    let gateways: String = addresses(hosts).into_iter().map(gateway).collect();
    format!(
        "apiVersion: spillway.io/v1beta1\nkind: EgressGatewayPolicy\nmetadata: {{name: {app}}}\nspec:\n  selectors: \
         [{{podSelector: {{matchLabels: {{app: {app}}}}}}}]\n  destinationCIDRs: [0.0.0.0/0, \"::/0\"]\n  distribution: \
         {distribution}\n  egressGateways:{gateways}\n"
    )
}

/// Returns both addresses of each host number on the external segment.
pub fn addresses(hosts: &[u8]) -> Vec<IpAddr> {
    Family::BOTH.iter().flat_map(|family| hosts.iter().map(|host| address::external(*host).ip(*family))).collect()
}

/// Returns how often each egress IP has changed its owner, which its object's epoch counts.
pub fn epochs(lab: &Lab) -> BTreeMap<IpAddr, u64> {
    let all = lab.manifests().egress_ips().unwrap_or_default();
    all.into_iter().map(|one| (one.address, one.epoch)).collect()
}
