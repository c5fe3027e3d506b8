//! Packet and segment sizes: what fits a transport arrives whole, and what does not is answered or lowered. The tests choose their transports.

use anyhow::Context;
use lab::capture::TransportLayer;
use lab::traffic::{BulkReport, BulkServer, Direction, Ping, UdpClients, UdpOptions, UdpServer, bulk, ping};
use lab::{Capture, Cni, Family, Lab};

use crate::protocols::{HOSTS, with_pod_and};
use crate::support::{PATIENCE, assert_no_strangers, fixed};
use crate::transport::wait_transport;

/// The MTU of a tunnel over an underlay of 1,500 bytes.
const ROOM: u32 = 1450;

/// docs/failures.md: mtu, without TCP: packets that must not be fragmented are answered with an error.
#[test]
fn mtu_too_large_unfragmentable_packets_are_answered_with_the_right_size() {
    for cni in Cni::BOTH {
        with_pod_and(Lab::builder().cni(cni), &fixed("device"), |lab, pod| {
            let server = lab.server("server1");
            let capture = Capture::start(&server.ns, "eth0")?;
            let at_pod = Capture::start(&pod.ns, "eth0")?;
            for family in Family::BOTH {
                let (target, headers) = (server.ips.ip(family), if family == Family::V4 { 28 } else { 48 });
                let whole =
                    |size: u32| Ping { size: (size - headers) as usize, dont_fragment: true, ..Ping::default() };
                let report = ping(&pod.ns, target, &whole(ROOM))?;
                assert_eq!(report.replies.len(), 1, "{report:?}");
                let report = ping(&pod.ns, target, &whole(ROOM + 1))?;
                assert_eq!((report.mtu, report.replies.len()), (Some(ROOM), 0), "{report:?}");
                // The pod has learnt the MTU, so large datagrams arrive in fragments that fit.
                let udp = UdpServer::start(&server.ns, &[server.ips.at(family, 54)])?;
                let options = UdpOptions { size: 1470, ..UdpOptions::default() };
                let flows = UdpClients::start(&pod.ns, server.ips.at(family, 54), 3, options)?;
                flows.wait("answers", PATIENCE, |all| all.iter().all(|one| one.received > 3))?;
                assert!(udp.flows().values().all(|one| one.corrupted == 0));
            }
            // Packets that may be fragmented arrive.
            let report = ping(&pod.ns, server.ips.ip(Family::V4), &Ping { size: 1472, ..Ping::default() })?;
            assert_eq!(report.replies.len(), 1, "{report:?}");
            assert_eq!(at_pod.finish()?.wrong_checksums().packets(), []);
            let trace = capture.finish()?;
            assert_no_strangers(&trace, server, &HOSTS);
            Ok(())
        });
    }
}

/// docs/failures.md: mtu. A tunnel that a flow does not take does not limit its first packet.
#[test]
fn mtu_a_packet_that_fits_a_transport_without_a_tunnel_is_not_answered() {
    with_pod_and(Lab::builder(), &fixed("direct"), |lab, pod| {
        wait_transport(lab, "direct")?;
        for (family, headers) in Family::BOTH.into_iter().zip([28, 48]) {
            let whole = Ping { size: 1500 - headers, dont_fragment: true, ..Ping::default() };
            let report = ping(&pod.ns, lab.server("server1").ips.ip(family), &whole)?;
            assert_eq!((report.mtu, report.replies.len()), (None, 1), "{report:?}");
        }
        Ok(())
    });
}

/// docs/failures.md: mtu (packets of confirmed flows).
#[test]
fn mtu_too_large_packets_of_established_flows_are_answered_as_well() {
    for transport in ["device", "vxlan"] {
        let options = fixed(transport);
        with_pod_and(Lab::builder(), &options, |lab, pod| {
            for (family, headers) in Family::BOTH.into_iter().zip([28, 48]) {
                let target = lab.server("server1").ips.ip(family);
                let whole = |size: u32| {
                    let ping = Ping { size: size as usize - headers, dont_fragment: true, ..Ping::default() };
                    Ping { identifier: 4711, ..ping }
                };
                let report = ping(&pod.ns, target, &whole(ROOM))?;
                assert_eq!(report.replies.len(), 1, "{transport} {report:?}");
                let report = ping(&pod.ns, target, &whole(ROOM + 1))?;
                assert_eq!((report.mtu, report.replies.len()), (Some(ROOM), 0), "{transport} {report:?}");
            }
            Ok(())
        });
    }
}

/// docs/failures.md: mtu with TCP (clamping), gso: the card divides large segments, or the kernel does it instead.
#[test]
fn bulk_transfers_fit_into_the_tunnel_on_an_underlay_of_1500_bytes() {
    for (transport, offload) in [("device", true), ("device", false), ("vxlan", true), ("vxlan", false)] {
        bulk_transfers(transport, offload, [1410, 1390]);
    }
}

/// Without a tunnel, the segment size is not lowered.
#[test]
fn bulk_transfers_without_a_tunnel_use_the_whole_underlay() {
    bulk_transfers("direct", true, [1460, 1440]);
}

/// Transfers data both ways and checks the segment size. With `offload`, the underlay accepts merged segments unchanged.
fn bulk_transfers(transport: &str, offload: bool, most: [u32; 2]) {
    let options = fixed(transport);
    with_pod_and(Lab::builder(), &options, |lab, pod| {
        const BYTES: u64 = 20_000_000;
        if !offload {
            lab.nodes().try_for_each(|node| node.ns.set_offload("eth0", false))?;
        }
        let server = lab.server("server1");
        wait_transport(lab, transport)?;
        let _bulk = BulkServer::start(&server.ns, &server.ips.both(5001))?;
        let (at_server, at_pod) = (Capture::start(&server.ns, "eth0")?, Capture::start(&pod.ns, "eth0")?);
        for family in Family::BOTH {
            // The tunnel needs room for the outer IP, UDP, VXLAN and inner Ethernet headers.
            let room = most[usize::from(family == Family::V6)];
            for direction in [Direction::Upload, Direction::Download] {
                // A machine that is busy with something else occasionally drops packets.
                let mut reports = Vec::new();
                let few =
                    |report: &BulkReport| u64::from(report.retransmitted) <= BYTES / u64::from(report.segment) / 100;
                while reports.len() < 3 && !reports.iter().any(few) {
                    let report = bulk(&pod.ns, server.ips.at(family, 5001), direction, BYTES)?;
                    assert!(report.segment <= room, "{report:?}");
                    reports.push(report);
                }
                assert!(reports.iter().any(few), "{reports:?}");
            }
        }
        let largest = |trace: &lab::Trace, family: Family| {
            let mss = |packet: &lab::Packet| match packet.ip() {
                Some(ip) if ip.source.is_ipv4() == (family == Family::V4) && !packet.outgoing => match ip.transport {
                    TransportLayer::Tcp { mss, .. } => mss,
                    _ => None,
                },
                _ => None,
            };
            trace.packets().iter().filter_map(mss).max()
        };
        let (at_server, _) = at_server.finish_lossy()?;
        let (at_pod, _) = at_pod.finish_lossy()?;
        for family in Family::BOTH {
            let room = most[usize::from(family == Family::V6)];
            for trace in [&at_server, &at_pod] {
                let largest = largest(trace, family).context("a SYN")?;
                assert_eq!(u32::from(largest), room, "{family:?}");
            }
        }
        Ok(())
    });
}
