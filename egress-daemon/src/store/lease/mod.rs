//! Leases: who leads, and who is alive. `elector` decides without I/O or a clock of its own; `keeper` carries its
//! decisions out on a store.

mod elector;
mod keeper;
#[cfg(test)]
mod tests;

pub use elector::{Decision, Elector, LeaseAction, LeaseTerms};
pub use keeper::{LeaseKeeper, LeaseState};

use k8s_openapi::api::coordination::v1::Lease;
use std::time::Duration;

/// Namespace of the leases that Spillway writes.
pub const LEASE_NAMESPACE: &str = "spillway";
/// Name of the lease of the leading controller.
pub const CONTROLLER_LEASE: &str = "spillway-controller";

/// Start of the names of the leases by which gateways show that they are alive; the node's name follows.
pub const GATEWAY_LEASE_PREFIX: &str = "spillway-gateway-";

/// Name of the lease by which a gateway shows that it is alive.
pub fn gateway_lease(node: &str) -> String {
    format!("{GATEWAY_LEASE_PREFIX}{node}")
}

/// How long a lease lasts after a renewal, as its holder has written.
pub fn stated_duration(lease: &Lease) -> Option<Duration> {
    let seconds = lease.spec.as_ref()?.lease_duration_seconds?;
    u64::try_from(seconds).ok().map(Duration::from_secs)
}
