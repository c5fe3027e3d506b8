//! Runs slow work in a separate thread or task. The agent's loop has deadlines, but a table may hold a million flows, and an API server may
//! not answer.

use std::time::{Duration, Instant};
use tokio::task::{JoinHandle, spawn, spawn_blocking};

/// Sparing work pauses for this many times its duration, so that it uses at most 2 % of a processor.
const REST: u32 = 50;
/// The longest such pause. Work that took long may have been suspended in the middle.
const REST_AT_MOST: Duration = Duration::from_secs(60);

/// A background worker that runs one piece of work at a time.
#[derive(Debug)]
pub struct Aside<T> {
    running: Option<(JoinHandle<T>, Instant)>,
    rest_until: Option<Instant>,
}

impl<T> Default for Aside<T> {
    fn default() -> Self {
        Self { running: None, rest_until: None }
    }
}

impl<T: Send + 'static> Aside<T> {
    /// Returns whether work is in progress.
    pub fn is_busy(&self) -> bool {
        self.running.is_some()
    }

    /// Starts `work` in a thread unless work is in progress.
    pub fn begin(&mut self, work: impl FnOnce() -> T + Send + 'static) {
        self.running.get_or_insert_with(|| (spawn_blocking(work), Instant::now()));
    }

    /// Starts `work` in a thread unless work is in progress or the pause after the last work has not passed.
    pub fn begin_sparingly(&mut self, work: impl FnOnce() -> T + Send + 'static) {
        if self.rest_until.is_none_or(|until| Instant::now() >= until) {
            self.begin(work);
        }
    }

    /// Starts asynchronous work unless work is in progress.
    pub fn begin_task(&mut self, work: impl Future<Output = T> + Send + 'static) {
        self.running.get_or_insert_with(|| (spawn(work), Instant::now()));
    }

    /// Waits for the work in progress, or forever if there is none. Returns `None` if the work has failed. Cancel safe.
    pub async fn done(&mut self) -> Option<T> {
        if let Some((task, began)) = &mut self.running {
            let done = task.await;
            self.rest_until = Some(Instant::now() + began.elapsed().saturating_mul(REST).min(REST_AT_MOST));
            self.running = None;
            return done.inspect_err(|error| tracing::error!("a thread of the agent has failed: {error}")).ok();
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use std::sync::mpsc;

    #[tokio::test]
    async fn loop_continues_during_long_work_and_receives_its_result() {
        let mut aside = Aside::default();
        assert!(aside.done().now_or_never().is_none(), "nothing was begun");
        let (go, wait) = mpsc::channel::<u32>();
        aside.begin(move || wait.recv().unwrap());
        aside.begin(|| unreachable!("one at a time"));
        for _ in 0..100 {
            assert!(aside.done().now_or_never().is_none() && aside.is_busy());
        }
        go.send(7).unwrap();
        assert_eq!(aside.done().await, Some(7));
        assert!(!aside.is_busy());
    }

    #[tokio::test]
    async fn sparing_work_uses_a_small_share_of_a_processor() {
        const WORK: Duration = Duration::from_millis(2);
        let work = || {
            let began = Instant::now();
            while began.elapsed() < WORK {}
        };
        let (mut aside, began) = (Aside::default(), Instant::now());
        aside.begin_sparingly(work);
        assert!(aside.is_busy(), "nothing was done before");
        aside.done().await.unwrap();
        while !aside.is_busy() {
            aside.begin_sparingly(work);
        }
        assert!(began.elapsed() >= WORK * (REST + 1));
    }
}
