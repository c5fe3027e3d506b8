//! Keeps this node marked as able to carry egress IPs until the agent can decide whether it is.

use egress_common::egress::deadline;
use egress_core::agent::heartbeat;
use egress_node::datapath::{
    Pins,
    maps::{Maps, MapsError},
    monotonic_ns,
};
use std::{future::Future, time::Duration};

/// Waits for `ready`, without which the agent can decide nothing. Meanwhile the programs keep the state that an earlier agent left. If that
/// agent marked this node as able to carry egress IPs and its deadline has not passed, extends the deadline.
pub async fn while_waiting<T>(pins: &Pins, length: Duration, ready: impl Future<Output = T>) -> Result<T, MapsError> {
    let mut maps = Maps::open(pins)?;
    let mut ready = std::pin::pin!(ready);
    loop {
        if let Some(until) = renewed(maps.deadline.get(deadline::ABLE)?, monotonic_ns(), length) {
            maps.deadline.set(&deadline::ABLE, &until)?;
        }
        tokio::select! {
            ready = &mut ready => return Ok(ready),
            () = tokio::time::sleep(length / heartbeat::OFTEN) => {}
        }
    }
}

/// Returns the deadline that replaces `until`, which an earlier agent set. Returns `None` if `until` has passed.
pub fn renewed(until: u64, now: u64, length: Duration) -> Option<u64> {
    (now < until).then(|| now + length.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expired_deadline_is_not_extended() {
        let second = Duration::from_secs(1);
        assert_eq!(renewed(11, 10, second), Some(1_000_000_010));
        assert_eq!(renewed(10, 10, second), None);
        assert_eq!(renewed(0, 10, second), None, "the earlier agent said that the node is not able");
    }
}
