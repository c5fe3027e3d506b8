//! Which policy applies to a packet, and what happens while policies change.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use lab::traffic::{ConnectRate, ServerMode, TcpClients, TcpOptions, TcpServer, undelivered};
use lab::{Capture, Family, Lab, PodSpec, address, wait_for};

use crate::support::{
    PATIENCE, QUIET, Sources, drops, egress, gateways, object_name, policy, sources, start, wait_in_force,
    wait_sources, web, weighted,
};

/// A policy for certain pods and destinations, with one egress IP.
fn narrow(name: &str, selectors: &str, destinations: &str, host: u8) -> String {
    let spec = format!("\n  selectors: {selectors}\n  destinationCIDRs: {destinations}{}", gateways(&[host]));
    policy(name, &spec)
}

const WEB_PODS: &str = "[{podSelector: {matchLabels: {app: web}}}]";
const ALL: &str = "[0.0.0.0/0, \"::/0\"]";
const FAR: &str = "[198.51.100.0/24, \"2001:db8:51::/64\"]";

#[test]
fn the_longest_prefix_wins_and_exclusions_count_in_their_own_policy() {
    Lab::builder().workers(1).far_servers(2).run(|lab| {
        let excluded = "\n  excludedCIDRs: [198.51.100.11/32, \"2001:db8:51::11/128\"]";
        let (all, far) = (
            narrow("all", WEB_PODS, ALL, 10),
            narrow("far", WEB_PODS, FAR, 11) + excluded.trim_start_matches('\n') + "\n",
        );
        lab.manifests().write("policies", &format!("{all}---\n{far}"))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        start(lab)?;
        wait_in_force(&pod, lab.server("server1"), &[10])?;
        wait_in_force(&pod, lab.server("far1"), &[11])?;
        // A destination that the narrow policy excludes belongs to the wide one.
        wait_in_force(&pod, lab.server("far2"), &[10])?;
        // Once the wide policy excludes it, too, it belongs to no policy, and packets leave as without policies.
        let all = narrow("all", WEB_PODS, ALL, 10) + excluded.trim_start_matches('\n') + "\n";
        lab.manifests().write("policies", &format!("{all}---\n{far}"))?;
        for family in Family::BOTH {
            wait_sources(&pod.ns, lab.server("far2"), family, &[lab.node("worker1").underlay.ip(family)])?;
        }
        wait_in_force(&pod, lab.server("far1"), &[11])
    });
}

#[test]
fn of_equal_prefixes_the_older_policy_wins_and_then_the_name() {
    Lab::builder().workers(1).run(|lab| {
        let dated = |name: &str, date: &str, host: u8| {
            let metadata = format!("metadata: {{name: {name}, creationTimestamp: \"{date}\"}}");
            narrow(name, WEB_PODS, ALL, host).replace(&format!("metadata: {{name: {name}}}"), &metadata)
        };
        lab.manifests().write("b", &dated("b", "2026-02-02T00:00:00Z", 11))?;
        lab.manifests().write("c", &dated("c", "2026-02-02T00:00:00Z", 12))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        start(lab)?;
        let server = lab.server("server1");
        wait_in_force(&pod, server, &[11])?;
        // A newer policy changes nothing; an older one takes precedence, whatever its name.
        lab.manifests().write("a", &dated("a", "2026-03-03T00:00:00Z", 10))?;
        lab.manifests().write("z", &dated("z", "2026-01-01T00:00:00Z", 13))?;
        wait_in_force(&pod, server, &[13])?;
        lab.manifests().remove("z")?;
        wait_in_force(&pod, server, &[11])?;
        lab.manifests().remove("b")?;
        wait_in_force(&pod, server, &[12])
    });
}

#[test]
fn pods_are_selected_by_their_own_their_namespaces_and_their_nodes_labels() {
    Lab::builder().run(|lab| {
        lab.add_namespace("prod", &[("env", "prod")])?;
        let selectors = "[{podSelector: {}, namespaceSelector: {matchLabels: {env: prod}}, nodeSelector: {matchLabels: \
                         {kubernetes.io/hostname: worker1}}}, {podSelector: {matchExpressions: [{key: tier, operator: In, \
                         values: [front, edge]}]}}]";
        lab.manifests().write("policy", &narrow("policy", selectors, ALL, 10))?;
        let here = lab.add_pod(PodSpec::new("here", "worker1").namespace("prod"))?;
        let elsewhere = lab.add_pod(PodSpec::new("elsewhere", "worker2").namespace("prod"))?;
        let other = lab.add_pod(PodSpec::new("other", "worker1").label("tier", "back"))?;
        let edge = lab.add_pod(PodSpec::new("edge", "worker2").label("tier", "edge"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&here, &server, &[10])?;
        wait_in_force(&edge, &server, &[10])?;
        for pod in [&elsewhere, &other] {
            for family in Family::BOTH {
                wait_sources(&pod.ns, &server, family, &[lab.node(&pod.node).underlay.ip(family)])?;
            }
        }
        // A pod's and a namespace's labels change.
        lab.relabel_pod("other", &[("tier", "front")])?;
        wait_in_force(&other, &server, &[10])?;
        lab.add_namespace("prod", &[("env", "test")])?;
        for family in Family::BOTH {
            wait_sources(&here.ns, &server, family, &[lab.node("worker1").underlay.ip(family)])?;
        }
        Ok(())
    });
}

#[test]
fn a_pod_under_several_policies_uses_each_for_its_own_destinations() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        lab.manifests().write("all", &narrow("all", "[{podSelector: {}}]", ALL, 10))?;
        lab.manifests().write("web", &narrow("web", WEB_PODS, FAR, 11))?;
        let web = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let other = lab.add_pod(PodSpec::new("other", "worker1"))?;
        start(lab)?;
        for (pod, near, far) in [(&web, 10, 11), (&other, 10, 10)] {
            wait_in_force(pod, lab.server("server1"), &[near])?;
            wait_in_force(pod, lab.server("far1"), &[far])?;
        }
        // Another pod replaces it, with the same addresses and other labels.
        let ips = web.ips;
        lab.remove_pod("web")?;
        let heir = lab.add_pod(PodSpec::new("heir", "worker1").ips(ips))?;
        wait_in_force(&heir, lab.server("far1"), &[10])
    });
}

/// docs/failures.md: update-gap. A busy pod soon opens every connection with the ports of an earlier, closed one.
#[test]
fn connections_with_reused_ports_spread_over_added_egress_ips() {
    Lab::builder().workers(1).gateways(2).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        pod.ns.sysctls(&[("net.ipv4.ip_local_port_range", "40000 40063")])?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&pod, &server, &[10])?;
        const CONNECTIONS: usize = 60;
        for family in Family::BOTH {
            let seen = sources(&pod.ns, &server, family, CONNECTIONS)?;
            assert_eq!(seen.values().sum::<usize>(), CONNECTIONS, "{seen:?}");
        }
        lab.manifests().write("web", &web(&[10, 11]))?;
        for family in Family::BOTH {
            let [old, new] = egress(family, &[10, 11])[..] else { panic!("two egress IPs") };
            let spread = |seen: &Sources| {
                let of = |ip| seen.get(&ip).copied().unwrap_or(0);
                of(old) + of(new) == CONNECTIONS && of(old).min(of(new)) >= CONNECTIONS / 4
            };
            lab::wait_until(
                "connections leave with both egress IPs",
                PATIENCE,
                || sources(&pod.ns, &server, family, CONNECTIONS),
                spread,
            )?;
        }
        Ok(())
    });
}

#[test]
fn update_gap_updates_under_load_leak_no_source_and_break_no_connection() {
    const ROUNDS: u32 = 40;
    Lab::builder().workers(1).alone().run(|lab| {
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        lab.manifests().write("web", &web(&[10, 11, 12]))?;
        // The policies that come and go use egress IPs that are already in use here, so the test need not wait for them.
        let base = lab.add_pod(PodSpec::new("base", "worker1").label("app", "base"))?;
        let selectors = "\n  selectors: [{podSelector: {matchLabels: {app: base}}}]";
        let spec = format!("{selectors}\n  destinationCIDRs: {ALL}{}", gateways(&[13, 14, 15, 16]));
        lab.manifests().write("base", &policy("base", &spec))?;
        start(lab)?;
        wait_in_force(&base, lab.server("far1"), &[13, 14, 15, 16])?;
        let (near, far) = (lab.server("server1").clone(), lab.server("far1").clone());
        for server in [&near, &far] {
            wait_in_force(&pod, server, &[10, 11, 12])?;
        }
        let captures = [Capture::start(&near.ns, "eth0")?, Capture::start(&far.ns, "eth0")?];
        let streaming = TcpServer::start(&near.ns, &near.ips.both(80), ServerMode::Stream)?;
        let _echo = TcpServer::start(&far.ns, &far.ips.both(81), ServerMode::Echo)?;
        let streams = [Family::V4, Family::V6].map(|family| {
            TcpClients::establish(&pod.ns, near.ips.at(family, 80), 50, TcpOptions::default())
        });
        let streams = streams.into_iter().collect::<Result<Vec<_>>>()?;
        let rate = ConnectRate { per_second: 200, timeout: Duration::from_millis(900), ..ConnectRate::default() };
        let _near_echo = TcpServer::start(&near.ns, &near.ips.both(81), ServerMode::Echo)?;
        let rates = [&near, &far].map(|server| Family::BOTH.map(|f| rate.start(&pod.ns, server.ips.at(f, 81))));

        // Five policies change in each round: one changes its weights, the notation of its destinations, and an
        // unrelated exclusion; four for the far server are added or removed.
        let mut updates = 0;
        for round in 1..=ROUNDS {
            let weights = [(10, round), (11, 1 + round % 7), (12, 1 + round % 5)];
            let destinations = match round % 2 {
                0 => ALL.to_owned(),
                _ => "[0.0.0.0/1, 128.0.0.0/1, \"::/1\", \"8000::/1\"]".to_owned(),
            };
            let spec = format!(
                "\n  selectors: {WEB_PODS}\n  destinationCIDRs: {destinations}\n  excludedCIDRs: [203.0.113.{round}/32]{}",
                weighted(&weights)
            );
            lab.manifests().write("web", &policy("web", &spec))?;
            updates += 1;
            for (number, length) in [(13, 25), (14, 26), (15, 27), (16, 28)] {
                let name = format!("far-{number}");
                if (round + u32::from(number)) % 2 == 0 {
                    let far = format!("[198.51.100.0/{length}, \"2001:db8:51::/{}\"]", length + 40);
                    lab.manifests().write(&name, &narrow(&name, WEB_PODS, &far, number))?;
                    updates += 1;
                } else if lab.manifests().read(&name).is_ok() {
                    lab.manifests().remove(&name)?;
                    updates += 1;
                }
            }
            let name = object_name(address::external(10).v4.into());
            wait_for(&format!("round {round} is planned"), PATIENCE, || {
                let written = lab.manifests().written("EgressIP", &name).unwrap_or_default();
                Ok(written.lines().any(|line| line.trim().trim_start_matches("- ").trim() == format!("weight: {round}")))
            })?;
        }
        assert!(updates >= 190, "{updates}");

        for rate in rates.into_iter().flatten() {
            let report = rate?.finish()?;
            let nodes = ["worker1", "gw1", "gw2", "gw3"].map(|node| drops(lab, node));
            let (opened, failed) = (report.opened, report.failures());
            assert!(opened > 500 && failed == 0, "{opened} opened, {:?}; dropped: {nodes:?}", report.failed);
        }
        for clients in &streams {
            clients.wait_progress(3, PATIENCE)?;
            clients.set_sending(false);
        }
        streaming.set_sending(false);
        let quiet = |all: &[lab::traffic::ConnectionReport]| all.iter().all(|one| one.last_arrival.elapsed() > QUIET);
        streaming.wait("the server's end is quiet", PATIENCE, quiet)?;
        let mut clients = Vec::new();
        for stream in &streams {
            clients.extend(stream.wait("the clients' end is quiet", PATIENCE, quiet)?);
        }
        assert!(clients.iter().all(|one| one.intact()));
        assert_eq!(undelivered(&clients, &streaming.connections()), 0);

        for (server, capture) in [&near, &far].into_iter().zip(captures) {
            let trace = capture.finish()?;
            for family in Family::BOTH {
                let allowed: Vec<IpAddr> = egress(family, &[10, 11, 12, 13, 14, 15, 16]);
                let strangers = trace.unexpected_sources_towards(server.ips.ip(family), &allowed);
                assert!(strangers.is_empty(), "{} {strangers:?}", server.name);
            }
            assert_eq!(trace.wrong_checksums().packets(), []);
        }
        Ok(())
    });
}
