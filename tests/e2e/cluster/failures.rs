//! Gateways, controllers and the API server die, freeze and come back.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::cluster::{ClusterPod, SERVERS, processes_with};
use lab::traffic::{Asker, ConnectRate, RunningRate, ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Capture, Trace, stays, wait_for, wait_until};

use crate::Test;
use crate::world::{InstalledCluster, PATIENCE, egress};

/// Tests in which a lease lapses come first: after a silence of the API server, gateways have one more lease duration
/// to renew their leases.
pub const TESTS: &[Test] = &[
    ("failures::a_gateway_is_frozen_and_thaws", a_gateway_is_frozen),
    ("failures::a_gateway_is_cut_off_and_comes_back", a_gateway_is_cut_off),
    ("failures::a_gateway_dies", a_gateway_dies),
    ("failures::the_leading_controller_dies_in_the_middle_of_a_change", the_leader_dies),
    ("failures::the_api_server_is_away_for_a_minute", the_api_server_is_away),
    ("failures::the_api_server_and_etcd_stall_for_ten_seconds", the_api_server_stalls),
];

const HOSTS: std::ops::RangeInclusive<u8> = 10..=12;
const COUNT: usize = 3;
const WORKER: &str = "worker1";
/// Connections of each pod.
const EACH: usize = 20;
/// The time after which new flows avoid a failed gateway.
const RECOVERY: Duration = Duration::from_secs(1);
/// The time after which the controller has assigned egress IPs to other owners: a lease of 15 s has lapsed.
const OWNERS: Duration = Duration::from_secs(25);
/// The interval at which the outside asks for an egress IP; the longest time without an answer once another gateway answers.
const ASK_EVERY: Duration = Duration::from_millis(50);
const UNANSWERED: Duration = Duration::from_secs(1);
/// A gateway that answers alone for this long owns the egress IP. During a change of owner two may answer, because each
/// learns of the change independently.
const SETTLED: Duration = Duration::from_millis(700);
const CONTESTED: Duration = Duration::from_millis(500);

/// Pods, a policy in force, long-lived connections, and captures of the packets outside.
struct Load {
    pods: Vec<ClusterPod>,
    target: SocketAddr,
    server: TcpServer,
    clients: Vec<TcpClients>,
    captures: Vec<Capture>,
    asker: Asker,
    owners: BTreeMap<IpAddr, (String, u64)>,
}

impl Load {
    fn start(world: &InstalledCluster) -> Result<Load> {
        let pods = world.deploy("web", 3)?;
        // One address is spare.
        world.pool("public", *HOSTS.start(), *HOSTS.end() + 1)?;
        world.policy("web", "web", "203.0.113.0/24", COUNT)?;
        for pod in &pods {
            world.wait_sources(pod, 0, &egress(HOSTS))?;
        }
        // Every gateway owns one: owners settle before the failures begin.
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
        let asked = [10, 11, 12].map(|host| Ipv4Addr::new(192, 0, 2, host));
        let asker = Asker::start(&outside, "ext", Ipv4Addr::new(192, 0, 2, 1), &asked, ASK_EVERY)?;
        let load = Load { pods, target, server, clients, captures, asker, owners };
        load.owners.keys().try_for_each(|address| load.answered(*address))?;
        Ok(load)
    }

    /// Waits until the gateway that answered first for an address is the only one to answer.
    fn answered(&self, address: IpAddr) -> Result<()> {
        wait_for(&format!("one gateway answers for {address}"), PATIENCE, || {
            let all = terms(&self.captures[0].so_far(), address);
            let last = all.last().filter(|last| last.mac == all[0].mac);
            Ok(last.is_some_and(|last| last.to - last.from > SETTLED))
        })
    }

    /// Returns an egress IP that carries connections, and its owner.
    fn busy(&self) -> Result<(IpAddr, String)> {
        let used: BTreeSet<IpAddr> = self.server.connections().iter().map(|one| one.peer.ip()).collect();
        let found = self.owners.iter().find(|(address, _)| used.contains(address)).context("no connection")?;
        Ok((*found.0, found.1.0.clone()))
    }

    fn progress(&self) -> Result<()> {
        self.clients.iter().try_for_each(|clients| clients.wait_progress(5, PATIENCE))
    }

    /// Checks that all connections continue, until `duration` after `since`.
    fn goes_on(&self, since: Instant, duration: Duration) -> Result<()> {
        stays("connections continue", duration.saturating_sub(since.elapsed()), || self.progress().map(|()| true))
    }

    /// Returns whether all connections are still established, with every record right.
    fn is_intact(&self) -> bool {
        self.clients.iter().flat_map(|clients| clients.connections()).all(|one| one.intact())
    }

    /// Checks what must hold after a gateway has failed at `since`: connections that begin a second later open
    /// normally, the plan has other owners for all egress IPs in time, and established connections continue.
    fn outlives(&self, world: &InstalledCluster, gone: &str, since: Instant) -> Result<()> {
        let target = SocketAddr::new(self.target.ip(), 81);
        let _server = TcpServer::start(&world.outside()?, &[target], ServerMode::Echo)?;
        stays("no connection breaks", RECOVERY.saturating_sub(since.elapsed()), || Ok(self.is_intact()))?;
        let rate =
            ConnectRate { per_second: 50, total: 125, timeout: Duration::from_secs(5), ..ConnectRate::default() };
        let running = self.pods.iter().map(|pod| rate.start(&pod.ns, target)).collect::<Result<Vec<_>>>()?;
        world.wait_owners(COUNT, gone)?;
        let owners = since.elapsed();
        let (mut opened, mut again) = (0, 0);
        for report in running.into_iter().map(RunningRate::wait) {
            let report = report?;
            ensure!(report.failures() == 0, "of {} new connections: {:?}", report.opened, report.failed);
            opened += report.opened;
            // The first SYN is retransmitted after a second.
            again += report.latencies.iter().filter(|latency| **latency > Duration::from_millis(900)).count();
        }
        eprintln!(
            "{gone} gone: other owners after {:.2} s; {again} of {opened} new connections tried again",
            owners.as_secs_f64()
        );
        ensure!(again * 20 <= opened as usize, "{again} of {opened} new connections tried again");
        ensure!(owners <= OWNERS, "other owners only after {owners:?}");
        self.progress()
    }

    /// Checks that all connections are intact, and that no packet had another source address. Returns the packets captured outside.
    fn finish(self) -> Result<Trace> {
        drop(self.asker);
        for clients in self.clients {
            let reports = clients.close()?;
            let broken: Vec<_> = reports.iter().filter(|one| !one.intact()).collect();
            ensure!(broken.is_empty(), "{} of {EACH} connections broke: {:?}", broken.len(), broken.first());
        }
        let mut external = None;
        for capture in self.captures {
            let trace = capture.finish()?;
            let strangers = trace.unexpected_sources_towards(self.target.ip(), &egress(HOSTS));
            ensure!(strangers.is_empty(), "packets with other addresses: {strangers:?}");
            external.get_or_insert(trace);
        }
        external.context("nothing was captured")
    }
}

/// A gateway that answers for an address without interruption, and the time of its first and last answer.
struct Term {
    mac: [u8; 6],
    from: Instant,
    to: Instant,
}

/// Returns the gateways that answered for an address, in order.
fn terms(trace: &Trace, address: IpAddr) -> Vec<Term> {
    let claims = trace.packets().iter().filter_map(|packet| Some((packet.at, packet.claim()?)));
    let mut terms: Vec<Term> = Vec::new();
    for (at, (_, mac)) in claims.filter(|(_, (claimed, _))| *claimed == address) {
        match terms.last_mut().filter(|last| last.mac == mac) {
            Some(last) => last.to = at,
            None => terms.push(Term { mac, from: at, to: at }),
        }
    }
    terms
}

/// Checks that an address moved from its gateway to another one and back, and settled each time. While it moved, there
/// may have been a moment with two gateways that answer, and a moment with none.
fn one_answers(trace: &Trace, address: IpAddr) -> Result<()> {
    let all = terms(trace, address);
    let mut settled: Vec<&Term> = all.iter().filter(|term| term.to - term.from >= SETTLED).collect();
    settled.dedup_by(|next, last| next.mac == last.mac);
    let who: Vec<[u8; 6]> = settled.iter().map(|term| term.mac).collect();
    ensure!(who.len() == 3 && who[0] == who[2], "{who:02x?} answered for {address} in turn");
    let moved = settled[1].from;
    let contested: Duration = all
        .iter()
        .filter(|term| term.from > moved && term.to - term.from < SETTLED)
        .map(|t| t.to - t.from + ASK_EVERY)
        .sum();
    let silent = all.windows(2).filter(|pair| pair[0].from >= moved).map(|pair| pair[1].from - pair[0].to).max();
    let silent = silent.unwrap_or_default();
    eprintln!(
        "{address}: after the move, two gateways answered for {contested:?} in all, and none for at most {silent:?}"
    );
    ensure!(contested <= CONTESTED, "two gateways answered for {contested:?}");
    ensure!(silent <= UNANSWERED, "no gateway answered for {silent:?}");
    Ok(())
}

fn a_gateway_dies(world: &InstalledCluster) -> Result<()> {
    let load = Load::start(world)?;
    let (address, dead) = load.busy()?;
    world.cluster.kill_node(&dead)?;
    // Unlike on a real machine, the programs outlive the node here, so a dead node must be kept from answering.
    world.cluster.partition(&dead, true)?;
    load.outlives(world, &dead, Instant::now())?;
    for pod in &load.pods {
        world.wait_sources(pod, 1, &egress(HOSTS))?;
    }
    // The gateway comes back and regains its own egress IP.
    world.cluster.partition(&dead, false)?;
    let node = world.cluster.nodes().iter().find(|node| node.name == dead).context("no such node")?;
    world.cluster.start_node(node)?;
    world.cluster.load_image(&world.image)?;
    back(world, address, &dead)?;
    load.answered(address)?;
    load.progress()?;
    one_answers(&load.finish()?, address)?;
    world.wait_installed()
}

fn a_gateway_is_frozen(world: &InstalledCluster) -> Result<()> {
    let load = Load::start(world)?;
    let (address, frozen) = load.busy()?;
    world.cluster.freeze_node(&frozen, true)?;
    let result = load.outlives(world, &frozen, Instant::now());
    world.cluster.freeze_node(&frozen, false)?;
    result?;
    back(world, address, &frozen)?;
    load.answered(address)?;
    load.progress()?;
    one_answers(&load.finish()?, address)
}

fn a_gateway_is_cut_off(world: &InstalledCluster) -> Result<()> {
    let load = Load::start(world)?;
    let (address, cut) = load.busy()?;
    world.cluster.partition(&cut, true)?;
    let result = load.outlives(world, &cut, Instant::now());
    world.cluster.partition(&cut, false)?;
    result?;
    back(world, address, &cut)?;
    load.answered(address)?;
    load.progress()?;
    one_answers(&load.finish()?, address)
}

/// Waits until an egress IP is back at its gateway.
fn back(world: &InstalledCluster, address: IpAddr, node: &str) -> Result<()> {
    wait_until(
        "the egress IP goes back",
        PATIENCE,
        || world.owners(),
        |owners| owners.get(&address).is_some_and(|(owner, _)| owner == node),
    )
    .map(drop)
}

/// docs/failures.md: deaf-restart and lapse-order. A gateway's agent is killed meanwhile, and the next agent cannot read objects.
fn the_api_server_is_away(world: &InstalledCluster) -> Result<()> {
    // The kubelet restarts a container immediately only the first time, and a gateway's agent may have died with its node.
    world.roll_out("daemonset/spillway-agent")?;
    let load = Load::start(world)?;
    let before = world.owners()?;
    let (address, node) = load.busy()?;
    // A worker has no lease to renew; it only receives its watches.
    let worker = node_address(world, WORKER)?;
    wait_connected(world, WORKER, worker, true)?;
    world.cluster.kill_api_server()?;
    let start = Instant::now();
    let killed = agent_of(&node)?.context("no agent runs on the gateway")?;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(killed), nix::sys::signal::Signal::SIGKILL)?;
    wait_until("the next agent runs", PATIENCE, || agent_of(&node), |now| now.is_some_and(|now| now != killed))?;
    load.goes_on(start, Duration::from_secs(60))?;
    // New connections are opened as before.
    for pod in &load.pods {
        world.wait_sources(pod, 1, &egress(HOSTS))?;
    }
    wait_connected(world, WORKER, worker, false)?;
    world.cluster.start_api_server()?;
    wait_connected(world, WORKER, worker, true)?;
    // A controller leads again and has read everything if a new policy comes into force.
    world.leader()?;
    world.policy("later", "web", "203.0.113.8/32", 1)?;
    world.condition("later", "Ready", "True")?;
    load.progress()?;
    let mut after = world.owners()?;
    after.retain(|address, _| before.contains_key(address));
    ensure!(before == after, "an egress IP moved while no controller could see the gateways: {before:?} {after:?}");
    let pauses: Vec<Duration> =
        load.clients.iter().flat_map(|clients| clients.connections()).map(|one| one.longest_pause).collect();
    eprintln!("the_api_server_is_away: longest pause {:?}", pauses.iter().max());
    let owners = load.owners.clone();
    let trace = load.finish()?;
    for (address, (owner, _)) in owners {
        let terms = terms(&trace, address);
        let who: BTreeSet<[u8; 6]> =
            terms.iter().filter(|term| term.to - term.from >= SETTLED).map(|term| term.mac).collect();
        ensure!(who.len() == 1, "{who:02x?} answered for {address}, not only {owner}, while no controller could plan");
    }
    let answers = trace.packets().iter().filter(|packet| packet.claim().is_some_and(|(claimed, _)| claimed == address));
    let times: Vec<Instant> = answers.map(|packet| packet.at).collect();
    let silent = times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
    ensure!(silent <= UNANSWERED, "no gateway answered for {address} for {silent:?}");
    Ok(())
}

/// Leases last 15 s and are renewed every 5 s: none lapses, and no gateway is replaced.
fn the_api_server_stalls(world: &InstalledCluster) -> Result<()> {
    let load = Load::start(world)?;
    let before = world.owners()?;
    let (address, _) = load.busy()?;
    world.cluster.freeze_api_server(true)?;
    load.goes_on(Instant::now(), Duration::from_secs(10))?;
    for pod in &load.pods {
        world.wait_sources(pod, 1, &egress(HOSTS))?;
    }
    world.cluster.freeze_api_server(false)?;
    // A controller leads again and has read everything if a new policy comes into force.
    world.policy("later", "web", "203.0.113.8/32", 1)?;
    world.condition("later", "Ready", "True")?;
    load.progress()?;
    let mut after = world.owners()?;
    after.retain(|address, _| before.contains_key(address));
    ensure!(before == after, "an egress IP moved: {before:?} {after:?}");
    let trace = load.finish()?;
    let who: BTreeSet<[u8; 6]> = terms(&trace, address).iter().map(|term| term.mac).collect();
    ensure!(who.len() == 1, "{address} was answered for by {who:02x?}");

    // Connections to a frozen API server stay open, and its watches are as silent as at rest.
    let worker = node_address(world, WORKER)?;
    world.cluster.freeze_api_server(true)?;
    let noticed = wait_connected(world, WORKER, worker, false);
    world.cluster.freeze_api_server(false)?;
    noticed?;
    wait_connected(world, WORKER, worker, true)
}

/// Waits until the metrics of a node's agent show whether the API server answers.
fn wait_connected(world: &InstalledCluster, node: &str, address: IpAddr, connected: bool) -> Result<()> {
    let ns = world.cluster.netns(node)?;
    let metrics = || ns.sh(&format!("curl -s --max-time 5 http://{address}:9473/metrics"));
    let line = format!("spillway_store_connected {}.0", u8::from(connected));
    wait_until("the agent sees whether the API server answers", PATIENCE, metrics, |text| text.contains(&line))
        .map(drop)
}

/// Returns the address in a node's Node object.
fn node_address(world: &InstalledCluster, node: &str) -> Result<IpAddr> {
    let node = world.cluster.get(&["node", node])?;
    let addresses = node["status"]["addresses"].as_array().context("no addresses")?;
    let internal = addresses.iter().find(|address| address["type"] == "InternalIP").context("no InternalIP")?;
    Ok(internal["address"].as_str().context("no text")?.parse()?)
}

/// Returns the process ID of a node's agent.
fn agent_of(node: &str) -> Result<Option<i32>> {
    let is_agent = |process: &PathBuf| {
        let line = std::fs::read_to_string(process.join("cmdline")).unwrap_or_default();
        let mut words = line.split('\0');
        words.next().is_some_and(|program| program.ends_with("egress-daemon")) && words.next() == Some("agent")
    };
    let agent = processes_with(&format!("NODE_NAME={node}"))?.into_iter().find(is_agent);
    Ok(agent.and_then(|process| process.file_name()?.to_str()?.parse().ok()))
}

fn the_leader_dies(world: &InstalledCluster) -> Result<()> {
    world.pool("public", 10, 60)?;
    for round in 0..3 {
        let leader = world.leader()?;
        let pod = leader.rsplit_once('-').map_or(leader.as_str(), |(pod, _)| pod).to_owned();
        for number in 0..8 {
            world.policy(&format!("r{round}-{number}"), "web", "203.0.113.0/24", 2)?;
            if number == 4 {
                // The controller is killed with writes in flight, not told to stop.
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

/// Checks that every policy has its own addresses, and that no block of ports has two holders.
fn nothing_is_given_out_twice(world: &InstalledCluster, addresses: usize) -> Result<()> {
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
