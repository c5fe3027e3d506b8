//! The invariants that must hold all the time (docs/design.md, "Invariants"), judged by what the server sees.
//!
//! 1. A packet that a policy selects has one of that policy's addresses, a packet of a pod without a policy has its
//!    node's address, and an answer to a connection from outside has the pod's own.
//! 2. A connection that existed from the beginning is never broken and loses no byte, whatever happens to gateways and
//!    agents; a datagram flow never changes its address.
//! 3. A gateway that has lost an egress IP does not answer for it again: the MAC address that answers changes no more often than the
//!    owner. Two gateways may alternate only while the news of the move may be under way on a busy machine.
//! 4. In the end `egress-daemon cleanup` leaves nothing behind.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::Result;
use lab::traffic::{ConnectionReport, undelivered};
use lab::{Dual, Family, Packet, Trace, wait_for};

use super::churn::Churn;
use super::world::{
    LOOK_PORT, MAIL, MAIL_PORT, NEW_MAIL_PORT, NEW_WEB_PORT, PASSING, PLAIN_PORT, POD_PORT, RATE_PORT, SoakLab,
    UDP_PORT, WEB, WEB_PORT, addresses, epochs,
};

/// The maximum number of violations that are reported individually; further ones are only counted.
const MOST_TOLD: usize = 20;
const PATIENCE: Duration = Duration::from_secs(60);
/// The time in seconds for which a former owner may not know the new owner.
const NEWS: f64 = 2.0;
/// Several times the interval at which streams send.
const QUIET: Duration = Duration::from_secs(3);

/// What the server saw, and the violations in it.
pub struct Judge {
    server: Vec<IpAddr>,
    /// The sources that packets to each port of the server may have.
    allowed: BTreeMap<u16, BTreeSet<IpAddr>>,
    /// The sources of answers to connections that the server opened.
    pods: BTreeSet<IpAddr>,
    /// The MAC addresses that answered for an egress IP, in order, each with the time of its first answer in seconds.
    answering: BTreeMap<IpAddr, Vec<(f64, [u8; 6])>>,
    started: Instant,
    packets: u64,
    untold: u64,
    violations: Vec<String>,
    figures: BTreeMap<String, String>,
}

impl Judge {
    /// Creates a judge of what `world`'s server sees.
    pub fn new(world: &SoakLab) -> Judge {
        let web: BTreeSet<IpAddr> = addresses(&[&WEB[..], &[PASSING]].concat()).into_iter().collect();
        let mail: BTreeSet<IpAddr> = addresses(&MAIL).into_iter().collect();
        let node = world.lab.node("worker1").underlay;
        let plain = Family::BOTH.map(|family| node.ip(family)).into();
        let mut allowed = BTreeMap::from([(PLAIN_PORT, plain)]);
        allowed.extend([WEB_PORT, NEW_WEB_PORT, RATE_PORT, UDP_PORT].map(|port| (port, web.clone())));
        allowed.extend([MAIL_PORT, NEW_MAIL_PORT].map(|port| (port, mail.clone())));
        allowed.insert(LOOK_PORT, &web | &mail);
        let both = |ips: Dual| Family::BOTH.map(|family| ips.ip(family));
        Judge::over(both(world.server().ips).into(), allowed, both(world.lab.pod("web-1").ips).into())
    }

    /// Creates a judge that has seen nothing yet.
    fn over(server: Vec<IpAddr>, allowed: BTreeMap<u16, BTreeSet<IpAddr>>, pods: BTreeSet<IpAddr>) -> Judge {
        Judge {
            server,
            allowed,
            pods,
            answering: BTreeMap::new(),
            started: Instant::now(),
            packets: 0,
            untold: 0,
            violations: Vec::new(),
            figures: BTreeMap::new(),
        }
    }

    /// Returns the violations.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// Returns the figures for the summary, by name.
    pub fn figures(&self) -> &BTreeMap<String, String> {
        &self.figures
    }

    /// Returns a line with the current state.
    pub fn line(&self) -> String {
        format!("{} packets seen, {} violations", self.packets, self.violations.len() as u64 + self.untold)
    }

    /// Records a violation.
    pub fn violation(&mut self, what: &str, which: &str) {
        if self.violations.len() < MOST_TOLD {
            eprintln!("VIOLATED: {what}: {which}");
            self.violations.push(format!("{what}: {which}"));
        } else {
            self.untold += 1;
        }
    }

    /// Judges the packets that the server has seen since the last call.
    pub fn look(&mut self, world: &SoakLab) {
        self.judge(&world.capture.take());
    }

    fn judge(&mut self, trace: &Trace) {
        for packet in trace.packets().iter().filter(|packet| !packet.outgoing) {
            if let Some((ip, mac)) = packet.claim() {
                self.claim(ip, mac, packet.at.saturating_duration_since(self.started));
            }
            self.source(packet);
        }
    }

    /// Judges a packet's source by its destination port.
    fn source(&mut self, packet: &Packet) {
        let Some((from, to)) = packet.ports().filter(|(_, to)| self.server.contains(&to.ip())) else { return };
        self.packets += 1;
        let right = match self.allowed.get(&to.port()) {
            Some(allowed) => allowed.contains(&from.ip()),
            None => from.port() == POD_PORT && self.pods.contains(&from.ip()),
        };
        if !right {
            self.violation("a packet with a wrong address", &format!("{from} to {to} ({packet:?})"));
        }
    }

    fn claim(&mut self, ip: IpAddr, mac: [u8; 6], at: Duration) {
        if !self.allowed.values().any(|allowed| allowed.contains(&ip)) {
            return;
        }
        let all = self.answering.entry(ip).or_default();
        if all.last().is_none_or(|(_, last)| *last != mac) {
            all.push((at.as_secs_f64(), mac));
        }
    }

    /// Makes the final judgement, with everything at rest.
    pub fn conclude(&mut self, world: &mut SoakLab, churn: &Churn) -> Result<()> {
        for (name, count) in &churn.done {
            self.figures.insert(format!("change: {name}"), count.to_string());
        }
        let [opened, established] = churn.connections;
        self.figure("connections of new pods", format!("{established} of {opened} got an answer"));
        self.connections(world)?;
        self.look(world);
        let epochs = epochs(&world.lab);
        self.figure("changes of owners", epochs.values().map(|epoch| epoch.saturating_sub(1)).sum::<u64>());
        let passing = addresses(&[PASSING]);
        let mut overlaps = 0;
        for (ip, answers) in std::mem::take(&mut self.answering) {
            let settled = settled(&answers);
            let changes = settled.len() as u64;
            overlaps += (answers.len() - settled.len()) / 2;
            let epoch = epochs.get(&ip).copied().unwrap_or(0);
            // When an egress IP leaves its policy, its object is deleted, and so is the count.
            if !passing.contains(&ip) && changes > epoch {
                let answers: Vec<String> = answers.iter().map(|(at, mac)| format!("{} at {at:.2} s", mac[5])).collect();
                let answers = answers.join(", ");
                let which = format!("{ip}: {changes} times, with {epoch} successive owners: {answers}");
                self.violation("another gateway answers for an egress IP", &which);
            }
        }
        self.figure("answers of former owners", overlaps);
        for node in world.nodes() {
            let drops: Vec<String> = world
                .lab
                .counters(&node)?
                .into_iter()
                .filter(|(name, count)| *count > 0 && (name.starts_with("drop_") || name.starts_with("flows_")))
                .map(|(name, count)| format!("{name} {count}"))
                .collect();
            self.figure(&format!("counters of {node}"), drops.join(", "));
        }
        self.cleanup(world)?;
        self.figure("packets judged", self.packets);
        Ok(())
    }

    fn figure(&mut self, name: &str, figure: impl ToString) {
        self.figures.insert(name.to_owned(), figure.to_string());
    }

    /// Judges the connections that existed from the beginning.
    fn connections(&mut self, world: &mut SoakLab) -> Result<()> {
        let Some(traffic) = world.traffic.take() else { return Ok(()) };
        let rate = traffic.rate.finish()?;
        let failed: Vec<String> = rate.failed.iter().map(|(why, count)| format!("{count} {why}")).collect();
        let text = format!("{} established, {} failed ({})", rate.opened, rate.failures(), failed.join(", "));
        self.figure("connections at a rate", text);

        traffic.streams.set_sending(false);
        let all = || traffic.clients.iter().chain(&traffic.inbound);
        all().for_each(|clients| clients.set_sending(false));
        let quiet = |ends: &[ConnectionReport]| ends.iter().all(|one| one.last_arrival.elapsed() > QUIET);
        let settled = wait_for("the streams are quiet", PATIENCE, || {
            Ok(all().all(|clients| quiet(&clients.connections())) && quiet(&traffic.streams.connections()))
        });
        if let Err(error) = settled {
            self.violation("streams do not come to rest", &format!("{error:#}"));
        }
        let ends: Vec<ConnectionReport> = traffic.clients.iter().flat_map(|clients| clients.connections()).collect();
        let inbound: Vec<ConnectionReport> = traffic.inbound.iter().flat_map(|clients| clients.connections()).collect();
        for broken in ends.iter().chain(&inbound).filter(|one| !one.intact()) {
            self.violation("a connection is broken", &format!("{broken:?}"));
        }
        let lost = undelivered(&ends, &traffic.streams.connections());
        if lost > 0 {
            self.violation("connections lost data", &format!("{lost} records"));
        }
        let pause = ends.iter().map(|one| one.longest_pause).max().unwrap_or_default();
        let records: u64 = ends.iter().map(|one| one.sent + one.received).sum();
        let intact = ends.iter().chain(&inbound).filter(|one| one.intact()).count();
        let text = format!(
            "{intact} of {} intact, {records} records, longest pause {} ms",
            ends.len() + inbound.len(),
            pause.as_millis()
        );
        self.figure("steady connections", text);

        // A pod sees other pods and the outside by their own addresses.
        let web = world.lab.pod("web-1").ips;
        let mut callers: BTreeSet<IpAddr> = Family::BOTH.map(|family| web.ip(family)).into();
        callers.extend(&self.server);
        for server in &traffic.pods {
            for peer in server.connections().iter().map(|one| one.peer.ip()).filter(|peer| !callers.contains(peer)) {
                self.violation("a connection to a pod has a foreign source", &peer.to_string());
            }
        }

        let flows = traffic.datagrams.flows();
        for (id, seen) in flows.iter().filter(|(_, seen)| seen.peers.len() != 1 || seen.corrupted > 0) {
            self.violation("a datagram flow changed its address", &format!("flow {id}: {seen:?}"));
        }
        let sent: u64 = traffic.senders.iter().flat_map(|senders| senders.flows()).map(|one| one.sent).sum();
        let arrived: u64 = flows.values().map(|seen| seen.received).sum();
        self.figure("datagrams", format!("{arrived} of {sent} arrived, {} flows", flows.len()));
        drop(traffic.echo);
        Ok(())
    }

    /// Checks that cleanup removes everything that the agents made.
    fn cleanup(&mut self, world: &mut SoakLab) -> Result<()> {
        for node in world.nodes() {
            world.lab.agent(&node).terminate()?;
            world.lab.daemon_text(&node, &["cleanup", "--release"])?;
            let pins = world.lab.bpffs(&node);
            let left = std::fs::read_dir(&pins).map_or(0, Iterator::count);
            if left > 0 || world.lab.node(&node).ns.ifindex("spillway0").is_ok() {
                self.violation(
                    "cleanup leaves something behind",
                    &format!("{node}: {left} entries in {}", pins.display()),
                );
            }
        }
        Ok(())
    }
}

/// Returns the answers, without those of a former owner that did not know the new one yet, and without the new one's in between.
fn settled(answers: &[(f64, [u8; 6])]) -> Vec<(f64, [u8; 6])> {
    let mut settled: Vec<(f64, [u8; 6])> = Vec::new();
    let mut taken_over = 0.0;
    for (at, mac) in answers {
        match settled.as_slice() {
            [.., _, (_, last)] if last == mac => {}
            [.., (_, former), _] if former == mac && at - taken_over < NEWS => {}
            _ => {
                settled.push((*at, *mac));
                taken_over = *at;
            }
        }
    }
    settled
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge() -> Judge {
        let ip = |last: u8| IpAddr::from([192, 0, 2, last]);
        Judge::over(vec![ip(200)], BTreeMap::from([(80, BTreeSet::from([ip(10)]))]), BTreeSet::new())
    }

    #[test]
    fn a_gateway_that_answers_again_is_a_change_of_its_own() {
        let mut judge = judge();
        let ip = IpAddr::from([192, 0, 2, 10]);
        for mac in [1, 1, 2, 2, 1, 1] {
            judge.claim(ip, [mac; 6], Duration::ZERO);
        }
        judge.claim([192, 0, 2, 99].into(), [7; 6], Duration::ZERO);
        assert_eq!(judge.answering, BTreeMap::from([(ip, [1, 2, 1].map(|mac| (0.0, [mac; 6])).to_vec())]));
    }

    #[test]
    fn a_former_owner_may_answer_until_it_has_read_of_the_new_one() {
        let answers = |all: &[(f64, u8)]| all.iter().map(|(at, mac)| (*at, [*mac; 6])).collect::<Vec<_>>();
        let of = |all: &[(f64, u8)]| settled(&answers(all));
        assert_eq!(of(&[(0.0, 1), (5.0, 2), (5.4, 1), (5.8, 2)]), answers(&[(0.0, 1), (5.0, 2)]));
        let late = [(0.0, 1), (5.0, 2), (7.4, 1), (7.8, 2)];
        assert_eq!(of(&late), answers(&late[..3]));
        let others = [(0.0, 1), (5.0, 2), (5.4, 3)];
        assert_eq!(of(&others), answers(&others));
    }

    #[test]
    fn violations_beyond_the_limit_are_only_counted() {
        let mut judge = judge();
        (0..MOST_TOLD + 5).for_each(|n| judge.violation("wrong", &n.to_string()));
        assert_eq!(judge.violations().len(), MOST_TOLD);
        assert_eq!(judge.line(), format!("0 packets seen, {} violations", MOST_TOLD + 5));
    }
}
