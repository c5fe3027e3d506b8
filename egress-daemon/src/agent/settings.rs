//! The agent's part of the configuration.

use crate::{
    config::{Announce, Config, Firewall},
    flowlog::Mode,
};
use egress_common::{abi::ticks, config as record, limits};
use egress_core::{
    agent::{facts::Facts, machine},
    health::ProbeTimes,
    network::{classify::InterfaceRules, xdp::Xdp},
};
use egress_node::{
    datapath::{attach, load::Sizes},
    host::tunnel::{self, TunnelSpec},
};
use ipnet::IpNet;
use std::{net::IpAddr, time::Duration};

/// A pod may use all but one in this many entries of the flow table, unless `maxFlowsPerPod` is set. Its share must be
/// large, because closed connections count until their ports are needed or they have been idle for long enough.
const KEPT_FROM_POD: u32 = 4;

/// The settings of an agent.
#[derive(Clone, Debug)]
pub struct AgentSettings {
    /// The machine's settings.
    pub machine: machine::MachineSettings,
    /// The facts that are known before anything is read.
    pub facts: Facts,
    /// The tunnel device.
    pub tunnel: TunnelSpec,
    /// The sizes of maps.
    pub sizes: Sizes,
    /// The interval at which a gateway renews its lease.
    pub lease_renew: Duration,
    /// Whether the first packet of a flow passes the host's firewall.
    pub firewall: Firewall,
    /// The bit of the packet mark that leads first packets to the tunnel device if no other route matches.
    pub firewall_mark: u32,
    /// Whether a gateway's packets may be forwarded at the driver.
    pub xdp: Xdp,
    /// How programs are attached; detected if absent.
    pub attach: Option<attach::Mode>,
}

impl AgentSettings {
    /// Sets the address at which pods reach the API server. No policy affects it; its backends may be anywhere.
    pub fn with_api_server(mut self, address: Option<IpAddr>) -> Self {
        self.facts.api_server = address.map(IpNet::from);
        self.facts.except_cidrs.extend(self.facts.api_server);
        self
    }
}

impl From<&Config> for AgentSettings {
    fn from(config: &Config) -> Self {
        Self {
            machine: decided_by(config),
            facts: Facts {
                except_cidrs: config.except_cidrs.clone(),
                silent: config.announce == Announce::None,
                ..Facts::default()
            },
            tunnel: TunnelSpec { name: config.tunnel_name.clone(), port: config.tunnel_port },
            sizes: Sizes {
                max_flows: config.max_flows,
                flow_events: if config.flow_log.mode == Mode::Flows { limits::FLOW_EVENTS } else { 0 },
            },
            lease_renew: config.lease.renew,
            firewall: config.firewall,
            firewall_mark: config.firewall_mark,
            xdp: config.xdp,
            attach: None,
        }
    }
}

fn decided_by(config: &Config) -> machine::MachineSettings {
    let t = &config.timeouts;
    let tick = |time: Duration| ticks(time.as_secs());
    machine::MachineSettings {
        rules: InterfaceRules {
            uplinks: config.uplinks.clone(),
            pod_interfaces: config.pod_interfaces.clone(),
            tunnel: config.tunnel_name.clone(),
            node_addresses: Vec::new(),
        },
        probe: ProbeTimes { interval: config.probe.interval, misses: config.probe.count, replies: config.probe.count },
        lease_duration: config.lease.duration,
        deadline: config.deadline,
        start_limit: config.start_limit,
        transport: config.transport,
        tunnel_mtu: tunnel::MTU,
        config: record::DatapathConfig {
            flags: if config.firewall == Firewall::Respect { record::flags::RESPECT_FIREWALL } else { 0 },
            pod_flows: match config.max_flows_per_pod {
                0 => config.max_flows - config.max_flows / KEPT_FROM_POD,
                own => own,
            },
            tcp_established: tick(t.tcp_established),
            tcp_transitory: tick(t.tcp_transitory),
            udp: tick(t.udp),
            icmp: tick(t.icmp),
            tunnel_port: config.tunnel_port.into(),
            ..record::UNSET
        },
        clock: Duration::ZERO,
    }
}
