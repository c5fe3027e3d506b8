//! The transports between source nodes and gateways: each carries everything. `Auto` takes the best that works, falls
//! back and returns, without effect on connections.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use lab::traffic::forge::TUNNEL_PORT;
use lab::traffic::{
    BulkServer, ConnectionReport, Direction, Ping, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients,
    UdpOptions, UdpServer, bulk, ping,
};
use lab::{Capture, Family, Lab, Pod, PodSpec, Server, StartOptions, wait_until};

use crate::support::{
    PATIENCE, assert_no_strangers, counter, egress, fixed, wait_counter, wait_in_force, web, web_pod_with,
};

const HOSTS: [u8; 2] = [10, 11];

/// Default probes, so that a transport that stops working is noticed; leases and a deadline that prevent failovers.
fn auto() -> StartOptions {
    StartOptions::new().config("transport: Auto\nlease: {renew: 1s, duration: 20s}\ndeadline: 15s\n")
}

/// Runs a test with one pod under a policy with two egress IPs, in force.
fn with_pod(builder: lab::Builder, options: &StartOptions, test: impl FnOnce(&mut Lab, Pod, Server) -> Result<()>) {
    builder.workers(1).gateways(2).run(|lab| {
        let (pod, server) = web_pod_with(lab, &HOSTS, options)?;
        test(lab, pod, server)
    });
}

/// Waits until worker1 sends to every gateway by this transport.
pub fn wait_transport(lab: &Lab, name: &str) -> Result<()> {
    let ways = || {
        let rows = lab.egressctl("worker1", &["gateways"])?;
        let rows = rows["items"].as_array().or_else(|| rows.as_array()).cloned().unwrap_or_default();
        let text = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap_or_default().to_owned();
        Ok(rows.iter().map(|row| (text(row, "transport"), text(row, "whyNotBetter"))).collect::<Vec<_>>())
    };
    let good = |ways: &Vec<(String, String)>| ways.len() == 2 && ways.iter().all(|(way, _)| way == name);
    wait_until(&format!("transport {name}"), PATIENCE, ways, good).map(drop)
}

/// Counts the packets in a trace of an underlay interface: (in the tunnel, outside it with an egress IP).
fn forms(trace: &lab::Trace) -> (usize, usize) {
    let all: Vec<IpAddr> = Family::BOTH.iter().flat_map(|family| egress(*family, &HOSTS)).collect();
    // Probes belong to no flow: one of their ports is below all port blocks.
    let flow = |packet: &&lab::Packet| packet.ports().is_none_or(|(from, to)| from.port() > 1023 || to.port() > 1023);
    let packets = || trace.packets().iter().filter(flow);
    let tunnelled = packets().filter(|packet| packet.ports().is_some_and(|(_, to)| to.port() == TUNNEL_PORT)).count();
    let plain = packets().filter(|p| p.ip().is_some_and(|ip| all.contains(&ip.source) || all.contains(&ip.target)));
    (tunnelled, plain.count())
}

/// UDP payloads in bytes: those that fit into one packet with any transport, and one that needs several.
const SMALL: [usize; 2] = [64, 1380];
const LARGE: usize = 4000;

/// Checks TCP, UDP with fragments, and bulk data, in both families.
pub fn everything(pod: &Pod, server: &Server) -> Result<()> {
    most(pod, server)?;
    Family::BOTH.into_iter().try_for_each(|family| echoed(pod, server, family, LARGE))
}

/// Checks that UDP datagrams of one size are answered.
fn echoed(pod: &Pod, server: &Server, family: Family, size: usize) -> Result<()> {
    let _udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
    let flows = UdpClients::start(&pod.ns, server.ips.at(family, 53), 4, UdpOptions { size, ..UdpOptions::default() })?;
    flows.wait("answers", PATIENCE, |all| all.iter().all(|one| one.received > 2 && one.corrupted == 0)).map(drop)
}

/// Checks the same as [`everything`], without fragments.
fn most(pod: &Pod, server: &Server) -> Result<()> {
    let _tcp = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
    let _bulk = BulkServer::start(&server.ns, &server.ips.both(5001))?;
    for family in Family::BOTH {
        let options = TcpOptions { records: 3, ..TcpOptions::default() };
        let clients = TcpClients::establish(&pod.ns, server.ips.at(family, 80), 20, options)?;
        clients.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received == 3 && one.wrong == 0))?;
        clients.close()?;
        SMALL.into_iter().try_for_each(|size| echoed(pod, server, family, size))?;
        for direction in [Direction::Upload, Direction::Download] {
            bulk(&pod.ns, server.ips.at(family, 5001), direction, 5_000_000)?;
        }
    }
    Ok(())
}

/// Runs [`everything`] with one transport on all nodes, and checks which packets the underlay carried.
fn carried(builder: lab::Builder, transport: &str, sent: &str) {
    with_pod(builder, &fixed(transport), |lab, pod, server| {
        wait_transport(lab, transport)?;
        let (at_server, underlay) =
            (Capture::start(&server.ns, "eth0")?, Capture::start(&lab.node("worker1").ns, "eth0")?);
        let before = counter(lab, "worker1", sent)?;
        everything(&pod, &server)?;
        let (underlay, _) = underlay.finish_lossy()?;
        let (tunnelled, plain) = forms(&underlay);
        if transport == "direct" {
            assert!(plain > 100 && tunnelled < plain / 20, "{tunnelled} in the tunnel, {plain} direct");
        } else {
            assert!(tunnelled > 100 && plain == 0, "{tunnelled} in the tunnel, {plain} direct");
        }
        assert!(counter(lab, "worker1", sent)? > before + 100, "{sent}");
        if transport == "vxlan" && std::env::var_os("SPILLWAY_TEST_XDP").is_none() {
            // Bulk data arrives merged, and this kernel cannot strip merged packets. Between cards, and with XDP, none are merged.
            let merged = |node: &str| counter(lab, node, "device_merged");
            assert!(merged("gw1")? + merged("gw2")? > 0);
        }
        let (at_server, _) = at_server.finish_lossy()?;
        assert_no_strangers(&at_server, &server, &HOSTS);
        assert_eq!(at_server.wrong_checksums().packets(), []);
        Ok(())
    });
}

#[test]
fn direct_carries_everything() {
    carried(Lab::builder(), "direct", "sent_direct");
}

#[test]
fn vxlan_carries_everything() {
    carried(Lab::builder(), "vxlan", "sent_vxlan");
}

#[test]
fn the_device_carries_everything() {
    carried(Lab::builder(), "device", "sent_tunnel");
}

/// docs/failures.md: large-answer. Some fragments of an answer fit into the path between the nodes, others do not.
#[test]
fn large_answer_all_fragments_of_an_answer_arrive_by_each_transport() {
    for (transport, routed) in
        [("vxlan", false), ("vxlan", true), ("device", false), ("device", true), ("direct", false)]
    {
        with_pod(Lab::builder(), &fixed(transport), |lab, pod, server| {
            wait_transport(lab, transport)?;
            if routed {
                through_router(lab)?;
                wait_routed(lab, &pod, &server)?;
            }
            for family in Family::BOTH {
                // The host answers the first packets that are too large with the tunnel's MTU; the pod then sends smaller ones.
                let first = Ping { size: 9_000, count: 2, ..Ping::default() };
                ping(&pod.ns, server.ips.ip(family), &first)?;
                // The sizes: the smallest last fragment, whole fragments only, and as much as a jumbo frame holds.
                for size in [1_473, 2_952, 2_953, 3_000, 4_433, 9_000] {
                    let asked = Ping { size, count: 3, timeout: PATIENCE, ..Ping::default() };
                    let report = ping(&pod.ns, server.ips.ip(family), &asked)?;
                    assert_eq!(report.replies.len(), 3, "{transport}, routed: {routed}: {size} bytes over {family:?}");
                }
            }
            Ok(())
        });
    }
}

/// Makes worker and gateways reach each other only through the router.
fn through_router(lab: &Lab) -> Result<()> {
    let router = lab::address::underlay(1);
    let worker = lab.node("worker1");
    for gateway in lab.gateways() {
        for (from, to) in [(worker, gateway), (gateway, worker)] {
            from.ns.ip(&[format!("route add {}/32 via {} dev eth0", to.underlay.v4, router.v4)])?;
        }
    }
    Ok(())
}

/// Waits until a pod's packets and their answers go through the router.
fn wait_routed(lab: &Lab, pod: &Pod, server: &Server) -> Result<()> {
    let (capture, router) = (Capture::start(lab.router(), "eth0")?, lab.router().mac("eth0")?);
    let worker = IpAddr::from(lab.node("worker1").underlay.v4);
    // The router also sees frames that the bridge floods.
    let tunnelled = |packet: &lab::Packet| {
        packet.target_mac == router && packet.ports().is_some_and(|(_, to)| to.port() == TUNNEL_PORT)
    };
    let passed = || {
        ping(&pod.ns, server.ips.ip(Family::V4), &Ping::default())?;
        let from = capture.count(|packet| tunnelled(packet) && packet.ip().is_some_and(|ip| ip.source == worker));
        let to = capture.count(|packet| tunnelled(packet) && packet.ip().is_some_and(|ip| ip.target == worker));
        Ok((from, to))
    };
    wait_until("the router carries both directions", PATIENCE, passed, |(from, to)| *from > 0 && *to > 0).map(drop)
}

#[test]
fn vxlan_carries_everything_over_an_underlay_with_a_small_mtu() {
    // Packets that are too large for the path take the device, in fragments.
    carried(Lab::builder().underlay_mtu(1400), "vxlan", "sent_vxlan");
}

#[test]
fn tunnelled_packets_of_a_pod_take_the_device() {
    const PORT: u16 = 4799;
    with_pod(Lab::builder(), &fixed("vxlan"), |lab, pod, server| {
        wait_transport(lab, "vxlan")?;
        let capture = Capture::start(&server.ns, "eth0")?;
        for (family, inner) in [(Family::V4, 1), (Family::V6, 2)] {
            let remote = server.ips.ip(family);
            // With any NAT, the kernel updates a tunnel's own checksum as if it were not filled in yet.
            let sums = "noudpcsum udp6zerocsumtx udp6zerocsumrx";
            pod.ns.ip(&[
                format!("link add own{inner} type vxlan id {inner} remote {remote} dstport {PORT} dev eth0 {sums}"),
                format!("link set own{inner} up"),
                format!("addr add 10.99.{inner}.1/24 dev own{inner}"),
                format!("neigh add 10.99.{inner}.2 lladdr 02:00:00:00:99:02 dev own{inner}"),
            ])?;
            let before = counter(lab, "worker1", "device_encapsulated")?;
            // Only packets that leave a checksum to the network card are marked as encapsulated.
            let inside = SocketAddr::from(([10, 99, inner, 2], 7));
            let flow = UdpClients::start(&pod.ns, inside, 1, UdpOptions::default())?;
            wait_counter(lab, "worker1", "device_encapsulated", before + 3)?;
            drop(flow);
        }
        let (trace, _) = capture.finish_lossy()?;
        for family in Family::BOTH {
            let to = server.ips.at(family, PORT);
            let arrived = trace.packets().iter().filter(|packet| packet.ports().is_some_and(|(_, at)| at == to));
            let sources: Vec<IpAddr> = arrived.filter_map(|packet| Some(packet.ip()?.source)).collect();
            assert!(!sources.is_empty() && sources.iter().all(|ip| egress(family, &HOSTS).contains(ip)), "{sources:?}");
        }
        // The capture counts an absent checksum over IPv6 as a wrong one.
        let wrong = trace.wrong_checksums();
        assert!(!wrong.packets().iter().any(|packet| packet.ip().is_some_and(|ip| ip.source.is_ipv4())));
        Ok(())
    });
}

/// Makes the underlay drop all frames whose source address is not a node's, as a switch's source guard does.
fn guard(lab: &Lab) -> Result<()> {
    lab.underlay().nft(
        "table bridge guard {
            chain forward { type filter hook forward priority 0;
                ip saddr != 10.88.0.0/24 drop
                ip6 saddr != { fd88::/64, fe80::/10, :: } drop
            }
        }",
    )
}

/// Checks that connections survive a change of the transport, in both directions.
fn survive(lab: &mut Lab, pod: &Pod, server: &Server, change: impl FnOnce(&mut Lab) -> Result<()>) -> Result<()> {
    let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
    let mut all = Vec::new();
    for family in Family::BOTH {
        all.push(TcpClients::establish(&pod.ns, server.ips.at(family, 80), 20, TcpOptions::default())?);
    }
    all.iter().try_for_each(|clients| clients.wait_progress(3, PATIENCE))?;
    change(lab)?;
    all.iter().try_for_each(|clients| clients.wait_progress(3, PATIENCE))?;
    streams.wait_progress(3, PATIENCE)?;
    for clients in all {
        let closed = clients.close()?;
        assert_eq!(closed.iter().filter(|one| ConnectionReport::intact(one)).count(), 20, "{closed:?}");
    }
    Ok(())
}

#[test]
fn auto_falls_back_when_foreign_addresses_are_dropped_and_goes_back_later() {
    with_pod(Lab::builder(), &auto(), |lab, pod, server| {
        wait_transport(lab, "direct")?;
        survive(lab, &pod, &server, |lab| {
            guard(lab)?;
            wait_transport(lab, "vxlan")?;
            let shown = lab.egressctl_text("worker1", &["gateways"])?;
            assert!(shown.contains("gw1, gw2: not direct: probes over it are not answered"), "{shown}");
            Ok(())
        })?;
        survive(lab, &pod, &server, |lab| {
            lab.underlay().nft("delete table bridge guard")?;
            wait_transport(lab, "direct")
        })
    });
}

#[test]
fn auto_follows_the_route() {
    with_pod(Lab::builder(), &auto(), |lab, pod, server| {
        wait_transport(lab, "direct")?;
        let router = lab::address::underlay(1);
        let gateways: Vec<lab::address::Dual> = lab.gateways().map(|gateway| gateway.underlay).collect();
        let routes = |verb: &str| -> Vec<String> {
            gateways.iter().map(|ip| format!("route {verb} {}/32 via {} dev eth0", ip.v4, router.v4)).collect()
        };
        survive(lab, &pod, &server, |lab| {
            lab.node("worker1").ns.ip(&routes("add"))?;
            wait_transport(lab, "vxlan")?;
            let shown = lab.egressctl_text("worker1", &["gateways"])?;
            assert!(shown.contains("gw1, gw2: not direct: not on the same link"), "{shown}");
            Ok(())
        })?;
        survive(lab, &pod, &server, |lab| {
            lab.node("worker1").ns.ip(&routes("del"))?;
            wait_transport(lab, "direct")
        })
    });
}

#[test]
fn nodes_with_different_settings_understand_each_other() {
    Lab::builder().workers(4).gateways(4).run(|lab| {
        const ALL: [u8; 4] = [10, 11, 12, 13];
        lab.manifests().write("web", &web(&ALL))?;
        let mut pods = Vec::new();
        for worker in 1..=4 {
            pods.push(
                lab.add_pod(PodSpec::new(&format!("web{worker}"), &format!("worker{worker}")).label("app", "web"))?,
            );
        }
        for (n, transport) in ["device", "vxlan", "direct", "Auto"].into_iter().enumerate() {
            lab.start_agent(&format!("worker{}", n + 1), &fixed(transport))?;
            lab.start_agent(&format!("gw{}", n + 1), &fixed(transport))?;
        }
        lab.start_controller("controller", &fixed("Auto"))?;
        let server = lab.server("server1").clone();
        for pod in &pods {
            wait_in_force(pod, &server, &ALL)?;
            everything(pod, &server)?;
        }
        Ok(())
    });
}

/// Checks packets larger than the path. The host's stack makes a pod's packets smaller. Answers cannot be fragmented in
/// a tunnel over IPv6, so they are dropped and counted unless the server sends smaller ones.
fn large_over_ipv6(lab: &Lab, pod: &Pod, server: &Server, family: Family, transport: &str) -> Result<()> {
    if transport == "direct" {
        return echoed(pod, server, family, LARGE);
    }
    let dropped = || counter(lab, "gw1", "drop_too_large");
    let (before, at_server) = (dropped()?, UdpServer::start(&server.ns, &server.ips.both(54))?);
    let options = UdpOptions { size: LARGE, ..UdpOptions::default() };
    let flows = UdpClients::start(&pod.ns, server.ips.at(family, 54), 4, options)?;
    wait_until(
        "four flows at the server",
        PATIENCE,
        || Ok(at_server.sources()),
        |sources| sources.values().sum::<usize>() >= 4,
    )?;
    wait_until("dropped answers", PATIENCE, dropped, |now| *now > before)?;
    drop(flows);
    Ok(())
}

/// Nodes that have only IPv6 addresses.
#[test]
fn an_ipv6_underlay_carries_both_families_by_each_transport() {
    for (transport, sent) in [("vxlan", "sent_vxlan"), ("direct", "sent_direct"), ("device", "sent_tunnel")] {
        Lab::builder().workers(1).gateways(1).run(|lab| {
            for name in ["worker1", "gw1"] {
                let (file, own) = (format!("node-{name}"), lab.node(name).underlay.v4.to_string());
                let text = lab.manifests().read(&file)?;
                let rest: Vec<&str> = text.lines().filter(|line| !line.contains(&own)).collect();
                lab.manifests().write(&file, &(rest.join("\n") + "\n"))?;
            }
            let (pod, server) = web_pod_with(lab, &[10], &fixed(transport))?;
            let before = counter(lab, "worker1", sent)?;
            most(&pod, &server)?;
            assert!(counter(lab, "worker1", sent)? > before + 100, "{sent}");
            for family in Family::BOTH {
                large_over_ipv6(lab, &pod, &server, family, transport)?;
            }
            let report = lab.manifests().written("EgressNode", "gw1").context("a report")?;
            assert!(report.contains(&lab.node("gw1").underlay.v6.to_string()), "{report}");
            Ok(())
        });
    }
}
