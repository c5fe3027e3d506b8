//! Networks without ARP: agents announce and answer nothing, and Spillway reports each address's node, so that a cloud can act on it.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::Result;
use lab::capture::{Content, TransportLayer};
use lab::{Capture, Family, Lab, Packet, PodSpec, Server, StartOptions, stays};

use crate::support::{CALM, PATIENCE, egress, object_name, start_with, wait_in_force, wait_owner, web};

/// Does what a cloud does: sends packets for the egress IPs to the interface that its records name.
fn assign(lab: &Lab, node: &str) -> Result<()> {
    let mac: Vec<String> = lab.node(node).external_mac().iter().map(|byte| format!("{byte:02x}")).collect();
    let lines = Family::BOTH.map(|family| {
        format!("neigh replace {} lladdr {} dev eth0 nud permanent", egress(family, &[10])[0], mac.join(":"))
    });
    lab.server("server1").ns.ip(&lines)
}

/// Makes a server ask for an address, and checks that nobody answers.
fn stays_unanswered(server: &Server, capture: &Capture, ip: IpAddr) -> Result<()> {
    let began = Instant::now();
    server.ns.ip(&[format!("neigh del {ip} dev eth0")])?;
    let any: SocketAddr = if ip.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
    server.ns.run(|| Ok(UdpSocket::bind(any)?.send_to(b"x", (ip, 9))?))?;
    let asks = |packet: &Packet| {
        let it = match &packet.content {
            Content::Arp(arp) => !arp.reply && IpAddr::from(arp.target) == ip,
            Content::Ip(inside) => {
                matches!(inside.transport, TransportLayer::NeighborSolicitation { target } if target == ip)
            }
            Content::Other => false,
        };
        it && packet.outgoing && packet.at > began
    };
    capture.wait_for(&format!("a request for {ip}"), PATIENCE, asks)?;
    let silent = || Ok(capture.so_far().claims_of(ip).is_empty());
    stays(&format!("nobody answers for {ip}"), Duration::from_secs(1), silent)
}

#[test]
fn without_announcements_objects_and_events_name_the_node_of_each_ip() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let server = lab.server("server1").clone();
        let capture = Capture::start(&server.ns, "eth0")?;
        start_with(lab, &StartOptions::new().config(&format!("{CALM}announce: none\n")))?;
        let ips = Family::BOTH.map(|family| egress(family, &[10])[0]);
        // `assign` points both addresses at one node, so one node must own both.
        let labelled = |node: &str| vec![("kubernetes.io/hostname".to_owned(), node.to_owned())];
        for (gateway, egress) in [("gw1", true), ("gw2", false)] {
            let mut labels = labelled(gateway);
            labels.extend(egress.then(|| ("egress".to_owned(), "true".to_owned())));
            let labels: Vec<(&str, &str)> = labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            lab.relabel_node(gateway, &labels)?;
        }
        for ip in ips {
            wait_owner(lab, ip, |node| node == "gw1")?;
        }
        assign(lab, "gw1")?;
        wait_in_force(&pod, &server, &[10])?;
        // The owner changes: status, label and event report it, and the cloud follows.
        lab.relabel_node("gw2", &[("kubernetes.io/hostname", "gw2"), ("egress", "true")])?;
        lab.relabel_node("gw1", &[("kubernetes.io/hostname", "gw1")])?;
        for ip in ips {
            wait_owner(lab, ip, |node| node == "gw2")?;
            lab::wait_for(&format!("the label of {ip}"), PATIENCE, || {
                let text = lab.manifests().written("EgressIP", &object_name(ip)).unwrap_or_default();
                Ok(text.lines().any(|line| line.trim() == "spillway.io/node: gw2"))
            })?;
            let moved = format!("gw2 carries {ip} ");
            lab::wait_for("the event", PATIENCE, || Ok(lab.controller("controller").log().contains(&moved)))?;
        }
        assign(lab, "gw2")?;
        wait_in_force(&pod, &server, &[10])?;
        for ip in ips {
            stays_unanswered(&server, &capture, ip)?;
        }
        let trace = capture.finish()?;
        for ip in ips {
            assert!(trace.claims_of(ip).is_empty(), "{ip} was announced or answered for");
        }
        Ok(())
    });
}
