//! A thread that serves a queue until all senders are gone.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

/// The thread and its queue. Dropping this closes the queue and waits for the thread to end.
#[derive(Debug)]
pub(super) struct Worker<T> {
    queue: Option<Sender<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts the thread with the other end of the queue.
    pub(super) fn start(name: &str, work: impl FnOnce(Receiver<T>) + Send + 'static) -> io::Result<Self> {
        let (queue, waiting) = channel();
        let thread = Builder::new().name(name.into()).spawn(move || work(waiting))?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }

    /// Queues a thing. Returns whether the thread is there to take it.
    pub(super) fn send(&self, thing: T) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.send(thing).is_ok())
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.queue.take();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has nothing more to do.
            thread.join().ok();
        }
    }
}
