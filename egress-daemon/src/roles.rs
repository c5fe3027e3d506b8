//! Starts the roles of a process from its settings: connects the agent, the controller, the logs, the socket and the metrics.

use anyhow::Result;
use axum::Router;
use egress_core::health::LeaseTimes;
use egress_daemon::{
    agent::{self, Agent, AgentSettings, trace::Tracer},
    config::Config,
    controller::{self, ControllerConfig, ControllerReport},
    flowlog::{
        Counts, LogWriter,
        export::{Exporters, Uploads},
        flows,
    },
    lock::RunFiles,
    observe::{
        admin::AdminServer,
        metrics::{MetricSources, MetricsServer},
        state::AgentState,
    },
    serve::cluster,
    store::Store,
};
use egress_node::datapath::{Pins, load::Programs};
use futures::FutureExt;
use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};
use tokio::sync::watch;

/// The options of an agent.
pub struct AgentOptions {
    /// The node.
    pub node: String,
    /// The directory of its pins.
    pub bpffs: PathBuf,
    /// The source of its objects, for display.
    pub source: String,
    /// The address at which metrics are served; absent: they are not served.
    pub metrics: Option<SocketAddr>,
    /// Whether a controller runs in the same process.
    pub with_controller: bool,
    /// The settings.
    pub config: Config,
    /// The address at which pods find the API server.
    pub api_server: Option<IpAddr>,
}

/// Returns the controller's part of the settings. The leader's lease and the gateways' leases have the same duration.
fn controller_config(config: &Config) -> ControllerConfig {
    let host = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    ControllerConfig {
        lease_duration: config.lease.duration,
        renew_every: config.lease.renew,
        max_egress_ips: config.max_egress_ips_per_node,
        drain_timeout: config.drain_timeout,
        gateways: LeaseTimes { duration: config.lease.duration, ..LeaseTimes::default() },
        ..ControllerConfig::new(format!("{host}-{}", std::process::id()))
    }
}

/// Runs an agent until `stop` is ready. Everything that it made stays.
///
/// Loads the programs before it reads the objects. The memory for loading, mostly the kernel's BTF, is then already
/// freed and does not add to the peak memory of the process. `store` is `None` if `stop` was ready first.
pub async fn agent(
    options: AgentOptions,
    store: impl Future<Output = Result<Option<Store>>>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let AgentOptions { node, bpffs, source, metrics, with_controller, config, api_server } = options;
    let files = RunFiles::of(&bpffs);
    let lock = files.acquire()?;
    let settings = AgentSettings::from(&config).with_api_server(api_server);
    let programs = Programs::load(&Pins::new(&bpffs), settings.sizes)?;
    // The programs keep working while the API server is unreachable.
    let store = agent::while_waiting(&Pins::new(&bpffs), settings.machine.deadline, store).await?;
    let Some(store) = store? else { return Ok(lock.remove()?) };
    let (publish, published) = watch::channel(Arc::new(AgentState::default()));
    let (tracer, traces) = Tracer::new(Pins::new(&bpffs), settings.sizes);
    let collectors = &config.flow_log.export;
    let exporters = Exporters::start(collectors, &node);
    // A failure of the logs must not stop the agent from carrying out policies.
    let uploads = Uploads::start(collectors, &files.logs(), &node);
    let uploads = uploads
        .inspect_err(|error| tracing::error!("flowLog.export: segments are not sent: {error}"))
        .unwrap_or_default();
    let watching = flows::Settings {
        config: config.flow_log.clone(),
        directory: files.flows(),
        node: node.clone(),
        pins: Pins::new(&bpffs),
        kept: programs.kept_events(),
        exporters: exporters.clone(),
    };
    let name = node.clone();
    let options = agent::Options {
        node,
        programs,
        store: store.clone(),
        settings,
        bpffs: bpffs.clone(),
        journal: files.sysctls(),
        source,
        publish,
        traces,
    };
    let agent = Agent::start(options).await?;
    let log = Arc::new(Counts::default());
    let _writer =
        LogWriter::start(&config.flow_log, files.log(), &name, store.clone(), Arc::clone(&log), exporters.clone());
    let flow_log = Arc::new(Counts::default());
    let _follower = flows::Follower::start(watching, Arc::clone(&flow_log))?;
    // The socket is optional; the datapath works without it.
    let server = AdminServer::start(&files.socket(), published.clone(), tracer.routes());
    let _server = server.inspect_err(|error| tracing::error!("{error}")).ok();
    let stop = stop.shared();
    let (report, reports) = watch::channel(ControllerReport::default());
    let sources = MetricSources {
        pins: Some(Pins::new(&bpffs)),
        agent: Some(published),
        controller: with_controller.then_some(reports),
        log: Some([log, flow_log]),
        exported: [exporters.counts(), uploads.counts()],
        writes: Some(store.counts()),
    };
    let _metrics = serve(metrics, sources, with_controller.then(|| store.clone())).await?;
    let controller =
        with_controller.then(|| tokio::spawn(controller::run(store, controller_config(&config), report, stop.clone())));
    agent.run(stop).await?;
    if let Some(controller) = controller {
        controller.await?;
    }
    // The programs and maps that stay in the kernel need no lock.
    lock.remove()?;
    Ok(())
}

/// Serves metrics and, if there is a controller, the page of current flows.
async fn serve(
    metrics: Option<SocketAddr>,
    sources: MetricSources,
    controller: Option<Store>,
) -> Result<Option<MetricsServer>> {
    let page = |port| controller.map_or_else(Router::new, |store| cluster::page(store, port));
    match metrics {
        Some(address) => Ok(Some(MetricsServer::start(address, sources, page).await?)),
        None => Ok(None),
    }
}

/// Runs a controller until `stop` is ready.
pub async fn controller(
    config: &Config,
    metrics: Option<SocketAddr>,
    store: Store,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let (report, reports) = watch::channel(ControllerReport::default());
    let sources = MetricSources { controller: Some(reports), writes: Some(store.counts()), ..MetricSources::default() };
    let _metrics = serve(metrics, sources, Some(store.clone())).await?;
    controller::run(store, controller_config(config), report, stop).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn leases_have_the_configured_times_and_gateways_the_limit() {
        let config =
            Config::parse("test", b"lease: {renew: 1s, duration: 4s}\nmaxEgressIPsPerNode: 7\ndrainTimeout: 5m")
                .unwrap();
        let c = controller_config(&config);
        assert_eq!((c.renew_every, c.lease_duration), (Duration::from_secs(1), Duration::from_secs(4)));
        assert_eq!((c.gateways.duration, c.max_egress_ips), (Duration::from_secs(4), Some(7)));
        assert_eq!(c.drain_timeout, Duration::from_secs(300));
        assert!(c.identity.ends_with(&std::process::id().to_string()));
    }
}
