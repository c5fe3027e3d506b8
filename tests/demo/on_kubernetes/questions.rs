//! Questions that operators get, on Kubernetes: answered by the kubectl plugin, and by a Prometheus that scrapes agents as usual.

use std::process::Command;

use anyhow::{Context, Result, bail};
use lab::prometheus::{Prometheus, Target, obstacle};
use lab::traffic::TcpOptions;

use super::super::cluster::METRICS_PORT;
use super::super::flows;
use super::super::scenes::questions::{self, MOST, RULES};
use super::scenes::{STREAMS_PER_POD, example};
use super::{ECHO_PORT, STREAM_PORT, Show, server};

/// Shows `whois`, `diff`, and an alert.
pub fn show(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "Identify a pod, preview a change, raise an alert",
        "`kubectl spillway whois` names the pod behind a connection that an outside server has seen. `kubectl spillway \
         diff` says whose connections a deletion would break, and changes nothing. While the API server is \
         unavailable, a Prometheus with Spillway's alerts reports it.",
    );
    let pod = show.web.first().context("no pod")?.clone();
    let (_clients, seen) = flows::seen(&pod.ns, server(ECHO_PORT)?, TcpOptions::default(), &show.echo)?;
    let (seen, to) = (seen.to_string(), format!("{}/tcp", server(ECHO_PORT)?));
    let words = ["--node", &pod.node, "whois", &seen, "--to", &to];
    let told = plugin(show, &words, 0)?;
    print(show, &words, &told);
    let wanted = format!("default/{}", pod.name);
    let named = if told.contains(&wanted) { wanted.clone() } else { "another pod".to_owned() };
    show.claim("whois names the pod behind a port", named == wanted, wanted, named);

    let words = ["diff", "--delete", "-f", &example("web-per-flow")];
    print(show, &words, &plugin(show, &words, 1)?);
    let told = plugin(show, &[&words[..], &["-o", "json"]].concat(), 1)?;
    let broken = told.matches("\"becomes\": \"breaks\"").count();
    let live = show.web.len() * STREAMS_PER_POD;
    let streams = show.streams.as_ref().context("no streams")?;
    show.screen.wait("the connections keep streaming", || streams.wait_progress(10))?;
    show.claim(
        "diff predicts what would break, and breaks nothing",
        broken >= live,
        format!("at least the {live} streams to port {STREAM_PORT}"),
        format!("{broken} connections, which continue"),
    );
    alert(show)
}

fn alert(show: &mut Show) -> Result<()> {
    if let Some(obstacle) = obstacle() {
        bail!("{obstacle}");
    }
    let nodes = show.cluster.nodes().iter();
    let target = |address: String, node: &str| Target { address, node: node.to_owned(), component: "agent" };
    let targets: Vec<Target> =
        nodes.map(|node| target(format!("{}:{METRICS_PORT}", node.address()), &node.name)).collect();
    let dir = show.cluster.dir().join("prometheus");
    let prometheus = Prometheus::start_in(show.cluster.netns("cp")?, &dir, &targets, RULES)?;
    let node = show.web.first().context("no pod")?.node.clone();
    let (screen, cluster) = (&show.screen, &show.cluster);
    let claim =
        questions::alert(screen, &prometheus, &node, || cluster.kill_api_server(), || cluster.start_api_server())?;
    show.add(claim);
    Ok(())
}

/// Runs a plugin command that must end with the exit code `code`, and returns its output.
fn plugin(show: &Show, words: &[&str], code: i32) -> Result<String> {
    let folder = show.cluster.kubectl_folder(&[("kubectl-spillway", &lab::process::binary("egressctl")?)])?;
    let output = Command::new(folder.join("kubectl")).arg("spillway").args(words).output()?;
    if output.status.code() != Some(code) {
        bail!("kubectl spillway {}: {}: {}", words.join(" "), output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Shows a plugin command and the beginning of its output.
fn print(show: &Show, words: &[&str], text: &str) {
    let shown = text.lines().take(MOST).collect::<Vec<_>>().join("\n");
    show.print(&[&["spillway"], words].concat(), &shown);
}
