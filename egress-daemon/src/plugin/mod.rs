//! `kubectl spillway`: the reports of `egressctl` for all nodes of a cluster, from any machine with a working `kubectl`.
//!
//! It is `egressctl` under the name of a kubectl plugin: a file `kubectl-spillway` in PATH. It runs `kubectl`, and needs only the rights to
//! `get` Spillway's objects and pods, and to `create` `pods/exec` in Spillway's namespace.

mod connectivity;
mod follow;
mod kubectl;
mod serve;
mod status;
mod sysdump;

use crate::ctl::{
    diff::{DiffOptions, UNKNOWN, diff},
    print::{Output, harmless, print, show},
    views::FlowsView,
};
use anyhow::{Context as _, Result, bail};
use clap::{Args, Parser, Subcommand};
use connectivity::Options;
use kubectl::{Kubectl, KubectlError, Pod, SELECTOR};
use serde_json::Value;
use status::StatusView;
use std::{
    collections::BTreeSet,
    ffi::OsString,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

/// The program name with which `egressctl` acts as this plugin.
const NAME: &str = "kubectl-spillway";
/// The path of `egressctl` in the image.
const EGRESSCTL: &str = "/usr/bin/egressctl";
/// The number of nodes that are queried concurrently.
const AT_ONCE: usize = 16;
/// The interval of the checks of `status --wait`.
const LOOK: Duration = Duration::from_secs(1);

/// Inspect Spillway on all nodes of a cluster
///
/// Runs every command of egressctl on all nodes, or on the node of the pod that it names: kubectl spillway flows --pod prod/web-0.
/// Options of this plugin come before the command.
#[derive(Debug, Parser)]
#[command(name = NAME, bin_name = "kubectl spillway", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// The kubeconfig's context
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The kubeconfig
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The namespace of Spillway's pods
    #[arg(short, long, value_name = "NAMESPACE", default_value = "spillway")]
    namespace: String,
    /// Query only this node; status and connectivity test, which concern the whole cluster, refuse it
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show whether agents and controllers run and policies are in force
    ///
    /// The exit code is 0 if all are ready, and 1 otherwise.
    Status(StatusArgs),
    /// Test whether packets leave as policies promise, as seen from outside
    #[command(subcommand)]
    Connectivity(ConnectivityCommand),
    /// Serve a page that shows current flows on all nodes, from pods through egress IPs and gateways to destinations
    ///
    /// Runs until Ctrl-C. Read-only; anyone who can reach the address can see the page.
    Serve {
        /// The address to listen on
        #[arg(long, value_name = "ADDR:PORT", default_value_t = crate::serve::LISTEN)]
        listen: SocketAddr,
    },
    /// Write one archive with objects, events, logs and the state of every node
    ///
    /// It contains no Secret and no pod's specification. It contains names and addresses of pods and nodes: inspect it before you share it.
    Sysdump(SysdumpArgs),
    /// Run a command of egressctl on every node
    #[command(external_subcommand)]
    OnNodes(Vec<OsString>),
}

#[derive(Args, Debug)]
struct StatusArgs {
    /// Wait until everything is ready
    #[arg(long)]
    wait: bool,
    /// The maximum number of seconds to wait
    #[arg(long, value_name = "SECONDS", default_value = "300")]
    timeout: u64,
    /// The output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    output: Output,
}

#[derive(Debug, Subcommand)]
enum ConnectivityCommand {
    /// Start a pod for each policy, and compare the source addresses that a server sees with the policy's promise
    ///
    /// The server is a machine outside the cluster that runs: egressctl connectivity serve. Starts one selected pod for each policy, in a
    /// new namespace if the policy allows it, and a pod that no policy selects. Removes all of them afterwards.
    /// Needs the right to create and delete pods and namespaces. The exit code is 1 if a promise was broken.
    Test(ConnectivityArgs),
}

#[derive(Args, Debug)]
struct ConnectivityArgs {
    /// A server outside the cluster: 203.0.113.7:8474 or [2001:db8::7]:8474; name one of each address family that you use
    #[arg(long = "server", value_name = "ADDR:PORT")]
    servers: Vec<SocketAddr>,
    /// Test only this policy: its name, or NAMESPACE/NAME
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// The image of the pods [default: the agents']
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// The number of seconds in which pods must start and query
    #[arg(long, value_name = "SECONDS", default_value = "180", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// The output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    output: Output,
}

#[derive(Args, Debug)]
struct SysdumpArgs {
    /// The archive to write
    #[arg(short, long, value_name = "FILE", default_value = "spillway-sysdump.tar.gz")]
    file: PathBuf,
}

/// Returns whether the program was started as the plugin.
pub fn is_asked(program: Option<OsString>) -> bool {
    program.is_some_and(|program| Path::new(&program).file_stem().is_some_and(|name| name == NAME))
}

/// A command as `egressctl` has parsed it.
#[derive(Clone, Debug)]
pub enum Understood {
    /// A query for nodes.
    OnNodes {
        /// The pod that the query names.
        pod: Option<String>,
        /// The output format.
        output: Output,
    },
    /// A live trace of a pod's packets on its node.
    Trace {
        /// The pod.
        pod: String,
    },
    /// A preview of changes in the cluster, whose kubeconfig and context are the plugin's own.
    Diff {
        /// The objects to compare.
        options: DiffOptions,
        /// The output format.
        output: Output,
    },
}

/// A failure of the plugin.
#[derive(Debug)]
pub struct Failure {
    /// The error.
    pub error: anyhow::Error,
    /// The exit code of the process.
    pub code: ExitCode,
}

impl Failure {
    fn new(error: anyhow::Error) -> Self {
        Self { error, code: ExitCode::FAILURE }
    }
}

/// Runs the plugin with the process's arguments. `understand` is `egressctl`'s own parser, which fails if there is no such command.
pub fn run(understand: impl Fn(&[OsString]) -> Result<Understood>) -> Result<ExitCode, Failure> {
    let Cli { command, context, kubeconfig, namespace, node } = Cli::parse();
    let kubectl = Kubectl { context, kubeconfig, namespace };
    let done = match command {
        Command::Status(args) => of_cluster("status", node).and_then(|()| status(&kubectl, &args)),
        Command::Sysdump(args) => dump(&kubectl, node, &args),
        Command::Serve { listen } => serve::run(listen, kubectl, node).map(|()| ExitCode::SUCCESS),
        Command::Connectivity(ConnectivityCommand::Test(args)) => {
            of_cluster("connectivity test", node).and_then(|()| connectivity(&kubectl, args))
        }
        Command::OnNodes(words) => match understand(&words).map_err(|error| misunderstood(error, &words))? {
            Understood::OnNodes { pod, output } => on_nodes(&kubectl, node, pod, output, &words),
            Understood::Trace { pod } => follow::follow(&kubectl, node, &pod, &words),
            Understood::Diff { options, output } => {
                return differences(&kubectl, node, options, output)
                    .map_err(|error| Failure { error, code: ExitCode::from(UNKNOWN) });
            }
        },
    };
    done.map_err(Failure::new)
}

/// Returns the failure of a command that `egressctl` cannot parse. Exit code 1 of `diff` would mean that something changes.
fn misunderstood(error: anyhow::Error, words: &[OsString]) -> Failure {
    match words.first() {
        Some(first) if first == "diff" => Failure { error, code: ExitCode::from(UNKNOWN) },
        _ => Failure::new(error),
    }
}

/// Refuses to restrict a command to a node if the command is about the whole cluster.
fn of_cluster(command: &str, node: Option<String>) -> Result<()> {
    match node {
        Some(node) => bail!("{command} is about the whole cluster: omit --node {node}"),
        None => Ok(()),
    }
}

/// Writes an archive of the cluster, with the state of one node or of all nodes.
fn dump(kubectl: &Kubectl, node: Option<String>, args: &SysdumpArgs) -> Result<ExitCode> {
    // An archive of a cluster without agents is useful, too.
    let agents = if node.is_some() { agents(kubectl, node)? } else { kubectl.pods("agent")? };
    let (found, missing) = sysdump::write(kubectl, &agents, &args.file, |what| eprintln!("asking for {what}"))?;
    println!("{}: {found} answers, {missing} missing", args.file.display());
    Ok(ExitCode::SUCCESS)
}

fn connectivity(kubectl: &Kubectl, args: ConnectivityArgs) -> Result<ExitCode> {
    let ConnectivityArgs { servers, policy, image, timeout, output } = args;
    let options = Options { servers, policy, image, timeout: Duration::from_secs(timeout) };
    let view = connectivity::test(kubectl, &options, |what| eprintln!("{what}"))?;
    show(&print(&view, output)?)?;
    Ok(if view.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Previews changes to the cluster, including their effect on the flows of its nodes.
fn differences(kubectl: &Kubectl, node: Option<String>, mut options: DiffOptions, output: Output) -> Result<ExitCode> {
    if options.manifests.is_some() || options.kubeconfig.is_some() {
        bail!(
            "kubectl spillway compares with its own cluster: write --kubeconfig before diff; --manifests is for egressctl diff"
        );
    }
    options.kubeconfig = kubectl.kubeconfig.clone();
    options.context = kubectl.context.clone();
    let words = ["flows", "-o", "json"].map(OsString::from);
    let (told, failed) = ask(kubectl, &agents(kubectl, node)?, &words);
    let flows: Vec<FlowsView> = told.iter().map(|(_, text)| serde_json::from_str(text)).collect::<Result<_, _>>()?;
    let view = diff(&options, &flows)?;
    if failed > 0 {
        eprintln!("kubectl spillway: the flows of {failed} nodes were not examined");
    }
    show(&print(&view, output)?)?;
    Ok(if view.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn status(kubectl: &Kubectl, args: &StatusArgs) -> Result<ExitCode> {
    let end = Instant::now() + Duration::from_secs(args.timeout);
    let look = || -> Result<StatusView, KubectlError> {
        let workloads = kubectl.json(&["get", "daemonsets,deployments", "-l", SELECTOR])?;
        Ok(StatusView::new(&workloads, &kubectl.json(&["get", "spillway", "-A"])?))
    };
    let mut told = BTreeSet::new();
    loop {
        let status = look();
        let ready = status.as_ref().is_ok_and(|status| status.ready);
        let hopeless = matches!(status, Err(KubectlError::NotStarted(_)));
        if ready || hopeless || !args.wait || Instant::now() >= end {
            show(&print(&status?, args.output)?)?;
            return Ok(if ready { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        // The API server may restart or not serve the CRDs yet. Show the error, because it may be one that only the user can fix.
        if let Err(error) = status {
            let text = error.to_string();
            // Compare only the last line, because the lines before it are kubectl's log with times.
            if told.insert(text.lines().last().unwrap_or_default().to_owned()) {
                eprintln!("kubectl spillway: still waiting: {text}");
            }
        }
        thread::sleep(LOOK);
    }
}

/// Queries the nodes and prints their answers. The exit code is 1 if a node did not answer.
fn on_nodes(
    kubectl: &Kubectl,
    node: Option<String>,
    pod: Option<String>,
    output: Output,
    words: &[OsString],
) -> Result<ExitCode> {
    let node = match (node, pod) {
        (None, Some(pod)) => Some(node_of(kubectl, &pod)?),
        (node, _) => node,
    };
    let (told, failed) = ask(kubectl, &agents(kubectl, node)?, words);
    show(&together(output, &told)?)?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn node_of(kubectl: &Kubectl, pod: &str) -> Result<String> {
    kubectl.node_of(pod)?.with_context(|| format!("pod {pod} is missing or has no node: name the node with --node"))
}

/// Returns the agents' pods of one node or of all nodes. Fails if there are none.
fn agents(kubectl: &Kubectl, node: Option<String>) -> Result<Vec<Pod>> {
    let mut pods = kubectl.pods("agent")?;
    pods.retain(|pod| node.as_ref().is_none_or(|node| pod.node == *node));
    if pods.is_empty() {
        let what = node.map_or("no node has an agent".to_owned(), |node| format!("node {node} has no agent"));
        bail!("{what} in namespace {}: name the namespace with --namespace", kubectl.namespace);
    }
    Ok(pods)
}

/// Asks about each pod, up to [`AT_ONCE`] of them concurrently. Returns the answers in the pods' order.
fn at_once<T: Send>(pods: &[Pod], ask: impl Fn(&Pod) -> T + Sync) -> Vec<T> {
    let ask = &ask;
    let mut answers = Vec::new();
    for some in pods.chunks(AT_ONCE) {
        thread::scope(|scope| {
            let threads: Vec<_> = some.iter().map(|pod| scope.spawn(move || ask(pod))).collect();
            answers.extend(threads.into_iter().filter_map(|thread| thread.join().ok()));
        });
    }
    answers
}

/// Runs `egressctl` on the nodes of these agents. Returns the nodes' names and outputs, and the number of nodes that did not
/// answer, whose errors go to stderr.
fn ask(kubectl: &Kubectl, pods: &[Pod], words: &[OsString]) -> (Vec<(String, String)>, usize) {
    let mut told = Vec::new();
    for (answer, node) in at_once(pods, |pod| (egressctl_on(kubectl, pod, words), pod.node.clone())) {
        match answer {
            Ok(text) => told.push((node, text)),
            // The text comes from the node.
            Err(error) => eprintln!("node {node}: {}", harmless(&error.to_string())),
        }
    }
    let failed = pods.len() - told.len();
    (told, failed)
}

/// Returns the output of `egressctl` in an agent's pod.
fn egressctl_on(kubectl: &Kubectl, pod: &Pod, words: &[OsString]) -> Result<String, KubectlError> {
    let exec = ["exec", &pod.name, "-c", "agent", "--", EGRESSCTL].map(OsString::from);
    kubectl.text(&[&exec, words].concat())
}

/// Combines the answers of nodes: tables below the nodes' names, one JSON array, or a YAML document for each node. Replaces control
/// characters, since a node may send any bytes.
fn together(output: Output, answers: &[(String, String)]) -> Result<String> {
    let gap = |n: usize| if n == 0 { "" } else { "\n" };
    let text = match output {
        Output::Table => {
            answers.iter().enumerate().map(|(n, (node, text))| format!("{}Node {node}\n{text}", gap(n))).collect()
        }
        Output::Yaml => answers.iter().map(|(node, text)| format!("---\n# node {node}\n{text}")).collect(),
        Output::Json => {
            let all = answers.iter().map(|(_, text)| serde_json::from_str(text));
            serde_json::to_string_pretty(&all.collect::<Result<Vec<Value>, _>>()?)? + "\n"
        }
    };
    Ok(harmless(&text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
        for line in
            ["status --wait --timeout 5 -o json", "--context c sysdump -f a.tar.gz", "--node n flows --limit 5 -o yaml"]
        {
            assert!(Cli::try_parse_from([vec![NAME.into()], words(line)].concat()).is_ok(), "{line}");
        }
    }

    #[test]
    fn the_binary_is_a_kubectl_plugin_by_its_name() {
        for (program, plugin) in
            [("/usr/local/bin/kubectl-spillway", true), ("kubectl-spillway", true), ("egressctl", false)]
        {
            assert_eq!(is_asked(Some(program.into())), plugin, "{program}");
        }
    }

    #[test]
    fn answers_of_several_nodes_are_merged_into_one_output() {
        let answers =
            [("n1".to_owned(), "{\"node\":\"n1\"}".to_owned()), ("n2".to_owned(), "{\"node\":\"n2\"}".to_owned())];
        let json: Value = serde_json::from_str(&together(Output::Json, &answers).unwrap()).unwrap();
        assert_eq!(json, serde_json::json!([{"node": "n1"}, {"node": "n2"}]));
        let tables = [("n1".to_owned(), "A\n".to_owned()), ("n2".to_owned(), "B\n".to_owned())];
        assert_eq!(together(Output::Table, &tables).unwrap(), "Node n1\nA\n\nNode n2\nB\n");
    }

    #[test]
    fn a_node_cannot_control_the_terminal() {
        let of = |text: &str| vec![("n1".to_owned(), text.to_owned())];
        for (output, text) in [
            (Output::Table, "A\u{1b}]0;x\u{7}\n"),
            (Output::Yaml, "a: \u{1b}[2J\n"),
            (Output::Json, "[\"\u{9b}2J\u{7f}\"]"),
        ] {
            let shown = together(output, &of(text)).unwrap();
            assert!(shown.contains('\u{fffd}'), "{shown:?}");
            assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown:?}");
        }
    }

    #[test]
    fn a_command_about_the_whole_cluster_refuses_a_node() {
        assert!(of_cluster("status", None).is_ok());
        let refused = of_cluster("connectivity test", Some("n1".to_owned())).unwrap_err().to_string();
        assert!(refused.contains("connectivity test") && refused.contains("omit --node n1"), "{refused}");
    }

    #[test]
    fn nodes_are_asked_concurrently_and_answer_in_their_order() {
        let pods: Vec<Pod> = (0..2 * AT_ONCE).map(|n| Pod { name: n.to_string(), node: format!("n{n}") }).collect();
        let all = std::sync::Barrier::new(AT_ONCE);
        let names = at_once(&pods, |pod| {
            all.wait();
            pod.name.clone()
        });
        assert!(names.iter().eq(pods.iter().map(|pod| &pod.name)), "{names:?}");
    }
}
