//! The hold while a selected pod is starting: packets that a pod sends before its interface has a program are dropped. Pure.
//!
//! `pod_egress` marks each packet that it has seen in the priority. A packet without that mark is dropped if it arrives on an interface
//! that may be a pod's and its destination is one that policies may touch. So it does not matter how late the agent attaches its programs.

use std::net::IpAddr;

use egress_common::abi::{FIREWALL_PRIORITY, SEEN_PRIORITY};
use ipnet::IpNet;

use super::{
    HELD, Spec,
    nft::{Field, Part, Rule, Set, Values},
    rules::{OUTSIDE, version},
};

/// Names of the sets of untouched destinations.
const UNTOUCHED: [&str; 2] = ["untouched4", "untouched6"];
/// Destinations for which no packet leaves a node, as in the programs' `never_leaves`.
const NEVER: [&str; 7] =
    ["0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/127", "fe80::/10", "ff00::/8"];

/// Returns the sets that [`rules`] use besides [`OUTSIDE`]; none while nothing is held.
pub fn sets(spec: &Spec) -> Vec<Set> {
    let Some(untouched) = &spec.hold else { return Vec::new() };
    let never = NEVER.iter().filter_map(|net| net.parse::<IpNet>().ok());
    let nets: Vec<IpNet> = IpNet::aggregate(&untouched.iter().copied().chain(never).collect());
    let of = |ipv6: bool| intervals(nets.iter().filter(|net| net.addr().is_ipv6() == ipv6));
    vec![
        Set { name: UNTOUCHED[0], values: Values::V4, elements: of(false) },
        Set { name: UNTOUCHED[1], values: Values::V6, elements: of(true) },
    ]
}

/// Returns the rules, one for each family.
pub fn rules(spec: &Spec) -> Vec<Rule> {
    if spec.hold.is_none() {
        return Vec::new();
    }
    let version = version(&sets(spec));
    let families =
        [("IPv4", libc::NFPROTO_IPV4, Field::Network(16, 4)), ("IPv6", libc::NFPROTO_IPV6, Field::Network(24, 16))];
    let rule = |((name, family, destination), untouched): ((&str, i32, Field), &'static str)| {
        let seen = [FIREWALL_PRIORITY, SEEN_PRIORITY].map(|p| Part::IsNot(Field::Priority, p.to_ne_bytes().into()));
        let mut parts = vec![Part::Is(Field::Family, vec![family as u8])];
        parts.extend(seen);
        parts.extend([
            Part::NotIn(Field::InputName, OUTSIDE),
            Part::NotIn(destination, untouched),
            Part::Count(HELD),
            Part::Drop,
        ]);
        Rule {
            comment: format!("a selected pod is starting: {name} not seen by pod_egress is held ({version})"),
            parts,
        }
    };
    families.into_iter().zip(UNTOUCHED).map(rule).collect()
}

/// Returns the start of each network, followed by the first address after it. The networks must be sorted, of one family, and must not
/// overlap.
fn intervals<'a>(nets: impl Iterator<Item = &'a IpNet>) -> Vec<Vec<u8>> {
    let mut found: Vec<Vec<u8>> = Vec::new();
    for net in nets {
        let first = octets(net.network());
        // Adjacent networks are one interval.
        if found.last() == Some(&first) {
            found.pop();
        } else {
            found.push(first);
        }
        found.extend(next(octets(net.broadcast())));
    }
    found
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// Returns the successor of a number in network byte order; `None` after the last one.
fn next(mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    let at = bytes.iter().rposition(|byte| *byte != u8::MAX)?;
    bytes[at] += 1;
    bytes[at + 1..].fill(0);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_become_intervals_that_end_where_the_next_address_begins() {
        let of = |nets: &[&str]| {
            let nets: Vec<IpNet> = nets.iter().map(|net| net.parse().unwrap()).collect();
            let bytes = intervals(nets.iter());
            let addresses =
                bytes.iter().map(|bytes| IpAddr::from(<[u8; 4]>::try_from(&bytes[..]).unwrap()).to_string());
            addresses.collect::<Vec<_>>()
        };
        assert_eq!(of(&["10.0.0.0/24", "10.0.2.255/32"]), ["10.0.0.0", "10.0.1.0", "10.0.2.255", "10.0.3.0"]);
        assert_eq!(of(&["10.0.0.0/24", "10.0.1.0/25"]), ["10.0.0.0", "10.0.1.128"]);
        assert_eq!(of(&["224.0.0.0/3"]), ["224.0.0.0"]);
    }
}
