//! Questions that operators get: who was this, what would this change, and does a fault raise an alert.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use lab::prometheus::{self, Prometheus, Target};
use lab::traffic::TcpOptions;
use lab::{Family, address, wait_for, wait_until};
use serde_json::Value;

use super::super::claims::Claim;
use super::super::cluster::{ECHO_PORT, METRICS_PORT, STREAM_PORT, Show, example};
use super::super::flows;
use super::super::screen::Screen;
use super::gateway::STREAMS_PER_POD;
use super::{PATIENCE, seconds};

/// The alerts that Spillway ships.
pub const RULES: &str = include_str!("../../../manifests/components/monitoring/rules.yaml");
/// Prometheus's host number on the underlay.
const PROMETHEUS: u8 = 201;
const NODE: &str = "worker2";
/// The alert that fires.
const ALERT: &str = "SpillwayStoreDisconnected";

/// Shows `whois`, `diff`, and an alert.
pub fn show(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "Identify a pod, preview a change, raise an alert",
        "The owner of an outside server reports an address, a port and a time, and `egressctl whois` names the pod. Before a policy is \
         deleted, `egressctl diff` says whose connections would break, and changes nothing. When worker2 can no longer \
         read the objects, a Prometheus with Spillway's alerts reports it.",
    );
    show_whois(show)?;
    show_diff(show)?;
    show_alert(show)
}

fn show_whois(show: &mut Show) -> Result<()> {
    let pod = show.lab.pod("web-1").clone();
    let target = show.server().ips.at(Family::V4, ECHO_PORT);
    let (_clients, seen) = flows::seen(&pod.ns, target, TcpOptions::default(), &show.near)?;
    let (seen, to) = (seen.to_string(), format!("{target}/tcp"));
    let words = ["whois", seen.as_str(), "--to", to.as_str()];
    let ask = || show.lab.egressctl(&pod.node, &words);
    let answer = wait_until("whois is certain", PATIENCE, ask, |answer| answer["podCertain"] == true)?;
    print(show, &words, &show.lab.egressctl_text(&pod.node, &words)?);
    let named = answer["flows"][0]["pod"].as_str().unwrap_or("no pod").to_owned();
    show.claim("whois names the pod behind a port", named == pod.key(), pod.key(), named);
    Ok(())
}

fn show_diff(show: &mut Show) -> Result<()> {
    let node = show.lab.pod("web-1").node.clone();
    let file = show.lab.dir().join("deleted.yaml");
    std::fs::write(&file, example("web-per-flow")?)?;
    let ask = |output: &str| -> Result<String> {
        let mut command: Command = show.lab.node(&node).ns.command(lab::process::binary("egressctl")?);
        command.args(["diff", "--delete", "-o", output, "-f"]).arg(&file).arg("--manifests");
        command.arg(show.lab.manifests().dir()).arg("--bpffs").arg(show.lab.bpffs(&node));
        let output = command.output()?;
        if output.status.code() != Some(1) {
            bail!("egressctl diff: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8(output.stdout)?)
    };
    let view: Value = serde_json::from_str(&ask("json")?)?;
    print(show, &["diff", "--delete", "-f", "web-per-flow.yaml"], &ask("table")?);
    let items = view["items"].as_array().context("no items")?;
    let breaks = |item: &&Value| item["becomes"] == "breaks" && item["flow"]["remotePort"] == STREAM_PORT;
    let (said, live) = (items.iter().filter(breaks).count(), 2 * STREAMS_PER_POD);
    show.screen.wait("the connections keep streaming", || show.streams()?.wait_progress(10))?;
    show.claim(
        "diff predicts what would break, and breaks nothing",
        said == live,
        format!("the {live} streams of {node}"),
        format!("{said} streams, which continue"),
    );
    Ok(())
}

fn show_alert(show: &mut Show) -> Result<()> {
    let agent = |name: &str, address: String| Target { address, node: name.to_owned(), component: "agent" };
    let targets: Vec<Target> =
        show.lab.nodes().map(|node| agent(&node.name, format!("{}:{METRICS_PORT}", node.underlay.v4))).collect();
    if let Some(obstacle) = prometheus::obstacle() {
        bail!("{obstacle}");
    }
    let prometheus = Prometheus::start(&mut show.lab, address::underlay(PROMETHEUS), &targets, RULES)?;
    let (screen, lab) = (&show.screen, &show.lab);
    let claim = alert(screen, &prometheus, NODE, || lab.cut_store(NODE), || lab.heal_store(NODE))?;
    show.add(claim);
    Ok(())
}

/// Cuts a node's agent off from the objects and reconnects it. Returns whether the alert fires and resolves.
pub fn alert(
    screen: &Screen,
    prometheus: &Prometheus,
    node: &str,
    fault: impl FnOnce() -> Result<()>,
    end: impl FnOnce() -> Result<()>,
) -> Result<Claim> {
    let fires = || -> Result<bool> {
        Ok(prometheus.firing()?.iter().any(|labels| labels["alertname"] == ALERT && labels["node"] == node))
    };
    screen.wait("Prometheus scrapes all agents", || wait_for("no alert", PATIENCE, || Ok(!fires()?)))?;
    let began = Instant::now();
    fault()?;
    let fired = screen.wait("an alert fires", || wait_for(ALERT, PATIENCE, fires)).map(|()| began.elapsed());
    end()?;
    let ended = Instant::now();
    let resolved = screen.wait("it resolves", || wait_for(ALERT, PATIENCE, || Ok(!fires()?)));
    Ok(Claim {
        name: "an alert fires and resolves".to_owned(),
        holds: fired.is_ok() && resolved.is_ok(),
        expected: format!("{ALERT} for {node}, with seconds instead of minutes"),
        measured: match fired {
            Ok(after) => {
                format!("after {}; resolved {} after the fault's end", seconds(after), seconds(ended.elapsed()))
            }
            Err(error) => format!("{error:#}"),
        },
    })
}

/// Shows a command and its answer.
fn print(show: &Show, words: &[&str], answer: &str) {
    let command = format!("# egressctl {}", words.join(" "));
    let lines: Vec<String> =
        [String::new(), command].into_iter().chain(answer.lines().take(MOST).map(str::to_owned)).collect();
    show.screen.lines(&lines);
}

/// The number of lines of an answer that are shown.
pub const MOST: usize = 14;
