//! Gateways die, freeze, are cut off and come back: established connections continue, new flows go elsewhere, and at
//! most one gateway answers for an egress IP at any time.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lab::traffic::{ConnectRate, ConnectionReport, ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Capture, Family, Lab, PodSpec, Segment, Server, StartOptions, Trace, stays, wait_for, wait_until};

use crate::support::{
    PATIENCE, PATIENT_PROBES, QUIET, SHORT_LEASES, WEB, assert_no_strangers, calm, egress, mac_text, neighbour, owner,
    policy, policy_pod, pool, short_leases, start_with, wait_agent, wait_in_force, wait_owner, wait_refused, web,
    web_pod_with, who_answers,
};

/// The egress IPs of both families with these host numbers.
fn all_of(hosts: &[u8]) -> Vec<IpAddr> {
    Family::BOTH.iter().flat_map(|&family| egress(family, hosts)).collect()
}

/// Returns the egress IPs among `hosts` that `node` owns.
fn carried(lab: &Lab, node: &str, hosts: &[u8]) -> Vec<IpAddr> {
    all_of(hosts).into_iter().filter(|ip| owner(lab, *ip).as_deref() == Some(node)).collect()
}

/// Waits until every egress IP has an owner other than `dead`.
fn wait_moved(lab: &Lab, hosts: &[u8], dead: &str) -> Result<()> {
    all_of(hosts).into_iter().try_for_each(|ip| wait_owner(lab, ip, |node| node != dead).map(drop))
}

/// Fails if a packet reached `server` from an address other than the egress IPs, or if any reset was sent.
fn check_trace(trace: &Trace, server: &Server, hosts: &[u8]) {
    assert_no_strangers(trace, server, hosts);
    let resets: Vec<_> = trace.resets().packets().iter().map(lab::Packet::ports).collect();
    assert!(resets.is_empty(), "a reset was sent: {resets:?}");
    assert_eq!(trace.wrong_checksums().packets(), []);
}

/// docs/failures.md: dead-gateway, outside-first, stack-answers.
#[test]
fn all_connections_survive_the_death_of_a_gateway() {
    const HOSTS: [u8; 3] = [10, 11, 12];
    Lab::builder().run(|lab| {
        lab.manifests().write("web", &web(&HOSTS))?;
        let pods = [
            lab.add_pod(PodSpec::new("a", "worker1").label("app", "web"))?,
            lab.add_pod(PodSpec::new("b", "worker2").label("app", "web").cni(lab::Cni::Bridge))?,
        ];
        start_with(lab, &short_leases())?;
        let server = lab.server("server1").clone();
        for pod in &pods {
            wait_in_force(pod, &server, &HOSTS)?;
        }
        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let quiet_ones = TcpServer::start(&server.ns, &server.ips.both(81), ServerMode::Stream)?;
        let capture = Capture::start(&server.ns, "eth0")?;
        let mut busy = Vec::new();
        let mut silent = Vec::new();
        for pod in &pods {
            for family in Family::BOTH {
                busy.push(TcpClients::establish(&pod.ns, server.ips.at(family, 80), 25, TcpOptions::default())?);
                silent.push(TcpClients::establish(&pod.ns, server.ips.at(family, 81), 10, TcpOptions::default())?);
            }
        }
        for clients in busy.iter().chain(&silent) {
            clients.wait_progress(3, PATIENCE)?;
        }
        // From here on, these are silent in both directions.
        silent.iter().for_each(|clients| clients.set_sending(false));
        quiet_ones.set_sending(false);
        let is_quiet = |all: &[ConnectionReport]| all.iter().all(|one| one.last_arrival.elapsed() > QUIET);
        for clients in &silent {
            clients.wait("silence", PATIENCE, is_quiet)?;
        }
        quiet_ones.wait("silence", PATIENCE, is_quiet)?;

        let dead = wait_owner(lab, egress(Family::V4, &[10])[0], |_| true)?;
        let on_it = carried(lab, &dead, &HOSTS);
        let peers: BTreeSet<IpAddr> = streams.connections().iter().map(|one| one.peer.ip()).collect();
        assert!(on_it.iter().any(|ip| peers.contains(ip)), "a connection leaves through {dead}");
        lab.kill_node(&dead)?;
        wait_moved(lab, &HOSTS, &dead)?;

        // The outside sends first on connections that were silent.
        quiet_ones.set_sending(true);
        for clients in &silent {
            clients.wait_progress(3, PATIENCE)?;
        }
        streams.wait_progress(3, PATIENCE)?;
        let mut survived = 0;
        for clients in &busy {
            clients.wait_progress(3, PATIENCE)?;
        }
        // New flows use all egress IPs again.
        let capture = {
            let trace = capture.finish()?;
            check_trace(&trace, &server, &HOSTS);
            Capture::start(&server.ns, "eth0")?
        };
        for pod in &pods {
            wait_in_force(pod, &server, &HOSTS)?;
        }
        let trace = capture.finish()?;
        assert_no_strangers(&trace, &server, &HOSTS);
        assert_eq!(trace.wrong_checksums().packets(), []);
        for clients in busy.into_iter().chain(silent) {
            survived += clients.close()?.iter().filter(|one| one.intact()).count();
        }
        assert_eq!(survived, 140);
        Ok(())
    });
}

/// Packets avoid a gateway that does not answer although it still owns its egress IP: they go to the next carrier. When
/// all are dead, nothing leaves.
#[test]
fn dead_gateway_that_does_not_answer_is_avoided() {
    const HOSTS: [u8; 3] = [10, 11, 12];
    Lab::builder().workers(1).run(|lab| {
        let (pod, server) = web_pod_with(lab, &HOSTS, &StartOptions::new())?;
        let capture = Capture::start(&server.ns, "eth0")?;
        let owners: Vec<(IpAddr, Option<String>)> = all_of(&HOSTS).into_iter().map(|ip| (ip, owner(lab, ip))).collect();
        // The underlay loses the gateways' frames, but the gateways still renew their leases.
        let all = ["gw1", "gw2", "gw3"];
        for gateway in &all[..2] {
            lab.isolate(gateway, Segment::Underlay)?;
            wait_in_force(&pod, &server, &HOSTS)?;
        }
        lab.isolate(all[2], Segment::Underlay)?;
        wait_refused(&pod, &server)?;
        all.iter().try_for_each(|gateway| lab.rejoin(gateway, Segment::Underlay))?;
        wait_in_force(&pod, &server, &HOSTS)?;
        let now: Vec<(IpAddr, Option<String>)> = all_of(&HOSTS).into_iter().map(|ip| (ip, owner(lab, ip))).collect();
        assert_eq!(now, owners, "no lease lapsed, so the plan is as it was");
        let trace = capture.finish()?;
        assert_no_strangers(&trace, &server, &HOSTS);
        Ok(())
    });
}

/// The policy of the tests below: `count` addresses of each family from the pool `public`.
fn pooled(count: u8) -> String {
    policy("web", &format!("{WEB}\n  egressIPPools: [{{name: public, count: {count}}}]"))
}

#[test]
fn egress_ips_return_to_a_gateway_that_came_back_and_stayed() {
    const HOSTS: [u8; 2] = [40, 41];
    Lab::builder().workers(1).gateways(2).run(|lab| {
        lab.manifests().write("pool", &pool("public", 40, 41, Some("1s")))?;
        let (pod, server) = policy_pod(lab, &pooled(2), &HOSTS, &short_leases())?;
        let _streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let clients = Family::BOTH
            .map(|family| TcpClients::establish(&pod.ns, server.ips.at(family, 80), 30, TcpOptions::default()));
        let clients = clients.into_iter().collect::<Result<Vec<_>>>()?;
        // The first gateway to report gets all of them; then half of them move.
        wait_for("gw1 carries its share", PATIENCE, || Ok(carried(lab, "gw1", &HOSTS).len() == 2))?;
        let before: Vec<(IpAddr, Option<String>)> = all_of(&HOSTS).into_iter().map(|ip| (ip, owner(lab, ip))).collect();
        let capture = Capture::start(&server.ns, "eth0")?;

        lab.kill_node("gw1")?;
        wait_moved(lab, &HOSTS, "gw1")?;
        for all in &clients {
            all.wait_progress(3, PATIENCE)?;
        }
        lab.revive_node("gw1")?;
        lab.start_agent("gw1", &short_leases())?;
        for (ip, node) in &before {
            let node = node.as_deref().context("an owner from the beginning")?;
            wait_owner(lab, *ip, |now| now == node)?;
        }
        for all in &clients {
            all.wait_progress(3, PATIENCE)?;
        }
        check_trace(&capture.finish()?, &server, &HOSTS);
        for all in clients {
            assert!(all.close()?.iter().all(ConnectionReport::intact));
        }
        wait_in_force(&pod, &server, &HOSTS)
    });
}

/// A living gateway hands its egress IPs to others and gets them back: no new connection needs a second SYN.
#[test]
fn a_move_between_living_gateways_loses_no_packet_of_any_connection() {
    const HOSTS: [u8; 2] = [40, 41];
    Lab::builder().workers(1).gateways(2).alone().run(|lab| {
        lab.manifests().write("pool", &pool("public", 40, 41, Some("1s")))?;
        let (pod, server) = policy_pod(lab, &pooled(2), &HOSTS, &calm())?;
        wait_for("gw1 carries its share", PATIENCE, || Ok(carried(lab, "gw1", &HOSTS).len() == 2))?;
        let _echo = TcpServer::start(&server.ns, &server.ips.both(81), ServerMode::Echo)?;
        // A lost SYN is retransmitted after one second, which is beyond the timeout.
        let rate = ConnectRate { per_second: 200, timeout: Duration::from_millis(900), ..ConnectRate::default() };
        let rates = Family::BOTH.map(|family| rate.start(&pod.ns, server.ips.at(family, 81)));
        let rates = rates.into_iter().collect::<Result<Vec<_>>>()?;
        let labels = lab.node("gw1").labels.clone();
        let old: Vec<(&str, &str)> = labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let without: Vec<(&str, &str)> = old.iter().copied().filter(|(key, _)| *key != "egress").collect();
        for _ in 0..10 {
            lab.relabel_node("gw1", &without)?;
            wait_moved(lab, &HOSTS, "gw1")?;
            wait_in_force(&pod, &server, &HOSTS)?;
            lab.relabel_node("gw1", &old)?;
            wait_for("gw1 carries its share", PATIENCE, || Ok(carried(lab, "gw1", &HOSTS).len() == 2))?;
            wait_in_force(&pod, &server, &HOSTS)?;
        }
        for rate in rates {
            let report = rate.finish()?;
            assert!(report.opened > 500 && report.failures() == 0, "{} opened, {:?}", report.opened, report.failed);
        }
        Ok(())
    });
}

/// docs/failures.md: no-garp.
#[test]
fn no_garp_a_new_owner_announces_itself_at_once_and_again() {
    const HOSTS: [u8; 1] = [40];
    /// An owner announces itself every ten seconds in any case.
    const BEFORE_REMINDERS: Duration = Duration::from_secs(8);
    Lab::builder().workers(1).gateways(2).run(|lab| {
        lab.manifests().write("pool", &pool("public", 40, 40, None))?;
        let (pod, server) = policy_pod(lab, &pooled(1), &HOSTS, &short_leases())?;
        for ip in all_of(&HOSTS) {
            let old = wait_owner(lab, ip, |_| true)?;
            let new = if old == "gw1" { "gw2" } else { "gw1" };
            // The server's neighbour table has the old owner, so it does not ask again.
            let (from, to) = (lab.node(&old).external_mac(), lab.node(new).external_mac());
            server.ns.sh(&format!("ip neigh replace {ip} lladdr {} dev eth0 nud reachable", mac_text(from)))?;
            let capture = Capture::start(&server.ns, "eth0")?;
            lab.kill_node(&old)?;
            let dead = Instant::now();
            wait_owner(lab, ip, |node| node == new)?;
            wait_until(
                "the server knows the new owner",
                PATIENCE,
                || neighbour(&server, ip),
                |mac| *mac == mac_text(to),
            )?;
            let claims = || Ok(capture.so_far().claims_of(ip).get(&to).map_or(0, Vec::len));
            wait_until("three announcements", BEFORE_REMINDERS, claims, |count| *count >= 3)?;
            // The old owner may have announced itself in its last moments.
            let trace = capture.finish()?.since(dead);
            assert_eq!(trace.claims_of(ip).into_keys().collect::<Vec<_>>(), [to]);
            lab.revive_node(&old)?;
            lab.start_agent(&old, &short_leases())?;
            for other in all_of(&HOSTS) {
                wait_owner(lab, other, |_| true)?;
            }
            wait_in_force(&pod, &server, &HOSTS)?;
        }
        Ok(())
    });
}

/// Returns every MAC address that answers any of several requests for an address.
fn all_who_answer(server: &Server, address: IpAddr) -> Result<BTreeSet<[u8; 6]>> {
    let rounds = (0..5).map(|_| who_answers(server, address)).collect::<Result<Vec<_>>>()?;
    Ok(rounds.into_iter().flatten().collect())
}

/// docs/failures.md: zombie-owner.
#[test]
fn zombie_owner_frozen_or_killed_agent_does_not_answer_for_lost_egress_ips() {
    const HOSTS: [u8; 2] = [40, 41];
    Lab::builder().workers(1).gateways(3).run(|lab| {
        lab.manifests().write("pool", &pool("public", 40, 41, None))?;
        let options = StartOptions::new().config(&format!("{SHORT_LEASES}{PATIENT_PROBES}"));
        let (pod, server) = policy_pod(lab, &pooled(2), &HOSTS, &options)?;
        let mac_of = |lab: &Lab, node: &str| lab.node(node).external_mac();

        // Frozen: everything on the node continues except its agent.
        let frozen = wait_owner(lab, egress(Family::V4, &[40])[0], |_| true)?;
        let lost = carried(lab, &frozen, &HOSTS);
        for ip in &lost {
            assert_eq!(all_who_answer(&server, *ip)?, BTreeSet::from([mac_of(lab, &frozen)]), "{ip} before");
        }
        lab.agent(&frozen).freeze()?;
        for ip in &lost {
            let new = wait_owner(lab, *ip, |node| node != frozen)?;
            assert_eq!(
                all_who_answer(&server, *ip)?,
                BTreeSet::from([mac_of(lab, &new)]),
                "{ip} while {frozen} is frozen"
            );
        }
        wait_in_force(&pod, &server, &HOSTS)?;
        // After it wakes, it learns that it is no longer the owner.
        lab.agent(&frozen).thaw()?;
        for ip in &lost {
            let new = owner(lab, *ip).context("an owner")?;
            assert_ne!(new, frozen);
            let only = BTreeSet::from([mac_of(lab, &new)]);
            wait_until("only the new owner answers", PATIENCE, || all_who_answer(&server, *ip), |all| *all == only)?;
        }

        // Killed: its programs stay attached.
        let killed = owner(lab, lost[0]).context("an owner")?;
        let lost = carried(lab, &killed, &HOSTS);
        lab.agent(&killed).kill()?;
        for ip in &lost {
            let new = wait_owner(lab, *ip, |node| node != killed)?;
            assert_eq!(all_who_answer(&server, *ip)?, BTreeSet::from([mac_of(lab, &new)]), "{ip} after {killed} died");
        }
        wait_in_force(&pod, &server, &HOSTS)
    });
}

/// docs/failures.md: stack-answers. Only the pods answer with an egress IP.
#[test]
fn stack_answers_unsolicited_packets_for_an_egress_ip_get_no_reply() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let (_, server) = web_pod_with(lab, &[10, 11], &StartOptions::new())?;
        let capture = Capture::start(&server.ns, "eth0")?;
        for ip in all_of(&[10, 11]) {
            // The ports are in a free block, in a leased one without a flow, and outside all blocks.
            for port in [22, 1024, 30_000, 65_535] {
                let options = TcpOptions { connect_timeout: Duration::from_millis(400), ..TcpOptions::once() };
                let clients = TcpClients::open(&server.ns, (ip, port).into(), 1, options)?;
                let ended = clients.wait("the end of all attempts", PATIENCE, |all| {
                    all.iter().all(|one| matches!(one.state, lab::traffic::ConnectionState::Failed(_)))
                })?;
                let expected = lab::traffic::ConnectionState::Failed("not established in time".to_owned());
                assert!(ended.iter().all(|one| one.state == expected), "{ip} {port} {ended:?}");
            }
            let ping = lab::traffic::Ping { timeout: Duration::from_millis(300), ..lab::traffic::Ping::default() };
            let report = lab::traffic::ping(&server.ns, ip, &ping)?;
            assert!(report.replies.is_empty() && report.errors.is_empty(), "{report:?}");
        }
        let trace = capture.finish()?;
        let from_them = trace.filter(|packet| {
            let answers = |ip: &lab::capture::Ip| {
                !matches!(
                    ip.transport,
                    lab::capture::TransportLayer::NeighborAdvertisement { .. }
                        | lab::capture::TransportLayer::NeighborSolicitation { .. }
                )
            };
            !packet.outgoing && packet.ip().is_some_and(|ip| all_of(&[10, 11]).contains(&ip.source) && answers(ip))
        });
        assert_eq!(from_them.packets(), []);
        // No stack forwards the packets either: it would have to resolve the address.
        let ips = all_of(&[10, 11]);
        let questions = trace.filter(|packet| match &packet.content {
            _ if packet.outgoing => false,
            lab::capture::Content::Arp(arp) => {
                !arp.reply && arp.sender != arp.target && ips.contains(&IpAddr::from(arp.target))
            }
            _ => packet.ip().is_some_and(|ip| match ip.transport {
                lab::capture::TransportLayer::NeighborSolicitation { target } => ips.contains(&target),
                _ => false,
            }),
        });
        assert_eq!(questions.packets(), []);
        Ok(())
    });
}

/// Traffic continues with the controller dead, even when a source node's agent restarts.
#[test]
fn traffic_continues_while_the_controller_is_dead() {
    const LEASE: Duration = Duration::from_secs(2);
    let options = StartOptions::new().config(&format!("lease: {{renew: 500ms, duration: {}s}}\n", LEASE.as_secs()));
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let (pod, server) = web_pod_with(lab, &[10, 11], &options)?;
        let _streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let clients = TcpClients::establish(&pod.ns, server.ips.at(Family::V4, 80), 30, TcpOptions::default())?;
        let capture = Capture::start(&server.ns, "eth0")?;
        lab.controller("controller").kill()?;
        // Longer than every lease.
        stays("connections go on", 3 * LEASE, || clients.wait_progress(1, PATIENCE).map(|()| true))?;
        wait_in_force(&pod, &server, &[10, 11])?;
        clients.wait_progress(3, PATIENCE)?;
        lab.agent("worker1").kill()?;
        lab.start_agent("worker1", &options)?;
        wait_agent(lab, "worker1")?;
        wait_in_force(&pod, &server, &[10, 11])?;
        clients.wait_progress(3, PATIENCE)?;
        assert!(clients.close()?.iter().all(ConnectionReport::intact));
        let trace = capture.finish()?;
        assert_no_strangers(&trace, &server, &[10, 11]);
        // Another controller continues where the first one stopped.
        lab.start_controller("controller2", &options)?;
        lab.manifests().write("web", &web(&[10, 12]))?;
        wait_in_force(&pod, &server, &[10, 12])
    });
}
