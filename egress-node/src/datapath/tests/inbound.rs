//! Connections that the outside opened, which have a table of their own. Rows inbound-flood and reused-pod-ip of docs/failures.md.

use super::{
    datagrams::Part,
    frames::{ICMP, ICMPV6, TCP, UDP, icmp, ip, seal, tcp, udp},
    reused::Reused,
    rig::*,
    scenes,
};
use egress_common::{config::flags, endpoint::policy_flags, limits::MAX_INBOUND, net, verdict::Counter};
use egress_core::encode::NodeView;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
const POD: [&str; 2] = [POD4, POD6];
const SERVER: [&str; 2] = [SERVER4, SERVER6];

/// Returns the scene without a gateway, so that everything leaves with the node's address.
fn without_gateway() -> NodeView {
    let mut view = scene();
    for policy in view.policies.values_mut() {
        policy.slots.clear();
        policy.flags = policy_flags::ON_NO_GATEWAY_NODE_IP;
    }
    view
}

/// Returns one of many hosts outside.
fn host(n: u32, like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::from(0xc800_0000 + n).into(),
        IpAddr::V6(_) => Ipv6Addr::from((0x2001_0db8_u128 << 96) | 0xf << 80 | u128::from(n)).into(),
    }
}

#[test]
fn inbound_flood_of_records_takes_no_place_in_the_flow_table() {
    for (pod, neighbor) in POD.into_iter().zip(NEIGHBOR) {
        let (pod, neighbor) = (addr(pod), addr(neighbor));
        let Some(mut rig) = Reused::new(&format!("inbound-flood-{}", pod.is_ipv4()), &with_neighbor()) else { return };
        let question = |n: u32| seal(ip(host(n, pod), pod, UDP, &[], &udp(1024, 53, b"?")));
        let answer = |n: u32| seal(ip(pod, host(n, pod), UDP, &[], &udp(53, 1024, b"!")));
        let segment = |flags| seal(ip(neighbor, host(0, pod), TCP, &[], &tcp(40_000, 443, flags, &[])));
        assert_eq!(rig.run("pod_egress", &segment(SYN)).0, REDIRECT, "before the flood");
        let all = 200_000;
        for n in 0..all {
            assert_eq!(rig.run("pod_ingress", &question(n)).0, NEXT);
        }
        assert_eq!(rig.count(Counter::Untouched), u64::from(all));
        // The newest question is answered, the existing flow is unaffected, and other flows have room.
        assert_eq!(rig.run("pod_egress", &answer(all - 1)).0, NEXT);
        assert_eq!(rig.run("pod_egress", &segment(ACK)).0, REDIRECT, "{:?}", rig.writer.maps().counters());
        for n in 0..4_000 {
            let other = seal(ip(neighbor, host(n % 100, pod), UDP, &[], &udp(1024 + n as u16, 53, b"?")));
            assert_eq!(rig.run("pod_egress", &other).0, REDIRECT, "{n}: {:?}", rig.writer.maps().counters());
        }
        let maps = rig.writer.maps();
        let records = match pod {
            IpAddr::V4(_) => maps.v4.inbound.entries().unwrap().len(),
            IpAddr::V6(_) => maps.v6.inbound.entries().unwrap().len(),
        };
        assert!(records <= MAX_INBOUND);
    }
}

/// Makes every record of an inbound connection older by `ticks`.
fn age(rig: &Rig, ticks: u32) {
    let mut maps = crate::datapath::maps::Maps::open(rig.pins()).unwrap();
    for (key, mut record) in maps.v4.inbound.entries().unwrap() {
        record.last_seen -= ticks;
        maps.v4.inbound.set(&key, &record).unwrap();
    }
    for (key, mut record) in maps.v6.inbound.entries().unwrap() {
        record.last_seen -= ticks;
        maps.v6.inbound.set(&key, &record).unwrap();
    }
}

#[test]
fn inbound_record_ends_on_idle_reset_or_a_connection_of_the_pod() {
    for (pod, server) in POD.into_iter().zip(SERVER) {
        let (pod, server) = (addr(pod), addr(server));
        let mut view = scene();
        (view.config.as_mut().unwrap().tcp_established, view.config.as_mut().unwrap().udp) = (1_000, 100);
        let Some(mut rig) = Reused::new(&format!("inbound-ends-{}", pod.is_ipv4()), &view) else { return };
        let asks = |flags| seal(ip(server, pod, TCP, &[], &tcp(40_000, 8080, flags, &[])));
        let says = |flags| seal(ip(pod, server, TCP, &[], &tcp(8080, 40_000, flags, &[])));
        let open = |rig: &mut Rig| {
            assert_eq!(rig.run("pod_ingress", &asks(SYN)).0, NEXT);
            for flags in [SYN | ACK, ACK] {
                assert_eq!(rig.run("pod_egress", &says(flags)).0, NEXT);
            }
        };
        open(&mut rig);
        age(&rig, 900);
        assert_eq!(rig.run("pod_egress", &says(ACK)).0, NEXT, "established, and not idle for too long");
        age(&rig, 1_100);
        rig.dropped("pod_egress", &says(ACK), Counter::DropUnknownFlow);
        open(&mut rig);
        assert_eq!(rig.run("pod_egress", &says(RST | ACK)).0, NEXT);
        rig.dropped("pod_egress", &says(ACK), Counter::DropUnknownFlow);
        // Opened, but never answered: the short idle timeout applies.
        assert_eq!(rig.run("pod_ingress", &asks(SYN)).0, NEXT);
        age(&rig, 250);
        rig.dropped("pod_egress", &says(ACK), Counter::DropUnknownFlow);
        open(&mut rig);
        assert_eq!(rig.run("pod_egress", &says(SYN)).0, REDIRECT, "the pod's own connection");

        let question = seal(ip(server, pod, UDP, &[], &udp(40_000, 53, b"?")));
        let answer = seal(ip(pod, server, UDP, &[], &udp(53, 40_000, b"!")));
        assert_eq!(rig.run("pod_ingress", &question).0, NEXT);
        age(&rig, 90);
        assert_eq!(rig.run("pod_egress", &answer).0, NEXT);
        age(&rig, 110);
        assert_eq!(rig.run("pod_egress", &answer).0, REDIRECT, "the pod's own query");
    }
}

#[test]
fn reused_pod_ip_new_pod_inherits_no_inbound_records() {
    for (n, (pod, server)) in POD.into_iter().zip(SERVER).enumerate() {
        let (pod, server) = (addr(pod), addr(server));
        let Some(mut rig) = Reused::new(&format!("inbound-inherited-{n}"), &scene()) else { return };
        let question = seal(ip(server, pod, UDP, &[], &udp(40_000, 53, b"?")));
        let answer = seal(ip(pod, server, UDP, &[], &udp(53, 40_000, b"!")));
        assert_eq!(rig.run("pod_ingress", &question).0, NEXT);
        assert_eq!(rig.run("pod_egress", &answer).0, NEXT);
        // The tables change, the pod does not.
        let mut view = with_neighbor();
        rig.write(&view);
        assert_eq!(rig.run("pod_egress", &answer).0, NEXT);
        let dead = view.endpoints.remove(&scenes::endpoint_id(0)).unwrap();
        view.endpoints.insert(scenes::endpoint_id(8), dead);
        rig.write(&view);
        assert_eq!(rig.run("pod_egress", &answer).0, REDIRECT);
        let maps = rig.writer.maps();
        let of_pod = match pod {
            IpAddr::V4(a) => maps.v4.inbound.entries().unwrap().into_keys().any(|k| k.src == net::v4(a)),
            IpAddr::V6(a) => maps.v6.inbound.entries().unwrap().into_keys().any(|k| k.src == net::v6(a)),
        };
        assert!(!of_pod, "the dead pod's record remains");
    }
}

/// Row syn-ack of docs/failures.md.
#[test]
fn syn_ack_without_a_record_passes_only_if_inbound_may_be_unseen() {
    let mut view = scene();
    let Some(mut rig) = Reused::new("syn-ack", &view) else { return };
    for (pod, server) in POD.into_iter().zip(SERVER) {
        let (pod, server) = (addr(pod), addr(server));
        let says = |flags| seal(ip(pod, server, TCP, &[], &tcp(8080, 40_000, flags, &[])));
        view.config.as_mut().unwrap().flags &= !flags::UNSEEN_INBOUND;
        rig.write(&view);
        for flags in [SYN | ACK, ACK] {
            rig.dropped("pod_egress", &says(flags), Counter::DropUnknownFlow);
        }
        rig.dropped("pod_egress", &echo(pod, server, true, 9, b"pong"), Counter::DropUnknownFlow);
        // Connections that our program has seen are answered.
        let asks = seal(ip(server, pod, TCP, &[], &tcp(40_001, 8080, SYN, &[])));
        assert_eq!(rig.run("pod_ingress", &asks).0, NEXT);
        let answer = seal(ip(pod, server, TCP, &[], &tcp(8080, 40_001, SYN | ACK, &[])));
        assert_eq!(rig.run("pod_egress", &answer).0, NEXT);
        view.config.as_mut().unwrap().flags |= flags::UNSEEN_INBOUND;
        rig.write(&view);
        rig.dropped("pod_egress", &says(ACK), Counter::DropUnknownFlow);
        assert_eq!(rig.run("pod_egress", &echo(pod, server, true, 9, b"pong")).0, NEXT);
        for flags in [SYN | ACK, ACK] {
            assert_eq!(rig.run("pod_egress", &says(flags)).0, NEXT);
        }
        // The outside opened this connection: `existingConnections: Drop` does not apply to it.
        let mut cuts = view.clone();
        cuts.policies.values_mut().for_each(|policy| policy.flags = policy_flags::EXISTING_DROP);
        rig.write(&cuts);
        assert_eq!(rig.run("pod_egress", &says(ACK)).0, NEXT);
        rig.write(&view);
    }
}

/// Row history of docs/failures.md.
#[test]
fn history_of_a_pod_ends_at_its_tick_and_used_connections_continue() {
    let mut view = scene();
    view.config.as_mut().unwrap().tcp_established = 1_000;
    let Some(mut rig) = Reused::new("history", &view) else { return };
    for (pod, server) in POD.into_iter().zip(SERVER) {
        let (pod, server) = (addr(pod), addr(server));
        let says = |port| seal(ip(pod, server, TCP, &[], &tcp(port, 443, ACK, &[])));
        let mut until = |rig: &mut Rig, tick: u32| {
            view.endpoints.get_mut(&scenes::endpoint_id(0)).unwrap().history_until = tick;
            rig.write(&view);
        };
        // Far enough from both ends, because time passes during the test.
        until(&mut rig, now_tick() + 500);
        assert_eq!(rig.run("pod_egress", &says(50_000)).0, NEXT);
        until(&mut rig, now_tick() - 1);
        rig.dropped("pod_egress", &says(50_001), Counter::DropUnknownFlow);
        assert_eq!(rig.run("pod_egress", &says(50_000)).0, NEXT, "it was used in time");
        until(&mut rig, 0);
        rig.dropped("pod_egress", &says(50_002), Counter::DropUnknownFlow);
    }
}

/// Data of a datagram that is sent in several fragments.
const DATA: [u8; 144] = [7; 144];

/// Returns an echo request from one host to another, or the answer to one.
fn echo(from: IpAddr, to: IpAddr, answers: bool, id: u16, data: &[u8]) -> Vec<u8> {
    let (kinds, protocol) = if from.is_ipv4() { ([8, 0], ICMP) } else { ([128, 129], ICMPV6) };
    seal(ip(from, to, protocol, &[], &icmp(kinds[usize::from(answers)], id, data)))
}

/// Runs the fragments of a pod's datagram that is left alone, first as the pod sends them and then as they leave.
#[track_caller]
fn passes_in_parts(rig: &mut Rig, whole: &[u8], id: u16) {
    let parts = |id| Part::ORDERED.map(|part| part.of(whole, id));
    for part in parts(id) {
        assert_eq!(rig.run("pod_egress", &part), (NEXT, part.clone()), "{:?}", rig.writer.maps().counters());
    }
    // The host may have reassembled the datagram and fragmented it again.
    for part in parts(id).into_iter().chain(parts(id + 1)) {
        let left = rig.run_with("exit_egress", &part, &[(INGRESS_IFINDEX, 1)]).unwrap();
        assert_eq!(left, (NEXT, part.clone()), "{:?}", rig.writer.maps().counters());
    }
}

/// Row fragments of docs/failures.md.
#[test]
fn fragments_of_a_pods_answers_are_left_alone_like_their_first_one() {
    for firewall in [0, flags::RESPECT_FIREWALL] {
        let mut view = scene();
        view.config.as_mut().unwrap().flags |= firewall;
        let Some(mut rig) = Reused::new(&format!("inbound-fragments-{firewall}"), &view) else { return };
        for (pod, server) in POD.into_iter().zip(SERVER) {
            let (pod, server) = (addr(pod), addr(server));
            let question = seal(ip(server, pod, UDP, &[], &udp(40_000, 53, b"?")));
            let answer = seal(ip(pod, server, UDP, &[], &udp(53, 40_000, &DATA)));
            let ping = echo(server, pod, false, 9, b"ping");
            let pong = echo(pod, server, true, 9, &DATA);
            for (n, (asked, answered)) in [(question, answer), (ping, pong)].into_iter().enumerate() {
                assert_eq!(rig.run("pod_ingress", &asked).0, NEXT);
                passes_in_parts(&mut rig, &answered, 100 + 10 * n as u16);
                // The last fragment overtakes the first one.
                let [first, _, last] = Part::ORDERED.map(|part| part.of(&answered, 105 + 10 * n as u16));
                if firewall == 0 {
                    rig.dropped("pod_egress", &last, Counter::FragmentHeld);
                    rig.dropped("pod_egress", &first, Counter::DatagramOrdered);
                }
                assert_eq!(rig.run("pod_egress", &first).0, NEXT);
                assert_eq!(rig.run("pod_egress", &last).0, NEXT);
            }
        }
    }
}

#[test]
fn what_leaves_with_the_nodes_address_includes_fragments_and_later_segments() {
    let view = without_gateway();
    let Some(mut rig) = Reused::new("as-node", &view) else { return };
    for (pod, server) in POD.into_iter().zip(SERVER) {
        let (pod, server) = (addr(pod), addr(server));
        passes_in_parts(&mut rig, &seal(ip(pod, server, UDP, &[], &udp(40_000, 53, &DATA))), 7);
        passes_in_parts(&mut rig, &echo(pod, server, false, 9, &DATA), 17);
        let segment = |port, flags| seal(ip(pod, server, TCP, &[], &tcp(port, 443, flags, &[])));
        for flags in [SYN, ACK] {
            assert_eq!(rig.run("pod_egress", &segment(40_000, flags)).0, NEXT, "{:?}", rig.writer.maps().counters());
        }
        // A gateway is back.
        rig.write(&scene());
        assert_eq!(rig.run("pod_egress", &segment(40_000, ACK)).0, NEXT, "{:?}", rig.writer.maps().counters());
        assert_eq!(rig.run("pod_egress", &segment(40_001, SYN)).0, REDIRECT);
        rig.write(&view);
    }
}

#[test]
fn existing_connections_drop_ends_only_connections_that_the_pod_opened() {
    let without = without_gateway();
    let mut cuts = scene();
    cuts.policies.values_mut().for_each(|policy| policy.flags = policy_flags::EXISTING_DROP);
    let Some(mut rig) = Reused::new("existing-drop", &without) else { return };
    for (pod, server) in POD.into_iter().zip(SERVER) {
        let (pod, server) = (addr(pod), addr(server));
        let from_pod = |ports: (u16, u16), flags| seal(ip(pod, server, TCP, &[], &tcp(ports.0, ports.1, flags, &[])));
        let asked = seal(ip(server, pod, TCP, &[], &tcp(50_000, 8080, SYN, &[])));
        assert_eq!(rig.run("pod_ingress", &asked).0, NEXT);
        assert_eq!(rig.run("pod_egress", &from_pod((40_000, 443), SYN)).0, NEXT);
        rig.write(&scene());
        assert_eq!(rig.run("pod_egress", &from_pod((40_000, 443), ACK)).0, NEXT, "a gateway is back");
        rig.write(&cuts);
        rig.dropped("pod_egress", &from_pod((40_000, 443), ACK), Counter::DropUnknownFlow);
        assert_eq!(rig.run("pod_egress", &from_pod((8080, 50_000), SYN | ACK)).0, NEXT, "the outside opened it");
        rig.write(&without);
    }
}

#[test]
fn own_and_inbound_pings_with_the_same_identifier_stay_separate() {
    let Some(mut rig) = Reused::new("inbound-ping", &scene()) else { return };
    for (pod, server) in POD.into_iter().zip(SERVER) {
        let (pod, server) = (addr(pod), addr(server));
        assert_eq!(rig.run("pod_ingress", &echo(server, pod, false, 7, b"ping")).0, NEXT);
        assert_eq!(rig.run("pod_egress", &echo(pod, server, true, 7, b"ping")).0, NEXT);
        for data in [&b"own"[..], &DATA] {
            assert_eq!(rig.run("pod_egress", &echo(pod, server, false, 7, data)).0, REDIRECT, "the pod's own ping");
        }
        for part in Part::ORDERED {
            let own = part.of(&echo(pod, server, false, 7, &DATA), 3);
            assert_eq!(rig.run("pod_egress", &own).0, REDIRECT, "{part:?}");
        }
        assert_eq!(rig.run("pod_egress", &echo(pod, server, true, 7, b"ping")).0, NEXT, "an answer, not the ping's");
        passes_in_parts(&mut rig, &echo(pod, server, true, 7, &DATA), 30);
    }
}

/// Row inbound-poison of docs/failures.md.
#[test]
fn inbound_poison_a_socket_of_the_host_creates_no_udp_or_ping_record() {
    let Some(mut rig) = Reused::new("inbound-host", &scene()) else { return };
    // Sent into the pod's link, or into `lo` and forwarded from there.
    let (made_here, looped) = ([(INGRESS_IFINDEX, 0)], [(INGRESS_IFINDEX, 1)]);
    for (pod, server) in POD.into_iter().zip(SERVER) {
        let (pod, server) = (addr(pod), addr(server));
        let forged = seal(ip(server, pod, UDP, &[], &udp(53, 40_000, b"!")));
        for frame in [forged, echo(server, pod, false, 7, b"ping")] {
            for way in [&made_here, &looped] {
                let before = rig.count(Counter::Untouched);
                assert_eq!(rig.run_with("pod_ingress", &frame, way).unwrap().0, NEXT);
                assert_eq!(rig.count(Counter::Untouched), before, "it makes no record");
            }
        }
        let query = seal(ip(pod, server, UDP, &[], &udp(40_000, 53, b"?")));
        assert_eq!(rig.run("pod_egress", &query).0, REDIRECT);
        // The host's proxy may open connections with its client's address.
        let asks = seal(ip(server, pod, TCP, &[], &tcp(40_000, 8080, SYN, &[])));
        assert_eq!(rig.run_with("pod_ingress", &asks, &made_here).unwrap().0, NEXT);
        let says = seal(ip(pod, server, TCP, &[], &tcp(8080, 40_000, SYN | ACK, &[])));
        assert_eq!(rig.run("pod_egress", &says).0, NEXT);
    }
}
