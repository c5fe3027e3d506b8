//! Whether this node is able to carry egress IPs, and telling the programs so: they answer ARP and NDP, and tell it to who probes.

use super::Agent;
use crate::{
    datapath::{
        Pins,
        maps::{Maps, MapsError},
        monotonic_ns,
        write::Writer,
    },
    store::lease::{LeaseKeeper, LeaseState},
};
use egress_common::{
    egress::{deadline, flags},
    net,
    verdict::Counter,
};
use egress_core::agent::{pulse, reach::LeaseWord};
use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    net::IpAddr,
    time::{Duration, Instant},
};

/// After how many intervals of probes every node knows that this one does not answer any more, and the next carrier has announced itself.
const NOTICE: u32 = 10;

impl Agent {
    /// Tells the programs until when this node is able to carry egress IPs, if it is.
    pub(super) fn sign_of_life(&mut self) {
        self.pulse.said(self.start.elapsed());
        let until = if self.able { monotonic_ns() + self.settings.deadline.as_nanos() as u64 } else { 0 };
        let held = match self.lease.as_ref().map(LeaseKeeper::state) {
            Some(LeaseState::Held { until, .. }) => until.saturating_duration_since(Instant::now()),
            _ => Duration::ZERO,
        };
        let lease = if held.is_zero() { 0 } else { monotonic_ns() + held.as_nanos() as u64 };
        if let Err(e) = self.writer.set_deadline(until).and_then(|()| self.writer.set_lease(lease)) {
            tracing::error!("the datapath will stop answering for egress IPs: {e}");
        }
    }

    /// Whether it has changed whether anybody reaches this node as a gateway.
    pub(super) fn check_reach(&mut self) -> bool {
        let asked = match self.maps.counter(Counter::ProbeAnswered) {
            Ok(asked) => asked,
            Err(e) => {
                tracing::warn!("{e}");
                return false;
            }
        };
        let now = self.start.elapsed();
        let lease = LeaseWord {
            wanted: self.world.is_named(&self.node),
            held: self.lease_held,
            duration: self.settings.lease_duration,
        };
        let changed = self.reach.update(&self.gateways.states(), asked, now)
            | self.reach.compare(lease, &self.gateways.holding(), now);
        if changed && let Some(why) = self.reach.why_not() {
            tracing::warn!("this node answers for no egress IP: {why}");
        }
        changed
    }

    /// Lets the other carriers take over where they can, and returns once everybody sends to them: the node may go next, and nothing is lost.
    pub(super) async fn hand_over(&mut self) {
        let (carriers, plan) = (&self.carriers, &self.world.plan);
        let replaceable = carriers.are_replaceable(&self.node, plan, &self.gateways.states());
        if !self.able || !self.world.is_named(&self.node) || !replaceable {
            return;
        }
        self.able = false;
        self.sign_of_life();
        if let Err(e) = self.advertised.set(&self.netlink.handle, &BTreeSet::new()).await {
            tracing::error!("{e}");
        }
        tokio::time::sleep(self.settings.probe.interval * NOTICE).await;
    }
}

/// The egress IPs that an earlier agent left the kernel forwarding for, and whether it answers for them.
pub(super) fn carried(writer: &Writer) -> BTreeMap<IpAddr, bool> {
    let carried = writer.present().egress_ips.values().filter(|e| e.flags & flags::CARRIED != 0);
    let answers = |flags: u32| flags & (flags::SILENT | flags::NODE_ADDRESS) == 0;
    carried.map(|e| (net::from_any(e.addr), answers(e.flags))).collect()
}

/// Waits for what an agent needs before it can decide anything. Meanwhile the programs go on as an earlier agent left them: if that one said
/// that this node is able to carry egress IPs, and its word still counts, it is said again.
pub async fn while_waiting<T>(pins: &Pins, length: Duration, ready: impl Future<Output = T>) -> Result<T, MapsError> {
    let mut maps = Maps::open(pins)?;
    let mut ready = std::pin::pin!(ready);
    loop {
        if let Some(until) = renewed(maps.deadline.get(deadline::ABLE)?, monotonic_ns(), length) {
            maps.deadline.set(&deadline::ABLE, &until)?;
        }
        tokio::select! {
            ready = &mut ready => return Ok(ready),
            () = tokio::time::sleep(length / pulse::OFTEN) => {}
        }
    }
}

/// The deadline that follows `until`, which an agent has set; none if it has passed.
pub(super) fn renewed(until: u64, now: u64, length: Duration) -> Option<u64> {
    (now < until).then(|| now + length.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_that_has_passed_stays_so() {
        let second = Duration::from_secs(1);
        assert_eq!(renewed(11, 10, second), Some(1_000_000_010));
        assert_eq!(renewed(10, 10, second), None);
        assert_eq!(renewed(0, 10, second), None, "the earlier agent said that the node is not able");
    }
}
