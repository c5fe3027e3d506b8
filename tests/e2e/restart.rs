//! Agents are killed, restarted, replaced and removed.

use std::collections::BTreeSet;
use std::fs;

use anyhow::Result;
use lab::traffic::{
    ConnectRate, ConnectionReport, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer,
    undelivered,
};
use lab::{Capture, Family, Lab, PodSpec, wait_for, wait_until};
use serde_json::Value;

use crate::support::{
    PATIENCE, QUIET, all_answered, assert_no_strangers, calm, egress, start, wait_agent, wait_in_force, wait_sources,
    web, web_pod,
};

const HOSTS: [u8; 3] = [10, 11, 12];

/// docs/failures.md: restart, tail-call.
#[test]
fn killing_and_restarting_agents_under_load_loses_nothing() {
    Lab::builder().workers(1).alone().run(|lab| {
        let (pod, server) = web_pod(lab, &HOSTS)?;
        let capture = Capture::start(&server.ns, "eth0")?;
        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let _echo = TcpServer::start(&server.ns, &server.ips.both(81), ServerMode::Echo)?;
        let _udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
        let (mut clients, mut datagrams, mut rates) = (Vec::new(), Vec::new(), Vec::new());
        for family in Family::BOTH {
            clients.push(TcpClients::establish(&pod.ns, server.ips.at(family, 80), 50, TcpOptions::default())?);
            datagrams.push(UdpClients::start(&pod.ns, server.ips.at(family, 53), 30, UdpOptions::default())?);
            let rate = ConnectRate {
                per_second: 150,
                timeout: std::time::Duration::from_millis(900),
                ..ConnectRate::default()
            };
            rates.push(rate.start(&pod.ns, server.ips.at(family, 81))?);
        }
        let mut hosts = HOSTS.to_vec();
        for (node, new) in [("worker1", 13), ("gw1", 14), ("worker1", 15), ("gw2", 16)] {
            lab.agent(node).kill()?;
            for all in &clients {
                all.wait_progress(10, PATIENCE)?;
            }
            lab.start_agent(node, &calm())?;
            wait_agent(lab, node)?;
            // The agent works if its tables follow a change: nothing else writes them.
            hosts.push(new);
            lab.manifests().write("web", &web(&hosts))?;
            for ip in Family::BOTH.map(|family| egress(family, &[new])[0]) {
                let rows = || lab.egressctl(node, &["ips"]);
                let has_it = |rows: &Value| {
                    rows["items"].as_array().into_iter().flatten().any(|row| row["egressIp"] == ip.to_string())
                };
                wait_until(&format!("the tables of {node} have {ip}"), PATIENCE, rows, has_it)?;
            }
            wait_in_force(&pod, &server, &hosts)?;
            for all in &clients {
                all.wait_progress(30, PATIENCE)?;
            }
        }

        for rate in rates {
            let report = rate.finish()?;
            assert_eq!(report.failures(), 0, "{report:?}");
            assert!(report.opened > 200, "{report:?}");
        }
        datagrams.iter().for_each(|flows| flows.set_sending(false));
        clients.iter().for_each(|all| all.set_sending(false));
        streams.set_sending(false);
        let is_quiet = |all: &[ConnectionReport]| all.iter().all(|one| one.last_arrival.elapsed() > QUIET);
        streams.wait("quiet", PATIENCE, is_quiet)?;
        let mut ends = Vec::new();
        for all in &clients {
            ends.extend(all.wait("quiet", PATIENCE, is_quiet)?);
        }
        assert!(ends.iter().all(ConnectionReport::intact));
        assert_eq!(undelivered(&ends, &streams.connections()), 0);
        all_answered(&datagrams)?;
        let trace = capture.finish()?;
        assert_no_strangers(&trace, &server, &hosts);
        assert_eq!(trace.wrong_checksums().packets(), []);
        Ok(())
    });
}

/// Returns all state of a node's network in which an agent could leave something behind.
fn footprint(lab: &Lab, node: &str) -> Result<BTreeSet<String>> {
    let mut lines = BTreeSet::new();
    let ns = &lab.node(node).ns;
    for command in [
        "ip -o link show | sed 's/state.*//; s/^[0-9]*: //'",
        "ip -d -o link show | grep -o 'prog/[a-z]* id [0-9]*' || true",
        "ip rule show; ip -6 rule show",
        "ip route show table all; ip -6 route show table all | grep -v '^fe80\\|^ff00\\|^multicast'",
        "nft list ruleset | grep -v 'counter\\|packets'",
        "for d in $(ls /proc/sys/net/ipv4/conf); do echo $d $(cat /proc/sys/net/ipv4/conf/$d/rp_filter); done",
        "cd /proc/sys/net/ipv6/conf; for d in *; do echo $d $(cat $d/forwarding $d/accept_ra); done",
        "cat /proc/sys/net/ipv4/ip_forward",
        "for i in $(ip -o link show | cut -d: -f2 | cut -d@ -f1); do tc qdisc show dev $i | grep clsact || true; done",
    ] {
        lines
            .extend(ns.sh(command)?.lines().map(|line| format!("{}: {line}", command.split(' ').next().unwrap_or(""))));
    }
    Ok(lines)
}

/// Returns all paths that are pinned for a node.
fn pins(lab: &Lab, node: &str) -> Vec<String> {
    fn list(folder: &std::path::Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            found.push(entry.path().display().to_string());
            list(&entry.path(), found);
        }
    }
    let mut found = Vec::new();
    list(&lab.bpffs(node), &mut found);
    found
}

#[test]
fn cleanup_leaves_nothing_behind() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let bridged = lab.add_pod(PodSpec::new("bridged", "gw1").label("app", "web").cni(lab::Cni::Bridge))?;
        // The agent changes this setting, and cleanup restores it. Forwarding is on already: without it, pods would not reach the outside.
        for node in ["worker1", "gw1"].map(|name| lab.node(name)) {
            node.ns.sysctls(&[(&format!("net.ipv6.conf.{}.accept_ra", node.uplink()), "1")])?;
        }
        let before = [footprint(lab, "worker1")?, footprint(lab, "gw1")?];
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&pod, &server, &[10])?;
        wait_in_force(&bridged, &server, &[10])?;
        assert_ne!(footprint(lab, "worker1")?, before[0], "the footprint does not see the agent's work");
        for (node, before) in ["worker1", "gw1"].into_iter().zip(&before) {
            assert!(!pins(lab, node).is_empty());
            lab.agent(node).terminate()?;
            // A stopped agent leaves the datapath in place; only cleanup removes it.
            assert!(!pins(lab, node).is_empty());
            let refused = lab.daemon_text(node, &["cleanup"]).unwrap_err();
            assert!(format!("{refused:#}").contains("select pods on this node: default/"), "{refused:#}");
            wait_in_force(if node == "gw1" { &bridged } else { &pod }, &server, &[10])?;
            lab.daemon_text(node, &["cleanup", "--release"])?;
            assert_eq!(pins(lab, node), Vec::<String>::new());
            let after = footprint(lab, node)?;
            assert_eq!(before.symmetric_difference(&after).collect::<Vec<_>>(), Vec::<&String>::new(), "{node}");
            // A second cleanup has nothing to do, and succeeds.
            lab.daemon_text(node, &["cleanup"])?;
        }
        // Packets leave as if there had never been an agent.
        for family in Family::BOTH {
            wait_sources(&pod.ns, &server, family, &[lab.node("worker1").underlay.ip(family)])?;
        }
        // Agents can be installed again.
        for node in ["worker1", "gw1"] {
            lab.start_agent(node, &calm())?;
        }
        wait_in_force(&pod, &server, &[10])
    });
}

#[test]
fn maps_of_another_layout_are_refused_with_a_remedy() {
    Lab::builder().workers(1).gateways(0).run(|lab| {
        lab.start_agent("worker1", &calm())?;
        wait_agent(lab, "worker1")?;
        lab.agent("worker1").terminate()?;
        // The maps that the agent left stand for those of another version.
        let other = lab.bpffs("worker1").join("v999");
        fs::rename(lab.pins("worker1"), &other)?;
        lab.start_agent("worker1", &calm())?;
        wait_for("the agent gives up", PATIENCE, || Ok(!lab.agent("worker1").alive()?))?;
        let log = lab.agent("worker1").log();
        let bpffs = lab.bpffs("worker1").display().to_string();
        let remedy = format!("`egress-daemon cleanup --release --bpffs {bpffs}`");
        assert!(log.contains("v999") && log.contains(&remedy), "{log}");
        let refused = lab.daemon_text("worker1", &["cleanup"]).unwrap_err();
        assert!(format!("{refused:#}").contains("the maps do not show whether policies select pods"), "{refused:#}");
        // The remedy works as printed: `daemon_text` adds --bpffs.
        lab.daemon_text("worker1", &["cleanup", "--release"])?;
        assert!(!other.exists());
        lab.start_agent("worker1", &calm())?;
        wait_agent(lab, "worker1")?;
        assert!(lab.agent("worker1").alive()?);
        Ok(())
    });
}

/// A restarted agent keeps the kernel's state: flows, and the records of those that the outside opened.
#[test]
fn a_restarted_agent_takes_over_what_is_pinned() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let inbound = TcpServer::start(&pod.ns, &pod.ips.both(80), ServerMode::Stream)?;
        let outbound = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let mut clients = Vec::new();
        for family in Family::BOTH {
            clients.push(TcpClients::establish(&pod.ns, server.ips.at(family, 80), 20, TcpOptions::default())?);
            clients.push(TcpClients::establish(&server.ns, pod.ips.at(family, 80), 20, TcpOptions::default())?);
        }
        let before = pins(lab, "worker1");
        for graceful in [true, false] {
            for node in ["worker1", "gw1"] {
                match graceful {
                    true => lab.agent(node).terminate()?,
                    false => lab.agent(node).kill()?,
                }
                lab.start_agent(node, &calm())?;
                // Without an agent, the pinned programs would pass the checks below as well.
                wait_agent(lab, node)?;
            }
            for all in &clients {
                all.wait_progress(20, PATIENCE)?;
            }
            wait_in_force(&pod, &server, &[10])?;
        }
        for all in clients {
            assert!(all.close()?.iter().all(ConnectionReport::intact));
        }
        assert_eq!(pins(lab, "worker1"), before);
        drop((inbound, outbound));
        Ok(())
    });
}
