//! Tests with lines as the programs report them, and of requests.

use super::{packets::Packet, *};
use crate::ctl::views::testing::{dump, egress_index, policy_index};
use egress_common::verdict::Counter;

fn names() -> Names {
    Names::new(dump(), || Ok(dump()))
}

#[test]
fn interleaved_lines_of_two_cpus_become_packets_with_names() {
    let web = policy_index(&dump(), "web");
    let egress = egress_index(&dump(), "192.0.2.10");
    let lines = [
        "1 > <hook 1> 10.10.0.5:40000 to 203.0.113.7:443 <proto 6><flags 2> 74 bytes".to_owned(),
        "16777217 > <hook 1> [fd00::5]:53 to [2001:db8::7]:53 <proto 17><flags 0> 60 bytes".to_owned(),
        format!("1 it has no flow yet, and policy <policy {web}> matches the pod and the destination"),
        format!("16777217 = dropped: <drop {}>", Counter::DropNoGateway as u32),
        format!("1 a flow is opened, with port 3072 of <egress {egress}>"),
        "1 = sent".to_owned(),
        "2 its first line was lost".to_owned(),
        "2 = sent".to_owned(),
    ];
    let (mut packets, mut names) = (Packets::default(), names());
    let now: Timestamp = "2026-11-25T14:03:05.25Z".parse().unwrap();
    let done: Vec<Packet> = lines.iter().filter_map(|line| packets.take(line, now, &mut names)).collect();
    assert_eq!((done.len(), packets.begun()), (2, 2));
    assert_eq!(
        print(&done[0], Output::Table).unwrap(),
        "14:03:05.250000Z #2 from the pod: [fd00::5]:53 to [2001:db8::7]:53 UDP, 60 bytes\n    = dropped: \
         drop_no_gateway (new flows without a usable gateway)\n"
    );
    assert_eq!(
        print(&done[1], Output::Table).unwrap(),
        "14:03:05.250000Z #1 from the pod: 10.10.0.5:40000 to 203.0.113.7:443 TCP SYN, 74 bytes\n      it has no flow \
         yet, and policy web matches the pod and the destination\n      a flow is opened, with port 3072 of \
         192.0.2.10\n    = sent\n"
    );
    let json = one(&done[1], Output::Json).unwrap();
    assert_eq!(json.lines().count(), 1);
    assert_eq!(serde_json::from_str::<serde_json::Value>(&json).unwrap()["decisions"].as_array().unwrap().len(), 2);
}

#[test]
fn unknown_number_is_looked_up_again_before_it_is_shown() {
    let mut names = Names::new(Dump::default(), || Ok(dump()));
    let web = policy_index(&dump(), "web");
    assert_eq!(names.put_into(&format!("policy <policy {web}>")), "policy web");
    assert_eq!(names.put_into("policy <policy 4000>, <what 7> and <that"), "policy #4000, #7 and that");
}

#[test]
fn trace_request_has_the_pods_addresses_and_interface() {
    let options = |pod: &str, to: Option<&str>| TraceOptions {
        pod: pod.to_owned(),
        to: to.map(|to| to.parse().unwrap()),
        count: None,
        duration: Duration::from_secs(1),
    };
    let asked = |pod: &str, to| path(&query(&dump(), &options(pod, to)).unwrap()).unwrap();
    assert_eq!(asked("10.99.0.1", Some("203.0.113.7:443")), "/trace?ifindex=0&port=443&to=203.0.113.7&v4=10.99.0.1");
    let path = asked("prod/web-0", Some("2001:db8::7"));
    assert!(path.contains("v4=10.10.0.5") && path.contains("to=2001:db8::7") && !path.contains("port"), "{path}");
    let error = |pod: &str, to| query(&dump(), &options(pod, to)).unwrap_err().to_string();
    assert!(error("prod/none", None).contains("no pod prod/none of this node"));
    assert!(error("10.99.0.1", Some("2001:db8::7")).contains("no address of the family"));
    assert!("203.0.113.7:http".parse::<Peer>().unwrap_err().contains("203.0.113.7:443"));
}
