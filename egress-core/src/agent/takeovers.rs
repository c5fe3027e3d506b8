//! Takeovers of egress IPs whose carrier has died, and how long they take. Pure; times are since the agent's start.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

/// The upper bounds of the ranges in which lengths are counted, in milliseconds.
pub const BOUNDS_MS: [u64; 10] = [100, 200, 300, 400, 500, 750, 1_000, 2_000, 5_000, 15_000];

/// How long takeovers took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths {
    /// How many takeovers were in each range of [`BOUNDS_MS`], and above the last one.
    pub counts: [u64; BOUNDS_MS.len() + 1],
    /// The sum of all lengths.
    pub sum: Duration,
}

impl Lengths {
    fn note(&mut self, length: Duration) {
        let range = BOUNDS_MS.iter().position(|bound| length <= Duration::from_millis(*bound));
        self.counts[range.unwrap_or(BOUNDS_MS.len())] += 1;
        self.sum += length;
    }
}

/// The takeovers of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakeOvers {
    /// Egress IPs that this node has decided to answer for, and when their carrier was last heard of.
    under_way: BTreeMap<IpAddr, Duration>,
    lengths: Lengths,
}

impl TakeOvers {
    /// Notes that this node is to answer for an egress IP whose carrier is dead and was last `heard` of at that time.
    pub fn begin(&mut self, egress_ip: IpAddr, heard: Duration) {
        self.under_way.entry(egress_ip).or_insert(heard);
    }

    /// Drops the takeovers of egress IPs that are no longer `answered` for.
    pub fn retain(&mut self, answered: impl Fn(IpAddr) -> bool) {
        self.under_way.retain(|egress_ip, _| answered(*egress_ip));
    }

    /// Notes that the tables are written: this node answers.
    pub fn written(&mut self, now: Duration) {
        for heard in std::mem::take(&mut self.under_way).into_values() {
            self.lengths.note(now.saturating_sub(heard));
        }
    }

    /// Returns how long the takeovers took.
    pub fn lengths(&self) -> Lengths {
        self.lengths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn takeover_lasts_from_the_last_answer_to_the_write_of_the_tables() {
        let ips = [1, 2, 3].map(|n| IpAddr::from([192, 0, 2, n]));
        let mut takeovers = TakeOvers::default();
        takeovers.begin(ips[0], ms(1_000));
        takeovers.begin(ips[1], ms(900));
        takeovers.begin(ips[2], ms(1_000));
        // A later round, after a failed write of the tables, restarts nothing.
        takeovers.begin(ips[0], ms(1_100));
        takeovers.retain(|ip| ip != ips[2]);
        takeovers.written(ms(1_300));
        takeovers.written(ms(9_000));
        let lengths = takeovers.lengths();
        assert_eq!(lengths.sum, ms(300 + 400));
        assert_eq!(lengths.counts, [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn takeover_longer_than_all_bounds_is_counted() {
        let mut takeovers = TakeOvers::default();
        takeovers.begin([192, 0, 2, 1].into(), ms(0));
        takeovers.written(ms(60_000));
        assert_eq!(takeovers.lengths().counts[BOUNDS_MS.len()], 1);
    }
}
