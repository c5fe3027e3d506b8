//! Traffic that Spillway must leave alone: the cluster's own, replies to the outside, connections that existed before.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV6, UdpSocket};
use std::process::Command;

use anyhow::{Context, Result};
use lab::traffic::{
    Ping, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer, ping, source_at,
};
use lab::{Capture, Cni, Family, Lab, NetNs, PodSpec, Server, StartOptions, wait_until};

use crate::support::{
    CALM, LOOK_PORT, PATIENCE, WEB, at, gateways, policy, sources, start, start_with, wait_in_force, wait_refused,
    wait_sources, web, web_pod,
};

/// Returns the source that `server` sees of a connection from `client` to `target`.
fn source_seen(client: &NetNs, server: &NetNs, target: IpAddr) -> Result<IpAddr> {
    let target = at(target, 7000);
    source_at(client, target, server, target, PATIENCE)
}

/// docs/failures.md: pod-net. With the address management of some CNIs and clouds, no Node names its pods' networks,
/// and only a ServiceCIDR names the Services' network.
#[test]
fn pod_net_pods_that_no_node_names_and_services_are_left_alone_without_any_configuration() {
    Lab::builder().gateways(1).far_servers(2).run(|lab| {
        for name in ["worker1", "worker2", "gw1"] {
            let node = lab.node(name);
            let (v4, v6) = (node.underlay.v4, node.underlay.v6);
            let labels = serde_json::to_string(&node.labels)?;
            let text = format!(
                "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}, labels: {labels}}}\nstatus: {{addresses: \
                 [{{type: InternalIP, address: {v4}}}, {{type: InternalIP, address: \"{v6}\"}}], \
                 conditions: [{{type: Ready, status: \"True\"}}]}}\n"
            );
            lab.manifests().write(&format!("node-{name}"), &text)?;
        }
        let service = lab.server("far2").clone();
        let cidrs = Family::BOTH.map(|family| format!("\"{}\"", service.ips.ip(family).to_string() + if family == Family::V4 { "/32" } else { "/128" }));
        let text = format!(
            "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {{name: kubernetes}}\nspec: {{cidrs: [{}]}}\n",
            cidrs.join(", ")
        );
        lab.manifests().write("services", &text)?;
        lab.manifests().write("web", &web(&[10]))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let remote = lab.add_pod(PodSpec::new("remote", "worker2"))?;
        start(lab)?;
        wait_in_force(&pod, lab.server("server1"), &[10])?;
        for family in Family::BOTH {
            assert_eq!(source_seen(&pod.ns, &remote.ns, remote.ips.ip(family))?, pod.ips.ip(family), "to a pod of another node");
            let masqueraded = lab.node("worker1").underlay.ip(family);
            assert_eq!(source_seen(&pod.ns, &service.ns, service.ips.ip(family))?, masqueraded, "to a Service");
        }
        // A pod is added later, and removed again: its address is then an ordinary one.
        let late = lab.add_pod(PodSpec::new("late", "worker2"))?;
        let told = |lab: &Lab| Ok(lab.manifests().written("EgressNode", "worker2").unwrap_or_default());
        // The addresses of both pods make one network.
        let (one, both) = (format!("{}/32", remote.ips.v4), format!("{}/31", remote.ips.v4));
        wait_until("the controller names the pod", PATIENCE, || told(lab), |text| text.contains(&both))?;
        for family in Family::BOTH {
            let to = format!("{}/tcp", at(late.ips.ip(family), 7000));
            let question = ["explain", "--pod", "default/web", "--to", &to];
            let path = || Ok(lab.egressctl("worker1", &question)?.to_string());
            wait_until("the agent leaves it alone", PATIENCE, path, |path| path.contains("which no policy touches"))?;
            assert_eq!(source_seen(&pod.ns, &late.ns, late.ips.ip(family))?, pod.ips.ip(family), "to a pod that was added later");
        }
        lab.remove_pod(&late.key())?;
        wait_until("the controller no longer names it", PATIENCE, || told(lab), |text| text.contains(&one))?;
        wait_in_force(&pod, lab.server("server1"), &[10])
    });
}

/// docs/failures.md: ipvs. kube-proxy gives each node the addresses of all Services, on a dummy device, and forwards
/// packets for them. Nothing else names these addresses.
#[test]
fn ipvs_services_work_as_before_and_their_addresses_are_not_reported() {
    lab::require_root!();
    let has_ipvs = Command::new("ipvsadm").arg("-L").output().is_ok_and(|output| output.status.success());
    lab::require!(has_ipvs, "no IPVS here: it runs in guests with other kernels");
    const SERVICES: u16 = 500;
    Lab::builder().gateways(1).run(|lab| {
        let web = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let backend = lab.add_pod(PodSpec::new("backend", "worker2"))?;
        let service = |family, n: u16| -> IpAddr {
            match family {
                Family::V4 => Ipv4Addr::from_bits(0x0a60_0000 + u32::from(n)).into(),
                Family::V6 => Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, n).into(),
            }
        };
        for name in ["worker1", "worker2", "gw1"] {
            let node = &lab.node(name).ns;
            let all = (1..=SERVICES).flat_map(|n| Family::BOTH.map(|family| service(family, n)));
            let add = |address| format!("addr add {address} dev kube-ipvs0 nodad");
            node.ip(&["link add kube-ipvs0 type dummy".to_owned()]
                .into_iter()
                .chain(all.map(add))
                .collect::<Vec<_>>())?;
            node.sysctls(&[("net.ipv4.vs.conntrack", "1")])?;
            for family in Family::BOTH {
                let (virtual_server, real) = (at(service(family, 10), 7000), at(backend.ips.ip(family), 7000));
                node.sh(&format!(
                    "ipvsadm -A -t {virtual_server} -s rr && ipvsadm -a -t {virtual_server} -r {real} -m"
                ))?;
            }
        }
        let seen = |family: Family| {
            let (to, own) = (at(service(family, 10), 7000), at(backend.ips.ip(family), 7000));
            source_at(&web.ns, to, &backend.ns, own, PATIENCE)
        };
        for family in Family::BOTH {
            assert_eq!(seen(family)?, web.ips.ip(family), "before there is a policy");
        }
        lab.manifests().write("web", &self::web(&[10]))?;
        start(lab)?;
        wait_in_force(&web, lab.server("server1"), &[10])?;
        for family in Family::BOTH {
            assert_eq!(seen(family)?, web.ips.ip(family), "next to a policy for everything");
        }
        for node in ["worker1", "worker2", "gw1"] {
            let told = lab.manifests().written("EgressNode", node).unwrap_or_default();
            assert!(
                told.contains("addresses") && !told.contains("10.96.") && !told.contains("fd00:96:"),
                "{node}: {told}"
            );
        }
        wait_in_force(&web, lab.server("server1"), &[10])
    });
}

/// docs/failures.md: everything-policy.
#[test]
fn everything_policy_leaves_the_clusters_own_traffic_alone() {
    for cni in Cni::BOTH {
        Lab::builder().gateways(1).far_servers(2).cni(cni).run(|lab| {
            lab.manifests().write("web", &web(&[10]))?;
            let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
            let neighbour = lab.add_pod(PodSpec::new("neighbour", "worker1"))?;
            let remote = lab.add_pod(PodSpec::new("remote", "worker2").label("app", "web"))?;
            let config = format!("{CALM}transport: device\nexceptCIDRs: [198.51.100.11/32, \"2001:db8:51::11/128\"]\n");
            start_with(lab, &StartOptions::new().config(&config))?;
            wait_in_force(&pod, lab.server("server1"), &[10])?;
            wait_in_force(&pod, lab.server("far1"), &[10])?;

            let node = lab.node("worker1");
            node.ns.ip(&["addr add 169.254.169.254/32 dev lo".to_owned()])?;
            let tunnelled = Capture::start(&node.ns, "spillway0")?;
            for family in Family::BOTH {
                let own = pod.ips.ip(family);
                for other in [&neighbour, &remote] {
                    assert_eq!(source_seen(&pod.ns, &other.ns, other.ips.ip(family))?, own, "to pod {}", other.name);
                }
                for name in ["worker1", "worker2", "gw1"] {
                    let other = lab.node(name);
                    assert_eq!(source_seen(&pod.ns, &other.ns, other.underlay.ip(family))?, own, "to node {name}");
                    let flow = UdpServer::start(&other.ns, &[at(other.underlay.ip(family), 7001)])?;
                    let clients =
                        UdpClients::start(&pod.ns, at(other.underlay.ip(family), 7001), 1, UdpOptions::once())?;
                    clients.wait("a reply", PATIENCE, |all| all[0].received == 1)?;
                    assert_eq!(flow.sources().into_keys().collect::<Vec<_>>(), [own]);
                    assert_eq!(ping(&pod.ns, other.underlay.ip(family), &Ping::default())?.replies.len(), 1);
                }
                let excepted = lab.server("far2");
                let masqueraded = node.underlay.ip(family);
                assert_eq!(source_seen(&pod.ns, &excepted.ns, excepted.ips.ip(family))?, masqueraded, "exceptCIDRs");
            }
            let metadata: IpAddr = [169, 254, 169, 254].into();
            assert_eq!(source_seen(&pod.ns, &node.ns, metadata)?, pod.ips.v4, "to a link-local address");
            // Nothing listens for these packets; they must not enter the tunnel.
            let scope = pod.ns.ifindex("eth0")?;
            pod.ns.run(|| {
                let v4 = UdpSocket::bind("0.0.0.0:0")?;
                v4.set_broadcast(true)?;
                v4.send_to(b"x", "239.1.2.3:9")?;
                v4.send_to(b"x", "255.255.255.255:9")?;
                let v6 = UdpSocket::bind("[::]:0")?;
                for group in ["ff02::1", "ff05::1:3"] {
                    v6.send_to(b"x", SocketAddrV6::new(group.parse()?, 9, 0, scope))?;
                }
                Ok(())
            })?;
            // Control: traffic for the outside does.
            wait_in_force(&pod, lab.server("server1"), &[10])?;
            let trace = tunnelled.finish()?;
            let outside: Vec<IpAddr> = ["server1", "far1"]
                .iter()
                .flat_map(|name| Family::BOTH.map(|family| lab.server(name).ips.ip(family)))
                .collect();
            // The node's kernel reports its multicast groups on the device, from the unspecified address; the reports
            // go no further. Probes have a port below all port blocks.
            let from_somebody = |packet: &lab::Packet| packet.ip().is_some_and(|ip| !ip.source.is_unspecified());
            let probe = |packet: &lab::Packet| packet.ports().is_some_and(|(source, _)| source.port() < 1024);
            let sent = trace.filter(|packet| packet.outgoing && from_somebody(packet) && !probe(packet));
            assert!(!sent.packets().is_empty());
            for packet in sent.packets() {
                let target = packet.ip().context("an IP packet")?.target;
                assert!(outside.contains(&target), "{target} entered the tunnel: {packet:?}");
            }
            Ok(())
        });
    }
}

/// docs/failures.md: reply-inbound.
#[test]
fn reply_inbound_replies_to_connections_from_outside_are_left_alone() {
    for cni in Cni::BOTH {
        Lab::builder().workers(1).gateways(2).cni(cni).run(|lab| {
            let (pod, server) = web_pod(lab, &[10, 11])?;
            let (tcp, udp) = (
                TcpServer::start(&pod.ns, &pod.ips.both(80), ServerMode::Echo)?,
                UdpServer::start(&pod.ns, &pod.ips.both(53))?,
            );
            let capture = Capture::start(&server.ns, "eth0")?;
            for family in Family::BOTH {
                let clients = TcpClients::establish(&server.ns, pod.ips.at(family, 80), 20, TcpOptions::default())?;
                clients.wait_progress(5, PATIENCE)?;
                assert!(clients.close()?.iter().all(|one| one.intact()));
                let flows = UdpClients::start(&server.ns, pod.ips.at(family, 53), 20, UdpOptions::default())?;
                flows.wait("replies", PATIENCE, |all| all.iter().all(|one| one.received > 3))?;
                let report = ping(&server.ns, pod.ips.ip(family), &Ping { count: 3, ..Ping::default() })?;
                assert_eq!(report.replies.len(), 3, "{report:?}");
            }
            assert_eq!((tcp.connections().len(), udp.flows().len()), (40, 40));
            // Connections that waited for the policy may still send resets and answers after the capture has begun.
            let looked = |packet: &lab::Packet| packet.ports().is_some_and(|(_, target)| target.port() == LOOK_PORT);
            let trace = capture.finish()?.filter(|packet| !looked(packet));
            for family in Family::BOTH {
                let seen = trace.sources_towards(server.ips.ip(family));
                let own = pod.ips.ip(family);
                let strays = trace.filter(|packet| packet.ip().is_some_and(|ip| ip.source != own));
                assert_eq!(seen.into_keys().collect::<Vec<_>>(), [own], "{:?}", strays.packets());
            }
            // The pod's own connections still belong to the policy.
            wait_in_force(&pod, &server, &[10, 11])
        });
    }
}

#[test]
fn connections_that_are_older_than_the_policy_stay_on_their_path_or_are_cut() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let keep = lab.add_pod(PodSpec::new("keep", "worker1").label("app", "web"))?;
        let cut = lab.add_pod(PodSpec::new("cut", "worker1").label("app", "cut"))?;
        start(lab)?;
        // Waits until the agent knows the pods, before the policies are added: a pod without any policy keeps its path to the outside.
        let other = policy("other", &format!("\n  selectors: [{{podSelector: {{matchLabels: {{app: other}}}}}}]\n  destinationCIDRs: [0.0.0.0/0, \"::/0\"]{}", gateways(&[12])));
        lab.manifests().write("other", &other)?;
        let witness = lab.add_pod(PodSpec::new("other", "worker1").label("app", "other"))?;
        let server = lab.server("server1");
        wait_in_force(&witness, server, &[12])?;

        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let open = |pod: &lab::Pod, family| TcpClients::establish(&pod.ns, server.ips.at(family, 80), 10, TcpOptions::default());
        let (kept, severed) = (
            [open(&keep, Family::V4)?, open(&keep, Family::V6)?],
            [open(&cut, Family::V4)?, open(&cut, Family::V6)?],
        );
        let drop_spec = "\n  selectors: [{podSelector: {matchLabels: {app: cut}}}]\n  destinationCIDRs: [0.0.0.0/0, \"::/0\"]\n  \
                         existingConnections: Drop";
        lab.manifests().write("cut", &policy("cut", &format!("{drop_spec}{}", gateways(&[11]))))?;
        lab.manifests().write("web", &web(&[10]))?;
        wait_in_force(&keep, server, &[10])?;
        wait_in_force(&cut, server, &[11])?;

        for clients in kept {
            clients.wait_progress(5, PATIENCE)?;
            assert!(clients.close()?.iter().all(|one| one.intact()));
        }
        for clients in severed {
            clients.reset_pauses();
            clients.wait("silence", PATIENCE, |all| {
                all.iter().all(|one| one.last_arrival.elapsed() > std::time::Duration::from_secs(1))
            })?;
        }
        for (family, node) in Family::BOTH.map(|family| (family, lab.node("worker1").underlay.ip(family))) {
            let peers: Vec<IpAddr> = streams.connections().iter().map(|one| one.peer.ip()).collect();
            assert!(peers.iter().filter(|peer| peer.is_ipv4() == (family == Family::V4)).all(|peer| *peer == node));
        }
        Ok(())
    });
}

/// `onNoGateway`: with `Drop` nothing leaves, with `NodeIP` the node's address is used.
#[test]
fn without_a_gateway_nothing_leaves_unless_the_policy_says_so() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let nobody = "egress: \"nobody\"";
        let spec = format!("{WEB}{}", crate::support::gateways_where(&[(10, 1, nobody)]));
        lab.manifests().write("web", &policy("web", &spec))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        start(lab)?;
        let server: Server = lab.server("server1").clone();
        wait_refused(&pod, &server)?;
        let capture = Capture::start(&server.ns, "eth0")?;
        for family in Family::BOTH {
            assert!(sources(&pod.ns, &server, family, 20)?.is_empty());
        }
        let trace = capture.finish()?;
        for family in Family::BOTH {
            assert!(trace.sources_towards(server.ips.ip(family)).is_empty());
        }
        lab.manifests().write("web", &policy("web", &(spec + "\n  onNoGateway: NodeIP")))?;
        for family in Family::BOTH {
            wait_sources(&pod.ns, &server, family, &[lab.node("worker1").underlay.ip(family)])?;
        }
        Ok(())
    });
}
