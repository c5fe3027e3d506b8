//! Times as users write them. Pure.

use crate::flowlog::Instant;
use k8s_openapi::jiff::{Timestamp, civil};

const SECOND: i64 = 1_000_000;

/// A user's time: the first and the last microsecond that it can mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// The earliest.
    pub from: Instant,
    /// The latest.
    pub until: Instant,
}

/// Parses a time with its zone. A time without seconds means the whole minute; a time without a fraction, the whole second.
pub fn moment(text: &str) -> Result<Moment, String> {
    let example = "write a date, a time and a zone, such as 2026-11-25T14:03:00Z or 2026-11-25T15:03:00+01:00";
    let text = text.trim();
    let time = text.split_once(['T', 't', ' ']).map(|(_, time)| time).filter(|time| time.contains(':'));
    let Some(time) = time else {
        let day = if text.contains(':') { "on which day was this" } else { "this is not a time" };
        return Err(format!("{day}: {example}"));
    };
    if text.contains('[') {
        return Err(format!(
            "a zone name is ambiguous in the hour that is repeated when clocks are set back: {example}"
        ));
    }
    let width = if time.split(['Z', 'z', '+', '-']).next().unwrap_or_default().contains('.') {
        0
    } else if time.split(['Z', 'z', '+', '-']).next().unwrap_or_default().matches(':').count() < 2 {
        60 * SECOND - 1
    } else {
        SECOND - 1
    };
    match text.parse::<Timestamp>() {
        Ok(at) => {
            let from = at.as_microsecond();
            Ok(Moment { from, until: from + width })
        }
        Err(_) if text.parse::<civil::DateTime>().is_ok() => {
            Err(format!("the time zone is missing: write {text}Z for UTC, or the offset, such as {text}+01:00"))
        }
        Err(error) => Err(format!("{error}: {example}")),
    }
}

/// Formats a time for display.
pub(super) fn text(at: Instant) -> String {
    // Milliseconds are enough here.
    Timestamp::from_millisecond(at.div_euclid(1000)).map_or_else(|_| at.to_string(), |at| at.to_string())
}
