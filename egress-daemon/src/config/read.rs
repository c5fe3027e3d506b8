//! From YAML to a checked [`Config`]: every fault is found in one go, each with its field and what to write instead.

use super::{Announce, Config, Fault, Firewall, Foreign};
use crate::flowlog::{Mode, export::MAX_COLLECTORS};
use egress_common::limits;
use egress_core::{health::ProbeTracker, model::Transport, network::xdp::Xdp};
use serde_json::{Map, Value};
use std::{fmt::Display, net::SocketAddr, str::FromStr, time::Duration};

/// The bounds of `maxFlows`: below, ordinary pods run out; above, the tables need more than 4 GiB.
const FLOWS: std::ops::RangeInclusive<u64> = 1_024..=16_777_216;
/// RFC 4787, REQ-5: no UDP mapping expires in less than two minutes. (`limits::UDP_SECS` is what it recommends.)
const UDP_MINIMUM_SECS: u64 = 120;
/// The longest idle time, which keeps all arithmetic on ticks far from its end.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);

/// For how long a log may be kept: ten years.
const LONGEST_RETENTION_MS: u64 = 3_650 * 24 * 3_600_000;

/// The configuration in the text, or everything that is wrong with it.
pub(super) fn config(text: &[u8]) -> Result<Config, Vec<Fault>> {
    let empty = text.iter().all(u8::is_ascii_whitespace);
    let value = if empty { Value::Null } else { yaml(text).map_err(|fault| vec![fault])? };
    let mut faults = Vec::new();
    let mut config = Config::default();
    let mut top = Section::new(String::new(), value, &mut faults);
    top.set("tunnelPort", &mut config.tunnel_port, port);
    top.set("tunnelName", &mut config.tunnel_name, interface);
    top.set("exceptCIDRs", &mut config.except_cidrs, |v| list(v, "prefixes such as [203.0.113.0/24]", text_of));
    top.set("uplinks", &mut config.uplinks, |v| list(v, "interface names such as [eth1, \"ens*\"]", text_of));
    top.set("podInterfaces", &mut config.pod_interfaces, |v| list(v, "interface names such as [\"cali*\"]", text_of));
    top.set("maxFlows", &mut config.max_flows, flows);
    top.set("maxFlowsPerPod", &mut config.max_flows_per_pod, |v| whole(v, 64..=*FLOWS.end()).map(|n| n as u32));
    top.section("timeouts", |timeouts| {
        let t = &mut config.timeouts;
        let established = (limits::TCP_ESTABLISHED_SECS, "RFC 5382, REQ-5");
        timeouts.set("tcpEstablished", &mut t.tcp_established, |v| timeout(v, established));
        let transitory = (limits::TCP_TRANSITORY_SECS, "RFC 5382, REQ-5");
        timeouts.set("tcpTransitory", &mut t.tcp_transitory, |v| timeout(v, transitory));
        timeouts.set("udp", &mut t.udp, |v| timeout(v, (UDP_MINIMUM_SECS, "RFC 4787, REQ-5")));
        timeouts.set("icmp", &mut t.icmp, |v| timeout(v, (limits::ICMP_SECS, "RFC 5508, REQ-2")));
    });
    top.section("probe", |probe| {
        probe.set("interval", &mut config.probe.interval, |v| duration_in(v, 10, 60_000));
        probe.set("count", &mut config.probe.count, count);
    });
    top.section("lease", |lease| {
        lease.set("renew", &mut config.lease.renew, |v| duration_in(v, 50, 3_600_000));
        lease.set("duration", &mut config.lease.duration, |v| duration_in(v, 100, 3_600_000));
    });
    config.deadline = config.lease.longest_deadline();
    top.set("deadline", &mut config.deadline, |v| duration_in(v, 100, 3_600_000));
    top.set("startLimit", &mut config.start_limit, |v| duration_in(v, 1_000, 3_600_000));
    top.set("firewall", &mut config.firewall, |v| {
        choice(v, &[("respect", Firewall::Respect), ("bypass", Firewall::Bypass)])
    });
    top.set("firewallMark", &mut config.firewall_mark, one_bit);
    top.set("transport", &mut config.transport, |v| {
        let named = [Transport::Device, Transport::Vxlan, Transport::Direct].map(|t| (t.to_string(), t));
        let all: Vec<(&str, Transport)> = named.iter().map(|(name, t)| (name.as_str(), *t)).collect();
        choice(v, &[&[("Auto", Transport::Auto)][..], &all].concat())
    });
    top.set("xdp", &mut config.xdp, |v| {
        // What YAML 1.1 makes of `Off` without quotes.
        if v == &Value::Bool(false) {
            return Ok(Xdp::Off);
        }
        let named = [Xdp::Auto, Xdp::Native, Xdp::Off].map(|xdp| (xdp.to_string(), xdp));
        choice(v, &named.each_ref().map(|(name, xdp)| (name.as_str(), *xdp)))
    });
    top.set("announce", &mut config.announce, |v| choice(v, &[("arp", Announce::Arp), ("none", Announce::None)]));
    top.set("foreignKinds", &mut config.foreign_kinds, |v| {
        let known = |text: &str| match text {
            "cilium" => Ok(Foreign::Cilium),
            "antrea" => Ok(Foreign::Antrea),
            _ => Err("it is not known".to_owned()),
        };
        Ok(list(v, "systems: [cilium, antrea]", known)?.into_iter().collect())
    });
    let mut limit = None;
    top.set("maxEgressIPsPerNode", &mut limit, |v| whole(v, 1..=255).map(|n| Some(n as u32)));
    config.max_egress_ips_per_node = limit;
    top.set("drainTimeout", &mut config.drain_timeout, |v| duration_in(v, 1_000, 604_800_000));
    let mut metrics = None;
    top.set("metrics", &mut metrics, |v| address(v).map(Some));
    config.metrics = metrics;
    top.section("flowLog", |log| {
        log.set("mode", &mut config.flow_log.mode, |v| match v {
            // As YAML reads Off without quotes.
            Value::Bool(false) => Ok(Mode::Off),
            v => choice(v, &[("Off", Mode::Off), ("Leases", Mode::Leases), ("Flows", Mode::Flows)]),
        });
        log.set("destinations", &mut config.flow_log.destinations, boolean);
        log.set("retention", &mut config.flow_log.retention, |v| duration_in(v, 3_600_000, LONGEST_RETENTION_MS));
        log.set("export", &mut config.flow_log.export, |v| {
            let example = "collectors such as [ipfix://192.0.2.7:4739, json://logs.example:5170, s3://bucket/prefix]";
            let collectors = list(v, example, |text| text.parse())?;
            if collectors.len() > MAX_COLLECTORS {
                return refuse(
                    format!("{} collectors are too many", collectors.len()),
                    format!("write at most {MAX_COLLECTORS}"),
                );
            }
            Ok(collectors)
        });
    });
    top.finish();
    faults.extend(contradictions(&config));
    if faults.is_empty() { Ok(config) } else { Err(faults) }
}

/// What each field allows and the fields together do not.
fn contradictions(config: &Config) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut fault = |field: &str, message: String, remedy: &str| {
        faults.push(Fault { field: field.to_owned(), message, remedy: remedy.to_owned() });
    };
    let (renew, duration) = (config.lease.renew, config.lease.duration);
    if renew * 2 > duration {
        let message = format!("a lease of {duration:?} that is renewed every {renew:?} lapses with one late renewal");
        fault("lease.duration", message, "write at least twice lease.renew");
    }
    if config.flow_log.mode == Mode::Off && !config.flow_log.export.is_empty() {
        let message = "with flowLog.mode Off there is nothing to export".to_owned();
        fault("flowLog.export", message, "write mode: Leases or mode: Flows, or leave export out");
    }
    if config.deadline > config.lease.longest_deadline() {
        let message =
            format!("{:?} and lease.renew ({renew:?}) are longer than lease.duration ({duration:?})", config.deadline);
        fault(
            "deadline",
            format!("{message}: a gateway would answer for an egress IP that another one has taken over"),
            "write at most lease.duration minus lease.renew, or leave it out",
        );
    }
    faults
}

/// What a field should be, and what it is instead.
type Refusal = (String, String);

fn refuse<T>(message: impl Into<String>, remedy: impl Into<String>) -> Result<T, Refusal> {
    Err((message.into(), remedy.into()))
}

fn yaml(text: &[u8]) -> Result<Value, Fault> {
    serde_saphyr::from_slice(text).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it cannot be read");
        let first = first.strip_prefix("error: ").unwrap_or(first);
        Fault {
            field: String::new(),
            message: format!("it is not one YAML document: {first}"),
            remedy: "write fields such as `tunnelPort: 8473`".to_owned(),
        }
    })
}

/// The fields of one mapping that nobody has asked for yet.
struct Section<'a> {
    path: String,
    fields: Map<String, Value>,
    known: Vec<&'static str>,
    faults: &'a mut Vec<Fault>,
}

impl<'a> Section<'a> {
    fn new(path: String, value: Value, faults: &'a mut Vec<Fault>) -> Self {
        let fields = match value {
            Value::Null => Map::new(),
            Value::Object(fields) => fields,
            other => {
                let message = format!("{} where a mapping belongs", shown(&other));
                let remedy = "write fields, each with its value".to_owned();
                faults.push(Fault { field: path.clone(), message, remedy });
                Map::new()
            }
        };
        Self { path, fields, known: Vec::new(), faults }
    }

    fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// Sets `place` if the field is there; an empty one (`udp:`) is as good as absent.
    fn set<T>(&mut self, field: &'static str, place: &mut T, read: impl FnOnce(&Value) -> Result<T, Refusal>) {
        self.known.push(field);
        let Some(value) = self.fields.remove(field).filter(|value| !value.is_null()) else { return };
        match read(&value) {
            Ok(value) => *place = value,
            Err((message, remedy)) => {
                let field = self.name(field);
                self.faults.push(Fault { field, message, remedy });
            }
        }
    }

    fn section(&mut self, field: &'static str, read: impl FnOnce(&mut Section<'_>)) {
        self.known.push(field);
        let value = self.fields.remove(field).unwrap_or_default();
        let path = self.name(field);
        let mut section = Section::new(path, value, self.faults);
        read(&mut section);
        section.finish();
    }

    /// Refuses what is left over.
    fn finish(self) {
        for field in self.fields.keys() {
            self.faults.push(Fault {
                field: self.name(field),
                message: "there is no such field".to_owned(),
                remedy: format!("the fields here are {}", self.known.join(", ")),
            });
        }
    }
}

/// A value as a message shows it, cut to a line.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

fn string(value: &Value) -> Option<&str> {
    value.as_str()
}

fn whole(value: &Value, range: std::ops::RangeInclusive<u64>) -> Result<u64, Refusal> {
    match value.as_u64().filter(|n| range.contains(n)) {
        Some(n) => Ok(n),
        None => refuse(
            format!("{} is out of range", shown(value)),
            format!("write a whole number from {} to {}", range.start(), range.end()),
        ),
    }
}

fn port(value: &Value) -> Result<u16, Refusal> {
    whole(value, 1..=65_535).map(|n| n as u16)
}

/// A number with one bit set, as a number or as a text in hexadecimal.
fn one_bit(value: &Value) -> Result<u32, Refusal> {
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

fn flows(value: &Value) -> Result<u32, Refusal> {
    whole(value, FLOWS).map(|n| n as u32)
}

fn count(value: &Value) -> Result<u32, Refusal> {
    whole(value, 1..=ProbeTracker::REMEMBERED as u64).map(|n| n as u32)
}

fn interface(value: &Value) -> Result<String, Refusal> {
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

fn address(value: &Value) -> Result<SocketAddr, Refusal> {
    string(value).and_then(|text| text.parse().ok()).ok_or_else(|| {
        let remedy = "write an address and a port, such as \"127.0.0.1:9473\" or \"[::]:9473\"";
        (format!("{} is not an address to listen on", shown(value)), remedy.to_owned())
    })
}

fn choice<T: Copy>(value: &Value, choices: &[(&str, T)]) -> Result<T, Refusal> {
    let text = string(value);
    if let Some((_, choice)) = choices.iter().find(|(name, _)| Some(*name) == text) {
        return Ok(*choice);
    }
    let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
    refuse(format!("{} is unknown", shown(value)), format!("write {}", names.join(" or ")))
}

fn boolean(value: &Value) -> Result<bool, Refusal> {
    match value {
        Value::Bool(value) => Ok(*value),
        other => refuse(format!("{} is not a truth value", shown(other)), "write true or false"),
    }
}

fn text_of<T: FromStr>(text: &str) -> Result<T, String>
where
    T::Err: Display,
{
    text.parse().map_err(|error: T::Err| error.to_string())
}

fn list<T>(value: &Value, example: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, Refusal> {
    let remedy = || format!("write a list of {example}");
    let Some(items) = value.as_array() else { return refuse(format!("{} is not a list", shown(value)), remedy()) };
    let item = |(index, item): (usize, &Value)| match string(item).map(&read) {
        Some(Ok(item)) => Ok(item),
        Some(Err(error)) => refuse(format!("item {} ({}): {error}", index + 1, shown(item)), remedy()),
        None => refuse(format!("item {} ({}) is not a text", index + 1, shown(item)), remedy()),
    };
    items.iter().enumerate().map(item).collect()
}

/// A whole number and a unit: `500ms`, `300s`, `5m`, `2h`, `7d`.
fn duration(value: &Value) -> Result<Duration, Refusal> {
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

fn duration_in(value: &Value, least_ms: u64, most_ms: u64) -> Result<Duration, Refusal> {
    let (least, most) = (Duration::from_millis(least_ms), Duration::from_millis(most_ms));
    match duration(value)? {
        d if (least..=most).contains(&d) => Ok(d),
        d => refuse(format!("{d:?} is out of range"), format!("write a duration from {least:?} to {most:?}")),
    }
}

fn timeout(value: &Value, (least, rfc): (u64, &str)) -> Result<Duration, Refusal> {
    match duration(value)? {
        d if d.subsec_nanos() != 0 => refuse(format!("{d:?} is finer than a second"), "write whole seconds"),
        d if d.as_secs() < least => {
            refuse(format!("{d:?} is shorter than {rfc} allows"), format!("write at least {least}s"))
        }
        d if d > LONGEST_TIMEOUT => refuse(format!("{d:?} is longer than 30 days"), "write at most 720h"),
        d => Ok(d),
    }
}
