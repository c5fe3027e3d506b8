//! Converts YAML to a checked [`Config`]. Reports all faults together, each with its field and a remedy.

use super::{
    Announce, Config, Fault, Firewall, Foreign, LONGEST_LEASE, Setting,
    values::{
        FLOWS, Refusal, address, boolean, choice, count, duration_in, flows, interface, list, one_bit, port, refuse,
        shown, text_of, timeout, whole,
    },
};
use crate::flowlog::{Mode, export::MAX_COLLECTORS};
use egress_common::limits;
use egress_core::{model::Transport, network::xdp::Xdp};
use serde_json::{Map, Value};

/// RFC 4787, REQ-5: no UDP mapping expires in less than two minutes. (`limits::UDP_SECS` is the recommended time.)
const UDP_MINIMUM_SECS: u64 = 120;
/// The longest time a log may be kept: ten years.
const LONGEST_RETENTION_MS: u64 = 3_650 * 24 * 3_600_000;

/// Parses a configuration. Returns all faults if there are any.
pub(super) fn config(text: &[u8]) -> Result<Config, Vec<Fault>> {
    let empty = text.iter().all(u8::is_ascii_whitespace);
    let value = if empty { Value::Null } else { yaml(text).map_err(|fault| vec![fault])? };
    let mut found = Found::default();
    let config = read(value, &mut found);
    found.faults.extend(contradictions(&config));
    if found.faults.is_empty() { Ok(config) } else { Err(found.faults) }
}

/// Returns the documentation of every setting, in the order of the page that documents them.
pub(super) fn settings() -> Vec<Setting> {
    let mut found = Found::default();
    read(Value::Null, &mut found);
    found.settings
}

/// Reads every field. This is the only list of the fields' names, defaults, meanings and parsers.
fn read(value: Value, found: &mut Found) -> Config {
    let mut config = Config::default();
    let mut top = Section::new(String::new(), value, found);
    top.set(
        "tunnelPort",
        ["8473", "UDP port of the tunnel device, the same on all nodes"],
        &mut config.tunnel_port,
        port,
    );
    top.set("tunnelName", ["spillway0", "name of the tunnel device"], &mut config.tunnel_name, interface);
    top.set("exceptCIDRs", [
            "[]",
            "destinations that no policy touches, in addition to pods, nodes, the pod networks that Nodes or a CNI name, those of \
             ServiceCIDR objects and the Service `kubernetes`",
        ], &mut config.except_cidrs, |v| list(v, "prefixes such as [203.0.113.0/24]", text_of));
    top.set(
        "uplinks",
        ["[]", "interfaces that lead out of the node, in addition to those that are recognised"],
        &mut config.uplinks,
        |v| list(v, "interface names such as [eth1, \"ens*\"]", text_of),
    );
    top.set(
        "podInterfaces",
        ["[]", "host-side interfaces of pods, in addition to those that are recognised"],
        &mut config.pod_interfaces,
        |v| list(v, "interface names such as [\"cali*\"]", text_of),
    );
    top.set(
        "maxFlows",
        ["131072", "maximum number of flows on a node, for each address family"],
        &mut config.max_flows,
        flows,
    );
    top.set(
        "maxFlowsPerPod",
        ["(three quarters of maxFlows)", "how many of these flows one pod may have"],
        &mut config.max_flows_per_pod,
        |v| whole(v, 64..=*FLOWS.end()).map(|n| n as u32),
    );
    top.section("timeouts", |timeouts| {
        let t = &mut config.timeouts;
        let established = (limits::TCP_ESTABLISHED_SECS, "RFC 5382, REQ-5");
        timeouts.set(
            "tcpEstablished",
            ["7440s", "how long a TCP connection is kept without a packet once its handshake is complete"],
            &mut t.tcp_established,
            |v| timeout(v, established),
        );
        let transitory = (limits::TCP_TRANSITORY_SECS, "RFC 5382, REQ-5");
        timeouts.set(
            "tcpTransitory",
            ["240s", "the same for a connection that is opening or closing"],
            &mut t.tcp_transitory,
            |v| timeout(v, transitory),
        );
        timeouts.set("udp", ["300s", "the same for a UDP flow"], &mut t.udp, |v| {
            timeout(v, (UDP_MINIMUM_SECS, "RFC 4787, REQ-5"))
        });
        timeouts.set("icmp", ["60s", "the same for an ICMP query"], &mut t.icmp, |v| {
            timeout(v, (limits::ICMP_SECS, "RFC 5508, REQ-2"))
        });
    });
    top.section("probe", |probe| {
        probe.set(
            "interval",
            [
                "100ms",
                "the time between two probes of a gateway that answers; a quarter of it while an answer is missing",
            ],
            &mut config.probe.interval,
            |v| duration_in(v, 10, 60_000),
        );
        probe.set(
            "count",
            ["3", "a gateway counts as dead after this many consecutive missed probes, and as alive after this many answered ones"],
            &mut config.probe.count,
            count,
        );
    });
    top.section("lease", |lease| {
        lease.set(
            "renew",
            ["5s", "how often a gateway, and the leading controller, renews its lease"],
            &mut config.lease.renew,
            |v| duration_in(v, 50, LONGEST_LEASE.as_millis() as u64),
        );
        lease.set(
            "duration",
            [
                "15s",
                "how long a lease is valid after its last renewal, unless the lease states a longer time; while no gateway renews, \
                 gateways' leases are valid three times as long",
            ],
            &mut config.lease.duration,
            |v| duration_in(v, 100, LONGEST_LEASE.as_millis() as u64),
        );
    });
    config.deadline = config.lease.longest_deadline();
    top.set(
        "deadline",
        [
            "(lease.duration minus lease.renew)",
            "how long a gateway answers ARP and NDP for egress IPs after its agent was last alive",
        ],
        &mut config.deadline,
        |v| duration_in(v, 100, 3_600_000),
    );
    top.set(
        "startLimit",
        ["60s", "how long packets of unknown sources are held for a selected pod that has no address yet"],
        &mut config.start_limit,
        |v| duration_in(v, 1_000, 3_600_000),
    );
    top.set(
        "firewall",
        ["respect", "whether the first packet of a flow goes through the host's routes and firewall"],
        &mut config.firewall,
        |v| choice(v, &[("respect", Firewall::Respect), ("bypass", Firewall::Bypass)]),
    );
    top.set(
        "firewallMark",
        [
            "0x1000",
            "the bit of the mark by which a node without a default route routes first packets to the tunnel device",
        ],
        &mut config.firewall_mark,
        one_bit,
    );
    top.set("transport", ["Auto", "how packets travel between nodes"], &mut config.transport, |v| {
        let named = [Transport::Device, Transport::Vxlan, Transport::Direct].map(|t| (t.to_string(), t));
        let all: Vec<(&str, Transport)> = named.iter().map(|(name, t)| (name.as_str(), *t)).collect();
        choice(v, &[&[("Auto", Transport::Auto)][..], &all].concat())
    });
    top.set(
        "xdp",
        ["Auto", "whether gateways forward packets at the drivers of their interfaces; `Native` also on veths"],
        &mut config.xdp,
        |v| {
            // YAML 1.1 reads `Off` without quotes as false.
            if v == &Value::Bool(false) {
                return Ok(Xdp::Off);
            }
            let named = [Xdp::Auto, Xdp::Native, Xdp::Off].map(|xdp| (xdp.to_string(), xdp));
            choice(v, &named.each_ref().map(|(name, xdp)| (name.as_str(), *xdp)))
        },
    );
    top.set(
        "announce",
        [
            "arp",
            "how egress IPs are announced on their link; `none` if routers are configured to send them to the node",
        ],
        &mut config.announce,
        |v| choice(v, &[("arp", Announce::Arp), ("none", Announce::None)]),
    );
    top.set(
        "foreignKinds",
        ["[]", "systems whose policies Spillway also carries out"],
        &mut config.foreign_kinds,
        |v| {
            let known = |text: &str| match text {
                "cilium" => Ok(Foreign::Cilium),
                "antrea" => Ok(Foreign::Antrea),
                _ => Err("unknown system".to_owned()),
            };
            Ok(list(v, "systems: [cilium, antrea]", known)?.into_iter().collect())
        },
    );
    let mut limit = None;
    top.set(
        "maxEgressIPsPerNode",
        [
            "(no limit)",
            "how many floating egress IPs a node may carry from all pools together; only the controller reads it",
        ],
        &mut limit,
        |v| whole(v, 1..=255).map(|n| Some(n as u32)),
    );
    config.max_egress_ips_per_node = limit;
    top.set(
        "drainTimeout",
        [
            "1h",
            "how long an egress IP that was removed from its pool keeps its connections; only the controller reads it",
        ],
        &mut config.drain_timeout,
        |v| duration_in(v, 1_000, 604_800_000),
    );
    let mut metrics = None;
    top.set(
        "metrics",
        ["(nowhere)", "address at which metrics and health are served; `--metrics` overrides it"],
        &mut metrics,
        |v| address(v).map(Some),
    );
    config.metrics = metrics;
    top.section("flowLog", |log| {
        log.set("mode", [
            "Leases",
            "what is logged: with `Leases`, gateways record which node held which ports when; with `Flows`, each node also records when \
             each flow began and ended, and for which pod",
        ], &mut config.flow_log.mode, |v| match v {
            // YAML 1.1 reads `Off` without quotes as false.
            Value::Bool(false) => Ok(Mode::Off),
            v => choice(v, &[("Off", Mode::Off), ("Leases", Mode::Leases), ("Flows", Mode::Flows)]),
        });
        log.set("destinations", ["false", "whether the log of flows records remote addresses and ports"], &mut config.flow_log.destinations, boolean);
        log.set("retention", ["7d", "how long logs are kept"], &mut config.flow_log.retention, |v| duration_in(v, 3_600_000, LONGEST_RETENTION_MS));
        log.set("export", ["[]", "collectors and object stores to which the logs are sent"], &mut config.flow_log.export, |v| {
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
    config
}

/// Returns the faults of values that are allowed individually but not in combination.
fn contradictions(config: &Config) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut fault = |field: &str, message: String, remedy: &str| {
        faults.push(Fault { field: field.to_owned(), message, remedy: remedy.to_owned() });
    };
    let (renew, duration) = (config.lease.renew, config.lease.duration);
    if renew * 2 > duration {
        let message = format!("a lease of {duration:?} that is renewed every {renew:?} lapses after one late renewal");
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

/// The fields of one mapping that have not been read yet.
struct Section<'a> {
    path: String,
    fields: Map<String, Value>,
    known: Vec<&'static str>,
    found: &'a mut Found,
}

/// The results of reading besides the configuration: the faults, and the documentation of the settings.
#[derive(Default)]
struct Found {
    faults: Vec<Fault>,
    settings: Vec<Setting>,
}

impl<'a> Section<'a> {
    fn new(path: String, value: Value, found: &'a mut Found) -> Self {
        let fields = match value {
            Value::Null => Map::new(),
            Value::Object(fields) => fields,
            other => {
                let message = format!("expected a mapping, found {}", shown(&other));
                let remedy = "write fields, each with its value".to_owned();
                found.faults.push(Fault { field: path.clone(), message, remedy });
                Map::new()
            }
        };
        Self { path, fields, known: Vec::new(), found }
    }

    fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// Sets `place` if the field is present. An empty field (`udp:`) counts as absent.
    fn set<T>(
        &mut self,
        field: &'static str,
        [default, meaning]: [&'static str; 2],
        place: &mut T,
        read: impl Fn(&Value) -> Result<T, Refusal>,
    ) {
        self.known.push(field);
        self.found.settings.push(Setting { field: self.name(field), default, meaning, values: values(&read) });
        let Some(value) = self.fields.remove(field).filter(|value| !value.is_null()) else { return };
        match read(&value) {
            Ok(value) => *place = value,
            Err((message, remedy)) => {
                let field = self.name(field);
                self.found.faults.push(Fault { field, message, remedy });
            }
        }
    }

    fn section(&mut self, field: &'static str, read: impl FnOnce(&mut Section<'_>)) {
        self.known.push(field);
        let value = self.fields.remove(field).unwrap_or_default();
        let path = self.name(field);
        let mut section = Section::new(path, value, self.found);
        read(&mut section);
        section.finish();
    }

    /// Reports the fields that are left over as faults.
    fn finish(self) {
        for field in self.fields.keys() {
            self.found.faults.push(Fault {
                field: self.name(field),
                message: "there is no such field".to_owned(),
                remedy: format!("the fields here are {}", self.known.join(", ")),
            });
        }
    }
}

/// Returns the accepted values of a setting, taken from the remedies for two wrong values: a mapping, and a duration of zero.
fn values<T>(read: &impl Fn(&Value) -> Result<T, Refusal>) -> String {
    let wrong = [Value::Object(Map::new()), Value::from("0s")];
    let remedies = wrong.iter().filter_map(|wrong| Some(read(wrong).err()?.1));
    let last = remedies.reduce(|first, second| if first.contains("unit") { second } else { first });
    last.unwrap_or_default().trim_start_matches("write ").to_owned()
}
