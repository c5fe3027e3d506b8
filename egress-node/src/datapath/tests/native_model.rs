//! Checks the programs for drivers against a reference gateway that is written for clarity, with random tables and random packets, good and
//! forged. The driver sends exactly what the reference forwards, with the bytes that the program at TC sends.

use super::{
    Random,
    frames::{TCP, UDP, fragment, ip, seal, tagged, tcp, udp, wrapped},
    native::{BOTH_WAYS, FROM_OUTSIDE, PASS, SENT, allow, from_node, gateway},
    native_devices::{CARD, OUT, UNDER, untagged, write},
    native_vlan::{PRIORITY, VLAN, assert_as_at_tc, know_next_hops, put_into_subnets},
    reused::Reused,
    rig::*,
    scenes,
    wire::Wire,
};
use crate::host::testing::in_netns;
use egress_common::{abi::VNI_FORWARD, port_block, transport};
use egress_core::{
    encode::NodeView,
    model::{Bandwidth, NodeName},
};
use std::net::IpAddr;

/// Tables change after about this many packets.
const CHANGE: usize = 40;
const PACKETS: usize = 60_000;

/// A gateway's tables, as far as they concern its packets.
#[derive(Clone, Debug)]
struct Tables {
    underlay: [&'static str; 2],
    /// The node that holds [`OTHER_BLOCK`].
    lessee: Option<usize>,
    carried: bool,
    shaped: bool,
    /// The subnet of each egress IP, if it has one: its VLAN (0 for none), and whether its next hop is known.
    subnet: Option<(u16, bool)>,
    /// The other node's reply transport.
    replies: u32,
    /// Whether the drivers of both interfaces may send.
    drivers: bool,
    /// Whether both interfaces are VLAN devices of one card.
    devices: bool,
}

#[derive(Clone, Debug)]
struct Packet {
    /// Whether it goes from the other node to the outside, not from the outside to an egress IP.
    outward: bool,
    tunnelled: bool,
    stranger: bool,
    egress: usize,
    /// Whether it has an address that no table knows.
    unknown: bool,
    block: u16,
    tcp: bool,
    fragment: bool,
    options: bool,
    /// The VLAN tag.
    tag: Option<u16>,
}

const EGRESS: [&str; 2] = [EGRESS4, EGRESS6];
const UNKNOWN: [&str; 2] = ["192.0.2.99", "2001:db8::99"];
const SERVER: [&str; 2] = [SERVER4, SERVER6];
/// Tags that a packet may have, besides the correct one.
const TAGS: [Option<u16>; 5] = [None, Some(VLAN), Some(PRIORITY | VLAN), Some(VLAN + 1), Some(PRIORITY)];
const STRANGERS: [&str; 2] = ["10.0.0.9", "fd88::9"];

impl Tables {
    fn random(random: &mut Random) -> Self {
        Self {
            underlay: random.of(&UNDERLAYS),
            lessee: random.of(&[Some(1), Some(1), Some(1), Some(0), None]),
            carried: random.below(6) != 0,
            shaped: random.below(6) == 0,
            subnet: random.of(&[None, Some((0, true)), Some((VLAN, true)), Some((VLAN, true)), Some((VLAN, false))]),
            replies: random.of(&[transport::DIRECT, transport::VXLAN, transport::DEVICE]),
            drivers: random.below(8) != 0,
            devices: random.below(3) == 0,
        }
    }

    fn view(&self, uplink: u32, underlay: u32) -> NodeView {
        // The tables always accept the device transport, which the driver does not know.
        let may = if self.replies == transport::DEVICE { transport::DIRECT } else { self.replies };
        let mut view = gateway(self.underlay, uplink, underlay, may);
        for egress in view.egress_ips.values_mut() {
            egress.leases.remove(&OTHER_BLOCK);
            let lessee: Option<NodeName> = self.lessee.map(scenes::node);
            egress.leases.extend(lessee.map(|node| (OTHER_BLOCK, node)));
            egress.forwards = self.carried;
            egress.limit = self.shaped.then_some(Bandwidth { rate_bps: 1_000_000_000, burst_bytes: 100_000 });
        }
        if self.subnet.is_some() {
            put_into_subnets(&mut view, self.tag());
        }
        view
    }

    /// Returns whether the driver of a gateway with these tables forwards the packet.
    fn forwards(&self, packet: &Packet) -> bool {
        let usual = !packet.fragment && !packet.options && self.drivers && self.carried && !self.shaped;
        // Both directions depend on the node that holds the port.
        let leased = packet.block == OTHER_BLOCK && self.lessee == Some(1) && !packet.unknown;
        let way = if packet.outward { self.goes_out(packet) } else { self.goes_back(packet) };
        // A VLAN device adds a tag.
        let two_tags = self.devices && (packet.tag.is_some() || self.tag().is_some());
        usual && leased && way && !two_tags
    }

    /// Returns the tag of packets from outside; none if the egress IP is in no VLAN.
    fn tag(&self) -> Option<u16> {
        self.subnet.map(|(vlan, _)| vlan).filter(|vlan| *vlan != 0)
    }

    fn goes_out(&self, packet: &Packet) -> bool {
        let known = self.subnet.is_none_or(|(_, known)| known);
        !packet.stranger && packet.tag.is_none() && known
    }

    /// A tag with only a priority belongs to no VLAN.
    fn goes_back(&self, packet: &Packet) -> bool {
        packet.tag.map(|tag| tag & 0xfff) == self.tag() && self.replies != transport::DEVICE
    }
}

impl Packet {
    /// Returns a random packet. `right` is the tag of packets from outside.
    fn random(random: &mut Random, right: Option<u16>) -> Self {
        let outward = random.below(2) == 0;
        let mut rarely = || random.below(10) == 0;
        let (unknown, stranger, fragment, options) = (rarely(), rarely(), rarely(), rarely());
        Self {
            outward,
            tunnelled: outward && random.below(2) == 0,
            stranger,
            egress: random.below(2),
            unknown,
            block: random.of(&[OTHER_BLOCK, OTHER_BLOCK, OTHER_BLOCK, OTHER_BLOCK + 1, OWN_BLOCKS[0]]),
            tcp: random.below(2) == 0,
            fragment,
            // Only for IPv4.
            options,
            tag: match random.below(if outward { 10 } else { 2 }) {
                0 => random.of(&TAGS),
                _ if outward => None,
                _ => right,
            },
        }
    }

    fn frame(&self, underlay: [&str; 2], offset: u16) -> Vec<u8> {
        let addresses = if self.unknown { UNKNOWN } else { EGRESS };
        let (egress, server): (IpAddr, IpAddr) = (addr(addresses[self.egress]), addr(SERVER[self.egress]));
        let port = port_block::first_port(self.block) + offset;
        let (src, dst, sport, dport) =
            if self.outward { (egress, server, port, 443) } else { (server, egress, 443, port) };
        let body = if self.tcp { tcp(sport, dport, 16, &[]) } else { udp(sport, dport, b"datagram") };
        let options: &[u8] = if self.has_options() { &[1, 1, 1, 0] } else { &[] };
        let mut frame = seal(ip(src, dst, if self.tcp { TCP } else { UDP }, options, &body));
        if self.is_fragment() {
            frame = fragment(frame, [0x20, 0]);
        }
        let frame = match (self.outward, self.tunnelled) {
            (false, _) => frame,
            (true, false) => {
                let mut frame = from_node(frame);
                if self.stranger {
                    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 0x99]);
                }
                frame
            }
            (true, true) => {
                let family = usize::from(addr(underlay[0]).is_ipv6());
                wrapped(if self.stranger { STRANGERS[family] } else { underlay[1] }, underlay[0], VNI_FORWARD, &frame)
            }
        };
        match self.tag {
            Some(tag) => tagged(frame, tag),
            None => frame,
        }
    }

    /// Returns the VLANs of the devices by which it arrives and leaves.
    fn devices(&self) -> (u16, u16) {
        if self.outward { (UNDER, OUT) } else { (OUT, UNDER) }
    }

    fn has_options(&self) -> bool {
        self.options && self.egress == 0
    }

    fn is_fragment(&self) -> bool {
        self.fragment && self.egress == 0
    }

    /// Returns the packet as sent: only IPv4 has options and fragments here.
    fn as_sent(&self) -> Self {
        Self { options: self.has_options(), fragment: self.is_fragment(), ..self.clone() }
    }

    fn programs(&self) -> (&'static str, &'static str) {
        if self.outward { (BOTH_WAYS, "underlay_ingress") } else { (FROM_OUTSIDE, "uplink_ingress") }
    }
}

#[test]
fn the_driver_program_agrees_with_a_reference_gateway_and_with_tc_on_random_tables_and_packets() {
    let Some(mut rig) = Reused::new("native-model", &NodeView::default()) else { return };
    in_netns("native-model", || async move {
        let wire = Wire::new(&rig).await;
        let (uplink, underlay) = (wire.uplink, wire.underlay);
        let mut random = Random(19);
        let mut tables = Tables::random(&mut random);
        let (mut counts, mut in_vlan, mut by_devices) = ([0_usize; 2], 0, 0);
        for step in 0..PACKETS {
            if step % CHANGE == 0 || random.below(CHANGE) == 0 {
                tables = Tables::random(&mut random);
                let view = tables.view(uplink, underlay);
                match tables.devices {
                    true => write(&mut rig, &view, &[(OUT, uplink), (UNDER, underlay)]),
                    false => rig.write(&view),
                }
                rig.reply_by(tables.replies);
                know_next_hops(&rig, tables.subnet.is_some_and(|(_, known)| known));
                let drivers = if tables.devices { vec![CARD] } else { vec![uplink, underlay] };
                allow(&rig, if tables.drivers { &drivers } else { &[] });
            }
            let packet = Packet::random(&mut random, tables.tag()).as_sent();
            let at_interface = packet.frame(tables.underlay, random.below(64) as u16);
            let (arrives, leaves) = packet.devices();
            let frame = if tables.devices { tagged(at_interface.clone(), arrives) } else { at_interface.clone() };
            let (native, tc) = packet.programs();
            let mut tries = 0;
            let (action, mine) = loop {
                let (action, mine) = rig.run_native(native, &frame);
                tries += 1;
                // The kernel resolves the next hop of the first packet of a moment.
                if action == SENT || !tables.forwards(&packet) || tries == 4 {
                    break (action, mine);
                }
            };
            let wanted = tables.forwards(&packet);
            assert_eq!(action == SENT, wanted, "step {step}: {packet:?} with {tables:?}");
            counts[usize::from(wanted)] += 1;
            if !wanted {
                assert_eq!((action, &mine), (PASS, &frame), "step {step}: {packet:?} with {tables:?}");
                continue;
            }
            let by_vxlan = !packet.outward && tables.replies == transport::VXLAN;
            let what = format!("step {step}: {packet:?} with {tables:?}");
            let (tag, untagged) = if tables.devices { untagged(&mine) } else { (leaves, mine) };
            assert_eq!(tag, leaves, "{what}");
            assert_as_at_tc(&rig, &wire, tc, &at_interface, untagged, by_vxlan, &what);
            in_vlan += usize::from(tables.tag().is_some());
            by_devices += usize::from(tables.devices);
        }
        assert!(counts.iter().all(|count| *count > PACKETS / 15), "{counts:?}");
        assert!(in_vlan > PACKETS / 30 && by_devices > PACKETS / 100, "{in_vlan} {by_devices}");
    });
}
