//! Flows are pinned to slots: adding and removing egress IPs moves no flow of the others.

use std::net::IpAddr;

use anyhow::Result;
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer};
use lab::{Capture, Family, Lab};

use crate::support::{
    PATIENCE, WEB, assert_no_strangers, calm, egress, gateways_where, policy, policy_pod, sources, wait_in_force,
    wait_refused, web, web_pod,
};

/// The best-known promise: removing one of four gateways has no effect on the other flows.
#[test]
fn removing_one_of_four_gateways_moves_no_flow_of_the_others() {
    Lab::builder().workers(1).gateways(4).run(|lab| {
        let (pod, server) = web_pod(lab, &[10, 11, 12, 13])?;
        let udp = UdpServer::start(&server.ns, &server.ips.both(53))?;
        let tcp = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let mut flows = Vec::new();
        let mut clients = Vec::new();
        for family in Family::BOTH {
            flows.push(UdpClients::start(&pod.ns, server.ips.at(family, 53), 200, UdpOptions::default())?);
            clients.push(TcpClients::establish(&pod.ns, server.ips.at(family, 80), 200, TcpOptions::default())?);
        }
        for all in &flows {
            all.wait("replies", PATIENCE, |all| all.iter().all(|one| one.received > 3))?;
        }
        for all in &clients {
            all.wait_progress(3, PATIENCE)?;
        }
        let removed: Vec<IpAddr> = Family::BOTH.iter().flat_map(|&family| egress(family, &[13])).collect();
        let before = udp.flows();
        assert!(before.values().all(|seen| seen.peers.len() == 1));
        assert!(before.values().any(|seen| seen.peers.iter().any(|peer| removed.contains(&peer.ip()))));
        let capture = Capture::start(&server.ns, "eth0")?;

        lab.manifests().write("web", &web(&[10, 11, 12]))?;
        wait_in_force(&pod, &server, &[10, 11, 12])?;
        for all in &flows {
            all.wait_progress(6, PATIENCE)?;
        }
        // Everything has left the removed egress IP by now.
        let later = Capture::start(&server.ns, "eth0")?;
        for all in &flows {
            all.wait_progress(6, PATIENCE)?;
        }
        assert_no_strangers(&later.finish()?, &server, &[10, 11, 12]);
        let mut stayed = 0;
        for (id, seen) in udp.flows() {
            let old = &before[&id].peers;
            if old.iter().any(|peer| removed.contains(&peer.ip())) {
                assert!(seen.peers.iter().all(|peer| old.contains(peer) || !removed.contains(&peer.ip())));
            } else {
                assert_eq!(&seen.peers, old, "flow {id} moved");
                stayed += 1;
            }
        }
        assert!(stayed > 200, "{stayed} of 400");
        // Connections of the removed egress IP are cut, never moved; the others are unaffected.
        let peers = tcp.source_of_flow();
        for all in clients {
            all.reset_pauses();
            let cut = |id: &u64| removed.contains(&peers[id].ip());
            all.wait("progress of the others", PATIENCE, |all| {
                all.iter().filter(|one| !cut(&one.id)).all(|one| one.longest_pause > std::time::Duration::ZERO)
            })?;
            let reports = all.close()?;
            assert!(reports.iter().filter(|one| !cut(&one.id)).all(|one| one.intact()));
            assert!(reports.iter().any(|one| cut(&one.id)));
        }
        let trace = capture.finish()?;
        for family in Family::BOTH {
            let all = egress(family, &[10, 11, 12, 13]);
            assert!(trace.unexpected_sources_towards(server.ips.ip(family), &all).is_empty());
        }
        // Adding the egress IP again moves no flow either.
        let before = udp.flows();
        lab.manifests().write("web", &web(&[10, 11, 12, 13]))?;
        wait_in_force(&pod, &server, &[10, 11, 12, 13])?;
        for all in &flows {
            all.wait_progress(6, PATIENCE)?;
        }
        assert!(udp.flows().iter().all(|(id, seen)| seen.peers == before[id].peers));
        Ok(())
    });
}

/// docs/failures.md: dead-in-set.
#[test]
fn dead_in_set_unmatched_gateways_are_skipped_and_without_any_nothing_leaves() {
    Lab::builder().workers(1).run(|lab| {
        for (number, name) in ["gw1", "gw2", "gw3"].into_iter().enumerate() {
            lab.relabel_node(name, &[("place", &format!("p{number}"))])?;
        }
        let own = [(10, 1, "place: p0"), (11, 1, "place: p1"), (12, 1, "place: p2")];
        let placed = policy("web", &format!("{WEB}{}", gateways_where(&own)));
        let (pod, server) = policy_pod(lab, &placed, &[10, 11, 12], &calm())?;
        let capture = Capture::start(&server.ns, "eth0")?;
        lab.relabel_node("gw2", &[])?;
        wait_in_force(&pod, &server, &[10, 12])?;
        lab.relabel_node("gw1", &[])?;
        wait_in_force(&pod, &server, &[12])?;
        lab.relabel_node("gw3", &[])?;
        wait_refused(&pod, &server)?;
        // gw3 takes gw2's place.
        lab.relabel_node("gw3", &[("place", "p1")])?;
        wait_in_force(&pod, &server, &[11])?;
        let trace = capture.finish()?;
        assert_no_strangers(&trace, &server, &[10, 11, 12]);
        Ok(())
    });
}

/// docs/failures.md: stale-nat.
#[test]
fn stale_nat_a_reused_five_tuple_gets_the_present_egress_ip() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (pod, server) = web_pod(lab, &[10])?;
        let tcp = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
        let once = |family| -> Result<IpAddr> {
            let options = TcpOptions { source_port: 40_000, reset: true, ..TcpOptions::once() };
            let clients = TcpClients::establish(&pod.ns, server.ips.at(family, 80), 1, options)?;
            let id = clients.wait("an echo", PATIENCE, |all| all[0].received == 1)?[0].id;
            Ok(tcp.source_of_flow()[&id].ip())
        };
        for (host, next) in [(10, 11), (11, 10)] {
            for family in Family::BOTH {
                assert_eq!(once(family)?, egress(family, &[host])[0]);
            }
            lab.manifests().write("web", &web(&[next]))?;
            wait_in_force(&pod, &server, &[next])?;
        }
        for family in Family::BOTH {
            assert_eq!(once(family)?, egress(family, &[10])[0]);
            assert_eq!(sources(&pod.ns, &server, family, 5)?.len(), 1);
        }
        Ok(())
    });
}
