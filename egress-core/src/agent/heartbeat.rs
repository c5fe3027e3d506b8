//! Decides when an agent tells the programs that it is alive, and when it must not speak for its node. Times are since its start. Pure.

use std::time::Duration;

/// How many heartbeats an agent sends in the time for which the programs trust one heartbeat.
pub const OFTEN: u32 = 8;
/// How long an agent that was stopped reads what has happened before it announces anything.
const SILENT_AFTER_STOP: Duration = Duration::from_secs(1);

/// The times of an agent's heartbeats.
#[derive(Clone, Copy, Debug)]
pub struct Heartbeats {
    length: Duration,
    next: Duration,
    silent_until: Duration,
}

impl Heartbeats {
    /// Creates the heartbeats of an agent that begins to send them now; the programs trust each for `length`.
    pub fn new(length: Duration, now: Duration) -> Self {
        Self { length, next: now, silent_until: now }
    }

    /// Returns whether a heartbeat is due. If the agent was stopped for so long that its last heartbeat has expired, the node may have lost
    /// its egress IPs: the agent reads what has happened before it claims any.
    pub fn look(&mut self, now: Duration) -> bool {
        if now >= self.next + self.length {
            self.silent_until = now + SILENT_AFTER_STOP;
            self.next = self.silent_until;
        }
        now >= self.next
    }

    /// Records that a heartbeat was sent.
    pub fn sent(&mut self, now: Duration) {
        self.next = now + self.length / OFTEN;
    }

    /// Returns whether egress IPs may be announced.
    pub fn may_announce(&self, now: Duration) -> bool {
        now >= self.silent_until
    }

    /// Returns when the next heartbeat is due.
    pub fn next(&self) -> Duration {
        self.next
    }

    /// Returns the time until which nothing is announced.
    pub fn silent_until(&self) -> Duration {
        self.silent_until
    }
}
