//! Decodes route netlink messages into changes in our own terms. Pure.

use std::net::IpAddr;

use ipnet::IpNet;
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use rtnetlink::packet_route::link::{
    InfoData, InfoKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, VlanProtocol,
};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteNextHop, RouteType, RouteVia,
};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};

use egress_core::network::{
    MacAddress,
    links::{DefaultRoute, Link, LinkChange, LinkKind, TABLE_MAIN},
};

/// Returns the change of the state that a multicast message reports; `None` if it reports none.
pub fn change(message: &NetlinkMessage<RouteNetlinkMessage>) -> Option<LinkChange> {
    match &message.payload {
        NetlinkPayload::Overrun(_) => Some(LinkChange::Lost),
        NetlinkPayload::InnerMessage(message) => {
            match message {
                // A bridge reports its ports in messages of its own family, in which "deleted" means that the port left the bridge.
                RouteNetlinkMessage::NewLink(message) | RouteNetlinkMessage::DelLink(message)
                    if message.header.interface_family != AddressFamily::Unspec =>
                {
                    None
                }
                RouteNetlinkMessage::NewLink(message) => {
                    Some(link(message).map_or(LinkChange::LinkUnclear(message.header.index), LinkChange::Link))
                }
                RouteNetlinkMessage::DelLink(message) => Some(LinkChange::LinkGone(message.header.index)),
                RouteNetlinkMessage::NewAddress(message) => address(message).map(|(index, net, usable)| {
                    if usable { LinkChange::Address(index, net) } else { LinkChange::AddressGone(index, net) }
                }),
                RouteNetlinkMessage::DelAddress(message) => {
                    address(message).map(|(index, net, _)| LinkChange::AddressGone(index, net))
                }
                RouteNetlinkMessage::NewRoute(message) => {
                    let host = |(address, index)| LinkChange::HostRoute(address, index);
                    route(message, host)
                }
                RouteNetlinkMessage::DelRoute(message) => {
                    let host = |(address, index)| LinkChange::HostRouteGone(address, index);
                    route(message, host)
                }
                _ => None,
            }
        }
        _ => None,
    }
}

/// Returns the change that a route message reports; `host` builds it for a route to a single address behind a link.
fn route(message: &RouteMessage, host: impl Fn((IpAddr, u32)) -> LinkChange) -> Option<LinkChange> {
    if message.header.destination_prefix_length == 0 {
        return Some(LinkChange::DefaultRoutes);
    }
    let other = || (message.header.kind == RouteType::Unicast).then_some(LinkChange::Route);
    host_route(message).map(host).or_else(other)
}

/// Returns the link that a message describes; `None` if the message describes only a part of it.
pub fn link(message: &LinkMessage) -> Option<Link> {
    let header = &message.header;
    let mut link = Link {
        name: String::new(),
        index: header.index,
        mac: None,
        mtu: 0,
        kind: if header.flags.contains(LinkFlags::Loopback) { LinkKind::Loopback } else { LinkKind::Physical },
        master: None,
        up: header.flags.contains(LinkFlags::Up),
        carrier: header.flags.contains(LinkFlags::LowerUp),
        peer: None,
        peer_netns: None,
        addresses: Vec::new(),
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Controller(index) => link.master = Some(*index).filter(|&index| index != 0),
            LinkAttribute::Link(index) => link.peer = Some(*index).filter(|&index| index != 0),
            LinkAttribute::LinkNetNsId(id) => link.peer_netns = Some(*id),
            LinkAttribute::Address(bytes) if header.link_layer_type == LinkLayerType::Ether => {
                link.mac = bytes.as_slice().try_into().ok().map(MacAddress);
            }
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => link.kind = link_kind(kind),
                        LinkInfo::Data(InfoData::Vlan(settings)) => {
                            link.kind = vlan(settings).map_or(link.kind, LinkKind::Vlan);
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    (!link.name.is_empty() && link.mtu != 0).then_some(link)
}

fn link_kind(kind: &InfoKind) -> LinkKind {
    match kind {
        InfoKind::Veth => LinkKind::Veth,
        InfoKind::Bridge => LinkKind::Bridge,
        InfoKind::Vxlan => LinkKind::Vxlan,
        InfoKind::Geneve
        | InfoKind::GreTap
        | InfoKind::GreTap6
        | InfoKind::GreTun
        | InfoKind::GreTun6
        | InfoKind::ErSpan
        | InfoKind::Ip6ErSpan
        | InfoKind::IpIp
        | InfoKind::Ip6Tnl
        | InfoKind::SitTun
        | InfoKind::Vti
        | InfoKind::Vti6
        | InfoKind::Xfrm
        | InfoKind::Wireguard
        | InfoKind::Tun
        | InfoKind::Gtp
        | InfoKind::Amt
        | InfoKind::BareUdp => LinkKind::Tunnel(kind.to_string()),
        other => LinkKind::Other(other.to_string()),
    }
}

/// Returns the VLAN of an 802.1Q device.
fn vlan(settings: &[InfoVlan]) -> Option<u16> {
    let id = settings.iter().find_map(|setting| if let InfoVlan::Id(id) = setting { Some(*id) } else { None });
    id.filter(|_| settings.contains(&InfoVlan::Protocol(VlanProtocol::Ieee8021Q)))
}

/// Returns the ifindex, the address with its prefix length, and whether the address can be used, from an address message.
pub fn address(message: &AddressMessage) -> Option<(u32, IpNet, bool)> {
    let mut local = None;
    let mut peer = None;
    let mut usable = true;
    for attribute in &message.attributes {
        match attribute {
            // On a point-to-point link, IFA_ADDRESS is the peer's address.
            AddressAttribute::Local(address) => local = Some(*address),
            AddressAttribute::Address(address) => peer = Some(*address),
            AddressAttribute::Flags(flags) => usable = !flags.contains(AddressFlags::Dadfailed),
            _ => {}
        }
    }
    let net = IpNet::new(local.or(peer)?, message.header.prefix_len).ok()?;
    Some((message.header.index, net, usable))
}

/// Returns the address and the link of a main-table route to a single address that is on the link itself.
pub fn host_route(message: &RouteMessage) -> Option<(IpAddr, u32)> {
    let header = &message.header;
    let whole = if header.address_family == AddressFamily::Inet6 { 128 } else { 32 };
    if header.destination_prefix_length != whole
        || header.kind != RouteType::Unicast
        || header.flags.contains(RouteFlags::Cloned)
    {
        return None;
    }
    let (mut table, mut address, mut index) = (u32::from(header.table), None, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::Destination(destination) => address = ip(destination),
            RouteAttribute::Oif(oif) => index = Some(*oif),
            other if gateway(other).is_some() => return None,
            _ => {}
        }
    }
    if table == TABLE_MAIN { Some((address?, index?)) } else { None }
}

/// Returns the default routes that a route message describes: none for another route, several for a multipath route.
pub fn default_routes(message: &RouteMessage) -> Vec<DefaultRoute> {
    let header = &message.header;
    if header.destination_prefix_length != 0
        || header.source_prefix_length != 0
        || header.kind != RouteType::Unicast
        || header.flags.contains(RouteFlags::Cloned)
    {
        return Vec::new();
    }
    let mut route = DefaultRoute {
        ipv6: header.address_family == AddressFamily::Inet6,
        table: u32::from(header.table),
        metric: 0,
        oif: 0,
        gateway: None,
        source: None,
    };
    let mut hops: &[RouteNextHop] = &[];
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(table) => route.table = *table,
            RouteAttribute::Priority(metric) => route.metric = *metric,
            RouteAttribute::Oif(index) => route.oif = *index,
            RouteAttribute::PrefSource(address) => route.source = ip(address),
            RouteAttribute::MultiPath(multipath) => hops = multipath,
            other => route.gateway = gateway(other).or(route.gateway),
        }
    }
    if hops.is_empty() {
        return if route.oif == 0 { Vec::new() } else { vec![route] };
    }
    hops.iter()
        .map(|hop| DefaultRoute {
            oif: hop.interface_index,
            gateway: hop.attributes.iter().find_map(gateway),
            ..route.clone()
        })
        .collect()
}

/// Returns the next hop that an attribute of a route names, if any.
pub fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(RouteVia::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Via(RouteVia::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

pub fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}
