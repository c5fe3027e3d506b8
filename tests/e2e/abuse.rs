//! Attacks by a pod or on a pod that must not affect its neighbours: another pod's address, endless flows, churn.

use std::time::Duration;

use anyhow::Result;
use lab::traffic::{
    ConnectRate, LoadServer, Protocol, RunningRate, ServerAnswer, ServerMode, TcpClients, TcpOptions, TcpServer,
    send_packet, spray, syns_retransmitted,
};
use lab::{Capture, Cni, Family, Lab, Pod, PodSpec, StartOptions, wait_until};

use crate::support::{
    CALM, PATIENCE, at, counter, drops, sources, start, start_with, wait_counter, wait_in_force, web,
};

/// SECURITY.md: a pod spoofs another pod's address.
#[test]
fn a_pod_cannot_use_another_pods_address() {
    Lab::builder().workers(1).gateways(1).run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let victim = lab.add_pod(PodSpec::new("victim", "worker1").label("app", "web"))?;
        let innocent = lab.add_pod(PodSpec::new("innocent", "worker1"))?;
        let attacker = lab.add_pod(PodSpec::new("attacker", "worker1").label("app", "web"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&victim, &server, &[10])?;
        wait_in_force(&attacker, &server, &[10])?;
        // The attacker knows the ports of this connection.
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
        // Once the pod is gone, another pod can use the address.
        let ips = victim.ips;
        lab.remove_pod("victim")?;
        let heir = lab.add_pod(PodSpec::new("heir", "worker1").label("app", "web").ips(ips))?;
        wait_in_force(&heir, &server, &[10])
    });
}

/// SECURITY.md: one pod floods the node with new flows.
#[test]
fn flood_of_new_flows_uses_up_only_the_pods_own_quota() {
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
            // The flood is refused; its neighbour is served.
            assert_eq!(sources(&flooder.ns, &server, family, 3)?.len(), 0, "{family:?}");
            assert_eq!(sources(&pod.ns, &server, family, 50)?.values().sum::<usize>(), 50, "{family:?}");
        }
        Ok(())
    });
}

/// docs/failures.md: churn, inbound-flood. Two pods open short connections to thousands of servers, enough to fill the flow table several
/// times; the outside opens as many to a third pod. None is refused, and a neighbour keeps its silent connections and opens new ones.
#[test]
fn churn_of_pods_and_an_inbound_flood_cost_their_neighbour_nothing() {
    /// A pod's quota is three quarters of this.
    const FLOWS: u64 = 4_096;
    const SERVERS: u16 = 25_000;
    const SILENT: usize = 200;
    const PORT: u16 = 9006;
    /// Requested connections per second: in sum, about as many as two cores can handle.
    const ASKED: u32 = 3_000;
    const CRAWLED: u32 = 1_500;
    let rate = |per_second: u32, total: u64| ConnectRate {
        per_second,
        total,
        concurrency: 1_024,
        timeout: Duration::from_secs(4),
        reset: false,
        ..ConnectRate::default()
    };
    Lab::builder().workers(1).gateways(1).alone().run(|lab| {
        lab.manifests().write("web", &web(&[10]))?;
        let mut pod = |name: &str| lab.add_pod(PodSpec::new(name, "worker1").label("app", "web"));
        let (neighbor, asked, crawlers) = (pod("neighbor")?, pod("asked")?, [pod("crawler1")?, pod("crawler2")?]);
        start_with(lab, &StartOptions::new().config(&format!("{CALM}maxFlows: {FLOWS}\n")))?;
        let (server, outside) = (lab.server("server1").clone(), lab.server("far1").clone());
        for pod in [&neighbor, &asked, &crawlers[0], &crawlers[1]] {
            wait_in_force(pod, &server, &[10])?;
        }
        let crowd = lab.crowd(&server, SERVERS)?;
        let any = [at([0u16; 8].into(), PORT)];
        let _servers = [
            LoadServer::start(&server.ns, &any, ServerAnswer::Close)?,
            LoadServer::start(&asked.ns, &any, ServerAnswer::Close)?,
        ];
        let _echo = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Echo)?;
        for family in Family::BOTH {
            let silent = TcpClients::establish(&neighbor.ns, server.ips.at(family, 80), SILENT, TcpOptions::silent())?;
            let count = |name: &str| counter(lab, "worker1", name);
            let (dropped, repeated) = (drops(lab, "worker1")?, syns_retransmitted(&neighbor.ns)?);
            let (reclaimed, untouched) = (count("flows_reclaimed")?, count("flows_untouched")?);

            let new = rate(50, u64::MAX).start(&neighbor.ns, server.ips.at(family, PORT))?;
            let flood = rate(ASKED, u64::MAX).start(&outside.ns, asked.ips.at(family, PORT))?;
            let targets = || crowd.iter().map(|one| one.at(family, PORT)).collect();
            let crawl = |pod: &Pod| rate(CRAWLED, 5 * FLOWS).start_all(&pod.ns, targets());
            let crawls = crawlers.iter().map(crawl).collect::<Result<Vec<_>>>()?;
            let mut reports = crawls.into_iter().map(RunningRate::wait).collect::<Result<Vec<_>>>()?;
            reports.extend([flood.finish()?, new.finish()?]);
            for report in &reports {
                assert!(report.opened > 0 && report.failures() == 0, "{family:?}: {:?}", report.failed);
            }
            silent.set_sending(true);
            silent.wait_progress(3, PATIENCE)?;
            assert!(silent.connections().iter().all(|one| one.intact()), "{family:?}");

            assert_eq!(drops(lab, "worker1")?, dropped, "{family:?}");
            // A busy machine occasionally loses a packet.
            let (opened, repeated) = (reports[3].opened, syns_retransmitted(&neighbor.ns)? - repeated);
            assert!(repeated * 100 < opened, "{family:?}: the neighbour retransmitted {repeated} of {opened} SYNs");
            // The table was full, and the connections opened by the outside would have filled it, too.
            assert!(count("flows_reclaimed")? > reclaimed + FLOWS, "{family:?}");
            assert!(count("flows_untouched")? > untouched + FLOWS, "{family:?}");
        }
        Ok(())
    });
}
