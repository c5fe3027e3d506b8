//! The two address families, and addresses as numbers.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4
    V4,
    /// IPv6
    V6,
}

impl Family {
    /// Both families, in the order in which everything is planned.
    pub const ALL: [Family; 2] = [Family::V4, Family::V6];

    /// Returns the family of an address.
    pub fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) => Family::V6,
        }
    }

    /// Returns the family of a prefix.
    pub fn of_net(net: &IpNet) -> Self {
        match net {
            IpNet::V4(_) => Family::V4,
            IpNet::V6(_) => Family::V6,
        }
    }

    /// Returns the prefix of all its addresses.
    pub fn everything(self) -> IpNet {
        match self {
            Family::V4 => IpNet::V4(Default::default()),
            Family::V6 => IpNet::V6(Default::default()),
        }
    }

    /// Returns the number of bits of an address.
    pub fn width(self) -> u32 {
        match self {
            Family::V4 => 32,
            Family::V6 => 128,
        }
    }

    /// Returns the address as a number (host order); IPv4 uses the low 32 bits.
    pub fn bits(address: IpAddr) -> u128 {
        match address {
            IpAddr::V4(v4) => u128::from(v4.to_bits()),
            IpAddr::V6(v6) => v6.to_bits(),
        }
    }

    /// Returns the address that a number stands for. IPv4 takes the low 32 bits.
    pub fn address(self, bits: u128) -> IpAddr {
        match self {
            Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
            Family::V6 => IpAddr::V6(Ipv6Addr::from_bits(bits)),
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        })
    }
}
