//! The known state of the node's links, addresses and default routes, and how one change alters it.
//!
//! Pure: changes come from `links`, which speaks netlink. The result says what must be read again, because the kernel does not report every
//! change (a veth's peer that moves to another namespace, IPv4 routes that disappear with their link).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::MacAddress;

/// The number of the kernel's main routing table.
pub const TABLE_MAIN: u32 = 254;

/// What sort of device a link is, as far as its role depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// The loopback device.
    Loopback,
    /// A device with hardware, or a virtual machine's card, behind it.
    Physical,
    /// One end of a veth pair.
    Veth,
    /// A Linux bridge.
    Bridge,
    /// A VXLAN device.
    Vxlan,
    /// A VLAN device (802.1Q) with this VLAN; the link below is its `peer`.
    Vlan(u16),
    /// Any other device that encapsulates: the kernel's name for it (geneve, gre, wireguard...).
    Tunnel(String),
    /// Any other virtual device: the kernel's name for it (bond, macvlan, dummy, a VLAN device of 802.1ad...).
    Other(String),
}

impl LinkKind {
    /// Returns whether packets that leave by it get an outer header.
    pub fn is_tunnel(&self) -> bool {
        matches!(self, LinkKind::Vxlan | LinkKind::Tunnel(_))
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LinkKind::Loopback => "loopback",
            LinkKind::Physical => "physical",
            LinkKind::Veth => "veth",
            LinkKind::Bridge => "bridge",
            LinkKind::Vxlan => "vxlan",
            LinkKind::Vlan(_) => "vlan",
            LinkKind::Tunnel(kind) | LinkKind::Other(kind) => kind,
        })
    }
}

/// A network interface of this namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its name, which may change while the index stays.
    pub name: String,
    /// Its ifindex.
    pub index: u32,
    /// Its Ethernet address; none for devices that are not Ethernet.
    pub mac: Option<MacAddress>,
    /// The largest packet it takes, in bytes, without the Ethernet header.
    pub mtu: u32,
    /// The sort of device.
    pub kind: LinkKind,
    /// The ifindex of the bridge, bond or VRF that it is a port of.
    pub master: Option<u32>,
    /// Whether the administrator has set it up (IFF_UP).
    pub up: bool,
    /// Whether the layer below is up as well (IFF_LOWER_UP).
    pub carrier: bool,
    /// The ifindex of the other end or lower device, in that device's namespace.
    pub peer: Option<u32>,
    /// The network namespace of the other end or lower device, by the id that this namespace knows it by; none for this namespace.
    pub peer_netns: Option<i32>,
    /// Its addresses with their prefix lengths, sorted, link-local ones included. An address that duplicate address detection found at
    /// another host is left out.
    pub addresses: Vec<IpNet>,
}

impl Link {
    /// Returns the ifindex of the other end or lower device, if it is in this namespace: the card of a VLAN device.
    pub fn below(&self) -> Option<u32> {
        self.peer.filter(|_| self.peer_netns.is_none())
    }
}

/// One next hop of a route to 0.0.0.0/0 or ::/0, in any table. A multipath route is several of these with the same metric.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DefaultRoute {
    /// True for ::/0.
    pub ipv6: bool,
    /// The routing table ([`TABLE_MAIN`] for the usual one).
    pub table: u32,
    /// The metric; lower wins.
    pub metric: u32,
    /// The ifindex that packets leave by.
    pub oif: u32,
    /// The next hop; none for a route straight onto the link. An IPv4 route may have an IPv6 next hop.
    pub gateway: Option<IpAddr>,
    /// The preferred source address, if the route names one.
    pub source: Option<IpAddr>,
}

/// The links and default routes of this namespace at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkTable {
    /// The links by ifindex.
    pub links: BTreeMap<u32, Link>,
    /// The default routes of all tables.
    pub default_routes: BTreeSet<DefaultRoute>,
    /// Single addresses that the main table routes straight onto a link: pods, where the CNI wires them point to point.
    pub host_routes: BTreeMap<IpAddr, u32>,
    /// Grows whenever any route may have changed.
    pub route_changes: u64,
}

impl LinkTable {
    /// Returns the link of this name.
    pub fn by_name(&self, name: &str) -> Option<&Link> {
        self.links.values().find(|link| link.name == name)
    }

    /// Returns whether some route may have changed since `before`, and nothing else has.
    pub fn differs_in_routes_only(&self, before: &LinkTable) -> bool {
        let LinkTable { links, default_routes, host_routes, route_changes } = self;
        *route_changes != before.route_changes
            && (links, default_routes, host_routes) == (&before.links, &before.default_routes, &before.host_routes)
    }

    /// Returns the link that carries the address.
    pub fn by_address(&self, address: IpAddr) -> Option<&Link> {
        self.links.values().find(|link| link.addresses.iter().any(|net| net.addr() == address))
    }

    /// Returns the default route that the main table uses: the one with the lowest metric.
    pub fn default_route(&self, ipv6: bool) -> Option<&DefaultRoute> {
        self.default_routes
            .iter()
            .filter(|route| route.ipv6 == ipv6 && route.table == TABLE_MAIN)
            .min_by_key(|route| route.metric)
    }
}

/// One change that the kernel reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkChange {
    /// A link as it is now (its `addresses` are ignored).
    Link(Link),
    /// A link changed in a way that the report does not specify.
    LinkUnclear(u32),
    /// A link left this namespace.
    LinkGone(u32),
    /// A link has an address.
    Address(u32, IpNet),
    /// A link lost an address.
    AddressGone(u32, IpNet),
    /// A default route came, went or changed.
    DefaultRoutes,
    /// The main table routes an address straight onto a link.
    HostRoute(IpAddr, u32),
    /// The main table no longer routes an address straight onto a link.
    HostRouteGone(IpAddr, u32),
    /// Another route came, went or changed.
    Route,
    /// Reports were lost.
    Lost,
}

/// What must be read again before the state is correct.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stale {
    /// The links to read again.
    pub links: BTreeSet<u32>,
    /// The default routes.
    pub routes: bool,
    /// Everything.
    pub all: bool,
}

/// The state that changes accumulate in. Addresses are kept separate from links, since they are reported separately.
#[derive(Clone, Debug, Default)]
pub struct LinkState {
    links: BTreeMap<u32, Link>,
    addresses: BTreeMap<u32, BTreeSet<IpNet>>,
    /// The default routes of all tables.
    pub default_routes: BTreeSet<DefaultRoute>,
    /// The link that each address has its own route to.
    pub host_routes: BTreeMap<IpAddr, u32>,
    /// How often any route has changed.
    pub route_changes: u64,
}

impl LinkState {
    /// Returns an empty state that continues to count changes of routes.
    pub fn anew(&self) -> LinkState {
        LinkState { route_changes: self.route_changes + 1, ..LinkState::default() }
    }

    /// Applies one change, and adds to `stale` what it leaves unknown.
    pub fn apply(&mut self, change: LinkChange, stale: &mut Stale) {
        match change {
            LinkChange::Link(link) => {
                // IPv4 routes of a link that goes down disappear without a report, and come back with one.
                stale.routes |= !link.up && self.carries_default_route(link.index);
                self.links.insert(link.index, link);
            }
            LinkChange::LinkUnclear(index) => {
                stale.links.insert(index);
            }
            LinkChange::LinkGone(index) => {
                stale.routes |= self.carries_default_route(index);
                stale.links.remove(&index);
                self.links.remove(&index);
                self.addresses.remove(&index);
                // A peer that moved to another namespace is gone from here, and its other end is not reported.
                stale.links.extend(
                    self.links
                        .values()
                        .filter(|link| link.kind == LinkKind::Veth && link.below() == Some(index))
                        .map(|link| link.index),
                );
            }
            LinkChange::Address(index, net) => {
                self.addresses.entry(index).or_default().insert(net);
            }
            LinkChange::AddressGone(index, net) => {
                // Routes with this preferred source disappear with it without a report; with a link's last IPv4 address, all its IPv4
                // routes do.
                stale.routes |= !self.default_routes.is_empty();
                if let Some(nets) = self.addresses.get_mut(&index) {
                    nets.remove(&net);
                }
            }
            LinkChange::DefaultRoutes => {
                stale.routes = true;
                self.route_changes += 1;
            }
            LinkChange::Route => self.route_changes += 1,
            LinkChange::HostRoute(address, index) => {
                self.host_routes.insert(address, index);
                self.route_changes += 1;
            }
            LinkChange::HostRouteGone(address, index) => {
                if self.host_routes.get(&address) == Some(&index) {
                    self.host_routes.remove(&address);
                }
                self.route_changes += 1;
            }
            LinkChange::Lost => stale.all = true,
        }
    }

    /// Returns the state as others see it.
    pub fn table(&self) -> LinkTable {
        let links = self
            .links
            .iter()
            .map(|(&index, link)| {
                let addresses =
                    self.addresses.get(&index).map(|nets| nets.iter().copied().collect()).unwrap_or_default();
                (index, Link { addresses, ..link.clone() })
            })
            .collect();
        let live = |(_, index): &(&IpAddr, &u32)| self.links.contains_key(index);
        let host_routes = self.host_routes.iter().filter(live).map(|(ip, index)| (*ip, *index)).collect();
        LinkTable { links, default_routes: self.default_routes.clone(), host_routes, route_changes: self.route_changes }
    }

    fn carries_default_route(&self, index: u32) -> bool {
        self.default_routes.iter().any(|route| route.oif == index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{default_route, link};

    fn state(links: impl IntoIterator<Item = Link>, routes: impl IntoIterator<Item = DefaultRoute>) -> LinkState {
        let mut state = LinkState { default_routes: routes.into_iter().collect(), ..LinkState::default() };
        for link in links {
            state.apply(LinkChange::Link(link), &mut Stale::default());
        }
        state
    }

    fn stale_after(state: &mut LinkState, change: LinkChange) -> Stale {
        let mut stale = Stale::default();
        state.apply(change, &mut stale);
        stale
    }

    #[test]
    fn a_veth_is_read_again_when_its_peer_leaves_the_namespace() {
        let veth = Link { kind: LinkKind::Veth, peer: Some(3), ..link(2, "veth0") };
        let other = Link { kind: LinkKind::Veth, peer: Some(2), ..link(3, "veth1") };
        let mut state = state([veth, other], []);
        let stale = stale_after(&mut state, LinkChange::LinkGone(3));
        assert_eq!(stale, Stale { links: [2].into(), ..Stale::default() });
        assert_eq!(state.table().links.keys().copied().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_link_that_goes_down_or_away_makes_its_default_routes_doubtful() {
        let routes = || [default_route(2, "192.0.2.1")];
        let down = |index| LinkChange::Link(Link { up: false, ..link(index, "eth") });
        assert!(stale_after(&mut state([link(2, "eth0")], routes()), down(2)).routes);
        assert!(stale_after(&mut state([link(2, "eth0")], routes()), LinkChange::LinkGone(2)).routes);
        assert!(!stale_after(&mut state([link(2, "eth0"), link(3, "eth1")], routes()), down(3)).routes);
    }

    #[test]
    fn addresses_may_come_before_their_link_and_go_with_it() {
        let net: IpNet = "192.0.2.7/24".parse().unwrap();
        let mut state = LinkState::default();
        assert_eq!(stale_after(&mut state, LinkChange::Address(2, net)), Stale::default());
        assert!(state.table().links.is_empty());
        state.apply(LinkChange::Link(link(2, "eth0")), &mut Stale::default());
        assert_eq!(state.table().by_address(net.addr()).map(|link| link.index), Some(2));
        state.apply(LinkChange::LinkGone(2), &mut Stale::default());
        state.apply(LinkChange::Link(link(2, "eth0")), &mut Stale::default());
        assert_eq!(state.table().by_address(net.addr()), None);
    }

    #[test]
    fn the_default_route_in_use_is_the_main_tables_with_the_lowest_metric() {
        let routes = [
            DefaultRoute { metric: 100, ..default_route(2, "192.0.2.1") },
            DefaultRoute { metric: 50, ..default_route(3, "192.0.2.2") },
            DefaultRoute { table: 100, ..default_route(4, "192.0.2.3") },
            DefaultRoute { ipv6: true, ..default_route(5, "2001:db8::1") },
        ];
        let table = state([], routes).table();
        assert_eq!(table.default_route(false).map(|route| route.oif), Some(3));
        assert_eq!(table.default_route(true).map(|route| route.oif), Some(5));
    }
}
