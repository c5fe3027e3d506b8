//! Starting the roles that a process has, from its settings: what joins the agent, the controller, and what others see
//! of them.

use anyhow::Result;
use egress_daemon::{
    agent::{self, Agent, Settings},
    config::{Announce, Config, Firewall},
    controller::{self, ControllerConfig, Report},
    datapath::load::Sizes,
    health::{LeaseTimes, ProbeTimes},
    host::tunnel::TunnelSpec,
    lock::RunFiles,
    store::Store,
};
use futures::FutureExt;
use std::path::PathBuf;
use tokio::sync::watch;

/// How an agent is started.
pub struct AgentOptions {
    /// The node.
    pub node: String,
    /// The directory of its pins.
    pub bpffs: PathBuf,
    /// Whether a controller runs in the same process.
    pub with_controller: bool,
    /// The settings.
    pub config: Config,
}

/// The agent's part of the settings.
fn settings(config: &Config) -> Settings {
    Settings {
        tunnel: TunnelSpec { name: config.tunnel_name.clone(), port: config.tunnel_port },
        except_cidrs: config.except_cidrs.clone(),
        uplinks: config.uplinks.clone(),
        pod_interfaces: config.pod_interfaces.clone(),
        sizes: Sizes { max_flows: config.max_flows },
        timeouts: agent::settings::Timeouts {
            tcp_established: config.timeouts.tcp_established,
            tcp_transitory: config.timeouts.tcp_transitory,
            udp: config.timeouts.udp,
            icmp: config.timeouts.icmp,
        },
        probe: ProbeTimes { interval: config.probe.interval, misses: config.probe.count, replies: config.probe.count },
        lease_renew: config.lease.renew,
        lease_duration: config.lease.duration,
        deadline: config.deadline,
        silent: config.announce == Announce::None,
        attach: None,
    }
}

/// The controller's part of the settings. Its leadership and the gateways' leases have the same times.
fn controller_config(config: &Config) -> ControllerConfig {
    let host = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    ControllerConfig {
        lease_duration: config.lease.duration,
        renew_every: config.lease.renew,
        gateways: LeaseTimes { duration: config.lease.duration, ..LeaseTimes::default() },
        ..ControllerConfig::new(format!("{host}-{}", std::process::id()))
    }
}

/// Runs an agent until `stop` is ready.
pub async fn agent(options: AgentOptions, store: Store, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
    let AgentOptions { node, bpffs, with_controller, config } = options;
    if config.firewall == Firewall::Respect {
        tracing::warn!(
            "firewall: this build sends every packet of a policy past the host's firewall, also under `respect`; \
             write `firewall: bypass` to say that this is wanted"
        );
    }
    let files = RunFiles::of(&bpffs);
    let _lock = files.acquire()?;
    let options =
        agent::Options { node, store: store.clone(), settings: settings(&config), bpffs, journal: files.sysctls() };
    let agent = Agent::start(options).await?;
    let stop = stop.shared();
    let (report, _reports) = watch::channel(Report::default());
    let controller =
        with_controller.then(|| tokio::spawn(controller::run(store, controller_config(&config), report, stop.clone())));
    agent.run(stop).await?;
    if let Some(controller) = controller {
        controller.await?;
    }
    Ok(())
}

/// Runs a controller until `stop` is ready.
pub async fn controller(config: &Config, store: Store, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
    let (report, _reports) = watch::channel(Report::default());
    controller::run(store, controller_config(config), report, stop).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_setting_reaches_the_agent() {
        let text = "{tunnelPort: 9000, tunnelName: t, exceptCIDRs: [10.0.0.0/8], uplinks: [u], podInterfaces: [p], \
                    maxFlows: 2048, timeouts: {tcpEstablished: 3h, tcpTransitory: 5m, udp: 2m, icmp: 90s}, \
                    probe: {interval: 50ms, count: 4}, lease: {renew: 1s, duration: 4s}, deadline: 3s, announce: none}";
        let config = Config::parse("test", text.as_bytes()).unwrap();
        let s = settings(&config);
        assert_eq!(s.tunnel, TunnelSpec { name: "t".into(), port: 9000 });
        assert_eq!((s.except_cidrs.len(), s.uplinks.len(), s.pod_interfaces.len()), (1, 1, 1));
        assert!(s.uplinks[0].matches("u") && s.pod_interfaces[0].matches("p"));
        assert_eq!((s.sizes.max_flows, s.silent), (2048, true));
        let seconds = [s.timeouts.tcp_established, s.timeouts.tcp_transitory, s.timeouts.udp, s.timeouts.icmp];
        assert_eq!(seconds.map(|d| d.as_secs()), [10_800, 300, 120, 90]);
        assert_eq!((s.probe.interval.as_millis(), s.probe.misses, s.probe.replies), (50, 4, 4));
        assert_eq!([s.lease_renew, s.lease_duration, s.deadline].map(|d| d.as_secs()), [1, 4, 3]);
        let c = controller_config(&config);
        assert_eq!((c.renew_every, c.lease_duration), (Duration::from_secs(1), Duration::from_secs(4)));
        assert_eq!(c.gateways.duration, Duration::from_secs(4));
        assert!(c.identity.ends_with(&std::process::id().to_string()));
    }
}
