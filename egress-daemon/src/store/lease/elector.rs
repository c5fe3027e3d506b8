//! One candidate for a lease, without I/O: the versions of the lease that it has seen, with times, and its next action.
//!
//! Invariant: at any time, at most one candidate holds the lease, whatever the delays, as long as identities differ, the rates of clocks
//! differ by less than a tenth ([`terms::counted`]), and the lease is not deleted. A holder counts its time from before its write, the
//! others from when they saw the write; and a lease that has changed since then cannot be taken over. The times in the lease are only
//! informational: they are never compared with another machine's clock.

use super::stated_duration;
use crate::store::Key;
use egress_core::health::terms;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use std::time::Duration;

/// The terms of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// Namespace and name of the lease.
    pub key: Key,
    /// The identity of the candidate. A candidate that finds the lease held by its own identity immediately continues to hold it, so two
    /// live processes must not share an identity.
    pub identity: String,
    /// The time for which a lease that is not renewed stays with its holder. Rounded up to whole seconds in the lease.
    pub duration: Duration,
    /// The interval at which the holder renews it.
    pub renew_every: Duration,
}

/// The action to take now.
#[derive(Clone, Debug, PartialEq)]
pub enum LeaseAction {
    /// Nothing.
    Wait,
    /// Create this lease.
    Create(Box<Lease>),
    /// Replace the lease with this lease, which has the observed resourceVersion.
    Replace(Box<Lease>),
}

/// The action to take now, and the latest time for the next decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The action to take now.
    pub action: LeaseAction,
    /// The time for the next decision, if the lease does not change before then. On the same clock as `now`.
    pub wake: Duration,
}

/// A candidate. `now` is always a time on a monotonic clock of this machine, since an arbitrary start.
#[derive(Clone, Debug)]
pub struct Elector {
    terms: LeaseTerms,
    seen: Seen,
    held: Option<Held>,
    /// The time before which no write is attempted, after a failed write.
    pause_until: Duration,
}

#[derive(Clone, Debug)]
enum Seen {
    /// The lease does not exist. It may be created from this time on.
    Absent { free: Duration },
    /// This version was first seen at `since`.
    Present { lease: Box<Lease>, since: Duration },
}

#[derive(Clone, Copy, Debug)]
struct Held {
    epoch: u64,
    renewed: Duration,
    until: Duration,
}

impl Elector {
    /// Creates a candidate that has seen nothing.
    pub fn new(terms: LeaseTerms) -> Self {
        Elector { terms, seen: Seen::Absent { free: Duration::ZERO }, held: None, pause_until: Duration::ZERO }
    }

    /// Takes in the lease that the store now shows.
    pub fn observe(&mut self, now: Duration, lease: Option<&Lease>) {
        match (&self.seen, lease) {
            (Seen::Absent { .. }, None) => {}
            (Seen::Present { lease: last, .. }, None) => {
                // The holder may not have noticed yet that the lease is gone.
                let other = holder(last).is_some_and(|holder| *holder != self.terms.identity);
                self.seen = Seen::Absent { free: if other { now + self.duration_of(last) } else { now } };
            }
            (Seen::Present { lease: last, .. }, Some(lease))
                if last.metadata.resource_version == lease.metadata.resource_version => {}
            (_, Some(lease)) => self.seen = Seen::Present { lease: Box::new(lease.clone()), since: now },
        }
        if lease.is_some_and(|lease| holder(lease) != Some(&self.terms.identity)) {
            self.held = None;
        }
    }

    /// Returns the action to take now. `wall` is the time to write into the lease.
    pub fn decide(&self, now: Duration, wall: Timestamp) -> Decision {
        let due = match &self.seen {
            Seen::Absent { free } => *free,
            Seen::Present { lease, since } => match holder(lease) {
                None => now,
                Some(holder) if *holder == self.terms.identity => {
                    self.held.map_or(now, |held| held.renewed + self.terms.renew_every)
                }
                Some(_) => *since + self.duration_of(lease),
            },
        }
        .max(self.pause_until);
        if now < due {
            return Decision { action: LeaseAction::Wait, wake: due };
        }
        let action = match &self.seen {
            Seen::Absent { .. } => LeaseAction::Create(Box::new(self.claim(None, wall))),
            Seen::Present { lease, .. } => LeaseAction::Replace(Box::new(self.claim(Some(lease), wall))),
        };
        Decision { action, wake: now + self.terms.renew_every }
    }

    /// Records that a write of `decide` succeeded. `started` is the time before it was sent, `lease` the stored lease.
    pub fn written(&mut self, started: Duration, lease: &Lease) {
        self.held = (holder(lease) == Some(&self.terms.identity)).then(|| Held {
            epoch: epoch(lease),
            renewed: started,
            until: started + terms::counted(self.terms.duration),
        });
        // The lease existed at the latest when the answer arrived. Counting from an earlier time is safe only for the holder itself.
        self.seen = Seen::Present { lease: Box::new(lease.clone()), since: started };
    }

    /// Records that a write of `decide` failed, or that its result is unknown.
    pub fn failed(&mut self, now: Duration) {
        self.pause_until = now + self.terms.renew_every / 4;
    }

    /// Returns the epoch of the lease, if this candidate holds it now.
    pub fn holds(&self, now: Duration) -> Option<u64> {
        self.held.filter(|held| now < held.until).map(|held| held.epoch)
    }

    /// Returns the time until which this candidate holds the lease without a renewal.
    pub fn until(&self) -> Option<Duration> {
        self.held.map(|held| held.until)
    }

    /// Stops holding immediately. Returns the lease to write, so that the next holder need not wait.
    pub fn release(&mut self) -> Option<Box<Lease>> {
        self.held.take()?;
        match &self.seen {
            Seen::Present { lease, .. } if holder(lease) == Some(&self.terms.identity) => {
                let mut lease = lease.clone();
                lease.spec.get_or_insert_default().holder_identity = None;
                Some(lease)
            }
            _ => None,
        }
    }

    fn duration_of(&self, lease: &Lease) -> Duration {
        stated_duration(lease).unwrap_or(self.terms.duration)
    }

    /// Returns the lease that this candidate would write.
    fn claim(&self, last: Option<&Lease>, wall: Timestamp) -> Lease {
        let mut lease = last.cloned().unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                namespace: Some(self.terms.key.namespace.clone()),
                name: Some(self.terms.key.name.clone()),
                ..Default::default()
            },
            spec: None,
        });
        let continues = holder(&lease) == Some(&self.terms.identity);
        let spec: &mut LeaseSpec = lease.spec.get_or_insert_default();
        if !continues {
            spec.holder_identity = Some(self.terms.identity.clone());
            spec.acquire_time = Some(MicroTime(wall));
            spec.lease_transitions = Some(if last.is_some() { spec.lease_transitions.unwrap_or(0) + 1 } else { 1 });
        }
        spec.renew_time = Some(MicroTime(wall));
        let seconds = self.terms.duration.as_secs() + u64::from(self.terms.duration.subsec_nanos() > 0);
        spec.lease_duration_seconds = Some(i32::try_from(seconds).unwrap_or(i32::MAX));
        lease
    }
}

fn holder(lease: &Lease) -> Option<&String> {
    lease.spec.as_ref()?.holder_identity.as_ref().filter(|holder| !holder.is_empty())
}

/// Returns the epoch of a lease, which rises with each takeover.
fn epoch(lease: &Lease) -> u64 {
    let transitions = lease.spec.as_ref().and_then(|spec| spec.lease_transitions);
    transitions.and_then(|transitions| u64::try_from(transitions).ok()).unwrap_or(0)
}
