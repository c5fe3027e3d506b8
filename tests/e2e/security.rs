//! Packets from strangers: tunnelled packets from hosts that are not nodes, and from nodes without a lease of the port.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context, Result};
use lab::traffic::forge::{FORWARD, REPLY, TUNNEL_PORT};
use lab::traffic::{Protocol, send_vxlan, send_vxlan_from};
use lab::{Capture, Family, Lab, address, wait_for, wait_until};
use serde_json::{Value, json};

use crate::support::{
    PATIENCE, WEB, at, calm, counter, egress, fixed, owner, policy, policy_pod, pool, sources, wait_counter, web_pod,
    web_pod_with,
};

/// Returns a source port of the egress IP that worker1 has used, so its block is leased to that node.
pub fn leased_port(lab: &Lab, family: Family) -> Result<u16> {
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
    Lab::builder().workers(2).gateways(2).run(|lab| {
        // The other gateway is not a carrier.
        lab.manifests().write("pool", &format!("{}  carriers: 1\n", pool("one", 10, 10, None)))?;
        let pooled = policy("web", &format!("{WEB}\n  egressIPPools: [{{name: one}}]"));
        let (pod, server) = policy_pod(lab, &pooled, &[10], &calm())?;
        for family in Family::BOTH {
            let ip = egress(family, &[10])[0];
            let gateway = owner(lab, ip).context("an owner")?;
            let idle = if gateway == "gw1" { "gw2" } else { "gw1" };
            let port = leased_port(lab, family)?;
            let target = server.ips.at(family, 4242);
            let arrived = |packet: &lab::Packet| packet.ports().is_some_and(|(_, to)| to == target);
            // A packet from a socket on a node does not pass the exit, so a host that forges the node's address on the underlay sends it.
            let send = |from: IpAddr, to: &str, source: IpAddr, port: u16| {
                let device = lab.node(to).underlay.at(Family::V4, TUNNEL_PORT);
                send_vxlan_from(
                    lab.router(),
                    at(from, 50_000),
                    device,
                    FORWARD,
                    Protocol::Udp,
                    at(source, port),
                    target,
                )
            };
            // In `forged`: the sender, the gateway, the inner source address and port, and the counter of the drop.
            let of = |node: &str| lab.node(node).underlay.ip(Family::V4);
            let (worker1, worker2, router) = (of("worker1"), of("worker2"), address::underlay(1).ip(Family::V4));
            let other = egress(family, &[99])[0];
            // A gateway that owned the egress IP a moment ago still forwards.
            wait_for("the idle gateway does not forward", PATIENCE, || {
                let before = counter(lab, idle, "drop_not_owner")?;
                send(worker1, idle, ip, port)?;
                Ok(counter(lab, idle, "drop_not_owner")? > before)
            })?;
            let capture = Capture::start(&server.ns, "eth0")?;
            let forged: [(IpAddr, &str, IpAddr, u16, &str); 6] = [
                (router, &gateway, ip, port, "drop_stranger"),
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
            // Control: the same packet from the node that holds the block leaves, and it is the only one.
            send(worker1, &gateway, ip, port)?;
            capture.wait_for("the rightful packet", PATIENCE, arrived)?;
            let trace = capture.finish()?;
            assert_eq!(trace.count(arrived), 1);
            assert!(trace.unexpected_sources_towards(target.ip(), &[ip]).is_empty());
        }
        Ok(())
    });
}

#[test]
fn a_source_node_delivers_only_what_a_node_sent() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let udp = lab::traffic::UdpServer::start(&server.ns, &server.ips.both(53))?;
        for family in Family::BOTH {
            // The flow gives the forged replies something to reach.
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
            // Control: a reply from the gateway's address is delivered, and it is the only one.
            let gateway = lab.node("gw1").underlay.at(Family::V4, 50_000);
            send_vxlan_from(lab.router(), gateway, device, REPLY, Protocol::Udp, answer, translated)?;
            capture.wait_for("the gateway's reply", PATIENCE, arrived)?;
            assert_eq!(capture.finish()?.count(arrived), 1);
        }
        Ok(())
    });
}

/// The policy covers packets whatever their source port, even those below 1024: only the egress IP leaves as a source.
#[test]
fn policy_covers_packets_from_every_source_port() {
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
            assert!(trace.unexpected_sources_towards(server.ips.ip(family), &egress(family, &[10])).is_empty());
            seen.extend(trace.sources_towards(server.ips.ip(family)));
        }
        assert_eq!(seen.len(), 2);
        Ok(())
    });
}

/// Writes a Node object without a machine in the lab, and the status that its agent would report.
fn write_node(lab: &Lab, name: &str, ready: &str, addresses: &[IpAddr], status: Value) -> Result<()> {
    let addresses: Vec<Value> =
        addresses.iter().map(|a| json!({"type": "InternalIP", "address": a.to_string()})).collect();
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
        "status": {"addresses": addresses, "conditions": [{"type": "Ready", "status": ready}]},
    });
    // JSON is valid YAML.
    lab.manifests().write(&format!("node-{name}"), &node.to_string())?;
    let object = || Ok(lab.manifests().written("EgressNode", name));
    let object = wait_until("the node's EgressNode", PATIENCE, object, Option::is_some)?.unwrap_or_default();
    let version = |line: &str| match line.split_once("resourceVersion: ") {
        Some((indent, _)) => format!("{indent}resourceVersion: \"1000000\""),
        None => line.to_owned(),
    };
    let lines: Vec<String> = object.lines().map(version).collect();
    lab.manifests().forge("EgressNode", name, &format!("{}\nstatus: {status}\n", lines.join("\n")))
}

/// Waits until every agent reports a problem with an object.
fn wait_agents_tell(lab: &Lab, object: &str) -> Result<()> {
    for node in lab.nodes() {
        wait_for(&format!("{} tells of {object}", node.name), PATIENCE, || {
            Ok(lab.egressctl(&node.name, &["state"])?["problems"].to_string().contains(object))
        })?;
    }
    Ok(())
}

/// docs/failures.md: claims. A compromised node's agent claims what belongs to others: the tunnel address and MAC
/// address of a source node, the address of an outside server, and an egress IP.
#[test]
fn claims_of_a_compromised_node_take_nothing_from_others() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        // With `direct`, a node is identified by its MAC address.
        let (pod, server) = web_pod_with(lab, &[10], &fixed("vxlan"))?;
        let victim = lab.node("worker1");
        let tunnel: Vec<String> = Family::BOTH.map(|family| victim.underlay.ip(family).to_string()).into();
        let interface = |address: IpAddr| {
            let length = if address.is_ipv4() { 24 } else { 64 };
            json!({"interface": "eth1", "cidr": format!("{address}/{length}")})
        };
        let claimed = Family::BOTH.map(|family| [server.ips.ip(family), egress(family, &[10])[0]]);
        let addresses: Vec<Value> = claimed.as_flattened().iter().copied().map(interface).collect();
        let status = json!({"tunnelAddresses": tunnel, "addresses": addresses, "receives": ["device", "direct"]});
        let own: IpAddr = "172.31.255.1".parse()?;
        let capture = Capture::start(&server.ns, "eth0")?;
        write_node(lab, "zz-evil", "True", &[own], status)?;
        wait_for("events that name node and field", PATIENCE, || {
            let log = lab.controller("controller").log();
            let named = |field| log.lines().any(|line| line.contains("zz-evil") && line.contains(field));
            Ok(["status.tunnelAddresses", "status.addresses"].into_iter().all(named))
        })?;
        wait_agents_tell(lab, "EgressNode zz-evil")?;
        for family in Family::BOTH {
            for _ in 0..3 {
                let seen = sources(&pod.ns, &server, family, 20)?;
                assert_eq!(seen, [(egress(family, &[10])[0], 20)].into());
            }
        }
        let trace = capture.finish()?;
        for family in Family::BOTH {
            assert!(trace.unexpected_sources_towards(server.ips.ip(family), &egress(family, &[10])).is_empty());
            assert_eq!(owner(lab, egress(family, &[10])[0]).as_deref(), Some("gw1"));
        }
        Ok(())
    });
}

/// docs/failures.md: stale-node. Leftover objects of deleted nodes have the addresses of a living one.
#[test]
fn stale_node_objects_with_the_address_of_a_new_node_take_nothing_from_it() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        // With `direct`, a node is identified by its MAC address.
        let (pod, server) = web_pod_with(lab, &[10], &fixed("vxlan"))?;
        let addresses = Family::BOTH.map(|family| lab.node("worker1").underlay.ip(family));
        let status = json!({"tunnelAddresses": addresses.map(|a| a.to_string())});
        for name in ["aa-old", "zz-old"] {
            write_node(lab, name, "Unknown", &addresses, status.clone())?;
            wait_for("an event that names it", PATIENCE, || {
                let named = format!("Node {name}");
                Ok(lab.controller("controller").log().contains(&named))
            })?;
            wait_agents_tell(lab, &format!("Node {name}"))?;
        }
        for family in Family::BOTH {
            for _ in 0..3 {
                let seen = sources(&pod.ns, &server, family, 20)?;
                assert_eq!(seen, [(egress(family, &[10])[0], 20)].into());
            }
        }
        Ok(())
    });
}
