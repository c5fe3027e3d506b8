//! Decides which transports lead to another node according to the settings of both nodes, the routing table and the link, and why others do
//! not.

use crate::{
    encode::transport::{Path, TransportView},
    model::{NodeName, Transport},
    network::{
        Route,
        links::{LinkKind, LinkTable},
    },
};
use egress_common::{
    transport::{DEVICE, DIRECT, VXLAN, bit},
    verdict::Counter,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

/// All transports, the best first.
pub const TRANSPORTS: [u32; 3] = [DIRECT, VXLAN, DEVICE];

/// Returns the name of a transport.
pub const fn name(transport: u32) -> &'static str {
    match transport {
        DIRECT => "direct",
        VXLAN => "vxlan",
        _ => "device",
    }
}

/// Returns whether a setting permits a transport for sending. The device is always available for what nothing else carries.
pub const fn permits(setting: Transport, transport: u32) -> bool {
    match setting {
        Transport::Auto => true,
        Transport::Device => transport == DEVICE,
        Transport::Vxlan => transport == DEVICE || transport == VXLAN,
        Transport::Direct => transport == DEVICE || transport == DIRECT,
    }
}

/// Returns the names of the transports that a node with this setting receives, which always include those that the device understands.
pub fn receives(setting: Transport) -> Vec<String> {
    TRANSPORTS
        .iter()
        .rev()
        .filter(|transport| **transport != DIRECT || permits(setting, DIRECT))
        .map(|transport| name(*transport).into())
        .collect()
}

/// Another node, as its agent reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its tunnel address.
    pub address: IpAddr,
    /// The MAC address of the interface that has this address.
    pub mac: Option<[u8; 6]>,
    /// Whether it receives packets over `direct`.
    pub direct: bool,
}

/// The transports to a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transports {
    /// The transports that may be used.
    pub allowed: BTreeSet<u32>,
    /// The transport over the underlay.
    pub path: Option<Path>,
    /// Why the others may not be used.
    pub reasons: BTreeMap<u32, String>,
}

impl Transports {
    /// Returns the transports to probe: a setting that names a transport leaves no choice, if that transport is allowed.
    pub fn candidates(&self, setting: Transport) -> BTreeSet<u32> {
        match setting {
            Transport::Auto => self.allowed.clone(),
            _ => self.allowed.last().into_iter().copied().collect(),
        }
    }

    /// Returns the view for the datapath, with `forward` chosen.
    pub fn view(&self, forward: u32, setting: Transport) -> TransportView {
        TransportView {
            forward,
            may: self.allowed.iter().map(|transport| bit(*transport)).sum(),
            why: (setting != Transport::Device && self.path.is_none()).then_some(Counter::DeviceRoute),
            path: self.path.clone(),
        }
    }
}

/// Returns the transports to `peer` by a route. `own` are this node's tunnel addresses.
pub fn to(
    setting: Transport,
    peer: &Peer,
    route: &Result<Route, String>,
    links: &LinkTable,
    own: &[IpAddr],
) -> Transports {
    let mut transports = Transports { allowed: [DEVICE].into(), ..Transports::default() };
    let path = route.clone().and_then(|route| plain(peer, &route, links, own));
    for transport in [VXLAN, DIRECT] {
        let obstacle = match &path {
            _ if !permits(setting, transport) => Some(format!("forbidden by this node's `transport: {setting}`")),
            Err(reason) => Some(reason.clone()),
            Ok(path) if transport == DIRECT => off_link(peer, path),
            Ok(_) => None,
        };
        match obstacle {
            Some(reason) => drop(transports.reasons.insert(transport, reason)),
            None => drop(transports.allowed.insert(transport)),
        }
    }
    transports.path = path.ok().filter(|_| setting != Transport::Device);
    transports
}

/// Returns the path over plain Ethernet, or why there is none.
fn plain(peer: &Peer, route: &Route, links: &LinkTable, own: &[IpAddr]) -> Result<Path, String> {
    let link = links.links.get(&route.oif).ok_or("the route's interface is not known")?;
    let name = &link.name;
    if route.encapsulated {
        return Err(format!("the route through {name} encapsulates"));
    }
    let mac = match (&link.kind, link.mac) {
        (LinkKind::Loopback, _) => return Err(format!("the route leads to {name}")),
        (kind, Some(mac)) if !kind.is_tunnel() => mac,
        (kind, _) => return Err(format!("the route leads through {name} ({kind}), which is not plain Ethernet")),
    };
    if !link.up {
        return Err(format!("{name} is down"));
    }
    let same_family = own.iter().find(|address| address.is_ipv4() == peer.address.is_ipv4());
    let source = *same_family.ok_or("this node has no tunnel address of that family")?;
    let hop = route.gateway.unwrap_or(peer.address);
    let mtu = route.mtu.unwrap_or(link.mtu).min(link.mtu);
    let macs = peer.mac.filter(|_| route.gateway.is_none()).map(|theirs| [theirs, mac.0]);
    Ok(Path { ifindex: route.oif, mtu, hop, source, macs })
}

/// Returns why a frame cannot go to the other node's own MAC address, if it cannot.
fn off_link(peer: &Peer, path: &Path) -> Option<String> {
    if path.hop != peer.address {
        return Some(format!("not on the same link (next hop {})", path.hop));
    }
    if !peer.direct {
        return Some("the other node's settings do not allow it".into());
    }
    path.macs.is_none().then(|| "the other node reports no Ethernet address".into())
}

/// Returns the MAC addresses that the nodes report for their tunnel addresses, without those that several nodes claim.
pub fn macs<'a>(peers: impl Iterator<Item = (&'a NodeName, [u8; 6])>) -> BTreeMap<[u8; 6], NodeName> {
    let mut macs: BTreeMap<[u8; 6], Option<NodeName>> = BTreeMap::new();
    for (node, mac) in peers {
        let holder = macs.entry(mac).or_insert_with(|| Some(node.clone()));
        if holder.as_ref() != Some(node) {
            *holder = None;
        }
    }
    macs.into_iter().filter_map(|(mac, holder)| Some((mac, holder?))).collect()
}

#[cfg(test)]
#[path = "transports_tests.rs"]
mod tests;
