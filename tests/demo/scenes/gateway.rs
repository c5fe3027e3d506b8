//! A gateway dies and returns while connections stream and new ones are opened.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lab::Family;

use super::super::claims::Claim;
use super::super::cluster::{ECHO_PORT, Show};
use super::super::flows::{Flow, Trickle, counts, timeline};
use super::super::sightings::Watch;
use super::super::streams::{Stream, intact, longest_pause};
use super::super::table::Table;
use super::{WEB, carriers, seconds, wait_carriers};

/// The number of long-lived connections of each of four pods.
pub const STREAMS_PER_POD: usize = 25;
/// Three probes of 100 ms, the delay to which TCP's timer has backed off by then, and the delays of a busy machine.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Three probes of 100 ms, and the delays of a busy machine.
pub const DIVERTED: Duration = Duration::from_secs(1);
/// One in this many connections opened after that, and before the egress IPs move, may need a retransmission.
pub const RARE: usize = 20;
/// The lease, and the controller's planning round.
const MOVED: Duration = Duration::from_secs(20);
/// The longest permitted pause of connections when a live gateway hands over.
pub const HANDED_OVER: Duration = Duration::from_secs(2);
/// The longest pause that goes unnoticed.
const UNNOTICED: Duration = Duration::from_secs(1);
/// The delay in manifests/examples/pools.yaml.
pub const FAILBACK_DELAY: Duration = Duration::from_secs(3);
const RETURNED: Duration = Duration::from_secs(12);

/// Lets the power of a gateway fail.
pub fn dies(show: &mut Show) -> Result<()> {
    let total = 4 * STREAMS_PER_POD;
    let before = carriers(show, WEB)?;
    show.home = before.clone();
    let victim = before.values().nth(1).context("the policy web has no second egress IP")?.clone();
    show.screen.scene(
        "A gateway dies",
        &format!(
            "{total} connections stream in both directions, 20 packets a second each, and two pods each open 100 new \
             connections a second. Now {victim} loses its power and its network without warning. As soon as it stops \
             answering probes, the next carriers of its egress IPs answer for them, and all packets go there. Nothing waits \
             for the controller, which plans without the gateway once its lease of 15 s has expired. The state of the \
             connections is on the workers, not on the gateway, so they simply continue."
        ),
    );
    show.open_streams(STREAMS_PER_POD)?;
    let watch = Watch::start(show.server())?;
    let trickles = start_trickles(show)?;
    let streams = show.streams()?;
    streams.wait_progress(10)?;
    streams.reset_pauses();

    let died = Instant::now();
    show.lab.kill_node(&victim)?;
    let after = wait_carriers(show, WEB, &format!("the egress IPs of {victim} move"), |all| {
        all.values().all(|node| *node != victim && node != "-")
    })?;
    let moved = died.elapsed();
    let streams = show.streams()?;
    show.screen.wait("the connections continue", || streams.wait_progress(10))?;
    let all = streams.all();
    let flows = finish_trickles(show, trickles)?;
    let allowed = show.egress_addresses()?;
    show.sightings.add(&watch.finish(&allowed)?);

    show.screen.table(&streams_table(&all, &before, &after));
    show.screen.say(&format!("New connections around the death of {victim} (at 0.0):"));
    show.screen.table(&timeline(&flows, died));

    let of_victim = |ip: IpAddr| before.get(&ip).is_some_and(|node| *node == victim);
    let touched = all.iter().filter(|stream| stream.source.is_some_and(of_victim)).count();
    show.claim(
        "established connections outlive their gateway",
        intact(&all) == total && touched > 0,
        format!("{total} of {total}, no byte lost"),
        format!("{} of {total}; {touched} of them went through {victim}", intact(&all)),
    );
    let (pause, others) = (longest_pause(&all, of_victim), longest_pause(&all, |ip| !of_victim(ip)));
    show.claim(
        "they pause only until the next carrier answers",
        pause <= LONGEST_PAUSE,
        format!("at most {}", seconds(LONGEST_PAUSE)),
        format!("at most {}", seconds(pause)),
    );
    show.claim(
        "connections through other gateways are not affected",
        others <= UNNOTICED,
        format!("no pause above {}", seconds(UNNOTICED)),
        format!("longest pause {}", seconds(others)),
    );
    show.add(avoided(&flows, died, moved));
    show.add(moved_on(moved, &before, &after));
    Ok(())
}

/// Restores the power of the gateway.
pub fn returns(show: &mut Show) -> Result<()> {
    let before = carriers(show, WEB)?;
    let victim = show.lab.gateways().map(|node| node.name.clone()).find(|node| before.values().all(|one| one != node));
    let victim = victim.context("no gateway is without an egress IP")?;
    show.screen.scene(
        "The gateway returns",
        &format!(
            "{victim} has power again, and its agent starts. Its egress IPs return to it once it has been healthy for the \
             `failback` delay of the pool (3 s in this example; `mode: Never` would leave them where they are). The 100 \
             connections are still streaming."
        ),
    );
    let watch = Watch::start(show.server())?;
    let trickles = start_trickles(show)?;
    show.streams()?.wait_progress(5)?;
    show.streams()?.reset_pauses();
    let back = Instant::now();
    show.lab.revive_node(&victim)?;
    show.lab.start_agent(&victim, &show.agents.clone())?;
    let home = show.home.clone();
    // The claim judges egress IPs that do not return.
    wait_carriers(show, WEB, &format!("the egress IPs of {victim} return"), |all| *all == home).ok();
    let returned = back.elapsed();
    let after = carriers(show, WEB)?;
    let streams = show.streams()?;
    streams.wait_progress(20)?;
    let all = streams.all();
    let flows = finish_trickles(show, trickles)?;
    let allowed = show.egress_addresses()?;
    show.sightings.add(&watch.finish(&allowed)?);

    show.screen.table(&streams_table(&all, &before, &after));
    show.claim(
        "egress IPs return to the revived gateway",
        after == home && returned >= FAILBACK_DELAY && returned <= RETURNED,
        format!("after {}, within {}", seconds(FAILBACK_DELAY), seconds(RETURNED)),
        format!("after {}: {}", seconds(returned), moves(&before, &after)),
    );
    let pause = longest_pause(&all, |_| true);
    show.claim(
        "no connection is lost during the return",
        intact(&all) == all.len() && pause <= HANDED_OVER,
        format!("{} of {}, no pause above {}", all.len(), all.len(), seconds(HANDED_OVER)),
        format!("{} of {}, longest pause {}", intact(&all), all.len(), seconds(pause)),
    );
    let (opened, waited, failed) = counts(&flows);
    show.claim(
        "no new connection fails meanwhile",
        failed == 0,
        "0 failed",
        format!("{opened} of {} opened at once, {waited} with a second SYN, {failed} failed", flows.len()),
    );
    Ok(())
}

/// Returns the claim that new connections avoid a dead gateway until its egress IPs have moved.
pub fn avoided(flows: &[Flow], died: Instant, moved: Duration) -> Claim {
    let (_, waited, failed) = counts(flows);
    let within = |from: Instant, to: Instant| -> Vec<Flow> {
        flows.iter().filter(|flow| flow.started >= from && flow.started < to).cloned().collect()
    };
    let (first, then) = (within(died, died + DIVERTED), within(died + DIVERTED, died + moved));
    let (_, early, _) = counts(&first);
    let (_, late, _) = counts(&then);
    Claim {
        name: "new connections avoid the dead gateway".to_owned(),
        holds: failed == 0 && late * RARE <= then.len(),
        expected: format!("after {}, at most 1 in {RARE} needs a second SYN; none fails", seconds(DIVERTED)),
        measured: format!(
            "{} in all, {waited} with a second SYN: {early} before {}, {late} later, {} after the egress IPs moved; {failed} failed",
            flows.len(),
            seconds(DIVERTED),
            waited - early - late
        ),
    }
}

/// Returns the claim that the egress IPs of a dead gateway moved to others.
pub fn moved_on(moved: Duration, before: &BTreeMap<IpAddr, String>, after: &BTreeMap<IpAddr, String>) -> Claim {
    Claim {
        name: "the controller plans without the dead gateway".to_owned(),
        holds: moved <= MOVED,
        expected: format!("within {}", seconds(MOVED)),
        measured: format!("after {}: {}", seconds(moved), moves(before, after)),
    }
}

/// Starts opening connections from a pod of each worker, one in each family.
pub fn start_trickles(show: &Show) -> Result<Vec<Trickle>> {
    let pods = [("web-2", Family::V4), ("web-3", Family::V6)];
    let start = |(pod, family): &(&str, Family)| {
        Trickle::start(&show.lab.pod(pod).ns, show.server().ips.at(*family, ECHO_PORT))
    };
    pods.iter().map(start).collect()
}

pub fn finish_trickles(show: &Show, mut trickles: Vec<Trickle>) -> Result<Vec<Flow>> {
    let finish = |trickle: &mut Trickle| trickle.finish(&show.near);
    let flows: Vec<Vec<Flow>> =
        show.screen.wait("count new connections", || trickles.iter_mut().map(finish).collect())?;
    Ok(flows.into_iter().flatten().collect())
}

/// Returns a table of the connections of each egress IP, with its gateways before and after.
pub fn streams_table(streams: &[Stream], before: &BTreeMap<IpAddr, String>, after: &BTreeMap<IpAddr, String>) -> Table {
    let mut table = Table::new(&["egress IP", "carried by", ">connections", ">alive", ">longest pause"]);
    for (ip, old) in before {
        let of_ip: Vec<Stream> = streams.iter().filter(|stream| stream.source == Some(*ip)).cloned().collect();
        let carrier = match after.get(ip) {
            Some(new) if new != old => format!("{old} → {new}"),
            _ => old.clone(),
        };
        let pause = seconds(longest_pause(&of_ip, |_| true));
        table.row([ip.to_string(), carrier, of_ip.len().to_string(), intact(&of_ip).to_string(), pause]);
    }
    table
}

/// Lists moved egress IPs, such as `192.0.2.11 to gw3, ...`
pub fn moves(before: &BTreeMap<IpAddr, String>, after: &BTreeMap<IpAddr, String>) -> String {
    let moved = after.iter().filter(|(ip, node)| before.get(ip) != Some(node));
    moved.map(|(ip, node)| format!("{ip} to {node}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::example;

    #[test]
    fn example_pool_has_the_claimed_failback_delay() {
        let delay = format!("delay: {}s", FAILBACK_DELAY.as_secs());
        assert!(example("pools").unwrap().contains(&delay));
    }

    #[test]
    fn moves_lists_only_moved_egress_ips() {
        let ip = |last: u8| IpAddr::from([192, 0, 2, last]);
        let map = |node: &str| BTreeMap::from([(ip(10), "gw1".to_owned()), (ip(11), node.to_owned())]);
        assert_eq!(moves(&map("gw2"), &map("gw3")), "192.0.2.11 to gw3");
        let lost = Stream { source: Some(ip(11)), intact: false, pause: Duration::from_millis(2500) };
        let lines = streams_table(&[lost], &map("gw2"), &map("gw3")).lines();
        assert_eq!(lines[3], "192.0.2.11  gw2 → gw3             1      0         2.50 s");
    }
}
