//! Measures the cost of each program for one packet of an established flow, by `BPF_PROG_TEST_RUN` in a running lab:
//! with real tables, the flow that a real packet made, and the attached programs.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use etherparse::PacketBuilder;
use lab::bpf::{Header, NEXT, Program, REDIRECT, Shot};
use lab::traffic::{ServerMode, TcpClients, TcpOptions, TcpServer, UdpClients, UdpOptions, UdpServer};
use lab::{Family, LabNode, wait_until};

use super::variant::{BenchLab, Variant};

const PATIENCE: Duration = Duration::from_secs(10);
/// The number of runs in one sample, and of samples.
const REPEATED: (u32, usize) = (20_000, 15);
/// With `vxlan`, a run that sends leaves the packet with another length and marked as encapsulated, so that each run
/// needs a new packet. The figure includes the cache misses after each system call.
const SINGLE: (u32, usize) = (1, 4_001);
/// The server's port of the flows of this measurement.
const PORT: u16 = 9005;
/// The tunnel's network identifiers, as in ARCHITECTURE.md.
pub const VNI_FORWARD: u32 = 0x53_50_01;
const VNI_REPLY: u32 = 0x53_50_02;
const TUNNEL: &str = "spillway0";
const TUNNEL_PORT: u16 = 8473;
const UNDERLAY: &str = "eth0";
/// The length of the tunnel's headers over IPv4, and the flags of `bpf_skb_adjust_room` (linux/bpf.h) that the programs use for them.
const OVERHEAD: i32 = 50;
const FIXED_GSO: u64 = 1;
const ENCAP_L3_IPV4: u64 = 1 << 1;
const ENCAP_L4_UDP: u64 = 1 << 4;
const NO_CSUM_RESET: u64 = 1 << 5;
const ENCAP_L2_ETH: u64 = 1 << 6;
const ENCAP_L2: u64 = 14 << 56;
const DECAP_L3_IPV6: u64 = 1 << 8;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const HOPS: u8 = 64;

/// The cost of one program.
#[derive(Clone, Debug)]
pub struct Cost {
    /// The program and the protocol, such as `pod_egress, TCP`.
    pub name: String,
    pub family: Family,
    pub cost: lab::bpf::Cost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Tcp,
    Udp,
}

/// The ends of a flow: the pod's address, the address that the server sees, and the server's address.
pub struct Flow {
    pod: SocketAddr,
    pub egress: SocketAddr,
    pub server: SocketAddr,
}

/// Measures all programs on the path of a packet and its reply.
pub fn measure(place: &BenchLab) -> Result<Vec<Cost>> {
    let mut costs = Vec::new();
    for family in Family::BOTH {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            // The flow lives as long as its ends.
            let (flow, _ends) = open(place, family, protocol)?;
            for (program, node, interface, shot) in shots(place, family, protocol, &flow)? {
                let pin = place.lab.pins(&node.name).join(format!("links/{program}-{}", shot.ifindex));
                let header = header(place.variant, program, family);
                let changes = place.variant == Variant::Vxlan && shot.verdict != NEXT;
                let (repeat, samples) = if changes { SINGLE } else { REPEATED };
                let cost = Program::of_link(&pin)
                    .and_then(|program| program.cost(&node.ns, &shot, header, repeat, samples))
                    .with_context(|| format!("{program} at {interface} of {}", node.name))?;
                let way = if node.name == place.pod.node { "source" } else { "gateway" };
                let name = match program {
                    "tunnel_ingress" | "underlay_ingress" => format!("{program} ({way}), {protocol:?}"),
                    "exit_egress" => format!("{program} (the node's own packet), {protocol:?}"),
                    _ => format!("{program}, {protocol:?}"),
                };
                let name = name.replace("Tcp", "TCP").replace("Udp", "UDP");
                costs.push(Cost { name, family, cost });
            }
        }
    }
    costs.sort_by(|a, b| (&a.name, a.family).cmp(&(&b.name, b.family)));
    Ok(costs)
}

/// Returns the operation on the tunnel header that a program requests from the kernel for a packet of this family.
fn header(variant: Variant, program: &str, family: Family) -> Option<Header> {
    let encapsulates = matches!(program, "pod_egress" | "uplink_ingress");
    match variant {
        _ if program == "exit_egress" => None,
        Variant::Device if encapsulates => Some(Header::SetKey),
        Variant::Device => Some(Header::ReadKey),
        Variant::Vxlan if encapsulates => {
            let flags = FIXED_GSO | ENCAP_L3_IPV4 | ENCAP_L4_UDP | ENCAP_L2_ETH | NO_CSUM_RESET | ENCAP_L2;
            Some(Header::Room(OVERHEAD, flags))
        }
        Variant::Vxlan => {
            let inner = if family == Family::V6 { DECAP_L3_IPV6 } else { 0 };
            Some(Header::Room(-OVERHEAD, FIXED_GSO | NO_CSUM_RESET | inner))
        }
        _ => None,
    }
}

/// The sockets at both ends of a flow, which keep it alive.
type Ends = (Option<(TcpServer, TcpClients)>, Option<(UdpServer, UdpClients)>);

/// Opens a flow with packets in both directions.
pub fn open(place: &BenchLab, family: Family, protocol: Protocol) -> Result<(Flow, Ends)> {
    let server = place.server.ips.at(family, PORT);
    match protocol {
        Protocol::Tcp => {
            let listening = TcpServer::start(&place.server.ns, &[server], ServerMode::Echo)?;
            let options = TcpOptions { reset: true, ..TcpOptions::once() };
            let clients = TcpClients::establish(&place.pod.ns, server, 1, options)?;
            let all = clients.wait("an answer", PATIENCE, |all| all.iter().any(|one| one.received > 0))?;
            let pod = all.first().context("a connection")?.local;
            let peers = listening.source_of_flow();
            let egress = *peers.values().next().context("the connection at the server")?;
            Ok((Flow { pod, egress, server }, (Some((listening, clients)), None)))
        }
        Protocol::Udp => {
            let listening = UdpServer::start(&place.server.ns, &[server])?;
            let clients = UdpClients::start(&place.pod.ns, server, 1, UdpOptions::once())?;
            let all = clients.wait("an answer", PATIENCE, |all| all.iter().any(|one| one.received > 0))?;
            let port = all.first().context("a flow")?.local.port();
            let pod = SocketAddr::new(place.pod.ips.ip(family), port);
            let peer = || Ok(listening.flows().values().find_map(|seen| seen.peers.first().copied()));
            let egress = wait_until("the flow at the server", PATIENCE, peer, Option::is_some)?;
            Ok((Flow { pod, egress: egress.context("a peer")?, server }, (None, Some((listening, clients)))))
        }
    }
}

/// Returns program, node, interface and packet of each step of the path.
fn shots<'a>(
    place: &'a BenchLab,
    family: Family,
    protocol: Protocol,
    flow: &Flow,
) -> Result<Vec<(&'static str, &'a LabNode, &'static str, Shot)>> {
    let (worker, gateway) = (place.lab.node(&place.pod.node), place.lab.node("gw1"));
    let shot = |node: &LabNode, interface: &str, (from, to), macs, tunnel| {
        let ifindex = node.ns.ifindex(interface)?;
        let frame = frame(protocol, macs, from, to, &[0x42; 64])?;
        Ok::<_, anyhow::Error>(Shot { frame, ifindex, tunnel, verdict: REDIRECT })
    };
    let (out, back) = ((flow.egress, flow.server), (flow.server, flow.egress));
    let pod = shot(worker, &place.pod.host_interface, (flow.pod, flow.server), [MAC, MAC], None)?;
    let uplink = shot(gateway, "ext0", back, [MAC, gateway.external_mac()], None)?;
    let macs = [worker.underlay_mac(), gateway.underlay_mac()];
    // The cost of the guard for a packet that does not concern it: one of the node itself.
    let own = (worker.underlay.at(family, flow.pod.port()), flow.server);
    let own = Shot { verdict: NEXT, ..shot(worker, UNDERLAY, own, macs, None)? };
    let mut all = vec![
        ("pod_egress", worker, "the pod's interface", pod),
        ("uplink_ingress", gateway, "ext0", uplink),
        ("exit_egress", worker, UNDERLAY, own),
    ];
    let ways = [(worker, gateway, out, VNI_FORWARD, macs), (gateway, worker, back, VNI_REPLY, [macs[1], macs[0]])];
    for (from, to, ends, vni, macs) in ways {
        let one = match place.variant {
            Variant::Device => shot(to, TUNNEL, ends, [MAC, MAC], Some((from.underlay.v4, vni)))?,
            _ => shot(to, UNDERLAY, ends, macs, None)?,
        };
        match place.variant {
            Variant::Device => all.push(("tunnel_ingress", to, TUNNEL, one)),
            Variant::Vxlan => {
                let frame = wrapped(macs, from.underlay.v4, to.underlay.v4, vni, &one.frame)?;
                all.push(("underlay_ingress", to, UNDERLAY, Shot { frame, ..one }));
            }
            _ => all.push(("underlay_ingress", to, UNDERLAY, one)),
        }
    }
    Ok(all)
}

/// Wraps a frame in the headers of the tunnel.
pub fn wrapped(macs: [[u8; 6]; 2], from: Ipv4Addr, to: Ipv4Addr, vni: u32, frame: &[u8]) -> Result<Vec<u8>> {
    let inner = [&[8, 0, 0, 0][..], &(vni << 8).to_be_bytes(), frame].concat();
    let builder = PacketBuilder::ethernet2(macs[0], macs[1]).ipv4(from.octets(), to.octets(), HOPS);
    let mut bytes = Vec::new();
    builder.udp(TUNNEL_PORT, TUNNEL_PORT).write(&mut bytes, &inner)?;
    // The tunnel's outer checksum is zero (RFC 6935): Ethernet and IPv4 headers, then ports and length.
    const CHECKSUM: usize = 14 + 20 + 6;
    bytes[CHECKSUM..CHECKSUM + 2].fill(0);
    Ok(bytes)
}

/// Builds a packet of an established flow. `macs` are its source and destination.
pub fn frame(
    protocol: Protocol,
    macs: [[u8; 6]; 2],
    from: SocketAddr,
    to: SocketAddr,
    payload: &[u8],
) -> Result<Vec<u8>> {
    let builder = PacketBuilder::ethernet2(macs[0], macs[1]);
    let builder = match (from, to) {
        (SocketAddr::V4(a), SocketAddr::V4(b)) => builder.ipv4(a.ip().octets(), b.ip().octets(), HOPS),
        (SocketAddr::V6(a), SocketAddr::V6(b)) => builder.ipv6(a.ip().octets(), b.ip().octets(), HOPS),
        _ => anyhow::bail!("{from} and {to} are of different families"),
    };
    let mut bytes = Vec::new();
    match protocol {
        Protocol::Tcp => builder.tcp(from.port(), to.port(), 1, 1024).ack(1).write(&mut bytes, payload)?,
        Protocol::Udp => builder.udp(from.port(), to.port()).write(&mut bytes, payload)?,
    }
    Ok(bytes)
}
