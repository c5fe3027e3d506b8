//! A pod's first packets.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer};
use lab::{Capture, Cni, Family, Lab, NetNs, PodSpec, StartOptions, wait_until};

use crate::support::{
    CALM, PATIENCE, bypass, calm, counter, egress, has_bpftool, knows, start, start_with, wait_counter, wait_in_force,
    wait_sources, web, web_pod,
};

/// Starts a thread that calls connect() in a loop, from before the pod has a network until a connection is open.
fn eager(ns: &NetNs, target: SocketAddr) -> Result<JoinHandle<Result<()>>> {
    ns.spawn("eager", move || {
        let began = Instant::now();
        loop {
            match TcpStream::connect_timeout(&target, Duration::from_millis(200)) {
                Ok(mut stream) => return Ok(stream.write_all(&[0; 16])?),
                Err(error) => ensure!(began.elapsed() < PATIENCE, "no connection to {target}: {error}"),
            }
        }
    })
}

/// Waits until the agent knows that a selected pod is starting and holds packets from unknown sources. Likewise, in a
/// cluster a pod is bound to its node long before it has a network.
pub fn wait_held(lab: &Lab) -> Result<()> {
    let rules = || Ok(lab.egressctl("worker1", &["state"])?["rules"].to_string());
    wait_until("unknown sources are held", PATIENCE, rules, |rules| rules.contains("a selected pod is starting"))
        .map(drop)
}

/// Starts eight eager pods sequentially. With `inherit`, each gets the addresses of a pod without a policy that has just been removed.
fn eager_pods_never_show_another_address(cni: Cni, inherit: bool) {
    Lab::builder().workers(1).gateways(2).cni(cni).run(|lab| {
        lab.manifests().write("web", &web(&[10, 11]))?;
        let first = lab.add_pod(PodSpec::new("first", "worker1").label("app", "web"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&first, &server, &[10, 11])?;
        let _echo = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
        let capture = Capture::start(&server.ns, "eth0")?;
        for number in 0..8 {
            let name = format!("web-{number}");
            let mut spec = PodSpec::new(&name, "worker1").label("app", "web");
            if inherit {
                let ips = lab.add_pod(PodSpec::new("other", "worker1"))?.ips;
                let known = |lab: &Lab| Family::BOTH.iter().filter(|&&one| knows(lab, "worker1", ips.ip(one))).count();
                wait_until("the datapath knows the other pod", PATIENCE, || Ok(known(lab)), |count| *count == 2)?;
                lab.remove_pod("other")?;
                wait_until("the datapath has forgotten it", PATIENCE, || Ok(known(lab)), |count| *count == 0)?;
                spec = spec.ips(ips);
            }
            let pod = lab.prepare_pod(spec)?;
            let clients = Family::BOTH.map(|family| eager(&pod.ns, server.ips.at(family, 80)));
            wait_held(lab)?;
            lab.start_pod(&name)?;
            for client in clients {
                client?.join().map_err(|_| anyhow!("the eager process panicked"))??;
            }
        }
        let trace = capture.finish()?;
        for family in Family::BOTH {
            let allowed = egress(family, &[10, 11]);
            let strangers = trace.unexpected_sources_towards(server.ips.ip(family), &allowed);
            assert!(strangers.is_empty(), "{strangers:?}");
            assert!(trace.sources_towards(server.ips.ip(family)).values().sum::<usize>() > 16);
        }
        Ok(())
    });
}

/// docs/failures.md: pod-start.
#[test]
fn a_pod_whose_first_act_is_connect_never_shows_another_address() {
    Cni::BOTH.into_iter().for_each(|cni| eager_pods_never_show_another_address(cni, false));
}

/// docs/failures.md: pod-start, for an address that another pod had a moment ago.
#[test]
fn a_pod_that_inherits_an_address_never_shows_the_nodes() {
    lab::require_root!();
    lab::require!(has_bpftool(), "bpftool is missing: apt-get install bpftool");
    Cni::BOTH.into_iter().for_each(|cni| eager_pods_never_show_another_address(cni, true));
}

/// docs/failures.md: pod-start, where the agent does not run until the pod has sent packets.
#[test]
fn a_pod_that_sends_before_its_interface_has_a_program_is_held() {
    for (cni, options) in [(Cni::PointToPoint, calm()), (Cni::Bridge, bypass())] {
        Lab::builder().workers(1).gateways(2).cni(cni).run(|lab| {
            lab.manifests().write("web", &web(&[10, 11]))?;
            let first = lab.add_pod(PodSpec::new("first", "worker1").label("app", "web"))?;
            let plain = lab.add_pod(PodSpec::new("plain", "worker1"))?;
            start_with(lab, &options)?;
            let server = lab.server("server1").clone();
            wait_in_force(&first, &server, &[10, 11])?;
            let _echo = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
            let late = lab.prepare_pod(PodSpec::new("late", "worker1").label("app", "web"))?;
            wait_held(lab)?;
            lab.agent("worker1").freeze()?;
            let capture = Capture::start(&server.ns, "eth0")?;
            lab.start_pod("late")?;
            // The rule's counter can be read while the agent does not run.
            let mut held = counter(lab, "worker1", "drop_not_seen")?;
            let clients = Family::BOTH.map(|family| -> Result<_> {
                let client = eager(&late.ns, server.ips.at(family, 80))?;
                wait_counter(lab, "worker1", "drop_not_seen", held)?;
                held = counter(lab, "worker1", "drop_not_seen")?;
                Ok(client)
            });
            // The pod reaches destinations inside the cluster, and other pods reach everything.
            let inside = TcpServer::start(&first.ns, &first.ips.both(8080), ServerMode::Echo)?;
            for family in Family::BOTH {
                let options = TcpOptions::once();
                let clients = TcpClients::establish(&late.ns, first.ips.at(family, 8080), 1, options)?;
                clients.wait("an echo from a pod", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
                wait_sources(&plain.ns, &server, family, &[lab.node("worker1").underlay.ip(family)])?;
                wait_sources(&first.ns, &server, family, &egress(family, &[10, 11]))?;
            }
            drop(inside);
            lab.agent("worker1").thaw()?;
            for client in clients {
                client?.join().map_err(|_| anyhow!("the eager process panicked"))??;
            }
            let trace = capture.finish()?;
            for family in Family::BOTH {
                let towards = |port: u16| SocketAddr::new(server.ips.ip(family), port);
                let sources: BTreeSet<IpAddr> = trace
                    .packets()
                    .iter()
                    .filter_map(|packet| packet.ports().filter(|(_, to)| *to == towards(80)))
                    .map(|(from, _)| from.ip())
                    .collect();
                assert!(!sources.is_empty(), "{family:?}");
                assert!(sources.iter().all(|ip| egress(family, &[10, 11]).contains(ip)), "{sources:?}");
            }
            // Everything passes again.
            let rules = || Ok(lab.egressctl("worker1", &["state"])?["rules"].to_string());
            let good = |rules: &String| !rules.contains("a selected pod is starting");
            wait_until("nothing is held any more", PATIENCE, rules, good)?;
            // The rule is gone, but its count is kept.
            ensure!(counter(lab, "worker1", "drop_not_seen")? >= held, "the counter was reset");
            Ok(())
        });
    }
}

/// Waits for an event about the pod with this reason, and until the conditions of the policy `web` and of the node name the pod.
fn wait_told(lab: &mut Lab, pod: &str, reason: &str) -> Result<()> {
    let about = format!("object=pod default/{pod} reason=\"{reason}\"");
    wait_until("the event", PATIENCE, || Ok(lab.controller("controller").log()), |log| log.contains(&about))?;
    let policies = || Ok(lab.egressctl("worker1", &["policies"])?.to_string());
    let of_policy = |text: &String| text.contains(&format!("on node worker1: pod default/{pod}"));
    wait_until("the condition of the policy", PATIENCE, policies, of_policy)?;
    let node = || Ok(lab.manifests().written("EgressNode", "worker1").unwrap_or_default());
    let of_node = |text: &String| text.contains("Degraded") && text.contains(&format!("policy web, pod default/{pod}"));
    wait_until("the condition of the node", PATIENCE, node, of_node).map(drop)
}

/// docs/failures.md: hold-forever. A pod never gets a network, for example because its Secret is missing.
#[test]
fn hold_forever_pod_that_never_starts_holds_unknown_sources_only_briefly() {
    lab::require_root!();
    lab::require!(has_bpftool(), "bpftool is missing: apt-get install bpftool");
    for cni in Cni::BOTH {
        Lab::builder().workers(1).gateways(1).cni(cni).run(|lab| {
            lab.manifests().write("web", &web(&[10]))?;
            let first = lab.add_pod(PodSpec::new("first", "worker1").label("app", "web"))?;
            let nameless = lab.add_pod(PodSpec::new("nameless", "worker1"))?;
            start_with(lab, &StartOptions::new().config(&format!("{CALM}startLimit: 3s\n")))?;
            let server = lab.server("server1").clone();
            wait_in_force(&first, &server, &[10])?;
            // A container without an object is an unknown source.
            lab.manifests().remove_pod(&nameless)?;
            let known = |lab: &Lab| Family::BOTH.iter().any(|&family| knows(lab, "worker1", nameless.ips.ip(family)));
            wait_until("the datapath has forgotten it", PATIENCE, || Ok(known(lab)), |known| !known)?;
            let stuck = lab.prepare_pod(PodSpec::new("stuck", "worker1").label("app", "web"))?;
            wait_held(lab)?;
            let node = lab.node("worker1").clone();
            for family in Family::BOTH {
                wait_sources(&nameless.ns, &server, family, &[node.underlay.ip(family)])?;
            }
            wait_told(lab, "stuck", "PodNotStarted")?;
            // The stuck pod gets an interface after all.
            node.ns.ip(&[format!("link add late0 type veth peer name late1 netns {}", stuck.ns.name())])?;
            wait_held(lab)?;
            node.ns.ip(&["link del late0".to_owned()])?;
            lab.start_pod("stuck")?;
            wait_in_force(&stuck, &server, &[10])?;
            let policies = || Ok(lab.egressctl("worker1", &["policies"])?.to_string());
            wait_until("all is well", PATIENCE, policies, |text| !text.contains("default/stuck: ")).map(drop)
        });
    }
}

/// docs/failures.md: unknown-interface. The pod's packets bypass every interface that the node has for pods.
#[test]
fn unknown_interface_a_selected_pod_without_an_interface_is_reported() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        let (_, server) = web_pod(lab, &[10])?;
        let pod = lab.prepare_pod(PodSpec::new("aside", "worker1").label("app", "web"))?;
        lab.node("worker1")
            .ns
            .ip(&[format!("link add aside0 link eth0 netns {} type macvlan mode bridge", pod.ns.name())])?;
        pod.ns.sh(&format!(
            "ip link set aside0 up; ip addr add {}/32 dev aside0; ip addr add {}/128 dev aside0",
            pod.ips.v4, pod.ips.v6
        ))?;
        lab.manifests().pod(&pod, true)?;
        wait_told(lab, "aside", "PodWithoutInterface")?;
        wait_in_force(lab.pod("web"), &server, &[10])
    });
}

/// Pods that no policy selects start as usual, even while a selected one is starting.
#[test]
fn pods_without_a_policy_are_not_held() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let web = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let plain = lab.add_pod(PodSpec::new("plain", "worker1"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&web, &server, &[10])?;
        // A selected pod that never gets its link.
        lab.prepare_pod(PodSpec::new("stuck", "worker1").label("app", "web"))?;
        wait_held(lab)?;
        for family in Family::BOTH {
            crate::support::wait_sources(&plain.ns, &server, family, &[lab.node("worker1").underlay.ip(family)])?;
        }
        wait_in_force(&web, &server, &[10])?;
        lab.start_pod("stuck")?;
        wait_in_force(lab.pod("stuck"), &server, &[10])
    });
}
