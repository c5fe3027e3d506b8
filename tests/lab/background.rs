//! Threads in network namespaces that run until their owner ends them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};

use crate::netns::NetNs;

/// Locks data that threads share, even after one of them has panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A flag that a thread polls to learn that it must end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Returns whether the thread must end.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Parks the calling thread for at most `duration`, or until its owner ends it. Returns whether the thread may continue.
    pub fn rest(&self, duration: Duration) -> bool {
        if !self.requested() {
            thread::park_timeout(duration);
        }
        !self.requested()
    }
}

/// A thread that ends when this is dropped. Its error is printed then, unless [`Background::finish`] or `wait` returned it.
#[derive(Debug)]
pub(crate) struct Background<T = ()> {
    stop: Stop,
    thread: Option<JoinHandle<Result<T>>>,
}

impl<T: Send + 'static> Background<T> {
    /// Starts `work` in the namespace `ns`, on a thread named `name`.
    pub fn start(
        ns: &NetNs,
        name: &str,
        work: impl FnOnce(&Stop) -> Result<T> + Send + 'static,
    ) -> Result<Background<T>> {
        let stop = Stop::default();
        let for_thread = stop.clone();
        let thread = Some(ns.spawn(name, move || work(&for_thread))?);
        Ok(Background { stop, thread })
    }
}

impl<T> Background<T> {
    /// Ends the thread and returns its result.
    pub fn finish(mut self) -> Result<T> {
        self.stop();
        self.join()
    }

    /// Waits until the thread ends by itself and returns its result.
    pub fn wait(mut self) -> Result<T> {
        self.join()
    }

    fn stop(&self) {
        self.stop.0.store(true, Ordering::Relaxed);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    fn join(&mut self) -> Result<T> {
        let thread = self.thread.take().context("the thread has already been joined")?;
        let name = thread.thread().name().unwrap_or_default().to_owned();
        thread.join().map_err(|_| anyhow!("the thread {name} panicked"))?
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        self.stop();
        let Some(thread) = &self.thread else { return };
        let name = thread.thread().name().unwrap_or_default().to_owned();
        if let Err(error) = self.join() {
            eprintln!("lab: {name} ended with: {error:#}");
        }
    }
}
