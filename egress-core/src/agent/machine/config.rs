//! The parts of the programs' configuration record that do not come from the settings.

use super::Machine;
use crate::network::links::LinkKind;
use egress_common::{
    config::{DatapathConfig, flags},
    net,
};
use std::net::IpAddr;

/// Bytes by which the tunnel enlarges a packet: inner Ethernet (14), VXLAN (8), UDP (8) and outer IPv4 (20) or IPv6 (40). Outer Ethernet is
/// not counted.
const OVERHEAD: [u32; 2] = [50, 70];
/// IP and TCP headers without options, for IPv4 and IPv6.
const HEADERS: [u32; 2] = [40, 60];
/// The smallest segment size that is ever requested (RFC 9293, section 3.7.1).
const MIN_MSS: u32 = 536;

impl Machine {
    /// Returns the record. With `hold`, packets that no program has seen are held; if `limited`, the shaper is used.
    pub(super) fn config(&self, hold: bool, limited: bool) -> DatapathConfig {
        let own = self.tunnel_addresses();
        let room = self.room(&own);
        let mss = |family: usize| room.saturating_sub(HEADERS[family]).max(MIN_MSS);
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        let v4 = own.iter().find_map(|a| if let IpAddr::V4(a) = a { Some(net::v4(*a)) } else { None });
        let v6 = own.iter().find_map(|a| if let IpAddr::V6(a) = a { Some(net::v6(*a)) } else { None });
        DatapathConfig {
            tunnel_ifindex: self.facts.tunnel,
            mss_v4: mss(0),
            mss_v6: mss(1),
            flags: self.settings.config.flags
                | flag(self.facts.bypass, flags::UNSEEN_INBOUND)
                | flag(hold, flags::HOLD)
                | flag(self.uses_vlan_devices(), flags::VLANS),
            room,
            own_v4: v4.unwrap_or([0]),
            own_v6: v6.unwrap_or([0; 4]),
            shaper_ifindex: self.shaper.filter(|_| limited).map_or(0, |ends| ends.near),
            ..self.settings.config
        }
    }

    /// Returns whether packets of egress IPs arrive or leave by a VLAN device.
    fn uses_vlan_devices(&self) -> bool {
        let mut links = self.facts.roles.gateway_interfaces().filter_map(|i| self.facts.links.links.get(&i));
        links.any(|link| matches!(link.kind, LinkKind::Vlan(_)))
    }

    /// Returns the largest packet that fits the tunnel.
    fn room(&self, own: &[IpAddr]) -> u32 {
        let underlays = self.facts.roles.underlays.keys().filter_map(|i| self.facts.links.links.get(i));
        let mtu = underlays.map(|l| l.mtu).min().unwrap_or(u32::MAX).min(self.settings.tunnel_mtu);
        let ipv6_underlay = own.first().is_some_and(IpAddr::is_ipv6);
        mtu.saturating_sub(OVERHEAD[ipv6_underlay as usize])
    }

    /// Returns the addresses of this node's tunnel: its addresses in Kubernetes, IPv4 first, or those of the underlay.
    pub fn tunnel_addresses(&self) -> Vec<IpAddr> {
        let node = self.facts.objects.snapshot.nodes.get(&self.facts.node);
        let mut addresses: Vec<IpAddr> = node.into_iter().flat_map(|n| n.addresses.iter().copied()).collect();
        addresses.retain(|a| self.facts.links.by_address(*a).is_some());
        if addresses.is_empty() {
            addresses = self.facts.roles.underlays.values().flatten().copied().collect();
        }
        addresses.sort_by_key(|a| (a.is_ipv6(), *a));
        addresses
    }
}
