//! `kubectl spillway serve`: the page of `egressctl serve` for all nodes.

use super::{EGRESSCTL, Kubectl, Pod, agents, egressctl_on};
use crate::serve::{self, Click, Feed, INTERVAL, PATHS};
use anyhow::{Context as _, Result};
use std::{
    collections::BTreeSet,
    ffi::OsString,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

/// The interval of the search for new nodes and replaced agents.
const LOOK: Duration = Duration::from_secs(5);
/// The number of samples to request from an agent. No viewer watches for that long.
const TIMES: &str = "1000000";

/// Serves the page of all nodes, or only of `node`. Blocks.
pub(super) fn run(listen: SocketAddr, kubectl: Kubectl, node: Option<String>) -> Result<()> {
    let feed = Feed::default();
    // Fail immediately if permissions are missing.
    agents(&kubectl, node.clone())?;
    let (watching, of, at) = (feed.clone(), node.clone(), kubectl.clone());
    thread::Builder::new().name("nodes".into()).spawn(move || watch(&at, of.as_ref(), &watching))?;
    let explain = move |click: &Click| {
        let pod = agents(&kubectl, Some(click.node.clone()))?.into_iter().next().context("no agent")?;
        let words = ["explain", "--pod", &click.pod, "--to", &click.to].map(OsString::from);
        Ok(egressctl_on(&kubectl, &pod, &words)?)
    };
    serve::serve(listen, &feed, Arc::new(explain))
}

/// Reads the flows of each agent, as agents come and go.
fn watch(kubectl: &Kubectl, node: Option<&String>, feed: &Feed) {
    let heard: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    loop {
        // If the API server is briefly unreachable, the nodes stay on the page.
        for pod in agents(kubectl, node.cloned()).unwrap_or_default() {
            let is_new = heard.lock().unwrap_or_else(PoisonError::into_inner).insert(pod.name.clone());
            if is_new {
                let (kubectl, feed, heard) = (kubectl.clone(), feed.clone(), Arc::clone(&heard));
                thread::spawn(move || {
                    listen_to(&kubectl, &pod, &feed);
                    feed.forget(&pod.node);
                    heard.lock().unwrap_or_else(PoisonError::into_inner).remove(&pod.name);
                });
            }
        }
        thread::sleep(LOOK);
    }
}

/// Reads the output of `egressctl top` in an agent's pod until it ends.
fn listen_to(kubectl: &Kubectl, pod: &Pod, feed: &Feed) {
    let (limit, interval) = (PATHS.to_string(), INTERVAL.as_secs().to_string());
    let exec = ["exec", &pod.name, "-c", "agent", "--", EGRESSCTL];
    let top = ["top", "--by", "path", "--limit", &limit, "--interval", &interval, "-n", TIMES, "-o", "json"];
    let Ok(mut child) = kubectl.stream(&[&exec[..], &top].concat(), Stdio::null()) else { return };
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            feed.take(&pod.node, &line);
        }
    }
    child.kill().and_then(|()| child.wait()).ok();
}
