//! Quantities and durations in the notation of Kubernetes.

use std::time::Duration;

/// Parses a quantity above zero: `800M`, `2Gi`, `1.5G`, `3e9`, `1500000`. Fractions of a unit are
/// rounded up, and larger values saturate at u64::MAX.
pub fn quantity(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || whole.len() + fraction.len() > 18 || fraction.contains('.') {
        return None;
    }
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let (multiplier, mut divisor): (u128, u128) = match suffix {
        "" => (1, 1),
        "m" => (1, 1000),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        exponent => match exponent.strip_prefix(['e', 'E'])?.parse::<i32>().ok()? {
            up @ 0..=18 => (10u128.pow(up as u32), 1),
            down @ -18..0 => (1, 10u128.pow(down.unsigned_abs())),
            _ => return None,
        },
    };
    divisor *= 10u128.pow(fraction.len() as u32);
    let value = (digits * multiplier).div_ceil(divisor);
    (value > 0).then(|| u64::try_from(value).unwrap_or(u64::MAX))
}

/// Parses a whole number with its unit: `500ms`, `10s`, `5m`, `1h`.
pub fn duration(text: &str) -> Option<Duration> {
    let end = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(end);
    let number: u64 = number.parse().ok()?;
    Some(Duration::from_millis(match unit {
        "ms" => number,
        "s" => number.checked_mul(1000)?,
        "m" => number.checked_mul(60_000)?,
        "h" => number.checked_mul(3_600_000)?,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities() {
        for (text, value) in [
            ("800M", 800_000_000),
            ("2G", 2_000_000_000),
            ("1.5Gi", 1_610_612_736),
            ("1500m", 2),
            ("3e9", 3_000_000_000),
            ("25e-1", 3),
            (".5k", 500),
            ("7", 7),
            ("999E", u64::MAX),
        ] {
            assert_eq!(quantity(text), Some(value), "{text}");
        }
        for text in ["", "M", "0", "-1", "1.2.3", "1x", "1e99", "1 M", "9999999999999999999"] {
            assert_eq!(quantity(text), None, "{text}");
        }
    }

    #[test]
    fn durations() {
        for (text, ms) in [("500ms", 500), ("10s", 10_000), ("5m", 300_000), ("1h", 3_600_000), ("0s", 0)] {
            assert_eq!(duration(text), Some(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "10", "s", "1.5s", "-1s", "1d", "99999999999999999999s"] {
            assert_eq!(duration(text), None, "{text}");
        }
    }
}
