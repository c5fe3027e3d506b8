//! What the administrator may set for an agent, as types.

use crate::{
    datapath::{attach, load::Sizes},
    health::ProbeTimes,
    host::{classify::NamePattern, tunnel::TunnelSpec},
};
use egress_common::limits;
use ipnet::IpNet;
use std::time::Duration;

/// How long idle flows are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// An established TCP connection.
    pub tcp_established: Duration,
    /// A TCP connection that is opening or closing.
    pub tcp_transitory: Duration,
    /// A UDP flow.
    pub udp: Duration,
    /// An ICMP query.
    pub icmp: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            tcp_established: Duration::from_secs(limits::TCP_ESTABLISHED_SECS),
            tcp_transitory: Duration::from_secs(limits::TCP_TRANSITORY_SECS),
            udp: Duration::from_secs(limits::UDP_SECS),
            icmp: Duration::from_secs(limits::ICMP_SECS),
        }
    }
}

/// The settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The tunnel device.
    pub tunnel: TunnelSpec,
    /// Destinations that no policy touches.
    pub except_cidrs: Vec<IpNet>,
    /// Interfaces that carry egress IPs, where they are not found by themselves.
    pub uplinks: Vec<NamePattern>,
    /// Interfaces of pods, where they are not found by themselves.
    pub pod_interfaces: Vec<NamePattern>,
    /// Sizes of maps.
    pub sizes: Sizes,
    /// Idle times.
    pub timeouts: Timeouts,
    /// Probes of gateways.
    pub probe: ProbeTimes,
    /// How often a gateway renews its lease.
    pub lease_renew: Duration,
    /// How long a gateway's lease lasts.
    pub lease_duration: Duration,
    /// For how long the datapath answers ARP and NDP after the agent's last sign of life.
    pub deadline: Duration,
    /// ARP and NDP are not answered, and nothing is announced: for networks without them.
    pub silent: bool,
    /// How programs are attached; found out if absent.
    pub attach: Option<attach::Mode>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            tunnel: TunnelSpec::default(),
            except_cidrs: Vec::new(),
            uplinks: Vec::new(),
            pod_interfaces: Vec::new(),
            sizes: Sizes::default(),
            timeouts: Timeouts::default(),
            probe: ProbeTimes::default(),
            lease_renew: Duration::from_millis(500),
            lease_duration: Duration::from_secs(2),
            deadline: Duration::from_secs(2),
            silent: false,
            attach: None,
        }
    }
}
