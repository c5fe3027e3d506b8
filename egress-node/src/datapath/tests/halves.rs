//! The two halves of a flow: one half is lost, two CPUs create the same flow, the tables are full. Rows half-pair, create-race, lru-early
//! and map-full of docs/failures.md.

use super::{
    frames::{TCP, UDP, ip, ports, read, seal, tcp, udp},
    reused::Reused,
    rig::*,
};
use crate::datapath::{
    load::Programs,
    maps::{FamilyMaps, Maps},
};
use aya::{
    Pod,
    programs::{TestRun as _, TestRunOptions},
};
use egress_common::{
    endpoint::RouteKey,
    flow::{Flow, FlowKey, Reverse},
    hash::Words,
    verdict::Counter,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    sync::atomic::{AtomicUsize, Ordering},
};

const SYN: u8 = 2;
const ACK: u8 = 16;

/// Returns the server's answer to a packet that was sent.
fn answer(sent: &[u8], flags: u8) -> Vec<u8> {
    let (r, (sport, dport)) = (read(sent).unwrap(), ports(sent));
    let body = if r.proto == TCP { tcp(dport, sport, flags, &[]) } else { udp(dport, sport, b"answer") };
    seal(ip(r.dst, r.src, r.proto, &[], &body))
}

/// Removes one half of the only flow, and makes the other half older than a tick.
fn lose<A: Pod + Ord>(maps: &mut FamilyMaps<A>, forward: bool)
where
    FlowKey<A>: Pod + Ord,
    Reverse<A>: Pod,
    RouteKey<A>: Pod,
{
    let (flows, reverses) = (maps.flows.entries().unwrap(), maps.reverse.entries().unwrap());
    assert_eq!((flows.len(), reverses.len()), (1, 1));
    let ((key, mut flow), (back, mut reverse)) =
        (flows.into_iter().next().unwrap(), reverses.into_iter().next().unwrap());
    if forward {
        maps.flows.remove(&key).unwrap();
        reverse.last_seen = reverse.last_seen.wrapping_sub(1);
        maps.reverse.set(&back, &reverse).unwrap();
    } else {
        maps.reverse.remove(&back).unwrap();
        flow.last_seen = flow.last_seen.wrapping_sub(1);
        maps.flows.set(&key, &flow).unwrap();
    }
}

#[test]
fn half_pair_lost_half_of_a_flow_is_rebuilt_from_the_other() {
    for (n, (pod, server)) in [(POD4, SERVER4), (POD6, SERVER6)].into_iter().enumerate() {
        let (pod, server) = (addr(pod), addr(server));
        for proto in [TCP, UDP] {
            let Some(mut rig) = Reused::new(&format!("half-pair-{n}-{proto}"), &scene()) else { return };
            let mut maps = Maps::open(rig.pins()).unwrap();
            let packet = |flags: u8| match proto {
                TCP => seal(ip(pod, server, TCP, &[], &tcp(40_000, 443, flags, &[]))),
                _ => seal(ip(pod, server, UDP, &[], &udp(40_000, 443, b"data"))),
            };
            let (verdict, out) = rig.run("pod_egress", &packet(SYN));
            assert_eq!(verdict, REDIRECT);
            let (verdict, delivered) = rig.run("uplink_ingress", &answer(&out, SYN | ACK));
            assert_eq!(verdict, REDIRECT);
            let later = rig.run("pod_egress", &packet(ACK)).1;
            for (repairs, forward) in [(1, true), (2, false), (3, true)] {
                if pod.is_ipv4() {
                    lose(&mut maps.v4, forward)
                } else {
                    lose(&mut maps.v6, forward)
                }
                // The remaining half sees a packet, and the other half is restored: the same port, the same pod.
                if forward {
                    assert_eq!(rig.run("uplink_ingress", &answer(&out, SYN | ACK)), (REDIRECT, delivered.clone()));
                } else {
                    assert_eq!(rig.run("pod_egress", &packet(ACK)), (REDIRECT, later.clone()));
                }
                assert_eq!(rig.count(Counter::FlowsRepaired), repairs);
                assert_eq!(rig.run("pod_egress", &packet(ACK)), (REDIRECT, later.clone()));
                assert_eq!(rig.run("uplink_ingress", &answer(&out, SYN | ACK)), (REDIRECT, delivered.clone()));
            }
            assert_eq!(rig.count(Counter::FlowsCreated), 1);
        }
    }
}

#[test]
fn flow_timestamps_use_the_clock_that_the_tools_read() {
    let Some(mut rig) = Reused::new("dated", &scene()) else { return };
    let before = now_tick();
    let packet = seal(ip(addr(POD4), addr(SERVER4), UDP, &[], &udp(40_000, 443, b"data")));
    assert_eq!(rig.run("pod_egress", &packet).0, REDIRECT);
    let flow = Maps::open(rig.pins()).unwrap().v4.flows.entries().unwrap().into_values().next().unwrap();
    // The kernel's own tick may begin a moment earlier or later.
    assert!((before - 1..=now_tick() + 1).contains(&flow.created), "{} and not {before}", flow.created);
    assert_eq!(flow.last_seen, flow.created);
}

/// The number of flows that two CPUs create concurrently.
const RACES: u16 = 3_000;

#[test]
fn create_race_two_cpus_that_make_the_same_flow_agree_on_it() {
    let Some(mut rig) = Rig::new("create-race", &scene()) else { return };
    let mut others = Programs::load_lazily(rig.pins(), SIZES).unwrap();
    let frames: Vec<Vec<u8>> = (0..RACES)
        .map(|n| seal(ip(addr(POD4), server(u32::from(n) / 64), UDP, &[], &udp(20_000 + n, 443, b"data"))))
        .collect();
    let arrived = AtomicUsize::new(0);
    let run = |programs: &mut Programs| -> Vec<(i32, Vec<u8>)> {
        let program = programs.get("pod_egress").unwrap();
        let each = frames.iter().enumerate().map(|(n, frame)| {
            let mut out = vec![0; frame.len() + 256];
            // Spins: a thread that sleeps until the other one arrives would be too late, as a program takes microseconds.
            arrived.fetch_add(1, Ordering::AcqRel);
            while arrived.load(Ordering::Acquire) < 2 * (n + 1) {
                std::hint::spin_loop();
            }
            let options = TestRunOptions { data_in: Some(frame), data_out: Some(&mut out), ..Default::default() };
            let result = program.test_run(options).unwrap();
            out.truncate(result.data_size_out as usize);
            (result.return_value as i32, out)
        });
        each.collect()
    };
    let (mine, theirs) = std::thread::scope(|scope| {
        let theirs = scope.spawn(|| run(&mut others));
        (run(&mut rig.programs), theirs.join().unwrap())
    });
    assert!(mine.iter().all(|(verdict, _)| *verdict == REDIRECT), "{:?}", rig.writer.maps().counters());
    let differing = mine.iter().zip(&theirs).filter(|(a, b)| a != b).count();
    assert_eq!(differing, 0, "flows whose packets differ between the two CPUs");
    assert_eq!(rig.count(Counter::FlowsCreated), u64::from(RACES));
    // No port without a flow remains taken.
    let maps = rig.writer.maps();
    let (flows, reverses) = (maps.v4.flows.entries().unwrap(), maps.v4.reverse.entries().unwrap());
    assert_eq!((flows.len(), reverses.len()), (usize::from(RACES), usize::from(RACES)));
}

/// Returns one of many servers.
fn server(n: u32) -> IpAddr {
    Ipv4Addr::from(0xcb00_7100 + n).into()
}

#[test]
fn lru_early_and_map_full_table_keeps_its_flows_and_refuses_new_ones() {
    let Some(mut rig) = Rig::new("full", &scene()) else { return };
    // As many flows as the tables hold (see [`SIZES`]).
    let all = 4096;
    // Connections: an unanswered query would make room after some seconds, and an emulated guest takes longer.
    let frame = |n: u32| seal(ip(addr(POD4), server(n / 64), TCP, &[], &tcp(1024 + n as u16, 443, SYN, &[])));
    // From all CPUs in turn: elements that one CPU keeps in reserve are not available to the others.
    let cpus = cpus();
    let mut turns = cpus.iter().cycle();
    let sent: Vec<_> = (0..all)
        .map(|n| {
            if n % 100 == 0 {
                run_on(&[*turns.next().unwrap()]);
            }
            rig.run("pod_egress", &frame(n))
        })
        .collect();
    run_on(&cpus);
    assert!(sent.iter().all(|(verdict, _)| *verdict == REDIRECT), "{:?}", rig.writer.maps().counters());
    let left: BTreeSet<&[u8]> = sent.iter().map(|(_, out)| &out[26..38]).collect();
    assert_eq!(left.len(), all as usize, "two flows share an address, a port and a server");

    for n in all..all + 10 {
        rig.dropped("pod_egress", &frame(n), Counter::DropTableFull);
    }
    for (n, before) in (0..all).zip(&sent) {
        assert_eq!(rig.run("pod_egress", &frame(n)), *before, "flow {n} has changed");
        let (verdict, back) = rig.run("uplink_ingress", &answer(&before.1, SYN | ACK));
        assert_eq!((verdict, ports(&back).1), (REDIRECT, 1024 + n as u16));
    }
    let maps = rig.writer.maps();
    let (flows, reverses) = (maps.v4.flows.entries().unwrap(), maps.v4.reverse.entries().unwrap());
    assert_eq!((flows.len(), reverses.len()), (all as usize, all as usize), "a refused flow left a half behind");
    assert_eq!(rig.count(Counter::FlowsRepaired), 0);
}

/// Applies `change` to the flows and reverse halves of one family, in that family's types.
fn of_family<A: Pod + Ord + Words>(maps: &mut FamilyMaps<A>, change: impl FnOnce(&mut FlowsOf<A>, &mut ReversesOf<A>))
where
    FlowKey<A>: Pod + Ord,
    Reverse<A>: Pod,
    RouteKey<A>: Pod,
{
    let (mut flows, mut reverses) = (maps.flows.entries().unwrap(), maps.reverse.entries().unwrap());
    let before = (flows.clone(), reverses.clone());
    change(&mut flows, &mut reverses);
    before.0.keys().filter(|k| !flows.contains_key(k)).for_each(|k| maps.flows.remove(k).unwrap());
    before.1.keys().filter(|k| !reverses.contains_key(k)).for_each(|k| maps.reverse.remove(k).unwrap());
    flows.iter_mut().for_each(|(k, v)| {
        v.seal(k);
        maps.flows.set(k, v).unwrap();
    });
    reverses.iter_mut().for_each(|(k, v)| {
        v.seal(k);
        maps.reverse.set(k, v).unwrap();
    });
}

type FlowsOf<A> = BTreeMap<FlowKey<A>, Flow>;
type ReversesOf<A> = BTreeMap<FlowKey<A>, Reverse<A>>;

/// Lets the second of the pod's two flows to one server take the port of the first: the first one's reverse half is gone, as when another
/// CPU reassigned its port, and everything is a tick older.
fn take_port<A: Pod + Ord>(flows: &mut FlowsOf<A>, reverses: &mut ReversesOf<A>) {
    let [first, second] = [40_000u16, 40_001].map(|port| *flows.keys().find(|k| k.src_port == port.to_be()).unwrap());
    let port = flows[&first].port;
    flows.get_mut(&second).unwrap().port = port;
    let [lost, kept] = [first, second].map(|k| *reverses.iter().find(|(_, r)| r.pod_port == k.src_port).unwrap().0);
    let value = reverses.remove(&kept).unwrap();
    reverses.insert(lost, value);
    flows.values_mut().for_each(|flow| flow.last_seen -= 1);
    reverses.values_mut().for_each(|reverse| reverse.last_seen -= 1);
}

#[test]
fn reused_halves_flow_that_lost_its_port_does_not_affect_the_new_holder() {
    for (n, (pod, server)) in [(POD4, SERVER4), (POD6, SERVER6)].into_iter().enumerate() {
        let (pod, server) = (addr(pod), addr(server));
        let Some(mut rig) = Reused::new(&format!("reused-port-{n}"), &scene()) else { return };
        let packet = |port: u16| seal(ip(pod, server, UDP, &[], &udp(port, 443, b"data")));
        let before = [40_000, 40_001].map(|port| rig.run("pod_egress", &packet(port)).1);
        let mut maps = Maps::open(rig.pins()).unwrap();
        match pod {
            IpAddr::V4(_) => of_family(&mut maps.v4, take_port),
            IpAddr::V6(_) => of_family(&mut maps.v6, take_port),
        }
        // The first flow does not send with the port that it lost, and does not affect the second.
        let (verdict, anew) = rig.run("pod_egress", &packet(40_000));
        assert_eq!(verdict, REDIRECT);
        assert_ne!(ports(&anew).0, ports(&before[0]).0, "two flows have one port");
        let (verdict, out) = rig.run("pod_egress", &packet(40_001));
        assert_eq!((verdict, ports(&out).0), (REDIRECT, ports(&before[0]).0));
        for (sent, port) in [(&anew, 40_000), (&out, 40_001)] {
            let (verdict, delivered) = rig.run("uplink_ingress", &answer(sent, 0));
            assert_eq!((verdict, ports(&delivered).1), (REDIRECT, port));
        }
        assert_eq!((rig.count(Counter::FlowsCreated), rig.count(Counter::FlowsRepaired)), (3, 0));
    }
}

/// Makes the pod's flow look reopened with another port, while the former reverse half still exists.
fn begin_anew<A: Pod + Ord>(flows: &mut FlowsOf<A>, reverses: &mut ReversesOf<A>) {
    let (key, flow) = flows.iter_mut().next().unwrap();
    // A port of the same block.
    flow.port = (u16::from_be(flow.port) ^ 1).to_be();
    let (old, value) = reverses.iter().next().map(|(k, v)| (*k, *v)).unwrap();
    reverses.insert(FlowKey { src_port: flow.port, ..old }, value);
    reverses.values_mut().for_each(|reverse| reverse.last_seen -= 1);
    assert_eq!(key.src_port, value.pod_port);
}

#[test]
fn reused_halves_orphaned_reverse_half_is_removed_by_the_next_reply() {
    for (n, (pod, server)) in [(POD4, SERVER4), (POD6, SERVER6)].into_iter().enumerate() {
        let (pod, server) = (addr(pod), addr(server));
        let Some(mut rig) = Reused::new(&format!("reused-reverse-{n}"), &scene()) else { return };
        let packet = seal(ip(pod, server, UDP, &[], &udp(40_000, 443, b"data")));
        let before = rig.run("pod_egress", &packet).1;
        let mut maps = Maps::open(rig.pins()).unwrap();
        match pod {
            IpAddr::V4(_) => of_family(&mut maps.v4, begin_anew),
            IpAddr::V6(_) => of_family(&mut maps.v6, begin_anew),
        }
        rig.dropped("uplink_ingress", &answer(&before, 0), Counter::DropNoReverse);
        let maps = rig.writer.maps();
        let halves = (
            maps.v4.flows.entries().unwrap().len() + maps.v6.flows.entries().unwrap().len(),
            maps.v4.reverse.entries().unwrap().len() + maps.v6.reverse.entries().unwrap().len(),
        );
        assert_eq!(halves, (1, 1));
        let (verdict, now) = rig.run("pod_egress", &packet);
        assert_eq!(verdict, REDIRECT);
        assert_eq!(rig.run("uplink_ingress", &answer(&now, 0)).0, REDIRECT);
    }
}
