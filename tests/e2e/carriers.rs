//! One egress IP with several gateways: the next carrier takes over on its own, whatever dies or becomes unreachable.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use lab::traffic::{ConnectionReport, Mixed, Pauses, UdpClients, UdpOptions, UdpServer};
use lab::{Capture, Family, Lab, Packet, PodSpec, Segment, StartOptions, Trace, stays, wait_until};

use crate::support::{
    PATIENCE, WEB, announces, assert_no_strangers, egress, policy, pool, start_with, wait_agent, wait_in_force,
    wait_owner,
};

const HOSTS: [u8; 2] = [40, 41];
/// The longest pause in a datagram's answers when a gateway fails: several times that of a quiet machine
/// (docs/performance.md), and shorter than any wait for a lease or for the control plane.
const LONGEST: Duration = Duration::from_secs(2);
/// The interval at which a gateway reannounces its egress IPs; the time until others find it dead and have announced themselves.
const REMIND: Duration = Duration::from_secs(10);
const DETECTION: Duration = Duration::from_millis(230);
/// Short leases, and so short deadlines, so that a test can wait for their end.
const SHORT: &str = "lease: {renew: 1s, duration: 3s}\n";

/// The egress IPs of both families.
fn ips() -> Vec<IpAddr> {
    Family::BOTH.iter().flat_map(|family| egress(*family, &HOSTS)).collect()
}

/// The nodes that answer for `address`, according to their agents' maps.
fn answering(lab: &Lab, address: IpAddr) -> Result<BTreeSet<String>> {
    let mut nodes = BTreeSet::new();
    for node in lab.gateways() {
        if announces(lab, &node.name, address)? {
            nodes.insert(node.name.clone());
        }
    }
    Ok(nodes)
}

/// The load, and the checks on it.
struct Load(Mixed);

impl Load {
    /// Waits until all traffic continues, prints the longest pauses, and resets them.
    fn judge(&self, what: &str) -> Result<()> {
        self.0.wait_progress(PATIENCE)?;
        let Pauses { datagrams, streams } = self.0.pauses();
        eprintln!("{what}: longest pause: UDP {datagrams:?}, TCP {streams:?}");
        ensure!(datagrams < LONGEST, "{what}: no datagram was answered for {datagrams:?}");
        self.0.reset_pauses();
        Ok(())
    }

    /// Fails unless each datagram was answered and no SYN was retransmitted since `syns` were counted.
    fn lost_nothing(&self, syns: u64) -> Result<()> {
        self.0.all_answered().context("datagrams were lost")?;
        ensure!(self.0.syns_retransmitted()? == syns, "SYNs were retransmitted");
        Ok(())
    }

    /// Ends the load, and asserts that nothing was lost.
    fn finish(self) -> Result<()> {
        let (rates, streams) = self.0.finish()?;
        for report in rates {
            eprintln!("new connections: {} opened, slowest {:?}", report.opened, report.latency().max);
            assert!(report.opened > 50 && report.failures() == 0, "{} opened, {:?}", report.opened, report.failed);
        }
        assert!(streams.iter().all(ConnectionReport::intact), "a stream was lost");
        Ok(())
    }
}

/// Runs `work` under load in a cluster with three gateways, each of which carries every egress IP.
fn under_load(options: &StartOptions, work: impl FnOnce(&mut Lab, &Load, &str) -> Result<()>) {
    Lab::builder().workers(2).gateways(3).alone().run(|lab| {
        lab.manifests().write("pool", &pool("public", 40, 41, Some("1s")))?;
        lab.manifests()
            .write("web", &policy("web", &format!("{WEB}\n  egressIPPools: [{{name: public, count: 2}}]")))?;
        let pods = [
            lab.add_pod(PodSpec::new("a", "worker1").label("app", "web"))?,
            lab.add_pod(PodSpec::new("b", "worker2").label("app", "web"))?,
        ];
        start_with(lab, options)?;
        let server = lab.server("server1").clone();
        for pod in &pods {
            wait_in_force(pod, &server, &HOSTS)?;
        }
        let load = Load(Mixed::start(&pods.map(|pod| pod.ns), &server, PATIENCE)?);
        let victim = wait_owner(lab, ips()[0], |_| true)?;
        let capture = Capture::start(&server.ns, "eth0")?;
        load.0.reset_pauses();
        work(lab, &load, &victim)?;
        load.0.wait_progress(PATIENCE)?;
        let trace = capture.finish()?;
        assert_no_strangers(&trace, &server, &HOSTS);
        load.finish()
    });
}

/// Waits until a gateway other than `victim` answers for each egress IP.
fn wait_taken(lab: &Lab, victim: &str) -> Result<()> {
    for ip in ips() {
        let others = |nodes: &BTreeSet<String>| nodes.iter().any(|node| node != victim);
        wait_until(&format!("another gateway answers for {ip}"), PATIENCE, || answering(lab, ip), others)?;
    }
    Ok(())
}

/// Waits until `victim` alone answers again for the first egress IP, which it owned.
fn wait_back(lab: &Lab, victim: &str) -> Result<()> {
    let only = BTreeSet::from([victim.to_owned()]);
    wait_until("it has its egress IPs again", PATIENCE, || answering(lab, ips()[0]), |nodes| *nodes == only).map(drop)
}

/// Kills the controller and cuts every node off from the store.
fn behead(lab: &mut Lab, load: &Load) -> Result<Vec<String>> {
    let nodes: Vec<String> = lab.nodes().map(|node| node.name.clone()).collect();
    lab.controller("controller").kill()?;
    nodes.iter().try_for_each(|node| lab.cut_store(node))?;
    load.judge("the control plane dies")?;
    Ok(nodes)
}

/// Waits until a gateway is about to reannounce its egress IPs, as it does every ten seconds. It announces those that
/// it has just taken over every second at first.
fn wait_reminder(lab: &Lab, gateway: &str) -> Result<()> {
    let (ip, mac) = (ips()[0], lab.node(gateway).external_mac());
    let capture = Capture::start(&lab.server("server1").ns, "eth0")?;
    let to_all = |packet: &Packet| packet.target_mac == [0xff; 6];
    // Removes the packets that it looks at: under load, the whole capture is too large to search often.
    let claims = || capture.take().filter(to_all).claims_of(ip).remove(&mac).unwrap_or_default();
    let mut seen = Vec::new();
    let reminder = || {
        seen.extend(claims());
        Ok(seen.windows(2).filter(|two| two[1] - two[0] > Duration::from_secs(2)).map(|two| two[1]).next_back())
    };
    let reminder = wait_until("a reminder", PATIENCE, reminder, Option::is_some)?.context("a reminder")?;
    let left = (REMIND - DETECTION).saturating_sub(reminder.elapsed());
    stays("the next one is still to come", left, || Ok(claims().is_empty()))
}

/// A gateway's underlay dies and comes back, then its uplink. A gateway that is cut off believes all others dead; it
/// must claim none of their egress IPs, and none that another gateway has taken over.
fn links_die(lab: &Lab, load: &Load, victim: &str) -> Result<()> {
    let mac = lab.node(victim).external_mac();
    for segment in [Segment::Underlay, Segment::External] {
        let mut of_others = ips();
        of_others.retain(|ip| answering(lab, *ip).is_ok_and(|nodes| !nodes.contains(victim)));
        let capture = Capture::start(&lab.server("server1").ns, "eth0")?;
        let cut = Instant::now();
        lab.cut(victim, segment)?;
        wait_taken(lab, victim)?;
        wait_until(
            "it is silent",
            PATIENCE,
            || ips().into_iter().map(|ip| Ok(answering(lab, ip)?.contains(victim))).collect::<Result<Vec<_>>>(),
            |answers| answers.iter().all(|answers| !answers),
        )?;
        load.judge(&format!("{segment:?} dies"))?;
        let trace = capture.finish_lossy()?.0;
        let claimed: Vec<_> = of_others.iter().filter(|ip| trace.claims_of(**ip).contains_key(&mac)).collect();
        ensure!(
            claimed.is_empty() && !of_others.is_empty(),
            "{segment:?} dies: {victim} claims {claimed:?} of {of_others:?}"
        );
        for ip in ips() {
            let mut claims = trace.since(cut).claims_of(ip);
            let own = claims.remove(&mac).unwrap_or_default();
            let taken = claims.into_values().flatten().min();
            let late: Vec<_> = own.iter().filter_map(|at| Some(at.saturating_duration_since(taken?))).collect();
            ensure!(
                late.iter().all(Duration::is_zero),
                "{segment:?} dies: {victim} claims {ip} {late:?} after another"
            );
        }
        lab.heal(victim, segment)?;
        wait_back(lab, victim)?;
        load.judge(&format!("{segment:?} comes back"))?;
    }
    Ok(())
}

/// Counts the connections that the pod of this capture was made to reopen: each got a reset that ends nothing, then sent another SYN.
fn opened_again(trace: &Trace) -> Result<usize> {
    let mut resets: BTreeSet<(SocketAddr, SocketAddr)> = BTreeSet::new();
    let mut again = 0;
    for packet in trace.packets() {
        let (Some((source, target)), Some(flags)) = (packet.ports(), packet.tcp_flags()) else { continue };
        if flags.rst && flags.ack && !packet.outgoing {
            resets.insert((target, source));
        } else if resets.remove(&(source, target)) {
            ensure!(flags.syn && packet.outgoing, "a reset of {target} did more than that: {packet:?}");
            again += 1;
        }
    }
    Ok(again)
}

/// docs/failures.md: headless.
#[test]
fn headless_a_gateway_dies_while_controller_and_store_are_away() {
    let options = StartOptions::new().config(SHORT);
    under_load(&options, |lab, load, victim| {
        let nodes = behead(lab, load)?;
        let captures = load.0.pods().iter().map(|pod| Capture::start(pod, "eth0")).collect::<Result<Vec<_>>>()?;
        links_die(lab, load, victim)?;
        lab.kill_node(victim)?;
        wait_taken(lab, victim)?;
        load.judge("the power fails")?;
        for capture in captures {
            let look = || opened_again(&capture.so_far());
            let again = wait_until("connections are reopened", PATIENCE, look, |again| *again > 0)?;
            eprintln!("{again} connections of a pod were opened again");
        }
        // The control plane comes back and finds what has changed without it.
        nodes.iter().filter(|node| *node != victim).try_for_each(|node| lab.heal_store(node))?;
        let moved: Vec<BTreeSet<String>> = ips().into_iter().map(|ip| answering(lab, ip)).collect::<Result<_>>()?;
        lab.start_controller("again", &options)?;
        for (ip, answered) in ips().into_iter().zip(moved) {
            let now = wait_owner(lab, ip, |node| node != victim)?;
            assert!(answered.contains(&now), "{ip} is moved twice: {answered:?}, then {now}");
            // The maps of a dead node still exist.
            let living = || Ok(answering(lab, ip)?.into_iter().filter(|node| node != victim).collect::<Vec<_>>());
            wait_until("one gateway answers", PATIENCE, living, |nodes| *nodes == [now.clone()])?;
        }
        load.judge("the control plane is back")
    });
}

#[test]
fn a_gateway_that_loses_a_link_or_its_power_is_replaced_at_once_and_comes_back() {
    under_load(&StartOptions::new(), |lab, load, victim| {
        wait_reminder(lab, victim)?;
        links_die(lab, load, victim)?;
        lab.kill_node(victim)?;
        wait_taken(lab, victim)?;
        load.judge("the power fails")?;
        lab.revive_node(victim)?;
        lab.start_agent(victim, &StartOptions::new())?;
        wait_back(lab, victim)?;
        load.judge("the power is back")
    });
}

/// The gateway's kernel continues without its agent until the deadline. Then others answer, and it forwards packets that still arrive.
#[test]
fn agent_failure_costs_no_packet_with_or_without_a_control_plane() {
    let options = StartOptions::new().config(SHORT);
    under_load(&options, |lab, load, victim| {
        let syns = load.0.syns_retransmitted()?;
        for plane in ["alive", "dead"] {
            let is_dead = plane == "dead";
            if is_dead {
                behead(lab, load)?;
            }
            let judge = |what| load.judge(&format!("control plane {plane}: {what}"));
            // An agent does not start without its directory, so it gets the directory back, and then loses it again.
            let start = |lab: &mut Lab| -> Result<()> {
                lab.start_agent(victim, &options)?;
                wait_agent(lab, victim)?;
                wait_back(lab, victim)?;
                if is_dead { lab.cut_store(victim) } else { Ok(()) }
            };
            lab.agent(victim).kill()?;
            start(lab)?;
            judge("the agent restarts")?;

            lab.agent(victim).freeze()?;
            judge("the agent freezes")?;
            wait_taken(lab, victim)?;
            judge("others take over from a frozen agent")?;
            lab.agent(victim).thaw()?;
            wait_back(lab, victim)?;
            judge("the agent continues")?;

            lab.agent(victim).kill()?;
            wait_taken(lab, victim)?;
            judge("others take over from a dead agent")?;
            start(lab)?;
            judge("the agent is back")?;
            load.lost_nothing(syns).with_context(|| format!("control plane {plane}"))?;
        }
        Ok(())
    });
}

/// `systemd` stops a node's pods with SIGTERM, and then the node. In this planned maintenance nothing is lost and no SYN is retransmitted.
#[test]
fn a_gateway_that_is_shut_down_hands_over_what_it_carries_first() {
    under_load(&StartOptions::new(), |lab, load, victim| {
        let syns = load.0.syns_retransmitted()?;
        lab.agent(victim).terminate()?;
        lab.kill_node(victim)?;
        wait_taken(lab, victim)?;
        load.judge("a node is shut down")?;
        load.lost_nothing(syns)
    });
}

/// docs/failures.md: flooded. All carriers know an egress IP's leases; only the one to which a frame is addressed forwards it.
#[test]
fn flooded_frames_are_forwarded_once() {
    Lab::builder().workers(2).gateways(3).run(|lab| {
        lab.manifests().write("pool", &pool("public", 40, 41, None))?;
        lab.manifests()
            .write("web", &policy("web", &format!("{WEB}\n  egressIPPools: [{{name: public, count: 2}}]")))?;
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
                    .with_context(|| format!("{segment:?}, {family:?}: a datagram does not have exactly one answer"))?;
            }
        }
        Ok(())
    });
}
