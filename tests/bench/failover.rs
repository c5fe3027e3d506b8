//! The death of a gateway: Spillway compared with the usual pair of keepalived and conntrackd, in the same namespaces under the same load.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::stats::Percentiles;
use lab::traffic::{Mixed, Pauses};
use lab::{Family, Lab, PodSpec, StartOptions, address, vrrp, wait_until};
use serde_json::{Value, json};

use super::figures::{self, Column, Figure, number, rounded};
use super::variant::sources;
use xtask::progress::Step;

/// The host numbers of the egress IPs in Spillway's pool. The keepalived pair has the first one.
const EGRESS: [u8; 2] = [40, 41];
const PATIENCE: Duration = Duration::from_secs(60);
/// The time for which the load is observed after the power failure: several times the failover time of any system.
const WATCH: Duration = Duration::from_secs(12);
/// Connections that have been silent for this long at the end are lost.
const SILENT: Duration = Duration::from_secs(3);

/// The compared systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    Spillway,
    Keepalived,
    Fast,
}

impl System {
    const ALL: [System; 3] = [System::Spillway, System::Keepalived, System::Fast];
    const NAMES: [(&str, &str); 3] = [
        ("spillway", "Spillway"),
        ("keepalived", "keepalived (1 s), conntrackd"),
        ("keepalived-fast", "keepalived (0.1 s), conntrackd"),
    ];
}

impl Column for System {
    fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    fn title(self) -> &'static str {
        Self::NAMES[self as usize].1
    }
}

/// Returns `{"name", "unit", "spillway": {"median", "max"}, "keepalived": .., "keepalived-fast": ..}` for each figure.
pub fn json(figures: &[Figure<System>]) -> Value {
    let cell = |spread: Percentiles| json!({"median": rounded(spread.p50), "max": rounded(spread.max)});
    figures.iter().map(|figure| figure.json(&System::ALL, cell)).collect()
}

/// Returns a Markdown table with medians and, in parentheses, maxima.
pub fn table(figures: &[Figure<System>]) -> String {
    figures::table(figures, &System::ALL, |spread| format!("{} ({})", number(spread.p50), number(spread.max)))
}

/// The effects of one death.
#[derive(Clone, Copy, Debug)]
struct Death {
    pauses: Pauses,
    streams: usize,
    flows: usize,
    repeated: u64,
    failed: u64,
    slowest: f64,
}

/// Measures `rounds` deaths with each system, alternating between the systems.
pub fn measure(binaries: &Path, rounds: usize) -> Result<Vec<Figure<System>>> {
    let mut all: [Vec<Death>; 3] = Default::default();
    for round in 1..=rounds {
        for (system, deaths) in System::ALL.into_iter().zip(&mut all) {
            let step = Step::start(&format!("the death of a gateway, {}, {round} of {rounds}", system.title()));
            deaths.push(death(system, binaries).with_context(|| system.title())?);
            step.end("✓", "");
        }
    }
    type Of = fn(&Death) -> f64;
    let lines: [(&str, &str, Of); 7] = [
        ("longest pause of a UDP flow", "s", |d| d.pauses.datagrams.as_secs_f64()),
        ("UDP flows lost, of 16", "flows", |d| d.flows as f64),
        ("longest pause of a TCP connection", "s", |d| d.pauses.streams.as_secs_f64()),
        ("TCP connections lost, of 200", "connections", |d| d.streams as f64),
        ("SYNs retransmitted, at 200 new connections a second", "SYNs", |d| d.repeated as f64),
        ("slowest new connection", "s", |d| d.slowest),
        ("new connections not established in 5 s", "connections", |d| d.failed as f64),
    ];
    let figure = |(name, unit, of): (&str, &str, Of)| {
        let values = all.iter().map(|deaths| deaths.iter().map(of).collect());
        Figure::new(name, unit, System::ALL.into_iter().zip(values))
    };
    Ok(lines.into_iter().map(figure).collect())
}

fn death(system: System, binaries: &Path) -> Result<Death> {
    let mut lab = Lab::builder().workers(2).gateways(2).far_servers(0).masquerade(false).build()?;
    let pods = [("a", "worker1"), ("b", "worker2")];
    let pods = pods.map(|(name, node)| lab.add_pod(PodSpec::new(name, node).label("app", "bench")));
    let pods = pods.into_iter().map(|pod| Ok(pod?.ns)).collect::<Result<Vec<_>>>()?;
    let first = address::external(EGRESS[0]);
    let advert = match system {
        System::Spillway => {
            spillway(&mut lab, binaries)?;
            None
        }
        System::Keepalived => Some(Duration::from_secs(1)),
        System::Fast => Some(Duration::from_millis(100)),
    };
    if let Some(advert) = advert {
        vrrp::start(&mut lab, advert, first)?;
    }
    let server = lab.server("server1").clone();
    for pod in &pods {
        for family in Family::BOTH {
            let ours = EGRESS.map(|host| address::external(host).ip(family));
            let seen = || sources(pod, &server, family, 8);
            wait_until("pods have egress IPs", PATIENCE, seen, |seen| {
                !seen.is_empty() && seen.iter().all(|ip| ours.contains(ip))
            })?;
        }
    }
    let load = Mixed::start(&pods, &server, PATIENCE)?;
    let victim = if advert.is_some() { "gw1".to_owned() } else { owner(&lab)? };
    // Gives the replicated connections and the neighbour tables time to be complete.
    std::thread::sleep(SILENT);
    load.wait_progress(PATIENCE)?;
    let repeated = load.syns_retransmitted()?;
    load.reset_pauses();
    lab.kill_node(&victim)?;
    std::thread::sleep(WATCH);
    let (pauses, repeated) = (load.pauses(), load.syns_retransmitted()? - repeated);
    let [streams, flows] = load.broken(SILENT);
    let (rates, _) = load.finish()?;
    ensure!(rates.iter().all(|rate| rate.opened > 0), "no new connections");
    let slowest = rates.iter().map(|rate| rate.latency().max).fold(0.0, f64::max);
    let failed = rates.iter().map(lab::traffic::rate::RateReport::failures).sum();
    Ok(Death { pauses, streams, flows, repeated, failed, slowest })
}

/// Starts Spillway with its defaults and a pool of two addresses in each family.
fn spillway(lab: &mut Lab, binaries: &Path) -> Result<()> {
    let [from, to] = EGRESS.map(address::external);
    lab.manifests().write(
        "bench",
        &format!(
            "apiVersion: spillway.io/v1beta1\nkind: EgressIPPool\nmetadata: {{name: bench}}\nspec:\n  ipRanges: [{{start: {}, end: {}}}, \
             {{start: \"{}\", end: \"{}\"}}]\n  nodeSelector: {{matchLabels: {{egress: \"true\"}}}}\n---\napiVersion: \
             spillway.io/v1beta1\nkind: EgressGatewayPolicy\nmetadata: {{name: bench}}\nspec:\n  selectors: [{{podSelector: \
             {{matchLabels: {{app: bench}}}}}}]\n  destinationCIDRs: [0.0.0.0/0, \"::/0\"]\n  egressIPPools: [{{name: bench, count: 2}}]\n",
            from.v4, to.v4, from.v6, to.v6
        ),
    )?;
    let options = StartOptions::new().binary(&binaries.join("egress-daemon"));
    lab.start_agents_before_controller(&options)?;
    let nodes: Vec<String> = lab.nodes().map(|node| node.name.clone()).collect();
    let known = || lab.manifests().reporting();
    wait_until("every agent has reported", PATIENCE, known, |known| *known == nodes)?;
    lab.start_controller("controller", &options)
}

/// Returns the gateway that answers for the first egress IP.
fn owner(lab: &Lab) -> Result<String> {
    let address = address::external(EGRESS[0]).v4;
    let first = lab.manifests().egress_ips()?.into_iter().find(|one| one.address == address);
    first.and_then(|one| one.node).with_context(|| format!("{address} has no owner"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_shows_median_and_maximum_and_json_names_each_system() {
        let values = [vec![0.3, 0.3, 0.32], vec![3.6, 3.6, 4.0], vec![0.5, 0.5, 0.6]];
        let figures = [Figure::new("longest pause", "s", System::ALL.into_iter().zip(values))];
        assert!(table(&figures).ends_with("| longest pause | s | 0.30 (0.32) | 3.60 (4.00) | 0.50 (0.60) |\n"));
        assert_eq!(json(&figures)[0]["keepalived-fast"], json!({"median": 0.5, "max": 0.6}));
    }
}
