//! The bandwidth of an egress IP: shared by all its pods and enforced at its owner, in both directions.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::traffic::{BulkReport, BulkServer, Direction, ServerMode, TcpServer, bulk};
use lab::{Family, Lab, Pod, PodSpec, Server};

use crate::spread::wait_all_used;
use crate::support::{
    WEB, calm, counter, gateways_where, named, policy, policy_pod, pool, start, wait_counter, wait_in_force,
};

/// Bits per second of Ethernet frames. The tests measure the IP packets in them, which are one per cent less.
const RATE: f64 = 80e6;
/// A limit of [`RATE`] with a burst of 10 ms.
const LIMIT: &str = "\n  bandwidth: {rate: 80M, burst: 800k}";
/// How long a measurement takes.
const WINDOW: Duration = Duration::from_secs(3);

/// The size of an IP header.
fn ip_header(family: Family) -> u64 {
    match family {
        Family::V4 => 20,
        Family::V6 => 40,
    }
}

/// Transfers data for about [`WINDOW`] in eight concurrent streams, distributed over the pods. Returns the bits per second of IP packets.
fn eight_streams(pods: &[Pod], server: &Server, family: Family, direction: Direction) -> Result<f64> {
    let _listening = BulkServer::start(&server.ns, &server.ips.both(5001))?;
    let bytes = (RATE / 8.0 * WINDOW.as_secs_f64() / 8.0) as u64;
    let target = server.ips.at(family, 5001);
    let began = Instant::now();
    let reports: Vec<BulkReport> = thread::scope(|scope| {
        let one = |number: usize| scope.spawn(move || bulk(&pods[number % pods.len()].ns, target, direction, bytes));
        let threads: Vec<_> = (0..8).map(one).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<_>>()
    })?;
    // The kernel's segment size does not include the headers: IP, TCP, and its timestamps.
    let headers = ip_header(family) + 20 + 12;
    let packets =
        |report: &BulkReport| report.bytes * (u64::from(report.segment) + headers) / u64::from(report.segment);
    Ok(reports.iter().map(packets).sum::<u64>() as f64 * 8.0 / began.elapsed().as_secs_f64())
}

/// The result of one measurement. A busy machine may miss a rate at first, so `measure` repeats a failed attempt.
type Attempt = Result<(), String>;

/// Measures up to five times. A violation that must never happen is an error and fails immediately.
fn measure(mut attempt: impl FnMut() -> Result<Attempt>) -> Result<()> {
    let mut missed = Vec::new();
    for _ in 0..5 {
        match attempt()? {
            Ok(()) => return Ok(()),
            Err(why) => missed.push(why),
        }
    }
    bail!("{}", missed.join("; "))
}

/// Judges bits per second: they never exceed the rate, and they reach 95 % of it.
fn at_rate(what: &str, bits: f64) -> Result<Attempt> {
    ensure!(bits <= RATE, "{what}: {:.1} % of the rate", share(bits) * 100.0);
    Ok(more_than(what, bits, 0.95))
}

fn more_than(what: &str, bits: f64, least: f64) -> Attempt {
    if share(bits) > least { Ok(()) } else { Err(format!("{what}: {:.1} % of the rate", share(bits) * 100.0)) }
}

/// The result of a flood of datagrams.
struct Flood {
    /// Bits per second of packets that arrived within [`WINDOW`] of the first.
    rate: f64,
    sent: u64,
    received: u64,
}

/// Sends datagrams from this many flows in turn, as fast as the kernel accepts them.
fn flood(pod: &Pod, server: &Server, family: Family, flows: usize) -> Result<Flood> {
    const SIZE: usize = 1300;
    let target = server.ips.at(family, 5002);
    let sink = server.ns.run(|| UdpSocket::bind(target).context("binding the sink"))?;
    sink.set_read_timeout(Some(Duration::from_secs(2)))?;
    let bind = || UdpSocket::bind(pod.ips.at(family, 0)).context("binding a source");
    let sources = pod.ns.run(|| (0..flows).map(|_| bind()).collect::<Result<Vec<_>>>())?;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sent = 0;
            for source in sources.iter().cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                // A flood may fill the socket's buffer.
                sent += u64::from(source.send_to(&[0x5a; SIZE], target).is_ok());
            }
            sent
        });
        let mut buffer = [0; SIZE];
        let mut receive = || -> Result<(f64, u64)> {
            sink.recv(&mut buffer).context("the first datagram")?;
            let first = Instant::now();
            let mut count = 0u64;
            while first.elapsed() < WINDOW {
                sink.recv(&mut buffer).context("another datagram")?;
                count += 1;
            }
            let size = ip_header(family) + 8 + SIZE as u64;
            Ok(((count * size * 8) as f64 / first.elapsed().as_secs_f64(), count + 1))
        };
        let received = receive();
        stop.store(true, Ordering::Relaxed);
        let sent = sender.join().expect("no panic");
        let (rate, mut received) = received?;
        // Receives the datagrams in flight.
        while sink.recv(&mut buffer).is_ok() {
            received += 1;
        }
        Ok(Flood { rate, sent, received })
    })
}

fn limited(lab: &Lab, limit: &str) -> Result<()> {
    lab.manifests().write("web", &policy("web", &format!("{WEB}{}{limit}", gateways_where(&[(10, 1, &named("gw1"))]))))
}

fn share(bits: f64) -> f64 {
    bits / RATE
}

#[test]
fn eight_streams_reach_the_rate_and_a_flood_no_more() {
    Lab::builder().workers(2).gateways(1).alone().run(|lab| {
        limited(lab, LIMIT)?;
        let pods = ["worker1", "worker2"].map(|node| PodSpec::new(&format!("web-{node}"), node).label("app", "web"));
        let pods = pods.into_iter().map(|spec| lab.add_pod(spec)).collect::<Result<Vec<_>>>()?;
        start(lab)?;
        let server = lab.server("server1").clone();
        for pod in &pods {
            wait_in_force(pod, &server, &[10])?;
        }
        let before = counter(lab, "gw1", "drop_bandwidth")?;
        for (family, direction) in [(Family::V4, Direction::Upload), (Family::V6, Direction::Download)] {
            measure(|| at_rate(&format!("{direction:?}"), eight_streams(&pods, &server, family, direction)?))?;
        }
        wait_counter(lab, "gw1", "drop_bandwidth", before)?;
        measure(|| {
            let before = counter(lab, "gw1", "drop_bandwidth")?;
            let flood = flood(&pods[0], &server, Family::V6, 1)?;
            // Every datagram that the limit dropped is counted. The queues of the lab's links may lose some of a flood before the limit.
            let (dropped, missing) = (counter(lab, "gw1", "drop_bandwidth")? - before, flood.sent - flood.received);
            let lost = format!("{missing} of {} datagrams are missing, {dropped} were counted", flood.sent);
            ensure!(dropped <= missing, "{lost}");
            Ok(at_rate("UDP", flood.rate)?.and(if dropped * 100 >= missing * 95 { Ok(()) } else { Err(lost) }))
        })?;
        // The limit belongs to the egress IP: pods with another egress IP are not slowed down. Without limits there is no shaper.
        limited(lab, "")?;
        lab::wait_for("the shaper is gone", crate::support::PATIENCE, || {
            Ok(lab.node("gw1").ns.ifindex("spillway-bw0").is_err())
        })?;
        wait_in_force(&pods[0], &server, &[10])?;
        measure(|| Ok(more_than("without a limit", eight_streams(&pods, &server, Family::V4, Direction::Upload)?, 2.0)))
    });
}

#[test]
fn pods_on_the_owner_are_limited_too_and_other_egress_ips_are_not() {
    Lab::builder().workers(1).gateways(1).alone().run(|lab| {
        limited(lab, LIMIT)?;
        let other =
            "\n  selectors: [{podSelector: {matchLabels: {app: other}}}]\n  destinationCIDRs: [0.0.0.0/0, \"::/0\"]";
        lab.manifests()
            .write("other", &policy("other", &format!("{other}{}", gateways_where(&[(11, 1, &named("gw1"))]))))?;
        let local = lab.add_pod(PodSpec::new("local", "gw1").label("app", "web"))?;
        let free = lab.add_pod(PodSpec::new("free", "worker1").label("app", "other"))?;
        start(lab)?;
        let server = lab.server("server1").clone();
        wait_in_force(&local, &server, &[10])?;
        wait_in_force(&free, &server, &[11])?;
        for (family, direction) in [(Family::V6, Direction::Upload), (Family::V4, Direction::Download)] {
            let streams = |pod| eight_streams(std::slice::from_ref(pod), &server, family, direction);
            measure(|| at_rate(&format!("{direction:?}"), streams(&local)?))?;
            measure(|| Ok(more_than(&format!("{direction:?} of another egress IP"), streams(&free)?, 2.0)))?;
        }
        Ok(())
    });
}

/// Each carrier enforces its part of the outgoing traffic, and the owner enforces all incoming traffic.
#[test]
fn a_spread_egress_ip_keeps_its_rate_in_sum() {
    Lab::builder().workers(1).gateways(4).alone().run(|lab| {
        let pool = pool("public", 10, 10, None).replace("spec:", "spec:\n  outbound: Spread");
        lab.manifests().write("pool", &pool)?;
        let spec = format!("{WEB}\n  egressIPPools: [{{name: public, count: 1}}]{LIMIT}");
        let (pod, server) = policy_pod(lab, &policy("web", &spec), &[10], &calm())?;
        let echo = TcpServer::start(&server.ns, &server.ips.both(81), ServerMode::Echo)?;
        wait_all_used(lab, &pod, server.ips.at(Family::V4, 81))?;
        drop(echo);
        let gateways: Vec<String> = lab.gateways().map(|node| node.name.clone()).collect();
        let dropped = || gateways.iter().map(|node| counter(lab, node, "drop_bandwidth")).collect::<Result<Vec<_>>>();
        let before = dropped()?;
        // With this many flows, each carrier gets some.
        measure(|| at_rate("UDP", flood(&pod, &server, Family::V4, 64)?.rate))?;
        let after = dropped()?;
        assert!(
            before.iter().zip(&after).all(|(before, after)| after > before),
            "every carrier limits: {before:?}, {after:?}"
        );
        let download = || eight_streams(std::slice::from_ref(&pod), &server, Family::V6, Direction::Download);
        measure(|| at_rate("download", download()?))
    });
}
