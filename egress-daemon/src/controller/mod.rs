//! The planner's shell: leads or stands by, reads the store, plans, and writes what the plan changes. May know the
//! store, the planner and the clock; knows neither the kernel nor the host.
//!
//! Level-triggered: each round starts from the objects as they are, so that a controller that takes over finishes what the
//! one before it left half done. Errors are reported and the round is retried; none ends the loop. Between two such rounds,
//! a few changed pods or reports are merged into the last round's plan (`partial`), with the same result.

mod apply;
mod drains;
mod events;
mod partial;
mod remarks;
mod run;
pub mod sight;
#[cfg(test)]
mod tests;
mod unwritten;

pub use events::Event;
pub(crate) use run::objects;
pub use run::{retry, run};

use crate::config::DRAIN_TIMEOUT;
use egress_core::{health::LeaseTimes, model::PolicyId};
use std::collections::BTreeMap;
use std::time::Duration;

/// How a controller behaves.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// Its identity among all controllers: a name that no other live process has.
    pub identity: String,
    /// How long the leadership stays with a controller that does not renew it.
    pub lease_duration: Duration,
    /// How often the leader renews it.
    pub renew_every: Duration,
    /// When gateways count as dead, and when the port blocks of nodes that are gone are given to others.
    pub gateways: LeaseTimes,
    /// How many floating egress IPs a node may own without an annotation.
    pub max_egress_ips: Option<u32>,
    /// For how long an egress IP that was taken out of its pool keeps its connections.
    pub drain_timeout: Duration,
}

impl ControllerConfig {
    /// The defaults, for a controller with this identity.
    pub fn new(identity: String) -> Self {
        ControllerConfig {
            identity,
            lease_duration: Duration::from_secs(2),
            renew_every: Duration::from_millis(500),
            gateways: LeaseTimes::default(),
            max_egress_ips: None,
            drain_timeout: DRAIN_TIMEOUT,
        }
    }
}

/// What a controller does, for metrics and health checks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControllerReport {
    /// The epoch of its leadership; absent while another one leads.
    pub epoch: Option<u64>,
    /// Rounds of planning so far.
    pub rounds: u64,
    /// Those of them that took in a few changes, without reading everything.
    pub partial: u64,
    /// Objects written so far.
    pub writes: u64,
    /// How long the last plan took to make.
    pub planning: Duration,
    /// What failed the last round.
    pub error: Option<String>,
    /// How many objects have an old status, because the new one cannot be written. That fails no round.
    pub unwritten: usize,
    /// How many pods each policy selects, by the plan; empty while another one leads.
    pub endpoints: BTreeMap<PolicyId, u32>,
}

/// How long to wait after that many failures in a row: `first` after one, twice as long after each further one, up to `longest`.
fn pause(first: Duration, longest: Duration, failures: u32) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1))).min(longest)
}
