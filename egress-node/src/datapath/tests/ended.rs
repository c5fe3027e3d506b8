//! Flows that have ended, and only they, make room. Rows churn, forged-close and reused-pod-ip of docs/failures.md.

use super::{
    frames::{TCP, UDP, fragment, ip, ports, read, seal, tcp, udp},
    reused::Reused,
    rig::*,
    scenes,
};
use crate::datapath::maps::{FamilyMaps, Maps};
use aya::Pod;
use egress_common::{
    endpoint::RouteKey,
    flow::{FlowKey, Reverse},
    limits::{ENDED_TICKS, RECLAIM_BATCH},
    verdict::Counter,
};
use egress_core::encode::NodeView;
use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType};
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd as _, OwnedFd},
    process::Command,
    time::{Duration, Instant},
};

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;
/// The next-header value of the IPv6 fragment header.
const FRAGMENT: u8 = 44;
pub(super) const POD: [&str; 2] = [POD4, POD6];
/// Flows that one pod may have in these tests.
const SHARE: u32 = 200;
/// Longer than the collector takes for anything.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Returns one of many servers outside.
pub(super) fn server(n: u32, like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::from(0xcb00_7100 + n).into(),
        IpAddr::V6(_) => Ipv6Addr::from((0x2001_0db8_u128 << 96) | 0xf << 80 | u128::from(n)).into(),
    }
}

/// Returns a scene in which a pod may have [`SHARE`] flows.
fn limited() -> NodeView {
    let mut view = scene();
    view.config.as_mut().unwrap().pod_flows = SHARE;
    view
}

/// Returns a TCP segment with these sequence and acknowledgement numbers.
fn segment(ends: (IpAddr, IpAddr), ports: (u16, u16), flags: u8, seq: u32, ack: u32) -> Vec<u8> {
    let mut body = tcp(ports.0, ports.1, flags, &[]);
    body.truncate(20);
    body[4..8].copy_from_slice(&seq.to_be_bytes());
    body[8..12].copy_from_slice(&ack.to_be_bytes());
    seal(ip(ends.0, ends.1, TCP, &[], &body))
}

/// A connection of the pod, as the programs see it.
struct Connection {
    pod: IpAddr,
    server: IpAddr,
    port: u16,
    /// The address and port that the server sees.
    seen: (IpAddr, u16),
    /// The next sequence numbers of the pod and of the server.
    next: (u32, u32),
}

impl Connection {
    fn try_open(rig: &mut Rig, pod: IpAddr, server: IpAddr, port: u16) -> Option<Self> {
        let (verdict, out) = rig.run("pod_egress", &segment((pod, server), (port, 443), SYN, 1_000, 0));
        if verdict != REDIRECT {
            return None;
        }
        let seen = (read(&out).unwrap().src, ports(&out).0);
        let mut new = Self { pod, server, port, seen, next: (1_001, 5_000) };
        new.says(rig, SYN | ACK);
        new.next.1 += 1;
        new.sends(rig, ACK);
        Some(new)
    }
    #[track_caller]
    fn open(rig: &mut Rig, pod: IpAddr, server: IpAddr, port: u16) -> Self {
        let refused = format!("connection {port} to {server} is refused");
        Self::try_open(rig, pod, server, port)
            .unwrap_or_else(|| panic!("{refused}: {:?}", rig.writer.maps().counters()))
    }
    /// Sends a segment of the pod, which must leave with the connection's port.
    #[track_caller]
    fn sends(&self, rig: &mut Rig, flags: u8) {
        let frame = segment((self.pod, self.server), (self.port, 443), flags, self.next.0, self.next.1);
        let (verdict, out) = rig.run("pod_egress", &frame);
        assert_eq!(verdict, REDIRECT, "{:?}", rig.writer.maps().counters());
        assert_eq!((read(&out).unwrap().src, ports(&out).0), self.seen);
    }
    /// Delivers a segment from the server's address. Returns the verdict.
    fn hears(&self, rig: &mut Rig, flags: u8, seq: u32) -> i32 {
        let frame = segment((self.server, self.seen.0), (443, self.seen.1), flags, seq, self.next.0);
        rig.run("uplink_ingress", &frame).0
    }
    #[track_caller]
    fn says(&self, rig: &mut Rig, flags: u8) {
        assert_eq!(self.hears(rig, flags, self.next.1), REDIRECT);
    }
    fn close(&mut self, rig: &mut Rig, first_pod: bool) {
        if first_pod {
            self.sends(rig, FIN | ACK);
            self.next.0 += 1;
            self.says(rig, FIN | ACK);
            self.next.1 += 1;
            self.sends(rig, ACK);
        } else {
            self.says(rig, FIN | ACK);
            self.next.1 += 1;
            self.sends(rig, FIN | ACK);
            self.next.0 += 1;
            self.says(rig, ACK);
        }
    }
}

/// Makes both halves of every flow older by `ticks`.
pub(super) fn age(rig: &Rig, ticks: u32) {
    fn older<A: Pod + Ord>(maps: &mut FamilyMaps<A>, ticks: u32)
    where
        FlowKey<A>: Pod + Ord,
        Reverse<A>: Pod,
        RouteKey<A>: Pod,
    {
        for (key, mut flow) in maps.flows.entries().unwrap() {
            flow.last_seen -= ticks;
            maps.flows.set(&key, &flow).unwrap();
        }
        for (key, mut reverse) in maps.reverse.entries().unwrap() {
            reverse.last_seen -= ticks;
            maps.reverse.set(&key, &reverse).unwrap();
        }
    }
    let mut maps = Maps::open(rig.pins()).unwrap();
    older(&mut maps.v4, ticks);
    older(&mut maps.v6, ticks);
}

#[track_caller]
fn wait(rig: &Rig, what: Counter, n: u64) {
    let start = Instant::now();
    while rig.count(what) < n {
        assert!(start.elapsed() < PATIENCE, "{} is not {n}: {:?}", what.name(), rig.writer.maps().counters());
        std::thread::yield_now();
    }
}

#[test]
fn churn_closed_connections_make_room_for_new_ones_and_live_ones_stay() {
    for (n, pod) in POD.into_iter().enumerate() {
        let pod = addr(pod);
        let Some(mut rig) = Reused::new(&format!("churn-{n}"), &limited()) else { return };
        let lasting = Connection::open(&mut rig, pod, server(9_999, pod), 50_000);
        // Each way to end: closed by either side first, reset by either side, refused, or reset after data that the pod acknowledges later.
        for i in 0..6 * SHARE {
            let (to, port) = (server(i, pod), 20_000 + (i % 30_000) as u16);
            if i % 6 == 5 {
                let syn = segment((pod, to), (port, 443), SYN, 1_000, 0);
                let (verdict, out) = rig.run("pod_egress", &syn);
                assert_eq!(verdict, REDIRECT, "{i}: {:?}", rig.writer.maps().counters());
                let (from, port) = (read(&out).unwrap().src, ports(&out).0);
                let refusal = segment((to, from), (443, port), RST | ACK, 0, 1_001);
                assert_eq!(rig.run("uplink_ingress", &refusal).0, REDIRECT);
                continue;
            }
            let mut one = Connection::open(&mut rig, pod, to, port);
            match i % 6 {
                0 => one.close(&mut rig, true),
                1 => one.close(&mut rig, false),
                2 => one.sends(&mut rig, RST | ACK),
                3 => one.says(&mut rig, RST | ACK),
                _ => {
                    one.next.1 += 700;
                    one.says(&mut rig, RST);
                    one.sends(&mut rig, ACK);
                }
            }
        }
        // On a slow machine some flows expire first.
        let (reclaimed, ended) = (rig.count(Counter::FlowsReclaimed), rig.count(Counter::FlowsEnded));
        assert!(reclaimed > 0 && reclaimed + ended >= u64::from(5 * SHARE), "{:?}", rig.writer.maps().counters());
        assert_eq!(rig.count(Counter::DropPodShare), 0);
        lasting.sends(&mut rig, ACK);
        // The remaining flows have ended, too, and are removed seconds later without demand.
        age(&rig, ENDED_TICKS);
        // The queue removes them, or the collector's round if that comes first.
        let start = Instant::now();
        while rig.count(Counter::FlowsEnded) + rig.count(Counter::FlowsExpired) < u64::from(6 * SHARE) - reclaimed {
            assert!(start.elapsed() < PATIENCE, "{:?}", rig.writer.maps().counters());
        }
        lasting.sends(&mut rig, ACK);
        // Only live connections: the quota is used up, and none of them is evicted for another.
        let live: Vec<_> = (1..SHARE as u16)
            .map(|i| Connection::open(&mut rig, pod, server(u32::from(i) % 7, pod), 60_000 + i))
            .collect();
        assert!(Connection::try_open(&mut rig, pod, server(2, pod), 10_000).is_none());
        assert_eq!(rig.count(Counter::DropPodShare), 1);
        live.iter().for_each(|one| one.sends(&mut rig, ACK));
    }
}

#[test]
fn churn_faster_than_the_collectors_rounds_is_not_refused_beside_idle_flows() {
    for (n, pod) in POD.into_iter().enumerate() {
        let pod = addr(pod);
        let mut view = limited();
        view.config.as_mut().unwrap().pod_flows = 0;
        let Some(mut rig) = Reused::new(&format!("churn-fast-{n}"), &view) else { return };
        let silent: Vec<_> = (0..200).map(|i| Connection::open(&mut rig, pod, server(i, pod), 50_000)).collect();
        // Several times the capacity of the table and of the collector's queue.
        for i in 0..20_000 {
            let one = Connection::open(&mut rig, pod, server(1_000 + i % 5_000, pod), 20_000 + (i / 5_000) as u16);
            one.sends(&mut rig, RST | ACK);
        }
        silent.iter().for_each(|one| one.sends(&mut rig, ACK));
    }
}

#[test]
fn churn_answered_udp_queries_make_room_and_streams_stay() {
    for (n, pod) in POD.into_iter().enumerate() {
        let pod = addr(pod);
        let Some(mut rig) = Reused::new(&format!("churn-udp-{n}"), &limited()) else { return };
        let datagram =
            |to: u32, from: u16, port: u16| seal(ip(pod, server(to, pod), UDP, &[], &udp(from, port, b"data")));
        let reply = |sent: &[u8], port: u16| {
            let r = read(sent).unwrap();
            seal(ip(r.dst, r.src, UDP, &[], &udp(port, ports(sent).0, b"answer")))
        };
        // A stream with a name server: the pod sends again after the answer.
        let stream = rig.run("pod_egress", &datagram(0, 4_000, 53)).1;
        assert_eq!(rig.run("uplink_ingress", &reply(&stream, 53)).0, REDIRECT);
        assert_eq!(rig.run("pod_egress", &datagram(0, 4_000, 53)).1, stream);
        for i in 0..4 * SHARE {
            let port = if i % 2 == 0 { 53 } else { 5_353 };
            let (verdict, out) = rig.run("pod_egress", &datagram(1 + i, 4_001, port));
            assert_eq!(verdict, REDIRECT, "{i}: {:?}", rig.writer.maps().counters());
            assert_eq!(rig.run("uplink_ingress", &reply(&out, port)).0, REDIRECT);
        }
        assert_eq!(rig.count(Counter::DropPodShare), 0);
        // Flows to a well-known port end early. The others keep the UDP timeout while no flow needs their place.
        age(&rig, ENDED_TICKS);
        let start = Instant::now();
        loop {
            let maps = rig.writer.maps();
            let (v4, v6) = (maps.v4.flows.entries().unwrap(), maps.v6.flows.entries().unwrap());
            let to: Vec<u16> = v4.keys().map(|k| k.dst_port).chain(v6.keys().map(|k| k.dst_port)).collect();
            let with = |port: u16| to.iter().filter(|to| **to == port.to_be()).count();
            let room = RECLAIM_BATCH as usize;
            assert!(with(5_353) >= SHARE as usize / 2 - room, "{:?}", maps.counters());
            if with(53) == 1 {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{} are left: {:?}", with(53), maps.counters());
        }
        assert_eq!(rig.run("pod_egress", &datagram(0, 4_000, 53)).1, stream);
        // The collector finds unanswered queries, which make room as well.
        for i in 0..SHARE {
            rig.run("pod_egress", &datagram(10_000 + i, 4_002, 5_353));
        }
        assert!(rig.count(Counter::DropPodShare) > 0, "flows that may still be answered stay");
        age(&rig, ENDED_TICKS);
        let start = Instant::now();
        while rig.run("pod_egress", &datagram(20_000, 4_003, 5_353)).0 != REDIRECT {
            assert!(start.elapsed() < PATIENCE, "{:?}", rig.writer.maps().counters());
        }
        assert_eq!(rig.run("pod_egress", &datagram(0, 4_000, 53)).1, stream);
    }
}

#[test]
fn forged_close_outside_segments_alone_never_end_a_connection() {
    for (n, pod) in POD.into_iter().enumerate() {
        let pod = addr(pod);
        let mut view = limited();
        view.config.as_mut().unwrap().pod_flows = 2;
        let Some(mut rig) = Reused::new(&format!("forged-close-{n}"), &view) else { return };
        let idle = Connection::open(&mut rig, pod, server(1, pod), 40_000);
        for i in 0..65_536u32 {
            let seq = idle.next.1.wrapping_add(i << 16 | 0x8000);
            for flags in [RST, RST | ACK, FIN | ACK] {
                assert_eq!(idle.hears(&mut rig, flags, seq), REDIRECT, "the pod decides");
            }
        }
        // In the window, and the pod answers with a challenge ACK (RFC 5961).
        for flags in [FIN | ACK, RST] {
            idle.hears(&mut rig, flags, idle.next.1 + 100);
            idle.sends(&mut rig, ACK);
            idle.hears(&mut rig, flags, idle.next.1 + 200);
        }
        // Ten minutes later. The collector has examined the connection when it expires the flow queued after it.
        let question = seal(ip(pod, server(2, pod), UDP, &[], &udp(4_000, 5_353, b"question")));
        assert_eq!(rig.run("pod_egress", &question).0, REDIRECT);
        age(&rig, 560);
        wait(&rig, Counter::FlowsExpired, 1);
        assert_eq!(rig.count(Counter::FlowsEnded), 0);
        // The connection is not evicted for another flow.
        let other = Connection::open(&mut rig, pod, server(3, pod), 40_001);
        assert!(Connection::try_open(&mut rig, pod, server(4, pod), 40_002).is_none());
        idle.sends(&mut rig, ACK);
        idle.says(&mut rig, ACK);
        // A reset by the real server.
        other.says(&mut rig, RST);
        Connection::open(&mut rig, pod, server(4, pod), 40_002);
        assert_eq!(rig.count(Counter::FlowsReclaimed), 1);
        idle.sends(&mut rig, ACK);
    }
}

/// Until the server has answered, a forged refusal cannot be told from a real one.
#[test]
fn forged_close_refusal_is_ignored_once_the_server_accepts() {
    for (n, pod) in POD.into_iter().enumerate() {
        let pod = addr(pod);
        let mut view = limited();
        view.config.as_mut().unwrap().pod_flows = 1;
        let Some(mut rig) = Reused::new(&format!("forged-refusal-{n}"), &view) else { return };
        let opens = segment((pod, server(1, pod)), (40_000, 443), SYN, 1_000, 0);
        let (verdict, out) = rig.run("pod_egress", &opens);
        assert_eq!(verdict, REDIRECT);
        let seen = (read(&out).unwrap().src, ports(&out).0);
        let mut new = Connection { pod, server: server(1, pod), port: 40_000, seen, next: (1_001, 5_000) };
        assert_eq!(new.hears(&mut rig, RST, 1 << 30), REDIRECT);
        new.says(&mut rig, SYN | ACK);
        new.next.1 += 1;
        new.sends(&mut rig, ACK);
        assert!(Connection::try_open(&mut rig, pod, server(2, pod), 40_001).is_none(), "it has not ended");
        new.sends(&mut rig, ACK);
    }
}

/// Returns the first fragment of a reset from the server's address: the whole header, and none of the data behind it.
fn first_fragment(of: &Connection, seq: u32) -> Vec<u8> {
    let mut header = tcp(443, of.seen.1, RST, &[1; 4]);
    header.truncate(24);
    header[4..8].copy_from_slice(&seq.to_be_bytes());
    if of.pod.is_ipv4() {
        return fragment(seal(ip(of.server, of.seen.0, TCP, &[], &header)), [0x20, 0]);
    }
    let more = [TCP, 0, 0, 1, 0, 0, 0, 7];
    seal(ip(of.server, of.seen.0, FRAGMENT, &more, &header))
}

/// Returns a socket that receives everything that this network namespace sends, unchanged.
fn wire() -> OwnedFd {
    let (family, kind, flags) = (AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_NONBLOCK);
    socket::socket(family, kind, flags, SockProtocol::EthAll).unwrap()
}

/// Returns whether this frame was among the sent ones.
fn was_sent(wire: &OwnedFd, frame: &[u8]) -> bool {
    let mut buffer = [0; 256];
    std::iter::from_fn(|| {
        socket::recv(wire.as_raw_fd(), &mut buffer, MsgFlags::empty()).ok().map(|len| buffer[..len].to_vec())
    })
    .any(|sent| sent == frame)
}

#[test]
fn reset_in_flight_challenges_the_pod_and_only_its_own_reset_ends_the_flow() {
    if nix::unistd::geteuid().is_root() {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    }
    for (n, pod) in POD.into_iter().enumerate() {
        let pod = addr(pod);
        let mut view = limited();
        view.config.as_mut().unwrap().pod_flows = 2;
        let Some(mut rig) = Reused::new(&format!("reset-in-flight-{n}"), &view) else { return };
        let [alive, dead] =
            [(1, 40_000), (2, 40_001)].map(|(to, port)| Connection::open(&mut rig, pod, server(to, pod), port));
        let wire = wire();
        for one in [&alive, &dead] {
            for flags in [RST, RST | ACK] {
                // The reset follows 700 bytes that the pod has not acknowledged.
                let reset = |from, port| {
                    segment((one.server, from), (443, port), flags, one.next.1.wrapping_add(700), one.next.0)
                };
                let (verdict, out) = rig.run("uplink_ingress", &reset(one.seen.0, one.seen.1));
                let asked = segment((one.server, pod), (443, one.port), ACK, one.next.1 - 1, one.next.0);
                assert_eq!(verdict, REDIRECT);
                assert_eq!(out[14..], asked[14..], "the challenge is not the expected segment");
                assert!(was_sent(&wire, &[&out[..14], &reset(pod, one.port)[14..]].concat()), "the reset is lost");
            }
        }
        // A segment with data, forged or not, never gets the pod's next sequence number.
        let mut data = tcp(443, alive.seen.1, RST, &[]);
        data[4..8].copy_from_slice(&(alive.next.1 + 700).to_be_bytes());
        let data = seal(ip(alive.server, alive.seen.0, TCP, &[], &data));
        let (verdict, out) = rig.run("uplink_ingress", &data);
        assert_eq!(
            (verdict, out[data.len() - 31..][4..14].to_vec()),
            (REDIRECT, data[data.len() - 31..][4..14].to_vec())
        );
        // Neither does a first fragment: data in later fragments would follow the challenge as well.
        let first = first_fragment(&alive, alive.next.1 + 700);
        let (verdict, out) = rig.run("uplink_ingress", &first);
        assert_eq!(
            (verdict, &out[first.len() - 20..first.len() - 10]),
            (REDIRECT, &first[first.len() - 20..first.len() - 10])
        );
        alive.sends(&mut rig, ACK);
        assert!(
            Connection::try_open(&mut rig, pod, server(3, pod), 40_002).is_none(),
            "neither end has closed the flow"
        );
        dead.sends(&mut rig, RST);
        Connection::open(&mut rig, pod, server(3, pod), 40_002);
        assert_eq!(rig.count(Counter::FlowsReclaimed), 1);
        alive.sends(&mut rig, ACK);
        alive.says(&mut rig, ACK);
    }
}

#[test]
fn reused_pod_ip_new_pod_inherits_neither_flows_nor_quota_usage() {
    for (n, pod) in POD.into_iter().enumerate() {
        let pod = addr(pod);
        let mut view = limited();
        view.config.as_mut().unwrap().pod_flows = 3;
        let Some(mut rig) = Reused::new(&format!("reused-pod-ip-{n}"), &view) else { return };
        let dead: Vec<_> = (0..3).map(|i| Connection::open(&mut rig, pod, server(i, pod), 40_000)).collect();
        assert!(Connection::try_open(&mut rig, pod, server(9, pod), 40_000).is_none(), "its quota is used up");
        let endpoint = view.endpoints.remove(&scenes::endpoint_id(0)).unwrap();
        view.endpoints.insert(scenes::endpoint_id(8), endpoint);
        rig.write(&view);
        // A tick later, nothing is delivered to the old connections, and nothing of theirs is sent.
        age(&rig, 1);
        assert_eq!(dead[0].hears(&mut rig, ACK, dead[0].next.1), SHOT);
        assert_eq!(rig.count(Counter::DropNoReverse), 1);
        let next = dead[1].next;
        let left = segment((pod, dead[1].server), (40_000, 443), ACK, next.0, next.1);
        rig.dropped("pod_egress", &left, Counter::DropUnknownFlow);
        let new: Vec<_> = (2..5).map(|i| Connection::open(&mut rig, pod, server(i, pod), 40_000)).collect();
        assert!(Connection::try_open(&mut rig, pod, server(9, pod), 40_000).is_none());
        new.iter().for_each(|one| one.sends(&mut rig, ACK));
        assert_eq!(rig.count(Counter::FlowsCreated), 6);
    }
}
