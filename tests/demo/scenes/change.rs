//! Policies that change while traffic flows.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use lab::{Family, Server, wait_for};

use super::super::cluster::{ECHO_PORT, EXCEPTION, Show, example};
use super::super::flows::{Flow, Outcome, Trickle, counts, last_with};
use super::super::sightings::{Sightings, Watch};
use super::super::table::Table;
use super::{LEDGER, PATIENCE, WEB, addresses, seconds};

/// Changes of files take effect within a second.
const FOLLOWED: Duration = Duration::from_secs(1);
/// Unused addresses need a gateway and ports first.
const PREPARED: Duration = Duration::from_secs(4);
/// The number of connections of each family before a change, and after it is in force.
const BEFORE: usize = 50;
const AFTER: usize = 100;

/// Changes a pod's label, then a policy's CIDRs.
pub fn show(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "Policies change under load",
        "While the pod ledger-6 opens 200 connections a second, its label changes from `app: ledger` to `app: web`. From \
         then on its connections leave with the three addresses of the policy `web`. Then, while web-1 does the same, \
         web-to-partner.yaml is applied: a policy for the network of the server far1, with a longer prefix than that of \
         `web`. Connections to far1 now leave with its address, and all others as before. During each change, every \
         packet must carry an address that the old or the new rules name.",
    );
    let relabelled = relabel(show)?;
    let excepted = except(show)?;

    let mut table =
        Table::new(&["change", "sources before", "sources after", ">in force after"]).limits(&[26, 32, 32, 16]);
    for (what, change) in [("ledger-6 gets app: web", &relabelled), ("far1 gets a policy", &excepted)] {
        for family in Family::BOTH {
            let (before, after) = change.sources(family);
            table.row([what.to_owned(), before, after, change.in_force_text()]);
        }
    }
    show.screen.table(&table);
    for (name, change) in [
        ("new connections follow a changed label", &relabelled),
        ("a policy with a longer prefix takes over", &excepted),
    ] {
        let (_, waited, failed) = counts(&change.flows);
        show.claim(
            name,
            change.is_in_force(),
            format!("within {}, all later ones open at once", seconds(change.limit)),
            format!(
                "after {}; {} connections: {waited} with a second SYN, {failed} failed",
                change.in_force_text(),
                change.flows.len()
            ),
        );
    }
    let mut seen = relabelled.seen.clone();
    seen.add(&excepted.seen);
    show.claim("no packet has a wrong address during a change", seen.are_clean(), "0 packets", seen.sentence());
    Ok(())
}

/// The observations of one change.
struct Change {
    flows: Vec<Flow>,
    changed: Instant,
    old: Vec<IpAddr>,
    new: Vec<IpAddr>,
    seen: Sightings,
    /// The time within which the change must be in force.
    limit: Duration,
}

impl Change {
    /// Returns the time from the change to the start of the last connection that followed the old rules.
    fn in_force_after(&self) -> Duration {
        last_with(&self.flows, self.changed, &self.old).unwrap_or_default()
    }

    fn in_force_text(&self) -> String {
        if self.after().next().is_none() { "never".to_owned() } else { seconds(self.in_force_after()) }
    }

    /// Returns the connections that were started after the new rules were in force.
    fn after(&self) -> impl Iterator<Item = &Flow> {
        let from = self.changed + self.in_force_after();
        self.flows.iter().filter(move |flow| flow.started > from)
    }

    fn is_in_force(&self) -> bool {
        self.in_force_after() <= self.limit
            && self.after().count() > BEFORE
            && self.after().all(|flow| {
                flow.outcome == Outcome::Opened && flow.source.is_some_and(|source| self.new.contains(&source))
            })
    }

    /// Returns the sources of a family before the change and after it was in force.
    fn sources(&self, family: Family) -> (String, String) {
        let list = |flows: &mut dyn Iterator<Item = &Flow>| {
            let sources: BTreeSet<IpAddr> = flows.filter_map(|flow| flow.source).collect();
            let of_family = sources.iter().filter(|source| source.is_ipv4() == (family == Family::V4));
            of_family.map(IpAddr::to_string).collect::<Vec<_>>().join(" ")
        };
        (list(&mut self.flows.iter().filter(|flow| flow.started < self.changed)), list(&mut self.after()))
    }
}

/// Moves a pod from one policy to another.
fn relabel(show: &mut Show) -> Result<Change> {
    let (old, new) = (addresses(show, LEDGER)?, addresses(show, WEB)?);
    let server = show.server().clone();
    let watch = Watch::start(&server)?;
    let (flows, changed) =
        around(show, "ledger-6", &server, WEB, |show| show.lab.relabel_pod("ledger-6", &[("app", WEB)]))?;
    // The capture includes other pods' long-lived connections, whose addresses are among the new ones.
    let seen = watch.finish(&[&old[..], &new].concat())?;
    show.sightings.add(&seen);
    Ok(Change { flows, changed, old, new, seen, limit: FOLLOWED })
}

/// Gives a destination a policy of its own.
fn except(show: &mut Show) -> Result<Change> {
    let old = addresses(show, WEB)?;
    let (near, far) = (show.server().clone(), show.lab.server("far1").clone());
    let (near_watch, far_watch) = (Watch::start(&near)?, Watch::start(&far)?);
    let elsewhere = Family::BOTH
        .map(|family| Trickle::start(&show.lab.pod("web-1").ns, near.ips.at(family, ECHO_PORT)))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    let (flows, changed) = around(show, "web-1", &far, EXCEPTION.1, |show| {
        let (file, _) = EXCEPTION;
        show.lab.manifests().write(file, &example(file)?)
    })?;
    drop(elsewhere);
    let new = addresses(show, EXCEPTION.1)?;
    let mut seen = near_watch.finish(&old)?;
    seen.add(&far_watch.finish(&[&old[..], &new].concat())?);
    show.sightings.add(&seen);
    Ok(Change { flows, changed, old, new, seen, limit: PREPARED })
}

/// Opens connections in both families from a pod to a server from before `change` until the addresses of `policy` are
/// used. Returns the connections and the time of the change.
fn around(
    show: &mut Show,
    pod: &str,
    server: &Server,
    policy: &str,
    change: impl FnOnce(&mut Show) -> Result<()>,
) -> Result<(Vec<Flow>, Instant)> {
    let start = |family| Trickle::start(&show.lab.pod(pod).ns, server.ips.at(family, ECHO_PORT));
    let mut trickles = Family::BOTH.map(start).into_iter().collect::<Result<Vec<_>>>()?;
    let opened = |trickles: &[Trickle], count: usize| trickles.iter().all(|one| one.opened() >= count);
    wait_for("connections before the change", PATIENCE, || Ok(opened(&trickles, BEFORE)))?;
    let with_new = |show: &Show| -> Result<[usize; 2]> {
        let echo = if server.name == show.server().name { &show.near } else { &show.far };
        let new = addresses(show, policy)?;
        let sources = echo.sources();
        Ok([true, false].map(|v4| {
            sources.iter().filter(|(ip, _)| ip.is_ipv4() == v4 && new.contains(ip)).map(|(_, count)| count).sum()
        }))
    };
    let already = with_new(show)?;
    let changed = Instant::now();
    change(show)?;
    // The claims judge connections that do not open.
    wait_for("connections after the change", PATIENCE, || {
        Ok(with_new(show)?.iter().zip(already).all(|(now, before)| *now >= before + AFTER))
    })
    .ok();
    let echo = if server.name == show.server().name { &show.near } else { &show.far };
    let mut flows = Vec::new();
    for trickle in &mut trickles {
        flows.extend(trickle.finish(echo)?);
    }
    Ok((flows, changed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_in_force_when_all_later_connections_follow_it() {
        let ip = |last: u8| IpAddr::from([192, 0, 2, last]);
        let changed = Instant::now() + Duration::from_secs(60);
        let flow = |ms: u64, source: u8| Flow {
            started: changed + Duration::from_millis(ms) - Duration::from_millis(100),
            outcome: Outcome::Opened,
            source: Some(ip(source)),
        };
        let mut flows = vec![flow(50, 10), flow(90, 11), flow(200, 10)];
        flows.extend((0..60).map(|at| flow(210 + at, 20)));
        let mut change = Change {
            flows,
            changed,
            old: vec![ip(10), ip(11)],
            new: vec![ip(20)],
            seen: Sightings::default(),
            limit: FOLLOWED,
        };
        assert!(change.is_in_force());
        assert_eq!(change.in_force_text(), "0.10 s");
        assert_eq!(change.sources(Family::V4), ("192.0.2.10 192.0.2.11".to_owned(), "192.0.2.20".to_owned()));
        change.flows.push(flow(400, 77));
        assert!(!change.is_in_force(), "a stranger");
        change.flows.push(flow(3000, 10));
        assert!(!change.is_in_force(), "too late");
    }
}
