//! The programs for drivers: they forward what the programs at TC would forward, and pass everything else to those unchanged.

use super::{
    frames::{
        HOST_MAC, ICMP, TCP, UDP, assert_right, fragment, icmp, ip, read, seal, tcp, udp, with_header_checksum, wrapped,
    },
    reused::Reused,
    rig::*,
    scenes,
};
use crate::{
    datapath::{
        load::NATIVE,
        maps::{Maps, typed},
        native::Devices,
    },
    host::testing::{Net, in_netns},
};
use aya::maps::{Array, MapData};
use egress_common::{
    abi::{INNER_DST_MAC, INNER_SRC_MAC, VNI_FORWARD, VNI_REPLY},
    config::flags,
    port_block, transport,
    verdict::Counter,
};
use egress_core::{
    encode::{EgressView, NodeView},
    model::Bandwidth,
    network::MacAddress,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// The program at the underlay, which meets packets of either direction, and the program at uplinks.
pub(super) const BOTH_WAYS: &str = NATIVE[0];
pub(super) const FROM_OUTSIDE: &str = NATIVE[1];
pub(super) const PASS: u32 = 2;
pub(super) const SENT: u32 = 4;
/// The loopback device, at which the frames of a test run arrive.
pub(super) const LOOPBACK: u32 = 1;
/// The next hops: outside the gateway, and on the underlay.
const ROUTER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const HOP_MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
/// Returns a gateway at whose loopback device frames arrive, with the uplink `uplink`; replies leave through `underlay`. `n1` holds a block
/// of its egress IPs, and its reply transport is `transport`.
pub(super) fn gateway(ends: [&str; 2], uplink: u32, underlay: u32, transport: u32) -> NodeView {
    let mut view = scene_between(ends, underlay, HOST_MAC, transport);
    view.macs.insert(THEIR_MAC, scenes::node(1));
    view.uplinks = [(LOOPBACK, HOST_MAC), (uplink, [2, 0, 0, 0, 0, 0x44])].into();
    carry(&mut view, uplink);
    view
}

pub(super) fn families() -> [(IpAddr, IpAddr); 2] {
    [(SERVER4, EGRESS4), (SERVER6, EGRESS6)].map(|(s, e)| (addr(s), addr(e)))
}

/// Returns for each family an egress IP, a SYN from this port of it that the other node has sent here, and an answer from outside.
pub(super) fn exchanges(port: u16) -> [(IpAddr, Vec<u8>, Vec<u8>); 2] {
    families().map(|(server, egress)| {
        let out = from_node(seal(ip(egress, server, TCP, &[], &tcp(port, 443, 2, &[]))));
        (egress, out, seal(ip(server, egress, UDP, &[], &udp(443, port, b"answer"))))
    })
}

/// Addresses the frame to this node, from the other node.
pub(super) fn from_node(mut frame: Vec<u8>) -> Vec<u8> {
    frame[..12].copy_from_slice(&[HOST_MAC, THEIR_MAC].concat());
    frame
}

/// Creates the interfaces of a gateway. Returns the index of the uplink, and of the underlay through which replies leave. The next hops of
/// both are known.
async fn interfaces() -> (u32, u32) {
    let net = Net::here();
    for name in ["out", "under"] {
        net.veth(name, &format!("{name}-far")).await;
        net.up(&format!("{name}-far")).await;
    }
    next_hops(&net).await
}

/// Makes the next hops of the interfaces `out` and `under` known. Returns the interfaces' indices.
pub(super) async fn next_hops(net: &Net) -> (u32, u32) {
    for setting in ["ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding"] {
        std::fs::write(format!("/proc/sys/net/{setting}"), "1").unwrap();
    }
    let hops = [("out", ["198.51.100.1/24", "2001:db8:1::1/64"], ["198.51.100.254", "2001:db8:1::fe"], ROUTER_MAC)];
    let under = [("under", ["10.0.0.1/24", "fd88::1/64"], ["10.0.0.3", "fd88::3"], HOP_MAC)];
    for (name, addresses, neighbours, mac) in hops.into_iter().chain(under) {
        net.up(name).await;
        for address in addresses {
            net.address(name, address).await;
        }
        for neighbour in neighbours {
            net.neighbour(name, neighbour, MacAddress(mac)).await;
        }
    }
    net.default_route("198.51.100.254", 10).await;
    net.default_route("2001:db8:1::fe", 10).await;
    (net.index("out").await, net.index("under").await)
}

impl Rig {
    /// Runs a frame that must be forwarded. Returns the result. The first frame of each moment is left to the kernel.
    #[track_caller]
    pub(super) fn sent(&mut self, program: &'static str, frame: &[u8]) -> Vec<u8> {
        for _ in 0..4 {
            let before = self.count(Counter::XdpHop);
            let (action, out) = self.run_native(program, frame);
            if action == SENT {
                return out;
            }
            assert_eq!((action, &out[..]), (PASS, frame));
            assert_eq!(self.count(Counter::XdpHop), before + 1, "{:?}", self.writer.maps().counters());
        }
        panic!("the kernel never learns the next hop");
    }

    /// Returns whether the programs at TC strip a tunnel's headers from packets of the other family: Linux 6.3 and later.
    pub(super) fn decapsulates(&self) -> bool {
        self.writer.maps().config.get(0).unwrap().flags & flags::DECAP_UDP != 0
    }

    /// Returns the frame that the program at TC forwards. `None` on kernels before Linux 6.3, where that program leaves packets of the
    /// other family to the tunnel's device.
    #[track_caller]
    fn sent_at_tc(&mut self, program: &'static str, frame: &[u8]) -> Option<Vec<u8>> {
        let (verdict, out) = self.run(program, frame);
        if verdict == NEXT && !self.decapsulates() {
            assert_eq!(out, frame);
            return None;
        }
        assert_eq!(verdict, REDIRECT, "{frame:02x?}");
        Some(out)
    }

    /// Runs a frame, and asserts that it is left to the next programs unchanged, for this reason.
    #[track_caller]
    pub(super) fn left(&mut self, what: &str, frame: &[u8], why: Option<Counter>) {
        let reasons = |rig: &Self| {
            let counters = rig.writer.maps().counters().unwrap().into_iter();
            counters.filter(|(counter, _)| counter.name().starts_with("xdp_")).collect::<BTreeMap<_, _>>()
        };
        for _ in 0..4 {
            let before = reasons(self);
            let (action, out) = self.run_native(BOTH_WAYS, frame);
            assert_eq!((action, &out[..]), (PASS, frame), "{what}");
            let after = reasons(self);
            let counted: Vec<Counter> = after.into_iter().filter(|(c, n)| before[c] != *n).map(|(c, _)| c).collect();
            // The first packet of a moment is left before anything else about it is decided.
            if counted != [Counter::XdpHop] {
                return assert_eq!(counted, why.into_iter().collect::<Vec<_>>(), "{what}");
            }
        }
        panic!("{what}: the kernel never learns the next hop");
    }
}

impl Rig {
    /// Sets the reply transport of the other nodes, as their probes do.
    pub(super) fn reply_by(&self, transport: u32) {
        let mut map: Array<MapData, u32> = typed(self.pins(), "REPLY_TRANSPORT").unwrap();
        (0..8).for_each(|index| map.set(index, transport, 0).unwrap());
    }
}

pub(super) fn allow(rig: &Rig, devices: &[u32]) {
    Devices::open(rig.pins()).unwrap().set(&devices.iter().copied().collect::<BTreeSet<_>>()).unwrap();
}

#[test]
fn translated_packets_leave_with_the_next_hops_address_and_nothing_else_changes() {
    let Some(mut rig) = Reused::new("native-out", &NodeView::default()) else { return };
    in_netns("native-out", || async move {
        let (uplink, underlay) = interfaces().await;
        for ends in UNDERLAYS {
            rig.write(&gateway(ends, uplink, underlay, transport::DIRECT));
            allow(&rig, &[uplink, underlay]);
            let port = port_block::first_port(OTHER_BLOCK);
            for (server, egress) in families() {
                for (proto, body) in [(TCP, tcp(port, 443, 2, &[])), (UDP, udp(port, 53, b"question"))] {
                    let inner = seal(ip(egress, server, proto, &[], &body));
                    let mut forwarded = rig.count(Counter::Forwarded);
                    for frame in [from_node(inner.clone()), wrapped(ends[1], ends[0], VNI_FORWARD, &inner)] {
                        let out = rig.sent(BOTH_WAYS, &frame);
                        assert_eq!((&out[..6], &out[12..]), (&ROUTER_MAC[..], &inner[12..]));
                        assert_right(&out);
                        // The same frame at TC, where the kernel determines the MAC addresses.
                        let there = rig.sent_at_tc("underlay_ingress", &frame);
                        forwarded += 1 + u64::from(there.is_some());
                        assert!(there.is_none_or(|there| there[12..] == out[12..]));
                    }
                    assert_eq!(rig.count(Counter::Forwarded), forwarded);
                }
            }
        }
        assert_eq!(rig.count(Counter::XdpSent), 16);
    });
}

#[test]
fn replies_go_back_to_the_node_that_has_the_port() {
    let Some(mut rig) = Reused::new("native-back", &NodeView::default()) else { return };
    in_netns("native-back", || async move {
        let (uplink, underlay) = interfaces().await;
        for (ends, transport) in UNDERLAYS.into_iter().flat_map(|u| [(u, transport::DIRECT), (u, transport::VXLAN)]) {
            rig.write(&gateway(ends, uplink, underlay, transport));
            allow(&rig, &[uplink, underlay]);
            rig.reply_by(transport);
            let port = port_block::first_port(OTHER_BLOCK);
            for (server, egress) in families() {
                let reply = seal(ip(server, egress, TCP, &[], &tcp(443, port, 16, &[])));
                let counts =
                    |rig: &Rig| [Counter::Replied, Counter::SentDirect, Counter::SentVxlan].map(|c| rig.count(c));
                let before = counts(&rig);
                let out = rig.sent(FROM_OUTSIDE, &reply);
                let direct = u64::from(transport == transport::DIRECT);
                assert_eq!(counts(&rig), [before[0] + 1, before[1] + direct, before[2] + 1 - direct]);
                let (verdict, there) = rig.run("uplink_ingress", &reply);
                assert_eq!((verdict, there.len()), (REDIRECT, out.len()));
                if direct == 1 {
                    assert_eq!(out[..12], [THEIR_MAC, HOST_MAC].concat());
                    assert_eq!(out, there);
                    continue;
                }
                assert_right(&out);
                assert_eq!(
                    (&out[..6], &out[12..14]),
                    (&HOP_MAC[..], if addr(ends[0]).is_ipv4() { &[8, 0][..] } else { &[0x86, 0xdd] })
                );
                let outer = read(&out).unwrap();
                assert_eq!((outer.src, outer.dst), (addr(ends[0]), addr(ends[1])));
                assert_eq!(out[outer.l4..], there[outer.l4..], "the same after the outer IP header");
                let headers = &out[outer.l4..];
                assert_eq!(headers[12..16], (VNI_REPLY << 8).to_be_bytes());
                assert_eq!(headers[16..28], [INNER_DST_MAC, INNER_SRC_MAC].concat());
                assert_eq!(headers[28..], reply[12..]);
            }
        }
    });
}

#[test]
fn packets_outside_the_common_case_reach_tc_unchanged_and_counted() {
    let Some(mut rig) = Reused::new("native-left", &NodeView::default()) else { return };
    in_netns("native-left", || async move {
        let (uplink, underlay) = interfaces().await;
        let ends = UNDERLAYS[0];
        let view = gateway(ends, uplink, underlay, transport::DIRECT);
        rig.write(&view);
        rig.reply_by(transport::DIRECT);
        let port = port_block::first_port(OTHER_BLOCK);
        let (server, egress) = families()[0];
        let out = |port: u16| from_node(seal(ip(egress, server, UDP, &[], &udp(port, 53, &[7; 600]))));
        let back = |port: u16| seal(ip(server, egress, UDP, &[], &udp(53, port, &[7; 600])));
        let tunnelled = |port: u16| wrapped(ends[1], ends[0], VNI_FORWARD, &out(port));
        // The driver may send nothing yet.
        for frame in [out(port), back(port), tunnelled(port)] {
            rig.left("no device", &frame, Some(Counter::XdpDevice));
        }
        allow(&rig, &[uplink, underlay]);
        for frame in [out(port), back(port), tunnelled(port)] {
            rig.sent(BOTH_WAYS, &frame);
        }
        let mut overheard = out(port);
        overheard[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0x77]);
        let mut stranger = out(port);
        stranger[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 0x99]);
        let mut elsewhere = back(port);
        elsewhere[..6].copy_from_slice(&[2, 0, 0, 0, 0, 0x77]);
        let mut stranger_in = tunnelled(port);
        stranger_in[29] = 9;
        let stranger_in = with_header_checksum(stranger_in);
        let refused = Some(Counter::XdpRefused);
        for (what, frame, why) in [
            ("a port that is another node's", out(port + 64), refused),
            ("an unleased port", out(80), refused),
            ("a reply for an unleased port", back(port + 64), refused),
            ("the same through the tunnel", tunnelled(port + 64), refused),
            ("another host's frame", overheard, refused),
            ("another host's reply", elsewhere, refused),
            ("a frame of a stranger", stranger, refused),
            ("a tunnelled one of a stranger", stranger_in, refused),
            ("this node's own pod", back(port_block::first_port(OWN_BLOCKS[0])), Some(Counter::XdpOwn)),
            ("a first fragment", fragment(out(port), [0x20, 0]), Some(Counter::XdpUnusual)),
            ("a later fragment", fragment(back(port), [0, 10]), Some(Counter::XdpUnusual)),
            (
                "options",
                from_node(seal(ip(egress, server, UDP, &[1, 1, 1, 0], &udp(port, 53, b"?")))),
                Some(Counter::XdpUnusual),
            ),
            ("another protocol", from_node(ip(egress, server, 47, &[], b"gre")), Some(Counter::XdpUnusual)),
            (
                "an error",
                from_node(seal(ip(egress, server, ICMP, &[], &icmp(3, 0, &back(port)[14..])))),
                Some(Counter::XdpUnusual),
            ),
            ("shorter than its length field", out(port)[..500].to_vec(), Some(Counter::XdpUnusual)),
            ("another network identifier", wrapped(ends[1], ends[0], VNI_REPLY, &out(port)), None),
            ("nothing of ours", from_node(seal(ip(addr(POD4), server, UDP, &[], &udp(port, 53, b"?")))), None),
        ] {
            rig.left(what, &frame, why);
        }
        let change = |change: &dyn Fn(&mut EgressView)| {
            let mut view = view.clone();
            view.egress_ips.values_mut().for_each(change);
            view
        };
        let limit = Bandwidth { rate_bps: 1_000_000_000, burst_bytes: 100_000 };
        rig.write(&change(&|e| e.limit = Some(limit)));
        rig.left("shaped", &out(port), Some(Counter::XdpShaped));
        rig.left("shaped", &back(port), Some(Counter::XdpShaped));
        rig.write(&change(&|e| e.node_address = true));
        rig.left("the node's own address", &back(port), Some(Counter::XdpOwn));
        rig.write(&change(&|e| e.forwards = false));
        rig.left("not carried", &out(port), None);
        let mut small = view.clone();
        small.transports.values_mut().for_each(|t| t.path.as_mut().unwrap().mtu = 600);
        rig.write(&small);
        rig.left("too large", &back(port), Some(Counter::XdpLarge));
        rig.write(&view);
        rig.reply_by(transport::DEVICE);
        rig.left("through the tunnel device", &back(port), Some(Counter::XdpDevice));
        let flags = Maps::open(rig.pins()).unwrap().config.get(0).unwrap().flags;
        assert_ne!(flags & flags::CARRIES, 0);
    });
}

/// The gateway sends itself nothing through the tunnel: what has its own address in the outer header is forged, or a socket's.
#[test]
fn tunnelled_packet_with_the_gateways_own_outer_source_is_left_to_tc_which_drops_it() {
    let Some(mut rig) = Reused::new("native-own-source", &NodeView::default()) else { return };
    in_netns("native-own-source", || async move {
        let (uplink, underlay) = interfaces().await;
        for ends @ [ours, theirs] in UNDERLAYS {
            rig.write(&gateway(ends, uplink, underlay, transport::DIRECT));
            allow(&rig, &[uplink, underlay]);
            for (server, egress) in families() {
                let tunnelled = |from: &str, block: u16| {
                    let question = udp(port_block::first_port(block), 53, b"question");
                    wrapped(from, ours, VNI_FORWARD, &seal(ip(egress, server, UDP, &[], &question)))
                };
                rig.sent(BOTH_WAYS, &tunnelled(theirs, OTHER_BLOCK));
                let own = tunnelled(ours, OWN_BLOCKS[0]);
                rig.left("from the gateway's own address", &own, Some(Counter::XdpRefused));
                // Before Linux 6.3, the program at TC leaves packets of the other family to the tunnel's device.
                if egress.is_ipv4() == addr(ours).is_ipv4() {
                    rig.dropped("underlay_ingress", &own, Counter::DropStranger);
                }
            }
        }
    });
}

/// Flips each bit of the headers of each usual frame: TC would forward every frame that is forwarded then as well, with the same bytes.
#[test]
fn the_driver_program_forwards_only_what_the_tc_program_would_forward() {
    let Some(mut rig) = Reused::new("native-bits", &NodeView::default()) else { return };
    in_netns("native-bits", || async move {
        let (uplink, underlay) = interfaces().await;
        let port = port_block::first_port(OTHER_BLOCK);
        let mut sent = BTreeMap::new();
        for ends in UNDERLAYS {
            rig.write(&gateway(ends, uplink, underlay, transport::DIRECT));
            allow(&rig, &[uplink, underlay]);
            rig.reply_by(transport::DIRECT);
            for (server, egress) in families() {
                let out = from_node(seal(ip(egress, server, UDP, &[], &udp(port, 53, b"question"))));
                let back = seal(ip(server, egress, UDP, &[], &udp(53, port, b"answer")));
                let tunnelled = wrapped(ends[1], ends[0], VNI_FORWARD, &out);
                for (native, program, frame) in [
                    (BOTH_WAYS, "underlay_ingress", out),
                    (BOTH_WAYS, "underlay_ingress", back.clone()),
                    (FROM_OUTSIDE, "uplink_ingress", back),
                    (BOTH_WAYS, "underlay_ingress", tunnelled),
                ] {
                    for bit in 0..8 * frame.len() {
                        let mut turned = frame.clone();
                        turned[bit / 8] ^= 1 << (bit % 8);
                        rig.run_native(native, &turned);
                        let (action, mine) = rig.run_native(native, &turned);
                        if action != SENT {
                            assert_eq!((action, &mine), (PASS, &turned), "bit {bit}");
                            continue;
                        }
                        *sent.entry((frame.len(), program)).or_insert(0) += 1;
                        let theirs = rig.sent_at_tc(program, &turned);
                        assert!(theirs.is_none_or(|theirs| theirs[12..] == mine[12..]), "bit {bit} of {frame:02x?}");
                    }
                }
            }
        }
        // Frames of each kind are forwarded, in each family and over each underlay: some bits do not matter.
        assert!(sent.len() >= 6 && sent.values().all(|n| *n > 50), "{sent:?}");
    });
}
