//! The controller dies, and everything else keeps working.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use lab::wait_for;

use super::super::cluster::{CONTROLLER, Show};
use super::super::flows::counts;
use super::super::sightings::Watch;
use super::super::streams::{intact, longest_pause};
use super::{PATIENCE, seconds};
use crate::table::Table;

/// The time without a controller: longer than the gateways' leases (15 s) and the deadlines that follow from them.
const WITHOUT: Duration = Duration::from_secs(17);
/// The longest pause that goes unnoticed.
const UNNOTICED: Duration = Duration::from_secs(1);

/// Kills the only controller, and later starts another one.
pub fn show(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "The controller dies",
        "The only controller is killed with `kill -9`. It plans, but no packet passes through it. For 17 s, longer than \
         any lease lasts, the 100 connections keep streaming and new ones are opened at the usual rate. Then a new \
         controller starts. It finds everything in the objects and moves nothing.",
    );
    let epochs = epochs(show)?;
    let watch = Watch::start(show.server())?;
    show.streams()?.wait_progress(5)?;
    show.streams()?.reset_pauses();
    let trickles = super::gateway::start_trickles(show)?;
    show.lab.controller(CONTROLLER).kill()?;
    // Each pod opens a hundred connections per second.
    let wanted = WITHOUT.as_secs() as usize * 90;
    show.screen.wait("run without a controller", || {
        wait_for("new connections", PATIENCE, || Ok(trickles.iter().all(|trickle| trickle.opened() >= wanted))).ok();
        Ok(())
    })?;
    let streams = show.streams()?;
    streams.wait_progress(5)?;
    let all = streams.all();
    let flows = super::gateway::finish_trickles(show, trickles)?;
    let allowed = show.egress_addresses()?;
    show.sightings.add(&watch.finish(&allowed)?);

    let leader = |show: &Show| show.lab.manifests().written("Lease", "spillway-controller");
    let old = leader(show);
    show.lab.start_controller(CONTROLLER, &show.controller.clone())?;
    show.screen.wait("a new controller takes over", || {
        wait_for("the new controller leads", PATIENCE, || Ok(holder(leader(show)) != holder(old.clone())))
    })?;
    show.streams()?.wait_progress(20)?;
    let (later, still) = (self::epochs(show)?, show.streams()?.all());

    let (opened, waited, failed) = counts(&flows);
    let pause = longest_pause(&all, |_| true);
    let mut table = Table::new(&["without a controller", ">all", ">of these"]);
    table.row(["streaming connections, and those still intact", &all.len().to_string(), &intact(&all).to_string()]);
    table.row(["new connections, and those opened at once", &flows.len().to_string(), &opened.to_string()]);
    let moved = later.iter().filter(|(ip, epoch)| epochs.get(ip) != Some(epoch)).count();
    table.row(["egress IPs, and those that moved", &epochs.len().to_string(), &moved.to_string()]);
    show.screen.table(&table);
    show.claim(
        "nothing stops without a controller",
        intact(&all) == all.len() && pause <= UNNOTICED && waited + failed == 0,
        format!("{} connections stream, all new ones open at once", all.len()),
        format!(
            "{} stream (longest pause {}), {opened} of {} new ones opened at once",
            intact(&all),
            seconds(pause),
            flows.len()
        ),
    );
    show.claim(
        "a new controller moves nothing",
        moved == 0 && intact(&still) == still.len(),
        "no egress IP moved, no connection lost",
        format!("{moved} egress IPs moved, {} connections lost", still.len() - intact(&still)),
    );
    Ok(())
}

/// Returns the number of times that each egress IP has moved so far.
fn epochs(show: &Show) -> Result<BTreeMap<IpAddr, u64>> {
    Ok(show.lab.manifests().egress_ips()?.into_iter().map(|one| (one.address, one.epoch)).collect())
}

/// Returns the line of a lease that names its holder.
fn holder(lease: Option<String>) -> Option<String> {
    lease?.lines().find(|line| line.trim_start().starts_with("holderIdentity")).map(str::to_owned)
}
