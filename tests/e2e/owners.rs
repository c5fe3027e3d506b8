//! Ownership of an egress IP when hosts disagree, addresses disappear and agents come back.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result};
use lab::capture::Content;
use lab::{Capture, Family, Lab, Packet, Pod, PodSpec, Segment, Server, StartOptions, address, wait_for, wait_until};

use crate::support::{
    PATIENCE, WEB, announces, egress, has_bpftool, mac_text, neighbour, owner, policy, policy_pod, pool, short_leases,
    start_with, wait_in_force, wait_owner, wait_sources, web, web_pod, web_pod_with, who_answers,
};

/// The time between two announcements of a new owner.
const BETWEEN_CLAIMS: Duration = Duration::from_secs(1);
/// The time within which an owner answers another host's claim. It takes half a second; its reminders come every ten seconds.
const DEFENCE: Duration = Duration::from_secs(4);

/// Runs a test with a policy in force, one egress IP of each family, two gateways, and short leases.
fn with_owner(test: impl FnOnce(&mut Lab, &Pod, &Server) -> Result<()>) {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        let (pod, server) = web_pod_with(lab, &[10], &short_leases())?;
        test(lab, &pod, &server)
    });
}

fn ips() -> [IpAddr; 2] {
    Family::BOTH.map(|family| egress(family, &[10])[0])
}

/// The owners of both egress IPs.
fn owners(lab: &Lab) -> Result<[String; 2]> {
    let [v4, v6] = ips().map(|ip| wait_owner(lab, ip, |_| true));
    Ok([v4?, v6?])
}

/// docs/failures.md: two-owners. A gateway is cut off from the store and from the outside, and loses its egress IPs. It
/// returns to the outside first, so it still believes that it is the owner.
#[test]
fn two_owners_after_a_partition_heals_become_one_again() {
    with_owner(|lab, pod, server| {
        let old = owners(lab)?[0].clone();
        let lost: Vec<IpAddr> = ips().into_iter().filter(|ip| owner(lab, *ip).as_deref() == Some(&*old)).collect();
        lab.cut_store(&old)?;
        lab.isolate(&old, Segment::External)?;
        let mut new = BTreeMap::new();
        for ip in &lost {
            new.insert(*ip, wait_owner(lab, *ip, |node| node != old)?);
        }
        // The new owner's initial announcements are over.
        let capture = Capture::start(&server.ns, "eth0")?;
        for ip in &lost {
            let right = lab.node(&new[ip]).external_mac();
            let claims =
                || Ok(capture.so_far().claims_of(*ip).remove(&right).and_then(|claims| claims.last().copied()));
            wait_until("silence of the new owner", PATIENCE, claims, |last| {
                last.is_some_and(|last| last.elapsed() > BETWEEN_CLAIMS * 2)
            })?;
        }
        drop(capture);
        lab.rejoin(&old, Segment::External)?;
        // It still cannot read the plan. It is enough that the others hold their leases.
        for ip in &lost {
            let announced = || announces(lab, &old, *ip);
            wait_until("the former owner is silent", PATIENCE, announced, |announced| !announced)?;
        }
        let capture = Capture::start(&server.ns, "eth0")?;
        for ip in &lost {
            let right = lab.node(&new[ip]).external_mac();
            // The owner announces itself although nothing has changed for it.
            wait_for("the owner announces itself", PATIENCE, || {
                Ok(capture.so_far().claims_of(*ip).contains_key(&right))
            })?;
            // Only the owner answers requests, repeatedly.
            let mut asked = 0;
            let only = BTreeSet::from([right]);
            wait_until(
                "ten requests in a row that only the owner answers",
                PATIENCE,
                || {
                    asked = if who_answers(server, *ip)? == only { asked + 1 } else { 0 };
                    Ok(asked)
                },
                |asked| *asked == 10,
            )?;
        }
        drop(capture);
        wait_in_force(pod, server, &[10])?;
        lab.heal_store(&old)?;
        for ip in &lost {
            assert_eq!(owner(lab, *ip).as_deref(), Some(&*new[ip]));
        }
        wait_in_force(pod, server, &[10])
    });
}

/// docs/failures.md: spoofed-claim. A rogue host announces an egress IP as its own, even while the owner cannot renew
/// its lease. The owner keeps answering for the egress IP and reannounces it.
#[test]
fn spoofed_claim_forged_frame_silences_no_owner() {
    with_owner(|lab, pod, server| {
        let rogue = [0x02, 0xba, 0xd0, 0, 0, 1];
        for away in [false, true] {
            if away {
                lab.controller("controller").kill()?;
                let nodes: Vec<String> = lab.nodes().map(|node| node.name.clone()).collect();
                nodes.iter().try_for_each(|node| lab.cut_store(node))?;
            }
            for ip in ips() {
                let owner = wait_owner(lab, ip, |_| true)?;
                let right = lab.node(&owner).external_mac();
                let owner_is_known = || {
                    let known = |mac: &String| *mac == mac_text(right);
                    wait_until("the server has the owner's address", PATIENCE, || neighbour(server, ip), known)
                        .map(drop)
                };
                owner_is_known()?;
                if away {
                    let lost = || Ok(lab.egressctl(&owner, &["state"])?["agent"]["leaseHeld"] == false);
                    wait_for("the lease cannot be renewed", PATIENCE, lost)?;
                }
                let capture = Capture::start(&server.ns, "eth0")?;
                lab::traffic::send_claim(lab.router(), "ext0", ip, rogue)?;
                let forged = capture.wait_for("the forged claim", PATIENCE, |p| p.claim() == Some((ip, rogue)))?;
                // From then on the server has the rogue's MAC address, if only briefly.
                let defends = |packet: &Packet| packet.at > forged.at && packet.claim() == Some((ip, right));
                capture.wait_for("the owner's claim after it", DEFENCE, defends)?;
                owner_is_known()?;
            }
        }
        wait_in_force(pod, server, &[10])
    });
}

/// docs/failures.md: restart-race. An agent that was away while its egress IPs moved does not claim them when it is back.
#[test]
fn restart_race_returning_agent_does_not_claim_lost_egress_ips() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        // The delay is long enough that the returning agent is judged before it gets its egress IPs back.
        lab.manifests().write("pool", &pool("public", 10, 10, Some("4s")))?;
        let pooled = policy("web", &format!("{WEB}\n  egressIPPools: [{{name: public, count: 1}}]"));
        let (pod, server) = policy_pod(lab, &pooled, &[10], &short_leases())?;
        let old = owners(lab)?[0].clone();
        let mut judged = 0;
        for round in 0..3 {
            // It gets its share back, and loses it again.
            let owned = || Ok(ips().into_iter().filter(|ip| owner(lab, *ip).as_deref() == Some(&*old)).collect());
            let lost: Vec<IpAddr> =
                wait_until("it owns egress IPs", PATIENCE, owned, |owned: &Vec<_>| !owned.is_empty())?;
            wait_in_force(&pod, &server, &[10])?;
            lab.agent(&old).kill()?;
            for ip in &lost {
                wait_owner(lab, *ip, |node| node != old)?;
            }
            let capture = Capture::start(&server.ns, "eth0")?;
            lab.start_agent(&old, &short_leases())?;
            let holds = || Ok(lab.egressctl(&old, &["state"]).is_ok_and(|s| s["agent"]["leaseHeld"] == true));
            wait_for("the agent is a gateway again", PATIENCE, holds)?;
            wait_in_force(&pod, &server, &[10])?;
            let trace = capture.finish()?;
            let mac = lab.node(&old).external_mac();
            for ip in &lost {
                if owner(lab, *ip).as_deref() != Some(&*old) {
                    assert!(!trace.claims_of(*ip).contains_key(&mac), "round {round}: {old} claims {ip}");
                    judged += 1;
                }
            }
        }
        assert!(judged > 0, "the egress IPs always returned too early");
        Ok(())
    });
}

/// docs/failures.md: ip-moves. An owner's uplink goes down; the egress IPs move elsewhere.
#[test]
fn ip_moves_when_the_link_of_its_owner_goes_down() {
    with_owner(|lab, pod, server| {
        for broken in ["administrator", "cable"] {
            let old = owners(lab)?[0].clone();
            match broken {
                "cable" => lab.cut(&old, Segment::External)?,
                _ => lab.node(&old).ns.ip(&["link set ext0 down".to_owned()])?,
            }
            for ip in ips() {
                wait_owner(lab, ip, |node| node != old).with_context(|| format!("{broken} {ip}"))?;
            }
            wait_in_force(pod, server, &[10])?;
            match broken {
                "cable" => lab.heal(&old, Segment::External)?,
                _ => {
                    let (own, router) = (lab.node(&old).external.context("external")?, address::external(1));
                    lab.node(&old).ns.sh(&format!(
                        "ip link set ext0 up; ip -6 addr replace {}/64 dev ext0
                         ip route replace default via {} dev ext0; ip -6 route replace default via {} dev ext0",
                        own.v6, router.v4, router.v6
                    ))?;
                }
            }
            let holds = || Ok(lab.egressctl(&old, &["state"])?["agent"]["leaseHeld"] == true);
            wait_for("the gateway is back", PATIENCE, holds)?;
        }
        Ok(())
    });
}

/// docs/failures.md: ip-moves. The egress IP is a node's own address, and another address replaces it.
#[test]
fn ip_moves_when_a_node_gets_another_address() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let gateway = "\n  egressGateways:\n  - {nodeSelector: {matchLabels: {egress: \"true\"}}, interface: ext0}";
        lab.manifests().write("web", &policy("web", &format!("{WEB}{gateway}")))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        start_with(lab, &StartOptions::new())?;
        let (server, node) = (lab.server("server1").clone(), lab.node("gw1").clone());
        let (before, after) = (node.external.context("external")?, address::external(151));
        for family in Family::BOTH {
            wait_sources(&pod.ns, &server, family, &[before.ip(family)])?;
        }
        let router = address::external(1);
        node.ns.sh(&format!(
            "ip addr add {}/24 dev ext0; ip -6 addr add {}/64 dev ext0
             ip addr del {}/24 dev ext0; ip -6 addr del {}/64 dev ext0
             ip addr add {}/24 dev ext0 2>/dev/null || true
             ip route replace default via {} dev ext0; ip -6 route replace default via {} dev ext0",
            after.v4, after.v6, before.v4, before.v6, after.v4, router.v4, router.v6
        ))?;
        for family in Family::BOTH {
            wait_sources(&pod.ns, &server, family, &[after.ip(family)])?;
        }
        Ok(())
    });
}

/// docs/failures.md: mld. Once a switch has a querier, it forwards a solicitation only to members of its group.
#[test]
fn mld_neighbours_behind_a_snooping_switch_find_an_ipv6_egress_ip() {
    with_owner(|lab, _, server| {
        let switch = lab.external().clone();
        switch.sysctls(&[("net.ipv6.conf.br0.disable_ipv6", "0")])?;
        // Times in hundredths of a second.
        let times = "mcast_query_response_interval 100 mcast_query_interval 200 mcast_startup_query_interval 100";
        switch
            .sh(&format!("ip link set br0 type bridge mcast_snooping 1 mcast_mld_version 2 {times} mcast_querier 1"))?;
        let address = egress(Family::V6, &[10])[0];
        let owner = wait_owner(lab, address, |_| true)?;
        // A sender must resolve the address first.
        let ask = |target: IpAddr| {
            let any: SocketAddr = if target.is_ipv6() { "[::]:0".parse()? } else { "0.0.0.0:0".parse()? };
            server.ns.run(|| Ok(UdpSocket::bind(any)?.send_to(b"?", (target, 9))?))
        };
        let forget = |target: IpAddr| server.ns.sh(&format!("ip neigh del {target} dev eth0 || true")).map(drop);
        // Sends a solicitation that only group members receive (there are none), and then a request that every host receives.
        let strangers = Family::BOTH.map(|family| egress(family, &[77])[0]);
        let capture = Capture::start(&lab.node(&owner).ns, "ext0")?;
        let heard = |target: IpAddr| {
            capture.count(|packet| match &packet.content {
                Content::Arp(arp) => IpAddr::from(arp.target) == target,
                Content::Ip(ip) => ip.target == group(target),
                _ => false,
            })
        };
        let [v4, v6] = strangers;
        let passes = || {
            let before = strangers.map(heard);
            for target in [v6, v4] {
                forget(target)?;
                ask(target)?;
            }
            wait_for("a request that everybody receives", PATIENCE, || Ok(heard(v4) > before[0]))?;
            Ok(heard(v6) > before[1])
        };
        wait_until("the switch uses memberships", PATIENCE, passes, |passes| !passes)?;
        // The request itself must arrive: an announcement, seconds later, would also inform the server.
        let arrives = |owner: &lab::NetNs| {
            let capture = Capture::start(owner, "ext0")?;
            wait_for("the owner receives the request", PATIENCE, || {
                forget(address)?;
                ask(address)?;
                let is_it =
                    |packet: &lab::Packet| matches!(&packet.content, Content::Ip(ip) if ip.target == group(address));
                Ok(capture.count(is_it) > 0)
            })
        };
        arrives(&lab.node(&owner).ns.clone())?;
        // The next owner is a member as well.
        lab.agent(&owner).kill()?;
        let next = wait_owner(lab, address, |node| node != owner)?;
        arrives(&lab.node(&next).ns.clone())
    });
}

/// If a gateway announced an egress IP that its tables do not have, packets would be lost there.
#[test]
fn a_gateway_that_cannot_write_its_tables_announces_nothing_new_and_says_why() {
    lab::require_root!();
    lab::require!(has_bpftool(), "bpftool is missing: apt-get install bpftool");
    const INDICES: [&str; 2] = ["EGRESS_INDEX_V4", "EGRESS_INDEX_V6"];
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (_, server) = web_pod(lab, &[10])?;
        let maps = lab.pins("gw1").join("maps");
        for index in INDICES {
            // From now on, no process may write it.
            lab.node("gw1").ns.sh(&format!("bpftool map freeze pinned {}", maps.join(index).display()))?;
        }
        let capture = Capture::start(&server.ns, "eth0")?;
        lab.manifests().write("web", &web(&[10, 11]))?;
        // The agent announces before it reports.
        let report = || Ok(lab.manifests().written("EgressNode", "gw1").unwrap_or_default());
        wait_until("the gateway says what it cannot write", PATIENCE, report, |text| text.contains(INDICES[0]))?;
        let trace = capture.finish()?;
        for ip in egress(Family::V4, &[11]).into_iter().chain(egress(Family::V6, &[11])) {
            assert_eq!(trace.claims_of(ip).into_keys().collect::<Vec<_>>(), Vec::<[u8; 6]>::new(), "{ip}");
        }
        Ok(())
    });
}

/// Returns the solicited-node group of an IPv6 address.
fn group(address: IpAddr) -> IpAddr {
    let IpAddr::V6(address) = address else { return address };
    let [.., a, b, c] = address.octets();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c])).into()
}
