//! The addresses that a node reports of itself.

use super::{
    classify::Roles,
    links::{Link, LinkKind, LinkTable},
};
use crate::model::{AddressSource, NodeName, Snapshot, Source};
use ipnet::IpNet;
use std::{collections::BTreeSet, net::IpAddr};

/// Returns the addresses by which others know the node, or that a policy may mean, each with its link.
///
/// Dummy devices have many addresses that are not the node's: every Service with IPVS (`kube-ipvs0`), the resolver of each node. An address
/// of such a device counts only if the Node object has it, a policy names it or its device, or a pool contains it, which would allocate it
/// otherwise.
pub fn reported<'a>(
    node: &NodeName,
    snapshot: &Snapshot,
    links: &'a LinkTable,
    roles: &Roles,
) -> Vec<(&'a Link, IpNet)> {
    let meant = Meant::new(node, snapshot);
    let outside = |link: &&Link| !roles.pods.contains(&link.index) && link.name != "lo" && !link.kind.is_tunnel();
    let all = links.links.values().filter(outside);
    let all = all.flat_map(|link| link.addresses.iter().map(move |net| (link, *net)));
    let counts = |link: &Link, address| !is_local(address) && (!is_dummy(link) || meant.has(link, address));
    all.filter(|(link, net)| counts(link, net.addr())).collect()
}

/// Returns the addresses of dummy devices: whatever else they are, this node accepts packets sent to them.
pub fn on_dummies(links: &LinkTable) -> impl Iterator<Item = IpNet> {
    links.links.values().filter(|link| is_dummy(link)).flat_map(|link| &link.addresses).map(|net| net.addr().into())
}

fn is_dummy(link: &Link) -> bool {
    matches!(&link.kind, LinkKind::Other(kind) if kind == "dummy")
}

/// Returns whether an address is valid only on a link or on the node itself.
fn is_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => a.is_loopback() || a.is_link_local(),
        IpAddr::V6(a) => a.is_loopback() || a.is_unicast_link_local(),
    }
}

/// The addresses and interfaces that objects name.
struct Meant<'a> {
    snapshot: &'a Snapshot,
    addresses: BTreeSet<IpAddr>,
    interfaces: BTreeSet<&'a str>,
}

impl<'a> Meant<'a> {
    fn new(node: &NodeName, snapshot: &'a Snapshot) -> Self {
        let own = snapshot.nodes.get(node).into_iter().flat_map(|node| node.addresses.iter().copied());
        let mut meant = Self { snapshot, addresses: own.collect(), interfaces: BTreeSet::new() };
        let sources = snapshot.policies.values().map(|policy| &policy.source);
        let gateways = sources.filter_map(|source| match source {
            Source::Gateways(gateways) => Some(gateways),
            Source::Pools(_) => None,
        });
        for gateway in gateways.flatten() {
            match &gateway.address {
                AddressSource::Ip(ip) | AddressSource::Configured(ip) => drop(meant.addresses.insert(*ip)),
                AddressSource::Interface(name) => drop(meant.interfaces.insert(name)),
                AddressSource::DefaultRoute => {}
            }
        }
        meant
    }

    fn has(&self, link: &Link, address: IpAddr) -> bool {
        self.addresses.contains(&address)
            || self.interfaces.contains(link.name.as_str())
            || self.snapshot.pools.values().any(|pool| pool.contains(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Selector;
    use crate::testing::{
        link,
        world::{add_policy, gateway, ip, node, policy, pool},
    };

    fn dummy(index: u32, name: &str, addresses: &[String]) -> Link {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        Link { kind: LinkKind::Other("dummy".into()), addresses, ..link(index, name) }
    }

    /// docs/failures.md: ipvs.
    #[test]
    fn ipvs_addresses_on_dummy_devices_are_reported_only_if_an_object_names_them() {
        let eth0 = Link { addresses: vec!["192.0.2.7/24".parse().unwrap()], ..link(2, "eth0") };
        let services: Vec<String> = (0..1_000).map(|n| format!("10.96.{}.{}/32", n / 250, n % 250)).collect();
        let resolver = ["169.254.20.10/32".to_owned(), "10.97.0.10/32".to_owned()];
        let chosen = ["198.51.100.1/32", "198.51.100.2/32"].map(str::to_owned);
        let all = [
            eth0,
            dummy(3, "kube-ipvs0", &services),
            dummy(4, "nodelocaldns", &resolver),
            dummy(5, "egress0", &chosen),
        ];
        let links = LinkTable { links: all.map(|link| (link.index, link)).into(), ..LinkTable::default() };
        let mut snapshot = Snapshot::default();
        snapshot.nodes.insert("me".into(), node("me", Default::default()));
        let told = |snapshot: &Snapshot| {
            let told = reported(&"me".into(), snapshot, &links, &Roles::default());
            told.into_iter().map(|(_, net)| net.addr().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(told(&snapshot), ["192.0.2.7"]);
        assert_eq!(on_dummies(&links).count(), 1_004, "no policy applies to packets that are sent to them");

        let mut named = snapshot.clone();
        let source = |address| Source::Gateways(vec![gateway(Selector::default(), address)]);
        add_policy(&mut named, policy("web", source(AddressSource::Ip(ip("198.51.100.2")))));
        assert_eq!(told(&named), ["192.0.2.7", "198.51.100.2"]);
        add_policy(&mut named, policy("mail", source(AddressSource::Interface("egress0".into()))));
        assert_eq!(told(&named), ["192.0.2.7", "198.51.100.1", "198.51.100.2"]);

        let mut pooled = snapshot.clone();
        let public = pool("public", ip("198.51.100.0"), ip("198.51.100.1"));
        pooled.pools.insert(public.id.clone(), public);
        assert_eq!(told(&pooled), ["192.0.2.7", "198.51.100.1"]);
        let me = snapshot.nodes.values_mut().next().unwrap();
        me.addresses.insert(ip("198.51.100.1"));
        assert_eq!(told(&snapshot), ["192.0.2.7", "198.51.100.1"], "a node that others reach by it");
    }
}
