//! Services: the host translates their addresses after our program at the pod's interface, and a policy may cover the result.

use std::net::IpAddr;

use anyhow::Result;
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer};
use lab::{Capture, Cni, Family, Lab, NetNs, Pod, PodSpec, Server, StartOptions, wait_until};

use crate::support::{
    CALM, PATIENCE, WEB, at, counter, gateways_where, policy, wait_in_force, wait_refused, wait_sources, web_pod_with,
};

/// The network of Services, which the configuration excepts.
const SERVICES: &str = "exceptCIDRs: [10.96.0.0/16, \"fd00:10:96::/112\"]";
const TCP_PORT: u16 = 8080;
const UDP_PORT: u16 = 8053;

/// Returns the address of the Service with this number.
fn service(family: Family, number: u8) -> IpAddr {
    match family {
        Family::V4 => [10, 96, 0, number].into(),
        Family::V6 => [0xfd00, 0x10, 0x96, 0, 0, 0, 0, u16::from(number)].into(),
    }
}

fn settings(firewall: &str) -> StartOptions {
    StartOptions::new().config(&format!("{CALM}firewall: {firewall}\n{SERVICES}\n"))
}

/// Does what kube-proxy does for the Service with this number, whose only endpoint has these addresses.
fn translate(node: &NetNs, number: u8, [v4, v6]: [IpAddr; 2]) -> Result<()> {
    let [service4, service6] = Family::BOTH.map(|family| service(family, number));
    node.nft(&format!(
        "table inet service{number} {{
            chain prerouting {{
                type nat hook prerouting priority dstnat; policy accept;
                ip daddr {service4} dnat ip to {v4}
                ip6 daddr {service6} dnat ip6 to {v6}
            }}
        }}"
    ))
}

/// Sends TCP and UDP to a Service, and passes both clients to `judge`.
fn use_service(
    from: &Pod,
    family: Family,
    number: u8,
    judge: impl Fn(&TcpClients, &UdpClients) -> Result<()>,
) -> Result<()> {
    let to = service(family, number);
    let tcp = TcpClients::open(&from.ns, at(to, TCP_PORT), 3, TcpOptions::default())?;
    let udp = UdpClients::start(&from.ns, at(to, UDP_PORT), 3, UdpOptions::default())?;
    judge(&tcp, &udp)
}

fn answered(tcp: &TcpClients, udp: &UdpClients) -> Result<()> {
    tcp.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received > 2))?;
    udp.wait("answers", PATIENCE, |all| all.iter().all(|one| one.received > 2)).map(drop)
}

/// Checks that no packet from the selected pod reaches the server behind Service 10, and that the drops are counted.
fn no_way_to_the_outside(lab: &Lab, pod: &Pod, server: &Server) -> Result<()> {
    let capture = Capture::start(&server.ns, "eth0")?;
    let leaked = |packet: &lab::Packet| packet.ports().is_some_and(|(_, to)| [TCP_PORT, UDP_PORT].contains(&to.port()));
    let dropped = |before: u64| {
        let happened = || Ok((counter(lab, &pod.node, "drop_service")? > before, capture.count(leaked)));
        wait_until("drops, or a leak", PATIENCE, happened, |(dropped, leaks)| *dropped || *leaks > 0)
    };
    for family in Family::BOTH {
        let to = |port| at(service(family, 10), port);
        let before = counter(lab, &pod.node, "drop_service")?;
        let tcp = TcpClients::open(&pod.ns, to(TCP_PORT), 3, TcpOptions::default())?;
        dropped(before + 2)?;
        drop(tcp);
        let before = counter(lab, &pod.node, "drop_service")?;
        let udp = UdpClients::start(&pod.ns, to(UDP_PORT), 3, UdpOptions::default())?;
        dropped(before + 8)?;
        drop(udp);
    }
    capture.finish_without("a packet past the policy", leaked).map(drop)
}

/// docs/failures.md: service-bypass.
#[test]
fn service_bypass_no_packet_for_an_endpoint_outside_leaves_past_the_policy() {
    let all =
        [(Cni::PointToPoint, true, "respect"), (Cni::PointToPoint, false, "respect"), (Cni::Bridge, true, "bypass")];
    for (cni, masquerade, firewall) in all {
        Lab::builder().workers(1).gateways(1).cni(cni).masquerade(masquerade).run(|lab| {
            let (pod, server) = web_pod_with(lab, &[10], &settings(firewall))?;
            let plain = lab.add_pod(PodSpec::new("plain", "worker1"))?;
            let neighbour = lab.add_pod(PodSpec::new("neighbour", "worker1"))?;
            let node = lab.node("worker1").ns.clone();
            translate(&node, 10, [server.ips.v4.into(), server.ips.v6.into()])?;
            translate(&node, 20, [neighbour.ips.v4.into(), neighbour.ips.v6.into()])?;
            let mut servers = Vec::new();
            for (ns, ips) in [(&server.ns, server.ips), (&neighbour.ns, neighbour.ips)] {
                let tcp = TcpServer::start(ns, &ips.both(TCP_PORT), ServerMode::Echo)?;
                servers.push((tcp, UdpServer::start(ns, &ips.both(UDP_PORT))?));
            }
            for family in Family::BOTH {
                use_service(&plain, family, 10, answered)?;
                use_service(&pod, family, 20, answered)?;
            }
            no_way_to_the_outside(lab, &pod, &server)?;
            // The endpoints of a headless Service are under the policy.
            wait_in_force(&pod, &server, &[10])?;
            Ok(())
        });
    }
}

/// docs/failures.md: service-bypass. A policy that lets its pods leave with the node's address also lets them do so through a Service.
#[test]
fn service_bypass_drops_nothing_if_the_policy_allows_the_nodes_address() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (pod, server) = web_pod_with(lab, &[10], &settings("respect"))?;
        translate(&lab.node("worker1").ns, 10, [server.ips.v4.into(), server.ips.v6.into()])?;
        let _tcp = TcpServer::start(&server.ns, &server.ips.both(TCP_PORT), ServerMode::Echo)?;
        let _udp = UdpServer::start(&server.ns, &server.ips.both(UDP_PORT))?;
        let nowhere = format!("{WEB}{}", gateways_where(&[(10, 1, "nobody: here")]));
        lab.manifests().write("web", &policy("web", &nowhere))?;
        wait_refused(&pod, &server)?;
        no_way_to_the_outside(lab, &pod, &server)?;
        lab.manifests().write("web", &policy("web", &(nowhere + "\n  onNoGateway: NodeIP")))?;
        for family in Family::BOTH {
            wait_sources(&pod.ns, &server, family, &[lab.node("worker1").underlay.ip(family)])?;
            use_service(&pod, family, 10, answered)?;
        }
        Ok(())
    });
}

/// docs/failures.md: service-bypass. The API server of a managed cluster is also behind a Service, and is not a node.
/// It sees the node's address, or the pod's where the network routes pod addresses.
#[test]
fn service_bypass_drops_no_connection_to_the_api_server() {
    for masquerade in [true, false] {
        Lab::builder().workers(1).gateways(1).masquerade(masquerade).run(|lab| {
            let api_server = service(Family::V4, 10).to_string();
            let settings = settings("respect").env("KUBERNETES_SERVICE_HOST", &api_server);
            let (pod, server) = web_pod_with(lab, &[10], &settings)?;
            let node = lab.node("worker1").clone();
            translate(&node.ns, 10, [server.ips.v4.into(), server.ips.v6.into()])?;
            let tcp = TcpServer::start(&server.ns, &server.ips.both(TCP_PORT), ServerMode::Stream)?;
            let connect =
                |family| TcpClients::open(&pod.ns, at(service(family, 10), TCP_PORT), 3, TcpOptions::default());
            let clients = connect(Family::V4)?;
            clients.wait("records", PATIENCE, |all| all.iter().all(|one| one.received > 2))?;
            let sender = if masquerade { node.underlay.ip(Family::V4) } else { pod.ips.v4.into() };
            assert!(tcp.sources().into_keys().eq([sender]), "{:?}", tcp.sources());
            for reason in ["drop_service", "drop_unguarded"] {
                assert_eq!(counter(lab, "worker1", reason)?, 0, "{reason}");
            }
            // The IPv6 address with the same number belongs to another Service.
            let _other = connect(Family::V6)?;
            wait_until("drops", PATIENCE, || counter(lab, "worker1", "drop_service"), |count| *count > 2)?;
            Ok(())
        });
    }
}

/// docs/failures.md: service-bypass, reply-inbound. The node masquerades connections that the outside opens at the
/// node's own address. The pod's answers go to the node and leave for the outside with another destination.
#[test]
fn service_bypass_drops_no_answer_of_a_node_port() {
    for cni in Cni::BOTH {
        Lab::builder().workers(1).gateways(1).cni(cni).run(|lab| {
            let (pod, server) = web_pod_with(lab, &[10], &settings("respect"))?;
            let node = lab.node("worker1");
            node.ns.nft(&format!(
                "table inet nodeport {{
                    chain prerouting {{
                        type nat hook prerouting priority dstnat; policy accept;
                        iifname {uplink} ip daddr {} meta l4proto {{ tcp, udp }} th dport {{ {TCP_PORT}, {UDP_PORT} }} dnat ip to {}
                        iifname {uplink} ip6 daddr {} meta l4proto {{ tcp, udp }} th dport {{ {TCP_PORT}, {UDP_PORT} }} dnat ip6 to {}
                    }}
                    chain postrouting {{
                        type nat hook postrouting priority srcnat; policy accept;
                        ct status dnat masquerade
                    }}
                }}",
                node.underlay.v4, pod.ips.v4, node.underlay.v6, pod.ips.v6,
                uplink = node.uplink(),
            ))?;
            let _tcp = TcpServer::start(&pod.ns, &pod.ips.both(TCP_PORT), ServerMode::Echo)?;
            let udp_server = UdpServer::start(&pod.ns, &pod.ips.both(UDP_PORT))?;
            for family in Family::BOTH {
                let tcp = TcpClients::establish(&server.ns, node.underlay.at(family, TCP_PORT), 3, TcpOptions::default())?;
                let udp = UdpClients::start(&server.ns, node.underlay.at(family, UDP_PORT), 3, UdpOptions::default())?;
                answered(&tcp, &udp)?;
                let seen = udp_server.sources();
                assert!(!seen.contains_key(&server.ips.ip(family)), "the node masquerades: {seen:?}");
            }
            assert_eq!(counter(lab, "worker1", "drop_service")?, 0);
            wait_in_force(&pod, &server, &[10])
        });
    }
}
