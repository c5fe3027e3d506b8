//! The spread of new connections over a policy's egress IPs, as the server sees it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::Result;
use lab::Family;
use lab::traffic::{TcpClients, TcpOptions, TcpServer};

use super::super::claims::Claim;
use super::super::cluster::{ECHO_PORT, Show};
use super::super::sightings::Watch;
use super::super::table::{Table, bar, percent};
use super::{PATIENCE, WEB, carriers};

/// The number of connections in each table.
pub const FLOWS: usize = 600;
/// The largest permitted deviation from a weight's share in percentage points: chance exceeds it once in ten thousand runs.
const TOLERANCE: f64 = 8.0;

/// Shows the flows of the pods `web-..` over the addresses of their pool, then those of `mail-1` by weight.
pub fn show(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "Connections spread over three gateways",
        "Four pods with the label `app: web` now open 600 connections over IPv4 to a server outside the cluster, and 600 \
         over IPv6. The policy `web` gives them three egress IPs of each family, each carried by a different gateway. The \
         table shows what the server saw: no address of a pod or a worker, and about a third from each egress IP.",
    );
    let watch = Watch::start(show.server())?;
    for family in Family::BOTH {
        let sources =
            show.screen.wait("open connections", || open(show, &["web-1", "web-2", "web-3", "web-4"], family))?;
        let gateways = carriers(show, WEB)?;
        let weights: BTreeMap<IpAddr, f64> =
            gateways.keys().filter(|ip| ip.is_ipv4() == (family == Family::V4)).map(|ip| (*ip, 1.0)).collect();
        show.screen.table(&table(&sources, &weights, &gateways));
        let name = match family {
            Family::V4 => "IPv4 connections spread over all egress IPs",
            Family::V6 => "IPv6 connections spread over all egress IPs",
        };
        claim_shares(show, name, &sources, &weights);
    }

    show.screen.say("");
    show.screen.say(
        "The policy `mail` names its addresses itself and weights them 3 : 2 : 1. Its pod opens 600 connections, and the \
         server sees:",
    );
    let sources = show.screen.wait("open connections", || open(show, &["mail-1"], Family::V4))?;
    let gateways = carriers(show, "mail")?;
    let weights = gateways.keys().copied().zip([3.0, 2.0, 1.0]).collect();
    show.screen.table(&table(&sources, &weights, &gateways));
    claim_shares(show, "weights of egress IPs are honoured", &sources, &weights);
    let allowed = show.egress_addresses()?;
    show.sightings.add(&watch.finish(&allowed)?);
    Ok(())
}

/// Opens connections from the pods in equal parts, and counts them by their source at the server.
fn open(show: &Show, pods: &[&str], family: Family) -> Result<BTreeMap<IpAddr, usize>> {
    let target = show.server().ips.at(family, ECHO_PORT);
    let each = FLOWS / pods.len();
    let establish = |pod: &&str| TcpClients::establish(&show.lab.pod(pod).ns, target, each, TcpOptions::once());
    let clients: Vec<TcpClients> = pods.iter().map(establish).collect::<Result<_>>()?;
    let mut sources = Vec::new();
    for clients in &clients {
        let all = clients.wait("all echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
        let ids: Vec<u64> = all.iter().map(|one| one.id).collect();
        sources.extend(sources_of(&show.near, &ids));
    }
    Ok(lab::traffic::tally(sources))
}

/// Returns the sources of connections at a server.
pub fn sources_of(server: &TcpServer, ids: &[u64]) -> Vec<IpAddr> {
    let sources = server.source_of_flow();
    ids.iter().filter_map(|id| sources.get(id)).map(|source| source.ip()).collect()
}

/// Returns a table of the connections by source address, which should be the addresses of `weights`.
pub fn table(
    sources: &BTreeMap<IpAddr, usize>,
    weights: &BTreeMap<IpAddr, f64>,
    gateways: &BTreeMap<IpAddr, String>,
) -> Table {
    let total = sources.values().sum();
    let mut table = Table::new(&["source at the server", "carried by", ">connections", ">share", ""]);
    let others = sources.keys().filter(|source| !weights.contains_key(source));
    for ip in weights.keys().chain(others) {
        let count = sources.get(ip).copied().unwrap_or(0);
        let gateway = gateways.get(ip).map_or("no gateway: wrong!", String::as_str);
        table.row([
            ip.to_string(),
            gateway.to_owned(),
            count.to_string(),
            percent(count, total),
            bar(count, total, 40),
        ]);
    }
    table
}

fn claim_shares(show: &mut Show, name: &str, sources: &BTreeMap<IpAddr, usize>, weights: &BTreeMap<IpAddr, f64>) {
    show.add(fair(name, sources, weights));
}

/// Returns the claim that [`FLOWS`] connections are distributed over the sources by weight.
pub fn fair(name: &str, sources: &BTreeMap<IpAddr, usize>, weights: &BTreeMap<IpAddr, f64>) -> Claim {
    let (shares, wanted) = shares(sources, weights);
    let list = |all: &[f64]| all.iter().map(|share| format!("{share:.0}")).collect::<Vec<_>>().join(" / ");
    Claim {
        name: name.to_owned(),
        holds: is_fair(sources, weights),
        expected: format!("{FLOWS} connections, {} % ± {TOLERANCE:.0}", list(&wanted)),
        measured: format!("{} connections, {} %", sources.values().sum::<usize>(), list(&shares)),
    }
}

/// Returns the actual share of each egress IP in percent, and the share for its weight.
fn shares(sources: &BTreeMap<IpAddr, usize>, weights: &BTreeMap<IpAddr, f64>) -> (Vec<f64>, Vec<f64>) {
    let total = sources.values().sum::<usize>().max(1) as f64;
    let weight = weights.values().sum::<f64>();
    let share = |ip: &IpAddr| sources.get(ip).copied().unwrap_or(0) as f64 * 100.0 / total;
    (weights.keys().map(share).collect(), weights.values().map(|one| one * 100.0 / weight).collect())
}

/// Returns whether all connections arrived, none with another source, and the shares match the weights.
fn is_fair(sources: &BTreeMap<IpAddr, usize>, weights: &BTreeMap<IpAddr, f64>) -> bool {
    let (shares, wanted) = shares(sources, weights);
    sources.values().sum::<usize>() == FLOWS
        && sources.keys().all(|source| weights.contains_key(source))
        && shares.len() > 1
        && shares.iter().zip(&wanted).all(|(share, wanted)| (share - wanted).abs() <= TOLERANCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[test]
    fn shares_follow_weights() {
        let weights = BTreeMap::from([(ip(30), 3.0), (ip(31), 2.0), (ip(32), 1.0)]);
        let sources = |a, b, c| BTreeMap::from([(ip(30), a), (ip(31), b), (ip(32), c)]);
        assert!(is_fair(&sources(310, 195, 95), &weights));
        assert!(!is_fair(&sources(200, 200, 200), &weights));
        assert!(!is_fair(&sources(300, 200, 99), &weights), "one is missing");
        let mut stranger = sources(300, 199, 100);
        stranger.insert(ip(77), 1);
        assert!(!is_fair(&stranger, &weights));
        assert!(!is_fair(&BTreeMap::from([(ip(30), FLOWS)]), &BTreeMap::from([(ip(30), 1.0)])), "no spread at all");
    }
}
