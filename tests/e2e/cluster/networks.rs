//! Networks of the cluster that no Node names.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::cluster::ClusterPod;
use lab::traffic::source_at;
use lab::wait_until;

use crate::Test;
use crate::world::{InstalledCluster, PATIENCE, egress};

pub const TESTS: &[Test] =
    &[("networks::pod_net_pods_whose_addresses_no_node_names_are_reached_as_before", unnamed_pods)];

/// Second bytes of the pods' addresses: those of a CNI with its own address management, and of a range that it gets later.
const RANGES: [u8; 2] = [99, 98];
const PORT: u16 = 7000;
/// Longer than the retransmission of a SYN.
const TIMEOUT: Duration = Duration::from_secs(3);

/// docs/failures.md: pod-net.
fn unnamed_pods(world: &InstalledCluster) -> Result<()> {
    world.cluster.pods_from(Some(RANGES[0]))?;
    let result = are_left_alone(world);
    world.cluster.pods_from(None)?;
    result
}

fn are_left_alone(world: &InstalledCluster) -> Result<()> {
    let web = deploy(world, "web", 3, RANGES[0])?;
    let server = deploy(world, "backend", 1, RANGES[0])?.pop().context("a pod")?;
    world.cluster.apply(
        "{apiVersion: v1, kind: Service, metadata: {name: backend}, spec: {selector: {app: backend}, ports: [{port: 7000}]}}",
    )?;
    let service = world.cluster_ip("backend")?;
    let clients: Vec<_> = web.iter().filter(|pod| pod.node != server.node).collect();
    ensure!(clients.len() > 1, "the pods are all on {}", server.node);
    let seen = |to: IpAddr| clients.iter().map(|pod| source(pod, &server, to)).collect::<Result<Vec<_>>>();
    wait_until("the Service leads to its pod", PATIENCE, || Ok(seen(service).ok()), Option::is_some)?;
    let before = (seen(server.ip.into())?, seen(service)?);

    world.pool("public", 10, 10)?;
    world.policy("everything", "web", "0.0.0.0/0", 1)?;
    for pod in &web {
        world.wait_sources(pod, 0, &egress([10]))?;
    }
    let after = (seen(server.ip.into())?, seen(service)?);
    ensure!(after == before, "the pod is seen as {after:?}, and before as {before:?}");
    web.iter().try_for_each(|pod| world.reaches_the_api_server(pod))?;

    world.cluster.pods_from(Some(RANGES[1]))?;
    let late = deploy(world, "late", 1, RANGES[1])?.pop().context("a pod")?;
    for pod in web.iter().filter(|pod| pod.node != late.node) {
        let plain = world.plain(&pod.node);
        let look = || Ok(source(pod, &late, late.ip.into()).ok());
        wait_until("a pod of a new range is reached like any other", PATIENCE, look, |seen| *seen == Some(plain))?;
        world.wait_sources(pod, 0, &egress([10]))?;
    }
    Ok(())
}

/// Deploys pods, and checks that their addresses are in this range.
fn deploy(world: &InstalledCluster, app: &str, count: usize, range: u8) -> Result<Vec<ClusterPod>> {
    let pods = world.deploy(app, count)?;
    let others: Vec<_> = pods.iter().filter(|pod| pod.ip.octets()[..2] != [10, range]).collect();
    ensure!(others.is_empty(), "not of the range 10.{range}.0.0/16: {others:?}");
    Ok(pods)
}

/// Returns the source address that the pod `server` sees of `pod`, which connects to it at `to`.
fn source(pod: &ClusterPod, server: &ClusterPod, to: IpAddr) -> Result<IpAddr> {
    let [to, own] = [to, server.ip.into()].map(|ip| SocketAddr::new(ip, PORT));
    source_at(&pod.ns, to, &server.ns, own, TIMEOUT)
}
