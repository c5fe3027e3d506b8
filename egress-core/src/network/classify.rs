//! Classifies links: which are pods' interfaces, which lead out, and which carry the tunnel. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

use super::links::{Link, LinkKind, LinkTable};

/// The longest interface name that the kernel accepts, in bytes.
const MAX_NAME: usize = 15;

/// A pattern for interface names: `*` stands for any characters, `?` for one; everything else for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern(String);

/// Why a text is not a pattern for interface names.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "interface pattern {0:?} can match no interface: \
     write a name of 1 to 15 characters without '/' or blanks, such as \"eth1\" or \"veth*\""
)]
pub struct NamePatternError(String);

impl FromStr for NamePattern {
    type Err = NamePatternError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let length = text.bytes().filter(|&byte| byte != b'*').count();
        if text.is_empty() || length > MAX_NAME || text.contains(|c: char| c == '/' || c.is_whitespace()) {
            return Err(NamePatternError(text.to_owned()));
        }
        Ok(NamePattern(text.to_owned()))
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl NamePattern {
    /// Returns whether the whole name fits the pattern.
    pub fn matches(&self, name: &str) -> bool {
        matches(self.0.as_bytes(), name.as_bytes())
    }
}

fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => {
            matches(rest, name) || name.split_first().is_some_and(|(_, tail)| matches(pattern, tail))
        }
        (Some((b'?', rest)), Some((_, tail))) => matches(rest, tail),
        (Some((expected, rest)), Some((found, tail))) => expected == found && matches(rest, tail),
        _ => false,
    }
}

/// The configuration of interfaces, and what the node says about itself.
#[derive(Clone, Debug, Default)]
pub struct InterfaceRules {
    /// Interfaces that lead out, whatever they look like.
    pub uplinks: Vec<NamePattern>,
    /// Interfaces of pods, whatever they look like; takes precedence over `uplinks`.
    pub pod_interfaces: Vec<NamePattern>,
    /// The name of our own tunnel device, which has none of the roles.
    pub tunnel: String,
    /// The node's internal addresses, which the tunnel's outer packets carry; may be empty.
    pub node_addresses: Vec<IpAddr>,
}

/// The roles of the links, as ifindexes. A link has at most one of the first two; an underlay usually is an uplink too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    /// Host-side interfaces of pods.
    pub pods: BTreeSet<u32>,
    /// Interfaces that lead out of the node.
    pub uplinks: BTreeSet<u32>,
    /// Interfaces that carry the tunnel's outer packets, with the node's own addresses for it.
    pub underlays: BTreeMap<u32, BTreeSet<IpAddr>>,
    /// Ethernet interfaces on which packets of pods may leave the node, whatever their role: all except those of pods, their bridges and
    /// our tunnel device.
    pub exits: BTreeSet<u32>,
}

impl Roles {
    /// Returns the interfaces at which a gateway's packets arrive: uplinks and underlays.
    pub fn gateway_interfaces(&self) -> impl Iterator<Item = u32> + '_ {
        let underlays = self.underlays.keys().filter(|index| !self.uplinks.contains(index));
        self.uplinks.iter().chain(underlays).copied()
    }
}

/// Finds the roles of all links. A link keeps its role while it is down, so that nothing is detached because of that.
pub fn classify(table: &LinkTable, rules: &InterfaceRules) -> Roles {
    let with_default_route: BTreeSet<u32> = table.default_routes.iter().map(|route| route.oif).collect();
    let named = |patterns: &[NamePattern], link: &Link| patterns.iter().any(|pattern| pattern.matches(&link.name));
    let candidates =
        || table.links.values().filter(|link| link.kind != LinkKind::Loopback && link.name != rules.tunnel);

    let vlans = candidates().filter(|link| matches!(link.kind, LinkKind::Vlan(_)));
    let cards: BTreeSet<u32> = vlans.filter_map(Link::below).collect();

    let pods: BTreeSet<u32> = candidates()
        .filter(|link| {
            let looks_like_one = link.kind == LinkKind::Veth
                && link.peer_netns.is_some()
                && !has_subnet(link)
                && !with_default_route.contains(&link.index)
                && !cards.contains(&link.index)
                && !named(&rules.uplinks, link);
            looks_like_one || named(&rules.pod_interfaces, link)
        })
        .map(|link| link.index)
        .collect();
    let bridges_of_pods: BTreeSet<u32> =
        pods.iter().filter_map(|index| table.links.get(index)).filter_map(|link| link.master).collect();

    let uplinks = candidates()
        .filter(|link| !pods.contains(&link.index))
        .filter(|link| {
            let leads_out = with_default_route.contains(&link.index) || has_subnet(link);
            let inside = link.kind.is_tunnel() || bridges_of_pods.contains(&link.index);
            (leads_out && !inside) || named(&rules.uplinks, link)
        })
        .map(|link| link.index)
        .collect();

    let exits = candidates()
        .filter(|link| link.mac.is_some() && !pods.contains(&link.index) && !bridges_of_pods.contains(&link.index))
        .map(|link| link.index)
        .collect();
    Roles { pods, uplinks, underlays: underlays(table, rules), exits }
}

/// Returns the interfaces that carry the tunnel's outer packets, with the node's addresses there. An address on the loopback or a dummy
/// device (a routed underlay) is reached by the interface of the default route. If no address is known, the default route alone decides.
fn underlays(table: &LinkTable, rules: &InterfaceRules) -> BTreeMap<u32, BTreeSet<IpAddr>> {
    let mut underlays: BTreeMap<u32, BTreeSet<IpAddr>> = BTreeMap::new();
    for &address in &rules.node_addresses {
        let Some(carrier) = table.by_address(address) else { continue };
        let indirect = carrier.kind == LinkKind::Loopback || carrier.kind == LinkKind::Other("dummy".to_owned());
        let index =
            if indirect { table.default_route(address.is_ipv6()).map(|route| route.oif) } else { Some(carrier.index) };
        if let Some(index) = index {
            underlays.entry(index).or_default().insert(address);
        }
    }
    if underlays.is_empty() {
        for route in [false, true].into_iter().filter_map(|ipv6| table.default_route(ipv6)) {
            let on_link = || {
                let nets = table.links.get(&route.oif).map(|link| link.addresses.as_slice()).unwrap_or_default();
                nets.iter().map(IpNet::addr).find(|address| address.is_ipv6() == route.ipv6 && is_global(*address))
            };
            let addresses = underlays.entry(route.oif).or_default();
            addresses.extend(route.source.or_else(on_link));
        }
        underlays.retain(|_, addresses| !addresses.is_empty());
    }
    underlays
}

/// Returns whether the link has an address that puts it into a subnet with others.
fn has_subnet(link: &Link) -> bool {
    link.addresses.iter().any(|net| is_global(net.addr()) && net.prefix_len() < net.max_prefix_len())
}

/// Returns whether an address is neither loopback nor link-local.
fn is_global(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    }
}

/// Returns the interfaces on which no packet of a pod arrives: a foreign packet with our mark arrived on one of these.
pub fn outside(links: &LinkTable, roles: &Roles, tunnel: u32) -> BTreeSet<String> {
    let masters: BTreeSet<u32> =
        roles.pods.iter().filter_map(|pod| links.links.get(pod)).filter_map(|link| link.master).collect();
    let leads_out = |index: u32| {
        roles.underlays.contains_key(&index)
            || [false, true].iter().any(|ipv6| links.default_route(*ipv6).is_some_and(|route| route.oif == index))
    };
    // A bridge or a switch may get a pod at any time.
    let switch = |kind: &LinkKind| *kind == LinkKind::Bridge || *kind == LinkKind::Other("openvswitch".into());
    let never = |kind: &LinkKind| matches!(kind, LinkKind::Loopback | LinkKind::Physical) || kind.is_tunnel();
    let all = links.links.values().filter(|link| !roles.pods.contains(&link.index) && !masters.contains(&link.index));
    all.filter(|link| {
        link.index == tunnel
            || never(&link.kind)
            || leads_out(link.index)
            || roles.uplinks.contains(&link.index) && !switch(&link.kind)
    })
    .map(|link| link.name.clone())
    .collect()
}

#[cfg(test)]
#[path = "classify_tests.rs"]
mod tests;
