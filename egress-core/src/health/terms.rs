//! What follows from how long a lease lasts. Its holder, the other gateways and the controller rely on each other's times, so all of them take
//! them from here. Each takes a lease's duration and returns a share of it.

use std::time::Duration;

/// How long a holder counts on its lease after it began to renew it: less than others do, since clocks run at different rates.
pub fn counted(duration: Duration) -> Duration {
    duration - duration / 10
}

/// The longest time between two renewals of a living holder: it renews three times in a duration.
pub fn between_renewals(duration: Duration) -> Duration {
    duration / 3
}

/// How long no gateway renews before that is no evidence against one whose lease lasts this long: the earliest of living gateways would lapse
/// one renewal before the latest.
pub fn all_quiet(duration: Duration) -> Duration {
    duration - between_renewals(duration)
}

/// Until when a gateway that counts on its lease until `until` tells others so. One that still says it when another's lease ends has renewed
/// since that one should have: the store is not away.
pub fn says_held_until(until: Duration, duration: Duration) -> Duration {
    until.saturating_sub(between_renewals(duration))
}

/// How long after the last gateway has ceased to say that it holds its lease ([`says_held_until`]) all have been quiet ([`all_quiet`]).
pub fn until_all_quiet(duration: Duration) -> Duration {
    all_quiet(duration) - says_held_until(counted(duration), duration)
}

/// How long before a gateway's lease ends all had been quiet if none has renewed since this one did. A report takes time to arrive: it
/// counts as a thirtieth of a duration earlier, so that a controller which excuses nobody is not taken for one that does.
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
