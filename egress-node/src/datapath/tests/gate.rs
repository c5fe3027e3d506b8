//! Packets that a pod's interface lets through at all, and packets about an unconfirmed flow that are accepted.

use super::{
    frames::{ICMP, ICMPV6, TCP, UDP, icmp, ip, ports, read, seal, tcp, udp},
    reused::Reused,
    rig::*,
};
use crate::datapath::{
    load::{EVENTS, Sizes},
    maps::{Maps, typed},
};
use aya::maps::{MapData, RingBuf};
use egress_common::{abi::TUNNEL_PORT, config::flags, event::what, limits::FLOW_EVENTS_UNUSED, verdict::Counter};
use std::net::IpAddr;

const SYN: u8 = 2;
const ACK: u8 = 16;
/// Addresses of another node's pods.
const REMOTE: [&str; 2] = ["10.2.0.7", "fd00:2::7"];

/// Returns a rig with the scene and these firewall flags.
fn rig(test: &str, firewall: u32) -> Option<Reused> {
    let mut view = scene();
    let config = view.config.as_mut().unwrap();
    config.flags = firewall;
    Reused::new(test, &view)
}

/// Returns what may lie between the headers of a datagram: the protocol number for the IP header, and the bytes.
fn between(src: IpAddr) -> Vec<(u8, Vec<u8>)> {
    let options = [7, 7, 4, 0, 0, 0, 0, 1].to_vec();
    let extensions = |n: usize| {
        let all = [[0, 0, 1, 4, 0, 0, 0, 0].repeat(n - 1), vec![UDP, 0, 1, 4, 0, 0, 0, 0]].concat();
        (0, all)
    };
    if src.is_ipv4() { vec![(UDP, vec![]), (UDP, options)] } else { vec![(UDP, vec![]), extensions(1), extensions(6)] }
}

/// docs/failures.md: forged-encap.
#[test]
fn no_pod_reaches_the_tunnels_port_at_any_destination() {
    let Some(mut rig) = rig("gate-tunnel", 0) else { return };
    let v4 = ([POD4, STRANGER, "10.1.0.99"], [SERVER4, "198.18.3.4", "10.0.0.2", "10.1.0.1", "255.255.255.255"]);
    let v6 = ([POD6, "fd00:1::3", "fe80::3"], [SERVER6, "fd00:2::1", "fd00:1::1", "ff02::1", "fe80::1"]);
    for (pods, targets) in [v4, v6] {
        for (pod, target) in pods.into_iter().flat_map(|pod| targets.map(|target| (addr(pod), addr(target)))) {
            for (protocol, extra) in between(pod) {
                let to = |port| ip(pod, target, protocol, &extra, &udp(40_000, port, b"outer header"));
                rig.dropped("pod_egress", &to(TUNNEL_PORT), Counter::DropTunnelPort);
                assert_ne!(rig.run("pod_egress", &to(TUNNEL_PORT + 1)).0, SHOT, "{pod} to {target}");
            }
            let segment = seal(ip(pod, target, TCP, &[], &tcp(40_000, TUNNEL_PORT, SYN, &[])));
            assert_ne!(rig.run("pod_egress", &segment).0, SHOT, "the tunnel does not use TCP");
        }
    }
}

/// docs/failures.md: forged-encap. The port must not be hidden behind headers that the programs do not read.
#[test]
fn pod_packets_that_cannot_be_read_up_to_udp_are_dropped() {
    let Some(mut rig) = rig("gate-unreadable", 0) else { return };
    for (pod, server) in [(STRANGER, SERVER4), ("fd00:1::3", SERVER6)].map(|(a, b)| (addr(a), addr(b))) {
        let whole = ip(pod, server, UDP, &[], &udp(1, TUNNEL_PORT, b""));
        let header = read(&whole).unwrap().l4;
        for len in [0, 3, 7] {
            rig.dropped("pod_egress", &whole[..header + len], Counter::DropMalformed);
        }
        // Packets of other protocols may be cut short: they hide no port.
        let segment = ip(pod, server, TCP, &[], &tcp(1, 2, ACK, &[]));
        assert_eq!(rig.run("pod_egress", &segment[..header + 8]).0, NEXT);
    }
    let many = [[0, 0, 1, 4, 0, 0, 0, 0].repeat(6), vec![UDP, 0, 1, 4, 0, 0, 0, 0]].concat();
    let long = [&[UDP, 127, 1, 4][..], &[0; 1020]].concat();
    for extensions in [many, long] {
        let frame = ip(addr("fd00:1::3"), addr(SERVER6), 0, &extensions, &udp(1, TUNNEL_PORT, b""));
        rig.dropped("pod_egress", &frame, Counter::DropMalformed);
    }
    let mut frame = ip(addr(STRANGER), addr(SERVER4), UDP, &[], &udp(1, TUNNEL_PORT, b""));
    frame[14] = 0x44;
    rig.dropped("pod_egress", &frame, Counter::DropMalformed);
}

/// docs/failures.md: forged-source.
#[test]
fn no_pod_has_an_egress_ip_or_remote_pod_address_as_its_source() {
    let Some(mut rig) = rig("gate-source", 0) else { return };
    let sources = [
        (EGRESS4, SERVER4, Counter::DropForged),
        (EGRESS6, SERVER6, Counter::DropForged),
        (REMOTE[0], SERVER4, Counter::DropSpoofed),
        (REMOTE[1], SERVER6, Counter::DropSpoofed),
    ];
    for (source, server, why) in sources {
        for (source, target) in [(source, server), (source, if source.contains(':') { POD6 } else { POD4 })] {
            let (source, target) = (addr(source), addr(target));
            let (error, echo, protocol) = if source.is_ipv4() { (3, 8, ICMP) } else { (1, 128, ICMPV6) };
            let quote = ip(target, source, UDP, &[], &udp(53, 40_000, b"")).split_off(14);
            for (protocol, body) in [
                (UDP, udp(40_000, 53, b"question")),
                (TCP, tcp(40_000, 443, SYN, &[])),
                (TCP, tcp(40_000, 443, ACK, &[])),
                (protocol, icmp(echo, 1, b"ping")),
                (protocol, [&[error, 3, 0, 0, 0, 0, 0, 0][..], &quote].concat()),
                (47, b"GRE".to_vec()),
            ] {
                rig.dropped("pod_egress", &ip(source, target, protocol, &[], &body), why);
            }
        }
    }
}

/// Changes every flow of a family.
macro_rules! each_flow {
    ($maps:ident, $pod:expr, |$flow:ident| $change:expr) => {
        if $pod.is_ipv4() {
            for (key, mut flow) in $maps.v4.flows.entries().unwrap() {
                let $flow = &mut flow;
                $change;
                $flow.seal(&key);
                $maps.v4.flows.set(&key, &flow).unwrap();
            }
        } else {
            for (key, mut flow) in $maps.v6.flows.entries().unwrap() {
                let $flow = &mut flow;
                $change;
                $flow.seal(&key);
                $maps.v6.flows.set(&key, &flow).unwrap();
            }
        }
    };
}

/// Returns the packets that the outside can send about the pod's flow: an answer, and a router's error.
fn said(rig: &Rig, egress: IpAddr, server: IpAddr) -> [Vec<u8>; 2] {
    let mut maps = Maps::open(rig.pins()).unwrap();
    let mut port = 0;
    each_flow!(maps, server, |flow| port = u16::from_be(flow.port));
    let (kind, protocol) = if server.is_ipv4() { (3, ICMP) } else { (1, ICMPV6) };
    let quote = seal(ip(egress, server, UDP, &[], &udp(port, 53, b"question"))).split_off(14);
    let error = [&[kind, 3, 0, 0, 0, 0, 0, 0][..], &quote].concat();
    [seal(ip(server, egress, UDP, &[], &udp(53, port, b"answer"))), seal(ip(server, egress, protocol, &[], &error))]
}

/// docs/failures.md: forged-error.
#[test]
fn nothing_passes_in_either_direction_for_an_unconfirmed_flow() {
    let Some(mut rig) = rig("gate-pending", flags::RESPECT_FIREWALL) else { return };
    for (pod, egress, server) in
        [(POD4, EGRESS4, SERVER4), (POD6, EGRESS6, SERVER6)].map(|(a, b, c)| (addr(a), addr(b), addr(c)))
    {
        let question = seal(ip(pod, server, UDP, &[], &udp(40_000, 53, b"question")));
        assert_eq!(rig.run("pod_egress", &question).0, NEXT, "the firewall decides");
        let (kind, protocol) = if pod.is_ipv4() { (3, ICMP) } else { (1, ICMPV6) };
        // An error of `pod` about a packet that the server sent to it.
        let error = |to: IpAddr| {
            let quote = seal(ip(server, pod, UDP, &[], &udp(53, 40_000, b"answer"))).split_off(14);
            seal(ip(pod, to, protocol, &[], &[&[kind, 3, 0, 0, 0, 0, 0, 0][..], &quote].concat()))
        };
        rig.dropped("pod_egress", &error(server), Counter::DropNotConfirmed);
        for frame in said(&rig, egress, server) {
            rig.dropped("uplink_ingress", &frame, Counter::DropNotConfirmed);
        }
        // The reverse half is rebuilt as it was.
        mend(&mut rig, &question);
        for frame in said(&rig, egress, server) {
            rig.dropped("uplink_ingress", &frame, Counter::DropNotConfirmed);
        }
        // The firewall lets the flow pass.
        let forwarded = [(INGRESS_IFINDEX, 1)];
        assert_eq!(rig.run_with("exit_egress", &question, &forwarded).unwrap().0, REDIRECT);
        for frame in said(&rig, egress, server) {
            assert_eq!(rig.run("uplink_ingress", &frame).0, REDIRECT, "{:?}", rig.writer.maps().counters());
        }
        assert_eq!(rig.run("pod_egress", &error(server)).0, REDIRECT);
        // An error goes only to the sender that it is about.
        let elsewhere = if pod.is_ipv4() { addr("203.0.113.77") } else { addr("2001:db8:f::77") };
        rig.dropped("pod_egress", &error(elsewhere), Counter::DropMalformed);
    }
}

#[test]
fn connection_that_waits_for_the_firewall_again_is_not_reported_as_refused() {
    let mut view = scene();
    view.config.as_mut().unwrap().flags = flags::RESPECT_FIREWALL;
    let mut without = view.clone();
    without.policies.values_mut().flat_map(|policy| &mut policy.slots).for_each(|slot| slot.usable = false);
    let sizes = Sizes { flow_events: FLOW_EVENTS_UNUSED as u32, ..SIZES };
    let Some(mut rig) = Rig::of_size("gate-again", &view, sizes) else { return };
    let mut events: RingBuf<MapData> = typed(rig.pins(), EVENTS).unwrap();
    for (pod, server) in [(POD4, SERVER4), (POD6, SERVER6)].map(|(a, b)| (addr(a), addr(b))) {
        rig.write(&view);
        let segment = |port: u16, flags: u8| seal(ip(pod, server, TCP, &[], &tcp(port, 443, flags, &[])));
        assert_eq!(rig.run("pod_egress", &segment(40_000, SYN)).0, NEXT, "the firewall decides");
        let forwarded = [(INGRESS_IFINDEX, 1)];
        let (verdict, sent) = rig.run_with("exit_egress", &segment(40_000, SYN), &forwarded).unwrap();
        assert_eq!(verdict, REDIRECT);
        let answer = tcp(443, ports(&sent).0, SYN | ACK, &[]);
        let answer = seal(ip(server, read(&sent).unwrap().src, TCP, &[], &answer));
        assert_eq!(rig.run("uplink_ingress", &answer).0, REDIRECT, "{:?}", rig.writer.maps().counters());
        assert_eq!(rig.run("pod_egress", &segment(40_000, ACK)).0, REDIRECT, "it is confirmed");
        assert_eq!(rig.run("pod_egress", &segment(40_000, SYN)).0, NEXT, "the firewall decides again");
        rig.dropped("uplink_ingress", &answer, Counter::DropNotConfirmed);
        // The firewall has never let a packet of this one pass, however often the pod opens it.
        for flags in [SYN, ACK, SYN] {
            assert_eq!(rig.run("pod_egress", &segment(40_001, flags)).0, NEXT);
        }
        // Both are removed, because their slot is unusable and no host has answered their last SYN.
        rig.write(&without);
        for port in [40_000, 40_001] {
            rig.dropped("pod_egress", &segment(port, SYN), Counter::DropNoGateway);
        }
        // The address family is the last byte of an event.
        let told = std::iter::from_fn(|| events.next().map(|event| event[event.len() - 2]));
        assert_eq!(told.collect::<Vec<_>>(), [what::BEGAN, what::BEGAN, what::ENDED, what::REFUSED], "{pod}");
    }
}

/// Removes the reverse half, and lets the next packet of the pod rebuild it.
fn mend(rig: &mut Rig, question: &[u8]) {
    let mut maps = Maps::open(rig.pins()).unwrap();
    let keys: Vec<_> = maps.v4.reverse.entries().unwrap().into_keys().collect();
    keys.iter().for_each(|key| maps.v4.reverse.remove(key).unwrap());
    let keys: Vec<_> = maps.v6.reverse.entries().unwrap().into_keys().collect();
    keys.iter().for_each(|key| maps.v6.reverse.remove(key).unwrap());
    // As if the flow's last packet had been seen a tick ago.
    each_flow!(maps, addr(POD4), |flow| flow.last_seen -= 1);
    each_flow!(maps, addr(POD6), |flow| flow.last_seen -= 1);
    let repaired = rig.count(Counter::FlowsRepaired);
    assert_eq!(rig.run("pod_egress", question).0, NEXT);
    assert_eq!(rig.count(Counter::FlowsRepaired), repaired + 1);
}

/// docs/failures.md: forged-error. A flow belongs to the interface through which it was opened.
#[test]
fn an_error_about_the_flow_of_another_interface_is_dropped() {
    let Some(mut rig) = rig("gate-foreign-error", 0) else { return };
    let mut maps = Maps::open(rig.pins()).unwrap();
    for (pod, server) in [(POD4, SERVER4), (POD6, SERVER6)].map(|(a, b)| (addr(a), addr(b))) {
        let question = seal(ip(pod, server, UDP, &[], &udp(40_000, 53, b"question")));
        assert_eq!(rig.run("pod_egress", &question).0, REDIRECT);
        let (kind, protocol) = if pod.is_ipv4() { (3, ICMP) } else { (1, ICMPV6) };
        let quote = seal(ip(server, pod, UDP, &[], &udp(53, 40_000, b"answer"))).split_off(14);
        let error = seal(ip(pod, server, protocol, &[], &[&[kind, 3, 0, 0, 0, 0, 0, 0][..], &quote].concat()));
        assert_eq!(rig.run("pod_egress", &error).0, REDIRECT);
        let mut last = error.clone();
        last[if pod.is_ipv4() { 22 } else { 21 }] = 1;
        assert_eq!(rig.run("pod_egress", &last), (NEXT, last.clone()), "it is routed nowhere");
        each_flow!(maps, pod, |flow| flow.ifindex += 1);
        rig.dropped("pod_egress", &error, Counter::DropSpoofed);
    }
}
