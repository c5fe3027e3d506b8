//! What operators are asked, on a Kubernetes: by the plugin of kubectl, and by a Prometheus that asks agents as in any cluster.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use lab::prometheus::{Prometheus, Target, obstacle};
use lab::traffic::{TcpClients, TcpOptions};
use lab::{wait_for, wait_until};

use super::super::cluster::METRICS_PORT;
use super::super::scenes::questions::{ALERT, MOST, RULES};
use super::super::scenes::seconds;
use super::scenes::{STREAMS_PER_POD, example};
use super::{ECHO_PORT, PATIENCE, STREAM_PORT, Show, server};

/// `whois`, `diff`, and an alert.
pub fn show(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "Who was it, what would change, and who notices",
        "`kubectl spillway whois` asks all nodes whose connection somebody outside has seen. `kubectl spillway diff` says \
         whose connections a deletion would break, and applies nothing. And while the API server answers nothing, a \
         Prometheus with the alerts that Spillway ships says so.",
    );
    let pod = show.web.first().context("no pod")?.clone();
    let clients = TcpClients::establish(&pod.ns, server(ECHO_PORT)?, 1, TcpOptions::default())?;
    let id = clients.connections().first().context("a connection")?.id;
    let seen = || Ok(show.echo.source_of_flow().get(&id).copied());
    let seen: SocketAddr = wait_until("the server sees it", PATIENCE, seen, Option::is_some)?.context("a source")?;
    let (seen, to) = (seen.to_string(), server(ECHO_PORT)?.to_string());
    let told = plugin(show, &["whois", &seen, "--to", &to], &[0])?;
    let wanted = format!("default/{}", pod.name);
    let named = if told.contains(&wanted) { wanted.clone() } else { "somebody else".to_owned() };
    show.claim("whois names the pod behind a port", named == wanted, wanted, named);

    let told = plugin(show, &["diff", "--delete", "-f", &example("web-per-flow"), "-o", "json"], &[1])?;
    let broken = told.matches("\"becomes\": \"breaks\"").count();
    let live = show.web.len() * STREAMS_PER_POD;
    let streams = show.streams.as_ref().context("no streams")?;
    show.screen.wait("the connections stream on", || streams.wait_progress(10))?;
    show.claim(
        "diff says what would break, and breaks nothing",
        broken >= live,
        format!("at least the {live} streams to port {STREAM_PORT}"),
        format!("{broken} connections, which go on"),
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
    let fires = || Ok(prometheus.firing()?.iter().any(|labels| labels["alertname"] == ALERT));
    show.screen.wait("Prometheus asks all agents", || wait_for("no alert", PATIENCE, || Ok(!fires()?)))?;
    let frozen = Instant::now();
    show.cluster.freeze_api_server(true)?;
    let fired = show.screen.wait("an alert fires", || wait_for(ALERT, PATIENCE, fires)).map(|()| frozen.elapsed());
    show.cluster.freeze_api_server(false)?;
    let thawed = Instant::now();
    let resolved = show.screen.wait("it resolves", || wait_for(ALERT, PATIENCE, || Ok(!fires()?)));
    show.claim(
        "an alert fires and resolves",
        fired.is_ok() && resolved.is_ok(),
        format!("{ALERT}, with minutes as seconds"),
        match fired {
            Ok(after) => format!("after {}, and gone {} after the end", seconds(after), seconds(thawed.elapsed())),
            Err(error) => format!("{error:#}"),
        },
    );
    Ok(())
}

/// What a command of the plugin prints that ends with one of these codes.
fn plugin(show: &Show, words: &[&str], codes: &[i32]) -> Result<String> {
    let folder = show.cluster.kubectl_folder(&[("kubectl-spillway", &lab::process::binary("egressctl")?)])?;
    let output = Command::new(folder.join("kubectl")).arg("spillway").args(words).output()?;
    if !output.status.code().is_some_and(|code| codes.contains(&code)) {
        bail!("kubectl spillway {}: {}: {}", words.join(" "), output.status, String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8(output.stdout)?;
    let shown = text.lines().take(MOST).collect::<Vec<_>>().join("\n");
    show.print(&[&["spillway"], words].concat(), &shown);
    Ok(text)
}
