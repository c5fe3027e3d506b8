//! The lab's address plan:
//!
//! | segment | IPv4 | IPv6 | addresses |
//! | --- | --- | --- | --- |
//! | underlay | 10.88.0.0/24 | fd88::/64 | router .1, worker i at .(10+i), gateway i at .(100+i) |
//! | external | 192.0.2.0/24 | 2001:db8:2::/64 | router .1, gateway i at .(100+i), server i at .(199+i); .10-.99 are for egress IPs |
//! | far | 198.51.100.0/24 | 2001:db8:51::/64 | router .1, far server i at .(9+i) |
//! | a crowd of servers | 100.64.0.0/17 | 2001:db8:64::/64 | any server, by `Lab::crowd` |
//! | pods of the n-th node | 10.244.n.0/24 | fd00:10:244:n::/64 | bridge .1, pods from .10 on |
//!
//! Except in the crowd, the last part of an IPv6 address has the decimal digits of the last octet of the IPv4 address.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Both addresses of one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dual {
    /// The IPv4 address.
    pub v4: Ipv4Addr,
    /// The IPv6 address.
    pub v6: Ipv6Addr,
}

/// An address family. Tests cover both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, for loops.
    pub const BOTH: [Family; 2] = [Family::V4, Family::V6];
}

impl Dual {
    /// Returns the address of one family.
    pub fn ip(self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.v4.into(),
            Family::V6 => self.v6.into(),
        }
    }

    /// Returns the address of one family with a port.
    pub fn at(self, family: Family, port: u16) -> SocketAddr {
        SocketAddr::new(self.ip(family), port)
    }

    /// Returns both addresses with a port, for a server to listen on.
    pub fn both(self, port: u16) -> [SocketAddr; 2] {
        Family::BOTH.map(|family| self.at(family, port))
    }
}

impl fmt::Display for Dual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.v4, self.v6)
    }
}

/// The underlay's prefixes.
pub const UNDERLAY: [&str; 2] = ["10.88.0.0/24", "fd88::/64"];
/// The external segment's prefixes.
pub const EXTERNAL: [&str; 2] = ["192.0.2.0/24", "2001:db8:2::/64"];
/// The prefixes of the servers behind the router.
pub const FAR: [&str; 2] = ["198.51.100.0/24", "2001:db8:51::/64"];
/// The prefixes of all pods' addresses.
pub const PODS: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];

/// Returns the number whose hexadecimal digits are the decimal digits of `number`.
fn decimal_digits_as_hex(number: u8) -> u16 {
    let (hundreds, tens, ones) = (number / 100, number / 10 % 10, number % 10);
    u16::from(hundreds) << 8 | u16::from(tens) << 4 | u16::from(ones)
}

/// Returns the addresses of host `number` of the underlay.
pub fn underlay(number: u8) -> Dual {
    Dual {
        v4: Ipv4Addr::new(10, 88, 0, number),
        v6: Ipv6Addr::new(0xfd88, 0, 0, 0, 0, 0, 0, decimal_digits_as_hex(number)),
    }
}

/// Returns the addresses of host `number` of the external segment: `external(10)` is 192.0.2.10 and 2001:db8:2::10.
pub fn external(number: u8) -> Dual {
    Dual {
        v4: Ipv4Addr::new(192, 0, 2, number),
        v6: Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, decimal_digits_as_hex(number)),
    }
}

/// Returns the addresses of host `number` of the network behind the router.
pub fn far(number: u8) -> Dual {
    Dual {
        v4: Ipv4Addr::new(198, 51, 100, number),
        v6: Ipv6Addr::new(0x2001, 0xdb8, 0x51, 0, 0, 0, 0, decimal_digits_as_hex(number)),
    }
}

/// The prefixes of a crowd of servers.
pub const CROWD: [&str; 2] = ["100.64.0.0/17", "2001:db8:64::/64"];

/// Returns the addresses of host `number` of the crowd, at most 32,766.
pub fn crowd(number: u16) -> Dual {
    let v4 = Ipv4Addr::from_bits(Ipv4Addr::new(100, 64, 0, 0).to_bits() + u32::from(number));
    Dual { v4, v6: Ipv6Addr::new(0x2001, 0xdb8, 0x64, 0, 0, 0, 0, number) }
}

/// Returns the addresses of host `number` among the pods of the node with index `node`.
pub fn pod(node: u8, number: u8) -> Dual {
    Dual {
        v4: Ipv4Addr::new(10, 244, node, number),
        v6: Ipv6Addr::new(0xfd00, 0x10, 0x244, decimal_digits_as_hex(node), 0, 0, 0, decimal_digits_as_hex(number)),
    }
}

/// Returns the pod prefixes of the node with index `node`.
pub fn pod_prefixes(node: u8) -> [String; 2] {
    let base = pod(node, 0);
    [format!("{}/24", base.v4), format!("{}/64", base.v6)]
}
