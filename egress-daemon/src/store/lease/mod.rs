//! Leases of the leader and of live gateways. `elector` decides without I/O or a clock of its own; `keeper` carries out its decisions on
//! a store.

mod elector;
mod keeper;
#[cfg(test)]
mod tests;

pub use elector::{Decision, Elector, LeaseAction, LeaseTerms};
pub use keeper::{LeaseKeeper, LeaseState};

use k8s_openapi::api::coordination::v1::Lease;
use std::time::Duration;

/// The namespace of Spillway's leases.
pub const LEASE_NAMESPACE: &str = "spillway";
/// The name of the leading controller's lease.
pub const CONTROLLER_LEASE: &str = "spillway-controller";

/// The prefix of the names of leases by which gateways show that they are alive. The node's name follows.
pub const GATEWAY_LEASE_PREFIX: &str = "spillway-gateway-";

/// Returns the name of the lease by which a gateway shows that it is alive.
pub fn gateway_lease(node: &str) -> String {
    format!("{GATEWAY_LEASE_PREFIX}{node}")
}

/// Returns the duration of a lease after a renewal, as its holder has written it.
pub fn stated_duration(lease: &Lease) -> Option<Duration> {
    let seconds = lease.spec.as_ref()?.lease_duration_seconds?;
    u64::try_from(seconds).ok().map(Duration::from_secs)
}
