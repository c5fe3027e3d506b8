//! One candidate for a lease, without I/O: what it has seen of the lease and when, and what to do next.
//!
//! Invariant: at any time at most one candidate holds the lease, whatever the delays, as long as identities differ,
//! clocks run at rates that differ by less than a tenth ([`terms::counted`]), and nobody deletes the lease. A holder counts its time from
//! before it wrote, the others from when they saw the write; and a lease that has changed since cannot be taken over.
//! The times written into the lease are only informational: they are never compared with another machine's clock.

use super::stated_duration;
use crate::store::Key;
use egress_core::health::terms;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use std::time::Duration;

/// What a candidate wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseTerms {
    /// Namespace and name of the lease.
    pub key: Key,
    /// Who the candidate is. A candidate that finds the lease held by its own identity continues with it at once: no
    /// two live processes may share one.
    pub identity: String,
    /// How long a lease that is not renewed stays with its holder. Written rounded up to whole seconds.
    pub duration: Duration,
    /// How often the holder renews it.
    pub renew_every: Duration,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq)]
pub enum LeaseAction {
    /// Nothing.
    Wait,
    /// Create this lease.
    Create(Box<Lease>),
    /// Replace the lease by this one, whose resourceVersion is the one that was observed.
    Replace(Box<Lease>),
}

/// What to do now, and when to ask again at the latest.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What to do now.
    pub action: LeaseAction,
    /// When to ask again, if the lease does not change before: on the clock that `now` is on.
    pub wake: Duration,
}

/// A candidate. `now` is always a monotonic clock of this machine, since any start.
#[derive(Clone, Debug)]
pub struct Elector {
    terms: LeaseTerms,
    seen: Seen,
    held: Option<Held>,
    /// No write before this time, after one that failed.
    pause_until: Duration,
}

#[derive(Clone, Debug)]
enum Seen {
    /// The lease does not exist, and may be created from this time on.
    Absent { free: Duration },
    /// This version has been seen since then.
    Present { lease: Box<Lease>, since: Duration },
}

#[derive(Clone, Copy, Debug)]
struct Held {
    epoch: u64,
    renewed: Duration,
    until: Duration,
}

impl Elector {
    /// A candidate that has seen nothing.
    pub fn new(terms: LeaseTerms) -> Self {
        Elector { terms, seen: Seen::Absent { free: Duration::ZERO }, held: None, pause_until: Duration::ZERO }
    }

    /// Takes in what the store now shows.
    pub fn observe(&mut self, now: Duration, lease: Option<&Lease>) {
        match (&self.seen, lease) {
            (Seen::Absent { .. }, None) => {}
            (Seen::Present { lease: last, .. }, None) => {
                // Its holder may not have noticed yet that it is gone.
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

    /// What to do now. `wall` is the time written into the lease.
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

    /// A write that `decide` asked for succeeded. `started` is the time before it was sent, `lease` what is stored now.
    pub fn written(&mut self, started: Duration, lease: &Lease) {
        self.held = (holder(lease) == Some(&self.terms.identity)).then(|| Held {
            epoch: epoch(lease),
            renewed: started,
            until: started + terms::counted(self.terms.duration),
        });
        // It existed at the latest when the answer came. Counting from an earlier time is safe only for the holder
        // itself.
        self.seen = Seen::Present { lease: Box::new(lease.clone()), since: started };
    }

    /// A write that `decide` asked for failed, or nobody knows whether it did.
    pub fn failed(&mut self, now: Duration) {
        self.pause_until = now + self.terms.renew_every / 4;
    }

    /// The epoch of the lease if this candidate holds it now.
    pub fn holds(&self, now: Duration) -> Option<u64> {
        self.held.filter(|held| now < held.until).map(|held| held.epoch)
    }

    /// Until when this candidate holds the lease if it is not renewed.
    pub fn until(&self) -> Option<Duration> {
        self.held.map(|held| held.until)
    }

    /// Who holds the lease, if known; this may be out of date.
    pub fn holder(&self) -> Option<&str> {
        match &self.seen {
            Seen::Present { lease, .. } => holder(lease).map(String::as_str),
            Seen::Absent { .. } => None,
        }
    }

    /// Stops holding at once; returns what to replace the lease with, so that the next holder need not wait.
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

    /// The lease as this candidate wants it.
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

/// The epoch of a lease: higher with each holder that took it over.
fn epoch(lease: &Lease) -> u64 {
    let transitions = lease.spec.as_ref().and_then(|spec| spec.lease_transitions);
    transitions.and_then(|transitions| u64::try_from(transitions).ok()).unwrap_or(0)
}
