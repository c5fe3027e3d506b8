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
    /// Is closed when the thread has done its work.
    done: Mutex<Receiver<()>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts the thread with the other end of the queue.
    pub(super) fn start(name: &str, work: impl FnOnce(Receiver<T>) + Send + 'static) -> io::Result<Self> {
        let (queue, waiting) = channel();
        let (working, done) = channel();
        let thread = Builder::new().name(name.into()).spawn(move || {
            let _working = working;
            work(waiting);
        })?;
        Ok(Self { queue: Some(queue), thread: Some(thread), done: Mutex::new(done) })
    }

    /// Queues a thing. Returns whether the thread is there to take it.
    pub(super) fn send(&self, thing: T) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.send(thing).is_ok())
    }
}

impl<T> Worker<T> {
    /// Closes the queue.
    pub(super) fn close(&mut self) {
        self.queue.take();
    }

    /// After [`Self::close`]: waits for the thread to end, but no longer than until `end`. Then it is left to itself.
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
            // A thread that panicked has nothing more to do.
            thread.join().ok();
        }
    }
}
