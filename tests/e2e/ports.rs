//! Source ports: none is used twice, no packet leaks when they run out, and they come back.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Result, ensure};
use lab::traffic::{
    ConnectRate, LoadServer, Protocol, RunningRate, ServerAnswer, spray, syns_retransmitted, with_nice,
};
use lab::{Capture, Family, Lab, Pod, PodSpec, Server, StartOptions, Trace, wait_for, wait_until};
use serde_json::Value;

use crate::support::{
    PATIENCE, calm, counter, drops, egress, has_bpftool, settings, start, start_with, wait_counter, wait_in_force, web,
    web_pod_with,
};

/// A port of the server on which nothing listens.
pub const TARGET: u16 = 4242;
/// The number of packets that are sent before the server must have seen them.
const BATCH: usize = 1000;

/// Makes the server ignore datagrams for [`TARGET`]: nothing comes back, so flows stay half open.
pub fn deafen(server: &Server) -> Result<()> {
    server.ns.nft(&format!(
        "table inet deaf {{\nchain input {{\ntype filter hook input priority 0\nudp dport {TARGET} drop\n}}\n}}"
    ))
}

fn is_ours(packet: &lab::Packet, target: SocketAddr) -> bool {
    !packet.outgoing && packet.ports().is_some_and(|(_, to)| to == target)
}

/// Sends one packet from each of `ports` of a pod, no faster than they arrive. Fails if one does not arrive.
fn send_all(pod: &Pod, protocol: Protocol, ports: Range<u16>, target: SocketAddr, capture: &Capture) -> Result<()> {
    let family = if target.is_ipv4() { Family::V4 } else { Family::V6 };
    let ports: Vec<u16> = ports.collect();
    for batch in ports.chunks(BATCH) {
        let before = capture.count(|packet| is_ours(packet, target));
        spray(&pod.ns, protocol, pod.ips.ip(family), batch.iter().copied(), target)?;
        let arrived = || Ok(capture.count(|packet| is_ours(packet, target)) - before);
        wait_until("a packet of every flow", PATIENCE, arrived, |count| *count >= batch.len())?;
    }
    Ok(())
}

/// Returns the translated sources of all packets to `target`, and the number of packets.
fn translated(trace: &Trace, target: SocketAddr) -> (BTreeSet<SocketAddr>, usize) {
    let mine = trace.filter(|packet| is_ours(packet, target));
    let sources = mine.packets().iter().filter_map(lab::Packet::ports).map(|(source, _)| source).collect();
    (sources, mine.packets().len())
}

/// Makes UDP flows expire after a tick instead of minutes, by writing to the pinned settings of a node whose agent is dead.
pub fn expire_udp_at_once(lab: &Lab, node: &str) -> Result<()> {
    /// The offset of `udp` in the settings, in bytes.
    const UDP: usize = 32;
    let mut bytes = settings(lab, node)?;
    ensure!(bytes.len() == 76, "the settings have another layout: {bytes:?}");
    bytes[UDP..UDP + 4].copy_from_slice(&1u32.to_le_bytes());
    let value: Vec<String> = bytes.iter().map(u8::to_string).collect();
    let map = lab.pins(node).join("maps/CONFIG");
    let update = format!("bpftool map update pinned {} key 0 0 0 0 value {}", map.display(), value.join(" "));
    lab.node(node).ns.sh(&update).map(drop)
}

fn with_two_pods(options: &StartOptions, test: impl FnOnce(&mut Lab, [Pod; 2], Server) -> Result<()>) {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let pods = [
            lab.add_pod(PodSpec::new("a", "worker1").label("app", "web"))?,
            lab.add_pod(PodSpec::new("b", "worker1").label("app", "web"))?,
        ];
        start_with(lab, options)?;
        let server = lab.server("server1").clone();
        deafen(&server)?;
        for pod in &pods {
            wait_in_force(pod, &server, &[10])?;
        }
        test(lab, pods, server)
    });
}

/// docs/failures.md: port-search. Two pods use the same source ports. Together they use four fifths of the first lease
/// towards one destination; no packet is lost and no port is used twice.
#[test]
fn port_search_finds_every_free_port_and_uses_none_twice() {
    with_two_pods(&calm(), |lab, pods, server| {
        for family in Family::BOTH {
            let target = server.ips.at(family, TARGET);
            let capture = Capture::start(&server.ns, "eth0")?;
            for pod in &pods {
                send_all(pod, Protocol::Udp, 20_000..32_000, target, &capture)?;
            }
            let trace = capture.finish()?;
            let (sources, packets) = translated(&trace, target);
            assert_eq!((sources.len(), packets), (24_000, 24_000));
            assert!(sources.iter().all(|source| egress(family, &[10])[0] == source.ip() && source.port() >= 1024));
            assert!(trace.unexpected_sources_towards(target.ip(), &egress(family, &[10])).is_empty());
        }
        assert_eq!(counter(lab, "worker1", "drop_no_port")?, 0);
        Ok(())
    });
}

/// docs/failures.md: fail-open, port-leak. All ports of the egress IP are in use. A flow that finds none is dropped and
/// counted, and does not leave with another address. Once flows have expired, their ports can be used again.
#[test]
fn flow_without_a_port_is_dropped_and_counted_and_ports_come_back() {
    lab::require_root!();
    lab::require!(has_bpftool(), "bpftool is missing: apt-get install bpftool");
    let options = calm();
    with_two_pods(&options, |lab, pods, server| {
        let target = server.ips.at(Family::V4, TARGET);
        let capture = Capture::start(&server.ns, "eth0")?;
        let before = counter(lab, "worker1", "drop_no_port")?;
        for pod in &pods {
            // In sum, more flows than there are ports.
            for first in (1024..60_000).step_by(BATCH) {
                spray(&pod.ns, Protocol::Udp, pod.ips.v4.into(), first..first + BATCH as u16, target)?;
            }
        }
        wait_counter(lab, "worker1", "drop_no_port", before)?;
        let trace = capture.finish()?;
        let strangers = trace.unexpected_sources_towards(target.ip(), &egress(Family::V4, &[10]));
        assert!(strangers.is_empty(), "{:?}", strangers.keys());
        let (sources, packets) = translated(&trace, target);
        assert_eq!(sources.len(), packets, "a port was used twice");
        assert!(sources.len() > 20_000, "{}", sources.len());
        // Other destinations are not affected: the ports are free there.
        wait_in_force(&pods[0], lab.server("far1"), &[10])?;

        // Idle flows expire without the agent.
        lab.agent("worker1").kill()?;
        expire_udp_at_once(lab, "worker1")?;
        let capture = Capture::start(&server.ns, "eth0")?;
        let mut port = 61_000;
        wait_for("a new flow finds a port", PATIENCE * 2, || {
            port += 1;
            spray(&pods[0].ns, Protocol::Udp, pods[0].ips.v4.into(), [port], target)?;
            let again = |packet: &lab::Packet| is_ours(packet, target);
            Ok(capture.wait_for("the flow", std::time::Duration::from_millis(200), again).is_ok())
        })?;
        let trace = capture.finish()?;
        assert!(trace.unexpected_sources_towards(target.ip(), &egress(Family::V4, &[10])).is_empty());
        Ok(())
    });
}

/// docs/failures.md: port-leak. Refused connections release their ports immediately: several times more connections
/// than ports go to one destination, without waiting for any timeout.
#[test]
fn port_leak_closed_connections_give_their_ports_back() {
    with_two_pods(&calm(), |lab, pods, server| {
        let target = server.ips.at(Family::V4, TARGET);
        let before = counter(lab, "worker1", "drop_no_port")?;
        for round in 0..2 {
            for pod in &pods {
                let capture = Capture::start(&server.ns, "eth0")?;
                let first = 2_000 + round * 30_000;
                send_all(pod, Protocol::Syn, first..first + 29_000, target, &capture)?;
                let trace = capture.finish()?;
                assert_eq!(translated(&trace, target).1, 29_000);
                assert!(trace.unexpected_sources_towards(target.ip(), &egress(Family::V4, &[10])).is_empty());
            }
        }
        assert_eq!(counter(lab, "worker1", "drop_no_port")?, before);
        Ok(())
    });
}

/// Two source nodes share an egress IP: their blocks never overlap.
#[test]
fn two_nodes_never_use_the_same_port_of_an_egress_ip() {
    Lab::builder().workers(2).gateways(1).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let pods = [
            lab.add_pod(PodSpec::new("a", "worker1").label("app", "web"))?,
            lab.add_pod(PodSpec::new("b", "worker2").label("app", "web"))?,
        ];
        start(lab)?;
        let server = lab.server("server1").clone();
        deafen(&server)?;
        for pod in &pods {
            wait_in_force(pod, &server, &[10])?;
        }
        for family in Family::BOTH {
            let target = server.ips.at(family, TARGET);
            let capture = Capture::start(&server.ns, "eth0")?;
            for pod in &pods {
                send_all(pod, Protocol::Udp, 20_000..28_000, target, &capture)?;
            }
            let trace = capture.finish()?;
            let (sources, packets) = translated(&trace, target);
            assert_eq!((sources.len(), packets), (16_000, 16_000));
            assert!(trace.unexpected_sources_towards(target.ip(), &egress(family, &[10])).is_empty());
        }
        Ok(())
    });
}

/// docs/failures.md: slow-count. An agent extends the deadline until which its node answers, even if a count takes longer than that.
#[test]
fn slow_count_of_a_large_flow_table_lets_no_deadline_pass() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        // The deadline is the default one.
        let config = "maxFlows: 600000\nprobe: {interval: 500ms, count: 10}\nlease: {renew: 1s, duration: 20s}\n";
        web_pod_with(lab, &[10], &StartOptions::new().config(config))?;
        let maps = lab.pins("gw1").join("maps");
        lab.agent("gw1").freeze()?;
        for family in ["V4", "V6"] {
            lab::bpf::fill_map(&maps.join(format!("FLOWS_{family}")), 500_000)?;
        }
        lab.agent("gw1").thaw()?;
        let left = || {
            let now = Duration::from(nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?);
            Ok(Duration::from_nanos(lab::bpf::first_number(&maps.join("DEADLINE"))?).checked_sub(now))
        };
        wait_until("the agent is at work again", PATIENCE, left, Option::is_some)?;
        // These calls take long enough for a count.
        for _ in 0..100 {
            lab.egressctl("gw1", &["stats"])?;
            ensure!(left()?.is_some(), "the deadline has passed: no gateway answers for the egress IP");
        }
        Ok(())
    });
}

/// docs/failures.md: port-share. One pod repeatedly opens flows to one server from all of its ports; another pod on its
/// node still reaches that server.
#[test]
fn port_share_one_pod_does_not_take_all_ports_towards_a_server() {
    with_two_pods(&calm(), |lab, [flooder, other], server| {
        for family in Family::BOTH {
            let target = server.ips.at(family, TARGET);
            let before = counter(lab, "worker1", "drop_port_share")?;
            for _ in 0..3 {
                for first in (1024..64_000u16).step_by(BATCH) {
                    let ports = first..first + BATCH as u16;
                    spray(&flooder.ns, Protocol::Udp, flooder.ips.ip(family), ports, target)?;
                }
            }
            let capture = Capture::start(&server.ns, "eth0")?;
            send_all(&other, Protocol::Udp, 20_000..22_000, target, &capture)?;
            capture.finish()?;
            wait_counter(lab, "worker1", "drop_port_share", before)?;
        }
        Ok(())
    });
}

/// Returns the number of blocks of each egress IP that are leased to a node, according to its EgressNode.
fn leased(lab: &Lab, node: &str) -> Result<BTreeMap<IpAddr, u64>> {
    let object: Value = serde_saphyr::from_str(&lab.manifests().written("EgressNode", node).unwrap_or_default())?;
    let of_address = |one: &Value| {
        let counts = one["ranges"].as_array()?.iter().filter_map(|range| range["count"].as_u64());
        Some((one["egressIP"].as_str()?.parse().ok()?, counts.sum()))
    };
    Ok(object["spec"]["blocks"].as_array().into_iter().flatten().filter_map(of_address).collect())
}

/// Runs a test with this many source nodes, each with a web pod, and three egress IPs in force for all of them.
fn with_source_nodes(count: u8, test: impl FnOnce(&mut Lab, &[Pod], Server) -> Result<()>) {
    Lab::builder().workers(count).gateways(2).alone().run(|lab| {
        lab.manifests().write("web", &web(&RAMP_IPS))?;
        let nodes = (1..=count).map(|n| format!("worker{n}"));
        let pods = nodes.map(|node| lab.add_pod(PodSpec::new(&format!("on-{node}"), &node).label("app", "web")));
        let pods = pods.collect::<Result<Vec<Pod>>>()?;
        start(lab)?;
        let server = lab.server("server1").clone();
        pods.iter().try_for_each(|pod| wait_in_force(pod, &server, &RAMP_IPS))?;
        test(lab, &pods, server)
    });
}

/// The egress IPs of the ramp.
const RAMP_IPS: [u8; 3] = [10, 11, 12];
/// Connections per second of the ramp.
const RAMP_RATE: u32 = 10_000;
/// The lifetime of each connection: as many ports are in use as connections are opened in this time.
const RAMP_HOLD: Duration = Duration::from_secs(1);
/// The total number of connections.
const RAMP: u64 = 60_000;
/// Gives both ends of the ramp priority over the nodes on the same machine: in reality, each has its own processors.
const RAMP_NICE: i32 = -5;

/// docs/failures.md: port-ramp. One of ten source nodes that share three egress IPs ramps up from zero to 10,000
/// connections per second to one server. Within a second it needs more ports than it has.
#[test]
fn port_ramp_a_node_is_leased_ports_before_it_needs_them_and_gives_them_back() {
    const NODES: u8 = 10;
    /// The number of blocks of an egress IP that each node can count on: its share of half of the blocks.
    const SHARE: u64 = 1008 / 2 / NODES as u64;
    with_source_nodes(NODES, |lab, pods, server| {
        let target = server.ips.at(Family::V4, TARGET);
        let _server = with_nice(RAMP_NICE, || LoadServer::start(&server.ns, &[target], ServerAnswer::Close))?;
        let ips = egress(Family::V4, &RAMP_IPS);
        let within =
            |held: &BTreeMap<IpAddr, u64>, most: u64| ips.iter().all(|ip| held.get(ip).is_some_and(|n| *n <= most));
        let (busy, neighbors) = (&pods[0], &pods[1..]);
        let seen = |lab: &Lab| -> Result<Vec<_>> {
            let of = |pod: &Pod| Ok((leased(lab, &pod.node)?, drops(lab, &pod.node)?));
            neighbors.iter().map(of).collect()
        };
        for pod in pods {
            let what = format!("{} has its share", pod.node);
            wait_until(&what, PATIENCE, || leased(lab, &pod.node), |held| within(held, 2 * SHARE))?;
        }
        let repeated = |pods: &[Pod]| pods.iter().map(|pod| syns_retransmitted(&pod.ns)).sum::<Result<u64>>();
        let before = (seen(lab)?, repeated(&pods[..1])?, repeated(neighbors)?);

        let steady = ConnectRate { per_second: 10, timeout: PATIENCE, ..ConnectRate::default() };
        let steady = neighbors.iter().map(|pod| steady.start(&pod.ns, target)).collect::<Result<Vec<_>>>()?;
        let ramp = ConnectRate {
            per_second: RAMP_RATE,
            concurrency: 2_048,
            total: RAMP,
            timeout: Duration::from_secs(10),
            hold: RAMP_HOLD,
            ..ConnectRate::default()
        };
        // With this many source ports, the kernel finds a free one immediately.
        busy.ns.sh("sysctl -qw net.ipv4.ip_local_port_range='1024 65535'")?;
        let ramp = with_nice(RAMP_NICE, || ramp.start(&busy.ns, target))?;
        let grown = |held: &BTreeMap<IpAddr, u64>| ips.iter().all(|ip| held.get(ip).is_some_and(|n| *n > 2 * SHARE));
        wait_until("more blocks than an idle node keeps", PATIENCE, || leased(lab, &busy.node), grown)?;
        let ramp = ramp.wait()?;
        let twice = repeated(&pods[..1])? - before.1;
        assert_eq!(ramp.opened + ramp.failures(), RAMP);
        let lost = twice + ramp.failures();
        let drops = drops(lab, &busy.node)?;
        assert!(lost * 100 < RAMP, "{twice} of {RAMP} SYNs were retransmitted: {:?}, {drops:?}", ramp.failed);

        let minute = Duration::from_secs(60);
        wait_until("the blocks are back", minute, || leased(lab, &busy.node), |held| within(held, 2 * SHARE))?;
        let steady = steady.into_iter().map(RunningRate::finish).collect::<Result<Vec<_>>>()?;
        assert!(steady.iter().all(|one| one.opened > 0 && one.failures() == 0), "a neighbour: {steady:?}");
        assert_eq!(seen(lab)?, before.0, "blocks and drops of the neighbours");
        let (opened, twice) = (steady.iter().map(|one| one.opened).sum::<u64>(), repeated(neighbors)? - before.2);
        assert!(twice * 100 < opened, "{twice} of the neighbours' {opened} SYNs were retransmitted");
        Ok(())
    });
}
