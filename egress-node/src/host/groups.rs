//! The solicited-node groups of IPv6 egress IPs: requests for such an address go to its group, and switches and network cards that track
//! memberships forward them only to members.
//!
//! The kernel reports the memberships (MLD), answers queries about them and tells the card. They last as long as the process: while an
//! agent restarts, a switch may act on the report that they ended. Neighbours that already know the address ask it by unicast (RFC 4861,
//! section 7.3.3), and the next agent joins immediately.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv6Addr, UdpSocket};

/// An interface and a group that is joined there.
pub type Membership = (u32, Ipv6Addr);

/// The memberships of this node.
#[derive(Debug, Default)]
pub struct Groups {
    /// The kernel limits the memberships of each socket (`net.core.optmem_max`: about three hundred with the smallest default).
    sockets: Vec<UdpSocket>,
    joined: BTreeMap<Membership, usize>,
}

/// Returns the group in which neighbours ask for an address (RFC 4291, section 2.7.1). Addresses with the same last 24 bits share it.
pub fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]))
}

/// Returns the memberships needed to answer requests for addresses on interfaces.
pub fn wanted(places: impl Iterator<Item = (IpAddr, u32)>) -> BTreeSet<Membership> {
    let v6 = places.filter_map(|(address, interface)| match address {
        IpAddr::V6(address) => Some((interface, solicited_node(address))),
        IpAddr::V4(_) => None,
    });
    v6.collect()
}

impl Groups {
    /// Joins and leaves groups until exactly these are joined. The next call retries failed joins.
    pub fn set(&mut self, wanted: &BTreeSet<Membership>) -> Vec<(Membership, io::Error)> {
        let left: Vec<Membership> = self.joined.keys().filter(|m| !wanted.contains(m)).copied().collect();
        for membership in left {
            if let Some(socket) = self.joined.remove(&membership) {
                let (interface, group) = membership;
                // The memberships of an interface end with it.
                drop(self.sockets[socket].leave_multicast_v6(&group, interface));
            }
        }
        let new: Vec<Membership> = wanted.iter().filter(|m| !self.joined.contains_key(m)).copied().collect();
        new.into_iter().filter_map(|membership| Some((membership, self.join(membership).err()?))).collect()
    }

    /// Joins with the first socket that accepts the group, or with a new socket.
    fn join(&mut self, membership: Membership) -> io::Result<()> {
        let (interface, group) = membership;
        for (number, socket) in self.sockets.iter().enumerate() {
            match socket.join_multicast_v6(&group, interface) {
                Ok(()) => {
                    self.joined.insert(membership, number);
                    return Ok(());
                }
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::ENOMEM)) => {}
                Err(error) => return Err(error),
            }
        }
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
        socket.join_multicast_v6(&group, interface)?;
        self.joined.insert(membership, self.sockets.len());
        self.sockets.push(socket);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::in_netns;

    fn places(n: u32) -> BTreeSet<Membership> {
        let address = |i: u32| Ipv6Addr::from(0x2001_0db8_u128 << 96 | u128::from(i));
        wanted((0..n).map(|i| (address(i).into(), 1)))
    }

    /// Returns the number of solicited-node groups that the kernel has joined in this namespace.
    fn joined() -> usize {
        let text = std::fs::read_to_string("/proc/thread-self/net/igmp6").unwrap();
        text.lines().filter(|line| line.contains(" ff0200000000000000000001ff")).count()
    }

    #[test]
    fn the_group_of_an_address_has_its_last_24_bits() {
        assert_eq!(
            solicited_node("2001:db8::1:1234:5678".parse().unwrap()),
            "ff02::1:ff34:5678".parse::<Ipv6Addr>().unwrap()
        );
        let same = ["2001:db8::aa", "2001:db8:1::aa", "192.0.2.1"].map(|ip| (ip.parse().unwrap(), 7));
        assert_eq!(wanted(same.into_iter()).len(), 1);
    }

    #[test]
    fn a_thousand_addresses_are_joined_and_left() {
        in_netns("a_thousand_addresses_are_joined_and_left", async || {
            let mut groups = Groups::default();
            assert!(groups.set(&places(1_000)).is_empty());
            // The loopback device's own address is in a group as well.
            let own = usize::from(!places(1_000).contains(&(1, solicited_node(Ipv6Addr::LOCALHOST))));
            assert_eq!(joined(), 1_000 + own, "{} sockets", groups.sockets.len());
            assert!(groups.set(&places(3)).is_empty());
            assert!((3..=4).contains(&joined()));
            let gone = groups.set(&[(99, solicited_node(Ipv6Addr::LOCALHOST))].into());
            assert_eq!(gone.len(), 1, "there is no such interface");
        });
    }
}
