//! The counterpart of `store::lease::LeaseKeeper`, which runs an elector with one write at a time.

use super::api::{Client, Object, Stored};
use egress_daemon::store::{
    Key,
    lease::{Elector, LEASE_NAMESPACE, LeaseAction, LeaseTerms},
};
use k8s_openapi::{api::coordination::v1::Lease, jiff::Timestamp};
use std::{sync::Arc, time::Duration};

pub struct Keeper {
    terms: LeaseTerms,
    elector: Elector,
    /// The time at which the pending write was begun.
    writing: Option<Duration>,
}

/// Returns the wall-clock time for a lease.
fn wall(now: Duration) -> Timestamp {
    Timestamp::from_microsecond(now.as_micros() as i64).unwrap()
}

impl Keeper {
    pub fn new(name: String, identity: String, duration: Duration, renew_every: Duration) -> Self {
        let terms = LeaseTerms { key: Key::namespaced(LEASE_NAMESPACE, &name), identity, duration, renew_every };
        Self { elector: Elector::new(terms.clone()), terms, writing: None }
    }

    /// Runs one turn. Returns the lease to write, if any, and the time of the next turn.
    pub fn turn(&mut self, now: Duration, client: &Client) -> (Option<Object>, Duration) {
        if let Some(began) = self.writing {
            if now < began + self.terms.duration / 2 {
                return (None, began + self.terms.duration / 2);
            }
            self.writing = None;
            self.elector.failed(now);
        }
        self.elector.observe(now, client.lease(&self.terms.key.name));
        let decision = self.elector.decide(now, wall(now));
        match decision.action {
            LeaseAction::Wait => (None, decision.wake),
            LeaseAction::Create(lease) | LeaseAction::Replace(lease) => {
                self.writing = Some(now);
                (Some(Object::Lease(Arc::new(*lease))), now + self.terms.duration / 2)
            }
        }
    }

    /// Handles the result of a write.
    pub fn wrote(&mut self, now: Duration, stored: Option<&Stored>) {
        let Some(began) = self.writing.take() else { return };
        match stored.map(|stored| &stored.object) {
            Some(Object::Lease(lease)) => self.elector.written(began, lease),
            _ => self.elector.failed(now),
        }
    }

    /// Returns the epoch of the lease if it is held.
    pub fn held(&self, now: Duration) -> Option<u64> {
        self.elector.holds(now)
    }

    /// Returns the time until which it is held.
    pub fn until(&self) -> Option<Duration> {
        self.elector.until()
    }

    /// Releases the lease. Returns the object to write, if any.
    pub fn release(mut self) -> Option<Object> {
        Some(Object::Lease(Arc::new(*self.elector.release()?)))
    }

    /// Returns whether `identity` holds a lease.
    pub fn is_holder(lease: &Lease, identity: &str) -> bool {
        lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()) == Some(identity)
    }
}
