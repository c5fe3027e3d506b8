//! `PerFlow`: new flows are spread over the egress IPs by weight, and stay where they are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer};
use lab::{Capture, Cni, Family, Lab, Pod, StartOptions, Trace, stats, wait_until};

use crate::support::{PATIENCE, PATIENT_PROBES, WEB, calm, egress, owner, policy, policy_pod, pool, web_pod, weighted};

#[test]
fn three_thousand_flows_spread_evenly_over_three_gateways() {
    Lab::builder().cni(Cni::Bridge).run(|lab| {
        let (pod, server) = web_pod(lab, &[10, 11, 12])?;
        // The first gateways to be ready carry everything at first; in the end each has one egress IP of each family.
        for family in Family::BOTH {
            let ips: Vec<String> = egress(family, &[10, 11, 12]).iter().map(ToString::to_string).collect();
            let used = || -> Result<BTreeSet<String>> {
                let list = lab.egressctl("worker1", &["ips"])?;
                let rows = list["items"].as_array().into_iter().flatten();
                let ours = rows.filter(|row| ips.iter().any(|ip| row["egressIp"] == **ip));
                Ok(ours.filter_map(|row| Some(row["owner"].as_str()?.to_owned())).collect())
            };
            lab::wait_until("worker1 uses every gateway", PATIENCE, used, |used| used.len() == 3)?;
        }

        let echo = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
        let gateways: BTreeSet<[u8; 6]> = lab.gateways().map(|node| node.external_mac()).collect();
        for family in Family::BOTH {
            let capture = Capture::start(&server.ns, "eth0")?;
            let target = server.ips.at(family, 80);
            let options = TcpOptions { reset: true, ..TcpOptions::once() };
            let clients = TcpClients::establish(&pod.ns, target, 3000, options)?;
            clients.wait("all echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
            let peers = echo.connections().into_iter().map(|one| one.peer.ip());
            let spread = lab::traffic::tally(peers.filter(|peer| peer.is_ipv4() == (family == Family::V4)));
            assert_eq!(spread.keys().copied().collect::<Vec<_>>(), egress(family, &[10, 11, 12]));
            let counts: Vec<u64> = spread.values().map(|&count| count as u64).collect();
            assert_eq!(counts.iter().sum::<u64>(), 3000);
            assert!(stats::is_even(&counts), "{family:?} {counts:?}");

            let trace = capture.finish()?;
            assert!(trace.unexpected_sources_towards(target.ip(), &egress(family, &[10, 11, 12])).is_empty());
            // Each egress IP comes from one gateway, and each gateway has one egress IP.
            let mut macs: BTreeMap<IpAddr, BTreeSet<[u8; 6]>> = BTreeMap::new();
            for packet in trace.packets().iter().filter(|packet| !packet.outgoing) {
                // Remaining packets of the other family's connections may still arrive.
                let ours = |target: SocketAddr| target == SocketAddr::new(server.ips.ip(family), 80);
                if let Some((source, _)) = packet.ports().filter(|(_, target)| ours(*target)) {
                    macs.entry(source.ip()).or_default().insert(packet.source_mac);
                }
            }
            assert!(macs.values().all(|one| one.len() == 1), "{macs:?}");
            assert_eq!(macs.into_values().flatten().collect::<BTreeSet<_>>(), gateways);
        }
        Ok(())
    });
}

#[test]
fn weights_are_shares_of_new_flows() {
    Lab::builder().workers(1).run(|lab| {
        let spec = format!("{WEB}{}", weighted(&[(10, 1), (11, 2), (12, 5)]));
        let (pod, server) = policy_pod(lab, &policy("web", &spec), &[10, 11, 12], &calm())?;
        let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
        for family in Family::BOTH {
            let flows = UdpClients::start(
                &pod.ns,
                server.ips.at(family, 53),
                800,
                UdpOptions { requests: 3, ..UdpOptions::default() },
            )?;
            let all = flows.wait("replies", PATIENCE, |all| all.iter().all(|one| one.received > 0))?;
            let seen = udp.flows();
            let spread = lab::traffic::tally(all.iter().flat_map(|one| &seen[&one.id].peers).map(|peer| peer.ip()));
            let counts: Vec<u64> =
                egress(family, &[10, 11, 12]).iter().map(|ip| spread.get(ip).copied().unwrap_or(0) as u64).collect();
            assert_eq!(counts.iter().sum::<u64>(), 800, "{spread:?}");
            assert!(stats::fits(&counts, &[1.0, 2.0, 5.0]), "{family:?} {counts:?}");
        }
        Ok(())
    });
}

#[test]
fn ecmp_split_flows_keep_their_egress_ip_while_the_weights_change() {
    Lab::builder().workers(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10, 11, 12])?;
        let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
        let tcp = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let start_udp = |family| UdpClients::start(&pod.ns, server.ips.at(family, 53), 60, UdpOptions::default());
        let start_tcp = |family| TcpClients::establish(&pod.ns, server.ips.at(family, 80), 40, TcpOptions::default());
        let datagrams = [start_udp(Family::V4)?, start_udp(Family::V6)?];
        let streams = [start_tcp(Family::V4)?, start_tcp(Family::V6)?];
        for (port, (a, b, c)) in (7100..).zip([(100, 1, 1), (1, 100, 1), (1, 1, 100), (1, 1, 1)]) {
            let spec = format!("{WEB}{}", weighted(&[(10, a), (11, b), (12, c)]));
            lab.manifests().write("web", &policy("web", &spec))?;
            // The new weights are in force once new connections follow them.
            let weights = [f64::from(a), f64::from(b), f64::from(c)];
            for family in Family::BOTH {
                let counts = || {
                    let seen = crate::support::sources_at(&pod.ns, &server, port, family, 300)?;
                    let ips = egress(family, &[10, 11, 12]);
                    Ok(ips.iter().map(|ip| seen.get(ip).copied().unwrap_or(0) as u64).collect::<Vec<_>>())
                };
                lab::wait_until("the new shares", PATIENCE, counts, |counts| {
                    counts.iter().sum::<u64>() == 300 && stats::fits(counts, &weights)
                })?;
            }
        }
        for flows in &datagrams {
            flows.wait_progress(4, PATIENCE)?;
        }
        for (id, seen) in udp.flows() {
            assert_eq!(seen.peers.len(), 1, "flow {id} moved: {seen:?}");
        }
        for clients in streams {
            clients.wait_progress(3, PATIENCE)?;
            assert!(clients.close()?.iter().all(|one| one.intact()));
        }
        drop(tcp);
        Ok(())
    });
}

/// Returns the MAC addresses of the gateways that each flow to `target` came from.
fn ways(trace: &Trace, target: SocketAddr) -> BTreeMap<SocketAddr, BTreeSet<[u8; 6]>> {
    let mut ways: BTreeMap<SocketAddr, BTreeSet<[u8; 6]>> = BTreeMap::new();
    for packet in trace.packets().iter().filter(|packet| !packet.outgoing) {
        if let Some((source, _)) = packet.ports().filter(|(_, to)| *to == target) {
            ways.entry(source).or_default().insert(packet.source_mac);
        }
    }
    ways
}

/// Waits until connections of `pod` to a port of `server1` leave through all gateways. At first, not all carriers may be known.
pub fn wait_all_used(lab: &Lab, pod: &Pod, target: SocketAddr) -> Result<()> {
    let server = lab.server("server1");
    let all: BTreeSet<[u8; 6]> = lab.gateways().map(|node| node.external_mac()).collect();
    let used = || {
        let capture = Capture::start(&server.ns, "eth0")?;
        let options = TcpOptions { reset: true, ..TcpOptions::once() };
        TcpClients::establish(&pod.ns, target, 100, options)?.close()?;
        Ok(ways(&capture.finish()?, target).into_values().flatten().collect::<BTreeSet<_>>())
    };
    wait_until("all gateways are used", PATIENCE, used, |used| *used == all).map(drop)
}

/// `outbound: Spread`: one address has the bandwidth of four gateways, and loses a quarter of it if one fails.
#[test]
fn egress_ip_uses_all_carriers_and_a_dead_one_moves_only_its_own_flows() {
    Lab::builder().workers(1).gateways(4).run(|lab| {
        lab.manifests().write("pool", &format!("{}  outbound: Spread\n", pool("public", 40, 40, None)))?;
        let spread = policy("web", &format!("{WEB}\n  egressIPPools: [{{name: public}}]"));
        let (pod, server) = policy_pod(lab, &spread, &[40], &StartOptions::new().config(PATIENT_PROBES))?;
        let all: BTreeSet<[u8; 6]> = lab.gateways().map(|node| node.external_mac()).collect();
        let echo = TcpServer::start(&server.ns, &server.ips.both(81), ServerMode::Echo)?;
        for family in Family::BOTH {
            let target = server.ips.at(family, 81);
            wait_all_used(lab, &pod, target)?;
            let capture = Capture::start(&server.ns, "eth0")?;
            let options = TcpOptions { reset: true, ..TcpOptions::once() };
            let clients = TcpClients::establish(&pod.ns, target, 2000, options)?;
            clients.wait("all echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
            let ways = ways(&capture.finish()?, target);
            assert!(ways.len() >= 2000 && ways.values().all(|one| one.len() == 1), "{family:?}: a flow took two paths");
            let by = |mac: &[u8; 6]| ways.values().filter(|way| way.contains(mac)).count() as u64;
            let counts: Vec<u64> = all.iter().map(by).collect();
            assert!(counts.len() == 4 && stats::is_even(&counts), "{family:?}: {counts:?}");
        }
        drop(echo);

        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let clients = Family::BOTH
            .map(|family| TcpClients::establish(&pod.ns, server.ips.at(family, 80), 100, TcpOptions::default()));
        let clients = clients.into_iter().collect::<Result<Vec<_>>>()?;
        let look = || -> Result<BTreeMap<SocketAddr, BTreeSet<[u8; 6]>>> {
            let capture = Capture::start(&server.ns, "eth0")?;
            streams.wait_progress(3, PATIENCE)?;
            let trace = capture.finish()?;
            Ok(Family::BOTH.iter().flat_map(|family| ways(&trace, server.ips.at(*family, 80))).collect())
        };
        let before = look()?;
        assert_eq!(before.len(), 200);
        let victim = lab.gateways().find(|node| owner(lab, egress(Family::V4, &[40])[0]).as_ref() != Some(&node.name));
        let victim =
            victim.map(|node| (node.name.clone(), node.external_mac())).context("a gateway that is not the owner")?;
        lab.kill_node(&victim.0)?;
        let after = wait_until("nothing leaves through the dead one", PATIENCE, look, |ways| {
            ways.len() == 200 && ways.values().all(|way| !way.contains(&victim.1))
        })?;
        for (flow, way) in &before {
            assert!(way.contains(&victim.1) || after[flow] == *way, "{flow} has moved");
        }
        for clients in clients {
            assert!(clients.close()?.iter().all(lab::traffic::ConnectionReport::intact));
        }
        Ok(())
    });
}
