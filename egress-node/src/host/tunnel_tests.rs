//! The tunnel device on a real kernel.

use std::net::UdpSocket;

use super::*;
use crate::host::testing::{Net, in_netns};

fn spec() -> TunnelSpec {
    TunnelSpec::default()
}

async fn message(net: &Net) -> LinkMessage {
    net.message(DEFAULT_NAME).await
}

fn vxlan_data(message: &LinkMessage) -> Vec<InfoVxlan> {
    let infos = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    let data = infos.unwrap().iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(data)) => Some(data.clone()),
        _ => None,
    });
    data.unwrap()
}

fn port_is_bound(address: &str) -> bool {
    UdpSocket::bind((address, abi::TUNNEL_PORT)).is_err()
}

#[test]
fn the_device_has_the_attributes_and_is_adopted_again() {
    in_netns("the_device_has_the_attributes_and_is_adopted_again", async || {
        let net = Net::here();
        std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1").unwrap();
        let tunnel = ensure(&net.handle, &spec()).await.unwrap();
        assert_eq!((tunnel.origin, tunnel.warnings.as_slice()), (Origin::Created, [].as_slice()));
        assert_ne!(tunnel.mac, INNER_SOURCE);

        let link = decode::link(&message(&net).await).unwrap();
        assert_eq!((link.index, link.mtu, link.up, link.mac), (tunnel.index, 1500, true, Some(tunnel.mac)));
        assert!(message(&net).await.header.flags.contains(LinkFlags::Noarp));
        let data = vxlan_data(&message(&net).await);
        for expected in [
            InfoVxlan::Port(abi::TUNNEL_PORT),
            InfoVxlan::CollectMetadata(true),
            InfoVxlan::Learning(false),
            InfoVxlan::UDPZeroCsumRX(true),
            InfoVxlan::UDPZeroCsumTX(true),
        ] {
            assert!(data.contains(&expected), "{expected:?}");
        }
        assert!(port_is_bound("127.0.0.1") && port_is_bound("::1"));
        let no_addresses: Vec<_> =
            net.handle.address().get().set_link_index_filter(tunnel.index).execute().try_collect().await.unwrap();
        assert_eq!(no_addresses, []);
        let setting = |key: &str| sysctl::read(&key.replace("DEV", DEFAULT_NAME)).unwrap();
        assert_eq!(setting("net/ipv4/conf/DEV/rp_filter").as_deref(), Some("2"));
        assert_eq!(setting("net/ipv4/conf/DEV/forwarding").as_deref(), Some("1"));

        let again = ensure(&net.handle, &spec()).await.unwrap();
        assert_eq!(again, Tunnel { origin: Origin::Adopted, ..tunnel });
    });
}

#[test]
fn small_deviations_are_put_right_without_replacing_the_device() {
    in_netns("small_deviations_are_put_right_without_replacing_the_device", async || {
        let net = Net::here();
        let tunnel = ensure(&net.handle, &spec()).await.unwrap();
        let worse = LinkUnspec::new_with_name(DEFAULT_NAME).mtu(1300).arp(true).down().build();
        net.handle.link().change(worse).execute().await.unwrap();
        assert_eq!(ensure(&net.handle, &spec()).await.unwrap(), Tunnel { origin: Origin::Adopted, ..tunnel });
        let link = decode::link(&message(&net).await).unwrap();
        assert_eq!((link.mtu, link.up), (1500, true));
        assert!(message(&net).await.header.flags.contains(LinkFlags::Noarp));
    });
}

#[test]
fn a_device_of_ours_with_other_attributes_is_replaced() {
    in_netns("a_device_of_ours_with_other_attributes_is_replaced", async || {
        let net = Net::here();
        let other = TunnelSpec { port: 4444, ..spec() };
        ensure(&net.handle, &other).await.unwrap();
        let tunnel = ensure(&net.handle, &spec()).await.unwrap();
        assert_eq!(tunnel.origin, Origin::Recreated);
        assert!(vxlan_data(&message(&net).await).contains(&InfoVxlan::Port(abi::TUNNEL_PORT)));
        let clashing = LinkUnspec::new_with_name(DEFAULT_NAME).address(INNER_SOURCE.0.to_vec()).build();
        net.handle.link().change(clashing).execute().await.unwrap();
        let tunnel = ensure(&net.handle, &spec()).await.unwrap();
        assert_eq!(tunnel.origin, Origin::Recreated);
        assert_ne!(tunnel.mac, INNER_SOURCE);
    });
}

#[test]
fn a_foreign_device_with_the_name_is_left_alone() {
    in_netns("a_foreign_device_with_the_name_is_left_alone", async || {
        let net = Net::here();
        net.bridge(DEFAULT_NAME).await;
        let error = ensure(&net.handle, &spec()).await.unwrap_err();
        assert_eq!(error, TunnelError::NameTaken { name: DEFAULT_NAME.into(), kind: "bridge".into() });
        assert!(error.to_string().contains("tunnelName"), "{error}");
        assert_eq!(delete(&net.handle, DEFAULT_NAME).await, Ok(false));
        net.delete(DEFAULT_NAME).await;
        let foreign = LinkVxlan::new(DEFAULT_NAME, 42).port(4789).build();
        net.handle.link().add(foreign).execute().await.unwrap();
        let error = ensure(&net.handle, &spec()).await.unwrap_err();
        assert_eq!(error, TunnelError::NameTaken { name: DEFAULT_NAME.into(), kind: "vxlan".into() });
    });
}

#[test]
fn a_foreign_vxlan_device_on_the_port_is_named_with_a_remedy() {
    in_netns("a_foreign_vxlan_device_on_the_port_is_named_with_a_remedy", async || {
        let net = Net::here();
        for up in [false, true] {
            let foreign = LinkVxlan::new("flannel.1", 1).port(abi::TUNNEL_PORT);
            let foreign = if up { foreign.up() } else { foreign };
            net.handle.link().add(foreign.build()).execute().await.unwrap();
            let error = ensure(&net.handle, &spec()).await.unwrap_err();
            let expected = TunnelError::PortTaken { port: abi::TUNNEL_PORT, device: "flannel.1".into(), kind: "vxlan" };
            assert_eq!(error, expected);
            assert!(error.to_string().contains("flannel.1") && error.to_string().contains("tunnelPort"), "{error}");
            assert!(get(&net.handle, DEFAULT_NAME).await.unwrap().is_none());
            net.delete("flannel.1").await;
        }
        assert_eq!(ensure(&net.handle, &spec()).await.unwrap().origin, Origin::Created);
    });
}

#[test]
fn a_process_on_the_port_is_reported_and_nothing_is_left_behind() {
    in_netns("a_process_on_the_port_is_reported_and_nothing_is_left_behind", async || {
        let net = Net::here();
        let socket = UdpSocket::bind(("0.0.0.0", abi::TUNNEL_PORT)).unwrap();
        let error = ensure(&net.handle, &spec()).await.unwrap_err();
        assert_eq!(error, TunnelError::PortTakenBySocket { port: abi::TUNNEL_PORT });
        assert!(get(&net.handle, DEFAULT_NAME).await.unwrap().is_none());
        drop(socket);
        ensure(&net.handle, &spec()).await.unwrap();
    });
}

#[test]
fn the_device_goes_and_the_port_is_free_again() {
    in_netns("the_device_goes_and_the_port_is_free_again", async || {
        let net = Net::here();
        ensure(&net.handle, &spec()).await.unwrap();
        assert_eq!(ours(&net.handle).await, Ok(vec![(net.index(DEFAULT_NAME).await, DEFAULT_NAME.to_owned())]));
        assert_eq!(delete(&net.handle, DEFAULT_NAME).await, Ok(true));
        assert_eq!(delete(&net.handle, DEFAULT_NAME).await, Ok(false));
        assert!(!port_is_bound("127.0.0.1"));
    });
}
