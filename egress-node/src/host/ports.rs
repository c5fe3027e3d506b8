//! Finds the ports of the node's own addresses that the node itself uses. An egress IP that is an address of the node shares its ports with
//! the node's sockets, so only blocks without such ports may be leased. A leased block that comes into use is drained; meanwhile the
//! programs distinguish the packets of sockets and flows (`source/own.rs` of `egress-ebpf`).
//!
//! Forwarding without a socket (a `hostPort` of the CNI's portmap plugin, a NAT rule of the administrator) is invisible here: reserve such
//! ports with `net.ipv4.ip_local_reserved_ports`. Kubernetes node ports are above [`OWN_ADDRESS_PORTS`].

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

use egress_common::port_block;

use super::sysctl;

/// The ports of a node's own address that may be leased: below the node ports (30000-32767) and the usual ephemeral ports (32768 and up).
pub const OWN_ADDRESS_PORTS: RangeInclusive<u16> = 1024..=29951;

/// The socket tables, read through the thread's /proc entry, so that they belong to its network namespace.
const TABLES: [&str; 4] = ["tcp", "udp", "tcp6", "udp6"];

/// Why the node's ports are unknown.
#[derive(Debug, thiserror::Error)]
pub enum PortsError {
    /// A file could not be read.
    #[error("cannot read {path}: {error}")]
    Read {
        /// The file.
        path: String,
        /// The reason.
        #[source]
        error: io::Error,
    },
    /// A setting could not be read.
    #[error(transparent)]
    Sysctl(#[from] sysctl::SysctlError),
    /// A file has another format than on known kernels.
    #[error("{what} holds {text:?}, which cannot be parsed")]
    Format {
        /// The file or setting.
        what: String,
        /// The part that cannot be parsed.
        text: String,
    },
}

/// The local end of a socket, whatever its state. An unspecified address stands for all addresses of its family. An unspecified IPv6
/// address also stands for those of IPv4, because the kernel does not report here which sockets are IPv6-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalEnd {
    /// The address; an IPv4-mapped address is given as IPv4.
    pub address: IpAddr,
    /// The port.
    pub port: u16,
}

/// The ports that the node uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePorts {
    /// The local ends of its sockets.
    pub sockets: BTreeSet<LocalEnd>,
    /// The ports at which the kernel may put a socket at any time, and those that the administrator reserved.
    pub reserved: Vec<RangeInclusive<u16>>,
}

impl NodePorts {
    /// Reads the state of this network namespace. The time that this takes grows with the number of sockets.
    pub fn read() -> Result<NodePorts, PortsError> {
        let mut sockets = BTreeSet::new();
        for table in TABLES {
            let path = format!("/proc/thread-self/net/{table}");
            match fs::read_to_string(&path) {
                Ok(text) => sockets.extend(parse_sockets(&path, &text)?),
                // The kernel has no IPv6.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(PortsError::Read { path, error }),
            }
        }
        let mut reserved = Vec::new();
        for (key, parse) in [
            ("net/ipv4/ip_local_port_range", parse_port_range as fn(&str, &str) -> _),
            ("net/ipv4/ip_local_reserved_ports", parse_port_list),
        ] {
            reserved.extend(parse(key, &sysctl::read(key)?.unwrap_or_default())?);
        }
        Ok(NodePorts { sockets, reserved })
    }

    /// Returns the numbers of the blocks within [`OWN_ADDRESS_PORTS`] that this node does not use on this address of its own.
    pub fn free_blocks(&self, address: IpAddr) -> BTreeSet<u16> {
        let used: BTreeSet<u16> = self
            .sockets
            .iter()
            .filter(|socket| covers(socket.address, address))
            .filter_map(|socket| port_block::of_port(socket.port))
            .collect();
        let (first, last) = OWN_ADDRESS_PORTS.into_inner();
        let blocks = port_block::of_port(first).into_iter().flat_map(|first| first..port_block::COUNT);
        blocks
            .map(|block| (block, port_block::first_port(block)))
            .map(|(block, port)| (block, port..=port + (port_block::SIZE - 1)))
            .take_while(|(_, ports)| *ports.end() <= last)
            .filter(|(block, _)| !used.contains(block))
            .filter(|(_, ports)| !self.reserved.iter().any(|reserved| overlap(reserved, ports)))
            .map(|(block, _)| block)
            .collect()
    }
}

fn covers(socket: IpAddr, address: IpAddr) -> bool {
    socket == address
        || match socket {
            IpAddr::V4(socket) => socket.is_unspecified() && address.is_ipv4(),
            IpAddr::V6(socket) => socket.is_unspecified(),
        }
}

fn overlap(a: &RangeInclusive<u16>, b: &RangeInclusive<u16>) -> bool {
    a.start() <= b.end() && b.start() <= a.end()
}

/// Parses the local ends in the text of /proc/net/tcp, udp, tcp6 or udp6. `path` names it in errors.
pub fn parse_sockets(path: &str, text: &str) -> Result<BTreeSet<LocalEnd>, PortsError> {
    let not_understood = |line: &str| PortsError::Format { what: path.to_owned(), text: line.to_owned() };
    text.lines()
        .skip(1)
        .filter(|line| !line.trim().is_empty())
        .map(|line| line.split_whitespace().nth(1).and_then(parse_end).ok_or_else(|| not_understood(line)))
        .collect()
}

/// Parses `0100007F:0035`: the words of the address in the machine's byte order, and the port as a number.
fn parse_end(text: &str) -> Option<LocalEnd> {
    let (address, port) = text.split_once(':')?;
    if !address.is_ascii() {
        return None;
    }
    let words: Vec<[u8; 4]> = (0..address.len())
        .step_by(8)
        .map(|at| u32::from_str_radix(address.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes))
        .collect::<Option<_>>()?;
    let address = match *words.as_slice() {
        [word] => IpAddr::V4(Ipv4Addr::from(word)),
        [_, _, _, _] => {
            let octets: [u8; 16] = words.concat().try_into().ok()?;
            IpAddr::V6(Ipv6Addr::from(octets)).to_canonical()
        }
        _ => return None,
    };
    Some(LocalEnd { address, port: u16::from_str_radix(port, 16).ok()? })
}

/// Parses `32768 60999`.
fn parse_port_range(key: &str, text: &str) -> Result<Vec<RangeInclusive<u16>>, PortsError> {
    parse_ranges(key, [text].into_iter().filter(|text| !text.is_empty()), ' ')
}

/// Parses `8080,9000-9010`, or nothing.
fn parse_port_list(key: &str, text: &str) -> Result<Vec<RangeInclusive<u16>>, PortsError> {
    parse_ranges(key, text.split(',').map(str::trim).filter(|part| !part.is_empty()), '-')
}

fn parse_ranges<'a>(
    key: &str,
    parts: impl Iterator<Item = &'a str>,
    separator: char,
) -> Result<Vec<RangeInclusive<u16>>, PortsError> {
    parts
        .map(|part| {
            let (first, last) = part.split_once(separator).unwrap_or((part, part));
            let range = first.parse().ok().zip(last.parse().ok()).map(|(first, last)| first..=last);
            range.ok_or_else(|| PortsError::Format { what: key.to_owned(), text: part.to_owned() })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{Net, in_netns};
    use std::net::{TcpListener, TcpStream, UdpSocket};

    const TCP: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:0FA1 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2113 1 00 100 0 0 10 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2114 1 00 100 0 0 10 0
   2: 0A0200C0:1F90 016433C6:01BB 06 00000000:00000000 03:00000AF0 00000000     0        0 0 3 00
";
    const UDP6: &str =
        "  sl  local_address                         remote_address                        st tx_queue rx_queue
   10: 00000000000000000000000000000000:0202 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000
   11: B80D0120000000000000000010000000:14E9 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000
   12: 0000000000000000FFFF00000A0200C0:2328 00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000
";

    fn end(address: &str, port: u16) -> LocalEnd {
        LocalEnd { address: address.parse().unwrap(), port }
    }

    fn node(sockets: &[LocalEnd], reserved: &[RangeInclusive<u16>]) -> NodePorts {
        NodePorts { sockets: sockets.iter().copied().collect(), reserved: reserved.to_vec() }
    }

    fn taken(node: &NodePorts, address: &str) -> Vec<u16> {
        let free = node.free_blocks(address.parse().unwrap());
        (0..port_block::COUNT).filter(|block| !free.contains(block)).take_while(|&block| block < 452).collect()
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn the_kernels_tables_are_read() {
        let expected = [end("127.0.0.1", 4001), end("0.0.0.0", 22), end("192.0.2.10", 8080)];
        assert_eq!(parse_sockets("tcp", TCP).unwrap(), expected.into());
        let expected = [end("::", 514), end("2001:db8::10", 5353), end("192.0.2.10", 9000)];
        assert_eq!(parse_sockets("udp6", UDP6).unwrap(), expected.into());
        assert_eq!(parse_sockets("udp", "  sl  local_address\n").unwrap(), [].into());
    }

    #[test]
    fn unparsable_lines_are_quoted_in_errors() {
        for line in [
            "0: 0100007F",
            "0: 0100007:0016",
            "0: 0100007F0100007F:0016",
            "0: xyzxyzxy:0016",
            "0: 0100007F:10000",
            "0:",
        ] {
            let error = parse_sockets("/proc/net/tcp", &format!("header\n{line}\n")).unwrap_err().to_string();
            assert!(error.contains("/proc/net/tcp") && error.contains(line), "{error}");
        }
        assert!(parse_port_list("key", "80,x").is_err() && parse_port_range("key", "32768 70000").is_err());
    }

    #[test]
    fn reserved_ports() {
        assert_eq!(parse_port_list("key", "8080,9000-9010").unwrap(), [8080..=8080, 9000..=9010]);
        assert_eq!(parse_port_list("key", "").unwrap(), []);
        assert_eq!(parse_port_range("key", "32768 60999").unwrap(), [32768..=60999]);
    }

    #[test]
    fn blocks_with_a_socket_on_the_address_are_not_free() {
        let sockets = [
            end("192.0.2.10", 1087),
            end("0.0.0.0", 1088),
            end("192.0.2.99", 2000),
            end("::", 1152),
            end("2001:db8::10", 1216),
            end("0.0.0.0", 22),
            end("0.0.0.0", 31000),
        ];
        let node = node(&sockets, &[]);
        assert_eq!(taken(&node, "192.0.2.10"), [0, 1, 2]);
        assert_eq!(taken(&node, "2001:db8::10"), [2, 3]);
        let free = node.free_blocks("192.0.2.10".parse().unwrap());
        assert_eq!((free.len(), free.last()), (452 - 3, Some(&451)));
        assert_eq!(port_block::first_port(451) + (port_block::SIZE - 1), *OWN_ADDRESS_PORTS.end());
    }

    #[test]
    fn blocks_that_meet_a_reserved_range_are_not_free() {
        let node = node(&[], &[1151..=1152, 32768..=60999, 1024..=1024]);
        assert_eq!(taken(&node, "192.0.2.10"), [0, 1, 2]);
        let wide = NodePorts { reserved: std::iter::once(1024..=65535).collect(), ..NodePorts::default() };
        assert_eq!(wide.free_blocks("192.0.2.10".parse().unwrap()), BTreeSet::new());
    }

    #[test]
    fn the_sockets_of_this_namespace_are_seen() {
        in_netns("the_sockets_of_this_namespace_are_seen", async || {
            let net = Net::here();
            net.address("lo", "192.0.2.10/32").await;
            std::fs::write("/proc/sys/net/ipv4/ip_local_reserved_ports", "10000-10063").unwrap();
            std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "20032 20095").unwrap();
            let address: IpAddr = "192.0.2.10".parse().unwrap();
            let before = NodePorts::read().unwrap();
            let listener = TcpListener::bind((address, 5001)).unwrap();
            let _udp = UdpSocket::bind(("::", 6001)).unwrap();
            let _connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let ports = NodePorts::read().unwrap();
            let block = |port| port_block::of_port(port).unwrap();
            let lost: BTreeSet<u16> = &before.free_blocks(address) - &ports.free_blocks(address);
            assert_eq!(lost, [block(5001), block(6001)].into());
            for reserved in [10000, 10063, 20032, 20095] {
                assert!(!before.free_blocks(address).contains(&block(reserved)), "{reserved}");
            }
            assert!(
                ports.sockets.iter().any(|socket| (20032..=20095).contains(&socket.port)),
                "the connection's own end"
            );
        });
    }
}
