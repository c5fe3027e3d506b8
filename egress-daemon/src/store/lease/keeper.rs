//! A task that runs a candidate for a lease on a store.

use super::elector::{Elector, LeaseAction, LeaseTerms};
use crate::store::Store;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use std::time::Instant;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// The state of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// It holds the lease.
    Held {
        /// The lease's epoch, which rises with each takeover.
        epoch: u64,
        /// The time until which it holds the lease without a renewal.
        until: Instant,
    },
    /// It does not hold it.
    NotHeld,
}

/// Holds a lease, or tries to acquire it, until this value is dropped (the lease then lapses) or released.
pub struct LeaseKeeper {
    state: watch::Receiver<LeaseState>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl LeaseKeeper {
    /// Starts a candidate on the current tokio runtime.
    pub fn start(store: Store, terms: LeaseTerms) -> Self {
        let (report, state) = watch::channel(LeaseState::NotHeld);
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(keep(store, terms, report, stopped));
        LeaseKeeper { state, stop: Some(stop), task }
    }

    /// Returns the epoch of the lease if it is held now, according to the clock instead of the task's last run.
    pub fn held(&self) -> Option<u64> {
        match *self.state.borrow() {
            LeaseState::Held { epoch, until } if Instant::now() < until => Some(epoch),
            _ => None,
        }
    }

    /// Returns the last report of the task.
    pub fn state(&self) -> LeaseState {
        self.state.borrow().clone()
    }

    /// Waits until the task reports a change: a renewal (with a later `until`), an acquisition or a loss. Cancel safe.
    pub async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Releases the lease, so that the next candidate gets it immediately, and ends the task.
    pub async fn release(mut self) {
        if let Some(stop) = self.stop.take() {
            // Without a receiver, the task has already ended.
            stop.send(()).ok();
        }
        if let Err(error) = (&mut self.task).await {
            tracing::warn!(%error, "the lease could not be released, so it will lapse");
        }
    }
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn keep(store: Store, terms: LeaseTerms, report: watch::Sender<LeaseState>, mut stopped: oneshot::Receiver<()>) {
    let start = Instant::now();
    let mut changes = store.changes();
    let mut elector = Elector::new(terms.clone());
    loop {
        let now = start.elapsed();
        elector.observe(now, store.get::<Lease>(&terms.key).as_deref());
        let decision = elector.decide(now, Timestamp::now());
        let write = async {
            match &decision.action {
                LeaseAction::Wait => None,
                LeaseAction::Create(lease) => Some(store.create(lease.as_ref()).await),
                LeaseAction::Replace(lease) => Some(store.replace(lease.as_ref()).await),
            }
        };
        // A write that takes longer may still succeed later. The store then shows the lease, but it does not count as held.
        // There is time for another write before the lease lapses.
        match tokio::time::timeout(terms.duration / 2, write).await {
            Ok(None) => {}
            Ok(Some(Ok(lease))) => elector.written(now, &lease),
            Ok(Some(Err(error))) => {
                elector.failed(start.elapsed());
                if !error.is_conflict() {
                    tracing::warn!(lease = %terms.key, %error, "the lease cannot be written");
                }
            }
            Err(_) => {
                elector.failed(start.elapsed());
                tracing::warn!(lease = %terms.key, "writing the lease took too long");
            }
        }
        let state = match (elector.holds(start.elapsed()), elector.until()) {
            (Some(epoch), Some(until)) => LeaseState::Held { epoch, until: start + until },
            _ => LeaseState::NotHeld,
        };
        report.send_if_modified(|last| {
            let changed = *last != state;
            *last = state.clone();
            changed
        });
        let mut wake = elector.decide(start.elapsed(), Timestamp::now()).wake;
        if let LeaseState::Held { until, .. } = state {
            wake = wake.min(until - start);
        }
        tokio::select! {
            () = changes.next() => {}
            () = tokio::time::sleep_until((start + wake).into()) => {}
            _ = &mut stopped => break,
        }
    }
    if let Some(lease) = elector.release() {
        report.send_replace(LeaseState::NotHeld);
        if let Err(error) = store.replace(lease.as_ref()).await {
            tracing::info!(lease = %terms.key, %error, "the lease could not be released, so it will lapse");
        }
    }
}
