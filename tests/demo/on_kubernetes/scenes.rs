//! The scenes on a Kubernetes, in the order in which they are shown.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lab::traffic::{TcpClients, TcpOptions};
use lab::{Capture, wait_for, wait_until};

use super::super::flows::{Flow, Trickle, counts, timeline};
use super::super::scenes::gateway::{FAILBACK_DELAY, HANDED_OVER, avoided, moved_on, moves, streams_table};
use super::super::scenes::{seconds, spread};
use super::super::streams::{Streams, intact, longest_pause};
use super::super::table::Table;
use super::{ECHO_PORT, PATIENCE, STREAM_PORT, Show, questions, server};
use xtask::workspace;

/// The number of pods `app: web`, and of long-lived connections of each.
const PODS: usize = 3;
pub const STREAMS_PER_POD: usize = 30;
/// The time within which an applied policy must be in force.
const IN_FORCE: Duration = Duration::from_secs(10);
/// The next carrier answers within this time, and TCP, which backs off, has retransmitted.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// Within this time, a node's processes have started again, and the pool's failback delay has passed.
const RETURNED: Duration = Duration::from_secs(60);
/// The time for which the API server is unavailable.
const AWAY: Duration = Duration::from_secs(10);
/// The lease of the leading controller, and the start of the next one.
const LED: Duration = Duration::from_secs(20);
const COLUMNS: &str = "egressips";

/// Plays all scenes, or those of `--quick`.
pub fn play(show: &mut Show, quick: bool) -> Result<()> {
    apply(show)?;
    even(show)?;
    if !quick {
        one_egress_ip_per_pod(show)?;
    }
    gateway_dies(show)?;
    if !quick {
        gateway_returns(show)?;
        questions::show(show)?;
        controller_and_api_server_die(show)?;
    }
    show.screen.scene(
        "Throughout",
        "Captures on both paths to the server have seen every packet since the policy was in force. Each had to come from \
         an egress IP of a policy.",
    );
    let seen = show.sightings()?;
    show.claim("no packet ever has a wrong address", seen.are_clean(), "0 packets", seen.sentence());
    Ok(())
}

/// Returns the path of `manifests/examples/NAME.yaml`.
pub fn example(name: &str) -> String {
    workspace::root().join("manifests/examples").join(format!("{name}.yaml")).display().to_string()
}

fn apply(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "A pool and a policy",
        "Nodes labelled `egress: \"true\"` may carry egress IPs. A pool lists the addresses, and a policy says which \
         pods leave with them. Three pods with the label `app: web` are already running, one on each worker.",
    );
    show.kubectl(&["get", "nodes", "-L", "egress,topology.kubernetes.io/zone"])?;
    show.web = show.screen.wait("start pods", || show.cluster.deploy("web", PODS))?;
    let before = show.screen.wait("open connections", || sources(show, 0, 1))?;
    let applied = Instant::now();
    show.kubectl(&["apply", "-f", &example("pools"), "-f", &example("web-per-flow")])?;
    let ready = "the policy is in force";
    let condition = ["wait", "--for=condition=Ready", "egp/web", "--timeout=60s"];
    show.screen.wait(ready, || show.cluster.kubectl(&condition))?;
    let carriers = show.wait_carriers("web", "every egress IP has a gateway", |all| {
        all.len() == 3 && all.values().all(|node| node != "-") && all.values().collect::<BTreeSet<_>>().len() == 3
    })?;
    for pod in 0..PODS {
        let seen = || sources(show, pod, 12);
        let good =
            |seen: &BTreeSet<IpAddr>| !seen.is_empty() && seen.iter().all(|source| carriers.contains_key(source));
        show.screen.wait(ready, || wait_until(ready, PATIENCE, seen, good))?;
    }
    let elapsed = applied.elapsed();
    show.captures = vec![Capture::start(&show.outside, "ext")?, Capture::start(&show.outside, "nodes")?];
    show.kubectl(&["get", "spillway"])?;
    let list = |all: &BTreeSet<IpAddr>| all.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
    show.claim(
        "pods leave with egress IPs soon after `kubectl apply`",
        elapsed <= IN_FORCE,
        format!("within {}", seconds(IN_FORCE)),
        format!("after {}; before that, a pod left with {}", seconds(elapsed), list(&before)),
    );

    show.screen.say("An invalid object is refused when it is applied, with what to write instead:");
    let mistake = "{apiVersion: spillway.io/v1beta1, kind: EgressGatewayPolicy, metadata: {name: mistake}, spec: {
        selectors: [{podSelector: {matchLabels: {app: web}}}], destinationCIDRs: [203.0.113.7/24],
        egressIPPools: [{name: public}]}}";
    let refusal =
        show.cluster.apply(mistake).err().map(|error| format!("{:#}", error.root_cause())).unwrap_or_default();
    let sentence = refusal.lines().find(|line| line.contains("203.0.113.7/24") || line.contains("write"));
    show.print(&["apply", "-f", "mistake.yaml"], sentence.unwrap_or(&refusal));
    let says = refusal.contains("write");
    show.claim(
        "a mistake is refused with a remedy",
        says,
        "a message with `write ..`",
        if says { "it has one" } else { "it has none" },
    );
    show.home = carriers;
    Ok(())
}

/// Opens connections from a pod `app: web`. Returns their sources, as the server sees them.
fn sources(show: &Show, pod: usize, count: usize) -> Result<BTreeSet<IpAddr>> {
    let options = TcpOptions { connect_timeout: Duration::from_secs(2), ..TcpOptions::once() };
    let clients = TcpClients::establish(&show.web[pod].ns, server(ECHO_PORT)?, count, options)?;
    let all = clients.wait("all echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
    let ids: Vec<u64> = all.iter().map(|one| one.id).collect();
    Ok(spread::sources_of(&show.echo, &ids).into_iter().collect())
}

fn even(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "Connections spread over three gateways",
        "The pods open 600 connections. The table shows what the server saw: no address of a pod or a worker, and about \
         a third from each egress IP, each carried by a different gateway.",
    );
    let open = |show: &Show| {
        let mut sources = Vec::new();
        for pod in &show.web {
            let each = spread::FLOWS / PODS;
            let clients = TcpClients::establish(&pod.ns, server(ECHO_PORT)?, each, TcpOptions::once())?;
            let all = clients.wait("all echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
            sources.extend(spread::sources_of(&show.echo, &all.iter().map(|one| one.id).collect::<Vec<_>>()));
        }
        Ok(lab::traffic::tally(sources))
    };
    let sources = show.screen.wait("open connections", || open(show))?;
    let gateways = show.carriers("web")?;
    let weights = gateways.keys().map(|ip| (*ip, 1.0)).collect();
    show.screen.table(&spread::table(&sources, &weights, &gateways));
    show.add(spread::fair("connections spread over all egress IPs", &sources, &weights));
    show.echo.forget_closed();
    Ok(())
}

fn one_egress_ip_per_pod(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "One egress IP for each pod",
        "The policy `ledger` has `distribution: PerEndpoint`: six pods, three egress IPs, so two pods share one, and no \
         pod ever uses two.",
    );
    let pods = show.screen.wait("start pods", || show.cluster.deploy("ledger", 6))?;
    show.kubectl(&["apply", "-f", &example("ledger-per-endpoint")])?;
    show.cluster.kubectl(&["wait", "--for=condition=Ready", "egp/ledger", "--timeout=60s"])?;
    let carriers = show.carriers("ledger")?;
    let mut table = Table::new(&["pod", "node", "source at the server"]);
    let (mut single, mut counts): (usize, BTreeMap<IpAddr, usize>) = (0, carriers.keys().map(|ip| (*ip, 0)).collect());
    for pod in &pods {
        let seen = || {
            let options = TcpOptions { connect_timeout: Duration::from_secs(2), ..TcpOptions::once() };
            let clients = TcpClients::establish(&pod.ns, server(ECHO_PORT)?, 20, options)?;
            let all = clients.wait("all echoes", PATIENCE, |all| all.iter().all(|one| one.received == 1))?;
            let sources = spread::sources_of(&show.echo, &all.iter().map(|one| one.id).collect::<Vec<_>>());
            Ok(sources.into_iter().collect::<BTreeSet<IpAddr>>())
        };
        let good = |seen: &BTreeSet<IpAddr>| seen.iter().all(|source| carriers.contains_key(source));
        let seen =
            show.screen.wait("open connections", || wait_until("the policy is in force", PATIENCE, seen, good))?;
        single += usize::from(seen.len() == 1);
        for source in &seen {
            *counts.entry(*source).or_default() += 1;
        }
        let list: Vec<String> = seen.iter().map(IpAddr::to_string).collect();
        table.row([pod.name.clone(), pod.node.clone(), list.join(", ")]);
    }
    show.screen.table(&table);
    show.kubectl(&["get", "egp"])?;
    let list: Vec<String> = counts.values().map(usize::to_string).collect();
    show.claim(
        "every pod keeps one egress IP, and pods are spread evenly",
        single == pods.len() && counts.values().all(|count| *count == pods.len() / carriers.len().max(1)),
        "one address for each of 6 pods, 2 pods on each",
        format!("one address for {single} pods; {} pods on the addresses", list.join(", ")),
    );
    Ok(())
}

fn gateway_dies(show: &mut Show) -> Result<()> {
    let total = PODS * STREAMS_PER_POD;
    let before = show.carriers("web")?;
    let victim = before.values().nth(1).context("the policy web has no second egress IP")?.clone();
    show.screen.scene(
        "A gateway dies",
        &format!(
            "{total} connections stream in both directions, and two pods each open 100 new ones a second. Now {victim} \
             loses its power and its network. As soon as it stops answering probes, the next carriers of its egress \
             IPs take over. The controller plans without it once its lease of 15 s has expired. The state of its \
             connections is on the workers, so they simply continue."
        ),
    );
    let pods: Vec<_> =
        show.web.iter().map(|pod| anyhow::Ok((pod.ns.clone(), server(STREAM_PORT)?))).collect::<Result<_>>()?;
    let streams = Streams::open(&show.outside, &pods, STREAMS_PER_POD)?;
    let trickles = start_trickles(show)?;
    streams.wait_progress(10)?;
    streams.reset_pauses();
    let died = Instant::now();
    show.cluster.kill_node(&victim)?;
    // On this machine, the eBPF programs of a killed node stay loaded, unlike those of a real dead node: its network is cut, too.
    show.cluster.partition(&victim, true)?;
    let after = show.wait_carriers("web", &format!("the egress IPs of {victim} move"), |all| {
        all.values().all(|node| *node != victim && node != "-")
    })?;
    let moved = died.elapsed();
    show.screen.wait("the connections continue", || streams.wait_progress(10))?;
    let all = streams.all();
    let flows = finish_trickles(show, trickles)?;
    show.kubectl(&["get", COLUMNS])?;
    show.kubectl(&[
        "get",
        "events",
        "--field-selector",
        "reason=Moved",
        "-o",
        "custom-columns=OBJECT:.involvedObject.name,MESSAGE:.message",
    ])?;
    show.screen.table(&streams_table(&all, &before, &after));
    show.screen.say(&format!("New connections around the death of {victim} (at 0.0):"));
    show.screen.table(&timeline(&flows, died));
    let of_victim = |ip: IpAddr| before.get(&ip).is_some_and(|node| *node == victim);
    let touched = all.iter().filter(|stream| stream.source.is_some_and(of_victim)).count();
    let pause = longest_pause(&all, of_victim);
    show.claim(
        "established connections outlive their gateway",
        intact(&all) == total && touched > 0 && pause <= LONGEST_PAUSE,
        format!("{total} of {total}, no byte lost, no pause above {}", seconds(LONGEST_PAUSE)),
        format!(
            "{} of {total}; {touched} of them went through {victim} and paused for at most {}",
            intact(&all),
            seconds(pause)
        ),
    );
    show.add(avoided(&flows, died, moved));
    show.add(moved_on(moved, &before, &after));
    show.streams = Some(streams);
    Ok(())
}

fn gateway_returns(show: &mut Show) -> Result<()> {
    let (before, home) = (show.carriers("web")?, show.home.clone());
    let victim =
        home.values().find(|node| before.values().all(|one| one != *node)).context("no gateway is dead")?.clone();
    show.screen.scene(
        "The gateway returns",
        &format!(
            "{victim} has power again: its kubelet starts, and with it the agent. Its egress IPs return to it once it has \
             been healthy for the `failback` delay of the pool. The connections are still streaming."
        ),
    );
    let trickles = start_trickles(show)?;
    let streams = show.streams.as_ref().context("no connections stream")?;
    streams.wait_progress(5)?;
    streams.reset_pauses();
    let back = Instant::now();
    show.cluster.partition(&victim, false)?;
    let node = show.cluster.nodes().iter().find(|node| node.name == victim).context("no such node")?;
    show.cluster.start_node(node)?;
    show.cluster.load_image(&xtask::image::for_tests()?)?;
    // The claim judges egress IPs that do not return.
    show.wait_carriers("web", &format!("the egress IPs of {victim} return"), |all| *all == home).ok();
    let returned = back.elapsed();
    let after = show.carriers("web")?;
    streams.wait_progress(20)?;
    let all = streams.all();
    let flows = finish_trickles(show, trickles)?;
    show.kubectl(&["get", COLUMNS])?;
    show.claim(
        "egress IPs return to the revived gateway",
        after == home && returned >= FAILBACK_DELAY && returned <= RETURNED,
        format!("after {}, within {}", seconds(FAILBACK_DELAY), seconds(RETURNED)),
        format!("after {}: {}", seconds(returned), moves(&before, &after)),
    );
    lossless(show, "no connection is lost during the return", &all, &flows);
    Ok(())
}

fn controller_and_api_server_die(show: &mut Show) -> Result<()> {
    show.screen.scene(
        "A controller dies, and the API server is unavailable",
        &format!(
            "The leading controller is killed, and the other one takes over. Then the API server is killed and is not \
             started again for {} s. Agents and the kernel keep what they have.",
            AWAY.as_secs()
        ),
    );
    let before = show.cluster.egress_ips()?;
    let trickles = start_trickles(show)?;
    let streams = show.streams.as_ref().context("no connections stream")?;
    streams.wait_progress(5)?;
    streams.reset_pauses();
    let leader = wait_until("a controller leads", PATIENCE, || show.cluster.leader(), Option::is_some)?;
    let leader = leader.context("a leader")?;
    let pod = leader.rsplit_once('-').map_or(leader.as_str(), |(pod, _)| pod);
    let killed = Instant::now();
    show.kubectl(&["delete", "pod", "-n", "spillway", pod, "--grace-period=0", "--force", "--wait=false"])?;
    let other = |now: &Option<String>| now.as_ref().is_some_and(|now| *now != leader);
    show.screen
        .wait("another controller leads", || wait_until("another leads", PATIENCE, || show.cluster.leader(), other))?;
    let led = killed.elapsed();
    show.cluster.kill_api_server()?;
    let away = Instant::now();
    wait_for("connections continue without an API server", AWAY * 3, || {
        streams.wait_progress(1)?;
        Ok(away.elapsed() >= AWAY)
    })?;
    show.cluster.start_api_server()?;
    wait_until("a controller leads again", PATIENCE, || show.cluster.leader(), Option::is_some)?;
    streams.wait_progress(20)?;
    let all = streams.all();
    let flows = finish_trickles(show, trickles)?;
    let after = show.cluster.egress_ips()?;
    show.kubectl(&["get", "lease", "-n", "spillway"])?;
    show.claim(
        "another controller takes over, and nothing moves",
        led <= LED && before == after,
        format!("within {}, every egress IP with the same gateway and epoch", seconds(LED)),
        format!("after {}, {}", seconds(led), if before == after { "as before" } else { "egress IPs have moved" }),
    );
    lossless(show, "no connection is lost without either of them", &all, &flows);
    Ok(())
}

/// Claims that connections continued and new ones were made.
fn lossless(show: &mut Show, name: &str, all: &[super::super::streams::Stream], flows: &[Flow]) {
    let pause = longest_pause(all, |_| true);
    let (opened, waited, failed) = counts(flows);
    show.claim(
        name,
        intact(all) == all.len() && pause <= HANDED_OVER && failed == 0,
        format!("{} of {}, no pause above {}, no new one fails", all.len(), all.len(), seconds(HANDED_OVER)),
        format!(
            "{} of {}, longest pause {}; {} new ones: {opened} opened at once, {waited} with a second SYN, {failed} failed",
            intact(all),
            all.len(),
            seconds(pause),
            flows.len()
        ),
    );
}

/// Starts opening connections from two of the pods.
fn start_trickles(show: &Show) -> Result<Vec<Trickle>> {
    show.web.iter().take(2).map(|pod| Trickle::start(&pod.ns, server(ECHO_PORT)?)).collect()
}

fn finish_trickles(show: &Show, mut trickles: Vec<Trickle>) -> Result<Vec<Flow>> {
    let finish = |trickle: &mut Trickle| trickle.finish(&show.echo);
    let flows: Vec<Vec<Flow>> =
        show.screen.wait("count new connections", || trickles.iter_mut().map(finish).collect())?;
    Ok(flows.into_iter().flatten().collect())
}
