//! Tests `exit_egress` with single packets that leave, made by the host or by a foreign program.
//!
//! `BPF_PROG_TEST_RUN` accepts no notes: the end-to-end tests cover packets of our own programs.

use super::{
    frames::{ICMP, ICMPV6, TCP, UDP, icmp, ip, read, seal, tagged, tcp, udp},
    reused::Reused,
    rig::*,
};
use crate::{
    datapath::{
        attach::{Attacher, mode},
        load::Programs,
    },
    host::testing::{Net, NetNs, in_netns, soon},
};
use egress_common::{
    abi::TUNNEL_PORT,
    config::flags,
    probe::{MAGIC, PORT, REQUEST, SRC_MAC, VERSION},
    transport::DIRECT,
    verdict::Counter,
};
use egress_core::encode::NodeView;
use std::{collections::BTreeMap, net::IpAddr, os::fd::AsRawFd as _};

const SYN: u8 = 2;
const ACK: u8 = 16;
/// The interface of every packet that the kernel makes for `BPF_PROG_TEST_RUN`, here a pod's interface.
const POD_IFINDEX: u32 = 1;
fn view() -> NodeView {
    let mut view = scene();
    let config = view.config.as_mut().unwrap();
    config.flags |= flags::RESPECT_FIREWALL;
    config.tunnel_port = TUNNEL_PORT.into();
    view
}

fn families() -> [(IpAddr, IpAddr, IpAddr); 2] {
    [(addr(POD4), addr(EGRESS4), addr(SERVER4)), (addr(POD6), addr(EGRESS6), addr(SERVER6))]
}

impl Rig {
    /// Runs a frame at an exit. `ingress` is the interface that it arrived on; 0: this host made it.
    fn leave(&mut self, frame: &[u8], ingress: u32) -> (i32, Vec<u8>) {
        self.run_with("exit_egress", frame, &[(INGRESS_IFINDEX, ingress)])
            .expect("a frame that the kernel runs programs with")
    }

    #[track_caller]
    fn kept(&mut self, frame: &[u8], ingress: u32, why: Counter) {
        let before = self.count(why);
        assert_eq!(self.leave(frame, ingress).0, SHOT, "{frame:02x?} leaves: {:?}", self.writer.maps().counters());
        assert_eq!(self.count(why), before + 1, "not {}: {:?}", why.name(), self.writer.maps().counters());
    }
}

#[test]
fn packets_that_the_host_forwarded_are_translated_and_confirm_their_flow() {
    let Some(mut rig) = Reused::new("exit-caught", &view()) else { return };
    for (pod, egress, server) in families() {
        let (kind, protocol) = if pod.is_ipv4() { (8, ICMP) } else { (128, ICMPV6) };
        let bodies =
            [(TCP, tcp(4000, 443, SYN, &[])), (UDP, udp(4000, 53, b"question")), (protocol, icmp(kind, 7, b"ping"))];
        for (proto, body) in bodies {
            let frame = seal(ip(pod, server, proto, &[], &body));
            assert_eq!(rig.run("pod_egress", &frame), (NEXT, frame.clone()), "the host decides");
            let passed = rig.count(Counter::FirewallPassed);
            // Any exit will do, and the packet's addresses and ports suffice.
            let (verdict, out) = rig.leave(&frame, POD_IFINDEX);
            assert_eq!((verdict, read(&out).unwrap().src), (REDIRECT, egress), "{:?}", rig.writer.maps().counters());
            assert_eq!(read(&out).unwrap().hops, read(&frame).unwrap().hops, "a router has already decremented it");
            assert_eq!(rig.count(Counter::FirewallPassed), passed + 1);
            assert_eq!(rig.run("pod_egress", &frame).0, REDIRECT, "it is confirmed");
        }
    }
}

#[test]
fn a_packet_checked_under_older_tables_leaves_if_its_slot_is_still_valid() {
    let Some(mut rig) = Reused::new("exit-changed", &view()) else { return };
    // Either something unrelated changes between `pod_egress` and the exit: nothing is lost.
    let mut other = view();
    other.endpoints.retain(|_, pod| !pod.ips.contains(&addr(STRANGER)));
    // Or the policy loses its slots.
    let mut without = other.clone();
    without.policies.values_mut().for_each(|policy| policy.slots.clear());
    for (port, (tables, leaves)) in [(other, true), (without, false)].into_iter().enumerate() {
        for (pod, egress, server) in families() {
            let (tcp, udp) = (tcp(4100 + port as u16, 443, SYN, &[]), udp(4100 + port as u16, 53, b"question"));
            for frame in [(TCP, tcp), (UDP, udp)].map(|(proto, body)| seal(ip(pod, server, proto, &[], &body))) {
                rig.write(&view());
                assert_eq!(rig.run("pod_egress", &frame).0, NEXT, "the host decides");
                rig.write(&tables);
                if leaves {
                    let (verdict, out) = rig.leave(&frame, POD_IFINDEX);
                    assert_eq!(
                        (verdict, read(&out).unwrap().src),
                        (REDIRECT, egress),
                        "{:?}",
                        rig.writer.maps().counters()
                    );
                } else {
                    rig.kept(&frame, POD_IFINDEX, Counter::DropSevered);
                }
            }
        }
    }
}

#[test]
fn packets_that_no_program_has_seen_do_not_leave() {
    let Some(mut rig) = Reused::new("exit-unguarded", &view()) else { return };
    for (pod, _, server) in families() {
        for (proto, body) in [(TCP, tcp(1, 2, SYN, &[])), (TCP, tcp(1, 2, ACK, &[])), (UDP, udp(1, 2, b"datagram"))] {
            rig.kept(&seal(ip(pod, server, proto, &[], &body)), POD_IFINDEX, Counter::DropUnguarded);
        }
        rig.kept(&ip(pod, server, 47, &[], b"GRE"), POD_IFINDEX, Counter::DropUnguarded);
        // Nobody has asked for this answer.
        let (kind, protocol) = if pod.is_ipv4() { (0, ICMP) } else { (129, ICMPV6) };
        rig.kept(&seal(ip(pod, server, protocol, &[], &icmp(kind, 7, b"pong"))), POD_IFINDEX, Counter::DropUnguarded);
        let syn = seal(ip(server, pod, TCP, &[], &tcp(5000, 80, SYN, &[])));
        assert_eq!(rig.run("pod_ingress", &syn).0, NEXT);
        let reply = seal(ip(pod, server, TCP, &[], &tcp(80, 5000, SYN | ACK, &[])));
        assert_eq!(rig.run("pod_egress", &reply).0, NEXT, "the outside has opened it");
        assert_eq!(rig.leave(&reply, POD_IFINDEX), (NEXT, reply.clone()));
    }
    // Pods that no policy selects, destinations that no policy touches, and others.
    for (from, to) in [(STRANGER, SERVER4), (POD4, "198.18.3.4"), (SERVER4, POD4), (POD4, "169.254.169.254")] {
        let frame = seal(ip(addr(from), addr(to), UDP, &[], &udp(1, 2, b"whatever")));
        assert_eq!(rig.leave(&frame, POD_IFINDEX), (NEXT, frame.clone()), "{from} to {to}");
    }
}

#[test]
fn only_our_programs_may_send_with_an_egress_ip() {
    let view = view();
    let Some(mut rig) = Reused::new("exit-forged", &view) else { return };
    for (_, egress, server) in families() {
        let frame = seal(ip(egress, server, UDP, &[], &udp(5000, 53, b"forged")));
        for ingress in [0, POD_IFINDEX] {
            rig.kept(&frame, ingress, Counter::DropForged);
        }
        for (node_address, here, ingress, verdict) in
            [(true, true, 0, NEXT), (true, false, 0, SHOT), (true, false, POD_IFINDEX, NEXT), (false, true, 0, NEXT)]
        {
            let mut view = view.clone();
            let e = view.egress_ips.get_mut(&egress).unwrap();
            (e.node_address, e.here) = (node_address, here);
            rig.write(&view);
            assert_eq!(rig.leave(&frame, ingress).0, verdict, "{node_address} {here} {ingress}");
        }
        rig.write(&view);
    }
    // VLAN tags hide nothing.
    for (_, egress, server) in families() {
        let forged = seal(ip(egress, server, UDP, &[], &udp(5000, 53, b"forged")));
        let tunnelled = seal(ip(server, server, UDP, &[], &udp(5000, TUNNEL_PORT, b"forged")));
        let harmless = seal(ip(server, server, UDP, &[], &udp(5000, 53, b"harmless")));
        for tags in [&[100][..], &[100, 200]] {
            let tag = |frame: &[u8]| tags.iter().fold(frame.to_vec(), |frame, vlan| tagged(frame, *vlan));
            rig.kept(&tag(&forged), 0, Counter::DropForged);
            rig.kept(&tag(&tunnelled), 0, Counter::DropTunnelPort);
            assert_eq!(rig.leave(&tag(&harmless), 0), (NEXT, tag(&harmless)));
        }
    }
    // Neither does a header chain that is too long to parse: the datagram behind it may be for the tunnel's port.
    let many = [[60, 0, 1, 4, 0, 0, 0, 0].repeat(6), vec![UDP, 0, 1, 4, 0, 0, 0, 0]].concat();
    for source in [EGRESS6, SERVER6] {
        let hidden = ip(addr(source), addr(SERVER6), 60, &many, &udp(1, TUNNEL_PORT, b""));
        rig.kept(&hidden, 0, Counter::DropMalformed);
        rig.kept(&tagged(hidden, 100), 0, Counter::DropMalformed);
    }
    // The agent's announcements of an egress IP are never routed.
    let mut announcement = ip(addr(EGRESS6), addr("ff02::1"), ICMPV6, &[], &icmp(136, 0, &[0; 20]));
    rig.kept(&announcement, 0, Counter::DropForged);
    announcement[21] = 255;
    assert_eq!(rig.leave(&announcement, 0).0, NEXT);
}

#[test]
fn only_our_programs_may_send_to_the_tunnels_port() {
    let mut view = view();
    view.uplinks.insert(3, [2, 0, 0, 0, 0, 3]);
    let Some(mut rig) = Reused::new("exit-tunnel-port", &view) else { return };
    for (from, to) in [("10.0.0.1", "10.0.0.2"), ("fd88::1", "fd88::2"), (STRANGER, "203.0.113.5")] {
        let datagram = |port: u16| seal(ip(addr(from), addr(to), UDP, &[], &udp(5000, port, b"forged")));
        for ingress in [0, POD_IFINDEX] {
            rig.kept(&datagram(TUNNEL_PORT), ingress, Counter::DropTunnelPort);
            assert_eq!(rig.leave(&datagram(TUNNEL_PORT + 1), ingress).0, NEXT);
        }
        // Other nodes' traffic, if this node is a router between them.
        assert_eq!(rig.leave(&datagram(TUNNEL_PORT), 3).0, NEXT);
    }
}

#[test]
fn only_a_probe_leaves_as_the_agents_probe() {
    let [ours, theirs] = UNDERLAYS[0];
    let mut view = scene_between([ours, theirs], 9, [2, 0, 0, 0, 0, 1], DIRECT);
    view.config.as_mut().unwrap().tunnel_ifindex = POD_IFINDEX;
    let Some(mut rig) = Reused::new("exit-probe", &view) else { return };
    let IpAddr::V4(remote) = addr(theirs) else { unreachable!("an IPv4 address") };
    let payload =
        [&MAGIC[..], &[VERSION, REQUEST, DIRECT as u8, 0], &[0; 16], &remote.to_ipv6_mapped().octets(), &[0; 8]];
    let payload = payload.concat();
    for (_, egress, server) in families() {
        let marked = |extra: &[u8], body: &[u8]| {
            let mut frame = seal(ip(egress, server, UDP, extra, body));
            frame[6..12].copy_from_slice(&SRC_MAC);
            frame
        };
        assert_eq!(rig.leave(&marked(&[], &udp(PORT, PORT, &payload)), 0).0, REDIRECT);
        rig.kept(&marked(&[], &udp(5000, 53, &payload)), 0, Counter::DropForged);
        rig.kept(&marked(&[], &udp(PORT, PORT, &[&[0; 4], &payload[4..]].concat())), 0, Counter::DropForged);
        if egress.is_ipv4() {
            // A probe among the options, and another datagram behind them.
            let ports = [PORT.to_be_bytes(), PORT.to_be_bytes()].concat();
            let options = [&ports[..], &[0; 4], &payload[..8]].concat();
            rig.kept(&marked(&options, &udp(5000, 53, &payload)), 0, Counter::DropForged);
        }
    }
}

/// Sends a frame through a packet socket that declares another protocol. Ignores the error that reports a dropped frame.
fn send_as(protocol: u16, ifindex: u32, frame: &[u8]) {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
    let wire = socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), None).unwrap();
    // SAFETY: all zeros are a valid address.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    (to.sll_family, to.sll_protocol) = (libc::AF_PACKET as u16, protocol.to_be());
    to.sll_ifindex = ifindex as i32;
    let len = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: frame and address are valid for their lengths.
    unsafe { libc::sendto(wire.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0, (&raw const to).cast(), len) };
}

#[test]
fn a_packet_socket_that_lies_about_the_protocol_cannot_send_with_an_egress_ip() {
    let Some(mut rig) = Rig::new("exit-protocol", &NodeView::default()) else { return };
    in_netns("exit-protocol", || async move {
        let (net, other) = (Net::here(), NetNs::create());
        net.veth_into("eth0", &other, "there").await;
        let uplink = net.index("eth0").await;
        rig.write(&view());
        let pins = rig.pins().clone();
        let programs = Programs::load_lazily(&pins, SIZES).unwrap();
        let mut attacher = Attacher::new(programs, pins, mode());
        let live = BTreeMap::from([(uplink, "eth0".to_owned())]);
        let errors = attacher.sync(&[(("exit_egress", uplink), "eth0".to_owned())].into(), &live, true);
        assert!(errors.is_empty(), "{errors:?}");
        for (n, (_, egress, server)) in families().into_iter().enumerate() {
            send_as(0x1234, uplink, &seal(ip(egress, server, UDP, &[], &udp(5000, 53, b"forged"))));
            soon("a drop", async {
                while rig.count(Counter::DropForged) <= n as u64 {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        }
    });
}

/// Row mtu of docs/failures.md: from an underlay with large packets to an uplink with small ones.
#[test]
fn packets_too_large_for_the_uplink_are_dropped_and_counted() {
    const UPLINK_MTU: usize = 1_500;
    let Some(mut rig) = Rig::new("exit-large", &NodeView::default()) else { return };
    in_netns("exit-large", || async move {
        let (net, other) = (Net::here(), NetNs::create());
        net.veth_into("eth0", &other, "there").await;
        let uplink = net.index("eth0").await;
        let mut view = scene();
        carry(&mut view, uplink);
        view.uplinks.insert(uplink, [2, 0, 0, 0, 0, 9]);
        rig.write(&view);
        for (pod, _, server) in families() {
            let header = if pod.is_ipv4() { 28 } else { 48 };
            let datagram = |len: usize| seal(ip(pod, server, UDP, &[], &udp(4000, 53, &vec![7; len - header])));
            for _ in 0..3 {
                assert_eq!(rig.run("pod_egress", &datagram(UPLINK_MTU)).0, REDIRECT);
                rig.dropped("pod_egress", &datagram(UPLINK_MTU + 1), Counter::DropTooLarge);
            }
        }
    });
}
