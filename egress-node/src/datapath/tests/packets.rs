//! Single packets through the programs: which are translated, how, and which are left alone.

use super::{
    frames::{
        self, ICMP, ICMPV6, TCP, UDP, assert_right, fragment, icmp, ip, ports, read, seal, tcp, udp, untranslated,
    },
    reused::Reused,
    rig::*,
    scenes,
};
use crate::datapath::load;
use egress_common::{
    abi::{INNER_DST_MAC, INNER_SRC_MAC, TICK_SHIFT},
    endpoint::policy_flags,
    limits::{HELD_FRAME, HELD_PER_DATAGRAM, HELD_TICKS},
    port_block,
    verdict::Counter,
};
use egress_core::encode::{NodeView, SlotView};
use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

const SYN: u8 = 2;
const ACK: u8 = 16;
const OPTIONS: [u8; 8] = [7, 7, 4, 0, 0, 0, 0, 1];
/// Returns hop-by-hop, routing and destination options, each padded to 8 bytes; the last one names the transport.
fn extensions(transport: u8) -> Vec<u8> {
    [[43, 0, 1, 4, 0, 0, 0, 0], [60, 0, 0, 0, 0, 0, 0, 0], [transport, 0, 1, 4, 0, 0, 0, 0]].concat()
}

fn families() -> [(IpAddr, IpAddr, IpAddr); 2] {
    [(addr(POD4), addr(EGRESS4), addr(SERVER4)), (addr(POD6), addr(EGRESS6), addr(SERVER6))]
}

/// Returns packets of the pod that open a flow, of every kind that is translated.
fn openings() -> Vec<(Vec<u8>, IpAddr)> {
    let mut all = Vec::new();
    for (pod, egress, server) in families() {
        let (echo, protocol) = if pod.is_ipv4() { (8, ICMP) } else { (128, ICMPV6) };
        let transports = [
            (TCP, tcp(40_000, 443, SYN, &[])),
            (TCP, tcp(40_001, 443, SYN, &[2, 4, 0x23, 0x28])),
            (TCP, tcp(40_002, 443, SYN, &[1, 2, 4, 0x23, 0x28, 1, 1, 0])),
            (UDP, udp(40_003, 53, b"question")),
            (UDP, udp(40_004, 53, b"")),
            (protocol, icmp(echo, 4711, b"ping")),
        ];
        for (proto, body) in &transports {
            all.push((seal(ip(pod, server, *proto, &[], body)), egress));
            // The same packet with something between the headers, from another port.
            let mut body = body.clone();
            let at = if *proto == protocol { 5 } else { 1 };
            body[at] ^= 0x80;
            let extra = if pod.is_ipv4() { OPTIONS.to_vec() } else { extensions(*proto) };
            let first = if pod.is_ipv4() { *proto } else { 0 };
            all.push((seal(ip(pod, server, first, &extra, &body)), egress));
        }
        if pod.is_ipv4() {
            // A datagram without a checksum.
            all.push((ip(pod, server, UDP, &[], &udp(40_100, 53, b"no checksum")), egress));
        }
    }
    all
}

/// Returns the server's answer to a packet.
fn answer(f: &[u8]) -> Vec<u8> {
    let r = read(f).unwrap();
    let mut body = f[r.l4..].to_vec();
    match r.proto {
        TCP => {
            body.swap(0, 2);
            body.swap(1, 3);
            body[13] = SYN | ACK;
            body[16..18].fill(0);
        }
        UDP => {
            body.swap(0, 2);
            body.swap(1, 3);
        }
        ICMP => body[0] = 0,
        _ => body[0] = 129,
    }
    let frame = ip(r.dst, r.src, r.proto, &[], &body);
    let no_checksum = r.proto == UDP && body[6..8] == [0, 0];
    if no_checksum { frame } else { seal(frame) }
}

#[test]
fn packets_of_a_pod_and_their_replies_are_translated() {
    there_and_back("translate", 0);
    there_and_back("translate-ipv6-flag", load::config_flags());
}

fn there_and_back(test: &str, flags: u32) {
    let mut view = scene();
    view.config.as_mut().unwrap().flags |= flags;
    view.config.as_mut().unwrap().mss_v4 = 1400;
    view.config.as_mut().unwrap().mss_v6 = 1380;
    let Some(mut rig) = Reused::new(test, &view) else { return };
    let mut opened = 0;
    for (frame, egress) in openings() {
        let (verdict, out) = rig.run("pod_egress", &frame);
        assert_eq!(verdict, REDIRECT, "{frame:02x?}: {:?}", rig.writer.maps().counters());
        assert_right(&out);
        let (before, after) = (read(&frame).unwrap(), read(&out).unwrap());
        assert_eq!((after.src, after.dst, after.hops), (egress, before.dst, before.hops - 1));
        assert_eq!(out[..12], [INNER_DST_MAC, INNER_SRC_MAC].concat());
        let no_checksum = before.proto == UDP && frame[before.l4 + 6..before.l4 + 8] == [0, 0];
        assert_eq!(
            no_checksum,
            before.proto == UDP && out[after.l4 + 6..after.l4 + 8] == [0, 0],
            "a missing checksum stays missing"
        );
        let port = match before.proto {
            TCP | UDP => {
                assert_eq!(ports(&out).1, ports(&frame).1);
                ports(&out).0
            }
            _ => u16::from_be_bytes([out[after.l4 + 4], out[after.l4 + 5]]),
        };
        assert!(OWN_BLOCKS.contains(&port_block::of_port(port).unwrap()), "port {port} is not leased");
        if before.proto != TCP {
            assert_eq!(untranslated(&out), untranslated(&frame));
        }
        // The same packet again finds its flow.
        assert_eq!(rig.run("pod_egress", &frame).1, out);
        opened += 1;
        assert_eq!(rig.count(Counter::FlowsCreated), opened);

        let reply = answer(&out);
        let (verdict, back) = rig.run("uplink_ingress", &reply);
        assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
        assert_right(&back);
        let at_pod = read(&back).unwrap();
        assert_eq!((at_pod.src, at_pod.dst), (before.dst, before.src));
        assert_eq!(at_pod.hops, read(&reply).unwrap().hops);
        assert_eq!(back[..12], [frames::POD_MAC, frames::HOST_MAC].concat());
        assert_eq!(untranslated(&back), untranslated(&reply));
    }
}

#[test]
fn a_large_segment_size_is_lowered_at_even_and_odd_places() {
    let mut view = scene();
    view.config.as_mut().unwrap().mss_v4 = 1400;
    let Some(mut rig) = Reused::new("mss", &view) else { return };
    for (options, at) in [(&[2, 4, 0x23, 0x28][..], 22), (&[1, 2, 4, 0x23, 0x28, 1, 1, 0], 23)] {
        let frame = seal(ip(addr(POD4), addr(SERVER4), TCP, &[], &tcp(50_000 + at as u16, 443, SYN, options)));
        let out = rig.run("pod_egress", &frame).1;
        assert_right(&out);
        assert_eq!(out[34 + at..36 + at], 1400u16.to_be_bytes());
    }
}

#[test]
fn packets_without_a_policy_are_unchanged_to_the_last_bit() {
    let Some(mut rig) = Reused::new("unchanged", &scene()) else { return };
    let pod = addr(POD4);
    let mut frames = vec![
        seal(ip(addr(STRANGER), addr(SERVER4), TCP, &[], &tcp(1, 2, SYN, &[]))),
        seal(ip(addr("10.1.0.99"), addr(SERVER4), UDP, &[], &udp(1, 2, b"unknown source"))),
        seal(ip(pod, addr("198.18.3.4"), UDP, &[], &udp(1, 2, b"excepted"))),
        seal(ip(pod, addr("169.254.169.254"), TCP, &[], &tcp(1, 80, SYN, &[]))),
        seal(ip(pod, addr("224.0.0.251"), UDP, &[], &udp(5353, 5353, b"multicast"))),
        seal(ip(pod, addr("127.0.0.1"), UDP, &[], &udp(1, 2, b"loopback"))),
        seal(ip(pod, addr("255.255.255.255"), UDP, &[], &udp(68, 67, b"broadcast"))),
        seal(ip(addr(POD6), addr("ff02::fb"), UDP, &[], &udp(5353, 5353, b"multicast"))),
        seal(ip(addr(POD6), addr("fe80::1"), ICMPV6, &[], &icmp(135, 0, b"who has"))),
        ip(addr(STRANGER), addr(SERVER4), 47, &[], b"GRE of nobody's concern"),
    ];
    // ARP.
    frames.push([&[0xff; 6][..], &frames::POD_MAC, &[8, 6], &[0; 46]].concat());
    for frame in frames {
        let (verdict, out) = rig.run("pod_egress", &frame);
        assert_eq!((verdict, out), (NEXT, frame));
    }
}

#[test]
fn matching_packets_that_cannot_be_translated_are_dropped_with_the_reason() {
    let Some(mut rig) = Reused::new("drops", &scene()) else { return };
    for (pod, _, server) in families() {
        for proto in [47, 50, 132] {
            let frame = ip(pod, server, proto, &[], b"whatever there is inside of it");
            rig.dropped("pod_egress", &frame, Counter::DropProtocol);
        }
        let whole = ip(pod, server, TCP, &[], &tcp(1, 2, SYN, &[]));
        let header = read(&whole).unwrap().l4;
        for len in [0, 1, 4, 13, 19] {
            rig.dropped("pod_egress", &whole[..header + len], Counter::DropMalformed);
        }
        let whole = ip(pod, server, UDP, &[], &udp(1, 2, b""));
        for len in [0, 3, 7] {
            rig.dropped("pod_egress", &whole[..header + len], Counter::DropMalformed);
        }
        let segment = seal(ip(pod, server, TCP, &[], &tcp(1, 2, ACK, &[])));
        rig.dropped("pod_egress", &segment, Counter::DropUnknownFlow);
    }
    // A header with a length shorter than a header.
    let mut frame = ip(addr(POD4), addr(SERVER4), UDP, &[], &udp(1, 2, b"bad"));
    frame[14] = 0x44;
    rig.dropped("pod_egress", &frame, Counter::DropMalformed);
    // More extension headers than any sender uses.
    let many = [0, 0, 1, 4, 0, 0, 0, 0].repeat(7);
    let frame = ip(addr(POD6), addr(SERVER6), 0, &many, &udp(1, 2, b"bad"));
    rig.dropped("pod_egress", &frame, Counter::DropMalformed);
    // A later fragment of a datagram that was never seen, too large to be held.
    let mut frame = ip(addr(POD4), addr(SERVER4), UDP, &[], &[7; HELD_FRAME]);
    frame[20..22].copy_from_slice(&[0, 9]);
    rig.dropped("pod_egress", &frame, Counter::DropFragment);
}

/// Between two writes the table still names the slot of a gateway that is gone; an assignment does so for longer.
#[test]
fn dead_in_set_unusable_slot_in_the_table_gets_no_flows() {
    let Some(mut rig) = Reused::new("not-usable", &scene()) else { return };
    let mut tables = rig.writer.present().clone();
    tables.members.values_mut().for_each(|member| member.usable = 0);
    assert!(!tables.maglev.is_empty());
    rig.writer.write(tables).unwrap();
    for (frame, _) in openings() {
        rig.dropped("pod_egress", &frame, Counter::DropNoGateway);
    }
}

/// Egress IPs of the policy that are assigned to no pod.
const UNASSIGNED: [&str; 2] = ["192.0.2.11", "2001:db8::11"];

/// Returns a `PerEndpoint` policy of two slots in each family. Two pods have the first one, with one block of ports.
fn per_endpoint() -> NodeView {
    let mut view = with_neighbor();
    let other = view.egress_ips[&addr(EGRESS4)].clone();
    view.egress_ips.values_mut().for_each(|assigned| assigned.blocks = [OWN_BLOCKS[0]].into());
    view.egress_ips.extend(UNASSIGNED.map(|address| (addr(address), other.clone())));
    let policy = view.policies.get_mut(&scenes::policy_id(0)).unwrap();
    policy.flags = policy_flags::PER_ENDPOINT;
    let slots = [EGRESS4, UNASSIGNED[0], EGRESS6, UNASSIGNED[1]];
    policy.slots = slots.map(|a| SlotView { address: addr(a), weight: 1, usable: true }).into();
    policy.assignments = [0, 7].map(|n| (scenes::endpoint_id(n), [EGRESS4, EGRESS6].map(addr).into())).into();
    view
}

#[test]
fn per_endpoint_pod_without_a_free_port_does_not_get_another_slots_address() {
    let view = per_endpoint();
    let (mut without_blocks, mut unusable) = (view.clone(), view.clone());
    for (_, assigned, _) in families() {
        without_blocks.egress_ips.get_mut(&assigned).unwrap().blocks.clear();
        let slots = unusable.policies.values_mut().flat_map(|policy| &mut policy.slots);
        slots.filter(|slot| slot.address == assigned).for_each(|slot| slot.usable = false);
    }
    let Some(mut rig) = Reused::new("per-endpoint-ports", &view) else { return };
    let opens = |pod, server, port: u16| seal(ip(pod, server, TCP, &[], &tcp(port, 443, SYN, &[])));
    let pods = families().into_iter().zip(NEIGHBOR.map(addr));
    let pods: Vec<_> =
        pods.flat_map(|((pod, egress, server), other)| [pod, other].map(|p| (p, egress, server))).collect();
    // One pod alone does not get all ports.
    for ((pod, assigned, server), n) in pods.iter().flat_map(|pod| (0..port_block::SIZE / 2).map(move |n| (*pod, n))) {
        let (verdict, out) = rig.run("pod_egress", &opens(pod, server, 20_000 + n));
        assert_eq!((verdict, read(&out).unwrap().src), (REDIRECT, assigned), "{:?}", rig.writer.maps().counters());
    }
    for (tables, port) in [(view, 30_000), (without_blocks, 30_001)] {
        rig.write(&tables);
        for (pod, _, server) in &pods {
            rig.dropped("pod_egress", &opens(*pod, *server, port), Counter::DropNoPort);
        }
    }
    // The other slot has ports, for pods whose own cannot be used.
    rig.write(&unusable);
    for (pod, _, server) in pods {
        let (verdict, out) = rig.run("pod_egress", &opens(pod, server, 30_002));
        assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
        assert!(UNASSIGNED.map(addr).contains(&read(&out).unwrap().src));
    }
}

#[test]
fn while_a_pod_is_starting_unknown_sources_are_held() {
    let mut view = scene();
    view.config.as_mut().unwrap().flags |= egress_common::config::flags::HOLD;
    let Some(mut rig) = Reused::new("hold", &view) else { return };
    let unknown = seal(ip(addr("10.1.0.99"), addr(SERVER4), TCP, &[], &tcp(1, 2, SYN, &[])));
    rig.dropped("pod_egress", &unknown, Counter::DropHeld);
    let known = seal(ip(addr(STRANGER), addr(SERVER4), TCP, &[], &tcp(1, 2, SYN, &[])));
    assert_eq!(rig.run("pod_egress", &known), (NEXT, known));
}

/// Returns an ICMP error from a router about a packet.
fn error(router: IpAddr, about: &[u8], quoted: usize) -> Vec<u8> {
    let (kind, proto) = if router.is_ipv4() { (3, ICMP) } else { (1, ICMPV6) };
    let quote = &about[14..about.len().min(14 + quoted)];
    seal(ip(router, read(about).unwrap().src, proto, &[], &[&[kind, 0, 0, 0, 0, 0, 0, 0][..], quote].concat()))
}

#[test]
fn icmp_error_about_a_translated_packet_is_translated_back_for_the_pod() {
    let Some(mut rig) = Reused::new("errors", &scene()) else { return };
    for (frame, _) in openings() {
        let translated = rig.run("pod_egress", &frame).1;
        let header = read(&translated).unwrap().l4 - 14;
        let router = if read(&frame).unwrap().src.is_ipv4() { addr("203.0.113.254") } else { addr("2001:db8:f::fe") };
        // The minimum that a router quotes, and the whole packet.
        for quoted in [header + 8, translated.len()] {
            let error = error(router, &translated, quoted);
            let (verdict, out) = rig.run("uplink_ingress", &error);
            assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
            assert_right(&out);
            let (outer, pod) = (read(&out).unwrap(), read(&frame).unwrap());
            assert_eq!((outer.src, outer.dst), (router, pod.src));
            // The quote is the pod's own packet again, except for its hop limit.
            let mut quote = [&frame[..14], &out[outer.l4 + 8..]].concat();
            if pod.src.is_ipv4() {
                assert_eq!(frames::sums(&quote[..14 + header]).unwrap()[0], Some(0));
            }
            let (hops, check) = if pod.src.is_ipv4() { (22, Some(24)) } else { (21, None) };
            quote[hops] = frame[hops];
            if let Some(check) = check {
                quote[check..check + 2].copy_from_slice(&frame[check..check + 2]);
            }
            let clamped = pod.proto == TCP;
            let same = if clamped { 14 + header + 8 } else { quote.len() };
            assert_eq!(quote[..same], frame[..same]);
        }
    }
}

#[test]
fn an_error_of_the_pod_about_an_answer_leaves_with_the_egress_ip() {
    let Some(mut rig) = Reused::new("pod-errors", &scene()) else { return };
    for (pod, egress, server) in families() {
        let frame = seal(ip(pod, server, UDP, &[], &udp(40_000, 53, b"question")));
        let translated = rig.run("pod_egress", &frame).1;
        let reply = answer(&translated);
        let delivered = rig.run("uplink_ingress", &reply).1;
        let quote = &delivered[14..];
        let (kind, proto) = if pod.is_ipv4() { (3, ICMP) } else { (1, ICMPV6) };
        let error = seal(ip(pod, server, proto, &[], &[&[kind, 3, 0, 0, 0, 0, 0, 0][..], quote].concat()));
        let (verdict, out) = rig.run("pod_egress", &error);
        assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
        assert_right(&out);
        let outer = read(&out).unwrap();
        assert_eq!((outer.src, outer.dst), (egress, server));
        assert_eq!(out[outer.l4 + 8..], reply[14..], "the server gets its own packet as the quote");
        // An error about a packet that nobody sent does not leave.
        let mut strange = delivered[14..].to_vec();
        let header = read(&delivered).unwrap().l4 - 14;
        strange[header + 3] ^= 1;
        let error = seal(ip(pod, server, proto, &[], &[&[kind, 3, 0, 0, 0, 0, 0, 0][..], &strange].concat()));
        rig.dropped("pod_egress", &error, Counter::DropUnknownFlow);
    }
}

#[test]
fn fragments_before_their_first_one_are_held_and_follow_it() {
    let Some(mut rig) = Reused::new("held-fragments", &scene()) else { return };
    let (pod, server, egress) = (addr(POD4), addr(SERVER4), addr(EGRESS4));
    let port = port_block::first_port(OTHER_BLOCK);
    for (program, from, to, port) in [("pod_egress", pod, server, 53), ("uplink_ingress", server, egress, port)] {
        let first = fragment(seal(ip(from, to, UDP, &[], &udp(40_000, port, &[7; 64]))), [0x20, 0]);
        let later = |place: u8| fragment(ip(from, to, UDP, &[], &[place; 40]), [0x20, place]);
        let began = Instant::now();
        for place in 0..HELD_PER_DATAGRAM as u8 {
            rig.dropped(program, &later(9 + 5 * place), Counter::FragmentHeld);
        }
        rig.dropped(program, &later(9 + 5 * HELD_PER_DATAGRAM as u8), Counter::DropFragment);
        let counts = [Counter::FragmentReleased, Counter::DropFragment];
        let before = counts.map(|counter| rig.count(counter));
        if program == "pod_egress" {
            // A packet that no fragment waits for opens the flow.
            let other = seal(ip(from, to, UDP, &[], &udp(40_000, port, b"whole")));
            assert_eq!(rig.run(program, &other).0, REDIRECT);
        }
        rig.dropped(program, &first, Counter::DatagramOrdered);
        let [released, late] = [0, 1].map(|n| rig.count(counts[n]) - before[n]);
        // An emulated machine may be too slow for the fragments.
        let in_time = began.elapsed() < HELD_TICKS * Duration::from_nanos(1 << TICK_SHIFT);
        assert_eq!(released + late, u64::from(HELD_PER_DATAGRAM), "{program}");
        assert!(late == 0 || !in_time, "{program}: {late} fragments are late after {:?}", began.elapsed());
        // The fragments as they re-enter: nothing waits any more, and the ports are known.
        for frame in [&first, &later(9)] {
            assert_eq!(rig.run(program, frame).0, REDIRECT, "{program}: {:?}", rig.writer.maps().counters());
        }
    }
}

#[test]
fn fragments_follow_their_first_one() {
    let Some(mut rig) = Reused::new("fragments", &scene()) else { return };
    let (pod, server) = (addr(POD4), addr(SERVER4));
    let first = fragment(seal(ip(pod, server, UDP, &[], &udp(40_000, 53, &[7; 64]))), [0x20, 0]);
    let later = fragment(ip(pod, server, UDP, &[], &[9; 40]), [0, 9]);
    let (verdict, out) = rig.run("pod_egress", &first);
    assert_eq!(verdict, REDIRECT);
    assert_eq!(frames::sums(&out).unwrap()[0], Some(0));
    let (verdict, out) = rig.run("pod_egress", &later);
    assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
    assert_eq!((read(&out).unwrap().src, frames::sums(&out).unwrap()[0]), (addr(EGRESS4), Some(0)));
    assert_eq!(out[34..], later[34..]);
}

#[test]
fn unclaimed_packets_for_an_egress_ip_never_reach_the_stack() {
    let Some(mut rig) = Reused::new("uplink", &scene()) else { return };
    for (_, egress, server) in families() {
        let to = |port: u16| seal(ip(server, egress, TCP, &[], &tcp(443, port, SYN, &[])));
        rig.dropped("uplink_ingress", &to(80), Counter::DropNoLease);
        rig.dropped("uplink_ingress", &to(port_block::first_port(7)), Counter::DropNoLease);
        rig.dropped("uplink_ingress", &to(port_block::first_port(OWN_BLOCKS[0])), Counter::DropNoReverse);
        let (verdict, out) = rig.run("uplink_ingress", &to(port_block::first_port(OTHER_BLOCK)));
        assert_eq!((verdict, read(&out).unwrap().dst), (REDIRECT, egress), "another node's: sent to it as it is");
        rig.dropped("uplink_ingress", &ip(server, egress, 47, &[], b"no ports here"), Counter::DropNoLease);
    }
    let bystander = seal(ip(addr(SERVER4), addr("192.0.2.99"), TCP, &[], &tcp(443, 2000, SYN, &[])));
    assert_eq!(rig.run("uplink_ingress", &bystander), (NEXT, bystander));
}

#[test]
fn tunnel_packets_without_metadata_are_dropped() {
    let Some(mut rig) = Reused::new("no-metadata", &scene()) else { return };
    for (frame, _) in openings() {
        rig.dropped("tunnel_ingress", &frame, Counter::DropStranger);
    }
}

#[test]
fn unreadable_packets_for_a_floating_egress_ip_never_reach_the_stack() {
    let mut view = scene();
    let Some(mut rig) = Reused::new("uplink-unreadable", &view) else { return };
    let many = [[60, 0, 1, 4, 0, 0, 0, 0].repeat(6), vec![UDP, 0, 1, 4, 0, 0, 0, 0]].concat();
    let long = [&[UDP, 127, 1, 4][..], &[0; 1020]].concat();
    let to = |to: &str, headers: &[u8]| ip(addr(SERVER6), addr(to), 60, headers, &udp(53, 4000, b"hello"));
    for headers in [&many, &long] {
        rig.dropped("uplink_ingress", &to(EGRESS6, headers), Counter::DropMalformed);
        let bystanders = to("2001:db8::99", headers);
        assert_eq!(rig.run("uplink_ingress", &bystanders), (NEXT, bystanders.clone()));
    }
    view.egress_ips.get_mut(&addr(EGRESS6)).unwrap().node_address = true;
    rig.write(&view);
    assert_eq!(rig.run("uplink_ingress", &to(EGRESS6, &many)).0, NEXT, "the node's own");
}
