//! The programs' counts for the flows of a policy and a namespace.

use super::{
    frames::{TCP, UDP, ip, read, seal, tcp, udp},
    reused::Reused,
    rig::*,
    scenes,
};
use egress_common::{
    traffic::{OTHER, REFUSALS, Traffic},
    verdict::Counter,
};
use egress_core::encode::{
    EndpointView, NodeView,
    accounts::{Account, accounts},
};
use std::net::IpAddr;

const SYN: u8 = 2;
/// Words of `struct __sk_buff`.
const GSO_SEGS: usize = 41;
const GSO_SIZE: usize = 44;
const ETHERNET: u64 = 14;

fn of(rig: &Rig, egress_ip: Option<IpAddr>) -> Traffic {
    let wanted = Account { egress_ip, policy: scenes::policy_id(0), namespace: scenes::endpoint_id(0).namespace };
    let all = accounts(rig.writer.present());
    let number = all.iter().find(|(_, account)| **account == wanted).map(|(number, _)| *number);
    rig.writer.maps().traffic(number.expect("an account")).unwrap()
}

fn answer(out: &[u8]) -> Vec<u8> {
    let r = read(out).unwrap();
    let mut body = out[r.l4..].to_vec();
    body.swap(0, 2);
    body.swap(1, 3);
    seal(ip(r.dst, r.src, r.proto, &[], &body))
}

#[test]
fn packets_and_bytes_are_counted_both_ways_by_policy_namespace_and_egress_ip() {
    let Some(mut rig) = Reused::new("traffic", &scene()) else { return };
    for (pod, egress, server) in [(POD4, EGRESS4, SERVER4), (POD6, EGRESS6, SERVER6)] {
        let question = seal(ip(addr(pod), addr(server), UDP, &[], &udp(40_000, 53, b"question")));
        let mut expected = Traffic::NONE;
        let size = question.len() as u64 - ETHERNET;
        for n in 1..=3 {
            let (verdict, out) = rig.run("pod_egress", &question);
            assert_eq!(verdict, REDIRECT);
            assert_eq!(rig.run("uplink_ingress", &answer(&out)).0, REDIRECT, "{:?}", rig.writer.maps().counters());
            expected = Traffic {
                sent_packets: n,
                sent_bytes: n * size,
                received_packets: n,
                received_bytes: n * size,
                opened: 1,
                ..expected
            };
            assert_eq!(of(&rig, Some(addr(egress))), expected);
        }
        // A packet that stands for several.
        let fields = [(GSO_SEGS, 4), (GSO_SIZE, 2)];
        rig.run_with("pod_egress", &question, &fields).unwrap();
        assert_eq!(of(&rig, Some(addr(egress))).sent_packets, expected.sent_packets + 4);
    }
    assert_eq!(of(&rig, None), Traffic::NONE, "nothing was refused");
    assert_eq!(rig.writer.maps().traffic(OTHER.into()).unwrap(), Traffic::NONE, "everything has an account");
}

#[test]
fn refused_flows_are_counted_by_reason() {
    let syn = |port| seal(ip(addr(POD4), addr(SERVER4), TCP, &[], &tcp(port, 443, SYN, &[])));
    let refuse = |change: &dyn Fn(&mut NodeView), reason: Counter| {
        let mut view = scene();
        change(&mut view);
        let Some(mut rig) = Reused::new(reason.name(), &view) else { return };
        rig.dropped("pod_egress", &syn(1), reason);
        rig.dropped("pod_egress", &syn(2), reason);
        let refused = of(&rig, None).refused;
        let expected = REFUSALS.map(|other| if other == reason { 2 } else { 0 });
        assert_eq!(refused, expected, "{reason:?}");
    };
    let unusable =
        |view: &mut NodeView| view.policies.values_mut().flat_map(|p| &mut p.slots).for_each(|s| s.usable = false);
    let no_blocks = |view: &mut NodeView| view.egress_ips.values_mut().for_each(|e| e.blocks.clear());
    refuse(&unusable, Counter::DropNoGateway);
    refuse(&no_blocks, Counter::DropNoPort);
}

#[test]
fn an_account_that_is_given_away_begins_with_nothing() {
    let Some(mut rig) = Reused::new("traffic-anew", &scene()) else { return };
    let question = seal(ip(addr(POD4), addr(SERVER4), UDP, &[], &udp(40_000, 53, b"question")));
    assert_eq!(rig.run("pod_egress", &question).0, REDIRECT);
    assert_eq!(of(&rig, Some(addr(EGRESS4))).opened, 1);
    // The pod is removed, and then a pod with its address appears.
    let mut view = scene();
    view.endpoints.remove(&scenes::endpoint_id(0));
    rig.write(&view);
    assert_eq!(accounts(rig.writer.present()), Default::default());
    let other = scene().endpoints.remove(&scenes::endpoint_id(0)).unwrap();
    view.endpoints.insert(scenes::endpoint_id(0), EndpointView { ..other });
    rig.write(&view);
    assert_eq!(of(&rig, Some(addr(EGRESS4))), Traffic::NONE);
}
