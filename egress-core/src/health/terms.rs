//! Times that follow from how long a lease lasts. Its holder, the other gateways and the controller rely on each other's times, so all of
//! them take these times from here. Each function takes a lease's duration and returns a share of it.

use std::time::Duration;

/// Returns how long a holder counts on its lease after it began to renew it: less than others do, since clocks run at different rates.
pub fn counted(duration: Duration) -> Duration {
    duration - duration / 10
}

/// Returns the longest time between two renewals of a living holder: it renews three times in a duration.
pub fn between_renewals(duration: Duration) -> Duration {
    duration / 3
}

/// Returns after how long without any renewal the silence is no evidence against a gateway whose lease lasts this long: among living
/// gateways, the earliest would lapse one renewal before the latest.
pub fn all_quiet(duration: Duration) -> Duration {
    duration - between_renewals(duration)
}

/// Returns until when a gateway that counts on its lease until `until` tells others so. A gateway that still says so when another's lease
/// ends has renewed since that other one should have: the store is available.
pub fn says_held_until(until: Duration, duration: Duration) -> Duration {
    until.saturating_sub(between_renewals(duration))
}

/// Returns how long after the last gateway ceased to say that it holds its lease ([`says_held_until`]) all are quiet ([`all_quiet`]).
pub fn until_all_quiet(duration: Duration) -> Duration {
    all_quiet(duration) - says_held_until(counted(duration), duration)
}

/// Returns how long before a gateway's lease ends all gateways had been quiet if none has renewed since this one did. A report takes time
/// to arrive: it counts as a thirtieth of a duration earlier, so that a controller that excuses none is not taken for one that does.
pub fn quiet_before_end(duration: Duration) -> Duration {
    counted(duration) - all_quiet(duration) - duration / 30
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_the_usual_lease() {
        let of = |share: fn(Duration) -> Duration| share(Duration::from_secs(15)).as_millis();
        assert_eq!([counted, between_renewals, all_quiet].map(of), [13_500, 5_000, 10_000]);
        assert_eq!([until_all_quiet, quiet_before_end].map(of), [1_500, 3_000]);
    }
}
