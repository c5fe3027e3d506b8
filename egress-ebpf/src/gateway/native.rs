//! A gateway's common case in XDP, before there is a socket buffer: sends translated packets out, and replies back to their node.
//!
//! No decision here differs from those of the TC programs: a frame is sent on only if they would certainly do the same. All other
//! frames go on to them unchanged, including those that they drop.

use crate::{
    gateway::{forward, underlay},
    headers::{
        context::Frame,
        fields::{Ip, Part},
        frame::{TAG_LEN, VLAN_BITS},
        hidden::hidden,
        ip::Header,
        packet::{ETH_LEN, IPV4, IPV6, Mac, Packet, VLAN, moment},
        parse,
    },
    tables::{
        egress,
        family::Family,
        maps::{CONFIG, DEVICES, HERE, NODES, UPLINKS, VLANS},
        stats,
    },
    transports::{
        exit, send,
        vxlan::{self, Outer, Wrapped},
    },
};
use aya_ebpf::bindings::xdp_action::XDP_PASS;
use egress_common::{
    V4, V6,
    abi::{AF_INET, AF_INET6, VNI_FORWARD, VNI_REPLY},
    config::{self, DatapathConfig},
    egress::{EgressIp, NodeEntry, VlanSide, flags},
    transport::{DIRECT, OVERHEAD_V4, OVERHEAD_V6, VXLAN},
    verdict::{Counter, Verdict},
};

/// The reason to leave a frame to the TC programs.
enum Left {
    /// It does not concern an egress IP.
    NotOurs,
    /// It concerns an egress IP; the counter gives the reason.
    For(Counter),
}

/// The origin of a frame.
enum From {
    /// From the node with the frame's source MAC address.
    Link,
    /// Through the tunnel, from the node with this address.
    Tunnel(V6),
    /// From outside, in this VLAN.
    Vlan(u32),
}

/// The next step for a frame.
enum Step {
    /// It has been sent.
    Sent(Verdict),
    /// It goes to the node with this index. The second number distinguishes flows on the path; the third is the length of the IP packet.
    Reply(u32, u32, u32),
}

/// A frame as its interface receives it: a VLAN device, or the interface with the driver.
struct Arrived {
    frame: Packet<Frame>,
    /// Its EtherType.
    protocol: u16,
    /// The tag that it had at the VLAN device's card; 0: none.
    tag: u32,
}

/// How a frame is sent.
struct Outgoing {
    verdict: Verdict,
    /// The tag that it gets; 0: none.
    tag: u32,
}

/// Handles a frame at the driver of the underlay's interface, from another node or from outside: one interface often serves both.
#[inline(always)]
pub fn from_nodes(pkt: &Packet<Frame>) -> Verdict {
    let Some(config) = carrying() else { return Verdict::Pass };
    let Some(Arrived { frame: pkt, protocol, tag }) = arrived(pkt, config) else { return Verdict::Pass };
    let unwrapped = match protocol {
        IPV4 => unwrap::<V4>(&pkt, config),
        IPV6 => unwrap::<V6>(&pkt, config),
        VLAN => untag(&pkt).map(|vlan| (From::Vlan(vlan), TAG_LEN)),
        _ => None,
    };
    let Some((from, taken)) = unwrapped else { return leave(&pkt, 0, tag) };
    let step = match pkt.protocol() {
        IPV4 => either_way::<V4>(&pkt, config, &from),
        _ => either_way::<V6>(&pkt, config, &from),
    };
    done(&pkt, config, step, taken, tag)
}

/// Handles a frame at the driver of an uplink.
#[inline(always)]
pub fn from_outside(pkt: &Packet<Frame>) -> Verdict {
    let Some(config) = carrying() else { return Verdict::Pass };
    let Some(Arrived { frame: pkt, protocol, tag }) = arrived(pkt, config) else { return Verdict::Pass };
    let (protocol, vlan, taken) = match protocol {
        VLAN => match untag(&pkt) {
            Some(vlan) => (pkt.protocol(), vlan, TAG_LEN),
            None => return Verdict::Pass,
        },
        protocol => (protocol, 0, 0),
    };
    let step = match protocol {
        IPV4 => inward::<V4>(&pkt, config, vlan),
        IPV6 => inward::<V6>(&pkt, config, vlan),
        _ => Err(Left::NotOurs),
    };
    done(&pkt, config, step, taken, tag)
}

/// Returns the settings if this node carries egress IPs.
#[inline(always)]
fn carrying() -> Option<&'static DatapathConfig> {
    CONFIG.get(0).filter(|config| config.flags & config::flags::CARRIES != 0)
}

/// Moves a frame to the VLAN device that it is for, if there is one. Returns `None` for a frame
/// that carries no IP packet there, such as one with two tags.
#[inline(always)]
fn arrived(pkt: &Packet<Frame>, config: &DatapathConfig) -> Option<Arrived> {
    match pkt.protocol() {
        VLAN if config.flags & config::flags::VLANS != 0 => {
            let (tag, protocol) = pkt.tag()?;
            let at_card = VlanSide { ifindex: pkt.ifindex(), vlan: tag & VLAN_BITS };
            // SAFETY: entries are replaced, not changed in place.
            match unsafe { VLANS.get(at_card) } {
                None => Some(Arrived { frame: *pkt, protocol: VLAN, tag: hidden(0, pkt.len()) }),
                Some(device) if matches!(protocol, IPV4 | IPV6) => {
                    Some(Arrived { frame: pkt.enter(device.ifindex)?, protocol, tag })
                }
                Some(_) => None,
            }
        }
        protocol => Some(Arrived { frame: *pkt, protocol, tag: hidden(0, pkt.len()) }),
    }
}

/// Carries out the step, and counts it. `taken`: the number of bytes removed in front. `tag`: the tag of [`Arrived`].
#[inline(always)]
fn done(pkt: &Packet<Frame>, config: &DatapathConfig, step: Result<Step, Left>, taken: i32, tag: u32) -> Verdict {
    let verdict = match step {
        Ok(Step::Sent(verdict)) => Ok(verdict),
        Ok(Step::Reply(node, entropy, length)) => reply(pkt, config, node, entropy, length),
        Err(left) => Err(left),
    };
    match verdict {
        Ok(verdict) => {
            stats::count(Counter::XdpSent);
            verdict
        }
        Err(left) => {
            if let Left::For(counter) = left {
                stats::count(counter);
            }
            leave(pkt, taken, tag)
        }
    }
}

/// Leaves a frame to the TC programs as it arrived: the removed bytes are still there in front, and the tag of a VLAN device is put back.
#[inline(always)]
fn leave(pkt: &Packet<Frame>, taken: i32, tag: u32) -> Verdict {
    let front = if tag != 0 { taken + TAG_LEN } else { taken };
    if front != 0 && !pkt.adjust_head(-front) || tag != 0 && pkt.put_back(tag).is_none() {
        return Verdict::Drop(Counter::DropRedirect);
    }
    Verdict::Pass
}

/// Removes the outer headers of a translated packet. Returns the packet's origin and the number of
/// bytes removed. Returns `None` for a tunnelled packet that is left to another program.
#[inline(always)]
fn unwrap<F: Family>(pkt: &Packet<Frame>, config: &DatapathConfig) -> Option<(From, i32)> {
    if !F::may_be_tunnelled(pkt, config) {
        return Some((From::Link, 0));
    }
    let overhead = vxlan::overhead::<F>() as i32;
    match vxlan::wrapped::<F, _>(pkt, config) {
        Wrapped::Not => Some((From::Link, 0)),
        Wrapped::Usual(VNI_FORWARD, source, _) if is_for_us(pkt) && pkt.adjust_head(overhead) => {
            Some((From::Tunnel(source), overhead))
        }
        _ => None,
    }
}

/// Removes the VLAN tag of a frame from outside for this node, and returns the VLAN. Only the frame's beginning
/// moves: its MAC addresses do not move with it. Returns `None` for other frames, such as those with a priority tag.
#[inline(always)]
fn untag(pkt: &Packet<Frame>) -> Option<u32> {
    let (tag, protocol) = pkt.tag()?;
    let vlan = tag & VLAN_BITS;
    let usual = vlan != 0 && matches!(protocol, IPV4 | IPV6) && is_for_us(pkt);
    (usual && pkt.adjust_head(TAG_LEN)).then_some(vlan)
}

/// Returns whether a frame is addressed to the interface on which it arrived.
#[inline(always)]
fn is_for_us(pkt: &Packet<Frame>) -> bool {
    let (Some(here), Some(mac)) = (HERE.get_ptr_mut(0), pkt.read::<Mac>(0)) else { return false };
    // SAFETY: the element is this CPU's own, and programs that receive do not interrupt each other on one CPU.
    let here = unsafe { &mut *here };
    let (ifindex, now) = (pkt.ifindex(), moment());
    if here.ifindex != ifindex || here.moment != now {
        // SAFETY: entries are replaced, not changed in place.
        let Some(uplink) = (unsafe { UPLINKS.get(ifindex) }) else { return false };
        here.mac = uplink.mac;
        here.ifindex = ifindex;
        here.moment = now;
    }
    same(&mac, &here.mac)
}

#[inline(always)]
fn same(a: &Mac, b: &Mac) -> bool {
    (a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) == 0
}

/// Handles a packet that another node has translated, or a packet from outside.
#[inline(always)]
fn either_way<F: Family>(pkt: &Packet<Frame>, config: &DatapathConfig, from: &From) -> Result<Step, Left> {
    let Ok(ip) = F::parse(pkt) else { return Err(Left::NotOurs) };
    match (egress::find(ip.src), from) {
        (None, From::Vlan(vlan)) => inward::<F>(pkt, config, *vlan),
        (_, From::Vlan(_)) => Err(Left::For(Counter::XdpUnusual)),
        (Some((egress, e)), _) if e.flags & flags::CARRIED != 0 => outward(pkt, config, &ip, (egress, e), from),
        (_, From::Link) => inward::<F>(pkt, config, 0),
        (_, From::Tunnel(_)) => Err(Left::NotOurs),
    }
}

/// Sends out a packet of an egress IP that another node has translated, if the port is leased to that node.
#[inline(always)]
fn outward<F: Family>(
    pkt: &Packet<Frame>,
    config: &DatapathConfig,
    ip: &Ip<F>,
    (egress, e): (u32, &EgressIp),
    from: &From,
) -> Result<Step, Left> {
    let length = usual(pkt, ip)?;
    let t = parse::transport_header::<F, _>(pkt, ip.l4, ip.proto);
    let Ok(port) = forward::own_port::<F, _>(pkt, ip, &t) else { return Err(Left::For(Counter::XdpUnusual)) };
    let lessee = forward::lessee(pkt, egress, port);
    let Some(node) = NODES.get(lessee) else { return Err(Left::For(Counter::XdpRefused)) };
    let theirs = match from {
        From::Link => {
            // One card receives frames of several links.
            let on_its_link = config.flags & config::flags::VLANS == 0 || pkt.ifindex() == node.ifindex;
            let is_for_us = pkt.read::<Mac>(0).is_some_and(|mac| same(&mac, &node.macs[1]));
            on_its_link && is_for_us && underlay::sends(pkt, node)
        }
        From::Tunnel(source) => is_address(node, source),
        From::Vlan(_) => false,
    };
    if lessee == 0 || lessee == config.node || !theirs {
        return Err(Left::For(Counter::XdpRefused));
    }
    if e.queue != 0 {
        return Err(Left::For(Counter::XdpShaped));
    }
    let verdict = if e.flags & flags::SUBNET != 0 {
        into_subnet(pkt, config, egress, e, length)?
    } else {
        let Some(out) = exit::way_out(pkt, e, &ip.src, &ip.dst) else { return Err(Left::For(Counter::XdpHop)) };
        addressed(pkt, redirect(pkt, config, out.ifindex, out.mtu, length)?, out.macs)?
    };
    stats::count(Counter::Forwarded);
    Ok(Step::Sent(verdict))
}

/// Sends a packet of this length to the next hop of its egress IP's own subnet, in the subnet's
/// VLAN. The kernel has no entry for this neighbour, so there is none to confirm.
#[inline(always)]
fn into_subnet(
    pkt: &Packet<Frame>,
    config: &DatapathConfig,
    egress: u32,
    e: &EgressIp,
    length: u32,
) -> Result<Verdict, Left> {
    let Ok(macs) = exit::in_subnet(egress, e) else { return Err(Left::For(Counter::XdpHop)) };
    let Outgoing { verdict, tag } = redirect(pkt, config, e.ifindex, pkt.mtu_of(e.ifindex), length)?;
    if e.vlan != 0 && tag != 0 {
        return Err(Left::For(Counter::XdpVlan));
    }
    addressed(pkt, Outgoing { verdict, tag: tag | e.vlan }, &macs)
}

#[inline(always)]
fn is_address(node: &NodeEntry, address: &V6) -> bool {
    address.is(&node.addr)
}

/// Sends a packet from outside for an egress IP to the node that its port is leased to. `vlan`: the
/// VLAN whose tag has been removed; 0: the packet had no tag.
#[inline(always)]
fn inward<F: Family>(pkt: &Packet<Frame>, config: &DatapathConfig, vlan: u32) -> Result<Step, Left> {
    let Ok(ip) = F::parse(pkt) else { return Err(Left::NotOurs) };
    let Some((egress, e)) = egress::find(ip.dst) else { return Err(Left::NotOurs) };
    if e.flags & flags::CARRIED == 0 {
        return Err(Left::NotOurs);
    }
    if e.is_own_address() {
        return Err(Left::For(Counter::XdpOwn));
    }
    if e.vlan != vlan {
        return Err(Left::For(Counter::XdpVlan));
    }
    let length = usual(pkt, &ip)?;
    let t = parse::transport_header::<F, _>(pkt, ip.l4, ip.proto);
    let node = forward::lessee_of_reply::<F, _>(pkt, &ip, &t, egress);
    // The address of a tagged frame was checked before the frame's beginning moved.
    if node == 0 || vlan == 0 && !is_for_us(pkt) {
        return Err(Left::For(Counter::XdpRefused));
    }
    if node == config.node {
        return Err(Left::For(Counter::XdpOwn));
    }
    if e.queue != 0 {
        return Err(Left::For(Counter::XdpShaped));
    }
    // As many bits as a verdict has room for, so that a flow's packets have one outer port, whichever program sends them.
    Ok(Step::Reply(node, send::entropy((t.src_port, t.dst_port), ip.src) >> 16, length))
}

/// Returns the length of a packet that has only its plain header, is not a fragment, and lies entirely in the frame.
#[inline(always)]
fn usual<F: Family>(pkt: &Packet<Frame>, ip: &Ip<F>) -> Result<u32, Left> {
    match F::total_len(pkt) {
        Some(length) if ip.part == Part::Whole && ip.l4 == ETH_LEN + F::HEADER && length + ETH_LEN <= pkt.len() => {
            Ok(length)
        }
        _ => Err(Left::For(Counter::XdpUnusual)),
    }
}

/// Prepares the redirection of an IP packet of this length to an interface that takes at most `mtu` bytes. Leaves the frame unchanged.
#[inline(always)]
fn redirect(
    pkt: &Packet<Frame>,
    config: &DatapathConfig,
    ifindex: u32,
    mtu: u32,
    length: u32,
) -> Result<Outgoing, Left> {
    if length > mtu {
        return Err(Left::For(Counter::XdpLarge));
    }
    let VlanSide { ifindex, vlan: tag } = at_card(pkt, config, ifindex);
    match DEVICES.redirect(ifindex, XDP_PASS as u64) {
        Ok(action) => Ok(Outgoing { verdict: Verdict::Taken(action as i32), tag }),
        Err(_) => Err(Left::For(Counter::XdpDevice)),
    }
}

/// Returns where frames to an interface are sent: for a VLAN device, the card, with a tag.
#[inline(always)]
fn at_card(pkt: &Packet<Frame>, config: &DatapathConfig, ifindex: u32) -> VlanSide {
    let interface = VlanSide { ifindex, vlan: hidden(0, pkt.len()) };
    if config.flags & config::flags::VLANS == 0 {
        return interface;
    }
    // SAFETY: entries are replaced, not changed in place.
    unsafe { VLANS.get(interface) }.copied().unwrap_or(interface)
}

/// Writes the tag and the MAC addresses of an outgoing frame.
#[inline(always)]
fn addressed(pkt: &Packet<Frame>, out: Outgoing, macs: &[u32; 3]) -> Result<Verdict, Left> {
    if out.tag != 0 && !pkt.adjust_head(-TAG_LEN) {
        return Err(Left::For(Counter::XdpUnusual));
    }
    let tagged = if out.tag != 0 { pkt.write_tag(out.tag) } else { Some(()) };
    match tagged.and(pkt.write_words(0, macs)) {
        Some(()) => Ok(out.verdict),
        None => Ok(Verdict::Drop(Counter::DropRedirect)),
    }
}

/// Sends a reply to its pod's node.
#[inline(always)]
fn reply(pkt: &Packet<Frame>, config: &DatapathConfig, index: u32, entropy: u32, length: u32) -> Result<Verdict, Left> {
    let Some(node) = NODES.get(index) else { return Err(Left::For(Counter::XdpRefused)) };
    if node.present == 0 {
        return Err(Left::For(Counter::XdpRefused));
    }
    let verdict = match send::reply_transport(index, node) {
        DIRECT => {
            let verdict = addressed(pkt, redirect(pkt, config, node.ifindex, node.mtu, length)?, &send::macs(node))?;
            stats::count(Counter::SentDirect);
            verdict
        }
        VXLAN => wrap(pkt, config, node, entropy, length)?,
        _ => return Err(Left::For(Counter::XdpDevice)),
    };
    stats::count(Counter::Replied);
    Ok(verdict)
}

/// Encapsulates a frame and sends it.
#[inline(always)]
fn wrap(
    pkt: &Packet<Frame>,
    config: &DatapathConfig,
    node: &NodeEntry,
    entropy: u32,
    length: u32,
) -> Result<Verdict, Left> {
    let ipv4 = node.tunnel_v4 != 0;
    let overhead = if ipv4 { OVERHEAD_V4 } else { OVERHEAD_V6 };
    let out = match (ipv4, node.hop_family) {
        (true, AF_INET) => exit::on_link::<V4>(pkt, node.ifindex, &[node.source[3]], &[node.hop[0]]),
        (false, AF_INET6) => exit::on_link::<V6>(pkt, node.ifindex, &node.source, &node.hop),
        _ => None,
    };
    let Some(out) = out else { return Err(Left::For(Counter::XdpHop)) };
    let outgoing = redirect(pkt, config, out.ifindex, node.mtu, length + overhead)?;
    let protocol = pkt.protocol();
    let (len, ecn) = (pkt.len(), vxlan::outer_ecn(pkt, protocol));
    if !pkt.adjust_head(-(overhead as i32)) {
        return Err(Left::For(Counter::XdpUnusual));
    }
    let outer = Outer { config, node, vni: VNI_REPLY, entropy, len, ecn, protocol };
    let family = if ipv4 { IPV4 } else { IPV6 };
    if outer.write(pkt, ipv4).and(pkt.write(ETH_LEN - 2, family)).is_none() {
        return Ok(Verdict::Drop(Counter::DropRedirect));
    }
    // The frame has changed: it can no longer be left to the TC programs.
    Ok(addressed(pkt, outgoing, out.macs).unwrap_or(Verdict::Drop(Counter::DropRedirect)))
}
