//! Sends probes into the tunnel device. I/O only: `health` decides when to send, and what an answer or its absence means.
//!
//! The program at the device's egress recognises a probe by its source MAC address and sends it by the transport that the probe names. The
//! gateway's program turns the request into a reply. Replies come through a ring buffer (`datapath::answers`).

use egress_core::agent::gateways::Request;
use std::io;
use std::net::IpAddr;

use egress_common::abi::INNER_DST_MAC;
use egress_common::csum;
use egress_common::net;
use egress_common::probe::{MAGIC, PEER_V4, PEER_V6, PORT, Probe, REQUEST, SRC_MAC, VERSION};

use super::packet::PacketSocket;

/// Lengths of the headers and the payload, in bytes.
const IPV4: usize = 20;
const UDP: usize = 8;
const PAYLOAD: usize = size_of::<Probe>();
/// Protocol number of UDP.
const PROTOCOL: u8 = 17;
/// Hop limit of a probe.
const HOPS: u8 = 64;

/// Sends probes into one tunnel device. If the device is created anew (another ifindex), open another socket.
#[derive(Debug)]
pub struct ProbeSocket {
    socket: PacketSocket,
    tunnel: u32,
}

impl ProbeSocket {
    /// Opens a socket on the tunnel device with that ifindex. Needs CAP_NET_RAW.
    pub fn open(tunnel: u32) -> io::Result<ProbeSocket> {
        Ok(ProbeSocket { socket: PacketSocket::sending()?, tunnel })
    }

    /// Sends a request. An error means that the probe was not sent (the device is down, or its queue is full): it counts as unanswered.
    pub fn send(&self, request: &Request) -> io::Result<()> {
        self.socket.send(self.tunnel, &encode(request))
    }
}

fn encode(request: &Request) -> Vec<u8> {
    let payload = payload(request);
    let length = (UDP + PAYLOAD) as u16;
    let (ethertype, header, addresses) = match request.egress {
        IpAddr::V4(egress) => (0x0800_u16, ipv4(egress.octets(), length), [&egress.octets()[..], &PEER_V4].concat()),
        IpAddr::V6(egress) => (0x86dd, ipv6(egress.octets(), length), [&egress.octets()[..], &PEER_V6].concat()),
    };
    let ports = [PORT.to_be_bytes(), PORT.to_be_bytes(), length.to_be_bytes()].concat();
    // The pseudo-header (RFC 768; RFC 8200, section 8.1) has the same sum in both families.
    let pseudo = [&addresses[..], &length.to_be_bytes(), &[0, PROTOCOL]].concat();
    let check = checksum(&[&pseudo, &ports, &payload]);
    let check = if check == 0 { 0xffff } else { check };
    [&INNER_DST_MAC[..], &SRC_MAC, &ethertype.to_be_bytes(), &header, &ports, &check.to_be_bytes(), &payload].concat()
}

fn payload(request: &Request) -> Vec<u8> {
    let remote: Vec<u8> = net::any(request.remote).iter().flat_map(|word| word.to_ne_bytes()).collect();
    let kinds = [VERSION, REQUEST, request.transport as u8, request.reply_transport as u8];
    [&MAGIC[..], &kinds, &request.node_id.to_be_bytes(), &[0; 4], &request.seq.to_be_bytes(), &remote, &[0; 8]].concat()
}

fn ipv4(source: [u8; 4], length: u16) -> Vec<u8> {
    let total = (length + IPV4 as u16).to_be_bytes();
    let mut header = [&[0x45, 0][..], &total, &[0, 0, 0, 0, HOPS, PROTOCOL, 0, 0], &source, &PEER_V4].concat();
    let check = checksum(&[&header]);
    header[10..12].copy_from_slice(&check.to_be_bytes());
    header
}

fn ipv6(source: [u8; 16], length: u16) -> Vec<u8> {
    [&[0x60, 0, 0, 0][..], &length.to_be_bytes(), &[PROTOCOL, HOPS], &source, &PEER_V6].concat()
}

/// Returns the Internet checksum of parts of even length, as a number.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks_exact(2)).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    !csum::fold(words.sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::host::testing::{Net, NetNs, in_netns, soon};
    use crate::host::tunnel::{self, TunnelSpec};
    use etherparse::{SlicedPacket, TransportSlice};

    const ETHERNET: usize = 14;
    const IPV6: usize = 40;

    fn request(egress: &str, seq: u64) -> Request {
        let remote = "192.0.2.9".parse().unwrap();
        Request { remote, node_id: 0x0102_0304, seq, transport: 2, reply_transport: 1, egress: egress.parse().unwrap() }
    }

    #[test]
    fn a_probe_packet_has_the_record_that_the_programs_read_and_right_checksums() {
        for (egress, header) in [("198.51.100.7", IPV4), ("2001:db8::7", IPV6)] {
            let frame = encode(&request(egress, 0x1112_1314_1516_1718));
            assert_eq!(frame[6..12], SRC_MAC);
            assert_eq!(frame.len(), ETHERNET + header + UDP + PAYLOAD);
            // SAFETY: Probe has only bytes, and the frame has enough of them after its headers.
            let probe = unsafe { frame[ETHERNET + header + UDP..].as_ptr().cast::<Probe>().read_unaligned() };
            assert_eq!((&probe.magic, probe.version, probe.kind), (b"SPWY", VERSION, REQUEST));
            assert_eq!((probe.transport, probe.reply_transport, probe.node_id), (2, 1, [1, 2, 3, 4]));
            assert_eq!(probe.seq, [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
            assert_eq!(probe.remote, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 9]);
            let packet = SlicedPacket::from_ethernet(&frame).unwrap();
            let Some(TransportSlice::Udp(udp)) = packet.transport else { panic!("{packet:?}") };
            assert_eq!((udp.source_port(), udp.destination_port()), (PORT, PORT));
            let header = udp.to_header();
            let right = match packet.net.unwrap() {
                etherparse::NetSlice::Ipv4(ip) => {
                    let ip = ip.header().to_header();
                    assert_eq!(ip.header_checksum, ip.calc_header_checksum());
                    header.calc_checksum_ipv4(&ip, udp.payload()).unwrap()
                }
                etherparse::NetSlice::Ipv6(ip) => {
                    header.calc_checksum_ipv6(&ip.header().to_header(), udp.payload()).unwrap()
                }
                other => panic!("{other:?}"),
            };
            assert_eq!(udp.checksum(), right);
        }
    }

    #[test]
    fn a_probe_goes_to_the_egress_of_the_tunnel_device() {
        in_netns("a_probe_goes_to_the_egress_of_the_tunnel_device", async || {
            let tunnel = tunnel::ensure(&Net::here().handle, &TunnelSpec::default()).await.unwrap();
            let tap = PacketSocket::receiving(libc::ETH_P_ALL as u16, tunnel.index, &[]).unwrap();
            ProbeSocket::open(tunnel.index).unwrap().send(&request("198.51.100.7", 42)).unwrap();
            let seen = async {
                loop {
                    let mut buffer = [0; 128];
                    if tap.receive(&mut buffer).await.unwrap() == encode(&request("198.51.100.7", 42)) {
                        break;
                    }
                }
            };
            soon("the probe", seen).await;
        });
    }

    #[test]
    fn a_device_that_is_down_refuses_and_recovers() {
        in_netns("a_device_that_is_down_refuses_and_recovers", async || {
            let (net, other) = (Net::here(), NetNs::create());
            net.veth_into("tunnel", &other, "far").await;
            let probes = ProbeSocket::open(net.index("tunnel").await).unwrap();
            net.down("tunnel").await;
            let refused = probes.send(&request("198.51.100.7", 1)).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ENETDOWN));
            net.up("tunnel").await;
            probes.send(&request("198.51.100.7", 2)).unwrap();
        });
    }
}
