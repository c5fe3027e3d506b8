//! The configuration file (`--config FILE`): the settings, their defaults, and the values that are refused.
//!
//! Parsing is pure: it turns text into a [`Config`] or a list of all faults. It knows the limits of `egress-common` and the
//! name patterns of `egress_core::network::classify`, but not the users of the settings.

mod read;
mod values;

pub use values::socket_address;

use crate::{flowlog::FlowLog, store::Kind};
use egress_common::{abi, limits};
use egress_core::{
    model::Transport,
    network::{classify::NamePattern, xdp::Xdp},
};
use egress_node::host::tunnel;
use ipnet::IpNet;
use std::{collections::BTreeSet, fmt, fs, io, net::SocketAddr, path::Path, time::Duration};

/// Default of [`Probe::interval`].
pub const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Default of [`Probe::count`].
pub const PROBE_COUNT: u32 = 3;
/// Default of [`LeaseConfig::renew`].
pub const LEASE_RENEW: Duration = Duration::from_secs(5);
/// Default of [`LeaseConfig::duration`].
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// The longest [`LeaseConfig::duration`]. A controller does not accept longer durations from leases.
pub const LONGEST_LEASE: Duration = Duration::from_secs(3600);
/// Default of [`Config::start_limit`]: longer than the network setup of a pod takes on a busy node.
pub const START_LIMIT: Duration = Duration::from_secs(60);
/// Default of [`Config::drain_timeout`].
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(3600);
/// Default of [`Timeouts::tcp_established`].
pub const TCP_ESTABLISHED: Duration = Duration::from_secs(limits::TCP_ESTABLISHED_SECS);
/// Default of [`Timeouts::tcp_transitory`].
pub const TCP_TRANSITORY: Duration = Duration::from_secs(limits::TCP_TRANSITORY_SECS);
/// Default of [`Timeouts::udp`].
pub const UDP: Duration = Duration::from_secs(limits::UDP_SECS);
/// Default of [`Timeouts::icmp`].
pub const ICMP: Duration = Duration::from_secs(limits::ICMP_SECS);

/// The settings of an agent or a controller. Every field has a default, and a missing file counts as empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `tunnelPort`: UDP port of the tunnel device, the same on all nodes.
    pub tunnel_port: u16,
    /// `tunnelName`: name of the tunnel device, 1 to 15 bytes.
    pub tunnel_name: String,
    /// `exceptCIDRs`: destinations to which no policy applies, in addition to those of pods, nodes and services.
    pub except_cidrs: Vec<IpNet>,
    /// `uplinks`: interfaces that lead out of the node, in addition to those that the agent recognises.
    pub uplinks: Vec<NamePattern>,
    /// `podInterfaces`: host-side interfaces of pods, in addition to those that the agent recognises.
    pub pod_interfaces: Vec<NamePattern>,
    /// `maxFlows`: the most flows on this node, for each address family.
    pub max_flows: u32,
    /// `maxFlowsPerPod`: the most flows of one pod; 0 stands for three quarters of `maxFlows`.
    pub max_flows_per_pod: u32,
    /// `timeouts`: how long idle flows are kept.
    pub timeouts: Timeouts,
    /// `probe`: how gateways are probed through the tunnel.
    pub probe: Probe,
    /// `lease`: how gateways show the controller that they are alive.
    pub lease: LeaseConfig,
    /// `deadline`: how long the datapath answers ARP and NDP for egress IPs after it last heard from its agent. By default
    /// [`LeaseConfig::longest_deadline`].
    pub deadline: Duration,
    /// `startLimit`: how long packets of unknown sources are held for a selected pod that has no address yet.
    pub start_limit: Duration,
    /// `firewall`: whether the first packet of a flow passes the host's firewall.
    pub firewall: Firewall,
    /// `firewallMark`: one bit of the packet mark. A node without a default route uses it to route first packets to the tunnel device,
    /// after all other routes.
    pub firewall_mark: u32,
    /// `transport`: the transport between source nodes and gateways.
    pub transport: Transport,
    /// `xdp`: whether a gateway forwards packets at the drivers of its interfaces.
    pub xdp: Xdp,
    /// `announce`: how egress IPs are announced on their link.
    pub announce: Announce,
    /// `foreignKinds`: the other systems whose objects are read from the cluster. In a directory they are always read.
    pub foreign_kinds: BTreeSet<Foreign>,
    /// `maxEgressIPsPerNode`: the most floating egress IPs that a node may carry, over all pools. A pool may set a lower limit for its
    /// own egress IPs; a node's annotation overrides both. Absent: no limit. Used by the controller.
    pub max_egress_ips_per_node: Option<u32>,
    /// `drainTimeout`: how long an egress IP keeps its connections after it has left its pool because the pool was deleted or its
    /// ranges became smaller. Used by the controller.
    pub drain_timeout: Duration,
    /// `metrics`: the address at which metrics and health are served; `--metrics` overrides it. Absent: they are not served.
    pub metrics: Option<SocketAddr>,
    /// `flowLog`: how the use of egress IPs and their ports is logged.
    pub flow_log: FlowLog,
}

/// How long idle flows are kept, in whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// `tcpEstablished`: a TCP connection whose handshake is complete (RFC 5382: no less than 2 h 4 min).
    pub tcp_established: Duration,
    /// `tcpTransitory`: a TCP connection that is opening or closing (RFC 5382: no less than 4 min).
    pub tcp_transitory: Duration,
    /// `udp`: a UDP flow (RFC 4787: no less than 2 min).
    pub udp: Duration,
    /// `icmp`: an ICMP query (RFC 5508: no less than 60 s).
    pub icmp: Duration,
}

/// How gateways are probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// `interval`: the time between two probes of a gateway that answers.
    pub interval: Duration,
    /// `count`: a gateway counts as dead after this many consecutive lost probes, and as alive after this many answers.
    pub count: u32,
}

/// The leases of gateways and of the leading controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseConfig {
    /// `renew`: how often a holder renews its lease.
    pub renew: Duration,
    /// `duration`: how long a lease is valid after its last renewal, unless the lease states a longer time; while no gateway renews,
    /// gateways' leases are valid three times as long.
    pub duration: Duration,
}

impl LeaseConfig {
    /// Returns the longest [`Config::deadline`] with which a gateway falls silent before its lease can lapse if its agent dies. The agent
    /// may have renewed the lease up to [`Self::renew`] before it last extended the deadline.
    pub const fn longest_deadline(self) -> Duration {
        self.duration.saturating_sub(self.renew)
    }
}

/// Whether the first packet of a flow passes the host's firewall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Firewall {
    /// The first packet passes it. A flow is confirmed by the first packet that the host's firewall accepts.
    Respect,
    /// All packets take the fast path and bypass the host's firewall.
    Bypass,
}

/// Another system whose objects Spillway understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Foreign {
    /// CiliumEgressGatewayPolicy (cilium.io/v2).
    Cilium,
    /// Egress and ExternalIPPool (crd.antrea.io/v1beta1).
    Antrea,
}

impl Foreign {
    /// Returns the kinds of its objects.
    pub fn kinds(&self) -> &'static [Kind] {
        match self {
            Foreign::Cilium => &[Kind::CiliumEgressGatewayPolicy],
            Foreign::Antrea => &[Kind::Egress, Kind::ExternalIPPool],
        }
    }
}

/// How egress IPs are announced on their link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announce {
    /// Gratuitous ARP and unsolicited neighbour advertisements, and answers to requests.
    Arp,
    /// Not at all: routers are configured to send packets for egress IPs to the node.
    None,
}

impl Default for Config {
    fn default() -> Self {
        let lease = LeaseConfig { renew: LEASE_RENEW, duration: LEASE_DURATION };
        Self {
            tunnel_port: abi::TUNNEL_PORT,
            tunnel_name: tunnel::DEFAULT_NAME.to_owned(),
            except_cidrs: Vec::new(),
            uplinks: Vec::new(),
            pod_interfaces: Vec::new(),
            max_flows: limits::MAX_FLOWS as u32,
            max_flows_per_pod: 0,
            timeouts: Timeouts {
                tcp_established: TCP_ESTABLISHED,
                tcp_transitory: TCP_TRANSITORY,
                udp: UDP,
                icmp: ICMP,
            },
            probe: Probe { interval: PROBE_INTERVAL, count: PROBE_COUNT },
            lease,
            deadline: lease.longest_deadline(),
            start_limit: START_LIMIT,
            firewall: Firewall::Respect,
            firewall_mark: abi::FIREWALL_MARK,
            transport: Transport::Auto,
            xdp: Xdp::Auto,
            announce: Announce::Arp,
            foreign_kinds: BTreeSet::new(),
            max_egress_ips_per_node: None,
            drain_timeout: DRAIN_TIMEOUT,
            metrics: None,
            flow_log: FlowLog::default(),
        }
    }
}

impl fmt::Display for Firewall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Firewall::Respect => "respect",
            Firewall::Bypass => "bypass",
        })
    }
}

/// One thing that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The field's path, such as `timeouts.udp`; empty for the whole file.
    pub field: String,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub remedy: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        write!(f, "{}; {}", self.message, self.remedy)
    }
}

/// The documentation of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its path, such as `timeouts.udp`.
    pub field: String,
    /// Its default as YAML, or a description in parentheses.
    pub default: &'static str,
    /// What it sets.
    pub meaning: &'static str,
    /// The values that are accepted.
    pub values: String,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {file}: {source}; name an existing file with --config")]
    Unreadable {
        /// The file.
        file: String,
        /// The reason.
        source: io::Error,
    },
    /// Its content is refused; every fault is listed.
    #[error("the configuration {file} is refused:{}", faults.iter().map(|fault| format!("\n  {fault}")).collect::<String>())]
    Refused {
        /// The file.
        file: String,
        /// What is wrong with it.
        faults: Vec<Fault>,
    },
}

impl Config {
    /// Reads a file. Without one, every setting has its default.
    pub fn load(file: Option<&Path>) -> Result<Self, ConfigError> {
        let Some(path) = file else { return Ok(Self::default()) };
        let file = path.display().to_string();
        match fs::read(path) {
            Ok(text) => Self::parse(&file, &text),
            Err(source) => Err(ConfigError::Unreadable { file, source }),
        }
    }

    /// Returns the documentation of every setting.
    pub fn settings() -> Vec<Setting> {
        read::settings()
    }

    /// Parses `text`. `file` is used only in error messages.
    pub fn parse(file: &str, text: &[u8]) -> Result<Self, ConfigError> {
        read::config(text).map_err(|faults| ConfigError::Refused { file: file.to_owned(), faults })
    }
}

#[cfg(test)]
mod tests;
