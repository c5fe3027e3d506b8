//! The transports between nodes: the outer headers that the programs write and strip, byte by byte, and the packets that they leave to the
//! tunnel device.

use super::{
    datagrams::Part,
    frames::{
        HOST_MAC, ICMP, TCP, UDP, assert_right, icmp, ip, ports, read, seal, tcp, udp, with_header_checksum, wrapped,
    },
    reused::Reused,
    rig::*,
    scenes,
};
use egress_common::{
    abi::{INNER_DST_MAC, INNER_SRC_MAC, TUNNEL_PORT, VNI_FORWARD, VNI_PROBE},
    config::flags,
    port_block,
    probe::{MAGIC, PORT, REPLY, REQUEST, VERSION},
    transport,
    verdict::Counter,
};
use egress_core::encode::{EgressView, NodeView};
use std::net::IpAddr;

const OUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const UNDERLAY: u32 = 9;

/// Returns the scene on an underlay of one family: `n1` owns the egress IPs, and packets to it use `transport`.
fn view(ends: [&str; 2], transport: u32) -> NodeView {
    scene_between(ends, UNDERLAY, OUR_MAC, transport)
}

/// Returns the reverse: this node owns the egress IPs, and `n1` holds a block of them.
fn gateway(underlay: [&str; 2]) -> NodeView {
    let mut view = view(underlay, transport::VXLAN);
    carry(&mut view, UNDERLAY);
    view
}

fn families() -> [(IpAddr, IpAddr, IpAddr); 2] {
    [(POD4, SERVER4, EGRESS4), (POD6, SERVER6, EGRESS6)].map(|(p, s, e)| (addr(p), addr(s), addr(e)))
}

/// Returns the frame behind the outer headers.
fn inside(frame: &[u8]) -> &[u8] {
    &frame[read(frame).unwrap().l4 + 16..]
}

#[test]
fn probe_answer_reports_the_known_lease_revision_of_the_asker() {
    for underlay in UNDERLAYS {
        let Some(mut rig) = Reused::new("transport-probe", &gateway(underlay)) else { return };
        for (_, server, egress) in families() {
            let request = [&MAGIC[..], &[VERSION, REQUEST, transport::VXLAN as u8, 0], &[7; 4], &[0; 36]].concat();
            let request = seal(ip(egress, server, UDP, &[], &udp(PORT, PORT, &request)));
            let (verdict, mut out) =
                rig.run("underlay_ingress", &wrapped(underlay[1], underlay[0], VNI_PROBE, &request));
            assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
            out[12..14].copy_from_slice(if addr(underlay[0]).is_ipv4() { &[8, 0] } else { &[0x86, 0xdd] });
            let answer = inside(&out);
            assert_right(answer);
            let said = read(answer).unwrap();
            assert_eq!((said.src, said.dst, answer[said.l4 + 8 + 5]), (server, egress, REPLY));
            assert_eq!(answer[answer.len() - 8..], (KNOWN + 1).to_be_bytes());
        }
    }
}

#[test]
fn the_outer_headers_are_those_that_the_device_writes() {
    for underlay in UNDERLAYS {
        let Some(mut rig) = Reused::new("transport-vxlan", &view(underlay, transport::VXLAN)) else { return };
        for (pod, server, egress) in families() {
            for congestion in 0..4u8 {
                let mut frame = seal(ip(pod, server, UDP, &[], &udp(4000, 53, b"question")));
                mark_congestion(&mut frame, congestion);
                let (verdict, mut out) = rig.run("pod_egress", &frame);
                assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
                // The kernel writes the Ethernet header once it knows the next hop's MAC address.
                out[12..14].copy_from_slice(if addr(underlay[0]).is_ipv4() { &[8, 0] } else { &[0x86, 0xdd] });
                assert_right(&out);
                let outer = read(&out).unwrap();
                assert_eq!((outer.src, outer.dst), (addr(underlay[0]), addr(underlay[1])));
                assert_eq!((outer.proto, outer.hops, outer.later_fragment), (UDP, 64, false));
                // RFC 6040: "congestion experienced" is not copied, the other values are.
                assert_eq!(congestion_of(&out), if congestion == 3 { 2 } else { congestion });
                let headers = &out[outer.l4..outer.l4 + 16];
                let length = (out.len() - outer.l4) as u16;
                assert!(u16::from_be_bytes([headers[0], headers[1]]) >= 0xc000, "a dynamic port");
                assert_eq!(headers[2..8], [TUNNEL_PORT.to_be_bytes(), length.to_be_bytes(), [0, 0]].concat());
                assert_eq!(headers[8..12], [8, 0, 0, 0]);
                assert_eq!(headers[12..], (VNI_FORWARD << 8).to_be_bytes());
                assert_eq!(out.len(), frame.len() + outer.l4 + 16, "nothing but the headers is added");
                let inner = inside(&out);
                assert_eq!(inner[..12], [INNER_DST_MAC, INNER_SRC_MAC].concat());
                assert_right(inner);
                assert_eq!((read(inner).unwrap().src, congestion_of(inner)), (egress, congestion));
            }
        }
        let sent = rig.count(Counter::SentVxlan);
        assert_eq!((sent, rig.count(Counter::SentTunnel)), (8, 0));
        // A packet that does not fit goes through the device, and is counted. Over IPv6 the device cannot fragment it.
        let (pod, server, egress) = families()[0];
        let large = seal(ip(pod, server, UDP, &[], &udp(4000, 53, &[7; 1450])));
        assert_eq!(rig.run("pod_egress", &large).0, REDIRECT);
        assert_eq!((rig.count(Counter::SentTunnel), rig.count(Counter::SentVxlan)), (1, sent));
        assert_eq!(rig.count(Counter::DeviceMtu), 1);
        if addr(underlay[0]).is_ipv6() {
            let mut view = gateway(underlay);
            view.config.as_mut().unwrap().room = 1430;
            rig.write(&view);
            let answer = udp(53, port_block::first_port(OTHER_BLOCK), &[7; 1450]);
            rig.dropped("uplink_ingress", &seal(ip(server, egress, UDP, &[], &answer)), Counter::DropTooLarge);
        }
    }
}

#[test]
fn packets_too_large_for_their_transport_are_answered_with_the_right_mtu() {
    for (underlay, transport) in UNDERLAYS.into_iter().flat_map(|u| [(u, transport::VXLAN), (u, transport::DIRECT)]) {
        for respect in [0, flags::RESPECT_FIREWALL] {
            let mut view = view(underlay, transport);
            let config = view.config.as_mut().unwrap();
            (config.room, config.flags) = (1430, respect);
            let fits = if transport == transport::DIRECT { 1500 } else { 1430 };
            let Some(mut rig) = Reused::new("too-large", &view) else { return };
            for (pod, server, _) in families() {
                let header = if pod.is_ipv4() { 20 } else { 40 };
                let datagram = |len: usize| {
                    let mut frame = ip(pod, server, UDP, &[], &udp(4000, 53, &vec![7; len - header - 8]));
                    if pod.is_ipv4() {
                        // Do not fragment; the header's checksum is adjusted.
                        frame[20] = 0x40;
                        let (check, borrow) = u16::from_be_bytes([frame[24], frame[25]]).overflowing_sub(0x4000);
                        frame[24..26].copy_from_slice(&(check - u16::from(borrow)).to_be_bytes());
                    }
                    seal(frame)
                };
                let answered = rig.count(Counter::TooLargeAnswered);
                let expected = if respect == 0 { REDIRECT } else { NEXT };
                assert_eq!(rig.run("pod_egress", &datagram(fits)).0, expected, "{pod} {fits}");
                assert_eq!(rig.count(Counter::TooLargeAnswered), answered);
                let large = datagram(fits + 1);
                let (verdict, out) = rig.run("pod_egress", &large);
                assert_eq!((verdict, rig.count(Counter::TooLargeAnswered)), (REDIRECT, answered + 1));
                assert_right(&out);
                let own = if addr(underlay[0]).is_ipv4() == pod.is_ipv4() { addr(underlay[0]) } else { server };
                let answer = read(&out).unwrap();
                assert_eq!((answer.src, answer.dst), (own, pod));
                let kind: [u8; 2] = if pod.is_ipv4() { [3, 4] } else { [2, 0] };
                assert_eq!(out[answer.l4..answer.l4 + 2], kind);
                assert_eq!(out[answer.l4 + 4..answer.l4 + 8], (fits as u32).to_be_bytes());
                assert_eq!(out[answer.l4 + 8..], large[14..14 + 512], "what it is about");
                assert_eq!(out[..12], [&large[6..12], &large[..6]].concat());
            }
            // Over IPv4 the device sends packets that may be fragmented; over IPv6 it cannot fragment them.
            let (pod, server, _) = families()[0];
            let answered = rig.count(Counter::TooLargeAnswered);
            rig.run("pod_egress", &seal(ip(pod, server, UDP, &[], &udp(4001, 53, &[7; 1480]))));
            let told = addr(underlay[0]).is_ipv6() as u64;
            assert_eq!(rig.count(Counter::TooLargeAnswered), answered + told);
        }
    }
}

#[test]
fn direct_changes_nothing_but_the_mac_addresses() {
    for underlay in UNDERLAYS {
        let Some(mut rig) = Reused::new("transport-direct", &view(underlay, transport::DIRECT)) else { return };
        for (pod, server, egress) in families() {
            let frame = seal(ip(pod, server, TCP, &[], &tcp(4000, 443, 2, &[])));
            let (verdict, out) = rig.run("pod_egress", &frame);
            assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
            assert_right(&out);
            assert_eq!(out[..12], [THEIR_MAC, OUR_MAC].concat());
            assert_eq!((read(&out).unwrap().src, out.len()), (egress, frame.len()));
        }
        assert_eq!((rig.count(Counter::SentDirect), rig.count(Counter::SentTunnel)), (2, 0));
    }
}

/// A connection may change to the tunnel, and over IPv6 nothing fragments its segments there.
#[test]
fn segments_of_direct_fit_the_tunnel_over_an_ipv6_underlay() {
    const SIZE: [u8; 4] = [2, 4, 0x23, 0x28];
    for underlay in UNDERLAYS {
        let mut view = view(underlay, transport::DIRECT);
        let config = view.config.as_mut().unwrap();
        (config.mss_v4, config.mss_v6) = (1390, 1370);
        let Some(mut rig) = Reused::new("transport-mss", &view) else { return };
        for (pod, server, egress) in families() {
            let [direct, tunnel]: [u16; 2] = if pod.is_ipv4() { [1460, 1390] } else { [1440, 1370] };
            let fits = if addr(underlay[0]).is_ipv4() { direct } else { tunnel };
            let (verdict, sent) = rig.run("pod_egress", &seal(ip(pod, server, TCP, &[], &tcp(4000, 443, 2, &SIZE))));
            assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
            let answer = seal(ip(server, egress, TCP, &[], &tcp(443, ports(&sent).0, 2 | 16, &SIZE)));
            let (verdict, delivered) = rig.run("uplink_ingress", &answer);
            assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
            for frame in [sent, delivered] {
                assert_right(&frame);
                let at = read(&frame).unwrap().l4 + 22;
                assert_eq!(frame[at..at + 2], fits.to_be_bytes(), "{pod} over {}", underlay[0]);
            }
        }
        assert_eq!(rig.count(Counter::SentDirect), 2);
    }
}

#[test]
fn direct_reply_reaches_its_pod_whether_or_not_the_node_is_a_carrier() {
    const CARRIED: &str = "192.0.2.77";
    for carries in [false, true] {
        let mut view = view(UNDERLAYS[0], transport::DIRECT);
        view.macs.insert(THEIR_MAC, scenes::node(1));
        if carries {
            let own = EgressView { gateway: Some(scenes::node(0)), forwards: true, ..EgressView::default() };
            view.egress_ips.insert(addr(CARRIED), own);
        }
        let Some(mut rig) = Reused::new("transport-reply", &view) else { return };
        for (pod, server, egress) in families() {
            let (verdict, out) = rig.run("pod_egress", &seal(ip(pod, server, UDP, &[], &udp(4000, 53, b"question"))));
            assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
            let port = ports(&out).0;
            let to = |egress, port| {
                let mut frame = seal(ip(server, egress, UDP, &[], &udp(53, port, b"answer")));
                frame[..12].copy_from_slice(&[HOST_MAC, THEIR_MAC].concat());
                frame
            };
            let before = rig.count(Counter::Delivered);
            let (verdict, out) = rig.run("underlay_ingress", &to(egress, port));
            assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
            assert_right(&out);
            assert_eq!((read(&out).unwrap().dst, ports(&out)), (pod, (53, 4000)));
            assert_eq!(rig.count(Counter::Delivered), before + 1);

            rig.dropped("underlay_ingress", &to(egress, port ^ 1), Counter::DropNoReverse);
            let mut forged = seal(ip(egress, server, UDP, &[], &udp(port, 53, b"question")));
            forged[..12].copy_from_slice(&[HOST_MAC, [2, 0, 0, 0, 0, 0x99]].concat());
            assert_eq!(rig.run("underlay_ingress", &forged).0, NEXT, "none of ours");
            let nobody = to(pod, 4000);
            assert_eq!(rig.run("underlay_ingress", &nobody), (NEXT, nobody.clone()), "for the stack");
        }
    }
}

#[test]
fn ordinary_outer_headers_are_stripped_and_others_are_left_to_the_device() {
    for [ours, theirs] in UNDERLAYS {
        let Some(mut rig) = Reused::new("transport-strip", &gateway([ours, theirs])) else { return };
        let port = port_block::first_port(OTHER_BLOCK);
        for (_, server, egress) in families() {
            let inner = seal(ip(egress, server, TCP, &[], &tcp(port, 443, 2, &[])));
            let usual = wrapped(theirs, ours, VNI_FORWARD, &inner);
            let before = rig.count(Counter::Forwarded);
            let (verdict, out) = rig.run("underlay_ingress", &usual);
            assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
            assert_eq!((out.len(), &out[12..]), (inner.len(), &inner[12..]));
            assert_eq!(rig.count(Counter::Forwarded), before + 1);

            let stranger =
                wrapped(if theirs.contains(':') { "fd88::9" } else { "10.0.0.9" }, ours, VNI_FORWARD, &inner);
            rig.dropped("underlay_ingress", &stranger, Counter::DropStranger);
            let bad_port = seal(ip(egress, server, TCP, &[], &tcp(port + 64, 443, 2, &[])));
            let stolen = wrapped(theirs, ours, VNI_FORWARD, &bad_port);
            rig.dropped("underlay_ingress", &stolen, Counter::DropNotLeased);

            for (what, frame) in unusual(&usual) {
                let before = rig.count(Counter::DeviceOuter);
                let (verdict, out) = rig.run("underlay_ingress", &frame);
                assert_eq!((verdict, &out), (NEXT, &frame), "{what}: {:?}", rig.writer.maps().counters());
                assert_eq!(rig.count(Counter::DeviceOuter), before + 1, "{what}");
            }
            let other_port = wrapped_to(TUNNEL_PORT + 1, &usual);
            let before = rig.count(Counter::DeviceOuter);
            assert_eq!(rig.run("underlay_ingress", &other_port), (NEXT, other_port.clone()), "somebody else's tunnel");
            assert_eq!(rig.count(Counter::DeviceOuter), before);
        }
    }
}

/// Redirects the frame to another UDP port.
fn wrapped_to(port: u16, frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    let l4 = read(&frame).unwrap().l4;
    frame[l4 + 2..l4 + 4].copy_from_slice(&port.to_be_bytes());
    frame
}

/// Returns variants of a tunnelled frame whose outer headers only the device can handle.
fn unusual(usual: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let l4 = read(usual).unwrap().l4;
    let with = |at: usize, bytes: &[u8]| {
        let mut frame = usual.to_vec();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let mut congested = usual.to_vec();
    mark_congestion(&mut congested, 3);
    let mut all = vec![
        ("a UDP checksum", with(l4 + 6, &[0x12, 0x34])),
        ("a UDP length that is too short", with(l4 + 4, &40u16.to_be_bytes())),
        ("more flags than the VXLAN header has", with(l4 + 8, &[0xc])),
        ("an inner frame that is no IP packet", with(l4 + 28, &[8, 6])),
        ("congestion experienced", congested),
        ("bytes behind the packet", [usual, &[0; 6]].concat()),
    ];
    if usual[12..14] == [8, 0] {
        let payload = &usual[l4..];
        let r = read(usual).unwrap();
        let options = ip(r.src, r.dst, UDP, &[1, 1, 1, 0], payload);
        let mut fragment = usual.to_vec();
        fragment[20] |= 0x20;
        all.extend([
            ("options", options),
            ("a fragment", with_header_checksum(fragment)),
            ("a wrong header checksum", with(24, &[usual[24] ^ 0x55])),
        ]);
    }
    all
}

/// Sets the congestion bits of the first IP header.
fn mark_congestion(frame: &mut Vec<u8>, bits: u8) {
    if frame[12..14] == [8, 0] {
        frame[15] = frame[15] & !3 | bits;
        *frame = with_header_checksum(std::mem::take(frame));
    } else {
        frame[15] = frame[15] & !0x30 | bits << 4;
    }
}

/// Returns the congestion bits of the first IP header (RFC 3168, section 5).
fn congestion_of(frame: &[u8]) -> u8 {
    if frame[12..14] == [8, 0] { frame[15] & 3 } else { frame[15] >> 4 & 3 }
}

#[test]
fn direct_takes_packets_from_the_mac_address_of_the_blocks_holder_only() {
    let mut view = gateway(UNDERLAYS[0]);
    view.nodes.insert(scenes::node(2), vec![addr("10.0.0.4")]);
    view.macs.insert(THEIR_MAC, scenes::node(1));
    view.macs.insert([2, 0, 0, 0, 0, 4], scenes::node(2));
    let Some(mut rig) = Reused::new("transport-mac", &view) else { return };
    let port = port_block::first_port(OTHER_BLOCK);
    for (_, server, egress) in families() {
        let from = |mac: [u8; 6], port: u16| {
            let mut frame = seal(ip(egress, server, TCP, &[], &tcp(port, 443, 2, &[])));
            frame[..12].copy_from_slice(&[HOST_MAC, mac].concat());
            frame
        };
        assert_eq!(rig.run("underlay_ingress", &from(THEIR_MAC, port)).0, REDIRECT);
        rig.dropped("underlay_ingress", &from(THEIR_MAC, port + 64), Counter::DropNotLeased);
        rig.dropped("underlay_ingress", &from([2, 0, 0, 0, 0, 4], port), Counter::DropNotLeased);
        // A router's, for example: whatever host it is, the packet is not one of ours.
        let strange = from([2, 0, 0, 0, 0, 0x99], port);
        assert_eq!(rig.run("underlay_ingress", &strange), (NEXT, strange.clone()));
        let mut overheard = from(THEIR_MAC, port);
        overheard[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0x77]);
        assert_eq!(rig.run("underlay_ingress", &overheard), (NEXT, overheard.clone()));
        // The same holds for a reply, which every carrier could send back: a switch may flood it to all of them.
        let mut reply = seal(ip(server, egress, TCP, &[], &tcp(443, port, 16, &[])));
        assert_eq!(rig.run("uplink_ingress", &reply).0, REDIRECT);
        reply[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0x77]);
        for program in ["uplink_ingress", "underlay_ingress"] {
            assert_eq!(rig.run(program, &reply), (NEXT, reply.clone()), "{program}");
        }
    }
    assert_eq!(rig.count(Counter::Forwarded), 2);
    // The node's errors about packets of the server are checked in the same way.
    let (_, server, egress) = families()[0];
    let quoted = &ip(server, egress, TCP, &[], &tcp(443, port + 64, 16, &[]))[14..];
    let mut error = seal(ip(egress, server, ICMP, &[], &icmp(3, 0, quoted)));
    error[..12].copy_from_slice(&[HOST_MAC, THEIR_MAC].concat());
    rig.dropped("underlay_ingress", &error, Counter::DropNotLeased);
    let about = |quoted: Vec<u8>| {
        let mut error = seal(ip(egress, server, ICMP, &[], &icmp(3, 0, &quoted[14..])));
        error[..12].copy_from_slice(&[HOST_MAC, THEIR_MAC].concat());
        error
    };
    let elsewhere = about(ip(server, addr("192.0.2.99"), TCP, &[], &tcp(443, port, 16, &[])));
    rig.dropped("underlay_ingress", &elsewhere, Counter::DropMalformed);
    for quoted in [(TCP, tcp(443, port, 16, &[])), (ICMP, icmp(0, port, b"pong"))] {
        let error = about(ip(server, egress, quoted.0, &[], &quoted.1));
        assert_eq!(rig.run("underlay_ingress", &error).0, REDIRECT, "{:?}", rig.writer.maps().counters());
    }
}

/// If the tunnel's address is an egress IP, UDP packets other than tunnelled ones arrive there.
#[test]
fn replies_to_the_tunnel_address_are_not_taken_for_tunnelled_packets() {
    let [ours, theirs] = UNDERLAYS[0];
    let mut view = gateway([ours, theirs]);
    let own = EgressView { node_address: true, here: true, ..view.egress_ips[&addr(EGRESS4)].clone() };
    view.egress_ips.insert(addr(ours), own);
    let Some(mut rig) = Reused::new("transport-own", &view) else { return };
    let body = |port| udp(53, port, &[7; 144]);
    let (port, from, to) = (port_block::first_port(OTHER_BLOCK), addr(SERVER4), addr(ours));
    let whole = seal(ip(from, to, UDP, &[], &body(port)));
    let parts = Part::ORDERED.map(|part| part.of(&whole, 7));
    for frame in parts.into_iter().chain([seal(ip(from, to, UDP, &[1, 1, 1, 0], &body(port)))]) {
        assert_eq!(rig.run("underlay_ingress", &frame).0, REDIRECT, "{:?}", rig.writer.maps().counters());
    }
    assert_eq!(rig.count(Counter::DeviceOuter), 0);
    // The tunnel's own fragments are left alone as before.
    let tunnelled = seal(ip(addr(theirs), to, UDP, &[], &body(TUNNEL_PORT)));
    for frame in Part::ORDERED.map(|part| part.of(&tunnelled, 8)) {
        assert_eq!(rig.run("underlay_ingress", &frame), (NEXT, frame.clone()));
    }
    assert_eq!(rig.count(Counter::DeviceOuter), 3);
}
