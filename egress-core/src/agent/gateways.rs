//! Probes the gateways that this node uses, over each transport that leads to them.

use super::transports;
use crate::{
    health::{Form, ProbeState, ProbeTimes, ProbeTransition, TransportChooser},
    model::NodeName,
};
use egress_common::transport::DIRECT;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

/// A probe to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The gateway's tunnel address.
    pub remote: IpAddr,
    /// The prober's number for the gateway.
    pub node_id: u32,
    /// The probe's number.
    pub seq: u64,
    /// The transport that the probe takes ([`egress_common::transport`]).
    pub transport: u32,
    /// The reply transport that this node asks for.
    pub reply_transport: u32,
    /// The egress IP in the packet: its source on the way to the gateway, its destination on the way back.
    pub egress: IpAddr,
}

/// An answer to a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// The number that the request carried.
    pub seq: u64,
    /// The gateway's number that the request carried.
    pub node_id: u32,
    /// The transport that the request took ([`egress_common::transport`]).
    pub transport: u32,
    /// The transport that the reply took, according to its sender.
    pub back: u32,
    /// Whether the packet was IPv6.
    pub ipv6: bool,
    /// Whether the gateway is able to carry egress IPs.
    pub able: bool,
    /// Whether the gateway holds its lease.
    pub held: bool,
    /// The revision up to which this node's leases are in the gateway's tables.
    pub leases: u64,
}

/// A gateway to probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeTarget {
    /// Its tunnel address.
    pub address: IpAddr,
    /// An egress IP of each family (`true`: IPv6) that it owns: probes look like the packets that it forwards.
    pub egress: BTreeMap<bool, IpAddr>,
    /// The transports to probe.
    pub transports: BTreeSet<u32>,
}

impl ProbeTarget {
    /// Returns the forms of its probes. Only `direct` shows the packet to the network, so only `direct` is probed in both families.
    fn forms(&self) -> BTreeSet<Form> {
        let forms = |transport: &u32| {
            let families = self.egress.keys().take(if *transport == DIRECT { 2 } else { 1 });
            families.map(|ipv6| Form { transport: *transport, ipv6: *ipv6 }).collect::<Vec<_>>()
        };
        self.transports.iter().flat_map(forms).collect()
    }
}

struct Gateway {
    target: ProbeTarget,
    number: u32,
    transports: TransportChooser,
    back: Option<u32>,
    /// Whether its last answer said that it is able to carry egress IPs.
    able: bool,
    /// Whether it said that it holds its lease.
    held: bool,
    /// The revision up to which it said that it knows this node's leases.
    leases: Option<u64>,
    /// When it was last probed.
    asked: Option<Duration>,
    /// When its last answer came.
    heard: Option<Duration>,
    /// When it was last found dead after it had answered.
    died: Option<Duration>,
}

impl Gateway {
    /// Returns when it is probed next, if gateways that answer are probed at this pace.
    fn due(&self, pace: Duration) -> Duration {
        let interval = match self.transports.state() {
            ProbeState::Alive => self.transports.interval().min(pace),
            _ => self.transports.interval(),
        };
        self.asked.map_or(Duration::ZERO, |asked| asked + interval)
    }
}

/// While one gateway is in doubt, up to this many are probed at the pace of doubt. With more gateways, answers come often enough to tell a
/// dead gateway from a node that is cut off.
const FEW: usize = 16;

/// The probed gateways and what is known about them. Times are since an arbitrary start.
pub struct Gateways {
    times: ProbeTimes,
    gateways: BTreeMap<NodeName, Gateway>,
    next_number: u32,
    seq: u64,
    /// The interval at which gateways that answer are probed.
    pace: Duration,
}

impl Gateways {
    /// Creates the state with no gateway to probe.
    pub fn new(times: ProbeTimes) -> Self {
        Self { times, gateways: BTreeMap::new(), next_number: 1, seq: 0, pace: times.interval }
    }

    /// Probes exactly these nodes from now on. Keeps what is known of a node whose address stays the same.
    pub fn set(&mut self, wanted: BTreeMap<NodeName, ProbeTarget>) {
        self.gateways.retain(|name, g| wanted.get(name).is_some_and(|target| target.address == g.target.address));
        for (name, target) in wanted {
            match self.gateways.get_mut(&name) {
                Some(g) if g.target == target => {}
                Some(g) => {
                    if g.transports.set(&target.forms()) {
                        tracing::info!("gateway {name}: transport {}", transports::name(g.transports.current()));
                    }
                    g.target = target;
                }
                None => {
                    let transports = TransportChooser::new(self.times, &target.forms());
                    self.gateways.insert(
                        name,
                        Gateway {
                            target,
                            number: self.next_number,
                            transports,
                            back: None,
                            able: true,
                            held: false,
                            leases: None,
                            asked: None,
                            heard: None,
                            died: None,
                        },
                    );
                    self.next_number += 1;
                }
            }
        }
    }

    /// Returns the state of each gateway, according to its probes.
    pub fn states(&self) -> BTreeMap<NodeName, ProbeState> {
        let state = |g: &Gateway| match g.transports.state() {
            ProbeState::Alive if !g.able => ProbeState::Unable,
            state => state,
        };
        self.gateways.iter().map(|(n, g)| (n.clone(), state(g))).collect()
    }

    /// Returns whether a gateway that answered has missed a probe or was just found dead: this node may be the one that is cut off.
    pub fn are_in_doubt(&self, now: Duration) -> bool {
        self.gateways.values().any(|g| match g.transports.state() {
            ProbeState::Dead => g.died.is_some_and(|died| now < died + self.times.interval),
            state => state == ProbeState::Alive && g.transports.in_doubt(),
        })
    }

    /// Returns the gateways that answer and say that they hold their leases.
    pub fn holding(&self) -> BTreeSet<NodeName> {
        let holds = |g: &Gateway| g.held && g.transports.state() == ProbeState::Alive;
        self.gateways.iter().filter(|(_, g)| holds(g)).map(|(name, _)| name.clone()).collect()
    }

    /// Returns, by gateway that has answered, the revision up to which it knows this node's leases.
    pub fn leases(&self) -> BTreeMap<NodeName, u64> {
        self.gateways.iter().filter_map(|(name, g)| Some((name.clone(), g.leases?))).collect()
    }

    /// Returns the transport in force to a gateway; `None` if it is not probed.
    pub fn transport(&self, name: &NodeName) -> Option<u32> {
        self.gateways.get(name).map(|g| g.transports.current())
    }

    /// Returns the transport by which a gateway answers.
    pub fn back(&self, name: &NodeName) -> Option<u32> {
        self.gateways.get(name)?.back
    }

    /// Returns the state of one transport to a gateway, according to its probes; `None` if it is not probed.
    pub fn of(&self, name: &NodeName, transport: u32) -> Option<ProbeState> {
        self.gateways.get(name)?.transports.of(transport)
    }

    /// Returns when a gateway last answered.
    pub fn heard(&self, name: &NodeName) -> Option<Duration> {
        self.gateways.get(name)?.heard
    }

    /// Returns the last round-trip time of a gateway.
    pub fn round_trip(&self, name: &NodeName) -> Option<Duration> {
        self.gateways.get(name)?.transports.round_trip()
    }

    /// Returns the address at which a gateway is probed.
    pub fn address(&self, name: &NodeName) -> Option<IpAddr> {
        self.gateways.get(name).map(|g| g.target.address)
    }

    /// Returns when [`tick`](Self::tick) must be called next, if any gateway is probed.
    pub fn next(&self) -> Option<Duration> {
        let times = |g: &Gateway| [Some(g.due(self.pace)), g.transports.next_deadline()];
        self.gateways.values().flat_map(times).flatten().min()
    }

    /// Sends the probes that are due with `send`, and counts missed ones. Returns whether anything has changed.
    pub fn tick(&mut self, now: Duration, mut send: impl FnMut(&NodeName, &Request)) -> bool {
        let mut changed = false;
        for (name, g) in &mut self.gateways {
            let news = g.transports.poll(now);
            if news.0 == Some(ProbeTransition::Dead) && g.heard.is_some() {
                g.died = Some(now);
            }
            changed |= log(name, &news, g.transports.current());
        }
        let closely = self.gateways.len() <= FEW && self.are_in_doubt(now);
        self.pace = if closely { self.times.quick() } else { self.times.interval };
        for (name, g) in &mut self.gateways {
            if now < g.due(self.pace) {
                continue;
            }
            self.seq += 1;
            for form in g.transports.round(self.seq, now) {
                let Some(egress) = g.target.egress.get(&form.ipv6) else { continue };
                let request = Request {
                    remote: g.target.address,
                    node_id: g.number,
                    seq: self.seq,
                    transport: form.transport,
                    reply_transport: g.transports.current(),
                    egress: *egress,
                };
                send(name, &request);
            }
            g.asked = Some(now);
        }
        changed
    }

    /// Processes an answer that has just arrived. Returns whether anything has changed.
    pub fn reply(&mut self, answer: &Answered, now: Duration) -> bool {
        let Some((name, g)) = self.gateways.iter_mut().find(|(_, g)| g.number == answer.node_id) else { return false };
        let form = Form { transport: answer.transport, ipv6: answer.ipv6 };
        let news = g.transports.on_reply(form, answer.seq, now);
        if answer.transport == g.transports.current() {
            g.back = Some(answer.back);
        }
        g.held = answer.held;
        g.heard = Some(now);
        let learned = g.leases.replace(answer.leases) != Some(answer.leases);
        let turned = g.able != answer.able;
        if turned {
            g.able = answer.able;
            match g.able {
                true => tracing::info!("gateway {name} can carry egress IPs again"),
                false => tracing::info!("gateway {name} reports that it cannot carry egress IPs"),
            }
        }
        log(name, &news, g.transports.current()) | learned | turned
    }
}

/// Logs what has changed. Returns whether anything has changed.
fn log(name: &NodeName, news: &(Option<ProbeTransition>, bool), transport: u32) -> bool {
    match news.0 {
        Some(ProbeTransition::Dead) => tracing::warn!("gateway {name} is dead: it does not answer probes"),
        Some(ProbeTransition::Alive) => tracing::info!("gateway {name} is alive"),
        None => {}
    }
    if news.1 {
        tracing::info!("gateway {name}: transport {}", transports::name(transport));
    }
    news.0.is_some() || news.1
}

#[cfg(test)]
impl Request {
    /// Returns the answer over IPv4 of a gateway that is able and holds its lease.
    pub fn answered(&self, leases: u64) -> Answered {
        let Request { seq, node_id, transport, .. } = *self;
        Answered { seq, node_id, transport, back: transport, ipv6: false, able: true, held: true, leases }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns when each of `count` gateways is probed within a second. All answer immediately, but the first one only until 500 ms.
    fn probed(count: u8) -> BTreeMap<NodeName, Vec<u64>> {
        let mut gateways = Gateways::new(ProbeTimes::default());
        let name = |n: u8| NodeName::from(format!("g{n:02}").as_str());
        let target = |n: u8| ProbeTarget {
            address: IpAddr::from([192, 0, 2, n]),
            egress: [(false, IpAddr::from([203, 0, 113, n]))].into(),
            transports: [0].into(),
        };
        gateways.set((0..count).map(|n| (name(n), target(n))).collect());
        let (mut now, mut probed) = (ms(0), BTreeMap::<NodeName, Vec<u64>>::new());
        while now < ms(1000) {
            let mut answered = Vec::new();
            gateways.tick(now, |to, request| {
                probed.entry(to.clone()).or_default().push(now.as_millis() as u64);
                answered.extend((*to != name(0) || now < ms(500)).then(|| request.answered(0)));
            });
            for answer in answered {
                gateways.reply(&answer, now);
            }
            now = gateways.next().expect("gateways are probed").max(now + ms(1));
        }
        assert_eq!(gateways.states()[&name(0)], ProbeState::Dead);
        probed
    }

    #[test]
    fn other_gateways_are_probed_as_often_while_one_is_in_doubt_or_just_died() {
        let probed = probed(2);
        let rest = [0, 100, 200, 300, 400, 500];
        let dead: Vec<u64> = rest.into_iter().chain([525, 550, 650, 750, 850, 950]).collect();
        let alive: Vec<u64> = rest.into_iter().chain([525, 550, 575, 600, 625, 650, 750, 850, 950]).collect();
        assert_eq!(probed.into_values().collect::<Vec<_>>(), [dead, alive]);
    }

    #[test]
    fn death_of_one_of_many_gateways_does_not_speed_up_probes() {
        let probed = probed(FEW as u8 + 1);
        assert!(probed.values().skip(1).all(|times| times.len() == 10), "{probed:?}");
    }
}
