//! Tests of the configuration file.

use super::*;
use crate::flowlog::Mode;
use proptest::prelude::*;
use serde_json::Value;

fn parse(text: &str) -> Config {
    Config::parse("c.yaml", text.as_bytes()).unwrap_or_else(|error| panic!("{error}"))
}

fn faults(text: &str) -> Vec<(String, String)> {
    match Config::parse("c.yaml", text.as_bytes()) {
        Err(ConfigError::Refused { faults, .. }) => {
            faults.into_iter().map(|f| (f.field, format!("{}; {}", f.message, f.remedy))).collect()
        }
        other => panic!("not refused: {other:?}"),
    }
}

/// Asserts that a text has one fault, in `field`, with all of `parts` in its message.
fn refused(text: &str, field: &str, parts: &[&str]) {
    let found = faults(text);
    assert_eq!(found.iter().map(|(f, _)| f.as_str()).collect::<Vec<_>>(), [field], "{text}: {found:?}");
    for part in parts {
        assert!(found[0].1.contains(part), "{text}: {part:?} is not in {:?}", found[0].1);
    }
}

#[test]
fn an_empty_file_is_all_defaults() {
    for text in ["", "\n\n", "# nothing\n", "{}", "timeouts:\nprobe: {}\nmetrics:\n"] {
        assert_eq!(parse(text), Config::default(), "{text:?}");
    }
    assert_eq!(Config::load(None).unwrap(), Config::default());
}

#[test]
fn every_field_is_read() {
    let text = r#"
tunnelPort: 9000
tunnelName: tun9
exceptCIDRs: [198.51.100.0/24, "2001:db8::/32"]
uplinks: ["ens*"]
podInterfaces: ["cali*", "lxc?"]
maxFlows: 1000000
maxFlowsPerPod: 2000
timeouts: {tcpEstablished: 3h, tcpTransitory: 5m, udp: 120s, icmp: 61s}
probe: {interval: 50ms, count: 5}
lease: {renew: 1s, duration: 5s}
deadline: 3s
startLimit: 2m
firewall: bypass
firewallMark: 0x100000
transport: device
xdp: Native
announce: none
foreignKinds: [cilium, antrea]
maxEgressIPsPerNode: 10
drainTimeout: 10m
metrics: "127.0.0.1:9473"
flowLog: {mode: Off, destinations: true, retention: 30d}
"#;
    let seconds = Duration::from_secs;
    let expected = Config {
        tunnel_port: 9000,
        tunnel_name: "tun9".into(),
        except_cidrs: vec!["198.51.100.0/24".parse().unwrap(), "2001:db8::/32".parse().unwrap()],
        uplinks: vec!["ens*".parse().unwrap()],
        pod_interfaces: vec!["cali*".parse().unwrap(), "lxc?".parse().unwrap()],
        max_flows_per_pod: 2_000,
        max_flows: 1_000_000,
        timeouts: Timeouts {
            tcp_established: seconds(10_800),
            tcp_transitory: seconds(300),
            udp: seconds(120),
            icmp: seconds(61),
        },
        probe: Probe { interval: Duration::from_millis(50), count: 5 },
        lease: LeaseConfig { renew: seconds(1), duration: seconds(5) },
        deadline: seconds(3),
        start_limit: seconds(120),
        firewall: Firewall::Bypass,
        firewall_mark: 0x10_0000,
        transport: Transport::Device,
        xdp: Xdp::Native,
        announce: Announce::None,
        foreign_kinds: [Foreign::Cilium, Foreign::Antrea].into(),
        max_egress_ips_per_node: Some(10),
        drain_timeout: seconds(600),
        metrics: Some("127.0.0.1:9473".parse().unwrap()),
        flow_log: FlowLog {
            mode: Mode::Off,
            destinations: true,
            retention: seconds(30 * 24 * 3600),
            export: Vec::new(),
        },
    };
    assert_eq!(parse(text), expected);
    assert_eq!(parse("flowLog: {mode: \"Off\", destinations: true, retention: 30d}").flow_log, expected.flow_log);
}

/// Returns the fields below a section of a schema. Asserts that the schema allows no others.
fn fields(section: &Value, prefix: &str) -> BTreeSet<String> {
    assert_eq!(section["additionalProperties"], false, "{prefix}");
    let of = |(name, value): (&String, &Value)| match value.get("properties") {
        Some(_) => fields(value, &format!("{prefix}{name}.")),
        None => [format!("{prefix}{name}")].into(),
    };
    section["properties"].as_object().unwrap().iter().flat_map(of).collect()
}

#[test]
fn the_charts_schema_has_all_fields_and_no_others() {
    let schema: Value = serde_json::from_str(include_str!("../../../manifests/chart/values.schema.json")).unwrap();
    let known = Config::settings().into_iter().map(|setting| setting.field).collect();
    assert_eq!(fields(&schema["properties"]["config"], ""), known, "manifests/chart/values.schema.json");
}

#[test]
fn unknown_fields_name_the_known_ones() {
    refused("tunelPort: 1", "tunelPort", &["no such field", "tunnelPort", "maxFlows"]);
    refused("timeouts: {tcp: 300s}", "timeouts.tcp", &["tcpEstablished, tcpTransitory, udp, icmp"]);
    refused("timeouts: 5m", "timeouts", &["mapping"]);
    assert_eq!(parse("flowLog: {mode: Flows}").flow_log.mode, Mode::Flows);
    refused("flowLog: {mode: flows}", "flowLog.mode", &["unknown", "write Off or Leases or Flows"]);
    refused("flowLog: {destinations: 1}", "flowLog.destinations", &["write true or false"]);
    let exported =
        parse("flowLog: {export: [\"ipfix://192.0.2.7:4739\", \"json://logs.example:5170\"]}").flow_log.export;
    assert_eq!(
        exported.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["ipfix://192.0.2.7:4739", "json://logs.example:5170"]
    );
    refused(
        "flowLog: {export: [\"syslog://a:1\"]}",
        "flowLog.export",
        &["item 1", "not a collector's scheme", "json://"],
    );
    refused("flowLog: {mode: Off, export: [\"json://a:1\"]}", "flowLog.export", &["nothing to export", "mode: Leases"]);
    let nine = ["\"json://a:1\""; 9].join(", ");
    refused(&format!("flowLog: {{export: [{nine}]}}"), "flowLog.export", &["9 collectors", "at most 8"]);
    refused("flowLog: {retention: 5m}", "flowLog.retention", &["out of range"]);
    refused("[1, 2]", "", &["mapping"]);
}

#[test]
fn the_message_names_the_file_and_every_fault() {
    let error = Config::parse("/etc/spillway.yaml", b"tunnelPort: 0\nfirewall: off\n").unwrap_err().to_string();
    assert!(
        error.starts_with("the configuration /etc/spillway.yaml is refused:\n  tunnelPort: 0 is out of"),
        "{error}"
    );
    assert!(error.contains("\n  firewall: ") && error.contains("write respect or bypass"), "{error}");
    let missing = Config::load(Some(Path::new("/nonexistent.yaml"))).unwrap_err().to_string();
    assert!(missing.contains("/nonexistent.yaml"), "{missing}");
}

#[test]
fn timeouts_below_the_rfcs_are_refused() {
    for (field, value, rfc, least) in [
        ("tcpEstablished", "2h", "RFC 5382", "7440s"),
        ("tcpTransitory", "239s", "RFC 5382", "240s"),
        ("udp", "119s", "RFC 4787", "120s"),
        ("icmp", "59s", "RFC 5508", "60s"),
    ] {
        refused(&format!("timeouts: {{{field}: {value}}}"), &format!("timeouts.{field}"), &[rfc, least]);
    }
    refused("timeouts: {udp: 300500ms}", "timeouts.udp", &["whole seconds"]);
    refused("timeouts: {udp: 9000h}", "timeouts.udp", &["720h"]);
    refused("timeouts: {udp: 300}", "timeouts.udp", &["300s"]);
    refused("timeouts: {udp: 99999999999999999999h}", "timeouts.udp", &["not a duration"]);
    refused("timeouts: {udp: 9999999999999999h}", "timeouts.udp", &["not a duration"]);
}

#[test]
fn xdp_is_switched_off_with_and_without_quotes() {
    for (text, xdp) in [("Off", Xdp::Off), ("\"Off\"", Xdp::Off), ("Native", Xdp::Native), ("Auto", Xdp::Auto)] {
        assert_eq!(parse(&format!("xdp: {text}")).xdp, xdp, "{text}");
    }
    refused("xdp: generic", "xdp", &["write Auto or Native or Off"]);
    refused("xdp: On", "xdp", &["write Auto or Native or Off"]);
}

#[test]
fn transports_and_marks_are_checked() {
    for (text, transport) in [("vxlan", Transport::Vxlan), ("direct", Transport::Direct), ("Auto", Transport::Auto)] {
        assert_eq!(parse(&format!("transport: {text}")).transport, transport);
    }
    for mark in ["0", "0x3000", "-1", "0x100000000", "bit"] {
        refused(&format!("firewallMark: {mark}"), "firewallMark", &["power of two"]);
    }
    refused("transport: auto", "transport", &["unknown", "Auto or device or vxlan or direct"]);
}

#[test]
fn values_out_of_range_are_refused() {
    refused("tunnelPort: 65536", "tunnelPort", &["1 to 65535"]);
    refused("tunnelName: a/b", "tunnelName", &["interface"]);
    refused("tunnelName: sixteen-bytes-xx", "tunnelName", &["1 to 15"]);
    refused("maxFlows: 10", "maxFlows", &["1024"]);
    refused("exceptCIDRs: 10.0.0.0/8", "exceptCIDRs", &["not a list"]);
    refused("exceptCIDRs: [10.0.0.0/8, 10.0.0.1]", "exceptCIDRs", &["item 2", "10.0.0.1"]);
    refused("uplinks: [eth0/1]", "uplinks", &["item 1", "eth0/1"]);
    refused("probe: {count: 0}", "probe.count", &["1 to 16"]);
    refused("probe: {interval: 1ms}", "probe.interval", &["10ms"]);
    refused("metrics: 9473", "metrics", &["127.0.0.1:9473"]);
    refused("metrics: '[127.0.0.1]'", "metrics", &["127.0.0.1:9473"]);
    refused("maxEgressIPsPerNode: 0", "maxEgressIPsPerNode", &["1 to 255"]);
    refused("maxEgressIPsPerNode: 256", "maxEgressIPsPerNode", &["1 to 255"]);
    refused("drainTimeout: 0s", "drainTimeout", &["1s"]);
    refused("announce: bgp", "announce", &["arp or none"]);
    refused("foreignKinds: [calico]", "foreignKinds", &["[cilium, antrea]"]);
}

#[test]
fn times_that_contradict_each_other_are_refused() {
    refused("lease: {renew: 8s}\ndeadline: 500ms", "lease.duration", &["twice lease.renew"]);
    refused("deadline: 11s", "deadline", &["lease.duration", "lease.renew"]);
    let deadline = |text| parse(text).deadline;
    assert_eq!(deadline("lease: {renew: 1s, duration: 3s}\ndeadline: 2s"), Duration::from_secs(2));
    assert_eq!(deadline("lease: {renew: 1s, duration: 4s}"), Duration::from_secs(3), "what the lease allows");
    assert_eq!(deadline(""), Duration::from_secs(10));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Config::parse("c.yaml", &bytes);
    }

    #[test]
    fn arbitrary_values_of_known_fields_never_panic(
        field in prop_oneof![
            Just("tunnelPort"), Just("tunnelName"), Just("exceptCIDRs"), Just("maxFlows"), Just("deadline"), Just("metrics"),
            Just("timeouts: {udp"), Just("probe: {interval"), Just("lease: {renew")
        ],
        value in "[ -~µ€]{0,30}",
    ) {
        let close = if field.contains('{') { "}" } else { "" };
        if let Err(error) = Config::parse("c.yaml", format!("{field}: {value}{close}").as_bytes()) {
            prop_assert!(error.to_string().starts_with("the configuration c.yaml is refused:\n  "));
        }
    }
}

#[test]
fn documented_defaults_match_the_actual_defaults() {
    let settings = Config::settings();
    assert!(settings.len() > 25);
    for Setting { field, default, meaning, values } in settings {
        assert!(!meaning.is_empty() && !values.is_empty(), "{field}");
        if !default.starts_with('(') {
            let (section, end) =
                if field.contains('.') { (field.replace('.', ": {"), "}") } else { (field.clone(), "") };
            assert_eq!(parse(&format!("{section}: {default}{end}")), Config::default(), "{field}: {default}");
        }
    }
}

#[test]
fn brackets_are_accepted_around_addresses_of_both_families() {
    let parsed = |text: &str| super::socket_address(text).map(|address| address.to_string()).ok();
    for (text, address) in [("[192.0.2.7]:9473", "192.0.2.7:9473"), ("[2001:db8::7]:9473", "[2001:db8::7]:9473")] {
        assert_eq!(parsed(text).as_deref(), Some(address));
    }
    for text in ["[192.0.2.7]", "[[192.0.2.7]]:9473", "[]:9473", "192.0.2.7]:9473"] {
        assert_eq!(parsed(text), None, "{text}");
    }
}
