//! Gateways, controllers and the API server die, freeze and come back.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::cluster::{ClusterPod, SERVERS};
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Capture, Trace, wait_for, wait_until};

use crate::Test;
use crate::world::{PATIENCE, World, egress};

pub const TESTS: &[Test] = &[
    ("failures::the_leading_controller_dies_in_the_middle_of_a_change", the_leader_dies),
    ("failures::the_api_server_is_away_for_a_minute", the_api_server_is_away),
    ("failures::a_gateway_is_frozen_and_thaws", a_gateway_is_frozen),
    ("failures::a_gateway_is_cut_off_and_comes_back", a_gateway_is_cut_off),
    ("failures::a_gateway_dies", a_gateway_dies),
];

const HOSTS: std::ops::RangeInclusive<u8> = 10..=12;
const COUNT: usize = 3;
/// Connections of each pod.
const EACH: usize = 20;

/// Pods, a policy in force, connections that go on, and what passes outside.
struct Load {
    pods: Vec<ClusterPod>,
    target: SocketAddr,
    server: TcpServer,
    clients: Vec<TcpClients>,
    captures: Vec<Capture>,
    owners: BTreeMap<IpAddr, (String, u64)>,
}

impl Load {
    fn start(world: &World) -> Result<Load> {
        let pods = world.deploy("web", 3)?;
        // One address is spare.
        world.pool("public", *HOSTS.start(), *HOSTS.end() + 1)?;
        world.policy("web", "web", "203.0.113.0/24", COUNT)?;
        for pod in &pods {
            world.wait_sources(pod, 0, &egress(HOSTS))?;
        }
        // Every gateway has one: owners settle before anything is done to them.
        let spread = |owners: &BTreeMap<IpAddr, (String, u64)>| {
            owners.len() == COUNT && owners.values().map(|(node, _)| node).collect::<BTreeSet<_>>().len() == COUNT
        };
        let owners = wait_until("each gateway has one egress IP", PATIENCE, || world.owners(), spread)?;
        let outside = world.outside()?;
        let target = SocketAddr::new(SERVERS[0].parse()?, 80);
        let server = TcpServer::start(&outside, &[target], ServerMode::Stream)?;
        let captures = vec![Capture::start(&outside, "ext")?, Capture::start(&outside, "nodes")?];
        let options = || TcpOptions { interval: Duration::from_millis(50), ..TcpOptions::default() };
        let clients = pods
            .iter()
            .map(|pod| TcpClients::establish(&pod.ns, target, EACH, options()))
            .collect::<Result<Vec<_>>>()?;
        for clients in &clients {
            clients.wait_progress(3, PATIENCE)?;
        }
        Ok(Load { pods, target, server, clients, captures, owners })
    }

    /// An egress IP that carries connections, and its gateway.
    fn busy(&self) -> Result<(IpAddr, String)> {
        let used: BTreeSet<IpAddr> = self.server.connections().iter().map(|one| one.peer.ip()).collect();
        let found = self.owners.iter().find(|(address, _)| used.contains(address)).context("no connection")?;
        Ok((*found.0, found.1.0.clone()))
    }

    fn progress(&self) -> Result<()> {
        self.clients.iter().try_for_each(|clients| clients.wait_progress(5, PATIENCE))
    }

    /// All connections are whole, and no packet had another address; what was captured outside.
    fn finish(self) -> Result<Trace> {
        for clients in self.clients {
            let reports = clients.close()?;
            let broken: Vec<_> = reports.iter().filter(|one| !one.intact()).collect();
            ensure!(broken.is_empty(), "{} of {EACH} connections broke: {:?}", broken.len(), broken.first());
        }
        let mut external = None;
        for capture in self.captures {
            let trace = capture.finish()?;
            let strangers = trace.strangers_towards(self.target.ip(), &egress(HOSTS));
            ensure!(strangers.is_empty(), "packets with other addresses: {strangers:?}");
            external.get_or_insert(trace);
        }
        external.context("nothing was captured")
    }
}

/// After `moved`, one gateway alone claims the address.
fn one_claims(trace: &Trace, address: IpAddr, moved: Instant) -> Result<()> {
    let claims: Vec<[u8; 6]> = trace
        .since(moved)
        .packets()
        .iter()
        .filter_map(|packet| packet.claim())
        .filter(|(claimed, _)| *claimed == address)
        .map(|(_, mac)| mac)
        .collect();
    let macs: BTreeSet<[u8; 6]> = claims.iter().copied().collect();
    ensure!(macs.len() <= 1, "{address} was claimed by {macs:02x?}");
    Ok(())
}

fn a_gateway_dies(world: &World) -> Result<()> {
    let load = Load::start(world)?;
    let (address, dead) = load.busy()?;
    world.cluster.kill_node(&dead)?;
    // The machine's memory of its programs is not a real machine's: a dead one does not answer any more.
    world.cluster.partition(&dead, true)?;
    let killed = Instant::now();
    world.wait_owners(COUNT, &dead)?;
    eprintln!("a_gateway_dies: owners after {:.2} s", killed.elapsed().as_secs_f64());
    let moved = Instant::now();
    load.progress()?;
    for pod in &load.pods {
        world.wait_sources(pod, 1, &egress(HOSTS))?;
    }
    let trace = load.finish()?;
    one_claims(&trace, address, moved)?;
    // It comes back, and gets its own again.
    world.cluster.partition(&dead, false)?;
    let node = world.cluster.nodes().iter().find(|node| node.name == dead).context("no such node")?;
    world.cluster.start_node(node)?;
    world.cluster.load_image(&world.image)?;
    wait_until(
        "the egress IP is back",
        PATIENCE,
        || world.owners(),
        |owners| owners.get(&address).is_some_and(|(node, _)| *node == dead),
    )?;
    world.wait_installed()
}

fn a_gateway_is_frozen(world: &World) -> Result<()> {
    let load = Load::start(world)?;
    let (address, frozen) = load.busy()?;
    world.cluster.freeze_node(&frozen, true)?;
    let since = Instant::now();
    let result = (|| {
        world.wait_owners(COUNT, &frozen)?;
        eprintln!("a_gateway_is_frozen: owners after {:.2} s", since.elapsed().as_secs_f64());
        load.progress()
    })();
    let moved = Instant::now();
    world.cluster.freeze_node(&frozen, false)?;
    result?;
    back(world, address, &frozen)?;
    load.progress()?;
    let trace = load.finish()?;
    // From the move on until it came back it was silent; then it is the one.
    let until_back = trace.filter(|packet| packet.at < moved);
    one_claims(&until_back, address, moved.checked_sub(Duration::from_millis(500)).unwrap_or(moved))
}

fn a_gateway_is_cut_off(world: &World) -> Result<()> {
    let load = Load::start(world)?;
    let (address, cut) = load.busy()?;
    world.cluster.partition(&cut, true)?;
    let since = Instant::now();
    let result = (|| {
        world.wait_owners(COUNT, &cut)?;
        eprintln!("a_gateway_is_cut_off: owners after {:.2} s", since.elapsed().as_secs_f64());
        load.progress()
    })();
    world.cluster.partition(&cut, false)?;
    result?;
    back(world, address, &cut)?;
    load.progress()?;
    load.finish().map(drop)
}

/// Waits until an egress IP has gone back.
fn back(world: &World, address: IpAddr, node: &str) -> Result<()> {
    wait_until(
        "the egress IP goes back",
        PATIENCE,
        || world.owners(),
        |owners| owners.get(&address).is_some_and(|(owner, _)| owner == node),
    )
    .map(drop)
}

fn the_api_server_is_away(world: &World) -> Result<()> {
    let load = Load::start(world)?;
    let before = world.owners()?;
    world.cluster.kill_api_server()?;
    let start = Instant::now();
    wait_for("a minute passes", Duration::from_secs(70), || {
        load.progress()?;
        Ok(start.elapsed() > Duration::from_secs(60))
    })?;
    // New connections are opened as before.
    for pod in &load.pods {
        world.wait_sources(pod, 1, &egress(HOSTS))?;
    }
    world.cluster.start_api_server()?;
    // A controller leads again and has looked at everything: a new policy is in force.
    world.leader()?;
    world.policy("later", "web", "203.0.113.8/32", 1)?;
    world.condition("later", "Ready", "True")?;
    load.progress()?;
    let mut after = world.owners()?;
    after.retain(|address, _| before.contains_key(address));
    ensure!(before == after, "nothing moved while nobody could be seen: {before:?} {after:?}");
    let pauses: Vec<Duration> =
        load.clients.iter().flat_map(TcpClients::connections).map(|one| one.longest_pause).collect();
    eprintln!("the_api_server_is_away: longest pause {:?}", pauses.iter().max());
    load.finish().map(drop)
}

fn the_leader_dies(world: &World) -> Result<()> {
    world.pool("public", 10, 60)?;
    for round in 0..3 {
        let leader = world.leader()?;
        let pod = leader.rsplit_once('-').map_or(leader.as_str(), |(pod, _)| pod).to_owned();
        for number in 0..8 {
            world.policy(&format!("r{round}-{number}"), "web", "203.0.113.0/24", 2)?;
            if number == 4 {
                // With writes under way: killed, not asked to end.
                let arguments =
                    ["delete", "pod", "-n", "spillway", &pod, "--grace-period=0", "--force", "--wait=false"];
                world.cluster.kubectl(&arguments)?;
            }
        }
        wait_until("another controller leads", PATIENCE, || world.leader(), |now| *now != leader)?;
        for number in 0..8 {
            world.condition(&format!("r{round}-{number}"), "Ready", "True")?;
        }
        nothing_is_given_out_twice(world, (round + 1) * 16)?;
        world.wait_installed()?;
    }
    Ok(())
}

/// Every policy has addresses of its own, and no block of ports has two holders.
fn nothing_is_given_out_twice(world: &World, addresses: usize) -> Result<()> {
    let ips = world.until("every policy has its addresses", &["egressips"], |list| {
        list["items"].as_array().is_some_and(|items| items.len() == addresses)
    })?;
    for ip in ips["items"].as_array().into_iter().flatten() {
        let users = ip["spec"]["policies"].as_array().map_or(0, Vec::len);
        ensure!(users == 1, "{}: {users} policies", ip["spec"]["address"]);
    }
    let nodes = world.cluster.get(&["egressnodes"])?;
    let mut held = BTreeSet::new();
    for node in nodes["items"].as_array().into_iter().flatten() {
        for leased in node["spec"]["blocks"].as_array().into_iter().flatten() {
            for range in leased["ranges"].as_array().into_iter().flatten() {
                let (first, count) = (range["first"].as_u64().unwrap_or(0), range["count"].as_u64().unwrap_or(0));
                for block in first..first + count {
                    ensure!(
                        held.insert((leased["egressIP"].to_string(), block)),
                        "{} block {block}",
                        leased["egressIP"]
                    );
                }
            }
        }
    }
    Ok(())
}
