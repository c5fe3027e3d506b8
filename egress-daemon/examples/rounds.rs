//! Measures a whole controller on a directory with the objects of a cluster: `cargo run --release -p egress-daemon --example
//! rounds NODES PODS POLICIES EGRESS_IPS`. A few hundred nodes are enough to see what grows with them; with many
//! more the directory store takes long to settle.
//! Prints one JSON object: how long a full round and one that takes in one pod take from the notice of the store to the
//! objects that should be there, in milliseconds, and how many objects such a pod has written.
//!
//! The cluster is that of `scale.rs`, with ten gateways.

use anyhow::{Context, bail, ensure};
use egress_daemon::controller::{ControllerConfig, Report, run};
use egress_daemon::store::lease::{LEASE_NAMESPACE, LeaseKeeper, LeaseTerms, gateway_lease};
use egress_daemon::store::{Files, Key};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Gateways of the cluster.
const GATEWAYS: u32 = 10;
/// So many objects in a file.
const TOGETHER: u32 = 500;
/// How often one pod comes and goes.
const SAMPLES: u32 = 20;
/// How long nothing must happen before the controller counts as settled.
const QUIET: Duration = Duration::from_secs(5);
/// How long that may take.
const PATIENCE: Duration = Duration::from_secs(900);
/// Gateways renew their leases this often: slowly, since they compete with what is measured.
const RENEW_EVERY: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<u32> = std::env::args()
        .skip(1)
        .map(|text| text.parse().with_context(|| format!("{text} is not a number")))
        .collect::<Result<_, _>>()?;
    let [nodes, pods, policies, egress_ips] = arguments[..] else {
        bail!("usage: rounds NODES PODS POLICIES EGRESS_IPS")
    };
    ensure!(
        nodes > GATEWAYS && policies > 0 && egress_ips <= 60_000,
        "more than {GATEWAYS} nodes, at least one policy"
    );
    let directory = tempfile::tempdir()?;
    write(directory.path(), "nodes", nodes, node)?;
    write(directory.path(), "pods", pods, |n| pod(n, n % policies, n % nodes))?;
    write(directory.path(), "policies", policies, |n| policy(n, policies, egress_ips))?;
    fs::write(directory.path().join("cluster.yaml"), rest())?;

    let store = Files::open(directory.path())?;
    let keepers: Vec<LeaseKeeper> = (0..GATEWAYS)
        .map(|n| {
            let node = format!("node-{n:05}");
            let key = Key::namespaced(LEASE_NAMESPACE, &gateway_lease(&node));
            let duration = 4 * RENEW_EVERY;
            LeaseKeeper::start(store.clone(), LeaseTerms { key, identity: node, duration, renew_every: RENEW_EVERY })
        })
        .collect();
    let (report, seen) = watch::channel(Report::default());
    let mut config = ControllerConfig::new("one".to_owned());
    (config.lease_duration, config.renew_every) = (4 * RENEW_EVERY, RENEW_EVERY);
    config.gateways.duration = 4 * RENEW_EVERY;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(run(store, config, report, async move {
        stopped.await.ok();
    }));
    let settled = settle(&seen).await?;
    let (mut full, mut partial, mut writes) = (Vec::new(), Vec::new(), Vec::new());
    full.push(settled.planning);
    for sample in 0..SAMPLES {
        let (path, before) = (directory.path().join("one.yaml"), seen.borrow().clone());
        let application = sample % policies;
        fs::write(&path, pod(pods + sample, application, (application + 501 + sample) % nodes))?;
        let first = after(&seen, &before).await?;
        if first.partial > before.partial {
            partial.push(first.planning)
        } else {
            full.push(first.planning)
        }
        let last = settle(&seen).await?;
        writes.push(last.writes - before.writes);
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort();
        times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e3)
    };
    let most = writes.iter().max().copied().unwrap_or(0);
    println!(
        "{{\"fullMs\": {:.3}, \"onePodMs\": {:.3}, \"full\": {}, \"partial\": {}, \"writes\": {most}}}",
        median(&mut full),
        median(&mut partial),
        full.len(),
        partial.len(),
    );
    drop((keepers, stop));
    running.await?;
    Ok(())
}

/// The first report of a round after this one.
async fn after(seen: &watch::Receiver<Report>, before: &Report) -> anyhow::Result<Report> {
    let mut seen = seen.clone();
    let report = tokio::time::timeout(PATIENCE, seen.wait_for(|report| report.rounds > before.rounds)).await;
    Ok(report.context("no round was made")??.clone())
}

/// Waits until the controller has nothing more to do.
async fn settle(seen: &watch::Receiver<Report>) -> anyhow::Result<Report> {
    let (mut seen, start) = (seen.clone(), Instant::now());
    loop {
        ensure!(start.elapsed() < PATIENCE, "the controller did not settle: {:?}", seen.borrow());
        let before = seen.borrow_and_update().clone();
        let quiet = tokio::time::timeout(QUIET, seen.changed()).await.is_err();
        if quiet && before.rounds > 0 && before.error.is_none() {
            return Ok(before);
        }
    }
}

fn write(directory: &Path, name: &str, count: u32, object: impl Fn(u32) -> String) -> anyhow::Result<()> {
    for first in (0..count).step_by(TOGETHER as usize) {
        let mut text = String::new();
        for n in first..count.min(first + TOGETHER) {
            let _ = writeln!(text, "---\n{}", object(n));
        }
        fs::write(directory.join(format!("{name}-{first:06}.yaml")), text)?;
    }
    Ok(())
}

fn node(n: u32) -> String {
    let egress = if n < GATEWAYS { "true" } else { "false" };
    format!(
        "{{apiVersion: v1, kind: Node, metadata: {{name: node-{n:05}, labels: {{egress: '{egress}', \
         topology.kubernetes.io/zone: zone-{}}}}}}}",
        n % 3
    )
}

fn pod(n: u32, application: u32, node: u32) -> String {
    format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: app-{application}-{n}, namespace: team-{}, uid: u{n}, \
         labels: {{app: app-{application}, tier: web}}}}, spec: {{nodeName: node-{node:05}, containers: []}}}}",
        application % 50
    )
}

fn policy(n: u32, policies: u32, egress_ips: u32) -> String {
    let share = |n: u32| u64::from(n) * u64::from(egress_ips) / u64::from(policies);
    let distribution = if n.is_multiple_of(4) { "PerEndpoint" } else { "PerFlow" };
    format!(
        "{{apiVersion: spillway.io/v1alpha1, kind: EgressGatewayPolicy, metadata: {{name: policy-{n:04}}}, spec: {{selectors: \
         [{{podSelector: {{matchLabels: {{app: app-{n}}}}}}}], destinationCIDRs: [0.0.0.0/0], distribution: {distribution}, \
         egressIPPools: [{{name: public, count: {}}}]}}}}",
        share(n + 1) - share(n)
    )
}

/// The pool and the namespaces.
fn rest() -> String {
    let mut text = "{apiVersion: spillway.io/v1alpha1, kind: EgressIPPool, metadata: {name: public}, spec: {ipRanges: \
                    [{cidr: 198.18.0.0/15}], nodeSelector: {matchLabels: {egress: 'true'}}}}\n"
        .to_owned();
    for n in 0..50 {
        let _ = writeln!(text, "---\n{{apiVersion: v1, kind: Namespace, metadata: {{name: team-{n}}}}}");
    }
    text
}
