//! What a pod may try that its neighbours must not feel: another pod's address, and flows without end.

use lab::traffic::{Protocol, ServerMode, TcpClients, TcpOptions, TcpServer, send_packet, spray};
use lab::{Capture, Cni, Family, Lab, PodSpec, StartOptions, wait_until};

use crate::support::{CALM, PATIENCE, at, counter, sources, start, start_with, wait_counter, wait_in_force, web};

/// SECURITY.md: a pod that spoofs another pod's address.
#[test]
fn a_pod_cannot_use_another_pods_address() {
    lab::require_root!();
    Lab::builder().workers(1).gateways(1).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let victim = lab.add_pod(PodSpec::new("victim", "worker1").label("app", "web"))?;
        let innocent = lab.add_pod(PodSpec::new("innocent", "worker1"))?;
        let attacker = lab.add_pod(PodSpec::new("attacker", "worker1").label("app", "web"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&victim, &server, &[10])?;
        wait_in_force(&attacker, &server, &[10])?;
        // A connection of the victim's, of which the attacker knows the ports.
        let _echo = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
        for family in Family::BOTH {
            let options = TcpOptions { source_port: 41_000, ..TcpOptions::default() };
            let known = TcpClients::establish(&victim.ns, server.ips.at(family, 80), 1, options)?;
            let capture = Capture::start(&server.ns, "eth0")?;
            for (pod, port, target) in [(&victim, 41_000, 80), (&victim, 5000, 9), (&innocent, 5000, 9)] {
                let before = counter(lab, "worker1", "drop_spoofed")?;
                let target = server.ips.at(family, target);
                send_packet(&attacker.ns, Protocol::Syn, at(pod.ips.ip(family), port), target)?;
                wait_counter(lab, "worker1", "drop_spoofed", before)?;
            }
            known.wait_progress(3, PATIENCE)?;
            assert!(known.connections().iter().all(|one| one.intact()));
            let forged = |packet: &lab::Packet| packet.ports().is_some_and(|(_, to)| to == server.ips.at(family, 9));
            assert_eq!(capture.finish()?.count(forged), 0, "{family:?}");
        }
        // The address is free again when its pod is gone and another one has it.
        let ips = victim.ips;
        lab.remove_pod("victim")?;
        let heir = lab.add_pod(PodSpec::new("heir", "worker1").label("app", "web").ips(ips))?;
        wait_in_force(&heir, &server, &[10])
    });
}

/// SECURITY.md: a flood of new flows from one pod.
#[test]
fn a_pod_that_opens_flows_without_end_uses_up_its_own_share_only() {
    lab::require_root!();
    const SHARE: u64 = 500;
    Lab::builder().workers(1).gateways(1).cni(Cni::Bridge).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let pod = lab.add_pod(PodSpec::new("web", "worker1").label("app", "web"))?;
        let flooder = lab.add_pod(PodSpec::new("flooder", "worker1").label("app", "web"))?;
        let config = format!("{CALM}maxFlows: 2000\nmaxFlowsPerPod: {SHARE}\n");
        start_with(lab, &StartOptions::new().config(&config))?;
        let server = lab.server("server1").clone();
        for one in [&pod, &flooder] {
            wait_in_force(one, &server, &[10])?;
        }
        for family in Family::BOTH {
            let before = counter(lab, "worker1", "drop_pod_share")?;
            spray(&flooder.ns, Protocol::Udp, flooder.ips.ip(family), 10_000..14_000, server.ips.at(family, 9))?;
            wait_until(
                "most of the flood is refused",
                PATIENCE,
                || counter(lab, "worker1", "drop_pod_share"),
                |now| *now >= before + 3_000,
            )?;
            let flows = lab.egressctl("worker1", &["flows", "--pod", "default/flooder"])?["matched"].as_u64();
            assert!(flows.is_some_and(|flows| (SHARE..=2 * SHARE).contains(&flows)), "{flows:?}");
            let top = lab.egressctl("worker1", &["top", "-n", "1", "--interval", "0.2"])?;
            assert_eq!(
                (&top["items"][0]["name"], top["items"][0]["flows"].as_u64()),
                (&"default/flooder".into(), flows)
            );
            // The flood is refused, its neighbour is served.
            assert_eq!(sources(&flooder.ns, &server, family, 3)?.len(), 0, "{family:?}");
            assert_eq!(sources(&pod.ns, &server, family, 50)?.values().sum::<usize>(), 50, "{family:?}");
        }
        Ok(())
    });
}
