//! `egressctl`: inspects a node's datapath, whether or not its agent is alive.

use anyhow::{Result, bail};
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use egress_daemon::{
    connectivity::{self, Asked, Server},
    ctl::{
        self, DEFAULT_BPFFS, Output,
        diff::{DiffOptions, UNKNOWN, diff, flows_here},
        explain::{Destination, Question},
        print::{has_seen_enough, print, show},
        trace::{self, Peer, Remark, TraceOptions},
        views::{By, FlowFilter},
        whois::{self, Moment, WhoisOptions},
    },
    lock::RunFiles,
    plugin, serve,
};
use ipnet::IpNet;
use std::{
    ffi::OsString,
    io::{self, IsTerminal, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

/// Inspect Spillway on this node: policies, gateways, egress IPs, flows, and why a flow goes where it goes
///
/// Reads the pinned maps, so it works even while the agent is dead. Asks the agent for data that the maps do not contain.
#[derive(Parser)]
#[command(name = "egressctl", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// The output format
    #[arg(short, long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    output: Output,
    /// The directory of the agent's pinned maps and links
    #[arg(long, global = true, value_name = "DIR", default_value = DEFAULT_BPFFS)]
    bpffs: PathBuf,
    /// Refuse to answer unless this is the node's name
    #[arg(long, global = true, value_name = "NAME")]
    node: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Policies, with their slots and their owners, and how many pods of this node they select
    Policies,
    /// Gateways that this node uses, with their probe results
    Gateways,
    /// Egress IPs: owner, epoch, policies, ports that are leased to this node
    Ips,
    /// Pods of this node: addresses, policies, assigned egress IPs
    Endpoints,
    /// Flows of this node's pods
    Flows(FlowArgs),
    /// Port blocks by egress IP and node
    Blocks,
    /// Counters, and drops by reason
    Stats,
    /// Who opens flows right now, and what is dropped, refreshed continuously
    Top(TopArgs),
    /// Serve a page that shows current flows, from pods through egress IPs and gateways to destinations
    ///
    /// Runs until Ctrl-C. Read-only; anyone who can reach the address can see the page. For all nodes: kubectl spillway serve.
    Serve {
        /// The address to listen on
        #[arg(long, value_name = "ADDR:PORT", default_value_t = serve::LISTEN)]
        listen: SocketAddr,
    },
    /// Everything that the agent made on this node: programs, links, maps, devices, settings, files
    State,
    /// Why a flow goes where it goes: every decision of the datapath, in a sentence each
    Explain(ExplainArgs),
    /// Every decision of the datapath about a pod's packets, as it happens
    ///
    /// During a trace, the agent replaces the programs at this node's interfaces with ones that make the same decisions and report them. They slow
    /// down the node's traffic through Spillway. When the trace ends, for whatever reason, the usual programs are restored without losing a packet.
    Trace(TraceArgs),
    /// Who used a port of an egress IP at a given time
    ///
    /// The node comes from a gateway's lease log. The pod comes from the flow log (flowLog.mode: Flows) or from the live flows of the node
    /// where this runs. Reports how certain the answer is, and the reasons for any doubt.
    Whois(WhoisArgs),
    /// What applying the objects of a file would change
    ///
    /// Names policies, pods, egress IPs, conflicts, and what becomes of this node's live flows (kubectl spillway diff: those of all
    /// nodes). The exit code is 0 if nothing would change, 1 if something would, and more than 1 if that could not be determined.
    Diff(DiffArgs),
    /// Test whether packets leave as policies promise: run the outside server, or its client
    ///
    /// kubectl spillway connectivity test starts pods that query it.
    #[command(subcommand)]
    Connectivity(Connectivity),
    /// Print a shell completion script for this command
    ///
    /// For example: source <(egressctl completions bash)
    Completions {
        /// The shell
        shell: Shell,
    },
}

#[derive(Subcommand)]
enum Connectivity {
    /// Tell every client which source address the server sees, over TCP and UDP, until Ctrl-C
    Serve {
        /// The address to listen on
        #[arg(long, value_name = "ADDR:PORT", default_value_t = SocketAddr::from((Ipv6Addr::UNSPECIFIED, connectivity::PORT)))]
        listen: SocketAddr,
    },
    /// Ask servers which source addresses they see
    Ask {
        /// The servers
        #[arg(value_name = "ADDR:PORT", required = true)]
        servers: Vec<SocketAddr>,
        /// The number of connections to open to each server; an eighth as many datagrams are sent
        #[arg(long, value_name = "N", default_value = "16", value_parser = clap::value_parser!(u32).range(1..))]
        connections: u32,
    },
}

#[derive(Args)]
struct FlowArgs {
    /// Flows of this pod: NAMESPACE/NAME, or an address
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Flows to this address or prefix
    #[arg(long, value_name = "CIDR", value_parser = prefix)]
    to: Option<IpNet>,
    /// Flows to this port
    #[arg(long, value_name = "PORT")]
    to_port: Option<u16>,
    /// Flows with this egress IP
    #[arg(long, value_name = "IP")]
    egress_ip: Option<IpAddr>,
    /// Show at most this many
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
}

#[derive(Args)]
struct WhoisArgs {
    /// The source address that was seen: 192.0.2.10:43121 or [2001:db8::10]:43121
    #[arg(value_name = "IP:PORT")]
    seen: SocketAddr,
    /// The time, with its zone: 2026-11-25T14:03:00Z or 2026-11-25T15:03+01:00 [default: now]
    #[arg(long, value_name = "TIME", value_parser = whois::moment)]
    at: Option<Moment>,
    /// The server that saw it: 203.0.113.7:443/tcp, [2001:db8::7]:53/udp or 203.0.113.7/icmp; without a protocol, the pod may be uncertain
    #[arg(long, value_name = "TARGET")]
    to: Option<whois::Server>,
    /// The directory of a log, or of copies of several logs [default: this node's]
    #[arg(long, value_name = "DIR")]
    log: Option<PathBuf>,
}

#[derive(Args)]
struct DiffArgs {
    /// The YAML file with policies, pools, Namespaces or Nodes; - is stdin
    #[arg(short, long = "filename", required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Show what deleting the objects would change
    #[arg(long)]
    delete: bool,
    /// Compare with the objects in this directory
    #[arg(long, value_name = "DIR", conflicts_with = "kubeconfig")]
    manifests: Option<PathBuf>,
    /// Compare with the objects of this cluster [default: as kubectl finds it, or the cluster that this pod runs in]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The controller's configuration, if it has one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl DiffArgs {
    fn options(self) -> DiffOptions {
        let DiffArgs { files, delete, manifests, kubeconfig, config } = self;
        DiffOptions { files, delete, manifests, kubeconfig, context: None, config }
    }
}

#[derive(Args)]
struct TopArgs {
    /// The key by which flows are counted
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    by: By,
    /// Show at most this many keys
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Seconds between refreshes
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    interval: Duration,
    /// Stop after this many refreshes [default: forever on a terminal, once otherwise]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    times: Option<u64>,
}

#[derive(Args)]
struct ExplainArgs {
    /// The pod: NAMESPACE/NAME, or an address
    #[arg(long, value_name = "POD")]
    pod: String,
    /// The destination: 203.0.113.7:443/tcp, [2001:db8::7]:53/udp or 203.0.113.7/icmp
    #[arg(long, value_name = "TARGET")]
    to: Destination,
    /// The pod's source port (ICMP: the identifier); it decides the slot if the policy hashes flows
    #[arg(long, value_name = "PORT")]
    from_port: Option<u16>,
}

#[derive(Args)]
struct TraceArgs {
    /// The pod: NAMESPACE/NAME, or an address
    #[arg(long, value_name = "POD")]
    pod: String,
    /// Only packets to and from this remote address, or address and port: 203.0.113.7 or [2001:db8::7]:443
    #[arg(long, value_name = "ADDR[:PORT]")]
    to: Option<Peer>,
    /// Stop after this many packets
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Stop after this many seconds
    #[arg(long = "for", value_name = "SECONDS", default_value = "600", value_parser = interval)]
    duration: Duration,
}

/// Parses a prefix or a single address.
fn prefix(text: &str) -> Result<IpNet, String> {
    let single = text.parse::<IpAddr>().map(IpNet::from);
    single.or_else(|_| text.parse()).map_err(|_| "write an address or a prefix such as 203.0.113.0/24".to_owned())
}

/// Parses a number of seconds.
fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "write seconds, from 0.1 to 3600".to_owned())
}

fn main() -> ExitCode {
    if plugin::is_asked(std::env::args_os().next()) {
        return plugin::run(understand).unwrap_or_else(|failure| {
            eprintln!("kubectl spillway: {}", ctl::message(&failure.error));
            failure.code
        });
    }
    let cli = Cli::parse();
    let failure = if matches!(cli.command, Command::Diff(_)) { ExitCode::from(UNKNOWN) } else { ExitCode::FAILURE };
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("egressctl: {}", ctl::message(&error));
            failure
        }
    }
}

/// Parses a command for the nodes' egressctl. Prints the help and exits if the command asks for it.
fn understand(words: &[OsString]) -> Result<plugin::Understood> {
    let cli = match Cli::try_parse_from([&["egressctl".into()], words].concat()) {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => bail!("{error}"),
        Err(help) => help.exit(),
    };
    let pod = match cli.command {
        Command::Diff(args) => match cli.node {
            Some(node) => bail!("write --node {node} before diff"),
            None => return Ok(plugin::Understood::Diff { options: args.options(), output: cli.output }),
        },
        Command::Flows(FlowArgs { pod, .. }) => pod,
        Command::Explain(ExplainArgs { pod, .. }) => Some(pod),
        Command::Trace(TraceArgs { pod, .. }) => return Ok(plugin::Understood::Trace { pod }),
        _ => None,
    };
    Ok(plugin::Understood::OnNodes { pod, output: cli.output })
}

fn run(cli: Cli) -> Result<ExitCode> {
    let Cli { command, output, bpffs, node } = cli;
    let access = ctl::NodeAccess { socket: RunFiles::of(&bpffs).socket(), bpffs, node };
    match command {
        Command::Diff(args) => differences(args, &access, output),
        command => look(command, access, output).map(|()| ExitCode::SUCCESS),
    }
}

fn differences(args: DiffArgs, access: &ctl::NodeAccess, output: Output) -> Result<ExitCode> {
    let flows = flows_here(access)?;
    if flows.is_none() {
        let bpffs = access.bpffs.display();
        eprintln!("egressctl: no agent has run with the pins in {bpffs}: no flows were examined");
    }
    let view = diff(&args.options(), flows.as_slice())?;
    show(&print(&view, output)?)?;
    Ok(if view.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn look(command: Command, access: ctl::NodeAccess, output: Output) -> Result<()> {
    let command = match command {
        Command::Policies => ctl::Command::Policies,
        Command::Gateways => ctl::Command::Gateways,
        Command::Ips => ctl::Command::Ips,
        Command::Endpoints => ctl::Command::Endpoints,
        Command::Flows(args) => ctl::Command::Flows(FlowFilter {
            pod: args.pod,
            to: args.to,
            to_port: args.to_port,
            egress_ip: args.egress_ip,
            limit: args.limit,
        }),
        Command::Blocks => ctl::Command::Blocks,
        Command::Stats => ctl::Command::Stats,
        Command::State => ctl::Command::State,
        Command::Explain(args) => ctl::Command::Explain(Question::new(&args.pod, args.to, args.from_port)),
        Command::Top(args) => return top(args, &access, output),
        Command::Trace(args) => return trace(args, &access, output),
        Command::Serve { listen } => return serve::serve_node(listen, &access),
        Command::Whois(args) => {
            let WhoisArgs { seen, at, to, log } = args;
            let view = whois::ask(&WhoisOptions { seen, at, to, log, access })?;
            return Ok(show(&print(&view, output)?)?);
        }
        Command::Connectivity(Connectivity::Serve { listen }) => {
            let server = Server::bind(listen)?;
            eprintln!("egressctl: telling clients their addresses at {}", server.address()?);
            return Ok(server.run()?);
        }
        Command::Connectivity(Connectivity::Ask { servers, connections }) => {
            let asked: Vec<Asked> = servers.iter().map(|server| connectivity::ask(*server, connections)).collect();
            return Ok(show(&print(&asked, output)?)?);
        }
        Command::Diff(_) => return Ok(()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "egressctl", &mut script);
            return Ok(show(&String::from_utf8(script)?)?);
        }
    };
    let answer = ctl::run(&command, &access, output)?;
    for remark in answer.remarks {
        eprintln!("egressctl: {remark}");
    }
    Ok(show(&answer.text)?)
}

fn top(args: TopArgs, access: &ctl::NodeAccess, output: Output) -> Result<()> {
    let terminal = io::stdout().is_terminal();
    let times = args.times.or((!terminal).then_some(1));
    let top = ctl::Top { by: args.by, limit: args.limit, interval: args.interval, times };
    // Each table replaces the previous one on the screen.
    let clear = if terminal && output == Output::Table { "\x1b[H\x1b[J" } else { "" };
    let shown = ctl::top(&top, access, output, |text| {
        let mut out = io::stdout();
        out.write_all(format!("{clear}{text}").as_bytes()).and_then(|()| out.flush())
    });
    match shown {
        Err(error) if error.downcast_ref().is_some_and(has_seen_enough) => Ok(()),
        other => other,
    }
}

fn trace(args: TraceArgs, access: &ctl::NodeAccess, output: Output) -> Result<()> {
    let TraceArgs { pod, to, count, duration } = args;
    let options = TraceOptions { pod, to, count, duration };
    eprintln!("egressctl: loading the programs of a trace");
    let show = |text: &str| {
        let mut out = io::stdout();
        out.write_all(text.as_bytes()).and_then(|()| out.flush())
    };
    let remark = |remark: Remark| match remark {
        Remark::Begun => eprintln!("egressctl: tracing {} (Ctrl-C ends)", options.pod),
        Remark::Lost(packets) => {
            eprintln!("egressctl: {packets} packets were not reported: there were too many at once")
        }
    };
    match trace::trace(&options, access, output, show, remark) {
        Err(error) if error.downcast_ref().is_some_and(has_seen_enough) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_plugin_finds_the_pod_and_the_format_in_a_nodes_command() {
        let of = |line: &str| match understand(&line.split(' ').map(OsString::from).collect::<Vec<_>>()).unwrap() {
            plugin::Understood::OnNodes { pod, output } => (pod.unwrap_or_default(), output),
            other => panic!("{other:?}"),
        };
        for (line, pod, output) in [
            ("flows --limit 5 --pod a/b", "a/b", Output::Table),
            ("flows --pod=a/b", "a/b", Output::Table),
            ("explain --pod a/b --to 203.0.113.7:443/tcp", "a/b", Output::Table),
            ("flows --to 203.0.113.7", "", Output::Table),
            ("flows -o json", "", Output::Json),
            ("flows --output=yaml", "", Output::Yaml),
            ("flows -ojson", "", Output::Json),
        ] {
            assert_eq!(of(line), (pod.to_owned(), output), "{line}");
        }
    }

    #[test]
    fn the_plugin_refuses_a_node_that_is_named_after_diff() {
        let words = "diff -f policy.yaml --node worker1".split(' ').map(OsString::from).collect::<Vec<_>>();
        let refused = understand(&words).unwrap_err().to_string();
        assert!(refused.contains("--node worker1 before diff"), "{refused}");
    }

    #[test]
    fn options_come_before_or_after_the_command() {
        for line in [
            "policies -o json --bpffs /sys/fs/bpf/x",
            "-o yaml --node worker1 stats",
            "flows --pod prod/web-0 --to 203.0.113.7 --to-port 443 --egress-ip 192.0.2.10 --limit 5",
            "flows --to 2001:db8::/32",
            "diff -f policy.yaml -f - --delete --manifests /m -o json",
            "whois 192.0.2.10:43121 --at 2026-11-25T14:03:00Z --to 203.0.113.7:443/tcp",
            "whois 192.0.2.10:43121 --to 203.0.113.7:443",
            "whois 192.0.2.10:43121 --to 203.0.113.7/icmp",
            "whois [2001:db8::10]:43121 --log /copy",
            "top --by egress-ip --interval 0.5 -n 3 --limit 5",
            "trace --pod prod/web-0 --to [2001:db8::7]:443 -n 5 --for 10 -o json",
            "explain --pod 10.10.0.5 --to [2001:db8::7]:443/tcp --from-port 40000",
        ] {
            let parsed = Cli::try_parse_from(std::iter::once("egressctl").chain(line.split(' ')));
            assert!(parsed.is_ok(), "{line}: {}", parsed.err().unwrap());
        }
    }

    #[test]
    fn wrong_values_say_what_is_right() {
        for (line, part) in [
            ("flows --to everywhere", "203.0.113.0/24"),
            ("explain --pod p --to 203.0.113.7", "203.0.113.7:443/tcp"),
            ("policies -o xml", "json"),
            ("top --interval 0", "from 0.1 to 3600"),
            ("top --by ip", "egress-ip"),
            ("diff", "--filename"),
            ("trace --pod a/b --to web:443", "203.0.113.7:443"),
            ("whois 192.0.2.10:43121 --at 14:03", "on which day"),
            ("whois 192.0.2.10", "IP:PORT"),
            ("whois 192.0.2.10:43121 --to web", "203.0.113.7:443/tcp"),
        ] {
            let error = Cli::try_parse_from(std::iter::once("egressctl").chain(line.split(' '))).err().expect(line);
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
