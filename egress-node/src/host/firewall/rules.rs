//! The nftables rules. Pure.

use std::{collections::BTreeSet, hash::Hasher as _, net::IpAddr};

use egress_common::abi::{COPY_PRIORITY, FIREWALL_PRIORITY};
use siphasher::sip::SipHasher13;

use super::{
    ASTRAY, COPIED, FORGED, LOOPED, Spec, hold,
    nft::{Chain, Field, Hook, Part, Rule, Set, Values},
};

/// Before connection tracking (-200) and the table `raw` (-300), after the reassembly of fragments (-400).
const EARLY: i32 = -301;
/// Right after connection tracking.
const TRACKED: i32 = -199;
/// After all chains that change marks.
const LATE: i32 = 1_000;
/// `NF_CT_STATE_INVALID_BIT`.
const INVALID: u32 = 1;
/// Length of an interface's name with its padding zeros.
const NAME: usize = 16;
/// Name of the set of interfaces through which first packets may leave.
const EXITS: &str = "exits";

/// Name of the set of [`Spec::outside`].
pub const OUTSIDE: &str = "outside";

/// Returns the sets that the rules use.
pub fn sets(spec: &Spec) -> Vec<Set> {
    let names = |names: &BTreeSet<String>| names.iter().map(|name| name_bytes(name)).collect();
    let set = |name, elements| Set { name, values: Values::Names, elements };
    let names = [set(OUTSIDE, names(&spec.outside)), set(EXITS, names(&spec.exits))];
    names.into_iter().chain(hold::sets(spec)).collect()
}

/// Returns a hash of the contents of the set with this name.
fn version_of(spec: &Spec, name: &str) -> String {
    version(sets(spec).iter().filter(|set| set.name == name))
}

/// Returns an interface's name in the form that nftables compares.
fn name_bytes(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(NAME, 0);
    bytes
}

/// Returns a hash of the contents of some sets. A set is replaced together with the rule that names it, and a rule is identified by its
/// comment, which contains this hash.
pub fn version<'a>(sets: impl IntoIterator<Item = &'a Set>) -> String {
    let mut hasher = SipHasher13::new();
    sets.into_iter().flat_map(|set| &set.elements).for_each(|element| hasher.write(element));
    format!("{:016x}", hasher.finish())
}

/// Returns the chains of the table. `led`: a routing rule sends packets with the mark to the tunnel device.
pub fn chains(spec: &Spec, led: bool) -> Vec<Chain> {
    let chain = |name, hook, priority, rules| Chain { name, hook, priority, rules };
    let mut early = vec![ours(vec![Part::NoTrack], "not tracked".to_owned()), looped(spec.port)];
    early.extend(spec.addresses.iter().map(|address| outer_in(*address, spec.port)));
    early.extend(hold::rules(spec));
    let marked = ours(vec![Part::SetMark(spec.mark)], format!("marked ({:#x})", spec.mark));
    let mut chains = vec![
        chain("early", Hook::Prerouting, EARLY, early),
        chain("input", Hook::Input, EARLY, vec![copied()]),
        chain("output", Hook::Output, EARLY, vec![outer_out(spec.port)]),
        chain("answers", Hook::Output, TRACKED, vec![too_large(libc::IPPROTO_ICMP), too_large(libc::IPPROTO_ICMPV6)]),
        chain("forward", Hook::Forward, 0, vec![to_tunnel(spec), astray(spec)]),
    ];
    if led {
        chains.push(chain("late", Hook::Prerouting, LATE, vec![marked]));
    }
    chains
}

/// Returns the rules as the kernel lists them.
pub fn summary(chains: &[Chain]) -> Vec<(String, String)> {
    let rules = chains.iter().flat_map(|chain| chain.rules.iter().map(|rule| (chain.name, &rule.comment)));
    rules.map(|(chain, comment)| (chain.to_owned(), comment.clone())).collect()
}

/// Matches packets that `pod_egress` has left to the stack.
fn ours(what: Vec<Part>, done: String) -> Rule {
    let mut parts = vec![first()];
    parts.extend(what);
    Rule { comment: format!("first packets of flows: {done}"), parts }
}

fn first() -> Part {
    Part::Is(Field::Priority, FIREWALL_PRIORITY.to_ne_bytes().into())
}

/// Drops a gateway's copy of a packet for a leased port of its own address if the packet belongs to nothing that this host masquerades: it
/// is the lessee's packet, and an ICMP error from this host would be about the lessee's flow.
fn copied() -> Rule {
    let parts = vec![Part::Is(Field::Priority, COPY_PRIORITY.to_ne_bytes().into()), Part::Count(COPIED), Part::Drop];
    Rule { comment: "copies of packets for leased ports: not for this host's sockets".to_owned(), parts }
}

/// Drops tunnelled packets from this host to itself: no node sends them. A raw socket may give them any source.
fn looped(port: u16) -> Rule {
    let mut parts = vec![Part::Is(Field::InputName, name_bytes("lo"))];
    parts.extend(udp_to(port));
    parts.extend([Part::Count(LOOPED), Part::Drop]);
    Rule { comment: format!("tunnel to port {port} from this host itself: dropped"), parts }
}

fn udp_to(port: u16) -> [Part; 2] {
    let udp = u8::try_from(libc::IPPROTO_UDP).unwrap_or_default();
    [Part::Is(Field::Protocol, vec![udp]), Part::Is(Field::Transport(2, 2), port.to_be_bytes().into())]
}

/// Exempts incoming tunnelled packets from conntrack.
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

/// Exempts outgoing tunnelled packets from conntrack.
fn outer_out(port: u16) -> Rule {
    let parts = udp_to(port).into_iter().chain([Part::NoTrack]).collect();
    Rule { comment: format!("tunnel to port {port}: not tracked"), parts }
}

/// Exempts this host's answer to a packet that is too large for the tunnel. Conntrack does not know the quoted packet, which [`ours`] has
/// exempted, and marks the answer as invalid: many firewalls would drop it.
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

/// Drops UDP for the tunnel's port from interfaces that may be pods'. `gate.rs` drops it at an interface that has a program. Here the
/// destination may also be the result of the host's NAT, for example of a Service.
fn to_tunnel(spec: &Spec) -> Rule {
    let mut parts = vec![Part::NotIn(Field::InputName, OUTSIDE)];
    parts.extend(udp_to(spec.port));
    parts.extend([Part::Count(FORGED), Part::Drop]);
    Rule { comment: format!("tunnel to port {}: not from pods ({})", spec.port, version_of(spec, OUTSIDE)), parts }
}

/// Drops a first packet that is about to leave with the pod's address, because its interface has no program of ours.
fn astray(spec: &Spec) -> Rule {
    let parts = vec![first(), Part::NotIn(Field::OutputName, EXITS), Part::Count(ASTRAY), Part::Drop];
    Rule { comment: format!("first packets of flows: by an exit or not at all ({})", version_of(spec, EXITS)), parts }
}
