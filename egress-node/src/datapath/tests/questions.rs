//! Questions over UDP: what the collector's round does with one that has its answer. Row churn of docs/failures.md.

use super::{
    ended::{PATIENCE, POD, age, limited, server},
    frames::{UDP, ip, ports, read, seal, udp},
    reused::Reused,
    rig::*,
};
use egress_common::{flow::queued, limits::ENDED_TICKS, verdict::Counter};
use std::time::Instant;

/// Returns whether a flow from this port of the pod is queued as a question without an answer.
fn is_unanswered(rig: &Rig, from: u16) -> bool {
    let maps = rig.writer.maps();
    let (v4, v6) = (maps.v4.flows.entries().unwrap(), maps.v6.flows.entries().unwrap());
    let v4 = v4.iter().map(|(key, flow)| (key.src_port, flow.queued));
    let v6 = v6.iter().map(|(key, flow)| (key.src_port, flow.queued));
    v4.chain(v6).any(|flow| flow == (from.to_be(), queued::UNANSWERED))
}

#[test]
fn churn_an_answered_question_stays_answered_after_the_collectors_round() {
    for (n, pod) in POD.into_iter().enumerate() {
        let pod = addr(pod);
        let mut view = limited();
        view.config.as_mut().unwrap().pod_flows = 2;
        let Some(mut rig) = Reused::new(&format!("churn-round-{n}"), &view) else { return };
        let asks = |to: u32, from: u16| seal(ip(pod, server(to, pod), UDP, &[], &udp(from, 5_353, b"subscribe")));
        let sent = rig.run("pod_egress", &asks(1, 4_000)).1;
        let r = read(&sent).unwrap();
        let news = seal(ip(r.dst, r.src, UDP, &[], &udp(5_353, ports(&sent).0, b"news")));
        assert_eq!(rig.run("uplink_ingress", &news).0, REDIRECT);
        age(&rig, ENDED_TICKS);
        // The collector takes flows in turn: once it has queued this one, it has looked at the first, too.
        assert_eq!(rig.run("pod_egress", &asks(2, 4_001)).0, REDIRECT);
        age(&rig, ENDED_TICKS);
        let start = Instant::now();
        while !is_unanswered(&rig, 4_001) {
            assert!(start.elapsed() < PATIENCE, "{:?}", rig.writer.maps().counters());
        }
        // The second packet makes the exchange a stream, whose place no new flow takes.
        assert_eq!(rig.run("uplink_ingress", &news).0, REDIRECT);
        assert_eq!(rig.run("pod_egress", &asks(3, 4_002)).0, REDIRECT, "the unanswered question makes room");
        assert_eq!((rig.run("uplink_ingress", &news).0, rig.count(Counter::FlowsReclaimed)), (REDIRECT, 1));
    }
}
