//! Questions over UDP, their answers, and when they make room for new flows. Row churn of docs/failures.md.

use super::{
    ended::{PATIENCE, POD, age, server},
    frames::{UDP, ip, ports, read, seal, udp},
    reused::Reused,
    rig::*,
};
use egress_common::{flow::queued, limits::ENDED_TICKS, verdict::Counter};
use std::{net::IpAddr, time::Instant};

/// Returns the pod's question to a server, from one of its ports.
fn question(pod: IpAddr, to: u32, from: u16) -> Vec<u8> {
    seal(ip(pod, server(to, pod), UDP, &[], &udp(from, 5_353, b"question")))
}

/// Sends the pod's question to server 1 from port 4,000, where the pod may have `flows` flows. Returns the server's answer, too.
fn asked(test: &str, pod: IpAddr, flows: u32) -> Option<(Reused, Vec<u8>)> {
    let mut view = scene();
    view.config.as_mut().unwrap().pod_flows = flows;
    let mut rig = Reused::new(test, &view)?;
    let sent = rig.run("pod_egress", &question(pod, 1, 4_000)).1;
    let seen = read(&sent).unwrap();
    let answer = seal(ip(seen.dst, seen.src, UDP, &[], &udp(5_353, ports(&sent).0, b"answer")));
    Some((rig, answer))
}

/// Makes all flows older, and waits until the collector has queued the one from this port of the pod as a question without an answer.
fn wait_unanswered(rig: &Rig, from: u16) {
    age(rig, ENDED_TICKS);
    let is_unanswered = || {
        let maps = rig.writer.maps();
        let (v4, v6) = (maps.v4.flows.entries().unwrap(), maps.v6.flows.entries().unwrap());
        let v4 = v4.iter().map(|(key, flow)| (key.src_port, flow.queued));
        let v6 = v6.iter().map(|(key, flow)| (key.src_port, flow.queued));
        v4.chain(v6).any(|flow| flow == (from.to_be(), queued::UNANSWERED))
    };
    let start = Instant::now();
    while !is_unanswered() {
        assert!(start.elapsed() < PATIENCE, "{:?}", rig.writer.maps().counters());
    }
}

#[test]
fn churn_a_stream_from_the_server_is_no_answered_query() {
    for (n, pod) in POD.map(addr).into_iter().enumerate() {
        let Some((mut rig, news)) = asked(&format!("churn-stream-{n}"), pod, 1) else { return };
        for _ in 0..2 {
            assert_eq!(rig.run("uplink_ingress", &news).0, REDIRECT);
            age(&rig, 2);
        }
        rig.dropped("pod_egress", &question(pod, 2, 4_001), Counter::DropPodShare);
        assert_eq!(rig.run("uplink_ingress", &news).0, REDIRECT);
    }
}

#[test]
fn churn_a_late_answer_is_no_stream() {
    for (n, pod) in POD.map(addr).into_iter().enumerate() {
        let Some((mut rig, answer)) = asked(&format!("churn-late-{n}"), pod, 1) else { return };
        wait_unanswered(&rig, 4_000);
        assert_eq!(rig.run("uplink_ingress", &answer).0, REDIRECT);
        age(&rig, 2);
        assert_eq!(rig.run("pod_egress", &question(pod, 2, 4_001)).0, REDIRECT, "the answered question makes room");
    }
}

#[test]
fn churn_an_answered_question_stays_answered_after_the_collectors_round() {
    for (n, pod) in POD.map(addr).into_iter().enumerate() {
        let Some((mut rig, news)) = asked(&format!("churn-round-{n}"), pod, 2) else { return };
        assert_eq!(rig.run("uplink_ingress", &news).0, REDIRECT);
        age(&rig, ENDED_TICKS);
        // The collector takes flows in turn: once it has queued this one, it has looked at the first, too.
        assert_eq!(rig.run("pod_egress", &question(pod, 2, 4_001)).0, REDIRECT);
        wait_unanswered(&rig, 4_001);
        // The second packet makes the exchange a stream, whose place no new flow takes.
        assert_eq!(rig.run("uplink_ingress", &news).0, REDIRECT);
        assert_eq!(rig.run("pod_egress", &question(pod, 3, 4_002)).0, REDIRECT, "the unanswered question makes room");
        assert_eq!((rig.run("uplink_ingress", &news).0, rig.count(Counter::FlowsReclaimed)), (REDIRECT, 1));
    }
}
