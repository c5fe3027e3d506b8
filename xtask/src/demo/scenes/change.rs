//! Policies that change while traffic flows.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lab::{Family, Server, wait_for};

use super::super::cluster::{ECHO_PORT, Show, example};
use super::super::flows::{Flow, Trickle, counts, last_with};
use super::super::sightings::{Sightings, Watch};
use super::super::table::Table;
use super::{LEDGER, PATIENCE, WEB, addresses, seconds};

/// Files are followed within a second.
const FOLLOWED: Duration = Duration::from_secs(1);
/// A piece of manifests/examples/web-per-flow.yaml, and what becomes of it: `far1` is in 198.51.100.0/24.
const OLD_CIDRS: &str = r#"[10.0.0.0/8, "fc00::/7"]"#;
const NEW_CIDRS: &str = r#"[10.0.0.0/8, "fc00::/7", 198.51.100.0/24, "2001:db8:51::/64"]"#;
/// Connections of each family before a change, and after it.
const BEFORE: usize = 50;
const AFTER: usize = 180;

/// A pod's label is changed, then a policy's CIDRs.
pub fn show(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "Policies change under load",
        "While the pod web-5 opens 200 connections a second, its label changes from `app: web` to `app: ledger`: from \
         then on its connections leave with its one address of the policy `ledger`. Then, while web-1 does the same, \
         the network of the server far1 is added to `excludedCIDRs` of the policy `web`: connections there now leave \
         with the address of their node, as if there were no Spillway, and those to other places as before. In between, \
         no packet may carry an address that neither the old nor the new rules name.",
    );
    let relabelled = relabel(show)?;
    let excluded = exclude(show)?;

    let mut table =
        Table::new(&["change", "sources before", "sources after", ">in force after"]).limits(&[26, 32, 32, 16]);
    for (what, change) in [("web-5 gets app: ledger", &relabelled), ("far1 leaves the policy web", &excluded)] {
        for family in Family::BOTH {
            let (before, after) = change.sources(family);
            table.row([what.to_owned(), before, after, change.in_force_text()]);
        }
    }
    show.screen.table(&table);
    for (name, change) in
        [("a changed label moves new connections", &relabelled), ("a changed CIDR moves new connections", &excluded)]
    {
        let (_, waited, failed) = counts(&change.flows);
        show.claim(
            name,
            change.is_in_force() && waited + failed == 0,
            format!("within {}, all open at once", seconds(FOLLOWED)),
            format!(
                "after {}; of {} connections {waited} tried again, {failed} failed",
                change.in_force_text(),
                change.flows.len()
            ),
        );
    }
    let mut seen = relabelled.seen.clone();
    seen.add(&excluded.seen);
    show.claim("no packet of a changing policy has a wrong address", seen.are_clean(), "0 packets", seen.sentence());
    Ok(())
}

/// What was seen of one change.
struct Change {
    flows: Vec<Flow>,
    changed: Instant,
    old: Vec<IpAddr>,
    new: Vec<IpAddr>,
    seen: Sightings,
}

impl Change {
    /// How long after the change the last connection was started that went by the old rules.
    fn in_force_after(&self) -> Duration {
        last_with(&self.flows, self.changed, &self.old).unwrap_or_default()
    }

    fn in_force_text(&self) -> String {
        if self.after().next().is_none() { "never".to_owned() } else { seconds(self.in_force_after()) }
    }

    /// The connections that were started when the new rules were in force.
    fn after(&self) -> impl Iterator<Item = &Flow> {
        let from = self.changed + self.in_force_after();
        self.flows.iter().filter(move |flow| flow.started > from)
    }

    fn is_in_force(&self) -> bool {
        self.in_force_after() <= FOLLOWED
            && self.after().count() > BEFORE
            && self.after().all(|flow| flow.source.is_some_and(|source| self.new.contains(&source)))
    }

    /// The sources of a family before the change and when it was in force.
    fn sources(&self, family: Family) -> (String, String) {
        let list = |flows: &mut dyn Iterator<Item = &Flow>| {
            let sources: BTreeSet<IpAddr> = flows.filter_map(|flow| flow.source).collect();
            let of_family = sources.iter().filter(|source| source.is_ipv4() == (family == Family::V4));
            of_family.map(IpAddr::to_string).collect::<Vec<_>>().join(" ")
        };
        (list(&mut self.flows.iter().filter(|flow| flow.started < self.changed)), list(&mut self.after()))
    }
}

/// The pod goes from one policy to another.
fn relabel(show: &mut Show) -> Result<Change> {
    let (old, new) = (addresses(show, WEB)?, addresses(show, LEDGER)?);
    let server = show.server().clone();
    let watch = Watch::start(&server)?;
    let (flows, changed) = around(show, "web-5", &server, |show| show.lab.relabel_pod("web-5", &[("app", "ledger")]))?;
    // Other pods' long-lived connections are seen too; their addresses are among the old ones.
    let seen = watch.finish(&[&old[..], &new].concat())?;
    show.sightings.add(&seen);
    Ok(Change { flows, changed, old, new, seen })
}

/// A destination leaves the policy.
fn exclude(show: &mut Show) -> Result<Change> {
    let node = show.lab.node(&show.lab.pod("web-1").node).masquerade();
    let (old, new) = (addresses(show, WEB)?, vec![node.v4.into(), node.v6.into()]);
    let (near, far) = (show.server().clone(), show.lab.server("far1").clone());
    let (near_watch, far_watch) = (Watch::start(&near)?, Watch::start(&far)?);
    let _elsewhere = Family::BOTH
        .map(|family| Trickle::start(&show.lab.pod("web-1").ns, near.ips.at(family, ECHO_PORT)))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    let (flows, changed) = around(show, "web-1", &far, |show| {
        show.lab.manifests().write("web-per-flow", &edited(&example("web-per-flow")?)?)
    })?;
    let egress_ips = show.egress_addresses()?;
    let near_seen = near_watch.finish(&egress_ips)?;
    show.sightings.add(&near_seen);
    let mut seen = far_watch.finish(&[&old[..], &new].concat())?;
    seen.add(&near_seen);
    Ok(Change { flows, changed, old, new, seen })
}

/// Opens connections in both families from a pod to a server before and after `change`, and returns them with the
/// moment of the change.
fn around(
    show: &mut Show,
    pod: &str,
    server: &Server,
    change: impl FnOnce(&mut Show) -> Result<()>,
) -> Result<(Vec<Flow>, Instant)> {
    let start = |family| Trickle::start(&show.lab.pod(pod).ns, server.ips.at(family, ECHO_PORT));
    let mut trickles = Family::BOTH.map(start).into_iter().collect::<Result<Vec<_>>>()?;
    let opened = |trickles: &[Trickle], count: usize| trickles.iter().all(|one| one.opened() >= count);
    wait_for("connections before the change", PATIENCE, || Ok(opened(&trickles, BEFORE)))?;
    let changed = Instant::now();
    change(show)?;
    // Connections that do not open are the claims' to judge.
    wait_for("connections after the change", PATIENCE, || Ok(opened(&trickles, BEFORE + AFTER))).ok();
    let echo = if server.name == show.server().name { &show.near } else { &show.far };
    let mut flows = Vec::new();
    for trickle in &mut trickles {
        flows.extend(trickle.finish(echo)?);
    }
    Ok((flows, changed))
}

/// The manifest with the other CIDRs.
fn edited(manifest: &str) -> Result<String> {
    ensure!(manifest.matches(OLD_CIDRS).count() == 1, "web-per-flow.yaml does not have {OLD_CIDRS} once");
    Ok(manifest.replace(OLD_CIDRS, NEW_CIDRS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::flows::Outcome;

    #[test]
    fn the_example_can_be_edited() {
        let manifest = example("web-per-flow").unwrap();
        assert!(edited(&manifest).unwrap().contains("excludedCIDRs: [10.0.0.0/8, \"fc00::/7\", 198.51.100.0/24"));
        assert!(edited("excludedCIDRs: []").is_err());
    }

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
        let mut change =
            Change { flows, changed, old: vec![ip(10), ip(11)], new: vec![ip(20)], seen: Sightings::default() };
        assert!(change.is_in_force());
        assert_eq!(change.in_force_text(), "0.10 s");
        assert_eq!(change.sources(Family::V4), ("192.0.2.10 192.0.2.11".to_owned(), "192.0.2.20".to_owned()));
        change.flows.push(flow(400, 77));
        assert!(!change.is_in_force(), "a stranger");
        change.flows.push(flow(3000, 10));
        assert!(!change.is_in_force(), "too late");
    }
}
