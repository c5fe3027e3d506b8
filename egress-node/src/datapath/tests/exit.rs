//! `exit_egress`: single packets that leave, as the host or a foreign program made them.
//!
//! `BPF_PROG_TEST_RUN` accepts no notes: packets of our own programs are left to the end-to-end tests.

use super::{
    frames::{ICMP, ICMPV6, TCP, UDP, icmp, ip, read, seal, tcp, udp},
    reused::Reused,
    rig::*,
};
use egress_common::{abi::TUNNEL_PORT, config::flags, verdict::Counter};
use egress_core::encode::NodeView;
use std::net::IpAddr;

const SYN: u8 = 2;
const ACK: u8 = 16;
/// A pod's interface: that of every packet that the kernel makes for `BPF_PROG_TEST_RUN`.
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
    /// Runs a frame at an exit that came in by this interface; 0: this host has made it.
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
            // Any exit will do, and the packet's addresses and ports are enough.
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
    // Something unrelated changes between `pod_egress` and the exit: nothing is lost.
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
        // `pod_egress` lets through answers to queries that nobody has seen, and connections from before the policy.
        let (kind, protocol) = if pod.is_ipv4() { (0, ICMP) } else { (129, ICMPV6) };
        let answer = seal(ip(pod, server, protocol, &[], &icmp(kind, 7, b"pong")));
        assert_eq!(rig.leave(&answer, POD_IFINDEX), (NEXT, answer.clone()));
        let syn = seal(ip(server, pod, TCP, &[], &tcp(5000, 80, SYN, &[])));
        assert_eq!(rig.run("pod_ingress", &syn).0, NEXT);
        let reply = seal(ip(pod, server, TCP, &[], &tcp(80, 5000, SYN | ACK, &[])));
        assert_eq!(rig.run("pod_egress", &reply).0, NEXT, "the outside has opened it");
        assert_eq!(rig.leave(&reply, POD_IFINDEX), (NEXT, reply.clone()));
    }
    // Pods that no policy selects, destinations that none touches, and others.
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
        // Other nodes' traffic, where this one is a router between them.
        assert_eq!(rig.leave(&datagram(TUNNEL_PORT), 3).0, NEXT);
    }
}
