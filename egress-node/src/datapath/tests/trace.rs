//! The programs of a trace: the packets and the decisions that they report.

use super::{
    frames::{TCP, UDP, ip, seal, tcp, udp},
    rig::*,
};
use crate::datapath::{load::Programs, trace::Lines};
use egress_common::{net, trace::TraceFilter, verdict::Counter};
use std::net::SocketAddr;

const SYN: u8 = 2;
const ACK: u8 = 16;

/// Returns the scene with the programs of a trace of the pod.
fn traced(test: &str, filter: &TraceFilter) -> Option<(Rig, Lines)> {
    let mut rig = Rig::new(test, &scene())?;
    rig.programs = Programs::load_trace(rig.pins(), SIZES, filter).unwrap();
    let lines = Lines::of(&mut rig.programs).unwrap();
    Some((rig, lines))
}

fn of_pod() -> TraceFilter {
    TraceFilter { v4: net::v4(POD4.parse().unwrap()), v6: net::v6(POD6.parse().unwrap()), ..TraceFilter::NONE }
}

fn segment(from: &str, to: &str, flags: u8) -> Vec<u8> {
    seal(ip(addr(from), addr(to), TCP, &[], &tcp(40_000, 443, flags, &[])))
}

/// Returns the lines without the packets' numbers, grouped by packet.
fn told(lines: &mut Lines) -> Vec<String> {
    lines.take().iter().map(|line| line.split_once(' ').unwrap().1.to_owned()).collect()
}

#[test]
fn each_decision_about_the_pods_packets_is_told() {
    let Some((mut rig, mut lines)) = traced("trace-tells", &of_pod()) else { return };
    for (pod, server) in [(POD4, SERVER4), (POD6, SERVER6)] {
        let end = |address: &str, port| SocketAddr::new(addr(address), port).to_string();
        let ends = format!("{} to {}", end(pod, 40_000), end(server, 443));
        rig.run("pod_egress", &segment(pod, server, SYN));
        let first = told(&mut lines);
        assert!(first[0].starts_with(&format!("> <hook 1> {ends} <proto 6><flags 2> ")), "{first:?}");
        assert!(first[1].contains("it has no flow yet, and policy <policy "), "{first:?}");
        assert!(first[2].contains("a flow is opened, with port "), "{first:?}");
        assert!(first[3].contains("it belongs to a flow of policy "), "{first:?}");
        assert!(first[4].contains("its source becomes port "), "{first:?}");
        assert!(first[5].contains("it goes to node <node "), "{first:?}");
        assert!(first[6].starts_with("= "), "{first:?}");
        assert_eq!(first.len(), 7, "{first:?}");

        rig.run("pod_egress", &segment(pod, server, ACK));
        assert!(told(&mut lines)[1].contains("it belongs to a flow of policy "));
        let excepted = if pod == POD4 { "198.18.3.4" } else { "fd00:2::7" };
        rig.run("pod_egress", &segment(pod, excepted, SYN));
        assert!(told(&mut lines)[1].contains("no policy that selects its sender has this destination"));
    }
    let stray = seal(ip(addr(POD4), addr(SERVER4), TCP, &[], &tcp(41_000, 443, ACK, &[])));
    rig.run("pod_egress", &stray);
    let dropped = format!("= dropped: <drop {}>", Counter::DropUnknownFlow as u32);
    assert_eq!(told(&mut lines).last(), Some(&dropped));
    assert_eq!(lines.seen().unwrap(), 7);
}

#[test]
fn trace_reports_no_packets_of_other_pods() {
    let Some((mut rig, mut lines)) = traced("trace-others", &of_pod()) else { return };
    rig.run("pod_egress", &segment(STRANGER, SERVER4, SYN));
    assert_eq!(told(&mut lines), [""; 0]);

    let to = |to: &str, port: u16| TraceFilter { to: net::any(addr(to)), to_port: port.to_be().into(), ..of_pod() };
    for (filter, shown) in
        [(to(SERVER4, 0), true), (to(SERVER4, 443), true), (to(SERVER4, 80), false), (to("203.0.113.6", 443), false)]
    {
        let (mut rig, mut lines) = traced("trace-filter", &filter).unwrap();
        rig.run("pod_egress", &segment(POD4, SERVER4, SYN));
        assert_eq!(!told(&mut lines).is_empty(), shown, "{filter:?}");
        assert_eq!(lines.seen().unwrap(), u64::from(shown));
    }
    // With the index of an interface that only this pod has: everything that comes out of it.
    let (mut rig, mut lines) = traced("trace-liar", &TraceFilter { ifindex: 1, ..of_pod() }).unwrap();
    rig.run("pod_egress", &segment(STRANGER, SERVER4, SYN));
    assert!(!told(&mut lines).is_empty());
}

#[test]
fn too_many_packets_at_once_are_counted() {
    let Some((mut rig, mut lines)) = traced("trace-flood", &of_pod()) else { return };
    let frame = ip(addr(POD4), addr(SERVER4), UDP, &[], &udp(40_000, 53, b"question"));
    // More packets in a moment than are reported, and more in total than the buffer has room for.
    const PACKETS: u64 = 20_000;
    for _ in 0..PACKETS {
        rig.run("pod_egress", &frame);
    }
    let begun = lines.take().iter().filter(|line| line.contains(" > ")).count() as u64;
    assert!((1..PACKETS / 2).contains(&begun), "{begun}");
    assert_eq!(lines.seen().unwrap(), PACKETS);
}
