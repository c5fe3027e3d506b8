//! The way of first packets through the host's stack, a step at a time; and what a pod may not take from others.

use super::{frames::*, rig::*};
use crate::datapath::load::config_flags;
use aya::programs::{TestRun as _, TestRunOptions};
use egress_common::{
    abi::{FIREWALL_MARK, FIREWALL_PRIORITY},
    config::flags,
    tcp::flag::SYN,
    verdict::Counter,
};

/// Length of `struct __sk_buff`, and the offsets in it of mark, priority and interface.
const CONTEXT: usize = 192;
const MARK: usize = 8;
const PRIORITY: usize = 32;
/// The loopback device, which test runs come in by.
const LOOPBACK: u32 = 1;

/// The verdict, the frame afterwards, and mark and priority afterwards.
fn run_marked(rig: &mut Rig, program: &'static str, frame: &[u8], mark: u32) -> (i32, Vec<u8>, [u32; 2]) {
    let (mut out, mut input, mut output) = (vec![0; frame.len() + 256], [0u8; CONTEXT], [0u8; CONTEXT]);
    input[MARK..MARK + 4].copy_from_slice(&mark.to_ne_bytes());
    let options = TestRunOptions {
        data_in: Some(frame),
        data_out: Some(&mut out),
        ctx_in: Some(&input),
        ctx_out: Some(&mut output),
        ..Default::default()
    };
    let result = rig.programs.get(program).unwrap().test_run(options).unwrap();
    out.truncate(result.data_size_out as usize);
    let word = |at: usize| u32::from_ne_bytes(output[at..at + 4].try_into().unwrap());
    (result.return_value as i32, out, [word(MARK), word(PRIORITY)])
}

fn respecting() -> crate::datapath::encode::NodeView {
    let mut view = scene();
    let config = view.config.as_mut().unwrap();
    config.flags = config_flags() | flags::RESPECT_FIREWALL;
    config.mark = FIREWALL_MARK;
    config.room = 1450;
    view
}

fn syns() -> [Vec<u8>; 2] {
    [(POD4, SERVER4), (POD6, SERVER6)]
        .map(|(pod, server)| seal(ip(addr(pod), addr(server), TCP, &[], &tcp(50_000, 443, SYN, &[]))))
}

#[test]
fn a_flow_waits_for_the_firewall_and_then_takes_the_short_way() {
    let Some(mut rig) = Rig::new("firewall", &respecting()) else { return };
    for syn in syns() {
        // Blocked or not, each packet goes the long way until one is let pass.
        for asked in 1..4 {
            let before = rig.count(Counter::FirewallAsked);
            let (verdict, frame, marks) = run_marked(&mut rig, "pod_egress", &syn, 0);
            assert_eq!((verdict, &frame, marks), (NEXT, &syn, [FIREWALL_MARK, FIREWALL_PRIORITY]), "packet {asked}");
            assert_eq!(rig.count(Counter::FirewallAsked), before + 1);
        }
        let passed = rig.count(Counter::FirewallPassed);
        // Without the bit it is nobody's; with it, and whatever others have added to the mark, it is translated.
        assert_eq!(run_marked(&mut rig, "tunnel_egress", &syn, 0).1, syn);
        let (verdict, frame, marks) = run_marked(&mut rig, "tunnel_egress", &syn, FIREWALL_MARK | 0xf000_0f00);
        assert_eq!((verdict, marks), (REDIRECT, [0, 0]), "{:?}", rig.writer.maps().counters());
        assert_right(&frame);
        let (before, after) = (read(&syn).unwrap(), read(&frame).unwrap());
        // The stack has counted the hop.
        assert_eq!((after.dst, after.hops), (before.dst, before.hops));
        assert!([addr(EGRESS4), addr(EGRESS6)].contains(&after.src));
        assert_eq!(rig.count(Counter::FirewallPassed), passed + 1);
        let (verdict, short, marks) = run_marked(&mut rig, "pod_egress", &syn, 0);
        assert_eq!((verdict, marks), (REDIRECT, [0, 0]));
        assert_eq!(ports(&short), ports(&frame));
    }
    // What NAT has changed on the long way belongs to no flow.
    let masqueraded = seal(ip(addr("10.0.0.1"), addr(SERVER4), TCP, &[], &tcp(50_000, 443, SYN, &[])));
    let before = rig.count(Counter::DropNotAsked);
    assert_eq!(run_marked(&mut rig, "tunnel_egress", &masqueraded, FIREWALL_MARK).0, SHOT);
    assert_eq!(rig.count(Counter::DropNotAsked), before + 1);
}

#[test]
fn what_is_too_large_for_the_tunnel_and_must_stay_whole_goes_to_the_stack() {
    let mut view = respecting();
    view.config.as_mut().unwrap().flags &= !flags::RESPECT_FIREWALL;
    let Some(mut rig) = Rig::new("too-large", &view) else { return };
    let datagram = |size: usize, whole: bool| {
        let mut frame = ip(addr(POD4), addr(SERVER4), UDP, &[], &udp(40_000, 53, &vec![7; size - 28]));
        frame[20] = if whole { 0x40 } else { 0 };
        seal(frame)
    };
    for (size, whole, expected) in [(1450, true, REDIRECT), (1451, true, NEXT), (1451, false, REDIRECT)] {
        let frame = datagram(size, whole);
        let (verdict, _, [mark, _]) = run_marked(&mut rig, "pod_egress", &frame, 0);
        assert_eq!((verdict, mark), (expected, if expected == NEXT { FIREWALL_MARK } else { 0 }), "{size} {whole}");
    }
}

#[test]
fn an_address_belongs_to_the_interface_that_its_pod_is_behind() {
    let mut view = scene();
    let Some(mut rig) = Rig::new("spoofed", &view) else { return };
    let [v4, v6] = syns();
    for syn in [&v4, &v6] {
        assert_eq!(rig.run("pod_egress", syn).0, REDIRECT);
    }
    // The node's routes say that the pod is elsewhere: its flows and new ones.
    let mut behind = |interface: u32| {
        for endpoint in view.endpoints.values_mut() {
            endpoint.interfaces = endpoint.ips.iter().map(|ip| (*ip, interface)).collect();
        }
        view.clone()
    };
    rig.write(&behind(LOOPBACK + 6));
    let new = seal(ip(addr(POD4), addr(SERVER4), UDP, &[], &udp(1, 2, b"new")));
    let unselected = seal(ip(addr(STRANGER), addr(SERVER4), UDP, &[], &udp(1, 2, b"unselected")));
    for frame in [&new, &unselected] {
        rig.dropped("pod_egress", frame, Counter::DropSpoofed);
    }
    rig.write(&behind(LOOPBACK));
    for frame in [&v4, &v6, &new] {
        assert_eq!(rig.run("pod_egress", frame).0, REDIRECT);
    }
}

#[test]
fn a_pod_has_no_more_than_its_share_of_the_flow_table() {
    let mut view = scene();
    view.config.as_mut().unwrap().pod_flows = 5;
    let Some(mut rig) = Rig::new("share", &view) else { return };
    for (pod, server) in [(POD4, SERVER4), (POD6, SERVER6)] {
        let frame = |port: u16| seal(ip(addr(pod), addr(server), UDP, &[], &udp(port, 53, b"flood")));
        for port in 1..=5 {
            assert_eq!(rig.run("pod_egress", &frame(port)).0, REDIRECT, "{port}");
        }
        rig.dropped("pod_egress", &frame(6), Counter::DropPodShare);
        // What it has goes on.
        assert_eq!(rig.run("pod_egress", &frame(1)).0, REDIRECT);
    }
}
