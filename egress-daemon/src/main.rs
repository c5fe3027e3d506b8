//! `egress-daemon`: the command line of the agent and the controller, and the code that connects their parts.

mod roles;

use anyhow::{Context as _, Result};
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use egress_daemon::{
    check,
    cleanup::{self, Options},
    config::{Config, Foreign, socket_address},
    ctl::{DEFAULT_BPFFS, Output, message, print::show},
    observe::logs::{self, LogFormat},
    store::{Files, Kind, Kubernetes, Reader, Store},
    uninstall::Uninstall,
};
use futures::FutureExt as _;
use std::{
    collections::BTreeSet,
    io::{self, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};
use tokio::signal::unix::{SignalKind, signal};

/// Spillway: an egress gateway that spreads the traffic of pods over several nodes
#[derive(Parser)]
#[command(name = "egress-daemon", version, about, propagate_version = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    logs: Logs,
}

#[derive(Args)]
#[command(next_help_heading = "Logs (on stderr)")]
struct Logs {
    /// What is logged: a level (error, warn, info, debug, trace), or target=level, separated by commas
    #[arg(long, global = true, env = "SPILLWAY_LOG", default_value = "info", value_name = "FILTER")]
    log: String,
    /// The format of log lines
    #[arg(long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    log_format: LogFormat,
}

#[derive(Subcommand)]
enum Command {
    /// Run the agent of a node: load the programs and keep their tables in sync with the objects
    ///
    /// The programs and their tables stay in the kernel when the agent ends, and established connections continue. The
    /// next agent takes them over; `egress-daemon cleanup` removes them.
    Agent(AgentArgs),
    /// Run a controller: choose owners of egress IPs, assign endpoints, lease port blocks
    ///
    /// Any number of controllers may run; one of them leads.
    Controller(ControllerArgs),
    /// Report what this node can do: kernel, hooks, conflicts, interfaces, with a remedy for each problem
    ///
    /// Changes nothing. The exit code is 1 if something that the agent requires is missing.
    Check(CheckArgs),
    /// Remove everything that the agent made on this node
    ///
    /// Refuses while selected pods run on this node, because their packets would leave with the node's address. Move them to other nodes
    /// first, or pass --release. Running it again removes what is left.
    Cleanup(CleanupArgs),
    /// Print a shell completion script for this command
    ///
    /// For example: source <(egress-daemon completions bash)
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// The source of the objects.
#[derive(Args)]
struct Source {
    /// Read objects from the YAML files in a directory, and keep what Spillway writes in DIR/.spillway
    #[arg(long, value_name = "DIR", conflicts_with = "kubeconfig")]
    manifests: Option<PathBuf>,
    /// Use the Kubernetes API that this file describes
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Also read the objects of this system from the cluster, in addition to the systems in `foreignKinds`
    #[arg(long, value_enum, value_name = "SYSTEM", conflicts_with = "manifests")]
    foreign: Vec<Foreign>,
}

impl Source {
    /// Returns the source's name for display.
    fn describe(&self) -> String {
        match (&self.manifests, &self.kubeconfig) {
            (Some(directory), _) => format!("directory {}", directory.display()),
            (None, Some(file)) => format!("cluster of {}", file.display()),
            (None, None) => "this cluster".into(),
        }
    }

    /// Returns the source, or an error if it cannot be used, before any object is read or anything is made on this node.
    async fn find(self) -> Result<Found> {
        match self.manifests {
            Some(directory) => {
                Files::check(&directory).context("--manifests")?;
                Ok(Found::Directory(directory))
            }
            None => {
                let client = Kubernetes::client(self.kubeconfig.as_deref()).await;
                Ok(Found::Cluster(client.context("the cluster")?))
            }
        }
    }

    /// Returns the other systems whose objects are read.
    fn foreign(&self, config: &Config) -> BTreeSet<Foreign> {
        self.foreign.iter().chain(&config.foreign_kinds).copied().collect()
    }
}

/// A usable source whose objects have not been read yet.
enum Found {
    Directory(PathBuf),
    Cluster(kube::Client),
}

impl Found {
    fn client(&self) -> Option<kube::Client> {
        match self {
            Found::Directory(_) => None,
            Found::Cluster(client) => Some(client.clone()),
        }
    }

    /// Opens the store. Returns `None` if `stop` is ready before the cluster has answered.
    async fn open(
        self,
        reader: &Reader,
        foreign: &BTreeSet<Foreign>,
        stop: impl Future<Output = ()>,
    ) -> Result<Option<Store>> {
        let foreign: Vec<Kind> = foreign.iter().flat_map(Foreign::kinds).copied().collect();
        match self {
            Found::Directory(directory) => Ok(Some(Files::open(&directory).context("--manifests")?)),
            Found::Cluster(client) => tokio::select! {
                store = Kubernetes::open(client, reader, &foreign) => Ok(Some(store)),
                () = stop => Ok(None),
            },
        }
    }
}

#[derive(Args)]
struct Common {
    /// The configuration file (YAML); without one, every setting has its default
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Args)]
struct Serving {
    /// Serve /metrics, /healthz and /readyz here, for example 127.0.0.1:9473
    #[arg(long, value_name = "ADDR", value_parser = socket_address)]
    metrics: Option<SocketAddr>,
}

#[derive(Args)]
struct Pinned {
    /// The directory of the pinned maps and links, one for each agent on this machine
    #[arg(long, value_name = "DIR", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
}

#[derive(Args)]
struct AgentArgs {
    /// The name of this node's Node object
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    node: String,
    #[command(flatten)]
    source: Source,
    /// The address of the Service `kubernetes`; no policy affects it or the API server behind it, wherever that server runs
    #[arg(long, env = "KUBERNETES_SERVICE_HOST", value_name = "ADDRESS")]
    api_server: Option<String>,
    /// Run a controller in the same process
    #[arg(long, requires = "manifests", conflicts_with = "kubeconfig")]
    with_controller: bool,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    pinned: Pinned,
    #[command(flatten)]
    serving: Serving,
}

#[derive(Args)]
struct ControllerArgs {
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    serving: Serving,
}

#[derive(Args)]
struct CheckArgs {
    #[command(flatten)]
    common: Common,
    /// Check a cluster instead, before anything is installed: versions, nodes, networks, other egress gateways
    #[arg(long)]
    pre: bool,
    /// The cluster's kubeconfig [default: as kubectl finds it, or the cluster that this pod runs in]
    #[arg(long, value_name = "FILE", requires = "pre")]
    kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    pinned: Pinned,
    /// The output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    output: Output,
}

#[derive(Args)]
struct CleanupArgs {
    #[command(flatten)]
    pinned: Pinned,
    /// Proceed even if an agent is running; the agent then recreates everything
    #[arg(long)]
    force: bool,
    /// Proceed even if policies select pods on this node: their connections end, and new ones leave with the node's address
    #[arg(long)]
    release: bool,
    /// Keep the lease and flow logs, for whois
    #[arg(long)]
    keep_logs: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = logs::start(&cli.logs.log, cli.logs.log_format).map_err(Into::into).and_then(|()| run(cli.command));
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("egress-daemon: {}", message(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Agent(args) => {
            keep_little_memory();
            wait_for(agent(args))
        }
        Command::Controller(args) => wait_for(controller(args)),
        Command::Check(args) => wait_for(async {
            let config = Config::load(args.common.config.as_deref())?;
            let report = if args.pre {
                check::run_pre(&config, args.kubeconfig.as_deref()).await?
            } else {
                check::run(&config, &args.pinned.bpffs).await
            };
            show(&report.print(args.output)?)?;
            Ok(if report.fails() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
        }),
        Command::Cleanup(args) => wait_for(async {
            let CleanupArgs { pinned, force, release, keep_logs } = args;
            let report = cleanup::run(&pinned.bpffs, Options { force, release, keep_logs }).await?;
            show(&report.to_string())?;
            Ok(if report.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "egress-daemon", &mut script);
            io::stdout().write_all(&script)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Makes the allocator return unused memory. An agent of a large cluster reads all its objects again for each change. With one arena per
/// thread and a dynamic mmap threshold, it would retain 50 % more memory.
fn keep_little_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the process has only one thread yet, and mallopt(3) documents both options. A failed call changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
    }
}

/// The runtime's number of worker threads. The default is one for each processor, of which a node may have hundreds. A daemon waits most of
/// the time, and long work has its own threads.
const WORKERS: usize = 2;

fn wait_for(task: impl Future<Output = Result<ExitCode>>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build();
    runtime.context("the runtime cannot be started")?.block_on(task)
}

async fn agent(args: AgentArgs) -> Result<ExitCode> {
    let config = Config::load(args.common.config.as_deref())?;
    let reader = Reader::Agent(args.node.clone());
    let foreign = args.source.foreign(&config);
    let bpffs = args.pinned.bpffs.clone();
    let options = roles::AgentOptions {
        node: args.node,
        bpffs: args.pinned.bpffs,
        metrics: args.serving.metrics.or(config.metrics),
        source: args.source.describe(),
        with_controller: args.with_controller,
        config,
        // Kubernetes sets the variable to an address. A name means that the agent bypasses the Service.
        api_server: args.api_server.and_then(|text| text.parse().ok()),
    };
    let stop = stop()?;
    let found = args.source.find().await?;
    let uninstall = found.client().map(Uninstall::follow);
    roles::agent(options, found.open(&reader, &foreign, stop.clone()), stop).await?;
    if uninstall.is_some_and(|uninstall| uninstall.is_under_way()) {
        leave_nothing(&bpffs).await;
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes everything that this agent made except the logs, because the agents are being removed from the cluster.
async fn leave_nothing(bpffs: &Path) {
    match cleanup::run(bpffs, Options { force: false, release: true, keep_logs: true }).await {
        Ok(report) => {
            tracing::info!("the agents are being uninstalled: removed {} items from this node", report.removed.len());
            report.failed.iter().for_each(|failed| tracing::error!("not removed: {failed}"));
        }
        Err(error) => tracing::error!("the agents are being uninstalled, but this node was not cleaned up: {error:#}"),
    }
}

async fn controller(args: ControllerArgs) -> Result<ExitCode> {
    let config = Config::load(args.common.config.as_deref())?;
    let metrics = args.serving.metrics.or(config.metrics);
    let stop = stop()?;
    let foreign = args.source.foreign(&config);
    if let Some(store) = args.source.find().await?.open(&Reader::Controller, &foreign, stop.clone()).await? {
        roles::controller(&config, metrics, store, stop).await?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a future that is ready after SIGTERM or SIGINT. A second signal ends the process immediately.
fn stop() -> Result<impl Future<Output = ()> + Clone + Send + 'static> {
    let mut term = signal(SignalKind::terminate()).context("SIGTERM cannot be caught")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be caught")?;
    let asked = async move {
        let name = tokio::select! {
            _ = term.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        tracing::info!("{name}: stopping; programs and maps stay in the kernel and keep working");
        tokio::spawn(async move {
            tokio::select! {
                _ = term.recv() => {}
                _ = interrupt.recv() => {}
            }
            std::process::exit(130);
        });
    };
    Ok(asked.boxed().shared())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("egress-daemon").chain(line.split(' ')))
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_documented_commands_are_parsed() {
        for line in [
            "agent --node worker1 --manifests /m --with-controller --config /c.yaml --bpffs /sys/fs/bpf/x --metrics [::1]:9",
            "agent --node worker1 --kubeconfig /k --log debug --log-format json",
            "controller --manifests /m --metrics 127.0.0.1:9473",
            "agent --node worker1 --manifests /m --metrics=[192.0.2.7]:9473",
            "controller --foreign cilium --foreign antrea",
            "check -o json --bpffs /sys/fs/bpf/x",
            "cleanup --force --bpffs /sys/fs/bpf/x",
            "completions zsh",
        ] {
            assert!(parse(line).is_ok(), "{line}: {}", parse(line).err().unwrap());
        }
    }

    #[test]
    fn contradictory_arguments_are_refused() {
        for (line, part) in [
            ("agent --node w --manifests /m --kubeconfig /k", "cannot be used with"),
            ("agent --node w --kubeconfig /k --with-controller", "cannot be used with"),
            ("agent --node w --with-controller", "--manifests"),
            ("controller --metrics 9473", "--metrics"),
            ("controller --manifests /m --foreign cilium", "cannot be used with"),
            ("controller --foreign calico", "possible values: cilium, antrea"),
        ] {
            let error = parse(line).err().expect(line).to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[tokio::test]
    async fn missing_cluster_is_reported() {
        for (line, part) in [("controller --kubeconfig /k", "/k cannot be used"), ("controller", "--manifests DIR")] {
            let Ok(Cli { command: Command::Controller(args), .. }) = parse(line) else { panic!("{line}") };
            let error = args.source.find().await.err().expect("refused");
            assert!(format!("{error:#}").contains(part), "{error:#}");
        }
    }
}
