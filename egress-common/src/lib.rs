//! Types and pure functions that Spillway's kernel programs and its daemon share.
//!
//! Byte order: addresses and ports in map keys, map values and packets are in network byte order,
//! held as the bytes lie in memory (`u32::from_ne_bytes(octets)`). Everything else (counts,
//! indices, port blocks) is in host byte order. A field that departs from this says so.
//!
//! This crate uses neither helpers nor system calls; it compiles for the kernel and for the host.
#![cfg_attr(not(feature = "std"), no_std)]

mod layout;

pub mod abi;
pub mod config;
pub mod csum;
pub mod egress;
pub mod endpoint;
pub mod event;
pub mod flow;
pub mod hash;
pub mod limits;
pub mod port_block;
pub mod probe;
pub mod tcp;
pub mod trace;
pub mod traffic;
pub mod transport;
pub mod udp;
pub mod verdict;

/// An IPv4 address as it lies in a packet: one word, network byte order.
pub type V4 = [u32; 1];
/// An IPv6 address as it lies in a packet: four words, network byte order.
pub type V6 = [u32; 4];

/// Returns the IPv4-mapped form (`::ffff:a.b.c.d`) of an IPv4 address, used where one field holds either family.
#[inline(always)]
pub const fn mapped(v4: V4) -> V6 {
    [0, 0, 0xffff_u32.to_be(), v4[0]]
}

/// User-space conversions between the kernel's words and `std::net`.
#[cfg(feature = "std")]
pub mod net {
    use super::{V4, V6, mapped};
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    /// Returns the words of an IPv4 address.
    pub fn v4(a: Ipv4Addr) -> V4 {
        [u32::from_ne_bytes(a.octets())]
    }
    /// Returns the words of an IPv6 address.
    pub fn v6(a: Ipv6Addr) -> V6 {
        let o = a.octets();
        core::array::from_fn(|i| u32::from_ne_bytes([o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]]))
    }
    /// Returns the words of an address of either family, IPv4 in its mapped form.
    pub fn any(a: IpAddr) -> V6 {
        match a {
            IpAddr::V4(a) => mapped(v4(a)),
            IpAddr::V6(a) => v6(a),
        }
    }
    /// Returns the IPv4 address that the words stand for.
    pub fn from_v4(a: V4) -> Ipv4Addr {
        Ipv4Addr::from(a[0].to_ne_bytes())
    }
    /// Returns the IPv6 address that the words stand for.
    pub fn from_v6(a: V6) -> Ipv6Addr {
        let mut o = [0; 16];
        for (i, w) in a.iter().enumerate() {
            o[4 * i..4 * i + 4].copy_from_slice(&w.to_ne_bytes());
        }
        Ipv6Addr::from(o)
    }
    /// Returns the address that the words stand for, IPv4 when they are an IPv4-mapped address.
    pub fn from_any(a: V6) -> IpAddr {
        from_v6(a).to_canonical()
    }
}
