//! What Spillway writes to the API server, and what agents read there, according to its audit log.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::{stays, wait_for, wait_until};
use serde_json::Value;

use crate::Test;
use crate::world::InstalledCluster;

pub const TESTS: &[Test] = &[
    ("writes::a_cluster_at_rest_renews_the_leases_of_carriers_and_nothing_else", at_rest),
    ("writes::first_pod_of_an_application_on_a_node_costs_one_write_and_its_count", a_pod_more),
    ("writes::agents_follow_the_objects_of_gateways_and_their_own_and_gateways_follow_all", agents_follow),
];

/// The duration of the count.
const COUNTED: Duration = Duration::from_secs(60);
/// After this time without other writes everything is settled: agents delay reports that nothing waits for by up to 30 s.
const SETTLED: Duration = Duration::from_secs(35);
/// The same for a new pod: some writes are immediate, and the numbers of pods follow after 5 s.
const QUIET: Duration = Duration::from_secs(10);
/// Leases are renewed every 5 s. There may be one renewal more or less, depending on where the minute begins. With an
/// interval of 0.5 s there were 120.
const RENEWALS: std::ops::RangeInclusive<usize> = 11..=13;

/// Returns the events of the audit log from a byte offset on.
fn events(world: &InstalledCluster, from: usize) -> Result<Vec<Value>> {
    let mut log = File::open(world.cluster.dir().join("audit.log"))?;
    log.seek(SeekFrom::Start(from.try_into()?))?;
    let mut bytes = Vec::new();
    log.read_to_end(&mut bytes)?;
    Ok(bytes.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

/// Returns how often Spillway has written each object, from a byte offset of the audit log on.
fn written(world: &InstalledCluster, from: usize) -> Result<BTreeMap<String, usize>> {
    let mut written = BTreeMap::new();
    for event in events(world, from)? {
        let (verb, object) = (event["verb"].as_str().unwrap_or_default(), &event["objectRef"]);
        if matches!(verb, "create" | "update" | "patch" | "delete") && object["resource"] != "serviceaccounts" {
            let text = |field: &str| object[field].as_str().unwrap_or_default();
            let status = if object["subresource"] == "status" { "/status" } else { "" };
            *written.entry(format!("{verb} {}/{}{status}", text("resource"), text("name"))).or_default() += 1;
        }
    }
    Ok(written)
}

fn size(world: &InstalledCluster) -> Result<usize> {
    Ok(std::fs::metadata(world.cluster.dir().join("audit.log"))?.len().try_into()?)
}

/// Waits until Spillway has made only `usual` writes for this long.
fn wait_quiet(world: &InstalledCluster, length: Duration, usual: impl Fn(&str) -> bool) -> Result<()> {
    let mut quiet = (Instant::now(), size(world)?);
    wait_for("nothing unusual is written", Duration::from_secs(200), || {
        if written(world, quiet.1)?.keys().any(|write| !usual(write)) {
            quiet = (Instant::now(), size(world)?);
        }
        Ok(quiet.0.elapsed() >= length)
    })
}

/// An application that runs on two workers gets a pod on the third. Three gateways carry its two egress IPs, and none
/// of them writes anything: their answers to probes confirm the new leases.
fn a_pod_more(world: &InstalledCluster) -> Result<()> {
    let is_lease = |write: &str| write.contains(" leases/");
    world.cluster.apply(
        "{apiVersion: spillway.io/v1beta1, kind: EgressIPPool, metadata: {name: public}, spec: {
           ipRanges: [{start: 192.0.2.10, end: 192.0.2.11}], nodeSelector: {matchLabels: {egress: 'true'}}, carriers: 3}}",
    )?;
    world.policy("web", "web", "203.0.113.0/24", 2)?;
    let first = world.deploy("web", 2)?;
    let addresses = [IpAddr::from([192, 0, 2, 10]), IpAddr::from([192, 0, 2, 11])];
    world.wait_sources(&first[0], 0, &addresses)?;
    world.condition("web", "Ready", "True")?;
    wait_quiet(world, SETTLED, is_lease)?;
    let from = size(world)?;
    let pods = world.deploy("web", 3)?;
    let new =
        pods.iter().find(|pod| first.iter().all(|old| old.node != pod.node)).context("a pod on the third worker")?;
    world.wait_sources(new, 0, &addresses)?;
    wait_quiet(world, QUIET, is_lease)?;
    let mut written = written(world, from)?;
    written.retain(|write, _| !is_lease(write));
    // A node that now has more than twice its share of blocks returns some, which does not matter here. The new node
    // may already report how full its blocks are.
    let gives_back = |write: &str| first.iter().any(|pod| write.contains(&format!("/{}", pod.node)));
    written.retain(|write, _| !gives_back(write) && *write != format!("update egressnodes/{}/status", new.node));
    // Blocks that others return may be leased to the new node in a second write.
    let lease = written.remove(&format!("update egressnodes/{}", new.node));
    ensure!(matches!(lease, Some(1 | 2)), "{} is leased blocks in {lease:?} writes", new.node);
    let mut counts = vec!["patch egressgatewaypolicies/web/status".to_owned()];
    counts.extend(addresses.map(|address| format!("update egressips/{address}/status")));
    ensure!(written == counts.iter().map(|write| (write.clone(), 1)).collect(), "{written:?} instead of {counts:?}");
    Ok(())
}

/// Returns the number of requests that the API server has served by our FlowSchema, which puts leases ahead of all lists.
fn served_as_leases(world: &InstalledCluster) -> Result<usize> {
    let metrics = world.cluster.kubectl(&["get", "--raw", "/metrics"])?;
    let ours = |line: &&str| {
        line.starts_with("apiserver_flowcontrol_dispatched_requests_total{")
            && line.contains(r#"flow_schema="spillway-leases""#)
            && line.contains(r#"priority_level="leader-election""#)
    };
    let counts = metrics.lines().filter(ours).filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok());
    Ok(counts.sum())
}

/// Uses a pool that selects every node, and an egress IP with two carriers.
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
    // After that, the effects of earlier tests are settled.
    wait_quiet(world, SETTLED, |write| expected.contains(write))?;
    let (from, served) = (size(world)?, served_as_leases(world)?);
    stays("only leases are renewed", COUNTED, || {
        let written = written(world, from)?;
        ensure!(written.keys().all(|write| expected.contains(write)), "written: {written:?}, expected: {expected:?}");
        Ok(true)
    })?;
    let written = written(world, from)?;
    ensure!(written.keys().eq(&expected), "written at rest: {written:?}, expected {expected:?}");
    ensure!(written.values().all(|count| RENEWALS.contains(count)), "renewals in a minute: {written:?}");
    // One of the two counts may begin and end a renewal later than the other.
    let (served, renewals) = (served_as_leases(world)? - served, written.values().sum::<usize>());
    ensure!(served.abs_diff(renewals) <= expected.len(), "{served} of {renewals} renewals are served as leases");
    Ok(())
}

/// Returns the nodes whose agents have listed EgressNodes since a byte offset of the audit log, and whether each listed all.
fn listed(world: &InstalledCluster, from: usize) -> Result<BTreeMap<String, bool>> {
    let mut listed = BTreeMap::new();
    for event in events(world, from)? {
        let node = event.pointer("/user/extra/authentication.kubernetes.io~1node-name/0").and_then(Value::as_str);
        let is_agent = event["user"]["username"] == "system:serviceaccount:spillway:spillway-agent";
        let is_list = event["verb"] == "list" && event["objectRef"]["resource"] == "egressnodes";
        if let Some(node) = node.filter(|_| is_agent && is_list) {
            let all = event["requestURI"].as_str().is_some_and(|uri| !uri.contains("Selector="));
            *listed.entry(node.to_owned()).or_default() |= all;
        }
    }
    Ok(listed)
}

/// Three of six nodes, the gateways, carry the egress IP.
fn agents_follow(world: &InstalledCluster) -> Result<()> {
    let pods = world.deploy("web", 2)?;
    world.pool("public", 10, 10)?;
    world.policy("web", "web", "203.0.113.0/24", 1)?;
    world.condition("web", "Ready", "True")?;
    let from = size(world)?;
    world.roll_out("daemonset/spillway-agent")?;
    let gateways = |list: &Value| -> BTreeSet<String> {
        let carriers =
            list["items"].as_array().into_iter().flatten().filter_map(|ip| ip["status"]["carriers"].as_array());
        carriers.flatten().filter_map(Value::as_str).map(ToOwned::to_owned).collect()
    };
    let gateways = gateways(&world.cluster.get(&["egressips"])?);
    let nodes = world.cluster.nodes();
    let every_agent = |listed: &BTreeMap<String, bool>| nodes.iter().all(|node| listed.contains_key(&node.name));
    let listed = wait_until("every agent has listed EgressNodes", COUNTED, || listed(world, from), every_agent)?;
    let follow_all: BTreeSet<String> = listed.into_iter().filter(|(_, all)| *all).map(|(node, _)| node).collect();
    ensure!(!gateways.is_empty() && follow_all == gateways, "{follow_all:?} follow all, and {gateways:?} are gateways");
    world.wait_sources(&pods[0], 0, &[IpAddr::from([192, 0, 2, 10])])
}
