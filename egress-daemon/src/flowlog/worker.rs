//! A thread that serves a queue until all senders are gone.

use std::io;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

/// The thread and its queue. Dropping this closes the queue and waits for the thread to end.
#[derive(Debug)]
pub(super) struct Worker<T> {
    queue: Option<Sender<T>>,
    thread: Option<JoinHandle<()>>,
    /// Closed when the thread has finished.
    done: Mutex<Receiver<()>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts the thread with the receiving end of the queue.
    pub(super) fn start(name: &str, work: impl FnOnce(Receiver<T>) + Send + 'static) -> io::Result<Self> {
        let (queue, waiting) = channel();
        let (working, done) = channel();
        let thread = Builder::new().name(name.into()).spawn(move || {
            let _working = working;
            work(waiting);
        })?;
        Ok(Self { queue: Some(queue), thread: Some(thread), done: Mutex::new(done) })
    }

    /// Queues an item. Returns whether the thread still receives.
    pub(super) fn send(&self, thing: T) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.send(thing).is_ok())
    }
}

impl<T> Worker<T> {
    /// Closes the queue.
    pub(super) fn close(&mut self) {
        self.queue.take();
    }

    /// Waits for the thread to finish after [`Self::close`], at most until `end`, then detaches it.
    pub(super) fn leave(&mut self, end: Instant) {
        if let Ok(done) = self.done.get_mut() {
            done.recv_timeout(end.saturating_duration_since(Instant::now())).ok();
        }
        self.thread.take();
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread needs no handling here.
            thread.join().ok();
        }
    }
}
