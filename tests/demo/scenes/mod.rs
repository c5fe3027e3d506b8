//! The scenes of the demo, in the order in which they are shown. Each announces an event, causes it, and claims what must have been seen.

mod change;
mod controller;
mod endpoints;
pub mod gateway;
pub mod questions;
pub mod spread;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::wait_until;

use super::cluster::Show;

/// A scene.
pub type Scene = fn(&mut Show) -> Result<()>;

/// The scenes of `--quick`.
pub const QUICK: [Scene; 3] = [spread::show, endpoints::show, gateway::dies];
/// The scenes that follow otherwise.
pub const REST: [Scene; 4] = [gateway::returns, change::show, controller::show, questions::show];

/// The policy of the pods `web-..`.
const WEB: &str = "web";
/// The policy of the pods `ledger-..`.
const LEDGER: &str = "ledger";
const PATIENCE: Duration = Duration::from_secs(30);

/// Formats a time in seconds for human readers.
pub fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}

/// Returns the current gateway of each egress IP of a policy, or `-` if it has none.
fn carriers(show: &Show, policy: &str) -> Result<BTreeMap<IpAddr, String>> {
    let ips = show.lab.manifests().egress_ips()?.into_iter();
    let ips = ips.filter(|one| one.policies.iter().any(|user| user == policy));
    Ok(ips.map(|one| (one.address, one.node.unwrap_or_else(|| "-".to_owned()))).collect())
}

/// Waits until the gateways of a policy's egress IPs satisfy `good`, and returns them.
fn wait_carriers(
    show: &Show,
    policy: &str,
    what: &str,
    good: impl Fn(&BTreeMap<IpAddr, String>) -> bool,
) -> Result<BTreeMap<IpAddr, String>> {
    show.screen.wait(what, || wait_until(what, PATIENCE, || carriers(show, policy), |all| !all.is_empty() && good(all)))
}

/// Returns the addresses of a policy.
fn addresses(show: &Show, policy: &str) -> Result<Vec<IpAddr>> {
    carriers(show, policy).map(|all| all.into_keys().collect()).context("the egress IPs")
}
