//! Probing the gateways that this node uses.

use crate::{
    health::{ProbeState, ProbeTimes, ProbeTracker},
    host::probe::{ProbeReply, ProbeSocket},
    model::NodeName,
};
use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

struct Gateway {
    address: IpAddr,
    number: u32,
    tracker: ProbeTracker,
}

/// The gateways that are probed, and what is known of them.
pub struct Gateways {
    times: ProbeTimes,
    start: Instant,
    gateways: BTreeMap<NodeName, Gateway>,
    next_number: u32,
    seq: u64,
    due: Duration,
}

impl Gateways {
    /// Nobody to probe yet.
    pub fn new(times: ProbeTimes, start: Instant) -> Self {
        Self { times, start, gateways: BTreeMap::new(), next_number: 1, seq: 0, due: Duration::ZERO }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Probes these nodes from now on, and no others. What is known of a node whose address stays is kept.
    pub fn set(&mut self, wanted: &BTreeMap<NodeName, IpAddr>) {
        self.gateways.retain(|name, g| wanted.get(name) == Some(&g.address));
        for (name, address) in wanted {
            if !self.gateways.contains_key(name) {
                let tracker = ProbeTracker::new(self.times);
                let gateway = Gateway { address: *address, number: self.next_number, tracker };
                self.gateways.insert(name.clone(), gateway);
                self.next_number += 1;
            }
        }
    }

    /// What the probes say of each gateway.
    pub fn states(&self) -> BTreeMap<NodeName, ProbeState> {
        self.gateways.iter().map(|(n, g)| (n.clone(), g.tracker.state())).collect()
    }

    /// The last round trip of each gateway.
    pub fn round_trips(&self) -> BTreeMap<NodeName, Option<Duration>> {
        self.gateways.iter().map(|(n, g)| (n.clone(), g.tracker.round_trip())).collect()
    }

    /// Where a gateway is probed.
    pub fn address(&self, name: &NodeName) -> Option<IpAddr> {
        self.gateways.get(name).map(|g| g.address)
    }

    /// When [`tick`](Self::tick) wants to be called next.
    pub fn next(&self) -> Instant {
        self.start + self.due
    }

    /// Sends what is due and counts what was missed. Whether a state has changed.
    pub fn tick(&mut self, socket: &ProbeSocket) -> bool {
        let now = self.now();
        let mut changed = false;
        let send = now >= self.due;
        for (name, g) in &mut self.gateways {
            if let Some(transition) = g.tracker.poll(now) {
                tracing::warn!("gateway {name} is {transition:?}: it does not answer probes");
                changed = true;
            }
            if send {
                self.seq += 1;
                // A probe that cannot be sent is a probe that is not answered.
                g.tracker.on_sent(self.seq, now);
                if let Err(e) = socket.send(g.address, g.number, self.seq) {
                    tracing::debug!("probe to {name} ({}): {e}", g.address);
                }
            }
        }
        if send {
            self.due = now + self.times.interval;
        }
        changed
    }

    /// Takes a reply. Whether a state has changed.
    pub fn reply(&mut self, reply: &ProbeReply) -> bool {
        let now = reply.received.saturating_duration_since(self.start);
        let Some((name, g)) = self.gateways.iter_mut().find(|(_, g)| g.number == reply.node_id) else { return false };
        let transition = g.tracker.on_reply(reply.seq, now);
        if let Some(t) = transition {
            tracing::info!("gateway {name} is {t:?}");
        }
        transition.is_some()
    }
}
