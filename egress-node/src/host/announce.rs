//! Announces egress IPs to the neighbours, and detects another host's claim to one. I/O only: `frames` builds the frames, `schedule` sets
//! the times, and the agent decides what to do about a rival.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use etherparse::EtherType;

use super::frames;
pub use super::frames::Claim;
use super::packet::PacketSocket;
use egress_core::network::{MacAddress, links::LinkTable};

/// Sends announcements, on any interface.
#[derive(Debug)]
pub struct Announcer {
    socket: PacketSocket,
}

impl Announcer {
    /// Opens a socket. Needs CAP_NET_RAW.
    pub fn open() -> io::Result<Announcer> {
        Ok(Announcer { socket: PacketSocket::sending()? })
    }

    /// Tells the neighbours on the interface that the address is at this MAC address. Tries all frames, and returns the first error.
    pub fn announce(&self, interface: u32, mac: MacAddress, address: IpAddr, vlan: Option<u16>) -> io::Result<()> {
        let frames = frames::announcements(address, mac).into_iter().map(|frame| frames::tagged(frame, vlan));
        let sent: Vec<_> = frames.map(|frame| self.socket.send(interface, &frame)).collect();
        sent.into_iter().collect()
    }

    /// Requests the MAC address of `target` on the interface, with one of our addresses as the sender.
    pub fn ask(
        &self,
        interface: u32,
        mac: MacAddress,
        address: IpAddr,
        target: IpAddr,
        vlan: Option<u16>,
    ) -> io::Result<()> {
        match frames::question(address, mac, target) {
            Some(frame) => self.socket.send(interface, &frames::tagged(frame, vlan)),
            None => Ok(()),
        }
    }
}

/// Receives claims on one interface: incoming ARP packets and Neighbor Advertisements.
///
/// It receives only frames that the programs at the interface's ingress let pass.
#[derive(Debug)]
pub struct ClaimListener {
    arp: PacketSocket,
    advertisements: PacketSocket,
}

impl ClaimListener {
    /// Opens the sockets. Needs CAP_NET_RAW. If the interface is created anew (another ifindex), open another listener.
    pub fn open(interface: u32) -> io::Result<ClaimListener> {
        Ok(ClaimListener {
            arp: PacketSocket::receiving(EtherType::ARP.0, interface, &[])?,
            advertisements: PacketSocket::receiving(EtherType::IPV6.0, interface, &ADVERTISEMENTS_ONLY)?,
        })
    }

    /// Waits for the next claim, by any host: see [`is_rival`]. Cancel safe.
    pub async fn receive(&self) -> io::Result<Claim> {
        loop {
            let (mut arp, mut advertisement) = ([0; 128], [0; 256]);
            let frame = tokio::select! {
                frame = self.arp.receive(&mut arp) => frame?,
                frame = self.advertisements.receive(&mut advertisement) => frame?,
            };
            if let Some(claim) = frames::claim(frame) {
                return Ok(claim);
            }
        }
    }
}

/// Returns whether another host claims an address that this node holds. A claim from one of the node's own interfaces (two of them may be
/// on one segment) is not a rival's.
pub fn is_rival(claim: &Claim, held: &BTreeSet<IpAddr>, own: &LinkTable) -> bool {
    held.contains(&claim.address) && own.links.values().all(|link| link.mac != Some(claim.mac))
}

const fn instruction(code: u32, k: u32, otherwise: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: otherwise, k }
}

/// Passes ICMPv6 Neighbor Advertisements without extension headers (hosts must not send them with any), so that an uplink's traffic does
/// not wake the socket.
const ADVERTISEMENTS_ONLY: [libc::sock_filter; 6] = {
    use libc::{BPF_ABS, BPF_B, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET};
    const NEXT_HEADER: u32 = 14 + 6;
    const ICMP_TYPE: u32 = 14 + 40;
    [
        instruction(BPF_LD | BPF_B | BPF_ABS, NEXT_HEADER, 0),
        instruction(BPF_JMP | BPF_JEQ | BPF_K, libc::IPPROTO_ICMPV6 as u32, 3),
        instruction(BPF_LD | BPF_B | BPF_ABS, ICMP_TYPE, 0),
        instruction(BPF_JMP | BPF_JEQ | BPF_K, etherparse::icmpv6::TYPE_NEIGHBOR_ADVERTISEMENT as u32, 1),
        instruction(BPF_RET | BPF_K, u32::MAX, 0),
        instruction(BPF_RET | BPF_K, 0, 0),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{Net, NetNs, in_netns, soon};
    use egress_core::testing::link;
    use std::sync::mpsc;

    const ADDRESSES: [&str; 2] = ["192.0.2.10", "2001:db8::10"];

    #[test]
    fn a_neighbour_with_a_stale_entry_learns_the_new_owner() {
        in_netns("a_neighbour_with_a_stale_entry_learns_the_new_owner", async || {
            let (net, server) = (Net::here(), NetNs::create());
            net.veth_into("eth0", &server, "far").await;
            let old_owner = MacAddress([2, 0, 0, 0, 0, 0xee]);
            server.run(|| async {
                let server = Net::here();
                server.address("far", "192.0.2.1/24").await;
                server.address("far", "2001:db8::1/64").await;
                for address in ADDRESSES {
                    server.neighbour("far", address, old_owner).await;
                }
            });
            let (interface, mac) = (net.index("eth0").await, net.mac("eth0").await);
            let announcer = Announcer::open().unwrap();
            for address in ADDRESSES {
                announcer.announce(interface, mac, address.parse().unwrap(), None).unwrap();
            }
            server.run(|| async {
                let server = Net::here();
                for address in ADDRESSES {
                    let learnt = async { while server.neighbour_mac(address).await != Some(mac) {} };
                    soon(address, learnt).await;
                }
            });
        });
    }

    #[test]
    fn both_forms_of_gratuitous_arp_arrive_as_they_were_built() {
        in_netns("both_forms_of_gratuitous_arp_arrive_as_they_were_built", async || {
            let (net, server) = (Net::here(), NetNs::create());
            net.veth_into("eth0", &server, "far").await;
            let (interface, mac) = (net.index("eth0").await, net.mac("eth0").await);
            let (opened, wait) = mpsc::channel();
            let receiver = std::thread::spawn(move || {
                server.run(|| async {
                    let far = Net::here().index("far").await;
                    let socket = PacketSocket::receiving(EtherType::ARP.0, far, &[]).unwrap();
                    opened.send(()).unwrap();
                    let mut frames = Vec::new();
                    while frames.len() < 2 {
                        let mut buffer = [0; 128];
                        frames.push(soon("a frame", socket.receive(&mut buffer)).await.unwrap().to_vec());
                    }
                    frames
                })
            });
            wait.recv().unwrap();
            Announcer::open().unwrap().announce(interface, mac, "192.0.2.10".parse().unwrap(), None).unwrap();
            assert_eq!(receiver.join().unwrap(), frames::announcements("192.0.2.10".parse().unwrap(), mac));
        });
    }

    #[test]
    fn another_owners_announcements_are_heard_and_other_traffic_is_not() {
        in_netns("another_owners_announcements_are_heard_and_other_traffic_is_not", async || {
            let (net, rival) = (Net::here(), NetNs::create());
            net.veth_into("eth0", &rival, "far").await;
            let interface = net.index("eth0").await;
            let listener = ClaimListener::open(interface).unwrap();
            let mac = rival.run(|| async {
                let far = Net::here();
                let (index, mac) = (far.index("far").await, far.mac("far").await);
                let announcer = Announcer::open().unwrap();
                // An echo request is ICMPv6 too, but not for this listener.
                let mut other = frames::neighbor_advertisement(ADDRESSES[1].parse().unwrap(), mac);
                other[14 + 40] = 128;
                PacketSocket::sending().unwrap().send(index, &other).unwrap();
                for address in ADDRESSES {
                    announcer.announce(index, mac, address.parse().unwrap(), None).unwrap();
                }
                mac
            });
            let expected: BTreeSet<IpAddr> = ADDRESSES.iter().map(|address| address.parse().unwrap()).collect();
            let mut heard = BTreeSet::new();
            while heard != expected {
                let claim = soon("claim", listener.receive()).await.unwrap();
                // The kernels of both sides advertise their own link-local addresses at any time.
                if expected.contains(&claim.address) {
                    assert_eq!(claim.mac, mac);
                    heard.insert(claim.address);
                }
            }
        });
    }

    #[test]
    fn the_filter_passes_advertisements_only() {
        in_netns("the_filter_passes_advertisements_only", async || {
            let (net, rival) = (Net::here(), NetNs::create());
            net.veth_into("eth0", &rival, "far").await;
            let socket =
                PacketSocket::receiving(EtherType::IPV6.0, net.index("eth0").await, &ADVERTISEMENTS_ONLY).unwrap();
            let advertisement = frames::neighbor_advertisement(ADDRESSES[1].parse().unwrap(), MacAddress([2; 6]));
            rival.run(|| async {
                let far = Net::here().index("far").await;
                let sender = PacketSocket::sending().unwrap();
                for (at, value) in [(14 + 6, 17), (14 + 40, 135)] {
                    let mut other = advertisement;
                    other[at] = value;
                    sender.send(far, &other).unwrap();
                }
                sender.send(far, &advertisement).unwrap();
            });
            let mut buffer = [0; 256];
            loop {
                let frame = soon("advertisement", socket.receive(&mut buffer)).await.unwrap();
                assert_eq!((frame[14 + 6], frame[14 + 40]), (58, 136));
                if frame == advertisement {
                    break;
                }
            }
        });
    }

    #[test]
    fn only_announcements_of_other_macs_are_rivals() {
        let eth0 = link(2, "eth0");
        let own = LinkTable { links: [(2, eth0.clone())].into(), ..LinkTable::default() };
        let held: BTreeSet<IpAddr> = ["192.0.2.10".parse().unwrap()].into();
        let claim = |address: &str, mac| Claim { address: address.parse().unwrap(), mac };
        assert!(is_rival(&claim("192.0.2.10", MacAddress([4; 6])), &held, &own));
        assert!(!is_rival(&claim("192.0.2.10", eth0.mac.unwrap()), &held, &own));
        assert!(!is_rival(&claim("192.0.2.11", MacAddress([4; 6])), &held, &own));
    }
}
