//! The kernel reuses the memory of an entry for another key as soon as the entry is removed or replaced, even while a program on another
//! CPU reads it. Data read from the other entry never leaves the node or reaches a pod.

use super::{
    frames::{TCP, UDP, ip, ports, read, seal, tcp, udp},
    reused::Reused,
    rig::*,
    scenes,
};
use crate::datapath::maps::{Maps, Table};
use aya::Pod;
use egress_common::{
    V4,
    endpoint::PolicyKey,
    flow::{FlowKey, Reverse},
    net, port_block,
};
use egress_core::encode::EgressView;
use nix::sys::{
    time::TimeSpec,
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};
use std::{
    collections::BTreeMap,
    net::IpAddr,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

/// The number of packets while entries change.
const PACKETS: u32 = 60_000;
/// How many of them must be sent at least: only those show what the programs have read. The others find no entry.
const LEAST: u32 = PACKETS / 100;
/// The time after the call at which a program is interrupted, in ns: at some of these moments it is reading.
const SOON: Range<u32> = 5_000..13_000;
/// The other flow's ports; network byte order.
const OTHER_PORT: u16 = 7;

/// Runs `packets` on one CPU while another one repeats `change`.
fn meanwhile(mut change: impl FnMut() + Send, packets: impl FnOnce()) {
    let all = cpus();
    let (here, there) = (all[0], all[1 % all.len()]);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            run_on(&[there]);
            while !over.load(Ordering::Relaxed) {
                change();
            }
        });
        run_on(&[here]);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(packets));
        over.store(true, Ordering::Relaxed);
        run_on(&all);
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Interrupts this CPU at each moment of [`SOON`] in turn, long enough for another CPU to reuse an entry's memory. Without an interruption,
/// a program ends sooner than that.
struct Interrupts(TimerFd);

impl Interrupts {
    fn new() -> Self {
        Self(TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::empty()).unwrap())
    }

    fn after(&self, packet: u32) {
        let delay = SOON.start + packet * 37 % (SOON.end - SOON.start);
        self.0.set(Expiration::OneShot(TimeSpec::new(0, delay.into())), TimerSetTimeFlags::empty()).unwrap();
    }
}

/// Alternates two entries in one piece of memory.
fn swap<K: Pod + Ord, V: Pod>(table: &mut Table<K, V>, one: &(K, V), other: &(K, V)) {
    table.remove(&one.0).unwrap();
    table.set(&other.0, &other.1).unwrap();
    table.remove(&other.0).unwrap();
    table.set(&one.0, &one.1).unwrap();
}

/// Removes all flows of IPv4.
fn remove_flows(maps: &mut Maps) {
    let (flows, reverses) = (maps.v4.flows.entries().unwrap(), maps.v4.reverse.entries().unwrap());
    flows.keys().for_each(|key| maps.v4.flows.remove(key).unwrap());
    reverses.keys().for_each(|key| maps.v4.reverse.remove(key).unwrap());
}

fn v4(text: &str) -> V4 {
    let IpAddr::V4(ip) = addr(text) else { unreachable!("an IPv4 address") };
    net::v4(ip)
}

#[test]
fn a_first_packet_is_not_led_by_a_policy_record_of_the_other_family() {
    // Only a flow's first packet reads the policy. Flows are removed before the table is full, and no two go to the same port: the node has
    // few ports towards each.
    const FLOWS: u32 = 1_000;
    let interrupts = Interrupts::new();
    let Some(mut rig) = Reused::new("reuse-policy", &scene()) else { return };
    let (mut maps, mut opened) = (Maps::open(rig.pins()).unwrap(), Maps::open(rig.pins()).unwrap());
    let both = maps.policies.entries().unwrap();
    let change = || both.iter().for_each(|(key, policy): (&PolicyKey, _)| maps.policies.set(key, policy).unwrap());
    let mut sent = 0;
    meanwhile(change, || {
        for n in 0..PACKETS {
            if n % FLOWS == 0 {
                remove_flows(&mut opened);
            }
            interrupts.after(n);
            let question = udp(40_000, 1024 + (n % FLOWS) as u16, b"question");
            let (verdict, out) = rig.run("pod_egress", &seal(ip(addr(POD4), addr(SERVER4), UDP, &[], &question)));
            if verdict == REDIRECT {
                sent += 1;
                assert_eq!(read(&out).unwrap().src, addr(EGRESS4), "packet {n}");
            }
        }
    });
    assert!(sent > LEAST, "{sent} were sent: {:?}", rig.writer.maps().counters());
}

#[test]
fn packet_never_leaves_as_a_flow_that_reuses_its_entrys_memory() {
    let interrupts = Interrupts::new();
    let Some(mut rig) = Reused::new("reuse-flow", &scene()) else { return };
    let segment = |flags| seal(ip(addr(POD4), addr(SERVER4), TCP, &[], &tcp(40_000, 443, flags, &[])));
    let (verdict, first) = rig.run("pod_egress", &segment(2));
    assert_eq!(verdict, REDIRECT);
    let mut maps = Maps::open(rig.pins()).unwrap();
    let own = maps.v4.flows.entries().unwrap().into_iter().next().unwrap();
    let key = FlowKey { src_port: OTHER_PORT, ..own.0 };
    let mut other = (key, egress_common::flow::Flow { port: OTHER_PORT, ..own.1 });
    other.1.seal(&key);
    let mut sent = 0;
    meanwhile(
        || swap(&mut maps.v4.flows, &own, &other),
        || {
            for n in 0..PACKETS {
                interrupts.after(n);
                let (verdict, out) = rig.run("pod_egress", &segment(16));
                if verdict == REDIRECT {
                    sent += 1;
                    assert_eq!(ports(&out).0, ports(&first).0, "packet {n}");
                }
            }
        },
    );
    assert!(sent > LEAST, "{sent} were sent: {:?}", rig.writer.maps().counters());
}

#[test]
fn reply_never_reaches_a_pod_whose_flow_reuses_its_entrys_memory() {
    let interrupts = Interrupts::new();
    let Some(mut rig) = Reused::new("reuse-reverse", &scene()) else { return };
    let (verdict, first) =
        rig.run("pod_egress", &seal(ip(addr(POD4), addr(SERVER4), TCP, &[], &tcp(40_000, 443, 2, &[]))));
    assert_eq!(verdict, REDIRECT);
    let reply = seal(ip(addr(SERVER4), addr(EGRESS4), TCP, &[], &tcp(443, ports(&first).0, 16, &[])));
    let mut maps = Maps::open(rig.pins()).unwrap();
    let own = maps.v4.reverse.entries().unwrap().into_iter().next().unwrap();
    let key = FlowKey { src_port: OTHER_PORT, ..own.0 };
    let mut other = (key, Reverse { pod: v4(STRANGER), pod_port: OTHER_PORT, ..own.1 });
    other.1.seal(&key);
    let mut sent = 0;
    meanwhile(
        || swap(&mut maps.v4.reverse, &own, &other),
        || {
            for n in 0..PACKETS {
                interrupts.after(n);
                let (verdict, out) = rig.run("uplink_ingress", &reply);
                if verdict == REDIRECT {
                    sent += 1;
                    assert_eq!((read(&out).unwrap().dst, ports(&out).1), (addr(POD4), 40_000), "packet {n}");
                }
            }
        },
    );
    assert!(sent > LEAST, "{sent} were sent: {:?}", rig.writer.maps().counters());
}

#[test]
fn a_packet_for_an_egress_ip_is_judged_by_that_ones_leases() {
    const OTHER: &str = "192.0.2.99";
    let interrupts = Interrupts::new();
    let mut view = scene();
    let carried = view.egress_ips.get_mut(&addr(EGRESS4)).unwrap();
    carried.gateway = Some(scenes::node(0));
    carried.forwards = true;
    carried.interface = Some(1);
    let without_leases = EgressView { leases: BTreeMap::new(), ..carried.clone() };
    view.egress_ips.insert(addr(OTHER), without_leases);
    let Some(mut rig) = Reused::new("reuse-index", &view) else { return };
    let segment = tcp(443, port_block::first_port(OTHER_BLOCK), 16, &[]);
    let reply = seal(ip(addr(SERVER4), addr(EGRESS4), TCP, &[], &segment));
    assert_eq!(rig.run("uplink_ingress", &reply).0, REDIRECT, "{:?}", rig.writer.maps().counters());
    let mut maps = Maps::open(rig.pins()).unwrap();
    let indices = maps.v4.egress_index.entries().unwrap();
    let of = |text| indices.iter().map(|(key, index)| (*key, *index)).find(|(key, _)| *key == v4(text)).unwrap();
    let (own, other) = (of(EGRESS4), of(OTHER));
    maps.v4.egress_index.remove(&other.0).unwrap();
    let mut sent = 0;
    meanwhile(
        || swap(&mut maps.v4.egress_index, &own, &other),
        || {
            for n in 0..PACKETS {
                interrupts.after(n);
                let (verdict, _) = rig.run("uplink_ingress", &reply);
                assert_ne!(verdict, SHOT, "packet {n}: {:?}", rig.writer.maps().counters());
                sent += u32::from(verdict == REDIRECT);
            }
        },
    );
    assert!(sent > LEAST, "{sent} were sent: {:?}", rig.writer.maps().counters());
}
