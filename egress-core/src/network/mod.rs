//! A node's network: its links, addresses and default routes, what each link is, and when egress IPs are announced.

pub mod classify;
pub mod links;
pub mod pods;
pub mod reported;
pub mod schedule;
pub mod xdp;

use crate::model::SubnetInfo;
use std::{fmt, net::IpAddr};

/// An Ethernet address in wire order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// All hosts of the segment.
    pub const BROADCAST: MacAddress = MacAddress([0xff; 6]);
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The route to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The ifindex that packets leave by.
    pub oif: u32,
    /// The next hop; none if the address is on the link.
    pub gateway: Option<IpAddr>,
    /// The largest packet, if the route limits it.
    pub mtu: Option<u32>,
    /// Whether packets get another header on the way (MPLS, segment routing and the like).
    pub encapsulated: bool,
}

/// The link on which an egress IP is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EgressLink {
    /// The interface.
    pub interface: u32,
    /// Its MAC address.
    pub mac: MacAddress,
    /// The dedicated subnet of the egress IP, if any. Its next hop is asked for its MAC address.
    pub subnet: Option<SubnetInfo>,
}
