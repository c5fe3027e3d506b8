//! What strangers send: tunnelled packets from who is no node, and from nodes that have no right to a port.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context, Result};
use lab::traffic::{Protocol, send_vxlan};
use lab::{Capture, Family, Lab, NetNs, wait_for};

use crate::support::{PATIENCE, at, counter, egress, owner, sources, wait_counter, web_pod};

/// The tunnel's UDP port and network identifiers, as ARCHITECTURE.md has them.
const TUNNEL_PORT: u16 = 8473;
const FORWARD: u32 = 0x53_5001;
const REPLY: u32 = 0x53_5002;

/// A source port of the egress IP that worker1 has used: it lies in a block that is leased to that node.
fn leased_port(lab: &Lab, family: Family) -> Result<u16> {
    let (pod, server) = (lab.pod("web"), lab.server("server1"));
    let capture = Capture::start(&server.ns, "eth0")?;
    sources(&pod.ns, server, family, 1)?;
    let from = egress(family, &[10])[0];
    let ports =
        capture.finish()?.packets().iter().filter_map(lab::Packet::ports).map(|(source, _)| source).collect::<Vec<_>>();
    ports
        .into_iter()
        .find(|source| source.ip() == from)
        .map(|source| source.port())
        .context("a packet of the egress IP")
}

#[test]
fn a_gateway_sends_only_what_the_holder_of_the_port_block_sent() {
    lab::require_root!();
    Lab::builder().workers(2).gateways(2).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        for family in Family::BOTH {
            let ip = egress(family, &[10])[0];
            let gateway = owner(lab, ip).context("an owner")?;
            let idle = if gateway == "gw1" { "gw2" } else { "gw1" };
            let port = leased_port(lab, family)?;
            let target = server.ips.at(family, 4242);
            let arrived = |packet: &lab::Packet| packet.ports().is_some_and(|(_, to)| to == target);
            let send = |from: &NetNs, to: &str, source: IpAddr, port: u16| {
                let device = lab.node(to).underlay.at(Family::V4, TUNNEL_PORT);
                send_vxlan(from, device, FORWARD, Protocol::Udp, at(source, port), target)
            };
            // (who sends, to which gateway, as which source, what counts it)
            let (worker1, worker2) = (&lab.node("worker1").ns, &lab.node("worker2").ns);
            let other = egress(family, &[99])[0];
            // One that was the owner a moment ago still forwards.
            wait_for("the idle gateway does not forward", PATIENCE, || {
                let before = counter(lab, idle, "drop_not_owner")?;
                send(worker1, idle, ip, port)?;
                Ok(counter(lab, idle, "drop_not_owner")? > before)
            })?;
            let capture = Capture::start(&server.ns, "eth0")?;
            let forged: [(&NetNs, &str, IpAddr, u16, &str); 6] = [
                (lab.router(), &gateway, ip, port, "drop_stranger"),
                (worker2, &gateway, ip, port, "drop_not_leased"),
                (worker1, &gateway, ip, 80, "drop_not_leased"),
                (worker1, idle, ip, port, "drop_not_owner"),
                (worker1, &gateway, other, port, "drop_not_owner"),
                (worker1, &gateway, pod.ips.ip(family), port, "drop_not_owner"),
            ];
            for (from, to, source, port, name) in forged {
                let before = counter(lab, to, name)?;
                send(from, to, source, port)?;
                wait_counter(lab, to, name, before)?;
            }
            assert_eq!(capture.count(arrived), 0);
            // The control: the same packet from the node that holds the block leaves.
            send(worker1, &gateway, ip, port)?;
            capture.wait_for("the rightful packet", PATIENCE, arrived)?;
            let trace = capture.finish()?;
            assert_eq!(trace.count(arrived), 1);
            assert!(trace.strangers_towards(target.ip(), &[ip]).is_empty());
        }
        Ok(())
    });
}

#[test]
fn a_source_node_delivers_only_what_a_node_sent() {
    lab::require_root!();
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let udp = lab::traffic::UdpServer::start(&server.ns, &server.ips.both(53))?;
        for family in Family::BOTH {
            // A flow, so that there is something to deliver to.
            let flows = lab::traffic::UdpClients::start(
                &pod.ns,
                server.ips.at(family, 53),
                1,
                lab::traffic::UdpOptions::once(),
            )?;
            let id = flows.wait("a reply", PATIENCE, |all| all[0].received == 1)?[0].id;
            let translated = *udp.flows()[&id].peers.first().context("a peer")?;
            let capture = Capture::start(&pod.ns, "eth0")?;
            let device = lab.node("worker1").underlay.at(Family::V4, TUNNEL_PORT);
            let answer = server.ips.at(family, 53);
            let before = counter(lab, "worker1", "drop_stranger")?;
            send_vxlan(lab.router(), device, REPLY, Protocol::Udp, answer, translated)?;
            wait_counter(lab, "worker1", "drop_stranger", before)?;
            let before = counter(lab, "worker1", "drop_stranger")?;
            send_vxlan(lab.router(), device, 42, Protocol::Udp, answer, translated)?;
            wait_counter(lab, "worker1", "drop_stranger", before)?;
            let arrived =
                |packet: &lab::Packet| !packet.outgoing && packet.ports().is_some_and(|(from, _)| from == answer);
            assert_eq!(capture.count(arrived), 0);
            // The control: the gateway's own namespace may.
            send_vxlan(&lab.node("gw1").ns, device, REPLY, Protocol::Udp, answer, translated)?;
            capture.wait_for("the gateway's reply", PATIENCE, arrived)?;
        }
        Ok(())
    });
}

/// What a pod sends under another's address is the policy's business, not a way around it: no source but egress IPs, and
/// nothing is delivered to the wrong pod.
#[test]
fn every_packet_counts_for_the_policy_whatever_its_ports() {
    lab::require_root!();
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let capture = Capture::start(&server.ns, "eth0")?;
        for family in Family::BOTH {
            let ports = [0u16, 1, 53, 1023, 1024, 65_535];
            for protocol in [Protocol::Udp, Protocol::Syn] {
                lab::traffic::spray(&pod.ns, protocol, pod.ips.ip(family), ports, server.ips.at(family, 4243))?;
            }
            let arrived =
                |packet: &lab::Packet| packet.ports().is_some_and(|(_, to)| to == server.ips.at(family, 4243));
            lab::wait_for("all packets", PATIENCE, || Ok(capture.count(arrived) >= 2 * ports.len() - 2))?;
        }
        let trace = capture.finish()?;
        let mut seen: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for family in Family::BOTH {
            assert!(trace.strangers_towards(server.ips.ip(family), &egress(family, &[10])).is_empty());
            seen.extend(trace.sources_towards(server.ips.ip(family)));
        }
        assert_eq!(seen.len(), 2);
        Ok(())
    });
}
