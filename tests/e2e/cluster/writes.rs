//! What a cluster at rest writes to the API server, counted in its audit log.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lab::wait_for;
use serde_json::Value;

use crate::Test;
use crate::world::InstalledCluster;

pub const TESTS: &[Test] = &[("writes::a_cluster_at_rest_renews_the_leases_of_carriers_and_nothing_else", at_rest)];

/// How long is counted.
const COUNTED: Duration = Duration::from_secs(60);
/// Leases are renewed each 5 s; where the minute begins and ends decides on one more. With 0.5 s it was 120.
const RENEWALS: std::ops::RangeInclusive<usize> = 11..=13;

/// What Spillway has written, from a byte of the audit log on: how often each object.
fn written(world: &InstalledCluster, from: usize) -> Result<BTreeMap<String, usize>> {
    let log = std::fs::read_to_string(world.cluster.dir().join("audit.log"))?;
    let mut written = BTreeMap::new();
    for line in log.get(from..).unwrap_or_default().lines() {
        let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
        let (verb, object) = (event["verb"].as_str().unwrap_or_default(), &event["objectRef"]);
        if matches!(verb, "create" | "update" | "patch" | "delete") && object["resource"] != "serviceaccounts" {
            let text = |field: &str| object[field].as_str().unwrap_or_default();
            *written.entry(format!("{verb} {}/{}", text("resource"), text("name"))).or_default() += 1;
        }
    }
    Ok(written)
}

fn size(world: &InstalledCluster) -> Result<usize> {
    Ok(std::fs::metadata(world.cluster.dir().join("audit.log"))?.len().try_into()?)
}

/// A pool that selects every node, and an egress IP with two carriers.
fn at_rest(world: &InstalledCluster) -> Result<()> {
    world.deploy("web", 2)?;
    world.cluster.apply(
        "{apiVersion: spillway.io/v1beta1, kind: EgressIPPool, metadata: {name: public}, spec: {
           ipRanges: [{start: 192.0.2.10, end: 192.0.2.10}], nodeSelector: {}, carriers: 2}}",
    )?;
    world.policy("web", "web", "203.0.113.0/24", 1)?;
    world.condition("web", "Ready", "True")?;
    let object = world.until("two nodes carry it", &["egressips"], |list| {
        list["items"][0]["status"]["carriers"].as_array().is_some_and(|carriers| carriers.len() == 2)
    })?;
    let carriers = object["items"][0]["status"]["carriers"].as_array().into_iter().flatten();
    let leases = carriers.filter_map(Value::as_str).map(|node| format!("update leases/spillway-gateway-{node}"));
    let mut expected: BTreeSet<String> = leases.collect();
    expected.insert("update leases/spillway-controller".to_owned());
    // What the tests before have left is settled when only leases are written for a while.
    let mut quiet = (Instant::now(), size(world)?);
    wait_for("nothing but leases is written", Duration::from_secs(90), || {
        if written(world, quiet.1)?.keys().any(|write| !expected.contains(write)) {
            quiet = (Instant::now(), size(world)?);
        }
        Ok(quiet.0.elapsed() >= Duration::from_secs(10))
    })?;
    let (from, start) = (size(world)?, Instant::now());
    wait_for("a minute passes", COUNTED * 2, || Ok(start.elapsed() >= COUNTED))?;
    let written = written(world, from)?;
    ensure!(written.keys().eq(&expected), "written at rest: {written:?}, expected {expected:?}");
    ensure!(written.values().all(|count| RENEWALS.contains(count)), "renewals in a minute: {written:?}");
    Ok(())
}
