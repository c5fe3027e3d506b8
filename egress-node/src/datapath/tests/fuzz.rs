//! Runs arbitrary bytes through the programs: never a wrong class of verdict, never a broken checksum.
//!
//! `tests/corpus/frames.hex` holds, in hexadecimal, one frame for each different behaviour that the programs have shown. All of them go
//! first. The test prints a failing frame in that form: add it to the file. With `SPILLWAY_CORPUS=FILE`, it writes each frame that shows a
//! new behaviour to a file.

use super::{
    frames::{HOST_MAC, ICMP, ICMPV6, Read, TCP, UDP, icmp, ip, ports, read, seal, sums, tcp, udp},
    rig::*,
};
use crate::datapath::maps::Maps;
use egress_common::{abi::TUNNEL_PORT, port_block, verdict::Counter};
use ipnet::IpNet;
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};
use std::{
    cell::RefCell,
    collections::BTreeSet,
    fs::OpenOptions,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

const CORPUS: &str = include_str!("../../../../tests/corpus/frames.hex");
const PROGRAMS: [&str; 3] = ["pod_egress", "tunnel_ingress", "uplink_ingress"];

/// Returns packets to start from: from the pod, and towards the egress IP.
fn seeds() -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for (pod, egress, server) in [(POD4, EGRESS4, SERVER4), (POD6, EGRESS6, SERVER6)] {
        let (pod, egress, server) = (addr(pod), addr(egress), addr(server));
        let (icmp_proto, echo, error) = if pod.is_ipv4() { (ICMP, 8, 3) } else { (ICMPV6, 128, 1) };
        let answer = if pod.is_ipv4() { 0 } else { 129 };
        let own = port_block::first_port(OWN_BLOCKS[0]);
        let other = port_block::first_port(OTHER_BLOCK);
        for (src, dst, sport, dport) in
            [(pod, server, 40_000, 443), (server, egress, 443, own), (server, egress, 443, other)]
        {
            for flags in [2, 18, 16, 4] {
                all.push(seal(ip(src, dst, TCP, &[], &tcp(sport, dport, flags, &[2, 4, 0xff, 0xff]))));
            }
            all.push(seal(ip(src, dst, UDP, &[], &udp(sport, dport, b"data"))));
            all.push(seal(ip(src, dst, icmp_proto, &[], &icmp(echo, own, b"data"))));
            all.push(seal(ip(src, dst, icmp_proto, &[], &icmp(answer, own, b"data"))));
            let inner = ip(dst, src, UDP, &[], &udp(dport, sport, b"data"));
            let quote = [&[error, 0, 0, 0, 0, 0, 0, 0][..], &inner[14..]].concat();
            all.push(seal(ip(src, dst, icmp_proto, &[], &quote)));
            if pod.is_ipv4() {
                let options = [7, 7, 4, 0, 0, 0, 0, 1];
                all.push(seal(ip(src, dst, UDP, &options, &udp(sport, dport, b"options"))));
                for place in [[0x20, 0], [0, 9]] {
                    let mut part = ip(src, dst, UDP, &[], &udp(sport, dport, b"part"));
                    part[20..22].copy_from_slice(&place);
                    all.push(part);
                }
            } else {
                for place in [[0, 1], [0, 9]] {
                    let fragment = [UDP, 0, place[0], place[1], 0, 0, 0, 7];
                    all.push(ip(src, dst, 44, &fragment, &udp(sport, dport, b"data")));
                }
                let options = [UDP, 0, 1, 4, 0, 0, 0, 0];
                all.push(seal(ip(src, dst, 60, &options, &udp(sport, dport, b"options"))));
            }
        }
    }
    // Requests for the egress IP, by ARP and by neighbour solicitation.
    let mut arp = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &[0; 20]].concat();
    arp[38..42].copy_from_slice(&[192, 0, 2, 10]);
    all.push(arp);
    let IpAddr::V6(target) = addr(EGRESS6) else { unreachable!("an IPv6 address") };
    let question = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets()].concat();
    let mut solicitation = ip(addr(SERVER6), addr(EGRESS6), ICMPV6, &[], &question);
    solicitation[21] = 255;
    all.push(seal(solicitation));
    all
}

fn corpus() -> Vec<Vec<u8>> {
    let byte = |line: &str, at: usize| u8::from_str_radix(&line[at..at + 2], 16).expect("hexadecimal");
    let lines = CORPUS.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| (0..line.len() / 2).map(|i| byte(line, 2 * i)).collect()).collect()
}

fn hex(frame: &[u8]) -> String {
    frame.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Generates a packet (no shorter than the kernel accepts for a test run) with some bytes changed or cut off, or arbitrary bytes.
fn frame() -> impl Strategy<Value = Vec<u8>> {
    let damage = vec((12usize..100, any::<u8>()), 0..6);
    let start: Vec<_> = seeds().into_iter().chain(corpus()).collect();
    let damaged = (proptest::sample::select(start), damage, 34usize..160).prop_map(|(mut frame, damage, len)| {
        for (at, byte) in damage {
            if let Some(b) = frame.get_mut(at) {
                *b = byte;
            }
        }
        if len < 110 {
            frame.truncate(len);
        }
        frame
    });
    prop_oneof![8 => damaged, 1 => vec(any::<u8>(), 34..200)]
}

/// Returns the source and destination of a frame, even if it is otherwise malformed.
fn addresses(f: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let four = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(f.get(at..at + 4)?).ok()?).into());
    let sixteen = |at: usize| Some(Ipv6Addr::from(<[u8; 16]>::try_from(f.get(at..at + 16)?).ok()?).into());
    match f.get(12..14)? {
        [8, 0] => Some((four(26)?, four(30)?)),
        [0x86, 0xdd] => Some((sixteen(22)?, sixteen(38)?)),
        _ => None,
    }
}

/// What a program may do with a frame (docs/design.md, "Packet paths").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// It passes unchanged: Spillway is not concerned.
    Untouched,
    /// It leaves translated, or not at all.
    Steered,
    /// It is dropped.
    Dropped,
    /// It passes or is dropped, but is not sent.
    NotSent,
    /// The rules leave it open.
    Open,
}

fn never_leaves(destination: IpAddr) -> bool {
    match destination {
        IpAddr::V4(a) => {
            let [first, second, ..] = a.octets();
            first >= 224
                || first == 127
                || first == 0
                || [first, second] == [169, 254]
                || first == 198 && second / 2 == 9
        }
        IpAddr::V6(a) => {
            a.is_multicast() || a.is_loopback() || a.is_unspecified() || a.segments()[0] & 0xffc0 == 0xfe80
        }
    }
}

/// Returns whether the frame is about something that the outside began, or that the stack must answer.
fn is_an_answer(f: &[u8], r: &Read) -> bool {
    let first = f.get(r.l4).copied();
    let flags = f.get(r.l4 + 13).copied().unwrap_or(0);
    let answer = match r.proto {
        ICMP => first == Some(0),
        ICMPV6 => first == Some(129),
        TCP => flags & 0x12 == 0x12,
        _ => false,
    };
    r.hops <= 1 || answer && !r.later_fragment
}

/// Returns whether the headers can be read up to the transport header, if that may be UDP.
fn is_readable(f: &[u8]) -> bool {
    let Some(r) = read(f) else { return false };
    let plain = if r.src.is_ipv4() { f[14] >> 4 == 4 && f[14] & 15 >= 5 } else { f[14] >> 4 == 6 && r.l4 < 54 + 6 * 8 };
    plain && (r.proto != UDP || r.later_fragment || f.len() >= r.l4 + 8)
}

fn is_in(address: IpAddr, net: &str) -> bool {
    net.parse::<IpNet>().expect("a network").contains(&address)
}

fn is_for_tunnel(f: &[u8]) -> bool {
    read(f).is_some_and(|r| r.proto == UDP && f.len() >= r.l4 + 4 && ports(f).1 == TUNNEL_PORT)
}

/// Returns whether the frame is for another host's MAC address.
fn is_for_other_host(f: &[u8]) -> bool {
    f[0] & 1 == 0 && f[..6] != HOST_MAC
}

fn class(program: &str, f: &[u8]) -> Class {
    if program == "uplink_ingress" && is_for_other_host(f) {
        return Class::Untouched;
    }
    let Some((src, dst)) = addresses(f) else {
        return match program {
            "tunnel_ingress" => Class::Dropped,
            // ARP is handled at the uplink, and a request for a floating address gets no answer from the stack.
            "uplink_ingress" if f.get(12..14) == Some(&[8, 6]) => Class::NotSent,
            _ => Class::Untouched,
        };
    };
    match program {
        "pod_egress" if [addr(EGRESS4), addr(EGRESS6)].contains(&src) || is_for_tunnel(f) => Class::NotSent,
        "pod_egress" if !is_readable(f) => Class::NotSent,
        "pod_egress" if [REMOTE_PODS4, REMOTE_PODS6].iter().any(|net| is_in(src, net)) => Class::Dropped,
        "pod_egress" if ![addr(POD4), addr(POD6)].contains(&src) => Class::Untouched,
        "pod_egress" if never_leaves(dst) => Class::NotSent,
        "pod_egress" => match read(f) {
            Some(r) if is_an_answer(f, &r) => Class::Open,
            _ => Class::Steered,
        },
        // A test run has no tunnel metadata.
        "tunnel_ingress" => Class::Dropped,
        _ => {
            let ours = [addr(EGRESS4), addr(EGRESS6)].contains(&dst);
            match read(f) {
                // A neighbour solicitation is about the address in its body.
                Some(r) if r.proto == ICMPV6 && r.hops == 255 => {
                    if ours {
                        Class::Open
                    } else {
                        Class::NotSent
                    }
                }
                _ if !ours => Class::Untouched,
                // Nothing for a floating address reaches the stack.
                _ => Class::Steered,
            }
        }
    }
}

fn check(program: &str, f: &[u8], verdict: i32, out: &[u8]) -> Result<(), String> {
    let class = class(program, f);
    let allowed: &[i32] = match class {
        Class::Untouched => &[NEXT],
        Class::Steered => &[SHOT, REDIRECT],
        Class::Dropped => &[SHOT],
        Class::NotSent => &[NEXT, SHOT],
        Class::Open => &[NEXT, SHOT, REDIRECT],
    };
    if !allowed.contains(&verdict) {
        return Err(format!("verdict {verdict} for a packet of class {class:?}"));
    }
    match verdict {
        NEXT if out != f => Err("it changed a packet that it passes".to_owned()),
        REDIRECT => {
            let (Some(before), Some(after)) = (read(f), read(out)) else {
                return Err("it sends an unreadable packet".to_owned());
            };
            if (after.proto, after.l4) != (before.proto, before.l4) || sums(f) != sums(out) {
                return Err(format!("headers or sums differ: {:?} {:?}: {}", sums(f), sums(out), hex(out)));
            }
            let ours = [addr(EGRESS4), addr(EGRESS6)].contains(&after.src);
            if program == "pod_egress" && !ours {
                return Err(format!("it leaves with {}", after.src));
            }
            let with_ports = matches!(after.proto, TCP | UDP) && !after.later_fragment;
            let leased = |port: u16| port_block::of_port(port).is_some_and(|block| OWN_BLOCKS.contains(&block));
            if program == "pod_egress" && with_ports && !leased(ports(out).0) {
                return Err(format!("it leaves with port {}, which is not leased", ports(out).0));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The look of a frame: family, transport, whether it is a later fragment, whether something lies between the headers.
type Kind = (Option<bool>, u8, bool, bool);

fn looks(f: &[u8]) -> Kind {
    match read(f) {
        Some(r) if [ICMP, ICMPV6, TCP, UDP].contains(&r.proto) => {
            let plain = if r.src.is_ipv4() { 34 } else { 54 };
            (Some(r.src.is_ipv4()), r.proto, r.later_fragment, r.l4 > plain)
        }
        Some(r) => (Some(r.src.is_ipv4()), 0, false, false),
        None => (None, 0, false, false),
    }
}

/// The rig, and the behaviour that it has shown.
struct Watch {
    rig: Rig,
    maps: Maps,
    seen: BTreeSet<(Kind, &'static str, i32, Vec<Counter>)>,
    sent: usize,
}

impl Watch {
    /// Runs all programs with a frame. Returns whether any of them showed new behaviour.
    fn run(&mut self, frame: &[u8]) -> Result<bool, String> {
        let mut new = false;
        for program in PROGRAMS {
            let before = self.maps.counters().map_err(|e| e.to_string())?;
            let Some((verdict, out)) = self.rig.try_run(program, frame) else { continue };
            check(program, frame, verdict, &out).map_err(|error| format!("{program}: {error}\n{}", hex(frame)))?;
            let after = self.maps.counters().map_err(|e| e.to_string())?;
            let counted = after.into_iter().filter(|(counter, n)| before[counter] != *n).map(|(counter, _)| counter);
            new |= self.seen.insert((looks(frame), program, verdict, counted.collect()));
            self.sent += usize::from(verdict == REDIRECT);
            // Packets of a flow that the pod has answered are left alone, so the records of answers are removed before the next frame.
            if program == "pod_egress" && class(program, frame) == Class::Open {
                self.forget_answers();
            }
        }
        Ok(new)
    }

    fn forget_answers(&mut self) {
        for key in self.maps.v4.inbound.entries().unwrap().into_keys() {
            self.maps.v4.inbound.remove(&key).unwrap();
        }
        for key in self.maps.v6.inbound.entries().unwrap().into_keys() {
            self.maps.v6.inbound.remove(&key).unwrap();
        }
    }
}

#[test]
fn no_packet_gets_a_wrong_verdict_or_leaves_with_a_broken_checksum() {
    let Some(rig) = Rig::new("fuzz", &scene()) else { return };
    let maps = Maps::open(rig.pins()).unwrap();
    let watch = RefCell::new(Watch { rig, maps, seen: BTreeSet::new(), sent: 0 });
    let writes = std::env::var_os("SPILLWAY_CORPUS");
    for frame in &corpus() {
        watch.borrow_mut().run(frame).unwrap_or_else(|error| panic!("{error}"));
    }
    let features = watch.borrow().seen.len();
    assert!(
        features > 60 || writes.is_some(),
        "the corpus shows only {features} behaviours: it no longer covers the programs"
    );
    // An emulated machine has time for fewer cases.
    let cases = std::env::var("SPILLWAY_FUZZ_CASES").map_or(6_000, |text| text.parse().unwrap());
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    runner
        .run(&frame(), |frame| {
            let new = watch.borrow_mut().run(&frame).map_err(TestCaseError::fail)?;
            if let (true, Some(path)) = (new, &writes) {
                let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
                writeln!(file, "{}", hex(&frame)).unwrap();
            }
            Ok(())
        })
        .unwrap();
    let sent = watch.borrow().sent;
    assert!(sent > cases as usize / 12, "only {sent} packets were sent: the test no longer covers translation");
}
