//! The programs for drivers if uplink and underlay are VLAN devices of the card. Frames arrive with one device's tag and leave with
//! another's, otherwise as the programs at TC send them. Frames that those would not forward are left to them with their tags. The programs
//! do not see the type of the device behind an index, so TAP devices stand for VLAN devices.

use super::{
    frames::{HOST_MAC, UDP, ip, seal, tagged, udp, wrapped},
    native::{BOTH_WAYS, FROM_OUTSIDE, LOOPBACK, PASS, SENT, exchanges, families, from_node, gateway},
    native_vlan::{PRIORITY, VLAN, assert_as_at_tc, know_next_hops, put_into_subnets},
    reused::Reused,
    rig::*,
    wire::Wire,
};
use crate::{datapath::native::Devices, host::testing::in_netns};
use egress_common::{
    abi::VNI_FORWARD,
    config::flags,
    egress::VlanSide,
    port_block,
    transport::{DIRECT, VXLAN},
    verdict::Counter,
};
use egress_core::encode::NodeView;
use std::collections::{BTreeMap, BTreeSet};

/// The card, and its VLANs for packets to and from the outside and other nodes.
pub(super) const CARD: u32 = LOOPBACK;
pub(super) const OUT: u16 = 200;
pub(super) const UNDER: u16 = 300;

/// Writes the view of a gateway with these VLAN devices, whose card may send.
pub(super) fn write(rig: &mut Rig, view: &NodeView, devices: &[(u16, u32)]) {
    let mut view = view.clone();
    view.uplinks.extend(devices.iter().map(|(_, device)| (*device, HOST_MAC)));
    view.config.as_mut().unwrap().flags |= flags::VLANS;
    rig.write(&view);
    know_next_hops(rig, true);
    let sides = devices.iter().flat_map(|(vlan, device)| {
        let (card, device) = (VlanSide { ifindex: CARD, vlan: (*vlan).into() }, VlanSide { ifindex: *device, vlan: 0 });
        [(card, device), (device, card)]
    });
    let mut devices = Devices::open(rig.pins()).unwrap();
    devices.set_vlans(&sides.collect()).unwrap();
    devices.set(&[CARD].into()).unwrap();
}

/// Returns a gateway whose uplink and underlay are VLAN devices of a card that has no role of its own.
fn view(wire: &Wire, ends: [&str; 2], transport: u32) -> NodeView {
    let mut view = gateway(ends, wire.uplink, wire.underlay, transport);
    view.uplinks.clear();
    view
}

fn both(wire: &Wire) -> [(u16, u32); 2] {
    [(OUT, wire.uplink), (UNDER, wire.underlay)]
}

/// Returns the VLAN of a tagged frame, and the frame without its tag.
pub(super) fn untagged(frame: &[u8]) -> (u16, Vec<u8>) {
    assert_eq!(frame[12..14], [0x81, 0], "{frame:02x?}");
    (u16::from_be_bytes([frame[14], frame[15]]), [&frame[..12], &frame[16..]].concat())
}

/// Takes a packet from the other node to the outside, and one back. Returns for each way to arrive the programs, the VLAN, the frame, and
/// the VLAN by which it leaves.
fn ways(ends: [&str; 2], packets: [&[u8]; 2]) -> [(&'static str, &'static str, u16, Vec<u8>, u16); 4] {
    let [out, back] = packets.map(<[u8]>::to_vec);
    let tunnelled = wrapped(ends[1], ends[0], VNI_FORWARD, &out);
    [
        (BOTH_WAYS, "underlay_ingress", UNDER, out, OUT),
        (BOTH_WAYS, "underlay_ingress", UNDER, tunnelled, OUT),
        (BOTH_WAYS, "underlay_ingress", OUT, back.clone(), UNDER),
        (FROM_OUTSIDE, "uplink_ingress", OUT, back, UNDER),
    ]
}

#[test]
fn frames_of_vlan_devices_leave_with_the_tag_of_another_one_and_otherwise_as_at_tc() {
    let Some(mut rig) = Reused::new("devices-ways", &NodeView::default()) else { return };
    in_netns("devices-ways", || async move {
        let wire = Wire::new(&rig).await;
        // The card itself does not forward: routes are looked up for its VLAN devices.
        for family in ["ipv4", "ipv6"] {
            std::fs::write(format!("/proc/sys/net/{family}/conf/lo/forwarding"), "0").unwrap();
        }
        let port = port_block::first_port(OTHER_BLOCK);
        for (ends, transport) in UNDERLAYS.into_iter().flat_map(|ends| [(ends, DIRECT), (ends, VXLAN)]) {
            let floating = view(&wire, ends, transport);
            let (mut in_subnets, mut own) = (floating.clone(), floating.clone());
            put_into_subnets(&mut in_subnets, None);
            own.egress_ips.values_mut().for_each(|e| e.node_address = true);
            for (kind, view) in [("floating", floating), ("in a subnet", in_subnets), ("the node's own", own)] {
                write(&mut rig, &view, &both(&wire));
                rig.reply_by(transport);
                for (egress, out, back) in exchanges(port) {
                    for (native, tc, arrives, frame, leaves) in ways(ends, [&out, &back]) {
                        let what = format!("{egress} ({kind}) by {transport} over {ends:?}, in VLAN {arrives}");
                        if kind == "the node's own" && leaves == UNDER {
                            rig.left(&what, &tagged(frame, arrives), Some(Counter::XdpOwn));
                            continue;
                        }
                        for tag in [arrives, PRIORITY | arrives] {
                            let (vlan, mine) = untagged(&rig.sent(native, &tagged(frame.clone(), tag)));
                            assert_eq!(vlan, leaves, "{what}");
                            let by_vxlan = leaves == UNDER && transport == VXLAN;
                            assert_as_at_tc(&rig, &wire, tc, &frame, mine, by_vxlan, &what);
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn frames_outside_the_common_case_of_vlan_devices_are_left_to_tc_with_their_tags() {
    let Some(mut rig) = Reused::new("devices-left", &NodeView::default()) else { return };
    in_netns("devices-left", || async move {
        let wire = Wire::new(&rig).await;
        let ends = UNDERLAYS[0];
        let usual = view(&wire, ends, DIRECT);
        write(&mut rig, &usual, &both(&wire));
        rig.reply_by(DIRECT);
        let port = port_block::first_port(OTHER_BLOCK);
        let (server, egress) = families()[0];
        let out = |payload: usize| from_node(seal(ip(egress, server, UDP, &[], &udp(port, 53, &vec![7; payload]))));
        let back = |port: u16| seal(ip(server, egress, UDP, &[], &udp(53, port, &[7; 600])));
        let tunnelled = |packet: &[u8]| wrapped(ends[1], ends[0], VNI_FORWARD, packet);
        let of_type = |mut frame: Vec<u8>, at: usize, ether_type: [u8; 2]| {
            frame[at..at + 2].copy_from_slice(&ether_type);
            frame
        };
        let mut elsewhere = back(port);
        elsewhere[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0x77]);
        let mut unleased = out(600);
        unleased[34..36].copy_from_slice(&(port + 64).to_be_bytes());
        let refused = Some(Counter::XdpRefused);
        for (what, frame, why) in [
            ("two tags", tagged(tagged(back(port), VLAN), OUT), None),
            ("the tags of both devices", tagged(tagged(back(port), OUT), UNDER), None),
            ("a provider's tag", of_type(tagged(back(port), OUT), 12, [0x88, 0xa8]), None),
            ("another VLAN", tagged(back(port), OUT + 1), None),
            ("no VLAN", back(port), refused),
            ("a tag with only a priority", tagged(back(port), PRIORITY), None),
            ("ARP", of_type(tagged(back(port), OUT), 16, [8, 6]), None),
            ("another host's", tagged(elsewhere.clone(), PRIORITY | OUT), refused),
            ("a node's in no VLAN", out(600), refused),
            ("a node's in the uplink's VLAN", tagged(out(600), OUT), refused),
            ("nobody's port", tagged(back(port + 64), PRIORITY | OUT), refused),
            ("another node's port", tagged(unleased.clone(), PRIORITY | UNDER), refused),
            ("the same through the tunnel", tagged(tunnelled(&unleased), PRIORITY | UNDER), refused),
            ("shorter than a tag", tagged(back(port), OUT)[..17].to_vec(), None),
            ("shorter than its length field", tagged(out(600), UNDER)[..500].to_vec(), Some(Counter::XdpUnusual)),
            ("too large for the uplink", tagged(out(1501 - 28), UNDER), Some(Counter::XdpLarge)),
        ] {
            rig.left(what, &frame, why);
        }
        rig.sent(BOTH_WAYS, &tagged(out(1500 - 28), UNDER));
        let frames = [tagged(out(600), UNDER), tagged(tunnelled(&out(600)), UNDER), tagged(back(port), OUT)];
        let mut in_vlans = usual.clone();
        put_into_subnets(&mut in_vlans, Some(VLAN));
        write(&mut rig, &in_vlans, &both(&wire));
        for frame in &frames {
            rig.left("a VLAN of an egress IP in that of a device", frame, Some(Counter::XdpVlan));
        }
        write(&mut rig, &usual, &both(&wire));
        Devices::open(rig.pins()).unwrap().set(&BTreeSet::from([wire.uplink, wire.underlay])).unwrap();
        for frame in &frames {
            rig.left("only the devices are allowed, not their card", frame, Some(Counter::XdpDevice));
        }
        write(&mut rig, &usual, &[]);
        for frame in &frames {
            rig.left("a VLAN without a device", frame, None);
        }
    });
}

/// An egress IP's VLAN has no device: the uplink is the card itself, and the underlay is a VLAN device of it.
#[test]
fn a_vlan_of_an_egress_ip_works_next_to_a_vlan_device_of_the_same_card() {
    let Some(mut rig) = Reused::new("devices-both", &NodeView::default()) else { return };
    in_netns("devices-both", || async move {
        let wire = Wire::new(&rig).await;
        let port = port_block::first_port(OTHER_BLOCK);
        let mut view = view(&wire, UNDERLAYS[0], DIRECT);
        put_into_subnets(&mut view, Some(VLAN));
        view.uplinks = [(CARD, HOST_MAC), (wire.uplink, HOST_MAC)].into();
        write(&mut rig, &view, &[(UNDER, wire.underlay)]);
        Devices::open(rig.pins()).unwrap().set(&BTreeSet::from([CARD, wire.uplink])).unwrap();
        rig.reply_by(DIRECT);
        for (egress, out, back) in exchanges(port) {
            for (tc, arrives, frame, at_tc, leaves) in [
                ("underlay_ingress", UNDER, &out, out.clone(), VLAN),
                ("uplink_ingress", VLAN, &back, tagged(back.clone(), VLAN), UNDER),
            ] {
                let mine = rig.sent(BOTH_WAYS, &tagged(frame.clone(), arrives));
                assert_eq!(untagged(&mine).0, leaves, "{egress}");
                let mine = if leaves == UNDER { untagged(&mine).1 } else { mine };
                assert_as_at_tc(&rig, &wire, tc, &at_tc, mine, false, "next to a VLAN device");
            }
        }
    });
}

/// Flips each bit of the headers of each usual frame: TC forwards every frame that is forwarded then as well, with the same bytes.
#[test]
fn turned_bits_of_frames_of_vlan_devices_are_sent_only_where_tc_sends_them() {
    let Some(mut rig) = Reused::new("devices-bits", &NodeView::default()) else { return };
    in_netns("devices-bits", || async move {
        let wire = Wire::new(&rig).await;
        let port = port_block::first_port(OTHER_BLOCK);
        let mut sent = BTreeMap::new();
        for ends in UNDERLAYS {
            write(&mut rig, &view(&wire, ends, DIRECT), &both(&wire));
            rig.reply_by(DIRECT);
            for (server, egress) in families() {
                let out = from_node(seal(ip(egress, server, UDP, &[], &udp(port, 53, b"question"))));
                let back = seal(ip(server, egress, UDP, &[], &udp(53, port, b"answer")));
                for (native, tc, arrives, frame, leaves) in ways(ends, [&out, &back]) {
                    let frame = tagged(frame, arrives);
                    for bit in 0..8 * frame.len() {
                        let mut turned = frame.clone();
                        turned[bit / 8] ^= 1 << (bit % 8);
                        let what = format!("bit {bit} of {frame:02x?}");
                        rig.run_native(native, &turned);
                        let (action, mine) = rig.run_native(native, &turned);
                        if action != SENT {
                            assert_eq!((action, mine), (PASS, turned), "{what}");
                            continue;
                        }
                        *sent.entry((frame.len(), native)).or_insert(0) += 1;
                        let ((vlan, turned), (left_by, mine)) = (untagged(&turned), untagged(&mine));
                        // At TC a device compares with its own MAC address, so the destination must not change.
                        assert_eq!((vlan & 0xfff, left_by, &turned[..6]), (arrives, leaves, &HOST_MAC[..]), "{what}");
                        assert_as_at_tc(&rig, &wire, tc, &turned, mine, false, &what);
                    }
                }
            }
        }
        assert!(sent.len() >= 6 && sent.values().all(|n| *n > 50), "{sent:?}");
    });
}
