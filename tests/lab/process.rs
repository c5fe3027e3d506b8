//! Processes in the lab: agents in their nodes' namespaces, controllers in their own, `egressctl`, and third-party programs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::command::program;
use crate::topology::{Lab, XDP};
use crate::wait::wait_for;

/// The number of characters of a log that are shown when a test fails.
const TAIL: usize = 6_000;
/// The environment variable that sets the transport of all agents whose configuration does not.
const TRANSPORT: &str = "SPILLWAY_TEST_TRANSPORT";
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// A process of the lab and its log, killed when dropped.
#[derive(Debug)]
pub struct Process {
    name: String,
    node: Option<String>,
    child: Child,
    log: PathBuf,
    exited: Option<ExitStatus>,
    left: bool,
}

impl Process {
    /// Starts a process; its output goes to `LOGS/<name>.log`.
    pub fn start(name: &str, node: Option<&str>, mut command: Command, logs: &Path) -> Result<Process> {
        fs::create_dir_all(logs).with_context(|| format!("cannot make {}", logs.display()))?;
        let log = logs.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .with_context(|| format!("cannot start {}", program(&command).display()))?;
        let (name, node) = (name.to_owned(), node.map(str::to_owned));
        Ok(Process { name, node, child, log, exited: None, left: false })
    }

    /// Returns its name: `agent-<node>` or `controller-<n>`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the node that it runs on, for agents.
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether it still runs (or is stopped).
    pub fn alive(&mut self) -> Result<bool> {
        if self.exited.is_none() {
            self.exited = self.child.try_wait()?;
        }
        Ok(self.exited.is_none())
    }

    /// Kills it (SIGKILL) and waits for its end.
    pub fn kill(&mut self) -> Result<()> {
        if self.alive()? {
            self.child.kill()?;
            self.exited = Some(self.child.wait()?);
        }
        Ok(())
    }

    /// Sends SIGTERM and waits for the end. Fails if that takes longer than ten seconds or if the process ends with a failure.
    pub fn terminate(&mut self) -> Result<()> {
        if !self.alive()? {
            return Ok(());
        }
        self.signal(Signal::SIGTERM)?;
        let name = self.name.clone();
        wait_for(&format!("{name} ends after SIGTERM"), EXIT_TIMEOUT, || Ok(!self.alive()?))?;
        match self.exited {
            Some(status) if !status.success() && status.signal() != Some(Signal::SIGTERM as i32) => {
                bail!("{name} ended with {status} after SIGTERM:\n{}", self.tail())
            }
            _ => Ok(()),
        }
    }

    /// Stops it (SIGSTOP).
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Continues it (SIGCONT).
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal)
            .with_context(|| format!("cannot send {signal} to {}", self.name))
    }

    /// Returns all of its output so far.
    pub fn log(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Returns the end of the log.
    pub fn tail(&self) -> String {
        let log = self.log();
        let start = log.char_indices().rev().take(TAIL).last().map_or(0, |(at, _)| at);
        log[start..].to_owned()
    }

    /// Leaves the process running when this handle is dropped.
    pub(crate) fn leave(&mut self) {
        self.left = true;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        if std::thread::panicking() {
            let state = self.child.try_wait().ok().flatten().map_or("running".to_owned(), |status| status.to_string());
            eprintln!("---- the end of {}'s log ({state})\n{}", self.name, self.tail());
        }
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The environment variable that tells agents and `egressctl` where logs are.
const STATE: &str = "STATE_DIRECTORY";

/// Options for starting an agent or a controller.
#[derive(Clone, Debug, Default)]
pub struct StartOptions {
    with_controller: bool,
    config: Option<String>,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    binary: Option<PathBuf>,
    without_tcx: bool,
}

/// Adds a setting of the whole run to a configuration, unless the test sets it.
fn with_setting(config: Option<String>, field: &str, value: Option<String>) -> Option<String> {
    match (config, value.filter(|value| !value.is_empty())) {
        (Some(text), Some(value)) if !text.contains(&format!("{field}:")) => Some(format!("{text}{field}: {value}\n")),
        (None, Some(value)) => Some(format!("{field}: {value}\n")),
        (config, _) => config,
    }
}

impl StartOptions {
    /// Returns the defaults.
    pub fn new() -> StartOptions {
        StartOptions::default()
    }

    /// Makes the agent also run the controller.
    pub fn with_controller(mut self) -> StartOptions {
        self.with_controller = true;
        self
    }

    /// Sets the text of the file for `--config`.
    pub fn config(mut self, text: &str) -> StartOptions {
        self.config = Some(text.to_owned());
        self
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: &str) -> StartOptions {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Adds an environment variable.
    pub fn env(mut self, key: &str, value: &str) -> StartOptions {
        self.environment.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Sets another `egress-daemon` than the one under test, for example an older version.
    pub fn binary(mut self, path: &Path) -> StartOptions {
        self.binary = Some(path.to_owned());
        self
    }

    /// Starts it as on a kernel without TCX (before 6.6): programs are filters of clsact qdiscs.
    pub fn without_tcx(mut self) -> StartOptions {
        self.without_tcx = true;
        self
    }
}

impl Lab {
    /// Starts the agent of `node`, or restarts it. [`Lab::agent`] then returns it.
    pub fn start_agent(&mut self, node: &str, options: &StartOptions) -> Result<()> {
        let name = format!("agent-{node}");
        let mut command = self.node(node).ns.command(daemon(options)?);
        command.args(["agent", "--node", node, "--manifests"]).arg(self.store_link(node)?);
        command.arg("--bpffs").arg(self.bpffs(node));
        if options.with_controller {
            command.arg("--with-controller");
        }
        self.start(&name, Some(node), command, options)
    }

    /// Starts the agents of all nodes with the same options.
    pub fn start_agents(&mut self, options: &StartOptions) -> Result<()> {
        let names: Vec<String> = self.nodes().map(|node| node.name.clone()).collect();
        names.iter().try_for_each(|name| self.start_agent(name, options))
    }

    /// Like [`Self::start_agents`], for a lab whose controller starts once [`crate::Manifests::reporting`] names every node: its first
    /// plan knows all reports.
    pub fn start_agents_before_controller(&mut self, options: &StartOptions) -> Result<()> {
        self.nodes().try_for_each(|node| self.manifests().join(&node.name))?;
        self.start_agents(options)
    }

    /// Starts the controller `name` in its own namespace. [`Lab::controller`] then returns it.
    pub fn start_controller(&mut self, name: &str, options: &StartOptions) -> Result<()> {
        let ns = self.role_namespace(name)?;
        let mut command = ns.command(daemon(options)?);
        command.args(["controller", "--manifests"]).arg(self.store_link(name)?);
        self.start(name, None, command, options)
    }

    /// Returns the agent of `node`. Panics if it was never started.
    pub fn agent(&mut self, node: &str) -> &mut Process {
        self.process(&format!("agent-{node}"))
    }

    /// Returns the controller `name`. Panics if it was never started.
    pub fn controller(&mut self, name: &str) -> &mut Process {
        self.process(name)
    }

    /// Does `work` while all agents and controllers are stopped: one machine does the work of all nodes here.
    pub fn while_frozen<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.processes.values().try_for_each(Process::freeze)?;
        let outcome = work();
        self.processes.values().try_for_each(Process::thaw)?;
        outcome
    }

    /// Runs `egressctl ARGUMENTS -o json` on `node` and returns its output.
    pub fn egressctl(&self, node: &str, arguments: &[&str]) -> Result<Value> {
        let text = self.egressctl_text(node, &[arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&text)
            .with_context(|| format!("egressctl {arguments:?} on {node} printed no JSON: {text}"))
    }

    /// Returns the counters of a node's datapath and rules, by name.
    pub fn counters(&self, node: &str) -> Result<BTreeMap<String, u64>> {
        let stats = self.egressctl(node, &["stats"])?;
        let items = stats["items"].as_array().context("egressctl stats has no items")?;
        let pairs = items.iter().filter_map(|one| Some((one["name"].as_str()?.to_owned(), one["value"].as_u64()?)));
        Ok(pairs.collect())
    }

    /// Runs `egressctl ARGUMENTS` on `node` and returns its output.
    pub fn egressctl_text(&self, node: &str, arguments: &[&str]) -> Result<String> {
        let mut command = self.node(node).ns.command(binary("egressctl")?);
        command.args(arguments).arg("--bpffs").arg(self.bpffs(node)).env(STATE, self.state());
        crate::command::output(&mut command).with_context(|| format!("egressctl {arguments:?} on {node}"))
    }

    /// Starts `egressctl ARGUMENTS` on `node`, which runs until the result is dropped.
    pub fn start_egressctl(&self, node: &str, arguments: &[&str]) -> Result<Process> {
        let mut command = self.node(node).ns.command(binary("egressctl")?);
        command.args(arguments).arg("--bpffs").arg(self.bpffs(node)).env(STATE, self.state());
        Process::start(
            &format!("egressctl-{}-{node}", arguments.join("-").replace('/', "_")),
            Some(node),
            command,
            &self.dir().join("logs"),
        )
    }

    /// Runs `egress-daemon ARGUMENTS --bpffs ..` (`check`, `cleanup`) on `node` and returns its output.
    pub fn daemon_text(&self, node: &str, arguments: &[&str]) -> Result<String> {
        let mut command = self.node(node).ns.command(binary("egress-daemon")?);
        command.args(arguments).arg("--bpffs").arg(self.bpffs(node)).env(STATE, self.state());
        crate::command::output(&mut command).with_context(|| format!("egress-daemon {arguments:?} on {node}"))
    }

    /// Removes everything that a node's agent has left on the node, if it ever had an agent.
    pub(crate) fn clean_up(&self, node: &str) -> Result<()> {
        if !self.processes.contains_key(&format!("agent-{node}")) {
            return Ok(());
        }
        self.daemon_text(node, &["cleanup", "--release"]).map(drop)
    }

    /// Returns the folder for the state of agents that survives a reboot.
    pub fn state(&self) -> PathBuf {
        self.dir().join("state")
    }

    /// Starts a program of a Debian package in the foreground, so that it ends with the lab.
    pub(crate) fn start_program(&mut self, name: &str, node: Option<&str>, command: Command) -> Result<()> {
        let process = Process::start(name, node, command, &self.dir().join("logs"))?;
        self.processes.insert(name.to_owned(), process);
        Ok(())
    }

    fn process(&mut self, name: &str) -> &mut Process {
        self.processes.get_mut(name).unwrap_or_else(|| panic!("{name} was never started"))
    }

    fn start(&mut self, name: &str, node: Option<&str>, mut command: Command, options: &StartOptions) -> Result<()> {
        let config = with_setting(options.config.clone(), "transport", std::env::var(TRANSPORT).ok());
        let config = with_setting(config, "xdp", std::env::var(XDP).ok());
        if let Some(text) = config {
            let file = self.dir().join(format!("{name}.config.yaml"));
            fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
            command.arg("--config").arg(file);
        }
        command.env(STATE, self.state());
        command.args(&options.arguments).envs(options.environment.iter().cloned()).env("RUST_BACKTRACE", "1");
        if options.without_tcx {
            crate::seccomp::without_tcx(&mut command);
        }
        // The old process ends before the new one starts.
        self.processes.remove(name);
        let process = Process::start(name, node, command, &self.dir().join("logs"))?;
        self.processes.insert(name.to_owned(), process);
        Ok(())
    }

    /// Returns the process's own link to the manifests, through which it reads them, so that a test can cut it off.
    pub(crate) fn store_link(&self, process: &str) -> Result<PathBuf> {
        let link = self.store_path(process);
        if !link.is_symlink() {
            fs::create_dir_all(self.dir().join("store"))?;
            symlink(self.manifests().dir(), &link).with_context(|| format!("cannot link {}", link.display()))?;
        }
        Ok(link)
    }

    pub(crate) fn store_path(&self, process: &str) -> PathBuf {
        self.dir().join("store").join(process)
    }
}

fn daemon(options: &StartOptions) -> Result<PathBuf> {
    options.binary.clone().map_or_else(|| binary("egress-daemon"), Ok)
}

/// Returns the path of a program of Spillway: in the folder named by SPILLWAY_BIN, or next to the running program.
pub fn binary(name: &str) -> Result<PathBuf> {
    let folder = match std::env::var_os("SPILLWAY_BIN") {
        Some(folder) => PathBuf::from(folder),
        None => {
            let own = std::env::current_exe().context("cannot find the running program")?;
            let folder = own.parent().unwrap_or(Path::new("."));
            // Tests are in target/<profile>/deps, programs in target/<profile>.
            if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder }.to_owned()
        }
    };
    let path = folder.join(name);
    if !path.exists() {
        bail!(
            "{} does not exist: run `cargo build -p egress-daemon`, or name its folder in SPILLWAY_BIN",
            path.display()
        );
    }
    Ok(path)
}
