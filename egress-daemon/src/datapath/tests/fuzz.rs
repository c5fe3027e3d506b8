//! Arbitrary bytes through the programs.

use super::{
    frames::{ICMP, ICMPV6, TCP, UDP, icmp, ip, read, seal, sums, tcp, udp},
    rig::*,
};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};

/// Packets to start from: from the pod, and towards the egress IP.
fn seeds() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for (pod, egress, server) in [(POD4, EGRESS4, SERVER4), (POD6, EGRESS6, SERVER6)] {
        let (pod, egress, server) = (addr(pod), addr(egress), addr(server));
        let (icmp_proto, echo, error) = if pod.is_ipv4() { (ICMP, 8, 3) } else { (ICMPV6, 128, 1) };
        let own = egress_common::port_block::first_port(OWN_BLOCKS[0]);
        for (src, dst, sport, dport) in [(pod, server, 40_000, 443), (server, egress, 443, own)] {
            all.push(seal(ip(src, dst, TCP, &[], &tcp(sport, dport, 2, &[2, 4, 0xff, 0xff]))));
            all.push(seal(ip(src, dst, UDP, &[], &udp(sport, dport, b"data"))));
            all.push(seal(ip(src, dst, icmp_proto, &[], &icmp(echo, own, b"data"))));
            let inner = ip(dst, src, UDP, &[], &udp(dport, sport, b"data"));
            let quote = [&[error, 0, 0, 0, 0, 0, 0, 0][..], &inner[14..]].concat();
            all.push(seal(ip(src, dst, icmp_proto, &[], &quote)));
            if !pod.is_ipv4() {
                let fragment = [UDP, 0, 0, 1, 0, 0, 0, 7];
                all.push(seal(ip(src, dst, 44, &fragment, &udp(sport, dport, b"data"))));
            }
        }
    }
    all
}

/// A packet (no shorter than what the kernel accepts for a test run) with some bytes changed, cut off or added; or no packet at all.
fn frame() -> impl Strategy<Value = Vec<u8>> {
    let damage = vec((12usize..100, any::<u8>()), 0..6);
    let damaged = (proptest::sample::select(seeds()), damage, 34usize..160).prop_map(|(mut frame, damage, len)| {
        for (at, byte) in damage {
            if let Some(b) = frame.get_mut(at) {
                *b = byte;
            }
        }
        if len < 110 {
            frame.truncate(len);
        }
        frame
    });
    prop_oneof![8 => damaged, 1 => vec(any::<u8>(), 34..200)]
}

#[test]
fn no_packet_leaves_changed_with_a_broken_checksum() {
    let Some(mut rig) = Rig::new("fuzz", &scene()) else { return };
    let mut runner = TestRunner::new(Config { cases: 4_000, failure_persistence: None, ..Config::default() });
    let (rig, sent) = (std::cell::RefCell::new(&mut rig), std::cell::Cell::new(0));
    runner
        .run(&frame(), |frame| {
            for program in ["pod_egress", "tunnel_ingress", "uplink_ingress"] {
                let Some((verdict, out)) = rig.borrow_mut().try_run(program, &frame) else { continue };
                match verdict {
                    NEXT => prop_assert_eq!(&out, &frame, "{} changed what it passes", program),
                    SHOT => {}
                    REDIRECT => {
                        let Some(before) = read(&frame) else {
                            return Err(TestCaseError::fail(format!("{program} sends what nobody can read")));
                        };
                        prop_assert_eq!(read(&out).map(|r| (r.proto, r.l4)), Some((before.proto, before.l4)));
                        prop_assert_eq!(sums(&frame), sums(&out), "{}: {:02x?} {:02x?}", program, frame, out);
                        sent.set(sent.get() + 1);
                    }
                    other => return Err(TestCaseError::fail(format!("{program} returns {other}"))),
                }
            }
            Ok(())
        })
        .unwrap();
    assert!(sent.get() > 500, "only {} packets were sent: the test has lost its subject", sent.get());
}
