//! Decides when to announce which address: immediately, then about a second apart for five seconds, since neighbours may miss frames or
//! still be learning where the port is. Pure; the time is an argument, counted from any fixed moment.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

/// The time between two announcements.
pub const INTERVAL: Duration = Duration::from_secs(1);
/// The time from the first to the last announcement.
pub const LASTING: Duration = Duration::from_secs(5);

/// The announcements that are still to be made.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    entries: BTreeMap<IpAddr, Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    next: Duration,
    last: Duration,
}

impl Schedule {
    /// Starts announcing the address, or starts again.
    pub fn start(&mut self, address: IpAddr, now: Duration) {
        self.entries.insert(address, Entry { next: now, last: now + LASTING });
    }

    /// Stops announcing the address.
    pub fn stop(&mut self, address: IpAddr) {
        self.entries.remove(&address);
    }

    /// Returns the addresses to announce now. Missed announcements are not made up for, but the last one is always made.
    pub fn due(&mut self, now: Duration) -> Vec<IpAddr> {
        let mut due = Vec::new();
        self.entries.retain(|&address, entry| {
            if entry.next > now {
                return true;
            }
            due.push(address);
            let more = now < entry.last;
            entry.next = (now + INTERVAL).min(entry.last);
            more
        });
        due
    }

    /// Returns when the next announcement is due.
    pub fn next(&self) -> Option<Duration> {
        self.entries.values().map(|entry| entry.next).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    /// Returns when announcements are made if the schedule is polled `lateness` after it wanted to be.
    fn run(schedule: &mut Schedule, start: Duration, mut lateness: impl FnMut() -> Duration) -> Vec<Duration> {
        let mut times = Vec::new();
        schedule.start(ADDRESS, start);
        while let Some(next) = schedule.next() {
            let now = next + lateness();
            times.extend(schedule.due(now).iter().map(|_| now - start));
        }
        times
    }

    #[test]
    fn an_address_is_announced_six_times_in_five_seconds() {
        let times = run(&mut Schedule::default(), Duration::from_secs(100), || Duration::ZERO);
        assert_eq!(times, [0, 1, 2, 3, 4, 5].map(Duration::from_secs));
    }

    #[test]
    fn a_restarted_schedule_begins_anew_and_a_stopped_one_ends() {
        let mut schedule = Schedule::default();
        schedule.start(ADDRESS, Duration::ZERO);
        assert_eq!(schedule.due(Duration::ZERO), [ADDRESS]);
        assert_eq!(schedule.due(Duration::ZERO), [] as [IpAddr; 0]);
        schedule.start(ADDRESS, Duration::from_millis(300));
        assert_eq!(schedule.due(Duration::from_millis(300)), [ADDRESS]);
        schedule.stop(ADDRESS);
        assert_eq!(schedule.next(), None);
    }

    #[test]
    fn announcements_of_one_address_do_not_delay_anothers() {
        let other: IpAddr = "2001:db8::1".parse().unwrap();
        let mut schedule = Schedule::default();
        schedule.start(ADDRESS, Duration::ZERO);
        schedule.due(Duration::ZERO);
        schedule.start(other, Duration::from_millis(500));
        assert_eq!(schedule.due(Duration::from_millis(500)), [other]);
        assert_eq!(schedule.next(), Some(INTERVAL));
        assert_eq!(schedule.due(Duration::from_millis(1500)), [ADDRESS, other]);
    }

    proptest! {
        #[test]
        fn late_calls_cause_no_bursts_and_the_last_announcement_is_sent(
            lateness in proptest::collection::vec(0u64..4000, 6),
        ) {
            let mut each = lateness.iter().copied().map(Duration::from_millis);
            let times = run(&mut Schedule::default(), Duration::ZERO, || each.next().unwrap());
            prop_assert!((2..=6).contains(&times.len()), "{times:?}");
            prop_assert!(*times.last().unwrap() >= LASTING);
            let spaced = times.windows(2).take(times.len() - 2);
            prop_assert!(spaced.into_iter().all(|pair| pair[1] - pair[0] >= INTERVAL), "{times:?}");
        }
    }
}
