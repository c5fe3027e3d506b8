//! The exit: packets of a CNI that does its own routing, and packets that must not leave a node, whatever sent them.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use lab::hook::{ChainPosition, HookAction, Hooked, Means, Side, hook_by};
use lab::traffic::forge::{FORWARD, REPLY, TUNNEL_PORT};
use lab::traffic::{
    Protocol, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer, send_packet,
    send_vxlan, send_vxlan_from,
};
use lab::{Builder, Capture, Cni, Family, Lab, Pod, PodSpec, Server, wait_until};

use crate::support::{
    PATIENCE, assert_no_strangers, at, attaching, counter, egress, fixed, sources, wait_counter, wait_in_force,
    web_pod, web_pod_with,
};

/// Runs a test with a selected pod on `worker1`, its policy in force. Nothing masquerades, so a leak shows the pod's address.
fn with_pod(cni: Cni, test: impl FnOnce(&mut Lab, &Pod, &Server) -> Result<()>) {
    with_pod_by(Means::Tcx, cni, test);
}

/// [`with_pod`] with agents that attach their programs by these means.
fn with_pod_by(means: Means, cni: Cni, test: impl FnOnce(&mut Lab, &Pod, &Server) -> Result<()>) {
    bare(cni).run(|lab| {
        let (pod, server) = web_pod_with(lab, &[10], &attaching(means))?;
        let capture = Capture::start(&server.ns, "eth0")?;
        test(lab, &pod, &server)?;
        assert_no_strangers(&capture.finish()?, &server, &[10]);
        Ok(())
    });
}

fn bare(cni: Cni) -> Builder {
    Lab::builder().workers(1).gateways(1).cni(cni).masquerade(false)
}

/// Acts like a CNI that routes in eBPF: a program at the pod's interface forwards every IP packet itself.
fn route(lab: &Lab, pod: &Pod, means: Means, position: ChainPosition) -> Result<Hooked> {
    let node = lab.node(&pod.node);
    let uplink = node.ns.ifindex(node.uplink())?;
    hook_by(means, &node.ns, &pod.host_interface, Side::Ingress, HookAction::ToNeighbour(uplink), position)
}

/// docs/failures.md: ebpf-cni.
#[test]
fn ebpf_cni_that_routes_behind_our_program_is_caught_at_the_exit() {
    for (means, cni) in [(Means::Tcx, Cni::PointToPoint), (Means::Tcx, Cni::Bridge), (Means::Clsact, Cni::PointToPoint)]
    {
        with_pod_by(means, cni, |lab, pod, server| {
            let _routes = route(lab, pod, means, ChainPosition::Last)?;
            let _echo = TcpServer::start(&server.ns, &server.ips.both(8080), ServerMode::Echo)?;
            let _udp = UdpServer::start(&server.ns, &server.ips.both(8053))?;
            for family in Family::BOTH {
                let passed = counter(lab, &pod.node, "firewall_passed")?;
                let seen = sources(&pod.ns, server, family, 20)?;
                assert_eq!(seen, [(egress(family, &[10])[0], 20)].into(), "{means:?} {cni:?}");
                let clients = TcpClients::establish(&pod.ns, server.ips.at(family, 8080), 5, TcpOptions::default())?;
                clients.wait_progress(10, PATIENCE)?;
                // Fragments take the host-stack path even in a confirmed flow.
                let options = UdpOptions { size: 4000, ..UdpOptions::default() };
                let large = UdpClients::start(&pod.ns, server.ips.at(family, 8053), 3, options)?;
                large.wait("large answers", PATIENCE, |all| all.iter().all(|one| one.received > 3))?;
                assert!(counter(lab, &pod.node, "firewall_passed")? >= passed + 28, "{means:?} {cni:?} {family:?}");
            }
            Ok(())
        });
    }
}

/// docs/failures.md: ebpf-cni. Until our program is first again, no program has inspected these packets.
#[test]
fn ebpf_cni_that_routes_before_our_program_lets_nothing_out() {
    for means in Means::BOTH {
        with_pod_by(means, Cni::PointToPoint, |lab, pod, server| {
            for family in Family::BOTH {
                let before = counter(lab, &pod.node, "drop_unguarded")?;
                let _listens = UdpServer::start(&server.ns, &server.ips.both(8053))?;
                let flows = UdpClients::start(&pod.ns, server.ips.at(family, 8053), 3, UdpOptions::default())?;
                flows.wait("answers", PATIENCE, |all| all.iter().all(|one| one.received > 3))?;
                // The agent puts its program first again within a second; the test displaces it until a packet has met that gap.
                wait_until(
                    "packets that no program has seen are dropped",
                    PATIENCE,
                    || {
                        let _routes = route(lab, pod, means, ChainPosition::First)?;
                        sources(&pod.ns, server, family, 4)?;
                        counter(lab, &pod.node, "drop_unguarded")
                    },
                    |now| *now > before,
                )?;
            }
            wait_in_force(pod, server, &[10])
        });
    }
}

/// docs/failures.md: ebpf-cni, policy-bypass: packets that such a CNI denies.
#[test]
fn ebpf_cni_denials_are_respected() {
    for means in Means::BOTH {
        with_pod_by(means, Cni::PointToPoint, |lab, pod, server| {
            let node = lab.node(&pod.node).ns.clone();
            let _echo = TcpServer::start(&server.ns, &server.ips.both(8080), ServerMode::Echo)?;
            for family in Family::BOTH {
                let before = TcpClients::establish(&pod.ns, server.ips.at(family, 8080), 3, TcpOptions::default())?;
                let (asked, passed) =
                    (counter(lab, &pod.node, "firewall_asked")?, counter(lab, &pod.node, "firewall_passed")?);
                let denies =
                    hook_by(means, &node, &pod.host_interface, Side::Ingress, HookAction::Drop, ChainPosition::Last)?;
                assert_eq!(sources(&pod.ns, server, family, 5)?, Default::default());
                assert_eq!(counter(lab, &pod.node, "firewall_passed")?, passed);
                assert!(counter(lab, &pod.node, "firewall_asked")? >= asked + 5);
                // Established connections continue, as with every stateful firewall.
                before.wait_progress(5, PATIENCE)?;
                drop(denies);
                wait_in_force(pod, server, &[10])?;
            }
            Ok(())
        });
    }
}

/// docs/failures.md: ebpf-cni, masquerade: a CNI program at the exit, behind ours, gives every packet the node's address.
#[test]
fn ebpf_cni_that_masquerades_at_the_exit_changes_no_source() {
    for means in Means::BOTH {
        with_pod_by(means, Cni::PointToPoint, |lab, pod, server| {
            let node = lab.node(&pod.node);
            let _routes = route(lab, pod, means, ChainPosition::Last)?;
            let masquerade = HookAction::Masquerade(pod.ips.v4, node.underlay.v4);
            let _masquerades = hook_by(means, &node.ns, node.uplink(), Side::Egress, masquerade, ChainPosition::Last)?;
            wait_in_force(pod, server, &[10])?;
            // While it stays in front of ours, packets no longer match their flow.
            let before = counter(lab, &pod.node, "drop_not_asked")?;
            wait_until(
                "a first packet that is masqueraded already is dropped",
                PATIENCE,
                || {
                    let _first =
                        hook_by(means, &node.ns, node.uplink(), Side::Egress, masquerade, ChainPosition::First)?;
                    sources(&pod.ns, server, Family::V4, 4)?;
                    counter(lab, &pod.node, "drop_not_asked")
                },
                |now| *now > before,
            )?;
            wait_in_force(pod, server, &[10])
        });
    }
}

/// Firewall rules see the interface that the administrator expects.
#[test]
fn forward_sees_the_real_output_interface() {
    with_pod(Cni::PointToPoint, |lab, pod, server| {
        let node = lab.node(&pod.node);
        let rule = |interface: &str| {
            format!(
                "table inet real {{ chain forward {{
                    type filter hook forward priority filter; policy accept;
                    oifname {interface} drop
                }}
                }}"
            )
        };
        node.ns.nft(&rule(node.uplink()))?;
        for family in Family::BOTH {
            assert_eq!(sources(&pod.ns, server, family, 4)?, Default::default());
        }
        node.ns.nft(&format!("delete table inet real\n{}", rule("spillway0")))?;
        wait_in_force(pod, server, &[10])
    });
}

/// A node without a default route: one of the reasons to use gateways. Packets pass FORWARD there as well.
#[test]
fn a_node_without_a_default_route_sends_by_the_tunnel_device() {
    with_pod(Cni::PointToPoint, |lab, pod, server| {
        let node = lab.node(&pod.node);
        node.ns.sh("ip route del default; ip -6 route del default")?;
        wait_in_force(pod, server, &[10])?;
        node.ns.nft(
            "table inet real { chain forward {
            type filter hook forward priority filter; policy accept;
            oifname spillway0 drop
        }
        }",
        )?;
        for family in Family::BOTH {
            assert_eq!(sources(&pod.ns, server, family, 4)?, Default::default());
        }
        node.ns.nft("delete table inet real")?;
        wait_in_force(pod, server, &[10])
    });
}

/// Sends packets that must not leave from sockets on a node, and checks that they are counted under `counted`.
fn refused(lab: &Lab, node: &str, counted: &str, what: &str, send: impl Fn() -> Result<()>) -> Result<()> {
    let before = counter(lab, node, counted)?;
    send()?;
    wait_counter(lab, node, counted, before).with_context(|| format!("{what} on {node}"))
}

/// docs/failures.md: forged-source, for raw sockets of the host and of pods with hostNetwork.
#[test]
fn forged_source_of_a_host_socket_does_not_leave() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let (_, server) = web_pod(lab, &[10])?;
        let capture = Capture::start(&server.ns, "eth0")?;
        for family in Family::BOTH {
            let ip = egress(family, &[10])[0];
            let target = server.ips.at(family, 4242);
            for node in ["worker1", "gw1", "gw2"] {
                let ns = &lab.node(node).ns;
                for protocol in [Protocol::Udp, Protocol::Syn] {
                    let send = || send_packet(ns, protocol, at(ip, 5000), target);
                    refused(lab, node, "drop_forged", &format!("{protocol:?} as {ip}"), send)?;
                }
                // The node may use its own address.
                let own = lab.node(node).underlay.ip(family);
                send_packet(ns, Protocol::Udp, at(own, 5001), target)?;
                capture.wait_for("the node's own packet", PATIENCE, |p| p.ports() == Some((at(own, 5001), target)))?;
            }
        }
        let forged = Family::BOTH.map(|family| at(egress(family, &[10])[0], 5000));
        let is_forged = |packet: &lab::Packet| packet.ports().is_some_and(|(from, _)| forged.contains(&from));
        capture.finish_without("a forged packet", is_forged).map(drop)
    });
}

/// docs/failures.md: forged-encap, for sockets of the host and of pods with hostNetwork, which need no privilege for this.
#[test]
fn forged_encap_of_a_host_socket_reaches_no_tunnel() {
    Lab::builder().workers(2).gateways(1).run(|lab| {
        let (pod, server) = web_pod_with(lab, &[10], &fixed("device"))?;
        let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
        let capture = Capture::start(&server.ns, "eth0")?;
        let device = |node: &str| lab.node(node).underlay.at(Family::V4, TUNNEL_PORT);
        for family in Family::BOTH {
            // The port is leased to worker1, so the gateway would forward a packet from there.
            let flows = UdpClients::start(&pod.ns, server.ips.at(family, 53), 1, UdpOptions::default())?;
            let id = flows.wait("an answer", PATIENCE, |all| all[0].received > 0)?[0].id;
            let translated = *udp.flows()[&id].peers.first().context("a peer")?;
            let target = server.ips.at(family, 4242);
            for network in [FORWARD, REPLY] {
                let worker = &lab.node("worker1").ns;
                let send = || send_vxlan(worker, device("gw1"), network, Protocol::Udp, translated, target);
                refused(lab, "worker1", "drop_tunnel_port", "a plain socket", send)?;
            }
            // On the gateway itself, over lo: from its own address, and from worker1's.
            let gateway = &lab.node("gw1").ns;
            let send = || send_vxlan(gateway, device("gw1"), FORWARD, Protocol::Udp, translated, target);
            refused(lab, "gw1", "drop_tunnel_loop", "a plain socket over lo", send)?;
            let from = SocketAddr::new(lab.node("worker1").underlay.ip(Family::V4), 50_000);
            let send = || send_vxlan_from(gateway, from, device("gw1"), FORWARD, Protocol::Udp, translated, target);
            refused(lab, "gw1", "drop_tunnel_loop", "a raw socket over lo", send)?;
        }
        let targets = server.ips.both(4242);
        let arrived = |packet: &lab::Packet| packet.ports().is_some_and(|(_, to)| targets.contains(&to));
        capture.finish_without("a packet out of a tunnel", arrived).map(drop)
    });
}

/// Pods that no policy selects, and the node itself, behave as they would without Spillway.
#[test]
fn unselected_pods_and_the_node_itself_are_not_limited() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let plain = lab.add_pod(PodSpec::new("plain", "worker1"))?;
        let routed = lab.add_pod(PodSpec::new("routed", "worker1"))?;
        let (_, server) = web_pod(lab, &[10])?;
        let node = lab.node("worker1").clone();
        let _routes = route(lab, &routed, Means::Tcx, ChainPosition::Last)?;
        for family in Family::BOTH {
            let own = node.masquerade().ip(family);
            assert_eq!(sources(&plain.ns, &server, family, 10)?, [(own, 10)].into());
            assert_eq!(sources(&node.ns, &server, family, 10)?, [(own, 10)].into());
            // Nothing masquerades this packet.
            let address = routed.ips.ip(family);
            assert_eq!(sources(&routed.ns, &server, family, 10)?, [(address, 10)].into());
        }
        Ok(())
    });
}
