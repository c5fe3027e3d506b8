//! One egress IP, several gateways: the next carrier takes over by itself, whatever dies and whoever is away.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::traffic::{
    ConnectRate, ConnectionReport, RunningRate, ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions,
    UdpServer, syns_repeated,
};
use lab::{Capture, Family, Lab, Pod, PodSpec, Segment, Server, StartOptions, wait_for, wait_until};

use crate::support::{PATIENCE, WEB, announces, egress, policy, pool, start_with, wait_in_force, wait_owner};

const HOSTS: [u8; 2] = [40, 41];

/// The egress IPs of both families.
fn ips() -> Vec<IpAddr> {
    Family::BOTH.iter().flat_map(|family| egress(*family, &HOSTS)).collect()
}

/// The nodes that answer for `address`, as their agents' maps say.
fn answering(lab: &Lab, address: IpAddr) -> Result<BTreeSet<String>> {
    let gateways = lab.gateways().filter(|node| announces(lab, &node.name, address).unwrap_or(false));
    Ok(gateways.map(|node| node.name.clone()).collect())
}

/// What goes on all the time: streams, questions, and new connections, in both families.
struct Load {
    streams: TcpServer,
    clients: Vec<TcpClients>,
    questions: Vec<UdpClients>,
    rates: Vec<RunningRate>,
    _servers: (TcpServer, UdpServer),
}

impl Load {
    fn start(pods: &[Pod], server: &Server) -> Result<Load> {
        let streams = TcpServer::start(&server.ns, &server.ips.both(80), ServerMode::Stream)?;
        let echo = TcpServer::start(&server.ns, &server.ips.both(81), ServerMode::Echo)?;
        let udp = UdpServer::start(&server.ns, &server.ips.both(82))?;
        let (mut clients, mut questions, mut rates) = (Vec::new(), Vec::new(), Vec::new());
        let rate = ConnectRate { per_second: 50, timeout: Duration::from_secs(5), ..ConnectRate::default() };
        for pod in pods {
            for family in Family::BOTH {
                clients.push(TcpClients::establish(&pod.ns, server.ips.at(family, 80), 50, TcpOptions::default())?);
                let options = UdpOptions { interval: Duration::from_millis(5), ..UdpOptions::default() };
                questions.push(UdpClients::start(&pod.ns, server.ips.at(family, 82), 4, options)?);
                rates.push(rate.start(&pod.ns, server.ips.at(family, 81))?);
            }
        }
        let load = Load { streams, clients, questions, rates, _servers: (echo, udp) };
        load.wait_progress()?;
        Ok(load)
    }

    fn reset(&self) {
        self.streams.reset_pauses();
        self.clients.iter().for_each(TcpClients::reset_pauses);
        self.questions.iter().for_each(UdpClients::reset_pauses);
    }

    /// Waits until all of it goes on.
    fn wait_progress(&self) -> Result<()> {
        self.streams.wait_progress(3, PATIENCE)?;
        self.clients.iter().try_for_each(|clients| clients.wait_progress(3, PATIENCE).map(drop))?;
        for questions in &self.questions {
            let before: Vec<u64> = questions.flows().iter().map(|flow| flow.received).collect();
            questions.wait("answers", PATIENCE, |flows| {
                flows.iter().zip(&before).all(|(flow, before)| flow.received > before + 3)
            })?;
        }
        Ok(())
    }

    /// The longest pauses of a datagram's answer and of a stream, for people who read the test's output.
    fn pauses(&self) -> [Duration; 2] {
        let udp = self.questions.iter().flat_map(|questions| questions.flows()).map(|flow| flow.longest_pause);
        let clients = self.clients.iter().flat_map(|clients| clients.connections());
        let tcp = clients.chain(self.streams.connections()).map(|one| one.longest_pause);
        [udp.max().unwrap_or_default(), tcp.max().unwrap_or_default()]
    }

    /// Ends it: nothing was lost.
    fn finish(self) -> Result<()> {
        for rate in self.rates {
            let report = rate.finish()?;
            eprintln!("new connections: {} opened, slowest {:?}", report.opened, report.latency());
            assert!(report.opened > 50 && report.failures() == 0, "{} opened, {:?}", report.opened, report.failed);
        }
        for clients in self.clients {
            let all = clients.close()?;
            assert!(all.iter().all(ConnectionReport::intact), "a stream was lost");
        }
        Ok(())
    }
}

/// A cluster with three gateways, each of which carries every egress IP, under load.
fn under_load(work: impl FnOnce(&mut Lab, &Load, &str) -> Result<()>) {
    Lab::builder().workers(2).gateways(3).alone().run(|lab| {
        lab.manifests().write("pool", &pool("public", 40, 41, Some("1s")))?;
        lab.manifests().write("web", &policy("web", &format!("{WEB}\n  egressIPPool: {{name: public, count: 2}}")))?;
        let pods = [
            lab.add_pod(PodSpec::new("a", "worker1").label("app", "web"))?,
            lab.add_pod(PodSpec::new("b", "worker2").label("app", "web"))?,
        ];
        start_with(lab, &StartOptions::new())?;
        let server = lab.server("server1").clone();
        for pod in &pods {
            wait_in_force(pod, &server, &HOSTS)?;
        }
        let load = Load::start(&pods, &server)?;
        let victim = wait_owner(lab, ips()[0], |_| true)?;
        let capture = Capture::start(&server.ns, "eth0")?;
        load.reset();
        work(lab, &load, &victim)?;
        load.wait_progress()?;
        let trace = capture.finish()?;
        for family in Family::BOTH {
            let strangers = trace.strangers_towards(server.ips.ip(family), &egress(family, &HOSTS));
            assert!(strangers.is_empty(), "{strangers:?}");
        }
        let [udp, tcp] = load.pauses();
        eprintln!("longest pause: UDP {udp:?}, TCP {tcp:?}");
        load.finish()
    });
}

/// Waits until others than `victim` answer for everything.
fn wait_taken(lab: &Lab, victim: &str) -> Result<()> {
    for ip in ips() {
        let others = |nodes: &BTreeSet<String>| nodes.iter().any(|node| node != victim);
        wait_until(&format!("another gateway answers for {ip}"), PATIENCE, || answering(lab, ip), others)?;
    }
    Ok(())
}

/// docs/failures.md: headless.
#[test]
fn headless_a_gateway_dies_while_controller_and_store_are_away() {
    lab::require_root!();
    under_load(|lab, load, victim| {
        let nodes: Vec<String> = lab.nodes().map(|node| node.name.clone()).collect();
        lab.controller("controller").kill()?;
        nodes.iter().try_for_each(|node| lab.cut_store(node))?;
        load.wait_progress()?;
        lab.kill_node(victim)?;
        wait_taken(lab, victim)?;
        load.wait_progress()?;
        // The control plane comes back to what has happened without it.
        nodes.iter().filter(|node| *node != victim).try_for_each(|node| lab.heal_store(node))?;
        let moved: Vec<BTreeSet<String>> = ips().into_iter().map(|ip| answering(lab, ip)).collect::<Result<_>>()?;
        lab.start_controller("again", &StartOptions::new())?;
        for (ip, answered) in ips().into_iter().zip(moved) {
            let now = wait_owner(lab, ip, |node| node != victim)?;
            assert!(answered.contains(&now), "{ip} is moved twice: {answered:?}, then {now}");
            // The maps of the dead are still there.
            let living = || Ok(answering(lab, ip)?.into_iter().filter(|node| node != victim).collect::<Vec<_>>());
            wait_until("one gateway answers", PATIENCE, living, |nodes| *nodes == [now.clone()])?;
        }
        Ok(())
    });
}

#[test]
fn a_gateway_whose_underlay_or_uplink_dies_is_replaced_at_once_and_comes_back() {
    lab::require_root!();
    under_load(|lab, load, victim| {
        for segment in [Segment::Underlay, Segment::External] {
            lab.cut(victim, segment)?;
            wait_taken(lab, victim)?;
            wait_until(
                "it is silent",
                PATIENCE,
                || ips().into_iter().map(|ip| Ok(answering(lab, ip)?.contains(victim))).collect::<Result<Vec<_>>>(),
                |answers| answers.iter().all(|answers| !answers),
            )?;
            load.wait_progress()?;
            eprintln!("{segment:?}: {:?}", load.pauses());
            lab.heal(victim, segment)?;
            wait_for("it has its egress IPs again", PATIENCE, || Ok(answering(lab, ips()[0])?.contains(victim)))?;
            load.wait_progress()?;
            load.reset();
        }
        Ok(())
    });
}

/// `systemd` stops a node's pods by SIGTERM, and then the node. That is planned maintenance: nothing is lost, and no SYN is sent twice.
#[test]
fn a_gateway_that_is_shut_down_hands_over_what_it_carries_first() {
    lab::require_root!();
    under_load(|lab, load, victim| {
        let pods = ["a", "b"].map(|pod| lab.pod(pod).ns.clone());
        let repeated = || pods.iter().map(syns_repeated).collect::<Result<Vec<_>>>();
        let before = repeated()?;
        lab.agent(victim).terminate()?;
        lab.kill_node(victim)?;
        wait_taken(lab, victim)?;
        load.wait_progress()?;
        let answered = load.questions.iter().map(UdpClients::all_answered).collect::<Result<Vec<_>>>();
        answered.context("datagrams were lost")?;
        assert_eq!(repeated()?, before, "SYNs were sent twice");
        Ok(())
    });
}

/// docs/failures.md: flooded. All carriers have an egress IP's leases; the one that a frame is for forwards it.
#[test]
fn flooded_frames_are_forwarded_once() {
    lab::require_root!();
    Lab::builder().workers(2).gateways(3).run(|lab| {
        lab.manifests().write("pool", &pool("public", 40, 41, None))?;
        lab.manifests().write("web", &policy("web", &format!("{WEB}\n  egressIPPool: {{name: public, count: 2}}")))?;
        let pod = lab.add_pod(PodSpec::new("a", "worker1").label("app", "web"))?;
        let bystander = lab.add_pod(PodSpec::new("b", "worker2").label("app", "web"))?;
        start_with(lab, &StartOptions::new())?;
        let server = lab.server("server1").clone();
        wait_in_force(&pod, &server, &HOSTS)?;
        wait_in_force(&bystander, &server, &HOSTS)?;
        let _echo = UdpServer::start(&server.ns, &server.ips.both(82))?;
        for segment in [Segment::External, Segment::Underlay] {
            lab.flood(segment)?;
            for family in Family::BOTH {
                let options = UdpOptions { interval: Duration::from_millis(5), ..UdpOptions::default() };
                let asked = UdpClients::start(&pod.ns, server.ips.at(family, 82), 8, options)?;
                asked.wait("answers", PATIENCE, |flows| flows.iter().all(|flow| flow.received > 50))?;
                asked
                    .all_answered()
                    .with_context(|| format!("{segment:?}, {family:?}: not one answer to each datagram"))?;
            }
        }
        Ok(())
    });
}
