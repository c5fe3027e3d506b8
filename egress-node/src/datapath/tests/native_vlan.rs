//! The programs for drivers if egress IPs have a subnet of their own, with or without a VLAN. Frames leave and come back as the programs at
//! TC send them. Frames that those would not forward are left to them.

use super::{
    frames::{HOST_MAC, Read, UDP, fragment, ip, read, seal, tagged, udp, wrapped},
    native::{BOTH_WAYS, FROM_OUTSIDE, PASS, SENT, allow, exchanges, families, from_node, gateway},
    reused::Reused,
    rig::*,
    wire::Wire,
};
use crate::{datapath::maps::typed, host::testing::in_netns};
use aya::maps::{Array, MapData};
use egress_common::{abi::VNI_FORWARD, egress::NextHop, port_block, transport, verdict::Counter};
use egress_core::{
    encode::NodeView,
    model::{Bandwidth, SubnetInfo},
};
use std::collections::BTreeMap;

pub(super) const VLAN: u16 = 10;
/// The tag's priority, which is not part of the VLAN, and its bit for frames that may be dropped first.
pub(super) const PRIORITY: u16 = 0xb000;
/// The next hop of the subnet.
const SUBNET_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x0a];
/// The MAC address of the uplink of [`gateway`].
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x44];
/// The fields of the outer IPv4 header that differ for each packet: identification and checksum.
const OWN: [std::ops::Range<usize>; 2] = [18..20, 24..26];

/// Puts the egress IPs into subnets of their own.
pub(super) fn put_into_subnets(view: &mut NodeView, vlan: Option<u16>) {
    for (address, egress) in &mut view.egress_ips {
        let (gateway, prefix_length) = if address.is_ipv4() { ("172.16.0.1", 24) } else { ("fd16::1", 64) };
        egress.subnet = Some(SubnetInfo { gateway: addr(gateway), prefix_length, vlan });
    }
}

/// Makes the next hop of each subnet known to the programs, as if it had answered, or unknown.
pub(super) fn know_next_hops(rig: &Rig, known: bool) {
    let mut map: Array<MapData, NextHop> = typed(rig.pins(), "NEXT_HOPS").unwrap();
    let mac = [0, 2, 4].map(|at| u16::from_ne_bytes([SUBNET_MAC[at], SUBNET_MAC[at + 1]]));
    for (index, e) in &rig.writer.present().egress_ips {
        map.set(*index, NextHop { mac, known: known.into(), generation: e.generation }, 0).unwrap();
    }
}

/// Returns the frame with that VLAN's tag; 0: without a tag.
fn in_vlan(frame: Vec<u8>, vlan: u16) -> Vec<u8> {
    if vlan == 0 { frame } else { tagged(frame, vlan) }
}

/// Returns the frame without the fields that differ for each packet.
fn comparable(mut frame: Vec<u8>, by_vxlan: bool) -> Vec<u8> {
    if by_vxlan && frame[12..14] == [8, 0] {
        OWN.into_iter().for_each(|bytes| frame[bytes].fill(0));
    }
    frame
}

/// Returns whether a tunnelled packet is of another family than its outer header.
fn is_mixed(frame: &[u8]) -> bool {
    let inner = |outer: Read| frame.get(outer.l4 + 28..outer.l4 + 30).filter(|_| outer.proto == UDP);
    read(frame).and_then(inner).is_some_and(|inner| matches!(inner, [8, 0] | [0x86, 0xdd]) && *inner != frame[12..14])
}

/// Compares the frame that the driver has sent with the one that the program at TC sends. Before Linux 6.3 the latter leaves mixed frames
/// to the tunnel's device, which does not exist here: the kernel answers that the port is closed, and there is nothing to compare with.
#[track_caller]
pub(super) fn assert_as_at_tc(
    rig: &Rig,
    wire: &Wire,
    tc: &str,
    frame: &[u8],
    mine: Vec<u8>,
    by_vxlan: bool,
    what: &str,
) {
    if !rig.decapsulates() && is_mixed(frame) {
        return;
    }
    let theirs = wire.sent(tc, frame).unwrap_or_else(|| panic!("{what}: nothing is sent at TC"));
    assert_eq!(comparable(mine, by_vxlan), comparable(theirs, by_vxlan), "{what}");
}

#[test]
fn vlan_frames_leave_and_return_at_the_driver_as_the_tc_programs_send_them() {
    let Some(mut rig) = Reused::new("vlan-ways", &NodeView::default()) else { return };
    in_netns("vlan-ways", || async move {
        let wire = Wire::new(&rig).await;
        let port = port_block::first_port(OTHER_BLOCK);
        let transports = [transport::DIRECT, transport::VXLAN];
        let ways = UNDERLAYS.into_iter().flat_map(|ends| transports.map(|transport| (ends, transport)));
        for ((ends, transport), vlan) in ways.flat_map(|way| [0, VLAN, 4094].map(|vlan| (way, vlan))) {
            let mut view = gateway(ends, wire.uplink, wire.underlay, transport);
            put_into_subnets(&mut view, Some(vlan).filter(|vlan| *vlan != 0));
            rig.write(&view);
            know_next_hops(&rig, true);
            allow(&rig, &[wire.uplink, wire.underlay]);
            rig.reply_by(transport);
            for (egress, packet, reply) in exchanges(port) {
                let what = format!("{egress} in VLAN {vlan}, by {transport} over {ends:?}");
                let forwarded = rig.count(Counter::Forwarded);
                let there = [SUBNET_MAC, UPLINK_MAC].concat();
                let expected = in_vlan([&there, &packet[12..]].concat(), vlan);
                for frame in [packet.clone(), wrapped(ends[1], ends[0], VNI_FORWARD, &packet)] {
                    // The kernel has no next hop to confirm, so no frame is left to it.
                    assert_eq!(rig.run_native(BOTH_WAYS, &frame), (SENT, expected.clone()), "{what}");
                    assert_as_at_tc(&rig, &wire, "underlay_ingress", &frame, expected.clone(), false, &what);
                }
                assert!(rig.count(Counter::Forwarded) >= forwarded + 3, "{what}");
                let tags = if vlan == 0 { vec![0] } else { vec![vlan, PRIORITY | vlan] };
                for frame in tags.into_iter().map(|tag| in_vlan(reply.clone(), tag)) {
                    for (native, tc) in [(BOTH_WAYS, "underlay_ingress"), (FROM_OUTSIDE, "uplink_ingress")] {
                        let mine = rig.sent(native, &frame);
                        let by_vxlan = transport == transport::VXLAN;
                        assert_eq!(mine[mine.len() - reply.len() + 14..], reply[14..], "{what}: no tag is in it");
                        assert_as_at_tc(&rig, &wire, tc, &frame, mine, by_vxlan, &what);
                    }
                }
            }
        }
    });
}

#[test]
fn vlan_frames_outside_the_common_case_are_left_to_tc_with_their_tags() {
    let Some(mut rig) = Reused::new("vlan-left", &NodeView::default()) else { return };
    in_netns("vlan-left", || async move {
        let wire = Wire::new(&rig).await;
        let mut view = gateway(UNDERLAYS[0], wire.uplink, wire.underlay, transport::DIRECT);
        put_into_subnets(&mut view, Some(VLAN));
        rig.write(&view);
        know_next_hops(&rig, true);
        allow(&rig, &[wire.uplink, wire.underlay]);
        rig.reply_by(transport::DIRECT);
        let port = port_block::first_port(OTHER_BLOCK);
        let (server, egress) = families()[0];
        let back = |port: u16| seal(ip(server, egress, UDP, &[], &udp(53, port, &[7; 600])));
        let out = from_node(seal(ip(egress, server, UDP, &[], &udp(port, 53, &[7; 600]))));
        let to_other_host = |mut frame: Vec<u8>| {
            frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0x77]);
            frame
        };
        let of_type = |mut frame: Vec<u8>, at: usize, ether_type: [u8; 2]| {
            frame[at..at + 2].copy_from_slice(&ether_type);
            frame
        };
        let in_vlan = tagged(back(port), VLAN);
        let all = [
            ("another VLAN", tagged(back(port), VLAN + 1), Some(Counter::XdpVlan)),
            ("no tag", back(port), Some(Counter::XdpVlan)),
            ("a tag with only a priority", tagged(back(port), PRIORITY), None),
            ("two tags", tagged(in_vlan.clone(), VLAN), None),
            ("a provider's tag", of_type(in_vlan.clone(), 12, [0x88, 0xa8]), None),
            ("a tagged ARP packet", of_type(in_vlan.clone(), 16, [8, 6]), None),
            ("another family's header", of_type(in_vlan.clone(), 16, [0x86, 0xdd]), None),
            ("another host's", to_other_host(in_vlan.clone()), None),
            ("shorter than a tag", in_vlan[..17].to_vec(), None),
            ("shorter than its length field", in_vlan[..500].to_vec(), Some(Counter::XdpUnusual)),
            ("a fragment", tagged(fragment(back(port), [0x20, 0]), VLAN), Some(Counter::XdpUnusual)),
            ("nobody's port", tagged(back(port + 64), VLAN), Some(Counter::XdpRefused)),
            ("this node's own pod", tagged(back(port_block::first_port(OWN_BLOCKS[0])), VLAN), Some(Counter::XdpOwn)),
            ("a node's, with a tag", tagged(out.clone(), VLAN), Some(Counter::XdpUnusual)),
            ("nothing of ours", tagged(seal(ip(server, addr(STRANGER), UDP, &[], &udp(53, port, b"?"))), VLAN), None),
        ];
        for (what, frame, why) in &all {
            rig.left(what, frame, *why);
        }
        // The program at TC distinguishes the wrong VLAN from a missing tag: it leaves one to the stack and drops the other.
        let dropped = rig.count(Counter::DropVlan);
        for (what, frame, n) in [(all[0].0, &all[0].1, 0), (all[1].0, &all[1].1, 1)] {
            assert_eq!(wire.carry("uplink_ingress", frame), None, "{what}");
            assert_eq!(rig.count(Counter::DropVlan), dropped + n, "{what}");
        }
        know_next_hops(&rig, false);
        let before = rig.count(Counter::XdpHop);
        assert_eq!(rig.run_native(BOTH_WAYS, &out), (PASS, out.clone()));
        assert_eq!(rig.count(Counter::XdpHop), before + 1);
        rig.dropped("underlay_ingress", &out, Counter::DropNoNextHop);
        know_next_hops(&rig, true);
        // The tag does not count towards an interface's largest packet.
        for (payload, verdict) in [(1500 - 28, SENT), (1501 - 28, PASS)] {
            let frame = from_node(seal(ip(egress, server, UDP, &[], &udp(port, 53, &vec![7; payload]))));
            assert_eq!(rig.run_native(BOTH_WAYS, &frame).0, verdict, "{payload}");
        }
        let mut limited = view.clone();
        let limit = Bandwidth { rate_bps: 1_000_000_000, burst_bytes: 100_000 };
        limited.egress_ips.values_mut().for_each(|e| e.limit = Some(limit));
        rig.write(&limited);
        for frame in [&in_vlan, &out] {
            rig.left("shaped", frame, Some(Counter::XdpShaped));
        }
        let mut elsewhere = view.clone();
        put_into_subnets(&mut elsewhere, None);
        rig.write(&elsewhere);
        rig.left("a tag for an egress IP in no VLAN", &in_vlan, Some(Counter::XdpVlan));
        rig.write(&view);
        allow(&rig, &[]);
        for frame in [&in_vlan, &out] {
            rig.left("no device", frame, Some(Counter::XdpDevice));
        }
    });
}

/// Flips each bit of the headers of each usual frame: TC forwards every frame that is forwarded then as well, with the same bytes.
#[test]
fn turned_bits_of_vlan_frames_are_sent_by_the_driver_only_where_tc_sends_them() {
    let Some(mut rig) = Reused::new("vlan-bits", &NodeView::default()) else { return };
    in_netns("vlan-bits", || async move {
        let wire = Wire::new(&rig).await;
        let port = port_block::first_port(OTHER_BLOCK);
        let mut sent = BTreeMap::new();
        for ends in UNDERLAYS {
            let mut view = gateway(ends, wire.uplink, wire.underlay, transport::DIRECT);
            put_into_subnets(&mut view, Some(VLAN));
            rig.write(&view);
            know_next_hops(&rig, true);
            allow(&rig, &[wire.uplink, wire.underlay]);
            rig.reply_by(transport::DIRECT);
            for (server, egress) in families() {
                let out = from_node(seal(ip(egress, server, UDP, &[], &udp(port, 53, b"question"))));
                let back = tagged(seal(ip(server, egress, UDP, &[], &udp(53, port, b"answer"))), VLAN);
                for (native, tc, frame) in [
                    (BOTH_WAYS, "underlay_ingress", out.clone()),
                    (BOTH_WAYS, "underlay_ingress", wrapped(ends[1], ends[0], VNI_FORWARD, &out)),
                    (BOTH_WAYS, "underlay_ingress", back.clone()),
                    (FROM_OUTSIDE, "uplink_ingress", back),
                ] {
                    for bit in 0..8 * frame.len() {
                        let mut turned = frame.clone();
                        turned[bit / 8] ^= 1 << (bit % 8);
                        let what = format!("bit {bit} of {frame:02x?}");
                        let (action, mine) = rig.run_native(native, &turned);
                        if action != SENT {
                            assert_eq!((action, mine), (PASS, turned), "{what}");
                            continue;
                        }
                        *sent.entry((frame.len(), native)).or_insert(0) += 1;
                        // At TC a device compares with its own MAC address, so the destination must not change.
                        assert_eq!(turned[..6], HOST_MAC, "{what}");
                        assert_as_at_tc(&rig, &wire, tc, &turned, mine, false, &what);
                    }
                }
            }
        }
        assert!(sent.len() >= 6 && sent.values().all(|n| *n > 50), "{sent:?}");
    });
}
