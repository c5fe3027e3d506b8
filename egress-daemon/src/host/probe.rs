//! Sends probes into the tunnel device and receives the replies. I/O only: when to send and what an answer or its
//! absence means is decided by `health`.
//!
//! The program at the device's egress reads the remote address from the frame and sets the tunnel key; the gateway's
//! program turns the request into a reply. Both ways pass over the network that the flows take.

use std::io;
use std::net::IpAddr;
use std::time::Instant;

use egress_common::abi::{INNER_DST_MAC, INNER_SRC_MAC, PROBE_ETHERTYPE};
use egress_common::net;
use egress_common::probe::{MAGIC, Probe, REPLY, REQUEST, VERSION};

use super::packet::PacketSocket;

/// The Ethernet header, in bytes.
const HEADER: usize = 14;
/// The shortest Ethernet frame, in bytes, without its checksum.
const SHORTEST_FRAME: usize = 60;

/// A probe that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeReply {
    /// The number that the request carried.
    pub seq: u64,
    /// The number of the gateway that the request carried.
    pub node_id: u32,
    /// The gateway's tunnel address that the request carried.
    pub remote: IpAddr,
    /// When it was received here.
    pub received: Instant,
}

/// Sends and receives probes on one tunnel device. When the device was made anew (another ifindex), open another one.
#[derive(Debug)]
pub struct ProbeSocket {
    socket: PacketSocket,
    tunnel: u32,
}

impl ProbeSocket {
    /// Opens a socket on the tunnel device with that ifindex. Needs CAP_NET_RAW.
    pub fn open(tunnel: u32) -> io::Result<ProbeSocket> {
        Ok(ProbeSocket { socket: PacketSocket::receiving(PROBE_ETHERTYPE, tunnel, &[])?, tunnel })
    }

    /// Sends a request to the gateway with that tunnel address. An error means that this probe was not sent (the device
    /// is down, its queue full): it counts as one that was not answered.
    pub fn send(&self, remote: IpAddr, node_id: u32, seq: u64) -> io::Result<()> {
        self.socket.send(self.tunnel, &encode(remote, node_id, seq))
    }

    /// Waits for the next reply; frames that are none are passed over. Cancel safe.
    pub async fn receive(&self) -> io::Result<ProbeReply> {
        loop {
            let mut buffer = [0; 128];
            let frame = self.socket.receive(&mut buffer).await?;
            let received = Instant::now();
            if let Some((remote, node_id, seq)) = decode_reply(frame) {
                return Ok(ProbeReply { seq, node_id, remote, received });
            }
        }
    }
}

fn encode(remote: IpAddr, node_id: u32, seq: u64) -> [u8; SHORTEST_FRAME] {
    let mut mapped = [0; 16];
    for (bytes, word) in mapped.chunks_exact_mut(4).zip(net::any(remote)) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    let probe = Probe {
        magic: MAGIC,
        version: VERSION,
        kind: REQUEST,
        reserved: [0; 2],
        node_id: node_id.to_be_bytes(),
        reserved2: [0; 4],
        seq: seq.to_be_bytes(),
        remote: mapped,
    };
    let mut frame = [0; SHORTEST_FRAME];
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    put(&INNER_DST_MAC);
    put(&INNER_SRC_MAC);
    put(&PROBE_ETHERTYPE.to_be_bytes());
    put(&probe.magic);
    put(&[probe.version, probe.kind]);
    put(&probe.reserved);
    put(&probe.node_id);
    put(&probe.reserved2);
    put(&probe.seq);
    put(&probe.remote);
    frame
}

/// (remote address, node id, sequence number) of a frame that is a reply.
fn decode_reply(frame: &[u8]) -> Option<(IpAddr, u32, u64)> {
    let (header, payload) = frame.split_at_checked(HEADER)?;
    let (magic, rest) = payload.split_first_chunk::<4>()?;
    let (&[version, kind, _, _], rest) = rest.split_first_chunk::<4>()?;
    let (node_id, rest) = rest.split_first_chunk::<4>()?;
    let (_, rest) = rest.split_first_chunk::<4>()?;
    let (seq, rest) = rest.split_first_chunk::<8>()?;
    let (remote, _) = rest.split_first_chunk::<16>()?;
    let ours = header[12..] == PROBE_ETHERTYPE.to_be_bytes() && *magic == MAGIC && version == VERSION && kind == REPLY;
    ours.then(|| (IpAddr::from(*remote).to_canonical(), u32::from_be_bytes(*node_id), u64::from_be_bytes(*seq)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::{Net, NetNs, in_netns, soon};
    use crate::host::tunnel::{self, TunnelSpec};
    use proptest::prelude::*;

    /// What the gateway's program does with a request, as far as the payload goes.
    fn answered(mut frame: [u8; SHORTEST_FRAME]) -> [u8; SHORTEST_FRAME] {
        frame[HEADER + 5] = REPLY;
        frame
    }

    #[test]
    fn the_frame_is_the_record_that_the_kernel_reads() {
        let frame = encode("192.0.2.9".parse().unwrap(), 0x0102_0304, 0x1112_1314_1516_1718);
        assert_eq!(frame[..12], [0x02, 0x53, 0x57, 0, 0, 2, 0x02, 0x53, 0x57, 0, 0, 1]);
        assert_eq!(frame[12..14], [0x88, 0xb5]);
        // SAFETY: Probe holds bytes only, and the frame has enough of them behind its header.
        let probe = unsafe { frame[HEADER..].as_ptr().cast::<Probe>().read_unaligned() };
        assert_eq!((&probe.magic, probe.version, probe.kind), (b"SPWY", 1, 1));
        assert_eq!(probe.node_id, [1, 2, 3, 4]);
        assert_eq!(probe.seq, [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
        assert_eq!(probe.remote, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 9]);
        assert_eq!(frame[HEADER + 40..], [0; 6]);
    }

    proptest! {
        #[test]
        fn a_reply_carries_back_what_was_sent(remote: IpAddr, node_id: u32, seq: u64) {
            let frame = encode(remote, node_id, seq);
            prop_assert_eq!(decode_reply(&frame), None, "a request is no reply");
            prop_assert_eq!(decode_reply(&answered(frame)), Some((remote.to_canonical(), node_id, seq)));
        }

        #[test]
        fn damaged_frames_are_no_replies(position in 0usize..6, bit in 0u32..8, length in 0usize..54) {
            let mut frame = answered(encode("2001:db8::1".parse().unwrap(), 1, 2));
            prop_assert_eq!(decode_reply(&frame[..length]), None);
            frame[HEADER + position] ^= 1 << bit;
            prop_assert_eq!(decode_reply(&frame), None);
        }
    }

    #[test]
    fn probes_are_seen_and_replies_come_in() {
        in_netns("probes_are_seen_and_replies_come_in", async || {
            let (net, other) = (Net::here(), NetNs::new());
            net.veth_into("tunnel", &other, "far").await;
            let probes = ProbeSocket::open(net.index("tunnel").await).unwrap();
            let remote: IpAddr = "2001:db8::9".parse().unwrap();
            // The other side answers what it gets, after frames that must be passed over.
            let (opened, wait) = std::sync::mpsc::channel();
            let echo = std::thread::spawn(move || {
                other.run(|| async {
                    let far = Net::here().index("far").await;
                    let socket = PacketSocket::receiving(PROBE_ETHERTYPE, far, &[]).unwrap();
                    opened.send(()).unwrap();
                    let mut buffer = [0; 128];
                    let frame = soon("probe", socket.receive(&mut buffer)).await.unwrap().to_vec();
                    socket.send(far, &frame).unwrap();
                    socket.send(far, &frame[..20]).unwrap();
                    socket.send(far, &answered(frame.as_slice().try_into().unwrap())).unwrap();
                    frame
                })
            });
            wait.recv().unwrap();
            let before = Instant::now();
            probes.send(remote, 7, 42).unwrap();
            let reply = soon("reply", probes.receive()).await.unwrap();
            assert_eq!((reply.seq, reply.node_id, reply.remote), (42, 7, remote));
            assert!(reply.received >= before);
            assert_eq!(echo.join().unwrap(), encode(remote, 7, 42));
        });
    }

    #[test]
    fn a_probe_goes_to_the_egress_of_the_tunnel_device() {
        in_netns("a_probe_goes_to_the_egress_of_the_tunnel_device", async || {
            let tunnel = tunnel::ensure(&Net::here().handle, &TunnelSpec::default()).await.unwrap();
            let tap = PacketSocket::receiving(libc::ETH_P_ALL as u16, tunnel.index, &[]).unwrap();
            let remote: IpAddr = "192.0.2.9".parse().unwrap();
            ProbeSocket::open(tunnel.index).unwrap().send(remote, 7, 42).unwrap();
            let seen = async {
                loop {
                    let mut buffer = [0; 128];
                    if tap.receive(&mut buffer).await.unwrap() == encode(remote, 7, 42) {
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
            let (net, other) = (Net::here(), NetNs::new());
            net.veth_into("tunnel", &other, "far").await;
            let remote: IpAddr = "192.0.2.9".parse().unwrap();
            let probes = ProbeSocket::open(net.index("tunnel").await).unwrap();
            net.down("tunnel").await;
            assert_eq!(probes.send(remote, 1, 1).unwrap_err().raw_os_error(), Some(libc::ENETDOWN));
            net.up("tunnel").await;
            probes.send(remote, 1, 2).unwrap();
            other.run(|| async {
                let far = Net::here().index("far").await;
                let frame = answered(encode(remote, 1, 2));
                PacketSocket::sending().unwrap().send(far, &frame).unwrap();
            });
            assert_eq!(soon("reply", probes.receive()).await.unwrap().seq, 2);
        });
    }
}
