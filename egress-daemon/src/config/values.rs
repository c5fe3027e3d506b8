//! Parses and checks single values of the configuration, with a remedy for each wrong value.

use egress_core::health::ProbeTracker;
use serde_json::Value;
use std::{
    fmt::Display,
    net::{AddrParseError, SocketAddr, SocketAddrV4},
    str::FromStr,
    time::Duration,
};

/// The bounds of `maxFlows`. Below them, ordinary pods run out of flows; above them, the tables need more than 4 GiB.
pub(super) const FLOWS: std::ops::RangeInclusive<u64> = 1_024..=16_777_216;
/// The longest idle timeout. It keeps all arithmetic on ticks far from overflow.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);

/// A fault's message and its remedy.
pub(super) type Refusal = (String, String);

pub(super) fn refuse<T>(message: impl Into<String>, remedy: impl Into<String>) -> Result<T, Refusal> {
    Err((message.into(), remedy.into()))
}

/// Formats a value for a message, shortened to one line.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

pub(super) fn string(value: &Value) -> Option<&str> {
    value.as_str()
}

pub(super) fn whole(value: &Value, range: std::ops::RangeInclusive<u64>) -> Result<u64, Refusal> {
    match value.as_u64().filter(|n| range.contains(n)) {
        Some(n) => Ok(n),
        None => refuse(
            format!("{} is out of range", shown(value)),
            format!("write a whole number from {} to {}", range.start(), range.end()),
        ),
    }
}

pub(super) fn port(value: &Value) -> Result<u16, Refusal> {
    whole(value, 1..=65_535).map(|n| n as u16)
}

/// Parses a value with exactly one bit set, written as a number or as hexadecimal text.
pub(super) fn one_bit(value: &Value) -> Result<u32, Refusal> {
    let hexadecimal = || u64::from_str_radix(string(value)?.strip_prefix("0x")?, 16).ok();
    let number = value.as_u64().or_else(hexadecimal).and_then(|n| u32::try_from(n).ok());
    match number.filter(|n| n.is_power_of_two()) {
        Some(bit) => Ok(bit),
        None => refuse(
            format!("{} is not one bit of the mark", shown(value)),
            "write a power of two below 2^32 that nothing else on the nodes uses, such as 0x1000",
        ),
    }
}

pub(super) fn flows(value: &Value) -> Result<u32, Refusal> {
    whole(value, FLOWS).map(|n| n as u32)
}

pub(super) fn count(value: &Value) -> Result<u32, Refusal> {
    whole(value, 1..=ProbeTracker::REMEMBERED as u64).map(|n| n as u32)
}

pub(super) fn interface(value: &Value) -> Result<String, Refusal> {
    let fits = |name: &&str| {
        (1..=15).contains(&name.len())
            && !name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control())
            && *name != "."
            && *name != ".."
    };
    match string(value).filter(fits) {
        Some(name) => Ok(name.to_owned()),
        None => refuse(
            format!("{} is not the name of an interface", shown(value)),
            "write 1 to 15 characters without blanks, slashes or colons, such as spillway0",
        ),
    }
}

/// Parses an address and a port. Accepts brackets around an IPv4 address too: a manifest does not know the family of `$(NODE_IP)`.
pub fn socket_address(text: &str) -> Result<SocketAddr, AddrParseError> {
    let parts = text.strip_prefix('[').and_then(|rest| rest.split_once("]:"));
    match parts.map(|(host, port)| format!("{host}:{port}").parse::<SocketAddrV4>()) {
        Some(Ok(v4)) => Ok(v4.into()),
        _ => text.parse(),
    }
}

pub(super) fn address(value: &Value) -> Result<SocketAddr, Refusal> {
    string(value).and_then(|text| socket_address(text).ok()).ok_or_else(|| {
        let remedy = "write an address and a port, such as \"127.0.0.1:9473\" or \"[::]:9473\"";
        (format!("{} is not an address to listen on", shown(value)), remedy.to_owned())
    })
}

pub(super) fn choice<T: Copy>(value: &Value, choices: &[(&str, T)]) -> Result<T, Refusal> {
    let text = string(value);
    if let Some((_, choice)) = choices.iter().find(|(name, _)| Some(*name) == text) {
        return Ok(*choice);
    }
    let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
    refuse(format!("{} is unknown", shown(value)), format!("write {}", names.join(" or ")))
}

pub(super) fn boolean(value: &Value) -> Result<bool, Refusal> {
    match value {
        Value::Bool(value) => Ok(*value),
        other => refuse(format!("{} is not a boolean", shown(other)), "write true or false"),
    }
}

pub(super) fn text_of<T: FromStr>(text: &str) -> Result<T, String>
where
    T::Err: Display,
{
    text.parse().map_err(|error: T::Err| error.to_string())
}

pub(super) fn list<T>(
    value: &Value,
    example: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, Refusal> {
    let remedy = || format!("write a list of {example}");
    let Some(items) = value.as_array() else { return refuse(format!("{} is not a list", shown(value)), remedy()) };
    let item = |(index, item): (usize, &Value)| match string(item).map(&read) {
        Some(Ok(item)) => Ok(item),
        Some(Err(error)) => refuse(format!("item {} ({}): {error}", index + 1, shown(item)), remedy()),
        None => refuse(format!("item {} ({}) is not a string", index + 1, shown(item)), remedy()),
    };
    items.iter().enumerate().map(item).collect()
}

/// Parses a whole number and a unit: `500ms`, `300s`, `5m`, `2h`, `7d`.
pub(super) fn duration(value: &Value) -> Result<Duration, Refusal> {
    let parsed = string(value).and_then(|text| {
        let unit = text.find(|c: char| !c.is_ascii_digit())?;
        let (number, unit) = text.split_at(unit);
        let number: u64 = number.parse().ok()?;
        let millis = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 24 * 3_600_000,
            _ => return None,
        };
        number.checked_mul(millis).map(Duration::from_millis)
    });
    parsed.ok_or_else(|| {
        let remedy = "write a whole number and a unit (ms, s, m, h or d), such as 300s".to_owned();
        (format!("{} is not a duration", shown(value)), remedy)
    })
}

pub(super) fn duration_in(value: &Value, least_ms: u64, most_ms: u64) -> Result<Duration, Refusal> {
    let (least, most) = (Duration::from_millis(least_ms), Duration::from_millis(most_ms));
    match duration(value)? {
        d if (least..=most).contains(&d) => Ok(d),
        d => refuse(format!("{d:?} is out of range"), format!("write a duration from {least:?} to {most:?}")),
    }
}

pub(super) fn timeout(value: &Value, (least, rfc): (u64, &str)) -> Result<Duration, Refusal> {
    match duration(value)? {
        d if d.subsec_nanos() != 0 => refuse(format!("{d:?} is finer than a second"), "write whole seconds"),
        d if d.as_secs() < least => {
            refuse(format!("{d:?} is shorter than {rfc} allows"), format!("write at least {least}s"))
        }
        d if d > LONGEST_TIMEOUT => refuse(format!("{d:?} is longer than 30 days"), "write at most 720h"),
        d => Ok(d),
    }
}
