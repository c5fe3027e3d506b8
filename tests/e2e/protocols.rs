//! Protocols: TCP, UDP, echo, ICMP errors, fragments; both families, both kinds of CNI.

use std::net::IpAddr;

use anyhow::{Context, Result};
use lab::capture::{Checksum, Inner, TransportLayer};
use lab::traffic::{
    BulkServer, Direction, FragmentOrder, Ping, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions,
    UdpServer, bulk, ping, send_fragments,
};
use lab::{Capture, Cni, Family, Lab, StartOptions, address, wait_until};

use crate::support::{PATIENCE, answers_in_fragments, bypass, calm, egress, wait_in_force, web_pod_with};

pub const HOSTS: [u8; 2] = [10, 11];

/// Runs a test with one pod under a policy with two egress IPs, in force.
fn with_pod(builder: lab::Builder, test: impl FnOnce(&mut Lab, lab::Pod) -> Result<()>) {
    with_pod_and(builder, &calm(), test);
}

/// [`with_pod`] with options for the agents.
pub fn with_pod_and(
    builder: lab::Builder,
    options: &StartOptions,
    test: impl FnOnce(&mut Lab, lab::Pod) -> Result<()>,
) {
    builder.workers(1).gateways(2).run(|lab| {
        let (pod, _) = web_pod_with(lab, &HOSTS, options)?;
        wait_in_force(&pod, lab.server("far1"), &HOSTS)?;
        test(lab, pod)
    });
}

/// Checks TCP, UDP and echo with two servers, and every checksum where the packets arrive.
fn tcp_udp_and_echo(cni: Cni, offload: bool) {
    with_pod(Lab::builder().cni(cni), |lab, pod| {
        for name in ["server1", "far1"] {
            let server = lab.server(name);
            server.ns.set_offload("eth0", offload)?;
            pod.ns.set_offload("eth0", offload)?;
            let (at_server, at_pod) = (Capture::start(&server.ns, "eth0")?, Capture::start(&pod.ns, "eth0")?);
            let tcp = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
            let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
            for family in Family::BOTH {
                let options = TcpOptions { records: 3, ..TcpOptions::default() };
                let clients = TcpClients::establish(&pod.ns, server.ips.at(family, 80), 20, options)?;
                clients.wait("echoes", PATIENCE, |all| all.iter().all(|one| one.received == 3 && one.wrong == 0))?;
                clients.close()?;
                let flows = UdpClients::start(&pod.ns, server.ips.at(family, 53), 20, UdpOptions::default())?;
                flows.wait("replies", PATIENCE, |all| all.iter().all(|one| one.received > 2 && one.corrupted == 0))?;
                for count in 1..4 {
                    let report = ping(&pod.ns, server.ips.ip(family), &Ping { count, ..Ping::default() })?;
                    assert_eq!(report.replies.len(), usize::from(count), "{report:?}");
                    assert!(report.replies.iter().all(|(from, _)| *from == server.ips.ip(family)));
                }
            }
            assert_eq!(tcp.connections().len(), 40);
            assert!(udp.flows().values().all(|seen| seen.corrupted == 0 && seen.peers.len() == 1));
            let (at_server, at_pod) = (at_server.finish()?, at_pod.finish()?);
            for family in Family::BOTH {
                let allowed = egress(family, &HOSTS);
                let target = server.ips.ip(family);
                assert!(at_server.unexpected_sources_towards(target, &allowed).is_empty());
                let echo = |packet: &lab::Packet| {
                    let transport = packet.ip().map(|ip| &ip.transport);
                    matches!(transport, Some(TransportLayer::Echo { request: true, .. }))
                        && packet.ip().is_some_and(|ip| allowed.contains(&ip.source))
                };
                assert_eq!(at_server.count(echo), 6, "{family:?}");
            }
            assert_eq!(at_server.wrong_checksums().packets(), []);
            assert_eq!(at_pod.wrong_checksums().packets(), []);
            if !offload {
                let with_ports = at_server.filter(|packet| packet.ports().is_some());
                let known = |packet: &lab::Packet| packet.ip().is_some_and(|ip| ip.checksum == Checksum::Right);
                let (all, right) = (with_ports.packets().len(), with_ports.count(known));
                assert!(right == all && all > 200, "{right} of {all}");
            }
        }
        Ok(())
    });
}

#[test]
fn tcp_udp_and_echo_of_point_to_point_pods() {
    tcp_udp_and_echo(Cni::PointToPoint, true);
}

#[test]
fn v6_csum_tcp_udp_and_echo_of_bridged_pods_with_every_checksum_filled_in() {
    tcp_udp_and_echo(Cni::Bridge, false);
}

/// docs/failures.md: icmp-error.
#[test]
fn icmp_error_of_any_kind_reaches_the_pod_that_it_is_about() {
    with_pod(Lab::builder().far_mtu(1300).far_servers(2), |lab, pod| {
        let (near, far) = (lab.server("server1"), lab.server("far1"));
        let at_pod = Capture::start(&pod.ns, "eth0")?;
        for family in Family::BOTH {
            // Port unreachable from the server: the kernel delivers it to the socket only if the quoted ports are right.
            let flows = UdpClients::start(&pod.ns, near.ips.at(family, 9), 5, UdpOptions::default())?;
            flows.wait("refusals", PATIENCE, |all| {
                all.iter().any(|one| one.errors.keys().any(|error| error.contains("refused")))
            })?;
            // Time exceeded at the router behind the gateway.
            let exceeded = || {
                let mut errors = Vec::new();
                for ttl in 1..5 {
                    errors.extend(ping(&pod.ns, far.ips.ip(family), &Ping { ttl, ..Ping::default() })?.errors);
                }
                Ok(errors)
            };
            let router = address::external(1).ip(family);
            wait_until("time exceeded from the router", PATIENCE, exceeded, |errors: &Vec<(IpAddr, String)>| {
                errors.iter().any(|(from, text)| *from == router && text.contains("TimeExceeded"))
            })?;
            // Too big at the router, whose link to the far server has a smaller MTU.
            let large = Ping { size: 1310, dont_fragment: true, ..Ping::default() };
            let report = ping(&pod.ns, far.ips.ip(family), &large)?;
            assert_eq!((report.mtu, &report.errors[0].0), (Some(1300), &router), "{report:?}");
        }
        // TCP discovers the MTU from the same errors: the pod knows no path to this server yet, and the server announces larger segments
        // than fit the path.
        let unknown = lab.server("far2");
        let router = address::far(1);
        unknown.ns.sh(&format!(
            "ip route change default via {} dev eth0 advmss 1460
             ip -6 route change default via {} dev eth0 advmss 1440",
            router.v4, router.v6
        ))?;
        let _bulk = BulkServer::start(&unknown.ns, &unknown.ips.both(5001))?;
        for family in Family::BOTH {
            let report = bulk(&pod.ns, unknown.ips.at(family, 5001), Direction::Upload, 300_000)?;
            assert!(report.segment <= 1300 - 40, "{report:?}");
        }
        let trace = at_pod.finish()?;
        assert_eq!(trace.wrong_checksums().packets(), []);
        // The errors quote the packets as the pod sent them.
        let inner = |packet: &lab::Packet| match packet.ip().map(|ip| &ip.transport) {
            Some(TransportLayer::IcmpError { inner, .. }) if !packet.outgoing => Some(*inner),
            _ => None,
        };
        let errors: Vec<_> = trace.packets().iter().filter_map(inner).collect();
        assert!(errors.len() > 6, "{errors:?}");
        for family in Family::BOTH {
            let of_tcp = |inner: &Inner| (inner.protocol, inner.target) == (6, unknown.ips.ip(family));
            assert!(errors.iter().flatten().any(of_tcp), "{family:?}: {errors:?}");
        }
        for inner in errors {
            let inner = inner.context("an error without a packet inside")?;
            assert!(Family::BOTH.iter().any(|&family| inner.source == pod.ips.ip(family)), "{inner:?}");
        }
        Ok(())
    });
}

/// docs/failures.md: fragments.
#[test]
fn fragments_of_datagrams_arrive_with_the_egress_ip_and_so_do_their_answers() {
    fragments_both_ways(&calm());
}

/// docs/failures.md: fragments, where no stack reorders them.
#[test]
fn fragments_arrive_both_ways_without_the_firewall() {
    fragments_both_ways(&bypass());
}

/// docs/failures.md: fragments, with a bypassed firewall that lets nothing pass.
#[test]
fn fragments_that_fit_the_transport_do_not_meet_a_bypassed_firewall() {
    const MTU: u32 = 1400;
    let small = Lab::builder().pod_mtu(MTU).external_mtu(MTU).far_mtu(MTU);
    with_pod_and(small, &bypass(), |lab, pod| {
        let deny = "type filter hook forward priority filter; policy drop;";
        lab.node(&pod.node).ns.nft(&format!("table inet denied {{\nchain forward {{\n{deny}\n}}\n}}"))?;
        let server = lab.server("server1");
        let _udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
        for family in Family::BOTH {
            let options = UdpOptions { size: 4000, ..UdpOptions::default() };
            let flows = UdpClients::start(&pod.ns, server.ips.at(family, 53), 5, options)?;
            flows.wait("large answers", PATIENCE, |all| all.iter().all(|one| one.received > 3))?;
        }
        Ok(())
    });
}

fn fragments_both_ways(options: &StartOptions) {
    with_pod_and(Lab::builder(), options, |lab, pod| {
        for name in ["server1", "far1"] {
            let server = lab.server(name);
            let capture = Capture::start(&server.ns, "eth0")?;
            let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
            for family in Family::BOTH {
                let options = UdpOptions { size: 4000, ..UdpOptions::default() };
                let flows = UdpClients::start(&pod.ns, server.ips.at(family, 53), 5, options)?;
                flows.wait("large answers", PATIENCE, |all| all.iter().all(|one| one.received > 3))?;
                let (from, to) = (pod.ips.at(family, 7001), server.ips.at(family, 53));
                for order in [FragmentOrder::InOrder, FragmentOrder::Reversed] {
                    let id = send_fragments(&pod.ns, from, to, 4000, 1000, order)?;
                    wait_until(
                        &format!("the datagram {order:?}"),
                        PATIENCE,
                        || Ok(udp.flows()),
                        |flows| flows.get(&id).is_some_and(|one| one.received == 1),
                    )?;
                }
                answers_in_fragments(&pod, server, family)?;
            }
            assert!(udp.flows().values().all(|one| one.corrupted == 0));
            let trace = capture.finish()?;
            for family in Family::BOTH {
                let (target, allowed) = (server.ips.ip(family), egress(family, &HOSTS));
                let strangers = trace.unexpected_sources_towards(target, &allowed);
                assert!(strangers.is_empty(), "{strangers:?}");
                let fragments = trace.count(|packet| {
                    packet.ip().is_some_and(|ip| ip.fragment.is_some() && allowed.contains(&ip.source))
                });
                assert!(fragments >= 3 * 5 * 3, "{family:?} {fragments}");
            }
        }
        Ok(())
    });
}
