//! The frames that pods and the outside send in the model, and the results of the programs.

use super::{
    frames::{ICMP, ICMPV6, TCP, UDP, icmp, ip, read, seal, tcp, udp},
    model::Ran,
    moves::PODS,
    nat::{Outcome, Reply, Tuple},
    rig::*,
};
use std::net::IpAddr;

/// Returns a pod's packet.
pub fn packet(tuple: &Tuple, flags: u8, data: &[u8]) -> Vec<u8> {
    let body = match tuple.proto {
        TCP => [tcp(tuple.pod_port, tuple.server_port, flags, &[]), data.to_vec()].concat(),
        UDP => udp(tuple.pod_port, tuple.server_port, data),
        ICMP => icmp(8, tuple.pod_port, data),
        _ => icmp(128, tuple.pod_port, data),
    };
    let mut frame = seal(ip(tuple.pod, tuple.server, tuple.proto, &[], &body));
    frame[11] =
        u8::try_from(PODS.iter().position(|pod| pod.iter().any(|a| addr(a) == tuple.pod)).unwrap_or(7)).unwrap();
    frame
}

/// Returns an answer to the packets of a flow as the outside saw them.
pub fn answer(reply: &Reply, flags: u8, data: &[u8]) -> Vec<u8> {
    let body = match reply.proto {
        TCP => [tcp(reply.server_port, reply.port, flags, &[]), data.to_vec()].concat(),
        UDP => udp(reply.server_port, reply.port, data),
        ICMP => icmp(0, reply.port, data),
        _ => icmp(129, reply.port, data),
    };
    seal(ip(reply.server, reply.egress, reply.proto, &[], &body))
}

/// Returns a "port unreachable" error from `from` to `to` about a packet.
pub fn error(from: IpAddr, to: IpAddr, about: &[u8]) -> Vec<u8> {
    let (kind, protocol) = if from.is_ipv4() { (3, ICMP) } else { (1, ICMPV6) };
    seal(ip(from, to, protocol, &[], &[&[kind, 3, 0, 0, 0, 0, 0, 0][..], &about[14..]].concat()))
}

/// Returns the source and destination of a frame with their ports; the identifier of an ICMP query is the port of its sender.
fn ends(frame: &[u8]) -> (IpAddr, u16, IpAddr, u16, u8) {
    let r = read(frame).unwrap();
    let word = |at: usize| u16::from_be_bytes([frame[r.l4 + at], frame[r.l4 + at + 1]]);
    match r.proto {
        TCP | UDP => (r.src, word(0), r.dst, word(2), r.proto),
        _ if matches!(frame[r.l4], 8 | 128) => (r.src, word(4), r.dst, 0, r.proto),
        _ => (r.src, 0, r.dst, word(4), r.proto),
    }
}

/// Returns the reply tuple of a frame that is sent to the outside.
pub fn outward(frame: &[u8]) -> Reply {
    let (egress, port, server, server_port, proto) = ends(frame);
    Reply { egress, port, server, server_port, proto }
}

/// Returns the flow that a frame answers.
pub fn inward(frame: &[u8]) -> Tuple {
    let (server, server_port, pod, pod_port, proto) = ends(frame);
    Tuple { pod, pod_port, server, server_port, proto }
}

/// Returns the flow of the packet that a frame quotes.
pub fn complained(frame: &[u8]) -> Tuple {
    let (pod, pod_port, server, server_port, proto) = ends(&quoted(frame));
    Tuple { pod, pod_port, server, server_port, proto }
}

/// Returns the packet that an error quotes, as a frame.
pub fn quoted(frame: &[u8]) -> Vec<u8> {
    let r = read(frame).unwrap();
    [&frame[..14], &frame[r.l4 + 8..]].concat()
}

/// Returns the fate of a packet; `read` interprets a packet that is sent.
pub fn outcome<T>((verdict, out): &Ran, input: &[u8], read: impl Fn(&[u8]) -> T) -> Result<Outcome<T>, String> {
    match *verdict {
        SHOT => Ok(Outcome::Dropped),
        REDIRECT => Ok(Outcome::Sent(read(out))),
        NEXT if out == input => Ok(Outcome::Passed),
        NEXT => Err("a passed packet was changed".to_owned()),
        other => Err(format!("verdict {other}")),
    }
}
