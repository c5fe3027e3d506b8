//! Sources of egress IPs (floating, a node's own, an interface's, a pool's) and the places where packets leave (another
//! gateway, or the pod's own node).

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};
use lab::traffic::{Ping, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer, ping};
use lab::{Capture, Cni, Family, Lab, Pod, PodSpec, Server};

use crate::support::{
    PATIENCE, WEB, at, calm, counter, egress, gateways_where, named, of_app, owner, policy, policy_pod, pool, sources,
    start, wait_counter, wait_in_force, wait_sources, web, web_pod,
};

/// Returns the MAC addresses that send the packets from `source` to `server`.
fn senders(pod: &Pod, server: &Server, family: Family, source: IpAddr) -> Result<BTreeSet<[u8; 6]>> {
    let capture = Capture::start(&server.ns, "eth0")?;
    sources(&pod.ns, server, family, 10)?;
    let trace = capture.finish()?;
    let from = |packet: &&lab::Packet| !packet.outgoing && packet.ports().is_some_and(|(from, _)| from.ip() == source);
    Ok(trace.packets().iter().filter(from).map(|packet| packet.source_mac).collect())
}

/// docs/failures.md: re-encap.
#[test]
fn re_encap_pods_on_gateways_leave_directly_or_through_the_owner() {
    for cni in Cni::BOTH {
        Lab::builder().workers(1).cni(cni).run(|lab| {
            let one = |app, host, node| of_app(app, &gateways_where(&[(host, 1, &named(node))]));
            lab.manifests().write("here", &one("here", 10, "gw1"))?;
            lab.manifests().write("there", &one("there", 11, "gw2"))?;
            lab.manifests().write("web", &web(&[12, 13, 14]))?;
            let here = lab.add_pod(PodSpec::new("here", "gw1").label("app", "here"))?;
            let there = lab.add_pod(PodSpec::new("there", "gw1").label("app", "there"))?;
            let spread = lab.add_pod(PodSpec::new("spread", "gw1").label("app", "web"))?;
            start(lab)?;
            let server = lab.server("server1").clone();
            wait_in_force(&here, &server, &[10])?;
            wait_in_force(&there, &server, &[11])?;
            wait_in_force(&spread, &server, &[12, 13, 14])?;
            let tunnelled = Capture::start(&lab.node("gw1").ns, "spillway0")?;
            for family in Family::BOTH {
                let own = BTreeSet::from([lab.node("gw1").external_mac()]);
                assert_eq!(senders(&here, &server, family, egress(family, &[10])[0])?, own);
                // Other protocols take the local path, too.
                let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
                let flows = UdpClients::start(
                    &here.ns,
                    server.ips.at(family, 53),
                    10,
                    UdpOptions { size: 4000, ..UdpOptions::default() },
                )?;
                flows.wait("replies", PATIENCE, |all| all.iter().all(|one| one.received > 2))?;
                assert_eq!(udp.sources().into_keys().collect::<Vec<_>>(), egress(family, &[10]));
                assert_eq!(ping(&here.ns, server.ips.ip(family), &Ping::default())?.replies.len(), 1);
            }
            let own = |packet: &lab::Packet| {
                packet.ip().is_some_and(|ip| {
                    [egress(Family::V4, &[10]), egress(Family::V6, &[10])].concat().contains(&ip.source)
                })
            };
            assert_eq!(tunnelled.finish()?.count(own), 0, "local exits need no tunnel");
            for family in Family::BOTH {
                let other = BTreeSet::from([lab.node("gw2").external_mac()]);
                assert_eq!(senders(&there, &server, family, egress(family, &[11])[0])?, other);
            }
            Ok(())
        });
    }
}

/// docs/failures.md: reserved-port (the listener's half).
#[test]
fn reserved_port_egress_ip_of_a_node_works_beside_the_nodes_own_traffic() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let gateway = lab.node("gw2").clone();
        let own = Family::BOTH.map(|family| egress(family, &[50])[0]);
        gateway.ns.ip(&[format!("addr add {}/24 dev ext0", own[0]), format!("addr add {}/64 dev ext0", own[1])])?;
        gateway.ns.wait_addressed(&["ext0"])?;
        // The ports of the node's own connections, and those that its administrator reserves, are among the first blocks.
        gateway.ns.sysctls(&[
            ("net.ipv4.ip_local_port_range", "2048 4095"),
            ("net.ipv4.ip_local_reserved_ports", "5000-5005,5500"),
        ])?;
        let kept = |port: u16| (2048..=4095).contains(&port) || port / 64 == 5000 / 64 || port / 64 == 5500 / 64;
        // The node's own service existed before, so its port is not leased.
        let listening = TcpServer::start(&gateway.ns, &own.map(|own| at(own, 8080)), ServerMode::Echo)?;
        let (pod, server) = web_pod(lab, &[50])?;
        for (family, own) in Family::BOTH.into_iter().zip(own) {
            assert_eq!(owner(lab, own).as_deref(), Some("gw2"));
            assert_eq!(senders(&pod, &server, family, own)?, BTreeSet::from([gateway.external_mac()]));
            // The node's own service at that address, its connections from there, and ping continue to work.
            let clients = TcpClients::establish(&server.ns, (own, 8080).into(), 20, TcpOptions::once())?;
            clients.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
            assert!(listening.connections().len() >= 20);
            assert_eq!(sources(&gateway.ns, &server, family, 20)?.values().sum::<usize>(), 20);
            assert_eq!(ping(&server.ns, own, &Ping::default())?.replies.len(), 1);
            // Flows avoid the ports that the kernel assigns to the node's own sockets, whose connections may end only now.
            let capture = Capture::start(&server.ns, "eth0")?;
            sources(&pod.ns, &server, family, 200)?;
            let trace = capture.finish()?;
            let ports: BTreeSet<u16> = trace
                .packets()
                .iter()
                .filter(|packet| packet.tcp_flags().is_some_and(|flags| flags.syn && !flags.ack))
                .filter_map(lab::Packet::ports)
                .filter(|(from, _)| from.ip() == own)
                .map(|(from, _)| from.port())
                .collect();
            assert!(
                ports.len() >= 100
                    && ports.iter().all(|port| (1024..=29_951).contains(port) && *port != 8080 && !kept(*port)),
                "{ports:?}"
            );
        }
        Ok(())
    });
}

/// Returns the port ranges of an egress IP that are leased to worker1 according to a node's tables.
fn leased_ports(lab: &Lab, node: &str, egress: IpAddr) -> Result<Vec<(u16, u16)>> {
    let blocks = lab.egressctl(node, &["blocks"])?;
    let rows = blocks["items"].as_array().context("a list of blocks")?;
    let row = rows.iter().find(|row| row["egressIp"] == egress.to_string() && row["node"] == "worker1");
    let ranges = row.and_then(|row| row["portRanges"].as_array()).into_iter().flatten();
    let range = |text: &str| {
        let (first, last) = text.split_once('-')?;
        Some((first.parse().ok()?, last.parse().ok()?))
    };
    ranges.map(|text| text.as_str().and_then(range).with_context(|| format!("a range of ports: {text}"))).collect()
}

/// Returns the translated ports of worker1's flows.
fn ports_in_use(lab: &Lab, egress: IpAddr) -> Result<BTreeSet<u16>> {
    let flows = lab.egressctl("worker1", &["flows", "--egress-ip", &egress.to_string()])?;
    let port = |row: &serde_json::Value| row["egressPort"].as_u64().and_then(|port| u16::try_from(port).ok());
    flows["items"].as_array().context("a list of flows")?.iter().map(|row| port(row).context("a port")).collect()
}

/// A datagram socket with a short receive timeout.
fn datagrams(ns: &lab::NetNs, address: SocketAddr) -> Result<UdpSocket> {
    ns.run(|| {
        let socket = UdpSocket::bind(address)?;
        socket.set_read_timeout(Some(Duration::from_secs(2)))?;
        Ok(socket)
    })
}

/// Sends `what` to `target`, waits for it at `to`, and returns the peer's address.
fn pass(from: &UdpSocket, target: SocketAddr, to: &UdpSocket, what: &str) -> Result<SocketAddr> {
    from.send_to(what.as_bytes(), target)?;
    let mut buffer = [0; 64];
    loop {
        let (len, peer) = to.recv_from(&mut buffer).with_context(|| format!("{what} does not arrive"))?;
        if buffer[..len] == *what.as_bytes() {
            return Ok(peer);
        }
    }
}

/// docs/failures.md: reserved-port (a later listener, at a port that a flow uses at that moment).
#[test]
fn later_listener_is_served_and_flows_of_its_block_continue() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let entry = format!(
            "{WEB}\n  egressGateways: [{{nodeSelector: {{matchLabels: {{{}}}}}, interface: ext0}}]",
            named("gw2")
        );
        let (pod, server) = policy_pod(lab, &policy("web", &entry), &[102], &calm())?;
        let gateway = lab.node("gw2").clone();
        for (family, any) in Family::BOTH.into_iter().zip(["0.0.0.0:0", "[::]:0"]) {
            let own = egress(family, &[102])[0];
            let far = TcpServer::start(&server.ns, &[server.ips.at(family, 9100)], ServerMode::Echo)?;
            let streams = TcpClients::establish(&pod.ns, server.ips.at(family, 9100), 20, TcpOptions::default())?;
            streams.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received > 2))?;
            let (inside, outside) =
                (datagrams(&pod.ns, any.parse()?)?, datagrams(&server.ns, server.ips.at(family, 9200))?);
            let translated = pass(&inside, server.ips.at(family, 9200), &outside, "there")?;
            assert_eq!(translated.ip(), own);
            let port = far.source_of_flow().values().next().context("a stream")?.port();

            // The node's service uses the same ports as the flows.
            let service = TcpServer::start(&gateway.ns, &[at(own, port)], ServerMode::Echo)?;
            let clients = TcpClients::establish(&server.ns, at(own, port), 20, TcpOptions::default())?;
            clients.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received > 2))?;
            assert_eq!(service.connections().len(), 20);
            let (listener, client) = (datagrams(&gateway.ns, translated)?, datagrams(&server.ns, any.parse()?)?);
            let asker = pass(&client, translated, &listener, "question")?;
            assert_eq!(pass(&listener, asker, &client, "answer")?, translated);
            assert_eq!(pass(&outside, translated, &inside, "back")?, server.ips.at(family, 9200));
            // The node's own echo requests are answered, whatever block their identifiers are in.
            let ping = Ping { identifier: port, ..Ping::default() };
            assert_eq!(lab::traffic::ping(&gateway.ns, server.ips.ip(family), &ping)?.replies.len(), 1);

            // No new flow gets a port of these blocks, and existing flows continue.
            let block = |port: u16| (port / 64 * 64, port / 64 * 64 + 63);
            let taken = [block(port), block(translated.port())];
            let meets =
                |ranges: &[(u16, u16)], block: (u16, u16)| ranges.iter().any(|r| r.0 <= block.1 && block.0 <= r.1);
            let drained =
                |ranges: &Vec<(u16, u16)>| !ranges.is_empty() && taken.iter().all(|block| !meets(ranges, *block));
            lab::wait_until("no new flow uses the blocks", PATIENCE, || leased_ports(lab, "worker1", own), drained)?;
            let before = ports_in_use(lab, own)?;
            sources(&pod.ns, &server, family, 200)?;
            let fresh: Vec<u16> = ports_in_use(lab, own)?.difference(&before).copied().collect();
            assert!(fresh.len() >= 100 && !fresh.iter().any(|port| meets(&taken, (*port, *port))), "{fresh:?}");
            assert!(
                taken.iter().all(|block| meets(&leased_ports(lab, "gw2", own).unwrap_or_default(), *block)),
                "still leased"
            );
            streams.wait_progress(10, PATIENCE)?;
            clients.wait_progress(10, PATIENCE)?;
            assert!(
                streams.connections().iter().chain(&clients.connections()).all(lab::traffic::ConnectionReport::intact)
            );
            assert_eq!(pass(&outside, translated, &inside, "again")?, server.ips.at(family, 9200));

            // A block that no flow uses is returned.
            let used = ports_in_use(lab, own)?;
            let leased = leased_ports(lab, "worker1", own)?;
            let mut blocks = leased.iter().flat_map(|(first, last)| (*first..*last).step_by(64)).map(block);
            let idle = blocks.find(|block| used.range(block.0..=block.1).next().is_none()).context("an idle block")?;
            let _listener = TcpServer::start(&gateway.ns, &[at(own, idle.0 + 1)], ServerMode::Echo)?;
            let returned = |ranges: &Vec<(u16, u16)>| !ranges.is_empty() && !meets(ranges, idle);
            lab::wait_until("the block is returned", PATIENCE, || leased_ports(lab, "gw2", own), returned)?;
        }
        Ok(())
    });
}

/// Translates the packets of `pod` that match `to` to one of `ports` of `address`, as a CNI's masquerading may do.
fn masquerade(gateway: &lab::NetNs, pod: &Pod, family: Family, to: &str, address: IpAddr, ports: &str) -> Result<()> {
    let (ip, name, address) = match address {
        IpAddr::V4(address) => ("ip", "masquerades4", address.to_string()),
        IpAddr::V6(address) => ("ip6", "masquerades6", format!("[{address}]")),
    };
    gateway.nft(&format!(
        "table inet {name} {{}}
        delete table inet {name}
        table inet {name} {{
            chain postrouting {{
                type nat hook postrouting priority srcnat - 1; policy accept;
                {ip} saddr {} {to} snat {ip} to {address}:{ports}
            }}
        }}",
        pod.ips.ip(family)
    ))
}

/// Starts the lab: `web` on worker1 leaves through gw1 with that node's own address; no policy selects `plain` on gw1.
fn with_own_address(lab: &mut Lab) -> Result<(Pod, Pod, Server)> {
    let entry =
        format!("{WEB}\n  egressGateways: [{{nodeSelector: {{matchLabels: {{{}}}}}, interface: ext0}}]", named("gw1"));
    lab.manifests().write("web", &policy("web", &entry))?;
    let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
    let plain = lab.add_pod(PodSpec::new("plain", "gw1"))?;
    start(lab)?;
    let server = lab.server("server1").clone();
    wait_in_force(&pod, &server, &[101])?;
    Ok((pod, plain, server))
}

/// docs/failures.md: masq-ports.
#[test]
fn masq_ports_connections_masqueraded_to_leased_ports_are_answered() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (_, plain, server) = with_own_address(lab)?;
        for family in Family::BOTH {
            let own = egress(family, &[101])[0];
            let (first, last) = *leased_ports(lab, "gw1", own)?.first().context("leased ports")?;
            let gateway = &lab.node("gw1").ns;
            masquerade(gateway, &plain, family, "meta l4proto { tcp, udp }", own, &format!("{first}-{last}"))?;
            let tcp = TcpServer::start(&server.ns, &[server.ips.at(family, 9300)], ServerMode::Echo)?;
            let streams = TcpClients::establish(&plain.ns, server.ips.at(family, 9300), 20, TcpOptions::default())?;
            streams.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received > 2))?;
            let leased = |peer: &SocketAddr| peer.ip() == own && (first..=last).contains(&peer.port());
            assert!(tcp.source_of_flow().values().all(leased), "{:?}", tcp.source_of_flow());

            let udp = UdpServer::start(&server.ns, &[server.ips.at(family, 9300)])?;
            let flows = UdpClients::start(&plain.ns, server.ips.at(family, 9300), 20, UdpOptions::default())?;
            flows.wait("replies", PATIENCE, |all| all.iter().all(|one| one.received > 2))?;
            assert_eq!(udp.sources().keys().copied().collect::<Vec<_>>(), [own]);
        }
        Ok(())
    });
}

/// docs/failures.md: masq-ports, as an attack: an unselected pod has its packets masqueraded to the 5-tuples of flows.
#[test]
fn masq_ports_masquerading_cannot_steal_a_flows_replies() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (pod, plain, server) = with_own_address(lab)?;
        for (family, any) in Family::BOTH.into_iter().zip(["0.0.0.0:0", "[::]:0"]) {
            let own = egress(family, &[101])[0];
            let gateway = lab.node("gw1").ns.clone();
            let far = TcpServer::start(&server.ns, &[server.ips.at(family, 9100)], ServerMode::Echo)?;
            let streams = TcpClients::establish(&pod.ns, server.ips.at(family, 9100), 1, TcpOptions::default())?;
            streams.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received > 2))?;
            let port = far.source_of_flow().values().next().context("a stream")?.port();
            masquerade(&gateway, &plain, family, "meta l4proto { tcp, udp }", own, &port.to_string())?;
            let capture = Capture::start(&server.ns, "eth0")?;
            let stolen = |packet: &lab::Packet| packet.ports().is_some_and(|(from, _)| from == at(own, port));
            let patience = TcpOptions { connect_timeout: Duration::from_secs(60), ..TcpOptions::default() };
            let _thief = TcpClients::open(&plain.ns, server.ips.at(family, 9100), 1, patience)?;
            let opens = |packet: &lab::Packet| stolen(packet) && packet.tcp_flags().is_some_and(|flags| flags.syn);
            capture.wait_for("the thief's SYN", PATIENCE, opens)?;
            streams.wait_progress(50, PATIENCE)?;
            let reports = streams.connections();
            assert!(reports.iter().all(lab::traffic::ConnectionReport::intact), "{reports:?}");
            capture.finish_without("a reset as from the flow", |packet| stolen(packet) && packet.is_reset())?;

            // Datagrams, if conntrack immediately forgets those that the thief has sent.
            let (inside, outside) =
                (datagrams(&pod.ns, any.parse()?)?, datagrams(&server.ns, server.ips.at(family, 9200))?);
            let translated = pass(&inside, server.ips.at(family, 9200), &outside, "there")?;
            masquerade(&gateway, &plain, family, "meta l4proto udp", own, &translated.port().to_string())?;
            gateway.sysctls(&[("net.netfilter.nf_conntrack_udp_timeout", "0")])?;
            let before = counter(lab, "gw1", "drop_gateway_copy")?;
            let thief = datagrams(&plain.ns, any.parse()?)?;
            assert_eq!(pass(&thief, server.ips.at(family, 9200), &outside, "mine")?, translated);
            assert_eq!(pass(&outside, translated, &inside, "back")?, server.ips.at(family, 9200));
            wait_counter(lab, "gw1", "drop_gateway_copy", before)?;
            assert_eq!(pass(&outside, translated, &inside, "again")?, server.ips.at(family, 9200));
        }
        Ok(())
    });
}

#[test]
fn next_hop_a_gateway_by_interface_or_default_route_uses_the_address_found_there() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let entry = |rest: &str, node: &str| {
            format!("{WEB}\n  egressGateways: [{{nodeSelector: {{matchLabels: {{{}}}}}{rest}}}]", named(node))
        };
        let first = policy("web", &entry(", interface: ext0", "gw1"));
        let (pod, server) = policy_pod(lab, &first, &[101], &calm())?;
        lab.manifests().write("web", &policy("web", &entry("", "gw2")))?;
        wait_in_force(&pod, &server, &[102])?;
        // The underlay's interface has the address, but another interface leads to the server.
        lab.manifests().write("web", &policy("web", &entry(", interface: eth0", "gw1")))?;
        let gateway = lab.node("gw1").clone();
        for family in Family::BOTH {
            let own = gateway.underlay.ip(family);
            wait_sources(&pod.ns, &server, family, &[own])?;
            assert_eq!(senders(&pod, &server, family, own)?, BTreeSet::from([gateway.external_mac()]), "{family:?}");
        }
        // A rule by source decides, as it does for the node's own sockets.
        let router = lab::address::underlay(1);
        for (family, flag) in Family::BOTH.into_iter().zip(["-4", "-6"]) {
            let (own, router) = (gateway.underlay.ip(family), router.ip(family));
            gateway.ns.sh(&format!(
                "ip {flag} route add default via {router} table 77; ip {flag} rule add from {own} table 77"
            ))?;
            let elsewhere = |seen: &BTreeSet<[u8; 6]>| !seen.is_empty() && !seen.contains(&gateway.external_mac());
            lab::wait_until(
                "packets leave through the router",
                PATIENCE,
                || senders(&pod, &server, family, own),
                elsewhere,
            )?;
            wait_sources(&pod.ns, &server, family, &[own])?;
        }
        Ok(())
    });
}

/// Next hops are cached briefly, but even flows that never pause follow a route change.
#[test]
fn route_changes_at_a_gateway_are_followed_by_flows_that_go_on() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let gateway = lab.node("gw1").clone();
        for (family, (flag, length)) in Family::BOTH.into_iter().zip([("-4", 32), ("-6", 128)]) {
            let [source] = egress(family, &[10])[..] else { panic!("one egress IP") };
            let target = server.ips.at(family, 8053);
            let _answering = UdpServer::start(&server.ns, &[target])?;
            let options = UdpOptions { interval: Duration::from_millis(1), ..UdpOptions::default() };
            let flows = UdpClients::start(&pod.ns, target, 4, options)?;
            let capture = Capture::start(&server.ns, "eth0")?;
            let ways = || -> Result<BTreeSet<[u8; 6]>> {
                const PACKETS: usize = 100;
                let ours = |packet: &lab::Packet| {
                    !packet.outgoing && packet.ports().is_some_and(|(from, _)| from.ip() == source)
                };
                capture.clear();
                lab::wait_until("packets", PATIENCE, || Ok(capture.count(ours)), |count| *count >= PACKETS)?;
                Ok(capture.take().filter(ours).packets().iter().map(|packet| packet.source_mac).collect())
            };
            let straight = BTreeSet::from([gateway.external_mac()]);
            lab::wait_until("packets come directly from the gateway", PATIENCE, ways, |seen| *seen == straight)?;
            let (target, router) = (target.ip(), lab::address::external(1).ip(family));
            let route =
                |what| gateway.ns.sh(&format!("ip {flag} route {what} {target}/{length} via {router} dev ext0"));
            route("add")?;
            lab::wait_until("packets come through the router", PATIENCE, ways, |seen| seen.is_disjoint(&straight))?;
            route("del")?;
            lab::wait_until("packets come directly again", PATIENCE, ways, |seen| *seen == straight)?;
            drop(flows);
        }
        Ok(())
    });
}

#[test]
fn pools_give_each_policy_addresses_of_its_own_on_different_gateways() {
    Lab::builder().workers(1).run(|lab| {
        lab.manifests().write("pool", &pool("public", 40, 45, Some("10s")))?;
        let request = |app, request: &str| of_app(app, &format!("\n  egressIPPools: [{request}]"));
        lab.manifests().write("web", &request("web", "{name: public, count: 3}"))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let api = lab.add_pod(PodSpec::new("api", "worker1").label("app", "api").cni(Cni::Bridge))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&pod, &server, &[40, 41, 42])?;
        let all_macs: BTreeSet<[u8; 6]> = lab.gateways().map(lab::LabNode::external_mac).collect();
        for family in Family::BOTH {
            let each = |ip: IpAddr| senders(&pod, &server, family, ip);
            let macs = || -> Result<BTreeSet<[u8; 6]>> {
                let sets: Vec<_> = egress(family, &[40, 41, 42]).into_iter().map(each).collect::<Result<_>>()?;
                Ok(sets.into_iter().flatten().collect())
            };
            lab::wait_until("each address at its own gateway", PATIENCE, macs, |macs| *macs == all_macs)?;
        }
        // Another policy requests a particular address; the first policy keeps its addresses.
        let ips = format!("egressIPs: [\"{}\", \"{}\"]", egress(Family::V4, &[45])[0], egress(Family::V6, &[45])[0]);
        lab.manifests().write("api", &request("api", &format!("{{name: public, count: 2, {ips}}}")))?;
        wait_in_force(&api, &server, &[43, 45])?;
        wait_in_force(&pod, &server, &[40, 41, 42])?;
        // Returned addresses are available to other policies.
        lab.manifests().write("web", &request("web", "{name: public, count: 1}"))?;
        let remaining =
            |family| -> Result<BTreeSet<IpAddr>> { Ok(sources(&pod.ns, &server, family, 20)?.into_keys().collect()) };
        for family in Family::BOTH {
            let seen = lab::wait_until("one address", PATIENCE, || remaining(family), |seen| seen.len() == 1)?;
            assert!(seen.iter().all(|ip| egress(family, &[40, 41, 42]).contains(ip)), "{seen:?}");
        }
        Ok(())
    });
}
