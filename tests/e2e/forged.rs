//! Spoofing: forged sources, tunnels and errors, and answers to packets that the outside never sent.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use anyhow::{Context, Result};
use lab::capture::{Ip, TransportLayer};
use lab::hook::hook_xdp;
use lab::traffic::forge::{FORWARD, REPLY, TUNNEL_PORT};
use lab::traffic::{
    Protocol, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer, reset_after_data,
    send_error, send_packet, send_tagged, send_vxlan,
};
use lab::{Capture, Cni, Dual, Family, Lab, Pod, PodSpec, Server, wait_for, wait_until};
use serde_json::Value;

use crate::security::leased_port;
use crate::support::{
    PATIENCE, at, counter, egress, forbid, sources, wait_bypass, wait_counter, wait_grown, wait_in_force, web_pod,
};

/// Returns the translated address and port of a new flow from the pod to the server.
fn translated_port(pod: &Pod, server: &Server, udp: &UdpServer, family: Family) -> Result<SocketAddr> {
    let flows = UdpClients::start(&pod.ns, server.ips.at(family, 53), 1, UdpOptions::once())?;
    let id = flows.wait("a reply", PATIENCE, |all| all[0].received == 1)?[0].id;
    udp.flows()[&id].peers.first().copied().context("a peer")
}

/// Sends a datagram from a pod to an address of the server. Returns the source that the server sees.
fn ask(pod: &Pod, own: SocketAddr, server: &Server, target: SocketAddr) -> Result<SocketAddr> {
    let listening = server.ns.run(|| Ok(UdpSocket::bind(target)?))?;
    listening.set_read_timeout(Some(PATIENCE))?;
    pod.ns.run(|| Ok(UdpSocket::bind(own)?.send_to(b"a question", target)?))?;
    Ok(listening.recv_from(&mut [0; 64]).context("the question")?.1)
}

/// docs/failures.md: forged-encap. The node masquerades packets from its pods to other nodes.
#[test]
fn forged_encap_no_pod_reaches_a_tunnel() {
    Lab::builder().workers(2).gateways(1).masquerade_underlay(true).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let attackers = [
            pod.clone(),
            lab.add_pod(PodSpec::new("plain", "worker1"))?,
            lab.add_pod(PodSpec::new("bridged", "worker1").cni(Cni::Bridge))?,
            lab.add_pod(PodSpec::new("remote", "worker2"))?,
        ];
        let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
        let nodes: Vec<Dual> = lab.nodes().flat_map(|node| [Some(node.underlay), node.external]).flatten().collect();
        let tunnels: Vec<SocketAddr> = nodes.iter().flat_map(|ips| ips.both(TUNNEL_PORT)).collect();
        for family in Family::BOTH {
            let (ip, port) = (egress(family, &[10])[0], leased_port(lab, family)?);
            let (out, answer) = (server.ips.at(family, 4242), server.ips.at(family, 53));
            let translated = translated_port(&pod, &server, &udp, family)?;
            for attacker in &attackers {
                let (at_server, at_pod) = (Capture::start(&server.ns, "eth0")?, Capture::start(&pod.ns, "eth0")?);
                let before = counter(lab, &attacker.node, "drop_tunnel_port")?;
                for tunnel in &tunnels {
                    send_vxlan(&attacker.ns, *tunnel, FORWARD, Protocol::Udp, at(ip, port), out)?;
                    send_vxlan(&attacker.ns, *tunnel, REPLY, Protocol::Udp, answer, translated)?;
                }
                // Packets that were sent later have arrived.
                assert_eq!(sources(&pod.ns, &server, family, 3)?.values().sum::<usize>(), 3);
                wait_grown(lab, &attacker.node, "drop_tunnel_port", before, 2 * tunnels.len() as u64)?;
                let forged = |packet: &lab::Packet| packet.ports().is_some_and(|(_, to)| to == out);
                at_server.finish_without(&format!("a packet of {} with the egress IP", attacker.name), forged)?;
                let forged = |p: &lab::Packet| !p.outgoing && p.ports().is_some_and(|(from, _)| from == answer);
                at_pod.finish_without(&format!("a reply of {}", attacker.name), forged)?;
            }
        }
        Ok(())
    });
}

/// docs/failures.md: forged-encap, where the pod's interface has no program: the FORWARD chain drops the packets.
#[test]
fn forged_encap_holds_without_a_program_at_the_pods_interface() {
    Lab::builder().workers(1).gateways(1).masquerade_underlay(true).run(|lab| {
        let (_, server) = web_pod(lab, &[10])?;
        let leased = Family::BOTH.map(|family| leased_port(lab, family));
        // A frozen agent attaches no program to a new interface.
        lab.agent("worker1").freeze()?;
        let plain = lab.add_pod(PodSpec::new("plain", "worker1"))?;
        for (family, port) in Family::BOTH.into_iter().zip(leased) {
            let (source, out) = (at(egress(family, &[10])[0], port?), server.ips.at(family, 4242));
            let capture = Capture::start(&server.ns, "eth0")?;
            let before = counter(lab, "worker1", "drop_forward_tunnel_port")?;
            for tunnel in lab.node("gw1").underlay.both(TUNNEL_PORT) {
                send_vxlan(&plain.ns, tunnel, FORWARD, Protocol::Udp, source, out)?;
            }
            wait_grown(lab, "worker1", "drop_forward_tunnel_port", before, 2)?;
            capture.finish_without("a packet with the egress IP", |p| p.ports().is_some_and(|(_, to)| to == out))?;
        }
        lab.agent("worker1").thaw()
    });
}

/// docs/failures.md: forged-source.
#[test]
fn forged_source_no_pod_sends_as_an_egress_ip_or_as_another_nodes_pod() {
    Lab::builder().workers(2).gateways(1).masquerade(false).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let remote = [
            lab.add_pod(PodSpec::new("remote", "worker2"))?,
            lab.add_pod(PodSpec::new("remote-web", "worker2").label("app", "web"))?,
        ];
        wait_in_force(&remote[1], &server, &[10])?;
        let attackers = [
            pod,
            lab.add_pod(PodSpec::new("plain", "worker1"))?,
            lab.add_pod(PodSpec::new("bridged", "worker1").cni(Cni::Bridge))?,
            lab.add_pod(PodSpec::new("on-gateway", "gw1"))?,
        ];
        for family in Family::BOTH {
            let out = server.ips.at(family, 4242);
            // Waits until agents have seen the attackers' interfaces and know the owners of the other pods' addresses.
            for (attacker, pod) in attackers.iter().flat_map(|attacker| remote.iter().map(move |pod| (attacker, pod))) {
                let before = counter(lab, &attacker.node, "drop_spoofed")?;
                wait_for("an attacker is seen", PATIENCE, || {
                    send_packet(&attacker.ns, Protocol::Udp, pod.ips.at(family, 1024), out)?;
                    Ok(counter(lab, &attacker.node, "drop_spoofed")? > before)
                })?;
            }
            let capture = Capture::start_everywhere(lab.router())?;
            let at_server = Capture::start(&server.ns, "eth0")?;
            let forged = |packet: &lab::Packet| packet.ports().is_some_and(|(_, to)| to == out);
            let pods = remote.iter().map(|pod| (pod.ips.ip(family), "drop_spoofed"));
            for (source, name) in pods.chain([(egress(family, &[10])[0], "drop_forged")]) {
                for attacker in &attackers {
                    let before = counter(lab, &attacker.node, name)?;
                    for protocol in [Protocol::Udp, Protocol::Syn] {
                        send_packet(&attacker.ns, protocol, at(source, 1024), out)?;
                    }
                    wait_grown(lab, &attacker.node, name, before, 2)?;
                }
            }
            capture.finish_without("a forged packet", forged)?;
            // Control: a packet with an unselected pod's own address gets through, and it is the only one.
            send_packet(&attackers[1].ns, Protocol::Udp, attackers[1].ips.at(family, 1024), out)?;
            at_server.wait_for("the pod's own address", PATIENCE, forged)?;
            assert_eq!(at_server.finish()?.count(forged), 1, "{family:?}");
        }
        Ok(())
    });
}

/// docs/failures.md: vlan-tag.
#[test]
fn vlan_tag_tagged_frames_of_pods_are_dropped() {
    for cni in Cni::BOTH {
        Lab::builder().workers(1).gateways(1).cni(cni).run(|lab| {
            let (pod, server) = web_pod(lab, &[10])?;
            let hop = match cni {
                Cni::PointToPoint => lab.node("worker1").ns.mac(&pod.host_interface)?,
                Cni::Bridge => lab.node("worker1").ns.mac("cni0")?,
            };
            for family in Family::BOTH {
                let target = server.ips.at(family, 53);
                ask(&pod, pod.ips.at(family, 40_053), &server, target)?;
                let capture = Capture::start(&server.ns, "eth0")?;
                let datagram = |p: &lab::Packet| !p.outgoing && p.ports().is_some_and(|(_, to)| to == target);
                // A tag with only a priority counts as well.
                for vlan in [0, 7] {
                    let before = counter(lab, "worker1", "drop_vlan_tag")?;
                    send_tagged(&pod.ns, "eth0", hop, vlan, pod.ips.at(family, 40_053), target)?;
                    wait_counter(lab, "worker1", "drop_vlan_tag", before)?;
                }
                send_packet(&pod.ns, Protocol::Udp, pod.ips.at(family, 40_053), target)?;
                capture.wait_for("the same without a tag", PATIENCE, datagram)?;
                assert_eq!(capture.finish()?.count(datagram), 1, "{family:?}");
            }
            Ok(())
        });
    }
}

/// Returns whether this is an incoming datagram or ICMP error from this address.
fn is_from(packet: &lab::Packet, source: IpAddr) -> bool {
    let says = |ip: &Ip| {
        ip.source == source && matches!(ip.transport, TransportLayer::Udp { .. } | TransportLayer::IcmpError { .. })
    };
    !packet.outgoing && packet.ip().is_some_and(says)
}

/// Returns the translated source of the flow with this port in the pod.
fn of_flow(lab: &Lab, pod: &Pod, family: Family, port: u16) -> Result<Option<SocketAddr>> {
    let flows = lab.egressctl(&pod.node, &["flows", "--pod", &pod.key()])?;
    let items = flows["items"].as_array().context("flows")?;
    let (address, port) = (Value::from(pod.ips.ip(family).to_string()), Value::from(port));
    let found = items.iter().find(|flow| flow["podAddress"] == address && flow["podPort"] == port);
    let Some(flow) = found else { return Ok(None) };
    let ip: IpAddr = flow["egressIp"].as_str().context("an egress IP")?.parse()?;
    let port = flow["egressPort"].as_u64().context("a port")?;
    Ok(Some(SocketAddr::new(ip, u16::try_from(port)?)))
}

/// docs/failures.md: forged-error. The firewall denies the flow: no packet of it passes in either direction.
#[test]
fn forged_error_cannot_bypass_the_firewall() {
    for cni in Cni::BOTH {
        Lab::builder().workers(1).gateways(1).cni(cni).run(|lab| {
            let (pod, server) = web_pod(lab, &[10])?;
            forbid(&lab.node("worker1").ns, &pod, &server)?;
            for family in Family::BOTH {
                let (own, target) = (pod.ips.at(family, 40_054), server.ips.at(family, 54));
                let (at_server, at_pod) = (Capture::start(&server.ns, "eth0")?, Capture::start(&pod.ns, "eth0")?);
                send_packet(&pod.ns, Protocol::Udp, own, target)?;
                let pending = || of_flow(lab, &pod, family, 40_054);
                let known = wait_until("a flow that waits", PATIENCE, pending, Option::is_some)?.context("a flow")?;
                // The pod sends errors, and the server sends what it could send if it had learnt of the flow.
                let before = counter(lab, "worker1", "drop_not_confirmed")?;
                for _ in 0..3 {
                    send_error(&pod.ns, own.ip(), target.ip(), (target, own))?;
                }
                wait_grown(lab, "worker1", "drop_not_confirmed", before, 3)?;
                send_packet(&server.ns, Protocol::Udp, target, known)?;
                send_error(&server.ns, target.ip(), known.ip(), (known, target))?;
                wait_grown(lab, "worker1", "drop_not_confirmed", before, 5)?;
                at_server.finish_without("a packet of the denied flow", |p| is_from(p, known.ip()))?;
                at_pod.finish_without("a packet of the denied flow", |p| is_from(p, target.ip()))?;
            }
            lab.node("worker1").ns.nft("delete table inet denied")?;
            // Once the firewall accepts the flow, errors about it pass as well.
            for family in Family::BOTH {
                let (own, target) = (pod.ips.at(family, 40_054), server.ips.at(family, 54));
                let capture = Capture::start(&server.ns, "eth0")?;
                let ip = egress(family, &[10])[0];
                let icmp = |p: &lab::Packet| p.ports().is_none() && is_from(p, ip);
                let datagram = |p: &lab::Packet| {
                    !p.outgoing && p.ports().is_some_and(|(from, to)| (from.ip(), to) == (ip, target))
                };
                send_packet(&pod.ns, Protocol::Udp, own, target)?;
                capture.wait_for("the datagram", PATIENCE, datagram)?;
                send_error(&pod.ns, own.ip(), target.ip(), (target, own))?;
                capture.wait_for("the error", PATIENCE, icmp)?;
            }
            Ok(())
        });
    }
}

/// docs/failures.md: forged-error. On a bridge, only the flow tells to which port a pod is connected.
#[test]
fn forged_error_about_another_pods_flow_is_dropped() {
    for cni in Cni::BOTH {
        Lab::builder().workers(1).gateways(1).cni(cni).run(|lab| {
            let (pod, server) = web_pod(lab, &[10])?;
            let attacker = lab.add_pod(PodSpec::new("attacker", "worker1").label("app", "web"))?;
            wait_in_force(&attacker, &server, &[10])?;
            for family in Family::BOTH {
                let (own, target) = (pod.ips.at(family, 40_055), server.ips.at(family, 53));
                ask(&pod, own, &server, target)?;
                let capture = Capture::start(&server.ns, "eth0")?;
                let before = counter(lab, "worker1", "drop_spoofed")?;
                send_error(&attacker.ns, own.ip(), target.ip(), (target, own))?;
                wait_counter(lab, "worker1", "drop_spoofed", before)?;
                let ip = egress(family, &[10])[0];
                let icmp = |p: &lab::Packet| p.ports().is_none() && is_from(p, ip);
                capture.finish_without("a forged error", icmp)?;
            }
            Ok(())
        });
    }
}

/// docs/failures.md: inbound-poison.
#[test]
fn inbound_poison_packets_of_another_pod_do_not_count_as_outside() {
    for cni in Cni::BOTH {
        Lab::builder().workers(1).gateways(1).cni(cni).run(|lab| {
            let (pod, server) = web_pod(lab, &[10])?;
            let attacker = lab.add_pod(PodSpec::new("attacker", "worker1"))?;
            for family in Family::BOTH {
                let (own, target) = (pod.ips.at(family, 40_056), server.ips.at(family, 53));
                let capture = Capture::start(&pod.ns, "eth0")?;
                send_packet(&attacker.ns, Protocol::Udp, target, own)?;
                let forged = |p: &lab::Packet| !p.outgoing && p.ports() == Some((target, own));
                capture.wait_for("the forged answer", PATIENCE, forged)?;
                assert_eq!(ask(&pod, own, &server, target)?.ip(), egress(family, &[10])[0], "{cni:?}");
            }
            Ok(())
        });
    }
}

/// docs/failures.md: syn-ack. A raw SYN+ACK exempts nothing from the policy, unless its SYN may have come in unseen.
#[test]
fn syn_ack_without_a_syn_exempts_no_connection_from_the_policy() {
    // The segments belong to no connection, so they would keep the pod's address whatever the masquerading rules.
    Lab::builder().workers(1).gateways(1).masquerade(false).run(|lab| {
        let (_, server) = web_pod(lab, &[10])?;
        // This pod is selected from its start: connections of an older pod might predate the policy.
        let pod = lab.add_pod(PodSpec::new("attacker", "worker1").label("app", "web"))?;
        wait_in_force(&pod, &server, &[10])?;
        let node = lab.node("worker1").ns.clone();
        let says = |family: Family, port: u16| -> Result<()> {
            for protocol in [Protocol::SynAck, Protocol::Segment] {
                send_packet(&pod.ns, protocol, pod.ips.at(family, port), server.ips.at(family, 4242))?;
            }
            Ok(())
        };
        let is_forged = |packet: &lab::Packet| {
            !packet.outgoing && packet.ports().is_some_and(|(_, to)| server.ips.both(4242).contains(&to))
        };
        wait_bypass(lab, "worker1", false)?;
        let dropped = |port: u16| -> Result<()> {
            let at_server = Capture::start(&server.ns, "eth0")?;
            for family in Family::BOTH {
                let before = counter(lab, "worker1", "drop_unknown_flow")?;
                says(family, port)?;
                wait_grown(lab, "worker1", "drop_unknown_flow", before, 2)?;
            }
            at_server.finish_without("the pod's own address", is_forged).map(drop)
        };
        dropped(8080)?;
        // Control, and the case in SECURITY.md: with a foreign program that could have delivered the SYN, the segments pass.
        let stranger = hook_xdp(&node, "eth0")?;
        wait_bypass(lab, "worker1", true)?;
        let at_server = Capture::start(&server.ns, "eth0")?;
        for family in Family::BOTH {
            says(family, 8081)?;
            let from = pod.ips.at(family, 8081);
            let both = |all: &lab::Packet| is_forged(all) && all.ports().is_some_and(|(source, _)| source == from);
            wait_until("both segments", PATIENCE, || Ok(at_server.count(both)), |seen| *seen == 2)?;
        }
        drop(stranger);
        wait_bypass(lab, "worker1", false)?;
        dropped(8082)
    });
}

/// docs/failures.md: forged-close. The pod decides which of two resets behind data in flight is the server's own. It
/// answers the challenge with an ACK if it still has the connection, and with a reset if it does not.
#[test]
fn forged_close_reset_behind_data_in_flight_counts_if_the_pod_accepted_it() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let _echo = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
        for family in Family::BOTH {
            let options = TcpOptions { source_port: 41_000, ..TcpOptions::default() };
            let known = TcpClients::establish(&pod.ns, server.ips.at(family, 80), 1, options)?;
            let seen = of_flow(lab, &pod, family, 41_000)?.context("the flow")?;
            let asked = Capture::start(&pod.ns, "eth0")?;
            send_packet(&server.ns, Protocol::Reset, server.ips.at(family, 80), seen)?;
            asked.wait_for("the forged reset", PATIENCE, |p| !p.outgoing && p.is_reset())?;

            let own = reset_after_data(&pod.ns, &server.ns, server.ips.at(family, 81))?;
            let flow = || of_flow(lab, &pod, family, own.port());
            wait_until("the end of the flow that was reset", PATIENCE, flow, Option::is_none)?;
            known.wait_progress(3, PATIENCE)?;
            assert!(known.connections().iter().all(|one| one.intact()), "{family:?}");
            assert_eq!(of_flow(lab, &pod, family, 41_000)?, Some(seen), "{family:?}");
        }
        Ok(())
    });
}
