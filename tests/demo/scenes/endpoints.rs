//! Pods that keep one egress IP each.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::Result;
use lab::Family;
use lab::traffic::{TcpClients, TcpOptions};

use super::super::cluster::{ECHO_PORT, Show};
use super::super::sightings::Watch;
use super::super::table::Table;
use super::{LEDGER, PATIENCE, addresses};

/// The number of connections of each pod and family.
const FLOWS: usize = 20;

/// Opens some connections from each pod `ledger-..`.
pub fn show(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "One egress IP for each pod",
        "The policy `ledger` has `distribution: PerEndpoint`: six pods, three egress IPs, so two pods share one, and no \
         pod ever uses two. Each pod opens 20 connections over IPv4 and 20 over IPv6; the server sees them come from:",
    );
    let watch = Watch::start(show.server())?;
    let pods: Vec<String> = show
        .lab
        .pods()
        .filter(|pod| pod.labels.get("app").is_some_and(|app| app == LEDGER))
        .map(|pod| pod.name.clone())
        .collect();
    let mut seen: BTreeMap<(String, Family), BTreeSet<IpAddr>> = BTreeMap::new();
    for pod in &pods {
        for family in Family::BOTH {
            seen.insert((pod.clone(), family), sources(show, pod, family)?);
        }
    }

    let mut table = Table::new(&["pod", "node", "IPv4 source at the server", "IPv6 source at the server"]);
    for pod in &pods {
        let list = |family| seen[&(pod.clone(), family)].iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
        table.row([pod.clone(), show.lab.pod(pod).node.clone(), list(Family::V4), list(Family::V6)]);
    }
    show.screen.table(&table);

    let single = seen.values().filter(|sources| sources.len() == 1).count();
    show.claim(
        "every pod keeps one egress IP",
        single == seen.len(),
        format!("one IPv4 and one IPv6 address for each of {} pods", pods.len()),
        format!("one address in {single} of {} cases", seen.len()),
    );
    let counts = pods_per_address(&addresses(show, LEDGER)?, seen.values());
    let list: Vec<String> = counts.iter().map(usize::to_string).collect();
    show.claim(
        "pods are spread evenly over the addresses",
        counts.iter().all(|count| *count == pods.len() / 3),
        format!("{} pods on each address", pods.len() / 3),
        format!("{} pods", list.join(", ")),
    );
    let allowed = show.egress_addresses()?;
    show.sightings.add(&watch.finish(&allowed)?);
    Ok(())
}

/// Returns the source addresses of a pod's connections at the server.
fn sources(show: &Show, pod: &str, family: Family) -> Result<BTreeSet<IpAddr>> {
    let target = show.server().ips.at(family, ECHO_PORT);
    let clients = TcpClients::establish(&show.lab.pod(pod).ns, target, FLOWS, TcpOptions::once())?;
    let all = clients.wait("all echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
    let sources = show.near.source_of_flow();
    Ok(all.iter().filter_map(|one| sources.get(&one.id)).map(|source| source.ip()).collect())
}

/// Returns the number of pods with each address, in the order of addresses.
fn pods_per_address<'a>(addresses: &[IpAddr], seen: impl Iterator<Item = &'a BTreeSet<IpAddr>>) -> Vec<usize> {
    let mut counts: BTreeMap<IpAddr, usize> = addresses.iter().map(|address| (*address, 0)).collect();
    for address in seen.flatten() {
        *counts.entry(*address).or_default() += 1;
    }
    counts.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_and_foreign_addresses_are_counted() {
        let ip = |last: u8| IpAddr::from([192, 0, 2, last]);
        let seen = [BTreeSet::from([ip(20)]), BTreeSet::from([ip(20)]), BTreeSet::from([ip(77)])];
        assert_eq!(pods_per_address(&[ip(20), ip(21)], seen.iter()), [2, 0, 1]);
    }
}
