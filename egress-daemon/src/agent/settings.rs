//! What an agent takes from the configuration.

use crate::{
    config::{Announce, Config, Firewall, Timeouts},
    datapath::{attach, load::Sizes},
    host::tunnel::TunnelSpec,
};
use egress_core::{health::ProbeTimes, model::Transport, network::classify::NamePattern};
use ipnet::IpNet;
use std::{net::IpAddr, time::Duration};

/// One part in so many of the flow table is what a pod may not use, unless its share is set. No more: closed connections
/// count until their ports are needed or they have been idle for long enough.
const KEPT_FROM_POD: u32 = 4;

/// The settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The tunnel device.
    pub tunnel: TunnelSpec,
    /// Destinations that no policy touches.
    pub except_cidrs: Vec<IpNet>,
    /// The one of them that is the Service of the API server; see [`Settings::with_api_server`].
    pub api_server: Option<IpNet>,
    /// Interfaces that carry egress IPs, where they are not found by themselves.
    pub uplinks: Vec<NamePattern>,
    /// Interfaces of pods, where they are not found by themselves.
    pub pod_interfaces: Vec<NamePattern>,
    /// Sizes of maps.
    pub sizes: Sizes,
    /// How many flows one pod may have.
    pub pod_flows: u32,
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
    /// For how long unknown sources are held for a selected pod without an address.
    pub start_limit: Duration,
    /// ARP and NDP are not answered, and nothing is announced: for networks without them.
    pub silent: bool,
    /// Whether new flows wait for the host's firewall.
    pub firewall: Firewall,
    /// The one bit of the mark that leads first packets to the tunnel device where no other route does.
    pub firewall_mark: u32,
    /// The transports to other nodes.
    pub transport: Transport,
    /// How programs are attached; found out if absent.
    pub attach: Option<attach::Mode>,
}

impl Settings {
    /// The address at which pods find the API server: no policy touches it, and what is behind it may be anywhere.
    pub fn with_api_server(mut self, address: Option<IpAddr>) -> Self {
        self.api_server = address.map(IpNet::from);
        self.except_cidrs.extend(self.api_server);
        self
    }
}

impl From<&Config> for Settings {
    fn from(config: &Config) -> Self {
        Self {
            tunnel: TunnelSpec { name: config.tunnel_name.clone(), port: config.tunnel_port },
            except_cidrs: config.except_cidrs.clone(),
            api_server: None,
            uplinks: config.uplinks.clone(),
            pod_interfaces: config.pod_interfaces.clone(),
            sizes: Sizes { max_flows: config.max_flows },
            pod_flows: match config.max_flows_per_pod {
                0 => config.max_flows - config.max_flows / KEPT_FROM_POD,
                own => own,
            },
            timeouts: config.timeouts,
            probe: ProbeTimes {
                interval: config.probe.interval,
                misses: config.probe.count,
                replies: config.probe.count,
            },
            lease_renew: config.lease.renew,
            lease_duration: config.lease.duration,
            deadline: config.deadline,
            start_limit: config.start_limit,
            silent: config.announce == Announce::None,
            firewall: config.firewall,
            firewall_mark: config.firewall_mark,
            transport: config.transport,
            attach: None,
        }
    }
}
