//! Tests which transports a node may use to another one, and why not others.

use super::*;
use crate::{
    network::{MacAddress, links::Link},
    testing::link,
};

const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn links() -> LinkTable {
    let eth0 = Link { mac: Some(MacAddress(OWN)), mtu: 1500, up: true, ..link(2, "eth0") };
    let wg0 = Link { kind: LinkKind::Tunnel("wireguard".into()), mac: None, up: true, ..link(3, "wg0") };
    let down = Link { up: false, ..Link { index: 4, name: "eth1".into(), ..eth0.clone() } };
    LinkTable { links: [(2, eth0), (3, wg0), (4, down)].into(), ..LinkTable::default() }
}

fn peer() -> Peer {
    Peer { address: "10.0.0.2".parse().unwrap(), mac: Some(THEIRS), direct: true }
}

fn route(oif: u32, gateway: Option<&str>) -> Route {
    Route { oif, gateway: gateway.map(|text| text.parse().unwrap()), mtu: None, encapsulated: false }
}

fn found(setting: Transport, peer: &Peer, route: Route) -> Transports {
    super::to(setting, peer, &Ok(route), &links(), &["fd00::1".parse().unwrap(), "10.0.0.1".parse().unwrap()])
}

#[test]
fn on_a_common_link_every_transport_is_possible() {
    let transports = found(Transport::Auto, &peer(), route(2, None));
    assert_eq!(transports.allowed, [DEVICE, VXLAN, DIRECT].into());
    let path = transports.path.as_ref().unwrap();
    assert_eq!((path.hop, path.macs), (peer().address, Some([THEIRS, OWN])));
    assert_eq!((path.mtu, path.source), (1500, "10.0.0.1".parse().unwrap()));
    assert_eq!(transports.candidates(Transport::Auto), transports.allowed);
    assert_eq!(transports.view(VXLAN, Transport::Auto).may, 7);
}

#[test]
fn across_a_router_vxlan_uses_the_next_hop_and_direct_is_not_possible() {
    let routed = Route { mtu: Some(1400), ..route(2, Some("10.0.0.254")) };
    let transports = found(Transport::Auto, &peer(), routed);
    assert_eq!(transports.allowed, [DEVICE, VXLAN].into());
    assert!(transports.reasons[&DIRECT].contains("10.0.0.254"), "{:?}", transports.reasons);
    let path = transports.path.unwrap();
    assert_eq!((path.hop.to_string().as_str(), path.mtu, path.macs), ("10.0.0.254", 1400, None));
}

#[test]
fn without_plain_ethernet_only_the_tunnel_device_remains_and_the_reason_is_counted() {
    for (route, word) in [
        (route(3, None), "wireguard"),
        (route(4, None), "down"),
        (route(9, None), "not known"),
        (Route { encapsulated: true, ..route(2, None) }, "encapsulates"),
    ] {
        let transports = found(Transport::Auto, &peer(), route);
        assert_eq!(transports.allowed, [DEVICE].into());
        assert!(transports.reasons[&VXLAN].contains(word), "{:?}", transports.reasons);
        assert_eq!(transports.view(DEVICE, Transport::Auto).why, Some(Counter::DeviceRoute));
    }
}

#[test]
fn both_nodes_transport_settings_are_respected() {
    let fixed = |setting| {
        let transports = found(setting, &peer(), route(2, None));
        (transports.candidates(setting), transports.view(DEVICE, setting).why)
    };
    assert_eq!(fixed(Transport::Device), ([DEVICE].into(), None));
    assert_eq!(fixed(Transport::Vxlan), ([VXLAN].into(), None));
    assert_eq!(fixed(Transport::Direct), ([DIRECT].into(), None));
    let deaf = Peer { direct: false, ..peer() };
    let transports = found(Transport::Direct, &deaf, route(2, None));
    assert_eq!(
        transports.candidates(Transport::Direct),
        [DEVICE].into(),
        "the other side receives only what it accepts"
    );
    assert!(transports.reasons[&DIRECT].contains("settings"));
    assert_eq!(receives(Transport::Vxlan), ["device", "vxlan"]);
    assert_eq!(receives(Transport::Auto), ["device", "vxlan", "direct"]);
}

#[test]
fn a_mac_address_that_two_nodes_claim_is_nobodys() {
    let names: Vec<NodeName> = ["a", "b", "c"].map(NodeName::from).into();
    let claims = [(&names[0], OWN), (&names[1], THEIRS), (&names[2], OWN), (&names[1], THEIRS)];
    assert_eq!(macs(claims.into_iter()), [(THEIRS, names[1].clone())].into());
}
