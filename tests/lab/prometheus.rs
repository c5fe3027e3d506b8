//! Debian's Prometheus in a namespace of the lab, with the alerts that Spillway ships.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::command::output;
use crate::netns::NetNs;
use crate::process::Process;
use crate::topology::{Dual, Lab};
use crate::wait::wait_for;

const NAME: &str = "prometheus";
const START: Duration = Duration::from_secs(20);
/// The interval at which it scrapes metrics and evaluates its rules. A minute in the rules is [`MINUTE`] here.
const INTERVAL: &str = "500ms";
/// Replaces the rules' minutes and hours, for which tests cannot wait.
const MINUTE: &str = "2s";
/// Replaces the windows of rates: a few times [`INTERVAL`].
const WINDOW: &str = "5s";

/// Returns the reason why Prometheus cannot run here, if there is one.
pub fn obstacle() -> Option<&'static str> {
    Command::new(NAME).arg("--version").output().is_err().then_some("prometheus is missing: apt-get install prometheus")
}

/// A scrape target, as the ServiceMonitor provides it in a cluster.
#[derive(Clone, Debug)]
pub struct Target {
    /// Address and port.
    pub address: String,
    /// The node, or the controller's pod.
    pub node: String,
    /// `agent` or `controller`.
    pub component: &'static str,
}

/// A running Prometheus.
#[derive(Debug)]
pub struct Prometheus {
    ns: NetNs,
    _process: Process,
}

impl Prometheus {
    /// Starts Prometheus on the underlay, where it has the address `own`. `rules` is the manifest of a PrometheusRule,
    /// whose times are shortened; its expressions and thresholds stay.
    pub fn start(lab: &mut Lab, own: Dual, targets: &[Target], rules: &str) -> Result<Prometheus> {
        let ns = lab.role_namespace(NAME)?;
        lab.join_underlay(&ns, NAME, own)?;
        Prometheus::start_in(ns, &lab.dir().join(NAME), targets, rules)
    }

    /// Like [`Self::start`], but in a namespace from which the targets are reachable, with its files in `dir`.
    pub fn start_in(ns: NetNs, dir: &Path, targets: &[Target], rules: &str) -> Result<Prometheus> {
        fs::create_dir_all(dir)?;
        fs::write(dir.join("rules.yml"), shortened(rules)?)?;
        fs::write(dir.join("prometheus.yml"), config(targets).to_string())?;
        let mut command = ns.command(NAME);
        command.arg("--config.file").arg(dir.join("prometheus.yml"));
        command.arg("--storage.tsdb.path").arg(dir.join("data")).arg("--web.listen-address=127.0.0.1:9090");
        let process = Process::start(NAME, None, command, dir)?;
        let prometheus = Prometheus { ns, _process: process };
        wait_for("Prometheus answers", START, || Ok(prometheus.get("alerts").is_ok()))?;
        Ok(prometheus)
    }

    /// Returns its namespace.
    pub fn ns(&self) -> &NetNs {
        &self.ns
    }

    /// Returns the labels of the firing alerts.
    pub fn firing(&self) -> Result<Vec<Value>> {
        let answer = self.get("alerts")?;
        let alerts = answer["data"]["alerts"].as_array().context("no list of alerts")?;
        Ok(alerts.iter().filter(|alert| alert["state"] == "firing").map(|alert| alert["labels"].clone()).collect())
    }

    fn get(&self, what: &str) -> Result<Value> {
        let mut curl = self.ns.command("curl");
        let text = output(curl.args(["-sf", "--max-time", "5"]).arg(format!("http://127.0.0.1:9090/api/v1/{what}")))?;
        serde_json::from_str(&text).with_context(|| format!("no JSON: {text}"))
    }
}

/// Returns the configuration in JSON, which is also YAML.
fn config(targets: &[Target]) -> Value {
    let one = |t: &Target| json!({"targets": [t.address], "labels": {"node": t.node, "pod": t.node, "component": t.component}});
    json!({
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{
            "job_name": "spillway-metrics",
            "static_configs": targets.iter().map(one).collect::<Vec<_>>(),
        }],
    })
}

/// Extracts the rules of a PrometheusRule and shortens their times.
fn shortened(manifest: &str) -> Result<String> {
    let (_, spec) = manifest.split_once("\nspec:\n").context("the manifest has no spec")?;
    let line = |line: &str| {
        let line = match line.split_once("for: ") {
            Some((indent, _)) if indent.trim().is_empty() => format!("{indent}for: {MINUTE}"),
            _ => line.to_owned(),
        };
        ["[2m]", "[5m]"].iter().fold(line, |line, window| line.replace(window, &format!("[{WINDOW}]")))
    };
    Ok(spec.lines().map(line).collect::<Vec<_>>().join("\n"))
}
