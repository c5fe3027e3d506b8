//! Counts of this process's writes of objects, by result.

use super::{Kind, StoreError, Verb};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WriteResult {
    /// The write succeeded.
    Done,
    /// Another writer was faster; the write is retried.
    Conflict,
    /// This process no longer leads.
    Fenced,
    /// The object breaks rules of its kind.
    Refused,
    /// The storage of objects failed.
    Unavailable,
}

impl WriteResult {
    /// Returns its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            WriteResult::Done => "done",
            WriteResult::Conflict => "conflict",
            WriteResult::Fenced => "fenced",
            WriteResult::Refused => "refused",
            WriteResult::Unavailable => "unavailable",
        }
    }

    fn of<T>(result: &Result<T, StoreError>) -> Self {
        match result {
            Ok(_) => WriteResult::Done,
            Err(error) if error.is_conflict() => WriteResult::Conflict,
            Err(StoreError::Fenced(_)) => WriteResult::Fenced,
            Err(StoreError::Refused { .. }) => WriteResult::Refused,
            Err(_) => WriteResult::Unavailable,
        }
    }
}

/// Writes by the name of the kind, the verb and the result.
pub type Writes = BTreeMap<(&'static str, &'static str, WriteResult), u64>;

/// Counts of one store.
#[derive(Debug, Default)]
pub struct WriteCounts(Mutex<Writes>);

impl WriteCounts {
    pub(super) fn note<T>(&self, kind: Kind, verb: Verb, result: &Result<T, StoreError>) {
        let mut writes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *writes.entry((kind.name(), verb.name(), WriteResult::of(result))).or_default() += 1;
    }

    /// Returns all counts.
    pub fn all(&self) -> Writes {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
