//! Failed writes that no node waits for, mainly statuses of users' objects. They are retried later and delay nothing else. Pure.

use super::pause;
use crate::store::{ObjectRef, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The delay before the first retry of such a write.
const RETRY: Duration = Duration::from_secs(5);
/// The longest delay, after many consecutive failures.
const RETRY_AT_MOST: Duration = Duration::from_secs(60);

/// The objects with failed writes, and when each is retried.
#[derive(Debug, Default)]
pub(super) struct Unwritten(BTreeMap<ObjectRef, Failures>);

/// The consecutive failures of one object's write.
#[derive(Debug)]
struct Failures {
    count: u32,
    /// The last error.
    last: String,
    retry: Duration,
}

impl Unwritten {
    /// Returns the objects whose retry is not due yet.
    pub(super) fn waiting(&self, now: Duration) -> BTreeSet<ObjectRef> {
        self.0.iter().filter(|(_, failures)| now < failures.retry).map(|(object, _)| object.clone()).collect()
    }

    /// Returns the time of the next retry.
    pub(super) fn next(&self) -> Option<Duration> {
        self.0.values().map(|failures| failures.retry).min()
    }

    /// Returns the number of objects.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// Forgets objects after a full round, which writes all differing objects except those in `waiting`, unless their writes failed.
    pub(super) fn tried(&mut self, waiting: &BTreeSet<ObjectRef>, errors: &[StoreError]) {
        let failed: BTreeSet<&ObjectRef> = errors.iter().map(StoreError::object).collect();
        self.0.retain(|object, _| waiting.contains(object) || failed.contains(object));
    }

    /// Records failed writes.
    pub(super) fn failed(&mut self, errors: &[StoreError], now: Duration) {
        for error in errors {
            let message = error.to_string();
            let before = self.0.remove(error.object());
            if before.as_ref().is_none_or(|before| before.last != message) {
                match error {
                    StoreError::Fenced(_) => tracing::debug!(%error, "the write will be retried"),
                    _ => tracing::warn!(%error, "the write will be retried; nothing else waits for it"),
                }
            }
            let count = before.map_or(0, |before| before.count) + 1;
            let retry = now + pause(RETRY, RETRY_AT_MOST, count);
            self.0.insert(error.object().clone(), Failures { count, last: message, retry });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Key, Kind};

    #[test]
    fn failed_writes_are_retried_with_backoff_until_they_succeed() {
        let object = |name| ObjectRef { kind: Kind::EgressPolicy, key: Key::namespaced("shop", name) };
        let error =
            |name| StoreError::Unavailable { object: object(name), message: "etcdserver: request is too large".into() };
        let (mut unwritten, seconds) = (Unwritten::default(), Duration::from_secs);
        let mut now = seconds(100);
        unwritten.failed(&[error("small")], now);
        for pause in [5, 10, 20, 40, 60, 60] {
            unwritten.failed(&[error("large")], now);
            let waiting = unwritten.waiting(now + seconds(pause) - Duration::from_millis(1));
            assert!(waiting.contains(&object("large")), "{pause}");
            now += seconds(pause);
            assert!(!unwritten.waiting(now).contains(&object("large")), "{pause}");
        }
        assert_eq!((unwritten.next(), unwritten.count()), (Some(seconds(105)), 2));
        unwritten.tried(&[object("small")].into(), &[]);
        assert_eq!(unwritten.count(), 1, "the large one was written, the small one was not tried");
        unwritten.tried(&BTreeSet::new(), &[error("small")]);
        assert_eq!(unwritten.count(), 1);
        unwritten.tried(&BTreeSet::new(), &[]);
        assert_eq!((unwritten.next(), unwritten.count()), (None, 0));
    }
}
