//! The commands of `egressctl`. They read the pinned maps, ask the agent, build views from both, and print the views.
//!
//! Views are pure functions of the data, so their tests need no kernel.

pub mod diff;
pub mod dump;
pub mod explain;
#[cfg(test)]
mod garbage_tests;
pub mod inventory;
pub mod print;
pub mod state;
pub mod trace;
pub mod views;
pub mod whois;

pub use print::Output;

use crate::observe::{
    admin::{self, AskError},
    state::AgentState,
};
use anyhow::{Context as _, Result, bail};
use dump::Dump;
use egress_node::{datapath::Pins, host::firewall};
use explain::Question;
use print::{harmless, print};
use std::path::PathBuf;
use std::time::Duration;
use views::{By, FlowFilter, Sample, ViewSources};

/// The default directory of an agent's pins.
pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf/spillway";

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Policies.
    Policies,
    /// Gateways.
    Gateways,
    /// Egress IPs.
    Ips,
    /// Pods of this node.
    Endpoints,
    /// Flows.
    Flows(FlowFilter),
    /// Port blocks.
    Blocks,
    /// Counters.
    Stats,
    /// Everything that the agent created on this node.
    State,
    /// Why a flow takes its path.
    Explain(Question),
}

impl Command {
    /// Returns whether the command reads the flows, of which there may be a million.
    fn needs_flows(&self) -> bool {
        !matches!(self, Command::Policies | Command::Stats | Command::State)
    }

    /// Returns the information that the command lacks while the agent does not answer; `None` if it needs only the maps.
    fn unknown_without_agent(&self) -> Option<&'static str> {
        match self {
            Command::Policies => Some("whether policies are ready, and policies that select no pod of this node"),
            Command::Gateways => Some("the probe results of gateways"),
            Command::Ips => Some("pools and preferred owners"),
            Command::State => Some("conditions and problems"),
            Command::Endpoints | Command::Flows(_) | Command::Blocks | Command::Stats | Command::Explain(_) => None,
        }
    }
}

/// How to reach a node's agent and its maps.
#[derive(Clone, Debug)]
pub struct NodeAccess {
    /// Directory of the agent's pins.
    pub bpffs: PathBuf,
    /// The agent's socket.
    pub socket: PathBuf,
    /// The name that the node must have; `None` for any.
    pub node: Option<String>,
}

/// The output of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// For stdout.
    pub text: String,
    /// For stderr, one line each.
    pub remarks: Vec<String>,
}

/// Runs a command. Blocks; waits at most two seconds for the agent's answer.
pub fn run(command: &Command, access: &NodeAccess, output: Output) -> Result<CommandOutput> {
    let told = admin::ask(&access.socket);
    let remarks = told.as_ref().err().and_then(|error| remark(command, error)).into_iter().collect();
    let agent = told.ok();
    let pins = Pins::new(&access.bpffs);
    let text = match command {
        Command::State => state(&pins, agent.as_ref(), access, output)?,
        _ => {
            let dump = dump(&pins, access, command.needs_flows())?;
            let sources = ViewSources { dump: &dump, agent: agent.as_ref() };
            check_node(access, sources.node())?;
            show(command, sources, output)?
        }
    };
    Ok(CommandOutput { text, remarks })
}

/// The options of `egressctl top`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Top {
    /// The key by which flows are counted.
    pub by: By,
    /// The maximum number of items to show.
    pub limit: usize,
    /// The time between two samples.
    pub interval: Duration,
    /// The number of results to show; `None` for no limit.
    pub times: Option<u64>,
}

/// Samples repeatedly and shows each result, in JSON as one line, in YAML as one document.
pub fn top(
    top: &Top,
    access: &NodeAccess,
    output: Output,
    mut show: impl FnMut(&str) -> std::io::Result<()>,
) -> Result<()> {
    let pins = Pins::new(&access.bpffs);
    let sample = || -> Result<Sample> {
        let dump = dump(&pins, access, true)?;
        check_node(access, dump.own_name())?;
        Ok(Sample { dump, rules: firewall::dropped() })
    };
    let mut before = sample()?;
    let mut shown = 0;
    while top.times.is_none_or(|times| shown < times) {
        std::thread::sleep(top.interval);
        let now = sample()?;
        let view = views::top(&before, &now, top.by, top.limit);
        show(&match output {
            Output::Table => print(&view, output)?,
            Output::Json => serde_json::to_string(&view)? + "\n",
            Output::Yaml => format!("---\n{}", print(&view, output)?),
        })?;
        (before, shown) = (now, shown + 1);
    }
    Ok(())
}

/// Formats an error with its causes. Some messages already contain their cause, so each cause appears only once. Control characters are
/// replaced, because the text may come from a node.
pub fn message(error: &anyhow::Error) -> String {
    let message = error.chain().fold(String::new(), |said, cause| {
        let cause = cause.to_string();
        match said.is_empty() {
            true => cause,
            false if said.contains(&cause) => said,
            false => format!("{said}: {cause}"),
        }
    });
    harmless(&message)
}

fn remark(command: &Command, error: &AskError) -> Option<String> {
    let lacking = command.unknown_without_agent()?;
    Some(format!("{error}; this output comes from the maps alone and lacks {lacking}"))
}

fn dump(pins: &Pins, access: &NodeAccess, flows: bool) -> Result<Dump> {
    Dump::read(pins, flows).with_context(|| format!("the maps of --bpffs {} cannot be read", access.bpffs.display()))
}

fn check_node(access: &NodeAccess, found: Option<String>) -> Result<()> {
    match (&access.node, found) {
        (Some(wanted), Some(found)) if *wanted != found => {
            bail!("this is node {found}, not {wanted}: run egressctl on {wanted}, or name its pins with --bpffs")
        }
        (Some(wanted), None) => {
            bail!(
                "nothing shows that this is node {wanted}: no agent has run with these pins; run egressctl on {wanted}, or name its pins with --bpffs"
            )
        }
        _ => Ok(()),
    }
}

fn show(command: &Command, sources: ViewSources<'_>, output: Output) -> Result<String> {
    Ok(match command {
        Command::Policies => print(&views::policies(sources), output)?,
        Command::Gateways => print(&views::gateways(sources), output)?,
        Command::Ips => print(&views::ips(sources), output)?,
        Command::Endpoints => print(&views::endpoints(sources), output)?,
        Command::Flows(filter) => print(&views::flows(sources, filter), output)?,
        Command::Blocks => print(&views::blocks(sources), output)?,
        Command::Stats => print(&views::stats(sources, &firewall::dropped()), output)?,
        Command::Explain(question) => print(&explain::explain(sources, question)?, output)?,
        Command::State => String::new(),
    })
}

fn state(pins: &Pins, agent: Option<&AgentState>, access: &NodeAccess, output: Output) -> Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let inventory = runtime.block_on(inventory::take(pins))?;
    // The name is optional: a node whose maps are gone or of another version still has a state.
    let own = Dump::read(pins, false).ok().and_then(|dump| dump.own_name());
    let view = state::state(inventory, agent, own);
    check_node(access, view.node.clone().or_else(|| access.node.clone()))?;
    Ok(print(&view, output)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_of_errors_names_each_cause_once() {
        let error = anyhow::anyhow!("no such file").context("a.yaml: no such file").context("it cannot be read");
        assert_eq!(message(&error), "it cannot be read: a.yaml: no such file");
    }

    #[test]
    fn an_error_cannot_control_the_terminal() {
        assert_eq!(message(&anyhow::anyhow!("node w:\n\u{1b}[2J")), "node w:\n\u{fffd}[2J");
    }

    #[test]
    fn another_node_is_refused() {
        let access =
            |node: Option<&str>| NodeAccess { bpffs: "/b".into(), socket: "/s".into(), node: node.map(str::to_owned) };
        let error =
            |node, found: Option<&str>| check_node(&access(node), found.map(str::to_owned)).map_err(|e| e.to_string());
        assert_eq!(error(None, None), Ok(()));
        assert_eq!(error(Some("w"), Some("w")), Ok(()));
        assert!(error(Some("w"), Some("x")).unwrap_err().contains("node x, not w"));
        assert!(error(Some("w"), None).unwrap_err().contains("no agent has run"));
    }

    #[test]
    fn output_without_an_agent_says_what_is_unknown() {
        let missing = admin::ask(std::path::Path::new("/nonexistent/a.sock")).unwrap_err();
        let text = remark(&Command::Gateways, &missing).unwrap();
        assert!(text.contains("/nonexistent/a.sock") && text.contains("the probe results"), "{text}");
        assert_eq!(remark(&Command::Stats, &missing), None);
    }
}
