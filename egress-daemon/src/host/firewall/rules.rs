//! The nftables rules. Pure.

use std::net::IpAddr;

use egress_common::abi::FIREWALL_PRIORITY;

use super::{
    ASTRAY, Spec, hold,
    nft::{Chain, Field, Hook, Part, Rule},
};

/// Before connection tracking (-200) and the table `raw` (-300), behind the reassembly of fragments (-400).
const EARLY: i32 = -301;
/// Right behind connection tracking.
const TRACKED: i32 = -199;
/// Behind everything that changes marks.
const LATE: i32 = 1_000;
/// `NF_CT_STATE_INVALID_BIT`.
const INVALID: u32 = 1;
/// `NF_CT_STATE_UNTRACKED_BIT`.
const UNTRACKED: u32 = 1 << 6;
/// Length of an interface's name with its zeros.
const NAME: usize = 16;

/// The chains of the table.
pub fn chains(spec: &Spec) -> Vec<Chain> {
    let chain = |name, hook, priority, rules| Chain { name, hook, priority, rules };
    let mut early = vec![ours(spec, vec![Part::SetMark(spec.mark), Part::NoTrack], "not tracked")];
    early.extend(spec.addresses.iter().map(|address| outer_in(*address, spec.port)));
    early.extend(hold::rules(spec));
    vec![
        chain("early", Hook::Prerouting, EARLY, early),
        chain("late", Hook::Prerouting, LATE, vec![ours(spec, vec![Part::SetMark(spec.mark)], "marked again")]),
        chain("output", Hook::Output, EARLY, vec![outer_out(spec.port)]),
        chain("answers", Hook::Output, TRACKED, vec![too_large(libc::IPPROTO_ICMP), too_large(libc::IPPROTO_ICMPV6)]),
        chain("forward", Hook::Forward, 0, vec![astray(spec)]),
    ]
}

/// The rules as the kernel lists them.
pub fn summary(chains: &[Chain]) -> Vec<(String, String)> {
    let rules = chains.iter().flat_map(|chain| chain.rules.iter().map(|rule| (chain.name, &rule.comment)));
    rules.map(|(chain, comment)| (chain.to_owned(), comment.clone())).collect()
}

/// Packets that `pod_egress` has left to the stack.
fn ours(spec: &Spec, what: Vec<Part>, done: &str) -> Rule {
    let mut parts = vec![Part::Is(Field::Priority, FIREWALL_PRIORITY.to_ne_bytes().into())];
    parts.extend(what);
    Rule { comment: format!("first packets of flows: {done} ({:#x})", spec.mark), parts }
}

fn udp_to(port: u16) -> [Part; 2] {
    let udp = u8::try_from(libc::IPPROTO_UDP).unwrap_or_default();
    [Part::Is(Field::Protocol, vec![udp]), Part::Is(Field::Transport(2, 2), port.to_be_bytes().into())]
}

/// Tunnelled packets that come in.
fn outer_in(address: IpAddr, port: u16) -> Rule {
    let (family, destination, bytes) = match address {
        IpAddr::V4(a) => (libc::NFPROTO_IPV4, Field::Network(16, 4), a.octets().to_vec()),
        IpAddr::V6(a) => (libc::NFPROTO_IPV6, Field::Network(24, 16), a.octets().to_vec()),
    };
    let mut parts = vec![Part::Is(Field::Family, vec![family as u8]), Part::Is(destination, bytes)];
    parts.extend(udp_to(port));
    parts.push(Part::NoTrack);
    Rule { comment: format!("tunnel to {address} port {port}: not tracked"), parts }
}

/// Tunnelled packets that go out.
fn outer_out(port: u16) -> Rule {
    let parts = udp_to(port).into_iter().chain([Part::NoTrack]).collect();
    Rule { comment: format!("tunnel to port {port}: not tracked"), parts }
}

/// What this host answers to a packet that is too large for the tunnel. Connection tracking does not know the packet that it
/// is about, which [`ours`] has kept from it, and calls the answer invalid: many firewalls drop that.
fn too_large(protocol: i32) -> Rule {
    let (name, header) = match protocol {
        // RFC 1191, section 4, and RFC 4443, section 3.2.
        libc::IPPROTO_ICMP => ("fragmentation needed", vec![3, 4]),
        _ => ("packet too big", vec![2]),
    };
    let parts = vec![
        Part::HasBits(Field::ConnectionState, INVALID),
        Part::Is(Field::Protocol, vec![u8::try_from(protocol).unwrap_or_default()]),
        Part::Is(Field::Transport(0, header.len() as u32), header),
        Part::NoTrack,
    ];
    Rule { comment: format!("{name}, about a packet that is not tracked: not tracked"), parts }
}

/// A packet of ours that is about to leave with the pod's address, since the routing rule did not catch it.
fn astray(spec: &Spec) -> Rule {
    let mut name = spec.tunnel.as_bytes().to_vec();
    name.resize(NAME, 0);
    let parts = vec![
        Part::HasBits(Field::Mark, spec.mark),
        Part::HasBits(Field::ConnectionState, UNTRACKED),
        Part::IsNot(Field::OutputName, name),
        Part::Count(ASTRAY),
        Part::Drop,
    ];
    Rule { comment: format!("first packets of flows ({:#x}): by {} or not at all", spec.mark, spec.tunnel), parts }
}
