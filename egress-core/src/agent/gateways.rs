//! Probing the gateways that this node uses, by each transport that leads to them.

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
    /// The transport that replies of flows are wanted by.
    pub reply_transport: u32,
    /// The egress IP that stands in the packet: its source on the way to the gateway, its destination on the way back.
    pub egress: IpAddr,
}

/// A probe that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// The number that the request carried.
    pub seq: u64,
    /// The number of the gateway that the request carried.
    pub node_id: u32,
    /// The transport that the request took ([`egress_common::transport`]).
    pub transport: u32,
    /// The transport that the reply took, as its sender says.
    pub back: u32,
    /// The packet was IPv6.
    pub ipv6: bool,
    /// The gateway is able to carry egress IPs.
    pub able: bool,
    /// The gateway holds its lease.
    pub held: bool,
    /// Up to which revision this node's leases are in the gateway's tables.
    pub leases: u64,
}

/// A gateway that is to be probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeTarget {
    /// Its tunnel address.
    pub address: IpAddr,
    /// An egress IP of each family that it owns: probes look like what it forwards.
    pub egress: BTreeMap<bool, IpAddr>,
    /// The transports to probe.
    pub transports: BTreeSet<u32>,
}

impl ProbeTarget {
    /// What probes are sent as. Only `direct` shows the packet to the network, so only it is probed in both families.
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
    /// Its last answer said that it is able to carry egress IPs.
    able: bool,
    /// It said that it holds its lease.
    held: bool,
    /// Up to which revision it said that it knows this node's leases.
    leases: Option<u64>,
    /// When it is probed next.
    due: Duration,
    /// When its last answer came.
    heard: Option<Duration>,
}

/// The gateways that are probed, and what is known of them. Times are since any start.
pub struct Gateways {
    times: ProbeTimes,
    gateways: BTreeMap<NodeName, Gateway>,
    next_number: u32,
    seq: u64,
}

impl Gateways {
    /// Nobody to probe yet.
    pub fn new(times: ProbeTimes) -> Self {
        Self { times, gateways: BTreeMap::new(), next_number: 1, seq: 0 }
    }

    /// Probes these nodes from now on, and no others. What is known of a node whose address stays is kept.
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
                            due: Duration::ZERO,
                            heard: None,
                        },
                    );
                    self.next_number += 1;
                }
            }
        }
    }

    /// What the probes say of each gateway.
    pub fn states(&self) -> BTreeMap<NodeName, ProbeState> {
        let state = |g: &Gateway| match g.transports.state() {
            ProbeState::Alive if !g.able => ProbeState::Unable,
            state => state,
        };
        self.gateways.iter().map(|(n, g)| (n.clone(), state(g))).collect()
    }

    /// Whether one of those that answered has missed a probe.
    pub fn are_in_doubt(&self) -> bool {
        self.gateways.values().any(|g| g.transports.in_doubt() && g.transports.state() == ProbeState::Alive)
    }

    /// The gateways that answer, and say that they hold their leases.
    pub fn holding(&self) -> BTreeSet<NodeName> {
        let holds = |g: &Gateway| g.held && g.transports.state() == ProbeState::Alive;
        self.gateways.iter().filter(|(_, g)| holds(g)).map(|(name, _)| name.clone()).collect()
    }

    /// Up to which revision the gateways that have answered know this node's leases.
    pub fn leases(&self) -> BTreeMap<NodeName, u64> {
        self.gateways.iter().filter_map(|(name, g)| Some((name.clone(), g.leases?))).collect()
    }

    /// The way in force to a gateway; `None` if it is not probed.
    pub fn transport(&self, name: &NodeName) -> Option<u32> {
        self.gateways.get(name).map(|g| g.transports.current())
    }

    /// The transport that a gateway answers by.
    pub fn back(&self, name: &NodeName) -> Option<u32> {
        self.gateways.get(name)?.back
    }

    /// What the probes say of one transport to a gateway; `None` if it is not probed.
    pub fn of(&self, name: &NodeName, transport: u32) -> Option<ProbeState> {
        self.gateways.get(name)?.transports.of(transport)
    }

    /// When a gateway has answered last.
    pub fn heard(&self, name: &NodeName) -> Option<Duration> {
        self.gateways.get(name)?.heard
    }

    /// The last round trip of a gateway.
    pub fn round_trip(&self, name: &NodeName) -> Option<Duration> {
        self.gateways.get(name)?.transports.round_trip()
    }

    /// Where a gateway is probed.
    pub fn address(&self, name: &NodeName) -> Option<IpAddr> {
        self.gateways.get(name).map(|g| g.target.address)
    }

    /// When [`tick`](Self::tick) wants to be called next, if anybody is probed.
    pub fn next(&self) -> Option<Duration> {
        self.gateways.values().map(|g| g.due).min()
    }

    /// Has `send` send what is due, and counts what was missed. Whether anything has changed.
    pub fn tick(&mut self, now: Duration, mut send: impl FnMut(&NodeName, &Request)) -> bool {
        let mut changed = false;
        for (name, g) in &mut self.gateways {
            changed |= tell(name, &g.transports.poll(now), g.transports.current());
            if now < g.due {
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
            g.due = now + g.transports.interval();
        }
        changed
    }

    /// Takes an answer that has just come. Whether anything has changed.
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
                true => tracing::info!("gateway {name} is able to carry egress IPs again"),
                false => tracing::info!("gateway {name} says that it is not able to carry egress IPs"),
            }
        }
        tell(name, &news, g.transports.current()) | learned | turned
    }
}

/// Logs what has changed. Whether anything has.
fn tell(name: &NodeName, news: &(Option<ProbeTransition>, bool), transport: u32) -> bool {
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
