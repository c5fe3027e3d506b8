//! The planner's shell: leads or stands by, reads the store, plans, and writes the plan's changes. May depend on the store,
//! the planner and the clock, but not on the kernel or the host.
//!
//! Level-triggered: each round starts from the current objects, so that a new leader completes a predecessor's unfinished
//! writes. Errors are reported and the round is retried; none ends the loop. Between two such rounds, a few changed pods or
//! reports are merged into the last round's plan (`partial`), with the same result.

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

/// The settings of a controller.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// Its identity among all controllers: a name that no other live process has.
    pub identity: String,
    /// How long a controller keeps the leadership without renewing it.
    pub lease_duration: Duration,
    /// The interval at which the leader renews its lease.
    pub renew_every: Duration,
    /// The times after which gateways count as dead, and after which port blocks of absent nodes go to others.
    pub gateways: LeaseTimes,
    /// The most floating egress IPs that a node without an annotation may own.
    pub max_egress_ips: Option<u32>,
    /// How long an egress IP keeps its connections after it has left its pool.
    pub drain_timeout: Duration,
}

impl ControllerConfig {
    /// Returns the defaults for a controller with this identity.
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

/// A controller's state, for metrics and health checks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControllerReport {
    /// The epoch of its leadership; absent while another controller leads.
    pub epoch: Option<u64>,
    /// The number of rounds so far.
    pub rounds: u64,
    /// The number of those rounds that were partial, without reading everything.
    pub partial: u64,
    /// The number of writes so far.
    pub writes: u64,
    /// The duration of the last planning.
    pub planning: Duration,
    /// The error of the last round.
    pub error: Option<String>,
    /// The number of objects with an outdated status, because the new one cannot be written. This does not fail a round.
    pub unwritten: usize,
    /// The number of pods that each policy selects, by the plan; empty while another controller leads.
    pub endpoints: BTreeMap<PolicyId, u32>,
}

/// Returns the pause after this many consecutive failures: `first` after one, doubled after each further failure, up to `longest`.
fn pause(first: Duration, longest: Duration, failures: u32) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1))).min(longest)
}
