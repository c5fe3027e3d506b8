//! Computes how long connections may continue after their egress IP has left its pool. The condition `Draining` stores the start of
//! each drain, so that a drain outlives a controller. Pure.

use egress_objects::api::EgressIP;
use egress_objects::snapshot::draining_since;
use k8s_openapi::jiff::Timestamp;
use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

/// Returns the remaining time of each draining egress IP; `None` if it is over.
fn left<'a, T: Borrow<EgressIP> + 'a>(
    egress_ips: impl IntoIterator<Item = &'a T>,
    timeout: Duration,
    now: Timestamp,
) -> impl Iterator<Item = (IpAddr, Option<Duration>)> {
    egress_ips.into_iter().filter_map(move |object| {
        let (object, address) = (object.borrow(), object.borrow().spec.address.parse().ok()?);
        // If the clock was set back, no time has passed.
        let passed = Duration::try_from(now.duration_since(draining_since(object)?)).unwrap_or_default();
        Some((address, timeout.checked_sub(passed).filter(|left| !left.is_zero())))
    })
}

/// Returns the egress IPs whose drain is over.
pub(super) fn over<'a, T: Borrow<EgressIP> + 'a>(
    egress_ips: impl IntoIterator<Item = &'a T>,
    timeout: Duration,
    now: Timestamp,
) -> BTreeSet<IpAddr> {
    left(egress_ips, timeout, now).filter(|(_, left)| left.is_none()).map(|(address, _)| address).collect()
}

/// Returns the time until the next drain is over.
pub(super) fn next<'a, T: Borrow<EgressIP> + 'a>(
    egress_ips: impl IntoIterator<Item = &'a T>,
    timeout: Duration,
    now: Timestamp,
) -> Option<Duration> {
    left(egress_ips, timeout, now).filter_map(|(_, left)| left).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn egress_ip(address: &str, conditions: serde_json::Value) -> EgressIP {
        serde_json::from_value(json!({
            "metadata": {"name": address},
            "spec": {"address": address},
            "status": {"conditions": conditions}
        }))
        .unwrap()
    }

    #[test]
    fn the_drain_timeout_counts_from_the_start_of_the_drain() {
        let condition = |kind: &str, status: &str, at: &str| {
            let at = format!("2026-01-01T00:{at}Z");
            json!([{"type": kind, "status": status, "lastTransitionTime": at, "reason": "Draining", "message": "m"}])
        };
        let all = [
            egress_ip("192.0.2.1", condition("Draining", "True", "00:00")),
            egress_ip("192.0.2.2", condition("Draining", "True", "10:00")),
            egress_ip("192.0.2.3", condition("Draining", "True", "50:00")),
            egress_ip("192.0.2.4", condition("Draining", "False", "00:00")),
            egress_ip("192.0.2.5", condition("Ready", "True", "00:00")),
        ];
        let (now, timeout) = ("2026-01-01T00:30:00Z".parse().unwrap(), Duration::from_secs(1800));
        assert_eq!(over(&all, timeout, now), [IpAddr::from([192, 0, 2, 1])].into());
        assert_eq!(next(&all, timeout, now), Some(Duration::from_secs(600)));
    }
}
