//! The gate: all checks on what a pod's interface lets through at all, whatever policies say.
//!
//! Every frame passes [`frame`]; every packet without a flow in the table passes [`packet`] before any other decision about it. A packet
//! of a flow has passed with the flow's first packet: its addresses and ports are the same, and its interface is compared with the flow's.

use crate::{
    headers::{
        fields::{Ip, Kind, L4Header, proto},
        note,
        packet::Packet,
    },
    tables::{classify, datagram, family::Family},
};
use egress_common::{config::DatapathConfig, verdict::Counter};

/// Checks a pod's frame. Overwrites any note that the sender has set, so that no note on this node comes from a pod.
#[inline(always)]
pub fn frame(pkt: &Packet) -> Result<(), Counter> {
    pkt.note(note::POD);
    // The tag would stay with the packet when it is redirected, and lead it into a VLAN.
    if pkt.is_tagged() { Err(Counter::DropVlanTag) } else { Ok(()) }
}

/// Checks a pod's packet, selected or not, that belongs to no flow. Returns its headers, or the reason to drop it.
#[inline(always)]
pub fn packet<F: Family>(pkt: &Packet, config: &DatapathConfig) -> Result<(Ip<F>, L4Header), Counter> {
    // Any transport header may follow an IP header that cannot be read to its end: seven IPv6
    // extension headers, or a kilobyte of them, may hide the tunnel's port, and have no legitimate
    // use. No legitimate fragment cuts a UDP header short: it is as long as the shortest fragment.
    let ip = F::parse(pkt).map_err(|_| Counter::DropMalformed)?;
    let t = datagram::transport::<F>(pkt, &ip);
    if ip.proto == proto::UDP && t.kind == Kind::Broken {
        return Err(Counter::DropMalformed);
    }
    if is_for_tunnel(config, &t) {
        return Err(Counter::DropTunnelPort);
    }
    let (ip, t) = (ip.hidden(pkt.len()), t.hidden(pkt.len()));
    // SAFETY: read only.
    if unsafe { F::egress_index().get(ip.src) }.is_some() {
        return Err(Counter::DropForged);
    }
    if classify::is_spoofed::<F>(pkt, ip.src) { Err(Counter::DropSpoofed) } else { Ok((ip, t)) }
}

/// Returns whether this is UDP to the port of the nodes' tunnels. The destination does not matter:
/// a node has addresses that are not reported, and masquerading makes a node the packet's sender.
#[inline(always)]
fn is_for_tunnel(config: &DatapathConfig, t: &L4Header) -> bool {
    t.kind == Kind::Udp && u16::from_be(t.dst_port) as u32 == config.tunnel_port
}
