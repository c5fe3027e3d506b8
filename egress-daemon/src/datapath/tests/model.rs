//! The programs against the reference NAT of [`nat`](super::nat): random packets of pods, forgers and the outside, changes of tables, lost
//! forward halves, expiry, and two CPUs at once. After each step the design's rules hold.
//!
//! An episode is a few hundred steps that follow from a seed. One that fails is printed with its seed and the fewest of its steps that
//! still fail; `SPILLWAY_MODEL_SEED=S` runs that episode alone. `SPILLWAY_MODEL_STEPS=N` runs more of them, or fewer.

use super::{
    frames::{ICMP, ICMPV6, TCP, UDP, icmp, ip, read, seal, tcp, udp},
    moves::{BLOCK, EGRESS, NOBODYS, Op, PODS, Random, SERVERS, op, owner, view, views},
    nat::{ACK, Nat, Outcome, Reply, SYN, Tuple},
    rig::*,
};
use crate::datapath::{
    load::{Programs, Sizes},
    maps::Maps,
};
use aya::programs::{TestRun as _, TestRunOptions};
use egress_common::{V4, V6, egress::EgressIp, flow::FlowKey, net};
use std::{
    collections::BTreeMap,
    fmt::Debug,
    net::IpAddr,
    process::Command,
    sync::{Barrier, mpsc},
};

/// Steps of all episodes together where nothing else is said.
const STEPS: usize = 1_000_000;
const EPISODE: usize = 300;
/// That of every interface: frames for another one are somebody else's.
const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
/// The whole flow table is looked at after so many steps; the flow of a step after each.
const LOOK: usize = 50;

/// A pod's packet.
fn packet(tuple: &Tuple, flags: u8) -> Vec<u8> {
    let body = match tuple.proto {
        TCP => tcp(tuple.pod_port, tuple.server_port, flags, &[]),
        UDP => udp(tuple.pod_port, tuple.server_port, b"question"),
        ICMP => icmp(8, tuple.pod_port, b"ping"),
        _ => icmp(128, tuple.pod_port, b"ping"),
    };
    let mut frame = seal(ip(tuple.pod, tuple.server, tuple.proto, &[], &body));
    frame[11] =
        u8::try_from(PODS.iter().position(|pod| pod.iter().any(|a| addr(a) == tuple.pod)).unwrap_or(7)).unwrap();
    frame
}

/// An answer to what the outside saw of a flow.
fn answer(reply: &Reply, flags: u8) -> Vec<u8> {
    let body = match reply.proto {
        TCP => tcp(reply.server_port, reply.port, flags, &[]),
        UDP => udp(reply.server_port, reply.port, b"answer"),
        ICMP => icmp(0, reply.port, b"ping"),
        _ => icmp(129, reply.port, b"ping"),
    };
    seal(ip(reply.server, reply.egress, reply.proto, &[], &body))
}

/// "Port unreachable" from `from` to `to` about a packet.
fn error(from: IpAddr, to: IpAddr, about: &[u8]) -> Vec<u8> {
    let (kind, protocol) = if from.is_ipv4() { (3, ICMP) } else { (1, ICMPV6) };
    seal(ip(from, to, protocol, &[], &[&[kind, 3, 0, 0, 0, 0, 0, 0][..], &about[14..]].concat()))
}

/// Source and destination of a frame with their ports; of an ICMP query the identifier is the port of whoever asked.
fn ends(frame: &[u8]) -> (IpAddr, u16, IpAddr, u16, u8) {
    let r = read(frame).unwrap();
    let word = |at: usize| u16::from_be_bytes([frame[r.l4 + at], frame[r.l4 + at + 1]]);
    match r.proto {
        TCP | UDP => (r.src, word(0), r.dst, word(2), r.proto),
        _ if matches!(frame[r.l4], 8 | 128) => (r.src, word(4), r.dst, 0, r.proto),
        _ => (r.src, 0, r.dst, word(4), r.proto),
    }
}

fn outward(frame: &[u8]) -> Reply {
    let (egress, port, server, server_port, proto) = ends(frame);
    Reply { egress, port, server, server_port, proto }
}

fn inward(frame: &[u8]) -> Tuple {
    let (server, server_port, pod, pod_port, proto) = ends(frame);
    Tuple { pod, pod_port, server, server_port, proto }
}

/// The packet that an error quotes, as a frame.
fn quoted(frame: &[u8]) -> Vec<u8> {
    let r = read(frame).unwrap();
    [&frame[..14], &frame[r.l4 + 8..]].concat()
}

fn outcome<T>((verdict, out): &(i32, Vec<u8>), input: &[u8], read: impl Fn(&[u8]) -> T) -> Result<Outcome<T>, String> {
    match *verdict {
        SHOT => Ok(Outcome::Dropped),
        REDIRECT => Ok(Outcome::Sent(read(out))),
        NEXT if out == input => Ok(Outcome::Passed),
        NEXT => Err("what passes was changed".to_owned()),
        other => Err(format!("verdict {other}")),
    }
}

/// A second CPU that runs packets at the same time.
struct Other {
    work: mpsc::Sender<(Vec<u8>, u32)>,
    done: mpsc::Receiver<(i32, Vec<u8>)>,
}

struct World {
    rig: Rig,
    maps: Maps,
    interfaces: Vec<u32>,
    other: Other,
    nat: Nat,
    /// Both CPUs begin at once.
    start: std::sync::Arc<Barrier>,
}

/// One packet by an interface through `pod_egress`.
fn run(programs: &mut Programs, frame: &[u8], ifindex: u32) -> (i32, Vec<u8>) {
    let mut out = vec![0; frame.len() + 256];
    let context = context(&[(IFINDEX, ifindex)]);
    let options =
        TestRunOptions { data_in: Some(frame), data_out: Some(&mut out), ctx_in: Some(&context), ..Default::default() };
    let result = programs.get("pod_egress").unwrap().test_run(options).unwrap();
    out.truncate(result.data_size_out as usize);
    (result.return_value as i32, out)
}

/// Addresses as maps have them.
trait Words: Copy + Ord + Debug {
    fn of(ip: IpAddr) -> Self;
}

impl Words for V4 {
    fn of(ip: IpAddr) -> Self {
        let IpAddr::V4(ip) = ip else { panic!("not IPv4: {ip}") };
        net::v4(ip)
    }
}

impl Words for V6 {
    fn of(ip: IpAddr) -> Self {
        let IpAddr::V6(ip) = ip else { panic!("not IPv6: {ip}") };
        net::v6(ip)
    }
}

fn key<A: Words>(ip: IpAddr, port: u16, server: IpAddr, server_port: u16, proto: u8) -> FlowKey<A> {
    FlowKey {
        src: A::of(ip),
        dst: A::of(server),
        src_port: port.to_be(),
        dst_port: server_port.to_be(),
        proto: proto.into(),
    }
}

impl Tuple {
    fn key<A: Words>(&self) -> FlowKey<A> {
        key(self.pod, self.pod_port, self.server, self.server_port, self.proto)
    }
}

impl World {
    /// Nothing is known, and the tables are the first.
    fn begin(&mut self, firewall: bool) {
        macro_rules! clear {
            ($maps:expr) => {
                $maps.flows.entries().unwrap().keys().for_each(|key| $maps.flows.remove(key).unwrap());
                $maps.reverse.entries().unwrap().keys().for_each(|key| $maps.reverse.remove(key).unwrap());
            };
        }
        clear!(self.maps.v4);
        clear!(self.maps.v6);
        self.nat = Nat::new(firewall, [BLOCK].into());
        self.tables(0);
    }

    fn tables(&mut self, number: usize) {
        self.rig.write(&view(number, self.nat.firewall, &self.interfaces));
        let (slots, selected) = &views()[number];
        let all = |numbers: &[usize], of: &[[&str; 2]]| numbers.iter().flat_map(|n| of[*n]).map(addr).collect();
        self.nat.tables_changed(all(slots, &EGRESS), all(selected, &PODS));
    }

    fn step(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Pod { by, tuple, flags } => {
                let frame = packet(tuple, *flags);
                let ran = run(&mut self.rig.programs, &frame, self.interfaces[*by]);
                let outcome = outcome(&ran, &frame, outward)?;
                if PODS[*by].iter().any(|ip| addr(ip) == tuple.pod) {
                    self.nat.pod_sent(*tuple, *flags, false, outcome)?;
                    return self.halves(tuple);
                }
                Nat::forged(outcome, NOBODYS.iter().any(|ip| addr(ip) == tuple.pod))
            }
            Op::Complain { by, about } => {
                let mirrored = Reply {
                    egress: about.pod,
                    port: about.pod_port,
                    server: about.server,
                    server_port: about.server_port,
                    proto: about.proto,
                };
                let frame = error(about.pod, about.server, &answer(&mirrored, ACK));
                let ran = run(&mut self.rig.programs, &frame, self.interfaces[*by]);
                let seen = outcome(&ran, &frame, |out| {
                    // The quote is an answer: its destination is what the outside knows.
                    let t = inward(&quoted(out));
                    Reply {
                        egress: t.pod,
                        port: t.pod_port,
                        server: t.server,
                        server_port: t.server_port,
                        proto: t.proto,
                    }
                })?;
                let own = *by == owner(about.pod);
                if own { self.nat.pod_complained(about, own, seen) } else { Nat::forged(seen, false) }
            }
            Op::Let { tuple, flags } if self.nat.firewall => {
                let frame = packet(tuple, *flags);
                let ran = self
                    .rig
                    .run_with("exit_egress", &frame, &[(INGRESS_IFINDEX, self.interfaces[owner(tuple.pod)])])
                    .unwrap();
                let outcome = outcome(&ran, &frame, outward)?;
                if outcome != Outcome::Dropped {
                    self.nat.pod_sent(*tuple, *flags, true, outcome)?;
                }
                self.halves(tuple)
            }
            Op::Let { .. } => Ok(()),
            Op::Outside { nth, flags, error: is_error } => {
                let replies = self.nat.replies();
                let Some(reply) = replies.get(nth % replies.len().max(1)) else { return Ok(()) };
                let frame = if *is_error {
                    let mirrored = Tuple {
                        pod: reply.egress,
                        pod_port: reply.port,
                        server: reply.server,
                        server_port: reply.server_port,
                        proto: reply.proto,
                    };
                    error(reply.server, reply.egress, &packet(&mirrored, ACK))
                } else {
                    answer(reply, *flags)
                };
                self.arrives(*reply, &frame, *flags, *is_error)
            }
            Op::Guess { egress, port, from, tcp } => {
                let (proto, server_port) = if *tcp { (TCP, 443) } else { (UDP, 53) };
                let server = addr(SERVERS[*from][usize::from(egress.is_ipv6())]);
                let reply = Reply { egress: *egress, port: *port, server, server_port, proto };
                self.arrives(reply, &answer(&reply, ACK), ACK, false)
            }
            Op::Lose { nth } => {
                let known = self.nat.known();
                let Some(tuple) = known.get(nth % known.len().max(1)) else { return Ok(()) };
                self.nat.lost(tuple);
                self.lose(tuple, false);
                Ok(())
            }
            Op::Expire { nth } => {
                let known = self.nat.known();
                let Some(tuple) = known.get(nth % known.len().max(1)) else { return Ok(()) };
                self.nat.lost(tuple);
                self.lose(tuple, true);
                Ok(())
            }
            Op::Tables(number) => {
                self.tables(*number);
                Ok(())
            }
            Op::Together(one, two) => {
                let frames = [one, two].map(|tuple| packet(tuple, SYN));
                let by = [one, two].map(|tuple| self.interfaces[owner(tuple.pod)]);
                self.other.work.send((frames[1].clone(), by[1])).unwrap();
                self.start.wait();
                let first = run(&mut self.rig.programs, &frames[0], by[0]);
                let second = self.other.done.recv().unwrap();
                for (tuple, ran, frame) in [(one, first, &frames[0]), (two, second, &frames[1])] {
                    self.nat.pod_sent(*tuple, SYN, false, outcome(&ran, frame, outward)?)?;
                }
                self.halves(one)?;
                self.halves(two)
            }
        }
    }

    fn arrives(&mut self, reply: Reply, frame: &[u8], flags: u8, is_error: bool) -> Result<(), String> {
        let frame = [&UPLINK_MAC, &frame[6..]].concat();
        let ran = self.rig.run_with("uplink_ingress", &frame, &[(IFINDEX, self.interfaces[PODS.len()])]).unwrap();
        let seen = outcome(&ran, &frame, |out| {
            if !is_error {
                return inward(out);
            }
            let (pod, pod_port, server, server_port, proto) = ends(&quoted(out));
            Tuple { pod, pod_port, server, server_port, proto }
        })?;
        if let Outcome::Sent(tuple) = seen {
            let mac = u8::try_from(owner(tuple.pod)).unwrap();
            if ran.1[5] != mac || read(&ran.1).unwrap().dst != tuple.pod {
                return Err(format!("what is for {tuple:?} goes to another pod's MAC address"));
            }
        }
        self.nat.outside_sent(reply, flags, is_error, seen)
    }

    /// Takes the forward half of a flow away, or `both`. One that is left was used a while ago.
    fn lose(&mut self, tuple: &Tuple, both: bool) {
        let egress: Vec<EgressIp> = (0..8).map(|n| self.maps.egress_ips.get(n).unwrap()).collect();
        macro_rules! lose {
            ($maps:expr) => {{
                let key = tuple.key();
                let Some(flow) = $maps.flows.get(&key).unwrap() else { return };
                let e = net::from_any(egress[flow.egress as usize].addr);
                let reply = super::model::key(e, u16::from_be(flow.port), tuple.server, tuple.server_port, tuple.proto);
                if both {
                    $maps.reverse.remove(&reply).unwrap();
                } else if let Some(mut value) = $maps.reverse.get(&reply).unwrap() {
                    value.last_seen = value.last_seen.wrapping_sub(1);
                    $maps.reverse.set(&reply, &value).unwrap();
                }
                $maps.flows.remove(&key).unwrap();
            }};
        }
        if tuple.pod.is_ipv4() { lose!(self.maps.v4) } else { lose!(self.maps.v6) }
    }

    /// The halves of a flow name each other.
    fn halves(&mut self, tuple: &Tuple) -> Result<(), String> {
        let certain = self.nat.is_certain(tuple);
        let egress = |n: u32| net::from_any(self.maps.egress_ips.get(n).unwrap().addr);
        macro_rules! look {
            ($maps:expr) => {{
                let Some(flow) = $maps.flows.get(&tuple.key()).unwrap() else { return Ok(()) };
                if flow.kind != egress_common::flow::kind::TRANSLATED {
                    return Ok(());
                }
                let port = u16::from_be(flow.port);
                let reply = key(egress(flow.egress), port, tuple.server, tuple.server_port, tuple.proto);
                match $maps.reverse.get(&reply).unwrap() {
                    Some(r) if (r.pod, r.pod_port) == (tuple.key().src, tuple.pod_port.to_be()) => Ok(()),
                    None if !certain => Ok(()),
                    other => Err(format!("the halves of {tuple:?} do not name each other: {other:?}")),
                }
            }};
        }
        if tuple.pod.is_ipv4() { look!(self.maps.v4) } else { look!(self.maps.v6) }
    }

    /// No two flows have one tuple.
    fn all(&self) -> Result<(), String> {
        macro_rules! unique {
            ($maps:expr) => {{
                let mut seen = BTreeMap::new();
                for (key, flow) in $maps.flows.entries().unwrap() {
                    let reply = (flow.egress, flow.port, key.dst, key.dst_port, key.proto);
                    if flow.kind == egress_common::flow::kind::TRANSLATED
                        && let Some(other) = seen.insert(reply, key)
                    {
                        return Err(format!("{key:?} and {other:?} have one tuple"));
                    }
                }
            }};
        }
        unique!(self.maps.v4);
        unique!(self.maps.v6);
        Ok(())
    }

    /// Runs an episode; what is wrong after which step.
    fn episode(&mut self, ops: &[Op], firewall: bool) -> Result<(), (usize, String)> {
        self.begin(firewall);
        for (n, op) in ops.iter().enumerate() {
            self.step(op).map_err(|what| (n, what))?;
            if n % LOOK == LOOK - 1 {
                self.all().map_err(|what| (n, what))?;
            }
        }
        Ok(())
    }

    /// The fewest steps that still fail, as far as leaving out some of them shows.
    fn shrink(&mut self, mut ops: Vec<Op>, firewall: bool) -> (Vec<Op>, String) {
        let mut what = String::new();
        let mut size = ops.len();
        while size > 0 {
            let mut at = 0;
            while at < ops.len() {
                let end = (at + size).min(ops.len());
                let fewer = [&ops[..at], &ops[end..]].concat();
                match self.episode(&fewer, firewall) {
                    Err((n, why)) => (ops, what) = (fewer[..=n].to_vec(), why),
                    Ok(()) => at = end,
                }
            }
            size /= 2;
        }
        (ops, what)
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn random_interleavings_keep_the_rules_of_a_reference_nat() {
    // Interfaces of its own, whatever this machine has.
    if !nix::unistd::geteuid().is_root() {
        return drop(Rig::new("model", &scene()));
    }
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    let interfaces: Vec<u32> = (0..=PODS.len())
        .map(|n| {
            let mac = UPLINK_MAC.map(|byte| format!("{byte:02x}")).join(":");
            let link = ["link", "add", &format!("p{n}"), "address", &mac, "type", "veth"];
            assert!(Command::new("ip").args(link).status().unwrap().success());
            nix::net::if_::if_nametoindex(format!("p{n}").as_str()).unwrap()
        })
        .collect();
    let Some(rig) = Rig::new("model", &view(0, false, &interfaces)) else { return };
    let maps = Maps::open(rig.pins()).unwrap();
    let mut programs = Programs::load(rig.pins(), Sizes { max_flows: 4096 }).unwrap();
    let start = std::sync::Arc::new(Barrier::new(2));
    let (work, jobs) = mpsc::channel::<(Vec<u8>, u32)>();
    let (results, done) = mpsc::channel();
    let started = start.clone();
    let thread = std::thread::spawn(move || {
        for (frame, ifindex) in jobs {
            started.wait();
            results.send(run(&mut programs, &frame, ifindex)).unwrap();
        }
    });
    let mut world = World { rig, maps, interfaces, other: Other { work, done }, nat: Nat::default(), start };
    let steps = number("SPILLWAY_MODEL_STEPS").map_or(STEPS, |n| n as usize);
    let seeds = match number("SPILLWAY_MODEL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..1 + steps.div_ceil(EPISODE) as u64,
    };
    for seed in seeds {
        let mut random = Random(seed);
        let firewall = random.below(2) == 0;
        let ops: Vec<Op> = (0..EPISODE).map(|_| op(&mut random)).collect();
        if let Err((n, why)) = world.episode(&ops, firewall) {
            let (fewest, what) = world.shrink(ops[..=n].to_vec(), firewall);
            let steps: String = fewest.iter().map(|op| format!("  {op:?}\n")).collect();
            panic!("SPILLWAY_MODEL_SEED={seed}, firewall: {firewall}: {why} after {n} steps; {what} after\n{steps}");
        }
    }
    drop(world);
    thread.join().unwrap();
}
