//! Runs slow work in a thread or a task of its own: the agent's loop has deadlines, a table may hold a million flows, and an API server
//! may not answer.

use std::time::{Duration, Instant};
use tokio::task::{JoinHandle, spawn, spawn_blocking};

/// Work that is done sparingly pauses this many times as long as it took: it gets 2 % of a processor at most.
const REST: u32 = 50;
/// It pauses no longer than this: work that took long may have been stopped in the middle.
const REST_AT_MOST: Duration = Duration::from_secs(60);

/// One piece of work at a time.
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
    /// Whether something is under way.
    pub fn is_busy(&self) -> bool {
        self.running.is_some()
    }

    /// Begins, unless something is under way.
    pub fn begin(&mut self, work: impl FnOnce() -> T + Send + 'static) {
        self.running.get_or_insert_with(|| (spawn_blocking(work), Instant::now()));
    }

    /// Begins, unless something is under way or the last work took so long that it is too early for more.
    pub fn begin_sparingly(&mut self, work: impl FnOnce() -> T + Send + 'static) {
        if self.rest_until.is_none_or(|until| Instant::now() >= until) {
            self.begin(work);
        }
    }

    /// Begins asynchronous work, unless something is under way.
    pub fn begin_task(&mut self, work: impl Future<Output = T> + Send + 'static) {
        self.running.get_or_insert_with(|| (spawn(work), Instant::now()));
    }

    /// Waits for the work under way, forever if there is none. `None` if it has failed. Cancel safe.
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
    async fn the_loop_goes_on_during_long_work_and_gets_its_result() {
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
    async fn what_is_done_sparingly_takes_a_small_share_of_a_processor() {
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
